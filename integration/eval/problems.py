"""The tasks of an evaluation: built-in ones, data files and environments, as they were typed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.dry_run.checks import check_data_given
from integration.parts.rewards import find_comparing
from integration.run.stages import create_task
from integration.settings.config import OWN_DATA_TASKS, TASKS, Config
from integration.settings.sections.data import SELF_MADE_TASKS
from integration.tasks.episodes import check_task
from integration.tasks.task import Task
from rollouts.config_files import suggest
from rollouts.errors import ConfigError
from rollouts.rewards.answers import extract_gsm8k_answer, load_function
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENVIRONMENT = re.compile(r".+:[A-Za-z_]\w*")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
NO_LIMIT = 1 << 40

Answer = Callable[[Sample], "str | None"]
"""f(sample) -> what the sample votes for; None = it gives no answer."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A task to evaluate on."""

    label: str  # its name in the table
    config: Config  # the settings, with the task and its data
    mode: str  # mode for create_task: rl = the held-out problems of a run, eval = all rows of data.eval_path


def parse_problems(tasks: Sequence[str], config: Config, num_prompts: int | None) -> tuple[Problem, ...]:
    """Parse tasks.

    Args:
        config: settings for the model, see subjects.fit_config.
        tasks: each the name of a built-in task, gsm8k=FILE, a data file or folder, or FILE.py:NAME of an environment; () = the task of the
            configuration, with its data.
        num_prompts: number of first problems of each; None = all rows of a data file, and evaluation.num_prompts of other tasks.

    Raises: ConfigError naming the task as typed.
    """
    problems = [_parse(task, config) for task in tasks] or [_take_configured(config)]
    labels = [problem.label for problem in problems]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(f"--tasks has {twice!r} twice: name each task once")
    return tuple(_limit(problem, num_prompts) for problem in problems)


def _take_configured(config: Config) -> Problem:
    data = config.data
    if config.task in OWN_DATA_TASKS and data.path is None and not data.mixture and data.rollouts is None:  # trained on pairs alone
        raise ConfigError(f"the task {config.task!r} has no problems here: name a data file with --tasks FILE.jsonl")
    whole = config.task in ("gsm8k", "jsonl") and config.data.eval_path is not None
    if whole and config.data.rollouts is not None:  # recorded rollouts are for training alone
        config = _with_task(config, config.task, config.data.eval_path)
    return Problem(label=config.task, config=config, mode="eval" if whole else "rl")


def _parse(task: str, config: Config) -> Problem:
    if task in SELF_MADE_TASKS:
        return Problem(label=task, config=_with_task(config, task), mode="rl")
    name, separator, file = task.partition("=")
    if separator and name in ("gsm8k", "jsonl"):
        return Problem(label=task, config=_with_task(config, name, file), mode="eval")
    if Path(task).exists() or task.startswith("hf://"):
        return Problem(label=task, config=_with_task(config, "jsonl", task), mode="eval")
    if _ENVIRONMENT.fullmatch(task):
        named = replace(config, task="environment", environment=replace(config.environment, factory=task))
        return Problem(label=task, config=named, mode="rl")
    if task in TASKS:
        needed = {"gsm8k": "gsm8k=FILE.jsonl", "jsonl": "FILE.jsonl", "environment": "FILE.py:NAME"}[task]
        raise ConfigError(f"--tasks has {task!r}, which needs data: write {needed}")
    raise ConfigError(
        f"--tasks has {task!r}, which is neither a data file here, nor FILE.py:NAME of an environment, nor a task: {suggest(task, TASKS)}"
    )


def _with_task(config: Config, task: str, file: str | None = None) -> Config:
    data = replace(config.data, path=file, eval_path=file, mixture=(), rollouts=None)
    return replace(config, task=task, data=data)


def _limit(problem: Problem, num_prompts: int | None) -> Problem:
    count = num_prompts or (NO_LIMIT if problem.mode == "eval" else None)
    if count is None:
        return problem
    return replace(problem, config=replace(problem.config, evaluation=replace(problem.config.evaluation, num_prompts=count)))


def create_problem_task(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> Task:
    """Create the task of a problem for a model with this tokenizer.

    Raises: ConfigError, DataError for data that is missing or bad, or if there is nothing to evaluate on.
    """
    config = problem.config
    check_data_given(config, "rl" if problem.mode == "rl" else "eval")
    check_task(config)
    task = create_task(config, tokenizer, problem.mode)
    if not task.heldout_prompts:
        raise ConfigError(f"the task {problem.label} has no held-out problems here: name a data file with --tasks FILE.jsonl")
    if task.episodes is None and task.reward_fn is None:
        raise ConfigError(f"the task {problem.label} has no reward: give --reward.function file.py:name")
    check_judges_alone(problem.label, task.reward_fn)
    return task


def check_judges_alone(label: str, reward_fn: Any) -> None:
    """Raise ConfigError for a reward that compares the answers of one model with one another. A RewardSource is checked when it is open."""
    if find_comparing(reward_fn):
        raise ConfigError(
            f"the reward of {label} compares the answers of one model to a problem with one another, so their mean says nothing of the "
            "model: give a reward that judges each answer by itself, as RubricJudge does"
        )


def find_prompts(task: Task) -> list[Prompt]:
    """Return the problems of a task, numbered by their place: the same place and seed give the same samples of each model."""
    return [replace(prompt, index=i) for i, prompt in enumerate(task.heldout_prompts)]


def choose_answer(task: Task, reference: str | None) -> Answer:
    """Return what samples vote for in maj@k: the user's function, GSM8K's final answer, or the last boxed answer, else the whole response.

    Episodes vote only with a function of the user's. Raises ConfigError if that does not exist.
    """
    if reference is not None:
        return load_function(reference)
    if task.episodes is not None:
        return _give_none
    return _answer_gsm8k if task.name == "gsm8k" else _answer_boxed


def _give_none(sample: Sample) -> str | None:
    return None


def _answer_gsm8k(sample: Sample) -> str | None:
    return extract_gsm8k_answer(sample.response)


def _answer_boxed(sample: Sample) -> str | None:
    found = _BOXED.findall(sample.response)
    return (found[-1] if found else sample.response).strip() or None
