"""VLLMEngine: its pure parts against recorded exchanges, the whole against a server that behaves like vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
import trio.testing
from engine_recordings import find_recordings, load_recordings
from server_waits import PATIENCE_S, wait_for_tokens, wait_until

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.engines.http.requests import WireRequest
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.protocol import (
    parse_load_answer,
    parse_prompt_log_probs,
    parse_server_info,
    parse_vllm_response,
    prompt_log_probs_payload,
    vllm_payload,
)
from rollouts.errors import EngineError, EngineProtocolError, EngineRequestError, EngineTimeout
from rollouts.testing import FakeVLLMServer, Fault, VLLMSettings, create_tiny_model
from rollouts.types import Completion, SamplingParams
from rollouts.weight_specs import describe_weights

RECORDINGS = load_recordings("vllm")


def recorded(name: str):
    """Body of a recorded answer."""
    return RECORDINGS[name]["response"]["body"]


def request_of(name: str, **changes) -> WireRequest:
    """The request whose answer was recorded, as this client would have sent it."""
    body, asked = recorded(name), RECORDINGS[name]["request"]["body"]
    sampling = asked["sampling_params"]
    request = WireRequest(
        wire_id=body["request_id"].removeprefix("generate-tokens-"),
        tokens=tuple(asked["token_ids"]),
        params=SamplingParams(max_tokens=sampling.get("max_tokens", 512), temperature=sampling.get("temperature", 1.0)),
        n=sampling.get("n", 1),
    )
    return replace(request, **changes)


# -- payloads


def test_the_payload_says_all_that_changes_the_distribution():
    params = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(4,), stop=("ab",), seed=3)
    assert vllm_payload(WireRequest("id", (5, 6), params, 1), {1}) == {
        "token_ids": [5, 6],
        "request_id": "id",
        "stream": False,
        "sampling_params": {
            "n": 1, "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0,
            "logprobs": 0, "detokenize": True, "seed": 3, "stop_token_ids": [1, 4], "stop": ["ab"], "skip_special_tokens": False,
        },
    }  # fmt: skip
    plain = vllm_payload(WireRequest("id", (5, 6), SamplingParams(), 2))["sampling_params"]
    assert plain["n"] == 2
    assert not {"seed", "stop", "stop_token_ids"} & set(plain)
    assert plain["detokenize"] is False


def test_only_fields_that_the_server_knows_are_sent():
    """vLLM ignores unknown fields, so a misspelt one would have no effect and cause no error."""
    known = set(
        "n temperature top_p top_k min_p seed max_tokens min_tokens ignore_eos stop_token_ids stop logprobs prompt_logprobs "
        "repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words skip_reading_prefix_cache "
        "detokenize skip_special_tokens".split()
    )
    params = SamplingParams(seed=1, stop=("x",), stop_token_ids=(2,))
    for payload in (vllm_payload(WireRequest("id", (5,), params, 1)), prompt_log_probs_payload((5, 6), "id")):
        assert set(payload) <= {"token_ids", "sampling_params", "request_id", "stream"}
        assert set(payload["sampling_params"]) <= known


def test_groups_with_neighboring_seeds_share_no_seed():
    """The server gives sample i the seed + i."""
    starts = [vllm_payload(WireRequest("id", (5,), SamplingParams(seed=seed), 8))["sampling_params"]["seed"] for seed in range(50)]
    assert len({start + i for start in starts for i in range(8)}) == 400


# -- answers, as recorded


def test_recorded_answers_become_results():
    request = request_of("02_generate_greedy")
    (result,) = parse_vllm_response(recorded("02_generate_greedy"), request)
    assert result.tokens == (50, 106, 108, 44, 106, 44)
    assert result.log_probs[:2] == (-4.107295513153076, -4.096517562866211)
    assert result.labels == ("default",) * 6
    assert result.finish_reason == "length"
    samples = parse_vllm_response(recorded("02_generate_n3_seed"), request_of("02_generate_n3_seed"))
    assert [len(sample.tokens) for sample in samples] == [4, 4, 4]
    assert len({sample.tokens for sample in samples}) == 3


@pytest.mark.parametrize(
    ("name", "finish_reason"),
    [("02_generate_eos_natural", "stop"), ("02_generate_stop_token", "stop"), ("02_generate_processed_T0.7_top_p0.5", "length")],
)
def test_recorded_ends(name: str, finish_reason: str):
    (result,) = parse_vllm_response(recorded(name), request_of(name))
    assert result.finish_reason == finish_reason
    assert len(result.tokens) == len(recorded(name)["choices"][0]["token_ids"])


def test_a_request_aborted_in_the_queue_has_no_tokens():
    body = recorded("04_abort_queued_response")
    (result,) = parse_vllm_response(body, WireRequest("q1", (5, 6), SamplingParams(), 1))
    assert (result.tokens, result.labels, result.finish_reason) == ((), (), "abort")


def find_generations(value) -> list[dict]:
    """Answers of the generate route anywhere in a recording."""
    if isinstance(value, list):
        return [found for item in value for found in find_generations(item)]
    if not isinstance(value, dict):
        return []
    if "choices" in value and str(value.get("request_id", "")).startswith("generate-tokens-") and value.get("output_mode") == "tokens":
        return [value]
    return [found for item in value.values() for found in find_generations(item)]


@pytest.mark.more
def test_every_recorded_generation_is_understood():
    num_spans, num_understood = 0, 0
    for name, recording in RECORDINGS.items():
        for body in find_generations(recording):
            if any(choice.get("logprobs") is None for choice in body["choices"]) or "usage" not in body or body["usage"] is None:
                continue
            num_prompt = body["usage"]["prompt_tokens"]
            request = WireRequest(
                body["request_id"].removeprefix("generate-tokens-"), (5,) * num_prompt, SamplingParams(max_tokens=600), len(body["choices"])
            )
            for result, choice in zip(parse_vllm_response(body, request), body["choices"], strict=True):
                assert list(result.tokens) == choice["token_ids"], name
                num_spans = max(num_spans, len(choice["weight_versions"]))
                num_understood += 1
    all_are_here = find_recordings("vllm") is not None
    assert num_understood > (20 if all_are_here else 10), "recordings are missing"
    assert num_spans >= (2 if all_are_here else 1), "no recorded generation went on through a change of weights"


def test_recorded_prompt_log_probs():
    body, asked = recorded("02_generate_prompt_logprobs"), RECORDINGS["02_generate_prompt_logprobs"]["request"]["body"]
    tokens = asked["token_ids"]
    found = parse_prompt_log_probs(body, tokens, 1)
    assert found is not None
    assert found[:2] == (-4.5723419189453125, -4.292454719543457)
    assert parse_prompt_log_probs(body, tokens, 6) == found[5:]
    assert parse_prompt_log_probs(body, tokens, 8) == ()
    with pytest.raises(EngineProtocolError, match="expected 7"):
        parse_prompt_log_probs(body, tokens[:-1], 1)
    with pytest.raises(EngineProtocolError, match="something else than expected"):
        parse_prompt_log_probs(body, [*tokens[:-1], 10], 1)
    aborted = {"choices": [{"finish_reason": "abort"}], "prompt_logprobs": None}
    assert parse_prompt_log_probs(aborted, tokens, 1) is None


GOOD = {
    "request_id": "generate-tokens-id",
    "usage": {"prompt_tokens": 2},
    "choices": [
        {
            "index": 0, "finish_reason": "stop", "token_ids": [7, 1], "weight_versions": [{"version": "3", "start": 0, "end": 2}],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}, {"token_id": 1, "logprob": -0.25}]},
        }
    ],
}  # fmt: skip


def change(path: Sequence[str | int], value) -> dict:
    """GOOD with one value replaced."""
    body = json.loads(json.dumps(GOOD))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (change(["request_id"], "generate-tokens-other"), "answered about 'generate-tokens-other'"),
        (change(["usage", "prompt_tokens"], 3), "3 prompt tokens, but 2 were sent: something between here and the model tokenizes again"),
        (change(["choices"], []), "expected 1"),
        (change(["choices", 0, "index"], 1), "expected 1"),
        (change(["choices", 0, "finish_reason"], "error"), "unknown finish reason 'error'"),
        (change(["choices", 0, "finish_reason"], None), "unknown finish reason None"),
        (change(["choices", 0, "token_ids"], [7]), "not the same ones"),
        (change(["choices", 0, "token_ids"], [7, 2]), "not the same ones"),
        (change(["choices", 0, "logprobs"], None), "something else than expected"),
        (change(["choices", 0, "logprobs", "content", 0, "logprob"], -9999.0), "above -9999, which stands for -inf and NaN"),
        (change(["choices", 0, "logprobs", "content", 0, "logprob"], None), "the log-prob None"),
        (change(["choices", 0, "logprobs", "content", 0, "logprob"], 0.5), "the log-prob 0.5"),
        (change(["choices", 0, "logprobs", "content", 0], {"token": "token_id:7", "logprob": -0.5}), "something else than expected"),
        (change(["choices", 0, "weight_versions"], []), "0 of 2 tokens"),
        ([], "something else than expected"),
        ({"error": "x"}, "something else than expected"),
    ],
)
def test_an_answer_that_means_something_else_is_an_error(body, message: str):
    request = WireRequest("id", (5, 6), SamplingParams(), 1)
    assert parse_vllm_response(GOOD, request)[0].log_probs == (-0.5, -0.25)
    with pytest.raises(EngineProtocolError, match=message):
        parse_vllm_response(body, request)


def test_a_loop_cut_off_by_the_server_did_not_end_by_itself():
    body = change(["choices", 0, "finish_reason"], "repetition")
    assert parse_vllm_response(body, WireRequest("id", (5, 6), SamplingParams(), 1))[0].finish_reason == "length"


def test_a_load_counts_only_if_every_worker_did_it():
    parse_load_answer(recorded("03_reload_weights_path"))
    for answer in ({"results": []}, {"results": [None, "failed"]}, {}, [], None):
        with pytest.raises(EngineProtocolError, match="expected one null for each worker"):
            parse_load_answer(answer)


def test_a_mode_without_log_probs_is_refused():
    config = {
        "model_config": {"logprobs_mode": "raw_logits", "dtype": "torch.float32", "skip_tokenizer_init": False},
        "scheduler_config": {"max_num_seqs": 4, "enable_chunked_prefill": True},
        "device_config": {"device": "cuda"},
    }
    rest = ({"data": [{"id": "m", "root": "/m", "max_model_len": 9}]}, {"version": "0.32.0"}, {"weight_version": "5"}, {"is_paused": True})
    with pytest.raises(EngineError, match="'raw_logits' instead of log-probs"):
        parse_server_info({"vllm_config": config}, *rest)
    config["model_config"]["logprobs_mode"] = "raw_logprobs"
    info = parse_server_info({"vllm_config": config}, *rest)
    assert (info.log_prob_kind, info.dtype, info.device, info.weight_version, info.is_paused) == (
        "untempered",
        "float32",
        "cuda",
        "5",
        True,
    )
    assert info.honors_seeds
    config["device_config"]["device"] = "cpu"
    assert not parse_server_info({"vllm_config": config}, *rest).honors_seeds
    config["scheduler_config"]["enable_chunked_prefill"] = False
    assert parse_server_info({"vllm_config": config}, *rest).honors_seeds
    del config["scheduler_config"]
    with pytest.raises(EngineProtocolError, match="scheduler_config"):
        parse_server_info({"vllm_config": config}, *rest)


# -- the engine with a server that behaves like vLLM


PROMPT = (5, 6, 7, 8)


def create_model(version: int):
    """Larger weights than random initialisation gives, so that versions differ, and no end: its logit is 0, far below the largest."""
    model = create_tiny_model(seed=version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
        model.get_input_embeddings().weight.mul_(4)[1] = 0
    return model


def export(directory: Path, version: int, file: bool = True):
    """The model of a version, written to a directory."""
    model = create_model(version)
    model.save_pretrained(directory)
    if file:
        (directory / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))
    return model


def compute_log_probs(model, completion: Completion) -> list[float]:
    tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, completion.input_len - 1 : -1] / completion.temperature
    return gather_log_probs(logits, tokens[0, completion.input_len :]).tolist()


def count_up(prompt: tuple[int, ...], number: int, num_loads: int, seed: int | None) -> tuple[int, float]:
    """A script: 10, 11, 12, ... with log-prob -1 - number of loads."""
    return 10 + number % 50, -1.0 - num_loads


FAST = RetryPolicy(attempts=2, first_wait_s=0.01, longest_wait_s=0.02, budget_s=1.0)


@asynccontextmanager
async def open_engine(server: FakeVLLMServer, **options):
    async with VLLMEngine(server.url, retry=FAST, **options) as engine:
        yield engine


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    export(tmp_path / "served", 0, file=False)
    return tmp_path / "served"


async def test_the_engine_knows_its_server(model_path: Path):
    async with FakeVLLMServer(model_path) as server, open_engine(server, vocab_size=64, expected_model=model_path) as engine:
        info = await engine.describe_server()
        assert await engine.get_weight_version() == 0
    assert (info.kind, info.version, info.served_name, info.model_path) == ("vllm", "0.32.0", "m", str(model_path))
    assert (info.context_length, info.vocab_size, info.log_prob_kind, info.has_tokenizer) == (512, 64, "sampled", False)


@pytest.mark.parametrize(
    ("settings", "engine_options", "message"),
    [
        (VLLMSettings(dev_mode=False), {}, "VLLM_SERVER_DEV_MODE=1"),
        (VLLMSettings(scale_out=False), {}, "--enable-scale-out"),
        (VLLMSettings(api_key="right"), {"api_key": "wrong"}, "pass api_key"),
        (VLLMSettings(version="0.31.0"), {}, r"version 0\.31\.0 of its server, older than 0\.32"),
        (VLLMSettings(), {"expected_model": "qwen"}, "expected 'qwen'"),
        (VLLMSettings(), {"vocab_size": 100}, "vocabulary of 64 tokens, expected 100"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused_at_the_door(model_path: Path, settings, engine_options, message: str):
    async with FakeVLLMServer(model_path, settings) as server:
        with pytest.raises(EngineError, match=message):
            async with open_engine(server, **engine_options):
                raise AssertionError("the engine was opened")


async def test_no_server_and_another_server_are_said_to_be_such():
    with pytest.raises(EngineError, match="cannot be reached"):
        async with VLLMEngine("http://127.0.0.1:9", retry=FAST):
            pass


async def test_an_unknown_version_is_warned_of_and_used():
    async with FakeVLLMServer(count_up, VLLMSettings(version="0.33.1")) as server:
        with pytest.warns(UserWarning, match=r"version 0\.33\.1"):
            async with open_engine(server) as engine:
                assert (await engine.generate(PROMPT, SamplingParams(max_tokens=2))).output_tokens == (10, 11)


async def test_a_completion_holds_what_the_server_said():
    async with FakeVLLMServer(count_up) as server, open_engine(server, initial_version=7) as engine:
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0.5, top_k=4), request_id="mine")
    assert completion == Completion(
        request_id="mine", input_tokens=PROMPT, output_tokens=(10, 11, 12), output_log_probs=(-1.0, -1.0, -1.0), output_versions=(7, 7, 7),
        finish_reason="length", temperature=0.5, truncated_sampling=True, log_prob_kind="sampled",
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
async def test_log_probs_are_those_of_the_distribution_sampled_from(model_path: Path, temperature: float):
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=12, temperature=temperature, seed=1))
        scores = await engine.recompute_output_log_probs(completion.input_tokens + completion.output_tokens, 4)
    model = create_model(0)
    assert completion.temperature == (temperature or 1.0)
    assert completion.output_log_probs == pytest.approx(compute_log_probs(model, completion), abs=1e-4)
    assert scores == pytest.approx(compute_log_probs(model, replace(completion, temperature=1.0)), abs=1e-4)


async def test_a_server_in_raw_mode_is_warned_of_and_recorded_as_such(model_path: Path):
    async with FakeVLLMServer(model_path, VLLMSettings(logprobs_mode="raw_logprobs")) as server:
        with pytest.warns(UserWarning, match="processed_logprobs"):
            async with open_engine(server) as engine:
                params = SamplingParams(max_tokens=12, temperature=0.5, seed=1, untempered_log_probs=True)
                completion = await engine.generate(PROMPT, params)
                plain = await engine.generate(PROMPT, params.new(temperature=1.0))
    assert (completion.log_prob_kind, completion.temperature) == ("untempered", 1.0)
    assert completion.output_log_probs == pytest.approx(compute_log_probs(create_model(0), completion), abs=1e-4)
    assert completion.untempered_log_probs == completion.output_log_probs
    assert plain.log_prob_kind == "sampled"


async def test_groups_come_in_one_request():
    async with FakeVLLMServer(count_up) as server, open_engine(server) as engine:
        group = await engine.generate_group(PROMPT, SamplingParams(max_tokens=2), 4)
        assert server.count("/inference/v1/generate") == 1
        with pytest.raises(EngineRequestError, match="257 samples, more than the 256"):
            await engine.generate_group(PROMPT, SamplingParams(max_tokens=2), 257)
        assert server.count("/inference/v1/generate") == 1
    assert [completion.output_tokens for completion in group] == [(10, 11)] * 4


async def test_seeds_that_would_end_a_server_on_a_cpu_are_not_sent(model_path: Path):
    async with FakeVLLMServer(model_path, VLLMSettings(device="cpu")) as server, open_engine(server) as engine:
        with pytest.warns(UserWarning, match="gets no seeds"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=2, seed=3))
        (request,) = [request for request in server.received if request.path == "/inference/v1/generate"]
    assert "seed" not in request.json()["sampling_params"]


async def test_a_temperature_that_the_server_would_change_is_refused(model_path: Path):
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        with pytest.raises(EngineRequestError, match=r"temperature = 0\.001, for which vLLM would use 0\.01"):
            await engine.generate(PROMPT, SamplingParams(temperature=0.001))
        assert server.count("/inference/v1/generate") == 0


async def test_stop_strings_need_the_servers_tokenizer(model_path: Path):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    tokenizer = create_char_tokenizer()
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        with pytest.raises(EngineError, match="runs without a tokenizer"):
            await engine.generate(PROMPT, params.new(stop=("a",)))
    async with FakeVLLMServer(model_path, tokenizer=tokenizer) as server, open_engine(server) as engine:
        plain = await engine.generate(PROMPT, params)
        text = tokenizer.decode(list(plain.output_tokens), skip_special_tokens=True)
        stopped = await engine.generate(PROMPT, params.new(stop=(text[2:4],)))
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(list(stopped.output_tokens), skip_special_tokens=True) == text[: text.index(text[2:4]) + 2]


async def test_aborts_reach_running_and_queued_requests_of_this_engine_only():
    found: dict[str, Completion] = {}
    params = SamplingParams(max_tokens=400)
    async with FakeVLLMServer(count_up, VLLMSettings(max_num_seqs=2)) as server:
        async with open_engine(server) as engine, open_engine(server) as other:
            server.scheduler.hold_tokens(5)

            async def one(name: str, who: VLLMEngine) -> None:
                found[name] = await who.generate(PROMPT, params, request_id=name)

            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for name in ("a", "b"):
                        nursery.start_soon(one, name, engine)
                    await wait_for_tokens(server, 5, 2)
                    nursery.start_soon(one, "queued", engine)
                    nursery.start_soon(one, "other's", other)
                    await wait_until(lambda: len(server.scheduler.waiting) == 2)
                    await engine.abort(["queued", "nobody"])
                    assert set(found) == {"queued"}
                    async with open_engine(server) as idle:
                        await idle.abort()  # an abort of nothing would be one of everything
                    assert set(found) == {"queued"}
                    await engine.abort()
                    assert set(found) == {"queued", "a", "b"}
                    await wait_for_tokens(server, 5)
                    await other.abort()
    assert found["queued"].output_tokens == ()
    for name in ("a", "b", "other's"):
        assert found[name].output_tokens == (10, 11, 12, 13, 14)
    assert {completion.finish_reason for completion in found.values()} == {"abort"}


async def test_cancelled_requests_end_on_the_server_too():
    async with FakeVLLMServer(count_up, VLLMSettings(max_num_seqs=1)) as server, open_engine(server) as engine:
        server.scheduler.hold_tokens(5)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.generate, PROMPT, SamplingParams(max_tokens=400))
                await wait_for_tokens(server, 5)
                nursery.cancel_scope.cancel()
            assert (await engine.generate(PROMPT, SamplingParams(max_tokens=2))).output_len == 2


async def test_every_end_of_text_of_the_model_ends_a_completion(model_path: Path):
    """A server that was started with --generation-config vllm knows only the tokenizer's."""
    (model_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 900]}))
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        await engine.generate(PROMPT, SamplingParams(max_tokens=2, stop_token_ids=(9,)))
        (request,) = [request for request in server.received if request.path == "/inference/v1/generate"]
    assert request.json()["sampling_params"]["stop_token_ids"] == [1, 7, 9]


