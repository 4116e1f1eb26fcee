"""Traffic of a run: bytes that each process receives in a step, a weight sync and a batch of rollouts. Pure functions.

With FSDP each rank receives, for a model of P parameters in n shards, b bytes per parameter of gathered layers (2 in bfloat16), 4 for the
root, and 4 for summed gradients (Rajbhandari et al. 2020, section 7.2: 3 P in total with stage 3, against 2 P of an all-reduce):

    all-gather before the forward pass     (n - 1) / n  b P
    all-gather before the backward pass    (n - 1) / n  b (P - root)   full_shard and hybrid_shard: the root stays; with shard_grad_op, all
    reduce-scatter of gradients            (n - 1) / n  4 P
    all-reduce over m replicas             2 (m - 1) / m  4 P / n      hybrid_shard and no_shard

for each micro-batch: gradients are summed after every backward pass, since keeping whole gradients would defeat sharding. So fewer and
larger micro-batches mean less traffic, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from integration.dry_run.memory import FLOAT, Sharding, Training
from integration.dry_run.sizes import ModelSizes

ROW_BYTES = 36  # bytes of a token of a batch: id, entries of masks and weights, two or three log-probs, advantage

ROW_BYTES_PER_S = 150e6  # bytes/s that rank 0 packs and sends: 2.5 to 5 ms for 16,384 tokens, see docs/distributed.md


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidths at which one process receives while all others do, in bytes per second."""

    node: float = 200e9  # within a node: about half of the 450 GB/s of NVLink 4 per direction
    network: float = 25e9  # between nodes: half of 400 Gbit/s per GPU
    ranks_per_node: int = 8  # processes per node

    def bandwidth(self, num_ranks: int) -> float:
        """Return the bandwidth of a collective over neighboring ranks: a ring is as fast as its slowest link."""
        return self.node if num_ranks <= self.ranks_per_node else self.network


@dataclass(frozen=True)
class Transfer:
    """A transfer of data to one process."""

    name: str
    size: int  # bytes
    seconds: float  # time on the links


def pass_traffic(sizes: ModelSizes, training: Training, links: Links, *, with_gradient: bool = True) -> list[Transfer]:
    """Return the transfers of one rank for one micro-batch. with_gradient: False = only a forward pass, as for old log-probs."""
    sharding = training.sharding
    if sharding is None:
        return []
    shards, replicas = sharding.shards, sharding.replicas
    in_layers = sizes.num_parameters - sizes.root_parameters
    gathered = training.width * in_layers + FLOAT * sizes.root_parameters
    received = (shards - 1) / shards
    trained = sizes.num_parameters if training.adapters is None else training.adapters.num_parameters
    again = 0 if sharding.keeps_layers else training.width * in_layers
    inside = links.bandwidth(shards)
    across = links.bandwidth(sharding.num_ranks)
    sizes_of = {"all-gather, forward": received * gathered}
    if with_gradient:
        sizes_of["all-gather, backward"] = received * again
        sizes_of["reduce-scatter of gradients"] = received * FLOAT * trained
        sizes_of["all-reduce over replicas"] = 2 * (replicas - 1) / replicas * FLOAT * trained / shards
    return [
        Transfer(name, ceil(size), size / (across if name.startswith("all-reduce") else inside)) for name, size in sizes_of.items() if size
    ]


def sync_traffic(sizes: ModelSizes, *, sharding: Sharding | None, links: Links, num_engines: int, width: int = FLOAT) -> list[Transfer]:
    """Return the transfers of one weight sync: shards gathered tensor by tensor, then whole weights to each engine.

    Args:
        num_engines: processes that receive the weights; 0 = the engine in the process of rank 0.
        width: bytes per weight sent.
    """
    transfers: list[Transfer] = []
    if sharding is not None and sharding.shards > 1:
        gathered = (sharding.shards - 1) / sharding.shards * FLOAT * sizes.num_parameters
        transfers.append(Transfer("gathered on every rank", ceil(gathered), gathered / links.bandwidth(sharding.shards)))
    if num_engines:
        size = width * sizes.num_parameters
        transfers.append(Transfer("to each engine", size, size / links.network))
    return transfers


def rows_traffic(tokens: int, *, num_ranks: int) -> Transfer:
    """Return the transfer of a batch of `tokens` tokens from rank 0 to all others, each its own rows, through sockets of the host."""
    size = ROW_BYTES * tokens * (num_ranks - 1) / num_ranks
    return Transfer("rows", ceil(size), size / ROW_BYTES_PER_S)


def count_microbatches(tokens: int, *, max_tokens: int, num_ranks: int) -> int:
    """Return the passes of each rank for `tokens` tokens of all ranks together; at least 1."""
    return max(1, ceil(tokens / (max_tokens * num_ranks)))
