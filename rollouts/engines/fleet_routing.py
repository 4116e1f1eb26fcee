"""Which member of a fleet gets a request, and what a group is. Pure.

The samples of a group go to one member, as they share the keys and values of their prompt there, unless that member is far more loaded than
another; everything else goes to the member with the most room. Same state, same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

GroupOf = Callable[[tuple[int, ...], str], Hashable]
"""(prompt tokens, id of the request) -> what all requests of a group have in common; None = it belongs to none."""


@dataclass(frozen=True)
class Cost:
    """What a request takes of a member."""

    num_requests: int  # samples that are generated at the same time
    num_tokens: int  # of its prompt, and of all that it may generate

    def __post_init__(self) -> None:
        assert self.num_requests >= 1, f"num_requests is {self.num_requests}, expected at least 1"
        assert self.num_tokens >= 0, f"num_tokens is {self.num_tokens}, expected at least 0"


@dataclass(frozen=True)
class MemberLoad:
    """A member as routing sees it."""

    is_serving: bool  # it is healthy and has the weights
    num_requests: int  # in flight
    num_tokens: int  # of these, as in Cost
    max_requests: int
    max_tokens: int | None = None  # None = no limit
    version: int = 0  # of its weights, the last that was confirmed

    def has_room(self, cost: Cost) -> bool:
        """Whether the request fits beside the others. One that is too large for an empty member goes to an empty member."""
        if self.num_requests == 0:
            return True
        fits = self.max_tokens is None or self.num_tokens + cost.num_tokens <= self.max_tokens
        return fits and self.num_requests + cost.num_requests <= self.max_requests

    @property
    def fill(self) -> float:
        """The fuller of its two limits, 0 to 1."""
        tokens = 0.0 if self.max_tokens is None else self.num_tokens / self.max_tokens
        return max(self.num_requests / self.max_requests, tokens)


@dataclass(frozen=True)
class FleetView:
    """The state that a choice depends on."""

    loads: Mapping[int, MemberLoad]  # by the number of the member
    homes: Mapping[Hashable, int] = field(default_factory=dict[Hashable, int])  # group -> the member that has its prompt


@dataclass(frozen=True)
class Ask:
    """A request that looks for a member."""

    cost: Cost
    group: Hashable = None  # None = none
    avoided: frozenset[int] = frozenset()  # members that have failed it
    min_version: int | None = None  # of the tokens that it has: a sample's versions do not decrease


def choose_member(view: FleetView, ask: Ask, *, slack: int) -> int | None:
    """The number of the member that gets a request; None = it waits.

    Members that have failed it, and those with older weights than its tokens, are taken only where no other serves.

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
    """Requests with the same prompt are a group: what generate_group() of rollouts.generation sends."""
    return prompt_tokens


def group_by_request_id(prompt_tokens: tuple[int, ...], request_id: str) -> Hashable:
    """Requests whose ids have the same first number are a group: "000000000012-0003-0001" and "000000000012-0004-0001".

    For episodes, whose prompts grow from turn to turn: all turns of all episodes of a group go to one member. An id with one number or
    none, as of requests that were given no id, belongs to no group.
    """
    words = request_id.split("-")
    numbers = [i for i, word in enumerate(words) if word.isdecimal()]
    return "-".join(words[: numbers[0] + 1]) if len(numbers) > 1 else None
