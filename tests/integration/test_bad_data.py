"""What a user can have wrong in their data: the command says where, what it found and what to do, and writes nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import needs
import pytest

from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.testing import create_tiny_model

GOOD = [{"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)} for i in range(20)]
Refuse = Callable[..., str]
CHAT = {"role": "user", "content": "a"}
BAD_LINES: dict[str, tuple[str, Any, tuple[str, ...]]] = {  # mode, the row in line 3, words of the message
    "no JSON": ("rl", "{'prompt': 'a'}", ("not JSON", "{'prompt': 'a'}")),
    "cut off": ("rl", '{"prompt": "a", "ans', ("not JSON", "Unterminated string")),
    "a list": ("rl", "[1, 2]", ("expected a JSON object", "[1, 2]", "under a name that ends in .json")),
    "a list over many lines": ("rl", "[\n {\n", ("not JSON", "under a name that ends in .json")),
    "prompts in SFT": ("sft", {"prompt": "a", "answer": "b"}, ("columns prompt, answer", "--mode rl")),
    "NaN": ("rl", '{"prompt": "a", "answer": NaN}', ("NaN is not a JSON number",)),
    "a key twice": ("rl", '{"prompt": "a", "prompt": "b", "answer": "c"}', ("'prompt' stands twice",)),
    "half a surrogate": ("rl", '{"prompt": "\\ud800", "answer": "c"}', ("lone surrogate",)),
    "not UTF-8": ("rl", b'{"prompt": "\xff", "answer": "c"}', ("not UTF-8 at byte 12", "save the file as UTF-8")),
    "unknown columns": ("rl", {"query": "a", "answer": "b"}, ("columns query, answer", "question", "--data.columns prompt=NAME")),
    "no columns": ("rl", {}, ("no columns", "prompt")),
    "no answer": ("rl", {"prompt": "a"}, ("'ground_truth' or 'answer'", "['prompt']", "--reward.function")),
    "empty prompt": ("rl", {"prompt": "", "answer": "b"}, ("empty string",)),
    "prompt is a number": ("rl", {"prompt": 3, "answer": "b"}, ("prompt: found 3 (int)", "expected a list")),
    "prompt gives the answer away": ("rl", {"prompt": [{"role": "assistant", "content": "a"}], "answer": "a"}, ("remove it",)),
    "message without a role": ("rl", {"prompt": [{"content": "a"}], "answer": "b"}, ("message 0 has no role", "['content']")),
    "message with unknown keys": ("rl", {"prompt": [{**CHAT, "mood": "x"}], "answer": "b"}, ("unknown keys ['mood']", "Rename")),
    "a picture": ("rl", {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "b"}, ("['image']", "text alone")),
    "question is a list": ("rl", {"question": ["a"], "answer": "b"}, ("question is ['a']", "expected a text")),
    "columns of SFT unknown": ("sft", {"ask": "a", "reply": "b"}, ("columns ask, reply", "instruction and output", "completion=NAME")),
    "preference in SFT": ("sft", {"prompt": "a", "chosen": "b", "rejected": "c"}, ("train-reward-model", "chosen")),
    "unpaired preference in SFT": ("sft", {"prompt": "a", "completion": "b", "label": False}, ("without the column label",)),
    "nobody answers": ("sft", {"messages": [CHAT]}, ("no message has the role assistant", "['user']")),
    "unknown speaker": ("sft", {"conversations": [{"from": "alien", "value": "a"}]}, ('"from" \'alien\'', "human")),
    "a turn without a value": ("sft", {"conversations": [{"from": "human"}]}, ("turn 0: value is None",)),
    "a call that is no JSON": ("sft", {"conversations": [{"from": "function_call", "value": "add(2)"}]}, ("not JSON", "add(2)")),
    "conversations is a text": ("sft", {"conversations": "a"}, ("conversations is 'a'", '{"from": ..., "value": ...}')),
    "instruction is empty": ("sft", {"instruction": "", "output": "a"}, ("instruction is ''",)),
    "input is a list": ("sft", {"instruction": "a", "input": [], "output": 3}, ("input is []",)),
    "output is a number": ("sft", {"instruction": "a", "output": 3}, ("output is 3", "expected a text")),
    "history is flat": ("sft", {"instruction": "a", "output": "b", "history": ["c"]}, ("history holds 'c'",)),
    "text is null": ("sft", {"text": None}, ("text is None",)),
    "tools are no JSON": ("sft", {"tools": "add", "messages": [CHAT]}, ("tools is not JSON", "'add'")),
    "tools are numbers": ("sft", {"tools": [1], "messages": [CHAT]}, ("tools is [1]", "JSON schemas")),
    "completion by the user": ("sft", {"prompt": [CHAT], "completion": [CHAT]}, ("roles ['user']", "one assistant message")),
    "too long": ("sft", {"prompt": "a" * 90, "completion": "b" * 90}, ("181 tokens", "128", "--data.max-length")),
}  # fmt: skip


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(
        b"".join(
            (row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()) + b"\n" for row in rows
        )
    )
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model with a context of 128 tokens."""
    directory = str(tmp_path_factory.mktemp("model"))
    tiny = create_tiny_model(vocab_size=64, hidden_size=16, num_layers=1)
    tiny.config.max_position_embeddings = 128
    tiny.save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def refuse(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that refuses its data and writes nothing; return its message."""

    def run(*flags: str) -> str:
        out = tmp_path / "run"
        assert main([*flags, "--model.path", model, "--output-dir", str(out), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error and error.splitlines()[-1].startswith("error: ") and not out.exists(), error
        return error

    return run


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_row_is_named_by_file_and_line_with_what_was_found(name: str, tmp_path: Path, refuse: Refuse):
    mode, row, words = BAD_LINES[name]
    path = write(tmp_path / "mine.jsonl", [*GOOD[:2], row, *GOOD[2:]])
    for more in ([], ["--data.streaming"]):
        error = refuse("--mode", mode, "--data.path", str(path), *more)
        assert f"{path}, line 3: " in error
        for word in words:
            assert word in error, error


ROWS = {"prompt": "a", "answer": "b"}
BAD_FILES: dict[str, tuple[str, Any, tuple[str, ...]]] = {  # name of the file, its content (None = missing), words of the message
    "missing": ("none.jsonl", None, ("none.jsonl does not exist: give --data.path", ".jsonl, .json, .csv or .parquet")),
    "empty": ("empty.jsonl", "", ("empty.jsonl: the data set is empty", "0 usable rows")),
    "blank": ("blank.jsonl", "\n \n", ("the data set is empty",)),
    "a folder without the split": ("folder/test.jsonl", json.dumps(ROWS), ("has no train.jsonl",)),
    "JSON cut off": ("a.json", '[{"prompt": "a"},\n {"prompt"', ("a.json, line 2: not JSON",)),
    "JSON of one number": ("a.json", "3", ("found a JSON int", "list of objects")),
    "JSON of numbers": ("a.json", "[1, 2]", ("a.json, row 0: expected a JSON object, found int",)),
    "CSV with a cell too many": ("a.csv", "prompt,answer\na,b\nc,d,e\n", ("a.csv, line 3: 3 cells for the 2 columns prompt, answer",)),
    "CSV with a column twice": ("a.csv", "prompt,prompt\na,b\n", ("a.csv, line 1", "each once")),
    "CSV without the columns": ("a.csv", "x;y\na;b\n", ("a.csv, line 2: RL knows no row with the columns x;y",)),
    "CSV with an open quote": ("a.csv", 'prompt,answer\n"a,b\n', ("not CSV", "convert it to JSONL")),
    "no Parquet": ("a.parquet", "PAR1", ("a.parquet cannot be read as Parquet", "write or download it again")),
    "a page under the name of Parquet": ("a.parquet", "<html></html>", ("as Parquet: the file is a web page", "the link to the file")),
    "gzip": ("a.jsonl", gzip.compress(b"{}"), ("line 1: the file is compressed by gzip", "gunzip")),
    "a workbook": ("a.xlsx", b"PK\x03\x04\x14", ("a ZIP archive or a workbook", "as CSV")),
    "UTF-16": ("a.jsonl", json.dumps(ROWS).encode("utf-16"), ("the file is in UTF-16", "save the file as UTF-8")),
    "UTF-16 in a list": ("a.json", json.dumps([ROWS]).encode("utf-16"), ("the file is in UTF-16", "save the file as UTF-8")),
    "a pointer of Git LFS": ("a.jsonl", "version https://git-lfs.github.com/spec/v1", ("a pointer of Git LFS", "git lfs pull")),
    "zeros": ("a.jsonl", b"\0" * 99, ("bytes of zeros", "download it again")),
    "text": ("a.txt", "hello", ("line 1: not JSON", "begins with 'hello'", '{"question": "1+1=", "answer": "2"}')),
    "old line ends": ("a.jsonl", '{"prompt": "a"}\r{"prompt": "b"}\r', ("line 1: not JSON", "Unix or Windows line ends")),
    "a number of 5,000 digits": ("a.jsonl", f'{{"prompt": "a", "answer": {"9" * 5000}}}', ("more than 4,300 digits", "as a text")),
    "lists in lists": ("a.jsonl", "[" * 100_000, ("line 1: not JSON: lists or objects are nested too deeply",)),
    "a comma too many": ("a.json", '[{"prompt": "a"},\n]', ("a.json, line 2: not JSON", "near", "mend the file there")),
    "the answer is null": ("a.jsonl", '{"prompt": "a", "answer": null}', ("line 1: answer is null", "--reward.function")),
    "too few rows": ("few.jsonl", "\n".join(json.dumps({**ROWS, "prompt": str(i)}) for i in range(9)), ("9 rows", "at least 10 rows")),
    "one question": ("one.jsonl", "\n".join([json.dumps(ROWS)] * 20), ("20 rows with 1 questions", "--data.eval-fraction 0")),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs.DATASETS) if "Parquet" in name else name for name in BAD_FILES])
def test_a_bad_file_is_named_with_what_was_found(name: str, tmp_path: Path, refuse: Refuse):
    file, content, words = BAD_FILES[name]
    path = tmp_path / file
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refuse("--mode", "rl", "--data.path", str(path.parent if "/" in file else path))
    for word in words:
        assert word in error, error


def link_to(target: str) -> Callable[[], None]:
    return lambda: Path("link.jsonl").symlink_to(target)


BAD_PATHS: dict[str, tuple[str, Callable[[], None], tuple[str, ...]]] = {
    "an address": ("https://example.com/a.jsonl", lambda: None, ("is an address", "download the file first")),
    "a link to nowhere": ("link.jsonl", link_to("gone.jsonl"), ("link.jsonl is a link to gone.jsonl", "no file")),
    "a link to itself": ("link.jsonl", link_to("link.jsonl"), ("link.jsonl is a link to link.jsonl", "no file")),
    "the home directory": ("~/rows.jsonl", lambda: None, ("~ stands for the home directory in a shell only", "the whole path")),
    "two files": ("a.jsonl,b.jsonl", lambda: None, ("read as the name of one file", "--data.mixture FILE FILE")),
    "a pattern": ("*.jsonl", lambda: None, ("read as the name of one file", "--data.mixture FILE FILE")),
    "nothing": ("", lambda: None, ("--data.path", "empty")),
    "a device": ("/dev/null", lambda: None, ("/dev/null", "the data set is empty")),
}


@pytest.mark.parametrize("name", BAD_PATHS)
def test_a_path_without_rows_is_told_with_what_may_be_meant(
    name: str, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given, make, words = BAD_PATHS[name]
    monkeypatch.chdir(tmp_path)
    make()
    error = refuse("--mode", "rl", "--data.path", given)
    assert all(word in error for word in words), error


def test_a_dry_run_looks_whether_the_rows_are_there(refuse: Refuse):
    assert "gone.jsonl does not exist: give --data.path" in refuse("--mode", "rl", "--data.path", "gone.jsonl", "--dry-run")
    assert "--data.eval-path" in refuse("--mode", "rl", "--data.path", __file__, "--data.eval-path", "gone.jsonl", "--dry-run")


BAD_OPTIONS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "renaming without =": (["--data.columns", "prompt"], ("data.columns has 'prompt'", "NEW=COLUMN")),
    "two columns for one": (["--data.columns", "prompt=a,prompt=b"], ("'prompt' from 'a' and from 'b'",)),
    "a column that is not there": (["--data.columns", "prompt=ask"], ("line 1", "no column 'ask'", "prompt, completion, answer")),
    "a path that is not there": (["--data.columns", "prompt=answer.text"], ("line 1", "no column 'answer.text'")),
    "a fraction above 1": (["--data.eval-fraction", "2"], ("--data.eval-fraction is 2.0", "less than 1")),
    "streaming of CSV": (["--data.path", "good.csv", "--data.streaming"], ("cannot be streamed", "convert it to JSONL")),
    "a weight for one": (["--data.mixture", "good.jsonl(weight=1)", "good.csv", "--mode", "sft"], ("good.csv has no weight",)),
    "a weight of 0": (["--data.mixture", "good.jsonl(weight=0)"], ("DatasetSpec.weight is 0", "above 0")),
    "a name of the hub with too much": (["--data.path", "hf://a/b/c/d"], ("hf://ORG/NAME[@REVISION]",)),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_option_of_data_is_named(name: str, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.jsonl", GOOD)
    (tmp_path / "good.csv").write_text("prompt,answer,completion\n" + "".join(f"{i},{i},{i}\n" for i in range(20)))
    flags, words = BAD_OPTIONS[name]
    path = [] if "--data.path" in flags or "--data.mixture" in flags else ["--data.path", "good.jsonl"]
    error = refuse("--mode", "rl", *path, *flags)
    for word in words:
        assert word in error, error
