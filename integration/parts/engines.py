"""The inference engines of a run: the embedded engine, or launched or running servers.

Of the command, only this module turns the name of an engine into an object; rollouts/trainer/engines.py does so for the trainer facade.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
import trio

from integration.parts.placement import (
    GPU_VARIABLE,
    PYTHON_VARIABLES,
    assign_gpus,
    find_nccl_version,
    find_server_python,
    list_visible_gpus,
)
from integration.parts.server_fleet import ServerUpkeep, create_news, open_server_fleet, spread_config
from integration.settings.config import Config
from integration.settings.sections.engine import ENGINE_KINDS, ENGINE_OPTIONS, FLEET_OPTIONS, EngineSection
from integration.settings.sections.episodes import EPISODE_TASKS
from rollouts.backends.lora.adapters import copy_without_adapters
from rollouts.backends.pytorch.files import export_model
from rollouts.engines.fleet.channel import FleetChannel
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig
from rollouts.engines.fleet.routing import group_by_prompt, group_by_request_id
from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.launch.commands import ServerConfig, build_environment
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.protocol import InferenceEngine, WeightChannel
from rollouts.engines.sglang.channels import open_http_channel, open_shared_memory, open_weight_group
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.channels import open_vllm_group, open_vllm_ipc
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.weights.nccl import load_nccl
from rollouts.engines.weights.path_map import PathMap
from rollouts.engines.weights.server_weights import begin_weight_versions
from rollouts.errors import ConfigError, EngineError
from rollouts.models.loading import parse_device
from rollouts.output_files import explain_writes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


MIB = 2**20


@asynccontextmanager
async def open_weight_channel(
    config: Config, engines: Sequence[InferenceEngine], environment: Mapping[str, str]
) -> AsyncGenerator[WeightChannel | None]:
    """Open the channel of weights to a run's engines; None if they need none. Raises ConfigError, EngineError."""
    section = config.engine
    if section.weight_sync_mode != "channel":
        yield None
        return
    fleet = engines[0] if isinstance(engines[0], EngineFleet) else None
    members: Sequence[InferenceEngine] = engines if fleet is None else fleet.engines
    sglang = [engine for engine in members if isinstance(engine, SGLangEngine)]
    vllm = [engine for engine in members if isinstance(engine, VLLMEngine)]
    assert len(sglang) == len(members) or len(vllm) == len(members), "the engines of a run are of one kind"
    where, how = parse_device(config.model.device), section.weight_sync
    common: dict[str, Any] = {"bucket_bytes": section.weight_sync_mib * MIB, "dtype": section.precision(config.model.device)}
    async with AsyncExitStack() as stack:
        if how == "memory":
            opened = open_http_channel(sglang, **common)
        elif how == "ipc":
            devices = find_server_devices(section, where, environment)
            opened = open_vllm_ipc(vllm, devices, **common) if vllm else open_shared_memory(sglang, devices, **common)
        elif vllm:
            opened = open_vllm_group(vllm, device=where, timeout_s=section.deadlines.join_s, option=ENGINE_OPTIONS["join_s"], **common)
        else:
            backend = "gloo" if where.type == "cpu" else "nccl"
            common |= {"master_address": section.weight_sync_address, "timeout_s": section.deadlines.join_s}
            common["option"] = ENGINE_OPTIONS["join_s"]
            opened = open_weight_group(sglang, backend=backend, device=where, **common)
        channel = await stack.enter_async_context(opened)
        yield channel if fleet is None else FleetChannel(fleet, members, channel)


def check_weight_sync(section: EngineSection, *, device: str) -> None:
    """Check before any training that the engines support the weight sync. device: model.device. Raises ConfigError."""
    where, how = parse_device(device).type, section.weight_sync
    if section.kind == "vllm" and how in ("group", "ipc"):
        if where == "cpu":
            what = "over NCCL" if how == "group" else "through memory of its GPU"
            raise ConfigError(
                f"engine.weight_sync is {how!r}, but vLLM accepts weights {what} only, and the model is on the CPU: use disk, or "
                "--model.device cuda"
            )
        if how == "group":
            try:
                load_nccl()
            except EngineError as error:
                raise ConfigError(f"engine.weight_sync is {how!r}, but {error}") from error


