"""Prompts that rows of a group share are computed once, and rows without a gradient take no backward pass: same numbers, fewer passes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import make_row

from rollouts.algorithms.kl import k2
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import KLTerm, clipped_policy_loss, value_loss
from rollouts.algorithms.presets import grpo, recomputed
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.batches import SHARED_FROM, find_shared_prompts, plan_microbatches, plan_shared_microbatches, select_rows
from rollouts.data.collate import collate_samples
from rollouts.models.forward.outputs import compute_log_probs
from rollouts.models.forward.packing import pack_batch, pack_padded
from rollouts.models.forward.passes import run_rows
from rollouts.models.prepare import can_share_prompts
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.types import LossOutput, TokenOutputs, TrainBatch

CPU = torch.device("cpu")
GROUPS = st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=3)
"""(tokens of the prompt, tokens of each response) of each group."""


def draw_groups(groups: list[tuple[int, list[int]]], seed: int = 0, **fields: Any) -> TrainBatch:
    """Draw a batch whose rows are in any order, with random weights of all tokens, prompts included; skip_redundant is set."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for group, (num_prompt, responses) in enumerate(groups):
        prompt = torch.randint(3, 64, (num_prompt,), generator=draw).tolist()
        for length in responses:
            answer = torch.randint(3, 64, (length,), generator=draw).tolist()
            mask = (0.0, *(1.0,) * (num_prompt + length - 1)) if num_prompt + length > 1 else (0.0,)
            reward = float(torch.randint(2, (), generator=draw))
            samples.append(make_row(prompt + answer, loss_mask=mask, group_index=group, reward=reward, **fields))
    order = torch.randperm(len(samples), generator=draw).tolist()
    batch = collate_samples([replace(samples[place], index=i) for i, place in enumerate(order)])
    weights = torch.randn(batch.tokens.shape, generator=draw) * (batch.loss_mask > 0)
    return replace(batch, loss_weights=weights, skip_redundant=True)


def share_slowly(batch: TrainBatch) -> list[int]:
    """find_shared_prompts in naive loops."""
    rows = [batch.tokens[i, :n].tolist() for i, n in enumerate(batch.lengths.tolist())]
    groups = batch.group_ids.tolist()
    shared = []
    for i, row in enumerate(rows):
        group = [other for j, other in enumerate(rows) if groups[j] == groups[i]]
        count = 0
        while all(count < len(other) - 1 and other[count] == row[count] for other in group):
            count += 1
        shared.append(count if len(group) > 1 and max(map(len, group)) <= SHARED_FROM * count else 0)
    return shared


def weighted_sum(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
    """Weigh log-probs and entropies of all tokens, so that each has a gradient of its own."""
    assert batch.loss_weights is not None
    assert outputs.entropy is not None
    return LossOutput((batch.loss_weights * (outputs.log_probs + 0.3 * outputs.entropy)).sum(), {})


def create_windowed_model() -> Any:
    """Create a model whose layers alternate between sliding windows of 4 tokens and whole rows."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=4, layer_types=kinds)
    return Gemma3ForCausalLM(config).eval()


MODELS = {"qwen3": create_tiny_model, "llama": partial(create_tiny_model, architecture="llama"), "windows": create_windowed_model}


def differentiate_rows(model: Any, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute log-probs and the gradient of weighted_sum by transformers' own passes over one row at a time."""
    log_probs = torch.zeros(batch.tokens.shape)
    total = torch.zeros(())
    for i, length in enumerate(batch.lengths.tolist()):
        logits = model(input_ids=batch.tokens[i : i + 1, :length]).logits[0].log_softmax(-1)
        own = logits[:-1].gather(1, batch.tokens[i, 1:length, None])[:, 0]
        entropy = -(logits[:-1].exp() * logits[:-1]).sum(-1)
        total = total + (batch.loss_weights[i, 1:length] * (own + 0.3 * entropy)).sum()
        log_probs[i, 1:length] = own.detach()
    model.zero_grad()
    total.backward()
    return log_probs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
def test_shared_prompts_give_the_log_probs_and_gradients_of_each_row_by_itself(kind):
    plain, backend = MODELS[kind](), create_pytorch_backend(MODELS[kind](), lr=1e-3)
    assert BackendFeature.REDUNDANCY in get_backend_features(backend)

    @given(GROUPS, st.integers(0, 99), st.sampled_from([1000, 30, 12]))
    def check(groups, seed, max_tokens):
        batch = draw_groups(groups, seed)
        expected, gradients = differentiate_rows(plain, batch)
        found = backend.forward(batch, lambda outputs: outputs.log_probs).value
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        backend.model.zero_grad()
        shared = find_shared_prompts(batch)
        lengths = batch.lengths.tolist()
        plan = plan_microbatches(lengths, max_tokens=max_tokens)
        plan = plan if shared is None else plan_shared_microbatches(lengths, shared, max_tokens=max_tokens)
        for rows in plan:
            backend.forward_backward(select_rows(batch, rows), weighted_sum, with_entropy=True)
        found = {name: p.grad for name, p in backend.model.named_parameters() if p.grad is not None}
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)

    check()


