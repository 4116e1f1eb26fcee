"""Conversations and prompts to tokens, with a loss mask that is 1 exactly on the tokens that the model has to produce itself.

The tokenizer's chat template renders a conversation once, as a whole, and the text is tokenized once. The characters that an assistant
message generates are located in the text and mapped to tokens by their offsets. If the template marks them by {% generation %}, the marks
are used. Otherwise they are the difference between two beginnings of the conversation: the messages before the assistant message with the
generation prompt, and the messages up to and including it. A template that renders a beginning differently from the whole is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rollouts.errors import DataError
from rollouts.types import Message, PromptContent, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Messages: TypeAlias = "Sequence[Message | Mapping[str, Any]]"
OnOverflow: TypeAlias = Literal["error", "truncate"]


@dataclass(frozen=True, kw_only=True)
class TokenizedConversation:
    """A conversation as the model sees it."""

    tokens: tuple[int, ...]
    loss_mask: tuple[float, ...]  # 1 on tokens that an assistant message generates, its end-of-turn token included; else 0
    spans: tuple[tuple[int, int], ...]  # stretches [start, end) of tokens where loss_mask is 1, in order
    truncated: bool = False  # whether the end was cut to fit max_length


def parse_messages(data: Any, where: str = "conversation") -> tuple[Message, ...]:
    """Convert message dicts in the OpenAI chat format to Messages. Keys whose value is None count as missing.

    Args:
        data: a sequence of Messages or mappings with "role", and "content" and/or "tool_calls".
        where: place of the data in error messages, for example file and line.

    Raises: DataError for anything else, naming the message by its position.
    """
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Sequence):
        found = "null" if data is None else f"{data!r:.60} ({type(data).__name__})"
        raise DataError(f"{where}: found {found}, expected a list of {{'role': ..., 'content': ...}}")
    if not data:
        raise DataError(f"{where}: the list of messages is empty, expected at least one message")
    return tuple(_parse_message(message, f"{where}: message {i}") for i, message in enumerate(data))


def _parse_message(data: Any, where: str) -> Message:
    if isinstance(data, Message):
        return data
    if not isinstance(data, Mapping):
        raise DataError(f"{where} is a {type(data).__name__}, expected an object with 'role' and 'content'")
    values = {key: value for key, value in data.items() if value is not None}
    unknown = sorted(map(str, set(values) - {"role", "content", "name", "tool_calls", "tool_call_id"}))
    if unknown:
        raise DataError(
            f"{where} has the unknown keys {unknown}; known are role, content, name, tool_calls, tool_call_id. Rename or remove them."
        )
    for key in ("role", "content", "name", "tool_call_id"):
        if not isinstance(values.get(key, ""), str):
            raise DataError(f"{where}: {key} is {values[key]!r}, expected a string")
    if not values.get("role"):
        raise DataError(f"{where} has no role; its keys are {sorted(map(str, data))}")
    calls = values.get("tool_calls")
    if calls is not None and (not isinstance(calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{where}: tool_calls is {calls!r}, expected a list of objects")
    if "content" not in values and not calls:
        raise DataError(f"{where} has neither content nor tool_calls")
    return Message.from_dict(values)


def parse_prompt_content(data: Any, where: str = "prompt") -> PromptContent:
    """Return a prompt's content from a str or a list of messages. Raises DataError for anything else and for an empty str."""
    if not isinstance(data, str):
        return parse_messages(data, where)
    if not data:
        raise DataError(f"{where} is an empty string: a model needs at least one token to go on from")
    return data


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, content: PromptContent | Messages, **template_kwargs: Any) -> tuple[int, ...]:
    """Tokenize a prompt.

    Args:
        content: a str is tokenized as it stands, with the special tokens that the tokenizer puts before a text (never an end of text
            behind it); messages go through the chat template with add_generation_prompt=True.
        template_kwargs: passed on to the chat template, for example enable_thinking=False or tools=[...].

    Raises: DataError if there is no chat template, the template refuses the messages, or nothing is left to tokenize.
    """
    if isinstance(content, str):
        tokens: list[int] = tokenizer(content, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
        if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id and not content.endswith(str(tokenizer.eos_token)):
            tokens = tokens[:-1]
    else:
        text = render_messages(tokenizer, parse_messages(content, "prompt"), add_generation_prompt=True, template_kwargs=template_kwargs)
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    if not tokens:
        raise DataError(f"the prompt {content!r} has no tokens: a model needs at least one token to go on from")
    return tuple(tokens)


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_length: int | None = None,
    on_overflow: OnOverflow = "error",
    last_assistant_only: bool = False,
    **template_kwargs: Any,
) -> TokenizedConversation:
    """Tokenize a conversation and mark the tokens that its assistant messages generate.

    tokens equal tokenizer.apply_chat_template(messages). The mask of an assistant message begins where the generation prompt ends, which
    is where generation begins, and includes its end-of-turn token, but not the whitespace that a template puts behind a special
    end-of-turn token. A token that joins whitespace of the prompt with the first characters of the message counts as the message's.

    Args:
        messages: at least one of them from the assistant. Without {% generation %} in the template, not the first one.
        tools: JSON schemas for the template.
        max_length: most tokens; None = no limit.
        on_overflow: what to do with a longer conversation: "error", or "truncate" its end.
        last_assistant_only: train on the last assistant message alone. For templates that rewrite history, such as those that drop the
            thinking of earlier turns; each earlier turn then needs a conversation that ends with it.
        template_kwargs: passed on to the chat template.

    Raises: DataError if there is no chat template or assistant message, the template refuses the messages or rewrites history, the
        conversation is too long, or no token would be trained on.
    """
    conversation = parse_messages(messages)
    assistant = [i for i, message in enumerate(conversation) if message.role == "assistant"]
    if not assistant:
        raise DataError(f"the conversation has no assistant message to train on; its roles are {[m.role for m in conversation]}")
    if tools is not None:
        template_kwargs = {**template_kwargs, "tools": [dict(tool) for tool in tools]}
    text = render_messages(tokenizer, conversation, template_kwargs=template_kwargs)
    if last_assistant_only:
        assistant = assistant[-1:]
    char_spans = _find_marked_spans(tokenizer, conversation, text, template_kwargs)
    if char_spans is None:
        char_spans = [_find_span(tokenizer, conversation, i, text, template_kwargs) for i in assistant]
    elif last_assistant_only:
        begin, _ = _find_span(tokenizer, conversation, assistant[0], text, template_kwargs)
        char_spans = [span for span in char_spans if span[0] >= begin]
    tokens, offsets = tokenize_with_offsets(tokenizer, text)
    special = special_ids(tokenizer)
    spans = [_to_token_span(span, tokens, offsets, text, special) for span in char_spans]
    spans = [(start, end) for start, end in spans if start < end]
    if not spans:
        raise DataError(
            f"no token of the conversation ({len(tokens)} tokens, {len(assistant)} assistant messages) would be trained on: the chat "
            "template marks nothing by {% generation %}, or the assistant messages are empty"
        )
    return _fit_length(tokens, spans, max_length, on_overflow)


