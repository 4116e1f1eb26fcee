"""--explain, the facts of one's own model in a dry run, and errors that name settings as they were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.settings.config import Config
from integration.settings.option_effects import list_options
from integration.settings.sources import Place, find_places, name_settings
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.testing import create_tiny_model


def explain(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main([*argv]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_setting_is_explained_with_value_origin_default_and_consequences(capsys: pytest.CaptureFixture[str]):
    told = explain(capsys, "--mode", "rl", "--rl.num_steps", "5", "--explain", "rl.num_steps")
    assert told[:4] == [
        "--rl.num-steps",
        "  rollout batches to train on",
        "  value     5, from --rl.num_steps on the command line",
        "  default   12",
    ]
    assert "  affects   with 10: RL optimizer steps (10 -> 20); RL samples (2,560 -> 5,120); RL weight syncs (5 -> 10)" in told
    assert any(line.startswith("  elsewhere max_steps, num_train_epochs") for line in told)


def test_a_setting_without_effect_says_what_it_needs(capsys: pytest.CaptureFixture[str]):
    told = "\n".join(explain(capsys, "--mode", "rl", "--explain", "lora.alpha", "sft.batch-size"))
    assert "effect    none here: it needs --lora.rank" in told and "effect    none in mode rl: SFT reads it" in told


def test_a_section_is_explained_whole_and_each_setting_has_its_help(capsys: pytest.CaptureFixture[str]):
    told = explain(capsys, "--explain", *{name.partition(".")[0] for name, _ in list_options(Config())})
    heads = [k for k, line in enumerate(told) if line.startswith("--")]
    assert len(heads) == len(list(list_options(Config())))
    without = [told[k] for k in heads if len(told[k + 1].strip()) < 5]
    assert without == []


def test_an_unknown_setting_gets_a_suggestion_from_its_section(capsys: pytest.CaptureFixture[str]):
    assert main(["--explain", "rl.num_stps"]) == 2
    assert "--explain knows no setting 'rl.num_stps': did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text", "message"),
    [
        (["--rl.samples_per_prompt", "0"], None, "error: --rl.samples_per_prompt is 0, expected a whole number"),
        (["--rl.samples-per-prompt=0"], None, "error: --rl.samples-per-prompt is 0, expected a whole number"),
        ([], "seed = 3\n[rl]\nnum_steps = 2\nsamples_per_prompt = 0\n", "error: rl.samples_per_prompt (own.toml, line 4) is 0, expected"),
        (["--sft.num-steps", "-1"], None, "error: --sft.num-steps is -1"),
        (["--reward.max-retries", "-1"], None, "error: --reward.max-retries is -1"),
        (["--lora.rank", "4", "--lora.dropout", "2"], None, "error: --lora.dropout is 2.0"),
    ],
)
def test_an_error_names_the_setting_as_it_was_written(
    argv: list[str], text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("own.toml").write_text(text)
        argv = ["--config", "own.toml", *argv]
    assert main(["--dry-run", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith(message), told
    assert told.count("own.toml") == (text is not None)


def test_places_of_settings_are_flags_before_lines_of_a_file(tmp_path: Path):
    path = tmp_path / "own.json"
    path.write_text('{\n "seed": 3,\n "rl": {\n  "optimizer": {"lr": 1e-5},\n  "num_steps": 2\n }\n}\n')
    places = find_places(["--rl.num_steps", "4", "--no-deterministic"], str(path), Config())
    assert {name: str(place) for name, place in places.items()} == {
        "seed": f"seed in {path}, line 2",
        "rl.optimizer.lr": f"rl.optimizer.lr in {path}, line 4",
        "rl.num_steps": "--rl.num_steps on the command line",
        "deterministic": "--no-deterministic on the command line",
    }


def test_names_that_are_no_settings_stay():
    text = "rl.num_steps is 0 in runs/rl.num_steps, see rl.nothing, torch.float32, a.json and RLSection.num_steps"
    assert name_settings(text, Config(), {"rl.num_steps": Place("--rl.num_steps")}) == (
        "--rl.num_steps is 0 in runs/rl.num_steps, see rl.nothing, torch.float32, a.json and --rl.num_steps"
    )


def test_a_dry_run_of_ones_own_model_begins_with_it_and_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    create_tiny_model(vocab_size=300).save_pretrained(tmp_path)
    create_char_tokenizer(64).save_pretrained(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 9)
    argv = ["--dry-run", "--mode", "rl", "--model.path", str(tmp_path), "--data.path", str(rows), "--lora.alpha", "3", "--lora.rank", "2"]
    told = explain(capsys, *argv)
    assert len(told) < 60
    assert [line.split("  ")[1] for line in told[1:6]] == ["model", "precision", "lengths", "tokenizer", "chat template"]
    assert "64 tokens for 300 embeddings, 236 unused" in told[4]
    assert any("RL learning rate" in line and " 1e-05, after 5 steps" in line for line in told[:12])
