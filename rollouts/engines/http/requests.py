"""Parts shared by the engines of SGLang and vLLM: requests in flight, and completions from several answers.

A generate() call may need more than one HTTP request: if a weight sync aborts it, the engine sends the prompt and the partial answer again
and returns one completion whose tokens carry the versions of both parts.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import TypeVar

import trio

from rollouts.engines.http.checks import classify_log_probs, temperature_of_log_probs
from rollouts.engines.http.samples import Generated, check_generated, check_order, version_of
from rollouts.errors import EngineError, EngineProtocolError, raise_single_errors
from rollouts.seeds import derive_seed
from rollouts.types import Completion, FinishReason, KeptTokens, LogProbKind, RoutedExperts, SamplingParams

T = TypeVar("T")

_IDLE_POLL_S = 0.02
_ABORT_REPEATS_S = (0.05, 0.2, 0.5, 1.0)  # seconds; an abort that overtakes its request on the way to the server is lost


@dataclass(frozen=True)
class WireRequest:
    """One HTTP request for n samples."""

    wire_id: str  # no other id, of this process or another, begins with it
    tokens: tuple[int, ...]  # the prompt, and the tokens generated before a sync aborted it
    params: SamplingParams  # with max_tokens and seed of this part
    n: int


Send = Callable[[WireRequest], Awaitable[Sequence[Generated]]]
"""f(request) -> its n results, in order. Raises EngineError."""

AbortOnServer = Callable[[Sequence[str]], Awaitable[None]]
"""f(wire ids): the server ends these requests with their tokens so far. Unknown ids are no error."""


# -- parts of a completion


@dataclass(frozen=True)
class _Part:
    """Tokens of one sample so far."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason = "abort"
    experts: RoutedExperts | None = None  # see Generated
    kept: KeptTokens | None = field(default_factory=KeptTokens)  # see Generated
    whole_log_probs: tuple[float, ...] = ()  # over all tokens, also where log_probs are over sets

    def then(self, other: _Part) -> _Part:
        """Return both parts joined, with the finish reason of the other."""
        experts = other.experts if self.experts is None else self.experts if other.experts is None else self.experts.fill(other.experts)
        kept = None if self.kept is None or other.kept is None else self.kept + other.kept
        whole = self.whole_log_probs + other.whole_log_probs
        tokens, log_probs, versions = self.tokens + other.tokens, self.log_probs + other.log_probs, self.versions + other.versions
        return _Part(tokens, log_probs, versions, other.finish_reason, experts, kept, whole)

    def keep(self, n: int) -> _Part:
        """Return the first n tokens."""
        experts = None if self.experts is None else self.experts.take(len(self.experts) - (len(self.tokens) - n))
        kept = None if self.kept is None else self.kept.cut(0, n)
        whole = self.whole_log_probs[:n]
        return _Part(self.tokens[:n], self.log_probs[:n], self.versions[:n], self.finish_reason, experts, kept, whole)


def count_tokens_to_keep(num_tokens: int, stop: Sequence[str]) -> int:
    """Return the number of tokens of an aborted part to send again.

    A server looks for stop strings only in tokens that it generates itself, so the last tokens of the part that may begin a stop string
    (each holds at least one byte) are generated again.
    """
    return max(0, num_tokens - max((len(text.encode()) - 1 for text in stop), default=0))


def params_of_rest(params: SamplingParams, sample: int, num_done: int) -> SamplingParams:
    """Return the parameters for the rest after num_done tokens, with another seed: the same one would repeat its random numbers."""
    seed = None if params.seed is None else derive_seed(params.seed, sample, num_done)
    return replace(params, max_tokens=params.max_tokens - num_done, seed=seed)


