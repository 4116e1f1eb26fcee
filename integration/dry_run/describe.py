"""Description of a run without running it: the resolved configuration and the numbers that follow from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from functools import partial
from pathlib import Path

from integration.closed_stdout import ignore_closed_stdout
from integration.dry_run.explain import explain_settings
from integration.dry_run.sizes import ModelSizes, read_adapter_sizes, read_sizes
from integration.dry_run.text import SORT_ROW_TOKENS, describe_budget
from integration.expressions.algorithm import describe_call
from integration.expressions.filters import NO_FILTER, describe_filter
from integration.expressions.loggers import describe_loggers
from integration.expressions.mixture import describe_mixture
from integration.parts.model_settings import read_model_config
from integration.settings.command_line import CommandLine, Mode, print_all_options
from integration.settings.config import Config
from integration.settings.made.budgets import episode_config, response_tokens, turn_tokens
from integration.settings.made.library import count_critic_updates, count_greedy_samples, count_rl_updates
from integration.settings.option_effects import (
    IdleOption,
    describe_doubts,
    describe_idle_options,
    find_changes,
    list_options,
    reads_conversations,
    reads_pairs_alone,
    spell_option,
)
from integration.settings.sections.episodes import EPISODE_TASKS, EnvironmentSection, parse_parameters
from integration.settings.task_defaults import find_default
from rollouts.backends.lora.adapters import explain_wasted_rank
from rollouts.config import OptimizerConfig
from rollouts.config_files import to_dict
from rollouts.data.model_limits import find_context_length
from rollouts.errors import make_safe, redact

_COUNTED_BYTES = 64 * 2**20  # largest file of rows whose lines are counted
ALL_SETTINGS = "--dry-run --json shows all"


def tell_run(command: CommandLine, config: Config) -> int:
    """Print the description of a run, and return the exit status of a dry run.

    Args:
        config: that of the command, checked: check_run's.
    """
    describe = describe_run_as_json if command.json else describe_run
    described = make_safe(redact(describe(config, command.mode, command.find_idle_options())))
    with ignore_closed_stdout():
        print(described)
    return 0


def tell_explanation(command: CommandLine, config: Config) -> int:
    """Print the explanation of the settings that a command asks for, and return its exit status.

    Args:
        config: that of the command, checked: check_run's.
    """
    derive = partial(derive_numbers, mode=command.mode)
    told = explain_settings(command.explain, config, command.mode, command.places, print_all_options(), derive)
    with ignore_closed_stdout():
        print(make_safe(redact(told)))
    return 0


def describe_run(config: Config, mode: Mode, idle: Collection[IdleOption] = ()) -> str:
    """Return the numbers that follow from the settings, and the settings that are not the defaults of the task and the model, as text.

    Args:
        idle: the user's settings without effect.
    """
    facts = derive_numbers(config, mode) | ({"warning of options": describe_idle_options(idle)} if idle else {})
    first = [name for name, text in facts.items() if name.startswith("warning") or (name.endswith("fits") and text.startswith("NO"))]
    facts = {name: facts[name] for name in (*first, *facts)}
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  {value}" for name, value in facts.items()]
    changed, sections = find_changes(config, find_default(config)), dict[str, str]()
    for name, value in list_options(config):
        if name in changed:
            section = name.partition(".")[0] if "." in name else ""
            sections[section] = f"{sections.get(section, ' ')} {spell_option(name)} {_show(value)}"
    return "\n".join(
        [
            f"mode {mode}: nothing was run; it would be",
            *lines,
            "",
            f"settings other than the defaults of this task and model ({ALL_SETTINGS}):",
            *(sections.values() or ["  none"]),
        ]
    )


def describe_run_as_json(config: Config, mode: Mode, idle: Collection[IdleOption] = ()) -> str:
    """Return every setting and the numbers that follow, as one JSON object: mode, settings, derived, options_without_effect."""
    told = {
        "mode": mode,
        "settings": to_dict(config),
        "derived": derive_numbers(config, mode),
        "options_without_effect": [spell_option(option.name) for option in idle],
    }
    return json.dumps(told, indent=2)


def _show(value: object) -> str:
    """Return a value as it is typed on a command line."""
    return shlex.join(map(str, value)) if isinstance(value, tuple) else shlex.quote(str(value))


def describe_learning_rate(optimizer: OptimizerConfig) -> str:
    """Describe the course of a learning rate: "1e-05, after 10 steps of warm-up, linear to 1e-06"."""
    warmup = f", after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    end = "" if optimizer.schedule == "constant" else f" to {optimizer.lr * optimizer.min_lr_ratio:g}"
    return f"{optimizer.lr:g}{warmup}, {optimizer.schedule}{end}"


def derive_numbers(config: Config, mode: Mode) -> dict[str, str]:
    """Return counts, and the budgets of memory and traffic, by name."""
    model = read_model_config(config)
    sizes = read_sizes(model, trust_remote_code=config.model.trust_remote_code)
    facts: dict[str, str] = describe_doubts(config, mode) | describe_own_model(config, mode)
    facts |= {"parameters": f"{sizes.num_parameters:,}"} | describe_adapters(config, sizes)
    if "sft" in mode:
        rows = config.sft.num_steps * config.sft.batch_size
        facts["SFT learning rate"] = describe_learning_rate(config.sft.optimizer)
        facts["SFT optimizer steps"] = f"{config.sft.num_steps:,}"
        facts["SFT rows"] = f"{rows:,}{describe_passes(config, rows)}"
        if config.data.mixture and reads_conversations(config, mode):
            facts |= describe_mixture(config.data.mixture, skip_bad_rows=config.data.skip_bad_rows)
        if config.task in SORT_ROW_TOKENS:
            facts["SFT tokens"] = f"about {rows * SORT_ROW_TOKENS[config.task]:,}"
    if config.task in EPISODE_TASKS:
        limits = episode_config(config)
        facts["episodes"] = f"up to {limits.max_turns} turns of up to {turn_tokens(config)} tokens, {response_tokens(config):,} in all"
        facts |= describe_environment(config.environment)
    if "rl" in mode:
        per_step = config.rl.prompts_per_step * config.rl.samples_per_prompt
        facts["RL learning rate"] = describe_learning_rate(config.rl.optimizer)
        facts["RL algorithm"] = describe_call(config.algorithm_call, response_tokens(config))
        if config.rl.baseline is not None:
            facts["RL advantages"] = f"rewards - {config.rl.baseline:g}"
        if config.rl.filter != NO_FILTER:
            facts["RL filter"] = describe_filter(config.rl.filter)
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
    if "dpo" in mode:
        facts |= describe_preferences(config)
    if config.loggers:
        facts["metrics"] = describe_loggers(config.loggers)
    return facts | describe_budget(config, mode, sizes)


def describe_preferences(config: Config) -> dict[str, str]:
    """Describe the stage of preferences: its loss, its schedule, its pairs and the origin of the reference's log-probs."""
    section = config.preference
    loss = section.create_objective().loss
    numbers = {**loss.keywords, **getattr(loss.keywords.get("pair_loss"), "keywords", {})} if isinstance(loss, partial) else {}
    told = ", ".join(f"{name} {value:g}" for name, value in numbers.items() if isinstance(value, float))
    unit = "labelled answers" if section.loss == "kto" else "pairs"
    pairs = section.path or config.data.path or f"generated from the task {config.task}"
    facts = {
        "DPO loss": f"{section.loss} ({told})",
        "DPO learning rate": describe_learning_rate(section.optimizer),
        "DPO optimizer steps": f"{section.num_steps:,} of {section.batch_size} {unit}",
        f"DPO {unit}": pairs,
    }
    if section.needs_reference:
        origin = config.reference.path or "the policy as the stage begins"
        when = ", computed once before the first step" if section.reference == "precomputed" else ""
        facts["DPO reference model"] = f"{origin}{when}"
    return facts


