"""Deadlines of servers are settings of a run, and the error of one names its option."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.parts.engines import create_server_engine
from integration.settings.sections import EngineSection
from rollouts.errors import EngineTimeout
from rollouts.testing import FakeVLLMServer
from rollouts.testing.models import create_tiny_model
from rollouts.types import SamplingParams


async def test_a_server_that_does_not_answer_in_time_is_an_error_with_the_option(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path)
    async with FakeVLLMServer(tmp_path, seconds_per_token=60.0) as server:
        section = EngineSection(kind="vllm", urls=(server.url,), generate_timeout_s=0.2)
        async with create_server_engine(section, server.url, {}) as engine:
            with pytest.raises(EngineTimeout, match=r"within 0.2 s: .*--engine.generate-timeout-s"):
                await engine.generate((5, 6), SamplingParams(max_tokens=3))
