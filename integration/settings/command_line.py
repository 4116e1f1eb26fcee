"""Parse the arguments of a command into a mode, a configuration and switches.

    python -m integration.train [--mode sft|rl|sft+rl|dpo|sft+dpo] [--config FILE.py|.toml|.json] [--output-dir DIR] [--resume]
                                [--dry-run [--json]]
                                [--quiet] [--log-level LEVEL] [--replay BUNDLE] [--push-to-hub NAME] [--grace-s SECONDS] [--stall-s SECONDS]
                                [--task NAME] [--algorithm NAME] [--environment FILE.py:NAME] [--seed N]
                                [--skip-bad-rows] [--section.field VALUE ...]

Later sources override earlier ones: the defaults of the task and the model, --config (or, with --resume, the config.json of the run), and
flags.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast, get_origin, get_type_hints

import tyro

from integration.closed_stdout import ignore_closed_stdout
from integration.run.signal_watch import Patience
from integration.settings.config import SELF_MADE_TASKS, Config
from integration.settings.help_text import TRAINING, Screen, name_as_started, show_help
from integration.settings.log_levels import DEFAULT_LEVEL, parse_log_level
from integration.settings.option_effects import (
    COMMAND_OPTIONS,
    IdleOption,
    find_changes,
    find_idle_options,
    list_options,
    spell_option,
)
from integration.settings.other_names import describe_unknown, explain_other_names
from integration.settings.sections.descriptions import describe_section
from integration.settings.sections.stages import RLSection
from integration.settings.sources import Place, find_places, name_settings
from integration.settings.task_defaults import create_default_config, find_default
from rollouts.checks import parse_json
from rollouts.config import check_setting
from rollouts.config_files import from_dict, load_config, read_json, suggest, to_dict
from rollouts.errors import ConfigError
from rollouts.rewards.answers import load_module

_LONG: Mapping[str, str] = MappingProxyType({"algorithm": "--rl.algorithm", "environment": "--environment.factory", "log": "--loggers"})

T = TypeVar("T")
C = TypeVar("C")
Mode = Literal["sft", "rl", "sft+rl", "dpo", "sft+dpo"]
MODES: tuple[Mode, ...] = ("sft", "rl", "sft+rl", "dpo", "sft+dpo")
CONFIG_FILE = "config.json"
RUN_FILE = "run.json"
MODEL_DIRECTORY = "model"  # subdirectory with the result of a reward model run


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The parsed command line."""

    mode: Mode
    config: Config
    resume: bool
    dry_run: bool
    json: bool
    quiet: bool
    log_levels: Mapping[str, int]  # log level of each logger, by name
    explain: tuple[str, ...] = ()  # settings to explain, instead of a run
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])  # places of the settings that the user gave
    push_to_hub: str | None = None  # name on the hub to publish the trained model under
    accept_changed_data: bool = False  # go on although the data have changed since the checkpoint
    patience: Patience = field(default_factory=Patience)  # limits of time after a signal, and without a step
    replay: Path | None = None  # crash bundle to execute again, instead of a run
    typed: frozenset[str] = frozenset()  # settings (section.field) changed by flags

    def find_idle_options(self) -> list[IdleOption]:
        """Return the user's settings without effect. Creates the algorithm of an RL run, which may call the user's functions."""
        defaults = (Config(), create_default_config(self.config.task), find_default(self.config))
        return find_idle_options(self.config, self.mode, defaults=defaults, typed=self.typed, dry_run=self.dry_run)


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Train a language model: supervised fine-tuning, reinforcement learning, or one after the other."""

    config: Annotated[Config, tyro.conf.arg(name="", help="All settings of a run.")]
    mode: str | None = None
    """stages to run: sft, rl, sft+rl, dpo (training on preferences) or sft+dpo; None = sft+rl, or the mode of a resumed run"""
    resume: bool = False
    """resume the interrupted run in --output-dir"""
    accept_changed_data: bool = False
    """with --resume: go on although files of the training data have changed since the checkpoint; without it that is an error"""
    dry_run: bool = False
    """print the numbers that follow from the settings, with estimates of memory and time, and exit"""
    json: bool = False
    """print a dry run as one JSON object with every setting"""
    explain: tuple[str, ...] = ()
    """settings (rl.num_steps) or sections (rl) to explain: value here, origin, default, consequences; prints these and exits"""
    quiet: bool = False
    """print only the summary"""
    log_level: str = DEFAULT_LEVEL
    """level of messages on stderr: debug, info, warning or error, for modules NAME=LEVEL: warning,rollouts.training.rollout_batch=debug"""
    grace_s: float | None = 30.0
    """seconds from Ctrl-C to the end, besides the writing of checkpoints; rollouts may take half; None = the step's end is awaited"""
    stall_s: float | None = None
    """seconds without the end of a step after which all tasks and the stacks of all threads are printed on stderr; None = never"""
    replay: str | None = None
    """crash bundle, RUN/STAGE/crash/step_NNNN, whose step is executed again on one process, with the settings in it; takes no other option;
    None = train"""
    push_to_hub: str | None = None
    """name on the Hugging Face hub, ORG/NAME, to publish the trained model under, private if new; None = not published"""
    algorithm: str | None = None
    """short for --rl.algorithm: grpo, gigpo(gamma=0.9, omega=0.5), ..."""
    skip_bad_rows: bool = False
    """short for --data.skip-bad-rows; likewise --environment FILE.py:NAME is short for --environment.factory"""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """file of settings: FILE.py (which defines `config`), FILE.toml or FILE.json"""


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse the arguments of `python -m integration.train`.

    Raises: ConfigError for settings that cannot be used; SystemExit(2) for unknown flags (with a suggestion) and, by tyro, for values of
        the wrong type; SystemExit(0) for --help, --help SECTION and --help-all.
    """
    program = "python -m integration.train"
    argv = write_out_short(answer_help(argv, lambda: _Arguments(config=Config()), program))
    base = read_base(argv, _find_default(argv))
    _refuse_unknown_flags(argv, base, program)
    try:
        arguments = parse_flags(argv, _Arguments(config=base), program)
    except SystemExit as stop:
        if stop.code == 2:
            sys.stderr.writelines(f"{line}\n" for line in explain_other_names(_find_unknown(argv, base)))
        raise
    if arguments.replay is not None and (rest := _leave_out_replay(argv)):
        raise ConfigError(f"--replay takes its settings from the bundle: leave the other options out: {' '.join(rest)}")
    mode = arguments.mode
    if mode is None:
        mode = read_saved_mode(Path(arguments.config.output_dir or "")) if arguments.resume else "sft+rl"
    if mode not in MODES:
        raise ConfigError(f"unknown mode {mode!r}: {suggest(mode, MODES)} (modes: {', '.join(MODES)})")
    if arguments.accept_changed_data and not arguments.resume:
        raise ConfigError("--accept-changed-data is about the data of an interrupted run: add --resume, or leave it out")
    if arguments.json and not arguments.dry_run:
        raise ConfigError("--json is about the output of a dry run: add --dry-run, or leave it out")
    for name in ("grace_s", "stall_s"):
        value = getattr(arguments, name)
        check_setting(value is None or 0 < value < math.inf, spell_option(name), value, "a number of seconds above 0")
    config = arguments.config
    if (
        (config.data.path is not None or config.data.mixture or config.data.rollouts or config.preference.path is not None)
        and config.task in SELF_MADE_TASKS
        and value_of(argv, "--task") is None
    ):
        config = replace(config, task="jsonl")  # data was given, so it is to be used
    if arguments.skip_bad_rows:
        config = replace(config, data=replace(config.data, skip_bad_rows=True))
    return CommandLine(
        mode=mode,
        config=config,
        resume=arguments.resume,
        accept_changed_data=arguments.accept_changed_data,
        dry_run=arguments.dry_run,
        json=arguments.json,
        quiet=arguments.quiet,
        log_levels=parse_log_level(arguments.log_level),
        explain=arguments.explain,
        places=find_places(argv, value_of(argv, "--config"), config),
        push_to_hub=arguments.push_to_hub,
        replay=None if arguments.replay is None else Path(arguments.replay),
        patience=Patience(grace_s=arguments.grace_s, stall_s=arguments.stall_s),
        typed=find_changes(config, base),
    )


def _leave_out_replay(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the last --replay and its value."""
    place = max(i for i, argument in enumerate(argv) if argument.partition("=")[0] == "--replay")
    return [*argv[:place], *argv[place + (1 if "=" in argv[place] else 2) :]]


