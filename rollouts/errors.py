"""Exceptions for failures that a user's input or the outside world can cause.

    RolloutsError
    ├── ConfigError(ValueError)            a setting: unknown, out of range, or in conflict with another
    ├── DataError(ValueError)              a data set, conversation, tokenizer or file of the user's
    ├── RewardError(RuntimeError)          a reward function: raised, timed out, or gave no finite number
    ├── GenerationError(RuntimeError)      rollouts that do not come: a filter that starves, a generate function that breaks its contract
    │   ├── GenerationTimeout(TimeoutError)  rollouts that are not there in time; another wait may find them
    │   └── EpisodeInterrupted             a workflow's episode was told to stop, for a weight sync or a checkpoint
    ├── EpisodeError(RuntimeError)         an episode over an environment that cannot go on
    │   ├── EnvironmentFault               the environment raised, was too slow, or returned a value that no environment returns
    │   └── ToolFault                      a tool raised or was too slow, and the policy is to end the episode
    ├── ToolArgumentError(ValueError)      a tool cannot work with its arguments: the model is told, the episode goes on
    ├── SandboxError(RuntimeError)         no confinement as strict as was asked for, or no worker
    ├── BackendError(RuntimeError)         training: non-finite updates, a job that cannot run
    │   └── BadNumberError                 a number of a step that BadNumbers says to stop at, or too many in a row
    ├── CheckpointError(RuntimeError)      a checkpoint that cannot be written, found, verified or used
    ├── BlockingCallError(RuntimeError)    a blocking call of the trainer facade inside a trio loop, or after its end
    ├── OutputError(RuntimeError)          another file of a run that cannot be written: a full disk, a directory without permission
    └── EngineError(RuntimeError)          an inference engine
        ├── EngineRequestError             a request that no engine can answer, refused before it was sent
        │   └── EngineContextError         its prompt does not fit into the engine's context
        ├── EngineTimeout                  no answer within the deadline
        ├── ReplayError                    a request that differs from a recorded session, where no engine could answer it
        ├── EngineStatusError              an HTTP error status, with url and body
        └── EngineProtocolError            an answer with another shape or meaning than the protocol's

Each message says what was wrong, the value found and what to do. Programmer errors are assertions instead.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType

# control characters except newline and tab, and characters that turn the direction of text: foreign text must not steer a terminal
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _hide_query(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}***" if match[2] else match[0]


# each pattern takes one pass over any text: a scheme is seen by its end, an address without a query is passed over as a whole, and the
# word in a name is looked for once
_SECRETS = (
    # user and password in an address, also with slashes that should have been escaped, then its query and fragment; an address that was
    # taken for a path has one slash
    (re.compile(r"((?<=[a-z0-9+.-]{2}):/{1,2})(?:[^\s/?#]*|[^\s/?#@:]*:(?!\d+/)[^\s?#'\"]{0,100})@", re.I), r"\1***@"),
    (re.compile(r"((?<=[a-z0-9+.-]{2}):/{1,2}[^\s?#'\"]*+)(?:([?#])[^\s'\"]+)?", re.I), _hide_query),
    (re.compile(r"([?&](?=[\w.-]*?(?:key|token|secret|passw|sig|auth))[\w.-]*+=)[^\s&#'\"]+", re.I), r"\1***"),
    (re.compile(r"(--?(?:[\w.]*\.)?(?:api[-_]?key|hf[-_]token|password)(?:=|[ ,'\"]+))[^\s'\",-][^\s'\",]*", re.I), r"\1***"),
    (re.compile(r"(\bbearer\s+)[\w.~+/=-]{12,}", re.I), r"\1***"),
)


def make_safe(text: str) -> str:
    """Return the text with characters that steer a terminal (ESC, C1, turned directions) as escapes; newlines and tabs stay."""
    return _STEERING.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def redact(text: str) -> str:
    """Return the text with *** for credentials: in addresses (user:secret@, everything behind ?), flags (--api-key), bearer tokens."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


