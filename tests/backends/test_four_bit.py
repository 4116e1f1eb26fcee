"""Frozen weights in 4 bits below adapters, with the kernels of bitsandbytes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import needs
import pytest
import torch
from lora_ranks import LORA, SETTINGS, draw_step, select_log_probs, train

from integration.dry_run.memory import measure_frozen_width
from integration.dry_run.sizes import read_adapter_sizes, read_sizes
from rollouts.backends.factory import create_backend_with_scheduler
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.lora.adapters import add_adapters, copy_without_adapters
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.four_bit import BYTES_PER_WEIGHT, FourBitLinear, dequantize, quantize
from rollouts.models.weights import adapted_layers, adapter_of
from rollouts.testing import create_tiny_model

pytestmark = [pytest.mark.more, needs.BITSANDBYTES]

QUANTIZED = replace(LORA, base_dtype="nf4")
# the paper's appendix E
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
]
NF4 += [0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]


def create_backend(lora=QUANTIZED, model=None, **options):
    model = create_tiny_model() if model is None else model
    settings = SETTINGS | {"schedule": "constant", "total_steps": 1, "compute_dtype": "bfloat16"} | options
    return create_backend_with_scheduler(model, lora=lora, tokenizer=create_char_tokenizer(), **settings)


def log_probs(backend):
    return backend.forward(draw_step(), select_log_probs).value


@pytest.mark.parametrize("shape", [(3, 64), (5, 70), (1, 1), (48, 33)])
def test_each_block_is_rounded_to_the_nearest_quantiles_of_its_largest_number(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[0] = 0 if shape[0] > 1 else weight[0]
    found = dequantize(*quantize(weight), weight.shape)
    expected: list[float] = []
    numbers = weight.to(torch.bfloat16).flatten().tolist()
    for start in range(0, len(numbers), 64):
        block = numbers[start : start + 64]
        largest = max(abs(number) for number in block)
        expected += [largest * min(NF4, key=lambda code, x=number: abs(code - (x / largest if largest else 0))) for number in block]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.tensor(expected).view(shape).to(torch.bfloat16))


def test_numbers_that_were_rounded_stay_the_same():
    for scale in (1e-6, 0.02, 3e4):
        once = dequantize(*quantize(torch.randn(130, 77) * scale), torch.Size((130, 77)))
        assert torch.equal(once, dequantize(*quantize(once), once.shape))


def test_the_layer_computes_what_a_layer_with_the_rounded_weight_does_and_keeps_no_whole_weight():
    torch.manual_seed(0)
    layer = FourBitLinear(torch.randn(96, 160), torch.randn(96))
    dense = torch.nn.Linear(160, 96)
    dense.weight, dense.bias = torch.nn.Parameter(layer.read_weight().float()), layer.bias
    kept: list[int] = []

    def note(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    found, expected = (torch.randn(7, 160, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(found)
    torch.testing.assert_close(out, dense(expected))
    assert sum(kept) <= math.ceil(BYTES_PER_WEIGHT * 96 * 160)
    weights = torch.randn(7, 96)
    (out * weights).sum().backward()
    (dense(expected) * weights).sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(found).dtype == torch.bfloat16


def test_a_layer_can_be_moved_copied_and_cast_without_a_change():
    layer = FourBitLinear(torch.randn(8, 64))
    before = layer.read_weight()
    moved = copy.deepcopy(layer).to("cpu").to(torch.bfloat16).half().float()
    assert torch.equal(moved.read_weight(), before)
    assert [(name, tuple(value.shape), value.device.type) for name, value in moved.state_dict().items()] == [("weight", (8, 64), "meta")]
    moved.write_weight(torch.zeros(8, 64))
    assert float(moved.read_weight().abs().max()) == 0 and torch.equal(layer.read_weight(), before)


def test_adapters_are_trained_on_the_rounded_weights(tmp_path):
    backend = create_backend()
    base = {name: layer.base_layer for name, layer in adapted_layers(backend.model)}
    assert len(base) > 5 and all(isinstance(layer, FourBitLinear) for layer in base.values())
    before = {name: layer.read_weight() for name, layer in base.items()}
    rounded = create_tiny_model()
    with torch.no_grad():
        for name, value in before.items():
            rounded.get_submodule(name).weight.copy_(value)
    twin = create_backend(replace(LORA, base_dtype="bfloat16"), rounded)
    found, expected = train(backend, range(5)), train(twin, range(5))
    for left, right in zip(found, expected, strict=True):
        assert left[0]["loss"] == pytest.approx(right[0]["loss"], abs=1e-3)
        assert left[1]["grad_norm"] == pytest.approx(right[1]["grad_norm"], rel=0.02)
    assert all(torch.equal(layer.read_weight(), before[name]) for name, layer in base.items())
    weights = backend.get_weights().value
    for name, layer in adapted_layers(backend.model):
        a, b = adapter_of(layer)
        merged = (before[name].float() + LORA.scale * (b @ a)).detach().to(torch.bfloat16)
        assert torch.equal(weights[f"{name}.weight"], merged) and not torch.equal(merged, before[name]), name
    backend.export_weights(tmp_path / "merged")
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert all(torch.equal(value, weights[name]) for name, value in opened.state_dict().items())
    plain = copy_without_adapters(backend.model)
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    plain.set_attn_implementation("sdpa")
    step = draw_step().tokens
    torch.testing.assert_close(plain(step).logits, opened(step).logits)


def test_training_goes_on_bit_for_bit_after_a_checkpoint(tmp_path):
    whole = create_backend()
    expected = train(whole, range(6))
    first = create_backend()
    begun = train(first, range(3))
    first.save_checkpoint(tmp_path)
    second = create_backend()
    second.load_checkpoint(tmp_path)
    assert begun + train(second, range(3, 6)) == expected
    assert torch.equal(log_probs(second), log_probs(whole))
    with pytest.raises(CheckpointError, match="trained on other weights"):
        create_backend(replace(LORA, base_dtype="bfloat16")).load_checkpoint(tmp_path)


def test_a_saved_base_restores_the_same_bits(tmp_path):
    other = create_tiny_model(seed=5)
    lora = replace(QUANTIZED, save_base=True)
    first = create_backend(lora, other)
    train(first, range(2))
    first.save_checkpoint(tmp_path)
    second = create_backend(lora)
    assert not torch.equal(log_probs(second), log_probs(first))
    second.load_checkpoint(tmp_path)
    assert torch.equal(log_probs(second), log_probs(first))
    assert train(second, range(2, 4)) == train(first, range(2, 4))


def test_a_saved_base_of_more_bits_is_not_rounded_below_adapters_that_were_trained_on_it(tmp_path):
    exact = create_backend(replace(LORA, base_dtype="bfloat16", save_base=True))
    exact.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has not the weights that .* was trained on"):
        create_backend().load_checkpoint(tmp_path)


def test_loaded_weights_replace_the_rounded_ones():
    backend, other = create_backend(), create_backend(model=create_tiny_model(seed=5))
    backend.load_weights(create_tiny_model(seed=5).state_dict())
    assert torch.equal(log_probs(backend), log_probs(other))


def test_the_dry_run_names_the_memory_that_the_frozen_weights_take():
    model = create_tiny_model(vocab_size=300, hidden_size=64)
    sizes = read_sizes(model.config)
    frozen = [p for p in create_backend(model=model).model.parameters() if not p.requires_grad and not p.is_meta]
    held = [getattr(layer.base_layer, name) for _, layer in adapted_layers(model) for name in ("_codes", "_scales")]
    found = sum(tensor.numel() * tensor.element_size() for tensor in [*frozen, *held])
    assert found == measure_frozen_width(sizes, read_adapter_sizes(sizes, QUANTIZED), "nf4") * sizes.num_parameters
    assert found < 0.25 * 4 * sizes.num_parameters


def test_misuse_is_refused():
    with pytest.raises(ConfigError, match="FSDP does not shard weights in 4 bits"):
        create_fsdp_backend(create_tiny_model(), lora=QUANTIZED, lr=1e-2)
    with pytest.raises(ConfigError, match="matrix products are in float32"):
        create_backend(compute_dtype="float32")
    model = create_tiny_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match=r"NaN weight .*q_proj"):
        add_adapters(model, QUANTIZED)
