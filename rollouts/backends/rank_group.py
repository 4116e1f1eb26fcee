"""Rank 0 leads: it alone runs the loops, and the other processes of a run do what it says.

    with join_ranks(os.environ, timeout_s=600) as group:          # on every rank, under torchrun
        if group.rank > 0:
            group.serve()                                         # until rank 0 has left its block
        else:
            backend = group.create_backend("policy", partial(create_fsdp_backend, "path/to/model", lr=1e-6))
            trio.run(...)                                         # any loop, with a backend like any other

A command is a function that every rank calls with its own backends and its own part of the rows. Only values and functions that are
defined at the top of a module travel. All commands of a group have one order, whatever threads they come from.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
import trio
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # as torch.distributed exports them, with types

from rollouts.backends.distributed import Ranks, init_distributed, leave_distributed
from rollouts.backends.rank_channel import (
    Channel,
    ChannelClosed,
    Listener,
    RankChannels,
    connect_to_leader,
    dump_value,
    load_value,
    wait_readable,
)
from rollouts.backends.rank_failures import EXPLAIN_LOSS, Failure, are_alike, describe_failure, find_cause, make_error
from rollouts.backends.rank_watch import LeaderWatch, Trouble, WatchLimits, WorkerWatch
from rollouts.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from rollouts.backends.leading import LeadingBackend, RankBackend

T = TypeVar("T")

_NOTICE_S = 15.0  # for the watch to see the end of a process, or a process to see that it is to end, on a busy machine


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which process of a run this one is."""

    rank: int
    num_ranks: int
    local_rank: int  # among those of this machine
    host: str  # of rank 0
    port: int  # of the store where the ranks meet
    has_store: bool = False  # whether the launcher serves the store; else rank 0 does
    attempt: int = 0  # how often the launcher has started all of them anew


def read_placement(environment: Mapping[str, str]) -> Placement:
    """The placement that torchrun writes into the environment of each process. Raises ConfigError if it is not there, or makes no sense."""
    try:
        found = Placement(
            rank=int(environment["RANK"]),
            num_ranks=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            host=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not say which process this is ({error!r}): start it with torchrun"
        ) from error
    if not 0 <= found.rank < found.num_ranks:
        raise ConfigError(f"RANK is {found.rank} and WORLD_SIZE is {found.num_ranks}: start the processes with torchrun")
    return found


def join_ranks(
    environment: Mapping[str, str], *, device: str | torch.device = "cpu", timeout_s: float = 600.0, grace_s: float = 10.0
) -> RankGroup:
    """Meet the other processes of the run. All ranks must call it with the same settings.

    Args:
        environment: of this process, as torchrun made it; without RANK this process is the only one.
        device: that this rank computes on; "cuda" = the GPU of its local rank.
        timeout_s: that joining, and each command from then on, may take.
        grace_s: that a stuck rank has to get free after another has failed, before it is ended.

    Raises: ConfigError; BackendError naming the ranks that did not come.
    """
    if "RANK" not in environment:
        if not dist.is_initialized():  # alone, whatever launcher this process itself has
            kind = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
            dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
        return RankGroup(init_distributed(device, timeout_s=timeout_s), {}, timeout_s=timeout_s, grace_s=grace_s)
    place = read_placement(environment)
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    timeout = timedelta(seconds=timeout_s)
    try:
        server = TCPStore(
            place.host, place.port, is_master=place.rank == 0 and not place.has_store, timeout=timeout, wait_for_workers=False
        )
        store = PrefixStore(f"rollouts/{place.attempt}", server)
        channels = _meet(place, store, timeout_s)
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, store=store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, BackendError):
            raise
        raise BackendError(
            f"rank {place.rank} of {place.num_ranks} did not meet the others at {place.host}:{place.port} within {timeout_s:g} s: {error}"
        ) from error
    return RankGroup(init_distributed(device, timeout_s=timeout_s), channels, timeout_s=timeout_s, grace_s=grace_s, store=store)


