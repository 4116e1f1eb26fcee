"""FakeEngine: an inference engine that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import trio
from torch import Tensor

from rollouts.engines.protocol import WEIGHT_VERSION_FILE, EngineFeature
from rollouts.errors import EngineError
from rollouts.seeds import derive_seed
from rollouts.types import Completion, FinishReason, SamplingParams

Answer: TypeAlias = Callable[[tuple[int, ...], "int | None"], Sequence[int]]
"""(prompt tokens, seed of the request) -> the whole answer. max_tokens cuts it; if it ends by itself the finish reason is "stop"."""

Delay: TypeAlias = Callable[[tuple[int, ...], "int | None"], float]
"""(prompt tokens, seed of the request) -> seconds for each token of the answer."""


@dataclass(frozen=True)
class Call:
    """One call that a fake received."""

    who: str  # the fake's name
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


def script_answer(tokens: Sequence[int]) -> Answer:
    """Return a function that gives the same answer to every request."""
    answer = tuple(tokens)
    return lambda prompt_tokens, seed: answer


def random_answer(vocab_size: int = 64, eos_token_id: int = 1, mean_length: int = 8) -> Answer:
    """Return a pure function of the prompt's tokens and the request's seed that gives answers of random length and content.

    Args:
        vocab_size: tokens are drawn from [3, vocab_size); the ids below are the special ones of the character tokenizer.
        eos_token_id: last token of every answer.
        mean_length: lengths are uniform in [1, 2 * mean_length - 1], the end of text included.
    """
    assert vocab_size > 3, f"vocab_size is {vocab_size}, expected more than the 3 special tokens"
    assert mean_length >= 1, f"mean_length is {mean_length}, expected at least 1"

    def answer(prompt_tokens: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
        key = (0 if seed is None else seed, *prompt_tokens)
        length = derive_seed(*key, 0) % (2 * mean_length - 1)
        return (*(3 + derive_seed(*key, position) % (vocab_size - 3) for position in range(1, length + 1)), eos_token_id)

    return answer


@dataclass
class _Request:
    """One generate() call in flight."""

    aborted: trio.Event = field(default_factory=trio.Event)  # also set when the engine dies
    death: str | None = None  # reason for the end of the engine while it answered; None = it lives


class FakeEngine:
    """An InferenceEngine with answers from a function and time from trio.

    Tokens of one request appear `seconds_per_token` apart; requests do not slow each other down. Each token is stamped with the weight
    version at its moment, so a completion has two versions if a weight update takes place during its request. All log-probs are -0.5.
    """

    features = frozenset({EngineFeature.MEMORY_UPDATES})

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        seconds_per_token: float | Delay = 0.0,
        weight_version: int = 0,
        seconds_per_update: float = 0.0,
        error_for: Callable[[tuple[int, ...], int | None], Exception | None] | None = None,
        update_error: Exception | None = None,
        name: str = "engine",
        calls: MutableSequence[Call] | None = None,
    ) -> None:
        """
        Args:
            answer: function that gives the answers; default random_answer().
            seconds_per_token: seconds between two tokens of a request, also before the first; or a function of prompt tokens and seed.
            weight_version: the version before the first update.
            seconds_per_update: seconds that a weight update takes; the old weights serve until its end.
            error_for: (prompt tokens, seed) -> exception that ends this request after its first token's delay; None = none.
            update_error: exception that every weight update raises at its end; the old weights stay in place.
            name: name in `calls` and in messages.
            calls: sequence to append to, such as deque(maxlen=100) for a long run; default a new list of all.
        """
        self.name = name
        self.calls: MutableSequence[Call] = [] if calls is None else calls
        self.weight_version = weight_version
        self.weights: Mapping[str, Tensor] | None = None  # weights of the last update_weights
        self.checkpoint_path: Path | None = None  # directory of the last update_weights_from_checkpoint
        self._answer = random_answer() if answer is None else answer
        self._seconds_per_token = seconds_per_token
        self._seconds_per_update = seconds_per_update
        self._error_for = error_for
        self._update_error = update_error
        self._requests: dict[str, _Request] = {}
        self._num_requests = 0
        self._death: str | None = None

    def kill(self, reason: str = "its process has ended") -> None:
        """Make every call from now on raise EngineError, requests in flight included."""
        self._death = reason
        for request in self._requests.values():
            request.death = reason  # stays, if the engine is started again before the request notices
            request.aborted.set()

    def revive(self, weight_version: int) -> None:
        """Answer again, as a server restarted after kill() does, with the weights that it is started with."""
        assert self._death is not None, f"{self.name} is alive: kill() it before it is started again"
        self._death, self.weight_version = None, weight_version

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(f"{self.name} cannot be reached: {self._death}")

    @property
    def pending_requests(self) -> tuple[str, ...]:
        """Ids of the requests in flight."""
        return tuple(sorted(self._requests))

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Answer from the script, one token per delay, until it ends, max_tokens is reached or abort() is called."""
        prompt = tuple(prompt_tokens)
        self._num_requests += 1
        request_id = f"{self.name}-{self._num_requests}" if request_id is None else request_id
        self.calls.append(Call(self.name, "generate", {"prompt_tokens": prompt, "params": params, "request_id": request_id}))
        self._check_alive()
        assert request_id not in self._requests, f"request id {request_id!r} is already being answered"
        request = _Request()
        self._requests[request_id] = request
        try:
            tokens, versions, reason = await self._decode(prompt, params, request)
        finally:
            del self._requests[request_id]
        log_probs = (-0.5,) * len(tokens)
        return Completion(
            request_id=request_id,
            input_tokens=prompt,
            output_tokens=tokens,
            output_log_probs=log_probs,
            output_versions=versions,
            finish_reason=reason,
            temperature=params.temperature or 1.0,
            truncated_sampling=params.truncates,
            untempered_log_probs=log_probs if params.untempered_log_probs else None,
        )

    async def _decode(
        self, prompt: tuple[int, ...], params: SamplingParams, request: _Request
    ) -> tuple[tuple[int, ...], tuple[int, ...], FinishReason]:
        answer = tuple(self._answer(prompt, params.seed))
        error = None if self._error_for is None else self._error_for(prompt, params.seed)
        delay = self._seconds_per_token(prompt, params.seed) if callable(self._seconds_per_token) else self._seconds_per_token
        tokens: list[int] = []
        versions: list[int] = []
        for token in answer[: params.max_tokens]:
            with trio.move_on_after(delay):
                await request.aborted.wait()
            await trio.lowlevel.checkpoint()
            if error is not None:
                raise error
            if request.death is not None:
                raise EngineError(f"{self.name} cannot be reached: {request.death}")
            if request.aborted.is_set():
                return tuple(tokens), tuple(versions), "abort"
            tokens.append(token)
            versions.append(self.weight_version)
        return tuple(tokens), tuple(versions), "stop" if len(answer) <= params.max_tokens else "length"

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make the named requests, or all, return with the tokens they have."""
        wanted = None if request_ids is None else set(request_ids)
        self.calls.append(Call(self.name, "abort", {"request_ids": None if wanted is None else tuple(sorted(wanted))}))
        self._check_alive()
        for request_id, request in self._requests.items():
            if wanted is None or request_id in wanted:
                request.aborted.set()
        await trio.lowlevel.checkpoint()

    async def update_weights_from_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Take the version of WEIGHT_VERSION_FILE in the directory, else the old one plus 1. The directory must exist."""
        path = Path(checkpoint_path)
        self.calls.append(Call(self.name, "update_weights_from_checkpoint", {"checkpoint_path": path}))
        await self._spend_update()
        if not path.is_dir():
            raise EngineError(f"{self.name} cannot load weights: {path} is not a directory. Pass a directory that the backend exported.")
        version_file = path / WEIGHT_VERSION_FILE
        self.weight_version = json.loads(version_file.read_text())["weight_version"] if version_file.exists() else self.weight_version + 1
        self.checkpoint_path = path
        return {"success": True, "weight_version": self.weight_version}

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Keep the weights for a test to inspect, and take the version."""
        self.calls.append(Call(self.name, "update_weights", {"names": tuple(weights), "weight_version": weight_version}))
        await self._spend_update()
        self.weights, self.weight_version = dict(weights), weight_version
        return {"success": True, "weight_version": weight_version}

    async def get_weight_version(self) -> int:
        """Return the version with which the next token will be stamped."""
        await trio.lowlevel.checkpoint()
        self._check_alive()
        return self.weight_version

    async def _spend_update(self) -> None:
        self._check_alive()
        await trio.sleep(self._seconds_per_update)
        self._check_alive()
        if self._update_error is not None:
            raise self._update_error
