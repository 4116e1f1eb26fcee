"""OpenAI's responses: the real package reads every field of what the gateway writes, and what is kept of a session can be named."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import needs
import pytest
import trio
from chat_templates import CHATML, create_tokenizer, encode
from ledgers import LedgerEngine, check_same

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.gateway import answering, open_gateway
from rollouts.gateway.dialects.openai_responses import OPENAI_RESPONSES, read_response
from rollouts.gateway.refusals import Refusal
from rollouts.testing import FakeEngine, random_answer, script_answer
from rollouts.types import SamplingParams

TOKENIZER = create_char_tokenizer()
TOOL_CHATML = "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML
SCHEMA = {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": "calc", "description": "Compute.", "parameters": SCHEMA, "strict": True}]


def create_calling_engine(tokenizer):
    """An engine that calls calc twice for the first question, and then answers 2."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    one = '<tool_call>\n{"name": "calc", "arguments": {"e": "1+1"}}\n</tool_call>'
    calls = encode(tokenizer, f"so {one}\n{one}")
    return LedgerEngine(lambda prompt, seed: (*(encode(tokenizer, "2") if "tool 2" in tokenizer.decode(prompt) else calls), end))


def list_extras(value, place=""):
    """Fields that a type of the package does not have, and fields of types that were not there."""
    import pydantic

    found = []
    if isinstance(value, pydantic.BaseModel):
        found += [f"{place}.{name} is no field" for name in value.model_extra or ()]
        found += [f"{place}.{name} is missing" for name, field in type(value).model_fields.items() if not hasattr(value, name)]
        for name in type(value).model_fields:
            found += list_extras(getattr(value, name, None), f"{place}.{name}")
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            found += list_extras(item, f"{place}[{k}]")
    return found


# fields that the API's own answers have where they apply: other ones than these must be there
NOT_WRITTEN = {"conversation", "moderation", "prompt", "prompt_cache_options", "prompt_cache_retention"}


def check_fields(body):
    """Every field of a response has the type of the package, there is no other one, and none is missing."""
    from openai.types.responses import Response

    response = Response.model_validate(body, strict=True)  # the package's own constructor checks nothing
    assert list_extras(response) == []
    assert set(Response.model_fields) - set(body) <= NOT_WRITTEN
    return response


def check_event(event):
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    assert list_extras(TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)) == []


def use_openai(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    items = [{"role": "user", "content": "1+1"}]
    first = client.responses.create(model="m", input=items, tools=TOOLS, instructions="Be brief.", include=["message.output_text.logprobs"])
    text, call, other = first.output
    assert (text.content[0].text, call.name, first.status, first.output_text) == ("so", "calc", "completed", "so")
    assert json.loads(call.arguments) == {"e": "1+1"} and call.call_id != other.call_id
    assert len(text.content[0].logprobs) == first.usage.output_tokens
    results = [{"type": "function_call_output", "call_id": one.call_id, "output": "tool 2"} for one in (call, other)]
    # the whole history again, as a harness does that keeps its items
    second = client.responses.create(model="m", input=[*items, *first.output, *results], tools=TOOLS, instructions="Be brief.", store=False)
    assert second.output_text == "2"
    # the response before by its id; the instructions must be given again
    named = client.responses.create(
        model="m", input=results, previous_response_id=first.id, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}
    )
    assert (named.output_text, named.previous_response_id, named.metadata) == ("2", first.id, {"a": "b"})
    assert client.responses.retrieve(first.id).output_text == "so"
    with client.responses.stream(
        model="m", input="and now?", previous_response_id=named.id, tools=TOOLS, instructions="Be brief."
    ) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "2"
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and "response.output_text.delta" in kinds
    with pytest.raises(openai.BadRequestError, match="keeps no response"):
        client.responses.create(model="m", input="x", previous_response_id=second.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="keeps no response"):
        client.responses.retrieve(first.id)


@needs.OPENAI
async def test_the_openai_client_goes_on_behind_items_and_behind_named_responses():
    tokenizer = create_tokenizer(TOOL_CHATML)
    engine = create_calling_engine(tokenizer)
    async with open_gateway(engine, tokenizer) as gateway:
        await trio.to_thread.run_sync(use_openai, gateway.url("a"))
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)
    assert len(sample.turns) == 4
    assert len(sample.context_starts) == 1  # the named response is a branch beside the history that was sent


def parse_openai(url):
    import openai
    from pydantic import BaseModel

    class Calc(BaseModel):
        e: str

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    tool = openai.pydantic_function_tool(Calc, name="calc")
    tools = [{"type": "function", **tool["function"]}]
    parsed = client.responses.parse(model="m", input="1+1", tools=[tool])
    assert [item.parsed_arguments for item in parsed.output if item.type == "function_call"] == [Calc(e="1+1")] * 2
    again = client.responses.create(
        model="m",
        input=[
            {"role": "user", "content": "1+1"},
            *parsed.output,
            *({"type": "function_call_output", "call_id": item.call_id, "output": "tool 2"} for item in parsed.output[1:]),
        ],
        tools=tools,
    )
    assert again.output_text == "2"
    with pytest.raises(openai.BadRequestError, match=r"text\.format"):
        client.responses.parse(model="m", input="1+1", text_format=Calc)


