from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollouts.backends.factory import create_adamw_optimizer, create_pytorch_backend
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.backends.trainer_files import read_trainer_state
from rollouts.batching import collate_samples
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.loss_weights import token_mean
from rollouts.losses import sft_loss
from rollouts.packing import pack_padded, run_packed, use_packed_attention
from rollouts.testing import create_tiny_model
from rollouts.types import Sample


def make_batch():
    rows = [Sample(tokens=tuple(range(3, 3 + n)), loss_mask=(0.0, *(1.0,) * (n - 1))) for n in (5, 9, 5, 3)]
    batch = collate_samples(rows)
    return replace(batch, loss_weights=token_mean(batch))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_packed_rows_have_the_hidden_states_of_single_rows(architecture):
    plain, packed_model = create_tiny_model(architecture=architecture), create_tiny_model(architecture=architecture)
    use_packed_attention(packed_model)
    batch = make_batch()
    packed = pack_padded(batch.tokens, batch.lengths)
    assert packed.tokens.numel() == int(batch.lengths.sum())  # no pad token is there to be computed
    with torch.no_grad():
        found = run_packed(packed_model, packed)
        rows = [plain.model(input_ids=batch.tokens[i : i + 1, :n]).last_hidden_state[0] for i, n in enumerate(batch.lengths.tolist())]
    torch.testing.assert_close(found, torch.cat(rows), atol=1e-5, rtol=1e-4)
    assert packed.unpack(packed.tokens.float()).long().equal(batch.tokens * (torch.arange(9) < batch.lengths[:, None]))


def test_a_model_whose_layers_are_not_full_causal_attention_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
                           num_key_value_heads=2, sliding_window=3)  # fmt: skip
    with pytest.raises(ConfigError, match="full causal attention"):
        use_packed_attention(MistralForCausalLM(config).eval())


def test_logits_of_all_tokens_never_exist_at_once():
    backend = create_pytorch_backend(create_tiny_model(vocab_size=2048), lr=1e-3)
    backend._chunk_size = 4
    batch = make_batch()
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


async def test_bfloat16_keeps_float32_weights_and_log_probs_close_to_float32():
    exact, rounded = (create_pytorch_backend(create_tiny_model(), lr=1e-3, compute_dtype=d) for d in ("float32", "bfloat16"))
    batch = make_batch()
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
        await backend.forward_backward(make_batch(), sft_loss).result()
    total = torch.sqrt(sum((p.grad**2).sum() for p in free.parameters()))
    for backend in backends:
        norms.append((await backend.optim_step().result())["grad_norm"])
    assert norms == pytest.approx([float(total)] * 2, rel=1e-5)


async def test_non_finite_gradients_in_a_row_end_the_run():
    model = create_tiny_model()
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3), max_skipped_updates=2)
    bad = replace(make_batch(), loss_weights=make_batch().loss_weights * float("nan"))
    await backend.forward_backward(bad, sft_loss).result()
    assert (await backend.optim_step().result())["update_skipped"] == 1.0
    await backend.forward_backward(bad, sft_loss).result()
    with pytest.raises(BackendError, match="2 updates in a row"):
        backend.optim_step()


def test_master_weights_must_be_float32():
    model = create_tiny_model().to(torch.bfloat16)
    with pytest.raises(AssertionError, match="master weights are float32"):
        PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3))


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
