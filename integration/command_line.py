"""From arguments to a mode, a configuration and a few switches.

    python -m integration.train [--mode sft|rl|sft+rl] [--config FILE.py|.toml|.json] [--output-dir DIR] [--resume] [--dry-run] [--quiet]
                                [--log-level LEVEL] [--task NAME] [--algorithm NAME] [--environment FILE.py:NAME] [--seed N]
                                [--skip-bad-rows] [--section.field VALUE ...]

Values come from the defaults of the task, then from --config (or, with --resume, from the run's own config.json), then from flags.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import tyro

from integration.config import SELF_MADE_TASKS, Config
from integration.log_levels import DEFAULT_LEVEL, parse_log_level
from integration.task_defaults import create_default_config
from rollouts.config import from_dict, load_config, suggest
from rollouts.errors import ConfigError
from rollouts.rewards.answers import load_module

_SHORT = re.compile(r"^--(algorithm|environment)(?==|$)")
_LONG: Mapping[str, str] = MappingProxyType({"algorithm": "--rl.algorithm", "environment": "--environment.factory"})

T = TypeVar("T")
C = TypeVar("C")
Mode = Literal["sft", "rl", "sft+rl"]
MODES: tuple[Mode, ...] = ("sft", "rl", "sft+rl")
CONFIG_FILE = "config.json"
RUN_FILE = "run.json"
MODEL_DIRECTORY = "model"  # in the directory of a run that trains a reward model


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the user asked for."""

    mode: Mode
    config: Config
    resume: bool
    dry_run: bool
    quiet: bool
    log_levels: Mapping[str, int]  # of loggers by name


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Train a language model: supervised fine-tuning, reinforcement learning, or one after the other."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    mode: str | None = None
    """sft, rl, or sft+rl (the default); a resumed run keeps its own"""
    resume: bool = False
    """go on with the interrupted run in --output-dir"""
    dry_run: bool = False
    """print the resolved configuration and what follows from it, and end"""
    quiet: bool = False
    """print the summary only"""
    log_level: str = DEFAULT_LEVEL
    """what is told on stderr: debug, info, warning or error, also of single modules, as in warning,rollouts.rollout_training=debug"""
    algorithm: str | None = None
    """short for --rl.algorithm: grpo, gigpo(gamma=0.9, omega=0.5), ..."""
    skip_bad_rows: bool = False
    """short for --data.skip-bad-rows, as --environment FILE.py:NAME is for --environment.factory"""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """settings from FILE.py (which defines `config`), FILE.toml or FILE.json"""


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse arguments.

    Raises: ConfigError with one message; SystemExit(2) by tyro for flags it does not know (it suggests the right one) and values of the
        wrong type, 0 for --help.
    """
    argv = [_SHORT.sub(_write_out, argument) for argument in argv]
    base = read_base(argv, create_default_config(_find_task(argv)))
    arguments = parse_flags(argv, _Arguments(config=base), "python -m integration.train")
    mode = arguments.mode or (read_saved_mode(Path(arguments.config.output_dir or "")) if arguments.resume else "sft+rl")
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}: {suggest(mode, MODES)}")
    config = arguments.config
    if config.data.path is not None and config.task in SELF_MADE_TASKS and value_of(argv, "--task") is None:
        config = replace(config, task="jsonl")  # a user who brings data means them to be used
    if arguments.skip_bad_rows:
        config = replace(config, data=replace(config.data, skip_bad_rows=True))
    return CommandLine(
        mode=mode,
        config=config,
        resume=arguments.resume,
        dry_run=arguments.dry_run,
        quiet=arguments.quiet,
        log_levels=parse_log_level(arguments.log_level),
    )


def _write_out(short: re.Match[str]) -> str:
    """The flag that a short one stands for."""
    return _LONG[short.group(1)]


def _find_task(argv: Sequence[str]) -> str | None:
    """The task that flags ask for, by its name or by an environment."""
    task = value_of(argv, "--task")
    return "environment" if task is None and value_of(argv, "--environment.factory") is not None else task


def parse_flags(argv: Sequence[str], default: T, program: str) -> T:
    """The dataclass `default` with what flags change in it.

    As tyro.cli, except that what our own checks refuse is raised as it is: tyro would print it wrapped, in a frame.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(type(default), prog=program, args=list(argv), default=default)
    except SystemExit as stop:
        cause: BaseException | None = stop
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__context__
        if cause is not None:
            printed.truncate(0)
            raise cause from None
        raise
    finally:
        sys.stderr.write(printed.getvalue())


def read_config_file(path: Path, kind: type[C]) -> C:
    """A configuration of a kind from a .py, .toml or .json file. Raises ConfigError naming the file."""
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    if path.suffix == ".py":
        config = getattr(load_module(path), "config", None)
        if not isinstance(config, kind):
            place = f"{kind.__module__}.{kind.__name__}"
            raise ConfigError(f"{path} must define `config = {kind.__name__}(...)` ({place}), found {type(config).__name__}")
        return config
    if path.suffix == ".json":
        return load_config(kind, path)
    if path.suffix == ".toml":
        try:
            data: dict[str, Any] = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        return from_dict(kind, data)
    raise ConfigError(f"{path} is not a configuration file: use .py, .toml or .json")


def read_saved_mode(output_dir: Path) -> str:
    """The mode that a run was started with. Raises ConfigError naming the file."""
    path = output_dir / RUN_FILE
    try:
        return str(json.loads(path.read_text())["mode"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not say how the run was started ({error!r}): add --mode, one of {', '.join(MODES)}") from error


def read_base(argv: Sequence[str], default: C) -> C:
    """The configuration below the flags: with --resume that of the run, with --config that of a file, else `default`."""
    path, kind = value_of(argv, "--config"), type(default)
    if "--resume" in argv:
        directory = value_of(argv, "--output-dir")
        if directory is None:
            raise ConfigError("--resume needs --output-dir DIR, the directory of the interrupted run")
        saved = Path(directory) / CONFIG_FILE
        if not saved.is_file():
            raise ConfigError(f"{directory} has no {CONFIG_FILE}: it is not the directory of a run, so there is nothing to resume")
        return load_config(kind, saved) if path is None else read_config_file(Path(path), kind)
    return default if path is None else read_config_file(Path(path), kind)


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value of the last such flag: --name VALUE or --name=VALUE, underscores for hyphens allowed, as tyro takes them."""
    found: str | None = None
    for i, argument in enumerate(argv):
        name, separator, value = argument.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if separator:
            found = value
        elif i + 1 < len(argv):
            found = argv[i + 1]
    return found
