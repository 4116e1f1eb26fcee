"""Inference servers that die, hang, answer wrongly, or take new weights half-way, and clients that cancel most of their requests."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trio

from benchmarks.measure import memory_mb
from benchmarks.reliability import loopback
from benchmarks.reliability.calls import FAULTS, answer_to, call_through_faults, prompt_of
from benchmarks.reliability.experiment import Amount, Figures, Outcome
from benchmarks.reliability.fleet_syncs import Telling, sync_with_faults, tell, write_weights
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig
from rollouts.engines.http.endpoint import Deadlines, RetryPolicy
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError
from rollouts.testing import FakeVLLMServer
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.models import ScriptedModel
from rollouts.types import Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=6)


class NaiveClient:
    """A client of vLLM that repeats whatever fails and believes whatever it is told."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=2.0, trust_env=False)

    async def generate(self, prompt: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        body = {"token_ids": list(prompt), "sampling_params": {"max_tokens": params.max_tokens, "logprobs": 0}}
        for attempt in range(3):
            try:
                answer = await self._client.post("/inference/v1/generate", json=body)
                choice = answer.json()["choices"][0]
                tokens = tuple(choice["token_ids"])
                return Completion(
                    request_id=request_id or "", input_tokens=tuple(prompt), output_tokens=tokens, output_log_probs=(-0.5,) * len(tokens),
                    output_versions=(0,) * len(tokens), finish_reason="length",
                )  # fmt: skip
            except Exception as error:
                if attempt == 2:
                    raise EngineError(repr(error)) from error
        raise AssertionError

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def connect_naively(url: str, **options: Any) -> AsyncGenerator[NaiveClient]:
    """Open a NaiveClient."""
    client = NaiveClient(url)
    try:
        yield client
    finally:
        await client.close()


def _sum_up(found: Counter[str]) -> dict[str, int]:
    started = {
        "calls that complete": "completes",
        "calls that fail typed": "fails",
        "wrong samples": "WRONG",
        "other outcomes": "UNEXPECTED",
    }
    told = {name: sum(n for outcome, n in found.items() if outcome.startswith(prefix)) for name, prefix in started.items()}
    return told | {"tasks left": found["tasks left"]}


def damage_calls(amount: Amount) -> Outcome:
    """Call both kinds of server through a proxy with 23 kinds of faults."""
    calls, told = amount.count(48, 1000), Counter[str]()
    for kind in ("vllm", "sglang"):
        told.update(_sum_up(trio.run(call_through_faults, kind, calls, amount.seed)))
    lies = ("", "wrong", "answer of another")
    naive = _sum_up(trio.run(partial(call_through_faults, "vllm", 48, amount.seed, connect=connect_naively, kinds=lies)))
    done = told["calls that complete"] + told["calls that fail typed"]
    return Outcome(
        size=f"{calls} calls of each protocol, {len(FAULTS) - 1} kinds of faults", measured=dict(told),
        holds=done == 2 * calls and told["wrong samples"] == told["other outcomes"] == told["tasks left"] == 0,
        control={"wrong samples": naive["wrong samples"], "of calls": 48}, control_fails=naive["wrong samples"] > 0,
    )  # fmt: skip


async def _lose_engines(count: int) -> dict[str, int | float]:
    """Ask a fleet for samples while one server dies, one answers 500, one hangs, and a fourth is added; then let all of them die."""
    found: Counter[str] = Counter()
    model = partial(ScriptedModel, lambda prompt, place, loads, seed: (answer_to(prompt, place), -0.5))
    retry = RetryPolicy(attempts=2, first_wait_s=0.01, longest_wait_s=0.02, budget_s=0.1)
    config = FleetConfig(exclude_failed=True, first_wait_s=0.02, longest_wait_s=0.05, max_retries=1000, patience_s=3.0)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeVLLMServer(model(), seconds_per_token=0.002)) for _ in range(4)]
        deadlines = Deadlines(generate_s=0.5, control_s=0.5, health_s=0.5)
        engines: list[Any] = []
        for server in servers:
            engine = VLLMEngine(server.url, retry=retry, vocab_size=128, deadlines=deadlines)
            engines.append(await stack.enter_async_context(engine))
        fleet = await stack.enter_async_context(EngineFleet(engines, config=config, say=lambda text: None))

        async def ask(number: int) -> None:
            prompt = prompt_of(number)
            completion = await fleet.generate(prompt, PARAMS, request_id=f"sample-{number}")
            right = tuple(answer_to(prompt, place) for place in range(PARAMS.max_tokens))
            found["samples"] += 1
            found["wrong samples"] += (completion.output_tokens, completion.request_id) != (right, f"sample-{number}")

        async with trio.open_nursery() as nursery:
            for number in range(count):
                if number == count * 3 // 10:
                    servers[0].add_fault(Fault("drop", None, 0, None))
                    servers[1].add_fault(Fault("status", "/inference/v1/generate", 0, None))
                    servers[2].add_fault(Fault("hang", "/inference/v1/generate", 0, 5))
                nursery.start_soon(ask, number)
                await trio.sleep(0.002)
        for server in servers:
            server.add_fault(Fault("drop", None, 0, None))
        started = time.monotonic()
        with suppress(EngineError), trio.fail_after(30.0):
            await fleet.generate(prompt_of(0), PARAMS)
            found["samples of dead servers"] += 1
        waited = time.monotonic() - started
    return {**found, "seconds to the error where all are dead": round(waited, 1)}


