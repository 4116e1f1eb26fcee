"""Messages to tokens and back: chat templates, loss masks, text formats of episodes."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
