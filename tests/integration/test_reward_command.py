"""`rollouts reward`: scores, reasons and times of a reward function on rows, and errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.command import main as rollouts
from integration.parts.rewards import parse_functions, use_own_reward
from integration.reward import main
from integration.settings.sections.generation import RewardSection
from integration.tasks.own_data import OwnData, create_jsonl_task
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError, DataError

MINE = """
import functools
import trio
from rollouts import CodeReward, EvaluateResult, reward_function

def right(completions, answer, **kwargs):
    return [float(text == truth) for text, truth in zip(completions, answer)]

def brief(completions, **kwargs):
    return [None if len(text) > 1 else 1.0 for text in completions]

def never(completions, **kwargs):
    return [None for _ in completions]

def broken(completions, **kwargs):
    scores = [len(text) for text in completions]
    return [score / 0 for score in scores]

async def slow(completions, **kwargs):
    await trio.sleep(0.05)
    return [float(len(text)) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

@reward_function
def judged(messages, ground_truth):
    return EvaluateResult(float(messages[-1].content == ground_truth), reason="compared")

class Right:
    def __call__(self, completions, answer, **kwargs):
        return right(completions, answer)

instance = Right()
partial = functools.partial(right, scale=2)
def text_score(sample): return "good"
def undecorated(messages, ground_truth): return 1.0
def of_text(response): return len(response)
def of_level(completions, level): return [0.0 for _ in completions]
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+7=", "answer": str(i + 7)}) + "\n" for i in range(20)))
    return tmp_path


def try_out(capsys: pytest.CaptureFixture[str], function: str, *flags: str) -> list[dict[str, object]]:
    status = main([f"mine.py:{function}", "--data", "rows.jsonl", "--rows", "4", "--json", *flags])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert status == int(any(line["score"] is None for line in lines))
    return lines


@pytest.mark.parametrize("function", ["right", "compute_score", "judged", "instance", "partial"])
def test_the_right_answer_is_told_from_that_of_the_next_row(function: str, files: Path, capsys: pytest.CaptureFixture[str]):
    lines = try_out(capsys, function)
    assert [line["score"] for line in lines] == [1.0, 0.0] * 4
    assert [line["completion"] for line in lines] == ["7", "8", "8", "9", "9", "10", "10", "7"]
    assert lines[2]["source"] == "rows.jsonl, line 2"
    if function == "compute_score":
        assert lines[0]["metrics"] == {"length": 1.0}
    if function == "judged":
        assert lines[0]["reason"] == "compared"


def test_several_functions_are_a_weighted_sum_without_those_that_do_not_judge(files: Path, capsys: pytest.CaptureFixture[str]):
    lines = try_out(capsys, "right*0.5,mine.py:brief*0.25")
    assert [line["score"] for line in lines] == [0.75, 0.25, 0.75, 0.25, 0.75, 0.0, 0.5, 0.25]
    assert lines[4]["metrics"] == {"right": 1.0, "brief": 1.0} and lines[6]["metrics"] == {"right": 1.0}
    assert all(line["score"] is None and "does not judge" in str(line["reason"]) for line in try_out(capsys, "never"))


def test_a_function_that_raises_is_told_with_its_line(files: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["mine.py:broken", "--data", "rows.jsonl", "--rows", "1"]) == 1
    out = capsys.readouterr().out
    number = next(k for k, line in enumerate(MINE.splitlines(), 1) if "score / 0" in line)
    assert "raised ZeroDivisionError" in out and "division by zero" in out and f"mine.py:{number})" in out
    assert "1 of 1 answers have no reward" in out
    assert main(["mine.py:slow", "--data", "rows.jsonl", "--timeout-s", "0.01", "--rows", "1"]) == 1
    assert "did not return within 0.01 s" in capsys.readouterr().out


def test_the_table_shows_scores_and_times_and_what_teaches_nothing(files: Path, capsys: pytest.CaptureFixture[str]):
    (files / "answers.jsonl").write_text('{"completion": "7"}\n{"completions": ["9", "' + "long " * 20 + '"]}\n')
    assert rollouts(["reward", "mine.py:slow", "--data", "rows.jsonl", "--rows", "2", "--completions", "answers.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "rows.jsonl, line 2   " in out and "\n 100.000  'long long " in out and "...'" in out
    longest = float(out.split("longest ")[-1].split(" ms")[0])
    assert longest >= 50
    assert main(["mine.py:slow", "--data", "rows.jsonl", "--rows", "1"]) == 0
    assert "all scores are equal" not in capsys.readouterr().out, "one answer, as the row has no other"
    assert main(["mine.py:slow", "--data", "rows.jsonl", "--rows", "2"]) == 0
    assert "all scores are equal" in capsys.readouterr().out


BAD: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no decorator": (["mine.py:undecorated"], ("takes messages, ground_truth", "@reward_function")),
    "a text for a sample": (["mine.py:of_text"], ("takes response", "sample.response")),
    "a column too many": (["mine.py:of_level"], ("needs the columns level", "20", "rows.jsonl, line 1", "(--columns NEW=COLUMN)")),
    "no such function": (["mine.py:rigth"], ("no function 'rigth'", "did you mean 'right'?")),
    "no such file": (["mien.py:right"], ("the function is 'mien.py:right': there is no file mien.py",)),
    "rows as in a run": (
        ["mine.py:right", "--data.path", "rows.jsonl"],
        ("--data.path is an option of `rollouts train`: here it is --data FILE",),
    ),
    "columns as in a run": (["mine.py:right", "--data.columns=answer=b"], ("here it is --columns NEW=COLUMN",)),
    "a model as in a run": (["mine.py:right", "--model.path", "DIR"], ("--model.path is an option", "left out")),
    "no name": (["mine.py"], ("file.py:name",)),
    "a weight that is none": (["mine.py:right*much"], ("the weight 'much'", "expected a number")),
    "a function twice": (["mine.py:right,mine.py:right"], ("names 'right' twice",)),
    "no rows": (["mine.py:right", "--data", "none.jsonl"], ("none.jsonl does not exist",)),
    "few rows": (["mine.py:right", "--rows", "0"], ("--rows is 0", "at least 1")),
    "no answers": (["mine.py:brief", "--data", "asked.jsonl"], ("asked.jsonl, line 1", "no ground truth", "--completions")),
    "answers that are none": (["mine.py:brief", "--completions", "asked.jsonl"], ("asked.jsonl, line 1", '{"completion": TEXT}')),
    "too few answers": (["mine.py:brief", "--completions", "one.jsonl"], ("answers to 1 rows, but 20", "--rows 1")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(name: str, files: Path, capsys: pytest.CaptureFixture[str]):
    (files / "asked.jsonl").write_text('{"prompt": "7"}\n')
    (files / "one.jsonl").write_text('{"completion": "7"}\n')
    flags, words = BAD[name]
    assert main(["--data", "rows.jsonl", "--rows", "20", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    for word in words:
        assert word in error, error


def test_rows_that_a_reward_cannot_use_are_named_before_a_run(files: Path):
    rows = [{"prompt": str(i)} | ({} if i in (3, 7) else {"level": i}) for i in range(20)]
    (files / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = OwnData(path="rows.jsonl", with_sft=False, needs_truth=False, eval_fraction=0)
    task = create_jsonl_task(create_char_tokenizer(), data)
    assert use_own_reward(RewardSection(function="mine.py:brief"), task).reward_fn is not None
    for function in ("of_level", "of_level*0.5,mine.py:brief*0.5"):
        with pytest.raises(DataError, match=r"of_level needs the columns level, which 2 of 20 rows lack: rows\.jsonl, line 4, rows"):
            use_own_reward(RewardSection(function=f"mine.py:{function}"), task)
    with pytest.raises(ConfigError, match="put them into one function"):
        use_own_reward(RewardSection(function="mine.py:right,mine.py:brief", sandboxed=True), task)


def test_names_and_weights_of_functions():
    assert parse_functions("a.py:f*0.5, b.c:g") == {"f": ("a.py:f", 0.5), "g": ("b.c:g", 1.0)}
