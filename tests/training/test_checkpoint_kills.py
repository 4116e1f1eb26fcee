"""A save that is killed before any one of its operations on the disk: the next save and a resume go on, and nothing is left of it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import (
    find_undeleted,
    finish_save,
    latest_checkpoint,
    list_checkpoints,
    load_run_state,
    save_checkpoint,
    verify_checkpoint,
)

KEEP = 2
OPERATIONS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open")


async def save(directory: Path, step: int, **options: Any) -> Path:
    async def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights" * 100)
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")

    return await save_checkpoint(directory, step, write=write, run_state={"step": step}, keep_last_n=KEEP, **options)


def run_killed(directory: Path, step: int, operation: int) -> bool:
    """Save in a forked process that ends before the operation of that number below the directory. Returns whether there was one."""
    pid = os.fork()
    if pid == 0:
        count = itertools.count()

        def kill(event: str, arguments: tuple[Any, ...]) -> None:
            if event in OPERATIONS and str(directory) in str(arguments[0]) and next(count) == operation:
                os._exit(9)

        sys.addaudithook(kill)
        try:
            trio.run(partial(save, directory, step))
        except BaseException:
            os._exit(3)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9), f"the save of step {step} failed before operation {operation}"
    return status == 9


def fill(directory: Path, *steps: int) -> None:
    for step in steps:
        trio.run(partial(save, directory, step))


def kill_everywhere(directory: Path, before: Callable[[Path], None], step: int) -> Iterator[Path]:
    """Yield a directory for each operation of a save, killed before it."""
    for operation in itertools.count():
        copy = directory / f"killed-{operation}"
        before(copy)
        if not run_killed(copy, step, operation):
            return
        yield copy


@pytest.mark.parametrize(
    ("steps", "killed", "then"),
    [((1, 2), 3, 4), ((1, 2), 3, 3), ((1, 2), 2, 3), ((1, 2), 2, 2), ((1, 2), 1, 2)],
    ids=["the next step", "the same step again", "a step that replaces another", "and again", "a step before the newest"],
)
def test_a_save_that_was_killed_anywhere_hinders_nothing_and_leaves_nothing(tmp_path, steps, killed, then):
    num_kills = 0
    for directory in kill_everywhere(tmp_path, lambda copy: fill(copy, *steps), killed):
        num_kills += 1
        newest = latest_checkpoint(directory)
        assert newest is not None and load_run_state(newest)["step"] in (*steps, killed)
        finish_save(newest)
        found = sorted(path.name for path in directory.iterdir() if not path.name.startswith("superseded_"))
        assert len(found) <= KEEP and newest.name in found and not find_undeleted(newest), f"{found} after {directory.name}"
        assert not run_killed(directory, then, 1_000_000)
        found = sorted(path.name for path in directory.iterdir() if not path.name.startswith("superseded_"))
        assert len(found) <= KEEP and all(name.startswith("step_") for name in found), f"{found} after {directory.name}"
        assert load_run_state(list_checkpoints(directory)[-1])["step"] == then
        shutil.rmtree(directory)
    assert num_kills > 15


@pytest.mark.parametrize("prefix", [".tmp_step_0003_1", ".tmp_deleted_step_0001", "replaced_step_0002", "replaced_step_0009"])
@pytest.mark.parametrize("kind", ["file", "link", "empty directory", "directory"])
async def test_whatever_bears_the_name_of_a_leftover_is_removed_or_undone(tmp_path, prefix, kind):
    await save(tmp_path, 1)
    await save(tmp_path, 2)
    path = tmp_path / prefix
    if kind == "file":
        path.write_text("half")
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
        if kind == "directory":
            (path / "model.safetensors").write_text("half")
    assert latest_checkpoint(tmp_path) is not None
    await save(tmp_path, 3)
    await save(tmp_path, 4)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["step_0003", "step_0004"]


async def test_finishing_a_save_deletes_what_it_named_and_nothing_else(tmp_path):
    first = await save(tmp_path, 1)
    await save(tmp_path, 2, protected=[first])
    newest = await save(tmp_path, 3, protected=[first])
    copies = [shutil.copytree(newest, tmp_path / name) for name in ("step_0000", "step_0004")]  # not of this save
    finish_save(newest)
    assert list_checkpoints(tmp_path) == [copies[0], first, tmp_path / "step_0002", newest, copies[1]]
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["deletes"] == []
    names = [
        "step_0001",
        "../step_0002",
        str(tmp_path / "step_0002"),
        "step_0002/",
        "../checkpoints/step_0002",
        "step_0003",
        "step_0004",
        7,
        None,
    ]
    (newest / "manifest.json").write_text(json.dumps(manifest | {"deletes": names}))
    finish_save(newest)
    assert list_checkpoints(tmp_path) == [copies[0], tmp_path / "step_0002", newest, copies[1]]
    del manifest["deletes"]  # as of an earlier version
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert find_undeleted(newest) == []
    shutil.rmtree(newest)  # by a live run that goes on
    assert find_undeleted(newest) == []


async def test_of_an_old_checkpoint_that_is_a_link_the_link_alone_is_deleted(tmp_path):
    directory, elsewhere = tmp_path / "checkpoints", tmp_path / "other disk"
    await save(directory, 1)
    (directory / "step_0001").rename(elsewhere)
    (directory / "step_0001").symlink_to(elsewhere)
    for step in range(2, 5):
        await save(directory, step)
    assert [path.name for path in list_checkpoints(directory)] == ["step_0003", "step_0004"]
    assert len(list(directory.iterdir())) == 2
    verify_checkpoint(elsewhere)


async def test_a_leftover_that_cannot_be_removed_is_told_and_hinders_no_save(tmp_path, monkeypatch):
    (tmp_path / f".tmp_step_0001_{os.getpid()}").mkdir()
    monkeypatch.setattr("rollouts.training.saving.checkpoints._remove", lambda path: (_ for _ in ()).throw(PermissionError("not yours")))
    with pytest.warns(UserWarning, match=r"\.tmp_step_0001_.* cannot be removed \(not yours\): remove it yourself"):
        path = await save(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == path


async def test_a_file_that_is_not_of_a_checkpoint_is_refused_and_hidden_ones_are_not(tmp_path):
    await save(tmp_path, 1)
    path = await save(tmp_path, 2)
    (path / ".nfs0001").write_text("of a file system")
    assert latest_checkpoint(tmp_path) == path
    (path / "tokenizer" / "more.safetensors").write_text("of somebody")
    with pytest.raises(CheckpointError, match=r"has the file tokenizer/more.safetensors, which its manifest does not list"):
        verify_checkpoint(path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_0001"
