"""How the processes of one run talk: Python values over sockets from rank 0 to every other rank.

A socket says at once that the process at its other end is gone, waits for whichever rank answers first, and waits as long as generation
takes, none of which a collective does. Who connects must know a token that only the ranks of the run can read. What is received is
unpickled, as in the object collectives of torch.distributed: it can run code, and comes from this run's own processes.
"""

from __future__ import annotations

import hmac
import io
import pickle
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollouts.errors import BackendError

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20
_BY_NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class ChannelClosed(Exception):
    """The other end is gone, or did not take or send what it should have in time."""


class _Pickler(pickle.Pickler):
    """Tensors on the CPU as arrays: only the elements that they show, without a file around each."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.device.type == "cpu" and obj.dtype in _BY_NUMPY and obj.layout == torch.strided:
            return torch.from_numpy, (obj.detach().contiguous().numpy(),)
        return NotImplemented


def dump_value(value: object) -> bytes:
    """A value as bytes. Raises what pickle raises for one that cannot be: PicklingError, AttributeError, TypeError."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def load_value(data: bytes) -> Any:
    """The value that dump_value was given, by another process of this run."""
    return pickle.loads(data)


class Channel:
    """One end of a connection; sends and receives whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a message. Raises ChannelClosed if the other end is gone or does not take it in time."""
        try:
            self.socket.settimeout(timeout_s)
            head = _LENGTH.pack(len(data))
            if len(data) <= _CHUNK:
                self.socket.sendall(head + data)
            else:
                self.socket.sendall(head)
                self.socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(f"nothing can be sent: {error}") from error

    def receive(self, timeout_s: float | None) -> bytes:
        """The next message. Raises ChannelClosed if the other end is gone or sends nothing in time; None = wait as long as it is there."""
        try:
            self.socket.settimeout(timeout_s)
            return self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        except OSError as error:
            raise ChannelClosed(f"nothing is received: {error}") from error

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.socket.recv(min(count - len(data), _CHUNK))
            if not part:
                raise ChannelClosed("the other end is gone")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


@dataclass(frozen=True)
class RankChannels:
    """The two connections between rank 0 and another rank."""

    commands: Channel  # commands one way, answers the other, by the threads that compute
    pulse: Channel  # signs of life and failures, by the threads that watch


def wait_readable(channels: Iterable[Channel], timeout_s: float) -> list[Channel]:
    """Those channels that have something to read, or whose other end is gone; none after timeout_s."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel.socket, selectors.EVENT_READ, channel)
        return [key.data for key, _ in selector.select(max(0.0, timeout_s))]


class Listener:
    """Where rank 0 takes the connections of the other ranks."""

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(32)
        try:
            self._socket = socket.create_server((host, 0), backlog=4096)
        except OSError:  # an address of this machine seen from outside, such as one behind a translation of addresses
            self._socket = socket.create_server(("", 0), backlog=4096)
        self.port = int(self._socket.getsockname()[1])

    def accept(self, num_ranks: int, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> dict[int, RankChannels]:
        """The connections of ranks 1 to num_ranks - 1. Raises BackendError naming those that do not come in time."""
        deadline = clock() + timeout_s
        found: dict[tuple[int, int], Channel] = {}
        while len(found) < 2 * (num_ranks - 1):
            try:
                self._socket.settimeout(max(0.01, deadline - clock()))
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = sorted({rank for rank in range(1, num_ranks) if not {(rank, 0), (rank, 1)} <= found.keys()})
                raise BackendError(
                    f"rank {', '.join(map(str, missing))} of {num_ranks} did not join within {timeout_s:g} s: "
                    "look at the output of these processes, and whether they can reach MASTER_ADDR"
                ) from None
            channel = Channel(connection)
            place = self._read_hello(channel)
            if place is None:
                channel.close()  # nobody of this run
            else:
                found[place] = channel
        return {rank: RankChannels(found[rank, 0], found[rank, 1]) for rank in range(1, num_ranks)}

    def _read_hello(self, channel: Channel) -> tuple[int, int] | None:
        """(rank, number of the connection) of who knows the token. Nothing is unpickled before that."""
        try:
            token, rank, number = channel.receive(10.0).decode("ascii").split(" ")
        except (ChannelClosed, ValueError):
            return None
        return (int(rank), int(number)) if hmac.compare_digest(token, self.token) else None

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()


def connect_to_leader(host: str, port: int, token: str, rank: int, *, timeout_s: float) -> RankChannels:
    """The connections of a rank to rank 0. Raises BackendError."""
    channels: list[Channel] = []
    for number in range(2):
        try:
            channel = Channel(socket.create_connection((host, port), timeout=timeout_s))
            channel.send(f"{token} {rank} {number}".encode("ascii"), timeout_s)
        except (OSError, ChannelClosed) as error:
            raise BackendError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from error
        channels.append(channel)
    return RankChannels(*channels)
