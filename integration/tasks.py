"""What a run learns: prompts, held-out problems, demonstrations and a reward, as one value."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.char_tokenizer import create_char_tokenizer
from rollouts.chat import tokenize_prompt
from rollouts.datasets import LoadedRows, load_rl_prompts, load_sft_conversations, prepare_sft_samples
from rollouts.episode_openings import EpisodeSetting
from rollouts.errors import ConfigError, DataError
from rollouts.rewards.answers import exact_match, gsm8k_reward
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """Everything that a run reads of its data."""

    name: str
    description: str  # one sentence for the printed story
    train_prompts: tuple[Prompt, ...]  # () = the environment of the episodes makes them, from seeds
    heldout_prompts: tuple[Prompt, ...]  # disjoint from train_prompts as problems
    sft_samples: tuple[Sample, ...]
    reward_fn: Callable[[Sample], Any] | None  # None = what the environment of the episodes gives
    max_tokens: int  # of a response, or of all actions of an episode
    num_skipped_rows: int = 0  # bad rows that were left out on request
    episodes: EpisodeSetting | None = None  # None = each prompt has one response
    # makes what SFT trains on, beside sft_samples; may be given what is told of episodes that were left out
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
    """Sort the digits: "s7304=" -> "0347". Reward 1 for exactly the right digits followed by end of text.

    Args:
        tokenizer: of characters; default create_char_tokenizer().
        seed: of the problems; train and held-out problems are disjoint.
        wrong_fraction: demonstrations that are sorted the wrong way round, on purpose; the others are right.
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
        train_prompts=tuple(_sort_prompt(digits) for digits in train),
        heldout_prompts=tuple(_sort_prompt(digits) for digits in heldout),
        sft_samples=_demonstrations(tokenizer, train, answers),
        reward_fn=exact_match,
        max_tokens=max_digits + 2,
    )


def create_sort_long_task(tokenizer: PreTrainedTokenizerBase | None = None, *, num_heldout: int = 256, num_train: int = 20000) -> Task:
    """The harder one, for comparing algorithms: 4 to 8 digits, every demonstration right."""
    return create_sort_task(
        tokenizer, name="sort-long", min_digits=4, max_digits=8, wrong_fraction=0.0, num_heldout=num_heldout, num_train=num_train
    )


def _draw_problem(generator: random.Random, min_digits: int, max_digits: int) -> str:
    return "".join(generator.choice("0123456789") for _ in range(generator.randint(min_digits, max_digits)))


def _sort_prompt(digits: str) -> Prompt:
    return Prompt(content=f"s{digits}=", metadata={"ground_truth": "".join(sorted(digits))})


