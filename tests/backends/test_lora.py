from __future__ import annotations

import copy
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lora_ranks
import pytest
import torch
from expert_models import create_expert_model
from lora_ranks import draw_step, select_log_probs
from lora_ranks import train as train_steps
from rank_processes import start_ranks
from safetensors.torch import load_file, save_file

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_backend_with_scheduler, create_critic_backend, create_pytorch_backend, create_reference_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora.adapters import adapters_off, add_adapters, copy_without_adapters, count_lora_parameters, linear_layers
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.lora.files import fingerprint_base, read_adapters
from rollouts.backends.lora.reference import create_lora_reference
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.models.heads import create_critic_model
from rollouts.models.weights import adapted_layers, adapter_of
from rollouts.testing import create_tiny_model

LORA = LoRAConfig(rank=4, alpha=12.0)


def create_backend(model=None, lora: LoRAConfig = LORA, **options):
    model = create_tiny_model() if model is None else model
    settings = {"lr": 1e-2, "schedule": "constant", "total_steps": 1} | options
    return create_backend_with_scheduler(model, lora=lora, tokenizer=create_char_tokenizer(), **settings)


create_adapted = create_backend


def create_whole_fsdp_backend(model, lora: LoRAConfig = LORA):
    return create_fsdp_backend(model, lora=lora, tokenizer=create_char_tokenizer(), lr=1e-2)


def train(backend, steps=range(3)):
    return train_steps(backend, steps)


def log_probs(backend):
    return backend.forward(draw_step(), select_log_probs).value


