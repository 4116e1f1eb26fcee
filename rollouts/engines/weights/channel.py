"""A WeightChannel over any transport: all servers take one bucket after another in step, or none keeps the new weights.

    every server pauses -> bucket 0 is read -> every server takes it, while bucket 1 is read -> ... -> every server has all -> label,
    confirm, resume

No bucket is read before every server is ready, and no server labels its weights before all have them. If a server, the transport or the
trainer fails on the way, all servers return to their previous directory, or refuse to generate if that is not possible.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio
from torch import Tensor

from rollouts.engines.protocol import ReadBucket
from rollouts.errors import EngineError, raise_single_errors
from rollouts.weight_specs import Bucket, WeightPlan, WeightSpec, cast_specs, describe_weights, plan_weights

_OTHERS_S = 1.0  # seconds for a server to report its own error after the transport failed, before the transport's error is raised


class Sender(Protocol):
    """The trainer's end of a transport."""

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        ...

    async def prepare(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Any:
        """Return the message about a bucket for the servers, or its data; called during the bucket before. Raises BackendError."""
        ...

    async def transmit(self, parcel: Any) -> None:
        """Send the prepared bucket, while every server is asked to take it. Returns when all have it. Raises EngineError."""
        ...

    def give_up(self) -> None:
        """End the transmission after a failed transfer. A sender that is unusable afterwards reports so in is_usable."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether another transfer can begin."""
        ...


@dataclass
class _Round:
    """One bucket in transfer to every server."""

    num_missing: int
    everyone: trio.Event = field(default_factory=trio.Event)
    opened: trio.Event = field(default_factory=trio.Event)
    parcel: Any = None


class BucketRounds:
    """Barrier at which the servers of a transfer wait for one another before each bucket."""

    def __init__(self, plan: WeightPlan, num_receivers: int) -> None:
        assert plan.buckets, "there are no weights to send"
        self.plan = plan
        self.has_begun = False  # whether a server may have received data
        self._rounds = [_Round(num_receivers) for _ in (*plan.buckets, None)]

    async def take(self, bucket: Bucket) -> Any:
        """Return the prepared message of a bucket, at its turn. The call also reports that the bucket before has arrived."""
        return await self._arrive(self._rounds[bucket.index])

    async def finish(self) -> None:
        """Report that the last bucket has arrived at this server. Returns when it has arrived at all."""
        await self._arrive(self._rounds[-1])

    async def _arrive(self, one: _Round) -> Any:
        one.num_missing -= 1
        if one.num_missing == 0:
            one.everyone.set()
        await one.opened.wait()
        return one.parcel

    async def run(self, read: ReadBucket, sender: Sender) -> None:
        """Read, prepare and transmit. At most two buckets exist at a time. Raises EngineError, and the errors of `read`."""
        buckets = self.plan.buckets
        await self._rounds[0].everyone.wait()
        parcel = await sender.prepare(buckets[0], await read(buckets[0]))
        for bucket in buckets:
            one = self._rounds[bucket.index]
            await one.everyone.wait()
            if bucket.index:
                self._rounds[bucket.index - 1].parcel = None
            self.has_begun = True
            one.parcel = parcel
            one.opened.set()
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sender.transmit, parcel)
                    if bucket.index + 1 < len(buckets):
                        following = buckets[bucket.index + 1]
                        parcel = await sender.prepare(following, await read(following))
        await self._rounds[-1].everyone.wait()
        self._rounds[-1].opened.set()


@dataclass(frozen=True)
class Receiver:
    """One server of a transfer."""

    name: str
    check: Callable[[Sequence[WeightSpec]], None]  # raises EngineError for weights that do not fit, before anything happens
    update: Callable[[BucketRounds, Sequence[WeightSpec], int], Awaitable[Mapping[str, Any]]]  # pause, take all, label, confirm, resume
    describe: Callable[[], str]  # describes the server's weights, as the end of a sentence


class WeightTransfer:
    """A WeightChannel from one sender to several servers."""

    def __init__(self, receivers: Sequence[Receiver], sender: Sender, *, bucket_bytes: int, dtype: str | None = None) -> None:
        """
        Args:
            bucket_bytes: bytes of tensors in one bucket; two buckets are held here.
            dtype: dtype to cast floating-point tensors to before the transfer, as torch names it; None = no cast.
        """
        assert receivers, "a transfer of weights needs at least one engine"
        assert bucket_bytes >= 1, f"bucket_bytes is {bucket_bytes}, expected at least 1"
        self._receivers, self._sender = tuple(receivers), sender
        self._bucket_bytes, self._dtype = bucket_bytes, dtype

    @property
    def wants_device(self) -> bool:
        """See WeightChannel."""
        return self._sender.wants_device

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> list[Mapping[str, Any]]:
        """Send weights that are all in memory. They must not be written to meanwhile."""

        async def select(bucket: Bucket) -> Mapping[str, Tensor]:
            await trio.lowlevel.checkpoint()
            return {name: weights[name] for name in bucket.names}

        return await self.send_weights(describe_weights(weights), select, weight_version)

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """See WeightChannel. Running requests continue, or are sent again, as each engine is configured."""
        if not self._sender.is_usable:
            raise EngineError(
                "this way to the engines broke in an earlier transfer, or was closed: open a new one, or sync from a directory"
            )
        specs = cast_specs(specs, self._dtype)
        for receiver in self._receivers:
            receiver.check(specs)
        rounds = BucketRounds(plan_weights(specs, self._bucket_bytes), len(self._receivers))
        answers: dict[int, Mapping[str, Any]] = {}
        failures: list[EngineError] = []

        async def update(i: int) -> None:
            try:
                answers[i] = await self._receivers[i].update(rounds, specs, weight_version)
            except EngineError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async def distribute() -> None:
            try:
                await self._run(rounds, read)
            except EngineError as error:
                await trio.sleep(_OTHERS_S)
                failures.append(error)
                nursery.cancel_scope.cancel()

        try:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    for i in range(len(self._receivers)):
                        nursery.start_soon(update, i)
                    nursery.start_soon(distribute)
        except Exception as error:  # an error of the trainer, for example; the engines have been restored by now
            error.add_note(f"while weight version {weight_version} was on its way. {self._describe()}")
            raise
        if failures:
            raise EngineError(
                f"weight version {weight_version} did not reach all {len(self._receivers)} servers: {failures[0]}. {self._describe()} "
                "Do not generate until a sync of all engines succeeds"
            ) from failures[0]
        return [answers[i] for i in range(len(self._receivers))]

    async def _run(self, rounds: BucketRounds, read: ReadBucket) -> None:
        is_over = False
        try:
            await rounds.run(read, self._sender)
            is_over = True
        finally:
            if not is_over and rounds.has_begun:
                self._sender.give_up()  # at once: servers may wait for the rest, and cannot be restored before they stop waiting

    def _describe(self) -> str:
        states = [f"{receiver.name} {receiver.describe()}" for receiver in self._receivers]
        return f"Now {'; '.join(states)}."

    def close(self) -> None:
        """Close the channel: no more transfers."""
        self._sender.give_up()
