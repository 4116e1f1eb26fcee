"""Conversations to tokens and masks, over templates shaped like those of real models."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import ALPHABET, create_char_tokenizer
from rollouts.chat.tokenize import (
    compute_loss_mask,
    ensure_pad_token,
    parse_messages,
    prepare_sft_sample,
    tokenize_conversation,
    tokenize_prompt,
)
from rollouts.errors import DataError
from rollouts.types import Message, Status

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_3 = """\
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set think = '' %}{% set answer = m.content or '' %}
{%- if '</think>' in answer %}{% set think = answer.split('</think>')[0].split('<think>')[-1].strip() %}\
{% set answer = answer.split('</think>')[-1].lstrip() %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or think) %}{{- '<think>\n' + think + '\n</think>\n\n' }}{% endif %}
{{- answer }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>' + m.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
GENERATION = """\
{% for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation -%}
        {{- m.content + '<|im_end|>' }}
        {%- endgeneration -%}
        {{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
NO_HEADER_IN_PROMPT = "{% for m in messages %}{{ m.content }}{{ '\n' }}{% endfor %}"

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA_2,
    "llama3": LLAMA_3,
    "qwen3": QWEN_3,
    "generation": GENERATION,
    "plain": NO_HEADER_IN_PROMPT,
}


def create_byte_level_tokenizer():
    """A byte-level BPE with merges across spaces and line ends, as GPT-2 and Qwen have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", *SPECIAL], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = "user assistant system tool hello world is the answer think response [INST] [/INST] what is 1+1? It is 2.\n\n It is 12.\n"
    tokenizer.train_from_iterator([text] * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIAL, clean_up_tokenization_spaces=False
    )


def create_ascii_tokenizer():
    tokenizer = create_char_tokenizer(3 + len(ALPHABET))
    tokenizer.add_special_tokens({"bos_token": "<s>", "extra_special_tokens": SPECIAL})
    return tokenizer


TOKENIZERS = {"bytes": create_byte_level_tokenizer(), "characters": create_ascii_tokenizer()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    tokenizer = TOKENIZERS[request.param]
    before = tokenizer.chat_template
    yield tokenizer
    tokenizer.chat_template = before


def chat(*turns: str) -> list[dict[str, str]]:
    """Messages from "role: content" strings."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def trained_texts(tokenizer, conversation) -> list[str]:
    return [tokenizer.decode(conversation.tokens[start:end]) for start, end in conversation.spans]


def check_conversation(tokenizer, messages, conversation, **kwargs):
    """Check the properties of every tokenized conversation."""
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, **kwargs)["input_ids"]
    assert list(conversation.tokens) == rendered
    assert conversation.loss_mask == compute_loss_mask(len(conversation.tokens), conversation.spans)
    assert sum(conversation.loss_mask) == sum(end - start for start, end in conversation.spans) > 0


TWO_TURNS = chat("user: what is 1+1?", "assistant: It is 2.", "user: and 6+6?", "assistant: It is 12.")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["It is 2.<|im_end|>", "It is 12.<|im_end|>"]),
        (LLAMA_2, [" It is 2. {eos}", " It is 12. {eos}"]),
        (LLAMA_3, ["It is 2.<|eot_id|>", "It is 12.<|eot_id|>"]),
        (GENERATION, ["It is 2.<|im_end|>", "It is 12.<|im_end|>"]),
        (NO_HEADER_IN_PROMPT, ["It is 2.\n", "It is 12.\n"]),
    ],
    ids=["chatml", "llama2", "llama3", "generation", "plain"],
)
def test_mask_covers_exactly_what_assistant_messages_generate(tokenizer, template, expected):
    tokenizer.chat_template = template
    conversation = tokenize_conversation(tokenizer, TWO_TURNS)
    check_conversation(tokenizer, TWO_TURNS, conversation)
    assert trained_texts(tokenizer, conversation) == [text.format(eos=tokenizer.eos_token) for text in expected]


WORDS = st.text(alphabet=" 123ais.\n", min_size=1, max_size=8).filter(str.strip)


@given(st.data(), st.sampled_from(["chatml", "llama3", "generation"]), st.sampled_from(sorted(TOKENIZERS)))
def test_spans_in_random_conversations(data, template, name):
    """Contents with leading and trailing spaces and line ends; assistant, tool and user messages in any order after the first."""
    tokenizer = TOKENIZERS[name]
    roles = ["user", *data.draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=5)), "assistant"]
    messages = [{"role": role, "content": data.draw(WORDS)} for role in roles]
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATES[template]
    try:
        conversation = tokenize_conversation(tokenizer, messages)
        check_conversation(tokenizer, messages, conversation)
        prompt = tokenize_prompt(tokenizer, messages[:-1])
        last = conversation.tokens[conversation.spans[-1][0] :]
    finally:
        tokenizer.chat_template = before
    contents = [m["content"].strip() if template == "llama3" else m["content"] for m in messages if m["role"] == "assistant"]
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    for content, trained in zip(contents, trained_texts(tokenizer, conversation), strict=True):
        missing = (content + end).removesuffix(trained)
        assert content + end == missing + trained
        assert not missing.strip(), "only whitespace that melts into a token of the header may be missing"
    if name == "characters":
        assert (*prompt, *last) == conversation.tokens, "what precedes the last span is the prompt at inference"
        assert sum(conversation.loss_mask) == sum(len(content) + 1 for content in contents)


def test_consecutive_assistant_and_tool_messages(tokenizer):
    tokenizer.chat_template = QWEN_3
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "what is 1+1?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n", "tool_calls": [call, call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 2."},
        {"role": "assistant", "content": "<think>\nyes\n</think>\n\nReally."},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    conversation = tokenize_conversation(tokenizer, messages, tools=tools)
    check_conversation(tokenizer, messages, conversation, tools=tools)
    call_text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert trained_texts(tokenizer, conversation) == [
        f"<think>\nhm\n</think>\n\n{call_text}{call_text}<|im_end|>",
        "<think>\nso\n</think>\n\nIt is 2.<|im_end|>",
        "<think>\nyes\n</think>\n\nReally.<|im_end|>",
    ]


def test_template_that_rewrites_history_is_refused_and_the_last_message_still_works(tokenizer):
    tokenizer.chat_template = QWEN_3
    with pytest.raises(DataError, match=r"message 1.*last_assistant_only"):
        tokenize_conversation(tokenizer, TWO_TURNS)
    conversation = tokenize_conversation(tokenizer, TWO_TURNS, last_assistant_only=True)
    check_conversation(tokenizer, TWO_TURNS, conversation)
    assert trained_texts(tokenizer, conversation) == ["<think>\n\n</think>\n\nIt is 12.<|im_end|>"]
    turns = [tokenize_conversation(tokenizer, turn, last_assistant_only=True) for turn in (TWO_TURNS[:2], TWO_TURNS)]
    assert [trained_texts(tokenizer, turn) for turn in turns] == [
        ["<think>\n\n</think>\n\nIt is 2.<|im_end|>"],
        ["<think>\n\n</think>\n\nIt is 12.<|im_end|>"],
    ]


def test_template_arguments_pass_through(tokenizer):
    tokenizer.chat_template = QWEN_3
    conversation = tokenize_conversation(tokenizer, TWO_TURNS, last_assistant_only=True, enable_thinking=False)
    assert trained_texts(tokenizer, conversation) == ["It is 12.<|im_end|>"]
    thinking, without = (tokenize_prompt(tokenizer, TWO_TURNS[:1], enable_thinking=flag) for flag in (True, False))
    assert tokenizer.decode(without[len(thinking) :]) == "<think>\n\n</think>\n\n"


def test_last_assistant_only_with_marked_generations(tokenizer):
    tokenizer.chat_template = GENERATION
    conversation = tokenize_conversation(tokenizer, TWO_TURNS, last_assistant_only=True)
    assert trained_texts(tokenizer, conversation) == ["It is 12.<|im_end|>"]


def test_content_with_leading_space_is_not_lost():
    """transformers' own return_assistant_tokens_mask is silently all zero here before 5.24."""
    tokenizer = TOKENIZERS["bytes"]
    messages = chat("user: what", "assistant:  It is 2.")
    own = tokenizer.apply_chat_template(messages, chat_template=GENERATION, return_dict=True, return_assistant_tokens_mask=True)
    conversation = tokenize_conversation(tokenizer, messages, chat_template=GENERATION)
    assert trained_texts(tokenizer, conversation) == [" It is 2.<|im_end|>"]
    assert sum(own["assistant_masks"]) in (0, sum(conversation.loss_mask))


def test_prompt_that_ends_with_a_space_is_not_trained_on():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = TOKENIZERS["bytes"]
    for content in ("2", "It is 2.", "(12)"):
        conversation = tokenize_conversation(tokenizer, [*TWO_TURNS[:1], {"role": "assistant", "content": content}], chat_template=template)
        (text,) = trained_texts(tokenizer, conversation)
        assert text.strip() == content + "<|im_end|>"
        first = tokenizer.decode(conversation.tokens[conversation.spans[0][0]])
        assert first.strip(), "a token that is only the prompt's space belongs to the prompt"


def test_noncharacters_in_a_message_do_no_harm(tokenizer):
    conversation = tokenize_conversation(tokenizer, chat("user: hi", "assistant: \ufdd0\ufdd1"), chat_template=GENERATION)
    assert trained_texts(tokenizer, conversation) == [tokenizer.decode(tokenizer.encode("\ufdd0\ufdd1<|im_end|>"))]


def test_generation_blocks_that_mark_nothing_are_refused(tokenizer):
    template = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match="no token"):
        tokenize_conversation(tokenizer, TWO_TURNS, chat_template=template)


def test_max_length(tokenizer):
    tokenizer.chat_template = CHATML
    whole = tokenize_conversation(tokenizer, TWO_TURNS)
    n = len(whole.tokens)
    assert tokenize_conversation(tokenizer, TWO_TURNS, max_length=n) == whole
    with pytest.raises(DataError, match=rf"has {n} tokens, more than max_length {n - 1}.*truncate"):
        tokenize_conversation(tokenizer, TWO_TURNS, max_length=n - 1)
    first_start, first_end = whole.spans[0]
    for length in range(first_start + 1, n):
        cut = tokenize_conversation(tokenizer, TWO_TURNS, max_length=length, on_overflow="truncate")
        assert (cut.tokens, cut.loss_mask, cut.truncated) == (whole.tokens[:length], whole.loss_mask[:length], True)
        assert cut.spans[0] == (first_start, min(first_end, length))
        assert all(start < end <= length for start, end in cut.spans)
    with pytest.raises(DataError, match=f"max_length {first_start}, the conversation has no token left"):
        tokenize_conversation(tokenizer, TWO_TURNS, max_length=first_start, on_overflow="truncate")


def test_conversations_that_cannot_be_trained_on_are_refused(tokenizer):
    tokenizer.chat_template = CHATML
    with pytest.raises(DataError, match=r"no assistant message.*\['user'\]"):
        tokenize_conversation(tokenizer, chat("user: hi"))
    with pytest.raises(DataError, match="begins with an assistant message"):
        tokenize_conversation(tokenizer, chat("assistant: hi"))
    with pytest.raises(DataError, match=r"refuses.*alternate"):
        tokenize_conversation(tokenizer, chat("user: a", "user: b", "assistant: c"), chat_template=LLAMA_2)
    assert trained_texts(tokenizer, tokenize_conversation(tokenizer, chat("assistant: hi"), chat_template=GENERATION)) == ["hi<|im_end|>"]


def test_tokenizer_without_chat_template_is_refused_with_advice(tokenizer):
    tokenizer.chat_template = None
    for function in (tokenize_conversation, tokenize_prompt, prepare_sft_sample):
        with pytest.raises(DataError, match=r"no chat template.*chat_template"):
            function(tokenizer, TWO_TURNS)


def test_tokenizer_that_is_not_fast_is_refused():
    from transformers import PythonBackend

    class SpaceTokenizer(PythonBackend):
        @property
        def vocab_size(self):
            return 10

        def get_vocab(self):
            return {}

        def _tokenize(self, text, **kwargs):
            return text.split()

        def _convert_token_to_id(self, token):
            return 3

    slow = SpaceTokenizer(eos_token="</s>", unk_token="<unk>")
    with pytest.raises(DataError, match=r"SpaceTokenizer.*fast"):
        tokenize_conversation(slow, TWO_TURNS, chat_template=CHATML)


def test_prompts(tokenizer):
    tokenizer.chat_template = CHATML
    assert tokenizer.decode(tokenize_prompt(tokenizer, "1+1=")) == "1+1="
    expected = tokenizer.apply_chat_template(TWO_TURNS[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(tokenize_prompt(tokenizer, TWO_TURNS[:1])) == expected
    assert list(tokenize_prompt(tokenizer, parse_messages(TWO_TURNS[:1]))) == expected
    with pytest.raises(DataError, match="no tokens"):
        tokenize_prompt(tokenizer, "")


def test_end_of_text_that_a_tokenizer_appends_does_not_end_a_prompt():
    from tokenizers.processors import TemplateProcessing

    tokenizer = create_char_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|unk|> $A <|eos|>", special_tokens=[("<|unk|>", 2), ("<|eos|>", 1)]
    )
    assert tokenizer("1")["input_ids"] == [2, 4, 1]
    assert tokenize_prompt(tokenizer, "1") == (2, 4)
    assert prepare_sft_sample(tokenizer, {"prompt": "1", "completion": "2"}).tokens == (2, 4, 5, 1)


def test_sft_samples():
    tokenizer = create_char_tokenizer()
    plain = prepare_sft_sample(tokenizer, {"prompt": "s21=", "completion": "12", "level": 3}, index=4)
    assert tokenizer.decode(plain.tokens) == "s21=12<|eos|>"
    assert plain.loss_mask == (0.0,) * 4 + (1.0,) * 3
    assert (plain.prompt, plain.response, plain.metadata, plain.index, plain.group_index) == ("s21=", "12", {"level": 3}, 4, 4)
    assert (plain.status, plain.reward) == (Status.COMPLETED, None)
    from_list = prepare_sft_sample(tokenizer, TWO_TURNS)
    assert from_list == prepare_sft_sample(tokenizer, {"messages": TWO_TURNS})
    assert from_list.loss_mask == tokenize_conversation(tokenizer, TWO_TURNS).loss_mask
    assert from_list.prompt == parse_messages(TWO_TURNS[:3])
    assert from_list.response == "It is 12."
    by_parts = prepare_sft_sample(tokenizer, {"prompt": TWO_TURNS[:3], "completion": "It is 12."})
    assert by_parts == prepare_sft_sample(tokenizer, {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]})
    assert by_parts == prepare_sft_sample(tokenizer, TWO_TURNS, last_assistant_only=True)
    assert 0 < sum(by_parts.loss_mask) < sum(from_list.loss_mask)
    cut = prepare_sft_sample(tokenizer, {"prompt": "s21=", "completion": "12"}, max_length=5, on_overflow="truncate")
    assert (len(cut.tokens), cut.status) == (5, Status.TRUNCATED)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": "1"}, "expected 'messages'"),
        ({"prompt": "1", "completion": 2}, "completion .* int"),
        ({"prompt": "", "completion": "2"}, "empty string"),
        ({"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:]}, "expected one assistant message"),
        ([], "empty"),
        ("text", "expected a list"),
    ],
)
def test_bad_sft_examples(example, message):
    with pytest.raises(DataError, match=message):
        prepare_sft_sample(create_char_tokenizer(), example)


def test_completion_needs_an_end_of_text_token():
    tokenizer = create_char_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="eos_token"):
        prepare_sft_sample(tokenizer, {"prompt": "1", "completion": "2"})