@needs.OPENAI
async def test_the_openai_client_parses_calls_and_sends_what_it_parsed():
    tokenizer = create_tokenizer(TOOL_CHATML)
    engine = create_calling_engine(tokenizer)
    async with open_gateway(engine, tokenizer) as gateway:
        await trio.to_thread.run_sync(parse_openai, gateway.url("a"))
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)
    assert sample.context_starts == ()


@needs.OPENAI
@pytest.mark.parametrize("max_tokens", [100, 3])
async def test_responses_and_events_have_the_fields_of_the_package_and_no_others(max_tokens):
    tokenizer = create_tokenizer(TOOL_CHATML)
    asks = {
        "model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "1+1"}]}], "tools": TOOLS,
        "include": ["message.output_text.logprobs"], "max_output_tokens": max_tokens, "temperature": 1.0, "top_p": 1.0, "user": "u",
        "metadata": {"a": "b"}, "instructions": "Be brief.", "reasoning": {"effort": "low"}, "parallel_tool_calls": True,
    }  # fmt: skip
    async with open_gateway(create_calling_engine(tokenizer), tokenizer) as gateway, httpx.AsyncClient(verify=False) as client:
        body = (await client.post(f"{gateway.url('a')}/responses", json=asks)).json()
        response = check_fields(body)
        assert response.status == ("completed" if max_tokens == 100 else "incomplete")
        assert (await client.get(f"{gateway.url('a')}/responses/{body['id']}")).json() == body
        streamed = await client.post(f"{gateway.url('a')}/responses", json={**asks, "stream": True})
    blocks = [block.split("\ndata: ") for block in streamed.text.strip().split("\n\n")]
    events = [json.loads(data) for _, data in blocks]
    assert [f"event: {event['type']}" for event in events] == [head for head, _ in blocks]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check_event(event)
    check_fields(events[-1]["response"])
    assert events[-1]["type"] == f"response.{response.status}"
    assert [item["type"] for item in events[-1]["response"]["output"]] == [item["type"] for item in body["output"]]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]}]}, "input[0].content[0].refusal"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"reasoning": "hmm"}, "reasoning"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": {"zzz": 3}}, "reasoning.zzz"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"service_tier": 7}, "service_tier"),
        ({"max_tool_calls": "1"}, "max_tool_calls"),
        ({"prompt_cache_key": []}, "prompt_cache_key"),
        ({"user": 1}, "user"),
        ({"stream_options": 1}, "stream_options"),
        ({"text": {"zzz": 1}}, "text.zzz"),
        ({"text": {"verbosity": 1}}, "text.verbosity"),
        ({"text": {"format": {"type": "text", "zzz": 1}}}, "text.format.zzz"),
        ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"seed": 3}, "seed"),
    ],
)
def test_what_a_policy_cannot_do_is_refused_by_its_name(changes, param):
    with pytest.raises(Refusal) as caught:
        read_response({"model": "m", "input": "x", **changes})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_calls_of_the_assistant_join_the_message_before_them():
    def call(k):
        return {"type": "function_call", "call_id": f"c{k}", "name": "f", "arguments": "{}"}

    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]}
    outputs = [{"type": "function_call_output", "call_id": f"c{k}", "output": f"r{k}"} for k in range(2)]
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}, said, call(0), call(1), *outputs, call(2), outputs[0]]
    messages = read_response({"input": items}).messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [one["id"] for one in messages[2].tool_calls] == ["c0", "c1"] and messages[2].content == "so"


def test_a_last_item_of_the_assistant_is_shown_and_a_refusal_is_its_text():
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}
    with pytest.raises(Refusal, match=r'^input\[1\] is {"role": "assistant", "content": '):
        read_response({"input": [{"role": "user", "content": "x"}, said]})
    assert read_response({"input": [said, {"role": "user", "content": "x"}]}).messages[0].content == "ab"


async def test_empty_instructions_are_none_and_times_are_of_the_beginning_and_the_end(monkeypatch):
    times = iter((5.5, 8.5, 10.5, 11.5))
    monkeypatch.setattr(answering, "time", SimpleNamespace(time=lambda: next(times)))
    engine = FakeEngine(script_answer((5, TOKENIZER.eos_token_id)))
    async with open_gateway(engine, TOKENIZER) as gateway, httpx.AsyncClient() as client:
        for more in ({"instructions": ""}, {}):
            body = (await client.post(f"{gateway.url('a')}/responses", json={"input": "x", **more})).json()
    first, second = [call.arguments["prompt_tokens"] for call in engine.calls]
    assert first == second
    assert (body["created_at"], body["completed_at"]) == (10.0, 11.0)


