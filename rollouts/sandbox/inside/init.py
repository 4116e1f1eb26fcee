"""First process of a sandbox: trusted, and the only one with the descriptors that lead outside.

It makes the namespaces (unless bubblewrap has), starts the confined process, watches it, reports on a pipe of its own, and ends. In a PID
namespace everything else ends with it, fork bombs and daemons included. It also ends when the process that wanted the sandbox does.

Started by launch.spawn, on Linux, with the standard library only.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import Any, NoReturn

from rollouts.sandbox.inside.kernel import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    drop_capabilities,
    hide_mounts,
    name_host,
    prctl,
    unshare,
)
from rollouts.sandbox.inside.landlock import restrict
from rollouts.sandbox.inside.messages import encode_message, read_message, write_all
from rollouts.sandbox.inside.mounts import MAX_FILES, build_root
from rollouts.sandbox.inside.processes import clear_folder, close_all_but, kill_descendants, set_limit
from rollouts.sandbox.inside.seccomp import filter_system_calls

WATCH_S = 0.02  # seconds between two looks at the processes: a fork bomb's time until it is seen
WATCH_IDLE_S = 0.05  # seconds between looks while a single process has not computed since the last one
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main(control: int, scratch: str) -> NoReturn:
    """Read the configuration from `control`, run its program or worker, report, and end."""
    try:
        config: dict[str, Any] = read_message(control)
    except EOFError:  # the process that wanted the sandbox has ended
        if scratch:  # a folder of this machine, made for this sandbox and still empty
            os.rmdir(scratch)
        os._exit(1)
    status: int = config["status"]
    os.set_inheritable(status, False)
    os.set_inheritable(control, False)
    try:
        code = _run(config, control, status)
    except Exception as error:
        write_all(status, encode_message({"error": f"{type(error).__name__}: {error}"}))
        raise SystemExit(1) from error
    os._exit(code)


def _run(config: dict[str, Any], control: int, status: int) -> int:
    """Set up the sandbox, run its process and report; return the exit status of this process."""
    readable = [*config["readable"], "/proc"]
    if config["namespaces"]:
        _enter_namespaces(config)
    elif config["isolated"] and not _enter_further_namespaces():
        readable.remove("/proc")  # /proc would tell the source of every mount; Landlock closes it
    assert not config["isolated"] or os.getpid() == 1, f"process {os.getpid()} is not the first of a PID namespace"
    if config["isolated"]:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # sent when the outer process that made the namespaces ends
    prctl(PR_SET_DUMPABLE, 0)  # no process of the same user reads or traces this one
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    scratch = _fill_scratch(config)
    try:
        child = _start(config, status, scratch, readable)
        write_all(status, encode_message({"started": child}))
        try:
            report = _watch(config, child, control)
        except (OSError, ValueError, MemoryError) as error:  # the program has run: it must not be taken for one that did not start
            report = {"killed_by": "died", "why": f"{type(error).__name__}: {error}"}
        if not config["isolated"]:
            kill_descendants()
    finally:
        if not config["isolated"]:
            clear_folder(scratch)
            os.rmdir(scratch)
    with suppress(BrokenPipeError):
        write_all(status, encode_message(report))
    return 0


def _enter_namespaces(config: dict[str, Any]) -> None:
    """Continue as the first process of new namespaces; the calling process waits for it in the parent of the fork and ends with it."""
    _unshare_with_user(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
    child = os.fork()
    if child != 0:
        close_all_but(set())
        os.waitpid(child, 0)  # returns when everything in the namespace has ended
        os._exit(0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    build_root(config)
    _hide_outside()


def _enter_further_namespaces() -> bool:
    """Enter namespaces inside bubblewrap's and hide there what those reveal; return whether the machine allows it."""
    try:
        _unshare_with_user(CLONE_NEWNS | CLONE_NEWUTS)
        with suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        _hide_outside()
    except OSError:
        drop_capabilities()
        return False
    return True


def _unshare_with_user(flags: int) -> None:
    """Enter a user namespace as user 1000 with all capabilities, and further namespaces that belong to it."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _hide_outside() -> None:
    """Hide the machine's names and the sources of mounts, then drop all capabilities."""
    name_host()
    hide_mounts()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()


