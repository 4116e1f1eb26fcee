"""Many prompts at once, a limited number in flight, failures kept apart, on every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.text.batch import BatchInferenceManager, GeneratedText, collect_texts, count_seeds, generate_results, generate_texts
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, DataError, EngineError
from rollouts.testing import FakeEngine, FakeSGLangServer, FakeVLLMServer, Fault, SGLangSettings, create_tiny_model, random_answer
from rollouts.types import Completion, Message, SamplingParams

PROMPTS = [f"{i}+{i}=" for i in range(10)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer()


class Watched(FakeEngine):
    """Counts what is in flight."""

    most = 0

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        self.most = max(self.most, len(self.pending_requests) + 1)
        return await super().generate(*args, **kwargs)


def uneven(prompt_tokens: tuple[int, ...], seed: int | None) -> float:
    """Later prompts are quicker, so that answers arrive out of order."""
    return 5.0 - prompt_tokens[0] % 5


async def test_answers_are_in_the_order_of_the_prompts_and_places_are_limited(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    engine = Watched(seconds_per_token=uneven)
    texts = await BatchInferenceManager(engine, tokenizer, batch_size=4).generate_batch(PROMPTS, max_tokens=12, seed=7)
    assert engine.most == 4
    assert len(engine.calls) == 10, "the last batch is short, and nothing is asked twice"
    expected = [random_answer()(tuple(tokenizer.encode(p)), 7 + i)[:12] for i, p in enumerate(PROMPTS)]
    assert [c.output_tokens for c in texts.completions if c is not None] == expected
    assert texts.sequences == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    assert isinstance(texts.sequences, list)
    assert isinstance(texts.tokens, np.ndarray)
    assert texts.tokens.shape == (10, max(map(len, expected)))
    assert texts.lengths == tuple(map(len, expected))
    for row, tokens in enumerate(expected):
        assert texts.tokens[row].tolist() == [*tokens, *[tokenizer.pad_token_id] * (texts.tokens.shape[1] - len(tokens))]
    assert texts.errors == {}


async def test_a_free_place_is_taken_at_once(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    """One slow answer holds up one place, not a whole batch."""
    engine = FakeEngine(lambda tokens, seed: [5] * (12 if seed == 0 else 4), seconds_per_token=1.0)
    await BatchInferenceManager(engine, tokenizer, batch_size=2).generate_batch(PROMPTS[:4], max_tokens=12, seed=0)
    assert trio.current_time() == 12.0


async def test_one_failure_is_reported_at_its_prompt_and_the_others_are_kept(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    error = EngineError("the answer was lost")
    engine = FakeEngine(seconds_per_token=1.0, error_for=lambda tokens, seed: error if seed == 3 else None)
    manager = BatchInferenceManager(engine, tokenizer, batch_size=3)
    prompts = [*PROMPTS[:5], "", *PROMPTS[5:]]
    texts = await manager.generate_batch(prompts, max_tokens=8, seed=0)
    assert set(texts.errors) == {3, 5}
    assert texts.errors[3] is error
    assert isinstance(texts.errors[5], DataError)
    assert [c is None for c in texts.completions] == [i in (3, 5) for i in range(11)]
    assert (texts.sequences[3], texts.lengths[3]) == ("", 0)
    assert all(texts.lengths[i] >= 1 for i in range(11) if i not in (3, 5))
    with pytest.raises(EngineError, match="lost"):
        await generate_texts(engine, tokenizer, PROMPTS, SamplingParams(max_tokens=256, seed=0))
    assert engine.pending_requests == ()


async def test_an_error_of_the_program_is_raised(tokenizer: Any) -> None:
    class Broken(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        await BatchInferenceManager(Broken(), tokenizer, batch_size=1).generate_batch(PROMPTS)


async def test_cancelling_drops_what_is_in_flight_and_the_manager_goes_on(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(lambda tokens, seed: [5] * 100, seconds_per_token=1.0)
    manager = BatchInferenceManager(engine, tokenizer, batch_size=3)
    with trio.move_on_after(4.5) as scope:
        await manager.generate_batch(PROMPTS, max_tokens=3)
    assert scope.cancelled_caught
    assert engine.pending_requests == ()
    assert len(engine.calls) == 6
    assert len((await manager.generate_batch(PROMPTS, max_tokens=3)).sequences) == 10


async def test_calls_may_overlap(tokenizer: Any) -> None:
    engine = InProcessEngine(create_tiny_model(), tokenizer)
    manager = BatchInferenceManager(engine, tokenizer, batch_size=4)
    found: dict[int, list[str]] = {}

    async def one(i: int) -> None:
        found[i] = (await manager.generate_batch(PROMPTS, max_tokens=4, seed=3)).sequences

    async with trio.open_nursery() as nursery:
        for i in range(3):
            nursery.start_soon(one, i)
    assert found[0] == found[1] == found[2]


async def test_without_a_seed_an_engine_numbers_the_prompts_in_their_order(tokenizer: Any) -> None:
    runs = []
    for _ in range(2):
        manager = BatchInferenceManager(InProcessEngine(create_tiny_model(), tokenizer, max_slots=2), tokenizer, batch_size=3)
        runs.append((await manager.generate_batch(PROMPTS, max_tokens=4)).sequences)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


async def test_settings_come_from_the_call_or_else_from_the_constructor(tokenizer: Any) -> None:
    engine = FakeEngine()
    params = SamplingParams(max_tokens=5, temperature=0.3, top_p=0.9, top_k=7, stop=("x",))
    manager = BatchInferenceManager(engine, tokenizer, params=params)
    await manager.generate_batch(["1="])
    await manager.generate_batch(["1="], 9, temperature=0.0, top_p=1.0, seed=4)
    sent = [call.arguments["params"] for call in engine.calls]
    assert sent == [params, params.new(max_tokens=9, temperature=0.0, top_p=1.0, seed=4)]


async def test_messages_go_through_the_chat_template(tokenizer: Any) -> None:
    engine = FakeEngine()
    messages = [Message(role="user", content="12=")]
    await BatchInferenceManager(engine, tokenizer).generate_batch([messages, [{"role": "user", "content": "12="}]])
    expected = tuple(tokenizer.apply_chat_template([{"role": "user", "content": "12="}], add_generation_prompt=True)["input_ids"])
    assert [call.arguments["prompt_tokens"] for call in engine.calls] == [expected, expected]


async def test_nothing_asked_is_nothing_answered(tokenizer: Any) -> None:
    texts = await BatchInferenceManager(FakeEngine(), tokenizer).generate_batch([])
    assert (texts.sequences, texts.tokens.shape, texts.lengths, texts.errors) == ([], (0, 0), (), {})


def test_a_batch_size_of_nothing_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size is 0"):
        BatchInferenceManager(FakeEngine(), tokenizer, batch_size=0)


def test_seeds_count_on_and_stay_in_range() -> None:
    assert [count_seeds(SamplingParams(seed=5))(i).seed for i in range(3)] == [5, 6, 7]
    assert count_seeds(SamplingParams(seed=2**63 - 1))(1).seed == 0
    assert count_seeds(SamplingParams())(4).seed is None


def test_a_batch_of_failures_has_no_tokens() -> None:
    texts = collect_texts([GeneratedText(error=EngineError("a")), GeneratedText(error=EngineError("b"))])
    assert texts.tokens.shape == (2, 0)
    assert list(texts.errors) == [0, 1]


@asynccontextmanager
async def open_embedded(tokenizer: Any) -> AsyncIterator[Any]:
    yield InProcessEngine(create_tiny_model(vocab_size=99), tokenizer, max_slots=3)


@asynccontextmanager
async def open_sglang(tokenizer: Any) -> AsyncIterator[Any]:
    fault = Fault("status", path="/generate", after=4, status=500)  # the first request is the engine's own
    model, settings = create_tiny_model(vocab_size=99), SGLangSettings(deterministic=True)
    async with FakeSGLangServer(model, settings, tokenizer=tokenizer, faults=[fault]) as server:
        async with SGLangEngine(server.url, vocab_size=99) as engine:
            yield engine


@asynccontextmanager
async def open_vllm(tokenizer: Any) -> AsyncIterator[Any]:
    fault = Fault("status", path="/inference/v1/generate", after=3, status=500)
    async with FakeVLLMServer(create_tiny_model(vocab_size=99), tokenizer=tokenizer, faults=[fault]) as server:
        async with VLLMEngine(server.url, vocab_size=99) as engine:
            yield engine


@pytest.mark.parametrize("open_engine", [open_embedded, open_sglang, open_vllm])
async def test_every_engine_answers_a_batch(open_engine: Any) -> None:
    tokenizer: Any = create_char_tokenizer(99)
    async with open_engine(tokenizer) as engine:
        manager = BatchInferenceManager(engine, tokenizer, batch_size=3)
        texts = await manager.generate_batch(PROMPTS, max_tokens=6, temperature=0.8, seed=11)
        again = await manager.generate_batch(PROMPTS, max_tokens=6, temperature=0.8, seed=11)
        at_once = await generate_results(engine, tokenizer, PROMPTS, count_seeds(SamplingParams(max_tokens=6, temperature=0.8, seed=11)))
    assert again.errors == {}
    assert len(texts.errors) == (0 if open_engine is open_embedded else 1)
    assert Counter(again.lengths)[0] == 0
    for i, completion in enumerate(again.completions):
        assert completion is not None
        assert completion.input_tokens == tuple(tokenizer.encode(PROMPTS[i]))
        assert again.tokens[i, : again.lengths[i]].tolist() == list(completion.output_tokens)
        if i not in texts.errors:
            assert texts.sequences[i] == again.sequences[i] == at_once[i].text