def compute_loss_mask(num_tokens: int, spans: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Return a mask of 1 on the tokens inside the spans [start, end) and 0 elsewhere.

    Asserts: spans lie in [0, num_tokens].
    """
    mask = [0.0] * num_tokens
    for start, end in spans:
        assert 0 <= start <= end <= num_tokens, f"span ({start}, {end}) does not lie in the {num_tokens} tokens"
        mask[start:end] = [1.0] * (end - start)
    return tuple(mask)


def prepare_sft_sample(
    tokenizer: PreTrainedTokenizerBase,
    example: Messages | Mapping[str, Any],
    *,
    index: int = 0,
    max_length: int | None = None,
    on_overflow: OnOverflow = "error",
    last_assistant_only: bool = False,
    **template_kwargs: Any,
) -> Sample:
    """Create a supervised Sample from messages, from a prompt and its completion, or from a text.

    Args:
        example: a list of messages, or {"messages": [...]}, or {"prompt": ..., "completion": ...}, or {"text": ...}, all of which is
            trained on, its end of text included; other keys become metadata, except "tools", which goes to the template. A str prompt
            is tokenized by tokenize_prompt and its completion behind it, followed by the end-of-text token; a prompt of messages and
            its completion (str or messages) are one conversation, trained on the completion alone, so that must be a single message.
        index: index of the Sample, also its group_index.
        max_length, on_overflow, last_assistant_only, template_kwargs: see tokenize_conversation.

    Returns: a COMPLETED Sample (TRUNCATED if cut) without a reward.
    Raises: DataError, see tokenize_conversation.
    """
    fields: dict[str, Any] = dict(example) if isinstance(example, Mapping) else {"messages": example}
    tools = fields.pop("tools", None)
    if "messages" in fields:
        conversation = parse_messages(fields.pop("messages"))
    elif "prompt" in fields and "completion" in fields:
        prompt, completion = parse_prompt_content(fields.pop("prompt")), fields.pop("completion")
        if isinstance(prompt, str):
            tokenized = _tokenize_completion(tokenizer, prompt, completion, max_length, on_overflow)
            return _sft_sample(tokenized, prompt, completion, index, fields)
        answer = (Message(role="assistant", content=completion),) if isinstance(completion, str) else parse_messages(completion)
        if len(answer) != 1 or answer[0].role != "assistant":
            raise DataError(
                f"the completion has the roles {[m.role for m in answer]}, expected one assistant message; pass all as 'messages'"
            )
        conversation, last_assistant_only = prompt + answer, True
    elif "text" in fields:
        text = fields.pop("text")
        return _sft_sample(_tokenize_text(tokenizer, text, max_length, on_overflow), "", text, index, fields)
    else:
        raise DataError(f"the example has the keys {sorted(fields)}, expected 'messages', or 'prompt' and 'completion', or 'text'")
    tokenized = tokenize_conversation(
        tokenizer,
        conversation,
        tools=tools,
        max_length=max_length,
        on_overflow=on_overflow,
        last_assistant_only=last_assistant_only,
        **template_kwargs,
    )
    last = max(i for i, message in enumerate(conversation) if message.role == "assistant")
    return _sft_sample(tokenized, conversation[:last], conversation[last].content or "", index, fields)


def _tokenize_completion(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: Any, max_length: int | None, on_overflow: OnOverflow
) -> TokenizedConversation:
    if not isinstance(completion, str):
        raise DataError(f"the completion of a plain prompt is a {type(completion).__name__}, expected a string")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token, so a completion would never end: set tokenizer.eos_token")
    prompt_tokens = tokenize_prompt(tokenizer, prompt)
    output: list[int] = tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    tokens = [*prompt_tokens, *output, int(tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]
    return _fit_length(tokens, [(len(prompt_tokens), len(tokens))], max_length, on_overflow)


def _tokenize_text(tokenizer: PreTrainedTokenizerBase, text: Any, max_length: int | None, on_overflow: OnOverflow) -> TokenizedConversation:
    """Tokenize a text with its end of text, all of it to be trained on but its first token, which nothing predicts."""
    if not isinstance(text, str) or not text:
        raise DataError(f"the text is {text!r:.60}, expected a string that is not empty")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token, so a text would never end: set tokenizer.eos_token")
    tokens = [*tokenize_prompt(tokenizer, text), int(tokenizer.eos_token_id)]  # pyright: ignore[reportArgumentType]
    return _fit_length(tokens, [(1, len(tokens))], max_length, on_overflow)


def _sft_sample(tokenized: TokenizedConversation, prompt: PromptContent, response: str, index: int, metadata: Mapping[str, Any]) -> Sample:
    return Sample(
        prompt=prompt,
        tokens=tokenized.tokens,
        loss_mask=tokenized.loss_mask,
        response=response,
        status=Status.TRUNCATED if tokenized.truncated else Status.COMPLETED,
        index=index,
        group_index=index,
        metadata=dict(metadata),
    )


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Give a tokenizer without a pad token its end-of-text token as pad token, with a warning.

    The end of text is still trained on: loss masks go by position, never by token id.

    Returns: the pad id.
    Raises: DataError if there is no end-of-text token either.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has neither a pad nor an end-of-text token: set tokenizer.pad_token to a token that it has")
        warnings.warn(f"the tokenizer has no pad token; its end-of-text token {tokenizer.eos_token!r} is used for padding", stacklevel=2)
        tokenizer.pad_token = tokenizer.eos_token
    return int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]


def render_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Render messages to text with the chat template. Raises DataError if there is no template, or it refuses them."""
    from jinja2 import TemplateError, TemplateSyntaxError

    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in template_kwargs:
        raise DataError(
            "the tokenizer has no chat template, so messages cannot become text: set tokenizer.chat_template, use the tokenizer of an "
            "instruction-tuned model, or give plain texts: a str as the prompt, in rows the columns prompt and completion (questions with "
            "answers are read so with --data.columns prompt=question,completion=answer,ground_truth=answer)"
        )
    chat = [message.to_dict() for message in messages]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs)
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not a template of Jinja, at its line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, ValueError) as error:
        roles = [message.role for message in messages]
        raise DataError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
    return str(text)


