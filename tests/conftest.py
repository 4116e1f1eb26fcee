"""Property tests are the same in every run, and a busy machine does not make them fail. Workers of pytest-xdist take one thread each, and
tests that stand together go to one worker, where they share fixtures, until another one is idle."""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")  # small, and run once

import needs
import pytest
from hypothesis import settings

WRITES_NO_BYTECODE = sys.dont_write_bytecode  # of PYTHONDONTWRITEBYTECODE, which holds while tests run
sys.dont_write_bytecode = False  # pytest keeps the test files as it has compiled them, which takes half of the time of their collection

GIVEN_BY = {"slow": "mark_parts", "long": "mark_parts", "vllm": "in CLIENTS]", "sglang": "in CLIENTS]"}
"""Texts by which a file gives a mark without its name."""

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("quick")  # another one: --hypothesis-profile=thorough


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """-n 2 means --dist worksteal, unless another way is named; in the configuration file it would be an error without -n."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs: the numbers of these tests are those of a CPU. Only tests of GPUs and of real servers see them."""
    if config.option.markexpr not in ("vllm", "sglang", "gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without the mark that is asked for: all files take half a minute of a core."""
    mark = config.option.markexpr
    if mark in ("slow", "long", "more", "gpu", "vllm", "sglang", "mutations") and collection_path.name.startswith("test_"):
        text = collection_path.read_text()
        return not any(name in text for name in (f"mark.{mark}", GIVEN_BY.get(mark, f"mark.{mark}"))) or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests have ten minutes, unless they say how long they have; tests against a real server need one. Whole runs come first: the
    worker that has them gives away what comes behind, and none is left at the end with one of several minutes."""
    items.sort(key=lambda item: {"pages": 0, "integration": 1}.get(item.path.parent.name, 2))
    for item in items:
        for kind, need in (("vllm", needs.VLLM), ("sglang", needs.SGLANG)):
            if item.get_closest_marker(kind) is not None:
                item.add_marker(need)
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True)
def _draw_on_request(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process draw no curves, which takes a small one longer than its training, but in tests with the fixture `matplotlib`."""
    if "matplotlib" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)  # as if it were not installed


@pytest.fixture
def matplotlib() -> None:
    """The package that draws, for tests that look at pictures; others do as on a machine without it."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """The modules and the tests stay: passes of the garbage collector leave them out, each of which would look at some 700,000 objects.

    Modules that tests write and import are compiled as the environment says.
    """
    gc.freeze()
    gc.set_threshold(5_000, 20, 20)  # tests that look at the memory collect by themselves
    count, frozen = gc.get_freeze_count, gc.get_freeze_count()
    gc.get_freeze_count = functools.wraps(count)(lambda: frozen)  # each run asks; counting them anew takes a tenth of a small run
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
