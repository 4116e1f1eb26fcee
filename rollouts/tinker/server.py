"""A Tinker-compatible server: a model behind the HTTP API of the tinker client.

async with open_tinker_server(model, tokenizer) as server:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-any")     # any program, in any process
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from rollouts.errors import CheckpointError, ConfigError, DataError, raise_single_errors, redact
from rollouts.gateway.dialects.fields import Fields
from rollouts.gateway.http.access import check_access
from rollouts.gateway.http.connections import Connection, HTTPRequest, HTTPResponse
from rollouts.gateway.http.listening import listen, serve_connection
from rollouts.gateway.refusals import Refusal, parse_body
from rollouts.tinker.config import TinkerConfig
from rollouts.tinker.service import Service
from rollouts.tinker.wire.messages import PROTOBUF, PassRequest, read_pass_request
from rollouts.tinker.wire.requests import (
    ModelRequest,
    SampleRequest,
    check_optimizer,
    read_adam_params,
    read_model_request,
    read_sample_request,
    read_seq_id,
)
from rollouts.tinker.wire.results import Outcome, PendingResult, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Read: TypeAlias = "Callable[[HTTPRequest], Any]"
"""Reads a request; in a thread of its own if its body is large."""

Answer: TypeAlias = "Callable[[Service, Any], Outcome]"
"""Answers what was read, at once."""

API = "/api/v1/"
_LARGE = 2**16  # bytes of a body from which it is read in a thread, so that others do not wait for it
_WITHOUT_OUTPUT_LAYER = (
    "this is a server of rollouts-rl: its LoRA adapters are on the linear layers below the output layer, so train_unembed has no effect"
)
_SAVES = "save_weights_for_sampler writes a Hugging Face directory below the server's, adapters merged"
UNSUPPORTED: Mapping[str, str] = MappingProxyType({
    "create_custom_loss": "forward_backward_custom with a Python function runs the loss in the client",
    "save_weights_external": _SAVES,
    "copy_weights": "copy the directory",
    "retrieve_futures": "ask for results one by one, as client/config says",
    "join_sampling_session": "client/config says that it is off",
    "auth/token": "this server takes API keys as they are",
    "training_runs": _SAVES,
    "checkpoints": "look into the server's directory",
    "sessions": "sessions are kept in memory alone",
})  # fmt: skip
"""Parts of the API that are not served, with what to do instead."""

_logger = logging.getLogger(__name__)


class TinkerServer:
    """A server that runs. Made by open_tinker_server."""

    def __init__(self, service: Service) -> None:
        self.config = service.config
        self.port = service.config.port
        self._service = service

    @property
    def url(self) -> str:
        """Address for clients: tinker.ServiceClient(base_url=...), or TINKER_BASE_URL."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer the requests of a connection until it ends."""
        await serve_connection(stream, self._answer_all, max_body_bytes=self.config.max_body_bytes, server="server")

    async def _answer_all(self, connection: Connection) -> None:
        """Answer the requests of a connection. Raises what ends it."""
        while not connection.is_over:
            try:
                request = await connection.receive(self._check_access)
            except Refusal as refusal:
                return await connection.refuse(_refuse(refusal))
            if request is None:
                return None
            with connection.cancel_when_client_leaves():
                await connection.send(await self._handle(request))
        return None

    def _check_access(self, http: HTTPRequest) -> None:
        check_access(http, self.config.token)

    async def _handle(self, http: HTTPRequest) -> HTTPResponse:
        """Return the answer to one HTTP request."""
        try:
            with _refuse_errors():
                if http.path == f"{API}retrieve_future":
                    return await self._retrieve(Fields(parse_body(http.body)))
                read, answer = find_answer(http)
                if len(http.body) < _LARGE:
                    found = read(http)
                else:
                    found = await trio.to_thread.run_sync(read, http)
                    await trio.lowlevel.checkpoint_if_cancelled()  # the service may have ended meanwhile
                outcome = answer(self._service, found)
                return HTTPResponse(body=outcome.body, content_type=outcome.content_type)
        except Refusal as refusal:
            return _refuse(refusal)

    async def _retrieve(self, body: Fields) -> HTTPResponse:
        """Wait for a result, for a while; 408 tells the client to ask again."""
        request_id = body.need_text("request_id")
        pending = self._service.results.find(request_id)
        if pending is None:
            raise Refusal(404, f"there is no request {request_id!r:.200}, or its result is kept no longer", code="request_not_found")
        with trio.move_on_after(self.config.poll_s):
            await pending.finished.wait()
        if pending.outcome is None:
            waiting = write_json({"type": "try_again", "request_id": request_id, "queue_state": "active"})
            return HTTPResponse(status=408, body=waiting.body)
        self._service.results.note_read(pending)
        return HTTPResponse(body=pending.outcome.body, content_type=pending.outcome.content_type)


