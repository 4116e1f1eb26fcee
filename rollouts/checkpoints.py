"""Checkpoint directories: complete or not there at all, numbered, verified by checksum, and a lock on the run they belong to.

    checkpoints/step_0060/     what the backend wrote (weights in Hugging Face layout, optimizer, schedule, random state)
                  run_state.json   step, data position, partial samples, length of the metrics file
                  manifest.json    size and CRC-32 of every file; written last

A checkpoint is written into a temporary directory beside its place, every file is flushed to the disk, and one rename makes it visible.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio

from rollouts.errors import CheckpointError, ConfigError

RUN_STATE_FILE = "run_state.json"
MANIFEST_FILE = "manifest.json"
LOCK_FILE = "run.lock"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY_PREFIX = ".tmp_"


def checkpoint_name(step: int) -> str:
    """step_0060 for 60. Names are compared by number, so longer numbers are no problem."""
    assert step >= 0, f"step is {step}, expected at least 0"
    return f"step_{step:04d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """The step_* directories in the order of their numbers, verified or not."""
    if not directory.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in directory.iterdir() if path.is_dir() and (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_step(directory: Path) -> int | None:
    """Number of the newest checkpoint that verifies; None if there is none at all. Raises as latest_checkpoint."""
    path = latest_checkpoint(directory)
    return None if path is None else int(path.name.removeprefix("step_"))


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that verifies; None if there are no step_* directories.

    Raises: CheckpointError if there are some, but none is intact: a run must not silently begin anew.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(path)
        except CheckpointError as problem:
            problems.append(str(problem))
            continue
        return path
    if problems:
        raise CheckpointError("no checkpoint is intact:\n  " + "\n  ".join(problems))
    return None


def find_damaged(directory: Path) -> list[str]:
    """What is wrong with each checkpoint that is newer than the newest intact one, for a message to the user."""
    problems: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(path)
        except CheckpointError as problem:
            problems.append(str(problem))
            continue
        break
    return problems


def verify_checkpoint(path: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError naming the first file that is missing, short or changed."""
    try:
        manifest = cast("dict[str, Any]", json.loads((path / MANIFEST_FILE).read_text()))
        files = cast("dict[str, dict[str, int]]", manifest["files"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {MANIFEST_FILE}: it is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST_FILE} cannot be read: {error}") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} lacks the file {name}, which its manifest lists")
        size = file.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{file} has {size} bytes, expected {expected['size']}: it is truncated or was changed")
        if checksum(file) != expected["crc32"]:
            raise CheckpointError(f"{file} does not match its checksum: it is damaged")


def load_run_state(path: Path) -> dict[str, Any]:
    """What save_checkpoint was given as run_state. Verifies the checkpoint first."""
    verify_checkpoint(path)
    return cast("dict[str, Any]", json.loads((path / RUN_STATE_FILE).read_text()))


async def save_checkpoint(
    directory: Path,
    step: int,
    *,
    write: Callable[[Path], Awaitable[None]],
    run_state: Mapping[str, Any],
    keep_last_n: int = 2,
    protected: Collection[Path] = (),
) -> Path:
    """Write directory/step_NNNN atomically, then delete the oldest beyond keep_last_n.

    Args:
        write: fills the (temporary) directory it is given.
        run_state: JSON values.
        keep_last_n: checkpoints that stay, this one included; at least 1.
        protected: checkpoints that stay whatever their age, for example the one that a server has loaded.

    Returns: the path of the new checkpoint.
    Raises: CheckpointError if the disk is full or cannot be written; then nothing of the new checkpoint is left, and older ones are as
        they were. What `write` raises otherwise is raised as it is, with the same promise.
    """
    assert keep_last_n >= 1, f"keep_last_n is {keep_last_n}, expected at least 1"
    target = directory / checkpoint_name(step)
    temporary = directory / f"{_TEMPORARY_PREFIX}{target.name}_{os.getpid()}"
    try:
        await trio.to_thread.run_sync(partial(_prepare, directory, temporary))
        await write(temporary)
        # once begun, finishing takes milliseconds and must not stop half-way
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(partial(_finish, temporary, target, dict(run_state)))
            await trio.to_thread.run_sync(partial(_prune, directory, keep_last_n, frozenset(protected)))
    except OSError as error:
        needed = directory_size(temporary) if temporary.exists() else 0
        await _discard(temporary)
        raise _disk_error(error, directory, needed) from error
    except BaseException:
        await _discard(temporary)
        raise
    return target


def _prepare(directory: Path, temporary: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(f"{_TEMPORARY_PREFIX}*"):  # left by a run that was killed; the run lock says that it is not alive
        shutil.rmtree(stale)
    temporary.mkdir()


def _finish(temporary: Path, target: Path, run_state: dict[str, Any]) -> None:
    (temporary / RUN_STATE_FILE).write_text(json.dumps(run_state) + "\n")
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    entries = {str(path.relative_to(temporary)): {"size": path.stat().st_size, "crc32": checksum(path)} for path in files}
    (temporary / MANIFEST_FILE).write_text(json.dumps({"format": 1, "files": entries}, indent=1) + "\n")
    for path in [*files, temporary / MANIFEST_FILE]:
        _flush(path)
    for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
        _flush(path)
    if target.exists():  # the same step again, after a resume from an older checkpoint
        replaced = target.with_name(f"{_TEMPORARY_PREFIX}replaced_{target.name}")
        target.rename(replaced)
        temporary.rename(target)
        shutil.rmtree(replaced)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _prune(directory: Path, keep_last_n: int, protected: frozenset[Path]) -> None:
    for path in list_checkpoints(directory)[:-keep_last_n]:
        if path not in protected:
            # out of sight first: a kill while deleting must not leave a half directory that looks like a checkpoint
            doomed = path.with_name(f"{_TEMPORARY_PREFIX}deleted_{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed)


async def _discard(temporary: Path) -> None:
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(partial(shutil.rmtree, temporary, ignore_errors=True))


def _disk_error(error: OSError, directory: Path, written: int) -> CheckpointError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(directory if directory.exists() else Path.cwd()).free
        return CheckpointError(
            f"the disk is full: a checkpoint in {directory} needs more than the {written} bytes written so far, {free} bytes are free now. "
            "Older checkpoints are intact. Free some space or lower keep_last_n, then resume."
        )
    return CheckpointError(f"cannot write a checkpoint in {directory}: {error}. Older checkpoints are intact.")


def directory_size(directory: Path) -> int:
    """Bytes in all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def checksum(path: Path) -> int:
    """CRC-32 of a file. Detects damage, not malice, and is several times faster than a cryptographic hash."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    """fsync a file or directory; Windows cannot open directories, and does not need it."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock_run_directory(directory: Path, clock: Callable[[], float] = time.time) -> Generator[None]:
    """Hold a run directory for one process. The operating system frees it when the process ends, however it ends.

    Raises: ConfigError naming process, host and start time of the run that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    with path.open("a+") as file:
        if not _try_lock(file.fileno()):
            file.seek(0)
            raise ConfigError(
                f"{directory} is in use by a live run ({file.read().strip() or 'which has not said which'}): "
                "wait for it, stop it, or choose another --output-dir"
            )
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock()))
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
        file.flush()
        yield


def _try_lock(descriptor: int) -> bool:
    """Lock an open file exclusively, without waiting."""
    if os.name == "nt":
        import msvcrt

        locking = cast("Any", msvcrt)
        try:
            os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # a byte behind the text, so that others can read it
            locking.locking(descriptor, locking.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