def describe_passes(config: Config, num_rows: int) -> str:
    """Describe how often an SFT stage of num_rows rows takes each row of a JSONL file; "" where rows are not cheap to count.

    A few rows more than are trained on are counted: those that are held out or are bad.
    """
    data = config.data
    path = None if data.path is None or data.mixture else Path(data.path)
    if config.task != "jsonl" or path is None or path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _COUNTED_BYTES:
        return ""
    with path.open("rb") as file:
        found = sum(1 for line in file if line.strip())
    if not found:
        return ""
    passes = num_rows / found
    return f", about {passes:,.{1 if passes < 10 else 0}f} passes over the {found:,} rows of {path.name}"


def describe_own_model(config: Config, mode: str) -> dict[str, str]:
    """Describe the user's model: its directory, tokenizer and template, the precision and the lengths; {} for the built-in model."""
    if config.model.path is None:
        return {}
    from integration.parts.model_checks import describe_tokens
    from integration.parts.model_settings import create_tokenizer, read_model_config

    context = find_context_length(read_model_config(config))
    rows = "the model's context" if config.data.max_length is None else f"{config.data.max_length:,} tokens"
    responses = "" if reads_pairs_alone(config, mode) else f"responses up to {response_tokens(config):,} tokens, "
    weights = f"weights in {config.backend.master_dtype}"
    if config.lora.rank:
        weights = f"frozen weights in {config.lora.base_dtype}"
    return {
        "model": config.model.path,
        "precision": f"matrix products in {config.backend.precision(config.model.device)}, {weights}",
        "lengths": f"{responses}rows up to {rows}" + ("" if context is None else f"; the context has {context:,}"),
        **describe_tokens(config, create_tokenizer(config)),
    }


