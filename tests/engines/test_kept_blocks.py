"""Keys and values kept for prompts that begin alike: what is computed, with which bits, and what is dropped."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.engines.inprocess.blocks import BLOCK_TOKENS, Block, KeptBlocks, depends_on_length
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.slots import SlotModel
from rollouts.testing import create_tiny_model
from rollouts.types import SamplingParams

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048}


def create_model(window: int | None = None, seed: int = 0):
    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES, use_sliding_window=window is not None, sliding_window=window, max_window_layers=1)
    return AutoModelForCausalLM.from_config(config).eval()


def draw_rows(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def create_slots(model, kept_tokens: int = 10_000) -> SlotModel:
    return SlotModel(model, max_slots=8, name="engine", kept_tokens=kept_tokens)


class ComputedTokens:
    """Counts the tokens that a model computes."""

    def __init__(self, model) -> None:
        self.passes: list[int] = []
        model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: self.passes.append(inputs[0].numel()))

    def take(self) -> int:
        total = sum(self.passes)
        self.passes.clear()
        return total


def same_bits(found, expected) -> bool:
    return all(torch.equal(getattr(found, name), getattr(expected, name)) for name in ("keys", "values", "logits"))


class NaiveBlocks:
    """Blocks by all tokens up to their end, each beginning used after the longer ones."""

    def __init__(self, most_blocks: int, size: int) -> None:
        self.most, self.size, self.blocks = most_blocks, size, OrderedDict()

    def beginnings(self, tokens):
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens), self.size)]

    def find(self, tokens):
        found = []
        for beginning in self.beginnings(tokens):
            if beginning not in self.blocks:
                break
            found.append(beginning)
        for beginning in found[::-1]:
            self.blocks.move_to_end(beginning)
        return [self.blocks[beginning] for beginning in found]

    def keep(self, tokens, blocks):
        for beginning, block in list(zip(self.beginnings(tokens), blocks, strict=False))[::-1]:
            self.blocks.setdefault(beginning, block)
            self.blocks.move_to_end(beginning)
        while len(self.blocks) > self.most:
            self.blocks.popitem(last=False)


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.booleans()), max_size=30)


@example([([0, 0, 0], True), ([0, 0, 0], False), ([1, 1], True), ([0, 0], False)], 2, 1)  # a prompt found again is dropped from its end
@given(PROMPTS, st.integers(0, 7), st.integers(1, 3))
def test_the_longest_kept_beginning_is_found_and_the_least_recently_used_dropped(prompts, most_blocks, size):
    kept, naive = KeptBlocks(most_tokens=most_blocks * size + size - 1, size=size), NaiveBlocks(most_blocks, size)
    for prompt, is_kept in prompts:
        found = kept.find(prompt)
        assert [id(block) for block in found] == [id(block) for block in naive.find(prompt)]
        empty = torch.empty(0)
        blocks = [*found, *(Block(empty, empty, None) for _ in range(kept.count_whole(prompt) - len(found)))]
        if is_kept:
            kept.keep(prompt, blocks)
            naive.keep(prompt, blocks)
        assert len(kept._blocks) == len(naive.blocks) <= most_blocks


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("window", [None, 20, 100])
def test_a_prompt_after_kept_blocks_has_the_logits_of_the_models_own_pass(window, one_pass):
    model = create_model(window)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    slots = create_slots(model)
    slots._in_blocks = not one_pass  # one pass for what is not kept is the way of a GPU
    rows = draw_rows(3, 4 * BLOCK_TOKENS)
    rows[1][:150] = rows[0][:150]
    with torch.no_grad():
        for length in (5, 64, 65, 130, 200, 250):
            prompts = [rows[0][:length], rows[1][: length - 3], rows[2][:length]]
            for prompt, prefix in zip(prompts, slots.prefill(prompts), strict=True):
                expected = own(input_ids=torch.tensor([prompt]), use_cache=True)
                torch.testing.assert_close(prefix.logits, expected.logits[0, -1], atol=1e-5, rtol=1e-4)
                for layer, cached in enumerate(expected.past_key_values.layers):
                    width = cached.keys.shape[2]  # a window's cache has its last tokens alone
                    torch.testing.assert_close(prefix.keys[layer, :, -width:], cached.keys[0], atol=1e-5, rtol=1e-4)
                    torch.testing.assert_close(prefix.values[layer, :, -width:], cached.values[0], atol=1e-5, rtol=1e-4)


def test_what_is_kept_changes_no_bit():
    """The same prompts after other prompts, beside others, with room for none of their blocks, for some and for all."""
    model = create_model()
    rows = draw_rows(6, 500)
    for row in rows[1:4]:
        row[:200] = rows[0][:200]
    prompts = [rows[0], rows[1][:300], rows[2][:129], rows[4][:333]]
    expected = create_slots(model).prefill(prompts)
    for kept_tokens in (BLOCK_TOKENS, 5 * BLOCK_TOKENS, 10_000):
        slots = create_slots(model, kept_tokens)
        slots.prefill([rows[5], rows[0][:77], rows[4]])
        slots.prefill([rows[3]])
        for _ in range(3):
            assert all(map(same_bits, slots.prefill(prompts), expected))
        for prompt, alone in zip(prompts, expected, strict=True):
            (found,) = slots.prefill([prompt])
            whole = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert torch.equal(found.keys[:, :, :whole], alone.keys[:, :, :whole])


async def play(engine: InProcessEngine, prompts: list[list[int]], turns: int, names: str = "abc") -> list:
    """Play conversations side by side, whose observations are prompts of their own. Returns completions by conversation."""
    answers = [[] for _ in prompts]

    async def one(i: int) -> None:
        context = list(prompts[i])
        for turn in range(turns):
            params = SamplingParams(max_tokens=10 + 3 * i, seed=100 * i + turn)
            answers[i].append(await engine.generate(context, params, request_id=f"{names[i]}-{turn}"))
            context += [*answers[i][-1].output_tokens, *draw_rows(1, 17, seed=100 * i + turn)[0]]

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(one, i)
    return answers


async def test_the_turns_of_a_conversation_compute_their_new_tokens_alone():
    model = create_model()
    engine = InProcessEngine(model, eos_token_ids=())
    computed = ComputedTokens(model)
    context = draw_rows(1, 40)[0]
    for turn in range(12):
        computed.take()
        completion = await engine.generate(context, SamplingParams(max_tokens=20, seed=turn))
        if turn:
            assert computed.take() <= 20 + 30 + BLOCK_TOKENS + 19  # the last answer and observation, a part of a block, and the new answer
        context += [*completion.output_tokens, *draw_rows(1, 30, seed=turn)[0]]
    assert len(context) > 600


async def test_a_conversation_has_the_same_bits_in_an_engine_that_served_others_before():
    """What a run that was never stopped and a resumed one, whose engine is new, must have in common."""
    model = create_model()
    prompts = draw_rows(3, 150)
    fresh = await play(InProcessEngine(copy.deepcopy(model), eos_token_ids=()), prompts, 5)
    async with InProcessEngine(model, eos_token_ids=()) as engine:
        await play(engine, [prompts[1], draw_rows(1, 90, seed=9)[0]], 3)
        await play(engine, prompts, 2)
        assert await play(engine, prompts, 5) == fresh
    small = InProcessEngine(copy.deepcopy(model), eos_token_ids=(), prefix_cache_tokens=2 * BLOCK_TOKENS)
    assert await play(small, prompts, 5) == fresh


async def test_a_prompt_is_computed_anew_unless_requests_wait_for_it_together():
    """A prompt kept whole from earlier requests would leave the pass of the others with other rows, and so with other last bits."""
    model = create_tiny_model()
    engine = InProcessEngine(model, max_slots=2, eos_token_ids=())
    computed = ComputedTokens(model)
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for k in range(5):
                nursery.start_soon(lambda k=k: engine.generate((3, 4, 5), SamplingParams(max_tokens=2, seed=k), request_id=f"{k}"))
        assert computed.take() == 3 + 5  # the prompt once, and a decoded token for each
        assert not engine._prefixes  # no memory is held during training


@pytest.mark.parametrize("window", [None, 20])
async def test_log_probs_of_later_turns_are_those_of_the_models_own_pass(window):
    model = create_model(window)
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    for answers in await play(InProcessEngine(model, eos_token_ids=()), draw_rows(3, 150), 5):
        for completion in answers:
            tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
            with torch.no_grad():
                log_probs = gather_log_probs(own(tokens).logits[:, :-1], tokens[:, 1:])[0, completion.input_len - 1 :]
            torch.testing.assert_close(torch.tensor(completion.output_log_probs), log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_keys_of_old_weights_serve_no_prompt_under_new_ones(on_update):
    engine = InProcessEngine(create_model(), eos_token_ids=(), kv_cache_on_update=on_update)
    prompt = draw_rows(1, 300)[0]
    await engine.generate(prompt, SamplingParams(max_tokens=5, seed=1))
    assert engine._slots._blocks._blocks
    new = create_model(seed=5)
    await engine.update_weights(new.state_dict(), weight_version=1)
    again = await engine.generate(prompt, SamplingParams(max_tokens=5, seed=1))
    expected = await InProcessEngine(new, eos_token_ids=()).generate(prompt, SamplingParams(max_tokens=5, seed=1))
    assert (again.output_tokens, again.output_log_probs) == (expected.output_tokens, expected.output_log_probs)


async def test_the_experts_of_kept_blocks_are_recorded():
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **experts)).eval()
    found = {}
    for kept in (0, 10_000):
        engine = InProcessEngine(copy.deepcopy(model), eos_token_ids=(), record_experts=True, prefix_cache_tokens=kept)
        found[kept] = await play(engine, draw_rows(2, 150), 4)
    for whole, parts in zip(found[0], found[10_000], strict=True):
        for a, b in zip(whole, parts, strict=True):
            assert a.output_tokens == b.output_tokens
            assert a.routed_experts is not None
            assert a.routed_experts == b.routed_experts


def test_a_rotation_by_the_length_of_the_pass_keeps_a_prompt_whole():
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    for kind, whole in (("dynamic", True), ("linear", False)):
        config = LlamaConfig(**sizes, rope_scaling={"rope_type": kind, "factor": 2.0})
        assert depends_on_length(config) is whole
        model = AutoModelForCausalLM.from_config(config).eval()
        computed = ComputedTokens(model)
        slots = create_slots(model)
        computed.take()
        slots.prefill(draw_rows(1, 200))
        assert len(computed.passes) == (1 if whole else 4)


def test_what_is_kept_takes_no_more_memory_than_its_tokens():
    """A block is a copy: a part of a longer tensor would hold all of it."""
    slots = create_slots(create_model(), 2 * BLOCK_TOKENS)
    slots._in_blocks = False
    slots.prefill(draw_rows(3, 500))
    for _, block in slots._blocks._blocks.values():
        for tensor in (block.keys, block.values):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert len(slots._blocks._blocks) == 2
