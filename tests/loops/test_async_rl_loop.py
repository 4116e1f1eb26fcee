"""The asynchronous loop: equal to the synchronous one where nothing overlaps, bounded where it does, and resumable with all in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from resident_prompts import find_prompts

from rollouts.algorithms.presets import decoupled, grpo, ppo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.backends.factory import create_critic_backend
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.filters import check_reward_nonzero_std
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import BackendError, ConfigError, DataError, EngineError, GenerationError, GenerationTimeout
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.seeds import derive_seed
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model, random_answer
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.parity import ParityWarning
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import KLControl, RolloutBatch, Sample, SamplingParams

IN_MEMORY = RLTrainingConfig(num_steps=5, weight_sync="memory")
ON = AsyncConfig(enabled=True, max_staleness=2, patience_s=1000.0)


def random_reward(sample: Sample) -> float:
    """A reward that depends on the sampled tokens alone."""
    return float(derive_seed(*sample.tokens) % 2)


async def random_reward_at_once(sample: Sample) -> float:
    """random_reward without a thread, beside which virtual time would go on."""
    return random_reward(sample)


class Parts:
    """Fakes of one run, whose engine takes a second a token and whose trainer takes some seconds a job."""

    def __init__(
        self,
        asynchronous: AsyncConfig = ON,
        *,
        batch_size: int = 4,
        seconds_per_token: float = 1.0,
        seconds_per_job: float = 10.0,
        sync_every: int = 1,
        num_prompts: int = 1000,
        segment_wise: bool = False,
        **engine: Any,
    ) -> None:
        self.backend = FakeBackend(seconds_per_job=seconds_per_job)
        self.engine = FakeEngine(random_answer(mean_length=8), seconds_per_token=seconds_per_token, **engine)
        self.buffer = DataBuffer([f"s{i}=" for i in range(num_prompts)])
        self.rollout = RolloutConfig(
            batch_size=batch_size,
            n_samples_per_prompt=2,
            generate_fn=create_generate_fn([self.engine], create_char_tokenizer(), SamplingParams(max_tokens=12)),
            reward_fn=random_reward_at_once,
            segment_log_probs=segment_wise,
        )
        self.executor = create_workflow_executor(
            self.buffer, self.rollout, asynchronous, engines=[self.engine], batches_per_version=sync_every
        )
        self.batches: list[RolloutBatch] = []

    async def run(self, config: RLTrainingConfig, logger: JSONLLogger | None = None, **options: Any) -> list[dict[str, float]]:
        async with self.executor:
            return await run_async_rl_training(
                self.backend, self.buffer, self.executor, [self.engine], config, logger,
                clock=trio.current_time, on_rollouts=lambda step, batch: self.batches.append(batch), **options,
            )  # fmt: skip

    async def resume(self, checkpoint_dir: Path, config: RLTrainingConfig, log: Path, **options: Any) -> list[dict[str, float]]:
        """Go on from the newest checkpoint, the log cut back to it."""
        checkpoint = latest_checkpoint(checkpoint_dir)
        assert checkpoint is not None
        with log.open("r+b") as file:
            file.truncate(read_run_state(checkpoint).metrics_bytes)
        point = await restore_rl_run(checkpoint, self.backend, self.executor, [self.engine], config)
        return await self.run(config, JSONLLogger(log), checkpoint_dir=checkpoint_dir, resume=point, **options)


def prompts_of(batches: Sequence[RolloutBatch]) -> list[int]:
    return [index for batch in batches for index in sorted({sample.group_index for sample in batch.samples})]


def resident_prompts(executor: WorkflowExecutor) -> list[int]:
    """Indices of all prompts that the executor's state holds."""
    return find_prompts(executor.state_dict())