def create_completion(request_id: str, prompt: tuple[int, ...], params: SamplingParams, kind: LogProbKind, part: _Part) -> Completion:
    """Create the result of generate().

    Args:
        kind: kind of the server's log-probs.
    """
    return Completion(
        request_id=request_id,
        input_tokens=prompt,
        output_tokens=part.tokens,
        output_log_probs=part.log_probs,
        output_versions=part.versions,
        finish_reason=part.finish_reason,
        temperature=temperature_of_log_probs(kind, params),
        truncated_sampling=params.truncates,
        log_prob_kind=classify_log_probs(kind, params),
        untempered_log_probs=part.whole_log_probs if params.untempered_log_probs else None,
        routed_experts=None if part.experts is None else part.experts.take(len(prompt) + len(part.tokens)),
        kept_tokens=part.kept if params.kept_tokens and params.truncates else None,
    )


# -- requests in flight


@dataclass(eq=False)
class _Pending:
    """One generate() or generate_group() call that has not returned."""

    is_aborted: bool = False  # aborted by the user
    name: str = "a request"  # name for messages
    vocab_size: int | None = None  # bound on its answer's token ids
    waits: set[trio.CancelScope] = field(default_factory=set[trio.CancelScope])  # waits for the end of a sync
    calls: dict[str, trio.CancelScope] = field(default_factory=dict[str, trio.CancelScope])  # calls by wire id
    returned: trio.Event = field(default_factory=trio.Event)