def print_all_options() -> str:
    """Return the help of all options as plain text, without frames."""
    printed = io.StringIO()  # a stream without an encoding: tyro draws no frames
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        parse_flags(["--help"], _Arguments(config=Config()), "python -m integration.train")
    return printed.getvalue()


def _spell_options(config: Config) -> frozenset[str]:
    return frozenset(spell_option(name) for name in (*COMMAND_OPTIONS, *dict(list_options(config))))


def list_flags(config: Config) -> frozenset[str]:
    """Return the flags of all options of the command; a no- form of each, since parse_flags refuses those that there are not."""
    flags = _spell_options(config)
    parts = [flag.removeprefix("--").rpartition(".") for flag in flags]
    return frozenset({*flags, *("--" + f"{section}{dot}no-{last}" for section, dot, last in parts), "--help"})


def _find_unknown(argv: Sequence[str], config: Config) -> list[str]:
    """Return the arguments that name no option of the command: unknown flags, and settings without hyphens.

    As for tyro, a flag has a letter behind its hyphens: others, such as "---", are values.
    """
    known = list_flags(config)
    names = [argument.partition("=")[0].replace("_", "-") for argument in argv]
    return [
        argument
        for argument, name in zip(argv, names, strict=True)
        if name not in known and (_is_flag(name) or ("=" in argument and name[:2] != "--"))
    ]


