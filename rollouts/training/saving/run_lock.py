"""Lock of a run directory: one process at a time writes there, and a second one is told which it is."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rollouts.errors import ConfigError
from rollouts.output_files import explain_writes

LOCK_FILE = "run.lock"


@contextmanager
def lock_run_directory(directory: Path, clock: Callable[[], float] = time.time) -> Generator[None]:
    """Lock a run directory for one process. The operating system releases the lock when the process ends in any way.

    If the file system has no locks, warn and continue without one.

    Raises: ConfigError naming process, host and start time of the run that holds the lock, or the reason why no run is possible there.
    """
    path = directory / LOCK_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+", encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigError(f"{directory} cannot hold a run, {_explain_directory(directory, error)}") from error
    with opened as file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise ConfigError(
                f"{directory} is in use by a live run ({file.read().strip() or 'which has not said which'}): "
                "wait for it, stop it, or choose another --output-dir"
            ) from error
        except OSError as error:
            warnings.warn(f"{path} cannot be locked ({error}): make sure yourself that no other run writes there", stacklevel=3)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock()))
        with explain_writes(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
            file.flush()
        yield


def _lock(descriptor: int) -> None:
    """Lock an open file exclusively, without waiting: BlockingIOError or PermissionError if another process holds it."""
    if os.name == "nt":
        import msvcrt

        locking = cast("Any", msvcrt)
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # a byte past the text, so that others can read it
        locking.locking(descriptor, locking.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _explain_directory(directory: Path, error: OSError | ValueError) -> str:
    """Return the reason for which a directory cannot be made or written, and what to do."""
    if isinstance(error, ValueError):
        return f"as its name is not one of a file ({error}): choose another --output-dir"
    near = next(path for path in (directory, *directory.parents, Path(".")) if os.path.lexists(path))
    if not near.exists():
        return f"as {near} is a link to {near.readlink()}, at which nothing is found: remove it, or choose another --output-dir"
    if not near.is_dir():
        return f"as {near} is a file: choose another --output-dir, or move the file away"
    reason = error.strerror or str(error)
    return f"as it cannot be written in {near} ({reason}): choose an --output-dir on a disk where you may write"