def _fill_scratch(config: dict[str, Any]) -> str:
    """Enter the scratch directory and write the sent files; return its path."""
    scratch: str = config["scratch"]
    os.chdir(scratch)
    for name, text in config["files"].items():
        os.makedirs(os.path.dirname(os.path.join(scratch, name)), exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
    return scratch


def _start(config: dict[str, Any], status: int, scratch: str, readable: list[str]) -> int:
    """Start the confined process and return its id."""
    for number in config["keep"]:
        os.set_inheritable(number, False)
    child = os.fork()
    if child != 0:
        for number in (0, 1, 2, *config["keep"]):
            os.close(number)  # the other ends then see when the confined process has closed them
        return child
    try:
        os.setsid()
        limits = config["limits"]
        worker = config["worker"]
        set_limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
        set_limit(resource.RLIMIT_NOFILE, 256)
        set_limit(resource.RLIMIT_CORE, 0)
        if config["count_by_namespace"]:
            set_limit(resource.RLIMIT_NPROC, limits["num_processes"] + 4)  # two of the 4: this process's parent, and its parent outside
        if worker is None or not worker["fork"]:
            set_limit(resource.RLIMIT_AS, limits["memory_bytes"])
        if worker is None:
            set_limit(resource.RLIMIT_CPU, limits["cpu_s"], slack=1)
        size = os.open("/proc/self/statm", os.O_RDONLY)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        restrict(readable, [scratch, *config["devices"]])
        filter_system_calls()
        drop_capabilities()  # with no_new_privs they do not come back
        kept = {0, 1, 2, status, *((size, *config["keep"]) if worker is not None else ())}
        close_all_but(kept)
        if worker is None:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
                signal.signal(number, signal.SIG_DFL)
            os.execvp(config["argv"][0], config["argv"])
        os.close(status)
        from rollouts.sandbox.inside.worker import serve

        prctl(PR_SET_CHILD_SUBREAPER, 1)
        serve(worker, {**limits, "size": size, "scratch": scratch}, config["isolated"])
    except Exception as error:
        what = config["argv"][0] if config["argv"] else "the worker"
        write_all(status, encode_message({"error": f"cannot start {what}: {error}"}))
        raise
    finally:
        os._exit(127)


def _watch(config: dict[str, Any], child: int, control: int) -> dict[str, Any]:
    """Wait for the confined process's end and return the report. Ends this process at once when nobody wants the sandbox any more."""
    limits, worker = config["limits"], config["worker"]
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if config["isolated"] else -1
    poll = select.poll()
    ended = os.pidfd_open(child)
    for descriptor in (ended, control, config["parent"]):
        poll.register(descriptor, select.POLLIN)
    start = time.monotonic()
    deadline = start + limits["wall_s"] if worker is None else None
    ticks, interval = -1.0, WATCH_S
    while True:
        left = interval if deadline is None else min(interval, max(deadline - time.monotonic(), 0.0))
        ready = {number for number, _ in poll.poll(left * 1000 + 1)}
        duration = time.monotonic() - start
        if ended in ready:
            _, status, used = os.wait4(child, 0)
            return {"returncode": os.waitstatus_to_exitcode(status), "duration_s": duration, "cpu_s": used.ru_utime + used.ru_stime}
        if ready:  # the control pipe is closed, or the process that wanted the sandbox has ended
            if config["isolated"]:
                os._exit(0)
            return {"killed_by": "died", "duration_s": duration}
        if deadline is not None and time.monotonic() >= deadline:
            return {"killed_by": "wall", "duration_s": duration}
        _reap(child)
        if processes >= 0:
            skipped = child if worker is not None and worker["fork"] else -1
            count, memory, now = _usage(processes, skipped)
            if count > limits["num_processes"]:
                return {"killed_by": "processes", "duration_s": duration}
            if memory > limits["memory_bytes"]:
                return {"killed_by": "memory", "duration_s": duration}
            space = os.statvfs(config["scratch"])
            if space.f_files - space.f_ffree > MAX_FILES:
                return {"killed_by": "file", "duration_s": duration}
            interval, ticks = (WATCH_IDLE_S if count == 0 and now == ticks and skipped >= 0 else WATCH_S), now


def _reap(child: int) -> None:
    """Reap orphans that have ended, but not the confined process itself."""
    with suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == child:
                return
            os.waitpid(found.si_pid, 0)


def _usage(processes: int, skipped: int) -> tuple[int, int, float]:
    """Return threads and resident bytes of the namespace's processes except the first and `skipped`, and processor ticks of all."""
    count, pages, ticks = 0, 0, 0.0
    for name in os.listdir(processes):
        if name.isdigit() and name != "1":
            with suppress(OSError):
                descriptor = os.open(f"{name}/stat", os.O_RDONLY, dir_fd=processes)
                try:
                    fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
                finally:
                    os.close(descriptor)
                ticks += int(fields[11]) + int(fields[12])
                if int(name) != skipped:
                    count += int(fields[17])
                    pages += int(fields[21])
    return count, pages * PAGE_BYTES, ticks