# -- weights


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_requests_in_flight_have_a_version_for_each_token(model_path: Path, tmp_path: Path, in_flight):
    models = {0: create_model(0), 1: export(tmp_path / "1", 1), 2: export(tmp_path / "2", 2)}
    params = SamplingParams(max_tokens=40, temperature=1.2)
    found: list[Completion] = []
    async with FakeVLLMServer(model_path) as server, open_engine(server, in_flight=in_flight) as engine:

        async def one(i: int) -> None:
            found.extend(await engine.generate_group(PROMPT, params.new(seed=i), 2))

        server.scheduler.hold_tokens(10)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for i in range(3):
                    nursery.start_soon(one, i)
                for version in (1, 2):
                    await wait_for_tokens(server, 10 * version if in_flight == "continue" else 10, 6)
                    answer = await engine.update_weights_from_checkpoint(tmp_path / str(version))
                    assert (answer["success"], answer["weight_version"]) == (True, version)
                    assert await engine.get_weight_version() == version
                    server.scheduler.hold_tokens(20 if version == 1 and in_flight == "continue" else 10)
                server.scheduler.release_tokens()
    assert len(found) == 6
    assert all(completion.output_versions == (0,) * 10 + (1,) * 10 + (2,) * 20 for completion in found)
    for completion in found:
        assert completion.finish_reason == "length"
        expected = {version: compute_log_probs(model, completion) for version, model in models.items()}
        assert completion.output_log_probs == pytest.approx(
            [expected[version][t] for t, version in enumerate(completion.output_versions)], abs=1e-4
        )


