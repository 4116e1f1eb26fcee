"""Budgets of memory and traffic, against sums by hand and against what real backends hold, save and send."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run
from samples import draw_samples

from benchmarks import memory
from integration.dry_run.layout import Workload, critic_sizes, largest_microbatch, needed_bytes, plan_roles, plan_traffic
from integration.dry_run.memory import (
    FLOAT,
    HEAP_BLOCK,
    MOMENTS_WIDTH,
    STATES,
    Sharding,
    Training,
    activation_bytes,
    cache_bytes,
    heap_bytes,
    inference_parts,
    layer_bytes_per_token,
    sharded_training,
    training_parts,
    unsharded_bytes,
    working_bytes,
)
from integration.dry_run.sizes import AdapterSizes, ModelSizes, create_empty_model, read_adapter_sizes, read_sizes
from integration.dry_run.text import describe_budget, find_memory, format_bytes, read_workload
from integration.dry_run.traffic import Links, count_microbatches, pass_traffic, rows_traffic, sync_traffic
from integration.settings.config import Config
from integration.settings.made.library import create_model_config
from integration.settings.sections.backend import BackendSection, HardwareSection
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.generation import GenerationSection, RewardSection
from integration.settings.sections.model import CriticSection, LoRASection, ModelSection
from integration.settings.sections.stages import RLSection
from rollouts.algorithms.losses import sft_loss
from rollouts.asynchronous.config import AsyncConfig
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.lora.adapters import add_adapters
from rollouts.backends.lora.config import LoRAConfig
from rollouts.config import OptimizerConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.slots import SlotModel
from rollouts.errors import ConfigError
from rollouts.models.forward.outputs import OutputOptions, compute_log_probs
from rollouts.models.forward.passes import run_rows
from rollouts.models.heads import create_reward_model
from rollouts.models.prepare import recompute_activations, use_packed_attention
from rollouts.testing import create_tiny_model

GIB = 2**30


def make_config(kind: str = "Qwen3", **changes: Any) -> Any:
    """3 layers, hidden 16, intermediate 40, 4 query heads and 2 key heads of 8, 50 tokens, tied."""
    import transformers

    settings = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}  # fmt: skip
    return getattr(transformers, f"{kind}Config")(**(settings | changes))


LAYER = 16 * 32 + 2 * 16 * 16 + 32 * 16 + 2 * 8 + 3 * 16 * 40 + 2 * 16  # q, k and v, o, their norms, gate up down, two norms
ROOT = 50 * 16 + 16  # embedding, last norm; the output layer is the embedding
TOTAL = 3 * LAYER + ROOT


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return read_sizes(make_config())


def parts_of(sizes: ModelSizes, training: Training) -> dict[str, int]:
    return {part.name: part.size for part in training_parts(sizes, training)}


def draw_rows(lengths: tuple[int, ...] = (100, 100, 56), vocab_size: int = 50) -> Any:
    return collate_samples(draw_samples(torch.Generator().manual_seed(0), lengths, vocab_size=vocab_size, group_size=1))


# -- sizes


def test_sizes_are_read_off_the_configuration(sizes: ModelSizes):
    assert (sizes.num_parameters, sizes.layer_parameters, sizes.root_parameters) == (TOTAL, LAYER, ROOT)
    assert (sizes.query_size, sizes.kv_size, sizes.head_parameters) == (32, 16, 800)
    assert sizes.is_tied and sizes.has_qk_norm
    untied = read_sizes(make_config("Llama", tie_word_embeddings=False))
    assert not untied.is_tied and not untied.has_qk_norm
    assert untied.root_parameters == ROOT + 800
    assert critic_sizes(untied).num_parameters == untied.num_parameters - 800
    assert critic_sizes(sizes).num_parameters == TOTAL


def test_adapters_are_counted_as_peft_makes_them():
    for targets in (("all-linear",), ("q_proj", "v_proj"), ("self_attn.q_proj",), ("layers.0.self_attn.q_proj",)):
        model = create_tiny_model(vocab_size=50)
        add_adapters(model, LoRAConfig(rank=3, target_modules=targets))
        real = sum(p.numel() for p in model.parameters() if p.requires_grad)
        plain = read_sizes(create_tiny_model(vocab_size=50).config)
        assert read_adapter_sizes(plain, LoRAConfig(rank=3, target_modules=targets)).num_parameters == real
    by_hand = 3 * 5 * (2 * (16 + 32) + 2 * (16 + 16) + 3 * (16 + 40))
    assert read_adapter_sizes(read_sizes(make_config()), LoRAConfig(rank=5)).num_parameters == by_hand


def test_a_target_that_the_model_does_not_have_is_refused_before_a_run():
    with pytest.raises(ConfigError, match="'nonsense', but no linear layer below the output layer of Qwen3ForCausalLM"):
        describe(Config(lora=LoRASection(rank=4, target_modules=("nonsense",))))


# -- memory


def test_the_memory_of_one_process_is_the_sum_by_hand(sizes: ModelSizes):
    tokens = 7
    layer = 24 * 16 + (3 * 32 + 2 * 16) * 4 + 4 * 40 * 4 + 8 * (32 + 16) + 4 * (2 + 4 + 4 + 2)
    once = 12 * 16 + 2 * 8 * 4 + 72
    activations = tokens * (3 * layer + once)
    logits = 2 * 4 * tokens * 50
    inside = tokens * (16 + 2 * 40) * 4  # of an MLP; larger than the logits of 7 tokens
    assert inside < logits
    working = tokens * 16 * 4 + logits
    assert parts_of(sizes, Training(tokens=tokens)) == {
        "parameters": 4 * TOTAL,
        "gradients": 4 * TOTAL,
        "Adam's moments": 8 * TOTAL,
        "activations": activations,
        "logits, gradients on their way": working + 4 * 800,  # with the gradient of the output layer
    }


def count_saved_bytes(model: Any, precision: str) -> int:
    """Count the bytes that autograd saves in a pass over draw_rows(), without parameters."""
    use_packed_attention(model)
    model.train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        options = OutputOptions(compute_dtype=getattr(torch, precision), chunk_size=16)  # kept logits are no activations
        run_rows(model, draw_rows(), compute_log_probs, options)
    return sum(saved.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_activations_are_what_autograd_saves(kind: str, precision: Any):
    import transformers

    config = make_config(kind)
    torch.manual_seed(0)
    found = count_saved_bytes(getattr(transformers, f"{kind}ForCausalLM")(config), precision)
    sizes, training = read_sizes(config), Training(tokens=256, precision=precision)
    assert activation_bytes(sizes, training) + unsharded_bytes(sizes, training) == pytest.approx(found, rel=0.01)


def test_frozen_weights_in_bfloat16_take_half_the_memory(sizes: ModelSizes):
    adapters, bfloat = AdapterSizes(num_parameters=100), {"tokens": 64, "precision": "bfloat16"}
    whole, halved = (parts_of(sizes, Training(**bfloat, adapters=adapters, frozen_width=width)) for width in (4, 2))
    assert (whole["parameters"], halved["parameters"]) == (4 * (TOTAL + 100), 2 * TOTAL + 4 * 100)
    assert whole.pop("parameters as they are computed with") > 0  # cast for each pass
    assert whole | {"parameters": halved["parameters"]} == halved
    reference = {part.name: part.size for part in inference_parts(sizes, Training(**bfloat, frozen_width=2))}
    assert reference["parameters"] == 2 * TOTAL


def test_state_of_a_trained_parameter_takes_16_or_10_or_6_bytes(sizes: ModelSizes):
    names = ("parameters", "gradients", "Adam's moments")
    block = MOMENTS_WIDTH["8bit"]
    for width, moments, expected in ((4, 8, (4, 4, 8)), (4, block, (4, 4, 2 + 8 / 256)), (2, block, (2, 2, 2 + 8 / 256))):
        found = parts_of(sizes, Training(tokens=64, precision="bfloat16", master_width=width, moments_width=moments))
        assert tuple(found[name] for name in names) == tuple(ceil(bytes_each * TOTAL) for bytes_each in expected)
        assert ("parameters as they are computed with" in found) == (width == 4)  # bfloat16 weights are not cast


def test_the_dry_run_reads_the_state_from_the_options():
    quantized = OptimizerConfig(moments="8bit")
    config = Config(backend=BackendSection(compute_dtype="bfloat16", master_dtype="bfloat16"), rl=RLSection(optimizer=quantized))
    sizes = read_sizes(create_model_config(config.model, 64))
    work = read_workload(config, "rl", sizes)
    assert (work.training.master_width, work.training.moments_width, work.critic_moments_width) == (2, MOMENTS_WIDTH["8bit"], 8)
    assert (read_workload(config, "sft", sizes).training.moments_width, read_workload(Config(), "rl", sizes).training.master_width) == (
        8,
        4,
    )
    config = replace(config, rl=RLSection(algorithm="ppo()"), critic=CriticSection(optimizer=quantized))
    parts = {part.name: part.size for part in plan_roles(read_workload(config, "rl", sizes))[0].parts}
    assert parts["critic: Adam's moments"] == ceil(MOMENTS_WIDTH["8bit"] / 2 * parts["critic: parameters"])
    assert parts["Adam's moments"] == 4 * parts["parameters"]


def test_recomputed_layers_save_their_inputs_alone():
    import transformers

    config = make_config("Qwen3")
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    recompute_activations(model)
    sizes, training = read_sizes(config), Training(tokens=256, keeps_inputs_alone=True)
    in_the_backward_pass = 256 * layer_bytes_per_token(sizes, "float32")  # of one layer at a time
    ratio = activation_bytes(sizes, training) / (count_saved_bytes(model, "float32") + in_the_backward_pass)
    assert 1.0 < ratio < 1.05  # keyword arguments of layers, such as rotations, are kept where hooks do not see them


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_with_dropout_keep_inputs_of_their_own(precision: Any):
    import transformers

    config, lora = make_config(hidden_size=64, intermediate_size=192, head_dim=16), LoRAConfig(rank=4, dropout=0.1)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    add_adapters(model, lora)
    sizes = read_sizes(config)
    training = Training(tokens=256, precision=precision, adapters=read_adapter_sizes(sizes, lora))
    ratio = (activation_bytes(sizes, training) + unsharded_bytes(sizes, training)) / count_saved_bytes(model, precision)
    assert 1.0 < ratio < 1.15  # frozen layers keep no inputs, which are counted


def test_a_real_backend_holds_the_bytes_of_the_formula():
    model = create_tiny_model(vocab_size=50)
    sizes = read_sizes(model.config)
    backend = create_pytorch_backend(model, lr=1e-3)
    backend.forward_backward(replace(draw_rows((5, 3)), loss_weights=torch.ones(2, 5)), sft_loss)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    backend.optim_step()
    moments = sum(
        value.nbytes for state in backend.optimizer.state.values() for value in state.values() if value.dim()
    )  # not the counts of steps
    found = {"parameters": sum(p.nbytes for p in model.parameters()), "gradients": gradients, "Adam's moments": moments}
    expected = parts_of(sizes, Training(tokens=8))
    assert found == {name: expected[name] for name in STATES}


def test_adapters_alone_have_gradients_and_moments(sizes: ModelSizes):
    whole, adapters = parts_of(sizes, Training(tokens=64)), parts_of(sizes, Training(tokens=64, adapters=AdapterSizes(num_parameters=100)))
    assert adapters["parameters"] == whole["parameters"] + 400
    assert (adapters["gradients"], adapters["Adam's moments"]) == (400, 800)
    assert adapters["logits, gradients on their way"] < whole["logits, gradients on their way"]


def test_bfloat16_halves_products_but_not_states(sizes: ModelSizes):
    single, half = (parts_of(sizes, Training(tokens=64, precision=p)) for p in ("float32", "bfloat16"))
    assert {name: single[name] for name in STATES} == {name: half[name] for name in STATES}
    assert half["activations"] < 0.8 * single["activations"]
    assert half["parameters as they are computed with"] == 2 * 3 * LAYER  # casts of the layers
    assert "parameters as they are computed with" not in single


def test_a_critic_has_no_logits_and_a_reference_no_gradients(sizes: ModelSizes):
    training = Training(tokens=2000)
    kept, chunk = 4 * 2000 * 500, 4 * 1024 * 500
    assert working_bytes(replace(sizes, vocab_size=500), training) == 2000 * 16 * 4 + kept + chunk
    assert working_bytes(replace(sizes, vocab_size=32_768), training) == 2000 * 16 * 4 + 2 * 4 * 1024 * 32_768  # of a chunk, not of all
    assert working_bytes(sizes, replace(training, has_vocabulary=False)) == 2000 * (16 + 16 + 80) * 4
    frozen = {part.name: part.size for part in inference_parts(sizes, training)}
    assert frozen["parameters"] == 4 * TOTAL
    assert set(frozen) == {"parameters", "a forward pass"}
    assert frozen["a forward pass"] < activation_bytes(sizes, training)


def test_the_heap_of_a_process_keeps_gaps(sizes: ModelSizes, monkeypatch: pytest.MonkeyPatch):
    alone, four = Training(tokens=64), sharded_training(64, 4, FSDPConfig())
    passing = sum(size for name, size in parts_of(sizes, alone).items() if name not in STATES)
    assert heap_bytes(sizes, alone, training_parts(sizes, alone)) == pytest.approx(0.35 * passing, abs=1)
    passing = sum(size for name, size in parts_of(sizes, four).items() if name not in STATES)
    layers = 4 * 3 * LAYER
    assert heap_bytes(sizes, four, training_parts(sizes, four)) == pytest.approx(0.15 * passing + 5 * layers, abs=1)
    large = replace(sizes, layer_parameters=HEAP_BLOCK // 4)  # whose buffers glibc gives back
    assert heap_bytes(large, four, training_parts(sizes, four)) == pytest.approx(0.15 * passing + layers, abs=1)
    work = Workload(sizes=sizes, training=alone, device="cpu")
    by_name = {part.name: part.size for part in plan_roles(work)[0].parts}
    assert by_name["gaps that the heap keeps"] == heap_bytes(sizes, alone, training_parts(sizes, alone))
    assert not any("heap" in part.name for part in plan_roles(replace(work, device="cuda"))[0].parts)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    assert "memory: gaps that the heap keeps" in describe(Config())
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert "memory: gaps that the heap keeps" not in describe(Config())


MEASURED = {  # MiB at the peak of six steps with micro-batches of so many tokens on each of so many ranks, as in docs/benchmarks.md
    ("small", 1): {128: 598, 256: 636, 512: 723, 1024: 908},
    ("small", 2): {128: 672, 256: 704, 512: 781, 1024: 943},
    ("medium", 1): {128: 1558, 256: 1734, 512: 1941, 1024: 2518},
    ("medium", 2): {128: 1915, 256: 2125, 512: 2287, 1024: 2686},
    ("large", 2): {128: 3639, 256: 3877},
}


@pytest.mark.parametrize(("size", "ranks"), MEASURED)
def test_the_estimate_is_within_15_percent_of_what_was_measured(size: str, ranks: int):
    for tokens, measured in MEASURED[size, ranks].items():
        assert memory.estimate(size, tokens, ranks, "cpu") / 2**20 == pytest.approx(measured, rel=0.15), tokens


# -- FSDP: each setting moves its own term, and no other


def changed(sizes: ModelSizes, num_ranks: int = 4, **settings: Any) -> dict[str, float]:
    """Parts that a setting changes, relative to those of full sharding over as many ranks."""
    plain = parts_of(sizes, sharded_training(64, num_ranks, FSDPConfig()))
    other = parts_of(sizes, sharded_training(64, num_ranks, FSDPConfig(**settings)))
    names = sorted(plain.keys() | other.keys())
    return {name: other.get(name, 0) / plain.get(name, 0) for name in names if other.get(name, 0) != plain.get(name, 0)}


GATHERED = "parameters as they are computed with"


def test_full_sharding_divides_states_and_gathers_two_layers(sizes: ModelSizes):
    one, four = parts_of(sizes, Training(tokens=64)), parts_of(sizes, sharded_training(64, 4, FSDPConfig()))
    assert [four[name] for name in STATES] == [one[name] / 4 for name in STATES]
    assert four["activations"] == one["activations"]
    assert four[GATHERED] == 4 * (2 * LAYER + LAYER + ROOT)  # two layers, a buffer, the root


def test_each_setting_of_fsdp_moves_its_own_term(sizes: ModelSizes):
    assert changed(sizes, sharding_strategy="shard_grad_op") == {GATHERED: pytest.approx((4 * LAYER + ROOT) / (3 * LAYER + ROOT))}
    assert changed(sizes, sharding_strategy="hybrid_shard", ranks_per_replica=2) == dict.fromkeys(STATES, 2.0)
    assert changed(sizes, sharding_strategy="no_shard") == dict.fromkeys(STATES, 4.0) | {GATHERED: 0.0}
    assert changed(sizes, auto_wrap_min_params=LAYER + 1) == {GATHERED: pytest.approx((5 * LAYER + ROOT) / (3 * LAYER + ROOT))}
    assert set(changed(sizes, gradient_checkpointing=True)) == {"activations"}
    assert changed(sizes, mixed_precision="bfloat16")[GATHERED] == pytest.approx((1.5 * LAYER + ROOT) / (3 * LAYER + ROOT))
    assert set(changed(sizes, mixed_precision="bfloat16")) == {GATHERED, "activations"}
    assert changed(sizes, clip_grad=0.1) == {}
    host = {part.name: part.on_host for part in training_parts(sizes, sharded_training(64, 4, FSDPConfig(cpu_offload=True)))}
    assert {name for name, is_there in host.items() if is_there} == set(STATES)
    assert changed(sizes, cpu_offload=True) == {}


def test_checkpointed_layers_keep_their_inputs_alone(sizes: ModelSizes):
    plain = sharded_training(64, 2, FSDPConfig())
    kept = replace(plain, sharding=Sharding(num_ranks=2, config=FSDPConfig(gradient_checkpointing=True)))
    saved = activation_bytes(sizes, plain) - activation_bytes(sizes, kept)
    layer = 24 * 16 + (3 * 32 + 2 * 16) * 4 + 4 * 40 * 4 + 8 * (32 + 16) + 4 * (2 + 4 + 4 + 2)
    assert saved == 64 * (2 * layer - 3 * 16 * 4)


RANKS = """
import json, torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from functools import partial
from dataclasses import replace
from rollouts.backends.ranks.distributed import Ranks
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.fsdp.backend import FSDPTrainingBackend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.algorithms.losses import sft_loss
import test_budget

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
received = 0.0

