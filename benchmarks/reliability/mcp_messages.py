"""Messages of an MCP server as bytes: the client of rollouts.environments.tools.mcp lists its tools and calls one, without a process."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, cast

import trio
import trio.testing

from rollouts.environments.tools.mcp import McpServer, connect_pipes, offer_tools
from rollouts.environments.tools.tool import call_tool
from rollouts.errors import raise_single_errors

_TOOL = {
    "name": "say", "description": "Say it.", "inputSchema": {
        "type": "object", "required": ["text"], "additionalProperties": False,
        "properties": {"text": {"type": "string"}, "n": {"anyOf": [{"type": "integer"}, {"enum": [1, "a"]}]}, "l": {"items": {}}},
    },
}  # fmt: skip
_PARTS = [
    {"type": "text", "text": "a"}, {"type": "image", "data": "AAAA", "mimeType": "image/png"},
    {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
]  # fmt: skip
_INFO = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
_NEWEST = {"resultType": "complete", "cacheScope": "private", "ttlMs": 0}  # what results have in the newest version of the protocol
_FOUND = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, **_NEWEST}


def _message(number: int, **content: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, **content}


_ERROR = {"code": -32602, "message": "no such text", "data": {"a": [1]}}
USUAL: Mapping[str, tuple[dict[str, Any], ...]] = {
    "server/discover": (_message(1, error={"code": -32601, "message": "no such method"}), _message(1, result=_FOUND)),
    "initialize": (_message(2, result=_INFO),),
    "tools/list": (_message(3, result={"tools": [_TOOL], **_NEWEST}), _message(3, result={"tools": [_TOOL], "nextCursor": "again"})),
    "tools/call": (
        _message(4, result={"content": _PARTS, "isError": False, **_NEWEST}),
        _message(4, result={"content": [], "structuredContent": {"a": 1}}),
        _message(4, error=_ERROR), {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"},
        {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": 4, "progress": 0.5, "total": 1, "message": "m"}},
        {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "logger": "l", "data": {"a": 1}}},
        _message(7, method="ping"), _message(7, method="sampling/createMessage", params={"messages": [], "maxTokens": 1}),
    ),
}  # fmt: skip
"""Messages with which a server may answer each request, the first one the usual; `mcp` numbers its requests from 1."""
IS_INSTALLED = importlib.util.find_spec("mcp") is not None


class _Process:
    """The pipes of a server that runs until it is left."""

    returncode = None

    def __init__(self) -> None:
        self.stdin, self.requests = trio.testing.memory_stream_one_way_pair()
        self.answers, self.stdout = trio.testing.memory_stream_one_way_pair()
        self.stderr = trio.testing.memory_stream_one_way_pair()[1]

    async def wait(self) -> None:
        await trio.sleep_forever()


async def _answer(process: _Process, method: str, data: bytes) -> None:
    """Answer each request with its usual message, those of one method with these bytes in front of it."""
    buffer = bytearray()
    async for some in process.requests:
        buffer += some
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            request = json.loads(line)
            if request.get("method") == method:
                await process.answers.send_all(data + b"\n")
            if request.get("method") in USUAL:
                usual = json.dumps({**USUAL[request["method"]][0], "id": request["id"]})
                await process.answers.send_all(f"{usual}\n".encode())


async def _converse(method: str, data: bytes) -> str:
    process = _Process()
    server = McpServer("a server", cast("trio.Process", process))
    text = ""
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_answer, process, method, data)
            async with offer_tools(server, connect_pipes(server), names=None, timeout_s=5.0, start_s=5.0, max_result_chars=1000) as tools:
                text = await call_tool(tools[0], {"text": "a"}) if tools else ""
            nursery.cancel_scope.cancel()
    return text


def converse(method: str, data: bytes) -> str:
    """List the tools of a server and call one. Returns what it says; "" of a server without tools.

    Args:
        method: request that is answered by `data`, and the usual message behind them; times are virtual.

    Raises: as open_mcp_tools and call_tool.
    """
    return trio.run(_converse, method, data, clock=trio.testing.MockClock(autojump_threshold=0))
