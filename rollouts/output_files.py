"""Files that a run leaves behind, written whole or not at all and flushed to disk. A refusal of the disk is an OutputError.

A full disk, a quota, a directory that became read-only: the error names the file, the reason and the way to go on; no half line is left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollouts.errors import OutputError, RolloutsError


@contextmanager
def explain_writes(path: Path | str) -> Generator[None]:
    """Raise a refusal of the disk in the block as an OutputError.

    Args:
        path: file that the block writes, for the message.
    """
    try:
        yield
    except RolloutsError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        found = f"the disk is full: {path} cannot be written ({reason}). Free some space" if is_disk_full(error) else None
        found = found or f"{path} cannot be written ({reason}). See that its directory is there, may be written to and has room"
        raise OutputError(f"{found}; a run then goes on with --resume, from its last checkpoint") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that no space is left. safetensors says so in words only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(seen) for words in ("No space left on device", "not enough space on the disk", "Disk quota exceeded")):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def replace_file(path: Path, content: str) -> None:
    """Write a text file, whole or not at all, even if the machine fails; a missing directory is created.

    Raises: OutputError; the former file is then still there.
    """
    temporary = path.with_name(f".tmp_{path.name}")
    with explain_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_text(path: Path, text: str, *, flush: bool = False) -> None:
    """Append text to a file, whole or not at all.

    Args:
        text: whole lines.
        flush: also to the disk, so that the text survives the machine and not only the process.

    Raises: OutputError; the file is then as it was.
    """
    with explain_writes(path), path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        rest = memoryview(text.encode("utf-8"))
        try:
            while rest:  # a disk that is almost full takes a part
                rest = rest[file.write(rest) :]
            if flush:
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def flush_file(path: Path) -> None:
    """Flush a file's content to disk. Raises OutputError."""
    with explain_writes(path), path.open("rb+") as file:
        os.fsync(file.fileno())
