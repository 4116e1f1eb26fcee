"""Requests of a fleet: each is answered once, by one or more members.

A request whose member fails starts anew at another: servers answer in one piece, so tokens not yet returned are lost with a dead one. A
request whose member is told to return it, because the member leaves, continues elsewhere with the tokens that it has. Later answers of a
member to a request taken from it are ignored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import trio

from rollouts.engines.fleet.members import Call, FleetConfig, Member, MemberState, Roster
from rollouts.engines.fleet.routing import Ask, Cost
from rollouts.engines.http.requests import count_tokens_to_keep, params_of_rest
from rollouts.engines.http.samples import check_order
from rollouts.engines.protocol import EngineFeature, InferenceEngine, require_engine_feature
from rollouts.errors import EngineError, EngineProtocolError, EngineRequestError, EngineStatusError, raise_single_errors
from rollouts.types import Completion, KeptTokens, SamplingParams

T = TypeVar("T")

OWN_FAULTS = (400, 413, 422)
"""HTTP statuses of a wrong request: another server would answer the same."""

OnFailure = Callable[[Member, EngineError], None]
"""Called with a member that failed a request, and the error."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """Answer of a member."""

    value: T
    is_moving: bool  # told to come back; the answer itself says whether it is complete


@dataclass(eq=False)
class Pending:
    """A call by the fleet's user that has not returned."""

    request_id: str
    is_aborted: bool = False  # aborted by the user
    waits: set[trio.CancelScope] = field(default_factory=set[trio.CancelScope])  # scopes of its waits in the queue
    calls: set[Call] = field(default_factory=set[Call])
    returned: trio.Event = field(default_factory=trio.Event)


def is_own_fault(error: EngineError) -> bool:
    """Whether a request failed by its own fault, and would fail at any member."""
    return isinstance(error, EngineRequestError) or (isinstance(error, EngineStatusError) and error.status in OWN_FAULTS)


async def check_versions(call: Call, completions: Sequence[Completion]) -> None:
    """Refuse tokens of weights that the member has not confirmed, before the call or since, and versions that decrease.

    During an update a member is ahead of its fleet: tokens of the version that it is being given wait until it has confirmed that version,
    and are refused if the update fails or is cancelled. Versions may decrease if older weights were given meanwhile. A member whose answer
    is refused gets the weights of the fleet before it serves again.

    Raises: EngineProtocolError.
    """
    member = call.member
    found = {version for completion in completions for version in completion.output_versions}
    if member.given_version in found - call.versions:
        await member.wait_given()
    oldest = min(call.versions)
    try:
        for completion in completions:
            answer = f"{member.name} sampled tokens of {call.request_id}"
            check_order(answer, completion.output_versions, oldest, may_fall=oldest < call.begun_version)
        if unconfirmed := sorted(found - call.versions):
            raise EngineProtocolError(
                f"{member.name} sampled tokens of {call.request_id} with weight version {unconfirmed[-1]}, which it did not confirm "
                f"(confirmed: {', '.join(map(str, sorted(call.versions)))}): an update of it failed half-way, or another program updates "
                "it. The request starts anew elsewhere"
            )
    except EngineProtocolError:
        member.needs_weights = True
        raise


def can_join(first: Completion, rest: Completion) -> bool:
    """Whether the log-probs of two parts are of the same kind, so that the parts make one sample."""
    same = first.temperature == rest.temperature and first.truncated_sampling == rest.truncated_sampling
    same = same and first.log_prob_kind == rest.log_prob_kind
    same = same and (first.kept_tokens is None) == (rest.kept_tokens is None)
    return same and (first.untempered_log_probs is None) == (rest.untempered_log_probs is None)


def join_parts(first: Completion, rest: Completion) -> Completion:
    """Join two parts to one sample, the second generated from the tokens of the first; the finish reason is the second's.

    Args:
        first: part with the prompt of the sample.
        rest: part whose input is the first's input and output.
    """
    assert rest.input_tokens == first.input_tokens + first.output_tokens, f"{rest.request_id} is no continuation of {first.request_id}"
    assert can_join(first, rest), f"log-probs of {first.log_prob_kind} and {rest.log_prob_kind} do not make one sample"
    untempered = None
    if first.untempered_log_probs is not None and rest.untempered_log_probs is not None:
        untempered = first.untempered_log_probs + rest.untempered_log_probs
    experts = None if rest.output_len else first.routed_experts  # no pass has read the tokens of a part without any
    if first.routed_experts is not None and rest.routed_experts is not None:
        experts = first.routed_experts.fill(rest.routed_experts)
    kept = None
    if first.kept_tokens is not None and rest.kept_tokens is not None:
        kept = first.kept_tokens + rest.kept_tokens
    return replace(
        rest,
        request_id=first.request_id,
        input_tokens=first.input_tokens,
        output_tokens=first.output_tokens + rest.output_tokens,
        output_log_probs=first.output_log_probs + rest.output_log_probs,
        output_versions=first.output_versions + rest.output_versions,
        untempered_log_probs=untempered,
        routed_experts=experts,
        kept_tokens=kept,
    )


