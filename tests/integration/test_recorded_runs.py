"""--data.rollouts: rollouts of another program are trained on by the ordinary loop, as they were recorded, and a run on them goes on."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.eval.__main__ import main as evaluate
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.recorded import RecordedRollouts, load_recorded_groups, read_recorded_sample
from rollouts.data.trajectories import write_samples
from rollouts.errors import DataError
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics

SHIFT = 0.05  # nats by which the recorded log-probs are below those of the model
FLAGS = "--mode rl --model.path model --data.rollouts rec.jsonl --rl.prompts-per-step 4 --checkpoint.rl-every 1 --num-threads 1 --quiet"


def record(num_groups: int = 6, size: int = 4) -> list[dict[str, Any]]:
    """Responses of random digits with the log-probs of the model, shifted."""
    model, tokenizer, generator = create_tiny_model(vocab_size=64, hidden_size=16, num_layers=1), create_char_tokenizer(), random.Random(0)
    rows: list[dict[str, Any]] = []
    for group in range(num_groups):
        prompt: list[int] = tokenizer(f"{group}+1=")["input_ids"]
        for _ in range(size):
            answer = str(generator.randrange(10))
            response: list[int] = [*tokenizer(answer)["input_ids"], 1]
            with torch.no_grad():
                log_probs = model(torch.tensor([[*prompt, *response]])).logits.double().log_softmax(-1)[0]
            at = [float(log_probs[len(prompt) - 1 + i, token]) - SHIFT for i, token in enumerate(response)]
            row = {"prompt_tokens": prompt, "response_tokens": response, "log_probs": at, "reward": float(answer == str(group + 1))}
            rows.append(row | {"group": f"g{group}", "weight_version": 2 + group % 3, "response": answer})
    return rows


ROWS = record()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    create_tiny_model(vocab_size=64, hidden_size=16, num_layers=1).save_pretrained("model")
    create_char_tokenizer().save_pretrained("model")
    write(tmp_path / "rec.jsonl", ROWS)
    return tmp_path


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / name / "metrics.jsonl") if line["step"]]


def drop_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key[-2:] != "_s" and "per_s" not in key}


def test_recorded_rollouts_are_trained_on_as_they_are_and_a_stopped_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*FLAGS.split(), "--rl.num-steps", "4", "--output-dir", "whole"]) == 0
    lines = lines_of(folder, "whole")
    assert lines[0]["ratio_mean"] == pytest.approx(math.exp(SHIFT), rel=1e-3), "the first minibatch is before any update"
    assert [line["num_samples"] for line in lines] == [16.0] * 4
    assert lines[-1]["weight_version"] == 4 + 3 and max(line["staleness_max"] for line in lines) >= 4
    assert main([*FLAGS.split(), "--rl.num-steps", "2", "--output-dir", "half"]) == 0
    assert main([*FLAGS.split(), "--rl.num-steps", "4", "--output-dir", "half", "--resume"]) == 0
    assert main([*FLAGS.split(), "--rl.num-steps", "4", "--output-dir", "half", "--resume"]) == 0, "it has ended, and nothing is held out"
    whole, half = ([drop_times(line) for line in lines_of(folder, name)] for name in ("whole", "half"))
    assert whole == half and len(whole) == 4
    write(folder / "rec.jsonl", [{**row, "reward": 1 - row["reward"]} for row in ROWS])
    assert main([*FLAGS.split(), "--rl.num-steps", "6", "--output-dir", "half", "--resume"]) != 0
    told = capsys.readouterr().err
    assert "the data are not those of" in told and "--data.rollouts has changed" in told


def test_a_run_on_recorded_rollouts_is_evaluated_on_problems_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]):
    write(folder / "eval.jsonl", [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(3)])
    assert main([*FLAGS.split(), "--rl.num-steps", "1", "--data.eval-path", "eval.jsonl", "--output-dir", "run"]) == 0
    assert 0 <= lines_of(folder, "run")[0]["eval_accuracy"] <= 1
    for tasks, label, num in (
        ([], "jsonl", 3),
        (["--tasks", "sort", "--num-prompts", "2"], "sort", 2),
    ):  # the rollouts are for training alone
        capsys.readouterr()
        assert evaluate(["run", *tasks, "--json", "--quiet", "--num-threads", "1", "--output-dir", f"evals-{label}"]) == 0
        (line,) = json.loads(capsys.readouterr().out)["results"]
        assert (line["task"], line["num_prompts"]) == (label, num)
        assert label == "sort" or line["accuracy"]["value"] == lines_of(folder, "run")[0]["eval_accuracy"]


async def test_batches_are_groups_of_the_stream_whichever_form_the_file_has(tmp_path: Path):
    short = load_recorded_groups(str(write(tmp_path / "a.jsonl", ROWS)), smallest_group=2)
    assert [len(group) for group in short.groups] == [4] * 6 and short.newest_version == 4
    path = tmp_path / "b.jsonl"
    write_samples(path, [sample for group in short.groups for sample in group])
    assert len(load_recorded_groups(str(path)).groups) == 1, "the same group_index everywhere"
    unnamed = [{key: value for key, value in row.items() if key != "group"} for row in random.Random(1).sample(ROWS, len(ROWS))]
    shuffled = load_recorded_groups(str(write(tmp_path / "c.jsonl", unnamed)))
    assert {frozenset(s.tokens for s in g) for g in shuffled.groups} == {frozenset(s.tokens for s in g) for g in short.groups}
    source = RecordedRollouts(short, batch_size=4, seed=1)
    batches = [await source.generate_batch() for _ in range(3)]
    state = source.state_dict()
    assert [sorted({s.group_index for s in batch.samples}) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len({s.prompt or s.tokens[:4] for batch in batches[:2] for s in batch.samples[:24]}) == 6
    again = RecordedRollouts(short, batch_size=4, seed=1)
    again.load_state_dict(state)
    assert (await again.generate_batch()).samples == (await source.generate_batch()).samples
    for other, words in (({**state, "seed": 2}, "the seed 1"), ({"epoch": 1}, "generates its rollouts")):
        with pytest.raises(DataError, match=words):
            again.load_state_dict(other)


def test_tokens_of_tools_are_masked_and_need_no_log_prob():
    row = {"prompt_tokens": [5], "response_tokens": [6, 7, 8], "log_probs": [-1, 9, -2], "response_mask": [1, 0, 1], "reward": True and 1}
    sample = read_recorded_sample({**row, "weight_version": [0, -1, 1]}, "here")
    assert sample.loss_mask == (0, 1, 0, 1) and sample.rollout_log_probs == (0, -1, 0, -2)
    assert sample.weight_versions == (-1, 0, -1, 1)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ROWS[0].items() if key != name}


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no reward": (without("reward"), ("reward is None", "score the samples before")),
    "reward is a text": ({**ROWS[0], "reward": "good"}, ("reward is 'good'",)),
    "no tokens": (without("response_tokens"), ("no tokens, loss_mask, rollout_log_probs", "give prompt_tokens")),
    "no prompt": ({**ROWS[0], "prompt_tokens": []}, ("0 prompt_tokens and 2 response_tokens",)),
    "no log-probs": (without("log_probs"), ("0 log_probs for 2 response_tokens",)),
    "log-probs of another length": ({**ROWS[0], "log_probs": [-1.0]}, ("1 log_probs for 2 response_tokens",)),
    "probabilities": ({**ROWS[0], "log_probs": [0.5, 0.9]}, ("a log-prob is 0.5", "natural logarithms")),
    "log-probs of null": ({**ROWS[0], "log_probs": [None, -1.0]}, ("rollout_log_probs", "None")),
    "tokens of texts": ({**ROWS[0], "response_tokens": ["a", "b"]}, ("tokens", "'a'")),
    "unknown tokens": ({**ROWS[0], "response_tokens": [7, 64]}, ("token id 64", "64 embeddings")),
    "a text of tokens": ({**ROWS[0], "prompt_tokens": "5 6"}, ("prompt_tokens is '5 6'", "list of numbers")),
    "versions of another length": ({**ROWS[0], "weight_version": [1]}, ("weight_version is [1]", "2 values")),
    "nothing to train on": ({**ROWS[0], "response_mask": [0, 0]}, ("nothing of it is trained on",)),
    "an unknown status": ({**ROWS[0], "status": "good"}, ("no sample", "'good'")),
    "a temperature of 0": ({**ROWS[0], "temperature": 0}, ("temperature is 0",)),
    "alone": ({**ROWS[0], "group": "own"}, ("has 1 sample", "at least 2")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_sample_is_named_by_file_and_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    row, words = BAD[name]
    write(folder / "rec.jsonl", [*ROWS[:2], row, *ROWS[2:]])
    assert main([*FLAGS.split(), "--output-dir", "run"]) == 2
    error = capsys.readouterr().err
    assert "rec.jsonl, line 3: " in error and "Traceback" not in error and not (folder / "run").exists(), error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "sft+rl"], "--data.rollouts is rec.jsonl, but it is for --mode rl"),
        (["--data.path", "rec.jsonl"], "beside --data.path"),
        (["--rl.asynchronous.enabled"], "recorded rollouts are there already"),
        (["--rl.filter", "nonzero_std"], "filter the file before"),
        (["--data.rollouts", "none.jsonl"], "none.jsonl does not exist"),
    ],
)
def test_settings_that_do_not_go_with_recorded_rollouts(flags: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*FLAGS.split(), *flags, "--output-dir", "run"]) == 2
    assert words in capsys.readouterr().err
