"""The budget of a run in words: what --dry-run says of memory and traffic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch

from integration.budget import STATES, Part, Sharding, Training
from integration.budget_run import (
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
)
from integration.budget_sizes import ModelSizes, read_adapter_sizes, read_sizes
from integration.budget_traffic import Links
from integration.config import Config, count_greedy_samples, count_rl_updates, response_tokens
from integration.hardware import HardwareSection
from integration.models import read_model_config
from integration.rewards import find_reward_model
from rollouts.backends.factory import parse_device
from rollouts.backends.reward_models import check_reward_model
from rollouts.requirements import POLICY_COLUMNS

UNCOUNTED_KINDS = ("torch_func", "jax")
"""Of backends whose memory no formula here describes: both keep copies of the state, JAX whole matrices of attention as well."""
SORT_ROW_TOKENS = {"sort": 12, "sort-long": 16}  # prompt and answer of an average problem, rounded up
GIB = 2**30


def describe_budget(config: Config, mode: str, sizes: ModelSizes) -> dict[str, str]:
    """Memory of each process, whether it fits, and traffic, as facts."""
    work = read_workload(config, mode, sizes)
    roles = plan_roles(work)
    facts: dict[str, str] = {}
    if config.backend.kind in UNCOUNTED_KINDS:
        facts["memory"] = f"not computed for backend.kind {config.backend.kind}, which needs more than pytorch; nor whether it fits"
    for role in roles:
        is_server = role.name.startswith("each server")
        if role.count and (is_server or config.backend.kind not in UNCOUNTED_KINDS):
            facts |= describe_role(role, alone=work.num_ranks == 1 and not is_server)
    if config.backend.kind not in UNCOUNTED_KINDS:
        facts |= describe_fit(work, *find_memory(work.device, config.hardware), "rl" if "rl" in mode else "sft")
    links = read_links(config.hardware)
    for traffic in plan_traffic(work, links):
        facts[f"traffic of {traffic.name}"] = describe_traffic(traffic)
    return facts


def read_workload(config: Config, mode: str, sizes: ModelSizes) -> Workload:
    """A run of these settings, in the stage that needs most."""
    rl, engine = config.rl, config.engine
    in_rl = "rl" in mode
    requires = config.algorithm.requires if in_rl else frozenset[str]()
    row_tokens = PROMPT_TOKENS + response_tokens(config) if in_rl else sft_row_tokens(config)
    per_step = rl.prompts_per_step * rl.samples_per_prompt
    own = requires & set(POLICY_COLUMNS)
    single = rl.num_epochs * rl.num_minibatches == 1
    passes = 0 if not own or (single and own <= config.algorithm.loss_only) else 1
    return Workload(
        sizes=sizes,
        training=read_training(config, mode, sizes, row_tokens),
        device=find_device_type(config.model.device),
        has_reference="ref_log_probs" in requires,
        has_critic="values" in requires,
        reward=read_reward_model(config) if in_rl else None,
        embedded_slots=0 if engine.is_server or not in_rl else min(engine.max_slots, count_sequences(config)),
        kept_prompts=0 if engine.is_server or not in_rl else count_prompts(config),
        reference_is_policy=config.lora.rank > 0 and config.reference.path is None,
        num_servers=(len(engine.urls) or engine.num_servers) if engine.is_server and in_rl else 0,
        bucket_bytes=engine.weight_sync_mib * 2**20 if engine.weight_sync in ("memory", "group", "ipc") else 0,
        server_width=4 if engine.is_server and engine.precision(config.model.device) == "float32" else 2,
        server_ranks=engine.tensor_parallel_size,
        row_tokens=row_tokens,
        step_rows=per_step // rl.num_minibatches if in_rl else config.sft.batch_size,
        batch_rows=per_step if in_rl else 0,
        forward_passes=passes + ("values" in requires),
        updates_per_batch=count_rl_updates(config) // max(rl.num_steps - config.critic.warmup_steps, 1) if in_rl else 1,
    )


def read_training(config: Config, mode: str, sizes: ModelSizes, row_tokens: int) -> Training:
    """How the policy is trained: its largest micro-batch, precision and sharding."""
    rl, sft = config.rl, config.sft
    ranks = count_ranks(config) if config.backend.kind == "fsdp" else 1
    tokens = 0
    if "rl" in mode:
        step = rl.prompts_per_step * rl.samples_per_prompt // rl.num_minibatches * row_tokens
        tokens = max(row_tokens, min(rl.max_tokens_per_microbatch, ceil(step / ranks)))
    if "sft" in mode:
        row = sft_row_tokens(config)
        tokens = max(tokens, row, min(sft.max_tokens_per_microbatch, ceil(sft.batch_size * row / ranks)))
    lora = config.lora.create(config.seed)
    adapters = None if lora is None else read_adapter_sizes(sizes, lora)
    training = Training(tokens=tokens, precision=config.backend.compute_dtype, adapters=adapters)
    if config.backend.kind != "fsdp":
        return training
    fsdp = config.backend.fsdp
    precision = config.backend.compute_dtype if fsdp.mixed_precision is None else fsdp.mixed_precision
    return replace(training, precision=precision, sharding=Sharding(num_ranks=ranks, config=fsdp))


def count_sequences(config: Config) -> int:
    """Sequences that an engine is asked for at the same time: of a step, of an evaluation, or of an asynchronous run."""
    rl, heldout = config.rl, config.evaluation.num_prompts
    groups = ceil(rl.prompts_per_step * rl.over_sampling_factor)
    if config.asynchronous.enabled:
        groups = max(groups, config.asynchronous.concurrent_groups(rl.prompts_per_step * rl.sync_every))
    return max(groups * (rl.samples_per_prompt + count_greedy_samples(config.algorithm)), heldout)


def count_prompts(config: Config) -> int:
    """Prompts that an engine meets under one weight version, those of an evaluation with them."""
    rl = config.rl
    groups = ceil(rl.prompts_per_step * rl.over_sampling_factor) * rl.sync_every
    if config.asynchronous.enabled:
        groups = max(groups, config.asynchronous.concurrent_groups(rl.prompts_per_step * rl.sync_every))
    return groups + config.evaluation.num_prompts


def read_reward_model(config: Config) -> RewardModel | None:
    """The reward model of a run, unless it is on another GPU than the policy. Raises: ConfigError for a directory that is none."""
    section = config.reward
    if section.model is None:
        return None
    directory = check_reward_model(find_reward_model(section.model), trust_remote_code=config.model.trust_remote_code)
    device = config.model.device if section.model_device is None else section.model_device
    kinds = [find_device_type(name) for name in (device, config.model.device)]
    if device.removesuffix(":0") != config.model.device.removesuffix(":0") and kinds[0] != "cpu":
        return None
    return RewardModel(
        sizes=read_sizes(read_model_config(config, directory), trust_remote_code=config.model.trust_remote_code),
        width=4 if section.model_dtype == "float32" else 2,
        tokens=section.model_tokens_per_batch,
        on_host=kinds[0] != kinds[1],
    )


def find_device_type(device: str) -> str:
    """ "cuda:1" -> "cuda"; of "auto" what it finds here."""
    return parse_device("auto").type if device == "auto" else torch.device(device).type


def count_ranks(config: Config) -> int:
    """Training processes: as configured, else one for each GPU of this machine, else 1."""
    on_gpus = config.model.device != "cpu" and torch.cuda.is_available()
    return config.backend.num_processes or (torch.cuda.device_count() if on_gpus else 1)


def sft_row_tokens(config: Config) -> int:
    """Of a demonstration: the task's, the user's limit, or one response's."""
    return SORT_ROW_TOKENS.get(config.task) or config.data.max_length or PROMPT_TOKENS + response_tokens(config)


