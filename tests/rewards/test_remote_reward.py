"""A reward model on a server, over a real loopback socket: what is sent, how answers are read, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio

from benchmarks.reliability.loopback import Exchange, LoopbackServer, serve
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.models import remote
from rollouts.rewards.models.remote import PlainScores, SGLangScores, VLLMScores, open_remote_reward
from rollouts.types import Message, Sample, Status

GROUP = tuple(
    Sample(
        prompt=(Message(role="user", content="1+2="),),
        tokens=(3, 4, 5 + i),
        loss_mask=(0.0, 1.0, 1.0),
        response=str(i),
        index=i,
        status=Status.COMPLETED,
        metadata={"ground_truth": "3", "function": print},
    )
    for i in range(4)
)
EXPECTED = [float(sum(sample.tokens)) for sample in GROUP]
PROTOCOLS = {"sglang": SGLangScores(), "vllm": VLLMScores("rm"), "plain": PlainScores()}


def score(target: str, body: Any) -> Any:
    """Return the answers of servers whose model adds up tokens."""
    if target == "/score":
        return {"scores": [float(sum(sample["tokens"])) for sample in body["samples"]]}
    if "input_ids" in body:
        return [{"embedding": [float(sum(row))], "meta_info": {}} for row in body["input_ids"]]
    data = [{"index": i, "label": "LABEL_0", "probs": [float(sum(row))], "num_classes": 1} for i, row in enumerate(body["input"])]
    return {"object": "list", "model": body["model"], "data": data[::-1]}


@asynccontextmanager
async def open_server(answer: Callable[[str, Any], Any] = score, status: int = 200) -> AsyncIterator[LoopbackServer]:
    async def respond(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(answer(exchange.target, json.loads(exchange.body))).encode(), status)

    async with serve(respond) as server:
        yield server


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_a_group_is_scored_in_one_request(name: str):
    async with open_server() as server, open_remote_reward(server.url, PROTOCOLS[name]) as reward:
        scored = await score_group(GROUP, reward)
    assert scored is not None
    assert [sample.reward for sample in scored] == EXPECTED
    assert [exchange.target for exchange in server.exchanges] == [PROTOCOLS[name].path]
    body = json.loads(server.exchanges[0].body)
    if name == "vllm":
        assert body == {"model": "rm", "input": [list(sample.tokens) for sample in GROUP], "use_activation": False}
    if name == "plain":
        messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "0"}]
        assert body["samples"][0] == {"tokens": [3, 4, 5], "messages": messages, "metadata": {"ground_truth": "3"}}


async def test_conversations_are_rendered_for_a_model_with_other_tokens():
    tokenizer = create_char_tokenizer()
    async with open_server() as server, open_remote_reward(server.url, SGLangScores(), tokenizer=tokenizer) as reward:
        await reward(GROUP[3])
    (row,) = json.loads(server.exchanges[0].body)["input_ids"]
    assert tokenizer.decode(row) == "user: 1+2=\nassistant: 3<|eos|>\n"


async def test_requests_hold_so_many_samples_and_run_side_by_side():
    async with open_server() as server, open_remote_reward(server.url, SGLangScores(), max_samples=2, max_requests=2) as reward:
        scored = await score_group(GROUP, reward)
    assert scored is not None
    assert [sample.reward for sample in scored] == EXPECTED
    assert [len(json.loads(exchange.body)["input_ids"]) for exchange in server.exchanges] == [2, 2]


WRONG = {
    "too few": ("plain", {"scores": [1.0, 2.0]}, "gave 2 scores for 4 samples"),
    "another form": ("plain", [1.0], "expected an object with a list 'scores'"),
    "nothing": ("vllm", {"data": None}, "expected an object with a list 'data'"),
    "no entry": ("sglang", [1.0, 2.0, 3.0, 4.0], "expected an object with a list 'embedding'"),
    "classes": ("vllm", {"data": [{"probs": [0.3, 0.7]}] * 4}, "'probs' has 2 numbers, expected 1"),
    "beyond floats": ("plain", {"scores": [10**400] * 4}, "expected a finite number"),
    "no numbers": ("plain", {"scores": ["good"] * 4}, "the score 'good', expected a finite number"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_answers_that_are_no_scores_are_errors_of_the_reward(name: str):
    protocol, answer, message = WRONG[name]
    async with open_server(lambda target, body: answer) as server, open_remote_reward(server.url, PROTOCOLS[protocol]) as reward:
        with pytest.raises(RewardError) as caught:
            await score_group(GROUP, reward)
        assert message in str(caught.value)
        assert await score_group(GROUP, reward, RewardConfig(on_error="drop")) is None


async def test_one_sample_without_a_score_fails_alone():
    async with open_server(lambda target, body: {"scores": [1.0, None, 3.0, 4.0]}) as server:
        async with open_remote_reward(server.url, PlainScores()) as reward:
            scored = await score_group(GROUP, reward, RewardConfig(on_error="zero"))
    assert scored is not None
    assert [sample.reward for sample in scored] == [1.0, 0.0, 3.0, 4.0]
    assert "the score None" in scored[1].reward_details.error


async def test_a_busy_server_is_asked_again_and_a_broken_one_is_told():
    calls: list[int] = []

    async def respond(exchange: Exchange) -> None:
        calls.append(1)
        if len(calls) <= 2:
            return await exchange.answer(b"busy", 503)
        return await exchange.answer(json.dumps(score(exchange.target, json.loads(exchange.body))).encode())

    retry = RetryPolicy(first_wait_s=0.001, longest_wait_s=0.002)
    async with serve(respond) as server, open_remote_reward(HTTPEndpoint(server.url, retry=retry), SGLangScores()) as reward:
        assert await reward(GROUP[0]) == EXPECTED[0]
    assert len(calls) == 3
    async with open_server(status=500) as server, open_remote_reward(server.url, SGLangScores()) as reward:
        with pytest.raises(RewardError, match="HTTP status 500"):
            await reward(GROUP[0])


async def test_a_server_that_hangs_is_given_up_at_the_deadline():
    async def hang(exchange: Exchange) -> None:
        await trio.sleep_forever()

    deadlines = Deadlines(generate_s=0.05)
    async with serve(hang) as server, open_remote_reward(HTTPEndpoint(server.url, deadlines=deadlines), SGLangScores()) as reward:
        with trio.fail_after(60), pytest.raises(RewardError, match=r"no complete answer within 0\.05 s"):
            await reward(GROUP[0])


async def test_a_hanging_server_named_by_its_address_is_an_error_that_says_where_its_deadline_is_set(monkeypatch: pytest.MonkeyPatch):
    async def hang(exchange: Exchange) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(remote, "_DEADLINES", replace(remote._DEADLINES, generate_s=0.05))
    async with serve(hang) as server, open_remote_reward(server.url, SGLangScores()) as reward:
        with (
            trio.fail_after(60),
            pytest.raises(RewardError, match=r"open_remote_reward\(HTTPEndpoint\(url, .*generate_s="),
        ):
            await reward(GROUP[0])


async def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="is 'localhost', expected http"):
        async with open_remote_reward("localhost", PlainScores()):
            pass
