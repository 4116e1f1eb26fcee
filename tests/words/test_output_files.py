"""Files that a run leaves: whole or not at all, in the face of a disk that takes no more, here by the system's limit on a file's size."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollouts.errors import ConfigError, OutputError
from rollouts.output_files import append_text, explain_writes, replace_file


@contextmanager
def largest_file(num_bytes: int) -> Generator[None]:
    """Like a full disk, it accepts only the beginning of data that is too long."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path):
    path = tmp_path / "lines"
    append_text(path, "first\n", flush=True)
    with largest_file(10), pytest.raises(OutputError, match=r"lines cannot be written \(File too large\)"):
        append_text(path, "a longer line\n")
    assert path.read_text() == "first\n"
    append_text(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


def test_a_file_that_does_not_fit_does_not_take_the_place_of_the_one_before(tmp_path: Path):
    path = tmp_path / "new" / "file"
    replace_file(path, "before")
    with largest_file(10), pytest.raises(OutputError, match="file cannot be written"):
        replace_file(path, "a longer content")
    assert path.read_text() == "before"
    assert [other.name for other in path.parent.iterdir()] == ["file"]


def test_full_disks_are_told_from_other_reasons_and_other_errors_pass(tmp_path: Path):
    with pytest.raises(OutputError, match=r"the disk is full: there cannot be written \(No space left on device\)\. Free some space"):
        with explain_writes("there"), open("/dev/full", "w") as file:
            file.write("x")
            file.flush()
    with pytest.raises(OutputError, match="the disk is full: weights cannot be written"), explain_writes("weights"):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it
    with pytest.raises(OutputError, match=r"/dev/null/x cannot be written \("):
        replace_file(Path("/dev/null/x"), "")
    for error in (ConfigError("no"), ValueError("no"), OutputError("inside")):
        with pytest.raises(type(error), match=str(error)), explain_writes("there"):
            raise error
