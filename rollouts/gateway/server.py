"""A gateway: an HTTP server over an inference engine that speaks the APIs of chat programs, and records what was sampled, by session.

async with open_gateway(engine, tokenizer) as gateway:
    client = openai.OpenAI(base_url=gateway.url("task-7"), api_key="any")     # any program, in any process
    ...
    (sample,) = gateway.take_samples("task-7")
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl
from uuid import uuid4

import trio

from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, raise_single_errors
from rollouts.gateway.answering import Answerer, Prepared
from rollouts.gateway.cassettes.tapes import Tapes, find_engines, open_tapes
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.dialects.anthropic_messages import ANTHROPIC_COUNT, ANTHROPIC_MESSAGES
from rollouts.gateway.dialects.dialect import Dialect, dump, write_openai_refusal
from rollouts.gateway.dialects.fields import refuse, refuse_unsupported
from rollouts.gateway.dialects.openai_chat import OPENAI_CHAT
from rollouts.gateway.dialects.openai_completions import OPENAI_COMPLETIONS
from rollouts.gateway.dialects.openai_responses import OPENAI_RESPONSES
from rollouts.gateway.http.access import check_access, check_key, digest_api_key, is_key, read_secret, split_path
from rollouts.gateway.http.connections import Connection, HTTPEvents, HTTPRequest, HTTPResponse, SendText
from rollouts.gateway.http.listening import listen, serve_connection
from rollouts.gateway.refusals import Refusal, parse_body
from rollouts.gateway.requests import Answered, GatewayRequest, insert_history, reply_message
from rollouts.gateway.samples import Rows, answers_to_samples
from rollouts.gateway.sampling import refuse_faults
from rollouts.gateway.sessions import Session, Stored
from rollouts.outcomes import StopReason
from rollouts.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIALECTS: Mapping[str, Dialect] = MappingProxyType({
    "/v1/chat/completions": OPENAI_CHAT,
    "/v1/completions": OPENAI_COMPLETIONS,
    "/v1/responses": OPENAI_RESPONSES,
    "/v1/messages": ANTHROPIC_MESSAGES,
    "/v1/messages/count_tokens": ANTHROPIC_COUNT,
})  # fmt: skip
"""Dialects by the end of their paths."""

_logger = logging.getLogger(__name__)


class Gateway:
    """State of a gateway: its sessions, its formats and its places for requests. Made by open_gateway."""

    def __init__(
        self, engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase, config: GatewayConfig, tapes: Tapes | None = None
    ) -> None:
        """Args: see open_gateway. tapes: cassettes of sessions; None = there are none."""
        self.config = config
        self.port = config.port
        self._engines, self._tapes = tuple(engines), tapes
        self._answerer = Answerer(tokenizer, config)
        self._sessions: dict[str, Session] = {}
        self._numbers = count()  # for sessions without a key
        self._name = uuid4().hex[:8]  # in ids of requests: an engine may serve several gateways
        self._counts: Counter[str] = Counter()

    def url(self, session: str | None = None, *, api: str = "openai") -> str:
        """Return the base address for a client: of OpenAI's (with /v1) or Anthropic's (api="anthropic", without).

        Args:
            session: key of a session; None = the API key that the client sends names its session.
        """
        if session is not None:
            check_key(session)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        path = "" if session is None else f"/sessions/{session}"
        return f"http://{host}:{self.port}{path}" + ("/v1" if api == "openai" else "")

    def open_session(self, key: str | None = None, *, engine: InferenceEngine | None = None, **options: Any) -> Session:
        """Begin a session.

        Args:
            key: its name: letters, digits and _ . ~ -, at most 200; None = one that nobody can guess.
            engine: engine of its answers; None = the gateway's, in turn.
            options: see Session: seed, params, max_answers, max_tokens, note_request, is_interruptible.

        Raises: ConfigError for another key, or one that is taken.
        """
        number = next(self._numbers)
        options.setdefault("seed", number if key is None else int.from_bytes(key.encode(), "big"))
        name = f"seed-{options['seed']}" if key is None else key  # a key that nobody can guess is in no file
        key = uuid4().hex if key is None else key
        check_key(key)
        if key in self._sessions:
            raise ConfigError(f"the gateway has a session {key!r} already: take_samples ends it, or choose another key")
        session = Session(
            key=key,
            request_prefix=f"{self._name}-{number}",
            engine=self._engines[number % len(self._engines)] if engine is None else engine,
            tape=None if self._tapes is None else self._tapes.open(name),
            **options,
        )
        self._sessions[key] = session
        return session

    @property
    def sessions(self) -> Mapping[str, Session]:
        """Open sessions by key."""
        return MappingProxyType(self._sessions)

    def take_samples(
        self, session: str, *, pending: Sample | None = None, rows: Rows = "session", stop_reason: StopReason | None = None
    ) -> tuple[Sample, ...]:
        """End a session and return its samples; () if it has no answer.

        Requests in flight are cancelled and refused (410). The key is free again afterwards.

        Args:
            session: key of the session.
            pending: sample to fill, with prompt, indices and metadata; None = an empty one.
            rows: "session" = one sample of all contexts; "contexts" = one of each.
            stop_reason: end of the session; None = MAX_TURNS if a request was refused because a limit was reached, else AGENT.

        Raises: ConfigError if there is no such session.
        """
        found = self._find_open(session)
        del self._sessions[session]
        found.close()
        self._counts.update(found.counts)
        reason = stop_reason or (StopReason.MAX_TURNS if found.is_spent else StopReason.AGENT)
        return answers_to_samples(tuple(found.answers.values()), pending, rows=rows, stop_reason=reason)

    def find_difference(self, session: str) -> str | None:
        """Return the first difference between an open session and its recording in GatewayConfig.cassette; None = there is none so far.

        A recorded request that was not sent is one, too. Raises ConfigError if there is no such session, or no cassette.
        """
        found = self._find_open(session)
        if found.tape is None or self.config.cassette is None:
            raise ConfigError("the gateway replays no recording: give it one with GatewayConfig.cassette (--cassette)")
        return found.tape.find_difference()

    def _find_open(self, session: str) -> Session:
        found = self._sessions.get(session)
        if found is None:
            raise ConfigError(f"the gateway has no session {session!r}; open ones are {sorted(self._sessions)[:20]}")
        return found

    def count(self) -> Mapping[str, int]:
        """Return counts over all sessions: num_requests, num_cancelled, num_undelivered, num_refused, num_sessions, num_in_flight."""
        total = Counter(self._counts)
        for session in self._sessions.values():
            total.update(session.counts)
        total["num_sessions"] = len(self._sessions)
        total["num_in_flight"] = self._answerer.num_in_flight
        return dict(total)

    async def forget_idle(self) -> None:
        """Forget sessions that have had no request for config.idle_s, again and again."""
        idle_s = self.config.idle_s
        while idle_s is not None:
            await trio.sleep(idle_s / 4)
            for session in list(self._sessions.values()):
                if not session.num_in_flight and trio.current_time() - session.used_at > idle_s:
                    self._counts.update(self._sessions.pop(session.key).counts)
                    session.close()

    # -- requests

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer the requests of a connection until it ends."""
        await serve_connection(stream, self._answer_all, max_body_bytes=self.config.max_body_bytes, server="gateway")

    async def _answer_all(self, connection: Connection) -> None:
        """Answer the requests of a connection. Raises what ends it."""
        while not connection.is_over:
            try:
                request = await connection.receive(self._check_access)
            except Refusal as refusal:
                key, path = split_path(connection.request.path)
                self._count_refused(self._sessions.get(key or ""))
                dialect = DIALECTS.get(path)
                write = write_openai_refusal if dialect is None else dialect.write_refusal
                return await connection.refuse(_refuse(refusal, write))
            if request is None:
                return None
            with connection.cancel_when_client_leaves():
                answer = await self._handle(request)
                if isinstance(answer, HTTPEvents):
                    await connection.send_events(answer)
                else:
                    await connection.send(answer)
        return None

    async def _handle(self, http: HTTPRequest) -> HTTPResponse | HTTPEvents:
        """Return the answer to one HTTP request."""
        key, path = split_path(http.path)
        dialect = DIALECTS.get(path)
        write = write_openai_refusal if dialect is None else dialect.write_refusal
        session: Session | None = None
        try:
            key, is_named = self._name_key(http, key)
            if dialect is None:
                return self._answer_other(http, path, self._sessions.get(key))
            if http.method != "POST":
                raise Refusal(405, f"{path} takes POST, not {http.method}", code="method_not_allowed")
            with refuse_faults():
                request = dialect.read(parse_body(http.body))
            session = self._find_session(key, is_named)
            session.used_at = trio.current_time()  # also where no engine is asked
            with refuse_faults(session):
                return await self._reply(dialect, session, request)
        except Refusal as refusal:
            self._count_refused(session or self._sessions.get(key or ""))  # one that could not be read is its session's all the same
            return _refuse(refusal, write)

    async def _reply(self, dialect: Dialect, session: Session, request: GatewayRequest) -> HTTPResponse | HTTPEvents:
        """Return the answer to a request for completions. Raises Refusal."""
        if request.instructions is not None or request.previous is not None:
            history = () if request.previous is None else _find_stored(session, request.previous, 400).collect_history()
            request = insert_history(request, history)
        if request.answered_calls:
            _check_calls(session, request)
        prepared = self._answerer.prepare(session, request)
        if request.is_dry:
            return HTTPResponse(body=dump({"input_tokens": len(prepared.plan.tokens)}).encode())
        if request.stream:
            return HTTPEvents(
                produce=partial(self._stream, dialect, session, prepared),
                refuse=partial(_refuse, write=dialect.write_refusal),
                describe=dialect.write_late_refusal,
            )
        answered = await self._answerer.answer(session, prepared)
        try:
            body = dump(dialect.write(request, answered)).encode()
            _store(dialect, session, prepared.request, answered)
        except BaseException:
            session.forget(answered.numbers)
            raise
        return HTTPResponse(body=body, on_failure=partial(session.forget, answered.numbers))

    def _count_refused(self, session: Session | None) -> None:
        (self._counts if session is None else session.counts)["num_refused"] += 1

    def _check_access(self, http: HTTPRequest) -> None:
        check_access(http, self.config.token)

    def _name_key(self, http: HTTPRequest, key: str | None) -> tuple[str, bool]:
        """Return the key of the request's session, of its path or its API key, and whether it names one expressly. Raises Refusal (404)."""
        secret = read_secret(http)
        if key is not None:
            return key, True
        if self.config.token is None:
            name = self.name_session(secret)
            return name, name in self._sessions
        rest = secret.partition(":")[2]
        if rest and not is_key(rest):
            raise Refusal(404, "the API key names no session behind its colon: letters, digits and _ . ~ -", code="session_not_found")
        return rest or "default", bool(rest)

    def name_session(self, api_key: str) -> str:
        """Return the key of the session of requests that name it by their API key alone: of an open one the key itself, else a digest."""
        if api_key in self._sessions:
            return api_key
        return digest_api_key(api_key) if api_key else "default"

    def _find_session(self, key: str, is_named: bool) -> Session:
        """Return a session, begun if need be, or one that is not kept. Raises Refusal (404)."""
        session = self._sessions.get(key)
        if session is None and not is_named and self.config.begins_sessions and not self.config.records_unnamed:
            number = next(self._numbers)
            engine = self._engines[number % len(self._engines)]
            return Session(key=key, request_prefix=f"{self._name}-{number}", engine=engine, seed=number, counts=self._counts)
        if session is None:
            if not self.config.begins_sessions:
                raise Refusal(404, f"there is no session {key!r}: it has ended, or was never begun", code="session_not_found")
            if not is_key(key):
                raise Refusal(404, f"{key[:50]!r} is no key of a session: letters, digits and _ . ~ -", code="session_not_found")
            session = self.open_session(key)
        return session

    def _answer_other(self, http: HTTPRequest, path: str, session: Session | None) -> HTTPResponse:
        is_read = http.method in ("GET", "HEAD")
        if is_read and path == "/v1/models":
            model = {"id": self.config.model_name, "object": "model", "created": 0, "owned_by": "rollouts"}
            return HTTPResponse(body=dump({"object": "list", "data": [model]}).encode())
        if is_read and path in ("/health", "/v1/health"):
            return HTTPResponse(body=dump({"status": "ok", **self.count()}).encode())
        name = path.removeprefix("/v1/responses/")
        if name != path and "/" not in name and (is_read or http.method == "DELETE"):
            found = _find_stored(session, name, 404)
            _check_query(http)
            if session is not None and http.method == "DELETE":
                del session.stored[name]
                return HTTPResponse(body=dump({"id": name, "object": "response", "deleted": True}).encode())
            return HTTPResponse(body=dump(found.body).encode())
        raise Refusal(404, f"{http.method} {path[:100]} is nothing that this gateway serves: {', '.join(DIALECTS)}", code="not_found")

    async def _stream(self, dialect: Dialect, session: Session, prepared: Prepared, send: SendText) -> None:
        """Send an answer as events; comments while there is none yet, so that clients and proxies keep the connection."""
        answered: Answered | None = None
        sending = trio.Lock()  # a comment is sent whole or not at all
        try:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_ping, send, self.config.ping_s, sending)
                    with refuse_faults(session):
                        answered = await self._answerer.answer(session, prepared)
                    async with sending:
                        nursery.cancel_scope.cancel()
            with refuse_faults(session):
                text = "".join(f"{event}\n\n" for event in dialect.write_events(prepared.request, answered))
                _store(dialect, session, prepared.request, answered)
            await send(text)
        except BaseException as error:
            if isinstance(error, Refusal):  # the connection answers with it, and _handle does not see it
                self._count_refused(session)
            session.forget(() if answered is None else answered.numbers)
            raise


