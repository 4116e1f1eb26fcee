"""SGLangEngine: rollouts from an SGLang server, tokens in and tokens out. Pure parts in engines/sglang/protocol.py."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
from torch import Tensor

from rollouts.engines.http.checks import AtLeast, ServerInfo, check_request, records_sets
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.engines.http.requests import RequestsInFlight, Send
from rollouts.engines.http.scoring import check_scoring, score_tokens
from rollouts.engines.protocol import EngineFeature
from rollouts.engines.sglang.control import SGLangWeights
from rollouts.engines.sglang.facts import MeasuredKind, ask_facts, read_facts
from rollouts.engines.sglang.generation import OnTokens, SGLangGeneration
from rollouts.engines.sglang.protocol import PauseMode, SGLangServer, parse_prompt_log_probs, parse_server_info
from rollouts.engines.weights.checkpoint_check import CheckpointLayout
from rollouts.engines.weights.path_map import PathMap
from rollouts.engines.weights.server_weights import ServerWeights
from rollouts.errors import EngineError
from rollouts.types import Completion, SamplingParams
from rollouts.weight_specs import WeightSpec, describe_weights, plan_weights

_FEATURES = frozenset(
    {
        EngineFeature.MEMORY_UPDATES,
        EngineFeature.SCORES,
        EngineFeature.GROUPS,
        EngineFeature.DISTRUST,
        EngineFeature.SLEEP,
        EngineFeature.KEPT_TOKENS,
    }
)


class SGLangEngine:
    """An InferenceEngine over a running SGLang server.

        async with SGLangEngine("http://127.0.0.1:30000") as engine:
            completion = await engine.generate(prompt_tokens, SamplingParams(max_tokens=64))

    - Each token carries the version of the weights that sampled it, from the server's own spans.
    - Log-probs are after the temperature and before top_p, top_k and min_p. With kept_tokens and a top_k from 2 to the server's
      --sampling-mask-max-tokens (4,096), completions have the sets that tokens were drawn from, and log-probs over these; with another
      top_k the server returns no sets, and neither do completions.
    - Seeds have no effect unless the server runs --enable-deterministic-inference; the engine warns once.
    - A request may reach two tokens less than the context length: the server reserves them.
    - /health is never called: the server answers it by generating, which while paused takes 20 s and ends with the server marked unhealthy.
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
        log_prob_kind: MeasuredKind | None = None,
        reference: CheckpointLayout | None = None,
        allow_cast: bool = False,
        bucket_bytes: int = 32 * 2**20,
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
            vocab_size: vocabulary size of the trained model, or AtLeast(size) for a teacher of it; needed if the server's model directory
                cannot be read from here, because an id outside the vocabulary kills the server.
            initial_version: version of the weights that the server was started with.
            in_flight: effect of a weight sync on running requests: "continue" = they continue under the new weights, their keys and values
                computed again; "abort" = they return, and the engine sends prompt and partial answer again.
            log_prob_kind: "untempered" for a server with SGLANG_RETURN_ORIGINAL_LOGPROB; None = as measured on entering.
            reference: layout of the served model; default: that of the server's model directory if it can be read from here, else of the
                first weights that are loaded.
            allow_cast: whether new weights may have another floating-point precision than the reference.
            bucket_bytes: bytes of tensors in one request of update_weights.
            max_connections: maximum number of generations in flight; more wait.
            transport: transport for tests.
            path_map: map from directories of weights here to other paths at the server.
            record_experts: completions have the experts that routers chose, for their replay in training; the server runs with
                --enable-return-routed-experts, and the config.json of its model can be read from here.
            name: name in messages.
        """
        assert in_flight in ("continue", "abort"), f"in_flight is {in_flight!r}, expected 'continue' or 'abort'"
        self._server = HTTPEndpoint(
            base_url, api_key=api_key, deadlines=deadlines, retry=retry, max_connections=max_connections, transport=transport
        )
        self.name = name or f"the SGLang server at {self._server.base_url}"
        self._bucket_bytes = bucket_bytes
        paths = path_map or PathMap()
        self._read_facts = partial(
            read_facts,
            self.name,
            self._server,
            expected_model=expected_model,
            vocab_size=vocab_size,
            log_prob_kind=log_prob_kind,
            paths=paths,
        )
        self._records_experts = record_experts
        self._generation = SGLangGeneration(self.name, self._server, self._get_facts, record_experts=record_experts)
        self._requests = RequestsInFlight(self.name, self._generation.abort, initial_version=initial_version, resends=in_flight == "abort")
        pause_mode: PauseMode = "retract" if in_flight == "continue" else "abort"
        self._routes = SGLangWeights(self.name, self._server, pause_mode, self._generation.count_in_flight, paths)
        self.weights = ServerWeights(
            self._requests, self._routes, paths, reference, deadlines=self._server.deadlines, allow_cast=allow_cast
        )
        self._facts: SGLangServer | None = None
        self._has_warned_of_seeds = False
        self._exit_stack = AsyncExitStack()

    @property
    def features(self) -> frozenset[EngineFeature]:
        """Features of all engines of this class, and ROUTED_EXPERTS if this one records experts."""
        return _FEATURES | {EngineFeature.ROUTED_EXPERTS} if self._records_experts else _FEATURES

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            self._facts = await self._read_facts()
            if self._records_experts and self._facts.experts_per_token is None:
                raise EngineError(
                    f"{self.name}: record_experts is set, but {self._facts.info.model_path}/config.json does not say how many experts a "
                    "token has, or cannot be read from here: set it to False"
                )
            await self.weights.open(self._facts.info)
            stack.push_async_callback(self.weights.close)  # before the connections close
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._requests.close()
        await self._exit_stack.aclose()

    # -- generation

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion; max_tokens is cut to the rest of the context.

        Raises: EngineError before sending, for a request that the server would refuse or die of; or if the server fails.
        """
        (completion,) = await self.generate_group(prompt_tokens, params, 1, request_id=request_id)
        return completion

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        """Sample n completions of one prompt in one request, aborted as one. Raises as generate."""
        return await self._run(prompt_tokens, params, n, request_id, self._generation.send)

    async def generate_streaming(
        self, prompt_tokens: Sequence[int], params: SamplingParams, on_tokens: OnTokens, *, request_id: str | None = None
    ) -> Completion:
        """Sample as generate; on_tokens is called with the tokens as they arrive, for a display. The server repeats all tokens each time,
        at a cost of the length squared. If an aborting sync interrupts a request with stop strings, its last few tokens arrive again.
        """
        if self._get_facts().streams_deltas:
            raise EngineError(f"{self.name} runs with --incremental-streaming-output, whose streams this client does not read")
        (completion,) = await self._run(prompt_tokens, params, 1, request_id, partial(self._generation.send_streaming, on_tokens))
        return completion

    async def _run(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, request_id: str | None, send: Send
    ) -> tuple[Completion, ...]:
        server = self._get_facts()
        prompt, request_id = tuple(prompt_tokens), self._requests.name_request(request_id)
        params = params.new(kept_tokens=params.kept_tokens and records_sets(params, server.info.max_kept))
        params = check_request(
            self.name, request_id, prompt, params, n, server.info, max_prompt=server.max_prompt, max_total=server.max_total
        )
        if params.seed is not None and not server.info.honors_seeds and not self._has_warned_of_seeds:
            self._has_warned_of_seeds = True
            warnings.warn(
                f"{self.name} ignores seeds: start it with --enable-deterministic-inference, or do not rely on equal samples", stacklevel=4
            )
        kind = "sampled" if params.kept_tokens else server.info.log_prob_kind
        found = await self._requests.run(request_id, prompt, params, n, send, kind, server.info.vocab_size)
        return tuple(_end_if_full(completion, server.max_prompt) for completion in found)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending calls return with the tokens they have; None = all calls of this engine, and of no other client."""
        await self._requests.abort(request_ids)

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Return log-probs of input_tokens[start_index:] given all before them, under the current weights.

        Args:
            start_index: at least 1; the first token of a sequence has no prediction.
            temperature: 1.0: the server computes no others.

        Raises: EngineError.
        """
        server = self._get_facts()
        limit, vocab_size = f"no more tokens than {server.max_prompt}", server.info.vocab_size
        check_scoring(self.name, input_tokens, start_index, temperature, vocab_size=vocab_size, max_tokens=server.max_prompt, limit=limit)
        if start_index == len(input_tokens):
            return ()
        parse = partial(parse_prompt_log_probs, tokens=input_tokens, start_index=start_index, vocab_size=vocab_size)
        return await score_tokens(self._requests, partial(self._generation.score, input_tokens, start_index), parse)

    # -- weights

    async def update_weights_from_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Load a Hugging Face directory, which must have this path on the server too.

        Returns: {"success": True, "weight_version", "pause_s", "load_s", "confirm_s", "resume_s"}.
        Raises: EngineError; before the server is contacted if the files are incomplete or do not fit the model.
        """
        return await self.weights.load_checkpoint(checkpoint_path)

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Send the weights over HTTP, in buckets; the server needs no access to a local disk. Returns and raises as above."""
        specs = describe_weights(weights)
        send = partial(
            SGLangWeights.send_tensors, num_ranks=self.tensor_parallel_size, plan=plan_weights(specs, self._bucket_bytes), weights=weights
        )
        return await self.update_weights_with(send, specs, weight_version)

    async def update_weights_with(
        self, load: Callable[[SGLangWeights, str], Awaitable[None]], specs: Sequence[WeightSpec], weight_version: int
    ) -> Mapping[str, Any]:
        """Update the paused server with `load`, for instance over a process group. Returns and raises as above.

        Args:
            load: called with the server's routes and the label of the weights, which it must set (write_label, or a field of the last
                request).
            specs: specs of all weights, checked first: tensors that do not fit kill the server.
        """
        self.check_weights(specs)
        return await self.weights.load_with(partial(load, self._routes), weight_version)

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """Raise EngineError for weights that the server cannot take from memory."""
        server = self._get_facts()
        if server.data_parallel_size > 1:
            raise EngineError(
                f"{self.name} runs {server.data_parallel_size} data parallel replicas, which take no tensors: use a checkpoint directory"
            )
        self.weights.check(specs)

    @property
    def routes(self) -> SGLangWeights:
        """Routes of the server's weights, for transfers into its memory; see channels.py."""
        self._get_facts()
        return self._routes

    def distrust_weights(self, reason: str) -> None:
        """Mark the server's weights as other than it reports: fail requests until an update succeeds."""
        self.weights.distrust(reason)

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes of the server's model."""
        return self._get_facts().tensor_parallel_size

    async def get_weight_version(self) -> int:
        """Return the version of the weights that will sample the next token, as the server reports it."""
        return await self.weights.read_version()

    async def compute_checksum(self) -> str:
        """Return a checksum over all weights of the server: equal on two servers if and only if their weights are."""
        return await self.routes.compute_checksum()

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
        server = self._get_facts()
        now = parse_server_info(*await ask_facts(self._server))
        return replace(now.info, log_prob_kind=server.info.log_prob_kind, vocab_size=server.info.vocab_size)

    def _get_facts(self) -> SGLangServer:
        assert self._facts is not None, "use the engine inside its `async with` block"
        self._requests.check_not_closed()
        return self._facts


def _end_if_full(completion: Completion, max_prompt: int) -> Completion:
    """End an aborted answer that is too long to be sent as a prompt with reason "length": no server can continue it."""
    is_full = completion.finish_reason == "abort" and completion.input_len + completion.output_len > max_prompt
    return replace(completion, finish_reason="length") if is_full else completion
