"""The main job from the outside: its exit status, what it prints and what it leaves behind, also where it is killed or stopped."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from forked import PATIENCE_S, Child, run
from safetensors.torch import load_file, save_file

from integration.expressions.loggers import RunIdentity, create_loggers
from integration.run.directory import compare_settings
from integration.run.exit_status import run_command
from integration.run.job import MAY_CHANGE_ON_RESUME, describe_settings, favor_computation
from integration.settings.config import Config
from integration.settings.sections.engine import EngineSection
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import load_config
from rollouts.data.trajectories import read_samples
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import list_checkpoints, verify_checkpoint

SMALL = (
    "--sft.num-steps 6 --sft.batch-size 16 --sft.eval-every 3 --rl.num-steps 3 --rl.prompts-per-step 4 --rl.samples-per-prompt 4 "
    "--evaluation.num-prompts 16 --checkpoint.sft-every 2 --model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 "
    "--num-threads 1"
).split()  # fmt: skip


QUICK = [*SMALL, "--mode", "rl", "--rl.num-steps", "1", "--evaluation.num-prompts", "2", "--output-dir", "out"]

RUN = """
import sys
from integration.run.directory import compare_settings
from integration.train import main

sys.exit(main(sys.argv[1:]))
"""

SIGNALED = """
import os, sys
from integration.run.directory import compare_settings
from integration.train import main
from rollouts.training.metrics import JSONLLogger

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
    config = json.loads((directory / "config.json").read_text())
    assert (
        summary["num_held_out"] == config["evaluation"]["num_prompts"] == read_metrics(directory / "metrics.jsonl")[-1]["eval_num_prompts"]
    )
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
    from rollouts.models.loading import load_hf_model

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
    saved = json.loads((directory / "config.json").read_text())
    assert (saved["model"]["device"], saved["backend"]["compute_dtype"]) == ("cpu", "float32"), "a resumed run has what it began with"


@pytest.mark.slow
def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(finished, tmp_path: Path):
    directory, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    arguments = ["--output-dir", directory, *SMALL, "--checkpoint.sft-every", 0]
    status, out, error = run(SIGNALED, int(signal.SIGINT), 3, *arguments, folder=tmp_path)
    assert status == 130, error
    assert "--resume" in out
    assert list_checkpoints(directory / "sft" / "checkpoints")
    assert main(["--output-dir", str(directory), "--resume"]) == 0
    assert values(metrics) == values(finished[0] / "metrics.jsonl")


BLOCKS = """
import ctypes

async def locks(sample):  # in C, for ever: no signal ends it
    mutex = (ctypes.c_char * 64)()
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    print("locked", flush=True)
    library.pthread_mutex_lock(mutex)
"""


@pytest.mark.slow
@needs.LINUX  # signals of this kind
def test_while_c_code_blocks_the_event_loop_sigusr1_shows_the_stacks_and_ctrl_c_twice_ends_the_run(tmp_path: Path):
    (tmp_path / "reward.py").write_text(BLOCKS)
    more = ("--reward.function", f"{tmp_path}/reward.py:locks", "--output-dir", tmp_path / "out")
    with Child(RUN, *QUICK, *more, "--reward.timeout-s", "900", folder=tmp_path) as child:
        child.wait_for_lines(2)
        os.kill(child.pid, signal.SIGUSR1)
        os.kill(child.pid, signal.SIGINT)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGINT)
        status = child.wait()
    assert status == 130, child.error
    shown, _, told = child.error.partition("Tasks of the event loop:")
    assert 'reward.py", line 9 in locks' in shown  # of the main thread
    assert "task " in told and "run_until_stopped" in told
    assert "interrupted; --resume goes on from the last checkpoint" in told


@pytest.mark.slow
@needs.LINUX  # signals of this kind
def test_a_deadline_that_cannot_interrupt_c_code_ends_the_run_and_names_the_place(tmp_path: Path):
    (tmp_path / "reward.py").write_text(BLOCKS)
    more = ("--reward.function", f"{tmp_path}/reward.py:locks", "--output-dir", tmp_path / "out")
    status, _, error = run(RUN, *QUICK, *more, "--reward.timeout-s", "0.3", folder=tmp_path)
    assert status == 1, error
    assert "error: locks (" in error and "reward.py:9) has blocked the event loop beyond its deadline, in a call that cannot be" in error


