"""Transcripts: what the model sampled stands, what it was given is tokenized once, and a history that changes is found."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, LLAMA3, QWEN3, create_bpe_tokenizer, create_tokenizer, encode
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat import templates as chat_templates
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.formats import create_chat_format, create_text_format
from rollouts.chat.transcript import Transcript, add_action, add_messages, begin_transcript, describe_turn, note_messages
from rollouts.errors import DataError
from rollouts.types import Message

NAMES = ("chatml", "llama3", "qwen3")
TEMPLATES = dict(zip(NAMES, ((CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (QWEN3, "<|im_end|>")), strict=True))
QUESTION = Message(role="user", content="hi")


def follow_up(text="and?"):
    return Message(role="user", content=text)


def play(conversation, tokens, new=None, **kwargs):
    """Question, an answer of these tokens, and what follows it."""
    transcript = begin_transcript(conversation, [QUESTION])
    transcript = add_action(transcript, conversation, tokens, (-1.0,) * len(tokens), (3,) * len(tokens))
    return add_messages(transcript, conversation, [new or follow_up()], **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_stand_where_the_text_has_another_tokenization(name):
    template, eos = TEMPLATES[name]
    answer = "the answer is the answer"
    tokenizer = create_bpe_tokenizer(template, " ".join([answer] * 20), eos)
    conversation = create_chat_format(tokenizer)
    sampled = [token for c in answer for token in tokenizer(c, add_special_tokens=False)["input_ids"]]
    assert len(sampled) > len(tokenizer(answer)["input_ids"]), "the tokenizer would have written it with fewer tokens"
    end = tokenizer.convert_tokens_to_ids(eos)
    transcript = play(conversation, (*sampled, end))
    (turn,) = transcript.turns
    assert transcript.tokens[turn.start : turn.end] == (*sampled, end)
    assert transcript.messages[1].content == answer
    assert tokenizer.decode(transcript.tokens) == conversation.open([QUESTION, Message(role="assistant", content=answer), follow_up()])
    assert [t for t, mask in enumerate(transcript.loss_mask) if mask] == list(range(turn.start, turn.end))
    assert transcript.log_probs == tuple(-mask for mask in transcript.loss_mask)
    assert transcript.versions == tuple(3 if mask else -1 for mask in transcript.loss_mask)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_gets_its_ending_masked(name):
    template, eos = TEMPLATES[name]
    tokenizer = create_tokenizer(template, eos)
    conversation = create_chat_format(tokenizer)
    sampled = encode(tokenizer, "I was cu")
    cut, whole = play(conversation, sampled), play(conversation, (*sampled, *encode(tokenizer, eos)))
    assert cut.tokens == whole.tokens
    assert sum(cut.loss_mask) == len(sampled) == sum(whole.loss_mask) - 1
    assert cut.loss_mask[cut.turns[0].end] == 0


def test_an_answer_that_ended_otherwise_than_the_template_has_it_keeps_what_was_sampled():
    tokenizer = create_tokenizer(CHATML)
    transcript = play(create_chat_format(tokenizer), encode(tokenizer, "ok<|endoftext|>"))
    assert tokenizer.decode(transcript.tokens).startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|endoftext|><|im_end|>\n<|im_start|>user\nand?<|im_end|>"
    )
    assert transcript.messages[1].content == "ok"


def test_an_ending_of_plain_text_that_the_model_wrote_is_not_written_twice():
    tokenizer = create_char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n.\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    conversation = create_chat_format(tokenizer)
    for written in ("ok\n.\n", "ok\n.", "ok\n", "ok"):
        transcript = play(conversation, conversation.tokenize(written))
        assert tokenizer.decode(transcript.tokens) == "user: hi\n.\nassistant: ok\n.\nuser: and?\n.\nassistant: "
        assert sum(transcript.loss_mask) == len(written)
        assert transcript.messages[1].content == "ok"


def test_what_the_template_tidies_up_stays_as_it_was_sampled_and_is_counted():
    tokenizer = create_tokenizer(LLAMA3, "<|eot_id|>")
    conversation = create_chat_format(tokenizer)
    sampled = encode(tokenizer, "  spaces \n<|eot_id|>")
    transcript = play(conversation, sampled)
    turn = transcript.turns[0]
    assert transcript.tokens[turn.start : turn.end] == sampled
    assert transcript.num_reformatted == 1
    assert tokenizer.decode(transcript.tokens[turn.end :]) == (
        "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert play(conversation, encode(tokenizer, "none<|eot_id|>")).num_reformatted == 0


@pytest.mark.parametrize("answer", [" ok", "ok"])
def test_llama_2_has_no_generation_prompt_and_a_space_before_its_end(answer):
    tokenizer = create_tokenizer(chat_templates.LLAMA2, "<|endoftext|>")
    conversation = create_chat_format(tokenizer)
    transcript = play(conversation, encode(tokenizer, answer + "<|endoftext|>"))
    assert (
        tokenizer.decode(transcript.tokens)
        == f"<|begin_of_text|>[INST] hi [/INST]{answer}<|endoftext|><|begin_of_text|>[INST] and? [/INST]"
    )


@pytest.mark.parametrize("template", [chat_templates.CHATML, chat_templates.LLAMA3, chat_templates.ZEPHYR])
def test_templates_for_tokenizers_without_one_can_be_used(template):
    tokenizer = create_tokenizer(None, "<|endoftext|>")
    conversation = create_chat_format(tokenizer, {"chat_template": template})
    transcript = play(conversation, encode(tokenizer, "ok"))
    assert tokenizer.decode(transcript.context) == transcript.rendered


def create_sentence_tokenizer(template, scheme, rstrip=False):
    """Spaces are a character of words, and one stands before the first word: as SentencePiece does it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "\u2581 abcdefghijklmnopqrstuvwxyz?:\n"
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True, rstrip=rstrip)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize(("scheme", "rstrip"), [("first", False), ("always", False), ("never", False), ("never", True)])
def test_what_is_added_has_the_tokens_that_it_has_in_the_whole(scheme, rstrip):
    tokenizer = create_sentence_tokenizer(CHATML, scheme, rstrip)
    conversation = create_chat_format(tokenizer)
    end = tokenizer.eos_token_id
    sampled = (*tokenizer("ok", add_special_tokens=False)["input_ids"], end)
    transcript = play(conversation, sampled)
    whole = tokenizer(transcript.rendered, add_special_tokens=False)["input_ids"]
    assert transcript.tokens[transcript.turns[0].end :] == tuple(whole[whole.index(end, whole.index(end) + 1) + 1 :])
    text = create_text_format(tokenizer)
    transcript = play(text, sampled)
    assert (
        tokenizer.decode(transcript.tokens[transcript.turns[0].end :])
        == ("" if rstrip else " " * (scheme == "always")) + "\nand?\n"[rstrip:]
    )


