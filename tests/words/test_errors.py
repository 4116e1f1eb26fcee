"""The tree of exceptions: what users can catch, what the messages keep, and errors that cross process boundaries."""

from __future__ import annotations

import inspect
import io
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from rollouts import errors
from rollouts.errors import (
    BackendError,
    BadNumberError,
    BlockingCallError,
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
    OutputError,
    ReplayError,
    RewardError,
    RolloutsError,
    SandboxError,
    ToolArgumentError,
    ToolFault,
    create_value_hider,
    make_safe,
    raise_single_errors,
    redact,
)

ROOT = Path(__file__).parents[2]

TREE = [
    (ConfigError, RolloutsError, ValueError),
    (DataError, RolloutsError, ValueError),
    (RewardError, RolloutsError, RuntimeError),
    (GenerationError, RolloutsError, RuntimeError),
    (GenerationTimeout, GenerationError, TimeoutError),
    (BlockingCallError, RolloutsError, RuntimeError),
    (OutputError, RolloutsError, RuntimeError),
    (EpisodeInterrupted, GenerationError, RuntimeError),
    (EpisodeError, RolloutsError, RuntimeError),
    (EnvironmentFault, EpisodeError, RuntimeError),
    (ToolFault, EpisodeError, RuntimeError),
    (ToolArgumentError, RolloutsError, ValueError),
    (SandboxError, RolloutsError, RuntimeError),
    (BackendError, RolloutsError, RuntimeError),
    (BadNumberError, BackendError, RuntimeError),
    (CheckpointError, RolloutsError, RuntimeError),
    (EngineError, RolloutsError, RuntimeError),
    (EngineRequestError, EngineError, RuntimeError),
    (EngineContextError, EngineRequestError, RuntimeError),
    (EngineTimeout, EngineError, RuntimeError),
    (ReplayError, EngineError, RuntimeError),
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


async def test_notes_on_the_groups_of_one_failure_stay():
    with pytest.raises(DataError, match="the file") as caught, raise_single_errors():
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail, DataError("the file"))
        except ExceptionGroup as group:
            group.add_note("while working on prompt 3")
            raise
    assert caught.value.__notes__ == ["while working on prompt 3"]


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


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202egnp.exe"


def test_text_of_others_steers_no_terminal():
    assert make_safe(STEERING) == "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\r\\u202egnp.exe"
    assert make_safe("é \t\n€🙂") == "é \t\n€🙂"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no answer from http://me:s3cret@host:8000/v1: 401", "no answer from http://***@host:8000/v1: 401"),
        ("HTTPS://s3cret@host", "HTTPS://***@host"),
        ("http://me:s3@cret@host/x", "http://***@host/x"),
        ("http://me:s3/cr/et@host:1/x and http://me:s3/@host", "http://***@host:1/x and http://***@host"),
        ("http://host:8000/v1/me@home 'http://host:s3cret/' me@home", None),
        ("'http://host:1/v1?key=s3cret&x=1' failed", "'http://host:1/v1?***' failed"),
        ("GET /v1?api_key=s3cret&n=1", "GET /v1?api_key=***&n=1"),
        ("Authorization: Bearer s3cret-s3cret-s3cret", "Authorization: Bearer ***"),
        ("vllm serve --api-key s3cret --port 1", "vllm serve --api-key *** --port 1"),
        ("('--api-key', 's3cret')", "('--api-key', '***')"),
        ("--engine.api-key=s3cret", "--engine.api-key=***"),
        ("--engine.api-key-variable MY_KEY --rl.max-tokens-per-microbatch 4096", None),
        ("http://host:8000/v1 and me@example.com, a@b", None),
        (
            "http://host/a?b=1#c 'http://host/a#s3cret' http://me:s3@host/?s3cret",
            "http://host/a?*** 'http://host/a#***' http://***@host/?***",
        ),
        ("1.http://me:s3cret@host and " + "a" * 40 + "://me:s3cret@host", "1.http://***@host and " + "a" * 40 + "://***@host"),
        ("C:/users/me@home http://host/? x", None),
    ],
)
def test_credentials_are_taken_out_of_messages_and_nothing_else_is(text: str, expected: str | None):
    assert redact(text) == (text if expected is None else expected)


