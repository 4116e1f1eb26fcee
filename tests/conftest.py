"""Property tests are the same in every run, and a busy machine does not make them fail."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")