def without_timings(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


# -- with a model


def make_model_run(
    asynchronous: AsyncConfig | None, *, vocab_size: int = 64, minibatches: int = 2, algorithm=None, with_critic: bool = False
):
    """The parts of a run with a tiny model and the embedded engine; asynchronous = None: of the synchronous loop."""
    import copy

    model = create_tiny_model(vocab_size=vocab_size, seed=3)
    engine = InProcessEngine(copy.deepcopy(model), create_char_tokenizer())
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=3e-3))
    buffer = DataBuffer([f"{i}+{i}=" for i in range(10)])
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6))
    rollout = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=4,
        generate_fn=generate,
        reward_fn=random_reward,
        segment_log_probs=asynchronous is not None and asynchronous.segment_wise,
    )
    training = replace(IN_MEMORY, num_minibatches=minibatches, algorithm=algorithm, eval_every=2)
    options: dict[str, Any] = {"critic": create_critic_backend(model, lr=1e-3)} if with_critic else {}

    async def evaluate() -> dict[str, float]:
        answers = [await engine.generate([5 + i, 7], SamplingParams(max_tokens=4, seed=i), request_id=f"eval-{i}") for i in range(3)]
        return {"eval_score": sum(sum(answer.output_log_probs) for answer in answers)}

    async def run() -> list[dict[str, float]]:
        if asynchronous is None:
            async with AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:
                return await run_rl_training(backend, buffer, manager, [engine], training, evaluate=evaluate, **options)
        async with create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor:
            return await run_async_rl_training(backend, buffer, executor, [engine], training, evaluate=evaluate, **options)

    return run


async def test_without_staleness_the_numbers_are_those_of_the_synchronous_loop():
    algorithm = decoupled(grpo())
    expected = without_timings(await make_model_run(None, algorithm=algorithm)())
    found = without_timings(await make_model_run(AsyncConfig(max_staleness=0), algorithm=algorithm)())
    of_the_manager = {"num_rounds", "num_groups_generated", "num_groups_dropped", "num_groups_carried_in", "num_groups_carried_over",
                      "num_groups_partial", "filter_pass_rate"}  # fmt: skip
    assert len(found) == 5
    for ours, theirs in zip(found, expected, strict=True):
        shared = set(theirs) - of_the_manager
        assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert {"loss", "grad_norm", "reward_mean", "rollout_kl", "importance_weight"} <= set(expected[0])
    assert "eval_score" in expected[1]


async def test_without_staleness_a_filter_leaves_the_same_groups(autojump_clock):
    parts, again = (Parts(replace(ON, max_staleness=0)) for _ in range(2))
    async with create_workflow_executor(
        parts.buffer, replace(parts.rollout, filter_fn=check_reward_nonzero_std), replace(ON, max_staleness=0), engines=[parts.engine]
    ) as executor:
        found = await run_async_rl_training(parts.backend, parts.buffer, executor, [parts.engine], IN_MEMORY)
    async with AsyncRolloutManager(
        again.buffer, replace(again.rollout, filter_fn=check_reward_nonzero_std), engines=[again.engine]
    ) as manager:
        expected = await run_rl_training(again.backend, again.buffer, manager, [again.engine], IN_MEMORY)
    assert sum(line["num_groups_filtered"] for line in found) > 0
    for ours, theirs in zip(without_timings(found), without_timings(expected), strict=True):
        assert {"loss", "reward_mean", "num_groups_filtered", "epoch", "staleness_max"} <= set(ours) & set(theirs)
        shared = set(ours) & set(theirs)
        assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


async def test_a_critic_is_trained_beside_and_its_numbers_are_those_of_the_synchronous_loop():
    algorithm = ppo()
    expected = without_timings(await make_model_run(None, algorithm=algorithm, with_critic=True)())
    found = without_timings(await make_model_run(AsyncConfig(max_staleness=0), algorithm=algorithm, with_critic=True)())
    names = ("loss", "critic_loss", "explained_variance", "grad_norm")
    assert [[line[name] for name in names] for line in found] == [[line[name] for name in names] for line in expected]


async def test_rollouts_run_beside_training_on_a_model_and_every_number_is_there():
    history = await make_model_run(AsyncConfig(max_staleness=2), algorithm=decoupled(grpo()))()
    assert len(history) == 5
    for line in history:
        assert {"staleness_mean", "staleness_max", "trainer_wait_s", "engine_idle_s", "num_groups_purged", "num_groups_filtered",
                "num_groups_retried", "num_groups_failed", "mismatch_kl", "importance_weight", "max_importance_weight",
                "dropped_fraction"} <= set(line)  # fmt: skip
        assert line["staleness_max"] <= 2
        assert sum(value for key, value in line.items() if key.removeprefix("staleness_").isdigit()) == pytest.approx(1.0)
        assert all(torch.isfinite(torch.tensor(value)) for value in line.values())


