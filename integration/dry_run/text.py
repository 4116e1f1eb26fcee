"""The budget of a run as text: memory and traffic in the output of --dry-run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch

from integration.dry_run.layout import (
    PROMPT_TOKENS,
    ROWS,
    RewardModel,
    Role,
    Traffic,
    Workload,
    largest_microbatch,
    needed_bytes,
    plan_roles,
    plan_traffic,
    reward_parts,
)
from integration.dry_run.memory import FLOAT, MOMENTS_WIDTH, STATES, Part, Sharding, Training, measure_frozen_width
from integration.dry_run.sizes import ModelSizes, read_adapter_sizes, read_sizes
from integration.dry_run.traffic import Links
from integration.parts.model_settings import read_model_config
from integration.parts.placement import GPU_VARIABLE, count_training_gpus, limits_memory
from integration.parts.rewards import find_reward_model
from integration.settings.config import Config
from integration.settings.made.budgets import response_tokens
from integration.settings.made.library import count_greedy_samples, count_rl_updates, count_tops, find_teacher_models
from integration.settings.sections.backend import HardwareSection
from integration.settings.sections.episodes import EPISODE_TASKS
from rollouts.models.heads import check_reward_model
from rollouts.models.linear import LARGE_WEIGHT
from rollouts.models.loading import find_device_name
from rollouts.training.requirements import POLICY_COLUMNS

UNCOUNTED_KINDS = ("torch_func", "jax")
"""Kinds of backends without a memory estimate: both keep copies of the state, and JAX whole attention matrices."""
SORT_ROW_TOKENS = {"sort": 12, "sort-long": 16}  # tokens of prompt and answer of an average problem, rounded up
RETURNS_BLOCKS = "MALLOC_MMAP_THRESHOLD_"
"""Environment variable: block size from which glibc returns memory to the system. Without it the size grows up to 32 MiB."""
SERVER_SHARE = 0.92
"""Default fraction of GPU memory that vLLM takes; SGLang takes about as much."""
GIB = 2**30


def describe_budget(config: Config, mode: str, sizes: ModelSizes) -> dict[str, str]:
    """Return the memory of each process in the tightest stage, the fit of all stages, and the traffic, by name."""
    works = {stage: read_workload(config, stage, sizes) for stage in mode.split("+")}
    room = {stage: find_room(config, work) for stage, work in works.items()}
    tightest = max(works, key=lambda stage: needed_bytes(works[stage]) / (room[stage][0] or 1))
    work, last = works[tightest], works[mode.split("+")[-1]]
    counted = config.backend.kind not in UNCOUNTED_KINDS
    facts: dict[str, str] = {}
    if not counted:
        facts["memory"] = f"not computed for backend.kind {config.backend.kind}, which needs more than pytorch; nor whether it fits"
    elif len(works) > 1:
        needs = ", ".join(f"{stage.upper()} needs {format_bytes(needed_bytes(works[stage]))}" for stage in works)
        facts["memory"] = f"of the {tightest.upper()} stage, where it is tightest: {needs}"
    for role in [*(plan_roles(work) if counted else []), *(role for role in plan_roles(last) if not role.trains)]:
        facts |= describe_role(role, alone=work.num_ranks == 1 and role.trains)
    if counted:
        facts |= describe_fit(works, tightest, room)
    if last.reward is not None and last.reward_rank is None:
        facts |= describe_reward_fit(last.reward, *find_memory("cuda", config.hardware))
    for traffic in plan_traffic(last, read_links(config.hardware)):
        facts[f"traffic of {traffic.name}"] = describe_traffic(traffic)
    return facts


def read_workload(config: Config, stage: str, sizes: ModelSizes) -> Workload:
    """Return the workload of one stage of a run.

    Args:
        stage: sft, rl or dpo.
    """
    device = find_device(config.model.device)
    training = read_training(config, stage, sizes)
    shared = Workload(
        sizes=sizes,
        training=training,
        device=device.type,
        heap_has_gaps=RETURNS_BLOCKS not in os.environ,
        gpu=device.index or 0,
        ranks_per_node=config.hardware.ranks_per_node,
        row_tokens=stage_row_tokens(config, stage),
        engine_packs_from={"onednn": 0, "packed": LARGE_WEIGHT}.get(config.kernels),
        engine_width=4 if config.engine.precision(config.model.device) == "float32" else 2,
    )
    if stage != "rl":  # an embedded engine evaluates, whatever engine generates in the RL stage
        return replace(
            shared,
            embedded_slots=min(config.engine.max_slots, config.evaluation.num_prompts) if _answers_problems(config, stage) else 0,
            embedded_row_tokens=PROMPT_TOKENS + response_tokens(config),
            kept_tokens=min(config.engine.prefix_cache_tokens, config.evaluation.num_prompts * PROMPT_TOKENS),
            step_rows=_count_rows(config, stage),
            **_read_preference_reference(config, stage),
        )
    rl, engine, requires = config.rl, config.engine, config.algorithm.requires
    per_step = rl.prompts_per_step * rl.samples_per_prompt
    own, teachers = requires & set(POLICY_COLUMNS), find_teacher_models(config, requires)
    single = rl.num_epochs * rl.num_minibatches == 1
    passes = 0 if not own or (single and own <= config.algorithm.loss_only) else 1
    return replace(
        shared,
        has_reference="ref_log_probs" in requires,
        reference_width=4 if config.reference.dtype == "float32" else 2,
        teachers=tuple((f"teacher {name}".strip(), _read_sizes_of(config, path)) for name, path in teachers.items()),
        teacher_width=4 if config.teacher.dtype == "float32" else 2,
        teacher_tops=min(count_tops(config, requires), sizes.vocab_size),
        has_critic="values" in requires,
        critic_moments_width=MOMENTS_WIDTH[config.critic.optimizer.moments],
        reward=read_reward_model(config),
        embedded_slots=0 if engine.is_server else min(engine.max_slots, count_sequences(config)),
        kept_tokens=0 if engine.is_server else min(engine.prefix_cache_tokens, count_prompt_tokens(config, shared.row_tokens)),
        reference_is_policy=config.lora.rank > 0 and config.reference.path is None,
        num_servers=(len(engine.urls) or engine.num_servers) if engine.is_server else 0,
        bucket_bytes=engine.weight_sync_mib * 2**20 if engine.weight_sync in ("memory", "group", "ipc") else 0,
        server_ranks=engine.tensor_parallel_size,
        step_rows=per_step // rl.num_minibatches,
        batch_rows=per_step,
        forward_passes=passes + ("values" in requires),
        updates_per_batch=count_rl_updates(config) // max(rl.num_steps - config.critic.warmup_steps, 1),
    )


def _read_sizes_of(config: Config, path: str) -> ModelSizes:
    return read_sizes(read_model_config(config, Path(path)), trust_remote_code=config.model.trust_remote_code)


def _count_rows(config: Config, stage: str) -> int:
    """Return the rows of an optimizer step of SFT, or of preferences, whose pairs are two rows each."""
    if stage == "sft":
        return config.sft.batch_size
    return config.preference.batch_size * (1 if config.preference.loss == "kto" else 2)


def _answers_problems(config: Config, stage: str) -> bool:
    """Return whether the model of a stage without RL answers held-out problems: not where pairs of the user's are all that is read."""
    return stage != "dpo" or config.task != "jsonl" or None not in (config.preference.path, config.data.path)


