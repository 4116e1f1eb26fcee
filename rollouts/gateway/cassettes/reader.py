"""Reader of cassettes: a file of JSON lines becomes the exchanges of its sessions, everything checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

from rollouts.checks import parse_json
from rollouts.errors import DataError
from rollouts.gateway.cassettes.exchanges import FORMAT, USUAL, VERSION, Asked, Exchange, Plain, RecordedAnswer, normalise_sampling
from rollouts.types import Completion, FinishReason, KeptTokens, LogProbKind, Message, RoutedExperts

Cassette: TypeAlias = "Mapping[tuple[str, int], tuple[Exchange, ...]]"
"""Exchanges of the sessions of a file, by name and take, in the order of their answers."""


_ROUNDING = 1e-3  # log-probs of engines that round may be above 0 by so much


class _Damage(Exception):
    """Description of a line's fault."""


@dataclass
class _Session:
    """Exchanges of a session that were read so far."""

    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    answers: dict[int, tuple[Exchange, RecordedAnswer]] = field(default_factory=dict[int, tuple[Exchange, RecordedAnswer]])
    sizes: dict[int, int] = field(default_factory=dict[int, int])  # tokens of the prompt of each answer
    forgotten: set[int] = field(default_factory=set[int])  # answers that no client got, and that were not played again since

    def forget(self, numbers: tuple[int, ...]) -> None:
        """Leave out the exchanges of these answers; their numbers are free for answers that are played again."""
        self.forgotten.update(numbers)
        self.exchanges = [one for one in self.exchanges if not any(answer.number in numbers for answer in one.answers)]

    def add(self, exchange: Exchange) -> None:
        """Add an exchange behind those before. Raises _Damage for a number that is taken, or records of other tokens."""
        self.exchanges.append(exchange)
        parent = None if exchange.begins_context else exchange.extends
        size = len(exchange.given) + (0 if parent is None else self.sizes[parent] + self.answers[parent][1].completion.output_len)
        for answer in exchange.answers:
            if answer.number in self.answers and answer.number not in self.forgotten:
                raise _Damage(f"there are two answers {answer.number} of one session")
            _check_length("routed_experts", answer.routed_experts, size + answer.completion.output_len)
            self.forgotten.discard(answer.number)
            self.answers[answer.number], self.sizes[answer.number] = (exchange, answer), size

    def collect_context(self, number: int) -> tuple[int, ...]:
        """Return the tokens of an answer's context, its own included."""
        parts: list[tuple[int, ...]] = []
        at: int | None = number
        while at is not None:
            exchange, answer = self.answers[at]
            parts += (answer.completion.output_tokens, exchange.given)
            at = None if exchange.begins_context else exchange.extends
        return tuple(token for part in reversed(parts) for token in part)


