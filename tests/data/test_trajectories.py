"""Samples in files: lossless, valid lines, errors that name file and line, a choice of what to keep."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.data.trajectories import read_samples, select_samples, select_steps, write_samples
from rollouts.errors import DataError
from rollouts.steps import StepData
from rollouts.types import Message, RolloutBatch, Sample, Status

json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
messages = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["user", "assistant", "tool"]),
        content=st.none() | st.text(max_size=5),
        tool_calls=st.none() | st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=2), max_size=2).map(tuple),
    ),
    max_size=3,
).map(tuple)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    n = draw(st.integers(0, 4))
    column = lambda values: st.lists(values, min_size=n, max_size=n).map(tuple)
    return Sample(
        prompt=draw(st.text(max_size=5) | messages),
        tokens=draw(column(st.integers(0, 9))),
        loss_mask=draw(column(st.floats(0, 1))),
        rollout_log_probs=draw(st.none() | column(finite)),
        weight_versions=draw(st.none() | column(st.integers(-1, 5))),
        response=draw(st.text(max_size=8)),
        reward=draw(st.none() | finite),
        status=draw(st.sampled_from(Status)),
        index=draw(st.integers(0, 99)),
        temperature=draw(st.floats(0.1, 2)),
        metadata=draw(st.dictionaries(st.text(max_size=3), json_values, max_size=3)),
    )


@given(st.lists(samples(), max_size=4))
def test_samples_round_trip_through_a_file(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("samples") / "deep" / "samples.jsonl"
    batch = RolloutBatch(samples=tuple(written))
    assert write_samples(path, batch.samples) == len(written)
    assert path.read_bytes().count(b"\n") == len(written)
    assert read_samples(path) == written


def test_lines_with_every_kind_of_line_break_in_their_text_stay_one_line(tmp_path):
    sample = Sample(response="a\nb\r\nc\u2028d\u0085e\x0bf\x1cg", metadata={"ü": "\ud800"})
    write_samples(tmp_path / "s.jsonl", [sample])
    assert read_samples(tmp_path / "s.jsonl") == [sample]
    raw = json.dumps(sample.to_dict() | {"metadata": {}}, ensure_ascii=False)  # as another program may write it
    (tmp_path / "raw.jsonl").write_text(raw + "\n", encoding="utf-8")
    assert read_samples(tmp_path / "raw.jsonl")[0].response == sample.response


def test_append_and_overwrite(tmp_path):
    path = tmp_path / "s.jsonl"
    for append, expected in ((False, 1), (True, 2), (False, 1)):
        write_samples(path, [Sample(index=3)], append=append)
        assert len(read_samples(path)) == expected


@pytest.mark.parametrize("metadata", [{"x": math.nan}, {"x": object()}, {"x": {1, 2}}])
def test_what_json_cannot_hold_is_named_and_the_file_stays_as_it_was(tmp_path, metadata):
    path = tmp_path / "s.jsonl"
    write_samples(path, [Sample()])
    with pytest.raises(DataError, match=r"sample 7 \(group 2\) cannot be written as JSON: .*Keep its metadata to JSON values"):
        write_samples(path, [Sample(), Sample(index=7, group_index=2, metadata=metadata)])
    assert read_samples(path) == [Sample()]


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '"a"', "null", '{"tokens": [1]}', '{"tokens": 4}', '{"status": "odd"}', '{"colour": 1}', '{"temperature": 0}']
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "s.jsonl"
    path.write_text('{"response": "fine"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"s\.jsonl:3 is not a sample: "):
        read_samples(path)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read samples from .*missing"):
        read_samples(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"cannot read samples from .*binary"):
        read_samples(tmp_path / "binary.jsonl")


def test_every_nth_and_by_condition():
    rows = [Sample(index=i, reward=float(i % 3)) for i in range(10)]
    assert select_samples(rows) == tuple(rows)
    assert [s.index for s in select_samples(rows, every=4)] == [0, 4, 8]
    assert [s.index for s in select_samples(rows, condition=lambda s: s.reward == 0)] == [0, 3, 6, 9]
    assert [s.index for s in select_samples(rows[3:], every=2, condition=lambda s: s.reward == 0)] == [6]
    with pytest.raises(AssertionError, match="every is 0"):
        select_samples(rows, every=0)


def test_a_condition_answers_with_true_or_false():
    async def later(row):
        return False

    steps = [StepData(system_step_index=0, sample_index=4, group_index=2)]
    for condition, found in ((lambda row: 0.0, r"<lambda> returned 0\.0"), (later, "later returned <coroutine")):
        with pytest.raises(DataError, match=rf"condition {found}.* for sample 1 \(group 0\), expected True or False"):
            select_samples([Sample(index=1)], condition=condition)
        with pytest.raises(DataError, match=rf"condition {found}.* for sample 4 \(group 2\)"):
            select_steps(steps, condition=condition)
