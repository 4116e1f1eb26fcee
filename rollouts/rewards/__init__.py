"""Rewards: functions of samples and groups, checked answers, code in sandboxes, reward models and judges."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
