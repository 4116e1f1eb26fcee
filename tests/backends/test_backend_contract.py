"""The contract of every training backend, tested through its protocol alone.

A backend joins by one line in BACKENDS: a function (model, **settings) -> asynchronous context manager that gives the backend, with AdamW
or another optimizer whose first update at settings REVEALING is -lr / eps times the gradient. The settings are keywords of
create_backend_with_scheduler; the backend has the character tokenizer.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from samples import draw_batch

from rollouts.algorithms.logprobs import token_entropy, token_log_probs
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import dapo
from rollouts.backends.factory import create_backend_with_scheduler
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.batches import find_context_starts, select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model
from rollouts.training.saving.run_checkpoints import stage_backend
from rollouts.types import Sample

SETTINGS = {"lr": 1e-2, "total_steps": 20, "warmup_steps": 3}
REVEALING = {"lr": 1e6, "eps": 1e6, "max_grad_norm": float("inf"), "total_steps": 1}  # what an update subtracts is the gradient


def create_direct(model, **settings):
    return create_backend_with_scheduler(model, tokenizer=create_char_tokenizer(), **settings)


@asynccontextmanager
async def direct_backend(model, **settings):
    yield create_direct(model, **(settings or SETTINGS))


@asynccontextmanager
async def pipelined_backend(model, **settings):
    async with open_pipeline(create_direct(model, **(settings or SETTINGS))) as pipeline:
        yield pipeline


@asynccontextmanager
async def torch_func_backend(model, **settings):
    yield create_torch_func_backend(model, tokenizer=create_char_tokenizer(), **({"schedule": "cosine"} | (settings or SETTINGS)))


@asynccontextmanager
async def fsdp_backend(model, **settings):
    yield create_fsdp_backend(model, tokenizer=create_char_tokenizer(), **({"schedule": "cosine"} | (settings or SETTINGS)))


@asynccontextmanager
async def jax_backend(model, **settings):
    yield create_jax_backend(model, tokenizer=create_char_tokenizer(), **({"schedule": "cosine"} | (settings or SETTINGS)))


@asynccontextmanager
async def lora_backend(model, **settings):
    """Backend with adapters and the base in its checkpoints, so that they can be restored into any model of the architecture."""
    yield create_direct(model, **(settings or SETTINGS), lora=LoRAConfig(rank=8, alpha=32.0, save_base=True))


BACKENDS = [
    direct_backend,
    pipelined_backend,
    torch_func_backend,
    pytest.param(jax_backend, marks=pytest.mark.slow),  # compiles its programs
    fsdp_backend,
    lora_backend,
]
TRAIN_ADAPTERS = (lora_backend,)  # so the gradient of the weights is not theirs: what theirs is, is in test_lora.py


@pytest.fixture(params=BACKENDS, ids=lambda b: b.__name__, scope="module")  # so that tests of one backend, and its programs, stay together
def open_backend(request):
    return request.param


async def gradients(open_backend, batches, loss_fn=sft_loss):
    """The gradient of each trained weight, and what forward_backward said."""
    model = create_tiny_model()
    names = [name for name, _ in model.named_parameters()]
    async with open_backend(model, **REVEALING) as backend:
        before = await backend.get_weights().result()
        results = [await backend.forward_backward(batch, loss_fn).result() for batch in batches]
        await backend.optim_step().result()
        after = await backend.get_weights().result()
    return [before[name] - after[name] for name in names], results


def assert_close(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def reference_outputs(model, batch):
    """Plain padded forward pass and log-softmax."""
    logits = model(input_ids=batch.tokens).logits
    real = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    temperature = 1.0 if batch.temperatures is None else batch.temperatures
    return token_log_probs(logits, batch.tokens, temperature) * real, token_entropy(logits, temperature) * real


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_and_gradients_are_those_of_a_padded_forward_pass(open_backend, temperature):
    batch = draw_batch(0, 7, temperature=temperature)
    model = create_tiny_model()
    log_probs, entropy = reference_outputs(model, batch)
    (-(batch.loss_weights * log_probs).sum()).backward()
    found, results = await gradients(open_backend, [batch])
    if open_backend in TRAIN_ADAPTERS:
        moved = {name for (name, _), x in zip(model.named_parameters(), found, strict=True) if x.any()}
        assert moved == {
            f"{name}.weight" for name, layer in model.model.named_modules(prefix="model") if isinstance(layer, torch.nn.Linear)
        }
    else:
        assert_close(found, [p.grad for p in model.parameters()])
    assert results[0]["loss"] == pytest.approx(float(-(batch.loss_weights * log_probs).sum().detach()), abs=1e-5)
    async with open_backend(create_tiny_model()) as backend:
        torch.testing.assert_close(await backend.forward(batch, lambda o: o.log_probs).result(), log_probs.detach(), atol=1e-5, rtol=1e-4)
        out = await backend.forward(batch, lambda o: o.entropy, with_entropy=True).result()
        torch.testing.assert_close(out, entropy.detach(), atol=1e-5, rtol=1e-4)


async def test_micro_batches_row_order_and_padding_do_not_change_the_gradient(open_backend):
    batch = draw_batch(0, 7)
    whole, _ = await gradients(open_backend, [batch])
    split, parts = await gradients(open_backend, [select_rows(batch, rows) for rows in ([4, 0], [2], [6, 5, 3], [1])])
    assert_close(split, whole)
    assert sum(p["num_tokens"] for p in parts) == float((batch.loss_mask > 0).sum())
    shuffled, _ = await gradients(open_backend, [select_rows(batch, [6, 2, 0, 1, 5, 4, 3])])
    assert_close(shuffled, whole)

    def widen(x):
        return None if x is None else torch.nn.functional.pad(x, (0, 5)) if x.dim() == 2 else x

    wide = replace(batch, **{k: widen(getattr(batch, k)) for k in ("tokens", "loss_mask", "loss_weights")})
    padded, _ = await gradients(open_backend, [wide])
    assert_close(padded, whole)


def join_contexts(samples, counts):
    """Samples one behind the other as contexts of one row: the first counts[0] of them are row 0, and so on."""
    joined, rest = [], list(samples)
    for index, count in enumerate(counts):
        parts, rest = rest[:count], rest[count:]
        ends = [sum(len(p.tokens) for p in parts[: i + 1]) for i in range(count)]
        tokens, mask = (tuple(x for p in parts for x in getattr(p, name)) for name in ("tokens", "loss_mask"))
        joined.append(Sample(tokens=tokens, loss_mask=mask, index=index, temperature=parts[0].temperature, context_starts=tuple(ends[:-1])))
    return joined


@pytest.mark.parametrize("counts", [(7,), (1, 3, 2, 1), (2, 2, 3)])
async def test_contexts_of_a_row_are_what_they_are_as_rows(open_backend, counts):
    rows = [
        Sample(tokens=tuple((7 * i + t) % 61 + 3 for t in range(n)), loss_mask=(0.0, *(1.0,) * (n - 1)), temperature=0.7)
        for i, n in enumerate((5, 1, 9, 5, 2, 3, 9))
    ]
    alone, joined = collate_samples(rows), collate_samples(join_contexts(rows, counts))
    assert joined.context_ids is not None
    assert alone.loss_mask.sum() == joined.loss_mask.sum()
    alone, joined = (replace(batch, loss_weights=token_mean(batch)) for batch in (alone, joined))
    expected, (whole,) = await gradients(open_backend, [alone])
    found, (result,) = await gradients(open_backend, [joined])
    assert_close(found, expected)
    assert result["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    split, _ = await gradients(open_backend, [select_rows(joined, [row]) for row in range(joined.num_rows)])
    assert_close(split, expected)
    async with open_backend(create_tiny_model()) as backend:
        for output in (lambda o: o.log_probs, lambda o: o.entropy):
            a, b = [await backend.forward(batch, output, with_entropy=True).result() for batch in (alone, joined)]
            real = [torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None] for batch in (alone, joined)]
            torch.testing.assert_close(b[real[1]], a[real[0]], atol=1e-5, rtol=1e-4)
            assert (b[find_context_starts(joined.context_ids)] == 0).all()


async def test_a_policy_gradient_step_runs_and_reports(open_backend):
    batch = draw_batch(0, 8)
    batch = replace(batch, rewards=torch.arange(8.0) % 2)
    algorithm = dapo()
    async with open_backend(create_tiny_model()) as backend:
        old = await backend.forward(batch, lambda o: o.log_probs).result()
        batch = algorithm.estimate(replace(batch, rollout_log_probs=old))
        metrics = await backend.forward_backward(replace(batch, loss_weights=algorithm.weigh(batch)), algorithm.loss).result()
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        update = await backend.optim_step().result()
        assert update["grad_norm"] > 0
        assert update["lr"] == pytest.approx(1e-2 / 3)
        after = await backend.forward(batch, lambda o: o.log_probs).result()
        assert not torch.equal(after, old)


async def test_the_learning_rate_follows_the_schedule(open_backend):
    batch, rates = draw_batch(0, 7), []
    async with open_backend(create_tiny_model()) as backend:
        for _ in range(4):
            backend.forward_backward(batch, sft_loss)
            rates.append((await backend.optim_step().result())["lr"])
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])


async def test_it_overfits_one_batch(open_backend):
    batch = draw_batch(0, 7)
    async with open_backend(create_tiny_model()) as backend:
        losses = []
        for _ in range(20):
            losses.append(backend.forward_backward(batch, sft_loss))
            await backend.optim_step().result()
        share = 0.9 if open_backend in TRAIN_ADAPTERS else 0.6  # whose output layer, of random weights, is frozen
        assert (await losses[-1].result())["loss"] < share * (await losses[0].result())["loss"]


async def test_weights_are_a_snapshot_and_come_back(open_backend):
    batch = draw_batch(0, 7)
    async with open_backend(create_tiny_model()) as backend:
        weights = await backend.get_weights().result()
        kept = {name: value.clone() for name, value in weights.items()}
        before = await backend.forward(batch, lambda o: o.log_probs).result()
        backend.forward_backward(batch, sft_loss)
        await backend.optim_step().result()
        assert all(torch.equal(weights[name], kept[name]) for name in kept)
        assert await backend.load_weights(weights).result() is None
        assert torch.equal(await backend.forward(batch, lambda o: o.log_probs).result(), before)
        with pytest.raises(CheckpointError, match="does not fit"):
            await backend.load_weights({"nonsense": torch.zeros(1)}).result()


async def train(backend, steps):
    out = []
    for step in steps:
        loss = backend.forward_backward(draw_batch(step, 7), sft_loss)
        update = backend.optim_step()
        out.append((await loss.result(), await update.result()))
    return out


async def test_five_steps_a_checkpoint_and_five_steps_are_ten_steps_bit_for_bit(open_backend, tmp_path: Path):
    async with open_backend(create_tiny_model()) as backend:
        assert BackendFeature.CHECKPOINTS in get_backend_features(backend)
        straight = await train(backend, range(10))
        final = await backend.get_weights().result()
    async with open_backend(create_tiny_model()) as backend:
        first = await train(backend, range(5))
        await backend.save_checkpoint(tmp_path).result()
    async with open_backend(create_tiny_model(seed=9)) as backend:
        await backend.load_checkpoint(tmp_path).result()
        rest = await train(backend, range(5, 10))
        resumed = await backend.get_weights().result()
    assert first + rest == straight
    assert all(torch.equal(final[name], resumed[name]) for name in final)


async def test_a_staged_checkpoint_has_the_state_of_its_moment_however_much_later_it_is_written(open_backend, tmp_path: Path):
    async with open_backend(create_tiny_model()) as backend:
        await train(backend, range(3))
        staged = BackendFeature.STAGED_CHECKPOINTS in get_backend_features(backend)
        assert staged or not type(backend).__module__.startswith("rollouts."), "a backend of a user's may write it at once"
        write = await stage_backend(backend, tmp_path)
        straight = await train(backend, range(3, 6))
        await trio.to_thread.run_sync(write)
    async with open_backend(create_tiny_model(seed=9)) as backend:
        await backend.load_checkpoint(tmp_path).result()
        assert await train(backend, range(3, 6)) == straight


async def test_the_checkpoint_opens_as_a_hugging_face_model(open_backend, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = create_tiny_model(seed=4)
    batch = draw_batch(0, 7)
    async with open_backend(copy.deepcopy(model)) as backend:
        await backend.save_checkpoint(tmp_path).result()
        expected = await backend.forward(batch, lambda o: o.log_probs).result()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(reference_outputs(loaded, batch)[0].detach(), expected, atol=1e-5, rtol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("s1=") == create_char_tokenizer().encode("s1=")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("damage", ["truncate", "other architecture", "no trainer state", "not a model"])
async def test_a_checkpoint_that_does_not_fit_is_refused_with_a_reason(open_backend, tmp_path: Path, damage: str):
    size = 64 if damage == "other architecture" else 32
    async with open_backend(create_tiny_model(seed=5, hidden_size=size)) as backend:
        await backend.save_checkpoint(tmp_path).result()
    expected = {"truncate": "complete safetensors", "other architecture": "another architecture", "no trainer state": "trainer_state"}
    if damage == "truncate":
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "no trainer state":
        (tmp_path / "trainer_state.pt").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "sharded", ignore_errors=True)  # of a backend over several processes
    elif damage == "not a model":
        (tmp_path / "config.json").unlink()
    async with open_backend(create_tiny_model()) as backend:
        before = await backend.get_weights().result()
        with pytest.raises(CheckpointError, match=expected.get(damage, r"config\.json")):
            await backend.load_checkpoint(tmp_path).result()
        after = await backend.get_weights().result()
        assert all(torch.equal(before[name], after[name]) for name in before)  # refused before anything was overwritten


async def test_a_non_finite_gradient_is_skipped_and_counted(open_backend):
    batch = draw_batch(0, 7)
    bad = replace(batch, loss_weights=batch.loss_weights * float("inf"))
    async with open_backend(create_tiny_model()) as backend:
        backend.forward_backward(batch, sft_loss)
        await backend.optim_step().result()
        before = await backend.get_weights().result()
        backend.forward_backward(bad, sft_loss)
        assert (await backend.optim_step().result())["update_skipped"] == 1.0
        after = await backend.get_weights().result()
        assert all(torch.equal(before[name], after[name]) for name in before)
        backend.forward_backward(batch, sft_loss)
        assert (await backend.optim_step().result())["update_skipped"] == 0.0


async def test_weights_that_are_not_finite_are_refused(open_backend, tmp_path):
    async with open_backend(create_tiny_model()) as backend:
        before = await backend.get_weights().result()
        bad = {name: value.clone() for name, value in before.items()}
        bad["model.norm.weight"][0] = float("nan")
        with pytest.raises(CheckpointError, match=r"the given weights has a NaN weight .*model\.norm\.weight"):
            await backend.load_weights(bad).result()
        await backend.save_checkpoint(tmp_path).result()
        path = next(iter(tmp_path.glob("adapter/*.safetensors")), tmp_path / "model.safetensors")
        weights = load_file(path)
        name = list(weights)[-1]
        weights[name].view(-1)[0] = float("inf")
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"a NaN weight .*{name}"):
            await backend.load_checkpoint(tmp_path).result()


async def test_an_update_without_a_gradient_is_an_assertion(open_backend):
    async with open_backend(create_tiny_model()) as backend:
        with pytest.raises(AssertionError, match="without a forward_backward"):
            await backend.optim_step().result()
        await trio.lowlevel.checkpoint()


async def test_what_was_computed_before_a_checkpoint_is_loaded_does_not_count_behind_it(open_backend, tmp_path: Path):
    batch = draw_batch(0, 7)
    bad = replace(batch, loss_weights=batch.loss_weights * float("inf"))
    async with open_backend(create_tiny_model()) as backend:
        await backend.save_checkpoint(tmp_path).result()
        await backend.forward_backward(bad, sft_loss).result()
        await backend.load_checkpoint(tmp_path).result()
        await backend.forward_backward(batch, sft_loss).result()
        assert (await backend.optim_step().result())["update_skipped"] == 0.0
