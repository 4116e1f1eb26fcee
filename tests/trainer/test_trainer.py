"""The trainer: fit, rollout, train_step, checkpoints, metrics_history, cleanup; and what each setting does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts import (
    BlockingCallError,
    CheckpointError,
    EnvironmentConfig,
    EpisodeConfig,
    JSONLLogger,
    Prompt,
    Sample,
    Trajectory,
    create_char_tokenizer,
    create_tiny_model,
)
from rollouts.errors import ConfigError, EnvironmentFault
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.trainer import (
    BaseEnvironment,
    CheckpointConfig,
    ConfigStore,
    InferenceConfig,
    ModelConfig,
    PPOTrainer,
    TrainingConfig,
    open_trainer,
)
from rollouts.trainer.session import TrainingTask


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    create_tiny_model(vocab_size=40, hidden_size=16, num_layers=1).save_pretrained(path)
    create_char_tokenizer(40).save_pretrained(path)
    return path


def create_config(
    model_path: Path, output_dir: Path | None = None, *, inference: dict[str, Any] | None = None, **training: Any
) -> ConfigStore:
    few = {"batch_size": 2, "n_samples_per_prompt": 2, "adv_estimator": "grpo", "learning_rate": 1e-2}
    return ConfigStore(
        model=ModelConfig(local_path=str(model_path), device="cpu"),
        inference=InferenceConfig(**{"max_tokens": 2, **(inference or {})}),
        training=TrainingConfig(**{**few, **training}),
        checkpoint=CheckpointConfig(output_dir=None if output_dir is None else str(output_dir)),
    )


class Parity(BaseEnvironment):
    """Rewards by the text of the action, two actions an episode, 0.5 for each of the same length as the observation's number."""

    def reset(self, config: EnvironmentConfig) -> str:
        self.turn, self.number = 0, config.seed % 3
        return f"{self.number}="

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return "go", (len(set(action)) + 1) / 4, self.turn == 2, {}


PROMPTS = ["1+1=", "2+3=", {"prompt": "4+4=", "answer": "8"}, "5="]


def reward_variety(sample: Sample) -> float:
    """Reward that is not the same for all samples."""
    return float(sample.tokens[-1] % 5)


def create_trainer(config: ConfigStore, **task: Any) -> PPOTrainer:
    task = task or {"dataset": PROMPTS, "sample_reward_fn": reward_variety}
    return PPOTrainer(config, **task)


def policy_weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    async def get() -> Any:
        return dict(await trainer._thread.value._parts.backend.get_weights().result())

    return {name: weight.clone() for name, weight in trainer._thread.call("test", get).items()}


def drop_times(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.endswith("_s") and "per_s" not in name} for line in history]


# -- fit


def test_fit_takes_exactly_the_iterations_and_optimizer_steps_that_it_is_told(model_path: Path):
    with create_trainer(create_config(model_path, ppo_epochs=2, num_minibatches=2)) as trainer:
        history = trainer.fit(num_epochs=2, num_iters_per_epoch=3)
        assert history == trainer.metrics_history
        assert [line["epoch"] for line in history] == [0, 0, 0, 1, 1, 1]
        assert [line["iteration"] for line in history] == [1, 2, 3, 4, 5, 6]
        assert [line["num_updates"] for line in history] == [4.0] * 6
        assert all(isinstance(line["policy_loss"], float) and line["policy_loss"] == line["loss"] for line in history)
        assert trainer.num_updates == 24
        assert [line["epoch"] for line in trainer.fit(1, 1)] == [0, 0, 0, 1, 1, 1, 0]
        assert trainer.num_updates == 28


def test_the_defaults_of_fit_are_those_of_the_configuration(model_path: Path):
    with create_trainer(create_config(model_path, num_epochs=2)) as trainer:  # four prompts, two an iteration
        assert [line["epoch"] for line in trainer.fit()] == [0, 0, 1, 1]
    with create_trainer(create_config(model_path, num_epochs=1, num_iters_per_epoch=3)) as trainer:
        assert len(trainer.fit()) == 3
        for name, value in (("num_epochs", 0), ("num_iters_per_epoch", 1.5)):
            with pytest.raises(ConfigError, match=f"{name} is {value}, expected a whole number, at least 1"):
                trainer.fit(**{name: value})


def test_max_steps_bounds_the_optimizer_steps_of_all_calls(model_path: Path):
    with create_trainer(create_config(model_path, max_steps=6, num_minibatches=2)) as trainer:
        assert len(trainer.fit(num_epochs=1, num_iters_per_epoch=2)) == 2
        assert len(trainer.fit(num_epochs=5, num_iters_per_epoch=5)) == 3
        assert trainer.num_updates == 6
        assert len(trainer.fit(num_epochs=5, num_iters_per_epoch=5)) == 3