@pytest.mark.slow
@needs.LINUX  # signals of this kind
def test_a_step_that_takes_longer_than_the_grace_is_abandoned_even_while_it_blocks_the_event_loop(tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        BLOCKS + "\nasync def waits(sample):\n    import trio\n    print('waiting', flush=True)\n    await trio.sleep(900)\n"
    )
    forced = "interrupted; --resume goes on from the last checkpoint"  # also where the end takes longer than it may
    for name in ("waits", "locks"):
        folder = tmp_path / name
        more = ("--reward.function", f"{tmp_path}/reward.py:{name}", "--output-dir", folder / "out", "--grace-s", "1")
        with Child(RUN, *QUICK, *more, "--reward.timeout-s", "900", folder=folder) as child:
            child.wait_for_lines(2)
            os.kill(child.pid, signal.SIGTERM)
            status = child.wait()
        assert status == 130, child.error
        if name == "locks":  # the loop, which gives up a step that only waits, does not turn
            assert "the run has not ended within 1 s (--grace-s): the step in progress is abandoned" in child.error
        assert forced in child.error or (name == "waits" and "To go on from the newest checkpoint" in child.out), child.error
        assert "Traceback" not in child.error


@pytest.mark.slow
@needs.LINUX
def test_a_step_that_waits_for_a_reward_loses_only_itself(tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        "import trio\n\ncalls = 0\n\nasync def waits(sample):\n    global calls\n    calls += 1\n"
        "    if sample.group_index >= 2:  # of the second step\n"
        "        print('waiting', flush=True)\n        await trio.sleep(900)\n    return float(calls % 2)\n"
    )
    more = ("--reward.function", f"{tmp_path}/reward.py:waits", "--rl.num-steps", "3", "--grace-s", "12")
    more += ("--rl.prompts-per-step", "2", "--rl.over-sampling-factor", "1", "--rl.filter", "none")
    with Child(RUN, *QUICK, *more, "--output-dir", tmp_path / "out", "--reward.timeout-s", "900", folder=tmp_path) as child:
        while "waiting" not in child.out:
            assert child.is_alive, child.error
            time.sleep(0.05)
        started = time.monotonic()
        os.kill(child.pid, signal.SIGTERM)
        status = child.wait()
        took_s = time.monotonic() - started
    assert status == 130, child.error
    assert took_s < 12, "within the grace"
    assert "the wait for rollouts is given up 6 s after the signal (half of --grace-s)" in child.out, child.out
    assert [path.name for path in list_checkpoints(tmp_path / "out/rl/checkpoints")] == ["step_0001"]


@pytest.mark.slow
@needs.LINUX
def test_the_stacks_of_a_run_without_progress_name_what_it_waits_for_and_it_goes_on(tmp_path: Path):
    (tmp_path / "reward.py").write_text(
        "import trio\nfrom pathlib import Path\n\nasync def waits(sample):\n"
        f"    while not (Path({str(tmp_path)!r}) / 'go on').exists():\n        await trio.sleep(0.01)\n    return 0.5\n"
    )
    more = ("--reward.function", f"{tmp_path}/reward.py:waits", "--output-dir", tmp_path / "out", "--stall-s", "0.3")
    with Child(RUN, *QUICK, *more, "--reward.timeout-s", "900", folder=tmp_path) as child:
        deadline = time.monotonic() + PATIENCE_S
        while "await trio.sleep(0.01)" not in child.error:
            assert child.is_alive and time.monotonic() < deadline, child.error
            time.sleep(0.05)
        (tmp_path / "go on").touch()
        assert child.wait() == 0, child.error
    shown, _, told = child.error.partition("Tasks of the event loop:")
    assert "no step has ended for 0.3 s (--stall-s)" in shown
    assert f"waits in waits ({tmp_path}/reward.py:6): await trio.sleep(0.01)" in told


