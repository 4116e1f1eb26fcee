"""Weight syncs of a fleet of servers, of which one fails at some stage of each, while samples are asked for all the time."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig
from rollouts.engines.http.endpoint import RetryPolicy
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, EngineFeature
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.weights.checkpoint_check import read_fingerprint
from rollouts.errors import EngineError
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.models import ScriptedModel, read_safetensors
from rollouts.types import Completion, SamplingParams

ROUTES = {
    "vllm": ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info", "/resume"),
    "sglang": ("/pause_generation", "/update_weights_from_disk", "/model_info", "/continue_generation"),
}


async def ask_all_the_time(fleet: EngineFleet, engines: list[Any], versions_of: Any, found: Counter[str], params: SamplingParams) -> None:
    """Generate until cancelled; count what is accepted, and what of it has a version that no engine had confirmed by then."""
    number = 0

    async def one(name: str) -> None:
        nonlocal number
        while True:
            number += 1
            with suppress(EngineError):
                completion = await fleet.generate((3 + number % 50,), params, request_id=f"{name}-{number}")
                found["accepted"] += 1
                found["unconfirmed"] += not set(completion.output_versions) <= versions_of(completion)
                told = zip(completion.output_tokens, completion.output_versions, strict=True)
                found["wrong"] += any(token != tell(version) for token, version in told)
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(one, f"ask-{i}")


class Watched:
    """An engine of a server, with the versions that it has confirmed: by an update that succeeded, then by its report."""

    features = frozenset[EngineFeature]()

    def __init__(self, engine: Any, answers: dict[str, Watched]) -> None:
        self.engine, self.name, self._answers = engine, engine.name, answers
        self.confirmed = {0}
        self._given: int | None = None

    async def generate(self, tokens: Any, params: SamplingParams, *, request_id: str | None = None) -> Completion:
        completion = await self.engine.generate(tokens, params, request_id=request_id)
        self._answers[completion.request_id] = self
        return completion

    async def abort(self, request_ids: Any = None) -> None:
        await self.engine.abort(request_ids)

    async def update_weights_from_checkpoint(self, path: Path) -> Mapping[str, Any]:
        self._given = None
        answer = await self.engine.update_weights_from_checkpoint(path)
        self._given = answer["weight_version"]
        return answer

    async def get_weight_version(self) -> int:
        version = await self.engine.get_weight_version()
        if version == self._given:
            self.confirmed.add(version)
        return version


class Telling(ScriptedModel):
    """A model whose tokens tell what it has loaded: each is 10 + the version that was written into its weights, modulo 100."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda prompt, place, content, seed: (tell(content), -0.5), path=str(path))

    def load(self, path: Path) -> None:
        self.load_tensors(read_safetensors(path))

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.num_loads = int(tensors["w"])


def tell(version: int) -> int:
    return 10 + version % 100


def write_weights(directory: Path, version: int) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"w": torch.tensor([float(version)])}, directory / "model.safetensors")
    (directory / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))
    return directory


def can_recover(fleet: EngineFleet) -> bool:
    """Whether the files of the weights that the fleet serves are still what they were."""
    weights = fleet._health.weights
    assert weights.directory is not None, "the fleet was not told where its weights are"
    return read_fingerprint(weights.directory) == weights.fingerprint


async def wait_all_serve(fleet: EngineFleet) -> bool:
    """Wait until all members serve again, as they must if there is anything that they can be given."""
    while any(member.state.value != "serving" for member in fleet.members):
        if not can_recover(fleet):
            return False
        await trio.sleep(0.01)
    return True


async def sync_with_faults(folder: Path, num_syncs: int, num_directories: int, seed: int) -> Counter[str]:
    """Sync a fleet of two vLLM and two SGLang servers, each time with a fault at another stage of one of them, some cancelled, too.

    Args:
        num_directories: directories that the versions take turns in.
    """
    draw, found, answers = random.Random(seed), Counter[str](), dict[str, Watched]()
    stages = [(kind, *stage) for kind, routes in ROUTES.items() for stage in product(routes, ("status", "drop", "cut", "delay"), (0, 0, 1))]
    draw.shuffle(stages)
    retry = RetryPolicy(attempts=2, first_wait_s=0.01, longest_wait_s=0.02, budget_s=0.1)
    config = FleetConfig(exclude_failed=True, first_wait_s=0.02, longest_wait_s=0.05, max_retries=1000, patience_s=60.0)
    async with AsyncExitStack() as stack:
        served, servers, engines = write_weights(folder / "served", 0), list[tuple[str, Any]](), list[Watched]()
        for kind, create, connect in (("vllm", FakeVLLMServer, VLLMEngine), ("sglang", FakeSGLangServer, SGLangEngine)) * 2:
            server = await stack.enter_async_context(create(Telling(served), seconds_per_update=0.01, seconds_per_token=0.002))
            engine = await stack.enter_async_context(connect(server.url, retry=retry, vocab_size=128))
            servers.append((kind, server))
            engines.append(Watched(engine, answers))
        fleet = await stack.enter_async_context(EngineFleet(engines, config=config, initial_weights=served, say=lambda text: None))
        async with trio.open_nursery() as nursery:
            params = SamplingParams(max_tokens=8)
            nursery.start_soon(ask_all_the_time, fleet, engines, lambda c: answers[c.request_id].confirmed, found, params)
            for version in range(1, num_syncs + 1):
                path = write_weights(folder / f"weights-{version % num_directories}", version)
                kind, route, fault, after = stages[version % len(stages)]
                server = draw.choice([server for of_kind, server in servers if of_kind == kind])
                server.add_fault(Fault(fault, route, after, draw.choice([1, 2, 3, None]), 0.05 if fault == "delay" else 0.0))
                is_lost = not can_recover(fleet) and not any(member.state.value == "serving" for member in fleet.members)
                try:
                    with trio.move_on_after(draw.choice([0.02, 0.05, 30.0, 30.0, 30.0])) as scope:
                        answer = await fleet.update_weights_from_checkpoint(path)
                        found["half succeeded" if answer["failed"] else "succeeded"] += 1
                        found["succeeded where nobody served"] += is_lost
                    found["cancelled"] += scope.cancelled_caught
                except EngineError:
                    found["failed"] += 1
                await trio.sleep(0.02)
                server.clear_faults()
                found["all serve again"] += await wait_all_serve(fleet)
            answer = await fleet.update_weights_from_checkpoint(write_weights(folder / "last", num_syncs + 1))
            found["took the last"] = answer["num_engines"]
            nursery.cancel_scope.cancel()
    return found