async def test_keys_and_values_of_the_old_weights_are_dropped_twice(model_path: Path, tmp_path: Path):
    """The pause drops them, and the load drops them again, because a server may ignore the first with requests in flight."""
    export(tmp_path / "1", 1)
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        calls = {request.path: dict(request.query) for request in server.received}
        paths = [request.path for request in server.received]
    assert calls["/pause"] == {"mode": "keep", "clear_cache": "true"}
    assert calls["/reset_prefix_cache"] == {"reset_running_requests": "true"}
    assert paths.index("/pause") < paths.index("/collective_rpc") < paths.index("/reset_prefix_cache") < paths.index("/resume")


async def test_a_tied_output_head_is_loaded_on_a_cpu_too(model_path: Path, tmp_path: Path):
    model = export(tmp_path / "1", 1)
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    async with FakeVLLMServer(model_path, VLLMSettings(device="cpu")) as server, open_engine(server) as engine:
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        completion = await engine.generate(PROMPT, greedy)
        async with HTTPEndpoint(server.url) as raw:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(model_path)}}
            await raw.post_json("/collective_rpc", body, kind="sync")
        naive = await engine.generate((9, 8, 7), greedy)
    assert completion.output_log_probs == pytest.approx(compute_log_probs(model, completion), abs=1e-4)
    assert naive.output_log_probs != pytest.approx(compute_log_probs(create_model(0), naive), abs=1e-2)
    assert not [path for path in (tmp_path / "1").iterdir() if path.is_dir()]


