"""Preference pairs from files: JSONL, Parquet and Hugging Face folders become PreferencePairs in the tokens of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from rollouts.chat.tokenize import parse_prompt_content, prepare_sft_sample
from rollouts.checks import is_finite_number, show_value
from rollouts.data.collate import collate_samples
from rollouts.data.datasets import Source, load_rows
from rollouts.data.model_limits import ModelLimits, explain_sample
from rollouts.data.rows.files import Row
from rollouts.data.rows.formats import is_labelled, read_messages, read_pair
from rollouts.data.rows.loaded import BadRow, LoadedRows, map_rows
from rollouts.errors import DataError
from rollouts.types import Message, Sample, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")  # columns with log-probs under the reference, by their names in TRL


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, the first preferred. Tokens and loss_mask of both, as in Sample."""

    chosen: Sample
    rejected: Sample
    margin: float = 0.0  # least difference of the scores of the chosen and the rejected answer that training aims at
    ref_log_probs: tuple[float, float] | None = None  # nats, log p(answer) of both under the reference policy; None = not computed

    def __post_init__(self) -> None:
        for name, sample in (("chosen", self.chosen), ("rejected", self.rejected)):
            assert any(mask > 0 for mask in sample.loss_mask), (
                f"no token of the {name} answer has loss_mask > 0: nothing of it is trained on"
            )
        assert math.isfinite(self.margin), f"margin is {self.margin}, expected a finite number"
        known = self.ref_log_probs or (0.0, 0.0)
        assert all(map(math.isfinite, known)), f"ref_log_probs are {known}, expected finite numbers"


# -- the same on batches: rows 2i and 2i + 1 are the chosen and the rejected answer of pair i


def collate_pairs(pairs: Sequence[PreferencePair], pad_id: int = 0) -> TrainBatch:
    """Collate the answers of pairs into rows of a batch, each pair a group of its own.

    Returns: 2 P rows with rewards margin and 0; score_loss(..., margin_from_rewards=True) takes their difference. If all pairs have
        ref_log_probs, so has the batch: the whole of an answer's at its last trained token, since losses of preferences read the sum.
    """
    assert pairs, "there are no pairs to collate"
    rows = [
        replace(sample, group_index=i, index=2 * i + k, reward=reward)
        for i, pair in enumerate(pairs)
        for k, (sample, reward) in enumerate(((pair.chosen, pair.margin), (pair.rejected, 0.0)))
    ]
    batch = replace(collate_samples(rows, pad_id=pad_id), kept=None)  # likelihoods of texts, whatever they were drawn from
    known = [pair.ref_log_probs for pair in pairs if pair.ref_log_probs is not None]
    if len(known) < len(pairs):
        return batch
    sums = torch.tensor([number for numbers in known for number in numbers], dtype=torch.float64)
    positions = torch.arange(batch.loss_mask.shape[1])
    last = torch.where(batch.loss_mask > 0, positions, -1).amax(1, keepdim=True)
    return replace(batch, ref_log_probs=torch.where(positions == last, sums[:, None], 0.0).float())


def rank_rollouts(samples: Sequence[Sample], *, min_difference: float = 0.0) -> tuple[PreferencePair, ...]:
    """Pair the best answer of each group with its worst: online preferences from rollouts and the rewards that they got.

    Args:
        samples: answers with rewards, such as RolloutBatch.samples; those of one prompt share their group_index, and subgroup if any.
            Answers that are not trainable (baselines), or have no trained token, are left out.
        min_difference: least difference of the two rewards; a group with equal rewards never makes a pair.

    Returns: at most one pair for each group, in the order of the groups; of equal rewards the first sample.
    """
    groups: dict[tuple[int, str | None], list[Sample]] = {}
    for sample in samples:
        if sample.reward is not None and sample.trainable and any(mask > 0 for mask in sample.loss_mask):
            groups.setdefault((sample.group_index, sample.subgroup), []).append(sample)
    pairs: list[PreferencePair] = []
    for group in groups.values():
        best, worst = (choose(group, key=lambda sample: cast("float", sample.reward)) for choose in (max, min))
        difference = cast("float", best.reward) - cast("float", worst.reward)
        if difference > 0 and difference >= min_difference:
            pairs.append(PreferencePair(best, worst))
    return tuple(pairs)