def _is_flag(name: str) -> bool:
    return name[:2] == "--" and name.lstrip("-")[:1].isalpha()


def _advise_equals(argv: Sequence[str], config: Config, flags: Sequence[str]) -> list[str]:
    """Return how to write values that look like flags: those behind an option of text without a value."""
    texts = {spell_option(name) for name, value in list_options(config) if value is None or isinstance(value, str | tuple)}
    return [
        f"  {value}: As a value of {flag} write {shlex.quote(f'{flag}={value}')}"
        for flag, value in pairwise(argv)
        if flag.replace("_", "-") in texts and value.partition("=")[0] in flags
    ]


def _refuse_unknown_flags(argv: Sequence[str], config: Config, program: str) -> None:
    """End the command if a flag names no option. tyro would read the descriptions of all options first, which takes half a second."""
    unknown = _find_unknown(argv, config)
    flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("--")]
    if flags:
        help_line = f"  {name_as_started(program)} --help lists the options"
        told = [
            describe_unknown(flags, {*_spell_options(config), "--help"}),
            *explain_other_names(unknown),
            *_advise_equals(argv, config, flags),
            help_line,
        ]
        sys.stderr.writelines(f"{line}\n" for line in told)
        raise SystemExit(2)


def write_out_short(argv: Sequence[str], names: Sequence[str] = tuple(_LONG)) -> list[str]:
    """Return the arguments with the full flags of short ones, given without hyphens."""
    short = re.compile(rf"^--({'|'.join(names)})(?==|$)")
    return [short.sub(lambda found: _LONG[found[1]], argument) for argument in argv]


def read_named(argv: Sequence[str]) -> Callable[[str], Any]:
    """Return a function of an option's name, as in model.path: its value among the flags or in the file of settings; None = in neither."""
    path = value_of(argv, "--config")
    settings = {} if path is None else read_settings(Path(path))

    def find(option: str) -> Any:
        given = value_of(argv, spell_option(option))
        section, _, name = option.rpartition(".")
        inner: Any = settings.get(section, {}) if section else settings
        return (inner.get(name) if isinstance(inner, Mapping) else None) if given is None else given

    return find


def _find_default(argv: Sequence[str]) -> Config:
    """Return the default configuration of the task, the model and the algorithm that flags or the file of settings name."""
    find = read_named(argv)
    task, rank = find("task"), find("lora.rank")
    if task is None and find("environment.factory") is not None:
        task = "environment"
    model_path, algorithm = find("model.path"), find("rl.algorithm")
    return create_default_config(
        task,
        model_path=None if model_path is None else str(model_path),
        adapters=rank not in (None, 0, "0"),
        algorithm=RLSection.algorithm if algorithm is None else str(algorithm),
    )


