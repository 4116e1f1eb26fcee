"""Requests of a gateway per processor second of its process, over an engine that answers at once, with many sessions in flight.

    python -m benchmarks.gateway_requests [--in-flight 100 1000 2000] [--requests 16000] [--repeats 3] [--history 32768] [--sizes S M L]
        [--output FILE]

The server is a process of its own; only its processor time counts. A session is a conversation of TURNS requests for chat completions,
which goes on behind its answers. Each connection has SESSIONS sessions, one after the other, and is then followed by another connection:
whatever the number in flight, there are as many requests, sessions and connections. aiohttp.web is measured, too, where it is installed: a
handler that reads the same JSON, asks the same engine for the same tokens and writes the same answer, without template, tokenizer and
recording. A further figure is the time that recording adds to a turn behind a long history: planning the prompt, choosing its seed,
recording the answer, finding it again. The last ones are a request's share of an answer of 100 tokens of the embedded engine, in processor
time of one thread, with one answer at a time and with 64.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trio

from benchmarks.delayed_server import raise_open_files
from benchmarks.measure import MODEL_SIZES, create_model, print_table, processor_seconds, write_json
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.formats import create_text_format
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.gateway import GatewayConfig, open_gateway
from rollouts.gateway.requests import Reply, make_key, reply_message
from rollouts.gateway.sessions import Session, plan_messages
from rollouts.models.linear import choose_kernels
from rollouts.testing import FakeEngine
from rollouts.types import Completion, Message, SamplingParams

TURNS = 4  # requests of a session
SESSIONS = 2  # of a connection
ANSWER = "the answer"
GATEWAY, AIOHTTP = "gateway", "aiohttp"


class InstantEngine(FakeEngine):
    """An engine that answers at once, always with the same tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__()
        self._tokens = tuple(tokens)
        self._log_probs, self._versions = (-0.5,) * len(self._tokens), (0,) * len(self._tokens)

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Return the tokens."""
        return Completion(
            request_id=request_id or "",
            input_tokens=tuple(prompt_tokens),
            output_tokens=self._tokens,
            output_log_probs=self._log_probs,
            output_versions=self._versions,
            finish_reason="stop",
            temperature=params.temperature,
        )


def create_engine() -> tuple[InstantEngine, Any]:
    """Create the engine and its tokenizer."""
    tokenizer = create_char_tokenizer()
    ids: Any = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    end: Any = tokenizer.eos_token_id
    return InstantEngine([*ids, end]), tokenizer


async def serve_gateway() -> None:
    """Serve a gateway and print its port."""
    from integration.run.job import favor_computation  # takes a second to import

    engine, tokenizer = create_engine()
    with favor_computation():  # as the command does
        async with open_gateway(engine, tokenizer, GatewayConfig(max_in_flight=4096)) as gateway:
            print(gateway.port, flush=True)
            await trio.sleep_forever()


def serve_aiohttp() -> None:
    """Serve the same API by aiohttp, and print its port."""
    asyncio: Any = importlib.import_module("asyncio")
    web: Any = importlib.import_module("aiohttp.web")
    engine, _ = create_engine()
    params = SamplingParams()

    async def answer(request: Any) -> Any:
        body = await request.json()
        found = await engine.generate((1,) * 64, params)
        message = {"role": "assistant", "content": ANSWER, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        usage = {
            "prompt_tokens": found.input_len,
            "completion_tokens": found.output_len,
            "total_tokens": found.input_len + found.output_len,
        }
        frame = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time()), "model": body["model"]}
        return web.json_response(frame | {"choices": [choice], "usage": usage})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/sessions/{key}/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def run_server(kind: str) -> Generator[tuple[int, int]]:
    """Run a server of a kind for the block; yield its port and the id of its process."""
    command = [sys.executable, "-m", "benchmarks.gateway_requests", "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.terminate()


async def post(stream: trio.SocketStream, path: str, body: bytes) -> bytes:
    """Send a request and return the body of its answer: by hand, so that the client is cheap."""
    await stream.send_all(b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += await stream.receive_some(65536)
    head, _, answer = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:])
    while len(answer) < length:
        answer += await stream.receive_some(65536)
    return answer


async def ask(port: int, in_flight: int, num_connections: int, name: str) -> None:
    """Hold a number of sessions at once, over this many connections in all."""
    numbers = iter(range(num_connections))

    async def talk() -> None:
        for number in numbers:
            await use_connection(number)

    async def use_connection(number: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        messages: list[dict[str, str]] = []
        for k in range(SESSIONS * TURNS):
            if k % TURNS == 0:
                messages = []
            messages.append({"role": "user", "content": f"question {k}"})
            body = json.dumps({"model": "m", "messages": messages}).encode()
            found = await post(stream, f"/sessions/{name}-{number}-{k // TURNS}/v1/chat/completions", body)
            assert f'"{ANSWER}"'.encode() in found, found
            messages.append({"role": "assistant", "content": ANSWER})
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for _ in range(in_flight):
            nursery.start_soon(talk)


def measure(kind: str, in_flight: int, requests: int) -> float:
    """Measure requests per processor second of a server's process."""
    with run_server(kind) as (port, pid):
        trio.run(ask, port, 50, 100, "warm")
        num_connections, before = requests // (SESSIONS * TURNS), processor_seconds(pid)
        trio.run(ask, port, in_flight, num_connections, "asked")
        return num_connections * SESSIONS * TURNS / max(0.01, processor_seconds(pid) - before)  # the system counts in hundredths


