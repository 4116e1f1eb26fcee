"""Groups of ranks led by rank 0: it alone runs the loops, the other processes of a run carry out its commands.

    with join_ranks(os.environ, timeout_s=600) as group:          # on every rank, under torchrun
        if group.rank > 0:
            group.serve()                                         # until rank 0 has left its block
        else:
            backend = lead_backend(group, "policy", partial(create_fsdp_backend, "path/to/model", lr=1e-6))
            trio.run(...)                                         # any loop, with a backend like any other

A command is a function that every rank calls with its own backends and its own part of the rows. It is sent as the name of a function at
the top of a module, with plain values, tensors and frozen dataclasses. Answers are plain values and tensors without names, so no rank can
make rank 0 run anything. All commands of a group are in one order, whatever threads they come from.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
import trio
from torch._C._distributed_c10d import HashStore, Store

from rollouts.backends.ranks.channel import Channel, ChannelClosed, RankChannels, wait_readable
from rollouts.backends.ranks.distributed import Ranks, init_distributed, leave_distributed
from rollouts.backends.ranks.meeting import LOOPBACK, choose_interface, meet, read_placement
from rollouts.backends.ranks.values import DamagedError, NotPlainError, dump_value, load_value
from rollouts.backends.ranks.watch import (
    EXPLAIN_LOSS,
    Failure,
    LeaderWatch,
    Trouble,
    WatchLimits,
    WorkerWatch,
    are_alike,
    describe_failure,
    find_cause,
    make_error,
    read_failure,
)
from rollouts.errors import BackendError, ConfigError, RolloutsError

T = TypeVar("T")

_NOTICE_S = 15.0  # seconds for the watch to notice that a process ended, or for a process to notice that it must end, on a busy machine


def join_ranks(
    environment: MutableMapping[str, str], *, device: str | torch.device = "cpu", timeout_s: float = 600.0, grace_s: float = 10.0
) -> RankGroup:
    """Meet the other processes of the run. All ranks must call it with the same settings.

    Args:
        environment: environment of this process, as torchrun made it; without RANK this process is the only one. ROLLOUTS_RANK_TOKEN, or
            ROLLOUTS_RANK_TOKEN_FILE, has the secret that the processes of several machines share; ROLLOUTS_RANK_ADDRESS is rank 0's
            address, if it cannot be found automatically. GLOO_SOCKET_IFNAME is set if gloo would listen elsewhere than the ranks.
        device: device of this rank; "cuda" = the GPU of its local rank.
        timeout_s: seconds that joining, and each later command, may take.
        grace_s: seconds that a stuck rank has to get free after another has failed, before it is ended.

    Raises: ConfigError; BackendError naming the ranks that did not join.
    """
    if "RANK" not in environment:
        choose_interface(environment, LOOPBACK)
        if not dist.is_initialized():  # alone, whatever launcher started this process
            kind = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
            dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
        return RankGroup(init_distributed(device, timeout_s=timeout_s), {}, timeout_s=timeout_s, grace_s=grace_s)
    place = read_placement(environment)
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    try:
        meeting = meet(environment, place, timeout_s=timeout_s)
        choose_interface(environment, meeting.address)
        kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(kind, store=meeting.store, rank=place.rank, world_size=place.num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RolloutsError):
            raise
        raise BackendError(
            f"rank {place.rank} of {place.num_ranks} did not meet the others at {place.host}:{place.port} within {timeout_s:g} s: {error}"
        ) from error
    ranks = init_distributed(device, timeout_s=timeout_s)
    return RankGroup(ranks, meeting.channels, timeout_s=timeout_s, grace_s=grace_s, store=meeting.store)


class RankGroup:
    """Processes of a run, as seen by one of them. Made by join_ranks; a context manager on every rank.

    When rank 0 leaves its block, the other ranks return from serve(); if it leaves with an exception, they raise BackendError.
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
        """Args: channels: channels to each other rank, or to rank 0. store: kept alive, as rank 0 may serve it. Others: as join_ranks."""
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
        """Rank of this process; 0 leads."""
        return self.ranks.rank

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.ranks.world_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(None if error is None else f"rank 0 failed: {type(error).__name__}")

    # -- rank 0

    def get_backend(self, name: str) -> Any:
        """Return this rank's own part of a backend, see leading.lead_backend."""
        return self._backends[name]

    def drop_backend(self, name: str) -> None:
        """Drop a backend on every rank."""
        self.run(f"dropping the backend {name!r}", _drop_backend, name)

    def run(self, operation: str, function: Callable[..., T], *shared: object, own: Sequence[tuple[object, ...]] | None = None) -> list[T]:
        """Call function(backends, *shared, *own[rank]) on every rank. Blocks; any thread of rank 0 may call it.

        Args:
            operation: name for errors.
            function: called with its rank's backends by name; defined at the top of a module.
            own: arguments of each rank alone.

        Returns: results of all ranks, by rank.
        Raises: an error that all ranks raised alike, or this rank alone, unchanged; for another rank an error that names rank and
            operation (BackendError, or the class of the library's error raised there). If all ranks have answered, the group stays
            usable; otherwise every rank ends. ConfigError for a function or value that cannot be sent.
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
            except BaseException as interrupt:  # the state of the other ranks is unknown, so no command can follow
                self._watch.finish()
                self._break(f"rank 0 was interrupted in {operation} by {type(interrupt).__name__}")
                raise
            if outcome.closed:  # the watch reads the other connection of an ended process, a moment later
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
        else:  # rank 0's part would wait for the lost rank
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
                    answers[rank] = _load_answer(rank, channel.receive(self._timeout_s))
                except ChannelClosed:
                    has_failed = True
                    outcome.closed.append(rank)
                else:
                    has_failed = has_failed or answers[rank].failure is not None
        outcome.waited_s = time.monotonic() - begin
        return outcome

    def _send_all(self, messages: Sequence[tuple[bytes, ...]]) -> int | None:
        """Send every rank its part of a command. Stops at a rank that is gone and returns it; None = all were sent."""
        for rank, message in enumerate(messages, start=1):
            try:
                for frame in message:
                    self._channels[rank].commands.send(frame, self._timeout_s)
            except ChannelClosed:
                return rank
        return None

    def _judge(self, operation: str, outcome: _Outcome, trouble: Trouble) -> list[Any]:
        """Return the values of all ranks, or the error to raise."""
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
        raise raised

    def _break(self, reason: str) -> None:
        """Tell every rank to end; no command can follow."""
        assert self._watch is not None, "only rank 0 breaks a group"
        self._broken = reason
        self._watch.abort(reason)

    @property
    def stop_asked_by(self) -> int | None:
        """Another rank that has called ask_to_stop(); None = there is none."""
        assert self._watch is not None, f"rank {self.rank} does not lead"
        return self._watch.stop_asked_by

    async def wait_for_loss(self) -> None:
        """Wait until a rank is lost while nothing is computed, and raise BackendError; for a task beside the run.

        Returns when the group is closed, or when an operation has failed: run() raises that failure.
        """
        assert self._watch is not None, f"rank {self.rank} does not lead"
        await trio.to_thread.run_sync(self._watch.lost.wait, abandon_on_cancel=True)
        await trio.to_thread.run_sync(self._check_loss)

    def _check_loss(self) -> None:
        assert self._watch is not None, f"rank {self.rank} does not lead"
        with self._lock:  # a running operation detects the loss itself
            gone = self._watch.look().gone
            if self._broken is None and gone:
                self._break(f"rank {gone[0]} is gone")
                raise BackendError(f"rank {gone[0]} is gone: {EXPLAIN_LOSS}")

    @contextmanager
    def name_lost_rank(self, operation: str) -> Generator[None]:
        """Raise a failed exchange in the block as a BackendError that names the lost rank, if there is one; other errors pass.

        For work that goes on beside the commands, such as writing a checkpoint: its exchange may notice a loss before the watch does.
        """
        assert self._watch is not None, f"rank {self.rank} does not lead"
        try:
            yield
        except Exception as error:
            if not describe_failure(0, error).is_consequence:
                raise
            self._watch.lost.wait(_NOTICE_S)
            gone = self._watch.look().gone
            if not gone:
                raise
            raise BackendError(f"rank {gone[0]} is gone in {operation}: {EXPLAIN_LOSS}") from error

    # -- the other ranks

    def ask_to_stop(self) -> None:
        """Ask rank 0 to end the run in order. It may be called by a signal handler, and again."""
        assert self._worker_watch is not None, "rank 0 asks nobody: it leads"
        self._worker_watch.asks_to_stop = True

    def serve(self) -> None:
        """Carry out rank 0's commands until it has left its block. Raises BackendError if it failed or is gone."""
        watch = self._worker_watch
        assert watch is not None, "rank 0 does not serve: it leads"
        channel = self._channels[0].commands
        try:
            while operation := channel.receive(None).decode():
                watch.begin(operation)
                answer = self._answer(channel)
                try:
                    data = _dump_answer(answer)
                except Exception as error:
                    answer = _Answer()
                    answer.set_error(self.rank, BackendError(f"what it returned cannot be sent to rank 0 ({error}): return plain values"))
                    data = _dump_answer(answer)
                watch.finish(None if answer.failure is None else f"{answer.failure.name}: {answer.failure.message}")
                channel.send(data, self._timeout_s)
        except ChannelClosed:
            raise BackendError(f"rank {self.rank} ends: {watch.reason or 'rank 0 is gone'}") from None

    def _answer(self, channel: Channel) -> _Answer:
        frames = channel.receive(self._timeout_s), channel.receive(self._timeout_s)
        answer = _Answer()
        try:
            function, shared = load_value(frames[0], names=True)
            answer.value = function(self._backends, *shared, *load_value(frames[1], names=True))
        except Exception as error:  # rank 0 reports it
            answer.set_error(self.rank, error)
        return answer

    # -- the end

    def close(self, failure: str | None = None) -> None:
        """End the group. Rank 0 ends the other ranks, too: with status 0, or as failed if a failure is given or was raised before."""
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
            # closing a connection with unread data discards sent data: the other ranks would not receive the reason for their end
            self._watch.wait_for_ends(min(_NOTICE_S, self._grace_s))
            return
        self._watch.begin("the end of the run")
        for pair in self._channels.values():
            with suppress(ChannelClosed):
                pair.commands.send(b"", self._grace_s)
        for pair in self._channels.values():
            with suppress(ChannelClosed):  # a closed channel is the answer
                pair.commands.receive(self._grace_s)
        self._watch.finish()


