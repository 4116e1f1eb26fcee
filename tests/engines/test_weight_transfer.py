"""A transfer of weights to several servers, without servers: the order of its parts, the memory held, and the state after a failure."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

from rollouts.engines.weights.channel import BucketRounds, Receiver, WeightTransfer
from rollouts.engines.weights.membership import open_membership, place_ranks
from rollouts.errors import BackendError, EngineError
from rollouts.weight_specs import Bucket, WeightSpec, describe_weights

WEIGHTS = {name: torch.full((4,), float(i)) for i, name in enumerate("abcde")}
BUCKET_BYTES = 16  # one tensor in each


class Parcel:
    """Parcel of one bucket."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names


@dataclass
class FakeSender:
    """Counts the parcels that exist when a new one is made."""

    wants_device = False
    is_usable: bool = True
    parcels: list[weakref.ref[Parcel]] = field(default_factory=list)
    num_held: list[int] = field(default_factory=list)

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Parcel:
        await trio.lowlevel.checkpoint()
        self.num_held.append(sum(parcel() is not None for parcel in self.parcels))
        parcel = Parcel(tuple(tensors))
        self.parcels.append(weakref.ref(parcel))
        return parcel

    async def transmit(self, parcel: Any) -> None:
        await trio.sleep(0.1)

    def give_up(self) -> None:
        self.is_usable = False


def create_receiver(
    name: str, events: list[str], *, seconds_per_bucket: float = 0.0, check: Callable[[Sequence[WeightSpec]], None] = lambda specs: None
) -> Receiver:
    async def update(rounds: BucketRounds, specs: Sequence[WeightSpec], weight_version: int) -> Mapping[str, Any]:
        events.append(f"{name} pauses")
        for bucket in rounds.plan.buckets:
            assert (await rounds.take(bucket)).names == bucket.names
            await trio.sleep(seconds_per_bucket)
        events.append(f"{name} has all")
        await rounds.finish()
        events.append(f"{name} labels {weight_version}")
        return {"success": True, "weight_version": weight_version}

    return Receiver(name, check, update, lambda: "has weight version 0")


def create_transfer(receivers: Sequence[Receiver], sender: FakeSender | None = None) -> WeightTransfer:
    return WeightTransfer(receivers, FakeSender() if sender is None else sender, bucket_bytes=BUCKET_BYTES)


async def test_nobody_labels_its_weights_before_everybody_has_them(autojump_clock):
    events: list[str] = []
    receivers = [create_receiver("fast", events), create_receiver("slow", events, seconds_per_bucket=5.0)]
    answers = await create_transfer(receivers).update_weights(WEIGHTS, 3)
    assert [answer["weight_version"] for answer in answers] == [3, 3]
    assert events[2:4] == ["fast has all", "slow has all"]
    assert sorted(events[4:]) == ["fast labels 3", "slow labels 3"]


async def test_a_bucket_is_let_go_before_the_one_after_the_next_is_made(autojump_clock):
    sender = FakeSender()
    await create_transfer([create_receiver("a", []), create_receiver("b", [])], sender).update_weights(WEIGHTS, 1)
    assert sender.num_held == [0, 1, 1, 1, 1]


async def test_weights_that_one_server_cannot_take_are_refused_before_any_is_paused(autojump_clock):
    def refuse(specs: Sequence[WeightSpec]) -> None:
        raise EngineError("b has no room")

    events: list[str] = []
    sender = FakeSender()
    transfer = create_transfer([create_receiver("a", events), create_receiver("b", events, check=refuse)], sender)
    with pytest.raises(EngineError, match="b has no room"):
        await transfer.update_weights(WEIGHTS, 1)
    assert (events, sender.is_usable) == ([], True)


async def test_a_trainer_that_fails_before_anything_was_sent_can_try_again_over_the_same_way(autojump_clock):
    async def fail(bucket: Bucket) -> Mapping[str, Tensor]:
        await trio.lowlevel.checkpoint()
        raise BackendError("out of memory")

    transfer = create_transfer([create_receiver("a", [])])
    with pytest.raises(BackendError, match="out of memory") as caught:
        await transfer.send_weights(describe_weights(WEIGHTS), fail, 1)
    assert "weight version 1 was on its way. Now a has weight version 0." in caught.value.__notes__[0]
    assert len(await transfer.update_weights(WEIGHTS, 1)) == 1


def test_servers_of_several_processes_stand_one_after_another_behind_the_trainer():
    assert place_ranks([1]) == ([1], 2)
    assert place_ranks([2, 4, 1]) == ([1, 3, 7], 8)


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_those_that_joined_a_group_leave_it_where_another_cannot(autojump_clock, how: str):
    left: list[str] = []

    async def join() -> None:
        await trio.sleep(1.0)

    async def refuse() -> None:
        await trio.sleep(5.0)
        raise EngineError("no such device")

    async def leave(name: str) -> None:
        await trio.sleep(1.0)
        left.append(name)

    seconds = 10.0 if how == "refused" else 3.0
    with trio.move_on_after(seconds) as scope:
        with pytest.raises(EngineError, match="no such device"):
            async with open_membership([join, refuse], [lambda: leave("first"), lambda: leave("second")], trio.sleep_forever):
                raise AssertionError("nobody is there")
    assert scope.cancelled_caught == (how == "cancelled")
    assert left == ["first"]
