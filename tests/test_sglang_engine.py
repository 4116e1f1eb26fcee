"""SGLangEngine: payloads and answers against what a real server was recorded to say, and the engine against a server on loopback."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from rollouts.engines.http_engine import Generated
from rollouts.engines.request_checks import check_request
from rollouts.engines.sglang_protocol import (
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
    split_into_buckets,
)
from rollouts.errors import EngineError, EngineProtocolError
from rollouts.types import SamplingParams

RECORDINGS = Path(os.environ.get("ROLLOUTS_ENGINES_DIR", Path(__file__).parents[2] / "shared" / "engines")) / "sglang" / "http"


def read_recording(name: str) -> dict[str, Any]:
    if not RECORDINGS.is_dir():
        pytest.skip(f"no recorded exchanges in {RECORDINGS}: set ROLLOUTS_ENGINES_DIR")
    return json.loads((RECORDINGS / f"{name}.json").read_text())


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


def test_each_token_of_a_request_across_a_sync_has_its_label():
    (found,) = parse_recorded("pause_retract_inflight")
    spans = read_recording("pause_retract_inflight")["response"]["meta_info"]["weight_versions"]
    assert len(spans) == 2
    for span in spans:
        assert set(found.labels[span["start"] : span["end"]]) == {span["version"]}
    assert len(found.labels) == len(found.tokens) == 300


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
        (answer_of(log_probs=(-1.0, None)), "log-prob of request r is None"),
        (answer_of(log_probs=(-1.0, 0.5)), "log-prob of request r is 0.5"),
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
    from rollouts.engines.http import describe_server_error

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


def test_buckets_are_bounded_and_of_one_dtype():
    weights = {f"w{i}": torch.zeros(10, dtype=torch.bfloat16 if i % 3 == 0 else torch.float32) for i in range(9)}
    weights["large"] = torch.zeros(1000)
    buckets = split_into_buckets(weights, 100)
    assert sorted(name for bucket in buckets for name, _ in bucket) == sorted(weights)
    for bucket in buckets:
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= 100
        assert len({t.dtype for _, t in bucket}) == 1
    assert max(len(bucket) for bucket in buckets) > 1
    assert split_into_buckets({}, 100) == []