def _demonstrations(tokenizer: PreTrainedTokenizerBase, problems: Sequence[str], answers: Sequence[str]) -> tuple[Sample, ...]:
    """One Sample for each problem: the prompt as RL gives it to the model, then answer and end of text, which are trained on."""
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int), f"the tokenizer's eos_token_id is {eos!r}, expected one id"
    ids = _read_character_ids(tokenizer)
    samples: list[Sample] = []
    for index, (digits, answer) in enumerate(zip(problems, answers, strict=True)):
        prompt = f"s{digits}="
        if ids is None:
            prompt_tokens = tokenize_prompt(tokenizer, prompt)
            response_tokens: Sequence[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        else:
            prompt_tokens, response_tokens = tuple(ids[c] for c in prompt), [ids[c] for c in answer]
        samples.append(
            Sample(
                prompt=prompt,
                tokens=(*prompt_tokens, *response_tokens, eos),
                loss_mask=(0.0,) * len(prompt_tokens) + (1.0,) * (len(response_tokens) + 1),
                response=answer,
                index=index,
                group_index=index,
            )
        )
    return tuple(samples)


def is_character_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each character is a token: of the built-in model, which knows nothing but what it is taught here."""
    return _read_character_ids(tokenizer) is not None


def _read_character_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int] | None:
    """The id of each character, for a tokenizer that makes one token of each; None for others.

    Looking characters up is many times faster than asking the tokenizer for 20000 texts.
    """
    characters = "s0123456789="
    ids = tokenize_prompt(tokenizer, characters)
    if len(ids) != len(characters) or tokenizer.unk_token_id in ids:
        return None
    table = dict(zip(characters, ids, strict=True))
    pairs = [first + second for first in "0123456789" for second in "0123456789"]
    split = all(tokenize_prompt(tokenizer, pair) == (table[pair[0]], table[pair[1]]) for pair in pairs)
    return table if split else None


def create_gsm8k_task(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    eval_path: Path | None = None,
    *,
    num_heldout: int = 256,
    max_tokens: int = 512,
    max_length: int | None = None,
    truncate: bool = False,
    skip_bad_rows: bool = False,
) -> Task:
    """Grade-school mathematics from JSONL rows {"question", "answer"} with "#### 42" at the end of the answer (Cobbe et al. 2021)."""
    return create_jsonl_task(
        tokenizer, path, eval_path, name="gsm8k", reward_fn=gsm8k_reward, num_heldout=num_heldout, max_tokens=max_tokens,
        max_length=max_length, truncate=truncate, skip_bad_rows=skip_bad_rows,
    )  # fmt: skip


def create_jsonl_task(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    eval_path: Path | None = None,
    *,
    name: str = "jsonl",
    reward_fn: Callable[[Sample], Any] = exact_match,
    num_heldout: int = 256,
    max_tokens: int = 256,
    max_length: int | None = None,
    truncate: bool = False,
    skip_bad_rows: bool = False,
    with_sft: bool = True,
    with_rl: bool = True,
) -> Task:
    """The user's own JSONL: "messages", "prompt" + "completion" or "question" + "answer" for SFT; a prompt and an answer for RL.

    Args:
        eval_path: held-out problems; without it the last rows of `path` are held out (at most num_heldout, at most a tenth).
        max_length: most tokens of an SFT row; a longer one is an error, or cut off with `truncate`.
        with_sft, with_rl: which of the two views of the rows is needed; the other is left empty. Without RL there are held-out
            problems only from eval_path: rows for SFT need not have an answer that a reward can compare with.

    Raises: DataError naming file and line.
    """
    as_messages = bool(getattr(tokenizer, "chat_template", None))
    train_prompts: tuple[Prompt, ...] = ()
    heldout: tuple[Prompt, ...] = ()
    heldout_sources: frozenset[str] = frozenset()
    bad_sources: set[str] = set()  # a row can be bad for SFT and for RL, and is one bad row
    if eval_path is not None:
        held = load_rl_prompts(eval_path, as_messages=as_messages, skip_bad_rows=skip_bad_rows)
        bad_sources.update(row.source for row in held.bad_rows)
        heldout = held.rows[:num_heldout]
    if with_rl:
        loaded = load_rl_prompts(path, as_messages=as_messages, skip_bad_rows=skip_bad_rows)
        bad_sources.update(row.source for row in loaded.bad_rows)
        train_prompts = loaded.rows
        if eval_path is None:
            count = min(num_heldout, len(train_prompts) // 10)
            if count == 0:
                raise DataError(
                    f"{path} has {len(train_prompts)} rows, too few to hold some out: give --data.eval-path, or at least 10 rows"
                )
            train_prompts, heldout = train_prompts[:-count], train_prompts[-count:]
            heldout_sources = frozenset(loaded.sources[-count:])
    samples: tuple[Sample, ...] = ()
    if with_sft:
        rows = load_sft_conversations(path, skip_bad_rows=skip_bad_rows)
        kept = [i for i, source in enumerate(rows.sources) if source not in heldout_sources]
        prepared = prepare_sft_samples(
            tokenizer,
            LoadedRows(rows=tuple(rows[i] for i in kept), sources=tuple(rows.sources[i] for i in kept), bad_rows=rows.bad_rows),
            max_length=max_length,
            on_overflow="truncate" if truncate else "error",
            skip_bad_rows=skip_bad_rows,
        )
        bad_sources.update(row.source for row in prepared.bad_rows)
        samples = prepared.rows
    return Task(
        name=name,
        description=f"answer the questions in {path.name}",
        train_prompts=train_prompts,
        heldout_prompts=tuple(replace(prompt, index=i) for i, prompt in enumerate(heldout)),
        sft_samples=samples,
        reward_fn=reward_fn,
        max_tokens=max_tokens,
        num_skipped_rows=len(bad_sources),
    )
