"""Settings of an inference server, and its command line and environment made from them by pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, cast

from rollouts.config_files import is_number, is_whole
from rollouts.errors import ConfigError

ServerKind = Literal["sglang", "vllm"]
Device = Literal["cuda", "cpu"]

CPU_KV_CACHE_BYTES = 2**28
"""vLLM's cache on a CPU, where the default is 92 % of the machine's memory: enough for small models. extra_args may override it."""

CPU_KV_CACHE_TOKENS = 16384
"""SGLang's cache on a CPU, in tokens."""

OWNED_ARGS = ("--model", "--model-path", "--host", "--port")
"""Arguments with settings of their own, because launching relies on them."""

CALLERS_OWN = (
    *("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("ROLLOUTS_RANK_TOKEN", "ROLLOUTS_RANK_TOKEN_FILE"),
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
)
"""Variables that are the trainer's (its Python, its torchrun, the secret of its ranks), or would silently change a server's log-probs."""


@dataclass(frozen=True)
class ServerConfig:
    """One inference server to start."""

    kind: ServerKind
    model_path: str  # Hugging Face directory on this machine (a name on the hub needs env={"HF_HUB_OFFLINE": "0"})
    python: str  # interpreter of the environment in which the server is installed
    host: str = "127.0.0.1"  # control routes ask for no key: use a loopback address, or one of a private network
    port: int | None = None  # None = a free port is chosen
    device: Device = "cuda"
    dtype: str = "auto"  # "float32", "bfloat16", "float16"; auto = the checkpoint's
    tensor_parallel_size: int = 1  # GPUs that share the model
    context_length: int | None = None  # maximum number of tokens of prompt and response together; None = the model's own
    max_num_seqs: int | None = None  # maximum number of sequences generated at the same time; None = the server's own
    memory_fraction: float | None = None  # fraction of device memory for weights and cache; None = the server's own, small on a CPU
    can_sleep: bool = False  # whether it can release the memory of its GPU for a while, and keep its weights; not on a CPU
    record_experts: bool = False  # whether answers have the experts that routers chose; vLLM does so on GPUs only
    skip_tokenizer_init: bool = False  # saves time if only token ids are exchanged; stop strings and text are then refused
    extra_args: tuple[str, ...] = ()  # after all others, so they win
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # further variables; they also win

    def __post_init__(self) -> None:
        self._check("kind", self.kind in ("sglang", "vllm"), "'sglang' or 'vllm'")
        self._check("device", self.device in ("cuda", "cpu"), "'cuda' or 'cpu'")
        for name in ("model_path", "python", "host", "dtype"):
            value = getattr(self, name)
            self._check(name, isinstance(value, str | PurePath) and bool(str(value)), "a text that is not empty")
        for name in ("tensor_parallel_size", "context_length", "max_num_seqs"):
            number: Any = getattr(self, name)
            if number is not None or name == "tensor_parallel_size":
                self._check(name, is_whole(number) and int(number or 0) >= 1, "a whole number, at least 1")
        self._check("port", self.port is None or (is_whole(self.port) and 1 <= self.port <= 65535), "1 to 65535, or None for a free one")
        fraction = self.memory_fraction
        self._check("memory_fraction", fraction is None or (is_number(fraction) and 0 < fraction < 1), "between 0 and 1")
        self._check("can_sleep", not self.can_sleep or self.device == "cuda", "False on a CPU, which has no GPU's memory to release")
        args: Any = self.extra_args
        texts = isinstance(args, list | tuple) and all(isinstance(arg, str) for arg in cast("list[Any]", args))
        self._check("extra_args", texts, "a tuple of texts, one for each argument")
        object.__setattr__(self, "extra_args", tuple(self.extra_args))
        owned = [arg for arg in self.extra_args if arg.split("=")[0] in OWNED_ARGS]
        self._check("extra_args", not owned, f"no {' or '.join(owned)}: set model_path, host and port instead")

    def _check(self, name: str, is_fine: bool, expected: str) -> None:
        if not is_fine:
            raise ConfigError(f"ServerConfig.{name} is {getattr(self, name)!r}, expected {expected}")


def build_vllm_command(config: ServerConfig, port: int) -> tuple[str, ...]:
    """Return the command that starts vLLM, with log-probs of the distribution sampled from."""
    command = [config.python, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model_path]
    command += ["--host", config.host, "--port", str(port), "--dtype", config.dtype]
    command += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    # log-probs after temperature and truncation; the route with token ids; no sampling defaults from the checkpoint
    command += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--generation-config", "vllm"]
    command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if config.context_length is not None:
        command += ["--max-model-len", str(config.context_length)]
    if config.max_num_seqs is not None:
        command += ["--max-num-seqs", str(config.max_num_seqs)]
    if config.memory_fraction is not None:
        command += ["--gpu-memory-utilization", str(config.memory_fraction)]
    elif config.device == "cpu":
        command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    if config.device == "cpu":
        command.append("--enforce-eager")  # compiling for a CPU takes minutes
        command.append("--no-enable-chunked-prefill")  # a chunked prefill of a seeded request kills vLLM 0.32 on a CPU
    if config.skip_tokenizer_init:
        command.append("--skip-tokenizer-init")
    if config.can_sleep:
        command.append("--enable-sleep-mode")
    if config.record_experts:
        command.append("--enable-return-routed-experts")
    return (*command, *config.extra_args)


def build_vllm_environment(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for vLLM.

    Args:
        environment: the caller's, for instance os.environ.
    """
    own = _drop_callers_own(environment)
    own = {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",  # seconds; the default of 5 s closes connections that the client is about to use
        "VLLM_NO_USAGE_STATS": "1",
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if config.record_experts else {}),  # the one that returns experts
        **own,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for new weights
    }
    return _add_common(config, own)


def build_sglang_command(config: ServerConfig, port: int) -> tuple[str, ...]:
    """Return the command that starts SGLang, with log-probs after temperature and before truncation."""
    command = [config.python, "-m", "sglang.launch_server", "--model-path", config.model_path]
    command += ["--host", config.host, "--port", str(port), "--dtype", config.dtype]
    command += ["--tp-size", str(config.tensor_parallel_size), "--device", config.device]
    if config.context_length is not None:
        command += ["--context-length", str(config.context_length)]
    if config.max_num_seqs is not None:
        command += ["--max-running-requests", str(config.max_num_seqs)]
    if config.memory_fraction is not None:
        command += ["--mem-fraction-static", str(config.memory_fraction)]
    elif config.device == "cpu":
        command += ["--mem-fraction-static", "0.05", "--max-total-tokens", str(CPU_KV_CACHE_TOKENS)]
    if config.device == "cpu":
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"]
    if config.skip_tokenizer_init:
        command.append("--skip-tokenizer-init")
    if config.can_sleep:
        command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if config.record_experts:
        command.append("--enable-return-routed-experts")
    return (*command, *config.extra_args)


def build_sglang_environment(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for SGLang.

    Args:
        environment: the caller's, for instance os.environ.
    """
    own = _drop_callers_own(environment)
    own["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # otherwise a health check generates a token: 503 after 20 s while paused
    if config.device == "cpu":
        own["SGLANG_USE_CPU_ENGINE"] = "1"
    return _add_common(config, own)


def build_command(config: ServerConfig, port: int) -> tuple[str, ...]:
    """Return the command that starts the server of this kind on a port."""
    builders: dict[str, Callable[[ServerConfig, int], tuple[str, ...]]] = {"sglang": build_sglang_command, "vllm": build_vllm_command}
    return builders[config.kind](config, port)


def build_environment(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the server of this kind, made from the caller's."""
    builders = {"sglang": build_sglang_environment, "vllm": build_vllm_environment}
    return builders[config.kind](config, environment)


def _drop_callers_own(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key not in CALLERS_OWN and not key.startswith("TORCHELASTIC_")}


def _add_common(config: ServerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Add the variables of every server, then the user's own."""
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **environment}
    if len(PurePath(config.python).parts) > 1:  # compilers and tools of the server's environment, as if it were activated
        own["PATH"] = ":".join(filter(None, (str(PurePath(config.python).parent), own.get("PATH", ""))))
    direct = ",".join(filter(None, (own.get("no_proxy") or own.get("NO_PROXY"), "127.0.0.1,localhost,::1", config.host)))
    own |= {"no_proxy": direct, "NO_PROXY": direct}  # servers call themselves when they start
    return {**own, **config.env}
