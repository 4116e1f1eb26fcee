"""From pairs to a reward model to a run that it drives, by the two commands that a user types; and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import pytest
import torch

from integration.parts.rewards import find_reward_model, open_training_reward
from integration.run.reward_model import create_pairs, create_start, run_reward_model
from integration.run.stages import RunControl
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config
from integration.settings.reward_model import PairSection, RewardModelConfig
from integration.tasks.preference_pairs import create_task_pairs
from integration.tasks.task import create_sort_task
from integration.train import main as train
from integration.train_reward_model import main, parse
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import from_dict, to_dict
from rollouts.data.trajectories import read_samples
from rollouts.errors import ConfigError
from rollouts.models.heads import load_reward_model
from rollouts.rewards.answers import exact_match
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics

SIZES = "--model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --num-threads 1".split()
SMALL = (
    "--training.num-steps 4 --training.batch-size 8 --training.eval-every 2 --data.num-pairs 64 --data.num-heldout 16 --quiet "
    "--training.optimizer.schedule constant"
).split() + SIZES  # fmt: skip
SMALL_RL = "--mode rl --rl.num-steps 1 --rl.prompts-per-step 4 --rl.samples-per-prompt 4 --evaluation.num-prompts 8 --quiet".split() + SIZES
KEEPER = """
import json, os
class Keeper:
    def __init__(self, path):
        self.path = path
    def last_steps(self):
        lines = open(self.path).read().splitlines() if os.path.exists(self.path) else []
        return {line["stage"]: line["step"] for line in map(json.loads, lines)}
    def log(self, metrics, step):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\\n")
    def finish(self):
        pass
keeper = Keeper
"""


def values(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(path)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small run."""
    directory = tmp_path_factory.mktemp("reward_model") / "rm"
    assert main(["--output-dir", str(directory), *SMALL]) == 0
    return directory


