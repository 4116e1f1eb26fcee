"""Checkpoints: atomic under kill -9 and full disks, verified by checksum, in numeric order; one run per directory."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import needs
import pytest
import trio
from forked import Child

from rollouts.errors import CheckpointError, ConfigError
from rollouts.training.saving.checkpoints import (
    MANIFEST_FILE,
    checkpoint_name,
    find_damaged,
    latest_checkpoint,
    list_checkpoints,
    load_run_state,
    save_checkpoint,
    verify_checkpoint,
)
from rollouts.training.saving.run_lock import lock_run_directory

Write = Callable[[Path], Awaitable[None]]


def writer(text: str = "weights", size: int = 1000) -> Write:
    async def write(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(text.encode() + b"\0" * size)
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "vocab.json").write_text("{}")

    return write


def latest_step(directory: Path) -> int | None:
    path = latest_checkpoint(directory)
    return None if path is None else int(path.name.removeprefix("step_"))


async def save(directory: Path, step: int, text: str = "weights", **options: Any) -> Path:
    return await save_checkpoint(directory, step, write=writer(text), run_state={"step": step, "text": text}, **options)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_a_checkpoint_is_complete_and_alone(tmp_path):
    path = await save(tmp_path / "checkpoints", 60)
    assert path == tmp_path / "checkpoints" / "step_0060"
    assert names(path.parent) == ["step_0060"]
    assert names(path) == ["manifest.json", "model.safetensors", "run_state.json", "tokenizer"]
    assert set(json.loads((path / MANIFEST_FILE).read_text())["files"]) == {"model.safetensors", "run_state.json", "tokenizer/vocab.json"}
    assert load_run_state(path) == {"step": 60, "text": "weights"}
    assert latest_step(path.parent) == 60


def test_no_checkpoints_is_not_an_error(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        assert list_checkpoints(directory) == []
        assert latest_checkpoint(directory) is None
        assert latest_step(directory) is None


async def test_order_is_numeric_not_lexicographic(tmp_path):
    await save(tmp_path, 200)
    for step in (9999, 99999, 1000, 7):
        shutil.copytree(tmp_path / "step_0200", tmp_path / checkpoint_name(step))
    shutil.copytree(tmp_path / "step_0200", tmp_path / "step_3")  # not padded
    (tmp_path / "step_123456").write_text("a file, not a checkpoint")
    (tmp_path / "step_x").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step_3", "step_0007", "step_0200", "step_1000", "step_9999", "step_99999"]  # fmt: skip
    assert latest_step(tmp_path) == 99999


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
async def test_the_last_n_are_kept(tmp_path, keep, kept):
    for step in range(1, 6):
        await save(tmp_path, step, keep_last_n=keep)
    assert names(tmp_path) == [checkpoint_name(step) for step in kept]


async def test_protected_checkpoints_stay(tmp_path, monkeypatch):
    first = await save(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    for step in (2, 3, 4):
        await save(tmp_path, step, keep_last_n=1, protected=[Path("step_0001")])
    assert names(tmp_path) == ["step_0001", "step_0004"]
    verify_checkpoint(first)


async def test_older_ones_are_there_until_the_new_one_is_complete(tmp_path):
    await save(tmp_path, 1, keep_last_n=1)

    async def write(directory: Path) -> None:
        assert latest_step(tmp_path) == 1
        await writer()(directory)
        assert latest_step(tmp_path) == 1

    await save_checkpoint(tmp_path, 2, write=write, run_state={}, keep_last_n=1)
    assert names(tmp_path) == ["step_0002"]


async def test_the_same_step_is_replaced(tmp_path):
    await save(tmp_path, 5, "old")
    path = await save(tmp_path, 5, "new")
    assert names(tmp_path) == ["step_0005"]
    assert load_run_state(path)["text"] == "new"


async def test_a_replacement_that_was_interrupted_is_undone(tmp_path):
    path = await save(tmp_path, 5, "old")
    path.rename(tmp_path / "replaced_step_0005")  # as after a kill between the two renames
    assert latest_step(tmp_path) == 5
    assert load_run_state(path)["text"] == "old"
    path.rename(tmp_path / "replaced_step_0005")
    await save(tmp_path, 6)
    assert names(tmp_path) == ["step_0005", "step_0006"]


async def test_steps_of_an_abandoned_future_are_moved_aside(tmp_path):
    for step in (10, 20, 30):
        await save(tmp_path, step, keep_last_n=9)
    await save(tmp_path, 15, keep_last_n=1)  # resumed from 10
    assert names(tmp_path) == ["step_0015", "superseded_step_0020", "superseded_step_0030"]
    assert latest_step(tmp_path) == 15
    await save(tmp_path, 20)
    await save(tmp_path, 17)
    assert names(tmp_path) == ["step_0015", "step_0017", "superseded_step_0020", "superseded_step_0020_2", "superseded_step_0030"]


async def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / ".tmp_step_0001_4711").mkdir()
    (tmp_path / ".tmp_step_0001_4711" / "model.safetensors").write_text("half")
    assert latest_checkpoint(tmp_path) is None
    await save(tmp_path, 2)
    assert names(tmp_path) == ["step_0002"]


@pytest.mark.parametrize("file", ["model.safetensors", "run_state.json", "tokenizer/vocab.json"])
async def test_every_bit_flip_and_truncation_is_found(tmp_path, file):
    path = await save(tmp_path, 1)
    good = (path / file).read_bytes()
    rng = random.Random(0)
    for _ in range(40):
        bit = rng.randrange(8 * len(good))
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        (path / file).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"does not match its checksum"):
            verify_checkpoint(path)
        (path / file).write_bytes(good[: rng.randrange(len(good))])
        with pytest.raises(CheckpointError, match=r"bytes, expected \d+: it is truncated"):
            verify_checkpoint(path)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=f"lacks the file {file}"):
        verify_checkpoint(path)
    (path / file).parent.mkdir(exist_ok=True)
    (path / file).write_bytes(good)
    verify_checkpoint(path)


async def test_a_damaged_manifest_is_an_error_or_harmless(tmp_path):
    path = await save(tmp_path, 1)
    manifest = path / MANIFEST_FILE
    good = manifest.read_bytes()
    found = 0
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(damaged)
        try:
            verify_checkpoint(path)
        except CheckpointError:
            found += 1
        else:
            assert json.loads(damaged).keys() and json.loads(damaged)["files"] == json.loads(good)["files"]
    assert found > 6 * len(good)
    for text in ("", "[]", "null", '{"files": 3}', '{"files": {}}', '{"files": {"a": {"size": 1}}}', "{" * 5):
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify_checkpoint(path)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        verify_checkpoint(path)


async def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path):
    for step in (1, 2, 3):
        await save(tmp_path, step, keep_last_n=3)
    assert find_damaged(tmp_path) == []
    (tmp_path / "step_0003" / "model.safetensors").write_bytes(b"x")
    assert latest_step(tmp_path) == 2
    (problem,) = find_damaged(tmp_path)
    assert "step_0003" in problem and "model.safetensors" in problem
    await save(tmp_path, 3, "again", keep_last_n=3)
    assert latest_step(tmp_path) == 3
    assert names(tmp_path) == ["step_0001", "step_0002", "step_0003"]


async def test_no_intact_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    for step in (1, 2):
        path = await save(tmp_path, step)
        (path / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact(.|\n)*step_0002(.|\n)*step_0001"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path, number):
    await save(tmp_path, 1)

    async def write(directory: Path) -> None:
        await writer()(directory)
        raise OSError(number, os.strerror(number))

    with pytest.raises(
        CheckpointError, match=r"the disk is full: .* needs about \d+ bytes, like step_0001; \d+ bytes .* \d+ bytes free"
    ) as caught:
        await save_checkpoint(tmp_path, 2, write=write, run_state={}, keep_last_n=1)
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == ["step_0001"]
    assert latest_step(tmp_path) == 1


async def test_a_full_disk_is_known_by_words_and_causes_too(tmp_path):
    async def write(directory: Path) -> None:
        try:
            raise ValueError("I/O error: No space left on device (os error 28)")  # as safetensors says it
        except ValueError as error:
            raise RuntimeError("the job failed") from error

    with pytest.raises(CheckpointError, match=r"the disk is full: .* needs more than 0 bytes"):
        await save_checkpoint(tmp_path / "new", 2, write=write, run_state={})
    assert names(tmp_path / "new") == []


async def test_other_errors_are_as_they_were_raised_and_leave_nothing(tmp_path):
    await save(tmp_path, 1)

    async def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await save_checkpoint(tmp_path, 2, write=fail, run_state={})
    with pytest.raises(TypeError, match="not JSON serializable"):
        await save_checkpoint(tmp_path, 2, write=writer(), run_state={"bad": object()})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint in"):
        await save_checkpoint(tmp_path / "file", 2, write=writer(), run_state={})
    (tmp_path / "file").unlink()
    assert names(tmp_path) == ["step_0001"]


async def test_a_cancelled_save_leaves_nothing(tmp_path, autojump_clock):
    await save(tmp_path, 1)

    async def write(directory: Path) -> None:
        (directory / "half").write_text("x")
        await trio.sleep_forever()

    with trio.move_on_after(1) as scope:
        await save_checkpoint(tmp_path, 2, write=write, run_state={})
    assert scope.cancelled_caught
    assert names(tmp_path) == ["step_0001"]


KILLED = """
import sys, trio
from pathlib import Path
from rollouts.training.saving.checkpoints import latest_checkpoint, save_checkpoint

