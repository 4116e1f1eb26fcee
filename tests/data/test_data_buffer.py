"""The stream of prompts: permutations per epoch, exact resumption, the caller's list."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.data.prompts import BufferState, DataBuffer, epoch_order, parse_prompt, stream_positions, take_prompts
from rollouts.errors import DataError
from rollouts.types import Message, Prompt


def test_exact_order_of_three_epochs():
    buffer = DataBuffer(list("abcde"), seed=7)
    taken = "".join(str(p.content) for p in buffer.get_prompts(15))
    assert taken == "cdabedbeacdcbae"
    epochs = [taken[i : i + 5] for i in (0, 5, 10)]
    assert epochs == ["".join("abcde"[i] for i in epoch_order(5, epoch, 7)) for epoch in range(3)]
    assert all(sorted(epoch) == list("abcde") for epoch in epochs)
    assert len(set(epochs)) > 1


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**63 - 1))
def test_every_epoch_is_a_permutation(length, epoch, seed):
    assert sorted(epoch_order(length, epoch, seed)) == list(range(length))


@given(st.integers(1, 9), st.lists(st.integers(0, 25), max_size=6), st.integers(0, 3))
def test_stream_does_not_depend_on_the_sizes_of_requests(length, requests, seed):
    prompts = [str(i) for i in range(length)]
    buffer = DataBuffer(prompts, seed=seed)
    taken = [p for n in requests for p in buffer.get_prompts(n)]
    whole = DataBuffer(prompts, seed=seed).get_prompts(sum(requests))
    assert tuple(taken) == whole
    assert [p.index for p in taken] == list(range(len(taken)))
    assert buffer.state == BufferState(epoch_id=len(taken) // length, sample_offset=len(taken) % length)
    assert stream_positions(length, start=0, count=len(taken), seed=seed) == tuple(int(p.content) for p in whole)


@given(st.integers(1, 7), st.integers(0, 30), st.integers(0, 30), st.integers(0, 3))
def test_resumed_at_any_offset_the_rest_is_the_same(length, before, after, seed):
    prompts = [str(i) for i in range(length)]
    buffer = DataBuffer(prompts, seed=seed)
    buffer.get_prompts(before)
    state = json.loads(json.dumps(buffer.save_state()))
    expected = buffer.get_prompts(after)
    resumed = DataBuffer(prompts, seed=seed)
    resumed.load_state(state)
    assert resumed.get_prompts(after) == expected
    rewound = buffer
    rewound.load_state(state)
    assert rewound.get_prompts(after) == expected


def test_callers_list_is_not_reordered_and_later_changes_do_not_show():
    prompts = [str(i) for i in range(20)]
    before = list(prompts)
    buffer = DataBuffer(prompts, seed=1)
    first = buffer.get_prompts(20)
    assert prompts == before
    prompts.clear()
    assert sorted(p.content for p in buffer.get_prompts(20)) == sorted(before)
    assert [p.content for p in first] != before


def test_take_prompts_is_pure():
    prompts = tuple(Prompt(content=c) for c in "abc")
    state = BufferState(epoch_id=1, sample_offset=2)
    assert take_prompts(state, prompts, 4, 5) == take_prompts(state, prompts, 4, 5)
    taken, after = take_prompts(state, prompts, 4, 5)
    assert [p.index for p in taken] == [5, 6, 7, 8]
    assert (state.epoch_id, after) == (1, BufferState(epoch_id=3, sample_offset=0))
    assert take_prompts(state, prompts, 0, 5) == ((), state)
    with pytest.raises(FrozenInstanceError):
        state.epoch_id = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_other_seeds_give_other_orders():
    orders = {tuple(epoch_order(10, epoch, seed)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_kinds_of_prompts():
    message = {"role": "user", "content": "hi"}
    assert parse_prompt("hi") == Prompt(content="hi")
    assert parse_prompt([message]).content == (Message(role="user", content="hi"),)
    assert parse_prompt(Prompt(content="hi", metadata={"k": 1})).metadata == {"k": 1}
    mapping = {"prompt": "1+1=", "answer": "2", "level": 3}
    parsed = parse_prompt(mapping)
    assert parsed == Prompt(content="1+1=", metadata={"answer": "2", "level": 3, "ground_truth": "2"})
    assert mapping == {"prompt": "1+1=", "answer": "2", "level": 3}
    assert parse_prompt({"messages": [message], "ground_truth": "a", "answer": "b"}).metadata["ground_truth"] == "a"


@pytest.mark.parametrize("item", ["", [], [{"content": "x"}], {"question": "x"}, {"prompt": None}, 3, [["user", "x"]]])
def test_what_is_no_prompt_is_refused_with_its_position(item):
    with pytest.raises(DataError, match="prompt 1"):
        DataBuffer(["ok", item])


def test_empty_data_set_is_refused():
    with pytest.raises(DataError, match="no prompts"):
        DataBuffer([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 3}, "seed 3"), ({"num_prompts": 4}, "num_prompts 4"), ({"sample_offset": 3}, "offset 3"), ({"epoch_id": -1}, "epoch -1")],
)
def test_state_of_another_stream_is_refused(changes, message):
    buffer = DataBuffer(["a", "b", "c"])
    with pytest.raises(DataError, match=message):
        buffer.load_state(buffer.save_state() | changes)
    with pytest.raises(DataError, match="lacks"):
        buffer.load_state({"epoch_id": 0})


def test_without_a_data_set_a_prompt_is_its_number_and_the_stream_goes_on_where_it_was_saved():
    buffer = DataBuffer(None, seed=3)
    assert [(prompt.content, prompt.index) for prompt in buffer.get_prompts(3)] == [("", 0), ("", 1), ("", 2)]
    again = DataBuffer(None, seed=3)
    again.load_state(buffer.save_state())
    assert [prompt.index for prompt in again.get_prompts(2)] == [3, 4]
    with pytest.raises(DataError, match="num_prompts"):
        DataBuffer(["a prompt"], seed=3).load_state(buffer.save_state())
