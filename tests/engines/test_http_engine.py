from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from contract_engines import save_model
from hypothesis import given
from hypothesis import strategies as st

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.http.checks import (
    ServerInfo,
    check_request,
    check_server,
    check_version,
    classify_log_probs,
    gives_untempered_log_probs,
    parse_version,
    temperature_of_log_probs,
)
from rollouts.engines.http.requests import RequestsInFlight, WireRequest, count_tokens_to_keep, params_of_rest
from rollouts.engines.http.samples import Generated, expand_spans, version_of
from rollouts.engines.request_checks import check_tokens
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError, EngineProtocolError
from rollouts.testing import create_tiny_model
from rollouts.testing.servers.http import Fault
from rollouts.testing.servers.sglang.server import FakeSGLangServer
from rollouts.testing.servers.vllm.server import FakeVLLMServer
from rollouts.types import SamplingParams

INFO = ServerInfo(
    kind="vllm", version="1.2", model_path="/models/a", served_name="a", context_length=100, log_prob_kind="sampled",
    weight_version="default", vocab_size=64, has_tokenizer=False,
)  # fmt: skip
check = partial(check_request, "server", "r1", info=INFO)


# -- checks of requests


@pytest.mark.parametrize(
    ("prompt", "changes", "n", "message"),
    [
        ((), {}, 1, "empty prompt"),
        ((3, 64), {}, 1, "token 64, outside the vocabulary of 64"),
        ((3, -1), {}, 1, "token -1, outside the vocabulary"),
        ((3,) * 100, {}, 1, "100 prompt tokens, more than the 99"),
        ((3,), {"max_tokens": 0}, 1, "max_tokens = 0"),
        ((3,), {"temperature": -1.0}, 1, "temperature = -1"),
        ((3,), {"temperature": 9e-7}, 1, "temperature = 9e-07, expected 0 for greedy, or at least 1e-06"),
        ((3,), {"top_p": 0.0}, 1, "top_p = 0"),
        ((3,), {"min_p": 1.5}, 1, "min_p = 1.5"),
        ((3,), {"top_k": -1}, 1, "top_k = -1"),
        ((3,), {"seed": -1}, 1, "seed = -1"),
        ((3,), {"seed": 2**63}, 1, "seed = "),
        ((3,), {"stop_token_ids": (1, 64)}, 1, "stop_token_ids"),
        ((3,), {"stop": ("x",)}, 1, "runs without a tokenizer"),
        ((3,), {"stop": ("x", "")}, 1, "strings that are not empty"),
        ((3,), {}, 0, "asks for 0 samples"),
        ((3,), {"temperature": 0.0}, 2, "greedy decoding, which are all equal"),
        ((3,), {"untempered_log_probs": True, "temperature": 0.5}, 1, "asks for untempered log-probs"),
    ],
)
def test_what_a_server_would_refuse_or_die_of_is_not_sent(prompt, changes, n, message):
    with pytest.raises(EngineError, match=message) as caught:
        check(prompt, SamplingParams(**changes), n)
    assert "server: r1" in str(caught.value)


def test_negative_ids_are_refused_where_the_vocabulary_is_not_known():
    with pytest.raises(EngineError, match="token -1, outside the vocabulary: is it"):
        check_tokens("server", "r1", (3, -1), None)
    check_tokens("server", "r1", (3, 10**9), None)


def test_max_tokens_is_cut_to_what_the_context_leaves():
    assert check((3,) * 99, SamplingParams(max_tokens=50), 1).max_tokens == 1
    assert check((3,) * 60, SamplingParams(max_tokens=50), 1).max_tokens == 40
    assert check((3,) * 50, SamplingParams(max_tokens=50), 1).max_tokens == 50
    assert check((3,) * 60, SamplingParams(max_tokens=50), 1, max_total=98).max_tokens == 38
    with pytest.raises(EngineError, match="95 prompt tokens, more than the 94"):
        check((3,) * 95, SamplingParams(), 1, max_prompt=94)


