"""All engines get the weights, or an error names those that did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from endless_models import create_endless_model
from server_waits import PATIENCE_S, wait_for_tokens, wait_until

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, InferenceEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import CheckpointError, ConfigError, EngineError, EngineTimeout
from rollouts.testing import FakeEngine, FakeSGLangServer, FakeVLLMServer, Fault, SGLangSettings, VLLMSettings
from rollouts.training.weight_sync import WeightProbe, sync_weights_in_memory, sync_weights_to_engines
from rollouts.types import Completion, SamplingParams


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
    with pytest.raises(ConfigError, match=r"engine 1 \(StuckEngine\) lacks the feature memory_updates"):
        await sync_weights_in_memory(engines, {}, 3)
    assert able.calls == []


async def test_no_engines_is_nothing_to_do(tmp_path: Path) -> None:
    engines: list[InferenceEngine] = []
    assert await sync_weights_to_engines(engines, str(tmp_path)) == []


async def test_cancelling_a_sync_is_not_an_engine_failure(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    with trio.move_on_after(1.0) as scope:
        await sync_weights_to_engines([FakeEngine(seconds_per_update=5.0)], tmp_path)
    assert scope.cancelled_caught


# -- over servers


PROMPT = (5, 9, 12, 20)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0)
LONG = SamplingParams(max_tokens=30)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [create_endless_model(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def weights(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories without numbers of their own."""
    folder = tmp_path_factory.mktemp("weights")
    for seed, model in enumerate(models):
        model.save_pretrained(folder / str(seed))
    return [folder / str(seed) for seed in range(3)]


both = pytest.mark.parametrize(
    ("create_server", "create_engine", "load_route"),
    [(FakeVLLMServer, VLLMEngine, "/collective_rpc"), (FakeSGLangServer, SGLangEngine, "/update_weights_from_disk")],
    ids=["vllm", "sglang"],
)
in_flight_modes = pytest.mark.parametrize("in_flight", ["continue", "abort"])


def score(model: Any, tokens: tuple[int, ...]) -> list[float]:
    """Log-probs of tokens[1:]."""
    with torch.no_grad():
        return gather_log_probs(model(torch.tensor([tokens])).logits[0, :-1], torch.tensor(tokens[1:])).tolist()


def assert_sampled_by(completion: Completion, models: dict[int, Any]) -> None:
    """Each token has the log-prob that the model of its version gives it."""
    by_version = {v: score(model, completion.input_tokens + completion.output_tokens) for v, model in models.items()}
    expected = [by_version[v][completion.input_len - 1 + t] for t, v in enumerate(completion.output_versions)]
    assert completion.output_log_probs == pytest.approx(expected, abs=1e-4)


@both
@in_flight_modes
async def test_two_syncs_at_once_never_share_a_version(weights, models, create_server, create_engine, load_route, in_flight) -> None:
    found: list[Completion] = []
    served = {0: models[0]}
    async with create_server(weights[0]) as server, create_engine(server.url, in_flight=in_flight) as engine:
        server.scheduler.hold_tokens(5)

        async def generate() -> None:
            found.append(await engine.generate(PROMPT, LONG))

        async def sync(i: int) -> None:
            answer = await engine.update_weights_from_checkpoint(weights[i])
            served[answer["weight_version"]] = models[i]

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(generate)
                await wait_for_tokens(server, 5, 3)
                async with trio.open_nursery() as syncs:
                    for i in (1, 2):
                        syncs.start_soon(sync, i)
                server.scheduler.release_tokens()
            found.append(await engine.generate(PROMPT, GREEDY.new(temperature=1.0)))
        assert await engine.get_weight_version() == 2
    assert sorted(served) == [0, 1, 2]
    assert set(found[-1].output_versions) == {2}
    for completion in found:
        assert_sampled_by(completion, served)


@both
@in_flight_modes
async def test_an_abort_during_a_sync_brings_back_what_there_is(
    weights, models, create_server, create_engine, load_route, in_flight
) -> None:
    found: dict[str, Completion] = {}
    async with create_server(weights[0], seconds_per_update=0.1) as server, create_engine(server.url, in_flight=in_flight) as engine:
        server.scheduler.hold_tokens(5)

        async def generate(name: str) -> None:
            found[name] = await engine.generate(PROMPT, LONG, request_id=name)

        async def abort() -> None:
            await wait_until(lambda: server.count(load_route) > 0)
            nursery.start_soon(generate, "late")
            await engine.abort(["early", "late"])

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for name in ("early", "other"):
                    nursery.start_soon(generate, name)
                await wait_for_tokens(server, 5, 2)
                nursery.start_soon(abort)
                await engine.update_weights_from_checkpoint(weights[1])
                await wait_until(lambda: "early" in found)
                server.scheduler.release_tokens()
        assert await engine.get_weight_version() == 1
    assert found["early"].finish_reason == "abort"
    assert 5 <= found["early"].output_len <= 12  # those that it had, and at most as many after the sync
    assert found["other"].finish_reason == "length"
    for completion in found.values():
        assert_sampled_by(completion, {0: models[0], 1: models[1]})


