"""Programs of users in `rollouts train`, and `rollouts gateway`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from chat_templates import CHATML, create_tokenizer
from contract_engines import save_model
from warm_commands import find_python

from integration.gateway import main as serve
from integration.settings.config import Config
from integration.settings.sections.episodes import AgentSection
from integration.train import main
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model

ROOT = Path(__file__).parents[2]
SMALL = (
    "--mode rl --task calculator --model.hidden-size 32 --model.num-layers 1 --rl.num-steps 2 --rl.prompts-per-step 2 "
    "--rl.samples-per-prompt 2 --evaluation.num-prompts 2 --generation.max-tokens 4 --quiet"
).split()
PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"reward": len(answer)}))
"""


@pytest.mark.parametrize("mode", ["--rl.asynchronous.no-enabled", "--rl.asynchronous.enabled"])
def test_a_program_plays_the_rollouts_of_both_modes(tmp_path: Path, mode: str):
    (tmp_path / "agent.py").write_text(PROGRAM)
    command = f"{sys.executable} {tmp_path / 'agent.py'}"
    assert main([*SMALL, mode, "--agent.command", command, "--output-dir", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines if "reward_mean" in line]
    assert len(rewards) == 2
    assert all(0 < reward <= 4 for reward in rewards)
    assert any(0 < line.get("eval_accuracy", 0) <= 4 for line in lines), "the program plays the held-out problems as well"


def test_a_program_that_reports_no_reward_ends_the_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "agent.py").write_text(PROGRAM.replace('{"reward": len(answer)}', '{"length": len(answer)}'))
    command = f"{sys.executable} {tmp_path / 'agent.py'}"
    assert main([*SMALL, "--agent.command", command, "--output-dir", str(tmp_path / "run")]) != 0
    assert "reports no reward" in capsys.readouterr().err


def test_rows_for_an_agent_that_reports_its_reward_need_no_right_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{k}+1=", "kept": k}) + "\n" for k in range(12)))
    (tmp_path / "agent.py").write_text(
        "import httpx\n\nasync def play(task):\n    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:\n"
        "        body = {'messages': [{'role': 'user', 'content': task.prompt.metadata['kept'] * '+'}]}\n"
        "        await client.post(task.openai_base_url + '/chat/completions', json=body)\n    return 0.5\n"
    )
    tokenizer = create_tokenizer(CHATML)
    save_model(create_tiny_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    own = ["--task", "jsonl", "--model.path", "model", "--data.path", "rows.jsonl"]
    few = [flag for flag in SMALL if flag not in ("--task", "calculator", "--model.hidden-size", "32", "--model.num-layers", "1")]
    few = [*few, "--rl.num-steps", "1"]
    assert main([*own, *few, "--agent.function", "agent.py:play", "--output-dir", "run"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_mean"] for line in lines if "reward_mean" in line] == [0.5]
    assert main([*own, *few, "--output-dir", "unjudged"]) == 2, "without an agent nothing judges such rows"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"agent": AgentSection(command="a"), "task": "grid_world"}, "agent.command is 'a', but the problems of the task 'grid_world'"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(**settings)
    with pytest.raises(ConfigError, match="leave one of them out"):
        AgentSection(command="a", function="a.py:f")
    with pytest.raises(ConfigError, match="close its quotes"):
        AgentSection(command="python 'a")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ["--agent.command", "no-such-program --x"],
            "--agent.command is 'no-such-program --x': the program 'no-such-program' is in no direc",
        ),
        (["--agent.command", "./none.py"], "--agent.command is './none.py': the program './none.py' does not exist"),
        (["--agent.command", "./agent.py"], "--agent.command is './agent.py': the program './agent.py' may not be executed: run chmod +x"),
        (["--agent.command", "./folder"], "--agent.command is './folder': the program './folder' is a directory"),
        (["--agent.command", "agent.py"], "(write ./agent.py for the file here)"),
        (["--agent.command", ""], "--agent.command is '': the command of the agent is empty"),
        (["--agent.function", "agent.py:none"], "--agent.function is 'agent.py:none': agent.py has no function 'none'"),
        (["--agent.function", "agent.py:two"], "expected one parameter, the task of the agent: write async def agent(task)"),
    ],
)
def test_an_agent_that_cannot_start_is_told_before_a_directory_is_made(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("def play(task): return 1.0\nasync def two(task, other): return 1.0\n")
    (tmp_path / "folder").mkdir()
    assert main([*SMALL, *flags, "--output-dir", "run"]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_command_refuses_other_machines_without_a_token(capsys: pytest.CaptureFixture[str]):
    assert serve(["--host", "0.0.0.0"]) == 2
    assert "--token-variable is None" in capsys.readouterr().err
    assert serve(["--token-variable", "NOT_SET_ANYWHERE"]) == 2


def test_an_address_of_another_machine_cannot_be_listened_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GATEWAY_KEY", "some-key")
    assert serve(["--host", "192.0.2.1", "--token-variable", "GATEWAY_KEY"]) == 2
    assert "cannot listen on 192.0.2.1, port 0: " in (told := capsys.readouterr().err) and "Give an address of this machine" in told


def test_the_command_names_its_options_in_what_is_wrong_with_a_cassette(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    there = tmp_path / "there.jsonl"
    there.write_text("x\n")
    assert serve(["--cassette", str(tmp_path / "none.jsonl")]) != 0
    assert "name a file that --record wrote" in capsys.readouterr().err
    assert serve(["--cassette", str(there)]) != 0
    assert "line 1: it is not JSON" in capsys.readouterr().err
    assert serve(["--record", str(there)]) != 0
    assert "--record is" in capsys.readouterr().err


def _ask_served(options: list[str], asks: dict[str, object]) -> httpx.Response:
    """Start the command, ask a session of it, and stop it."""
    command = [find_python(), "-m", "integration.gateway", "--port", "0", *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().replace("/v1", "/sessions/mine/v1")
            answer = httpx.post(f"{url}/chat/completions", json=asks, timeout=60)
            httpx.get(f"{url}/models", timeout=60)  # an interrupt within an answer makes it one that nobody got
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    return answer


@pytest.mark.slow
def test_the_command_serves_the_built_in_model_until_it_is_stopped_and_replays_it_without_one(tmp_path: Path):
    asks = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    tape = str(tmp_path / "tape.jsonl")
    recorded = _ask_served(["--record", tape], asks).json()
    assert recorded["usage"]["completion_tokens"] <= 3
    replayed = _ask_served(["--cassette", tape], asks).json()
    assert replayed["choices"] == recorded["choices"]
    refused = _ask_served(["--cassette", tape], {**asks, "max_tokens": 4})
    assert refused.status_code == 400
    assert "max_tokens is 4, in the recording 3" in refused.json()["error"]["message"]


def _heed_interrupts() -> None:
    """Undo that a shell lets programs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
