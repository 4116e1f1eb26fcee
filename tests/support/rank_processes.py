"""Several ranks of one run, each a forked process, as torchrun would start them; and functions that rank 0 calls on them.

The latter stand in a module because they are sent by name.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from forked import Child
from torch.distributed import TCPStore

from benchmarks.reliability.listeners import assert_loopback
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import grpo
from rollouts.backends.fsdp import checkpoint
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.ranks import group as rank_group
from rollouts.backends.ranks.values import dump_value
from rollouts.data.collate import collate_samples
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import RecordRequest, UpdatePlan, train_on_rollouts
from rollouts.types import Sample, TrainBatch

PRELUDE = """
import os, sys
os.environ.update(RANK=sys.argv.pop(1), WORLD_SIZE=sys.argv.pop(1), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop(1))
os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
os.environ.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE="True")
import torch
torch.set_num_threads(1)
"""


LEAD = """
import json, os, sys, threading, time, traceback
from functools import partial
import rank_processes as jobs
from rollouts.backends.ranks.group import join_ranks
from rollouts.backends.ranks.leading import lead_backend
from rollouts.errors import BackendError

def lead(group):
%s

try:
    with join_ranks(os.environ, timeout_s=float(os.environ.get("TEST_TIMEOUT_S", 60)), grace_s=1.0) as group:
        if group.rank > 0:
            group.serve()
        else:
            lead(group)
except BackendError as error:
    sys.stderr.write("\\n".join(["error: " + str(error), *getattr(error, "__notes__", ())]) + "\\n")
    sys.exit(1)
"""


def script(body: str) -> str:
    """A program whose rank 0 does this."""
    return LEAD % "\n".join("    " + line for line in body.strip().splitlines())


def find_free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(code: str, num_ranks: int, *arguments: object, folder: Path) -> list[Child]:
    """Processes that run the code with RANK and its companions in their environment; each has a folder for its output.

    They meet in a store of this process, as they do in torchrun's: a free port that rank 0 is to take may be taken when it comes.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [Child(PRELUDE + code, rank, num_ranks, store.port, *arguments, folder=folder / f"rank_{rank}") for rank in range(num_ranks)]
    for child in children:
        child.store = store  # which lives as long as they do
    return children


def list_backends(backends: dict[str, object]) -> list[str]:
    """The names of the backends of a rank."""
    return sorted(backends)


def create_tiny_backend(lr: float = 1e-2) -> FSDPTrainingBackend:
    """A rank's part of a tiny model."""
    return FSDPTrainingBackend(create_tiny_model(), partial(create_adamw_optimizer, lr=lr))


def create_pair_backend(lr: float = 5e-3) -> FSDPTrainingBackend:
    """A rank's part of a tiny model for losses of pairs, with the weights of the other ranks' own."""
    return FSDPTrainingBackend(create_tiny_model(), partial(create_adamw_optimizer, lr=lr), rows_per_unit=2)


def tell_rank(backends, *own):
    """Return the arguments that each rank was given."""
    return own


def raise_everywhere(backends):
    raise CheckpointError("the directory does not fit")


def raise_on_rank(backends, rank: int, own: int):
    """One rank fails without a word to the others, which wait for it in an exchange."""
    if own == rank:
        raise ValueError("no good")
    torch.distributed.all_reduce(torch.zeros(1))


def fail_alone(backends, rank: int, own: int):
    """One rank fails, and nobody waits for it."""
    if own == rank:
        raise CheckpointError("the disk is full")
    return own


def answer_with_pickle(backends, path: str, own: int):
    """A rank that sends, in the place of its answer, a pickle that makes a directory where it is opened."""

    def dump_bomb(value: object) -> bytes:
        rank_group.dump_value = dump_value
        return pickle.dumps(Bomb(path))

    if own == 1:
        rank_group.dump_value = dump_bomb


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (self.path,)


def forbid_pickles(backends, *own) -> None:
    """Make this process fail from now on if torch.distributed would unpickle data of another one."""

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle of another rank was to be opened")

    torch.distributed.distributed_c10d._tensor_to_object = refuse


