"""Weights into vLLM's memory: bodies of routes as values, NCCL's calls in their order, and fake servers on loopback."""

from __future__ import annotations

import base64
import ctypes
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from endless_models import create_endless_model
from server_waits import PATIENCE_S, wait_for_tokens
from transformers import AutoModelForCausalLM

from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.vllm.channels import (
    FINISH,
    INIT,
    START,
    UPDATE,
    Meeting,
    open_vllm_group,
    open_vllm_ipc,
    vllm_bucket_payload,
    vllm_group_payload,
    vllm_ipc_payload,
)
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.weights.nccl import NCCLCommunicator, NCCLSender, join_communicator
from rollouts.engines.weights.torch_groups import GroupSender, open_rendezvous
from rollouts.errors import BackendError, EngineError
from rollouts.testing import FakeVLLMServer, Fault, VLLMSettings
from rollouts.testing.servers.vllm.transfer import GPU, GROUP_NAME
from rollouts.types import SamplingParams
from rollouts.weight_specs import describe_weights, plan_weights

PROMPT = (5, 9, 12, 20)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
CPU = torch.device("cpu")


def expected_tokens(model: Any) -> tuple[int, ...]:
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
    return tuple(output[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    create_endless_model(0).save_pretrained(path)
    return path


async def meet_over_gloo(world_size: int, *, timeout_s: float = 30.0) -> Meeting:
    """Meet over gloo between CPUs, in place of NCCL between GPUs."""
    rendezvous = await open_rendezvous("127.0.0.1", "gloo", GROUP_NAME, world_size, timeout_s)

    async def join() -> GroupSender:
        return GroupSender(await rendezvous.join(), CPU, timeout_s)

    return Meeting({"master_address": "127.0.0.1", "master_port": rendezvous.port}, join)


@asynccontextmanager
async def open_servers(directory: Path, transport: Any, num: int = 2, **options: Any):
    """Fake servers and engines named s0, s1, ..."""
    async with AsyncExitStack() as stack:
        settings = VLLMSettings(weight_transfer=transport, allow_insecure_serialization=True)
        servers = [await stack.enter_async_context(FakeVLLMServer(directory, settings)) for _ in range(num)]
        engines = [await stack.enter_async_context(VLLMEngine(server.url, name=f"s{i}", **options)) for i, server in enumerate(servers)]
        yield servers, engines


open_group = partial(open_vllm_group, device="cpu", create_meeting=meet_over_gloo, bucket_bytes=5000)


def test_the_bodies_of_the_routes():
    assert vllm_group_payload({"nccl_unique_id_b64": "AA=="}, 3, 5, 100) == {
        "init_info": {
            "nccl_unique_id_b64": "AA==",
            "rank_offset": 3,
            "world_size": 5,
            "packed": True,
            "packed_buffer_size_bytes": 100,
            "packed_num_buffers": 2,
        }
    }
    bucket = plan_weights(describe_weights({"a": torch.zeros(2, 3), "b": torch.zeros(4)}), 1000).buckets[0]
    info = {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[2, 3], [4]]}
    assert vllm_bucket_payload(bucket) == {"update_info": info}
    assert vllm_ipc_payload(bucket, "x") == {"update_info": {**info, "tensor_sizes": [24, 16], "ipc_handles_pickled": "x"}}


def test_a_bucket_of_at_most_the_buffer_is_one_broadcast_at_the_server():
    """The server cuts by itself: it fills a buffer until that holds more than its size."""
    weights = {name: torch.zeros(size, dtype=torch.uint8) for name, size in (("a", 60), ("b", 40), ("c", 1), ("d", 500), ("e", 3))}
    for bucket in plan_weights(describe_weights(weights), 100).buckets:
        cuts, size = 1, 0
        for spec in bucket.specs:
            if size > 100:
                cuts, size = cuts + 1, 0
            size += spec.num_bytes
        assert cuts == 1


class FakeNCCL:
    """NCCL's functions, which note what they are called with."""

    def __init__(self, result: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._result = result

    def ncclGetUniqueId(self, place: Any) -> int:
        ctypes.memset(place, 7, 128)
        return 0

    def ncclCommInitRank(self, comm: Any, world_size: int, unique_id: Any, rank: int) -> int:
        self.calls.append(("init", world_size, bytes(unique_id), rank))
        comm._obj.value = 99
        return self._result

    def ncclAllReduce(self, send: Any, receive: Any, count: int, dtype: int, operation: int, comm: Any, stream: Any) -> int:
        self.calls.append(("all_reduce", count, dtype, operation, comm.value, send.value == receive.value))
        return 0

    def ncclBroadcast(self, send: Any, receive: Any, count: int, dtype: int, root: int, comm: Any, stream: Any) -> int:
        self.calls.append(("broadcast", ctypes.string_at(send.value, count), dtype, root, comm.value))
        return self._result

    def ncclCommAbort(self, comm: Any) -> int:
        self.calls.append(("abort", comm.value))
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return b"unhandled system error"


async def test_rank_0_of_an_nccl_group_does_what_the_workers_do():
    library = FakeNCCL()
    communicator = NCCLCommunicator(library, 3, CPU)
    assert base64.b64decode(communicator.unique_id) == bytes([7] * 128)
    await join_communicator(communicator, 10.0)
    sender = NCCLSender(communicator, CPU, 10.0)
    weights = {"a": torch.arange(3.0), "b": torch.arange(2.0)}
    bucket = plan_weights(describe_weights(weights), 1000).buckets[0]
    await sender.transmit(await sender.prepare(bucket, weights))
    sender.give_up()
    sender.give_up()
    sent = torch.cat([weights["a"], weights["b"]]).view(torch.uint8).numpy().tobytes()
    assert library.calls == [
        ("init", 3, bytes([7] * 128), 0),
        ("all_reduce", 1, 7, 0, 99, True),
        ("broadcast", sent, 1, 0, 99),
        ("abort", 99),
    ]
    assert not sender.is_usable


async def test_what_nccl_says_and_how_long_it_may_take_are_in_the_error():
    with pytest.raises(EngineError, match="ncclCommInitRank failed: unhandled system error"):
        await join_communicator(NCCLCommunicator(FakeNCCL(result=2), 3, CPU), 10.0)

    class Stuck(FakeNCCL):
        def ncclCommInitRank(self, comm: Any, world_size: int, unique_id: Any, rank: int) -> int:
            trio.from_thread.run(trio.sleep, 0.3)
            return 0

    with pytest.raises(EngineError, match=r"did not come about within 0\.05 s \(--join\): look"):
        await join_communicator(NCCLCommunicator(Stuck(), 3, CPU), 0.05, "--join")


async def test_all_servers_of_a_group_get_the_weights_while_requests_run(directory):
    model = create_endless_model(1)
    found = []
    async with open_servers(directory, "gloo") as (servers, engines), open_group(engines) as channel:

        async def generate(engine: VLLMEngine) -> None:
            found.append(await engine.generate(PROMPT, SamplingParams(max_tokens=60)))

        for server in servers:
            server.scheduler.hold_tokens(5)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for engine in engines:
                    nursery.start_soon(generate, engine)
                for server in servers:
                    await wait_for_tokens(server, 5)
                answers = await channel.update_weights(dict(model.state_dict()), 5)
                for server in servers:
                    server.scheduler.release_tokens()
        assert [answer["weight_version"] for answer in answers] == [5, 5]
        for engine in engines:
            completion = await engine.generate(PROMPT, GREEDY)
            assert (completion.output_tokens, set(completion.output_versions)) == (expected_tokens(model), {5})
        plan = plan_weights(describe_weights(model.state_dict()), 5000)
        routes = [r.path for r in servers[0].received if r.path in (INIT, START, UPDATE, FINISH)]
        assert routes == [INIT, START, *[UPDATE] * len(plan.buckets), FINISH]
        offsets = [r.json()["init_info"]["rank_offset"] for server in servers for r in server.received if r.path == INIT]
        assert offsets == [1, 2]
        await channel.update_weights(dict(create_endless_model(2).state_dict()), 6)
    assert [set(c.output_versions) for c in found] == [{0, 5}, {0, 5}]


def export_bytes(tensor: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
    return GPU, (tensor.numpy().tobytes(),)


async def test_weights_through_shared_memory_are_cut_by_the_sizes_that_are_told(directory):
    model = create_endless_model(1)
    num_exports = 0

    def export(tensor: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
        nonlocal num_exports
        num_exports += 1
        return export_bytes(tensor)

    async with open_servers(directory, "ipc", 2) as (servers, engines):
        async with open_vllm_ipc(engines, ["cpu", "cpu"], export=export, bucket_bytes=5000) as channel:
            await channel.update_weights(dict(model.state_dict()), 5)
        for engine in engines:
            completion = await engine.generate(PROMPT, GREEDY)
            assert (completion.output_tokens, set(completion.output_versions)) == (expected_tokens(model), {5})
        assert servers[0].count(UPDATE) > 10
        assert num_exports == sum(server.count(UPDATE) for server in servers), "a handle that nobody opens keeps its memory for ever"


async def test_a_gpu_that_was_not_named_leaves_the_old_weights(directory):
    old = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    async with open_servers(directory, "ipc", 1) as (_, engines):
        async with open_vllm_ipc(engines[:1], ["cpu"], export=lambda tensor: ("GPU-other", (b"",))) as channel:
            with pytest.raises(EngineError, match="IPC handle not found for GPU UUID"):
                await channel.update_weights(dict(create_endless_model(1).state_dict()), 5)
        completion = await engines[0].generate(PROMPT, GREEDY)
        assert (completion.output_tokens, set(completion.output_versions)) == (expected_tokens(old), {0})


@pytest.mark.parametrize("fault", [pytest.param("drop", marks=pytest.mark.slow), "status", "hang"])
async def test_a_server_that_fails_between_two_buckets_leaves_the_others_with_known_weights(directory, fault):
    old, new = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval(), create_endless_model(1)
    async with open_servers(directory, "gloo", deadlines=Deadlines(sync_s=1.0)) as (servers, engines):
        async with open_group(engines) as channel:
            servers[1].add_fault(Fault(fault, UPDATE, after=3))
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="s0 has weight version 0; s1 has weight") as caught:
                await channel.update_weights(dict(new.state_dict()), 1)
            assert "s1 did not take" in str(caught.value)
            assert fault != "hang" or "1 s" in str(caught.value)
            with pytest.raises(EngineError, match="open a new one"):
                await channel.update_weights(dict(new.state_dict()), 1)
            after = await engines[0].generate(PROMPT, GREEDY)
            assert (after.output_tokens, set(after.output_versions)) == (expected_tokens(old), {0})
        async with open_group(engines) as channel:
            await channel.update_weights(dict(new.state_dict()), 1)
            for engine in engines:
                assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(new)


@pytest.mark.slow
async def test_a_server_that_dies_is_not_known_and_the_others_go_on(directory):
    meet = partial(meet_over_gloo, timeout_s=1.0)  # the fake's end of the group outlives it, as that of a machine that is cut off
    async with open_servers(directory, "gloo") as (servers, engines), open_group(engines, create_meeting=meet) as channel:

        async def read(bucket):
            await trio.lowlevel.checkpoint()
            if bucket.index == 2:
                servers[1].die()
            return {name: weights[name] for name in bucket.names}

        weights = dict(create_endless_model(1).state_dict())
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="s0 has weight version 0; s1 has weights that are not known"):
            await channel.send_weights(describe_weights(weights), read, 1)
        assert set((await engines[0].generate(PROMPT, GREEDY)).output_versions) == {0}
        with pytest.raises(EngineError, match="cannot be used"):
            await engines[1].generate(PROMPT, GREEDY)


async def test_a_trainer_that_fails_between_two_buckets_leaves_the_old_weights(directory):
    weights = dict(create_endless_model(1).state_dict())

    async def read(bucket):
        await trio.lowlevel.checkpoint()
        if bucket.index == 3:
            raise BackendError("rank 1 is gone")
        return {name: weights[name] for name in bucket.names}

    async with open_servers(directory, "gloo") as (_, engines), open_group(engines) as channel:
        with trio.fail_after(PATIENCE_S), pytest.raises(BackendError, match="rank 1 is gone"):
            await channel.send_weights(describe_weights(weights), read, 1)
        for engine in engines:
            assert set((await engine.generate(PROMPT, GREEDY)).output_versions) == {0}


async def test_no_server_confirms_before_all_have_everything(directory):
    num_buckets = len(plan_weights(describe_weights(create_endless_model(1).state_dict()), 5000).buckets)
    async with open_servers(directory, "gloo") as (servers, engines), open_group(engines) as channel:
        servers[1].add_fault(Fault("status", UPDATE, after=num_buckets - 1, delay_s=0.2))
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="s0 has weight version 0"):
            await channel.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert servers[0].count("/update_weight_version") == 1, "only that of the weights that it went back to"


async def test_an_update_that_another_client_left_open_is_finished_first(directory):
    async with open_servers(directory, "gloo") as (servers, engines), open_group(engines) as channel:
        servers[0].core.session_is_open = True
        await channel.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert servers[0].count(FINISH) == 2


async def test_a_server_without_the_transport_is_named(directory):
    async with open_servers(directory, "nccl", 1) as (_, engines):
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="Cannot access accelerator device"):
            async with open_group(engines[:1]):
                pass
