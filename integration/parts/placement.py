"""GPUs of a run on this machine: those of the training processes and those of launched servers, decided before anything starts.

Training processes take the first visible GPUs, launched servers those behind them. A GPU that holds both needs a fraction of its memory for
the server, because a server takes nearly all of it by default and one of the two would end in the middle of a run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from integration.settings.config import Config
from integration.settings.sections.engine import EngineSection
from rollouts.errors import ConfigError
from rollouts.models.loading import find_device_name

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
PYTHON_VARIABLES = {"vllm": "VLLM_PYTHON", "sglang": "SGLANG_PYTHON"}
"""Environment variables that name the Python of an environment with the server."""

MEMORY_ARGS = ("--gpu-memory-utilization", "--mem-fraction-static")
"""Arguments of vLLM and SGLang for the fraction of a GPU's memory."""


@dataclass(frozen=True)
class Placement:
    """GPUs by the names that CUDA_VISIBLE_DEVICES takes."""

    training: tuple[str, ...]  # GPUs of the training processes and the reward model
    servers: tuple[str, ...]  # GPUs of the launched servers in order, tensor_parallel_size for each

    @property
    def shared(self) -> tuple[str, ...]:
        """GPUs of both."""
        return tuple(name for name in self.training if name in self.servers)


def list_visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """List the GPUs that this process sees, by name, in the order of torch's numbers."""
    visible = environment.get(GPU_VARIABLE)
    return tuple(map(str, range(torch.cuda.device_count()))) if visible is None else tuple(filter(None, visible.split(",")))


def count_server_gpus(config: Config) -> int:
    """Return the number of GPUs that launched servers need on this machine; 0 if no server is launched."""
    return config.engine.num_servers * config.engine.tensor_parallel_size if config.engine.launch else 0


def count_training_gpus(config: Config, num_visible: int) -> int:
    """Return the default number of training processes on a machine with GPUs: one for each GPU that no server needs, at least 1."""
    return max(1, num_visible - count_server_gpus(config))


def plan_placement(config: Config, gpus: tuple[str, ...], num_ranks: int) -> Placement:
    """Plan the GPUs of a run with launched servers. Pure function.

    Args:
        config: model.device is cuda or cuda:N, or auto on a machine with a GPU.
        gpus: the visible GPUs, at least 1.
        num_ranks: training processes on this machine.

    Raises: ConfigError if servers would need more GPUs than there are, or would share one with training without a fraction of its memory.
    """
    section = config.engine
    first = int(config.model.device.partition(":")[2] or 0)
    numbers = set(range(first, first + num_ranks))
    reward_device = config.reward.model_device or ""
    if config.reward.model is not None and reward_device.startswith("cuda:"):
        numbers.add(int(reward_device.removeprefix("cuda:")))
    training = tuple(gpus[number] for number in sorted(numbers) if number < len(gpus))
    free = tuple(name for name in gpus if name not in training)
    needed = count_server_gpus(config)
    chosen = section.gpus or (free if len(free) >= needed else (*free, *training))
    servers = tuple(",".join(assign_gpus(section.num_servers, section.tensor_parallel_size, chosen)).split(","))
    placement = Placement(training, servers)
    if placement.shared and not limits_memory(section):
        raise ConfigError(
            f"GPU {', '.join(placement.shared)} would hold training and a launched server, which takes nearly all of its memory: visible "
            f"are {', '.join(gpus)}, training is on {', '.join(training)}, and the servers need {needed}. Leave GPUs free (fewer "
            "--backend.num-processes, or other --engine.gpus), or share: --engine.memory-fraction 0.4"
        )
    if placement.shared and section.weight_sync == "group":
        raise ConfigError(
            f"engine.weight_sync is 'group', but GPU {', '.join(placement.shared)} holds training and a server, and NCCL refuses two "
            "members on one GPU: use ipc or disk, or other --engine.gpus"
        )
    return placement


def find_server_python(section: EngineSection, environment: Mapping[str, str]) -> str:
    """Return the Python interpreter with the server package."""
    return section.python or environment.get(PYTHON_VARIABLES[section.kind]) or sys.executable


def find_nccl_version(python: str) -> str | None:
    """Return the version of NCCL among the packages of an interpreter; None without one, or without the interpreter."""
    look = "import importlib.metadata as m; print(*(d.version for d in m.distributions() if d.name.startswith('nvidia-nccl-')))"
    try:
        found = subprocess.run([python, "-c", look], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.split()[0] if found.returncode == 0 and found.stdout.split() else None


def limits_memory(section: EngineSection) -> bool:
    """Whether the settings name the fraction of a GPU's memory that a server takes."""
    return section.memory_fraction is not None or any(argument.split("=")[0] in MEMORY_ARGS for argument in section.extra_args)


def choose_weight_sync(section: EngineSection, placement: Placement, *, same_nccl: Callable[[], bool]) -> Literal["group", "ipc", "disk"]:
    """Choose the transport of weights to launched servers on GPUs for engine.weight_sync auto.

    A group of trainer and servers if they have GPUs of their own and equal versions of NCCL; memory of the GPU for SGLang on a shared one;
    else the disk. vLLM reads memory of another process only if it accepts pickles from any local process, which takes an explicit ipc.

    Args:
        same_nccl: whether trainer and servers have the same NCCL; called only if that decides.
    """
    if not placement.shared and not section.explain_refusal("group") and same_nccl():
        return "group"
    on_one = set(placement.servers) <= set(placement.training)
    if on_one and section.kind == "sglang" and not section.explain_refusal("ipc"):
        return "ipc"
    return "disk"


def place_servers(config: Config, environment: Mapping[str, str], num_ranks: int, find_nccl: Callable[[str], str | None]) -> Config:
    """Fill in engine.gpus, engine.weight_sync and engine.sleep for the GPUs of this machine; nothing without launched servers or GPUs.

    Args:
        num_ranks: training processes on this machine.
        find_nccl: returns the version of NCCL in the environment of an interpreter, None if unknown.

    Raises: ConfigError as plan_placement.
    """
    gpus = list_visible_gpus(environment)
    if not config.engine.launch or not find_device_name(config.model.device).startswith("cuda") or not gpus:
        return config
    placement = plan_placement(config, gpus, num_ranks)
    section = replace(config.engine, gpus=placement.servers)

    def same_nccl() -> bool:
        version = find_nccl(sys.executable)
        return version is not None and version == find_nccl(find_server_python(section, environment))

    if section.weight_sync == "auto":
        section = replace(section, weight_sync=choose_weight_sync(section, placement, same_nccl=same_nccl))
    if section.sleep is None:
        section = replace(section, sleep=bool(placement.shared) and not config.asynchronous.enabled)
    return replace(config, engine=section)


def assign_gpus(num_servers: int, gpus_per_server: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each server: its own GPUs, in order. Pure function.

    Args:
        gpus: names of the usable GPUs.

    Raises: ConfigError if there are too few.
    """
    needed = num_servers * gpus_per_server
    if len(gpus) < needed:
        raise ConfigError(
            f"{num_servers} servers of {gpus_per_server} GPUs each need {needed}, but there are {len(gpus)} ({', '.join(gpus) or 'none'}): "
            "start fewer servers, or name the GPUs with --engine.gpus; a GPU named n times is shared by n servers"
        )
    return tuple(",".join(gpus[i * gpus_per_server : (i + 1) * gpus_per_server]) for i in range(num_servers))