def describe_environment(section: EnvironmentSection) -> dict[str, str]:
    """Describe the user's environment: its parameters at reset, and its anchor states for algorithms that compare steps."""
    facts: dict[str, str] = {}
    if section.factory is not None:
        facts["environment"] = section.factory
    if section.parameters:
        facts["environment's parameters"] = json.dumps(parse_parameters(section.parameters))
    if section.state_key is not None or section.similarity is not None:
        key = section.state_key or "the observation"
        close = "equal" if section.similarity is None else f"similar by at least {section.similarity:g}"
        facts["anchor states"] = f"{key}, {close}"
    return facts


def describe_adapters(config: Config, sizes: ModelSizes) -> dict[str, str]:
    """Describe the number of trained parameters in adapters, and warn of a rank larger than a layer."""
    lora = config.lora.create(config.seed)
    if lora is None:
        return {}
    adapters = read_adapter_sizes(sizes, lora)
    facts = {"trained in adapters": f"{adapters.num_parameters:,}"}
    told = explain_wasted_rank(adapters.layers, lora.rank)
    return facts if told is None else facts | {"warning": told}


def describe_rollouts(config: Config) -> str:
    """Describe the schedule of rollouts and the number of groups in flight."""
    asynchronous, per_version = config.asynchronous, config.rl.prompts_per_step * config.rl.sync_every
    if not asynchronous.enabled:
        return "before each step's training, which waits for them"
    stopped = "stopped around each weight sync, and go on from their tokens" if asynchronous.interrupts else "go on through weight syncs"
    running, waiting = asynchronous.concurrent_groups(per_version), asynchronous.queue_groups(per_version)
    return (
        f"while training goes on, at most {asynchronous.max_staleness} weight versions behind; up to {running:,} groups are generated at "
        f"once and {waiting:,} wait; they {stopped}"
    ) + (f"; segment log-probs by the {config.rl.segment_scores}" if asynchronous.segment_wise else "")


def describe_teacher(config: Config) -> str:
    """Describe the teacher of distillation: its models or servers, and what it reads besides the policy's prompt."""
    section = config.teacher
    places = {**section.models, **section.servers}
    if section.by is not None:
        who = f"by {section.by}: " + ", ".join(f"{name} = {place}" for name, place in places.items())
    else:
        who = section.path or ", ".join(section.url) or "the policy itself"
    reads = "" if section.context is None else f", which reads {section.context!r}"
    named = f"the {section.top_k} most probable tokens" if section.top_k else "the whole vocabulary"
    tops = f"; {named}" if "teacher_tops" in config.algorithm.requires else ""
    return f"{who}{reads}{tops}"


def describe_companions(config: Config) -> dict[str, str]:
    """Describe the origin of the models that the algorithm needs besides the policy."""
    facts: dict[str, str] = {}
    algorithm = config.algorithm
    if "ref_log_probs" in algorithm.requires:
        facts["RL reference model"] = config.reference.path or "the policy as RL begins"
    if config.teacher.is_given:
        facts["RL teacher"] = describe_teacher(config)
    if "values" in algorithm.requires:
        start = config.critic.path or "the policy as RL begins, with a new value head"
        alone = f", {config.critic.warmup_steps} RL steps of them alone" if config.critic.warmup_steps else ""
        facts["RL critic"] = f"{start}; {count_critic_updates(config):,} optimizer steps{alone}"
    return facts