async def test_checkpoints_have_the_precision_that_the_server_runs_in(model_path: Path, tmp_path: Path):
    create_model(0).bfloat16().save_pretrained(model_path)  # which the server, by its own word, holds in float32
    export(tmp_path / "1", 1)
    create_model(2).bfloat16().save_pretrained(tmp_path / "2")
    async with FakeVLLMServer(model_path) as server:
        async with open_engine(server) as engine:
            await engine.update_weights_from_checkpoint(tmp_path / "1")
            with pytest.raises(EngineError, match=r"wrong dtypes: .* is BF16 .*, expected F32"):
                await engine.update_weights_from_checkpoint(tmp_path / "2")
        async with open_engine(server, allow_cast=True) as engine:
            await engine.update_weights_from_checkpoint(tmp_path / "2")


async def test_versions_are_those_of_the_directories_else_they_count_up(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 41)
    export(tmp_path / "2", 42, file=False)
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        assert (await engine.update_weights_from_checkpoint(tmp_path / "1"))["weight_version"] == 41
        assert (await engine.update_weights_from_checkpoint(tmp_path / "2"))["weight_version"] == 42
        async with open_engine(server) as late:
            assert await late.get_weight_version() == 42
            assert (await late.update_weights_from_checkpoint(tmp_path / "2"))["weight_version"] == 43
            assert set((await late.generate(PROMPT, SamplingParams(max_tokens=3))).output_versions) == {43}


