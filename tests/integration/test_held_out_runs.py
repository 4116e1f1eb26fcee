"""Runs that watch held-out data: the loss of SFT, the best checkpoint, and an early end, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_train import SMALL, values

from integration.tasks.own_data import OwnData, create_jsonl_task
from integration.tasks.task import create_sort_task
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import DataError
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import list_checkpoints

BEST = ["--checkpoint.best", "held_out_accuracy", "--checkpoint.patience", "1"]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_held_out_demonstrations_are_as_wrong_as_those_of_training_and_change_none_of_them():
    task = create_sort_task(num_train=100, num_heldout=40)
    right = sum(
        sample.response == prompt.metadata["ground_truth"]
        for sample, prompt in zip(task.heldout_samples, task.heldout_prompts, strict=True)
    )
    assert 20 <= right <= 24  # those of equal digits are right either way
    assert not {sample.prompt for sample in task.heldout_samples} & {sample.prompt for sample in task.sft_samples}


def test_conversations_without_answers_serve_the_held_out_loss_of_sft(tmp_path: Path):
    path = write_rows(tmp_path / "train.jsonl", [{"prompt": f"s{i}=", "completion": f"{i}"} for i in range(12)])
    talks = [{"prompt": f"s{i}=", "completion": f"{i}"} for i in range(4)]
    both = write_rows(
        tmp_path / "both.jsonl", [*talks, {"prompt": "s9=", "completion": "9", "answer": "9"}, {"prompt": "s8=", "answer": "8"}]
    )
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=path, eval_path=both, with_rl=False))
    assert (len(task.heldout_prompts), len(task.heldout_samples), len(task.sft_samples)) == (2, 5, 12)
    bad = write_rows(tmp_path / "bad.jsonl", [*talks, {"prompt": "s8=", "answer": "8"}, {"prompt": "s8="}])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 6: the row has the fields \['prompt'\]"):
        create_jsonl_task(create_char_tokenizer(), OwnData(path=path, eval_path=bad, with_rl=False))
    held = create_jsonl_task(create_char_tokenizer(), OwnData(path=write_rows(path, [
        {"prompt": f"s{i}=", "completion": f"{i}", "answer": f"{i}"} for i in range(20)
    ]), num_heldout=2))  # fmt: skip
    assert [sample.prompt for sample in held.heldout_samples] == [prompt.content for prompt in held.heldout_prompts]
    assert len(held.heldout_samples) == 2
    assert len(held.sft_samples) == 18


def test_sft_on_conversations_logs_the_held_out_loss_and_keeps_its_best_checkpoint(tmp_path: Path):
    model, tokenizer = create_tiny_model(vocab_size=64), create_char_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"s{i}=", "completion": f"{i}"} for i in range(30)]
    write_rows(tmp_path / "train.jsonl", rows[:20])
    write_rows(tmp_path / "eval.jsonl", rows[20:])
    arguments = [
        "--mode", "sft", "--model.path", str(tmp_path / "model"), "--data.path", str(tmp_path / "train.jsonl"), "--sft.eval-every", "2",
        "--data.eval-path", str(tmp_path / "eval.jsonl"), "--sft.num-steps", "6", "--sft.batch-size", "4", "--sft.optimizer.lr", "3e-2",
        "--checkpoint.best", "eval_loss", "--checkpoint.keep-last-n", "1", "--output-dir", str(tmp_path / "run"), "--num-threads", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(losses) == [0, 2, 4, 6]
    assert all("eval_accuracy" not in line for line in lines)
    best = min((loss, step) for step, loss in losses.items() if step)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["sft"]
    assert (summary["value"], summary["step"]) == best
    assert (tmp_path / "run" / summary["checkpoint"] / "config.json").exists()
    assert "held-out accuracy" not in json.dumps(lines)


def test_a_metric_that_nothing_measures_is_refused_before_anything_is_written(tmp_path: Path, capsys):
    assert main([*SMALL, "--mode", "rl", "--checkpoint.best", "eval_loss", "--output-dir", str(tmp_path / "run")]) == 2
    assert "RL measures eval_accuracy, eval_accuracy_sampled" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness", "1"]], ids=["sync", "async"])
def test_a_run_that_no_longer_improves_ends_early_says_so_and_is_finished_when_resumed(tmp_path: Path, capsys, more: list[str]):
    """With a learning rate of 0 no evaluation is better than the first of its stage."""
    still = ["--sft.optimizer.lr", "0", "--rl.optimizer.lr", "0", "--rl.num-steps", "5", "--sft.eval-every", "1"]
    arguments = [*SMALL, *BEST, *still, *more, "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    last = 3 if more else 2  # an evaluation beside the next step is known after that step
    assert "SFT: the best eval_accuracy was 0, after step 1 (sft/checkpoints/step_0001); it ended early, after step 2: 1 evaluations" in out
    best = json.loads((tmp_path / "summary.json").read_text())["best"]
    assert best["sft"]["stopped_early"] and best["rl"]["stopped_early"]
    assert best["rl"]["step"] == 1 and best["rl"]["steps"] == last
    for stage in ("sft", "rl"):
        assert (tmp_path / best[stage]["checkpoint"]).is_dir()
    assert list_checkpoints(tmp_path / "rl" / "checkpoints")[-1].name == f"step_{last:04d}"
    before = values(tmp_path / "metrics.jsonl")
    assert main(["--output-dir", str(tmp_path), "--resume"]) == 0
    assert values(tmp_path / "metrics.jsonl") == before
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == best
