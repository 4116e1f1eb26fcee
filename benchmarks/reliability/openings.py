"""Ways out and ways in: secrets in what a run writes, sockets that others can reach, and code that comes as data."""

from __future__ import annotations

import ast
import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import trio

import integration
import rollouts
from benchmarks.reliability.commands import RL, SFT, run_train
from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.listeners import list_listeners
from rollouts.data.datasets import load_rl_prompts
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import RolloutsError
from rollouts.models.loading import load_hf_model
from rollouts.testing import FakeVLLMServer
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.models import ScriptedModel
from rollouts.types import SamplingParams

CANARIES = {
    "HF_TOKEN": "hf_canaryOfTheHub0123456789abcdefg", "WANDB_API_KEY": "canary0wandb0123456789abcdef01234567890a",
    "VLLM_API_KEY": "canary-variable-of-vllm", "ROLLOUTS_RANK_TOKEN": "canary-rank-" + "0123456789abcdef" * 3,
}  # fmt: skip
USERINFO, QUERY = "canary-in-userinfo", "canary-in-query"
_FAILING = f"""
def fails(sample):
    if sample.index % 2:
        raise OSError("GET https://me:{USERINFO}@host/score?api_key={QUERY} failed")
    return 0.5
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


def look_for_openings(amount: Amount) -> Outcome:
    """Run with secrets in the environment and a proxy, read what was written, read the sockets, load bombs, read the code."""
    found: Counter[str] = Counter()
    os.environ.update(CANARIES)
    (amount.folder / "reward.py").write_text(_FAILING)
    place = amount.folder / "place"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        os.environ["HTTP_PROXY"] = os.environ["HTTPS_PROXY"] = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        reward = ["--reward.function", f"{amount.folder}/reward.py:fails", "--reward.on-error", "zero"]
        runs = {"sft": [*SFT, "--sft.num-steps", 1], "rl": [*RL, "--rl.num-steps", 1, *reward]}
        for name, options in runs.items():
            ended = run_train([*options, "--output-dir", place / name], place / f"streams-{name}")
            assert ended.status == 0, ended.error
        found["secrets in files and streams"] = _find_canaries(place)

        async def ask() -> set[str]:
            async with FakeVLLMServer(_model()) as server, VLLMEngine(server.url, vocab_size=128) as engine:
                await engine.generate((3, 4), SamplingParams(max_tokens=2))
                return list_listeners([os.getpid()])

        addresses = trio.run(ask)
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
    control = {
        "planted secrets found": _find_canaries(place), "open listeners found": int(seen),
        "pickles executed": int(_loads_naively(amount.folder)),
    }  # fmt: skip
    return Outcome(
        size="SFT and RL with 6 canaries, 5 pickles, all code of the package", measured=dict(found), holds=not any(found.values()),
        control=control, control_fails=all(control.values()),
    )  # fmt: skip
