"""Ways out and ways in: secrets in what a run writes, sockets that others can reach, and code that comes as data."""

from __future__ import annotations

import ast
import os
import pickle
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import trio

import integration
import rollouts
from benchmarks.reliability.commands import RL, SFT, run_train
from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.listeners import list_listeners
from benchmarks.reliability.mcp_messages import IS_INSTALLED
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.datasets import load_rl_prompts
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.environments import open_mcp_tools
from rollouts.environments.tools.tool import call_tool
from rollouts.errors import RolloutsError
from rollouts.gateway import GatewayConfig, open_gateway
from rollouts.models.loading import load_hf_model
from rollouts.testing import FakeVLLMServer
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.models import ScriptedModel
from rollouts.types import SamplingParams

CANARIES = {
    "HF_TOKEN": "hf_canaryOfTheHub0123456789abcdefg", "WANDB_API_KEY": "canary0wandb0123456789abcdef01234567890a",
    "VLLM_API_KEY": "canary-variable-of-vllm", "GATEWAY_TOKEN": "canary-token-of-the-gateway",
    "ROLLOUTS_RANK_TOKEN": "canary-rank-" + "0123456789abcdef" * 3,
}  # fmt: skip
TOKEN = CANARIES["GATEWAY_TOKEN"]
USERINFO, QUERY = "canary-in-userinfo", "canary-in-query"
_FAILING = f"""
def fails(sample):
    if sample.index % 2:
        raise OSError("GET https://me:{USERINFO}@host/score?api_key={QUERY} failed")
    return 0.5
"""
_QUOTES = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
urllib.request.urlopen(request).read()
if task["sample"]:
    sys.exit(f"the program failed with {os.environ}")