async def main(directory):
    newest = latest_checkpoint(directory)
    first = (0 if newest is None else int(newest.name.removeprefix("step_"))) + 1
    print(first - 1)
    for step in range(first, first + 100000):
        async def write(temporary):
            for k in range(3):
                (temporary / f"part_{k}").write_bytes(step.to_bytes(8, "big") * 25000)
        for again in range(2):  # the second time it is replaced
            await save_checkpoint(directory, step, write=write, run_state={"step": step}, keep_last_n=1)
        print(step)

trio.run(main, Path(sys.argv[1]))
"""


def test_kill_at_any_moment_never_loses_an_acknowledged_checkpoint(tmp_path):
    rng = random.Random(0)
    directory, seen = tmp_path / "checkpoints", 0
    for life in range(8):
        with Child(KILLED, directory, folder=tmp_path / f"life_{life}") as child:
            assert int(child.wait_for_lines(1)[0]) >= seen  # it is running, and found what was acknowledged
            child.wait_for_lines(rng.randrange(2, 4) if life else 1)
            time.sleep(0.01 * rng.random())  # about as long as it takes to write one
            child.kill()
            seen = max(seen, *map(int, child.out.splitlines()))
        step = latest_step(directory)
        if step is None:
            assert seen == 0
            continue
        assert seen <= step <= seen + 1
        assert load_run_state(directory / checkpoint_name(step)) == {"step": step}
        assert (directory / checkpoint_name(step) / "part_2").read_bytes() == step.to_bytes(8, "big") * 25000
        seen = step
    assert seen > 5


FULL_DISK = """
import sys, torch, trio
from pathlib import Path
from safetensors.torch import save_file
from rollouts.training.saving.checkpoints import latest_checkpoint, save_checkpoint
from rollouts.errors import CheckpointError

