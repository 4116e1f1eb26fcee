"""Tools of typed functions, and episodes with them: schemas, arguments, deadlines, policies, order and ids of results."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
import trio
from trio.testing import MockClock

from rollouts import (
    EnvironmentConfig,
    EnvironmentFault,
    EpisodeConfig,
    Prompt,
    SandboxError,
    ScriptedAgentPolicy,
    ToolArgumentError,
    ToolEnvironment,
    ToolFault,
    create_compact_parser,
    create_tool,
    describe_tools,
    parse_hermes_calls,
    reset_environment,
    run_episode,
    step_environment,
)
from rollouts.environments.tools.environment import ToolRules, cut_middle
from rollouts.environments.tools.schemas import create_schema, fit_value
from rollouts.environments.tools.tool import Tool, call_tool
from rollouts.errors import ConfigError, DataError
from rollouts.training.summaries import summarize_episodes


def search(
    query: str,
    limit: int = 10,
    unit: Literal["pages", "words"] = "pages",
    tags: list[str] | None = None,
    scores: Annotated[dict[str, float], "weight of each word"] = {},  # noqa: B006
    exact: bool = False,
    extra: Any = None,
) -> str:
    """Search the library
    for a text.

    Long story.

    Args:
        query: what to look for,
            in words.
        limit (int): most results.

    Returns: text.
    """
    return json.dumps([query, limit, unit, tags, scores, exact, extra])


def test_a_schema_follows_from_annotations_defaults_and_docstring():
    tool = create_tool(search)
    assert tool.name == "search"
    assert tool.description == "Search the library for a text."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "query": {"description": "what to look for, in words.", "type": "string"},
            "limit": {"description": "most results.", "type": "integer"},
            "unit": {"enum": ["pages", "words"]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "scores": {"description": "weight of each word", "type": "object", "additionalProperties": {"type": "number"}},
            "exact": {"type": "boolean"},
            "extra": {},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    assert tool.to_dict()["function"]["parameters"] == tool.parameters
    assert describe_tools([tool]).count(json.dumps(tool.to_dict())) == 1


def test_partials_methods_and_callable_objects_are_tools_as_well():
    class Adder:
        """Adds."""

        def __call__(self, a: int) -> int:
            return a + 1

        def plus(self, b: float) -> float:
            return b + 1

    assert create_schema(Adder())["required"] == ["a"]
    assert create_tool(Adder()).name == "Adder"
    assert create_schema(Adder().plus)["properties"] == {"b": {"type": "number"}}
    assert create_schema(functools.partial(search, limit=3))["required"] == ["query"]


def test_what_cannot_be_described_is_refused():
    def untyped(a): ...
    def many(*names: str): ...
    def odd(a: bytes): ...
    def unknown(a: NoSuchType): ...  # type: ignore[name-defined]  # noqa: F821

    for function, message in (
        (untyped, "parameter a of tool untyped has no annotation"),
        (many, r"parameter names of tool many is \*names: "),
        (odd, "parameter a of tool odd is annotated with <class 'bytes'>"),
        (unknown, "tool unknown: an annotation cannot be found"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_tool(function)
    with pytest.raises(ConfigError, match="'a b', expected a text without white space"):
        create_tool(search, name="a b")
    with pytest.raises(ConfigError, match="timeout_s of tool search is 0"):
        create_tool(search, timeout_s=0)


@pytest.mark.parametrize(
    ("arguments", "fitted"),
    [
        ({"query": "a"}, {"query": "a"}),
        ({"query": "3", "limit": "3", "exact": "true"}, {"query": "3", "limit": 3, "exact": True}),
        ({"query": "a", "limit": 3.0, "tags": None}, {"query": "a", "limit": 3, "tags": None}),
        ({"query": "a", "tags": ["x"], "scores": {"x": "0.5"}}, {"query": "a", "tags": ["x"], "scores": {"x": 0.5}}),
        ({"query": "a", "scores": {"x": 10**400}}, {"query": "a", "scores": {"x": 10**400}}),
        ({"query": "a", "extra": {"any": [1]}}, {"query": "a", "extra": {"any": [1]}}),
        ({}, "search has no query"),
        ({"query": 3}, "search.query is 3, expected a text"),
        ({"query": "a", "limit": 2.5}, "search.limit is 2.5, expected an integer"),
        ({"query": "a", "scores": {"x": "1e999"}}, "search.scores.x is Infinity, expected a number"),
        ({"query": "a", "limit": True}, "search.limit is true, expected an integer"),
        ({"query": "a", "limit": "many"}, 'search.limit is "many", expected an integer'),
        ({"query": "a", "unit": "lines"}, 'search.unit is "lines", expected one of "pages", "words"'),
        ({"query": "a", "tags": [1]}, "search.tags[0] is 1, expected a text"),
        ({"query": "a", "tags": 1}, "search.tags is 1, expected a list; or search.tags is 1, expected null"),
        ({"query": "a", "scores": {"x": []}}, "search.scores.x is [], expected a number"),
        ({"query": "a", "color": 1}, "search has color, which is not known: known are query, limit"),
    ],
)
def test_arguments_are_fitted_to_the_schema_or_refused(arguments: Mapping[str, Any], fitted: Any):
    schema = create_tool(search).parameters
    if isinstance(fitted, str):
        with pytest.raises(ValueError) as caught:
            fit_value(arguments, schema, "search")
        assert str(caught.value).startswith(fitted)
    else:
        assert fit_value(arguments, schema, "search") == fitted


async def nap(seconds: float) -> str:
    await trio.sleep(seconds)
    return f"slept {seconds:g}"


def fail(why: str) -> str:
    raise LookupError(why)


def count() -> dict[str, list[int]]:
    return {"numbers": [1, 2]}


def junk() -> Any:
    return {1, 2}


def word() -> str:
    return "half \ud83d pair"


async def test_what_a_tool_returns_is_text():
    assert await call_tool(create_tool(nap), {"seconds": 0}) == "slept 0"
    assert await call_tool(create_tool(count, in_thread=False), {}) == '{"numbers": [1, 2]}'
    assert await call_tool(create_tool(count), {}) == '{"numbers": [1, 2]}'
    assert await call_tool(create_tool(word, in_thread=False), {}) == "half ? pair"
    with pytest.raises(ToolFault, match=r"tool junk returned \{1, 2\} \(set\), which is neither a text nor JSON"):
        await call_tool(create_tool(junk), {})


async def test_a_tool_that_raises_or_is_late_is_a_fault(autojump_clock: MockClock):
    with pytest.raises(ToolFault, match=r"tool fail raised LookupError \(.*test_tool_environment\.py:\d+\): not there"):
        await call_tool(create_tool(fail, in_thread=False), {"why": "not there"})
    with pytest.raises(ToolFault, match=r"tool nap did not return within 0\.5 s"):
        await call_tool(create_tool(nap, timeout_s=0.5), {"seconds": 2})


async def test_a_thread_that_hangs_is_left_behind():
    released = threading.Event()

    def hang() -> str:
        released.wait(60)
        return ""

    started = time.monotonic()
    with pytest.raises(ToolFault, match=r"tool hang did not return within 0\.05 s"):
        await call_tool(create_tool(hang, timeout_s=0.05), {})
    with trio.move_on_after(0.05) as scope:
        await call_tool(create_tool(hang), {})
    assert scope.cancelled_caught
    assert time.monotonic() - started < 30
    released.set()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def grade(answer: str, parameters: Mapping[str, Any]) -> float:
    return float(answer == parameters["ground_truth"])


TOOLS = (create_tool(nap, timeout_s=10), create_tool(fail, in_thread=False), create_tool(count, in_thread=False))


async def open_episode(**settings: Any) -> ToolEnvironment:
    environment = ToolEnvironment(TOOLS, **{"grade": grade, **settings})
    await reset_environment(environment, EnvironmentConfig(parameters={"ground_truth": "84", "question": "12*7?"}))
    return environment


async def test_calls_run_at_once_and_results_are_in_their_order_with_their_ids(autojump_clock: MockClock):
    environment = await open_episode()
    named = '<tool_call>{"id": "mine", "name": "count"}</tool_call>'
    started = trio.current_time()
    step = await step_environment(environment, call("nap", seconds=3) + call("nap", seconds=1) + named)
    assert trio.current_time() - started == pytest.approx(3)
    assert [m.content for m in step.observation] == ["slept 3", "slept 1", '{"numbers": [1, 2]}']
    assert [m.tool_call_id for m in step.observation] == ["call_0", "call_1", "mine"]
    assert [m.name for m in step.observation] == ["nap", "nap", "count"]
    assert {m.role for m in step.observation} == {"tool"}
    assert [c["id"] for c in step.info["tool_calls"]] == ["call_0", "call_1", "mine"]
    assert (step.reward, step.done, step.info["num_tool_calls"], step.info["num_bad_calls"]) == (0.0, False, 3, 0)
    again = await step_environment(environment, named + named)
    assert len({"mine", *(m.tool_call_id for m in again.observation)}) == 3


async def test_the_first_text_without_a_call_is_graded():
    environment = await open_episode()
    assert await step_environment(environment, "<think>12*7</think> 84\n") == ("", 1.0, True, {"answer": "84"})
    assert (await step_environment(environment, "85")).reward == 0.0

    async def slow_grade(answer: str, parameters: Mapping[str, Any]) -> float:
        await trio.lowlevel.checkpoint()
        return len(answer) / 10

    assert (await step_environment(await open_episode(grade=slow_grade), "84")).reward == 0.2
    with pytest.raises(EnvironmentFault, match="the reward is 'good'"):
        await step_environment(await open_episode(grade=lambda answer, parameters: "good"), "84")
    with pytest.raises(EnvironmentFault, match="raised KeyError"):
        await step_environment(await open_episode(grade=lambda answer, parameters: parameters["no"]), "84")


async def test_what_the_model_does_wrong_is_told_to_it_and_counted():
    environment = await open_episode(rules=ToolRules(error_reward=-0.1))
    step = await step_environment(environment, call("nap") + call("sleep") + "<tool_call>{</tool_call>" + call("count"))
    assert [m.content for m in step.observation][:2] == ["error: nap has no seconds", "error: no tool sleep; there are: nap, fail, count"]
    assert step.observation[2].content.startswith("error: no JSON")
    assert step.observation[3].content == '{"numbers": [1, 2]}'
    assert (step.info["num_tool_calls"], step.info["num_bad_calls"], step.info["num_tool_errors"]) == (4, 3, 0)
    assert step.info["policy_error"] == "error: nap has no seconds"
    assert step.reward == pytest.approx(-0.3)
    assert "policy_error" not in (await step_environment(environment, call("count"))).info


async def test_a_failing_tool_is_an_observation_or_the_end_of_the_episode(autojump_clock: MockClock):
    text = call("fail", why="not there") + call("nap", seconds=20) + call("nap", seconds=1)
    step = await step_environment(await open_episode(), text)
    assert [m.content for m in step.observation] == [
        "error: not there",
        "error: tool nap did not return within 10 s: make it faster, or raise its timeout_s",
        "slept 1",
    ]
    assert (step.info["num_bad_calls"], step.info["num_tool_errors"]) == (0, 2)
    with pytest.raises(ToolFault, match="tool fail raised LookupError"):
        await step_environment(await open_episode(rules=ToolRules(on_tool_error="raise")), text)
    step = await step_environment(await open_episode(rules=ToolRules(on_tool_error="raise")), call("sleep"))
    assert step.info["num_bad_calls"] == 1  # the model's fault is never the tool's


async def test_a_tool_without_its_sandbox_is_no_observation():
    def confined() -> str:
        raise SandboxError("no bubblewrap")

    environment = ToolEnvironment([create_tool(confined), *TOOLS], grade=grade)
    with pytest.raises(SandboxError, match="no bubblewrap"):
        await step_environment(environment, call("confined") * 2 + call("count"))


async def test_a_tool_may_say_that_the_model_is_wrong():
    def strict(n: int) -> int:
        if n < 0:
            raise ToolArgumentError("n is below 0")
        return n

    environment = ToolEnvironment([create_tool(strict)], grade=grade, rules=ToolRules(on_tool_error="raise"))
    step = await step_environment(environment, call("strict", n=-1))
    assert step.observation[0].content == step.info["policy_error"] == "error: n is below 0"
    assert (step.info["num_bad_calls"], step.info["num_tool_errors"]) == (1, 0)


async def test_more_calls_than_are_carried_out_are_refused_and_long_results_are_cut():
    environment = await open_episode(rules=ToolRules(max_calls=2, max_result_chars=8), role="user")
    step = await step_environment(environment, call("count") * 3)
    assert [m.content for m in step.observation][:2] == ['{"nu\n... 11 characters left out ...\n 2]}'] * 2
    assert step.info["num_bad_calls"] == 1
    assert {(m.role, m.tool_call_id) for m in step.observation} == {("user", None)}
    assert cut_middle("abcd", 4) == "abcd"
    assert cut_middle("abcdefg", 3) == "ab\n... 4 characters left out ...\ng"
    assert cut_middle("abc", 0) == "\n... 3 characters left out ...\n"


async def test_the_question_may_be_the_first_observation():
    config = EnvironmentConfig(parameters={"question": "12*7?"})
    environment = ToolEnvironment(TOOLS, grade=grade, question_key="question", prefix="You have tools.")
    assert await reset_environment(environment, config) == "12*7?"
    assert environment.get_prompt_prefix() == "You have tools."
    with pytest.raises(DataError, match="the prompt's metadata has no 'question', which question_key names; there are: none"):
        await reset_environment(environment, EnvironmentConfig())


async def test_a_parser_of_ones_own():
    def parse(text: str):
        return parse_hermes_calls(call("count")) if text == "go" else ()

    environment = await open_episode(parser=parse)
    assert (await step_environment(environment, "go")).info["num_tool_calls"] == 1
    environment = await open_episode(parser=create_compact_parser(TOOLS))
    assert (await step_environment(environment, "fail(oh no)")).observation[0].content == "error: oh no"


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="expected different names"):
        ToolEnvironment([*TOOLS, *TOOLS], grade=grade)
    with pytest.raises(ConfigError, match="on_tool_error is 'ignore', expected one of observe, raise"):
        ToolEnvironment(TOOLS, grade=grade, rules=ToolRules(on_tool_error="ignore"))  # type: ignore[arg-type]
    tool = Tool(name="raw", function=fail, parameters={"type": "object"})
    assert fit_value({"anything": 1}, tool.parameters, "raw") == {"anything": 1}


async def test_calls_of_a_batch_are_metrics():
    texts = [call("count") + call("sleep"), call("fail", why="so"), "84"]
    config = EpisodeConfig(max_turns=4, chat=False)
    prompt = Prompt(content="12*7?", metadata={"ground_truth": "84"})
    episode = await run_episode(ScriptedAgentPolicy(texts), lambda: ToolEnvironment(TOOLS, grade=grade), prompt, config)
    metrics = summarize_episodes([episode.sample, episode.sample])
    assert (metrics["num_tool_calls"], metrics["num_bad_calls"], metrics["num_tool_errors"]) == (6.0, 2.0, 2.0)
    guess = await run_episode(ScriptedAgentPolicy(["84"]), lambda: ToolEnvironment(TOOLS, grade=grade), prompt, config)
    assert "num_tool_calls" not in summarize_episodes([guess.sample])


async def play_slowly(tool_s: float, timeout_s: float | None, grade_s: float = 0.0):
    async def search() -> str:
        """Look it up."""
        await trio.sleep(tool_s)
        return "found"

    async def grade(answer: str, parameters: Mapping[str, Any]) -> float:
        await trio.sleep(grade_s)
        return 1.0

    def create_environment() -> ToolEnvironment:
        return ToolEnvironment([create_tool(search, timeout_s=timeout_s)], grade=grade)

    script = ScriptedAgentPolicy(['<tool_call>{"name": "search", "arguments": {}}</tool_call>', "so"])
    return await run_episode(script, create_environment, Prompt(content="q"), EpisodeConfig(timeout_s=60.0))


@pytest.mark.parametrize(
    ("tool_s", "timeout_s", "told"),
    [(80.0, 90.0, "found"), (1000.0, 90.0, "did not return within 90 s"), (1000.0, None, "found"), (59.9, 60.0, "found")],
)
async def test_the_deadline_of_a_tool_is_its_own_whatever_the_episode_allows_a_step(autojump_clock: MockClock, tool_s, timeout_s, told):
    episode = await play_slowly(tool_s, timeout_s)
    assert episode.total_reward == 1.0
    assert told in episode.messages[2].content


async def test_what_is_no_tool_has_the_deadline_of_the_episode(autojump_clock: MockClock):
    with pytest.raises(EnvironmentFault, match=r"ToolEnvironment\.step did not return within 65 s"):
        await play_slowly(0.0, 5.0, grade_s=1000.0)

    class Confused(ToolEnvironment):
        longest_call_s = "long"

    with pytest.raises(EnvironmentFault, match=r"longest_call_s is 'long' \(str\), expected seconds"):
        await step_environment(Confused([], grade=lambda answer, parameters: 1.0), "a", timeout_s=1.0)


async def test_halves_of_surrogate_pairs_in_results_and_errors_are_replaced():
    def names() -> list[str]:
        """List names."""
        return ["half \ud83d"]

    def broken() -> str:
        """Fail."""
        raise ValueError("half \ud83d")

    environment = ToolEnvironment([create_tool(names), create_tool(broken)], grade=grade)
    await reset_environment(environment, EnvironmentConfig(parameters={"ground_truth": "84", "question": "12*7?"}))
    step = await step_environment(environment, call("names") + call("broken"))
    assert ["half ?" in message.content for message in step.observation] == [True, True]