@pytest.mark.parametrize(
    "part", ["a.", "ab:/", "ab://", "ab://b:/", "ab://x@", "?key", "?key.", "&token=", "-a.", "--api-key ", "bearer ", "http://h?", "@"]
)
def test_a_long_text_is_searched_for_credentials_in_one_pass(part: str):
    redact(part * (2**20 // len(part)))  # one pass takes less than a second; one for each part would take hours


def test_what_a_command_ends_with_is_harmless_whatever_raised_it(capsys):
    from integration.run.exit_status import run_command

    def fail(command: object) -> int:
        raise ConfigError(f"the reward said {STEERING} http://me:s3cret@host")

    assert run_command(lambda: None, fail) == 2
    told = capsys.readouterr().err
    assert "the reward said \\x1b]0;owned" in told
    assert "s3cret" not in told
    assert not set("\x1b\x07\x9b\r\u202e") & set(told)


@pytest.mark.slow
def test_a_traceback_of_the_command_is_harmless_too(tmp_path: Path):
    code = "import sys\nfrom integration.run.exit_status import run_command\ndef fail(c):\n    raise ValueError(sys.argv[1])\n"
    code += "run_command(int, fail)"
    ended = subprocess.run([sys.executable, "-c", code, STEERING + " http://me:s3cret@host"], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 1
    assert "ValueError: \\x1b]0;owned" in ended.stderr
    assert not set("\x1b\x07\x9b\u202e") & set(ended.stderr)
    assert "s3cret" not in ended.stderr


@pytest.mark.parametrize(
    "flags",
    [["--engine.urls", "http://me:s3cret@localhost:1"], ["--engine.urls", "http://localhost:1?key=s3cret"],
     ["--engine.launch", "--engine.extra-args=--api-key", "s3cret"], ["--engine.kind", "inprocess", "--engine.urls", "http://s3cret@localhost"]],
)  # fmt: skip
def test_credentials_among_the_settings_are_refused_before_anything_is_written(tmp_path: Path, capsys, flags):
    from integration.train import main

    directory = tmp_path / "run"
    assert main(["--mode", "rl", "--output-dir", str(directory), "--engine.kind", "vllm", *flags]) == 2
    told = capsys.readouterr()
    assert "--engine.api-key-variable" in told.err
    assert "s3cret" not in told.err + told.out
    assert not directory.exists()


@pytest.mark.parametrize("url", ["me:s3cret@localhost:1", "//me:s3cret@localhost:1", "localhost:1"])
def test_an_address_without_a_scheme_is_refused_before_anything_is_written(tmp_path: Path, capsys, url: str):
    from integration.train import main

    directory = tmp_path / "run"
    assert main(["--mode", "rl", "--output-dir", str(directory), "--engine.kind", "vllm", "--engine.urls", url]) == 2
    told = capsys.readouterr()
    assert "'localhost:1', which has no scheme http or https: give http://host:port" in told.err
    assert "s3cret" not in told.err + told.out
    assert not directory.exists()


def test_what_is_said_while_a_run_goes_on_is_harmless():
    from integration.run.display import Progress

    stream = io.StringIO()
    Progress({}, stream=stream, clock=lambda: 0.0).say(f"the server said {STEERING} http://me:s3cret@host")
    assert "\\x1b]0;owned" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "s3cret" not in stream.getvalue()


def test_values_of_secret_variables_are_hidden_and_others_are_not():
    hide = create_value_hider({
        "API_KEY": "secret-one", "Authorization": "Bearer secret-two", "GIT_AUTHOR_NAME": "somebody", "AUTHORS": "some people",
        "HF_TOKEN_PATH": "/etc/a-token", "SSH_AUTH_SOCK": "/run/agent", "MY_PASSWORD": "short", "COOKIE": "session=1234",
        "DB_PASSWORD": "secret-one-and-more",
    })  # fmt: skip
    told = "secret-one-and-more, secret-one, secret-two, Bearer x, somebody, some people, /etc/a-token, /run/agent, short, session=1234"
    assert hide(told) == "***, ***, ***, Bearer x, somebody, some people, /etc/a-token, /run/agent, short, ***"


def test_values_of_secret_variables_are_hidden_in_json_and_those_of_tokenizers_are_none():
    values = {"DB_PASSWORD": 'back\\slash"quote', "API_KEY": "schl\u00fcssel-des-dienstes", "TOKENIZER_NAME": "someone/a-model"}
    hide = create_value_hider(values)
    for in_ascii in (True, False):
        told = hide(json.dumps(values, ensure_ascii=in_ascii))
        assert json.loads(told) == {"DB_PASSWORD": "***", "API_KEY": "***", "TOKENIZER_NAME": "someone/a-model"}
