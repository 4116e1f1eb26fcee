"""Environments of the real package `verifiers` as agents: single turns, tools, failures, cancellation, and the command."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import needs
import pytest
import trio
from chat_templates import CHATML, create_tokenizer, encode
from contract_engines import save_model
from ledgers import LedgerEngine, check_same, list_sampled, list_trained
from page_blocks import ROOT, run_command, write_files

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError, EpisodeError
from rollouts.gateway import AgentConfig, create_agent_generate_fn, create_verifiers_agent, load_verifiers_prompts
from rollouts.gateway.agent_runs import AgentFault
from rollouts.gateway.frameworks import verifiers
from rollouts.testing import FakeEngine, create_tiny_model, random_answer
from rollouts.types import Prompt, SamplingParams, Status

PAGE = ROOT / "docs" / "agent-frameworks.md"
SUBPROCESS = {"runtime": {"type": "subprocess"}}
SUMS = {"taskset": {"id": "sums"}, "agent": SUBPROCESS}
TOOLS = {"taskset": {"id": "products"}, "agent": SUBPROCESS}
CHAR_TOKENIZER = create_char_tokenizer()
TOKENIZER = create_tokenizer("{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 3}}\n</tool_call>'

# a tool environment: each episode has a tool server of its own, and the harness loops in this process
PRODUCTS = """
    import itertools, json
    import verifiers.v1 as vf
    from mcp import Client
    from openai import AsyncOpenAI

    __all__ = ["ProductsHarness", "ProductsTaskset"]

    class ProductData(vf.TaskData):
        answer: str
        fails: bool = False

    class Multiply(vf.Toolset[vf.ToolsetConfig]):
        @vf.tool
        async def multiply(self, a: int, b: int) -> int:
            "Multiply."
            return a * b

    class ProductTask(vf.Task[ProductData]):
        @classmethod
        def toolsets(cls, config):
            return [Multiply(vf.ToolsetConfig())]

        @vf.reward(weight=0.5)
        async def is_right(self, trace) -> float:
            if self.data.fails:
                raise ValueError("no judge")
            return float(trace.last_reply == self.data.answer)

        @vf.metric
        async def num_results(self, trace) -> float:
            return float(sum(message.role == "tool" for message in trace.branches[-1].messages))

    class ProductsTaskset(vf.Taskset[ProductTask]):
        INFINITE = True

        def load(self):
            for a in itertools.count(2):
                yield ProductTask(ProductData(prompt=f"{a}*3=", answer=str(3 * a), fails=a == 3), self.config.task)

    class ProductsHarness(vf.Harness[vf.HarnessConfig]):
        EXECUTES_CODE = NEEDS_CONTAINER = False
        SUPPORTS_MCP = True

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            (url,) = mcp_urls.values()
            messages = [{"role": "user", "content": data.prompt}]
            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client, Client(url) as server:
                listed = (await server.list_tools()).tools
                tools = [
                    {"type": "function", "function": {"name": one.name, "description": one.description, "parameters": one.input_schema}}
                    for one in listed
                ]
                while True:
                    answer = (await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)).choices[0].message
                    messages.append(answer.model_dump(exclude_none=True))
                    if not answer.tool_calls:
                        return vf.ProgramResult(exit_code=0, stdout=answer.content or "", stderr="")
                    for call in answer.tool_calls:
                        result = await server.call_tool(call.function.name, json.loads(call.function.arguments))
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})

    if __name__ == "__main__":
        Multiply.run()
