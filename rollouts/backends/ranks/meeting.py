"""Rendezvous of the processes of a run: this process's rank, the shared secret, and the address that rank 0 listens on.

On one machine everything is at 127.0.0.1, and rank 0 tells the others its port and a fresh token in a file that only their user can read.
Several machines have a secret from their user, and a store of torch.distributed. Any process that reaches the store's port may read and
write it: the ranks read rank 0's address from it, and nothing that could do harm if forged.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from rollouts.backends.ranks.channel import TOKEN_VARIABLE, ChannelClosed, Listener, RankChannels, WrongToken, connect_to_leader
from rollouts.checks import parse_json
from rollouts.errors import BackendError, ConfigError

TOKEN_FILE_VARIABLE = TOKEN_VARIABLE + "_FILE"
ADDRESS_VARIABLE = "ROLLOUTS_RANK_ADDRESS"
GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

LOOPBACK = "127.0.0.1"
_MIN_TOKEN = 32  # characters of a token, at least
_RETRY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Position of this process among the processes of a run."""

    rank: int
    num_ranks: int
    local_rank: int  # rank among the processes of this machine
    one_machine: bool  # whether all processes are on this machine
    host: str  # host of rank 0
    port: int  # port of the store for the rendezvous
    has_store: bool = False  # whether the launcher serves the store; otherwise rank 0 does
    attempt: int = 0  # number of restarts of all processes by the launcher
    run_id: str = ""  # run id of the launcher


@dataclass(frozen=True)
class Meeting:
    """Connections of this process after the rendezvous."""

    channels: Mapping[int, RankChannels]  # rank 0's channels to each other rank, or another rank's to rank 0
    store: Store  # store for torch.distributed; kept alive during the run, since rank 0 may serve it
    address: str  # address of this process, as the others see it


def read_placement(environment: Mapping[str, str]) -> Placement:
    """Read the placement that torchrun sets in the environment of each process. Raises ConfigError if it is missing or invalid."""
    try:
        num_ranks, host = int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"]
        num_local = environment.get("LOCAL_WORLD_SIZE")
        found = Placement(
            rank=int(environment["RANK"]),
            num_ranks=num_ranks,
            local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
            one_machine=host in ("localhost", LOOPBACK) if num_local is None else int(num_local) == num_ranks,
            host=host,
            port=int(environment["MASTER_PORT"]),
            has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not say which process this is ({error!r}): start it with torchrun"
        ) from error
    if not 0 <= found.rank < found.num_ranks:
        raise ConfigError(f"RANK is {found.rank} and WORLD_SIZE is {found.num_ranks}: start the processes with torchrun")
    return found


def read_token(environment: Mapping[str, str]) -> bytes | None:
    """Read the secret of the run from ROLLOUTS_RANK_TOKEN, or from the file that ROLLOUTS_RANK_TOKEN_FILE names; None = neither is set.

    Raises: ConfigError if it is too short, or other users may read the file.
    """
    token, name = environment.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    if not token and (path := environment.get(TOKEN_FILE_VARIABLE)):
        name = f"{path} ({TOKEN_FILE_VARIABLE})"
        try:
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigError(f"{name} may be read by others than its owner: chmod 600 {path}")
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} cannot be read: {error}") from error
        if not token:
            raise ConfigError(f"{name} is empty: write a random text to it, for example by `openssl rand -hex 32`")
    if not token:
        return None
    if len(token) < _MIN_TOKEN:
        raise ConfigError(f"{name} has {len(token)} characters, expected {_MIN_TOKEN} or more, for example of `openssl rand -hex 32`")
    return token.encode()


def meet(environment: Mapping[str, str], place: Placement, *, timeout_s: float) -> Meeting:
    """Meet the other processes of the run.

    Raises: ConfigError for a secret that is missing or differs, or an address that cannot be listened on; BackendError naming the ranks
        that did not join; RuntimeError of the store.
    """
    token = read_token(environment)
    if place.one_machine:
        return _meet_here(environment, place, token, timeout_s)
    if token is None:
        raise ConfigError(
            f"{place.num_ranks} processes on several machines need a secret to know each other by: set {TOKEN_VARIABLE} to the same random "
            "text on every machine, for example of `openssl rand -hex 32` run once; or put it into a file with mode 600 that all of them "
            f"see, and set {TOKEN_FILE_VARIABLE} to its path"
        )
    return _meet_over_store(environment, place, token, timeout_s)


