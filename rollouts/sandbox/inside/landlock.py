"""Landlock: a process gives up access to files, TCP, and other processes' signals and abstract sockets, also for its children.

Source: https://docs.kernel.org/userspace-api/landlock.html. Linux only; imported inside of sandboxes.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from rollouts.sandbox.inside.kernel import check, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the others are rights of folders
NUM_FILE_RIGHTS = (0, 13, 14, 15, 15, 16)  # file rights by version; 5 and later have 16


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 = none."""
    return max(system_call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ASK_VERSION)), 0)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Confine this process: named files only, no TCP (version 4), no signals to and no abstract sockets of processes outside (6).

    prctl(PR_SET_NO_NEW_PRIVS) must come before.

    Args:
        readable: files and folders, with their contents, that can be read and executed. Missing ones are left out.
        writable: files and folders in which everything is allowed.

    Returns: the version in use; 0 means that nothing was restricted.

    Raises:
        OSError: a rule was refused.
    """
    version = landlock_version()
    if version == 0:
        return 0
    rights = (1 << NUM_FILE_RIGHTS[min(version, 5)]) - 1
    ruleset = _Ruleset(files=rights, net=3 if version >= 4 else 0, scoped=3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    descriptor = check(system_call(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0)), "landlock ruleset")
    try:
        for path in readable:
            _allow(descriptor, path, rights & (EXECUTE | READ_FILE | READ_DIR))
        for path in writable:
            _allow(descriptor, path, rights)
        check(system_call(RESTRICT_SELF, descriptor, ctypes.c_uint32(0)), "landlock")
    finally:
        os.close(descriptor)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add one rule to a ruleset; a missing path gets none."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        kept = rights if stat.S_ISDIR(os.fstat(place).st_mode) else rights & OF_FILES
        rule = _PathBeneath(rights=kept, descriptor=place)
        check(system_call(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)), f"landlock rule for {path}")
    finally:
        os.close(place)


def scope_signals() -> None:
    """Allow signals only to processes that this one starts after the call, if the kernel can (Landlock version 6)."""
    if landlock_version() >= 6:
        ruleset = _Ruleset(files=0, net=0, scoped=2)
        size = ctypes.c_size_t(24)
        descriptor = check(system_call(CREATE_RULESET, ctypes.byref(ruleset), size, ctypes.c_uint32(0)), "landlock ruleset")
        try:
            check(system_call(RESTRICT_SELF, descriptor, ctypes.c_uint32(0)), "landlock")
        finally:
            os.close(descriptor)
