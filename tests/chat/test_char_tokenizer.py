"""The character tokenizer: exact round trips, fixed special ids, saving and loading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import ALPHABET, create_char_tokenizer

TOKENIZER = create_char_tokenizer()
FULL_TOKENIZER = create_char_tokenizer(3 + len(ALPHABET))


def test_special_ids_and_size():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id) == (0, 1, 2)
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 64
    assert len(FULL_TOKENIZER) == 3 + len(ALPHABET)
    assert len(set(ALPHABET)) == len(ALPHABET)
    assert set(map(chr, range(32, 127))) | {"\n"} <= set(ALPHABET)


@given(st.text(alphabet=ALPHABET[:61], max_size=60))
def test_round_trip_is_exact_and_one_token_per_character(text: str):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert all(3 <= i < 64 for i in ids)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text, add_special_tokens=False) == ids
    assert "".join(TOKENIZER.decode([i]) for i in ids) == text


@given(st.text(alphabet=ALPHABET, max_size=60))
def test_round_trip_of_all_ascii(text: str):
    assert FULL_TOKENIZER.decode(FULL_TOKENIZER.encode(text)) == text


def test_unknown_characters_become_unk_and_special_tokens_can_be_skipped():
    assert TOKENIZER.encode("1é2")[1] == 2
    assert TOKENIZER.decode([*TOKENIZER.encode("12"), 1, 0], skip_special_tokens=True) == "12"


def test_sorting_problem_text_has_known_ids():
    assert TOKENIZER.encode("s7304=") == [3 + ALPHABET.index(c) for c in "s7304="]


def test_saves_and_loads(tmp_path):
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "s7304=\n what? 1 + 1."
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    messages = [{"role": "user", "content": "1+1=?"}]
    expected = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected == "user: 1+1=?\nassistant: "


@pytest.mark.parametrize("vocab_size", [3, 4 + len(ALPHABET)])
def test_vocab_size_out_of_range_is_refused(vocab_size: int):
    with pytest.raises(AssertionError, match=str(vocab_size)):
        create_char_tokenizer(vocab_size)
