"""Decode steps of buckets, as CUDA graphs run them: the same steps on a CPU, and recordings that run them anew in place of graphs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Llama4TextConfig, Qwen3MoeConfig

from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.experts import ExpertRecorder
from rollouts.engines.inprocess.graphs import Bucket, Captured, DecodeGraphs, find_bucket, round_up
from rollouts.engines.inprocess.slots import SlotModel
from rollouts.errors import ConfigError
from rollouts.models.prepare import inspect_routers
from rollouts.testing import create_tiny_model

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048, "pad_token_id": 0}
CONFIGS = {
    "gemma3, window of 20": Gemma3TextConfig(**SIZES, sliding_window=20, sliding_window_pattern=2, query_pre_attn_scalar=8),
    "llama4, chunks of 30": Llama4TextConfig(
        **SIZES, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=30, bos_token_id=1, eos_token_id=2
    ),
}
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
LENGTHS = [5, 300, 30, 61, 6, 7, 255, 20]  # 300 and 255, with a new token, lie in other buckets


def create_model(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    for key, parameter in model.named_parameters():
        if "proj" in key:  # so that attention is not next to uniform
            parameter.data *= 6
    return model


class Recordings:
    """Recordings that compute the step anew, where graphs would replay its kernels; what they were given, and how often they ran."""

    def __init__(self) -> None:
        self.pools: list[object] = []
        self.replayed = 0

    def capture(self, run, pool) -> Captured:
        self.pools.append(pool)
        output = torch.empty_like(run())

        def replay() -> None:
            self.replayed += 1
            output.copy_(run())

        return Captured(replay, output, f"pool {len(self.pools)}" if pool is None else pool)


def attach(slots: SlotModel, capture) -> DecodeGraphs:
    slots.graphs = DecodeGraphs(slots.run_bucket, slots.list_weights(), name="engine", capture=capture)
    return slots.graphs


def open_pair(model, max_slots: int = 16) -> tuple[SlotModel, SlotModel]:
    ordinary, other = (SlotModel(copy.deepcopy(model), max_slots=max_slots, name="engine") for _ in range(2))
    return ordinary, other


def fill(slots: SlotModel, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 50, (len(lengths), max(lengths)), generator=generator).tolist()
    for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        slots.fill([slot], slots.prefill([row[:length]])[0])


def is_sum_of_neighbours(units: int) -> bool:
    return units & (units - 1) == 0 or (units % 3 == 0 and (third := units // 3) & (third - 1) == 0)


@example(1, 1)
@example(256, 256)
@example(257, 256)
@given(st.integers(1, 200_000), st.integers(1, 300))
def test_a_bucket_is_the_least_that_has_room(number, unit):
    found = round_up(number, unit)
    sizes = (unit * n for n in range(-(-number // unit), 4 * number) if is_sum_of_neighbours(n))  # 1, 2, 3, 4, 6, 8, 12, ...
    assert found == next(sizes) and found >= number and 2 * found < 3 * (number + unit)


@given(st.integers(1, 600), st.integers(1, 40_000), st.integers(0, 600))
def test_there_are_few_buckets_and_none_has_more_slots_than_there_are(num_slots, longest, more):
    bucket = find_bucket(num_slots, longest, num_slots + more)
    assert num_slots <= bucket.slots <= num_slots + more and longest <= bucket.live and bucket.live % 256 == 0
    assert find_bucket(*bucket, num_slots + more) == bucket


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_buckets_have_the_logits_of_ordinary_steps(name):
    ordinary, recorded = open_pair(create_model(name))
    recordings = Recordings()
    graphs = attach(recorded, recordings.capture)
    for count in (1, 2, 3, 5, 7, 8, 4):
        lengths = LENGTHS[:count]
        for slots in (ordinary, recorded):
            fill(slots, lengths)
        for step in range(3):
            positions = [length + step for length in lengths]
            tokens = torch.arange(3 + step, 3 + step + count)
            expected, found = (slots.decode(tokens, positions) for slots in (ordinary, recorded))
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
    assert recordings.replayed == 7 * 3 and not graphs.is_refused
    assert set(graphs._recorded) <= {Bucket(n, live) for n in (1, 2, 3, 4, 6, 8) for live in (256, 512)}


def test_a_length_beyond_its_bucket_takes_the_next_one():
    ordinary, recorded = open_pair(create_tiny_model())
    graphs = attach(recorded, Recordings().capture)
    for slots in (ordinary, recorded):
        fill(slots, [250, 3])
    for step in range(10):
        expected, found = (slots.decode(torch.tensor([5, 6]), [250 + step, 3 + step]) for slots in (ordinary, recorded))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert set(graphs._recorded) == {Bucket(2, 512)}, "the memory grew, so the graph of the shorter bucket is gone"


def test_recordings_share_memory_and_are_dropped_when_what_they_read_lies_elsewhere():
    ordinary, recorded = open_pair(create_tiny_model())
    recordings = Recordings()
    attach(recorded, recordings.capture)

    def step(count: int) -> int:
        expected, found = (slots.decode(torch.arange(3, 3 + count), [9] * count) for slots in (ordinary, recorded))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        return len(recordings.pools)

    for slots in (ordinary, recorded):
        fill(slots, [9] * 4)
    assert [step(4), step(3), step(4), step(3)] == [1, 2, 2, 2]
    for slots in (ordinary, recorded):  # an update writes into the weights
        slots.forget()
        with torch.no_grad():
            slots.model.get_input_embeddings().weight.add_(0.5)
    assert step(4) == 2
    for slots in (ordinary, recorded):
        weight = slots.model.get_input_embeddings().weight
        weight.data = weight.data * 2
    assert [step(4), step(3), step(4)] == [3, 4, 4]
    for slots in (ordinary, recorded):
        fill(slots, [9] * 16)  # more slots: other keys and values
    assert [step(4), step(4)] == [5, 5]
    assert recordings.pools == [None, "pool 1", None, "pool 3", None]


@pytest.mark.parametrize("failure", ["other numbers", "not a number", "an error"])
def test_a_graph_that_fails_is_named_once_and_steps_go_on_without(failure, caplog):
    ordinary, recorded = open_pair(create_tiny_model())
    calls = []

    def capture(run, pool) -> Captured:
        calls.append(pool)
        if failure == "an error":
            raise RuntimeError("operation not permitted when stream is capturing")
        output = run() * (1.5 if failure == "other numbers" else torch.nan)
        return Captured(lambda: None, output, None)

    graphs = attach(recorded, capture)
    for slots in (ordinary, recorded):
        fill(slots, [9, 4])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            expected, found = (slots.decode(torch.tensor([5, 6]), [9 + step, 4 + step]) for slots in (ordinary, recorded))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert graphs.is_refused and len(calls) == 1
    (message,) = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.getMessage()]
    assert ("operation not permitted" if failure == "an error" else "other hidden states") in message and "2 slots of 256 tokens" in message


def test_steps_whose_experts_are_recorded_are_ordinary_ones():
    model = AutoModelForCausalLM.from_config(EXPERTS).eval()
    slots = SlotModel(model, max_slots=4, name="engine")
    recordings = Recordings()
    attach(slots, recordings.capture)
    slots.recorder = ExpertRecorder(inspect_routers(model, native=False))
    fill(slots, [9, 4])
    slots.decode(torch.tensor([5, 6]), [9, 4])
    assert slots.experts is not None and not recordings.pools


def test_graphs_are_refused_where_no_step_is_recorded():
    assert SlotModel(create_tiny_model(), max_slots=4, name="engine", cuda_graphs=True).graphs is None
    with pytest.raises(ConfigError, match="cuda_graphs is True, but the model is on the device 'cpu'"):
        InProcessEngine(create_tiny_model(), cuda_graphs=True)
    with pytest.raises(ConfigError, match="cuda_graphs is True, but record_experts is set"):
        InProcessEngine(AutoModelForCausalLM.from_config(EXPERTS), cuda_graphs=True, record_experts=True)


def test_free_slots_of_a_bucket_write_at_their_first_token_alone():
    slots = SlotModel(create_tiny_model(), max_slots=8, name="engine")
    attach(slots, Recordings().capture)
    fill(slots, [9] * 6)
    slots.decode(torch.arange(3, 9), [9] * 6)
    before = slots._keys.clone()
    slots.decode(torch.arange(3, 8), [10] * 5)  # in the bucket of 6
    changed = (slots._keys != before).any(4).any(2).any(0)  # [slots, tokens]
    assert changed.nonzero().tolist() == [*([slot, 10] for slot in range(5)), [5, 0]]
