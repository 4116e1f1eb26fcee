"""Experts of a mixture of experts in the answers of servers, as clients record them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
from server_waits import wait_for_tokens

from rollouts.engines.http.endpoint import RetryPolicy
from rollouts.engines.http.samples import read_experts
from rollouts.engines.protocol import EngineFeature, get_engine_features
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError, EngineProtocolError
from rollouts.testing import FakeSGLangServer, FakeVLLMServer, Fault, SGLangSettings, VLLMSettings, create_tiny_model
from rollouts.types import RoutedExperts, SamplingParams

FAST = RetryPolicy(budget_s=0.5, first_wait_s=0.01, longest_wait_s=0.05)
LAYERS, TOP_K, NUM_EXPERTS = 3, 2, 300  # more experts than a byte counts
KINDS = {"vllm": (FakeVLLMServer, VLLMSettings, VLLMEngine), "sglang": (FakeSGLangServer, SGLangSettings, SGLangEngine)}


def choose_experts(tokens):
    """Experts that depend on the token and its place."""
    place = np.arange(len(tokens))[:, None, None]
    layer, k = np.arange(LAYERS)[None, :, None], np.arange(TOP_K)[None, None, :]
    return ((np.array(tokens)[:, None, None] * 7 + place * 3 + layer * 11 + k) % NUM_EXPERTS).astype(np.uint16)


def record_of(tokens):
    data = choose_experts(tokens).astype("<i2")
    data[-1] = -1  # no pass has read the last token
    return RoutedExperts(data=data.tobytes(), num_routers=LAYERS, top_k=TOP_K)


@asynccontextmanager
async def open_pair(kind, tmp_path, *, records=True, size=True, **options):
    create_server, settings, create_engine = KINDS[kind]
    create_tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"num_experts_per_tok": TOP_K} if size else {})}))
    async with create_server(tmp_path, settings=settings(choose_experts=choose_experts if records else None)) as server:
        async with create_engine(server.url, retry=FAST, record_experts=True, **options) as engine:
            yield server, engine


@pytest.mark.parametrize("kind", KINDS)
async def test_completions_have_the_experts_of_prompt_and_output(kind, tmp_path):
    async with open_pair(kind, tmp_path) as (_, engine):
        assert EngineFeature.ROUTED_EXPERTS in get_engine_features(engine)
        found = [await engine.generate((5, 6, 7), SamplingParams(max_tokens=6, temperature=0.0))]
        found += await engine.generate_group((8, 9), SamplingParams(max_tokens=4), 3)
        for completion in found:
            assert completion.routed_experts == record_of(completion.input_tokens + completion.output_tokens)


@pytest.mark.parametrize("kind", KINDS)
async def test_parts_before_and_after_a_weight_sync_are_one_record(kind, tmp_path):
    async with open_pair(kind, tmp_path / "a", in_flight="abort") as (server, engine):
        found = []

        async def ask():
            found.append(await engine.generate((5, 6, 7), SamplingParams(max_tokens=40, temperature=0.0, stop=())))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_for_tokens(server, 3)
            await engine.update_weights_from_checkpoint(tmp_path / "a")
        assert len(set(found[0].output_versions)) == 2
        assert found[0].routed_experts == record_of(found[0].input_tokens + found[0].output_tokens)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_without_the_flag_is_named_with_it(kind, tmp_path):
    async with open_pair(kind, tmp_path, records=False) as (_, engine):
        with pytest.raises(EngineProtocolError, match="gave no experts of a mixture of experts: start the server with --enable-return-rou"):
            await engine.generate((5, 6), SamplingParams(max_tokens=3))


async def test_a_model_that_does_not_say_how_many_experts_a_token_has_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"config.json does not say how many experts a token has"):
        async with open_pair("sglang", tmp_path, size=False):
            pass


@pytest.mark.parametrize("kind", KINDS)
async def test_damaged_records_are_typed_errors(kind, tmp_path):
    def damage(answer):
        meta = answer["choices"][0] if kind == "vllm" else answer["meta_info"]
        meta["routed_experts"] = meta["routed_experts"][:-8]
        return answer

    async with open_pair(kind, tmp_path) as (server, engine):
        server.add_fault(Fault("rewrite", path="/inference/v1/generate" if kind == "vllm" else "/generate", rewrite=damage))
        with pytest.raises(EngineProtocolError):
            await engine.generate((5, 6), SamplingParams(max_tokens=3))


def test_a_record_of_another_length_or_with_impossible_experts_is_refused():
    for values in (np.zeros((5, 2, 2), int), np.zeros((4, 2), int), np.zeros((4, 0, 2), int)):
        with pytest.raises(EngineProtocolError, match=r"expected \(4, layers, experts of a token\)"):
            read_experts(values, 2, 3)
    for values in (np.full((4, 2, 2), 40_000), np.full((4, 2, 2), -1), np.zeros((4, 2, 2))):
        with pytest.raises(EngineProtocolError, match="gave experts of the type"):
            read_experts(values, 2, 3)
