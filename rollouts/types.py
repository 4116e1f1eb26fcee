"""Values that flow through the library. Frozen; no behaviour beyond checks on construction and (de)serialisation.

Shapes: B rows, P prompts, G group size, T tokens, K turns. Every [B, T] tensor is aligned with `tokens`: position t is about
tokens[:, t], so log_probs[:, t] = log p(tokens[:, t] | tokens[:, :t]), and 0 where t = 0 or the row has ended. In a row of several
contexts (TrainBatch.context_ids) each context is a text of its own: the rules for t = 0 hold for its first token.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from rollouts.checks import check_shapes, is_finite, require_flag, take_int, take_number, take_text, take_tuple
from rollouts.errors import ConfigError, DataError
from rollouts.outcomes import EpisodeOutcome, RewardDetails, read_metadata_of_old_files

if TYPE_CHECKING:  # values without tensors are made without torch, for example in a sandbox
    from torch import Tensor


Value = TypeVar("Value")


def change(value: Value, **changes: Any) -> Value:
    """Return a copy of a dataclass with these fields changed, without __post_init__: its cost is that of the changes.

    For changes that are known to be valid, because they come from values that were checked; dataclasses.replace checks everything anew.
    For dataclasses without slots and fields outside __init__.
    """
    copied, fields = object.__new__(type(value)), vars(value)
    changed = vars(copied)
    changed.update(fields)
    changed.update(changes)
    assert len(changed) == len(fields), f"{type(value).__name__} has no {sorted(changes.keys() - fields.keys())}"
    return copied


LogProbKind: TypeAlias = Literal["sampled", "tempered", "untempered"]
"""The distribution of log-probs: "sampled" = the one that tokens were drawn from; "tempered" = after the temperature, before top_p, top_k
and min_p (SGLang); "untempered" = the whole policy at temperature 1 (vLLM in raw mode). Where two are the same, "sampled"."""

_LOG_PROB_KINDS = get_args(LogProbKind)


class Status(StrEnum):
    """State of a Sample."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by itself: end of text, stop string, end of episode
    TRUNCATED = "truncated"  # reached its token budget
    ABORTED = "aborted"  # stopped from outside; its tokens are a valid beginning and can be continued
    FAILED = "failed"  # its generation or reward failed, and the settings say to drop such samples


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, in the field names of the OpenAI chat format."""

    role: str
    content: str | None = None
    name: str | None = None  # name of the tool or participant
    tool_calls: tuple[Mapping[str, Any], ...] | None = None  # calls of an assistant message, in the OpenAI form
    tool_call_id: str | None = None  # id of the call that a tool message answers

    def __post_init__(self) -> None:
        take_text("Message.role", self.role)
        for name in ("content", "name", "tool_call_id"):
            if getattr(self, name) is not None:
                take_text(f"Message.{name}", getattr(self, name))
        if self.tool_calls is not None:
            calls = take_tuple("Message.tool_calls", self.tool_calls, _take_call, "a sequence of tool calls, each a dict")
            object.__setattr__(self, "tool_calls", calls)

    def to_dict(self) -> dict[str, Any]:
        """Return the message as a dict, without the fields that are None (content always stays)."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            out["name"] = self.name
        if self.tool_calls is not None:
            out["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """Return the message of to_dict's values. Unknown keys are an assertion failure: they would be lost."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(data) - known)
        assert not unknown, f"message has unknown keys {unknown}; known keys are {sorted(known)}"
        calls = data.get("tool_calls")
        return cls(
            role=data["role"],
            content=data.get("content"),
            name=data.get("name"),
            tool_calls=None if calls is None else tuple(calls),
            tool_call_id=data.get("tool_call_id"),
        )


PromptContent: TypeAlias = "str | tuple[Message, ...]"


def _take_call(call: Any) -> Mapping[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"Message.tool_calls holds {call!r}, expected a dict")
    return cast("Mapping[str, Any]", call)


def take_message(where: str, value: Any) -> Message:
    """Return a message as it is, and a dict in the format of OpenAI as a message. Raises DataError for anything else."""
    if isinstance(value, Message):
        return value
    known = [f.name for f in fields(Message)]
    if not isinstance(value, Mapping) or "role" not in value or not set(cast("Mapping[str, Any]", value)) <= set(known):
        raise DataError(f"{where} holds {value!r}, expected a Message, or a dict with a role and no other keys than {', '.join(known)}")
    return Message.from_dict(cast("Mapping[str, Any]", value))


def _take_content(where: str, value: Any) -> PromptContent:
    """Return a text as it is, and messages as a tuple of Message."""
    if isinstance(value, str):
        return value
    expected = "a text, or a sequence of messages, each a Message or a dict"
    return take_tuple(where, value, lambda message: take_message(where, message), expected)


def _take_metadata(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is {value!r}, expected a dict")


def _content_to_json(content: PromptContent) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [message.to_dict() for message in content]


def _content_from_json(content: str | Sequence[Mapping[str, Any] | Message]) -> PromptContent:
    if isinstance(content, str):
        return content
    return tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in content)


METADATA_KEYS: Mapping[str, str] = MappingProxyType({
    "ground_truth": "right answer, for rewards and environments",
    "answer": "solution that holds the right answer; read from rows of data without a ground_truth",
    "reward_model": "object of verl's rows with a ground_truth; read as the answer",
    "output": "answer in Alpaca's rows; read as the answer",
    "correct": "whether the response is right, for rewards.answers.compute_reward",
    "tests": "tests of a program, for rewards.code.unit_tests, as the next two",
    "test_setup": "text before all tests",
    "entry_point": "name that the program defines",
    "expression": "problem of the calculator's games",
    "start": "first cell of a grid world",
    "goal": "last cell of a grid world",
    "verifiers_task": "data of a task of verifiers, for gateway.frameworks.verifiers",
})  # fmt: skip
"""The keys of `metadata` that the library reads, with their meanings. All others are the user's alone: the library passes them through from
a row of data to its prompt, its samples and the reward function. It writes none of them into a sample; rows become prompts with
"ground_truth", and games are prompts with their own keys."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Input of one rollout: the question, and the data that the reward needs to judge the answer."""

    content: PromptContent  # a text is tokenized as it stands; messages go through the chat template
    index: int = 0  # position in the stream of prompts: unique and rising over a run, epochs included
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the user's: "ground_truth" and whatever else the reward reads

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            object.__setattr__(self, "content", _take_content("Prompt.content", self.content))
        if type(self.index) is not int:
            object.__setattr__(self, "index", take_int("Prompt.index", self.index))
        _take_metadata("Prompt.metadata", self.metadata)

    def to_dict(self) -> dict[str, Any]:
        """Return the prompt as plain JSON values."""
        return {"content": _content_to_json(self.content), "index": self.index, "metadata": dict(self.metadata)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prompt:
        """Return the prompt of to_dict's values."""
        return cls(content=_content_from_json(data["content"]), index=data["index"], metadata=dict(data["metadata"]))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action of the policy in an episode: its tokens and its reward."""

    start: int  # position of its first token in Sample.tokens
    end: int  # position behind its last token
    state: str | None = None  # key of the observation before the action: equal keys are one anchor state; None = compared with no other
    reward: float | None = None  # reward of this environment step, 0 included; None = unknown

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if type(getattr(self, name)) is not int:
                object.__setattr__(self, name, take_int(f"Turn.{name}", getattr(self, name)))
        if self.reward is not None and type(self.reward) is not float:
            object.__setattr__(self, "reward", take_number("Turn.reward", self.reward))
        if self.state is not None and type(self.state) is not str:
            take_text("Turn.state", self.state)

    def to_dict(self) -> dict[str, Any]:
        """Return the turn as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Experts that the routers of a mixture of experts chose for a row of tokens, for their replay in training (models/replay.py).

    The entry of a token is about the pass that read it, so the last token of a completion, which no pass has read, has none.
    """

    data: bytes  # [tokens, num_routers, top_k] int16, little-endian; -1 = not recorded
    num_routers: int  # routers, in the order in which a pass calls them
    top_k: int  # experts of a token in each router

    def __post_init__(self) -> None:
        assert self.num_routers >= 1, f"num_routers is {self.num_routers}, expected at least 1"
        assert self.top_k >= 1, f"top_k is {self.top_k}, expected at least 1"
        assert len(self.data) % self.width == 0, f"data has {len(self.data)} bytes, expected a multiple of {self.width}"

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return 2 * self.num_routers * self.top_k

    def __len__(self) -> int:
        return len(self.data) // self.width

    def take(self, num_tokens: int) -> RoutedExperts:
        """Return the entries of the first tokens, and entries without experts for further ones."""
        data = self.data[: num_tokens * self.width]
        return replace(self, data=data + b"\xff" * (num_tokens * self.width - len(data)))

    def shift(self, num_tokens: int) -> RoutedExperts:
        """Return the entries behind num_tokens entries without experts; for a negative number, without the first -num_tokens entries."""
        return replace(self, data=b"\xff" * (num_tokens * self.width) + self.data[max(0, -num_tokens) * self.width :])

    def fill(self, later: RoutedExperts) -> RoutedExperts:
        """Fill the entries without experts, and the entries behind the end, from a later record of the same tokens.

        A token keeps the experts of the pass that sampled what follows it.
        """
        assert (self.num_routers, self.top_k) == (later.num_routers, later.top_k), "the two records are of different models"
        width, empty = self.width, b"\xff" * self.width
        rows = (self.data[at : at + width] for at in range(0, len(self.data), width))
        filled = b"".join(later.data[i * width : (i + 1) * width] or row if row == empty else row for i, row in enumerate(rows))
        return replace(self, data=filled + later.data[len(filled) :])

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values, data in base64."""
        return {"data": b64encode(self.data).decode(), "num_routers": self.num_routers, "top_k": self.top_k}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RoutedExperts:
        """Return the record of to_dict's values."""
        return cls(data=b64decode(data["data"]), num_routers=data["num_routers"], top_k=data["top_k"])


def _count_ids(counts: tuple[int, ...]) -> int:
    return sum(counts) + counts.count(-1)


@dataclass(frozen=True, kw_only=True)
class KeptTokens:
    """Sets of token ids that top-p, top-k and min-p left for each token of a row: the token was drawn from the softmax over its set.

    A trainer that computes a token's log-prob over the same set compares like with like: the importance ratio of an unchanged policy is 1
    (the sampling mask of DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """

    data: bytes = b""  # the ids of all sets behind each other, int32, little-endian, rising in each set
    counts: tuple[int, ...] = ()  # ids in the set of each token; 0 = the whole vocabulary; -1 = the token was not drawn

    def __post_init__(self) -> None:
        found, told = len(self.data), 4 * _count_ids(self.counts)
        assert min(self.counts, default=0) >= -1, f"counts has {min(self.counts)}, expected numbers of ids, 0 or -1"
        assert found == told, f"data has {found} bytes, expected {told} for the counts {self.counts}"

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def whole(cls, num_tokens: int) -> KeptTokens:
        """Return the record of tokens that were drawn from the whole vocabulary."""
        return cls(counts=(0,) * num_tokens)

    @classmethod
    def undrawn(cls, num_tokens: int) -> KeptTokens:
        """Return the record of tokens that were not drawn, such as those of a prompt."""
        return cls(counts=(-1,) * num_tokens)

    @property
    def cuts(self) -> bool:
        """Whether any token was drawn from less than the whole vocabulary."""
        return len(self.data) > 0

    def __add__(self, later: KeptTokens) -> KeptTokens:
        return KeptTokens(data=self.data + later.data, counts=self.counts + later.counts)

    def cut(self, start: int, end: int) -> KeptTokens:
        """Return the sets of the tokens from start on and before end."""
        first = 4 * _count_ids(self.counts[:start])
        counts = self.counts[start:end]
        return KeptTokens(data=self.data[first : first + 4 * _count_ids(counts)], counts=counts)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values, data in base64."""
        return {"data": b64encode(self.data).decode(), "counts": list(self.counts)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KeptTokens:
        """Return the record of to_dict's values."""
        return cls(data=b64decode(data["data"]), counts=tuple(data["counts"]))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One trajectory, one row of a batch: prompt tokens followed by response tokens.

    All per-token fields have the length of `tokens`. A Sample without tokens is still PENDING (or FAILED). An episode whose history the
    chat template rewrote on the way has several contexts one after the other in `tokens`: each begins with the history that the model was
    given from then on, and its tokens see no token of another context. Together they are one row: one trajectory, one reward.
    """

    prompt: PromptContent = ""
    tokens: tuple[int, ...] = ()  # prompt and response
    loss_mask: tuple[float, ...] = ()  # 0 = not trained on; 1 = trained on; fractions are weights
    rollout_log_probs: tuple[float, ...] | None = None  # nats, under `temperature`; 0 where the policy did not sample
    weight_versions: tuple[int, ...] | None = None  # weight version that sampled each token; -1 where none did
    segment_log_probs: tuple[float, ...] | None = None  # nats: where computed, under the weights one version newer than
    # those that sampled the token (algorithms/proximal.py), elsewhere equal to rollout_log_probs; None = never computed
    recompute_version: int = -1  # weight version that segment_log_probs were last computed under; -1 = never
    segment_versions: tuple[int, ...] | None = None  # weight version of each of segment_log_probs; -1 = not computed (yet)
    response: str = ""  # text of the response, for people and rewards; never tokenized again
    reward: float | None = None
    reward_details: RewardDetails | None = None  # words of the reward function beside the number; None = nothing
    trainable: bool = True  # False = a baseline: counts in the statistics of its group, and is never trained on
    status: Status = Status.PENDING
    index: int = 0  # unique and rising over a run
    group_index: int = 0  # equal for the samples of one prompt's rollout, distinct across rollouts
    temperature: float = 1.0  # temperature of rollout_log_probs
    truncated_sampling: bool = False  # True = top_p, top_k or min_p cut the distribution that tokens were drawn from
    log_prob_kind: LogProbKind = "sampled"  # distribution of rollout_log_probs
    untempered_log_probs: tuple[float, ...] | None = None  # nats, of the whole policy at temperature 1; None = not asked for
    routed_experts: RoutedExperts | None = None  # experts of each token as the engine chose them; None = not recorded
    kept_tokens: KeptTokens | None = None  # sets that truncated sampling drew each token from; None = not recorded, or none was cut
    turns: tuple[Turn, ...] | None = None  # actions of an episode, in order; None = not an episode
    messages: tuple[Message, ...] | None = None  # the whole conversation; None = prompt and response are all of it
    action_messages: tuple[int, ...] | None = None  # positions of the policy's actions in messages; None = see samples.find_actions
    episode: EpisodeOutcome | None = None  # course and end of the episode; None = not an episode, or unknown
    subgroup: str | None = None  # samples of a group are compared with those of their subgroup alone, such as a role in matches
    context_starts: tuple[int, ...] = ()  # positions in tokens, rising, where a further context begins; () = all tokens are one
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the user's, from the prompt; the library writes nothing into it

    def __post_init__(self) -> None:
        self._take_plain()
        n, where = len(self.tokens), f"sample {self.index} (group {self.group_index})"
        assert len(self.loss_mask) == n, f"{where}: loss_mask has {len(self.loss_mask)} entries for {n} tokens"
        assert all(map((0.0).__le__, self.loss_mask)), f"{where}: loss_mask has a negative or NaN entry: {self.loss_mask}"
        assert _is_sum_finite(self.loss_mask), f"{where}: loss_mask has an infinite entry: {self.loss_mask}"
        for name in ("rollout_log_probs", "untempered_log_probs"):
            column = getattr(self, name)
            assert column is None or len(column) == n, (
                f"{where}: {name} has {len(column)} entries for {n} tokens; it is aligned with tokens, 0 for the prompt"
            )
        if self.weight_versions is not None:
            assert len(self.weight_versions) == n, (
                f"{where}: weight_versions has {len(self.weight_versions)} entries for {n} tokens; "
                "it is aligned with tokens, -1 for the prompt"
            )
        if self.routed_experts is not None:
            assert len(self.routed_experts) == n, f"{where}: routed_experts has {len(self.routed_experts)} entries for {n} tokens"
        if self.kept_tokens is not None:
            assert len(self.kept_tokens) == n, f"{where}: kept_tokens has {len(self.kept_tokens)} entries for {n} tokens"
        if self.segment_log_probs is not None:
            assert len(self.segment_log_probs) == n, f"{where}: segment_log_probs has {len(self.segment_log_probs)} entries for {n} tokens"
        if self.segment_versions is not None:
            assert self.segment_log_probs is not None, f"{where} has segment_versions, but no segment_log_probs that they are about"
            assert len(self.segment_versions) == n, f"{where}: segment_versions has {len(self.segment_versions)} entries for {n} tokens"
        assert self.temperature > 0, f"{where}: temperature is {self.temperature}, expected > 0 (log-probs under 0 are undefined)"
        starts = (0, *self.context_starts, n)
        assert not self.context_starts or all(a < b for a, b in pairwise(starts)), (
            f"{where}: context_starts is {self.context_starts}, expected rising positions inside the {n} tokens, without 0"
        )
        position = 0
        for turn in self.turns or ():
            assert position <= turn.start < turn.end <= n, f"{where}: {turn} does not lie behind the turn before it, inside the {n} tokens"
            position = turn.end

    def _take_plain(self) -> None:
        """Turn values into the types of the fields, or raise DataError. Columns of plain values cost one look at their types."""
        take: dict[str, Any] = {}
        if not isinstance(self.prompt, str):
            take["prompt"] = _take_content("Sample.prompt", self.prompt)
        for name, of, plain in _COLUMNS:
            value = getattr(self, name)
            if value is not None and not (type(value) is tuple and plain.issuperset(map(type, cast("tuple[Any, ...]", value)))):
                where = f"Sample.{name}"
                take[name] = take_tuple(where, value, partial(of, where), "a sequence of numbers")
        for name in ("rollout_log_probs", "segment_log_probs", "untempered_log_probs"):
            value = take.get(name, getattr(self, name))
            if value and not _is_sum_finite(value):
                found = [log_prob for log_prob in value if not is_finite(log_prob)]
                raise DataError(f"Sample.{name} holds {found[0] if found else value}, expected finite log-probs: a drawn token has one")
        for name in ("index", "group_index", "recompute_version"):
            if type(getattr(self, name)) is not int:
                take[name] = take_int(f"Sample.{name}", getattr(self, name))
        if type(self.temperature) is not float or self.temperature == math.inf:
            take["temperature"] = take_number("Sample.temperature", self.temperature)
        if self.reward is not None and type(self.reward) is not float:
            number = float(self.reward) if isinstance(self.reward, bool) else self.reward  # right or wrong, as of a comparison
            take["reward"] = take_number("Sample.reward", number, finite=False)  # judged where it is used
        if type(self.status) is not Status:
            try:
                take["status"] = Status(self.status)
            except ValueError as error:
                raise DataError(f"Sample.status is {self.status!r}, expected one of {', '.join(Status)}") from error
        if self.turns is not None and (type(self.turns) is not tuple or any(type(turn) is not Turn for turn in self.turns)):
            take["turns"] = take_tuple("Sample.turns", self.turns, _take_turn, "a sequence of Turn, or None")
        if type(self.response) is not str:
            take_text("Sample.response", self.response)
        if self.subgroup is not None and type(self.subgroup) is not str:
            take_text("Sample.subgroup", self.subgroup)
        take |= self._take_choices()
        messages, where = self.messages, "Sample.messages"
        if messages is not None and (type(messages) is not tuple or any(type(message) is not Message for message in messages)):
            take["messages"] = take_tuple(where, messages, partial(take_message, where), "a sequence of messages, or None")
        _take_metadata("Sample.metadata", self.metadata)
        for name, value in take.items():
            object.__setattr__(self, name, value)

    def _take_choices(self) -> dict[str, Any]:
        take: dict[str, Any] = {}
        for name in ("trainable", "truncated_sampling"):
            if type(getattr(self, name)) is not bool:
                take[name] = require_flag(getattr(self, name), f"Sample.{name}", error=DataError)
        if self.log_prob_kind not in _LOG_PROB_KINDS:
            raise DataError(f"Sample.log_prob_kind is {self.log_prob_kind!r}, expected one of {', '.join(_LOG_PROB_KINDS)}")
        for name, of in _VALUES:
            value = getattr(self, name)
            if value is not None and type(value) is not of:
                raise DataError(f"Sample.{name} is {value!r:.200}, expected a value of the type {of.__name__}, or None")
        return take

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as plain JSON values."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["prompt"] = _content_to_json(self.prompt)
        out["status"] = self.status.value
        out["metadata"] = dict(self.metadata)
        for name, _, _ in _COLUMNS:
            out[name] = None if out[name] is None else list(out[name])
        for name in ("turns", "messages"):
            out[name] = None if out[name] is None else [item.to_dict() for item in out[name]]
        for name, _ in _VALUES:
            out[name] = None if out[name] is None else out[name].to_dict()
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Return the sample of to_dict's values, also of a file that has them in metadata. Does not change its argument."""
        values = read_metadata_of_old_files(data)
        values["prompt"] = _content_from_json(values.get("prompt", ""))
        values["status"] = Status(values.get("status", Status.PENDING))
        values["metadata"] = dict(values.get("metadata", {}))
        for name, _, _ in _COLUMNS:
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        if values.get("turns") is not None:
            values["turns"] = tuple(turn if isinstance(turn, Turn) else Turn(**turn) for turn in values["turns"])
        for name, of in _VALUES:
            if values.get(name) is not None and not isinstance(values[name], of):
                values[name] = of.from_dict(values[name])
        return cls(**values)


def _is_sum_finite(values: Sequence[float]) -> bool:
    try:
        return math.isfinite(sum(values))
    except OverflowError:  # an integer beyond floats
        return False


def _take_turn(turn: Any) -> Turn:
    if not isinstance(turn, Turn):
        raise DataError(f"Sample.turns holds {turn!r}, expected a Turn")
    return turn


def _take_weight(where: str, value: Any) -> float:
    return float(value) if isinstance(value, bool) else value if isinstance(value, float) else take_number(where, value)


def _take_log_prob(where: str, value: Any) -> float:
    return value if isinstance(value, float) else take_number(where, value)


_NUMBERS = frozenset({int, float})
_COLUMNS: tuple[
    tuple[str, Callable[[str, Any], Any], frozenset[type]], ...
] = (  # columns of a Sample: function that takes an entry, plain types
    ("tokens", take_int, frozenset({int})),
    ("loss_mask", _take_weight, _NUMBERS),
    ("rollout_log_probs", _take_log_prob, _NUMBERS),
    ("weight_versions", take_int, frozenset({int})),
    ("segment_log_probs", _take_log_prob, _NUMBERS),
    ("segment_versions", take_int, frozenset({int})),
    ("untempered_log_probs", _take_log_prob, _NUMBERS),
    ("action_messages", take_int, frozenset({int})),
    ("context_starts", take_int, frozenset({int})),
)


_VALUES: tuple[tuple[str, type[Any]], ...] = (  # fields of a Sample that hold another value
    ("episode", EpisodeOutcome),
    ("reward_details", RewardDetails),
    ("routed_experts", RoutedExperts),
    ("kept_tokens", KeptTokens),
)


Group: TypeAlias = tuple[Sample, ...]
"""The samples of one prompt's rollout, in the order of their index."""

FilterFn: TypeAlias = Callable[[Group], bool | Awaitable[bool]]
"""Group -> True to keep it, False to drop it. Sync, or async where groups are generated in an event loop."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of the sampling of one completion."""

    max_tokens: int = 256  # most tokens to generate
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # nucleus: keep the smallest set of tokens with at least this probability; 1 = off
    top_k: int = 0  # keep the k most probable tokens; 0 = off
    min_p: float = 0.0  # keep tokens with at least this share of the largest probability; 0 = off
    stop_token_ids: tuple[int, ...] = ()  # stop tokens besides the tokenizer's end of text; part of the output
    stop: tuple[str, ...] = ()  # strings that end the text; their tokens are part of the output
    seed: int | None = None  # same prompt, weights and seed: same completion, whatever else runs; None = engine's own
    untempered_log_probs: bool = False  # also return log-probs under the policy at temperature 1 without truncation
    kept_tokens: bool = False  # also return the sets that top_p, top_k and min_p left; for engines with EngineFeature.KEPT_TOKENS

    def __post_init__(self) -> None:
        try:
            take: dict[str, Any] = {name: take_int(f"SamplingParams.{name}", getattr(self, name)) for name in ("max_tokens", "top_k")}
            take |= {name: take_number(f"SamplingParams.{name}", getattr(self, name)) for name in ("temperature", "top_p", "min_p")}
            if self.seed is not None:
                take["seed"] = take_int("SamplingParams.seed", self.seed)
            texts = partial(take_text, "SamplingParams.stop")
            take["stop"] = take_tuple("SamplingParams.stop", self.stop, texts, 'a tuple of texts, as ("END",)')
            ids = partial(take_int, "SamplingParams.stop_token_ids")
            take["stop_token_ids"] = take_tuple("SamplingParams.stop_token_ids", self.stop_token_ids, ids, "a tuple of token ids, as (2,)")
        except DataError as error:
            raise ConfigError(str(error)) from None
        for name, value in take.items():
            if getattr(self, name) is not value:
                object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True if the most probable token is taken at every position."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """True if tokens are drawn from a cut distribution, whose log-probs a trainer computes only where the sets are recorded."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    def new(self, *, greedy: bool | None = None, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed; greedy=True is short for temperature=0, top_p=1, top_k=0, min_p=0."""
        if greedy is not None:
            assert "temperature" not in changes, "pass either greedy or temperature, not both"
            changes["temperature"] = 0.0 if greedy else (self.temperature or 1.0)
            if greedy:
                changes = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **changes}
        return replace(self, **changes)


FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Answer of an engine to one request."""

    request_id: str
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_log_probs: tuple[float, ...]  # nats, of the distribution that log_prob_kind names (greedy: whole, at temperature 1)
    output_versions: tuple[int, ...]  # weight version that sampled each token, from 0
    finish_reason: FinishReason
    temperature: float = 1.0  # temperature of output_log_probs (greedy and untempered: 1)
    truncated_sampling: bool = False  # True if top_p, top_k or min_p cut the distribution that the tokens were drawn from
    log_prob_kind: LogProbKind = "sampled"  # distribution of output_log_probs
    untempered_log_probs: tuple[float, ...] | None = None  # nats, of the whole policy at temperature 1; None = not asked for
    routed_experts: RoutedExperts | None = None  # experts of input and output tokens; None = not recorded
    kept_tokens: KeptTokens | None = None  # sets that the output tokens were drawn from; None = not recorded

    def __post_init__(self) -> None:
        n = len(self.output_tokens)
        if self.routed_experts is not None:
            found, whole = len(self.routed_experts), len(self.input_tokens) + n
            assert found == whole, f"completion {self.request_id}: routed_experts has {found} entries for {whole} tokens"
        for name in ("output_log_probs", "output_versions", "untempered_log_probs", "kept_tokens"):
            value = getattr(self, name)
            assert value is None or len(value) == n, f"completion {self.request_id}: {name} has {len(value)} entries for {n} output tokens"
        unknown = n and min(self.output_versions) < 0
        assert not unknown, f"completion {self.request_id}: output_versions is {self.output_versions}, expected numbers from 0"

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return len(self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The rollouts of one RL step: B = P * G samples, ragged, groups whole and in the order of their prompts."""

    samples: tuple[Sample, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # counts and timings of its production

    @property
    def tokens(self) -> list[list[int]]:
        """Prompt and response tokens of each sample."""
        return [list(s.tokens) for s in self.samples]

    @property
    def loss_masks(self) -> list[list[float]]:
        """Loss mask of each sample, aligned with its tokens."""
        return [list(s.loss_mask) for s in self.samples]

    @property
    def rewards(self) -> list[float]:
        """Reward of each sample. NaN where a sample has none."""
        return [math.nan if s.reward is None else s.reward for s in self.samples]

    @property
    def response_lengths(self) -> list[int]:
        """Number of trained tokens of each sample."""
        return [sum(m > 0 for m in s.loss_mask) for s in self.samples]


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnLevels:
    """Parts of the advantages of turns, for people and logs. Columns [B, K] are 0 where there is no such turn."""

    episode: Tensor  # [B] advantage of the episode in its group
    rewards: Tensor  # [B, K] rewards of steps as they counted, with defaults and a final reward
    returns: Tensor  # [B, K] discounted rewards from each turn on
    anchors: Tensor  # [B, K] int64, number of the anchor: the turns of its group from the same state; -1 = no turn
    step: Tensor  # [B, K] advantage of the turn in its anchor
    combined: Tensor  # [B, K] advantage of the turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """Environment turns of each row. K = most turns in a row; where there is no turn, ids and states are -1, rewards 0."""

    ids: Tensor  # [B, T] int64, turn index of each token, -1 outside actions
    states: Tensor  # [B, K] int64, anchor-state id, -1 = no such turn
    rewards: Tensor  # [B, K] float32, step rewards; NaN = unknown
    levels: TurnLevels | None = None  # parts of the advantages, where the estimator compares turns


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardComponents:
    """Scores of the named parts of each row's reward, for estimators that compare each part by itself."""

    names: tuple[str, ...]  # K names
    scores: Tensor  # [B, K] float32, NaN where a row has no score of that name


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSets:
    """KeptTokens as tensors: the sets of token ids that the distributions of some tokens run over. A shape is that of the tokens."""

    ids: Tensor  # [M] int32, token ids of all sets, in any order
    starts: Tensor  # [shape] int64, place of the first id of each set in ids
    counts: Tensor  # [shape] int64, ids in each set; 0 = the whole vocabulary


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """Samples as tensors, float32 and int64, padded on the right. The algorithm's view; backends compute no pad token.

    Tensors are never written in place: a function that fills a column returns a new TrainBatch.
    """

    tokens: Tensor  # [B, T] int64; pad_id after the end of a row
    lengths: Tensor  # [B] int64, real tokens in each row
    loss_mask: Tensor  # [B, T] float32; 0 = not trained on, else weight
    rewards: Tensor  # [B] float32
    group_ids: Tensor  # [B] int64 in [0, P), any order
    trainable: Tensor  # [B] bool; False = counts in group statistics only
    rollout_log_probs: Tensor | None = None  # [B, T] behaviour policy, as the engine reported
    temperatures: Tensor | None = None  # [B] float32 > 0 that log-probs are computed under; None = 1
    old_log_probs: Tensor | None = None  # [B, T] anchor of the ratio; None = rollout_log_probs
    prox_log_probs: Tensor | None = None  # [B, T] proximal policy of decoupled objectives
    segment_log_probs: Tensor | None = None  # [B, T] under the weights one version after those that sampled the token
    segment_mask: Tensor | None = None  # [B, T] bool; True = segment_log_probs were computed, False = they are rollout_log_probs
    ref_log_probs: Tensor | None = None  # [B, T] reference policy
    teacher_log_probs: Tensor | None = None  # [B, T] teacher, of these tokens
    teacher_ids: Tensor | None = None  # [B, T, K] int32, the K tokens that the teacher finds most probable in place of each
    teacher_tops: Tensor | None = None  # [B, T, K + 1] float32, the teacher's log-probs of teacher_ids, then of all other tokens together
    teacher_beta: Tensor | None = None  # [B] in [0, 1], equal in all rows: divergence to compute, see divergences.chunked_divergence
    values: Tensor | None = None  # [B, T] critic at collection time
    weight_versions: Tensor | None = None  # [B, T] int64, -1 where the policy did not sample
    policy_versions: Tensor | None = None  # [B] float32, weight version of the trainer, equal in all rows: the version of the
    # engines, plus the fraction of the steps to the next sync that are done
    routed_experts: Tensor | None = None  # [B, T, routers, k] int16, experts to choose instead of the model's own choice; -1 = its own
    targets: Tensor | None = None  # [B, T] int64, tokens whose log-probs are computed, each in place of the token there; None = the tokens
    kept: KeptSets | None = None  # [B, T] sets that tokens were drawn from, for log-probs and entropies; None = the whole vocabulary
    context_ids: Tensor | None = None  # [B, T] int64 rising from 0 in each row: a token sees its own context only; None = one context a row
    turns: Turns | None = None
    reward_components: RewardComponents | None = None
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    loss_weights: Tensor | None = None  # [B, T], from Algorithm.weigh over the whole optimizer step
    importance_weights: Tensor | None = None  # [B, T] detached; multiplies the policy term only
    selected: Tensor | None = None  # [B, T] bool; tokens that a loss treats apart, for example KL-Cov's
    kl_coef: Tensor | None = None  # [B] coefficient of a KL controller, equal in all rows; None = the algorithm's own
    router_balance: Tensor | None = None  # [B] coefficient of the load-balancing loss of the model's routers, equal in all rows
    dropout: bool | None = None  # True = the model's dropout is active in training on the batch; None = see has_dropout
    skip_redundant: bool = False  # True = what several rows share may be computed once, see batches.find_shared_prompts
    pair_ids: Tensor | None = None  # [B] int64, equal in two rows that the loss compares; -1 = no pair; None = it compares no rows
    recorded: Tensor | None = None  # [B] int64, numbers under which forward_backward keeps what its loss tells of the tokens of a row, -1 =
    # not kept; for backends with BackendFeature.RECORDS. None = the loss tells nothing of single tokens

    @property
    def has_dropout(self) -> bool:
        """True if forward_backward computes this batch with the model's dropout.

        The default is True for batches without log-probs of another pass, as in supervised training: with them dropout would add noise to
        the difference.
        """
        compared = (self.rollout_log_probs, self.old_log_probs, self.prox_log_probs, self.segment_log_probs, self.ref_log_probs,
                    self.teacher_log_probs)  # fmt: skip
        return all(column is None for column in compared) if self.dropout is None else self.dropout

    def __post_init__(self) -> None:
        assert self.tokens.dim() == 2, f"tokens has shape {tuple(self.tokens.shape)}, expected [B, T]"
        b, t = self.tokens.shape
        per_token = ("loss_mask", "rollout_log_probs", "old_log_probs", "prox_log_probs", "segment_log_probs", "segment_mask",
                     "ref_log_probs", "teacher_log_probs", "values", "weight_versions", "targets", "context_ids", "advantages",
                     "returns", "loss_weights", "importance_weights", "selected")  # fmt: skip
        check_shapes(**{name: (getattr(self, name), (b, t)) for name in per_token})
        per_row = ("lengths", "rewards", "group_ids", "trainable", "temperatures", "kl_coef", "router_balance", "policy_versions",
                   "teacher_beta", "pair_ids", "recorded")  # fmt: skip
        check_shapes(**{name: (getattr(self, name), (b,)) for name in per_row})
        check_shapes(routed_experts=(self.routed_experts, (b, t, None, None)))
        num_tops = None if self.teacher_ids is None else self.teacher_ids.shape[-1] + 1
        check_shapes(teacher_ids=(self.teacher_ids, (b, t, None)), teacher_tops=(self.teacher_tops, (b, t, num_tops)))
        if self.kept is not None:
            check_shapes(kept_starts=(self.kept.starts, (b, t)), kept_counts=(self.kept.counts, (b, t)))
        if self.reward_components is not None:
            check_shapes(reward_components=(self.reward_components.scores, (b, len(self.reward_components.names))))
        if self.turns is not None:
            k = self.turns.states.shape[-1]
            check_shapes(turns_ids=(self.turns.ids, (b, t)), turns_states=(self.turns.states, (b, k)))
            check_shapes(turns_rewards=(self.turns.rewards, (b, k)))
            if self.turns.levels is not None:
                shapes = {f.name: (b,) if f.name == "episode" else (b, k) for f in fields(TurnLevels)}
                check_shapes(**{f"levels_{name}": (getattr(self.turns.levels, name), shape) for name, shape in shapes.items()})

    @property
    def num_rows(self) -> int:
        """Return B."""
        return self.tokens.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """Load of the experts of a mixture-of-experts model: sums over some tokens, so loads of parts add up. L routers, E experts."""

    counts: Tensor  # [L, E] times that a router chose an expert
    probs: Tensor  # [L, E] sums of the softmax of a router's logits; has a gradient if the batch has router_balance
    entropy: Tensor  # [L] sums of the entropy of that softmax, nats
    num_tokens: Tensor  # [] tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOutputs:
    """Outputs of a model for the tokens of a batch. Aligned with tokens; 0 where t = 0 and on pads."""

    log_probs: Tensor  # [B, T] float32, has a gradient in forward_backward
    entropy: Tensor | None = None  # [B, T] nats, of the distribution that tokens[:, t] was drawn from
    values: Tensor | None = None  # [B, T] estimates of a critic
    divergence: Tensor | None = None  # [B, T] nats, between policy and teacher, of batches with teacher_beta; has a gradient as log_probs
    tops: Tensor | None = None  # [B, T, 2 K + 1] a teacher's log-probs of its K most probable tokens, of all others, and the K ids
    expert_load: ExpertLoad | None = None  # load of all real tokens, prompts included; None = no routers that can be recorded


TOKEN_PREFIX = "token/"
"""Beginning of the names of columns among the metrics of a loss, see LossOutput."""


class LossOutput(NamedTuple):
    """Scalar to differentiate, and metrics for the log.

    The loss is a weighted SUM over tokens, so losses of micro-batches add up to the loss of their union. A metric is a mean over the
    tokens with loss_mask > 0, except names that begin with `max_` or `min_`; see merge_metrics. For a batch with `recorded` rows there may
    be columns [B, T] without gradient besides, under names that begin with TOKEN_PREFIX: no metrics, but values of single tokens.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


Transform: TypeAlias = Callable[[TrainBatch], TrainBatch]
LossFn: TypeAlias = Callable[[TokenOutputs, TrainBatch], LossOutput]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A policy-optimisation algorithm: three pure functions and the columns they need."""

    estimate: Transform  # once per rollout batch, no gradient: rewards -> advantages (and returns)
    weigh: Callable[[TrainBatch], Tensor]  # once per optimizer step: loss_mask -> loss_weights [B, T]
    loss: LossFn  # once per micro-batch
    requires: frozenset[str] = frozenset()  # TrainBatch columns the loop must fill; "entropy" asks for TokenOutputs.entropy
    loss_only: frozenset[str] = frozenset()  # columns of `requires` that estimate and weigh do not read: where a step is one single
    # update, the loop fills old_log_probs and prox_log_probs inside the loss and saves a forward pass. Replace it together with `estimate`
    reads_rewards: bool = True  # False = samples may come without rewards, as in distillation; filters and `estimate` read none
    compares_pairs: bool = False  # True = `estimate` fills pair_ids, and the loss compares two rows; it reads no rollout_log_probs

    def __post_init__(self) -> None:
        assert self.loss_only <= self.requires, f"loss_only is {set(self.loss_only)}, which requires {set(self.requires)} does not hold"


@dataclass(frozen=True, kw_only=True)
class KLControl:
    """KL coefficient and the rule of its change. Replaced, never changed: update_kl_control returns the next one."""

    kl_coef: float  # present coefficient of the KL term; at least 0
    target: float | None = None  # target of the KL per token, in nats; None = the coefficient is fixed
    horizon: float = 10_000.0  # samples over which the coefficient changes by at most a fifth (Ziegler et al. 2019: K_beta = 0.1)

    def __post_init__(self) -> None:
        for name, value, good, expected in (
            ("target", self.target, self.target is None or _finite(self.target) > 0, "more than 0, or None for a fixed kl_coef"),
            ("kl_coef", self.kl_coef, _finite(self.kl_coef) >= 0, "a finite number, at least 0"),
            ("kl_coef", self.kl_coef, self.target is None or self.kl_coef > 0, "more than 0 where there is a target: no factor changes 0"),
            ("horizon", self.horizon, _finite(self.horizon) > 0, "a finite number of samples, more than 0"),
        ):
            if not good:
                raise ConfigError(f"KLControl.{name} is {value!r}, expected {expected}")


def _finite(value: object) -> float:
    """Return the value if it is a finite number, else NaN, which is in no range."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else math.nan
