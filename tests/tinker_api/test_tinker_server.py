"""The server over real sockets, with requests that the real tinker client sent (recorded_requests.json), and its parts by hand."""

from __future__ import annotations

import math
import struct
import threading
from itertools import pairwise

import httpx
import numpy as np
import pytest
import torch
import trio
import trio.testing
from recordings import read_rows

from rollouts.backends.lora.config import LoRAConfig
from rollouts.errors import ConfigError, DataError
from rollouts.testing import create_tiny_model
from rollouts.tinker import TinkerConfig, open_tinker_server
from rollouts.tinker.job_queue import JobQueue
from rollouts.tinker.losses import LOSSES, bind_loss
from rollouts.tinker.rows import collate_data, split_data
from rollouts.tinker.samplers import BASE, Engines
from rollouts.tinker.service import Service
from rollouts.tinker.trained import choose_adapters, create_trained_model, share_weights
from rollouts.tinker.wire.messages import Datum, PassRequest, read_pass_request, write_pass_output
from rollouts.tinker.wire.paths import SavedPath, make_path, parse_path
from rollouts.tinker.wire.protobuf import read_fields, write_bytes, write_double, write_int
from rollouts.tinker.wire.requests import AdamParams, AdapterWish
from rollouts.tinker.wire.results import Outcome, Results
from rollouts.types import TokenOutputs

TOKENS = [5, 6, 7, 8, 9, 10]
WEIGHTS = [1.0, 1.0, 0.0, 2.0, -0.5]
SHIFTED = {"targets": [0, 0, 8, 9, 10], "q": [0.0, 0.0, -4.0, -4.5, -5.0], "a": [0.0, 0.0, 1.0, -1.0, 2.0]}
RESULT = "/api/v1/retrieve_future"


def find_log_probs(model, inputs, targets):
    """Log-probs of targets by the model's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([inputs])).logits[0].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(inputs)), torch.tensor(targets)].tolist()


def sum_by_hand(name, log_probs, q, advantages, low=0.8, high=1.2, beta=0.05):
    """Tinker's losses in Python numbers."""
    total = 0.0
    for p, old, a in zip(log_probs, q, advantages, strict=True):
        ratio = math.exp(p - old)
        total -= {
            "importance_sampling": ratio * a,
            "ppo": min(ratio * a, min(max(ratio, low), high) * a),
            "cispo": min(max(ratio, low), high) * p * a,
            "dro": p * a - 0.5 * beta * (p - old) ** 2,
        }[name]
    return total


def check_told(told):
    """Check the numbers that client_program.py prints, against the model's own forward pass and sums by hand."""
    model = create_tiny_model()
    base = find_log_probs(model, TOKENS[:-1], TOKENS[1:])
    first = told["cross_entropy"]
    assert first["logprobs"][0] == pytest.approx(base, abs=1e-5)
    assert first["logprobs"][1] == pytest.approx(base[:2], abs=1e-5)
    by_hand = -sum(w * p for w, p in zip(WEIGHTS, base, strict=True)) - sum(base[:2])
    assert first["metrics"] == {"loss:sum": pytest.approx(by_hand, abs=1e-4)}  # a sum over all tokens of both sequences, not a mean
    assert told["base_scores"][1:] == pytest.approx(base, abs=1e-5)
    assert told["base_scores"][0] is None
    for name, limits in {"importance_sampling": {}, "ppo": {}, "cispo": {"low": 0.0, "high": 4.0}, "dro": {}}.items():
        (log_probs,) = told[name]["logprobs"]
        assert told[name]["metrics"]["loss:sum"] == pytest.approx(
            sum_by_hand(name, log_probs, SHIFTED["q"], SHIFTED["a"], **limits), abs=1e-4
        )
    updated = told["after"]["logprobs"][0]
    assert max(abs(a - b) for a, b in zip(updated, base, strict=True)) > 0.05  # two updates have changed the model
    for scores in (told["scores"], told["named_scores"]):  # what is sampled from is what was trained
        assert scores[1:] == pytest.approx(updated, abs=1e-5)
    assert told["last_scores"][:4] == [None] * 4
    assert told["last_scores"][4:] == pytest.approx(updated[3:], abs=1e-5)
    assert told["prompt_logprobs"][1:] == pytest.approx(updated[:2], abs=1e-5)
    assert told["restored"] == told["after"]  # bit for bit
    assert len(set(told["ids"])) == 3
    for sample in told["samples"]:
        assert 1 <= len(sample["tokens"]) == len(sample["logprobs"]) <= 4
        assert sample["stop_reason"] == ("stop" if sample["tokens"][-1] == 1 else "length")
    assert told["info"]["is_lora"] is told["restored_info"]["is_lora"] is True
    assert told["info"]["lora_rank"] == told["restored_info"]["lora_rank"] == 4
    assert told["custom"]["loss:sum"] == pytest.approx(sum(map(sum, told["after"]["logprobs"])), abs=1e-4)


