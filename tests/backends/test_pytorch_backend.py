from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.attention.varlen
from hypothesis import given
from hypothesis import strategies as st
from products import CountedProducts
from samples import draw_batch

from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import grpo, gspo
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import TorchFuncTrainingBackend, create_torch_func_backend
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.lora.adapters import add_adapters
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.optim.optimizers import AdamW, create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.backends.pytorch.files import read_trainer_state
from rollouts.config import BadNumbers
from rollouts.data.collate import collate_samples
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.models.forward import attention
from rollouts.models.forward.attention import attend_packed, find_attention_dtype, has_varlen
from rollouts.models.forward.packing import pack_padded
from rollouts.models.forward.passes import run_packed
from rollouts.models.prepare import recompute_activations, use_packed_attention
from rollouts.testing import create_tiny_model
from rollouts.types import LossOutput, Sample

LENGTHS = (5, 9, 5, 3)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_packed_rows_have_the_hidden_states_of_single_rows(architecture):
    plain, packed_model = create_tiny_model(architecture=architecture), create_tiny_model(architecture=architecture)
    use_packed_attention(packed_model)
    batch = draw_batch(0, LENGTHS)
    packed = pack_padded(batch.tokens, batch.lengths)
    assert packed.tokens.numel() == int(batch.lengths.sum())  # no pad token is there to be computed
    with torch.no_grad():
        found = run_packed(packed_model, packed)
        rows = [plain.model(input_ids=batch.tokens[i : i + 1, :n]).last_hidden_state[0] for i, n in enumerate(batch.lengths.tolist())]
    torch.testing.assert_close(found, torch.cat(rows), atol=1e-5, rtol=1e-4)
    assert packed.unpack(packed.tokens.float()).long().equal(batch.tokens * (torch.arange(9) < batch.lengths[:, None]))


