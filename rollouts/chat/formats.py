"""Formats that turn a growing conversation into text: with a tokenizer's chat template (ChatFormat) or without one (TextFormat).

Tokens that a model has seen and written cannot be taken back, so only the text that a message ADDS is ever tokenized. It is found in the
template's own output: the template renders the whole conversation, and the text behind the known part is new. If the known part has
changed, the template has rewritten history (some drop the thinking of earlier turns), and there is no such addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollouts.chat.tokenize import render_messages, special_ids, tokenize_prompt, tokenize_with_offsets
from rollouts.errors import DataError
from rollouts.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_QUESTION, _ANSWER, _FOLLOW_UP = "firstprobe", "secondprobe", "thirdprobe"


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Text that further messages add to a conversation that ends with the model's answer."""

    text: str  # from behind the answer and its ending to the model's next answer; not tokenized yet
    rendered: str  # the whole conversation, rendered by the template
    as_sampled: bool = True  # whether the template shows the answer as the model wrote it; False: it tidied the text up, not the tokens


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """A history that differs from the one that the model saw."""

    rendered: str  # the whole conversation, as the template renders it now
    where: str  # message and place of the difference, in words


class ConversationFormat(Protocol):
    """Chat format as transcripts use it. See ChatFormat and TextFormat."""

    @property
    def ending(self) -> str:
        """Text behind every answer, its end-of-turn token first; "" = none."""
        ...

    @property
    def end_of_turn(self) -> int | None:
        """Id of the special token that ends an answer; None = there is none."""
        ...

    def open(self, messages: Sequence[Message]) -> str:
        """Return the text from which the model goes on."""
        ...

    def tokenize_opening(self, text: str) -> tuple[int, ...]:
        """Return the tokens at the beginning of a context."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that follows others."""
        ...

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without its ending."""
        ...

    def find_missing_ending(self, tokens: Sequence[int]) -> str:
        """Return the missing part of the ending behind an answer's tokens: the model may have written some of it, or been cut."""
        ...

    def extend(self, rendered: str, messages: Sequence[Message], new: Sequence[Message]) -> Continuation | Rewriting:
        """Return the text that new messages add.

        Args:
            rendered: the text that the model answered.
            messages: the messages so far, the answer last.
            new: the messages that follow it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """A tokenizer's chat template. Create it with create_chat_format, which checks that the template is usable."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ending: str = ""  # text that the template puts behind an answer
    ending_tokens: tuple[int, ...] = ()  # tokens of `ending`
    ending_edges: tuple[int, ...] = ()  # end of each of these tokens, in characters of `ending`
    special: frozenset[int] = frozenset()  # ids of the tokenizer's special tokens

    @property
    def end_of_turn(self) -> int | None:
        """Id of the first special token of the ending."""
        return next((token for token in self.ending_tokens if token in self.special), None)

    def open(self, messages: Sequence[Message]) -> str:
        """Return the messages with the generation prompt. Raises DataError if the template refuses them."""
        return render_messages(self.tokenizer, messages, add_generation_prompt=True, template_kwargs=self.template_kwargs)

    def tokenize_opening(self, text: str) -> tuple[int, ...]:
        """Return the tokens of rendered text; no special token is added to those of the template."""
        return _tokenize(self.tokenizer, text)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of rendered text behind an answer, equal to those in the whole text."""
        return _tokenize_behind(self.tokenizer, self.end_of_turn, text)

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Return the text without the special tokens, or the part of the ending, at its end."""
        end = _skip_special(tokens, self.special)
        return _decode(self.tokenizer, tokens[: end if end < len(tokens) else len(tokens) - self._count_written(tokens)])

    def find_missing_ending(self, tokens: Sequence[int]) -> str:
        """Return the ending from behind the end-of-turn token if the model wrote that; the whole ending if the answer was cut."""
        if tokens and tokens[-1] in self.special and tokens[-1] in self.ending_tokens:
            return self.ending[self.ending_edges[self.ending_tokens.index(tokens[-1])] :]
        written = self._count_written(tokens)
        return self.ending[self.ending_edges[written - 1] :] if written else self.ending

    def _count_written(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens of the ending that stand at the end of the answer already."""
        most = min(len(tokens), len(self.ending_tokens))
        return next((n for n in range(most, 0, -1) if tuple(tokens[-n:]) == self.ending_tokens[:n]), 0)

    def extend(self, rendered: str, messages: Sequence[Message], new: Sequence[Message]) -> Continuation | Rewriting:
        """Return the text that the template puts behind the answer. Raises DataError if it leaves a new message out."""
        for message in new:
            if message.role != "user":
                self._check_role(message.role)
        whole = self.open([*messages, *new])
        exact = rendered + (messages[-1].content or "") + self.ending
        if whole.startswith(exact):
            return Continuation(text=whole[len(exact) :], rendered=whole)
        own = render_messages(self.tokenizer, messages, template_kwargs=self.template_kwargs)
        if own.startswith(rendered) and own.endswith(self.ending) and whole.startswith(own):
            return Continuation(text=whole[len(own) :], rendered=whole, as_sampled=False)
        return Rewriting(rendered=whole, where=_describe_difference(exact, whole, messages))

    def _check_role(self, role: str) -> None:
        probe = [_message("user", _QUESTION), _message("assistant", _ANSWER), _message(role, _FOLLOW_UP)]
        if _FOLLOW_UP not in self.open(probe):
            other = "" if role == "user" else ", or observations another role (EpisodeConfig.observation_role = 'user')"
            raise DataError(
                f"the chat template drops messages of the role {role!r}, so the model would not see what it is told: give the tokenizer a "
                f"template that shows them{other}"
            )


def create_chat_format(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> ChatFormat:
    """Create a format for episodes from the tokenizer's chat template, checked on a small conversation.

    Args:
        template_kwargs: for the template, for example {"enable_thinking": False} or {"tools": [...]}.

    Raises: DataError if there is no template; if it has no generation prompt, drops turns, or shows no assistant message; or if the
        tokenizer is a slow one.
    """
    options = dict(template_kwargs or {})
    question, answer, follow_up = _message("user", _QUESTION), _message("assistant", _ANSWER), _message("user", _FOLLOW_UP)
    asked = render_messages(tokenizer, [question], template_kwargs=options)
    prompted = render_messages(tokenizer, [question], add_generation_prompt=True, template_kwargs=options)
    answered = render_messages(tokenizer, [question, answer], template_kwargs=options)
    before, found, ending = answered.partition(_ANSWER)
    if not found:
        raise DataError(f"the chat template renders nothing of an assistant message: of {_ANSWER!r} it made {answered!r}")
    header = before[len(asked) :] if before.startswith(asked) else before
    if prompted == asked and header.strip():
        raise DataError(
            f"the chat template has no generation prompt: with add_generation_prompt=True it ends as without, {prompted[-40:]!r}, while an "
            f"answer begins behind {header!r}. The model would have to write that itself: add `{{% if add_generation_prompt %}}...` to it"
        )
    continued = render_messages(tokenizer, [question, answer, follow_up], add_generation_prompt=True, template_kwargs=options)
    places = [continued.find(text) for text in (_QUESTION, _ANSWER, _FOLLOW_UP)]
    if min(places) < 0 or places != sorted(places):
        missing = [text for text, place in zip(("question", "answer", "next question"), places, strict=True) if place < 0]
        raise DataError(
            f"the chat template drops turns: of a question, an answer and a next question it leaves out {missing or 'their order'}. "
            "Episodes of several turns need a template that shows them all"
        )
    tokens, offsets = tokenize_with_offsets(tokenizer, ending) if ending else ([], [])
    return ChatFormat(
        tokenizer=tokenizer,
        template_kwargs=options,
        ending=ending,
        ending_tokens=tuple(tokens),
        ending_edges=tuple(end for _, end in offsets),
        special=special_ids(tokenizer),
    )


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Format without a template: the plain contents of messages, with a separator around those between two actions of the model."""

    tokenizer: PreTrainedTokenizerBase
    separator: str = "\n"
    special: frozenset[int] = frozenset()  # ids of the tokenizer's special tokens
    before: int | None = None  # id of the special token behind which texts are tokenized: the end of text
    ending: str = ""
    end_of_turn: int | None = None

    def open(self, messages: Sequence[Message]) -> str:
        """Return the contents, with separators between them."""
        return self.separator.join(message.content or "" for message in messages)

    def tokenize_opening(self, text: str) -> tuple[int, ...]:
        """Return the tokens, with those that the tokenizer puts before a text. Raises DataError for an empty text."""
        return tokenize_prompt(self.tokenizer, text)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the text, without those that only begin texts."""
        return _tokenize_behind(self.tokenizer, self.before, text)

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Return the text without special tokens at its end."""
        return _decode(self.tokenizer, tokens[: _skip_special(tokens, self.special)])

    def find_missing_ending(self, tokens: Sequence[int]) -> str:
        """Return "": an answer has no ending."""
        return ""

    def extend(self, rendered: str, messages: Sequence[Message], new: Sequence[Message]) -> Continuation:
        """Return the contents of the new messages, a separator before and behind each."""
        texts = [message.content or "" for message in new]
        text = self.separator + "".join(text + self.separator for text in texts if text)
        return Continuation(text=text, rendered=rendered + (messages[-1].content or "") + text)


def create_text_format(tokenizer: PreTrainedTokenizerBase, separator: str = "\n") -> TextFormat:
    """Create a format for models without a chat template."""
    end: Any = tokenizer.eos_token_id
    return TextFormat(tokenizer=tokenizer, separator=separator, special=special_ids(tokenizer), before=end)


def _message(role: str, content: str) -> Message:
    return Message(role=role, content=content)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    if not text:
        return ()
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    return tuple(tokens)


def _tokenize_behind(tokenizer: PreTrainedTokenizerBase, before: int | None, text: str) -> tuple[int, ...]:
    """Return the tokens of a text behind a special token.

    Alone the text could get others: some tokenizers put a space before the beginning of a text, and some special tokens absorb the white
    space behind them.
    """
    if not text or before is None:
        return _tokenize(tokenizer, text)
    first, *tokens = _tokenize(tokenizer, str(tokenizer.convert_ids_to_tokens(before)) + text)
    return tuple(tokens) if first == before else _tokenize(tokenizer, text)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _skip_special(tokens: Sequence[int], special: frozenset[int]) -> int:
    """Return the position at which the special tokens at the end begin."""
    end = len(tokens)
    while end and tokens[end - 1] in special:
        end -= 1
    return end


def _describe_difference(seen: str, now: str, messages: Sequence[Message]) -> str:
    at = next((k for k, (a, b) in enumerate(zip(seen, now, strict=False)) if a != b), min(len(seen), len(now)))
    number, position = 0, 0
    for i, message in enumerate(messages):
        place = seen.find(message.content or "", position)
        if place < 0 or place > at:
            break
        number, position = i, place + len(message.content or "")
    role = messages[number].role
    return f"at message {number} ({role}): {seen[at : at + 40]!r} has become {now[at : at + 40]!r}"
