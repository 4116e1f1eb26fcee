"""The load-balancing loss of a mixture of experts is transformers', whatever the split of the batch; and metrics of the load."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from expert_models import create_expert_model, draw_batch, no_loss, read_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import start_ranks

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.batches import select_rows
from rollouts.config import RLTrainingConfig, SFTTrainingConfig
from rollouts.errors import ConfigError
from rollouts.models.expert_load import add_loads, balance_loss, summarize_load
from rollouts.models.prepare import inspect_routers, prepare_attention
from rollouts.sft_loop import run_sft_training
from rollouts.testing import FakeBackend, create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.steps import require_balance, submit_optimizer_step
from rollouts.types import ExpertLoad, Sample

COEF = 0.7
BALANCED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss")
METRICS = {"expert_load_max", "max_expert_load", "experts_unused", "router_entropy", "router_balance_loss"}


def with_coef(batch, coef: float = COEF):
    return replace(batch, router_balance=torch.full_like(batch.rewards, coef), dropout=False)


def gradients_of_transformers(model, batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The load-balancing loss of the model's own padded forward pass, and the gradient of COEF times it."""
    mask = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    loss = model(input_ids=batch.tokens, attention_mask=mask, output_router_logits=True, use_cache=False).aux_loss
    (COEF * loss).backward()
    return float(loss.detach()), read_gradients(model)


