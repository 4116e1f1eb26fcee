"""Any shape of generate function is called rightly, and what it returns gets its place."""

from __future__ import annotations

import threading
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from samples import make_group

from rollouts.checks import describe_function, is_async_function
from rollouts.errors import GenerationError
from rollouts.generation.contract import PendingGroup, accepts_partial, bind_generate_fn
from rollouts.generation.workflows import WorkflowData, create_workflow_generate_fn
from rollouts.outcomes import FIELD_OF_KEY, read_metadata_of_old_files
from rollouts.testing import FakeEngine, script_answer
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


@pytest.mark.parametrize("key", FIELD_OF_KEY)
async def test_metadata_for_which_a_sample_has_a_field_is_refused(key: str) -> None:
    """Without the check the entry would be ignored: a baseline with metadata={"trainable": False} would be trained on."""
    field = FIELD_OF_KEY[key].split(",")[0].removeprefix("Sample.")
    assert field in {f.name for f in fields(Sample)}

    async def generate(prompt: Prompt, n: int) -> list[Sample]:
        return [replace(sample, metadata={**prompt.metadata, key: False}) for sample in make_group(prompt.index, n)]

    with pytest.raises(GenerationError, match=rf"generate returned .* metadata\['{key}'\] = False, .* set Sample\.{field}"):
        await bind_generate_fn(generate, 1)(PendingGroup(Prompt(content="p", index=7)))
    column = PendingGroup(Prompt(content="p", index=7, metadata={key: False}))  # of the user's data
    (sample,) = await bind_generate_fn(generate, 1)(column)
    assert sample.metadata == {key: False} and sample.trainable


async def test_metadata_of_a_workflow_is_checked_as_well() -> None:
    async def run(engine: Any, data: WorkflowData) -> Sample:
        return replace(make_group(data.prompt.index, 1)[0], metadata={"trainable": False})

    generate_fn = create_workflow_generate_fn(run, [FakeEngine(script_answer([1]))])
    with pytest.raises(GenerationError, match=r"set Sample\.trainable"):
        await bind_generate_fn(generate_fn, 1)(PendingGroup(Prompt(content="p", index=7)))


def test_the_refused_keys_are_those_that_leave_the_metadata_of_old_files() -> None:
    values = read_metadata_of_old_files({"metadata": dict.fromkeys([*FIELD_OF_KEY, "mine"], 0)})
    assert values.pop("metadata") == {"mine": 0}
    assert set(values) == {name.split(",")[0].removeprefix("Sample.") for name in FIELD_OF_KEY.values()}


def test_pending_groups_round_trip() -> None:
    sample = Sample(tokens=(1,), loss_mask=(0.0,), status=Status.ABORTED, group_index=7, metadata={"a": [1]})
    pending = PendingGroup(Prompt(content="p", index=7, metadata={"ground_truth": "4"}), (sample,))
    assert PendingGroup.from_dict(pending.to_dict()) == pending
