"""Contexts of teachers: a prompt with more than the policy was told, and the way of numbers from such rows back to those of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.collate import collate_samples
from rollouts.data.samples import describe_sample
from rollouts.errors import ConfigError, DataError
from rollouts.types import KeptTokens, Message, PromptContent, Sample, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class TeacherContext:
    """Text that a teacher reads before a response in place of the prompt: with the answer, a hint, or the feedback of the reward."""

    template: str  # text with {prompt} and names of a row's fields in braces, such as "{prompt}\nThe answer is {answer}."; {feedback} is
    # the reason that the reward function gave, {response} the policy's own response
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of the chat template, as in rollouts

    def __post_init__(self) -> None:
        check_context(self.template)

    def describe(self, sample: Sample) -> PromptContent:
        """Return the prompt of a sample with its fields; in a conversation its last message of the user changes.

        Raises: DataError if the sample lacks a field, or its prompt has no message of the user.
        """
        if isinstance(sample.prompt, str):
            return self._fill(sample, sample.prompt)
        places = [i for i, message in enumerate(sample.prompt) if message.role == "user"]
        if not places:
            raise DataError(f"{describe_sample(sample)} has no message of the user, which the template of the teacher would change")
        messages = list(sample.prompt)
        last = messages[places[-1]]
        messages[places[-1]] = replace(last, content=self._fill(sample, last.content or ""))
        return tuple[Message, ...](messages)

    def _fill(self, sample: Sample, prompt: str) -> str:
        details = sample.reward_details
        known = {**sample.metadata, "prompt": prompt, "response": sample.response, "feedback": "" if details is None else details.reason}
        missing = [name for name in _FIELD.findall(self.template) if known.get(name) is None]
        if missing:
            raise DataError(
                f"{describe_sample(sample)} has no field {missing[0]!r}, or it is null, which the template of the teacher names; it has "
                f"{', '.join(str(name) for name, value in known.items() if value is not None)}"
            )
        return _FIELD.sub(lambda found: str(known[found.group(1)]), self.template)


def find_context_fields(template: str) -> frozenset[str]:
    """Return the fields of a row that a template of a teacher names, besides those that every sample has."""
    return frozenset(_FIELD.findall(template)) - {"prompt", "response", "feedback"}


def check_context(template: str) -> None:
    """Raise ConfigError for a template of a teacher that leaves the prompt out, or adds nothing to it."""
    if "{prompt}" not in template or template.strip() == "{prompt}":
        raise ConfigError(
            f"the teacher's context is {template!r}, expected a text with {{prompt}} and more, such as '{{prompt}} Answer: {{answer}}'"
        )


def add_context(
    context: TeacherContext, batch: TrainBatch, samples: Sequence[Sample], rows: Sequence[int], max_tokens: int | None = None
) -> tuple[TrainBatch, list[int]]:
    """Return the batch as a teacher with a context reads it, and how many tokens later each row's response begins in it.

    Args:
        max_tokens: most tokens of a row that the teacher's model reads; None = no limit, or not known.

    Raises: DataError for a row that is not one prompt and what the policy wrote behind it, or is too long with the context.
    """
    tokenized: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def tokenize(content: PromptContent) -> tuple[int, ...]:
        key = (content,)
        if key not in tokenized:
            tokenized[key] = tokenize_prompt(context.tokenizer, content, **context.template_kwargs)
        return tokenized[key]

    trained, read, shifts = set(rows), list[Sample](), list[int]()
    for row, sample in enumerate(samples):
        length = int(batch.lengths[row])
        tokens, mask = tuple(batch.tokens[row, :length].tolist()), tuple(batch.loss_mask[row, :length].tolist())
        kept = sample.kept_tokens
        if row in trained:
            own = tokenize(sample.prompt)
            if tokens[: len(own)] != own or any(mask[: len(own)]) or sample.context_starts:
                raise DataError(
                    f"{describe_sample(sample)} does not begin with the tokens of its prompt, which the teacher's context replaces: a "
                    "context is for answers to single prompts, not for episodes; and the chat template and its arguments must be those of "
                    "the rollouts"
                )
            longer = tokenize(context.describe(sample))
            tokens, mask = longer + tokens[len(own) :], (0.0,) * len(longer) + mask[len(own) :]
            if max_tokens is not None and len(tokens) > max_tokens:
                raise DataError(
                    f"{describe_sample(sample)} has {len(tokens)} tokens with the teacher's context ({len(longer)} before the response), "
                    f"more than the {max_tokens} that the teacher's model reads: shorten the context, or the responses"
                )
            if kept is not None:  # the teacher's log-probs run over the sets that the policy's do
                kept = KeptTokens.undrawn(len(longer)) + kept.cut(len(own), length)
            shifts.append(len(longer) - len(own))
        else:
            kept = None if kept is None else kept.cut(0, length)
            shifts.append(0)
        read.append(Sample(tokens=tokens, loss_mask=mask, temperature=sample.temperature, group_index=sample.group_index, kept_tokens=kept))
    collated = collate_samples(read)
    return replace(collated, trainable=batch.trainable, temperatures=batch.temperatures, skip_redundant=batch.skip_redundant), shifts


def shift_back(found: Tensor, batch: TrainBatch, rows: Sequence[int], shifts: Sequence[int]) -> Tensor:
    """Return numbers # [B, T', ...] of rows with a context at the tokens of the batch # [B, T, ...]; 0 before a context's end."""
    if not any(shifts):
        return found[:, : batch.tokens.shape[1]]
    out = torch.zeros((*batch.tokens.shape, *found.shape[2:]), dtype=found.dtype)
    for row in rows:
        length, shift = int(batch.lengths[row]), shifts[row]
        begin = int((batch.loss_mask[row, :length] > 0).nonzero()[0])
        out[row, begin:length] = found[row, begin + shift : length + shift]
    return out
