from __future__ import annotations

import copy
import threading
import time
from pathlib import Path

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.inprocess import engine as inprocess_module
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.native import NativeModel
from rollouts.engines.inprocess.slots import DecodeStep, Run, SlotModel, plan_runs
from rollouts.engines.text.batch import generate_texts
from rollouts.errors import EngineError
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, SamplingParams

PROMPT = (31, 5, 8, 3)


async def test_the_prompt_of_a_group_is_prefilled_once(monkeypatch):
    calls: list[int] = []
    original = SlotModel.prefill

    def counting(self, prompts):
        calls.append(len(prompts))
        return original(self, prompts)

    engine = InProcessEngine(create_tiny_model(), create_char_tokenizer(), max_slots=4)
    monkeypatch.setattr(SlotModel, "prefill", counting)
    async with trio.open_nursery() as nursery:
        for k in range(10):
            nursery.start_soon(engine.generate, PROMPT, SamplingParams(max_tokens=6, seed=k))
    assert sum(calls) == 1


async def test_the_event_loop_runs_beside_decoding(monkeypatch):
    engine = InProcessEngine(create_tiny_model(), create_char_tokenizer())
    decoding, answered, original = threading.Event(), threading.Event(), SlotModel.decode

    def wait_for_the_loop(self, tokens, positions):
        decoding.set()
        assert answered.wait(60), "the event loop was blocked by decoding"
        return original(self, tokens, positions)

    async def answer() -> None:
        while not decoding.is_set():
            await trio.sleep(0.001)
        answered.set()

    monkeypatch.setattr(SlotModel, "decode", wait_for_the_loop)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        await engine.generate(PROMPT, SamplingParams(max_tokens=3, seed=1, temperature=1.5))


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_weights_change_between_two_steps_and_each_token_is_stamped(on_update, monkeypatch):
    old, new = create_tiny_model(), create_tiny_model(seed=5)
    engine = InProcessEngine(copy.deepcopy(old), kv_cache_on_update=on_update, eos_token_ids=())
    found: list[Completion] = []
    num_steps, midst, updating, original = 0, threading.Event(), threading.Event(), SlotModel.decode

    def stand_still_in_the_midst(self, tokens, positions):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 20:
            midst.set()
            assert updating.wait(60)
        return original(self, tokens, positions)

    async def one() -> None:
        found.append(await engine.generate(PROMPT, SamplingParams(max_tokens=40, seed=2)))

    monkeypatch.setattr(SlotModel, "decode", stand_still_in_the_midst)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        while not midst.is_set():
            await trio.sleep(0.001)
        updating.set()
        await engine.update_weights(new.state_dict(), weight_version=3)
    versions = found[0].output_versions
    assert set(versions) == {0, 3}
    assert list(versions) == sorted(versions)
    full = torch.tensor([PROMPT + found[0].output_tokens])
    by_version = {}
    for version, model in ((0, old), (3, new)):
        with torch.no_grad():
            by_version[version] = gather_log_probs(model(full).logits[:, :-1], full[:, 1:])[0, len(PROMPT) - 1 :]
    found_log_probs = torch.tensor(found[0].output_log_probs)
    of_old, of_new = (torch.tensor(versions) == v for v in (0, 3))
    torch.testing.assert_close(found_log_probs[of_old], by_version[0][of_old], atol=1e-4, rtol=0)
    same = torch.allclose(found_log_probs[of_new], by_version[3][of_new], atol=1e-4)
    assert same == (on_update == "recompute")  # kept keys and values are those of the old weights


async def test_min_p_keeps_tokens_of_a_share_of_the_largest_probability():
    model = create_tiny_model()
    async with InProcessEngine(create_tiny_model(), create_char_tokenizer()) as engine:
        cut = await engine.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.5, min_p=0.4, seed=1))
        whole = await engine.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.5, seed=1))
    assert (cut.truncated_sampling, whole.truncated_sampling) == (True, False)
    tokens = torch.tensor([cut.input_tokens + cut.output_tokens])
    with torch.no_grad():
        probabilities = (model(tokens).logits[0, len(PROMPT) - 1 : -1] / 0.5).softmax(-1)
    kept = probabilities * (probabilities >= 0.4 * probabilities.amax(-1, keepdim=True))
    expected = (kept / kept.sum(-1, keepdim=True)).gather(-1, tokens[0, len(PROMPT) :, None]).squeeze(-1)
    torch.testing.assert_close(torch.tensor(cut.output_log_probs).exp(), expected, atol=1e-5, rtol=1e-4)
    assert (kept > 0).sum(-1).max() < 64