def test_a_fit_in_two_parts_and_single_steps_give_the_numbers_of_one(model_path: Path):
    def run(*calls: tuple[str, tuple[int, ...]]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        with create_trainer(create_config(model_path)) as trainer:
            for name, arguments in calls:
                getattr(trainer, name)(*arguments)
            history = [{k: v for k, v in line.items() if k != "epoch"} for line in drop_times(trainer.metrics_history)]
            return history, policy_weights(trainer)

    whole, weights = run(("fit", (1, 4)))
    for calls in ((("fit", (1, 1)), ("fit", (3, 1))), (("train_step", ()), ("fit", (1, 2)), ("train_step", ()))):
        history, same = run(*calls)
        assert history == whole
        assert all(torch.equal(same[name], weight) for name, weight in weights.items())


def test_learning_rate_batch_size_and_group_size_are_those_of_the_configuration(model_path: Path):
    with create_trainer(create_config(model_path, batch_size=3, n_samples_per_prompt=5, learning_rate=7e-3)) as trainer:
        rollouts = trainer.rollout()
        assert (len({s.group_index for s in rollouts.samples}), len(rollouts.samples)) == (3, 15)
        assert trainer.train_step(rollouts)["lr"] == pytest.approx(7e-3)


def test_an_environment_without_a_dataset_needs_a_number_of_iterations(model_path: Path):
    with create_trainer(create_config(model_path), environment=Parity) as trainer:
        with pytest.raises(ConfigError, match=r"an environment without a dataset has no end.*give num_iters_per_epoch"):
            trainer.fit(num_epochs=1)
        assert len(trainer.fit(1, 2)) == 2


# -- rollout


def test_a_rollout_reads_a_file_of_prompts(model_path: Path, tmp_path: Path):
    rows = [{"prompt": f"{k}+{k}=", "answer": str(2 * k)} for k in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen: list[str] = []

    def reward(sample: Sample) -> float:
        seen.append(sample.metadata["ground_truth"])
        return float(sample.response == sample.metadata["ground_truth"])

    with create_trainer(create_config(model_path, batch_size=6), dataset=tmp_path / "prompts.jsonl", sample_reward_fn=reward) as trainer:
        rollouts = trainer.rollout()
    assert {sample.prompt for sample in rollouts.samples} == {row["prompt"] for row in rows}
    assert sorted(seen) == sorted([row["answer"] for row in rows] * 2)


def test_a_rollout_plays_episodes_of_several_turns(model_path: Path):
    config = create_config(model_path, inference={"multi_turn": True, "max_turns": 5, "system_prompt": "play."})
    with PPOTrainer(config, lambda t: sum(t.rewards), Parity) as trainer:
        rollouts = trainer.rollout()
        metrics = trainer.train_step(rollouts)
    for sample in rollouts.samples:
        assert sample.turns is not None and len(sample.turns) == 2
        assert sample.episode is not None and sample.reward == pytest.approx(sample.episode.environment_reward)
        assert sample.messages is not None and sample.messages[0].content == "play."
        sampled = [m.content for m in sample.messages if m.role == "assistant"]
        masked = [token for token, on in zip(sample.tokens, sample.loss_mask, strict=True) if on]
        assert len(sampled) == 2 and len(masked) <= 2 * (2 + 1)
    assert metrics["num_tokens"] > 0


def test_one_turn_is_played_unless_several_are_asked_for(model_path: Path):
    with create_trainer(create_config(model_path), environment=Parity()) as trainer:
        assert all(len(sample.turns or ()) == 1 for sample in trainer.rollout().samples)


def show(sample: Sample) -> str:
    """First message of an episode."""
    assert sample.messages is not None
    return sample.messages[0].content or ""


@dataclass(frozen=True, kw_only=True)
class BoardConfig(EnvironmentConfig):
    width: int = 2


class Board(BaseEnvironment):
    def reset(self, config: EnvironmentConfig) -> str:
        assert isinstance(config, BoardConfig)
        return f"{config.width}{config.parameters['kind']}{config.parameters.get('answer', '-')}{config.seed % 10}="

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 1.0, True, {}


def test_fields_and_parameters_of_the_environment_configuration_reach_reset(model_path: Path):
    config = replace(create_config(model_path), environment=BoardConfig(width=7, parameters={"kind": "k"}))
    with create_trainer(config, environment=Board) as trainer:
        first = [show(sample) for sample in trainer.rollout().samples]
    assert all(text.startswith("7k-") for text in first)
    assert first[0] == first[1]  # the episodes of a group begin alike
    with create_trainer(config, environment=Board, dataset=[Prompt(content="", metadata={"answer": a}) for a in "ab"]) as trainer:
        assert {show(sample)[2] for sample in trainer.rollout().samples} == {"a", "b"}


class Plain:
    """An environment of an older kind: reset without arguments, and two methods alone."""

    def reset(self) -> str:
        return "9="

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.5, True, {}


class Uncopied(Plain):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("it has a socket")


def test_environments_are_classes_functions_or_objects(model_path: Path):
    config = create_config(model_path)
    for environment in (Plain, Plain(), lambda: Plain()):
        with create_trainer(config, environment=environment) as trainer:
            assert {sample.reward for sample in trainer.rollout().samples} == {0.5}
    for wrong in (7, object):
        with pytest.raises(ConfigError, match=rf"environment is {wrong} .*expected a class with reset and step"):
            create_trainer(config, environment=wrong)
    with pytest.raises(ConfigError, match=r"a Uncopied that cannot be copied \(TypeError: it has a socket\).*give its class"):
        create_trainer(config, environment=Uncopied())
    one = create_config(model_path, adv_estimator="gae", batch_size=1, n_samples_per_prompt=1)
    with create_trainer(one, environment=lambda: object()) as trainer, pytest.raises(EnvironmentFault, match="no method reset, step"):
        trainer.rollout()


def test_rewards_are_functions_of_a_trajectory_and_its_environment(model_path: Path):
    config, board = create_config(model_path), Plain()
    with create_trainer(config, reward_fn=lambda t: 2 * sum(t.rewards), environment=board) as trainer:
        assert {sample.reward for sample in trainer.rollout().samples} == {1.0}

    def judge(trajectory: Trajectory, environment: Any) -> float:
        assert trajectory.dones == (True,)
        return 3.0 if environment is board else 4.0

    with create_trainer(config, reward_fn=judge, environment=board) as trainer:
        assert {sample.reward for sample in trainer.rollout().samples} == {3.0}
    with create_trainer(config, reward_fn=judge, environment=Plain) as trainer:  # of a class there is no object: the configuration
        assert {sample.reward for sample in trainer.rollout().samples} == {4.0}
    with create_trainer(config, reward_fn=lambda t: len(t.actions[0]), dataset=PROMPTS) as trainer:
        assert {sample.reward for sample in trainer.rollout().samples} <= {0.0, 1.0, 2.0}


# -- train_step


def test_gradients_that_are_accumulated_are_those_of_the_whole_batch(model_path: Path):
    found = []
    for tokens in (16384, 1):
        with create_trainer(create_config(model_path, max_tokens_per_microbatch=tokens, batch_size=4)) as trainer:
            metrics = trainer.train_step()
            found.append((metrics["policy_loss"], metrics["grad_norm"], policy_weights(trainer)))
    (loss, norm, whole), (same_loss, same_norm, parts) = found
    assert (loss, norm) == (pytest.approx(same_loss, abs=1e-6), pytest.approx(same_norm, rel=1e-5))
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5) for name in whole)


