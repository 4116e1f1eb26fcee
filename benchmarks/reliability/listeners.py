"""Addresses at which processes listen, as the kernel tells them."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def find_family(pid: int) -> set[int]:
    """Return a process and all that descend from it."""
    family, waiting = set[int](), [pid]
    while waiting:
        family.add(parent := waiting.pop())
        with suppress(OSError):
            lists = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
            waiting += [int(child) for text in lists for child in text.split()]
    return family


def list_listeners(pids: Iterable[int]) -> set[str]:
    """Return the addresses of TCP at which any of the processes listens."""
    return set(find_listening_sockets(pids).values())


def find_listening_sockets(pids: Iterable[int]) -> dict[str, str]:
    """Return the addresses of TCP at which any of the processes listens, by the inodes of their sockets."""
    own = set[str]()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    own.add(os.readlink(path))
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        file = Path(f"/proc/net/{table}")
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in own:  # listens
                words = bytes.fromhex(columns[1].partition(":")[0])
                packed = b"".join(struct.pack(">I", *struct.unpack("=I", words[i : i + 4])) for i in range(0, len(words), 4))
                found[columns[9]] = str(ipaddress.ip_address(packed))
    return found


def assert_loopback(pids: Iterable[int], *, some: bool = True) -> None:
    """Assert that the processes listen at addresses of the loopback interface alone. some: and that they listen at all."""
    found = list_listeners(pids)
    assert found or not some, "nobody listens"
    parsed = [ipaddress.ip_address(address) for address in found]
    assert all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in parsed), found
