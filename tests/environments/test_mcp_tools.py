"""Tools of MCP servers: real processes, of the package `mcp` and written by hand, and what is wrong with servers."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import traceback
from pathlib import Path

import needs
import pytest
import trio
from chat_templates import CHATML, create_tokenizer, encode
from ledgers import LedgerEngine, list_trained
from page_blocks import ROOT, find_missing, list_commands, run_command, write_files

from rollouts.environments import EnvironmentConfig, ToolEnvironment, open_mcp_tools, step_environment
from rollouts.environments.tools import mcp
from rollouts.environments.tools.environment import ToolRules
from rollouts.environments.tools.tool import call_tool
from rollouts.errors import ConfigError, ToolArgumentError, ToolFault
from rollouts.gateway import create_agent_generate_fn
from rollouts.rewards.answers import load_function
from rollouts.types import Prompt, SamplingParams

PAGE = ROOT / "docs" / "agent-frameworks.md"
TOOL_CHATML = "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}" + CHATML

# a server of the protocol's letter, which starts in no time and can be wrong
BY_HAND = """
import json, os, sys, time

TOOL = {"name": "say", "description": "Say it.", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
TOOLS, PAGED = [TOOL], False

def say(text=""):
    return {"content": [{"type": "text", "text": text}]}

def answer(method, params):
    if method == "initialize":
        info = {"name": "by hand", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": TOOLS, **({"nextCursor": "again"} if PAGED else {})}
    return say(**params["arguments"])

def main():
    print("a line that is no message", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] in ("initialize", "tools/list", "tools/call"):
            found = answer(message["method"], message.get("params") or {})
            reply.update(found if "error" in found else {"result": found})
        else:
            reply["error"] = {"code": -32601, "message": "no such method"}
        print(json.dumps(reply), flush=True)

"""


@pytest.fixture
def write_server(tmp_path):
    """Write a server by hand with changes; returns the command."""

    def write(text=""):
        path = tmp_path / "server.py"
        path.write_text(f"{BY_HAND}\n{textwrap.dedent(text)}\nmain()\n")
        return [sys.executable, "-S", str(path)]

    return write


async def call(tools, name="say", **arguments):
    (tool,) = (tool for tool in tools if tool.name == name)
    return await call_tool(tool, arguments)


@needs.MCP
@pytest.mark.slow
def test_the_program_of_the_page_prints_what_it_says(tmp_path: Path):
    write_files(PAGE, tmp_path)
    (command,) = (command for command in list_commands(PAGE) if "count.py" in command.script)
    path = ":".join(needs.import_path())
    assert not find_missing(command.printed, run_command(command.script, tmp_path, {"PYTHONPATH": path}))


@needs.MCP
async def test_each_run_of_the_agent_of_the_page_has_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    tokenizer = create_tokenizer(TOOL_CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    request = '<tool_call>\n{"name": "count_stock", "arguments": {"fruit": "pears"}}\n</tool_call>'
    engine = LedgerEngine(lambda prompt, seed: (*encode(tokenizer, "7" if "tool\n7" in tokenizer.decode(prompt) else request), end))
    play = load_function(f"{tmp_path}/mcp_agent.py:play")
    generate = create_agent_generate_fn(play, [engine], tokenizer, SamplingParams(max_tokens=200))
    group = await generate(Prompt(content="How many pears?", metadata={"ground_truth": "7"}), 2)
    assert [(sample.reward, len(sample.turns), sample.context_starts) for sample in group] == [(1.0, 2, ())] * 2
    assert sum(len(list_trained(sample)) for sample in group) == len(engine.ledger)


@needs.MCP
async def test_calls_of_many_episodes_go_to_one_server_at_once_and_errors_are_told_to_the_model(write_server):
    command = write_server("""
        def say(text=""):
            if text == "bad":
                return {"error": {"code": -32602, "message": "no such text"}}
            if text == "worse":
                return {"isError": True, "content": [{"type": "text", "text": "it broke"}]}
            parts = [{"type": "text", "text": text}, {"type": "image", "data": "AAAA", "mimeType": "image/png"}]
            return {"content": [*parts, {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]}
    """)
    texts: list[str] = []

    async def play(tools, number):
        environment = ToolEnvironment(tools, grade=lambda answer, parameters: 1.0)
        environment.reset(EnvironmentConfig())
        words = [f"episode {number}", "bad", "worse", "x" * 300]
        action = "".join(f"<tool_call>{json.dumps({'name': 'say', 'arguments': {'text': text}})}</tool_call>" for text in words)
        step = await step_environment(environment, action)
        assert (step.info["num_tool_calls"], step.info["num_bad_calls"], step.info["num_tool_errors"]) == (4, 1, 1)
        texts.extend(message.content for message in step.observation)

    async with open_mcp_tools(command, max_result_chars=100) as tools:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(play, tools, number)
        with pytest.raises(ToolArgumentError, match="no such text"):
            await call(tools, text="bad")
        strict = ToolEnvironment(tools, grade=lambda answer, parameters: 1.0, rules=ToolRules(on_tool_error="raise"))
        with pytest.raises(ToolFault, match=r"the call of say by the MCP server .* failed: 'it broke'"):
            await strict.step('<tool_call>{"name": "say", "arguments": {"text": "worse"}}</tool_call>')
    assert sorted(text for text in texts if text.startswith("episode")) == [f"episode {n}\n(image left out)\ninside" for n in range(5)]
    assert texts.count("error: no such text") == texts.count("error: it broke") == 5
    assert sum("characters left out" in text and len(text) < 140 for text in texts) == 5


@needs.MCP
async def test_a_late_call_is_a_fault_of_its_own_and_the_server_goes_on(write_server):
    command = write_server("""
        LATE = []

        def answer(method, params, plain=answer):
            if method == "tools/call" and params["arguments"]["text"] == "late":
                LATE.append(sys.stdin.readline())  # no answer before something else comes
            return plain(method, params)
    """)
    async with open_mcp_tools(command, timeout_s=0.2) as tools:
        with pytest.raises(ToolFault, match=r"tool say did not return within 0\.2 s"):
            await call(tools, text="late")
    async with open_mcp_tools(command, timeout_s=60) as tools:
        with trio.move_on_after(0.2) as gone:
            await call(tools, text="late")
        assert gone.cancelled_caught
        assert await call(tools, text="again") == "again"


@needs.MCP
async def test_the_death_of_a_server_ends_its_block_and_says_how(write_server):
    command = write_server("""
        def say(text=""):
            sys.stderr.write("no more memory \\x1b[31m" + text)
            sys.stderr.flush()
            os._exit(3)
    """)
    ended = r"is gone: it ended with exit status 3; the end of its stderr: 'no more memory \\\\x1b\[31mnow'"
    with trio.fail_after(60), pytest.raises(ToolFault, match=ended):
        async with open_mcp_tools(command) as tools:
            with pytest.raises(ToolFault):  # the model may be told, but the block ends
                await call(tools, text="now")
            await trio.sleep_forever()


QUOTING = {  # what a server does with the key that it was given
    "dies": "raise SystemExit('no such key: ' + KEY)",
    "fails": "return {'isError': True, 'content': [{'type': 'text', 'text': f'{KEY} is wrong at http://me:canary-user@host/?q=canary-query'}]}",
    "refuses": "return {'error': {'code': -1, 'message': f'{KEY} is wrong, as is http://me:canary-user@host/?q=canary-query'}}",
    "answers no result": "return {KEY: 1, 'content': KEY}",
    "corrects": "return {'error': {'code': -32602, 'message': KEY}}",
    "answers": "return {'content': [{'type': 'text', 'text': KEY}]}",
    "answers an object": "return {'content': [], 'structuredContent': {'env': {'API_KEY': KEY}}}",
}


@needs.MCP
@pytest.mark.parametrize("how", QUOTING)
async def test_a_key_of_a_server_is_in_nothing_that_it_says(write_server, how):
    key = "canary-key-of-the-server"
    command = write_server(f"""
        KEY = os.environ["API_KEY"]
        schema = {{"type": "object", "properties": {{"text": {{"type": "string"}}, "key": {{"type": "string", "default": KEY}}}}}}
        TOOLS = [{{**TOOL, "description": f"Say it with {{KEY}}.", "inputSchema": schema}}]

        def say(text=""):
            {QUOTING[how]}
    """)
    said: list[object] = []
    words = [*command, "--api-key", "canary-argument", "--header", "Authorization: Bearer canary-bearer-token"]
    try:
        async with open_mcp_tools(words, environment={"API_KEY": key, "LC_ALL": "C"}) as tools:
            assert tools[0].description == "Say it with ***."
            said.append(tools[0].parameters)
            said.append(await call(tools, text="a"))
            await trio.sleep(0)
    except (ToolFault, ToolArgumentError) as error:
        said += [error, *(cause for cause in [error.__cause__] if cause is not None)]  # the model is told of the cause
    assert "***" in str(said[1:]) or how == "answers no result"
    assert [secret for secret in (key, "canary-argument", "canary-bearer") if secret in str(said)] == []
    assert not any("canary" in str(one) for one in said if isinstance(one, ToolFault)), "what files of a run have"


LISTS = {"an error": "{'error': {'code': -1, 'message': KEY}}", "no tools": "{'tools': [{'name': KEY}]}"}


@needs.MCP
@pytest.mark.parametrize("how", LISTS)
async def test_a_key_is_in_no_traceback_of_a_server_that_lists_no_tools(write_server, how):
    command = write_server(f"""
        KEY, rest = os.environ["API_KEY"], answer

        def answer(method, params):
            return {LISTS[how]} if method == "tools/list" else rest(method, params)
    """)
    key = "".join(["canary-key", "-of-the-server"])  # not as it stands in this file, whose lines a traceback has, too
    with trio.fail_after(60), pytest.raises(ToolFault, match="lists no tools") as caught:
        async with open_mcp_tools(command, environment={"API_KEY": key, "LC_ALL": "C"}):
            pass
    assert key not in "".join(traceback.format_exception(caught.value))


@needs.MCP
@pytest.mark.parametrize("pause_s", [0.0, 0.3])
async def test_a_server_that_is_dead_before_it_is_greeted_tells_its_last_words(write_server, monkeypatch, pause_s):
    """The first message to it breaks, or is not read, whichever of the two ends first."""
    start = mcp._start

    async def start_slowly(*args):
        server = await start(*args)
        await trio.sleep(pause_s)
        return server

    monkeypatch.setattr(mcp, "_start", start_slowly)
    with trio.fail_after(60), pytest.raises(ToolFault, match="is gone: it ended with exit status 7; the end of its stderr: 'no key'"):
        async with open_mcp_tools(["/bin/sh", "-c", "echo no key >&2; exit 7"]):
            pass


@needs.MCP
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']); os._exit(3)", "it ended with exit status 3"),
        ("os.close(0); time.sleep(600)", "it closed its stdin and runs on"),
    ],
    ids=["a child has its stdout", "it reads no more"],
)
async def test_a_server_is_gone_too_when_its_stdout_stays_open(write_server, monkeypatch, text, end):
    command = write_server(f"import subprocess\ndef say(text=''): {text}\n")
    with trio.fail_after(60), pytest.raises(ToolFault, match=f"is gone: {end}"):
        async with open_mcp_tools(command, timeout_s=None) as tools:
            monkeypatch.setattr(mcp, "_GRACE_S", 0.1)
            while True:
                with trio.move_on_after(0.5):
                    await call(tools, text="now")


@needs.MCP
async def test_arguments_that_cannot_be_sent_are_the_models_mistake_and_the_block_goes_on(write_server):
    async with open_mcp_tools(write_server()) as tools:
        with pytest.raises(ToolArgumentError, match=r"the arguments of say cannot be sent: .*surrogates not allowed"):
            await call(tools, text="\ud800")
        deep: list[object] = []
        for _ in range(900):
            deep = [deep]
        with pytest.raises(ToolFault):
            await call(tools, text=deep)
        assert await call(tools, text="again") == "again"


@needs.MCP
async def test_nothing_of_a_server_is_left_when_it_does_not_end_by_itself(write_server, tmp_path):
    command = write_server("""
        import signal, subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

        def say(text=""):
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
            return {"content": [{"type": "text", "text": f"{os.getpid()} {child.pid} {sorted(os.environ)}"}]}

        def main(plain=main):
            plain()
            time.sleep(600)
    """)
    async with open_mcp_tools(command, environment={"LC_ALL": "C", "SEEN": "1"}) as tools:
        pid, child, rest = (await call(tools)).split(" ", 2)
    assert rest == "['LC_ALL', 'SEEN']"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    with trio.fail_after(30):
        while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
            await trio.sleep(0.01)  # it is killed, and whoever adopts it waits for it


def give_schema(schema):
    """The change of a server whose tool has this schema of its argument a."""
    return f"TOOLS = [{{**TOOL, 'inputSchema': {{'type': 'object', 'properties': {{'a': {schema}}}}}}}]"


WRONG = {
    "endless": ("PAGED = True", "the list of the MCP server .* does not end"),
    "twice": ("TOOLS = [TOOL, TOOL]", "lists tools of one name: say, say"),
    "unnamed": ("TOOLS = [{**TOOL, 'name': 'say it'}]", "has a name that models cannot call"),
    "no object": (give_schema({"anyOf": [7]}), "has 7, expected a JSON schema"),
    "required": (give_schema({"type": "object", "required": [3]}), r"has required = \[3\], expected a list of names"),
    "no list": (give_schema({"enum": "b"}), "has enum = 'b', expected a list"),
    "large": (give_schema({"title": "x" * 40000}), "a schema of 40,0.* at most 32,768"),
    "no tools": ("TOOLS = 'many'", "lists no tools: ValidationError"),
    "long": ("TOOLS = 'x' * 9_000_000", "is gone: it wrote a line of more than 8,388,608 bytes"),
    "dead": ("raise SystemExit('no key')", "is gone: it ended with exit status 1; the end of its stderr: 'no key'"),
    "silent": ("def main(): sys.stdin.read()", "listed no tools within 1 s"),
}


@needs.MCP
@pytest.mark.parametrize("wrong", WRONG)
async def test_a_server_that_lists_no_tools_is_refused_with_the_reason(write_server, wrong):
    text, message = WRONG[wrong]
    with trio.fail_after(60), pytest.raises(ToolFault, match=message):
        async with open_mcp_tools(write_server(text), start_s=1.0 if wrong == "silent" else 50.0):
            raise AssertionError("it has tools")


@needs.MCP
async def test_schemas_that_models_may_read_and_tools_do_not_are_taken(write_server):
    command = write_server("""
        properties = {"a": True, "b": {"items": [{"type": "string"}]}, "c": {"$ref": "#/$defs/c"}, "d": {"type": ["string", "null"]}}
        TOOLS = [{"name": "say", "inputSchema": {"type": "object", "properties": properties, "required": ["d"], "$defs": {"c": {}}}}]

        def say(**given):
            return {"content": [], "structuredContent": given}
    """)
    async with open_mcp_tools(command, names=["say"]) as tools:
        environment = ToolEnvironment(tools, grade=lambda answer, parameters: 1.0)
        given = {"a": 1, "b": [2], "c": {"e": 3}, "d": None}
        step = await environment.step(f"<tool_call>{json.dumps({'name': 'say', 'arguments': given})}</tool_call>")
        assert json.loads(step.observation[0].content) == given
        assert tools[0].description == "" and tools[0].parameters["$defs"] == {"c": {}}


@needs.MCP
async def test_what_the_user_gives_is_checked(write_server):
    async with open_mcp_tools(write_server("TOOLS = [TOOL, {**TOOL, 'name': 'say it'}]"), names=["say"]) as tools:
        assert [tool.name for tool in tools] == ["say"], "what is wrong with a tool that is not used does not matter"
    with pytest.raises(ConfigError, match=r"names has 'shout', which the MCP server .* has not: there are say"):
        async with open_mcp_tools(write_server(), names=["say", "shout"]):
            pass
    with pytest.raises(ConfigError, match="cannot be started"):
        async with open_mcp_tools(["/no/such/program"]):
            pass
    with pytest.raises(ConfigError, match="expected the words of a command"):
        async with open_mcp_tools("python server.py"):
            pass
    with pytest.raises(ZeroDivisionError):
        async with open_mcp_tools(write_server()):
            _ = 1 / 0


async def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"need the package mcp: pip install 'rollouts-rl\[mcp\]'"):
        async with open_mcp_tools(["true"]):
            pass