def describe_role(role: Role, *, alone: bool) -> dict[str, str]:
    """A line for each part of a process, states of one model together and taken apart below."""
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
"""Parts whose names here are shorter."""


def group_parts(parts: Iterable[Part]) -> list[tuple[str, list[Part]]]:
    """Parts by the model they are of, in order: "" = the policy's and the process's own."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        owner = part.name.partition(": ")[0] if part.name.startswith(("reference: ", "critic: ")) else ""
        groups.setdefault(owner, []).append(part)
    return list(groups.items())


def describe_fit(work: Workload, available: int | None, where: str, stage: str) -> dict[str, str]:
    """Whether training fits into so many bytes, and which micro-batch would."""
    needed, unit = needed_bytes(work), "all training processes on this machine" if work.device == "cpu" else "the fullest GPU"
    if available is None:
        return {"memory: fits": f"unknown: {unit} needs {format_bytes(needed)}, and {where}"}
    most = largest_microbatch(work, available)
    verdict = "yes" if needed <= available else "NO"
    advice = (
        f"--{stage}.max-tokens-per-microbatch could be up to {most:,}"
        if most
        else "no micro-batch fits: shard over more ranks, use LoRA, a smaller model, or move the engine out"
    )
    return {"memory: fits": f"{verdict}: {format_bytes(needed)} ({unit}) of {format_bytes(available)} ({where}); {advice}"}


def describe_traffic(traffic: Traffic) -> str:
    """Bytes and seconds in all, and what they are made of."""
    times = f"{traffic.times} x " if traffic.times > 1 else ""
    parts = ", ".join(f"{transfer.name} {format_bytes(transfer.size)}" for transfer in traffic.transfers)
    whose = "from rank 0 to all others" if traffic.name == ROWS else "for each rank"
    return f"{format_bytes(traffic.size)} {whose}, {traffic.seconds:.2g} s at these bandwidths: {times}({parts})"


def read_links(hardware: HardwareSection) -> Links:
    """Bandwidths from the user's settings."""
    return Links(node=hardware.node_gb_per_s * 1e9, network=hardware.network_gb_per_s * 1e9, ranks_per_node=hardware.ranks_per_node)


def find_memory(device: str, hardware: HardwareSection) -> tuple[int | None, str]:
    """Bytes that training may take on a device of this kind, None if nobody knows; and where the number is from."""
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


def format_bytes(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _read(path: str) -> list[str]:
    """Lines of a file of the system; none where there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