async def test_segment_wise_from_one_switch():
    asynchronous = AsyncConfig(max_staleness=2, enable_segment_wise_ppo=True)
    history = await make_model_run(asynchronous, algorithm=decoupled(grpo(), segment_wise=True))()
    assert sum(line["num_segment_tokens"] for line in history) > 0
    assert all(line["num_missed_tokens"] == 0 for line in history), "every token's window was met"
    assert any(line["staleness_max"] > 0 for line in history)


# -- in virtual time


async def test_training_and_generation_overlap(autojump_clock):
    parts = Parts(replace(ON, max_staleness=1), seconds_per_token=1.0, seconds_per_job=4.0)
    history = await parts.run(IN_MEMORY)
    alone = Parts(replace(ON, max_staleness=0), seconds_per_token=1.0, seconds_per_job=4.0)
    apart = await alone.run(IN_MEMORY)
    assert sum(line["step_s"] for line in history) < 0.8 * sum(line["step_s"] for line in apart)
    assert [line["staleness_max"] for line in apart] == [0.0] * 5
    assert max(line["staleness_max"] for line in history) == 1.0
    assert sum(line["trainer_wait_s"] for line in history) < 0.5 * sum(line["trainer_wait_s"] for line in apart)
    assert sum(line["engine_idle_s"] for line in history) < 0.5 * sum(line["engine_idle_s"] for line in apart)
    assert all(line["engine_idle_s"] >= before["train_s"] > 0 for before, line in pairwise(apart)), "engines waited for the trainer"
    assert not any("max_staleness" in line or "generate_s" in line for line in history), "one name for each number"


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("in_flight", ["continue", "interrupt"])
async def test_no_token_is_trained_beyond_its_staleness(autojump_clock, max_staleness: int, sync_every: int, in_flight):
    asynchronous = replace(ON, max_staleness=max_staleness, in_flight=in_flight)
    parts = Parts(asynchronous, sync_every=sync_every, seconds_per_job=3.0)
    history = await parts.run(replace(IN_MEMORY, num_steps=8, sync_every=sync_every))
    assert [line["weight_version"] for line in history] == [step // sync_every for step in range(8)]
    for step, batch in enumerate(parts.batches):
        versions = [v for sample in batch.samples for v in sample.weight_versions or () if v >= 0]
        assert step // sync_every - min(versions) <= max_staleness
    trained = prompts_of(parts.batches)
    assert len(set(trained)) == len(trained) == 8 * 4
    samples = [sample for batch in parts.batches for sample in batch.samples]
    assert all((sample.segment_log_probs, sample.segment_versions) == (None, None) for sample in samples), "the switch is off"
    assert not any("num_segment_tokens" in line or "num_missed_tokens" in line for line in history)
    residents = resident_prompts(parts.executor)
    assert sorted(trained + residents) == list(range(parts.buffer.state.sample_offset))


async def test_an_evaluation_runs_beside_the_next_step_and_its_numbers_stand_in_its_own_line(autojump_clock, tmp_path: Path):
    parts = Parts(seconds_per_job=5.0)
    spans: list[tuple[float, float]] = []

    async def evaluate() -> dict[str, float]:
        version, started = await parts.engine.get_weight_version(), trio.current_time()
        await trio.sleep(4)
        assert await parts.engine.get_weight_version() == version, "the weights changed under the evaluation"
        spans.append((started, trio.current_time()))
        return {"eval_version": float(version)}

    log = tmp_path / "metrics.jsonl"
    history = await parts.run(replace(IN_MEMORY, eval_every=2), JSONLLogger(log), evaluate=evaluate)
    lines = read_metrics(log)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line.get("eval_version") for line in lines] == [None, 2.0, None, 4.0, 5.0]
    total = sum(line["step_s"] for line in history)
    assert trio.current_time() < total + sum(end - start for start, end in spans[:-1]), "the evaluations cost nothing but the last"