def read_output(body):
    """A ForwardBackwardOutput as JSON: written by hand from the client's descriptors."""
    told = {"metrics": {}, "logprobs": []}
    for number, value in read_fields(memoryview(body)):
        if number == 2:
            record = dict(read_fields(value))
            name, tensor = (dict(read_fields(record[2]))[k] for k in (1, 2))
            parts = dict(read_fields(tensor))
            assert (bytes(record[1]), bytes(name), parts[3]) == (b"ArrayRecord", b"logprobs", 1)
            values, ends = np.frombuffer(parts[1], "<f4"), np.frombuffer(parts[2], "<i8") // 4
            told["logprobs"] = [values[a:b].tolist() for a, b in pairwise(ends)]
            assert record[3] == len(told["logprobs"])
        elif number == 3:
            entry = dict(read_fields(value))
            told["metrics"][bytes(entry[1]).decode()] = entry[2]
    return told


def read_samples(body):
    """A SampleResponse as JSON, and the log-probs of the prompt."""
    samples, scores = [], None
    for number, value in read_fields(memoryview(body)):
        if number == 1:
            parts = dict(read_fields(value))
            reason = ("stop", "length")[parts[1]]
            tokens, log_probs = np.frombuffer(parts[2], "<i4").tolist(), np.frombuffer(parts[3], "<f4").tolist()
            samples.append({"tokens": tokens, "logprobs": log_probs, "stop_reason": reason})
        elif number == 2:
            scores = [None if math.isnan(x) else x for x in np.frombuffer(value, "<f4").tolist()]
    return samples, scores


async def begin(client):
    answer = await client.post(
        "/api/v1/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
    )
    return answer.json()["session_id"]


async def retrieve(client, answer):
    """The outcome of a request that was promised one, asked for until it is there."""
    assert answer.status_code == 200, answer.text
    body = {"request_id": answer.json()["request_id"], "allow_metadata_only": True}
    while (answer := await client.post(RESULT, json=body)).status_code == 408:
        pass
    return answer


async def ask(client, path, /, **body):
    """POST, and wait for the outcome; returns status and JSON."""
    answer = await client.post(f"/api/v1/{path}", json=body)
    if answer.status_code == 200 and "request_id" in answer.json():
        answer = await retrieve(client, answer)
    return answer.status_code, answer.json()


def write_pass(model_id, seq_id, data, loss="cross_entropy", *, forward_only=False):
    """A ForwardBackwardRequest, as the client writes it. data: (tokens, {name: array}) of each datum."""
    parts = [write_bytes(1, model_id.encode()), write_int(2, seq_id)]
    for tokens, arrays in data:
        datum = write_bytes(1, write_bytes(1, write_bytes(1, np.asarray(tokens, "<i4").tobytes())))
        for name, values in arrays.items():
            dtype, number = ("<i8", 2) if name == "target_tokens" else ("<f4", 1)
            array = np.asarray(values, dtype)
            shape = write_bytes(4, b"".join(bytes([n]) for n in array.shape))
            tensor = write_bytes(1, array.tobytes()) + write_int(3, number) + shape
            datum += write_bytes(2, write_bytes(1, name.encode()) + write_bytes(2, tensor))
        parts.append(write_bytes(3, datum))
    return b"".join([*parts, write_bytes(4, loss.encode()), write_int(6, int(forward_only))])


async def run_pass(client, *args, **more):
    kind = {"content-type": "application/x-protobuf"}
    return await client.post("/api/v1/forward_backward", content=write_pass(*args, **more), headers=kind)


def open_client(server, **more):
    return httpx.AsyncClient(base_url=server.url, timeout=110, **more)


async def begin_model(client, **more):
    session_id = await begin(client)
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "policy", "lora_config": {"rank": 4, "seed": 3}, **more}
    status, told = await ask(client, "create_model", **body)
    assert status == 200, told
    return told["model_id"]


DATA = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": WEIGHTS})]
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}


async def test_requests_of_the_real_client_get_the_numbers_that_it_reads(tmp_path):
    told, outputs, samples, infos = {}, [], [], []
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, poll_s=100) as server, open_client(server) as client:
        session_id = await begin(client)
        for method, path, kind, body in read_rows(session_id):
            if path.endswith("/create_session"):
                continue
            answer = await client.request(method, path, content=body or None, headers={"content-type": kind} if kind else {})
            if answer.status_code == 400:  # what is refused, at the end
                continue
            assert answer.status_code == 200, (path, answer.text)
            name = path.removeprefix("/api/v1/")
            if name == "retrieve_future":
                if answer.headers["content-type"] != "application/x-protobuf":
                    result = answer.json()
                    told.setdefault("update", result.get("metrics"))
                    if "/weights/" in str(result.get("path")):
                        told.setdefault("state", result["path"])
                elif b"ArrayRecord" in answer.content:
                    outputs.append(read_output(answer.content))
                else:
                    samples.append(read_samples(answer.content))
            elif name == "get_info":
                infos.append(answer.json())
            elif name == "asample":
                told.setdefault("ids", answer.json()["sample_sequence_ids"])
    names = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "clipped", "after", "forward of custom", "custom", "restored")
    told |= dict(zip(names, outputs, strict=False))
    told |= {"samples": samples[0][0], "prompt_logprobs": samples[0][1], "info": infos[0], "restored_info": infos[1]}
    told |= dict(zip(("scores", "last_scores", "named_scores", "base_scores"), [scores for _, scores in samples[1:]], strict=True))
    # the loss of the client's own function is -log p with weight -1, so that the sum of the server is that of the log-probs
    told["custom"] = told["custom"]["metrics"]
    check_told(told)


