"""Weights over process groups: bodies of routes as values, and gloo groups with fake servers on loopback."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from endless_models import create_endless_model
from server_waits import PATIENCE_S, wait_for_tokens
from transformers import AutoModelForCausalLM

from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.sglang.channels import (
    open_http_channel,
    open_shared_memory,
    open_weight_group,
    sglang_bucket_payload,
    sglang_group_payload,
)
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.weights.cuda_ipc import SharedBucket, serialize_handles, vllm_handles
from rollouts.errors import BackendError, EngineError
from rollouts.testing import FakeSGLangServer, Fault
from rollouts.testing.servers.payloads import read_named_tensors
from rollouts.types import SamplingParams
from rollouts.weight_specs import WeightSpec, describe_weights, flatten_bucket, plan_weights

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


def test_a_bucket_is_described_beside_its_bytes():
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0)}
    body = sglang_bucket_payload(plan_weights(describe_weights(weights), 1000).buckets[0], "g")
    assert (body["names"], body["dtypes"], body["shapes"]) == (["a", "b"], ["float32"] * 2, [[2, 3], []])
    assert (body["load_format"], body["flush_cache"], body["group_name"]) == ("flattened_bucket", False, "g")
    assert "weight_version" not in body


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


@pytest.mark.parametrize("open_channel", [open_shared_memory, open_http_channel])
async def test_servers_of_this_machine_get_weights_without_a_group(directory, open_channel):
    model = create_endless_model(1)
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url) as first,
        SGLangEngine(two.url) as second,
        open_channel([first, second], bucket_bytes=5000) as channel,
    ):
        answers = await channel.update_weights(dict(model.state_dict()), 5)
        assert [answer["weight_version"] for answer in answers] == [5, 5]
        assert await first.compute_checksum() == await second.compute_checksum()
        completion = await second.generate(PROMPT, GREEDY)
        assert (completion.output_tokens, set(completion.output_versions)) == (expected_tokens(model), {5})
        buckets = [request for request in one.received if request.path == "/update_weights_from_tensor"]
        assert len(buckets) == len(plan_weights(describe_weights(model.state_dict()), 5000).buckets)
        if open_channel is open_shared_memory:
            assert max(len(request.body) for request in buckets) < 5000, "handles travel, not weights"


async def test_a_server_that_hangs_is_named_with_its_deadline(directory):
    old = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url, name="the first") as first,
        SGLangEngine(two.url, name="the second", deadlines=Deadlines(sync_s=0.5)) as second,
        open_weight_group([first, second], backend="gloo", bucket_bytes=5000) as group,
    ):
        two.add_fault(Fault("hang", "/update_weights_from_distributed", after=2))
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match=r"the second.*0\.5 s.*the first has weight version 0") as caught:
            await group.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert "the second has weight version 0" in str(caught.value)
        for engine in (first, second):
            after = await engine.generate(PROMPT, GREEDY)
            assert (after.output_tokens, set(after.output_versions)) == (expected_tokens(old), {0})


async def test_a_server_that_refuses_a_bucket_and_cannot_go_back_generates_no_more_until_a_sync_from_the_disk(directory, tmp_path):
    new = create_endless_model(1)
    new.save_pretrained(tmp_path)
    (tmp_path / "weight_version.json").write_text('{"weight_version": 2}')
    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url, name="the first") as first,
        SGLangEngine(two.url, name="the second") as second,
        open_shared_memory([first, second], bucket_bytes=5000) as channel,
    ):
        two.add_fault(Fault("status", "/update_weights_from_tensor", after=2, status=400, body='{"success": false, "message": "no room"}'))
        two.add_fault(Fault("status", "/update_weights_from_disk", status=400, body='{"success": false, "message": "disk gone"}'))
        with pytest.raises(EngineError, match=r"no room.*the first has weight version 0; the second has weights that are not known"):
            await channel.update_weights(dict(new.state_dict()), 1)
        with pytest.raises(EngineError, match="cannot be used"):
            await second.generate(PROMPT, GREEDY)
        for engine in (first, second):
            await engine.update_weights_from_checkpoint(tmp_path)
            assert (await engine.generate(PROMPT, GREEDY)).output_versions == (2,) * 9
        answers = await channel.update_weights(dict(create_endless_model(2).state_dict()), 3)
        assert [answer["weight_version"] for answer in answers] == [3, 3], "this way is whole again"


async def test_a_server_that_confirms_another_version_is_not_believed(directory):
    async with (
        FakeSGLangServer(directory) as one,
        SGLangEngine(one.url) as first,
        open_weight_group([first], backend="gloo") as group,
    ):
        one.add_fault(Fault("status", "/model_info", status=200, body='{"model_path": "m", "weight_version": "7"}'))
        with pytest.raises(EngineError, match="it reports '7'"):
            await group.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert set((await first.generate(PROMPT, GREEDY)).output_versions) == {0}


async def test_a_trainer_that_fails_between_two_buckets_leaves_the_old_weights(directory):
    old = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    weights = dict(create_endless_model(1).state_dict())

    async def read(bucket):
        await trio.lowlevel.checkpoint()
        if bucket.index == 3:
            raise BackendError("rank 1 is gone")
        return {name: weights[name] for name in bucket.names}

    async with FakeSGLangServer(directory) as one, SGLangEngine(one.url) as first:
        async with open_weight_group([first], backend="gloo", bucket_bytes=5000) as group:
            with trio.fail_after(PATIENCE_S), pytest.raises(BackendError, match="rank 1 is gone") as caught:
                await group.send_weights(describe_weights(weights), read, 1)
            assert "has weight version 0" in "".join(caught.value.__notes__)
        after = await first.generate(PROMPT, GREEDY)
        assert (after.output_tokens, set(after.output_versions)) == (expected_tokens(old), {0})


async def test_at_most_two_buckets_are_held_and_none_is_read_before_every_server_is_ready(directory):
    weights = dict(create_endless_model(1).state_dict())
    read_at = []

    async def read(bucket):
        await trio.lowlevel.checkpoint()
        read_at.append((bucket.index, one.count("/update_weights_from_distributed"), two.count("/begin_weight_update")))
        return {name: weights[name] for name in bucket.names}

    async with (
        FakeSGLangServer(directory) as one,
        FakeSGLangServer(directory) as two,
        SGLangEngine(one.url) as first,
        SGLangEngine(two.url) as second,
        open_weight_group([first, second], backend="gloo", bucket_bytes=5000) as group,
    ):
        await group.send_weights(describe_weights(weights), read, 1)
    assert read_at[0] == (0, 0, 1)
    assert all(taken in (index - 1, index) for index, taken, _ in read_at[1:])
    assert len(read_at) > 10


async def test_weights_travel_in_the_precision_of_the_servers(directory):
    model = create_endless_model(1)
    async with FakeSGLangServer(directory) as one, SGLangEngine(one.url, allow_cast=True) as first:
        async with open_weight_group([first], backend="gloo", dtype="bfloat16") as group:
            await group.update_weights(dict(model.state_dict()), 1)
        (body,) = [request.json() for request in one.received if request.path == "/update_weights_from_distributed"]
        assert set(body["dtypes"]) == {"bfloat16"}
        assert (await first.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(model.bfloat16().float())


@pytest.mark.parametrize(("at", "later"), [(1, 1), (1, 5), (3, 0)])
async def test_a_transfer_that_is_cancelled_leaves_the_old_weights_at_once(directory, at: int, later: int):
    """This includes a cancellation before the server was asked for the current bucket, while the trainer's thread waits for it."""
    weights = dict(create_endless_model(1).state_dict())

    async def read(bucket):
        for _ in range(1 + later):
            await trio.lowlevel.checkpoint()
        if bucket.index == at:
            scope.cancel()
        return {name: weights[name] for name in bucket.names}

    async with FakeSGLangServer(directory) as one, SGLangEngine(one.url) as first:
        async with open_weight_group([first], backend="gloo", bucket_bytes=5000, timeout_s=10 * PATIENCE_S) as group:
            with trio.fail_after(PATIENCE_S), trio.CancelScope() as scope:
                await group.send_weights(describe_weights(weights), read, 1)
            assert scope.cancelled_caught
            with pytest.raises(EngineError, match="open a new one"):
                await group.update_weights(weights, 1)
        assert set((await first.generate(PROMPT, GREEDY)).output_versions) == {0}
        assert one.core.groups == {}


