"""The task of a run as one value: prompts, held-out problems, demonstrations and a reward."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.datasets import DatasetSpec, LoadedRows, load_rl_prompts, load_sft_conversations, prepare_sft_samples
from rollouts.data.model_limits import ModelLimits
from rollouts.errors import ConfigError, DataError
from rollouts.rewards.answers import exact_match, gsm8k_reward
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """The data of a run."""

    name: str
    description: str  # one sentence for the printed report
    train_prompts: tuple[Prompt, ...]  # () = the environment generates problems from seeds
    heldout_prompts: tuple[Prompt, ...]  # their problems are disjoint from those of train_prompts
    sft_samples: tuple[Sample, ...]
    heldout_samples: tuple[Sample, ...] = field(
        default=(), kw_only=True
    )  # demonstrations that SFT is not trained on, for its held-out loss
    reward_fn: Callable[[Sample], Any] | None  # None = the environment's rewards
    max_tokens: int  # token budget of a response, or of all actions of an episode
    num_skipped_rows: int = 0  # bad rows skipped on request
    train_sources: tuple[str, ...] = ()  # "file, line n" of each train prompt that is from a file
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
        train_prompts=tuple(_sort_prompt(digits) for digits in train),
        heldout_prompts=tuple(_sort_prompt(digits) for digits in heldout),
        sft_samples=_demonstrations(tokenizer, train, answers),
        heldout_samples=_demonstrations(tokenizer, tuple(heldout), _answer_heldout(tuple(heldout), seed, wrong_fraction)),
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


def _demonstrations(tokenizer: PreTrainedTokenizerBase, problems: Sequence[str], answers: Sequence[str]) -> tuple[Sample, ...]:
    """Return one Sample per problem: the prompt as in RL, then answer and end of text, with the loss on both of these."""
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


def check_prompts(tokenizer: PreTrainedTokenizerBase, prompts: LoadedRows[Prompt], limits: ModelLimits) -> None:
    """Raise DataError, with file and line, for a prompt that leaves no room for a response in the model's context.

    Tokenizes only prompts with at least half as many characters as the context has tokens: a token has at least one character, and the
    engine refuses shorter prompts that a chat template makes too long.
    """
    if limits.context_length is None:
        return
    for prompt, source in zip(prompts.rows, prompts.sources, strict=True):
        content = prompt.content
        texts = [content] if isinstance(content, str) else [str(message.content or "") for message in content]
        if 2 * sum(map(len, texts)) < limits.context_length:
            continue
        length = len(tokenize_prompt(tokenizer, content))
        if length >= limits.context_length:
            raise DataError(
                f"{source}: the prompt has {length} tokens, which leave no room for a response in the model's context of "
                f"{limits.context_length}: shorten or drop it, or use a model with a longer context"
            )


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """The user's JSONL rows: "messages", "prompt" + "completion" or "question" + "answer" for SFT; prompt and answer for RL."""

    path: Path | None = None  # file of rows for both stages; None if a mixture serves SFT and there is no RL
    eval_path: Path | None = None  # file of held-out problems; None = the last rows of `path` (at most num_heldout, at most a tenth)
    # data sets of SFT instead of `path`, which then serves RL only; held-out rows of `path` are excluded if the mixture contains that file
    mixture: Sequence[DatasetSpec] = ()
    num_heldout: int = 256  # maximum held-out problems
    max_length: int | None = None  # maximum tokens of an SFT row; a longer one is an error, or truncated with `truncate`; None = no limit
    truncate: bool = False  # truncate SFT rows that are too long; False = raise DataError
    skip_bad_rows: bool = False  # skip and count bad rows; False = raise DataError
    limits: ModelLimits | None = None  # limits of the model; rows and prompts beyond them are errors, or truncated SFT rows with `truncate`
    with_sft: bool = True  # read rows for SFT
    # read prompts for RL; without them held-out problems come only from eval_path, as rows for SFT need no answer for a reward
    with_rl: bool = True


def create_gsm8k_task(tokenizer: PreTrainedTokenizerBase, data: OwnData, *, max_tokens: int = 512) -> Task:
    """Create the task of grade-school mathematics from JSONL rows {"question", "answer"}; answers end in "#### 42" (Cobbe et al. 2021)."""
    return create_jsonl_task(tokenizer, data, name="gsm8k", reward_fn=gsm8k_reward, max_tokens=max_tokens)


def create_jsonl_task(
    tokenizer: PreTrainedTokenizerBase,
    data: OwnData,
    *,
    name: str = "jsonl",
    reward_fn: Callable[[Sample], Any] = exact_match,
    max_tokens: int = 256,
) -> Task:
    """Create a task from the user's rows. Raises DataError with file and line."""
    train, heldout, bad_sources = _read_prompts(tokenizer, data)
    samples: tuple[Sample, ...] = ()
    heldout_samples: tuple[Sample, ...] = ()
    if data.with_sft:
        heldout_sources = frozenset(heldout.sources) if data.eval_path is None else frozenset[str]()
        prepared = _read_sft_rows(tokenizer, data, heldout_sources)
        bad_sources = bad_sources | {row.source for row in prepared.bad_rows}  # a row that is bad for both SFT and RL counts once
        samples = prepared.rows
        heldout_samples = _read_heldout_samples(tokenizer, data, heldout_sources)
    path = data.path
    names = [*([] if path is None else [str(path)]), *(spec.path for spec in data.mixture if data.with_sft and spec.path != str(path))]
    return Task(
        name=name,
        description=f"answer the questions in {' and '.join(Path(name).name for name in names)}",
        train_prompts=train.rows,
        heldout_prompts=tuple(replace(prompt, index=i) for i, prompt in enumerate(heldout.rows)),
        sft_samples=samples,
        heldout_samples=heldout_samples,
        reward_fn=reward_fn,
        max_tokens=max_tokens,
        num_skipped_rows=len(bad_sources),
        train_sources=train.sources,
    )