def assert_loopback_only() -> None:
    """This process listens at addresses of the loopback interface alone."""
    assert_loopback([os.getpid()])


def return_function(backends):
    """Return a value that cannot be sent back."""
    return lambda: 1


def send_signal(backends, rank: int, number: int, own: int):
    """One rank is killed or stopped while the others wait for it in an exchange."""
    if own == rank:
        os.kill(os.getpid(), number)
        time.sleep(60)
    torch.distributed.all_reduce(torch.zeros(1))


def die_when_writing(backends, rank: int, sign: Path, own: int) -> None:
    """Make one rank's process be killed in the thread that writes its next checkpoint, once a file is there."""

    def die(*args, **kwargs):
        while not sign.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if own == rank:
        checkpoint.export_pieces = die


def sleep_on_rank(backends, rank: int, own: int):
    """One rank does not come back, and lives."""
    if own == rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    torch.distributed.all_reduce(torch.zeros(1))


def fail_or_sleep(backends, own: int):
    """Rank 1 fails, rank 2 does not come back, and nobody waits for either in an exchange."""
    if own == 1:
        raise ValueError("no good")
    if own == 2:
        time.sleep(1000)


def loss_of_named_rank(outputs, batch, rank: int):
    """A loss that fails on one rank."""
    if torch.distributed.get_rank() == rank:
        raise ZeroDivisionError("a bad loss")
    return sft_loss(outputs, batch)


def select_entropy(outputs):
    return outputs.entropy


def select_log_probs(outputs):
    return outputs.log_probs


def make_batches() -> list[TrainBatch]:
    """Eight ragged rows, then two."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows in (8, 2):
        lengths = torch.randint(3, 14, (rows,), generator=generator).tolist()
        tokens = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]
        samples = [Sample(tokens=row, loss_mask=[0.0] + [1.0] * (len(row) - 1)) for row in tokens]
        batch = collate_samples(samples, pad_id=0)
        found.append(replace(batch, loss_weights=token_mean(batch)))
    return found


def make_scored_batch() -> TrainBatch:
    """Eight ragged rows in two groups, with rewards."""
    generator = torch.Generator().manual_seed(4)
    samples = []
    for i in range(8):
        tokens = torch.randint(3, 60, (int(torch.randint(3, 14, (1,), generator=generator)),), generator=generator).tolist()
        mask, log_probs = [0.0] + [1.0] * (len(tokens) - 1), [0.0] + [-4.0] * (len(tokens) - 1)
        samples.append(Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=log_probs, reward=i % 3 / 2, index=i, group_index=i // 4))
    return collate_samples(samples, pad_id=0)


def record_updates(backend, batch: TrainBatch) -> dict:
    """Train on a batch in two epochs of three updates; the metrics, and what the updates saw of all rows but one, by the row."""
    seen = []
    record = RecordRequest(rows=tuple(row for row in range(batch.num_rows) if row != 2), on_update=seen.append)
    plan = UpdatePlan(num_epochs=2, num_minibatches=3, max_tokens_per_microbatch=24, record=record)
    metrics = trio.run(train_on_rollouts, backend, batch, grpo(clip_low=0.01, clip_high=0.01), plan)
    metrics.pop("zero_gradient_fraction", None)  # backends of several ranks run every backward pass
    lengths = batch.lengths.tolist()
    columns = {
        f"{row} {name}": column[: lengths[row]].tolist() for row, columns in sorted(seen[0].items()) for name, column in columns.items()
    }
    return {"metrics": metrics, "columns": columns}


def check_records(found: dict, expected: dict) -> None:
    """Compare results of record_updates."""
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    columns = expected["columns"]
    assert found["columns"].keys() == columns.keys() >= {"0 log_prob", "1 ratio", "5 clip_low"}
    for name, column in columns.items():
        assert found["columns"][name] == pytest.approx(column, abs=1e-5), name
    assert any(sum(column) for name, column in columns.items() if "clip" in name), "nothing was clipped"


def fail_after_two(seen: list, stream) -> None:
    """A consumer of weights that goes wrong."""
    for name, _ in stream:
        seen.append(name)
        if len(seen) == 2:
            raise ZeroDivisionError("the engine is gone")