def parse_flags(argv: Sequence[str], default: T | type[T], program: str) -> T:
    """Return the dataclass `default` changed by flags, or one of a class whose fields flags fill in.

    Like tyro.cli, except that a ConfigError of our own checks is raised as it is (tyro would print it wrapped, in a frame), and that
    --help-all is --help, which lists everything. A parser of the named options alone is made in a sixth of the time; what it refuses goes
    to one of all options, whose messages name those that are similar.
    """
    argv = ["--help" if argument == "--help-all" else argument for argument in argv]
    if isinstance(default, type) or any(argument in ("--help", "-h") or argument.lstrip("-").startswith("tyro-") for argument in argv):
        return _parse(argv, default, program)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            narrowed = _parse(argv, narrow(default, argv), program)
        found = widen(default, narrowed)
    except ConfigError:
        raise
    except (SystemExit, ValueError):  # tyro tells of both in one way
        return _parse(argv, default, program)
    sys.stderr.write(printed.getvalue())
    return found


def _parse(argv: Sequence[str], default: T | type[T], program: str) -> T:
    printed, program = io.StringIO(), name_as_started(program)
    try:
        with contextlib.redirect_stderr(printed), ignore_closed_stdout():
            if isinstance(default, type):
                return tyro.cli(default, prog=program, args=argv)
            return tyro.cli(type(default), prog=program, args=argv, default=default)
        raise SystemExit(0)  # the reader of the help closed stdout
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


def narrow(arguments: object, argv: Sequence[str]) -> Any:
    """Return arguments as an instance of a dataclass that has, of their fields, those that the flags may name.

    Args:
        arguments: instance of a dataclass. Its plain fields stay; those of the dataclasses in it, such as a configuration, stay if their
            name is a part of a flag, of any section: rl, asynchronous and enabled of --rl.asynchronous.no-enabled.
        argv: arguments of the command line. A value that looks like a name keeps a field more, which does no harm.
    """
    parts = {part for argument in argv for part in argument.partition("=")[0].lstrip("-").replace("-", "_").split(".")}
    return _narrow(arguments, frozenset({*parts, *(part.removeprefix("no_") for part in parts)}), is_outermost=True)


def _narrow(whole: Any, names: frozenset[str], *, is_outermost: bool = False) -> Any:
    hints = get_type_hints(type(whole), include_extras=True)
    kept: list[tuple[str, Any, Any]] = []
    values: dict[str, Any] = {}
    for part in fields(whole):
        if not is_outermost and part.name not in names:
            continue
        value, kind = getattr(whole, part.name), hints[part.name]
        if is_dataclass(value):
            value = _narrow(value, names)
            if not fields(value):
                continue
            kind = Annotated[type(value), *getattr(kind, "__metadata__", ())] if get_origin(kind) is Annotated else type(value)
        kept.append((part.name, kind, field(metadata=describe_section("-"))))  # tyro would look for one in the source
        values[part.name] = value
    return make_dataclass(type(whole).__name__, kept, frozen=True, kw_only=True)(**values)