@pytest.mark.parametrize("stop_after", [1, 2, 4])
@pytest.mark.parametrize("order", ["finished", "submitted"])
async def test_a_run_stopped_with_everything_in_flight_goes_on_without_loss(autojump_clock, tmp_path: Path, stop_after: int, order):
    config = replace(IN_MEMORY, num_steps=6, eval_every=1)
    log, asked = tmp_path / "metrics.jsonl", iter([False] * (stop_after - 1) + [True])
    asynchronous = replace(ON, order=order)

    async def evaluate(parts: Parts) -> dict[str, float]:
        return {"eval_version": float(await parts.engine.get_weight_version())}

    first = Parts(asynchronous, seconds_per_job=2.0)
    await first.run(
        config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked), evaluate=partial(evaluate, first)
    )
    assert any(sample.tokens for sample in first.executor.resident_samples), "nothing was in flight, so the test shows nothing"
    second = Parts(asynchronous, seconds_per_job=2.0)
    await second.resume(tmp_path / "c", config, log, evaluate=partial(evaluate, second))
    lines = read_metrics(log)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["eval_version"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert max(line["staleness_max"] for line in lines) <= 2
    trained = prompts_of([*first.batches, *second.batches])
    residents = resident_prompts(second.executor)
    assert sorted(trained + residents) == list(range(second.buffer.state.sample_offset))
    if order == "submitted":
        assert trained == list(range(24))


@pytest.mark.parametrize("segment_wise", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_run_cancelled_at_any_moment_goes_on_without_loss(autojump_clock, tmp_path: Path, segment_wise: bool):
    asynchronous = replace(ON, enable_segment_wise_ppo=segment_wise, on_failure="drop")
    algorithm = decoupled(grpo(), segment_wise=True) if segment_wise else None
    config = replace(IN_MEMORY, num_steps=5, eval_every=1, checkpoint_every=1, algorithm=algorithm)

    async def evaluate() -> dict[str, float]:
        await trio.sleep(1.5)
        return {"eval": 1.0}

    for moment in range(1, 60, 7):
        directory = tmp_path / str(moment)
        log, checkpoints = directory / "metrics.jsonl", directory / "c"
        first, second = (Parts(asynchronous, seconds_per_job=1.5, segment_wise=segment_wise) for _ in range(2))
        with trio.move_on_after(moment + 0.1):
            await first.run(config, JSONLLogger(log), checkpoint_dir=checkpoints, evaluate=evaluate)
        checkpoint = latest_checkpoint(checkpoints)
        done = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_"))
        if checkpoint is None:
            log.write_text("")
            await second.run(config, JSONLLogger(log), checkpoint_dir=checkpoints, evaluate=evaluate)
        elif done < config.num_steps:
            await second.resume(checkpoints, config, log, evaluate=evaluate)
        last = first if done == config.num_steps else second
        steps = [line["step"] for line in read_metrics(log)]
        assert steps == [1, 2, 3, 4, 5] or (done == config.num_steps and steps == [1, 2, 3, 4]), "cancelled before its last line"
        trained = prompts_of([*first.batches[:done], *second.batches])
        assert sorted(trained + resident_prompts(last.executor)) == list(range(last.buffer.state.sample_offset))
        assert len(trained) == 5 * 4


async def test_capacity_after_a_resume_is_that_of_the_uninterrupted_run(autojump_clock, tmp_path: Path):
    config = replace(IN_MEMORY, num_steps=4)
    log, asked = tmp_path / "metrics.jsonl", iter([False, True])
    first = Parts()
    await first.run(config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked))
    second = Parts()
    await second.resume(tmp_path / "c", config, log)
    straight = Parts()
    await straight.run(config)
    taken = [parts.buffer.state.sample_offset for parts in (second, straight)]
    assert taken[0] == taken[1] == (2 + 4) * 4, "(max_staleness + version + 1) * batch_size at the last version that opened capacity"


async def test_a_resumed_run_without_staleness_writes_the_metrics_file_of_the_uninterrupted_one(autojump_clock, tmp_path: Path):
    config, on_policy = replace(IN_MEMORY, num_steps=6, eval_every=2), replace(ON, max_staleness=0)

    async def evaluate(parts: Parts) -> dict[str, float]:
        return {"eval_version": float(await parts.engine.get_weight_version())}

    straight = Parts(on_policy)
    await straight.run(config, JSONLLogger(tmp_path / "straight.jsonl"), evaluate=partial(evaluate, straight))
    log, asked = tmp_path / "resumed.jsonl", iter([False, False, False, True])
    first, second = Parts(on_policy), Parts(on_policy)
    await first.run(
        config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked), evaluate=partial(evaluate, first)
    )
    await second.resume(tmp_path / "c", config, log, evaluate=partial(evaluate, second))
    assert without_timings(read_metrics(log)) == without_timings(read_metrics(tmp_path / "straight.jsonl"))


