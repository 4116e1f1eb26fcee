"""A Hugging Face model as backends and engines see it: loading, heads, packing, outputs, weights."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
