"""Programs of users as episodes: real processes and functions, their rewards, and what goes wrong with them."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from collections import Counter

import httpx
import pytest
import trio
from ledgers import LedgerEngine, list_sampled, list_trained

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError, EngineContextError, EngineError
from rollouts.gateway import AgentConfig, GatewayConfig, agent_runs, create_agent_generate_fn
from rollouts.gateway.agent_runs import AgentFault
from rollouts.gateway.processes import ProgramResult, run_program
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.testing import FakeEngine, random_answer
from rollouts.types import Prompt, SamplingParams, Status

TOKENIZER = create_char_tokenizer()
PARAMS = SamplingParams(max_tokens=6)
PROMPT = Prompt(content="1+1=", index=3, metadata={"ground_truth": "2"})

PROGRAM = """
    import json, os, sys, urllib.request

    def ask(messages):
        body = json.dumps({"model": "any", "messages": messages, "temperature": 0}).encode()
        head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

    task = json.loads(sys.stdin.readline())
"""


@pytest.fixture
def write_program(tmp_path):
    """Write a program that begins with PROGRAM; returns the command."""

    def write(text):
        path = tmp_path / "agent.py"
        path.write_text(textwrap.dedent(PROGRAM) + textwrap.dedent(text))
        return [sys.executable, str(path)]

    return write


def create(program, engine=None, reward_fn=None, **config):
    engine = LedgerEngine(random_answer(mean_length=3)) if engine is None else engine
    settings = AgentConfig(environment={"PATH": os.environ.get("PATH", "")}, **config)
    return engine, create_agent_generate_fn(program, [engine], TOKENIZER, PARAMS, reward_fn, config=settings)


async def ask(task, text, client):
    answer = await client.post(f"{task.openai_base_url}/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    return answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.status_code


async def test_a_program_becomes_a_group_with_the_rewards_that_it_reports(write_program):
    command = write_program("""
        first = ask([{"role": "user", "content": task["prompt"]}])
        messages = [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": first}]
        ask([*messages, {"role": "user", "content": "again"}])
        print("done")
        print(json.dumps({"reward": task["sample"] + 0.5, "reason": task["metadata"]["ground_truth"]}))
    """)
    engine, generate = create(command)
    group = await generate(PROMPT, 3)
    assert [sample.reward for sample in group] == [0.5, 1.5, 2.5]
    assert [(sample.index, sample.group_index, sample.status) for sample in group] == [(9 + k, 3, Status.COMPLETED) for k in range(3)]
    assert all(sample.reward_details.reason == "2" and len(sample.turns) == 2 and sample.prompt == "1+1=" for sample in group)
    assert Counter(turn for sample in group for turn in list_trained(sample)) == Counter(list_sampled(engine.ledger))
    assert len({sample.tokens for sample in group}) == 3, "the runs of a group sample differently"
    again = await generate(PROMPT, 3)
    assert [sample.tokens for sample in again] == [sample.tokens for sample in group]


async def test_a_reward_function_judges_what_the_program_does_not(write_program):
    command = write_program('ask([{"role": "user", "content": "x"}]); print("bye")')
    _, generate = create(command, reward_fn=lambda sample: float(sample.metadata["ground_truth"]))
    assert [sample.reward for sample in await generate(PROMPT, 2)] == [2.0, 2.0]


async def test_a_function_is_an_agent_too():
    async def agent(task):
        async with httpx.AsyncClient() as client:
            return {"reward": len(await ask(task, task.prompt.content, client))}

    _, generate = create(agent)
    (sample,) = await generate(PROMPT, 1)
    assert sample.reward == len(sample.messages[1].content)


async def test_a_plain_function_runs_in_a_thread_beside_its_gateway():
    def agent(task):
        with httpx.Client(timeout=10, trust_env=False) as client:
            body = {"messages": [{"role": "user", "content": task.prompt.content}]}
            answer = client.post(f"{task.openai_base_url}/chat/completions", json=body).json()
        return len(answer["choices"][0]["message"]["content"])

    _, generate = create(agent)
    for sample in await generate(PROMPT, 2):
        assert sample.reward == len(sample.messages[1].content)


async def test_a_function_that_blocks_the_event_loop_ends_its_run_alone():
    armed = []

    async def agent(task):
        async with httpx.AsyncClient(trust_env=False) as client:
            await ask(task, "x", client)
        if task.sample:
            armed.append(signal.getitimer(signal.ITIMER_REAL)[0])
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.05)  # the end of a limit that no load makes other code reach
            time.sleep(60)
        return 1.0

    _, generate = create(agent, failed_reward=-1.0)
    with trio.fail_after(50):
        group = await generate(PROMPT, 2)
    assert [sample.reward for sample in group] == [1.0, -1.0]
    assert 0 < armed[0] <= agent_runs._MAX_BLOCK_S
    assert "blocked the event loop" in group[1].episode.error and "test_agent_runs.py" in group[1].episode.error


async def test_a_judge_replaces_what_programs_report_and_never_the_reward_of_a_failure():
    async def agent(task):
        async with httpx.AsyncClient(trust_env=False) as client:
            await ask(task, "x", client)
        if task.sample:
            raise ValueError("bad")
        return 1.0

    def judge(sample):
        return 7.0

    engine, generate = create(agent, reward_fn=judge, failed_reward=-1.0)
    assert [sample.reward for sample in await generate(PROMPT, 2)] == [7.0, -1.0]
    _, generate = create(agent, engine, failed_reward=-1.0)
    config = RolloutConfig(batch_size=1, n_samples_per_prompt=2, generate_fn=generate, reward_fn=judge)
    async with AsyncRolloutManager(DataBuffer([PROMPT]), config, engines=[engine]) as manager:
        assert (await manager.generate_batch()).rewards == [7.0, -1.0]


async def test_a_run_must_report_a_reward_where_nothing_judges_it():
    async def agent(task):
        async with httpx.AsyncClient(trust_env=False) as client:
            await ask(task, "x", client)

    with pytest.raises(AgentFault, match="reports no reward"):
        await create(agent)[1](PROMPT, 1)
    assert (await create(agent, must_report=False)[1](PROMPT, 1))[0].reward is None
    assert (await create(agent, reward_fn=lambda sample: 2.0)[1](PROMPT, 1))[0].reward == 2.0


async def test_programs_ask_no_proxy_for_their_gateway_and_cannot_guess_the_sessions_of_others(write_program):
    command = write_program("""
        ask([{"role": "user", "content": "x"}])
        found = [os.environ[name] for name in ("no_proxy", "NO_PROXY", "OPENAI_BASE_URL")]
        print(json.dumps({"reward": 1, "reason": " ".join(found)}))
    """)
    settings = AgentConfig(environment={"http_proxy": "http://127.0.0.1:1", "NO_PROXY": "example.org"})
    generate = create_agent_generate_fn(command, [LedgerEngine()], TOKENIZER, PARAMS, config=settings)
    found = [sample.reward_details.reason.split() for sample in await generate(PROMPT, 2)]
    assert all(names[:2] == ["example.org,127.0.0.1"] * 2 for names in found)
    keys = [names[2].split("/")[-2] for names in found]
    assert all(len(key) >= 32 for key in keys) and len({key[-20:] for key in keys}) == 2


async def test_a_fault_of_the_gateway_is_a_failure_of_the_run_that_a_program_cannot_hide():
    def parse_calls(text):
        raise KeyError("no such tool")

    async def agent(task):
        async with httpx.AsyncClient(trust_env=False) as client:
            await ask(task, "x", client)
            tools = [{"type": "function", "function": {"name": "f"}}]
            body = {"messages": [{"role": "user", "content": "y"}], "tools": tools}
            await client.post(f"{task.openai_base_url}/chat/completions", json=body)
        return 1.0

    gateway = GatewayConfig(parse_calls=parse_calls, chat=False)
    with pytest.raises(AgentFault, match=r"the gateway failed at a request.*KeyError"):
        await create_agent_generate_fn(agent, [LedgerEngine()], TOKENIZER, PARAMS, gateway=gateway)(PROMPT, 1)


def test_a_gateway_of_agents_has_no_port_of_its_own():
    with pytest.raises(ConfigError, match=r"GatewayConfig\.port is 9000"):
        create_agent_generate_fn(["true"], [LedgerEngine()], TOKENIZER, PARAMS, gateway=GatewayConfig(port=9000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ask([{'role': 'user', 'content': 'x'}]); sys.exit('bad luck')",
            r"exit status 1.*bad luck.*--agent\.failed-reward.*--agent\.on-error retry",
        ),
        ("pass", "sampled nothing: it reports no reward.*It must send its requests to OPENAI_BASE_URL"),
        ("ask([])", r"sampled nothing, since its requests were refused \(1\): it ended with exit status 1"),
        ("ask([{'role': 'user', 'content': 'x'}]); print('{\"reward\": \"much\"}')", "expected a finite number"),
        ("ask([{'role': 'user', 'content': 'x'}]); print('9' * 400)", "expected a finite number"),
        ("ask([{'role': 'user', 'content': 'x'}]); import time; time.sleep(60)", "longer than 4 s"),
    ],
)
async def test_failures_are_raised_dropped_or_scored(write_program, text, message):
    command, timeout_s = write_program(text), 4 if "longer" in message else 60  # a busy machine takes seconds to start a program
    with pytest.raises(AgentFault, match=message):
        await create(command, timeout_s=timeout_s)[1](PROMPT, 1)
    _, generate = create(command, timeout_s=timeout_s, on_error="drop", failed_reward=-1.0)
    (sample,) = await generate(PROMPT, 1)
    if "nothing" in message:
        assert (sample.status, sample.reward) == (Status.FAILED, None)
        assert generate.take_counts()["num_episodes_failed_infrastructure"] == 1
    else:
        assert sample.reward == -1.0
        assert sample.status is (Status.TRUNCATED if "longer" in message else Status.COMPLETED)
        assert len(sample.turns) == 1


async def test_requests_that_are_refused_before_their_bodies_are_read_are_told_as_well():
    async def agent(task):
        async with httpx.AsyncClient() as client:
            await client.post(f"{task.openai_base_url}/chat/completions", headers={"host": "example.org"}, json={})
        return 1.0

    with pytest.raises(AgentFault, match=r"sampled nothing, since its requests were refused \(1\)"):
        await create(agent)[1](PROMPT, 1)


async def test_a_failed_run_is_begun_again_with_nothing_of_it_left():
    attempts = []

    async def agent(task):
        attempts.append(task.openai_base_url)
        async with httpx.AsyncClient() as client:
            await ask(task, "x", client)
        if len(attempts) == 1:
            raise ValueError("once")
        return 1.0

    engine, generate = create(agent, on_error="retry")
    (sample,) = await generate(PROMPT, 1)
    assert len(attempts) == len(set(attempts)) == 2
    assert len(sample.turns) == 1
    assert len(engine.ledger) == 2
    assert generate.take_counts()["num_episodes_retried"] == 1


async def test_limits_truncate_a_run():
    async def agent(task):
        async with httpx.AsyncClient() as client:
            while await ask(task, "x", client) != 403:
                pass
        return 1.0

    _, generate = create(agent, max_answers=3)
    (sample,) = await generate(PROMPT, 1)
    assert (len(sample.turns), sample.status, sample.reward) == (3, Status.TRUNCATED, 1.0)


async def test_an_aborted_run_is_pending_and_begun_anew():
    async def agent(task):
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(3):
                await ask(task, "x", client)
        return 1.0

    engine, generate = create(agent, FakeEngine(random_answer(mean_length=3), seconds_per_token=0.02))
    groups = []

    async def run():
        groups.append(await generate(PROMPT, 2))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        while len(engine.pending_requests) < 2:
            await trio.sleep(0.005)
        await engine.abort()
    assert [sample.status for sample in groups[0]] == [Status.PENDING] * 2
    assert [sample.status for sample in await generate(PROMPT, 2, groups[0])] == [Status.COMPLETED] * 2


async def test_errors_of_the_engine_are_raised_as_they_are():
    async def agent(task):
        async with httpx.AsyncClient() as client:
            await ask(task, "x", client)
        await trio.sleep_forever()

    _, generate = create(agent, FakeEngine(error_for=lambda prompt, seed: EngineError("dead")))
    with trio.fail_after(10), pytest.raises(EngineError, match="dead"):
        await generate(PROMPT, 2)


async def test_the_rollout_manager_makes_batches_of_runs(write_program):
    command = write_program('ask([{"role": "user", "content": task["prompt"]}]); print(1 if task["sample"] else 0)')
    engine, generate = create(command)
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate)
    async with AsyncRolloutManager(DataBuffer([PROMPT, PROMPT]), config, engines=[engine]) as manager:
        batch = await manager.generate_batch()
    assert batch.rewards == [0.0, 1.0, 0.0, 1.0]


async def test_nothing_of_a_program_is_left(tmp_path):
    script = tmp_path / "parent.sh"
    script.write_text("sleep 1000 & echo $! > child; sleep 1000")
    with trio.move_on_after(30) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run_program(["sh", str(script)], b"", environment=os.environ, directory=str(tmp_path)))
            while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text().strip():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught
    child = int((tmp_path / "child").read_text())
    with trio.fail_after(10):
        while os.path.exists(f"/proc/{child}") and "Z" not in open(f"/proc/{child}/stat").read().split()[2]:  # noqa: SIM115
            await trio.sleep(0.01)


async def test_a_program_that_is_not_there_is_a_mistake_of_the_command():
    with pytest.raises(ConfigError, match="no-such-program"):
        await create(["no-such-program"])[1](PROMPT, 1)
    with pytest.raises(ConfigError, match="close its quotes"):
        create("python 'a")


async def test_programs_get_the_variables_that_they_are_given_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    result = await run_program([sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"], b"", environment={"A": "1"})
    found = json.loads(result.last_line)
    assert found["A"] == "1" and "SECRET_OF_MINE" not in found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True])
def test_a_reward_of_failed_programs_is_a_finite_number(value: float):
    with pytest.raises(ConfigError, match=r"AgentConfig.failed_reward is .*expected a finite number, or None"):
        AgentConfig(failed_reward=value)


async def test_streams_that_are_refused_are_told_as_well():
    async def agent(task):
        async with httpx.AsyncClient() as client:
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            await client.post(f"{task.openai_base_url}/chat/completions", json=body)
        return 1.0

    engine = FakeEngine(error_for=lambda prompt, seed: EngineContextError("too long"))
    with pytest.raises(AgentFault, match=r"sampled nothing, since its requests were refused \(1\)"):
        await create(agent, engine)[1](PROMPT, 1)


def test_other_ends_of_lines_are_part_of_the_report():
    report = '{"reward": 1, "reason": "a\u2028b\x85c"}'
    assert ProgramResult(status=0, stdout=f"log\n{report}\n", stderr="").last_line == report