@asynccontextmanager
async def open_gateway(
    engine: InferenceEngine | Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    config: GatewayConfig | None = None,
    **settings: Any,
) -> AsyncGenerator[Gateway]:
    """Serve an engine until the block ends; requests in flight are then cancelled.

    Args:
        engine: any InferenceEngine, a fleet included; or several, whose sessions take turns; or (), with config.cassette, for none.
        tokenizer: the engine's.
        config: settings; None = GatewayConfig(**settings).
        settings: fields of GatewayConfig, instead of config.

    Raises: ConfigError for settings that cannot be used, such as an address that is taken; DataError for a chat template or a cassette that
        cannot; OutputError for a file of config.record that cannot be written.
    """
    assert config is None or not settings, "pass a config or settings, not both"
    config = config or GatewayConfig(**settings)
    engines: Sequence[InferenceEngine] = engine if isinstance(engine, Sequence) else (engine,)
    async with serve_sessions(find_engines(engines, config), tokenizer, config, open_tapes(config)) as gateway:
        yield gateway


@asynccontextmanager
async def serve_sessions(
    engines: Sequence[InferenceEngine], tokenizer: PreTrainedTokenizerBase, config: GatewayConfig, tapes: Tapes | None
) -> AsyncGenerator[Gateway]:
    """Serve engines until the block ends, with cassettes that other gateways may use, too. Raises ConfigError, DataError."""
    gateway = Gateway(engines, tokenizer, config, tapes)
    listeners = await listen(config, "gateway")
    gateway.port = listeners[0].socket.getsockname()[1]
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.serve_listeners, gateway.serve, listeners, handler_nursery=nursery))
            nursery.start_soon(gateway.forget_idle)
            _logger.info("the gateway listens on %s", gateway.url())
            yield gateway
            nursery.cancel_scope.cancel()


