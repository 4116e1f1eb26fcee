"""A server that behaves like vLLM 0.32.0 towards a client that trains: generation by token ids, pauses, weight updates, aborts, errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollouts.engines.fakes.models import FakeModel, Script, create_model
from rollouts.engines.fakes.scheduler import Scheduler, Sequence_
from rollouts.engines.fakes.server import Answer, Fault, LoopbackServer, Request, Response, json_response
from rollouts.engines.fakes.vllm_completions import VLLMCompletions
from rollouts.engines.fakes.vllm_engine import DEAD, EngineDead, Route, VLLMControl, VLLMEngineCore
from rollouts.engines.fakes.vllm_generation import VLLMGeneration
from rollouts.engines.fakes.vllm_payloads import Limits, Refused, Tokenizer, error_response, read_json
from rollouts.engines.fakes.vllm_transfer import Transport, VLLMWeightTransfer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SCALE_OUT = frozenset({"/inference/v1/generate", "/inference/v1/abort_requests"})


class FakeVLLMServer(LoopbackServer):
    """vLLM 0.32.0 on a loopback socket.

    async with FakeVLLMServer(create_tiny_model()) as server:
        engine = VLLMEngine(server.url)
    """

    def __init__(
        self,
        model: FakeModel | Script | PreTrainedModel | Path | str,
        *,
        model_name: str = "m",
        version: str = "0.32.0",
        tokenizer: Tokenizer | None = None,
        device: Literal["cuda", "cpu"] = "cuda",
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "processed_logprobs",
        seconds_per_token: float = 0.0,
        seconds_per_update: float = 0.0,
        max_num_seqs: int = 256,
        max_num_queued_reqs: int | None = None,
        max_logprobs: int = 20,
        block_size: int = 128,
        prompt_tokens_details: bool = True,
        dev_mode: bool = True,
        scale_out: bool = True,
        api_key: str | None = None,
        weight_transfer: Transport | None = None,
        allow_insecure_serialization: bool = False,
        worker_methods: Mapping[str, Callable[..., Any]] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        keep_alive_on_engine_death: bool = False,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        keep_alive_s: float = 5.0,
        port: int = 0,
    ) -> None:
        """
        Args:
            model: what to sample from: a script, a model of transformers (a copy is taken), or the directory of one.
            model_name: served, and required of requests that name one.
            version: that /version reports.
            tokenizer: None = as with --tokens-only --skip-tokenizer-init: no text, no stop strings.
            device: "cpu" = linear weights are packed: they have no checksums, and an output head that is tied to the embedding stays the
                old one unless a checkpoint has it under its own name.
            logprobs_mode: raw = of the logits as they are; processed = of the distribution sampled from.
            seconds_per_token: between two tokens of a request, the first included.
            seconds_per_update: that loading weights takes.
            max_num_seqs: samples that run at the same time; more wait.
            max_num_queued_reqs: beyond which, running and waiting samples counted, requests get 503; None = no limit.
            max_logprobs: most `logprobs` that a request may ask for; -1 = no limit.
            block_size: of the prefix cache, in tokens.
            prompt_tokens_details: whether usage tells how many prompt tokens were cached.
            dev_mode: whether the routes for training exist.
            scale_out: whether /inference/* may be used.
            api_key: asked for on /v1/* and /inference/*, and nowhere else.
            weight_transfer: transport of the weight-transfer routes, see fakes.vllm_transfer.Transport.
            allow_insecure_serialization: as with VLLM_ALLOW_INSECURE_SERIALIZATION=1, which "ipc" needs.
            worker_methods: that /collective_rpc can call besides the server's own, as a worker extension adds them.
            generation_config: defaults of /v1/completions; None = those of the model's directory, if it has any.
            keep_alive_on_engine_death: answer 500, and /health 503, when the engine is dead, instead of going down.
            seed: of requests that bring none.
            faults: see LoopbackServer.add_fault.
            keep_alive_s: an idle connection is closed after this many seconds.
            port: 0 = any free one.
        """
        super().__init__(self._handle, detached=_is_control, faults=faults, keep_alive_s=keep_alive_s, port=port)
        self.model = create_model(model, keeps_tied_head=device == "cpu")
        self.scheduler = Scheduler(
            self.model,
            max_running=max_num_seqs,
            seconds_per_token=seconds_per_token,
            log_prob_kind="untempered" if logprobs_mode == "raw_logprobs" else "sampled",
            block_size=block_size,
            step_after_abort=False,
            shares_prompts=False,
            seed=seed,
            check_step=self._check_step,
            find_stop=self._find_stop,
        )
        self.core = VLLMEngineCore(self.model, self.scheduler, seconds_per_update=seconds_per_update)
        self._limits = Limits(
            model_name, self.model.vocab_size, self.model.context_length, max_num_seqs, max_logprobs, tokenizer is not None
        )
        if generation_config is None:
            generation_config = _read_generation_config(Path(self.model.path))
        self._generation = VLLMGeneration(
            self.core,
            self._limits,
            tokenizer,
            max_queued=max_num_queued_reqs,
            with_details=prompt_tokens_details,
        )
        self._completions = VLLMCompletions(self._generation, self._limits, tokenizer, generation_config)
        self._version, self._api_key, self._tokenizer, self._device = version, api_key, tokenizer, device
        self._logprobs_mode, self._scale_out = logprobs_mode, scale_out
        self._stays_when_dead = keep_alive_on_engine_death
        self._root, self._created = self.model.path, int(time.time())
        transfer = VLLMWeightTransfer(self.core, weight_transfer, allows_pickles=allow_insecure_serialization)
        self._routes = self._create_routes(dev_mode, transfer, worker_methods or {})

    def _create_routes(
        self, dev_mode: bool, transfer: VLLMWeightTransfer, worker_methods: Mapping[str, Callable[..., Any]]
    ) -> dict[str, dict[str, Route]]:
        routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": self._get_health},
            "/ping": {"GET": self._get_health, "POST": self._get_health},
            "/version": {"GET": self._get_version},
            "/load": {"GET": self._get_load},
            "/v1/models": {"GET": self._get_models},
            "/v1/completions": {"POST": self._completions.complete},
            "/v1/chat/completions": {"POST": self._completions.chat},
            "/inference/v1/generate": {"POST": self._generation.generate},
            "/inference/v1/abort_requests": {"POST": self._abort_requests},
        }
        if dev_mode:
            control = VLLMControl(self.core, self._describe_server, worker_methods, on_cpu=self._device == "cpu")
            routes |= control.routes() | transfer.routes()
        return routes

    async def _handle(self, request: Request) -> Answer:
        needs_key = self._api_key is not None and request.path.startswith(("/v1/", "/inference/"))
        if needs_key and request.headers.get("authorization") != f"Bearer {self._api_key}":
            return json_response({"error": "Unauthorized"}, 401)
        methods = self._routes.get(request.path)
        if methods is None:
            return json_response({"detail": "Not Found"}, 404)
        if request.method not in methods:
            return json_response({"detail": "Method Not Allowed"}, 405)
        if request.path in _SCALE_OUT and not self._scale_out:
            text = "The scale-out APIs are disabled. Start the server with --enable-scale-out."
            return error_response(403, text, "PermissionDeniedError")
        try:
            return await methods[request.method](request)
        except Refused as refused:
            return refused.response
        except EngineDead:
            if not self._stays_when_dead:
                await self.die_after(0.05)
            return error_response(500, DEAD, "InternalServerError", hang_up=True)

    async def _get_health(self, request: Request) -> Answer:
        return Response(503 if self.core.is_dead else 200, content_type=None)

    async def _get_version(self, request: Request) -> Answer:
        return json_response({"version": self._version})

    async def _get_load(self, request: Request) -> Answer:
        return json_response({"server_load": self._generation.num_in_flight})

    async def _get_models(self, request: Request) -> Answer:
        permission = {
            "id": "modelperm-9f90718fe1a69ff4",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self._limits.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._root,
            "parent": None,
            "max_model_len": self._limits.context_length,
            "permission": [permission],
        }
        return json_response({"object": "list", "data": [model]})

    async def _abort_requests(self, request: Request) -> Answer:
        self.core.abort(read_json(request).get("request_ids") or [])
        return Response(200, content_type=None)

    def _describe_server(self, config_format: str) -> dict[str, Any]:
        """Of /server_info the part that a client of this kind reads; anything but config_format "json" gives text."""
        model_config = {
            "model": self._root,
            "served_model_name": [self._limits.model_name],
            "max_model_len": self._limits.context_length,
            "max_logprobs": self._limits.max_log_probs,
            "logprobs_mode": self._logprobs_mode,
            "skip_tokenizer_init": self._tokenizer is None,
            "dtype": "torch.float32",
        }
        config = {
            "model_config": model_config,
            "scheduler_config": {"max_num_seqs": self._limits.max_num_seqs, "enable_chunked_prefill": True},
            "device_config": {"device": self._device},
            "instance_id": "fake",
        }
        return {"vllm_config": config if config_format == "json" else str(config), "vllm_env": {}, "system_env": {}}

    def _check_step(self, sequence: Sequence_) -> None:
        self.core.check_weights()

    def _find_stop(self, sequence: Sequence_) -> str | None:
        assert self._tokenizer is not None, "a stop string was accepted without a tokenizer"
        text = self._tokenizer.decode(list(sequence.tokens), skip_special_tokens=True)
        return next((stop for stop in sequence.sampling.stop if stop in text), None)


def _is_control(request: Request) -> bool:
    """A generation ends when its client leaves; everything else is carried out."""
    return not request.path.startswith(("/v1/", "/inference/v1/generate"))


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return {name: found[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if name in found}
