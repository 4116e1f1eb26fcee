"""The contract of all engines, kept by real servers: every test of tests/engines/test_engine_contract.py, one server for all of them.

VLLM_PYTHON=path/to/venv/bin/python pytest tests/real_servers/test_contract.py -m vllm, and the same with SGLANG_PYTHON and -m sglang.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine

sys.path.insert(0, str(Path(__file__).parent.parent))
from contract_engines import FAKE_SGLANG, FAKE_VLLM, ContractEngine, save_model
from test_engine_contract import *  # noqa: F403

pytestmark = [pytest.mark.timeout(700), pytest.mark.filterwarnings("ignore:.*ignores seeds")]

CLIENTS = {"vllm": VLLMEngine, "sglang": SGLangEngine}
FACTS = {"vllm": FAKE_VLLM, "sglang": FAKE_SGLANG}
"""Facts of each kind: the contract makes the same exceptions for a real server as for its fake."""


@asynccontextmanager
async def serve(kind: str, url: str, model: Any, tokenizer: Any, folder: Path) -> AsyncGenerator[Any]:
    """An engine of a running server, given the model as its version 0."""
    save_model(model, tokenizer, folder)
    (folder / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 0}))
    async with CLIENTS[kind](url) as engine:
        await engine.update_weights_from_checkpoint(folder)
        yield engine


@pytest.fixture(params=[pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in CLIENTS])
def facts(request: pytest.FixtureRequest) -> ContractEngine:
    server = request.getfixturevalue(f"{request.param}_server")
    return replace(FACTS[request.param], name=request.param, open=partial(serve, request.param, server.url))