def _meet(place: Placement, store: Store, timeout_s: float) -> dict[int, RankChannels]:
    """The connections: of rank 0 one pair to each other rank, of another rank the pair to rank 0."""
    if place.rank > 0:
        port, token = store.get("leader").decode("ascii").split(" ")
        return {0: connect_to_leader(place.host, int(port), token, place.rank, timeout_s=timeout_s)}
    listener = Listener(place.host)
    try:
        store.set("leader", f"{listener.port} {listener.token}")
        return listener.accept(place.num_ranks, timeout_s=timeout_s)
    finally:
        listener.close()


class RankGroup:
    """The processes of a run, as one of them sees them. Made by join_ranks; a context manager on every rank.

    When rank 0 leaves its block, the others return from serve(); if it leaves with an exception, they raise BackendError.
    """

    def __init__(
        self,
        ranks: Ranks,
        channels: Mapping[int, RankChannels],
        *,
        timeout_s: float,
        grace_s: float,
        store: Store | None = None,
    ) -> None:
        """Args: channels: to each other rank, or to rank 0. store: kept alive, since rank 0 may serve it. Else as join_ranks."""
        self.ranks = ranks
        self._channels, self._store = dict(channels), store
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._lock = threading.RLock()  # one command at a time
        self._backends: dict[str, Any] = {}
        self._broken: str | None = None
        limits = WatchLimits(timeout_s=timeout_s, grace_s=grace_s, beat_s=min(1.0, timeout_s / 20, grace_s / 4))
        pulses = {rank: pair.pulse for rank, pair in channels.items()}
        self._watch: LeaderWatch | None = None
        self._worker_watch: WorkerWatch | None = None
        if self.rank == 0:
            self._watch = LeaderWatch(pulses, limits)
            self._watch.start()
        else:
            wake = partial(_shut_down, self._channels[0].commands)
            self._worker_watch = WorkerWatch(self.rank, pulses[0], limits, wake=wake)
            self._worker_watch.start()

    @property
    def rank(self) -> int:
        """Of this process; 0 leads."""
        return self.ranks.rank

    @property
    def num_ranks(self) -> int:
        """How many processes there are."""
        return self.ranks.world_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(None if error is None else f"rank 0 failed: {type(error).__name__}")

    # -- rank 0

    def create_backend(self, name: str, builder: Callable[[], RankBackend]) -> LeadingBackend:
        """Make a backend on every rank, and one that leads them. One of the same name is let go first.

        Args:
            builder: called on every rank; defined at the top of a module, or a functools.partial of such a function and of values.
        """
        from rollouts.backends.leading import LeadingBackend

        self.run(f"creating the backend {name!r}", _create_backend, name, builder)
        return LeadingBackend(self, name, self._backends[name])

    def drop_backend(self, name: str) -> None:
        """Let a backend go on every rank."""
        self.run(f"dropping the backend {name!r}", _drop_backend, name)

    def run(self, operation: str, function: Callable[..., T], *shared: object, own: Sequence[tuple[object, ...]] | None = None) -> list[T]:
        """Call function(backends, *shared, *own[rank]) on every rank. Blocks; any thread of rank 0 may call it.

        Args:
            operation: named in errors.
            function: gets the backends of its rank by name; defined at the top of a module.
            own: what each rank gets for itself.

        Returns: what each rank returned, by rank.
        Raises: what all ranks raised alike, or this rank alone, as it is; for another rank an error that names rank and operation
            (BackendError, or the kind of the library's errors that it raised there). If all ranks have answered, the group stays usable;
            else every rank ends. ConfigError for what cannot be sent.
        """
        assert self._watch is not None, f"rank {self.rank} does not lead: call run() on rank 0, and serve() here"
        parts = [()] * self.num_ranks if own is None else own
        assert len(parts) == self.num_ranks, f"{len(parts)} parts for {self.num_ranks} ranks"
        with self._lock:
            if self._broken is not None:
                raise BackendError(f"{operation} cannot run: {self._broken}")
            messages = _dump_command(operation, function, shared, parts) if self._channels else []
            self._watch.begin(operation)
            try:
                outcome = self._carry_out(operation, messages, partial(function, self._backends, *shared, *parts[0]))
            except BaseException as interrupt:  # the other ranks may be anywhere, so that no command can follow
                self._watch.finish()
                self._break(f"rank 0 was interrupted in {operation} by {type(interrupt).__name__}")
                raise
            if outcome.closed:  # of the two connections of a process that ended, the watch looks at the other one, a moment later
                self._watch.lost.wait(_NOTICE_S)
            return self._judge(operation, outcome, self._watch.finish())

    def _carry_out(self, operation: str, messages: Sequence[tuple[bytes, ...]], call: Callable[[], object]) -> _Outcome:
        """Send a command, call rank 0's part, and gather the answers."""
        outcome, begin = _Outcome(), time.monotonic()
        answers = outcome.answers
        closed = self._send_all(messages)
        if closed is None:
            try:
                answers[0] = _Answer(value=call())
            except Exception as failed:
                outcome.error = failed
                answers[0] = _Answer()
                answers[0].set_error(0, failed)
        else:  # rank 0's part would wait for it
            outcome.closed.append(closed)
        waiting = {pair.commands: rank for rank, pair in self._channels.items()}
        deadline = time.monotonic() + self._timeout_s
        has_failed = 0 not in answers or answers[0].failure is not None
        while waiting:
            if has_failed:
                deadline, has_failed = min(deadline, time.monotonic() + self._grace_s), False
            readable = wait_readable(waiting, deadline - time.monotonic())
            if not readable:
                break
            for channel in readable:
                rank = waiting.pop(channel)
                try:
                    answers[rank] = load_value(channel.receive(self._timeout_s))
                except ChannelClosed:
                    has_failed = True
                    outcome.closed.append(rank)
                else:
                    has_failed = has_failed or answers[rank].failure is not None
        outcome.waited_s = time.monotonic() - begin
        return outcome

    def _send_all(self, messages: Sequence[tuple[bytes, ...]]) -> int | None:
        """Send every rank its part of a command. Returns the rank that is gone, at which it stops; None = all have theirs."""
        for rank, message in enumerate(messages, start=1):
            try:
                for frame in message:
                    self._channels[rank].commands.send(frame, self._timeout_s)
            except ChannelClosed:
                return rank
        return None

    def _judge(self, operation: str, outcome: _Outcome, trouble: Trouble) -> list[Any]:
        """The values of all ranks, or the error that is raised for them."""
        answers, error = outcome.answers, outcome.error
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure is not None}
        missing = [rank for rank in range(self.num_ranks) if rank not in answers]
        if not failures and not missing:
            return [answers[rank].value for rank in range(self.num_ranks)]
        if error is not None and are_alike(failures, self.num_ranks):
            raise error
        others = [rank for rank in missing if rank > 0]
        cause = find_cause(operation, failures, others, trouble, self._timeout_s, closed=outcome.closed, waited_s=outcome.waited_s)
        raised = error if cause.rank == 0 and error is not None else make_error(cause, operation)
        if missing:
            self._break(str(raised).split("\n")[0])
        raise raised from None

    def _break(self, reason: str) -> None:
        """No command can follow: every rank is told to end."""
        assert self._watch is not None, "only rank 0 breaks a group"
        self._broken = reason
        self._watch.abort(reason)

    async def wait_for_loss(self) -> None:
        """Wait until a rank is gone while nothing is computed. Raises BackendError then; for a task beside the run.

        Returns when the group is closed, or when an operation has failed, which is then raised where it was waited for.
        """
        assert self._watch is not None, f"rank {self.rank} does not lead"
        await trio.to_thread.run_sync(self._watch.lost.wait, abandon_on_cancel=True)
        await trio.to_thread.run_sync(self._check_loss)

    def _check_loss(self) -> None:
        assert self._watch is not None, f"rank {self.rank} does not lead"
        with self._lock:  # an operation that is under way finds out by itself
            gone = self._watch.look().gone
            if self._broken is None and gone:
                self._break(f"rank {gone[0]} is gone")
                raise BackendError(f"rank {gone[0]} is gone: {EXPLAIN_LOSS}")

    # -- the other ranks

    def serve(self) -> None:
        """Carry out the commands of rank 0 until it has left its block. Raises BackendError if it failed or is gone."""
        watch = self._worker_watch
        assert watch is not None, "rank 0 does not serve: it leads"
        channel = self._channels[0].commands
        try:
            while operation := channel.receive(None).decode():
                watch.begin(operation)
                answer = self._answer(channel)
                try:
                    data = dump_value(answer)
                except Exception as error:
                    answer = _Answer()
                    answer.set_error(self.rank, BackendError(f"what it returned cannot be sent to rank 0 ({error}): return plain values"))
                    data = dump_value(answer)
                watch.finish(None if answer.failure is None else f"{answer.failure.name}: {answer.failure.message}")
                channel.send(data, self._timeout_s)
        except ChannelClosed:
            raise BackendError(f"rank {self.rank} ends: {watch.reason or 'rank 0 is gone'}") from None

    def _answer(self, channel: Channel) -> _Answer:
        frames = channel.receive(self._timeout_s), channel.receive(self._timeout_s)
        answer = _Answer()
        try:
            function, shared = load_value(frames[0])
            answer.value = function(self._backends, *shared, *load_value(frames[1]))
        except Exception as error:  # it is rank 0's to tell
            answer.set_error(self.rank, error)
        return answer

    # -- the end

    def close(self, failure: str | None = None) -> None:
        """End the group. On rank 0 the others end with it: with status 0, or as failed if a failure is given or was raised before."""
        self._backends.clear()
        if self._watch is not None:
            self._end_workers(failure or self._broken)
            self._watch.close()
        if self._worker_watch is not None:
            self._worker_watch.close()
        for pair in self._channels.values():
            pair.commands.close()
            pair.pulse.close()
        if self._broken is None:
            leave_distributed()

    def _end_workers(self, failure: str | None) -> None:
        assert self._watch is not None, "only rank 0 ends the others"
        if failure is not None:
            self._break(failure)
            # a connection that is closed before it was read to its end takes back what it has sent: they would not learn why they end
            self._watch.wait_for_ends(min(_NOTICE_S, self._grace_s))
            return
        self._watch.begin("the end of the run")
        for pair in self._channels.values():
            with suppress(ChannelClosed):
                pair.commands.send(b"", self._grace_s)
        for pair in self._channels.values():
            with suppress(ChannelClosed):  # which is the answer
                pair.commands.receive(self._grace_s)
        self._watch.finish()


