"""The engines that test_engine_contract.py holds to the contract: how each serves a model, and in what it is entitled to differ."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.types import LogProbKind, SamplingParams


@dataclass(frozen=True)
class ContractEngine:
    """An engine and its differences from the others. The defaults promise the least."""

    name: str
    open: Callable[[Any, Any, Path], AbstractAsyncContextManager[Any]]
    """(model, tokenizer, folder to write to) -> the engine, serving that model as version 0."""
    honors_seeds: bool = False  # the same seed gives the same tokens, whatever else runs; else the engine warns
    repeats_bits: bool = False  # the same requests at the same time give log-probs equal to the last bit
    cut_kind: LogProbKind = "sampled"  # of the log-probs where top_p, top_k or min_p cut the distribution
    longest: int = 512  # tokens of prompt and answer, to which a larger max_tokens is cut
    scores_at_any_temperature: bool = False  # given tokens; else at temperature 1 only

    def make_repeatable(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters unchanged if the engine obeys seeds, else with greedy sampling."""
        return params if self.honors_seeds else params.new(greedy=True, seed=None)


def wide(model: Any, tokenizer: Any, folder: Path) -> InProcessEngine:
    return InProcessEngine(model, tokenizer, max_slots=64)


def narrow(model: Any, tokenizer: Any, folder: Path) -> InProcessEngine:
    """Fewer slots than requests: everything has to wait its turn."""
    return InProcessEngine(model, tokenizer, max_slots=3, prefix_cache_tokens=16)


@asynccontextmanager
async def fleet(model: Any, tokenizer: Any, folder: Path) -> AsyncGenerator[EngineFleet]:
    """Two engines with the same weights."""
    engines = [InProcessEngine(copy.deepcopy(model), tokenizer, name=name) for name in ("left", "right")]
    async with engines[0], engines[1], EngineFleet(engines) as joined:
        yield joined


@asynccontextmanager
async def fake_vllm(model: Any, tokenizer: Any, folder: Path) -> AsyncGenerator[VLLMEngine]:
    save_model(model, tokenizer, folder)
    async with FakeVLLMServer(folder, tokenizer=tokenizer) as server, VLLMEngine(server.url) as engine:
        yield engine


@asynccontextmanager
async def fake_sglang(model: Any, tokenizer: Any, folder: Path) -> AsyncGenerator[SGLangEngine]:
    save_model(model, tokenizer, folder)
    async with FakeSGLangServer(folder, tokenizer=tokenizer) as server, SGLangEngine(server.url) as engine:
        yield engine


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Arguments with which a server is started."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


WIDE = ContractEngine("wide", wide, honors_seeds=True, repeats_bits=True, scores_at_any_temperature=True)
NARROW = ContractEngine("narrow", narrow, honors_seeds=True, repeats_bits=True, scores_at_any_temperature=True)
FAKE_VLLM = ContractEngine("fake_vllm", fake_vllm, honors_seeds=True)
FAKE_SGLANG = ContractEngine("fake_sglang", fake_sglang, cut_kind="tempered", longest=510)
FLEET = ContractEngine("fleet", fleet, honors_seeds=True, scores_at_any_temperature=True)
ENGINES = [WIDE, NARROW, FLEET, FAKE_VLLM, FAKE_SGLANG]