def read_cassette(path: Path) -> Cassette:
    """Return the sessions of a cassette.

    Raises: DataError for a file that cannot be read, is none or is damaged, with the number of the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeError:
        raise DataError(f"{path} is no cassette: it is not UTF-8") from None
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}): name a file that --record wrote (GatewayConfig.record)"
        ) from error
    sessions: dict[tuple[str, int], _Session] = {}
    number, is_cut = 0, lines.pop() != ""
    if is_cut:
        raise DataError(
            f"{path}, line {len(lines) + 1}: the end of the line is missing, as of a recording that was killed: remove the line"
        )
    try:
        for number, line in enumerate(lines, 1):
            _read_line(_parse(line), sessions, is_first=number == 1)
        if not lines:
            raise _Damage("the file is empty")
    except _Damage as damage:
        raise DataError(f"{path}, line {max(number, 1)}: {damage}. The file is damaged, or no cassette as --record writes it") from None
    return {name: _finish(session) for name, session in sessions.items()}


def _parse(line: str) -> Mapping[str, Any]:
    try:
        values = parse_json(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _Damage(f"it is not JSON ({str(error)[:100]})") from None
    return _check(values, dict, "the line", "an object")


def _refuse_constant(name: str) -> Any:
    raise _Damage(f"it has {name}, which is no number")


def _read_line(values: Mapping[str, Any], sessions: dict[tuple[str, int], _Session], *, is_first: bool) -> None:
    if is_first:
        found = (values.get("format"), values.get("version"))
        if found != (FORMAT, VERSION) or type(found[1]) is not int:
            raise _Damage(f"format and version are {found!r:.100}, expected {(FORMAT, VERSION)}")
        return
    name, take = _take(values, "session", str), _take_number(values, "take")
    session = sessions.setdefault((name, take), _Session())
    if "forgotten" in values:
        session.forget(_take_numbers(values, "forgotten"))
        return
    session.add(_read_exchange(values, session))


def _read_exchange(values: Mapping[str, Any], session: _Session) -> Exchange:
    extends = values.get("extends")
    parent: tuple[Exchange, RecordedAnswer] | None = None
    if extends is not None:
        parent = session.answers.get(_check(extends, int, "extends", "a number"))
        if parent is None:
            raise _Damage(f"extends is {extends}, an answer that no line before has")
    request = _take(values, "request", dict)
    answers = tuple(_read_answer(_check(item, dict, "an answer", "an object")) for item in _take(values, "answers", list))
    if not answers:
        raise _Damage("answers is empty")
    asked = _read_asked(request, parent, session)
    if asked.sampling["n"] != len(answers):
        raise _Damage(f"there are {len(answers)} answers to a request with n = {asked.sampling['n']}")
    return Exchange(
        asked=asked,
        extends=extends,
        begins_context=_take(values, "begins_context", bool),
        given=_take_numbers(values, "given"),
        answers=answers,
    )


def _read_asked(request: Mapping[str, Any], parent: tuple[Exchange, RecordedAnswer] | None, session: _Session) -> Asked:
    sampling = _read_sampling(_take(request, "sampling", dict))
    if sum(name in request for name in ("messages", "text", "tokens")) != 1:
        raise _Damage("the request has not one of messages, text and tokens")
    if "messages" not in request:
        prompt: Plain = _take(request, "text", str) if "text" in request else _take_numbers(request, "tokens")
        if parent is not None:
            exchange, answer = parent
            if isinstance(prompt, tuple):
                prompt = (*session.collect_context(answer.number), *prompt)
            elif isinstance(exchange.asked.prompt, str):
                prompt = exchange.asked.prompt + answer.text + prompt
            else:
                raise _Damage(f"a text extends answer {answer.number}, whose request has no text")
        return Asked(prompt=prompt, sampling=sampling)
    messages = tuple(_read_message(item) for item in _take(request, "messages", list))
    tools = tuple(_check(tool, dict, "a tool", "an object") for tool in _take({"tools": [], **request}, "tools", list))
    if parent is not None:
        exchange, answer = parent
        messages, tools = (*exchange.asked.messages, answer.message, *messages), exchange.asked.tools
    return Asked(messages=messages, tools=tools, sampling=sampling)


def _read_sampling(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the whole sampling of a request, each value of the type of its field."""
    for name, value in given.items():
        if name not in USUAL:
            raise _Damage(f"sampling has {name!r:.100}, expected {', '.join(USUAL)}")
        if isinstance(USUAL[name], float):
            _check_real(f"sampling.{name}", value)
        elif name != "seed" or value is not None:
            _check(value, int if name == "seed" else type(USUAL[name]), f"sampling.{name}", f"a value as {USUAL[name]!r}")
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        for item in given.get(name, ()):
            _check(item, kind, f"an item of sampling.{name}", f"of the type {kind.__name__}")
    return {**USUAL, **normalise_sampling(given)}


def _read_message(value: Any) -> Message:
    try:
        message = Message.from_dict(_check(value, dict, "a message", "an object"))
        for call in message.tool_calls or ():
            function = _take(call, "function", dict)
            _take(function, "name", str)
            if not isinstance(function.get("arguments", ""), (str, dict)) or not isinstance(call.get("id"), (str, type(None))):
                raise _Damage(f"a tool call is {call!r:.100}, expected one with an id that is a text, and arguments as JSON")
        return message
    except (AssertionError, DataError, KeyError, TypeError) as error:
        raise _Damage(f"a message cannot be used: {str(error)[:200]}") from None


