"""Program of each of two ranks for test_distributed.py, which runs every case once and writes its findings as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from rollouts.algorithms.statistics import whiten
from rollouts.backends.ranks.distributed import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather_values,
    init_distributed,
    leave_distributed,
    masked_normalization,
    masked_whiten,
)
from rollouts.errors import BackendError


def run_exchanges(ranks):
    """Return the result of each function of backends/ranks/distributed.py."""
    mine = torch.tensor([1.0, 2.0]) * (ranks.rank + 1)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    mask = (torch.arange(30).reshape(6, 5) % 3 > 0).float()
    rows = slice(0, 4) if ranks.rank == 0 else slice(4, 6)
    whitened, normalized = masked_whiten(ranks, x[rows], mask[rows]), masked_normalization(x[rows], mask[rows], ranks=ranks)
    empty = masked_whiten(ranks, x if ranks.rank == 0 else x[:0], mask if ranks.rank == 0 else mask[:0])
    barrier(ranks)
    return {
        "rank": [ranks.rank, ranks.world_size],
        "all_reduce": all_reduce(ranks, mine).tolist(),
        "all_gather": [part.tolist() for part in all_gather(ranks, mine)],
        "broadcast": broadcast(ranks, mine, source=1).tolist(),
        "gather_values": gather_values(ranks, {"rank": ranks.rank}),
        "unchanged": mine.tolist(),
        "whitened": float((whitened - whiten(x, mask)[rows]).abs().max()),
        "normalized": float((normalized - masked_normalization(x, mask)[rows]).abs().max()),
        "empty": float((empty - whiten(x, mask)).abs().max()) if ranks.rank == 0 else list(empty.shape),
        "again": init_distributed().rank,
    }


def run_failures(ranks, folder):
    """Let rank 1 be too late for one exchange and then end, and return the errors of rank 0."""
    short = replace(ranks, timeout_s=0.5, group=dist.new_group())
    all_reduce(short, torch.ones(1))  # the connections of the group are there
    _set_pg_timeout(timedelta(seconds=short.timeout_s), short.group)  # of what comes now
    mark = folder / "rank_0_was_told"
    if ranks.rank == 1:
        while not mark.exists():
            time.sleep(0.01)
        return {}
    found = {"late": explain(partial(all_reduce, short, torch.ones(1), operation="adding up the losses"))}
    mark.touch()
    found["lost"] = explain(partial(barrier, ranks, "waiting for the others"))
    return found


def explain(exchange):
    try:
        exchange()
    except BackendError as error:
        return str(error)
    return "nothing was raised"


def main(folder: Path) -> None:
    """Joins the other rank, does everything, and writes folder/rank_N.json."""
    ranks = init_distributed(timeout_s=60, init_method="env://")
    found = {"exchanges": run_exchanges(ranks), "failures": run_failures(ranks, folder)}
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    leave_distributed()