"""


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the environments, which can be imported, also by the servers that verifiers starts."""
    write_files(PAGE, tmp_path)
    (tmp_path / "products.py").write_text(textwrap.dedent(PRODUCTS))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("sums", "products", "stuck"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def add(prompt, seed):
    """A model that adds 1, and is wrong for some seeds."""
    a = int(re.search(r"(\d+)\+1=", CHAR_TOKENIZER.decode(prompt))[1])
    return (*CHAR_TOKENIZER.encode(str(a + 1 + seed % 2), add_special_tokens=False), CHAR_TOKENIZER.eos_token_id)


def multiply(prompt, seed):
    """A model that calls the tool, and answers with its result."""
    text = TOKENIZER.decode(prompt)
    results = text.split("tool\n")[1:]
    call = CALL.replace("1", re.search(r"(\d+)\*3=", text)[1])
    return (*encode(TOKENIZER, results[-1].split("<")[0] if results else call), TOKENIZER.convert_tokens_to_ids("<|im_end|>"))


def create(environment, engine, tokenizer=CHAR_TOKENIZER, start_s=300.0, **config):
    settings = AgentConfig(timeout_s=100, **config)
    play = create_verifiers_agent(environment, start_s=start_s)
    return create_agent_generate_fn(play, [engine], tokenizer, SamplingParams(max_tokens=200), config=settings)


def list_loops():
    """The threads in which verifiers runs."""
    return [thread.name for thread in threading.enumerate() if "portal" in thread.name]


@needs.VERIFIERS
@pytest.mark.slow
async def test_the_environment_of_the_page_judges_what_the_policy_sampled(environments: Path):
    prompts = load_verifiers_prompts(SUMS)
    assert (len(prompts), prompts[7].content, prompts[7].metadata["verifiers_task"]["answer"]) == (64, "7+1=", "8")
    engine = LedgerEngine(add)
    generate = create(SUMS, engine)
    groups = []

    async def play(prompt):
        groups.append(await generate(prompt, 4))

    async with trio.open_nursery() as nursery:  # runs of several groups share one thread of verifiers
        for prompt in prompts[:3]:
            nursery.start_soon(play, prompt)
    samples = [sample for group in groups for sample in group]
    for sample in samples:
        right = sample.response == sample.metadata["verifiers_task"]["answer"]
        assert (sample.reward, sample.status, len(sample.turns)) == (float(right), Status.COMPLETED, 1)
        assert sample.reward_details.reason == f"is_right {float(right):g}; stopped by agent_completed"
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    assert Counter(turn for sample in samples for turn in list_trained(sample)) == Counter(list_sampled(engine.ledger))
    assert not list_loops(), "nothing of verifiers is left"


@needs.VERIFIERS
@pytest.mark.slow
async def test_an_environment_with_tools_is_one_context_of_several_turns(environments: Path):
    (prompt, failing) = load_verifiers_prompts(TOOLS, 2)
    engine = LedgerEngine(multiply)
    generate = create(TOOLS, engine, TOKENIZER)
    (sample,) = await generate(prompt, 1)
    assert (sample.reward, len(sample.turns), sample.context_starts) == (0.5, 2, ())
    assert sample.reward_details.reason == "is_right 0.5; num_results 1; stopped by agent_completed"
    check_same(sample, engine.ledger)
    (sample,) = await create(TOOLS, engine, TOKENIZER, failed_reward=-1.0)(failing, 1)
    assert sample.reward == -1.0 and len(sample.turns) == 2
    assert re.search(r"the episode of products failed: TaskError.*no judge", sample.episode.error)


@needs.VERIFIERS
@pytest.mark.slow
async def test_a_limit_of_the_seat_ends_an_episode_that_is_scored(environments: Path):
    def call(prompt, seed):
        return (*encode(TOKENIZER, CALL), TOKENIZER.convert_tokens_to_ids("<|im_end|>"))

    (prompt,) = load_verifiers_prompts(TOOLS, 1)
    generate = create({**TOOLS, "agent": {**SUBPROCESS, "max_turns": 2}}, LedgerEngine(call), TOKENIZER)
    (sample,) = await generate(prompt, 1)
    assert (sample.reward, len(sample.turns)) == (0.0, 2)
    assert sample.reward_details.reason.endswith("stopped by max_turns")


@needs.VERIFIERS
@pytest.mark.slow
async def test_an_episode_that_is_interrupted_ends_in_verifiers_too_and_is_begun_anew(environments: Path):
    engine = FakeEngine(random_answer(mean_length=3), seconds_per_token=lambda prompt, seed: 3600.0 if not released else 0.0)
    released: list[bool] = []
    generate = create(SUMS, engine)
    (prompt,) = load_verifiers_prompts(SUMS, 1)
    groups = []

    async def run():
        groups.append(await generate(prompt, 2))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while len(engine.pending_requests) < 2:
                await trio.sleep(0.005)
            await engine.abort()
        assert [sample.status for sample in groups[0]] == [Status.PENDING] * 2
        assert not list_loops()
        released.append(True)
        assert [sample.status for sample in await generate(prompt, 2, groups[0])] == [Status.COMPLETED] * 2


@needs.VERIFIERS
@pytest.mark.slow
async def test_a_run_that_is_cancelled_is_cancelled_in_verifiers_and_leaves_no_thread(environments: Path):
    begin = "import asyncio\nfrom pathlib import Path\nfrom sums import SumsHarness, SumsTaskset\n__all__ = ['SumsTaskset', 'Sleep']\n"
    play = f"try:\n            await asyncio.sleep(3600)\n        finally:\n            Path({str(environments / 'ended')!r}).touch()"
    launch = f"    async def launch(self, *args):\n        Path({str(environments / 'begun')!r}).touch()\n        {play}\n"
    (environments / "asleep.py").write_text(f"{begin}class Sleep(SumsHarness):\n{launch}")
    (prompt,) = load_verifiers_prompts(SUMS, 1)
    generate = create({"taskset": {"id": "asleep"}, "agent": SUBPROCESS}, LedgerEngine(add))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, prompt, 1)
            while not (environments / "begun").exists():
                await trio.sleep(0.01)
            assert list_loops()
            nursery.cancel_scope.cancel()
    assert (environments / "ended").exists()
    assert not list_loops()


