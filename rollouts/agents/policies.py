"""Policies of episodes: an engine (EngineAgentPolicy), a text server (OpenAIAgentPolicy), or a script (ScriptedAgentPolicy).

Any object with `async def get_action(self, request: ActionRequest) -> AgentAction` is an AgentPolicy. One with the attribute `tokenizer`
is given the tokens of the conversation, and answers in tokens: only its episodes can be trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import trio

from rollouts.checks import describe_function, require_flag
from rollouts.engines.protocol import InferenceEngine, with_kept_tokens
from rollouts.errors import DataError, EngineProtocolError, EpisodeInterrupted
from rollouts.generation.contract import note_request
from rollouts.types import KeptTokens, LogProbKind, Message, RoutedExperts, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ActionRequest:
    """Request for one action."""

    messages: tuple[Message, ...]  # the conversation so far
    tokens: tuple[int, ...] = ()  # tokens of the present context, up to the action; () for a policy without a tokenizer
    max_tokens: int | None = None  # maximum number of tokens of the action; None = the policy's limit
    seed: int | None = None  # same request, same seed, same weights: same action
    request_id: str | None = None  # unique in the run
    turn: int = 0  # position among the actions of the episode
    end_of_turn: int | None = None  # token that ends an action in the chat template; None = none
    greedy: bool = False  # take the most probable tokens, for a baseline


@dataclass(frozen=True, kw_only=True)
class AgentAction:
    """One action of a policy."""

    text: str | None = None  # text of the action; None = the text of the tokens
    tokens: tuple[int, ...] | None = None  # as sampled, with the end-of-turn token
    log_probs: tuple[float, ...] | None = None  # nats, one for each token
    versions: tuple[int, ...] | None = None  # version of the weights that sampled each token
    routed_experts: RoutedExperts | None = None  # experts of the request's tokens and these; None = not recorded
    kept_tokens: KeptTokens | None = None  # sets that truncated sampling drew the tokens from; None = not recorded
    value: float | None = None  # estimate of a critic, before the action
    parsed: Any = None  # input of the environment, JSON values; None = the text
    was_cut: bool = False  # the action reached its token budget, not its end
    fills_context: bool = False  # the action was cut because the engine's context is full
    wants_stop: bool = False  # the policy has nothing more to do in this episode
    temperature: float = 1.0  # temperature of log_probs
    truncated_sampling: bool = False  # see Completion.truncated_sampling
    log_prob_kind: LogProbKind = "sampled"  # distribution of log_probs
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the policy's own; added to the metadata of the sample


class AgentPolicy(Protocol):
    """Source of actions. May have the attribute `tokenizer`, see the module's docstring."""

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the next action. Called from many episodes at once; a policy's memory must not depend on their order."""
        ...


WantsStop: TypeAlias = Callable[[str], bool]
"""Text of an action -> True if the agent has finished. A plain function that returns True or False."""


def _ask_stop(wants_stop: WantsStop | None, text: str) -> bool:
    """Return the answer of wants_stop; False without one. Raises DataError for an answer that is neither True nor False."""
    if wants_stop is None:
        return False
    return require_flag(wants_stop(text), f"wants_stop {describe_function(wants_stop)}", f" for {text!r:.100}", error=DataError)


class EngineAgentPolicy:
    """Model behind an InferenceEngine. Tokens in, tokens out: its text is never tokenized."""

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
            tokenizer: tokenizer of the engine.
            params: sampling parameters of each action; max_tokens is cut to the room in the episode, seed is the request's, and the
                chat template's end-of-turn token ends an action even if it is not the tokenizer's end of text.
            wants_stop: function of the text of an action, without special tokens; None = only environments and limits end episodes.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self.params = params or SamplingParams()
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return one completion as an action.

        Raises: EpisodeInterrupted if it was aborted; EngineProtocolError if it has no token or answers another prompt; errors of the
            engine.
        """
        if not request.tokens:
            raise DataError("an engine was asked for an action without tokens: the episode has no tokenizer, or an empty prompt")
        most = self.params.max_tokens if request.max_tokens is None else min(self.params.max_tokens, request.max_tokens)
        params = self.params.new(max_tokens=most, seed=self.params.seed if request.seed is None else request.seed)
        end = request.end_of_turn
        if end is not None and end != self.tokenizer.eos_token_id and end not in params.stop_token_ids:
            params = params.new(stop_token_ids=(*params.stop_token_ids, end))
        if request.greedy:
            params = params.new(greedy=True)
        if request.request_id is not None:
            note_request(request.request_id)
        params = with_kept_tokens(params, self.engine)
        completion = await self.engine.generate(request.tokens, params, request_id=request.request_id)
        if completion.finish_reason == "abort":
            raise EpisodeInterrupted(f"request {completion.request_id} was aborted after {completion.output_len} tokens of an action")
        if completion.input_tokens != request.tokens:
            raise EngineProtocolError(
                f"request {completion.request_id} was answered for {completion.input_len} tokens that are not the {len(request.tokens)} it "
                "was sent: the engine must take tokens as they are"
            )
        if not completion.output_tokens:
            raise EngineProtocolError(
                f"request {completion.request_id} came back with no token and finish reason {completion.finish_reason!r}: an action has at "
                "least one, the end of text included; the engine must return it"
            )
        text = str(self.tokenizer.decode(list(completion.output_tokens), skip_special_tokens=True))
        wants_stop = _ask_stop(self._wants_stop, text)
        return AgentAction(
            tokens=completion.output_tokens,
            log_probs=completion.output_log_probs,
            routed_experts=completion.routed_experts,
            kept_tokens=completion.kept_tokens,
            versions=completion.output_versions,
            was_cut=completion.finish_reason == "length",
            fills_context=completion.finish_reason == "length" and completion.output_len < most,
            wants_stop=wants_stop,
            temperature=completion.temperature,
            truncated_sampling=completion.truncated_sampling,
            log_prob_kind=completion.log_prob_kind,
        )


class ScriptedAgentPolicy:
    """Actions from a script: for tests, demonstrations and baselines. Text only."""

    def __init__(
        self, script: Sequence[str] | Callable[[ActionRequest], str | AgentAction], *, wants_stop: WantsStop | None = None
    ) -> None:
        """
        Args:
            script: texts of the actions, one for each turn, the last one for all turns after it; or a function of the request.
            wants_stop: function of the text of an action.
        """
        assert callable(script) or script, "a script has at least one action"
        self._script = script
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the action of this turn."""
        await trio.lowlevel.checkpoint()
        script = self._script
        action: str | AgentAction = script(request) if callable(script) else script[min(request.turn, len(script) - 1)]
        if isinstance(action, AgentAction):
            return action
        return AgentAction(text=action, wants_stop=_ask_stop(self._wants_stop, action))


