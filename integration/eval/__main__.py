"""Evaluate models on tasks: `rollouts eval MODEL [MODEL ...] [--tasks TASK ...] [--n 8] [--output-dir DIR] [--json]`.

MODEL is a run, a checkpoint, a model directory, an adapter, a name on the hub, or addresses of vLLM or SGLang servers joined by commas.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import tyro

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import run_command
from integration.settings.command_line import (
    CONFIG_FILE,
    answer_help,
    find_run,
    name_as_typed,
    parse_flags,
    read_base,
    read_saved,
    value_of,
)
from integration.settings.config import SELF_MADE_TASKS, Config
from integration.settings.help_text import Screen, name_as_started
from integration.settings.option_effects import find_changes, spell_option
from integration.settings.sections.addresses import is_url
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.model import LoRASection
from integration.settings.sections.records import TrajectorySection
from integration.settings.task_defaults import create_default_config
from rollouts.config import CheckpointConfig, check_setting
from rollouts.errors import ConfigError

PROGRAM = "python -m integration.eval"
_TRAINING = (
    "sft",
    "rl",
    "preference",
    "reference",
    "teacher",
    "critic",
    "backend",
    "lora",
    "checkpoint",
    "trajectories",
    "profile",
    "on_bad",
    "hardware",
    "loggers",
    "logger_timeout_s",
    "crash_bundles",
    "enable_segment_wise_ppo",
)
SCREEN = Screen(
    text="""\
usage: python -m integration.eval MODEL [MODEL ...] [OPTIONS] [--section.field VALUE ...]

Evaluate models on tasks: accuracy, pass@k, maj@k, rewards and lengths with intervals, and each model against the first.

MODEL is a run, a checkpoint, a model directory, an adapter, a name on the hub (ORG/NAME, ORG/NAME@REVISION), or addresses of vLLM or
SGLang servers joined by commas. The models stand in front of all options. Without --tasks and --task, a model of a run is evaluated on
the held-out problems of that run; models of no run need one of them.

  --tasks TASK ...              sort, gsm8k=FILE.jsonl, a data file, hf://ORG/NAME, FILE.py:NAME of an environment
  --n N                         samples for each problem (default: 1, one greedy answer)
  --sampled                     sample also where --n is 1
  --k K ...                     k of pass@k and maj@k (default: powers of 2 up to --n, and --n)
  --num-prompts N               problems of each task (default: all rows of a data file, else --evaluation.num-prompts)
  --threshold X                 smallest reward that counts as right (default: 1)
  --answer FILE.py:f            function that returns what a sample votes for in maj@k
  --reward.function FILE.py:f   reward of your own
  --generation.temperature X    temperature of samples (default: 1)
  --model.device DEVICE         cpu, cuda, cuda:N, mps or auto (default: auto)
  --tokenizer DIR               tokenizer of a served model
  --output-dir DIR              directory of samples and results (default: a new evals/<time>)
  --json                        print the results as one JSON object
  --quiet                       no progress
  --config FILE                 settings from a .toml, .json or .py file; flags override them

sections of settings, each with `--help SECTION`; all settings with --help-all:
{sections}

examples:
  python -m integration.eval runs/mine Qwen/Qwen3-0.6B --n 8
  python -m integration.eval http://127.0.0.1:8000 --tasks gsm8k=test.jsonl --json
""",
    settings=Config,
    left_out=_TRAINING,
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluate models on tasks: accuracy, pass@k, maj@k, rewards, lengths, with intervals, and each model against the first.

    The models stand in front of all options. Without --tasks, and without --task, a model of a run is evaluated on the held-out problems of
    that run.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    tasks: tuple[str, ...] = ()
    """tasks, a row of the table each: sort, gsm8k=FILE.jsonl, a data file, FILE.py:NAME of an environment; () = that of --task"""
    n: int = 1
    """samples for each problem; 1 = one greedy answer, more = sampled at generation.temperature"""
    sampled: bool = False
    """sample also where n is 1"""
    k: tuple[int, ...] = ()
    """k of pass@k and maj@k, at most n; () = powers of 2 up to n, and n"""
    num_prompts: int | None = None
    """number of problems of each task; None = all rows of a data file, else evaluation.num_prompts"""
    threshold: float = 1.0
    """smallest reward that counts as right, in reward units"""
    answer: str | None = None
    """function file.py:name of a Sample that returns what it votes for in maj@k; None = GSM8K's final answer, \\boxed{}, or the response"""
    tokenizer: str | None = None
    """model directory with the tokenizer of a served model; None = the directory that the server names"""
    json: bool = False
    """print the results as one JSON object"""
    quiet: bool = False
    """print no progress"""
    config_file: Annotated[str | None, tyro.conf.arg(name="config")] = None
    """file of settings: FILE.py (which defines `config`), FILE.toml or FILE.json"""

    def __post_init__(self) -> None:
        for option, value in (("--n", self.n), ("--num-prompts", self.num_prompts)):
            check_setting(value is None or value >= 1, option, value, "a whole number, at least 1")
        bad = [k for k in self.k if not 1 <= k <= self.n]
        if bad:
            raise ConfigError(f"--k has {bad[0]}, but there are {self.n} samples for each problem: give --n {max(bad)}, or a smaller k")


@dataclass(frozen=True, kw_only=True)
class Command:
    """The parsed command line."""

    models: tuple[str, ...]
    arguments: Arguments
    has_task: bool  # False = the default task would be evaluated, which nothing names