def widen(arguments: T, narrowed: Any) -> T:
    """Return arguments with the values of the fields that narrowed ones have. Raises what the checks of their classes raise."""
    changed = {part.name: getattr(narrowed, part.name) for part in fields(narrowed)}
    for name, value in changed.items():
        whole = getattr(arguments, name)
        if is_dataclass(whole):
            changed[name] = widen(whole, value)
    return replace(arguments, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def answer_help(argv: Sequence[str], create: Callable[[], object], program: str, screen: Screen = TRAINING) -> list[str]:
    """Print the help that --help or --help SECTION ask for and end the command; return other arguments, for parse_flags.

    Args:
        create: returns the default arguments, as for parse_flags.

    Raises: ConfigError for an unknown section; SystemExit(0) after the help.
    """
    text = show_help(argv, lambda: parse_flags(["--help"], create(), program), screen)
    if text is None:
        return ["--help" if argument == "--help-all" else argument for argument in argv]
    with ignore_closed_stdout():
        print(name_as_started(text))
    raise SystemExit(0)


def name_as_typed(argv: Sequence[str], config: Any, message: str, *, flat: bool = False) -> str:
    """Return an error's message with its settings named as the user wrote them, instead of by classes and fields.

    Args:
        argv: arguments of the command.
        config: configuration with all settings.
        flat: options have no section in front.
    """
    return name_settings(message, config, find_places(argv, value_of(argv, "--config"), config), flat=flat)


def read_config_file(path: Path, default: C) -> C:
    """Read a configuration from a .py, .toml or .json file. Raises ConfigError with the file's name.

    Args:
        default: its values stand for settings that a .toml or .json file leaves out.
    """
    kind = type(default)
    if path.suffix == ".py" and os.path.isfile(path):
        config = getattr(load_module(path), "config", None)
        if not isinstance(config, kind):
            place = f"{kind.__module__}.{kind.__name__}"
            raise ConfigError(f"{path} must define `config = {kind.__name__}(...)` ({place}), found {type(config).__name__}")
        return config
    try:
        return from_dict(kind, _fill_in(read_settings(path), to_dict(default)))
    except ConfigError as error:
        unknown = re.match(r"unknown setting '([\w.-]+)'", str(error))
        if unknown is None:
            raise
        advice = _advise_unknown(unknown[1], default)
        raise ConfigError(f"{path}: unknown setting {unknown[1]!r}{advice}" if advice else f"{path}: {error}") from error


def _advise_unknown(name: str, default: object) -> str:
    """Return advice for a name in a file of settings that is none there: that of another framework, or an option of the command alone."""
    section, _, field = name.rpartition(".")
    if name in {known for known, _ in list_options(default)}:
        return f": a name with a dot is a section and a name in it: [{section}] and below it {field} = ..., or the same in JSON"
    if name in ("mode", "resume", "dry_run", "quiet", "config"):
        return f": it is no setting of a file: give {spell_option(name)} on the command line"
    return "".join(f": {line}" for line in explain_other_names([name]))


def read_settings(path: Path) -> Mapping[str, Any]:
    """Read the settings that stand in a .toml or .json file; those of a .py file are unknown before it runs: none.

    Raises: ConfigError with the file's name.
    """
    if not os.path.isfile(path):  # False, too, of names that no file can have
        found = "is a directory" if os.path.isdir(path) else "does not exist"
        raise ConfigError(f"configuration file {path} {found}: give a .py, .toml or .json file, or leave --config out")
    if path.suffix == ".py":
        return {}
    if path.suffix == ".json":
        return read_json(path)
    if path.suffix == ".toml":
        try:
            return tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}: mend that, or give another file") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 at byte {error.start}: save the file as UTF-8") from error
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}: mend the file there, or give a .json or .py file") from error
    raise ConfigError(f"{path} is not a configuration file: use .py, .toml or .json")


def _fill_in(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, with defaults where a section or a value is missing."""
    filled = {**defaults, **settings}
    for name, section in defaults.items():
        given = settings.get(name)
        if isinstance(section, Mapping) and isinstance(given, Mapping):
            filled[name] = _fill_in(cast("Mapping[str, Any]", given), cast("Mapping[str, Any]", section))
    return filled


def read_saved_mode(output_dir: Path) -> str:
    """Return the mode that a run was started with. Raises ConfigError with the file's name."""
    path = output_dir / RUN_FILE
    try:
        return str(parse_json(path.read_text())["mode"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not state the mode of the run ({error!r}): add --mode, one of {', '.join(MODES)}") from error


def read_base(argv: Sequence[str], default: C) -> C:
    """Return the configuration that flags change: that of the run with --resume, that of the file with --config, else `default`."""
    path = value_of(argv, "--config")
    if "--resume" in argv:
        directory = value_of(argv, "--output-dir")
        if directory is None:
            raise ConfigError("--resume needs --output-dir DIR, the directory of the interrupted run")
        saved = Path(directory) / CONFIG_FILE
        if not os.path.isfile(saved) or (not (Path(directory) / RUN_FILE).is_file() and "architectures" in read_json(saved)):  # a model's
            raise ConfigError(
                f"{directory} has no {CONFIG_FILE}: it is not the directory of a run, so there is nothing to resume; leave --resume out to "
                "start a run there"
            )
        return read_saved(type(default), saved) if path is None else read_config_file(Path(path), default)
    return default if path is None else read_config_file(Path(path), default)


def find_run(path: Path) -> Path | None:
    """Return the run directory that a path is, or is in; None if there is none."""
    places = (path, *path.absolute().parents, *path.resolve().parents) if os.path.exists(path) else ()
    return next((place for place in places if (place / CONFIG_FILE).is_file() and (place / RUN_FILE).is_file()), None)


def read_saved(kind: type[C], path: Path) -> C:
    """Read the config.json of a run. A version of this library before model.kernels recorded none: its runs go on with torch's."""
    config: Any = load_config(kind, path)
    return replace(config, model=replace(config.model, kernels="torch")) if config.model.kernels == "auto" else config


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of the last occurrence of a flag, --name VALUE or --name=VALUE; like tyro, accepts underscores for hyphens."""
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