@pytest.mark.parametrize(
    "changed",
    [
        {"entropy_coef": 0.1},
        {"clip_ratio": 0.01, "ppo_epochs": 2},
        {"adv_estimator": "rloo"},
        {"adv_estimator": "gae", "lam": 0.5},
        {"adv_estimator": "gae", "gamma": 0.5},
        {"adv_estimator": "gae", "critic_learning_rate": 1e-2},
        {"kl_loss_coef": 0.5, "ppo_epochs": 2},
        {"use_kl_in_reward": True, "kl_coef": 5.0},
        {"weight_decay": 0.5},
        {"max_grad_norm": 1e-4},
        {"seed": 1},
    ],
    ids=str,
)
def test_each_setting_changes_the_weights(changed: dict[str, Any], model_path: Path):
    base = {
        "ppo_epochs": changed.get("ppo_epochs", 1),
        "adv_estimator": "gae" if "adv_estimator" in changed and len(changed) > 1 else "grpo",
    }
    weights = []
    for settings in (base, {**base, **changed}):
        with create_trainer(create_config(model_path, **settings)) as trainer:
            trainer.fit(1, 2)
            weights.append(policy_weights(trainer))
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_models_besides_the_policy_are_loaded_only_if_they_are_needed(model_path: Path):
    def companions(**training: Any) -> tuple[bool, bool]:
        with create_trainer(create_config(model_path, **training)) as trainer:
            parts = trainer._thread.value._parts
            return parts.reference is not None, parts.critic is not None

    assert companions() == (False, False)
    assert companions(use_kl_in_reward=True) == (True, False)
    assert companions(kl_loss_coef=0.1) == (True, False)
    assert companions(adv_estimator="gae") == (False, True)


