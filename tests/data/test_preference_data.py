"""Pairs of answers from files: in the tokens that a reward model will read, and refused by file and line where they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML, create_tokenizer

from rollouts.algorithms.preferences import last_scores, pair_mean
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import (
    collate_pairs,
    load_labelled_answers,
    load_preference_pairs,
    prepare_preference_pair,
    rank_rollouts,
)
from rollouts.errors import DataError
from rollouts.types import Sample

ASK = [{"role": "user", "content": "1+2="}]
TEXT = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def decode(sample: Any) -> str:
    return str(create_char_tokenizer().decode(sample.tokens))


FORMS = {
    "texts": (TEXT, "1+2=3<|eos|>"),
    "messages": ({"prompt": ASK, "chosen": "3", "rejected": "4"}, "user: 1+2=\nassistant: 3<|eos|>"),
    "answers as messages": ({"prompt": ASK, "chosen": answer("3"), "rejected": answer("4")}, "user: 1+2=\nassistant: 3<|eos|>"),
    "a text and messages": ({"prompt": "1+2=", "chosen": answer("3"), "rejected": answer("4")}, "user: 1+2=\nassistant: 3<|eos|>"),
    "prompt repeated": ({"prompt": "1+2=", "chosen": ASK + answer("3"), "rejected": ASK + answer("4")}, "user: 1+2=\nassistant: 3<|eos|>"),
    "conversations": ({"chosen": ASK + answer("3"), "rejected": ASK + answer("4")}, "user: 1+2=\nassistant: 3<|eos|>"),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_become_answers_that_are_read_at_their_end(form: str):
    row, text = FORMS[form]
    pair = prepare_preference_pair(create_char_tokenizer(), {**row, "source": "x"})
    assert (decode(pair.chosen), decode(pair.rejected)) == (text, text.replace("3<", "4<"))
    for sample in (pair.chosen, pair.rejected):
        assert sample.loss_mask == (*(0.0,) * (len(sample.tokens) - 1), 1.0)
        assert sample.metadata == {"source": "x"}
    assert pair.margin == 0.0
    assert prepare_preference_pair(create_char_tokenizer(), {**row, "margin": 2}).margin == 2.0


def test_what_the_template_puts_behind_an_answer_stays_for_models_that_read_it():
    pair = prepare_preference_pair(create_char_tokenizer(), FORMS["messages"][0], to_turn_end=False)
    assert decode(pair.chosen) == "user: 1+2=\nassistant: 3<|eos|>\n"
    assert pair.chosen.loss_mask[-1] == 1.0


def test_pairs_become_rows_side_by_side_with_their_margins():
    tokenizer = create_char_tokenizer()
    pairs = [prepare_preference_pair(tokenizer, {**TEXT, "margin": 0.5}), prepare_preference_pair(tokenizer, {**TEXT, "chosen": "33"})]
    batch = collate_pairs(pairs)
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert batch.lengths.tolist() == [6, 6, 7, 6]
    assert batch.loss_mask.sum(1).tolist() == [1.0] * 4
    assert float(pair_mean(batch).max()) == 0.5
    assert last_scores(batch.tokens.float(), batch.loss_mask).tolist() == [1.0] * 4, "the end-of-text token has id 1"


@pytest.mark.parametrize("form", FORMS)
def test_whole_answers_are_trained_on_up_to_their_end_of_turn(form: str):
    pair = prepare_preference_pair(create_char_tokenizer(), FORMS[form][0], whole_answers=True)
    for sample, text in ((pair.chosen, "3"), (pair.rejected, "4")):
        trained = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask > 0]
        assert create_char_tokenizer().decode(trained) == f"{text}<|eos|>"
        assert sample.loss_mask[-1] == 1.0


def test_log_probs_of_a_reference_are_a_column_and_stand_at_the_end_of_each_answer():
    row = {**TEXT, "ref_chosen_logps": -1.5, "ref_rejected_logps": -2}
    pair = prepare_preference_pair(create_char_tokenizer(), row, whole_answers=True)
    assert pair.ref_log_probs == (-1.5, -2.0) and pair.chosen.metadata == {}
    batch = collate_pairs([pair])
    assert batch.ref_log_probs is not None
    assert (batch.ref_log_probs * batch.loss_mask).sum(1).tolist() == [-1.5, -2.0]
    assert collate_pairs([pair, prepare_preference_pair(create_char_tokenizer(), TEXT)]).ref_log_probs is None
    for bad in ("x", float("nan")):
        with pytest.raises(DataError, match=f"ref_chosen_logps is {bad!r}, expected a number"):
            prepare_preference_pair(create_char_tokenizer(), {**TEXT, "ref_chosen_logps": bad})


def test_half_a_reference_and_an_answer_that_is_a_number_are_bad_rows():
    with pytest.raises(
        DataError, match="the row has ref_rejected_logps alone, expected ref_chosen_logps and ref_rejected_logps, or neither"
    ):
        prepare_preference_pair(create_char_tokenizer(), {"prompt": "a", "chosen": "b", "rejected": "c", "ref_rejected_logps": -1.0})
    with pytest.raises(DataError, match=r"chosen: the answer is 5 \(int\), expected a text, or a list of messages"):
        prepare_preference_pair(create_char_tokenizer(), {"prompt": "a", "chosen": 5, "rejected": "c"})


def test_labelled_answers_stand_by_themselves_and_pairs_become_two(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": "1+2=", "completion": "3", "label": True}, {"prompt": "1+3=", "completion": "3", "label": False, "of": 7}, TEXT]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = load_labelled_answers(create_char_tokenizer(), path)
    assert [(decode(answer), answer.reward) for answer in answers] == [
        ("1+2=3<|eos|>", 1.0), ("1+3=3<|eos|>", 0.0), ("1+2=3<|eos|>", 1.0), ("1+2=4<|eos|>", 0.0)
    ]  # fmt: skip
    assert [sum(answer.loss_mask) for answer in answers] == [2.0] * 4
    assert answers[1].metadata == {"of": 7}
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps({**rows[1], "label": "no"}) + "\n")
    with pytest.raises(DataError, match=r"answers\.jsonl, line 2: label is 'no', expected true or false"):
        load_labelled_answers(create_char_tokenizer(), path)
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match="all 1 answers have the label True: KTO learns from good answers and bad ones"):
        load_labelled_answers(create_char_tokenizer(), path)


def test_the_best_rollout_of_a_group_is_preferred_to_its_worst():
    def rollout(group: int, reward: float | None, token: int, **changes: Any) -> Sample:
        return Sample(tokens=(3, token), loss_mask=(0.0, 1.0), reward=reward, group_index=group, **changes)

    samples = [
        rollout(0, 0.5, 10), rollout(0, 1.0, 11), rollout(0, 0.0, 12), rollout(0, 1.0, 13), rollout(1, 1.0, 14), rollout(1, 1.0, 15),
        rollout(2, 0.2, 16), rollout(2, 0.5, 17), rollout(2, 9.0, 18, trainable=False), rollout(2, None, 19),
    ]  # fmt: skip
    pairs = rank_rollouts(samples)
    assert [(pair.chosen.tokens[1], pair.rejected.tokens[1]) for pair in pairs] == [(11, 12), (17, 16)]
    assert [pair.chosen.tokens[1] for pair in rank_rollouts(samples, min_difference=0.5)] == [11]


def test_an_empty_answer_may_be_the_worse_one_and_never_the_better_one(tmp_path: Path):
    assert prepare_preference_pair(create_char_tokenizer(), {"prompt": "a", "chosen": "b", "rejected": ""}).rejected.response == ""
    for empty in (" \n", [{"role": "assistant", "content": " "}]):
        with pytest.raises(DataError, match="chosen: the preferred answer is empty"):
            prepare_preference_pair(create_tokenizer(CHATML), {"prompt": "a", "chosen": empty, "rejected": "b"})
    call = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    assert prepare_preference_pair(create_tokenizer(CHATML), {"prompt": "a", "chosen": call, "rejected": answer("b")}).margin == 0
    rows = [{"prompt": "1+2=", "completion": text, "label": label} for text, label in (("", False), ("3", True), ("", True))]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert len(load_labelled_answers(create_char_tokenizer(), path)) == 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"answers\.jsonl, line 3: the preferred answer is empty"):
        load_labelled_answers(create_char_tokenizer(), path)


BAD = {
    "no rejected": (
        {"prompt": "a", "chosen": "b"},
        "on preferences knows no row with the columns prompt, chosen. It reads rows with chosen and rejected",
    ),
    "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same 3 tokens"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "chosen and rejected are texts without a prompt that share no beginning"),
    "margin": ({**TEXT, "margin": "wide"}, "margin is 'wide'"),
    "margin beyond floats": ({**TEXT, "margin": 10**400}, "margin is 1000000"),
    "ends with the user": ({"chosen": ASK, "rejected": ASK}, "chosen: the conversation ends with a message of the role user"),
    "other prompt": ({"prompt": "9", "chosen": ASK + answer("3"), "rejected": ASK + answer("4")}, "do not begin with the prompt"),
    "empty": ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen: the preferred answer is empty: from it the model learns to say"),
    "number": ({"prompt": "a", "chosen": "b", "rejected": 7}, "rejected: the answer is 7 (int), expected a text, or a list"),
    "too long": ({"prompt": "a", "chosen": "b", "rejected": "b" * 40}, "rejected: the conversation has 42 tokens, more than max_length 30"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_are_no_pairs_are_named_by_file_and_line(name: str, tmp_path: Path):
    row, message = BAD[name]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(TEXT) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 2") as caught:
        load_preference_pairs(create_char_tokenizer(), path, max_length=30)
    assert message in str(caught.value)
    loaded = load_preference_pairs(create_char_tokenizer(), path, max_length=30, skip_bad_rows=True)
    assert (len(loaded), len(loaded.bad_rows)) == (1, 1)
