"""Generation by one SGLang server: requests as they go over the wire, and aborts of their samples."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.http.requests import WireRequest
from rollouts.engines.http.samples import Generated
from rollouts.engines.sglang.protocol import (
    SGLangServer,
    create_sample_ids,
    parse_sglang_event,
    parse_sglang_response,
    prompt_log_probs_payload,
    sglang_payload,
    sglang_sampling_params,
)
from rollouts.errors import EngineProtocolError, raise_single_errors
from rollouts.seeds import derive_seed

_ABORTS_AT_ONCE = 16

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Called with new tokens and their log-probs."""


class SGLangGeneration:
    """Requests for samples and scores to one server. Holds the number of samples of each request in flight, for aborts."""

    def __init__(self, name: str, server: HTTPEndpoint, get_facts: Callable[[], SGLangServer], *, record_experts: bool = False) -> None:
        """
        Args:
            name: name of the engine, for messages.
            get_facts: returns the facts of the server, which limit requests. Raises EngineError after the engine's block.
            record_experts: whether to ask for the experts that routers chose.
        """
        self._name = name
        self._server = server
        self._get_facts = get_facts
        self._records_experts = record_experts
        self._num_samples: dict[str, int] = {}  # samples of each wire id in flight

    async def send(self, request: WireRequest) -> Sequence[Generated]:
        """Return the n results of a request, in order. Raises EngineError."""
        if self._is_used_up(request):
            return [Generated((), (), (), "length")] * request.n
        with self._in_flight_as(request) as ids:
            response = await self._server.post_json("/generate", self._create_payload(request, ids))
            return parse_sglang_response(response, ids, self._find_experts_per_token(), with_sets=request.params.kept_tokens)

    async def send_streaming(self, on_tokens: OnTokens, request: WireRequest) -> Sequence[Generated]:
        """Return the one result of a request; on_tokens is called with its tokens as they arrive. Raises EngineError."""
        if self._is_used_up(request):
            return [Generated((), (), (), "length")]
        num_heard, whole = 0, None
        with self._in_flight_as(request) as ids:
            async with self._server.stream_events("/generate", {**self._create_payload(request, ids), "stream": True}) as events:
                async for event in events:
                    experts, with_sets = self._find_experts_per_token(), request.params.kept_tokens
                    tokens, log_probs, whole = parse_sglang_event(event, ids[0], experts, with_sets=with_sets)
                    if len(tokens) > num_heard:
                        on_tokens(tokens[num_heard:], log_probs[num_heard:])
                        num_heard = len(tokens)
        if whole is None:
            raise EngineProtocolError(f"{self._name} ended the stream of {ids[0]} without a finish reason")
        return [whole]

    async def score(self, tokens: Sequence[int], start_index: int, wire_id: str) -> Any:
        """Return the server's answer with log-probs of tokens[start_index:]. Raises EngineError."""
        return await self._server.post_json("/generate", prompt_log_probs_payload(tokens, start_index, wire_id))

    async def abort(self, wire_ids: Sequence[str]) -> None:
        """End these requests with their tokens so far. Raises EngineError."""
        # not abort_all, which would end the requests of other clients; and not one abort for all samples by their common prefix: the server
        # drops an id that is not itself alive
        ids = [one for wire_id in wire_ids for one in create_sample_ids(wire_id, self._num_samples.get(wire_id, 0))]
        places = trio.CapacityLimiter(_ABORTS_AT_ONCE)

        async def abort(one: str) -> None:
            async with places:
                await self._server.post_text("/abort_request", {"rid": one}, idempotent=True)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for one in ids:
                    nursery.start_soon(abort, one)

    def count_in_flight(self) -> int:
        """Return the number of requests that the server has not answered."""
        return len(self._num_samples)

    def _is_used_up(self, request: WireRequest) -> bool:
        """Whether an abort left no room in the context or the budget to continue."""
        return len(request.tokens) > self._get_facts().max_prompt or request.params.max_tokens < 1

    @contextmanager
    def _in_flight_as(self, request: WireRequest) -> Generator[list[str]]:
        """Register the request's samples for aborts during the block. Yields their ids."""
        self._num_samples[request.wire_id] = request.n
        try:
            yield create_sample_ids(request.wire_id, request.n)
        finally:
            del self._num_samples[request.wire_id]

    def _find_experts_per_token(self) -> int | None:
        return self._get_facts().experts_per_token if self._records_experts else None

    def _create_payload(self, request: WireRequest, ids: Sequence[str]) -> dict[str, Any]:
        params, seeded = request.params, self._get_facts().info.honors_seeds
        seeds = [params.seed if params.seed is None or request.n == 1 else derive_seed(params.seed, i) for i in range(request.n)]
        sampling = [sglang_sampling_params(params.new(seed=s), seeded=seeded) for s in seeds]
        payload = sglang_payload([request.tokens] * request.n, sampling, ids)
        asked = {"return_routed_experts": self._records_experts, "return_sampling_mask": params.kept_tokens}
        return payload | {name: True for name, is_asked in asked.items() if is_asked}