@pytest.mark.parametrize("option", ["--grace-s", "--stall-s"])
def test_limits_of_time_are_numbers_above_0(capsys, option: str):
    for value in ("0", "-1", "nan", "inf"):
        status, error = one_message(capsys, option, value)
        assert (status, f"{option} is " in error) == (2, True), error


@pytest.mark.parametrize("error", [SystemExit(0), BaseExceptionGroup("", [SystemExit(0), ValueError("no")])], ids=["alone", "in a group"])
def test_what_would_end_the_program_ends_in_one_message(capsys, error):
    def run(command: object) -> int:
        raise error

    assert run_command(lambda: None, run) == 1
    told = capsys.readouterr().err
    assert "error: SystemExit (0) was raised at" in told and "raise an Exception there, or return" in told


def test_ctrl_c_among_other_errors_is_ctrl_c(capsys):
    def run(command: object) -> int:
        raise BaseExceptionGroup("", [ValueError("no"), KeyboardInterrupt()])

    assert run_command(lambda: None, run) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_in_a_run_the_garbage_collector_leaves_out_what_stays_and_the_interpreter_changes_hands_sooner(monkeypatch: pytest.MonkeyPatch):
    count: Any = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", getattr(count, "__wrapped__", count))  # the real one, see tests/conftest.py
    set_aside, interval_s, thresholds = gc.get_freeze_count(), sys.getswitchinterval(), gc.get_threshold()
    gc.unfreeze()
    try:
        with favor_computation():
            assert gc.get_threshold() == (10_000, *thresholds[1:])
            assert gc.get_freeze_count() > 100_000
            assert sys.getswitchinterval() < interval_s
            with favor_computation():
                pass
            assert gc.get_freeze_count() > 100_000  # that of the caller stays
        assert gc.get_freeze_count() == 0
        assert sys.getswitchinterval() == interval_s
        assert gc.get_threshold() == thresholds
    finally:
        if set_aside:
            gc.freeze()


def test_a_directory_of_a_live_run_is_refused(capsys, tmp_path: Path):
    directory = tmp_path / "run"
    with Child(RUN, "--output-dir", directory, *SMALL, "--sft.num-steps", 100000, folder=tmp_path) as first:
        assert first.wait_for_lines(1) == [f"run directory: {directory}; training on cpu in float32"]
        status, error = one_message(capsys, "--output-dir", directory, *SMALL)
        assert status == 2
        assert f"process {first.pid}" in error
        status, error = one_message(capsys, "--output-dir", directory, "--resume")
        assert (status, "in use by a live run" in error) == (2, True)


def test_a_directory_with_a_run_is_refused(capsys, finished):
    status, error = one_message(capsys, "--output-dir", finished[0], *SMALL)
    assert status == 2
    assert "already holds a run" in error


TEMPLATE = "{{ raise_exception('this template takes no such messages') }}"
FAILED_STARTS = (
    "--task jsonl --model.path model --data.path nowhere.jsonl",
    "--task jsonl --model.path model --data.path bad.jsonl",
    "--task jsonl --model.path refusing --data.path good.jsonl",
    "--reward.function reward.py:missing",
    "--reward.function reward.py:fails",
    "--environment environment.py:Missing",
    "--environment environment.py:Fails",
    "--model.path nowhere",
    "--engine.kind vllm --engine.urls http://127.0.0.1:9 --engine.startup-timeout-s 1",
)


