"""Episodes of a user's program: it is started with a gateway's address, plays, and ends; what it sampled becomes a Sample.

    generate_fn = create_agent_generate_fn("python my_agent.py", engines, tokenizer, SamplingParams(max_tokens=64), reward)
    RolloutConfig(generate_fn=generate_fn, batch_size=8, n_samples_per_prompt=4)             # synchronous and asynchronous loops

The program finds in its environment OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which clients of these APIs
read by themselves, and on stdin one line of JSON:

    {"prompt": "37*12+5=" or [messages], "metadata": {...}, "index": 7, "sample": 0}

It may report a reward: the last line of its stdout is a number, or a JSON object with "reward" (and "reason", a text). A function is given
an AgentTask with the same values, runs in this process, and returns a number, such an object, or None. An `async def` runs under trio, a
plain `def` in a thread.
"""

from __future__ import annotations

import contextvars
import inspect
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import trio

from rollouts.agents.config import OnEpisodeError
from rollouts.checks import describe_function, is_async_function, is_finite_number, parse_json
from rollouts.config import RewardConfig, check_choice, check_count, check_positive, check_setting
from rollouts.config_files import is_number
from rollouts.data.samples import create_pending_group, describe_sample
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, EpisodeError, GenerationError, create_value_hider, locate_error, raise_single_errors, redact
from rollouts.gateway.cassettes.tapes import find_engines, open_tapes
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.processes import run_program, split_command
from rollouts.gateway.server import Gateway, serve_sessions
from rollouts.gateway.sessions import Session
from rollouts.generation.contract import is_finished, note_request
from rollouts.outcomes import EpisodeOutcome, Failure, RewardDetails, StopReason
from rollouts.rewards.evaluate import RewardFn, score_group
from rollouts.seeds import derive_seed
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status
from rollouts.user_code import CodeBlocked, finish, is_passed_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_BLOCK_S = 10.0  # seconds that an async function may block the event loop, in which its gateway answers, too
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """One run of an agent."""

    openai_base_url: str  # address for clients of OpenAI's APIs
    anthropic_base_url: str  # address for clients of Anthropic's
    api_key: str  # any text will do: the addresses name the session
    prompt: Prompt  # the task, and the data to judge it by
    sample: int  # number in its group, from 0

    def to_json(self) -> str:
        """Return the line that a program gets on stdin."""
        values = self.prompt.to_dict()
        return json.dumps({"prompt": values["content"], "metadata": values["metadata"], "index": self.prompt.index, "sample": self.sample})


