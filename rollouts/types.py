"""The values that flow through the library. Frozen; no behaviour beyond checks on construction and (de)serialisation.

Shapes: B rows, P prompts, G group size, T tokens, K turns. Every [B, T] tensor is aligned with `tokens`: position t is about
tokens[:, t], so log_probs[:, t] = log p(tokens[:, t] | tokens[:, :t]), and 0 where t = 0 or the row has ended. In a row of several
contexts (TrainBatch.context_ids) each of them is a text of its own: what is said of t = 0 holds for the first token of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from rollouts.checks import check_shapes


class Status(StrEnum):
    """Where a Sample is in its life."""

    PENDING = "pending"  # not generated yet
    COMPLETED = "completed"  # ended by itself: end of text, stop string, end of episode
    TRUNCATED = "truncated"  # reached its token budget
    ABORTED = "aborted"  # stopped from outside; its tokens are a valid beginning and can be continued
    FAILED = "failed"  # its generation or reward failed and the policy was to drop it


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, in the field names of the OpenAI chat format."""

    role: str
    content: str | None = None
    name: str | None = None  # of the tool or participant
    tool_calls: tuple[Mapping[str, Any], ...] | None = None  # of an assistant message
    tool_call_id: str | None = None  # of a tool message: which call it answers

    def to_dict(self) -> dict[str, Any]:
        """The message as a dict, without the fields that are None (content always stays)."""
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
        """The inverse of to_dict. Unknown keys are an assertion failure: they would be lost."""
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


def _content_to_json(content: PromptContent) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [message.to_dict() for message in content]


def _content_from_json(content: str | Sequence[Mapping[str, Any] | Message]) -> PromptContent:
    if isinstance(content, str):
        return content
    return tuple(m if isinstance(m, Message) else Message.from_dict(m) for m in content)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One input of a rollout: what the model is asked, and what the reward needs to judge the answer."""

    content: PromptContent  # a str is tokenized as it stands; messages go through the chat template
    index: int = 0  # position in the stream of prompts: unique and rising over a run, epochs included
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # "ground_truth" and whatever else the reward reads

    def to_dict(self) -> dict[str, Any]:
        """The prompt as plain JSON values."""
        return {"content": _content_to_json(self.content), "index": self.index, "metadata": dict(self.metadata)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Prompt:
        """The inverse of to_dict."""
        return cls(content=_content_from_json(data["content"]), index=data["index"], metadata=dict(data["metadata"]))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One action of the policy in an episode: the tokens that it is, and what became of it."""

    start: int  # position of its first token in Sample.tokens
    end: int  # position behind its last token
    state: str | None = (
        None  # what the policy saw before it acted, as a key: equal keys are one anchor state; None = compared with no other
    )
    reward: float = 0.0  # of this environment step

    def to_dict(self) -> dict[str, Any]:
        """The turn as plain JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One trajectory, one row of a batch: prompt tokens followed by response tokens.

    All per-token fields have the length of `tokens`. An empty `tokens` is a Sample that is still PENDING (or FAILED). An episode whose
    history the chat template wrote anew on the way has several contexts behind each other in `tokens`: each begins with what the model
    was given from then on, and its tokens see no token of another context. All of them are one row: one trajectory, one reward.
    """

    prompt: PromptContent = ""
    tokens: tuple[int, ...] = ()  # prompt and response
    loss_mask: tuple[float, ...] = ()  # 0 = not trained on; 1 = trained on; fractions are weights
    rollout_log_probs: tuple[float, ...] | None = None  # nats, under `temperature`; 0 where the policy did not sample
    weight_versions: tuple[int, ...] | None = None  # weight version that sampled each token; -1 where none did
    segment_log_probs: tuple[float, ...] | None = None  # nats, of each token under the version after the one that sampled it, as far as
    # it was computed (proximal.py), else rollout_log_probs; None = never computed
    recompute_version: int = -1  # weight version that segment_log_probs were last computed under; -1 = never
    segment_versions: tuple[int, ...] | None = None  # weight version that each of segment_log_probs is of; -1 = not computed (yet)
    response: str = ""  # the text of the response, for people and rewards; never tokenized again
    reward: float | None = None
    status: Status = Status.PENDING
    index: int = 0  # unique and rising over a run
    group_index: int = 0  # equal for the samples of one prompt's rollout, distinct across rollouts
    temperature: float = 1.0  # that rollout_log_probs are under
    turns: tuple[Turn, ...] | None = None  # of an episode, in order; None = not an episode
    context_starts: tuple[int, ...] = ()  # positions in tokens, rising, where a further context begins; () = all tokens are one
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        n, where = len(self.tokens), f"sample {self.index} (group {self.group_index})"
        assert len(self.loss_mask) == n, f"{where}: loss_mask has {len(self.loss_mask)} entries for {n} tokens"
        assert all(m >= 0 for m in self.loss_mask), f"{where}: loss_mask has a negative or NaN entry: {self.loss_mask}"
        if self.rollout_log_probs is not None:
            assert len(self.rollout_log_probs) == n, (
                f"{where}: rollout_log_probs has {len(self.rollout_log_probs)} entries for {n} tokens; "
                "it is aligned with tokens, 0 for the prompt"
            )
        if self.weight_versions is not None:
            assert len(self.weight_versions) == n, (
                f"{where}: weight_versions has {len(self.weight_versions)} entries for {n} tokens; "
                "it is aligned with tokens, -1 for the prompt"
            )
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

    def to_dict(self) -> dict[str, Any]:
        """The sample as plain JSON values."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["prompt"] = _content_to_json(self.prompt)
        out["status"] = self.status.value
        out["metadata"] = dict(self.metadata)
        for name in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "segment_log_probs", "segment_versions"):
            out[name] = None if out[name] is None else list(out[name])
        out["turns"] = None if self.turns is None else [turn.to_dict() for turn in self.turns]
        out["context_starts"] = list(self.context_starts)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of to_dict. Does not change its argument."""
        values = dict(data)
        values["prompt"] = _content_from_json(values.get("prompt", ""))
        values["status"] = Status(values.get("status", Status.PENDING))
        values["metadata"] = dict(values.get("metadata", {}))
        for name in ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "segment_log_probs", "segment_versions"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        if values.get("turns") is not None:
            values["turns"] = tuple(turn if isinstance(turn, Turn) else Turn(**turn) for turn in values["turns"])
        values["context_starts"] = tuple(values.get("context_starts", ()))
        return cls(**values)