@pytest.mark.parametrize(
    ("kind", "changes", "expected", "temperature", "untempered"),
    [
        ("sampled", {}, "sampled", 1.0, True),
        ("sampled", {"temperature": 0.5}, "sampled", 0.5, False),
        ("sampled", {"top_p": 0.5}, "sampled", 1.0, False),
        ("sampled", {"temperature": 0.0, "top_p": 0.5}, "sampled", 1.0, True),
        ("tempered", {"temperature": 0.5}, "sampled", 0.5, False),
        ("tempered", {"temperature": 0.5, "min_p": 0.1}, "tempered", 0.5, False),
        ("tempered", {"top_k": 5}, "tempered", 1.0, True),
        ("untempered", {}, "sampled", 1.0, True),
        ("untempered", {"temperature": 0.0, "top_k": 5}, "sampled", 1.0, True),
        ("untempered", {"temperature": 0.5}, "untempered", 1.0, True),
        ("untempered", {"top_k": 5}, "untempered", 1.0, True),
    ],
)
def test_log_probs_are_called_what_they_are(kind, changes, expected, temperature, untempered):
    params = SamplingParams(**changes)
    assert classify_log_probs(kind, params) == expected
    assert temperature_of_log_probs(kind, params) == temperature
    assert gives_untempered_log_probs(kind, params) == untempered


# -- versions


def test_labels_are_versions_of_ours_or_an_error():
    assert version_of("server", "17", 3) == 17
    assert version_of("server", "default", 3) == 3
    for label in ("v2", "-1", "1.5", "", "\u0661"):
        with pytest.raises(EngineProtocolError, match="another program updates this server"):
            version_of("server", label, 3)
    with pytest.raises(EngineProtocolError, match="it was started again"):
        version_of("server", "default", None)


def test_spans_become_one_label_for_each_token():
    assert expand_spans("server", [("1", 0, 2), ("3", 2, 5)], 5) == ("1", "1", "3", "3", "3")
    assert expand_spans("server", [], 0) == ()
    assert expand_spans("server", [("1", 0, 0)], 0) == ()  # of a request that was aborted in the queue
    for spans in (
        [("1", 0, 2)],
        [("1", 0, 2), ("2", 3, 5)],
        [("1", 0, 2), ("2", 3, 6)],
        [("1", 0, 6)],
        [("1", 1, 5)],
        [("1", 0, 3), ("2", 2, 5)],
    ):
        with pytest.raises(EngineProtocolError, match="of 5 tokens"):
            expand_spans("server", spans, 5)


# -- the server itself


def test_another_model_or_vocabulary_is_refused(tmp_path):
    model, link = tmp_path / "model", tmp_path / "link"
    model.mkdir()
    link.symlink_to(model)
    info = replace(INFO, model_path=str(model))
    check_server("server", info, expected_model="a", vocab_size=64)
    check_server("server", info, expected_model=link)
    with pytest.raises(EngineError, match="expected 'b'"):
        check_server("server", info, expected_model="b")
    with pytest.raises(EngineError, match="vocabulary of 64 tokens, expected 65"):
        check_server("server", info, vocab_size=65)


def test_old_servers_are_refused_and_unknown_ones_warned_of():
    assert parse_version("0.32.1rc2+cpu") == (0, 32, 1)
    assert parse_version("dev") == ()
    for old in ("0.31.9", "0.9", "unknown"):
        with pytest.raises(EngineError, match=r"older than 0\.32"):
            check_version("server", old, oldest="0.32", tested=("0.32.0",))
    with pytest.warns(UserWarning, match=r"runs version 0.33.0.*tested with 0.32.0"):
        check_version("server", "0.33.0", oldest="0.32", tested=("0.32.0",))


def test_a_tested_version_passes_silently(recwarn):
    check_version("server", "0.32.0+cpu", oldest="0.32", tested=("0.32.0",))
    assert not recwarn.list


# -- parts


@given(st.integers(0, 50), st.lists(st.text(min_size=1, max_size=6), max_size=3))
def test_what_may_be_the_beginning_of_a_stop_string_is_generated_again(num_tokens: int, stop: list[str]):
    kept = count_tokens_to_keep(num_tokens, stop)
    assert 0 <= kept <= num_tokens
    longest = max((len(text.encode()) for text in stop), default=1)
    assert num_tokens - kept == min(num_tokens, longest - 1)


def test_the_rest_of_a_request_has_its_own_seed_and_budget():
    params = SamplingParams(max_tokens=10, seed=5)
    rests = [params_of_rest(params, sample, done) for sample in (0, 1) for done in (0, 3)]
    assert [rest.max_tokens for rest in rests] == [10, 7, 10, 7]
    assert len({5, *(rest.seed for rest in rests)}) == 5
    assert params_of_rest(params.new(seed=None), 0, 3).seed is None


# -- requests in flight


