"""Checks of a run's settings before anything is loaded, started or written: those that a dry run makes, too."""

from __future__ import annotations

import os
from collections.abc import Mapping

from integration.expressions.loggers import check_loggers
from integration.expressions.mixture import check_mixture
from integration.parts.hub_models import find_models
from integration.parts.model_checks import check_model, check_tokenizer_ends
from integration.parts.model_settings import check_backend, check_companions, check_dropout, check_limits, settle_weight_sync
from integration.parts.placement import find_nccl_version, place_servers
from integration.parts.rewards import check_reward, load_task_reward
from integration.run.launch import count_local_processes, count_processes
from integration.run.step_files import load_condition
from integration.settings.checks import check_truncated_sampling
from integration.settings.command_line import CommandLine
from integration.settings.config import OWN_DATA_TASKS, SELF_MADE_TASKS, Config
from integration.settings.sections.episodes import EPISODE_TASKS, AgentSection
from integration.settings.sections.preference import PAIR_TASKS
from rollouts.data.rows.files import check_exists
from rollouts.errors import ConfigError
from rollouts.rewards.answers import load_function


def check_run(command: CommandLine) -> tuple[Config, Config]:
    """Check the settings of a command.

    Returns: those that the run records, and those that it works with: models as directories, the way of new weights, GPUs of servers.
    Raises: ConfigError and DataError, as the parts of the run would.
    """
    mode = command.mode
    recorded, config = find_models(command.config, weights=not command.dry_run, quiet=command.quiet or command.json)
    num_processes = count_processes(config, os.environ)
    check_loggers(config.loggers)
    if "dpo" in mode:
        check_preference_data(config, mode)
    check_data_given(config, mode)
    check_exists(config.preference.path, "--preference.path")
    check_exists(config.preference.eval_path, "--preference.eval-path")
    if config.task in OWN_DATA_TASKS:
        check_exists(config.data.path, "--data.path")
        check_exists(config.data.eval_path, "--data.eval-path")
        check_exists(config.data.rollouts, "--data.rollouts")
    check_backend(config, mode)
    check_model(config, weights=not command.dry_run or recorded.model.path == config.model.path)
    check_dropout(config, mode)
    check_limits(config, mode)
    check_tokenizer_ends(config)
    if config.task in EPISODE_TASKS:
        from integration.tasks.episodes import check_task  # imports agents and environments

        check_task(config)
    load_task_reward(config.reward)
    if "dpo" in mode:
        check_companions(config)
    if "rl" in mode:
        _ = config.algorithm  # report its errors now, not after the SFT stage
        check_truncated_sampling(config)
        if num_processes > 1:
            from integration.parts.sharded_models import check_loss_travels  # imports FSDP, which takes half a second

            check_loss_travels(config)
        check_companions(config)
        check_agent_starts(config.agent, os.environ)
        check_reward(config)
        load_condition(config.trajectories)
        config = settle_weight_sync(config)
        config = place_servers(config, os.environ, count_local_processes(num_processes, os.environ), find_nccl_version)
    return recorded, config


