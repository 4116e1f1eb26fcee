"""Episodes with tools: the model calls, the environment answers with the results, and the first text without a call is graded."""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_args

import trio

from rollouts.environments.protocol import EnvironmentConfig, EnvironmentStep, OnToolError
from rollouts.environments.tools.calls import ParsedCalls, ToolCall, ToolCallError, ToolParser, parse_hermes_calls, strip_thinking
from rollouts.environments.tools.tool import Tool, call_tool, fit_arguments
from rollouts.errors import ConfigError, DataError, EpisodeInterrupted, SandboxError, ToolArgumentError, ToolFault
from rollouts.types import Message

Grade: TypeAlias = Callable[[str, Mapping[str, Any]], Any]
"""f(answer, parameters of the episode) -> reward of the whole episode; may be async."""


@dataclass(frozen=True)
class _Result:
    """Result of one call."""

    message: Message
    is_bad: bool = False  # fault of the model
    fault: ToolFault | SandboxError | EpisodeInterrupted | None = None  # fault of the tool; only a ToolFault can be an observation


@dataclass(frozen=True, kw_only=True)
class ToolRules:
    """Limits of tool calls, and the treatment of failed ones."""

    on_tool_error: OnToolError = "observe"  # a tool that raises or is late: "observe" = the model is told, "raise" = the episode ends with
    # a ToolFault. A ToolArgumentError of a tool is the model's mistake, like a malformed call
    max_calls: int = 16  # calls of one text that are carried out; the others are answered with an error
    max_result_chars: int | None = None  # longer results are cut in the middle, and say so; None = whole
    error_reward: float = 0.0  # for each call that is malformed, of no tool, or has wrong arguments; below 0 to teach the form

    def __post_init__(self) -> None:
        if self.on_tool_error not in get_args(OnToolError):
            raise ConfigError(f"on_tool_error is {self.on_tool_error!r}, expected one of {', '.join(get_args(OnToolError))}")