@dataclass
class ScriptedServer:
    """Answers when the test says so. Tokens are 10, 11, ... after however many the request brought."""

    sent: list[WireRequest] = field(default_factory=list)
    aborts: list[tuple[str, ...]] = field(default_factory=list)
    answers: dict[str, Sequence[Generated]] = field(default_factory=dict)
    arrived: trio.Condition = field(default_factory=trio.Condition)
    on_abort: Callable[[Sequence[str]], Awaitable[None]] | None = None

    async def send(self, request: WireRequest) -> Sequence[Generated]:
        self.sent.append(request)
        async with self.arrived:
            self.arrived.notify_all()
            while request.wire_id not in self.answers:
                await self.arrived.wait()
        return self.answers[request.wire_id]

    async def wait_for_request(self, number: int) -> WireRequest:
        async with self.arrived:
            while len(self.sent) <= number:
                await self.arrived.wait()
        return self.sent[number]

    async def answer(self, request: WireRequest, *results: Generated) -> None:
        async with self.arrived:
            self.answers[request.wire_id] = results
            self.arrived.notify_all()
        await trio.testing.wait_all_tasks_blocked()

    async def abort(self, wire_ids: Sequence[str]) -> None:
        self.aborts.append(tuple(wire_ids))
        if self.on_abort is not None:
            await self.on_abort(wire_ids)


def result(tokens: Sequence[int], label: str = "0", finish_reason="stop") -> Generated:
    return Generated(tuple(tokens), tuple(-token / 10 for token in tokens), (label,) * len(tokens), finish_reason)


class Client:
    """RequestsInFlight against a ScriptedServer, with the results of what was started."""

    def __init__(self, nursery: trio.Nursery, **options) -> None:
        self.server = ScriptedServer()
        self.requests = RequestsInFlight("server", self.server.abort, **options)
        self.nursery = nursery
        self.done: dict[str, tuple] = {}
        self.failed: dict[str, Exception] = {}

    async def start(self, name: str, n: int = 1, params: SamplingParams | None = None) -> None:
        async def run() -> None:
            try:
                self.done[name] = await self.requests.run(
                    name, (3, 4), params or SamplingParams(max_tokens=9), n, self.server.send, "sampled"
                )
            except EngineError as error:
                self.failed[name] = error

        self.nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
async def nursery():
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()


async def test_an_answer_becomes_a_completion(nursery):
    client = Client(nursery, initial_version=4)
    await client.start("a", params=SamplingParams(max_tokens=9, temperature=0.5, top_k=3))
    request = await client.server.wait_for_request(0)
    assert (request.tokens, request.n, request.params.max_tokens) == ((3, 4), 1, 9)
    await client.server.answer(request, Generated((10, 11), (-1.0, -2.0), ("default", "7"), "length"))
    (completion,) = client.done["a"]
    assert (completion.request_id, completion.input_tokens, completion.output_tokens) == ("a", (3, 4), (10, 11))
    assert (completion.output_log_probs, completion.output_versions, completion.finish_reason) == ((-1.0, -2.0), (4, 7), "length")
    assert (completion.temperature, completion.truncated_sampling, completion.log_prob_kind) == (0.5, True, "sampled")
    assert client.requests.num_pending == 0


async def test_what_a_sync_aborts_is_sent_again_and_comes_back_as_one(nursery):
    client = Client(nursery, resends=True)
    await client.start("a", params=SamplingParams(max_tokens=9, seed=5))
    first = await client.server.wait_for_request(0)
    with client.requests.hold():
        await client.server.answer(first, result((10, 11), "0", "abort"))
        assert len(client.server.sent) == 1  # it waits for the end of the sync
    second = await client.server.wait_for_request(1)
    assert second.tokens == (3, 4, 10, 11)
    assert second.params.max_tokens == 7
    assert second.params.seed not in (None, 5)
    assert second.wire_id != first.wire_id
    with client.requests.hold():
        await client.server.answer(second, result((), "1", "abort"))  # aborted again before its first token
    third = await client.server.wait_for_request(2)
    await client.server.answer(third, result((12,), "2"))
    (completion,) = client.done["a"]
    assert (completion.input_tokens, completion.output_tokens) == ((3, 4), (10, 11, 12))
    assert completion.output_versions == (0, 0, 2)
    assert completion.output_log_probs == (-1.0, -1.1, -1.2)
    assert completion.finish_reason == "stop"


