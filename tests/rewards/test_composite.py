"""Composite rewards: weights are checked, components are logged by name and failures name theirs."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from samples import make_answers

from rollouts.config import RewardConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import MetricResult, StepOutput
from rollouts.rewards.answers import exact_match
from rollouts.rewards.composite import check_weights, create_composite_reward, weigh_metrics
from rollouts.rewards.evaluate import GroupReward, RewardSource, score_group, score_now
from rollouts.rewards.other_frameworks import adapt_reward
from rollouts.rewards.results import EvaluateResult
from rollouts.rewards.reward_functions import reward_function
from rollouts.training.summaries import summarize_rewards
from rollouts.types import Sample

NO_DEADLINE = RewardConfig(timeout_s=None)
TRUTH = {"ground_truth": "4"}


def length(sample: Sample) -> float:
    return float(len(sample.response))


async def length_async(sample: Sample) -> float:
    await trio.sleep(0)
    return float(len(sample.response))


@reward_function(mode="batch")
def longest(conversations: list[Any]) -> list[float]:
    lengths = [len(messages[-1].content) for messages in conversations]
    return [float(n == max(lengths)) for n in lengths]


async def test_a_composite_is_the_weighted_sum_and_logs_each_part():
    composite = create_composite_reward({"right": (exact_match, 0.75), "length": (length, 0.25)})
    group = score_now(make_answers("4", "444", metadata=TRUTH), composite)
    assert [sample.reward for sample in group] == [1.0, 0.75]
    assert summarize_rewards(group) == {"reward/right": 0.5, "reward/length": 2.0}
    assert group == await score_group(make_answers("4", "444", metadata=TRUTH), composite, NO_DEADLINE)
    assert not isinstance(composite, GroupReward)


@pytest.mark.parametrize("other", [length_async, longest])
async def test_parts_may_be_async_or_of_the_whole_group(other):
    composite = create_composite_reward({"right": (exact_match, 0.5), "other": (other, 0.5)})
    assert isinstance(composite, GroupReward)
    group = await score_group(make_answers("4", "444", metadata=TRUTH), composite, NO_DEADLINE)
    assert group is not None
    assert [sample.reward for sample in group] == ([1.0, 1.5] if other is length_async else [0.5, 0.5])
    assert (await composite(make_answers("4", metadata=TRUTH)[0])).score == 1.0


@pytest.mark.parametrize("further", [length, length_async, longest])
async def test_a_part_that_fails_fails_its_sample_only(further):
    def picky(sample: Sample) -> float:
        if sample.response == "bad":
            raise ValueError("no number")
        return 1.0

    composite = create_composite_reward({"picky": (picky, 0.5), "further": (further, 0.5)})
    with pytest.raises(
        RewardError, match=r"^component picky: reward function .*picky raised ValueError for sample 11 [^:]*: no number \(\S+:\d+\)$"
    ):
        await score_group(make_answers("4", "bad", metadata=TRUTH), composite, NO_DEADLINE)
    group = await score_group(make_answers("4", "bad", "5", metadata=TRUTH), composite, RewardConfig(timeout_s=None, on_error="zero"))
    assert group is not None and [bool(sample.reward_details and sample.reward_details.error) for sample in group] == [False, True, False]
    nan = create_composite_reward({"nan": (lambda sample: math.nan, 0.5), "further": (further, 0.5)})
    with pytest.raises(
        RewardError, match=r"^component nan: reward function .*<lambda> \(\S+:\d+\) returned nan for [^:]*: return a finite number"
    ):
        await score_group(make_answers("4", metadata=TRUTH), nan, NO_DEADLINE)


async def test_composites_nest_and_keep_the_metrics_of_their_parts():
    inner = create_composite_reward({"right": (exact_match, 1.0)})
    outer = create_composite_reward({"inner": (inner, 2.0), "length": (length, -1.0)})
    (sample,) = score_now(make_answers("4", metadata=TRUTH), outer)
    assert sample.reward == 1.0
    assert list(sample.reward_details.metrics) == ["inner", "inner/right", "length"]


async def test_a_part_that_bounds_its_own_time_may_wait_for_it(autojump_clock):
    class Waits:
        has_own_deadline = True

        async def __call__(self, sample: Sample) -> float:
            await trio.sleep(60)
            return 1.0

    composite = create_composite_reward({"waits": (Waits(), 1.0)})
    for function in (Waits(), composite):
        scored = await score_group(make_answers("4", metadata=TRUTH), function, RewardConfig(timeout_s=30))
        assert scored is not None and scored[0].reward == 1.0


async def test_beside_a_part_that_bounds_its_own_time_the_others_keep_their_deadline(autojump_clock):
    class Waits:
        has_own_deadline = True

        async def __call__(self, sample: Sample) -> float:
            await trio.sleep(60)
            return 1.0

    async def hangs(sample: Sample) -> float:
        await trio.sleep(10**6 if sample.response == "bad" else 0)
        return 1.0

    inner = create_composite_reward({"waits": (Waits(), 0.5), "hangs": (hangs, 0.5)})
    for composite in (inner, create_composite_reward({"inner": (inner, 0.5), "length": (length_async, 0.5)})):
        scored = await score_group(make_answers("4", "bad", metadata=TRUTH), composite, RewardConfig(timeout_s=30, on_error="zero"))
        assert scored is not None and [sample.reward for sample in scored] == [1.0, 0.0]
        assert "did not return within 30 s" in scored[1].reward_details.error
    assert trio.current_time() < 1000


def test_step_outputs_are_weighted_and_added():
    def first(sample: Sample) -> EvaluateResult:
        return EvaluateResult(1.0, step_outputs=(StepOutput(0, 1.0, {"m": MetricResult(1.0)}, "a"), StepOutput(1, 2.0)))

    def second(sample: Sample) -> EvaluateResult:
        return EvaluateResult(0.0, step_outputs=(StepOutput(0, 3.0, reason="b"),))

    composite = create_composite_reward({"first": (first, 0.25), "second": (second, 0.5), "third": (length, 0.25)})
    result = composite(make_answers("4", metadata=TRUTH)[0])
    assert result.step_outputs == (
        StepOutput(0, 0.25 + 1.5, {"first/m": MetricResult(1.0)}, "first: a; second: b"),
        StepOutput(1, 0.5),
    )
    assert create_composite_reward({"third": (length, 1.0)})(make_answers("4", metadata=TRUTH)[0]).step_outputs is None


@pytest.mark.parametrize(("first", "second"), [(1.7e308, 1.7e308), (1e308, 1e308 * 1.5)])
async def test_a_sum_beyond_floats_fails_its_sample_only(first, second):
    def huge(sample: Sample) -> float:
        return first if sample.response == "huge" else 1.0

    def huge_steps(sample: Sample) -> EvaluateResult:
        return EvaluateResult(1.0, step_outputs=(StepOutput(0, second if sample.response == "huge" else 1.0),))

    async def async_huge(sample: Sample) -> float:
        return second if sample.response == "huge" else 1.0

    for parts in ((huge, async_huge), (huge_steps, length_async), (huge, huge)):
        composite = create_composite_reward({f"part{k}": (part, 10.0) for k, part in enumerate(parts)}, total=None)
        group = await score_group(make_answers("4", "huge", metadata=TRUTH), composite, RewardConfig(timeout_s=None, on_error="zero"))
        assert group is not None and [bool(sample.reward_details and sample.reward_details.error) for sample in group] == [False, True]
        assert "beyond the range of floats" in group[1].reward_details.error
    metrics = {"a": MetricResult(first), "b": MetricResult(second)}
    assert "beyond" in (weigh_metrics(metrics, {"a": 10.0, "b": 10.0}, total=None).error or "")


async def test_sources_among_the_parts_are_opened_and_closed():
    events: list[str] = []

    class Source:
        @asynccontextmanager
        async def open_reward(self):
            events.append("opened")
            yield length_async
            events.append("closed")

    composite = create_composite_reward({"right": (exact_match, 0.5), "source": (Source(), 0.5)})
    assert isinstance(composite, RewardSource)
    with pytest.raises(ConfigError, match="CompositeSource must be opened first"):
        await score_group(make_answers("4", metadata=TRUTH), composite, RewardConfig(timeout_s=None, on_error="zero"))
    with pytest.raises(ConfigError, match="must be opened first"):
        score_now(make_answers("4", metadata=TRUTH), composite)
    async with composite.open_reward() as reward_fn:
        assert events == ["opened"]
        group = await score_group(make_answers("4", "55", metadata=TRUTH), reward_fn, NO_DEADLINE)
        assert group is not None and [sample.reward for sample in group] == [1.0, 1.0]
    assert events == ["opened", "closed"]


BAD_WEIGHTS = [
    ({}, "no components"),
    ({"a": 0.5, "b": 0.6}, "add up to 1.1, expected 1"),
    ({"a": 1.0, "b": math.nan}, "the weight of 'b' is nan"),
    ({"a": math.inf}, "the weight of 'a' is inf"),
    ({"a": "1"}, "the weight of 'a' is '1'"),
    ({"a": True}, "the weight of 'a' is True"),
]


@pytest.mark.parametrize(("weights", "message"), BAD_WEIGHTS)
def test_weights_are_checked(weights, message):
    with pytest.raises(ConfigError, match=message):
        create_composite_reward({name: (length, weight) for name, weight in weights.items()})
    if "add up" in message:
        assert create_composite_reward({name: (length, weight) for name, weight in weights.items()}, total=None).weights == weights
        check_weights(weights, total=1.1)


def test_a_part_that_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="component 'a' is 'exact_match', expected a reward function"):
        create_composite_reward({"a": ("exact_match", 1.0)})


def test_metrics_of_one_function_are_weighed():
    metrics = {"right": MetricResult(1.0), "form": MetricResult(0.5), "length": MetricResult(120.0)}
    result = weigh_metrics(metrics, {"right": 0.8, "form": 0.2, "length": 0.0})
    assert result.score == pytest.approx(0.9) and result.metrics == metrics
    with pytest.raises(ConfigError, match=r"expected the same names"):
        weigh_metrics(metrics, {"right": 1.0})
    silent = {"judge": MetricResult(math.nan, "no answer", is_score_valid=False), "form": MetricResult(0.5)}
    assert weigh_metrics(silent, {"judge": 0.5, "form": 0.5}).error == "metrics without a valid score: judge: no answer"
    assert weigh_metrics(silent, {"judge": 0.0, "form": 1.0}).score == 0.5


numbers = st.floats(-100, 100)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_any_weights_give_their_weighted_sum_and_every_score(parts):
    def constant(value: float) -> Any:
        return lambda sample: value

    components = {f"c{k}": (constant(score), weight) for k, (score, weight) in enumerate(parts)}
    result = create_composite_reward(components, total=None)(make_answers("4", metadata=TRUTH)[0])
    assert result.score == pytest.approx(sum(score * weight for score, weight in parts), abs=1e-9)
    assert [metric.score for metric in result.metrics.values()] == [score for score, _ in parts]
    total = math.fsum(weight for _, weight in parts)
    check_weights({f"c{k}": weight for k, (_, weight) in enumerate(parts)}, total=total)
    with pytest.raises(ConfigError, match="add up to"):
        check_weights({f"c{k}": weight for k, (_, weight) in enumerate(parts)}, total=total + 0.001)


async def test_an_async_function_of_verl_may_be_a_part():
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    composite = create_composite_reward({"a": (adapt_reward(compute_score), 1.0)})
    (scored,) = await score_group(make_answers("4", metadata=TRUTH), composite, NO_DEADLINE)
    assert scored.reward == 1.0


def test_a_sync_part_that_abstains_is_left_out():
    def unsure(sample):
        return EvaluateResult(math.nan, is_score_valid=False, abstains=True)

    composite = create_composite_reward({"right": (exact_match, 0.5), "unsure": (unsure, 0.5)})
    assert score_now(make_answers("4", metadata=TRUTH), composite)[0].reward == 0.5
