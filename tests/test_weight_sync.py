"""All engines get the weights, or an error says who did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts.engines.protocol import WEIGHT_VERSION_FILE, InferenceEngine
from rollouts.errors import CheckpointError, ConfigError, EngineError, EngineTimeout
from rollouts.testing import FakeEngine
from rollouts.types import SamplingParams
from rollouts.weight_sync import sync_weights_in_memory, sync_weights_to_engines


def write_version(path: Path, version: Any) -> None:
    (path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))


class StuckEngine:
    """Says yes to every update and stays where it is."""

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        return {"success": True, "weight_version": 5}

    async def get_weight_version(self) -> int:
        return 4


class AnsweringEngine:
    """Answers an update with whatever it was given."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.answer = answer

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        return self.answer


async def test_updates_run_together_and_answers_keep_engine_order(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    engines = [FakeEngine(weight_version=10 * k, seconds_per_update=3.0 - k) for k in range(3)]
    answers = await sync_weights_to_engines(engines, tmp_path)
    assert [answer["weight_version"] for answer in answers] == [1, 11, 21]
    assert trio.current_time() == 3.0


async def test_every_engine_takes_the_version_of_the_directory_and_samples_under_it(tmp_path: Path) -> None:
    write_version(tmp_path, 7)
    engines = [FakeEngine(weight_version=k) for k in range(3)]
    await sync_weights_to_engines(engines, tmp_path)
    for engine in engines:
        completion = await engine.generate((3,), SamplingParams())
        assert set(completion.output_versions) == {7}


async def test_one_failure_names_the_engine_its_cause_and_who_has_the_new_weights(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    cause = EngineTimeout("no answer in 30 s")
    engines = [FakeEngine(seconds_per_update=5.0), FakeEngine(update_error=cause), FakeEngine()]
    with pytest.raises(EngineError) as caught:
        await sync_weights_to_engines(engines, tmp_path)
    message = str(caught.value)
    assert "1 of 3 engines" in message
    assert "engine 1 (FakeEngine): EngineTimeout: no answer in 30 s" in message
    assert "already have the new weights: engine 0 (FakeEngine), engine 2 (FakeEngine)" in message
    assert caught.value.__cause__ is cause
    assert [engine.weight_version for engine in engines] == [1, 0, 1], "a failure must not stop the update of the others"


async def test_several_failures_are_all_told(tmp_path: Path) -> None:
    engines = [FakeEngine(update_error=OSError("disk")), FakeEngine(update_error=KeyError("weights"))]
    with pytest.raises(EngineError, match=r"engine 0 .*disk.*engine 1 .*weights.*No engine is sure to have the new weights") as caught:
        await sync_weights_to_engines(engines, tmp_path)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2


async def test_an_engine_that_only_says_yes_is_found_out(tmp_path: Path) -> None:
    engine: Any = StuckEngine()
    with pytest.raises(EngineError, match=r"answered with weight version 5, but get_weight_version\(\) gives 4"):
        await sync_weights_to_engines([engine], tmp_path)


async def test_an_engine_on_another_version_than_the_directory_is_an_error(tmp_path: Path) -> None:
    write_version(tmp_path, 6)
    engine: Any = StuckEngine()
    with pytest.raises(EngineError, match="reports weight version 5 after the update, expected 6"):
        await sync_weights_to_engines([engine], tmp_path)


@pytest.mark.parametrize("answer", [{}, {"success": False, "weight_version": 1}, {"success": True}])
async def test_an_answer_without_success_and_version_is_an_error(tmp_path: Path, answer: Mapping[str, Any]) -> None:
    engine: Any = AnsweringEngine(answer)
    with pytest.raises(EngineError, match="its answer is"):
        await sync_weights_to_engines([engine], tmp_path)


@pytest.mark.parametrize("version", ["7", 1.5, None, True])
async def test_bad_directories_are_refused_before_any_engine_is_asked(tmp_path: Path, version: Any) -> None:
    engine = FakeEngine()
    with pytest.raises(CheckpointError, match="not a directory"):
        await sync_weights_to_engines([engine], tmp_path / "absent")
    write_version(tmp_path, version)
    with pytest.raises(CheckpointError, match="weight_version"):
        await sync_weights_to_engines([engine], tmp_path)
    (tmp_path / WEIGHT_VERSION_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        await sync_weights_to_engines([engine], tmp_path)
    assert engine.calls == []


async def test_weights_in_memory_reach_every_engine(autojump_clock: trio.testing.MockClock) -> None:
    engines = [FakeEngine(seconds_per_update=2.0), FakeEngine(seconds_per_update=1.0)]
    answers = await sync_weights_in_memory(engines, {"w": torch.ones(2)}, 3)
    assert [answer["weight_version"] for answer in answers] == [3, 3]
    assert trio.current_time() == 2.0
    assert all(engine.weights is not None and torch.equal(engine.weights["w"], torch.ones(2)) for engine in engines)


async def test_an_engine_without_in_memory_updates_is_refused_before_any_is_asked() -> None:
    able, unable = FakeEngine(), StuckEngine()
    engines: list[Any] = [able, unable]
    with pytest.raises(ConfigError, match=r"engine 1 \(StuckEngine\) has no update_weights"):
        await sync_weights_in_memory(engines, {}, 3)
    assert able.calls == []


async def test_no_engines_is_nothing_to_do(tmp_path: Path) -> None:
    engines: list[InferenceEngine] = []
    assert await sync_weights_to_engines(engines, str(tmp_path)) == []


async def test_cancelling_a_sync_is_not_an_engine_failure(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(1.0) as scope:
        await sync_weights_to_engines([FakeEngine(seconds_per_update=5.0)], tmp_path)
    assert scope.cancelled_caught
