"""A filter of system calls that no reward code needs: they hold memory of no process, read others, or widen the surface.

Linux on x86-64 and arm64; elsewhere nothing is filtered. Imported inside of sandboxes.
Source: https://docs.kernel.org/userspace-api/seccomp_filter.html; numbers from the kernel's unistd headers.
"""

from __future__ import annotations

import ctypes
import errno
import os

from rollouts.sandbox.kernel import check, libc

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE | errno: the call fails
OFFSET_OF_NUMBER, OFFSET_OF_ARCHITECTURE, OFFSET_OF_FLAGS = 0, 4, 16  # in what the filter sees; the flags are clone's first argument
NEW_NAMESPACES = 0x7E020000  # the flags of clone that make any
CLONE, CLONE3 = ("clone", 56, 220), 435
FIRST_OF_X32 = 0x40000000  # a second table of calls on x86-64

# name: (x86-64, arm64); the numbers of later calls are the same everywhere
REFUSED = (
    ("shmget", 29, 194), ("ptrace", 101, 117), ("syslog", 103, 116), ("personality", 135, 92), ("pivot_root", 155, 41), ("acct", 163, 89),
    ("mount", 165, 40), ("umount2", 166, 39), ("swapon", 167, 224), ("reboot", 169, 142), ("init_module", 175, 105),
    ("quotactl", 179, 60), ("kexec_load", 246, 104), ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    ("unshare", 272, 97), ("perf_event_open", 298, 241), ("open_by_handle_at", 304, 265), ("setns", 308, 268),
    ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271), ("kcmp", 312, 272), ("finit_module", 313, 273),
    ("memfd_create", 319, 279), ("kexec_file_load", 320, 294), ("bpf", 321, 280), ("userfaultfd", 323, 282), ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427), ("open_tree", 428, 428), ("move_mount", 429, 429),
    ("fsopen", 430, 430), ("fsmount", 432, 432), ("pidfd_getfd", 438, 438), ("mount_setattr", 442, 442), ("memfd_secret", 447, 447),
)  # fmt: skip
ARCHITECTURES = (("x86_64", 0xC000003E, 1), ("aarch64", 0xC00000B7, 2))  # (machine, number of its ABI, column of REFUSED)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def filter_system_calls() -> bool:
    """Refuse the calls above, and new namespaces, to this process and all that it starts. PR_SET_NO_NEW_PRIVS must be set before.

    The calls fail with EPERM; clone3, whose flags a filter cannot see, with ENOSYS, upon which C libraries use clone.

    Returns: whether there is a filter for this machine.

    Raises:
        OSError: the kernel refused it.
    """
    found = [(number, column) for machine, number, column in ARCHITECTURES if machine == os.uname().machine]
    if not found:
        return False
    architecture, column = found[0]
    numbers = [int(row[column]) for row in REFUSED]
    end = len(numbers) + 8  # index of ALLOW; jumps count from the instruction behind
    program = [(LOAD, 0, 0, OFFSET_OF_ARCHITECTURE), (JUMP_IF_EQUAL, 0, end - 1, architecture), (LOAD, 0, 0, OFFSET_OF_NUMBER)]
    program += [(JUMP_IF_AT_LEAST, end - 3, 0, FIRST_OF_X32)]
    program += [(JUMP_IF_EQUAL, end + 1 - (index + 1), 0, number) for index, number in enumerate(numbers, start=4)]
    program += [(JUMP_IF_EQUAL, 5, 0, CLONE3), (JUMP_IF_EQUAL, 0, 2, int(CLONE[column]))]
    program += [(LOAD, 0, 0, OFFSET_OF_FLAGS), (JUMP_IF_ANY_BIT, 1, 0, NEW_NAMESPACES)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    instructions = (_Instruction * len(program))(*(_Instruction(*fields) for fields in program))
    filled = _Program(length=len(program), instructions=instructions)
    check(libc().prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(filled), ctypes.c_ulong(0), ctypes.c_ulong(0)), "seccomp")
    return True
