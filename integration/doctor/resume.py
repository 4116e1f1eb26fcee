"""The check that a run which is killed goes on with the same numbers: three steps at once, and three with a kill after the second."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from integration.doctor.findings import Finding, judge, skip
from rollouts.checks import parse_json
from rollouts.training.saving.checkpoints import list_checkpoints

_POLL_S = 0.05
_CLOCKED = ("_s", "per_second")  # ends of the names of metrics that measure time
_STEPS = 3


REWARD_MODEL = "reward_model"
"""Name of the training of a reward model, beside those of the modes of `rollouts train`."""


def check_resume(argv: Sequence[str], mode: str, *, timeout_s: float) -> Finding:
    """Run three steps of a mode twice, once killed after the second and resumed, and compare every number of their lines.

    Args:
        argv: options of the run.
        mode: mode of `rollouts train`, or REWARD_MODEL.
        timeout_s: seconds for each of the three processes.
    """
    name, small = "resume", shorten(mode)
    is_scorer = mode == REWARD_MODEL
    place = Path("checkpoints" if is_scorer else f"{mode.rpartition('+')[2]}/checkpoints")  # the last stage has them
    run = partial(run_shortly, program="integration.train_reward_model" if is_scorer else "integration.train")
    with TemporaryDirectory(prefix="rollouts-doctor-") as directory:
        whole, killed = Path(directory) / "whole", Path(directory) / "killed"
        try:
            for path, kill in ((whole, False), (killed, True)):
                error = run([*argv, *small, "--output-dir", str(path)], path / place if kill else None, timeout_s)
                if error:
                    found = f"three steps could not be run: {error}"
                    return judge(name, found, fails=True, advice="start the run itself: it says what is wrong")
            forget_later(killed / place)
            error = run([*argv, *small, "--output-dir", str(killed), "--resume"], None, timeout_s)
        except subprocess.TimeoutExpired:
            return skip(
                name, f"three steps take longer than {timeout_s:.0f} s here; --resume-timeout-s allows more, 0 leaves this check out"
            )
        if error:
            return judge(name, f"a killed run does not go on: {error}", fails=True, advice="the message is that of the resumed run")
        differences = compare_lines(_read(whole / "metrics.jsonl"), _read(killed / "metrics.jsonl"))
    told = f"{len(differences)} values differ, first {differences[0]}" if differences else "every number is the same"
    found = f"{_STEPS} steps, and {_STEPS} with a kill -9 after the second: {told}"
    advice = "something depends on time, on a global random state or on what came before: rewards and environments of your own first"
    return judge(name, found, fails=bool(differences), advice=advice)


def forget_later(checkpoints: Path) -> None:
    """Remove the checkpoints behind that of the kill, which a fast run has written before it: the resumed run has a step to do."""
    for path in list_checkpoints(checkpoints)[_STEPS - 1 :]:
        shutil.rmtree(path)


def shorten(mode: str) -> list[str]:
    """Return the options that make a run one of three steps that tells nobody: no logger hears of it, and nothing is published."""
    if mode == REWARD_MODEL:
        small = ["--quiet", "--training.num-steps", str(_STEPS), "--training.checkpoint-every", "1"]
        return [*small, "--training.keep-last-n", str(_STEPS), "--loggers"]
    small = ["--mode", mode, "--quiet", "--sft.num-steps", str(_STEPS), "--rl.num-steps", str(_STEPS), "--evaluation.num-prompts", "4"]
    small += ["--checkpoint.sft-every", "1", "--checkpoint.rl-every", "1", "--checkpoint.keep-last-n", str(_STEPS)]
    small += ["--preference.num-steps", str(_STEPS), "--preference.checkpoint-every", "1"] if "dpo" in mode else []
    small += ["--critic.warmup-steps", "0"] if "rl" in mode else []  # it may be longer than three steps
    return [*small, "--push-to-hub", "None", "--loggers"]


def compare_lines(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the differences of two files of metrics, times left out."""
    if len(first) != len(second):
        return [f"{len(first)} lines and {len(second)}"]
    return [
        f"{key} of step {a['step']}: {a.get(key)!r} and {b.get(key)!r}"
        for a, b in zip(first, second, strict=True)
        for key in sorted(a.keys() | b.keys())
        if not key.endswith(_CLOCKED) and a.get(key) != b.get(key)
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_shortly(argv: Sequence[str], kill_at: Path | None, timeout_s: float, *, program: str = "integration.train") -> str:
    """Run a command. kill_at: directory of checkpoints, at whose second the process is killed. Returns its last words if it failed."""
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as said:  # a pipe that nobody reads would stop a run that says much
        process = subprocess.Popen([sys.executable, "-m", program, *argv], stdout=subprocess.DEVNULL, stderr=said)
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                if kill_at is not None and kill_at.is_dir() and len(list_checkpoints(kill_at)) >= _STEPS - 1:
                    process.send_signal(signal.SIGKILL)
                    return ""
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(process.args, timeout_s)
                time.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        words = [line.strip("│╭╮╰╯─ ") for line in said.read().splitlines()]
    told = [line for line in words if line.startswith("error:")] or [line for line in words if line]
    return "" if process.returncode == 0 else (told or [f"exit status {process.returncode}"])[-1]