def test_a_thinking_block_that_the_template_puts_before_answers_alone_is_history_rewritten():
    tokenizer = create_tokenizer(QWEN3)
    conversation = create_chat_format(tokenizer, {"enable_thinking": False})
    sampled = encode(tokenizer, "ok<|im_end|>")
    with pytest.raises(DataError, match=r"message 0 \(user\): '<think>\\n\\n</think>.*has become 'ok<\|im_end"):
        play(conversation, sampled)
    transcript = play(conversation, sampled, may_branch=True)
    start = transcript.context_starts[0]
    assert tokenizer.decode(transcript.tokens[:start]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nok<|im_end|>"
    )
    assert (
        tokenizer.decode(transcript.context)
        == transcript.rendered
        == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
    )
    assert sum(transcript.loss_mask) == len(sampled)
    again = add_action(transcript, conversation, sampled, (-1.0,) * len(sampled), (4,) * len(sampled))
    assert again.turns[1].start == len(transcript.tokens)
    assert len(add_messages(again, conversation, [follow_up()], may_branch=True).context_starts) == 2


def test_calls_of_several_tools_become_one_message_where_the_template_does_so():
    tokenizer = create_tokenizer(QWEN3)
    conversation = create_chat_format(tokenizer)
    transcript = add_action(begin_transcript(conversation, [QUESTION]), conversation, encode(tokenizer, "x<|im_end|>"))
    results = [Message(role="tool", content="1"), Message(role="tool", content="2")]
    transcript = add_messages(transcript, conversation, results)
    assert tokenizer.decode(transcript.tokens[transcript.turns[0].end :]) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert transcript.log_probs is transcript.versions is None


def test_a_template_that_cannot_serve_episodes_is_refused_before_anything_is_generated():
    without_prompt = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    last_only = (
        "{% set m = messages[-1] %}{{ m['role'] + ': ' + m['content'] }}{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
    )
    no_answers = (
        "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    for template, message in (
        (without_prompt, "no generation prompt"),
        (last_only, "drops turns"),
        (no_answers, "nothing of an assistant"),
    ):
        with pytest.raises(DataError, match=message):
            create_chat_format(create_tokenizer(template))
    with pytest.raises(DataError, match="no chat template"):
        create_chat_format(create_tokenizer(None))


