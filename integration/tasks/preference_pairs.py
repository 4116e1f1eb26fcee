"""Preference pairs for a reward model, generated from the task of sorting digits, whose right answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from integration.tasks.task import Task
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.preference_pairs import PreferencePair
from rollouts.errors import ConfigError
from rollouts.types import Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Spoil = Callable[[random.Random, str, str], str]
"""f(generator, problem, right answer) -> an answer, usually wrong."""


def create_answer_pairs(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_tokens: int, pairs_per_prompt: int = 1, seed: int = 0
) -> tuple[PreferencePair, ...]:
    """Create pairs of each prompt's right answer, preferred, and wrong answers of many kinds.

    The wrong answers are typical of a policy that has not learned the task or exploits the reward: digits in the wrong order, lost,
    doubled or exchanged, an empty answer, and right answers that do not end.

    Args:
        prompts: prompts of the sort task, with the right answer in metadata["ground_truth"].
        max_tokens: token budget of a response; an answer that does not end uses all of it.
        pairs_per_prompt: pairs per prompt, each with its own wrong answer, equal only by chance.
        seed: seed of the wrong answers.
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
            loss_mask=(*(0.0,) * (len(asked) + len(answered) - 1), 1.0),
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


def create_task_pairs(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    num_pairs: int = 25600,
    num_heldout: int = 512,
    pairs_per_problem: int = 2,
    seed: int = 0,
) -> tuple[tuple[PreferencePair, ...], tuple[PreferencePair, ...]]:
    """Create num_pairs pairs to train on and num_heldout of held-out problems, pairs_per_problem of each problem, as far as the task has
    problems.

    Raises: ConfigError for a task without generated wrong answers.
    """
    if task.name not in ("sort", "sort-long"):
        raise ConfigError(f"there are no pairs of the task {task.name!r}: give --data.path FILE.jsonl with chosen and rejected answers")

    def create(prompts: Sequence[Prompt], count: int, seed: int) -> tuple[PreferencePair, ...]:
        problems = prompts[: -(-count // pairs_per_problem)]
        return create_answer_pairs(tokenizer, problems, max_tokens=task.max_tokens, pairs_per_prompt=pairs_per_problem, seed=seed)[:count]

    return create(task.train_prompts, num_pairs, seed), create(task.heldout_prompts, num_heldout, seed + 1)


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
