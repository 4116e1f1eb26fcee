"""Inference engines: completions from this process, from SGLang and vLLM servers, and from fleets of them."""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