def compare_servers(
    in_flight: Sequence[int], requests: int, repeats: int, kinds: Sequence[str] = (GATEWAY, AIOHTTP)
) -> dict[str, dict[str, float]]:
    """Return medians for each server and number in flight, of so many requests that each connection has its own; servers take turns."""
    requests = max(requests, SESSIONS * TURNS * max(in_flight))
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for number in in_flight:
            for kind in kinds:
                rates.setdefault((kind, number), []).append(measure(kind, number, requests))
    return {kind: {f"{number} per CPU-s": statistics.median(rates[kind, number]) for number in in_flight} for kind in kinds}


def measure_recording(num_tokens: int, num_turns: int = 20) -> float:
    """Measure the processor milliseconds that recording adds to a turn behind a history of this many tokens: plan, record, find again."""
    return trio.run(time_recording, num_tokens, num_turns)


async def time_recording(num_tokens: int, num_turns: int) -> float:
    """Return the median of the processor milliseconds of the turns behind the first one, which tokenizes the history."""
    engine, tokenizer = create_engine()
    conversation = create_text_format(tokenizer, "\n")
    session = Session(key="a", engine=engine, request_prefix="a")
    messages = [Message(role="user", content="x" * num_tokens)]
    spent: list[float] = []
    for _ in range(num_turns):
        started = time.process_time()
        plan = plan_messages(session, conversation, "", messages, show=lambda message: message)
        session.take_seed_keys(plan)
        planned = time.process_time() - started
        completion = await engine.generate(plan.tokens, SamplingParams())
        started = time.process_time()
        answer = session.record(plan, completion, ANSWER)
        reply = Reply(number=answer.number, text=ANSWER, finish="stop", completion=completion)
        session.note_reply(plan, answer, reply)
        spent.append(planned + time.process_time() - started)
        messages += [reply_message(reply), Message(role="user", content="go on")]
        assert make_key(messages[-2]) == make_key(reply_message(reply))
    return 1000 * statistics.median(spent[1:])


def measure_answers(engine: InProcessEngine, in_flight: int, num_answers: int, num_tokens: int = 100) -> float:
    """Measure the processor milliseconds of an answer of this many tokens of the embedded engine to prompts of 40 tokens."""

    async def answer(numbers: Iterator[int]) -> None:
        for number in numbers:
            completion = await engine.generate(range(3, 43), SamplingParams(max_tokens=num_tokens, seed=number))
            assert completion.output_len == num_tokens, f"{completion.output_len} of {num_tokens} tokens were generated"

    async def answer_all(number: int) -> None:
        numbers = iter(range(number))
        async with trio.open_nursery() as nursery:
            for _ in range(in_flight):
                nursery.start_soon(answer, numbers)

    trio.run(answer_all, in_flight)  # warm
    started = time.process_time()
    trio.run(answer_all, num_answers)
    return 1000 * (time.process_time() - started) / num_answers


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 2000])
    parser.add_argument("--requests", type=int, default=16000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--history", type=int, default=32768)
    parser.add_argument("--sizes", nargs="*", choices=sorted(MODEL_SIZES), default=sorted(MODEL_SIZES), help="models of measured answers")
    parser.add_argument("--output")
    parser.add_argument("--serve", choices=(GATEWAY, AIOHTTP), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_open_files()
    if arguments.serve == AIOHTTP:
        return serve_aiohttp()
    if arguments.serve == GATEWAY:
        return trio.run(serve_gateway)
    kinds = (GATEWAY, *([AIOHTTP] if importlib.util.find_spec("aiohttp") else []))
    table = compare_servers(arguments.in_flight, arguments.requests, arguments.repeats, kinds)
    print_table("requests of chat completions", table)
    recording = measure_recording(arguments.history)
    print(f"recording a turn behind {arguments.history:,} tokens: {recording:.3f} ms")
    request_ms = 1000 / next(iter(table[GATEWAY].values()))
    shares: dict[str, float] = {}
    torch.set_num_threads(1)
    for size in arguments.sizes:
        engine = InProcessEngine(create_model(size), eos_token_ids=(), max_slots=64, kernels=choose_kernels("cpu"))
        for number in (1, 64):
            shares[f"{size}, {number} at a time"] = request_ms / measure_answers(engine, number, max(4, 2 * number))
    for name, share in shares.items():
        print(f"a request of the gateway / an answer of 100 tokens of the embedded engine, model {name}: {100 * share:.2f} %")
    write_json(arguments.output, {"requests": arguments.requests, "table": table, "recording_ms": recording, "shares": shares})
    return None


if __name__ == "__main__":
    main()
