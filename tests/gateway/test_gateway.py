"""The gateway over real sockets: what clients get, what is recorded, and that a session's samples are what the engine sampled."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from hashlib import blake2b

import httpx
import pytest
import torch
import trio
from chat_templates import CHATML, QWEN3, create_tokenizer, encode
from ledgers import LedgerEngine, check_same, list_sampled, list_trained

from rollouts.backends import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.engines import InProcessEngine
from rollouts.environments.tools.calls import ToolCall
from rollouts.errors import ConfigError, DataError, EngineContextError, EngineError
from rollouts.gateway import GatewayConfig, open_gateway
from rollouts.gateway.server import DIALECTS
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, create_tiny_model, random_answer, script_answer
from rollouts.types import SamplingParams, Status

TOKENIZER = create_char_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {"e": {"type": "string"}}}}}]
TOOL_CHATML = "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML


def say(text):
    """Character tokens of a text and the end of text."""
    return (*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


async def ask(client, url, messages, **more):
    """POST a chat completion; returns status and JSON."""
    answer = await client.post(f"{url}/chat/completions", json={"model": "m", "messages": messages, **more})
    return answer.status_code, answer.json()


async def chat(client, url, messages, **more):
    status, body = await ask(client, url, messages, **more)
    assert status == 200, body
    return [choice["message"] for choice in body["choices"]]


async def test_history_that_extends_an_answer_goes_on_behind_its_tokens():
    engine = LedgerEngine(random_answer())
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        messages = [user("one")]
        for text in ("two", "three", "four"):
            messages += [*await chat(client, gateway.url("a"), messages), user(text)]
        await chat(client, gateway.url("a"), messages)
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == ()
    assert len(sample.turns) == 4
    assert [sample.messages[k].role for k in sample.action_messages] == ["assistant"] * 4
    assert [message.role for message in sample.messages] == ["user", "assistant"] * 4
    check_same(sample, engine.ledger)


@pytest.mark.parametrize("template", [CHATML, QWEN3])
async def test_text_that_tokenizes_differently_is_never_tokenized_again(template):
    """The answer's tokens are single characters of a text that the tokenizer would merge, and an unusual ending."""
    tokenizer = create_tokenizer(template)
    text = "<think>\nhm\n</think>\n\nyes" if template is QWEN3 else "yes"
    answer = (*encode(tokenizer, text), tokenizer.convert_tokens_to_ids("<|im_end|>"))
    engine = LedgerEngine(script_answer(answer))
    async with open_gateway(engine, tokenizer) as gateway, httpx.AsyncClient() as client:
        (reply,) = await chat(client, gateway.url("a"), [user("hi")])
        assert reply["content"] == text
        await chat(client, gateway.url("a"), [user("hi"), reply, user("more")])
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)
    assert len(sample.context_starts) == (1 if template is QWEN3 else 0)  # Qwen3 drops the thoughts of earlier turns


async def test_other_histories_begin_contexts_and_equal_ones_branch():
    engine = LedgerEngine(random_answer())
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = gateway.url("a")
        (first,) = await chat(client, url, [user("one")])
        whole = [user("one"), first, user("two")]
        await chat(client, url, whole)
        await chat(client, url, whole)  # a retry: a branch
        await chat(client, url, [user("one"), assistant("edited"), user("two")])  # an edited history: anew
        await chat(client, url, [user("short: one, two")])  # compaction: anew
        replies = await chat(client, url, [user("one")], n=3)  # further answers to the first question: anew
        await chat(client, url, [user("one"), replies[1], user("five")])  # goes on behind one of them
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)
    assert len(sample.turns) == 9
    assert len(sample.context_starts) == 6
    contexts = [sample.tokens[a:b] for a, b in zip((0, *sample.context_starts), (*sample.context_starts, len(sample.tokens)), strict=True)]
    assert len(set(contexts)) == len(contexts)


async def test_contexts_can_be_samples_of_their_own():
    engine = LedgerEngine(random_answer())
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        await chat(client, gateway.url("a"), [user("one")], n=2)
        samples = gateway.take_samples("a", rows="contexts")
    assert len(samples) == 2
    assert Counter(turn for sample in samples for turn in list_trained(sample)) == Counter(list_sampled(engine.ledger))


