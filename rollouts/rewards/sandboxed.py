"""Reward code that nobody trusts, as a reward function: it runs in the processes of a sandbox.

    async with SandboxedReward("their_reward.py:reward").open_reward() as reward_fn: ...

or on the command line --reward.function their_reward.py:reward --reward.sandboxed True. The function is called with keywords: messages, a
list of dicts, and whatever of a sample's metadata its parameters name (ground_truth, ...). It returns a number, or the fields of an
EvaluateResult as a dict: {"score": 0.5, "reason": "...", "metrics": {"form": {"score": 1.0}},
"step_outputs": [{"step_index": 0, "base_reward": 1.0}]}.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.calls import RewardFn, UnopenedReward
from rollouts.rewards.results import EvaluateResult
from rollouts.samples import describe_sample, sample_messages
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.sandbox.reward_code import execute_user_reward_code, open_code_pool
from rollouts.types import Sample


@dataclass(frozen=True)
class SandboxedReward(UnopenedReward):
    """A function of a file, called in a sandbox (a calls.RewardSource). What it does wrong is a RewardError of its sample."""

    reference: str  # "path/to/file.py:name"
    num_workers: int = 2  # calls at the same time
    limits: SandboxLimits = field(default_factory=SandboxLimits)  # of one call
    confinement: Confinement | None = None  # None = the strongest that works here

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """The reward function, while its workers run. Their code is read now: the file may change or go afterwards.

        Raises: ConfigError if the file does not define the function; SandboxError if no sandbox works here.
        """
        path, _, name = self.reference.rpartition(":")
        if not path.endswith(".py"):
            raise ConfigError(f"{self.reference!r} does not name a function of a file: write 'path/to/file.py:name'")
        try:
            code = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        names, takes_all = read_parameters(code, name, path)
        async with open_code_pool(num_workers=self.num_workers, limits=self.limits, confinement=self.confinement) as pool:
            yield _SandboxedFunction(code, name, names, takes_all, pool)


@dataclass(frozen=True)
class _SandboxedFunction:
    """What SandboxedReward opens."""

    code: str
    name: str
    parameters: frozenset[str]
    takes_all: bool
    pool: SandboxPool
    has_own_deadline: bool = True  # limits of the pool

    @property
    def reward_name(self) -> str:
        return f"{self.name} (in a sandbox)"

    async def __call__(self, sample: Sample) -> EvaluateResult:
        messages = [message.to_dict() for message in sample_messages(sample)]
        arguments = {
            key: value for key, value in sample.metadata.items() if key != "messages" and (self.takes_all or key in self.parameters)
        }
        result = await execute_user_reward_code(self.code, messages, function=self.name, arguments=arguments, pool=self.pool)
        if not result.ok:
            return EvaluateResult.from_error(f"{self.name} gave no result for {describe_sample(sample)}: {result.error}")
        return parse_json_result(result.value, self.name)


def parse_json_result(value: Any, name: str) -> EvaluateResult:
    """A number or a dict of fields, as it comes out of a sandbox. Raises RewardError for anything else."""
    if isinstance(value, Mapping):
        return EvaluateResult.from_dict(cast("Mapping[str, Any]", value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardError(f"{name} returned {value!r:.200} ({type(value).__name__}), expected a number or the fields of an EvaluateResult")
    return EvaluateResult(value)


def read_parameters(code: str, name: str, path: str) -> tuple[frozenset[str], bool]:
    """The names of a function's parameters, and whether it has **kwargs, read off source text that is not executed.

    Raises: ConfigError if the text is no Python, or does not define the function at its top level.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is no Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    function = functions.get(name)
    if function is None:
        raise ConfigError(f"{path} defines no function {name!r} (found {', '.join(functions) or 'none'})")
    if isinstance(function, ast.AsyncFunctionDef):
        raise ConfigError(f"{name} of {path} is async: a function in a sandbox is a plain one")
    arguments = function.args
    names = frozenset(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    if "messages" not in names and arguments.kwarg is None:
        raise ConfigError(f"{name} of {path} has no parameter `messages` (found {sorted(names)}), which the conversation is given as")
    return names, arguments.kwarg is not None
