"""The main job from the outside: its exit status, what it prints and what it leaves behind, also where it is killed or stopped."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from forked import Child, run

from integration.config import Config
from integration.job import favor_computation
from integration.run_directory import compare_settings
from integration.train import main
from rollouts.char_tokenizer import create_char_tokenizer
from rollouts.checkpoints import list_checkpoints, verify_checkpoint
from rollouts.config import load_config
from rollouts.metrics import read_metrics
from rollouts.testing import create_tiny_model
from rollouts.trajectories import read_samples

SMALL = (
    "--sft.num-steps 6 --sft.batch-size 16 --sft.eval-every 3 --rl.num-steps 3 --rl.prompts-per-step 4 --rl.samples-per-prompt 4 "
    "--evaluation.num-prompts 16 --checkpoint.sft-every 2 --model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 "
    "--num-threads 1"
).split()  # fmt: skip


RUN = """
import sys
from integration.run_directory import compare_settings
from integration.train import main

sys.exit(main(sys.argv[1:]))
"""

SIGNALED = """
import os, sys
from integration.run_directory import compare_settings
from integration.train import main
from rollouts.metrics import JSONLLogger

number, moment, log, lines = int(sys.argv[1]), int(sys.argv[2]), JSONLLogger.log, []

def log_and_send(self, metrics, step):
    log(self, metrics, step)
    lines.append(step)
    if len(lines) == moment:
        os.kill(os.getpid(), number)

JSONLLogger.log = log_and_send
sys.exit(main(sys.argv[3:]))
"""  # gets a signal the moment that so many lines are in metrics.jsonl


def values(path: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(path)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """One uninterrupted small run in a process of its own."""
    folder = tmp_path_factory.mktemp("finished")
    status, out, error = run(RUN, "--output-dir", folder / "run", *SMALL, folder=folder)
    assert status == 0, error
    return folder / "run", out


def test_the_run_directory_holds_what_the_readme_says(finished):
    directory, out = finished
    assert {p.name for p in directory.iterdir()} >= {"config.json", "metrics.jsonl", "summary.json", "curves.png", "sft", "rl"}
    summary = json.loads((directory / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after_sft", "accuracy_after_rl", "seconds_sft", "seconds_rl", "samples", "seed"} <= set(summary)
    assert (summary["samples"], summary["seed"]) == (3 * 16, 0)
    assert all(0 <= summary[k] <= 1 for k in ("accuracy_before", "accuracy_after_sft", "accuracy_after_rl"))
    assert "after RL" in out
    assert "\x1b" not in out  # no control codes in a pipe
    lines = read_metrics(directory / "metrics.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [("sft", s) for s in range(7)] + [("rl", s) for s in range(1, 4)]
    assert {"reward_mean", "reward_max", "reward_min", "loss", "grad_norm", "lr", "generate_s", "train_s"} <= set(lines[-1])
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_configuration_saved_with_the_run_reloads(finished):
    directory, _ = finished
    config = load_config(Config, directory / "config.json")
    assert config.sft.num_steps == 6
    assert config.output_dir == str(directory)


def test_checkpoints_are_complete_pruned_and_hugging_face_models(finished):
    from transformers import AutoModelForCausalLM

    directory, _ = finished
    assert [p.name for p in list_checkpoints(directory / "sft" / "checkpoints")] == ["step_0004", "step_0006"]
    checkpoints = list_checkpoints(directory / "rl" / "checkpoints")
    assert [p.name for p in checkpoints] == ["step_0002", "step_0003"]
    for checkpoint in checkpoints:
        verify_checkpoint(checkpoint)
    assert AutoModelForCausalLM.from_pretrained(checkpoints[-1]).config.hidden_size == 32
    assert read_samples(directory / "rl" / "trajectories" / "step_0001.jsonl")


def test_rl_starts_from_the_weights_that_sft_ended_with(finished, tmp_path: Path):
    """The first RL forward pass gives SFT's last logits exactly."""
    from rollouts.backends.factory import load_hf_model

    directory, _ = finished
    source = directory / "sft" / "checkpoints" / "step_0006"
    tokens = torch.arange(3, 12)[None]
    a, b = load_hf_model(source), load_hf_model(source)
    assert torch.equal(a(tokens).logits, b(tokens).logits)
    after_sft = next(line for line in values(directory / "metrics.jsonl") if (line["stage"], line["step"]) == ("sft", 6))
    assert main(["--mode", "rl", "--model.path", str(source), "--output-dir", str(tmp_path / "rl"), *SMALL]) == 0
    lines = values(tmp_path / "rl" / "metrics.jsonl")
    assert lines[0]["eval_accuracy"] == after_sft["eval_accuracy"]
    assert lines[1:] == [line for line in values(directory / "metrics.jsonl") if line["stage"] == "rl"]


