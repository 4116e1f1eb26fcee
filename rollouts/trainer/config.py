"""ConfigStore: the settings of the facade in sections, each with defaults and each optional.

    config = ConfigStore(
        model=ModelConfig(local_path="path/to/model"),
        training=TrainingConfig(adv_estimator="grpo", n_samples_per_prompt=8),
    )
    config = replace(config, checkpoint=CheckpointConfig(output_dir="checkpoints"))     # dataclasses.replace: configurations are frozen

A setting that has no effect beside the others is refused, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from rollouts.config import check_choice, check_count, check_flags, check_not_negative, check_positive, check_seed, check_setting
from rollouts.config_files import is_number
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
EngineName = Literal["local", "vllm", "sglang"]
Estimator = Literal[
    "gae",
    "grpo",
    "grpo_passk",
    "dr_grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "remax",
    "opo",
    "gpg",
]
DEFAULT_TURNS = 8


def default_of(config: object, name: str) -> Any:
    """Return the default of a field."""
    return next(field.default for field in fields(config) if field.name == name)  # pyright: ignore[reportArgumentType]


def check_effect(config: object, name: str, has_effect: bool, reason: str) -> None:
    """Raise ConfigError for a field that was set although it has no effect."""
    value = getattr(config, name)
    if not has_effect and value != default_of(config, name):
        raise ConfigError(f"{type(config).__name__}.{name} is {value!r}, which has no effect: {reason}")


def _check_share(config: object, name: str) -> None:
    value = getattr(config, name)
    check_setting(is_number(value) and 0 <= value <= 1, f"{type(config).__name__}.{name}", value, "a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model of policy, engine, critic and reference."""

    model_name: str = ""  # model directory, or a name on the Hugging Face hub, for example "Qwen/Qwen3-0.6B"
    dtype: Dtype = "float32"  # dtype of matrix products in training and of the engine's weights; trained weights are float32
    device: str = "auto"  # cpu, cuda, cuda:N, mps; auto = cuda where torch sees a GPU, else cpu
    tensor_parallel_size: int = 1  # GPUs of a launched server that share the model
    local_path: str | None = None  # model directory, which wins over model_name; None = model_name
    trust_remote_code: bool = False  # run the Python files of the model; only for one that you trust

    def __post_init__(self) -> None:
        check_choice(self, "dtype", get_args(Dtype))
        check_positive(self, "tensor_parallel_size")
        check_flags(self, "trust_remote_code")
        if self.device == "cpu" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"ModelConfig.tensor_parallel_size is {self.tensor_parallel_size}, but ModelConfig.device is 'cpu': tensor parallelism is "
                "over GPUs, so use 1, or device 'cuda'"
            )


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Engine, and the sampling of responses."""

    backend: EngineName = "local"  # local = the embedded engine in this process; or a server, launched here unless url is given
    max_tokens: int = 256  # most tokens of a response, or of each action of an episode
    temperature: float = 1.0  # 0 = greedy, which is for generation only
    top_p: float = 1.0  # 1 = off; below 1 the trainer computes the log-probs of responses itself
    multi_turn: bool = False  # play episodes of several turns, in an environment
    max_turns: int | None = None  # most actions of an episode, with multi_turn; None = 8
    system_prompt: str | None = None  # system message of a conversation or episode without one; None = none
    max_model_len: int | None = None  # most tokens of prompt and response together; None = the model's context
    url: str | None = None  # address of a running server; None = launch one, and stop it at the end
    python: str | None = None  # Python interpreter with the server package; None = the one that runs this
    log_path: str | None = None  # file for the output of a launched server; None = <backend>.log in the current directory

    def __post_init__(self) -> None:
        check_choice(self, "backend", get_args(EngineName))
        check_positive(self, "max_tokens")
        check_not_negative(self, "temperature")
        check_setting(is_number(self.top_p) and 0 < self.top_p <= 1, "InferenceConfig.top_p", self.top_p, "more than 0, at most 1")
        check_flags(self, "multi_turn")
        for name in ("max_turns", "max_model_len"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        check_effect(self, "max_turns", self.multi_turn, "set multi_turn to True for episodes of several turns")
        is_server = self.backend != "local"
        check_effect(self, "url", is_server, "the embedded engine is not a server, so use backend 'vllm' or 'sglang'")
        for name in ("python", "log_path"):
            check_effect(self, name, is_server and self.url is None, "no server is launched with these backend and url")

    @property
    def turns(self) -> int:
        """Most actions of an episode."""
        return (self.max_turns or DEFAULT_TURNS) if self.multi_turn else 1


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Advantages, loss, optimizer and length of training. One iteration is one rollout batch."""

    learning_rate: float = 1e-6  # AdamW, constant; fits full weights of pretrained models
    gamma: float = 1.0  # discount in [0, 1], for gae and reinforce_plus_plus
    lam: float = 0.95  # lambda of GAE in [0, 1], for gae
    clip_ratio: float = 0.2  # width of PPO's clip, in [0, 1)
    num_epochs: int = 1  # default of fit(): epochs
    batch_size: int = 8  # prompts per iteration
    adv_estimator: Estimator = "gae"  # advantages; gae trains a critic beside the policy
    use_kl_in_reward: bool = False  # subtract kl_coef * KL(policy || reference) from the rewards; loads a reference model
    kl_coef: float = 0.001  # coefficient of that penalty
    kl_loss_coef: float = 0.0  # coefficient of a KL term (k3) in the loss; more than 0 loads a reference model
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    n_samples_per_prompt: int = 4  # responses, or episodes, to each prompt: a group
    num_iters_per_epoch: int | None = None  # default of fit(): iterations in an epoch; None = once through the dataset
    max_steps: int | None = None  # most optimizer steps of the policy in all; None = no bound
    ppo_epochs: int = 1  # passes over each rollout batch
    num_minibatches: int = 1  # optimizer steps in each pass
    max_tokens_per_microbatch: int = 16384  # real tokens in one backward pass; gradients are accumulated over a step, so that the result
    # does not depend on this
    critic_learning_rate: float = 1e-5  # learning rate of the critic, with gae
    weight_decay: float = 0.0  # decay of matrices
    max_grad_norm: float = 1.0  # larger gradients are scaled down to this norm
    seed: int = 0  # seed of sampling, of the order of prompts and rows, of environments, and of the critic's head

    def __post_init__(self) -> None:
        check_choice(self, "adv_estimator", get_args(Estimator))
        counts = ("num_epochs", "batch_size", "n_samples_per_prompt", "ppo_epochs", "num_minibatches", "max_tokens_per_microbatch")
        check_positive(self, *counts)
        for name in ("num_iters_per_epoch", "max_steps"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        check_not_negative(self, "learning_rate", "critic_learning_rate", "kl_coef", "kl_loss_coef", "entropy_coef", "weight_decay")
        check_setting(
            is_number(self.max_grad_norm) and self.max_grad_norm > 0, "TrainingConfig.max_grad_norm", self.max_grad_norm, "more than 0"
        )
        _check_share(self, "gamma")
        _check_share(self, "lam")
        clip = self.clip_ratio
        check_setting(is_number(clip) and math.isfinite(clip) and 0 <= clip < 1, "TrainingConfig.clip_ratio", clip, "a number in [0, 1)")
        check_flags(self, "use_kl_in_reward")
        check_seed(self)
        name = f"with adv_estimator {self.adv_estimator!r}"
        check_effect(self, "gamma", self.adv_estimator in ("gae", "reinforce_plus_plus"), f"{name} rewards are not discounted")
        check_effect(self, "lam", self.adv_estimator == "gae", f"{name} there are no temporal differences")
        check_effect(self, "critic_learning_rate", self.adv_estimator == "gae", f"{name} there is no critic")
        check_effect(self, "kl_coef", self.use_kl_in_reward, "set use_kl_in_reward to True, or use kl_loss_coef for a term in the loss")
        self._check_group()
        if self.max_steps is not None and self.max_steps % self.updates_per_iteration:
            raise ConfigError(
                f"TrainingConfig.max_steps is {self.max_steps}, but an iteration has ppo_epochs * num_minibatches = "
                f"{self.updates_per_iteration} optimizer steps: give a multiple of it"
            )

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer steps of the policy on one rollout batch."""
        return self.ppo_epochs * self.num_minibatches

    def _check_group(self) -> None:
        compares = self.adv_estimator not in ("gae", "reinforce_plus_plus", "remax")
        if compares and self.n_samples_per_prompt < 2:
            raise ConfigError(
                f"TrainingConfig.n_samples_per_prompt is 1, but adv_estimator {self.adv_estimator!r} compares the responses to a prompt "
                "with each other: use at least 2, or the estimator 'gae' or 'reinforce_plus_plus'"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of PPOTrainer.fit."""

    output_dir: str | None = None  # directory of step_NNNN folders; None = fit writes none
    save_interval: int = 1  # epochs of fit between two checkpoints; 0 = only after the last
    keep_last_n: int = 2  # older ones are deleted once a new one is complete

    def __post_init__(self) -> None:
        check_count(self, "save_interval")
        check_positive(self, "keep_last_n")


@dataclass(frozen=True, kw_only=True)
class ConfigStore:
    """All settings of the facade in sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # argument of the environment's reset; a subclass keeps its
    # own fields. The seed of each prompt's episodes replaces its seed, the prompt's metadata is added to its parameters

    def __post_init__(self) -> None:
        kinds = {
            "model": ModelConfig,
            "inference": InferenceConfig,
            "training": TrainingConfig,
            "checkpoint": CheckpointConfig,
            "environment": EnvironmentConfig,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            check_setting(isinstance(value, kind), f"ConfigStore.{name}", value, f"a {kind.__name__}")
