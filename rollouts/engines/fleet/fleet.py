"""EngineFleet: many inference engines as one.

    async with VLLMEngine(url_a) as a, VLLMEngine(url_b) as b, EngineFleet([a, b]) as fleet:
        completion = await fleet.generate(prompt_tokens, SamplingParams(max_tokens=64))

Routing is in routing.py, the members and their queue in members.py, requests and their retries in requests.py, health in health.py,
weight updates in updates.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio
from torch import Tensor

from rollouts.checks import parse_json
from rollouts.engines.fleet.health import FleetHealth, FleetWeights, ask_version
from rollouts.engines.fleet.members import FleetConfig, Member, MemberState, MemberStatus, Roster
from rollouts.engines.fleet.requests import FleetRequests
from rollouts.engines.fleet.updates import FleetUpdates, Give
from rollouts.engines.protocol import (
    WEIGHT_VERSION_FILE,
    EngineFeature,
    InferenceEngine,
    get_engine_features,
    require_engine_feature,
)
from rollouts.engines.weights.checkpoint_check import read_fingerprint
from rollouts.errors import ConfigError, EngineError, raise_alike_errors, raise_single_errors
from rollouts.types import Completion, SamplingParams

_OF_MEMBERS = frozenset(
    {
        EngineFeature.SCORES,
        EngineFeature.GROUPS,
        EngineFeature.MEMORY_UPDATES,
        EngineFeature.ROUTED_EXPERTS,
        EngineFeature.KEPT_TOKENS,
        EngineFeature.SLEEP,
    }
)
"""Features that a fleet has if all of its members have them."""

_OF_FLEETS = frozenset({EngineFeature.METRICS, EngineFeature.MEMBER_CHECKS})


_EVERY_MEMBER = "Each engine of a fleet must declare it."


def warn(message: str) -> None:
    """Issue a warning."""
    warnings.warn(message, stacklevel=3)


class EngineFleet:
    """An InferenceEngine over several engines.

    - A request goes to one member: that of its group, unless it is far more loaded than the least loaded one. If all are full, the request
      waits in a queue.
    - A member that fails gets no more requests; its requests start anew at another. It is probed, given the weights, and used again.
    - Each token carries the weight version of the member that sampled it; versions within a sample do not decrease.
    - It scores tokens, generates groups and takes weights in memory if all of its members declare that feature; else ConfigError.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        config: FleetConfig | None = None,
        initial_weights: Path | None = None,
        say: Callable[[str], None] = warn,
        name: str = "the fleet",
    ) -> None:
        """
        Args:
            engines: at least one, in their own `async with` blocks, with the same weights. The caller remains their owner.
            initial_weights: directory of the engines' current weights, for members that lose them before the first update.
            say: called with a message when a member goes down, comes back, joins or leaves; default: a warning.
            name: name in messages.

        Raises: ConfigError if there is no engine, or one twice.
        """
        if not engines:
            raise ConfigError("there are no engines to make a fleet of (found 0): pass at least one")
        if len({id(engine) for engine in engines}) < len(engines):
            raise ConfigError(f"an engine is given twice among the {len(engines)} of {name}: each can be a member once")
        self.name = name
        self._config = config or FleetConfig()
        self._engines = tuple(engines)
        self._initial_weights = initial_weights
        self._say = say
        self._roster = Roster(name, self._config)
        self._health = FleetHealth(self._roster, self._config, say, FleetWeights(0))
        self._updates = FleetUpdates(self._roster, self._config, self._health)
        self._requests = FleetRequests(self._roster, self._config, self._health.note_failure)
        self._nursery: trio.Nursery | None = None
        self._exit_stack = AsyncExitStack()
        self._shared = _OF_MEMBERS.intersection(*(get_engine_features(engine) for engine in engines))

    @property
    def features(self) -> frozenset[EngineFeature]:
        """Features that all members have, as far as a fleet passes them on, and those of every fleet."""
        return self._shared | _OF_FLEETS

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(raise_single_errors())
            self._nursery = await stack.enter_async_context(trio.open_nursery())
            for engine in self._engines:
                self._roster.add(engine)
            await self._begin()
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._nursery is not None, "the fleet was not entered"
        self._requests.close()
        self._nursery.cancel_scope.cancel()
        await self._exit_stack.__aexit__(kind, error, traceback)

    async def _begin(self) -> None:
        """Ask the members for their weight versions; those that do not answer are down from the start.

        Raises: EngineError if none answers, or two have different weights.
        """
        found: dict[Member, int] = {}
        failures: dict[Member, EngineError] = {}

        async def ask(member: Member) -> None:
            try:
                found[member] = await ask_version(member, self._config)
            except EngineError as error:
                failures[member] = error

        members = list(self._roster.members.values())
        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask, member)
        if not found:
            causes = "; ".join(f"{member.name}: {error}" for member, error in failures.items())
            raise EngineError(f"no engine of {self.name} answers: {causes}")
        if len(set(found.values())) > 1:
            versions = ", ".join(f"{member.name}: {found[member]}" for member in members if member in found)
            raise EngineError(f"the engines of {self.name} have different weight versions ({versions}): give all of them the same weights")
        version = next(iter(found.values()))
        self._health.weights = await trio.to_thread.run_sync(_describe_directory, version, self._initial_weights)
        assert self._nursery is not None, "the fleet was not entered"
        for member in members:
            member.version = version
            if member in found:
                self._roster.set_state(member, MemberState.SERVING)
            else:
                self._health.take_down(member, str(failures[member]))
            self._nursery.start_soon(self._health.watch, member)

    # -- generation

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion, with a member that has free capacity.

        Raises: EngineRequestError as a member does; EngineError if max_retries members failed, none serves for patience_s, or the request
            waits too long.
        """
        self._requests.check_not_closed()
        request_id = self._requests.name_request(request_id)
        (completion,) = await self._requests.generate(tuple(prompt_tokens), params, 1, request_id)
        return completion

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        """Sample n completions of one prompt in one request of one member, aborted as one. Raises as generate."""
        self._requests.check_not_closed()
        require_engine_feature(self, EngineFeature.GROUPS, "EngineFleet.generate_group", instead=_EVERY_MEMBER)
        return await self._requests.generate(tuple(prompt_tokens), params, n, self._requests.name_request(request_id))

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending calls return with the tokens they have; None = all calls of this fleet."""
        await self._requests.abort(request_ids)

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Return log-probs of input_tokens[start_index:] by one member, under its weights. Raises as generate."""
        self._requests.check_not_closed()
        require_engine_feature(self, EngineFeature.SCORES, "EngineFleet.recompute_output_log_probs", instead=_EVERY_MEMBER)

        async def score(engine: InferenceEngine) -> tuple[float, ...]:
            scorer = require_engine_feature(engine, EngineFeature.SCORES, self.name)
            return await scorer.recompute_output_log_probs(input_tokens, start_index, temperature)

        return await self._requests.call(tuple(input_tokens), score)

    # -- weights

    async def update_weights_from_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Load a directory on every member, under the same path on each: all at once, or updates_at_once at a time.

        Returns: {"success": True, "weight_version", "num_engines", "update_s", "failed"}.
        Raises: EngineError as FleetUpdates.update.
        """
        self._requests.check_not_closed()
        path = Path(checkpoint_path)
        version = await trio.to_thread.run_sync(_read_version, path, self._health.weights.version + 1)
        weights = await trio.to_thread.run_sync(_describe_directory, version, path)
        return await self._updates.update(weights, lambda engine: engine.update_weights_from_checkpoint(path))

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Give the same weights to every member. They are kept for members that come back. Returns and raises as above."""
        self._requests.check_not_closed()
        require_engine_feature(self, EngineFeature.MEMORY_UPDATES, "EngineFleet.update_weights", instead=_EVERY_MEMBER)

        async def give(engine: InferenceEngine) -> Mapping[str, Any]:
            taker = require_engine_feature(engine, EngineFeature.MEMORY_UPDATES, self.name)
            return await taker.update_weights(weights, weight_version)

        return await self._updates.update(FleetWeights(weight_version, tensors=weights), give)

    async def update_weights_with(self, give: Give, weight_version: int) -> Mapping[str, Any]:
        """Update each member with `give`; a member that comes back cannot be given these weights.

        Returns and raises as above.
        """
        self._requests.check_not_closed()
        return await self._updates.update(FleetWeights(weight_version), give)

    async def get_weight_version(self) -> int:
        """Return the lowest version of all members that generate, each asked now: no token will be sampled with older weights.

        Raises: EngineError if none answers.
        """
        self._requests.check_not_closed()
        found: dict[Member, int] = {}

        async def ask(member: Member) -> None:
            try:
                version = await self._health.check(member)
                found[member] = min(version, member.version) if member.state is MemberState.UPDATING else version
            except EngineError as error:
                self._health.note_failure(member, error)

        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for member in self._roster.members.values():
                    if member.state in (MemberState.SERVING, MemberState.UPDATING):
                        nursery.start_soon(ask, member)
        if not found:
            raise EngineError(f"no engine of {self.name} serves: {self._roster.describe()}")
        return min(found.values())

    async def check_each(self, check: Callable[[InferenceEngine], Awaitable[None]]) -> None:
        """Run a check of the new weights on each member that serves, instead of on one of them.

        Raises: the EngineError of a member that failed the check, which is then down; with exclude_failed only if all did.
        """
        failures: dict[Member, EngineError] = {}

        async def run(member: Member) -> None:
            try:
                await check(member.engine)
            except EngineError as error:
                failures[member] = error
                self._health.take_down(member, f"it failed a check of its weights: {error}", needs_weights=True)

        members = self._roster.serving()
        with raise_single_errors():
            async with trio.open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(run, member)
        if failures and (len(failures) == len(members) or not self._config.exclude_failed):
            causes = "; ".join(f"{member.name}: {error}" for member, error in failures.items())
            raise EngineError(f"{len(failures)} of {len(members)} engines of {self.name} failed a check of their weights: {causes}")

    async def sleep(self) -> None:
        """Let every member that serves release the memory of its GPU. Raises: the EngineError of a member, with all awake again."""
        self._requests.check_not_closed()
        require_engine_feature(self, EngineFeature.SLEEP, "EngineFleet.sleep", instead=_EVERY_MEMBER)
        try:
            await _tell_each(self._roster.serving(), lambda engine: require_engine_feature(engine, EngineFeature.SLEEP, self.name).sleep())
        except EngineError:
            await self.wake_up()
            raise

    async def wake_up(self) -> None:
        """Undo sleep(), also for members that have gone down since. A member that does not wake up is down."""
        self._requests.check_not_closed()

        async def wake(engine: InferenceEngine) -> None:
            try:
                await require_engine_feature(engine, EngineFeature.SLEEP, self.name).wake_up()
            except EngineError as error:
                self._health.take_down(self._roster.find(engine), f"it did not wake up: {error}")

        await _tell_each(self._roster.members.values(), wake)

    # -- members

    @property
    def config(self) -> FleetConfig:
        """Limits of the fleet."""
        return self._config

    def status_of(self, engine: InferenceEngine) -> MemberStatus:
        """Return the state of an engine's member. Raises ConfigError if it is not a member."""
        return self._roster.find(engine).status

    @property
    def members(self) -> tuple[MemberStatus, ...]:
        """The state of each member."""
        return tuple(member.status for member in self._roster.members.values())

    @property
    def engines(self) -> tuple[InferenceEngine, ...]:
        """The engine of each member."""
        return tuple(member.engine for member in self._roster.members.values())

    async def wait_change(self) -> None:
        """Wait until the state of a member changes."""
        await self._roster.wait_change()

    async def add(self, engine: InferenceEngine) -> None:
        """Add an engine: it is given the weights, generates a token with them, and then gets requests.

        Raises: ConfigError if it lacks a feature of the others; EngineError if a step fails, and then it is not a member.
        """
        self._requests.check_not_closed()
        assert self._nursery is not None, "use the fleet inside its `async with` block"
        lacking = sorted(self._shared - get_engine_features(engine))
        if lacking:
            raise ConfigError(
                f"{type(engine).__name__} cannot join {self.name}, whose engines all have the feature {' and '.join(lacking)}: make "
                "a fleet of its own for it"
            )
        if any(member.engine is engine for member in self._roster.members.values()):
            raise ConfigError(f"{getattr(engine, 'name', type(engine).__name__)} is a member of {self.name} already")
        member = self._roster.add(engine)
        has_joined = False
        try:
            with trio.CancelScope() as member.attempt:
                await self._health.join(member)
                has_joined = True
            if not has_joined:
                raise EngineError(f"{member.name} could not join {self.name}: a sync began while it was down. Add it again")
        finally:
            if not has_joined:
                self._roster.remove(member, "it could not join")
        self._nursery.start_soon(self._health.watch, member)
        self._say(f"{member.name} has joined {self.name} with weight version {member.version}")

    async def drain(self, engine: InferenceEngine, within_s: float = 0.0) -> None:
        """Let a member leave. It gets no more requests; requests not finished in time continue elsewhere with the tokens that they have.

        Raises: ConfigError if it is not a member.
        """
        member = self._roster.find(engine)
        self._roster.set_state(member, MemberState.DRAINING, "it is to leave")
        with trio.move_on_after(within_s):
            await member.wait_idle()
        calls = list(member.calls)
        for call in calls:
            call.is_moving = True
        await self._requests.tell_to_return(calls)
        self._roster.remove(member, "it was drained")
        self._say(f"{member.name} has left {self.name}")

    def remove(self, engine: InferenceEngine, reason: str) -> None:
        """Remove a member for good: its requests in flight start anew elsewhere.

        Args:
            reason: error message of requests if no member is left.

        Raises: ConfigError if it is not a member.
        """
        member = self._roster.find(engine)
        self._roster.remove(member, reason)
        self._say(f"{member.name} is gone, {len(self._roster.serving())} engines of {self.name} serve: {reason}")

    def report_down(self, engine: InferenceEngine, reason: str) -> None:
        """Report that a member does not answer, before the fleet finds out, for instance because its process has ended.

        Raises: ConfigError if it is not a member.
        """
        member = self._roster.find(engine)
        if member.state is not MemberState.DOWN:
            self._health.take_down(member, reason)

    def try_now(self, engine: InferenceEngine) -> None:
        """Probe a member that is down at once, for instance because its server was restarted.

        Raises: ConfigError if it is not a member.
        """
        member = self._roster.find(engine)
        member.num_failures = 1
        member.wake()

    def metrics(self) -> dict[str, float]:
        """Return the fleet's metrics; counts are since the start."""
        states = [member.state for member in self._roster.members.values()]
        return {
            "num_engines_up": float(sum(state in (MemberState.SERVING, MemberState.UPDATING) for state in states)),
            "num_engines_down": float(sum(state is MemberState.DOWN for state in states)),
            "num_engine_failures": float(self._health.num_failures),
            "num_requests_retried": float(self._requests.num_retried),
            "num_requests_moved": float(self._requests.num_moved),
        }


async def _tell_each(members: Iterable[Member], tell: Callable[[InferenceEngine], Awaitable[None]]) -> None:
    """Call a function with the engine of each member, at the same time."""
    with raise_alike_errors():
        async with trio.open_nursery() as nursery:
            for member in tuple(members):
                nursery.start_soon(tell, member.engine)


def _describe_directory(version: int, path: Path | None) -> FleetWeights:
    return FleetWeights(version) if path is None else FleetWeights(version, path, read_fingerprint(path))


def _read_version(path: Path, following: int) -> int:
    """Return the version stated in a directory, else `following`. Raises EngineError if its file cannot be read."""
    file = path / WEIGHT_VERSION_FILE
    if not file.exists():
        return following
    try:
        return int(parse_json(file.read_text())["weight_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f'{file} cannot be read as {{"weight_version": int}}: {error}. Export the weights again') from error