def spoil(directory: Path, how: str) -> None:
    file = directory / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "version":
        (directory / WEIGHT_VERSION_FILE).write_text("[]")
    elif how == "empty":
        file.unlink()
    else:
        create_tiny_model(hidden_size=64).save_pretrained(directory)


@pytest.mark.parametrize("how", ["truncated", "empty", "wide", "version", "nowhere"])
async def test_a_server_never_hears_of_a_bad_checkpoint(model_path: Path, tmp_path: Path, how: str):
    if how != "nowhere":
        export(tmp_path / "bad", 1)
        spoil(tmp_path / "bad", how)
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        with pytest.raises(EngineError, match=r"was not given new weights: .*bad"):
            await engine.update_weights_from_checkpoint(tmp_path / "bad")
        assert server.count("/pause") == server.count("/collective_rpc") == 0
        assert await engine.get_weight_version() == 0
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=3))).output_len == 3


async def test_the_first_checkpoint_is_the_reference_where_the_servers_directory_cannot_be_read(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 1)
    create_tiny_model(hidden_size=64).save_pretrained(tmp_path / "wide")
    async with FakeVLLMServer(count_up) as server, open_engine(server) as engine:
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        with pytest.raises(EngineError, match="wrong shapes"):
            await engine.update_weights_from_checkpoint(tmp_path / "wide")