async def main(directory):
    async def small(temporary):
        (temporary / "model.bin").write_bytes(b"x" * (3 << 20))
    async def plain(temporary):
        (temporary / "model.bin").write_bytes(b"x" * (12 << 20))
    async def tensors(temporary):
        save_file({"w": torch.zeros(3 << 20)}, temporary / "model.safetensors")
    async def pickled(temporary):
        torch.save({"w": torch.zeros(3 << 20)}, temporary / "state.pt")
    await save_checkpoint(directory, 1, write=small, run_state={})
    for write in (plain, tensors, pickled):
        try:
            await save_checkpoint(directory, 2, write=write, run_state={}, keep_last_n=1)
        except CheckpointError as error:
            print(write.__name__, latest_checkpoint(directory).name, [p.name for p in directory.iterdir()], error)

trio.run(main, Path(sys.argv[1]))
"""


@pytest.mark.slow
@needs.small_disk()
def test_a_disk_that_is_really_full(tmp_path):
    mount = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"', str(tmp_path)]
    done = subprocess.run([*mount, sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "tensors", "pickled"], done.stdout
    for line in lines:
        assert " step_0001 ['step_0001'] the disk is full: a checkpoint in " in line
        assert "needs about 31" in line and " bytes free" in line


HOLDER = """
import signal, sys
from pathlib import Path
from rollouts.training.saving.run_lock import lock_run_directory
with lock_run_directory(Path(sys.argv[1])):
    print("held")
    signal.pause()
"""


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path):
    with Child(HOLDER, tmp_path / "run", folder=tmp_path) as first:
        assert first.wait_for_lines(1) == ["held"]
        with pytest.raises(ConfigError, match=rf"in use by a live run \(process {first.pid} on .*, started 20\d\d-"):
            with lock_run_directory(tmp_path / "run"):
                pass
    with lock_run_directory(tmp_path / "run", clock=lambda: 0.0):
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .*, started 19(70|69)-"):
            with lock_run_directory(tmp_path / "run"):
                pass
    with lock_run_directory(tmp_path / "run"):
        pass
