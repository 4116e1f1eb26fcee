"""A reward model on a server (SGLang, vLLM, or one of the user's own), asked over HTTP for many samples at a time.

    async with open_remote_reward("http://127.0.0.1:30000", SGLangScores(), tokenizer=tokenizer) as reward:
        config = RolloutConfig(batch_size=8, reward_fn=reward, ...)

A RewardProtocol writes the requests and reads the answers: SGLangScores, VLLMScores, or PlainScores for a server of one's own.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from rollouts.checks import is_finite_number, show_value
from rollouts.data.samples import collect_reward_data, describe_sample, sample_messages
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.rewards.gathering import GatheredReward, gather_calls
from rollouts.rewards.models.local import TokenizeSample, read_tokens, render_tokens
from rollouts.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_DEADLINES = Deadlines(
    generate_s=300.0,
    options={name: f"open_remote_reward(HTTPEndpoint(url, deadlines=Deadlines({name}=...)), ...)" for name in ("generate_s", "connect_s")},
)


@dataclass(frozen=True)
class Question:
    """One sample in a form for a server."""

    sample: Sample
    tokens: Sequence[int]

    def to_plain(self) -> dict[str, Any]:
        """Return {"tokens": [...], "messages": [{"role", "content", ...}, ...], "metadata": {...}}, the metadata as far as it is JSON.

        Those of an episode have the values of its outcome, too, see collect_reward_data.
        """
        data = collect_reward_data(self.sample)
        metadata = {key: value for key, value in data.items() if key != "messages" and _is_json(value)}
        messages = [message.to_dict() for message in sample_messages(self.sample)]
        return {"tokens": list(self.tokens), "messages": messages, "metadata": metadata}


class RewardProtocol(Protocol):
    """Requests to a server, and the meaning of its answers. Pure."""

    @property
    def path(self) -> str:
        """Path of the route below the server's address."""
        ...

    def write_request(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the JSON body of a request."""
        ...

    def read_scores(self, answer: Any) -> list[Any]:
        """Return the scores in a parsed answer, in the order of the questions. Raises RewardError for another form of answer."""
        ...


@dataclass(frozen=True)
class SGLangScores:
    """SGLang with --is-embedding: POST /classify {"input_ids": [[...], ...]} -> [{"embedding": [score]}, ...]."""

    path: str = "/classify"

    def write_request(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the JSON body of a request."""
        return {"input_ids": [list(question.tokens) for question in questions]}

    def read_scores(self, answer: Any) -> list[Any]:
        """Return one score per entry."""
        entries = cast("list[Any]", answer if isinstance(answer, list) else [answer])
        return [_single_score(entry, "embedding") for entry in entries]


@dataclass(frozen=True)
class VLLMScores:
    """vLLM with a classification model: POST /classify {"model", "input": [[...], ...], "use_activation": false} -> {"data": [...]}.

    Each entry of data is {"index", "probs": [score]}. Without an activation (the default is a sigmoid) the score is the model's own.
    """

    model: str  # name under which the server has it
    path: str = "/classify"
    extra: Mapping[str, Any] = field(default_factory=lambda: {"use_activation": False})  # "activation" in old versions

    def write_request(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the JSON body of a request."""
        return {"model": self.model, "input": [list(question.tokens) for question in questions], **self.extra}

    def read_scores(self, answer: Any) -> list[Any]:
        """Return one score per entry, in the order of their index."""
        found = cast("Mapping[str, Any]", answer).get("data") if isinstance(answer, Mapping) else None
        if not isinstance(found, list):
            raise RewardError(f"the answer is {answer!r:.200}, expected an object with a list 'data'")
        entries = cast("list[Any]", found)
        if all(isinstance(entry, Mapping) and isinstance(entry.get("index"), int) for entry in entries):
            entries = sorted(entries, key=lambda entry: entry["index"])
        return [_single_score(entry, "probs") for entry in entries]


@dataclass(frozen=True)
class PlainScores:
    """A server of one's own: POST {"samples": [{"tokens", "messages", "metadata"}, ...]} -> {"scores": [number or null, ...]}.

    null means "no score for this sample", which follows the policy for failed rewards.
    """

    path: str = "/score"

    def write_request(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the JSON body of a request."""
        return {"samples": [question.to_plain() for question in questions]}

    def read_scores(self, answer: Any) -> list[Any]:
        """Return the list "scores"."""
        found = cast("Mapping[str, Any]", answer).get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(found, list):
            raise RewardError(f"the answer is {answer!r:.200}, expected an object with a list 'scores'")
        return cast("list[Any]", found)


@asynccontextmanager
async def open_remote_reward(
    server: str | HTTPEndpoint,
    protocol: RewardProtocol,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tokenize: TokenizeSample | None = None,
    max_samples: int = 64,
    max_requests: int = 8,
    api_key: str | None = None,
) -> AsyncGenerator[GatheredReward]:
    """Open a reward function that asks a server, for the length of the block.

    Requests have no side effects, so lost answers are requested again, as the endpoint's RetryPolicy says. An error of the server fails all
    samples of its request, an error of a sample that sample, and RewardConfig.on_error decides on both.

    Args:
        server: "http://host:port", with 300 s for an answer; or an HTTPEndpoint with deadlines, retries or a transport of the user's own,
            which is entered here. RewardConfig.timeout_s counts besides, from the moment that a sample is to be scored.
        protocol: SGLangScores(), VLLMScores(model), PlainScores(), or the user's own.
        tokenizer: tokenizer of the reward model, to render conversations; None = samples are in its tokens already.
        tokenize: choice of the tokens to send, in place of the one by `tokenizer`; see choose_tokenization.
        max_samples: most samples in one request.
        max_requests: most requests at the same time.
        api_key: bearer token for an address; an HTTPEndpoint has its own.

    Raises: ConfigError if the address or the key cannot be used.
    """
    if tokenize is None:
        tokenize = read_tokens if tokenizer is None else partial(render_tokens, tokenizer=tokenizer)
    if isinstance(server, str):
        server = HTTPEndpoint(server, api_key=api_key, deadlines=_DEADLINES, max_connections=max_requests)
    elif api_key is not None:
        raise ConfigError("api_key is given beside an HTTPEndpoint, which has a key of its own: pass it to the HTTPEndpoint")
    name = f"reward model at {server.base_url}"

    async def score(samples: Sequence[Sample]) -> list[Any]:
        results: list[Any] = [None] * len(samples)
        questions: dict[int, Question] = {}
        for i, sample in enumerate(samples):
            try:
                questions[i] = Question(sample, tokenize(sample))
            except DataError as error:
                results[i] = RewardError(f"{describe_sample(sample)} cannot be sent to the {name}: {error}")
        if not questions:
            return results
        answer = await server.post_json(protocol.path, protocol.write_request(list(questions.values())), idempotent=True)
        try:
            scores = protocol.read_scores(answer)
        except RewardError as error:
            raise RewardError(f"the {name} does not answer as {type(protocol).__name__} expects: {error}") from error
        if len(scores) != len(questions):
            raise RewardError(f"the {name} gave {len(scores)} scores for {len(questions)} samples, expected one for each, in their order")
        for (i, question), value in zip(questions.items(), scores, strict=True):
            results[i] = _check_score(value, question.sample, name)
        return results

    async with server, gather_calls(score, name=name, max_samples=max_samples, max_batches=max_requests) as reward:
        yield reward


def _check_score(value: Any, sample: Sample, name: str) -> float | RewardError:
    if not is_finite_number(value):
        return RewardError(
            f"the {name} gave {describe_sample(sample)} the score {show_value(value, 100)}, expected a finite number: see its log"
        )
    return float(value)


def _single_score(entry: Any, key: str) -> Any:
    """Return the only number of a list in an entry of an answer."""
    values = cast("Mapping[str, Any]", entry).get(key) if isinstance(entry, Mapping) else None
    if not isinstance(values, list):
        raise RewardError(f"an entry is {entry!r:.200}, expected an object with a list {key!r}")
    numbers = cast("list[Any]", values)
    if len(numbers) != 1:
        raise RewardError(f"{key!r} has {len(numbers)} numbers, expected 1: the model on the server is no reward model with one label")
    return numbers[0]


def _is_json(value: Any) -> bool:
    """Whether a value of metadata can be sent as JSON."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return all(isinstance(key, str) and _is_json(inner) for key, inner in items.items())
    if isinstance(value, list | tuple):
        return all(_is_json(inner) for inner in cast("Sequence[Any]", value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
