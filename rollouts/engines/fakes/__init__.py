"""Servers that behave like the real ones, on a loopback socket: to test engines, loops and your own workflows without either installed."""

from __future__ import annotations

from rollouts.engines.fakes.models import CausalModel, FakeModel, Script, ScriptedModel
from rollouts.engines.fakes.server import Fault, LoopbackServer
from rollouts.engines.fakes.sglang import FakeSGLangServer
from rollouts.engines.fakes.vllm import FakeVLLMServer

__all__ = ["CausalModel", "FakeModel", "FakeSGLangServer", "FakeVLLMServer", "Fault", "LoopbackServer", "Script", "ScriptedModel"]
