"""Marks of the data: a changed file is noticed when a run goes on, and its first changed lines are named."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import trio

from integration.parts.models import fix_hardware
from integration.run.directory import prepare_directory
from integration.settings.config import Config
from integration.settings.sections.data import DataSection
from integration.settings.sections.model import ModelSection
from integration.tasks import data_marks
from integration.tasks.data_marks import compare_data, find_changed_settings, mark_data, mark_settings, read_lines, write_lines
from integration.verify.check_run import check_run
from rollouts.errors import ConfigError, DataError
from rollouts.training.saving.checkpoints import save_checkpoint
from rollouts.training.saving.run_state import RunInputs, RunState
from tests.support import needs


def rows(count: int) -> list[str]:
    return [json.dumps({"prompt": f"{k}", "answer": "a"}) for k in range(count)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def config(*, output: Path | None = None, seed: int = 0, **data: object) -> Config:
    sections = {"model": ModelSection(path="model"), "data": DataSection(**data)}
    return fix_hardware(Config(task="jsonl", seed=seed, output_dir=None if output is None else str(output), **sections))


def changes(path: Path, before: list[str], after: list[str]) -> str:
    old = mark_data(config(path=str(write(path, before))))
    new = mark_data(config(path=str(write(path, after))))
    known = {found: type(marks).from_dict(json.loads(json.dumps(marks.to_dict()))) for found, marks in old.lines.items()}
    return compare_data(old.files, known, new).get("data.path", "")


def test_changed_lines_are_named(tmp_path: Path):
    before, path = rows(40), tmp_path / "a.jsonl"
    assert changes(path, before, list(before)) == ""
    assert "as before): line 3 changed" in changes(path, before, [*before[:2], before[2].replace('"a"', '"b"'), *before[3:]])
    assert changes(path, before, [*before[:2], "{}", "{}", *before[4:-1], "[]"]).endswith("lines 3-4, 40 changed")
    assert changes(path, before, [*before, "{}"]).endswith("its lines are the same up to there, 1 more of them")
    assert changes(path, before, before[:-3]).endswith("its lines are the same up to there, 3 fewer of them")
    assert changes(path, before, [line + " " if k % 2 else line for k, line in enumerate(before)]).endswith(
        "lines 2, 4, 6, 8, 10 and 15 more places changed"
    )


def test_marks_of_many_lines_are_merged_and_still_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_marks, "_MOST_MARKS", 8)
    before = rows(20)
    told = changes(tmp_path / "a.jsonl", before, [*before[:9], "{}", *before[10:]])
    assert told.endswith("lines 9-12 changed")
    assert changes(tmp_path / "a.jsonl", before[:5], [*before[:5], *before]).endswith("20 more of them")


def test_a_large_file_is_marked_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_marks, "WHOLE_BYTES", 100)
    monkeypatch.setattr(data_marks, "_PIECE_BYTES", 10)
    path = write(tmp_path / "a.jsonl", rows(40))
    old = mark_data(config(path=str(path)))
    assert not old.lines
    write(path, [*rows(39), "[]"])
    assert compare_data(old.files, {}, mark_data(config(path=str(path))))


def test_many_files_are_marked_within_a_budget_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_marks, "_ALL_BYTES", 2000)
    monkeypatch.setattr(data_marks, "_PIECE_BYTES", 50)
    monkeypatch.setattr(data_marks, "_LEAST_PIECE", 10)
    shards = [write(tmp_path / f"{k}.jsonl", rows(100)) for k in range(10)]
    given = config(mixture=tuple(str(shard) for shard in shards))
    pieces = data_marks._plan_pieces([shard.stat().st_size for shard in shards])
    assert pieces.count * pieces.num_bytes * len(shards) <= 2000
    old = mark_data(given)
    assert not old.lines
    assert compare_data(old.files, {}, mark_data(given)) == {}
    write(shards[3], [*rows(99), "[" + " " * (len(rows(100)[-1]) - 2) + "]"])  # of the same size
    assert list(compare_data(old.files, {}, mark_data(given))) == ["data.mixture[4]"]
    write(shards[3], rows(100))
    fewer = mark_data(config(mixture=tuple(str(shard) for shard in shards[:2])))  # other pieces of the files that are left
    assert list(compare_data(old.files, {}, fewer)) == [f"data.mixture[{k}]" for k in range(3, 11)]


def test_what_lies_beside_the_rows_of_a_folder_has_no_mark(tmp_path: Path):
    folder = tmp_path / "data"
    for name in ("train.jsonl", "test.jsonl", "README.md", "sub/train.jsonl", "run/train.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, rows(2))
    assert set(mark_data(config(path=str(folder), output=folder / "run")).files) == {"data.path/train.jsonl"}
    mixture = (f"{folder}(split='test')", f"{folder}(subset='sub')", f"{folder}(subset='run')")
    found = mark_data(config(mixture=mixture, output=folder / "run"))
    assert set(found.files) == {"data.mixture[1]/test.jsonl", "data.mixture[2]/sub/train.jsonl"}


@needs.DATASETS
def test_a_folder_of_datasets_is_marked_by_the_files_of_its_split(tmp_path: Path):
    import datasets

    one = datasets.Dataset.from_list([{"prompt": "1", "answer": "a"}])
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "many"))
    one.save_to_disk(str(tmp_path / "one"))
    found = set(mark_data(config(path=str(tmp_path / "many"), eval_path=str(tmp_path / "one"))).files)
    assert {name for name in found if name.endswith(".arrow")} == {
        "data.path/train/data-00000-of-00001.arrow",
        "data.eval_path/data-00000-of-00001.arrow",
    }
    assert not [name for name in found if "/test/" in name]


def test_folders_mixtures_and_the_hub(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.parquet").write_bytes(b"PAR1")
    (folder / ".hidden").write_text("x")
    one = write(tmp_path / "one.jsonl", rows(2))
    found = mark_data(config(path=str(one), eval_path=str(folder)))
    assert set(found.files) == {"data.path", "data.eval_path/train.parquet"}
    assert set(found.lines) == {found.files["data.path"].hash}
    found = mark_data(config(mixture=(f"{one}(repeat=2)", "hf://org/name")))
    assert set(found.files) == {"data.mixture[1]"}
    assert read_lines(write(tmp_path / "lines.json", [write_lines(found.lines)])) == dict(found.lines)
    assert read_lines(tmp_path / "none") == {}


def test_settings_are_told_apart_but_for_those_that_may_change_and_paths():
    before = RunInputs(data={}, settings=mark_settings(config(seed=1, path="a"), ("loggers",)))
    assert "data.path" not in before.settings
    assert not [name for name in before.settings if name.startswith("loggers")]
    assert find_changed_settings(before, mark_settings(config(seed=2, path="b"), ("loggers",))) == ["seed"]
    assert find_changed_settings(RunInputs(data={}, settings={"gone": "1"}), before.settings) == []


async def nothing(directory: Path) -> None:
    del directory


def start(output: Path, given: Config, *, resume: bool, told: list[str] | None = None, accepts: bool = False) -> RunInputs:
    said: list[str] = [] if told is None else told
    return prepare_directory(
        output,
        given,
        {"mode": "sft"},
        resume=resume,
        may_change=("output_dir",),
        checkpoint_dirs=[output / "sft/checkpoints"],
        tell=said.append,
        accepts_changed_data=accepts,
    )


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Config]:
    """A run of SFT with a checkpoint, on train.jsonl and held.jsonl."""
    train, held = write(tmp_path / "train.jsonl", rows(10)), write(tmp_path / "held.jsonl", rows(3))
    given = config(output=tmp_path / "run", path=str(train), eval_path=str(held))
    inputs = start(tmp_path / "run", given, resume=False)
    state = RunState(stage="sft", step=1, metrics_bytes=0, num_rows=10, inputs=inputs).to_dict()
    trio.run(partial(save_checkpoint, tmp_path / "run/sft/checkpoints", 1, write=nothing, run_state=state))
    return tmp_path / "run", given


def inputs_of(run: Path) -> list[str]:
    return [f"{finding.status}: {finding.found}" for finding in check_run(run).findings if finding.check == "inputs"]


def test_a_run_goes_on_with_unchanged_data(run: tuple[Path, Config]):
    told: list[str] = []
    assert set(start(*run, resume=True, told=told).data) == {"data.path", "data.eval_path"}
    assert told == []
    assert "2 data files are those that step_0001 was written with" in inputs_of(run[0])[0]


def test_changed_rows_are_refused_by_name_until_they_are_accepted(run: tuple[Path, Config]):
    write(run[0].parent / "train.jsonl", [*rows(4), "{}", *rows(10)[5:]])
    before = (run[0] / "config.json").read_bytes()
    with pytest.raises(DataError, match=r"not those of .*step_0001: data\.path has changed .*line 5 changed.*--accept-changed-data"):
        start(*run, resume=True)
    assert (run[0] / "config.json").read_bytes() == before
    assert "warn: data.path has changed" in inputs_of(run[0])[0]
    told: list[str] = []
    start(*run, resume=True, told=told, accepts=True)
    assert "line 5 changed" in told[0]
    assert "the run goes on with it" in told[0]


def test_lines_are_named_again_if_a_run_that_accepted_them_ended_without_a_checkpoint(run: tuple[Path, Config]):
    for line in (5, 7):
        write(run[0].parent / "train.jsonl", [*rows(line - 1), "{}", *rows(10)[line:]])
        start(*run, resume=True, accepts=True)
        with pytest.raises(DataError, match=f"line {line} changed"):
            start(*run, resume=True)
    write(run[0].parent / "train.jsonl", rows(10))
    start(*run, resume=True)


def test_changed_held_out_rows_are_a_warning(run: tuple[Path, Config]):
    write(run[0].parent / "held.jsonl", rows(4))
    told: list[str] = []
    start(*run, resume=True, told=told)
    assert len(told) == 1
    assert told[0].startswith("warning: data.eval_path has changed")


def test_data_that_moved_are_the_same(run: tuple[Path, Config]):
    old, new = run[0].parent / "train.jsonl", run[0].parent / "moved" / "train.jsonl"
    new.parent.mkdir()
    old.rename(new)
    told: list[str] = []
    start(run[0], config(output=run[0], path=str(new), eval_path=str(run[0].parent / "held.jsonl")), resume=True, told=told)
    assert len(told) == 1
    assert "is no longer there" in told[0]


def test_a_config_file_edited_beside_the_run_is_noticed(run: tuple[Path, Config]):
    file = run[0] / "config.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(ConfigError, match=r"--resume with other settings than .*step_0001 was written with: seed\."):
        start(run[0], config(output=run[0], seed=7, path=run[1].data.path, eval_path=run[1].data.eval_path), resume=True)
    assert "fail: config.json has other settings than step_0001: seed" in inputs_of(run[0])[0]
