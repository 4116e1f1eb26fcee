"""Real servers started, restarted and ended by launch_server, on a CPU with a tiny model.

VLLM_PYTHON=path/to/venv/bin/python pytest -m vllm tests/real_servers/test_launch.py, and the same with SGLANG_PYTHON and -m sglang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

import needs
import pytest
import trio
from conftest import create_config, hold_server, save_tiny_model

from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.launch.servers import launch_server
from rollouts.errors import EngineError, EngineTimeout

KINDS = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
SHARED_MEMORY = Path("/dev/shm")
STARTUP_S = 570.0
pytestmark = [
    pytest.mark.timeout(1300),
    pytest.mark.parametrize("kind", KINDS),
    needs.LINUX,
]


def find_marked(mark: str) -> list[int]:
    """Processes with this variable in their environment, wherever they went."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def find_shared(pids: list[int]) -> set[Path]:
    """Files in shared memory that processes have mapped and that can be found by name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line[line.find("/") :]) if "/" in line else Path()
                if path.parent == SHARED_MEMORY and path.exists():
                    found.add(path)
    return found


def get_temporary_folder(pid: int) -> Path:
    """Return the directory of a process's temporary files."""
    variables = dict(entry.partition("=")[::2] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return Path(variables["TMPDIR"])


async def generate(kind: str, url: str) -> list[int]:
    """Eight tokens, the most probable ones."""
    async with HTTPEndpoint(url) as endpoint:
        if kind == "vllm":
            sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
            answer = await endpoint.post_json("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": sampling})
            return answer["choices"][0]["token_ids"]
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        return (await endpoint.post_json("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling}))["output_ids"]


async def test_a_real_server_starts_restarts_and_ends_without_a_trace(kind, tmp_path, record_property):
    mark = f"MARK={uuid.uuid4().hex}"
    config = create_config(kind, save_tiny_model(tmp_path / "model"), env={"OMP_NUM_THREADS": "1", "MARK": mark.removeprefix("MARK=")})
    told: list[tuple[float, str]] = []
    begin = trio.current_time()
    async with launch_server(
        config, tmp_path / "run" / "server.log", environment=os.environ, startup_s=STARTUP_S, on_progress=lambda *now: told.append(now)
    ) as server:
        record_property("seconds_to_healthy", round(trio.current_time() - begin, 1))
        tokens = await generate(kind, server.url)
        assert len(tokens) == 8
        assert told == sorted(told, key=lambda now: now[0])
        assert any(line for _, line in told)
        folder, url, pid = get_temporary_folder(server.pid), server.url, server.pid
        assert list(folder.iterdir()), "the server's temporary files are elsewhere"

        begin = trio.current_time()
        await server.restart()
        record_property("seconds_to_restart", round(trio.current_time() - begin, 1))
        assert (server.url, server.is_running) == (url, True)
        assert server.pid != pid
        assert not folder.exists()
        assert await generate(kind, server.url) == tokens

        processes = find_marked(mark)
        shared = find_shared(processes)
        folder = get_temporary_folder(server.pid)
        assert len(processes) >= 4, f"only {processes} carry the mark"
        assert shared, "the server uses no shared memory by name"
        begin = trio.current_time()
    record_property("seconds_to_stop", round(trio.current_time() - begin, 1))
    assert find_marked(mark) == []
    assert [path for path in shared if path.exists()] == []
    assert not folder.exists()


def test_nothing_is_left_of_a_real_server_whose_parent_is_killed(kind, tmp_path):
    mark = f"MARK={uuid.uuid4().hex}"
    variables = {"OMP_NUM_THREADS": "1", "MARK": mark.removeprefix("MARK=")}
    with pytest.raises(AssertionError, match="ended while tests used it"), hold_server(kind, tmp_path, env=variables) as server:
        processes = find_marked(mark)
        shared, folder = find_shared(processes), get_temporary_folder(server.pid)
        os.kill(server.holder_pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while find_marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert find_marked(mark) == []
    assert shared
    assert [path for path in shared if path.exists()] == []
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        ({"extra_args": ("--no-such-flag",)}, "an argument that this version of the server does not know", "unrecognized arguments"),
        ({"model_path": "nowhere/at/all"}, "the model path is wrong", "nowhere/at/all"),
        ({"context_length": 100_000}, "context_length is longer than the model allows", "100000"),
    ],
    ids=["flag", "path", "context"],
)
async def test_a_real_server_that_cannot_start_says_why(kind, tmp_path, change, cause, said):
    config = create_config(kind, save_tiny_model(tmp_path / "model"))
    config = type(config)(**{**vars(config), **change})
    with pytest.raises(EngineError) as caught:
        async with launch_server(config, tmp_path / "server.log", environment=os.environ, startup_s=STARTUP_S):
            raise AssertionError("it must not become healthy")
    assert not isinstance(caught.value, EngineTimeout)
    message = str(caught.value)
    assert f"Probably {cause}" in message
    assert said in message
    assert "before it was healthy" in message