@pytest.mark.parametrize("lines_before_kill", [pytest.param(3, marks=pytest.mark.slow), 8])
def test_a_killed_run_resumes_to_the_same_metrics(capsys, finished, tmp_path: Path, lines_before_kill: int):
    directory, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    status, _, error = run(SIGNALED, int(signal.SIGKILL), lines_before_kill, "--output-dir", directory, *SMALL, folder=tmp_path)
    assert status == -signal.SIGKILL, error
    assert len(read_metrics(metrics)) == lines_before_kill
    assert main(["--output-dir", str(directory), "--resume"]) == 0
    assert values(metrics) == values(finished[0] / "metrics.jsonl")
    assert "after RL" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="signals of this kind are not sent on Windows")
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(finished, tmp_path: Path):
    directory, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    arguments = ["--output-dir", directory, *SMALL, "--checkpoint.sft-every", 0]
    status, out, error = run(SIGNALED, int(signal.SIGINT), 3, *arguments, folder=tmp_path)
    assert status == 130, error
    assert "--resume" in out
    assert list_checkpoints(directory / "sft" / "checkpoints")
    assert main(["--output-dir", str(directory), "--resume"]) == 0
    assert values(metrics) == values(finished[0] / "metrics.jsonl")


def test_in_a_run_the_garbage_collector_leaves_out_what_stays_and_the_interpreter_changes_hands_sooner():
    set_aside, interval_s = gc.get_freeze_count(), sys.getswitchinterval()
    gc.unfreeze()
    try:
        with favor_computation():
            assert gc.get_freeze_count() > 100_000
            assert sys.getswitchinterval() < interval_s
            with favor_computation():
                pass
            assert gc.get_freeze_count() > 100_000  # that of the caller stays
        assert gc.get_freeze_count() == 0
        assert sys.getswitchinterval() == interval_s
    finally:
        if set_aside:
            gc.freeze()


def test_a_directory_of_a_live_run_is_refused(capsys, tmp_path: Path):
    directory = tmp_path / "run"
    with Child(RUN, "--output-dir", directory, *SMALL, "--sft.num-steps", 100000, folder=tmp_path) as first:
        assert first.wait_for_lines(1) == [f"run directory: {directory}"]
        status, error = one_message(capsys, "--output-dir", directory, *SMALL)
        assert status == 2
        assert f"process {first.pid}" in error
        status, error = one_message(capsys, "--output-dir", directory, "--resume")
        assert (status, "in use by a live run" in error) == (2, True)
    status, error = one_message(capsys, "--output-dir", directory, *SMALL)
    assert status == 2
    assert "already holds a run" in error


def one_message(capsys, *arguments: object) -> tuple[int, str]:
    """Run in this process; the error must be one message without a traceback."""
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as stop:  # tyro's own refusals
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return status, " ".join(error.split())


