"""Waiting for what a fake server has done, instead of for a while that is long enough on one machine and not on another."""

from __future__ import annotations

from collections.abc import Callable

import trio
import trio.testing

from rollouts.testing import FakeSGLangServer, FakeVLLMServer

PATIENCE_S = 60.0  # after which something hangs


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.002)


async def wait_for_requests(server: FakeSGLangServer | FakeVLLMServer, path: str, count: int) -> None:
    """Wait until `count` requests have arrived and have run as far as they can."""
    await wait_until(lambda: server.count(path) >= count)
    await trio.testing.wait_all_tasks_blocked(0.01)


async def wait_for_tokens(server: FakeSGLangServer | FakeVLLMServer, count: int, num_sequences: int = 1) -> None:
    """Wait until `num_sequences` sequences have `count` tokens."""
    await wait_until(lambda: sum(len(s.draws) >= count for s in server.scheduler.sequences) >= num_sequences)