@both
async def test_requests_that_a_full_queue_refused_wait_for_their_repeat_across_a_sync(
    weights, models, create_server, create_engine, load_route
) -> None:
    full = (
        VLLMSettings(max_num_seqs=1, max_num_queued_reqs=1)
        if create_server is FakeVLLMServer
        else SGLangSettings(max_running_requests=2, max_queued_requests=0)
    )
    found: list[Completion] = []
    async with create_server(weights[0], full) as server, create_engine(server.url) as engine:
        route = "/inference/v1/generate" if create_server is FakeVLLMServer else "/generate"
        server.scheduler.hold_tokens(5)
        num_before = server.count(route)

        async def generate() -> None:
            found.append(await engine.generate(PROMPT, LONG))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(generate)
                await wait_for_tokens(server, 5)
                await wait_until(lambda: server.count(route) > num_before + 6)
                await engine.update_weights_from_checkpoint(weights[1])
                server.scheduler.release_tokens()
    assert len(found) == 5
    assert sum(0 in completion.output_versions for completion in found) in (1, 2)
    for completion in found:
        assert_sampled_by(completion, {0: models[0], 1: models[1]})


@both
async def test_the_server_is_told_the_whole_path(weights, create_server, create_engine, load_route, models, monkeypatch) -> None:
    """A server has a working directory of its own, and takes a path that is no directory there for the name of a model to download."""
    monkeypatch.chdir(weights[1].parent)
    async with create_server(weights[0]) as server, create_engine(server.url) as engine:
        await sync_weights_to_engines([engine], weights[1].name)
        (request,) = [request for request in server.received if request.path == load_route]
    body = request.json()
    assert body.get("kwargs", {}).get("weights_path", body.get("model_path")) == str(weights[1])


@both
async def test_where_one_server_fails_each_goes_on_under_its_own_version(weights, models, create_server, create_engine, load_route) -> None:
    async with (
        create_server(weights[0]) as one,
        create_server(weights[0]) as two,
        create_engine(one.url) as first,
        create_engine(two.url) as second,
    ):
        two.add_fault(Fault("status", load_route, status=500, body='{"error": {"message": "disk is gone"}}'))
        with pytest.raises(EngineError, match=r"1 of 2 engines.*engine 1 .*disk is gone.*already have the new weights: engine 0"):
            await sync_weights_to_engines([first, second], weights[1])
        for engine, version in ((first, 1), (second, 0)):
            completion = await engine.generate(PROMPT, LONG)
            assert set(completion.output_versions) == {version}
            assert_sampled_by(completion, {version: models[version]})


async def test_a_server_whose_outputs_are_not_those_of_the_new_weights_is_used_no_more(weights, models) -> None:
    probe = WeightProbe(tokens=PROMPT, log_probs=tuple(score(models[1], PROMPT)), tolerance=1e-3)
    async with FakeVLLMServer(weights[0]) as server, VLLMEngine(server.url) as engine:
        server.add_fault(Fault("status", "/collective_rpc", status=200, body='{"results": [null]}', content_type="application/json"))
        with pytest.raises(EngineError, match="reports the new version, but its log-probs of a probe are off"):
            await sync_weights_to_engines([engine], weights[1], probe=probe)
        with pytest.raises(EngineError, match="cannot be used: it reports the new version"):
            await engine.generate(PROMPT, LONG)
        await sync_weights_to_engines([engine], weights[1], probe=probe)
        assert_sampled_by(await engine.generate(PROMPT, LONG), {2: models[1]})


@both
@in_flight_modes
async def test_a_sync_cancelled_at_any_of_its_calls_leaves_weights_and_version_in_step(
    weights, models, create_server, create_engine, load_route, in_flight
) -> None:
    served = {0: models[0]}
    async with create_server(weights[0]) as server, create_engine(server.url, in_flight=in_flight) as engine:
        for number in range(1, 8):
            scope = trio.CancelScope()
            num_before = len(server.received)

            async def sync(scope: trio.CancelScope = scope, model: int = 1 + number % 2) -> None:
                with scope:
                    answer = await engine.update_weights_from_checkpoint(weights[model])
                    served[answer["weight_version"]] = models[model]

            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sync)
                    await wait_until(lambda last=num_before + number: len(server.received) >= last or not nursery.child_tasks)
                    scope.cancel()
                completion = await engine.generate(PROMPT, GREEDY.new(temperature=1.0))
            assert set(completion.output_versions) == {await engine.get_weight_version()}
            assert_sampled_by(completion, served)
