"""ConfigStore: sections with defaults, each optional; what has no effect is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts import EnvironmentConfig, from_dict, to_dict
from rollouts.errors import ConfigError
from rollouts.trainer import CheckpointConfig, ConfigStore, InferenceConfig, ModelConfig, TrainingConfig
from rollouts.trainer.engines import create_server_config, find_model_directory, resolve_settings


def test_every_section_has_defaults_and_one_field_can_be_replaced():
    config = ConfigStore()
    changed = replace(config, training=replace(config.training, learning_rate=3e-4))
    assert changed.training.learning_rate == 3e-4
    assert replace(changed, training=config.training) == config
    assert (changed.model, changed.inference, changed.checkpoint, changed.environment) == (
        ModelConfig(), InferenceConfig(), CheckpointConfig(), EnvironmentConfig(),
    )  # fmt: skip
    with pytest.raises(FrozenInstanceError):
        config.training.learning_rate = 1.0  # type: ignore[misc]


def test_it_goes_to_json_values_and_back():
    config = ConfigStore(training=TrainingConfig(adv_estimator="grpo"), checkpoint=CheckpointConfig(output_dir="out"))
    assert from_dict(ConfigStore, to_dict(config)) == config


@dataclass(frozen=True, kw_only=True)
class MazeConfig(EnvironmentConfig):
    width: int = 4


def test_a_section_of_another_kind_is_refused():
    assert ConfigStore(environment=MazeConfig(width=7)).environment == MazeConfig(width=7)
    with pytest.raises(ConfigError, match=r"ConfigStore\.training is InferenceConfig\(.*expected a TrainingConfig"):
        ConfigStore(training=InferenceConfig())  # type: ignore[arg-type]


def test_a_local_path_wins_over_the_name(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    assert find_model_directory(ModelConfig(model_name=str(there), local_path=str(here))) == here
    assert find_model_directory(ModelConfig(model_name=str(there))) == there
    with pytest.raises(ConfigError, match="there is no model: set"):
        find_model_directory(ModelConfig())


def test_a_name_that_the_hub_does_not_give_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"ModelConfig\.model_name is 'nobody/nothing-1b'"):
        find_model_directory(ModelConfig(model_name="nobody/nothing-1b"))
    assert find_model_directory(ModelConfig(model_name="no such name")) == Path("no such name")  # refused where it is loaded


def test_model_path_and_backend_replace_those_of_the_config(tmp_path):
    config = ConfigStore(
        model=ModelConfig(local_path="elsewhere", dtype="bfloat16", device="cpu"), inference=InferenceConfig(max_tokens=5, backend="vllm")
    )
    model, inference = resolve_settings(tmp_path, "sglang", config)
    assert find_model_directory(model) == tmp_path
    assert (model.dtype, inference.max_tokens, inference.backend) == ("bfloat16", 5, "sglang")
    assert resolve_settings(None, None, config) == (config.model, config.inference)
    assert resolve_settings(None, None, config.inference)[1] == config.inference


def test_dtype_parallelism_and_length_are_in_the_command_of_a_server(tmp_path, monkeypatch: pytest.MonkeyPatch):
    from rollouts.engines.launch.commands import build_sglang_command, build_vllm_command

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, build in (("vllm", build_vllm_command), ("sglang", build_sglang_command)):
        inference = InferenceConfig(backend=name, max_model_len=777, python="/a/python")  # type: ignore[arg-type]
        server = create_server_config(tmp_path, ModelConfig(dtype="float16", device="cuda", tensor_parallel_size=2), inference)
        command = " ".join(build(server, 1234))
        assert command.startswith("/a/python -m ")
        assert str(tmp_path) in command
        assert "--dtype float16" in command
        assert "--tensor-parallel-size 2" in command or "--tp-size 2" in command
        assert "--max-model-len 777" in command or "--context-length 777" in command


REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (ModelConfig, {"dtype": "int8"}, r"ModelConfig\.dtype is 'int8': known are bfloat16, float16, float32"),
    (ModelConfig, {"device": "cpu", "tensor_parallel_size": 2}, "tensor_parallel_size is 2, but ModelConfig.device is 'cpu'"),
    (ModelConfig, {"tensor_parallel_size": 0}, "tensor_parallel_size is 0, expected a whole number, at least 1"),
    (ModelConfig, {"trust_remote_code": "no"}, "trust_remote_code is 'no', expected True or False"),
    (InferenceConfig, {"backend": "vlm"}, "backend is 'vlm': did you mean 'vllm'"),
    (InferenceConfig, {"max_tokens": 0}, "max_tokens is 0"),
    (InferenceConfig, {"temperature": -1.0}, "temperature is -1.0"),
    (InferenceConfig, {"top_p": 0.0}, "top_p is 0.0, expected more than 0"),
    (InferenceConfig, {"max_turns": 4}, "max_turns is 4, which has no effect: set multi_turn to True"),
    (InferenceConfig, {"multi_turn": True, "max_turns": 0}, "max_turns is 0"),
    (InferenceConfig, {"url": "http://127.0.0.1:1"}, "url is .* which has no effect: the embedded engine is not a server"),
    (InferenceConfig, {"python": "py"}, "python is 'py', which has no effect: no server is launched"),
    (InferenceConfig, {"backend": "vllm", "url": "http://a", "log_path": "l"}, "log_path is 'l', which has no effect"),
    (TrainingConfig, {"adv_estimator": "gea"}, "adv_estimator is 'gea': did you mean 'gae'"),
    (
        TrainingConfig,
        {"adv_estimator": "xyz"},
        "adv_estimator is 'xyz': known are dr_grpo, gae, gpg, grpo, grpo_passk, opo, reinforce_plus",
    ),
    (TrainingConfig, {"adv_estimator": "grpo", "lam": 0.5}, "lam is 0.5, which has no effect: with adv_estimator 'grpo'"),
    (TrainingConfig, {"adv_estimator": "rloo", "gamma": 0.5}, "gamma is 0.5, which has no effect"),
    (TrainingConfig, {"adv_estimator": "opo", "critic_learning_rate": 1.0}, "critic_learning_rate is 1.0, which has no effect"),
    (TrainingConfig, {"adv_estimator": "grpo", "n_samples_per_prompt": 1}, "n_samples_per_prompt is 1, but .* compares the responses"),
    (TrainingConfig, {"kl_coef": 0.5}, "kl_coef is 0.5, which has no effect: set use_kl_in_reward to True"),
    (TrainingConfig, {"gamma": 1.5}, r"gamma is 1.5, expected a number in \[0, 1\]"),
    (TrainingConfig, {"lam": -0.1}, "lam is -0.1"),
    (TrainingConfig, {"clip_ratio": 1.0}, r"clip_ratio is 1.0, expected a number in \[0, 1\)"),
    (TrainingConfig, {"learning_rate": float("nan")}, "learning_rate is nan"),
    (TrainingConfig, {"max_grad_norm": 0.0}, "max_grad_norm is 0.0, expected more than 0"),
    (TrainingConfig, {"batch_size": 0}, "batch_size is 0"),
    (TrainingConfig, {"num_iters_per_epoch": 0}, "num_iters_per_epoch is 0"),
    (TrainingConfig, {"max_steps": 5, "ppo_epochs": 2}, "max_steps is 5, but an iteration has ppo_epochs . num_minibatches = 2"),
    (TrainingConfig, {"seed": 1.5}, "seed is 1.5"),
    (CheckpointConfig, {"save_interval": -1}, "save_interval is -1"),
    (CheckpointConfig, {"keep_last_n": 0}, "keep_last_n is 0"),
]


@pytest.mark.parametrize(("section", "fields", "message"), REFUSED, ids=[f"{s.__name__}-{f}" for s, f, _ in REFUSED])
def test_a_value_that_is_wrong_or_has_no_effect_is_refused(section: type, fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        section(**fields)


def test_settings_that_have_an_effect_only_beside_others_are_taken_there():
    assert InferenceConfig(multi_turn=True).turns == 8
    assert InferenceConfig(multi_turn=True, max_turns=3).turns == 3
    assert InferenceConfig().turns == 1
    assert TrainingConfig(adv_estimator="reinforce_plus_plus", gamma=0.9, n_samples_per_prompt=1).gamma == 0.9
    assert TrainingConfig(adv_estimator="remax", n_samples_per_prompt=1).updates_per_iteration == 1
    assert TrainingConfig(use_kl_in_reward=True, kl_coef=0.2).kl_coef == 0.2
    assert TrainingConfig(max_steps=6, ppo_epochs=3, num_minibatches=2).updates_per_iteration == 6
