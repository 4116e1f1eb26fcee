"""The library's configurations, made from the settings of a run."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from integration.settings.checks import check_algorithm_settings
from integration.settings.made.budgets import CONTEXT_TOKENS, response_tokens
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import KLControlSection
from rollouts.config import (
    GenerationConfig,
    PreferenceTrainingConfig,
    RewardConfig,
    RLTrainingConfig,
    SFTTrainingConfig,
)
from rollouts.errors import ConfigError
from rollouts.rewards.answers import create_overlong_penalty
from rollouts.types import Algorithm, KLControl

if TYPE_CHECKING:
    from integration.settings.config import Config


def create_rl_algorithm(config: Config, max_tokens: int) -> Algorithm:
    """Create the algorithm of a configuration under a token budget and check its settings. Calls the user's functions, if any."""
    from integration.expressions.algorithm import create_algorithm

    algorithm = create_algorithm(config.algorithm_call, max_tokens)
    training = rl_training_config(config, algorithm, max_tokens)
    if config.rl.baseline is None:
        check_algorithm_settings(config, algorithm)
    else:
        from rollouts.training.rl_run import resolve_algorithm  # the import takes a second

        check_algorithm_settings(config, resolve_algorithm(training))
    return algorithm


def count_greedy_samples(algorithm: Algorithm) -> int:
    """Return the number of greedy samples per group that an algorithm uses as a baseline only: 1 for ReMax."""
    return int("greedy_rows" in algorithm.requires)


def create_kl_control(config: Config, algorithm: Algorithm) -> KLControl | None:
    """Create the controller of the algorithm's KL term; None if rl.kl_control has only defaults.

    A controller sets the coefficient of every KL term. It starts at the user's coefficient or, without one, at the algorithm's.
    """
    section, name = config.rl.kl_control, config.rl.algorithm
    if section == KLControlSection():
        return None
    if "ref_log_probs" not in algorithm.requires or algorithm.compares_pairs:
        raise ConfigError(f"rl.kl_control is set, but rl.algorithm {name!r} has no KL term: give it a kl_coef, such as ppo(kl_coef=0.05)")
    from integration.expressions.algorithm import find_kl_coefs

    places = find_kl_coefs(algorithm)
    found = sorted({coefficient for coefficients in places.values() for coefficient in coefficients})
    if len(found) > 1:
        terms = " and ".join(f"{coefficient:g} {place}" for place, coefficients in places.items() for coefficient in coefficients)
        raise ConfigError(
            f"rl.kl_control is set, but rl.algorithm {name!r} has KL terms with different coefficients ({terms}), and a controller would "
            "set all of them to one number: leave out rl.kl_control, or one of the terms"
        )
    if section.kl_coef is None and not found:
        raise ConfigError(f"rl.algorithm {name!r} does not state its kl_coef: give --rl.kl-control.kl-coef, the initial coefficient")
    kl_coef = found[0] if section.kl_coef is None else section.kl_coef
    if section.target is not None and kl_coef == 0:
        raise ConfigError("rl.kl_control.target is set, but kl_coef is 0, which no factor can change: give one above 0")
    return KLControl(kl_coef=float(kl_coef), target=section.target, horizon=section.horizon)


def find_teacher_models(config: Config, requires: Collection[str]) -> dict[str, str]:
    """Return the directories of teachers that are models of this run, by name, if the algorithm needs teachers."""
    return dict(config.teacher.models) if {"teacher_log_probs", "teacher_tops"} & set(requires) else {}


def count_tops(config: Config, requires: Collection[str]) -> int:
    """Return the number of most probable tokens that a teacher names: the whole vocabulary counts as more than any has; 0 = none."""
    if "teacher_tops" not in requires:
        return 0
    return config.teacher.top_k or 2**24


def sft_training_config(config: Config) -> SFTTrainingConfig:
    """Return the configuration for run_sft_training."""
    return SFTTrainingConfig(
        num_steps=config.sft.num_steps,
        batch_size=config.sft.batch_size,
        log_every=config.sft.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=config.checkpoint.sft_every,
        eval_every=config.sft.eval_every,
        max_tokens_per_microbatch=config.sft.max_tokens_per_microbatch,
        seed=config.seed,
        dropout=config.sft.dropout,
        router_balance_coef=config.sft.router_balance_coef,
    )