def test_remax_samples_a_greedy_answer_to_each_prompt(model_path: Path):
    with create_trainer(create_config(model_path, adv_estimator="remax", n_samples_per_prompt=1)) as trainer:
        rollouts = trainer.rollout()
        assert [sample.trainable for sample in rollouts.samples] == [True, False] * 2
        trainer.train_step(rollouts)


def test_responses_of_a_cut_distribution_are_trained_on_with_log_probs_of_the_trainer(model_path: Path):
    with create_trainer(create_config(model_path, inference={"top_p": 0.5})) as trainer:
        rollouts = trainer.rollout()
        assert all(sample.truncated_sampling for sample in rollouts.samples)
        assert trainer.train_step(rollouts)["num_updates"] == 1.0


# -- checkpoints


def test_fit_writes_a_checkpoint_every_few_epochs_and_keeps_the_newest(model_path: Path, tmp_path: Path):
    config = create_config(model_path, tmp_path / "out")
    config = replace(config, checkpoint=replace(config.checkpoint, save_interval=2, keep_last_n=2))
    with create_trainer(config) as trainer:
        trainer.fit(num_epochs=5, num_iters_per_epoch=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_0008", "step_0010"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "step_0010")


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(estimator: str, model_path: Path, tmp_path: Path):
    config = create_config(model_path, adv_estimator=estimator)
    with create_trainer(config) as trainer:
        trainer.fit(1, 2)
        saved = trainer.save_checkpoint(tmp_path / "saved")
        assert saved == tmp_path / "saved" / "step_0002"
        rest = drop_times(trainer.fit(1, 2))[2:]
        weights = policy_weights(trainer)
    for path in (saved, saved.parent):
        with create_trainer(config) as trainer:
            assert trainer.load_checkpoint(path) == 2
            assert trainer.metrics_history == []
            assert drop_times(trainer.fit(1, 2)) == rest
            assert all(torch.equal(weight, weights[name]) for name, weight in policy_weights(trainer).items())
            assert trainer.num_updates == 4
            trainer.load_checkpoint(saved)  # and back
            assert trainer.metrics_history == []
            assert drop_times(trainer.fit(1, 2)) == rest


def test_checkpoints_that_cannot_be_are_refused(model_path: Path, tmp_path: Path):
    with create_trainer(create_config(model_path)) as trainer:
        with pytest.raises(ConfigError, match="nothing has been trained yet"):
            trainer.save_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match="no directory for a checkpoint: give path"):
            trainer.save_checkpoint()
        with pytest.raises(CheckpointError, match="holds no checkpoint: give a step_NNNN directory"):
            trainer.load_checkpoint(tmp_path)