def test_a_run_leaves_a_model_that_loads_its_metrics_and_a_summary(finished: Path):
    lines = read_metrics(finished / "metrics.jsonl")
    assert [(line["stage"], line["step"]) for line in lines] == [("reward_model", step) for step in range(5)]
    assert ["eval_accuracy" in line for line in lines] == [True, False, True, False, True]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["accuracy"] == lines[-1]["eval_accuracy"]
    assert (summary["steps"], summary["pairs"]) == (4, "made from the task sort")
    assert load_reward_model(finished / "model").config.num_labels == 1
    assert find_reward_model(finished) == finished / "model"
    assert find_reward_model(finished / "model") == finished / "model"


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    part = ["--output-dir", str(tmp_path / "part")]
    assert main([*part, *SMALL, "--training.num-steps", "2"]) == 0
    assert main([*part, *SMALL]) == 2
    assert "already holds a run: add --resume" in capsys.readouterr().err
    assert main([*part, "--resume", "--training.batch-size", "16"]) == 2
    assert "--training.batch-size: 8 -> 16" in capsys.readouterr().err
    assert main([*part, "--resume", "--training.num-steps", "4", "--quiet"]) == 0
    assert values(tmp_path / "part" / "metrics.jsonl") == values(finished / "metrics.jsonl")
    resumed, whole = (load_reward_model(path / "model").state_dict() for path in (tmp_path / "part", finished))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_metrics_go_to_further_loggers_in_a_resumed_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A logger that is new in the second part gets the lines of the first one, and one that keeps its lines gets none of them twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(KEEPER)
    part = ["--output-dir", "part", *SMALL]
    assert main([*part, "--training.num-steps", "2", "--log", "jsonl('copy.jsonl')"]) == 0
    assert main([*part, "--resume", "--training.num-steps", "4", "--log=own.py:keeper('kept')", "jsonl('more.jsonl')"]) == 0
    lines = values(tmp_path / "part" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert values(tmp_path / "copy.jsonl") == lines[:3] and values(tmp_path / "more.jsonl") == lines[3:]
    assert values(tmp_path / "kept") == lines  # it can say what it has, which is nothing at first
    assert main([*part, "--resume", "--training.num-steps", "5", "--log", "own.py:keeper('kept')"]) == 0
    assert [line["step"] for line in values(tmp_path / "kept")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.more
@needs.TENSORBOARD
def test_a_logger_of_a_package_has_the_curve_of_an_interrupted_run_whole(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = ["--output-dir", str(tmp_path / "run"), *SMALL, "--log", "tensorboard"]
    assert main([*run, "--training.num-steps", "2"]) == 0
    assert main([*run, "--resume", "--training.num-steps", "4"]) == 0
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((tmp_path / "run" / "loggers" / "tensorboard").glob("events*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name.rpartition("/")[2], []).extend((event.step, event.value) for event in events.Scalars(name))
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert dict(found["loss"]) == pytest.approx({line["step"]: line["loss"] for line in lines}, rel=1e-5)
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4] and found["eval_accuracy"]


@pytest.mark.parametrize(
    ("logger", "told"),
    [
        ("jsonl()", "jsonl needs the argument 'path'"),
        ("mlflow(tracking_uri='http://me:word@host/')", "a secret in the argument 'tracking_uri'"),
        ("own.py:none", "the logger is 'own.py:none': there is no file own.py in "),
    ],
)
def test_a_logger_that_cannot_be_made_is_told_before_anything_is_written(
    logger: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["--output-dir", str(tmp_path / "rm"), *SMALL, "--log", logger]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "rm").exists()


async def test_the_pairs_held_out_are_scored_in_micro_batches_of_the_configured_size_before_the_first_step_too(tmp_path: Path):
    sizes: list[int] = []

    def note_size(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            sizes.append(inputs[0].numel())

    class Lines:
        """The largest pass of the model before each line of metrics."""

        def __init__(self) -> None:
            self.largest: list[int] = []

        def log(self, metrics: Any, step: int) -> None:
            self.largest.append(max(sizes))
            sizes.clear()

        def finish(self) -> None:
            pass

    settings, logger, limit = to_dict(RewardModelConfig()), Lines(), 64
    settings["training"].update(num_steps=1, batch_size=8, max_tokens_per_microbatch=limit)
    settings["data"].update(num_pairs=16, num_heldout=8)
    settings["model"].update(hidden_size=32, num_layers=1, intermediate_size=32)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note_size)
    try:
        await run_reward_model(from_dict(RewardModelConfig, settings), tmp_path, RunControl(logger=logger))
    finally:
        hook.remove()
    assert len(logger.largest) == 2
    assert max(logger.largest) <= limit


async def test_a_run_that_is_told_to_stop_keeps_a_checkpoint_and_makes_no_model(tmp_path: Path):
    config = RewardModelConfig()
    small = {"training": {"num_steps": 4, "batch_size": 8}, "data": {"num_pairs": 16, "num_heldout": 8}, "model": {"hidden_size": 32}}
    settings = to_dict(config)
    for section, changes in small.items():
        settings[section].update(changes)
    stopped = await run_reward_model(from_dict(RewardModelConfig, settings), tmp_path, RunControl(should_stop=lambda: True))
    assert stopped is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0001"]
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"without model yet: .*--resume"):
        find_reward_model(tmp_path)


def test_a_model_scores_the_rollouts_and_the_rule_the_evaluations(finished: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(["--output-dir", str(run), "--reward.model", str(finished), "--trajectories.every", "1", *SMALL_RL]) == 0
    rewards = [sample.reward for sample in read_samples(run / "rl" / "trajectories" / "step_0001.jsonl")]
    assert len(rewards) == 16
    assert not set(rewards) & {0.0, 1.0}, "scores, not right and wrong"
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["eval_accuracy"] in {k / 8 for k in range(9)}
    assert last["reward_mean"] == pytest.approx(sum(r for r in rewards if r is not None) / 16, rel=1e-4)


async def test_without_a_model_the_rule_scores():
    task = create_sort_task(num_train=10, num_heldout=4)
    async with open_training_reward(Config(), task, create_char_tokenizer()) as reward:
        assert reward is exact_match


def test_users_pairs_are_trained_on(tmp_path: Path):
    rows = [{"prompt": f"{i}=", "chosen": "1", "rejected": "7"} for i in range(30)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"chosen": "x"}]))
    arguments = ["--output-dir", str(tmp_path / "rm"), "--data.path", str(path), *SMALL]
    assert main(arguments) == 2
    assert main([*arguments, "--data.skip-bad-rows", "--output-dir", str(tmp_path / "rm2")]) == 0
    assert json.loads((tmp_path / "rm2" / "summary.json").read_text())["pairs"] == str(path)


REFUSED = {
    "another task": (["--task", "gsm8k"], "there are no pairs of the task 'gsm8k'"),
    "held-out pairs alone": (["--data.eval-path", "x.jsonl"], "there is no --data.path to train on"),
    "no directory": (["--model.path", "/nowhere"], "/nowhere is not a directory"),
    "a best that no pair measures": (["--training.best", "eval_perplexity"], "held-out pairs are measured by eval_accuracy, eval_loss"),
    "no steps": (["--training.num-steps", "0"], "--training.num-steps is 0"),
    "a policy for rollouts": (["--on-bad.ratio", "skip"], "--on-bad.ratio is 'skip', but it is about rollouts"),
    "no file": (["--data.path", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments, message = REFUSED[name]
    assert main(["--output-dir", str(tmp_path / "rm"), *SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_is_no_reward_model_is_refused_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    create_tiny_model().save_pretrained(tmp_path / "language")
    for path, message in (
        (tmp_path / "language", "expected one ending with ForSequenceClassification"),
        (tmp_path / "x", "not a directory"),
    ):
        assert train(["--output-dir", str(tmp_path / "run"), "--reward.model", str(path), *SMALL_RL]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert parse_command_line(["--reward.model", "rm"]).config.reward.model == "rm"


def test_pairs_of_the_task_are_right_and_wrong_answers_of_many_kinds():
    tokenizer = create_char_tokenizer()
    task = create_sort_task(tokenizer, num_train=300, num_heldout=40)
    train_pairs, heldout = create_task_pairs(tokenizer, task, num_pairs=401, num_heldout=64)
    assert (len(train_pairs), len(heldout)) == (401, 64)
    assert not {pair.chosen.prompt for pair in train_pairs} & {pair.chosen.prompt for pair in heldout}
    for pair in train_pairs:
        assert exact_match(pair.chosen) == 1.0
        assert exact_match(pair.rejected) == 0.0
        assert pair.chosen.prompt == pair.rejected.prompt
        assert pair.chosen.tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(pair.chosen.tokens) == f"{pair.chosen.prompt}{pair.chosen.response}<|eos|>"
    endless = [pair.rejected for pair in train_pairs if pair.rejected.tokens[-1] != tokenizer.eos_token_id]
    assert 0.05 < len(endless) / 401 < 0.2
    lengths = [len(pair.rejected.response) - len(pair.chosen.response) for pair in train_pairs]
    assert min(lengths) < 0 < max(lengths)


@pytest.mark.long
def test_a_reward_model_ranks_held_out_pairs_and_drives_a_run(tmp_path: Path):
    """The whole way with the built-in model, in half of the steps that the command takes by itself: about two minutes on one core."""
    assert main(["--output-dir", str(tmp_path / "rm"), "--training.num-steps", "200", "--num-threads", "1", "--quiet"]) == 0
    assert json.loads((tmp_path / "rm" / "summary.json").read_text())["accuracy"] > 0.95
    arguments = ["--output-dir", str(tmp_path / "run"), "--reward.model", str(tmp_path / "rm"), "--num-threads", "1", "--quiet"]
    assert train(arguments) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after_sft"] < 0.7
    assert summary["accuracy_after_rl"] > 0.85


def test_a_pretrained_model_has_the_learning_rate_of_one(tmp_path: Path):
    create_tiny_model(vocab_size=300).save_pretrained(tmp_path / "own")
    create_tiny_model(vocab_size=64).save_pretrained(tmp_path / "characters")  # as a checkpoint of the built-in model
    (tmp_path / "settings.toml").write_text(f'[model]\npath = "{tmp_path / "own"}"\n')

    def find_rate(*arguments: object) -> float:
        return parse([str(argument) for argument in arguments]).config.training.optimizer.lr

    assert find_rate() == find_rate("--model.path", tmp_path / "characters") == 2e-3
    assert find_rate("--model.path", tmp_path / "own") == find_rate("--config", tmp_path / "settings.toml") == 1e-5
    assert find_rate("--model.path", tmp_path / "own", "--training.optimizer.lr", "3e-4") == 3e-4


def test_a_device_that_is_not_there_is_told_before_a_directory_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    create_tiny_model(vocab_size=64).save_pretrained(tmp_path / "model")
    create_char_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{k}=", "chosen": "1", "rejected": "2"} for k in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--model.path", str(tmp_path / "model"), "--data.path", str(tmp_path / "pairs.jsonl")]
    assert main([*data, "--model.device", "cuda:7", "--output-dir", str(tmp_path / "rm")]) == 2
    assert "cuda" in capsys.readouterr().err and not (tmp_path / "rm").exists()


def test_labelled_answers_with_other_names_are_pairs_and_no_prompt_is_on_both_sides(tmp_path: Path):
    rows = [{"ask": f"s{i % 12}=", "reply": str(i) if good else f"{i}9", "good": good} for i in range(24) for good in (True, False)]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("prompt=ask,completion=reply", "label=good")
    config = RewardModelConfig(data=PairSection(path=str(path), columns=columns, num_heldout=4))
    train, held = create_pairs(config, *create_start(config), print)
    assert len(train) + len(held) == 24 and 1 <= len(held) <= 4
    assert not {pair.chosen.prompt for pair in train} & {pair.chosen.prompt for pair in held}
