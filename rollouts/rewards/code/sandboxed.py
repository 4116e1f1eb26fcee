"""Untrusted reward code as a reward function: it runs in the processes of a sandbox.

    async with SandboxedReward("their_reward.py:reward").open_reward() as reward_fn: ...

or on the command line --reward.function their_reward.py:reward --reward.sandboxed. The function is a plain one, called with keywords:
messages, a list of dicts, and the sample's metadata that its parameters name (ground_truth, ...). Or it has @reward_function, for one
conversation or for a group, and is called as outside. The file can import the types and the decorator of this library. The function
returns a number, an EvaluateResult, or the fields of one as a dict: {"score": 0.5, "reason": "...",
"metrics": {"form": {"score": 1.0}}, "step_outputs": [{"step_index": 0, "base_reward": 1.0}]}.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rollouts.data.samples import collect_reward_data, describe_sample, sample_messages
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.evaluate import RewardFn, UnopenedReward
from rollouts.rewards.results import EvaluateResult, check_values
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.types import Sample

_CALL_REWARD = "rollouts.rewards.code.worker:call_reward"


@dataclass(frozen=True)
class SandboxedReward(UnopenedReward):
    """A function of a file, called in a sandbox (a evaluate.RewardSource). Its failures are RewardErrors of its samples."""

    reference: str  # "path/to/file.py:name"
    num_workers: int = 2  # calls at the same time
    limits: SandboxLimits = field(default_factory=SandboxLimits)  # limits of one call
    confinement: Confinement | None = None  # None = the strongest that works here

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """Start the workers and yield the reward function. The file is read now; it may change or go afterwards.

        Raises: ConfigError if the file does not define the function, or cannot be executed; SandboxError if no sandbox works here.
        """
        path, _, name = self.reference.rpartition(":")
        if not path.endswith(".py"):
            raise ConfigError(f"{self.reference!r} does not name a function of a file: write 'path/to/file.py:name'")
        try:
            code = Path(path).read_text(encoding="utf-8")
            ast.parse(code, path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{path} is not valid Python: {error}") from error
        pool = SandboxPool(_CALL_REWARD, num_workers=self.num_workers, limits=self.limits, confinement=self.confinement)
        async with pool:
            call = _SandboxedCall(code, path, name, pool)
            parameters, takes_all, is_batch = await call.describe()
            yield (_SandboxedGroupFunction if is_batch else _SandboxedFunction)(call, parameters, takes_all)


@dataclass(frozen=True)
class _SandboxedCall:
    """A call of the function in its sandbox."""

    code: str
    path: str
    name: str
    pool: SandboxPool

    async def describe(self) -> tuple[frozenset[str], bool, bool]:
        """Return the function's metadata names, whether it takes all metadata, and whether it scores groups, as its own code says.

        Raises: ConfigError if the file cannot be executed, has no such function, or has one that cannot be called from outside.
        """
        result = await self.pool.call({"code": self.code, "file": self.path, "function": self.name})
        if not result.ok:
            raise ConfigError(f"{self.path}:{self.name} cannot be loaded in a sandbox: {result.error}")
        try:
            names = frozenset(str(name) for name in result.value["parameters"])
            flags = [bool(result.value[key]) for key in ("takes_all", "is_batch", "is_async", "takes_messages")]
        except (TypeError, KeyError, LookupError) as error:
            raise ConfigError(f"{self.path} came in the way of the sandbox that it runs in: {result.value!r:.200}") from error
        takes_all, is_batch, is_async, takes_messages = flags
        if is_async:
            raise ConfigError(f"{self.name} of {self.path} is async: a function in a sandbox is a plain one")
        theirs = sorted({"completions", "solution_str"} & names)
        if theirs and "messages" not in names:
            raise ConfigError(
                f"{self.name} of {self.path} takes {theirs[0]}, as functions of TRL and verl do, which are not called in a sandbox: leave "
                "--reward.sandboxed out if you trust its code, or give it the parameter `messages`"
            )
        if not takes_messages:
            raise ConfigError(f"{self.name} of {self.path} has no parameter `messages` for the conversation (found {sorted(names)})")
        return names, takes_all, is_batch

    async def __call__(self, arguments: Mapping[str, Any], where: str) -> Any:
        """Return the function's value as JSON. Raises RewardError if there is none."""
        payload = {"code": self.code, "file": self.path, "function": self.name, "arguments": dict(arguments)}
        result = await self.pool.call(payload)
        if not result.ok:
            raise RewardError(f"{self.name} gave no result for {where}: {result.error}")
        return result.value


@dataclass(frozen=True)
class _SandboxedFunction:
    """Reward of SandboxedReward, for a function of one conversation."""

    call: _SandboxedCall
    parameters: frozenset[str]
    takes_all: bool
    has_own_deadline: bool = True  # the limits of the pool

    @property
    def reward_name(self) -> str:
        return f"{self.call.name} (in a sandbox)"

    def select(self, sample: Sample) -> dict[str, Any]:
        """Return the values that the function takes, see collect_reward_data."""
        return {
            key: value
            for key, value in collect_reward_data(sample).items()
            if key != "messages" and (self.takes_all or key in self.parameters)
        }

    async def __call__(self, sample: Sample) -> EvaluateResult:
        try:
            value = await self.call({**self.select(sample), "messages": _messages(sample)}, describe_sample(sample))
        except RewardError as error:
            return EvaluateResult.from_error(str(error))
        return parse_json_result(value, self.call.name)


@dataclass(frozen=True)
class _SandboxedGroupFunction(_SandboxedFunction):
    """Reward of SandboxedReward, for a function of a group's conversations: a calls.GroupReward."""

    async def __call__(self, sample: Sample) -> EvaluateResult:
        return (await self.score_samples((sample,)))[0]

    async def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """Return the result of each sample; a bad one is an error of its own sample."""
        selected = [self.select(sample) for sample in samples]
        columns = {name: [values.get(name) for values in selected] for values in selected for name in values}
        where = f"{len(samples)} samples, the first of which is {describe_sample(samples[0])}"
        try:
            values = await self.call({**columns, "messages": [_messages(sample) for sample in samples]}, where)
            return [self._parse(value) for value in check_values(values, len(samples), self.call.name)]
        except RewardError as error:
            return [EvaluateResult.from_error(str(error)) for _ in samples]

    def _parse(self, value: Any) -> EvaluateResult:
        try:
            return parse_json_result(value, self.call.name)
        except RewardError as error:
            return EvaluateResult.from_error(str(error))


def _messages(sample: Sample) -> list[dict[str, Any]]:
    return [message.to_dict() for message in sample_messages(sample)]


def parse_json_result(value: Any, name: str) -> EvaluateResult:
    """Convert a sandbox's number or dict of fields to an EvaluateResult. Raises RewardError for anything else."""
    if isinstance(value, Mapping):
        return EvaluateResult.from_dict(cast("Mapping[str, Any]", value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"{name} returned {value!r:.200} ({type(value).__name__}), expected a number or the fields of an EvaluateResult")
    return EvaluateResult(value)
