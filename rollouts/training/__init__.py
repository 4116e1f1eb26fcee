"""RL steps after their rollouts: training, checkpoints, metrics and new weights for the engines."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
