"""Training on preferences by the command: every loss, references of each kind, interrupted and resumed, with rows of one's own."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from warm_commands import find_python

from integration.eval.__main__ import main as evaluate
from integration.run.directory import REFERENCE_FILE
from integration.settings.checks import check_truncated_sampling
from integration.settings.config import Config
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.generation import GenerationSection
from integration.settings.sections.preference import PreferenceLoss, PreferenceSection
from integration.settings.sections.stages import RLSection
from integration.train import main
from rollouts.algorithms import preference_objectives as objectives
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError
from rollouts.models.loading import load_hf_model
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics

SMALL = (
    "--model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --num-threads 1 --evaluation.num-prompts 4 "
    "--preference.num-steps 4 --preference.batch-size 8 --preference.num-pairs 64 --preference.num-heldout 16 --preference.eval-every 2 "
    "--preference.checkpoint-every 2"
).split()  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one's own, and files of preferences."""
    folder = tmp_path_factory.mktemp("own")
    create_tiny_model().save_pretrained(folder / "model")
    create_char_tokenizer().save_pretrained(folder / "model")
    pairs = [{"prompt": f"{i}=", "chosen": str(i % 5), "rejected": str(5 + i % 5)} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labelled = [{"prompt": f"{i}=", "completion": str(i % 9), "label": i % 3 == 0} for i in range(40)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
    rows = [{"prompt": f"{i}=", "completion": str(i)} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def values(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(path)]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_a_run_learns_from_generated_pairs_and_tells_what_it_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str], matplotlib: None):
    assert run("--mode", "dpo", "--output-dir", tmp_path / "run", *SMALL, "--preference.optimizer.lr", "5e-3") == 0
    lines = values(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and {line["stage"] for line in lines} == {"dpo"}
    assert lines[0]["eval_pair_accuracy"] == 0.0 and lines[0]["eval_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert lines[-1]["eval_loss"] < 0.69 and lines[-1]["eval_pair_accuracy"] > 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["mode"] == "dpo" and summary["pairs"]["accuracy_after"] == lines[-1]["eval_pair_accuracy"]
    assert summary["pairs"]["trained_on"] == 32 and summary["seconds_dpo"] > 0
    assert summary["pairs"]["num_held_out"] == lines[-1]["eval_num_pairs"] > 1
    out = capsys.readouterr().out
    assert "DPO: 32 pairs with dpo; held-out pairs whose chosen answer has the larger implicit reward:" in out
    assert (tmp_path / "run" / "curves.png").stat().st_size > 5000
    load_hf_model(tmp_path / "run" / "dpo" / "checkpoints" / "step_0004")


@pytest.mark.parametrize("options", [["--preference.reference", "precomputed"], ["--preference.loss", "kto", "--lora.rank", "2"]])
def test_an_interrupted_run_goes_on_to_the_same_weights(options: list[str], tmp_path: Path):
    constant = ["--preference.optimizer.schedule", "constant", *options]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run("--mode", "dpo", "--quiet", "--output-dir", whole, *SMALL, *constant) == 0
    assert run("--mode", "dpo", "--quiet", "--output-dir", parts, *SMALL, *constant, "--preference.num-steps", 2) == 0
    scores, kept = parts / "dpo" / REFERENCE_FILE, list[str]()
    if "precomputed" in options:
        kept = scores.read_text().splitlines()
        assert len(kept) == 1 + 64 + 8 - 1, "two of the generated pairs are the same"
        scores.write_text("\n".join(kept[:20]) + "\n")  # as a run leaves it that ends while it scores
    assert run("--quiet", "--output-dir", parts, "--resume", "--preference.num-steps", 4) == 0
    assert not kept or scores.read_text().splitlines() == kept
    assert values(parts / "metrics.jsonl") == values(whole / "metrics.jsonl")
    ours, theirs = (load_file(next((path / "dpo" / "checkpoints" / "step_0004").glob("*model.safetensors"))) for path in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("loss", get_args(PreferenceLoss))
def test_each_loss_is_the_objective_of_its_name_with_its_numbers(loss: Any):
    section = PreferenceSection(loss=loss, beta=0.3, label_smoothing=0.2, gamma=0.7, nll_coef=0.5, desirable_weight=2.0)
    expected = {
        "dpo": objectives.dpo(beta=0.3, nll_coef=0.5), "cdpo": objectives.cdpo(beta=0.3, label_smoothing=0.2),
        "robust": objectives.robust_dpo(beta=0.3, label_smoothing=0.2), "ipo": objectives.ipo(beta=0.3),
        "slic": objectives.slic(beta=0.3, nll_coef=0.5), "kto": objectives.kto(beta=0.3, desirable_weight=2.0),
        "orpo": objectives.orpo(beta=0.3), "simpo": objectives.simpo(beta=0.3, gamma=0.7),
    }[loss]  # fmt: skip
    assert repr(section.create_objective()) == repr(expected)
    assert section.needs_reference is expected.needs_reference
    assert PreferenceSection(loss="simpo").create_objective().loss.keywords["beta"] == 2.0


def test_a_loss_without_a_reference_loads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("integration.parts.models.create_reference_backend", None)
    assert run("--mode", "dpo", "--quiet", "--output-dir", tmp_path / "run", *SMALL, "--preference.loss", "orpo") == 0
    lines = values(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["eval_pair_margin"] > lines[0]["eval_pair_margin"]


def test_pairs_and_labelled_answers_of_ones_own_train_a_model_of_ones_own(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = ["--mode", "dpo", "--model.path", own / "model", *SMALL[6:]]
    assert run(*base, "--data.path", own / "pairs.jsonl", "--output-dir", tmp_path / "pairs") == 0
    assert "36 pairs to train on, 4 held out" in capsys.readouterr().out
    labelled = [*base, "--preference.loss", "kto", "--preference.path", own / "labelled.jsonl"]
    assert run(*labelled, "--output-dir", tmp_path / "kto", "--checkpoint.best", "eval_pair_accuracy") == 0
    assert "labelled answers to train on" in capsys.readouterr().out
    assert values(tmp_path / "kto" / "metrics.jsonl")[1]["num_answers"] == 8.0
    both = ["--mode", "sft+dpo", "--model.path", own / "model", *SMALL[6:], "--sft.num-steps", 2, "--sft.batch-size", 4]
    assert run(*both, "--data.path", own / "rows.jsonl", "--preference.path", own / "pairs.jsonl", "--output-dir", tmp_path / "both") == 0
    assert {line["stage"] for line in values(tmp_path / "both" / "metrics.jsonl")} == {"sft", "dpo"}


REFUSED = {
    "task": (["--task", "grid_world"], "there are none of the task 'grid_world': take --task sort or sort-long"),
    "two files": (["--data.path", "OWN/pairs.jsonl", "--preference.path", "OWN/pairs.jsonl", "--model.path", "OWN/model"], "leave one out"),
    "kto precomputed": (["--preference.loss", "kto", "--preference.reference", "precomputed"], "leave it out"),
    "smoothing": (["--preference.loss", "cdpo", "--preference.label-smoothing", "0.5"], "preference.label-smoothing is 0.5"),
    "no such loss": (["--preference.loss", "dop"], "invalid choice 'dop' for argument"),
    "rows that are no pairs": (["--data.path", "OWN/rows.jsonl", "--model.path", "OWN/model"], r"rows\.jsonl, line 1"),
    "jax": (["--backend.kind", "jax"], "preferences are trained with pytorch, torch_func and fsdp"),
    "not measured": (["--checkpoint.best", "eval_perplexity"], "DPO measures eval_accuracy"),
    "no such file": (["--task", "jsonl", "--preference.path", "OWN/none.jsonl", "--model.path", "OWN/model"], "--preference.path"),
    "pairs without their mode": (
        ["--mode", "sft+rl", "--model.path", "OWN/model", "--preference.path", "OWN/pairs.jsonl"],
        "but --mode sft.rl trains on no pairs: add --mode dpo, or give --data.path",
    ),
    "held out of nothing": (["--preference.eval-path", "x.jsonl"], "there is no --preference.path: give both"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_a_directory_is_made(
    name: str, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments, message = REFUSED[name]
    filled = [argument.replace("OWN", str(own)) for argument in arguments]
    try:
        status = run("--mode", "dpo", "--output-dir", tmp_path / "run", *filled)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and not (tmp_path / "run").exists()
    assert re.search(message, " ".join(error.split())), error


def test_scores_of_another_reference_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--mode", "dpo", "--quiet", "--output-dir", tmp_path, *SMALL, "--preference.reference", "precomputed"]
    assert run(*arguments, "--preference.num-steps", 2) == 0
    scores = tmp_path / "dpo" / REFERENCE_FILE
    scores.write_text(scores.read_text().replace('{"reference": "', '{"reference": "0'))
    assert run("--output-dir", tmp_path, "--resume", "--preference.num-steps", 4) == 1
    assert "holds log-probs of another reference than this run's" in capsys.readouterr().err


def test_the_dry_run_and_explain_tell_of_preferences(capsys: pytest.CaptureFixture[str]):
    assert run("--mode", "dpo", "--preference.loss", "simpo", "--dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"DPO loss +simpo \(beta 2, gamma 1\)", out) and "DPO reference model" not in out
    assert "reference weights" not in out and "--preference.max-tokens-per-microbatch could be" in out
    assert run("--mode", "dpo", "--dry-run", "--preference.reference", "precomputed") == 0
    assert "the policy as the stage begins, computed once before the first step" in capsys.readouterr().out
    assert run("--mode", "dpo", "--explain", "preference.gamma") == 0
    assert "none here: it needs --preference.loss simpo" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", find_python())
    assert run("--mode", "dpo", "--quiet", "--output-dir", tmp_path / "one", *SMALL) == 0
    fsdp = ["--backend.kind", "fsdp", "--backend.num-processes", 2]
    assert run("--mode", "dpo", "--quiet", "--output-dir", tmp_path / "two", *SMALL, *fsdp) == 0
    one, two = (values(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for ours, theirs in zip(one, two, strict=True):
        assert theirs["step"] == ours["step"]
        for key in ("loss", "grad_norm", "eval_loss", "eval_pair_margin"):
            assert (key in theirs) == (key in ours), key
            assert theirs.get(key, 0.0) == pytest.approx(ours.get(key, 0.0), rel=5e-3, abs=1e-4)


ONLINE = (
    "--mode rl --model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --num-threads 1 --evaluation.num-prompts 4 "
    "--rl.num-steps 4 --rl.prompts-per-step 3 --rl.samples-per-prompt 4 --rl.num-minibatches 2 --checkpoint.rl-every 2 --rl.eval-every 0 "
    "--rl.optimizer.schedule constant --rl.optimizer.lr 3e-3"
).split()


@pytest.fixture
def judged(tmp_path: Path) -> list[str]:
    """A reward that tells answers of random weights apart."""
    (tmp_path / "reward.py").write_text("def count(sample):\n    return float(sum(sample.tokens) % 5)\n")
    return ["--reward.function", f"{tmp_path / 'reward.py'}:count"]


@pytest.mark.parametrize(
    "options",
    [
        ["--algorithm", "online_dpo(beta=0.5)"],
        ["--algorithm", "online_dpo(loss=ipo)", "--lora.rank", "2", "--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness", "0"],
    ],
    ids=["synchronous", "asynchronous, adapters"],
)
def test_pairs_of_ones_own_rollouts_are_trained_on_and_a_run_goes_on_as_it_was(options: list[str], judged: list[str], tmp_path: Path):
    whole, parts, base = tmp_path / "whole", tmp_path / "parts", [*ONLINE, *judged, *options, "--quiet"]
    assert run(*base, "--output-dir", whole) == 0
    assert run(*base, "--output-dir", parts, "--rl.num-steps", 2) == 0
    assert run("--quiet", "--output-dir", parts, "--resume", "--rl.num-steps", 4) == 0
    lines = [line for line in values(whole / "metrics.jsonl") if line["step"] > 0]
    assert [line for line in values(parts / "metrics.jsonl") if line["step"] > 0] == lines
    assert all(line["num_pairs"] + line["num_ties"] == 3 and line["num_pairs"] > 0 for line in lines)
    assert {"loss", "reward_margin", "reward_gap", "reference_kl", "entropy", "reward_mean"} <= set(lines[-1])
    ours, theirs = (load_file(next((path / "rl" / "checkpoints" / "step_0004").glob("*model.safetensors"))) for path in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


JUDGE = """
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

from rollouts import PairwiseJudge


class LongerIsBetter:
    async def complete(self, messages, *, max_tokens=None, temperature=1.0, seed=None):
        first, second = messages[0]["content"].split("Answer A:\\n")[1].split("\\n\\nWhich")[0].split("\\n\\nAnswer B:\\n")
        winner = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
        return SimpleNamespace(text=json.dumps({"reason": "length", "winner": winner}))


class Judge:
    @asynccontextmanager
    async def open_reward(self):
        yield PairwiseJudge(LongerIsBetter(), rubric="The longer answer is better.")


judge = Judge()
plain = PairwiseJudge(LongerIsBetter(), rubric="The longer answer is better.")
"""


def test_a_judge_that_compares_answers_makes_the_pairs_and_measures_no_held_out_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "judge.py").write_text(JUDGE)
    judged = ["--reward.function", f"{tmp_path / 'judge.py'}:judge"]
    assert run(*ONLINE, *judged, "--algorithm", "online_dpo", "--rl.eval-every", 1, "--output-dir", tmp_path / "run") == 0
    assert "held-out problems are left out: PairwiseJudge compares the answers to a problem" in caplog.text + capsys.readouterr().err
    lines = [line for line in values(tmp_path / "run" / "metrics.jsonl") if line["step"] > 0]
    assert sum(line["num_pairs"] for line in lines) > 4
    assert all(line["reward_mean"] == pytest.approx(0.5) and "eval_accuracy" not in line for line in lines)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rl" / "trajectories" / "step_0001.jsonl").read_text().splitlines()]
    for row in rows:
        sides, lengths = row["estimate"]["advantages"]["runs"], [len(one["response"]) for one in rows if one["prompt"] == row["prompt"]]
        assert sides[-1][1] != 1.0 or len(row["response"]) == max(lengths)
        assert sides[-1][1] != -1.0 or len(row["response"]) == min(lengths)
    for name in ("judge", "plain"):
        output = tmp_path / name
        given = [str(tmp_path / "run"), "--output-dir", str(output), "--reward.function", f"{tmp_path / 'judge.py'}:{name}"]
        assert evaluate(given) == 2
        assert "compares the answers of one model to a problem with one another" in capsys.readouterr().err
    assert not output.exists()  # found before it is opened


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "online_dpo(loss=kto)"], "one of dpo, cdpo, robust, ipo, slic, simpo, orpo"),
        (["--algorithm", "online_dpo(loss=ipo, gamma=1)"], "gamma is 1.0, but the loss ipo has none: it takes beta"),
        (["--algorithm", "decoupled(online_dpo)"], "compares pairs of whole answers.*Leave decoupled"),
        (["--algorithm", "online_dpo", "--rl.kl-control.kl-coef", "0.1"], "has no KL term"),
        (["--algorithm", "online_dpo(loss=simpo)", "--reference.path", "x"], "reference.path is 'x', but .*has no"),
    ],
)
def test_online_settings_that_cannot_work_are_refused(options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(*ONLINE, *options, "--output-dir", tmp_path / "run") == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
    assert not (tmp_path / "run").exists()


def test_pairs_of_rollouts_need_no_sets_that_tokens_were_drawn_from():
    cut = Config(generation=GenerationSection(top_p=0.9), engine=EngineSection(kind="vllm", urls=("http://127.0.0.1:9",)))
    check_truncated_sampling(replace(cut, rl=RLSection(algorithm="online_dpo")))
    with pytest.raises(ConfigError, match=r"the sets of tokens that vLLM draws from.*are not read.*with temperature 0"):
        check_truncated_sampling(cut)


def test_sglang_returns_the_sets_that_tokens_were_drawn_from_with_a_top_k():
    cut = Config(generation=GenerationSection(top_p=0.9), engine=EngineSection(kind="sglang", urls=("http://127.0.0.1:9",)))
    check_truncated_sampling(replace(cut, generation=GenerationSection(top_p=0.9, top_k=512)))
    for top_k in (0, 1, 5000):
        with pytest.raises(ConfigError, match=r"SGLang returns the sets.*only with a top_k from 2 to 4096: set --generation.top-k"):
            check_truncated_sampling(replace(cut, generation=GenerationSection(top_p=0.9, top_k=top_k)))
