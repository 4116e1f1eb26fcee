"""What a run would do, without doing it."""

from __future__ import annotations

import json
from typing import Any

from integration.algorithm_expression import describe_call
from integration.budget_sizes import ModelSizes, read_adapter_sizes, read_sizes
from integration.budget_text import SORT_ROW_TOKENS, describe_budget
from integration.command_line import Mode
from integration.config import (
    Config,
    count_critic_updates,
    count_greedy_samples,
    count_rl_updates,
    episode_config,
    response_tokens,
    turn_tokens,
)
from integration.episode_settings import EPISODE_TASKS
from integration.models import read_model_config
from rollouts.backends.lora import explain_wasted_rank
from rollouts.config import to_dict


def describe_run(config: Config, mode: Mode) -> str:
    """The resolved configuration and what follows from it, as text."""
    facts = derive_numbers(config, mode)
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()]
    return json.dumps(to_dict(config), indent=2) + f"\n\nmode {mode}: nothing was run; it would be\n" + "\n".join(lines)


def derive_numbers(config: Config, mode: Mode) -> dict[str, str]:
    """Counts, and the budgets of memory and traffic."""
    model = read_model_config(config)
    sizes = read_sizes(model, trust_remote_code=config.model.trust_remote_code)
    facts: dict[str, str] = {"parameters": f"{sizes.num_parameters:,}"} | describe_adapters(config, sizes)
    if "sft" in mode:
        rows = config.sft.num_steps * config.sft.batch_size
        facts["SFT optimizer steps"] = f"{config.sft.num_steps:,}"
        facts["SFT rows"] = f"{rows:,}"
        if config.task in SORT_ROW_TOKENS:
            facts["SFT tokens"] = f"about {rows * SORT_ROW_TOKENS[config.task]:,}"
    if config.task in EPISODE_TASKS:
        limits = episode_config(config)
        facts["episodes"] = f"up to {limits.max_turns} turns of up to {turn_tokens(config)} tokens, {response_tokens(config):,} in all"
    if "rl" in mode:
        per_step = config.rl.prompts_per_step * config.rl.samples_per_prompt
        facts["RL algorithm"] = describe_call(config.algorithm_call, response_tokens(config))
        facts |= describe_companions(config)
        facts["RL samples per step"] = f"{per_step:,} ({config.rl.prompts_per_step} prompts x {config.rl.samples_per_prompt})"
        greedy = count_greedy_samples(config.algorithm) * config.rl.prompts_per_step
        if greedy:
            facts["RL greedy samples per step"] = f"{greedy:,}, not trained on"
        facts["RL optimizer steps per step"] = (
            f"{config.rl.num_epochs * config.rl.num_minibatches} of {per_step // config.rl.num_minibatches} rows"
        )
        facts["RL optimizer steps"] = f"{count_rl_updates(config):,}"
        facts["RL samples"] = f"{config.rl.num_steps * per_step:,}"
        facts["RL weight syncs"] = f"{config.rl.num_steps // config.rl.sync_every:,}"
        facts["RL rollouts"] = describe_rollouts(config)
    return facts | describe_budget(config, mode, sizes)


def describe_adapters(config: Config, sizes: ModelSizes) -> dict[str, str]:
    """How much of the model the adapters are, and whether their rank is of use."""
    lora = config.lora.create(config.seed)
    if lora is None:
        return {}
    adapters = read_adapter_sizes(sizes, lora)
    facts = {"trained in adapters": f"{adapters.num_parameters:,}"}
    told = explain_wasted_rank(adapters.layers, lora.rank)
    return facts if told is None else facts | {"warning": told}


def describe_rollouts(config: Config) -> str:
    """When rollouts are generated, and how many there are at once."""
    asynchronous, per_version = config.asynchronous, config.rl.prompts_per_step * config.rl.sync_every
    if not asynchronous.enabled:
        return "before each step's training, which waits for them"
    stopped = "stopped around each weight sync, and go on from their tokens" if asynchronous.interrupts else "go on through weight syncs"
    running, waiting = asynchronous.concurrent_groups(per_version), asynchronous.queue_groups(per_version)
    return (
        f"while training goes on, at most {asynchronous.max_staleness} weight versions behind; up to {running:,} groups are generated at "
        f"once and {waiting:,} wait; they {stopped}"
    )


def describe_companions(config: Config) -> dict[str, str]:
    """Where the models come from that the algorithm needs beside the policy."""
    facts: dict[str, str] = {}
    algorithm = config.algorithm
    if "ref_log_probs" in algorithm.requires:
        facts["RL reference model"] = config.reference.path or "the policy as RL begins"
    if "values" in algorithm.requires:
        start = config.critic.path or "the policy as RL begins, with a new value head"
        alone = f", {config.critic.warmup_steps} RL steps of them alone" if config.critic.warmup_steps else ""
        facts["RL critic"] = f"{start}; {count_critic_updates(config):,} optimizer steps{alone}"
    return facts


def count_parameters(model_config: Any, *, trust_remote_code: bool = False) -> int:
    """Parameters of the model that a configuration describes, tied ones once. No memory is taken for them.

    Raises: ConfigError if it does not describe a causal language model.
    """
    return read_sizes(model_config, trust_remote_code=trust_remote_code).num_parameters