def test_a_template_that_drops_tool_messages_is_refused_when_one_comes():
    template = CHATML.replace("{{- '<|im_start|>' + message", "{%- if message['role'] != 'tool' %}{{- '<|im_start|>' + message", 1).replace(
        "{%- endfor %}", "{%- endif %}{%- endfor %}"
    )
    tokenizer = create_tokenizer(template)
    conversation = create_chat_format(tokenizer)
    assert len(play(conversation, encode(tokenizer, "x")).messages) == 3
    with pytest.raises(DataError, match="drops messages of the role 'tool'"):
        play(conversation, encode(tokenizer, "x"), new=Message(role="tool", content="5"))


def test_without_a_template_observations_stand_between_separators():
    tokenizer = create_char_tokenizer()
    conversation = create_text_format(tokenizer, "|".replace("|", "\n"))
    transcript = begin_transcript(conversation, [Message(role="user", content="1+1="), Message(role="user", content="?")])
    transcript = add_action(transcript, conversation, (*conversation.tokenize("2"), 1), (-1.0, -1.0), (0, 0))
    transcript = add_messages(transcript, conversation, [follow_up("right"), follow_up("")])
    assert tokenizer.decode(transcript.tokens) == "1+1=\n?2<|eos|>\nright\n"
    assert [tokenizer.decode([token]) for token, mask in zip(transcript.tokens, transcript.loss_mask, strict=True) if mask] == [
        "2",
        "<|eos|>",
    ]
    assert transcript.rendered == "1+1=\n?2\nright\n"


def test_a_transcript_of_text_alone_has_messages_and_no_tokens():
    transcript = add_messages(add_action(begin_transcript(None, [QUESTION]), None, text="hello"), None, [follow_up()])
    assert [message.content for message in transcript.messages] == ["hi", "hello", "and?"]
    assert (transcript.tokens, transcript.turns) == ((), ())
    assert describe_turn(transcript, state="s", reward=1.0) == transcript


def test_turns_are_described_and_last_words_noted_without_tokens():
    tokenizer = create_tokenizer(CHATML)
    conversation = create_chat_format(tokenizer)
    begun = begin_transcript(conversation, [QUESTION])
    transcript = add_action(begun, conversation, encode(tokenizer, "x<|im_end|>"))
    told = note_messages(describe_turn(transcript, state="here", reward=0.5), [follow_up()])
    assert (told.turns[0].state, told.turns[0].reward, transcript.turns[0].reward) == ("here", 0.5, None)
    assert told.tokens == transcript.tokens
    assert len(told.messages) == 3
    assert (begun.num_sampled, told.num_sampled, begun.turns) == (0, 2, ())


def test_lengths_are_checked():
    with pytest.raises(AssertionError, match="loss_mask has 0 entries for 1 tokens"):
        Transcript(tokens=(1,))
    with pytest.raises(AssertionError, match="1 log_probs for 2 tokens"):
        add_action(Transcript(), create_text_format(create_char_tokenizer()), (3, 4), (-1.0,))


TEXT = st.text(alphabet="ab <>\n{}\"'|.", max_size=8)


@given(name=st.sampled_from(NAMES), turns=st.lists(st.tuples(TEXT, st.sampled_from(["user", "tool"]), TEXT, st.booleans()), max_size=4))
def test_the_context_is_what_the_template_says_or_what_was_sampled(name, turns):
    tokenizer, conversation = FORMATS[name]
    transcript = begin_transcript(conversation, [QUESTION])
    eos = TEMPLATES[name][1]
    sampled = []
    for answer, role, reply, is_cut in turns:
        sampled.append(encode(tokenizer, answer + ("" if is_cut and answer else eos)))
        transcript = add_action(transcript, conversation, sampled[-1])
        transcript = add_messages(transcript, conversation, [Message(role=role, content=reply)], may_branch=True)
    assert [transcript.tokens[turn.start : turn.end] for turn in transcript.turns] == sampled
    assert transcript.num_sampled == sum(transcript.loss_mask)
    if not transcript.num_reformatted:
        assert tokenizer.decode(transcript.context) == transcript.rendered == conversation.open(transcript.messages)


FORMATS = {name: (tokenizer := create_tokenizer(*TEMPLATES[name]), create_chat_format(tokenizer)) for name in NAMES}
