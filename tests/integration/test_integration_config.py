"""The configuration tree of a run, and what the library's parts get of it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from samples import make_row

from integration.dry_run.describe import derive_numbers
from integration.expressions.algorithm import PRESETS, learns_from_single_samples
from integration.expressions.filters import FILTERS, describe_filter, resolve_filter
from integration.settings.config import Config, create_output_dir
from integration.settings.made.library import count_rl_updates, generation_config, reward_config, rl_training_config, sft_training_config
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.data import DataSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.generation import GenerationSection, RewardSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.settings.sections.teacher import TeacherSection
from rollouts.algorithms import estimators
from rollouts.algorithms.presets import gdpo, grpo
from rollouts.config import CheckpointConfig, OptimizerConfig
from rollouts.config_files import from_dict, to_dict
from rollouts.data.filters import check_any_success
from rollouts.errors import ConfigError


def test_the_tree_goes_to_plain_values_and_back():
    config = Config(
        seed=7,
        sft=SFTSection(optimizer=OptimizerConfig(lr=3e-4, schedule="cosine")),
        generation=GenerationSection(stop=("a", "b")),
        model=ModelSection(num_layers=2),
    )
    assert from_dict(Config, to_dict(config)) == config


def test_every_section_and_field_has_a_default():
    def check(section: Any) -> None:
        assert is_dataclass(section) and type(section).__dataclass_params__.frozen, type(section)  # type: ignore[attr-defined]
        for field in fields(section):
            if is_dataclass(getattr(section, field.name)):
                check(getattr(section, field.name))

    check(Config())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config(task="srt"), "unknown task 'srt': did you mean 'sort'"),
        (lambda: Config(task="jsonl"), "give --data.path"),
        (lambda: Config(task="gsm8k", data=DataSection(path="x.jsonl")), "give --model.path"),
        (lambda: Config(seed=-1), "seed is -1"),
        (lambda: Config(num_threads=0), "num_threads is 0"),
        (lambda: Config(sft=SFTSection(num_steps=0)), "num_steps is 0"),
        (lambda: Config(sft=SFTSection(batch_size=-2)), "batch_size is -2"),
        (lambda: Config(rl=RLSection(eval_every=-1)), "eval_every is -1"),
        (lambda: Config(reward=RewardSection(timeout_s=0.0)), "timeout_s is 0.0"),
        (lambda: RLSection(num_minibatches=7), "64 x 8 = 512 rows do not divide into rl.num_minibatches = 7"),
        (lambda: RLSection(algorithm="grp"), "unknown algorithm 'grp': did you mean 'grpo'"),
        (lambda: RLSection(algorithm="rollouts.algorithms.presets:nothing"), "no function 'nothing'"),
        (lambda: RLSection(algorithm="dapo(clip_hi=0.3)"), r"dapo was given an unknown argument 'clip_hi' \(did you mean 'clip_high'\?\)"),
        (lambda: RLSection(filter="any_sucess"), "unknown filter 'any_sucess': did you mean 'any_success'"),
        (lambda: RLSection(over_sampling_factor=0.5), "over_sampling_factor is 0.5"),
        (lambda: GenerationSection(temperature=0.0), "temperature is 0.0"),
        (lambda: GenerationSection(top_p=0.0), "top_p is 0.0, expected more than 0, at most 1"),
        (lambda: GenerationSection(top_k=-1), "top_k is -1, expected at least 0"),
        (lambda: GenerationSection(min_p=1.0), "min_p is 1.0, expected at least 0, less than 1"),
        (lambda: GenerationSection(max_tokens=0), "max_tokens is 0"),
        (lambda: DataSection(max_length=-3), "max_length is -3"),
        (lambda: ModelSection(device="tpu"), "model.device is .tpu., expected cpu, cuda"),
        (lambda: ModelSection(device="cuda:x"), "model.device is .cuda:x."),
        (lambda: ModelSection(vocab_size=32000), "vocab_size is 32000, expected 4 to 100"),
        (lambda: ModelSection(vocab_size=3), "vocab_size is 3, expected 4 to 100"),
        (lambda: ModelSection(hidden_size=100, num_heads=3), "hidden_size is 100, expected a multiple of 3"),
        (lambda: ModelSection(num_heads=4, num_kv_heads=3), "num_heads is 4, expected a multiple of 3"),
        (lambda: BackendSection(kind="fdsp"), "unknown backend.kind 'fdsp': did you mean 'fsdp'"),
        (lambda: EngineSection(kind="vlm"), "'vlm', expected inprocess or vllm"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_name_and_value(make: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


SINGLES = {  # algorithms that learn from groups of one sample
    "reinforce", "remax", "reinforce_plus_plus", "ppo", "gae", "opd", "gkd",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_groups_of_one_are_refused_with_an_algorithm_that_would_learn_nothing_from_them(name: str):
    expression = f"{name}(grpo)" if "algorithm" in PRESETS[name].__annotations__ else "gdpo('right')" if name == "gdpo" else name
    teacher = TeacherSection(path="x") if name in ("opd", "gkd") else TeacherSection()
    config = Config(rl=RLSection(samples_per_prompt=1, algorithm=expression), teacher=teacher)
    if name in SINGLES:
        assert config.algorithm
    else:
        with pytest.raises(ConfigError, match=r"rl.samples_per_prompt is 1, but .* learn nothing: give at least 2, or choose .*reinforce"):
            _ = config.algorithm


def test_every_estimator_of_the_library_can_be_asked():
    found = {name: f for name, f in vars(estimators).items() if name.startswith("estimate_") and f.__module__ == estimators.__name__}
    found["estimate_gdpo"] = gdpo("right").estimate  # which must know the names of the rewards
    learning = {name for name, f in found.items() if learns_from_single_samples(replace(grpo(), estimate=f))}
    assert learning == {"estimate_greedy_baseline", "estimate_reinforce_plus_plus", "estimate_gae", "estimate_vtrace"}


def test_of_an_estimator_of_the_users_it_is_not_known_what_it_learns_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom rollouts.algorithms.presets import grpo\ndef own():\n"
        "    return replace(grpo(), estimate=lambda batch: 1 / 0)\n"
    )
    assert Config(rl=RLSection(samples_per_prompt=1, algorithm="own.py:own")).algorithm
    for algorithm in ("ppo(kl_coef=0.1)", "reinforce_plus_plus(kl_coef=0.5)", "decoupled(ppo)"):
        assert Config(rl=RLSection(samples_per_prompt=1, algorithm=algorithm)).algorithm
    for algorithm in ("grpo(kl_coef=0.5)", "recomputed(grpo(entropy_coef=0.1))"):
        with pytest.raises(ConfigError, match="would learn nothing"):
            _ = Config(rl=RLSection(samples_per_prompt=1, algorithm=algorithm)).algorithm


def test_the_loops_get_every_setting_of_their_sections():
    config = Config(
        seed=11,
        sft=SFTSection(num_steps=5, batch_size=3, log_every=2, eval_every=4, max_tokens_per_microbatch=77),
        rl=RLSection(
            num_steps=6, prompts_per_step=9, samples_per_prompt=2, num_epochs=3, num_minibatches=6, sync_every=2, log_every=5, eval_every=7
        ),
        checkpoint=CheckpointConfig(sft_every=8, rl_every=9),
        reward=RewardSection(timeout_s=1.5, on_error="drop", max_retries=4),
    )
    sft, rl, reward = sft_training_config(config), rl_training_config(config, grpo()), reward_config(config)
    assert (sft.num_steps, sft.batch_size, sft.log_every, sft.eval_every, sft.checkpoint_every, sft.seed) == (5, 3, 2, 4, 8, 11)
    assert sft.max_tokens_per_microbatch == 77
    assert (rl.num_steps, rl.num_epochs, rl.num_minibatches, rl.sync_every, rl.checkpoint_every, rl.seed) == (6, 3, 6, 2, 9, 11)
    assert (rl.log_every, rl.eval_every) == (5, 7)
    assert (reward.timeout_s, reward.on_error, reward.max_retries) == (1.5, "drop", 4)
    assert count_rl_updates(config) == 6 * 3 * 6


def test_the_response_budget_is_the_tasks_unless_the_user_sets_one():
    assert generation_config(Config(), max_tokens=8).max_tokens == 8
    config = Config(generation=GenerationSection(max_tokens=5, temperature=0.7, stop=("x",)))
    generation = generation_config(config, max_tokens=8)
    assert (generation.max_tokens, generation.temperature, generation.stop, generation.n_samples) == (5, 0.7, ("x",), 8)
    assert not generation.truncates


def test_each_filter_has_a_name():
    assert resolve_filter("none") is None
    assert {resolve_filter(name) for name in FILTERS} == set(FILTERS.values())
    assert resolve_filter("rollouts.data.filters:check_any_success") is check_any_success


def test_a_baseline_is_a_number_of_the_users():
    config = Config(rl=RLSection(baseline=0.25))
    assert rl_training_config(config, config.algorithm).baseline == 0.25
    assert derive_numbers(config, "rl")["RL advantages"] == "rewards - 0.25"
    assert Config(rl=RLSection(baseline=0.25, samples_per_prompt=1)).algorithm, "no other answers are needed to compare with"
    with pytest.raises(ConfigError, match=r"baseline is 0.5, but the algorithm's estimator, estimate_gae, does more .*--rl.baseline"):
        _ = Config(rl=RLSection(baseline=0.5, algorithm="ppo")).algorithm
    with pytest.raises(ConfigError, match="baseline is nan, expected a finite number"):
        Config(rl=RLSection(baseline=float("nan")))


def test_a_filter_takes_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = [[make_row((1, 2), reward=reward) for reward in rewards] for rewards in ((0.0, 0.25), (0.5, 0.75))]
    assert [resolve_filter("min_reward(0.5)")(group) for group in groups] == [False, True]  # type: ignore[misc]
    assert [resolve_filter("min_reward(threshold=0.1)")(group) for group in groups] == [True, True]  # type: ignore[misc]
    assert describe_filter("length(max_tokens=9)") == "length(min_tokens=1, max_tokens=9)" and describe_filter("none") == "none"
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def above(group, least):\n    return group[0].reward > least\n")
    assert [resolve_filter("own.py:above(least=0.3)")(group) for group in groups] == [False, True]  # type: ignore[misc]
    assert derive_numbers(Config(rl=RLSection(filter="diversity(0.25)")), "rl")["RL filter"] == "diversity(min_unique_ratio=0.25)"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("min_reward('x')", "found 'x' at column 12 .* as 'threshold' of min_reward, expected a number"),
        ("min_reward(tresh=1)", r"unknown argument 'tresh' .*It takes threshold=0.0"),
        ("min_reward(0.5, 0.6)", "one argument too many"),
        ("diversity(2.0)", r"rl.filter diversity\(2.0\): min_unique_ratio is 2.0, expected in \[0, 1\]"),
        ("length(5, 3)", "min_tokens is 5, more than max_tokens 3"),
        ("own.py:above", "own.py:above needs the argument 'least'"),
        ("min_rewards(0.5)", "unknown filter 'min_rewards': did you mean 'min_reward'"),
        ("", "the filter is '', expected an expression such as min_reward"),
    ],
)
def test_what_is_wrong_with_a_filter_is_found_at_the_start(expression: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def above(group, least):\n    return True\n")
    with pytest.raises(ConfigError, match=message):
        RLSection(filter=expression)


def test_run_directories_are_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, second = (create_output_dir(Config(), "20250102-030405") for _ in range(2))
    assert (str(first), str(second)) == ("runs/20250102-030405-sort", "runs/20250102-030405-sort-2")
    assert first.is_dir() and second.is_dir()
    assert create_output_dir(Config(output_dir="mine"), "20250102-030405") == Path("mine")
