"""A server that behaves like SGLang 0.5.23 towards a trainer: generation, pauses, weight updates, aborts, errors."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from rollouts.testing.servers import openai, routes
from rollouts.testing.servers.http import (
    Answer,
    EventStream,
    Fault,
    LoopbackServer,
    Request,
    Response,
    ServerDied,
    dump_json,
    json_response,
)
from rollouts.testing.servers.models import FakeModel, Sampling, Script, create_model
from rollouts.testing.servers.payloads import Refused, Tokenizer, find_stop
from rollouts.testing.servers.scheduler import Scheduler, SchedulerRules, Sequence_, run_streams
from rollouts.testing.servers.sglang import payloads
from rollouts.testing.servers.sglang.control import SGLangControl
from rollouts.testing.servers.sglang.engine import SGLangCore
from rollouts.testing.servers.sglang.payloads import MAX_KEPT, Generation, error_object, parse_generate, read_json, refuse
from rollouts.testing.servers.sglang.settings import SGLangSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = SGLangSettings()
_NO_TEMPLATE = (
    "Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was passed! For "
    "information about writing templates and setting the tokenizer.chat_template attribute, please see the documentation at "
    "https://huggingface.co/docs/transformers/main/en/chat_templating"
)

RunAll = Callable[[Mapping[str, Any], Sequence[Sequence_]], Awaitable[None]]


class SGLangCompletions:
    """Routes /v1/completions and /v1/chat/completions; no streams."""

    def __init__(self, run: RunAll, tokenizer: Tokenizer | None) -> None:
        """run: (body of /generate, sequences) -> None, after generating all of them. Raises Refused."""
        self._run = run
        self._tokenizer = tokenizer

    async def complete(self, request: Request) -> Answer:
        """POST /v1/completions."""
        body = read_json(request, ["prompt"])
        tokenizer = self._require_tokenizer()
        prompts = openai.parse_prompts(body["prompt"], tokenizer)
        count = body.get("logprobs")
        sequences = await self._generate(request, body, prompts, body.get("max_tokens") or 16, count or 0)
        choices: list[dict[str, Any]] = []
        for i, sequence in enumerate(sequences):
            log_probs = self._describe_log_probs(sequence, count, tokenizer)
            choices.append({**openai.describe_completion(i, sequence, tokenizer, log_probs), "matched_stop": sequence.matched})
        return json_response(_describe("text_completion", body, choices, prompts, sequences))

    async def chat(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        body = read_json(request, ["messages"])
        tokenizer = self._require_tokenizer()
        without_template = Refused(error_object(400, _NO_TEMPLATE, "BadRequest"))
        prompts = [openai.parse_messages(body["messages"], tokenizer, without_template=without_template)]
        sequences = await self._generate(request, body, prompts, openai.parse_chat_limit(body), 0)
        choices = [
            {**openai.describe_message(i, sequence, tokenizer, ("reasoning_content",)), "matched_stop": sequence.matched}
            for i, sequence in enumerate(sequences)
        ]
        return json_response(_describe("chat.completion", body, choices, prompts, sequences))

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise refuse("The OpenAI-compatible routes need a tokenizer, and the engine was initialized with skip_tokenizer_init=True.")
        return self._tokenizer

    async def _generate(
        self, request: Request, body: Mapping[str, Any], prompts: Sequence[tuple[int, ...]], max_tokens: int | None, num_top: int
    ) -> list[Sequence_]:
        names = ("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos")
        options = {name: body[name] for name in names if body.get(name) is not None}
        options |= {"sampling_seed": body.get("seed"), "max_new_tokens": max_tokens}
        generation = parse_generate(
            {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": options, "top_logprobs_num": num_top},
            request,
            self._tokenizer,
        )
        sequences = [Sequence_(*parts) for parts in zip(generation.rids, generation.prompts, generation.samplings, strict=True)]
        await self._run(body, sequences)
        return sequences

    def _describe_log_probs(self, sequence: Sequence_, count: int | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
        found = openai.describe_log_probs(sequence.draws, count, tokenizer)
        return found and {**found, "text_offset": [-1] * len(sequence.draws)}


def _describe(
    kind: str, body: Mapping[str, Any], choices: list[dict[str, Any]], prompts: Sequence[tuple[int, ...]], sequences: Sequence[Sequence_]
) -> dict[str, Any]:
    spans = sequences[0].spans()
    return {
        **openai.describe_head(uuid.uuid4().hex, kind, body.get("model")),
        "choices": choices,
        "usage": _describe_usage(prompts, sequences),
        "metadata": {"weight_version": spans[-1]["version"] if spans else None, "weight_versions": spans},
    }


def _describe_usage(prompts: Sequence[tuple[int, ...]], sequences: Sequence[Sequence_]) -> dict[str, Any]:
    return {
        **openai.count_tokens(sum(map(len, prompts)), sequences),
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


class FakeSGLangServer(LoopbackServer):
    """SGLang 0.5.23 on a loopback socket.

    async with FakeSGLangServer(create_tiny_model()) as server:
        engine = SGLangEngine(server.url)
    """

    def __init__(
        self,
        model: FakeModel | Script | PreTrainedModel | Path | str,
        settings: SGLangSettings = _DEFAULTS,
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
            tokenizer: None = as with --skip-tokenizer-init: no text, no stop strings.
            seconds_per_token: seconds between two tokens of a request, also before the first.
            seconds_per_update: seconds that loading weights takes.
            seed: seed of requests without one.
            faults: see LoopbackServer.add_fault.
            port: 0 = any free one.
        """
        super().__init__(self._handle, detached=_is_control, faults=faults, keep_alive_s=settings.keep_alive_s, port=port)
        self.model = create_model(model)
        rules = SchedulerRules(
            max_running=settings.max_running_requests,
            seconds_per_token=seconds_per_token,
            log_prob_kind="untempered" if settings.original_logprob else "tempered",
            block_size=1,
            step_after_abort=True,
            shares_prompts=True,
            seed=seed,
        )
        self.scheduler = Scheduler(self.model, rules, check_step=self._check_step, find_stop=self._find_stop)
        self.core = SGLangCore(self.model, self.scheduler, settings, seconds_per_update=seconds_per_update)
        self._settings, self._tokenizer = settings, tokenizer
        self._is_healthy = True
        control = SGLangControl(self.core, self._describe_server)
        completions = SGLangCompletions(self._run, tokenizer)
        self._routes = {
            **control.routes(),
            "/v1/completions": {"POST": completions.complete},
            "/v1/chat/completions": {"POST": completions.chat},
            "/generate": {"POST": self._generate, "PUT": self._generate},
            "/health": {"GET": self._get_health},
            "/health_generate": {"GET": self._get_health},
            "/ready": {"GET": self._get_ready},
            "/v1/models": {"GET": self._get_models},
        }

    def race_next_update(self) -> None:
        """Make the next update outside of a pause answer 400 although its weights are in place."""
        self.core.num_races += 1

    async def _handle(self, request: Request) -> Answer:
        is_open = request.path in ("/health", "/health_generate", "/ready")
        return await routes.answer(self._routes, request, None if is_open else self._settings.api_key)

    async def _generate(self, request: Request) -> Answer:
        started_at = time.monotonic()
        body = read_json(request)
        try:
            generation = payloads.parse_generate(body, request, self._tokenizer)
            if not generation.is_stream:
                sequences = [self._create_sequence(generation, i) for i in range(len(generation.prompts))]
                await self._run(body, sequences)
                answers = [self._describe(sequence, generation, started_at) for sequence in sequences]
                return json_response(answers if generation.is_list else answers[0])
        except Refused as refused:
            response = refused.response
            if body.get("stream") and response.status == 400:
                return EventStream(lambda send: _send_refusal(response, send))
            raise
        return EventStream(lambda send: self._stream(body, generation, started_at, send))

    async def _run(self, body: Mapping[str, Any], sequences: Sequence[Sequence_]) -> None:
        with self.core.register(sequences):
            await self.core.wait_until_continued()
            async with self.core.in_flight():
                self._admit(body, sequences)
                await self.scheduler.run_all(sequences)

    async def _stream(
        self, body: dict[str, Any], generation: Generation, started_at: float, send: Callable[[str], Awaitable[None]]
    ) -> None:
        sequences = [self._create_sequence(generation, i) for i in range(len(generation.prompts))]

        async def stream_one(index: int, sequence: Sequence_) -> None:
            count = 0
            is_last = False
            while not is_last:
                if count == len(sequence.draws) and sequence.finish is None:
                    await sequence.changed.wait()
                    continue
                count = min(count + 1, len(sequence.draws))
                is_last = sequence.finish is not None and count == len(sequence.draws)
                part = replace(sequence, draws=sequence.draws[:count], labels=sequence.labels[:count])
                event = self._describe(part, generation, started_at, is_final=is_last)
                if count == 1:
                    event["meta_info"]["response_sent_to_client_ts"] = time.time()
                await send(dump_json({**event, "index": index} if generation.is_list else event))

        try:
            with self.core.register(sequences):
                await self.core.wait_until_continued()
                async with self.core.in_flight():
                    self._admit(body, sequences)
                    await run_streams(self.scheduler.run_all, sequences, stream_one)
        except Refused as refused:
            await _send_refusal(refused.response, send)
            return
        await send("[DONE]")

    def _create_sequence(self, generation: Generation, i: int) -> Sequence_:
        return Sequence_(
            generation.rids[i],
            generation.prompts[i],
            generation.samplings[i],
            generation.salt,
            max_cached=generation.log_prob_start if generation.with_log_probs and generation.log_prob_start >= 0 else None,
        )

    def _admit(self, body: Mapping[str, Any], sequences: Sequence[Sequence_]) -> None:
        """Check a request whose turn has come. Raises Refused."""
        for sequence in sequences:
            sampling = payloads.check_sample(sequence.prompt, sequence.sampling, body, self.model.context_length, self._tokenizer)
            sequence.sampling = sampling if self._settings.deterministic else replace(sampling, seed=None)
        if len({sequence.prompt for sequence in sequences}) < len(sequences):
            for sequence in sequences:
                self.scheduler.warm(sequence)
        if self._settings.max_queued_requests is not None:
            room = self._settings.max_running_requests - len(self.scheduler.running)
            if len(self.scheduler.waiting) + len(sequences) - room > self._settings.max_queued_requests:
                raise Refused(payloads.error_object(503, "The request queue is full.", "503"))

    def _describe(self, sequence: Sequence_, generation: Generation, started_at: float, *, is_final: bool = True) -> dict[str, Any]:
        wants_prompt = generation.with_log_probs and generation.log_prob_start >= 0
        draws = self.model.score(sequence.prompt, generation.num_top, generation.token_ids or ()) if wants_prompt else None
        answer = payloads.describe_sample(
            sequence,
            generation,
            self._tokenizer,
            label=self.core.label,
            started_at=started_at,
            vocab_size=self.model.vocab_size,
            prompt_draws=draws,
            is_final=is_final,
        )
        if generation.with_experts and self._settings.choose_experts is not None:
            experts = self._settings.choose_experts((*sequence.prompt, *sequence.tokens))[:-1]
            answer["meta_info"]["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
        return answer

    def _check_step(self, sequence: Sequence_) -> None:
        if not self.core.has_memory:
            raise ServerDied("CUDA error: an illegal memory access was encountered")
        if not sequence.draws and not all(0 <= token < self.model.vocab_size for token in sequence.prompt):
            raise ServerDied("IndexError: index out of range in self")

    def _find_stop(self, sequence: Sequence_) -> str | None:
        return find_stop(sequence, self._tokenizer, skip_special_tokens=False)  # names of special tokens count, too

    async def _get_health(self, request: Request) -> Answer:
        if request.path == "/health" and not self._settings.health_generates:
            return Response(200, content_type=None)
        with trio.move_on_after(self._settings.health_timeout_s) as scope:
            await trio.sleep(self._settings.poll_s)
            await self.core.wait_until_continued()
            if not self.scheduler.running:
                await self.scheduler.run(Sequence_(f"HEALTH_CHECK_{uuid.uuid4().hex}", (0,), Sampling(max_tokens=1, temperature=0.0)))
        self._is_healthy = not scope.cancelled_caught
        return Response(200 if self._is_healthy else 503, content_type=None)

    async def _get_ready(self, request: Request) -> Answer:
        return Response(200 if self._is_healthy and not self.core.is_paused else 503, content_type=None)

    async def _get_models(self, request: Request) -> Answer:
        path = self.core.model_path
        model = {"id": path, "object": "model", "created": int(time.time()), "owned_by": "sglang", "root": path, "parent": None}
        return json_response({"object": "list", "data": [{**model, "max_model_len": self.model.context_length}]})

    def _describe_server(self) -> dict[str, Any]:
        """Return the part of /server_info that a trainer's client reads."""
        arguments = {
            "model_path": self.model.path,
            "tokenizer_path": self.model.path,
            "served_model_name": self.model.path,
            "skip_tokenizer_init": self._tokenizer is None,
            "load_format": "auto",
            "context_length": None,
            "dtype": "float32",
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "weight_version": "default",
            "max_running_requests": self._settings.max_running_requests,
            "max_queued_requests": self._settings.max_queued_requests,
            "enable_deterministic_inference": self._settings.deterministic,
            "incremental_streaming_output": False,
            "sampling_mask_max_tokens": MAX_KEPT,
            "allow_auto_truncate": False,
            "enable_memory_saver": self._settings.can_sleep,
            "enable_weights_cpu_backup": self._settings.can_sleep,
        }
        state = {**arguments, "last_gen_throughput": 0.0, "memory_usage": {}}
        return {
            **arguments,
            "status": "ready",
            "max_total_num_tokens": 8192,
            "max_req_input_len": self.model.context_length - 6,
            "internal_states": [state],
            "version": self._settings.version,
        }


def _is_control(request: Request) -> bool:
    """Whether the request outlives its client: a generation ends when its client leaves, other requests are carried out."""
    return request.path != "/generate" and not request.path.startswith("/v1/")


async def _send_refusal(response: Response, send: Callable[[str], Awaitable[None]]) -> None:
    """Send the refusal of a streamed request: status 200 and one event."""
    error = json.loads(response.body)["error"]
    message = error["message"] if isinstance(error, dict) else error
    await send(dump_json({"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}))
    await send("[DONE]")
