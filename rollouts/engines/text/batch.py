"""Texts for prompts: the simplest use of an engine, for one prompt or many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from rollouts.chat.tokenize import Messages, tokenize_prompt
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, DataError, EngineError, raise_alike_errors
from rollouts.types import Completion, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """Result of one prompt: a completion and its text, or its error."""

    completion: Completion | None = None
    text: str = ""  # decoded, without special tokens; "" after an error
    error: EngineError | DataError | None = None  # error of the engine, or of a prompt that cannot be tokenized

    def __post_init__(self) -> None:
        assert (self.completion is None) != (self.error is None), f"expected a completion or an error, not {self.completion}, {self.error}"


@dataclass(frozen=True, eq=False)
class GeneratedTexts:
    """Answers to a list of prompts, in the order of the prompts. A failed one has an error, an empty text and no tokens."""

    results: tuple[GeneratedText, ...]
    tokens: np.ndarray[Any, np.dtype[np.int64]]  # [prompts, longest answer], padded on the right
    lengths: tuple[int, ...]  # tokens of each answer

    @property
    def sequences(self) -> list[str]:
        """Text of each answer."""
        return [result.text for result in self.results]

    @property
    def completions(self) -> tuple[Completion | None, ...]:
        """Completion of each prompt; None if it failed."""
        return tuple(result.completion for result in self.results)

    @property
    def errors(self) -> dict[int, EngineError | DataError]:
        """Errors of failed prompts by their positions; empty if none failed."""
        return {i: result.error for i, result in enumerate(self.results) if result.error is not None}


async def generate_results(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    params_of: Callable[[int], SamplingParams],
    *,
    max_in_flight: int | None = None,
    raise_errors: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[GeneratedText, ...]:
    """Generate one answer to each prompt. A failure is the result of its own prompt and affects no other.

    Prompts are sent in their order; the next prompt is sent when an answer arrives. The engine numbers the requests.

    Args:
        prompts: a str is tokenized as it stands, messages go through the chat template.
        params_of: position of a prompt -> sampling parameters of its answer.
        max_in_flight: maximum number of requests at the same time; None = all prompts at once.
        raise_errors: raise the first failure, and cancel the other requests, instead of keeping it.
        template_kwargs: arguments of the chat template, for example {"enable_thinking": False}.

    Raises: any error other than EngineError and DataError; the other requests are then cancelled, too.
    """
    assert max_in_flight is None or max_in_flight >= 1, f"max_in_flight is {max_in_flight}, expected at least 1"
    results: list[GeneratedText | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def generate_one(i: int) -> GeneratedText:
        try:
            tokens = tokenize_prompt(tokenizer, prompts[i], **(template_kwargs or {}))
            completion = await engine.generate(tokens, params_of(i))
        except (EngineError, DataError) as error:
            if raise_errors:
                raise
            return GeneratedText(error=error)
        text = str(tokenizer.decode(list(completion.output_tokens), skip_special_tokens=True))
        return GeneratedText(completion=completion, text=text)

    async def work() -> None:
        # no wait between taking a position and the call of generate(), so requests are numbered in the order of the prompts
        for i in waiting:
            results[i] = await generate_one(i)
            await trio.lowlevel.checkpoint()  # a prompt that cannot be tokenized has not awaited yet

    with raise_alike_errors():
        async with trio.open_nursery() as nursery:
            for _ in range(len(prompts) if max_in_flight is None else min(max_in_flight, len(prompts))):
                nursery.start_soon(work)
    return tuple(result for result in results if result is not None)


def collect_texts(results: Sequence[GeneratedText], pad_id: int = 0) -> GeneratedTexts:
    """Collect answers into one padded array and a list of texts."""
    outputs = [() if result.completion is None else result.completion.output_tokens for result in results]
    lengths = tuple(len(output) for output in outputs)
    tokens = np.full((len(outputs), max(lengths, default=0)), pad_id, dtype=np.int64)
    for row, output in enumerate(outputs):
        tokens[row, : lengths[row]] = output
    return GeneratedTexts(results=tuple(results), tokens=tokens, lengths=lengths)


def find_pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's pad id, 0 if it has none: tokens beyond `lengths` are never read."""
    return 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]


async def generate_texts(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    params: SamplingParams,
    *,
    pad_id: int | None = None,
    max_in_flight: int | None = None,
) -> GeneratedTexts:
    """Generate one answer to each prompt.

    Args:
        prompts: a str is tokenized as it stands, messages go through the chat template.
        params: parameters of all answers; the seed is the first prompt's, the others count on from it.
        pad_id: token after the end of an answer in `tokens`; None = the tokenizer's.
        max_in_flight: maximum number of requests at the same time; None = all prompts at once.

    Raises: EngineError or DataError of the first prompt that fails; the others are then cancelled. BatchInferenceManager keeps them apart.
    """
    results = await generate_results(engine, tokenizer, prompts, count_seeds(params), max_in_flight=max_in_flight, raise_errors=True)
    return collect_texts(results, find_pad_id(tokenizer) if pad_id is None else pad_id)


def count_seeds(params: SamplingParams) -> Callable[[int], SamplingParams]:
    """Return f(position of a prompt) -> the parameters with params.seed plus that position, or as they are without a seed."""
    seed = params.seed
    return (lambda position: params) if seed is None else (lambda position: params.new(seed=(seed + position) % 2**63))


class BatchInferenceManager:
    """Answers to any number of prompts, with a bound on the requests in flight, and failures kept apart.

        manager = BatchInferenceManager(engine, tokenizer, batch_size=64)
        texts = await manager.generate_batch(prompts, max_tokens=128, temperature=0.7)
        texts.sequences, texts.tokens, texts.lengths, texts.errors

    It holds settings only, so generate_batch may run several times at once, each with its own batch_size places.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        *,
        params: SamplingParams | None = None,
        pad_id: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            batch_size: maximum number of requests in flight; when one ends, the next prompt is sent.
            params: parameters that generate_batch does not set (stop strings and ids, top_k, min_p), and defaults of the rest.
            pad_id: token after the end of an answer in `tokens`; None = the tokenizer's.
            template_kwargs: arguments of the chat template, for example {"enable_thinking": False}.

        Raises: ConfigError unless batch_size is at least 1.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}, expected at least 1 request in flight")
        self._engine = engine
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._params = params or SamplingParams()
        self._pad_id = find_pad_id(tokenizer) if pad_id is None else pad_id
        self._template_kwargs = template_kwargs

    async def generate_batch(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate one answer to each prompt, in their order; failed prompts are in `errors` of the result and affect no other.

        Args:
            prompts: a str is tokenized as it stands, messages go through the chat template.
            max_tokens, temperature, top_p: None = values of the constructor's params.
            seed: seed of the first prompt; the others count on from it. None = seed of the constructor's params.
        """
        given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        params = self._params.new(**{name: value for name, value in given.items() if value is not None})
        results = await generate_results(
            self._engine,
            self._tokenizer,
            prompts,
            count_seeds(params),
            max_in_flight=self._batch_size,
            template_kwargs=self._template_kwargs,
        )
        return collect_texts(results, self._pad_id)
