"""Calls of an engine through a proxy that damages what it carries, each with a fault of its own."""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio

from benchmarks.reliability import faulty_proxy, loopback
from rollouts.engines.http.endpoint import Deadlines, RetryPolicy
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError, EngineProtocolError, EngineStatusError, EngineTimeout
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.testing.servers.models import ScriptedModel
from rollouts.types import SamplingParams

PARAMS = SamplingParams(max_tokens=6)
SERVERS = {
    "vllm": (FakeVLLMServer, VLLMEngine, "/inference/v1/generate", "token_ids"),
    "sglang": (FakeSGLangServer, SGLangEngine, "/generate", "input_ids"),
}
# fault -> number of times that a call meets it, and the error with which it fails; None = it completes
FAULTS: dict[str, tuple[int, type[EngineError] | None]] = {
    "": (0, None),
    "delay": (1, None),
    "slow": (1, None),
    "429": (2, None),
    "503": (1, None),
    "twice": (1, None),
    "refused": (0, None),  # connections are, for a moment
    "reset": (1, EngineError),
    "hang": (1, EngineTimeout),
    "500": (1, EngineStatusError),
    "502": (1, EngineStatusError),
    "504": (1, EngineStatusError),
    "404": (1, EngineStatusError),
    "redirect": (1, EngineStatusError),
    "garbage": (1, EngineError),
    "reset in the middle": (1, EngineError),
    "end in the middle": (1, EngineError),
    "too short": (1, EngineError),
    "cut json": (1, EngineProtocolError),
    "corrupted": (1, EngineProtocolError),
    "page": (1, EngineProtocolError),
    "other json": (1, EngineProtocolError),
    "answer of another": (1, EngineProtocolError),
    "wrong": (1, EngineProtocolError),
}


def prompt_of(number: int) -> tuple[int, ...]:
    """A prompt of its own for each call."""
    return (3, 10 + number // 1600, 10 + number // 40 % 40, 10 + number % 40)


def answer_to(prompt: tuple[int, ...], place: int) -> int:
    return 4 + zlib.crc32(bytes([*prompt, place])) % 120


def spoil(server: str) -> Callable[[bytes], bytes]:
    """Put a token behind the vocabulary into the answer."""

    def change(body: bytes) -> bytes:
        answer = json.loads(body)
        if server == "vllm":
            answer["choices"][0]["token_ids"][1] = 4000
        else:
            answer["meta_info"]["output_token_logprobs"][1][1] = 4000
            if "output_ids" in answer:
                answer["output_ids"][1] = 4000
        return json.dumps(answer).encode()

    return change


async def call_through_faults(
    kind: str, num_calls: int, seed: int, at_once: int = 16, connect: Callable[..., Any] | None = None, kinds: Sequence[str] = tuple(FAULTS)
) -> Counter[str]:
    """Make calls, each with a fault of its own. Return the outcomes, and what is left of them.

    Args:
        kind: "vllm" or "sglang".
        connect: creates the client in place of the library's own.
        kinds: the faults that take turns.
    """
    create_server, create_engine, route, tokens_field = SERVERS[kind]
    create_engine = connect or create_engine
    faults = [kinds[i % len(kinds)] for i in range(num_calls)]
    random.Random(seed).shuffle(faults)
    left = {str(list(prompt_of(i))): [fault] * FAULTS[fault][0] for i, fault in enumerate(faults)}
    found: Counter[str] = Counter()

    def choose(exchange: loopback.Exchange) -> str | None:
        if exchange.target != route:
            return None
        key = str(json.loads(exchange.body)[tokens_field])
        return left[key].pop() if left.get(key) else ""

    retry = RetryPolicy(attempts=6, first_wait_s=0.03, longest_wait_s=0.1, budget_s=30.0)
    tasks_before, files_before = trio.lowlevel.current_statistics().tasks_living, loopback.count_open_files()
    async with AsyncExitStack() as stack:
        model = ScriptedModel(lambda prompt, place, loads, seed: (answer_to(prompt, place), -0.5))
        server = await stack.enter_async_context(create_server(model))
        proxy = await stack.enter_async_context(faulty_proxy.open_proxy(server.url, choose, spoil(kind)))
        options: dict[str, Any] = {"retry": retry, "vocab_size": 128}
        engine = await stack.enter_async_context(create_engine(proxy.url, **options))
        hasty = await stack.enter_async_context(create_engine(proxy.url, deadlines=Deadlines(generate_s=2.0), **options))
        limit = trio.CapacityLimiter(at_once)
        await engine.generate(prompt_of(num_calls), PARAMS)  # what the fault "answer of another" answers with at first

        async def call(number: int, engine: Any) -> None:
            fault, prompt = faults[number], prompt_of(number)
            async with limit:
                try:
                    completion = await engine.generate(prompt, PARAMS, request_id=f"call-{number}")
                except EngineError as error:
                    expected = FAULTS[fault][1]
                    is_expected = expected is not None and isinstance(error, expected)
                    found[f"fails: {fault}" if is_expected else f"UNEXPECTED {fault}: {type(error).__name__}: {error}"] += 1
                    return
            tokens = tuple(answer_to(prompt, place) for place in range(PARAMS.max_tokens))
            is_right = (completion.output_tokens, completion.input_tokens, completion.request_id) == (tokens, prompt, f"call-{number}")
            may_complete = FAULTS[fault][1] is None or fault == "reset"  # a kept connection that is lost is no sign that anything was read
            found[f"completes: {fault}" if is_right and may_complete else f"WRONG {fault}: {completion}"] += 1

        async with trio.open_nursery() as nursery:
            for number, fault in enumerate(faults):
                if fault != "refused":
                    nursery.start_soon(call, number, hasty if fault == "hang" else engine)
        for number, fault in enumerate(faults):
            if fault == "refused":
                async with create_engine(proxy.url, **options) as fresh:  # keeps no connection
                    await proxy.refuse()
                    await call(number, fresh)
        found["faults that hit nothing"] = sum(map(len, left.values()))
        found["kinds of faults"] = len(proxy.hits)
    await loopback.settle(lambda: loopback.count_open_files() <= files_before)
    found["tasks left"] = trio.lowlevel.current_statistics().tasks_living - tasks_before
    return found
