"""Tools of MCP servers at an address: a real server of the package `mcp`, and one of the protocol's letter that can be wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import needs
import pytest
import trio

from rollouts.environments import open_mcp_tools
from rollouts.environments.tools import mcp
from rollouts.environments.tools.tool import call_tool
from rollouts.errors import ConfigError, ToolArgumentError, ToolFault

pytestmark = needs.MCP

REAL = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("stock")


@server.tool()
def count_stock(fruit: str) -> int:
    \"\"\"Count the fruit in stock.\"\"\"
    return {"apples": 12, "pears": 7}[fruit]


server.run("streamable-http", host="127.0.0.1", port=0)
"""
TOOL = {"name": "say", "description": "Say it.", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


async def call(tools, name="say", **arguments):
    (tool,) = (tool for tool in tools if tool.name == name)
    return await call_tool(tool, arguments)


class ByHand:
    """A server with sessions, as they were before version 2026 of the protocol: `change(message)` may answer in its place."""

    def __init__(self, change=lambda message: None, session="s1"):
        self.change = change
        self.session = session
        self.seen = []  # (HTTP method, method of the message or None, headers in lower case)
        self.release = threading.Event()

    def answer(self, message):
        """Return status, content type and body."""
        changed = self.change(message)
        if changed is not None:
            return changed
        if "id" not in message:
            return 202, "application/json", b""
        if message["method"] == "initialize":
            info = {"name": "by hand", "version": "1"}
            result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        elif message["method"] == "tools/list":
            result = {"tools": [TOOL]}
        elif message["method"] == "tools/call":
            result = {"content": [{"type": "text", "text": message["params"]["arguments"].get("text", "")}]}
        else:
            error = {"code": -32601, "message": "no such method"}
            return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}).encode()
        return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()

    @contextmanager
    def serve(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                message = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.note(message.get("method"))
                self.send(*outer.answer(message))

            def do_GET(self):
                self.note(None)
                self.send(405, "text/plain", b"")

            do_DELETE = do_GET

            def note(self, method):
                outer.seen.append((self.command, method, {name.lower(): value for name, value in self.headers.items()}))

            def send(self, status, kind, body):
                if body is None:  # no answer at all
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("mcp-session-id", outer.session)
                self.send_header("connection", "close")  # so that no answer comes once it listens no more
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/mcp", server
        finally:
            self.release.set()
            server.shutdown()
            thread.join()
            server.server_close()


async def test_tools_of_a_real_server_at_an_address_are_called_by_many_episodes_at_once(tmp_path: Path):
    (tmp_path / "stock.py").write_text(REAL)
    with subprocess.Popen([sys.executable, str(tmp_path / "stock.py")], stderr=subprocess.PIPE, text=True) as server:
        try:
            lines: list[str] = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                    break
            else:
                raise AssertionError("".join(lines))
            with trio.fail_after(60):
                async with open_mcp_tools(f"{found.group(1)}/mcp", names=["count_stock"]) as tools:
                    assert tools[0].description == "Count the fruit in stock."
                    counts: list[str] = []

                    async def count(fruit):
                        counts.append(await call(tools, "count_stock", fruit=fruit))

                    async with trio.open_nursery() as nursery:
                        for fruit in ["apples", "pears"] * 3:
                            nursery.start_soon(count, fruit)
                    assert sorted(counts) == ["12"] * 3 + ["7"] * 3
                    with pytest.raises(ToolFault, match=r"the call of count_stock by the MCP server http.* failed"):
                        await call(tools, "count_stock", fruit="plums")
                    assert await call(tools, "count_stock", fruit="pears") == "7"
        finally:
            server.kill()


@pytest.mark.parametrize("how", ["it ends", "it fails", "it is cancelled"])
async def test_requests_carry_the_headers_and_the_session_ends_however_the_block_does(how):
    server = ByHand()
    with server.serve() as (url, _), trio.fail_after(60), trio.CancelScope() as scope:
        try:
            async with open_mcp_tools(f"{url}?key=k", headers={"Authorization": "Bearer abc"}) as tools:
                assert await call(tools, text="\u00e9") == "\u00e9"
                if how == "it fails":
                    raise ZeroDivisionError
                if how == "it is cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
        except ZeroDivisionError:
            assert how == "it fails"
    assert {headers["authorization"] for _, _, headers in server.seen} == {"Bearer abc"}
    assert [headers["mcp-session-id"] for kind, _, headers in server.seen if kind == "DELETE"] == ["s1"]


def refuse(status, kind, body):
    return lambda message: (
        (status, kind, body) if message.get("method") == "tools/call" and message["params"]["arguments"]["text"] == "bad" else None
    )


FAILED_CALLS = {
    "status": (refuse(503, "application/json", b'{"error": "busy\\u001b[31m"}'), r"was refused: 'HTTP status 503: \{\"error\": \"busy"),
    "unauthorized": (refuse(401, "text/plain", b"no token"), "was refused: 'HTTP status 401: no token'"),
    "no answer": (refuse(0, "", None), "was refused: 'the connection failed: "),
    "no JSON": (refuse(200, "application/json", b"{"), "was refused: .Failed to parse JSON response"),
    "no kind": (refuse(200, "text/html", b"<html>"), "was refused: 'Unexpected content type: text/html'"),
    "accepted": (refuse(202, "application/json", b""), "was refused: 'server answered a request with 202 Accepted'"),
    "long": (refuse(200, "application/json", b" " * 3000), "was refused: 'an answer has more than 2,000 bytes'"),
    "long event": (refuse(200, "text/event-stream", b"data: " + b"x" * 3000), "was refused: 'SSE stream failed: "),
    "cut": (refuse(200, "text/event-stream", b"data: x"), "was refused: 'SSE stream ended without a response'"),
}


@pytest.mark.parametrize("wrong", FAILED_CALLS)
async def test_a_call_that_fails_on_its_way_is_a_fault_of_its_own_and_the_block_goes_on(wrong, monkeypatch):
    change, message = FAILED_CALLS[wrong]
    monkeypatch.setattr(mcp, "_MAX_MESSAGE_BYTES", 2000)
    with ByHand(change).serve() as (url, _), trio.fail_after(60):
        async with open_mcp_tools(url) as tools:
            with pytest.raises(ToolFault, match=message):
                await call(tools, text="bad")
            assert await call(tools, text="again") == "again"


async def test_an_error_of_the_protocol_counts_as_one_whatever_its_http_status():
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "no such text"}}
    with ByHand(refuse(400, "application/json", json.dumps(error).encode())).serve() as (url, _), trio.fail_after(60):
        async with open_mcp_tools(url) as tools:
            with pytest.raises(ToolArgumentError, match="no such text"):
                await call(tools, text="bad")