class RequestsInFlight:
    """Pending requests of one engine: their ids, aborts, the gate that a weight sync closes, and the reason why none can be served."""

    def __init__(
        self, name: str, abort_on_server: AbortOnServer, *, initial_version: int = 0, resends: bool = False, abort_grace_s: float = 30.0
    ) -> None:
        """
        Args:
            name: name of the engine, for messages.
            initial_version: version of the weights that the server was started with.
            resends: whether requests that a sync aborted are sent again after it.
            abort_grace_s: seconds after which an aborted request without an answer is dropped, with its tokens.
        """
        self.name = name
        self.initial_version: int | None = initial_version  # None once other weights were confirmed
        self._confirmed_version = initial_version  # last version that the server was known to have
        self._given_versions: list[int] = []  # versions of all updates that were begun, in order
        self._abort_on_server = abort_on_server
        self._resends = resends
        self._abort_grace_s = abort_grace_s
        self._id = uuid.uuid4().hex
        self._num_wire_ids = 0
        self._num_requests = 0
        self._pending: dict[str, _Pending] = {}
        self._calls: set[_Pending] = set()
        self._holds = 0  # syncs and pauses that keep the gate closed now
        self._num_holds = 0  # holds so far
        self._gate = trio.Event()
        self._gate.set()
        self._is_closed = False
        self._unusable: str | None = None

    @property
    def num_pending(self) -> int:
        """Number of generate() and generate_group() calls that have not returned."""
        return len(self._pending)

    def name_request(self, request_id: str | None) -> str:
        """Return the given id, or a new one."""
        self._num_requests += 1
        return f"request-{self._num_requests - 1:012d}" if request_id is None else request_id

    def note_update(self, version: int) -> None:
        """Record an update that begins: from now on the server may answer with these weights."""
        self._given_versions.append(version)

    def note_confirmed(self, version: int) -> None:
        """Record the server's weights: later requests are answered with them, or with those of a later update."""
        self._confirmed_version = version

    async def run(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        n: int,
        send: Send,
        kind: LogProbKind,
        vocab_size: int | None = None,
    ) -> tuple[Completion, ...]:
        """Return n completions of one prompt, across aborting syncs, in order.

        Args:
            request_id: id for abort(); unique among pending requests.
            params: as check_request returned them.
            kind: kind of the server's log-probs.
            vocab_size: bound on the token ids of the answer; None = unknown.

        Raises: EngineError of `send`, or if the engine is closed or unusable; EngineProtocolError, with the names of server and request,
            for an answer that cannot be one to this request.
        """
        assert request_id not in self._pending, f"request id {request_id!r} is already pending"
        self._check_open()
        pending = self._pending[request_id] = _Pending(name=request_id, vocab_size=vocab_size)
        try:
            parts = await self._run_parts(pending, prompt, params, n, send)
        finally:
            del self._pending[request_id]
            pending.returned.set()
        # no full checkpoint: if many answers come at once, it would put the next request of each behind the parsing of all others
        await trio.lowlevel.checkpoint_if_cancelled()
        return tuple(create_completion(request_id, prompt, params, kind, part) for part in parts)

    async def call(self, send: Callable[[str], Awaitable[T]]) -> T:
        """Make another request that needs known weights, such as scoring.

        It waits at the gate, fails if the engine is closed or unusable, and is repeated if a sync began before its answer came.

        Args:
            send: f(wire id to use) -> the result.

        Raises: EngineError of `send`, or if the engine is closed or unusable.
        """
        self._check_open()
        pending = _Pending()
        self._calls.add(pending)
        try:
            while True:
                await self._wait_for_gate(pending)
                wire_id, num_holds, results = self._create_wire_id(), self._num_holds, list[T]()
                with trio.CancelScope() as scope:
                    pending.calls[wire_id] = scope
                    try:
                        with self._naming(pending):
                            results.append(await send(wire_id))
                    finally:
                        del pending.calls[wire_id]
                if not results:
                    self._check_open()
                    raise EngineError(f"{self.name} dropped a request")
                if self._num_holds == num_holds:  # else parts of the answer may be of different weights
                    return results[0]
        finally:
            self._calls.remove(pending)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending calls return their tokens so far; None = all of this engine. Returns once they have, at the latest after the grace.

        Raises: EngineError if the server cannot be told.
        """
        wanted = list(self._pending) if request_ids is None else [i for i in request_ids if i in self._pending]
        aborted = [self._pending[request_id] for request_id in wanted]
        for pending in aborted:
            pending.is_aborted = True
            for scope in pending.waits:
                scope.cancel()
            for scope in pending.calls.values():
                scope.deadline = min(scope.deadline, trio.current_time() + self._abort_grace_s)
        waits = chain(_ABORT_REPEATS_S, repeat(_ABORT_REPEATS_S[-1]))
        while wire_ids := [wire_id for pending in aborted for wire_id in pending.calls]:
            await self._abort_on_server(wire_ids)
            with trio.move_on_after(next(waits)):
                for pending in aborted:
                    await pending.returned.wait()
        await trio.lowlevel.checkpoint()

    @contextmanager
    def hold(self) -> Generator[None]:
        """Keep requests from being sent while the block runs; requests that the server aborts from now on continue afterwards."""
        self.close_gate()
        try:
            yield
        finally:
            self.open_gate()

    async def wait_idle(self) -> None:
        """Wait until the server has answered all requests of this engine, behind a closed gate."""
        while any(pending.calls for pending in (*self._pending.values(), *self._calls)):
            await trio.sleep(_IDLE_POLL_S)
        await trio.lowlevel.checkpoint()

    def close_gate(self) -> None:
        """Keep requests from being sent until open_gate was called the same number of times."""
        self._holds += 1
        self._num_holds += 1
        if self._gate.is_set():
            self._gate = trio.Event()

    def open_gate(self) -> None:
        """Undo one close_gate."""
        assert self._holds > 0, "the gate is open"
        self._holds -= 1
        if self._holds == 0:
            self._gate.set()

    def mark_unusable(self, reason: str) -> None:
        """Fail pending and new requests until mark_usable."""
        self._unusable = reason
        self._cancel_all()

    def mark_usable(self) -> None:
        """Accept requests again: the weights are known."""
        self._unusable = None

    def close(self) -> None:
        """Fail pending and new requests; the server drops requests that lose their connection."""
        self._is_closed = True
        self._cancel_all()

    def check_not_closed(self) -> None:
        """Raise EngineError after the end of the engine's block."""
        if self._is_closed:
            raise EngineError(f"{self.name} is closed: generate inside its `async with` block")

    def _cancel_all(self) -> None:
        for pending in (*self._pending.values(), *self._calls):
            for scope in (*pending.waits, *pending.calls.values()):
                scope.cancel()

    def _check_open(self) -> None:
        self.check_not_closed()
        if self._unusable is not None:
            raise EngineError(f"{self.name} cannot be used: {self._unusable}")

    async def _run_parts(self, pending: _Pending, prompt: tuple[int, ...], params: SamplingParams, n: int, send: Send) -> list[_Part]:
        parts, interrupted = await self._send(pending, prompt, params, n, send)
        if not interrupted:
            return parts

        async def finish(sample: int) -> None:
            part, again = parts[sample], True
            while again and part.finish_reason == "abort":
                part = part.keep(count_tokens_to_keep(len(part.tokens), params.stop))
                rest = params_of_rest(params, sample, len(part.tokens))
                (new,), again = await self._send(pending, prompt + part.tokens, rest, 1, send)
                part = part.then(new)
            parts[sample] = part

        if n == 1:
            await finish(0)
            return parts
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for sample in range(n):
                    nursery.start_soon(finish, sample)
        return parts

    async def _send(
        self, pending: _Pending, tokens: tuple[int, ...], params: SamplingParams, n: int, send: Send
    ) -> tuple[list[_Part], bool]:
        """Return the n results of one HTTP request, and whether they continue because a sync ended it."""
        nothing = [_Part()] * n
        await self._wait_for_gate(pending)
        if pending.is_aborted:
            return nothing, False
        num_holds, initial_version = self._num_holds, self.initial_version
        confirmed, num_given = self._confirmed_version, len(self._given_versions)
        request = WireRequest(self._create_wire_id(), tokens, params, n)
        results: Sequence[Generated] | None = None
        with trio.CancelScope() as scope:
            pending.calls[request.wire_id] = scope
            try:
                with self._naming(pending):
                    results = await send(request)
                    for result in results or ():
                        check_generated(result, params, pending.vocab_size)
            finally:
                del pending.calls[request.wire_id]
        self._check_open()
        if results is None:  # aborted, and the answer did not come
            return nothing, False
        assert len(results) == n, f"{len(results)} results for {n} samples"
        oldest = min([confirmed, *self._given_versions[num_given:]])
        parts = [self._create_part(result, initial_version, oldest, may_fall=oldest < confirmed) for result in results]
        return parts, self._resends and self._num_holds > num_holds and not pending.is_aborted

    @contextmanager
    def _naming(self, pending: _Pending) -> Generator[None]:
        """Add the names of server and request to an answer's error."""
        try:
            yield
        except EngineProtocolError as error:
            raise EngineProtocolError(f"{self.name} answered {pending.name} with what is no answer to it: {error}") from error

    async def _wait_for_gate(self, pending: _Pending) -> None:
        while not self._gate.is_set() and not pending.is_aborted and not self._is_closed:
            with trio.CancelScope() as scope:
                pending.waits.add(scope)
                try:
                    await self._gate.wait()
                finally:
                    pending.waits.remove(scope)
            if self._unusable is not None:
                break
        self._check_open()

    def _create_part(self, result: Generated, initial_version: int | None, oldest_version: int, *, may_fall: bool) -> _Part:
        by_label = {label: version_of(self.name, label, initial_version) for label in set(result.labels)}
        versions = tuple(by_label[label] for label in result.labels)
        check_order(f"{self.name} sampled tokens", versions, oldest_version, may_fall=may_fall)
        kept = KeptTokens() if not result.tokens else result.kept
        whole = result.log_probs if result.whole_log_probs is None else result.whole_log_probs
        return _Part(result.tokens, result.log_probs, versions, result.finish_reason, result.experts, kept, whole)

    def _create_wire_id(self) -> str:
        # equal lengths, so that no id is the beginning of another: SGLang aborts by prefix
        self._num_wire_ids += 1
        return f"{self._id}-{self._num_wire_ids:012d}"