def test_lines_go_to_a_logger_as_well(model_path: Path, tmp_path: Path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    config = create_config(model_path)
    with PPOTrainer(config, dataset=PROMPTS, sample_reward_fn=reward_variety, metrics_logger=logger) as trainer:
        trainer.fit(2, 1)
        trainer.train_step()
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [(line["iteration"], line["policy_loss"]) for line in lines] == [
            (line["iteration"], line["policy_loss"]) for line in trainer.metrics_history
        ]


# -- refusals


@pytest.mark.parametrize(
    ("inference", "task", "message"),
    [
        ({}, {"dataset": PROMPTS}, "answers to a dataset's prompts need a reward"),
        ({}, {"reward_fn": len}, "nothing to train on: give an environment, or a dataset"),
        ({}, {"reward_fn": len, "sample_reward_fn": len, "environment": Plain}, "reward_fn and sample_reward_fn are both given"),
        ({"multi_turn": True}, {"dataset": PROMPTS, "reward_fn": len}, "multi_turn is True, but there is no environment"),
        ({"temperature": 0.0}, {"environment": Plain}, "temperature is 0: all responses to a prompt would be the same"),
        ({"backend": "vllm", "url": "http://127.0.0.1:1"}, {"environment": Plain}, "the new weights reach a server through a directory"),
        ({}, {"task": TrainingTask(environment=Plain, episodes=EpisodeConfig(max_turns=3))}, "max_turns is 3, but InferenceConfig says 1"),
        ({}, {"reward_fn": lambda a, b, c: 1.0, "environment": Plain}, r"must take \(trajectory, environment\) or \(trajectory\)"),
    ],
)
def test_tasks_and_settings_that_do_not_fit_are_refused(inference: dict[str, Any], task: dict[str, Any], message: str, model_path: Path):
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(create_config(model_path, inference=inference), **task)


# -- trio, servers, cleanup


async def test_inside_a_trio_loop_the_session_is_used_instead(model_path: Path):
    config = create_config(model_path)
    with pytest.raises(BlockingCallError, match=r"PPOTrainer\(\.\.\.\) waits .* `async with open_trainer"):
        create_trainer(config)
    async with open_trainer(config, dataset=PROMPTS, sample_reward_fn=reward_variety) as trainer:
        history = await trainer.fit(1, 2)
        rollouts = await trainer.rollout()
        await trainer.train_step(rollouts)
        assert (await trainer.generate(["1="], max_tokens=1)).lengths == (1,)
    blocking = await trio.to_thread.run_sync(fit_two, config)
    assert drop_times(history) == drop_times(blocking)


def fit_two(config: ConfigStore) -> list[dict[str, float]]:
    with create_trainer(config) as trainer:
        return trainer.fit(1, 2)


@pytest.mark.parametrize(("kind", "server_type"), [("vllm", FakeVLLMServer), ("sglang", FakeSGLangServer)])
async def test_a_server_gets_the_weights_of_each_iteration(kind: str, server_type: Any, model_path: Path, tmp_path: Path):
    async with server_type(model_path) as server:
        config = create_config(model_path, tmp_path / "out", inference={"backend": kind, "url": server.url})
        async with open_trainer(config, dataset=PROMPTS, sample_reward_fn=reward_variety) as trainer:
            await trainer.fit(1, 2)
            assert await trainer.engine.engine.get_weight_version() == 2
            versions = {v for s in (await trainer.rollout()).samples for v in s.weight_versions if v >= 0}
            assert versions == {2}


@pytest.fixture
def trainer(model_path: Path) -> Iterator[PPOTrainer]:
    with create_trainer(create_config(model_path)) as trainer:
        yield trainer


def test_cleanup_ends_everything_and_may_be_called_twice(trainer: PPOTrainer):
    trainer.fit(1, 1)
    trainer.cleanup()
    trainer.cleanup()
    assert not [thread for thread in threading.enumerate() if thread.name == "PPOTrainer"]
    for use in (lambda: trainer.fit(1, 1), lambda: trainer.metrics_history, trainer.rollout):
        with pytest.raises(BlockingCallError, match="this PPOTrainer was closed"):
            use()


@pytest.mark.slow
def test_cleanup_leaves_no_process_socket_thread_or_model(model_path: Path):
    """In a program of its own, so that nothing of other tests is there."""
    program = f"""
        import gc, json, os, threading, time
        import torch
        from rollouts.trainer import *
        def look():
            paths = [f"/proc/self/fd/{{fd}}" for fd in os.listdir("/proc/self/fd")]
            sockets = [os.readlink(path) for path in paths if os.path.islink(path)]
            children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
            modules = sum(isinstance(found, torch.nn.Embedding) for found in gc.get_objects())
            return [sum(name.startswith("socket") for name in sockets), len(children), modules]
        config = ConfigStore(
            model=ModelConfig(local_path={str(model_path)!r}, device="cpu"), inference=InferenceConfig(max_tokens=2),
            training=TrainingConfig(batch_size=2, n_samples_per_prompt=2),
        )
        before = look()
        trainer = PPOTrainer(config, sample_reward_fn=lambda sample: float(sample.tokens[-1]), dataset=["1=", "2="])
        trainer.fit(1, 1)
        during = look()
        trainer.cleanup()
        deadline = time.monotonic() + 30
        while any("rio" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:  # idle ones end in 10 s
            time.sleep(0.2)
        gc.collect()
        print(json.dumps([before, during, look(), [thread.name for thread in threading.enumerate()]]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    before, during, after, threads = json.loads(done.stdout.splitlines()[-1])
    assert during[2] == before[2] + 3  # policy, engine and critic
    assert after == before == [0, 0, before[2]]
    assert set(threads) <= {"MainThread", "tqdm_monitor"}  # the second is of the bars of transformers


def test_iterations_are_counted_beyond_the_history(model_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollouts.trainer.session.HISTORY_STEPS", 2)
    with create_trainer(create_config(model_path)) as trainer:
        for _ in range(4):
            trainer.train_step()
        assert trainer.num_updates == 4
