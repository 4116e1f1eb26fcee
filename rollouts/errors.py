"""What can go wrong through a user's input or the world, as exceptions.

    RolloutsError
    ├── ConfigError(ValueError)            a setting: unknown, out of range, or in conflict with another
    ├── DataError(ValueError)              a data set, conversation, tokenizer or file of the user's
    ├── RewardError(RuntimeError)          a reward function: raised, timed out, or gave no finite number
    ├── GenerationError(RuntimeError)      rollouts that do not come: a filter that starves, a generate function that breaks its contract
    │   ├── GenerationTimeout(TimeoutError)  not there in time; another wait may find them
    │   └── EpisodeInterrupted             a workflow's episode was told to stop, for a weight sync or a checkpoint
    ├── EpisodeError(RuntimeError)         an episode over an environment that cannot go on
    │   ├── EnvironmentFault               the environment raised, was too slow, or returned what no environment returns
    │   └── ToolFault                      a tool did, and the policy was to end the episode
    ├── ToolArgumentError(ValueError)      a call of a tool with what it cannot work with: the model is told, it is no failure
    ├── SandboxError(RuntimeError)         code cannot be run as confined as was asked for, or its worker is not to be had
    ├── BackendError(RuntimeError)         training: non-finite updates, a job that cannot run
    ├── CheckpointError(RuntimeError)      a checkpoint that cannot be written, found, verified or used
    └── EngineError(RuntimeError)          an inference engine
        ├── EngineRequestError             a request that no engine can answer, refused before it was sent
        │   └── EngineContextError         its prompt does not fit into the engine's context
        ├── EngineTimeout                  no answer within the deadline
        ├── EngineStatusError              an HTTP error status, with url and body
        └── EngineProtocolError            an answer that does not mean what the protocol says

Each message says what was wrong, the value found and what to do. Errors of the programmer are assertions instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager


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
    """The rollouts that were waited for are not there in time. Nothing is lost: another wait may find them."""


class EpisodeInterrupted(GenerationError):
    """A request of an episode was aborted, for a weight sync or a checkpoint. Let it pass: the episode is begun again afterwards."""


class EpisodeError(RolloutsError, RuntimeError):
    """An episode over an environment cannot go on, through no fault of the policy's."""


class EnvironmentFault(EpisodeError):
    """An environment raised in reset or step, did not return in time, or did not return what an environment returns."""


class ToolFault(EpisodeError):
    """A tool raised or did not return in time, where the policy is that this ends the episode."""


class ToolArgumentError(RolloutsError, ValueError):
    """A tool cannot work with its arguments: for tools to raise. It is the model's mistake, which it is told, whatever the policy is."""


class SandboxError(RolloutsError, RuntimeError):
    """Code cannot be run in the confinement that was asked for, or a worker of a sandbox cannot be started."""


class BackendError(RolloutsError, RuntimeError):
    """A training job failed in a way the user can act on, for example non-finite gradients step after step."""


class CheckpointError(RolloutsError, RuntimeError):
    """A checkpoint cannot be written, found, verified or used with this model."""


class EngineError(RolloutsError, RuntimeError):
    """An inference engine failed; the message names the engine."""


class EngineRequestError(EngineError):
    """A request that cannot be answered, such as a prompt longer than the context: refused before it was sent, and would be again."""


class EngineContextError(EngineRequestError):
    """A prompt that fills the engine's context or exceeds it. In an episode that has begun, this is its end, not a failure."""


class EngineTimeout(EngineError):
    """An engine did not answer within its deadline."""


class EngineStatusError(EngineError):
    """An engine answered with an HTTP error status."""

    def __init__(self, status: int, url: str, body: str, reason: str = "") -> None:
        super().__init__(f"{url} answered with HTTP status {status}: {reason or body[:2000]}")
        self.status = status
        self.url = url
        self.body = body
        self.reason = reason  # what the body says, where that is known

    def __reduce__(self) -> tuple[type[EngineStatusError], tuple[int, str, str, str]]:
        return type(self), (self.status, self.url, self.body, self.reason)


class EngineProtocolError(EngineError):
    """An engine's answer does not have the shape or the meaning that its protocol promises."""


@contextmanager
def raise_single_errors() -> Generator[None]:
    """Raise a failure that a nursery in the block wrapped into an ExceptionGroup of one as itself; stands outside of cancel scopes."""
    failure: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        failure = group
    while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
        failure = failure.exceptions[0]
    if failure is not None:
        raise failure


def flatten_errors(error: Exception) -> tuple[Exception, ...]:
    """The errors in an ExceptionGroup, at any depth; of another error, itself."""
    if not isinstance(error, ExceptionGroup):
        return (error,)
    group: ExceptionGroup[Exception] = error
    return tuple(inner for part in group.exceptions for inner in flatten_errors(part))


def reduce_alike(error: Exception) -> Exception:
    """The first of a group of errors of one class, with a note that tells how many there were; another error is returned as it is."""
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
    """Where an exception was raised, as file:line; of a syntax error, where it is."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