print(json.dumps({"reward": 0.5, "reason": str(os.environ)}))
"""
_TOOLS = """
import json, os, sys
key = os.environ["API_KEY"]
results = {
    "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}},
    "tools/list": {"tools": [{"name": "say", "description": key, "inputSchema": {"type": "object", "title": key}}]},
    "tools/call": {"content": [{"type": "text", "text": key}]},
}
for line in sys.stdin:
    asked = json.loads(line)
    answer = {"result": results[asked["method"]]} if asked["method"] in results else {"error": {"code": -32601, "message": key}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
_SANDBOX = Path("rollouts", "sandbox")


def _find_canaries(folder: Path) -> int:
    secrets = [*CANARIES.values(), USERINFO, QUERY]
    contents = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(contents) > 5, f"{folder} holds too little to look at"
    return sum(secret.encode() in content for content in contents for secret in secrets)


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


def _model() -> ScriptedModel:
    return ScriptedModel(lambda prompt, place, loads, seed: (5, -0.5))


def _load_bombs(folder: Path) -> int:
    """Hand a pickle to whatever reads data, models or answers. Returns how often it was executed."""
    mark = folder / "executed"
    content = pickle.dumps(Bomb(mark))
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    executed = 0
    for name in ("bomb.jsonl", "bomb.parquet", "bomb.json", "model/model.safetensors", "model/pytorch_model.bin"):
        (folder / name).write_bytes(content)

    async def ask() -> None:
        rewrites = Fault("status", "/inference/v1/generate", 0, None, status=200, body=content.decode("latin-1"))
        async with FakeVLLMServer(_model(), faults=[rewrites]) as server, VLLMEngine(server.url, vocab_size=128) as engine:
            await engine.generate((3, 4), SamplingParams(max_tokens=2))

    attempts: list[Callable[[], object]] = [
        *(lambda name=name: load_rl_prompts(folder / name) for name in ("bomb.jsonl", "bomb.parquet", "bomb.json")),
        lambda: load_hf_model(model),
        lambda: trio.run(ask),
    ]
    for attempt in attempts:
        with suppress(RolloutsError, ImportError, OSError, ValueError):
            attempt()
        executed += mark.exists()
        mark.unlink(missing_ok=True)
    return executed


def _loads_naively(folder: Path) -> bool:
    mark = folder / "executed-naively"
    pickle.loads(pickle.dumps(Bomb(mark)))
    return mark.exists()


def _find_dangerous_calls() -> Iterator[str]:
    """Yield the calls in the package that execute data: unpickling, trusted remote code, eval, exec, shells; the sandbox's own aside."""
    for package in (rollouts, integration):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            where = path.relative_to(root.parent)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and is_dangerous(node) and _SANDBOX not in where.parents:
                    yield f"{where}:{node.lineno}"


def is_dangerous(call: ast.Call) -> bool:
    """Whether a call may execute what it is given."""
    name = ast.unparse(call.func)
    keywords = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return (
        name in ("pickle.load", "pickle.loads", "eval", "exec", "os.system")
        or (name == "torch.load" and keywords.get("weights_only") != "True")
        or keywords.get("trust_remote_code") == "True"
        or keywords.get("shell") == "True"
    )


async def _record_session(engine: VLLMEngine, folder: Path) -> None:
    """Record a request of a session at a gateway whose token is a secret, and write what its client gets."""
    config = GatewayConfig(token=TOKEN, record=folder / "record.jsonl", params=SamplingParams(max_tokens=2))
    headers = {"authorization": f"Bearer {TOKEN}:mine", "x-api-key": CANARIES["VLLM_API_KEY"]}
    told: list[str] = []
    async with open_gateway(engine, create_char_tokenizer(), config) as gateway, httpx.AsyncClient(trust_env=False) as client:
        for body in ({"prompt": "a"}, {"prompt": 7.5}):
            answer = await client.post(f"{gateway.url()}/completions", json={"model": "m", **body}, headers=headers)
            told.append(answer.text)
    assert len((folder / "record.jsonl").read_text().splitlines()) == 2, "a request was recorded"
    (folder / "answers").write_text("\n".join(told))


async def _ask_tools(folder: Path) -> None:
    """Write what a server of tools says, that quotes the key that it was given, with what models are told of it."""
    environment = {"API_KEY": CANARIES["HF_TOKEN"]}
    async with open_mcp_tools([sys.executable, "-S", "-c", _TOOLS], environment=environment) as tools:
        (folder / "tools").write_text(f"{tools[0].description} {tools[0].parameters} {await call_tool(tools[0], {})}")


def look_for_openings(amount: Amount) -> Outcome:
    """Run with secrets in the environment and a proxy, read what was written, read the sockets, load bombs, read the code."""
    found: Counter[str] = Counter()
    os.environ.update(CANARIES)
    (amount.folder / "reward.py").write_text(_FAILING)
    (amount.folder / "agent.py").write_text(_QUOTES)
    place = amount.folder / "place"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        os.environ["HTTP_PROXY"] = os.environ["HTTPS_PROXY"] = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        reward = ["--reward.function", f"{amount.folder}/reward.py:fails", "--reward.on-error", "zero"]
        program = ["--task", "calculator", "--agent.command", f"{sys.executable} -S {amount.folder}/agent.py"]
        runs = {
            "sft": [*SFT, "--sft.num-steps", 1],
            "rl": [*RL, "--rl.num-steps", 1, *reward],
            "agent": [*RL, "--rl.num-steps", 1, *program, "--agent.failed-reward", 0],
        }
        for name, options in runs.items():
            ended = run_train([*options, "--output-dir", place / name], place / f"streams-{name}")
            assert ended.status == 0, ended.error
        found["secrets in files and streams"] = _find_canaries(place)

        async def ask() -> set[str]:
            async with FakeVLLMServer(_model()) as server, VLLMEngine(server.url, vocab_size=128) as engine:
                await engine.generate((3, 4), SamplingParams(max_tokens=2))
                await _record_session(engine, place)
                return list_listeners([os.getpid()])

        addresses = trio.run(ask)
        if IS_INSTALLED:
            trio.run(_ask_tools, place)
        found["listeners that others reach"] = sum(not address.startswith("127.") for address in addresses)
        try:
            proxy.accept()
            found["requests at a proxy"] = 1
        except BlockingIOError:
            found["requests at a proxy"] = 0
    found["pickles executed"] = _load_bombs(amount.folder)
    found["calls that execute data"] = len(list(_find_dangerous_calls()))
    (place / "leak").write_text(USERINFO)
    with socket.create_server(("0.0.0.0", 0)):
        seen = "0.0.0.0" in list_listeners([os.getpid()])
    modes = "SFT, RL, a program that plays, a recording gateway" + (", a server of tools" if IS_INSTALLED else "")
    control = {
        "planted secrets found": _find_canaries(place), "open listeners found": int(seen),
        "pickles executed": int(_loads_naively(amount.folder)),
    }  # fmt: skip
    return Outcome(
        size=f"{modes}, with {len(CANARIES) + 2} canaries, 5 pickles, all code of the package",
        measured=dict(found), holds=not any(found.values()),
        control=control, control_fails=all(control.values()),
    )  # fmt: skip
