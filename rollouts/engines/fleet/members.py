"""The members of a fleet: the state of each, and the queue of requests for a place at one."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import trio

from rollouts.engines.fleet.routing import Ask, Cost, FleetView, GroupOf, MemberLoad, choose_member, group_by_prompt
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, EngineError, EngineTimeout

MOST_HOMES = 8192  # groups whose member is remembered; the least recently requested one is dropped first


class MemberState(Enum):
    """State of a member in its fleet."""

    JOINING = "joining"  # being given the weights
    SERVING = "serving"
    UPDATING = "updating"  # being given new weights; requests in flight continue, no new ones are sent
    DRAINING = "draining"  # about to leave
    DOWN = "down"  # failed, and probed repeatedly
    GONE = "gone"


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Limits of a fleet; times in seconds."""

    max_requests: int = 1024  # samples in flight at each member; more wait in the queue
    max_tokens: int | None = None  # prompt and budget tokens in flight at each member; None = no limit
    affinity_slack: int = 32  # samples in flight that the member of a group may have beyond the least loaded one
    group_of: GroupOf = group_by_prompt
    max_waiting: int = 65536  # requests in the queue; one more is an error
    wait_s: float = 3600.0  # seconds that a request may wait in the queue
    patience_s: float = 60.0  # seconds that a request may wait while no member serves
    max_retries: int = 3  # retries of a request whose member failed: limited, since a request that ends servers must not end them all
    check_every_s: float = 15.0  # seconds between two probes of a member that serves
    check_s: float = 30.0  # seconds for a member to answer a probe, and to generate a token when it comes back
    ready_s: float = 300.0  # seconds until all members are ready for a transfer to all of them (FleetChannel); they drain first
    first_wait_s: float = 0.5  # seconds before a failed member is probed again; doubles with each failure in a row
    longest_wait_s: float = 60.0
    updates_at_once: int | None = None  # members that take new weights while the others generate; None = all at once
    drain_s: float = 0.0  # seconds that requests of a member may continue before its update; then the member pauses them itself
    exclude_failed: bool = False  # a member that fails an update is left out and the update succeeds; else an error
    abort_s: float = 10.0  # seconds for a member that leaves to return its requests' tokens
    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # option that sets a limit, by field, for messages

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_tokens", "max_waiting", "updates_at_once"):
            self._check(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in ("affinity_slack", "max_retries", "patience_s", "drain_s"):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("wait_s", "check_every_s", "check_s", "ready_s", "first_wait_s", "abort_s"):
            self._check(name, getattr(self, name) > 0, "more than 0 seconds")
        self._check("longest_wait_s", self.longest_wait_s >= self.first_wait_s, f"at least first_wait_s = {self.first_wait_s:g}")

    def _check(self, name: str, is_fine: bool, expected: str) -> None:
        if not is_fine:
            raise ConfigError(f"the fleet's {name} is {getattr(self, name)}, expected {expected}")

    def name(self, limit: str) -> str:
        """Return the name under which the user sets a limit, a field of this class: an option, or the field."""
        return self.options.get(limit, f"FleetConfig.{limit}")

    def wait_before_try(self, num_failures: int) -> float:
        """Return the seconds to wait before probing a member with `num_failures` failures in a row."""
        return min(self.longest_wait_s, self.first_wait_s * 2.0 ** min(num_failures - 1, 60))


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """Public state of a member."""

    number: int
    name: str
    state: MemberState
    since: float  # trio's time at which it entered this state
    version: int  # last confirmed version of its weights
    num_requests: int  # samples in flight
    num_tokens: int  # tokens of prompts and budgets of the requests in flight
    num_failures: int  # failures in a row
    reason: str  # reason for which it does not serve; empty if it serves
    is_returning: bool  # being asked, waiting for the weights of the fleet, or loading them


@dataclass(eq=False)
class Call:
    """One request in flight at a member."""

    member: Member
    cost: Cost
    request_id: str
    begun_version: int  # version that the member had confirmed when the call began
    versions: set[int]  # versions that its tokens may have: that one, and those that the member has confirmed since
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_moving: bool = False  # told to come back, to continue elsewhere


class Member:
    """One engine of a fleet."""

    def __init__(self, number: int, engine: InferenceEngine, config: FleetConfig) -> None:
        self.number = number
        self.engine = engine
        self.name = f"engine {number} ({getattr(engine, 'name', type(engine).__name__)})"
        self.state = MemberState.JOINING
        self.version = 0
        self.given_version: int | None = None  # version that it is being given, and may name before it has confirmed it; None = none
        self.reason = ""
        self.since = 0.0  # trio's time at which it entered its state
        self.num_failures = 0  # failures in a row
        self.needs_weights = False  # must be given weights, whatever version it reports
        self.returning = trio.Lock()  # held while it is asked, waits for the weights of the fleet, or loads them
        self.attempt = trio.CancelScope()  # scope of its newest attempt to come back
        self.calls: set[Call] = set()
        self.num_requests = self.num_tokens = 0  # reserved or in flight
        self.became_idle = trio.Event()
        self.woken = trio.Event()  # set on an event that its watcher must see
        self._returned = trio.Event()  # set when one of its calls returns
        self._given = trio.Event()  # set when the update in progress has been confirmed, has failed or was cancelled
        self._config = config

    @property
    def load(self) -> MemberLoad:
        """Load of the member, for routing."""
        return MemberLoad(
            is_serving=self.state is MemberState.SERVING,
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            max_requests=self._config.max_requests,
            max_tokens=self._config.max_tokens,
            version=self.version,
        )

    @property
    def status(self) -> MemberStatus:
        """Public state of the member."""
        return MemberStatus(
            number=self.number, name=self.name, state=self.state, since=self.since, version=self.version, num_requests=self.num_requests,
            num_tokens=self.num_tokens, num_failures=self.num_failures, reason=self.reason, is_returning=self.returning.locked(),
        )  # fmt: skip

    def is_in(self, *states: MemberState) -> bool:
        """Whether the member is in one of these states now; the state may change in every await."""
        return self.state in states

    @contextmanager
    def take_weights(self, version: int) -> Generator[None]:
        """Give the member weights in the block, with which it may answer from now on. Answers that name them wait for the block's end."""
        self.given_version, self._given = version, trio.Event()
        try:
            yield
        finally:
            self.given_version = None
            self._given.set()

    def note_confirmed(self, version: int) -> None:
        """Note that the member has confirmed weights: its calls may be answered with them."""
        for call in self.calls:
            call.versions.add(version)

    async def wait_given(self) -> None:
        """Wait until the update in progress is over."""
        await self._given.wait()

    def wake(self) -> None:
        """Wake the watcher at once."""
        self.woken.set()

    def interrupt(self) -> None:
        """Cancel its calls here; their requests go elsewhere."""
        for call in self.calls:
            call.scope.cancel()

    def note_returned(self) -> None:
        """Note that one of its calls has returned."""
        self._returned.set()
        self._returned = trio.Event()

    async def wait_returned(self) -> None:
        """Wait until the next of its calls returns."""
        await self._returned.wait()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        while self.num_requests:
            if self.became_idle.is_set():
                self.became_idle = trio.Event()
            await self.became_idle.wait()


@dataclass(eq=False)
class _Ticket:
    """A place in the queue."""

    ask: Ask
    member: Member | None = None  # member reserved for the request
    woken: trio.Event = field(default_factory=trio.Event)


class Roster:
    """All members, and the queue of requests. First come, first served: the first request in the queue gets the next place that is large
    enough for it."""

    def __init__(self, name: str, config: FleetConfig) -> None:
        self.name = name
        self.members: dict[int, Member] = {}
        self.gone: list[str] = []  # fates of former members, for messages
        self._config = config
        self._num_members = 0
        self._line: deque[_Ticket] = deque()
        self._homes: OrderedDict[Hashable, int] = OrderedDict()
        self._outage_since: float | None = None
        self._changed = trio.Event()  # set when the state of a member changes

    # -- members

    def add(self, engine: InferenceEngine) -> Member:
        """Add a new member, in state JOINING."""
        member = Member(self._num_members, engine, self._config)
        self._num_members += 1
        self.members[member.number] = member
        member.since = trio.current_time()
        self._note_outage()
        return member

    def remove(self, member: Member, reason: str) -> None:
        """Remove a member; its requests in flight are cancelled and go elsewhere."""
        if self.members.pop(member.number, None) is None:
            return
        self.gone.append(f"{member.name} left the fleet: {reason}")
        self.set_state(member, MemberState.GONE, reason)
        member.interrupt()

    def set_state(self, member: Member, state: MemberState, reason: str = "") -> None:
        """Change the state of a member, here only. Serves the queue if this freed capacity."""
        if member.state is MemberState.GONE:
            return
        member.state, member.reason, member.since = state, reason, trio.current_time()
        member.wake()
        self._changed.set()
        self._changed = trio.Event()
        self._note_outage()
        self.serve_line()

    def serving(self) -> list[Member]:
        """Members that get requests, by number."""
        return [member for member in self.members.values() if member.state is MemberState.SERVING]

    def find(self, engine: object) -> Member:
        """Return the member of an engine. Raises ConfigError if there is none."""
        for member in self.members.values():
            if member.engine is engine:
                return member
        raise ConfigError(f"{getattr(engine, 'name', type(engine).__name__)} is no member of {self.name}")

    def describe(self) -> str:
        """Return each member that does not serve, with the reason."""
        now = trio.current_time()
        lines = [
            f"{member.name} is {member.state.value} since {now - member.since:.0f} s{': ' + member.reason if member.reason else ''}"
            for member in self.members.values()
            if member.state is not MemberState.SERVING
        ]
        return "; ".join([*lines, *self.gone[-8:]]) or "it has no members"

    async def wait_serving(self, what: str, longest_s: float) -> None:
        """Wait until a member serves, or for longest_s.

        Args:
            what: consequence of the timeout, for the error.

        Raises: EngineTimeout after patience_s.
        """
        expires = trio.current_time() + longest_s
        while not self.serving() and trio.current_time() < expires:
            with trio.move_on_at(min(expires, self._get_patience_end())):
                await self._changed.wait()
            if not self.serving() and trio.current_time() >= self._get_patience_end():
                raise EngineTimeout(f"{what}: {self._describe_outage()}")

    async def wait_change(self) -> None:
        """Wait until the state of a member changes."""
        await self._changed.wait()

    # -- places

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._line)

    @property
    def is_out(self) -> bool:
        """Whether no member serves or will serve once its update is over."""
        return self._outage_since is not None

    async def take_place(self, ask: Ask, request_id: str, cancel_wait: Callable[[trio.CancelScope], None]) -> Call | None:
        """Reserve a place at a member until end_call; at once, without a checkpoint, if one is free.

        Args:
            cancel_wait: called with the scope of the wait; if that scope is cancelled, the result is None.

        Raises: EngineError if the queue is too long, EngineTimeout if the wait is.
        """
        ticket = _Ticket(ask)
        self._line.append(ticket)
        self.serve_line()
        if ticket.member is None:
            await self._wait_in_line(ticket, request_id, cancel_wait)
        if ticket.member is None:
            return None
        call = Call(ticket.member, ask.cost, request_id, ticket.member.version, {ticket.member.version})
        ticket.member.calls.add(call)
        if ticket.member.state is not MemberState.SERVING:  # it failed after the reservation
            call.scope.cancel()
        return call

    def end_call(self, call: Call) -> None:
        """Release the place of a call."""
        call.member.calls.discard(call)
        self._give_back(call.member, call.cost)

    def serve_line(self) -> None:
        """Give places to the first requests in the queue, as long as there are any."""
        while self._line:
            ticket = self._line[0]
            number = choose_member(self.get_view(), ticket.ask, slack=self._config.affinity_slack)
            if number is None:
                return
            self._line.popleft()
            member = ticket.member = self.members[number]
            member.num_requests += ticket.ask.cost.num_requests
            member.num_tokens += ticket.ask.cost.num_tokens
            self._remember(ticket.ask.group, number)
            ticket.woken.set()

    def forget_homes(self) -> None:
        """Forget the members of groups, as after an update of the weights: no member keeps keys and values of prompts."""
        self._homes.clear()

    def get_view(self) -> FleetView:
        """Return the state that routing depends on."""
        return FleetView({number: member.load for number, member in self.members.items()}, self._homes)

    async def _wait_in_line(self, ticket: _Ticket, request_id: str, cancel_wait: Callable[[trio.CancelScope], None]) -> None:
        if len(self._line) > self._config.max_waiting:
            self._line.remove(ticket)
            raise EngineError(
                f"{self.name} is full: {len(self._line)} requests wait in line before {request_id}: send fewer at a time, or raise "
                "max_waiting"
            )
        expires = trio.current_time() + self._config.wait_s
        is_taken = False
        scope = trio.CancelScope()
        cancel_wait(scope)
        try:
            with scope:
                while ticket.member is None:
                    with trio.move_on_at(min(expires, self._get_patience_end())):
                        await ticket.woken.wait()
                    if ticket.member is None:
                        ticket.woken = trio.Event()
                        self._check_wait(request_id, expires)
            is_taken = True
        finally:
            if ticket.member is None:
                self._line.remove(ticket)
                self.serve_line()  # it may have blocked others that fit
            elif not is_taken or scope.cancelled_caught:
                self._give_back(ticket.member, ticket.ask.cost)
                ticket.member = None

    def _check_wait(self, request_id: str, expires: float) -> None:
        """Raise EngineError if a request has waited too long."""
        now = trio.current_time()
        if now >= self._get_patience_end():
            raise EngineTimeout(self._describe_outage())
        if now >= expires:
            raise EngineTimeout(
                f"{self.name} had no place for {request_id} within {self._config.wait_s:g} s ({self._config.name('wait_s')}): "
                f"{len(self._line)} requests are in line, and {sum(member.num_requests for member in self.members.values())} samples in "
                "flight"
            )

    def _describe_outage(self) -> str:
        """Return why requests give up, with each member and its reason."""
        patience = f", for {self._config.patience_s:g} s ({self._config.name('patience_s')})" if self.members else ""
        return f"no engine of {self.name} serves{patience}: {self.describe()}"

    def _get_patience_end(self) -> float:
        """Return the time at which queued requests give up because no member serves."""
        if self._outage_since is None:
            return math.inf
        return self._outage_since + (self._config.patience_s if self.members else 0.0)

    def _note_outage(self) -> None:
        """Wake the queued requests if the last member went down or the first came back: their patience begins or ends."""
        hopeful = (MemberState.SERVING, MemberState.UPDATING)
        is_out = not any(member.state in hopeful for member in self.members.values())
        if is_out != self.is_out or (is_out and not self.members):
            if is_out != self.is_out:
                self._outage_since = trio.current_time() if is_out else None
            for ticket in self._line:
                ticket.woken.set()

    def _give_back(self, member: Member, cost: Cost) -> None:
        member.num_requests -= cost.num_requests
        member.num_tokens -= cost.num_tokens
        if member.num_requests == 0:
            member.became_idle.set()
        self.serve_line()

    def _remember(self, group: Hashable, number: int) -> None:
        if group is None:
            return
        self._homes[group] = number
        self._homes.move_to_end(group)
        if len(self._homes) > MOST_HOMES:
            self._homes.popitem(last=False)