def _find_marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, template_kwargs: Mapping[str, Any]
) -> list[tuple[int, int]] | None:
    """Return the character spans inside {% generation %} blocks; None if the template has none.

    The tags are replaced by ones that print a mark at each edge, which keeps the whitespace control of the tags. transformers' own
    return_assistant_tokens_mask gives up silently at a block whose first character belongs to no token.
    """
    options = dict(template_kwargs)
    template = str(tokenizer.get_chat_template(options.pop("chat_template", None), options.get("tools")))
    opening, closing = r"\{%(-?)\s*generation\s*(-?)%\}", r"\{%(-?)\s*endgeneration\s*(-?)%\}"
    if not re.search(opening, template):
        return None
    start_mark, end_mark = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in text][:2]  # noncharacters of Unicode
    marked = re.sub(opening, rf"{{%\1 if true %}}{{{{ '{start_mark}' }}}}{{% if true \2%}}", template)
    marked = re.sub(closing, rf"{{%\1 endif %}}{{{{ '{end_mark}' }}}}{{% endif \2%}}", marked)
    rendered = render_messages(tokenizer, messages, template_kwargs={**options, "chat_template": marked})
    if rendered.replace(start_mark, "").replace(end_mark, "") != text:
        raise DataError(
            "the {% generation %} blocks of the chat template cannot be located in its output: simplify the template around them"
        )
    spans: list[tuple[int, int]] = []
    position = start = 0
    for part in re.split(f"([{start_mark}{end_mark}])", rendered):
        if part == start_mark:
            start = position
        elif part == end_mark:
            spans.append((start, position))
        else:
            position += len(part)
    return spans