def _read_preference_reference(config: Config, stage: str) -> dict[str, Any]:
    """Return the reference model that training on preferences keeps in memory."""
    own = config.preference.reference == "precomputed"
    if stage != "dpo" or not config.preference.needs_reference or own:
        return {}
    return {
        "has_reference": True,
        "reference_width": 4 if config.reference.dtype == "float32" else 2,
        "reference_is_policy": config.lora.rank > 0 and config.reference.path is None,
    }


def stage_row_tokens(config: Config, stage: str) -> int:
    """Return the maximum tokens of a training row."""
    return PROMPT_TOKENS + response_tokens(config) if stage == "rl" else sft_row_tokens(config)


def read_training(config: Config, stage: str, sizes: ModelSizes) -> Training:
    """Return the training of the policy in a stage: its largest micro-batch, precision and sharding."""
    rl, sft, row = config.rl, config.sft, stage_row_tokens(config, stage)
    ranks = count_ranks(config) if config.backend.kind == "fsdp" else 1
    rows, most, section = sft.batch_size, sft.max_tokens_per_microbatch, config.preference if stage == "dpo" else getattr(config, stage)
    if stage == "dpo":
        rows, most = _count_rows(config, stage), section.max_tokens_per_microbatch
    if stage == "rl":
        rows, most = rl.prompts_per_step * rl.samples_per_prompt // rl.num_minibatches, rl.max_tokens_per_microbatch
    tokens = max(row, min(most, ceil(rows * row / ranks)))
    lora = config.lora.create(config.seed)
    adapters = None if lora is None else read_adapter_sizes(sizes, lora)
    backend = config.backend
    training = Training(
        tokens=tokens,
        precision=backend.precision(config.model.device),
        adapters=adapters,
        master_width=FLOAT if backend.master_dtype == "float32" else 2,
        moments_width=MOMENTS_WIDTH[section.optimizer.moments],
        frozen_width=FLOAT if adapters is None or lora is None else measure_frozen_width(sizes, adapters, lora.base_dtype),
        keeps_inputs_alone=backend.gradient_checkpointing,
        device=find_device(config.model.device).type,
    )
    if backend.kind != "fsdp":
        return training
    fsdp = replace(backend.fsdp, gradient_checkpointing=backend.recomputes_activations)
    precision = training.precision if fsdp.mixed_precision is None else fsdp.mixed_precision
    return replace(training, precision=precision, sharding=Sharding(num_ranks=ranks, config=fsdp))


