"""Servers that behave like the real ones, on a loopback socket: to test engines, loops and your own workflows without either installed."""

from __future__ import annotations

from rollouts.testing.servers.http import Fault, LoopbackServer
from rollouts.testing.servers.models import CausalModel, FakeModel, Script, ScriptedModel
from rollouts.testing.servers.sglang.server import FakeSGLangServer
from rollouts.testing.servers.sglang.settings import SGLangSettings
from rollouts.testing.servers.vllm.server import FakeVLLMServer
from rollouts.testing.servers.vllm.settings import VLLMSettings

__all__ = [
    "CausalModel",
    "FakeModel",
    "FakeSGLangServer",
    "FakeVLLMServer",
    "Fault",
    "LoopbackServer",
    "SGLangSettings",
    "Script",
    "ScriptedModel",
    "VLLMSettings",
]
