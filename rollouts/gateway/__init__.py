"""Gateway: engines behind the APIs of chat programs, whose sessions are recorded token by token and become samples."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
