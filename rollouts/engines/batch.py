"""Prompts in, texts out: the simplest way to ask an engine something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from rollouts.chat import Messages, tokenize_prompt
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import raise_single_errors
from rollouts.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class GeneratedTexts:
    """Answers to a list of prompts, in the order of the prompts."""

    sequences: tuple[str, ...]  # decoded, without special tokens
    tokens: np.ndarray[Any, np.dtype[np.int64]]  # [prompts, longest answer], padded on the right with pad_id
    lengths: tuple[int, ...]  # tokens of each answer
    completions: tuple[Completion, ...]


async def generate_texts(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | None = None,
    pad_id: int = 0,
) -> GeneratedTexts:
    """Generate one answer to each prompt, all at once.

    Args:
        prompts: a str is tokenized as it stands, messages go through the chat template.
        seed: of the first prompt; the others count on from it. None = the engine's own.
    """
    completions: list[Completion | None] = [None] * len(prompts)

    async def generate_one(i: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=None if seed is None else seed + i)
        completions[i] = await engine.generate(tokenize_prompt(tokenizer, prompts[i]), params, request_id=f"text-{i:012d}")

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for i in range(len(prompts)):
                nursery.start_soon(generate_one, i)
    finished = tuple(c for c in completions if c is not None)
    lengths = tuple(c.output_len for c in finished)
    tokens = np.full((len(finished), max(lengths, default=0)), pad_id, dtype=np.int64)
    for row, completion in enumerate(finished):
        tokens[row, : lengths[row]] = completion.output_tokens
    texts = tuple(str(tokenizer.decode(list(c.output_tokens), skip_special_tokens=True)) for c in finished)
    return GeneratedTexts(sequences=texts, tokens=tokens, lengths=lengths, completions=finished)
