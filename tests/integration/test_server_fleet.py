"""Servers that a run starts as one fleet, and what becomes of them when they end or hang: with real processes of a fake vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import needs
import pytest
import trio
from warm_commands import find_python

from integration.parts.server_fleet import ServerUpkeep, open_server_fleet, spread_config
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig, MemberState
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError
from rollouts.testing import create_tiny_model
from rollouts.types import SamplingParams

pytestmark = [pytest.mark.slow, needs.LINUX, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
SERVER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import trio
from rollouts.testing import FakeVLLMServer

async def serve():
    arguments = dict(zip(sys.argv, sys.argv[1:]))
    async with FakeVLLMServer(Path(arguments["--model"]), port=int(arguments["--port"]), seconds_per_token=0.02):
        await trio.sleep_forever()

trio.run(serve)
"""


@contextlib.asynccontextmanager
async def open_fleet(folder: Path, said: list[str], **upkeep: Any) -> AsyncGenerator[EngineFleet]:
    model = folder / "v0"
    create_tiny_model().save_pretrained(model)
    create_char_tokenizer().save_pretrained(model)
    (model / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 0}))
    python = folder / "python"
    (folder / "serve.py").write_text(SERVER)
    python.write_text(f'#!/bin/sh\nexec "{find_python()}" "{folder / "serve.py"}" "$@"\n')
    python.chmod(0o755)
    config = ServerConfig("vllm", str(model), str(python), device="cpu")
    settings = {"environment": {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}, "max_restarts": 1, **upkeep}
    async with open_server_fleet(
        spread_config(config, None, 2),
        VLLMEngine,
        log_paths=[folder / f"{i}.log" for i in range(2)],
        upkeep=ServerUpkeep(**settings),
        fleet_config=FleetConfig(check_every_s=1.0, check_s=4.0, patience_s=PATIENCE_S),
        initial_weights=model,
        say=said.append,
    ) as fleet:
        yield fleet


def find_pid(log_path: Path) -> int:
    """The server that writes this log: the last of the processes that do, which started each other."""
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            supervised = b"server_supervisor" not in (entry / "cmdline").read_bytes()
            if supervised and os.readlink(entry / "fd" / "1") == str(log_path):
                return pid
    raise AssertionError(f"no process writes {log_path}")


async def wait_for(fleet: EngineFleet, said: list[str], *states: MemberState) -> None:
    with trio.fail_after(PATIENCE_S):
        while [member.state for member in fleet.members] != list(states):
            assert len(fleet.members) >= len(states), said
            await trio.sleep(0.05)


async def generate(fleet: EngineFleet, num: int = 8) -> set[int]:
    """Some requests at once, each for long enough to die in the middle. Returns the versions of their tokens."""
    versions: set[int] = set()

    async def one(i: int) -> None:
        completion = await fleet.generate((3 + i, 4), SamplingParams(max_tokens=40, stop_token_ids=(), seed=i))
        versions.update(completion.output_versions)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for i in range(num):
                nursery.start_soon(one, i)
    return versions


async def test_servers_that_end_or_hang_are_started_again_with_the_weights_of_the_moment(tmp_path: Path):
    said: list[str] = []
    async with open_fleet(tmp_path, said, hang_s=8.0) as fleet:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, fleet)
            await trio.sleep(0.3)
            os.kill(find_pid(tmp_path / "0.log"), signal.SIGKILL)
        await wait_for(fleet, said, MemberState.SERVING, MemberState.SERVING)
        create_tiny_model(seed=1).save_pretrained(tmp_path / "v1")
        (tmp_path / "v1" / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 1}))
        await fleet.update_weights_from_checkpoint(tmp_path / "v1")
        os.kill(find_pid(tmp_path / "1.log"), signal.SIGSTOP)  # it listens, and does not answer
        assert await generate(fleet) == {1}
        await wait_for(fleet, said, MemberState.SERVING, MemberState.SERVING)
        assert await generate(fleet) == {1}
        assert await fleet.get_weight_version() == 1
    print("\n".join(said))
    assert sum("is restarted (1 of 1)" in line for line in said) == 2
    assert sum("is back with weight version" in line for line in said) == 2, said


async def test_a_server_that_may_not_be_started_again_is_left_out_and_the_last_one_is_missed(tmp_path: Path):
    said: list[str] = []
    async with open_fleet(tmp_path, said, max_restarts=0) as fleet:
        os.kill(find_pid(tmp_path / "0.log"), signal.SIGKILL)
        await wait_for(fleet, said, MemberState.SERVING)
        assert await generate(fleet) == {0}
        os.kill(find_pid(tmp_path / "1.log"), signal.SIGKILL)
        with pytest.raises(EngineError, match=r"no engine of the fleet serves: (?s:.)*signal 9(?s:.)*it is not restarted"):
            await fleet.generate((3, 4), SamplingParams(max_tokens=40))
    assert any("engine 0" in line and "is gone, 1 engines of the fleet serve" in line for line in said), said


async def test_the_end_of_a_server_is_the_end_of_the_block_where_that_is_the_policy(tmp_path: Path):
    with pytest.raises(EngineError, match="signal 9"):
        async with open_fleet(tmp_path, [], max_restarts=None):
            os.kill(find_pid(tmp_path / "1.log"), signal.SIGKILL)
            await trio.sleep(PATIENCE_S)


async def test_a_server_that_does_not_start_ends_the_others(tmp_path: Path):
    python = tmp_path / "bad"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    config = ServerConfig("vllm", "m", str(python), device="cpu")
    open_bad = partial(open_server_fleet, [config] * 2, VLLMEngine, log_paths=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises((EngineError, ExceptionGroup)) as caught:
        async with open_bad(upkeep=ServerUpkeep(max_restarts=1), fleet_config=FleetConfig(), initial_weights=None, say=print):
            raise AssertionError("it must not be opened")
    assert "exit status 3" in str(getattr(caught.value, "exceptions", [caught.value])[0])