Group: TypeAlias = tuple[Sample, ...]
"""The samples of one prompt's rollout, in the order of their index."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled."""

    max_tokens: int = 256  # most tokens to generate
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0  # nucleus: keep the smallest set of tokens with at least this probability; 1 = off
    top_k: int = 0  # keep the k most probable tokens; 0 = off
    min_p: float = 0.0  # keep tokens with at least this share of the largest probability; 0 = off
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's end of text; the stop token is part of the output
    stop: tuple[str, ...] = ()  # strings that end the text; their tokens are part of the output
    seed: int | None = None  # same prompt, weights and seed: same completion, whatever else runs; None = engine's own
    untempered_log_probs: bool = False  # also return log-probs under the policy at temperature 1 without truncation

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken at every position."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a cut distribution, whose log-probs are not those that a trainer computes."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    def new(self, *, greedy: bool | None = None, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; greedy=True is short for temperature=0."""
        if greedy is not None:
            assert "temperature" not in changes, "pass either greedy or temperature, not both"
            changes["temperature"] = 0.0 if greedy else (self.temperature or 1.0)
        return replace(self, **changes)


FinishReason: TypeAlias = Literal["stop", "length", "abort"]

LogProbKind: TypeAlias = Literal["sampled", "tempered", "untempered"]
"""What log-probs are of: "sampled" = the distribution really sampled from; "tempered" = after the temperature, before top_p, top_k and
min_p (SGLang); "untempered" = the policy at temperature 1, whole (vLLM in raw mode). Where two are the same, "sampled"."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine returns for one request."""

    request_id: str
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    output_log_probs: tuple[float, ...]  # nats, of the distribution that log_prob_kind says (greedy: temperature 1, whole)
    output_versions: tuple[int, ...]  # weight version that sampled each token
    finish_reason: FinishReason
    temperature: float = 1.0  # that output_log_probs are under (greedy and untempered: 1)
    truncated_sampling: bool = False  # True if top_p, top_k or min_p cut the distribution that the tokens were drawn from
    log_prob_kind: LogProbKind = "sampled"  # what output_log_probs are of
    untempered_log_probs: tuple[float, ...] | None = None  # at temperature 1, full distribution, when asked for

    def __post_init__(self) -> None:
        n = len(self.output_tokens)
        for name in ("output_log_probs", "output_versions", "untempered_log_probs"):
            value = getattr(self, name)
            assert value is None or len(value) == n, f"completion {self.request_id}: {name} has {len(value)} entries for {n} output tokens"

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
        """Number of tokens that are trained on, of each sample."""
        return [sum(m > 0 for m in s.loss_mask) for s in self.samples]


@dataclass(frozen=True, kw_only=True, eq=False)
class TurnLevels:
    """What the advantages of turns are made of, for people and logs. Columns [B, K] are 0 where there is no such turn."""

    episode: Tensor  # [B] of the episode among those of its group
    rewards: Tensor  # [B, K] of each step, as far as they counted: defaults and a final reward included
    returns: Tensor  # [B, K] discounted rewards from each turn on
    anchors: Tensor  # [B, K] int64, number of the turns that each is compared with: those of its group from the same state; -1 = no turn
    step: Tensor  # [B, K] of the turn among those of its anchor
    combined: Tensor  # [B, K] the advantage of the turn


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """Environment turns of each row. K = most turns in a row; -1 pads."""

    ids: Tensor  # [B, T] int64, turn index of each token, -1 outside actions
    states: Tensor  # [B, K] int64, anchor-state id, -1 = no such turn
    rewards: Tensor  # [B, K] float32, step rewards
    levels: TurnLevels | None = None  # of the estimator that filled the advantages, where it compares turns


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """Rows as tensors, float32 and int64, padded on the right. The algorithm's view; backends compute no pad token.

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
    segment_log_probs: Tensor | None = None  # [B, T] each token under the weights one version after those that sampled it
    segment_mask: Tensor | None = None  # [B, T] bool; where segment_log_probs were computed: elsewhere they are rollout_log_probs
    ref_log_probs: Tensor | None = None  # [B, T] reference policy
    values: Tensor | None = None  # [B, T] critic at collection time
    weight_versions: Tensor | None = None  # [B, T] int64, -1 where the policy did not sample
    policy_versions: Tensor | None = None  # [B] float32, weight version that trains, equal in all rows: that of the engines, plus the
    # part of the way to the next sync that the trainer has gone since the last one
    context_ids: Tensor | None = None  # [B, T] int64, from 0 on and rising in each row: a token sees those of its own context only;
    # None = each row is one context
    turns: Turns | None = None
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    loss_weights: Tensor | None = None  # [B, T], from Algorithm.weigh over the whole optimizer step
    importance_weights: Tensor | None = None  # [B, T] detached; multiplies the policy term only
    selected: Tensor | None = None  # [B, T] bool; tokens that a loss treats apart, for example KL-Cov's
    kl_coef: Tensor | None = None  # [B] coefficient of a KL controller, equal in all rows; None = the algorithm's own

    def __post_init__(self) -> None:
        assert self.tokens.dim() == 2, f"tokens has shape {tuple(self.tokens.shape)}, expected [B, T]"
        b, t = self.tokens.shape
        per_token = ("loss_mask", "rollout_log_probs", "old_log_probs", "prox_log_probs", "segment_log_probs", "segment_mask",
                     "ref_log_probs", "values", "weight_versions", "context_ids", "advantages", "returns", "loss_weights",
                     "importance_weights", "selected")  # fmt: skip
        check_shapes(**{name: (getattr(self, name), (b, t)) for name in per_token})
        per_row = ("lengths", "rewards", "group_ids", "trainable", "temperatures", "kl_coef", "policy_versions")
        check_shapes(**{name: (getattr(self, name), (b,)) for name in per_row})
        if self.turns is not None:
            k = self.turns.states.shape[-1]
            check_shapes(turns_ids=(self.turns.ids, (b, t)), turns_states=(self.turns.states, (b, k)))
            check_shapes(turns_rewards=(self.turns.rewards, (b, k)))
            if self.turns.levels is not None:
                shapes = {f.name: (b,) if f.name == "episode" else (b, k) for f in fields(TurnLevels)}
                check_shapes(**{f"levels_{name}": (getattr(self.turns.levels, name), shape) for name, shape in shapes.items()})

    @property
    def num_rows(self) -> int:
        """B."""
        return self.tokens.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenOutputs:
    """What a model says about the tokens of a batch. Aligned with tokens; 0 where t = 0 and on pads."""

    log_probs: Tensor  # [B, T] float32, has a gradient in forward_backward
    entropy: Tensor | None = None  # [B, T] of the distribution that tokens[:, t] was drawn from, in nats
    values: Tensor | None = None  # [B, T] of a critic


class LossOutput(NamedTuple):
    """A scalar to differentiate and what to log about it.

    The loss is a weighted SUM over tokens, so losses of micro-batches add up to the loss of their union. A metric is a mean over the
    tokens with loss_mask > 0, except names that begin with `max_` or `min_`; see merge_metrics.
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
    loss_only: frozenset[str] = frozenset()  # those of `requires` that estimate and weigh do not read: the loop may fill old_log_probs
    # and prox_log_probs inside the loss of a step that is one single update, and so save a forward pass. Replace it with `estimate`.

    def __post_init__(self) -> None:
        assert self.loss_only <= self.requires, f"loss_only is {set(self.loss_only)}, which requires {set(self.requires)} does not hold"
