"""Facade of one-call training: a configuration in sections, engines by name, and a trainer object, as custom PPO set-ups have them."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