async def test_what_is_sampled_has_the_probabilities_it_was_drawn_with(tmp_path):
    model = create_tiny_model()
    async with open_tinker_server(model, directory=tmp_path) as server, open_client(server) as client:
        session_id = await begin(client)
        _, told = await ask(client, "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model="policy")
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:2]}, {"type": "encoded_text", "tokens": TOKENS[2:3]}]}
        bodies = []
        for seq_id in (0, 1, 2, 2):
            body = {"sampling_session_id": told["sampling_session_id"], "seq_id": seq_id, "num_samples": 2, "prompt": prompt}
            params = {"max_tokens": 5, "temperature": 0.5, "top_k": -1, "top_p": 1.0} | ({"seed": 4} if seq_id < 2 else {})
            answer = await client.post("/api/v1/asample", json=body | {"sampling_params": params})
            bodies.append((await retrieve(client, answer)).content)
        body = {"sampling_session_id": told["sampling_session_id"], "prompt": {"chunks": [{"tokens": TOKENS[:1]}]}}
        scored = {"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "sampling_params": {"max_tokens": 1}}
        answer = await client.post("/api/v1/asample", json=body | scored | {"seq_id": 3})
        assert read_samples((await retrieve(client, answer)).content)[1] == [None]  # nothing comes before a first token
        body |= {"prompt": {"chunks": [{"tokens": [5] * 600}]}, "num_samples": 3, "sampling_params": {"max_tokens": 1}}
        _, refused = await ask(client, "asample", **body, seq_id=4)
        assert (refused["category"], "has 600 tokens" in refused["error"]) == ("user", True)  # of each sample, told once
        status, refused = await ask(client, "asample", **body | {"sampling_params": {"temperature": 1e-40}}, seq_id=5)
        assert (status, refused["param"]) == (400, "sampling_params.temperature")
    assert bodies[0] == bodies[1]  # the same seed
    assert bodies[2] == bodies[3] != bodies[1]  # the same request, sent twice, is one request
    for sample in read_samples(bodies[2])[0]:
        row = TOKENS[:3] + sample["tokens"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, 2:-1].double() / 0.5
        expected = torch.log_softmax(logits, -1)[torch.arange(len(sample["tokens"])), torch.tensor(sample["tokens"])]
        assert sample["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)


async def test_parts_of_a_request_that_arrive_last_part_first_and_an_update_behind_them(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id = await begin_model(client)
        update = await client.post("/api/v1/optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": ADAM})
        second = await run_pass(client, model_id, 2, DATA)
        first = await run_pass(client, model_id, 1, DATA)
        again = await run_pass(client, model_id, 1, DATA)  # the answer was lost, and the client sends it again
        assert again.json() == first.json()
        assert (await retrieve(client, first)).content == (await retrieve(client, second)).content  # before the update, both
        assert (await retrieve(client, update)).json()["metrics"]["lr"] == 0.01
        once = await begin_model(client)
        await run_pass(client, once, 1, DATA)
        alone = await client.post("/api/v1/optim_step", json={"model_id": once, "seq_id": 2, "adam_params": ADAM})
        norms = [(await retrieve(client, answer)).json()["metrics"]["grad_norm"] for answer in (update, alone)]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-5)  # each part counted once


async def test_a_number_names_one_request_of_its_model(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id = await begin_model(client)
        none = await run_pass(client, model_id, 0, DATA)  # 0 is that of its making
        assert (none.status_code, none.json()["error"]) == (400, "seq_id is 0, expected a number from 1 on")
        assert (await run_pass(client, model_id, 2, DATA, "custom")).status_code == 400  # and request 1 has not come
        again = await run_pass(client, model_id, 2, DATA)
        assert (again.status_code, "was answered before: it was refused" in again.json()["error"]) == (400, True)
        assert (await retrieve(client, await run_pass(client, model_id, 1, DATA))).status_code == 200


async def test_a_refused_request_holds_nobody_up_and_its_update_is_refused(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id = await begin_model(client)
        await run_pass(client, model_id, 1, DATA)
        assert (await run_pass(client, model_id, 2, DATA, "stable_reinforce")).status_code == 400
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=3, adam_params=ADAM)
        assert told["category"] == "user"
        assert "a forward_backward of this step failed: loss_fn is 'stable_reinforce'" in told["error"]
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=4, adam_params=ADAM)
        assert "forward_backward was not called since the last one" in told["error"]
        bad = [(TOKENS[:-1], {"target_tokens": TOKENS[1:], "weights": [*WEIGHTS[:4], math.nan]})]
        told = (await retrieve(client, await run_pass(client, model_id, 5, bad))).json()
        assert told == {"error": "data[0].loss_fn_inputs['weights'][4] is nan, expected finite numbers", "category": "user"}
        status, told = await ask(client, "save_weights", model_id=model_id, seq_id=6, path="../x")
        assert (status, told["error"].partition(" cannot")[0]) == (400, "'../x'")
        status, _ = await ask(client, "optim_step", model_id=model_id, seq_id=7, adam_params=ADAM | {"beta1": 1.0})
        assert status == 400
        await run_pass(client, model_id, 8, DATA)
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=9, adam_params=ADAM)
        assert told["error"].startswith("optim_step: a forward_backward of this step failed: data[0].loss_fn_inputs['weights'][4] is nan")
        await run_pass(client, model_id, 10, DATA)
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=11, adam_params=ADAM)
        whole = await begin_model(client)
        await run_pass(client, whole, 1, DATA)
        _, expected = await ask(client, "optim_step", model_id=whole, seq_id=2, adam_params=ADAM)
    assert told == expected  # nothing of the passes before is left in the gradient


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_and_their_gradients_by_hand(name):
    q, advantages = [-1.0, -2.0, -1.5, -0.7], [1.0, -1.0, 2.0, 0.0]
    datum = Datum(np.arange(4), {"target_tokens": np.arange(1, 5), "logprobs": np.float32(q), "advantages": np.float32(advantages)})
    config = (
        {"beta": 0.3} if name == "dro" else {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3} if name != "importance_sampling" else {}
    )
    loss, loss_fn = bind_loss(name, config)
    batch = collate_data([datum], loss)
    log_probs = torch.tensor([[0.0, -1.2, -1.0, -1.5, -0.2]], requires_grad=True)
    found = loss_fn(TokenOutputs(log_probs=log_probs), batch)[0]
    found.backward()
    p = log_probs[0, 1:].tolist()
    more = {"low": 0.9, "high": 1.3, "beta": 0.3}
    assert found.item() == pytest.approx(sum_by_hand(name, p, q, advantages, **more), abs=1e-5)
    for k in range(4):
        if name == "cispo":  # the clipped ratio is a weight without a gradient
            slope = -min(max(math.exp(p[k] - q[k]), 0.9), 1.3) * advantages[k]
        else:
            step = [x + (1e-5 if i == k else 0.0) for i, x in enumerate(p)], [x - (1e-5 if i == k else 0.0) for i, x in enumerate(p)]
            up, down = (sum_by_hand(name, x, q, advantages, **more) for x in step)
            slope = (up - down) / 2e-5
        assert float(log_probs.grad[0, k + 1]) == pytest.approx(slope, abs=1e-4)
    assert log_probs.grad[0, 0] == 0