def find_answer(http: HTTPRequest) -> tuple[Read, Answer]:
    """Return what reads and what answers a request. Raises Refusal: 404 by the name of what is not served, 405 for another method, 415."""
    name = http.path.removeprefix(API)
    answer = ANSWERS.get((http.method, name))
    if answer is None and http.path.startswith(API):
        first, _, rest = name.partition("/")
        if http.method == "GET" and first == "samplers" and rest:
            return _read_nothing, partial(_describe_sampler, sampler_id=rest)
        if http.method == "POST" and first == "sessions" and rest.endswith("/finish"):
            return _read_nothing, partial(_end_session, session_id=rest.removesuffix("/finish"))
        advice = UNSUPPORTED.get(name, UNSUPPORTED.get(first))
        if advice is not None:
            raise Refusal(404, f"{name[:200]} is not supported by this server: {advice}", code="not_supported")
        methods = [method for method, known in ANSWERS if known == name]
        if methods:
            raise Refusal(405, f"{name} takes {methods[0]}, not {http.method}", code="method_not_allowed")
    if answer is None:
        raise Refusal(404, f"{http.method} {http.path[:200]} is nothing that this server serves", code="not_found")
    return answer


@asynccontextmanager
async def open_tinker_server(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, config: TinkerConfig | None = None, **settings: Any
) -> AsyncGenerator[TinkerServer]:
    """Serve a model to the tinker client until the block ends; work in progress is then dropped.

    Args:
        model: causal language model that clients train and sample from; it stays as it is, since each client trains adapters, or a copy.
        tokenizer: its tokenizer, for stop strings and for what is saved; None = there are neither.
        config: settings; None = TinkerConfig(**settings).
        settings: fields of TinkerConfig, instead of config.

    Raises: ConfigError for settings that cannot be used, such as an address that is taken.
    """
    assert config is None or not settings, "pass a config or settings, not both"
    config = config or TinkerConfig(**settings)
    server = TinkerServer(service := Service(model, tokenizer, config))
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            listeners = await listen(config, "server")  # last: whoever is cancelled behind it has a task that closes them
            server.port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(partial(trio.serve_listeners, server.serve, listeners, handler_nursery=nursery))
            _logger.info("the server listens on %s", server.url)
            yield server
            nursery.cancel_scope.cancel()


# -- requests


def _read_nothing(http: HTTPRequest) -> None:
    """Leave a body alone, if there is one."""


def _read(http: HTTPRequest) -> Fields:
    return Fields(parse_body(http.body))


def _read_model(http: HTTPRequest) -> ModelRequest:
    return read_model_request(_read(http))


def _read_sample(http: HTTPRequest) -> SampleRequest:
    return read_sample_request(_read(http))


def _read_pass(http: HTTPRequest) -> PassRequest:
    kind, encoding = http.headers.get("content-type", ""), http.headers.get("content-encoding", "")
    if not kind.startswith(PROTOBUF) or encoding not in ("", "identity"):
        message = f"forward_backward has the type {kind!r:.100} and the encoding {encoding!r:.100}, expected {PROTOBUF} without compression"
        raise Refusal(415, message, code="unsupported_media_type")
    return read_pass_request(http.body)


# -- answers


def _promise(pending: PendingResult, model_id: str | None = None) -> Outcome:
    ids = list(pending.sequence_ids) or None
    return write_json({"request_id": pending.request_id, "model_id": model_id, "sample_sequence_ids": ids})


def _check_health(service: Service, _: None) -> Outcome:
    return write_json({"status": "ok"})


def _describe_server(service: Service, _: None) -> Outcome:
    name = service.config.model_name
    most = service.find_context_length()
    model = {"model_name": name, "max_context_length": most, "trainable": True, "sampleable": True}
    return write_json({"supported_models": [model]})