def test_dry_run_prints_settings_and_counts_and_leaves_nothing(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    for expected in (
        '"task": "sort"',
        "grpo(clip_low=0.2, clip_high=0.2, kl_coef=0.0,",
        "512 (64 prompts x 8)",
        "parameters",
        "SFT tokens",
        "memory: sum",
    ):
        assert expected in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mode", "pretrain"], "unknown mode 'pretrain'"),
        (["--rl.group-size", "3"], "Unrecognized options"),
        (["--task", "srot"], "did you mean 'sort'?"),
        (["--rl.num-minibatches", "3"], "divide"),
        (["--rl.algorithm", "grop"], "did you mean 'grpo'?"),
        (["--rl.algorithm", "decoupled(dapo(clip_hi=0.3))"], "did you mean 'clip_high'?"),
        (["--rl.algorithm", "dapo(clip_low=1.5)"], "clip_low is 1.5, expected in [0, 1)"),
        (["--rl.kl-control.target", "0.1"], "has no KL term"),
        (["--critic.path", "/nowhere"], "has no critic"),
        (["--rl.algorithm", "ppo", "--critic.path", "/nowhere"], "is not a directory"),
        (["--rl.samples-per-prompt", "1"], "would learn nothing: give at least 2"),
        (["--rl.samples-per-prompt", "1", "--dry-run"], "would learn nothing: give at least 2"),
        (["--rl.overlong-buffer", "9"], "at most the token budget"),
        (["--rl.filter", "nonzero"], "did you mean 'nonzero_std'?"),
        (["--sft.batch-size", "0"], "batch_size"),
        (["--generation.top-p", "0.9"], "whole distribution"),
        (["--backend.kind", "fsd"], "did you mean 'fsdp'?"),
        (["--backend.num-processes", "2"], "add --backend.kind fsdp"),
        (["--model.path", "/nowhere/model"], "is not a directory"),
        (["--task", "gsm8k"], "--data.path"),
        (["--data.path", "x.jsonl"], "--model.path"),
        (["--data.path", "x.jsonl", "--task", "sort"], "--task jsonl"),
        (["--config", "nowhere.toml"], "no configuration file"),
        (["--resume"], "--output-dir"),
        (["--resume", "--output-dir", "/nowhere"], "nothing to resume"),
        (["--reward.function", "nowhere.py:f"], "there is no file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_settings_end_in_one_message_and_a_status(capsys, tmp_path: Path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    fast = ["--sft.num-steps", "1", "--evaluation.num-prompts", "4"]
    status, error = one_message(capsys, *fast, *arguments)
    assert status == 2, error
    assert expected in error


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_critic_of_another_tokenizer_is_refused_before_anything_is_done(capsys, tmp_path: Path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    create_tiny_model(vocab_size=80).save_pretrained(tmp_path / "other")
    create_char_tokenizer(80).save_pretrained(tmp_path / "other")
    arguments = ["--rl.algorithm", "ppo()", "--critic.path", "other", *more]
    status, error = one_message(capsys, *arguments)
    assert status == 2
    assert "critic.path is other, whose tokens are not the policy's: the tokenizer has 80 tokens, the policy's has 64" in error
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_an_unknown_key_in_a_configuration_file_is_refused_with_a_suggestion(capsys, tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text("[rl]\nsamples_per_promt = 4\n")
    status, error = one_message(capsys, "--config", path)
    assert status == 2
    assert "did you mean 'samples_per_prompt'?" in error
    path.write_text("[rll]\n")
    assert "did you mean 'rl'?" in one_message(capsys, "--config", path)[1]


def test_configuration_files_of_all_kinds_are_read(capsys, tmp_path: Path):
    (tmp_path / "a.toml").write_text("seed = 7\n[rl]\nnum_steps = 4\n")
    (tmp_path / "a.json").write_text('{"seed": 7, "rl": {"num_steps": 4}}')
    (tmp_path / "a.py").write_text(
        "from integration.config import Config\nfrom integration.sections import RLSection\n"
        "config = Config(seed=7, rl=RLSection(num_steps=4))\n"
    )
    for name in ("a.toml", "a.json", "a.py"):
        assert main(["--config", str(tmp_path / name), "--dry-run", "--rl.num-minibatches", "4"]) == 0
        out = capsys.readouterr().out
        assert '"seed": 7' in out
        assert "2,048" in out  # 4 steps x 512
        assert "4 of 128 rows" in out


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    create_tiny_model(seed=1).save_pretrained(tmp_path / "model")
    create_char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def good_rows(n: int) -> list[object]:
    return [{"question": f"what is {i} + 1?", "answer": f"it is\n#### {i + 1}"} for i in range(n)]


OWN = (
    "--sft.num-steps 1 --sft.batch-size 4 --rl.num-steps 1 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --rl.num-minibatches 1 "
    "--generation.max-tokens 6 --evaluation.num-prompts 4 --num-threads 1"
).split()  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        (["{not json"], [], "data.jsonl, line 1"),
        ([*good_rows(12), {"question": "no answer"}], [], "data.jsonl, line 13"),
        ([], [], "empty"),
        ([{"question": "x" * 300, "answer": "#### 1"}] * 12, ["--data.max-length", "64"], "64"),
    ],
    ids=["not json", "missing field", "empty", "too long"],
)
def test_bad_data_end_in_one_message_naming_file_and_line(capsys, tmp_path: Path, model_dir, monkeypatch, rows, more, expected):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "data.jsonl", rows)
    status, error = one_message(capsys, "--task", "gsm8k", "--model.path", model_dir, "--data.path", data, *OWN, *more)
    assert status == 2, error
    assert expected in error


def test_own_data_train_and_bad_rows_can_be_skipped_and_are_counted(capsys, tmp_path: Path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "data.jsonl", [*good_rows(30), "{not json", {"question": "no answer"}])
    arguments = ["--task", "gsm8k", "--model.path", model_dir, "--data.path", data, *OWN, "--output-dir", tmp_path / "out"]
    assert main([str(a) for a in [*arguments, "--skip-bad-rows"]]) == 0
    out = capsys.readouterr().out
    assert "2 bad rows were skipped" in out
    assert (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize(
    ("source", "more", "expected"),
    [
        ("def f(s): raise ZeroDivisionError('oops')", [], "raised ZeroDivisionError"),
        ("def f(s): return float('nan')", [], "finite"),
        ("import time\ndef f(s): time.sleep(3)", ["--reward.timeout-s", "0.2"], "within 0.2 s"),
        ("def f(s): return 1.0", ["--rl.filter", "nonzero_std", "--rl.max-filter-attempts", "2"], "check_reward_nonzero_std"),
    ],
    ids=["raises", "nan", "hangs", "filter passes nothing"],
)
def test_bad_rewards_and_filters_end_in_one_message(capsys, tmp_path: Path, monkeypatch, source, more, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(source + "\n")
    arguments = ["--mode", "rl", "--reward.function", "reward.py:f", *SMALL, "--output-dir", "out", *more]
    status, error = one_message(capsys, *arguments)
    assert status == 1, error
    assert expected in error


def test_a_failing_reward_can_be_dropped_and_is_counted(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def f(s):\n    assert s.index % 16 != 5\n    return float(s.index % 2)\n")
    arguments = ["--mode", "rl", "--reward.function", "reward.py:f", "--reward.on-error", "drop", *SMALL, "--output-dir", "out"]
    assert main(arguments) == 0
    assert sum(line.get("num_groups_dropped", 0) for line in read_metrics(tmp_path / "out" / "metrics.jsonl")) > 0


def test_damaged_checkpoints_fall_back_or_end_in_one_message(capsys, finished, tmp_path: Path):
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory)
    newest, older = reversed(list_checkpoints(directory / "rl" / "checkpoints"))
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert main(["--output-dir", str(directory), "--resume"]) == 0
    assert "damaged" in capsys.readouterr().out
    assert values(directory / "metrics.jsonl") == values(finished[0] / "metrics.jsonl")
    for checkpoint in list_checkpoints(directory / "rl" / "checkpoints"):
        (checkpoint / "manifest.json").unlink()
    status, error = one_message(capsys, "--output-dir", directory, "--resume")
    assert status == 1
    assert "no checkpoint in" in error
    assert older.name in error


def test_resuming_with_other_settings_is_refused_field_by_field(capsys, finished):
    status, error = one_message(capsys, "--output-dir", finished[0], "--resume", "--rl.optimizer.lr", "0.5")
    assert status == 2
    assert "rl.optimizer.lr: 0.0001 -> 0.5" in error
    assert compare_settings({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}) == {"a.b": (1, 2), "a.c": (None, 3)}
