"""The tree of exceptions: what users can catch, what the messages keep, and errors that cross process boundaries."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
import trio

from rollouts import errors
from rollouts.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    EngineContextError,
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineStatusError,
    EngineTimeout,
    EnvironmentFault,
    EpisodeError,
    EpisodeInterrupted,
    GenerationError,
    GenerationTimeout,
    RewardError,
    RolloutsError,
    SandboxError,
    ToolArgumentError,
    ToolFault,
    raise_single_errors,
)

TREE = [
    (ConfigError, RolloutsError, ValueError),
    (DataError, RolloutsError, ValueError),
    (RewardError, RolloutsError, RuntimeError),
    (GenerationError, RolloutsError, RuntimeError),
    (GenerationTimeout, GenerationError, TimeoutError),
    (EpisodeInterrupted, GenerationError, RuntimeError),
    (EpisodeError, RolloutsError, RuntimeError),
    (EnvironmentFault, EpisodeError, RuntimeError),
    (ToolFault, EpisodeError, RuntimeError),
    (ToolArgumentError, RolloutsError, ValueError),
    (SandboxError, RolloutsError, RuntimeError),
    (BackendError, RolloutsError, RuntimeError),
    (CheckpointError, RolloutsError, RuntimeError),
    (EngineError, RolloutsError, RuntimeError),
    (EngineRequestError, EngineError, RuntimeError),
    (EngineContextError, EngineRequestError, RuntimeError),
    (EngineTimeout, EngineError, RuntimeError),
    (EngineStatusError, EngineError, RuntimeError),
    (EngineProtocolError, EngineError, RuntimeError),
]


@pytest.mark.parametrize(("error", "parent", "builtin"), TREE)
def test_each_error_is_also_a_built_in_one(error, parent, builtin):
    assert issubclass(error, parent)
    assert issubclass(error, builtin)
    assert not issubclass(error, AssertionError)


def test_the_tree_in_the_docstring_is_the_tree_in_the_code():
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, RolloutsError)}
    drawn = set(re.findall(r"(?:^ +|── )(\w+)", errors.__doc__ or "", flags=re.MULTILINE))
    assert defined == drawn == {error.__name__ for error, _, _ in TREE} | {"RolloutsError"}


def test_a_status_error_keeps_status_url_and_body_and_pickles():
    error = EngineStatusError(503, "http://localhost:1/generate", "x" * 5000)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.url, copy.body) == (503, "http://localhost:1/generate", "x" * 5000)
    assert str(copy) == str(error) == "http://localhost:1/generate answered with HTTP status 503: " + "x" * 2000


@pytest.mark.parametrize("error", [error for error, _, _ in TREE if error is not EngineStatusError])
def test_errors_pickle(error):
    copy = pickle.loads(pickle.dumps(error("what was wrong")))
    assert type(copy) is error
    assert str(copy) == "what was wrong"


async def fail(error: BaseException) -> None:
    raise error


async def test_one_failure_of_a_nursery_is_raised_as_itself():
    with pytest.raises(DataError, match="the file"), raise_single_errors():
        async with trio.open_nursery() as outer:
            async with trio.open_nursery() as inner:
                inner.start_soon(fail, DataError("the file"))
            outer.start_soon(trio.sleep_forever)


async def test_several_failures_stay_a_group():
    with pytest.raises(ExceptionGroup) as caught, raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, DataError("one"))
            nursery.start_soon(fail, RewardError("two"))
    assert {type(error) for error in caught.value.exceptions} == {DataError, RewardError}


async def test_what_is_no_group_passes_unchanged():
    with raise_single_errors():
        pass
    with pytest.raises(KeyError, match="plain"), raise_single_errors():
        raise KeyError("plain")
    with pytest.raises(KeyboardInterrupt), raise_single_errors():
        raise BaseExceptionGroup("", [KeyboardInterrupt()])
