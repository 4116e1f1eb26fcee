"""What each of several ranks does for test_fsdp.py and test_distributed.py: everything once, its findings as JSON.

Rank 0 also computes with one process what the ranks compute together.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollouts.algorithms import decoupled, grpo, ppo
from rollouts.backends.distributed import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather_objects,
    init_distributed,
    leave_distributed,
    masked_normalization,
    masked_whiten,
)
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reference_backend
from rollouts.backends.fsdp_config import FSDPConfig
from rollouts.backends.fsdp_factory import (
    create_fsdp_backend,
    create_fsdp_critic_backend,
    create_fsdp_reference_backend,
    create_fsdp_reward_model_backend,
)
from rollouts.backends.reward_models import create_reward_model_backend
from rollouts.batching import collate_samples, plan_sharded_microbatches, select_rows
from rollouts.errors import BackendError
from rollouts.loss_weights import token_mean
from rollouts.losses import sft_loss, value_loss
from rollouts.preferences import pair_mean, score_loss
from rollouts.statistics import whiten
from rollouts.testing import create_tiny_model
from rollouts.training_steps import merge_step_metrics
from rollouts.types import Sample

MAX_TOKENS = 24  # of a micro-batch of one process: every step has several


def make_model(seed: int = 0):
    return create_tiny_model(vocab_size=32, hidden_size=16, num_layers=2, seed=seed)


def make_batch(step: int, num_rows: int | None = None):
    """Ragged rows, one alone every fourth step; temperatures and rows of several contexts in some steps."""
    generator = torch.Generator().manual_seed(step)
    num_rows = num_rows or (1 if step % 4 == 2 else 6)
    samples = []
    for i in range(num_rows):
        n = int(torch.randint(2, 14, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 32, (n,), generator=generator).tolist())
        starts = (n // 2,) if step % 3 == 1 and n >= 4 else ()
        mask = tuple(0.0 if t in (0, *starts) else 1.0 for t in range(n))
        log_probs = tuple((-3.4 + 0.2 * torch.randn(n, generator=generator) * torch.tensor(mask)).tolist())
        samples.append(
            Sample(
                tokens=tokens, loss_mask=mask, index=i, group_index=i // 3, reward=float(torch.rand(1, generator=generator)),
                rollout_log_probs=log_probs, context_starts=starts, temperature=0.7 if step % 4 == 1 else 1.0,
            )
        )  # fmt: skip
    return collate_samples(samples)


def select(name):
    return lambda outputs: getattr(outputs, name)


def optimizer_step(backend, batch, loss, weigh, *, with_entropy=False):
    """What training_steps.submit_optimizer_step does, without a loop round it."""
    batch = replace(batch, loss_weights=weigh(batch))
    plan = plan_sharded_microbatches(batch.lengths.tolist(), max_tokens=MAX_TOKENS, num_shards=getattr(backend, "num_shards", 1))
    parts = [backend.forward_backward(select_rows(batch, rows), loss, with_entropy=with_entropy).value for rows in plan]
    return merge_step_metrics(parts) | backend.optim_step().value


def train(num_steps, algorithm, policy, critic=None, reference=None):
    """Steps of an algorithm, every column computed by the backends; what the metrics were."""
    history = []
    for step in range(num_steps):
        batch = make_batch(step)
        if "ref_log_probs" in algorithm.requires:
            batch = replace(batch, ref_log_probs=reference.forward(batch, select("log_probs")).value)
        if "prox_log_probs" in algorithm.requires:
            batch = replace(batch, prox_log_probs=policy.forward(batch, select("log_probs")).value)
        if critic is not None:
            batch = replace(batch, values=critic.forward(batch, select("values")).value)
        batch = algorithm.estimate(batch)
        metrics = optimizer_step(policy, batch, algorithm.loss, algorithm.weigh, with_entropy="entropy" in algorithm.requires)
        if critic is not None:
            found = optimizer_step(critic, batch, value_loss, token_mean)
            metrics |= {f"critic_{name}": value for name, value in found.items()}
        history.append(metrics)
    return history


def train_sft(num_steps, backend):
    return [optimizer_step(backend, make_batch(step), sft_loss, token_mean) for step in range(num_steps)]


LR = 3e-3
ALGORITHMS = {
    "grpo": grpo(kl_coef=0.1, entropy_coef=0.01),
    "ppo": ppo(),
    "decoupled ppo": decoupled(ppo()),
}


def run_algorithms(ranks, num_steps):
    """Histories and largest difference of a weight, for each algorithm."""
    found = {}
    alone = ranks.rank == 0
    policy = create_fsdp_backend(make_model(), lr=LR, ranks=ranks)
    found["sft"] = {"ranks": train_sft(num_steps, policy)}
    if alone:
        single = create_pytorch_backend(make_model(), lr=LR)
        found["sft"]["single"] = train_sft(num_steps, single)
    compare_weights(found["sft"], policy, single if alone else None)
    for name, algorithm in ALGORITHMS.items():
        with_critic = "values" in algorithm.requires
        policy = create_fsdp_backend(make_model(), lr=LR, ranks=ranks)
        critic = create_fsdp_critic_backend(make_model(1), lr=LR, ranks=ranks) if with_critic else None
        reference = create_fsdp_reference_backend(make_model(2), ranks=ranks)
        found[name] = {"ranks": train(num_steps, algorithm, policy, critic, reference)}
        if alone:
            single = create_pytorch_backend(make_model(), lr=LR)
            single_critic = create_critic_backend(make_model(1), lr=LR) if with_critic else None
            found[name]["single"] = train(num_steps, algorithm, single, single_critic, create_reference_backend(make_model(2)))
        compare_weights(found[name], policy, single if alone else None)
        if with_critic:
            compare_weights(found[name], critic, single_critic if alone else None)
    return found


def compare_weights(found, sharded, single):
    weights = sharded.get_weights().value
    if single is not None:
        expected = single.get_weights().value
        difference = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
        found["weights"] = max(found.get("weights", 0.0), difference)


# -- what is sharded, and how


def look_inside(policy):
    """(sharded parameters, all parameters) at the moment of the loss, of the layers and of the rest; how often the first layer runs."""
    layer_names = {f"model.layers.{name}" for name, _ in policy.model.model.layers.named_parameters()}
    seen = {"layers": [0, 0], "rest": [0, 0], "layer_runs": 0}

    def count(module, args, output):
        seen["layer_runs"] += 1

    def loss(outputs, batch):
        for name, parameter in policy.model.named_parameters():
            part = seen["layers" if name in layer_names else "rest"]
            part[0] += isinstance(parameter, DTensor)
            part[1] += 1
        return sft_loss(outputs, batch)

    handle = policy.model.model.layers[0].self_attn.register_forward_hook(count)
    batch = make_batch(0)
    policy.forward_backward(replace(batch, loss_weights=token_mean(batch)), loss)
    handle.remove()
    gradients = [p.grad.full_tensor().norm().item() for p in policy.model.parameters()]
    held = sum(p.to_local().numel() for p in policy.model.parameters()) / sum(p.numel() for p in policy.model.parameters())
    return seen | {"gradients": gradients, "held": held, "units": sum(isinstance(m, FSDPModule) for m in policy.model.modules())}


CONFIGS = {
    "full_shard": FSDPConfig(),
    "shard_grad_op": FSDPConfig(sharding_strategy="shard_grad_op"),
    "no_shard": FSDPConfig(sharding_strategy="no_shard"),
    "two copies": FSDPConfig(sharding_strategy="hybrid_shard", ranks_per_replica=1),
    "one copy": FSDPConfig(sharding_strategy="hybrid_shard", ranks_per_replica=2),
    "checkpointing": FSDPConfig(gradient_checkpointing=True),
    "layers together": FSDPConfig(auto_wrap_min_params=10**6),
    "layers together, checkpointing": FSDPConfig(auto_wrap_min_params=10**6, gradient_checkpointing=True),
    "clip_grad": FSDPConfig(clip_grad=1e-3),
    "bfloat16": FSDPConfig(mixed_precision="bfloat16"),
}


def run_configs(ranks):
    """Of each configuration what is inside, two steps, and the weights after them."""
    found = {}
    for name, config in CONFIGS.items():
        policy = create_fsdp_backend(make_model(), lr=LR, config=config, ranks=ranks)
        found[name] = look_inside(policy)
        found[name]["gradient_dtypes"] = sorted({str(p.grad.dtype) for p in policy.model.parameters()})
        found[name]["steps"] = [policy.optim_step().value, *train_sft(1, policy)]
        found[name]["master_dtypes"] = sorted({str(p.dtype) for group in policy.optimizer.param_groups for p in group["params"]})
        found[name]["weights"] = {k: v.double().sum().item() for k, v in policy.get_weights().value.items()}
    return found


def run_state(ranks):
    """What this rank holds of parameters and optimizer state, and whether what is not finite is left out everywhere."""
    policy = create_fsdp_backend(make_model(), lr=LR, ranks=ranks)
    train_sft(1, policy)
    state = [x for entry in policy.optimizer.state.values() for x in entry.values() if x.dim() > 0]
    reference = create_fsdp_reference_backend(make_model(), ranks=ranks)
    found = {
        "parameters_are_sharded": all(isinstance(p, DTensor) for group in policy.optimizer.param_groups for p in group["params"]),
        "state_held": sum(x.to_local().numel() for x in state) / sum(x.numel() for x in state),
        "reference_held": sum(p.to_local().numel() for p in reference.model.parameters()),
        "reference_size": sum(p.numel() for p in reference.model.parameters()),
        "reference_trains": any(p.requires_grad for p in reference.model.parameters()),
        "reference_state": len(reference.optimizer.state),
    }
    before = policy.get_weights().value
    batch = make_batch(0)
    weights = token_mean(batch)
    weights[0] = weights[0] * float("inf")  # one row, which is on one rank
    policy.forward_backward(replace(batch, loss_weights=weights), sft_loss)
    found["skipped"] = policy.optim_step().value["update_skipped"]
    found["counts"] = [policy.counts.num_updates, policy.counts.num_skipped_in_a_row]
    after = policy.get_weights().value
    found["same_weights"] = all(torch.equal(after[name], before[name]) for name in before)
    policy.load_weights({name: value + 1 for name, value in before.items()})
    loaded = policy.get_weights().value
    found["loaded"] = all(torch.equal(loaded[name], before[name] + 1) for name in before)
    buckets = policy.gather_weights([spec.name for spec in policy.describe_weights().value]).value
    found["gathered"] = all(torch.equal(value, loaded[name]) for name, value in buckets.items())
    return found


def run_pairs(ranks):
    """A reward model on pairs, of which the ranks get 2 and 1."""
    batch = make_batch(0)
    batch = replace(batch, group_ids=torch.arange(6) // 2)
    backends = {"ranks": create_fsdp_reward_model_backend(make_model(), lr=LR, ranks=ranks)}
    if ranks.rank == 0:
        backends["single"] = create_reward_model_backend(make_model(), lr=LR)
    batch = replace(batch, loss_weights=pair_mean(batch))
    return {name: [b.forward_backward(batch, score_loss).value | b.optim_step().value for _ in range(2)] for name, b in backends.items()}


# -- exchanges


def run_exchanges(ranks):
    """What each function of distributed.py gives."""
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
        "gather_objects": gather_objects(ranks, {"rank": ranks.rank}),
        "unchanged": mine.tolist(),
        "whitened": float((whitened - whiten(x, mask)[rows]).abs().max()),
        "normalized": float((normalized - masked_normalization(x, mask)[rows]).abs().max()),
        "empty": float((empty - whiten(x, mask)).abs().max()) if ranks.rank == 0 else list(empty.shape),
        "again": init_distributed().rank,
    }


def run_failures(ranks, folder):
    """Rank 1 is too late for one exchange, and then ends. What rank 0 is told of both."""
    short = replace(ranks, timeout_s=0.5, group=dist.new_group(timeout=timedelta(seconds=0.5)))
    all_reduce(short, torch.ones(1))  # the connections of the group are there
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


def main(folder: Path, num_steps: int, *, all_checks: bool) -> None:
    """Joins the other ranks, does everything, and writes folder/rank_N.json."""
    ranks = init_distributed(timeout_s=60, init_method="env://")
    found = {"algorithms": run_algorithms(ranks, num_steps)}
    if all_checks:
        found |= {"configs": run_configs(ranks), "state": run_state(ranks), "pairs": run_pairs(ranks), "exchanges": run_exchanges(ranks)}
        found["failures"] = run_failures(ranks, folder)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    if not all_checks:
        barrier(ranks)
        leave_distributed()
