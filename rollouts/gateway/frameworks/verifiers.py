"""Environments of `verifiers` as agents: its taskset gives the prompts, its harness plays them, and its rewards judge.

    ENVIRONMENT = {"taskset": {"id": "gsm8k"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    play = create_verifiers_agent(ENVIRONMENT)                        # --agent.function my_env.py:play
    prompts = load_verifiers_prompts(ENVIRONMENT)

Needs `pip install 'rollouts-rl[verifiers]'`. The package runs under asyncio, in a thread of its own, which is there while runs are.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from rollouts.config import check_setting
from rollouts.config_files import is_number
from rollouts.errors import ConfigError, EpisodeError, make_safe, redact
from rollouts.gateway.agent_runs import AgentFunction, AgentTask
from rollouts.types import Prompt

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

T = TypeVar("T")

_END_S = 30.0  # for episodes and servers to end, once they are told to
_NOTICE_S = 1.0  # for the event loop of a start to notice that it is given up
_MAX_REASON_CHARS = 2000
_logger = logging.getLogger(__name__)


def load_verifiers_prompts(environment: str | Mapping[str, Any], num: int | None = None) -> list[Prompt]:
    """Load the tasks of an environment as prompts, for a DataBuffer or as rows of a file.

    Args:
        environment: see create_verifiers_agent.
        num: number of tasks from the first one on; None = all.

    Returns: prompts with the task's text, and its data in the metadata ("verifiers_task").
    Raises: ConfigError if the environment cannot be loaded, or has no end and `num` is None.
    """
    env = _load(environment)
    taskset = env.taskset
    if num is None and not taskset.bounded:
        raise ConfigError(f"the tasks of {env.config.env_id} have no end: give num, the number of tasks to load")
    prompts: list[Prompt] = []
    for task in taskset if num is None else taskset.take(num):
        data = task.data.model_dump(mode="json", exclude_none=True)
        content = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        prompts.append(Prompt(content=content, index=len(prompts), metadata={"verifiers_task": data}))
    return prompts


def create_verifiers_agent(environment: str | Mapping[str, Any], *, start_s: float | None = 300.0) -> AgentFunction:
    """Create the agent that plays the episodes of an environment of verifiers, for create_agent_generate_fn or --agent.function.

    An episode's sample has what the environment's one seat without a client of its own sampled, and the reward of its trace. Runs at the
    same time share the environment's servers.

    Args:
        environment: id of a taskset, or the `env` block of a configuration of verifiers as a mapping. Seats with a `client`, such as
            a judge's, use that.
        start_s: seconds for the start of its servers, before the first of the runs that share them; a start that takes longer is
            cancelled, and fails these runs (EpisodeError). None = no limit.

    Raises: ConfigError if the environment cannot be loaded, has other than one seat for the policy, or is to retry episodes itself.
    """
    env = _load(environment)
    seats = _find_seats(env.config)
    if len(seats) != 1:
        raise ConfigError(
            f"{env.config.env_id} has {len(seats)} seats without a client ({', '.join(seats) or 'none'}), expected one, which the policy "
            "plays: give the others a client"
        )
    retries = (env.config.retries, getattr(env.config, seats[0]).retries)
    if any(one.max_retries or one.rules for one in retries):
        raise ConfigError(
            f"{env.config.env_id} is to retry episodes, whose attempts would be one sample: leave retries out, and use on_error='retry' "
            "(--agent.on-error retry)"
        )
    good = start_s is None or (is_number(start_s) and start_s > 0)
    check_setting(good, "create_verifiers_agent(start_s=...)", start_s, "seconds above 0, or None for no limit")
    shared = _Shared(environment, start_s)

    async def play_verifiers(task: AgentTask) -> dict[str, Any]:
        """Play an episode. Returns its reward, and the parts of the reward as the reason."""
        if "verifiers_task" not in task.prompt.metadata:
            known = ", ".join(task.prompt.metadata) or "none"
            raise ConfigError(f"the prompt's metadata has no 'verifiers_task' (there are: {known}): make prompts by load_verifiers_prompts")
        if task.api_key not in task.openai_base_url:
            raise ConfigError("GatewayConfig.token is set, which verifiers would not send: leave it out")
        async with shared.open() as (portal, served):
            return await _call(portal, partial(_play, served, task))

    return play_verifiers


def _load(environment: str | Mapping[str, Any]) -> Any:
    """Return the environment of a configuration. Raises ConfigError."""
    vf = _import()
    given = {"taskset": {"id": environment}} if isinstance(environment, str) else dict(environment)
    try:
        return vf.load_environment(vf.resolve_env_config(given))
    except Exception as error:  # whatever a package of somebody raises when it is loaded
        raise ConfigError(f"the environment {given!r:.300} of verifiers cannot be loaded: {type(error).__name__}: {error}") from error


def _import() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"environments of verifiers need the package verifiers, 0.4 or newer ({error}): pip install 'rollouts-rl[verifiers]'"
        ) from error


def _find_seats(config: Any) -> list[str]:
    """Return the names of the seats that the policy plays."""
    vf = _import()
    return [name for name, value in config if isinstance(value, vf.AgentConfig) and value.client is None]


@dataclass
class _Shared:
    """Thread, event loop and servers of an environment, open while there are runs: verifiers has locks that belong to one loop."""

    environment: str | Mapping[str, Any]
    start_s: float | None
    lock: trio.Lock = field(default_factory=trio.Lock)
    num_runs: int = 0
    num_late: int = 0  # starts that were given up at their deadline
    stack: ExitStack = field(default_factory=ExitStack)
    opened: Any = None  # (portal into the loop, environment that is served in it)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[tuple[BlockingPortal, Any]]:
        """Open them for a run, or join those of other runs. Raises EpisodeError if they do not start in time."""
        num_late = self.num_late
        async with self.lock:
            if self.num_late > num_late:
                raise self._late()  # not once more for each of the runs that have waited for the same start
            if self.num_runs == 0:
                await self._start()
            self.num_runs += 1
        try:
            yield self.opened
        finally:
            with trio.CancelScope(shield=True):
                async with self.lock:
                    self.num_runs -= 1
                    if self.num_runs == 0:
                        self.opened = None
                        await _close(self.stack)

    async def _start(self) -> None:
        start = _Start(self.environment)
        with trio.move_on_after(math.inf if self.start_s is None else self.start_s) as scope:
            try:
                self.stack, *opened = await _run_in_thread(start.run)
            except trio.Cancelled:
                await _give_up(start)
                raise
            self.opened = tuple(opened)
        if scope.cancelled_caught:
            self.num_late += 1
            raise self._late()

    def _late(self) -> EpisodeError:
        return EpisodeError(
            f"the environment {self.environment!r:.300} of verifiers did not start within {self.start_s:g} s (start_s of "
            "create_verifiers_agent): look what its servers and its runtime wait for, or give it more time"
        )


class _Start:
    """Start of an environment in a thread of its own, which can be given up: what it has opened is then closed there."""

    def __init__(self, environment: str | Mapping[str, Any]) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._is_given_up = False
        self._portal: BlockingPortal | None = None
        self._stack: ExitStack | None = None

    def run(self) -> tuple[ExitStack, BlockingPortal, Any]:
        """Return what closes it, the portal into its loop, and the environment that is served there."""
        from anyio.from_thread import start_blocking_portal

        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            with self._lock:
                self._check()
                self._portal = portal
            env = portal.call(_load, self._environment)
            stack.enter_context(portal.wrap_async_context_manager(env.serving()))
            with self._lock:
                self._check()
                self._stack = stack.pop_all()
            return self._stack, portal, env

    def give_up(self) -> ExitStack | None:
        """Cancel the start, and wait until its loop knows: for ever, if code of the environment blocks the loop.

        Returns: what closes the environment, if it has started after all.
        """
        with self._lock:
            self._is_given_up = True
            if self._stack is None and self._portal is not None:
                with suppress(RuntimeError):  # the loop has ended
                    self._portal.start_task_soon(self._portal.stop, True)
            return self._stack

    def _check(self) -> None:
        if self._is_given_up:
            raise EpisodeError("the start was given up")


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread that may be left behind: it is none of those that all others share, of which there are 40."""
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


