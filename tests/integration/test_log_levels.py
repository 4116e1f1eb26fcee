"""Logging on stderr: warnings only, unless the user asks for more, from all modules or from one."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest

from integration.run import job
from integration.settings.command_line import parse_command_line
from integration.settings.log_levels import log_to_stderr, parse_log_level
from integration.train import main
from rollouts.errors import ConfigError, DataError


def speak() -> None:
    for name in ("rollouts.a", "rollouts.b", "integration.c", "other"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(level, "said %d", level)


@pytest.mark.parametrize(
    ("text", "counts"),  # of lines of rollouts.a, rollouts.b, integration.c, and of a library
    [
        ("error", (1, 1, 1, 2)),
        ("warning", (2, 2, 2, 2)),
        ("INFO", (3, 3, 3, 2)),
        ("debug", (4, 4, 4, 2)),
        ("warning,rollouts.a=debug", (4, 2, 2, 2)),
        (" error , rollouts.b = info ", (1, 3, 1, 2)),
        ("other=debug", (2, 2, 2, 4)),
    ],
)
def test_each_logger_tells_what_was_asked_for(capsys, text: str, counts: tuple[int, ...]):
    with log_to_stderr(parse_log_level(text)):
        speak()
    lines = capsys.readouterr().err.splitlines()
    assert tuple(sum(f" {name}: " in line for line in lines) for name in ("rollouts.a", "rollouts.b", "integration.c", "other")) == counts
    assert "ERROR rollouts.a: said 40" in lines


def test_all_is_as_before_when_the_block_ends(capsys, caplog):
    root, own = logging.getLogger(), logging.getLogger("rollouts")
    before = (root.level, own.level, list(root.handlers))
    with pytest.raises(RuntimeError):
        with log_to_stderr(parse_log_level("debug,rollouts.a=info")):
            assert own.level == logging.DEBUG
            raise RuntimeError
    assert (root.level, own.level, list(root.handlers)) == before
    assert logging.getLogger("rollouts.a").level == logging.NOTSET
    with log_to_stderr(parse_log_level("debug")):
        logging.getLogger("rollouts.a").debug("heard by others as well")
    assert caplog.messages == ["heard by others as well"]
    assert capsys.readouterr().err == "DEBUG rollouts.a: heard by others as well\n"


def test_what_is_told_goes_to_what_stderr_is_at_that_moment(monkeypatch):
    live = io.StringIO()
    with log_to_stderr(parse_log_level("info")):
        monkeypatch.setattr("sys.stderr", live)
        logging.getLogger("rollouts.a").info("above the live line")
    assert live.getvalue() == "INFO rollouts.a: above the live line\n"


@pytest.mark.parametrize("text", ["loud", "", "rollouts.a=", "=debug", "warning,", "debug=rollouts.a", "10"])
def test_a_level_that_does_not_exist_is_refused_with_those_that_do(text: str):
    with pytest.raises(ConfigError, match=r"--log-level .* is not a level: .*write a level, or name=level, as in warning,rollouts"):
        parse_log_level(text)


def test_a_misspelt_level_ends_the_command_with_status_2(capsys):
    assert main(["--log-level", "debgu"]) == 2
    assert "did you mean 'debug'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "heard"),
    [("", "warning"), pytest.param("--log-level debug", "debug warning", marks=pytest.mark.slow), ("--log-level=error", "")],
)
def test_a_run_is_told_about_as_its_flag_says_and_warnings_by_default(capsys, monkeypatch, tmp_path: Path, flags: str, heard: str):
    def tell(*arguments: Any) -> None:
        logging.getLogger("rollouts.a").debug("debug")
        logging.getLogger("rollouts.a").warning("warning")
        raise DataError("that is enough")

    monkeypatch.setattr(job, "prepare_run", tell)
    assert main(["--mode", "rl", "--output-dir", str(tmp_path / "run"), *flags.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines if " rollouts.a: " in line] == heard.split()
    assert parse_command_line([]).log_levels == {"rollouts": logging.WARNING, "integration": logging.WARNING}


JUDGE = """
from rollouts.rewards.results import EvaluateResult
from rollouts.outcomes import StepOutput

def judge(sample):
    return EvaluateResult(0.5, step_outputs=(StepOutput(step_index=0, base_reward=0.25),))
"""


def test_which_steps_a_runs_reward_judged_is_told_by_the_aligners_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "own.py").write_text(JUDGE)
    argv = (
        "--task grid_world --mode rl --rl.num-steps 1 --rl.prompts-per-step 1 --rl.samples-per-prompt 2 --rl.num-minibatches 1 "
        "--episode.max-turns 2 --evaluation.num-prompts 1 --evaluation.no-sampled --model.hidden-size 32 --model.num-layers 1 "
        "--num-threads 1 --quiet --log-level warning,rollouts.rewards.alignment=debug"
    ).split()  # fmt: skip
    assert main([*argv, "--reward.function", f"{tmp_path / 'own.py'}:judge", "--output-dir", str(tmp_path / "run")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("DEBUG rollouts.rewards.alignment: alignment ")]
    assert any("alignment in: StepOutput" in line and "base_reward=0.25" in line for line in lines)
    assert any("alignment in: " in line and "has base rewards {0: 0.0, 1: 0.0} by step index" in line for line in lines)
    assert sum("has base rewards {0: 0.25} by step index" in line and "alignment out" in line for line in lines) >= 2
