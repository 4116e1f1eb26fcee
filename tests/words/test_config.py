"""Configurations: defaults are valid, wrong values are named, files round-trip, misspelt keys are refused with a suggestion."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.algorithms.presets import dapo
from rollouts.config import (
    CheckpointConfig,
    GenerationConfig,
    OptimizerConfig,
    RewardConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts.config_files import from_dict, load_config, save_config, to_dict
from rollouts.errors import ConfigError

CONFIGS = [SFTTrainingConfig(), RLTrainingConfig(), RewardConfig(), RolloutConfig(batch_size=1), GenerationConfig(), OptimizerConfig(),
           CheckpointConfig()]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: Path | None = None
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, float] = (1, 2.0)
    rows: tuple[tuple[int, ...], ...] = ()
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree as an application has one."""

    name: str
    inner: Inner = field(default_factory=Inner)
    several: tuple[Inner, ...] = ()
    rl: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    sft: SFTTrainingConfig = field(default_factory=SFTTrainingConfig)
    flag: bool = False
    limit: float | str = 1.0


def reward_one(sample: Any) -> float:
    return 1.0


def generate(prompt: Any, n: int) -> Any:
    return ()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_configs_are_frozen_and_replaceable(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(config, name, 3)
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_defaults_round_trip_through_a_file(config, tmp_path):
    save_config(config, tmp_path / "run" / "config.json")
    assert load_config(type(config), tmp_path / "run" / "config.json") == config
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]


BAD_VALUES = [
    (SFTTrainingConfig, {"num_steps": 0}, "SFTTrainingConfig.num_steps is 0"),
    (SFTTrainingConfig, {"batch_size": -1}, "SFTTrainingConfig.batch_size is -1"),
    (SFTTrainingConfig, {"batch_size": 2.5}, "SFTTrainingConfig.batch_size is 2.5, expected a whole number"),
    (SFTTrainingConfig, {"num_steps": True}, "SFTTrainingConfig.num_steps is True"),
    (SFTTrainingConfig, {"log_every": 0}, "log_every"),
    (SFTTrainingConfig, {"checkpoint_every": -1}, "checkpoint_every"),
    (SFTTrainingConfig, {"eval_every": 0.5}, "eval_every"),
    (SFTTrainingConfig, {"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch"),
    (SFTTrainingConfig, {"dropout": "False"}, "dropout is 'False'"),
    (RLTrainingConfig, {"dropout": "False"}, "dropout is 'False'"),
    (RLTrainingConfig, {"num_steps": 0}, "num_steps"),
    (RLTrainingConfig, {"sync_every": 0}, "sync_every"),
    (RLTrainingConfig, {"num_epochs": 0}, "num_epochs"),
    (RLTrainingConfig, {"num_minibatches": 0}, "num_minibatches"),
    (RLTrainingConfig, {"log_every": 0}, "log_every"),
    (RLTrainingConfig, {"checkpoint_every": -2}, "checkpoint_every"),
    (RLTrainingConfig, {"weight_sync": "memry"}, "did you mean 'memory'"),
    (RLTrainingConfig, {"baseline": math.nan}, "baseline is nan"),
    (RewardConfig, {"timeout_s": 0}, "timeout_s is 0"),
    (RewardConfig, {"timeout_s": math.nan}, "timeout_s is nan"),
    (RewardConfig, {"on_error": "ignore"}, "on_error is 'ignore'"),
    (RewardConfig, {"max_retries": -1}, "max_retries"),
    (RolloutConfig, {"batch_size": 0}, "batch_size is 0"),
    (RolloutConfig, {"batch_size": 1, "n_samples_per_prompt": 0}, "n_samples_per_prompt"),
    (RolloutConfig, {"batch_size": 1, "over_sampling_factor": 0.99}, "over_sampling_factor is 0.99"),
    (RolloutConfig, {"batch_size": 1, "over_sampling_factor": math.inf}, "over_sampling_factor is inf"),
    (RolloutConfig, {"batch_size": 1, "max_filter_attempts": 0}, "max_filter_attempts"),
    (RolloutConfig, {"batch_size": 1, "grace_s": -1}, "grace_s"),
    (RolloutConfig, {"batch_size": 1, "reward_fn": "my_reward"}, "reward_fn is 'my_reward', expected a function"),
    (GenerationConfig, {"n_samples": 0}, "n_samples"),
    (GenerationConfig, {"max_tokens": 0}, "max_tokens"),
    (GenerationConfig, {"temperature": -0.1}, "temperature"),
    (GenerationConfig, {"temperature": "hot"}, "temperature is 'hot'"),
    (GenerationConfig, {"temperature": 1e-8}, "temperature is 1e-08, expected 0 for greedy, or at least 1e-06"),
    (GenerationConfig, {"top_p": 0}, "top_p"),
    (GenerationConfig, {"top_p": 1.1}, "top_p"),
    (GenerationConfig, {"top_k": -1}, "top_k"),
    (GenerationConfig, {"min_p": 1.5}, "min_p"),
    (OptimizerConfig, {"lr": math.nan}, "lr is nan"),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, "betas"),
    (OptimizerConfig, {"betas": (0.9,)}, "betas"),
    (OptimizerConfig, {"max_grad_norm": 0}, "max_grad_norm"),
    (OptimizerConfig, {"warmup_steps": -1}, "warmup_steps"),
    (OptimizerConfig, {"schedule": "cosin"}, "did you mean 'cosine'"),
    (OptimizerConfig, {"min_lr_ratio": 1.5}, "min_lr_ratio"),
    (CheckpointConfig, {"keep_last_n": 0}, "keep_last_n"),
    (CheckpointConfig, {"rl_every": -1}, "rl_every"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "values", "message"), BAD_VALUES)