async def test_calls_of_tools_are_found_and_their_results_follow_the_sampled_tokens():
    tokenizer = create_tokenizer(TOOL_CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = encode(tokenizer, 'so <tool_call>\n{"name": "calc",   "arguments": {"e": "1+1"}}\n</tool_call>')
    engine = LedgerEngine(lambda prompt, seed: (*(call if len(engine.ledger) == 0 else encode(tokenizer, "2")), end))
    async with open_gateway(engine, tokenizer) as gateway, httpx.AsyncClient() as client:
        status, body = await ask(client, gateway.url("a"), [user("1+1")], tools=TOOLS)
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        reply = body["choices"][0]["message"]
        assert reply["content"] == "so"
        (found,) = reply["tool_calls"]
        assert json.loads(found["function"]["arguments"]) == {"e": "1+1"}
        found["function"]["arguments"] = '{"e":"1+1"}'  # a program that writes the JSON anew
        result = {"role": "tool", "tool_call_id": found["id"], "content": "2"}
        (answer,) = await chat(client, gateway.url("a"), [user("1+1"), reply, result], tools=TOOLS)
        assert answer["content"] == "2"
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == ()
    check_same(sample, engine.ledger)


async def test_tools_that_a_template_does_not_show_are_refused():
    async with open_gateway(FakeEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        status, body = await ask(client, gateway.url("a"), [user("1+1")], tools=TOOLS)
    assert (status, body["error"]["param"]) == (400, "tools")


async def test_stop_strings_end_the_text_and_stay_in_the_tokens():
    engine = LedgerEngine(script_answer(say("abc#")))
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        (reply,) = await chat(client, gateway.url("a"), [user("x")], stop=["#"])
        assert reply["content"] == "abc"
        await chat(client, gateway.url("a"), [user("x"), reply, user("y")])
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == ()
    check_same(sample, engine.ledger)


async def test_plain_prompts_go_on_behind_what_they_begin_with():
    engine = LedgerEngine(random_answer())
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url('a')}/completions"
        first = (await client.post(url, json={"prompt": "abc", "logprobs": 0, "return_token_ids": True})).json()["choices"][0]
        assert len(first["logprobs"]["tokens"]) == len(first["token_ids"])
        await client.post(url, json={"prompt": "abc" + first["text"] + "def"})
        await client.post(url, json={"prompt": [5, 6, 7]})
        assert (await client.post(url, json={"prompt": ["a", "b"]})).status_code == 400
        (sample,) = gateway.take_samples("a")
    assert len(sample.context_starts) == 1
    check_same(sample, engine.ledger)


async def test_streams_have_the_answer_in_events():
    async with open_gateway(LedgerEngine(script_answer(say("hello"))), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        body = {"messages": [user("x")], "stream": True, "stream_options": {"include_usage": True}}
        text = (await client.post(f"{gateway.url('a')}/chat/completions", json=body)).text
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == "hello"
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_slow_streams_have_comments_and_errors_in_them():
    def error_for(prompt, seed):
        return EngineError("it broke") if prompt[-1] == 5 else None

    engine = FakeEngine(script_answer((5, 1)), seconds_per_token=0.15, error_for=error_for)
    async with open_gateway(engine, TOKENIZER, ping_s=0.05) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url('a')}/completions"
        good = (await client.post(url, json={"prompt": [6], "stream": True})).text
        bad = await client.post(url, json={"prompt": [5], "stream": True})
    assert good.startswith(": waiting") and "[DONE]" in good
    assert bad.status_code == 200
    assert "it broke" in bad.text and "[DONE]" not in bad.text


async def test_log_probs_are_the_trainers_over_all_contexts():
    model = create_tiny_model()
    engine = InProcessEngine(model, TOKENIZER)
    async with open_gateway(engine, TOKENIZER, params=SamplingParams(max_tokens=8)) as gateway, httpx.AsyncClient() as client:
        url = gateway.url("a")
        (first, second) = await chat(client, url, [user("one")], n=2)
        await chat(client, url, [user("one"), first, user("two")])
        await chat(client, url, [user("one"), second, user("two")])
        await chat(client, url, [user("one"), assistant("edited"), user("two")])
        (sample,) = gateway.take_samples("a")
    backend = create_pytorch_backend(model, lr=0.0, tokenizer=TOKENIZER)
    found = await backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).result()
    mask = torch.tensor(sample.loss_mask)
    assert mask.sum() > 5
    torch.testing.assert_close(found[0] * mask, torch.tensor(sample.rollout_log_probs), atol=1e-5, rtol=0)


