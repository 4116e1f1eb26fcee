"""Log-probs of the reference that are computed once: kept for the same reference wherever it is, and for no other."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import integration.parts.models as models
import integration.run.preferences as preferences
from integration.run.directory import REFERENCE_FILE
from integration.settings.config import Config
from integration.settings.sections.model import ModelSection, ReferenceSection
from integration.settings.sections.preference import PreferenceSection
from integration.tasks.reference_scores import append_scores, hash_pair, mark_reference, open_scores
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import prepare_preference_pair
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics

SHORT = (
    "--mode dpo --num-threads 1 --preference.reference precomputed --preference.batch-size 4 --preference.num-steps 2 "
    "--preference.eval-every 0 --preference.checkpoint-every 1 --preference.optimizer.schedule constant"
).split()  # fmt: skip
OWN = [*SHORT, *"--model.path m --preference.path pairs.jsonl --preference.eval-path held.jsonl --output-dir run".split()]
BUILT_IN = [*SHORT, *"--model.num-layers 1 --model.intermediate-size 32 --preference.num-pairs 12 --preference.num-heldout 4".split()]


def write_pairs(path: Path, numbers: range) -> None:
    rows = [{"prompt": f"{i}=", "chosen": str(i % 5), "rejected": str(5 + i % 5)} for i in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_model(path: Path, seed: int) -> None:
    create_tiny_model(seed=seed).save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model and pairs."""
    folder = tmp_path / "project"
    save_model(folder / "m", 1)
    write_pairs(folder / "pairs.jsonl", range(12))
    write_pairs(folder / "held.jsonl", range(20, 24))
    monkeypatch.chdir(folder)
    return folder


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def test_a_run_goes_on_from_elsewhere_and_where_it_was_moved(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    assert main(OWN) == 0
    assert "log-probs of 16 pairs under the reference are computed, once" in capsys.readouterr().out
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["--resume", "--output-dir", "../project/run", "--preference.num-steps", "3"]) == 0
    write_pairs(project / "held.jsonl", range(21, 25))  # one of them is new
    moved = project.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    places = "--model.path m --preference.path pairs.jsonl --preference.eval-path held.jsonl".split()
    assert main(["--resume", "--output-dir", "run", "--preference.num-steps", "4", *places]) == 0
    said = capsys.readouterr()
    assert said.out.count("are computed, once") == 1 and "log-probs of 1 pairs under the reference are computed, once" in said.out
    assert "warning: preference.eval_path has changed" in said.err
    assert len(losses(moved / "run")) == 4
    assert len((moved / "run" / "dpo" / REFERENCE_FILE).read_text().splitlines()) == 1 + 16 + 1


def test_without_a_checkpoint_only_scores_of_the_same_reference_are_carried_on(project: Path, capsys: Any):
    small = [*BUILT_IN, "--output-dir", "run", "--model.hidden-size"]
    assert main([*small, "64"]) == 0
    shutil.rmtree("run/dpo/checkpoints")  # as if it had ended while it scored
    Path("run/dpo/examples.jsonl").touch()
    capsys.readouterr()
    assert main([*small, "64"]) == 0
    assert "are computed, once" not in capsys.readouterr().out
    assert Path("run/earlier_start_1/dpo/examples.jsonl").exists() and not Path(f"run/earlier_start_1/dpo/{REFERENCE_FILE}").exists()
    shutil.rmtree("run/dpo/checkpoints")
    assert main([*small, "32"]) == 0
    assert "are computed, once" in capsys.readouterr().out
    assert main([*BUILT_IN, "--quiet", "--model.hidden-size", "32", "--output-dir", "fresh"]) == 0
    assert losses(Path("run")) == losses(Path("fresh"))