def find_server_devices(section: EngineSection, device: torch.device, environment: Mapping[str, str]) -> list[torch.device]:
    """Return the devices of a run's servers on this machine, as numbered in this process. Raises ConfigError for an invisible device."""
    if device.type == "cpu":
        return [device]
    names = list_visible_gpus(environment)
    wanted = section.gpus or names[: section.tensor_parallel_size * section.num_servers]
    hidden = [name for name in wanted if name not in names]
    if hidden:
        raise ConfigError(
            f"engine.gpus has {hidden[0]!r}, which this process does not see ({', '.join(names) or 'none'}): with engine.weight_sync ipc "
            "the trainer writes into memory of every GPU of the servers"
        )
    return [torch.device("cuda", names.index(name)) for name in wanted]


ServerEngine: TypeAlias = SGLangEngine | VLLMEngine

INITIAL_MODEL = "initial_model"


def create_embedded_engine(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, is_trained: bool = True
) -> InProcessEngine:
    """Create the embedded engine over a copy of the model's weights, or over the model itself if it is not trained, in engine.dtype."""
    own: torch.nn.Module = copy_without_adapters(model) if is_trained else model
    engine = config.engine
    own = cast("PreTrainedModel", own.to(getattr(torch, engine.precision(config.model.device))))
    options: dict[str, Any] = {"max_slots": engine.max_slots, "seed": config.seed, "record_experts": config.rl.router_replay}
    options |= {"prefix_cache_tokens": engine.prefix_cache_tokens, "cuda_graphs": engine.cuda_graphs}
    return InProcessEngine(own, tokenizer, kernels=config.kernels, **options)


@asynccontextmanager
async def open_engines(
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    *,
    source: Path | None,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    is_trained: bool = True,
) -> AsyncGenerator[list[InferenceEngine]]:
    """Open the engines of the RL stage, with the model's weights as version 0.

    Args:
        model, tokenizer: the policy at the start of the stage.
        output_dir: directory for the server's log, and for the model if no directory of it exists.
        source: the directory that the model was loaded from; None = created here.
        environment: environment variables for launched servers.
        say: prints the progress of a server's start.
        is_trained: whether the model itself is trained, so that the embedded engine needs a copy.

    Raises: ConfigError, EngineError.
    """
    section = config.engine
    if section.kind == "inprocess":
        async with create_embedded_engine(config, model, tokenizer, is_trained=is_trained) as engine:
            yield [engine]
        return
    initial = await trio.to_thread.run_sync(
        partial(prepare_initial_model, model, tokenizer, source, output_dir / INITIAL_MODEL, copies=bool(section.path_map))
    )
    async with AsyncExitStack() as stack:
        create_client = partial(
            create_server_engine,
            section,
            environment=environment,
            vocab_size=model.config.get_text_config().vocab_size,
            record_experts=config.rl.router_replay,
        )
        if section.launch and section.num_servers > 1:
            yield [await stack.enter_async_context(_launch_fleet(config, initial, output_dir, create_client, environment, say))]
            return
        if section.launch:
            server = create_run_server(config, initial, environment)
            log_path = output_dir / f"{section.kind}.log"
            say(f"starting {section.kind} (log: {log_path})")
            started = time.monotonic()
            opened = launch_server(
                server,
                log_path,
                environment=environment,
                startup_s=section.startup_timeout_s,
                on_progress=create_news(section.kind, say),
                deadlines=create_deadlines(section),
            )
            urls: Sequence[str] = [(await stack.enter_async_context(opened)).url]
            say(f"{section.kind} is ready at {urls[0]} after {time.monotonic() - started:.0f} s")
        else:
            urls = section.urls
        engines = [await stack.enter_async_context(create_client(url)) for url in urls]
        if not section.launch:  # replace the model they serve
            for engine in engines:
                await engine.update_weights_from_checkpoint(initial)
        if len(engines) == 1:
            yield list(engines)
            return
        fleet = EngineFleet(engines, config=create_fleet_config(config), initial_weights=initial, say=say)
        yield [await stack.enter_async_context(fleet)]


