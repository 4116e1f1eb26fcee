"""Loading data: errors with file and line, formats, mixtures, round trips."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import needs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import prepare_sft_sample
from rollouts.data.datasets import (
    BadRow,
    DatasetSpec,
    LoadedRows,
    load_jsonl,
    load_rl_prompts,
    load_sft_conversations,
    mix_datasets,
    prepare_sft_samples,
)
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, Prompt


def write(path: Path, *lines: object) -> Path:
    """A file with one line per argument: bytes as they are, anything else as JSON."""
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return path


def test_blank_lines_bom_and_crlf_are_fine(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xc3\xa9 \\ud83d\\ude00 \xe2\x80\xa8"}\r\n{"a": [NULL]}\n'.replace(b"NULL", b"null")
    )
    loaded = load_jsonl(path)
    assert list(loaded) == [{"a": 1}, {"a": "é 😀 \u2028"}, {"a": [None]}]
    assert loaded.sources == (f"{path}, line 1", f"{path}, line 4", f"{path}, line 5")
    assert (len(loaded), loaded[0], loaded[1:], loaded.bad_rows) == (3, {"a": 1}, loaded.rows[1:], ())


BAD_LINES = [
    (b'{"a": 1', "not JSON"),
    (b"hello", "not JSON"),
    (b'{"a": 1} {"a": 2}', "not JSON"),
    (b"[1, 2]", "expected a JSON object, found list"),
    (b'"text"', "expected a JSON object, found str"),
    (b"null", "expected a JSON object, found NoneType"),
    (b'{"a": NaN}', "NaN is not a JSON number"),
    (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"a": 1e999}', "out of the range"),
    (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
    (b'{"a": "\\ud800"}', "lone surrogate"),
    (b'{"\\udfff": 1}', "lone surrogate"),
    (b'{"a": 1, "a": 2}', "'a' stands twice"),
    (b'{"a": ' + b"[" * 100_000, "not JSON"),
    (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    (b'{"a": "\x00"}', "not JSON"),
    ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_bad_lines_are_named_and_can_be_skipped(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", {"ok": 1}, b"", line, {"ok": 2})
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: ") as error:
        load_jsonl(path)
    assert reason in str(error.value)
    assert len(str(error.value)) < 500
    loaded = load_jsonl(path, skip_bad_rows=True)
    assert list(loaded) == [{"ok": 1}, {"ok": 2}]
    assert loaded.sources[1] == f"{path}, line 4"
    (bad,) = loaded.bad_rows
    assert isinstance(bad, BadRow)
    assert bad.source == f"{path}, line 3"
    assert reason in bad.reason


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=20))
def test_no_line_is_lost_or_crashes(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("fuzz") / "a.jsonl"
    write(path, {"first": 1}, *lines)
    loaded = load_jsonl(path, skip_bad_rows=True)
    assert len(loaded) + len(loaded.bad_rows) == 1 + sum(bool(line.strip()) for line in lines)


def test_files_that_hold_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", b"", b" ")
    with pytest.raises(DataError, match=r"a\.jsonl: the data set is empty"):
        load_jsonl(path)
    path = write(tmp_path / "b.jsonl", b"x", b"y")
    with pytest.raises(DataError, match=r"b\.jsonl.*empty.*2 bad rows.*line 1"):
        load_jsonl(path, skip_bad_rows=True)
    with pytest.raises(DataError, match=r"none\.jsonl does not exist: give"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        load_rl_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="has no train"):
        load_jsonl(tmp_path)
    with pytest.raises(DataError, match="list of data sets is empty"):
        load_rl_prompts([])


def test_conversations_in_three_formats(tmp_path):
    turns = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": turns, "level": 3},
        {"prompt": "1+1=", "completion": "2"},
        {"question": "1+1=?", "answer": "2", "level": 3},
    )
    loaded = load_sft_conversations(path)
    assert list(loaded) == [{"messages": turns, "level": 3}, {"prompt": "1+1=", "completion": "2"}, {"messages": turns, "level": 3}]
    samples = prepare_sft_samples(create_char_tokenizer(), loaded)
    assert [s.index for s in samples] == [0, 1, 2]
    assert samples[0].tokens == samples[2].tokens
    assert samples[0].metadata == {"level": 3}
    assert samples.sources == loaded.sources


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": "x"}, "SFT knows no row with the columns body. It reads rows with messages; prompt and completion"),
        ({"prompt": "x"}, "knows no row with the columns prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no message has the role assistant"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0: content is 3"),
        ({"prompt": "x", "completion": 3}, "found 3 .int., expected a list"),
        ({"question": 3, "answer": "x"}, "message 0: content is 3"),
    ],
)
def test_conversations_that_lack_a_field(tmp_path, row, reason):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "completion": "2"}, row)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2.*{reason}"):
        load_sft_conversations(path)
    loaded = load_sft_conversations(path, skip_bad_rows=True)
    assert (len(loaded), len(loaded.bad_rows)) == (1, 1)


def test_prompts_in_all_formats(tmp_path):
    user = {"role": "user", "content": "1+1=?"}
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "ground_truth": "2", "level": 3},
        {"prompt": [user], "answer": "2"},
        {"messages": [user], "answer": "b", "ground_truth": "a"},
        {"question": "how many?", "answer": "so\n#### 1,234 "},
        {"question": "how many?", "answer": 7},
    )
    message, how_many = Message(**user), Message(role="user", content="how many?")
    assert list(load_rl_prompts(path)) == [
        Prompt(content="1+1=", metadata={"ground_truth": "2", "level": 3}),
        Prompt(content=(message,), metadata={"answer": "2", "ground_truth": "2"}),
        Prompt(content=(message,), metadata={"answer": "b", "ground_truth": "a"}),
        Prompt(content=(how_many,), metadata={"answer": "so\n#### 1,234 ", "ground_truth": "1234"}),
        Prompt(content=(how_many,), metadata={"answer": 7, "ground_truth": 7}),
    ]
    assert load_rl_prompts(path, as_messages=False)[3].content == "how many?"
    assert sorted(p.index for p in DataBuffer(load_rl_prompts(path)).get_prompts(5)) == list(range(5))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x"}, "expected 'ground_truth' or 'answer'"),
        ({"prompt": "x", "answer": None}, "expected 'ground_truth' or 'answer'"),
        ({"text": "x", "answer": "y"}, "RL knows no row with the columns text, answer. It reads rows with prompt; messages"),
        ({"prompt": "", "answer": "y"}, "empty string"),
        ({"messages": [{"role": "assistant", "content": "y"}], "answer": "y"}, "give the answer away"),
    ],
)
def test_prompts_that_lack_a_field(tmp_path, row, reason):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "2"}, row)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2.*{reason}"):
        load_rl_prompts(path)
    assert len(load_rl_prompts(path, skip_bad_rows=True)) == 1


def test_prompts_without_ground_truth_are_fine_when_asked_for(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1"})
    assert list(load_rl_prompts(path, require_ground_truth=False)) == [Prompt(content="1")]


def test_a_conversation_that_is_too_long_is_named_by_file_and_line(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "completion": "2"}, b"oops", {"prompt": "1" * 9, "completion": "2"})
    loaded = load_sft_conversations(path, skip_bad_rows=True)
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: the conversation has 11 tokens, more than max_length 5.*truncate"):
        prepare_sft_samples(create_char_tokenizer(), loaded, max_length=5)
    samples = prepare_sft_samples(create_char_tokenizer(), loaded, max_length=5, skip_bad_rows=True)
    assert len(samples) == 1
    assert [bad.source for bad in samples.bad_rows] == [f"{path}, line 2", f"{path}, line 3"]


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.none() | st.integers(1, 8)), min_size=1, max_size=4))
def test_mixture_counts(parts):
    specs = [DatasetSpec(path=str(i), repeat=repeat, max_samples=most) for i, (_, repeat, most) in enumerate(parts)]
    sets = [LoadedRows(rows=tuple((i, k) for k in range(n)), sources=("",) * n) for i, (n, _, _) in enumerate(parts)]
    mixed = mix_datasets(list(zip(specs, sets, strict=True)))
    for i, (n, repeat, most) in enumerate(parts):
        kept = n if most is None else min(n, most)
        assert [row for row in mixed if row[0] == i] == [(i, k) for k in range(kept)] * repeat
    assert len(mixed) == len(mixed.sources) == sum(repeat * min(n, most or n) for n, repeat, most in parts)


def test_mixture_of_files_and_folders(tmp_path):
    a = write(tmp_path / "a.jsonl", *({"prompt": f"a{i}", "answer": i} for i in range(5)))
    (tmp_path / "folder" / "main").mkdir(parents=True)
    write(tmp_path / "folder" / "main" / "train.jsonl", {"prompt": "train", "answer": 0}, b"bad")
    write(tmp_path / "folder" / "main" / "test.jsonl", {"prompt": "test", "answer": 0})
    folder = str(tmp_path / "folder")
    specs = [
        DatasetSpec(path=str(a), repeat=2, max_samples=2),
        DatasetSpec(path=folder, subset="main"),
        DatasetSpec(path=folder, subset="main", split="test", repeat=3),
    ]
    loaded = load_rl_prompts(specs, skip_bad_rows=True)
    assert [p.content for p in loaded] == ["a0", "a1", "a0", "a1", "train", "test", "test", "test"]
    assert [bad.source for bad in loaded.bad_rows] == [f"{tmp_path / 'folder' / 'main' / 'train.jsonl'}, line 2"]
    with pytest.raises(DataError, match=r"no dev\.jsonl"):
        load_rl_prompts(DatasetSpec(path=folder, subset="main", split="dev"))
    with pytest.raises(DataError, match="is a file; split 'test'"):
        load_rl_prompts(DatasetSpec(path=str(a), split="test"))


@pytest.mark.parametrize("changes", [{"repeat": 0}, {"max_samples": 0}, {"path": ""}])
def test_impossible_ingredients_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        DatasetSpec(**({"path": "a"} | changes))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


@given(
    st.lists(st.tuples(TEXTS, TEXTS, st.dictionaries(TEXTS.map("k".__add__), st.integers() | TEXTS | st.none(), max_size=2)), min_size=1)
)
def test_jsonl_round_trip(tmp_path_factory, examples):
    path = tmp_path_factory.mktemp("export") / "a.jsonl"
    rows = [
        {"messages": [Message(role="user", content=question), Message(role="assistant", content=answer)], **rest}
        for question, answer, rest in examples
    ]
    plain = [{**row, "messages": [message.to_dict() for message in row["messages"]]} for row in rows]
    write(path, *plain)
    loaded = load_sft_conversations(path)
    assert list(loaded) == plain
    tokenizer = create_char_tokenizer()
    assert [prepare_sft_sample(tokenizer, row) for row in rows] == [prepare_sft_sample(tokenizer, row) for row in loaded]


def test_parquet_and_hf_folders_without_the_package_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet needs the package `datasets` .*pip install 'rollouts-rl\[data\]'"):
        load_rl_prompts(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="needs the package `datasets`"):
        load_rl_prompts("hf://org/name")


@pytest.mark.more
@needs.DATASETS
def test_parquet_and_hf_folders(tmp_path):
    datasets = importlib.import_module("datasets")
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    assert list(load_sft_conversations(tmp_path / "folder")) == rows
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    loaded = load_sft_conversations(tmp_path / "a.parquet")
    assert list(loaded) == rows
    assert loaded.sources[1] == f"{tmp_path / 'a.parquet'}, row 1"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(tmp_path / "splits"))
    assert list(load_sft_conversations(DatasetSpec(path=str(tmp_path / "splits"), split="test"))) == rows
    with pytest.raises(DataError, match=r"splits \['test'\], but not 'train'"):
        load_sft_conversations(tmp_path / "splits")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read as Parquet"):
        load_sft_conversations(tmp_path / "broken.parquet")
    messages = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1", "name": "bo"}]}]
    datasets.Dataset.from_list(messages).save_to_disk(str(tmp_path / "chat"))
    assert len(prepare_sft_samples(create_char_tokenizer(), load_sft_conversations(tmp_path / "chat"))) == 1


@pytest.mark.more
@needs.GSM8K
def test_gsm8k():
    directory = needs.get_gsm8k()
    prompts = load_rl_prompts(DatasetSpec(path=str(directory), split="test"))
    assert len(prompts) == 1319
    assert all(float(p.metadata["ground_truth"]) is not None for p in prompts)
    assert len(load_sft_conversations(directory)) == 7473
