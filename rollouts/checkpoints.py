"""Checkpoint directories: complete or not there at all, numbered, verified by checksum, and a lock on the run they belong to.

    checkpoints/step_0060/     what the backend wrote (weights in Hugging Face layout, optimizer, schedule, random state)
                  run_state.json   step, data position, partial samples, length of the metrics file
                  manifest.json    size and CRC-32 of every file; written last

A checkpoint is written into a temporary directory beside its place, every file is flushed to the disk, and one rename makes it visible.

Other names that can stand beside them: `.tmp_*`, left by a killed process and removed by the next save; `replaced_step_NNNN`, for the
moment in which a checkpoint of the same number takes its place; `superseded_step_NNNN`, later steps of a run that was resumed from an
earlier one: they no longer count, and are yours to delete.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import socket
import time
import warnings
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
_REPLACED_PREFIX = "replaced_"
_SUPERSEDED_PREFIX = "superseded_"
_KEPT = "Older checkpoints are as they were."
_FULL_DISK_BYTES = 1 << 20  # with less than this free, an error while writing is put down to the disk


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
    """The newest checkpoint that verifies; None if there are no step_* directories. find_damaged says which were passed over.

    Raises: CheckpointError if there are some, but none is intact: a run must not silently begin anew.
    """
    path, problems = _search_newest(directory)
    if path is None and problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is intact: restore one, or start a new run directory.\n  " + "\n  ".join(problems)
        )
    return path


def find_damaged(directory: Path) -> list[str]:
    """What is wrong with each checkpoint that is newer than the newest intact one, for a message to the user."""
    return _search_newest(directory)[1]


def _search_newest(directory: Path) -> tuple[Path | None, list[str]]:
    _restore_replaced(directory)
    problems: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            verify_checkpoint(path)
        except CheckpointError as problem:
            problems.append(str(problem))
            continue
        return path, problems
    return None, problems


def verify_checkpoint(path: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError naming the first file that is missing, short or changed."""
    try:
        manifest = cast("dict[str, Any]", json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8")))
        files = {str(name): (int(entry["size"]), int(entry["crc32"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {MANIFEST_FILE}: it is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST_FILE} is damaged: {type(error).__name__}: {error}") from error
    if RUN_STATE_FILE not in files:
        raise CheckpointError(f"{path / MANIFEST_FILE} does not list {RUN_STATE_FILE}: it is not a checkpoint of a run")
    for name, (size, crc32) in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} lacks the file {name}, which its manifest lists")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(f"{file} has {found} bytes, expected {size}: it is truncated or was changed")
        if checksum(file) != crc32:
            raise CheckpointError(f"{file} does not match its checksum: it is damaged")


def load_run_state(path: Path) -> dict[str, Any]:
    """What save_checkpoint was given as run_state. Verifies the checkpoint first."""
    verify_checkpoint(path)
    return cast("dict[str, Any]", json.loads((path / RUN_STATE_FILE).read_text(encoding="utf-8")))


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

    Checkpoints with a higher number are of a future that a resumed run has left: they are moved aside as superseded_step_NNNN.

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
        # once begun, finishing must not stop half-way
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(partial(_finish, temporary, target, dict(run_state)))
    except BaseException as error:
        problem: CheckpointError | None = None
        with trio.CancelScope(shield=True):
            problem = await trio.to_thread.run_sync(partial(_clean_up, error, directory, temporary))
        if problem is not None:
            raise problem from error
        raise
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(partial(_prune, target, keep_last_n, frozenset(path.resolve() for path in protected)))
    return target


def _prepare(directory: Path, temporary: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(f"{_TEMPORARY_PREFIX}*"):  # left by a run that was killed; the run lock says that it is not alive
        shutil.rmtree(stale)
    _restore_replaced(directory)
    for replaced in directory.glob(f"{_REPLACED_PREFIX}step_*"):
        shutil.rmtree(replaced)
    temporary.mkdir()


def _restore_replaced(directory: Path) -> None:
    """Undo a replacement that a kill interrupted between its two renames."""
    for replaced in directory.glob(f"{_REPLACED_PREFIX}step_*"):
        original = directory / replaced.name.removeprefix(_REPLACED_PREFIX)
        if not original.exists():
            replaced.rename(original)


def _finish(temporary: Path, target: Path, run_state: dict[str, Any]) -> None:
    (temporary / RUN_STATE_FILE).write_text(json.dumps(run_state) + "\n", encoding="utf-8")
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    entries = {path.relative_to(temporary).as_posix(): {"size": path.stat().st_size, "crc32": checksum(path)} for path in files}
    manifest = temporary / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": 1, "files": entries}, indent=1) + "\n", encoding="utf-8")
    for path in [*files, manifest, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
        _flush(path)
    if target.exists():  # a directory that is not empty cannot be replaced in one rename
        target.rename(target.with_name(_REPLACED_PREFIX + target.name))
        temporary.rename(target)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _prune(target: Path, keep_last_n: int, protected: frozenset[Path]) -> None:
    """Delete what is older than the keep_last_n newest up to `target`, and move aside what is newer than it."""
    try:
        replaced = target.with_name(_REPLACED_PREFIX + target.name)
        if replaced.exists():
            shutil.rmtree(replaced)
        checkpoints = list_checkpoints(target.parent)
        position = checkpoints.index(target)
        for path in checkpoints[position + 1 :]:
            if path.resolve() not in protected:
                path.rename(_free_name(path.with_name(_SUPERSEDED_PREFIX + path.name)))
        for path in checkpoints[: max(0, position + 1 - keep_last_n)]:
            if path.resolve() not in protected:
                # out of sight first: a kill while deleting must not leave a half directory that looks like a checkpoint
                doomed = path.with_name(f"{_TEMPORARY_PREFIX}deleted_{path.name}")
                path.rename(doomed)
                shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(f"{target} is complete, but another checkpoint cannot be moved or deleted: {error}") from error


def _free_name(path: Path) -> Path:
    """The path, or the first of path_2, path_3, ... that does not exist."""
    candidates = itertools.chain([path], (path.with_name(f"{path.name}_{k}") for k in itertools.count(2)))
    return next(candidate for candidate in candidates if not candidate.exists())


def _clean_up(error: BaseException, directory: Path, temporary: Path) -> CheckpointError | None:
    """Remove what a failed save has written; the error to raise instead, if there is a better one."""
    problem = _explain_failure(error, directory, temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    _restore_replaced(directory)
    return problem


def _explain_failure(error: BaseException, directory: Path, temporary: Path) -> CheckpointError | None:
    """The error for a save that failed because of the disk, None for any other. Called before what was written is removed."""
    if not isinstance(error, Exception):
        return None
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if not _is_full(error) and free >= _FULL_DISK_BYTES:
        return CheckpointError(f"cannot write a checkpoint in {directory}: {error}. {_KEPT}") if isinstance(error, OSError) else None
    written = directory_size(temporary)
    older = list_checkpoints(directory)
    needed = f"about {directory_size(older[-1])} bytes, like {older[-1].name}" if older else f"more than {written} bytes"
    return CheckpointError(
        f"the disk is full: a checkpoint in {directory} needs {needed}; {written} bytes of it were written and removed again, which leaves "
        f"{free + written} bytes free. {_KEPT} Free some space, lower keep_last_n or choose another --output-dir, then resume."
    )


def _is_full(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that no space is left. safetensors says it in words only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(seen) for words in ("No space left on device", "not enough space on the disk", "Disk quota exceeded")):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


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

    Where the file system knows no locks, a warning says so and the run goes on without one.

    Raises: ConfigError naming process, host and start time of the run that holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    with path.open("a+", encoding="utf-8") as file:
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
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(clock()))
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
        file.flush()
        yield


def _lock(descriptor: int) -> None:
    """Lock an open file exclusively, without waiting: BlockingIOError or PermissionError if another process holds it."""
    if os.name == "nt":
        import msvcrt

        locking = cast("Any", msvcrt)
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # a byte behind the text, so that others can read it
        locking.locking(descriptor, locking.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