def check_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(expected) > 5
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6 + 1e-4 * float(value.abs().max()), msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", BALANCED)
def test_the_loss_and_its_gradient_are_those_of_transformers(family: str):
    model, batch = create_expert_model(family), draw_batch()
    loss, expected = gradients_of_transformers(copy.deepcopy(model), batch)
    backend = create_pytorch_backend(model, lr=1e-3)
    found = backend.forward_backward(with_coef(batch), no_loss).value
    assert found["loss"] == pytest.approx(COEF * loss, rel=1e-5)
    check_same_gradients(read_gradients(backend.model), expected)
    assert backend.optim_step().value["router_balance_loss"] == pytest.approx(loss, rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_no_split_changes_the_gradient(data: st.DataObject):
    lengths = tuple(data.draw(st.lists(st.integers(2, 12), min_size=2, max_size=6)))
    batch = with_coef(draw_batch(data.draw(st.integers(0, 9)), lengths))
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    parts = [[row for row, place in enumerate(places) if place == part] for part in range(3)]
    model = create_expert_model("qwen3_moe")
    whole, split = create_pytorch_backend(copy.deepcopy(model), lr=1e-3), create_pytorch_backend(model, lr=1e-3)
    loss = whole.forward_backward(batch, no_loss).value["loss"]
    micro = [select_rows(batch, rows) for rows in parts if rows]
    for part in micro:
        split.count_experts(part)
    losses = [split.forward_backward(part, no_loss).value["loss"] for part in micro]
    assert sum(losses) == pytest.approx(loss, rel=1e-4)
    check_same_gradients(read_gradients(split.model), read_gradients(whole.model))
    metrics = whole.optim_step().value, split.optim_step().value
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.parametrize("create", [create_pytorch_backend, create_torch_func_backend])
async def test_a_step_is_the_same_whatever_its_micro_batches(create):
    steps = []
    for max_tokens in (1000, 14):
        async with open_pipeline(create(create_expert_model(), lr=1e-2, max_grad_norm=1e9)) as backend:
            for seed in range(2):  # the second step counts anew
                pending = submit_optimizer_step(
                    backend, draw_batch(seed), sft_loss, weigh=token_mean, max_tokens_per_microbatch=max_tokens, router_balance_coef=COEF
                )
                steps.append(await pending.result())
    assert steps[0]["grad_norm"] != pytest.approx(steps[1]["grad_norm"], rel=1e-3)
    for one, several in zip(steps[:2], steps[2:], strict=True):
        assert one.keys() >= METRICS
        assert one == pytest.approx(several, rel=2e-3)
    assert steps[0] == pytest.approx(steps[2], rel=1e-4)


async def test_the_functional_backend_has_the_gradient_of_the_pytorch_backend():
    batch = with_coef(draw_batch())
    first, second = create_pytorch_backend(create_expert_model(), lr=1e-2), create_torch_func_backend(create_expert_model(), lr=1e-2)
    first.forward_backward(batch, no_loss)
    second.forward_backward(batch, no_loss)
    assert second.state.gradients is not None
    found = {name: value for name, value in second.state.gradients.items() if bool(value.any())}
    check_same_gradients(found, read_gradients(first.model))
    assert first.optim_step().value == pytest.approx(second.optim_step().value, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_recomputed_activations_change_no_gradient_and_count_no_token_twice(family: str):
    results = []
    for checkpointing in (False, True):
        model = create_expert_model(family)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        backend = create_pytorch_backend(model, lr=1e-3)
        calls: list[int] = []
        hook = backend._options.routers.modules[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        backend.forward_backward(with_coef(draw_batch()), no_loss)
        hook.remove()
        results.append((len(calls), read_gradients(backend.model), backend.optim_step().value))
    assert results[1][0] == 2 * results[0][0], "activations were recomputed"
    check_same_gradients(results[1][1], results[0][1])
    assert results[1][2] == pytest.approx(results[0][2], rel=1e-5)


async def test_without_the_coefficient_no_number_changes():
    batch = draw_batch()
    plain, zero = (create_pytorch_backend(create_expert_model(), lr=1e-2) for _ in range(2))
    submit = partial(submit_optimizer_step, batch=batch, loss=sft_loss, weigh=token_mean, max_tokens_per_microbatch=14)
    assert await submit(plain).result() == await submit(zero, router_balance_coef=0.0).result()
    object.__setattr__(plain, "_options", replace(plain._options, routers=replace(plain._options.routers, modules=())))
    measured, unmeasured = await submit(zero).result(), await submit(plain).result()
    assert {k: v for k, v in measured.items() if k not in METRICS} == unmeasured
    for name, value in plain.get_weights().value.items():
        assert torch.equal(value, zero.get_weights().value[name]), name


def test_the_metrics_of_a_load():
    counts = torch.tensor([[4.0, 4.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    load = ExpertLoad(counts=counts, probs=counts / 2, entropy=torch.tensor([2.0, 6.0]), num_tokens=torch.tensor(4.0))
    expected = {"expert_load_max": 1.5, "max_expert_load": 2.0, "experts_unused": 0.25, "router_entropy": 1.0}
    fractions = counts.sum(0) / 8  # choices of each expert per token and router
    assert summarize_load(load) == pytest.approx(expected | {"router_balance_loss": 4 * float((fractions * fractions / 2).sum())})
    assert summarize_load(None) == {}
    total = add_loads(load, add_loads(None, load))
    assert total is not None
    assert summarize_load(total) == pytest.approx(summarize_load(load))
    assert float(balance_loss(load, total)) == pytest.approx(summarize_load(load)["router_balance_loss"] / 2)


async def test_every_line_of_metrics_of_a_mixture_of_experts_has_its_load(tmp_path: Path):
    samples = [Sample(tokens=(5, 6, 7, i + 3), loss_mask=(0.0, 1.0, 1.0, 1.0), index=i) for i in range(4)]
    for name, model in (("experts", create_expert_model()), ("dense", create_tiny_model())):
        config = SFTTrainingConfig(num_steps=2, batch_size=2, router_balance_coef=0.01 if name == "experts" else 0.0)
        logger = JSONLLogger(tmp_path / f"{name}.jsonl")
        await run_sft_training(create_pytorch_backend(model, lr=1e-3), samples, config, logger)
        lines = read_metrics(logger.path)
        assert len(lines) == 2
        for line in lines:
            assert (line.keys() & METRICS) == (METRICS if name == "experts" else set())
            assert name == "dense" or line["expert_load_max"] >= 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (create_tiny_model, "Qwen3ForCausalLM is no mixture of experts"),
        (partial(create_expert_model, "deepseek_v3"), "DeepseekV3ForCausalLM has no load-balancing loss in transformers"),
    ],
)
async def test_a_coefficient_that_cannot_be_applied_is_refused_before_training(model, reason: str):
    samples = [Sample(tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0))]
    for create in (create_pytorch_backend, create_torch_func_backend):
        backend = create(model(), lr=1e-3)
        with pytest.raises(ConfigError, match=f"router_balance_coef is set, but {reason}.*: set it to 0"):
            await run_sft_training(backend, samples, SFTTrainingConfig(num_steps=1, router_balance_coef=0.1))
    with pytest.raises(ConfigError, match=r"lacks the feature experts .*router_balance_coef needs.*Set it to 0, or train with the PyTorch"):
        require_balance(FakeBackend())


def test_a_negative_coefficient_is_refused():
    for kind in (SFTTrainingConfig, RLTrainingConfig):
        with pytest.raises(ConfigError, match=r"router_balance_coef is -0.1, expected a finite number, at least 0"):
            kind(router_balance_coef=-0.1)


def test_a_family_with_another_loss_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    model = create_expert_model("mixtral")
    from transformers.models.mixtral import modeling_mixtral

    real = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args, **kwargs: 2 * real(*args, **kwargs))
    routers = inspect_routers(model, native=prepare_attention(model))
    assert routers.problem is None
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM computes another load-balancing loss \(\S+\) than transformers' usual one"):
        routers.check_balance()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_sharded_model_in_bfloat16_has_nearly_the_same_loss(family: str):
    config = FSDPConfig(mixed_precision="bfloat16", gradient_checkpointing=True)
    backend = create_fsdp_backend(create_expert_model(family), config=config, lr=1e-3)
    backend.check_balance()
    backend.check_replay()
    exact = create_pytorch_backend(create_expert_model(family), lr=1e-3)
    found, expected = (b.forward_backward(with_coef(draw_batch()), no_loss).value["loss"] for b in (backend, exact))
    assert found == pytest.approx(expected, rel=5e-2)
    assert found == pytest.approx(COEF * backend.optim_step().value["router_balance_loss"], rel=1e-5)


CODE = """
sys.path.insert(0, {tests!r})
from pathlib import Path
import expert_ranks
expert_ranks.main(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_balance_and_replay_as_one_process_does(tmp_path: Path):
    children = start_ranks(CODE.format(tests=str(Path(__file__).parents[1] / "support")), 2, tmp_path, folder=tmp_path / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    zero, one = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert zero["ranks"] == one["ranks"]
    assert len(zero["ranks"]) == len(zero["single"]) == 6
    for found, expected in zip(zero["ranks"], zero["single"], strict=True):
        assert found.keys() >= METRICS
        assert found == pytest.approx(expected, abs=2e-4)
    assert zero["single"][0]["loss"] != pytest.approx(zero["single"][4]["loss"], abs=1e-2), "the experts are others"
