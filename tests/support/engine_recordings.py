"""Recorded exchanges with real servers, and how the answer of a fake is compared with them: status and structure, not sampled values."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from needs import ENGINES_VARIABLE, named_directory
from safetensors.torch import load_file, save_file
from server_waits import PATIENCE_S

from rollouts.testing import ScriptedModel

SHIPPED = Path(__file__).parents[1] / "data" / "engines"
"""vllm.json and sglang.json: name -> recording, the smaller ones of the collection."""


def find_recordings(kind: str) -> Path | None:
    """The directory with all recordings of a server, if one is named."""
    named = named_directory(ENGINES_VARIABLE)
    return None if named is None else named / kind / "http"


def load_selection(kind: str) -> dict[str, Any]:
    """The recordings that come with the tests."""
    return json.loads((SHIPPED / f"{kind}.json").read_text())


def load_recordings(kind: str) -> dict[str, Any]:
    """All recordings there are here by their names; one that is no JSON as its text."""
    directory = find_recordings(kind)
    if directory is None:
        return load_selection(kind)
    paths = sorted(p for p in directory.iterdir() if p.suffix in {".json", ".txt"})
    return {path.stem: json.loads(path.read_text()) if path.suffix == ".json" else path.read_text() for path in paths}


@dataclass(frozen=True)
class Seen:
    """An answer, real or fake. No status: the connection broke."""

    status: int | None
    content_type: str | None = None
    body: Any = None
    events: tuple[Any, ...] | None = None  # of a stream


def create_seen(status: int | None, content_type: str | None, body: Any) -> Seen:
    """An answer of these parts; the body of a stream is its text."""
    if (content_type or "").startswith("text/event-stream"):
        return Seen(status, content_type, events=read_events(body))
    return Seen(status, content_type, body)


def open_client(url: str, *, keeps_connections: bool = False) -> httpx.AsyncClient:
    """A client of a server, by default with a connection for each request."""
    limits = httpx.Limits(max_keepalive_connections=1 if keeps_connections else 0)
    return httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=PATIENCE_S, limits=limits)


async def ask(client: httpx.AsyncClient, method: str, path: str, body: Any, params: Any = None, headers: Any = None) -> Seen:
    """Send a request and read its answer; a body that is a text is sent as it is."""
    content = None if body is None else body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json", **(headers or {})} if content is not None else headers
    try:
        response = await client.request(method, path, content=content, params=params, headers=headers)
    except httpx.TransportError:
        return Seen(None)
    content_type = response.headers.get("content-type")
    return create_seen(response.status_code, content_type, response.json() if content_type == "application/json" else response.text)


def with_paths(body: Any, directories: Path) -> Any:
    """A body that names checkpoints where they are here instead of below /models."""
    here = f'"{directories}/'
    return body.replace('"/models/', here) if isinstance(body, str) else json.loads(json.dumps(body).replace('"/models/', here))


def save_checkpoints(
    root: Path, model: Any, first: str, copies: Iterable[str], *, narrow: str, truncated: str, part: tuple[str, str]
) -> None:
    """Save a model under several names.

    Args:
        narrow: checkpoint in which a weight has a wrong shape.
        truncated: checkpoint whose file ends in the middle.
        part: checkpoint that lacks some weights, and what is in their names.
    """
    model.save_pretrained(root / first)
    for name in (*copies, narrow, truncated, part[0]):
        shutil.copytree(root / first, root / name)
    file = "model.safetensors"
    weights = load_file(root / first / file)
    narrowed = {name: value[:-1].clone() if "layers.1.mlp.down_proj" in name else value for name, value in weights.items()}
    save_file(narrowed, root / narrow / file)
    whole = (root / first / file).read_bytes()
    (root / truncated / file).write_bytes(whole[: len(whole) // 2])
    save_file({name: value for name, value in weights.items() if part[1] not in name}, root / part[0] / file)


def repeat_tokens(tokens: Sequence[int]) -> ScriptedModel:
    """A model that says these tokens again and again."""
    return ScriptedModel(lambda prompt, i, loads, seed: (tokens[i % len(tokens)], -4.5))


def check_collection(kind: str, recordings: Mapping[str, Any], at_least: int) -> None:
    """Fail if these are fewer recordings than there are, or not those that come with the tests."""
    assert len(recordings) >= at_least
    assert all(recordings[name] == recording for name, recording in load_selection(kind).items())


# fields whose values must be those recorded; elsewhere only types must
EXACT = frozenset(
    "finish_reason stop_reason matched type object code param success status aborted is_paused detail index output_mode err_type "
    "status_code reasoning_tokens num_paused_requests num_retractions retryable owned_by server_load weight_version version new_version "
    "server_status level tags is_sleeping prompt_tokens cached_tokens".split()
)
COUNTS = frozenset("completion_tokens total_tokens output_token_logprobs_length length start end".split())
TABLES = frozenset({"checksums", "top_logprobs"})  # mappings whose names are data
OWN_TEXT = frozenset({"id", "model", "request_id", "system_fingerprint"})


def compare(recorded: Seen, found: Seen, *, with_counts: bool = True) -> list[str]:
    """Return the differences, one line each.

    Args:
        with_counts: whether the numbers of tokens must be those recorded, which those of an aborted request need not be.
    """
    if recorded.status != found.status:
        return [f"status {found.status}, recorded {recorded.status}: {str(found.body)[:300]}"]
    if recorded.status is None:
        return []
    problems: list[str] = []
    if (recorded.content_type or "").split(";")[0] != (found.content_type or "").split(";")[0]:
        problems.append(f"content type {found.content_type}, recorded {recorded.content_type}")
    if recorded.events is None:
        return problems + compare_values(recorded.body, found.body, "", with_counts)
    assert found.events is not None, "recorded as a stream, the fake gave none"
    if with_counts and len(recorded.events) != len(found.events):
        problems.append(f"{len(found.events)} events, recorded {len(recorded.events)}")
    for i in (0, 1, -3, -2, -1):
        if -len(recorded.events) <= i < len(recorded.events):
            problems += compare_values(recorded.events[i], found.events[i], f"event {i}", with_counts)
    return problems


def compare_values(recorded: Any, found: Any, where: str, with_counts: bool) -> list[str]:
    """The same for values in a body."""
    if type(recorded) is not type(found):
        return [f"{where}: {type(found).__name__} {str(found)[:120]!r}, recorded {type(recorded).__name__} {str(recorded)[:120]!r}"]
    name = re.split(r"[. ]", re.sub(r"\[\d+\]", "", where))[-1]
    if isinstance(recorded, dict):
        if name in TABLES or (recorded and all(key.isdigit() for key in recorded)):
            return compare_values(list(recorded.values())[:1], list(found.values())[:1], where, with_counts)
        problems = [f"{where}: {key} is missing" for key in recorded.keys() - found.keys()]
        problems += [f"{where}: {key} is not in the recording" for key in found.keys() - recorded.keys()]
        for key in recorded.keys() & found.keys():
            problems += compare_values(recorded[key], found[key], f"{where}.{key}", with_counts)
        return problems
    if isinstance(recorded, list):
        if bool(recorded) != bool(found):
            return [f"{where}: {len(found)} items, recorded {len(recorded)}"]
        if (with_counts or name == "weight_versions") and len(recorded) != len(found):
            return [f"{where}: {len(found)} items, recorded {len(recorded)}"]
        pairs = zip(recorded, found, strict=True) if len(recorded) == len(found) else ((recorded[i], found[i]) for i in (0, -1))
        return [problem for i, (a, b) in enumerate(pairs) for problem in compare_values(a, b, f"{where}[{i}]", with_counts)]
    if isinstance(recorded, str) and name in {"message", "error", ""}:
        a, b = normalize_message(recorded), normalize_message(found)
        return [] if a == b else [f"{where}: {b!r}, recorded {a!r}"]
    if name in EXACT or (with_counts and name in COUNTS):
        return [] if recorded == found else [f"{where}: {found!r}, recorded {recorded!r}"]
    return []


def normalize_message(text: str) -> str:
    """An error message without paths, numbers, and what a validator of Python dumps into it."""
    if re.match(r"\d+ validation errors?:", text):
        return "validation error"
    text = re.sub(r"(<path>|/[\w.-]+(/[\w.-]+)*)", "PATH", text)
    return re.sub(r"\d+", "N", re.sub(r"\['.*'\]", "[NAMES]", text))


def read_events(text: str) -> tuple[Any, ...]:
    """The events of a text/event-stream; [DONE] as text."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return tuple(part if part == "[DONE]" else json.loads(part) for part in data)


class Letters:
    """A tokenizer of 128 ids, some of which stand for no text."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) - 32 for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(29 + i) for i in token_ids if 2 < i < 98)
