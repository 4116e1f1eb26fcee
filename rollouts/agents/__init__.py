"""Episodes of several turns: policies, conversations, and the samples that they become."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
