"""Metrics: valid lines that survive a kill, resume by length, loggers that combine, summaries against numpy."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from forked import Child
from hypothesis import given
from hypothesis import strategies as st
from samples import make_row

from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.config import SFTTrainingConfig
from rollouts.errors import ConfigError, DataError, OutputError
from rollouts.sft_loop import run_sft_training
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import (
    CompositeLogger,
    JSONLLogger,
    MetricsLogger,
    StageLogger,
    WandbLogger,
    log_offset,
    measure,
    read_metrics,
    truncate_log,
)
from rollouts.training.saving.run_state import read_run_state
from rollouts.training.summaries import summarize_mismatch, summarize_samples
from rollouts.types import Sample, Status


class ListLogger:
    """A user's logger: any object with these two methods."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.finished = 0

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        self.lines.append({"step": step, **metrics})

    def finish(self) -> None:
        self.finished += 1


def strict_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_one_line_a_step_in_the_file_at_once(tmp_path):
    logger: MetricsLogger = JSONLLogger(tmp_path / "out")
    for step in range(1, 4):
        logger.log({"loss": 1 / step, "stage": "sft"}, step)
        assert strict_lines(tmp_path / "out" / "metrics.jsonl")[-1] == {"step": step, "loss": 1 / step, "stage": "sft"}
    logger.finish()
    assert [row["step"] for row in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize(("name", "expected"), [("run", "run/metrics.jsonl"), ("m.jsonl", "m.jsonl"), ("v1.2", "v1.2/metrics.jsonl")])
def test_a_directory_gets_its_own_file(tmp_path, name, expected):
    (tmp_path / "v1.2").mkdir()
    assert JSONLLogger(str(tmp_path / name)).path == tmp_path / expected


@given(st.dictionaries(st.text(max_size=4).filter(lambda key: key != "step"), st.floats() | st.integers(-9, 9) | st.text(max_size=4)))
def test_every_line_is_valid_json_and_keeps_its_numbers(tmp_path_factory, metrics):
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    JSONLLogger(path).log(metrics, 0)
    (row,) = strict_lines(path)
    assert row.keys() == metrics.keys() | {"step"}
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            assert row[key] in ("NaN", "Infinity", "-Infinity")
            value, row[key] = repr(value), repr(float(row[key]))
        assert row[key] == value


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    JSONLLogger(tmp_path).log({"a": np.float32(0.5), "b": torch.tensor(2.0), "c": np.int64(3), "d": torch.tensor(math.nan)}, 0)  # type: ignore[dict-item]
    assert strict_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 0.5, "b": 2.0, "c": 3.0, "d": "NaN"}]


def test_the_key_step_is_taken(tmp_path):
    with pytest.raises(AssertionError, match="'step' is taken"):
        JSONLLogger(tmp_path).log({"step": 3.0}, 4)


LOGGING = """
import sys
from rollouts.training.metrics import JSONLLogger
logger = JSONLLogger(sys.argv[1])
step = 0
while True:
    logger.log({"loss": 0.5, "text": "x" * 20000}, step)
    print(step)
    step += 1
"""


def test_lines_survive_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Child(LOGGING, path, folder=tmp_path) as child:
        child.wait_for_lines(12)
        child.kill()
        acknowledged = child.out.splitlines()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert 12 <= len(acknowledged) <= len(rows) <= len(acknowledged) + 1


def test_a_torn_last_line_is_left_out_and_then_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_metrics(path) == [{"step": 0}]
    JSONLLogger(path).log({}, 1)
    assert strict_lines(path) == [{"step": 0}, {"step": 1}]


def test_files_that_are_no_metrics_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="cannot read metrics from"):
        read_metrics(path)
    path.write_text('{"step": 0}\n{"step"\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not JSON"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is a JSON list"):
        read_metrics(path)


def test_resume_cuts_the_file_back_to_the_checkpoint(tmp_path):
    logger = JSONLLogger(tmp_path)
    offsets = [logger.offset()]
    for step in range(4):
        logger.log({"loss": float(step)}, step)
        offsets.append(logger.offset())
    for kept in (4, 3, 1, 0):
        truncate_log(logger.path, offsets[kept])
        assert [row["step"] for row in read_metrics(logger.path)] == list(range(kept))
    assert truncate_log(tmp_path / "missing.jsonl", 0) is None
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_file_that_lost_lines_is_told_and_goes_on_behind_those_that_are_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert "has 0 bytes, but the checkpoint was written when it had 30" in str(truncate_log(path, 30))
    content = '{"step": 0}\n{"step": 1}\n{"ste'
    for offset, expected, steps in ((40, "has 29 bytes", [0, 1]), (17, "no end of a line at byte 17", [0]), (5, "no end of a line", [])):
        path.write_text(content)
        gap = str(truncate_log(path, offset))
        assert expected in gap and f"the {len(steps)} lines that are left" in gap
        assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in steps)
        assert (tmp_path / "metrics.jsonl.before_resume").read_text() == content  # whatever it was, it is not lost
        JSONLLogger(path).log({}, 7)
        assert [row["step"] for row in read_metrics(path)] == [*steps, 7]


def test_a_line_that_the_disk_refuses_is_an_error_that_says_what_to_do(tmp_path):
    logger = JSONLLogger(tmp_path)
    logger.path.unlink()
    logger.path.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"the disk is full: .*metrics.jsonl cannot be written .*Free some space.*--resume"):
        logger.log({"loss": 1.0}, 1)