async def test_untempered_log_probs_come_when_asked_for():
    engine = InProcessEngine(create_tiny_model())
    params = SamplingParams(max_tokens=10, temperature=0.5, top_k=5, seed=1, untempered_log_probs=True)
    with_them, without = await engine.generate(PROMPT, params), await engine.generate(PROMPT, params.new(untempered_log_probs=False))
    assert without.untempered_log_probs is None
    assert with_them.truncated_sampling
    full = torch.tensor([PROMPT + with_them.output_tokens])
    with torch.no_grad():
        expected = gather_log_probs(create_tiny_model()(full).logits[:, :-1], full[:, 1:])[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(with_them.untempered_log_probs), expected, atol=1e-4, rtol=0)
    assert with_them.output_log_probs != pytest.approx(with_them.untempered_log_probs)


async def test_recomputed_log_probs_are_those_of_sampling():
    engine = InProcessEngine(create_tiny_model())
    completion = await engine.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.7, seed=1))
    again = await engine.recompute_output_log_probs(PROMPT + completion.output_tokens, len(PROMPT), temperature=0.7)
    assert again == pytest.approx(completion.output_log_probs, abs=1e-4)
    with pytest.raises(EngineError, match="start_index"):
        await engine.recompute_output_log_probs(PROMPT, 0)


async def test_scores_may_fill_the_context_and_answers_reach_its_end():
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=(), max_length=10)
    completion = await engine.generate(PROMPT[:3], SamplingParams(max_tokens=100))
    assert (completion.output_len, completion.finish_reason) == (7, "length")
    whole = completion.input_tokens + completion.output_tokens
    assert await engine.recompute_output_log_probs(whole, 3) == pytest.approx(completion.output_log_probs, abs=1e-4)
    with pytest.raises(EngineError, match="10 tokens, more than the 9 that fit into the context of 10"):
        await engine.generate(whole, SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match="11 tokens, more than the 10"):
        await engine.recompute_output_log_probs((*whole, 5), 3)


async def test_a_waiting_request_takes_a_freed_slot_at_once(monkeypatch):
    widths: list[int] = []
    original = SlotModel.decode
    monkeypatch.setattr(SlotModel, "decode", lambda self, t, p: (widths.append(t.numel()), original(self, t, p))[1])
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=(), max_slots=2)
    widths.clear()
    async with trio.open_nursery() as nursery:
        for k, length in enumerate((3, 12, 9)):
            nursery.start_soon(lambda k=k, n=length: engine.generate(PROMPT, SamplingParams(max_tokens=n, seed=k), request_id=f"{k}"))
    assert len(widths) <= 12  # the third runs in the first one's slot, beside the second
    assert sum(widths) == 2 + 11 + 8


async def test_all_who_are_about_to_ask_are_in_the_first_step_on_a_slow_machine_too(monkeypatch):
    widths: list[int] = []
    original = SlotModel.decode
    monkeypatch.setattr(SlotModel, "decode", lambda self, t, p: (widths.append(t.numel()), original(self, t, p))[1])
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=())
    widths.clear()

    async def ask(k: int) -> None:
        for _ in range(k):
            await trio.lowlevel.checkpoint()
            time.sleep(0.03)  # the whole process stands still, as where others have the processor
        await engine.generate(PROMPT, SamplingParams(max_tokens=4, seed=k))

    async with trio.open_nursery() as nursery:
        for k in range(4):
            nursery.start_soon(ask, k)
    assert widths == [4, 4, 4]


async def test_a_task_that_never_rests_does_not_stop_the_engine():
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=())

    async def never_rest() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(never_rest)
            assert (await engine.generate(PROMPT, SamplingParams(max_tokens=4))).output_len == 4
            nursery.cancel_scope.cancel()


