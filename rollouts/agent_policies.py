"""Who acts in an episode: an engine (EngineAgentPolicy), a text server (OpenAIAgentPolicy), or a script (ScriptedAgentPolicy).

Any object with `async def get_action(self, request: ActionRequest) -> AgentAction` is an AgentPolicy. One with the attribute `tokenizer`
is given the tokens of the conversation, and answers in tokens: only its episodes can be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import trio

from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import DataError, EngineProtocolError, EpisodeInterrupted
from rollouts.generate_fns import note_request
from rollouts.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ActionRequest:
    """What a policy is asked."""

    messages: tuple[Message, ...]  # the conversation so far
    tokens: tuple[int, ...] = ()  # of the present context, up to where the action begins; () for a policy without a tokenizer
    max_tokens: int | None = None  # most of the action; None = no other limit than the policy's
    seed: int | None = None  # same request, same seed, same weights: same action
    request_id: str | None = None  # that no other request of the run has
    turn: int = 0  # position among the actions of the episode
    greedy: bool = False  # take the most probable tokens, for a baseline


@dataclass(frozen=True, kw_only=True)
class AgentAction:
    """What a policy does."""

    text: str | None = None  # as it was written; None = what the tokens say
    tokens: tuple[int, ...] | None = None  # as sampled, with the end-of-turn token
    log_probs: tuple[float, ...] | None = None  # nats, of each token
    versions: tuple[int, ...] | None = None  # of the weights that sampled each token
    value: float | None = None  # estimate of a critic, before the action
    parsed: Any = None  # what the environment is given, JSON values; None = the text
    was_cut: bool = False  # it reached its token budget, not its end
    fills_context: bool = False  # and that because the engine's context is full
    wants_stop: bool = False  # the policy has nothing more to do in this episode
    temperature: float = 1.0  # that log_probs are under
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for the sample's


class AgentPolicy(Protocol):
    """Who acts. May have the attribute `tokenizer`, see the module's docstring."""

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """The next action. Called from many episodes at once: what a policy remembers must not depend on their order."""
        ...


WantsStop: TypeAlias = Callable[[str], bool]
"""Whether the text of an action says that the agent has finished."""


class EngineAgentPolicy:
    """A model behind an InferenceEngine. Tokens in, tokens out: nothing that it wrote is ever tokenized."""

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams | None = None,
        *,
        wants_stop: WantsStop | None = None,
    ) -> None:
        """
        Args:
            tokenizer: the engine's.
            params: of each action; max_tokens is cut to what the episode leaves, seed is the request's.
            wants_stop: of the text of an action, without special tokens; None = only environments and limits end episodes.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self.params = params or SamplingParams()
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """One completion.

        Raises: EpisodeInterrupted if it was aborted; EngineProtocolError if it has no token; what the engine raises.
        """
        if not request.tokens:
            raise DataError("an engine was asked for an action without tokens: the episode has no tokenizer, or an empty prompt")
        most = self.params.max_tokens if request.max_tokens is None else min(self.params.max_tokens, request.max_tokens)
        params = self.params.new(max_tokens=most, seed=self.params.seed if request.seed is None else request.seed)
        if request.greedy:
            params = params.new(greedy=True, top_p=1.0, top_k=0, min_p=0.0)
        if request.request_id is not None:
            note_request(request.request_id)
        completion = await self.engine.generate(request.tokens, params, request_id=request.request_id)
        if completion.finish_reason == "abort":
            raise EpisodeInterrupted(f"request {completion.request_id} was aborted after {completion.output_len} tokens of an action")
        if not completion.output_tokens:
            raise EngineProtocolError(
                f"request {completion.request_id} came back with no token and finish reason {completion.finish_reason!r}: an action has at "
                "least one, the end of text included; the engine must return it"
            )
        wants_stop = self._wants_stop is not None and self._wants_stop(
            str(self.tokenizer.decode(list(completion.output_tokens), skip_special_tokens=True))
        )
        return AgentAction(
            tokens=completion.output_tokens,
            log_probs=completion.output_log_probs,
            versions=completion.output_versions,
            was_cut=completion.finish_reason == "length",
            fills_context=completion.finish_reason == "length" and completion.output_len < most,
            wants_stop=wants_stop,
            temperature=completion.temperature,
            metadata=_sampling_metadata(completion),
        )


def _sampling_metadata(completion: Completion) -> dict[str, Any]:
    out: dict[str, Any] = {"truncated_sampling": True} if completion.truncated_sampling else {}
    if completion.log_prob_kind != "sampled":
        out["log_prob_kind"] = completion.log_prob_kind
    return out


class ScriptedAgentPolicy:
    """Actions from a script: for tests, demonstrations and baselines. Text only."""

    def __init__(
        self, script: Sequence[str] | Callable[[ActionRequest], str | AgentAction], *, wants_stop: WantsStop | None = None
    ) -> None:
        """
        Args:
            script: the text of action k at turn k, the last one from there on; or a function of the request.
            wants_stop: of the text of an action.
        """
        assert callable(script) or script, "a script has at least one action"
        self._script = script
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """The action of this turn."""
        await trio.lowlevel.checkpoint()
        script = self._script
        action: str | AgentAction = script(request) if callable(script) else script[min(request.turn, len(script) - 1)]
        if isinstance(action, AgentAction):
            return action
        return AgentAction(text=action, wants_stop=self._wants_stop is not None and self._wants_stop(action))


class ChatText(Protocol):
    """An answer as text: what OpenAITextEngine returns."""

    @property
    def text(self) -> str:
        """Without reasoning and tool calls."""
        ...

    @property
    def finish_reason(self) -> str:
        """As the server says."""
        ...

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """In the form of the OpenAI API."""
        ...


class TextEngine(Protocol):
    """What an OpenAIAgentPolicy needs of OpenAITextEngine."""

    async def complete(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = 1.0,
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatText:
        """One answer."""
        ...