async def test_what_ended_by_itself_during_a_sync_is_not_sent_again(nursery):
    client = Client(nursery, resends=True)
    await client.start("a")
    with client.requests.hold():
        await client.server.answer(await client.server.wait_for_request(0), result((10,), "0", "length"))
    assert client.done["a"][0].finish_reason == "length"
    assert len(client.server.sent) == 1


@pytest.mark.parametrize("resends", [False, True])
async def test_an_abort_that_no_sync_explains_is_returned(nursery, resends: bool):
    client = Client(nursery, resends=resends)
    with client.requests.hold():
        pass
    await client.start("a")
    await client.server.answer(await client.server.wait_for_request(0), result((10,), "0", "abort"))
    assert client.done["a"][0].finish_reason == "abort"
    assert len(client.server.sent) == 1


async def test_where_servers_keep_requests_an_abort_during_a_sync_is_returned(nursery):
    client = Client(nursery, resends=False)
    await client.start("a")
    with client.requests.hold():
        await client.server.answer(await client.server.wait_for_request(0), result((10,), "0", "abort"))
    assert client.done["a"][0].finish_reason == "abort"


async def test_the_beginning_of_a_stop_string_is_generated_again(nursery):
    client = Client(nursery, resends=True)
    await client.start("a", params=SamplingParams(max_tokens=9, stop=("abc", "é")))
    with client.requests.hold():
        await client.server.answer(await client.server.wait_for_request(0), result((10, 11, 12), "0", "abort"))
    rest = await client.server.wait_for_request(1)
    assert rest.tokens == (3, 4, 10)
    assert rest.params.max_tokens == 8
    await client.server.answer(rest, result((13,), "1"))
    assert client.done["a"][0].output_tokens == (10, 13)
    assert client.done["a"][0].output_versions == (0, 1)


async def test_of_a_group_only_the_aborted_samples_go_on(nursery):
    client = Client(nursery, resends=True)
    await client.start("group", n=3)
    first = await client.server.wait_for_request(0)
    assert first.n == 3
    with client.requests.hold():
        await client.server.answer(first, result((10,), "0", "abort"), result((20,), "0"), result((), "0", "abort"))
    rest = [await client.server.wait_for_request(i) for i in (1, 2)]
    assert sorted(request.tokens for request in rest) == [(3, 4), (3, 4, 10)]
    assert all(request.n == 1 for request in rest)
    for request in rest:
        await client.server.answer(request, result((30 + len(request.tokens),), "1"))
    assert [c.output_tokens for c in client.done["group"]] == [(10, 33), (20,), (32,)]
    assert [c.output_versions for c in client.done["group"]] == [(0, 1), (0,), (1,)]


async def test_a_user_ends_a_request_that_waits_for_a_sync(nursery):
    client = Client(nursery, resends=True)
    await client.start("a")
    await client.start("other")
    with client.requests.hold():
        for i in (0, 1):
            await client.server.answer(await client.server.wait_for_request(i), result((10, 11), "0", "abort"))
        await client.start("new")
        await client.requests.abort(["a", "new"])
        await trio.testing.wait_all_tasks_blocked()
        assert set(client.done) == {"a", "new"}
    assert client.done["a"][0].output_tokens == (10, 11)
    assert client.done["new"][0].output_tokens == ()
    assert {c[0].finish_reason for c in client.done.values()} == {"abort"}
    assert client.server.aborts == []  # nothing of them was with the server
    await client.server.wait_for_request(2)


async def test_what_a_user_aborts_during_a_sync_keeps_all_of_its_tokens(nursery):
    client = Client(nursery, resends=True)
    await client.start("a", params=SamplingParams(max_tokens=9, stop=("abc",)))
    request = await client.server.wait_for_request(0)

    async def end(wire_ids: Sequence[str]) -> None:
        await client.server.answer(request, result((10, 11, 12), "0", "abort"))

    client.server.on_abort = end
    with client.requests.hold():
        await client.requests.abort(["a"])
    assert client.done["a"][0].output_tokens == (10, 11, 12)


async def test_nothing_is_sent_while_one_of_several_holds_is_there(nursery):
    client = Client(nursery)
    with client.requests.hold():
        with client.requests.hold():
            await client.start("a")
        await trio.testing.wait_all_tasks_blocked()
        assert not client.server.sent
    await client.server.wait_for_request(0)


