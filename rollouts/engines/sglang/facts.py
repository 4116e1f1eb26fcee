"""Facts about an SGLang server, asked for or measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import trio

from rollouts.engines.http.checks import AtLeast, check_server, check_version, find_size
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.sglang.protocol import (
    OLDEST_VERSION,
    TESTED_VERSIONS,
    SGLangServer,
    find_foreign_defaults,
    parse_probe,
    parse_server_info,
    probe_payload,
)
from rollouts.engines.weights.checkpoint_check import read_experts_per_token, read_vocab_size
from rollouts.engines.weights.path_map import PathMap
from rollouts.errors import EngineError, EngineTimeout

MeasuredKind = Literal["tempered", "untempered"]

_PROBE_TOKENS = (2, 3, 4)


async def read_facts(
    name: str,
    server: HTTPEndpoint,
    *,
    expected_model: str | Path | None = None,
    vocab_size: int | AtLeast | None = None,
    log_prob_kind: MeasuredKind | None = None,
    paths: PathMap | None = None,
) -> SGLangServer:
    """Read the facts of a server, and measure the kind of its log-probs.

    Args:
        name: name of the engine, for messages.
        expected_model: model that it must serve; None = any.
        vocab_size: vocabulary size that it must have; needed if its model directory cannot be read from here.
        log_prob_kind: kind of log-probs that it must have; None = any.
        paths: map from its directories to local ones.

    Raises: EngineError if the server is another than expected, or cannot be used safely; EngineTimeout if it does not generate.
    """
    answers = await ask_facts(server)
    facts, foreign = parse_server_info(*answers), find_foreign_defaults(answers[1])
    directory = (paths or PathMap()).to_local(facts.info.model_path)
    found = await trio.to_thread.run_sync(read_vocab_size, directory)
    facts = replace(facts, experts_per_token=await trio.to_thread.run_sync(read_experts_per_token, directory))
    info = replace(facts.info, vocab_size=find_size(vocab_size) if found is None else found)
    check_version(name, info.version, oldest=OLDEST_VERSION, tested=TESTED_VERSIONS)
    check_server(name, info, expected_model=expected_model, vocab_size=vocab_size)
    if foreign:
        raise EngineError(
            f"{name} was started with --preferred-sampling-params that set {', '.join(foreign)}, which would change what is sampled: start "
            "it without"
        )
    if info.vocab_size is None:
        raise EngineError(
            f"{name} does not say how large its vocabulary is, and {info.model_path}/config.json cannot be read from here: pass "
            "vocab_size, because one id outside of it kills the server"
        )
    measured = await _measure_log_prob_kind(name, server, info.vocab_size)
    if measured is not None and log_prob_kind not in (None, measured):
        raise EngineError(
            f"{name} gives {measured} log-probs, expected {log_prob_kind}: set log_prob_kind, or the server's environment variable "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    return replace(facts, info=replace(info, log_prob_kind=measured or log_prob_kind or "tempered"))


async def ask_facts(server: HTTPEndpoint) -> tuple[Any, Any, Any]:
    """Return the answers of /server_info, /model_info and /v1/models."""
    return await server.get_json("/server_info"), await server.get_json("/model_info"), await server.get_json("/v1/models")


async def _measure_log_prob_kind(name: str, server: HTTPEndpoint, vocab_size: int) -> MeasuredKind | None:
    """Measure the kind of log-probs from two likely tokens at two temperatures: no route reports it."""
    payload = probe_payload([token % vocab_size for token in _PROBE_TOKENS])
    try:
        return parse_probe(await server.post_json("/generate", payload, kind="health"))
    except EngineTimeout as error:
        raise EngineTimeout(
            f"{name} accepts requests but does not answer within {server.deadlines.health_s:g} s ({server.deadlines.name('health_s')}): it "
            "is overloaded, or an earlier run left it paused. Send POST /continue_generation with the body {}, or restart it"
        ) from error