@dataclass(kw_only=True)
class _Answer:
    """Answer of one rank to one command."""

    value: Any = None
    failure: Failure | None = None

    def set_error(self, rank: int, error: Exception) -> None:
        """Set the error of a failed command."""
        self.failure = describe_failure(rank, error)


def _dump_answer(answer: _Answer) -> bytes:
    """Serialize an answer. Raises NotPlainError for a value that cannot be sent."""
    return dump_value((answer.value, None if answer.failure is None else vars(answer.failure)))


def _load_answer(rank: int, data: bytes) -> _Answer:
    """Read the answer of another rank; it runs and imports nothing, and its failure gets the rank that sent it."""
    try:
        value, failure = load_value(data)
        return _Answer(value=value, failure=None if failure is None else replace(read_failure(failure), rank=rank))
    except (DamagedError, TypeError, ValueError) as error:
        answer = _Answer()
        answer.set_error(rank, BackendError(f"its answer cannot be read: {error}"))
        return answer


@dataclass
class _Outcome:
    """Outcome of one command."""

    answers: dict[int, _Answer] = field(default_factory=dict[int, _Answer])  # answers by rank
    error: Exception | None = None  # error of rank 0's part
    closed: list[int] = field(default_factory=list[int])  # ranks whose connection ended instead of an answer
    waited_s: float = 0.0  # seconds from the command until the last answer came or was given up


