"""Tools of an MCP server (Model Context Protocol), which lists tools and carries out calls: a process, over its stdin and stdout, or an
address, over streamable HTTP.

    async with open_mcp_tools([sys.executable, "server.py"]) as tools:
        setting = EpisodeSetting(lambda: ToolEnvironment(tools, grade=grade))

The protocol is that of the package `mcp`, which runs under trio: pip install 'rollouts-rl[mcp]'. A server is not trusted: its messages, its
list of tools and its results have limits, and the environment variables of a process are those that it is given.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio
import trio

from rollouts.checks import check_encodable
from rollouts.environments.tools.environment import cut_middle
from rollouts.environments.tools.tool import Tool
from rollouts.errors import ConfigError, ToolArgumentError, ToolFault, create_value_hider, make_safe, raise_single_errors, redact

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import Client
    from mcp.shared.message import SessionMessage
    from mcp_types import CallToolResult

_MAX_MESSAGE_BYTES = 8 * 2**20  # one message of a server
_MAX_TOOLS = 256
_MAX_PAGES = 64  # one list of a server
_MAX_DESCRIPTION_CHARS = 8192  # a tool, without its schema
_MAX_SCHEMA_CHARS = 32768  # a tool's, as JSON
_KEPT_STDERR_BYTES = 8192
_GRACE_S = 2.0  # for a server to end by itself, once its stdin is closed
_LOGGERS = ("client", "mcp.client.client", "mcp.client.streamable_http", "mcp.shared.jsonrpc_dispatcher")  # mcp quotes servers there
_QUOTED = re.compile(r", input_value=.*?, input_type=\w+", re.S)  # pydantic leaves the middle out, and a secret would not be known


class McpToolError(RuntimeError):
    """Text about a call that failed, mostly the server's, without secrets: the cause of a ToolFault, and what the model is told."""


@dataclass
class McpServer:
    """A server that runs."""

    name: str  # for messages
    child: trio.Process | None = None  # None = it is asked at an address
    hide: Callable[[str], str] = str  # shows secrets that it was given as ***, for whoever reads its texts: users, files, and the model
    stderr: bytearray = field(default_factory=bytearray)  # its end
    flaw: str | None = None  # fault of its output, or of the way to it
    is_deaf: bool = False  # it has closed its stdin
    has_ended: trio.Event = field(default_factory=trio.Event)  # nothing more comes from it
    has_told: trio.Event = field(default_factory=trio.Event)  # its stderr has ended
    is_ready: trio.Event = field(default_factory=trio.Event)
    fault: ToolFault | None = None  # end of the block, if the server caused it

    @property
    def process(self) -> trio.Process:
        assert self.child is not None, f"{self.name} is an address"
        return self.child

    @property
    def is_gone(self) -> bool:
        return self.is_deaf or self.has_ended.is_set()

    def lose(self, flaw: str) -> None:
        """Note that an address cannot be asked any more."""
        self.flaw = self.flaw or flaw
        self.has_ended.set()

    async def describe_end(self) -> str:
        """Return why nothing more comes, once it is gone."""
        if self.child is None:
            return f"the MCP server {self.name} is gone: {self.hide(str(self.flaw))}"
        with trio.move_on_after(0 if self.flaw else _GRACE_S):
            await self.process.wait()
            await self.has_told.wait()
        status = self.process.returncode
        runs_on = f"it closed its {'stdin' if self.is_deaf else 'stdout'} and runs on"
        end = self.flaw or (runs_on if status is None else f"it ended with exit status {status}")
        last = redact(make_safe(self.hide(self.stderr.decode(errors="replace")).strip()[-1000:]))
        return f"the MCP server {self.name} is gone: {end}; the end of its stderr: {last!r}"