def count_sequences(config: Config) -> int:
    """Return the maximum number of concurrent sequences: of a step, an evaluation, or an asynchronous run."""
    rl, heldout = config.rl, config.evaluation.num_prompts
    groups = ceil(rl.prompts_per_step * rl.over_sampling_factor)
    if config.asynchronous.enabled:
        groups = max(groups, config.asynchronous.concurrent_groups(rl.prompts_per_step * rl.sync_every))
    return max(groups * (rl.samples_per_prompt + count_greedy_samples(config.algorithm)), heldout)


def count_prompt_tokens(config: Config, row_tokens: int) -> int:
    """Return the tokens of the prompts under one weight version, evaluation included; each turn of an episode begins as the one before.

    Args:
        row_tokens: maximum tokens of an episode.
    """
    rl = config.rl
    groups = ceil(rl.prompts_per_step * rl.over_sampling_factor) * rl.sync_every
    if config.asynchronous.enabled:
        groups = max(groups, config.asynchronous.concurrent_groups(rl.prompts_per_step * rl.sync_every))
    if config.task in EPISODE_TASKS:
        return (groups * rl.samples_per_prompt + config.evaluation.num_prompts) * row_tokens
    return (groups + config.evaluation.num_prompts) * PROMPT_TOKENS


def read_reward_model(config: Config) -> RewardModel | None:
    """Return the reward model of a run, if any. Raises: ConfigError for a directory without a reward model."""
    section = config.reward
    if section.model is None:
        return None
    directory = check_reward_model(find_reward_model(section.model), trust_remote_code=config.model.trust_remote_code)
    device = find_device(config.model.device if section.model_device is None else section.model_device)
    return RewardModel(
        sizes=read_sizes(read_model_config(config, directory), trust_remote_code=config.model.trust_remote_code),
        width=4 if section.model_dtype == "float32" else 2,
        tokens=section.model_tokens_per_batch,
        gpu=None if device.type == "cpu" else device.index or 0,
    )


