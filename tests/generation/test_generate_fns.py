"""Any shape of generate function is called rightly, and what it returns gets its place."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from samples import make_group

from rollouts.checks import describe_function, is_async_function
from rollouts.generation.contract import PendingGroup, accepts_partial, bind_generate_fn
from rollouts.types import Group, Prompt, Sample, Status


async def generate_async(prompt: Prompt, n: int) -> list[Sample]:
    assert threading.current_thread() is threading.main_thread()
    return list(make_group(prompt.index, n, prompt=prompt.content))


def generate_in_thread(prompt: Prompt, n: int) -> list[Sample]:
    assert threading.current_thread() is not threading.main_thread()
    return list(make_group(prompt.index, n, prompt=prompt.content))


class Workflow:
    async def __call__(self, prompt: Prompt, n: int) -> list[Sample]:
        return await generate_async(prompt, n)

    async def run(self, prompt: Prompt, n: int) -> list[Sample]:
        return await generate_async(prompt, n)


def add_argument(prompt: Prompt, n: int, extra: int) -> list[Sample]:
    assert extra == 3
    return list(make_group(prompt.index, n, prompt=prompt.content))


@pytest.mark.parametrize(
    ("function", "is_async", "name"),
    [
        (generate_async, True, "generate_async"),
        (generate_in_thread, False, "generate_in_thread"),
        (Workflow(), True, "Workflow"),
        (Workflow().run, True, "run"),
        (partial(add_argument, extra=3), False, "add_argument"),
        (lambda prompt, n: generate_async(prompt, n), False, "<lambda>"),
    ],
)
async def test_functions_of_every_shape_are_called(function: Any, is_async: bool, name: str) -> None:
    assert is_async_function(function) is is_async
    assert describe_function(function) == name
    group = await bind_generate_fn(function, 3)(PendingGroup(Prompt(content="p", index=7)))
    assert [(sample.index, sample.group_index) for sample in group] == [(21, 7), (22, 7), (23, 7)]


async def test_only_a_function_with_the_parameter_gets_the_unfinished_group() -> None:
    seen: list[Group] = []

    async def continues(prompt: Prompt, n: int, partial: Group = ()) -> list[Sample]:
        seen.append(partial)
        return list(make_group(prompt.index, n, prompt=prompt.content))

    begun = (Sample(tokens=(1,), loss_mask=(0.0,), status=Status.ABORTED, group_index=7),)
    pending = PendingGroup(Prompt(content="p", index=7), begun)
    assert accepts_partial(continues)
    assert not accepts_partial(generate_async)
    await bind_generate_fn(continues, 1)(pending)
    await bind_generate_fn(generate_async, 1)(pending)
    assert seen == [begun]


def test_pending_groups_round_trip() -> None:
    sample = Sample(tokens=(1,), loss_mask=(0.0,), status=Status.ABORTED, group_index=7, metadata={"a": [1]})
    pending = PendingGroup(Prompt(content="p", index=7, metadata={"ground_truth": "4"}), (sample,))
    assert PendingGroup.from_dict(pending.to_dict()) == pending
