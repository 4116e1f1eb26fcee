"""The command `rollouts`, as pip installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from integration.command import PROGRAMS, main
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config
from integration.settings.option_effects import COMMAND_OPTIONS, list_options, spell_option
from integration.settings.other_names import OTHER_NAMES, explain_other_names

OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
ROOT = Path(__file__).parents[2]
SCRIPT = "import sys; from integration.command import main; sys.exit(main())"


def test_the_help_names_each_program(capsys: pytest.CaptureFixture[str]):
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in PROGRAMS)
        assert len(out.splitlines()) < 30
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollouts-rl ")


def test_an_unknown_program_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]):
    assert main(["trian"]) == 2
    assert "unknown command 'trian': did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_answers(name: str, flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([name, flag])
    assert end.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_the_help_lists_what_a_positional_argument_takes(capsys: pytest.CaptureFixture[str]):
    for name, shown in {"reward": "FILE.py:NAME", "report": "RUN [RUN ...]", "view": "RUN|FILE", "convert": "TARGET"}.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        out = capsys.readouterr().out
        assert out.partition("\n")[0].endswith(shown) and "(default: )" not in out, out


def test_a_misspelt_option_of_the_gateway_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["gateway", "--prt", "3"])
    assert end.value.code == 2
    assert "--prt: Perhaps you meant: --port\n" in capsys.readouterr().err


NAMED = [name for name in PROGRAMS if name != "completion"]
"""Programs that answer by either name: a completion is of the command."""


@pytest.mark.parametrize("name", NAMED)
def test_a_help_names_the_command_as_it_was_started(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["/usr/bin/rollouts", name])
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    assert f"usage: rollouts {name} " in out and "python -m" not in out
    with suppress(SystemExit):
        main([name, "--none-such"])
    told = capsys.readouterr().err
    assert "rollouts " in told and "python -m" not in told
    monkeypatch.setattr("sys.argv", ["/usr/lib/integration/__main__.py"])
    module = f"python -m integration.{name.replace('-', '_')}"
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"usage: {module} " in capsys.readouterr().out
    with suppress(SystemExit):
        main([name, "--none-such"])
    told = capsys.readouterr().err
    assert ("python -m integration.train" if name == "doctor" else module) in told


@pytest.mark.parametrize("name", [*NAMED, "completion"])
def test_a_help_whose_reader_has_left_ends_in_silence(name: str):
    reader, writer = os.pipe()
    os.close(reader)
    script = f"import sys; from integration.command import main; sys.exit(main([{name!r}, '--help']))"
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, cwd=ROOT)
    os.close(writer)
    assert done.returncode == 0 and done.stderr == ""


def test_a_folder_called_integration_beside_the_work_does_no_harm(tmp_path: Path):
    """With the command, whose path does not begin with the working directory; the user's own modules are found all the same."""
    (tmp_path / "integration").mkdir()
    (tmp_path / "integration" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "own.py").write_text("from rollouts import grpo, Algorithm\ndef mine() -> Algorithm:\n    return grpo()\n")
    start = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); " + SCRIPT]
    argv = ["train", "--dry-run", "--mode", "rl", "--rl.algorithm", "own:mine"]
    done = subprocess.run([*start, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "own:mine" in done.stdout


def test_each_option_that_other_names_are_answered_with_exists():
    known = {spell_option(name) for name in (*COMMAND_OPTIONS, *dict(list_options(Config())))} | {"--output-dir"}
    for answer in OTHER_NAMES.values():
        options = [word.strip("(),'") for word in answer.split() if word.startswith("--")]
        assert options and set(options) <= known, answer


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--learning_rate", "--learning_rate is --sft.optimizer.lr, --rl.optimizer.lr here"),
        ("--rl.temperature=0.7", "--rl.temperature is --generation.temperature here"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr is --sft.optimizer.lr, --rl.optimizer.lr here"),
        ("--num-generations", "--num-generations is --rl.samples-per-prompt here"),
    ],
)
def test_names_of_other_frameworks_are_translated(typed: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert explain_other_names([typed, "--nothing"]) == [told]
    with pytest.raises(SystemExit):
        parse_command_line(["--seed", "3", *([typed] if "=" in typed else [typed, "8"])])
    assert told in capsys.readouterr().err.splitlines()


def test_known_options_are_no_other_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_command_line(["--rl.optimizer.lr=3", "--sft.optimizer.weight_decay", "0.1", "--bogus"])
    assert " here" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "shown", "hidden"),
    [
        (["train", "--help", "lora"], "--lora.rank INT", "--rl.num-steps"),
        (["train-reward-model", "--help", "training"], "--training.optimizer.lr FLOAT", "--data.path"),
        (["simulate", "--help", "engine"], "--slots INT", "--mean-tokens"),
        (["simulate", "--help", "asynchronous"], "--max-staleness INT", "--slots"),
        (["eval", "--help", "generation"], "--generation.temperature FLOAT", "--rl.num-steps"),
    ],
)
def test_the_help_of_a_section_shows_its_options_alone(argv: list[str], shown: str, hidden: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(argv)
    told = capsys.readouterr().out
    assert end.value.code == 0 and told.startswith(argv[-1] + "\n") and shown in told and hidden not in told
    with pytest.raises(SystemExit) as end:
        main([argv[0], "--help-all"])
    everything = capsys.readouterr().out
    assert end.value.code == 0 and shown in everything and len(everything.splitlines()) > 100


def test_the_help_of_all_options_of_an_evaluation_has_none_of_training(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["eval", "--help-all"])
    told = capsys.readouterr().out
    for shown in ("--generation.temperature", "--engine.deadlines.", "--threshold", "--tasks", "--seed"):
        assert shown in told
    for hidden in ("--sft.", "--rl.", "--critic.", "--on-bad.", "--teacher.", "--trajectories.", "--loggers", "--crash-bundles"):
        assert hidden not in told, hidden


@pytest.mark.parametrize("name", ["train", "train-reward-model", "simulate", "eval"])
def test_each_option_of_the_short_help_is_one_of_the_program(name: str, capsys: pytest.CaptureFixture[str]):
    options: list[set[str]] = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([name, flag])
        lines = capsys.readouterr().out.replace("│", " ").splitlines()
        options.append({found for line in lines if line.startswith("  ") or flag == "--help-all" for found in OPTION.findall(line)})
    shorts = {"--environment"} if name == "train" else set()  # short for --environment.factory
    assert options[0] - options[1] - shorts - {"--help", "--help-all", "--reward.model"} == set()
    assert len(options[0]) > 10


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train-reward-model", "--training.num-steps", "0"], "--training.num-steps is 0, expected a whole number, at least 1"),
        (["train-reward-model", "--training.optimizer.lr=-1"], "--training.optimizer.lr is -1.0, expected a finite number, at least 0"),
        (["train-reward-model", "--data.eval-path", "a.jsonl"], "--data.eval-path is 'a.jsonl', but there is no --data.path to train on"),
        (["train-reward-model", "--help", "trainig"], "--help knows no section 'trainig': did you mean 'training'?"),
        (["simulate", "--hours", "0"], "--hours is 0.0, expected a finite number above 0"),
        (["simulate", "--token-rate", "0"], "--token-rate is 0.0, expected a finite number above 0"),
        (["simulate", "--max-staleness", "-1"], "--max-staleness is -1, expected a whole number, at least 0"),
        (["simulate", "--sigma", "-1"], "--sigma is -1.0, expected at least 0"),
        (["eval", "here", "--n", "0"], "--n is 0, expected a whole number, at least 1"),
        (["eval", "here", "--generation.top-p", "2"], "--generation.top-p is 2.0, expected more than 0, at most 1"),
        (["eval", "here", "--rl.num-steps", "3"], "--rl.num-steps is about training, and has no effect in an evaluation"),
        (["convert", "here", "there", "--max-file-gib", "0"], "--max-file-gib is 0.0, expected a number above 0, or None"),
        (["report", "here", "--max-tokens", "-1"], "--max-tokens is -1, expected at least 1, or 0 for all"),
        (["view", "here", "--limit", "-1"], "--limit is -1, expected at least 1, or 0 for all"),
        (["gateway", "--port", "x"], "--port: invalid int value: 'x'; "),
        (["gateway", "--max-tokens", "0"], "--max-tokens is 0, expected a whole number, at least 1"),
        (["gateway", "--timeout-s", "-1"], "--timeout-s is -1.0, expected seconds above 0, or 0 for no limit"),
        (["gateway", "--idle-s", "-1"], "--idle-s is -1.0, expected seconds above 0, or 0 for never"),
        (["gateway", "--tokenizer", "there"], "--tokenizer is 'there', but it is for models on servers"),
        (["eval", "here", "--tokenizer", "there"], "--tokenizer is 'there', but it is for models on servers, and here has a tokenizer of"),
        (["gateway", "--model.device", "tpu"], "--model.device is 'tpu', expected cpu"),
        (["train-reward-model", "--training.best", "acc"], "--training.best is 'acc', but held-out pairs are measured by eval_accuracy"),
        (["train", "--generation.temperature", "inf"], "--generation.temperature is inf, expected a finite number, at least 1e-06"),
        (["gateway", "--chat", "maybe"], "--chat: invalid choice: 'maybe'"),
        (["tinker", "--port", "x"], "--port: invalid int value: 'x'; "),
        (["tinker", "--max-models", "0"], "--max-models is 0, expected"),
        (["tinker", "--idle-s", "0"], "--idle-s is 0.0, expected a number above 0"),
        (["tinker", "--host", "0.0.0.0"], "--token-variable is None, expected a token, because host is 0.0.0.0"),
        (["tinker", "--name", ""], "--name is '', expected a name that is not empty"),
        (["tinker", "one", "two"], "'two' stands behind the model: give one model"),
        (["tinker", "one", "--model.path", "two"], "the model is named twice, 'one' and --model.path 'two'"),
        (["tinker", "--token-variable", "NO_KEY"], "--token-variable NO_KEY names no variable of the environment with a token"),
        (["gateway", "one", "two"], "'two' stands behind the model: give one model"),
        (["train", "--mode", "dpo", "--preference.beta", "inf"], "--preference.beta is inf, expected a finite number above 0"),
        (["doctor", "--rl.num-steps", "0"], "--rl.num-steps is 0, expected a whole number, at least 1"),
    ],
)
def test_errors_name_the_option_as_it_was_typed(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}") and error.count("\n") == 1, error