def find_device(name: str) -> torch.device:
    """Return the torch device of a name: "cuda:1" even if this machine has no such GPU, "auto" = the device found here."""
    return torch.device(find_device_name(name))


def count_ranks(config: Config) -> int:
    """Return the number of training processes: as configured, else one per GPU of this machine that no server needs, else 1."""
    on_gpus = config.model.device != "cpu" and torch.cuda.is_available()
    return config.backend.num_processes or (count_training_gpus(config, torch.cuda.device_count()) if on_gpus else 1)


def sft_row_tokens(config: Config) -> int:
    """Return the tokens of a demonstration: the task's, the user's limit, or those of prompt and response."""
    return SORT_ROW_TOKENS.get(config.task) or config.data.max_length or PROMPT_TOKENS + response_tokens(config)


def describe_role(role: Role, *, alone: bool) -> dict[str, str]:
    """Return a line for each part of a process; the training state of a model is summed, then itemized."""
    prefix = "memory" if alone else f"memory of {role.name}"
    lines: dict[str, str] = {}
    for owner, parts in group_parts(role.parts):
        states = [part for part in parts if part.name.rpartition(": ")[2] in STATES]
        if len(states) > 1:
            title = {"": "training state", "critic": "critic's training state"}.get(owner, f"{owner}: state")
            lines[f"{prefix}: {title}"] = format_bytes(sum(part.size for part in states))
            for part in states:
                lines[f"{prefix}:   {owner}{' ' * bool(owner)}{part.name.rpartition(': ')[2]}"] = format_bytes(part.size)
        elif states:
            lines[f"{prefix}: {owner} weights"] = format_bytes(states[0].size)
        for part in parts:
            if part not in states:
                lines[f"{prefix}: {NAMES.get(part.name, part.name)}"] = format_bytes(part.size)
    count = f", in each of {role.count:,}" if role.count > 1 else ""
    lines[f"{prefix}: sum"] = format_bytes(role.total()) + count
    return lines


NAMES = {
    "engine: weights": "engine weights",
    "engine: keys and values": "keys and values",
    "engine: room in which they grow": "room in which they grow",
    "engine: keys and values of prompts": "keys and values of prompts that are kept",
}
"""Shorter names of some parts."""


def group_parts(parts: Iterable[Part]) -> list[tuple[str, list[Part]]]:
    """Group parts by their model, in order; "" = the policy and the process itself."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        owner = part.name.partition(": ")[0] if part.name.startswith(("reference: ", "critic: ", "teacher")) else ""
        groups.setdefault(owner, []).append(part)
    return list(groups.items())


def describe_fit(works: Mapping[str, Workload], tightest: str, room: Mapping[str, tuple[int | None, str]]) -> dict[str, str]:
    """Describe whether training fits, and the largest micro-batches that fit.

    Args:
        works: workload of each stage, by name.
        tightest: the stage with the largest share of its available memory.
        room: find_room of each stage, by name.
    """
    work, (available, where) = works[tightest], room[tightest]
    needed, unit = needed_bytes(work), "all training processes on this machine" if work.device == "cpu" else "the fullest GPU"
    if available is None:
        return {"memory: fits": f"unknown: {unit} needs {format_bytes(needed)}, and {where}"}
    verdict = "yes" if needed <= available else "NO"
    most = {stage: largest_microbatch(works[stage], room[stage][0] or 0) for stage in works}
    names = {stage: "preference" if stage == "dpo" else stage for stage in works}
    advice = "; ".join(f"--{names[stage]}.max-tokens-per-microbatch could be up to {tokens:,}" for stage, tokens in most.items())
    if not all(most.values()):
        advice = "no micro-batch fits: shard over more ranks, use LoRA, a smaller model, or move the engine out"
    return {"memory: fits": f"{verdict}: {format_bytes(needed)} ({unit}) of {format_bytes(available)} ({where}); {advice}"}


def describe_reward_fit(reward: RewardModel, available: int | None, where: str) -> dict[str, str]:
    """Describe whether a reward model fits on a GPU without training."""
    needed, name = sum(part.size for part in reward_parts(reward)), "memory of the reward model's GPU: fits"
    if available is None:
        return {name: f"unknown: {where}"}
    if needed <= available:
        return {name: f"yes: {format_bytes(needed)} of {format_bytes(available)} ({where})"}
    advice = "use --reward.model-dtype bfloat16, fewer --reward.model-tokens-per-batch, or a smaller model"
    return {name: f"NO: {format_bytes(needed)} of {format_bytes(available)} ({where}); {advice}"}


def describe_traffic(traffic: Traffic) -> str:
    """Describe the total bytes and seconds of a traffic, and its parts."""
    times = f"{traffic.times} x " if traffic.times > 1 else ""
    parts = ", ".join(f"{transfer.name} {format_bytes(transfer.size)}" for transfer in traffic.transfers)
    whose = "from rank 0 to all others" if traffic.name == ROWS else "for each rank"
    return f"{format_bytes(traffic.size)} {whose}, {traffic.seconds:.2g} s at these bandwidths: {times}({parts})"


def read_links(hardware: HardwareSection) -> Links:
    """Return the bandwidths of the user's settings."""
    return Links(node=hardware.node_gb_per_s * 1e9, network=hardware.network_gb_per_s * 1e9, ranks_per_node=hardware.ranks_per_node)


