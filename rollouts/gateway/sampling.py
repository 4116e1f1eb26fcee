"""Sampling of a gateway's requests: parameters from what a request asks for, and completions that aborts do not cut short."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rollouts.config import LEAST_TEMPERATURE
from rollouts.engines.protocol import InferenceEngine, with_kept_tokens
from rollouts.errors import EngineContextError, EngineError, EngineProtocolError, EngineRequestError, EngineTimeout, ReplayError, redact
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.refusals import Refusal
from rollouts.gateway.requests import Wishes
from rollouts.gateway.sessions import Plan, Session
from rollouts.seeds import derive_seed
from rollouts.types import Completion, SamplingParams, change

_logger = logging.getLogger(__name__)


@contextmanager
def refuse_engine_errors(session: Session, field: str) -> Generator[None]:
    """Turn the errors of an engine into refusals, and note those that are not the request's fault.

    Args:
        field: name of the prompt in the client's form, which is at fault if it is too long.
    """
    try:
        yield
    except EngineContextError as error:
        raise Refusal(400, redact(str(error)), param=field, code="context_length_exceeded") from None
    except EngineRequestError as error:
        raise Refusal(400, redact(str(error)), code="invalid_request") from None
    except ReplayError as error:  # not 409, which clients send again
        session.note_failure(error)
        raise Refusal(400, str(error), code="cassette_ended") from None
    except EngineError as error:
        session.note_failure(error)
        status = 504 if isinstance(error, EngineTimeout) else 502
        raise Refusal(status, f"the engine failed: {redact(str(error))}", code="engine_error") from None


@contextmanager
def refuse_faults(session: Session | None = None) -> Generator[None]:
    """Turn whatever goes wrong with one request, such as an error of a parser of calls, into its refusal, so that the others go on.

    Args:
        session: session that notes it; None = it has none yet.
    """
    try:
        yield
    except Refusal:
        raise
    except RecursionError:
        raise Refusal(400, "the body is JSON that is nested too deeply", code="invalid_json") from None
    except Exception as error:
        _logger.exception("a request to the gateway failed")
        if session is not None:
            session.note_fault(error)
        message = f"the gateway failed at this request: {type(error).__name__}: {redact(str(error))[:500]}"
        raise Refusal(500, message, code="internal_error") from error


def choose_params(config: GatewayConfig, base: SamplingParams, wishes: Wishes, end_of_turn: int | None, eos: int | None) -> SamplingParams:
    """Return the parameters of a request, without its seed. base: sampling where it says nothing."""
    most = base.max_tokens if wishes.max_tokens is None else wishes.max_tokens
    changes: dict[str, Any] = {}
    if config.sampling == "fixed":
        most = min(most, base.max_tokens)
    else:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            value = getattr(wishes, name)
            if value is not None:
                changes[name] = max(value, 0)  # top_k = -1 is off, as 0
        if changes.get("temperature", base.temperature) < LEAST_TEMPERATURE:  # such as the 1e-8 that some clients send for 0
            changes |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}  # a greedy choice is cut by nothing
    ends = () if end_of_turn is None or end_of_turn == eos or end_of_turn in base.stop_token_ids else (end_of_turn,)
    stop = tuple(dict.fromkeys((*base.stop, *wishes.stop)))
    return change(base, max_tokens=most, stop=stop, stop_token_ids=(*base.stop_token_ids, *ends), **changes)


def choose_seeds(config: GatewayConfig, session: Session, wishes: Wishes, plan: Plan) -> tuple[int, ...]:
    """Return a seed for each answer: the request's, or one of session, prompt and the number of requests with this prompt before."""
    keys = session.take_seed_keys(plan)
    asked = None if config.sampling == "fixed" else wishes.seed
    if asked is not None:
        return (asked, *(derive_seed(asked, k) for k in range(1, wishes.n)))
    return tuple(derive_seed(config.seed, *keys, k) for k in range(wishes.n))


def check_temperature(session: Session, params: SamplingParams) -> None:
    """Note the temperature of a session's log-probs. Raises Refusal (400) if one that is recorded or in flight has another one."""
    temperature = params.temperature or 1.0  # greedy: log-probs are at 1
    if not session.answers and not session.num_in_flight:  # earlier ones have all failed
        session.temperature = temperature
    if session.temperature != temperature:
        raise Refusal(
            400,
            f"temperature is {temperature:g}, but earlier requests of this session had {session.temperature:g}: a session is one sample, "
            'whose log-probs have one temperature. Use another session, or sampling = "fixed" in the gateway',
            param="temperature",
            code="invalid_value",
        )


async def sample_whole(session: Session, prompt: tuple[int, ...], params: SamplingParams, request_id: str) -> Completion:
    """Return a completion that has ended by itself or by its budget.

    A request that was aborted, as for new weights, is sent again with the tokens so far; the versions of its tokens say where.

    Raises: Refusal (410) if it was aborted and the session is to be interrupted; EngineProtocolError for an answer to another prompt, or
        without tokens; errors of the engine.
    """
    engine: InferenceEngine = session.engine
    params = with_kept_tokens(params, engine)
    done: Completion | None = None
    while True:
        if session.note_request is not None:
            session.note_request(request_id)
        whole = prompt if done is None else (*prompt, *done.output_tokens)
        left = params if done is None else params.new(max_tokens=params.max_tokens - done.output_len, seed=_continue_seed(params, done))
        found = await engine.generate(whole, left, request_id=request_id)
        if found.input_tokens is not whole and found.input_tokens != whole:
            raise EngineProtocolError(
                f"request {request_id} was answered for {found.input_len} tokens that are not the {len(whole)} it was sent: the engine "
                "must take tokens as they are"
            )
        done = found if done is None else _join(done, found)
        if found.finish_reason != "abort":
            break
        if session.is_interruptible:
            session.interrupt()
            raise Refusal(410, "the session was interrupted, and is begun anew", code="session_interrupted")
        if done.output_len >= params.max_tokens:
            done = replace(done, finish_reason="length")
            break
    if not done.output_tokens:
        raise EngineProtocolError(f"request {request_id} came back with no token, and finish reason {done.finish_reason!r}")
    return done


def _continue_seed(params: SamplingParams, done: Completion) -> int | None:
    """Return another seed for the rest of an answer: with the same one its tokens would be drawn with the same random numbers again."""
    return None if params.seed is None else derive_seed(params.seed, done.output_len)


def _join(first: Completion, second: Completion) -> Completion:
    """Return a completion and the one that continues it as one."""
    return replace(
        second,
        input_tokens=first.input_tokens,
        output_tokens=(*first.output_tokens, *second.output_tokens),
        output_log_probs=(*first.output_log_probs, *second.output_log_probs),
        output_versions=(*first.output_versions, *second.output_versions),
        truncated_sampling=first.truncated_sampling or second.truncated_sampling,
        log_prob_kind=second.log_prob_kind if first.log_prob_kind == "sampled" else first.log_prob_kind,
        untempered_log_probs=None,
        kept_tokens=None if first.kept_tokens is None or second.kept_tokens is None else first.kept_tokens + second.kept_tokens,
    )