async def test_a_late_call_is_a_fault_of_its_own_and_the_server_goes_on():
    server = ByHand()

    def wait_for_release(message):
        if "late" in json.dumps(message):
            server.release.wait(60)

    server.change = wait_for_release
    with server.serve() as (url, _), trio.fail_after(60):
        async with open_mcp_tools(url, timeout_s=0.2) as tools:
            with pytest.raises(ToolFault, match=r"tool say did not return within 0\.2 s"):
                await call(tools, text="late")
            server.release.set()
        async with open_mcp_tools(url, timeout_s=50) as tools:
            assert await call(tools, text="again") == "again"


async def test_a_server_that_cannot_be_reached_any_more_or_has_ended_the_session_ends_the_block():
    with ByHand().serve() as (url, server), trio.fail_after(60):
        with pytest.raises(ToolFault, match=rf"the MCP server {url} is gone: it cannot be reached: "):
            async with open_mcp_tools(url) as tools:
                await call(tools, text="once")
                server.shutdown()
                server.server_close()
                while True:
                    with pytest.raises(ToolFault):
                        await call(tools, text="now")
                    await trio.sleep(0)
    with ByHand(refuse(404, "text/plain", b"")).serve() as (url, _), trio.fail_after(60):
        with pytest.raises(ToolFault, match="is gone: it has ended the session"):
            async with open_mcp_tools(url) as tools:
                with pytest.raises(ToolFault):  # the model may be told, but the block ends
                    await call(tools, text="bad")
                await trio.sleep_forever()


STARTS = {
    "unauthorized": (lambda message: (401, "application/json", b'{"error": "no token"}'), "lists no tools: .*HTTP status 401: .*no token"),
    "elsewhere": (lambda message: (404, "text/html", b"not here"), "lists no tools: .*Not Found"),
    "late": (lambda message: threading.Event().wait(1.0) or None, r"listed no tools within 0\.3 s"),
}


@pytest.mark.parametrize("wrong", STARTS)
async def test_an_address_that_lists_no_tools_is_refused_with_the_reason(wrong):
    change, message = STARTS[wrong]
    with ByHand(change).serve() as (url, _), trio.fail_after(60), pytest.raises(ToolFault, match=message):
        async with open_mcp_tools(url, start_s=0.3 if wrong == "late" else 50.0):
            raise AssertionError("it has tools")


@pytest.mark.parametrize("session", ["\xff\xfe", "two words", "caf\xe9", "\x7f"])
async def test_a_session_whose_name_no_request_can_have_is_refused(session):
    message = "lists no tools: .*the name of the session has other signs than visible ASCII"
    with ByHand(session=session).serve() as (url, _), trio.fail_after(60), pytest.raises(ToolFault, match=message):
        async with open_mcp_tools(url):
            raise AssertionError("it has tools")


