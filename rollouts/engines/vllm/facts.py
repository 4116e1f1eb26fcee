"""Facts about a vLLM server, asked for and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import trio

from rollouts.engines.http.checks import AtLeast, ServerInfo, check_server, check_version, find_size
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.vllm.protocol import OLDEST_VERSION, TESTED_VERSIONS, explain_missing_routes, parse_server_info, parse_version_answer
from rollouts.engines.weights.checkpoint_check import read_vocab_size
from rollouts.engines.weights.path_map import PathMap


async def read_facts(
    name: str, server: HTTPEndpoint, paths: PathMap, *, expected_model: str | Path | None = None, vocab_size: int | AtLeast | None = None
) -> ServerInfo:
    """Read the facts of a server, after checking that it has the routes for tokens and weights.

    Args:
        name: name of the engine, for messages.
        paths: map from its directories to local ones.
        expected_model: model that it must serve; None = any.
        vocab_size: vocabulary size that it must have; None = any.

    Raises: EngineError if the server is another than expected, or lacks a route.
    """
    with explain_missing_routes(name):
        version = await server.get_json("/version")
        check_version(name, parse_version_answer(version), oldest=OLDEST_VERSION, tested=TESTED_VERSIONS)
        await server.post_text("/inference/v1/abort_requests", {"request_ids": ["nobody's"]}, idempotent=True)
        info = parse_server_info(
            await server.get_json("/server_info", params={"config_format": "json"}),
            await server.get_json("/v1/models"),
            version,
            await server.get_json("/weight_info"),
            await server.get_json("/is_paused"),
        )
    found = await trio.to_thread.run_sync(read_vocab_size, paths.to_local(info.model_path))
    info = replace(info, vocab_size=find_size(vocab_size) if found is None else found)
    check_server(name, info, expected_model=expected_model, vocab_size=vocab_size)
    return info
