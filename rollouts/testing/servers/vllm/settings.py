"""Options that the fake vLLM is started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rollouts.testing.servers.options import ChooseExperts, check_options

Transport: TypeAlias = Literal["disk", "nccl", "gloo", "ipc"]
"""disk: takes {"path": directory}, and checks it first. nccl: as on a machine without a GPU, where it cannot start. gloo: the server's
behaviour with nccl, over gloo. ipc: its behaviour with CUDA IPC, with the bytes of the buffer in place of its handle."""


@dataclass(frozen=True)
class VLLMSettings:
    """The options of one vLLM server. Each field begins with the option or environment variable of the real server that it stands for.

    Args:
        model_name: --served-model-name: requests that name another model are refused.
        version: installed version, as /version reports it.
        device: device type of --device. "cpu" = linear weights are packed: they have no checksums, and an output head that is tied to the
            embedding stays the old one unless a checkpoint has it under its own name.
        logprobs_mode: --logprobs-mode: raw = log-probs of the logits as they are; processed = of the distribution sampled from.
        max_num_seqs: --max-num-seqs: maximum number of samples that run at the same time, at least 1; more wait.
        max_num_queued_reqs: --max-num-queued-reqs: number of running and waiting samples beyond which requests get 503, at least 0;
            None = no limit.
        max_logprobs: --max-logprobs: maximum `logprobs` of a request, at least 0; -1 = no limit.
        block_size: --block-size: tokens in a block of the prefix cache, at least 1.
        prompt_tokens_details: --enable-prompt-tokens-details: whether usage includes the number of cached prompt tokens.
        dev_mode: VLLM_SERVER_DEV_MODE=1: whether the routes for training exist.
        scale_out: --enable-scale-out: whether /inference/* may be used.
        api_key: --api-key: key required on /v1/* and /inference/*, and nowhere else; None = no key.
        weight_transfer: backend in --weight-transfer-config, see Transport; None = weight transfer is not configured.
        allow_insecure_serialization: VLLM_ALLOW_INSECURE_SERIALIZATION=1, required by "ipc".
        worker_methods: --worker-extension-cls: name -> method for /collective_rpc, besides the server's own.
        generation_config: --generation-config: defaults of the OpenAI-like routes; None = those of the model's directory, if any.
        choose_experts: --enable-return-routed-experts: f(tokens) -> experts # [tokens, layers, k] of each token in each layer, of which an
            answer has all but the last; None = answers have no experts.
        can_sleep: --enable-sleep-mode: whether /sleep releases memory; without it, the server pauses alone.
        keep_alive_on_engine_death: VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1: answer 500, and /health 503, when the engine is dead, instead of
            ending.
        keep_alive_s: VLLM_HTTP_TIMEOUT_KEEP_ALIVE: seconds after which an idle connection is closed, more than 0.
    """

    model_name: str = "m"
    version: str = "0.32.0"
    device: Literal["cuda", "cpu"] = "cuda"
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "processed_logprobs"
    max_num_seqs: int = 256
    max_num_queued_reqs: int | None = None
    max_logprobs: int = 20
    block_size: int = 128
    prompt_tokens_details: bool = True
    dev_mode: bool = True
    scale_out: bool = True
    api_key: str | None = None
    weight_transfer: Transport | None = None
    allow_insecure_serialization: bool = False
    worker_methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    generation_config: Mapping[str, Any] | None = None
    choose_experts: ChooseExperts | None = None
    can_sleep: bool = False
    keep_alive_on_engine_death: bool = False
    keep_alive_s: float = 5.0

    def __post_init__(self) -> None:
        check_options(self, {"max_num_seqs": 1, "max_num_queued_reqs": 0, "max_logprobs": -1, "block_size": 1}, ["keep_alive_s"])