async def test_new_weights_under_a_request_are_recorded_token_by_token():
    engine = FakeEngine(script_answer((5, 6, 7, 1)), seconds_per_token=0.05)
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client, trio.open_nursery() as nursery:
        nursery.start_soon(chat, client, gateway.url("a"), [user("x")])
        while not engine.pending_requests:
            await trio.sleep(0.01)
        await trio.sleep(0.1)
        await engine.update_weights({}, 1)
        await engine.abort()  # as a weight sync may: the request is sent again with its tokens
        while gateway.sessions["a"].num_in_flight:
            await trio.sleep(0.01)
        (sample,) = gateway.take_samples("a")
    versions = [version for version in sample.weight_versions if version >= 0]
    assert versions == sorted(versions) and {0, 1} == set(versions)


async def test_equal_requests_have_other_seeds_and_a_run_has_the_same_ones():
    seeds = []
    for _ in range(2):
        engine = FakeEngine()
        async with open_gateway(engine, TOKENIZER, seed=3) as gateway, httpx.AsyncClient() as client:
            for key in ("a", "b"):
                await chat(client, gateway.url(key), [user("x")])
                await chat(client, gateway.url(key), [user("x")], n=2)
            await chat(client, gateway.url("a"), [user("x")], seed=7)
        seeds.append([call.arguments["params"].seed for call in engine.calls])
        seeds[-1][1:3] = sorted(seeds[-1][1:3])  # those of n = 2, in any order
        seeds[-1][4:6] = sorted(seeds[-1][4:6])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 7
    assert seeds[0][-1] == 7


async def test_the_seed_of_each_request_is_of_session_whole_prompt_and_number_of_equal_ones():
    asked: list[tuple[tuple[int, ...], int | None]] = []

    class SeedEngine(FakeEngine):
        async def generate(self, prompt_tokens, params, *, request_id=None):
            asked.append((tuple(prompt_tokens), params.seed))
            return await super().generate(prompt_tokens, params, request_id=request_id)

    async with open_gateway(SeedEngine(), create_tokenizer(CHATML), seed=5) as gateway, httpx.AsyncClient() as client:
        session = gateway.open_session("a", seed=7)
        messages = [user("one")]
        for text in ("two", "three"):
            messages += [*await chat(client, gateway.url("a"), messages), user(text)]
        for _ in range(3):  # goes on behind an answer, and twice again
            await chat(client, gateway.url("a"), messages)
        prompt = list(asked[0][0])
        for _ in range(2):  # plain, the second behind the answer to the first
            answer = await client.post(f"{gateway.url('a')}/completions", json={"prompt": prompt, "return_token_ids": True})
            prompt += [*answer.json()["choices"][0]["token_ids"], 5]
    assert len(session.answers) == len(asked) == 7
    seen: Counter[tuple[int, ...]] = Counter()
    for prompt_tokens, seed in asked:
        digest = blake2b(b"".join(token.to_bytes(8, "little") for token in prompt_tokens), digest_size=8).digest()
        assert seed == derive_seed(5, 7, int.from_bytes(digest, "big"), seen[prompt_tokens], 0)
        seen[prompt_tokens] += 1
    assert sorted(seen.values()) == [1, 1, 2, 3]


