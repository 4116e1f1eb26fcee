"""Filter of system calls that no reward code needs: they keep memory without a process, disturb others, or widen the attack surface.

Linux on x86-64 and arm64; elsewhere nothing is filtered. Imported inside of sandboxes.
Source: https://docs.kernel.org/userspace-api/seccomp_filter.html; numbers from the kernel's unistd headers.
"""

from __future__ import annotations

import ctypes
import errno
import os

from rollouts.sandbox.inside.kernel import check, libc

PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06  # BPF instructions
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # REFUSE | errno: the call fails
OFFSET_OF_NUMBER, OFFSET_OF_ARCHITECTURE, OFFSET_OF_ARGUMENTS = 0, 4, 16  # in the filter's input; 8 bytes per argument
NEW_NAMESPACES = 0x7E020000  # flags of clone that make a namespace
SHARED_ANONYMOUS = 0x21  # MAP_SHARED | MAP_ANONYMOUS: memory that stays although no process has it resident
DOMAINS = (1, 2, 10, 16)  # socket domains: unix, IPv4, IPv6, netlink; not those that leave a network namespace, such as vsock
CLONE3 = 435
FIRST_OF_X32 = 0x40000000  # a second table of calls on x86-64
Code = list[tuple[int, int, int, int]]  # (instruction, instructions to skip if it holds, to skip if not, value)

# name: (x86-64, arm64); later calls have the same number everywhere
REFUSED = (
    ("shmget", 29, 194), ("semget", 64, 190), ("msgget", 68, 186), ("mq_open", 240, 180), ("ioprio_set", 251, 30),
    ("migrate_pages", 256, 238), ("move_pages", 279, 239), ("process_madvise", 440, 440), ("process_mrelease", 448, 448),
    ("ptrace", 101, 117), ("syslog", 103, 116), ("personality", 135, 92), ("pivot_root", 155, 41), ("acct", 163, 89),
    ("mount", 165, 40), ("umount2", 166, 39), ("swapon", 167, 224), ("reboot", 169, 142), ("init_module", 175, 105),
    ("quotactl", 179, 60), ("kexec_load", 246, 104), ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219),
    ("unshare", 272, 97), ("perf_event_open", 298, 241), ("open_by_handle_at", 304, 265), ("setns", 308, 268),
    ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271), ("kcmp", 312, 272), ("finit_module", 313, 273),
    ("memfd_create", 319, 279), ("kexec_file_load", 320, 294), ("bpf", 321, 280), ("userfaultfd", 323, 282), ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427), ("open_tree", 428, 428), ("move_mount", 429, 429),
    ("fsopen", 430, 430), ("fsconfig", 431, 431), ("fsmount", 432, 432), ("fspick", 433, 433), ("pidfd_getfd", 438, 438),
    ("mount_setattr", 442, 442), ("quotactl_fd", 443, 443), ("memfd_secret", 447, 447), ("open_tree_attr", 467, 467),
    # calls that hold up or watch other users of a file that can be read in here; calls counted for the whole machine
    ("flock", 73, 32), ("inotify_init", 253, 26), ("inotify_init1", 294, 26), ("fanotify_init", 300, 262), ("io_setup", 206, 0),
    # calls that tell outside places
    ("name_to_handle_at", 303, 264), ("statmount", 457, 457), ("listmount", 458, 458), ("listns", 470, 470),
)  # fmt: skip
FCNTL_COMMANDS = (  # allowed commands: no leases, directory notices, delegations or signals to an owner
    0, 1, 2, 3, 4, 1030,  # duplicates, flags of the descriptor and of the file
    5, 6, 7, 36, 37, 38,  # record locks, which databases in the scratch directory need
    9, 11, 16, 1025, 1035, 1037, 1028, 1033, 1034,  # queries; seals, which files on disk do not have
    1031, 1032,  # size of a pipe
)  # fmt: skip
OWNER_REQUESTS = (0x8901, 0x8902)  # ioctl requests: FIOSETOWN, SIOCSPGRP, which set the receiver of a descriptor's signals
OF_THIS_PROCESS = (  # (name, numbers, n): allowed if the first n arguments are 0, which stands for the calling process
    ("prlimit64", 302, 261, 1), ("sched_setparam", 142, 118, 1), ("sched_setscheduler", 144, 119, 1), ("sched_setaffinity", 203, 122, 1),
    ("sched_setattr", 314, 274, 1), ("setpriority", 141, 140, 2),
)  # fmt: skip
ARCHITECTURES = (("x86_64", 0xC000003E, 1), ("aarch64", 0xC00000B7, 2))  # (machine, number of its ABI, column of REFUSED)


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def _load(argument: int) -> Code:
    """Load the lower half of an argument; the kernel uses no more of these."""
    return [(LOAD, 0, 0, OFFSET_OF_ARGUMENTS + 8 * argument)]