def write_stuck_environment(folder: Path, wait: str) -> dict[str, object]:
    """An environment that notes its start, waits, and notes the end of its wait."""
    begin = "import asyncio, time\nfrom pathlib import Path\nimport verifiers.v1 as vf\nfrom sums import SumsHarness, SumsTaskset\n"
    env = f"""
    __all__ = ["SumsHarness", "SumsTaskset", "Stuck"]
    FOLDER = Path({str(folder)!r})

    class StuckConfig(vf.EnvConfig):
        solver: vf.AgentConfig = vf.AgentConfig()

    class Stuck(vf.Env[StuckConfig]):
        async def start(self):
            with (FOLDER / "starts").open("a") as file:
                file.write("begun ")
            try:
                {wait}
            finally:
                (FOLDER / "ended").touch()

        async def run(self, task, agents): ...
    """
    (folder / "stuck.py").write_text(begin + textwrap.dedent(env))
    return {"taskset": {"id": "stuck"}, "solver": SUBPROCESS}


async def wait_for_loops():
    """Wait until the threads of verifiers have ended."""
    with trio.fail_after(60):
        while list_loops():
            await trio.sleep(0.01)


@needs.VERIFIERS
@pytest.mark.slow
async def test_an_environment_that_never_starts_fails_the_runs_that_wait_for_it_once(environments: Path):
    stuck = write_stuck_environment(environments, "await asyncio.sleep(3600)")
    (prompt,) = load_verifiers_prompts(SUMS, 1)
    with pytest.raises(AgentFault, match=r"'stuck'.*of verifiers did not start within 0.5 s \(start_s of create_verifiers_agent\)"):
        await create(stuck, LedgerEngine(add), start_s=0.5)(prompt, 1)
    await wait_for_loops()
    assert (environments / "ended").exists(), "its start was not cancelled"
    (environments / "starts").unlink()
    with trio.fail_after(60):
        group = await create(stuck, LedgerEngine(add), start_s=0.5, on_error="drop")(prompt, 8)
    assert {sample.status for sample in group} == {Status.FAILED}
    assert (environments / "starts").read_text() == "begun ", "one start for all that waited"
    await wait_for_loops()
    with pytest.raises(ConfigError, match=r"create_verifiers_agent\(start_s=...\) is 0, expected seconds above 0, or None for no limit"):
        create_verifiers_agent(SUMS, start_s=0)


@needs.VERIFIERS
@pytest.mark.slow
@pytest.mark.parametrize("wait", ["await asyncio.sleep(3600)", "while not (FOLDER / 'released').exists(): time.sleep(0.01)"])
async def test_a_start_is_given_up_with_its_run_and_is_closed_when_it_ends(environments: Path, wait: str, caplog):
    stuck = write_stuck_environment(environments, wait)
    (prompt,) = load_verifiers_prompts(SUMS, 1)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create(stuck, LedgerEngine(add), start_s=None), prompt, 1)
            while not (environments / "starts").exists():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert ("blocks its event loop and is left behind" in caplog.text) == wait.startswith("while")
    (environments / "released").touch()
    await wait_for_loops()
    assert (environments / "ended").exists()