def lose_engines(amount: Amount) -> Outcome:
    """Lose three of four servers in three ways, and then the last."""
    count = amount.count(64, 256)
    measured = trio.run(_lose_engines, count)
    naive: Counter[str] = Counter()

    async def ask_one() -> None:
        async with _serve() as server:
            async with connect_naively(server.url) as client:
                for number in range(count):
                    if number == count * 3 // 10:
                        server.add_fault(Fault("drop", None, 0, None))
                    with suppress(EngineError):
                        await client.generate(prompt_of(number), PARAMS)
                        naive["samples"] += 1

    trio.run(ask_one)
    return Outcome(
        size=f"{count} samples of 4 servers", measured=measured,
        holds=measured["samples"] == count and not measured["wrong samples"] and measured["seconds to the error where all are dead"] <= 5.0,
        control=dict(naive), control_fails=naive["samples"] < count,
    )  # fmt: skip


async def _sync_naively(folder: Path, num_syncs: int) -> Counter[str]:
    """Ask a server all the time, and name its samples by the weights that were last sent, as a client without versions does.

    Each sync begins in the middle of a sample, behind an accepted one: on a fast machine all syncs would else be done before a sample ends.
    """
    found, version, accepted = Counter[str](), 0, trio.Event()
    async with FakeVLLMServer(Telling(write_weights(folder / "naive", 0)), seconds_per_update=0.01, seconds_per_token=0.002) as server:
        async with VLLMEngine(server.url, vocab_size=128) as engine, trio.open_nursery() as nursery:

            async def ask() -> None:
                nonlocal accepted
                while True:
                    completion = await engine.generate((3, 4), SamplingParams(max_tokens=8))
                    found["accepted"] += 1
                    accepted.set()
                    found["of other weights than they are named after"] += any(t != tell(version) for t in completion.output_tokens)

            nursery.start_soon(ask)
            for version in range(1, num_syncs + 1):
                await engine.update_weights_from_checkpoint(write_weights(folder / f"naive-{version}", version))
                accepted = trio.Event()
                await accepted.wait()
                await trio.sleep(0.008)  # half of the next sample
            nursery.cancel_scope.cancel()
    return found


def sync_half_way(amount: Amount) -> Outcome:
    """Sync a fleet of four servers with a fault at some stage of each sync."""
    syncs = amount.count(12, 200)
    found = trio.run(sync_with_faults, amount.folder, syncs, 1000, amount.seed)
    naive = trio.run(_sync_naively, amount.folder, 8)
    names = ("accepted", "unconfirmed", "wrong", "half succeeded", "failed", "cancelled", "all serve again", "took the last")
    return Outcome(
        size=f"{syncs} syncs of 4 servers", measured={name: found[name] for name in names},
        holds=found["unconfirmed"] == found["wrong"] == 0 and found["all serve again"] == syncs and found["took the last"] == 4,
        control=dict(naive), control_fails=naive["of other weights than they are named after"] > 0,
    )  # fmt: skip


PAIRS = 12
"""Rounds of the used client and of a fresh one that are compared."""