@given(GROUPS, st.integers(0, 99))
def test_shared_prompts_are_the_longest_common_beginnings_of_groups(groups, seed):
    batch = draw_groups(groups, seed)
    shared = find_shared_prompts(batch)
    assert ([0] * batch.num_rows if shared is None else shared.lengths.tolist()) == share_slowly(batch)


@given(GROUPS, st.integers(0, 99))
def test_packed_tokens_are_the_distinct_ones_and_come_back_in_every_row(groups, seed):
    batch = draw_groups(groups, seed)
    packed, shared = pack_batch(batch, CPU, share=True), share_slowly(batch)
    groups_of_rows = batch.group_ids.tolist()
    saved = sum(shared) - sum({group: shared[i] for i, group in enumerate(groups_of_rows)}.values())
    assert packed.tokens.numel() == int(batch.lengths.sum()) - saved
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    assert packed.unpack(packed.tokens).equal(batch.tokens * real)
    assert packed.unpack(packed.position_ids).equal(torch.arange(batch.tokens.shape[1]) * real)
    assert packed.shift.targets.equal(packed.tokens[packed.shift.positions])
    predictors = torch.full_like(packed.tokens, -1).index_copy(0, packed.shift.positions, packed.shift.predictors)
    columns = packed.unpack(torch.arange(packed.tokens.numel()))
    for i, length in enumerate(batch.lengths.tolist()):
        assert predictors[columns[i, 1:length]].equal(columns[i, : length - 1])  # each token by the one before it in its row


@given(GROUPS, st.integers(0, 99), st.integers(1, 60))
def test_a_plan_counts_a_shared_prompt_once_and_never_needs_more_microbatches(groups, seed, max_tokens):
    batch = draw_groups(groups, seed)
    shared, lengths = find_shared_prompts(batch), batch.lengths.tolist()
    if shared is None:
        return
    plan = plan_shared_microbatches(lengths, shared, max_tokens=max_tokens)
    assert sorted(row for rows in plan for row in rows) == list(range(batch.num_rows))
    assert len(plan) <= len(plan_microbatches(lengths, max_tokens=max_tokens))
    for rows in plan:
        packed = pack_batch(select_rows(batch, rows), CPU, share=True)
        assert packed.tokens.numel() <= max_tokens or len(rows) == 1


def test_a_plan_of_groups_needs_fewer_microbatches_than_one_of_rows():
    batch = draw_groups([(6, [2] * 4)] * 4)
    shared, lengths = find_shared_prompts(batch), batch.lengths.tolist()
    assert shared is not None
    plan = plan_shared_microbatches(lengths, shared, max_tokens=14)  # a prompt and four responses
    assert len(plan) == 4 and len(plan_microbatches(lengths, max_tokens=14)) == 16
    assert all(batch.group_ids[rows].unique().numel() == 1 for rows in plan)
    assert len(plan_shared_microbatches(lengths, shared, max_tokens=10)) == 8  # groups are cut in halves


UNSHARED = {
    "not allowed": lambda batch: {"skip_redundant": False},
    "contexts": lambda batch: {"context_ids": torch.zeros_like(batch.tokens)},
    "replayed experts": lambda batch: {"routed_experts": torch.zeros((*batch.tokens.shape, 1, 2), dtype=torch.int16)},
    "load balance": lambda batch: {"router_balance": torch.ones_like(batch.rewards)},
    "temperatures": lambda batch: {"temperatures": 1.0 + torch.arange(batch.num_rows)},
    "another second token": lambda batch: {
        "tokens": batch.tokens.clone().index_copy_(1, torch.tensor([1]), torch.arange(batch.num_rows)[:, None])
    },
}


