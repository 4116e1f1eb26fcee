"""The task of the user's own rows: what is trained on, what is held out, and what is said about both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from integration.tasks.task import Task
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.datasets import DatasetSpec, load_rl_prompts, load_sft_conversations, prepare_sft_samples
from rollouts.data.model_limits import ModelLimits
from rollouts.data.recorded import describe_recorded, load_recorded_groups
from rollouts.data.rows.files import Row, check_exists
from rollouts.data.rows.formats import Columns
from rollouts.data.rows.loaded import LoadedRows, choose_heldout, find_repeated, pick_rows
from rollouts.errors import DataError
from rollouts.rewards.answers import exact_match, gsm8k_reward
from rollouts.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """The user's rows, in any format of docs/data.md."""

    path: Path | str | None = None  # file, folder or hub name of rows for both stages; None = the mixture serves both
    eval_path: Path | str | None = None  # the same of held-out rows; None = rows of `path` or the mixture, chosen by what they ask
    eval_fraction: float = 0.1  # share of the rows that is held out where there is no eval_path; 0 = none
    # data sets of SFT instead of `path`, which then serves RL only; without `path` data sets of both stages
    mixture: Sequence[DatasetSpec] = ()
    columns: Columns = ()  # columns of `path` and eval_path to rename
    lazy: bool = False  # read rows of `path` and the mixture from their files when they are taken
    num_heldout: int = 256  # maximum held-out problems
    max_length: int | None = None  # maximum tokens of an SFT row; a longer one is an error, or truncated with `truncate`; None = no limit
    truncate: bool = False  # truncate SFT rows that are too long; False = raise DataError
    skip_bad_rows: bool = False  # skip and count bad rows; False = raise DataError
    limits: ModelLimits | None = None  # limits of the model; rows and prompts beyond them are errors, or truncated SFT rows with `truncate`
    with_sft: bool = True  # read rows for SFT
    with_rl: bool = True  # read prompts for RL
    needs_truth: bool = True  # refuse prompts without an answer for the reward to compare with

    def list_sources(self, stage: str) -> list[DatasetSpec]:
        """Return the data sets of a stage, sft or rl. One that is also `path` has its name as `path` has it."""
        own = None if self.path is None else DatasetSpec(path=str(self.path), columns=self.columns, lazy=self.lazy)
        if own is not None and (stage == "rl" or not self.mixture):
            return [own]
        assert self.mixture, f"{stage} needs rows: path is None, and mixture is empty"
        same = [own is not None and Path(spec.path).resolve() == Path(own.path).resolve() for spec in self.mixture]
        renamed = [self.columns if own is None or is_same else () for is_same in same]  # beside `path`, columns are those of `path`
        specs = [
            replace(spec, lazy=self.lazy, columns=spec.columns or columns) for spec, columns in zip(self.mixture, renamed, strict=True)
        ]
        return [replace(spec, path=str(self.path)) if is_same else spec for spec, is_same in zip(specs, same, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of both stages."""

    prompts: LoadedRows[Prompt] = field(default_factory=lambda: LoadedRows[Prompt](rows=(), sources=()))
    samples: LoadedRows[Sample] = field(default_factory=lambda: LoadedRows[Sample](rows=(), sources=()))

    @property
    def main(self) -> LoadedRows[Prompt] | LoadedRows[Sample]:
        """The prompts of RL, or without RL the rows of SFT."""
        return self.prompts if len(self.prompts) else self.samples

    def keep(self, condition: Callable[[np.ndarray], np.ndarray]) -> _Rows:
        """Return the rows for whose questions [rows] a condition holds."""
        prompts, samples = (np.flatnonzero(condition(rows.questions)) for rows in (self.prompts, self.samples))
        return _Rows(prompts=pick_rows(self.prompts, prompts), samples=pick_rows(self.samples, samples))


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
    _check_paths(data)
    rows = _read_rows(tokenizer, data)
    notes = _describe_repeated(rows)
    if data.eval_path is None:
        train, heldout = _split(rows, data)
    else:
        train, heldout = rows, _read_eval_rows(tokenizer, data)
        notes += _describe_overlap(train, heldout)
    if len(heldout.prompts) or len(heldout.samples):
        kept, out = max(len(train.prompts), len(train.samples)), max(len(heldout.prompts), len(heldout.samples))
        what = "--data.eval-fraction" if data.eval_path is None else "--data.eval-path"
        notes = (f"{kept:,} rows to train on, {out:,} held out ({what})", *notes)
    bad = {row.source for loaded in (rows.prompts, rows.samples, heldout.prompts) for row in loaded.bad_rows}  # bad for both counts once
    sources = data.list_sources("rl") if data.path is not None and data.with_rl else []
    names = dict.fromkeys(Path(spec.path).name for spec in (*sources, *(data.list_sources("sft") if data.with_sft else ())))
    return Task(
        name=name,
        description=f"answer the questions in {' and '.join(names or ['the mixture'])}",
        train_prompts=train.prompts.rows,
        heldout_prompts=tuple(replace(prompt, index=i) for i, prompt in enumerate(heldout.prompts)),
        sft_samples=train.samples.rows,
        heldout_samples=tuple(heldout.samples),
        reward_fn=reward_fn,
        max_tokens=max_tokens,
        num_skipped_rows=len(bad),
        train_sources=train.prompts.sources,
        heldout_sources=heldout.prompts.sources,
        notes=notes,
    )


def create_recorded_task(
    tokenizer: PreTrainedTokenizerBase, rollouts: str, data: OwnData, *, smallest_group: int, max_tokens: int = 256
) -> Task:
    """Create the task of training on recorded rollouts, with the problems of data.eval_path held out. Raises DataError as they do."""
    recorded = load_recorded_groups(rollouts, limits=data.limits, smallest_group=smallest_group)
    heldout = _Rows() if data.eval_path is None else _read_eval_rows(tokenizer, replace(data, with_sft=False))
    return Task(
        name="jsonl",
        description=f"learn from the rollouts in {Path(rollouts).name}",
        train_prompts=(),
        heldout_prompts=tuple(replace(prompt, index=i) for i, prompt in enumerate(heldout.prompts)),
        sft_samples=(),
        reward_fn=exact_match,
        max_tokens=max_tokens,
        heldout_sources=heldout.prompts.sources,
        recorded=recorded,
        notes=(describe_recorded(recorded),),
    )


def _check_paths(data: OwnData) -> None:
    """Raise DataError that names the setting for a file of rows that does not exist."""
    if data.path == data.eval_path:  # an evaluation of a file, whose errors name the file alone
        return
    check_exists(data.path, "data.path")
    check_exists(data.eval_path, "data.eval_path")


def _read_rows(tokenizer: PreTrainedTokenizerBase, data: OwnData) -> _Rows:
    """Read all rows of the stages that are asked for."""
    rows = _Rows()
    if data.with_rl:
        prompts = _read_prompts(tokenizer, data.list_sources("rl"), data)
        if data.limits is not None:
            check_prompts(tokenizer, prompts, data.limits)
        rows = replace(rows, prompts=prompts)
    if data.with_sft:
        rows = replace(rows, samples=_prepare(tokenizer, _read_conversations(data.list_sources("sft"), data), data))
    return rows


def _read_prompts(
    tokenizer: PreTrainedTokenizerBase, sources: Sequence[DatasetSpec], data: OwnData, *, skip_bad_rows: bool | None = None
) -> LoadedRows[Prompt]:
    as_messages = bool(getattr(tokenizer, "chat_template", None))
    skip = data.skip_bad_rows if skip_bad_rows is None else skip_bad_rows
    return load_rl_prompts(sources, require_ground_truth=data.needs_truth, as_messages=as_messages, skip_bad_rows=skip)


def _read_conversations(sources: Sequence[DatasetSpec], data: OwnData) -> LoadedRows[Row]:
    return load_sft_conversations(sources, skip_bad_rows=data.skip_bad_rows)


def _prepare(tokenizer: PreTrainedTokenizerBase, conversations: LoadedRows[Row], data: OwnData) -> LoadedRows[Sample]:
    return prepare_sft_samples(
        tokenizer,
        conversations,
        max_length=data.max_length,
        on_overflow="truncate" if data.truncate else "error",
        skip_bad_rows=data.skip_bad_rows,
        limits=data.limits,
    )


def _split(rows: _Rows, data: OwnData) -> tuple[_Rows, _Rows]:
    """Hold rows out by what they ask, so that no question is on both sides, and of each question one row.

    Raises: DataError if there are too few rows to evaluate a policy on.
    """
    hashes = rows.main.questions
    count = min(data.num_heldout, int(data.eval_fraction * len(hashes)))
    held = np.unique(hashes[choose_heldout(hashes, count)])
    if data.with_rl and data.eval_fraction > 0 and not len(held):
        raise DataError(
            f"{data.path or 'the mixture'} has {len(hashes)} rows with {len(np.unique(hashes))} questions, too few to hold some out: give "
            f"--data.eval-path, at least {int(np.ceil(1 / data.eval_fraction))} rows, or --data.eval-fraction 0 to run without evaluation"
        )
    heldout = rows.keep(lambda column: np.isin(column, held) & _is_first(column))
    return rows.keep(lambda column: ~np.isin(column, held)), heldout


def _is_first(hashes: np.ndarray) -> np.ndarray:
    """Mark the first row of each question. # [rows] bool"""
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first


def _read_eval_rows(tokenizer: PreTrainedTokenizerBase, data: OwnData) -> _Rows:
    """Read the file of held-out rows: problems with an answer to compare with, and rows for SFT, as far as it has them.

    Raises: DataError for a row that serves neither, and with RL for one that is no problem.
    """
    source = [DatasetSpec(path=str(data.eval_path), columns=data.columns, max_samples=data.num_heldout)]
    talks = _read_all_good(partial(load_sft_conversations, source)) if data.with_sft else None
    if data.with_rl or not data.with_sft:  # an evaluation has neither, and asks the problems
        prompts = _read_prompts(tokenizer, source, data)
    else:
        prompts = _read_all_good(partial(_read_prompts, tokenizer, source, data))
        if prompts is None and talks is None:
            load_sft_conversations(source)  # raises what is wrong with the first row
        found = [loaded for loaded in (prompts, talks) if loaded is not None]
        good = {place for loaded in found for place in loaded.sources}
        bad = [row for loaded in found for row in loaded.bad_rows if row.source not in good]
        if bad and not data.skip_bad_rows:
            raise DataError(f"{bad[0].source}: {bad[0].reason}")
    rows = _Rows() if prompts is None else _Rows(prompts=prompts)
    return rows if talks is None else replace(rows, samples=_prepare(tokenizer, replace(talks, bad_rows=()), data))


def _read_all_good(load: Callable[..., LoadedRows[T]]) -> LoadedRows[T] | None:
    """Load the good rows; None if there are none."""
    try:
        return load(skip_bad_rows=True)
    except DataError:
        return None


def _describe_repeated(rows: _Rows) -> tuple[str, ...]:
    """Name rows that ask the same as an earlier row."""
    loaded = rows.main
    pairs = [(loaded.sources[i], loaded.sources[first]) for i, first in find_repeated(loaded.questions)]
    pairs = [(later, first) for later, first in pairs if later != first]  # not the uses of a row that is to be repeated
    if not pairs:
        return ()
    named = _name_some(f"{later} as {first}" for later, first in pairs)
    return (f"{len(pairs):,} of {len(loaded):,} rows ask the same as an earlier row, and are on the same side of the split: {named}",)


def _describe_overlap(train: _Rows, heldout: _Rows) -> tuple[str, ...]:
    """Name held-out rows of a file of their own whose question is trained on, too."""
    loaded = heldout.main
    both = np.flatnonzero(np.isin(loaded.questions, np.concatenate([train.prompts.questions, train.samples.questions])))
    if not len(both):
        return ()
    named = _name_some(loaded.sources[int(i)] for i in both)
    return (f"{len(both):,} of {len(loaded):,} held-out rows ask what a row to train on asks, so that results are too good: {named}",)


def _name_some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most:,} more" if len(listed) > most else "")


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


def leave_unscored(task: Task) -> Task:
    """Return the task without what needs right answers that its rows lack, and notes that say so.

    Held-out problems without a right answer are left out. If a training prompt has none, answers to all of them get no reward.
    """
    num_bare = sum(not _has_truth(prompt) for prompt in task.train_prompts)
    kept = [i for i, prompt in enumerate(task.heldout_prompts) if _has_truth(prompt)]
    num_left_out, notes = len(task.heldout_prompts) - len(kept), list[str]()
    if num_left_out:
        notes.append(f"{num_left_out} of {len(task.heldout_prompts)} held-out problems have no right answer: accuracy is over the others")
    if num_bare:
        notes.append(f"{num_bare} of {len(task.train_prompts)} prompts have no right answer: the answers in training get no rewards")
    return replace(
        task,
        reward_fn=task.reward_fn if kept or not num_bare else None,
        scores_training=not num_bare,
        heldout_prompts=tuple(task.heldout_prompts[i] for i in kept),
        heldout_sources=tuple(task.heldout_sources[i] for i in kept) if task.heldout_sources else (),
        notes=(*task.notes, *notes),
    )


def _has_truth(prompt: Prompt) -> bool:
    return prompt.metadata.get("ground_truth") is not None