def test_values_out_of_range_are_named(cls, values, message):
    with pytest.raises(ConfigError, match=message):
        cls(**values)


def test_generation_config_derives_and_gives_sampling_params():
    config = GenerationConfig(n_samples=4, temperature=0.7, top_k=5, min_p=0.1, stop=("\n",), stop_token_ids=(3,), enable_thinking=False)
    greedy = config.new(greedy=True)
    assert (config.greedy, greedy.greedy, greedy.n_samples, greedy.enable_thinking) == (False, True, 4, False)
    params = config.sampling_params(seed=3)
    assert params.min_p == 0.1
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids, params.seed) == (0.7, 5, ("\n",), (3,), 3)
    assert greedy.sampling_params().greedy
    assert greedy.sampling_params().temperature == 0.0


@pytest.mark.parametrize(
    ("changes", "truncates"),
    [
        ({}, 0), ({"top_p": 0.9}, 1), ({"top_k": 3}, 1), ({"min_p": 0.1}, 1),
        ({"top_k": 3, "greedy": True}, 0), ({"top_p": 0.5, "temperature": 0}, 0),
    ],
)  # fmt: skip
def test_generation_config_says_whether_it_truncates(changes, truncates):
    assert GenerationConfig(**changes).truncates == truncates


def test_functions_are_left_out_and_demanded_again():
    config = RolloutConfig(batch_size=2, generate_fn=generate, reward_fn=reward_one, reward=RewardConfig(on_error="drop"))
    data = to_dict(config)
    assert not {"generate_fn", "reward_fn", "filter_fn"} & set(data)
    assert data["functions"] == ["generate_fn", "reward_fn"]
    data = json.loads(json.dumps(data))
    assert from_dict(RolloutConfig, data, generate_fn=generate, reward_fn=reward_one) == config
    with pytest.raises(ConfigError, match=r"reward_fn was set when this was saved, but is a function, which is not saved: pass it again"):
        from_dict(RolloutConfig, data, generate_fn=generate)
    with pytest.raises(ConfigError, match=r"unknown function 'reward': did you mean 'reward_fn'"):
        from_dict(RolloutConfig, data, generate_fn=generate, reward=reward_one)
    with pytest.raises(ConfigError, match=r"reward_fn is a function, which a file cannot hold"):
        from_dict(RolloutConfig, {"batch_size": 2, "reward_fn": "x.y"})


