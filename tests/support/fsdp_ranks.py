"""Program of each of several ranks for test_fsdp.py, which runs every case once and writes its findings as JSON.

Rank 0 also computes with one process what the ranks compute together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import trio
from rank_processes import record_updates
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss, value_loss
from rollouts.algorithms.preferences import pair_mean, score_loss
from rollouts.algorithms.presets import decoupled, gkd, grpo, ppo
from rollouts.backends.factory import (
    create_backend_with_scheduler,
    create_critic_backend,
    create_reference_backend,
    create_reward_model_backend,
)
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import (
    create_fsdp_backend,
    create_fsdp_critic_backend,
    create_fsdp_reference_backend,
    create_fsdp_reward_model_backend,
)
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.ranks.distributed import barrier, init_distributed, leave_distributed
from rollouts.batches import plan_sharded_microbatches, select_rows
from rollouts.config import BadNumbers
from rollouts.data.collate import collate_samples
from rollouts.errors import BackendError
from rollouts.testing import create_tiny_model
from rollouts.training.distillation.teachers import ModelTeacher
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.training.steps import merge_step_metrics
from rollouts.types import Sample

MAX_TOKENS = 24  # of a micro-batch of one process: every step has several


def make_model(seed: int = 0, num_layers: int = 1):
    return create_tiny_model(vocab_size=32, hidden_size=16, num_layers=num_layers, seed=seed)


def draw_step(step: int, num_rows: int | None = None):
    """Ragged rows, or one alone; temperatures, rows of several contexts and prompts that rows share in some steps."""
    generator = torch.Generator().manual_seed(step)
    num_rows = num_rows or (1 if step % 4 == 1 else 6)
    samples = []
    for i in range(num_rows):
        n = int(torch.randint(2, 14, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 32, (n,), generator=generator).tolist())
        tokens = (*(5, 6, 7, 8 + i // 3)[: 4 if step % 3 == 2 else 0], *tokens)
        n = len(tokens)
        starts = (n // 2,) if step % 3 == 0 and n >= 4 else ()
        mask = tuple(0.0 if t in (0, *starts) else 1.0 for t in range(n))
        log_probs = tuple((-3.4 + 0.2 * torch.randn(n, generator=generator) * torch.tensor(mask)).tolist())
        samples.append(
            Sample(
                tokens=tokens, loss_mask=mask, index=i, group_index=i // 3, reward=float(torch.rand(1, generator=generator)),
                rollout_log_probs=log_probs, context_starts=starts, temperature=0.7 if step % 4 in (1, 2) else 1.0,
            )
        )  # fmt: skip
    return replace(collate_samples(samples), skip_redundant=True)


def select(name):
    return lambda outputs: getattr(outputs, name)


def optimizer_step(backend, batch, loss, weigh, *, with_entropy=False):
    """Run one optimizer step as training.steps.submit_optimizer_step does, without a loop around it."""
    batch = replace(batch, loss_weights=weigh(batch))
    plan = plan_sharded_microbatches(batch.lengths.tolist(), max_tokens=MAX_TOKENS, num_shards=getattr(backend, "num_shards", 1))
    parts = [backend.forward_backward(select_rows(batch, rows), loss, with_entropy=with_entropy).value for rows in plan]
    metrics = merge_step_metrics(parts) | backend.optim_step().value
    metrics.pop("zero_gradient_fraction", None)  # backends of several ranks run every backward pass
    return metrics


def train(num_steps, algorithm, policy, critic=None, reference=None):
    """Steps of an algorithm, every column computed by the backends; what the metrics were."""
    history = []
    for step in range(num_steps):
        batch = draw_step(step)
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
    return [optimizer_step(backend, draw_step(step), sft_loss, token_mean) for step in range(num_steps)]


SETTINGS = {"lr": 3e-3, "eps": 1e-5, "max_grad_norm": 0.3}
"""Settings of AdamW. Their eps is above rounding: with a smaller one, a gradient of rounding errors moves a weight as far as any other."""

create_single_backend = partial(create_backend_with_scheduler, schedule="constant", total_steps=1, **SETTINGS)

ALGORITHMS = {
    "grpo": grpo(kl_coef=0.1, entropy_coef=0.01),
    "ppo": ppo(),
    "decoupled ppo": decoupled(ppo()),
}


def run_algorithms(ranks, num_steps, names):
    """Histories and largest difference of a weight, for each algorithm."""
    found = {}
    alone = ranks.rank == 0
    policy = create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks)
    found["sft"] = {"ranks": train_sft(num_steps, policy)}
    if alone:
        single = create_single_backend(make_model())
        found["sft"]["single"] = train_sft(num_steps, single)
    compare_weights(found["sft"], policy, single if alone else None)
    for name in names:
        algorithm = ALGORITHMS[name]
        with_critic = "values" in algorithm.requires
        policy = create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks)
        critic = create_fsdp_critic_backend(make_model(1), **SETTINGS, ranks=ranks) if with_critic else None
        reference = create_fsdp_reference_backend(make_model(2), ranks=ranks)
        found[name] = {"ranks": train(num_steps, algorithm, policy, critic, reference)}
        if alone:
            single = create_single_backend(make_model())
            single_critic = create_critic_backend(make_model(1), **SETTINGS) if with_critic else None
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
    batch = draw_step(0)
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
    "layers together, checkpointing": FSDPConfig(auto_wrap_min_params=10**6, gradient_checkpointing=True),
    "clip_grad": FSDPConfig(clip_grad=1e-3),
    "bfloat16": FSDPConfig(mixed_precision="bfloat16"),
}


def run_configs(ranks):
    """Return the internals of each configuration, an update, and the weights after it."""
    found = {}
    for name, config in CONFIGS.items():
        policy = create_fsdp_backend(make_model(num_layers=2), **SETTINGS, config=config, ranks=ranks)
        found[name] = look_inside(policy)
        found[name]["gradient_dtypes"] = sorted({str(p.grad.dtype) for p in policy.model.parameters()})
        found[name]["step"] = policy.optim_step().value
        found[name]["master_dtypes"] = sorted({str(p.dtype) for group in policy.optimizer.param_groups for p in group["params"]})
        found[name]["weights"] = {k: v.double().sum().item() for k, v in policy.get_weights().value.items()}
    return found


def run_state(ranks):
    """Return this rank's shares of parameters and optimizer state, and whether updates that are not finite are skipped everywhere."""
    policy = create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks)
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
    batch = draw_step(0)
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


