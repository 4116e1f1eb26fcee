"""Checkpoint directories: atomic, numbered, verified by checksum.

    checkpoints/step_0060/     files of the backend (weights in Hugging Face layout, optimizer, schedule, random state)
                  run_state.json   step, data position, partial samples, length of the metrics file
                  manifest.json    size and CRC-32 of every file, and the older checkpoints that its save deletes; written last

A checkpoint is written into a temporary sibling directory, every file is flushed to the disk, and one rename makes it visible.

Other names beside them: `.tmp_*`, files or directories left by a killed process and removed by finish_save, which a resumed run calls, or
by the next save; `replaced_step_NNNN`, for the moment in which a checkpoint of the same number replaces it; `superseded_step_NNNN`, later
steps of a run that was resumed from an earlier one: they are ignored and may be deleted.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import trio

from rollouts.checks import parse_json
from rollouts.errors import CheckpointError
from rollouts.output_files import is_disk_full

T = TypeVar("T")

RUN_STATE_FILE = "run_state.json"
MANIFEST_FILE = "manifest.json"
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY_PREFIX = ".tmp_"
_REPLACED_PREFIX = "replaced_"
_SUPERSEDED_PREFIX = "superseded_"
_KEPT = "Older checkpoints are as they were."
_FULL_DISK_BYTES = 1 << 20  # bytes of free space below which a write error is attributed to a full disk


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step: step_0060 for 60. Names are sorted by number, so numbers may be longer."""
    assert step >= 0, f"step is {step}, expected at least 0"
    return f"step_{step:04d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """List the step_* directories in the order of their numbers, verified or not."""
    if not directory.is_dir():
        return []
    found = [(int(match.group(1)), path) for path in directory.iterdir() if path.is_dir() and (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def has_checkpoints(directory: Path) -> bool:
    """Whether a directory has a checkpoint, intact or not."""
    _restore_replaced(directory)
    return bool(list_checkpoints(directory))


def latest_checkpoint(directory: Path | str) -> Path | None:
    """Return the newest checkpoint that verifies; None if there are no step_* directories. find_damaged lists the skipped ones.

    Raises: CheckpointError if there are some, but none is intact: a run must not silently start over.
    """
    path, problems = _search_newest(Path(directory))
    if path is None and problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is intact: restore one, or start a new run directory.\n  " + "\n  ".join(problems)
        )
    return path


def find_damaged(directory: Path) -> list[str]:
    """Describe the damage of each checkpoint newer than the newest intact one, for a message to the user."""
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
    """Compare every file with the manifest.

    Raises: CheckpointError naming the first file that is missing, short, changed or not of the checkpoint: what is loaded may depend on
        which files are there. Hidden files, such as those of file managers and network file systems, are ignored.
    """
    try:
        manifest = cast("dict[str, Any]", parse_json((path / MANIFEST_FILE).read_text(encoding="utf-8")))
        files = {str(name): (int(entry["size"]), int(entry["crc32"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} has no {MANIFEST_FILE}: it is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
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
    extra = find_extra(path, {MANIFEST_FILE, *files})
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        advice = "move it out of the checkpoint, which is intact otherwise"
        raise CheckpointError(f"{path} has the file {extra[0]}{more}, which its manifest does not list: {advice}")


def find_extra(path: Path, known: Collection[str]) -> list[str]:
    """List the files below a directory that are neither known nor hidden, by their paths in it."""
    found = (file.relative_to(path) for file in sorted(path.rglob("*")) if not file.is_dir())
    return [name.as_posix() for name in found if name.as_posix() not in known and not any(part.startswith(".") for part in name.parts)]


def load_run_state(path: Path) -> dict[str, Any]:
    """Verify a checkpoint and load its run_state."""
    verify_checkpoint(path)
    return cast("dict[str, Any]", parse_json((path / RUN_STATE_FILE).read_text(encoding="utf-8")))


async def save_checkpoint(
    directory: Path | str,
    step: int,
    *,
    write: Callable[[Path], Awaitable[None]],
    run_state: Mapping[str, Any],
    keep_last_n: int = 2,
    protected: Collection[Path] = (),
) -> Path:
    """Write directory/step_NNNN atomically, then delete the oldest beyond keep_last_n.

    Checkpoints with a higher number are from before the run was resumed: they are moved aside as superseded_step_NNNN.

    Args:
        write: writes into the (temporary) directory it is given.
        run_state: JSON values.
        keep_last_n: checkpoints to keep, this one included; at least 1.
        protected: checkpoints to keep regardless of age, for example one that a server has loaded.

    Returns: the path of the new checkpoint.
    Raises: CheckpointError if the disk is full or cannot be written; other errors of `write` unchanged. In both cases nothing of the new
        checkpoint is left, and older ones are intact.
    """

    async def stage(temporary: Path) -> Callable[[], None]:
        await write(temporary)
        return _write_nothing

    complete = await stage_checkpoint(Path(directory), step, stage=stage, run_state=run_state, keep_last_n=keep_last_n, protected=protected)
    return await run_shielded(complete)  # once begun, this must not be interrupted


async def stage_checkpoint(
    directory: Path,
    step: int,
    *,
    stage: Callable[[Path], Awaitable[Callable[[], None]]],
    run_state: Mapping[str, Any],
    keep_last_n: int = 2,
    protected: Collection[Path] = (),
) -> Callable[[], Path]:
    """Take the state of a checkpoint now; the function that is returned does the rest of save_checkpoint, in any thread.

    Args:
        stage: called with the (temporary) directory; returns a function that writes there what has not been written yet. That function
            must not read what training changes.
        run_state, keep_last_n, protected: see save_checkpoint; read now.

    Returns: a function to be called once, before the next checkpoint of the directory is staged. It returns and raises as save_checkpoint.
    Raises: as save_checkpoint.
    """
    assert keep_last_n >= 1, f"keep_last_n is {keep_last_n}, expected at least 1"
    target = directory / checkpoint_name(step)
    temporary = _free_name(directory / f"{_TEMPORARY_PREFIX}{target.name}_{os.getpid()}")
    try:
        await trio.to_thread.run_sync(partial(_prepare, directory, temporary))
        write = await stage(temporary)
        text = json.dumps(dict(run_state)) + "\n"
    except BaseException as error:
        problem = await run_shielded(partial(_clean_up, error, directory, temporary))
        if problem is not None:
            raise problem from error
        raise
    return partial(_complete, write, text, temporary, target, keep_last_n, frozenset(path.resolve() for path in protected))


def watch_saves(directories: Collection[Path]) -> Callable[[], bool]:
    """Return a function that tells whether this process is writing a checkpoint into one of the directories. For any thread."""
    names = tuple(f"{_TEMPORARY_PREFIX}*_{os.getpid()}{end}" for end in ("", "_*"))

    def find() -> set[Path]:
        return {path for directory in directories for name in names for path in directory.glob(name)}

    left_over = find()  # by a killed process of the same number, as in a container
    return lambda: bool(find() - left_over)


async def run_shielded(function: Callable[[], T]) -> T:
    """Run a function in a thread, to its end even if the task is cancelled meanwhile."""
    results: list[T] = []
    with trio.CancelScope(shield=True):
        results.append(await trio.to_thread.run_sync(function))
    return results[0]


def _write_nothing() -> None:
    return None


def _complete(
    write: Callable[[], None], run_state: str, temporary: Path, target: Path, keep_last_n: int, protected: frozenset[Path]
) -> Path:
    try:
        write()
        old = _find_old(target, keep_last_n, protected)
        _finish(temporary, target, run_state, [path.name for path in old])
    except BaseException as error:
        problem = _clean_up(error, target.parent, temporary)
        if problem is not None:
            raise problem from error
        raise
    _prune(target, old, protected)
    return target


def finish_save(checkpoint: Path) -> None:
    """Delete what a killed save of a checkpoint would have deleted, and what it left: no more than keep_last_n and protected ones stay.

    Args:
        checkpoint: an intact one, of a directory that no other process writes to.
    """
    _remove_leftovers(checkpoint.parent)
    try:
        _delete(find_undeleted(checkpoint))
    except OSError as error:  # it must not prevent others
        warnings.warn(f"an old checkpoint of {checkpoint.parent} cannot be deleted ({error}): delete it yourself", stacklevel=2)


def find_undeleted(checkpoint: Path) -> list[Path]:
    """List the older checkpoints that the save of an intact one was to delete, and which are still there; none once it has gone itself."""
    try:
        manifest = cast("dict[str, Any]", parse_json((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:  # a live run has deleted it meanwhile
        return []
    names: object = manifest.get("deletes", [])  # absent: by an earlier version
    older = itertools.takewhile(lambda path: path != checkpoint, list_checkpoints(checkpoint.parent))
    return [path for path in older if isinstance(names, list) and path.name in names]


def _prepare(directory: Path, temporary: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(directory)
    temporary.mkdir()


def _remove_leftovers(directory: Path) -> None:
    _restore_replaced(directory)
    for leftover in find_leftovers(directory):  # the run lock excludes a live run
        try:
            _remove(leftover)
        except OSError as error:  # a killed save must not prevent others
            warnings.warn(f"{leftover}, left by a killed save, cannot be removed ({error}): remove it yourself", stacklevel=2)


def find_leftovers(directory: Path) -> list[Path]:
    """List what killed saves have left beside the checkpoints: no checkpoint, and removed by finish_save and the next save."""
    return sorted(path for prefix in (_TEMPORARY_PREFIX, f"{_REPLACED_PREFIX}step_") for path in directory.glob(f"{prefix}*"))


def _remove(path: Path) -> None:
    """Remove a directory, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _restore_replaced(directory: Path) -> None:
    """Undo a replacement that a kill interrupted between its two renames."""
    for replaced in directory.glob(f"{_REPLACED_PREFIX}step_*"):
        original = directory / replaced.name.removeprefix(_REPLACED_PREFIX)
        if not original.exists() and (replaced / MANIFEST_FILE).is_file():  # without one it was being deleted
            replaced.rename(original)