async def test_fixed_sampling_is_the_gateways_whatever_is_asked_for():
    engine = FakeEngine()
    params = SamplingParams(max_tokens=5, temperature=0.7)
    async with open_gateway(engine, TOKENIZER, params=params, sampling="fixed") as gateway, httpx.AsyncClient() as client:
        await chat(client, gateway.url("a"), [user("x")], temperature=0, top_p=0.1, seed=1, max_tokens=3, stop="#")
        await chat(client, gateway.url("a"), [user("y")], max_tokens=300)
    used = [call.arguments["params"] for call in engine.calls]
    assert [(p.temperature, p.top_p, p.max_tokens, p.stop) for p in used] == [(0.7, 1.0, 3, ("#",)), (0.7, 1.0, 5, ())]
    assert used[0].seed != 1


async def test_a_temperature_that_no_logits_can_be_divided_by_is_greedy():
    engine = FakeEngine()
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        for temperature in (1e-8, 5e-324, 1e-6):
            await chat(client, gateway.url(f"{temperature:g}"), [user("x")], temperature=temperature, top_p=0.5)
        assert gateway.take_samples("1e-08")[0].temperature == 1.0  # that of the log-probs
    used = [(call.arguments["params"].temperature, call.arguments["params"].top_p) for call in engine.calls]
    assert used == [(0.0, 1.0), (0.0, 1.0), (1e-6, 0.5)]


