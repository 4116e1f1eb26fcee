"""Formats of a gateway's conversations: messages and tools to tokens, and tokens to the text and the calls that a client gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollouts.agents.policies import write_hermes_call
from rollouts.chat.formats import ConversationFormat, create_chat_format, create_text_format
from rollouts.chat.tokenize import render_messages
from rollouts.checks import check_encodable, parse_json
from rollouts.environments.tools.calls import ToolCall, ToolCallError
from rollouts.errors import DataError
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.refusals import Refusal
from rollouts.gateway.requests import GatewayRequest, Reply
from rollouts.types import Completion, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_FORMATS = 256
_CALL_BEGIN = "<tool_call>"


class Formats:
    """Formats by the tools of a request; the newest ones are kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: GatewayConfig) -> None:
        self.tokenizer, self._config = tokenizer, config
        template = config.template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", None)
        self.uses_chat = bool(template) if config.chat is None else config.chat
        self._shows_calls = self.uses_chat and "tool_calls" in json.dumps(template)
        self.text_format = create_text_format(tokenizer, config.separator)
        self._found: dict[str, ConversationFormat] = {}

    def find(self, tools: Sequence[Mapping[str, Any]]) -> tuple[str, ConversationFormat]:
        """Return the name and the format of conversations with these tools.

        Raises: Refusal if the chat template shows no tools; DataError if it cannot be used.
        """
        name = json.dumps(tools, sort_keys=True) if tools else ""
        if not self.uses_chat:
            return name, self.text_format
        found = self._found.pop(name, None)
        if found is None:
            found = self._create(tools)
            if len(self._found) >= _MAX_FORMATS:
                del self._found[next(iter(self._found))]
        self._found[name] = found  # the newest one last
        return name, found

    def _create(self, tools: Sequence[Mapping[str, Any]]) -> ConversationFormat:
        options = dict(self._config.template_kwargs)
        if not tools:
            return create_chat_format(self.tokenizer, options)
        probe = [Message(role="user", content="probe")]
        without = render_messages(self.tokenizer, probe, template_kwargs=options)
        shown = render_messages(self.tokenizer, probe, template_kwargs={**options, "tools": list(tools)})
        if shown == without:
            raise Refusal(
                400,
                "tools: the chat template of the model shows no tools, so the model would not know of them: describe them in a message and "
                "send none, use a template that shows tools, or leave the template out (GatewayConfig.chat = False, --agent.chat "
                "False, or --chat no of rollouts gateway)",
                param="tools",
                code="unsupported_parameter",
            )
        return create_chat_format(self.tokenizer, {**options, "tools": list(tools)})

    def show(self, message: Message) -> Message:
        """Return a message that was not sampled here as the format renders it: calls as values, or as text if it shows no calls."""
        if not message.tool_calls:
            return message
        if self._shows_calls:
            return replace(message, tool_calls=tuple(map(_read_arguments, message.tool_calls)))
        text = "\n".join([message.content or ""] * bool(message.content) + [write_hermes_call(call) for call in message.tool_calls])
        return replace(message, content=text, tool_calls=None)

    def write_reply(self, request: GatewayRequest, completion: Completion, text: str, number: int) -> Reply:
        """Return an answer as the client gets it.

        Args:
            text: text of the answer without special tokens.
            number: place among the session's answers. It is part of the ids of its calls, which are then equal in every run.
        """
        shown, stop_string = cut_at_stop(text, request.wishes.stop)
        finish = "length" if completion.finish_reason == "length" else "stop"
        calls: tuple[ToolCall, ...] = ()
        if request.tools:
            parsed = self._config.parse_calls(shown)
            calls = tuple(call for call in parsed if isinstance(call, ToolCall))
            if any(isinstance(call, ToolCallError) for call in parsed):
                calls = ()  # the whole text is shown, as servers do
        if calls:
            calls = tuple(replace(call, id=call.id or f"call_{number}_{k}") for k, call in enumerate(calls))
            shown = shown.partition(_CALL_BEGIN)[0].strip() if _CALL_BEGIN in shown else ""
            finish = "calls" if finish == "stop" else finish
        texts = None
        if request.log_probs:
            texts = tuple(str(self.tokenizer.decode([token])) for token in completion.output_tokens)
        return Reply(
            number=number,
            text=shown,
            calls=calls,
            finish=finish,
            stop_string=stop_string,
            completion=completion,
            token_texts=texts,
        )


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string in it, and that string; None = there is none."""
    places = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not places:
        return text, None
    place, string = min(places)
    return text[:place], string


def _read_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call whose arguments are values instead of a text of JSON, as templates expect them.

    Unchanged if they are no object, or an object of texts that cannot be tokenized.
    """
    function = call["function"]
    try:
        arguments = parse_json(function["arguments"])
        check_encodable(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def check_usable(formats: Formats) -> None:
    """Raise DataError if the tokenizer's chat template cannot be used for conversations without tools."""
    try:
        formats.find(())
    except DataError as error:
        advice = "GatewayConfig.chat = False (--agent.chat False, or --chat no of rollouts gateway) would leave the template out"
        raise DataError(f"{error}. {advice}") from error
