"""Processes for tests that must kill one, signal one or look at one from outside.

Each is forked from a process that has imported the package, PyTorch and transformers, which takes seconds, and begins at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import types
from pathlib import Path

PATIENCE_S = 100  # for what takes less than a second, on a machine that has other things to do
LIFETIME_S = 900  # of any process: whatever becomes of the tests, it does not stay

START_METHOD = "forkserver"
"""Start method that tests pass to multiprocessing and torch.multiprocessing."""

CONTEXT = multiprocessing.get_context(START_METHOD)
CONTEXT.set_forkserver_preload(
    ["pytest", "pytest_trio", "hypothesis", "integration.run.job", "transformers.models.qwen3.modeling_qwen3", "matplotlib.pyplot"]
)


class Child:
    """A process that runs Python code, with arguments in sys.argv[1:]. Its output is in files. It is killed at the end of the block."""

    def __init__(self, code: str, *arguments: object, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._error = folder / "stdout", folder / "stderr"
        argv = [str(argument) for argument in arguments]
        self._process = CONTEXT.Process(target=_run, args=(code, argv, str(self._out), str(self._error)))
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def is_alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.is_alive()

    @property
    def out(self) -> str:
        """The whole lines that it has written to stdout."""
        text = self._out.read_text() if self._out.exists() else ""
        return text[: text.rfind("\n") + 1]

    @property
    def error(self) -> str:
        """The text that it has written to stderr."""
        return self._error.read_text() if self._error.exists() else ""

    def wait_for_lines(self, count: int) -> list[str]:
        """The lines of stdout, once there are so many."""
        deadline = time.monotonic() + PATIENCE_S
        while len(lines := self.out.splitlines()) < count:
            ended = self._process.exitcode  # before the last look
            if len(lines := self.out.splitlines()) >= count:
                break
            assert ended is None, f"it ended with status {ended} after {len(lines)} lines: {self.error}"
            assert time.monotonic() < deadline, f"{len(lines)} lines in {PATIENCE_S} s, expected {count}"
            time.sleep(0.001)
        return lines

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended; minus the signal's number if one ended it."""
        self._process.join(patience_s)
        status = self._process.exitcode
        assert status is not None, f"it has not ended after {patience_s} s: {self.error}"
        return status

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self._process.kill()
        self._process.join()


def _run(code: str, argv: list[str], out: str, error: str) -> None:
    signal.alarm(LIFETIME_S)
    for descriptor, path in ((1, out), (2, error)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    sys.argv = ["code", *argv]
    sys.modules["__main__"] = types.ModuleType("__main__")  # as in a process of its own: functions are found by name
    exec(compile(code, "<code of a test>", "exec"), vars(sys.modules["__main__"]))


def run(code: str, *arguments: object, folder: Path) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a process that ends by itself."""
    with Child(code, *arguments, folder=folder) as child:
        return child.wait(), child.out, child.error