@pytest.mark.parametrize(("sync_every", "stop_after"), [(1, 2), (2, 2), (2, 3)])
async def test_no_token_misses_its_window_in_a_segment_wise_run_that_is_resumed(
    autojump_clock, tmp_path: Path, sync_every: int, stop_after: int
):
    config = replace(IN_MEMORY, num_steps=8, sync_every=sync_every, algorithm=decoupled(grpo(), segment_wise=True))
    asynchronous = replace(ON, enable_segment_wise_ppo=True)
    log, asked = tmp_path / "metrics.jsonl", iter([False] * (stop_after - 1) + [True])
    first, second = (Parts(asynchronous, sync_every=sync_every, seconds_per_job=1.0, segment_wise=True) for _ in range(2))
    await first.run(config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked))
    await second.resume(tmp_path / "c", config, log)
    lines = read_metrics(log)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["num_missed_tokens"] for line in lines] == [0] * 8
    synced = [line["num_segment_tokens"] for line in lines if line["step"] % sync_every == 0]
    assert all(number > 0 for number in synced[:-1])
    assert max(line["staleness_max"] for line in lines) >= 1
    trained = prompts_of([*first.batches, *second.batches])
    assert sorted(trained + resident_prompts(second.executor)) == list(range(second.buffer.state.sample_offset))


@pytest.mark.parametrize("checkpoint_in_flight", ["restart", "interrupt"])
async def test_a_checkpoint_interrupts_only_where_it_is_told_to(autojump_clock, tmp_path: Path, checkpoint_in_flight):
    parts = Parts(replace(ON, checkpoint_in_flight=checkpoint_in_flight), seconds_per_job=2.0)
    aborts: list[int] = []

    def watch(step: int, batch: RolloutBatch) -> None:
        aborts.append(sum(call.method == "abort" for call in parts.engine.calls))

    async with parts.executor:
        await run_async_rl_training(
            parts.backend, parts.buffer, parts.executor, [parts.engine], replace(IN_MEMORY, checkpoint_every=1),
            checkpoint_dir=tmp_path / "c", on_rollouts=watch, clock=trio.current_time,
        )  # fmt: skip
    assert aborts == [0] * 5 if checkpoint_in_flight == "restart" else aborts[-1] >= 4


async def test_after_the_last_step_nothing_is_scored_for_nobody(autojump_clock):
    config = replace(IN_MEMORY, algorithm=decoupled(grpo(), segment_wise=True))
    parts = Parts(replace(ON, enable_segment_wise_ppo=True), seconds_per_job=1.0, segment_wise=True)
    history = await parts.run(config)
    assert [line["num_segment_tokens"] > 0 for line in history] == [True] * 4 + [False]
    last = max(v for sample in parts.executor.resident_samples for v in sample.weight_versions or (-1,))
    assert last == 4, "there would have been something to score"


async def test_the_epoch_of_a_line_is_that_of_its_prompts_and_not_of_those_that_were_taken_ahead(autojump_clock):
    parts = Parts(num_prompts=12)
    history = await parts.run(IN_MEMORY)
    newest = [max(sample.group_index for sample in batch.samples) for batch in parts.batches]
    assert [line["epoch"] for line in history] == [index // 12 for index in newest]
    assert parts.buffer.state.epoch_id > history[-1]["epoch"], "the buffer is ahead, else the test shows nothing"


async def test_steps_without_a_row_to_compare_with_the_trainer_are_counted_and_named_once(autojump_clock):
    parts = Parts(replace(ON, order="submitted"), seconds_per_job=10.0)
    with pytest.warns(ParityWarning, match="no row that weight version") as caught:
        history = await parts.run(replace(IN_MEMORY, parity=ParityConfig(threshold=100.0)))
    rows = [line["num_parity_rows"] for line in history]
    assert rows[0] == 8
    assert rows.count(0) > 1
    assert len([warning for warning in caught if warning.category is ParityWarning]) == 1
    assert ["engine_kl" in line for line in history] == [number > 0 for number in rows]


async def test_the_controller_of_the_kl_goes_on_where_a_run_is_resumed(autojump_clock, tmp_path: Path):
    control = KLControl(kl_coef=0.1, target=10.0, horizon=100.0)  # the KL stays below, so the coefficient falls with each row
    config = replace(IN_MEMORY, num_steps=6, kl_control=control, algorithm=grpo(kl_coef=0.1))
    log, asked = tmp_path / "metrics.jsonl", iter([False, False, True])
    first, second = Parts(), Parts()
    await first.run(
        config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked), reference=FakeBackend(name="reference")
    )
    await second.resume(tmp_path / "c", config, log, reference=FakeBackend(name="reference"))
    coefficients = [line["kl_coef"] for line in read_metrics(log)]
    assert coefficients == pytest.approx([0.1 * (1 - 0.2 * 8 / 100) ** step for step in range(6)])