@pytest.mark.parametrize(("critic", "lora"), [(False, None), (False, LoRAConfig(rank=2, dropout=0.2)), (True, None)])
def test_recomputed_activations_give_the_same_gradients(critic, lora):
    """With dropout too, which is drawn again as it was."""
    batch, gradients = replace(draw_batch(0, LENGTHS), returns=torch.ones(4, 9)), []
    for recomputed in (False, True):
        model = create_tiny_model()
        backend = create_critic_backend(model, lr=1e-3, total_steps=1) if critic else create_pytorch_backend(model, lr=1e-3, lora=lora)
        if recomputed:
            recompute_activations(backend.model)
        torch.manual_seed(1)
        backend.forward_backward(batch, (lambda o, b: LossOutput(o.values.square().sum(), {})) if critic else sft_loss)
        gradients.append({name: p.grad for name, p in backend.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    assert all(gradients[0][name].equal(grad) for name, grad in gradients[1].items())


def attend_as_documented(query, key, value, ends, ends_of_keys, longest, longest_key, *, scale, window_size, enable_gqa):
    """torch.nn.attention.varlen.varlen_attn in naive loops: position i of a row attends to the positions i - left to i + right."""
    assert ends.dtype == torch.int32 and ends.equal(ends_of_keys) and longest == longest_key == int(ends.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    assert right == 0
    out = torch.empty_like(query)
    for begin, end in pairwise(ends.tolist()):
        for i in range(begin, end):
            for head in range(query.shape[1]):
                own = head * key.shape[1] // query.shape[1]
                seen = slice(begin if left < 0 else max(begin, i - left), i + 1)
                scores = (key[seen, own] @ query[i, head]) * (query.shape[-1] ** -0.5 if scale is None else scale)
                out[i, head] = scores.softmax(0) @ value[seen, own]
    return out


@pytest.mark.parametrize(("window", "scaling"), [(None, None), (3, 0.3), (9, None), (40, 0.2)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_one_call_for_all_rows_attends_as_a_call_for_each_length(monkeypatch, window, scaling, num_kv_heads):
    batch, draw = draw_batch(0, LENGTHS), torch.Generator().manual_seed(0)
    packed = pack_padded(batch.tokens, batch.lengths)
    query, key, value = (torch.randn(1, n, sum(LENGTHS), 8, generator=draw) for n in (4, num_kv_heads, num_kv_heads))
    expected = attend_packed(None, query, key, value, scaling, 0.0, window, packed=packed)
    monkeypatch.setattr(attention, "has_varlen", lambda *_: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attend_as_documented)
    found = attend_packed(None, query, key, value, scaling, 0.0, window, packed=packed)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_one_call_for_all_rows_is_for_half_precision_on_a_gpu_alone():
    query = torch.zeros(1, 4, 9, 64)
    assert not any(has_varlen(query.to(dtype), query.to(dtype), 0.0) for dtype in (torch.float32, torch.bfloat16, torch.float16))
    assert find_attention_dtype(query) == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a rotated query is float32 there, and attention casts it
        assert find_attention_dtype(query) == torch.bfloat16


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 99))
def test_splitting_by_length_gathers_values_and_gradients(lengths, seed):
    draw = torch.Generator().manual_seed(seed)
    packed = pack_padded(torch.zeros(len(lengths), max(lengths), dtype=torch.int64), torch.tensor(lengths))
    values = torch.randn(sum(lengths), 2, generator=draw, requires_grad=True)
    weights = torch.randn(sum(lengths), 2, generator=draw)
    rows = torch.split(values, lengths)
    weighed = torch.split(weights, lengths)
    parts = packed.split_lengths(values)
    for size, part in zip(sorted(set(lengths)), parts, strict=True):
        assert part.equal(torch.stack([row for row in rows if len(row) == size]))
    coefficients = packed.split_lengths(weights)
    (grad,) = torch.autograd.grad(sum((part * c * c).sum() for part, c in zip(parts, coefficients, strict=True)), values)
    assert grad.equal(torch.cat([w * w for w in weighed]))
    (grad,) = torch.autograd.grad((packed.join_lengths([part * 2 for part in packed.split_lengths(values)]) * weights).sum(), values)
    assert grad.equal(2 * weights)


def test_logits_of_all_tokens_never_exist_at_once():
    model = create_tiny_model(vocab_size=2048)
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), chunk_size=4)
    batch = draw_batch(0, LENGTHS)
    row_counts: set[int] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[-1] == 2048:
                row_counts.add(out.shape[0])
            return out

    with Watch():
        backend.forward_backward(batch, sft_loss)
    assert row_counts - {32} == {4, 2}  # 18 predictions in chunks of 4; 32 x 2048 is the transposed output layer


@pytest.mark.parametrize(("loss_fn", "is_foreseen"), [(sft_loss, True), (grpo().loss, True), (gspo().loss, False)])
async def test_the_gradient_of_a_loss_of_single_tokens_is_computed_with_its_logits(loss_fn, is_foreseen):
    """And that of others as without: once it was not as foreseen, nothing is foreseen any more."""
    batch = draw_batch(0, LENGTHS, rollout_log_probs=None)
    backend = create_pytorch_backend(create_tiny_model(vocab_size=2048), lr=1e-3)
    own = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
    advantages = torch.tensor([[1.0], [-0.5], [0.7], [2.0]]) * batch.loss_mask
    batch = replace(batch, advantages=advantages, rollout_log_probs=own * batch.loss_mask)  # ratios of 1, so that nothing is clipped
    found: list[tuple[list[int], list[torch.Tensor]]] = []
    for foresees in (False, True):
        model = create_tiny_model(vocab_size=2048)
        backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), chunk_size=4)
        backend._foresees = foresees  # pyright: ignore[reportPrivateUsage]
        products: list[int] = []
        for _ in range(2):
            with CountedProducts(2048) as counted:
                backend.forward_backward(batch, loss_fn, with_entropy=loss_fn is not sft_loss)  # a metric, as in the loop
            products.append(counted.multiplications // (18 * 32 * 2048))
        found.append((products, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]))
    assert found[0][0] == [4, 4]
    assert found[1][0] == ([3, 3] if is_foreseen else [6, 4])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def refusing_loss(outputs, batch):
    """A loss of a user that refuses log-probs of 0, as it never gets them from a model."""
    if bool(((outputs.log_probs == 0) & (batch.loss_mask > 0)).any()):
        raise ValueError("a trained token has the log-prob 0")
    return sft_loss(outputs, batch)


def test_a_loss_that_refuses_incomplete_log_probs_is_computed_as_without_foresight():
    batch = draw_batch(0, LENGTHS)
    gradients: list[list[torch.Tensor]] = []
    for loss_fn in (sft_loss, refusing_loss):
        model = create_tiny_model(vocab_size=2048)
        backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), chunk_size=4)
        backend.forward_backward(batch, loss_fn)
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


async def test_bfloat16_keeps_float32_weights_and_log_probs_close_to_float32():
    exact, rounded = (create_pytorch_backend(create_tiny_model(), lr=1e-3, compute_dtype=d) for d in ("float32", "bfloat16"))
    batch = draw_batch(0, LENGTHS)
    a, b = [await backend.forward(batch, lambda o: o.log_probs).result() for backend in (exact, rounded)]
    assert a.dtype == b.dtype == torch.float32
    assert 0 < float((a - b).abs().max()) < 0.1
    await rounded.forward_backward(batch, sft_loss).result()
    await rounded.optim_step().result()
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}


async def test_gradients_are_clipped_to_the_norm_and_reported_before_clipping():
    free, clipped = create_tiny_model(), create_tiny_model()
    backends = [create_pytorch_backend(m, lr=1e-3, max_grad_norm=n) for m, n in ((free, float("inf")), (clipped, 0.01))]
    norms = []
    for backend in backends:
        await backend.forward_backward(draw_batch(0, LENGTHS), sft_loss).result()
    total = torch.sqrt(sum((p.grad**2).sum() for p in free.parameters()))
    for backend in backends:
        norms.append((await backend.optim_step().result())["grad_norm"])
    assert norms == pytest.approx([float(total)] * 2, rel=1e-5)