async def test_stop_strings_without_a_tokenizer_are_refused():
    engine = InProcessEngine(create_tiny_model())
    with pytest.raises(EngineError, match="tokenizer"):
        await engine.generate(PROMPT, SamplingParams(stop=("x",)))


async def test_a_slot_that_cannot_be_filled_leaves_no_trace_in_any_answer(monkeypatch):
    params = [SamplingParams(max_tokens=3 + i, seed=i) for i in range(6)]
    expected = {}
    plain = InProcessEngine(create_tiny_model(), create_char_tokenizer())
    for i in range(6):
        expected[i] = (await plain.generate((31, 5 + i), params[i])).output_tokens
    engine = InProcessEngine(create_tiny_model(), create_char_tokenizer(), max_slots=2)
    original, calls = SlotModel.fill, []

    def fail_sometimes(self, slots, prefix):
        calls.append(1)
        if len(calls) % 3 == 2:
            raise RuntimeError("out of memory")
        original(self, slots, prefix)

    monkeypatch.setattr(SlotModel, "fill", fail_sometimes)

    async def one(i: int) -> None:
        for _ in range(50):
            try:
                completion = await engine.generate((31, 5 + i), params[i], request_id=f"{i}")
            except RuntimeError:
                continue
            assert completion.output_tokens == expected[i]
            return
        raise AssertionError("never answered")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(one, i)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
async def test_architectures(architecture):
    model = create_tiny_model(architecture=architecture)
    engine = InProcessEngine(copy.deepcopy(model))
    completion = await engine.generate(PROMPT, SamplingParams(max_tokens=9, temperature=0.0))
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
    assert list(completion.output_tokens) == expected[0, len(PROMPT) :].tolist()


async def test_texts_come_back_in_the_order_of_the_prompts():
    tokenizer = create_char_tokenizer()
    engine = InProcessEngine(create_tiny_model(), tokenizer, max_slots=2)
    texts = await generate_texts(engine, tokenizer, ["s12=", "s9=", "s456="], SamplingParams(max_tokens=6, seed=1))
    alone = await generate_texts(engine, tokenizer, ["s9="], SamplingParams(max_tokens=6, seed=2))
    assert texts.sequences[1] == alone.sequences[0]
    assert texts.tokens.shape == (3, max(texts.lengths))
    assert [c.input_tokens for c in texts.completions] == [tuple(tokenizer.encode(p)) for p in ("s12=", "s9=", "s456=")]


async def test_no_request_is_lost_when_many_come_go_and_are_aborted_while_steps_run():
    """Requests that arrive, are cancelled and are aborted in the middle of steps, over and over: every call returns."""
    engine = InProcessEngine(create_tiny_model(), create_char_tokenizer(), max_slots=3)
    returned = 0

    async def one(i: int) -> None:
        nonlocal returned
        await trio.sleep(0.0007 * i)
        with trio.move_on_after(0.004 if i % 5 == 0 else 60):
            completion = await engine.generate(PROMPT, SamplingParams(max_tokens=4 + i % 9, seed=i), request_id=f"{i:04d}")
            assert completion.output_len <= 4 + i % 9
        returned += 1

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for i in range(150):
                nursery.start_soon(one, i)
            for _ in range(20):
                await trio.sleep(0.005)
                await engine.abort([f"{i:04d}" for i in range(0, 150, 7)])
    assert returned == 150


async def test_a_step_that_fails_raises_in_its_caller_and_loses_nobody_else(monkeypatch):
    engine = InProcessEngine(create_tiny_model(), create_char_tokenizer(), max_slots=8)
    original, failures = SlotModel.prefill, [1]

    def fail_once(self, prompts):
        if failures:
            failures.pop()
            raise RuntimeError("out of memory")
        return original(self, prompts)

    monkeypatch.setattr(SlotModel, "prefill", fail_once)
    outcomes: list[str] = []

    async def one(i: int) -> None:
        try:
            await engine.generate((31, 5 + i), SamplingParams(max_tokens=4, seed=i))
            outcomes.append("answered")
        except RuntimeError:
            outcomes.append("raised")

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(one, i)
    assert sorted(outcomes) == ["answered"] * 5 + ["raised"]