async def test_aborts_name_what_is_with_the_server_and_nothing_else(nursery, autojump_clock):
    client = Client(nursery)
    for name in ("a", "b", "c"):
        await client.start(name)
    ids = [request.wire_id for request in client.server.sent]

    async def end(wire_ids: Sequence[str]) -> None:
        for request in client.server.sent:
            if request.wire_id in wire_ids:
                await client.server.answer(request, result((10,), "0", "abort"))

    client.server.on_abort = end
    await client.requests.abort(["b", "nobody"])
    assert client.server.aborts == [(ids[1],)]
    assert set(client.done) == {"b"}
    await client.requests.abort([])
    assert len(client.server.aborts) == 1
    await client.requests.abort()
    assert client.server.aborts[1:] == [(ids[0], ids[2])]
    assert set(client.done) == {"a", "b", "c"}
    await client.requests.abort()
    assert len(client.server.aborts) == 2
    assert trio.current_time() < 0.1


async def test_an_abort_that_overtook_its_request_is_repeated(nursery, autojump_clock):
    client = Client(nursery)
    await client.start("a")
    (request,) = client.server.sent

    async def end_the_third(wire_ids: Sequence[str]) -> None:
        if len(client.server.aborts) == 3:
            await client.server.answer(request, result((10,), "0", "abort"))

    client.server.on_abort = end_the_third
    start = trio.current_time()
    await client.requests.abort()
    assert client.server.aborts == [(request.wire_id,)] * 3
    assert client.done["a"][0].output_tokens == (10,)
    assert trio.current_time() - start < 1


async def test_an_aborted_request_whose_answer_never_comes_is_dropped(nursery, autojump_clock):
    client = Client(nursery, abort_grace_s=7.0, resends=True)
    await client.start("a")
    with client.requests.hold():
        await client.server.answer(await client.server.wait_for_request(0), result((10,), "0", "abort"))
    await client.server.wait_for_request(1)
    start = trio.current_time()
    await client.requests.abort()
    assert trio.current_time() - start == pytest.approx(7.0)
    await trio.testing.wait_all_tasks_blocked()
    assert client.done["a"][0].output_tokens == (10,)  # what it had before
    assert client.done["a"][0].finish_reason == "abort"


async def test_an_unusable_engine_fails_what_is_pending_and_what_comes(nursery):
    client = Client(nursery)
    await client.start("sent")
    with client.requests.hold():
        await client.start("waiting")
        client.requests.mark_unusable("its weights are unknown")
        await trio.testing.wait_all_tasks_blocked()
        assert set(client.failed) == {"sent", "waiting"}
    await client.start("new")
    for error in client.failed.values():
        assert "cannot be used: its weights are unknown" in str(error)
    client.requests.mark_usable()
    await client.start("later")
    await client.server.wait_for_request(1)
    assert set(client.failed) == {"sent", "waiting", "new"}


async def test_a_closed_engine_fails_what_is_pending_and_what_comes(nursery):
    client = Client(nursery)
    await client.start("sent")
    client.requests.close()
    await client.start("new")
    assert set(client.failed) == {"sent", "new"}
    assert "closed" in str(client.failed["sent"])
    assert "closed" in str(client.failed["new"])


async def test_other_calls_wait_for_syncs_and_fail_with_the_engine(nursery):
    client = Client(nursery)
    found, failed = [], []

    async def score(wire_id: str) -> str:
        if len(found) == 1:
            await trio.sleep_forever()
        return wire_id

    async def call() -> None:
        try:
            found.append(await client.requests.call(score))
        except EngineError as error:
            failed.append(error)

    with client.requests.hold():
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
    await trio.testing.wait_all_tasks_blocked()
    assert len(found) == 1
    nursery.start_soon(call)
    await trio.testing.wait_all_tasks_blocked()
    await client.requests.abort()  # of generate() calls only
    assert not failed
    client.requests.mark_unusable("gone")
    await trio.testing.wait_all_tasks_blocked()
    assert "gone" in str(failed[0])


async def test_initial_weights_after_newer_ones_mean_that_the_server_was_started_again(nursery):
    client = Client(nursery)
    await client.start("before")
    client.requests.initial_version = None  # a sync was confirmed
    await client.start("after")
    for i in (0, 1):
        await client.server.answer(await client.server.wait_for_request(i), result((10,), "default"))
    assert client.done["before"][0].output_versions == (0,)
    assert "started again" in str(client.failed["after"])


