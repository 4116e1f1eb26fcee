"""Families of models: what is computed is what transformers computes, also beyond sliding windows, and everything else is refused.

Each family is a tiny random model with windows of 8 tokens where it has any; rows have up to 40.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import trio
from samples import draw_batch

from integration.parts.model_settings import check_dropout
from integration.settings.config import Config
from integration.settings.made.library import rl_training_config, sft_training_config
from integration.settings.sections.model import LoRASection
from integration.settings.sections.stages import RLSection, SFTSection
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import reinforce
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reference_backend, create_reward_model_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.batches import select_rows
from rollouts.config import RLTrainingConfig, SFTTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.blocks import BLOCK_TOKENS
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel
from rollouts.errors import ConfigError, EngineRequestError
from rollouts.models.prepare import probe_attention, use_packed_attention
from rollouts.sft_loop import run_sft_training
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.types import LossOutput, Sample, SamplingParams

LENGTHS = (40, 5, 23, 40)

WINDOW, CONTEXT = 8, 64
SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
           "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
DROPOUT = {"attention_dropout": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "dropout": 0.1}
LLAMA4 = {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


class Family(NamedTuple):
    """A model type and its settings."""

    kind: str
    settings: dict[str, Any]
    window: int | None  # the widest that its layers attend to
    refused: str = ""  # why packed attention does not compute it


COMPUTED = {
    "llama": Family("llama", HEADS, None),
    "llama that carries a window nobody reads": Family("llama", HEADS | {"sliding_window": WINDOW}, None),
    "mistral": Family("mistral", HEADS | {"sliding_window": WINDOW}, WINDOW),
    "mistral without window": Family("mistral", HEADS | {"sliding_window": None}, None),
    "mistral with a window as long as its context": Family("mistral", HEADS | {"sliding_window": CONTEXT}, CONTEXT),
    "ministral": Family("ministral", HEADS | {"sliding_window": WINDOW, "layer_types": MIXED}, WINDOW),
    "mixtral": Family("mixtral", HEADS | {"sliding_window": WINDOW, "num_local_experts": 4}, WINDOW),
    "phi3": Family("phi3", {"sliding_window": WINDOW}, WINDOW),
    "olmo3": Family("olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}, WINDOW),
    "gemma3": Family("gemma3_text", HEADS | {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 8}, WINDOW),
    "qwen2 with windows": Family("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, WINDOW),
    "qwen2 with windows switched off": Family("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}, None),
    "qwen3 with windows": Family("qwen3", HEADS | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}, WINDOW),
    "exaone4": Family("exaone4", HEADS | {"sliding_window": WINDOW, "sliding_window_pattern": 2}, WINDOW),
    "smollm3": Family("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}, WINDOW),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}, WINDOW),
    "cwm": Family("cwm", HEADS | {"sliding_window": WINDOW, "layer_types": MIXED}, WINDOW),
    "granite": Family("granite", {"logits_scaling": 1.0, "attention_multiplier": 0.5, "residual_multiplier": 0.7}, None),
    "gemma2 with soft-capped logits alone": Family("gemma2", HEADS | {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0,
                                                                      "sliding_window": WINDOW}, WINDOW),
    "gemma3 with soft-capped logits": Family("gemma3_text", HEADS | {"final_logit_softcapping": 2.0, "sliding_window": WINDOW}, WINDOW),
    "cohere": Family("cohere", HEADS | {"logit_scale": 0.25}, None),
    "cohere2": Family("cohere2", HEADS | {"sliding_window": WINDOW, "logit_scale": 0.25}, WINDOW),
    "granite with scaled logits": Family("granite", {"logits_scaling": 4.0}, None),
    "deepseek v3": Family("deepseek_v3", LATENT | EXPERTS | {"num_key_value_heads": 4}, None),
    "llama4": Family("llama4_text", LLAMA4 | {"attention_chunk_size": WINDOW}, 3 * WINDOW),
    "llama4, early tuning": Family("llama4_text", LLAMA4 | {"attention_chunk_size": 5, "floor_scale": 4}, 15),
    "gpt2": Family("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": CONTEXT}, None),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, None),
    "opt with projected embeddings": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}, None),
    "mistral with a window of one token": Family("mistral", HEADS | {"sliding_window": 1, "num_key_value_heads": 1}, 1),
    "gemma3 with two rotations": Family("gemma3_text", HEADS | {"sliding_window": 7, "layer_types": MIXED, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}}, 7),
    "llama with dynamic rotation": Family("llama", HEADS | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                                                                "factor": 2.0}}, None),
}  # fmt: skip
NATIVE = {  # with their own attention
    "gpt-oss": Family("gpt_oss", HEADS | {"sliding_window": WINDOW, "num_local_experts": 4}, WINDOW, r"'gpt_oss'.*sinks"),
    "gemma2": Family("gemma2", HEADS | {"sliding_window": WINDOW, "final_logit_softcapping": None}, WINDOW,
                     r"'gemma2'.*attn_logit_softcapping = 50"),
    "qwen3-next": Family("qwen3_next", HEADS | LINEAR | {"num_hidden_layers": 4}, None, "packed.*(causal.conv1d|flash-linear)"),
    "qwen3.5": Family("qwen3_5_text", HEADS | LINEAR | {"num_hidden_layers": 4}, None, "packed.*(causal.conv1d|flash-linear)"),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, None, r"layer_types.*'lfm2'.*'conv'"),
    "deepseek v3.2": Family("deepseek_v32", LATENT | EXPERTS | {"num_key_value_heads": 4}, None, "'indexed_attention'"),
    "a window in the mask alone": Family("phimoe", {"sliding_window": WINDOW, "num_local_experts": 2}, WINDOW,
                                         r"'phimoe'.*whole rows.*mask.*sliding_window = 8"),
    "a mask of the model's own": Family("doge", {"num_attention_heads": 4}, None, r"'doge'.*mask by itself"),
}  # fmt: skip


NATIVE["recurrent gemma"] = Family("recurrent_gemma", HEADS | {"num_hidden_layers": 3, "attention_window_size": 8, "logits_soft_cap": 2.0},
                                   None, "RecurrentGemma.*other logits for packed")  # fmt: skip
REFUSED = {"no causal attention": Family("llama", HEADS | {"is_causal": False}, None, "LlamaForCausalLM is not causal|gives other logits")}
EVERY = {**COMPUTED, **NATIVE}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "qwen3-next" else name for name in EVERY]  # its layers take seconds on a CPU
SOME = ["gemma2", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-next", "gpt-oss", "deepseek v3.2"))]


def create_family(family: Family) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family.kind](**{**SIZES, **family.settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if "proj" in name or "attn" in name:  # so that attention is not next to uniform
                parameter.data *= 6
    return model


def read_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of one row [n], as transformers computes them: # [n], 0 at the first."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def weigh_log_probs(outputs: Any, batch: Any) -> LossOutput:
    """A loss in which every token counts differently."""
    weights = torch.linspace(-1, 1, outputs.log_probs.shape[1])
    return LossOutput(loss=(outputs.log_probs * weights).sum(), metrics={})


def check_gradients(model: Any, expected: Any) -> None:
    for (name, found), (_, wanted) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(found.grad, wanted.grad, atol=2e-5 * float(wanted.grad.abs().max()) + 1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("name", NAMES)
async def test_a_family_has_the_numbers_of_transformers_beyond_its_windows(name: str, caplog: pytest.LogCaptureFixture):
    family, batch = EVERY[name], draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    own = create_family(family)
    batch = replace(batch, dropout=False)
    backend = create_pytorch_backend(copy.deepcopy(own), lr=1e-3)
    found = backend.forward(batch, lambda outputs: outputs.log_probs).value
    expected = torch.zeros(batch.tokens.shape)
    for i, n in enumerate(batch.lengths.tolist()):
        row = read_log_probs(own, batch.tokens[i, :n])
        (row * torch.linspace(-1, 1, batch.tokens.shape[1])[:n]).sum().backward()
        expected[i, :n] = row.detach()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    backend.forward_backward(batch, weigh_log_probs)
    check_gradients(backend.model, own)
    said = [record.getMessage() for record in caplog.records if "one call for each distinct length" in record.getMessage()]
    if name in COMPUTED:
        assert not said
        assert probe_attention(own) == family.window
    else:
        assert len(said) == 1 and re.search(family.refused, said[0])


def keep_rows_apart(module: Any) -> dict[str, Any]:
    """Return functions of linear attention that keep packed rows apart, as the kernels for GPUs do, from transformers' own for one row."""
    compute_rows, convolve_rows = module.torch_chunk_gated_delta_rule, module.causal_conv1d_fn

    def delta_rule(*inputs: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, cu_seqlens: Any = None, **more: Any) -> Any:
        bounds = [0, inputs[0].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        more = {key: more[key] for key in ("use_qk_l2norm_in_kernel", "initial_state", "output_final_state")}
        parts = [
            compute_rows(*(x[:, a:b] for x in inputs), g=g[:, a:b], beta=beta[:, a:b], **more)[0] for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts, dim=1), None

    def convolve(hidden: torch.Tensor, weight: Any, bias: Any = None, activation: Any = None, seq_idx: Any = None, **_: Any) -> Any:
        sizes = [hidden.shape[2]] if seq_idx is None else seq_idx[0].bincount().tolist()
        return torch.cat([convolve_rows(part, weight, bias, activation=activation) for part in hidden.split(sizes, dim=2)], dim=2)

    return {"torch_chunk_gated_delta_rule": delta_rule, "causal_conv1d_fn": convolve}


async def test_linear_attention_runs_packed_where_its_kernels_keep_rows_apart(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    from transformers.models.qwen3_5 import modeling_qwen3_5

    own, batch = create_family(NATIVE["qwen3.5"]), draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    batch = replace(batch, dropout=False)
    native = create_pytorch_backend(copy.deepcopy(own), lr=1e-3)
    assert "flash-linear-attention" in caplog.text or "causal" in caplog.text
    caplog.clear()
    for name, function in keep_rows_apart(modeling_qwen3_5).items():
        monkeypatch.setattr(modeling_qwen3_5, name, function)
    packed = create_pytorch_backend(copy.deepcopy(own), lr=1e-3)
    assert not caplog.records
    found, expected = (backend.forward(batch, lambda outputs: outputs.log_probs).value for backend in (packed, native))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for backend in (packed, native):
        backend.forward_backward(batch, weigh_log_probs)
    for (name, a), (_, b) in zip(packed.model.named_parameters(), native.model.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", NAMES)
async def test_the_embedded_engine_has_the_numbers_of_transformers_beyond_windows(name: str):
    own = create_family(EVERY[name])
    engine = InProcessEngine(copy.deepcopy(own), eos_token_ids=())
    rows = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]).tokens[:, :].tolist()
    assert isinstance(engine._slots, NativeModel) is (name not in COMPUTED)
    async with engine:
        for prompt in (rows[0][:21], rows[0][:21], rows[2][:4]):  # the second finds its prefix in the cache
            completion = await engine.generate(prompt, SamplingParams(max_tokens=18, temperature=1.0, seed=5))
            row = [*prompt, *completion.output_tokens]
            expected = read_log_probs(own, torch.tensor(row)).detach()[len(prompt) :]
            torch.testing.assert_close(torch.tensor(completion.output_log_probs), expected, atol=1e-4, rtol=1e-4)
        assert await engine.recompute_output_log_probs(row, len(prompt)) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_the_language_model_inside_of_a_model_for_pictures_is_trained_and_decoded():
    """Gemma 3 of 4 billion parameters and more: the sizes of its text stand in a configuration inside of its own."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    text = {**SIZES, **HEADS, "sliding_window": WINDOW, "layer_types": MIXED, "eos_token_id": 7}
    picture = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = Gemma3Config(text_config=text, vision_config=picture, image_token_id=47, boi_token_id=46, eoi_token_id=45)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own: Any = AutoModelForCausalLM.from_config(config).float().eval()
    assert not hasattr(own.config, "vocab_size")
    batch = replace(draw_batch(3, LENGTHS, vocab_size=45), dropout=False)
    backend = create_pytorch_backend(copy.deepcopy(own), lr=1e-3)
    found = backend.forward(batch, lambda outputs: outputs.log_probs).value
    row = batch.tokens[0, : LENGTHS[0]]
    expected = read_log_probs(own, row)
    torch.testing.assert_close(found[0, : LENGTHS[0]], expected.detach(), atol=1e-5, rtol=1e-5)
    backend.forward_backward(batch, weigh_log_probs)
    assert backend.optim_step().value["grad_norm"] > 0
    async with InProcessEngine(copy.deepcopy(own)) as engine:
        assert 7 in engine._eos
        scores = await engine.recompute_output_log_probs(row.tolist(), 1)
        assert scores == pytest.approx(expected[1:].tolist(), abs=1e-5)
        with pytest.raises(EngineRequestError, match="48"):
            await engine.generate([3, 48], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_right_is_refused_by_name(name: str):
    family = REFUSED[name]
    model = create_family(family)
    for construct in (
        partial(create_pytorch_backend, lr=1e-3),
        create_reference_backend,
        partial(create_torch_func_backend, lr=1e-3, total_steps=1),
        InProcessEngine,
    ):
        with pytest.raises(ConfigError, match=family.refused):
            construct(copy.deepcopy(model))


async def generate_all(engine: InProcessEngine, requests: dict[str, tuple[list[int], int]]) -> dict[str, Any]:
    """Generate at the same time: (prompt, tokens) by id."""
    done: dict[str, Any] = {}

    async def generate(name: str, prompt: list[int], num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, seed=int(name))
        done[name] = await engine.generate(prompt, params, request_id=name)

    async with trio.open_nursery() as nursery:
        for name, (prompt, num_tokens) in requests.items():
            nursery.start_soon(generate, name, prompt, num_tokens)
    return done


# row, tokens of the prompt, tokens of the answer
REQUESTS = {
    "0": (0, 21, 18),
    "1": (0, 21, 9),
    "2": (0, 21, 18),
    "3": (2, 4, 18),
    "4": (2, 21, 6),
}  # row, tokens of the prompt, of the answer


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_native_caches_serve_sequences_that_come_and_go_and_new_weights(name: str, kv_cache: Any):
    own = create_family(NATIVE[name])
    rows = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]).tokens.tolist()
    requests = {key: (rows[row][:length], count) for key, (row, length, count) in REQUESTS.items()}
    async with InProcessEngine(copy.deepcopy(own), eos_token_ids=(), max_slots=4, kv_cache_on_update=kv_cache) as engine:
        first = await generate_all(engine, requests)
        again = await generate_all(engine, requests)
        assert {key: c.output_tokens for key, c in first.items()} == {key: c.output_tokens for key, c in again.items()}
        for key, (prompt, count) in requests.items():
            row = torch.tensor([*prompt, *first[key].output_tokens])
            assert len(row) == len(prompt) + count
            expected = read_log_probs(own, row).detach()[len(prompt) :]
            torch.testing.assert_close(torch.tensor(first[key].output_log_probs), expected, atol=1e-5, rtol=1e-4)
            alone = await engine.generate(prompt, SamplingParams(max_tokens=count, seed=int(key)))
            assert alone.output_tokens == first[key].output_tokens
        other = create_family(NATIVE[name])
        other.load_state_dict({key: value * 0.9 for key, value in own.state_dict().items()})
        mixed: dict[str, Any] = {}

        async def generate_across() -> None:
            mixed["c"] = await engine.generate(rows[0][:21], SamplingParams(max_tokens=18, seed=0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate_across)
            await trio.sleep(0)
            while not engine._running:
                await trio.sleep(0.001)
            await engine.update_weights(dict(other.state_dict()), 1)
        row = torch.tensor([*rows[0][:21], *mixed["c"].output_tokens])
        versions = mixed["c"].output_versions
        new = [k for k, version in enumerate(versions) if version == 1]
        if kv_cache == "recompute" and new:  # its whole past is that of the new weights
            expected = read_log_probs(other, row).detach()[21:]
            found = torch.tensor(mixed["c"].output_log_probs)
            torch.testing.assert_close(found[new], expected[new], atol=1e-5, rtol=1e-4)
        after = await engine.generate(rows[0][:21], SamplingParams(max_tokens=5, seed=0))
        expected = read_log_probs(other, torch.tensor([*rows[0][:21], *after.output_tokens])).detach()[21:]
        torch.testing.assert_close(torch.tensor(after.output_log_probs), expected, atol=1e-5, rtol=1e-4)


async def test_a_step_that_failed_is_repeated_without_counting_its_tokens_twice(monkeypatch: pytest.MonkeyPatch):
    own = create_family(NATIVE["lfm2"])
    rows = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]).tokens.tolist()
    decoding = NativeModel(copy.deepcopy(own), name="engine")
    for slot, length in enumerate((10, 7)):
        decoding.fill([slot], decoding.prefill([rows[0][:length]])[0])
    step, positions = torch.tensor([rows[0][10], rows[0][7]]), [10, 7]
    layer = decoding.model.model.layers[2]
    calls = 0

    def fail_at_the_second_cohort(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")

    hook = layer.register_forward_pre_hook(fail_at_the_second_cohort)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoding.decode(step, positions)
    hook.remove()
    for _ in range(2):  # and once more: a step may fail behind the model, in sampling
        found = decoding.decode(step, positions)
        with torch.no_grad():
            for slot, length in enumerate((11, 8)):
                expected = own(input_ids=torch.tensor([rows[0][:length]]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(found[slot], expected, atol=1e-5, rtol=1e-4)
    decoding.free(0)
    assert not decoding.places


@pytest.mark.parametrize("name", SOME)
async def test_greedy_answers_of_native_caches_are_those_of_generate(name: str):
    from transformers import GenerationConfig

    own = create_family(NATIVE[name])
    rows = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]).tokens.tolist()
    async with InProcessEngine(copy.deepcopy(own), eos_token_ids=()) as engine:
        for prompt in (rows[0][:21], rows[2][:4]):
            found = await engine.generate(prompt, SamplingParams(max_tokens=15, temperature=0.0))
            with torch.no_grad():
                settings = GenerationConfig(max_new_tokens=15, do_sample=False, pad_token_id=0)  # no token ends it
                own.generation_config = settings
                expected = own.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)))
            assert list(found.output_tokens) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name", ["gemma3", "mistral", "olmo3", "opt", "gemma2", "lfm2", pytest.param("qwen3-next", marks=pytest.mark.long)]
)
async def test_the_other_backends_have_the_numbers_of_the_first(name: str):
    model, batch = create_family(EVERY[name]), replace(draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]), dropout=False)
    first = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    expected = first.forward(batch, lambda outputs: outputs.log_probs).value
    first.forward_backward(batch, weigh_log_probs)
    for create in (
        partial(create_torch_func_backend, total_steps=1),
        create_fsdp_backend,
        partial(create_fsdp_backend, config=FSDPConfig(gradient_checkpointing=True)),
    ):
        backend = create(copy.deepcopy(model), lr=1e-3)
        torch.testing.assert_close(backend.forward(batch, lambda outputs: outputs.log_probs).value, expected, atol=1e-5, rtol=1e-4)
        backend.forward_backward(batch, weigh_log_probs)
        assert backend.optim_step().value["grad_norm"] == pytest.approx(first_norm(first), rel=1e-4)


def first_norm(backend: Any) -> float:
    return float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in backend.model.parameters() if p.grad is not None])))


def test_critics_and_reward_models_attend_to_windows():
    model, batch = create_family(COMPUTED["mistral"]), draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    critic = create_critic_backend(copy.deepcopy(model), lr=1e-3, head_std=1.0)
    scores = create_reward_model_backend(copy.deepcopy(model), lr=1e-3, head_std=1.0)
    with torch.no_grad():
        for i, n in enumerate(batch.lengths.tolist()):
            hidden = model.model(input_ids=batch.tokens[i : i + 1, :n]).last_hidden_state[0]
            for backend, shift in ((critic, 1), (scores, 0)):
                head = backend.model.score
                found = backend.forward(batch, lambda outputs: outputs.values).value[i, shift:n]
                expected = torch.nn.functional.linear(hidden, head.weight, head.bias)[: n - shift, 0]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_jax_computes_what_has_no_window_in_effect_and_refuses_the_rest():
    batch = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    for name in ("qwen2 with windows switched off", "llama that carries a window nobody reads"):
        model = create_family(COMPUTED[name])
        found = create_jax_backend(model, lr=1e-3).forward(batch, lambda outputs: outputs.log_probs).value
        expected = create_pytorch_backend(model, lr=1e-3).forward(batch, lambda outputs: outputs.log_probs).value
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for name in ("qwen2 with windows", "qwen3 with windows", "mistral", "gemma3"):
        with pytest.raises(ConfigError, match=r"sliding_attention.*sliding_window is 8|model_type is"):
            create_jax_backend(create_family(COMPUTED[name]), lr=1e-3)


@pytest.mark.parametrize("mask", ["chunk", "both ways"])
def test_a_mask_that_differs_only_far_away_is_found_without_rows_as_long(monkeypatch: pytest.MonkeyPatch, mask: str):
    import transformers.models.llama.modeling_llama as modeling
    from transformers import LlamaConfig, LlamaForCausalLM

    def make_mask(and_mask: Any = None, **arguments: Any) -> Any:
        def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query // 30_000 == key // 30_000

        def ahead(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (query == 0) & (key > 99_000)

        more = {"and_mask_function": near} if mask == "chunk" else {"or_mask_function": ahead}
        return create_causal_mask(**arguments, **more)

    from transformers.masking_utils import create_causal_mask

    monkeypatch.setattr(modeling, "create_causal_mask", make_mask)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 100_000})).eval()
    with pytest.raises(ConfigError, match=r"layer 0 of a model of type 'llama'.*whole rows"):
        use_packed_attention(model)


def test_rounded_models_are_compared_as_they_are_computed():
    model = create_family(COMPUTED["gemma3"])
    batch = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    rounded = create_pytorch_backend(copy.deepcopy(model), lr=1e-3, compute_dtype="bfloat16")
    exact = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    a, b = (backend.forward(batch, lambda outputs: outputs.log_probs).value for backend in (rounded, exact))
    assert 1e-4 < float((a - b).abs().mean()) < 0.3
    InProcessEngine(copy.deepcopy(model).to(torch.bfloat16))  # whose logits differ by more than float32's rounding


def create_with_dropout(name: str, rate: float) -> Any:
    return create_family(Family(COMPUTED[name].kind, COMPUTED[name].settings | dict.fromkeys(DROPOUT, rate), None))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_dropout_is_off_in_updates_that_compare_log_probs_unless_it_is_asked_for(name: str):
    batch = draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"])
    backend, plain = (create_pytorch_backend(create_with_dropout(name, rate), lr=1e-3) for rate in (0.1, 0.0))
    rollouts = replace(batch, rollout_log_probs=plain.forward(batch, lambda outputs: outputs.log_probs).value)
    seen: list[torch.Tensor] = []

    def loss(outputs: Any, batch: Any) -> LossOutput:
        seen.append((outputs.log_probs.detach() - rollouts.rollout_log_probs).exp())
        return weigh_log_probs(outputs, batch)

    for each in (backend, plain):
        each.forward_backward(rollouts, loss)
    assert torch.equal(seen[0], torch.ones_like(seen[0]))  # the ratio of the first step on the policy's own rollouts
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(backend.model.parameters(), plain.model.parameters(), strict=True))
    for asked in (replace(rollouts, dropout=True), batch):  # a supervised batch has the model's
        backend.forward_backward(asked, loss)
        assert float((seen.pop() - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "opt"])
async def test_each_loop_trains_with_the_dropout_that_its_settings_say(name: str):
    samples = [
        Sample(tokens=(5, 6, 7, 8 + i), loss_mask=(0, 0, 1, 1), rollout_log_probs=(0, 0, -3, -3), reward=float(i % 2)) for i in range(4)
    ]
    batch = replace(collate_samples(samples), group_ids=torch.zeros(4, dtype=torch.int64))

    async def train(rate: float, kind: str, asked: bool) -> float:
        torch.manual_seed(0)
        backend = create_pytorch_backend(create_with_dropout(name, rate), lr=1e-3)
        if kind == "sft":
            (metrics,) = await run_sft_training(backend, samples, SFTTrainingConfig(num_steps=1, batch_size=4, dropout=asked))
        else:  # reinforce without a baseline reads no log-probs: nothing but the setting can tell
            metrics = await train_on_rollouts(backend, replace(batch, rollout_log_probs=None), reinforce(), plan=UpdatePlan(dropout=asked))
        return metrics["grad_norm"]

    assert (SFTTrainingConfig().dropout, RLTrainingConfig().dropout) == (True, False)
    for kind in ("sft", "rl"):
        assert await train(0.1, kind, False) == pytest.approx(await train(0.0, kind, True), rel=1e-5)  # of shared prompts and of each row
        assert await train(0.1, kind, True) != pytest.approx(await train(0.0, kind, True), rel=1e-3)
    assert await train(0.1, "sft", True) == await train(0.1, "sft", True)  # drawn from the seed


def test_dropout_of_adapters_that_no_stage_trains_with_is_refused():
    lora = LoRASection(rank=4, dropout=0.1)
    with pytest.raises(ConfigError, match=r"lora.dropout is 0\.1.*mode 'rl'.*--rl.dropout"):
        check_dropout(Config(lora=lora), "rl")
    with pytest.raises(ConfigError, match=r"lora.dropout is 0\.1.*mode 'sft'.*--sft.dropout"):
        check_dropout(Config(lora=lora, sft=SFTSection(dropout=False)), "sft")
    check_dropout(Config(lora=lora), "sft+rl")
    asked = Config(lora=lora, rl=RLSection(dropout=True))
    check_dropout(asked, "rl")
    assert rl_training_config(asked, None).dropout and not rl_training_config(Config(), None).dropout
    assert sft_training_config(Config()).dropout and not sft_training_config(Config(sft=SFTSection(dropout=False))).dropout


@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize("construct", [partial(create_pytorch_backend, lr=1e-3), InProcessEngine])
def test_logits_that_are_changed_in_another_way_are_refused(name: str, construct: Any):
    """Even where the change is far below the rounding of small logits."""
    model = create_family(EVERY[name])
    model.lm_head.register_forward_hook(lambda module, inputs, logits: 30 * torch.tanh(logits / 30))
    with pytest.raises(ConfigError, match="changes the logits of its output layer in a way that is not computed here"):
        construct(model)


@pytest.mark.parametrize("name", ["gemma2", "gemma3 with soft-capped logits", "recurrent gemma", "cohere", "llama"])
def test_passes_in_bfloat16_are_compared_with_the_limit_of_bfloat16(name: str):
    """Logits that are changed in float32 behind such a pass have its rounding all the same."""
    model, batch = create_family(EVERY[name]), replace(draw_batch(3, LENGTHS, vocab_size=SIZES["vocab_size"]), dropout=False)
    rounded = create_pytorch_backend(copy.deepcopy(model), lr=1e-3, compute_dtype="bfloat16").forward(batch, lambda o: o.log_probs).value
    exact = create_pytorch_backend(model, lr=1e-3).forward(batch, lambda o: o.log_probs).value
    assert 1e-5 < float((rounded - exact).abs().max()) < 0.3


def test_logits_that_are_not_finite_are_called_so():
    model = create_family(EVERY["llama"])
    model.lm_head.weight.data[5] = 1e38
    with pytest.raises(ConfigError, match="LlamaForCausalLM gives logits that are not finite"):
        create_pytorch_backend(model, lr=1e-3)


@pytest.mark.slow
async def test_steps_beyond_a_window_have_the_losses_of_a_plain_loop_over_transformers():
    """Gemma 3 with a window of 64, rows of up to 200 tokens, five updates."""
    own = create_family(Family("gemma3_text", HEADS | {"sliding_window": 64, "max_position_embeddings": 256, "layer_types": MIXED}, 64))
    batch = replace(draw_batch(7, (200, 77, 200, 150, 199), vocab_size=SIZES["vocab_size"]), dropout=False)
    batch = replace(batch, loss_weights=token_mean(batch))
    backend = create_pytorch_backend(copy.deepcopy(own), lr=1e-3, max_grad_norm=1.0)
    optimizer = create_adamw_optimizer(own, lr=1e-3)
    for _ in range(5):
        found = [backend.forward_backward(select_rows(batch, rows), sft_loss).value["loss"] for rows in ((0, 1), (2, 3, 4))]
        rows = [read_log_probs(own, batch.tokens[i, :n]) * batch.loss_weights[i, :n] for i, n in enumerate(batch.lengths.tolist())]
        loss = -sum(row.sum() for row in rows)
        loss.backward()
        assert sum(found) == pytest.approx(float(loss.detach()), abs=1e-5)
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        backend.optim_step()


async def test_a_prompt_of_several_blocks_is_computed_in_half_precision_where_experts_cannot_be_replayed():
    """Its check compares in float32; the caches have the dtype of the model all the same."""
    family = COMPUTED["llama4"]
    model = create_family(family._replace(settings=family.settings | {"max_position_embeddings": 512})).bfloat16()
    prompt = torch.randint(3, SIZES["vocab_size"], (3 * BLOCK_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    async with InProcessEngine(model, eos_token_ids=()) as engine:
        answers = [
            await engine.generate(prompt + prompt[:10], SamplingParams(max_tokens=3, temperature=0.0), request_id=str(k)) for k in range(2)
        ]
    assert answers[0].output_tokens == answers[1].output_tokens and len(answers[0].output_tokens) == 3