def load_preference_pairs(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    *,
    to_turn_end: bool = True,
    whole_answers: bool = False,
    max_length: int | None = None,
    skip_bad_rows: bool = False,
    limits: ModelLimits | None = None,
    **template_kwargs: Any,
) -> LoadedRows[PreferencePair]:
    """Load pairs to train a reward model on, or with whole_answers a policy.

    Each row has "prompt", "completion" and "label" (see pair_labelled), or "chosen" and "rejected", both texts or both messages, and
        "prompt"   a text or messages that both answer; without it chosen and rejected are whole conversations, which end with an
                   assistant message, or texts that begin alike. A text that is answered by texts is tokenized as it stands, without
                   the chat template;
        "margin"   optional: least difference of the two scores that training aims at;
        "ref_chosen_logps", "ref_rejected_logps"  optional: log p of both answers under the reference, as TRL's precomputed columns.
    Other keys become metadata of both samples.

    Args:
        source: a file or folder, a DatasetSpec, or a list of them to mix.
        to_turn_end: as reads_turn_end of the model: rows end with the answer's end-of-turn token; False keeps what the template puts
            behind it.
        whole_answers: as in prepare_preference_pair.
        max_length: most tokens of an answer with its prompt; a longer one is a bad row, since the end of an answer is what is judged.
        skip_bad_rows: leave bad rows out, listed in .bad_rows, instead of raising.
        limits: limits of the trained model; an answer that exceeds them with its prompt makes a bad row.

    Raises: DataError that names file and line.
    """

    def parse(number: int, row: Row, where: str) -> PreferencePair:
        try:
            pair = prepare_preference_pair(
                tokenizer, row, to_turn_end=to_turn_end, whole_answers=whole_answers, max_length=max_length, **template_kwargs
            )
            for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                _check_fits(answer, limits, f"{name}: ")
            return pair
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    rows = load_rows(source, _check_row, skip_bad_rows)
    if not rows.is_lazy and all(map(is_labelled, rows)):
        rows = pair_labelled(rows, skip_bad_rows=skip_bad_rows)
    return map_rows(rows, parse, skip_bad_rows=skip_bad_rows, what="the pairs")


def load_labelled_answers(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    *,
    max_length: int | None = None,
    skip_bad_rows: bool = False,
    limits: ModelLimits | None = None,
    **template_kwargs: Any,
) -> LoadedRows[Sample]:
    """Load good and bad answers, each by itself, for KTO: samples with reward 1 and 0, whose answers are trained on as a whole.

    Rows are those of load_preference_pairs. A pair becomes a good answer and a bad one, and a labelled answer stays as it is, whatever
    other answers its prompt has.

    Raises: DataError that names file and line, or if all answers have the same label.
    """

    def parse(number: int, row: Row, where: str) -> Sample:
        try:
            if not isinstance(row["label"], bool):
                raise DataError(f"label is {show_value(row['label'])}, expected true or false beside a prompt and a completion")
            rest = {name: value for name, value in row.items() if name not in ("prompt", "completion", "label")}
            answer = _prepare_answer(tokenizer, row.get("prompt"), row["completion"], max_length, **template_kwargs)
            if row["label"]:
                _check_says_something(row["completion"])
            _check_fits(answer, limits)
            return replace(cut_behind_answer(answer), reward=float(row["label"]), metadata=rest, index=number, group_index=number)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    rows = load_rows(source, _check_row, skip_bad_rows)
    labelled = [(one, where) for row, where in zip(rows.rows, rows.sources, strict=True) for one in _label(row)]
    loaded = replace(rows, rows=tuple(one for one, _ in labelled), sources=tuple(where for _, where in labelled))
    answers = map_rows(loaded, parse, skip_bad_rows=skip_bad_rows, what="the labelled answers")
    if len({answer.reward for answer in answers.rows}) < 2:
        label = bool(answers.rows[0].reward)
        raise DataError(f"all {len(answers)} answers have the label {label}: KTO learns from good answers and bad ones; add the others")
    return answers


