"""Checkpoints that are killed while they are written, damaged afterwards, or written to a full disk."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
import trio
from safetensors.torch import load_file, save_file

from benchmarks.reliability.experiment import Amount, Outcome, Skipped
from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import (
    checkpoint_name,
    finish_save,
    latest_checkpoint,
    load_run_state,
    save_checkpoint,
    verify_checkpoint,
)

STATE_BYTES = 12 * 2**20
KEEP_LAST_N = 2
_CHUNK = 2**18


async def _write(directory: Path, step: int) -> None:
    with (directory / "state.bin").open("wb") as file:
        for _ in range(STATE_BYTES // _CHUNK):
            file.write(bytes([step % 251]) * _CHUNK)


def save_back_to_back(directory: Path, acknowledge: Callable[[int], None]) -> None:
    """Save one step after another for ever, and acknowledge each."""
    for step in range(1, 10**9):
        trio.run(
            partial(save_checkpoint, directory, step, write=partial(_write, step=step), run_state={"step": step}, keep_last_n=KEEP_LAST_N)
        )
        acknowledge(step)


def save_in_place(directory: Path, acknowledge: Callable[[int], None]) -> None:
    """Overwrite one file again and again, as a naive program does."""
    directory.mkdir()
    for step in range(1, 10**9):
        trio.run(_write, directory, step)
        (directory / "run_state.json").write_text(str(step))
        acknowledge(step)


def newest_saved(directory: Path) -> int:
    """Return the step of the newest checkpoint that verifies; 0 without one."""
    try:
        path = latest_checkpoint(directory)
    except CheckpointError:
        return 0
    return 0 if path is None else int(load_run_state(path)["step"])


def newest_in_place(directory: Path) -> int:
    """Return the step of the one file if all of it is of that step, else 0."""
    content = (directory / "state.bin").read_bytes() if (directory / "state.bin").exists() else b""
    told = (directory / "run_state.json").read_text() if (directory / "run_state.json").exists() else ""
    is_whole = told.isdecimal() and content == bytes([int(told) % 251]) * STATE_BYTES
    return int(told) if is_whole else 0


def _tell_step(pipe: int, step: int) -> None:
    os.write(pipe, step.to_bytes(4, "big"))


def kill_in_save(directory: Path, save: Callable[[Path, Callable[[int], None]], None], after_s: float) -> int:
    """Save in a process that is killed some time after its first save. Returns the last step that it acknowledged."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        save(directory, partial(_tell_step, writes))
        os._exit(1)
    os.close(writes)
    told = os.read(reads, 4)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(reads, 2**16):
        told = more[-4:]
    os.close(reads)
    return int.from_bytes(told, "big")


def has_more_than(directory: Path, kept: int) -> bool:
    """Whether a directory has more than `kept` checkpoints and leftovers of one save."""
    return len(list(directory.iterdir())) > kept


def save_once_more(directory: Path, step: int) -> None:
    """Save the next step, as a resumed run does."""
    trio.run(partial(save_checkpoint, directory, step, write=partial(_write, step=step), run_state={"step": step}, keep_last_n=KEEP_LAST_N))


def kill_saves(amount: Amount) -> Outcome:
    """Kill saves of 12 MB at random moments, ours and those in place."""
    kills = amount.count(15, 100)
    counts: dict[str, Counter[str]] = {}
    for name, save, newest in (("ours", save_back_to_back, newest_saved), ("in place", save_in_place, newest_in_place)):
        found, draw = counts.setdefault(name, Counter[str]()), amount.draw
        for _ in range(kills):
            directory = amount.folder / "saves"
            acknowledged = kill_in_save(directory, save, draw.uniform(0.0, 0.06))
            step = newest(directory)
            found["resumable"] += step > 0
            found["acknowledged steps lost"] += step < acknowledged
            if save is save_back_to_back:
                found["with more than keep_last_n and the new one"] += has_more_than(directory, KEEP_LAST_N + 1)
                finish_save(directory / checkpoint_name(step))  # as a resumed run does before its first step
                found["with more than keep_last_n when they go on"] += has_more_than(directory, KEEP_LAST_N)
                save_once_more(directory, step + 1)
                found["with more than keep_last_n after the next save"] += has_more_than(directory, KEEP_LAST_N)
            shutil.rmtree(directory)
    control = counts["in place"]
    return Outcome(
        size=f"{kills} kills in saves of 12 MiB back to back", measured=dict(counts["ours"]),
        holds=counts["ours"]["resumable"] == kills == counts["ours"].total(),  # all others are 0
        control=dict(control), control_fails=control["resumable"] < kills,
    )  # fmt: skip


