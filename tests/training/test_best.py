"""The best checkpoint of a run, and its early end, in every loop, also across an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_async_rl_loop import ON, Parts
from test_reward_model_loop import make_backend, make_pairs
from test_rl_loop import make_run, run
from test_sft_loop import make_ragged

from rollouts.config import CheckpointConfig, RewardModelTrainingConfig, RLTrainingConfig, SFTTrainingConfig, parse_metric
from rollouts.errors import ConfigError
from rollouts.reward_model_loop import train_reward_model
from rollouts.sft_loop import run_sft_training
from rollouts.testing import FakeBackend
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.saving.best import BestCheckpoint, BestSoFar, add_evaluation
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.training.saving.run_state import read_run_state

VALUES = (0.1, 0.5, 0.9, 0.4, 0.9, 0.2, 0.95, 0.3)


def evaluations(values: Sequence[float], backend: Any = None) -> Callable[[], Any]:
    """An evaluation whose value depends on the number of updates alone, as that of a model does."""
    calls = iter(values)

    async def evaluate() -> dict[str, float]:
        return {"eval_accuracy": next(calls)}

    return evaluate


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step_"))


# -- the value


@given(st.lists(st.one_of(st.sampled_from(VALUES), st.just(float("nan"))), min_size=1, max_size=12), st.booleans())
def test_the_best_is_the_first_of_the_largest_or_smallest_values(values: list[float], smaller: bool):
    found = BestSoFar()
    for step, value in enumerate(values, start=1):
        found = add_evaluation(found, value, step, smaller_is_better=smaller)
    numbers = [(value if smaller else -value, step) for step, value in enumerate(values, start=1) if value == value]
    if not numbers:
        assert found == BestSoFar(num_since=len(values))
        return
    step = min(numbers)[1]
    assert (found.value, found.step, found.num_since) == (values[step - 1], step, len(values) - step)


def test_the_sense_of_a_metric_is_known_or_given_by_a_sign():
    assert parse_metric("held_out_accuracy") == ("eval_accuracy", False)
    assert parse_metric("eval_loss") == ("eval_loss", True)
    assert parse_metric("-eval_my_error") == ("eval_my_error", True)
    assert parse_metric("+eval_loss") == ("eval_loss", False)
    with pytest.raises(ConfigError, match=r"checkpoint\.best is 'eval_mine'.*=\+eval_mine.*=-eval_mine"):
        CheckpointConfig(best="eval_mine")
    with pytest.raises(ConfigError, match=r"checkpoint\.patience is 2.*--checkpoint\.best"):
        CheckpointConfig(patience=2)


def test_a_metric_that_no_evaluation_has_is_an_error_that_names_the_others():
    with pytest.raises(ConfigError, match=r"'eval_loss'.*step 3 measured no such metric: it measured eval_accuracy"):
        BestCheckpoint("eval_loss").add({"eval_accuracy": 1.0, "loss": 2.0}, 3)


def test_a_larger_patience_on_resume_goes_on_and_another_metric_starts_over():
    state = {"metric": "eval_accuracy", "value": 0.9, "step": 3, "num_since": 2}
    for patience, ended in ((2, True), (3, False), (0, False)):
        best = BestCheckpoint("eval_accuracy", patience=patience)
        best.load_state_dict(state)
        assert best.has_ended is ended
        assert best.state_dict() == state
    other = BestCheckpoint("eval_loss", patience=1)
    other.load_state_dict(state)
    assert other.found == BestSoFar()


# -- the loops


async def run_sft(directory: Path, best: BestCheckpoint, values: Sequence[float], **options: Any) -> list[dict[str, float]]:
    config = SFTTrainingConfig(num_steps=8, batch_size=2, checkpoint_every=1, eval_every=1)
    backend = options.pop("backend", FakeBackend())
    return await run_sft_training(
        backend, make_ragged(8), config, checkpoint_dir=directory, keep_last_n=1, evaluate=evaluations(values), best=best, **options
    )


async def test_sft_keeps_the_best_checkpoint_beyond_keep_last_n_and_ends_without_patience(tmp_path: Path):
    best = BestCheckpoint("eval_accuracy", patience=3)
    history = await run_sft(tmp_path, best, VALUES)
    assert [line["evaluations_since_best"] for line in history] == [0, 0, 0, 1, 2, 3]  # the second 0.9 is no better
    assert best.has_ended
    assert names(tmp_path) == ["step_0003", "step_0006"]
    assert (history[-1]["best_step"], history[-1]["best_value"]) == (3, 0.9)


async def test_without_patience_all_steps_are_done(tmp_path: Path):
    history = await run_sft(tmp_path, BestCheckpoint("eval_accuracy"), VALUES)
    assert len(history) == 8
    assert names(tmp_path) == ["step_0007", "step_0008"]


@pytest.mark.parametrize("stop_after", range(1, 7))
async def test_an_interrupted_sft_run_goes_on_counting(tmp_path: Path, stop_after: int):
    best = BestCheckpoint("eval_accuracy", patience=3)
    stops = iter([*[False] * (stop_after - 1), True])
    first = await run_sft(tmp_path, best, VALUES, should_stop=lambda: next(stops))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    resumed = BestCheckpoint("eval_accuracy", patience=3)
    resumed.load_state_dict(read_run_state(checkpoint).best)
    rest = await run_sft(tmp_path, resumed, VALUES[stop_after:], start_step=stop_after)
    assert [line["evaluations_since_best"] for line in first + rest] == [0, 0, 0, 1, 2, 3]
    assert resumed.has_ended
    assert names(tmp_path) == ["step_0003", "step_0006"]


async def test_a_reward_model_keeps_its_best_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def evaluate(*args: Any, **options: Any) -> dict[str, float]:
        return {"eval_accuracy": next(values)}

    values = iter(VALUES)
    monkeypatch.setattr("rollouts.reward_model_loop.evaluate_reward_model", evaluate)
    best = BestCheckpoint("eval_accuracy", patience=2)
    config = RewardModelTrainingConfig(num_steps=8, batch_size=2, eval_every=1)
    pairs = make_pairs(6)
    await train_reward_model(make_backend(), pairs, config, heldout=pairs[:2], checkpoint_dir=tmp_path, keep_last_n=1, best=best)
    assert names(tmp_path) == ["step_0003", "step_0005"]


@pytest.mark.parametrize("loop", ["sft", "reward model", "rl"])
async def test_every_evaluation_has_a_line_however_seldom_lines_are(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The line of the best step is read for the summary of a run, so that it must be there."""

    async def evaluate(*args: Any, **options: Any) -> dict[str, float]:
        return {"eval_accuracy": 0.5}

    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    schedule: dict[str, Any] = {"num_steps": 8, "log_every": 3, "eval_every": 2}
    if loop == "sft":
        config = SFTTrainingConfig(batch_size=2, **schedule)
        await run_sft_training(FakeBackend(), make_ragged(8), config, logger, evaluate=evaluate)
    elif loop == "reward model":
        monkeypatch.setattr("rollouts.reward_model_loop.evaluate_reward_model", evaluate)
        pairs = make_pairs(6)
        await train_reward_model(make_backend(), pairs, RewardModelTrainingConfig(batch_size=2, **schedule), logger, heldout=pairs[:2])
    else:
        await run(make_run(), RLTrainingConfig(weight_sync="memory", **schedule), logger, evaluate=evaluate)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["step"], "eval_accuracy" in line) for line in lines] == [(2, True), (3, False), (4, True), (6, True), (8, True)]