def add_to_loss(outputs, batch, value):
    """The loss of SFT plus a constant: its gradient is as it was."""
    found = sft_loss(outputs, batch)
    return found._replace(loss=found.loss + value)


def spoil(policy, kind):
    """Make a number bad on this rank alone, after a forward_backward: of the gradient, or of a parameter."""
    parameter = next(p for p in policy.model.parameters() if p.grad is not None and p.to_local().numel())
    (parameter.grad if kind == "gradient" else parameter.data).to_local().view(-1)[0] = float("nan")


def run_bad(ranks):
    """Let a number go bad on rank 1 alone. Returns, by kind and policy: metrics or error, counts, whether the weights are as before."""
    found = {}
    batch = draw_step(0)
    batch = replace(batch, loss_weights=token_mean(batch))
    for kind, action in (("gradient", "skip"), ("gradient", "stop"), ("loss", "skip"), ("loss", "stop"), ("parameter", "")):
        policy_of = {} if kind == "parameter" else {"bad_numbers": BadNumbers(**{kind: action})}
        policy = create_fsdp_backend(make_model(), **SETTINGS, **policy_of, ranks=ranks)
        before = policy.get_weights().value
        own = float("inf") if kind == "loss" and ranks.rank == 1 else 0.0
        policy.forward_backward(batch, partial(add_to_loss, value=own))
        if kind != "loss" and ranks.rank == 1:
            spoil(policy, kind)
        entry = found[f"{kind} {action}"] = {}
        try:
            entry["metrics"] = {name: repr(value) for name, value in policy.optim_step().value.items()}
        except BackendError as error:
            entry["error"] = [type(error).__name__, str(error)]
        entry["counts"] = [policy.counts.num_updates, policy.counts.num_skipped_in_a_row]
        if kind != "parameter":
            after = policy.get_weights().value
            entry["same weights"] = all(torch.equal(after[name], before[name]) for name in before)
    for action in ("drop", "skip", "stop"):
        policy = create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks)
        entry = found[f"log_prob {action}"] = {}
        try:
            entry["metrics"] = {name: repr(value) for name, value in train_with_bad_row(policy, BadNumbers(log_prob=action)).items()}
        except BackendError as error:
            entry["error"] = [type(error).__name__, str(error)]
        entry["counts"] = [policy.counts.num_updates, policy.counts.num_skipped_in_a_row]
    return found


