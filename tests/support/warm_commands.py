"""Programs `python` and `rollouts` whose processes begin at once: a server forks them from the process of forked.py.

The commands of a page stand there as a user types them, and most of the time of a small one is the import of PyTorch and transformers.
Scripts and modules of the project are forked; any other use of Python, such as -c, is a process of its own.

Everything that the server has imported counts as imported, and variables that are read by an import have no effect, but for those that
run() names. The tests of start-up, of an installed wheel and of docs/your-model-and-data.md start their commands without this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import current_process, parent_process
from pathlib import Path
from typing import Any

import torch
from forked import CONTEXT, PATIENCE_S

ROOT = Path(__file__).parents[2]
CLIENT = """
import json, os, signal, socket, sys

path, python, *typed = sys.argv[1:]
argv = typed[1:] if typed[:1] == ["-P"] else typed
is_module = argv[:1] == ["-m"] and len(argv) > 1 and argv[1].split(".")[0] in ("integration", "benchmarks")
if not is_module and not (argv and argv[0].endswith(".py") and os.path.exists(argv[0])):
    os.execv(python, [python, *typed])
server = socket.socket(socket.AF_UNIX)
server.connect(path)

def forward(number, frame):
    try:
        server.sendall(bytes([number]))
    except OSError:
        pass  # it has ended

asked = json.dumps({"argv": argv, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) != signal.SIG_IGN:  # a shell has its programs in the background ignore Ctrl-C
        signal.signal(number, forward)
status = int(server.makefile().readline() or 1)
if status < 0:  # a signal ended it
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


PROGRAM = """
import sys
from integration.command import main
sys.exit(main())
"""


@functools.cache
def find_programs() -> Path | None:
    """Start the server of this process. Returns the directory of the programs, or None where processes cannot be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return None
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    atexit.register(folder.cleanup)
    path = Path(folder.name)
    (path / "client.py").write_text(CLIENT)
    (path / "rollouts.py").write_text(PROGRAM)  # the script that pip makes has this stem, too, by which messages name the command
    for name, more in (("python", ""), ("rollouts", f'"{path / "rollouts.py"}" ')):
        call = f'exec "{sys.executable}" -I -S "{path / "client.py"}" "{path / "socket"}" "{sys.executable}" {more}"$@"'
        (path / name).write_text(f"#!/bin/sh\n{call}\n")
        (path / name).chmod(0o755)
    server = CONTEXT.Process(target=serve, args=(str(path / "socket"),), daemon=True)
    server.start()
    deadline = time.monotonic() + PATIENCE_S
    while not (path / "socket").exists():
        assert server.is_alive() and time.monotonic() < deadline, "the server of warm commands does not start"
        time.sleep(0.01)
    return path


def find_python() -> str:
    """Return the program `python`: what tests put in the place of sys.executable."""
    programs = find_programs()
    return str(programs / "python") if programs else sys.executable


def serve(path: str) -> None:
    """Fork a process for each connection until the process of the tests ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # whoever sees the name can connect
    parent = parent_process()
    assert parent is not None
    children: dict[int, socket.socket] = {}  # by process

    def end(*_: object) -> None:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)  # as multiprocessing ends a process whose parent ends
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, "client")
        selector.register(parent.sentinel, selectors.EVENT_READ, "parent")
        while True:
            for key, _ in selector.select():
                match key.data:
                    case "parent":
                        end()
                    case "client":
                        connection, _ = listener.accept()
                        pid = answer(connection, [listener, *children.values()])
                        if pid is None:
                            continue
                        children[pid] = connection
                        selector.register(connection, selectors.EVENT_READ, ("signals", pid))
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("end", pid))
                    case ("signals", pid) if pid in children:
                        sent = _receive(children[pid])
                        for number in sent or [signal.SIGKILL]:  # without a client nobody waits for it
                            os.kill(pid, number)
                        if not sent:
                            selector.unregister(children[pid])
                    case ("end", pid):
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        connection = children.pop(pid)
                        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                        with contextlib.suppress(KeyError):
                            selector.unregister(connection)
                        with contextlib.suppress(OSError):
                            connection.sendall(f"{status}\n".encode())
                        connection.close()
                    case _:
                        pass  # signals for a process that ended in this round


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(64)
    except ConnectionError:
        return b""


def answer(connection: socket.socket, others: Sequence[socket.socket]) -> int | None:
    """Read what a client asks for, and fork a process that does it. Returns its id; None if the client ended before it had asked."""
    descriptors: list[int] = []
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as stream:
            asked = json.loads(stream.read(int.from_bytes(header, "big")))
    except (OSError, ValueError):
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    pid = os.fork()
    if pid == 0:
        try:  # whatever is wrong, this process does not go on as a second server
            for each in (connection, *others):
                each.close()
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target)
            os.closerange(3, max(descriptors) + 1)
            os._exit(run(**asked))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def run(argv: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a script or a module as Python does with a new process. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]  # it may start processes of its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("HF_HUB_OFFLINE") == "1":  # read once, by the import
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    is_module = argv[0] == "-m"
    program, sys.argv = argv[is_module], argv[is_module:]
    named = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    installed = [entry for entry in sys.path if entry and not Path(entry).is_relative_to(ROOT / "tests")]
    sys.path[:] = [folder if is_module else str(Path(folder, program).parent), *named, *installed]
    for name, module in list(sys.modules.items()):  # a command finds no helpers of the tests
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(ROOT / "tests") and name != __name__:
            del sys.modules[name]
    status: Any = 0
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True) if is_module else runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return status or 0