async def _cancel_rounds(client: Any, rounds: int, requests: int, keep: int) -> list[float]:
    """Over-sample: start many requests, keep the first, cancel the others. Returns the processor seconds of each round."""
    seconds: list[float] = []
    for number in range(rounds):
        started, done = time.process_time(), 0
        with trio.move_on_after(20.0) as patience:
            async with trio.open_nursery() as nursery:

                async def ask(place: int, nursery: trio.Nursery = nursery, number: int = number) -> None:
                    nonlocal done
                    await client.generate(prompt_of(place), PARAMS, request_id=f"{number}-{place}")
                    done += 1
                    if done >= keep:
                        nursery.cancel_scope.cancel()

                for place in range(requests):
                    nursery.start_soon(ask, place)
        if patience.cancelled_caught:
            break
        seconds.append(time.process_time() - started)
    return seconds


async def _soak(rounds: int, requests: int, keep: int) -> dict[str, float | int]:
    retry, deadlines = RetryPolicy(attempts=1), Deadlines(generate_s=20.0)
    async with _serve() as server:
        connect = partial(VLLMEngine, server.url, retry=retry, vocab_size=128, deadlines=deadlines, max_connections=64)
        async with connect() as engine:
            await _cancel_rounds(engine, 2, requests, requests)  # all connections that there may be
            await _cancel_rounds(engine, max(1, rounds // 10), requests, keep)
            gc.collect()
            files, memory = loopback.count_open_files(), memory_mb("VmRSS")
            seconds = list[float]()
            for _ in range(rounds):
                seconds += await _cancel_rounds(engine, 1, requests, keep)
                server.received.clear()  # the fake server keeps all requests, in this process: none of them is the client's memory
            gc.collect()
            await loopback.settle(lambda: loopback.count_open_files() <= files + 2)
            grown, more = memory_mb("VmRSS") - memory, loopback.count_open_files() - files
            completed = len(await _cancel_rounds(engine, 1, requests, requests))
            async with connect() as fresh:
                await _cancel_rounds(fresh, 2, requests, requests)
                used_s, fresh_s = list[float](), list[float]()
                for _ in range(PAIRS):  # in turn: what else the machine does slows both down, and the fastest of each least
                    used_s += await _cancel_rounds(engine, 1, requests, keep)
                    fresh_s += await _cancel_rounds(fresh, 1, requests, keep)
    return {
        "rounds completed": len(seconds), "whole rounds afterwards": completed, "open files more": max(0, more), "MB more": round(grown, 1),
        "processor time of a round / of a fresh client": round(min(used_s) / min(fresh_s), 2),
    }  # fmt: skip


def _serve() -> FakeVLLMServer:
    model = ScriptedModel(lambda prompt, place, loads, seed: (answer_to(prompt, place), -0.5))
    return FakeVLLMServer(model, seconds_per_token=0.002)


async def _leak(rounds: int) -> dict[str, int]:
    """Cancel requests of httpx without a limit of one's own, and count the connections of its pool that never come back."""
    async with _serve() as server:
        async with connect_naively(server.url) as client:
            client._client = httpx.AsyncClient(
                base_url=server.url, limits=httpx.Limits(max_connections=64, max_keepalive_connections=16), trust_env=False,
                timeout=httpx.Timeout(5, pool=None),
            )  # fmt: skip
            pool: Any = client._client._transport._pool  # type: ignore[attr-defined]
            tried = done = stuck = 0
            for attempt in range(4):  # which round loses a place is a matter of the machine's speed
                completed = len(await _cancel_rounds(client, rounds, 256, 128))
                done, tried = done + completed, (attempt + 1) * rounds
                stuck = sum(not connection.is_idle() for connection in pool.connections)
                if stuck or completed < rounds:
                    break
    return {"rounds started": tried, "rounds completed": done, "places of 64 that are lost": stuck}


def cancel_most(amount: Amount) -> Outcome:
    """Cancel 15 of 16 requests, round after round, on one client."""
    rounds, leaking = amount.count(2, 200), amount.count(3, 6)
    measured: Figures = trio.run(_soak, rounds, 256, 16)
    control = trio.run(_leak, leaking)
    measures = amount.is_full  # memory says nothing after few rounds
    flat = not measures or (float(measured["MB more"]) < 5.0 and float(measured["processor time of a round / of a fresh client"]) < 1.1)
    return Outcome(
        size=f"{rounds} rounds of 256 requests, 16 kept", measured=measured,
        holds=flat and int(measured["open files more"]) <= 2
        and (measured["rounds completed"], measured["whole rounds afterwards"]) == (rounds, 1),
        control=control, control_fails=control["places of 64 that are lost"] > 0 or control["rounds completed"] < control["rounds started"],
    )  # fmt: skip
