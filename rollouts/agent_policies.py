"""Who acts in an episode: an engine (EngineAgentPolicy), a text server (OpenAIAgentPolicy), or a script (ScriptedAgentPolicy).

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
    end_of_turn: int | None = None  # the token by which the chat template ends an action; None = it has none
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
            params: of each action; max_tokens is cut to what the episode leaves, seed is the request's, and the chat template's
                end-of-turn token ends an action also where it is not the tokenizer's end of text.
            wants_stop: of the text of an action, without special tokens; None = only environments and limits end episodes.
        """
        self.engine, self.tokenizer = engine, tokenizer
        self.params = params or SamplingParams()
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """One completion.

        Raises: EpisodeInterrupted if it was aborted; EngineProtocolError if it has no token, or is of another prompt; what the engine
            raises.
        """
        if not request.tokens:
            raise DataError("an engine was asked for an action without tokens: the episode has no tokenizer, or an empty prompt")
        most = self.params.max_tokens if request.max_tokens is None else min(self.params.max_tokens, request.max_tokens)
        params = self.params.new(max_tokens=most, seed=self.params.seed if request.seed is None else request.seed)
        end = request.end_of_turn
        if end is not None and end != self.tokenizer.eos_token_id and end not in params.stop_token_ids:
            params = params.new(stop_token_ids=(*params.stop_token_ids, end))
        if request.greedy:
            params = params.new(greedy=True, top_p=1.0, top_k=0, min_p=0.0)
        if request.request_id is not None:
            note_request(request.request_id)
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


class OpenAIAgentPolicy:
    """A model behind a server with the chat API of OpenAI: text only, so its episodes cannot be trained on as they are.

        async with OpenAITextEngine("http://127.0.0.1:8000", "expert") as server:
            episode = await run_episode(OpenAIAgentPolicy(server), GridWorld, prompt)

    agent_integration.trajectory_to_sample makes supervised samples of what it did.
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
            max_tokens: of an action; cut to what the episode leaves; None = the server's limit.
            temperature: None = the server's.
            tools: JSON schemas that the server is given. Its calls are written into the text in Hermes' form, where the environment reads
                them, and are sent back as calls. None = the model is told of tools by the environment alone, and results are a user's.
            wants_stop: of the text of an action.
        """
        self._server, self._max_tokens, self._temperature = server, max_tokens, temperature
        self._tools = None if tools is None else tuple(tools)
        self._wants_stop = wants_stop

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """One answer. Raises what the server's engine raises."""
        limits = [limit for limit in (self._max_tokens, request.max_tokens) if limit is not None]
        answer = await self._server.complete(
            to_openai_messages(request.messages, with_calls=self._tools is not None),
            max_tokens=min(limits, default=None),
            temperature=0.0 if request.greedy else self._temperature,
            seed=request.seed,
            tools=self._tools,
        )
        text = "\n".join([answer.text] * bool(answer.text) + [_write_call(call) for call in answer.tool_calls])
        return AgentAction(
            text=text,
            was_cut=answer.finish_reason == "length",
            wants_stop=self._wants_stop is not None and self._wants_stop(text),
        )


_CALL = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)


def to_openai_messages(messages: Sequence[Message], *, with_calls: bool) -> tuple[Message, ...]:
    """Messages of an episode as a chat server takes them.

    Args:
        with_calls: whether the server knows of tools: then calls stand in tool_calls and not in the text, and a tool message answers one of
            them, or becomes a user's, behind the results of its turn; else calls stay in the text, and all tool messages become a user's.
    """
    known: set[str] = set()
    out: list[Message] = []
    unasked: list[Message] = []  # behind all results of a turn: a server takes no other message between a call and its result
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


def _write_call(call: Mapping[str, Any]) -> str:
    """A call of the OpenAI form as text in Hermes' form. Arguments that are no JSON stay as they are, for the parser to complain of."""
    function: Mapping[str, Any] = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}\n</tool_call>'