def create_fleet_config(config: Config) -> FleetConfig:
    """Return the configuration of a fleet: the distribution of requests and weights over servers."""
    section = config.engine
    restarts = section.launch and section.on_server_death == "restart"
    own, outage_s = section.deadlines, section.startup_timeout_s if restarts else FleetConfig().patience_s
    return FleetConfig(
        group_of=group_by_prompt if config.task not in EPISODE_TASKS else group_by_request_id,
        wait_s=own.queue_s,
        patience_s=outage_s if own.outage_s is None else own.outage_s,
        check_s=own.health_s,
        ready_s=own.ready_s,
        updates_at_once=section.updates_at_once,
        exclude_failed=section.on_server_death != "stop",
        options=FLEET_OPTIONS,
    )


@asynccontextmanager
async def _launch_fleet(
    config: Config,
    initial: Path,
    output_dir: Path,
    create_client: Callable[[str], ServerEngine],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> AsyncGenerator[EngineFleet]:
    """Open engine.num_servers servers, each with its own log and, on GPUs, its own GPUs."""
    section = config.engine
    server = create_run_server(config, initial, environment)
    async with open_server_fleet(
        spread_config(server, choose_gpus(section, server, environment), section.num_servers),
        create_client,
        log_paths=[output_dir / f"{section.kind}_{i}.log" for i in range(section.num_servers)],
        upkeep=ServerUpkeep(
            environment=environment,
            max_restarts={"restart": section.max_restarts, "go_on": 0}.get(section.on_server_death),
            startup_s=section.startup_timeout_s,
            deadlines=create_deadlines(section),
        ),
        fleet_config=create_fleet_config(config),
        initial_weights=initial,
        say=say,
    ) as fleet:
        yield fleet


def choose_gpus(section: EngineSection, server: ServerConfig, environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """CUDA_VISIBLE_DEVICES of each server; None on a CPU. Raises ConfigError if there are too few."""
    if server.device == "cpu":
        return None
    gpus = section.gpus or list_visible_gpus(environment)
    return assign_gpus(section.num_servers, section.tensor_parallel_size, gpus)


def check_engine(section: EngineSection, environment: Mapping[str, str], *, device: str) -> None:
    """Check before any training that the engines can start.

    Args:
        device: model.device.

    Raises: ConfigError.
    """
    if not section.is_server:
        return
    create_server_engine(section, "http://127.0.0.1", environment)
    check_weight_sync(section, device=device)
    if not section.launch:
        return
    server = create_server_config(section, "model", environment, device=device)
    if section.num_servers > 1:
        spread_config(server, choose_gpus(section, server, environment), section.num_servers)
    advice = f"name the Python interpreter of an environment with it: --engine.python or {PYTHON_VARIABLES[section.kind]}"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({section.kind!r}) is None)"
    try:
        found = subprocess.run([server.python, "-c", look], env=build_environment(server, environment), stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{section.kind} cannot be started with {server.python}: {error}; {advice}") from error
    if found.returncode != 0:
        raise ConfigError(f"{server.python} has no {section.kind}: {advice}")
    if section.weight_sync == "group" and server.device == "cuda":
        ours, theirs = find_nccl_version(sys.executable), find_nccl_version(server.python)
        if None not in (ours, theirs) and ours != theirs:
            raise ConfigError(
                f"engine.weight_sync is 'group', but NCCL is {ours} here and {theirs} with {server.python}, and members of a group need "
                "the same: install equal versions of nvidia-nccl, or use disk"
            )


def create_server_engine(section: EngineSection, url: str, environment: Mapping[str, str], **options: Any) -> ServerEngine:
    """Create the client of a server.

    Args:
        options: arguments of the client, in place of those of the section.

    Raises: ConfigError if the variable for its API key is not set.
    """
    kinds: dict[str, Callable[..., ServerEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
    settings: dict[str, Any] = {
        "in_flight": section.in_flight,
        "allow_cast": True,  # the trainer's weights are float32, a server's often bfloat16
        "api_key": read_api_key("engine", section.api_key_variable, environment),
        "path_map": PathMap.parse(section.path_map),
        "deadlines": create_deadlines(section),
    }
    raise_open_file_limit()
    return kinds[section.kind](url, **{**settings, **options})


def read_api_key(section: str, variable: str | None, environment: Mapping[str, str]) -> str | None:
    """Read the API key of the servers of a section. Raises ConfigError if its variable is not set."""
    if variable is not None and variable not in environment:
        raise ConfigError(
            f"{section}.api_key_variable is {variable!r}, but there is no such environment variable: export the key under this name"
        )
    return None if variable is None else environment[variable]


def create_deadlines(section: EngineSection) -> Deadlines:
    """Return the deadlines of calls to a server, with the options that set them."""
    own = section.deadlines
    return Deadlines(
        generate_s=section.generate_timeout_s,
        control_s=own.control_s,
        sync_s=section.sync_timeout_s,
        health_s=own.health_s,
        connect_s=own.connect_s,
        options=ENGINE_OPTIONS,
    )


def raise_open_file_limit(most: int = 65536) -> None:
    """Raise the limit of open files to `most`, if the system allows: each request in flight is one, and shells allow 1,024."""
    if os.name == "nt":  # Windows has neither this limit nor the module
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems have an undocumented limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def create_server_config(section: EngineSection, model_path: str, environment: Mapping[str, str], *, device: str) -> ServerConfig:
    """Return the configuration of a launched server.

    Args:
        device: model.device: cpu, cuda, cuda:N, auto.

    Raises: ConfigError for tensor parallelism on a CPU, and for a missing GPU.
    """
    kind: Literal["cuda", "cpu"] = "cpu" if parse_device(device).type == "cpu" else "cuda"
    if kind == "cpu" and section.tensor_parallel_size != 1:
        raise ConfigError(
            f"engine.tensor_parallel_size is {section.tensor_parallel_size}, but the model is on the CPU: use 1, or --model.device cuda"
        )
    python = find_server_python(section, environment)
    assert section.kind in ENGINE_KINDS, f"{section.kind!r} is not a kind of engine"
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if section.kind == "vllm" and section.weight_sync == "ipc" else {}
    if kind == "cuda" and section.gpus and section.num_servers == 1:  # several servers get theirs from spread_config
        env[GPU_VARIABLE] = assign_gpus(1, section.tensor_parallel_size, section.gpus)[0]
    return ServerConfig(
        kind="vllm" if section.kind == "vllm" else "sglang",
        model_path=model_path,
        python=python,
        port=section.port,
        device=kind,
        dtype=section.precision(device),
        tensor_parallel_size=section.tensor_parallel_size,
        context_length=section.context_length,
        max_num_seqs=section.max_num_seqs,
        memory_fraction=section.memory_fraction,
        can_sleep=bool(section.sleep) and kind == "cuda",
        extra_args=(*transfer_args(section), *section.extra_args),
        env=env,
    )


def create_run_server(config: Config, initial: Path, environment: Mapping[str, str]) -> ServerConfig:
    """Return the configuration of a server that a run launches for the model in `initial`. Raises ConfigError as create_server_config."""
    server = create_server_config(config.engine, str(initial), environment, device=config.model.device)
    return replace(server, record_experts=config.rl.router_replay)


def transfer_args(section: EngineSection) -> tuple[str, ...]:
    """Return the arguments of a server that receives weights otherwise than from a directory."""
    transports = {"group": "nccl", "ipc": "ipc"}
    if section.kind != "vllm" or section.weight_sync not in transports:
        return ()
    return ("--weight-transfer-config", json.dumps({"backend": transports[section.weight_sync]}))


def prepare_initial_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | None, target: Path, *, copies: bool = False
) -> Path:
    """Create a model directory with weight version 0: links to the files of `source` or, without one, the saved model.

    Args:
        copies: copy instead of link, for servers that see the files under another path.
    """
    with explain_writes(target):
        target.mkdir(parents=True, exist_ok=True)
        if source is None:
            export_model(model, tokenizer, target)
        begin_weight_versions(target, source, copies=copies)
    return target
