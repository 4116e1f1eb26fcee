"""Weights over process groups: bodies of routes as values, and gloo groups with fake servers on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from endless_models import create_endless_model
from server_waits import PATIENCE_S, wait_for_tokens
from transformers import AutoModelForCausalLM

from rollouts.engines.distributed_weights import (
    flatten_bucket,
    open_weight_group,
    pack_for_vllm,
    sglang_bucket_payload,
    sglang_group_payload,
    vllm_group_payload,
    vllm_update_payload,
)
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.sglang_protocol import split_into_buckets
from rollouts.errors import EngineError
from rollouts.testing import FakeSGLangServer, Fault
from rollouts.types import SamplingParams

PROMPT = (5, 9, 12, 20)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def expected_tokens(model: Any) -> tuple[int, ...]:
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    create_endless_model(0).save_pretrained(path)
    return path


def test_the_body_that_lets_sglang_join_a_group():
    assert sglang_group_payload("10.0.0.1", 29500, 3, 5, "g", "nccl") == {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 3,
        "world_size": 5,
        "group_name": "g",
        "backend": "nccl",
    }


def test_a_bucket_is_described_and_sent_as_the_bytes_of_its_tensors():
    bucket = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.tensor(7.0)), ("c", torch.arange(8.0).reshape(2, 4).T)]
    body = sglang_bucket_payload(bucket, "g")
    assert (body["names"], body["dtypes"], body["shapes"]) == (["a", "b", "c"], ["float32"] * 3, [[2, 3], [], [4, 2]])
    assert (body["load_format"], body["flush_cache"], body["group_name"]) == ("flattened_bucket", False, "g")
    assert "weight_version" not in body
    data = flatten_bucket(bucket, "cpu")
    assert data.dtype == torch.uint8
    parts = data.view(torch.float32).split([6, 1, 8])
    for (_, tensor), part in zip(bucket, parts, strict=True):
        assert part.reshape(tensor.shape).equal(tensor)


def test_tensors_of_several_dtypes_never_share_a_bucket_where_they_would_lie_at_odd_places():
    weights = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2), "c": torch.zeros(5, dtype=torch.bfloat16)}
    for bucket in split_into_buckets(weights, 1000):
        assert len({tensor.dtype for _, tensor in bucket}) == 1


def test_the_bodies_for_vllm():
    assert vllm_group_payload("10.0.0.1", 29500, 1, 3, buffer_bytes=100, num_buffers=4) == {
        "init_info": {
            "master_address": "10.0.0.1",
            "master_port": 29500,
            "rank_offset": 1,
            "world_size": 3,
            "packed": True,
            "packed_buffer_size_bytes": 100,
            "packed_num_buffers": 4,
        }
    }
    weights = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    assert vllm_update_payload(weights) == {
        "update_info": {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
    }


def test_buffers_for_vllm_are_full_when_they_hold_more_than_their_size():
    weights = {name: torch.zeros(size, dtype=torch.uint8) for name, size in (("a", 60), ("b", 40), ("c", 1), ("d", 500), ("e", 3))}
    assert pack_for_vllm(weights, 100) == [["a", "b", "c"], ["d"], ["e"]]
    assert pack_for_vllm(weights, 10_000) == [["a", "b", "c", "d", "e"]]
    assert pack_for_vllm({}, 100) == []


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_all_servers_of_a_group_get_the_weights_while_requests_run(directory, in_flight):
    model = create_endless_model(1)
    found = []
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url, in_flight=in_flight) as first,
        SGLangEngine(two.url, in_flight=in_flight) as second,
        open_weight_group([first, second], backend="gloo", bucket_bytes=5000) as group,
    ):

        async def generate(engine: SGLangEngine) -> None:
            found.append(await engine.generate(PROMPT, SamplingParams(max_tokens=100)))

        for server in (one, two):
            server.scheduler.hold_tokens(5)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for engine in (first, second):
                    nursery.start_soon(generate, engine)
                for server in (one, two):
                    await wait_for_tokens(server, 5)
                answers = await group.update_weights(dict(model.state_dict()), 5)
                for server in (one, two):
                    server.scheduler.release_tokens()
        assert [answer["weight_version"] for answer in answers] == [5, 5]
        for engine in (first, second):
            completion = await engine.generate(PROMPT, GREEDY)
            assert completion.output_tokens == expected_tokens(model)
            assert set(completion.output_versions) == {5}
        await group.update_weights(dict(create_endless_model(2).state_dict()), 6)
        assert await first.compute_checksum() == await second.compute_checksum()
        assert one.count("/update_weights_from_distributed") > 10
    assert [set(c.output_versions) for c in found] == [{0, 5}, {0, 5}]
    assert one.count("/destroy_weights_update_group") == two.count("/destroy_weights_update_group") == 1


async def test_weights_that_do_not_fit_reach_no_server(directory):
    weights = {**create_endless_model(1).state_dict(), "model.norm.weight": torch.ones(3)}
    async with FakeSGLangServer(directory) as server, SGLangEngine(server.url) as engine:
        async with open_weight_group([engine], backend="gloo") as group:
            with pytest.raises(EngineError, match=r"model.norm.weight"):
                await group.update_weights(weights, 1)
            assert server.count("/pause_generation") == 0
            await group.update_weights(dict(create_endless_model(1).state_dict()), 1)


async def test_a_server_that_cannot_join_is_named(directory):
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url) as first,
        SGLangEngine(two.url, name="the second") as second,
    ):
        two.add_fault(Fault("status", "/init_weights_update_group", status=400, body='{"success": false, "message": "no such device"}'))
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="no such device"):
            async with open_weight_group([first, second], backend="gloo", timeout_s=30):
                pass
        assert (await first.generate(PROMPT, GREEDY)).output_len == 9


async def test_a_server_that_dies_in_a_broadcast_leaves_the_others_with_known_weights(directory):
    old = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url) as first,
        SGLangEngine(two.url) as second,
    ):
        async with open_weight_group([first, second], backend="gloo", bucket_bytes=5000) as group:
            two.add_fault(Fault("drop", "/update_weights_from_distributed", after=3))
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError):
                await group.update_weights(dict(create_endless_model(1).state_dict()), 1)
            with pytest.raises(EngineError, match="open a new one"):
                await group.update_weights(dict(create_endless_model(1).state_dict()), 1)
            after = await first.generate(PROMPT, GREEDY)
            assert (after.output_tokens, set(after.output_versions)) == (expected_tokens(old), {0})
        async with open_weight_group([first, second], backend="gloo") as group:
            new = create_endless_model(1)
            await group.update_weights(dict(new.state_dict()), 1)
            for engine in (first, second):
                assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(new)
