"""OpenAITextEngine: text from any OpenAI-like server, for agents and judges. Pure parts are in engines/text/protocol.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from rollouts.chat.tokenize import Messages
from rollouts.engines.http.endpoint import Deadlines, HTTPEndpoint, RetryPolicy
from rollouts.engines.text.protocol import (
    CHAT,
    MODELS,
    ChatCompletion,
    ChatSettings,
    ServedModel,
    chat_payload,
    check_extra,
    join_chunks,
    neutral_fields,
    parse_chat_response,
    parse_models,
    parse_text_delta,
    resolve_routes,
)
from rollouts.errors import EngineError, EngineStatusError

_DEADLINES = Deadlines(
    generate_s=600.0,
    options={name: f"OpenAITextEngine(deadlines=Deadlines({name}=...))" for name in ("generate_s", "control_s", "connect_s")},
)


class TextStream:
    """Text of one answer as it arrives. After the last piece, `completion` is the whole answer."""

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        self._chunks = chunks
        self._seen: list[Any] = []
        self._completion: ChatCompletion | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        async for chunk in self._chunks:
            self._seen.append(chunk)
            if text := parse_text_delta(chunk):
                return text
        if self._completion is None:
            self._completion = parse_chat_response(join_chunks(self._seen))
        raise StopAsyncIteration

    @property
    def completion(self) -> ChatCompletion:
        """The whole answer, reasoning and tool calls included."""
        assert self._completion is not None, "the answer has not ended: read the stream to its end first"
        return self._completion


class OpenAITextEngine:
    """Messages in, text out, over /v1/chat/completions of SGLang, vLLM or any other OpenAI-like server.

        async with OpenAITextEngine("http://127.0.0.1:8000", "judge") as judge:
            answer = await judge.complete([{"role": "user", "content": "1+2="}], max_tokens=8, temperature=0.0)
            answer.text

    - For agents, judges and other helpers of a run. Its output is never trained on as tokens: it has no token ids, log-probs or weight
      versions, and text tokenized again need not give the sampled tokens. Rollouts come from an InferenceEngine.
    - A request is repeated only if it cannot have been carried out: the connection was refused, or the server reported that it is busy.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        check_model: bool = True,
        extra: Mapping[str, Any] | None = None,
        max_connections: int = 256,
        deadlines: Deadlines | None = None,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        name: str | None = None,
    ) -> None:
        """
        Args:
            base_url: "http://host:port", or with the path above /chat/completions, for instance "https://host/v1".
            model: name under which the model is served.
            api_key: sent as a bearer token.
            check_model: check on entering that the model is served; some servers answer with any available model.
            extra: further fields of each request, for instance {"chat_template_kwargs": {"enable_thinking": False}}. None = for SGLang and
                vLLM the fields that keep a model's generation_config.json from cutting the distribution; {} = none, so that it may.
            max_connections: maximum number of answers in flight; more wait.
            deadlines: default 600 s for an answer, otherwise as for the other engines.
            transport: transport of HTTP requests, for tests.
            name: name in messages.

        Raises: ConfigError if the address, the key or a field of `extra` cannot be used.
        """
        self._server = HTTPEndpoint(
            resolve_routes(base_url),
            api_key=api_key,
            deadlines=deadlines or _DEADLINES,
            retry=retry,
            max_connections=max_connections,
            transport=transport,
        )
        self.name = name or f"the text server at {self._server.base_url}"
        self.model = model
        self._check_model = check_model
        self._extra = None if extra is None else dict(extra)
        check_extra(self._extra or {})
        self._neutral: Mapping[str, Any] = {}
        self._exit_stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            if self._check_model:
                self._neutral = neutral_fields((await self._find_model()).owner)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self._exit_stack.aclose()

    async def models(self) -> tuple[str, ...]:
        """Return the names of the models that the server has. Raises EngineError."""
        return tuple(model.name for model in await self._list_models())

    async def complete(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> ChatCompletion:
        """Return one answer.

        Args:
            messages: the conversation, of Messages or mappings with "role" and "content".
            max_tokens: maximum number of tokens of the answer; None = the server's limit, usually the rest of the context. A server with
                max_completion_tokens instead gets that through `extra`.
            temperature, top_p: None = the server's default, which may come from the model's generation_config.json.
            stop: texts that end the answer and are not part of it.
            seed: equal requests and weights give equal answers, as far as the server supports it.
            tools: JSON schemas of the tools, {"type": "function", "function": {"name", "description", "parameters"}}.
            extra: further fields of this request, for instance {"response_format": ...} or {"tool_choice": "required"}; they win.

        Raises: EngineTimeout, EngineStatusError with the server's own message, EngineProtocolError; EngineError if the server cannot be
            reached, or for settings that it would refuse; DataError for invalid messages.
        """
        settings = ChatSettings(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, tools=tools)
        body = chat_payload(self.model, messages, settings, self._merge_extra(extra))
        return parse_chat_response(await self._server.post_json(CHAT, body))

    @asynccontextmanager
    async def stream_text(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[TextStream]:
        """Stream one answer, piece by piece. Arguments and errors as of complete().

            async with judge.stream_text(messages) as stream:
                async for piece in stream: ...
            stream.completion

        Leaving the block early makes the server drop the request.
        """
        settings = ChatSettings(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, tools=tools)
        body = chat_payload(self.model, messages, settings, self._merge_extra(extra), stream=True)
        async with self._server.stream_events(CHAT, body) as chunks:
            yield TextStream(chunks)

    def _merge_extra(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(self._neutral if self._extra is None else self._extra), **(extra or {})}

    async def _list_models(self) -> tuple[ServedModel, ...]:
        return parse_models(await self._server.get_json(MODELS))

    async def _find_model(self) -> ServedModel:
        try:
            served = await self._list_models()
        except EngineStatusError as error:
            if error.status not in (404, 405, 501):
                raise
            raise EngineError(
                f"{self.name} has no list of models ({error}): check the address, or pass check_model=False if the server has none"
            ) from error
        for model in served:
            if model.name == self.model:
                return model
        raise EngineError(
            f"{self.name} serves {', '.join(repr(model.name) for model in served) or 'no model'}, expected {self.model!r}: it is another "
            "server, or the model has another name there"
        )
