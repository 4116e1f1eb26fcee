"""Judges: what they are asked over a real socket, how their answers are read, both orders, and failures by policy."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from benchmarks.reliability.loopback import Exchange, serve
from rollouts.config import RewardConfig
from rollouts.engines.text.openai import OpenAITextEngine
from rollouts.errors import ConfigError, EngineError, RewardError
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.models.judge import (
    JudgeConfig,
    PairwiseJudge,
    RubricJudge,
    check_prompt,
    parse_json_choice,
    parse_json_score,
    plan_pairs,
)
from rollouts.types import Message, Sample, Status, Turn


def answers(*texts: str) -> tuple[Sample, ...]:
    return tuple(
        Sample(prompt="1+2=", response=text, tokens=(3, 4), loss_mask=(0.0, 1.0), index=i, status=Status.COMPLETED,
               metadata={"ground_truth": "3"})
        for i, text in enumerate(texts)
    )  # fmt: skip


class JudgeServer:
    """An OpenAI-compatible server whose answers come from a function of the question."""

    def __init__(self, say: Callable[[str], str], status: int = 200) -> None:
        self.say, self.status = say, status
        self.requests: list[dict[str, Any]] = []
        self.num_open = self.most_open = 0

    async def respond(self, exchange: Exchange) -> None:
        request = json.loads(exchange.body)
        self.requests.append(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await trio.sleep(0.002)
        self.num_open -= 1
        message = {"content": self.say(request["messages"][0]["content"])}
        reply = {"model": "judge", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
        await exchange.answer(json.dumps(reply).encode(), self.status)


@asynccontextmanager
async def open_judge(say: Callable[[str], str], status: int = 200) -> AsyncIterator[tuple[OpenAITextEngine, JudgeServer]]:
    fake = JudgeServer(say, status)
    async with serve(fake.respond) as server, OpenAITextEngine(server.url, "judge", check_model=False) as engine:
        yield engine, fake


def read_pair(question: str) -> tuple[str, str]:
    found = re.search(r"Answer A:\n(.*?)\n\nAnswer B:\n(.*?)\n\nWhich", question, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def prefer_longer(question: str) -> str:
    first, second = read_pair(question)
    winner = "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"
    return json.dumps({"reason": "length", "winner": winner})


# a rubric


async def test_a_rubric_gives_scores_from_0_to_1_with_reasons():
    def say(question: str) -> str:
        right = question.split("assistant: ")[1].startswith("3")
        return f'Let me think. {{"reason": "it is {right}", "score": {8 if right else 2}}}'

    async with open_judge(say) as (engine, fake):
        judge = RubricJudge(engine, rubric="Is the sum right?")
        scored = await score_group(answers("3", "4"), judge)
        (result,) = [await judge(answers("3")[0])]
    assert scored is not None
    assert [sample.reward for sample in scored] == [0.8, 0.2]
    assert result.reason == "it is True"
    question = fake.requests[0]["messages"][0]["content"]
    for part in ("Is the sum right?", "user: 1+2=\n\nassistant: ", "The right answer is: 3", "from 0 (worst) to 10 (best)"):
        assert part in question
    assert fake.requests[0]["temperature"] == 0.0


async def test_no_more_questions_than_allowed_are_open():
    async with open_judge(lambda question: '{"score": 5}') as (engine, fake):
        judge = RubricJudge(engine, rubric="r", config=JudgeConfig(max_concurrent=3))
        scored = await score_group(answers(*"abcdefghijkl"), judge)
    assert scored is not None
    assert (len(fake.requests), fake.most_open) == (12, 3)
    assert {sample.reward for sample in scored} == {0.5}


async def test_an_answer_that_cannot_be_read_is_asked_for_again_and_then_follows_the_policy():
    texts = iter(["no idea", '{"score": 4}', "no idea", "still none"])
    async with open_judge(lambda question: next(texts)) as (engine, fake):
        judge = RubricJudge(engine, rubric="r")
        assert (await judge(answers("3")[0])).score == 0.4
        with pytest.raises(RewardError, match=r"the judge gave no score.*still none"):
            await judge(answers("3")[0])
    assert [request["seed"] for request in fake.requests] == [0, 1, 0, 1]
    assert [request["temperature"] for request in fake.requests] == [0.0, 0.7, 0.0, 0.7]  # a greedy judge would repeat itself
    assert (judge.num_questions, judge.num_unparsed) == (4, 3)
    async with open_judge(lambda question: '{"score": 11}') as (engine, _):
        judge = RubricJudge(engine, rubric="r")
        assert await score_group(answers("3", "4"), judge, RewardConfig(on_error="drop")) is None
        with pytest.raises(RewardError, match="score is 11, expected one from 0 to 10"):
            await score_group(answers("3", "4"), judge)


async def test_an_error_of_the_server_is_an_error_of_the_reward():
    async with open_judge(lambda question: "", status=400) as (engine, _):
        with pytest.raises(RewardError, match="HTTP status 400"):
            await score_group(answers("3"), RubricJudge(engine, rubric="r"))


# pairs


async def test_the_score_of_a_group_is_the_win_rate():
    async with open_judge(prefer_longer) as (engine, fake):
        judge = PairwiseJudge(engine, rubric="The longer one.")
        scored = await score_group(answers("a", "aaa", "aa", "aa"), judge)
    assert scored is not None
    assert [sample.reward for sample in scored] == pytest.approx([0.0, 1.0, 0.5, 0.5])
    assert len(fake.requests) == 2 * 6, "each pair in both orders"
    asked = [read_pair(request["messages"][0]["content"]) for request in fake.requests]
    assert ("a", "aaa") in asked and ("aaa", "a") in asked
    assert judge.num_inconsistent == 0
    assert scored[0].reward_details.metrics["judge_inconsistent"].score == 0.0


async def test_a_judge_that_prefers_a_place_decides_nothing():
    async with open_judge(lambda question: '{"winner": "A"}') as (engine, _):
        judge = PairwiseJudge(engine, rubric="r")
        scored = await score_group(answers("x", "y", "z"), judge)
        one_order = await PairwiseJudge(engine, rubric="r", both_orders=False).compare(*answers("x", "y"))
    assert scored is not None
    assert [sample.reward for sample in scored] == [0.5, 0.5, 0.5]
    assert judge.num_inconsistent == 3
    assert scored[0].reward_details.metrics["judge_inconsistent"].score == 1.0
    assert (one_order.points, one_order.consistent) == (1.0, True)


async def test_a_tie_in_one_order_and_a_win_in_the_other_is_a_win_by_half():
    def say(question: str) -> str:
        return '{"winner": "A"}' if read_pair(question) == ("x", "y") else '{"winner": "tie"}'

    async with open_judge(say) as (engine, _):
        comparison = await PairwiseJudge(engine, rubric="r").compare(*answers("x", "y"))
    assert (comparison.points, comparison.consistent) == (0.75, False)


async def test_fewer_opponents_ask_fewer_questions():
    async with open_judge(prefer_longer) as (engine, fake):
        judge = PairwiseJudge(engine, rubric="r", max_opponents=1, both_orders=False)
        scored = await score_group(answers("a", "aa", "aaa", "aaaa"), judge)
    assert scored is not None
    assert [sample.reward for sample in scored] == [0.0, 0.5, 0.5, 1.0]
    assert len(fake.requests) == 4


async def test_one_sample_cannot_be_compared():
    async with open_judge(prefer_longer) as (engine, _):
        judge = PairwiseJudge(engine, rubric="r")
        with pytest.raises(RewardError, match="cannot be compared: give n_samples_per_prompt >= 2"):
            await score_group(answers("a"), judge)
        with pytest.raises(RewardError, match="was scored alone"):
            await judge(answers("a")[0])


async def test_cancelling_a_group_leaves_the_judge_usable():
    async with open_judge(prefer_longer) as (engine, _):
        judge = PairwiseJudge(engine, rubric="r", config=JudgeConfig(max_concurrent=1))
        with trio.move_on_after(0.003):
            await judge.score_samples(answers(*"abcdef"))
        with trio.fail_after(60):
            assert [result.score for result in await judge.score_samples(answers("a", "aa"))] == [0.0, 1.0]


@pytest.mark.parametrize("num_samples", [2, 3, 5, 8])
def test_pairs_are_all_or_a_ring_in_which_everybody_has_opponents(num_samples: int):
    everyone = {(i, j) for i in range(num_samples) for j in range(i + 1, num_samples)}
    assert set(plan_pairs(num_samples)) == everyone
    assert set(plan_pairs(num_samples, 99)) == everyone
    ring = plan_pairs(num_samples, 1)
    assert len(set(ring)) == len(ring) == (1 if num_samples == 2 else num_samples)
    assert {k for pair in ring for k in pair} == set(range(num_samples))
    if num_samples == 8:
        assert [sum(k in pair for pair in plan_pairs(8, 2)) for k in range(8)] == [4] * 8


# what judges say

SCORES = {
    '{"score": 7}': (7.0, ""),
    'thinking {"score": 1} more ```json\n{"reason": "so", "score": 3.5}\n```': (3.5, "so"),
    '{"reason": "braces } in {text", "score": "-2"}': (-2.0, "braces } in {text"),
    "I say Score: 4/10": (4.0, "I say Score: 4/10"),
    "Score: -3": (-3.0, "Score: -3"),
    "**Score:** .5": (0.5, "**Score:** .5"),
    '{"score": 8, "criteria": {"style": {"score": 2}}}': (8.0, ""),
    'Score: 6. {"criteria": {"style": {"score": 2}}}': (6.0, 'Score: 6. {"criteria": {"style": {"score": 2}}}'),
    '{not JSON {"score": 3}}': (3.0, ""),
}
NO_SCORES = ("", "none", '{"score": "high"}', '{"score": true}', '{"score": null}', '{"score": NaN}', '{"points": 3}', "score: high",
             '{"score": 1' + "0" * 400 + "}", '{"score": 1' + "0" * 5000 + "}", '{"criteria": {"score": 2}}')  # fmt: skip
CHOICES = {
    '{"winner": "A"}': 1.0,
    '{"winner": "b", "reason": "r"}': 0.0,
    '{"winner": "A"} no, {"winner": "Tie"}': 0.5,
    '{"winner": "A", "per_aspect": [{"winner": "B"}]}': 1.0,
    "So [[B]]": 0.0,
    "[[C]]": 0.5,
}
NO_CHOICES = ("", "A", '{"winner": "C3PO"}', '{"winner": null}', "[[D]]")


@pytest.mark.parametrize("text", SCORES)
def test_scores_are_found(text: str):
    assert parse_json_score(text) == SCORES[text]


@pytest.mark.parametrize("text", CHOICES)
def test_winners_are_found(text: str):
    assert parse_json_choice(text)[0] == CHOICES[text]


@pytest.mark.parametrize("text", NO_SCORES)
def test_no_score_is_an_error(text: str):
    with pytest.raises(RewardError, match="the judge"):
        parse_json_score(text)


@pytest.mark.parametrize("text", NO_CHOICES)
def test_no_winner_is_an_error(text: str):
    with pytest.raises(RewardError, match="the judge chose no winner"):
        parse_json_choice(text)


def test_prompts_are_checked_before_anybody_is_asked():
    check_prompt("Only {conversation}", required={"conversation"}, optional={"rubric"})
    with pytest.raises(ConfigError, match=r"lacks \{conversation\}"):
        check_prompt("{rubric}", required={"conversation"}, optional={"rubric"})
    for prompt in ("{conversation} {answer}", '{conversation} {"score": 1}', "{conversation} {"):
        with pytest.raises(ConfigError, match="a field that nothing fills"):
            check_prompt(prompt, required={"conversation"}, optional={"rubric"})


async def test_text_of_a_sample_is_never_taken_for_a_field_of_the_prompt():
    async with open_judge(lambda question: '{"score": 5}') as (engine, fake):
        await RubricJudge(engine, rubric="r {x}")(answers("{rubric} {0} }{")[0])
    assert "{rubric} {0} }{" in fake.requests[0]["messages"][0]["content"]


async def test_the_answer_of_an_episode_is_its_last_action_and_not_what_came_after_it():
    def play(text: str, k: int) -> Sample:
        messages = (Message(role="user", content="q"), Message(role="assistant", content=text), Message(role="user", content="end"))
        return Sample(
            tokens=(3, 4), loss_mask=(0.0, 1.0), index=k, status=Status.COMPLETED, messages=messages, action_messages=(1,),
            turns=(Turn(start=1, end=2),),
        )  # fmt: skip

    async with open_judge(prefer_longer) as (engine, _):
        scored = await score_group((play("long answer", 0), play("no", 1)), PairwiseJudge(engine, rubric="r"))
    assert [sample.reward for sample in scored] == [1.0, 0.0]


async def test_failures_of_many_questions_at_once_are_told_as_one():
    class Broken:
        async def complete(self, messages: Any, **options: Any) -> Any:
            await trio.lowlevel.checkpoint()
            raise EngineError("the judge is down")

    with pytest.raises(RewardError, match="the judge is down"):
        await score_group(answers("a", "b", "c"), PairwiseJudge(Broken(), rubric="r"))  # pyright: ignore
