"""Channels between the processes of one run: whole messages over sockets between rank 0 and every other rank.

Unlike a collective, a socket reports at once that the process at its other end is gone, can wait for whichever rank answers first, and
waits as long as generation takes. Before either end reads a message, both prove to each other that they know the token of the run,
without showing it. Each later message has a code over its number and direction that only the two ends can compute: an attacker between
them, or one that has led a rank to another address, can end a run but cannot send commands. Messages are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollouts.errors import BackendError

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20
_CODE_BYTES = 32

TOKEN_VARIABLE = "ROLLOUTS_RANK_TOKEN"

_HELLO = struct.Struct("!12sII32s")  # _MAGIC, rank, number of the connection, a random number
_MAGIC = b"rollouts-rk1"
_ANSWER = struct.Struct("!32s32s")  # a random number, the leader's proof
_PROOF_BYTES = 32
_WELCOME = b"!"
_HELLO_S = 10.0  # seconds for a connection to prove the token
_MAX_STRANGERS = 256  # unproven connections at a time; the oldest is dropped for a new one


class ChannelClosed(Exception):
    """The other end is gone, did not receive or send a message in time, or its message was changed on the way."""


class WrongToken(Exception):
    """The other end knows another token, or none."""


def _code(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


@dataclass
class _Way:
    """One direction of a connection."""

    key: bytes
    count: int = 0  # number of messages

    def code(self, length: bytes, data: bytes) -> bytes:
        """Return the code of the next message."""
        self.count += 1
        return _code(self.key, self.count.to_bytes(8), length, data)


class Channel:
    """One end of a connection; sends and receives whole messages."""

    def __init__(self, connection: socket.socket, *, send_key: bytes, receive_key: bytes) -> None:
        """Args: the keys of sent and of received messages."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._sent, self._received = _Way(send_key), _Way(receive_key)

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send a message. Raises ChannelClosed if the other end is gone or does not receive it in time."""
        try:
            self.socket.settimeout(timeout_s)
            length = _LENGTH.pack(len(data))
            head = length + self._sent.code(length, data)
            if len(data) <= _CHUNK:
                self.socket.sendall(head + data)
            else:
                self.socket.sendall(head)
                self.socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(f"nothing can be sent: {error}") from error

    def receive(self, timeout_s: float | None) -> bytes:
        """Receive the next message. Raises ChannelClosed if the other end is gone or sends nothing in time; None = no time limit."""
        try:
            self.socket.settimeout(timeout_s)
            length = _read(self.socket, _LENGTH.size)
            code = _read(self.socket, _CODE_BYTES)
            data = _read(self.socket, _LENGTH.unpack(length)[0])
        except OSError as error:
            raise ChannelClosed(f"nothing is received: {error}") from error
        if not hmac.compare_digest(code, self._received.code(length, data)):
            self.close()
            raise ChannelClosed("a message came that the other end has not sent as it is: somebody between the two changes them")
        return data

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), _CHUNK))
        if not part:
            raise ChannelClosed("the other end is gone")
        data += part
    return bytes(data)


@dataclass(frozen=True)
class RankChannels:
    """Two connections between rank 0 and another rank."""

    commands: Channel  # commands one way, answers the other; used by the computing threads
    pulse: Channel  # heartbeats and failures; used by the watching threads


def wait_readable(channels: Iterable[Channel], timeout_s: float) -> list[Channel]:
    """Wait for channels that have a message or have lost their other end; return none after timeout_s seconds."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel.socket, selectors.EVENT_READ, channel)
        return [key.data for key, _ in selector.select(max(0.0, timeout_s))]


class _SentAway(Exception):
    """A connection does not belong to this run."""


@dataclass(eq=False)
class _Guest:
    """Connection that has not proven the token yet, and the state of its handshake."""

    socket: socket.socket
    origin: str
    deadline: float
    data: bytes = b""
    hello: bytes = b""
    answer: bytes = b""

    def hear(self, token: bytes, num_ranks: int) -> tuple[tuple[int, int], Channel] | None:
        """Read the received bytes. Returns (rank, number) and the channel, once the token is proven. Raises _SentAway."""
        wanted = _PROOF_BYTES if self.hello else _HELLO.size
        try:
            part = self.socket.recv(wanted - len(self.data))
            self.data += part
            if not part:
                raise _SentAway
            if len(self.data) < wanted:
                return None
            data, self.data = self.data, b""
            if not self.hello:
                magic, rank, number, _ = _HELLO.unpack(data)
                if magic != _MAGIC or not 0 < rank < num_ranks or number > 1:
                    raise _SentAway
                self.hello, own = data, secrets.token_bytes(32)
                self.answer = _ANSWER.pack(own, _code(token, b"rank 0 knows it", self.hello, own))
                self.socket.sendall(self.answer)
                return None
            if not hmac.compare_digest(data, _code(token, b"a rank knows it", self.hello, self.answer)):
                raise _SentAway
            self.socket.sendall(_WELCOME)
        except OSError as error:
            raise _SentAway from error
        _, rank, number, _ = _HELLO.unpack(self.hello)
        keys = _derive_keys(token, self.hello, self.answer)
        return (rank, number), Channel(self.socket, send_key=keys[0], receive_key=keys[1])