async def test_non_finite_gradients_in_a_row_end_the_run():
    model = create_tiny_model()
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), bad_numbers=BadNumbers(max_skipped=2))
    bad = replace(draw_batch(0, LENGTHS), loss_weights=draw_batch(0, LENGTHS).loss_weights * float("nan"))
    await backend.forward_backward(bad, sft_loss).result()
    assert (await backend.optim_step().result())["update_skipped"] == 1.0
    await backend.forward_backward(bad, sft_loss).result()
    with pytest.raises(BackendError, match="2 updates in a row"):
        backend.optim_step()


def test_an_update_that_breaks_a_parameter_is_an_error_that_names_it(tmp_path):
    for backend in (
        PyTorchTrainingBackend(model := create_tiny_model(), create_adamw_optimizer(model, lr=1e39)),
        FSDPTrainingBackend(create_tiny_model(), partial(create_adamw_optimizer, lr=1e39)),
        TorchFuncTrainingBackend(create_tiny_model(), AdamW(lr=1e39)),
    ):
        backend.forward_backward(draw_batch(0, LENGTHS), sft_loss)
        with pytest.raises(BackendError, match=r"update 1 made the parameter model\.embed_tokens\.weight NaN or infinite"):
            backend.optim_step()
        with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is not finite"):
            backend.save_checkpoint(tmp_path)
        assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)])
@pytest.mark.parametrize("kind", ["pytorch", "fsdp"])
def test_a_checkpoint_never_holds_what_is_not_finite(tmp_path, kind, lora):
    """A run would not recover from values that are not finite in weights, adapters or the optimizer's moments."""
    model = create_tiny_model()
    if lora is not None:
        add_adapters(model, lora)
    if kind == "pytorch":
        trained = [p for p in model.parameters() if p.requires_grad]
        backend = PyTorchTrainingBackend(model, torch.optim.AdamW(trained, lr=1e-3), lora=lora)
    else:
        backend = FSDPTrainingBackend(
            model, lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3), lora=lora
        )
    backend.forward_backward(draw_batch(0, LENGTHS), sft_loss)
    backend.optim_step()
    parameter = next(p for p in backend.model.parameters() if p.requires_grad)
    moment = backend.optimizer.state[parameter]["exp_avg_sq"]
    for tensor, bad in ((parameter.detach(), float("nan")), (moment, float("inf"))):
        local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)().flatten()
        good = local[0].item()
        local[0] = bad
        with pytest.raises(CheckpointError, match="is not finite"):
            backend.save_checkpoint(tmp_path)
        local[0] = good
    backend.save_checkpoint(tmp_path)


def test_a_model_with_a_nan_weight_is_refused_when_a_backend_is_made():
    model = create_tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"has a NaN weight \(or an infinite one\): model\.norm\.weight"):
        PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3))


def test_weights_in_bfloat16_are_refused_where_updates_would_be_lost_in_rounding():
    model = create_tiny_model().to(torch.bfloat16)
    with pytest.raises(ConfigError, match="is trained in bfloat16, whose last bit is larger than most updates: load the model in float32"):
        PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), compute_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="is trained in bfloat16"):
        create_torch_func_backend(model, lr=1e-3, compute_dtype="bfloat16")


@pytest.mark.parametrize("create", [create_torch_func_backend, create_jax_backend, create_fsdp_backend])
def test_moments_of_8_bits_are_refused_by_other_backends(create):
    with pytest.raises(ConfigError, match=r"moments is '8bit', but .* keeps Adam's moments in float32"):
        create(create_tiny_model(), lr=1e-3, moments="8bit")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda state: state.update(kind="torch_func"), "is of the backend 'torch_func'"),
        (lambda state: state["optimizer"]["param_groups"].pop(), "groups of"),
        (lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.zeros(2, 3)), r"exp_avg of its parameter 0 is \(2, 3\)"),
        (lambda state: state.pop("optimizer"), "has no 'optimizer'"),
        (lambda state: state.pop("rng"), "lacks rng"),
    ],
)
def test_a_trainer_state_that_does_not_fit_is_refused_before_anything_is_overwritten(damage, expected: str, tmp_path: Path):
    saved = create_pytorch_backend(create_tiny_model(seed=5), lr=1e-2)
    batch = collate_samples([Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0))])
    batch = replace(batch, loss_weights=token_mean(batch))
    saved.forward_backward(batch, sft_loss)
    saved.optim_step()
    saved.save_checkpoint(tmp_path)
    state = torch.load(tmp_path / "trainer_state.pt")
    damage(state)
    torch.save(state, tmp_path / "trainer_state.pt")
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-2)
    before = backend.get_weights().value
    with pytest.raises(CheckpointError, match=expected):
        backend.load_checkpoint(tmp_path)
    after = backend.get_weights().value
    assert all(torch.equal(before[name], after[name]) for name in before) and not backend.optimizer.state


def test_a_checkpoint_of_several_processes_is_called_one(tmp_path: Path):
    (tmp_path / "sharded").mkdir()
    with pytest.raises(CheckpointError, match="is of the backend 'fsdp', not 'torch_func'"):
        read_trainer_state(tmp_path, "torch_func")
