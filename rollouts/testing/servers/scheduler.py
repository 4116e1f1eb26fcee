"""The engine of a fake server: sequences that wait for a slot, run one token at a time, are paused, retracted and aborted.

Each sequence is one task, in the nursery of its request. Cancelling the task frees its slot.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import trio

from rollouts.engines.inprocess.sampling import UniformStream
from rollouts.errors import RolloutsError, raise_single_errors
from rollouts.seeds import derive_seed
from rollouts.testing.servers.models import KV, Draw, FakeModel, LogProbKind, Sampling

Finish: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(eq=False)
class Sequence_:
    """One sample of one prompt while it is generated."""

    rid: str
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: str = ""  # only sequences of the same salt share keys and values
    max_cached: int | None = None  # maximum number of tokens that may use keys and values of other sequences
    draws: list[Draw] = field(default_factory=list[Draw])
    labels: list[str] = field(default_factory=list[str])  # the weight version at which each token was sampled
    finish: Finish | None = None
    matched: int | str | None = None  # the stop token or string
    num_cached: int = 0  # prompt tokens that were taken from the prefix cache
    num_retractions: int = 0
    aborted: bool = False
    was_queued: bool = False  # it was waiting for a slot when it was aborted
    kv: KV | None = None
    next_token_at: float = -math.inf
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the output so far."""
        return tuple(draw.chosen.token for draw in self.draws)

    def spans(self) -> list[dict[str, int | str]]:
        """Runs of tokens of the same weight version, half-open."""
        found: list[dict[str, int | str]] = []
        for i, label in enumerate(self.labels):
            if found and found[-1]["version"] == label:
                found[-1]["end"] = i + 1
            else:
                found.append({"version": label, "start": i, "end": i + 1})
        return found

    def wake(self) -> None:
        """Wake its task to check what has changed."""
        self.changed.set()
        self.changed = trio.Event()


class PrefixCache:
    """Keys and values of prompts and answers, looked up by longest common prefix in whole blocks."""

    def __init__(self, block_size: int, max_entries: int = 32) -> None:
        self.block_size = block_size
        self._max_entries = max_entries
        self._entries: list[tuple[str, tuple[int, ...], KV]] = []

    def take(self, salt: str, tokens: Sequence[int], limit: int) -> KV | None:
        """Return a copy of the longest usable prefix of at most `limit` tokens; the oldest of several."""
        best: tuple[int, KV] | None = None
        for entry_salt, entry_tokens, kv in self._entries:
            if entry_salt == salt:
                usable = min(_count_common(entry_tokens, tokens), limit, kv.length) // self.block_size * self.block_size
                if usable > 0 and (best is None or usable > best[0]):
                    best = usable, kv
        return None if best is None else best[1].fork(best[0])

    def put(self, salt: str, tokens: Sequence[int], kv: KV) -> None:
        """Keep a copy of the whole blocks, evicting the oldest entries first."""
        length = min(len(tokens), kv.length) // self.block_size * self.block_size
        if length > 0:
            self._entries.append((salt, tuple(tokens[:length]), kv.fork(length)))
            del self._entries[: -self._max_entries]

    def reset(self) -> None:
        """Drop all entries."""
        self._entries.clear()


@dataclass(frozen=True)
class SchedulerRules:
    """Capacity, pace and peculiarities of one server's scheduler.

    Args:
        max_running: maximum number of sequences that run at the same time; more wait.
        seconds_per_token: seconds between two tokens of a sequence, also before the first.
        log_prob_kind: distribution whose log-probs are reported.
        block_size: tokens in a block of the prefix cache.
        step_after_abort: whether a running sequence that is aborted gets one more token.
        shares_prompts: whether a prompt that is wholly in the prefix cache is taken from there once its first token is sampled.
        seed: seed of requests without their own.
    """

    max_running: int
    seconds_per_token: float
    log_prob_kind: LogProbKind
    block_size: int
    step_after_abort: bool
    shares_prompts: bool
    seed: int


