"""SGLangEngine: payloads and answers against what a real server was recorded to say, and the engine against a server on loopback."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from endless_models import create_endless_model
from engine_recordings import load_recordings
from server_waits import PATIENCE_S, wait_for_tokens, wait_until
from transformers import AutoModelForCausalLM

from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample
from rollouts.engines.http.checks import check_request
from rollouts.engines.http.endpoint import HTTPEndpoint, describe_server_error
from rollouts.engines.http.samples import Generated, check_generated
from rollouts.engines.protocol import with_kept_tokens
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.sglang.protocol import (
    create_sample_ids,
    find_foreign_defaults,
    is_updated_but_not_flushed,
    parse_probe,
    parse_prompt_log_probs,
    parse_server_info,
    parse_sglang_event,
    parse_sglang_response,
    parse_update_answer,
    probe_payload,
    prompt_log_probs_payload,
    sglang_payload,
    sglang_sampling_params,
    sglang_tensor_payload,
)
from rollouts.errors import EngineError, EngineProtocolError
from rollouts.testing import FakeSGLangServer, Fault, SGLangSettings
from rollouts.types import Completion, KeptTokens, Sample, SamplingParams

NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued. "
RECORDINGS = load_recordings("sglang")


def read_recording(name: str) -> dict[str, Any]:
    return copy.deepcopy(RECORDINGS[name])


def parse_recorded(name: str) -> tuple[Generated, ...]:
    response = read_recording(name)["response"]
    answers = response if isinstance(response, list) else [response]
    return parse_sglang_response(response, [answer["meta_info"]["id"] for answer in answers])


def answer_of(tokens=(5, 6), log_probs=(-1.0, -2.0), *, rid="r", versions=None, reason="length", **changes) -> dict[str, Any]:
    meta = {
        "id": rid,
        "finish_reason": {"type": reason},
        "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}] if versions is None else versions,
        "output_token_logprobs": [[lp, t, None] for lp, t in zip(log_probs, tokens, strict=True)],
        **changes,
    }
    return {"output_ids": list(tokens), "meta_info": meta}


def test_a_recorded_answer_becomes_tokens_log_probs_labels_and_a_reason():
    (found,) = parse_recorded("generate_greedy")
    recorded = read_recording("generate_greedy")["response"]
    assert list(found.tokens) == recorded["output_ids"]
    assert len(found.tokens) == 8
    assert found.log_probs == tuple(entry[0] for entry in recorded["meta_info"]["output_token_logprobs"])
    assert found.labels == ("default",) * 8
    assert found.finish_reason == "length"


def test_a_stop_token_stays_in_the_output():
    (found,) = parse_recorded("generate_stop_token")
    recorded = read_recording("generate_stop_token")
    assert found.finish_reason == "stop"
    assert found.tokens[-1] in recorded["request"]["json"]["sampling_params"]["stop_token_ids"]
    assert len(found.log_probs) == len(found.tokens)


def test_answers_with_and_without_a_tokenizer_are_read_alike():
    assert "text" in read_recording("tok_stop_string")["response"]
    assert "text" not in read_recording("generate_greedy")["response"]
    (found,) = parse_recorded("tok_stop_string")
    assert found.finish_reason == "stop"
    assert len(found.tokens) == 38  # the text is cut before the stop string, the tokens are not


def test_a_batch_keeps_its_order_and_its_ids():
    first, second = parse_sglang_response(read_recording("generate_batch")["response"], ["a", "b"])
    assert (len(first.tokens), len(second.tokens)) == (8, 3)
    with pytest.raises(EngineProtocolError, match="expected 'b'"):
        parse_sglang_response(read_recording("generate_batch")["response"], ["b", "a"])
    with pytest.raises(EngineProtocolError, match="2 answers to 1"):
        parse_sglang_response(read_recording("generate_batch")["response"], ["a"])


def test_n_above_one_discards_the_ids_of_the_request_so_samples_are_sent_as_a_batch():
    recorded = read_recording("generate_n2_rid")
    assert recorded["request"]["json"]["rid"] == "grp"
    with pytest.raises(EngineProtocolError, match="expected 'grp-0'"):
        parse_sglang_response(recorded["response"], ["grp-0", "grp-1"])
    sampling = sglang_sampling_params(SamplingParams(max_tokens=4), seeded=False)
    payload = sglang_payload([(5, 6)] * 2, [sampling] * 2, ["grp-0", "grp-1"])
    assert payload["rid"] == ["grp-0", "grp-1"]
    assert payload["input_ids"] == [[5, 6], [5, 6]]
    assert all("n" not in one for one in payload["sampling_params"])


@pytest.mark.parametrize(("name", "num_tokens"), [("aborted_by_rid", None), ("aborted_queue_0", 5), ("aborted_queue_19", 0)])
def test_an_aborted_request_brings_what_there_was(name, num_tokens):
    (found,) = parse_recorded(name)
    assert found.finish_reason == "abort"
    assert num_tokens is None or len(found.tokens) == num_tokens
    assert len(found.tokens) == len(found.log_probs) == len(found.labels)


def test_an_abort_in_the_queue_has_fewer_fields():
    assert "prompt_tokens" not in read_recording("aborted_queue_19")["response"]["meta_info"]
    assert parse_recorded("aborted_queue_19") == (Generated(tokens=(), log_probs=(), labels=(), finish_reason="abort"),)


def test_an_abort_hits_all_ids_that_begin_alike_so_ids_have_one_length():
    assert read_recording("abort_request_prefix")["request"]["json"]["rid"] == "grp-1"
    assert read_recording("aborted_prefix_other")["request"]["json"]["rid"] == "grp-10"
    (hit_too,) = parse_recorded("aborted_prefix_other")
    assert hit_too.finish_reason == "abort"


def test_ids_of_samples_are_no_beginnings_of_one_another():
    ids = create_sample_ids("abc", 120)
    assert len(set(ids)) == 120
    assert len({len(one) for one in ids}) == 1
    assert all(one.startswith("abc") for one in ids)


def test_each_token_of_a_request_across_a_sync_has_its_label():
    (found,) = parse_recorded("pause_retract_inflight")
    spans = read_recording("pause_retract_inflight")["response"]["meta_info"]["weight_versions"]
    assert len(spans) == 2
    for span in spans:
        assert set(found.labels[span["start"] : span["end"]]) == {span["version"]}
    assert len(found.labels) == len(found.tokens) == 300


@pytest.mark.parametrize("preferred", [None, {}, '{"top_p": 0.9}'])
def test_defaults_of_a_server_that_every_request_overrides_are_harmless(preferred):
    assert find_foreign_defaults({"preferred_sampling_params": preferred}) == []


def test_defaults_of_a_server_that_a_request_leaves_open_are_found():
    assert find_foreign_defaults({"preferred_sampling_params": '{"min_new_tokens": 5, "top_p": 0.9}'}) == ["min_new_tokens"]
    with pytest.raises(EngineProtocolError, match="/model_info"):
        find_foreign_defaults({})


def test_a_stream_repeats_all_tokens_in_each_event():
    lines = read_recording("generate_stream")["lines"]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    request_id = events[0]["meta_info"]["id"]
    found = [parse_sglang_event(event, request_id) for event in events]
    assert [len(tokens) for tokens, _, _ in found] == [1, 2, 3, 4, 5]
    assert all(whole is None for _, _, whole in found[:-1])
    tokens, log_probs, whole = found[-1]
    assert whole is not None
    assert (whole.tokens, whole.log_probs, whole.finish_reason) == (tokens, log_probs, "length")


def test_an_aborted_stream_ends_with_its_partial_tokens():
    lines = read_recording("aborted_stream")["response"]["last3"]
    last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    _, _, whole = parse_sglang_event(last, last["meta_info"]["id"])
    assert whole is not None
    assert whole.finish_reason == "abort"
    assert len(whole.tokens) > 0


def test_log_probs_of_a_prompt_begin_with_its_second_token():
    recorded = read_recording("generate_input_logprobs")
    tokens = recorded["request"]["json"]["input_ids"]
    found = parse_prompt_log_probs(recorded["response"], tokens, 1, 128)
    assert found is not None
    assert found == pytest.approx((-4.694447, -5.371084, -4.754734, -4.435596, -4.743861, -4.808022))
    assert prompt_log_probs_payload(tokens, 1, "r")["logprob_start_len"] == recorded["request"]["json"]["logprob_start_len"] == 0
    with pytest.raises(EngineProtocolError, match=r"prompt tokens \[5, 6, .*expected those of \[6"):
        parse_prompt_log_probs(recorded["response"], tokens[1:], 1, 128)


def test_the_last_id_of_the_vocabulary_is_repeated_as_0_by_the_server():
    response = answer_of((), (), input_token_logprobs=[[None, 5, None], [-1.5, 0, None], [-2.5, 6, None]])
    assert parse_prompt_log_probs(response, (5, 63, 6), 1, 64) == (-1.5, -2.5)
    with pytest.raises(EngineProtocolError, match="expected those of"):
        parse_prompt_log_probs(response, (5, 62, 6), 1, 64)


def test_prompt_log_probs_that_a_sync_aborted_are_to_be_asked_for_again():
    assert parse_prompt_log_probs(answer_of((), (), reason="abort", input_token_logprobs=[]), (5, 6), 1, 64) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "something else than expected"),
        ("sorry", "something else than expected"),
        (answer_of(reason="overheated"), "unknown finish reason"),
        (answer_of(log_probs=(-1.0, None)), "the log-prob None"),
        (answer_of(log_probs=(-1.0, 0.5)), "the log-prob 0.5"),
        (answer_of(output_token_logprobs=[[-1.0, 5, None]]), "2 tokens and log-probs of 1 tokens"),
        (answer_of(output_token_logprobs=[[-1.0, 5, None], [-1.0, 7, None]]), "not the same ones"),
        (answer_of(versions=[{"version": "3", "start": 0, "end": 1}]), "which weights sampled"),
        (answer_of(versions=[{"version": "3", "start": 1, "end": 2}]), "which weights sampled"),
        (answer_of(versions=[]), "which weights sampled"),
        (answer_of(rid="other"), "answered about request 'other'"),
    ],
)
def test_answers_that_cannot_be_meant_are_refused(answer, message):
    with pytest.raises(EngineProtocolError, match=message):
        parse_sglang_response(answer, ["r"])
    assert parse_sglang_response(answer_of(), ["r"])[0].tokens == (5, 6)


def test_the_payload_of_one_prompt():
    params = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(7,), stop=("x",), seed=3)
    sampling = sglang_sampling_params(params, seeded=False)
    assert sglang_payload([(3, 4)], [sampling], ["id"]) == {
        "input_ids": [3, 4],
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [7],
            "stop": ["x"],
        },
        "rid": "id",
        "return_logprob": True,
        "stream": False,
    }


def test_a_seed_is_sent_only_where_it_has_an_effect():
    first, second = (read_recording(f"tok_seed_{name}") for name in "ab")
    assert first["request"]["json"]["sampling_params"]["sampling_seed"] == second["request"]["json"]["sampling_params"]["sampling_seed"]
    assert first["response"]["output_ids"] != second["response"]["output_ids"]
    params = SamplingParams(seed=3)
    assert "sampling_seed" not in sglang_sampling_params(params, seeded=False)
    assert sglang_sampling_params(params, seeded=True)["sampling_seed"] == 3
    assert "sampling_seed" not in sglang_sampling_params(SamplingParams(), seeded=True)
    assert sglang_sampling_params(SamplingParams(), seeded=True)["top_k"] == -1


def recorded_server():
    return parse_server_info(*(read_recording(name)["response"] for name in ("server_info", "model_info", "tok_models")))


def test_a_request_beyond_the_context_is_cut_by_us_because_the_server_refuses_it():
    assert read_recording("err_prompt_plus_new_too_long")["status"] == 400
    server = recorded_server()
    limits = {"max_prompt": server.max_prompt, "max_total": server.max_total}
    for prompt_len, most in ((1, 509), (100, 410), (505, 5)):  # as measured, the server gives these and no more
        params = check_request("e", "r", (5,) * prompt_len, SamplingParams(max_tokens=10_000), 1, server.info, **limits)
        assert params.max_tokens == most
    assert check_request("e", "r", (5,) * 100, SamplingParams(max_tokens=10), 1, server.info, **limits).max_tokens == 10
    with pytest.raises(EngineError, match="506 prompt tokens, more than the 505"):
        check_request("e", "r", (5,) * 506, SamplingParams(), 1, server.info, **limits)


def test_facts_of_a_server_are_read_from_three_routes():
    server = recorded_server()
    assert (server.info.version, server.info.dtype, server.info.max_running) == ("0.5.23", "float32", 16)
    assert (server.info.context_length, server.max_prompt, server.max_total) == (512, 505, 510)
    assert (server.info.model_path, server.info.served_name, server.info.weight_version) == ("/models/m", "/models/m", "default")
    assert (server.info.has_tokenizer, server.info.honors_seeds, server.tensor_parallel_size) == (False, False, 1)
    with pytest.raises(EngineProtocolError, match="server_info"):
        parse_server_info({}, {}, {})


def test_an_update_that_says_400_may_have_taken_place():
    recorded = read_recording("update_disk_while_running")
    body = json.dumps(recorded["response"])
    assert recorded["status"] == 400
    assert is_updated_but_not_flushed(400, body)
    assert not is_updated_but_not_flushed(400, json.dumps(read_recording("err_update_bad_path")["response"]))


def test_a_weight_route_must_say_that_it_succeeded():
    parse_update_answer("/x", read_recording("update_disk_ck2")["response"])
    for refused in (read_recording("begin_weight_update_twice")["response"], None, {"success": "yes"}):
        with pytest.raises(EngineProtocolError, match="/x answered"):
            parse_update_answer("/x", refused)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("err_empty_ids", "input_ids cannot be empty"),
        ("err_unknown_sampling_param", "unknown field `foo`"),
        ("err_pause_mode", "Input should be 'abort', 'retract' or 'in_place'"),
        ("err_update_bad_path", "Failed to get weights iterator"),
        ("err_notfound", "Not Found"),
    ],
)
def test_every_shape_of_error_gives_the_servers_own_message(name, message):
    recorded = read_recording(name)
    assert recorded["status"] >= 400
    assert message in describe_server_error(recorded["status"], json.dumps(recorded["response"]))


def probe_answer(gap_1: float, gap_2: float) -> list[dict[str, Any]]:
    return [{"meta_info": {"output_top_logprobs": [[[-1.0, 5, None], [-1.0 - gap, 6, None]]]}} for gap in (gap_1, gap_2)]


def test_the_probe_tells_log_probs_after_temperature_from_those_before():
    payload = probe_payload((1, 2))
    assert [params["temperature"] for params in payload["sampling_params"]] == [1.0, 2.0]
    assert parse_probe(probe_answer(0.4, 0.2)) == "tempered"
    assert parse_probe(probe_answer(0.4, 0.4)) == "untempered"
    assert parse_probe(probe_answer(0.0, 0.0)) is None
    assert parse_probe(probe_answer(0.4, 0.9)) is None


def test_a_bucket_of_tensors_is_a_plain_pickle_without_the_storage_around_a_view():
    whole = torch.arange(100_000, dtype=torch.float32)
    body = sglang_tensor_payload([("a", whole[10:14]), ("b", torch.ones(2, dtype=torch.bfloat16))], 2, is_last=False, label="7")
    assert len(body["serialized_named_tensors"]) == 2
    assert len(body["serialized_named_tensors"][0]) < 5_000
    (name, a), (_, b) = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    assert (name, a.tolist(), b.dtype) == ("a", [10, 11, 12, 13], torch.bfloat16)
    assert (body["flush_cache"], "weight_version" in body) == (False, False)
    last = sglang_tensor_payload([("a", whole[:1])], 1, is_last=True, label="7")
    assert (last["flush_cache"], last["weight_version"]) == (True, "7")


# -- the engine, against a server on loopback with a real model


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    for seed in range(3):
        create_endless_model(seed).save_pretrained(folder / str(seed))
    return [folder / str(seed) for seed in range(3)]


PROMPT = (5, 9, 12, 20)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def expected_tokens(path: Path) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
    return tuple(output[0, len(PROMPT) :].tolist())


def endless(prompt, index, num_loads, seed):
    """A script that never ends, whose tokens say how often weights were loaded."""
    return 40 + num_loads, -1.0


async def generate_in(nursery: trio.Nursery, engine: SGLangEngine, found: list[Any], params: SamplingParams | None = None) -> None:
    async def one() -> None:
        try:
            found.append(await engine.generate(PROMPT, params or SamplingParams(max_tokens=100)))
        except EngineError as error:
            found.append(error)

    nursery.start_soon(one)


async def test_seeds_decide_where_the_server_runs_deterministically(weights, recwarn):
    params = SamplingParams(max_tokens=20, seed=3)
    async with FakeSGLangServer(weights[0], SGLangSettings(deterministic=True)) as server, SGLangEngine(server.url) as engine:
        first, second = [await engine.generate(PROMPT, params) for _ in range(2)]
        group = await engine.generate_group(PROMPT, params, 4)
        again = await engine.generate_group(PROMPT, params, 4)
    assert first.output_tokens == second.output_tokens
    assert len({c.output_tokens for c in group}) == 4
    assert [c.output_tokens for c in group] == [c.output_tokens for c in again]
    assert not [w for w in recwarn if "seeds" in str(w.message)]


async def test_without_determinism_seeds_are_not_sent_and_the_user_is_told_once(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        with pytest.warns(UserWarning, match="ignores seeds") as warned:
            for _ in range(3):
                await engine.generate(PROMPT, SamplingParams(max_tokens=2, seed=3))
        assert all(b"sampling_seed" not in request.body for request in server.received)
    assert len([each for each in warned if "ignores seeds" in str(each.message)]) == 1


@pytest.mark.parametrize("original", [False, True])
async def test_the_kind_of_log_probs_is_measured(weights, original):
    async with FakeSGLangServer(weights[0], SGLangSettings(original_logprob=original)) as server, SGLangEngine(server.url) as engine:
        info = await engine.describe_server()
        plain = await engine.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.5))
        cut = await engine.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9))
    kind = "untempered" if original else "tempered"
    assert (info.log_prob_kind, cut.log_prob_kind, cut.truncated_sampling) == (kind, kind, True)
    assert (plain.log_prob_kind, plain.temperature) == (("untempered", 1.0) if original else ("sampled", 0.5))


async def test_a_wrong_belief_about_log_probs_is_refused(weights):
    async with FakeSGLangServer(weights[0], SGLangSettings(original_logprob=True)) as server:
        with pytest.raises(EngineError, match="gives untempered log-probs, expected tempered"):
            async with SGLangEngine(server.url, log_prob_kind="tempered"):
                pass


async def test_a_version_that_was_not_tested_is_warned_of_and_an_older_one_refused(weights):
    async with FakeSGLangServer(weights[0], SGLangSettings(version="0.6.1")) as server:
        with pytest.warns(UserWarning, match=r"0\.6\.1.*tested with 0\.5\.23"):
            async with SGLangEngine(server.url):
                pass
    async with FakeSGLangServer(weights[0], SGLangSettings(version="0.5.22")) as server:
        with pytest.raises(EngineError, match=r"older than 0\.5\.23"):
            async with SGLangEngine(server.url):
                pass


async def change_answer(server: FakeSGLangServer, route: str, **changes: Any) -> None:
    """Let a route of the server say something else from now on."""
    async with HTTPEndpoint(server.url) as raw:
        answer = await raw.get_json(route)
    assert set(changes) <= set(answer)
    body = json.dumps({**answer, **changes})
    server.add_fault(Fault("status", route, times=None, status=200, body=body, content_type="application/json"))


async def test_a_server_with_defaults_that_requests_cannot_override_is_refused(weights):
    async with FakeSGLangServer(weights[0]) as server:
        await change_answer(server, "/model_info", preferred_sampling_params='{"min_new_tokens": 5, "top_p": 0.9}')
        with pytest.raises(EngineError, match="--preferred-sampling-params that set min_new_tokens"):
            async with SGLangEngine(server.url):
                pass


async def test_streams_of_increments_are_not_read_as_cumulative_ones(weights):
    async with FakeSGLangServer(weights[0]) as server:
        await change_answer(server, "/server_info", incremental_streaming_output=True)
        async with SGLangEngine(server.url) as engine:
            with pytest.raises(EngineError, match="--incremental-streaming-output"):
                await engine.generate_streaming(PROMPT, GREEDY, lambda tokens, log_probs: None)
            assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(weights[0])


async def test_replicas_take_no_tensors_and_are_given_none(weights):
    async with FakeSGLangServer(weights[0]) as server:
        await change_answer(server, "/server_info", dp_size=2)
        async with SGLangEngine(server.url) as engine:
            with pytest.raises(EngineError, match="2 data parallel replicas, which take no tensors"):
                await engine.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert server.count("/pause_generation") == server.count("/begin_weight_update") == 0


async def test_a_temperature_that_the_server_takes_for_greedy_is_refused(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        with pytest.raises(EngineError, match="temperature = 1e-07, expected 0 for greedy, or at least 1e-06"):
            await engine.generate(PROMPT, SamplingParams(temperature=1e-7))


async def test_without_the_size_of_the_vocabulary_nothing_is_sent():
    async with FakeSGLangServer(endless, SGLangSettings(model_path="/nowhere/here")) as server:
        with pytest.raises(EngineError, match="pass vocab_size"):
            async with SGLangEngine(server.url):
                pass
        async with SGLangEngine(server.url, vocab_size=128) as engine:
            with pytest.raises(EngineError, match="outside the vocabulary of 128"):
                await engine.generate((5, 128), GREEDY)
        assert server.is_alive


async def test_a_full_queue_is_waited_for(weights):
    full = SGLangSettings(max_running_requests=2, max_queued_requests=2)
    async with FakeSGLangServer(weights[0], full, seconds_per_token=0.002) as server:
        async with SGLangEngine(server.url) as engine:
            found: list[Any] = []
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for _ in range(12):
                        await generate_in(nursery, engine, found, SamplingParams(max_tokens=5))
    assert len(found) == 12
    assert all(isinstance(one, Completion) for one in found)


async def test_an_update_that_answers_400_although_it_took_place_is_flushed_and_done_again(weights):
    body = json.dumps({"success": False, "message": f"{NOT_FLUSHED}to call /flush_cache.", "num_paused_requests": 0})
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        server.add_fault(Fault("status", "/update_weights_from_disk", status=400, body=body, content_type="application/json"))
        answer = await engine.update_weights_from_checkpoint(weights[1])
        assert answer["weight_version"] == await engine.get_weight_version() == 1
        assert (server.count("/update_weights_from_disk"), server.count("/flush_cache")) == (2, 1)
        found = await engine.generate(PROMPT, GREEDY)
    assert found.output_tokens == expected_tokens(weights[1])


async def test_a_load_that_fails_is_undone_and_requests_go_on(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        server.add_fault(Fault("status", "/update_weights_from_disk", status=400, body='{"success": false, "message": "disk is gone"}'))
        server.scheduler.hold_tokens(5)
        found: list[Any] = []
        async with trio.open_nursery() as nursery:
            await generate_in(nursery, engine, found)
            await wait_for_tokens(server, 5)
            with pytest.raises(EngineError, match=r"did not take.*disk is gone.*goes on with the weights that it had before"):
                await engine.update_weights_from_checkpoint(weights[1])
            server.scheduler.release_tokens()
        assert set(found[0].output_versions) == {0}
        assert await engine.get_weight_version() == 0
        assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(weights[0])


async def test_with_unknown_weights_nothing_is_generated_until_a_sync_succeeds(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        server.add_fault(Fault("status", "/update_weights_from_disk", times=2, status=400, body='{"success": false, "message": "gone"}'))
        server.scheduler.hold_tokens(5)
        found: list[Any] = []
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                await generate_in(nursery, engine, found)
                await wait_for_tokens(server, 5)
                with pytest.raises(EngineError, match="could not be given the weights that it had before"):
                    await engine.update_weights_from_checkpoint(weights[1])
        server.scheduler.release_tokens()
        assert "cannot be used" in str(found[0])
        with pytest.raises(EngineError, match="cannot be used"):
            await engine.generate(PROMPT, GREEDY)
        await engine.update_weights_from_checkpoint(weights[2])
        after = await engine.generate(PROMPT, GREEDY)
    assert after.output_tokens == expected_tokens(weights[2])
    assert set(after.output_versions) == {1}


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/model_info"])
@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_a_sync_that_is_cancelled_leaves_known_weights(weights, path, in_flight):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url, in_flight=in_flight) as engine:
        server.add_fault(Fault("hang", path))
        num_before = server.count(path)
        server.scheduler.hold_tokens(5)
        found: list[Any] = []
        sync = trio.CancelScope()

        async def update() -> None:
            with sync:
                await engine.update_weights_from_checkpoint(weights[1])

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                await generate_in(nursery, engine, found)
                await wait_for_tokens(server, 5)
                nursery.start_soon(update)
                await wait_until(lambda: server.count(path) > num_before)
                sync.cancel()
                await wait_until(lambda: server.count("/continue_generation") > 0)
                server.scheduler.release_tokens()
        assert sync.cancelled_caught
        assert found[0].output_len == 100
        assert set(found[0].output_versions) == {0}
        assert await engine.get_weight_version() == 0
        assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(weights[0])


async def test_a_load_that_was_cancelled_but_goes_on_at_the_server_is_undone(weights):
    async with FakeSGLangServer(weights[0], seconds_per_update=0.2) as server, SGLangEngine(server.url) as engine:
        sync = trio.CancelScope()

        async def update() -> None:
            with sync:
                await engine.update_weights_from_checkpoint(weights[1])

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(update)
                await wait_until(lambda: server.count("/update_weights_from_disk") > 0)
                sync.cancel()
        assert server.count("/update_weights_from_disk") == 2
        assert await engine.get_weight_version() == 0
        assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(weights[0])


async def test_a_server_that_was_started_again_is_noticed(weights):
    async with FakeSGLangServer(weights[0]) as server:
        async with SGLangEngine(server.url) as engine:
            await engine.update_weights_from_checkpoint(weights[1])
            port = int(server.url.rpartition(":")[2])
            server.die()
            async with FakeSGLangServer(weights[0], port=port):
                with pytest.raises(EngineError, match="was started again"):
                    await engine.generate(PROMPT, GREEDY)
                await engine.update_weights_from_checkpoint(weights[2])
                after = await engine.generate(PROMPT, GREEDY)
    assert set(after.output_versions) == {2}
    assert after.output_tokens == expected_tokens(weights[2])


async def test_a_server_that_dies_fails_what_is_pending_and_the_sync(weights):
    found: list[Any] = []
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        server.scheduler.hold_tokens(5)
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    await generate_in(nursery, engine, found)
                await wait_for_tokens(server, 5, 3)
                server.die()
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match="did not take"):
            await engine.update_weights_from_checkpoint(weights[1])
    assert len(found) == 3
    assert all(isinstance(one, EngineError) for one in found)


async def test_a_label_of_others_is_no_version(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        await engine._server.post_json("/update_weight_version", {"new_version": "mine", "abort_all_requests": False}, kind="control")
        with pytest.raises(EngineProtocolError, match="'mine'"):
            await engine.generate(PROMPT, GREEDY)


async def test_an_aborted_answer_that_is_too_long_to_be_sent_again_has_reached_its_length(weights):
    """The server takes prompts of 505 tokens, and generates up to 510."""
    found: list[Completion] = []
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        for prompt_len, reason in ((501, "abort"), (502, "length")):
            server.scheduler.hold_tokens(3)

            async def one(prompt_len: int = prompt_len) -> None:
                found.append(await engine.generate((5,) * prompt_len, SamplingParams(max_tokens=100)))

            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one)
                    await wait_for_tokens(server, 3)
                    await engine.abort()
            assert (found[-1].output_len, found[-1].finish_reason) == (4, reason)  # one more after the abort
        server.scheduler.release_tokens()
        rest = await engine.generate(found[0].input_tokens + found[0].output_tokens, SamplingParams(max_tokens=100))
    assert (rest.output_len, rest.finish_reason) == (5, "length")


async def test_an_abort_of_all_spares_other_clients(weights):
    mine: list[Any] = []
    others: list[Any] = []
    async with FakeSGLangServer(weights[0]) as server:
        async with SGLangEngine(server.url) as engine, SGLangEngine(server.url) as other:
            server.scheduler.hold_tokens(5)
            async with trio.open_nursery() as nursery:
                for one, found in ((engine, mine), (other, others)):
                    await generate_in(nursery, one, found, SamplingParams(max_tokens=60, stop_token_ids=()))
                await wait_for_tokens(server, 5, 2)
                await engine.abort()
                server.scheduler.release_tokens()
    assert (mine[0].finish_reason, others[0].finish_reason) == ("abort", "length")


async def test_tensors_are_sent_in_buckets_and_flushed_with_the_last(weights):
    tensors = dict(create_endless_model(1).state_dict())
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url, bucket_bytes=5000) as engine:
        await engine.generate(PROMPT, GREEDY)
        await engine.update_weights(tensors, 7)
        sent = [r.json() for r in server.received if r.path == "/update_weights_from_tensor"]
        assert len(sent) > 3
        assert [body["flush_cache"] for body in sent] == [False] * (len(sent) - 1) + [True]
        assert ["weight_version" in body for body in sent] == [False] * (len(sent) - 1) + [True]
        found = await engine.generate(PROMPT, GREEDY)
    assert found.output_tokens == expected_tokens(weights[1])
    assert set(found.output_versions) == {7}


async def test_a_session_that_another_client_left_open_is_closed(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        await engine._server.post_json("/begin_weight_update", {}, kind="control")
        await engine.update_weights(dict(create_endless_model(1).state_dict()), 1)
        assert (await engine.generate(PROMPT, GREEDY)).output_tokens == expected_tokens(weights[1])


async def test_an_update_in_memory_that_fails_half_way_goes_back_to_the_directory(weights):
    tensors = dict(create_endless_model(2).state_dict())
    failing = Fault("status", "/update_weights_from_tensor", after=1, status=500, body='{"success": false, "message": "out of memory"}')
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url, bucket_bytes=5000) as engine:
        await engine.update_weights_from_checkpoint(weights[1])
        server.add_fault(failing)
        with pytest.raises(EngineError, match=r"out of memory.*goes on with the weights that it had before"):
            await engine.update_weights(tensors, 2)
        assert server.count("/end_weight_update") == 1
        found = await engine.generate(PROMPT, GREEDY)
        assert (found.output_tokens, set(found.output_versions)) == (expected_tokens(weights[1]), {1})
        await engine.update_weights(tensors, 2)
        server.add_fault(failing)
        with pytest.raises(EngineError, match="in no directory"):
            await engine.update_weights(tensors, 3)
        with pytest.raises(EngineError, match="cannot be used"):
            await engine.generate(PROMPT, GREEDY)
        await engine.update_weights(tensors, 3)
        found = await engine.generate(PROMPT, GREEDY)
    assert (found.output_tokens, set(found.output_versions)) == (expected_tokens(weights[2]), {3})


async def test_weights_that_do_not_fit_are_not_sent(weights):
    tensors = dict(create_endless_model(1).state_dict())
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        for wrong in (
            {**tensors, "model.norm.weight": torch.ones(3)},
            {**tensors, "model.norm.weight": tensors["model.norm.weight"].bfloat16()},
            {**tensors, "model.unknown": torch.ones(3)},
            {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
        ):
            with pytest.raises(EngineError, match="was not given new weights"):
                await engine.update_weights(wrong, 1)
        assert server.count("/pause_generation") == 0


async def test_health_is_never_asked(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        await engine.pause()
        await engine.update_weights_from_checkpoint(weights[1])
        await engine.describe_server()
        await engine.resume()
        await engine.generate(PROMPT, GREEDY)
        assert not [r.path for r in server.received if "health" in r.path]


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_a_stream_brings_the_tokens_of_the_completion_in_pieces_across_a_sync(weights, in_flight):
    heard: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    found: list[Completion] = []

    def hear(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        heard.append((tuple(tokens), tuple(log_probs)))

    def count_heard() -> int:
        return sum(len(tokens) for tokens, _ in heard)

    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url, in_flight=in_flight) as engine:
        server.scheduler.hold_tokens(10)

        async def one(name: str, max_tokens: int) -> None:
            found.append(await engine.generate_streaming(PROMPT, SamplingParams(max_tokens=max_tokens), hear, request_id=name))

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, "a", 60)
                await wait_until(lambda: count_heard() >= 10)
                await engine.update_weights_from_checkpoint(weights[1])
                server.scheduler.release_tokens()
            assert found[0].output_tokens == tuple(token for tokens, _ in heard for token in tokens)
            assert found[0].output_log_probs == tuple(log_prob for _, log_probs in heard for log_prob in log_probs)
            assert set(found[0].output_versions[:10]) == {0}
            assert set(found[0].output_versions[11:]) == {1}  # one that is aborted may get another token from the old weights
            assert len(heard) > 5
            heard.clear()
            server.scheduler.hold_tokens(10)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, "b", 400)
                await wait_until(lambda: count_heard() >= 10)
                await engine.abort(["b"])
    assert found[1].finish_reason == "abort"
    assert 10 <= found[1].output_len <= 11
    assert found[1].output_tokens == tuple(token for tokens, _ in heard for token in tokens)


async def test_a_stream_that_breaks_is_an_error(weights):
    async with FakeSGLangServer(weights[0]) as server, SGLangEngine(server.url) as engine:
        server.add_fault(Fault("cut", "/generate"))
        with pytest.raises(EngineError):
            await engine.generate_streaming(PROMPT, GREEDY, lambda tokens, log_probs: None)


# -- sets that tokens are drawn from


def sets_answer(sets: Any, log_probs: Any = (-0.5, 0.0), **changes: Any) -> dict[str, Any]:
    return answer_of(output_token_sampling_mask=sets, output_token_sampling_logprobs=list(log_probs), **changes)


def test_sets_come_with_log_probs_over_them():
    (found,) = parse_sglang_response(sets_answer([[9, 5], [6]]), ["r"], with_sets=True)
    assert (found.tokens, found.log_probs, found.labels) == ((5, 6), (-0.5, 0.0), ("3", "3"))
    assert found.kept == KeptTokens(data=np.array([5, 9, 6], dtype="<i4").tobytes(), counts=(2, 1))
    (unasked,) = parse_sglang_response(sets_answer([[9, 5], [6]]), ["r"])
    assert (unasked.log_probs, unasked.kept) == ((-1.0, -2.0), None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sets_answer([[9, 5]]), "sets that 1 tokens were drawn from, expected those of 2"),
        (sets_answer([[9, 5], [7]]), "token 1 of its answer is 6, which is not in the set"),
        (sets_answer([[9, 5], [6.0]]), r"token id 6\.0, expected a whole number"),
        (sets_answer([[9, 5], [6]], (-0.5,)), "2 tokens and log-probs over the sets of 1"),
        (sets_answer([[9, 5], [6]], (-0.5, 0.2)), "log-prob 0.2"),
        (answer_of(), "output_token_sampling_mask"),
    ],
)
def test_sets_that_cannot_be_are_refused(answer: Any, message: str):
    with pytest.raises(EngineProtocolError, match=message):
        parse_sglang_response(answer, ["r"], with_sets=True)


@pytest.mark.parametrize("outside", [-1, 32])
def test_sets_with_tokens_of_another_vocabulary_are_refused(outside: int):
    (found,) = parse_sglang_response(sets_answer([[9, 5], [6, outside]]), ["r"], with_sets=True)
    with pytest.raises(EngineProtocolError, match=rf"the token id {outside}, outside the vocabulary of 32: it serves another model"):
        check_generated(found, SamplingParams(max_tokens=2), 32)
    (good,) = parse_sglang_response(sets_answer([[0, 5], [6, 31]]), ["r"], with_sets=True)
    check_generated(good, SamplingParams(max_tokens=2), 32)


def test_tokens_of_a_request_that_was_aborted_while_it_waited_have_no_sets_and_are_drawn_anew():
    (found,) = parse_sglang_response(answer_of(reason="abort"), ["r"], with_sets=True)
    assert found == Generated(tokens=(), log_probs=(), labels=(), finish_reason="abort", kept=KeptTokens(), whole_log_probs=())


async def test_untempered_log_probs_beside_sets_are_those_of_the_whole_policy_across_syncs(tmp_path):
    model = create_endless_model(0, hidden_size=32, num_layers=1)
    model.save_pretrained(tmp_path / "same")
    params = SamplingParams(max_tokens=40, temperature=1.0, top_k=5, untempered_log_probs=True)
    found: list[Completion] = []

    async def generate():
        found.append(await engine.generate((3, 4), with_kept_tokens(params, engine)))

    async with FakeSGLangServer(tmp_path / "same") as server, SGLangEngine(server.url, in_flight="abort") as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_for_tokens(server, 5)
            await engine.update_weights_from_checkpoint(tmp_path / "same")
    (completion,) = found
    assert completion.kept_tokens is not None and completion.untempered_log_probs is not None
    tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
    with torch.no_grad():
        log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[1:, 0]
    assert completion.untempered_log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert min(a - b for a, b in zip(completion.output_log_probs, completion.untempered_log_probs, strict=True)) > 0.1


async def test_samples_of_cut_distributions_have_their_sets_and_the_trainers_log_probs_across_syncs(tmp_path):
    model = create_endless_model(0, hidden_size=32, num_layers=1)
    model.save_pretrained(tmp_path / "same")
    params = SamplingParams(max_tokens=60, temperature=0.7, top_k=20, top_p=0.8)
    found: list[Completion] = []

    async def generate():
        found.extend(await engine.generate_group((3, 4), with_kept_tokens(params, engine), 3))

    async with (
        FakeSGLangServer(tmp_path / "same", SGLangSettings(max_running_requests=2)) as server,
        SGLangEngine(server.url, in_flight="abort") as engine,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_for_tokens(server, 5)
            await engine.update_weights_from_checkpoint(tmp_path / "same")
        greedy = await engine.generate((3, 4), with_kept_tokens(params.new(temperature=0.0), engine))
        whole = await engine.generate((3, 4), with_kept_tokens(params.new(top_k=0), engine))
    assert (greedy.kept_tokens, greedy.log_prob_kind) == (None, "sampled")
    assert (whole.kept_tokens, whole.log_prob_kind) == (None, "tempered")
    assert {c.log_prob_kind for c in found} == {"sampled"} and any(len(set(c.output_versions)) > 1 for c in found)
    samples = [completion_to_sample(Sample(index=i), c.input_tokens, c, "") for i, c in enumerate(found)]
    assert all(sample.kept_tokens is not None and max(sample.kept_tokens.counts) > 1 for sample in samples)
    batch = collate_samples(samples)
    log_probs = await create_pytorch_backend(model, lr=1e-3).forward(batch, lambda outputs: outputs.log_probs).result()
    assert batch.rollout_log_probs is not None
    assert ((log_probs - batch.rollout_log_probs) * batch.loss_mask).abs().max() < 1e-4