@dataclass(kw_only=True)
class _Answer:
    """Of one rank to one command."""

    value: Any = None
    failure: Failure | None = None

    def set_error(self, rank: int, error: Exception) -> None:
        """It failed."""
        self.failure = describe_failure(rank, error)


@dataclass
class _Outcome:
    """What came of one command."""

    answers: dict[int, _Answer] = field(default_factory=dict[int, _Answer])  # by rank
    error: Exception | None = None  # of rank 0's part
    closed: list[int] = field(default_factory=list[int])  # ranks whose connection ended instead of an answer
    waited_s: float = 0.0  # from the command to the last answer that came, or was given up


def _dump_command(
    operation: str, function: Callable[..., object], shared: tuple[object, ...], parts: Sequence[tuple[object, ...]]
) -> list[tuple[bytes, ...]]:
    """What ranks 1, 2, ... are sent. Raises ConfigError for what cannot be."""
    with _explain_unsendable(operation):
        head = dump_value((function, shared))
        return [(operation.encode(), head, dump_value(part)) for part in parts[1:]]


def check_sendable(name: str, value: object) -> None:
    """Raise ConfigError, as RankGroup.run would in the middle of a run, for a function or a value that cannot be sent to other ranks."""
    with _explain_unsendable(name):
        dump_value(value)


@contextmanager
def _explain_unsendable(operation: str) -> Generator[None]:
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{operation} cannot be sent to the other ranks: {error}. Losses, output functions and builders are sent by name: define each "
            "at the top of a module, and use functools.partial for its settings, no lambda and no function within a function"
        ) from error


def _create_backend(backends: dict[str, Any], name: str, builder: Callable[[], Any]) -> None:
    backends.pop(name, None)  # before the new one takes memory
    backends[name] = builder()


def _drop_backend(backends: dict[str, Any], name: str) -> None:
    backends.pop(name, None)


def _shut_down(channel: Channel) -> None:
    """End a wait for the next message, from another thread."""
    with suppress(OSError):
        channel.socket.shutdown(socket.SHUT_RDWR)