def adapters(model):
    return {
        f"{name} {part}": p.detach().clone()
        for name, layer in adapted_layers(model)
        for part, p in zip("AB", adapter_of(layer), strict=True)
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_model_with_new_adapters_computes_what_it_did_and_only_they_are_trained(architecture):
    model = create_tiny_model(architecture=architecture)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    expected = log_probs(create_pytorch_backend(copy.deepcopy(model), lr=1e-2))
    backend = create_backend(model)
    assert torch.equal(log_probs(backend), expected)
    losses = [loss["loss"] for loss, _ in train(backend, [0] * 6)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.3
    trained = [p for group in backend.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in trained) == count_lora_parameters(linear_layers(create_tiny_model(architecture=architecture)), LORA)
    with adapters_off(model):
        assert torch.equal(log_probs(backend), expected)  # the base is where it was
    assert all(not p.requires_grad and p.grad is None for name, p in model.named_parameters() if "lora_" not in name)
    merged = backend.get_weights().value
    changed = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert merged.keys() == plain.keys()
    assert changed == {f"{name}.weight" for name, _ in adapted_layers(model)}


def test_the_gradient_is_that_of_the_weights_times_the_other_factor():
    """W' = W + scale * B A, so dB = scale * dW' A^T and dA = scale * B^T dW'."""
    backend = create_backend()
    train(backend)
    plain = copy_without_adapters(backend.model)
    create_pytorch_backend(plain, lr=1e-2).forward_backward(draw_step(7), sft_loss)
    backend.forward_backward(draw_step(7), sft_loss)
    assert LORA.scale == 3.0
    for name, layer in adapted_layers(backend.model):
        dw, (a, b) = plain.get_submodule(name).weight.grad, adapter_of(layer)
        torch.testing.assert_close(b.grad, LORA.scale * dw @ a.detach().T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(a.grad, LORA.scale * b.detach().T @ dw, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_merged_weights_are_those_that_peft_merges(use_rslora: bool, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = create_backend(lora=replace(LORA, use_rslora=use_rslora))
    train(backend)
    backend.save_checkpoint(tmp_path)
    expected = PeftModel.from_pretrained(create_tiny_model(), str(tmp_path / "adapter")).merge_and_unload().state_dict()
    merged = backend.get_weights().value
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    without = copy_without_adapters(backend.model)
    assert list(merged) == list(expected)
    for found in (merged, opened.state_dict(), without.state_dict()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    stored = load_file(tmp_path / "model.safetensors")
    assert not [name for name in stored if "lora" in name or "base_layer" in name] and "lm_head.weight" not in stored
    assert all(p.requires_grad for p in without.parameters()) and not hasattr(without, "peft_config")
    torch.testing.assert_close(log_probs(create_pytorch_backend(opened, lr=1e-2)), log_probs(backend), atol=1e-5, rtol=1e-4)
    gathered = backend.gather_weights(["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]).value
    assert all(torch.equal(value, merged[name]) for name, value in gathered.items())
    assert {spec.name for spec in backend.describe_weights().value} | {"lm_head.weight"} == set(merged)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "qwen3_moe"])
def test_dense_layers_beside_experts_are_adapted_and_experts_are_not(family: str):
    """peft takes gate_proj of a mixture of experts for the experts, and a merge then has no weight of a layer."""
    model = create_expert_model(family, vocab_size=len(create_char_tokenizer()))
    expected = set(linear_layers(model))
    add_adapters(model, LORA)
    assert {name for name, _ in adapted_layers(model)} == expected
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in trained if ".experts." in name]
    assert len(trained) == 2 * len(expected)
    assert set(linear_layers(copy_without_adapters(model))) == expected


@pytest.mark.parametrize("family", ["llama4_text", "phimoe"])
def test_routers_that_return_chosen_experts_get_no_adapter_and_the_model_trains(family: str):
    """They are subclasses of a linear layer, whose result peft would add to."""
    settings = {"llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": 8}, "phimoe": {"sliding_window": 8}}[family]
    model = create_expert_model(family, vocab_size=len(create_char_tokenizer()), num_local_experts=6, **settings)
    backend = create_pytorch_backend(model, lr=1e-2, lora=LORA)
    adapted = {name for name, _ in adapted_layers(backend.model)}
    assert adapted and not [name for name in adapted if name.endswith("router")]
    assert [name for name, _ in backend.model.named_modules() if name.endswith("router")]
    train_steps(backend, range(1))


def test_adapters_begin_by_their_seed_alone():
    torch.manual_seed(1)
    first = adapters(create_backend().model)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = adapters(create_backend().model)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, second)
    a = {name: value for name, value in first.items() if name.endswith("A")}
    assert all(not value.any() for name, value in first.items() if name.endswith("B"))
    other = adapters(create_backend(lora=replace(LORA, seed=3)).model)
    assert not any(torch.equal(value, other[name]) for name, value in a.items())
    bounded = [value.abs().max() * value.shape[1] ** 0.5 for value in a.values()]
    assert min(bounded) > 0.9 and max(bounded) <= 1
    layers = [value for name, value in a.items() if "q_proj" in name]
    assert not torch.equal(layers[0], layers[1])


def test_dropout_is_active_in_training_only():
    backend = create_backend(lora=replace(LORA, dropout=0.5))
    train(backend)
    assert torch.equal(log_probs(backend), log_probs(backend))
    torch.testing.assert_close(
        log_probs(create_pytorch_backend(copy_without_adapters(backend.model), lr=1.0)), log_probs(backend), atol=1e-5, rtol=1e-4
    )
    losses = {backend.forward_backward(draw_step(), sft_loss).value["loss"] for _ in range(3)}
    assert len(losses) == 3


def test_given_weights_become_the_base_and_adapters_begin_anew():
    backend = create_backend()
    train(backend)
    weights, before = backend.get_weights().value, log_probs(backend)
    train(backend)
    assert not torch.allclose(log_probs(backend), before, atol=1e-3)
    backend.load_weights(weights)
    torch.testing.assert_close(log_probs(backend), before, atol=1e-5, rtol=1e-4)
    assert same(backend.get_weights().value, weights)
    assert all(not value.any() for name, value in adapters(backend.model).items() if name.endswith("B"))
    fresh = create_backend()
    fresh.load_weights(weights)
    assert train(backend, [7]) == train(fresh, [7])  # neither A nor the moments remember
    assert same(backend.get_weights().value, fresh.get_weights().value)
    with pytest.raises(CheckpointError, match="does not fit"):
        backend.load_weights({"model.layers.0.self_attn.q_proj.base_layer.weight": torch.zeros(32, 32)})


@pytest.mark.parametrize(("save_base", "dtype"), [(False, "float32"), (True, "float32"), (False, "bfloat16"), (True, "bfloat16")])
def test_five_steps_a_checkpoint_and_five_steps_are_ten_steps_bit_for_bit(save_base: bool, dtype: Any, tmp_path: Path):
    config = replace(LORA, save_base=save_base, dropout=0.1, base_dtype=dtype)
    create_backend = partial(create_adapted, compute_dtype=dtype)
    torch.manual_seed(5)
    backend = create_backend(lora=config)
    straight = train(backend, range(10))
    torch.manual_seed(5)
    half = create_backend(lora=config)
    first = train(half, range(5))
    half.save_checkpoint(tmp_path)
    other = create_tiny_model(seed=9 if save_base else 0)  # with the base in the checkpoint any model of the architecture will do
    resumed = create_backend(other, replace(config, seed=77))
    resumed.load_checkpoint(tmp_path)
    assert first + train(resumed, range(5, 10)) == straight
    assert same(adapters(resumed.model), adapters(backend.model))
    assert same(resumed.get_weights().value, backend.get_weights().value)
    assert fingerprint_base(resumed.model) == fingerprint_base(backend.model)
    assert (tmp_path / "base" / "config.json").exists() == save_base


def test_a_base_that_was_replaced_is_saved_because_nobody_else_has_it(tmp_path: Path):
    backend = create_backend()
    backend.load_weights(create_tiny_model(seed=3).state_dict())
    train(backend)
    backend.save_checkpoint(tmp_path)
    resumed = create_backend()
    resumed.load_checkpoint(tmp_path)
    assert train(resumed) == train(backend)
    resumed.save_checkpoint(tmp_path / "again")
    assert (tmp_path / "again" / "base").is_dir()
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 1e-6
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="has not the weights"):
        create_backend().load_checkpoint(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "backend", "expected"),
    [
        (None, lambda: create_backend(create_tiny_model(seed=9)), "were trained on other weights"),
        (None, lambda: create_backend(lora=replace(LORA, rank=8, alpha=24.0)), "r is 4, expected 8"),
        (None, lambda: create_backend(lora=replace(LORA, alpha=8.0)), "lora_alpha is 12, expected 8"),
        (None, lambda: create_backend(lora=replace(LORA, target_modules=("q_proj",))), r"expected \['q_proj'\]"),
        (None, lambda: create_pytorch_backend(create_tiny_model(), lr=1e-2), "trains adapters, and this one trains all weights"),
        (lambda path: cut(path / "adapter" / "adapter_model.safetensors"), create_backend, "adapter_model.safetensors is not a complete"),
        (lambda path: cut(path / "model.safetensors"), create_backend, "/model.safetensors is not a complete"),
        (lambda path: (path / "adapter" / "base.json").unlink(), create_backend, "base.json does not say"),
        (lambda path: (path / "adapter" / "adapter_config.json").write_text("{"), create_backend, "adapter_config.json cannot be read"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_a_reason(damage, backend, expected: str, tmp_path: Path):
    saved = create_backend()
    train(saved, range(1))
    saved.save_checkpoint(tmp_path)
    if damage is not None:
        damage(tmp_path)
    loading = backend()
    before = loading.get_weights().value
    with pytest.raises(CheckpointError, match=expected):
        loading.load_checkpoint(tmp_path)
    assert same(loading.get_weights().value, before)


OTHER_WEIGHTS = {"seed": 4}


def save_with_base(folder: Path, base: torch.nn.Module | None = None, lora: LoRAConfig = LORA) -> None:
    """A checkpoint of adapters on the model of seed 3 with its base, or what was put into the place of that."""
    backend = create_backend(create_tiny_model(seed=3), replace(lora, save_base=True))
    train(backend, range(1))
    folder.mkdir(exist_ok=True)
    backend.save_checkpoint(folder)
    if base is not None:
        base.save_pretrained(folder / "base")


@pytest.mark.parametrize(
    ("create", "base", "lora", "expected"),
    [
        (create_backend, OTHER_WEIGHTS, LORA, r"/base has not the weights that .*/adapter was trained on \(fingerprint .*: restore it"),
        (create_whole_fsdp_backend, OTHER_WEIGHTS, LORA, r"/base has not the weights that .*/adapter was trained on"),
        (create_backend, {"architecture": "llama"}, LORA, r"/base does not fit this .*missing \['model.layers.0.self_attn.k_norm"),
        (
            create_backend,
            None,
            LORA,
            r"model.safetensors is not a complete safetensors file.* restore that directory from a backup, or",
        ),
        (create_backend, None, replace(LORA, rank=2), r"r is 2, expected 4\. Go on with the lora settings"),
    ],
)
def test_a_base_that_is_not_that_of_the_adapters_is_refused_before_anything_changes(create, base, lora, expected: str, tmp_path: Path):
    save_with_base(tmp_path, None if base is None else create_tiny_model(**base), lora)
    if base is None:
        cut(tmp_path / "base" / "model.safetensors")
    loading, untouched = create(create_tiny_model()), create(create_tiny_model())
    for backend in (loading, untouched):
        train(backend, range(2))
    with pytest.raises(CheckpointError, match=expected):
        loading.load_checkpoint(tmp_path)
    assert same(loading.get_weights().value, untouched.get_weights().value)
    assert train(loading, range(2, 4)) == train(untouched, range(2, 4))  # optimizer, schedule and base are where they were
    loading.save_checkpoint(tmp_path / "later")
    assert not (tmp_path / "later" / "base").exists()


def test_adapters_of_other_sizes_are_refused_with_the_name_of_one(tmp_path: Path):
    save_with_base(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    save_file(load_file(path) | {name: torch.zeros(48, 4)}, path)
    with pytest.raises(
        CheckpointError, match=rf"of other layers or sizes than this model's: {name} is \(48, 4\), expected \(64, 4\)\. Make"
    ):
        create_backend(create_tiny_model(seed=3)).load_checkpoint(tmp_path)


def test_adapters_that_cannot_be_read_are_refused(tmp_path: Path):
    (tmp_path / "adapter_model.safetensors").symlink_to(tmp_path / "removed")
    model = create_backend(create_tiny_model(seed=3)).model
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read \(No such file or directory\): give this user"):
        read_adapters(model, tmp_path)


def test_a_checkpoint_of_whole_weights_is_refused_by_a_backend_with_adapters(tmp_path: Path):
    create_pytorch_backend(create_tiny_model(), lr=1e-2).save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="has no adapters"):
        create_backend().load_checkpoint(tmp_path)


def test_the_adapter_is_written_as_peft_and_servers_read_it(tmp_path: Path):
    backend = create_backend(lora=replace(LORA, target_modules=("q_proj", "v_proj")))
    backend.save_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["target_modules"] == ["q_proj", "v_proj"] and settings["task_type"] == "CAUSAL_LM"
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    assert path.stat().st_mode & 0o777 == 0o644
    assert len(tensors) == 2 * 2 * 2 and all(value.dtype == torch.float32 for value in tensors.values())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors


def test_targets_are_named_in_full_where_their_ends_would_mean_more(tmp_path: Path):
    backend = create_backend(lora=replace(LORA, target_modules=("layers.1.mlp.up_proj",)))
    assert [name for name, _ in adapted_layers(backend.model)] == ["model.layers.1.mlp.up_proj"]
    backend.save_checkpoint(tmp_path)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LoRAConfig(rank=0), "rank is 0"),
        (lambda: LoRAConfig(dropout=1.0), "dropout is 1.0"),
        (lambda: LoRAConfig(alpha=0.0), "alpha is 0.0"),
        (lambda: LoRAConfig(target_modules="q_proj"), "a tuple of names"),  # type: ignore[arg-type]
        (lambda: create_backend(lora=LoRAConfig(target_modules=("q_porj",))), "'q_porj', but no linear layer .* choose from .*q_proj"),
        (lambda: create_backend(lora=LoRAConfig(target_modules=("lm_head",))), "'lm_head', but no linear layer below the output layer"),
        (lambda: create_backend(lora=LoRAConfig(target_modules=("embed_tokens",))), "'embed_tokens', but no linear layer"),
        (lambda: add_adapters(create_critic_model(create_tiny_model()), LORA), "train a critic or a reward model without lora"),
        (lambda: create_backend(create_backend().model), "has adapters already"),
        (lambda: create_pytorch_backend(create_backend().model, lr=1e-2), "has adapters, but lora is None"),
        (lambda: create_lora_reference(create_pytorch_backend(create_tiny_model(), lr=1e-2)), "trains all weights"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(make, expected: str):
    with pytest.raises(ConfigError, match=expected):
        make()


@pytest.mark.parametrize(
    ("rank", "targets", "above"),
    [(16, ("all-linear",), None), (17, ("all-linear",), "4 of the 14"), (32, ("q_proj",), None), (33, ("q_proj",), "2 of the 2")],
)
def test_a_rank_above_the_smaller_size_of_a_layer_is_taken_with_a_warning(rank: int, targets: tuple[str, ...], above: str | None):
    """Layers of 32 inputs; keys and values of 16 outputs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = create_backend(lora=LoRAConfig(rank=rank, target_modules=targets))
    told = [str(warning.message) for warning in caught if "rank" in str(warning.message)]
    assert len(told) == (above is not None)
    if above is not None:
        name, outputs = ("q_proj", 32) if rank == 33 else ("k_proj", 16)
        assert f"the rank of the adapters is {rank}, but {above} adapted layers are smaller: model.layers.0.self_attn.{name} " in told[0]
        assert f"has 32 inputs and {outputs} outputs" in told[0] and f"Give a rank of at most {outputs}, or leave" in told[0]
    train(backend, [0])


def test_without_peft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollouts-rl\[lora\]'"):
        create_backend()


async def test_the_model_without_adapters_is_the_reference_while_training_goes_on():
    model = create_tiny_model()
    expected = log_probs(create_reference_backend(copy.deepcopy(model)))
    async with open_pipeline(create_backend(model)) as pipeline:
        reference = create_lora_reference(pipeline)
        assert reference.computes == pipeline.computes and reference.token_spec == pipeline.token_spec
        found = []
        for step in range(4):  # all submitted at once: passes with and without adapters alternate
            pipeline.forward_backward(draw_step(step), sft_loss)
            found.append(reference.forward(draw_step(), select_log_probs))
            pipeline.optim_step()
            found.append(reference.forward(draw_step(), select_log_probs))
        assert all([torch.equal(await job.result(), expected) for job in found])
        assert not torch.allclose(await pipeline.forward(draw_step(), select_log_probs).result(), expected, atol=1e-3)
        with pytest.raises(BackendError, match="optim_step was called on the reference"):
            reference.optim_step()
    straight = create_backend()
    train(straight, range(4))
    assert same(adapters(straight.model), adapters(model))  # the passes between changed nothing


def test_a_critic_begins_at_the_merged_weights():
    backend = create_backend()
    train(backend)
    critic = create_critic_backend(backend.model, lr=1e-2)
    merged = backend.get_weights().value
    weights = critic.get_weights().value
    shared = [name for name in weights if name in merged]
    assert len(shared) > 20 and all(torch.equal(weights[name], merged[name]) for name in shared)
    assert all(p.requires_grad for p in critic.model.parameters())


ROUNDED = replace(LORA, base_dtype="bfloat16")


def test_a_base_in_bfloat16_trains_float32_adapters():
    exact, rounded = create_backend(compute_dtype="bfloat16"), create_backend(lora=ROUNDED, compute_dtype="bfloat16")
    base = {name: value.clone() for name, value in rounded.get_weights().value.items()}
    assert {(p.dtype, p.requires_grad) for p in rounded.model.parameters()} == {(torch.bfloat16, False), (torch.float32, True)}
    assert {value.dtype for value in base.values()} == {torch.bfloat16}
    for left, right in zip(train(exact), train(rounded), strict=True):
        assert left[0]["loss"] == pytest.approx(right[0]["loss"], abs=2e-3)
        assert left[1]["grad_norm"] == pytest.approx(right[1]["grad_norm"], rel=0.05)
    name = "model.layers.0.self_attn.q_proj.weight"
    (layer,) = [layer for found, layer in adapted_layers(rounded.model) if found == name.removesuffix(".weight")]
    a, b = adapter_of(layer)
    whole = (base[name].float() + LORA.scale * (b @ a)).detach()  # rounded once, after the sum
    assert rounded.get_weights().value[name].equal(whole.to(torch.bfloat16)) and not base[name].equal(whole.to(torch.bfloat16))
    critic = create_critic_backend(rounded.model, lr=1e-2)
    assert {p.dtype for p in critic.model.parameters()} == {torch.float32}


def test_frozen_weights_in_bfloat16_need_passes_in_bfloat16():
    for create in (partial(create_backend, lora=ROUNDED), partial(create_fsdp_backend, lora=ROUNDED, lr=1e-2), None):
        with pytest.raises(ConfigError, match="is bfloat16, but matrix products are in float32"):
            if create is None:
                create_reference_backend(create_tiny_model(), dtype="bfloat16")
            else:
                create(create_tiny_model())
    model = create_tiny_model()
    reference = create_reference_backend(copy.deepcopy(model), dtype="bfloat16", compute_dtype="bfloat16")
    assert {p.dtype for p in reference.model.parameters()} == {torch.bfloat16}
    found, expected = log_probs(reference), log_probs(create_reference_backend(model))
    assert 0 < float((found - expected).abs().max()) < 0.02


@pytest.mark.slow
def test_two_ranks_train_on_a_base_in_bfloat16_as_one_process_does(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path / "model")
    create_char_tokenizer().save_pretrained(tmp_path / "model")
    tests = str(Path(__file__).parents[1] / "support")
    code = f"""
sys.path.insert(0, {tests!r})
import json, torch, lora_ranks
from pathlib import Path
from dataclasses import replace
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend, create_fsdp_reference_backend
from rollouts.backends.ranks.distributed import init_distributed, leave_distributed
folder, ranks = Path(sys.argv[1]), init_distributed(timeout_s=60, init_method="env://")
shared = {{"ranks": ranks, "config": FSDPConfig(mixed_precision="bfloat16")}}
lora = replace(lora_ranks.LORA, base_dtype="bfloat16")
backend = create_fsdp_backend(folder / "model", **lora_ranks.SETTINGS, **shared, lora=lora)
reference = create_fsdp_reference_backend(folder / "model", dtype="bfloat16", **shared)
found = {{
    "kinds": sorted({{str((p.dtype, p.requires_grad)) for p in backend.model.parameters()}}),
    "frozen": sorted({{str(p.dtype) for p in reference.model.parameters()}}),
    "reference": reference.forward(lora_ranks.draw_step(), lora_ranks.select_log_probs).value.tolist(),
    "history": lora_ranks.train(backend, range(4)),
    "dtypes": sorted({{str(value.dtype) for value in backend.get_weights().value.values()}}),
}}
(folder / f"rank_{{ranks.rank}}.json").write_text(json.dumps(found))
leave_distributed()
"""
    children = start_ranks(code, 2, tmp_path, folder=tmp_path / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    zero, one = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    assert zero["kinds"] == ["(torch.bfloat16, False)", "(torch.float32, True)"] and zero["frozen"] == zero["dtypes"] == ["torch.bfloat16"]
    single = create_backend(lora=replace(lora_ranks.LORA, base_dtype="bfloat16"), compute_dtype="bfloat16", **lora_ranks.SETTINGS)
    for found, expected in zip(zero["history"], train(single, range(4)), strict=True):
        assert found[0]["loss"] == pytest.approx(expected[0]["loss"], abs=2e-3)
        assert found[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=0.05)
    alone = create_reference_backend(create_tiny_model(), dtype="bfloat16", compute_dtype="bfloat16")
    torch.testing.assert_close(torch.tensor(zero["reference"]), log_probs(alone), atol=5e-3, rtol=0)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return the findings of each of two ranks, and the folder with the files of both and of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    model = create_tiny_model()
    for name in ("model", "single", "two_ranks"):
        (folder / name).mkdir()
    model.save_pretrained(folder / "model")
    create_char_tokenizer().save_pretrained(folder / "model")
    single = create_backend(lora=lora_ranks.LORA, **lora_ranks.SETTINGS)
    train(single, range(3))
    single.save_checkpoint(folder / "single")
    save_with_base(folder / "wrong_base", create_tiny_model(seed=4), lora_ranks.LORA)
    tests = str(Path(__file__).parents[1] / "support")
    code = f"sys.path.insert(0, {tests!r})\nfrom pathlib import Path\nimport lora_ranks\nlora_ranks.main(Path(sys.argv[1]))"
    children = start_ranks(code, 2, folder, folder=folder / "output")
    try:
        assert [child.wait() for child in children] == [0, 0], [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)], folder


def check_history(found, expected):
    for step, (found_step, expected_step) in enumerate(zip(found, expected, strict=True)):
        for left, right in zip(found_step, expected_step, strict=True):
            assert left == pytest.approx(right, abs=1e-5), f"step {step}"


@pytest.mark.slow
def test_two_ranks_train_adapters_as_one_process_does(two_ranks):
    (zero, one), folder = two_ranks
    assert zero == one
    model = create_tiny_model()
    assert zero["sharded"] and zero["trained"] == count_lora_parameters(linear_layers(create_tiny_model()), lora_ranks.LORA)
    expected = log_probs(create_reference_backend(copy.deepcopy(model)))
    single = create_backend(model, lora_ranks.LORA, **lora_ranks.SETTINGS)
    assert zero["fingerprint"] == fingerprint_base(single.model)
    check_history(zero["history"], train(single, range(5)))
    merged = torch.load(folder / "weights.pt")
    for name, value in single.get_weights().value.items():
        torch.testing.assert_close(merged[name], value, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(zero["log_probs"]), log_probs(single), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(zero["reference"]), expected, atol=1e-5, rtol=0)
    check_history(zero["rest"], train(single, range(5, 7)))


@pytest.mark.slow
def test_all_ranks_refuse_a_wrong_base_and_keep_what_they_have(two_ranks):
    (zero, one), folder = two_ranks
    assert zero["kept"] and one["kept"]
    assert zero["refused"] == one["refused"] and f"{folder / 'wrong_base' / 'base'} has not the weights that" in zero["refused"]


@pytest.mark.slow
def test_adapters_go_on_on_another_number_of_ranks(two_ranks):
    from transformers import AutoModelForCausalLM

    (zero, _), folder = two_ranks
    assert zero["again"] == zero["rest"]  # two ranks load what two ranks saved, bit for bit
    check_history(zero["resumed"], zero["history"][3:])  # two ranks load what one process saved
    merged = torch.load(folder / "weights.pt")
    for create in (create_backend_with_scheduler, create_fsdp_backend):
        settings = {"schedule": "constant", "total_steps": 1} | lora_ranks.SETTINGS
        backend = create(create_tiny_model(), lora=lora_ranks.LORA, **settings)
        backend.load_checkpoint(folder / "two_ranks")
        assert same(backend.get_weights().value, merged)
        check_history(train(backend, range(5, 7)), zero["rest"])
    opened = AutoModelForCausalLM.from_pretrained(folder / "two_ranks").state_dict()
    for name, value in opened.items():
        torch.testing.assert_close(value, merged[name], atol=1e-6, rtol=0)
    assert (folder / "two_ranks" / "adapter" / "adapter_config.json").exists() and not (folder / "two_ranks" / "base").exists()
