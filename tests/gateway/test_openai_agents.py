"""Agents of the OpenAI Agents SDK, unchanged, in an environment of their own: the program of the page about agents of other frameworks."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import needs
import pytest
from chat_templates import CHATML, create_tokenizer, encode
from ledgers import LedgerEngine, check_same, list_sampled, list_trained
from page_blocks import ROOT, run_command, write_files

from rollouts.gateway import AgentConfig, create_agent_generate_fn
from rollouts.types import Prompt, SamplingParams, Status

pytestmark = [needs.OPENAI_AGENTS, pytest.mark.slow]

PAGE = ROOT / "docs" / "agent-frameworks.md"
PYTHON = os.environ.get("OPENAI_AGENTS_PYTHON", "")
VARIABLES = {"PATH": os.environ.get("PATH", ""), "OPENAI_AGENTS_DISABLE_TRACING": "1"}
TOOL_CHATML = "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML
TOKENIZER = create_tokenizer(TOOL_CHATML)
PROMPT = Prompt(content="(1+1)*3", index=4, metadata={"ground_truth": "6"})
CHAT = "import agents, runpy; agents.set_default_openai_api('chat_completions'); runpy.run_path('solver.py', run_name='__main__')"

HANDOFF = """
import json, sys
from agents import Agent, Runner

task = json.loads(sys.stdin.readline())
solver = Agent(name="solver", instructions="Solve it.", model="any")
desk = Agent(name="desk", instructions="Hand over.", handoffs=[solver], model="any")
result = Runner.run_sync(desk, task["prompt"])
print(json.dumps({"reward": float(result.last_agent is solver), "reason": result.final_output}))
"""


def say(text):
    return (*encode(TOKENIZER, text), TOKENIZER.convert_tokens_to_ids("<|im_end|>"))


def call(name, arguments):
    return f'so <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calculate(prompt, seed):
    """A model that computes (1+1)*3 with two calls; the first is wrong, as models begin."""
    text = TOKENIZER.decode(prompt)
    if "tool\n6" in text:
        return say("6")
    if "tool\n2" in text:
        return say(call("calc", '{"e": "2*3"}'))
    return say(call("calc", '{"e": "1+1"}' if "rror" in text.split("(1+1)*3")[1] else '{"e": "1+"}'))


def create(command, answer, folder, **config):
    engine = LedgerEngine(answer)
    settings = AgentConfig(environment=VARIABLES, directory=str(folder), timeout_s=100, **config)
    return engine, create_agent_generate_fn(command, [engine], TOKENIZER, SamplingParams(max_tokens=200), config=settings)


@pytest.mark.parametrize("command", [["solver.py"], ["-c", CHAT]], ids=["responses", "chat"])
async def test_the_program_of_the_page_calls_its_tool_in_several_turns(command, tmp_path: Path):
    write_files(PAGE, tmp_path)
    engine, generate = create([PYTHON, *command], calculate, tmp_path)
    group = await generate(PROMPT, 2)
    for sample in group:
        assert (sample.reward, sample.status) == (1.0, Status.COMPLETED)
        assert (len(sample.turns), sample.context_starts) == (4, ()), "a wrong call, two calls and the answer, token for token"
    assert Counter(turn for sample in group for turn in list_trained(sample)) == Counter(list_sampled(engine.ledger))


async def test_an_agent_that_hands_over_to_another_is_one_sample_of_two_contexts(tmp_path: Path):
    def answer(prompt, seed):
        return say("6" if "Solve it." in TOKENIZER.decode(prompt) else call("transfer_to_solver", "{}"))

    (tmp_path / "handoff.py").write_text(HANDOFF)
    engine, generate = create([PYTHON, "handoff.py"], answer, tmp_path)
    (sample,) = await generate(PROMPT, 1)
    assert (sample.reward, sample.reward_details.reason) == (1.0, "6")
    assert (len(sample.turns), len(sample.context_starts)) == (2, 1), "other instructions are another history"
    check_same(sample, engine.ledger)


async def test_a_model_that_never_stops_calling_ends_at_the_frameworks_own_limit(tmp_path: Path):
    write_files(PAGE, tmp_path)
    engine, generate = create([PYTHON, "solver.py"], lambda prompt, seed: say(call("calc", '{"e": "1+1"}')), tmp_path, failed_reward=-1.0)
    (sample,) = await generate(PROMPT, 1)
    assert sample.reward == -1.0 and "MaxTurnsExceeded" in sample.episode.error
    assert len(sample.turns) == len(engine.ledger) == 5
    check_same(sample, engine.ledger)


@pytest.mark.timeout(600)
def test_the_command_of_the_page_trains_it_also_where_the_framework_takes_no_answer_that_was_cut(tmp_path: Path):
    write_files(PAGE, tmp_path)
    few = "--rl.num-steps 1 --rl.prompts-per-step 1 --rl.samples-per-prompt 2 --evaluation.num-prompts 1"
    run = f"rollouts train --task calculator --mode rl --agent.command '{PYTHON} solver.py' --agent.failed-reward 0 {few} --output-dir run"
    run_command(run, tmp_path, {"OPENAI_AGENTS_DISABLE_TRACING": "1"})
    assert (tmp_path / "run" / "summary.json").stat().st_size > 0


@pytest.mark.timeout(600)
def test_a_function_runs_the_agent_in_the_process_of_training(tmp_path: Path):
    write_files(PAGE, tmp_path)
    script = """
import sys
sys.path += sys.argv[1:]  # behind the packages of this environment
import trio
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.gateway import create_agent_generate_fn
from rollouts.testing import FakeEngine, random_answer
from rollouts.types import Prompt, SamplingParams
from in_process import play
engine = FakeEngine(random_answer(mean_length=3))
generate = create_agent_generate_fn(play, [engine], create_char_tokenizer(), SamplingParams(max_tokens=20))
group = trio.run(generate, Prompt(content="1+1=", metadata={"ground_truth": "2"}), 3)
print([(sample.reward, len(sample.turns)) for sample in group])
"""
    (tmp_path / "script.py").write_text(script)
    command = [PYTHON, "script.py", *needs.import_path()]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **VARIABLES}, capture_output=True, text=True, timeout=400)
    assert done.stdout == "[(0.0, 1), (0.0, 1), (0.0, 1)]\n", done.stderr[-2000:]