class ToolEnvironment:
    """Tools for one episode. A model's mistakes are reported to it and are no failures; ToolRules.on_tool_error decides on a tool's."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        grade: Grade,
        parser: ToolParser = parse_hermes_calls,
        rules: ToolRules | None = None,
        role: str = "tool",
        prefix: str = "",
        question_key: str | None = None,
    ) -> None:
        """
        Args:
            tools: tools with different names.
            grade: reward of the answer; EnvironmentConfig.parameters (the prompt's metadata) hold the ground truth.
            parser: parser of calls in the model's text.
            rules: default: ToolRules().
            role: role of the messages with results; "user" for chat templates without tool messages.
            prefix: text before the first observation, for example describe_tools(tools); "" if the chat template gets the tools.
            question_key: key of the parameter that is the first observation; None = the prompt itself is the question.

        Raises: ConfigError for two tools of one name.
        """
        names = [tool.name for tool in tools]
        if len(set(names)) != len(names):
            raise ConfigError(f"tools are named {', '.join(names)}, expected different names")
        self.tools = {tool.name: tool for tool in tools}
        self._grade, self._parser, self._role, self._prefix = grade, parser, role, prefix
        self._question_key = question_key
        self._rules = rules or ToolRules()
        self._parameters: Mapping[str, Any] = {}
        self._used_ids: set[str] = set()

    @property
    def longest_call_s(self) -> float:
        """Longest deadline of a tool in seconds, added to the deadline of a step; math.inf if a tool has none."""
        return max((math.inf if tool.timeout_s is None else tool.timeout_s for tool in self.tools.values()), default=0.0)

    def reset(self, config: EnvironmentConfig) -> str:
        """Begin an episode and return the question, "" without question_key. Raises DataError if there is no such parameter."""
        self._parameters, self._used_ids = config.parameters, set()
        if self._question_key is None:
            return ""
        if self._question_key not in config.parameters:
            known = ", ".join(config.parameters) or "none"
            raise DataError(f"the prompt's metadata has no {self._question_key!r}, which question_key names; there are: {known}")
        return str(config.parameters[self._question_key])

    async def step(self, action: str) -> EnvironmentStep:
        """Carry out the calls of a text, all at once, or grade it if there is none.

        Returns: messages with the results in the order of the calls, each with the id of its call. info: tool_calls (in OpenAI's format),
            num_tool_calls, num_bad_calls (the model's fault; policy_error describes the first of them), num_tool_errors; for an answer:
            answer.
        Raises: ToolFault of the first tool that failed, if on_tool_error is "raise"; SandboxError (there is no sandbox to run the tool in)
            and EpisodeInterrupted in any case.
        """
        parsed = self._parser(action)
        if not parsed:
            answer = strip_thinking(action).strip()
            grade = self._grade(answer, self._parameters)
            reward = await grade if inspect.isawaitable(grade) else grade
            return EnvironmentStep("", reward, True, {"answer": answer})
        calls = self._number(parsed)
        results: dict[int, _Result] = {}

        async def answer_call(k: int) -> None:
            results[k] = await self._answer(calls[k], k)

        async with trio.open_nursery() as nursery:
            for k in range(len(calls)):
                nursery.start_soon(answer_call, k)
        ordered = [results[k] for k in range(len(calls))]
        faults = [result.fault for result in ordered if result.fault is not None]
        ends = [fault for fault in faults if self._rules.on_tool_error == "raise" or not isinstance(fault, ToolFault)]
        if ends:
            raise ends[0]
        bad = [result.message.content for result in ordered if result.is_bad]
        info: dict[str, Any] = {
            "tool_calls": [call.to_dict() for call in calls if isinstance(call, ToolCall)],
            "num_tool_calls": len(calls),
            "num_bad_calls": len(bad),
            "num_tool_errors": len(faults),
        }
        if bad:
            info["policy_error"] = bad[0]
        return EnvironmentStep(tuple(result.message for result in ordered), self._rules.error_reward * len(bad), False, info)

    def get_state_description(self) -> str:
        """Return "": results are messages."""
        return ""

    def get_prompt_prefix(self) -> str:
        """Return the prefix, "" if there is none."""
        return self._prefix

    def _number(self, parsed: ParsedCalls) -> ParsedCalls:
        """Give each call an id that is unique in the episode, the model's own if possible."""
        calls: list[ToolCall | ToolCallError] = []
        for call in parsed:
            call_id = call.id
            if call_id is None or call_id in self._used_ids:
                call_id = next(name for k in itertools.count(len(self._used_ids)) if (name := f"call_{k}") not in self._used_ids)
            self._used_ids.add(call_id)
            calls.append(replace(call, id=call_id))
        return tuple(calls)

    async def _answer(self, call: ToolCall | ToolCallError, k: int) -> _Result:
        """Return the result of call k of a text, as a message."""
        if isinstance(call, ToolCallError):
            return self._refuse(call, call.message)
        if k >= self._rules.max_calls:
            return self._refuse(call, f"at most {self._rules.max_calls} calls at once")
        tool = self.tools.get(call.name)
        if tool is None:
            return self._refuse(call, f"no tool {call.name[:50]}; there are: {', '.join(self.tools)}")
        try:
            arguments = fit_arguments(tool, call.arguments)
        except ValueError as error:
            return self._refuse(call, str(error))
        try:
            content = await call_tool(tool, arguments)
        except ToolArgumentError as error:
            return self._refuse(call, str(error))
        except (ToolFault, SandboxError, EpisodeInterrupted) as fault:
            return _Result(self._create_message(call, f"error: {_explain_briefly(fault)}"), fault=fault)
        return _Result(self._create_message(call, content))

    def _refuse(self, call: ToolCall | ToolCallError, reason: str) -> _Result:
        return _Result(self._create_message(call, f"error: {reason}"), is_bad=True)

    def _create_message(self, call: ToolCall | ToolCallError, content: str) -> Message:
        content = cut_middle(content, self._rules.max_result_chars).encode("utf-8", "replace").decode("utf-8")  # as in tool.py
        if self._role != "tool":
            return Message(role=self._role, content=content)
        return Message(role="tool", content=content, name=call.name if isinstance(call, ToolCall) else None, tool_call_id=call.id)


def describe_tools(tools: Sequence[Tool]) -> str:
    """Describe tools for a model whose chat template does not: their schemas, and Hermes' form of a call.

    Source: the prompt format of Hermes function calling, which Qwen's chat templates use as well.
    """
    schemas = "\n".join(json.dumps(tool.to_dict(), ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query. You are provided with function signatures within "
        f"<tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def cut_middle(text: str, max_chars: int | None) -> str:
    """Cut a text to max_chars characters, with a line between its beginning and end that tells the number left out."""
    if max_chars is None or len(text) <= max_chars:
        return text
    head = max_chars - max_chars // 2
    tail = max_chars // 2
    return f"{text[:head]}\n... {len(text) - max_chars} characters left out ...\n{text[len(text) - tail :]}"


def _explain_briefly(fault: Exception) -> str:
    """Return the reason of a tool's failure for the model, without places in files."""
    cause = fault.__cause__
    return str(fault) if cause is None else (str(cause) or type(cause).__name__)