async def test_one_session_has_one_temperature():
    async with open_gateway(FakeEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        await chat(client, gateway.url("a"), [user("x")], temperature=0.5)
        status, body = await ask(client, gateway.url("a"), [user("x")], temperature=0.6)
        assert (status, body["error"]["param"]) == (400, "temperature")
        await chat(client, gateway.url("b"), [user("x")], temperature=0.6)
        assert gateway.take_samples("a")[0].temperature == 0.5


async def test_sessions_are_named_by_path_or_api_key_and_end():
    async with open_gateway(LedgerEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        await chat(client, gateway.url("a"), [user("x")])
        client.headers["authorization"] = "Bearer sk-real-key"
        await chat(client, gateway.url(), [user("x")])
        assert len(gateway.take_samples(gateway.name_session("sk-real-key"))) == 1
        gateway.open_session("b")
        client.headers["authorization"] = "Bearer b"
        await chat(client, gateway.url(), [user("x")])
        await chat(client, gateway.url(), [user("y")])
        assert set(gateway.sessions) == {"a", "b"}
        assert len(gateway.take_samples("b")[0].turns) == 2
        with pytest.raises(ConfigError, match="no session 'b'"):
            gateway.take_samples("b")
        gateway.open_session("b")
        with pytest.raises(ConfigError, match="already"):
            gateway.open_session("b")
        with pytest.raises(ConfigError, match="no key"):
            gateway.url("a/b")
        assert gateway.take_samples("b") == ()


async def test_a_server_of_programs_keeps_nothing_of_requests_without_a_session_and_forgets_idle_ones():
    engine = FakeEngine()
    async with open_gateway(engine, TOKENIZER, records_unnamed=False, idle_s=0.2) as gateway, httpx.AsyncClient() as client:
        for temperature in (0.5, 0.6):
            await chat(client, gateway.url(), [user("x")], temperature=temperature)
        assert not gateway.sessions and gateway.count()["num_requests"] == 2
        first, second = [call.arguments["params"].seed for call in engine.calls]
        assert first != second
        await chat(client, gateway.url("a"), [user("x")])
        assert list(gateway.sessions) == ["a"]
        with trio.fail_after(5):
            while gateway.sessions:
                await trio.sleep(0.02)
        assert gateway.count()["num_requests"] == 3


async def test_a_request_that_fails_chooses_no_temperature():
    def error_for(prompt, seed):
        return EngineContextError("too long") if prompt[-1] == 5 else None

    async with open_gateway(FakeEngine(error_for=error_for), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url('a')}/completions"
        found = [
            (await client.post(url, json={"prompt": [last], "temperature": temperature})).status_code
            for last, temperature in ((5, 0.5), (6, 0.6), (6, 0.5))
        ]
    assert found == [400, 200, 400]


async def test_an_api_key_is_in_no_id_name_or_message(caplog):
    caplog.set_level("DEBUG")
    engine = FakeEngine()
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        client.headers["authorization"] = "Bearer sk-real-key"
        answer = await client.post(f"{gateway.url()}/chat/completions", json={"messages": [user("x")]})
        found = [answer.text, caplog.text, *gateway.sessions, *(str(call.arguments["request_id"]) for call in engine.calls)]
        with pytest.raises(ConfigError) as failure:
            gateway.take_samples("unknown")
    assert len(found) == 4 and not any("sk-real" in text for text in [*found, str(failure.value)])


async def test_the_rest_of_an_aborted_answer_has_random_numbers_of_its_own():
    engine = FakeEngine(script_answer((5, 6, 7, 1)), seconds_per_token=0.05)
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client, trio.open_nursery() as nursery:
        nursery.start_soon(chat, client, gateway.url("a"), [user("x")])
        while not engine.pending_requests:
            await trio.sleep(0.01)
        await trio.sleep(0.12)
        await engine.abort()
    first, second = [call.arguments["params"].seed for call in engine.calls if call.arguments.get("params")]
    assert first != second


async def test_requests_in_flight_end_with_their_session():
    engine = FakeEngine(seconds_per_token=60.0)
    found = []

    async def request(client, url):
        found.append(await ask(client, url, [user("x")]))

    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client, trio.open_nursery() as nursery:
        nursery.start_soon(request, client, gateway.url("a"))
        while not engine.pending_requests:
            await trio.sleep(0.01)
        assert gateway.take_samples("a") == ()
    assert found[0][0] == 410
    assert not engine.pending_requests


async def test_a_token_is_demanded_where_there_is_one():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        GatewayConfig(host="0.0.0.0")
    async with open_gateway(FakeEngine(), TOKENIZER, token="secret") as gateway, httpx.AsyncClient() as client:
        assert (await ask(client, gateway.url("a"), [user("x")]))[0] == 401
        client.headers["authorization"] = "Bearer secrets"
        assert (await ask(client, gateway.url("a"), [user("x")]))[0] == 401
        assert not gateway.sessions
        client.headers["authorization"] = "Bearer secret"
        assert (await ask(client, gateway.url("a"), [user("x")]))[0] == 200
        client.headers["authorization"] = "Bearer secret:b"
        assert (await ask(client, gateway.url(), [user("x")]))[0] == 200
        assert set(gateway.sessions) == {"a", "b"}


async def test_pages_of_browsers_are_refused_without_a_token():
    async with open_gateway(FakeEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url('a')}/chat/completions"
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"host": "127.evil.example"}, {"host": "[a"}, {"host": ""}):
            answer = await client.post(url, json={"messages": [user("x")]}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        for host in ("localhost", f"127.0.0.1:{gateway.port}", "[::1]:80"):
            assert (await client.post(url, json={"messages": [user("x")]}, headers={"host": host})).status_code == 200
    async with open_gateway(FakeEngine(), TOKENIZER, token="secret") as gateway, httpx.AsyncClient() as client:
        client.headers.update({"authorization": "Bearer secret", "origin": "https://mine.example"})
        assert (await ask(client, gateway.url("a"), [user("x")]))[0] == 200


@pytest.mark.parametrize(("token", "length", "status"), [("wrong", 10, b"401"), ("secret", 2000, b"413")])
async def test_a_request_is_refused_before_its_body_is_read(token, length, status):
    async with open_gateway(FakeEngine(), TOKENIZER, token="secret", max_body_bytes=1000) as gateway:
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {token}\r\ncontent-length: {length}\r\nexpect: 100-continue\r\n\r\n"
        async with await trio.open_tcp_stream("127.0.0.1", gateway.port) as stream:
            await stream.send_all(head.encode())
            with trio.fail_after(5):
                answer = await stream.receive_some(4096)
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert b'"type":"error"' in answer  # in Anthropic's form


async def test_a_large_body_that_is_refused_reaches_its_client_as_an_answer():
    async with open_gateway(FakeEngine(), TOKENIZER, max_body_bytes=1000) as gateway, httpx.AsyncClient() as client:
        assert (await client.post(f"{gateway.url('a')}/completions", content=b"x" * 20_000_000)).status_code == 413


async def test_answers_to_head_have_no_body_and_the_connection_goes_on():
    async with open_gateway(FakeEngine(), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        for path, status in (("models", 200), ("chat/completions", 405), ("nothing", 404)):
            answer = await client.head(f"{gateway.url()}/{path}")
            assert (answer.status_code, answer.content) == (status, b"")
        async with await trio.open_tcp_stream("127.0.0.1", gateway.port) as stream:
            for method in (b"HEAD", b"GET"):
                await stream.send_all(method + b" /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                with trio.fail_after(5):
                    answer = await stream.receive_some(4096)
                assert answer.startswith(b"HTTP/1.1 200") and (b"policy" in answer) == (method == b"GET")


async def test_too_many_requests_wait_or_are_refused_and_late_ones_end():
    engine = FakeEngine(seconds_per_token=60.0)
    found = []

    async def request(client, url):
        found.append((await ask(client, url, [user("x")]))[0])

    async with (
        open_gateway(engine, TOKENIZER, max_in_flight=2, max_waiting=3, timeout_s=5.0) as gateway,
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client,
    ):
        async with trio.open_nursery() as nursery:
            for k in range(8):
                nursery.start_soon(request, client, gateway.url(f"s{k}"))
            with trio.fail_after(4):
                while len(engine.pending_requests) < 2 or len(found) < 3:
                    await trio.sleep(0.01)
            assert (len(engine.pending_requests), found) == (2, [429] * 3)
    assert Counter(found) == {429: 3, 504: 5}


async def test_all_answers_to_a_request_count_for_the_places_except_where_nothing_else_is_asked():
    engine = FakeEngine(seconds_per_token=60.0)
    async with open_gateway(engine, TOKENIZER, max_in_flight=2, max_waiting=1) as gateway, httpx.AsyncClient() as client:

        async def request(key, n):
            return await ask(client, gateway.url(key), [user("x")], n=n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(request, "a", 1)
            await wait_for(lambda: len(engine.pending_requests) == 1)
            status, body = await request("b", 3)  # one place with the engine and one that waits
            assert status == 429 and "0 completions are waiting already, and 3 more" in json.dumps(body)
            nursery.start_soon(request, "c", 2)
            await wait_for(lambda: gateway.count()["num_requests"] == 2)
            assert (await request("d", 1))[0] == 429
            nursery.cancel_scope.cancel()
        await wait_for(lambda: not engine.pending_requests)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(request, "e", 9)
            await wait_for(lambda: len(engine.pending_requests) == 2)
            nursery.cancel_scope.cancel()


async def wait_for(is_so):
    with trio.fail_after(60):
        while not is_so():
            await trio.sleep(0.005)


async def test_a_client_that_leaves_cancels_its_request_and_nothing_is_recorded():
    engine = LedgerEngine(random_answer(), seconds_per_token=0.2)
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        with trio.move_on_after(0.1):
            await chat(client, gateway.url("a"), [user("x")])
        with trio.fail_after(5):
            while engine.pending_requests:
                await trio.sleep(0.01)
        assert gateway.count()["num_cancelled"] == 1
        assert gateway.take_samples("a") == ()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineContextError("too long"), 400, "context_length_exceeded"),
        (EngineError("dead"), 502, "engine_error"),
    ],
)
async def test_errors_of_engines_are_answers(error, status, code):
    async with open_gateway(FakeEngine(error_for=lambda prompt, seed: error), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        found, body = await ask(client, gateway.url("a"), [user("x")])
    assert (found, body["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": [user("x")]}, "messages"),
        ("completions", {"prompt": "x"}, "prompt"),
        ("responses", {"input": "x"}, "input"),
    ],
)
async def test_a_prompt_that_cannot_be_used_is_refused_with_its_field(path, body, field):
    too_long = FakeEngine(error_for=lambda prompt, seed: EngineContextError("too long"))
    empty = json.loads(json.dumps(body).replace('"x"', '""'))  # without a template it has no tokens
    async with open_gateway(too_long, TOKENIZER, separator="") as gateway, httpx.AsyncClient() as client:
        for wrong in (body, empty):
            answer = await client.post(f"{gateway.url('a')}/{path}", json=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_several_answers_that_an_engine_refuses_at_once_are_one_refusal():
    engine = InProcessEngine(create_tiny_model(), TOKENIZER)
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        for more in ({}, {"stream": True}):
            body = {"prompt": [99999999], "n": 2, **more}
            answer = await client.post(f"{gateway.url('a')}/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await client.post(f"{gateway.url('a')}/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_users_parser_fails_its_request_alone_and_nothing_of_it_is_recorded(stream, caplog):
    def parse_calls(text):
        raise KeyError("no such tool")

    async with open_gateway(FakeEngine(), TOKENIZER, parse_calls=parse_calls, chat=False) as gateway, httpx.AsyncClient() as client:
        url = gateway.url("a")
        body = {"messages": [user("x")], "tools": TOOLS, "n": 2, "stream": stream}
        answer = await client.post(f"{url}/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert "KeyError" in answer.json()["error"]["message"] and "no such tool" in caplog.text
        await chat(client, url, [user("x")])
        assert isinstance(gateway.sessions["a"].fault, KeyError)
        assert len(gateway.take_samples("a")[0].turns) == 1


async def test_texts_without_bytes_are_not_tokenized_and_reach_the_client_escaped():
    tokenizer = create_tokenizer(
        TOOL_CHATML.replace("message['content']", "(message['content'] or '') + message.get('tool_calls', '') | string")
    )

    def parse_calls(text):
        return [ToolCall(name="calc", arguments={"e": "\ud800"})]

    async with open_gateway(FakeEngine(), tokenizer, parse_calls=parse_calls) as gateway, httpx.AsyncClient() as client:
        bad = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": '{"e": "\\ud800"}'}}
        messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [bad]}, user("y")]
        (reply,) = await chat(client, gateway.url("a"), messages, tools=TOOLS)
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"e": "\ud800"}
        anthropic = {"messages": [user("x")], "max_tokens": 99, "tools": [{"name": "calc", "input_schema": {"type": "object"}}]}
        for more in ({}, {"stream": True}):
            answer = await client.post(f"{gateway.url('a', api='anthropic')}/v1/messages", json=anthropic | more)
            assert answer.status_code == 200 and "ud800" in answer.text


