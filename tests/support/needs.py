"""Requirements of some tests that not every machine meets. Tests are skipped for no other reason, and each reason says what to do.

Each need is a mark: `@needs.GYMNASIUM`, or `@needs.bubblewrap()` where finding out takes a process. Whether it is met is never asked of the
code under test: code that fails where it could work is a failure.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEM_PYTHON = "/usr/bin/python3"  # the one of the tests may be in a folder of root's


def _need(is_met: bool, what: str, to_run: str) -> pytest.MarkDecorator:
    """A mark that skips a test.

    Args:
        what: is missing, where it is.
        to_run: what somebody does who wants to run the test: "install ...", "set ...".
    """
    return pytest.mark.skipif(not is_met, reason=f"needs {what}: {to_run}")


def _works(*command: str, **options: object) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60, **options).returncode == 0  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired):
        return False


def named_directory(variable: str) -> Path | None:
    """The directory that an environment variable names, None where it is not set."""
    name = os.environ.get(variable)
    assert not name or Path(name).is_dir(), f"{variable} names {name}, which is no directory: unset it, or name one"
    return Path(name) if name else None


def get_gsm8k() -> Path:
    """The directory with the data set, for tests that need it."""
    directory = named_directory(GSM8K_VARIABLE)
    assert directory is not None, "the test has not said that it needs GSM8K"
    return directory


ENGINES_VARIABLE, GSM8K_VARIABLE, GOLDEN_VARIABLE = "ROLLOUTS_ENGINES_DIR", "ROLLOUTS_GSM8K_DIR", "ROLLOUTS_GOLDEN_DIR"

LINUX = _need(sys.platform == "linux", "Linux's /proc and process control", "run them on Linux")
ALL_RECORDINGS = _need(
    named_directory(ENGINES_VARIABLE) is not None,
    "all recorded exchanges with real servers",
    f"set {ENGINES_VARIABLE} to a directory with vllm/http and sglang/http",
)
GSM8K = _need(
    named_directory(GSM8K_VARIABLE) is not None,
    "the data set GSM8K",
    f"set {GSM8K_VARIABLE} to a directory with train.jsonl and test.jsonl of github.com/openai/grade-school-math",
)
DATASETS = _need(importlib.util.find_spec("datasets") is not None, "the extra `data`", "pip install -e '.[data]'")
GYMNASIUM = _need(importlib.util.find_spec("gymnasium") is not None, "the package gymnasium", "pip install gymnasium")
TORCHAO = _need(importlib.util.find_spec("torchao") is not None, "the package torchao", "pip install 'rollouts-rl[low-memory]'")
BITSANDBYTES = _need(
    importlib.util.find_spec("bitsandbytes") is not None, "the package bitsandbytes", "pip install 'rollouts-rl[low-memory]'"
)
EVALPLUS = _need(importlib.util.find_spec("evalplus") is not None, "the package evalplus", "pip install evalplus")
README_RENDERER = _need(
    importlib.util.find_spec("readme_renderer") is not None, "the package readme-renderer", "pip install 'readme-renderer[md]'"
)
WANDB, TENSORBOARD, TRACKIO, MLFLOW = (
    _need(importlib.util.find_spec(name) is not None, f"the package {name}", f"pip install 'rollouts-rl[{name}]'")
    for name in ("wandb", "tensorboard", "trackio", "mlflow")
)
SCIPY = _need(importlib.util.find_spec("scipy") is not None, "the package scipy", "pip install scipy")
CHROMIUM = _need(shutil.which("chromium") is not None, "the program chromium", "install chromium")
OPENSSL = _need(shutil.which("openssl") is not None, "the program openssl", "install openssl")
VLLM = _need(bool(os.environ.get("VLLM_PYTHON")), "a vLLM", "run tools/run_vllm_tests.sh, or set VLLM_PYTHON as CONTRIBUTING.md says")
SGLANG = _need(
    bool(os.environ.get("SGLANG_PYTHON")), "an SGLang", "run tools/run_server_tests.sh sglang, or set SGLANG_PYTHON as CONTRIBUTING.md says"
)

TRL = _need(
    bool(os.environ.get("TRL_PYTHON")), "TRL", "set TRL_PYTHON to the Python of an environment in which `pip install -e . trl` was run"
)
TINKER = _need(
    bool(os.environ.get("TINKER_PYTHON")),
    "the packages tinker and tinker_cookbook",
    "set TINKER_PYTHON to the Python of an environment with them, made as .ci/run makes it",
)


@functools.cache
def ipv6() -> pytest.MarkDecorator:
    """A loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        there = True
    except OSError:
        there = False
    return _need(there, "the address ::1", "set the sysctl net.ipv6.conf.lo.disable_ipv6=0")


TEST_DEVICE = os.environ.get("ROLLOUTS_TEST_DEVICE", "cuda")