_SECRET_NAME = re.compile(r"key|token(?!iz)|secret|passw|credential|cookie|auth(?!or(_|s?$))", re.I)
_PLACE_NAME = re.compile(r"_(path|file|dir|sock|url)$", re.I)
_MIN_SECRET_LENGTH = 8  # characters; a shorter value is a word that any text may have


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or a header tells that its value is secret."""
    return _SECRET_NAME.search(name) is not None and _PLACE_NAME.search(name) is None


def create_value_hider(environment: Mapping[str, str]) -> Callable[[str], str]:
    """Create the function that shows values of secret variables in a text as ***: a program may quote the key that it was given.

    Args:
        environment: variables of the program, or headers of requests to it. Names tell which ones are secret: API_KEY, HF_TOKEN,
            PASSWORD, Authorization, but not a PASSWORD_FILE. Each of several words is one, as it is and as JSON has it.
    """
    named = (word for name, value in environment.items() if is_secret_name(name) for word in (value, *value.split()))
    words = {word for word in named if len(word) >= _MIN_SECRET_LENGTH}
    quoted = {json.dumps(word, ensure_ascii=in_ascii)[1:-1] for word in words for in_ascii in (True, False)}
    secrets = sorted(words | quoted, key=len, reverse=True)

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return text

    return hide


class RolloutsError(Exception):
    """Root of every exception that this library raises on purpose."""


class ConfigError(RolloutsError, ValueError):
    """A setting is unknown, out of range, or in conflict with another."""


class DataError(RolloutsError, ValueError):
    """A data set, conversation, tokenizer or file cannot be used as it is."""


class RewardError(RolloutsError, RuntimeError):
    """A reward function raised, exceeded its timeout, or did not return a finite number."""


class GenerationError(RolloutsError, RuntimeError):
    """Rollouts cannot be produced: a filter passes too little, or a generate function broke its contract."""


class GenerationTimeout(GenerationError, TimeoutError):
    """The awaited rollouts are not there in time. Nothing is lost: another wait may find them."""


class EpisodeInterrupted(GenerationError):
    """A request of an episode was aborted for a weight sync or a checkpoint. Let it pass: the episode is started again afterwards."""


class EpisodeError(RolloutsError, RuntimeError):
    """An episode over an environment cannot go on, through no fault of the policy's."""


class EnvironmentFault(EpisodeError):
    """An environment raised in reset or step, did not return in time, or returned a value that no environment returns."""


class ToolFault(EpisodeError):
    """A tool raised or did not return in time, and the policy is that this ends the episode."""


class ToolArgumentError(RolloutsError, ValueError):
    """A tool cannot work with its arguments; for tools to raise. It is the model's mistake, reported to it whatever the policy is."""


class SandboxError(RolloutsError, RuntimeError):
    """Code cannot be run in the confinement that was asked for, or a sandbox worker cannot be started."""


class BackendError(RolloutsError, RuntimeError):
    """A training job failed in a way that the user can act on, for example non-finite gradients step after step."""

    step: int | None = None  # step of the run in which it was raised, counted from 1; None = not told


class BadNumberError(BackendError):
    """A number of a step went bad, and the policy for its kind is to stop; or too many updates in a row were left out."""

    def __init__(self, message: str, kind: str = "", numbers: Mapping[str, float] | None = None, *, batch: object = None) -> None:
        super().__init__(message)
        self.kind = kind  # field of config.BadNumbers, or "parameter"; "" if not told
        self.numbers = dict(numbers or {})  # numbers of the update that were judged, such as grad_norm
        self.batch = batch  # TrainBatch that was refused before an update; None = an update was refused, or not known

    def __reduce__(self) -> tuple[type[BadNumberError], tuple[str, str, dict[str, float]]]:
        return type(self), (str(self), self.kind, self.numbers)


class CheckpointError(RolloutsError, RuntimeError):
    """A checkpoint cannot be written, found, verified or used with this model."""


class BlockingCallError(RolloutsError, RuntimeError):
    """A blocking call of the trainer facade inside a trio loop, or of an object that was closed."""


