"""Real servers for tests, on a CPU, with a tiny model: one vLLM for all modules, as its start takes long, and an SGLang for each.

The tests run under trio, each in a run of its own, so a server for several tests is held by another process: this file, as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server
from rollouts.testing import create_tiny_model

Kind = Literal["vllm", "sglang"]
PYTHON_VARIABLES = {"vllm": "VLLM_PYTHON", "sglang": "SGLANG_PYTHON"}
CONTEXT_LENGTH = 512
STARTUP_S = 570.0


@dataclass(frozen=True)
class HeldServer:
    """A running server."""

    url: str
    pid: int
    holder_pid: int  # of the process that has launched it
    log_path: Path
    model_path: Path


def get_python(kind: Kind) -> str:
    """The Python of the environment with this server, which tests with its mark need."""
    return os.environ[PYTHON_VARIABLES[kind]]


def save_tiny_model(path: Path, seed: int = 0) -> Path:
    """Write a model that both servers can serve, float32, with its tokenizer."""
    create_tiny_model(hidden_size=64, head_dim=32, seed=seed).save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)
    return path


def create_config(kind: Kind, model_path: Path, **changes: Any) -> ServerConfig:
    """Settings for a tiny model on a CPU."""
    settings: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "context_length": CONTEXT_LENGTH, "max_num_seqs": 64, "env": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip
    return ServerConfig(kind=kind, model_path=str(model_path), python=get_python(kind), **{**settings, **changes})


@contextmanager
def hold_server(kind: Kind, folder: Path, **changes: Any) -> Iterator[HeldServer]:
    """A server with a tiny model, its model and log in a folder.

    Args:
        changes: of ServerConfig, for instance extra_args=("--max-logprobs", "-1").
    """
    model_path = save_tiny_model(folder / "model")
    config, log_path = create_config(kind, model_path, **changes), folder / f"{kind}.log"
    command = [sys.executable, __file__, json.dumps(asdict(config)), str(log_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        line = holder.stdout.readline()
        assert line, f"the {kind} server did not start; what it wrote is above"
        yield HeldServer(**json.loads(line), holder_pid=holder.pid, log_path=log_path, model_path=model_path)
        holder.stdin.close()
        assert holder.wait(timeout=60) == 0, f"the {kind} server ended while tests used it"


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldServer]:
    """One vLLM for all tests of a process of pytest. It has the weights of the test before: a test begins with its own."""
    with hold_server("vllm", tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="module")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldServer]:
    """One SGLang for all tests of a module."""
    with hold_server("sglang", tmp_path_factory.mktemp("sglang")) as server:
        yield server


async def hold(config: ServerConfig, log_path: str) -> None:
    """Launch, tell where the server is, and stop when standard input closes."""
    async with launch_server(config, log_path, environment=os.environ, startup_s=STARTUP_S) as server:
        print(json.dumps({"url": server.url, "pid": server.pid}), flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    trio.run(hold, ServerConfig(**{**settings, "extra_args": tuple(settings["extra_args"])}), sys.argv[2])
