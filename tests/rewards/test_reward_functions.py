"""@reward_function: pointwise and batch, sync and async; what it is given, and what becomes of bad results."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from samples import make_answers

from rollouts.config import RewardConfig
from rollouts.data.samples import apply_sample_transforms, sample_messages, select_trainable, with_reward
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.outcomes import EpisodeOutcome, MetricResult, RewardDetails, StepOutput, StopReason
from rollouts.rewards.answers import gsm8k_reward
from rollouts.rewards.evaluate import GroupReward, judge_samples, score_group, score_now
from rollouts.rewards.other_frameworks import adapt_reward
from rollouts.rewards.results import EvaluateResult
from rollouts.rewards.reward_functions import load_reward, parse_messages, reward_function
from rollouts.training.summaries import summarize_rewards
from rollouts.types import Group, Message, Sample, Status, Turn

NO_DEADLINE = RewardConfig(timeout_s=None)
RETRY = RewardConfig(timeout_s=None, on_error="retry", max_retries=2)
ZERO = RewardConfig(timeout_s=None, on_error="zero")
DROP = RewardConfig(timeout_s=None, on_error="drop")


def find_error(sample: Sample) -> str | None:
    return None if sample.reward_details is None else sample.reward_details.error


def rewards(group: Group | None) -> list[float | None]:
    assert group is not None
    return [sample.reward for sample in group]


@reward_function
def is_right(messages: list[Message], ground_truth: str) -> EvaluateResult:
    """Compares."""
    right = messages[-1].content == ground_truth
    return EvaluateResult(float(right), metrics={"length": MetricResult(len(messages[-1].content or ""))}, reason="compared")


@reward_function
async def is_right_async(messages: list[Message], ground_truth: str) -> EvaluateResult:
    await trio.sleep(0)
    return EvaluateResult(float(messages[-1].content == ground_truth))


@reward_function(mode="batch")
def shortest_wins(conversations: list[list[Message]], ground_truth: list[str]) -> list[EvaluateResult]:
    assert len(ground_truth) == len(conversations)
    lengths = [len(messages[-1].content or "") for messages in conversations]
    return [EvaluateResult(float(n == min(lengths))) for n in lengths]


@reward_function(mode="batch")
async def shortest_wins_async(conversations: list[list[Message]], ground_truth: list[str]) -> list[float]:
    await trio.sleep(0)
    return [result.score for result in shortest_wins(conversations, ground_truth=ground_truth)]


@pytest.mark.parametrize("function", [is_right, is_right_async])
async def test_pointwise_functions_are_rewards_of_samples(function):
    group = make_answers("4", "5", metadata={"ground_truth": "4", "unused": 1})
    assert rewards(await score_group(group, function, NO_DEADLINE)) == [1.0, 0.0]
    direct = function([{"role": "assistant", "content": "4"}], ground_truth="4")
    assert (await direct if function is is_right_async else direct).score == 1.0
    assert not isinstance(function, GroupReward)


@pytest.mark.parametrize("function", [shortest_wins, shortest_wins_async])
async def test_batch_functions_see_the_whole_group(function):
    group = make_answers("444", "4", "55", metadata={"ground_truth": "4"})
    assert rewards(await score_group(group, function, NO_DEADLINE)) == [0.0, 1.0, 0.0]
    failed = replace(group[1], status=Status.FAILED)
    assert rewards(await score_group((group[0], failed, group[2]), function, NO_DEADLINE)) == [0.0, None, 1.0]
    assert isinstance(function, GroupReward)
    alone = function(group[0])
    assert (await alone if function is shortest_wins_async else alone).score == 1.0


def test_sync_functions_work_without_an_event_loop():
    group = make_answers("444", "4", metadata={"ground_truth": "4"})
    assert rewards(score_now(group, is_right)) == [0.0, 1.0] and rewards(score_now(group, shortest_wins)) == [0.0, 1.0]
    assert [sample.reward for sample in apply_sample_transforms(group, is_right)] == [0.0, 1.0]
    assert is_right.__name__ == "is_right" and is_right.__doc__ == "Compares."


def test_what_a_function_says_is_kept_and_summarized():
    group = score_now(make_answers("444", "4", metadata={"ground_truth": "4"}), is_right)
    assert group[0].reward_details == RewardDetails(metrics={"length": MetricResult(3)}, reason="compared")
    assert summarize_rewards(group) == {"reward/length": 2.0}
    again = with_reward(group[0], EvaluateResult(0.5))
    assert again.metadata == {"ground_truth": "4"} and again.reward_details is None and summarize_rewards([again]) == {}
    invalid = EvaluateResult(1.0, metrics={"judge": MetricResult(math.nan, is_score_valid=False)})
    assert summarize_rewards([with_reward(group[0], invalid), group[1]]) == {"reward/length": 1.0, "num_invalid/judge": 1.0}


def test_functions_get_the_metadata_that_they_name():
    @reward_function
    def all_of_it(messages, **kwargs):
        return float(sorted(kwargs) == ["answer", "unit"])

    @reward_function
    def with_default(messages, answer, *, unit="m", other=7):
        return float((answer, unit, other) == (1, "km", 7))

    (sample,) = make_answers("x", metadata={"answer": 1, "unit": "km", "messages": [{"role": "assistant", "content": "x"}]})
    assert all_of_it(sample).score == with_default(sample).score == 1.0
    with pytest.raises(RewardError, match=r"is_right \(.*:\d+\) needs \['ground_truth'\], but the metadata of sample 10 .* has \['answer'"):
        is_right(sample)

    @reward_function(mode="batch")
    def columns(conversations, **kwargs):
        assert kwargs == {"answer": [1, None], "other": [None, 2]}
        return [1, 2]

    mixed = (sample, replace(sample, metadata={"other": 2}))
    mixed = (replace(sample, metadata={"answer": 1}), mixed[1])
    assert rewards(score_now(mixed, columns)) == [1.0, 2.0]


BAD = [
    ("right", r"returned 'right' \(str\)"),
    (None, r"returned None \(NoneType\)"),
    (math.nan, "returned nan"),
    (math.inf, "returned inf"),
    ({"score": 1.0}, r"returned \{'score': 1.0\} \(dict\)"),
    (EvaluateResult(0.0, is_score_valid=False, reason="the judge is silent"), "gave no score .* the judge is silent"),
    (EvaluateResult.from_error("the judge is down"), "gave no score .* the judge is down"),
    (EvaluateResult(1.0, step_outputs=(StepOutput(7, 1.0),)), r"step_index 7 is unknown; there are \[0\]"),
    (EvaluateResult(1.0, step_outputs=(StepOutput("search", 1.0),)), "step_index 'search' is unknown"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[str(k) for k in range(len(BAD))])
@pytest.mark.parametrize("mode", ["pointwise", "batch"])
async def test_a_bad_result_fails_its_sample_by_policy_and_no_other(bad, message, mode, caplog):
    calls: list[int] = []

    @reward_function
    def one(messages, **kwargs):
        calls.append(1)
        return bad if messages[-1].content == "bad" else 0.25

    @reward_function(mode="batch")
    def several(conversations, **kwargs):
        return [one(messages) if messages[-1].content != "bad" else bad for messages in conversations]

    function: Any = one if mode == "pointwise" else several
    group = make_answers("a", "bad", "c")
    with pytest.raises(RewardError, match=message) as caught:
        await score_group(group, function, NO_DEADLINE)
    assert "sample 11" in str(caught.value) or "conversation 1" in str(caught.value)
    with pytest.raises(RewardError, match=message):
        await score_group(group, function, RETRY)
    assert await score_group(group, function, DROP) is None
    assert "group 3 is dropped" in caplog.text
    zeroed = await score_group(group, function, ZERO)
    assert rewards(zeroed) == [0.25, 0.0, 0.25] and zeroed is not None
    assert [find_error(sample) is not None for sample in zeroed] == [False, True, False]
    assert summarize_rewards(zeroed) == {"num_rewards_zeroed": 1.0}
    assert "the reward of a sample is set to 0: reward function" in caplog.text


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0] * 4, 1.0, "abc", None, {"a": 1}])
@pytest.mark.parametrize("policy", [NO_DEADLINE, DROP, ZERO])
async def test_a_batch_of_another_length_fails_the_group(values, policy):
    @reward_function(mode="batch")
    def wrong(conversations):
        return values

    group = make_answers("a", "b", "c")
    if policy is NO_DEADLINE:
        with pytest.raises(RewardError, match=r"function \S*wrong \(\S+:\d+\) returned .* return (one for each|a list of 3 numbers)"):
            await score_group(group, wrong, policy)
    else:
        assert rewards(await score_group(group, wrong, policy) or ()) == ([] if policy is DROP else [0.0] * 3)


async def test_a_batch_is_tried_again_as_a_whole_and_retries_are_counted():
    num_calls = 0

    @reward_function(mode="batch")
    async def flaky(conversations):
        nonlocal num_calls
        num_calls += 1
        return [num_calls, math.nan if num_calls < 3 else 0.0]

    scored = await score_group(make_answers("a", "b"), flaky, RETRY)
    assert rewards(scored) == [3.0, 0.0] and num_calls == 3  # never the results of two calls beside each other
    assert scored is not None and summarize_rewards(scored) == {"num_reward_retries": 2.0}, "two calls, and not one for each sample"
    num_calls = 0
    greedy, *others = make_answers("a", "b")
    scored = await score_group((replace(greedy, trainable=False), *others), flaky, RETRY)
    assert scored is not None and summarize_rewards(select_trainable(scored)) == {"num_reward_retries": 2.0}


async def test_a_batch_has_a_deadline(autojump_clock):
    @reward_function(mode="batch")
    async def hang(conversations):
        await trio.sleep(60)
        return [1.0] * len(conversations)

    with pytest.raises(RewardError, match=r"hang \(.*:\d+\) did not return within 30 s for 2 samples of group 3"):
        await score_group(make_answers("a", "b"), hang)
    assert await score_group(make_answers("a", "b"), hang, RewardConfig(on_error="drop")) is None
    assert rewards(await score_group(make_answers("a", "b"), hang, RewardConfig(timeout_s=61))) == [1.0, 1.0]


@pytest.mark.parametrize("messages", ["text", None, 5, [5], [{"content": "no role"}], [{"role": "user", "unknown": 1}], {"role": "user"}])
def test_arguments_that_are_no_messages_are_refused(messages):
    with pytest.raises(RewardError, match="message"):
        parse_messages(messages)
    with pytest.raises(RewardError, match="message"):
        is_right(messages, ground_truth="4")


def test_decorating_what_is_no_function_of_messages_is_refused():
    with pytest.raises(ConfigError, match="'bach': did you mean 'batch'"):
        reward_function(mode="bach")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="takes no positional argument"):
        reward_function(lambda **kwargs: 1.0)
    with pytest.raises(ConfigError, match="expected a function"):
        reward_function(5)  # type: ignore[call-overload]


def test_functions_come_from_files_and_modules(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rollouts import EvaluateResult, reward_function\n"
        "@reward_function(mode='batch')\n"
        "def mine(conversations):\n    return [0.5] * len(conversations)\n"
        "def plain(sample):\n    return 0.25\n"
    )
    assert rewards(score_now(make_answers("a", "b"), load_reward(f"{file}:mine"))) == [0.5, 0.5]
    assert rewards(score_now(make_answers("a"), load_reward(f"{file}:plain"))) == [0.25]
    assert load_reward("rollouts.rewards.answers:exact_match").__name__ == "exact_match"
    with pytest.raises(ConfigError, match="no function 'min': did you mean 'mine'"):
        load_reward(f"{file}:min")


def make_episode(num_turns: int = 2, **changes: Any) -> Sample:
    messages = [Message(role="user", content="q")]
    for k in range(num_turns):
        messages.append(Message(role="assistant", content=f"a{k}", name=f"step{k}"))
        messages.append(Message(role="tool", content=f"o{k}"))
    turns = tuple(Turn(start=1 + 2 * k, end=2 + 2 * k, reward=10.0 + k) for k in range(num_turns))
    length = 1 + 2 * num_turns
    values = {"tokens": (1,) * length, "loss_mask": (1.0,) * length, "turns": turns, "messages": messages}
    return Sample(**{**values, **changes})


def test_step_outputs_are_rewards_of_turns():
    sample = make_episode()
    result = EvaluateResult(2.0, step_outputs=[StepOutput(1, 0.5, reason="right tool")])  # type: ignore[arg-type]
    scored = with_reward(sample, result)
    assert scored.reward == 2.0 and scored.turns is not None
    assert [turn.reward for turn in scored.turns] == [10.0, 0.5]  # a turn without a score keeps the environment's reward
    assert scored.reward_details == RewardDetails(steps=(StepOutput(1, 0.5, reason="right tool"),))
    named = with_reward(sample, EvaluateResult(1.0, step_outputs=(StepOutput("step0", -1.0),)))
    assert named.turns is not None and [turn.reward for turn in named.turns] == [-1.0, 11.0]
    with pytest.raises(RewardError, match=r"'step0' names a step that 2 step outputs are about; .*0 names a step that 2"):
        with_reward(sample, EvaluateResult(1.0, step_outputs=(StepOutput("step0", 1.0), StepOutput(0, 1.0))))


@pytest.mark.parametrize("outputs", [None, (), []])
def test_a_score_for_the_whole_episode_replaces_what_its_turns_were_paid(outputs):
    sample = make_episode(episode=EpisodeOutcome(stop_reason=StopReason.DONE, environment_reward=21.0))
    scored = with_reward(sample, EvaluateResult(0.5, step_outputs=outputs))
    assert scored.reward == 0.5 and scored.turns is not None
    assert [turn.reward for turn in scored.turns] == [None, None], "nobody judges them now, which is not 0"
    assert scored.episode.environment_reward == 21.0
    (by_number,) = score_now((sample,), lambda sample: 0.5)
    assert by_number.turns == scored.turns


async def test_a_failed_reward_that_counts_as_0_is_a_judgement_of_the_whole_too():
    (scored,) = await score_group((make_episode(),), lambda sample: 1 / 0, ZERO)
    assert scored.reward == 0.0 and scored.turns is not None and [turn.reward for turn in scored.turns] == [None, None]


def test_what_was_aligned_with_what_is_told(caplog):
    with caplog.at_level(logging.DEBUG, logger="rollouts.rewards.results"):
        with_reward(make_episode(), EvaluateResult(1.0, step_outputs=(StepOutput("step1", 0.5),)))
    (told,) = [message for message in caplog.messages if not message.startswith("alignment ")]
    assert told.endswith("step_index 'step1' is turn 1 (assistant message 1), reward 0.5")


def test_examples_in_the_prompt_are_counted_but_are_no_turns():
    sample = make_episode(3)
    shorter = replace(sample, turns=sample.turns[1:])  # type: ignore[index]  # the first answer is part of the prompt
    scored = with_reward(shorter, EvaluateResult(1.0, step_outputs=(StepOutput(1, 0.5),)))
    assert scored.turns is not None and [turn.reward for turn in scored.turns] == [0.5, 12.0]
    with pytest.raises(RewardError, match=r"step_index 0 is unknown; there are \[1, 2\]"):
        with_reward(shorter, EvaluateResult(1.0, step_outputs=(StepOutput(0, 0.5),)))
    with pytest.raises(RewardError, match=r"has 3 turns, but its conversation has 1 messages of the assistant"):
        broken = (Message(role="assistant", content=""),)
        with_reward(replace(sample, messages=broken), EvaluateResult(1.0, step_outputs=(StepOutput(0, 0.5),)))


def test_a_conversation_of_any_sample():
    plain = Sample(prompt="2+2=", response="4")
    assert [(m.role, m.content) for m in sample_messages(plain)] == [("user", "2+2="), ("assistant", "4")]
    chat = replace(plain, prompt=(Message(role="system", content="s"),))
    assert [m.role for m in sample_messages(chat)] == ["system", "assistant"]
    assert len(sample_messages(make_episode())) == 5
    with pytest.raises(DataError, match=r"Sample\.messages holds 5, expected a Message"):
        replace(plain, messages=[5])


WRONG_VALUES = [
    lambda: MetricResult("1"),  # type: ignore[arg-type]
    lambda: MetricResult(math.nan),
    lambda: StepOutput(1.5, 0.0),  # type: ignore[arg-type]
    lambda: StepOutput(True, 0.0),
    lambda: StepOutput(0, math.inf),
    lambda: EvaluateResult(math.nan),
    lambda: EvaluateResult(10**400),
    lambda: EvaluateResult(None),  # type: ignore[arg-type]
    lambda: EvaluateResult(1.0, metrics={"a": 1.0}),  # type: ignore[dict-item]
    lambda: EvaluateResult(1.0, step_outputs=(0.5,)),  # type: ignore[arg-type]
    lambda: EvaluateResult.from_dict({"scor": 1.0}),
    lambda: EvaluateResult.from_dict({"score": 1.0, "step_outputs": 5}),
    lambda: EvaluateResult.from_dict([1.0]),  # type: ignore[arg-type]
    lambda: EvaluateResult.from_dict({"score": 1.0, "metrics": [1]}),
    lambda: EvaluateResult(10**5000),
    lambda: StepOutput(0, 10**5000),
    lambda: EvaluateResult(1.0, reason=None),  # type: ignore[arg-type]
    lambda: EvaluateResult(1.0, error=5),  # type: ignore[arg-type]
    lambda: EvaluateResult(1.0, is_score_valid="no"),  # type: ignore[arg-type]
    lambda: MetricResult(1.0, 5),  # type: ignore[arg-type]
    lambda: MetricResult(1.0, is_score_valid=1),  # type: ignore[arg-type]
    lambda: StepOutput(0, 1.0, reason=b"r"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", WRONG_VALUES)
def test_values_of_evaluations_are_checked(make):
    with pytest.raises(RewardError, match="expected"):
        make()


def test_evaluations_survive_json():
    whole = EvaluateResult(
        0.5,
        reason="r",
        metrics={"a": MetricResult(1.0, "x"), "b": MetricResult(math.nan, is_score_valid=False)},
        step_outputs=(StepOutput(0, 0.25, {"c": MetricResult(2.0)}, "s"), StepOutput("search", 0.0)),
    )
    again = EvaluateResult.from_dict(whole.to_dict())
    assert again.to_dict() == whole.to_dict() and again.step_outputs == whole.step_outputs
    assert EvaluateResult.from_dict(EvaluateResult.from_error("down").to_dict()).error == "down"
    assert EvaluateResult.from_dict({"score": 1}) == EvaluateResult(1)


def test_numbers_beyond_floats_are_no_scores_and_end_nothing():
    assert EvaluateResult(10**400, is_score_valid=False).to_dict()["score"] is None
    largest = EvaluateResult(1.0, metrics={"a": MetricResult(1.7e308)})
    group = tuple(largest.apply_to(sample) for sample in make_answers("a", "b"))
    assert summarize_rewards(group) == {"reward/a": 1.7e308}
    for huge in (10**400, 10**5000):  # the digits of the second are more than Python writes
        zeroed = trio.run(score_group, make_answers("a"), lambda sample, huge=huge: huge, ZERO)
        assert "return a number" in find_error(zeroed[0])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.just(EvaluateResult(0.5)),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(value=ANYTHING)
def test_whatever_a_function_returns_is_a_finite_reward_or_a_reward_error(value):
    @reward_function
    def one(messages):
        return value

    @reward_function(mode="batch")
    def several(conversations):
        return [0.25, value]

    group = make_answers("a", "b")
    for function, expected in ((one, None), (several, 0.25)):
        scored = trio.run(score_group, group, function, ZERO)
        assert all(sample.reward is not None and math.isfinite(sample.reward) for sample in scored)
        assert expected is None or (scored[0].reward == expected and find_error(scored[0]) is None)
        good = isinstance(value, EvaluateResult) or (isinstance(value, (bool, int, float)) and _is_finite(value))
        assert (find_error(scored[1]) is None) == good


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def number_answers(count: int) -> Group:
    """Return a group of samples 0, 1, ..."""
    return tuple(replace(sample, index=k) for k, sample in enumerate(make_answers(*["x"] * count)))


@pytest.mark.hypothesis
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.5]), max_size=3), min_size=2, max_size=6))
def test_async_rewards_wait_side_by_side_and_take_no_task_without_a_wait(waits: list[list[float]]):
    begun: list[int] = []
    tasks: dict[int, object] = {}

    async def reward(sample: Sample) -> float:
        begun.append(sample.index)
        tasks[sample.index] = trio.lowlevel.current_task()
        for wait in waits[sample.index]:
            await trio.sleep(wait)
        return float(sample.index)

    async def score() -> None:
        start = trio.current_time()
        scored = await score_group(number_answers(len(waits)), reward)
        assert scored is not None
        assert [sample.reward for sample in scored] == list(range(len(waits)))
        assert trio.current_time() - start == max(map(sum, waits))
        assert begun == list(range(len(waits)))
        waited = sum(map(bool, waits[:-1]))
        assert len(set(tasks.values())) == 1 + waited

    trio.run(score, clock=trio.testing.MockClock(autojump_threshold=0.0))


async def test_each_async_reward_has_a_deadline_and_retries_of_its_own(autojump_clock: trio.testing.MockClock):
    calls: Counter[int] = Counter()

    async def reward(sample: Sample) -> float:
        calls[sample.index] += 1
        if sample.index == 1:
            await trio.sleep_forever()
        if sample.index == 2 and calls[2] == 1:
            await trio.sleep(1.0)
            raise ValueError("once")
        if sample.index == 4 and calls[4] == 1:
            raise ValueError("at once")
        return 1.0

    group = number_answers(6)
    judgements = await judge_samples(reward, group, RewardConfig(timeout_s=5.0, on_error="retry", max_retries=1))
    assert trio.current_time() == 10.0  # two attempts at sample 1
    assert [judgement.error is None for judgement in judgements] == [True, False, True, True, True, True]
    assert "did not return within 5 s" in str(judgements[1].error)
    assert [judgement.num_retries for judgement in judgements] == [0, 1, 1, 0, 1, 0]


async def test_an_async_reward_that_ends_the_run_ends_those_beside_it(autojump_clock: trio.testing.MockClock):
    cancelled: list[int] = []

    async def reward(sample: Sample) -> float:
        if sample.index == 3:
            raise KeyboardInterrupt
        try:
            await trio.sleep(100.0)
        except trio.Cancelled:
            cancelled.append(sample.index)
            raise
        return 1.0

    group = number_answers(4)
    with pytest.raises(BaseExceptionGroup) as caught:
        await score_group(group, reward)
    assert caught.group_contains(KeyboardInterrupt)
    assert (sorted(cancelled), trio.current_time()) == ([0, 1, 2], 0.0)


def nothing(sample):
    return math.nan


def praise(completions, **columns):
    return ["good"] * len(completions)


def verdict(data_source, solution_str, ground_truth=None, extra_info=None):
    return "good"


def mean(completions, **columns):
    return math.fsum(map(len, completions))


def one_by_one(completions, **columns):
    yield from completions


class Fixed:
    def __call__(self, sample: Sample) -> Any:
        return {"score": 1.0}


TELLS = {
    "nothing": (nothing, nothing, ("returned nan for sample 10", "return a finite number", "--reward.on-error drop")),
    "TRL": (praise, praise, ("returned 'good' (str) for sample 10", "return a number such as 1.0")),
    "verl": (verdict, verdict, ("returned 'good' (str) for sample 10", "return a number such as 1.0")),
    "one number for all": (mean, mean, ("returned 2.0 (float) for 2 samples", "return a list of 2 numbers")),
    "a generator": (one_by_one, one_by_one, ("for 2 samples", "return a list of 2 numbers")),
    "a partial": (functools.partial(nothing), nothing, ("returned nan", "return a finite number")),
    "decorated": (reward_function(nothing), nothing, ("returned nan", "return a finite number")),
    "an object": (Fixed(), Fixed.__call__, ("returned {'score': 1.0} (dict)", "return one number of it")),
}


@pytest.mark.parametrize("name", TELLS)
def test_a_value_that_is_no_score_is_told_once_with_the_function_s_file_and_line(name):
    function, user, words = TELLS[name]
    with pytest.raises(RewardError) as caught:
        trio.run(score_group, make_answers("a", "b"), adapt_reward(function), NO_DEADLINE)
    told = str(caught.value)
    assert f"({user.__code__.co_filename}:{user.__code__.co_firstlineno})" in told and all(word in told for word in words), told
    assert told.count("reward function") == told.count("returned") == 1 and "RewardError" not in told, told
    assert "rollouts/rewards" not in told, told


def test_an_error_of_this_library_in_a_reward_names_no_line_of_this_library():
    with pytest.raises(RewardError) as caught:
        trio.run(score_group, make_answers("a"), gsm8k_reward, NO_DEADLINE)
    assert str(caught.value).startswith("reward function gsm8k_reward failed for sample 10 (group 3): ") and ".py" not in str(caught.value)


def test_a_column_of_the_first_parameters_name_is_left_out():
    @reward_function
    def one(conversation, **kwargs):
        return float(kwargs == {"answer": 1})

    assert one(make_answers("x", metadata={"answer": 1, "conversation": "c"})[0]).score == 1.0