def _find_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], i: int, text: str, template_kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the characters [start, end) of text that assistant message i generates, by prefix difference."""
    if i == 0:
        raise DataError(
            "the conversation begins with an assistant message, and without {% generation %} in the chat template nothing tells where it "
            "begins: put a system or user message before it"
        )
    before = render_messages(tokenizer, messages[:i], add_generation_prompt=True, template_kwargs=template_kwargs)
    after = render_messages(tokenizer, messages[: i + 1], template_kwargs=template_kwargs)
    for name, prefix in (("the messages before it with the generation prompt", before), ("the messages up to and including it", after)):
        if not text.startswith(prefix):
            at = next((k for k, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), len(text))
            raise DataError(
                f"the chat template renders {name} differently from the same part of the whole conversation (message {i}, assistant): "
                f"{prefix[at : at + 40]!r} against {text[at : at + 40]!r}. Make each answer a row of its own, with the messages before "
                "it as 'prompt' and the answer as 'completion' (in Python also: last_assistant_only=True), or mark the generated text in "
                "the template by {% generation %}"
            )
    if len(after) <= len(before):
        raise DataError(f"the chat template renders nothing for the assistant message {i}: {messages[i].content!r}")
    return len(before), len(after)


def tokenize_with_offsets(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a text's tokens, none added at its edges, and their characters [start, end). Raises DataError for a slow tokenizer."""
    if not tokenizer.is_fast:
        raise DataError(f"{type(tokenizer).__name__} cannot tell which characters a token covers: use the fast version of this tokenizer")
    encoded: Mapping[str, Any] = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokenizer's special tokens, such as those that end a turn."""
    added: Mapping[int, Any] = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _to_token_span(
    span: tuple[int, int], tokens: Sequence[int], offsets: Sequence[tuple[int, int]], text: str, special: frozenset[int]
) -> tuple[int, int]:
    """Return the range of tokens that begin inside the characters [start, end), cut behind a special token that ends them.

    A token begins where the one before it ends: byte-level tokenizers report offsets without a token's leading space.
    """
    inside: list[int] = []
    begin = 0
    for k, (start, end) in enumerate(offsets):
        begin = min(start, begin)
        straddles = begin < span[0] < end and not text[begin : span[0]].strip() and text[span[0] : end].strip()
        if span[0] <= begin < span[1] or straddles:
            inside.append(k)
        begin = max(begin, end)
    if not inside:
        return 0, 0
    first, last = inside[0], inside[-1]
    end = last
    while end > first and tokens[end] not in special and not text[slice(*offsets[end])].strip():
        end -= 1
    return first, (end if tokens[end] in special else last) + 1


def _fit_length(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], max_length: int | None, on_overflow: OnOverflow
) -> TokenizedConversation:
    assert max_length is None or max_length >= 1, f"max_length is {max_length}, expected at least 1"
    assert on_overflow in ("error", "truncate"), f"on_overflow is {on_overflow!r}, expected 'error' or 'truncate'"
    truncated = max_length is not None and len(tokens) > max_length
    if max_length is not None and truncated:
        if on_overflow == "error":
            raise DataError(
                f"the conversation has {len(tokens)} tokens, more than max_length {max_length}: raise max_length, drop the "
                "conversation, or cut its end by on_overflow='truncate'"
            )
        tokens, spans = tokens[:max_length], [(start, min(end, max_length)) for start, end in spans if start < max_length]
        if not spans:
            raise DataError(
                f"truncated to max_length {max_length}, the conversation has no token left to train on: raise max_length or drop it"
            )
    return TokenizedConversation(
        tokens=tuple(tokens), loss_mask=compute_loss_mask(len(tokens), spans), spans=tuple(spans), truncated=truncated
    )
