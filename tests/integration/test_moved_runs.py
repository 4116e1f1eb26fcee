"""Runs whose paths were typed relative: resumed and evaluated from elsewhere, moved with their files, and of versions that kept them so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.convert.card import describe_model
from integration.eval.__main__ import main as evaluate
from integration.settings.command_line import CONFIG_FILE, RUN_FILE, find_run
from integration.settings.config import Config
from integration.settings.paths import has_moved, strip_directories, with_absolute_paths
from integration.settings.sections.data import DataSection
from integration.settings.sections.generation import RewardSection
from integration.settings.sections.model import CriticSection, ModelSection
from integration.settings.sections.stages import RLSection
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics

SIZES = (
    "--mode rl --task jsonl --rl.num-steps 1 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --generation.max-tokens 3 --num-threads 1 "
    "--evaluation.num-prompts 2 --checkpoint.rl-every 1 --checkpoint.keep-last-n 3 --rl.optimizer.schedule constant --quiet"
).split()  # fmt: skip
START = [*SIZES, *"--model.path m --data.path rows.jsonl --reward.function own.py:length --output-dir run".split()]
MORE = [*"--resume --quiet --rl.num-steps 2 --output-dir".split()]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a run of one step, with a model, data and a reward beside it."""
    folder = tmp_path / "project"
    (folder / "m").mkdir(parents=True)
    create_tiny_model(seed=1).save_pretrained(folder / "m")
    create_char_tokenizer().save_pretrained(folder / "m")
    rows = [{"prompt": f"{number}", "answer": "b"} for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.py").write_text("def length(completions, **columns):\n    return [float(len(text) % 3) for text in completions]\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(folder)
    assert main(START) == 0
    return folder


def numbers(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["reward_mean"]) for line in read_metrics(run / "metrics.jsonl") if "reward_mean" in line]


def settings(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_text())


