"""The report of a dry run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.dry_run import sizes
from integration.dry_run.describe import derive_numbers, describe_run, describe_run_as_json
from integration.dry_run.sizes import read_sizes
from integration.dry_run.text import format_bytes
from integration.parts.model_settings import read_model_config
from integration.parts.models import create_model
from integration.run.stages import create_task
from integration.settings.config import Config
from integration.settings.made.budgets import response_tokens
from integration.settings.option_effects import IdleOption, describe_doubts
from integration.settings.sections.data import DataSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.generation import GenerationSection
from integration.settings.sections.model import CriticSection, LoRASection, ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.config_files import from_dict
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model


def test_the_text_begins_with_the_consequences_and_ends_with_the_settings_that_were_changed():
    config = Config(seed=3, rl=RLSection(num_steps=5), loggers=("jsonl('a b.jsonl')",))
    first, *lines = describe_run(config, "sft+rl").splitlines()
    assert first == "mode sft+rl: nothing was run; it would be"
    cut = next(i for i, line in enumerate(lines) if line.startswith("settings other than the defaults"))
    assert any("RL samples" in line and "2,560" in line for line in lines[:cut])
    assert lines[cut + 1 :] == ["""  --seed 3 --loggers 'jsonl('"'"'a b.jsonl'"'"')'""", "  --rl.num-steps 5"]
    assert describe_run(Config(), "sft").endswith("\n  none")


def test_json_holds_every_setting_and_the_numbers_behind_them():
    config = Config(seed=3, rl=RLSection(num_steps=5))
    told = json.loads(describe_run_as_json(config, "sft+rl", [IdleOption(name="rl.num_steps", value=5, needs="RL")]))
    assert from_dict(Config, told["settings"]) == config
    assert told["derived"] == derive_numbers(config, "sft+rl")
    assert (told["mode"], told["options_without_effect"]) == ("sft+rl", ["--rl.num-steps"])


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (OptimizerConfig(lr=1e-6), "1e-06, constant"),
        (OptimizerConfig(lr=2e-3, warmup_steps=20, schedule="linear"), "0.002, after 20 steps of warm-up, linear to 0"),
        (OptimizerConfig(lr=1e-5, schedule="cosine", min_lr_ratio=0.1), "1e-05, cosine to 1e-06"),
    ],
)
def test_the_course_of_the_learning_rate_is_told(optimizer: OptimizerConfig, told: str):
    config = Config(sft=SFTSection(optimizer=optimizer), rl=RLSection(optimizer=optimizer))
    facts = derive_numbers(config, "sft+rl")
    assert (facts["SFT learning rate"], facts["RL learning rate"]) == (told, told)


def test_counts_follow_from_the_settings():
    rl = RLSection(num_steps=6, prompts_per_step=10, samples_per_prompt=4, num_epochs=3, num_minibatches=5, sync_every=2)
    facts = derive_numbers(Config(sft=SFTSection(num_steps=7, batch_size=11), rl=rl), "sft+rl")
    assert facts["SFT optimizer steps"] == "7"
    assert facts["SFT rows"] == "77"
    assert facts["SFT tokens"] == "about 924"
    assert facts["RL samples per step"] == "40 (10 prompts x 4)"
    assert facts["RL optimizer steps per step"] == "15 of 8 rows"
    assert facts["RL optimizer steps"] == "90"
    assert facts["RL samples"] == "240"
    assert facts["RL weight syncs"] == "3"


def own_model(directory: Path) -> ModelSection:
    create_tiny_model(vocab_size=99).save_pretrained(directory / "model")
    create_char_tokenizer(99).save_pretrained(str(directory / "model"))
    return ModelSection(path=str(directory / "model"))


def test_passes_over_rows_are_counted_where_that_is_cheap(tmp_path: Path):
    rows, sft = tmp_path / "rows.jsonl", SFTSection(num_steps=7, batch_size=11)
    rows.write_text('{"prompt": "a", "completion": "b"}\n\n' * 20)
    facts = derive_numbers(Config(task="jsonl", model=own_model(tmp_path), sft=sft, data=DataSection(path=str(rows))), "sft")
    assert facts["SFT rows"] == "77, about 3.9 passes over the 20 rows of rows.jsonl"
    assert (
        derive_numbers(
            Config(task="jsonl", model=own_model(tmp_path), sft=sft, data=DataSection(path=str(tmp_path / "none.jsonl"))), "sft"
        )["SFT rows"]
        == "77"
    )


def test_settings_that_are_seldom_meant_are_told_first(tmp_path: Path):
    data = DataSection(path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "." / "sub" / ".." / "rows.jsonl"))
    config = Config(task="jsonl", model=own_model(tmp_path), data=data, rl=RLSection(optimizer=OptimizerConfig(lr=0.0)))
    assert describe_doubts(config, "sft").keys() == {"warning of rows"}
    lines = describe_run(config, "rl").splitlines()
    assert "--rl.optimizer.lr is 0, so that no step changes the weights" in lines[1]
    assert "the model is evaluated on its own training rows" in lines[2]
    assert not describe_doubts(replace(config, rl=RLSection(), data=replace(data, eval_path=str(tmp_path / "other.jsonl"))), "rl")


def test_the_algorithm_is_shown_with_every_argument():
    config = Config(rl=RLSection(algorithm="dr_grpo(clip_low=0.1)"), generation=GenerationSection(max_tokens=36))
    assert derive_numbers(config, "rl")["RL algorithm"] == "dr_grpo(max_tokens=36, clip_low=0.1, clip_high=0.2)"
    config = Config(task="sort-long", rl=RLSection(algorithm="dr_grpo"))
    assert derive_numbers(config, "rl")["RL algorithm"].startswith("dr_grpo(max_tokens=10, ")


COUNTED = """
import pathlib
from rollouts.algorithms.presets import dr_grpo
from rollouts.types import Algorithm

