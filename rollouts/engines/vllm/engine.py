"""VLLMEngine: rollouts from a vLLM server, tokens in and tokens out. Pure parts in engines/vllm/protocol.py."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
import trio

from rollouts.engines.http.checks import AtLeast, ServerInfo, check_request
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.engines.http.requests import RequestsInFlight, WireRequest
from rollouts.engines.http.samples import Generated
from rollouts.engines.http.scoring import check_scoring, score_tokens
from rollouts.engines.protocol import EngineFeature
from rollouts.engines.vllm.control import VLLMWeights
from rollouts.engines.vllm.facts import read_facts
from rollouts.engines.vllm.protocol import (
    GENERATE,
    ID_PREFIX,
    check_params,
    parse_prompt_log_probs,
    parse_vllm_response,
    prompt_log_probs_payload,
    vllm_payload,
)
from rollouts.engines.weights.checkpoint_check import HEAD, CheckpointLayout, read_eos_token_ids
from rollouts.engines.weights.path_map import PathMap
from rollouts.engines.weights.server_weights import ServerWeights
from rollouts.errors import EngineError
from rollouts.types import Completion, SamplingParams
from rollouts.weight_specs import WeightSpec

_FEATURES = frozenset({EngineFeature.SCORES, EngineFeature.GROUPS, EngineFeature.DISTRUST, EngineFeature.SLEEP})


class VLLMEngine:
    """An InferenceEngine over a running vLLM server (0.32 or newer).

        async with VLLMEngine("http://127.0.0.1:8000") as engine:
            completion = await engine.generate(prompt_tokens, SamplingParams(max_tokens=64))

    - The server needs --enable-scale-out, VLLM_SERVER_DEV_MODE=1, and for training --logprobs-mode processed_logprobs.
    - Each token carries the version of the weights that sampled it, from the server's own spans.
    - With seeds the same requests give the same samples if the server computes the same numbers in every batch: on a CPU in float32 it
      does.
    - New weights are loaded from a directory, while no request runs and with all keys and values of the old ones dropped.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        expected_model: str | Path | None = None,
        vocab_size: int | AtLeast | None = None,
        initial_version: int = 0,
        in_flight: Literal["continue", "abort"] = "continue",
        reference: CheckpointLayout | None = None,
        allow_cast: bool = False,
        max_connections: int = 4096,
        deadlines: Deadlines | None = None,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        path_map: PathMap | None = None,
        record_experts: bool = False,
        name: str | None = None,
    ) -> None:
        """
        Args:
            expected_model: directory, hub id or served name that the server must have.
            vocab_size: vocabulary size of the trained model; the server's must be the same, or with AtLeast not smaller.
            initial_version: version of the weights that the server was started with.
            in_flight: effect of a weight sync on running requests: "continue" = they continue under the new weights, their keys and values
                computed again; "abort" = they return, and the engine sends prompt and partial answer again.
            reference: layout that checkpoints must have; default: that of the directory that the server was started with, in the server's
                precision, and if it cannot be read from here, that of the first checkpoint that is loaded.
            allow_cast: whether checkpoints may have another floating-point precision, which the server casts.
            max_connections: maximum number of generations in flight; more wait.
            transport: transport for tests.
            path_map: map from directories of weights here to other paths at the server.
            record_experts: completions have the experts that routers chose, for their replay in training; the server runs with
                --enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1.
            name: name in messages.
        """
        assert in_flight in ("continue", "abort"), f"in_flight is {in_flight!r}, expected 'continue' or 'abort'"
        self._server = HTTPEndpoint(
            base_url, api_key=api_key, deadlines=deadlines, retry=retry, max_connections=max_connections, transport=transport
        )
        self.name = name or f"the vLLM server at {self._server.base_url}"
        self._paths = path_map or PathMap()
        self._read_facts = partial(read_facts, self.name, self._server, self._paths, expected_model=expected_model, vocab_size=vocab_size)
        self._requests = RequestsInFlight(self.name, self._abort_on_server, initial_version=initial_version, resends=in_flight == "abort")
        self._routes = VLLMWeights(self.name, self._server, "keep" if in_flight == "continue" else "abort", self._is_on_cpu, self._paths)
        self.weights = ServerWeights(
            self._requests, self._routes, self._paths, reference, deadlines=self._server.deadlines, allow_cast=allow_cast
        )
        self._eos_token_ids = frozenset[int]()
        self._records_experts = record_experts
        self._has_warned_of_seeds = False
        self._info: ServerInfo | None = None
        self._exit_stack = AsyncExitStack()

    @property
    def features(self) -> frozenset[EngineFeature]:
        """Features of all engines of this class, and ROUTED_EXPERTS if this one records experts."""
        return _FEATURES | {EngineFeature.ROUTED_EXPERTS} if self._records_experts else _FEATURES

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            info = self._info = await self._read_facts()
            found = await trio.to_thread.run_sync(read_eos_token_ids, self._paths.to_local(info.model_path))
            self._eos_token_ids = frozenset(i for i in found if info.vocab_size is None or 0 <= i < info.vocab_size)
            await self.weights.open(info)
            stack.push_async_callback(self.weights.close)  # before the connections close
            if info.is_paused:
                self._requests.mark_unusable(
                    "it was found paused: another client is changing its weights, or was stopped while it did. Sync the weights, or call "
                    "resume() if they are known to be good"
                    + " (a server that was left asleep needs POST /wake_up before either)"
                    * (info.can_sleep and info.device != "cpu")
                )
            if info.log_prob_kind == "untempered":
                warnings.warn(
                    f"{self.name} gives log-probs at temperature 1 without truncation, whatever it samples from, and they are recorded as "
                    "such. Start it with --logprobs-mode processed_logprobs for those of the distribution sampled from",
                    stacklevel=2,
                )
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._requests.close()
        await self._exit_stack.aclose()

    # -- generation

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion; max_tokens is cut to the rest of the context.

        Raises: EngineRequestError before sending, for a request that the server would refuse; EngineError if the server fails.
        """
        (completion,) = await self.generate_group(prompt_tokens, params, 1, request_id=request_id)
        return completion

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        """Sample n completions of one prompt in one request, aborted as one. Raises as generate."""
        info = self._get_info()
        prompt, request_id = tuple(prompt_tokens), self._requests.name_request(request_id)
        params = check_request(self.name, request_id, prompt, params, n, info)
        check_params(self.name, request_id, params, n, info)
        if params.seed is not None and not info.honors_seeds:
            params = params.new(seed=None)
            if not self._has_warned_of_seeds:
                self._has_warned_of_seeds = True
                warnings.warn(
                    f"{self.name} gets no seeds: on a CPU they would end it as soon as it takes a prompt in pieces. Start it with "
                    "--no-enable-chunked-prefill",
                    stacklevel=3,
                )
        return await self._requests.run(request_id, prompt, params, n, self._send, info.log_prob_kind, info.vocab_size)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending calls return with the tokens they have; None = all calls of this engine, and of no other client."""
        await self._requests.abort(request_ids)

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Return log-probs of input_tokens[start_index:] given all before them, under the current weights.

        Args:
            input_tokens: fewer than the context length: the server generates one more.
            start_index: at least 1; the first token of a sequence has no prediction.
            temperature: 1.0: the server computes no others.

        Raises: EngineError.
        """
        info = self._get_info()
        limit, max_tokens = f"less tokens than the context of {info.context_length}", info.context_length - 1
        check_scoring(self.name, input_tokens, start_index, temperature, vocab_size=info.vocab_size, max_tokens=max_tokens, limit=limit)
        parse = partial(parse_prompt_log_probs, tokens=input_tokens, start_index=start_index)
        return await score_tokens(self._requests, partial(self._score, input_tokens), parse)

    async def _send(self, request: WireRequest) -> Sequence[Generated]:
        response = await self._server.post_json(GENERATE, vllm_payload(request, self._eos_token_ids))
        return parse_vllm_response(response, request, with_experts=self._records_experts)

    async def _score(self, tokens: Sequence[int], wire_id: str) -> Any:
        return await self._server.post_json(GENERATE, prompt_log_probs_payload(tokens, wire_id))

    async def _abort_on_server(self, wire_ids: Sequence[str]) -> None:
        body = {"request_ids": [ID_PREFIX + wire_id for wire_id in wire_ids]}  # never empty: [] aborts the requests of all clients
        assert wire_ids, "an abort of nothing would abort everything"
        await self._server.post_json("/abort_requests", body, kind="control", idempotent=True)

    # -- weights

    async def update_weights_from_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Load a Hugging Face directory, which must have this path on the server too.

        Returns: {"success": True, "weight_version", "pause_s", "load_s", "confirm_s", "resume_s"}.
        Raises: EngineError; before the server is contacted if the files are incomplete or do not fit the model.
        """
        return await self.weights.load_checkpoint(checkpoint_path)

    async def update_weights_with(
        self, load: Callable[[HTTPEndpoint, str], Awaitable[None]], specs: Sequence[WeightSpec], weight_version: int
    ) -> Mapping[str, Any]:
        """Update the paused server with `load`, for instance over NCCL. Returns and raises as above.

        Args:
            load: called with the server's routes and the label of the weights, which it need not set: this engine does.
            specs: specs of all weights, checked first: the server would take a part of them without an error.
        """
        self.check_weights(specs)

        async def load_and_reset(label: str) -> None:
            await load(self._server, label)
            await self._routes.reset_cache()

        return await self.weights.load_with(load_and_reset, weight_version)

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """Raise EngineError for weights that the server cannot take from memory."""
        self.weights.check(specs)
        if self._is_on_cpu() and all(spec.name != HEAD for spec in specs):
            raise EngineError(
                f"{self.name} was not given new weights: they have no {HEAD}, and on a CPU vLLM would go on with the old one. Add it, also "
                "where it is tied to the embedding"
            )

    @property
    def routes(self) -> VLLMWeights:
        """Routes of the server's weights, for transfers into its memory; see channels.py."""
        self._get_info()
        return self._routes

    def distrust_weights(self, reason: str) -> None:
        """Mark the server's weights as other than it reports: fail requests until an update succeeds."""
        self.weights.distrust(reason)

    async def get_weight_version(self) -> int:
        """Return the version of the weights that will sample the next token, as the server reports it."""
        return await self.weights.read_version()

    async def pause(self) -> None:
        """Stop generating until resume(); requests wait, or continue afterwards."""
        await self.weights.pause()

    async def resume(self) -> None:
        """Undo pause(), or a pause that another client left."""
        await self.weights.resume()

    async def sleep(self) -> None:
        """Let the server release the memory of its GPU until wake_up(), once it has answered all requests; new ones wait.

        Raises: EngineError, before it is told, for a server that was not started so that it can.
        """
        await self.weights.sleep()

    async def wake_up(self) -> None:
        """Undo sleep(). A server that is awake stays so."""
        await self.weights.wake_up()

    async def describe_server(self) -> ServerInfo:
        """Return the facts that the server reports now."""
        self._get_info()
        return await self._read_facts()

    def _get_info(self) -> ServerInfo:
        assert self._info is not None, "use the engine inside its `async with` block"
        self._requests.check_not_closed()
        return self._info

    def _is_on_cpu(self) -> bool:
        return self._get_info().device == "cpu"