@asynccontextmanager
async def open_mcp_tools(
    server: Sequence[str] | str,
    *,
    names: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    directory: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = 30.0,
    start_s: float = 30.0,
    max_result_chars: int = 20000,
) -> AsyncGenerator[tuple[Tool, ...]]:
    """Start an MCP server, or ask one at an address, and give its tools until the block ends. A process is told to end then, and is killed
    with its process group; at an address the session ends.

    All calls in the block go to this one server, however many episodes make them. For a server that keeps a state for each episode, open
    it in the function of an agent: see create_agent_generate_fn.

    Args:
        server: program and arguments, or the address of a server with streamable HTTP, such as "http://127.0.0.1:8000/mcp".
        names: tools to give, in this order; None = all that it lists.
        environment: all variables of the program; None = none, so that it is named by its path. Values of secret ones (API_KEY, HF_TOKEN,
            ...) are shown as *** in all that the server says, those of headers, too.
        directory: its working directory; None = this process's.
        headers: headers of each request to an address, such as {"Authorization": "Bearer ..."}.
        timeout_s: seconds for each call (Tool.timeout_s); None = no deadline.
        start_s: seconds for its start and its list of tools.
        max_result_chars: longer results are cut in the middle, and say so.

    Raises: ConfigError if it cannot be started, has no tool of one of the names, or the package mcp is missing. ToolFault if it is late,
        lists what is no tool, or ends or cannot be reached while the block is open, which cancels the block.
    """
    try:
        importlib.import_module("mcp")
        from rollouts.environments.tools import mcp_http
    except ImportError as error:
        raise ConfigError("tools of MCP servers need the package mcp: pip install 'rollouts-rl[mcp]'") from error
    _check_place(server, environment=environment, directory=directory, headers=headers)
    limits: dict[str, Any] = {"names": names, "timeout_s": timeout_s, "start_s": start_s, "max_result_chars": max_result_chars}
    if isinstance(server, str):
        mcp_http.check_address(server, headers or {})
        found = McpServer(redact(server)[:200], hide=create_value_hider(headers or {}))
        transport = mcp_http.connect(server, headers or {}, _MAX_MESSAGE_BYTES, found.lose, found.hide)
        async with offer_tools(found, transport, **limits) as tools:
            yield tools
        return
    found = await _start(server, environment or {}, directory)
    try:
        async with offer_tools(found, connect_pipes(found), **limits) as tools:
            yield tools
    finally:
        with trio.CancelScope(shield=True):
            await _stop(found)


@asynccontextmanager
async def offer_tools(
    server: McpServer, transport: Any, *, names: Sequence[str] | None, timeout_s: float | None, start_s: float, max_result_chars: int
) -> AsyncGenerator[tuple[Tool, ...]]:
    """Give the tools of a server, until the block or the server ends; arguments and errors as those of open_mcp_tools."""
    from mcp import Client

    client = Client(transport, cache=None)
    with _secrets_hidden_in_log(server.hide), raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, server, start_s, nursery.cancel_scope)
            if server.child is not None:
                nursery.start_soon(_keep_stderr, server)
                nursery.start_soon(_note_exit, server)
            async with AsyncExitStack() as stack:
                listed = await _greet(server, client, stack)
                chosen = _choose(server, listed, names)
                tools = tuple(_create_tool(server, client, one, timeout_s, max_result_chars) for one in chosen)
                server.is_ready.set()
                yield tools
                nursery.cancel_scope.cancel()
    if server.fault is not None:
        raise server.fault