@pytest.mark.parametrize("keep_section", [True, False])
def test_functions_of_inner_sections_have_dotted_names(keep_section):
    tree = Tree(name="t", rl=RLTrainingConfig(algorithm=dapo()))
    data = to_dict(tree)
    assert "algorithm" not in data["rl"]
    with pytest.raises(ConfigError, match=r"rl\.algorithm was set when this was saved"):
        from_dict(Tree, data)
    if not keep_section:
        del data["rl"]
    assert from_dict(Tree, data, **{"rl.algorithm": tree.rl.algorithm}) == tree
    with pytest.raises(ConfigError, match=r"unknown function 'rl\.algoritm': did you mean 'algorithm'"):
        from_dict(Tree, data, **{"rl.algoritm": None})
    with pytest.raises(ConfigError, match=r"unknown function 'lr\.algorithm'"):
        from_dict(Tree, data, **{"lr.algorithm": None})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "t", "sftt": {}}, r"unknown setting 'sftt': did you mean 'sft'\?"),
        ({"name": "t", "sft": {"num_step": 3}}, r"unknown setting 'sft\.num_step': did you mean 'num_steps'\?"),
        ({"name": "t", "zzz": 1}, r"unknown setting 'zzz': known are flag, inner"),
        ({"name": "t", "sft": {"num_steps": "many"}}, r"sft\.num_steps is 'many', expected a whole number"),
        ({"name": "t", "sft": {"num_steps": 1.5}}, r"sft\.num_steps is 1.5, expected a whole number"),
        ({"name": "t", "sft": {"num_steps": True}}, r"sft\.num_steps is True, expected a whole number"),
        ({"name": "t", "sft": {"num_steps": 0}}, r"num_steps is 0"),
        ({"name": "t", "sft": 3}, r"sft is 3, expected a section with settings such as "),
        ({"name": "t", "flag": 1}, r"flag is 1, expected true or false"),
        ({"name": "t", "inner": {"mode": "c"}}, r"inner\.mode is 'c': known are a, b"),
        ({"name": "t", "inner": {"pair": [1]}}, r"inner\.pair has 1 entries, expected 2"),
        ({"name": "t", "inner": {"pair": [1, "x"]}}, r"inner\.pair\[1\] is 'x', expected a number"),
        ({"name": "t", "inner": {"pair": 4}}, r"inner\.pair is 4, expected a list"),
        ({"name": "t", "inner": {"rows": [[1], [None]]}}, r"inner\.rows\[1\]\[0\] is None, expected a whole number"),
        ({"name": "t", "inner": {"path": 4}}, r"inner\.path is 4, expected a path"),
        ({"name": "t", "inner": {"extra": {"k": [0.5]}}}, r"inner\.extra\.k\[0\] is 0.5, expected a whole number"),
        ({"name": "t", "inner": {"extra": []}}, r"inner\.extra is \[\], expected"),
        ({"name": "t", "several": [{}, {"mood": 1}]}, r"unknown setting 'several\[1\]\.mood': did you mean 'mode'\?"),
        ({"name": None}, r"name is None, expected a text"),
        ({}, r"name is missing: Tree has no default for it"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_by_dotted_name(data, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(Tree, data)


numbers = st.integers(-(2**53), 2**53)
inners = st.builds(
    Inner,
    path=st.none() | st.sampled_from([Path("a/b"), Path("c")]),
    mode=st.sampled_from(["a", "b"]),
    pair=st.tuples(numbers, st.floats(allow_nan=False)),
    rows=st.lists(st.lists(numbers, max_size=2).map(tuple), max_size=2).map(tuple),
    extra=st.dictionaries(st.text(max_size=3), st.lists(numbers, max_size=2).map(tuple), max_size=2),
)


@given(st.builds(
    Tree, name=st.text(), inner=inners, several=st.lists(inners, max_size=2).map(tuple), flag=st.booleans(),
    rl=st.builds(RLTrainingConfig, num_steps=st.integers(1, 9), baseline=st.none() | st.floats(-9, 9)),
    limit=st.floats(allow_nan=False) | st.just("none"),
))  # fmt: skip
def test_any_tree_round_trips_through_strict_json(tree):
    data = json.loads(json.dumps(to_dict(tree), allow_nan=False))
    before = json.dumps(data)
    assert from_dict(Tree, data) == tree
    assert json.dumps(data) == before, "from_dict changed its argument"


def test_missing_keys_take_their_defaults_and_whole_numbers_are_floats():
    tree = from_dict(Tree, {"name": "t", "sft": {"num_steps": 3}, "limit": 2})
    assert tree.sft == SFTTrainingConfig(num_steps=3)
    assert (tree.limit, type(tree.limit)) == (2.0, float)


def test_no_clipping_survives_a_file(tmp_path):
    save_config(OptimizerConfig(max_grad_norm=math.inf), tmp_path / "c.json")
    assert '"Infinity"' in (tmp_path / "c.json").read_text()
    assert load_config(OptimizerConfig, tmp_path / "c.json").max_grad_norm == math.inf


def test_values_that_files_cannot_hold_are_named():
    with pytest.raises(ConfigError, match=r"inner\.extra\.k is a object, which a configuration file cannot hold"):
        to_dict(Tree(name="t", inner=Inner(extra={"k": object()})))  # type: ignore[dict-item]


@pytest.mark.parametrize(("text", "message"), [("{", "cannot read the configuration"), ("[1]", "holds a list"), (None, "cannot read")])
def test_unreadable_files_are_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(SFTTrainingConfig, path)
    assert str(path) in str(caught.value)
