"""The fake servers beside the real ones: the same model, the same questions, the same answers.

VLLM_PYTHON=path/to/venv/bin/python pytest tests/real_servers/test_fakes.py -m vllm, and the same with SGLANG_PYTHON and -m sglang.
Questions are asked in their order, because some change what the server knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import HeldServer, hold_server
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rollouts.testing import FakeSGLangServer, FakeVLLMServer, SGLangSettings, VLLMSettings, create_tiny_model

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine_recordings import Seen, ask, compare, open_client

TOLERANCE = 1e-4
PATIENCE_S = 120.0  # a busy server takes its time, most of all to describe itself
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONG = [3 + (7 * i) % 60 for i in range(300)]


def save_other_weights(path: Path) -> str:
    """Weights of the same shapes that say other things."""
    model = create_tiny_model(hidden_size=64, head_dim=32, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(path)
    return str(path)


def save_with_head(path: Path) -> str:
    """The same weights with a tensor for the output head, which is tied."""
    save_other_weights(path)
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    return str(path)


def vllm_generate(**changes: Any) -> tuple[str, str, Any]:
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, **changes.pop("sampling_params", {})}
    return "POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": options, **changes}


def sglang_generate(**changes: Any) -> tuple[str, str, Any]:
    options = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True, **changes.pop("sampling_params", {})}
    return "POST", "/generate", {"input_ids": PROMPT, "return_logprob": True, "sampling_params": options, **changes}


def vllm_questions(other: str, with_head: str, model: str) -> dict[str, tuple[str, str, Any]]:
    def reload(path: str) -> tuple[str, str, Any]:
        return "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}

    chat = {"model": model, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    completion = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return {
        "greedy": vllm_generate(),
        "log-probs of two": vllm_generate(sampling_params={"logprobs": 2}),
        "prompt log-probs of two": vllm_generate(sampling_params={"prompt_logprobs": 2, "max_tokens": 1}),
        "prompt log-probs": vllm_generate(sampling_params={"prompt_logprobs": 0, "max_tokens": 1}),
        "prompt twice": vllm_generate(token_ids=LONG),
        "prompt twice again": vllm_generate(token_ids=LONG),
        "salted": vllm_generate(token_ids=LONG, cache_salt="a"),
        "three samples": vllm_generate(sampling_params={"n": 3, "temperature": 1.0, "seed": 1}),
        "no log-probs": vllm_generate(sampling_params={"logprobs": None}),
        "stop string": vllm_generate(sampling_params={"stop": ["9"]}),
        "text": vllm_generate(output_mode="text"),
        "stream": vllm_generate(stream=True),
        "echo": vllm_generate(return_token_ids=True, request_id="abc"),
        "at least": vllm_generate(sampling_params={"min_tokens": 3, "ignore_eos": False}),
        "bias": vllm_generate(sampling_params={"allowed_token_ids": [7]}),
        "bad n": vllm_generate(sampling_params={"n": "x"}),
        "bad top_k": vllm_generate(sampling_params={"top_k": -2}),
        "bad min_p": vllm_generate(sampling_params={"min_p": 2.0}),
        "bad log-probs": vllm_generate(sampling_params={"logprobs": -2}),
        "no sampling": ("POST", "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": None}),
        "body is a list": ("POST", "/inference/v1/generate", [1]),
        "body is empty": ("POST", "/inference/v1/generate", None),
        "tokens are text": ("POST", "/inference/v1/generate", {"token_ids": "abc", "sampling_params": {}}),
        "completion": ("POST", "/v1/completions", completion),
        "completion of text": ("POST", "/v1/completions", {**completion, "prompt": "1+2=", "logprobs": 2}),
        "completion without a prompt": ("POST", "/v1/completions", {"model": model}),
        "chat": ("POST", "/v1/chat/completions", chat),
        "chat of two": ("POST", "/v1/chat/completions", {**chat, "n": 2, "temperature": 1.0}),
        "chat of nobody": ("POST", "/v1/chat/completions", {"model": model}),
        "chat of another": ("POST", "/v1/chat/completions", {**chat, "model": "nope"}),
        "abort without a body": ("POST", "/abort_requests", None),
        "abort with a list": ("POST", "/abort_requests", ["x"]),
        "abort elsewhere": ("POST", "/inference/v1/abort_requests", {"request_ids": []}),
        "version without a body": ("POST", "/update_weight_version", None),
        "call nothing": ("POST", "/collective_rpc", {}),
        "check what": ("POST", "/weight_checker", {"action": "what"}),
        "compare": ("POST", "/weight_checker", {"action": "compare", "baseline": {"x": "y"}}),
        "world": ("GET", "/get_world_size", None),
        "asleep": ("GET", "/is_sleeping", None),
        "models": ("GET", "/v1/models", None),
        "load": ("GET", "/load", None),
        "new weights": reload(other),
        "stale": vllm_generate(token_ids=LONG),
        "reset": ("POST", "/reset_prefix_cache", None),
        "fresh": vllm_generate(token_ids=LONG),
        "label": ("POST", "/update_weight_version", {"new_version": "3"}),
        "labelled": vllm_generate(),
        "nowhere": reload("/no/such/directory"),
        "good again": reload(with_head),
        "after": vllm_generate(),
    }


def sglang_questions(other: str, model: str) -> dict[str, tuple[str, str, Any]]:
    chat = {"model": model, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4, "temperature": 0}
    completion = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    update = {"model_path": other, "weight_version": "1"}
    return {
        "greedy": sglang_generate(),
        "again": sglang_generate(),
        "scores": sglang_generate(logprob_start_len=0, sampling_params={"max_new_tokens": 0}),
        "scores from the third": sglang_generate(logprob_start_len=3, top_logprobs_num=2, sampling_params={"max_new_tokens": 1}),
        "scores of the last id": sglang_generate(input_ids=[5, 63, 7], logprob_start_len=0, sampling_params={"max_new_tokens": 1}),
        "two samples": sglang_generate(sampling_params={"n": 2, "temperature": 1.0}),
        "two samples of two": sglang_generate(input_ids=[PROMPT, [20, 21]], sampling_params={"n": 2, "temperature": 1.0}),
        "two greedy samples": sglang_generate(sampling_params={"n": 2}),
        "no log-probs": sglang_generate(return_logprob=False),
        "prompt tokens": sglang_generate(return_prompt_token_ids=True, rid="mine"),
        "text": ("POST", "/generate", {"text": "1+2=", "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}}),
        "stop string": sglang_generate(sampling_params={"stop": ["9"]}),
        "stream": sglang_generate(stream=True),
        "stream of two": sglang_generate(stream=True, sampling_params={"n": 2, "temperature": 1.0, "max_new_tokens": 2}),
        "at least": sglang_generate(sampling_params={"min_new_tokens": 3, "ignore_eos": False}),
        "bad top_p": sglang_generate(sampling_params={"top_p": 0.0}),
        "bad min_p": sglang_generate(sampling_params={"min_p": 2.0}),
        "bad top_k": sglang_generate(sampling_params={"top_k": -5}),
        "bad n": sglang_generate(sampling_params={"n": 0}),
        "negative length": sglang_generate(sampling_params={"max_new_tokens": -1}),
        "length of text": sglang_generate(sampling_params={"max_new_tokens": "x"}),
        "empty body": ("POST", "/generate", None),
        "body is a list": ("POST", "/generate", [1]),
        "no sampling": ("POST", "/generate", {"input_ids": PROMPT, "sampling_params": None, "stream": False}),
        "empty row": sglang_generate(input_ids=[PROMPT, []]),
        "wrong method": ("GET", "/generate", None),
        "completion": ("POST", "/v1/completions", completion),
        "chat": ("POST", "/v1/chat/completions", chat),
        "models": ("GET", "/v1/models", None),
        "ready": ("GET", "/ready", None),
        "abort without a body": ("POST", "/abort_request", None),
        "pause without a body": ("POST", "/pause_generation", None),
        "continue without a body": ("POST", "/continue_generation", None),
        "version without a body": ("POST", "/update_weight_version", None),
        "version as a number": ("POST", "/update_weight_version", {"new_version": 3}),
        "tensors without a session": ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}),
        "group without a session": ("POST", "/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        "checksums": ("POST", "/weights_checker", {"action": "checksum"}),
        "flush": ("POST", "/flush_cache?timeout=5", None),
        "flush for text": ("POST", "/flush_cache?timeout=x", None),
        "pause": ("POST", "/pause_generation", {"mode": "abort"}),
        "paused ready": ("GET", "/ready", None),
        "paused update": ("POST", "/update_weights_from_disk", update),
        "continue": ("POST", "/continue_generation", {}),
        "new": sglang_generate(),
        "new again": sglang_generate(),
        "unflushed": ("POST", "/update_weights_from_disk", {"model_path": model, "weight_version": "2", "flush_cache": False}),
        "stale": sglang_generate(),
        "nowhere": ("POST", "/update_weights_from_disk", {"model_path": "/no/such/directory", "weight_version": "3"}),
        "after": sglang_generate(),
        "model": ("GET", "/model_info", None),
    }


EXCEPTIONS: dict[str, dict[str, str]] = {
    "vllm": {},
    "sglang": {"empty row": "the real one answers an empty prompt from its neighbor's memory, the fake refuses it"},
}
SAMPLED = {"three samples", "two samples", "two samples of two", "chat of two", "stream of two", "no sampling"}


STREAMS = {"stream", "stream of two"}  # a busy server puts several tokens into one event


def index_of(event: Any) -> int:
    """Events of several samples of one request come in any order."""
    if not isinstance(event, dict):
        return 1_000_000
    choices = event.get("choices")
    return event.get("index", 0) if choices is None else choices[0]["index"] if choices else 1000


async def ask_in_order(client: httpx.AsyncClient, method: str, path: str, body: Any) -> Seen:
    """The answer to a question; events of several samples in the order of their samples."""
    seen = await ask(client, method, path, body)
    return seen if seen.events is None else replace(seen, events=tuple(sorted(seen.events, key=index_of)))


async def ask_all(url: str, questions: dict[str, tuple[str, str, Any]]) -> dict[str, Seen]:
    async with open_client(url) as client:
        return {name: await ask_in_order(client, *question) for name, question in questions.items()}


def numbers_of(value: Any, key: str = "") -> list[float]:
    """Log-probs and tokens of an answer, in its order."""
    if isinstance(value, dict):
        wanted = {"logprob", "logprobs", "output_token_logprobs", "input_token_logprobs", "input_top_logprobs", "output_top_logprobs"}
        wanted |= {"token_ids", "output_ids", "token_logprobs", "prompt_logprobs", "content", "choices", "meta_info"}
        return [n for k in sorted(value) if k in wanted or k.isdigit() for n in numbers_of(value[k], k)]
    if isinstance(value, list):
        return [n for item in value for n in numbers_of(item, key)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def last_of(seen: Seen) -> Any:
    """The body, or the last event of a stream that says everything again each time."""
    if seen.events is None:
        return seen.body
    whole = [event for event in seen.events if isinstance(event, dict) and "output_ids" in event]
    return whole[-1] if whole else None


def without_end(name: str, seen: Seen) -> Seen:
    """Remove the finish reason if it depends on chance."""
    if name != "no sampling" or "meta_info" not in seen.body:  # vLLM refuses it
        return seen
    meta = {key: value for key, value in seen.body["meta_info"].items() if key != "finish_reason"}
    return replace(seen, body={**seen.body, "meta_info": meta})


def find_differences(real: dict[str, Seen], fake: dict[str, Seen]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for name, seen in real.items():
        found = compare(without_end(name, seen), without_end(name, fake[name]), with_counts=name not in SAMPLED | STREAMS)
        if not found and name not in SAMPLED and seen.status == 200:
            a, b = numbers_of(last_of(seen)), numbers_of(last_of(fake[name]))
            if a != pytest.approx(b, abs=TOLERANCE):
                worst = max((abs(x - y) for x, y in zip(a, b, strict=False)), default=0.0)
                found.append(f"log-probs or tokens differ by up to {worst}")
        if found:
            problems[name] = found
    return problems


def report(problems: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {line}" for name, lines in problems.items() for line in lines)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldServer]:
    """A vLLM that nobody has asked before: its counts and its weights are compared."""
    with hold_server("vllm", tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_the_fake_vllm_answers_as_the_real_one(vllm_server, tmp_path):
    path = str(vllm_server.model_path)
    async with httpx.AsyncClient(base_url=vllm_server.url, trust_env=False, timeout=PATIENCE_S) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        settings = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    questions = vllm_questions(save_other_weights(tmp_path / "other"), save_with_head(tmp_path / "with_head"), name)
    real = await ask_all(vllm_server.url, questions)
    same = VLLMSettings(
        model_name=name,
        device=settings["device_config"]["device"],
        logprobs_mode=settings["model_config"]["logprobs_mode"],
        block_size=settings["cache_config"]["block_size"],
        prompt_tokens_details=real["greedy"].body["usage"]["prompt_tokens_details"] is not None,
        max_num_seqs=64,
    )
    async with FakeVLLMServer(path, same, tokenizer=AutoTokenizer.from_pretrained(path)) as server:
        fake = await ask_all(server.url, questions)
    problems = find_differences(real, fake)
    expected = EXCEPTIONS["vllm"]
    assert set(problems) == set(expected), report({name: lines for name, lines in problems.items() if name not in expected})


@pytest.mark.sglang
@pytest.mark.timeout(600)
async def test_the_fake_sglang_answers_as_the_real_one(sglang_server, tmp_path):
    path = str(sglang_server.model_path)
    questions = sglang_questions(save_other_weights(tmp_path / "other"), path)
    real = await ask_all(sglang_server.url, questions)
    settings = SGLangSettings(max_running_requests=64)
    async with FakeSGLangServer(path, settings, tokenizer=AutoTokenizer.from_pretrained(path)) as server:
        fake = await ask_all(server.url, questions)
    problems = find_differences(real, fake)
    expected = EXCEPTIONS["sglang"]
    assert set(problems) == set(expected), report({name: lines for name, lines in problems.items() if name not in expected})