async def test_a_load_that_fails_brings_the_old_weights_back_before_anything_is_generated(model_path: Path, tmp_path: Path):
    old, _ = create_model(0), export(tmp_path / "1", 1)
    found: list[Completion] = []
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        server.scheduler.hold_tokens(5)

        async def one() -> None:
            found.append(await engine.generate(PROMPT, SamplingParams(max_tokens=30, seed=1)))

        server.add_fault(
            Fault("status", "/collective_rpc", status=500, body=json.dumps({"error": {"message": "Worker failed", "code": 500}}))
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await wait_for_tokens(server, 5)
            with pytest.raises(EngineError, match=r"did not take the weights in .*Worker failed\. It goes on with the weights"):
                await engine.update_weights_from_checkpoint(tmp_path / "1")
            server.scheduler.release_tokens()
        assert await engine.get_weight_version() == 0
        loads = [request.json()["kwargs"]["weights_path"] for request in server.received if request.path == "/collective_rpc"]
        assert loads == [str(tmp_path / "1"), str(model_path)]
        paths = [request.path for request in server.received]
        assert paths.index("/resume") > len(paths) - 1 - paths[::-1].index("/collective_rpc")
    assert found[0].output_log_probs == pytest.approx(compute_log_probs(old, found[0]), abs=1e-4)
    assert set(found[0].output_versions) == {0}


async def test_where_that_fails_too_pending_and_later_requests_fail_until_a_sync_succeeds(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 1)
    failures: list[EngineError] = []
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        server.scheduler.hold_tokens(5)

        async def one() -> None:
            try:
                await engine.generate(PROMPT, SamplingParams(max_tokens=300))
            except EngineError as error:
                failures.append(error)

        server.add_fault(Fault("status", "/collective_rpc", times=2, status=500, body='{"error": {"message": "Worker failed"}}'))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await wait_for_tokens(server, 5)
            with pytest.raises(EngineError, match="restart it, then sync the weights"):
                await engine.update_weights_from_checkpoint(tmp_path / "1")
        assert "cannot be used" in str(failures[0])
        with pytest.raises(EngineError, match="cannot be used"):
            await engine.generate(PROMPT, SamplingParams())
        with pytest.raises(EngineError, match="cannot be used"):
            await engine.recompute_output_log_probs(PROMPT, 1)
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=3))
        assert set(completion.output_versions) == {1}


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info", "/resume"])
@pytest.mark.parametrize("kind", ["drop", "cut"])
async def test_an_answer_lost_on_the_way_is_asked_for_again(model_path: Path, tmp_path: Path, route: str, kind):
    model = export(tmp_path / "1", 1)
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        server.add_fault(Fault(kind, route))
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))
    assert completion.output_log_probs == pytest.approx(compute_log_probs(model, completion), abs=1e-4)
    assert set(completion.output_versions) == {1}


