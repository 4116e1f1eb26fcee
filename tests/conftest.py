"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# the first call into torch takes a third of a second where nothing is warm, which says nothing about the code under test;
# pytest-timeout ends what hangs
settings.register_profile("rollouts", deadline=None)
settings.load_profile("rollouts")
