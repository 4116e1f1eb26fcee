"""The embedded engine in a process of its own, behind the same protocol: a prototype to compare with the engine in a thread.

Requests and answers are lines of JSON over pipes; weights go through a file in memory (/dev/shm). The child has its own interpreter, which
the trainer's process cannot delay, at the cost of a second copy of Python and torch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.protocol import EngineFeature
from rollouts.errors import EngineError
from rollouts.types import Completion, SamplingParams


class Lines:
    """A reader of lines from a stream."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream, self._rest = stream, b""

    async def read(self) -> list[dict[str, Any]]:
        """Return the lines that have arrived, at least one; none at the end of the stream."""
        while b"\n" not in self._rest:
            received = await self._stream.receive_some(1 << 20)
            if not received:
                return []
            self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


class Mailer:
    """A writer of lines to a stream, in batches."""

    def __init__(self, stream: trio.abc.SendStream) -> None:
        self._stream, self._waiting, self._wanted = stream, list[str](), trio.Event()

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a line to send."""
        self._waiting.append(json.dumps(message, separators=(",", ":")))
        self._wanted.set()

    async def run(self) -> None:
        """Send queued lines until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            lines, self._waiting = self._waiting, []
            await self._stream.send_all(("\n".join(lines) + "\n").encode())


class ChildEngine:
    """An InferenceEngine whose work is done in a child process. Made by open_child_engine."""

    features = frozenset({EngineFeature.MEMORY_UPDATES})

    def __init__(self, mailer: Mailer, directory: Path) -> None:
        self._mailer, self._directory = mailer, directory
        self._answers: dict[int, Any] = {}
        self._waiting: dict[int, trio.Event] = {}
        self._number = 0

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Generate as InProcessEngine.generate."""
        answer = await self._ask("generate", prompt=list(prompt_tokens), params=asdict(params), request_id=request_id)
        return Completion(**{name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()})

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Abort as InProcessEngine.abort."""
        await self._ask("abort", request_ids=None if request_ids is None else list(request_ids))

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Update as InProcessEngine.update_weights."""
        path = self._directory / "weights.safetensors"
        unique = {tensor.data_ptr(): name for name, tensor in reversed(weights.items())}  # a file contains tied weights once
        tied = {name: unique[tensor.data_ptr()] for name, tensor in weights.items()}
        await trio.to_thread.run_sync(save_file, {name: weights[name] for name in unique.values()}, path)
        return await self._ask("update_weights", path=str(path), tied=tied, weight_version=weight_version)

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Raise EngineError: not supported by this prototype."""
        raise EngineError("the child engine takes weights in memory")

    async def get_weight_version(self) -> int:
        """Return the version as InProcessEngine.get_weight_version."""
        return await self._ask("get_weight_version")

    async def _ask(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        number = self._number
        self._waiting[number] = trio.Event()
        self._mailer.post({"number": number, "method": method, **arguments})
        try:
            await self._waiting[number].wait()
        finally:
            del self._waiting[number]
        answer = self._answers.pop(number)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["value"]

    async def receive(self, lines: Lines) -> None:
        """Deliver answers to their requests until the child ends."""
        while answers := await lines.read():
            for answer in answers:
                if answer["number"] in self._waiting:
                    self._answers[answer["number"]] = answer
                    self._waiting[answer["number"]].set()


@asynccontextmanager
async def open_child_engine(model_directory: Path, max_slots: int) -> AsyncGenerator[ChildEngine]:
    """Run a child process with a directory's model and one compute thread for the block."""
    command = [sys.executable, "-m", "benchmarks.child_engine", str(model_directory), str(max_slots)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        async with trio.open_nursery() as nursery:
            process = await nursery.start(partial(trio.run_process, command, stdin=-1, capture_stdout=False, stdout=-1))
            mailer = Mailer(process.stdin)
            engine = ChildEngine(mailer, Path(directory))
            nursery.start_soon(mailer.run)
            nursery.start_soon(engine.receive, Lines(process.stdout))
            await engine.get_weight_version()
            yield engine
            nursery.cancel_scope.cancel()


async def serve(model_directory: str, max_slots: int) -> None:
    """Answer requests in the child process until stdin ends."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    engine = InProcessEngine(AutoModelForCausalLM.from_pretrained(model_directory), max_slots=max_slots)
    mailer, lines = Mailer(trio.lowlevel.FdStream(1)), Lines(trio.lowlevel.FdStream(0))

    async def answer(message: dict[str, Any]) -> None:
        method, value = message["method"], None
        try:
            if method == "generate":
                params = {name: tuple(v) if isinstance(v, list) else v for name, v in message["params"].items()}
                value = vars(await engine.generate(message["prompt"], SamplingParams(**params), request_id=message["request_id"]))
            elif method == "abort":
                await engine.abort(message["request_ids"])
            elif method == "update_weights":
                stored = await trio.to_thread.run_sync(load_file, message["path"])
                weights = {name: stored[source] for name, source in message["tied"].items()}
                value = await engine.update_weights(weights, message["weight_version"])
            else:
                value = await engine.get_weight_version()
        except EngineError as error:
            mailer.post({"number": message["number"], "error": str(error)})
            return
        mailer.post({"number": message["number"], "value": value})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailer.run)
        while messages := await lines.read():
            for message in messages:
                nursery.start_soon(answer, message)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], int(sys.argv[2]))
