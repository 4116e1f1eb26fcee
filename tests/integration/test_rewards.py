"""Calling rewards: sync and async, deadlines, and each policy for failures; a failure is never a number."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing
from samples import make_answers

from rollouts.config import RewardConfig
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards import evaluate
from rollouts.rewards.answers import compute_reward, create_overlong_penalty
from rollouts.rewards.evaluate import score_group
from rollouts.types import Group, Sample, Status

RAISE, DROP, RETRY = RewardConfig(), RewardConfig(on_error="drop"), RewardConfig(on_error="retry", max_retries=2)


def rewards(group: Group | None) -> list[float | None]:
    assert group is not None
    return [sample.reward for sample in group]


def reward_index(sample: Sample) -> float:
    return float(sample.index)


async def reward_index_async(sample: Sample) -> float:
    await trio.sleep(0)
    return float(sample.index)


class RewardObject:
    async def __call__(self, sample: Sample) -> float:
        return await reward_index_async(sample)


FUNCTIONS = [
    reward_index,
    reward_index_async,
    lambda sample: reward_index_async(sample),
    functools.partial(lambda sample, plus: sample.index + plus, plus=0),
    functools.partial(reward_index_async),
    RewardObject(),
]  # fmt: skip


@pytest.mark.parametrize("reward_fn", FUNCTIONS, ids=["sync", "async", "lambda", "partial", "async partial", "object"])
@pytest.mark.parametrize("config", [None, RAISE, DROP, RETRY, RewardConfig(timeout_s=None)])
async def test_sync_and_async_functions_score_in_order(reward_fn, config):
    group = make_answers(*["4"] * 4)
    assert rewards(await score_group(group, reward_fn, config)) == [10.0, 11.0, 12.0, 13.0]
    assert rewards(group) == [None] * 4


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (False, 0.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array(2), 2.0),
     (torch.tensor(0.5), 0.5), (torch.tensor([3.0]), 3.0), (-1e300, -1e300)],
)  # fmt: skip
async def test_any_finite_number_is_a_reward(value, expected):
    (reward,) = rewards(await score_group((Sample(),), lambda sample: value))
    assert (reward, type(reward)) == (expected, float)


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, r"returned None \(NoneType\) for sample 10 \(group 3\): return a number"), ("1.0", "returned '1.0'"),
     ([1.0], "return a number"),
     (torch.zeros(2), "return a number"), (np.zeros(2), "return a number"), (10**400, "return a number"), (1j, "return a number"),
     (math.nan, "returned nan for sample 10 .*return a finite number"), (math.inf, "returned inf"),
     (torch.tensor(math.nan), "returned nan")],
)  # fmt: skip
async def test_anything_else_is_an_error_and_never_trained(value, message):
    with pytest.raises(RewardError, match=message):
        await score_group(make_answers(*["4"] * 4), lambda sample: value)


def broken(sample: Sample) -> float:
    if sample.index in (11, 12):
        raise KeyError(f"answer {sample.index}")
    return 1.0


async def broken_async(sample: Sample) -> float:
    await trio.sleep(0.1 if sample.index == 11 else 0)  # the later failure comes first
    return broken(sample)


@pytest.mark.parametrize("reward_fn", [broken, broken_async])
async def test_raise_names_the_first_sample_that_failed(reward_fn, autojump_clock):
    with pytest.raises(RewardError, match=r"reward function broken\w* raised KeyError for sample 11 \(group 3\): 'answer 11'") as caught:
        await score_group(make_answers(*["4"] * 4), reward_fn, RewardConfig(timeout_s=None))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("reward_fn", [broken, broken_async])
async def test_drop_loses_the_whole_group_and_says_why(reward_fn, caplog, autojump_clock):
    with caplog.at_level(logging.WARNING):
        assert await score_group(make_answers(*["4"] * 4), reward_fn, RewardConfig(timeout_s=None, on_error="drop")) is None
        assert rewards(await score_group(make_answers(*["4"] * 1), reward_fn, RewardConfig(timeout_s=None, on_error="drop"))) == [1.0]
    (record,) = caplog.records
    assert "group 3 is dropped: reward function broken" in record.getMessage()


@pytest.mark.parametrize(("num_failures", "num_retries"), [(0, 0), (1, 1), (2, 2), (2, 5), (3, 2), (1, 0)])
@pytest.mark.parametrize("is_async", [False, True])
async def test_retry_tries_again_and_then_raises(num_failures, num_retries, is_async):
    calls: dict[int, int] = dict.fromkeys(range(10, 14), 0)

    def flaky(sample: Sample) -> float:
        calls[sample.index] += 1
        if sample.index == 12 and calls[12] <= num_failures:
            raise ConnectionError("try again")
        return 1.0

    async def flaky_async(sample: Sample) -> float:
        return flaky(sample)

    config = RewardConfig(on_error="retry", max_retries=num_retries)
    score = functools.partial(score_group, make_answers(*["4"] * 4), flaky_async if is_async else flaky, config)
    if num_failures <= num_retries:
        assert rewards(await score()) == [1.0] * 4
        assert calls == {10: 1, 11: 1, 12: num_failures + 1, 13: 1}
    else:
        with pytest.raises(RewardError, match="sample 12"):
            await score()
        assert calls[12] == num_retries + 1


async def test_an_async_function_has_a_deadline(autojump_clock):
    async def hang(sample: Sample) -> float:
        await trio.sleep(60 if sample.index == 11 else 29)
        return 1.0

    with pytest.raises(
        RewardError, match=r"reward function \S*hang \(.*\) did not return within 30 s for sample 11 .*\(--reward.timeout-s\)"
    ):
        await score_group(make_answers(*["4"] * 4), hang)
    assert trio.current_time() == pytest.approx(30)
    assert rewards(await score_group(make_answers(*["4"] * 4), hang, RewardConfig(timeout_s=61))) == [1.0] * 4
    assert await score_group(make_answers(*["4"] * 4), hang, DROP) is None


async def test_a_deadline_of_the_functions_own_is_its_own_error():
    async def slow_service(sample: Sample) -> float:
        raise trio.TooSlowError("service")

    with pytest.raises(RewardError, match=r"raised TooSlowError .*: service"):
        await score_group((Sample(),), slow_service)


def use_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Makes the time that decides whether samples share a thread pass as the test says."""
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(monotonic=clock))


