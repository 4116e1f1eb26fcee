"""A server that behaves like vLLM 0.32.0 towards a trainer: generation by token ids, pauses, weight updates, aborts, errors."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts.testing.servers import openai, routes
from rollouts.testing.servers.http import Answer, EventStream, Fault, LoopbackServer, Request, Response, dump_json, json_response
from rollouts.testing.servers.models import FakeModel, Sampling, Script, create_model
from rollouts.testing.servers.payloads import Refused, Tokenizer, find_stop
from rollouts.testing.servers.routes import Routes
from rollouts.testing.servers.scheduler import Scheduler, SchedulerRules, Sequence_, follow
from rollouts.testing.servers.vllm import payloads
from rollouts.testing.servers.vllm.engine import DEAD, EngineDead, VLLMControl, VLLMEngineCore
from rollouts.testing.servers.vllm.generation import VLLMGeneration, random_id
from rollouts.testing.servers.vllm.payloads import FINGERPRINT, Limits, error_response, read_json, refuse, refuse_field
from rollouts.testing.servers.vllm.settings import VLLMSettings
from rollouts.testing.servers.vllm.transfer import VLLMWeightTransfer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DEFAULT_MAX_TOKENS = 16


class VLLMCompletions:
    """Routes /v1/completions and /v1/chat/completions. Both take missing parameters from the model's generation_config.json."""

    def __init__(
        self, generation: VLLMGeneration, limits: Limits, tokenizer: Tokenizer | None, generation_config: Mapping[str, Any]
    ) -> None:
        self._generation = generation
        self._limits = limits
        self._tokenizer = tokenizer
        self._defaults = dict(generation_config)

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise refuse("Unable to get tokenizer because `skip_tokenizer_init=True`")
        return self._tokenizer

    async def complete(self, request: Request) -> Answer:
        """POST /v1/completions."""
        body = {**self._defaults, **read_json(request)}
        payloads.check_model_name(body.get("model"), self._limits)
        tokenizer = self._require_tokenizer()
        prompts = self._parse_prompts(body, tokenizer)
        sampling, n = self._parse_sampling(body, prompts)
        for prompt in prompts:
            self._check_prompt(prompt)
        rid = f"cmpl-{body.get('request_id') or random_id()}"
        rids = [f"{rid}-{i}" for i in range(len(prompts))]
        sequences = self._generation.create_sequences(rids, prompts, sampling, n, body, reads_cache="prompt_logprobs" not in body)
        if body.get("stream"):
            return EventStream(lambda send: self._stream(rid, sequences, n, body, tokenizer, send))
        await self._generation.run(sequences)
        choices = [self._describe(i, sequence, body, tokenizer) for i, sequence in enumerate(sequences)]
        usages = [self._generation.describe_usage(sequences[i : i + n]) for i in range(0, len(sequences), n)]
        return json_response(payloads.describe_completion(rid, self._limits.settings.model_name, choices, openai.add_usage(usages)))

    async def chat(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        body = {**self._defaults, **read_json(request)}
        payloads.check_model_name(body.get("model"), self._limits)
        tokenizer = self._require_tokenizer()
        if "messages" not in body:
            raise refuse_field("missing", "body.messages", "Field required", body)
        prompt = openai.parse_messages(body["messages"], tokenizer, without_template=refuse("The model has no chat template."))
        payloads.check_prompt(prompt, self._limits)
        options = {**body, "logprobs": None, "max_tokens": openai.parse_chat_limit(body)}
        sampling, n = payloads.parse_sampling(options, prompt, self._limits, default_max_tokens=self._limits.context_length)
        rid = f"chatcmpl-{body.get('request_id') or random_id()}"
        sequences = self._generation.create_sequences([rid], [prompt], sampling, n, body, reads_cache=True)
        await self._generation.run(sequences)
        usage = self._generation.describe_usage(sequences)
        if usage["prompt_tokens_details"]:
            usage["prompt_tokens_details"]["created_cache_tokens"] = 0
        return json_response(payloads.describe_chat(rid, self._limits.settings.model_name, sequences, tokenizer, usage))

    def _parse_prompts(self, body: Mapping[str, Any], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        prompt = body.get("prompt")
        if prompt is None:
            raise refuse("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt")
        if prompt in ([], ""):
            raise refuse("You must pass at least one prompt")
        for i, token in enumerate(prompt):
            if isinstance(token, int) and token < 0:
                raise refuse_field("greater_than_equal", f"body.prompt.{i}", "Input should be greater than or equal to 0", token)
        return openai.parse_prompts(prompt, tokenizer)

    def _parse_sampling(self, body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]]) -> tuple[Sampling, int]:
        longest = max(prompts, key=len)
        sampling, n = payloads.parse_sampling(body, longest, self._limits, default_max_tokens=_DEFAULT_MAX_TOKENS)
        return sampling, n

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        longest = self._limits.context_length
        if len(prompt) >= longest:
            text = (
                f"This model's maximum context length is {longest} tokens. However, your prompt contains {len(prompt)} input tokens, which "
                "exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={len(prompt)})"
            )
            raise Refused(error_response(400, text, param="input_tokens"))
        payloads.check_prompt(prompt, self._limits)

    def _describe(self, index: int, sequence: Sequence_, body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
        with_ids, count = bool(body.get("return_token_ids")), body.get("prompt_logprobs")
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        log_probs = openai.describe_log_probs(sequence.draws, body.get("logprobs"), tokenizer, as_ids=as_ids)
        return {
            **openai.describe_completion(index, sequence, tokenizer, log_probs),
            "stop_reason": sequence.matched,
            "token_ids": list(sequence.tokens) if with_ids else None,
            "prompt_logprobs": None if count is None else self._generation.score(sequence.prompt, count),
            "prompt_token_ids": list(sequence.prompt) if with_ids else None,
            "routed_experts": None,
        }

    async def _stream(
        self,
        rid: str,
        sequences: Sequence[Sequence_],
        n: int,
        body: Mapping[str, Any],
        tokenizer: Tokenizer,
        send: Callable[[str], Awaitable[None]],
    ) -> None:
        head = openai.describe_head(rid, "text_completion", self._limits.settings.model_name)

        async def stream_one(index: int, sequence: Sequence_) -> None:
            is_first = True
            offset = 0
            async for part, is_last in follow(sequence):
                choice = self._describe(index, part, {**body, "prompt_logprobs": None}, tokenizer)
                choice["logprobs"] = openai.describe_log_probs(part.draws, body.get("logprobs"), tokenizer, first_offset=offset)
                offset += len(choice["text"])
                del choice["prompt_logprobs"], choice["routed_experts"]
                choice.update({} if is_first else {"prompt_token_ids": None})
                choice.update({} if is_last else {"finish_reason": None, "stop_reason": None})
                await send(dump_json({**head, "choices": [choice]}))
                is_first = False

        def describe_end() -> dict[str, Any]:
            usage = openai.add_usage([self._generation.describe_stream_usage(sequences[i : i + n]) for i in range(0, len(sequences), n)])
            return {**head, "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}

        await self._generation.stream(sequences, body, stream_one, describe_end, send)


_DEFAULTS = VLLMSettings()


class FakeVLLMServer(LoopbackServer):
    """vLLM 0.32.0 on a loopback socket.

    async with FakeVLLMServer(create_tiny_model()) as server:
        engine = VLLMEngine(server.url)
    """

    def __init__(
        self,
        model: FakeModel | Script | PreTrainedModel | Path | str,
        settings: VLLMSettings = _DEFAULTS,
        *,
        tokenizer: Tokenizer | None = None,
        seconds_per_token: float = 0.0,
        seconds_per_update: float = 0.0,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        port: int = 0,
    ) -> None:
        """
        Args:
            model: model to sample from: a script, a model of transformers (a copy is taken), or a model directory.
            settings: options of the server.
            tokenizer: None = as with --tokens-only --skip-tokenizer-init: no text, no stop strings.
            seconds_per_token: seconds between two tokens of a request, also before the first.
            seconds_per_update: seconds that loading weights takes.
            seed: seed of requests without one.
            faults: see LoopbackServer.add_fault.
            port: 0 = any free one.
        """
        super().__init__(self._handle, detached=_is_control, faults=faults, keep_alive_s=settings.keep_alive_s, port=port)
        self.model = create_model(model, keeps_tied_head=settings.device == "cpu")
        rules = SchedulerRules(
            max_running=settings.max_num_seqs,
            seconds_per_token=seconds_per_token,
            log_prob_kind="untempered" if settings.logprobs_mode == "raw_logprobs" else "sampled",
            block_size=settings.block_size,
            step_after_abort=False,
            shares_prompts=False,
            seed=seed,
        )
        self.scheduler = Scheduler(self.model, rules, check_step=self._check_step, find_stop=self._find_stop)
        self.core = VLLMEngineCore(self.model, self.scheduler, can_sleep=settings.can_sleep, seconds_per_update=seconds_per_update)
        self._settings, self._tokenizer = settings, tokenizer
        self._limits = Limits(settings, self.model.vocab_size, self.model.context_length, tokenizer is not None)
        self._generation = VLLMGeneration(self.core, self._limits, tokenizer)
        defaults = settings.generation_config
        defaults = _read_generation_config(Path(self.model.path)) if defaults is None else defaults
        self._completions = VLLMCompletions(self._generation, self._limits, tokenizer, defaults)
        self._root, self._created = self.model.path, int(time.time())
        self._routes = self._create_routes()

    def _create_routes(self) -> Routes:
        settings = self._settings
        found: Routes = {
            "/health": {"GET": self._get_health},
            "/ping": {"GET": self._get_health, "POST": self._get_health},
            "/version": {"GET": self._get_version},
            "/load": {"GET": self._get_load},
            "/v1/models": {"GET": self._get_models},
            "/v1/completions": {"POST": self._completions.complete},
            "/v1/chat/completions": {"POST": self._completions.chat},
            "/inference/v1/generate": {"POST": self._generation.generate if settings.scale_out else _refuse_scale_out},
            "/inference/v1/abort_requests": {"POST": self._abort_requests if settings.scale_out else _refuse_scale_out},
        }
        if settings.dev_mode:
            control = VLLMControl(self.core, self._describe_server, settings.worker_methods, on_cpu=settings.device == "cpu")
            transfer = VLLMWeightTransfer(self.core, settings.weight_transfer, allows_pickles=settings.allow_insecure_serialization)
            return {**found, **control.routes(), **transfer.routes()}
        return found

    async def _handle(self, request: Request) -> Answer:
        needs_key = request.path.startswith(("/v1/", "/inference/"))
        try:
            return await routes.answer(self._routes, request, self._settings.api_key if needs_key else None)
        except EngineDead:
            if not self._settings.keep_alive_on_engine_death:
                await self.die_after(0.05)
            return error_response(500, DEAD, "InternalServerError", hang_up=True)

    async def _get_health(self, request: Request) -> Answer:
        return Response(503 if self.core.is_dead else 200, content_type=None)

    async def _get_version(self, request: Request) -> Answer:
        return json_response({"version": self._settings.version})

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
            "id": self._limits.settings.model_name,
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
        """Return the part of /server_info that a trainer's client reads; any config_format but "json" gives text."""
        model_config = {
            "model": self._root,
            "served_model_name": [self._limits.settings.model_name],
            "max_model_len": self._limits.context_length,
            "max_logprobs": self._settings.max_logprobs,
            "logprobs_mode": self._settings.logprobs_mode,
            "skip_tokenizer_init": self._tokenizer is None,
            "dtype": "torch.float32",
            "enable_sleep_mode": self._settings.can_sleep,
        }
        config = {
            "model_config": model_config,
            "scheduler_config": {"max_num_seqs": self._settings.max_num_seqs, "enable_chunked_prefill": True},
            "device_config": {"device": self._settings.device},
            "instance_id": "fake",
        }
        return {"vllm_config": config if config_format == "json" else str(config), "vllm_env": {}, "system_env": {}}

    def _check_step(self, sequence: Sequence_) -> None:
        self.core.check_weights()

    def _find_stop(self, sequence: Sequence_) -> str | None:
        return find_stop(sequence, self._tokenizer, skip_special_tokens=True)


async def _refuse_scale_out(request: Request) -> Answer:
    return error_response(403, "The scale-out APIs are disabled. Start the server with --enable-scale-out.", "PermissionDeniedError")


def _is_control(request: Request) -> bool:
    """Whether the request outlives its client: a generation ends when its client leaves, other requests are carried out."""
    return not request.path.startswith(("/v1/", "/inference/v1/generate"))


def _read_generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return {name: found[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if name in found}