class Scheduler:
    """Sequences and the operations on them. Independent of HTTP."""

    def __init__(
        self,
        model: FakeModel,
        rules: SchedulerRules,
        *,
        check_step: Callable[[Sequence_], None] = lambda sequence: None,
        find_stop: Callable[[Sequence_], str | None] = lambda sequence: None,
    ) -> None:
        """
        Args:
            check_step: called before each token; an exception from it ends the request.
            find_stop: returns the stop string that a sequence has reached.
        """
        self.label = "default"  # the weight version
        self.frozen = False  # no sequence gets a token
        self.admitting = True  # waiting sequences may start
        self.cache = PrefixCache(rules.block_size)
        self.running: list[Sequence_] = []
        self.waiting: list[Sequence_] = []
        self._model = model
        self._rules = rules
        self._check_step = check_step
        self._find_stop = find_stop
        self._num_sequences = 0
        self._most_tokens: int | None = None  # sequences with so many tokens are held
        self._idle = trio.Event()

    @property
    def sequences(self) -> Iterator[Sequence_]:
        """All sequences, running ones first."""
        return iter((*self.running, *self.waiting))

    async def run_all(self, sequences: Sequence[Sequence_]) -> None:
        """Generate several sequences at the same time. The first error ends all of them."""
        errors: list[RolloutsError] = []

        async def run_one(sequence: Sequence_) -> None:
            try:
                await self.run(sequence)
            except RolloutsError as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for sequence in sequences:
                nursery.start_soon(run_one, sequence)
        if errors:
            raise errors[0]

    async def run(self, sequence: Sequence_) -> None:
        """Generate until the sequence is finished."""
        self._num_sequences += 1
        seed = sequence.sampling.seed
        uniforms = UniformStream(derive_seed(self._rules.seed, self._num_sequences) if seed is None else derive_seed(seed))
        self.waiting.append(sequence)
        try:
            self.admit()
            while sequence.finish is None:
                if sequence.aborted and (sequence not in self.running or not self._rules.step_after_abort):
                    sequence.finish = "abort"
                    break
                is_held = self._most_tokens is not None and len(sequence.draws) >= self._most_tokens and not sequence.aborted
                if self.frozen or is_held or sequence not in self.running:
                    await sequence.changed.wait()
                    continue
                if sequence.kv is None:
                    self._prefill(sequence)
                if sequence.sampling.max_tokens == 0:
                    sequence.finish = "length"
                    break
                with trio.move_on_at(sequence.next_token_at):
                    await sequence.changed.wait()
                is_due = self._rules.step_after_abort if sequence.aborted else trio.current_time() >= sequence.next_token_at
                if is_due and not self.frozen and sequence in self.running and sequence.kv is not None:
                    self._step(sequence, uniforms)
        finally:
            self._remove(sequence)
            sequence.wake()

    def warm(self, sequence: Sequence_) -> None:
        """Put the prompt into the prefix cache before its samples run."""
        self._check_step(sequence)
        kv = self.cache.take(sequence.salt, sequence.prompt, len(sequence.prompt)) or self._model.create_kv()
        self._model.extend(sequence.prompt, kv)
        self.cache.put(sequence.salt, sequence.prompt, kv)

    def admit(self) -> None:
        """Start waiting sequences while slots are free."""
        while self.admitting and not self.frozen and self.waiting and len(self.running) < self._rules.max_running:
            sequence = self.waiting.pop(0)
            sequence.next_token_at = trio.current_time() + self._rules.seconds_per_token
            self.running.append(sequence)
            sequence.wake()

    def hold_tokens(self, count: int) -> None:
        """Hold sequences that have `count` tokens until release_tokens; an aborted one ends all the same."""
        self._most_tokens = count
        for sequence in self.sequences:
            sequence.wake()

    def release_tokens(self) -> None:
        """Undo hold_tokens."""
        self._most_tokens = None
        for sequence in self.sequences:
            sequence.wake()

    def freeze(self) -> None:
        """Generate no more tokens and start no sequences."""
        self.frozen = True

    def thaw(self) -> None:
        """Continue after freeze()."""
        self.frozen, self.admitting = False, True
        self.admit()
        for sequence in self.running:
            sequence.wake()

    def abort(self, sequences: Sequence[Sequence_]) -> None:
        """Make the sequences' tasks finish them. Waiting ones leave the queue at once."""
        for sequence in sequences:
            sequence.aborted = True
            if sequence in self.waiting:
                self.waiting.remove(sequence)
                sequence.was_queued = True
            sequence.wake()

    def retract(self) -> None:
        """Move the running sequences to the front of the queue, without keys and values."""
        for sequence in self.running:
            sequence.kv = None
            sequence.num_retractions += 1
        self.waiting[:0] = self.running
        self.running.clear()

    def drop_kv(self) -> None:
        """Make running sequences compute all their tokens again at their next step."""
        for sequence in self.running:
            sequence.kv = None

    async def wait_until_none_runs(self) -> None:
        """Wait until no sequence is running."""
        while self.running:
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    async def wait_until_idle(self) -> None:
        """Wait until no sequence is running or waiting."""
        while self.running or self.waiting:
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    def _prefill(self, sequence: Sequence_) -> None:
        """Compute all tokens but the last that are not yet in the KV or the prefix cache."""
        self._check_step(sequence)
        tokens = (*sequence.prompt, *sequence.tokens)
        limit = len(tokens) - 1 if sequence.max_cached is None else min(len(tokens) - 1, sequence.max_cached)
        kv = self.cache.take(sequence.salt, tokens, limit)
        if not sequence.draws:
            sequence.num_cached = 0 if kv is None else kv.length
        sequence.kv = self._model.create_kv() if kv is None else kv
        self._model.extend(tokens[:-1], sequence.kv)
        self.cache.put(sequence.salt, sequence.prompt, sequence.kv)

    def _step(self, sequence: Sequence_, uniforms: UniformStream) -> None:
        self._check_step(sequence)
        sampling, output, kv = sequence.sampling, sequence.tokens, sequence.kv
        assert kv is not None, f"{sequence.rid} has no keys and values"
        draw = self._model.draw(sequence.prompt, output, kv, sampling, uniforms[len(output)], self._rules.log_prob_kind)
        if not output and self._rules.shares_prompts:
            known = self.cache.take(sequence.salt, sequence.prompt, len(sequence.prompt))
            if known is not None and known.length == len(sequence.prompt):
                kv = sequence.kv = known
        sequence.draws.append(draw)
        sequence.labels.append(self.label)
        sequence.next_token_at = trio.current_time() + self._rules.seconds_per_token
        token, count = draw.chosen.token, len(sequence.draws)
        may_stop = count > sampling.min_tokens or sampling.min_tokens == 0
        if may_stop and token in sampling.stop_token_ids:
            sequence.finish, sequence.matched = "stop", token
        elif may_stop and not sampling.ignore_eos and token in self._model.eos_token_ids:
            sequence.finish = "stop"
        elif sampling.stop and (found := self._find_stop(sequence)) is not None:
            sequence.finish, sequence.matched = "stop", found
        elif sequence.aborted:
            sequence.finish = "abort"
        elif count >= sampling.max_tokens:
            sequence.finish = "length"
        if sequence.finish is not None:
            self.cache.put(sequence.salt, (*sequence.prompt, *sequence.tokens), kv)
        sequence.wake()

    def _remove(self, sequence: Sequence_) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.admit()
        self._idle.set()
        self._idle = trio.Event()


def _count_common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


async def run_streams(
    run: Callable[[Sequence[Sequence_]], Awaitable[None]],
    sequences: Sequence[Sequence_],
    stream_one: Callable[[int, Sequence_], Awaitable[None]],
) -> None:
    """Generate several sequences while each is streamed, with its index. The first error ends all of them."""
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, sequences)
            for index, sequence in enumerate(sequences):
                nursery.start_soon(stream_one, index, sequence)


async def follow(sequence: Sequence_) -> AsyncGenerator[tuple[Sequence_, bool]]:
    """Yield a running sequence token by token: (the sequence with that token only, whether it is the last).

    The last item has no token if the sequence was aborted after its last token was given.
    """
    count = 0
    while True:
        if count < len(sequence.draws):
            part = replace(sequence, draws=sequence.draws[count : count + 1])
            count += 1
        elif sequence.finish is not None:
            part = replace(sequence, draws=[])
        else:
            await sequence.changed.wait()
            continue
        is_last = sequence.finish is not None and count >= len(sequence.draws)
        yield part, is_last
        if is_last:
            return