@pytest.mark.parametrize("hanging", [10, 12, 13])
async def test_a_sync_function_that_hangs_is_left_behind_and_only_its_sample_fails(
    hanging: int, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
):
    use_clock(monkeypatch, mock_clock.current_time)
    begun, release, calls = threading.Event(), threading.Event(), []

    def hang(sample: Sample) -> float:
        calls.append(sample.index)
        if sample.index == hanging:
            begun.set()
            release.wait(60)
        return 1.0

    async def pass_time() -> None:
        await trio.to_thread.run_sync(begun.wait, 60)
        mock_clock.jump(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_time)
        with pytest.raises(RewardError, match=rf"hang \(.*\) did not return within 0.2 s for sample {hanging} "):
            await score_group(make_answers(*["4"] * 4), hang, RewardConfig(timeout_s=0.2))
    assert not release.is_set()
    assert sorted(calls) == [10, 11, 12, 13]  # the others were scored, and once only
    release.set()
    deadline = time.monotonic() + 60
    while any("rollouts" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert time.monotonic() < deadline
    assert sorted(calls) == [10, 11, 12, 13]


async def test_the_event_loop_runs_while_a_sync_function_does():
    running, answered = threading.Event(), threading.Event()

    def wait_for_the_loop(sample: Sample) -> bool:
        running.set()
        return answered.wait(60)

    async def answer() -> None:
        while not running.is_set():
            await trio.sleep(0.001)
        answered.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        assert rewards(await score_group(make_answers(*["4"] * 2), wait_for_the_loop, RewardConfig(timeout_s=None))) == [1.0] * 2


async def test_slow_sync_functions_run_beside_each_other():
    all_others = threading.Barrier(15)

    def slow(sample: Sample) -> float:
        if sample.index == 10:
            time.sleep(2 * evaluate.QUICK_S)  # after which each of the others has a thread
        else:
            all_others.wait(60)
        return 1.0

    assert rewards(await score_group(make_answers(*["4"] * 16), slow, RewardConfig(timeout_s=None))) == [1.0] * 16


async def test_cheap_sync_functions_share_a_thread(monkeypatch: pytest.MonkeyPatch):
    use_clock(monkeypatch, lambda: 0.0)
    threads = set()
    await score_group(make_answers(*["4"] * 8), lambda sample: threads.add(threading.get_ident()) or 1.0)
    assert len(threads) == 1


@pytest.mark.parametrize("reward_fn", [reward_index, reward_index_async])
async def test_failed_and_aborted_samples_are_not_scored(reward_fn):
    group = tuple(Sample(index=k, status=status) for k, status in enumerate(Status))
    expected = {Status.FAILED: None, Status.ABORTED: None}
    scored = await score_group(group, reward_fn)
    assert rewards(scored) == [expected.get(status, float(k)) for k, status in enumerate(Status)]
    nothing = make_answers(*["4"] * 2, status=Status.FAILED)
    assert await score_group(nothing, broken) == nothing
    assert await score_group((), broken) == ()


async def test_cancelling_stops_the_scoring(autojump_clock):
    async def hang(sample: Sample) -> float:
        await trio.sleep_forever()
        return 1.0

    with trio.move_on_after(5) as scope:
        await score_group(make_answers(*["4"] * 4), hang)
    assert scope.cancelled_caught


@pytest.mark.parametrize(("metadata", "expected"), [({"correct": True}, 1.0), ({"correct": False}, 0.0), ({}, 0.0), ({"correct": 1}, 1.0)])
async def test_the_default_reward_reads_metadata(metadata, expected):
    assert compute_reward(Sample(metadata=metadata)) == expected
    assert rewards(await score_group(make_answers(*["4"] * 2, metadata=metadata), compute_reward)) == [expected] * 2


def make_long_sample(length: int) -> Sample:
    return Sample(tokens=(1,) * (length + 2), loss_mask=(0.0, 0.0, *(1.0,) * length), reward=1.0, status=Status.COMPLETED)


def test_an_overlong_answer_loses_up_to_the_factor():
    penalize = create_overlong_penalty(max_tokens=20, buffer=8, factor=0.5)
    assert [penalize(make_long_sample(n)) for n in (5, 12, 16, 20, 30)] == [1.0, 1.0, 0.75, 0.5, 0.5]
    with pytest.raises(RewardError, match=r"sample 0 .* has no reward"):
        penalize(replace(make_long_sample(5), reward=None))


@pytest.mark.parametrize("wrong", [{"buffer": 0}, {"buffer": 21}, {"factor": -1.0}, {"factor": float("nan")}])
def test_an_overlong_penalty_out_of_range_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        create_overlong_penalty(**{"max_tokens": 20, "buffer": 8, **wrong})