async def test_weights_from_the_disk_between_whose_syncs_a_run_is_resumed(autojump_clock, tmp_path: Path):
    config = RLTrainingConfig(num_steps=7, sync_every=2, weight_sync="checkpoint", checkpoint_every=1)
    log, asked = tmp_path / "metrics.jsonl", iter([False, False, True])
    first, second = (Parts(sync_every=2, seconds_per_job=2.0) for _ in range(2))
    await first.run(config, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked))
    await second.resume(tmp_path / "c", config, log)
    assert [line["weight_version"] for line in read_metrics(log)] == [0, 0, 1, 1, 2, 2, 3]
    assert await second.engine.get_weight_version() == second.executor.version == 3
    trained = prompts_of([*first.batches, *second.batches])
    assert sorted(trained + resident_prompts(second.executor)) == list(range(second.buffer.state.sample_offset))


@pytest.mark.parametrize("is_async", [True, False])
async def test_rollouts_are_shown_before_training_to_a_function_of_either_kind(autojump_clock, is_async: bool):
    parts, seen = Parts(), []

    def note(step: int, batch: RolloutBatch) -> None:
        seen.append((step, parts.backend.num_updates))

    async def note_later(step: int, batch: RolloutBatch) -> None:
        await trio.sleep(1)
        note(step, batch)

    async with parts.executor:
        options: dict[str, Any] = {"on_rollouts": note_later if is_async else note}
        await run_async_rl_training(parts.backend, parts.buffer, parts.executor, [parts.engine], IN_MEMORY, **options)
    assert seen == [(step, step - 1) for step in range(1, 6)]


# -- failures


async def test_an_evaluation_that_never_ends_ends_the_run_after_its_patience(autojump_clock, tmp_path: Path):
    parts, log = Parts(replace(ON, patience_s=100.0)), tmp_path / "metrics.jsonl"
    with pytest.raises(GenerationTimeout, match=r"the evaluation of step 1 did not end within patience_s \(100 s\)") as caught:
        await parts.run(replace(IN_MEMORY, eval_every=1), JSONLLogger(log), evaluate=trio.sleep_forever, checkpoint_dir=tmp_path / "c")
    assert 100 <= trio.current_time() < 300
    assert any("step 2 and all rollouts" in note for note in caught.value.__notes__)
    assert [line["step"] for line in read_metrics(log)] == [1]


async def test_the_wait_for_an_evaluation_has_a_number_of_its_own(autojump_clock):
    async def evaluate() -> dict[str, float]:
        await trio.sleep(500)
        return {}

    history = await Parts().run(replace(IN_MEMORY, num_steps=3, eval_every=1), evaluate=evaluate)
    assert history[0]["evaluate_wait_s"] == 0
    assert all(300 < line["evaluate_wait_s"] < 500 for line in history[1:])
    for line in history:
        parts = ("trainer_wait_s", "train_s", "evaluate_wait_s", "checkpoint_s", "sync_s")
        assert sum(line[name] for name in parts) == pytest.approx(line["step_s"])


async def test_engines_that_cannot_be_stopped_do_not_hide_the_error_nor_keep_the_step_from_being_saved(autojump_clock, tmp_path: Path):
    failing = {"now": False}

    def fail_some(prompt: tuple[int, ...], seed: int | None) -> Exception | None:
        return ValueError("no sandbox") if failing["now"] and (seed or 0) % 5 == 0 else None

    parts = Parts(replace(ON, on_failure="raise"), seconds_per_job=0.1, error_for=fail_some)
    abort, problems = parts.engine.abort, iter([OSError("no route to host")])

    async def abort_later(request_ids: Any = None) -> None:
        problem = next(problems, None)
        if problem is not None:
            raise problem
        await abort(request_ids)

    def watch(step: int, batch: RolloutBatch) -> None:
        if step == 3:
            failing["now"], parts.engine.abort = True, abort_later

    with pytest.raises(ValueError, match="no sandbox") as caught:
        async with parts.executor:
            await run_async_rl_training(
                parts.backend, parts.buffer, parts.executor, [parts.engine], replace(IN_MEMORY, num_steps=9, checkpoint_every=20),
                checkpoint_dir=tmp_path / "c", on_rollouts=watch, clock=trio.current_time,
            )  # fmt: skip
    notes = "; ".join(caught.value.__notes__)
    assert "rollouts could not be stopped" in notes
    assert "no route to host" in notes
    assert f"are saved in {latest_checkpoint(tmp_path / 'c')}" in notes


