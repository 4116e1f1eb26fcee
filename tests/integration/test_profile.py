"""A profile of a run: which steps it covers, and what its files hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from warm_commands import find_python

from integration.run.profile import RunProfile, Span, describe_steps, phase_spans
from integration.settings.sections.records import ProfileSection
from integration.train import main
from rollouts.backends.factory import create_pytorch_backend
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.run_checkpoints import stage_backend

SECOND = 10**9
RL_LINE = {"stage": "rl", "generate_s": 2.0, "train_s": 1.0, "checkpoint_s": 0.5, "sync_s": 0.25, "step_s": 3.75, "evaluate_s": 0.25}


class Backend:
    """A backend with one call, which computes."""

    def optim_step(self) -> torch.Tensor:
        return torch.ones(8, 8) @ torch.ones(8, 8)


def test_phases_of_a_step_follow_one_another_and_end_with_its_line():
    spans = phase_spans(RL_LINE, 10 * SECOND)
    assert [(span.name, span.start_ns / SECOND, span.end_ns / SECOND) for span in spans] == [
        ("generate", 6.0, 8.0), ("train", 8.0, 9.0), ("checkpoint", 9.0, 9.5), ("sync", 9.5, 9.75), ("evaluate", 9.75, 10.0),
    ]  # fmt: skip


def test_a_step_of_sft_is_training_before_its_evaluation():
    spans = phase_spans({"step_s": 2.0, "evaluate_s": 1.0}, 10 * SECOND)
    assert [(span.name, span.start_ns / SECOND) for span in spans] == [("train", 7.0), ("evaluate", 9.0)]


def test_the_table_has_seconds_of_a_step_and_shares():
    lines = [RL_LINE, RL_LINE]
    spans = [*phase_spans(RL_LINE, 0), *phase_spans(RL_LINE, 0), Span("policy: optim_step", "calls", 0, SECOND)]
    text = describe_steps(lines, spans)
    assert "2 steps of 4.0000 s" in text
    rows = {line.rsplit(maxsplit=2)[0].strip(): line.rsplit(maxsplit=2)[1:] for line in text.splitlines()[3:]}
    assert rows["generate"] == ["2.0000", "50.0%"] and rows["policy: optim_step"] == ["0.5000", "12.5%"]


@pytest.mark.parametrize(("steps", "skip", "num_lines", "profiled"), [(2, 1, 5, 2), (1, 3, 5, 1), (9, 2, 4, 2), (2, 9, 4, 0), (0, 1, 4, 0)])
def test_the_steps_after_those_to_skip_are_profiled(steps: int, skip: int, num_lines: int, profiled: int, tmp_path: Path):
    profile, backend = RunProfile(ProfileSection(steps=steps, skip=skip), tmp_path), Backend()
    profile.watch(backend, "policy")
    profile.log({"stage": "sft", "eval_accuracy": 0.0}, 0)
    for step in range(1, num_lines + 1):
        backend.optim_step()
        profile.log({"stage": "sft", "step_s": 0.5}, step)
    profile.finish()
    folder = tmp_path / "profile" / "sft"
    assert folder.exists() is (profiled > 0)
    if profiled:
        assert f"{profiled} steps of 0.5000 s" in (folder / "table.txt").read_text()
        events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
        ours = [event for event in events if event.get("cat") == "rollouts"]
        assert [event["name"] for event in ours].count("policy: optim_step") == profiled
        products = [event for event in events if event.get("name") == "aten::mm"]
        calls = [event for event in ours if event["name"] == "policy: optim_step"]
        assert len(products) == profiled
        for product, call in zip(products, calls, strict=True):  # both clocks agree
            assert call["ts"] - 5e3 <= product["ts"] and product["ts"] + product["dur"] <= call["ts"] + call["dur"] + 5e3


def test_the_checkpoints_that_the_loops_take_are_calls(tmp_path: Path):
    profile, backend = RunProfile(ProfileSection(steps=1, skip=1), tmp_path), create_pytorch_backend(create_tiny_model(), lr=1e-3)
    profile.watch(backend, "policy")
    profile.log({"stage": "rl", "step_s": 0.5}, 1)
    (tmp_path / "checkpoint").mkdir()
    trio.run(stage_backend, backend, tmp_path / "checkpoint")
    profile.log({"stage": "rl", "step_s": 0.5}, 2)
    assert "policy: stage_checkpoint" in (tmp_path / "profile" / "rl" / "table.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--rl.asynchronous.enabled",), ("--backend.kind", "fsdp", "--backend.num-processes", "2")], ids=str
)
def test_a_profiled_run_has_the_numbers_of_one_without(options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", find_python())
    small = (
        "--sft.num-steps 3 --sft.batch-size 8 --rl.num-steps 4 --rl.prompts-per-step 4 --rl.num-minibatches 1 --evaluation.num-prompts 8 "
        "--quiet --num-threads 1 --model.hidden-size 32 --model.num-layers 2 --model.intermediate-size 64"
    ).split()
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, more in (("plain", ()), ("profiled", ("--profile.steps", "1"))):
        assert main([*small, *options, "--output-dir", str(tmp_path / name), *more]) == 0
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        lines[name] = [{key: value for key, value in line.items() if not key.endswith("_s")} for line in found]
    if not options:
        assert lines["profiled"] == lines["plain"]
    for stage in ("sft", "rl"):
        assert "policy: forward_backward" in (tmp_path / "profiled" / "profile" / stage / "table.txt").read_text()
        assert "aten::mm" in (tmp_path / "profiled" / "profile" / stage / "trace.json").read_text()
