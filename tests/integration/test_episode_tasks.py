"""Tasks in several turns, from the command line: they are trained, resumed and evaluated; bad options end in one message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.settings.config import Config
from integration.settings.made.budgets import context_tokens, episode_config, response_tokens
from integration.settings.sections.data import DataSection, EvaluationSection
from integration.settings.sections.episodes import EnvironmentSection, EpisodeSection
from integration.settings.sections.stages import SFTSection
from integration.tasks.episodes import check_demonstrations, create_calculator_task, create_environment_task, create_grid_world_task
from integration.train import main
from rollouts.agents.setting import observation_key
from rollouts.algorithms.gigpo_steps import system_apply_gigpo_to_batch_steps
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import save_config
from rollouts.data.samples import sample_messages
from rollouts.data.trajectories import read_records, read_samples
from rollouts.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]
TINY = (
    *("--quiet", "--model.hidden-size", "32", "--model.intermediate-size", "32", "--model.num-layers", "1"),
    *("--sft.num-steps", "2", "--sft.batch-size", "4", "--rl.num-steps", "2", "--rl.prompts-per-step", "2", "--rl.samples-per-prompt", "2"),
    *("--evaluation.num-prompts", "4", "--checkpoint.rl-every", "1", "--trajectories.every", "1", "--rl.eval-every", "2"),
)


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def train(directory: str, *arguments: str) -> list[dict[str, Any]]:
    """The metrics of a tiny run, without durations."""
    assert main([*TINY, "--output-dir", directory, *arguments]) == 0
    lines = read_metrics(Path(directory) / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


@pytest.mark.slow
def test_a_grid_world_is_trained_by_gigpo_and_goes_on_bit_by_bit_after_an_interruption(tmp_path: Path):
    arguments = ("--task", "grid_world", "--algorithm", "gigpo(gamma=0.9, omega=0.5)", "--episode.max-turns", "4", "--rl.eval-every", "1")
    arguments += ("--rl.optimizer.schedule", "constant")  # or the learning rate would depend on num_steps
    Path("even.py").write_text("def even(sample):\n    return sum(token % 2 == 0 for token in sample.tokens) / 10\n")
    arguments += ("--reward.function", "even.py:even")  # which differs from episode to episode, whatever the model has learned
    whole = train("whole", *arguments)
    last = whole[-1]
    assert last["grad_norm"] > 0
    assert last["num_episodes"] == 4 and 1 <= last["turns_mean"] <= 4 and {"eval_accuracy", "eval_accuracy_sampled"} <= set(last)
    assert sum(last.get(f"num_episodes_{reason}", 0) for reason in ("done", "max_turns")) == 4
    saved = json.loads(Path("whole/config.json").read_text())
    assert saved["rl"]["algorithm"] == "gigpo(gamma=0.9, omega=0.5)" and saved["task"] == "grid_world"
    train("parts", *arguments, "--rl.num-steps", "1")
    resumed = train("parts", "--resume", "--rl.num-steps", "2", "--rl.eval-every", "1")
    assert resumed == whole
    (sample, *_) = read_samples(Path("whole/rl/trajectories/step_0002.jsonl"))
    assert sample.turns is not None
    seen = [message.content for message in sample_messages(sample) if message.role == "user"]
    assert [turn.state for turn in sample.turns] == [observation_key(text) for text in seen[: len(sample.turns)]]
    examples = read_samples(Path("whole/rl/examples.jsonl"))
    assert len(examples) == 4 and all(">" in (sample_messages(example)[0].content or "") for example in examples)


def test_a_resumed_run_is_not_given_other_demonstrations(capsys: pytest.CaptureFixture[str]):
    check_demonstrations(*(Config(task="grid_world", sft=SFTSection(num_steps=steps)) for steps in (64, 100)))  # all there are, twice
    Path("run/sft/checkpoints/step_0001").mkdir(parents=True)
    save_config(Config(task="grid_world", sft=SFTSection(num_steps=2)), Path("run/config.json"))
    assert main(["--mode", "sft", "--task", "grid_world", "--output-dir", "run", "--resume", "--sft.num-steps", "4"]) == 2
    assert "--sft.num-steps: 2 -> 4, for which 256 demonstrations would be played instead of 128" in capsys.readouterr().err


def test_a_calculator_is_trained_with_tool_calls(capsys: pytest.CaptureFixture[str]):
    lines = train("run", "--task", "calculator", "--sft.num-steps", "3")
    assert [line["step"] for line in lines if line["stage"] == "rl"] == [1, 2]
    assert "task calculator" in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["task"] == "calculator" and summary["accuracy_after_rl"] is not None


def test_episodes_are_played_while_training_goes_on():
    lines = train(
        "run",
        "--task",
        "grid_world",
        "--episode.max-turns",
        "4",
        "--mode",
        "rl",
        "--rl.asynchronous.enabled",
        "--algorithm",
        "decoupled(gigpo())",
    )
    assert lines[-1]["num_episodes"] == 4 and lines[-1]["staleness_max"] <= 2


def test_a_greedy_episode_is_added_for_an_algorithm_that_compares_with_it():
    lines = train("run", "--task", "grid_world", "--episode.max-turns", "4", "--mode", "rl", "--algorithm", "remax")
    assert lines[-1]["num_samples"] == 4


def test_demonstrations_are_what_the_model_would_be_given_and_write():
    import trio

    tokenizer = create_char_tokenizer()
    for create, task in ((create_grid_world_task, "grid_world"), (create_calculator_task, "calculator")):
        config = Config(task=task, sft=SFTSection(num_steps=5, batch_size=8), evaluation=EvaluationSection(num_prompts=10))
        made = create(config, tokenizer)
        assert made.demonstrate is not None
        samples = trio.run(made.demonstrate)
        assert len(samples) == 40 and trio.run(made.demonstrate) == samples
        assert {sample.reward for sample in samples} == {0.0, 1.0}, "some succeed and some do not"
        for sample in samples:
            trained = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
            answers = [message.content or "" for message in sample_messages(sample) if message.role == "assistant"]
            assert tokenizer.decode(trained) == "".join(f"{answer}<|eos|>" for answer in answers)
        train_problems, heldout = (
            {json.dumps(p.metadata, sort_keys=True) for p in ps} for ps in (made.train_prompts, made.heldout_prompts)
        )
        assert train_problems and len(heldout) == 10 and not train_problems & heldout


def test_the_settings_of_the_world_change_it():
    config = Config(task="grid_world", environment=EnvironmentSection(size=3, step_reward=-0.1), episode=EpisodeSection(max_turns=3))
    task = create_grid_world_task(config, create_char_tokenizer())
    assert task.episodes is not None and task.episodes.config.max_turns == 3 and "3 x 3" in task.description
    assert len(task.train_prompts) + len(task.heldout_prompts) == 4 * 8
    assert response_tokens(config) == 12 == task.max_tokens


def test_a_larger_world_gets_more_turns_and_a_context_that_holds_them():
    config = Config(task="grid_world")
    assert episode_config(config).max_turns == 12 and context_tokens(config) == 256
    config = Config(task="grid_world", environment=EnvironmentSection(size=10))
    assert episode_config(config).max_turns == 27 and context_tokens(config) == 27 * 4 + 28 * 8
    config = Config(task="calculator")
    assert episode_config(config).max_turns == 5 and context_tokens(config) == 256
    config = Config(task="calculator", environment=EnvironmentSection(max_operations=6))
    assert episode_config(config).max_turns == 9 and context_tokens(config) > 9 * 24 + 10 * 16 - 1


def test_a_calculator_of_few_problems_holds_out_a_fifth_of_them():
    config = Config(task="calculator", environment=EnvironmentSection(max_digits=1, max_operations=1))
    task = create_calculator_task(config, create_char_tokenizer())
    assert (len(task.heldout_prompts), len(task.train_prompts)) == (60, 240)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "grid_world", "--environment.num-holes", "9"), "num_holes is 9"),
        (("--environment", "missing.py:Parity", "--mode", "rl"), "missing.py"),
        (("--environment", "own.py:Parity", "--environment.expert", "own.py:expret"), "did you mean 'expert'"),
        (("--task", "grid_world", "--reward.function", "own.py:nothing"), "nothing"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_world_that_is_not_there_is_found_out_before_there_is_a_run(
    arguments: tuple[str, ...], message: str, dry: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    Path("own.py").write_text(ENVIRONMENT)
    assert main([*TINY, "--output-dir", "run", *arguments, *dry]) == 2
    assert message in capsys.readouterr().err and not Path("run/config.json").exists()


(ENVIRONMENT,) = re.findall(r"^```python\n(# own.py.*?)^```", (ROOT / "docs" / "agents-runs.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "num_lines"),
    [
        pytest.param(("--mode", "rl"), 3, id="from seeds alone", marks=pytest.mark.slow),
        pytest.param(("--environment.expert", "own.py:expert"), 5, id="with an expert's demonstrations"),
        pytest.param(
            ("--mode", "rl", "--data.path", "rows.jsonl", "--reward.function", "own.py:reward"),
            3,
            id="from rows, with a reward",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_environment_of_ones_own_is_trained(arguments: tuple[str, ...], num_lines: int):
    Path("own.py").write_text(ENVIRONMENT)
    Path("rows.jsonl").write_text("".join(json.dumps({"digit": k % 10}) + "\n" for k in range(40)))
    lines = train("run", "--environment", "own.py:Parity", *arguments)
    assert len(lines) == num_lines and lines[-1]["turns_mean"] == 2.0
    saved = json.loads(Path("run/config.json").read_text())
    assert saved["task"] == "environment" and saved["environment"]["factory"] == f"{Path.cwd()}/own.py:Parity"


def test_settings_anchor_key_and_similarity_of_an_environment_of_ones_own_reach_it(capsys: pytest.CaptureFixture[str]):
    """Two of three settings come from the flag, one from the row, which wins; steps are written with what GiGPO made of them."""
    Path("own.py").write_text(
        "class Halls:\n"
        "    def reset(self, config):\n"
        "        self.given, self.left = dict(config.parameters), self_given_depth(config)\n"
        "        return f'hall {config.seed % 7}, door {self.given[\"door\"]}'\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        return f'hall {len(action) % 10}, door', float(len(action) % 2), self.left == 0, {'given': self.given}\n"
        "    def get_state_description(self):\n        return ''\n"
        "    def get_prompt_prefix(self):\n        return ''\n"
        "def self_given_depth(config):\n    return config.parameters['depth']\n"
        "def word(observation):\n    return observation.split(',')[0]\n"
        "def number(observation):\n    return 3\n"
    )
    Path("rows.jsonl").write_text("".join(json.dumps({"door": f"d{k % 3}"}) + "\n" for k in range(40)))
    flags = ("--environment", "own.py:Halls", "--environment.parameters", "depth=2", "door=none", 'words=["a"]', "--mode", "rl")
    flags += ("--data.path", "rows.jsonl", "--algorithm", "gigpo(omega=0.5, gamma=0.9)", "--trajectories.steps")
    flags += ("--generation.max-tokens", "4", "--rl.samples-per-prompt", "4", "--rl.num-steps", "1", "--evaluation.num-prompts", "1")
    train("run", *flags, "--environment.state-key", "own.py:word", "--environment.similarity", "0.8")
    records = read_records(Path("run/rl/trajectories/step_0001.jsonl"))
    given = [step.step_info["given"] for record in records for step in record.steps]
    assert given and all(each["depth"] == 2 and each["words"] == ["a"] and each["door"] in ("d0", "d1", "d2") for each in given)
    groups = {record.sample.group_index: set() for record in records}
    for record in records:
        groups[record.sample.group_index] |= {turn.state for turn in record.sample.turns}
    assert all(len(keys) == 1 and keys <= {f"hall {k}" for k in range(9)} for keys in groups.values()), "halls are similar by 0.8 and more"
    again = system_apply_gigpo_to_batch_steps(
        [record.steps for record in records], [record.sample.reward for record in records], omega=0.5, gamma=0.9,
        state_hashing_function=lambda seen: "hall",
    )  # fmt: skip
    for old, new in zip((step for record in records for step in record.steps), (step for steps in again for step in steps), strict=True):
        assert old.advantage == pytest.approx(new.advantage, abs=1e-4) and old.return_to_go == pytest.approx(new.return_to_go, abs=1e-4)
        assert old.step_info["gigpo"]["anchor_size"] == new.step_info["gigpo"]["anchor_size"]
    saved = json.loads(Path("run/config.json").read_text())["environment"]
    assert saved["parameters"] == ["depth=2", "door=none", 'words=["a"]'] and saved["state_key"] == f"{Path.cwd()}/own.py:word"
    capsys.readouterr()
    assert main([*TINY, "--output-dir", "dry", *flags, "--environment.state-key", "own.py:word", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "own.py:Halls" in told and '{"depth": 2, "door": "none", "words": ["a"]}' in told and "own.py:word, equal" in told
    assert main([*TINY, "--output-dir", "bad", *flags, "--environment.state-key", "own.py:number"]) != 0
    assert "--environment.state-key own.py:number, asked for the observation 'hall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--environment", "own.py:Parity", "--mode", "rl", "--environment.parameters", "depth"), "environment.parameters has 'depth'"),
        (("--environment", "own.py:Parity", "--mode", "rl", "--environment.parameters", "a=1", "a=2"), "has 'a' twice"),
        (("--environment", "own.py:Parity", "--mode", "rl", "--environment.similarity", "1.5"), "environment.similarity is 1.5"),
        (("--environment", "own.py:Parity", "--mode", "rl", "--environment.state-key", "own.py:keey"), "has no function 'keey'"),
        (
            ("--environment", "own.py:Parity", "--mode", "rl", "--algorithm", "grpo", "--environment.similarity", "0.9"),
            "rl.algorithm 'grpo' compares no steps of equal states: add --algorithm gigpo, or leave --environment.similarity out",
        ),
        (("--task", "grid_world", "--environment.state-key", "own.py:expert"), "add --task environment"),
        (("--trajectories.steps",), "the task 'sort' has a single turn"),
        (("--episode.max-turns", "3"), "the task 'sort' has a single turn"),
        (("--environment.size", "3"), "which has no such setting: add --task grid_world"),
        (("--task", "calculator", "--environment.size", "3"), "the task is 'calculator'"),
        (("--task", "grid_world", "--environment.size", "11"), "environment.size is 11"),
        (("--task", "grid_world", "--episode.max-turns", "1000"), "give --model.max-length 12008"),
        (("--task", "grid_world", "--episode.max-turns", "30", "--model.max-length", "256"), "its observations up to 248"),
        (("--task", "grid_world", "--episode.on-tool-error", "raise"), "gives the task 'grid_world' no tools: add --task calculator"),
        (("--algorithm", "gigpo"), "the task 'sort' has a single turn"),
        (("--task", "grid_world", "--episode.max-turns", "0"), "--episode.max-turns is 0"),
        (("--task", "grid_world", "--episode.stop-regex", "("), "which is no regular expression"),
        (("--task", "grid_world", "--data.path", "rows.jsonl"), "generates its own data"),
        (("--task", "grid_world", "--rl.asynchronous.enabled", "--enable-segment-wise-ppo"), "has no segments"),
        (
            (
                "--task",
                "grid_word",
            ),
            "did you mean 'grid_world'",
        ),
        (("--task", "environment"), "give --environment FILE.py:NAME"),
        (("--environment", "missing.py:Parity", "--mode", "rl"), "missing.py"),
        (("--environment", "own.py:Nothing", "--mode", "rl"), "Nothing"),
        (("--environment", "own.py:Parity"), "give --environment.expert FILE.py:NAME"),
        (("--algorithm", "gigpoo"), "did you mean 'gigpo'"),
        (("--algorithm", "gigpo(omeg=1)"), "omeg"),
    ],
)
def test_bad_options_end_in_one_message(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    Path("own.py").write_text(ENVIRONMENT)
    assert main([*TINY, "--output-dir", "run", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1 and message in captured.err, captured.err
    assert "Traceback" not in captured.err


def test_held_out_rows_of_an_environment_are_not_trained_on():
    Path("own.py").write_text(ENVIRONMENT)
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"s{k}", "completion": "e"}) + "\n" for k in range(40)))
    config = Config(task="environment", environment=EnvironmentSection(factory="own.py:Parity"), data=DataSection(path="rows.jsonl"))
    task = create_environment_task(config, create_char_tokenizer(), "sft+rl")
    assert (len(task.heldout_prompts), len(task.sft_samples)) == (4, 36)
    assert not {prompt.content for prompt in task.heldout_prompts} & {sample.prompt for sample in task.sft_samples}