@pytest.mark.slow
def test_a_failed_start_leaves_a_directory_for_the_corrected_run(capsys, tmp_path: Path, monkeypatch):
    """Every start fails in its own way, all in the same directory; then the corrected run goes through in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def fails(sample):\n    raise ValueError('no')\n")
    (tmp_path / "environment.py").write_text("class Fails:\n    def __init__(self):\n        raise ValueError('no')\n")
    write_rows(tmp_path / "bad.jsonl", ["{not json"])
    write_rows(tmp_path / "good.jsonl", [{"prompt": [{"role": "user", "content": "a"}], "ground_truth": "b"}] * 4)
    for name, template in (("model", None), ("refusing", TEMPLATE)):
        create_tiny_model(seed=1).save_pretrained(tmp_path / name)
        tokenizer = create_char_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / name)
    for number, wrong in enumerate(FAILED_STARTS):
        status, error = one_message(capsys, *QUICK, *wrong.split())
        assert status in (1, 2), (wrong, error)
        assert "already holds" not in error and "with other settings" not in error, (wrong, error)
        if number < 4:  # found out before there is anything to write to
            assert not (tmp_path / "out").exists(), wrong
    (tmp_path / "out" / "mine.txt").write_text("of the user")
    assert main(QUICK) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "out holds a run without a checkpoint: this run starts from the beginning; the earlier files are now in out/earlier_start_" in told
    )
    assert (tmp_path / "out" / "mine.txt").exists()
    assert load_config(Config, tmp_path / "out" / "config.json").reward.function is None
    assert [line["step"] for line in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [0, 1]


def test_a_failed_start_can_be_resumed_with_what_was_corrected(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def mine(sample):\n    raise ValueError('no')\n")
    status, error = one_message(capsys, *QUICK, "--reward.function", "reward.py:mine")
    assert (status, "raised ValueError" in error) == (1, True)
    (tmp_path / "reward.py").write_text("def mine(sample):\n    return float(sample.index % 2)\n")
    assert main(["--output-dir", "out", "--resume", "--rl.optimizer.lr", "0.0005"]) == 0
    assert load_config(Config, tmp_path / "out" / "config.json").rl.optimizer.lr == 0.0005


def test_updates_that_are_skipped_end_the_run_with_a_checkpoint_from_before_them(capsys, tmp_path: Path, monkeypatch):
    """A learning rate at which the first update is finite and every gradient after it is not."""
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "--mode", "sft", "--sft.num-steps", "20", "--sft.optimizer.lr", "1e19", "--sft.eval-every", "0"]
    status, error = one_message(capsys, *arguments, "--checkpoint.sft-every", "1", "--output-dir", "out")
    assert status == 1, error
    assert "not finite in 10 updates in a row" in error
    assert "in step 11; the last checkpoint, of finite weights, is out/sft/checkpoints/step_0001: --resume goes on from there" in error
    assert [path.name for path in list_checkpoints(tmp_path / "out" / "sft" / "checkpoints")] == ["step_0001"]
    status, error = one_message(capsys, "--output-dir", "out", "--resume")
    assert (status, "in step 11; " in error) == (1, True)


def test_a_model_with_a_nan_weight_is_refused(capsys, tmp_path: Path, monkeypatch, model_dir):
    monkeypatch.chdir(tmp_path)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    status, error = one_message(capsys, *QUICK, "--model.path", model_dir)
    assert status == 1
    assert "has a NaN weight (or an infinite one): model.norm.weight" in error


SPOILS = """
from pathlib import Path
from threading import Lock

LOCK = Lock()

def full(sample):  # as if the disk had become full while the run goes on
    with LOCK:
        return spoil()

def spoil():
    for name in ("metrics.jsonl", "rl/ledger.jsonl"):
        if name == WHAT and not Path("out", name).is_symlink():
            Path("out", "link").symlink_to("/dev/full")
            Path("out", "link").rename(Path("out", name))
    if WHAT == "rl/trajectories":
        Path("out/rl/trajectories").write_text("a file in the way")
    if WHAT == "summary.json":
        Path("out/summary.json").mkdir(exist_ok=True)
    return 1.0
