"""Tools: functions that a model may call. A tool is a typed Python function, sync or async; its schema follows from its annotations."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from rollouts.environments.calls import call_function
from rollouts.environments.tool_schemas import Schema, create_schema, fit_value
from rollouts.errors import ConfigError, EpisodeInterrupted, SandboxError, ToolArgumentError, ToolFault, locate_error


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. Make it by create_tool, or by hand with a schema of your own."""

    name: str  # what a model calls it
    function: Callable[..., Any]  # called with the arguments by name; may be async
    description: str = ""  # for the model
    parameters: Schema  # JSON schema of the arguments, an object
    timeout_s: float | None = 30.0  # of one call; None = no deadline. EpisodeConfig.timeout_s is for the rest of a step, and comes on top
    in_thread: bool = True  # a sync function runs in a thread, which is left behind at the deadline or when the episode is canceled;
    # False for quick ones, which then run where the episode does, and no deadline touches them

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise ConfigError(f"a tool's name is {self.name!r}, expected a text without white space")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s of tool {self.name} is {self.timeout_s}, expected seconds above 0, or None")

    def to_dict(self) -> dict[str, Any]:
        """The tool as OpenAI's API and chat templates are given it: {"type": "function", "function": {...}}."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def create_tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = 30.0,
    in_thread: bool = True,
) -> Tool:
    """A tool of a typed function.

    Args:
        function: sync or async; see create_schema for its annotations. What it returns is shown as text: a text as it is, else JSON.
        name: default the function's.
        description: default the first paragraph of its docstring.
        timeout_s, in_thread: see Tool.

    Raises: ConfigError if the function's arguments cannot be described.
    """
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if description is None:
        text = inspect.getdoc(plain) if inspect.isroutine(plain) else inspect.getdoc(type(plain))
        description = " ".join((text or "").split("\n\n")[0].split())
    return Tool(
        name=str(getattr(plain, "__name__", type(plain).__name__)) if name is None else name,
        function=function,
        description=description,
        parameters=create_schema(function),
        timeout_s=timeout_s,
        in_thread=in_thread,
    )


def fit_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the tool's schema wants them. Raises ValueError saying what is wrong with them."""
    return fit_value(arguments, tool.parameters, tool.name)


async def call_tool(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Call a tool and show what it returned as text.

    Args:
        arguments: that fit (fit_arguments).

    Raises: ToolFault if the tool raises, is late, or returns what neither is a text nor JSON. ToolArgumentError, SandboxError and
        EpisodeInterrupted pass as they are.
    """
    with trio.move_on_after(math.inf if tool.timeout_s is None else tool.timeout_s):
        try:
            result = await call_function(functools.partial(tool.function, **arguments), in_thread=tool.in_thread)
        except (ToolFault, ToolArgumentError, SandboxError, EpisodeInterrupted):
            raise
        except Exception as error:  # the tool is the user's: whatever it raises, the policy for failed tools decides
            fault = ToolFault(f"tool {tool.name} raised {type(error).__name__} ({locate_error(error)}): {error}")
            fault.add_note(f"its arguments were {dict(arguments)!r:.500}")
            raise fault from error
        return _show_result(tool, result)
    raise ToolFault(f"tool {tool.name} did not return within {tool.timeout_s:g} s: make it faster, or raise its timeout_s")


def _show_result(tool: Tool, result: Any) -> str:
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text to a tokenizer
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFault(
            f"tool {tool.name} returned {result!r:.200} ({type(result).__name__}), which is neither a text nor JSON: {error}"
        ) from error
