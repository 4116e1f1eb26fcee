"""Reward code as source text from untrusted users: executed in a sandbox, with a typed outcome.

async with open_code_pool(num_workers=2, limits=SandboxLimits(wall_s=5.0)) as pool:
    result = await execute_user_reward_code("def reward(messages, **_): return len(messages)", messages, pool=pool)
    result.value, result.error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import CallResult, SandboxLimits
from rollouts.sandbox.pool import SandboxPool, SandboxView


def open_code_pool(
    *,
    num_workers: int = 1,
    limits: SandboxLimits | None = None,
    confinement: Confinement | None = None,
    readable: Sequence[str | Path] = (),
    environment: Mapping[str, str] | None = None,
    packages: bool = True,
) -> SandboxPool:
    """Open a pool for execute_user_reward_code and execute_code; use it with `async with`. Arguments as for SandboxPool."""
    return SandboxPool(
        "rollouts.sandbox.inside.source_code:call_source",
        num_workers=num_workers,
        limits=limits,
        confinement=confinement,
        view=SandboxView(readable=readable, environment=environment or {}, packages=packages),
    )


async def execute_code(code: str, function: str, arguments: Mapping[str, Any], *, pool: SandboxPool) -> CallResult:
    """Execute source text in a process of its own and call a function that it defines.

    Args:
        code: Python source text.
        function: name of the function.
        arguments: keyword arguments, of JSON values.
        pool: from open_code_pool.

    Returns: the function's value, or the failure: SyntaxError and all other errors of the code are failures, not exceptions.
    """
    return await pool.call({"code": code, "function": function, "arguments": dict(arguments)})


async def execute_user_reward_code(
    code: str,
    messages: Sequence[Mapping[str, Any]],
    ground_truth: Any = None,
    *,
    function: str = "reward",
    arguments: Mapping[str, Any] | None = None,
    pool: SandboxPool | None = None,
    limits: SandboxLimits | None = None,
) -> CallResult:
    """Execute untrusted reward code on a conversation.

    Args:
        code: Python source text that defines `function(messages, ground_truth, **arguments)`.
        messages: the conversation, of JSON values.
        ground_truth: passed to the function if it is not None, of JSON values.
        function: name of the function.
        arguments: further keyword arguments, of JSON values.
        pool: from open_code_pool; None = start a sandbox for this call, some 100 ms.
        limits: limits of that sandbox.

    Returns: the function's value as JSON, or a failure with result.error: an infinite loop ends at limits.wall_s with SandboxFailure.WALL.

    Raises:
        SandboxError: no sandbox can be started, or the messages are not JSON.
    """
    given = {"messages": [dict(message) for message in messages], **(arguments or {})}
    if ground_truth is not None:
        given["ground_truth"] = ground_truth
    if pool is not None:
        return await execute_code(code, function, given, pool=pool)
    async with open_code_pool(limits=limits) as own:
        return await execute_code(code, function, given, pool=own)