"""


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        pytest.param("metrics.jsonl", "the disk is full: out/metrics.jsonl cannot be written", marks=pytest.mark.slow),
        ("rl/ledger.jsonl", "the disk is full: out/rl/ledger.jsonl cannot be written"),
        pytest.param("rl/trajectories", "out/rl/trajectories/step_0001.jsonl cannot be written", marks=pytest.mark.slow),
        ("summary.json", "out/summary.json cannot be written"),
    ],
)
def test_files_that_the_disk_refuses_end_in_one_message(capsys, tmp_path: Path, monkeypatch, what, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(SPOILS.replace("WHAT", repr(what)))
    more = ["--trajectories.every", "1"]
    status, error = one_message(capsys, *QUICK, "--reward.function", "reward.py:full", *more)
    assert status == 1, error
    assert expected in error and "--resume" in error


def test_places_that_hold_no_run_end_in_one_message(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "/proc/nowhere/run"):
        status, error = one_message(capsys, *SMALL, "--output-dir", place)
        assert status == 2, error
        assert f"{place} cannot hold a run" in error and re.search("choose (another|an) --output-dir", error)
    (tmp_path / "runs").write_text("")
    status, error = one_message(capsys, *SMALL)
    assert (status, "give --output-dir" in error) == (2, True)


def test_a_checkpoint_outlives_lines_of_metrics_that_are_lost(capsys, finished, tmp_path: Path):
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory)
    metrics = directory / "metrics.jsonl"
    expected = values(metrics)
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    assert main(["--output-dir", str(directory), "--resume"]) == 0
    assert "lines are lost; the run goes on behind the 2 lines that are left" in " ".join(capsys.readouterr().err.split())
    assert values(metrics) == [*expected[:2], expected[-1]]
    assert "lines are lost" in json.loads((directory / "run.json").read_text())["metrics_gaps"][0]


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
    assert main(["--dry-run", "--seed", "4"]) == 0
    out = capsys.readouterr().out
    for expected in (
        "--seed 4",
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
        (["--sft.batch-size", "0"], "--sft.batch-size is 0"),
        (
            ["--generation.top-p", "0.9", "--engine.kind", "vllm", "--engine.urls", "http://127.0.0.1:9"],
            "the sets of tokens that vLLM draws from",
        ),
        (["--generation.min-p", "0.1", "--backend.kind", "jax"], "log-probs over the whole vocabulary alone"),
        (
            ["--generation.top-k", "5", "--enable-segment-wise-ppo", "--rl.asynchronous.enabled"],
            "log-probs of segments are computed over the whole vocabulary",
        ),
        (["--on-bad.gradient", "stop", "--backend.kind", "jax"], "--on-bad.gradient is 'stop', but the JAX backend"),
        (["--on-bad.ratio", "skip", "--backend.kind", "jax", "--dry-run"], "--on-bad.ratio is 'skip', but the JAX backend"),
        (["--backend.kind", "fsd"], "did you mean 'fsdp'?"),
        (["--backend.num-processes", "2"], "add --backend.kind fsdp"),
        (["--model.path", "/nowhere/model"], "is not a directory"),
        (["--task", "gsm8k"], "--data.path"),
        (["--data.path", "x.jsonl"], "--model.path"),
        (["--data.path", "x.jsonl", "--task", "sort"], "--task jsonl"),
        (["--config", "nowhere.toml"], "configuration file nowhere.toml does not exist"),
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
        "from integration.settings.config import Config\nfrom integration.settings.sections import RLSection\n"
        "config = Config(seed=7, rl=RLSection(num_steps=4))\n"
    )
    for name in ("a.toml", "a.json", "a.py"):
        assert main(["--config", str(tmp_path / name), "--dry-run", "--rl.num-minibatches", "4"]) == 0
        out = capsys.readouterr().out
        assert "--seed 7" in out
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


def test_a_run_whose_reward_is_no_accuracy_does_not_speak_of_one(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "signs.py").write_text("def f(s): return 1.0 if len(s.response) % 2 else -1.0")
    short = ["--sft.num-steps", 2, "--rl.num-steps", 1, "--evaluation.num-prompts", 4]
    arguments = ["--output-dir", "out", "--reward.function", "signs.py:f", *SMALL, *short]
    assert main([str(a) for a in arguments]) == 0
    out = capsys.readouterr().out
    assert "reward before SFT: " in out and "held-out reward" in out and "mean reward of greedy answers" in out
    assert "accuracy" not in out
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert all(line["eval_graded_fraction"] > 0 for line in lines if "eval_accuracy" in line)


@pytest.mark.parametrize(
    ("source", "more", "expected"),
    [
        ("def f(s): raise ZeroDivisionError('oops')", [], "raised ZeroDivisionError"),
        pytest.param("def f(s): raise SystemExit(0)", [], "reward.py:1) while", marks=pytest.mark.slow),
        ("async def f(s): raise SystemExit(0)", [], "raised SystemExit"),
        pytest.param(
            "import time\nasync def f(s): time.sleep(30)", ["--reward.timeout-s", "0.2"], "reward.py:2: await there", marks=pytest.mark.slow
        ),
        ("def f(s): return float('nan')", [], "finite"),
        pytest.param("import time\ndef f(s): time.sleep(3)", ["--reward.timeout-s", "0.2"], "within 0.2 s", marks=pytest.mark.slow),
        ("def f(s): return 1.0", ["--rl.filter", "nonzero_std", "--rl.max-filter-attempts", "2"], "check_reward_nonzero_std"),
    ],
    ids=["raises", "exits", "exits async", "blocks", "nan", "hangs", "filter passes nothing"],
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


OWN_LOGGERS = """
class Kept:
    def __init__(self, path, every):
        self.path, self.every, self.lines = path, every, []

    def log(self, metrics, step):
        if step % self.every == 0:
            self.lines.append(f"{metrics['stage']} {step}")

    def finish(self):
        open(self.path, "w").write("\\n".join(self.lines))