def _label(row: Row) -> list[Row]:
    """Return a pair as two answers with labels."""
    if is_labelled(row):
        return [row]
    rest = {name: value for name, value in row.items() if name not in ("chosen", "rejected", "margin", *REFERENCE_COLUMNS)}
    return [{**rest, "completion": row[name], "label": name == "chosen"} for name in ("chosen", "rejected")]


def _check_fits(answer: Sample, limits: ModelLimits | None, where: str = "") -> None:
    why = None if limits is None else explain_sample(answer, limits)
    if why is not None:
        raise DataError(f"{where}the answer with its prompt {why}")


def _check_row(row: Row, where: str) -> Row:
    return row if is_labelled(row) else read_pair(row, where)


def pair_labelled(rows: LoadedRows[Row], *, skip_bad_rows: bool = False) -> LoadedRows[Row]:
    """Make pairs of single answers with a label: the good answers of a prompt with its bad ones, in their order.

    Each answer is in at least one pair, so the shorter list of a prompt begins anew where it ends.

    Args:
        rows: rows with "prompt", "completion" and "label", true or false.
        skip_bad_rows: leave out prompts with answers of one label only, listed in .bad_rows, instead of raising.

    Raises: DataError for a label that is not true or false, and for a prompt whose answers have all the same label.
    """
    answers: dict[str, tuple[list[int], list[int]]] = {}
    for i, row in enumerate(rows):
        if not isinstance(row["label"], bool) or "prompt" not in row:
            raise DataError(
                f"{rows.sources[i]}: label is {show_value(row['label'])}, expected true or false beside a prompt and a completion"
            )
        answers.setdefault(json.dumps(row["prompt"], sort_keys=True), ([], []))[row["label"]].append(i)
    bad_rows = list(rows.bad_rows)
    pairs: list[Row] = []
    sources: list[str] = []
    for bad, good in answers.values():
        if not bad or not good:
            first = rows.sources[(bad or good)[0]]
            reason = f"all {len(bad or good)} answers to its prompt have the label {bool(good)}: a pair needs a good and a bad one"
            if not skip_bad_rows:
                raise DataError(f"{first}: {reason}; add the other, or skip such rows (--data.skip-bad-rows)")
            bad_rows.append(BadRow(source=first, reason=reason))
        for k in range(max(len(bad), len(good)) if bad and good else 0):
            better, worse = good[k % len(good)], bad[k % len(bad)]
            rest = {name: value for name, value in rows[better].items() if name not in ("completion", "label")}
            pairs.append({**rest, "chosen": rows[better]["completion"], "rejected": rows[worse]["completion"]})
            sources.append(f"{rows.sources[better]} and {rows.sources[worse]}")
    return LoadedRows(rows=tuple(pairs), sources=tuple(sources), bad_rows=tuple(bad_rows))


def prepare_preference_pair(
    tokenizer: PreTrainedTokenizerBase,
    row: Mapping[str, Any],
    *,
    to_turn_end: bool = True,
    whole_answers: bool = False,
    max_length: int | None = None,
    **template_kwargs: Any,
) -> PreferencePair:
    """Make a pair of a row of load_preference_pairs, with its arguments.

    Args:
        whole_answers: False = loss_mask is 1 at the last token alone, where a reward model's score is read; True = at all tokens of the
            answer, whose log-probs losses of preferences compare.

    Raises: DataError for a row of another form, an empty chosen answer, or two answers that are the same.
    """
    rest = dict(row)
    missing = [name for name in ("chosen", "rejected") if rest.get(name) is None]
    if missing:
        raise DataError(f"the row has the fields {sorted(rest)}, expected 'chosen' and 'rejected' among them")
    answers = [rest.pop(name) for name in ("chosen", "rejected")]
    prompt, margin = rest.pop("prompt", None), rest.pop("margin", None)
    references = [rest.pop(name, None) for name in REFERENCE_COLUMNS]
    for name, value in zip(("margin", *REFERENCE_COLUMNS), (margin, *references), strict=True):
        if value is not None and not is_finite_number(value):
            raise DataError(f"{name} is {show_value(value)}, expected a number, or no such field")
    if len(alone := [name for name, value in zip(REFERENCE_COLUMNS, references, strict=True) if value is not None]) == 1:
        raise DataError(f"the row has {alone[0]} alone, expected {' and '.join(REFERENCE_COLUMNS)}, or neither")
    samples: list[Sample] = []
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        try:
            sample = _prepare_answer(tokenizer, prompt, answer, max_length, **template_kwargs)
            if name == "chosen":
                _check_says_something(answer)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        judged = cut_behind_answer(sample) if whole_answers else read_at_the_end(sample, to_turn_end=to_turn_end)
        samples.append(replace(judged, metadata=rest))
    if samples[0].tokens == samples[1].tokens:
        raise DataError(f"chosen and rejected are the same {len(samples[0].tokens)} tokens: there is nothing to learn from the pair")
    chosen, rejected = references
    known = None if chosen is None or rejected is None else (float(chosen), float(rejected))
    return PreferencePair(samples[0], samples[1], 0.0 if margin is None else float(margin), known)


