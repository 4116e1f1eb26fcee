"""The fake servers do what makes the real ones hard to use, and whatever else goes wrong, on demand."""

from __future__ import annotations

import base64
import os
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
import trio.testing
from engine_recordings import open_client, read_events
from server_waits import wait_for_requests, wait_for_tokens, wait_until
from torch.nn.functional import log_softmax

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError
from rollouts.testing import FakeSGLangServer, FakeVLLMServer, Fault, ScriptedModel, SGLangSettings, VLLMSettings, create_tiny_model
from rollouts.testing.servers.vllm.engine import DEAD

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def lively_model(seed: int = 0):
    """Weights with answers that differ from seed to seed and from token to token."""
    model = create_tiny_model(vocab_size=64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def models():
    return lively_model(0), lively_model(1)


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory, models):
    directory = tmp_path_factory.mktemp("new")
    models[1].save_pretrained(directory)
    return str(directory)


def log_probs_of(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Compute the log-probs of every token after the first in a full forward pass."""
    with torch.inference_mode():
        rows = log_softmax(model(torch.tensor([tokens])).logits[0].float() / temperature, -1)
    return [float(rows[i, token]) for i, token in enumerate(tokens[1:])]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def script(prompt: tuple[int, ...], index: int, loads: int, seed: int | None) -> tuple[int, float]:
    return 20 + index % 10, -0.5 - loads


class Client:
    """Both servers by the same few verbs."""

    def __init__(self, server: FakeSGLangServer | FakeVLLMServer, http: httpx.AsyncClient) -> None:
        self.server, self.http = server, http
        self.is_vllm = isinstance(server, FakeVLLMServer)

    async def post(self, path: str, body: Any = None, **params: Any) -> httpx.Response:
        return await self.http.post(path, json=body, params=params)

    async def generate(self, count: int = 8, *, rid: str | None = None, prompt: list[int] | None = None, **options: Any) -> dict[str, Any]:
        """One sample: tokens, log_probs, labels, finish, cached."""
        options = {"ignore_eos": True, "temperature": 0.0, **options}
        prompt = prompt or PROMPT
        if self.is_vllm:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": count, "logprobs": 0, **options}}
            body |= {"request_id": rid} if rid else {}
            answer = (await self.post("/inference/v1/generate", body)).raise_for_status().json()
            choice = answer["choices"][0]
            return {
                "tokens": choice["token_ids"],
                "log_probs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
                "spans": choice["weight_versions"],
                "finish": choice["finish_reason"],
                "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            }
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": count, **options}}
        body |= {"rid": rid} if rid else {}
        answer = (await self.post("/generate", body)).raise_for_status().json()
        meta = answer["meta_info"]
        return {
            "tokens": answer["output_ids"],
            "log_probs": [entry[0] for entry in meta["output_token_logprobs"]],
            "spans": meta["weight_versions"],
            "finish": meta["finish_reason"]["type"],
            "cached": meta.get("cached_tokens"),
        }

    async def pause(self, *, keep: bool) -> None:
        """Let requests stand and forget their keys and values, or abort them."""
        if self.is_vllm:
            await self.post("/pause", mode="keep" if keep else "abort")
        else:
            await self.post("/pause_generation", {"mode": "retract" if keep else "abort"})

    async def resume(self) -> None:
        await (self.post("/resume") if self.is_vllm else self.post("/continue_generation", {}))

    async def load(self, path: str, version: str, *, reset: bool = True) -> httpx.Response:
        if self.is_vllm:
            response = await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            await self.post("/update_weight_version", {"new_version": version})
            if reset:
                await self.post("/reset_prefix_cache")
            return response
        return await self.post("/update_weights_from_disk", {"model_path": path, "weight_version": version, "flush_cache": reset})

    @property
    def generate_path(self) -> str:
        return "/inference/v1/generate" if self.is_vllm else "/generate"

    @property
    def load_path(self) -> str:
        return "/collective_rpc" if self.is_vllm else "/update_weights_from_disk"

    async def wait_for_requests(self, path: str, count: int) -> None:
        await wait_for_requests(self.server, path, count)

    def hold_tokens(self, count: int) -> None:
        self.server.scheduler.hold_tokens(count)

    def release_tokens(self) -> None:
        self.server.scheduler.release_tokens()

    async def wait_for_tokens(self, count: int, num_sequences: int = 1) -> None:
        await wait_for_tokens(self.server, count, num_sequences)


@asynccontextmanager
async def hold_one(client: Client, held: int, count: int = 40) -> AsyncIterator[dict[str, Any]]:
    """A sample of `count` tokens that stands still at `held` of them during the block; what is yielded has its answer afterwards."""
    found: dict[str, Any] = {}

    async def generate() -> None:
        found.update(await client.generate(count))

    client.hold_tokens(held)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await client.wait_for_tokens(held)
        yield found
        client.release_tokens()


SETTINGS_OF = {FakeSGLangServer: SGLangSettings, FakeVLLMServer: VLLMSettings}


@asynccontextmanager
async def serve(kind: type, model: Any, settings: Any = None, **options: Any) -> AsyncIterator[Client]:
    """A server, both kinds with a prefix cache that takes single tokens."""
    settings = settings or SETTINGS_OF[kind]()
    server = kind(model, replace(settings, block_size=1) if kind is FakeVLLMServer else settings, **options)
    async with server, open_client(server.url) as http:
        yield Client(server, http)


both = pytest.mark.parametrize("kind", [FakeSGLangServer, FakeVLLMServer])


@both
async def test_greedy_tokens_and_log_probs_are_those_of_the_model(kind, models):
    async with serve(kind, models[0]) as client:
        found = await client.generate(12)
    assert found["tokens"] == greedy_tokens(models[0], PROMPT, 12)
    expected = log_probs_of(models[0], PROMPT + found["tokens"])[-12:]
    assert found["log_probs"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "kind, settings, is_tempered",
    [
        (FakeSGLangServer, SGLangSettings(), True),
        (FakeSGLangServer, SGLangSettings(original_logprob=True), False),
        (FakeVLLMServer, VLLMSettings(), True),
        (FakeVLLMServer, VLLMSettings(logprobs_mode="raw_logprobs"), False),
    ],
)
async def test_log_probs_are_of_the_kind_of_the_server(kind, settings, is_tempered, models):
    async with serve(kind, models[0], settings) as client:
        found = await client.generate(16, temperature=0.5)
    expected = log_probs_of(models[0], PROMPT + found["tokens"], 0.5 if is_tempered else 1.0)[-16:]
    other = log_probs_of(models[0], PROMPT + found["tokens"], 1.0 if is_tempered else 0.5)[-16:]
    assert found["log_probs"] == pytest.approx(expected, abs=1e-5)
    assert found["log_probs"] != pytest.approx(other, abs=0.1)


async def test_truncation_is_in_the_log_probs_of_vllm_and_not_of_sglang(models):
    for kind in (FakeSGLangServer, FakeVLLMServer):
        async with serve(kind, models[0]) as client:
            found = await client.generate(16, temperature=1.0, top_k=2)
        full = log_probs_of(models[0], PROMPT + found["tokens"])[-16:]
        differences = [a - b for a, b in zip(found["log_probs"], full, strict=True)]
        if kind is FakeSGLangServer:
            assert max(map(abs, differences)) < 1e-5
        else:
            assert min(differences) >= -1e-5
            assert max(differences) > 0.05


@both
async def test_a_copy_of_the_model_is_served(kind, models):
    model = lively_model(0)
    async with serve(kind, model) as client:
        before = await client.generate()
        with torch.no_grad():
            next(model.parameters()).zero_()
        assert await client.generate() | {"cached": 0} == before | {"cached": 0}


@both
async def test_new_weights_speak_after_an_update(kind, models, new_weights):
    async with serve(kind, models[0]) as client:
        assert (await client.generate())["tokens"] == greedy_tokens(models[0], PROMPT, 8)
        await client.load(new_weights, "1")
        found = await client.generate()
    assert found["tokens"] == greedy_tokens(models[1], PROMPT, 8)
    assert found["spans"] == [{"version": "1", "start": 0, "end": 8}]


@both
async def test_a_cache_that_is_not_reset_spoils_the_log_probs_of_new_weights(kind, models, new_weights):
    async with serve(kind, models[0]) as client:
        await client.generate()
        await client.load(new_weights, "1", reset=False)
        found = await client.generate()
    expected = log_probs_of(models[1], PROMPT + found["tokens"])[-8:]
    assert found["cached"] == len(PROMPT) - 1
    assert max(abs(a - b) for a, b in zip(found["log_probs"], expected, strict=True)) > 0.1


@both
async def test_a_request_across_an_update_has_the_log_probs_of_each_version(kind, models, new_weights):
    async with serve(kind, models[0]) as client:
        async with hold_one(client, 10) as found:
            await client.pause(keep=True)
            await client.load(new_weights, "1")
            await client.resume()
    assert found["spans"] == [{"version": "default", "start": 0, "end": 10}, {"version": "1", "start": 10, "end": 40}]
    old, new = (log_probs_of(model, PROMPT + found["tokens"])[-40:] for model in models)
    assert found["log_probs"] == pytest.approx(old[:10] + new[10:], abs=1e-4)


async def test_old_keys_with_new_weights_fit_neither_model(models, new_weights):
    async with serve(FakeVLLMServer, models[0]) as client:
        async with hold_one(client, 10) as found:
            await client.post("/pause", mode="keep", clear_cache="false")
            await client.load(new_weights, "1", reset=False)
            await client.resume()
    assert [span["end"] for span in found["spans"]] == [10, 40]
    new = log_probs_of(models[1], PROMPT + found["tokens"])[-40:]
    assert max(abs(a - b) for a, b in zip(found["log_probs"][10:], new[10:], strict=True)) > 0.1


@both
async def test_new_requests_wait_while_the_server_is_paused(kind):
    done: list[dict[str, Any]] = []

    async def generate() -> None:
        done.append(await client.generate(3))

    async with serve(kind, script) as client:
        await client.pause(keep=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await client.wait_for_requests(client.generate_path, 1)
            assert not done
            await client.resume()
    assert done[0]["tokens"] == [20, 21, 22]


@both
async def test_a_script_is_told_how_often_weights_were_loaded(kind, tmp_path):
    async with serve(kind, script) as client:
        assert (await client.generate(2))["log_probs"] == [-0.5, -0.5]
        await client.load(str(tmp_path), "1")
        assert (await client.generate(2))["log_probs"] == [-1.5, -1.5]
        await client.load(str(tmp_path), "2", reset=False)
        assert (await client.generate(2))["log_probs"] == [-1.5, -1.5], "the prompt is read from a cache of the weights before"


@both
async def test_a_client_that_hangs_up_ends_its_request(kind):
    async with serve(kind, script) as client:
        client.hold_tokens(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, 400)
            await client.wait_for_tokens(3)
            nursery.cancel_scope.cancel()
        await wait_until(lambda: not client.server.scheduler.running)


@both
async def test_a_control_call_is_carried_out_although_its_client_has_left(kind, tmp_path):
    async with serve(kind, script, seconds_per_update=0.3) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.load, str(tmp_path), "1")
            await wait_until(lambda: client.server.count(client.load_path) == 1)
            nursery.cancel_scope.cancel()
        await wait_until(lambda: client.server.num_connections == 0)
        await wait_until(lambda: client.server.model.num_loads == 1)
        assert (await client.generate(1, prompt=[7, 7]))["log_probs"] == [-1.5]


@both
async def test_faults_happen_to_the_requests_they_are_meant_for(kind):
    path = "/generate" if kind is FakeSGLangServer else "/inference/v1/generate"
    done: list[dict[str, Any]] = []

    async def generate() -> None:
        done.append(await client.generate(2))

    async with serve(kind, script, faults=[Fault("status", path, after=1, times=2, status=503, body="busy")]) as client:
        await client.generate(2)
        for _ in range(2):
            with pytest.raises(httpx.HTTPStatusError, match="503"):
                await client.generate(2)
        await client.generate(2)
        client.server.add_fault(Fault("drop"))
        with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
            await client.generate(2)
        client.server.add_fault(Fault("cut"))
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            await client.generate(2)
        client.server.add_fault(Fault("garbage"))
        with pytest.raises(httpx.RemoteProtocolError):
            await client.generate(2)
        client.server.add_fault(Fault("delay", delay_s=0.1))
        started = trio.current_time()
        await client.generate(2)
        assert trio.current_time() - started >= 0.1
        client.server.add_fault(Fault("hang", times=None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await client.wait_for_requests(path, 9)
            assert not done
            nursery.cancel_scope.cancel()
        client.server.clear_faults()
        await client.generate(2)
        assert client.server.count(path) == 10


@both
async def test_a_stream_can_be_cut(kind):
    path = "/generate" if kind is FakeSGLangServer else "/inference/v1/generate"
    options = {"max_new_tokens": 9} if kind is FakeSGLangServer else {"max_tokens": 9}
    body = {"input_ids": PROMPT, "token_ids": PROMPT, "stream": True, "sampling_params": options}
    async with serve(kind, script, faults=[Fault("cut")]) as client:
        lines: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.http.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    lines += [line] if line else []
        assert len(lines) == 2


@pytest.mark.parametrize(
    "path, body",
    [
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9}}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 9}),
    ],
)
async def test_a_stream_tells_of_the_death_of_the_engine(path, body):
    stays = VLLMSettings(keep_alive_on_engine_death=True)
    async with serve(FakeVLLMServer, script, stays, tokenizer=create_char_tokenizer(64)) as client:
        client.server.core.weights = "absent"
        response = await client.post(path, {**body, "stream": True})
        assert response.status_code == 200
        error, done = read_events(response.text)
        assert error["error"]["message"] == DEAD
        assert done == "[DONE]"
        assert (await client.http.get("/health")).status_code == 503


@both
async def test_a_dead_server_refuses_until_it_is_revived(kind):
    async with serve(kind, script) as client:
        client.hold_tokens(1)
        url = client.server.url
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                with pytest.raises(httpx.TransportError):
                    await client.generate(400)

            nursery.start_soon(generate)
            await client.wait_for_tokens(1)
            client.server.die()
        assert not client.server.is_alive
        with pytest.raises(httpx.ConnectError):
            await client.generate(1)
        await client.server.revive()
        assert client.server.url == url
        assert (await client.generate(1))["tokens"] == [20]


@both
async def test_idle_connections_are_closed(kind):
    for keep_alive_s in (0.05, 600.0):
        server = kind(script, SETTINGS_OF[kind](keep_alive_s=keep_alive_s))
        async with server, httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False) as http:
            await http.get("/health")
            if keep_alive_s < 1:
                await wait_until(lambda: server.num_connections == 0)  # noqa: B023
            else:
                await trio.testing.wait_all_tasks_blocked(0.1)
                assert server.num_connections == 1


async def test_only_the_version_that_is_asked_for_is_told():
    async with serve(FakeVLLMServer, script, VLLMSettings(version="9.9.9", model_name="other")) as client:
        assert (await client.http.get("/version")).json() == {"version": "9.9.9"}
        assert (await client.http.get("/v1/models")).json()["data"][0]["id"] == "other"
    async with serve(FakeSGLangServer, script, SGLangSettings(version="9.9.9", model_path="/models/other")) as client:
        assert (await client.http.get("/server_info")).json()["version"] == "9.9.9"
        assert (await client.http.get("/model_info")).json()["model_path"] == "/models/other"


async def test_gates_of_vllm():
    async with serve(FakeVLLMServer, script, VLLMSettings(dev_mode=False, scale_out=False)) as client:
        assert (await client.post("/pause")).status_code == 404
        response = await client.post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}})
        assert (response.status_code, response.json()["error"]["type"]) == (403, "PermissionDeniedError")


async def test_completions_of_vllm_take_what_they_are_not_told_from_the_generation_config(models, tmp_path):
    greedy = VLLMSettings(generation_config={"top_k": 1})
    async with serve(FakeVLLMServer, models[0], greedy, tokenizer=create_char_tokenizer(64)) as client:
        body = {"model": "m", "prompt": PROMPT, "temperature": 1.0, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
        found = (await client.post("/v1/completions", body)).json()["choices"][0]["token_ids"]
        assert found == greedy_tokens(models[0], PROMPT, 8)
        found = (await client.post("/v1/completions", {**body, "top_k": 0, "seed": 3})).json()["choices"][0]["token_ids"]
        assert found != greedy_tokens(models[0], PROMPT, 8)
        chat = {"model": "m", "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
        answer = (await client.post("/v1/chat/completions", chat)).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_seeds_work_on_vllm_and_not_on_sglang(models):
    async with serve(FakeVLLMServer, models[0]) as client:
        options = {"temperature": 1.0, "seed": 7}
        assert (await client.generate(12, **options))["tokens"] == (await client.generate(12, **options))["tokens"]
        body = {"token_ids": PROMPT, "sampling_params": {"n": 3, "max_tokens": 12, **options}}
        choices = (await client.post("/inference/v1/generate", body)).json()["choices"]
        assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for deterministic in (False, True):
        async with serve(FakeSGLangServer, models[0], SGLangSettings(deterministic=deterministic)) as client:
            options = {"temperature": 1.0, "sampling_seed": 7}
            same = (await client.generate(12, **options))["tokens"] == (await client.generate(12, **options))["tokens"]
            assert same == deterministic


async def test_weights_that_do_not_fit_brick_vllm_and_a_good_reload_helps_only_after_files_that_were_damaged(models, tmp_path, new_weights):
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ..")
    async with serve(FakeVLLMServer, models[0]) as client:
        assert (await client.load(str(tmp_path), "1")).status_code == 500
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.load(new_weights, "1")).status_code == 200
        assert (await client.generate())["tokens"] == greedy_tokens(models[1], PROMPT, 8)
        create_tiny_model(vocab_size=32).save_pretrained(tmp_path)
        assert (await client.load(str(tmp_path), "2")).status_code == 500
        assert (await client.load(new_weights, "2")).status_code == 500
        with pytest.raises(httpx.HTTPStatusError, match="500"):
            await client.generate()
        await wait_until(lambda: not client.server.is_alive)
        with pytest.raises(httpx.ConnectError):
            await client.generate()


async def test_missing_tensors_are_no_error(models, new_weights, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{new_weights}/model.safetensors")
    save_file({name: value for name, value in weights.items() if "layers.0" not in name}, tmp_path / "model.safetensors")
    for kind in (FakeSGLangServer, FakeVLLMServer):
        async with serve(kind, models[0]) as client:
            assert (await client.load(str(tmp_path), "1")).status_code == 200
            found = await client.generate()
            expected = log_probs_of(models[1], PROMPT + found["tokens"])[-8:]
            assert found["log_probs"] != pytest.approx(expected, abs=0.01)


async def test_pausing_sglang_with_abort_inside_in_place_hangs_for_ever():
    back: list[str] = []

    async def post(path: str, body: Any) -> None:
        await client.post(path, body)
        back.append(path)

    async with serve(FakeSGLangServer, script) as client:
        client.hold_tokens(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, 400)
            await client.wait_for_tokens(1)
            await client.post("/pause_generation", {"mode": "in_place"})
            nursery.start_soon(post, "/pause_generation", {"mode": "abort"})
            await client.wait_for_requests("/pause_generation", 2)
            nursery.start_soon(post, "/continue_generation", {})
            nursery.start_soon(post, "/continue_generation", {})
            await client.wait_for_requests("/continue_generation", 2)
            await trio.sleep(0.1)  # several looks of the pause at whether it is done
            assert back == []
            nursery.cancel_scope.cancel()


async def test_sglang_aborts_by_prefix_and_only_once():
    found: dict[str, Any] = {}

    async def generate(rid: str) -> None:
        found[rid] = await client.generate(400 if rid.startswith("a") else 30, rid=rid)

    async with serve(FakeSGLangServer, script) as client:
        client.hold_tokens(3)
        async with trio.open_nursery() as nursery:
            for rid in ("a", "ab", "b"):
                nursery.start_soon(generate, rid)
            await client.wait_for_tokens(3, num_sequences=3)
            await client.post("/abort_request", {"rid": "a"})
            client.release_tokens()
        assert [found[rid]["finish"] for rid in ("a", "ab", "b")] == ["abort", "abort", "length"]
        # a request that waits for the end of a pause has not reached the scheduler: its abort is lost, and so are all later ones
        await client.pause(keep=False)
        client.hold_tokens(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate, "c")
            await client.wait_for_requests("/generate", 4)
            await client.post("/abort_request", {"rid": "c"})
            await client.resume()
            await client.wait_for_tokens(3)
            await client.post("/abort_request", {"rid": "c"})
            client.release_tokens()
        assert found["c"]["finish"] == "length"


async def test_an_update_of_sglang_waits_for_requests_and_holds_back_new_ones(tmp_path):
    order: list[str] = []

    async def note(name: str, call: Any) -> None:
        await call
        order.append(name)

    async with serve(FakeSGLangServer, script) as client:
        client.hold_tokens(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, "running", client.generate(30))
            await client.wait_for_tokens(2)
            nursery.start_soon(note, "update", client.load(str(tmp_path), "1"))
            await client.wait_for_requests(client.load_path, 1)
            nursery.start_soon(note, "late", client.generate(1))
            await client.wait_for_requests("/generate", 2)
            assert order == []
            client.release_tokens()
        assert order == ["running", "update", "late"]


async def test_an_update_of_sglang_that_loses_the_race_has_changed_the_weights_and_not_the_label(models, new_weights):
    async with serve(FakeSGLangServer, models[0]) as client:
        await client.generate()
        client.server.race_next_update()
        response = await client.load(new_weights, "1")
        assert response.status_code == 400
        assert response.json()["message"].startswith("Weights were updated, but")
        assert (await client.http.get("/model_info")).json()["weight_version"] == "default"
        found = await client.generate()
        assert found["spans"][0]["version"] == "1"
        assert found["cached"] > 0, "the cache of the old weights is still read"
        assert (await client.load(new_weights, "1")).status_code == 200
        assert (await client.generate())["tokens"] == greedy_tokens(models[1], PROMPT, 8)


async def test_tensors_arrive_and_code_does_not(models, tmp_path):
    new = [(name, value) for name, value in models[1].state_dict().items()]
    async with serve(FakeSGLangServer, models[0]) as client:
        await client.post("/begin_weight_update", {})
        payload = base64.b64encode(pickle.dumps(new)).decode()
        body = {"serialized_named_tensors": [payload], "weight_version": "1"}
        assert (await client.post("/update_weights_from_tensor", body)).json()["success"]
        await client.post("/end_weight_update", {})
        assert (await client.generate())["tokens"] == greedy_tokens(models[1], PROMPT, 8)
        await client.post("/begin_weight_update", {})
        evil = base64.b64encode(pickle.dumps([("model.norm.weight", Evil(str(tmp_path / "code")))])).decode()
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/update_weights_from_tensor", {"serialized_named_tensors": [evil]})
        assert not (tmp_path / "code").exists()
        assert not client.server.is_alive


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


async def test_vllm_on_a_cpu_keeps_the_old_head_of_a_model_that_ties_it(models, new_weights, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{new_weights}/model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    async with serve(FakeVLLMServer, models[0], VLLMSettings(device="cpu")) as client:
        await client.load(new_weights, "1")
        found = await client.generate()
        expected = log_probs_of(models[1], PROMPT + found["tokens"])[-8:]
        assert max(abs(a - b) for a, b in zip(found["log_probs"], expected, strict=True)) > 0.1
        await client.load(str(tmp_path), "2")
        assert (await client.generate())["tokens"] == greedy_tokens(models[1], PROMPT, 8)


async def test_nothing_is_generated_where_nothing_is_asked_for():
    async with serve(FakeSGLangServer, script) as client:
        found = await client.generate(0)
        assert (found["tokens"], found["finish"]) == ([], "length")
        assert found["spans"] == [{"version": "default", "start": 0, "end": 0}]


async def test_a_new_label_of_sglang_aborts_everything_unless_told_not_to():
    found: list[dict[str, Any]] = []
    async with serve(FakeSGLangServer, script) as client:
        for body in ({"new_version": "1"}, {"new_version": "2", "abort_all_requests": False}):
            async with hold_one(client, 3, count=100) as answer:
                await client.post("/update_weight_version", body)
            found.append(answer)
    assert [answer["finish"] for answer in found] == ["abort", "length"]
    assert [span["version"] for span in found[1]["spans"]] == ["1", "2"]


@both
async def test_requests_of_nonsense_are_refused(kind):
    path, ids, options = (
        ("/generate", "input_ids", "max_new_tokens") if kind is FakeSGLangServer else ("/inference/v1/generate", "token_ids", "max_tokens")
    )
    bodies = [
        {ids: PROMPT, "sampling_params": 7},
        {ids: 7, "sampling_params": {}},
        {ids: PROMPT, "sampling_params": {options: "x"}},
        [1],
        7,
    ]
    bodies += [{ids: PROMPT, "sampling_params": {"temperature": "hot"}}, {ids: [[[1]]], "sampling_params": {}}, {}]
    async with serve(kind, script) as client:
        for body in bodies:
            assert (await client.post(path, body)).status_code == 400, body
        assert (await client.generate(1))["tokens"] == [20]


async def test_many_requests_at_once():
    async with serve(FakeVLLMServer, script, VLLMSettings(max_num_seqs=100), seconds_per_token=0.005) as client:
        found: list[dict[str, Any]] = []

        async def generate(i: int) -> None:
            found.append(await client.generate(5, prompt=[3 + i % 50, 4]))

        async with trio.open_nursery() as nursery:
            for i in range(300):
                nursery.start_soon(generate, i)
        assert len(found) == 300
        assert all(answer["tokens"] == [20, 21, 22, 23, 24] for answer in found)
        assert client.server.num_connections <= 300
        assert not client.server.scheduler.running


async def test_prompt_log_probs(models):
    expected = log_probs_of(models[0], PROMPT)
    async with serve(FakeVLLMServer, models[0]) as client:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "temperature": 0.5, "prompt_logprobs": 0}}
        entries = (await client.post("/inference/v1/generate", body)).json()["prompt_logprobs"]
        assert entries[0] is None
        found = [entry[str(token)]["logprob"] for entry, token in zip(entries[1:], PROMPT[1:], strict=True)]
        assert found == pytest.approx(expected, abs=1e-5)
    async with serve(FakeSGLangServer, models[0]) as client:
        body = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 3, "sampling_params": {"max_new_tokens": 1}}
        entries = (await client.post("/generate", body)).json()["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == PROMPT[3:]
        assert entries[0][0] is None
        assert [value for value, _, _ in entries[1:]] == pytest.approx(expected[3:], abs=1e-5)
    scripted = ScriptedModel(script, score=lambda tokens, loads: [-2.0 - loads] * (len(tokens) - 1))
    async with serve(FakeVLLMServer, scripted) as client:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
        assert (await client.post("/inference/v1/generate", body)).json()["prompt_logprobs"][1]["6"]["logprob"] == -2.0


async def test_time_of_tokens_and_of_a_place():
    async with serve(FakeVLLMServer, script, VLLMSettings(max_num_seqs=1), seconds_per_token=0.02) as client:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.generate, 5)
            nursery.start_soon(client.generate, 5)
        assert trio.current_time() - started >= 0.2
        assert len(client.server.received) == 2


async def test_a_condition_is_waited_for_and_not_for_ever():
    async with FakeVLLMServer(script) as server, httpx.AsyncClient(base_url=server.url, trust_env=False, verify=False) as http:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http.get, "/health")
            await server.wait_until(lambda: server.count("/health") == 1)
        with pytest.raises(trio.TooSlowError):
            await server.wait_until(lambda: False, timeout_s=0.01)


GUIDE = Path(__file__).parents[2] / "docs" / "testing.md"
GUIDE_TESTS: dict[str, Any] = {}
GUIDE_CODE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE))
exec(compile(GUIDE_CODE, "the code of docs/testing.md", "exec"), GUIDE_TESTS)
globals().update({f"{name}_as_in_the_guide": test for name, test in GUIDE_TESTS.items() if name.startswith("test_")})


@pytest.mark.parametrize(
    "settings, options, message",
    [
        (VLLMSettings, {"max_num_seqs": 0}, "VLLMSettings.max_num_seqs is 0, expected at least 1"),
        (VLLMSettings, {"max_num_queued_reqs": -1}, "VLLMSettings.max_num_queued_reqs is -1, expected at least 0"),
        (VLLMSettings, {"max_logprobs": -2}, "VLLMSettings.max_logprobs is -2, expected at least -1"),
        (VLLMSettings, {"block_size": 0}, "VLLMSettings.block_size is 0, expected at least 1"),
        (VLLMSettings, {"keep_alive_s": 0}, "VLLMSettings.keep_alive_s is 0, expected more than 0"),
        (SGLangSettings, {"max_running_requests": 0}, "SGLangSettings.max_running_requests is 0, expected at least 1"),
        (SGLangSettings, {"max_queued_requests": -1}, "SGLangSettings.max_queued_requests is -1, expected at least 0"),
        (SGLangSettings, {"health_timeout_s": 0}, "SGLangSettings.health_timeout_s is 0, expected more than 0"),
        (SGLangSettings, {"poll_s": -0.1}, "SGLangSettings.poll_s is -0.1, expected more than 0"),
    ],
)
def test_settings_that_no_server_takes_are_refused(settings, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings(**options)


def test_the_guide_has_a_test_for_each_thing_that_fakes_reproduce():
    assert len([name for name in GUIDE_TESTS if name.startswith("test_")]) == 13
