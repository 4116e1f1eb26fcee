"""Secrets of a run's environment and of what others tell it: in none of its files, on neither of its streams. Canaries say so."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path

import httpx
import needs
import pytest
from forked import Child, run

from integration.command import main
from integration.settings.sections.engine import EngineSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.launch.commands import ServerConfig, build_environment
from rollouts.errors import ConfigError
from rollouts.testing import create_tiny_model

KEY = "canary-key-4711-of-the-servers"
SECRETS = {
    "ENGINE_KEY": KEY,
    "VLLM_API_KEY": "canary-variable-of-vllm",
    "HF_TOKEN": "hf_canaryOfTheHub0123456789abcdefg",
    "WANDB_API_KEY": "canary0wandb0123456789abcdef01234567890a",
    "ROLLOUTS_RANK_TOKEN": "canary-rank-" + "0123456789abcdef" * 3,
}
USERINFO, QUERY = "canary-in-userinfo", "canary-in-query"  # secrets in the address that the reward function's error names
ALL = (*SECRETS.values(), USERINFO, QUERY)
SMALL = (
    "--rl.num-steps 2 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --evaluation.num-prompts 2 --num-threads 1 --sft.num-steps 2 "
    "--sft.batch-size 4"
).split()

COMMAND = """
import json, os, sys
os.environ.update(json.loads(sys.argv[1]))
from integration.command import main
sys.exit(main(sys.argv[2:]))
"""

SERVER = """
import sys
from pathlib import Path
import trio
from rollouts.testing import FakeVLLMServer
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.vllm.settings import VLLMSettings

async def serve():
    model, key, after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    refusal = Fault("status", path="/inference/v1/generate", after=after, times=None, status=401, body=f"Incorrect API key: {key}!")
    async with FakeVLLMServer(model, VLLMSettings(api_key=key), faults=[refusal] if after >= 0 else []) as server:
        print(server.url, flush=True)
        await trio.sleep_forever()

trio.run(serve)
"""

REWARD = f"""
def fails(sample):
    if sample.index % 2:
        raise OSError("GET https://me:{USERINFO}@host/score?api_key={QUERY} failed")
    return 0.5
"""


def command(folder: Path, *argv: object) -> tuple[int, str, str]:
    """Run the command with the secrets in its environment: exit status, stdout, stderr."""
    return run(COMMAND, json.dumps(SECRETS), *argv, folder=folder)


def find_leaks(folder: Path) -> list[str]:
    """Name every file under a folder, the streams of its processes included, that holds a secret, and the secret."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert files, f"{folder} holds nothing to look at"
    found = [(path, path.read_bytes()) for path in files]
    return [f"{path.relative_to(folder)}: {secret}" for path, content in found for secret in ALL if secret.encode() in content]


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Generator[tuple[str, Path]]:
    """A fake vLLM with a key, its address and model; the parameter is the number of requests after which it refuses the key, -1 = never."""
    model = tmp_path / "model"
    create_tiny_model().save_pretrained(model)
    create_char_tokenizer().save_pretrained(model)
    with Child(SERVER, model, KEY, request.param, folder=tmp_path / "of the server") as child:
        yield child.wait_for_lines(1)[0], model


@pytest.mark.slow
@pytest.mark.parametrize("server", [-1], indirect=True)
def test_keys_of_servers_are_in_no_file_of_a_run_and_of_its_report(server: tuple[str, Path], tmp_path: Path):
    url, model = server
    place = tmp_path / "place"
    engine = ["--engine.kind", "vllm", "--engine.urls", url, "--engine.api-key-variable", "ENGINE_KEY"]
    (tmp_path / "reward.py").write_text(REWARD)
    reward = ["--reward.function", f"{tmp_path}/reward.py:fails", "--reward.on-error", "zero"]
    told = command(place / "1", "train", "--mode", "rl", "--model.path", model, *engine, *reward, *SMALL, "--output-dir", place / "run")
    assert told[0] == 0, told
    assert any("GET https://***@host/score?***" in path.read_text() for path in (place / "run" / "rl" / "trajectories").iterdir())
    assert json.loads((place / "run" / "config.json").read_text())["engine"]["api_key_variable"] == "ENGINE_KEY"
    for i, words in enumerate((["report"], ["verify"], ["view"])):
        assert command(place / f"2{i}", *words, place / "run")[0] == 0
    assert (place / "run" / "report.html").stat().st_size > 10_000
    told = command(place / "3", "train", "--mode", "rl", "--model.path", model, *engine, *reward, "--dry-run")
    assert told[0] == 0 and "ENGINE_KEY" in told[1], told
    assert find_leaks(place) == []