def _configure_client(service: Service, _: None) -> Outcome:
    return write_json({"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False, "use_pyqwest_transport": False})


def _configure_again(service: Service, _: None) -> Outcome:
    return write_json({"sample_cancel_enabled": True})


def _begin_session(service: Service, _: None) -> Outcome:
    session_id = service.begin_session()
    return write_json({"type": "create_session", "session_id": session_id, "warning_message": _WITHOUT_OUTPUT_LAYER})


def _hear(service: Service, body: Fields) -> Outcome:
    service.find_session(body.need_text("session_id"))
    return write_json({"type": "session_heartbeat"})


def _end_session(service: Service, _: None, *, session_id: str) -> Outcome:
    service.end_session(session_id, "its client has finished it")
    return write_json({})


def _take_telemetry(service: Service, _: None) -> Outcome:
    return write_json({"status": "accepted"})  # and kept nowhere


def _create_model(service: Service, request: ModelRequest) -> Outcome:
    return _promise(service.begin_model(request))


def _unload_model(service: Service, body: Fields) -> Outcome:
    return _promise(service.unload(body.need_text("model_id")))


def _get_info(service: Service, body: Fields) -> Outcome:
    return write_json(service.describe_model(body.need_text("model_id")))


def _forward_backward(service: Service, request: PassRequest) -> Outcome:
    with service.keep_turn(request.model_id, request.seq_id, spoils=not request.forward_only):
        return _promise(service.run_pass(request), request.model_id)


def _in_turn(service: Service, body: Fields, submit: Callable[[str, int], PendingResult], *, spoils: bool = False) -> Outcome:
    """Submit a request of a model in training under its number."""
    model_id, seq_id = body.need_text("model_id"), read_seq_id(body)
    with service.keep_turn(model_id, seq_id, spoils=spoils):
        return _promise(submit(model_id, seq_id), model_id)


def _optim_step(service: Service, body: Fields) -> Outcome:
    return _in_turn(service, body, lambda model_id, seq_id: service.update(model_id, seq_id, read_adam_params(body)), spoils=True)


def _save_weights(service: Service, body: Fields) -> Outcome:
    def submit(model_id: str, seq_id: int) -> PendingResult:
        metadata = body.read_object("user_metadata").values
        return service.save_state(model_id, seq_id, body.need_text("path"), overwrite=body.read_flag("overwrite"), user_metadata=metadata)

    return _in_turn(service, body, submit)


def _load_weights(service: Service, body: Fields) -> Outcome:
    if body.get("session_id") is not None:
        path, optimizer = body.need_text("path"), body.read_flag("optimizer")
        return _promise(service.begin_from_saved(read_model_request(body), path, optimizer=optimizer))

    def submit(model_id: str, seq_id: int) -> PendingResult:
        check_optimizer(body)
        return service.load_state(model_id, seq_id, body.need_text("path"), optimizer=body.read_flag("optimizer"))

    return _in_turn(service, body, submit)


def _save_for_sampler(service: Service, body: Fields) -> Outcome:
    def submit(model_id: str, seq_id: int) -> PendingResult:
        if body.get("kind", "snapshot") != "snapshot":
            raise body.refuse_unsupported("kind", "this server has snapshot: weights of a sampling client do not change")
        return service.save_for_sampler(model_id, seq_id, body.read_text("path"), body.read_int("sampling_session_seq_id"))

    return _in_turn(service, body, submit)


def _describe_saved(service: Service, body: Fields) -> Outcome:
    return write_json(service.describe_saved(body.need_text("tinker_path")))


def _begin_sampler(service: Service, body: Fields) -> Outcome:
    seq_id = body.read_int("sampling_session_seq_id", 0) or 0
    sampler_id = service.begin_sampler(
        body.need_text("session_id"), seq_id, base_model=body.read_text("base_model"), model_path=body.read_text("model_path")
    )
    return write_json({"type": "create_sampling_session", "sampling_session_id": sampler_id})


def _describe_sampler(service: Service, _: None, *, sampler_id: str) -> Outcome:
    return write_json(service.describe_sampler(sampler_id))


def _sample(service: Service, request: SampleRequest) -> Outcome:
    return _promise(service.sample(request))


def _cancel(service: Service, body: Fields) -> Outcome:
    service.cancel_sampling(body.need_text("request_id"))
    return write_json({})


ANSWERS: Mapping[tuple[str, str], tuple[Read, Answer]] = MappingProxyType({
    ("GET", "healthz"): (_read_nothing, _check_health),
    ("GET", "get_server_capabilities"): (_read_nothing, _describe_server),
    ("POST", "client/config"): (_read_nothing, _configure_client),
    ("POST", "client/dynamic_config"): (_read_nothing, _configure_again),
    ("POST", "create_session"): (_read_nothing, _begin_session),
    ("POST", "session_heartbeat"): (_read, _hear),
    ("POST", "telemetry"): (_read_nothing, _take_telemetry),
    ("POST", "create_model"): (_read_model, _create_model),
    ("POST", "unload_model"): (_read, _unload_model),
    ("POST", "get_info"): (_read, _get_info),
    ("POST", "forward_backward"): (_read_pass, _forward_backward),
    ("POST", "optim_step"): (_read, _optim_step),
    ("POST", "save_weights"): (_read, _save_weights),
    ("POST", "load_weights"): (_read, _load_weights),
    ("POST", "save_weights_for_sampler"): (_read, _save_for_sampler),
    ("POST", "weights_info"): (_read, _describe_saved),
    ("POST", "create_sampling_session"): (_read, _begin_sampler),
    ("POST", "asample"): (_read_sample, _sample),
    ("POST", "cancel_future"): (_read, _cancel),
})  # fmt: skip
"""Readers and answers by method and path behind /api/v1/; besides them, those of GET samplers/ID and POST sessions/ID/finish."""


@contextmanager
def _refuse_errors() -> Generator[None]:
    """Turn whatever goes wrong with one request into its refusal, so that the others go on."""
    try:
        yield
    except Refusal:
        raise
    except (DataError, ConfigError, CheckpointError) as error:
        raise Refusal(400, redact(str(error)), code="invalid_request") from error
    except Exception as error:
        _logger.exception("a request to the server failed")
        message = f"the server failed at this request: {type(error).__name__}: {redact(str(error))[:500]}"
        raise Refusal(500, message, code="internal_error") from error


def _refuse(refusal: Refusal) -> HTTPResponse:
    found = {"error": refusal.message, "code": refusal.code, "param": refusal.param}
    return HTTPResponse(status=refusal.status, body=write_json({name: value for name, value in found.items() if value}).body)