async def _give_up(start: _Start) -> None:
    """Cancel a start, whatever is cancelled; one whose code blocks its loop is left behind, and closed when that ends."""
    with trio.move_on_after(_NOTICE_S, shield=True) as late:
        stack = await _run_in_thread(start.give_up)
        if stack is not None:
            late.deadline = math.inf
            await _close(stack)
    if late.cancelled_caught:
        _logger.warning("the start of an environment of verifiers blocks its event loop and is left behind in its thread")


async def _close(stack: ExitStack) -> None:
    """Close an environment with its loop and thread, in time and whatever is cancelled, or leave them behind."""
    with trio.move_on_after(_END_S, shield=True) as late:
        await _run_in_thread(stack.close)
    if late.cancelled_caught:
        _logger.warning("an episode of verifiers did not end within %g s and is left behind in its thread", _END_S)


async def _call(portal: BlockingPortal, function: Any) -> Any:
    """Call an async function in the loop of a portal; cancellation cancels it there, and waits for its end."""
    has_ended, token = trio.Event(), trio.lowlevel.current_trio_token()

    async def run() -> Any:
        try:
            return await function()
        finally:
            token.run_sync_soon(has_ended.set)

    future = portal.start_task_soon(run)
    try:
        await has_ended.wait()
    except trio.Cancelled:
        future.cancel()
        with trio.move_on_after(_END_S, shield=True):
            await has_ended.wait()
        raise
    return await trio.to_thread.run_sync(future.result)


async def _play(env: Any, task: AgentTask) -> dict[str, Any]:
    """Play an episode, in the loop of verifiers. Raises EpisodeError if it failed."""
    vf, taskset = _import(), env.taskset
    task_type = type(taskset).task_type()
    played = task_type(task_type.data_type().model_validate(task.prompt.metadata["verifiers_task"]), env.config.taskset.task)
    client = vf.EvalClientConfig(base_url=task.openai_base_url, api_key_var="ROLLOUTS_NO_KEY")
    episode = await env.run_episode(played, vf.ModelContext(model="policy", client=client))
    traces = [trace for trace in episode.traces if getattr(trace.agent.config.client, "base_url", None) == task.openai_base_url]
    errors = [error for holder in (episode, *episode.traces) for error in holder.errors]
    if not episode.ok:
        last = errors[-1] if errors else None
        what = "it is not complete" if last is None else f"{last.type}: {last.message}"
        raise EpisodeError(f"the episode of {env.config.env_id} failed: {redact(make_safe(what))[:1000]}")
    if len(traces) != 1:
        raise EpisodeError(
            f"an episode of {env.config.env_id} has {len(traces)} traces of the policy, expected one: a sample has one reward"
        )
    (trace,) = traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    parts = [f"{name} {value:g}" for name, value in {**rewards, **trace.metrics}.items() if value is not None]
    ended = [] if trace.stop_condition is None else [f"stopped by {trace.stop_condition}"]
    return {"reward": float(trace.reward), "reason": "; ".join([*parts, *ended])[:_MAX_REASON_CHARS]}