def own(max_tokens: int) -> Algorithm:
    with pathlib.Path("calls").open("a") as file:
        file.write(f"{max_tokens} ")
    return dr_grpo(max_tokens)
"""


@pytest.mark.parametrize(("mode", "calls"), [("rl", "8 "), ("sft+rl", "8 "), ("sft", "")])
def test_an_algorithm_of_the_users_is_made_once_with_the_real_budget_and_only_for_rl(
    mode: str, calls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(COUNTED)
    (tmp_path / "calls").touch()
    assert main(["--mode", mode, "--rl.algorithm", "decoupled(own.py:own)", "--dry-run"]) == 0
    assert (tmp_path / "calls").read_text() == calls
    assert ("RL algorithm" in capsys.readouterr().out) == (mode != "sft")


def test_an_algorithm_that_cannot_be_made_does_not_matter_to_sft(capsys: pytest.CaptureFixture[str]):
    assert main(["--mode", "sft", "--rl.algorithm", "dapo(clip_low=3)", "--dry-run"]) == 0
    assert main(["--mode", "rl", "--rl.algorithm", "dapo(clip_low=3)", "--dry-run"]) == 2
    assert "clip_low is 3.0, expected in [0, 1)" in capsys.readouterr().err


def test_the_models_beside_the_policy_are_named_and_count_in_memory():
    plain = derive_numbers(Config(), "rl")
    assert not {"RL reference model", "RL critic", "RL greedy samples per step", "memory: reference weights"} & set(plain)
    config = Config(rl=RLSection(algorithm="ppo(kl_coef=0.1)"), critic=CriticSection(warmup_steps=2))
    facts = derive_numbers(config, "rl")
    assert facts["RL reference model"] == "the policy as RL begins"
    assert facts["RL critic"] == "the policy as RL begins, with a new value head; 24 optimizer steps, 2 RL steps of them alone"
    assert facts["RL optimizer steps"] == "20"
    num_parameters = int(facts["parameters"].replace(",", ""))
    assert facts["memory: reference weights"] == format_bytes(4 * num_parameters)
    assert facts["memory: critic's training state"] == format_bytes(16 * num_parameters)
    assert "memory: critic's training state" not in derive_numbers(config, "sft")
    assert derive_numbers(Config(rl=RLSection(algorithm="remax")), "rl")["RL greedy samples per step"] == "64, not trained on"


@pytest.mark.parametrize("task", ["sort", "sort-long"])
def test_the_token_budget_of_a_task_is_known_beforehand(task: str):
    _, tokenizer = create_model(Config())
    assert create_task(Config(task=task), tokenizer).max_tokens == response_tokens(Config(task=task))


def test_a_mode_shows_its_own_stages():
    assert not any(name.startswith("RL") for name in derive_numbers(Config(), "sft"))
    assert not any(name.startswith("SFT") for name in derive_numbers(Config(), "rl"))


def test_parameters_are_counted_as_the_built_model_has_them():
    config = Config(model=ModelSection(hidden_size=32, intermediate_size=64, num_layers=2))
    model, _ = create_model(config)
    assert read_sizes(read_model_config(config)).num_parameters == sum(p.numel() for p in model.parameters())


def test_memory_is_that_of_weights_gradients_moments_engine_and_cache():
    model = ModelSection(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
    config = Config(model=model, engine=EngineSection(max_slots=16), generation=GenerationSection(max_tokens=36))
    facts = derive_numbers(config, "rl")
    num_parameters = int(facts["parameters"].replace(",", ""))
    assert facts["memory: training state"] == format_bytes(16 * num_parameters)
    assert facts["memory: engine weights"] == format_bytes(4 * num_parameters)
    keys_and_values = 2 * 4 * 2 * 2 * 8 * (64 + 36) * 16  # both, float32, layers, heads, width, tokens, slots
    assert facts["memory: keys and values"] == format_bytes(keys_and_values)


def test_bytes_have_a_unit_that_people_read():
    assert [format_bytes(size) for size in (0, 1023, 1536, 5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.5 KiB", "5 MiB", "3 GiB", "2 TiB",
    ]  # fmt: skip


def test_adapters_are_counted_and_a_rank_that_is_too_high_is_told_beforehand():
    assert "trained in adapters" not in derive_numbers(Config(), "rl")
    facts = derive_numbers(Config(lora=LoRASection(rank=8, target_modules=("q_proj",))), "sft")
    assert facts["trained in adapters"] == f"{4 * 8 * (128 + 128):,}" and "warning" not in facts
    assert "the rank of the adapters is 200" in derive_numbers(Config(lora=LoRASection(rank=200)), "sft")["warning"]


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path):
    config = Config(task="jsonl", model=ModelSection(path=str(tmp_path)), data=DataSection(path="own.jsonl"))
    with pytest.raises(ConfigError, match=r"is not a model directory: it has no config\.json"):
        describe_run(config, "sft")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigError, match="is not of a causal language model"):
        describe_run(config, "sft")
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ConfigError, match="has no readable model configuration"):
        describe_run(config, "sft")


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("qwen3", {"head_dim": 12}),
        ("qwen3", {"head_dim": 8, "attention_bias": True}),
        ("qwen2", {}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    ],
)
def test_sizes_by_formula_are_those_of_the_module(family: str, extra: dict[str, Any], is_tied: bool):
    from transformers import AutoConfig

    shape = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **shape, num_key_value_heads=2, tie_word_embeddings=is_tied, **extra)
    computed = sizes.compute_sizes(config)
    assert computed is not None and computed == sizes.measure_sizes(config)


def test_sizes_of_other_families_are_measured():
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "mistral", vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4
    )
    assert sizes.compute_sizes(config) is None
    assert sizes.read_sizes(config) == sizes.measure_sizes(config)
