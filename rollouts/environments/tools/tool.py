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
from rollouts.environments.tools.schemas import Schema, create_schema, fit_value
from rollouts.errors import ConfigError, EpisodeInterrupted, SandboxError, ToolArgumentError, ToolFault, locate_error
from rollouts.user_code import CodeBlocked, is_passed_on


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. Create it with create_tool, or by hand with a schema of your own."""

    name: str  # name in the model's calls
    function: Callable[..., Any]  # called with the arguments by name; may be async
    description: str = ""  # description for the model
    parameters: Schema  # JSON schema of the arguments, an object
    timeout_s: float | None = 30.0  # seconds for one call, besides EpisodeConfig.timeout_s for the rest of the step; None = no deadline
    in_thread: bool = True  # run a sync function in a thread, which is abandoned at the deadline or when the episode is canceled;
    # False for quick functions, which run in the episode's thread and are ended by an alarm: see user_code.py

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise ConfigError(f"a tool's name is {self.name!r}, expected a text without white space")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s of tool {self.name} is {self.timeout_s}, expected seconds above 0, or None")

    def to_dict(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI's API and chat templates: {"type": "function", "function": {...}}."""
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
    """Create a tool from a typed function.

    Args:
        function: sync or async; see create_schema for its annotations. Its result is shown as text: a text as it is, else JSON.
        name: default the function's name.
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
    """Return the arguments, converted to fit the tool's schema. Raises ValueError saying what is wrong with them."""
    return fit_value(arguments, tool.parameters, tool.name)


async def call_tool(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Call a tool and return its result as text.

    Args:
        arguments: arguments that fit (see fit_arguments).

    Raises: ToolFault if the tool raises, is late, or returns neither a text nor JSON. ToolArgumentError, SandboxError and
        EpisodeInterrupted pass as they are.
    """
    deadline = trio.move_on_after(math.inf if tool.timeout_s is None else tool.timeout_s)
    try:
        with deadline:
            call = functools.partial(tool.function, **arguments)
            result = await call_function(call, in_thread=tool.in_thread, timeout_s=tool.timeout_s)
            return _show_result(tool, result)
    except (ToolFault, ToolArgumentError, SandboxError, EpisodeInterrupted):
        raise
    except CodeBlocked as block:
        if block.timeout_s != tool.timeout_s:  # the alarm of a caller, which has less time
            raise
        late = f"tool {tool.name} did not return within {tool.timeout_s:g} s: it blocked the event loop at {block.place}"
        raise ToolFault(f"{late}. Make it faster, let it run in a thread, or raise its timeout_s") from block
    except BaseException as error:  # the tool is the user's: whatever it raises, the policy for failed tools decides
        if is_passed_on(error):
            raise
        if not deadline.cancelled_caught:  # otherwise it raised when it was told to end
            fault = ToolFault(f"tool {tool.name} raised {type(error).__name__} ({locate_error(error)}): {error}")
            fault.add_note(f"its arguments were {dict(arguments)!r:.500}")
            raise fault from error
    raise ToolFault(f"tool {tool.name} did not return within {tool.timeout_s:g} s: make it faster, or raise its timeout_s")


def _show_result(tool: Tool, result: Any) -> str:
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode("utf-8")  # a tokenizer refuses half a surrogate pair
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFault(
            f"tool {tool.name} returned {result!r:.200} ({type(result).__name__}), which is neither a text nor JSON: {error}"
        ) from error