def test_missing_pad_token_becomes_the_end_of_text_which_is_still_trained():
    tokenizer = create_char_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ensure_pad_token(tokenizer) == 0
    tokenizer.pad_token = None
    with pytest.warns(UserWarning, match="no pad token"):
        assert ensure_pad_token(tokenizer) == tokenizer.eos_token_id == tokenizer.pad_token_id
    sample = prepare_sft_sample(tokenizer, {"prompt": "1", "completion": "2"})
    assert (sample.tokens[-1], sample.loss_mask[-1]) == (tokenizer.pad_token_id, 1.0)
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither"):
        ensure_pad_token(tokenizer)


def test_messages_are_parsed_losslessly():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    dicts = [
        {"role": "user", "content": "hi", "name": "bo"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    assert [m.to_dict() for m in parse_messages(dicts)] == dicts
    assert parse_messages(parse_messages(dicts)) == parse_messages(dicts)
    assert parse_messages([{"role": "user", "content": "hi", "name": None, "weight": None}]) == (Message(role="user", content="hi"),)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user", "content": "x"}, {"role": 3, "content": "x"}], "message 1: role is 3"),
        ([{"role": "user", "content": ["x"]}], "content"),
        ([{"role": "user"}], "neither content nor tool_calls"),
        ([{"role": "user", "content": "x", "weight": 1}], r"unknown keys \['weight'\]"),
        ([{"from": "human", "value": "x"}], "unknown keys"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls"),
        (["x"], "message 0 is a str"),
        ({"role": "user", "content": "x"}, "expected a list"),
    ],
)
def test_bad_messages_are_refused_by_position(messages, message):
    with pytest.raises(DataError, match=message):
        parse_messages(messages)


def test_loss_mask_of_spans():
    assert compute_loss_mask(5, [(1, 2), (3, 5)]) == (0.0, 1.0, 0.0, 1.0, 1.0)
    assert compute_loss_mask(2, []) == (0.0, 0.0)
    with pytest.raises(AssertionError, match=r"\(1, 3\)"):
        compute_loss_mask(2, [(1, 3)])
