r"""Mathematical answers compared as mathematics: 1/2 equals \frac{1}{2} and 0.5, and {1,2} equals {2,1}.

    async with MathReward().open_reward() as reward_fn:
        config = RolloutConfig(reward_fn=reward_fn, ...)

or on the command line --reward.function rollouts.rewards.code.math_answers:math_reward.
Needs `pip install 'rollouts-rl[math]'`. The comparison is computer algebra on a text of the model: "$9^{9^{9^{9}}}$" would keep it busy
for ever, so it runs in the processes of a sandbox.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollouts.data.samples import describe_sample
from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import MetricResult
from rollouts.rewards.answers import ground_truth
from rollouts.rewards.evaluate import RewardFn, UnopenedReward
from rollouts.rewards.results import EvaluateResult
from rollouts.sandbox.confinement import Confinement
from rollouts.sandbox.limits import SandboxLimits
from rollouts.sandbox.pool import SandboxPool
from rollouts.types import Sample


@dataclass(frozen=True, kw_only=True)
class MathReward(UnopenedReward):
    """Reward 1 if a response's last answer equals metadata["ground_truth"] as mathematics, else 0 (a evaluate.RewardSource).

    An answer is the content of \\boxed{...}, $...$ and the like, or the last number or expression. The metric answer_found is 1 if there is
    one, and answer_compared is 1 if the comparison finished within the limits. An answer whose comparison did not is wrong: that is the
    model's doing, and no reason to end a run or drop a group. The same problem with a ground truth is a RewardError.
    """

    num_workers: int = 2  # comparisons at the same time; each takes some 10 ms
    limits: SandboxLimits = field(default_factory=lambda: SandboxLimits(wall_s=10.0, cpu_s=3.0))  # limits of one comparison
    confinement: Confinement | None = None  # None = the strongest that works here

    @asynccontextmanager
    async def open_reward(self) -> AsyncGenerator[RewardFn]:
        """Start the workers and yield the reward function.

        Raises: ConfigError if math-verify is not installed; SandboxError if no sandbox works here.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("mathematical answers need the package math-verify: pip install 'rollouts-rl[math]'")
        pool = SandboxPool(
            "rollouts.rewards.code.math_worker:compare",
            num_workers=self.num_workers,
            limits=self.limits,
            confinement=self.confinement,
            fresh_process=False,  # the library is trusted with state, though not with time: its caches are worth more than the fork
        )
        async with pool:
            yield _MathComparison(pool)


math_reward = MathReward()


@dataclass(frozen=True)
class _MathComparison:
    """Reward function that MathReward opens."""

    pool: SandboxPool
    reward_name: str = "MathReward"
    has_own_deadline: bool = True  # the limits of the pool

    async def __call__(self, sample: Sample) -> EvaluateResult:
        truth = str(ground_truth(sample))
        result = await self.pool.call({"truth": truth, "response": sample.response})
        if not result.ok:
            await self._check_truth(sample, truth)
            return EvaluateResult(
                0.0,
                reason=f"the answer could not be compared: {result.error}",
                metrics={"answer_found": MetricResult(1.0), "answer_compared": MetricResult(0.0, result.error)},
            )
        if result.value["truth"] is None:
            raise RewardError(f"no answer can be read in the ground truth of {describe_sample(sample)}: {truth!r:.200}")
        found = result.value["found"]
        return EvaluateResult(
            float(result.value["right"]),
            reason=f"found {found}, expected {result.value['truth']}" if found is not None else "no answer was found",
            metrics={"answer_found": MetricResult(float(found is not None)), "answer_compared": MetricResult(1.0)},
        )

    async def _check_truth(self, sample: Sample, truth: str) -> None:
        """Raise RewardError if the ground truth, and not the response, made the comparison fail."""
        result = await self.pool.call({"truth": truth, "response": "$1$"})
        if not result.ok:
            raise RewardError(f"the ground truth {truth!r:.200} of {describe_sample(sample)} cannot be compared with 1: {result.error}")
