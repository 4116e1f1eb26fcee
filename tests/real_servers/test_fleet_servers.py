"""Two real servers as one fleet, one of them killed in the middle of a batch.

VLLM_PYTHON=path/to/venv/bin/python pytest tests/real_servers/test_fleet_servers.py -m vllm, and the same with SGLANG_PYTHON and -m sglang.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from integration.parts.server_fleet import ServerUpkeep, open_server_fleet
from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig, MemberState
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.training.weight_sync import sync_weights_to_engines
from rollouts.types import Completion, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from endless_models import create_endless_model

KINDS = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*ignores seeds")]

CLIENTS: dict[str, type[VLLMEngine] | type[SGLangEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
PYTHON_VARIABLES = {"vllm": "VLLM_PYTHON", "sglang": "SGLANG_PYTHON"}
TOLERANCE = 1e-4  # nats, float32
STARTUP_S = 570.0
NUM_GROUPS, GROUP_SIZE = 8, 4
PARAMS = SamplingParams(max_tokens=400)


def create_model(version: int) -> Any:
    """Its answers go on until max_tokens."""
    return create_endless_model(60 + version, hidden_size=64, head_dim=32)


def export(folder: Path, version: int) -> Path:
    path = folder / f"v{version}"
    create_model(version).save_pretrained(path)
    (path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))
    return path


def create_config(kind: str, model_path: Path) -> ServerConfig:
    python = os.environ[PYTHON_VARIABLES[kind]]
    config = ServerConfig(
        kind="vllm", model_path=str(model_path), python=python, device="cpu", dtype="float32", context_length=512, max_num_seqs=32,
        skip_tokenizer_init=True, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return config if kind == "vllm" else replace(config, kind="sglang")


def compare(completion: Completion) -> float:
    """The largest difference of its log-probs from those of the weights that each token names."""
    tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
    worst = 0.0
    for version in set(completion.output_versions):
        with torch.no_grad():
            logits = create_model(version)(tokens).logits[0, completion.input_len - 1 : -1] / completion.temperature
        expected = gather_log_probs(logits, tokens[0, completion.input_len :]).tolist()
        for found, wanted, its in zip(completion.output_log_probs, expected, completion.output_versions, strict=True):
            if its == version:
                worst = max(worst, abs(found - wanted))
    return worst


async def generate_batch(fleet: EngineFleet, found: dict[tuple[int, int], list[Completion]], params: SamplingParams = PARAMS) -> None:
    """Groups of samples, all at once, each answer noted as often as it comes."""

    async def one(group: int, k: int) -> None:
        prompt = tuple(range(3 + group, 9 + group))
        completion = await fleet.generate(prompt, params.new(seed=100 * group + k), request_id=f"{group:012d}-{k:04d}")
        found.setdefault((group, k), []).append(completion)

    async with trio.open_nursery() as nursery:
        for group in range(NUM_GROUPS):
            for k in range(GROUP_SIZE):
                nursery.start_soon(one, group, k)


def check_batch(found: dict[tuple[int, int], list[Completion]], versions: set[int]) -> float:
    """Every sample is there once, whole, with versions that are allowed. Returns the largest difference of log-probs."""
    assert Counter({key: len(answers) for key, answers in found.items()}) == Counter(
        {(group, k): 1 for group in range(NUM_GROUPS) for k in range(GROUP_SIZE)}
    )
    worst = 0.0
    for (group, k), (completion,) in found.items():
        assert completion.request_id == f"{group:012d}-{k:04d}"
        assert completion.input_tokens == tuple(range(3 + group, 9 + group))
        assert completion.finish_reason == ("stop" if completion.output_tokens[-1] == 1 else "length")
        assert completion.output_len == 400 or completion.finish_reason == "stop"
        assert set(completion.output_versions) <= versions, completion.output_versions
        assert list(completion.output_versions) == sorted(completion.output_versions)
        worst = max(worst, compare(completion))
    assert len({completion.output_tokens for (completion,) in found.values()}) == NUM_GROUPS * GROUP_SIZE
    return worst


async def wait_for_state(fleet: EngineFleet, number: int, state: MemberState, seconds: float) -> None:
    with trio.fail_after(seconds):
        while next(member for member in fleet.members if member.number == number).state is not state:
            await trio.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_killed_in_the_middle_of_a_batch_costs_time_only(kind: str, tmp_path: Path):
    initial = export(tmp_path, 0)
    config = create_config(kind, initial)
    said: list[str] = []
    begin = trio.current_time()

    def say(message: str) -> None:
        said.append(f"{trio.current_time() - begin:.1f} s: {message[:300]}")

    async with open_server_fleet(
        [config, config],
        CLIENTS[kind],
        log_paths=[tmp_path / f"{kind}_{i}.log" for i in range(2)],
        upkeep=ServerUpkeep(environment=os.environ, max_restarts=1, startup_s=STARTUP_S),
        fleet_config=FleetConfig(patience_s=STARTUP_S, updates_at_once=1),
        initial_weights=initial,
        say=say,
    ) as fleet:
        await sync_weights_to_engines([fleet], export(tmp_path, 1))
        assert await fleet.get_weight_version() == 1

        killed: dict[tuple[int, int], list[Completion]] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate_batch, fleet, killed)
            await trio.sleep(0.3)
            loads = [member.num_requests for member in fleet.members]
            assert min(loads) > 0, loads
            victim = fleet.members[0]
            os.killpg(find_server(tmp_path / f"{kind}_0.log"), signal.SIGKILL)
        worst = check_batch(killed, {1})
        retried = fleet.metrics()["num_requests_retried"]
        assert retried > 0, "nothing was in flight at the server that was killed"
        assert fleet.members[victim.number].state is MemberState.DOWN
        seconds_to_end = trio.current_time() - begin

        rolling: dict[tuple[int, int], list[Completion]] = {}
        async with trio.open_nursery() as nursery:  # weights change while the server is started again
            nursery.start_soon(generate_batch, fleet, rolling)
            await trio.sleep(0.2)
            await sync_weights_to_engines([fleet], export(tmp_path, 2))
        worst = max(worst, check_batch(rolling, {1, 2}))

        await wait_for_state(fleet, victim.number, MemberState.SERVING, STARTUP_S)
        assert [member.version for member in fleet.members] == [2, 2]
        both: dict[tuple[int, int], list[Completion]] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate_batch, fleet, both)
            await trio.sleep(0.1)
            assert min(member.num_requests for member in fleet.members) > 0, "the server that came back is not used"
        worst = max(worst, check_batch(both, {2}))

        updated: dict[tuple[int, int], list[Completion]] = {}
        async with trio.open_nursery() as nursery:  # one after another, under requests
            nursery.start_soon(generate_batch, fleet, updated)
            await trio.sleep(0.1)
            await sync_weights_to_engines([fleet], export(tmp_path, 3))
        worst = max(worst, check_batch(updated, {2, 3}))
        mixed = sum(len(set(completion.output_versions)) > 1 for (completion,) in updated.values())
        assert await fleet.get_weight_version() == 3
    print(
        f"{kind}: loads {loads}, {retried:.0f} requests began anew, batch complete after {seconds_to_end:.1f} s, {mixed} answers across "
        f"the rolling update, largest difference {worst:.2e} nats, {trio.current_time() - begin:.0f} s in all\n" + "\n".join(said)
    )
    assert worst < TOLERANCE


def find_server(log_path: Path) -> int:
    """The process group of the server that writes this log: its leader has it as standard output."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            writes = os.readlink(entry / "fd" / "1") == str(log_path)
            pid = int(entry.name)
            if writes and os.getpgid(pid) == pid and b"server_supervisor" not in (entry / "cmdline").read_bytes():
                return pid
        except OSError:
            continue  # it has ended, or is another user's
    raise AssertionError(f"no process writes {log_path}")
