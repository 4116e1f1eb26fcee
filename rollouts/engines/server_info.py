"""What an inference server says about itself, and whether it is the one that was meant. Pure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollouts.errors import EngineError
from rollouts.types import LogProbKind

ServerKind = Literal["sglang", "vllm"]

INITIAL_LABEL = "default"
"""The weight version that both servers report before anybody set one."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """The facts of a server that decide what may be asked of it, and what its answers mean."""

    kind: ServerKind
    version: str  # of the server's package
    model_path: str  # directory or hub id that it was started with, or last loaded from as far as it says
    served_name: str  # the name of the model in its routes
    context_length: int  # most tokens of prompt and output together
    log_prob_kind: LogProbKind  # of its output log-probs where the three differ
    weight_version: str  # its label: INITIAL_LABEL, or what the last sync set
    vocab_size: int | None = None  # rows of its embedding; None = it does not say
    dtype: str | None = None  # of its weights, for instance "float32"; None = it does not say
    has_tokenizer: bool = True  # without one it cannot look for stop strings
    honors_seeds: bool = True  # whether a seed in a request decides the samples
    device: str | None = None  # that it computes on, "cpu" or "cuda"; None = it does not say
    max_running: int | None = None  # most sequences that it decodes at the same time; None = it does not say
    is_paused: bool = False


def check_server(name: str, info: ServerInfo, *, expected_model: str | Path | None = None, vocab_size: int | None = None) -> None:
    """Raise EngineError unless the server serves the model that is meant.

    Args:
        name: of the engine, for messages.
        expected_model: directory, hub id or served name; None = any.
        vocab_size: of the model that is trained; None = any.
    """
    if expected_model is not None and not _is_same_model(str(expected_model), info):
        raise EngineError(
            f"{name} serves {info.model_path!r} under the name {info.served_name!r}, expected {str(expected_model)!r}: "
            "it is another server, or it was started with another model"
        )
    if vocab_size is not None and info.vocab_size is not None and vocab_size != info.vocab_size:
        raise EngineError(
            f"{name} serves a model with a vocabulary of {info.vocab_size} tokens, expected {vocab_size}: "
            "start it with the model that is trained, or resize the embedding before both are started"
        )


def check_version(name: str, version: str, *, oldest: str, tested: Sequence[str]) -> None:
    """Raise EngineError for a server older than `oldest`; warn about one that this client was not tested with."""
    if parse_version(version) < parse_version(oldest):
        raise EngineError(
            f"{name} runs version {version} of its server, older than {oldest}, whose weight versions and log-probs this client "
            f"reads: install {tested[-1]}"
        )
    if parse_version(version) not in map(parse_version, tested):
        warnings.warn(
            f"{name} runs version {version} of its server; this client was tested with {', '.join(tested)}. Compare the log-probs "
            "of a few rollouts with the trainer's before a long run",
            stacklevel=2,
        )


def parse_version(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.32.1rc2+cpu" -> (0, 32, 1); () if it has none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return () if found is None else tuple(int(part) for part in found.group(1).split("."))


def _is_same_model(expected: str, info: ServerInfo) -> bool:
    if expected in (info.model_path, info.served_name):
        return True
    return Path(expected).exists() and Path(expected).resolve() == Path(info.model_path).resolve()