def _read_prompts(tokenizer: PreTrainedTokenizerBase, data: OwnData) -> tuple[LoadedRows[Prompt], LoadedRows[Prompt], frozenset[str]]:
    """Read prompts to train on, held-out ones, and the sources of bad rows."""
    as_messages = bool(getattr(tokenizer, "chat_template", None))
    train = heldout = LoadedRows[Prompt](rows=(), sources=())
    bad_sources = set[str]()
    if data.eval_path is not None:
        held = _read_heldout_prompts(data, as_messages)
        bad_sources.update(row.source for row in held.bad_rows if data.with_rl)
        heldout = LoadedRows(rows=held.rows[: data.num_heldout], sources=held.sources[: data.num_heldout])
    if data.with_rl:
        assert data.path is not None, "RL needs prompts: path is None"
        train = load_rl_prompts(data.path, as_messages=as_messages, skip_bad_rows=data.skip_bad_rows)
        bad_sources.update(row.source for row in train.bad_rows)
        if data.limits is not None:
            check_prompts(tokenizer, train, data.limits)
        if data.eval_path is None:
            count = min(data.num_heldout, len(train.rows) // 10)
            if count == 0:
                raise DataError(
                    f"{data.path} has {len(train.rows)} rows, too few to hold some out: give --data.eval-path, or at least 10 rows"
                )
            heldout = LoadedRows(rows=train.rows[-count:], sources=train.sources[-count:])
            train = LoadedRows(rows=train.rows[:-count], sources=train.sources[:-count])
    return train, heldout, frozenset(bad_sources)


def _read_heldout_prompts(data: OwnData, as_messages: bool) -> LoadedRows[Prompt]:
    """Read the prompts of eval_path. SFT alone needs no answers: rows that are only conversations then serve the held-out loss alone.

    Raises: DataError for a row that serves neither, and without skip_bad_rows for any bad row if there is RL.
    """
    assert data.eval_path is not None, "the caller checks that there is a file"
    load = partial(load_rl_prompts, data.eval_path, as_messages=as_messages)
    if data.with_rl:
        return load(skip_bad_rows=data.skip_bad_rows)
    try:
        prompts = load(skip_bad_rows=True)
    except DataError:
        load_sft_conversations(str(data.eval_path), skip_bad_rows=data.skip_bad_rows)
        return LoadedRows(rows=(), sources=())
    if prompts.bad_rows and not data.skip_bad_rows:
        talks = _read_conversations(data.eval_path)
        useless = next((row for row in prompts.bad_rows if talks is None or row.source not in talks.sources), None)
        if useless is not None:
            raise DataError(f"{useless.source}: {useless.reason}")
    return prompts


def _read_conversations(path: Path) -> LoadedRows[dict[str, Any]] | None:
    """Read the rows of a file that SFT could be trained on; None if there are none."""
    try:
        return load_sft_conversations(str(path), skip_bad_rows=True)
    except DataError:
        return None


def _read_heldout_samples(tokenizer: PreTrainedTokenizerBase, data: OwnData, heldout_sources: frozenset[str]) -> tuple[Sample, ...]:
    """Read the conversations of the held-out rows: those of eval_path, else those of `path` that RL holds out; () if there are none."""
    path = data.path if data.eval_path is None else data.eval_path
    rows = None if path is None or (data.eval_path is None and not heldout_sources) else _read_conversations(path)
    if rows is None:
        return ()
    kept = [i for i, source in enumerate(rows.sources) if data.eval_path is not None or source in heldout_sources][: data.num_heldout]
    if not kept:
        return ()
    return prepare_sft_samples(
        tokenizer,
        LoadedRows(rows=tuple(rows[i] for i in kept), sources=tuple(rows.sources[i] for i in kept)),
        max_length=data.max_length,
        on_overflow="truncate" if data.truncate else "error",
        skip_bad_rows=data.skip_bad_rows,
        limits=data.limits,
    ).rows


def _read_sft_rows(tokenizer: PreTrainedTokenizerBase, data: OwnData, heldout_sources: frozenset[str]) -> LoadedRows[Sample]:
    """Read the rows of SFT that are not held out, as samples."""
    path, mixture = data.path, data.mixture
    assert path is not None or mixture, "SFT needs rows: path is None, and mixture is empty"
    same = [path is not None and Path(spec.path).resolve() == path.resolve() for spec in mixture]  # so that places are named alike
    parts = [replace(spec, path=str(path)) if is_same else spec for spec, is_same in zip(mixture, same, strict=True)]
    rows = load_sft_conversations(parts or str(path), skip_bad_rows=data.skip_bad_rows)
    kept = [i for i, source in enumerate(rows.sources) if source not in heldout_sources]
    return prepare_sft_samples(
        tokenizer,
        LoadedRows(rows=tuple(rows[i] for i in kept), sources=tuple(rows.sources[i] for i in kept), bad_rows=rows.bad_rows),
        max_length=data.max_length,
        on_overflow="truncate" if data.truncate else "error",
        skip_bad_rows=data.skip_bad_rows,
        limits=data.limits,
    )