def _find_stored(session: Session | None, name: str, status: int) -> Stored:
    """Return an answer that a session keeps. Raises Refusal with this status."""
    found = None if session is None else session.stored.get(name)
    if found is None:
        message = f"the session keeps no response {name!r:.100}: it was of another session, was sent with store = false, or is deleted"
        field = "previous_response_id" if status == 400 else None  # an address has no field that is at fault
        raise Refusal(status, message, param=field, code="previous_response_not_found" if field else "response_not_found")
    return found


def _check_query(http: HTTPRequest) -> None:
    """Raise Refusal (400) for a query that asks for the events of a kept response: to a client that waits for them its JSON has none."""
    for name, value in parse_qsl(http.query):
        if name == "stream" and value.lower() not in ("false", "0"):
            raise refuse_unsupported("stream", value, "a response that is kept has no events any more: ask for it without")


def _check_calls(session: Session, request: GatewayRequest) -> None:
    """Raise Refusal (400) for the output of a call that nobody made."""
    known = session.call_ids | {call.get("id") for message in request.messages for call in message.tool_calls or ()}
    for call_id, where in request.answered_calls.items():
        if call_id not in known:
            raise refuse(where, call_id, "the id of a call: neither the request nor its session has this one")


def _store(dialect: Dialect, session: Session, request: GatewayRequest, answered: Answered) -> None:
    """Keep an answer that later requests may name, if it is to be kept."""
    if dialect.name_stored is not None and request.is_stored:
        reply = answered.replies[0]
        session.stored[dialect.name_stored(answered)] = Stored(
            answer=session.answers[reply.number],
            reply=reply_message(reply),
            has_instructions=request.instructions is not None,
            body=dialect.write(request, answered),
        )


async def _ping(send: SendText, interval_s: float, sending: trio.Lock) -> None:
    while True:
        await trio.sleep(interval_s)
        async with sending:
            await send(": waiting for the engine\n\n")


def _refuse(refusal: Refusal, write: Callable[[Refusal], Mapping[str, Any]]) -> HTTPResponse:
    headers = (("retry-after", "1"),) if refusal.status == 429 else ()
    headers += (("allow", "POST"),) if refusal.status == 405 else ()
    return HTTPResponse(status=refusal.status, body=dump(write(refusal)).encode(), headers=headers)
