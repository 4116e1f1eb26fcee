"""The inference engine, its servers, their deadlines, and the way of new weights to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from integration.settings.sections.addresses import check_address
from integration.settings.sections.descriptions import describe_section
from rollouts.config import ParityConfig, check_count, check_positive, check_setting
from rollouts.config_files import is_number
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import ConfigError, redact

ENGINE_KINDS = ("inprocess", "vllm", "sglang")

ENGINE_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "startup_s": "--engine.startup-timeout-s",
        "generate_s": "--engine.generate-timeout-s",
        "sync_s": "--engine.sync-timeout-s",
        "control_s": "--engine.deadlines.control-s",
        "health_s": "--engine.deadlines.health-s",
        "connect_s": "--engine.deadlines.connect-s",
        "join_s": "--engine.deadlines.join-s",
    }
)
"""Options of the fields of Deadlines, and of the limits of a start and of meeting in a process group, for messages."""

FLEET_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "check_s": "--engine.deadlines.health-s",
        "wait_s": "--engine.deadlines.queue-s",
        "patience_s": "--engine.deadlines.outage-s",
        "ready_s": "--engine.deadlines.ready-s",
    }
)
"""Options of the fields of FleetConfig, for messages."""


@dataclass(frozen=True, kw_only=True)
class DeadlinesSection:
    """Deadlines of calls to servers, in seconds; those of an answer, of new weights and of a start are engine.*_timeout_s."""

    connect_s: float = 10.0  # seconds for a connection to a server
    control_s: float = 60.0  # seconds for a server to pause, resume, abort, flush its cache, or tell the version of its weights
    health_s: float = 30.0  # seconds for a health check, and for each probe of one of several servers, which is left out if it fails
    join_s: float = 120.0  # seconds until trainer and servers have met in a process group, and for each bucket of weights sent over it
    queue_s: float = 3600.0  # seconds that a request may wait for a place at one of several servers
    # seconds that requests and weight syncs wait while none of several servers answers; None = 60, or engine.startup_timeout_s where the
    # run restarts servers
    outage_s: float | None = None
    ready_s: float = 300.0  # seconds until all of several servers are ready for weights over a process group or through shared memory

    def __post_init__(self) -> None:
        for deadline in fields(self):
            value = getattr(self, deadline.name)
            if deadline.name == "outage_s" and value is None:
                continue
            good = is_number(value) and 0.0 < value < math.inf
            check_setting(good, f"engine.deadlines.{deadline.name}", value, "a finite number of seconds above 0")


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """The inference engine: embedded in this process, or SGLang or vLLM servers, launched by the run or already running."""

    kind: str = "inprocess"  # inprocess (the embedded engine), vllm, or sglang
    max_slots: int = 512  # maximum concurrent sequences of the embedded engine
    # tokens of prompts whose keys and values the embedded engine keeps for prompts that begin alike, such as the next turn; 0 = none
    prefix_cache_tokens: int = 65_536
    cuda_graphs: bool = False  # record the decode steps of the embedded engine on a GPU as CUDA graphs
    urls: tuple[str, ...] = ()  # running servers, http://host:port; several serve as one engine
    launch: bool = False  # launch servers for this run and stop them at its end
    num_servers: int = 1  # servers to launch; several serve as one engine
    # GPU ids of the launched servers in order, tensor_parallel_size for each; () = the visible GPUs behind those of training
    gpus: tuple[str, ...] = ()
    # reaction to the death of one of several launched servers: restart = restart it; go_on = go on with the others; stop = end the run, as
    # the death of a single server always does
    on_server_death: Literal["restart", "go_on", "stop"] = "restart"
    max_restarts: int = 3  # maximum restarts of each launched server
    updates_at_once: int | None = None  # servers that load new weights at a time while the others generate; None = all at once
    python: str | None = None  # Python interpreter with the server package; None = VLLM_PYTHON or SGLANG_PYTHON, else this one
    api_key_variable: str | None = None  # environment variable with the API key of the servers; None = no key
    port: int | None = None  # port of the launched server; None = a free port
    # dtype of the engine's weights and caches, embedded or launched: auto = float32 on a CPU, bfloat16 on a GPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: int = 1  # GPUs per server
    context_length: int | None = None  # maximum tokens of prompt and response together; None = the model's context
    max_num_seqs: int | None = None  # maximum concurrent sequences of a server; None = the server's default
    # fraction of GPU memory for a server, weights included; None = the server's default, nearly all; required on a GPU of training
    memory_fraction: float | None = None
    # let servers release the memory of their GPU while the policy is trained; None = True for launched servers on a GPU of training with
    # synchronous rollouts
    sleep: bool | None = None
    # requests in progress at a weight sync: continue = they go on under the new weights; abort = they are aborted and sent again
    in_flight: Literal["continue", "abort"] = "continue"
    # transport of new weights to the engines: disk, memory, group (a process group), ipc (shared memory of one machine); auto = memory for
    # the embedded engine, group for launched servers on GPUs of their own with the trainer's NCCL, ipc for SGLang on the trainer's GPU, and
    # disk otherwise
    weight_sync: Literal["auto", "disk", "memory", "group", "ipc"] = "auto"
    weight_sync_address: str = "127.0.0.1"  # address of this machine as seen by the servers, for weight_sync group
    weight_sync_mib: int = 256  # MiB of weights sent at a time; uses twice as much memory
    path_map: tuple[str, ...] = ()  # mount points of a shared disk, /prefix/here=/prefix/on-server, for weight_sync disk
    one_request_per_group: bool = False  # request all samples of a prompt at once, which costs less per sample
    startup_timeout_s: float = 900.0  # seconds to wait for a launched server to become healthy
    generate_timeout_s: float = 3600.0  # seconds to wait for the answer of a server to one request of rollouts
    sync_timeout_s: float = 600.0  # seconds to wait for a server to load new weights
    deadlines: DeadlinesSection = field(
        default_factory=DeadlinesSection, metadata=describe_section("seconds to wait for everything else that a server does")
    )
    extra_args: tuple[str, ...] = ()  # further arguments of the launched server; write --engine.extra-args=--flag=value
    # rows of each batch on which engine and trainer log-probs are compared; None = 8 for servers, 0 for the embedded engine
    parity_rows: int | None = None
    parity_threshold: float = 0.1  # mean difference per token in nats above which parity_action is taken
    # action on a batch above parity_threshold: warn; correct = truncated importance sampling for that batch; stop = end the run
    parity_action: Literal["warn", "correct", "stop"] = "warn"
    # maximum error of a server's log-probs after each sync, in nats; None = 1e-3 in float32, else 0.3; 0 = no probe
    probe_tolerance: float | None = None

    def __post_init__(self) -> None:
        self._check_credentials()
        check_positive(self, "max_slots", "tensor_parallel_size", "num_servers")
        check_count(self, "max_restarts", "prefix_cache_tokens")
        good = self.updates_at_once is None or self.updates_at_once >= 1
        check_setting(good, "engine.updates_at_once", self.updates_at_once, "at least 1, or None for all together")
        if not self.launch and (self.num_servers > 1 or self.gpus):
            name = "num_servers" if self.num_servers > 1 else "gpus"
            raise ConfigError(
                f"engine.{name} is {getattr(self, name)}, but no server is launched: give --engine.launch, or --engine.urls alone"
            )
        check_setting(self.kind in ENGINE_KINDS, "engine.kind", self.kind, " or ".join(ENGINE_KINDS))
        if self.kind == "inprocess":
            names = "urls launch python port context_length max_num_seqs memory_fraction sleep extra_args api_key_variable"
            for name in names.split():
                check_setting(
                    not getattr(self, name),
                    f"engine.{name}",
                    getattr(self, name),
                    "no value, as the embedded engine is not a server: set engine.kind",
                )
            check_setting(
                not self.one_request_per_group, "engine.one_request_per_group", True, "False: the embedded engine shares prompts by itself"
            )
        elif self.cuda_graphs:
            raise ConfigError(
                f"engine.cuda_graphs is True, but engine.kind is {self.kind!r}, a server, which has settings of its own for graphs: leave "
                "--engine.cuda-graphs out, or set --engine.kind inprocess"
            )
        elif self.launch == bool(self.urls):
            found = "both given" if self.launch else "neither given"
            raise ConfigError(
                f"engine.kind is {self.kind!r}, and engine.launch and engine.urls are {found}: give either --engine.launch to start a "
                "server for this run, or --engine.urls http://host:port of a running server"
            )
        self._check_weight_sync()
        good = self.memory_fraction is None or 0 < self.memory_fraction < 1
        check_setting(good, "engine.memory_fraction", self.memory_fraction, "between 0 and 1, or None")
        for name in ("startup_timeout_s", "generate_timeout_s", "sync_timeout_s"):
            check_setting(getattr(self, name) > 0, f"engine.{name}", getattr(self, name), "more than 0")
        check_setting(self.parity_rows is None or self.parity_rows >= 0, "engine.parity_rows", self.parity_rows, "at least 0, or None")
        check_setting(self.parity_threshold > 0, "engine.parity_threshold", self.parity_threshold, "more than 0")
        good = self.probe_tolerance is None or self.probe_tolerance >= 0
        check_setting(good, "engine.probe_tolerance", self.probe_tolerance, "at least 0, or None")

    def _check_credentials(self) -> None:
        """Refuse secrets among the settings: they would show in config.json, in messages and in the list of processes."""
        for url in self.urls:
            check_address("engine.urls", url, "--engine.api-key-variable")
        if any(_names_key(argument) or redact(argument) != argument for argument in self.extra_args):
            raise ConfigError(
                "engine.extra_args has a key, which the files of a run and the list of processes would show: export it as the variable "
                "that the server reads (VLLM_API_KEY, HF_TOKEN), and name it by --engine.api-key-variable if requests need it"
            )

    def _check_weight_sync(self) -> None:
        """Refuse transports of weights that the engines do not support on any device."""
        how = self.weight_sync
        check_setting(how in ("auto", "disk", "memory", "group", "ipc"), "engine.weight_sync", how, "auto, disk, memory, group or ipc")
        check_positive(self, "weight_sync_mib")
        PathMap.parse(self.path_map)
        if reason := self.explain_refusal(how):
            raise ConfigError(f"engine.weight_sync is {how!r}, but {reason}")

    def explain_refusal(self, how: str) -> str:
        """Explain why the engines do not support a transport of weights on any device; "" if they may."""
        reason = ""
        if self.kind == "inprocess" and how in ("group", "ipc"):
            reason = "the embedded engine is in the trainer's process: use memory"
        elif self.kind == "vllm" and how == "memory":
            reason = "vLLM accepts no weights in requests: use disk, group or ipc"
        elif how == "ipc" and not all(urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1") for url in self.urls):
            reason = "memory is shared within one machine, and engine.urls names other machines: use group or disk"
        elif how in ("group", "ipc") and self.updates_at_once is not None:
            reason = f"it reaches all servers at once, and engine.updates_at_once is {self.updates_at_once}: leave that out, or use disk"
        elif how in ("group", "ipc") and self.num_servers > 1 and self.on_server_death != "stop":
            reason = "a restarted server is not part of it: set engine.on_server_death to stop, or use disk"
        elif how in ("group", "ipc", "memory") and self.path_map:
            reason = "engine.path_map applies to directories: leave it out, or use disk"
        return reason

    @property
    def weight_sync_mode(self) -> Literal["checkpoint", "memory", "channel"]:
        """The value of RLTrainingConfig.weight_sync."""
        if self.weight_sync == "auto":
            return "checkpoint" if self.is_server else "memory"
        if self.weight_sync == "memory":  # several servers: weights are kept in memory for a restarted server
            return "channel" if self.is_server and self.num_servers == 1 and len(self.urls) <= 1 else "memory"
        return "checkpoint" if self.weight_sync == "disk" else "channel"

    @property
    def is_server(self) -> bool:
        """Whether requests go over HTTP."""
        return self.kind != "inprocess"

    def parity(self) -> ParityConfig | None:
        """Return the comparison of engine and trainer log-probs on each batch; None = no comparison."""
        rows = (8 if self.is_server else 0) if self.parity_rows is None else self.parity_rows
        return ParityConfig(num_rows=rows, threshold=self.parity_threshold, action=self.parity_action) if rows else None

    def precision(self, device: str) -> str:
        """Return the dtype of an engine whose model is on `device`: cpu, cuda, cuda:N, auto."""
        if self.dtype != "auto":
            return self.dtype
        from rollouts.models.loading import find_device_name

        return "float32" if find_device_name(device) == "cpu" else "bfloat16"

    def tolerance(self, device: str) -> float | None:
        """Return the tolerated error of log-probs after a sync, in nats; None = no probe. device: as for precision."""
        if self.probe_tolerance is None:
            return (1e-3 if self.precision(device) == "float32" else 0.3) if self.is_server else None
        return self.probe_tolerance or None


_KEY_FLAGS = ("--api-key", "--admin-api-key", "--hf-token")


def _names_key(argument: str) -> bool:
    """Whether an argument of a server is a flag for a key; servers take underscores and abbreviations, too."""
    name = argument.split("=")[0].lower().replace("_", "-")
    return len(name) >= len("--api") and any(flag.startswith(name) for flag in _KEY_FLAGS)