@pytest.mark.parametrize("server", [6], indirect=True)
def test_a_key_that_the_server_quotes_when_it_refuses_it_is_in_no_message(server: tuple[str, Path], tmp_path: Path):
    url, model = server
    place = tmp_path / "place"
    engine = ["--engine.kind", "vllm", "--engine.urls", url, "--engine.api-key-variable", "ENGINE_KEY"]
    status, _, error = command(place / "1", "train", "--mode", "rl", "--model.path", model, *engine, *SMALL, "--output-dir", place / "run")
    assert (status, "HTTP status 401: Incorrect API key: ***!" in error) == (1, True), error
    assert find_leaks(place) == []


@pytest.mark.slow
def test_the_default_job_leaves_no_secret_of_its_environment(tmp_path: Path):
    (tmp_path / "reward.py").write_text(REWARD)
    small = [*SMALL, "--model.hidden-size", 32, "--model.num-layers", 1, "--model.intermediate-size", 32]
    place, reward = tmp_path / "place", ["--reward.function", f"{tmp_path}/reward.py:fails", "--reward.on-error"]
    status, _, error = command(place / "1", "train", *small, *reward, "drop", "--output-dir", place / "run")
    assert (status, "https://***@host" in error) == (1, True), error  # every group has a sample that fails, and is dropped
    pairs = ["--mode", "rl", "--algorithm", "online_dpo"]
    assert command(place / "2", "train", *small, *pairs, *reward, "zero", "--output-dir", place / "other")[0] == 0
    assert command(place / "3", "report", place / "other")[0] == 0
    assert find_leaks(place) == []


AGENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
urllib.request.urlopen(request).read()
told = json.dumps(dict(os.environ))
if task["sample"] == 1:
    sys.exit(f"the program cannot go on with {told}")
print(json.dumps({"reward": task["sample"], "reason": f"{'ROLLOUTS_RANK_TOKEN' in told}: {told}"}))
"""


@pytest.mark.slow
def test_a_program_that_plays_the_rollouts_and_tells_its_environment_tells_no_secret(tmp_path: Path):
    """It has the user's variables, as it may need them, and not the secret of the ranks."""
    (tmp_path / "agent.py").write_text(AGENT)
    place, agent = tmp_path / "place", ["--agent.command", f"{sys.executable} -S {tmp_path}/agent.py"]
    small = ["--rl.num-steps", 1, "--model.hidden-size", 32, "--model.num-layers", 1, "--model.intermediate-size", 32]
    argv = ["train", "--mode", "rl", "--task", "calculator", *SMALL, *small, *agent, "--output-dir"]
    status, _, error = command(place / "1", *argv, place / "run", "--agent.failed-reward", 0)
    assert status == 0, error
    status, _, error = command(place / "2", *argv, place / "other")
    assert status == 1 and '"HF_TOKEN": "***"' in error, error
    found = "".join(path.read_text() for path in (place / "run" / "rl" / "trajectories").iterdir())
    assert "it ended with exit status 1" in found and "ENGINE_KEY" in found, "its errors and its reasons are kept"
    assert "False: " in found and "True: " not in found
    assert find_leaks(place) == []


