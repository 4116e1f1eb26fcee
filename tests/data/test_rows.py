"""Rows in memory and rows that are read again when taken: the same rows, places, mixtures and held-out questions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.datasets import DatasetSpec, load_rl_prompts, load_rows, load_sft_conversations, prepare_sft_samples
from rollouts.data.prompts import DataBuffer
from rollouts.data.rows.hub import HubName, parse_hub_name
from rollouts.data.rows.loaded import LazyRows, choose_heldout, find_repeated, hash_question
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, Prompt


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


ROWS: list[Any] = ["", *({"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(7)), "", "no json"]


def test_rows_that_are_read_when_taken_are_those_in_memory(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROWS)
    other = write(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y"}] * 3)

    def mix(lazy: bool) -> list[DatasetSpec]:
        return [DatasetSpec(path=str(path), repeat=2, max_samples=5, lazy=lazy), DatasetSpec(path=str(other), lazy=lazy)]

    kept, read = (load_sft_conversations(mix(lazy), skip_bad_rows=True) for lazy in (False, True))
    assert read.is_lazy and not kept.is_lazy
    assert list(read.rows) == list(kept.rows) and list(read.sources) == list(kept.sources) and read.bad_rows == kept.bad_rows
    assert read.sources[5] == f"{path}, line 2" and len(read) == 13
    tokenizer = create_char_tokenizer()
    prepared = [prepare_sft_samples(tokenizer, rows, skip_bad_rows=True) for rows in (kept, read)]
    assert list(prepared[0].rows) == list(prepared[1].rows)
    assert prepared[0].questions.tolist() == prepared[1].questions.tolist() == [hash_question(sample) for sample in prepared[0]]
    with pytest.raises(DataError, match=r"a\.jsonl, line 10: not JSON"):
        load_sft_conversations(DatasetSpec(path=str(path), lazy=True))


def test_a_buffer_over_rows_of_a_file_has_the_order_of_one_in_memory_and_goes_on_where_it_was(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROWS[:-1])
    prompts = load_rl_prompts(DatasetSpec(path=str(path), lazy=True))
    assert isinstance(prompts.rows, LazyRows)
    expected = DataBuffer(load_rl_prompts(path).rows, seed=3).get_prompts(20)
    buffer = DataBuffer(prompts.rows, seed=3)
    assert buffer.get_prompts(9) == expected[:9]
    again = DataBuffer(load_rl_prompts(DatasetSpec(path=str(path), lazy=True)).rows, seed=3)
    again.load_state(buffer.save_state())
    assert again.get_prompts(11) == expected[9:]


def test_a_lazy_row_is_read_from_the_file_each_time(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"a": 1}, {"a": 2}])
    rows = load_rows(DatasetSpec(path=str(path), lazy=True), lambda row, where: row)
    write(path, [{"a": 1}, {"a": 7}])
    assert rows[1] == {"a": 7} and rows.rows[-1] == {"a": 7} and list(rows.rows[1:]) == [{"a": 7}]
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 cannot be read again"):
        _ = rows[1]
    with pytest.raises(IndexError):
        _ = rows.rows[2]


@needs.DATASETS
def test_parquet_rows_are_found_in_their_row_groups(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": [str(i) for i in range(50)], "answer": list(range(50))}), path, row_group_size=7)
    kept, read = (load_rl_prompts(DatasetSpec(path=str(path), lazy=lazy)) for lazy in (False, True))
    order = random.Random(0).sample(range(50), 50)
    assert [read[i] for i in order] == [kept[i] for i in order] and read.sources[49] == f"{path}, row 49"


def test_json_csv_and_renamed_columns(tmp_path: Path):
    expected = [("1+1=", "2"), ("2+1=", "3")]
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": [{"q": p, "m": {"a": t}} for p, t in expected]}))
    (tmp_path / "b.csv").write_text('q,m,note\n"1+1=",2,"two\nlines"\n2+1=,3,\n')
    (tmp_path / "c.json").write_text("".join(json.dumps({"q": p, "m.a": t}) + "\n" for p, t in expected))
    for name, columns in (("a.json", "m.a"), ("b.csv", "m"), ("c.json", "m.a")):
        spec = DatasetSpec(path=str(tmp_path / name), columns=(("prompt", "q"), ("answer", columns)))
        loaded = load_rl_prompts(spec)
        assert [(p.content, p.metadata["ground_truth"]) for p in loaded] == expected
        assert "q" not in loaded[0].metadata
    assert (
        load_rl_prompts(spec.__class__(path=str(tmp_path / "b.csv"), columns=(("prompt", "q"), ("answer", "m"))))
        .sources[1]
        .endswith("line 4")
    )


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.9, 0.1), (1.0, 3.0)])
def test_weights_are_the_shares_of_an_epoch_and_every_row_is_in_it(weights: tuple[float, float], tmp_path: Path):
    paths = [write(tmp_path / f"{k}.jsonl", [{"text": f"{k}-{i}"} for i in range(n)]) for k, n in enumerate((10, 40))]
    specs = [DatasetSpec(path=str(path), weight=weight) for path, weight in zip(paths, weights, strict=True)]
    texts = [row["text"] for row in load_sft_conversations(specs)]
    share = sum(text[0] == "0" for text in texts) / len(texts)
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.02) and len(set(texts)) == 50
    with pytest.raises(ConfigError, match=r"1\.jsonl has no weight"):
        load_sft_conversations([specs[0], DatasetSpec(path=str(paths[1]))])


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 12), st.integers(0, 5))
def test_held_out_questions_are_on_one_side_whatever_the_order(questions: list[int], count: int, seed: int):
    hashes = np.array([hash_question(Prompt(content=f"question {q}")) for q in questions], dtype=np.uint64)
    held = choose_heldout(hashes, count)
    if count and len(set(questions)) > 1:
        assert 1 <= held.sum() < len(hashes) and (held.sum() <= count or len(set(hashes[held].tolist())) == 1)
    else:
        assert not held.any()
    assert not set(hashes[held].tolist()) & set(hashes[~held].tolist())
    order = random.Random(seed).sample(range(len(hashes)), len(hashes))
    assert set(hashes[order][choose_heldout(hashes[order], count)].tolist()) == set(hashes[held].tolist())


def test_repeated_questions_are_found_whether_they_are_texts_or_messages():
    prompts = [Prompt(content="a"), Prompt(content="b"), Prompt(content=(Message(role="user", content="a"),)), Prompt(content="a")]
    hashes = np.array([hash_question(prompt) for prompt in prompts], dtype=np.uint64)
    assert find_repeated(hashes) == [(2, 0), (3, 0)]
    talk = (Message(role="system", content="b"), Message(role="user", content="a"))
    assert hash_question(Prompt(content=talk)) not in hashes.tolist()
    asked = (Message(role="user", tool_calls=({"function": {"name": "a"}},)),)  # a message may have no text
    assert hash_question(Prompt(content=asked)) not in hashes.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://imdb", HubName(name="imdb")),
        ("hf://org/name", HubName(name="org/name")),
        ("hf://org/name:test", HubName(name="org/name", split="test")),
        ("hf://org/name@main/socratic:train[:10]", HubName(name="org/name", revision="main", subset="socratic", split="train[:10]")),
        ("hf://org/name/socratic", HubName(name="org/name", subset="socratic")),
    ],
)
def test_names_of_the_hub(text: str, expected: HubName):
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize("text", ["hf://", "hf://org/", "hf:///name", "hf://org/@main", "hf://a/b/c/d", "hf://a/b:"])
def test_names_that_the_hub_cannot_have(text: str):
    with pytest.raises(ConfigError, match="is no name of a data set of the hub"):
        parse_hub_name(text)
