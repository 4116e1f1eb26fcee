"""Facts about a chat template that decide how a conversation is trained, found by rendering a small one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollouts.chat.tokenize import render_messages, special_ids
from rollouts.errors import DataError
from rollouts.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _ANSWER, _THOUGHT = "One?", "Two.", "<think>\nThree.\n</think>\n\nTwo."


def find_rewriting(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return how a chat template renders an earlier answer otherwise than the last one; None if it keeps the history.

    Templates of models that think often drop the thinking of earlier turns. Rows of several turns then have to be trained turn by turn.

    Returns: None also without a template, or if it refuses the conversation.
    """
    for kind, answer in (("an answer", _ANSWER), ("thinking", _THOUGHT)):
        first = [Message(role="user", content=_QUESTION), Message(role="assistant", content=answer)]
        try:
            before = render_messages(tokenizer, first, template_kwargs={})
            after = render_messages(tokenizer, [*first, Message(role="user", content="Four?")], template_kwargs={})
        except DataError:
            return None
        if not after.startswith(before):
            at = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
            return f"{kind} of an earlier turn: {before[at : at + 30]!r} becomes {after[at : at + 30]!r}"
    return None


def find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the special token with which the chat template ends an answer; None without one."""
    messages = [Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)]
    try:
        text = render_messages(tokenizer, messages, template_kwargs={})
    except DataError:
        return None
    behind = text[text.rfind(_ANSWER) + len(_ANSWER) :] if _ANSWER in text else ""
    special = special_ids(tokenizer)
    tokens: list[int] = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if behind else []  # pyright: ignore[reportAssignmentType]
    return next((token for token in tokens if token in special), None)


def find_fault(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the reason for which a chat template cannot render a question and an answer; None without a fault or without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        render_messages(
            tokenizer, [Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)], template_kwargs={}
        )
    except DataError as error:
        return str(error)
    return None


def describe_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe a chat template in one line: whether there is one, the end of a turn, and the history."""
    if not getattr(tokenizer, "chat_template", None):
        return "none: rows are plain text; rows with messages need one (chat_template.jinja in the model directory)"
    fault = find_fault(tokenizer)
    if fault is not None:
        return f"unusable: {fault}"
    end, rewriting = find_turn_end(tokenizer), find_rewriting(tokenizer)
    ends = "no special token ends a turn" if end is None else f"a turn ends with {tokenizer.convert_ids_to_tokens(end)}"
    if rewriting is None:
        return f"{ends}; history stays as it was"
    return f"{ends}; it rewrites {rewriting}, so rows with several answers need one row for each"
