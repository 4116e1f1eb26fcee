"""Tool calls in text: every form, and what is malformed says why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts import ToolCall, ToolCallError, create_compact_parser, create_tool, parse_hermes_calls, parse_json_calls
from rollouts.environments.tools.calls import strip_thinking


def hermes(*calls: Any) -> str:
    return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


CALC = {"name": "calc", "arguments": {"e": "12*7"}}


def test_hermes_calls_in_the_order_of_the_text():
    text = f"Let me see. {hermes(CALC, {'name': 'clock'})} and wait"
    assert parse_hermes_calls(text) == (ToolCall(name="calc", arguments={"e": "12*7"}), ToolCall(name="clock"))
    assert parse_hermes_calls("The answer is 84.") == ()
    assert parse_hermes_calls("") == ()


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ('{"name": "calc", "arguments": {"e": "1"}', "no JSON: Expecting ',' delimiter at character 40"),
        ("calc(12)", "no JSON: Expecting value at character 0"),
        ("[1]", "not an object with name and arguments"),
        ('"calc"', "not an object with name and arguments"),
        ("{}", "no name of a tool in it"),
        ('{"name": 3}', "no name of a tool in it"),
        ('{"name": "calc", "arguments": [1]}', "arguments are no object"),
        ('{"name": "calc", "arguments": "{"}', "arguments are no JSON"),
        ('{"name": "calc", "arguments": {"e": NaN}}', "no JSON: NaN is no JSON number"),
        ('{"name": "calc", "arguments": {"e": -1e999}}', "no JSON: -1e999 is no JSON number"),
        ('{"name": "calc", "arguments": {"e": "\\ud83d"}}', "no JSON: half of a surrogate pair in it"),
        ('{"name": "calc", "name": "clock"}', "no JSON: 'name' stands twice in one object"),
        ("[" * 100000, "no JSON: lists or objects are nested too deeply"),
        ('{"name": "calc", "arguments": {"e": ' + "9" * 5000 + "}}", "no JSON: "),
        ("", "no JSON: Expecting value"),
    ],
)
def test_a_malformed_call_says_why(inside: str, message: str):
    (found,) = parse_hermes_calls(f"<tool_call>{inside}</tool_call>")
    assert isinstance(found, ToolCallError)
    assert found.message.startswith(message)
    assert found.text == inside


def test_a_call_that_is_not_ended_is_malformed_and_the_others_stand():
    calls = parse_hermes_calls(hermes(CALC) + '<tool_call>{"name": "cl')
    assert calls[0] == ToolCall(name="calc", arguments={"e": "12*7"})
    assert calls[1] == ToolCallError(message="<tool_call> without </tool_call>", text='{"name": "cl')


def test_arguments_may_be_a_text_and_calls_may_have_ids():
    openai = {"id": "a1", "type": "function", "function": {"name": "calc", "arguments": '{"e": "1"}'}}
    call = ToolCall(name="calc", arguments={"e": "1"}, id="a1")
    assert parse_hermes_calls(hermes(openai)) == (call,)
    assert call.to_dict() == openai
    assert parse_hermes_calls(hermes({"name": "clock", "arguments": None})) == (ToolCall(name="clock"),)
    assert parse_hermes_calls(hermes({"name": "clock", "parameters": {"zone": 1}})) == (ToolCall(name="clock", arguments={"zone": 1}),)


def test_what_is_thought_is_no_call():
    assert parse_hermes_calls(f"<think>I could {hermes(CALC)}</think>84") == ()
    assert parse_hermes_calls(f"I could {hermes(CALC)}</think>84") == ()
    assert parse_hermes_calls(f"<think>I could {hermes(CALC)}") == ()
    assert parse_hermes_calls(f"<think>hm</think>{hermes(CALC)}") == (ToolCall(name="calc", arguments={"e": "12*7"}),)
    assert strip_thinking("<think>a</think>b<think>c</think>d") == "bd"
    assert strip_thinking("b") == "b"


def test_json_calls():
    call = ToolCall(name="calc", arguments={"e": "12*7"})
    text = json.dumps(CALC)
    assert parse_json_calls(text) == parse_json_calls(f" ```json\n{text}\n``` ") == parse_json_calls(f"<think>x</think>{text}") == (call,)
    assert parse_json_calls(json.dumps([CALC, CALC])) == parse_json_calls(json.dumps({"tool_calls": [CALC, CALC]})) == (call, call)
    for answer in ("84", "The answer is {84}.", "[1, 2]", "{}", '{"result": 84}', "[]", "{84", ""):
        assert parse_json_calls(answer) == ()
    (found,) = parse_json_calls(text[:-1])
    assert isinstance(found, ToolCallError)
    assert found.message.startswith("no JSON")


def add(a: int, b: int = 0) -> int:
    return a + b


def calc(e: str) -> str:
    return e


def clock() -> str:
    return "now"


COMPACT = create_compact_parser([create_tool(add), create_tool(calc), create_tool(clock)])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("calc(12*7)", [("calc", {"e": "12*7"})]),
        ("calc((1+2)*3)", [("calc", {"e": "(1+2)*3"})]),
        ("calc(1,2)", [("calc", {"e": "1,2"})]),
        ("calc('a, b')", [("calc", {"e": "a, b"})]),
        ("calc(it's)", [("calc", {"e": "it's"})]),
        ("calc('a', 'b')", [("calc", {"e": "'a', 'b'"})]),
        ("add(1, 2) and add(3)", [("add", {"a": "1", "b": "2"}), ("add", {"a": "3"})]),
        ("add([1,2],'a,b')", [("add", {"a": "[1,2]", "b": "a,b"})]),
        ("clock()", [("clock", {})]),
        ("recalc(1)", []),
        ("sub(1)", []),
        ("calc 12", []),
        ("84", []),
    ],
)
def test_compact_calls(text: str, calls: list[tuple[str, dict[str, str]]]):
    assert COMPACT(text) == tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)


def test_malformed_compact_calls():
    assert COMPACT("calc(1) calc(2") == (
        ToolCall(name="calc", arguments={"e": "1"}),
        ToolCallError(message="calc( without )", text="calc(2"),
    )
    assert COMPACT("add(1,2,3)") == (ToolCallError(message="add has 2 arguments, found 3", text="add(1,2,3)"),)
    assert COMPACT("clock(1)") == (ToolCallError(message="clock has 0 arguments, found 1", text="clock(1)"),)


@given(st.text(alphabet='<>/tool_calthink{}[]()",:1 addclock\\\n', max_size=60) | st.text(max_size=40))
def test_no_text_breaks_a_parser(text: str):
    for parser in (parse_hermes_calls, parse_json_calls, COMPACT):
        for wrapped in (text, f"<tool_call>{text}</tool_call>", f"calc({text}", f'{{"name": {text}}}'):
            assert all(isinstance(call, (ToolCall, ToolCallError)) for call in parser(wrapped))