def train_with_bad_row(backend, policy):
    """Train on a batch of RL of which the engine's log-prob of one token, of a row of one rank, is -inf."""
    batch = draw_step(0)
    log_probs = batch.rollout_log_probs.clone()
    log_probs[5, 1] = float("-inf")
    batch = replace(batch, rollout_log_probs=log_probs)
    return trio.run(train_on_rollouts, backend, batch, grpo(), UpdatePlan(max_tokens_per_microbatch=MAX_TOKENS, bad_numbers=policy))


def run_pairs(ranks):
    """A reward model on pairs, of which the ranks get 2 and 1."""
    batch = draw_step(0)
    batch = replace(batch, group_ids=torch.arange(6) // 2)
    backends = {"ranks": create_fsdp_reward_model_backend(make_model(), **SETTINGS, ranks=ranks)}
    if ranks.rank == 0:
        backends["single"] = create_reward_model_backend(make_model(), **SETTINGS)
    batch = replace(batch, loss_weights=pair_mean(batch))
    return {name: [b.forward_backward(batch, score_loss).value | b.optim_step().value for _ in range(2)] for name, b in backends.items()}


def run_distillation(ranks):
    """Teachers with more embeddings than the policy, which name tokens of the policy: what they say, and two steps of gkd on it."""
    teach = partial(create_tiny_model, vocab_size=40, hidden_size=16, num_layers=1, seed=2)
    tops = {"num_tops": 5, "tops_vocab_size": 32}
    pairs = {
        "ranks": (create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks), create_fsdp_reference_backend(teach(), **tops, ranks=ranks))
    }
    if ranks.rank == 0:
        pairs["single"] = (create_single_backend(make_model()), create_reference_backend(teach(), **tops))
    found = {}
    for name, (policy, teacher) in pairs.items():
        entry = found[name] = {"columns": [], "metrics": []}
        for step in range(2):
            algorithm = gkd(beta=0.5 * step, reward_coef=1.0)
            batch = draw_step(2 * step)
            fill = partial(ModelTeacher(backend=teacher).fill, max_tokens=MAX_TOKENS)
            batch = trio.run(fill, batch, (), {"teacher_tops"})
            entry["columns"].append([batch.teacher_log_probs.tolist(), batch.teacher_tops.tolist(), batch.teacher_ids.tolist()])
            entry["metrics"].append(optimizer_step(policy, algorithm.estimate(batch), algorithm.loss, algorithm.weigh))
    compare_weights(found, pairs["ranks"][0], pairs["single"][0] if ranks.rank == 0 else None)
    return found


def run_records(ranks):
    """Return what updates saw of the tokens of some rows, and whether a backend has kept any of it."""
    batch = draw_step(0)
    backends = {"ranks": create_fsdp_backend(make_model(), **SETTINGS, ranks=ranks)}
    if ranks.rank == 0:
        backends["single"] = create_single_backend(make_model())
    found = {}
    for name, backend in backends.items():
        found[name] = record_updates(backend, batch) | {"left": len(backend.take_recorded().value)}
    return found


def run_late(ranks, folder):
    """Let rank 1 miss two passes, and return the errors of rank 0."""
    short = replace(ranks, timeout_s=1.0, group=dist.new_group())
    mesh = DeviceMesh.from_group(short.group, "cpu", mesh_dim_names=("shard",))
    backends = [FSDPTrainingBackend(make_model(), partial(create_adamw_optimizer, lr=1e-3), ranks=short, mesh=mesh) for _ in range(2)]
    _set_pg_timeout(timedelta(seconds=short.timeout_s), short.group)  # of what comes now
    mark = folder / "rank_0_was_told"
    batch = draw_step(0)
    batch = replace(batch, loss_weights=token_mean(batch))
    if ranks.rank == 1:
        while not mark.exists():
            time.sleep(0.01)
        return []
    found = [explain(partial(backends[0].forward, batch, select("log_probs")))]
    found.append(explain(partial(backends[1].forward_backward, batch, sft_loss)))
    mark.touch()
    return found


def explain(operation):
    try:
        operation()
    except BackendError as error:
        return str(error)
    return "nothing was raised"


def main(folder: Path, num_steps: int, names: Sequence[str], *, all_checks: bool) -> None:
    """Joins the other ranks, does everything, and writes folder/rank_N.json."""
    ranks = init_distributed(timeout_s=60, init_method="env://")
    found = {"algorithms": run_algorithms(ranks, num_steps, names)}
    if all_checks:
        found |= {"configs": run_configs(ranks), "state": run_state(ranks), "pairs": run_pairs(ranks), "records": run_records(ranks)}
        found["distillation"] = run_distillation(ranks)
        found["bad"] = run_bad(ranks)
        found["late"] = run_late(ranks, folder)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(found))
    barrier(ranks)
    leave_distributed()
