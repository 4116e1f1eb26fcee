"""The real client packages, unchanged, as programs that know nothing of the gateway."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path

import needs
import trio
from chat_templates import CHATML, create_tokenizer, encode
from ledgers import LedgerEngine, check_same, list_sampled

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.gateway import GatewayConfig, create_agent_generate_fn, open_gateway
from rollouts.testing import FakeEngine, random_answer
from rollouts.types import Prompt, SamplingParams

TOKENIZER = create_char_tokenizer()
TOOL_CHATML = "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML
SCHEMA = {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]}


def create_calling_engine(tokenizer):
    """An engine that calls calc for the first question, and then answers 2."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = encode(tokenizer, 'so <tool_call>\n{"name": "calc", "arguments": {"e": "1+1"}}\n</tool_call>')
    return LedgerEngine(lambda prompt, seed: (*(encode(tokenizer, "2") if "tool 2" in tokenizer.decode(prompt) else call), end))


def use_openai_chat(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    tools = [{"type": "function", "function": {"name": "calc", "description": "Compute.", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "1+1"}]
    answer = client.chat.completions.create(model="m", messages=messages, tools=tools, logprobs=True)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"e": "1+1"}
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "tool 2"}]
    stream = client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in stream) == "2"


@needs.OPENAI
async def test_the_openai_client_calls_tools_and_streams():
    tokenizer = create_tokenizer(TOOL_CHATML)
    engine = create_calling_engine(tokenizer)
    async with open_gateway(engine, tokenizer) as gateway:
        await trio.to_thread.run_sync(use_openai_chat, gateway.url("a"))
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == ()
    check_same(sample, engine.ledger)


def use_openai_completions(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    answer = client.completions.create(model="m", prompt="abc", n=2, logprobs=0)
    assert len(answer.choices) == 2
    assert [model.id for model in client.models.list()] == ["policy"]
    try:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], top_logprobs=3, logprobs=True)
    except openai.BadRequestError as error:
        assert error.param == "top_logprobs" and error.code == "unsupported_parameter"
    else:
        raise AssertionError("top_logprobs is not supported")


@needs.OPENAI
async def test_the_openai_client_completes_texts_and_understands_refusals():
    engine = LedgerEngine(random_answer())
    async with open_gateway(engine, TOKENIZER) as gateway:
        await trio.to_thread.run_sync(use_openai_completions, gateway.url("a"))
        (sample,) = gateway.take_samples("a")
    check_same(sample, engine.ledger)


def retry_openai(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="any", max_retries=1, timeout=0.4)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])


@needs.OPENAI
async def test_the_retry_of_a_client_that_lost_its_patience_is_recorded_once():
    slow = iter([1.0, 0.0])
    engine = FakeEngine(random_answer(), seconds_per_token=lambda prompt, seed: next(slow))
    async with open_gateway(engine, TOKENIZER) as gateway:
        await trio.to_thread.run_sync(partial(retry_openai, gateway.url("a")))
        (sample,) = gateway.take_samples("a")
        assert gateway.count()["num_cancelled"] == 1
    assert len(sample.turns) == 1


@needs.OPENAI
async def test_the_example_shows_a_failed_call_once_and_edits_it_out_of_its_history():
    """Three turns and a retry: the history behind it is another one, so it is a context of its own, and all four answers are trained."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_agent.py"))

    def answer(prompt, seed):
        said = TOKENIZER.decode(prompt)
        expression = "2*3+1" if "error" not in said and "6" not in said else "2*3" if "error" in said else "6+1"
        text = f'<tool_call>{{"name": "calc", "arguments": {{"e": "{expression}"}}}}</tool_call>' if "7" not in said else "7"
        return (*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)

    engine = LedgerEngine(answer)
    params, gateway = SamplingParams(max_tokens=80), GatewayConfig(chat=False)
    generate = create_agent_generate_fn(example["play"], [engine], TOKENIZER, params, gateway=gateway)
    (sample,) = await generate(Prompt(content="2*3+1=", metadata={"ground_truth": "7"}), 1)
    check_same(sample, engine.ledger)
    prompts = [TOKENIZER.decode(prompt) for prompt, *_ in list_sampled(engine.ledger)]
    assert ["error" in prompt for prompt in prompts] == [False, True, False, False]
    assert (sample.reward, len(sample.turns), len(sample.context_starts)) == (1.0, 4, 1)


def use_anthropic(url):
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    tools = [{"name": "calc", "description": "Compute.", "input_schema": SCHEMA}]
    messages = [{"role": "user", "content": "1+1"}]
    counted = client.messages.count_tokens(model="m", messages=messages, tools=tools)
    answer = client.messages.create(model="m", max_tokens=200, messages=messages, tools=tools, system="Be brief.")
    text, call = answer.content
    assert (text.text, call.name, call.input, answer.stop_reason) == ("so", "calc", {"e": "1+1"}, "tool_use")
    assert 0 < counted.input_tokens < answer.usage.input_tokens
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "tool 2"}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    with client.messages.stream(model="m", max_tokens=200, messages=messages, tools=tools, system="Be brief.") as stream:
        assert "".join(stream.text_stream) == "2"
        assert stream.get_final_message().stop_reason == "end_turn"
    try:
        client.messages.create(model="m", max_tokens=5, messages=messages, tools=tools, tool_choice={"type": "any"})
    except anthropic.BadRequestError as error:
        assert "tool_choice" in str(error)
    else:
        raise AssertionError("a choice of a tool is not supported")


@needs.ANTHROPIC
async def test_the_anthropic_client_calls_tools_and_streams():
    tokenizer = create_tokenizer(TOOL_CHATML)
    engine = create_calling_engine(tokenizer)
    async with open_gateway(engine, tokenizer) as gateway:
        await trio.to_thread.run_sync(use_anthropic, gateway.url("a", api="anthropic"))
        (sample,) = gateway.take_samples("a")
    assert sample.context_starts == ()
    assert len(sample.turns) == 2
    check_same(sample, engine.ledger)