def test_gspo_by_hand():
    q, advantages, mask = np.float32([-1.0, -2.0, -1.5]), np.float32([0.5, 0.5, 0.5]), np.float32([0.0, 1.0, 1.0])
    arrays = {"target_tokens": np.arange(1, 4), "logprobs": q, "advantages": advantages, "sequence_ratio_mask": mask}
    loss, loss_fn = bind_loss("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    log_probs = torch.tensor([[0.0, -1.1, -1.7, -1.6]], requires_grad=True)
    found = loss_fn(TokenOutputs(log_probs=log_probs), collate_data([Datum(np.arange(3), arrays)], loss))[0]
    found.backward()
    ratio = math.exp((0.3 - 0.1) / 2)  # the mean log-ratio of the two marked positions
    assert found.item() == pytest.approx(-3 * ratio * 0.5, abs=1e-6)
    assert log_probs.grad[0, 1:].tolist() == pytest.approx([-ratio * 0.5] * 3, abs=1e-6)
    with pytest.raises(DataError, match="loss_fn_config has no 'clip_low_threshold'"):
        bind_loss("gspo", {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("custom", {}, "loss_fn is 'custom', which this server does not compute"),
        ("ppo", {"eps": 0.2}, "loss_fn_config has 'eps', which is no setting of 'ppo' here: its settings are clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.1}, "clip_low_threshold 0.2 above clip_high_threshold 0.1"),
        ("ppo", {"clip_low_threshold": "low"}, "is 'low', expected a number from 0 on"),
        ("cross_entropy", {"beta": 1.0}, "its settings are none"),
    ],
)
def test_losses_and_settings_that_are_not_computed_are_refused_by_name(name, config, message):
    with pytest.raises(DataError, match=message):
        bind_loss(name, config)


def make_trained(**settings):
    config = TinkerConfig(**settings)
    base = create_tiny_model()
    return create_trained_model(base, None, choose_adapters(AdapterWish(rank=4, seed=3), base, config), config)


def make_data():
    rows = ([5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16], [17])
    return tuple(
        Datum(np.array(r), {"target_tokens": np.array(r) + 1, "weights": np.linspace(-1, 2, len(r), dtype=np.float32)}) for r in rows
    )


def test_a_request_may_be_split_and_its_sum_gradient_and_log_probs_stay():
    loss, loss_fn = bind_loss("cross_entropy", {})
    told = []
    for most in (1, 8, 10_000):
        model = make_trained(max_tokens_per_pass=most)
        output = read_output(model.run_pass(PassRequest(data=make_data(), loss_fn="cross_entropy"), loss, loss_fn))
        told.append((output, model.update(AdamParams(learning_rate=0.01))["grad_norm"]))
    assert [len(part) for part in split_data(make_data(), 8)] == [1, 1, 1, 1]
    assert [len(part) for part in split_data(make_data(), 10)] == [2, 1, 1]
    for output, norm in told[1:]:
        assert norm == pytest.approx(told[0][1], rel=1e-5)
        assert output["metrics"]["loss:sum"] == pytest.approx(told[0][0]["metrics"]["loss:sum"], abs=1e-4)
        for mine, theirs in zip(output["logprobs"], told[0][0]["logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_targets_that_are_no_shifted_input_get_their_own_log_probs():
    loss, loss_fn = bind_loss("cross_entropy", {})
    rows, targets = ([5, 6, 7, 8], [9, 10]), ([0, 40, 8, 3], [33, 1])
    data = tuple(
        Datum(np.array(row), {"target_tokens": np.array(found), "weights": np.ones(len(row), dtype=np.float32)})
        for row, found in zip(rows, targets, strict=True)
    )
    expected = [find_log_probs(create_tiny_model(), *pair) for pair in zip(rows, targets, strict=True)]
    for forward_only in (True, False):
        request = PassRequest(data=data, loss_fn="cross_entropy", forward_only=forward_only)
        told = read_output(make_trained().run_pass(request, loss, loss_fn))
        for mine, theirs in zip(told["logprobs"], expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        assert told["metrics"]["loss:sum"] == pytest.approx(-sum(map(sum, expected)), abs=1e-4)


def test_an_update_is_torchs_adamw_with_the_numbers_of_the_request():
    """Against torch's AdamW on the same gradient: rate, betas, eps, decay on all that is trained, clipping by the norm."""
    loss, loss_fn = bind_loss("cross_entropy", {})
    model = make_trained()
    parameters = [p for p in model._backend.model.parameters() if p.requires_grad]
    copies = [p.detach().clone().requires_grad_() for p in parameters]
    for clip, rate in ((0.0, 0.02), (0.5, 0.01)):
        model.run_pass(PassRequest(data=make_data(), loss_fn="cross_entropy"), loss, loss_fn)
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.grad = parameter.grad.clone()
        model.update(AdamParams(learning_rate=rate, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=clip))
        if clip:
            torch.nn.utils.clip_grad_norm_(copies, clip)
        if rate == 0.02:
            own = torch.optim.AdamW(copies, lr=rate, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
        own.param_groups[0]["lr"] = rate
        own.step()
        for copy, parameter in zip(copies, parameters, strict=True):
            assert torch.allclose(copy, parameter, atol=1e-6)


def test_adapters_are_where_the_client_asks_for_them_and_leave_the_base_as_it_is():
    base = create_tiny_model()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    config = TinkerConfig()
    both = choose_adapters(AdapterWish(rank=4), base, config)
    attention = choose_adapters(AdapterWish(rank=4, train_mlp=False), base, config)
    assert (both.target_modules, both.scale) == (("all-linear",), 8.0)  # alpha is 32, as Tinker's
    assert all("self_attn" in name for name in attention.target_modules)
    assert len(attention.target_modules) == 8
    with pytest.raises(DataError, match="one of the two must be true"):
        choose_adapters(AdapterWish(rank=4, train_mlp=False, train_attn=False), base, config)
    loss, loss_fn = bind_loss("cross_entropy", {})
    trained = []
    for lora in (attention, None):
        model = create_trained_model(base, None, lora, config)
        model.run_pass(PassRequest(data=make_data(), loss_fn="cross_entropy"), loss, loss_fn)
        model.update(AdamParams(learning_rate=0.1))
        weights = model.take_weights()
        trained.append({name for name, value in weights.items() if not torch.equal(value, before[name])})
    assert trained[0] == {f"{name}.weight" for name in attention.target_modules}
    assert trained[1] == set(before)  # all weights
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    shared = share_weights(base)
    assert shared is not base
    assert all(a is b for a, b in zip(shared.parameters(), base.parameters(), strict=True))


async def test_saved_weights_stay_in_the_servers_directory(tmp_path):
    root = tmp_path / "saved"
    async with open_tinker_server(create_tiny_model(), directory=root) as server, open_client(server) as client:
        model_id = await begin_model(client)
        await run_pass(client, model_id, 1, DATA)
        _, told = await ask(client, "save_weights", model_id=model_id, seq_id=2, path="a", overwrite=False, user_metadata={"k": "v"})
        assert told["path"] == f"tinker://{model_id}/weights/a"
        _, taken = await ask(client, "save_weights", model_id=model_id, seq_id=3, path="a", overwrite=False)
        assert taken == {
            "error": f"{told['path']} exists already: choose another name, or save_state(..., overwrite=True)",
            "category": "user",
        }
        _, again = await ask(client, "save_weights", model_id=model_id, seq_id=4, path="a", overwrite=True)
        assert again == told
        status, info = await ask(client, "weights_info", tinker_path=told["path"])
        assert (status, info["lora_rank"], info["train_attn"], info["train_mlp"], info["train_unembed"]) == (200, 4, True, True, False)
        status, told = await ask(client, "load_weights", model_id=model_id, seq_id=5, path=f"tinker://{model_id}/weights/b", optimizer=True)
        assert (status, told["error"][:16]) == (404, "nothing is saved")
        (root / model_id / "weights" / "out").symlink_to(tmp_path)
        status, told = await ask(
            client, "load_weights", model_id=model_id, seq_id=6, path=f"tinker://{model_id}/weights/out", optimizer=True
        )
        assert (status, "leads out of the directory of this server" in told["error"]) == (400, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    assert (root / model_id / "weights" / "a" / "step_0000" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "path",
    ["tinker://../weights/a", "tinker://run/weights/..", "tinker://run/weights/.a", "tinker://run/weights/a/b", "tinker://run/other/a",
     "/etc/passwd", "tinker:///weights/a", "tinker://run/weights/", "tinker://run/weights/a%2f", "tinker://run/weights/a\x00"],
)  # fmt: skip
def test_a_path_that_leads_elsewhere_is_refused(path):
    with pytest.raises(DataError, match="the path is"):
        parse_path(path, ("weights", "sampler_weights"))


def test_paths_are_read_as_they_are_written():
    path = make_path("run:train:0", "weights", "step-1.5")
    assert parse_path(str(path), ("weights",)) == path == SavedPath("run:train:0", "weights", "step-1.5")
    with pytest.raises(DataError, match="expected tinker://RUN/weights/NAME"):
        parse_path("tinker://run/sampler_weights/a", ("weights",))


async def test_a_second_model_too_many_is_refused_until_its_client_goes(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, max_models=1) as server, open_client(server) as client:
        model_id = await begin_model(client)
        session_id = await begin(client)
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "policy", "lora_config": {"rank": 2}}
        status, told = await ask(client, "create_model", **body)
        assert (status, told["code"]) == (400, "too_many_models")
        assert model_id in told["error"]
        first = model_id.partition(":")[0]
        assert (await client.post(f"/api/v1/sessions/{first}/finish", json={"reason": {"type": "success"}})).status_code == 200
        status, told = await ask(client, "session_heartbeat", session_id=first)
        assert (status, told["error"].rpartition(": ")[2]) == (410, "its client has finished it")
        assert (await ask(client, "create_model", **body))[0] == 200
        status, told = await ask(client, "unload_model", model_id=f"{session_id}:train:0")
        assert (status, told["type"]) == (200, "unload_model")
        assert (await ask(client, "create_model", **body | {"model_seq_id": 1}))[0] == 200


async def test_requests_of_a_model_that_is_unloaded_end(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id = await begin_model(client)
        waits = await run_pass(client, model_id, 2, DATA)  # for request 1, which never comes
        assert (await ask(client, "unload_model", model_id=model_id))[0] == 200
        assert (await retrieve(client, waits)).json() == {"error": f"the model {model_id} was unloaded", "category": "user"}


async def test_a_model_that_cannot_be_made_after_its_client_has_gone_ends_nothing_else(tmp_path, monkeypatch):
    made = threading.Event()

    def fail(*_):
        made.wait(60)
        raise ValueError("no memory")

    monkeypatch.setattr("rollouts.tinker.service.create_trained_model", fail)
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        session_id = await begin(client)
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "policy", "lora_config": {"rank": 4}}
        assert (await client.post("/api/v1/create_model", json=body)).status_code == 200
        assert (await client.post(f"/api/v1/sessions/{session_id}/finish", json={"reason": {"type": "errored"}})).status_code == 200
        made.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
        body["session_id"] = await begin(client)
        status, told = await ask(client, "create_model", **body)
        assert (status, told["category"]) == (200, "server")
        assert "no memory" in told["error"]


async def test_requests_do_not_wait_for_ever_for_one_that_does_not_arrive(tmp_path, monkeypatch):
    run, waited = JobQueue.run, []

    async def be_impatient(queue, patience_s, give_up):
        waited.append(patience_s)
        await run(queue, 0.05, give_up)

    monkeypatch.setattr(JobQueue, "run", be_impatient)
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, max_body_bytes=2**20) as server, open_client(server) as client:
        model_id = await begin_model(client)
        assert (await run_pass(client, model_id, 1, [(np.arange(2**19), {})])).status_code == 413  # whose, the server has not read
        assert (await retrieve(client, await run_pass(client, model_id, 2, DATA))).status_code == 200
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=3, adam_params=ADAM)
        lost = f"since request 1 of {model_id} did not arrive, though later ones waited 300 s for it"
        assert told["error"].startswith(f"optim_step: a part of the gradient may be missing, {lost}"), "nobody knows what request it was"
        await run_pass(client, model_id, 4, DATA)
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=5, adam_params=ADAM)
        assert told["metrics"]["lr"] == 0.01
    assert waited == [TinkerConfig().idle_s]


async def test_a_queue_gives_up_numbers_that_others_wait_for(autojump_clock):
    queue, ran, gone = JobQueue(), [], []

    def make_job(number):
        async def job():
            ran.append((number, trio.current_time() - begun))

        return job

    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run, 300.0, gone.append)
        await trio.sleep(1000)
        assert gone == []  # nobody waits for request 1
        queue.put(3, make_job(3))
        await trio.sleep(200)
        queue.put(4, make_job(4))
        queue.put(1, make_job(1))  # late, but in time
        await trio.sleep(299)
        assert gone == []
        await trio.sleep(2)
        assert gone == [range(2, 3)]
        queue.put(2, make_job(2))  # too late
        queue.put(10**15, make_job(10**15))
        await trio.sleep(200)
        queue.put(9, make_job(9))
        await trio.sleep(101)
        assert gone == [range(2, 3), range(5, 9)]  # at once, and not each after its own wait
        await trio.sleep(1000)
        assert gone[2:] == [range(10, 10**15)]
        nursery.cancel_scope.cancel()
    assert ran == [(1, 1200), (3, 1500), (4, 1500), (9, 1801), (10**15, 2101)]


async def test_others_are_answered_while_a_large_request_is_read(tmp_path, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()

    def read(body):
        inside.set()
        assert go_on.wait(60)
        return read_pass_request(body)

    monkeypatch.setattr("rollouts.tinker.server.read_pass_request", read)
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id, found = await begin_model(client), []

        async def send():
            found.append(await run_pass(client, model_id, 1, [(np.arange(2**16), {})]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.to_thread.run_sync(inside.wait, 60)
            assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
            go_on.set()
        assert "lacks 'target_tokens'" in (await retrieve(client, found[0])).json()["error"]


async def test_a_request_that_is_damaged_behind_its_number_takes_its_turn(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        model_id = await begin_model(client)
        kind = {"content-type": "application/x-protobuf"}
        answer = await client.post("/api/v1/forward_backward", content=write_pass(model_id, 1, DATA)[:-20], headers=kind)
        assert (answer.status_code, answer.json()["error"][:16]) == (400, "the message ends")
        _, told = await ask(client, "optim_step", model_id=model_id, seq_id=2, adam_params=ADAM)
        assert "a forward_backward of this step failed: the message ends" in told["error"]


def test_an_update_has_nothing_of_passes_that_were_dropped():
    loss, loss_fn = bind_loss("cross_entropy", {})
    request = PassRequest(data=make_data(), loss_fn="cross_entropy")
    model, other = make_trained(), make_trained()
    model.run_pass(request, loss, lambda outputs, batch: (loss_fn(outputs, batch)[0] * math.inf, loss_fn(outputs, batch)[1]))
    model.note_failure("a part is missing")
    with pytest.raises(DataError, match="a part is missing"):
        model.update(AdamParams())
    for one in (model, other):
        one.run_pass(request, loss, loss_fn)
    assert model.update(AdamParams()) == other.update(AdamParams())  # the infinite loss is no reason to leave this update out


async def test_loaded_weights_are_sampled_from_while_others_are_loaded(monkeypatch):
    engines = Engines(create_tiny_model(), None, most=2, seed=0)
    inside, go_on, create = threading.Event(), threading.Event(), engines._create

    def wait(source, weights):
        if source != BASE:
            inside.set()
            assert go_on.wait(60)
        return create(source, weights)

    monkeypatch.setattr(engines, "_create", wait)
    async with engines.use(BASE) as base:
        weights = create_tiny_model().state_dict()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engines.add, "memory:a", weights)
            await trio.to_thread.run_sync(inside.wait, 60)
            async with engines.use(BASE) as again:  # would wait for ever behind the one that is loaded
                assert again is base
            go_on.set()
        async with engines.use("memory:a") as other:
            assert other is not base
    for source in (BASE, "memory:a"):
        await engines.forget(source)


async def test_a_client_that_gives_no_sign_of_life_is_forgotten(autojump_clock):
    service = Service(create_tiny_model(), None, TinkerConfig(idle_s=60.0))
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        quiet, alive = service.begin_session(), service.begin_session()
        for _ in range(10):
            await trio.sleep(10)
            service.find_session(alive)
        with pytest.raises(Exception, match="it gave no sign of life for 60 s"):
            service.find_session(quiet)
        service.find_session(alive)
        nursery.cancel_scope.cancel()


async def test_weights_without_a_name_make_room_and_say_so(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, max_samplers=2) as server, open_client(server) as client:
        model_id = await begin_model(client)
        ids = []
        for k in range(3):
            _, told = await ask(
                client, "save_weights_for_sampler", model_id=model_id, seq_id=k + 1, sampling_session_seq_id=k, kind="snapshot"
            )
            ids.append(told["sampling_session_id"])
        prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
        told = []
        for sampler_id in (ids[0], ids[2]):
            body = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
            told.append(await retrieve(client, await client.post("/api/v1/asample", json=body)))
        assert "are no longer kept: this server keeps 2 sets of weights" in told[0].json()["error"]
        assert len(read_samples(told[1].content)[0]) == 1
        status, refused = await ask(
            client, "save_weights_for_sampler", model_id=model_id, seq_id=4, sampling_session_seq_id=9, kind="inflight"
        )
        assert (status, refused["param"]) == (400, "kind")


async def test_weights_that_are_overwritten_are_sampled_from_as_they_are_now(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, max_samplers=1) as server, open_client(server) as client:
        model_id = await begin_model(client)
        session_id = model_id.partition(":")[0]
        ids, scores = [], []
        for k in range(2):
            _, saved = await ask(client, "save_weights", model_id=model_id, seq_id=3 * k + 1, path="a", overwrite=True)
            _, told = await ask(
                client, "create_sampling_session", session_id=session_id, sampling_session_seq_id=k, model_path=saved["path"]
            )
            ids.append(told["sampling_session_id"])
            body = {"sampling_session_id": ids[k], "prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 1}}
            answer = await client.post("/api/v1/asample", json=body | {"seq_id": 0, "prompt_logprobs": True})
            scores.append(read_samples((await retrieve(client, answer)).content)[1])
            await run_pass(client, model_id, 3 * k + 2, DATA)
            await ask(client, "optim_step", model_id=model_id, seq_id=3 * k + 3, adam_params=ADAM)
        assert max(abs(a - b) for a, b in zip(scores[0][1:], scores[1][1:], strict=True)) > 0.01
        _, told = await ask(client, "asample", **body | {"sampling_session_id": ids[0], "seq_id": 1})
        assert "was overwritten after this sampling client was made: take a new one" in told["error"]


def test_results_that_were_read_are_kept_by_number_and_by_size(monkeypatch):
    monkeypatch.setattr("rollouts.tinker.wire.results._KEPT_BYTES", 100)
    results = Results()
    for k in range(6):
        pending = results.open(str(k), f"session {k % 2}")
        pending.finish(Outcome(b"x" * 40))
        results.note_read(pending)
    assert [k for k in range(6) if results.find(str(k))] == [4, 5]
    results.forget_session("session 0")
    for k in range(6, 8):
        pending = results.open(str(k), "session 1")
        pending.finish(Outcome(b"x" * 30))
        results.note_read(pending)
    assert [k for k in range(8) if results.find(str(k))] == [5, 6, 7]


async def test_who_may_ask_and_what_is_not_served(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, token="tml-secret", max_body_bytes=1000) as server:
        async with open_client(server) as client:
            assert (await client.get("/api/v1/healthz")).status_code == 401
        async with open_client(server, headers={"X-API-Key": "tml-secret"}) as client:
            assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}
            (model,) = (await client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
            assert model == {"model_name": "policy", "max_context_length": 512, "trainable": True, "sampleable": True}
            assert (await client.post("/api/v1/create_session", content=b"x" * 2000)).status_code == 413
            assert (await client.post("/api/v1/healthz")).status_code == 405
            assert (await client.get("/api/v1/nothing")).status_code == 404
            answer = await client.post("/api/v1/save_weights_external", json={})
            assert (answer.status_code, answer.json()["code"]) == (404, "not_supported")
            assert (await client.post("/api/v1/get_info", json={"model_id": "a:train:0"})).json()["code"] == "session_not_found"
            assert (await client.post("/api/v1/forward_backward", content=b"\xff")).status_code == 415
            kind = {"content-type": "application/x-protobuf"}
            assert (await client.post("/api/v1/forward_backward", content=b"\xff", headers=kind)).status_code == 400
            assert (await client.post(RESULT, json={"request_id": "x"})).status_code == 404
    async with open_tinker_server(create_tiny_model(), directory=tmp_path) as server, open_client(server) as client:
        assert (await client.get("/api/v1/healthz", headers={"origin": "http://page"})).status_code == 403
    with pytest.raises(ConfigError, match=r"TinkerConfig.token is None, expected a token, because host is 0\.0\.0\.0"):
        TinkerConfig(host="0.0.0.0")


async def test_a_result_that_takes_time_is_asked_for_again(tmp_path):
    async with open_tinker_server(create_tiny_model(), directory=tmp_path, poll_s=0.01) as server, open_client(server) as client:
        model_id = await begin_model(client)
        late = await run_pass(client, model_id, 2, DATA)  # waits for the first one
        body = {"request_id": late.json()["request_id"]}
        answer = await client.post(RESULT, json=body)
        assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
        await run_pass(client, model_id, 1, DATA)
        assert (await retrieve(client, late)).status_code == 200


def test_messages_that_are_damaged_are_refused():
    body = write_pass("m", 1, DATA)
    assert read_pass_request(body).data[0].tokens.tolist() == TOKENS[:-1]
    for cut in range(1, len(body)):
        try:
            read_pass_request(body[:cut])
        except DataError:
            continue
    for bad in (b"\x00\x01", b"\x0b", b"\x0a\xff", b"\xff" * 11, struct.pack("<B", 0x0D) + b"1234"):
        with pytest.raises(DataError):
            read_pass_request(bad)
    big = b"\xff" * 9 + b"\x01"
    for packed in (big * 8, big + b"\0", b"\0" + big, bytes([1]) * 65, big * 20, b"\x02"):  # shapes that no array has
        tensor = write_int(3, 1) + write_bytes(4, packed)
        datum = write_bytes(3, write_bytes(2, write_bytes(1, b"weights") + write_bytes(2, tensor)))
        assert "data[0].loss_fn_inputs['weights'] has " in read_pass_request(datum).problem
    unpacked = write_bytes(2, write_bytes(1, b"weights") + write_bytes(2, write_int(3, 1) + write_int(4, 1) * 9))
    assert "has more than 8 dimensions" in read_pass_request(write_bytes(3, unpacked)).problem
    picture = write_bytes(3, write_bytes(1, write_bytes(2, b"...")))
    assert "a picture: this server takes tokens alone" in read_pass_request(write_bytes(1, b"m") + write_int(2, 1) + picture).problem
    written = write_pass_output([np.float32([-1.0]), np.float32([-2.0, -3.0])], {"loss:sum": 6.0})
    assert read_output(written) == {"metrics": {"loss:sum": 6.0}, "logprobs": [[-1.0], [-2.0, -3.0]]}
    assert dict(read_fields(memoryview(write_double(3, -0.5) + write_int(4, 300)))) == {3: -0.5, 4: 300}
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}


def test_a_base_model_in_half_precision_is_refused_untouched():
    base = create_tiny_model().bfloat16()
    with pytest.raises(ConfigError, match="is not in float32"):
        create_trained_model(base, None, LoRAConfig(rank=4), TinkerConfig())
    assert {weight.dtype for weight in base.parameters()} == {torch.bfloat16}