AgentFunction: TypeAlias = Callable[[AgentTask], Any]
"""f(task) -> None, a reward, or {"reward": number, "reason": text}, or an awaitable of it."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Limits of a run of an agent, and the handling of its failures."""

    max_answers: int | None = None  # most answers of the model in a run; further requests are refused (403); None = no limit
    max_tokens: int | None = None  # most sampled tokens of a run, checked before each request; None = no limit
    timeout_s: float | None = 600.0  # seconds until a program is stopped; None = no limit
    max_programs: int = 64  # programs that run at once
    # a program that ends with another status than 0 or is stopped, a function that raises, a run that samples nothing or reports no reward
    # where there is no other: raise it, run again, or mark its sample FAILED and drop its group
    on_error: OnEpisodeError = "raise"
    max_retries: int = 2  # further runs with on_error "retry"; after the last one the failure is raised
    # reward of a run whose program failed or was stopped after it had sampled something: the model may be why. No reward function replaces
    # it. None = on_error decides
    failed_reward: float | None = None
    # whether a run that reports no reward has failed; None = unless create_agent_generate_fn has a reward function. False is for a function
    # elsewhere, such as RolloutConfig.reward_fn
    must_report: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # variables of programs, for instance os.environ; {} = no others
    directory: str | None = None  # working directory of programs; None = this process's

    def __post_init__(self) -> None:
        check_positive(self, "max_programs")
        check_count(self, "max_retries")
        for name in ("max_answers", "max_tokens"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        check_choice(self, "on_error", ("raise", "retry", "drop"))
        timeout = self.timeout_s
        good = timeout is None or (is_number(timeout) and timeout > 0)
        check_setting(good, "AgentConfig.timeout_s", timeout, "seconds above 0, or None for no limit")
        reward = self.failed_reward
        check_setting(reward is None or is_finite_number(reward), "AgentConfig.failed_reward", reward, "a finite number, or None")


class AgentFault(EpisodeError):
    """A program of an agent failed, was stopped at its deadline, sampled nothing, or reported no reward that can be used."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """End of a run."""

    reward: float | None = None  # None = none reported
    reason: str | None = None
    fault: str | None = None  # description of a failure
    was_stopped: bool = False  # at its deadline


def create_agent_generate_fn(
    program: str | Sequence[str] | AgentFunction,
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    reward_fn: RewardFn | None = None,
    *,
    config: AgentConfig | None = None,
    gateway: GatewayConfig | None = None,
    num_greedy: int = 0,
) -> AgentGenerateFn:
    """Create the generate function of a user's program, for RolloutConfig.generate_fn.

    Args:
        program: a command, whose text is split as a shell does; or a function of an AgentTask. See the module's docstring.
        engines: at least one, or () with gateway.cassette. The prompt with index i goes to engine i % len(engines).
        tokenizer: the engines' tokenizer.
        params: sampling of all answers, whatever programs ask for; max_tokens is the most of each answer.
        reward_fn: Sample -> reward of finished runs, also of those that report one, but not of those that have config.failed_reward; None =
            the program reports it, or, with must_report = False, RolloutConfig.reward_fn gives it.
        config: limits of a run; None = AgentConfig().
        gateway: chat template, parser of calls, limits of requests, and the seed of sampling, keyed by prompt, sample and the tokens before
            an answer; its params, sampling, begins_sessions and idle_s are set here, and its port is 0, as each group has a gateway.
        num_greedy: greedy runs in addition to the n of each call; the same as RolloutConfig.n_baseline_samples.

    Returns: async generate_fn(prompt, n, partial=()) -> Group.
    Raises: ConfigError if there is no engine, or no command, or the function does not take one task, or the gateway has a port; DataError
        for a cassette that cannot be used.
    """
    if callable(program):
        check_agent_function(program)
    config, gateway = config or AgentConfig(), gateway or GatewayConfig()
    advice = "0, any free one: each group of samples has a gateway of its own"
    check_setting(gateway.port == 0, "GatewayConfig.port", gateway.port, advice)
    must_report = reward_fn is None if config.must_report is None else config.must_report
    return AgentGenerateFn(
        program if callable(program) else split_command(program),
        tuple(engines),
        tokenizer,
        reward_fn,
        config=replace(config, must_report=must_report),
        gateway=replace(gateway, params=params, sampling="fixed", begins_sessions=False, idle_s=None),
        num_greedy=num_greedy,
    )


def check_agent_function(function: Callable[..., Any]) -> None:
    """Raise ConfigError if a function cannot be called with an AgentTask alone."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of an extension without a signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"the function {describe_function(function)} takes {signature}, expected one parameter, the task of the agent: write "
            "async def agent(task), or give the others defaults"
        ) from error