def keep_tokens(part: Completion, n: int) -> Completion:
    """Return the first n tokens of a part."""
    untempered = None if part.untempered_log_probs is None else part.untempered_log_probs[:n]
    return replace(
        part, output_tokens=part.output_tokens[:n], output_log_probs=part.output_log_probs[:n], output_versions=part.output_versions[:n],
        untempered_log_probs=untempered,
        routed_experts=None if part.routed_experts is None else part.routed_experts.take(part.input_len + n),
        kept_tokens=None if part.kept_tokens is None else part.kept_tokens.cut(0, n),
    )  # fmt: skip


def create_empty(request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> Completion:
    """Return the result of a request aborted before any member had begun it: no tokens."""
    return Completion(
        request_id=request_id, input_tokens=prompt, output_tokens=(), output_log_probs=(), output_versions=(), finish_reason="abort",
        temperature=params.temperature or 1.0, truncated_sampling=params.truncates,
        untempered_log_probs=() if params.untempered_log_probs else None, kept_tokens=KeptTokens() if params.kept_tokens else None,
    )  # fmt: skip


class FleetRequests:
    """Pending requests of one fleet."""

    def __init__(self, roster: Roster, config: FleetConfig, on_failure: OnFailure) -> None:
        self._roster = roster
        self._config = config
        self._on_failure = on_failure
        self._pending: dict[str, Pending] = {}
        self._others: set[Pending] = set()  # calls without an id
        self._num_requests = 0
        self._is_closed = False
        self.num_retried = 0  # retries after failures of members
        self.num_moved = 0  # requests continued at another member with the tokens they had

    @property
    def num_pending(self) -> int:
        """Number of calls that have not returned."""
        return len(self._pending)

    def name_request(self, request_id: str | None) -> str:
        """Return the given id, or a new one."""
        self._num_requests += 1
        return f"request-{self._num_requests - 1:012d}" if request_id is None else request_id

    async def generate(self, prompt: tuple[int, ...], params: SamplingParams, n: int, request_id: str) -> tuple[Completion, ...]:
        """Return n completions of one prompt: in one request of a member if n > 1.

        Raises: EngineRequestError; EngineError if too many members failed, or none serves.
        """
        assert request_id not in self._pending, f"request id {request_id!r} is already pending"
        pending = self._pending[request_id] = Pending(request_id)
        try:
            return await self._generate(pending, prompt, params, n)
        finally:
            del self._pending[request_id]
            pending.returned.set()

    async def call(self, tokens: tuple[int, ...], send: Callable[[InferenceEngine], Awaitable[T]]) -> T:
        """Send a request that any member can answer, such as scoring. Raises as generate."""
        ask = Ask(Cost(1, len(tokens)), group=self._config.group_of(tokens, ""))
        pending = Pending("a score")
        self._others.add(pending)
        try:
            answer = await self._ask(pending, ask, lambda call: send(call.member.engine))
        finally:
            self._others.remove(pending)
        assert answer is not None, "nobody can abort what has no id"
        return answer.value

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending calls return with their tokens; None = all. Returns when they have, or abort_s after their members were told."""
        wanted = list(self._pending) if request_ids is None else [i for i in request_ids if i in self._pending]
        aborted = [self._pending[request_id] for request_id in wanted]
        for pending in aborted:
            pending.is_aborted = True
            for scope in pending.waits:
                scope.cancel()
        await self.tell_to_return([call for pending in aborted for call in pending.calls])
        await trio.lowlevel.checkpoint()

    async def tell_to_return(self, calls: Sequence[Call]) -> None:
        """Abort calls at their members; calls whose member cannot be told, or that do not return within abort_s, are cancelled."""
        by_member: dict[Member, list[Call]] = {}
        for call in calls:
            by_member.setdefault(call.member, []).append(call)

        async def tell(member: Member, calls: Sequence[Call]) -> None:
            try:
                with trio.move_on_after(self._config.abort_s):
                    await member.engine.abort([call.request_id for call in calls])
                    while any(call in member.calls for call in calls):
                        await member.wait_returned()
            except EngineError as error:
                self._on_failure(member, error)
            for call in calls:
                call.scope.cancel()  # no effect if it has returned

        if not by_member:
            return
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for member, own in by_member.items():
                    nursery.start_soon(tell, member, own)

    def close(self) -> None:
        """Fail all pending calls."""
        self._is_closed = True
        for pending in (*self._pending.values(), *self._others):
            for scope in (*pending.waits, *(call.scope for call in pending.calls)):
                scope.cancel()

    def check_not_closed(self) -> None:
        """Raise EngineError after the end of the fleet's block."""
        if self._is_closed:
            raise EngineError(f"{self._roster.name} is closed: generate inside its `async with` block")

    # -- one request

    async def _generate(self, pending: Pending, prompt: tuple[int, ...], params: SamplingParams, n: int) -> tuple[Completion, ...]:
        group = self._config.group_of(prompt, pending.request_id)
        if n == 1:
            return (await self._generate_one(pending, prompt, params, 0, None, group),)

        async def send(call: Call) -> tuple[Completion, ...]:
            engine = require_engine_feature(call.member.engine, EngineFeature.GROUPS, self._roster.name)
            completions = await engine.generate_group(prompt, params, n, request_id=pending.request_id)
            await check_versions(call, completions)
            return completions

        answer = await self._ask(pending, Ask(Cost(n, len(prompt) + n * params.max_tokens), group), send)
        if answer is None:
            return (create_empty(pending.request_id, prompt, params),) * n
        parts = list(answer.value)
        if not answer.is_moving:
            return answer.value

        async def finish(sample: int) -> None:
            if parts[sample].finish_reason == "abort":
                parts[sample] = await self._generate_one(pending, prompt, params, sample, parts[sample], group)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for sample in range(n):
                    nursery.start_soon(finish, sample)
        return tuple(parts)

    async def _generate_one(
        self, pending: Pending, prompt: tuple[int, ...], params: SamplingParams, sample: int, part: Completion | None, group: Hashable
    ) -> Completion:
        """Generate one sample, continuing from the tokens of `part`; a part that cannot be continued is dropped."""
        request_id = pending.request_id if sample == 0 else f"{pending.request_id}-part-{sample}"
        while True:
            part = None if part is None else keep_tokens(part, count_tokens_to_keep(part.output_len, params.stop))
            if part is not None and part.output_len == 0:
                part = None
            if part is not None and part.output_len >= params.max_tokens:
                return replace(part, finish_reason="length")
            tokens = prompt if part is None else prompt + part.output_tokens
            rest = params if part is None else params_of_rest(params, sample, part.output_len)
            ask = Ask(Cost(1, len(tokens) + rest.max_tokens), group, min_version=None if part is None else part.output_versions[-1])

            async def send(
                call: Call, tokens: tuple[int, ...] = tokens, rest: SamplingParams = rest, part: Completion | None = part
            ) -> Completion | None:
                if part is not None and call.member.version < part.output_versions[-1]:  # no other member serves
                    return None
                completion = await call.member.engine.generate(tokens, rest, request_id=request_id)
                await check_versions(call, [completion])
                return completion

            answer = await self._ask(pending, ask, send, request_id)
            if answer is None:
                return create_empty(pending.request_id, prompt, params) if part is None else part
            if answer.value is None or (part is not None and not can_join(part, answer.value)):
                part = None  # part of newer weights than the member's, or log-probs of another kind: the sample starts anew
                continue
            part = answer.value if part is None else join_parts(part, answer.value)
            part = replace(part, request_id=pending.request_id)
            if part.finish_reason != "abort" or not answer.is_moving or pending.is_aborted:
                return part
            self.num_moved += 1

    async def _ask(
        self, pending: Pending, ask: Ask, send: Callable[[Call], Awaitable[T]], request_id: str | None = None
    ) -> Answer[T] | None:
        """Return the answer of the first member that gives one; None = the user aborted before.

        Raises: EngineRequestError and other errors of the request's own; EngineError if more than max_retries members failed.
        """
        failures: list[tuple[Member, EngineError]] = []
        while True:
            self.check_not_closed()
            call = None if pending.is_aborted else await self._roster.take_place(ask, pending.request_id, pending.waits.add)
            if call is None:
                self.check_not_closed()
                return None
            call.request_id = pending.request_id if request_id is None else request_id
            pending.calls.add(call)
            member, answers, failure = call.member, list[T](), None
            try:
                if not pending.is_aborted:
                    with call.scope:
                        answers.append(await send(call))
            except EngineError as error:
                if is_own_fault(error):
                    raise
                failure = error
            finally:
                pending.calls.discard(call)
                self._roster.end_call(call)
                member.note_returned()
            if answers:
                member.num_failures = 0 if member.state is MemberState.SERVING else member.num_failures
                return Answer(answers[0], call.is_moving)
            self.check_not_closed()
            if pending.is_aborted:
                return None
            if failure is not None:
                self._on_failure(member, failure)
            elif member.state in (MemberState.DOWN, MemberState.GONE):
                failure = EngineError(f"{member.name} is {member.state.value}: {member.reason}")
            if failure is not None:
                failures.append((member, failure))
                self._check_failures(pending.request_id, failures)
                self.num_retried += 1
            ask = replace(ask, avoided=ask.avoided | {member.number})

    def _check_failures(self, request_id: str, failures: Sequence[tuple[Member, EngineError]]) -> None:
        """Raise EngineError if a request has failed too often."""
        if len(failures) <= self._config.max_retries:
            return
        causes = "; ".join(f"{member.name}: {type(error).__name__}: {error}" for member, error in failures)
        raise EngineError(
            f"{self._roster.name}: {request_id} failed {len(failures)} times and is not tried again (max_retries is "
            f"{self._config.max_retries}): {causes}. Perhaps it is the request that ends its servers"
        ) from failures[-1][1]
