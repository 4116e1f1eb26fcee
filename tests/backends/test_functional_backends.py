"""The functional backends beside the contract: the same numbers as the PyTorch backend, states that are values, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import run

from integration.parts.model_settings import check_backend
from integration.parts.models import create_backend
from integration.settings.config import Config
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.model import LoRASection, ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss, value_loss
from rollouts.algorithms.presets import grpo
from rollouts.backends.factory import create_backend_with_scheduler
from rollouts.backends.functional.backend import TorchFuncTrainingBackend, create_torch_func_backend
from rollouts.backends.functional.state import accumulate_gradient, apply_update, create_state, train_step
from rollouts.backends.jax.backend import TRIED, JAXTrainingBackend, create_jax_backend, create_torchax_backend
from rollouts.backends.jax.model import read_decoder_config, round_up
from rollouts.backends.optim.optimizers import AdamW
from rollouts.backends.protocol import BackendFeature, get_backend_features
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.batches import select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.data.collate import collate_samples
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.forward.outputs import compute_values
from rollouts.models.heads import create_critic_model
from rollouts.testing import create_tiny_model
from rollouts.types import LossOutput, Sample, TokenOutputs

TRAINING = {"lr": 3e-3, "schedule": "cosine", "total_steps": 10, "warmup_steps": 2, "weight_decay": 0.1}
CLIPPED = {**TRAINING, "max_grad_norm": 0.05}  # which every gradient here exceeds
MICRO_BATCHES = ([6, 1], [0, 3, 5, 7], [4, 2])  # ragged, and unequal in number
FACTORIES = [create_torch_func_backend, create_jax_backend]
ROOT = Path(__file__).parents[2]


def create_qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def draw_ragged(seed: int = 0, rows: int = 8):
    """Ragged rows in groups of two."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(rows):
        n = int(torch.randint(2, 14, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 64, (n,), generator=generator).tolist())
        mask = (0.0, *((torch.rand(n - 1, generator=generator) < 0.8).float().tolist()))
        samples.append(Sample(tokens=tokens, loss_mask=mask, index=i, group_index=i // 2, temperature=0.8))
    batch = collate_samples(samples)
    return replace(batch, rewards=torch.rand(rows, generator=generator), loss_weights=token_mean(batch))


async def step_of(backend, batch, loss_fn, *, with_entropy=False) -> tuple[float, float, float]:
    """Loss, gradient norm and learning rate of one optimizer step over several micro-batches."""
    parts = [select_rows(batch, rows) for rows in MICRO_BATCHES]
    losses = [await backend.forward_backward(part, loss_fn, with_entropy=with_entropy).result() for part in parts]
    update = await backend.optim_step().result()
    return sum(part["loss"] for part in losses), update["grad_norm"], update["lr"]


async def run_sft(backend, num_steps: int = 10):
    return [await step_of(backend, draw_ragged(step), sft_loss) for step in range(num_steps)]


async def run_grpo(backend, num_steps: int = 10):
    """Two optimizer steps on each rollout batch, so that the ratio moves; with an entropy bonus."""
    algorithm, batch, steps = grpo(entropy_coef=0.01), None, []
    for step in range(num_steps):
        if step % 2 == 0:
            batch = draw_ragged(step)
            old = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
            batch = algorithm.estimate(replace(batch, rollout_log_probs=old))
            batch = replace(batch, loss_weights=algorithm.weigh(batch))
        steps.append(await step_of(backend, batch, algorithm.loss, with_entropy=True))
    return steps


async def compare(create, create_model, run_steps, settings):
    expected = await run_steps(create_backend_with_scheduler(create_model(), **settings))
    found = await run_steps(create(create_model(), **settings))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    losses = [loss for loss, _, _ in found]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize(
    "create", [create_torch_func_backend, pytest.param(create_jax_backend, marks=pytest.mark.slow)], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("run_steps", "settings"),
    [pytest.param(run_sft, TRAINING, id="sft", marks=pytest.mark.slow), pytest.param(run_grpo, CLIPPED, id="grpo, clipped")],
)
async def test_ten_steps_have_the_losses_of_the_pytorch_backend(create, run_steps, settings):
    await compare(create, create_tiny_model, run_steps, settings)


@pytest.mark.slow
@pytest.mark.parametrize("create", FACTORIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("create_model", [partial(create_tiny_model, architecture="llama"), create_qwen2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("run_steps", [run_sft, run_grpo], ids=lambda f: f.__name__)
async def test_so_have_those_of_other_architectures(create, create_model, run_steps):
    await compare(create, create_model, run_steps, CLIPPED)


# -- the pure functions


def project(parameters, batch, with_entropy):
    """A model of one's own: the log-probs of a table of tokens and a bias, without any library."""
    log_p = torch.log_softmax(parameters["table"][batch.tokens] + parameters["bias"], dim=-1)  # [B, T, V]
    chosen = log_p[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    return TokenOutputs(log_probs=torch.nn.functional.pad(chosen, (1, 0)))


def table_parameters():
    generator = torch.Generator().manual_seed(1)
    return {"table": torch.randn(64, 64, generator=generator), "bias": torch.randn(64, generator=generator)}


@pytest.mark.parametrize("max_grad_norm", [0.01, float("inf")])
def test_a_step_over_any_function_is_that_of_torch_adamw(max_grad_norm):
    rule = AdamW(lr=1e-2, weight_decay=0.3, max_grad_norm=max_grad_norm, schedule=lambda step: 1 / (1 + step))
    state = create_state(table_parameters())
    own = {name: torch.nn.Parameter(value) for name, value in table_parameters().items()}
    groups = [{"params": [own["table"]], "weight_decay": 0.3}, {"params": [own["bias"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=rule.betas)
    for step in range(5):
        batch = draw_ragged(step)
        state, metrics = train_step(state, [select_rows(batch, rows) for rows in MICRO_BATCHES], sft_loss, project, rule)
        loss = sft_loss(project(own, batch, False), batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(own.values(), max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for name, value in own.items():
            torch.testing.assert_close(state.parameters[name], value.detach(), atol=2e-6, rtol=1e-5)


def test_steps_leave_their_arguments_as_they_were_and_give_the_same_again():
    state, rule, batch = create_state(table_parameters()), AdamW(lr=1e-2), draw_ragged()
    with_gradient, _ = accumulate_gradient(state, batch, sft_loss, project)
    kept = {name: value.clone() for name, value in with_gradient.gradients.items()}
    first, _ = apply_update(with_gradient, rule)
    accumulate_gradient(with_gradient, batch, sft_loss, project)
    again, _ = apply_update(with_gradient, rule)
    assert state.gradients is None and state.counts.num_updates == 0
    for name, value in table_parameters().items():
        assert torch.equal(with_gradient.parameters[name], value) and not torch.equal(first.parameters[name], value)
        assert torch.equal(first.parameters[name], again.parameters[name])
        assert torch.equal(with_gradient.gradients[name], kept[name])
    with pytest.raises(TypeError):
        first.parameters["table"] = torch.zeros(1)


def test_parameters_that_are_not_trained_stay_and_cost_no_moments():
    state = create_state(table_parameters(), trained=["bias"])
    assert set(state.first_moments) == {"bias"}
    after, metrics = train_step(state, [draw_ragged()], sft_loss, project, AdamW(lr=1e-2, weight_decay=1.0))
    assert after.parameters["table"] is state.parameters["table"]
    assert not torch.equal(after.parameters["bias"], state.parameters["bias"])
    assert metrics["grad_norm"] > 0


def test_dropout_is_drawn_from_the_state():
    def drop(parameters, batch, with_entropy):
        return project({name: torch.dropout(value, 0.5, True) for name, value in parameters.items()}, batch, with_entropy)

    state, batch, before = create_state(table_parameters(), seed=3), draw_ragged(), torch.get_rng_state()
    (first, a), (_, b) = accumulate_gradient(state, batch, sft_loss, drop), accumulate_gradient(state, batch, sft_loss, drop)
    _, second = accumulate_gradient(first, batch, sft_loss, drop)
    _, other = accumulate_gradient(replace(state, seed=4), batch, sft_loss, drop)
    assert a == b and len({a["loss"], second["loss"], other["loss"]}) == 3
    assert torch.equal(torch.get_rng_state(), before)


async def test_a_skipped_update_changes_nothing_but_the_counts():
    state, rule, batch = create_state(table_parameters()), AdamW(lr=1e-2), draw_ragged()
    bad = replace(batch, loss_weights=batch.loss_weights * float("inf"))
    state, _ = train_step(state, [batch], sft_loss, project, rule)
    after, metrics = train_step(state, [bad], sft_loss, project, rule)
    assert metrics["update_skipped"] == 1.0 and after.gradients is None
    assert after.parameters is state.parameters and after.second_moments is state.second_moments and after.num_applied == 1
    assert (after.counts.num_updates, after.counts.num_skipped_in_a_row) == (2, 1)


# -- the backends


async def test_the_model_shows_the_state_and_a_snapshot_of_the_state_stays():
    model = create_tiny_model()
    backend = create_torch_func_backend(model, lr=1e-2)
    before = backend.state
    await step_of(backend, draw_ragged(), sft_loss)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == backend.state.parameters[name].data_ptr()
        assert not torch.equal(parameter, before.parameters[name])
    backend.state = before
    assert (await run_sft(backend, 2)) == (await run_sft(create_torch_func_backend(create_tiny_model(), lr=1e-2), 2))


@pytest.mark.parametrize("create", FACTORIES, ids=lambda f: f.__name__)
async def test_weights_that_leave_in_parts_are_those_of_the_snapshot(create):
    backend = create(create_tiny_model(), lr=1e-2)
    assert BackendFeature.WEIGHT_STREAM in get_backend_features(backend)
    whole = await backend.get_weights().result()
    specs = await backend.describe_weights().result()
    assert "lm_head.weight" in whole and "lm_head.weight" not in {spec.name for spec in specs}  # tied
    parts = await backend.gather_weights([spec.name for spec in specs]).result()
    assert all(torch.equal(parts[spec.name], whole[spec.name]) and spec.shape == tuple(whole[spec.name].shape) for spec in specs)


@pytest.mark.parametrize(
    ("kind", "found"), [("torch_func", TorchFuncTrainingBackend), ("jax", JAXTrainingBackend), ("pytorch", PyTorchTrainingBackend)]
)
def test_a_run_gets_the_backend_of_its_settings(kind, found):
    config = Config(backend=BackendSection(kind=kind))
    check_backend(config)
    backend = create_backend(config, create_tiny_model(), create_char_tokenizer(), OptimizerConfig(lr=1e-3, eps=1e-6), total_steps=3)
    assert type(backend) is found
    if kind != "pytorch":
        assert (backend.rule.lr, backend.rule.eps) == (1e-3, 1e-6)


def test_settings_that_a_backend_cannot_have_are_refused_before_the_run(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"backend.compute_dtype is 'bfloat16'.*float32 with backend.kind 'jax'"):
        BackendSection(kind="jax", compute_dtype="bfloat16")
    for kind in ("jax", "torch_func"):
        with pytest.raises(ConfigError, match=f"lora.rank is 4 with backend.kind '{kind}'"):
            check_backend(Config(backend=BackendSection(kind=kind), lora=LoRASection(rank=4)))
    model = create_tiny_model()
    model.config.attention_dropout = 0.1
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
        check_backend(Config(backend=BackendSection(kind="jax"), model=ModelSection(path=str(tmp_path))))


QUANTIZED, BOTH = OptimizerConfig(moments="8bit"), {"master_dtype": "bfloat16", "compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"rl": RLSection(optimizer=QUANTIZED), "backend": BackendSection(kind="fsdp")},
            "rl.optimizer.moments is '8bit' with backend.kind 'fsdp'",
        ),
        (
            {"backend": BackendSection(master_dtype="bfloat16", compute_dtype="float32")},
            "but matrix products are in float32: add --backend.comp",
        ),
        (
            {"backend": BackendSection(**BOTH)},
            r"but sft.optimizer.moments is 'float32', whose updates would be lost in rounding: add --sft\.opt",
        ),
        ({"backend": BackendSection(**BOTH), "sft": SFTSection(optimizer=QUANTIZED)}, "but rl.optimizer.moments is 'float32'"),
        (
            {
                "backend": BackendSection(**BOTH),
                "sft": SFTSection(optimizer=QUANTIZED),
                "rl": RLSection(algorithm="ppo()", optimizer=QUANTIZED),
            },
            "but critic.optimizer.moments is 'float32'",
        ),
        ({"backend": BackendSection(**BOTH), "lora": LoRASection(rank=4)}, "adapters are small: take --lora.base-dtype bfloat16"),
        (
            {"backend": BackendSection(kind="fsdp"), "lora": LoRASection(rank=4, base_dtype="nf4")},
            "'nf4' with backend.kind 'fsdp', which does not shard weights in 4 bits",
        ),
        (
            {"backend": BackendSection(compute_dtype="float32"), "lora": LoRASection(rank=4, base_dtype="nf4")},
            "'nf4', but matrix products are in float32",
        ),
    ],
)
def test_weights_in_bfloat16_and_moments_of_8_bits_are_refused_where_they_cannot_be_had(settings, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # torchao is there
    with pytest.raises(ConfigError, match=expected):
        check_backend(Config(**settings))


def test_a_missing_package_of_weights_in_4_bits_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config(lora=LoRASection(rank=4, base_dtype="nf4"), backend=BackendSection(compute_dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"lora.base_dtype is 'nf4', which needs the package bitsandbytes: pip install"):
        check_backend(config, "sft")


def test_a_missing_package_of_quantized_moments_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"sft.optimizer.moments is '8bit', which needs the package torchao: pip install"):
        check_backend(Config(sft=SFTSection(optimizer=QUANTIZED)), "sft")
    check_backend(Config(sft=SFTSection(optimizer=QUANTIZED)), "rl")  # which has no SFT
    with pytest.raises(ConfigError, match=r"backend.master_dtype is 'bfloat16', expected float32 with backend.kind 'jax'"):
        BackendSection(kind="jax", master_dtype="bfloat16")


async def test_a_critic_is_a_functional_backend_with_another_head():
    def loss_fn(outputs, batch):
        loss, metrics = value_loss(outputs, batch)
        return LossOutput(loss, metrics)

    batch = draw_ragged()
    batch = replace(batch, returns=torch.ones(batch.tokens.shape), values=torch.zeros(batch.tokens.shape))
    critics = [create_critic_model(create_tiny_model()) for _ in range(2)]
    expected = PyTorchTrainingBackend(
        critics[0], torch.optim.AdamW(critics[0].parameters(), weight_decay=0.0), compute_outputs=compute_values
    )
    found = TorchFuncTrainingBackend(critics[1], AdamW(lr=1e-3, betas=(0.9, 0.999)), compute_outputs=compute_values)
    assert found.computes == {"values"}
    for _ in range(3):
        a, b = [await backend.forward_backward(batch, loss_fn).result() for backend in (expected, found)]
        assert a == pytest.approx(b, abs=1e-5)
        a, b = [await backend.optim_step().result() for backend in (expected, found)]
        assert a == pytest.approx(b, abs=1e-5)
    a, b = [await backend.forward(batch, lambda outputs: outputs.values).result() for backend in (expected, found)]
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


async def test_a_checkpoint_of_another_kind_of_backend_is_refused_by_name(tmp_path: Path):
    await create_torch_func_backend(create_tiny_model(), lr=1e-2).save_checkpoint(tmp_path).result()
    for create, kind in ((create_jax_backend, "jax"), (create_backend_with_scheduler, "pytorch")):
        settings = {"total_steps": 1, "lr": 1e-2}
        with pytest.raises(CheckpointError, match=f"is of the backend 'torch_func', not '{kind}': go on with --backend.kind torch_func"):
            create(create_tiny_model(), **settings).load_checkpoint(tmp_path)


# -- JAX


def test_batches_of_about_the_same_size_share_a_program():
    for count in range(1, 5000):
        found = round_up(count, 8)
        assert count <= found <= 1.25 * count + 8 and found % 8 == 0
    assert len({round_up(count, 128) for count in range(1, 20_000)}) < 50


async def test_a_program_is_compiled_once_for_all_backends_and_similar_batches():
    from rollouts.backends.jax.steps import _programs  # pyright: ignore[reportPrivateUsage]

    backend = create_jax_backend(create_tiny_model(), lr=1e-2)
    backend.forward(draw_ragged(rows=2), lambda outputs: outputs.log_probs)
    count = _programs().evaluate._cache_size()
    for rows in (1, 4, 7):
        for lr in (1e-2, 1e-3):
            create_jax_backend(create_tiny_model(seed=rows), lr=lr).forward(draw_ragged(rows, rows), lambda outputs: outputs.log_probs)
    assert _programs().evaluate._cache_size() == count


def shapes_in(jaxpr):
    """Shapes of everything that a program computes, inside of loops and of their bodies, too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from shapes_in(inner)


def test_logits_of_all_tokens_never_exist_at_once():
    import jax

    from rollouts.backends.jax.model import compute_log_probs, pack_arrays
    from rollouts.backends.jax.steps import to_array
    from rollouts.models.forward.packing import pack_padded

    model = create_tiny_model(vocab_size=91, num_layers=1)
    weights = {name: to_array(value) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    batch = draw_ragged()
    arrays = pack_arrays(pack_padded(batch.tokens, batch.lengths), None)

    def total(weights, chunk_size):
        config = read_decoder_config(model)
        log_probs, entropy = compute_log_probs(weights, arrays, config=config, chunk_size=chunk_size, with_entropy=True)
        return (log_probs + entropy).sum()

    num_tokens = len(arrays.tokens)
    small, whole = (set(shapes_in(jax.make_jaxpr(jax.grad(partial(total, chunk_size=size)))(weights).jaxpr)) for size in (48, 1024))
    assert (48, 91) in small and (num_tokens, 91) in whole  # of the gradient, too
    assert not any(shape[-1:] == (91,) and max(shape[:-1], default=0) > 48 for shape in small)
    JAXTrainingBackend(model, AdamW(lr=1e-3), chunk_size=48)  # compares log-probs with those of PyTorch


FEATURES = {
    "hidden_act is 'gelu'": {"hidden_act": "gelu"},
    "attention_dropout is 0.1": {"attention_dropout": 0.1},
    "layers of the kinds \\['sliding_attention'\\]": {"layer_types": ["full_attention", "sliding_attention"]},
    "rope_type is 'yarn'": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    "model_type is 'olmo'": {"model_type": "olmo"},
    "quantized": {"quantization_config": {"bits": 4}},
}


@pytest.mark.parametrize("message", FEATURES)
def test_a_model_with_features_that_jax_has_not_is_refused_by_their_names(message):
    model = create_tiny_model()
    for name, value in FEATURES[message].items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=f"cannot run this Qwen3ForCausalLM: {'.*' * (message == 'quantized')}{message}"):
        create_jax_backend(model, lr=1e-3)


def test_frozen_models_critics_and_half_precision_are_refused_by_jax():
    model = create_tiny_model()
    with pytest.raises(ConfigError, match="no output layer over the vocabulary"):
        create_jax_backend(create_critic_model(model), lr=1e-3)
    with pytest.raises(ConfigError, match="float32 only"):
        create_jax_backend(model, lr=1e-3, compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match="parameters are frozen"):
        create_jax_backend(model.requires_grad_(False), lr=1e-3)


def test_a_model_that_computes_something_else_is_found_out():
    model = create_tiny_model()
    model.model.layers[1].mlp.forward = lambda x: 0 * x
    with pytest.raises(ConfigError, match="gives other log-probs in JAX than in PyTorch"):
        create_jax_backend(model, lr=1e-3)
    assert model.config._attn_implementation == "sdpa"  # as it was


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, None])
def test_scaled_rotary_embeddings_are_those_of_transformers(scaling):
    from transformers import LlamaForCausalLM

    config = create_tiny_model(architecture="llama", num_layers=1).config
    three = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    config.rope_parameters = {"rope_theta": 100.0, **(scaling or three)}
    model = LlamaForCausalLM(config)
    config = read_decoder_config(model)
    torch.testing.assert_close(torch.tensor(config.inverse_frequencies), model.model.rotary_emb.inv_freq)
    assert config.rotary_scale == model.model.rotary_emb.attention_scaling


# -- without JAX, without torchax

WITHOUT = """
import importlib, pkgutil, sys

for name in ("jax", "jaxlib", "optax", "torchax"):
    sys.modules[name] = None
import rollouts.backends
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model

for module in pkgutil.walk_packages(rollouts.backends.__path__, "rollouts.backends."):
    importlib.import_module(module.name)
from rollouts.backends.jax.backend import create_jax_backend, create_torchax_backend
for create in (create_jax_backend, create_torchax_backend):
    try:
        create(create_tiny_model(), lr=1e-3)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_the_extras_everything_can_be_imported_and_says_what_to_install(tmp_path: Path):
    status, out, error = run(WITHOUT, folder=tmp_path)
    assert status == 0, error
    jax_line, torchax_line = out.splitlines()
    assert jax_line == "the JAX backend needs jax and optax, which this Python has not: pip install 'rollouts-rl[jax]'"
    assert "torchax is not supported" in torchax_line and "torchax is not installed" in torchax_line


def test_torchax_is_refused_with_what_was_tried():
    with pytest.raises(ConfigError) as caught:
        create_torchax_backend(create_tiny_model(), lr=1e-3)
    text = str(caught.value)
    for part in ("torchax is not supported", TRIED, "--backend.kind jax", "dim_Dimname"):
        assert part in text, text


def test_log_probs_in_chunks_have_the_gradient_of_log_probs_at_once():
    def step(chunk_size: int):
        backend = TorchFuncTrainingBackend(create_tiny_model(), AdamW(lr=1e6, eps=1e6, max_grad_norm=float("inf")), chunk_size=chunk_size)
        backend.forward_backward(draw_ragged(), sft_loss)
        backend.optim_step()
        return backend.get_weights().value

    chunked, whole, begun = step(7), step(1024), create_tiny_model().state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(chunked[name], value, atol=1e-5, rtol=0)
    assert any((value - begun[name]).abs().max() > 0.1 for name, value in whole.items())  # lr / eps = 1: what is subtracted is the gradient