async def test_an_address_where_nothing_listens_is_told_without_its_secrets():
    with ByHand().serve() as (url, _):
        pass
    with trio.fail_after(60), pytest.raises(ToolFault, match="is gone: it cannot be reached: ") as caught:
        async with open_mcp_tools(f"{url}?token=sesame", headers={"x-key": "sesame"}):
            pass
    assert "sesame" not in str(caught.value)


WRONG = {
    "a word": ("stock.py", {}, "an MCP server is 'stock.py', expected the words of a command.* or the address"),
    "another scheme": ("ftp://host/mcp", {}, "expected the words of a command"),
    "no host": ("http:///mcp", {}, "has no host"),
    "no address": ("http://[::1/mcp", {}, "cannot be asked: "),
    "a header": ("http://127.0.0.1:1/mcp", {"headers": {"x": "a\nb"}}, "the header 'x' .* has a line break or no name"),
    "a number": ("http://127.0.0.1:1/mcp", {"headers": {"x": 7}}, "cannot be asked: TypeError in its address or headers"),
    "variables": ("http://127.0.0.1:1/mcp", {"environment": {}}, "environment is given, which an MCP server has that is a command"),
    "headers": ([sys.executable], {"headers": {}}, "headers is given, which an MCP server has that is an address"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_what_the_user_gives_is_checked_before_anything_is_started_or_asked(wrong):
    server, options, message = WRONG[wrong]
    with pytest.raises(ConfigError, match=message):
        async with open_mcp_tools(server, **options):
            pass


@pytest.mark.parametrize("how", ["a status", "an error", "a result", "an end"])
async def test_secrets_of_headers_are_in_nothing_that_a_server_says(how):
    """A server may quote the headers that it was sent."""
    bearer, key = "canary-bearer-of-mcp", "canary-header-of-mcp"
    quoted = f"not allowed: Bearer {bearer} (token {bearer}), {key}"

    def change(message):
        if message["method"] != "tools/call":
            return None
        if how in ("a status", "an end"):
            return 403 if how == "a status" else 404, "text/plain", quoted.encode()
        content = {"content": [{"type": "text", "text": quoted}]}
        answer = {"error": {"code": -1, "message": quoted}} if how == "an error" else {"result": content}
        return 200, "application/json", json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}).encode()

    said = []
    server = ByHand(change)
    with server.serve() as (url, _), trio.fail_after(60):
        try:
            headers = {"Authorization": f"Bearer {bearer}", "X-MCP-Key": key}
            async with open_mcp_tools(url, headers=headers) as tools:
                said.append(await call(tools, text="a"))
        except ToolFault as error:
            said.append(error)
    sent = [headers for _, method, headers in server.seen if method == "tools/call"]
    assert sent[0]["authorization"] == f"Bearer {bearer}" and sent[0]["x-mcp-key"] == key
    assert len(said) == 1 and [secret for secret in (bearer, key) if secret in repr(said)] == [], said
    assert how == "an end" or "***" in str(said[0])


LONG_KEY = "canary-" + "0123456789abcdef" * 6 + "-canary"  # pydantic leaves out the middle of what it quotes
QUOTED = {
    "no JSON": (200, "application/json", LONG_KEY),
    "no kind": (200, f"text/{LONG_KEY}", "a"),
    "no event": (200, "text/event-stream", f"data: {LONG_KEY}\n\n"),
    "another event": (200, "text/event-stream", f"event: {LONG_KEY}\ndata: {{}}\n\n"),
    "a bad notification": (
        200,
        "text/event-stream",
        f'data: {{"jsonrpc": "2.0", "method": "notifications/progress", "params": {{"progressToken": 1, "progress": "{LONG_KEY}"}}}}\n\n',
    ),
    "behind a long text": (403, "text/plain", f"{'not ' * 45}{LONG_KEY}"),
}


@pytest.mark.parametrize("how", QUOTED)
async def test_secrets_that_a_server_quotes_where_they_are_cut_or_logged_are_hidden(how, caplog):
    status, kind, body = QUOTED[how]

    def change(message):
        return (status, kind, body.encode()) if message["method"] == "tools/call" else None

    with ByHand(change).serve() as (url, _), trio.fail_after(60):
        async with open_mcp_tools(url, headers={"X-MCP-Key": LONG_KEY}) as tools:
            with pytest.raises(ToolFault, match=r"the call of say by the MCP server http.* was refused: ") as caught:
                await call(tools, text="a")
    told = f"{caught.value} {caught.value.__cause__} {caplog.text}"
    assert "canary" not in told and caught.value.__cause__ is not None
    assert bool(caplog.records) == (how != "behind a long text")