async def test_cancelled_requests_are_forgotten(nursery):
    client = Client(nursery)
    with trio.move_on_after(0):
        await client.requests.run("a", (3,), SamplingParams(), 1, client.server.send, "sampled")
    with client.requests.hold(), trio.move_on_after(0):
        await client.requests.run("a", (3,), SamplingParams(), 1, client.server.send, "sampled")
    assert client.requests.num_pending == 0
    await client.requests.abort()
    assert client.server.aborts == []


async def test_no_wire_id_is_the_beginning_of_another(nursery):
    client, other = Client(nursery), Client(nursery)
    for i in range(12):
        await client.start(f"{i}")
        await other.start(f"{i}")
    ids = [request.wire_id for one in (client, other) for request in one.server.sent]
    assert len(set(ids)) == 24
    assert len({len(wire_id) for wire_id in ids}) == 1


def edit_sample(server: str, change: Callable[[list[int], list[float]], None]) -> Callable[[Any], Any]:
    """Return a function that changes the tokens and log-probs of a server's answer, and keeps the two consistent."""

    def rewrite(answer: Any) -> Any:
        if server == "vllm":
            (choice,) = answer["choices"]
            tokens, log_probs = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
        else:
            tokens, log_probs = answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        change(tokens, log_probs)
        span = {"version": "default", "start": 0, "end": len(tokens)}
        if server == "vllm":
            entry = choice["logprobs"]["content"][0]
            pairs = zip(tokens, log_probs, strict=True)
            choice["logprobs"]["content"] = [{**entry, "token_id": token, "logprob": value} for token, value in pairs]
            choice["weight_versions"] = [span]
        else:
            answer["meta_info"]["output_token_logprobs"] = [[value, token, None] for token, value in zip(tokens, log_probs, strict=True)]
            answer["meta_info"]["weight_versions"] = [span]
        return answer

    return rewrite


def put(field: int, value: Any) -> Callable[[list[Any], list[Any]], None]:
    def change(*columns: list[Any]) -> None:
        columns[field][1] = value

    return change


def repeat_last(tokens: list[int], log_probs: list[float]) -> None:
    tokens += tokens[-1:]
    log_probs += log_probs[-1:]


IMPOSSIBLE = {
    "an id behind the vocabulary": (put(0, 64), r"token id 64, outside the vocabulary of 64"),
    "a negative id": (put(0, -1), "token id -1, outside the vocabulary"),
    "a fraction": (put(0, 7.9), r"token id 7\.9, expected a whole number"),
    "true": (put(0, True), "token id True, expected a whole number"),
    "a log-prob of -Infinity": (put(1, -math.inf), "log-prob -inf, expected a finite number"),
    "NaN": (put(1, math.nan), "log-prob nan, expected a finite number"),
    "a positive log-prob": (put(1, 0.25), r"log-prob 0\.25, expected"),
    "a log-prob that is false": (put(1, False), "log-prob False, expected"),
    "a number beyond floats": (put(1, -(10**400)), "log-prob -1000000"),
    "more tokens than asked for": (repeat_last, "4 tokens, but at most 3 were asked for"),
}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
async def test_answers_that_no_model_can_have_given_are_refused_by_request_and_server(server: str, tmp_path: Path):
    model, tokenizer = create_tiny_model(), create_char_tokenizer()
    save_model(model, tokenizer, tmp_path)
    create_server, create_engine, route = {
        "vllm": (FakeVLLMServer, VLLMEngine, "/inference/v1/generate"),
        "sglang": (FakeSGLangServer, SGLangEngine, "/generate"),
    }[server]
    params = SamplingParams(max_tokens=3, temperature=0.0)
    async with create_server(tmp_path, tokenizer=tokenizer) as fake, create_engine(fake.url) as engine:
        expected = await engine.generate((5, 6), params)
        assert len(expected.output_tokens) == 3
        for change, message in IMPOSSIBLE.values():
            fake.add_fault(Fault("rewrite", route, rewrite=edit_sample(server, change)))
            with pytest.raises(EngineProtocolError, match=message) as raised:
                await engine.generate((5, 6), params, request_id="the-request")
            assert "the-request" in str(raised.value) and engine.name in str(raised.value)
            fake.clear_faults()
        fake.add_fault(Fault("rewrite", route, rewrite=edit_sample(server, lambda tokens, log_probs: None)))
        assert await engine.generate((5, 6), params, request_id=expected.request_id) == expected
