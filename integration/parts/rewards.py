"""The reward function of the RL stage: the task's rule, the user's function, or a reward model that is open during the stage."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.settings.command_line import MODEL_DIRECTORY, RUN_FILE
from integration.settings.config import Config
from integration.settings.help_text import name_as_started
from integration.settings.sections.generation import RewardSection
from integration.tasks.task import Task
from rollouts.errors import ConfigError, DataError
from rollouts.models.heads import check_reward_model
from rollouts.rewards.code.sandboxed import SandboxedReward
from rollouts.rewards.code.unit_tests import CodeReward
from rollouts.rewards.composite import CompositeGroupReward, CompositeReward, CompositeSource, create_composite_reward
from rollouts.rewards.evaluate import RewardSource
from rollouts.rewards.models.local import open_reward_model
from rollouts.rewards.other_frameworks import adapt_reward, find_needed_columns
from rollouts.rewards.results import describe_reward
from rollouts.rewards.reward_functions import load_reward
from rollouts.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_training_reward(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> AsyncGenerator[Callable[..., Any] | None]:
    """Open the reward of rollouts: config.reward.model, or the task's reward. Evaluations always use the task's reward.

    Args:
        tokenizer: the policy's tokenizer.
    """
    section = config.reward
    if section.model is None:
        yield task.reward_fn if task.scores_training else None
        return
    async with open_reward_model(
        find_reward_model(section.model),
        policy_tokenizer=tokenizer,
        dtype=section.model_dtype,
        device=config.model.device if section.model_device is None else section.model_device,
        max_tokens_per_batch=section.model_tokens_per_batch,
        trust_remote_code=config.model.trust_remote_code,
    ) as reward:
        yield reward


def check_reward(config: Config) -> None:
    """Raise ConfigError if config.reward.model is not a reward model. Loads no weights."""
    if config.reward.model is not None:
        check_reward_model(find_reward_model(config.reward.model), trust_remote_code=config.model.trust_remote_code)


def find_reward_model(path: str | Path) -> Path:
    """Return the model directory of a path: the path itself, or `model` in a run directory of integration.train_reward_model.

    Raises: ConfigError for an unfinished run.
    """
    directory = Path(path)
    if not (directory / RUN_FILE).is_file():
        return directory
    if not (directory / MODEL_DIRECTORY).is_dir():
        again = f"python -m integration.train_reward_model --output-dir {directory} --resume"
        raise ConfigError(f"{directory} is a run without {MODEL_DIRECTORY} yet: `{name_as_started(again)}` resumes it")
    return directory / MODEL_DIRECTORY


def use_own_reward(section: RewardSection, task: Task) -> Task:
    """Return the task with the user's reward function, if any.

    Raises: as load_task_reward; RewardError, by a CodeReward, for rows with unusable tests.
    """
    reward_fn = load_task_reward(section)
    if isinstance(reward_fn, CodeReward):
        sources = task.train_sources or tuple(f"prompt {prompt.index}" for prompt in task.train_prompts)
        reward_fn.check_prompts(task.train_prompts, sources)
        reward_fn.check_prompts(task.heldout_prompts, [f"held-out prompt {prompt.index}" for prompt in task.heldout_prompts])
    if reward_fn is None:
        return task
    if task.episodes is None:  # an episode gives more than the columns of its row
        heldout = task.heldout_sources or tuple(f"held-out prompt {prompt.index}" for prompt in task.heldout_prompts)
        for part in list_parts(reward_fn):
            check_columns(part, task.train_prompts, task.train_sources or tuple(f"prompt {p.index}" for p in task.train_prompts))
            check_columns(part, task.heldout_prompts, heldout)
    return replace(task, reward_fn=reward_fn)


def list_parts(reward_fn: Any) -> tuple[Any, ...]:
    """Return the functions of a composite, or the reward itself."""
    composites = (CompositeReward, CompositeGroupReward, CompositeSource)
    return tuple(reward_fn.functions.values()) if isinstance(reward_fn, composites) else (reward_fn,)


def find_comparing(reward_fn: Any) -> tuple[Any, ...]:
    """Return the parts of an open reward that compare the answers to a problem with one another."""
    return tuple(part for part in list_parts(reward_fn) if getattr(part, "compares_answers", False))


def check_columns(reward_fn: Any, prompts: Sequence[Prompt], sources: Sequence[str]) -> None:
    """Raise DataError, naming rows, if prompts lack columns that a reward takes by name."""
    needed = find_needed_columns(reward_fn)
    lacking = [i for i, prompt in enumerate(prompts) if not needed <= set(prompt.metadata)] if needed else []
    if not lacking:
        return
    first = prompts[lacking[0]].metadata
    absent = ", ".join(sorted(needed - set(first)))
    places = ", ".join(sources[i] for i in lacking[:3]) + (f" and {len(lacking) - 3:,} more" if len(lacking) > 3 else "")
    raise DataError(
        f"reward function {describe_reward(reward_fn)} needs the columns {absent}, which {len(lacking):,} of "
        f"{len(prompts):,} rows lack: {places}; the first has {', '.join(map(str, first)) or 'no columns besides its prompt'}. Add the "
        "columns, rename others (--data.columns NEW=COLUMN), or give the parameters defaults"
    )


def load_task_reward(section: RewardSection) -> Any:
    """Load the user's reward function, also one of TRL or verl; None if none is configured.

    Raises: ConfigError if it does not exist or is no reward, or if reward.sandboxed is set without a function.
    """
    if section.function is None:
        if section.sandboxed:
            raise ConfigError("reward.sandboxed is True, but reward.function is None: name the function, --reward.function file.py:name")
        return None
    names = parse_functions(section.function)
    if section.sandboxed:
        if len(names) > 1:
            raise ConfigError(f"reward.sandboxed is True, but reward.function names {len(names)} functions: put them into one function")
        return SandboxedReward(section.function)
    if len(names) == 1 and "*" not in section.function:
        return _load(section.function)
    return create_composite_reward({key: (_load(name), weight) for key, (name, weight) in names.items()}, total=None)


def _load(reference: str) -> Any:
    """Load one function. Raises ConfigError that names the setting."""
    try:
        return adapt_reward(load_reward(reference))
    except ConfigError as error:
        raise ConfigError(f"reward.function is {reference!r}: {error}") from error


def parse_functions(expression: str) -> dict[str, tuple[str, float]]:
    """Parse 'file.py:name*0.8,file.py:other*0.2' to references and weights, 1 by default, by the name of each function.

    Raises: ConfigError for a weight that is no number, or a name twice.
    """
    found: dict[str, tuple[str, float]] = {}
    for part in expression.split(","):
        reference, star, weight = part.strip().partition("*")
        key = reference.strip().rpartition(":")[2]
        try:
            value = float(weight) if star else 1.0
        except ValueError as error:
            raise ConfigError(f"reward.function has the weight {weight!r} for {reference}, expected a number") from error
        if key in found:
            raise ConfigError(f"reward.function names {key!r} twice: {found[key][0]} and {reference.strip()}; metrics have the names")
        found[key] = (reference.strip(), value)
    return found


@asynccontextmanager
async def open_task(task: Task) -> AsyncGenerator[Task]:
    """Open the task's reward for the block if it is a RewardSource, and close it afterwards."""
    source = task.reward_fn
    if not isinstance(source, RewardSource):
        yield _leave_out_comparisons(task)
        return
    async with source.open_reward() as reward_fn:
        yield _leave_out_comparisons(replace(task, reward_fn=reward_fn))


def _leave_out_comparisons(task: Task) -> Task:
    """Return the task, without held-out problems if its reward compares answers to a problem: an evaluation has one of each."""
    comparing = find_comparing(task.reward_fn)
    if not comparing or not task.heldout_prompts:
        return task
    _logger.warning(
        "held-out problems are left out: %s compares the answers to a problem with one another, and an evaluation has one of each",
        describe_reward(comparing[0]),
    )
    return replace(task, heldout_prompts=(), heldout_sources=())