async def test_the_output_of_a_call_that_nobody_made_is_refused():
    tokenizer = create_tokenizer(TOOL_CHATML)
    async with open_gateway(create_calling_engine(tokenizer), tokenizer) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.url('a')}/responses"

        async def post(call_id, **more):
            output = {"type": "function_call_output", "call_id": call_id, "output": "tool 2"}
            answer = await client.post(url, json={"input": [{"role": "user", "content": "x"}, output], "tools": TOOLS, **more})
            return answer.status_code, answer.json()

        first = (await client.post(url, json={"input": "1+1", "tools": TOOLS})).json()
        call_id = first["output"][-1]["call_id"]
        for more in ({}, {"previous_response_id": first["id"]}):
            assert (await post(call_id, **more))[0] == 200
            status, body = await post("call_other", **more)
            assert (status, body["error"]["param"]) == (400, "input[1].call_id") and "call_other" in body["error"]["message"]


async def test_kept_responses_have_what_is_new_alone_and_end_with_their_answers():
    async with open_gateway(FakeEngine(random_answer()), TOKENIZER) as gateway, httpx.AsyncClient() as client:
        url, items = f"{gateway.url('a')}/responses", [{"role": "user", "content": "x"}]
        for k in range(4):  # with the whole history in each request, instructions that change, and an item of the assistant
            body = (await client.post(url, json={"input": items, "instructions": f"i{k % 2}"})).json()
            items += [*body["output"], {"role": "user", "content": f"y{k}"}]
        for k in range(2):
            asked = {"input": f"z{k}", "previous_response_id": body["id"]}
            body = (await client.post(url, json=asked)).json()
        session = gateway.sessions["a"]
        stored = session.stored[body["id"]]
        texts = [message.content for message in stored.collect_history()]
        assert texts[0::2] == ["x", "y0", "y1", "y2", "z0", "z1"] and stored.collect_history()[-1].role == "assistant"
        assert [len(one.answer.asked) for one in session.stored.values()] == [2, 4, 4, 4, 9, 2]
        session.forget([stored.answer.number])
        assert body["id"] not in session.stored and len(session.stored) == 5
        answer = await client.post(url, json={"input": "z", "previous_response_id": body["id"]})
        assert answer.status_code == 400


async def test_a_response_belongs_to_its_session_and_requests_without_one_keep_none():
    async with open_gateway(FakeEngine(random_answer()), TOKENIZER, records_unnamed=False) as gateway, httpx.AsyncClient() as client:
        first = (await client.post(f"{gateway.url('a')}/responses", json={"input": "x"})).json()
        for url in (gateway.url("b"), gateway.url()):
            answer = await client.post(f"{url}/responses", json={"input": "y", "previous_response_id": first["id"]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert (await client.post(f"{gateway.url('a')}/responses/{first['id']}", json={})).status_code == 404
        answer = await client.get(f"{gateway.url('b')}/responses/{first['id']}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, None)  # no field of the client's is at fault


@needs.OPENAI
async def test_a_kept_response_is_not_streamed_and_says_so():
    import openai

    def ask(url):
        client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
        first = client.responses.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError, match="has no events any more"):
            list(client.responses.retrieve(first.id, stream=True))
        assert client.responses.retrieve(first.id, include=["message.output_text.logprobs"]) == first

    async with open_gateway(FakeEngine(random_answer()), TOKENIZER) as gateway:
        await trio.to_thread.run_sync(ask, gateway.url("a"))


async def test_a_stream_that_fails_ends_with_the_error_event_of_the_api():
    from rollouts.errors import EngineError

    class Failing(FakeEngine):
        async def generate(self, prompt_tokens, params, *, request_id=None):
            await trio.sleep(0.05)
            raise EngineError("it is broken")

    async with open_gateway(Failing(), TOKENIZER, ping_s=0.01) as gateway, httpx.AsyncClient() as client:
        answer = await client.post(f"{gateway.url('a')}/responses", json={"input": "x", "stream": True})
    (event,) = [block for block in answer.text.split("\n\n") if block.startswith("event: error")]
    assert json.loads(event.partition("data: ")[2])["code"] == "engine_error"


async def test_chat_and_responses_of_one_session_go_on_behind_one_another():
    engine = LedgerEngine(script_answer(TOKENIZER("ab")["input_ids"]), mean_s=0)
    params = SamplingParams(max_tokens=2)
    async with open_gateway(engine, TOKENIZER, params=params) as gateway, httpx.AsyncClient() as client:
        first = (await client.post(f"{gateway.url('a')}/responses", json={"input": "x"})).json()
        text = first["output"][0]["content"][0]["text"]
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}, {"role": "user", "content": "y"}]
        assert (await client.post(f"{gateway.url('a')}/chat/completions", json={"messages": messages})).status_code == 200
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)
    assert len(sample.turns) == 2 and sample.context_starts == ()


def test_the_dialect_is_named_for_its_refusals():
    assert OPENAI_RESPONSES.write_refusal(Refusal(400, "m", param="p", code="c"))["error"]["param"] == "p"
