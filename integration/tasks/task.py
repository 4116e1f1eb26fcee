"""The task of a run as one value: prompts, held-out problems, demonstrations and a reward."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.preference_pairs import PreferencePair
from rollouts.data.recorded import RecordedGroups
from rollouts.data.rows.loaded import LazyRows
from rollouts.errors import ConfigError
from rollouts.rewards.answers import exact_match
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """The data of a run."""

    name: str
    description: str  # one sentence for the printed report
    train_prompts: Sequence[Prompt]  # () = the environment generates problems from seeds
    heldout_prompts: tuple[Prompt, ...]  # their problems are disjoint from those of train_prompts
    sft_samples: Sequence[Sample]
    heldout_samples: tuple[Sample, ...] = field(
        default=(), kw_only=True
    )  # demonstrations that SFT is not trained on, for its held-out loss
    reward_fn: Callable[[Sample], Any] | None  # None = the environment's rewards
    scores_training: bool = field(default=True, kw_only=True)  # False = reward_fn scores held-out problems only
    max_tokens: int  # token budget of a response, or of all actions of an episode
    num_skipped_rows: int = 0  # bad rows skipped on request
    train_sources: Sequence[str] = ()  # "file, line n" of each train prompt that is from a file
    heldout_sources: Sequence[str] = ()  # the same of held-out prompts
    preferences: Sequence[PreferencePair | Sample] = ()  # pairs, or labelled answers for KTO
    heldout_preferences: Sequence[PreferencePair | Sample] = ()  # the same of other prompts
    recorded: RecordedGroups | None = None  # rollouts to train on instead of generating
    notes: tuple[str, ...] = ()  # facts about the data, printed at the start of a run
    episodes: EpisodeSetting | None = None  # None = a single turn per prompt
    # creates demonstrations for SFT besides sft_samples; its argument prints a message about dropped episodes
    demonstrate: Callable[..., Awaitable[tuple[Sample, ...]]] | None = None


def create_sort_task(
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    name: str = "sort",
    seed: int = 12345,
    num_train: int = 20000,
    num_heldout: int = 256,
    min_digits: int = 3,
    max_digits: int = 6,
    wrong_fraction: float = 0.5,
) -> Task:
    """Create the task of sorting digits: "s7304=" -> "0347". Reward 1 for exactly the right digits followed by end of text.

    Args:
        tokenizer: a character tokenizer; default create_char_tokenizer().
        seed: seed of the problems; train and held-out problems are disjoint.
        wrong_fraction: fraction of demonstrations sorted the wrong way round, on purpose; the others are right.
    """
    tokenizer = create_char_tokenizer() if tokenizer is None else tokenizer
    num_problems = sum(10**digits for digits in range(min_digits, max_digits + 1))
    if num_heldout > num_problems // 10:
        raise ConfigError(
            f"{num_heldout} held-out problems asked for, but there are {num_problems} of {min_digits} to {max_digits} digits, and at most "
            f"a tenth may be held out: set --evaluation.num-prompts to at most {num_problems // 10}"
        )
    generator = random.Random(seed)
    problems = partial(_draw_problem, generator, min_digits, max_digits)
    heldout: dict[str, None] = {}
    while len(heldout) < num_heldout:
        heldout.setdefault(problems())
    train: list[str] = []
    while len(train) < num_train:
        digits = problems()
        if digits not in heldout:
            train.append(digits)
    num_wrong = round(wrong_fraction * num_train)
    wrong = frozenset(generator.sample(range(num_train), num_wrong))
    answers = ["".join(sorted(digits, reverse=i in wrong)) for i, digits in enumerate(train)]
    quality = (
        f"{wrong_fraction:.0%} of the demonstrations sort the wrong way round, on purpose" if num_wrong else "all demonstrations are right"
    )
    return Task(
        name=name,
        description=f"sort {min_digits} to {max_digits} digits ({quality})",
        train_prompts=LazyRows(num_train, lambda i: _sort_prompt(train[i])),
        heldout_prompts=tuple(_sort_prompt(digits) for digits in heldout),
        sft_samples=_demonstrations(tokenizer, train, answers),
        heldout_samples=tuple(_demonstrations(tokenizer, tuple(heldout), _answer_heldout(tuple(heldout), seed, wrong_fraction))),
        reward_fn=exact_match,
        max_tokens=max_digits + 2,
    )


def _answer_heldout(problems: Sequence[str], seed: int, wrong_fraction: float) -> list[str]:
    """Return demonstrated answers to held-out problems, of which as many are wrong as in training. They change nothing in training."""
    wrong = random.Random(seed + 1).sample(range(len(problems)), round(wrong_fraction * len(problems)))
    return ["".join(sorted(digits, reverse=i in wrong)) for i, digits in enumerate(problems)]


def create_sort_long_task(tokenizer: PreTrainedTokenizerBase | None = None, *, num_heldout: int = 256, num_train: int = 20000) -> Task:
    """Create the harder sorting task, for comparing algorithms: 4 to 8 digits, all demonstrations right."""
    return create_sort_task(
        tokenizer, name="sort-long", min_digits=4, max_digits=8, wrong_fraction=0.0, num_heldout=num_heldout, num_train=num_train
    )


def _draw_problem(generator: random.Random, min_digits: int, max_digits: int) -> str:
    return "".join(generator.choice("0123456789") for _ in range(generator.randint(min_digits, max_digits)))


def _sort_prompt(digits: str) -> Prompt:
    return Prompt(content=f"s{digits}=", metadata={"ground_truth": "".join(sorted(digits))})


def _demonstrations(tokenizer: PreTrainedTokenizerBase, problems: Sequence[str], answers: Sequence[str]) -> LazyRows[Sample]:
    """Return one Sample per problem, made when it is read: the prompt as in RL, then answer and end of text, with the loss on these two."""
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int), f"the tokenizer's eos_token_id is {eos!r}, expected one id"
    ids = _read_character_ids(tokenizer)

    def demonstrate(index: int) -> Sample:
        prompt, answer = f"s{problems[index]}=", answers[index]
        if ids is None:
            prompt_tokens = tokenize_prompt(tokenizer, prompt)
            response_tokens: Sequence[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        else:
            prompt_tokens, response_tokens = tuple(ids[c] for c in prompt), [ids[c] for c in answer]
        return Sample(
            prompt=prompt,
            tokens=(*prompt_tokens, *response_tokens, eos),
            loss_mask=(0.0,) * len(prompt_tokens) + (1.0,) * (len(response_tokens) + 1),
            response=answer,
            index=index,
            group_index=index,
        )

    return LazyRows(len(problems), demonstrate)


def is_character_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each character is one token, as for the built-in model."""
    return _read_character_ids(tokenizer) is not None


def _read_character_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """Return the id of each character for a character tokenizer; None for other tokenizers.

    Looking up characters is many times faster than tokenizing 20000 texts.
    """
    characters = "s0123456789="
    ids = tokenize_prompt(tokenizer, characters)
    if len(ids) != len(characters) or tokenizer.unk_token_id in ids:
        return None
    table = dict(zip(characters, ids, strict=True))
    pairs = [first + second for first in "0123456789" for second in "0123456789"]
    split = all(tokenize_prompt(tokenizer, pair) == (table[pair[0]], table[pair[1]]) for pair in pairs)
    return table if split else None