async def test_limits_of_a_session_are_kept():
    async with open_gateway(FakeEngine(script_answer((5, 6, 1))), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        gateway.open_session("a", max_answers=2)
        gateway.open_session("b", max_tokens=4)
        found = [(await ask(client, gateway.url(key), [user("x")]))[0] for key in "aaabbb"]
        assert found == [200, 200, 403] * 2
        assert gateway.take_samples("a")[0].status is Status.TRUNCATED


async def test_answers_in_flight_count_for_the_limit_of_a_session():
    engine = FakeEngine(seconds_per_token=60.0)
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client, trio.open_nursery() as nursery:
        gateway.open_session("a", max_answers=4)
        nursery.start_soon(partial(ask, client, gateway.url("a"), [user("x")], n=3))
        while len(engine.pending_requests) < 3:
            await trio.sleep(0.01)
        assert (await ask(client, gateway.url("a"), [user("x")], n=2))[0] == 403
        nursery.cancel_scope.cancel()


async def test_a_stream_that_is_cancelled_before_its_answer_is_sent_is_not_recorded(monkeypatch):
    engine = FakeEngine()
    async with open_gateway(engine, TOKENIZER) as gateway:
        answerer = gateway._answerer
        record = answerer._record

        def record_and_leave(session, *args):
            reply = record(session, *args)
            nursery.cancel_scope.cancel()  # the client leaves just now
            return reply

        monkeypatch.setattr(answerer, "_record", record_and_leave)
        session = gateway.open_session("a")
        request = DIALECTS["/v1/chat/completions"].read({"messages": [user("x")], "stream": True})
        prepared = answerer.prepare(session, request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway._stream, DIALECTS["/v1/chat/completions"], session, prepared, None)
        assert session.counts["num_undelivered"] == 1 and not session.answers


async def test_a_template_that_cannot_be_used_is_an_error_at_the_start():
    with pytest.raises(DataError, match="generation prompt"):
        async with open_gateway(FakeEngine(), create_tokenizer("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}")):
            pass


async def leave(client, gateway, key, messages, chance):
    """Ask, and hang up at some time after the request has arrived."""

    def count():
        return gateway.sessions[key].counts["num_requests"] if key in gateway.sessions else 0

    async def ask_and_wait():
        async with client.stream("POST", f"{gateway.url(key)}/chat/completions", json={"messages": messages}, timeout=60):
            pass

    before = count()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_and_wait)
        await wait_for(lambda: count() > before)
        await trio.sleep(chance.choice((0, 0.005, 0.02)))
        nursery.cancel_scope.cancel()