def find_memory(device: str, hardware: HardwareSection) -> tuple[int | None, str]:
    """Return the bytes available to training on a kind of device, None if unknown, and the source of the number."""
    if hardware.memory_gib is not None:
        return int(hardware.memory_gib * GIB), "hardware.memory_gib"
    if device == "cuda":
        if not torch.cuda.is_available():
            return None, "there is no GPU here to ask: give --hardware.memory-gib"
        return int(torch.cuda.get_device_properties(0).total_memory), torch.cuda.get_device_name(0)
    if device != "cpu":
        return None, f"the memory of {device} is not known: give --hardware.memory-gib"
    limits = [int(line.split()[1]) * 1024 for line in _read("/proc/meminfo") if line.startswith("MemTotal:")]
    limits += [int(line) for line in _read("/sys/fs/cgroup/memory.max") if line.strip().isdigit()]
    return (min(limits), "memory of this machine") if limits else (None, "its memory is not known: give --hardware.memory-gib")


def find_room(config: Config, work: Workload) -> tuple[int | None, str]:
    """Return the bytes available to training in a stage, less those of servers launched on the same GPUs, and the source of the number."""
    engine = config.engine
    available, where = find_memory(work.device, config.hardware)
    if available is None or not (engine.launch and work.num_servers and work.device == "cuda"):
        return available, where
    visible = os.environ.get(GPU_VARIABLE)
    names = visible.split(",") if visible else [str(gpu) for gpu in range(1024)]
    trained = names[work.gpu : work.gpu + min(work.num_ranks, work.ranks_per_node)]
    needed = work.num_servers * work.server_ranks
    if visible:
        free = [name for name in names if name not in trained]
        behind = free if len(free) >= needed else [*free, *trained]
    else:  # the GPUs of another machine: enough of them, unless a fraction of their memory says that they are shared
        behind = trained if limits_memory(engine) else []
    served = engine.gpus or behind[:needed]
    together = max((list(served).count(name) for name in trained), default=0)
    if not together:
        return available, where
    taken = min(1.0, together * (SERVER_SHARE if engine.memory_fraction is None else engine.memory_fraction))
    what = f"{where}, less the {taken:.0%} that a server takes of the same GPU: see engine.memory_fraction and engine.gpus"
    return int(available * (1 - taken)), what


def format_bytes(size: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _read(path: str) -> list[str]:
    """Return the lines of a system file; none if it does not exist."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