def _flip(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, draw: Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def _damages(path: Path, flips: int, cuts: int, draw: Random) -> Iterator[tuple[str, Callable[[], None]]]:
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    for _ in range(flips):
        yield "flipped", partial(_flip, path / "model.safetensors", draw)
    for number in range(cuts):
        yield "cut", partial(_cut, path / names[number % len(names)], draw)
    for name in names:
        yield "removed", (path / name).unlink
    yield "other shapes", lambda: save_file({"w": torch.zeros(7, 9)}, path / "model.safetensors")


def damage_checkpoints(amount: Amount) -> Outcome:
    """Damage the newest of two checkpoints, then both."""
    flips, cuts = amount.count(60, 200), amount.count(30, 100)

    async def write(directory: Path) -> None:
        save_file({"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(amount.seed))}, directory / "model.safetensors")
        (directory / "optimizer.bin").write_bytes(bytes(4096))

    directory, found, silent = amount.folder / "checkpoints", Counter[str](), 0
    for step in (1, 2):
        trio.run(partial(save_checkpoint, directory, step, write=write, run_state={"step": step}))
    newest, draw = directory / "step_0002", amount.draw
    shutil.copytree(newest, amount.folder / "intact")
    for kind, damage in _damages(newest, flips, cuts, draw):
        damage()
        found["damages"] += 1
        try:
            verify_checkpoint(newest)
        except CheckpointError as error:
            found["detected, with the name of the checkpoint"] += str(newest) in str(error)
        found["falls back to the one before"] += latest_checkpoint(directory) == directory / "step_0001"
        if kind == "flipped":
            silent += _loads(newest / "model.safetensors")
        shutil.rmtree(newest)
        shutil.copytree(amount.folder / "intact", newest)
    (directory / "step_0001" / "optimizer.bin").unlink()
    _flip(newest / "model.safetensors", draw)
    try:
        latest_checkpoint(directory)
        found["silent starts from the beginning"] += 1
    except CheckpointError as error:
        found["silent starts from the beginning"] += not ("step_0001" in str(error) and "step_0002" in str(error))
    names = ("detected, with the name of the checkpoint", "falls back to the one before")
    return Outcome(
        size=f"{flips} bit flips, {cuts} truncations, each file removed, other shapes", measured=dict(found),
        holds=all(found[name] == found["damages"] for name in names) and not found["silent starts from the beginning"],
        control={"flips that load with wrong weights": silent, "flips": flips}, control_fails=silent > 0,
    )  # fmt: skip


def _loads(path: Path) -> bool:
    try:
        load_file(path)
    except Exception:
        return False
    return True


_ON_A_SMALL_DISK = """
import sys
from functools import partial
from pathlib import Path
import torch, trio
from safetensors.torch import save_file
from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import latest_checkpoint, save_checkpoint

directory, naive = Path(sys.argv[1]) / "checkpoints", Path(sys.argv[1]) / "naive.pt"
big = {"w": torch.ones(24 * 2**18)}

async def write(tensors, folder):
    save_file(tensors, folder / "model.safetensors")

trio.run(partial(save_checkpoint, directory, 1, write=partial(write, {"w": torch.ones(2**18)}), run_state={}))
told = left = 0
try:
    trio.run(partial(save_checkpoint, directory, 2, write=partial(write, big), run_state={}))
except CheckpointError as error:
    told = int(str(directory) in str(error) and "bytes free" in str(error) and "needs" in str(error))
kept = int(latest_checkpoint(directory).name == "step_0001")
left = sum(path.name != "step_0001" for path in directory.iterdir())
try:
    torch.save(big, naive)
except Exception:
    pass
print(told, kept, left, naive.stat().st_size if naive.exists() else 0)
"""


def fill_disk(amount: Amount) -> Outcome:
    """Save 24 MiB to a disk of 16 MiB."""
    mount = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"', str(amount.folder)]
    if subprocess.run([*mount, "true"], capture_output=True).returncode != 0:
        raise Skipped("a small disk needs user namespaces (unshare -Urm), which this machine refuses")
    done = subprocess.run([*mount, sys.executable, "-c", _ON_A_SMALL_DISK, str(amount.folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told, kept, left, naive = map(int, done.stdout.split()[-4:])
    measured = {"errors that name path, bytes needed and bytes free": told, "earlier checkpoints that load": kept, "partial files": left}
    return Outcome(
        size="24 MiB on a tmpfs of 16 MiB", measured=measured, holds=(told, kept, left) == (1, 1, 0),
        control={"bytes of a partial file": naive}, control_fails=naive > 0,
    )  # fmt: skip


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self.path, "w")


def write_bomb(path: Path, mark: Path) -> None:
    """Write a pickle that creates the file `mark` where it is loaded."""
    path.write_bytes(pickle.dumps(Bomb(str(mark))))