@contextmanager
def _secrets_hidden_in_log(hide: Callable[[str], str]) -> Generator[None]:
    """Show secrets as *** in what the package mcp logs within the block."""

    def change(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = _QUOTED.sub("", "".join(traceback.format_exception(*record.exc_info)).rstrip())
        record.msg, record.args, record.exc_info = hide(record.getMessage()), (), None
        record.exc_text = hide(record.exc_text or "")
        return True

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(change)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(change)


def _check_place(server: Sequence[str] | str, **given: Any) -> None:
    """Raises: ConfigError unless the server is a command or an address, beside options that it has."""
    if isinstance(server, str) and server.lower().startswith(("http://", "https://")):
        foreign = [name for name in ("environment", "directory") if given[name] is not None]
    elif isinstance(server, str) or not server:
        raise ConfigError(
            f"an MCP server is {redact(str(server))!r:.200}, expected the words of a command, such as ['python', 'server.py'], or the "
            "address of a server with streamable HTTP, such as 'http://127.0.0.1:8000/mcp'"
        )
    else:
        foreign = ["headers"] if given["headers"] is not None else []
    if foreign:
        other = "a command" if isinstance(server, str) else "an address"
        raise ConfigError(f"{foreign[0]} is given, which an MCP server has that is {other}: leave it out")


async def _start(command: Sequence[str], environment: Mapping[str, str], directory: str | None) -> McpServer:
    hide = create_value_hider(environment)
    name = redact(hide(shlex.join(command)))[:200]
    pipe = subprocess.PIPE
    try:
        process = await trio.lowlevel.open_process(
            list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=dict(environment), cwd=directory, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the MCP server {name} cannot be started: {error}. Name a program that can be run, by its path") from error
    return McpServer(name, process, hide)


async def _stop(server: McpServer) -> None:
    """End a process: by the end of its input, and after a while by force."""
    process = server.process
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await _get(process.stdin).aclose()
    with trio.move_on_after(0 if server.flaw else _GRACE_S):
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        await trio.aclose_forcefully(_get(stream))


def _get(stream: Any) -> Any:
    assert stream is not None, "the streams of a server are pipes"
    return stream


async def _keep_stderr(server: McpServer) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in _get(server.process.stderr):
            server.stderr += data
            del server.stderr[:-_KEPT_STDERR_BYTES]
    server.has_told.set()


async def _watch(server: McpServer, start_s: float, scope: trio.CancelScope) -> None:
    """End the block when the server ends, or has no list of tools in time."""
    with trio.move_on_after(start_s):
        await server.is_ready.wait()
    if server.is_ready.is_set():
        await server.has_ended.wait()
        server.fault = ToolFault(await server.describe_end())
    else:
        server.fault = ToolFault(f"the MCP server {server.name} listed no tools within {start_s:g} s (start_s)")
    scope.cancel()


async def _note_exit(server: McpServer) -> None:
    await server.process.wait()
    await _cut_off(server)


async def _cut_off(server: McpServer) -> None:
    """Read no more of a server that is gone, after a while for what is on its way: a child of it may hold its stdout open."""
    with trio.move_on_after(_GRACE_S):
        await server.has_ended.wait()
    await _get(server.process.stdout).aclose()


# -- the protocol


@asynccontextmanager
async def connect_pipes(server: McpServer) -> AsyncGenerator[tuple[Any, Any]]:
    """Open the transport of a client to a process: a stream of the server's messages, and one of messages for it."""
    to_client, from_server = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
    to_server, from_client = anyio.create_memory_object_stream["SessionMessage"](0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read, server, to_client)
        nursery.start_soon(_write, server, from_client)
        try:
            yield from_server, to_server
        finally:
            nursery.cancel_scope.cancel()
            for stream in (to_client, from_server, to_server, from_client):
                stream.close()


async def _read(server: McpServer, to_client: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass on the messages of a server, one a line. A line that is no message becomes an exception, which the client leaves out."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    buffer = bytearray()
    try:
        async for data in _get(server.process.stdout):
            buffer += data
            *lines, rest = buffer.split(b"\n") if b"\n" in data else (buffer,)
            buffer = rest
            if len(buffer) > _MAX_MESSAGE_BYTES:
                server.flaw = f"it wrote a line of more than {_MAX_MESSAGE_BYTES:,} bytes"
                return
            for line in lines:
                try:
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(bytes(line), by_name=False))
                except ValueError as error:
                    message = error
                await to_client.send(message)
    except (trio.BrokenResourceError, trio.ClosedResourceError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    finally:
        server.has_ended.set()
        to_client.close()


async def _write(server: McpServer, from_client: MemoryObjectReceiveStream[SessionMessage]) -> None:
    try:
        async for message in from_client:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await _get(server.process.stdin).send_all(f"{text}\n".encode())
    except trio.BrokenResourceError:
        server.is_deaf = True
        from_client.close()  # otherwise a call would wait to be sent
        await _cut_off(server)


async def _greet(server: McpServer, client: Client, stack: AsyncExitStack) -> list[Any]:
    """Return the tools that a server lists, whatever they are. Raises ToolFault."""
    listed: list[Any] = []
    cursor: str | None = None
    try:
        with raise_single_errors():
            await stack.enter_async_context(client)
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            cursor = page.next_cursor
            if cursor is None or len(listed) > _MAX_TOOLS:
                break
    except Exception as error:  # not the cause: a traceback would show it with secrets
        what = f"{type(error).__name__}: {redact(make_safe(server.hide(' '.join(_QUOTED.sub('', str(error)).split()))))[:300]}"
        if server.is_gone:
            raise ToolFault(await server.describe_end()) from McpToolError(what)
        raise ToolFault(f"the MCP server {server.name} lists no tools: {what}") from McpToolError(what)
    if cursor is not None or len(listed) > _MAX_TOOLS:
        raise ToolFault(f"the list of the MCP server {server.name} does not end: {len(listed)} tools in {_MAX_PAGES} pages at most")
    return listed


def _choose(server: McpServer, tools: list[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the tools of these names, of those that a server lists."""
    by_name = {tool.name: tool for tool in tools}
    if len(by_name) != len(tools):
        raise ToolFault(f"the MCP server {server.name} lists tools of one name: {', '.join(tool.name for tool in tools)[:500]}")
    missing = [name for name in names or () if name not in by_name]
    if missing:
        known = ", ".join(by_name)[:500] or "none"
        raise ConfigError(f"names has {missing[0]!r}, which the MCP server {server.name} has not: there are {known}")
    return tools if names is None else [by_name[name] for name in names]


def _create_tool(server: McpServer, client: Client, listed: Any, timeout_s: float | None, max_chars: int) -> Tool:
    """Return a tool of a server's description. Raises ToolFault."""
    where = f"the tool {listed.name!r:.80} of the MCP server {server.name}"
    size = len(json.dumps(listed.input_schema))
    if size > _MAX_SCHEMA_CHARS:
        raise ToolFault(f"{where} has a schema of {size:,} characters, expected at most {_MAX_SCHEMA_CHARS:,}")
    schema = _read_schema(_hide_in(listed.input_schema, server.hide), f"the schema of {where}")
    if not listed.name or len(listed.name) > 128 or any(character.isspace() for character in listed.name):
        raise ToolFault(f"{where} has a name that models cannot call, expected 1 to 128 characters without white space")
    return Tool(
        name=listed.name,
        function=partial(_call, server, client, listed.name, max_chars),
        description=cut_middle(server.hide(listed.description or ""), _MAX_DESCRIPTION_CHARS),
        parameters=schema,
        timeout_s=timeout_s,
        in_thread=False,
    )


def _hide_in(value: Any, hide: Callable[[str], str]) -> Any:
    """Return JSON with hidden secrets in its texts."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hide(name): _hide_in(inner, hide) for name, inner in cast("Mapping[str, Any]", value).items()}
    return [_hide_in(inner, hide) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def _read_schema(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON schema as tools have it: what is read of it has the types that are expected, the rest is for the model alone."""
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise ToolFault(f"{where} has {value!r:.100}, expected a JSON schema, an object")
    schema = dict(cast("Mapping[str, Any]", value))
    kinds: dict[str, Any] = {"properties": Mapping, "required": list, "enum": list, "anyOf": list}
    for key, kind in kinds.items():
        if key in schema and not isinstance(schema[key], kind):
            raise ToolFault(f"{where} has {key} = {schema[key]!r:.100}, expected {'an object' if kind is Mapping else 'a list'}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise ToolFault(f"{where} has required = {schema['required']!r:.100}, expected a list of names")
    if "properties" in schema:
        schema["properties"] = {name: _read_schema(entry, where) for name, entry in schema["properties"].items()}
    if "anyOf" in schema:
        schema["anyOf"] = [_read_schema(entry, where) for entry in schema["anyOf"]] or [{}]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key, False), Mapping):
            schema[key] = _read_schema(schema[key], where)
    if not isinstance(schema.get("items", {}), Mapping):
        del schema["items"]  # schemas by position, which are not checked
    return schema


async def _call(server: McpServer, client: Client, name: str, max_chars: int, /, **arguments: Any) -> str:
    """Carry out a call. Raises ToolArgumentError for what the server says of its arguments, ToolFault for what else goes wrong."""
    from mcp import MCPError
    from mcp_types import INVALID_PARAMS

    where = f"the call of {name} by the MCP server {server.name}"
    try:
        check_encodable(arguments)
    except ValueError as error:
        raise ToolArgumentError(f"the arguments of {name} cannot be sent: {error}") from error
    try:
        result = await client.call_tool(name, arguments)
    except MCPError as error:
        found = _QUOTED.sub("", error.message) if error.message.startswith("Failed to parse ") else error.message  # by mcp, or the server's
        text = cut_middle(server.hide(found), max_chars)
        if server.is_gone:
            raise ToolFault(await server.describe_end()) from McpToolError(text)
        if error.code == INVALID_PARAMS:
            raise ToolArgumentError(text) from McpToolError(text)
        raise ToolFault(f"{where} was refused: {redact(text)!r:.500}") from McpToolError(text)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
        raise ToolFault(await server.describe_end()) from error
    except ValueError as error:  # pydantic's
        text = cut_middle(server.hide(_QUOTED.sub("", str(error))), max_chars)
        raise ToolFault(f"{where} came to what is no result: {redact(text)!r:.500}") from McpToolError(text)
    text = cut_middle(server.hide(_show(result)), max_chars)
    if result.is_error:
        raise ToolFault(f"{where} failed: {redact(text)!r:.500}") from McpToolError(text)
    return text


def _show(result: CallToolResult) -> str:
    """Return the text of a result; other parts, such as pictures, are named."""
    parts: list[str] = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and (text := getattr(block.resource, "text", None)) is not None:
            parts.append(str(text))
        else:
            parts.append(f"({block.type} left out)")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