async def test_the_error_of_an_evaluation_is_not_lost_where_the_training_beside_it_fails_too(autojump_clock):
    async def evaluate() -> dict[str, float]:
        await trio.sleep(1)
        raise DataError("the held-out file is gone")

    parts = Parts()
    parts.backend = FakeBackend(
        seconds_per_job=5.0, error_for=lambda method, count: BackendError("loss is NaN") if (method, count) == ("optim_step", 1) else None
    )
    with pytest.raises(BackendError, match="NaN") as caught:
        await parts.run(replace(IN_MEMORY, eval_every=1), evaluate=evaluate)
    assert any("the evaluation of step 1 failed: DataError('the held-out file is gone')" in note for note in caught.value.__notes__)


async def test_a_step_is_finished_when_all_of_it_is_known_and_not_before(autojump_clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = iter([None, ValueError("no such metric")])

    def summarize(metrics: dict[str, float]) -> dict[str, float]:
        error = next(calls)
        if error is not None:
            raise error
        return {}

    monkeypatch.setattr("rollouts.async_rl_loop.summarize_mismatch", summarize)
    with pytest.raises(ValueError, match="no such metric") as caught:
        await Parts().run(replace(IN_MEMORY, checkpoint_every=1), checkpoint_dir=tmp_path / "c")
    assert not getattr(caught.value, "__notes__", []), "weights of step 2 are not those of step 1"
    checkpoint = latest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    assert checkpoint.name == "step_0001"


async def test_an_error_while_a_run_finds_out_where_it_goes_on_leaves_the_checkpoints_alone(
    autojump_clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, asked = tmp_path / "metrics.jsonl", iter([False, True])
    await Parts().run(IN_MEMORY, JSONLLogger(log), checkpoint_dir=tmp_path / "c", should_stop=lambda: next(asked))
    before = sorted(path.name for path in (tmp_path / "c").iterdir())

    async def begin(*arguments: object) -> int:
        raise DataError("no weights")

    monkeypatch.setattr("rollouts.training.rl_run.RLRun.begin", begin)
    with pytest.raises(DataError, match="no weights"):
        await Parts().resume(tmp_path / "c", IN_MEMORY, log)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


async def test_weights_of_a_step_that_failed_half_way_are_not_saved(autojump_clock, tmp_path: Path):
    parts = Parts()
    parts.backend = FakeBackend(
        seconds_per_job=1.0, error_for=lambda method, count: BackendError("loss is NaN") if (method, count) == ("optim_step", 2) else None
    )
    with pytest.raises(BackendError, match="NaN") as caught:
        await parts.run(replace(IN_MEMORY, checkpoint_every=1), checkpoint_dir=tmp_path / "c")
    checkpoint = latest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    assert checkpoint.name == "step_0002"
    (note,) = caught.value.__notes__  # which tells of the checkpoint before it, and of none that was written for the failure
    assert note.startswith(f"in step 3; the last checkpoint, of finite weights, is {checkpoint}: --resume goes on from there")


async def test_an_error_of_the_rollouts_leaves_a_checkpoint_with_everything_and_says_so(autojump_clock, tmp_path: Path):
    failing = {"now": False}
    message = "the sandbox is gone"

    def fail_late(prompt: tuple[int, ...], seed: int | None) -> Exception | None:
        return ValueError(message) if failing["now"] else None

    config, log = replace(IN_MEMORY, num_steps=6, checkpoint_every=2), tmp_path / "metrics.jsonl"
    parts = Parts(replace(ON, on_failure="raise"), error_for=fail_late)

    def watch(step: int, batch: RolloutBatch) -> None:
        parts.batches.append(batch)
        failing["now"] = step == 3

    with pytest.raises(ValueError, match=message) as caught:
        async with parts.executor:
            await run_async_rl_training(
                parts.backend, parts.buffer, parts.executor, [parts.engine], config, JSONLLogger(log),
                checkpoint_dir=tmp_path / "c", on_rollouts=watch, clock=trio.current_time,
            )  # fmt: skip
    checkpoint = latest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    done = int(checkpoint.name.removeprefix("step_"))
    assert done == len(parts.batches) >= 3
    assert any(f"step {done} and all rollouts" in note and str(checkpoint) in note for note in caught.value.__notes__)
    again = Parts(replace(ON, on_failure="raise"))
    await again.resume(tmp_path / "c", config, log)
    assert [line["step"] for line in read_metrics(log)] == [1, 2, 3, 4, 5, 6]
    trained = prompts_of([*parts.batches, *again.batches])
    assert sorted(trained + resident_prompts(again.executor)) == list(range(again.buffer.state.sample_offset))


async def test_an_error_before_the_first_step_leaves_a_checkpoint_too(autojump_clock, tmp_path: Path):
    config, log = replace(IN_MEMORY, num_steps=2), tmp_path / "metrics.jsonl"
    parts = Parts(replace(ON, on_failure="raise"), error_for=lambda prompt, seed: ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await parts.run(config, JSONLLogger(log), checkpoint_dir=tmp_path / "c")
    again = Parts()
    await again.resume(tmp_path / "c", config, log)
    assert [line["step"] for line in read_metrics(log)] == [1, 2]
    assert sorted(prompts_of(again.batches) + resident_prompts(again.executor)) == list(range(again.buffer.state.sample_offset))


async def test_a_failed_evaluation_ends_the_run_with_its_error_and_the_step_is_saved(autojump_clock, tmp_path: Path):
    parts = Parts(replace(ON, patience_s=None), seconds_per_token=1000.0)

    async def evaluate() -> dict[str, float]:
        await trio.sleep(1)
        raise DataError("the held-out file is gone")

    log = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="held-out") as caught:
        await parts.run(replace(IN_MEMORY, eval_every=1), JSONLLogger(log), evaluate=evaluate, checkpoint_dir=tmp_path / "c")
    assert any("step 1 and all rollouts" in note for note in caught.value.__notes__)
    assert [line["step"] for line in read_metrics(log)] == [1]
    again = Parts()
    await again.resume(tmp_path / "c", IN_MEMORY, log)
    assert [line["step"] for line in read_metrics(log)] == [1, 2, 3, 4, 5]


async def test_dead_engines_end_the_run_after_its_patience_with_the_state_saved(autojump_clock, tmp_path: Path):
    async def refuse() -> int:
        await trio.lowlevel.checkpoint()
        raise EngineError("connection refused")

    parts = Parts(replace(ON, patience_s=60.0), error_for=lambda prompt, seed: EngineError("connection refused"))
    parts.engine.get_weight_version = refuse
    with pytest.raises(GenerationError, match="connection refused") as caught:
        await parts.run(IN_MEMORY, checkpoint_dir=tmp_path / "c")
    assert 60 <= trio.current_time() < 120
    assert any("saved" in note for note in caught.value.__notes__)


async def test_settings_that_contradict_the_algorithm_are_refused_before_the_first_rollout(autojump_clock):
    parts = Parts(replace(ON, enable_segment_wise_ppo=True))
    with pytest.raises(ConfigError, match="enable_segment_wise_ppo is True, but the algorithm does not read"):
        await parts.run(IN_MEMORY)
    parts = Parts(segment_wise=True)
    with pytest.raises(ConfigError, match="enable_segment_wise_ppo is False, but the algorithm requires"):
        await parts.run(replace(IN_MEMORY, algorithm=decoupled(grpo(), segment_wise=True)))


async def test_an_executor_made_for_another_number_of_steps_between_syncs_is_refused(autojump_clock):
    with pytest.raises(ConfigError, match=r"batches_per_version=1, but sync_every is 2: .* Pass batches_per_version=2"):
        await Parts().run(replace(IN_MEMORY, sync_every=2))


async def test_a_stop_request_is_true_or_false(autojump_clock):
    async def later() -> bool:
        return False

    with pytest.raises(ConfigError, match=r"should_stop returned <coroutine .*it is async"):
        await Parts().run(IN_MEMORY, should_stop=later)