def _finish(temporary: Path, target: Path, run_state: str, deletes: Sequence[str]) -> None:
    (temporary / RUN_STATE_FILE).write_text(run_state, encoding="utf-8")
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    entries = {path.relative_to(temporary).as_posix(): {"size": path.stat().st_size, "crc32": checksum(path)} for path in files}
    manifest = temporary / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": 1, "deletes": list(deletes), "files": entries}, indent=1) + "\n", encoding="utf-8")
    for path in [*files, manifest, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
        _flush(path)
    if target.exists():  # a rename cannot replace a non-empty directory
        target.rename(target.with_name(_REPLACED_PREFIX + target.name))
        temporary.rename(target)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _find_old(target: Path, keep_last_n: int, protected: frozenset[Path]) -> list[Path]:
    """List the checkpoints older than the keep_last_n newest up to `target`, which need not be there yet."""
    older = [path for path in list_checkpoints(target.parent) if _number(path) < _number(target)]
    return [path for path in older[: max(0, len(older) + 1 - keep_last_n)] if path.resolve() not in protected]


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _prune(target: Path, old: Sequence[Path], protected: frozenset[Path]) -> None:
    """Delete the old checkpoints, and move aside those newer than `target`."""
    try:
        replaced = target.with_name(_REPLACED_PREFIX + target.name)
        if replaced.exists():
            _remove(replaced)
        checkpoints = list_checkpoints(target.parent)
        for path in checkpoints[checkpoints.index(target) + 1 :]:
            if path.resolve() not in protected:
                path.rename(_free_name(path.with_name(_SUPERSEDED_PREFIX + path.name)))
        _delete(old)
    except OSError as error:
        raise CheckpointError(f"{target} is complete, but another checkpoint cannot be moved or deleted: {error}") from error


def _delete(checkpoints: Sequence[Path]) -> None:
    for path in checkpoints:
        # rename first: a kill during deletion must not leave an incomplete directory that looks like a checkpoint
        doomed = _free_name(path.with_name(f"{_TEMPORARY_PREFIX}deleted_{path.name}"))
        path.rename(doomed)
        _remove(doomed)  # a link, which a user made to another disk, is removed without its target


def _free_name(path: Path) -> Path:
    """Return the path, or the first of path_2, path_3, ... that does not exist."""
    candidates = itertools.chain([path], (path.with_name(f"{path.name}_{k}") for k in itertools.count(2)))
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def _clean_up(error: BaseException, directory: Path, temporary: Path) -> CheckpointError | None:
    """Remove the files of a failed save; return a clearer error to raise instead, if there is one."""
    problem = _explain_failure(error, directory, temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    _restore_replaced(directory)
    return problem


def _explain_failure(error: BaseException, directory: Path, temporary: Path) -> CheckpointError | None:
    """Return the error for a save that failed because of the disk, None for any other. Call it before the written files are removed."""
    if not isinstance(error, Exception):
        return None
    existing = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if not is_disk_full(error) and free >= _FULL_DISK_BYTES:
        return CheckpointError(f"cannot write a checkpoint in {directory}: {error}. {_KEPT}") if isinstance(error, OSError) else None
    written = directory_size(temporary)
    older = list_checkpoints(directory)
    needed = f"about {directory_size(older[-1])} bytes, like {older[-1].name}" if older else f"more than {written} bytes"
    return CheckpointError(
        f"the disk is full: a checkpoint in {directory} needs {needed}; {written} bytes of it were written and removed again, which leaves "
        f"{free + written} bytes free. {_KEPT} Free some space, lower keep_last_n or choose another --output-dir, then resume."
    )


def directory_size(directory: Path) -> int:
    """Count the bytes in all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def checksum(path: Path) -> int:
    """Compute the CRC-32 of a file. It detects damage, not malice, several times faster than a cryptographic hash."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    """Call fsync on a file or directory; not on a directory under Windows, which cannot open one and does not need it."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
