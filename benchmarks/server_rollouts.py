"""Benchmark rollouts through a real inference server: engines and a bare client at the same concurrency, and the parts of a weight sync.

    python -m benchmarks.server_rollouts --kind vllm|sglang [--python PATH] [--concurrency 64] [--requests 512] [--max-tokens 16]
        [--repeats 15] [--syncs 10] [--own-core] [--output FILE.json]

Starts a server with a tiny Qwen3 model on a CPU, or one with --model DIR --device cuda, or uses the one at --url, whose weights it reloads
several times. The bare client sends pre-encoded requests and reads answers without parsing them: no client can be faster. Connections are
open and the server is warm before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
import trio

from benchmarks.delayed_server import raise_open_files
from benchmarks.measure import print_table, write_json
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.http.checks import ServerInfo
from rollouts.engines.http.requests import WireRequest
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.sglang.protocol import create_sample_ids, sglang_payload, sglang_sampling_params
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.protocol import GENERATE, vllm_payload
from rollouts.engines.weights.checkpoint_check import read_eos_token_ids
from rollouts.testing import create_tiny_model
from rollouts.types import SamplingParams

Kind = Literal["vllm", "sglang"]
Engine = VLLMEngine | SGLangEngine
Ask = Callable[[int], Awaitable[Any]]
"""Send request number i, one of a fixed list, and return its answer."""

ENGINES: dict[Kind, type[VLLMEngine] | type[SGLangEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
GROUP = 8
CONTEXT_LENGTH = 512
STARTUP_S = 600.0
SYNC_PARTS = ("write", "check", "pause", "load", "confirm", "resume")


# -- requests


def create_prompts(number: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Create random prompts, equal in every run."""
    rng = random.Random(0)
    return [tuple(rng.randrange(2, vocab_size) for _ in range(length)) for _ in range(number)]


