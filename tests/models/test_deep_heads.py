"""Heads of several layers, and learned factors of logits: log-probs, gradients and scores are those of transformers' own forward pass."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio
from samples import draw_batch

from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reward_model_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError
from rollouts.models.heads import create_reward_model, load_critic_model
from rollouts.rewards.models.local import RewardModel
from rollouts.types import LossOutput, Sample, SamplingParams

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "modernbert-decoder": {"local_attention": 8},
    "bert": {"is_decoder": True},
    "electra": {"is_decoder": True, "embedding_size": 24},
    "roberta": {"is_decoder": True},
    "dory": {"num_key_value_heads": 2, "head_dim": 8},
}
ROWS = [[3 + (7 * i * i + 5 * i + n) % 45 for i in range(n)] for n in (33, 5, 33, 19)]


def create_model(kind: str, auto: str = "AutoModelForCausalLM", **settings: Any) -> Any:
    import transformers

    config = cast("Any", transformers.CONFIG_MAPPING[kind])(**SIZES | KINDS[kind] | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms, biases and factors, which begin at 0, 1 or one value
                parameter.data *= 1 + 0.2 * torch.randn(parameter.shape)
                parameter.data += 0.1 * torch.randn(parameter.shape) if name.endswith("bias") else 0.0
            elif "attn" in name or "attention" in name or "proj" in name:
                parameter.data *= 4
    return model


def read_log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return torch.cat([torch.zeros(1), logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]])


def make_batch() -> Any:
    samples = [
        Sample(index=i, group_index=i, tokens=tuple(row), loss_mask=(0, *[1] * (len(row) - 1)), reward=0.0) for i, row in enumerate(ROWS)
    ]
    return replace(collate_samples(samples), dropout=False)


def weigh(outputs: Any, batch: Any) -> LossOutput:
    values = outputs.log_probs if outputs.values is None else outputs.values
    return LossOutput((values * torch.linspace(-1, 1, batch.tokens.shape[1])).sum(), {})


def check_gradients(found: Any, model: Any) -> None:
    pairs = [
        (name, a.grad, b.grad) for (name, a), b in zip(found.named_parameters(), model.parameters(), strict=True) if b.grad is not None
    ]
    largest = max(float(b.abs().max()) for _, _, b in pairs)
    for name, a, b in pairs:
        assert a is not None, f"{name} has no gradient"
        assert float((a - b).abs().max() / (b.abs().max() + 1e-3 * largest)) < 1e-5, name


FEW = ["modernbert-decoder", "electra", "dory"]
ALL = [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW)]


@pytest.mark.parametrize("kind", ALL)
async def test_training_through_a_head_has_the_numbers_of_transformers(kind: str):
    model, batch = create_model(kind), make_batch()
    backend = create_pytorch_backend(create_model(kind), lr=1e-3)
    found = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
    await backend.forward_backward(batch, weigh).result()
    for i, length in enumerate(batch.lengths.tolist()):
        row = read_log_probs(model, batch.tokens[i, :length])
        (row * torch.linspace(-1, 1, batch.tokens.shape[1])[:length]).sum().backward()
        assert float((row.detach() - found[i, :length]).abs().max()) < 3e-6
    check_gradients(backend.model, model)


@pytest.mark.parametrize("kind", ["modernbert-decoder", "dory"])
async def test_the_functional_backend_updates_the_layers_of_a_head_as_the_first_does(kind: str):
    first = create_pytorch_backend(create_model(kind), lr=1e-2)
    other = create_torch_func_backend(create_model(kind), lr=1e-2)
    before = dict(await first.get_weights().result())
    for backend in (first, other):
        await backend.forward_backward(make_batch(), weigh).result()
        await backend.optim_step().result()
    weights, others = await first.get_weights().result(), await other.get_weights().result()
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], atol=2e-5), name
    own = "lm_head.dense.weight" if kind == "modernbert-decoder" else "lm_head.logit_scale"
    assert not torch.equal(weights[own], before[own])


@pytest.mark.parametrize("kind", ALL)
async def test_the_embedded_engine_samples_with_the_head_also_with_new_weights(kind: str):
    model = create_model(kind)
    engine = InProcessEngine(create_model(kind), eos_token_ids=())
    done: list[Any] = []

    async def generate(row: list[int], seed: int) -> None:
        done.append(await engine.generate(row, SamplingParams(max_tokens=14, seed=seed), request_id=f"{seed}"))

    async def compare() -> None:
        done.clear()
        async with trio.open_nursery() as nursery:
            for seed, row in enumerate(ROWS):
                nursery.start_soon(generate, row[:12], seed)
        for completion in done:
            tokens = torch.tensor([*completion.input_tokens, *completion.output_tokens])
            with torch.no_grad():
                expected = read_log_probs(model, tokens)[len(completion.input_tokens) :]
            assert torch.allclose(torch.tensor(completion.output_log_probs), expected, atol=3e-6)

    async with engine:
        await compare()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
        await engine.update_weights(await backend.get_weights().result(), 1)
        await compare()


def test_an_output_layer_with_unknown_parameters_is_refused():
    model = create_model("dory")
    model.lm_head.shift = torch.nn.Parameter(torch.zeros(48))
    for construct in (partial(create_pytorch_backend, lr=1e-3), InProcessEngine):
        with pytest.raises(ConfigError, match=r"parameters that are not computed here: \['logit_scale', 'shift'\]"):
            construct(copy.deepcopy(model))


# -- scores


def test_a_reward_model_with_a_deep_head_scores_and_learns_as_transformers_does():
    model = create_model("modernbert-decoder", "AutoModelForSequenceClassification", num_labels=1)
    rows = [torch.tensor(row) for row in ROWS]
    own = torch.stack([model(input_ids=row[None]).logits[0, 0] for row in rows])
    assert torch.allclose(torch.tensor(RewardModel(copy.deepcopy(model)).score_rows(ROWS)), own.detach(), atol=1e-6)
    backend, batch = create_reward_model_backend(copy.deepcopy(model), lr=1e-3), make_batch()
    last = batch.lengths[:, None] - 1

    def rank(outputs: Any, batch: Any) -> LossOutput:
        return LossOutput((outputs.values.gather(1, last)[:, 0] * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum(), {})

    backend.forward_backward(batch, rank)
    (own * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
    check_gradients(backend.model, model)


def test_a_fresh_reward_model_with_a_deep_head_is_drawn_by_its_seed():
    made = [create_reward_model(create_model("modernbert-decoder"), seed=seed).state_dict() for seed in (1, 1, 2)]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["head.dense.weight"], made[2]["head.dense.weight"])


def test_a_critic_and_a_reward_model_need_no_pad_token():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    assert model.config.pad_token_id is None
    batch = draw_batch(0, (9, 4), vocab_size=32)
    for create in (create_critic_backend, create_reward_model_backend):
        values = create(copy.deepcopy(model), lr=1e-3, head_std=1.0).forward(batch, lambda outputs: outputs.values).value
        assert bool(values[0, 2:].abs().min() > 0)


def test_a_score_that_is_read_elsewhere_is_refused():
    model = create_model("bert", "AutoModelForSequenceClassification", num_labels=1)  # reads the first token, by a pooler
    for construct in (RewardModel, partial(create_reward_model_backend, lr=1e-3)):
        with pytest.raises(ConfigError, match="BertForSequenceClassification computes its score in another way"):
            construct(copy.deepcopy(model))


def test_a_critic_does_not_begin_from_a_reward_model_whose_head_it_lacks(tmp_path: Path):
    create_model("modernbert-decoder", "AutoModelForSequenceClassification", num_labels=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} is a ModernBertDecoderForSequenceClassification, which has layers")):
        load_critic_model(tmp_path)


def test_a_critic_of_such_a_language_model_has_the_values_of_its_own_forward_pass():
    backend, batch = create_critic_backend(create_model("modernbert-decoder"), lr=1e-3), make_batch()
    found = backend.forward(batch, lambda outputs: cast("torch.Tensor", outputs.values)).value
    for i, row in enumerate(ROWS):
        backend.model.set_attn_implementation("eager")
        with torch.no_grad():
            own = backend.model(input_ids=torch.tensor([row])).logits[0, :-1, 0]
        assert torch.allclose(found[i, 1 : len(row)], own, atol=1e-6)