def _prepare_answer(tokenizer: PreTrainedTokenizerBase, prompt: Any, answer: Any, max_length: int | None, **template_kwargs: Any) -> Sample:
    example = _as_example(prompt, answer)
    return prepare_sft_sample(tokenizer, example, max_length=max_length, last_assistant_only="messages" in example, **template_kwargs)


def _check_says_something(answer: Any) -> None:
    """Raise DataError for a preferred answer without text and calls of tools: the model would learn to say nothing."""
    last = answer if isinstance(answer, str) else read_messages(answer, "the answer")[-1]
    if not (last.strip() if isinstance(last, str) else (last.content or "").strip() or last.tool_calls):
        raise DataError("the preferred answer is empty: from it the model learns to say nothing; give its text, or leave the row out")


def cut_behind_answer(sample: Sample) -> Sample:
    """Return a supervised sample without the tokens behind its last trained one, which no loss reads."""
    trained = [t for t, mask in enumerate(sample.loss_mask) if mask > 0]
    assert trained, "no token of the sample has loss_mask > 0: there is no answer in it"
    return replace(sample, tokens=sample.tokens[: trained[-1] + 1], loss_mask=sample.loss_mask[: trained[-1] + 1])


def read_at_the_end(sample: Sample, *, to_turn_end: bool = True) -> Sample:
    """Return a supervised sample as one answer of a pair: loss_mask is 1 at its last token alone.

    Args:
        to_turn_end: True = the last token of the answer itself, and the sample is cut behind it; False = the last token of the sample.
    """
    trained = [t for t, mask in enumerate(sample.loss_mask) if mask > 0]
    assert trained, "no token of the sample has loss_mask > 0: there is no answer in it"
    end = trained[-1] + 1 if to_turn_end else len(sample.tokens)
    return replace(sample, tokens=sample.tokens[:end], loss_mask=(*(0.0,) * (end - 1), 1.0))


def _as_example(prompt: Any, answer: Any) -> Mapping[str, Any]:
    """Return the example for prepare_sft_sample. Answers may repeat the prompt, as in many data sets."""
    content = None if prompt is None else parse_prompt_content(prompt)
    if isinstance(answer, str):
        if content is None:
            raise DataError("the answer is a text, and the row has no 'prompt': give one, or conversations as lists of messages")
        return {"prompt": content, "completion": answer}
    if not isinstance(answer, Sequence):
        raise DataError(f"the answer is {show_value(answer)} ({type(answer).__name__}), expected a text, or a list of messages")
    messages = read_messages(answer, "the answer")
    if messages[-1].role != "assistant":
        raise DataError(f"the conversation ends with a message of the role {messages[-1].role}, expected assistant, whose answer is judged")
    asked = (Message(role="user", content=content),) if isinstance(content, str) else content or ()
    if messages[: len(asked)] == asked:
        return {"messages": messages}
    if len(messages) > 1:
        raise DataError(
            f"the answer is {len(messages)} messages that do not begin with the prompt: give the assistant's alone, or the conversation "
            "without 'prompt'"
        )
    return {"messages": (*asked, *messages)}
