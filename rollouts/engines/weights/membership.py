"""Groups of a trainer and several servers: ranks, joining together and leaving."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from typing import Any, TypeAlias

import trio

from rollouts.errors import EngineError, raise_single_errors
from rollouts.weight_specs import Bucket

LEAVE_S = 10.0
"""Seconds that a server or the trainer has to leave a group."""

CreateBody: TypeAlias = Callable[[Bucket, Any], Mapping[str, Any]]
"""(bucket, message that the sender prepared for it) -> body of the route that takes it."""


def place_ranks(num_ranks: Sequence[int]) -> tuple[list[int], int]:
    """Place servers in a group whose rank 0 is the trainer, one after another.

    Args:
        num_ranks: processes of each server.

    Returns: the first rank of each server; the size of the group.
    """
    *offsets, world_size = accumulate(num_ranks, initial=1)
    return offsets, world_size


@asynccontextmanager
async def open_membership(
    joins: Sequence[Callable[[], Awaitable[None]]], leaves: Sequence[Callable[[], Awaitable[None]]], join_here: Callable[[], Awaitable[Any]]
) -> AsyncGenerator[Any]:
    """Let servers and this process join a group at the same time.

    Args:
        joins: join of each server; returns when all members are there.
        leaves: leave of the same servers; called for those that joined, if the others did not.
        join_here: this process's part.

    Yields: the result of join_here.
    Raises: EngineError of a member that could not join.
    """
    joined: list[Callable[[], Awaitable[None]]] = []
    groups: list[Any] = []

    async def join(i: int) -> None:
        await joins[i]()
        joined.append(leaves[i])

    async def meet() -> None:
        groups.append(await join_here())

    try:
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for i in range(len(joins)):
                    nursery.start_soon(join, i)
                nursery.start_soon(meet)
    except BaseException:
        with trio.CancelScope(shield=True):
            await leave_all(joined)
        raise
    yield groups.pop()


async def leave_all(leaves: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Remove servers from a group, within LEAVE_S; a server that is gone has left."""

    async def leave(one: Callable[[], Awaitable[None]]) -> None:
        with suppress(EngineError):  # a server that is gone has left
            await one()

    with trio.move_on_after(LEAVE_S):
        async with trio.open_nursery() as nursery:
            for one in leaves:
                nursery.start_soon(leave, one)