def _read_answer(values: Mapping[str, Any]) -> RecordedAnswer:
    tokens = _take_numbers(values, "tokens")
    log_probs = tuple(_take(values, "log_probs", list))
    for value in log_probs:
        _check_real("log_probs", value, least=-math.inf, most=_ROUNDING)
    versions = _take_numbers(values, "versions")
    if not tokens or not len(tokens) == len(log_probs) == len(versions):
        raise _Damage(
            f"an answer has {len(tokens)} tokens, {len(log_probs)} log_probs and {len(versions)} versions, expected as many of each"
        )
    finish, kind = _take(values, "finish_reason", str), _take(values, "log_prob_kind", str)
    if finish not in get_args(FinishReason) or kind not in get_args(LogProbKind):
        raise _Damage(f"finish_reason and log_prob_kind are {finish!r:.50} and {kind!r:.50}")
    temperature = values.get("temperature")
    _check_real("temperature", temperature)
    if not temperature:
        raise _Damage(f"temperature is {temperature!r}, expected the one of the log-probs, above 0 (a greedy answer has 1)")
    kept_tokens = _take_record(values, "kept_tokens", KeptTokens.from_dict)
    _check_length("kept_tokens", kept_tokens, len(tokens))
    completion = Completion(
        request_id="",
        input_tokens=(),
        output_tokens=tokens,
        output_log_probs=tuple(map(float, log_probs)),
        output_versions=versions,
        finish_reason=cast("FinishReason", finish),
        temperature=float(cast("float", temperature)),
        truncated_sampling=_take(values, "truncated_sampling", bool),
        log_prob_kind=cast("LogProbKind", kind),
        kept_tokens=kept_tokens,
    )
    return RecordedAnswer(
        number=_take_number(values, "number"),
        message=_read_message(values.get("message")),
        text=_take(values, "text", str),
        completion=completion,
        routed_experts=_take_record(values, "routed_experts", RoutedExperts.from_dict),
    )


def _check_length(name: str, record: RoutedExperts | KeptTokens | None, num_tokens: int) -> None:
    if record is not None and len(record) != num_tokens:
        raise _Damage(f"{name} has {len(record)} entries for {num_tokens} tokens")


def _take_record(values: Mapping[str, Any], name: str, of: Callable[[Mapping[str, Any]], Any]) -> Any:
    value = values.get(name)
    if value is None:
        return None
    try:
        record = _check(value, dict, name, "an object")
        if not all(type(number) is int for number in (record.get("num_routers", 1), record.get("top_k", 1), *record.get("counts", ()))):
            raise _Damage(f"{name} has a number that is no integer")
        return of(record)
    except (AssertionError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _Damage(f"{name} cannot be used: {str(error)[:200]}") from None


def _take_numbers(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    numbers = _take(values, name, list)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _Damage(f"{name} has something that is no number from 0")
    return tuple(numbers)


def _take_number(values: Mapping[str, Any], name: str) -> int:
    number = _take(values, name, int)
    if number < 0:
        raise _Damage(f"{name} is {number}, expected a number from 0")
    return number


def _check_real(name: str, value: Any, *, least: float = 0.0, most: float = sys.float_info.max) -> None:
    """Raise _Damage for anything but a finite number in a range."""
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max or not least <= value <= most:
        limits = f"{least:g} to {most:g}" if math.isfinite(least) else "-infinity to 0"
        raise _Damage(f"{name} has or is {value!r:.100}, expected a finite number from {limits}")


def _take(values: Mapping[str, Any], name: str, kind: type) -> Any:
    names = {str: "a text", int: "a number", bool: "true or false", list: "a list", dict: "an object"}
    return _check(values.get(name), kind, name, names[kind])


def _check(value: Any, kind: type, name: str, expected: str) -> Any:
    if type(value) is not kind:
        raise _Damage(f"{name} is {value!r:.100}, expected {expected}")
    return value


def _finish(session: _Session) -> tuple[Exchange, ...]:
    """Return the exchanges whose answers reached their clients."""
    return tuple(sorted(session.exchanges, key=lambda exchange: exchange.answers[0].number))