# -- one machine


def _meet_here(environment: Mapping[str, str], place: Placement, given: bytes | None, timeout_s: float) -> Meeting:
    name = hashlib.sha256(repr((place.run_id, place.host, place.port, place.attempt)).encode()).hexdigest()[:24]
    path = _find_private_directory(environment) / f"{name}.json"
    timeout = timedelta(seconds=timeout_s)
    if place.rank > 0:
        return _join_here(path, place, given, timeout_s)
    token = given or secrets.token_hex(_MIN_TOKEN).encode()
    listener = Listener(LOOPBACK, token)
    try:
        door = socket.create_server((LOOPBACK, 0), backlog=4096)
        port = int(door.getsockname()[1])
        store = TCPStore(LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=door.detach())
        _write_privately(path, json.dumps({"port": listener.port, "store": port, "token": "" if given else token.decode()}))
        try:
            return Meeting(listener.accept(place.num_ranks, timeout_s=timeout_s), store, LOOPBACK)
        finally:
            path.unlink(missing_ok=True)
    finally:
        listener.close()


def _join_here(path: Path, place: Placement, given: bytes | None, timeout_s: float) -> Meeting:
    """Retry the file until it leads to rank 0: it may be left over from a killed run."""
    deadline, problem = time.monotonic() + timeout_s, f"{path} does not come"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            found = parse_json(path.read_text())
            token = given or found["token"].encode()
            channels = connect_to_leader(LOOPBACK, found["port"], token, place.rank, timeout_s=left_s)
            store = TCPStore(LOOPBACK, found["store"], is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
            return Meeting({0: channels}, store, LOOPBACK)
        except FileNotFoundError:
            pass
        except WrongToken:
            problem = f"who listens on the port that {path} says knows another token: {TOKEN_VARIABLE} must be the same in all processes"
        except (OSError, ChannelClosed, ValueError, KeyError) as error:
            problem = f"{path} leads to nobody: {error}"
        time.sleep(_RETRY_S)
    raise BackendError(f"rank {place.rank} of {place.num_ranks} did not find rank 0 on this machine within {timeout_s:g} s: {problem}")


def _find_private_directory(environment: Mapping[str, str]) -> Path:
    """Find a directory for files that only this user may read. Raises ConfigError if there is none."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    bases = [Path(base) for base in (environment.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if base]
    problem = ""
    for base in bases:
        directory = base / f"rollouts-{user}"
        try:
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            found = os.lstat(directory)
        except OSError as error:
            problem = str(error)
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not stat.S_IMODE(found.st_mode) & 0o077:
            return directory
        problem = f"{directory} is not a directory of this user alone (mode 700)"
    raise ConfigError(f"the processes of this run have no private place to meet: {problem}. Set TMPDIR to a directory of your own")


def _write_privately(path: Path, text: str) -> None:
    """Write a file of mode 600 atomically."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 600, and never an existing file or link
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise


# -- several machines


def _meet_over_store(environment: Mapping[str, str], place: Placement, token: bytes, timeout_s: float) -> Meeting:
    deadline = time.monotonic() + timeout_s
    timeout, serves = timedelta(seconds=timeout_s), place.rank == 0 and not place.has_store
    server = TCPStore(place.host, place.port, is_master=serves, timeout=timeout, wait_for_workers=False)
    store = PrefixStore(f"rollouts/{place.attempt}", server)
    if place.rank > 0:
        if place.local_rank == 0:
            store.set("peer", _address_towards(place.host, place.port))
        host, port = store.get("leader").decode("ascii").split(" ")
        return _join_leader(host, int(port), token, place, store, deadline)
    address = find_address(environment, place.host, lambda: store.get("peer").decode("ascii"))
    try:
        listener = Listener(address, token)
    except OSError as error:
        raise ConfigError(f"rank 0 cannot listen on {address}: {error}. {_EXPLAIN_ADDRESS}") from error
    try:
        store.set("leader", f"{address} {listener.port}")
        return Meeting(listener.accept(place.num_ranks, timeout_s=timeout_s), store, address)
    finally:
        listener.close()


def _join_leader(host: str, port: int, token: bytes, place: Placement, store: Store, deadline: float) -> Meeting:
    while True:
        try:
            channels = connect_to_leader(host, port, token, place.rank, timeout_s=max(1.0, deadline - time.monotonic()))
            return Meeting({0: channels}, store, str(channels.commands.socket.getsockname()[0]))
        except WrongToken:
            raise ConfigError(
                f"rank {place.rank}: who listens at {host}:{port}, where rank 0 should be, knows another token: {TOKEN_VARIABLE} must be "
                "the same on every machine"
            ) from None
        except (OSError, ChannelClosed) as error:
            if time.monotonic() + _RETRY_S >= deadline or isinstance(error, ConnectionRefusedError):
                raise BackendError(f"rank {place.rank} cannot reach rank 0 at {host}:{port}: {error}. {_EXPLAIN_ADDRESS}") from error
        time.sleep(_RETRY_S)


_EXPLAIN_ADDRESS = f"{ADDRESS_VARIABLE}, on the machine of rank 0, names the address of it at which the other machines reach it"


def find_address(environment: Mapping[str, str], host: str, get_peer: Callable[[], str]) -> str:
    """Find the address of this machine for rank 0 to listen on, reachable by the other machines.

    It is ROLLOUTS_RANK_ADDRESS, or the address of `host` as resolved here. If that is loopback, as for a machine's own name on Debian, it
    is the address on the way to another machine.

    Args:
        host: MASTER_ADDR.
        get_peer: waits for the address of another machine and returns it.

    Raises: ConfigError if there is none.
    """
    if given := environment.get(ADDRESS_VARIABLE):
        try:
            return str(ipaddress.ip_address(given))
        except ValueError as error:
            raise ConfigError(f"{ADDRESS_VARIABLE} is {given!r}, expected an IP address, such as 10.0.0.1") from error
    for address in _resolve(host):
        if not _is_loopback(address) and _can_bind(address):
            return address
    peer = get_peer()
    with suppress(OSError):
        if _can_bind(address := _address_towards(peer, 9)):
            return address
    raise ConfigError(f"{host!r} (MASTER_ADDR) is no address of this machine that {peer} could reach. {_EXPLAIN_ADDRESS}")


def _resolve(host: str) -> list[str]:
    with suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.split("%")[0])
    return found.is_loopback or found.is_unspecified


def _can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address_towards(host: str, port: int) -> str:
    """Find this machine's address on the way to another machine. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


# -- gloo


def choose_interface(environment: MutableMapping[str, str], address: str) -> None:
    """Make gloo listen on the interface of the rendezvous, by GLOO_SOCKET_IFNAME, unless it is set or this machine's name is reachable.

    Gloo listens at the address of the machine's own name. On one machine that address may be open to other machines; on several machines
    it may be loopback, which no other machine reaches.
    """
    if GLOO_VARIABLE in environment:
        return
    own = _resolve(socket.gethostname())
    leads_outside = bool(own) and not any(map(_is_loopback, own))
    if leads_outside != _is_loopback(address):
        return
    if (name := _find_interface(address)) is not None:
        environment[GLOO_VARIABLE] = name


def _find_interface(address: str) -> str | None:
    """Find the name of the interface with an address; None if it cannot be found."""
    names = [name for _, name in socket.if_nameindex()]
    if _is_loopback(address):
        return next((name for name in names if name in ("lo", "lo0")), None)
    if ":" in address:
        return None
    try:
        from fcntl import ioctl
    except ImportError:
        return None
    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with suppress(OSError):
                found = ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