def _refuse(number: int = errno.EPERM) -> Code:
    return [(RETURN, 0, 0, REFUSE | number)]


def _rules(column: int) -> list[tuple[int, Code]]:
    """Return (number of a call, code that decides on it) pairs; the last instruction of each code returns."""
    allow: Code = [(RETURN, 0, 0, ALLOW)]
    rules = [(int(row[column]), _refuse()) for row in REFUSED] + [(CLONE3, _refuse(errno.ENOSYS))]
    clone, mmap, socket, socketpair = ((56, 9, 41, 53), (220, 222, 198, 199))[column - 1]
    rules.append((clone, [*_load(0), (JUMP_IF_ANY_BIT, 0, 1, NEW_NAMESPACES), *_refuse(), *allow]))
    rules.append((mmap, [*_load(3), (AND, 0, 0, SHARED_ANONYMOUS), (JUMP_IF_EQUAL, 0, 1, SHARED_ANONYMOUS), *_refuse(), *allow]))
    for number in (socket, socketpair):
        known: Code = [(JUMP_IF_EQUAL, len(DOMAINS) - index, 0, domain) for index, domain in enumerate(DOMAINS)]
        rules.append((number, [*_load(0), *known, *_refuse(errno.EAFNOSUPPORT), *allow]))
    fcntl, ioctl = ((72, 16), (25, 29))[column - 1]
    commands: Code = [(JUMP_IF_EQUAL, len(FCNTL_COMMANDS) - index, 0, command) for index, command in enumerate(FCNTL_COMMANDS)]
    rules.append((fcntl, [*_load(1), *commands, *_refuse(errno.EINVAL), *allow]))
    requests: Code = [(JUMP_IF_EQUAL, len(OWNER_REQUESTS) - index, 0, request) for index, request in enumerate(OWNER_REQUESTS)]
    rules.append((ioctl, [*_load(1), *requests, *allow, *_refuse()]))
    for row in OF_THIS_PROCESS:
        own: Code = []
        for argument in range(row[3]):
            own += [*_load(argument), (JUMP_IF_EQUAL, 1, 0, 0), *_refuse()]
        rules.append((int(row[column]), [*own, *allow]))
    return rules


def filter_system_calls() -> bool:
    """Refuse REFUSED calls, new namespaces, shared memory without a file and changes of other processes, here and in all children.

    PR_SET_NO_NEW_PRIVS must be set before. The calls fail with EPERM; clone3, whose flags a filter cannot see, with ENOSYS, so that C
    libraries use clone; sockets of other domains with EAFNOSUPPORT; commands of fcntl with EINVAL, like commands unknown to a kernel.

    Returns: whether there is a filter for this machine.

    Raises:
        OSError: the kernel refused the filter.
    """
    found = [(number, column) for machine, number, column in ARCHITECTURES if machine == os.uname().machine]
    if not found:
        return False
    architecture, column = found[0]
    program: Code = [(LOAD, 0, 0, OFFSET_OF_ARCHITECTURE), (JUMP_IF_EQUAL, 1, 0, architecture), *_refuse()]
    program += [(LOAD, 0, 0, OFFSET_OF_NUMBER), (JUMP_IF_AT_LEAST, 0, 1, FIRST_OF_X32), *_refuse()]
    for number, code in _rules(column):
        program += [(JUMP_IF_EQUAL, 0, len(code), number), *code]
    program.append((RETURN, 0, 0, ALLOW))
    instructions = (_Instruction * len(program))(*(_Instruction(*fields) for fields in program))
    filled = _Program(length=len(program), instructions=instructions)
    check(libc().prctl(PR_SET_SECCOMP, ctypes.c_ulong(MODE_FILTER), ctypes.byref(filled), ctypes.c_ulong(0), ctypes.c_ulong(0)), "seccomp")
    return True