class OutputError(RolloutsError, RuntimeError):
    """A file of a run, such as its metrics or trajectories, cannot be written: the disk is full, or its directory refuses it."""


class EngineError(RolloutsError, RuntimeError):
    """An inference engine failed; the message names the engine."""


class EngineRequestError(EngineError):
    """A request cannot be answered, such as a prompt longer than the context. It was refused before it was sent, and would be again."""


class EngineContextError(EngineRequestError):
    """A prompt fills the engine's context or exceeds it. In an episode that has begun, this is its end, not a failure."""


class EngineTimeout(EngineError):
    """An engine did not answer within its deadline."""


class ReplayError(EngineError):
    """A request differs from the recorded session that it is part of, and the gateway has no engine to answer it."""


class EngineStatusError(EngineError):
    """An engine answered with an HTTP error status."""

    def __init__(self, status: int, url: str, body: str, reason: str = "") -> None:
        super().__init__(f"{url} answered with HTTP status {status}: {reason or body[:2000]}")
        self.status = status
        self.url = url
        self.body = body
        self.reason = reason  # the body's own explanation, "" if it has none

    def __reduce__(self) -> tuple[type[EngineStatusError], tuple[int, str, str, str]]:
        return type(self), (self.status, self.url, self.body, self.reason)


class EngineProtocolError(EngineError):
    """An engine's answer does not have the shape or the meaning that its protocol promises."""


@contextmanager
def raise_single_errors() -> Generator[None]:
    """Raise a failure that a nursery in the block wrapped into an ExceptionGroup of one as itself. Use it outside of cancel scopes."""
    failure: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        failure = group
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        notes, failure = getattr(failure, "__notes__", ()), failure.exceptions[0]
        for note in notes:  # as the prompt that was worked on, or a checkpoint that failed beside it
            failure.add_note(note)
    if failure is not None:
        raise failure


@contextmanager
def raise_alike_errors() -> Generator[None]:
    """Do as raise_single_errors, and raise several failures of one class as the first of them, see reduce_alike."""
    failure: Exception | None = None
    try:
        with raise_single_errors():
            yield
    except ExceptionGroup as group:
        failure = reduce_alike(group)
    if failure is not None:
        raise failure


def flatten_errors(error: Exception) -> tuple[Exception, ...]:
    """Return the errors in an ExceptionGroup, at any depth, or a tuple with the error itself."""
    if not isinstance(error, ExceptionGroup):
        return (error,)
    group: ExceptionGroup[Exception] = error
    return tuple(inner for part in group.exceptions for inner in flatten_errors(part))


def reduce_alike(error: Exception) -> Exception:
    """Return the first of a group of errors of one class, with a note of how many there were; return any other error as it is."""
    errors = flatten_errors(error)
    first = errors[0]
    if first is error or any(type(other) is not type(first) for other in errors):
        return error
    for note in getattr(error, "__notes__", []):
        first.add_note(note)
    if len(errors) > 1:
        first.add_note(f"and {len(errors) - 1} more {type(first).__name__} at the same moment")
    return first


def locate_error(error: BaseException) -> str:
    """Return the place where an exception was raised, as file:line; for a syntax error, its place in the file.

    If a user's function called a function of this library, of an installed package or of Python, and that raised: the place of the call.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames[1:] if is_own_code(frame.filename)]  # the first frame is the one that caught it
    frame = next(iter([*own[::-1], *frames[::-1]]), None)
    return "nowhere" if frame is None else f"{frame.filename}:{frame.lineno}"


def is_own_code(filename: str) -> bool:
    """Whether code of this file is a user's, not of this library, an installed package or Python."""
    return not filename.startswith(_list_installed())


@functools.cache
def _list_installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (*(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(__file__), "<frozen")


def find_own_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame of a user's code in a stack that ends with this frame; the frame itself if there is none."""
    own: FrameType | None = frame
    while own is not None and not is_own_code(own.f_code.co_filename):
        own = own.f_back
    return own or frame