def kept(path, every=1):
    return Kept(path, every)

def broken():
    return 7
"""


def test_metrics_go_to_further_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_LOGGERS)
    argv = ["--mode", "sft", "--output-dir", "run", "--quiet", *SMALL, "--loggers", "jsonl('copy.jsonl')", "own.py:kept('kept', every=2)"]
    assert main([*argv, "--dry-run"]) == 0
    assert "metrics.jsonl, the display, jsonl(path='copy.jsonl'), own.py:kept(path='kept', every=2)" in capsys.readouterr().out
    assert not Path("run").exists() and not Path("copy.jsonl").exists(), "a dry run opens no logger"
    assert main(argv) == 0
    assert read_metrics(Path("copy.jsonl")) == read_metrics(Path("run/metrics.jsonl"))
    assert Path("kept").read_text() == "sft 0\nsft 2\nsft 4\nsft 6", "it was finished, too"


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ("wandb(project=3)", "found 3 .* expected a string in quotes"),
        ("wandb('x', run=1)", "unknown argument 'run'.*It takes project='rollouts', name=None"),
        ("tensorboards('x')", "unknown logger 'tensorboards'.*[Kk]nown are jsonl, mlflow, tensorboard, trackio, wandb"),
        ("own.py:broken", "loggers own.py:broken returned a int, which has no log.. and no finish.."),
        ("own.py:kept", "own.py:kept needs the argument 'path'"),
        *([] if importlib.util.find_spec("wandb") else [("wandb('x')", "needs the package wandb: pip install 'rollouts-rl.wandb.'")]),
    ],
)
def test_a_logger_that_there_is_not_ends_the_run_with_one_message(
    logger: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN_LOGGERS)
    assert main(["--mode", "sft", "--quiet", *SMALL, "--loggers", logger]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_wandb_is_given_the_settings_without_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = Config(engine=EngineSection(kind="vllm", urls=("http://inside.example:1",)))
    assert "inside.example" not in json.dumps(describe_settings(config)) and describe_settings(config)["seed"] == 0
    seen: dict[str, object] = {}
    stand_in = types.SimpleNamespace(init=lambda **given: seen.update(given) or types.SimpleNamespace(log=print, finish=print))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    create_loggers(["wandb(project='mine', name='first')"], RunIdentity(directory=tmp_path, settings=describe_settings(config)))
    assert (seen["project"], seen["name"]) == ("mine", "first") and seen["config"] == describe_settings(config)


@pytest.mark.parametrize(
    "name",
    ["reward.timeout_s", "engine.generate_timeout_s", "engine.deadlines.outage_s", "episode.timeout_s", "agent.timeout_s", "engine.urls",
     "rl.max_tokens_per_microbatch"],
)  # fmt: skip
def test_a_resumed_run_may_change_what_messages_advise_to(name: str):
    assert name.startswith(MAY_CHANGE_ON_RESUME)