TOKEN = "canary-token-of-the-gateway"
HEADERS = [
    {"authorization": f"Bearer {TOKEN}"}, {"authorization": f"Bearer {TOKEN}:mine"}, {"x-api-key": f"{TOKEN}:mine"},
    {"authorization": f"Bearer {KEY}"}, {"x-api-key": f"{TOKEN}:{KEY}/"}, {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {TOKEN}:mine", "cookie": f"a={KEY}", "x-mcp-key": KEY, "openai-organization": KEY},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("has_token", [True, False])
def test_keys_of_requests_are_in_no_recording_and_no_answer_of_a_gateway(has_token: bool, tmp_path: Path):
    place, record = tmp_path / "place", tmp_path / "place" / "record.jsonl"
    token = ["--token-variable", "GATEWAY_TOKEN"] if has_token else []
    environment = json.dumps(SECRETS | {"GATEWAY_TOKEN": TOKEN})
    told: list[str] = []
    with Child(COMMAND, environment, "gateway", *token, "--record", record, "--max-tokens", 4, folder=place / "streams") as child:
        url = child.wait_for_lines(1)[0]
        with httpx.Client(trust_env=False, timeout=60) as client:
            for headers in HEADERS:
                for path, body in (
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                    (
                        "/sessions/other/v1/messages",
                        {"max_tokens": 2, "messages": [{"role": "user", "content": "b"}], "metadata": {"user_id": "u"}},
                    ),
                    ("/v1/chat/completions", {"messages": 7}),
                    (f"/v1/nothing?api_key={QUERY}", {}),
                ):
                    answer = client.post(url.removesuffix("/v1") + path, headers=headers, json={"model": "m", **body})
                    told.append(f"{answer.status_code} {answer.headers} {answer.text}")
        statuses = {line[:3] for line in told}
        assert {"200", "400", "404"} <= statuses and ("401" in statuses) == has_token, told
    assert '"session": "other"' in record.read_text() and ('"session": "mine"' in record.read_text()) == has_token
    (place / "told").write_text("\n".join(told))
    assert find_leaks(place) == [] and TOKEN not in "".join(path.read_text() for path in place.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("server", [-1, 0], indirect=True)
def test_the_key_of_a_teachers_server_is_in_nothing_that_the_doctor_says(server: tuple[str, Path], tmp_path: Path):
    url, model = server
    teacher = ["--rl.algorithm", "opd", "--teacher.url", url, "--teacher.tokenizer", model, "--teacher.api-key-variable", "ENGINE_KEY"]
    argv = ["doctor", "--json", "--rows", 2, "--mode", "rl", "--model.path", model, *SMALL, *teacher, "--resume-timeout-s", 0]
    status, out, error = command(tmp_path / "place", *argv)
    assert "teacher" in out and status in (0, 1), (out, error)
    assert find_leaks(tmp_path / "place") == []


@pytest.mark.parametrize(
    "options",
    [
        ["--task", "calculator", "--agent.command", f"python agent.py --api-key={KEY}"],
        ["--task", "calculator", "--agent.command", f"python agent.py http://me:{USERINFO}@host"],
        ["--engine.kind", "vllm", "--engine.urls", f"http://me:{USERINFO}@127.0.0.1:1"],
        ["--engine.kind", "vllm", "--engine.urls", f"http://127.0.0.1:1/?api_key={QUERY}"],
        ["--engine.kind", "vllm", "--engine.launch", f"--engine.extra-args=--api_key={KEY}"],
        ["--log", f"mlflow(tracking_uri='http://me:{USERINFO}@host')"],
    ],
)
def test_secrets_among_the_settings_are_refused_before_a_directory_is_made_and_not_repeated(options: list[str], tmp_path: Path):
    status, _, error = command(tmp_path / "1", "train", *options, "--output-dir", tmp_path / "run")
    assert (status, "which the files" in error) == (2, True), error
    assert not (tmp_path / "run").exists()
    assert find_leaks(tmp_path) == []


@pytest.mark.slow
@needs.LINUX
def test_two_ranks_leave_no_secret(tmp_path: Path):
    fsdp = ["--backend.kind", "fsdp", "--backend.num-processes", 2]
    status, _, error = command(tmp_path / "1", "train", *SMALL, *fsdp, "--output-dir", tmp_path / "run")
    assert status == 0, error
    assert find_leaks(tmp_path) == []


@pytest.mark.parametrize(
    "argument", ["--api-key=x", "--api_key", "--api-k", "--hf-token", "--hf_token=x", "--url=http://a:b@c", "--admin-api-key"]
)
def test_a_key_among_the_arguments_of_a_server_is_refused_however_it_is_written(argument: str):
    with pytest.raises(ConfigError, match="extra_args has a key"):
        EngineSection(kind="sglang", launch=True, extra_args=(argument,))


@pytest.mark.parametrize("argument", ["--api-server-count=2", "--model=x", "-O3", "--enable-prefix-caching", "0.4"])
def test_other_arguments_of_a_server_are_not(argument: str):
    EngineSection(kind="vllm", launch=True, extra_args=(argument,))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_launched_server_does_not_get_the_secret_of_the_ranks(kind):
    environment = build_environment(ServerConfig(kind, "model", "python"), {**SECRETS, "ROLLOUTS_RANK_TOKEN_FILE": "file"})
    assert not [name for name in environment if name.startswith("ROLLOUTS_RANK_TOKEN")]
    assert environment["VLLM_API_KEY"] == SECRETS["VLLM_API_KEY"], "the server reads its key there"


ADDRESS = f"http://me:{USERINFO}@127.0.0.1:1/x?api_key={QUERY}"
TOLD = f"Authorization: Bearer {KEY}, --api-key={KEY}, {ADDRESS}"
READING = {  # of each program, arguments that name nothing; RUN is a damaged run
    "report": [[ADDRESS], ["RUN"], ["RUN", "--output", f"RUN/no such folder/{ADDRESS}"]],
    "view": [[ADDRESS], ["RUN"], ["RUN", "--step", "0"]],
    "verify": [[ADDRESS], ["RUN"], ["RUN", "--json"]],
    "eval": [[ADDRESS, "--task", "sort"], ["RUN", "--tasks", ADDRESS], ["RUN", "--answer", f"{ADDRESS}:f"]],
    "doctor": [["--data.path", ADDRESS, "--task", "jsonl"], ["--model.path", ADDRESS], ["--reward.function", f"{ADDRESS}:f"]],
    "convert": [[ADDRESS, "TARGET"], ["RUN", "TARGET"], ["RUN", ADDRESS]],
    "reward": [["--reward.function", f"{ADDRESS}:f", "--data.path", ADDRESS]],
    "simulate": [["--config", ADDRESS], ["--lengths", ADDRESS]],
    "gateway": [[ADDRESS], ["--model.path", ADDRESS, "--model.device", ADDRESS], ["--token-variable", ADDRESS], ["--record", ADDRESS]],
    "tinker": [[ADDRESS], ["--model.path", ADDRESS, "--model.device", ADDRESS], ["--token-variable", ADDRESS], ["--host", ADDRESS]],
    "train-reward-model": [["--data.path", ADDRESS], ["--model.path", ADDRESS]],
}


@pytest.mark.parametrize(("program", "number"), [(name, i) for name, cases in READING.items() for i in range(len(cases))])
def test_an_error_of_a_program_that_reads_shows_no_secret(
    program: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    (run / "rl" / "trajectories").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"command": TOLD, "task": TOLD}))
    (run / "config.json").write_text(json.dumps({"task": TOLD, TOLD: 1}))
    (run / "rl" / "metrics.jsonl").write_text(f"{TOLD}\n")
    (run / "rl" / "trajectories" / "step_0000.jsonl").write_text(f'{{"sample": "{TOLD}"}}\n')
    (run / "warnings.jsonl").write_text(f'{{"{TOLD}": 1\n')
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    given = [word.replace("RUN", str(run)).replace("TARGET", str(tmp_path / "target")) for word in READING[program][number]]
    try:
        status = main([program, *given])
    except SystemExit as error:  # of the parser
        status = error.code
    told = capsys.readouterr()
    assert status not in (0, None), told
    assert told.err or told.out
    assert [secret for secret in ALL if secret in told.out + told.err] == [], told