def count(name, position, keyword, times):
    function = getattr(dist, name)
    def call(*args, group=None, **kwargs):
        global received
        whole = args[position] if len(args) > position else kwargs[keyword]
        n = dist.get_world_size(group)
        received += times * whole.nbytes * (n - 1) / n
        return function(*args, group=group, **kwargs)
    setattr(dist, name, call)

single = hasattr(dist, "all_gather_single")
count("all_gather_single" if single else "all_gather_into_tensor", 0, "output_tensor", 1)
count("reduce_scatter_single" if single else "reduce_scatter_tensor", 1, "input", 1)
count("all_reduce", 0, "tensor", 2)
found = []
from transformers import Qwen3ForCausalLM
for settings in test_budget.SETTINGS:
    backend = FSDPTrainingBackend(Qwen3ForCausalLM(test_budget.make_config(vocab_size=52)), partial(create_adamw_optimizer, lr=0.0),
    config=FSDPConfig(**settings),
                                  ranks=Ranks(rank=0, world_size=4, device=torch.device("cpu"), timeout_s=60))
    received = 0.0
    batch = test_budget.draw_rows((5, 3))
    backend.forward_backward_shard(replace(batch, loss_weights=torch.ones(2, 5)), sft_loss)
    sent = received
    local = [p.to_local() for p in backend.model.parameters()]
    for p in backend.model.parameters():
        if p.grad is not None:
            p.grad.to_local().zero_()
    gradients = sum(p.grad.to_local().nbytes for p in backend.model.parameters() if p.grad is not None)
    backend.optim_step()
    moments = sum(v.to_local().nbytes for s in backend.optimizer.state.values() for v in s.values() if v.dim())
    found.append({"received": sent, "parameters": sum(p.nbytes for p in local), "gradients": gradients, "Adam's moments": moments})
