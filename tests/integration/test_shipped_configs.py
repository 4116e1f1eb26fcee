"""Each shipped configuration file, and each training command of the README and of the page of commands, is valid."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.dry_run.describe import describe_run, describe_run_as_json
from integration.expressions.algorithm import resolve_algorithm
from integration.expressions.filters import resolve_filter
from integration.settings.command_line import parse_command_line, read_config_file
from integration.settings.config import Config
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import to_dict
from rollouts.testing import create_tiny_model

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "integration" / "configs").iterdir() if path.suffix in (".py", ".toml", ".json"))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that AutoModelForCausalLM and AutoTokenizer open."""
    directory = tmp_path_factory.mktemp("model")
    create_tiny_model().save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    return directory


def read_commands() -> list[list[str]]:
    """The arguments of each `python -m integration.train` in the README, docs/commands.md and the comments of configurations."""
    commands: list[list[str]] = []
    for path in (ROOT / "README.md", ROOT / "docs" / "commands.md", *CONFIGS):
        for line in path.read_text().splitlines():
            _, found, rest = line.partition("python -m integration.train ")
            if found:
                commands.append(shlex.split(rest.partition("#")[0].rstrip("`. ")))
    return commands


def flatten(settings: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Nested sections as dotted names."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        out |= flatten(value, f"{where}{name}.") if isinstance(value, dict) else {where + name: value}
    return out


def test_there_is_an_example_of_each_kind_of_file_that_people_write():
    assert {path.suffix for path in CONFIGS} >= {".py", ".toml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
@pytest.mark.parametrize("mode", ["sft", "rl", "sft+rl"])
def test_each_configuration_parses_and_dry_runs(path: Path, mode: str, model_directory: Path):
    argv = ["--config", str(path), "--mode", mode, "--dry-run"]
    if read_config_file(path, Config()).model.path is not None:
        argv += ["--model.path", str(model_directory)]
    command = parse_command_line(argv)
    text = describe_run(command.config, command.mode)
    assert f"mode {mode}" in text and len(text.splitlines()) < 60
    told = json.loads(describe_run_as_json(command.config, command.mode))
    assert (told["mode"], told["settings"]) == (mode, json.loads(json.dumps(to_dict(command.config))))
    resolve_algorithm(command.config.rl.algorithm, 8)
    resolve_filter(command.config.rl.filter)


def test_the_segment_wise_example_is_asynchronous_and_one_switch_does_the_rest():
    path = ROOT / "integration" / "configs" / "gsm8k_segment_wise.toml"
    config = read_config_file(path, Config())
    assert config.rl.asynchronous.enabled and config.asynchronous.segment_wise and config.asynchronous.interrupts
    assert "segment_log_probs" not in resolve_algorithm(config.rl.algorithm, 8).requires, "the switch wraps it"
    assert "segment_log_probs" in config.algorithm.requires


def test_the_file_of_the_harder_sorting_task_has_the_defaults_of_that_task():
    path = ROOT / "integration" / "configs" / "sort_long.toml"
    assert read_config_file(path, Config()) == parse_command_line(["--task", "sort-long"]).config != Config(task="sort-long")


def test_the_first_run_has_the_defaults_of_every_setting():
    assert parse_command_line([]).config == parse_command_line(["--task", "sort"]).config == Config()


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.suffix == ".toml"], ids=lambda path: path.name)
def test_each_setting_of_a_file_arrives(path: Path):
    arrived = flatten(to_dict(read_config_file(path, Config())))
    written = flatten(tomllib.loads(path.read_text()))
    assert {name: arrived[name] for name in written} == written


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_flags_take_precedence_over_a_file(path: Path):
    command = parse_command_line(["--config", str(path), "--seed", "7", "--rl.num-steps", "3"])
    config = parse_command_line(["--config", str(path)]).config
    assert command.config == replace(config, seed=7, rl=replace(config.rl, num_steps=3))


@pytest.mark.parametrize("arguments", read_commands(), ids=" ".join)
def test_each_training_command_that_is_printed_for_people_parses(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    if "--resume" in arguments:
        run = tmp_path / arguments[arguments.index("--output-dir") + 1]
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(to_dict(Config())))
        (run / "run.json").write_text('{"mode": "sft+rl"}\n')
    arguments = [str(ROOT / a) if a.startswith("integration/configs/") else a for a in arguments]
    command = parse_command_line(arguments)
    assert isinstance(command.config, Config)


def test_there_are_commands_to_parse():
    assert len(read_commands()) >= 15