def test_another_model_is_loaded_only_to_score_and_dropped_before_training(project: Path, monkeypatch: pytest.MonkeyPatch):
    save_model(project / "other", 2)
    made: list[weakref.ref[Any]] = []
    create: Callable[..., Any] = models.create_reference_backend
    train: Callable[..., Any] = preferences.train_preferences

    def note(*args: Any, **kwargs: Any) -> Any:
        made.append(weakref.ref(backend := create(*args, **kwargs)))
        return backend

    async def check(*args: Any, **kwargs: Any) -> Any:
        assert not [backend for backend in made if backend() is not None], "the reference is still in memory"
        return await train(*args, **kwargs)

    monkeypatch.setattr(models, "create_reference_backend", note)
    monkeypatch.setattr(preferences, "train_preferences", check)
    assert main([*OWN, "--quiet", "--reference.path", "other"]) == 0
    assert len(made) == 1
    assert main(["--quiet", "--resume", "--output-dir", "run", "--preference.num-steps", "3"]) == 0
    assert len(made) == 1, "all scores were known"


def test_a_mark_is_of_the_reference_and_not_of_its_place(project: Path):
    shutil.copytree("m", "copy")
    save_model(project / "retrained", 3)
    config = Config(model=ModelSection(path="m"), task="sort")
    mark = mark_reference(config, None)
    assert mark == mark_reference(Config(model=ModelSection(path=str(project / "copy"))), None) == mark_reference(Config(), Path("copy"))
    others = [
        replace(config, model=ModelSection(path="retrained")),
        replace(config, backend=replace(config.backend, compute_dtype="bfloat16")),
        *(Config(seed=seed) for seed in (0, 1)),
        Config(model=ModelSection(hidden_size=32)),
    ]
    assert mark_reference(replace(config, reference=ReferenceSection(path="retrained")), None) == mark_reference(others[0], None)
    assert len({mark, *(mark_reference(other, None) for other in others)}) == 1 + len(others)


def test_a_file_of_scores_is_whole_or_said_to_be_damaged(tmp_path: Path):
    path, tokenizer = tmp_path / REFERENCE_FILE, create_char_tokenizer()
    pairs = [prepare_preference_pair(tokenizer, {"prompt": "1=", "chosen": "1", "rejected": text}, whole_answers=True) for text in "23"]
    names = [hash_pair(pair) for pair in pairs]
    assert open_scores(path, "mark", is_used=True) == {} and len(set(names)) == 2
    append_scores(path, {names[0]: (-0.1, -2.0 / 3)})
    with path.open("a") as file:
        file.write(f'["{names[1]}", -0.')
    assert open_scores(path, "mark", is_used=True) == {names[0]: (-0.1, -2.0 / 3)}
    append_scores(path, {names[1]: (-1.0, -2.0)})
    assert len(open_scores(path, "mark", is_used=True)) == 2
    for line, message in (('["x", NaN, -1.0]', r"is damaged \(it holds \(nan, -1.0\), expected log-probs\)"), ("[1]", "is damaged")):
        path.write_text(f'{{"reference": "mark"}}\n{line}\n')
        with pytest.raises(CheckpointError, match=message):
            open_scores(path, "mark", is_used=True)
    with pytest.raises(CheckpointError, match="of another reference"):
        path.write_text('{"reference": "mark"}\n')
        open_scores(path, "other", is_used=True)
    assert open_scores(path, "other", is_used=False) == {} and "other" in path.read_text()


def test_held_out_pairs_may_be_those_of_the_data_and_nothing_is_generated_for_them(
    project: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preferences, "create_embedded_engine", None)
    given = [*SHORT, "--model.path", "m", "--preference.path", "pairs.jsonl", "--data.eval-path", "held.jsonl"]
    assert main([*given, "--output-dir", "run", "--preference.num-steps", "1"]) == 0
    assert "12 pairs to train on, 4 held out" in capsys.readouterr().out
    assert main([*given, "--dry-run", "--evaluation.num-prompts", "7"]) == 0
    told = capsys.readouterr().out
    assert "activations" in told and "keys and values" not in told and "responses up to" not in told
    assert "--evaluation.num-prompts 7 needs held-out problems" in told


def test_paths_of_pairs_are_recorded_absolute(project: Path):
    from integration.settings.paths import with_absolute_paths

    made = with_absolute_paths(Config(preference=PreferenceSection(path="pairs.jsonl", eval_path="held.jsonl"))).preference
    assert (made.path, made.eval_path) == (str(project / "pairs.jsonl"), str(project / "held.jsonl"))
