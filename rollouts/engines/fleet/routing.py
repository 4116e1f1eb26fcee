"""Choice of the member of a fleet for a request, and definition of groups. Pure.

The samples of a group go to one member, where they share the keys and values of their prompt, unless that member is far more loaded than
another; all other requests go to the member with the most free capacity. The same state gives the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

GroupOf = Callable[[tuple[int, ...], str], Hashable]
"""(prompt tokens, id of the request) -> key that all requests of a group share; None = no group."""


@dataclass(frozen=True)
class Cost:
    """Capacity that a request takes of a member."""

    num_requests: int  # samples that are generated at the same time
    num_tokens: int  # tokens of its prompt and of its budget

    def __post_init__(self) -> None:
        assert self.num_requests >= 1, f"num_requests is {self.num_requests}, expected at least 1"
        assert self.num_tokens >= 0, f"num_tokens is {self.num_tokens}, expected at least 0"


@dataclass(frozen=True)
class MemberLoad:
    """Load of a member, for routing."""

    is_serving: bool  # healthy, with the weights of the fleet
    num_requests: int  # samples in flight
    num_tokens: int  # tokens of the samples in flight, as in Cost
    max_requests: int
    max_tokens: int | None = None  # None = no limit
    version: int = 0  # last confirmed version of its weights

    def has_room(self, cost: Cost) -> bool:
        """Whether the request fits beside the others. A request too large for an empty member fits an empty member."""
        if self.num_requests == 0:
            return True
        fits = self.max_tokens is None or self.num_tokens + cost.num_tokens <= self.max_tokens
        return fits and self.num_requests + cost.num_requests <= self.max_requests

    @property
    def fill(self) -> float:
        """Fraction used of the fuller of its two limits, 0 to 1."""
        tokens = 0.0 if self.max_tokens is None else self.num_tokens / self.max_tokens
        return max(self.num_requests / self.max_requests, tokens)


@dataclass(frozen=True)
class FleetView:
    """The state that a choice depends on."""

    loads: Mapping[int, MemberLoad]  # by the number of the member
    homes: Mapping[Hashable, int] = field(default_factory=dict[Hashable, int])  # group -> member that has its prompt


@dataclass(frozen=True)
class Ask:
    """A request in search of a member."""

    cost: Cost
    group: Hashable = None  # None = none
    avoided: frozenset[int] = frozenset()  # members that have failed the request
    min_version: int | None = None  # newest version of the tokens it has: a sample's versions do not decrease


def choose_member(view: FleetView, ask: Ask, *, slack: int) -> int | None:
    """Return the number of the member for a request; None = the request waits.

    Members that have failed the request, or have older weights than its tokens, are chosen only if no other serves.

    Args:
        slack: samples that the home of a group may have in flight beyond those of the least loaded member.
    """
    serving = {number: load for number, load in view.loads.items() if load.is_serving}
    untried = {number: load for number, load in serving.items() if number not in ask.avoided}
    newer = {number: load for number, load in untried.items() if ask.min_version is None or load.version >= ask.min_version}
    candidates = {number: load for number, load in (newer or untried or serving).items() if load.has_room(ask.cost)}
    if not candidates:
        return None
    least = min(candidates, key=lambda number: (candidates[number].fill, candidates[number].num_tokens, number))
    home = None if ask.group is None else view.homes.get(ask.group)
    if home in candidates and candidates[home].num_requests <= candidates[least].num_requests + slack:
        return home
    return least


def group_by_prompt(prompt_tokens: tuple[int, ...], request_id: str) -> Hashable:
    """Group requests with the same prompt, as generate_group() of rollouts.generation.single_turn sends them."""
    return prompt_tokens


def group_by_request_id(prompt_tokens: tuple[int, ...], request_id: str) -> Hashable:
    """Group requests whose ids have the same first number: "000000000012-0003-0001" and "000000000012-0004-0001".

    For episodes, whose prompts grow from turn to turn: all turns of all episodes of a group go to one member. An id with one number or
    none, as of requests without a given id, belongs to no group.
    """
    words = request_id.split("-")
    numbers = [i for i, word in enumerate(words) if word.isdecimal()]
    return "-".join(words[: numbers[0] + 1]) if len(numbers) > 1 else None
