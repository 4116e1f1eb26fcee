"""Preference pairs: generated from the task of sorting digits, whose right answers are known, or the user's own, some of them held out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from integration.expressions.mixture import parse_columns
from integration.settings.config import Config
from integration.tasks.task import Task
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.datasets import DatasetSpec
from rollouts.data.model_limits import ModelLimits
from rollouts.data.preference_pairs import PreferencePair, load_labelled_answers, load_preference_pairs
from rollouts.data.rows.formats import Columns
from rollouts.data.rows.loaded import LoadedRows, choose_heldout, hash_question, pick_rows
from rollouts.errors import ConfigError, DataError
from rollouts.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T", PreferencePair, Sample)

Spoil = Callable[[random.Random, str, str], str]
"""f(generator, problem, right answer) -> an answer, usually wrong."""


def create_answer_pairs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    pairs_per_prompt: int = 1,
    seed: int = 0,
    whole_answers: bool = False,
) -> tuple[PreferencePair, ...]:
    """Create pairs of each prompt's right answer, preferred, and wrong answers of many kinds.

    The wrong answers are typical of a policy that has not learned the task or exploits the reward: digits in the wrong order, lost,
    doubled or exchanged, an empty answer, and right answers that do not end.

    Args:
        prompts: prompts of the sort task, with the right answer in metadata["ground_truth"].
        max_tokens: token budget of a response; an answer that does not end uses all of it.
        pairs_per_prompt: pairs per prompt, each with its own wrong answer, equal only by chance.
        seed: seed of the wrong answers.
        whole_answers: as in prepare_preference_pair.
    """
    generator = random.Random(seed)
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int), f"the tokenizer's eos_token_id is {eos!r}, expected one id"
    pairs: list[PreferencePair] = []

    def make(prompt: Prompt, answer: str, ends: bool) -> Sample:
        asked = tokenize_prompt(tokenizer, prompt.content)
        tokens = tokenize_prompt(tokenizer, answer) if answer else ()
        answered = (*tokens, eos) if ends else tokens[:max_tokens]
        return Sample(
            prompt=prompt.content,
            tokens=(*asked, *answered),
            loss_mask=(*(0.0,) * len(asked), *_mask_answer(len(answered), whole_answers=whole_answers)),
            response=answer,
            status=Status.COMPLETED if ends else Status.TRUNCATED,
            metadata=dict(prompt.metadata),
        )

    for prompt in prompts:
        right = str(prompt.metadata["ground_truth"])
        problem = str(prompt.content).removeprefix("s").removesuffix("=")
        chosen = make(prompt, right, True)
        for _ in range(pairs_per_prompt):
            wrong, ends = _spoil(generator, problem, right, max_tokens)
            pairs.append(PreferencePair(chosen, make(prompt, wrong, ends)))
    return tuple(pairs)


def _mask_answer(num_tokens: int, *, whole_answers: bool) -> tuple[float, ...]:
    return (1.0,) * num_tokens if whole_answers else (*(0.0,) * (num_tokens - 1), 1.0)


def create_task_pairs(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    num_pairs: int = 25600,
    num_heldout: int = 512,
    pairs_per_problem: int = 2,
    seed: int = 0,
    whole_answers: bool = False,
) -> tuple[tuple[PreferencePair, ...], tuple[PreferencePair, ...]]:
    """Create num_pairs pairs to train on and num_heldout of held-out problems, pairs_per_problem of each problem, as far as the task has
    problems.

    Raises: ConfigError for a task without generated wrong answers.
    """
    if task.name not in ("sort", "sort-long"):
        raise ConfigError(f"there are no pairs of the task {task.name!r}: give --data.path FILE.jsonl with chosen and rejected answers")

    def create(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[PreferencePair, ...]:
        problems = prompts[: -(-count // pairs_per_problem)]
        make = partial(create_answer_pairs, max_tokens=task.max_tokens, pairs_per_prompt=pairs_per_problem, whole_answers=whole_answers)
        return make(tokenizer, problems, seed=seed)[:count]

    return create(task.train_prompts, num_pairs, seed), create(task.heldout_prompts, num_heldout, seed + 1)


def create_empty_task(name: str) -> Task:
    """Create a task without problems and demonstrations, of which add_preferences makes one with pairs."""
    return Task(name, "prefer the chosen answers", (), (), (), reward_fn=None, max_tokens=0)


def add_preferences(config: Config, tokenizer: PreTrainedTokenizerBase, task: Task, *, limits: ModelLimits) -> Task:
    """Add the preferences of a run to its task: the user's, or generated ones, in the form that preference.loss is trained on.

    Raises: DataError with file and line; ConfigError for a task without generated wrong answers.
    """
    section, data = config.preference, config.data
    path = section.path or data.path
    is_paired = section.loss != "kto"
    if path is None or (section.path is None and task.sft_samples):  # data.path is then of SFT
        counts = {"num_pairs": section.num_pairs, "num_heldout": section.num_heldout}
        pairs = create_task_pairs(tokenizer, task, seed=config.seed, whole_answers=True, **counts)
        train, heldout = pairs if is_paired else (_label_pairs(some) for some in pairs)
        return replace(task, preferences=train, heldout_preferences=heldout)
    columns, count = parse_columns(data.columns), section.num_heldout
    common: dict[str, Any] = {"max_length": data.max_length, "skip_bad_rows": data.skip_bad_rows, "limits": limits}
    held = section.eval_path or (None if task.sft_samples else data.eval_path)  # held-out problems of SFT
    option = "--preference.eval-path" if section.path is not None else "--data.eval-path"
    load: Any = partial(load_preference_pairs, whole_answers=True) if is_paired else load_labelled_answers
    train, heldout, num_bad = load_own_rows(partial(load, tokenizer, **common), path, held, columns, num_heldout=count, option=option)
    what = "pairs" if is_paired else "labelled answers"
    notes = (*task.notes, f"{len(train):,} {what} to train on, {len(heldout):,} held out")
    added = replace(task, preferences=train, heldout_preferences=heldout, notes=notes)
    return replace(added, num_skipped_rows=task.num_skipped_rows + num_bad, description=f"{task.description} in {Path(path).name}")


def _label_pairs(pairs: Sequence[PreferencePair]) -> tuple[Sample, ...]:
    """Return the answers of pairs with rewards 1 and 0, as KTO takes them."""
    return tuple(replace(answer, reward=label) for pair in pairs for answer, label in ((pair.chosen, 1.0), (pair.rejected, 0.0)))


def load_own_rows(
    load: Callable[[DatasetSpec], LoadedRows[T]],
    path: str,
    eval_path: str | None,
    columns: Columns,
    *,
    num_heldout: int,
    option: str = "--data.eval-path",
) -> tuple[tuple[T, ...], tuple[T, ...], int]:
    """Load the user's pairs or labelled answers, and hold some out.

    Args:
        load: reads one file.
        eval_path: file of the held-out rows; None = at most a tenth of path, chosen by a hash of their prompts.
        option: the option of eval_path, for the error.

    Returns: rows to train on, held-out rows, and the number of bad rows that were skipped.
    Raises: DataError that names file and line, or for too few rows to hold some out.
    """
    loaded = load(DatasetSpec(path=path, columns=columns))
    num_bad = len(loaded.bad_rows)
    if eval_path is not None:
        held = load(DatasetSpec(path=eval_path, columns=columns))
        return tuple(loaded.rows), tuple(held.rows[:num_heldout]), num_bad + len(held.bad_rows)
    asked = [hash_question(row if isinstance(row, Sample) else row.chosen) for row in loaded]
    is_held = choose_heldout(np.array(asked, np.uint64), min(num_heldout, len(loaded) // 10))
    if not is_held.any():
        what = "answers" if isinstance(loaded.rows[0], Sample) else "pairs"
        raise DataError(f"{path} has {len(loaded)} {what}, too few to hold some out: give {option}, or at least 10 {what} of two prompts")
    train, heldout = (tuple(pick_rows(loaded, np.flatnonzero(part)).rows) for part in (~is_held, is_held))
    return train, heldout, num_bad


def _spoil(generator: random.Random, problem: str, right: str, max_tokens: int) -> tuple[str, bool]:
    """Return a wrong answer, and whether it ends."""
    if generator.random() < 0.1:
        return right + "".join(generator.choices("0123456789", k=max_tokens)), False
    while True:
        wrong = generator.choice((_reverse, _copy, _shuffle, _swap, _drop, _double, _exchange, _exchange, _invent))(
            generator, problem, right
        )
        if wrong != right:
            return wrong, True


def _reverse(generator: random.Random, problem: str, right: str) -> str:
    return right[::-1]


def _copy(generator: random.Random, problem: str, right: str) -> str:
    return problem


def _shuffle(generator: random.Random, problem: str, right: str) -> str:
    return "".join(generator.sample(right, len(right)))


def _swap(generator: random.Random, problem: str, right: str) -> str:
    i = generator.randrange(len(right) - 1)
    return right[:i] + right[i + 1] + right[i] + right[i + 2 :]


def _drop(generator: random.Random, problem: str, right: str) -> str:
    i = generator.randrange(len(right))
    return right[:i] + right[i + 1 :]


def _double(generator: random.Random, problem: str, right: str) -> str:
    i = generator.randrange(len(right))
    return right[:i] + right[i] + right[i:]


def _exchange(generator: random.Random, problem: str, right: str) -> str:
    """Exchange one digit for another, still in order."""
    i = generator.randrange(len(right))
    return "".join(sorted(right[:i] + generator.choice("0123456789") + right[i + 1 :]))


def _invent(generator: random.Random, problem: str, right: str) -> str:
    """Return digits unrelated to the problem, sorted or not; or none."""
    digits = generator.choices("0123456789", k=generator.randrange(len(right) + 2))
    return "".join(sorted(digits) if generator.random() < 0.7 else digits)
