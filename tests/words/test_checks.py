"""Assertion helpers: what passes, what does not, and that messages carry names and values."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollouts.checks import check_encodable, check_finite, check_mask, check_shapes, find_non_finite, parse_json, read_flag, require_flag
from rollouts.data.filters import make_threshold_filter

sizes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@given(sizes, sizes)
def test_shapes_match_exactly(shape, expected):
    if shape == expected:
        check_shapes(values=(torch.zeros(shape), expected))
    else:
        with pytest.raises(AssertionError, match=re.escape(f"values has shape {shape}, expected {expected}")):
            check_shapes(values=(torch.zeros(shape), expected))


@given(sizes, st.data())
def test_none_in_a_shape_admits_any_size_but_not_another_rank(shape, data):
    loose = tuple(data.draw(st.sampled_from([size, None])) for size in shape)
    check_shapes(values=(torch.zeros(shape), loose))
    with pytest.raises(AssertionError, match="values has shape"):
        check_shapes(values=(torch.zeros(shape), (*loose, None)))


def test_missing_tensors_are_skipped_and_each_one_is_checked():
    check_shapes(old_log_probs=(None, (2, 3)))
    with pytest.raises(AssertionError, match=r"second has shape \(2,\), expected \(3,\)"):
        check_shapes(first=(torch.zeros(2), (2,)), missing=(None, (9,)), second=(torch.zeros(2), (3,)))


@pytest.mark.parametrize("values", [[], [0.0, 1.0], [0.25, 3.0]])
def test_masks_are_weights(values):
    check_mask("loss_mask", torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([1, 0]), r"loss_mask has dtype torch.int64, expected a floating-point mask"),
        (torch.tensor([True]), r"loss_mask has dtype torch.bool"),
        (torch.tensor([1.0, -0.5]), r"loss_mask holds negative or NaN entries \(smallest: -0.5\)"),
        (torch.tensor([1.0, math.nan]), r"loss_mask holds negative or NaN entries"),
        (torch.tensor([1.0, math.inf]), r"loss_mask holds infinite entries"),
    ],
)
def test_what_is_no_mask_is_named(mask, message):
    with pytest.raises(AssertionError, match=message):
        check_mask("loss_mask", mask)


@given(st.lists(st.tuples(st.floats(), st.sampled_from([0.0, 0.5, 1.0])), max_size=6))
def test_finite_where_it_matters(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    where = torch.tensor([weight for _, weight in rows], dtype=torch.float64)
    for mask, bad in (
        (None, [k for k, (value, _) in enumerate(rows) if not math.isfinite(value)]),
        (where, [k for k, (value, weight) in enumerate(rows) if weight and not math.isfinite(value)]),
    ):
        if bad:
            with pytest.raises(AssertionError, match=rf"rewards holds {len(bad)} non-finite entries, the first at index \[{bad[0]}\]"):
                check_finite("rewards", values, mask)
        else:
            check_finite("rewards", values, mask)


@pytest.mark.parametrize("value", [True, False])
def test_an_answer_of_yes_or_no_is_a_bool_of_python_numpy_or_torch(value):
    for answer in (value, np.bool_(value), np.array(value), torch.tensor(value)):
        assert read_flag(answer) is value is require_flag(answer, "f")


async def answer_later(group: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("no", r"'no' \(str\) for group 3, expected True or False: write a comparison"),
        (1, r"1 \(int\)"),
        (0.0, r"0.0 \(float\)"),
        (None, r"None \(NoneType\).*return statement"),
        ([], r"\[\] \(list\)"),
        (np.array([True]), r"array\(\[ ?True\]\)"),
        (torch.tensor(1.0), r"tensor\(1\.\) \(Tensor\)"),
        (make_threshold_filter(0.5), r"<function .*check_threshold.*it makes functions"),
    ],
)
def test_what_is_neither_yes_nor_no_is_shown(answer, message):
    assert read_flag(answer) is None
    with pytest.raises(ValueError, match=f"^f returned {message}"):
        require_flag(answer, "f", " for group 3")


@pytest.mark.filterwarnings("error")
def test_a_coroutine_is_no_answer_and_python_does_not_complain_of_it():
    with pytest.raises(KeyError, match=r"f returned <coroutine object answer_later.*it is async"):
        require_flag(answer_later(()), "f", error=KeyError)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -3e38, 3e38, math.inf, -math.inf, math.nan]), min_size=1, max_size=40),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_tensor_is_finite_if_all_of_its_numbers_are_whatever_their_sum(numbers, dtype):
    tensor = torch.tensor(numbers, dtype=dtype)
    expected = None if all(math.isfinite(number) for number in tensor.tolist()) else "bad"
    assert find_non_finite([("good", torch.ones(3)), ("bad", tensor), ("count", torch.ones(2, dtype=torch.int64))]) == expected


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", [DEEP, DEEP.encode(), "[" * 100_000])
def test_json_that_is_nested_too_deeply_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"^lists or objects are nested too deeply$"):
        parse_json(text)


def test_json_is_parsed_as_by_the_standard_library():
    assert parse_json('{"a": [1, 2.5, NaN]}', parse_float=str, parse_constant=str.lower) == {"a": [1, "2.5", "nan"]}
    assert parse_json(b'{"a": 1, "a": 2}', object_pairs_hook=tuple) == (("a", 1), ("a", 2))
    with pytest.raises(json.JSONDecodeError, match="Extra data"):
        parse_json("1 2")
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'"\xff"')


def test_values_that_cannot_be_written_are_value_errors():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        check_encodable(deep)
    with pytest.raises(UnicodeError):
        check_encodable({"a": "\ud800"})
    check_encodable({"a": ["\u00e9", None]})