def check_agent_starts(agent: AgentSection, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if the program of an agent cannot be started, or its function not be loaded, which runs its file."""
    name = "command" if agent.command is not None else "function"
    try:
        if agent.command is not None:
            from rollouts.gateway.processes import (
                find_program,
                split_command,
            )  # imports trio, which a run without agents does not need here

            find_program(split_command(agent.command), environment)
        elif agent.function is not None:
            from rollouts.gateway.agent_runs import check_agent_function

            check_agent_function(load_function(agent.function))
    except ConfigError as error:
        raise ConfigError(f"agent.{name} is {getattr(agent, name)!r}: {error}") from error


def check_preference_data(config: Config, mode: str) -> None:
    """Raise ConfigError for a task without pairs, and for data that a mode with preferences does not read."""
    section, data = config.preference, config.data
    if config.task not in (*PAIR_TASKS, "jsonl"):
        raise ConfigError(
            f"--mode {mode} trains on pairs of answers, but there are none of the task {config.task!r}: take --task sort or sort-long, or "
            "--task jsonl with pairs of your own (--data.path)"
        )
    if data.rollouts is not None or data.mixture:
        option = "--data.rollouts" if data.rollouts is not None else "--data.mixture"
        raise ConfigError(
            f"{option} is given with --mode {mode}, which reads pairs from one file: give --preference.path, and leave it out"
        )
    if section.path is not None and config.task in SELF_MADE_TASKS:
        raise ConfigError(f"the task {config.task!r} generates its own pairs, but --preference.path is {section.path}: add --task jsonl")
    if mode == "dpo" and section.path is not None and data.path is not None:
        raise ConfigError(
            f"--data.path is {data.path} beside --preference.path {section.path}, but --mode dpo reads one file of pairs: leave one out"
        )
    if mode == "sft+dpo" and config.task == "jsonl" and (section.path is None or data.path is None):
        raise ConfigError(
            f"--mode sft+dpo reads demonstrations from --data.path (found {data.path}) and pairs from --preference.path (found "
            f"{section.path}): give both, or --mode dpo with pairs alone"
        )
    if config.backend.kind == "jax":
        raise ConfigError(
            f"backend.kind is 'jax', but preferences are trained with pytorch, torch_func and fsdp: leave it out with --mode {mode}"
        )


def _check_recorded_given(config: Config, mode: str) -> None:
    """Raise ConfigError for settings that recorded rollouts do not go with."""
    path = config.data.rollouts
    if mode != "rl" or config.task != "jsonl":
        raise ConfigError(f"--data.rollouts is {path}, but it is for --mode rl --task jsonl, not --mode {mode} --task {config.task}")
    if config.data.path is not None or config.data.mixture:
        raise ConfigError(
            f"--data.rollouts is {path} beside --data.path or --data.mixture: nothing is generated from rows, so leave them out"
        )
    if config.rl.asynchronous.enabled:
        raise ConfigError("--data.rollouts with --rl.asynchronous.enabled: recorded rollouts are there already, leave the latter out")
    if config.rl.filter != "none":
        raise ConfigError(
            f"--data.rollouts with --rl.filter {config.rl.filter}: recorded groups are not replaced, so filter the file before"
        )


def check_data_given(config: Config, mode: str = "sft+rl") -> None:
    """Raise ConfigError for data that the task does not use, and for missing data or a missing environment."""
    if config.data.rollouts is not None:
        _check_recorded_given(config, mode)
    for name, given in (
        ("--data.path", config.data.path),
        ("--data.mixture", " ".join(config.data.mixture)),
        ("--data.rollouts", config.data.rollouts),
    ):
        if given and config.task in SELF_MADE_TASKS:
            raise ConfigError(f"the task {config.task!r} generates its own data, but {name} is {given}: add --task jsonl (or gsm8k)")
    given = config.data.path is not None or config.data.mixture or config.data.rollouts is not None
    if config.task in OWN_DATA_TASKS and not given and "dpo" not in mode:  # then --preference.path is given, see Config
        raise ConfigError(
            f"--preference.path is {config.preference.path}, but --mode {mode} trains on no pairs: add --mode dpo, or give --data.path"
        )
    if config.task == "environment" and config.environment.factory is None:
        raise ConfigError(
            "the task 'environment' needs an environment: give --environment FILE.py:NAME of a function or class that creates one"
        )
    if config.task not in SELF_MADE_TASKS and config.data.mixture and ("sft" in mode or config.data.path is None):
        check_mixture(config.data.mixture)
    if config.data.columns and config.task not in OWN_DATA_TASKS:
        raise ConfigError(
            f"--data.columns is {' '.join(config.data.columns)}, but the task {config.task!r} reads no such rows: leave it out"
        )
