"""Every option of the command has an effect, is refused, or is named: the table of effects is complete, and what it says is so."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from integration.dry_run.describe import derive_numbers
from integration.parts import engines as engines_module
from integration.parts.agents import create_agents
from integration.parts.engines import create_fleet_config, create_server_config, create_server_engine, transfer_args
from integration.parts.rewards import load_task_reward
from integration.parts.sharded_models import fsdp_config
from integration.report.runs import read_run
from integration.run.stages import create_rollout_config, create_task, template_kwargs
from integration.settings import command_line
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config, create_output_dir
from integration.settings.made.budgets import context_tokens, episode_config
from integration.settings.made.library import (
    create_model_config,
    generation_config,
    preference_training_config,
    reward_config,
    rl_training_config,
    sft_training_config,
)
from integration.settings.option_effects import COMMAND_OPTIONS, EFFECTS, Effect, find_idle_options, list_options, spell_option
from integration.settings.sections.episodes import EPISODE_TASKS
from integration.tasks.episodes import create_world
from integration.tasks.task import Task
from integration.train import main
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.backends.optim.optimizers import create_rule
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import BadNumbers, RewardConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError, DataError
from rollouts.testing import create_tiny_model
from rollouts.types import Prompt, Sample, SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create_tiny_model().save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    for name, rows in (("train", 30), ("heldout", 5)):
        lines = [json.dumps({"prompt": f"s{i}=", "completion": str(i), "answer": str(i)}) for i in range(rows)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        pairs = [json.dumps({"prompt": f"s{i}=", "chosen": str(i), "rejected": "9999"}) for i in range(rows)]
        (directory / f"{name}_pairs.jsonl").write_text("\n".join(pairs) + "\n")
    return directory


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested sections."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        section = out
        *parents, last = name.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return out


SERVER = {"engine.kind": "vllm", "engine.launch": True, "engine.num_servers": 2}
DATA = {"task": "jsonl", "data.path": "DIR/train.jsonl", "model.path": "DIR"}
FALLING = {"rl.optimizer.schedule": "linear"}
HALF = {"backend.fsdp.clip_grad": 0.5, "backend.compute_dtype": "bfloat16"}
ASYNC = {"rl.asynchronous.enabled": True}
SCENARIOS: dict[str, tuple[str, bool, dict[str, Any]]] = {  # mode, whether it is a dry run, settings
    "default": ("sft+rl", False, {}),
    "sft": ("sft", False, {}),
    "rl": ("rl", False, {}),
    "logged": ("sft", False, {"loggers": ("jsonl('first.jsonl')",)}),
    "dry": ("sft+rl", True, {}),
    "servers": ("rl", False, SERVER),
    "reckoned": ("rl", True, {"engine.kind": "vllm", "engine.urls": ("http://127.0.0.1:1", "http://127.0.0.1:2")}),
    "running": ("rl", False, {"engine.kind": "sglang", "engine.urls": ("http://127.0.0.1:1",), "engine.weight_sync": "group"}),
    "async": ("rl", False, ASYNC),
    "giving up": ("rl", False, {**ASYNC, "rl.asynchronous.on_failure": "raise", "rl.asynchronous.on_stale": "drop"}),
    "segments": ("rl", False, {**ASYNC, "enable_segment_wise_ppo": True}),
    "critic": ("rl", False, {"rl.algorithm": "ppo(kl_coef=0.05)", "rl.kl_control.target": 0.1}),
    "filtered": (
        "rl",
        False,
        {"rl.filter": "nonzero_std", "rl.overlong_buffer": 2, "engine.parity_rows": 4, "reward.on_error": "retry", **FALLING},
    ),
    "shards": ("rl", True, {"backend.kind": "fsdp", "backend.num_processes": 8}),
    "half": ("rl", True, {"backend.kind": "fsdp", "backend.num_processes": 6, **HALF}),
    "nodes": ("sft", True, {"backend.kind": "fsdp", "backend.num_processes": 16}),
    "functional": ("sft+rl", False, {"backend.kind": "torch_func"}),
    "adapters": ("sft+rl", False, {"lora.rank": 4, "on_bad.gradient_spike": "skip", "on_bad.ratio": "stop"}),
    "grid world": ("sft+rl", False, {"task": "grid_world"}),
    "calculator": ("rl", False, {"task": "calculator", "episode.on_environment_error": "retry"}),
    "own environment": ("rl", False, {"task": "environment", "environment.factory": "rollouts.environments.games.grid_world:GridWorld"}),
    "own environment, step by step": (
        "rl", False,
        {"task": "environment", "environment.factory": "rollouts.environments.games.grid_world:GridWorld", "rl.algorithm": "gigpo"},
    ),
    "program": ("rl", False, {"agent.command": "true", "agent.on_error": "retry"}),
    "own data": ("sft+rl", False, {**DATA, "data.max_length": 60, "reward.function": "rollouts.rewards.answers:exact_match"}),
    "only SFT of own data": ("sft", False, DATA),
    "taught": ("rl", False, {"rl.algorithm": "opd", "teacher.path": "DIR", "backend.compute_dtype": "bfloat16"}),
    "taught by the most probable tokens": ("rl", True, {"rl.algorithm": "gkd", "teacher.path": "DIR", "model.path": "DIR"}),
    "taught by a server": ("rl", False, {"rl.algorithm": "opd", "teacher.url": ("http://127.0.0.1:1",)}),
    "taught by several": ("rl", False, {**DATA, "rl.algorithm": "opd", "teacher.by": "answer", "teacher.each": ("1=DIR", "2=DIR")}),
    "preferences": ("dpo", False, {}),
    "preferences by the dry run": ("dpo", True, {"preference.loss": "cdpo"}),
    "smoothed": ("sft+dpo", False, {"preference.loss": "robust", "preference.optimizer.schedule": "constant"}),
    "margin": ("dpo", False, {"preference.loss": "simpo"}),
    "answers": ("dpo", False, {"preference.loss": "kto"}),
    "own pairs, and others held out": (
        "dpo",
        False,
        {"task": "jsonl", "model.path": "DIR"}
        | {f"preference.{name}": f"DIR/{file}_pairs.jsonl" for name, file in (("path", "train"), ("eval_path", "heldout"))},
    ),
    "own pairs": ("dpo", False, {"task": "jsonl", "preference.path": "DIR/train_pairs.jsonl", "model.path": "DIR"}),
    "unevaluated": ("sft", False, {**DATA, "evaluation.sampled": False, "data.eval_path": "DIR/heldout.jsonl"}),
}  # fmt: skip
OTHER: dict[str, Any] = {  # a further value of an option, where none can be thought up from the type
    **{f"on_bad.{kind}": "stop" for kind in ("loss", "gradient", "all_masked", "log_prob", "empty_answer")}, "on_bad.ratio": "skip",
    "on_bad.gradient_spike": "stop", "task": "sort-long", "output_dir": "elsewhere", "num_threads": 3, "crash_bundles": "none",
    "model.path": "DIR", "model.device": "meta", "model.num_heads": 8,
    "model.num_kv_heads": 4, "model.max_length": 99, "data.path": "DIR/heldout.jsonl", "data.eval_path": "DIR/train.jsonl",
    "data.max_length": 3, "rl.prompts_per_step": 128, "rl.num_minibatches": 4, "rl.algorithm": "rloo", "rl.overlong_buffer": 3,
    "rl.kl_control.kl_coef": 0.7, "rl.kl_control.target": 0.3, "rl.filter": "diversity", "rl.asynchronous.max_concurrent_rollouts": 70,
    "rl.asynchronous.queue_size": 200, "rl.asynchronous.when_queue_full": "wait", "rl.asynchronous.order": "submitted",
    "rl.asynchronous.on_stale": "drop", "rl.asynchronous.on_failure": "drop", "rl.asynchronous.max_stale_attempts": 5,
    "rl.asynchronous.rollout_timeout_s": 9.0, "rl.asynchronous.in_flight": "interrupt", "rl.asynchronous.checkpoint_in_flight": "interrupt",
    "rl.asynchronous.enable_segment_wise_ppo": False, "rl.asynchronous.missed_segment": "proximal", "reference.path": "DIR",
    "critic.path": "DIR", "generation.max_tokens": 7, "generation.enable_thinking": False, "generation.stop": ("x",),
    "generation.top_p": 0.5, "generation.top_k": 5, "generation.min_p": 0.3,
    "agent.command": "false", "agent.function": "rollouts.rewards.answers:exact_match", "agent.max_answers": 3, "agent.max_tokens": 9,
    "agent.on_error": "drop", "agent.failed_reward": 0.5, "agent.chat": True,
    "episode.max_turns": 3, "episode.max_tokens": 9, "episode.max_context": 99, "episode.stop_regex": "x",
    "episode.system_prompt": "x", "episode.chat": False, "episode.on_rewrite": "error", "episode.on_environment_error": "drop",
    "episode.on_tool_error": "raise", "environment.factory": "rollouts.environments.gym:GymEnvironment", "environment.size": 6,
    "environment.expert": "rollouts.rewards.answers:exact_match", "environment.num_holes": 1, "environment.step_reward": -0.1,
    "environment.max_digits": 3, "environment.max_operations": 3, "reward.function": "rollouts.rewards.answers:gsm8k_reward",
    "reward.on_error": "drop", "reward.model": "DIR", "reward.model_device": "cuda", "reward.model_dtype": "bfloat16",
    "backend.kind": "jax", "backend.num_processes": 4, "backend.fsdp.sharding_strategy": "no_shard",
    "backend.fsdp.mixed_precision": "bfloat16", "backend.fsdp.clip_grad": 0.7, "backend.fsdp.ranks_per_replica": 2,
    "backend.compute_dtype": "bfloat16", "lora.alpha": 3.0, "lora.dropout": 0.5, "lora.target_modules": ("q_proj",),
    "engine.kind": "sglang", "engine.urls": ("http://127.0.0.1:2",), "engine.gpus": ("0", "1", "2", "3"),
    "engine.on_server_death": "stop", "engine.updates_at_once": 1, "engine.python": "/other/python", "engine.api_key_variable": "KEY",
    "engine.port": 4000, "engine.dtype": "bfloat16", "engine.context_length": 77, "engine.max_num_seqs": 5, "engine.memory_fraction": 0.5,
    "engine.in_flight": "abort", "engine.sleep": True, "engine.weight_sync": "disk", "engine.weight_sync_address": "10.0.0.1",
    "engine.path_map": ("/a=/b",),
    "engine.extra_args": ("--x",), "engine.parity_rows": 3, "engine.parity_action": "stop", "engine.probe_tolerance": 0.5,
    "trajectories.condition": "rollouts.data.filters:check_any_success", "hardware.memory_gib": 3.0, "hardware.ranks_per_node": 4,
    "backend.fsdp.auto_wrap_min_params": 10**6, "rl.baseline": 0.25, "environment.parameters": ("depth=3",),
    "environment.state_key": "rollouts.algorithms.anchors:hash_observation", "environment.similarity": 0.5,
    "loggers": ("jsonl('copy.jsonl')",), "trajectories.every": 8, "model.revision": "main", "data.columns": ("prompt=question",),
    "data.rollouts": "DIR/rollouts.jsonl", "checkpoint.best": "held_out_accuracy",
    "rl.segment_scores": "engines", "lora.base_dtype": "bfloat16", "backend.master_dtype": "bfloat16", "reference.dtype": "bfloat16",
    "model.kernels": "torch", "sft.router_balance_coef": 0.1, "rl.router_balance_coef": 0.1,
    "data.mixture": ("DIR/heldout.jsonl(repeat=2)",), "preference.loss": "ipo", "preference.beta": 0.7, "preference.nll_coef": 0.5,
    "teacher.path": "DIR/other", "teacher.url": ("http://127.0.0.1:2",), "teacher.by": "prompt", "teacher.each": ("3=DIR",),
    "teacher.context": "{prompt} x", "teacher.kind": "sglang", "teacher.tokenizer": "DIR", "teacher.dtype": "bfloat16",
    "teacher.api_key_variable": "KEY",
    "engine.deadlines.outage_s": 9.0,
    "preference.reference": "precomputed", "preference.path": "DIR/heldout_pairs.jsonl", "preference.eval_path": "DIR/train_pairs.jsonl",
}  # fmt: skip
for section in ("sft.optimizer", "rl.optimizer", "critic.optimizer", "preference.optimizer"):
    settings = {"schedule": "cosine", "betas": (0.8, 0.9), "weight_decay": 0.2, "warmup_steps": 7, "min_lr_ratio": 0.3, "moments": "8bit"}
    OTHER |= {f"{section}.{name}": value for name, value in settings.items()}
STILL_OTHER = {
    "engine.kind": "vllm",
    "backend.compute_dtype": "float32",
    "rl.asynchronous.on_stale": "retry",
    "rl.asynchronous.on_failure": "retry",
}
READ_BY = {  # options of which `observe` sees nothing: the file of integration/ that hands them on, and how
    "backend.kind": ("parts/models.py", 'config.backend.kind == "jax"'),
    "backend.compute_dtype": ("parts/models.py", '"compute_dtype": config.backend.precision(config.model.device)'),
    "backend.gradient_checkpointing": ("parts/models.py", "if config.backend.gradient_checkpointing:"),
    "backend.master_dtype": ("parts/models.py", "set_master_dtype(config.backend, model)"),
    "reference.dtype": ("parts/models.py", "own = config.reference.dtype"),
    "model.kernels": ("parts/models.py", '"kernels": config.kernels'),
    "deterministic": ("parts/models.py", '"kernels": config.kernels'),
    "engine.dtype": ("parts/engines.py", "own.to(getattr(torch, engine.precision(config.model.device)))"),
    "engine.gpus": ("parts/engines.py", "gpus = section.gpus"),
    "engine.weight_sync_mib": ("parts/engines.py", '"bucket_bytes": section.weight_sync_mib * MIB'),
    "profile.steps": ("run/profile.py", "len(self._lines) == self._settings.steps"),
    "profile.skip": ("run/profile.py", "self._num_lines == self._settings.skip"),
    "crash_bundles": ("crash/watch.py", 'config.crash_bundles != "auto"'),
    "num_threads": ("run/job.py", "torch.set_num_threads(config.num_threads)"),
    "logger_timeout_s": ("run/job.py", "timeout_s=command.config.logger_timeout_s"),
    "checkpoint.best": ("run/evaluation.py", "best = config.checkpoint.best"),
    "checkpoint.keep_last_n": ("run/stages.py", "config.checkpoint.keep_last_n"),
    "model.trust_remote_code": (
        "parts/models.py",
        "load_hf_model(path, device=parse_device(section.device), trust_remote_code=section.trust",
    ),
    "preference.num_pairs": ("tasks/preference_pairs.py", '"num_pairs": section.num_pairs'),
    "preference.num_heldout": ("tasks/preference_pairs.py", '"num_heldout": section.num_heldout'),
    "data.truncate": ("run/stages.py", "truncate=data.truncate"),
    "data.skip_bad_rows": ("run/stages.py", "skip_bad_rows=data.skip_bad_rows"),
    "engine.max_restarts": ("parts/engines.py", 'max_restarts={"restart": section.max_restarts'),
    "engine.weight_sync_address": ("parts/engines.py", '"master_address": section.weight_sync_address'),
    "engine.deadlines.join_s": ("parts/engines.py", '"timeout_s": section.deadlines.join_s'),
    "environment.max_digits": ("tasks/episodes.py", 'config.environment.choose("max_digits"'),
    "episode.on_tool_error": ("tasks/episodes.py", "on_tool_error=config.episode.on_tool_error"),
}


def change(option: str, value: Any) -> Any:
    """Another value."""
    if option in OTHER:
        return OTHER[option] if OTHER[option] != value else STILL_OTHER[option]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float), f"say in OTHER what {option} may be besides {value!r}"
    return value + 1 if isinstance(value, int) else value / 2


def make(settings: Mapping[str, Any], directory: Path) -> Config:
    """A configuration; DIR in a text is the directory."""

    def fill(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.replace("DIR", str(directory)) if isinstance(value, str) else value

    return apply(Config(), nest({name: fill(value) for name, value in settings.items()}))


def apply(section: Any, changes: Mapping[str, Any]) -> Any:
    """The section with nested changes, all at once."""
    return replace(section, **{k: apply(getattr(section, k), v) if isinstance(v, dict) else v for k, v in changes.items()})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "x")


def observe_part(config: Config, part: str) -> Iterator[Any]:
    """Yield the values that one stage is given."""
    section, steps = config.preference if part == "dpo" else getattr(config, part), 40
    rule = create_rule(**vars(section.optimizer), total_steps=steps)
    clip = fsdp_config(config).clip_grad if config.backend.kind == "fsdp" else None
    yield replace(rule, max_grad_norm=clip or rule.max_grad_norm, schedule=len), [rule.schedule(step) for step in range(steps)]
    bad = config.on_bad
    yield bad.loss, bad.gradient, bad.max_skipped, bad.gradient_spike, None if bad.gradient_spike == "ignore" else bad.spike_factor
    if part == "rl":
        yield bad.ratio, None if bad.ratio == "ignore" else bad.ratio_limit, bad.log_prob, bad.empty_answer, bad.all_masked
    if part == "sft":
        yield sft_training_config(config)
        return
    if part == "dpo":
        objective = config.preference.create_objective()
        yield preference_training_config(config), repr(objective), config.reference.path if objective.needs_reference else None
        return
    algorithm = config.algorithm
    training = rl_training_config(config, algorithm)
    shape, long = training.shape_reward, Sample(prompt="", tokens=(0,) * 9, loss_mask=(0.0,) + (1.0,) * 8, reward=1.0)
    yield replace(training, algorithm=None, shape_reward=None, bad_numbers=BadNumbers()), repr(algorithm), shape and shape(long)
    yield (
        replace(generation_config(config, 8), enable_thinking=None),
        config.enable_segment_wise_ppo,
        config.trajectories,
        config.reward.model,
    )
    if config.reward.model is not None:
        yield config.reward
    if "values" in algorithm.requires:
        rule = create_rule(**vars(config.critic.optimizer), total_steps=steps)
        yield replace(rule, max_grad_norm=clip or rule.max_grad_norm, schedule=len), [rule.schedule(step) for step in range(steps)]
        yield config.critic.path
    if "ref_log_probs" in algorithm.requires:
        yield config.reference.path
    if config.teacher.is_given:
        teacher, tops = config.teacher, "teacher_tops" in algorithm.requires
        yield teacher.models, teacher.url, teacher.servers, teacher.by, teacher.context, teacher.top_k if tops else None
        yield (teacher.kind, teacher.tokenizer, teacher.api_key_variable) if teacher.url or teacher.servers else teacher.dtype
    engines = [create_server_engine(config.engine, "http://127.0.0.1:1", {"KEY": "x"}) if config.engine.is_server else cast("Any", None)]
    task = Task(name="x", description="", train_prompts=(), heldout_prompts=(), sft_samples=(), reward_fn=len, max_tokens=8)
    rollout = replace(create_rollout_config(config, task, algorithm, engines, create_char_tokenizer()), generate_fn=len)
    agents = config.agent.is_used and config.agent.on_error == "drop"
    drops = agents or (is_judged(config) and config.reward.on_error == "drop") or config.episode.on_environment_error == "drop"
    idle_filter = rollout.filter_fn is None and not drops
    yield replace(rollout, max_filter_attempts=1 if idle_filter else rollout.max_filter_attempts, reward=RewardConfig())
    if config.rl.asynchronous.enabled:
        executor = create_workflow_executor(
            DataBuffer([Prompt(content="")]), rollout, config.asynchronous, engines=engines, batches_per_version=config.rl.sync_every
        )
        yield executor.manager.limits, type(executor._parts.strategy), executor._parts.queue.maxsize
        told = config.asynchronous
        attempts = (told.max_attempts, told.retry_delay_s) if told.on_failure == "retry" else ()
        stale = (told.max_stale_attempts,) if told.on_stale == "retry" else ()
        missed = told.missed_segment if told.segment_wise else None
        yield told.when_queue_full, told.order, told.on_stale, told.on_failure, attempts, stale, missed
        yield told.rollout_timeout_s, told.patience_s, told.interrupts, told.checkpoint_in_flight
    engine = config.engine
    yield engine.weight_sync_mode, engine.kind
    if not engine.is_server:
        yield engine.max_slots, engine.prefix_cache_tokens, engine.precision(config.model.device)
        return
    client = cast("Any", engines[0])
    yield (
        engine.one_request_per_group,
        (
            client._requests._resends,
            client.weights._paths,
            client._server._deadlines,
            engine.api_key_variable,
            engine.precision(config.model.device),
            transfer_args(engine),
            engine.urls,
        ),
    )
    if engine.num_servers > 1 or len(engine.urls) > 1:
        yield create_fleet_config(config)
    if engine.launch:
        yield engine.startup_timeout_s, engine.num_servers
        yield create_server_config(engine, "model", {}, device=config.model.device)


def is_judged(config: Config) -> bool:
    """Whether a reward function is called."""
    own = config.reward.function is not None or config.reward.model is not None
    return own or (config.task not in EPISODE_TASKS and not config.agent.is_used)


def look(config: Config, mode: str, dry_run: bool) -> list[Any]:
    """Collect the values of observe(), and its error at the end if it raises one."""
    seen: list[Any] = []
    try:
        seen.extend(observe(config, mode, dry_run))
    except (ConfigError, DataError) as error:
        seen.append(str(error))
    return seen


def observe(config: Config, mode: str, dry_run: bool) -> Iterator[Any]:
    """Yield the values that the parts of a run are given, and at the end the facts of a dry run."""
    yield create_output_dir(replace(config, output_dir=config.output_dir or "x"), "now"), config.lora.create(config.seed)
    yield config.model.path or create_model_config(config.model, context_tokens(config)).to_dict()
    for part in mode.split("+"):
        yield from observe_part(config, part)
    if config.task in EPISODE_TASKS:
        yield replace(
            episode_config(config), max_retries=0 if config.episode.on_environment_error != "retry" else config.episode.max_retries
        )
    if "rl" in mode or config.task != "jsonl" or (config.data.eval_path and mode != "dpo"):  # there is something to evaluate on
        evaluated = generation_config(config, 8).sampling_params()
        yield config.evaluation, evaluated.new(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), config.reward.function
        if config.evaluation.sampled:
            yield evaluated
        if "sft" in mode or "dpo" in mode:
            yield config.engine.max_slots, config.engine.prefix_cache_tokens
        if is_judged(config):
            rewards = reward_config(config)
            yield rewards.timeout_s, rewards.on_error, rewards.max_retries if rewards.on_error == "retry" else None
        if config.reward.function is not None:
            yield type(load_task_reward(config.reward))
    if config.agent.is_used:
        agent = config.agent
        generate = cast("Any", create_agents(config, [cast("Any", None)], create_char_tokenizer(), SamplingParams(), {}, {}))
        yield generate._program, generate._gateway.chat
        yield replace(generate._config, max_retries=agent.max_retries if agent.on_error == "retry" else 0)
    if config.task == "grid_world":
        yield create_world(config)
    if config.task in ("jsonl", "gsm8k", "environment"):
        task = create_task(config, create_char_tokenizer(), mode)
        yield task.train_prompts, task.heldout_prompts, task.sft_samples, task.description, task.preferences, task.heldout_preferences
    if config.backend.kind == "fsdp":
        yield fsdp_config(config), config.backend.timeout_s
    if config.model.path is not None:
        yield template_kwargs(config)
    facts = derive_numbers(config, mode)
    yield {name: fact for name, fact in facts.items() if dry_run or not name.startswith(("memory", "traffic"))}


@functools.cache
def make_scenario(name: str, directory: Path) -> tuple[Config, dict[str, Any]]:
    """The configuration of a scenario, and its options."""
    config = make(SCENARIOS[name][2], directory)
    return config, dict(list_options(config))


@functools.cache
def look_at_scenario(name: str, directory: Path) -> Any:
    mode, dry_run, _ = SCENARIOS[name]
    return look(make_scenario(name, directory)[0], mode, dry_run)


@pytest.mark.slow
@pytest.mark.parametrize("option", EFFECTS)
def test_what_the_table_says_of_an_option_is_so(option: str, model_directory: Path):
    looked, refusals = {True: 0, False: 0}, 0
    for name, (mode, dry_run, settings) in SCENARIOS.items():
        config, options = make_scenario(name, model_directory)
        try:
            changed = make({**settings, option: change(option, options[option])}, model_directory)
            if "rl" in mode:
                _ = changed.algorithm
            idle = find_idle_options(changed, mode, defaults=[config], typed={option}, dry_run=dry_run)
        except ConfigError as error:
            parent, _, field = option.rpartition(".")
            names = [field, spell_option(option), *([parent] if "." in parent else [])]
            assert any(text in str(error) for text in names), f"{name}: {error}"
            refusals += 1
            continue
        is_idle = bool(idle)
        if looked[is_idle] == 2:
            continue
        looked[is_idle] += 1
        assert [found.name for found in idle] in ([], [option]), name
        if not is_idle and option in READ_BY:
            file, code = READ_BY[option]
            assert code in (ROOT / "integration" / file).read_text(), f"{file} does not read {option} as it did"
            continue
        differs = look_at_scenario(name, model_directory) != look(changed, mode, dry_run)
        assert differs is not is_idle, f"{option} in {name!r}: {'named as without effect, and has one' if is_idle else 'no effect seen'}"
    assert looked[True] + looked[False] + refusals, "no scenario has it, and none refuses it"


def test_every_option_of_the_command_stands_in_the_table():
    """A new one is to be put there, with what it needs to have an effect."""
    assert list(EFFECTS) != [] and set(EFFECTS) == {name for name, _ in list_options(Config())}
    own = {name for field in fields(command_line._Arguments) if (name := field.name) not in ("config", "config_file")}
    assert own | {"config"} == set(COMMAND_OPTIONS)
    assert all(effect.needs for effect in EFFECTS.values() if effect.holds is not Effect().holds), "say what the option needs"


def test_all_idle_options_are_named_in_one_warning_of_the_dry_run(capsys: pytest.CaptureFixture[str]):
    argv = ["--mode", "rl", "--engine.in-flight", "abort", "--engine.max-restarts", "5", "--sft.num-steps", "7", "--backend.timeout-s", "9"]
    assert main([*argv, "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning of options" in line]
    for text in (
        "--engine.in-flight 'abort' needs a server",
        "--engine.max-restarts 5 needs several launched servers",
        "--backend.timeout-s 9.0 needs",
    ):
        assert text in line
    assert "--sft.num-steps 7 needs SFT: --mode sft or sft+rl" in line


def test_a_run_logs_the_warning_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = ["--model.hidden-size", "32", "--model.intermediate-size", "32", "--model.num-layers", "1"]
    small = ["--sft.num-steps", "1", "--sft.batch-size", "2", "--evaluation.num-prompts", "2", "--num-threads", "1"]
    argv = ["--mode", "sft", *model, *small, "--output-dir", str(tmp_path / "run"), "--quiet", "--backend.timeout-s", "9"]
    assert main(argv) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "options without effect" in line]
    assert "WARNING integration.run.job" in line and "--backend.timeout-s 9.0 needs --backend.kind fsdp" in line
    assert [text for text in read_run(tmp_path / "run").warnings if text in line] == [line.partition(": ")[2]], "the report shows it"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--engine.tensor-parallel-size", "2"], r"engine.tensor_parallel_size is 2, which has no effect here: it needs a server"),
        (["--engine.path-map", "/a=/b"], r"engine.path_map is \('/a=/b',\), which has no effect here: it needs a server"),
        (["--engine.parity-action", "stop"], r"engine.parity_action is 'stop', which has no effect here: it needs --engine.parity-rows"),
        (["--rl.overlong-penalty", "0.5"], r"rl.overlong_penalty is 0.5, which has no effect here: it needs --rl.overlong-buffer"),
        (["--reward.model-device", "cuda"], r"reward.model_device is 'cuda', which has no effect here: it needs --reward.model"),
        (["--engine.cuda-graphs", "--model.device", "cpu"], r"engine.cuda_graphs is True, but the device of the model is 'cpu'"),
        (["--engine.cuda-graphs", "--model.device", "cuda", "--rl.router-replay"], r"cuda_graphs and rl.router_replay are both True"),
        (
            ["--engine.cuda-graphs", "--model.device", "cuda", "--engine.kind", "vllm", "--engine.launch"],
            r"engine.cuda_graphs is True, but engine.kind is 'vllm', a server",
        ),
    ],
)
def test_what_is_surely_a_mistake_is_refused(argv: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse_command_line(argv)


def test_cuda_graphs_reach_the_embedded_engine(monkeypatch: pytest.MonkeyPatch):
    config = parse_command_line(["--engine.cuda-graphs", "--model.device", "cuda", "--engine.dtype", "float32"]).config
    given: dict[str, Any] = {}
    monkeypatch.setattr(engines_module, "InProcessEngine", lambda *_, **options: given.update(options))
    engines_module.create_embedded_engine(config, create_tiny_model(), create_char_tokenizer())
    assert given["cuda_graphs"] is True and given["prefix_cache_tokens"] == config.engine.prefix_cache_tokens


def test_a_file_counts_like_flags_but_for_parts_that_the_command_leaves_out(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text("[sft]\nnum_steps = 7\n[engine]\nin_flight = 'abort'\n[hardware]\nmemory_gib = 80.0\n")
    argv = ["--config", str(file), "--mode", "rl"]
    assert [found.name for found in parse_command_line(argv).find_idle_options()] == ["engine.in_flight"]
    assert [found.name for found in parse_command_line([*argv, "--sft.num-steps", "8"]).find_idle_options()] == [
        "sft.num_steps",
        "engine.in_flight",
    ]
    assert parse_command_line(["--task", "grid_world", "--mode", "sft+rl"]).find_idle_options() == [], (
        "a task's own settings are not the user's"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "integration" / "configs").glob("*.*")), ids=lambda path: path.name)
@pytest.mark.parametrize("mode", ["sft", "rl", "sft+rl"])
def test_no_shipped_configuration_is_warned_of(path: Path, mode: str):
    command = parse_command_line(["--config", str(path), "--mode", mode])
    assert command.find_idle_options() == []