def _dump_command(
    operation: str, function: Callable[..., object], shared: tuple[object, ...], parts: Sequence[tuple[object, ...]]
) -> list[tuple[bytes, ...]]:
    """Serialize a command for ranks 1, 2, ... Raises ConfigError for a value that cannot be sent."""
    with _explain_unsendable(operation):
        head = dump_value((function, shared), names=True)
        return [(operation.encode(), head, dump_value(part, names=True)) for part in parts[1:]]


def check_sendable(name: str, value: object) -> None:
    """Raise ConfigError, as RankGroup.run would in the middle of a run, for a function or value that cannot be sent to other ranks."""
    with _explain_unsendable(name):
        dump_value(value, names=True)


@contextmanager
def _explain_unsendable(operation: str) -> Generator[None]:
    try:
        yield
    except NotPlainError as error:
        raise ConfigError(
            f"{operation} cannot be sent to the other ranks: {error}. Losses, output functions and builders are sent by name: define each "
            "at the top of a module, and use functools.partial with plain values for its settings, no lambda, no function within a "
            "function, no object; what a builder needs, a model for example, it makes or reads itself"
        ) from error


def _drop_backend(backends: dict[str, Any], name: str) -> None:
    backends.pop(name, None)


def _shut_down(channel: Channel) -> None:
    """End a wait for the next message, from another thread."""
    with suppress(OSError):
        channel.socket.shutdown(socket.SHUT_RDWR)
