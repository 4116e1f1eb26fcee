"""Numbers that are none, at places that a loss must not read and at places that it reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import torch
import trio
from torch import Tensor

from benchmarks.reliability.experiment import Amount, Outcome
from rollouts.algorithms.presets import cispo, dapo, decoupled, dppo, dr_grpo, gmpo, gpg, grpo, gspo, ppo, reinforce, rloo, sapo
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.config import BadNumbers
from rollouts.errors import BackendError
from rollouts.testing import create_tiny_model
from rollouts.types import Algorithm, TokenOutputs, TrainBatch

ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": grpo(kl_coef=0.1), "dapo": dapo(), "dr_grpo": dr_grpo(8), "gspo": gspo(), "gmpo": gmpo(), "cispo": cispo(), "sapo": sapo(),
    "dppo": dppo(), "rloo": rloo(), "reinforce": reinforce(), "gpg": gpg(), "ppo": ppo(), "decoupled": decoupled(dapo()),
}  # fmt: skip
BAD = (math.nan, math.inf, -math.inf, -1e4)
COLUMNS = ("rollout_log_probs", "old_log_probs", "prox_log_probs", "ref_log_probs", "values", "advantages")
ROWS, WIDTH = 4, 6


def _draw_batch(generator: torch.Generator, algorithm: Algorithm) -> tuple[Tensor, TrainBatch]:
    def draw() -> Tensor:
        return -torch.rand(ROWS, WIDTH, generator=generator)

    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.6
    mask[:, 0], mask[:, -1] = False, True
    batch = TrainBatch(
        tokens=torch.randint(3, 64, (ROWS, WIDTH), generator=generator), lengths=torch.full((ROWS,), WIDTH), loss_mask=mask.float(),
        rewards=torch.randn(ROWS, generator=generator), group_ids=torch.arange(ROWS) // 2, trainable=torch.ones(ROWS, dtype=torch.bool),
        rollout_log_probs=draw(), old_log_probs=draw(), prox_log_probs=draw(), ref_log_probs=draw(), values=draw(),
        policy_versions=torch.ones(ROWS), weight_versions=torch.zeros(ROWS, WIDTH, dtype=torch.int64),
    )  # fmt: skip
    batch = algorithm.estimate(batch)
    return draw(), replace(batch, loss_weights=algorithm.weigh(batch))


def _compute(algorithm: Algorithm, log_probs: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    entropy = torch.ones_like(leaf) * 0.5
    loss = algorithm.loss(TokenOutputs(log_probs=leaf, entropy=entropy, values=torch.zeros_like(leaf)), batch).loss
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return loss.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def _spoil(column: Tensor, places: Tensor, draw: Random) -> Tensor:
    return torch.where(places, torch.tensor(draw.choice(BAD)), column)


def _try_masked(name: str, seed: int, draw: Random) -> tuple[bool, bool]:
    """Put bad numbers at masked places. Returns whether loss and gradient stay bit-equal, ours and those of the naive surrogate."""
    algorithm = ALGORITHMS[name]
    log_probs, batch = _draw_batch(torch.Generator().manual_seed(seed), algorithm)
    masked = batch.loss_mask == 0
    spoiled = {c: _spoil(value, masked, draw) for c in COLUMNS if isinstance(value := getattr(batch, c), Tensor)}
    dirty = replace(batch, **spoiled)  # type: ignore[arg-type]
    dirty_log_probs = _spoil(log_probs, masked, draw)
    pairs = zip(_compute(algorithm, log_probs, batch), _compute(algorithm, dirty_log_probs, dirty), strict=True)
    naive = zip(_compute_naively(log_probs, batch), _compute_naively(dirty_log_probs, dirty), strict=True)
    return all(torch.equal(*pair) for pair in pairs), all(torch.equal(*pair) for pair in naive)


def _compute_naively(log_probs: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Compute the surrogate that masks after the exponential, as many programs do."""
    assert batch.old_log_probs is not None and batch.advantages is not None
    leaf = log_probs.clone().requires_grad_()
    ratio = torch.exp(leaf - batch.old_log_probs)
    loss = torch.where(batch.loss_mask > 0, -ratio * batch.advantages, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _flatten(backend: PyTorchTrainingBackend, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    weights = trio.run(backend.get_weights().result)
    return [tensor.clone() for tensor in (*weights.values(), *moments)]


def _try_unmasked(seed: int, draw: Random) -> Counter[str]:
    """Put a bad number at a place that counts: the update must be skipped, and after some in a row the run must end."""
    algorithm, found = ALGORITHMS["grpo"], Counter[str]()
    model = create_tiny_model(num_layers=1, seed=seed)
    optimizer = create_adamw_optimizer(model, lr=1e-2)
    backend = PyTorchTrainingBackend(model, optimizer, bad_numbers=BadNumbers(max_skipped=3))

    async def update(batch: TrainBatch) -> dict[str, float]:
        await backend.forward_backward(batch, algorithm.loss).result()
        return await backend.optim_step().result()

    _, batch = _draw_batch(torch.Generator().manual_seed(seed), algorithm)
    trio.run(update, batch)
    before = _flatten(backend, optimizer)
    assert batch.advantages is not None
    places = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    places[draw.randrange(ROWS), WIDTH - 1] = True
    bad = replace(batch, advantages=torch.where(places, torch.tensor(draw.choice(BAD[:3])), batch.advantages))
    try:
        for _ in range(3):
            found["updates skipped and counted"] += trio.run(update, bad)["update_skipped"] == 1.0
            same = zip(before, _flatten(backend, optimizer), strict=True)
            found["parameters and moments unchanged"] += all(torch.equal(*pair) for pair in same)
    except BackendError:
        found["runs ended after skips in a row"] += 1
    return found


def spoil_numbers(amount: Amount) -> Outcome:
    """Spoil numbers at masked places for every loss, and at places that count."""
    cases, runs = amount.count(130, 1000), amount.count(5, 40)
    draw, names = amount.draw, list(ALGORITHMS)
    changed = naive = 0
    for case in range(cases):
        ours, theirs = _try_masked(names[case % len(names)], draw.getrandbits(32), draw)
        changed, naive = changed + (not ours), naive + (not theirs)
    found: Counter[str] = Counter()
    for _ in range(runs):
        found.update(_try_unmasked(draw.getrandbits(16), draw))
    measured = {"masked cases that change a loss or gradient": changed, **found}
    skips, ended = found["updates skipped and counted"], found["runs ended after skips in a row"]
    return Outcome(
        size=f"{cases} cases over {len(names)} losses, {runs} runs of bad updates", measured=measured,
        holds=changed == 0 and skips == found["parameters and moments unchanged"] == 2 * runs and ended == runs,
        control={"masked cases that change the naive loss or gradient": naive}, control_fails=naive > 0,
    )  # fmt: skip