def test_the_lines_that_a_checkpoint_counts_are_on_the_disk_before_it(tmp_path, monkeypatch):
    """fsync and rename as the system is asked for them: of the metrics, then of the directory that becomes the checkpoint."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        events.append(f"rename {target}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    samples = [Sample(index=k, tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), status=Status.COMPLETED) for k in range(4)]
    config = SFTTrainingConfig(num_steps=1, batch_size=2)
    logger = JSONLLogger(tmp_path)
    model = create_tiny_model()
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3))
    trio.run(partial(run_sft_training, backend, samples, config, logger, checkpoint_dir=tmp_path / "checkpoints"))
    assert events.index(str(logger.path)) < events.index(f"rename {tmp_path / 'checkpoints' / 'step_0001'}")
    assert read_run_state(tmp_path / "checkpoints" / "step_0001").metrics_bytes == logger.path.stat().st_size > 0


def test_loggers_combine(tmp_path):
    lines, file = ListLogger(), JSONLLogger(tmp_path)
    both = CompositeLogger([lines, file])
    stage = StageLogger(both, "rl")
    stage.log({"loss": 1.0}, 3)
    assert lines.lines == strict_lines(file.path) == [{"step": 3, "stage": "rl", "loss": 1.0}]
    assert stage.offset() == both.offset() == log_offset(stage) == file.offset() > 0
    stage.finish()
    assert lines.finished == 0
    both.finish()
    assert lines.finished == 1


def test_a_stage_logs_no_step_that_has_a_line_from_before_a_kill():
    lines = ListLogger()
    stage = StageLogger(lines, "sft", logged=3)
    for step in (2, 3, 4):
        stage.log({"loss": 1.0}, step)
    assert [line["step"] for line in lines.lines] == [4]


def test_only_loggers_with_a_file_have_an_offset():
    assert log_offset(None) is None
    assert log_offset(ListLogger()) is None
    assert log_offset(StageLogger(CompositeLogger([ListLogger()]), "sft")) is None


def test_every_logger_is_finished_even_if_one_fails():
    class Failing(ListLogger):
        def finish(self) -> None:
            raise ConnectionError("upload failed")

    first, last = ListLogger(), ListLogger()
    with pytest.raises(ConnectionError, match="upload failed"):
        CompositeLogger([first, Failing(), last]).finish()
    assert (first.finished, last.finished) == (1, 1)


def test_wandb_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollouts-rl\[wandb\]'"):
        WandbLogger("project")


def test_wandb_gets_lines_and_settings(monkeypatch):
    class Run(ListLogger):
        def log(self, row: dict[str, Any]) -> None:  # type: ignore[override]
            self.lines.append(row)

    class Wandb:
        @staticmethod
        def init(**options: Any) -> Run:
            run.options = options  # type: ignore[attr-defined]
            return run

    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    logger: MetricsLogger = WandbLogger("project", name="a", config={"lr": 1})
    logger.log({"loss": 2.0}, 7)
    logger.finish()
    assert run.options == {"project": "project", "name": "a", "config": {"lr": 1}}  # type: ignore[attr-defined]
    assert (run.lines, run.finished) == ([{"loss": 2.0, "step": 7}], 1)


def test_durations_add_up_and_end_in_s():
    times = iter([0.0, 2.0, 5.0, 5.5, 10.0, 11.0])
    durations: dict[str, float] = {}
    for _ in range(2):
        with measure(durations, "generate", clock=lambda: next(times)):
            pass
    with pytest.raises(ZeroDivisionError), measure(durations, "train", clock=lambda: next(times)):
        raise ZeroDivisionError
    assert durations == {"generate_s": 2.5, "train_s": 1.0}


def make_scored(reward: float | None, group: int = 0, length: int = 2, status: Status = Status.COMPLETED) -> Sample:
    return make_row((1,) * (length + 1), reward=reward, group_index=group, status=status)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3), st.integers(0, 4), st.sampled_from(Status)), min_size=1, max_size=12))
def test_summary_equals_numpy(rows):
    summary = summarize_samples([make_scored(*row) for row in rows])
    rewards, groups, lengths, statuses = (list(column) for column in zip(*rows, strict=True))
    for name in ("mean", "std", "min", "max"):
        assert summary[f"reward_{name}"] == pytest.approx(getattr(np, name)(rewards), abs=1e-12)
    equal = [len({r for r, h in zip(rewards, groups, strict=True) if h == g}) == 1 for g in sorted(set(groups))]
    assert summary["zero_std_fraction"] == np.mean(equal)
    assert summary["response_length_mean"] == pytest.approx(np.mean(lengths))
    assert (summary["response_length_min"], summary["response_length_max"]) == (min(lengths), max(lengths))
    assert summary["truncated_fraction"] == statuses.count(Status.TRUNCATED) / len(rows)
    assert summary["num_samples"] == len(rows)


def test_equal_rewards_have_no_spread_despite_rounding():
    assert summarize_samples([make_scored(0.1)] * 3)["zero_std_fraction"] == 1.0


@pytest.mark.parametrize("rewards", [[None, 1.0], [1.0, None], [1.0, None, 2.0]])
def test_a_missing_reward_is_not_a_number(rewards):
    summary = summarize_samples([make_scored(reward) for reward in rewards])
    assert all(math.isnan(summary[f"reward_{name}"]) for name in ("mean", "std", "min", "max"))
    assert summary["zero_std_fraction"] == 0.0


def test_the_mismatch_of_engine_and_trainer_is_that_of_the_loss():
    loss = {"importance_weight": 0.9, "max_importance_weight": 2.0, "dropped_fraction": 0.25, "rollout_kl": 0.01, "approx_kl": 0.5}
    assert summarize_mismatch(loss) == {"mismatch_kl": 0.01}
    assert summarize_mismatch({"approx_kl": 0.5, "loss": 1.0}) == {"mismatch_kl": 0.5}
    assert summarize_mismatch({"loss": 1.0}) == {}