def parse(argv: Sequence[str]) -> Command:
    """Parse the command line. Raises ConfigError; SystemExit for --help and for unknown options."""
    argv = answer_help(argv, lambda: Arguments(config=Config()), PROGRAM, SCREEN)
    count = next((i for i, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    models, flags = tuple(argv[:count]), list(argv[count:])
    base = read_base(flags, _find_default(models, flags))
    if models:  # tasks with data need a model, and here is one
        base = replace(base, model=replace(base.model, path=models[0]))
    arguments = parse_flags(flags, Arguments(config=base), PROGRAM)
    if not models:
        usage = f"{name_as_started(PROGRAM)} MODEL [MODEL ...] [OPTIONS]"
        raise ConfigError(f"no model is named: {usage}, with a run, a model directory or the address of a server as MODEL")
    if len(set(models)) < len(models):
        raise ConfigError(f"a model is named twice ({', '.join(models)}): name each once")
    idle = [name for name in sorted(find_changes(arguments.config, base)) if name.partition(".")[0] in _TRAINING]
    if idle:
        raise ConfigError(f"{spell_option(idle[0])} is about training, and has no effect in an evaluation: leave it out")
    _check_held_out(models, arguments, base)
    unread = {"engine.launch"} if any(map(is_url, models)) else {"engine.kind", "engine.launch", "engine.urls"}
    if found := sorted(unread & find_changes(arguments.config, base)):
        raise ConfigError(
            f"{spell_option(found[0])} is about the servers of a run, and an evaluation loads {', '.join(models)} into this process: start "
            "a server by itself and name its address as MODEL, or leave the option out"
        )
    return Command(models=models, arguments=arguments, has_task=bool(arguments.tasks) or not _lacks_task(models, flags, arguments))


def _check_held_out(models: Sequence[str], arguments: Arguments, base: Config) -> None:
    """Raise ConfigError if more problems are asked for than the run of a MODEL holds out of what it trains on."""
    wanted, held = arguments.num_prompts or arguments.config.evaluation.num_prompts, base.evaluation.num_prompts
    is_own = arguments.config.task == base.task and (not arguments.tasks or base.task in arguments.tasks)
    splits = base.data.eval_path is None and (base.task != "environment" or base.data.path is not None)
    if is_own and splits and wanted > held and any(map(find_run, map(Path, models))):
        option = "--num-prompts" if arguments.num_prompts is not None else "--evaluation.num-prompts"
        raise ConfigError(
            f"{option} is {wanted}, but the run holds out {held} problems at most, and is trained on the others: give at most {held}, or a "
            "data file of other problems (--tasks FILE.jsonl)"
        )


def _lacks_task(models: Sequence[str], flags: Sequence[str], arguments: Arguments) -> bool:
    """Whether neither the options, nor a file of settings, nor a run of a MODEL chose the task, which is a built-in one."""
    chosen = value_of(flags, "--task") is not None or arguments.config_file is not None or any(map(find_run, map(Path, models)))
    return not chosen and arguments.config.task in SELF_MADE_TASKS


def _find_default(models: Sequence[str], flags: Sequence[str]) -> Config:
    """Return the settings of the run of the first model that is of one, else the defaults of the task."""
    run = next((found for found in map(find_run, map(Path, models)) if found is not None), None)
    if run is None:
        return create_default_config(value_of(flags, "--task"))
    saved = read_saved(Config, run / CONFIG_FILE)
    section = EngineSection(dtype=saved.engine.dtype)
    rest: dict[str, Any] = {"backend": BackendSection(), "lora": LoRASection(), "checkpoint": CheckpointConfig(), "loggers": ()}
    return replace(saved, output_dir=None, engine=section, trajectories=TrajectorySection(), **rest)


@contextmanager
def stopped_by_sigterm() -> Generator[None]:
    """Let the first SIGTERM end the block as Ctrl-C does, with its servers, programs and sandboxes; the second ends at once.

    A command in the background of a shell script ignores SIGINT, and with it what Ctrl-C does: not in the block. In another thread than the
    main one, which alone may handle signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignores:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if ignores:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(command: Command) -> int:
    """Execute a command line. Returns the exit status."""
    import trio

    from integration.eval.evaluate import create_plan, evaluate_all
    from integration.eval.summary import write_table

    arguments = command.arguments
    say: Callable[[str], None] = (lambda text: None) if arguments.quiet else partial(print, file=sys.stderr, flush=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    plan = create_plan(command.models, arguments, has_task=command.has_task)
    directory = Path(arguments.config.output_dir or Path("evals") / datetime.now().strftime("%Y%m%d-%H%M%S"))
    try:
        with stopped_by_sigterm():
            results = trio.run(evaluate_all, plan, directory, say)
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if isinstance(error, KeyboardInterrupt) or error.subgroup(KeyboardInterrupt) is not None:
            say(f"stopped: the same command with --output-dir {directory} goes on behind what is finished")
        raise
    with ignore_closed_stdout():
        if arguments.json:
            print(json.dumps(results, indent=2))
        else:
            print(write_table(results["results"], results["comparisons"]))
            print(f"samples and results: {directory}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    return run_command(partial(parse, given), run, _goes_online, partial(name_as_typed, given, Config()))


def _goes_online(command: Command) -> bool:
    from integration.parts.hub_models import names_hub_data
    from rollouts.models.hub import is_hub_name

    data, tasks = command.arguments.config.data, command.arguments.tasks
    paths = [task.partition("=")[2] or task for task in tasks] or [data.path, data.eval_path, *data.mixture]
    return any(is_hub_name(model.partition("@")[0]) for model in command.models) or names_hub_data(*paths)


if __name__ == "__main__":
    sys.exit(main())
