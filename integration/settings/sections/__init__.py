"""Sections of the settings of a run. Each checks itself; integration.settings.config combines them."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