async def test_a_server_that_dies_is_an_error_and_no_hang(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 1)
    async with FakeVLLMServer(model_path, seconds_per_update=1.0) as server, open_engine(server) as engine:
        server.scheduler.hold_tokens(5)

        async def die_when(condition: Callable[[], bool]) -> None:
            await wait_until(condition)
            server.die()

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(die_when, lambda: any(len(s.draws) == 5 for s in server.scheduler.running))
                with pytest.raises(EngineError, match="may have died"):
                    await engine.generate(PROMPT, SamplingParams(max_tokens=300))
            with pytest.raises(EngineError, match="cannot be reached"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=3))
            await server.revive()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(die_when, lambda: server.count("/collective_rpc") > 0)
                with pytest.raises(EngineError, match="did not take the weights"):
                    await engine.update_weights_from_checkpoint(tmp_path / "1")
            with pytest.raises(EngineError, match="cannot be used"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=3))


@pytest.fixture
def running_clock() -> trio.testing.MockClock:
    """Runs like the real one, and can be told to jump: what hangs meets its deadline then, and nothing else does."""
    return trio.testing.MockClock(rate=1.0)


async def test_a_server_that_hangs_is_a_timeout(model_path: Path, tmp_path: Path, running_clock):
    export(tmp_path / "1", 1)
    deadlines = Deadlines(generate_s=1000.0, control_s=1000.0, sync_s=1000.0)
    async with FakeVLLMServer(model_path) as server, open_engine(server, deadlines=deadlines) as engine:

        async def jump_when_hung(route: str) -> None:
            num_before = server.count(route)
            server.add_fault(Fault("hang", route))
            await wait_until(lambda: server.count(route) > num_before)
            running_clock.jump(1001.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(jump_when_hung, "/inference/v1/generate")
            with pytest.raises(EngineTimeout, match=r"1000 s"):
                await engine.generate(PROMPT, SamplingParams(max_tokens=3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(jump_when_hung, "/collective_rpc")
            with pytest.raises(EngineError, match=r"1000 s.*It goes on with the weights that it had before"):
                await engine.update_weights_from_checkpoint(tmp_path / "1")
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=3))).output_versions == (0, 0, 0)


async def test_a_dead_engine_says_so_in_the_servers_words(model_path: Path):
    async with FakeVLLMServer(model_path, VLLMSettings(keep_alive_on_engine_death=True)) as server, open_engine(server) as engine:
        server.core.is_dead = True
        with pytest.raises(EngineError, match="EngineCore encountered an issue"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=3))


async def test_a_server_that_was_started_again_does_not_go_unnoticed(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 1)
    async with FakeVLLMServer(model_path) as server, open_engine(server) as engine:
        await engine.update_weights_from_checkpoint(tmp_path / "1")
        async with HTTPEndpoint(server.url) as raw:  # what the label of a new process is
            await raw.post_json("/update_weight_version", {"new_version": "default"}, kind="control")
        with pytest.raises(EngineProtocolError, match="started again"):
            await engine.generate(PROMPT, SamplingParams(max_tokens=3))
        with pytest.raises(EngineProtocolError, match="started again"):
            await engine.get_weight_version()