def test_an_engine_in_this_process_uses_nothing_of_servers():
    files = sorted(Path(inprocess_module.__file__).parent.glob("*.py"))
    assert len(files) > 2
    rooms = ("http", "sglang", "vllm", "launch", "fleet")
    assert not [(path.name, room) for path in files for room in rooms if f"rollouts.engines.{room}" in path.read_text()]


# in inference mode the composite operations arrive whole, outside it as the first two
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::is_nonzero", "aten::nonzero_numpy", "aten::masked_select")


class HostReads(TorchDispatchMode):
    """Record operations whose results the host reads: each would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        if name in READS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["slots", "native"])
def test_a_decode_step_reads_nothing_back_from_the_device(kind):
    model = create_tiny_model()
    decoding = SlotModel(model, max_slots=4, name="engine") if kind == "slots" else NativeModel(model, name="engine")
    for slot, prompt in enumerate([PROMPT, PROMPT[:2]]):
        decoding.fill([slot], decoding.prefill([prompt])[0])
    with HostReads() as reads:
        for step in range(2):
            decoding.decode(torch.tensor([5, 6]), [len(PROMPT) + step, 2 + step])
    assert reads.found == []


def up(length):
    return -(-length // 16) * 16


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=90), st.sampled_from(["cpu", "cuda"]))
def test_runs_cover_each_slot_once_and_cost_no_more_than_one_call(lengths, device):
    runs, call = plan_runs(lengths, device), {"cpu": 1024, "cuda": 65_536}[device]
    assert [slot for run in runs for slot in range(run.start, run.stop)] == list(range(len(lengths)))
    assert all(run.live == up(max(lengths[run.start : run.stop])) for run in runs)
    costs = [(run.stop - run.start) * run.live + call for run in runs]
    assert sum(costs) <= len(lengths) * up(max(lengths)) + call
    for run, cost in zip(runs, costs, strict=True):  # no further cut pays
        for cut in range(run.start + 1, run.stop):
            parts = [lengths[run.start : cut], lengths[cut : run.stop]]
            assert sum(len(part) * up(max(part)) + call for part in parts) >= cost


def test_a_long_sequence_is_read_alone_and_short_ones_are_one_call():
    assert plan_runs([100] * 30 + [4000] + [90] * 33, "cpu") == (Run(0, 30, 112), Run(30, 31, 4000), Run(31, 64, 96))
    assert plan_runs([9, 25, 17] * 60, "cpu") == (Run(0, 180, 32),)
    assert plan_runs([40, 1], "cpu") == (Run(0, 2, 48),)
    assert plan_runs([100] * 30 + [1000] + [90] * 33, "cuda") == (Run(0, 64, 1008),)


@pytest.mark.parametrize("window", [None, 20])
def test_sequences_of_other_lengths_beside_it_change_no_logits_of_a_sequence(window):
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        use_sliding_window=window is not None, sliding_window=window, max_window_layers=1, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    slots = SlotModel(model, max_slots=8, name="engine")
    rows = [torch.randint(0, 50, (length,)).tolist() for length in (5, 300, 30, 700, 6, 7)]
    for slot, row in enumerate(rows):
        slots.fill([slot], slots.prefill([row[:-1]])[0])
    found = slots.decode(torch.tensor([row[-1] for row in rows]), [len(row) - 1 for row in rows])
    assert len(plan_runs([len(row) for row in rows], "cpu")) > 1
    with torch.no_grad():
        for row, logits in zip(rows, found, strict=True):
            torch.testing.assert_close(logits, own(input_ids=torch.tensor([row])).logits[0, -1], atol=1e-5, rtol=1e-4)


def test_layers_of_several_windows_and_chunks_have_masks_of_their_own():
    positions, empty = torch.tensor([3, 30, 25]), torch.empty(0)
    mask = (torch.arange(32) <= positions[:, None])[:, None, None]
    step = DecodeStep(empty, empty, torch.arange(3), positions, (Run(0, 3, 32),), mask)
    for window, chunk in ((None, None), (5, None), (8, None), (5, None), (40, None), (None, 8), (5, 8), (12, 8), (None, 40), (40, 8)):
        seen = [
            [at <= own and (window is None or at > own - window) and (chunk is None or at // chunk == own // chunk) for at in range(32)]
            for own in positions.tolist()
        ]
        assert step.see(window, chunk)[:, 0, 0].tolist() == seen
