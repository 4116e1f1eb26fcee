"""Answers to the requests of sessions: planned, played from a cassette or sampled, and recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import trio

from rollouts.errors import DataError, EngineError, ReplayError, raise_single_errors
from rollouts.gateway.cassettes.exchanges import Asked, RecordedAnswer, describe_sampling
from rollouts.gateway.cassettes.tapes import AbsentEngine
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.formats import Formats, check_usable
from rollouts.gateway.refusals import Refusal
from rollouts.gateway.requests import Answered, GatewayRequest, Reply, reply_message
from rollouts.gateway.sampling import check_temperature, choose_params, choose_seeds, refuse_engine_errors, sample_whole
from rollouts.gateway.sessions import Answer, Plan, Session, plan_messages, plan_text
from rollouts.types import Completion, SamplingParams, change

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request with everything that is known before it is sampled."""

    request: GatewayRequest
    plan: Plan
    params: SamplingParams  # without the seed


class Answerer:
    """Formats of a gateway's conversations, and its places for requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: GatewayConfig) -> None:
        """Raises DataError for a chat template that cannot be used."""
        self._config, self._tokenizer = config, tokenizer
        self._formats = Formats(tokenizer, config)
        self._limiter = trio.CapacityLimiter(config.max_in_flight)
        self._num_asked = 0  # completions in flight and waiting: also those whose task has not come to the limiter yet
        self._numbers = count()
        if self._formats.uses_chat:
            check_usable(self._formats)

    @property
    def num_in_flight(self) -> int:
        """Number of completions that engines work on."""
        return self._limiter.borrowed_tokens

    def prepare(self, session: Session, request: GatewayRequest) -> Prepared:
        """Plan prompt and sampling of a request, everything checked that can be before it is sent. Raises Refusal."""
        try:
            if request.prompt is not None:
                conversation = self._formats.text_format
                plan = plan_text(session, conversation, request.prompt)
            else:
                root, conversation = self._formats.find(request.tools)
                plan = plan_messages(session, conversation, root, request.messages, show=self._formats.show)
        except DataError as error:
            raise Refusal(400, f"{request.given_as}: {error}", param=request.given_as, code="invalid_value") from None
        if not plan.tokens:
            message = f"{request.given_as}: there are no tokens in it, and a model needs one to go on from"
            raise Refusal(400, message, param=request.given_as, code="invalid_value")
        eos: Any = self._tokenizer.eos_token_id
        params = choose_params(self._config, session.params or self._config.params, request.wishes, conversation.end_of_turn, eos)
        if not request.is_dry:
            self._check_limits(session, request.wishes.n)
            check_temperature(session, params)
        return Prepared(request=request, plan=plan, params=params)

    def _check_limits(self, session: Session, n: int) -> None:
        if session.max_answers is not None and len(session.answers) + session.num_in_flight + n > session.max_answers:
            session.is_spent = True
            raise Refusal(403, f"the session has had its {session.max_answers} answers", code="session_limit_reached")
        if session.max_tokens is not None and session.num_sampled >= session.max_tokens:
            session.is_spent = True
            raise Refusal(403, f"the session has had its {session.max_tokens} sampled tokens", code="session_limit_reached")

    def _check_places(self, n: int) -> None:
        waiting = self._num_asked - self._config.max_in_flight
        if self._num_asked and waiting + n > self._config.max_waiting:  # a request that would never fit is served where nothing else is
            raise Refusal(
                429,
                f"{max(waiting, 0)} completions are waiting already, and {n} more would exceed GatewayConfig.max_waiting "
                f"({self._config.max_waiting}); try again later",
                code="too_many_requests",
            )

    async def answer(self, session: Session, prepared: Prepared) -> Answered:
        """Play or sample the answers to a request, and record them. Raises Refusal."""
        created = int(time.time())
        self._check_places(prepared.request.wishes.n)
        session.counts["num_requests"] += 1
        name = f"{session.request_prefix}-{next(self._numbers)}"
        request, plan = prepared.request, prepared.plan
        seeds = choose_seeds(self._config, session, request.wishes, plan)
        played: Sequence[RecordedAnswer] | None = None
        if session.tape is not None:
            played = session.tape.play(self._ask(prepared), plan)
            if played is None and isinstance(session.engine, AbsentEngine):
                with refuse_engine_errors(session, request.given_as):
                    raise ReplayError(f"the harness differs from the recording, and there is no engine. {session.tape.difference}")
        if played is None:
            found = await self._sample(session, prepared, seeds, name)
            numbers: Sequence[int | None] = [None] * len(found)
        else:
            found = [answer.complete(plan.tokens, f"{name}-{k}") for k, answer in enumerate(played)]
            numbers = [answer.number for answer in played]
        answers: list[tuple[Answer, Reply]] = []
        try:
            for completion, number in zip(found, numbers, strict=True):
                answers.append(self._record(session, prepared, completion, number))
            if session.tape is not None:
                noted = [
                    RecordedAnswer.create(answer.number, reply_message(reply), answer.text, reply.completion) for answer, reply in answers
                ]
                session.tape.note(self._ask(prepared), plan, noted)
        except BaseException:
            session.forget({answer.number for answer, _ in answers} | {number for number in numbers if number is not None})
            raise
        return Answered(id=name, created=created, completed=int(time.time()), replies=tuple(reply for _, reply in answers))

    def _ask(self, prepared: Prepared) -> Asked:
        """Return a request as cassettes have it."""
        request = prepared.request
        seed = None if self._config.sampling == "fixed" else request.wishes.seed
        sampling = describe_sampling(prepared.params, seed, request.wishes.n)
        return Asked(messages=request.messages, tools=request.tools, prompt=request.prompt, sampling=sampling)

    async def _sample(self, session: Session, prepared: Prepared, seeds: Sequence[int], name: str) -> list[Completion]:
        """Return an engine's answers, one for each seed. Raises Refusal."""
        found: list[Any] = [None] * len(seeds)
        errors: list[EngineError | Refusal] = []
        timeout_s = self._config.timeout_s

        async def sample(k: int, scope: trio.CancelScope) -> None:
            try:
                async with self._limiter:
                    found[k] = await sample_whole(session, prepared.plan.tokens, change(prepared.params, seed=seeds[k]), f"{name}-{k}")
            except (EngineError, Refusal) as error:  # several may fail at the same moment, and the request has one refusal
                errors.append(error)
                scope.cancel()

        scope = trio.CancelScope()
        if timeout_s is not None:
            scope.deadline = trio.current_time() + timeout_s
        session.enter(scope, len(seeds))
        self._num_asked += len(seeds)
        done = False
        try:
            with refuse_engine_errors(session, prepared.request.given_as), scope:
                if len(seeds) == 1:
                    await sample(0, scope)
                else:
                    with raise_single_errors():
                        async with trio.open_nursery() as nursery:
                            for k in range(len(seeds)):
                                nursery.start_soon(sample, k, nursery.cancel_scope)
                if errors:
                    raise errors[0]
                done = True
        except (trio.Cancelled, BaseExceptionGroup):
            session.counts["num_cancelled"] += 1
            raise
        finally:
            session.leave(scope)
            self._num_asked -= len(seeds)
        if session.is_closed:
            raise Refusal(410, "the session has ended", code="session_ended")
        if not done:
            raise Refusal(504, f"there was no answer within {timeout_s:g} s (GatewayConfig.timeout_s)", code="timeout")
        return found

    def _record(self, session: Session, prepared: Prepared, completion: Completion, number: int | None) -> tuple[Answer, Reply]:
        request, plan = prepared.request, prepared.plan
        conversation = self._formats.text_format if request.prompt is not None else self._formats.find(request.tools)[1]
        text = conversation.decode_answer(completion.output_tokens)
        answer = session.record(plan, completion, text, number)
        try:
            reply = self._formats.write_reply(request, completion, text, answer.number)
        except BaseException:
            session.forget((answer.number,))
            raise
        session.note_reply(plan, answer, reply)
        return answer, reply