async def test_a_start_is_given_up_though_all_threads_that_programs_share_are_taken(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(verifiers, "_NOTICE_S", 60.0)
    limiter = trio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.available_tokens))]
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)
    start = verifiers._Start("sums")
    try:
        with trio.fail_after(30):
            await verifiers._give_up(start)
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)
    with pytest.raises(EpisodeError, match="the start was given up"):
        start._check()
    assert not caplog.text


@needs.VERIFIERS
@pytest.mark.slow
async def test_what_cannot_be_played_is_refused_before_a_run(environments: Path):
    twice = "import verifiers.v1 as vf\nfrom sums import SumsHarness, SumsTaskset\n__all__ = ['SumsHarness', 'SumsTaskset', 'Two']\n"
    seats = "    solver: vf.AgentConfig = vf.AgentConfig()\n    judge: vf.AgentConfig = vf.AgentConfig()\n"
    env = f"class TwoConfig(vf.EnvConfig):\n{seats}\nclass Two(vf.Env[TwoConfig]):\n    async def run(self, task, agents): ...\n"
    (environments / "two.py").write_text(twice + env)
    with pytest.raises(ConfigError, match=r"two has 2 seats without a client \(solver, judge\)"):
        create_verifiers_agent("two")
    with pytest.raises(ConfigError, match="is to retry episodes"):
        create_verifiers_agent({**SUMS, "agent": {**SUBPROCESS, "retries": {"max_retries": 1}}})
    with pytest.raises(ConfigError, match=r"cannot be loaded: ModuleNotFoundError.*no-such-tasks"):
        create_verifiers_agent("no-such-tasks")
    with pytest.raises(ConfigError, match="products have no end"):
        load_verifiers_prompts(TOOLS)
    with pytest.raises(AgentFault, match=r"has no 'verifiers_task' \(there are: a\): make prompts by load_verifiers_prompts"):
        await create(SUMS, LedgerEngine(add))(Prompt(content="x", metadata={"a": 1}), 1)


@needs.VERIFIERS
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_of_the_page_trains_on_the_environment(environments: Path):
    variables = {"PYTHONPATH": f"{ROOT}:{environments}"}
    run_command("python my_env.py", environments, variables)
    rows = [json.loads(line) for line in (environments / "tasks.jsonl").read_text().splitlines()]
    assert (len(rows), rows[2]["prompt"]) == (64, "2+1=")
    few = "--rl.num-steps 1 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --evaluation.num-prompts 2 --generation.max-tokens 4"
    save_model(create_tiny_model(vocab_size=len(TOKENIZER)), TOKENIZER, environments / "model")
    run = f"rollouts train --mode rl --model.path model --data.path tasks.jsonl --agent.function my_env.py:play {few} --output-dir run"
    run_command(run, environments, variables)
    assert (environments / "run" / "summary.json").stat().st_size > 0


@pytest.mark.parametrize("make", [create_verifiers_agent, load_verifiers_prompts])
def test_without_the_package_it_says_what_to_install(make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"need the package verifiers.*pip install 'rollouts-rl\[verifiers\]'"):
        make("gsm8k")


@needs.VERIFIERS
@pytest.mark.slow
async def test_an_episode_that_ends_for_nobody_is_left_behind(environments: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    begin = "import time\nfrom pathlib import Path\nfrom sums import SumsHarness, SumsTaskset\n__all__ = ['SumsTaskset', 'Block']\n"
    play = f"Path({str(environments / 'begun')!r}).touch()\n        while not Path({str(environments / 'released')!r}).exists():\n"
    launch = f"    async def launch(self, *args):\n        {play}            time.sleep(0.01)\n        raise ValueError('late')\n"
    (environments / "blocked.py").write_text(f"{begin}class Block(SumsHarness):\n{launch}")
    monkeypatch.setattr("rollouts.gateway.frameworks.verifiers._END_S", 0.1)
    (prompt,) = load_verifiers_prompts(SUMS, 1)
    generate = create({"taskset": {"id": "blocked"}, "agent": SUBPROCESS}, LedgerEngine(add))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, prompt, 1)
            while not (environments / "begun").exists():
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert "left behind in its thread" in caplog.text
        (environments / "released").touch()
        while list_loops():
            await trio.sleep(0.01)
