"""Tinker-compatible server: a model behind the training API of the tinker client, trained and sampled on this machine."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