def create_budgets(number: int, max_tokens: int) -> list[SamplingParams]:
    """Create token budgets from 0.5 to 1.5 times max_tokens, equal in every run, so that rollouts do not end in the same step."""
    rng = random.Random(1)
    return [SamplingParams(max_tokens=rng.randint(max(1, max_tokens // 2), max_tokens * 3 // 2)) for _ in range(number)]


def encode_request(kind: Kind, host: str, prompt: tuple[int, ...], params: SamplingParams, n: int, i: int, eos: frozenset[int]) -> bytes:
    """Encode an HTTP request for n samples with the same body as the engine's."""
    wire_id = f"bare-{n:03d}-{i:012d}"
    if kind == "vllm":
        path, payload = GENERATE, vllm_payload(WireRequest(wire_id, prompt, params, n), eos)
    else:
        sampling = [sglang_sampling_params(params, seeded=False)] * n
        path, payload = "/generate", sglang_payload([prompt] * n, sampling, create_sample_ids(wire_id, n))
    body = json.dumps(payload, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def count_tokens(answer: Any) -> int:
    """Count the sampled tokens in an answer: the bytes of a body, or completions."""
    if not isinstance(answer, bytes):
        return sum(len(completion.output_tokens) for completion in answer)
    parsed = json.loads(answer)
    if "choices" in parsed:
        return sum(len(choice["token_ids"]) for choice in parsed["choices"])
    return sum(len(one["output_ids"]) for one in (parsed if isinstance(parsed, list) else [parsed]))


# -- contenders


@asynccontextmanager
async def open_bare(url: str, requests: Sequence[bytes]) -> AsyncGenerator[Ask]:
    """Open keep-alive streams on a stack."""
    address = httpx.URL(url)
    streams: list[trio.SocketStream] = []

    async def ask(i: int) -> bytes:
        stream = streams.pop() if streams else await trio.open_tcp_stream(address.host, address.port or 80)
        await stream.send_all(requests[i % len(requests)])
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += await receive(stream)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), f"the server answered {answer!r}"
        length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))[15:])
        parts = [body]
        length -= len(body)
        while length > 0:
            parts.append(await receive(stream))
            length -= len(parts[-1])
        streams.append(stream)
        return b"".join(parts)

    yield ask
    for stream in streams:
        await stream.aclose()


async def receive(stream: trio.SocketStream) -> bytes:
    """Receive at least one byte."""
    data = await stream.receive_some(65536)
    assert data, "the server closed a connection in the middle of an answer"
    return bytes(data)


@asynccontextmanager
async def open_engine(engine: Engine, prompts: Sequence[tuple[int, ...]], budgets: Sequence[SamplingParams], n: int) -> AsyncGenerator[Ask]:
    """Return a request function: engine.generate, or engine.generate_group for more than one sample."""

    async def generate(i: int) -> Any:
        return (await engine.generate(prompts[i % len(prompts)], budgets[i % len(prompts)]),)

    async def generate_group(i: int) -> Any:
        return await engine.generate_group(prompts[i % len(prompts)], budgets[i % len(prompts)], n)

    yield generate if n == 1 else generate_group


# -- throughput


async def run_requests(ask: Ask, num_requests: int, concurrency: int) -> list[Any]:
    """Return the answers to num_requests requests, `concurrency` at a time."""
    answers: list[Any] = []
    numbers = iter(range(num_requests))

    async def work() -> None:
        for i in numbers:
            answers.append(await ask(i))

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(work)
    return answers


async def measure_turn(contender: AbstractAsyncContextManager[Ask], num_requests: int, concurrency: int) -> dict[str, float]:
    """Measure a turn of a contender: throughput per second, and the client's CPU seconds per 1,000 requests."""
    async with contender as ask:
        await run_requests(ask, concurrency, concurrency)
        wall, cpu = time.perf_counter(), time.process_time()
        answers = await run_requests(ask, num_requests, concurrency)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert len(answers) == num_requests, f"{len(answers)} answers to {num_requests} requests"
    tokens = sum(map(count_tokens, answers))
    return {"tokens/s": tokens / wall, "requests/s": num_requests / wall, "CPU s/1000": 1000 * cpu / num_requests}


def summarize(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return medians of each contender's turns, its best tokens per second, and both relative to the bare client's.

    The ratio is the median over repeats of two turns close together. If other work disturbs the turns, the best ones are more reliable.

    Args:
        turns: turns of each contender in order of repeats; a bare turn comes just before the one compared with it.
    """
    table: dict[str, dict[str, float]] = {}
    base: Sequence[Mapping[str, float]] = ()
    for name, own in turns.items():
        base = own if name.startswith("bare") else base
        table[name] = {column: statistics.median(turn[column] for turn in own) for column in own[0]}
        best, best_base = (max(turn["tokens/s"] for turn in some) for some in (own, base))
        ratio = statistics.median(turn["tokens/s"] / other["tokens/s"] for turn, other in zip(own, base, strict=True))
        table[name] |= {"best tokens/s": best, "ratio": ratio, "ratio of best": best / best_base}
    return table


async def compare_clients(
    kind: Kind, url: str, engine: Engine, info: ServerInfo, arguments: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Compare contenders in turns, in reverse order in every second repeat."""
    assert info.vocab_size is not None, "the server's vocabulary is unknown"
    budgets = create_budgets(arguments.requests, arguments.max_tokens)
    prompts = create_prompts(arguments.requests, arguments.prompt_tokens, info.vocab_size)
    eos = frozenset(read_eos_token_ids(Path(info.model_path)))
    host = httpx.URL(url).netloc.decode()
    contenders: dict[str, tuple[int, Callable[[], AbstractAsyncContextManager[Ask]]]] = {}
    for n, name in ((1, "generate"), (GROUP, "generate_group")):
        requests = [encode_request(kind, host, prompt, budgets[i], n, i, eos) for i, prompt in enumerate(prompts[: len(prompts) // n])]
        contenders[f"bare client, n={n}"] = n, partial(open_bare, url, requests)
        contenders[f"engine.{name}, n={n}"] = n, partial(open_engine, engine, prompts[: len(prompts) // n], budgets, n)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for repeat in range(-1, arguments.repeats):
        for name in list(contenders)[:: 1 if repeat % 2 == 0 else -1]:
            n, create = contenders[name]
            turn = await measure_turn(create(), arguments.requests // n, max(1, arguments.concurrency // n))
            if repeat >= 0:
                turns[name].append(turn)
    return summarize(turns)


# -- weight syncs


async def sync_once(engine: Engine, model: Any, directory: Path) -> dict[str, float]:
    """Return the seconds of the parts of one sync; "check" = checking the files before any request to the server."""
    start = time.perf_counter()
    await trio.to_thread.run_sync(partial(model.save_pretrained, directory))
    written = time.perf_counter()
    answer = await engine.update_weights_from_checkpoint(directory)
    total = time.perf_counter() - written
    parts = {part: float(answer[f"{part}_s"]) for part in ("pause", "load", "confirm", "resume")}
    return {"write": written - start, "check": total - sum(parts.values()), **parts}


async def measure_syncs(engine: Engine, info: ServerInfo, model: Any, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return medians and maxima over syncs, of an idle server and of one with requests always in flight."""
    assert info.vocab_size is not None, "the server's vocabulary is unknown"
    prompts = create_prompts(arguments.requests, arguments.prompt_tokens, info.vocab_size)
    budgets = create_budgets(arguments.requests, arguments.max_tokens)
    table: dict[str, dict[str, float]] = {}
    for in_flight in (0, arguments.concurrency):
        with tempfile.TemporaryDirectory() as folder:
            async with trio.open_nursery() as nursery, open_engine(engine, prompts, budgets, 1) as ask:
                if in_flight:
                    nursery.start_soon(run_requests, ask, sys.maxsize, in_flight)
                times: list[dict[str, float]] = []
                for i in range(-1, arguments.syncs):
                    await trio.sleep(0.2)
                    seconds = await sync_once(engine, model, Path(folder) / f"weights_{i + 1}")
                    if i >= 0:
                        times.append(seconds)
                nursery.cancel_scope.cancel()
        for name, of in (("median", statistics.median), ("max", max)):
            table[f"{in_flight} in flight, {name}"] = {part: 1000 * of([one[part] for one in times]) for part in SYNC_PARTS}
    await engine.update_weights_from_checkpoint(Path(info.model_path))
    return table


# -- the server


def pin_process(cores: set[int]) -> None:
    """Restrict this process, and those it starts from now on, to some cores. Linux only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def save_tiny_model(path: Path) -> Path:
    """Write a model that hardly ever ends a response before its budget, so that all turns sample equally many tokens."""
    model: Any = create_tiny_model(hidden_size=64, head_dim=32)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.mul_(20)
        embedding[1] = 0
    model.save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)
    return path


@asynccontextmanager
async def open_server(arguments: argparse.Namespace, folder: Path) -> AsyncGenerator[str]:
    """Yield the address of the server, started if necessary."""
    if arguments.url is not None:
        yield arguments.url.rstrip("/")
        return
    config = ServerConfig(
        kind=arguments.kind,
        model_path=arguments.model or str(save_tiny_model(folder / "model")),
        python=arguments.python,
        device=arguments.device,
        dtype="float32" if arguments.device == "cpu" else "auto",
        context_length=CONTEXT_LENGTH,
        max_num_seqs=arguments.concurrency,
        env={"OMP_NUM_THREADS": "1"} if arguments.device == "cpu" else {},
    )
    own, *others = sorted(os.sched_getaffinity(0))
    if arguments.own_core:
        pin_process(set(others))
    async with launch_server(config, folder / "server.log", environment=os.environ, startup_s=STARTUP_S) as server:
        if arguments.own_core:
            pin_process({own})
        yield server.url


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the server, compare clients, sync weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        async with open_server(arguments, Path(folder)) as url, ENGINES[arguments.kind](url) as engine:
            info = await engine.describe_server()
            table = await compare_clients(arguments.kind, url, engine, info, arguments)
            print_table(f"{arguments.kind} {info.version}, {arguments.concurrency} samples in flight", table)
            syncs: dict[str, dict[str, float]] = {}
            if arguments.syncs > 0:
                model = AutoModelForCausalLM.from_pretrained(info.model_path, dtype="auto")
                syncs = await measure_syncs(engine, info, model, arguments)
                print_table(f"{arguments.syncs} weight syncs, ms", syncs)
    return {"kind": info.kind, "version": info.version, "settings": vars(arguments), "clients": table, "syncs_ms": syncs}


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--url", help="of a running server, which is used instead of starting one")
    parser.add_argument("--python", default=sys.executable, help="of the environment in which the server is installed")
    parser.add_argument("--model", help="directory to serve; default: a tiny Qwen3 model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--own-core", action="store_true", help="the client runs on one core, a server started here on the others")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    raise_open_files()
    write_json(arguments.output, trio.run(measure, arguments))


if __name__ == "__main__":
    main()