@pytest.mark.parametrize("case", UNSHARED)
def test_where_sharing_would_change_more_than_rounding_rows_are_packed_by_themselves(case):
    batch = draw_groups([(3, [20, 20]), (3, [20, 20])])
    assert find_shared_prompts(batch) is not None
    changed = replace(batch, **UNSHARED[case](batch))
    packed, plain = pack_batch(changed, CPU, share=True), pack_padded(changed.tokens, changed.lengths, changed.context_ids)
    assert packed.continuations is None
    assert packed.tokens.equal(plain.tokens) and packed.by_length.equal(plain.by_length) and packed.same_length == plain.same_length


def test_a_group_of_one_temperature_shares_its_prompt_and_is_tempered_by_it():
    batch = draw_groups([(5, [3, 4]), (4, [2, 5])])
    batch = replace(batch, temperatures=0.5 + batch.group_ids.float())
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-3)
    assert pack_batch(batch, CPU, share=True).continuations is not None
    found, expected = (backend.forward(b, lambda outputs: outputs.log_probs).value for b in (batch, replace(batch, skip_redundant=False)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_active_dropout_draws_for_each_row():
    model = create_tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    backend = create_pytorch_backend(model, lr=1e-3)
    batch = replace(draw_groups([(5, [3, 4, 2])]), dropout=True)
    gradients = []
    for skip_redundant in (True, False):
        torch.manual_seed(0)
        backend.model.zero_grad()
        backend.forward_backward(replace(batch, skip_redundant=skip_redundant), weighted_sum, with_entropy=True)
        gradients.append([p.grad.clone() for p in backend.model.parameters() if p.grad is not None])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


def test_models_that_cannot_share_prompts_are_run_row_by_row():
    model = create_tiny_model()
    options = create_pytorch_backend(model, lr=1e-3)._options
    assert can_share_prompts(model, compute_log_probs, options, CPU)
    assert not can_share_prompts(model, compute_log_probs, options, torch.device("cuda"))
    assert not can_share_prompts(model, lambda *a: compute_log_probs(*a), options, CPU)
    assert not can_share_prompts(model, compute_log_probs, replace(options, native_attention=True), CPU)
    routed = replace(options.routers, modules=(torch.nn.Linear(1, 1),))
    assert not can_share_prompts(model, compute_log_probs, replace(options, routers=routed), CPU)
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_share_prompts(model, compute_log_probs, options, CPU)


def test_values_of_a_critic_and_their_gradients_are_those_of_single_rows():
    batch = draw_groups([(5, [3, 4, 2]), (2, [6, 1])])
    batch = replace(batch, returns=torch.linspace(-1, 1, batch.tokens.numel()).view(batch.tokens.shape))
    results = []
    for skip_redundant in (True, False):
        backend = create_critic_backend(create_tiny_model(), lr=1e-3, head_std=0.3)
        own = replace(batch, skip_redundant=skip_redundant)
        values = backend.forward(own, lambda outputs: outputs.values).value
        backend.forward_backward(own, partial(value_loss, clip=None))
        results.append((values, [p.grad for p in backend.model.parameters() if p.grad is not None]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
    assert results[0][0].abs().max() > 0.01


@pytest.mark.parametrize("create", [create_torch_func_backend, create_fsdp_backend])
async def test_other_backends_agree(create):
    batch, found = draw_groups([(5, [3, 4, 2]), (2, [6, 1])]), []
    for skip_redundant in (True, False):
        backend = create(create_tiny_model(), lr=1e-2)
        own = replace(batch, skip_redundant=skip_redundant)
        log_probs = await backend.forward(own, lambda outputs: outputs.log_probs).result()
        await backend.forward_backward(own, weighted_sum, with_entropy=True).result()
        metrics = await backend.optim_step().result()
        found.append((log_probs, metrics["grad_norm"]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


# rows without a gradient


class CountedBackwards:
    """Count backward passes through a model."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        model.get_input_embeddings().weight.register_hook(self._note)

    def _note(self, gradient: torch.Tensor) -> None:
        self.count += 1


def draw_rewarded(rewards: list[list[float]]) -> TrainBatch:
    """Draw groups with these rewards, in order."""
    batch = draw_groups([(4, [3 + i % 2 for i in range(len(group))]) for group in rewards], rollout_log_probs=None)
    order = torch.argsort(batch.group_ids, stable=True)
    batch = select_rows(replace(batch, rollout_log_probs=-4.0 * batch.loss_mask), order)
    return replace(batch, rewards=torch.tensor([reward for group in rewards for reward in group]), loss_weights=None)


REWARDS = {"some": [[0.0, 1.0, 1.0], [1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0]], "none": [[1.0, 1.0], [0.0, 0.0]], "all": [[0.0, 1.0]] * 3}


async def train(batch: TrainBatch, algorithm: Any, steps: int = 2, **plan: Any) -> tuple[list[dict[str, float]], Any, int]:
    """Train with momentum and weight decay. Returns metrics of each step, the weights, and the number of backward passes."""
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    reference = create_pytorch_backend(create_tiny_model(seed=3), lr=0.0) if "ref_log_probs" in algorithm.requires else None
    counted = CountedBackwards(backend.model)
    metrics = [await train_on_rollouts(backend, batch, algorithm, UpdatePlan(**plan), reference=reference) for _ in range(steps)]
    return metrics, await backend.get_weights().result(), counted.count


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("algorithm", [grpo(), recomputed(grpo()), grpo(kl_coef=0.1, kl=k2), grpo(entropy_coef=0.1)])
@pytest.mark.parametrize("max_tokens", [1000, 12])
async def test_rows_without_advantage_change_no_number(kind, algorithm, max_tokens):
    batch = draw_rewarded(REWARDS[kind])
    found, weights, _ = await train(batch, algorithm, max_tokens_per_microbatch=max_tokens)
    expected, expected_weights, _ = await train(batch, algorithm, max_tokens_per_microbatch=max_tokens, skip_redundant=False)
    for step, other in zip(found, expected, strict=True):
        assert "zero_gradient_fraction" not in other
        step.pop("zero_gradient_fraction")
        assert step == pytest.approx(other, abs=1e-5, rel=1e-4)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)


async def test_backward_passes_of_rows_without_a_gradient_are_left_out_and_counted():
    batch = draw_rewarded(REWARDS["some"])
    (metrics,), _, count = await train(batch, grpo(), steps=1)
    zero = torch.isin(batch.group_ids, torch.tensor([1, 2]))
    trained = (batch.loss_mask > 0).sum(1)
    assert count == 1
    assert metrics["zero_gradient_fraction"] == pytest.approx(float(trained[zero].sum() / trained.sum()))
    (metrics,), _, count = await train(batch, grpo(entropy_coef=0.1), steps=1)  # every row has a gradient
    assert (count, metrics["zero_gradient_fraction"]) == (2, 0.0)
    (metrics,), _, count = await train(draw_rewarded(REWARDS["none"]), grpo(), steps=1)  # the update needs a gradient, of zeros
    assert (count, metrics["zero_gradient_fraction"], metrics["grad_norm"]) == (1, 0.0, 0.0)
    (_,), _, count = await train(batch, grpo(), steps=1, skip_redundant=False)
    assert count == 1  # one micro-batch


async def test_without_permission_a_step_is_that_of_a_backend_that_cannot_share_bit_by_bit():
    batch = draw_rewarded(REWARDS["some"])
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    backend._options = replace(backend._options, shares_prompts=False)
    expected = [await train_on_rollouts(backend, batch, grpo(), UpdatePlan()) for _ in range(2)]
    found, weights, _ = await train(batch, grpo(), skip_redundant=False)
    assert found == expected
    assert all(weights[name].equal(value) for name, value in (await backend.get_weights().result()).items())


def test_a_loss_without_a_gradient_is_told_by_its_gradient_and_not_by_its_advantages():
    batch = replace(draw_rewarded([[1.0, 1.0]]), skip_redundant=True)
    batch = replace(batch, ref_log_probs=torch.full(batch.tokens.shape, -3.0), advantages=torch.zeros(batch.tokens.shape))
    batch = replace(batch, loss_weights=token_mean(batch))
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2)
    with_kl = partial(clipped_policy_loss, kl=KLTerm(k2, 0.1))
    fractions = [backend.forward_backward(batch, loss).value["zero_gradient_fraction"] for loss in (with_kl, clipped_policy_loss, with_kl)]
    assert fractions == [0.0, 1.0, 0.0]


def test_packed_rows_planned_here_or_by_the_caller_are_the_same():
    batch, backend = draw_groups([(5, [3, 4, 2])]), create_pytorch_backend(create_tiny_model(), lr=1e-3)
    options = backend._options
    found = [run_rows(backend.model, batch, compute_log_probs, options, packed) for packed in (None, pack_batch(batch, CPU, share=True))]
    assert found[0].log_probs.equal(found[1].log_probs)