async def test_a_server_found_paused_is_not_used_before_its_weights_are_known(model_path: Path, tmp_path: Path):
    export(tmp_path / "1", 1)
    async with FakeVLLMServer(model_path) as server, HTTPEndpoint(server.url) as raw:
        for recover in ("resume", "update"):
            await raw.post_json("/pause", None, kind="control", params={"mode": "keep"})
            async with open_engine(server) as late:
                with pytest.raises(EngineError, match="found paused"):
                    await late.generate(PROMPT, SamplingParams(max_tokens=3))
                if recover == "resume":
                    await late.resume()
                else:
                    await late.update_weights_from_checkpoint(tmp_path / "1")
                assert (await late.generate(PROMPT, SamplingParams(max_tokens=3))).output_len == 3


async def test_weights_can_be_brought_in_another_way_while_requests_run(model_path: Path, tmp_path: Path):
    """Between start and finish the server has no weights, and a generation there would be its end."""
    model = export(tmp_path / "1", 1)
    found: list[Completion] = []
    async with FakeVLLMServer(model_path, VLLMSettings(weight_transfer="disk")) as server, open_engine(server) as engine:

        async def load(routes: HTTPEndpoint, label: str) -> None:
            assert label == "5"
            await routes.post_json("/start_weight_update", None, kind="sync")
            server.scheduler.release_tokens()
            nursery.start_soon(generate)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await routes.post_json("/update_weights", {"update_info": {"path": str(tmp_path / "1")}}, kind="sync")
            await routes.post_json("/finish_weight_update", None, kind="sync")

        async def generate() -> None:
            found.append(await engine.generate(PROMPT, SamplingParams(max_tokens=12)))

        specs = describe_weights(model.state_dict())
        async with HTTPEndpoint(server.url) as raw:
            await raw.post_json("/init_weight_transfer_engine", {"init_info": {"reference": None}}, kind="sync")
        with pytest.raises(EngineError, match=r"was not given new weights.*missing: model\.norm\.weight"):
            await engine.update_weights_with(load, [spec for spec in specs if spec.name != "model.norm.weight"], 5)
        assert server.count("/pause") == 0
        server.scheduler.hold_tokens(5)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate)
                await wait_for_tokens(server, 5)
                answer = await engine.update_weights_with(load, specs, 5)
        assert await engine.get_weight_version() == answer["weight_version"] == 5
    assert sorted(completion.output_versions for completion in found) == [(0,) * 5 + (5,) * 7, (5,) * 12]
    for completion in found:
        log_probs = compute_log_probs(model, completion)
        assert completion.output_log_probs[5:] == pytest.approx(log_probs[5:], abs=1e-4)


async def test_on_a_cpu_weights_in_memory_need_the_output_head(model_path: Path):
    async def load(server: HTTPEndpoint, label: str) -> None:
        raise AssertionError("nothing should be sent")

    weights = {name: tensor for name, tensor in create_model(1).state_dict().items() if name != "lm_head.weight"}
    async with FakeVLLMServer(model_path, VLLMSettings(device="cpu")) as server, open_engine(server) as engine:
        with pytest.raises(EngineError, match=r"no lm_head\.weight, and on a CPU vLLM would go on with the old one"):
            await engine.update_weights_with(load, describe_weights(weights), 5)
        assert server.count("/pause") == 0


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_scores_wait_for_a_sync_and_are_of_the_new_weights(model_path: Path, tmp_path: Path, in_flight):
    model = export(tmp_path / "1", 1)
    tokens = (5, 6, 7, 8, 9, 10)
    found: list[tuple[float, ...]] = []
    async with FakeVLLMServer(model_path) as server, open_engine(server, in_flight=in_flight) as engine:

        async def score() -> None:
            found.append(await engine.recompute_output_log_probs(tokens, 2))

        async def score_while_loading() -> None:
            await wait_until(lambda: server.count("/pause") > 0)
            await score()

        server.scheduler.hold_tokens(0)  # one is at the server when the sync begins
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(score)
                await wait_for_tokens(server, 0)
                nursery.start_soon(score_while_loading)
                await engine.update_weights_from_checkpoint(tmp_path / "1")
                server.scheduler.release_tokens()
        assert server.count("/inference/v1/generate") == 3
        with pytest.raises(EngineError, match="temperature 1 only"):
            await engine.recompute_output_log_probs(tokens, 2, temperature=0.7)
        with pytest.raises(EngineError, match="less tokens than the context"):
            await engine.recompute_output_log_probs((5,) * 512, 1)
        with pytest.raises(EngineError, match="start_index is 0"):
            await engine.recompute_output_log_probs(tokens, 0)
    with torch.no_grad():
        expected = gather_log_probs(model(torch.tensor([tokens])).logits[0, 1:-1], torch.tensor(tokens[2:])).tolist()
    assert found == [pytest.approx(expected, abs=1e-4)] * 2