async def play(client, gateway, key, chance, got):
    """A program that retries, edits its history, branches and hangs up at random. got: texts that it received."""
    url = gateway.url(key)
    messages = [user(f"q{chance.randrange(10)}")]
    for _ in range(chance.randint(1, 4)):
        if chance.random() < 0.25:  # leaves early, and asks again
            await leave(client, gateway, key, messages, chance)
        replies = await chat(client, url, messages, n=2 if chance.random() < 0.1 else 1)
        got += [reply["content"] for reply in replies]
        if chance.random() < 0.15:
            messages = [user("edited"), *messages[1:]]
        messages = [*messages, chance.choice(replies), user(f"u{chance.randrange(10)}")]
        if chance.random() < 0.2:
            async with trio.open_nursery() as nursery:  # sub-agents
                for k in range(2):
                    nursery.start_soon(branch, client, url, [*messages[:-1], user(f"sub{k}")], got)


async def branch(client, url, messages, got):
    got += [reply["content"] for reply in await chat(client, url, messages)]


async def play_sessions(num):
    """Many sessions at once: what their programs received is trained on, once, as it was sampled for them."""
    engine, got = LedgerEngine(random_answer(), mean_s=0.01), {f"s{k}": [] for k in range(num)}
    places = [trio.Lock() for _ in range(16)]  # a client serves one program at a time: its own pool is slow with many

    async def program(k, key):
        async with places[k % 16]:
            client = clients[k % 16]
            await play(client, gateway, key, random.Random(key), got[key])

    clients = [httpx.AsyncClient(timeout=60, verify=False) for _ in places]
    async with open_gateway(engine, TOKENIZER) as gateway:
        async with trio.open_nursery() as nursery:
            for k, key in enumerate(got):
                nursery.start_soon(program, k, key)
        assert set(gateway.sessions) == set(got)
        for client in clients:
            await client.aclose()
        counts = gateway.count()
        for key, texts in got.items():
            prefix = gateway.sessions[key].request_prefix
            (sample,) = gateway.take_samples(key)
            trained = Counter(list_trained(sample))
            sampled = Counter(list_sampled(engine.ledger, f"{prefix}-"))
            assert max(trained.values()) == 1, "an answer is trained on twice"
            assert trained <= sampled, "something is trained on that the engine has not sampled for this session"
            received = Counter(texts)
            assert received <= Counter(sample.messages[k].content for k in sample.action_messages), "an answer is lost"
    assert counts["num_cancelled"] > num / 20, "too few clients left early for a test of it"
    assert not engine.pending_requests


async def test_sessions_with_retries_branches_and_disconnects_are_complete_and_apart():
    await play_sessions(120)


@pytest.mark.long
async def test_a_thousand_sessions_with_retries_branches_and_disconnects_are_complete_and_apart():
    await play_sessions(1000)


async def test_an_answer_that_was_lost_hides_no_equal_one():
    async with open_gateway(FakeEngine(script_answer((5, 6, 1))), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url = gateway.url("a")
        (reply,) = await chat(client, url, [user("one")])
        await chat(client, url, [user("one")])
        gateway.sessions["a"].forget({1})  # as if its client had left
        await chat(client, url, [user("one"), reply, user("two")])
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == () and len(sample.turns) == 2
