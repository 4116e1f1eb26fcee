"""Whatever others write (servers, users, models, earlier runs, clients) is read, or refused by an error of the library."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.reliability.damage import RAW, damage, list_places, write
from benchmarks.reliability.parsers import Parser, list_parsers
from rollouts.engines.http.samples import expand_spans
from rollouts.engines.text.protocol import join_chunks
from rollouts.errors import CheckpointError, ConfigError, DataError, EngineProtocolError
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import verify_checkpoint

PARSERS = {parser.name: parser for parser in list_parsers()}
DEEP = b'{"a":' * 100_000


class Drawn:
    """Choices that hypothesis makes, and can make smaller."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def below(self, number: int) -> int:
        return self._data.draw(st.integers(0, number - 1))


@pytest.mark.parametrize("name", PARSERS)
def test_an_example_of_each_kind_is_accepted(name: str):
    parser = PARSERS[name]
    if name not in ("event", "rows parquet"):  # an event of an error; a file without rows
        assert any(parser.try_on(example) for example in parser.examples)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_damage_raises_nothing_but_errors_of_the_library(name: str, data: st.DataObject):
    parser = PARSERS[name]
    parser.try_on(damage(data.draw(st.sampled_from(parser.examples)), Drawn(data)))


@pytest.mark.parametrize("name", PARSERS)
def test_deep_huge_and_broken_values_raise_nothing_but_errors_of_the_library(name: str):
    for data in (b"", b"\xff\xfe", b"null", b"[]", b"{}", b"1e999", b"9" * 5000, b'"\\ud800"', DEEP, DEEP + b"\n", b"[" * 100_000):
        PARSERS[name].try_on(data)


def test_an_untyped_error_is_seen():
    parser = Parser("naive", lambda data: json.loads(data)["a"], [b'{"a": 1}'])
    assert parser.try_on(b'{"a": 1}')
    with pytest.raises(KeyError):
        parser.try_on(b"{}")


def test_damage_reaches_every_place_and_writes_what_no_encoder_would():
    assert list(list_places({"a": [1, {"b": 2}]})) == [("a",), ("a", 0), ("a", 1), ("a", 1, "b")]
    assert write({"a": RAW + "1e999"}) == b'{"a": 1e999}'

    class Last:
        def below(self, number: int) -> int:
            return number - 1

    assert damage(b'{"a": [1, 2]}', Last()) != b'{"a": [1, 2]}'


# -- defects that were found so


def test_spans_of_weights_longer_than_the_answer_are_refused_without_a_list_of_their_length():
    with pytest.raises(EngineProtocolError, match="2 tokens"):
        expand_spans("a server", [("0", 0, 10**15)], 2)


@pytest.mark.parametrize("name", ["vllm generate", "sglang generate", "openai answer", "sglang facts"])
def test_an_infinite_count_in_an_answer_is_an_error_of_the_protocol(name: str):
    (example, *_) = PARSERS[name].examples
    text = example.replace(b'"end": 2', b'"end": 1e999').replace(b'"prompt_tokens": 1,', b'"prompt_tokens": 1e999,')
    text = text.replace(b'"max_req_input_len": 60', b'"max_req_input_len": 1e999')
    assert b"1e999" in text
    with pytest.raises(EngineProtocolError, match="inf"):
        PARSERS[name].read(text)


@pytest.mark.parametrize("delta", [{"content": 7}, {"reasoning": [1]}, {"tool_calls": [{"index": "0"}]}])
def test_parts_of_a_stream_that_are_no_text_are_refused(delta: dict[str, object]):
    with pytest.raises(EngineProtocolError, match="expected a part of an answer"):
        join_chunks([{"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": delta}]}])


def test_files_that_are_nested_too_deeply_are_named(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(DEEP + b"\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1 is not JSON"):
        read_metrics(metrics)
    (tmp_path / "manifest.json").write_bytes(DEEP)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: ValueError: lists or objects are nested too deeply"):
        verify_checkpoint(tmp_path)


def test_a_setting_of_more_digits_than_a_float_has_is_named():
    with pytest.raises(ConfigError, match=r"rl\.optimizer\.lr is 1000.*below 1\.8e308"):
        PARSERS["settings json"].read(b'{"rl": {"optimizer": {"lr": 1' + b"0" * 400 + b"}}}")