def test_a_run_is_resumed_and_evaluated_from_another_directory(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    saved = settings(project / "run")
    assert (saved["model"]["path"], saved["data"]["path"]) == (str(project / "m"), str(project / "rows.jsonl"))
    assert saved["reward"]["function"] == f"{project}/own.py:length"
    card = describe_model(project / "run", project / "run" / "rl" / "checkpoints" / "step_0001")
    assert str(project) not in card and "| reward | own.py:length |" in card and "| data | rows.jsonl |" in card
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([*MORE, "../project/run", "--model.path", "../project/m"]) == 0  # the same model, as it is named from here
    assert [step for step, _ in numbers(project / "run")] == [1, 2]
    assert evaluate(["../project/run", "--output-dir", "evaluated", "--quiet", "--num-prompts", "1"]) == 0
    assert "reward" in capsys.readouterr().out and (tmp_path / "elsewhere" / "evaluated" / "results.jsonl").is_file()


def test_a_run_directory_with_relative_paths_is_resumed_where_it_was_started(project: Path):
    """Versions before kept paths as they were typed."""
    saved = settings(project / "run")
    saved["model"]["path"], saved["data"]["path"], saved["reward"]["function"] = "m", "rows.jsonl", "own.py:length"
    (project / "run" / "config.json").write_text(json.dumps(saved))
    assert main([*MORE, "run"]) == 0
    assert [step for step, _ in numbers(project / "run")] == [1, 2]
    assert settings(project / "run")["model"]["path"] == str(project / "m")


def test_a_run_that_was_moved_with_its_files_goes_on_with_their_new_place(project: Path, tmp_path: Path, monkeypatch, capsys):
    moved = tmp_path / "moved"
    project.rename(moved)
    monkeypatch.chdir(moved)
    assert main([*MORE, "run"]) == 2
    assert f"{project / 'rows.jsonl'} does not exist" in capsys.readouterr().err
    assert main([*MORE, "run", "--data.path", "rows.jsonl"]) == 2
    assert f"{project / 'm'}" in capsys.readouterr().err
    assert main([*MORE, "run", "--model.path", "m", "--data.path", "rows.jsonl", "--reward.function", "own.py:other"]) == 2
    assert "has no function 'other'" in capsys.readouterr().err
    assert main([*MORE, "run", "--model.path", "m", "--data.path", "rows.jsonl", "--reward.function", "own.py:length"]) == 0
    assert f"model.path: '{project / 'm'}' is no longer there, and '{moved / 'm'}' is taken in its place" in capsys.readouterr().err
    assert settings(moved / "run")["reward"]["function"] == f"{moved}/own.py:length"


def test_a_file_of_ones_own_in_the_newest_checkpoint_is_named_also_to_a_quiet_run(project: Path, capsys):
    assert main([*MORE, "run"]) == 0
    before = numbers(project / "run")
    newest = project / "run" / "rl" / "checkpoints" / "step_0002"
    (newest / "README.md").write_text("# mine\n")
    (newest / "notes.txt").write_text("mine\n")
    capsys.readouterr()
    assert main([*MORE, "run"]) == 0
    told = capsys.readouterr().err
    assert "warning: a checkpoint is passed over, and the steps behind the one before it are trained again: " in told
    assert "step_0002 has the file README.md (and 1 more), which its manifest does not list: move it out of the checkpoint" in told
    assert numbers(project / "run") == before  # the same numbers once more


def test_only_what_is_there_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m", "critic", "rows (1)"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("m")
    for name in ("a.jsonl", "b c.jsonl", "own.py", "more own.py"):
        (tmp_path / name).touch()
    config = Config(
        task="jsonl",
        model=ModelSection(path="link"),
        critic=CriticSection(path="critic/../critic"),
        data=DataSection(path="hf://me/rows", eval_path="rows (1)", mixture=("a.jsonl(weight=2)", "b c.jsonl", "hf://me/more(repeat=2)")),
        reward=RewardSection(function="own.py:right*0.8, more own.py:brief*0.2"),
    )
    made = with_absolute_paths(config)
    here = str(tmp_path)
    assert (made.model.path, made.critic.path) == (f"{here}/link", f"{here}/critic")
    assert (made.data.path, made.data.eval_path) == ("hf://me/rows", f"{here}/rows (1)")
    assert made.data.mixture == (f"{here}/a.jsonl(weight=2)", f"{here}/b c.jsonl", "hf://me/more(repeat=2)")
    assert made.reward.function == f"{here}/own.py:right*0.8, {here}/more own.py:brief*0.2"
    assert with_absolute_paths(made) == made
    hub = replace(config, model=ModelSection(path="Qwen/Qwen3-0.6B"), reward=RewardSection(function="module:f", model="me/rm@main"))
    kept = with_absolute_paths(hub)
    assert (kept.model, kept.reward) == (hub.model, hub.reward)


def test_a_path_that_an_expression_could_not_hold_stays_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("a,b", "plain", "c (1)"):
        (tmp_path / folder).mkdir()
        for name in ("own.py", "a.jsonl"):
            (tmp_path / folder / name).write_text("from rollouts.algorithms.presets import grpo as mine\n")
    monkeypatch.chdir(tmp_path / "a,b")
    config = Config(reward=RewardSection(function="own.py:right"), rl=RLSection(algorithm="own.py:mine()"))
    made = with_absolute_paths(config)
    assert (made.reward.function, made.rl.algorithm) == ("own.py:right", "own.py:mine()")
    monkeypatch.chdir(tmp_path / "plain")
    made = with_absolute_paths(config)
    assert made.rl.algorithm == f"{tmp_path}/plain/own.py:mine()" and with_absolute_paths(made) == made
    monkeypatch.chdir(tmp_path / "c (1)")
    section = DataSection(mixture=("a.jsonl(weight=2)", f"{tmp_path}/c (1)/a.jsonl(repeat=2)"))
    config = replace(config, task="jsonl", model=ModelSection(path="m"), data=section)
    for _ in range(2):  # a second time changes nothing
        config = with_absolute_paths(config)
        assert config.data.mixture == (f"{tmp_path}/c (1)/a.jsonl(weight=2)", f"{tmp_path}/c (1)/a.jsonl(repeat=2)")


def test_the_run_behind_a_link_is_found(tmp_path: Path):
    run, disk = tmp_path / "run", tmp_path / "disk"
    (disk / "step_0001").mkdir(parents=True)
    (run / "rl").mkdir(parents=True)
    (run / "rl" / "checkpoints").symlink_to(disk)
    for name in (CONFIG_FILE, RUN_FILE):
        (run / name).write_text("{}")
    assert find_run(run / "rl" / "checkpoints" / "step_0001") == run


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("model.path", "/gone/m", "/new/m", True),
        ("model.path", "/gone/m", "/new/other", False),
        ("model.path", "/tmp", "/new/tmp", False),  # it is still there
        ("model.path", "/gone/m", None, False),
        ("environment.similarity", "/gone/own.py:alike", 0.8, False),
        ("model.path", "Qwen/Qwen3-0.6B", "/new/Qwen3-0.6B", False),
        ("rl.algorithm", "/gone/m", "/new/m", False),
        ("reward.function", "/gone/a b.py:f*0.5,/gone/b.py:g*0.5", "/new/a b.py:f*0.5,b.py:g*0.5", True),
        ("reward.function", "/gone/a.py:f", "/new/a.py:g", False),
        ("data.mixture", ["/gone/a.jsonl(repeat=2)"], ["/new/a.jsonl(repeat=2)"], True),
        ("data.mixture", ["/gone/a.jsonl(repeat=2)"], ["/new/a.jsonl(repeat=3)"], False),
        ("data.mixture", ["/gone (1)/a.jsonl(repeat=2)"], ["/new/a.jsonl(repeat=2)"], True),
        ("data.path", "/tmp", "/new (1)/tmp", False),
        ("teacher.each", ["a=/gone/m", "b=http://h:1"], ["a=/new/m", "b=http://h:1"], True),
        ("teacher.each", ["a=/gone/m"], ["b=/new/m"], False),
        ("data.mixture", ["/gone/a.jsonl"], ["/new/a.jsonl", "/new/b.jsonl"], False),
    ],
)
def test_a_path_has_moved_if_its_directories_alone_differ_and_the_old_one_is_gone(name: str, before: Any, after: Any, expected: bool):
    assert has_moved(name, before, after) == expected


def test_directories_are_stripped_from_every_path_of_a_setting():
    assert strip_directories("model.path", "/mine/my models/m/") == "m"
    assert strip_directories("reward.function", "/mine/a b.py:f*0.5,c.py:g*0.5") == "a b.py:f*0.5,c.py:g*0.5"
    assert strip_directories("data.mixture", '/mine/a.jsonl(columns="prompt=a/b")') == 'a.jsonl(columns="prompt=a/b")'
