"""Sockets that listen while a command works: at loopback addresses alone, whichever mode it is in."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import needs
import pytest
from forked import PATIENCE_S, Child

from benchmarks.reliability.listeners import assert_loopback, find_family, list_listeners

pytestmark = needs.LINUX

ROOT = Path(__file__).parents[2]
SMALL = "--mode rl --rl.num-steps 1 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --evaluation.num-prompts 2 --num-threads 1".split()

COMMAND = """
import sys
from integration.command import main
sys.exit(main(sys.argv[1:]))
"""

SERVER = """
import sys
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether vLLM is there
sys.path.insert(0, {root!r})
from pathlib import Path
import trio
from rollouts.testing import FakeVLLMServer

async def serve():
    arguments = dict(zip(sys.argv, sys.argv[1:]))
    async with FakeVLLMServer(Path(arguments["--model"]), port=int(arguments["--port"])):
        await trio.sleep_forever()

trio.run(serve)
"""

REWARD = """
import time
from pathlib import Path

def waits(sample):
    (Path({folder!r}) / "in the middle").touch()
    while not (Path({folder!r}) / "go on").exists():
        time.sleep(0.01)
    return 0.5
"""


@contextmanager
def train(folder: Path, *options: object) -> Generator[set[int]]:
    """Train, and stop in the middle of a step: in its reward. The block has the processes of the run, which then comes to its end."""
    (folder / "reward.py").write_text(REWARD.format(folder=str(folder)))
    reward = ["--reward.function", f"{folder}/reward.py:waits", "--reward.timeout-s", "600"]
    with Child(COMMAND, "train", *SMALL, *reward, *options, "--output-dir", folder / "run", folder=folder / "streams") as child:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "in the middle").exists():
            assert child.is_alive and time.monotonic() < deadline, child.error
            time.sleep(0.02)
        yield find_family(child.pid)
        (folder / "go on").touch()
        assert child.wait() == 0, child.error


def test_a_listener_that_is_open_to_others_is_seen():
    own = [os.getpid()]
    with socket.create_server(("127.0.0.2", 0)):
        assert "127.0.0.2" in list_listeners(own)
        assert_loopback(own)
        with socket.create_server(("0.0.0.0", 0)), pytest.raises(AssertionError, match=re.escape("0.0.0.0")):
            assert_loopback(own)


def test_a_run_in_one_process_listens_nowhere_else(tmp_path: Path):
    with train(tmp_path) as processes:
        assert_loopback(processes, some=False)


@pytest.mark.slow
def test_the_ranks_of_a_run_listen_at_loopback_addresses(tmp_path: Path):
    with train(tmp_path, "--backend.kind", "fsdp", "--backend.num-processes", 2) as processes:
        assert len(processes) >= 3
        assert_loopback(processes)


@pytest.mark.slow
def test_servers_that_a_run_launches_listen_at_loopback_addresses(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{SERVER.format(root=str(ROOT))}")
    python.chmod(0o755)
    options = ["--engine.kind", "vllm", "--engine.launch", "--engine.num-servers", 2, "--engine.python", python, "--model.device", "cpu"]
    with train(tmp_path, *options) as processes:
        assert len(processes) >= 5, "this process, two supervisors and two servers"
        assert_loopback(processes)


@pytest.mark.slow
def test_the_report_is_served_at_a_loopback_address(tmp_path: Path):
    with train(tmp_path):
        pass
    with Child(COMMAND, "report", tmp_path / "run", "--serve", folder=tmp_path / "report") as child:
        child.wait_for_lines(1)
        assert_loopback(find_family(child.pid))


@pytest.mark.slow
@pytest.mark.parametrize("program", ["gateway", "tinker"])
def test_a_server_of_a_model_listens_at_a_loopback_address(program: str, tmp_path: Path):
    with Child(f"import os\nos.chdir({str(tmp_path)!r})\n{COMMAND}", program, folder=tmp_path / "streams") as child:
        address = child.wait_for_lines(1)[0]
        assert address.startswith("http://127.0.0.1:")
        assert_loopback(find_family(child.pid))