@functools.cache
def gpu() -> pytest.MarkDecorator:
    """A CUDA GPU, or another device that stands in for it."""
    import torch

    there = torch.cuda.is_available() or TEST_DEVICE != "cuda"
    return _need(there, "a CUDA GPU", "run them on a machine with one, with a CUDA build of torch, or set ROLLOUTS_TEST_DEVICE=cpu")


@functools.cache
def onednn(*, bfloat16: bool = False) -> pytest.MarkDecorator:
    """Operators of oneDNN for linear layers, as builds of torch for x86 have them; with bfloat16, instructions for that."""
    import platform

    import torch

    there = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    what = "a processor with AVX512-BF16 or AMX" if bfloat16 else "a torch with oneDNN on x86"
    return _need(there and (fast or not bfloat16), what, "run them on such a machine")


@functools.cache
def cuda(num_gpus: int = 1) -> pytest.MarkDecorator:
    """GPUs that nothing can stand in for."""
    import torch

    there = TEST_DEVICE.startswith("cuda") and torch.cuda.device_count() >= num_gpus
    return _need(there, f"{num_gpus} CUDA GPUs", "run them on a machine with these, and leave ROLLOUTS_TEST_DEVICE out")


USER_NAMESPACES = "allow user namespaces (docs/sandbox.md; in a container its security profile decides)"


@functools.cache
def bubblewrap() -> pytest.MarkDecorator:
    """A bubblewrap that may make namespaces."""
    apart = ("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts")
    works = _works("bwrap", *apart, "--ro-bind", "/", "/", "--proc", "/proc", "--tmpfs", "/run", "true")
    return _need(works, "bubblewrap", f"install bubblewrap, and {USER_NAMESPACES}")


@functools.cache
def namespaces() -> pytest.MarkDecorator:
    """Namespaces, as util-linux's unshare makes them."""
    words = "--user --map-root-user --mount --pid --net --ipc --uts --fork"
    works = _works("unshare", *words.split(), "mount", "-t", "proc", "-o", "subset=pid", "proc", "/proc")
    return _need(works, "user namespaces", f"install util-linux, and {USER_NAMESPACES}")


@functools.cache
def sandbox() -> pytest.MarkDecorator:
    """Require either of the two."""
    missing = all(mark.args[0] for mark in (bubblewrap().mark, namespaces().mark))
    return _need(not missing, "bubblewrap or user namespaces", f"install bubblewrap, and {USER_NAMESPACES}")


@functools.cache
def landlock() -> pytest.MarkDecorator:
    """A kernel with Landlock, as it tells itself where it tells; not whether this library finds it."""
    told = Path("/sys/kernel/security/lsm")
    if os.access(told, os.R_OK):
        there = "landlock" in told.read_text().split(",")
    else:
        code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(444, None, 0, 1) < 1)"  # landlock_create_ruleset: its version
        there = sys.platform == "linux" and _works(sys.executable, "-c", code)
    return _need(there, "Landlock", "run them on Linux 5.13 or newer, started with lsm=landlock,... if it is not by itself")


@functools.cache
def small_disk() -> pytest.MarkDecorator:
    """Somewhere to mount a file system of a few megabytes."""
    works = _works("unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /tmp")
    return _need(works, "mounts in a user namespace", f"install util-linux, and {USER_NAMESPACES}")


AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", SYSTEM_PYTHON, "-B", "-c")


@functools.cache
def another_user() -> pytest.MarkDecorator:
    """Another user than root, whose Python has the packages of this one."""
    check = "import sys; sys.path[:0] = sys.argv[1:]; assert sys.version_info >= (3, 11); import trio, rollouts.errors"
    works = sys.platform == "linux" and os.geteuid() == 0 and _works(*AS_NOBODY, check, *import_path(), env={})
    readable = "from folders that every user may read"
    to_run = f"run them as root {readable}, install util-linux (setpriv) and the {SYSTEM_PYTHON} of the version of the tests"
    return _need(works, "another user that can run the tests' packages", to_run)


def import_path() -> list[str]:
    """Return the paths at which a bare interpreter finds this repository and the packages of this environment."""
    root = Path(__file__).parents[2]
    return [str(root), *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]


OPENAI, ANTHROPIC = (
    _need(importlib.util.find_spec(name) is not None, f"the package {name}", "pip install 'rollouts-rl[agents]'")
    for name in ("openai", "anthropic")
)
OPENAI_AGENTS = _need(
    bool(os.environ.get("OPENAI_AGENTS_PYTHON")),
    "the OpenAI Agents SDK",
    "set OPENAI_AGENTS_PYTHON to the Python of an environment in which `pip install openai-agents` was run",
)
MCP = _need(importlib.util.find_spec("mcp") is not None, "the package mcp", "pip install 'rollouts-rl[mcp]'")
VERIFIERS = _need(
    importlib.util.find_spec("verifiers") is not None,
    "the package verifiers",
    "pip install 'rollouts-rl[verifiers]', in an environment of its own: it pins other packages",
)