def _derive_keys(token: bytes, hello: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """Derive the keys of one connection: for messages that rank 0 sends, and for messages that it receives."""
    return _code(token, b"from rank 0", hello, answer), _code(token, b"to rank 0", hello, answer)


class Listener:
    """Listening socket of rank 0 for the connections of the other ranks.

    Time and number of unproven connections are limited, and nothing that they send is kept.
    """

    def __init__(self, host: str, token: bytes) -> None:
        """Args: host: the one address to listen on. Raises OSError if this machine does not have it."""
        self._token = token
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._guests: list[_Guest] = []  # in order of arrival
        self._num_sent_away, self._last_origin = 0, ""  # connections with a rank's hello but no proof of the token

    def accept(self, num_ranks: int, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> dict[int, RankChannels]:
        """Accept the connections of ranks 1 to num_ranks - 1; other connections are ignored.

        Raises: BackendError naming the ranks that do not connect in time.
        """
        deadline = clock() + timeout_s
        found: dict[tuple[int, int], Channel] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while len(found) < 2 * (num_ranks - 1):
                now = clock()
                if now >= deadline:
                    self._dismiss(selector, self._guests)
                    raise BackendError(self._describe_missing(found, num_ranks, timeout_s))
                self._dismiss(selector, [guest for guest in self._guests if guest.deadline <= now])
                ends = min([deadline, *(guest.deadline for guest in self._guests[:1])])
                readable = {key.fileobj for key, _ in selector.select(max(0.01, ends - now))}
                for guest in [guest for guest in self._guests if guest.socket in readable]:
                    if (heard := self._hear(selector, guest, num_ranks)) is not None:
                        place, channel = heard
                        if place in found:  # the earlier one was given up by its process
                            found[place].close()
                        found[place] = channel
                if self._socket in readable:
                    self._let_in(selector, now)
            self._dismiss(selector, self._guests)
        return {rank: RankChannels(found[rank, 0], found[rank, 1]) for rank in range(1, num_ranks)}

    def _let_in(self, selector: selectors.BaseSelector, now: float) -> None:
        """Accept one waiting connection; one at a time, so that accepted ones are read in between."""
        if len(self._guests) >= _MAX_STRANGERS:
            self._dismiss(selector, self._guests[:1])
        try:
            connection, address = self._socket.accept()
        except OSError:  # it was closed already, or no file descriptors are left
            self._dismiss(selector, self._guests[:1])
            return
        connection.setblocking(False)
        guest = _Guest(connection, str(address[0]), now + _HELLO_S)
        self._guests.append(guest)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, guest: _Guest, num_ranks: int) -> tuple[tuple[int, int], Channel] | None:
        try:
            heard = guest.hear(self._token, num_ranks)
        except _SentAway:
            if guest.hello:
                self._num_sent_away, self._last_origin = self._num_sent_away + 1, guest.origin
            self._dismiss(selector, [guest])
            return None
        if heard is not None:
            self._guests.remove(guest)
            selector.unregister(guest.socket)
        return heard

    def _dismiss(self, selector: selectors.BaseSelector, guests: Iterable[_Guest]) -> None:
        for guest in list(guests):
            self._guests.remove(guest)
            selector.unregister(guest.socket)
            guest.socket.close()

    def _describe_missing(self, found: Iterable[tuple[int, int]], num_ranks: int, timeout_s: float) -> str:
        here = set(found)
        missing = [rank for rank in range(1, num_ranks) if not {(rank, 0), (rank, 1)} <= here]
        told = (
            f"rank {', '.join(map(str, missing))} of {num_ranks} did not join within {timeout_s:g} s: "
            "look at the output of these processes, and whether they can reach MASTER_ADDR"
        )
        if self._num_sent_away:
            told += (
                f". {self._num_sent_away} connections did not prove that they know the token of this run, the last from "
                f"{self._last_origin}: is {TOKEN_VARIABLE} the same on every machine?"
            )
        return told

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def connect_to_leader(host: str, port: int, token: bytes, rank: int, *, timeout_s: float) -> RankChannels:
    """Connect a rank to rank 0. Raises OSError or ChannelClosed if nothing answers as rank 0 does, WrongToken."""
    return RankChannels(*(_connect(host, port, token, rank, number, timeout_s) for number in range(2)))


def _connect(host: str, port: int, token: bytes, rank: int, number: int, timeout_s: float) -> Channel:
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        hello = _HELLO.pack(_MAGIC, rank, number, secrets.token_bytes(32))
        connection.sendall(hello)
        answer = _read(connection, _ANSWER.size)
        own, proof = _ANSWER.unpack(answer)
        if not hmac.compare_digest(proof, _code(token, b"rank 0 knows it", hello, own)):
            raise WrongToken
        connection.sendall(_code(token, b"a rank knows it", hello, answer))
        _read(connection, len(_WELCOME))
    except BaseException:
        connection.close()
        raise
    keys = _derive_keys(token, hello, answer)
    return Channel(connection, send_key=keys[1], receive_key=keys[0])
