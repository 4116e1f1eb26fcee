"""Commands that serve a model until they are stopped, the gateway and the tinker server: the options that both have, and their run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from integration.closed_stdout import ignore_closed_stdout
from integration.settings.help_text import name_as_started
from integration.settings.other_names import describe_unknown
from rollouts.errors import ConfigError

Command = TypeVar("Command")


def create_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of every command that serves a model; each command adds its own ones."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--model.path", dest="path")
    parser.add_argument("--model.device", dest="device", default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-variable")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def read_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, program: str, help_text: str, models: str = "one model"
) -> argparse.Namespace:
    """Return the arguments, or print the help and leave.

    Args:
        parser: made by `create_parser`.
        argv: arguments as typed.
        program: command as its help names it.
        help_text: its help, each option at the beginning of a line.
        models: whatever may stand in the place of the model, for the message about a second one.

    Raises: ConfigError; SystemExit for the help and, with options of a similar name on stderr, for unknown options.
    """
    if {"--help", "-h", "--help-all"} & set(argv):
        with ignore_closed_stdout():
            print(name_as_started(help_text))
        raise SystemExit(0)
    try:
        given, others = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}; {name_as_started(program)} --help describes the options") from error
    unknown = [argument.partition("=")[0] for argument in others if argument.startswith("--")]
    if unknown:
        known = re.findall(r"^  (--[\w.-]+)", help_text, flags=re.MULTILINE)
        sys.stderr.write(f"{describe_unknown(unknown, known)}\n  {name_as_started(program)} --help lists the options\n")
        raise SystemExit(2)
    if others:
        raise ConfigError(f"{others[0]!r} stands behind the model: give {models}, and options by their names")
    return given


def read_model(given: argparse.Namespace) -> str | None:
    """Return the model as typed, None for the built-in one. Raises ConfigError if it is named twice."""
    if given.model is not None and given.path is not None:
        raise ConfigError(f"the model is named twice, {given.model!r} and --model.path {given.path!r}: leave one of them out")
    return given.model or given.path


def read_token(given: argparse.Namespace) -> str | None:
    """Return the API key that --token-variable names, None without that option. Raises ConfigError if there is none in the environment."""
    if given.token_variable is None:
        return None
    token = os.environ.get(given.token_variable)
    if not token:
        raise ConfigError(f"--token-variable {given.token_variable} names no variable of the environment with a token: set it")
    return token


def goes_online(model: str | None) -> bool:
    """Whether the model is named by its name on the hub."""
    from rollouts.models.hub import is_hub_name

    return model is not None and is_hub_name(model.partition("@")[0])


def run_until_stopped(serve: Callable[[Command], Awaitable[None]], command: Command) -> int:
    """Call the function that serves, which ends by Ctrl-C or by an error. Returns the exit status."""
    import trio

    from integration.run.job import favor_computation

    with favor_computation():
        trio.run(serve, command)
    return 0


def name_options(message: str, config: str, settings: Collection[str]) -> str:
    """Return the message of an error with the options of the command for settings of the library.

    Args:
        config: name of the class of the settings.
        settings: its fields that are options of the same name; token and device are options of every such command.
    """
    for name in settings:
        message = message.replace(f"{config}.{name} ", f"--{name.replace('_', '-')} ")
    message = re.sub(r"^(?:model\.)?device is ", "--model.device is ", message)
    return message.replace(f"{config}.token ", "--token-variable ")
