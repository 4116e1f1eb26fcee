"""Checked calls of environments, sync or async, with a deadline. A failure in an environment is an EnvironmentFault that describes it.

    async with open_environment(factory, timeout_s=10) as environment:
        observation = await reset_environment(environment, EnvironmentConfig(seed=3), timeout_s=10)
        observation, reward, done, info = await step_environment(environment, "left", timeout_s=10)

A deadline ends an async method where it awaits. A sync method runs in the episode's own thread, which suits quick ones; it, or an async
one that blocks, is ended by an alarm once it has blocked the event loop for that long (user_code.py lists the limits). With in_thread a
sync method runs in a thread of its own, which is abandoned at the deadline or when the episode is canceled, together with its result and
the environment: begin anew with another.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, SupportsFloat, cast

import trio

from rollouts.checks import is_async_function, read_flag
from rollouts.environments.observations import copy_json, find_non_json, find_observation_fault
from rollouts.environments.protocol import (
    Environment,
    EnvironmentConfig,
    EnvironmentFactory,
    EnvironmentStep,
    MultiAgentEnvironment,
    MultiAgentFactory,
    MultiAgentStep,
)
from rollouts.errors import DataError, EngineError, EnvironmentFault, EpisodeError, EpisodeInterrupted, SandboxError, locate_error
from rollouts.user_code import CodeBlocked, finish, interrupt_blocking, is_passed_on

CLOSE_TIMEOUT_S = 10.0
"""Seconds in which an environment must close if no timeout is set; it must end also when the episode was canceled."""

_PASSING = (EpisodeError, EpisodeInterrupted, DataError, EngineError, SandboxError)
"""Errors that environments raise on purpose; they state the fault themselves."""

_METHODS = ("reset", "step", "get_state_description", "get_prompt_prefix")
_MATCH_METHODS = ("reset", "step", "get_prompt_prefix")


@asynccontextmanager
async def open_environment(
    factory: EnvironmentFactory, *, timeout_s: float | None = None, in_thread: bool = False
) -> AsyncGenerator[Environment]:
    """Open an environment for one episode and close it when the block ends, in any way.

    Args:
        factory: sync or async; `aclose` or `close` of its environment, if any, is called at the end.
        timeout_s: seconds for making it, and again for closing it; None = no deadline for making it, CLOSE_TIMEOUT_S for closing.
        in_thread: sync functions run in threads of their own. See the module's docstring.

    Raises: EnvironmentFault if the factory raises, is late, or makes something without an environment's methods; or if closing fails
            (after a failure of the block, as a note to its error).
    """
    needed = f"an environment has {', '.join(_METHODS)} (wrap Gymnasium's in GymEnvironment)"
    async with _open(factory, _METHODS, needed, timeout_s, in_thread) as environment:
        yield environment


@asynccontextmanager
async def open_match_environment(
    factory: MultiAgentFactory, *, timeout_s: float | None = None, in_thread: bool = False
) -> AsyncGenerator[MultiAgentEnvironment]:
    """Open an environment for one match of several roles. Args and Raises: see open_environment."""
    needed = f"an environment of several roles has {', '.join(_MATCH_METHODS)}"
    async with _open(factory, _MATCH_METHODS, needed, timeout_s, in_thread) as environment:
        yield environment


@asynccontextmanager
async def _open(
    factory: Callable[[], Any], methods: Sequence[str], needed: str, timeout_s: float | None, in_thread: bool
) -> AsyncGenerator[Any]:
    environment = await _call(factory, (), "the factory of environments", "made nothing", timeout_s, in_thread)
    missing = [name for name in methods if not callable(getattr(environment, name, None))]
    if missing:
        await _close(environment, timeout_s, in_thread)
        raise EnvironmentFault(
            f"the factory of environments made {environment!r:.200} ({type(environment).__name__}), which has no method "
            f"{', '.join(missing)}: {needed}; give a function that makes one, not a class of something else"
        )
    try:
        yield environment
    except BaseException as error:  # cancellation included
        fault = await _close(environment, timeout_s, in_thread)
        if fault is not None:
            error.add_note(f"and then {fault}")
        raise
    fault = await _close(environment, timeout_s, in_thread)
    if fault is not None:
        raise fault


async def reset_environment(
    environment: Environment, config: EnvironmentConfig, *, timeout_s: float | None = None, in_thread: bool = False
) -> Any:
    """Reset an environment and return a copy of its first observation, independent of the environment's later changes.

    Raises: EnvironmentFault if reset raises, is late, or returns no observation. EpisodeErrors, DataErrors and errors of engines and
            sandboxes pass as they are.
    """
    name = f"{type(environment).__name__}.reset"
    observation = await _call(environment.reset, (config,), name, f"with {config!r:.200}", timeout_s, in_thread)
    if _looks_like_gymnasium(observation):
        raise EnvironmentFault(
            f"{name} returned a pair of an observation and an info mapping, as Gymnasium's environments do: wrap it in GymEnvironment, "
            "or return the observation alone"
        )
    fault = find_observation_fault(observation)
    if fault is not None:
        raise EnvironmentFault(f"{name} returned {_show(observation)}: {fault}, {_OBSERVATION}")
    return copy_json(observation)


async def step_environment(
    environment: Environment, action: Any, *, timeout_s: float | None = None, in_thread: bool = False
) -> EnvironmentStep:
    """Carry out an action.

    Args:
        timeout_s: seconds; the environment's `longest_call_s`, for calls with deadlines of their own (see protocol.py), is added.

    Returns: the step, checked and copied: a finite reward, a bool, an info of JSON values.
    Raises: EnvironmentFault if step raises, is late, or returns something else; see reset_environment for errors that pass.
    """
    name = f"{type(environment).__name__}.step"
    most = None if timeout_s is None else timeout_s + _longest_call_s(environment)
    result = await _call(environment.step, (action,), name, f"for the action {action!r:.200}", most, in_thread)
    return check_step(result, name)


def _longest_call_s(environment: object) -> float:
    """Return the seconds that a step may take for calls with deadlines of their own; 0 if the environment does not say."""
    value: Any = getattr(environment, "longest_call_s", 0.0)
    if not isinstance(value, (int, float)) or not value >= 0:
        raise EnvironmentFault(
            f"{type(environment).__name__}.longest_call_s is {value!r:.100} ({type(value).__name__}), expected seconds, 0 or more, "
            "math.inf for calls without a deadline"
        )
    return value


def check_step(result: Any, name: str = "step") -> EnvironmentStep:
    """Return the result of a step as an EnvironmentStep, copied.

    Args:
        name: name of the method, for the message.

    Raises: EnvironmentFault with the returned and the expected values.
    """
    found = f"{name} returned {_show(result)} ({type(result).__name__})"
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)):
        raise EnvironmentFault(f"{found}, {_STEP}")
    values: tuple[Any, ...] = tuple(cast("Sequence[Any]", result))
    if len(values) == 5:
        raise EnvironmentFault(
            f"{found}: five values, as Gymnasium's environments return (terminated and truncated apart): "
            f"wrap it in GymEnvironment, or {_STEP.removeprefix('expected ')}"
        )
    if len(values) != 4:
        raise EnvironmentFault(f"{found}: {len(values)} values, {_STEP}")
    observation, reward, done, info = values
    fault = find_observation_fault(observation)
    if fault is not None:
        raise EnvironmentFault(f"{found}: {fault}, {_OBSERVATION}")
    if not isinstance(info, Mapping):
        raise EnvironmentFault(f"{found}: info is {_show(info):.100} ({type(info).__name__}), expected a mapping; {{}} will do")
    fault = find_non_json(info, "info")
    if fault is not None:
        raise EnvironmentFault(f"{found}: {fault}, expected JSON values, so that logs and rewards can read it")
    return EnvironmentStep(copy_json(observation), _parse_reward(reward, found), _parse_done(done, found), copy_json(info))


async def reset_match(
    environment: MultiAgentEnvironment, config: EnvironmentConfig, roles: Sequence[str], *, timeout_s: float | None, in_thread: bool
) -> tuple[str, Any]:
    """Reset an environment of several roles. Returns the role that acts first and a copy of its observation. Raises EnvironmentFault."""
    name = f"{type(environment).__name__}.reset"
    result = await _call(environment.reset, (config,), name, f"with {config!r:.200}", timeout_s, in_thread)
    found = f"{name} returned {_show(result)} ({type(result).__name__})"
    if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 2:
        raise EnvironmentFault(f"{found}, expected (role that acts first, its observation)")
    role, observation = cast("tuple[Any, Any]", result)
    if role not in roles:
        raise EnvironmentFault(f"{found}: the role is {role!r:.100}, expected one of {', '.join(roles)}, which have policies")
    fault = find_observation_fault(observation)
    if fault is not None:
        raise EnvironmentFault(f"{found}: {fault}, {_OBSERVATION}")
    return role, copy_json(observation)


async def step_match(
    environment: MultiAgentEnvironment, role: str, action: Any, roles: Sequence[str], *, timeout_s: float | None, in_thread: bool
) -> MultiAgentStep:
    """Carry out an action of a role. Returns the step, checked and copied. Raises EnvironmentFault, and errors that pass."""
    name = f"{type(environment).__name__}.step"
    most = None if timeout_s is None else timeout_s + _longest_call_s(environment)
    result = await _call(environment.step, (role, action), name, f"for the action {action!r:.200} of {role}", most, in_thread)
    found = f"{name} returned {_show(result)} ({type(result).__name__})"
    if not isinstance(result, tuple) or len(cast("tuple[Any, ...]", result)) != 4:
        raise EnvironmentFault(f"{found}, expected (role that acts next or None at the end, its observation, rewards by role, info)")
    following, observation, rewards, info = cast("tuple[Any, Any, Any, Any]", result)
    if following is not None and following not in roles:
        raise EnvironmentFault(f"{found}: the role is {following!r:.100}, expected one of {', '.join(roles)}, or None at the end")
    if not isinstance(rewards, Mapping) or not set(cast("Mapping[Any, Any]", rewards)) <= set(roles):
        raise EnvironmentFault(f"{found}: the rewards are {_show(rewards)}, expected a mapping of numbers by role ({', '.join(roles)})")
    paid = {one: _parse_reward(reward, found) for one, reward in cast("Mapping[str, Any]", rewards).items()}
    checked = check_step((observation, 0.0, following is None, info), name)
    return MultiAgentStep(following, checked.observation, paid, checked.info)


_STEP = "expected (observation, reward, done, info)"
_OBSERVATION = "expected a text, Messages, or JSON values (of an array: array.tolist())"


def _show(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except RecursionError:
        return "a value that is nested too deep"


def _parse_reward(reward: Any, found: str) -> float:
    try:
        value = float(reward) if isinstance(reward, (float, SupportsFloat)) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):  # arrays of several elements; integers beyond a float
        value = math.nan
    if not math.isfinite(value):
        raise EnvironmentFault(f"{found}: the reward is {reward!r:.100} ({type(reward).__name__}), expected a finite number")
    return value


def _parse_done(done: Any, found: str) -> bool:
    value = read_flag(done)
    if value is None:
        raise EnvironmentFault(f"{found}: done is {done!r:.100} ({type(done).__name__}), expected True or False")
    return value


def _looks_like_gymnasium(observation: Any) -> bool:
    return isinstance(observation, tuple) and len(cast("tuple[Any, ...]", observation)) == 2 and isinstance(observation[1], Mapping)


async def _call(
    function: Callable[..., Any], arguments: tuple[Any, ...], name: str, about: str, timeout_s: float | None, in_thread: bool
) -> Any:
    """Call a sync or async function and return its result. Raises EnvironmentFault if it raises or is late."""
    deadline = trio.move_on_after(math.inf if timeout_s is None else timeout_s)
    try:
        with deadline:
            return await call_function(function, arguments, in_thread=in_thread, timeout_s=timeout_s)
    except _PASSING:
        raise
    except CodeBlocked as block:
        if block.timeout_s != timeout_s:  # the alarm of a caller, which has less time
            raise
        late = f"{name} did not return within {timeout_s:g} s {about}: it blocked the event loop at {block.place}"
        raise EnvironmentFault(f"{late}. Make it faster, let it run in a thread, or raise the timeout") from block
    except BaseException as error:  # the environment is the user's: whatever it raises is its own fault, handled by the user's policy
        if is_passed_on(error):
            raise
        if not deadline.cancelled_caught:  # otherwise it raised when it was told to end
            raise EnvironmentFault(f"{name} raised {type(error).__name__} {about} ({locate_error(error)}): {error}") from error
    raise EnvironmentFault(f"{name} did not return within {timeout_s:g} s {about}: make it faster, or raise the timeout")


async def call_function(
    function: Callable[..., Any], arguments: tuple[Any, ...] = (), *, in_thread: bool = False, timeout_s: float | None = None
) -> Any:
    """Call a user's function, sync or async, and return its result.

    Args:
        in_thread: run a sync function in a thread, which is abandoned on cancellation.
        timeout_s: seconds for which it may block the event loop; None = no limit.

    Raises: CodeBlocked if it blocks the event loop for longer.
    """
    most = math.inf if timeout_s is None else timeout_s
    if in_thread and not is_async_function(function):
        # a limiter of its own: a hanging call takes none of trio's limited threads from others;
        # boxed, because trio refuses a plain function that returns a coroutine
        (result,) = await trio.to_thread.run_sync(lambda: (function(*arguments),), abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
    else:
        with interrupt_blocking(most):
            result = function(*arguments)
    return await finish(result, most) if inspect.isawaitable(result) else result


async def _close(environment: Any, timeout_s: float | None, in_thread: bool) -> EnvironmentFault | None:
    """Close an environment, also in a canceled scope. Returns its fault, if any."""
    close = getattr(environment, "aclose", None) or getattr(environment, "close", None)
    if not callable(close):
        return None
    name = f"{type(environment).__name__}.{getattr(close, '__name__', 'close')}"
    with trio.CancelScope(shield=True):
        try:
            await _call(close, (), name, "at the end of its episode", CLOSE_TIMEOUT_S if timeout_s is None else timeout_s, in_thread)
        except _PASSING as error:
            logging.getLogger(__name__).warning("%s", error)
            return error if isinstance(error, EnvironmentFault) else EnvironmentFault(str(error))
    return None
