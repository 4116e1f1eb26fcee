"""Property tests are the same in every run, and a busy machine does not make them fail. Workers of pytest-xdist take one thread each."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

from hypothesis import settings

settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")
