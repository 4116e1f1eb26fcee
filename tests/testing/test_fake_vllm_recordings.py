"""Every recorded exchange with vLLM 0.32.0, replayed against FakeVLLMServer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import needs
import pytest
import torch
import trio
import trio.testing
from engine_recordings import (
    Letters,
    Seen,
    ask,
    check_collection,
    compare,
    create_seen,
    load_recordings,
    open_client,
    repeat_tokens,
    save_checkpoints,
    with_paths,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from server_waits import wait_for_tokens, wait_until

from rollouts.testing import FakeVLLMServer, VLLMSettings, create_tiny_model

pytestmark = pytest.mark.more
RECORDINGS = load_recordings("vllm")

CPU = VLLMSettings(device="cpu")
NCCL = replace(CPU, weight_transfer="nccl")
KEY = replace(CPU, api_key="key")
STAYS = replace(CPU, keep_alive_on_engine_death=True)
UNCOUNTED = replace(CPU, prompt_tokens_details=False)
WITHOUT_TOKENIZER = {"02_tokens_only_generate", "02_tokens_only_completions", "02_tokens_only_stop_string"}
SETTINGS: dict[str, VLLMSettings] = {
    "02_generate_logprobs_full_vocab": replace(UNCOUNTED, max_logprobs=-1),
    "02_tokens_only_generate": UNCOUNTED,
    "03_ext_collective_rpc": replace(CPU, worker_methods={"rollouts_ping": lambda x: {"rank": 0, "x": x}}),
    "03_generate_while_update_open": NCCL,
    "03_nccl_on_cpu_init": NCCL,
    "03_nccl_on_cpu_init_bad_fields": NCCL,
    "03_nccl_on_cpu_init_missing": NCCL,
    "03_nccl_on_cpu_update_before_init": NCCL,
    "04_abort_queued_response": UNCOUNTED,
    "05_dead_engine_generate": STAYS,
    "05_dead_engine_health": STAYS,
    "05_dev_route_without_key": KEY,
    "05_dev_rpc_without_key": KEY,
    "05_err_bad_api_key": KEY,
    "05_err_gen_n_over_max_num_seqs": replace(CPU, max_num_seqs=128),
    "05_err_no_api_key": KEY,
    "05_overload_queue_cap": replace(CPU, max_num_seqs=4, max_num_queued_reqs=6),
    **{name: replace(CPU, weight_transfer="disk") for name in RECORDINGS if name.startswith("03_disk")},
}

START = ("POST", "/start_weight_update", None)
DIE = [
    ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/models/bad_trunc"}}),
    ("POST", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
]
BEFORE: dict[str, list[tuple[str, str, Any]]] = {
    "03_disk_finish": [START],
    "03_disk_start_twice": [START],
    "03_disk_weight_info": [("POST", "/update_weight_version", {"new_version": "7"})],
    "03_nccl_on_cpu_init_missing": [("POST", "/init_weight_transfer_engine", {"init_info": {"foo": 1}})],
    "03_reload_weights_noargs": [("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/models/m2"}})],
    "03_generate_while_update_open": [START],
    "03_weight_info_step1": [("POST", "/update_weight_version", {"new_version": "step-1"})],
    "05_dead_engine_generate": DIE,
    "05_dead_engine_health": DIE,
    "05_is_paused_after_sleep": [("POST", "/sleep", None)],
    "05_is_sleeping": [("POST", "/sleep", None)],
    "05_wake_up": [("POST", "/sleep", None)],
    **{name: [START] for name in RECORDINGS if name.startswith("03_disk_update") and name != "03_disk_update_without_start"},
}


@pytest.fixture(scope="module")
def model():
    return create_tiny_model(vocab_size=128)


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model) -> Path:
    """Checkpoints under the names that the recordings use."""
    root = tmp_path_factory.mktemp("models")
    missing = ("bad_missing", "layers.1.self_attn.q_proj")
    copies = ("m2", "bad_dtype", "bad_empty")
    save_checkpoints(root, model, "m1", copies, narrow="bad_shape", truncated="bad_trunc", part=missing)
    (root / "bad_empty" / "model.safetensors").unlink()
    weights = load_file(root / "m1" / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, root / "bad_dtype" / "model.safetensors")
    return root


def recorded_tokens(body: Any) -> list[int]:
    """The tokens of the first choice of an answer."""
    choice = body["choices"][0] if isinstance(body, dict) and body.get("choices") else {}
    return choice.get("token_ids") or []


def create_server(name: str, model: Any, response: Any) -> FakeVLLMServer:
    """Create a fake that answers with the recorded tokens, or one with a real model if there are none."""
    tokens = recorded_tokens(response)
    if tokens and "logprobs_full_vocab" not in name:
        model = repeat_tokens(tokens)
    return FakeVLLMServer(model, SETTINGS.get(name, CPU), tokenizer=None if name in WITHOUT_TOKENIZER else Letters())


def seen_of(response: dict[str, Any]) -> Seen:
    if "exception" in response:
        return Seen(None)
    body = response.get("body")
    return create_seen(response["status"], response.get("content_type", "application/json" if body != "" else None), body)


# the exchange before left a connection that the server had closed without saying so, and the recorder used it again
ON_A_STALE_CONNECTION = {"03_nccl_on_cpu_init_missing"}


def labels_of(body: Any) -> list[str]:
    choice = body["choices"][0] if isinstance(body, dict) and body.get("choices") else {}
    return [span["version"] for span in choice.get("weight_versions") or []]


async def replay_exchange(name: str, recording: dict[str, Any], model: Any, directories: Path) -> list[str]:
    request, response = recording["request"], recording["response"]
    body = response.get("body")
    is_stale = name in ON_A_STALE_CONNECTION
    async with create_server(name, model, body) as server, open_client(server.url, keeps_connections=is_stale) as client:
        for method, path, content in BEFORE.get(name, []):
            await ask(client, method, path, with_paths(content, directories))
        labels = labels_of(body)
        if labels and labels != ["default"]:
            await ask(client, "POST", "/update_weight_version", {"new_version": labels[0]})
        usage = body.get("usage") if isinstance(body, dict) else None
        if usage and (usage["prompt_tokens_details"] or {}).get("cached_tokens"):
            await ask(client, request["method"], request["path"], request["body"])
        headers = (
            {"content-type": "text/plain"} if "content_type" in name else {"authorization": "Bearer wrong"} if "bad_api" in name else {}
        )
        found = await ask(client, request["method"], request["path"], with_paths(request["body"], directories), request["params"], headers)
    return compare(seen_of(response), found)


async def is_in_flight(is_done: Callable[[], bool], recorded: bool) -> bool:
    """Return whether the request is still in flight, after time to end for one that was not when it was recorded."""
    if recorded:
        await trio.testing.wait_all_tasks_blocked(0.01)
    else:
        await wait_until(is_done)
    return not is_done()


async def run_events(
    recording: dict[str, Any], server: FakeVLLMServer, client: httpx.AsyncClient, directories: Path, is_done: Callable[[], bool]
) -> list[str]:
    problems: list[str] = []
    for event in recording["events"]:
        found = await ask(client, event["method"], event["path"], with_paths(event.get("json"), directories), event.get("params"))
        recorded = Seen(event["status"], "application/json" if event["body"] != "" else None, event["body"])
        problems += [f"{event['path']}: {problem}" for problem in compare(recorded, found)]
        was = event.get("request_still_in_flight", event.get("in_flight_alive_0.3s_later"))
        ends_by_itself = recording["request"]["body"].get("request_id") == "ab6" if "request" in recording else False
        if was is not None and not ends_by_itself and await is_in_flight(is_done, was) != was:
            problems.append(f"{event['path']}: still in flight is {not was}, recorded {was}")
    return problems


async def replay_in_flight(name: str, recording: dict[str, Any], model: Any, directories: Path) -> list[str]:
    """A long request, and what is done to the server meanwhile."""
    request = recording.get("in_flight_request") or recording["request"]
    if "in_flight_stream" in recording:
        events = [text for text in recording["in_flight_stream"] if text != "..."]
        recorded = Seen(200, "text/event-stream", events=tuple(e if e == "[DONE]" else json.loads(e) for e in events))
        labels = [span["version"] for span in recorded.events[-2]["choices"][0]["weight_versions"]]
        response = None
    else:
        response = recording.get("in_flight_response") or recording["response"]
        recorded = Seen(response["status"], "application/json", response["body"])
        labels = labels_of(response["body"])
    found: list[Seen] = []

    async def generate() -> None:
        found.append(await ask(client, request["method"], request["path"], request["body"]))

    body = response["body"] if response else None
    async with create_server(name, model, body) as server, open_client(server.url) as client:
        if labels:
            await ask(client, "POST", "/update_weight_version", {"new_version": labels[0]})
        server.scheduler.hold_tokens(20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_for_tokens(server, 20)
            if response is not None and response["status"] is None:  # the client went away
                nursery.cancel_scope.cancel()
            nursery.start_soon(release_when_one_waits_for_it, server, recording["events"])
            problems = await run_events(recording, server, client, directories, lambda: bool(found))
            server.scheduler.release_tokens()
        if response is not None and response["status"] is None:
            await wait_until(lambda: not server.scheduler.running)
            return problems
    is_stream = "in_flight_stream" in recording
    return problems + compare(recorded, found[0], with_counts=False) + ([] if is_stream else compare_spans(labels, found[0]))


async def release_when_one_waits_for_it(server: FakeVLLMServer, events: list[dict[str, Any]]) -> None:
    if any((event.get("params") or {}).get("mode") == "wait" for event in events):
        await wait_until(lambda: server.core.is_paused)
        server.scheduler.release_tokens()


def compare_spans(labels: list[str], found: Seen) -> list[str]:
    return [] if labels_of(found.body) == labels else [f"spans {labels_of(found.body)}, recorded {labels}"]


async def replay_queued_abort(name: str, recording: dict[str, Any], model: Any, directories: Path) -> list[str]:
    found: list[Seen] = []

    async def generate() -> None:
        body = {"token_ids": [5, 6], "request_id": "q1", "sampling_params": {"logprobs": 0}}
        found.append(await ask(client, "POST", "/inference/v1/generate", body))

    async with create_server(name, model, None) as server, open_client(server.url) as client:
        await ask(client, "POST", "/pause", None, {"mode": "keep"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_until(lambda: bool(server.scheduler.waiting))
            await ask(client, "POST", "/abort_requests", {"request_ids": ["generate-tokens-q1"]})
    return compare(Seen(recording["response"]["status"], "application/json", recording["response"]["body"]), found[0])


async def replay_overload(name: str, recording: dict[str, Any], model: Any, directories: Path) -> list[str]:
    found: list[Seen] = []

    async def generate() -> None:
        found.append(await ask(client, "POST", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 20}}))

    async with create_server(name, model, None) as server, open_client(server.url) as client:
        server.scheduler.hold_tokens(0)
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(generate)
            await wait_until(lambda: len(found) + len(server.scheduler.running) + len(server.scheduler.waiting) == 40)
            await ask(client, "POST", "/abort_requests", {})
    counts = {str(status): sum(seen.status == status for seen in found) for status in (200, 503)}
    rejected = recording["rejected_response"]
    first = next(seen for seen in found if seen.status == 503)
    problems = compare(Seen(503, rejected["headers"]["content-type"], rejected["body"]), first)
    return problems + ([] if counts == recording["status_counts"] else [f"{counts}, recorded {recording['status_counts']}"])


async def replay_pause_wait(name: str, recording: dict[str, Any], model: Any, directories: Path) -> list[str]:
    """A pause that waits: what runs ends, what comes later stays queued until the resume."""
    order: list[str] = []
    seen: dict[str, Seen] = {}

    async def generate(key: str, max_tokens: int) -> None:
        options = {"max_tokens": max_tokens, "ignore_eos": True}
        seen[key] = await ask(client, "POST", "/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": options})
        order.append(key)

    async def pause() -> None:
        seen["pause"] = await ask(client, "POST", "/pause", None, {"mode": "wait"})
        order.append("pause")

    async with create_server(name, model, None) as server, open_client(server.url) as client:
        await ask(client, "POST", "/update_weight_version", {"new_version": "A"})
        server.scheduler.hold_tokens(3)
        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(generate, f"inflight{i}", 10)
            await wait_for_tokens(server, 3, num_sequences=8)
            nursery.start_soon(pause)
            await wait_until(lambda: server.core.is_paused)
            nursery.start_soon(generate, "arrived_during_wait", 5)
            await wait_until(lambda: len(server.scheduler.waiting) == 1)
            server.scheduler.release_tokens()
            await wait_until(lambda: "pause" in order)
            late = "arrived_during_wait" not in order and len(server.scheduler.waiting) == 1
            await ask(client, "POST", "/update_weight_version", {"new_version": "B"})
            await ask(client, "POST", "/resume", None)
    problems = [] if late == recording["late_request_still_queued_after_pause_returned"] else ["the late request was not queued"]
    problems += [] if seen["pause"].body == recording["pause_wait"]["body"] else [f"pause: {seen['pause'].body}"]
    for key, entry in recording.items():
        if key.startswith(("inflight", "arrived")):
            problems += compare_spans([span["version"] for span in entry["weight_versions"]], seen[key])
            problems += [] if seen[key].body["choices"][0]["finish_reason"] == entry["finish"] else [f"{key} ended otherwise"]
    return problems


SPECIAL = {
    "03_pause_wait_late_request": replay_pause_wait,
    "04_abort_queued_response": replay_queued_abort,
    "05_overload_queue_cap": replay_overload,
}


def replay(name: str):
    recording = RECORDINGS[name]
    is_long = "in_flight_request" in recording or "events" in recording
    return SPECIAL.get(name, replay_in_flight if is_long else replay_exchange)


@pytest.mark.parametrize("name", sorted(RECORDINGS))
async def test_the_fake_answers_as_recorded(name: str, model, directories):
    torch.set_num_threads(1)
    problems = await partial(replay(name), name, RECORDINGS[name], model, directories)()
    assert not problems, "\n".join(problems)


@needs.ALL_RECORDINGS
def test_the_selection_is_part_of_the_collection():
    check_collection("vllm", RECORDINGS, at_least=120)