class AgentGenerateFn:
    """Generate function of a user's program. Made by create_agent_generate_fn."""

    gives_turns = False  # no states and rewards of single turns

    def __init__(
        self,
        program: tuple[str, ...] | AgentFunction,
        engines: tuple[InferenceEngine, ...],
        tokenizer: PreTrainedTokenizerBase,
        reward_fn: RewardFn | None,
        *,
        config: AgentConfig,
        gateway: GatewayConfig,
        num_greedy: int,
    ) -> None:
        self._program, self._engines, self._tokenizer, self._reward_fn = program, find_engines(engines, gateway), tokenizer, reward_fn
        self._tapes = open_tapes(gateway)
        self._config, self._gateway, self._num_greedy = config, gateway, num_greedy
        self._limiter = trio.CapacityLimiter(config.max_programs)
        self._hide = create_value_hider(config.environment)  # in what programs print: they may quote a key that another server refused
        self._counts: Counter[str] = Counter()

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """Return the group of a prompt; see generation/contract.py. Unfinished runs of `partial` are begun anew."""
        group = list(partial or create_pending_group(prompt, n, num_baseline=self._num_greedy))
        engine = self._engines[prompt.index % len(self._engines)]
        async with serve_sessions((engine,), self._tokenizer, self._gateway, self._tapes) as gateway:

            async def run(k: int) -> None:
                group[k] = await self._run(gateway, prompt, k, group[k])

            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    for k, sample in enumerate(group):
                        if sample.status in (Status.PENDING, Status.ABORTED):
                            nursery.start_soon(run, k)
        scored = tuple(group)
        if self._reward_fn is None or not is_finished(scored):
            return scored
        judged = await score_group(scored, self._reward_fn, RewardConfig())
        assert judged is not None, "a reward that fails is raised"
        return judged

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call: runs that failed and dropped their groups, and runs that ended well after failed ones."""
        names = ("num_episodes_failed_infrastructure", "num_episodes_retried", "num_agents_failed", "num_agents_stopped")
        taken = {name: self._counts[name] for name in names}
        self._counts.clear()
        return taken

    async def _run(self, gateway: Gateway, prompt: Prompt, k: int, pending: Sample) -> Sample:
        """Return the sample of one run, and of further ones if it failed and they are wished."""
        config = self._config
        blank = create_pending_group(prompt, k + 1)[k]
        pending = replace(blank, index=pending.index, group_index=pending.group_index, trainable=pending.trainable)
        for attempt in range(config.max_retries + 1):
            try:
                sample = await self._run_once(gateway, prompt, k, pending)
            except AgentFault as fault:
                if config.on_error == "raise" or (config.on_error == "retry" and attempt == config.max_retries):
                    raise
                _logger.warning("%s, run %d: %s", describe_sample(pending), attempt + 1, fault)
                if config.on_error == "retry":
                    continue
                self._counts["num_episodes_failed_infrastructure"] += 1
                outcome = EpisodeOutcome(stop_reason=StopReason.ERROR, failure=Failure.INFRASTRUCTURE, error=redact(str(fault)))
                return replace(pending, status=Status.FAILED, episode=outcome)
            self._counts["num_episodes_retried"] += attempt > 0
            return sample
        raise AssertionError("unreachable: the last run returns or raises")

    async def _run_once(self, gateway: Gateway, prompt: Prompt, k: int, pending: Sample) -> Sample:
        base, config = self._gateway.params, self._config
        session = gateway.open_session(
            seed=derive_seed(self._gateway.seed, prompt.index, k),
            params=base if pending.trainable else base.new(greedy=True, top_p=1.0, top_k=0, min_p=0.0),
            max_answers=config.max_answers,
            max_tokens=config.max_tokens,
            note_request=partial(contextvars.copy_context().run, note_request),  # the ids of the rollout, so that it can be aborted alone
            is_interruptible=True,
        )
        task = AgentTask(
            openai_base_url=gateway.url(session.key),
            anthropic_base_url=gateway.url(session.key, api="anthropic"),
            api_key=session.key if gateway.config.token is None else gateway.config.token,
            prompt=prompt,
            sample=k,
        )
        reports: list[_Report] = []
        async with self._limiter:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when_stopped, session, nursery.cancel_scope)
                    reports.append(await self._play(task))
                    nursery.cancel_scope.cancel()
        report = reports[0] if reports else _Report(fault="it was interrupted")
        reason = StopReason.ERROR if report.fault else StopReason.MAX_TURNS if session.is_spent else StopReason.AGENT
        samples = gateway.take_samples(session.key, pending=pending, stop_reason=reason)
        if session.is_interrupted:
            return pending
        if session.failure is not None:
            raise session.failure
        if session.fault is not None:
            what = f"the gateway failed at a request of the agent of {describe_sample(pending)}"
            raise AgentFault(f"{what}: {type(session.fault).__name__}: {session.fault}") from session.fault
        return self._finish(samples, report, pending, session.counts["num_refused"])

    def _finish(self, samples: Sequence[Sample], report: _Report, pending: Sample, num_refused: int) -> Sample:
        """Return the sample of a run with its reward. Raises AgentFault."""
        what = describe_sample(pending)
        if not samples and num_refused:
            raise AgentFault(
                f"the agent of {what} sampled nothing, since its requests were refused ({num_refused}): "
                f"{report.fault or 'it ended without an answer; the errors of its client have the reason'}"
            )
        if not samples:
            raise AgentFault(
                f"the agent of {what} sampled nothing: {report.fault or 'it ended without a request'}. It must send its requests to "
                "OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
            )
        (sample,) = samples
        outcome = sample.episode
        assert outcome is not None, "the sample of a session has an outcome"
        if report.fault is not None:
            if self._config.failed_reward is None:
                raise AgentFault(f"the agent of {what} failed: {report.fault}{self._advise()}")
            self._counts["num_agents_stopped" if report.was_stopped else "num_agents_failed"] += 1
            outcome = replace(outcome, failure=Failure.POLICY, error=redact(report.fault))
            reason = StopReason.MAX_TURNS if report.was_stopped else StopReason.AGENT
            outcome = replace(outcome, stop_reason=reason, environment_reward=self._config.failed_reward, has_final_reward=True)
            status = Status.TRUNCATED if report.was_stopped else Status.COMPLETED
            return replace(sample, reward=self._config.failed_reward, status=status, episode=outcome)
        if report.reward is None:
            return sample  # a reward function judges it
        details = None if report.reason is None else RewardDetails(reason=report.reason)
        return replace(sample, reward=report.reward, reward_details=details, episode=replace(outcome, environment_reward=report.reward))

    def _advise(self) -> str:
        """Return what a user can do about a run that ends training; "" where training goes on."""
        if self._config.on_error != "raise":
            return ""
        return (
            ". Mend the agent, let such runs count with a reward (failed_reward, --agent.failed-reward), run them again, or drop their "
            "groups (on_error, --agent.on-error retry or drop)"
        )

    async def _play(self, task: AgentTask) -> _Report:
        """Run the program or the function to its end."""
        program, config = self._program, self._config
        if callable(program):
            return await self._call(program, task)
        given = config.environment
        direct = ",".join(filter(None, (given.get("no_proxy") or given.get("NO_PROXY"), self._gateway.host)))
        environment = {
            **given,
            "no_proxy": direct,  # a proxy would look for the gateway on its own machine
            "NO_PROXY": direct,
            "OPENAI_BASE_URL": task.openai_base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url,
            "ANTHROPIC_API_KEY": task.api_key,
        }
        result = await run_program(
            program, f"{task.to_json()}\n".encode(), environment=environment, directory=config.directory, timeout_s=config.timeout_s
        )
        if result.status == 0:
            last = self._hide(result.last_line)
            return self._demand(_read_report(last), f"its last line is {last!r:.200}")
        end = self._hide(result.stderr).strip()[-1000:]
        if result.status is None:
            limit = f"{config.timeout_s:g} s (timeout_s, --agent.timeout-s)"
            return _Report(fault=f"it ran longer than {limit}; the end of its stderr: {end!r}", was_stopped=True)
        return _Report(fault=f"it ended with exit status {result.status}; the end of its stderr: {end!r}")

    def _demand(self, report: _Report, found: str) -> _Report:
        """Return a report, as a failure if it has no reward but must have one."""
        if not self._config.must_report or report.reward is not None or report.fault is not None:
            return report
        advice = "let it end with a number, or a JSON object with reward, or give a reward function"
        return _Report(fault=f"it reports no reward ({found}): {advice}")

    async def _call(self, function: AgentFunction, task: AgentTask) -> _Report:
        name, timeout_s = describe_function(function), self._config.timeout_s
        block_s = _MAX_BLOCK_S if timeout_s is None else min(timeout_s, _MAX_BLOCK_S)
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s):
            try:
                if is_async_function(function):
                    value = function(task)
                else:  # one of max_programs already
                    value = await trio.to_thread.run_sync(function, task, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
                if inspect.isawaitable(value):
                    value = await finish(value, block_s)
                return self._demand(_take_report(value, name), f"{name} returned None")
            except CodeBlocked as block:
                advice = "await there, or write it as a plain def, which runs in a thread"
                fault = f"{name} has blocked the event loop, in which its gateway answers, for {block_s:g} s at {block.place}: {advice}"
                return _Report(fault=fault, was_stopped=True)
            except GenerationError:
                raise
            except (Exception, SystemExit) as error:  # an error in the user's function
                if is_passed_on(error):
                    raise
                return _Report(fault=f"{name} raised {type(error).__name__} ({locate_error(error)}): {error}")
        return _Report(fault=f"{name} ran longer than {timeout_s:g} s (timeout_s, --agent.timeout-s)", was_stopped=True)


async def _cancel_when_stopped(session: Session, scope: trio.CancelScope) -> None:
    await session.has_stopped.wait()
    scope.cancel()


def _read_report(line: str) -> _Report:
    """Return the report in a program's last line; none if the line is neither a number nor an object with a reward."""
    try:
        value = parse_json(line)
    except ValueError:
        return _Report()
    if isinstance(value, dict) and "reward" not in value:
        return _Report()
    return _take_report(value, "the agent's last line") if isinstance(value, (int, float, dict)) else _Report()


def _take_report(value: Any, where: str) -> _Report:
    if value is None:
        return _Report()
    values = cast("dict[str, Any]", value) if isinstance(value, dict) else {"reward": value}
    reward, reason = values.get("reward"), values.get("reason")
    try:
        number = float(reward) if isinstance(reward, (bool, int, float)) else None
    except OverflowError:  # an integer of more than 308 digits
        return _Report(fault=f"{where} reports an integer that is above all numbers of 64 bits, expected a finite number")
    if number is None or not math.isfinite(number) or not (reason is None or isinstance(reason, str)):
        return _Report(fault=f"{where} reports {value!r:.200}, expected a finite number, or an object with reward, and reason as a text")
    return _Report(reward=number, reason=reason)