def preference_training_config(config: Config) -> PreferenceTrainingConfig:
    """Return the configuration for train_preferences."""
    section = config.preference
    return PreferenceTrainingConfig(
        num_steps=section.num_steps,
        batch_size=section.batch_size,
        log_every=section.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=section.checkpoint_every,
        eval_every=section.eval_every,
        max_tokens_per_microbatch=section.max_tokens_per_microbatch,
        seed=config.seed,
        dropout=section.dropout,
    )


def rl_training_config(config: Config, algorithm: Algorithm | None, max_tokens: int | None = None) -> RLTrainingConfig:
    """Return the configuration for run_rl_training.

    Args:
        algorithm: None = only check the other settings.
        max_tokens: the token budget of a response; None = response_tokens(config).
    """
    budget, buffer = response_tokens(config) if max_tokens is None else max_tokens, config.rl.overlong_buffer
    overlong = create_overlong_penalty(max_tokens=budget, buffer=buffer, factor=config.rl.overlong_penalty) if buffer else None
    return RLTrainingConfig(
        num_steps=config.rl.num_steps,
        sync_every=config.rl.sync_every,
        num_epochs=config.rl.num_epochs,
        num_minibatches=config.rl.num_minibatches,
        algorithm=algorithm,
        baseline=config.rl.baseline,
        log_every=config.rl.log_every,
        history_steps=1,  # the metrics are in the run directory
        checkpoint_every=config.checkpoint.rl_every,
        eval_every=config.rl.eval_every,
        max_tokens_per_microbatch=config.rl.max_tokens_per_microbatch,
        dropout=config.rl.dropout,
        skip_redundant=config.rl.skip_redundant,
        router_balance_coef=config.rl.router_balance_coef,
        router_replay=config.rl.router_replay,
        sleep_engines=config.engine.sleep is True,
        export_dtype=config.engine.precision(config.model.device) if config.engine.launch or config.engine.dtype != "auto" else None,
        weight_sync=config.engine.weight_sync_mode,
        parity=config.engine.parity(),
        probe_tolerance=config.engine.tolerance(config.model.device),
        seed=config.seed,
        shape_reward=overlong,
        mask_truncated=config.rl.mask_truncated,
        value_clip=config.critic.value_clip,
        critic_warmup_steps=config.critic.warmup_steps,
        kl_control=None if algorithm is None else create_kl_control(config, algorithm),
        bad_numbers=config.on_bad,
    )


def reward_config(config: Config) -> RewardConfig:
    """Return the timeout and error policy of rewards."""
    reward = config.reward
    return RewardConfig(timeout_s=reward.timeout_s, on_error=reward.on_error, max_retries=reward.max_retries)


def generation_config(config: Config, max_tokens: int) -> GenerationConfig:
    """Return the sampling configuration, with `max_tokens` as the budget if the user set none."""
    generation = config.generation
    return GenerationConfig(
        n_samples=config.rl.samples_per_prompt,
        max_tokens=generation.max_tokens or max_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        enable_thinking=generation.enable_thinking,
        stop=generation.stop,
    )


def count_rl_updates(config: Config) -> int:
    """Return the number of optimizer steps of the policy in the RL stage."""
    return (config.rl.num_steps - config.critic.warmup_steps) * config.rl.num_epochs * config.rl.num_minibatches


def count_critic_updates(config: Config) -> int:
    """Return the number of optimizer steps of the critic, warm-up included."""
    return config.rl.num_steps * config.rl.num_epochs * config.rl.num_minibatches


def create_model_config(section: ModelSection, max_length: int = CONTEXT_TOKENS) -> Any:
    """Return the Hugging Face configuration of the built-in model, with the special tokens of the character tokenizer.

    Args:
        max_length: context in tokens if the section has none.
    """
    from transformers import Qwen3Config

    return Qwen3Config(**list_model_numbers(section, max_length), eos_token_id=1, pad_token_id=0, bos_token_id=None)


def list_model_numbers(section: ModelSection, max_length: int) -> dict[str, Any]:
    """Return the numbers of the built-in model by their names in its Hugging Face configuration; see create_model_config."""
    return {
        "vocab_size": section.vocab_size,
        "hidden_size": section.hidden_size,
        "intermediate_size": section.intermediate_size,
        "num_hidden_layers": section.num_layers,
        "num_attention_heads": section.num_heads,
        "num_key_value_heads": section.num_kv_heads,
        "head_dim": section.hidden_size // section.num_heads,
        "max_position_embeddings": section.max_length or max_length,
        "tie_word_embeddings": True,
    }
