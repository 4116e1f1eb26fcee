"""Tapes: sessions of a gateway that are answered from one cassette, and recorded into another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, ReplayError
from rollouts.gateway.cassettes.differences import describe_difference, describe_tokens
from rollouts.gateway.cassettes.exchanges import Asked, Exchange, RecordedAnswer, write_forgotten, write_header
from rollouts.gateway.cassettes.reader import Cassette, read_cassette
from rollouts.gateway.config import GatewayConfig
from rollouts.gateway.sessions import Plan
from rollouts.output_files import append_text, explain_writes
from rollouts.types import Completion, SamplingParams


class Tapes:
    """The cassettes of a gateway, or of the gateways of an agent's runs, one after the other."""

    def __init__(self, config: GatewayConfig) -> None:
        """Read the one and begin the other.

        Args:
            config: cassette and record count.

        Raises: DataError for a cassette that cannot be used; ConfigError for a file to record into that is there already; OutputError.
        """
        self._cassette: Cassette = {} if config.cassette is None else read_cassette(Path(config.cassette))
        self._file = None if config.record is None else Path(config.record)
        self._takes: Counter[str] = Counter()
        if self._file is not None:
            _begin_file(self._file)

    def open(self, session: str) -> Tape:
        """Return the tape of a session: of the first one of its name, the second, ..."""
        take = self._takes[session]
        self._takes[session] += 1
        return Tape(session, take, self._cassette, self._file)


class Tape:
    """One session's part of the cassettes."""

    def __init__(self, session: str, take: int, cassette: Cassette, file: Path | None) -> None:
        self.difference: str | None = None  # first difference between the session and its recording
        self._session, self._take, self._file = session, take, file
        self._unplayed: dict[tuple[Any, ...], list[Exchange]] = {}
        self._is_known, self._names = (session, take) in cassette, sorted({name for name, _ in cassette})
        self._noted: set[int] = set()
        self._played: dict[int, Exchange] = {}  # by the number of the answer
        exchanges = cassette.get((session, take), ())
        for exchange in exchanges:
            self._unplayed.setdefault(exchange.asked.find_key(), []).append(exchange)
        self.first_free = 1 + max((answer.number for exchange in exchanges for answer in exchange.answers), default=-1)

    def play(self, asked: Asked, plan: Plan) -> Sequence[RecordedAnswer] | None:
        """Return the recorded answers to a request; None if the recording has none, or its prompt had other tokens."""
        found = self._unplayed.get(asked.find_key())
        if not found:
            self._note_difference(self._describe(asked))
            return None
        parent = None if plan.parent is None else plan.parent.number
        exchange = next((one for one in found if one.extends == parent and one.given == plan.given), None)
        if exchange is None:
            self._note_difference(describe_tokens(plan.given, found[0].given))
            return None
        found.remove(exchange)
        self._played |= {answer.number: exchange for answer in exchange.answers}
        return exchange.answers

    def note(self, asked: Asked, plan: Plan, answers: Sequence[RecordedAnswer]) -> None:
        """Write a request with its answers. Raises OutputError."""
        if self._file is None:
            return
        exchange = Exchange(
            asked=asked,
            extends=None if plan.parent is None else plan.parent.number,
            begins_context=plan.begins_context,
            given=plan.given,
            answers=tuple(answers),
        )
        append_text(self._file, exchange.to_line(self._session, self._take, plan.num_known))
        self._noted.update(answer.number for answer in answers)

    def forget(self, numbers: Collection[int]) -> None:
        """Write that clients did not get these answers, and put those that were played back. Raises OutputError."""
        for number in numbers:
            exchange = self._played.pop(number, None)
            if exchange is not None:
                for answer in exchange.answers:
                    self._played.pop(answer.number, None)
                found = self._unplayed[exchange.asked.find_key()]
                found.append(exchange)
                found.sort(key=_first_number)
        lost = sorted(self._noted & set(numbers))
        if lost and self._file is not None:
            self._noted -= set(lost)
            append_text(self._file, write_forgotten(self._session, self._take, lost))

    def find_difference(self) -> str | None:
        """Return the first difference between the session and its recording, a request that was not sent included; None = there is none."""
        if self.difference is not None:
            return self.difference
        left = sorted((one for found in self._unplayed.values() for one in found), key=_first_number)
        if not left:
            return None
        first = left[0].answers[0].number
        return f"session {self._session!r}: {len(left)} recorded requests were not sent, the first the one of answer {first}"

    def _describe(self, asked: Asked) -> str:
        if not self._is_known:
            again = f", or not {self._take + 1} of this name" if self._session in self._names else ""
            return f"the cassette has no such session{again}: it has {self._names[:20]}"
        return describe_difference(asked, [one for found in self._unplayed.values() for one in found])

    def _note_difference(self, text: str) -> None:
        if self.difference is None:
            self.difference = f"session {self._session!r}: {text}"


class AbsentEngine:
    """The engine where there is none: whatever a cassette does not answer is refused."""

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Raise ReplayError."""
        raise ReplayError("the cassette does not answer this request, and the gateway has no engine that could")

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Do nothing: no request is pending."""

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Raise ReplayError."""
        raise ReplayError(f"the gateway replays a cassette without an engine, so the weights of {checkpoint_path} have no place")

    async def get_weight_version(self) -> int:
        """Return 0."""
        return 0


def open_tapes(config: GatewayConfig) -> Tapes | None:
    """Return the cassettes of a gateway; None if it has none. Raises: see Tapes."""
    return None if config.cassette is None and config.record is None else Tapes(config)


def find_engines(engines: Sequence[InferenceEngine], config: GatewayConfig) -> Sequence[InferenceEngine]:
    """Return the engines of a gateway: an absent one if it has a cassette instead. Raises ConfigError if it has neither."""
    if not engines and config.cassette is None:
        raise ConfigError("there are no engines to sample with (found 0): pass at least one, or a recording (GatewayConfig.cassette)")
    return engines or (AbsentEngine(),)


def _first_number(exchange: Exchange) -> int:
    return exchange.answers[0].number


def _begin_file(path: Path) -> None:
    """Write the first line. Raises ConfigError if the file is there, OutputError if it cannot be written."""
    try:
        with explain_writes(path), path.open("x", encoding="utf-8") as file:
            file.write(write_header())
    except Exception as error:
        if isinstance(error.__cause__, FileExistsError):
            raise ConfigError(f"GatewayConfig.record is {path}, which is there already: name a new file, or remove it") from None
        raise
