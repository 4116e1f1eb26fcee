"""System calls without a Python function, through ctypes. Linux only; imported inside of sandboxes."""

from __future__ import annotations

import ctypes
import functools
import os

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR = 442  # same number on all architectures, like every system call since Linux 5.1
OPEN_TREE = 428
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
OPEN_TREE_CLONE = 1
HOST_NAME = b"sandbox"
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
CAPABILITIES_VERSION = 0x20080522


class _MountAttributes(ctypes.Structure):
    _fields_ = (("set", ctypes.c_uint64), ("clear", ctypes.c_uint64), ("propagation", ctypes.c_uint64), ("userns", ctypes.c_uint64))


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library with functions that set errno."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Return a system call's result. Raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by its number; -1 = failed."""
    return libc().syscall(ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument."""
    zero = ctypes.c_ulong(0)
    check(libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option}, {value})")


def unshare(flags: int) -> None:
    """Call unshare(2): this process and its children get namespaces of their own."""
    check(libc().unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    result = libc().mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None)
    check(result, f"mount {source or kind} at {target}")


def make_read_only(target: str, recursive: bool) -> None:
    """Make a mount read-only, with `recursive` also those below it."""
    attributes = _MountAttributes(set=MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    flags, size = AT_RECURSIVE if recursive else 0, ctypes.c_size_t(ctypes.sizeof(attributes))
    result = system_call(MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), flags, ctypes.byref(attributes), size)
    check(result, f"make {target} read-only")


def bind_read_only(source: str, target: str) -> None:
    """Show a file or folder, with the mounts in it, read-only at another place."""
    mount(source, target, "", MS_BIND | MS_REC)
    make_read_only(target, recursive=True)


def pivot_root(new: str, old: str) -> None:
    """Make the mount `new` the root of this mount namespace, and show the former root at `old`, a folder in it."""
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root has no known number on {os.uname().machine}")
    check(system_call(number, os.fsencode(new), os.fsencode(old)), "pivot_root")
    os.chdir("/")


def name_host() -> None:
    """Give this UTS namespace neutral names in place of the machine's."""
    check(libc().sethostname(HOST_NAME, ctypes.c_size_t(len(HOST_NAME))), "sethostname")
    check(libc().setdomainname(b"(none)", ctypes.c_size_t(6)), "setdomainname")


def hide_mounts() -> None:
    """Make a copy of the root, with its mounts, the root of this process and its children.

    The copy belongs to no mount namespace. Lists of mounts (/proc/self/mountinfo) show those of a namespace that can be reached from the
    root, so they are empty afterwards; no other place tells the source of a mount.
    """
    flags = ctypes.c_uint(OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC)
    root = check(system_call(OPEN_TREE, AT_FDCWD, b"/", flags), "open_tree")
    try:
        os.fchdir(root)
        os.chroot(".")
    finally:
        os.close(root)
    os.chdir("/")


def unmount(target: str) -> None:
    """Remove a mount and those below it from this mount namespace."""
    check(libc().umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def drop_capabilities() -> None:
    """Give up all capabilities of this process."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    check(libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")