class ChatText(Protocol):
    """Answer as text, as OpenAITextEngine returns it."""

    @property
    def text(self) -> str:
        """Text of the answer, without reasoning and tool calls."""
        ...

    @property
    def finish_reason(self) -> str:
        """Finish reason of the server."""
        ...

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """Tool calls, in the form of the OpenAI API."""
        ...


class TextEngine(Protocol):
    """Part of OpenAITextEngine that OpenAIAgentPolicy uses."""

    async def complete(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = 1.0,
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatText:
        """Return one answer."""
        ...


class OpenAIAgentPolicy:
    """Model behind a server with the chat API of OpenAI: text only, so its episodes cannot be trained on as they are.

        async with OpenAITextEngine("http://127.0.0.1:8000", "expert") as server:
            episode = await run_episode(OpenAIAgentPolicy(server), GridWorld, prompt)

    agents.samples.trajectory_to_sample makes supervised samples of its episodes.
    """

    def __init__(
        self,
        server: TextEngine,
        *,
        max_tokens: int | None = None,
        temperature: float | None = 1.0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        wants_stop: WantsStop | None = None,
    ) -> None:
        """
        Args:
            server: an OpenAITextEngine.
            max_tokens: maximum number of tokens of an action, cut to the room in the episode; None = the server's limit.
            temperature: sampling temperature; None = the server's.
            tools: JSON schemas for the server. Its calls are written into the text in Hermes' form, where the environment reads them, and
                are sent back as calls. None = only the environment tells the model of tools, and results are messages of the user.
            wants_stop: function of the text of an action.
        """
        self._server, self._max_tokens, self._temperature = server, max_tokens, temperature
        self._tools = None if tools is None else tuple(tools)
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return one answer as an action. Raises the errors of the server's engine."""
        limits = [limit for limit in (self._max_tokens, request.max_tokens) if limit is not None]
        answer = await self._server.complete(
            to_openai_messages(request.messages, with_calls=self._tools is not None),
            max_tokens=min(limits, default=None),
            temperature=0.0 if request.greedy else self._temperature,
            seed=request.seed,
            tools=self._tools,
        )
        text = "\n".join([answer.text] * bool(answer.text) + [write_hermes_call(call) for call in answer.tool_calls])
        return AgentAction(
            text=text,
            was_cut=answer.finish_reason == "length",
            wants_stop=_ask_stop(self._wants_stop, text),
        )


_CALL = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)


def to_openai_messages(messages: Sequence[Message], *, with_calls: bool) -> tuple[Message, ...]:
    """Return the messages of an episode in the form of a chat server.

    Args:
        with_calls: True = the server knows of tools: calls stand in tool_calls and not in the text, and a tool message answers one of them,
            or becomes a user message after the results of its turn. False = calls stay in the text, tool messages become user messages.
    """
    known: set[str] = set()
    out: list[Message] = []
    unasked: list[Message] = []  # messages after all results of a turn: a server takes none between a call and its result
    for message in messages:
        if message.role != "tool":
            out += unasked
            unasked = []
        if message.tool_calls and with_calls:
            known.update(str(call.get("id")) for call in message.tool_calls)
            out.append(replace(message, content=_CALL.sub("\n", message.content or "").strip() or None))
        elif message.tool_calls and message.content:
            out.append(replace(message, tool_calls=None))
        elif message.role == "tool" and message.tool_call_id not in known:
            unasked.append(Message(role="user", content=message.content))
        else:
            out.append(message)
    return (*out, *unasked)


def write_hermes_call(call: Mapping[str, Any]) -> str:
    """Return a call of the OpenAI form as text in Hermes' form. Arguments that are not JSON stay as they are, for the parser to refuse."""
    function: Mapping[str, Any] = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}\n</tool_call>'