RL = RLTrainingConfig(num_steps=8, weight_sync="memory", eval_every=1)


async def test_rl_saves_what_may_be_the_best_and_ends_without_patience(tmp_path: Path):
    best = BestCheckpoint("eval_accuracy", patience=3)
    history = await run(make_run(), RL, checkpoint_dir=tmp_path, keep_last_n=1, evaluate=evaluations(VALUES), best=best)
    assert [line["evaluations_since_best"] for line in history] == [0, 0, 0, 1, 2, 3]
    assert names(tmp_path) == ["step_0003", "step_0006"]


@pytest.mark.parametrize("stop_after", range(1, 7))
async def test_an_interrupted_rl_run_goes_on_counting(tmp_path: Path, stop_after: int):
    stops = iter([*[False] * (stop_after - 1), True])
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "keep_last_n": 1}
    first = BestCheckpoint("eval_accuracy", patience=3)
    await run(make_run(), RL, evaluate=evaluations(VALUES), best=first, should_stop=lambda: next(stops), **options)
    parts, best = make_run(), BestCheckpoint("eval_accuracy", patience=3)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    point = await restore_rl_run(checkpoint, parts[0], parts[2], [parts[3]], RL)
    # the checkpoint was taken before the evaluation of its step, which is done again
    await run(parts, RL, evaluate=evaluations(VALUES[stop_after - 1 :]), best=best, resume=point, **options)
    assert best.has_ended
    assert best.state_dict() == {"metric": "eval_accuracy", "value": 0.9, "step": 3, "num_since": 3}
    assert names(tmp_path) == ["step_0003", "step_0006"]


async def test_rl_without_an_evaluation_has_no_best(tmp_path: Path):
    with pytest.raises(ConfigError, match="pass evaluate="):
        await run(make_run(), RL, checkpoint_dir=tmp_path, best=BestCheckpoint("eval_accuracy"))


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_async_rl_ends_without_patience_and_its_last_checkpoint_stays_the_end(tmp_path: Path, autojump_clock, max_staleness: int):
    """An evaluation beside the next step is known after that step, which is then the last."""
    from dataclasses import replace

    asynchronous = replace(ON, max_staleness=max_staleness)
    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "keep_last_n": 1}
    best = BestCheckpoint("eval_accuracy", patience=3)
    history = await Parts(asynchronous).run(RL, evaluate=evaluations(VALUES), best=best, **options)
    last = 6 if max_staleness == 0 else 7
    assert len(history) == last
    found = 3 if max_staleness == 0 else 7  # the evaluation of the last step, whose value is 0.95, counts as well
    assert names(tmp_path) == sorted({f"step_{found:04d}", f"step_{last:04d}"} | ({"step_0003"} if max_staleness else set()))
    assert best.has_ended
    again, resumed = Parts(asynchronous), BestCheckpoint("eval_accuracy", patience=3)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    point = await restore_rl_run(checkpoint, again.backend, again.executor, [again.engine], RL)
    rest = await again.run(RL, evaluate=evaluations(VALUES[last - 1 :]), best=resumed, resume=point, **options)
    assert rest == []
    assert resumed.state_dict() == best.state_dict()