def test_every_rank_opens_the_tensors_of_a_bucket():
    weights = {"a": torch.arange(6.0), "b": torch.arange(2.0)}
    bucket = plan_weights(describe_weights(weights), 1000).buckets[0]
    shared = SharedBucket((flatten_bucket(bucket, weights, "cpu"),))
    texts = serialize_handles(bucket, shared, 2)
    assert len(texts) == 2
    for text in texts:
        opened = read_named_tensors(text)
        assert all(opened[name].equal(weights[name]) for name in weights)


def test_an_engine_is_given_handles_of_its_own_devices_only():
    (bucket,) = plan_weights((WeightSpec("w", "float32", (2,)),), 100).buckets
    flats = tuple(torch.full((8,), i, dtype=torch.uint8) for i in range(4))
    exported: list[int] = []

    def export(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        exported.append(int(tensor[0]))
        return f"GPU-{exported[-1]}", (exported[-1],)

    shared = SharedBucket(flats)
    opened = [pickle.loads(base64.b64decode(vllm_handles(shared.of_engine(i, 2), export))) for i in range(2)]
    assert [list(handles) for handles in opened] == [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]]
    assert exported == [0, 1, 2, 3], "each memory is exported once, to the one that opens it"
    texts = serialize_handles(bucket, shared.of_engine(1, 4), 2)
    assert all(read_named_tensors(text)["w"].view(torch.uint8).eq(1).all() for text in texts)
    assert SharedBucket(flats[:1]).of_engine(1, 2).flats == flats[:1], "one device for all"