print(json.dumps(found))
"""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"sharding_strategy": "shard_grad_op"},
    {"sharding_strategy": "hybrid_shard", "ranks_per_replica": 2},
    {"sharding_strategy": "no_shard"},
    {"mixed_precision": "bfloat16"},
)


def test_a_rank_of_four_holds_and_receives_the_bytes_of_the_formula(tmp_path: Path):
    """The other three are made up by a group that sends nothing: what arrives means nothing, but is as large."""
    sizes = read_sizes(make_config(vocab_size=52))  # which four ranks divide without a rest
    code = f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1] / 'support')!r})\n{RANKS}"
    status, out, error = run(code, folder=tmp_path)
    assert status == 0, error[-3000:]
    for settings, found in zip(SETTINGS, json.loads(out.splitlines()[-1]), strict=True):
        training = sharded_training(8, 4, FSDPConfig(**settings))
        expected = parts_of(sizes, training)
        assert {name: found[name] for name in STATES} == {name: expected[name] for name in STATES}, settings
        assert found["received"] == pytest.approx(sum(t.size for t in pass_traffic(sizes, training, Links()))), settings


# -- traffic


def test_traffic_of_a_pass_is_that_of_the_formulae(sizes: ModelSizes):
    def traffic(num_ranks: int, **settings: Any) -> dict[str, int]:
        return {t.name: t.size for t in pass_traffic(sizes, sharded_training(8, num_ranks, FSDPConfig(**settings)), Links())}

    assert traffic(4) == {
        "all-gather, forward": 3 * TOTAL,
        "all-gather, backward": 3 * 3 * LAYER,
        "reduce-scatter of gradients": 3 * TOTAL,
    }
    assert "all-gather, backward" not in traffic(4, sharding_strategy="shard_grad_op")
    assert traffic(4, sharding_strategy="no_shard") == {"all-reduce over replicas": 6 * TOTAL}
    hybrid = traffic(4, sharding_strategy="hybrid_shard", ranks_per_replica=2)
    assert (hybrid["all-gather, forward"], hybrid["all-reduce over replicas"]) == (2 * TOTAL, 2 * TOTAL)
    half = traffic(4, mixed_precision="bfloat16")
    assert half["all-gather, forward"] == 0.75 * (2 * 3 * LAYER + 4 * ROOT)
    assert half["reduce-scatter of gradients"] == 3 * TOTAL
    assert pass_traffic(sizes, Training(tokens=8), Links()) == []


def test_seconds_are_those_of_the_slowest_link(sizes: ModelSizes):
    links = Links(node=1000.0, network=10.0, ranks_per_node=2)
    near, far = (pass_traffic(sizes, sharded_training(8, n, FSDPConfig()), links)[0] for n in (2, 4))
    assert near.seconds == pytest.approx(near.size / 1000) and far.seconds == pytest.approx(far.size / 10)
    hybrid = FSDPConfig(sharding_strategy="hybrid_shard", ranks_per_replica=2)
    by_name = {t.name: t.size / t.seconds for t in pass_traffic(sizes, sharded_training(8, 4, hybrid), links)}
    assert by_name["all-gather, forward"] == pytest.approx(1000) and by_name["all-reduce over replicas"] == pytest.approx(10)


def test_weights_and_rows_are_sent_once(sizes: ModelSizes):
    gathered, sent = sync_traffic(sizes, sharding=Sharding(num_ranks=4), links=Links(), num_engines=3, width=2)
    assert (gathered.size, sent.size) == (3 * TOTAL, 2 * TOTAL)
    assert sync_traffic(sizes, sharding=None, links=Links(), num_engines=0) == []
    assert rows_traffic(1000, num_ranks=1).size == 0
    assert rows_traffic(1000, num_ranks=4).size == 3 * rows_traffic(1000, num_ranks=2).size / 2
    assert 0.0025 < rows_traffic(2 * 16384, num_ranks=2).seconds < 0.005  # as measured over sockets for a rank with 16,384 tokens
    assert [count_microbatches(n, max_tokens=10, num_ranks=2) for n in (1, 20, 21)] == [1, 1, 2]


# -- a run


def test_rank_0_has_the_engine_and_every_rank_its_shard(sizes: ModelSizes):
    work = Workload(
        sizes=sizes, training=sharded_training(64, 4, FSDPConfig()), device="cuda", embedded_slots=6, row_tokens=10, batch_rows=8
    )
    first, others = plan_roles(work)
    assert (first.count, others.count) == (1, 3)
    extra = {part.name: part.size for part in first.parts if part not in others.parts}
    assert extra.pop("samples of a batch") > 0
    assert extra == {
        "engine: weights": 4 * TOTAL,
        "engine: keys and values": cache_bytes(sizes, tokens=60),
        "engine: room in which they grow": 1.5 * cache_bytes(sizes, tokens=60),
        "weights on their way to the engine": 4 * TOTAL + 4 * 800,  # a copy under each name
    }
    assert cache_bytes(sizes, tokens=60) == 2 * 3 * 16 * 60 * FLOAT
    assert needed_bytes(work) == first.total(on_host=False)
    assert needed_bytes(replace(work, device="cpu")) > 4 * others.total()
    served = plan_roles(replace(work, embedded_slots=0, num_servers=2, server_ranks=2, engine_width=2))[-1]
    assert (served.count, served.parts[0].size) == (4, TOTAL)  # two bytes, over two GPUs
    linear = [m.weight.numel() for m in create_empty_model(make_config()).modules() if isinstance(m, torch.nn.Linear)]
    for least in (0, 300, 801):
        counted = {part.name: part.size for part in plan_roles(replace(work, engine_packs_from=least))[0].parts}
        expected = 4 * sum(n for n in linear if n >= least)
        assert counted.get("engine: packed weights", 0) == expected, "the output layer with them, also where it is tied"
    halved = {part.name: part.size for part in plan_roles(replace(work, engine_width=2))[0].parts if part.name.startswith("engine: ")}
    assert halved == {name: size / 2 for name, size in extra.items() if name.startswith("engine: ")}
    sent = plan_roles(replace(work, embedded_slots=0, num_servers=2, bucket_bytes=100))
    assert [part.size for role in sent for part in role.parts if part.name == "two buckets of weights"] == [200, 200]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("training", [Training(tokens=1), sharded_training(1, 2, FSDPConfig(gradient_checkpointing=True))])
def test_the_largest_micro_batch_fits_and_one_token_more_does_not(sizes: ModelSizes, training: Training, device: str):
    work = Workload(sizes=sizes, training=training, device=device, has_critic=True)
    available = 2 * GIB
    most = largest_microbatch(work, available)
    assert most > 1024

    def needed(tokens: int) -> int:
        return needed_bytes(replace(work, training=replace(training, tokens=tokens)))

    assert needed(most) <= available < needed(most + 1)
    assert largest_microbatch(work, 1000) == 0


def test_traffic_of_a_step_counts_its_micro_batches(sizes: ModelSizes):
    training = sharded_training(100, 2, FSDPConfig())
    work = Workload(
        sizes=sizes, training=training, device="cuda", row_tokens=10, step_rows=50, batch_rows=100, forward_passes=1, updates_per_batch=2
    )
    once = sum(transfer.size for transfer in pass_traffic(sizes, training, Links()))
    by_name = {traffic.name: traffic for traffic in plan_traffic(work, Links())}
    assert by_name["an optimizer step"].size == 3 * once  # 500 tokens on two ranks of 100
    assert by_name["log-probs and values of a batch"].times == 5
    assert by_name["rows of a batch"].times == 3
    assert plan_traffic(replace(work, training=Training(tokens=100)), Links()) == []


def describe(config: Config, mode: str = "rl") -> dict[str, str]:
    return describe_budget(config, mode, read_sizes(create_model_config(config.model)))


def test_a_dry_run_over_ranks_says_what_each_holds_and_whether_it_fits():
    config = Config(
        model=ModelSection(device="cuda", hidden_size=64, num_layers=2),
        backend=BackendSection(kind="fsdp", num_processes=16, fsdp=FSDPConfig(sharding_strategy="hybrid_shard", ranks_per_replica=8)),
        engine=EngineSection(kind="vllm", launch=True, gpus=("8",)),
        generation=GenerationSection(max_tokens=100),
        hardware=HardwareSection(memory_gib=1.0, network_gb_per_s=12.5),
    )
    facts = describe(config)
    parameters = read_sizes(create_model_config(config.model)).num_parameters
    assert facts["memory of rank 0: training state"] == format_bytes(16 * parameters / 8)
    assert facts["memory of each other rank: sum"].endswith(", in each of 15")
    assert "memory of each server's GPU: weights" in facts
    assert "all-reduce over replicas" in facts["traffic of an optimizer step"]
    assert "for each rank" in facts["traffic of an optimizer step"] and "from rank 0 to all others" in facts["traffic of rows of a batch"]
    assert facts["memory: fits"].startswith("yes: ") and "of 1 GiB (hardware.memory_gib)" in facts["memory: fits"]
    most = int(facts["memory: fits"].rsplit(" ", 1)[1].replace(",", ""))
    tight = replace(config, rl=RLSection(max_tokens_per_microbatch=2 * most, prompts_per_step=4096))
    assert describe(tight)["memory: fits"].startswith("NO: ")
    none = describe(replace(config, hardware=HardwareSection(memory_gib=1e-4)))
    assert "no micro-batch fits: shard over more ranks" in none["memory: fits"]


def test_ranks_share_the_rows_of_a_step():
    rl = RLSection(prompts_per_step=2, samples_per_prompt=4, num_minibatches=1)
    whole = read_workload(Config(rl=rl), "rl", read_sizes(make_config()))
    half = read_workload(Config(rl=rl, backend=BackendSection(kind="fsdp", num_processes=2)), "rl", whole.sizes)
    assert (whole.training.tokens, half.training.tokens) == (8 * 72, 4 * 72)  # prompt 64, response 8
    small = read_workload(Config(rl=replace(rl, max_tokens_per_microbatch=100)), "rl", whole.sizes)
    assert small.training.tokens == 100
    assert (
        read_workload(Config(rl=replace(rl, max_tokens_per_microbatch=10)), "rl", whole.sizes).training.tokens == 72
    )  # a row is not split


def test_adapters_show_in_the_budget():
    plain, adapted = describe(Config()), describe(Config(lora=LoRASection(rank=4)))
    assert adapted["memory:   Adam's moments"] != plain["memory:   Adam's moments"]
    with_kl = replace(Config(lora=LoRASection(rank=4)), rl=RLSection(algorithm="grpo(kl_coef=0.1)"))
    assert "memory: reference weights" not in describe(with_kl)  # it is the policy without its adapters
    assert "memory: reference weights" in describe(replace(with_kl, lora=LoRASection()))
    assert not any(name.startswith("traffic") for name in plain)


def test_a_critic_is_trained_whole_beside_a_policy_with_adapters(sizes: ModelSizes):
    def plan(adapters: AdapterSizes | None) -> tuple[dict[str, int], dict[str, int]]:
        training = sharded_training(64, 4, FSDPConfig(), adapters=adapters)
        work = Workload(sizes=sizes, training=training, device="cuda", has_critic=True, row_tokens=8, step_rows=8, batch_rows=8)
        traffic = {entry.name: entry.size for entry in plan_traffic(work, Links())}
        return {part.name: part.size for part in plan_roles(work)[0].parts if part.name.startswith("critic")}, traffic

    (whole, whole_traffic), (adapted, adapted_traffic) = plan(None), plan(AdapterSizes(num_parameters=100))
    assert adapted == whole and whole["critic: Adam's moments"] == 2 * TOTAL
    assert adapted_traffic["an optimizer step of the critic"] == whole_traffic["an optimizer step of the critic"]
    assert adapted_traffic["an optimizer step"] < whole_traffic["an optimizer step"]


@pytest.mark.parametrize("kind", ["torch_func", "jax"])
def test_what_no_formula_describes_is_not_computed(kind: str):
    facts = describe(Config(backend=BackendSection(kind=kind)))
    assert facts == {"memory": f"not computed for backend.kind {kind}, which needs more than pytorch; nor whether it fits"}
    served = describe(Config(backend=BackendSection(kind=kind), engine=EngineSection(kind="vllm", launch=True)))
    assert "memory of each server's GPU: weights" in served and "memory: fits" not in served


def test_the_embedded_engine_has_slots_for_all_that_runs_at_once():
    sizes = read_sizes(make_config())

    def slots(**settings: Any) -> int:
        config = Config(
            evaluation=EvaluationSection(num_prompts=settings.pop("heldout", 1)), rl=RLSection(samples_per_prompt=2, **settings)
        )
        return read_workload(config, "rl", sizes).embedded_slots

    assert slots(prompts_per_step=10) == 20
    assert slots(prompts_per_step=10, over_sampling_factor=1.5) == 30
    assert slots(prompts_per_step=10, heldout=100) == 100  # an evaluation's prompts are asked for together
    assert slots(prompts_per_step=10, algorithm="remax") == 30
    assert slots(prompts_per_step=10, asynchronous=AsyncConfig(enabled=True, max_staleness=3)) == 80
    assert slots(prompts_per_step=1000) == EngineSection().max_slots


def test_rooms_of_slots_and_kept_prompts_are_those_of_the_engine():
    model = create_tiny_model()
    sizes, slots = read_sizes(model.config), SlotModel(model, max_slots=8, name="engine")
    most, length = 0, 120
    with torch.inference_mode():
        slots.fill(list(range(8)), slots.prefill([list(range(3, 20))])[0])
        for position in range(17, length):
            before = slots.num_allocated
            slots.decode(torch.full((8,), 5), [position] * 8)
            after = slots.num_allocated
            most = max(most, after[0] * after[1] + (before[0] * before[1] if after != before else 0))
    work = Workload(sizes=sizes, training=Training(tokens=8), device="cuda", embedded_slots=8, row_tokens=length, kept_tokens=128)
    parts = {part.name: part.size for part in plan_roles(work)[0].parts}
    found = cache_bytes(sizes, tokens=most)
    assert parts["engine: keys and values"] < found <= parts["engine: keys and values"] + parts["engine: room in which they grow"]
    assert parts["engine: keys and values of prompts"] == cache_bytes(sizes, tokens=2 * 64)
    engine = InProcessEngine(model, prefix_cache_tokens=150)
    for first in range(3, 7):
        engine._slots.prefill([[first] * 70])
    blocks = [block for _, block in engine._slots._blocks._blocks.values()]
    assert sum(block.keys.nbytes + block.values.nbytes for block in blocks) == cache_bytes(sizes, tokens=128)


def test_prompts_of_episodes_are_kept_with_all_their_turns_within_the_setting():
    config = Config(task="grid_world", engine=EngineSection(prefix_cache_tokens=5000), evaluation=EvaluationSection(num_prompts=3))
    sizes = read_sizes(create_model_config(config.model, 512))
    work = read_workload(config, "rl", sizes)
    assert work.kept_tokens == 5000
    few = RLSection(prompts_per_step=1, samples_per_prompt=2)
    assert read_workload(replace(config, rl=few), "rl", sizes).kept_tokens == min(5000, (1 * 2 + 3) * work.row_tokens)
    assert read_workload(replace(config, task="sort"), "rl", sizes).kept_tokens <= (config.rl.prompts_per_step * 2 + 3) * 64
    assert read_workload(replace(config, engine=EngineSection(prefix_cache_tokens=0)), "rl", sizes).kept_tokens == 0


def test_a_reward_model_has_weights_and_a_pass(tmp_path: Path):
    model = create_reward_model(create_tiny_model())
    model.save_pretrained(tmp_path)
    plain, scored = describe(Config()), describe(Config(reward=RewardSection(model=str(tmp_path), model_dtype="bfloat16")))
    added = {name: scored[name] for name in scored.keys() - plain.keys()}
    backbone = sum(p.numel() for p in model.parameters()) - 32  # of the head
    assert added.pop("memory: reward model: weights") == format_bytes(2 * backbone)
    assert list(added) == ["memory: reward model: a forward pass"]


@pytest.mark.parametrize(
    ("device", "num_processes", "reward_device", "expected"),
    [
        ("cuda", 1, None, ["the process"]),
        ("cuda:1", 1, "cuda:1", ["the process"]),
        ("cuda", 1, "cpu", ["the process"]),
        ("cpu", 1, None, ["the process"]),
        ("cuda", 1, "cuda:1", ["the reward model's GPU"]),
        ("cuda:1", 1, "cuda", ["the reward model's GPU"]),
        ("cpu", 1, "cuda", ["the reward model's GPU"]),
        ("cuda", 4, None, ["rank 0"]),
        ("cuda", 4, "cuda:2", ["rank 2"]),
        ("cuda", 4, "cuda:4", ["the reward model's GPU"]),
        ("cuda", 16, "cuda:9", ["the reward model's GPU"]),  # ranks 8 to 15 are on another node
    ],
)
def test_a_reward_model_counts_where_it_is(device: str, num_processes: int, reward_device: str | None, expected: list[str], tmp_path: Path):
    create_reward_model(create_tiny_model()).save_pretrained(tmp_path)
    backend = BackendSection(kind="fsdp", num_processes=num_processes) if num_processes > 1 else BackendSection()
    config = Config(
        model=ModelSection(device=device),
        backend=backend,
        reward=RewardSection(model=str(tmp_path), model_device=reward_device),
        hardware=HardwareSection(memory_gib=2),
    )
    work = read_workload(config, "rl", read_sizes(create_model_config(config.model)))
    assert work.reward is not None
    roles = plan_roles(work)
    having = [role for role in roles if any(part.name.startswith("reward model") for part in role.parts)]
    assert [role.name for role in having] == expected and sum(role.count for role in roles if role.trains) == num_processes
    on_host = {part.on_host for part in having[0].parts if part.name.startswith("reward model")}
    assert on_host == {"cpu" in (reward_device, *([device] if reward_device is None else []))}
    alone = expected == ["the reward model's GPU"]
    facts = describe(config)
    assert ("memory of the reward model's GPU: fits" in facts) == alone
    if alone:
        assert needed_bytes(work) == needed_bytes(replace(work, reward=None))
        assert facts["memory of the reward model's GPU: fits"].startswith("yes: ")
        small = describe(replace(config, hardware=HardwareSection(memory_gib=1e-3)))["memory of the reward model's GPU: fits"]
        assert small.startswith("NO: ") and "--reward.model-dtype bfloat16" in small


def test_sft_counts_the_engine_that_evaluates_whatever_generates_later():
    """Held-out prompts are asked for together: 10 slots, each with a prompt of 64 tokens and an answer of 8."""
    sizes = read_sizes(make_config())
    served = EngineSection(kind="vllm", urls=("http://h:1",))
    for engine in (EngineSection(), served):
        for backend in (BackendSection(), BackendSection(kind="fsdp", num_processes=4)):
            config = Config(engine=engine, backend=backend, evaluation=EvaluationSection(num_prompts=10))
            first, *others = plan_roles(read_workload(config, "sft", sizes))
            parts = {part.name: part.size for part in first.parts}
            assert parts["engine: weights"] == 4 * TOTAL
            assert parts["engine: keys and values"] == cache_bytes(sizes, tokens=10 * 72)
            assert parts["engine: keys and values of prompts"] == cache_bytes(sizes, tokens=10 * 64)
            assert parts["weights on their way to the engine"] == 4 * (TOTAL + 800)
            assert not any(part.name.startswith("engine") for role in others for part in role.parts)
    few = read_workload(Config(engine=EngineSection(max_slots=4)), "sft", sizes)
    assert (few.embedded_slots, few.num_servers, few.reward) == (4, 0, None)
    gathered = {traffic.name: traffic.size for traffic in plan_traffic(read_workload(config, "sft", sizes), Links())}
    assert gathered["weights for an evaluation"] == 3 * TOTAL


def test_a_run_of_two_stages_shows_the_one_where_it_is_tightest():
    small = Config(
        rl=RLSection(prompts_per_step=1, samples_per_prompt=4, num_minibatches=1), engine=EngineSection(kind="vllm", launch=True)
    )
    assert describe(small, "sft+rl")["memory"].startswith("of the SFT stage, where it is tightest: SFT needs ")
    both, rl = describe(Config(), "sft+rl"), describe(Config(), "rl")
    assert both["memory"].startswith("of the RL stage") and both["memory: sum"] == rl["memory: sum"] and "memory" not in rl
    assert "--sft.max-tokens-per-microbatch could be up to" in both["memory: fits"]
    assert "--rl.max-tokens-per-microbatch could be up to" in both["memory: fits"]
    assert "memory: engine weights" in describe(small, "sft+rl") and "memory of each server's GPU: weights" in describe(small, "sft+rl")


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        ({"memory_fraction": 0.4}, 60.0),
        ({"memory_fraction": 0.4, "gpus": ("4",)}, 100.0),
        ({"memory_fraction": 0.4, "num_servers": 2, "gpus": ("1", "1")}, 20.0),
        ({}, 100.0),  # GPUs of its own, unless there are none
    ],
)
def test_a_server_that_is_started_on_the_gpu_of_a_rank_leaves_it_less(engine: dict[str, Any], left: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = Config(
        model=ModelSection(device="cuda"),
        backend=BackendSection(kind="fsdp", num_processes=4),
        engine=EngineSection(kind="vllm", launch=True, **engine),
        hardware=HardwareSection(memory_gib=100),
    )
    facts = describe(config, "sft+rl")
    assert f" of {format_bytes(left * GIB)} (hardware.memory_gib" in facts["memory: fits"]
    assert ("see engine.memory_fraction and engine.gpus" in facts["memory: fits"]) == (left < 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    there = 60.0 if engine.get("gpus") == ("4",) else 100.0 if "gpus" in engine else left if engine else 8.0
    assert f" of {format_bytes(there * GIB)} " in describe(config, "rl")["memory: fits"]


def test_memory_is_asked_of_the_machine_unless_the_user_says():
    found, where = find_memory("cpu", HardwareSection())
    assert found is None or found > GIB / 4, where
    assert find_memory("cpu", HardwareSection(memory_gib=2)) == (2 * GIB, "hardware.memory_gib")
    assert find_memory("mps", HardwareSection())[0] is None
    if not torch.cuda.is_available():
        assert find_memory("cuda", HardwareSection()) == (None, "there is no GPU here to ask: give --hardware.memory-gib")
        assert describe(Config(model=ModelSection(device="cuda")))["memory: fits"].startswith("unknown: ")


@pytest.mark.parametrize("setting", ["memory_gib", "node_gb_per_s", "network_gb_per_s", "ranks_per_node"])
def test_hardware_is_checked(setting: str):
    with pytest.raises(ConfigError, match=setting):
        HardwareSection(**{setting: 0})
