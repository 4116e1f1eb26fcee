"""Texts from a real server of either kind: batches of prompts, groups of one request, and the OpenAI-like routes."""

from __future__ import annotations

import pytest
import trio

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.text.batch import BatchInferenceManager
from rollouts.engines.text.openai import OpenAITextEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError
from rollouts.generation.single_turn import create_generate_fn
from rollouts.types import Message, Prompt, SamplingParams

MESSAGES = (Message(role="user", content="1+2="),)


async def check_texts(engine: SGLangEngine | VLLMEngine, url: str) -> None:
    """Texts that come in different ways are those of the same tokens."""
    tokenizer = create_char_tokenizer()
    prompts = [f"{i}+{i}=" for i in range(7)]
    texts = await BatchInferenceManager(engine, tokenizer, batch_size=3).generate_batch([*prompts, MESSAGES, ""], 12, temperature=0.0)
    assert list(texts.errors) == [8]
    for i, prompt in enumerate(prompts):
        alone = await engine.generate(tokenizer.encode(prompt), SamplingParams(max_tokens=12, temperature=0.0))
        assert texts.sequences[i] == tokenizer.decode(list(alone.output_tokens), skip_special_tokens=True)

    group = await create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=12), one_request_per_group=True)(
        Prompt(content="1="), 6
    )
    assert len({sample.tokens for sample in group}) > 3

    async with OpenAITextEngine(url, "whatever it serves", check_model=False) as anything:
        (name,) = await anything.models()
    with pytest.raises(EngineError, match="expected 'judge'"):
        async with OpenAITextEngine(url, "judge"):
            pass
    async with OpenAITextEngine(url, name) as server:
        answer = await server.complete(MESSAGES, max_tokens=12, temperature=0.0)
        assert answer.text == texts.sequences[7]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == texts.lengths[7]
        async with server.stream_text(MESSAGES, max_tokens=12, temperature=0.0) as stream:
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.completion.text == answer.text
        assert stream.completion.finish_reason == answer.finish_reason
        with pytest.raises(EngineError, match="512"):
            await server.complete([Message(role="user", content="1" * 600)])
        sampled: set[str] = set()

        async def ask() -> None:
            sampled.add((await server.complete(MESSAGES, max_tokens=12)).text)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
        assert len(sampled) > 4
