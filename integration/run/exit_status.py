"""The exit status of a command, and messages for errors that a user can cause. Imports neither trio nor torch, for the sake of --help."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO, TypeVar, cast

from integration.run.signal_watch import stacks_on_request
from rollouts.errors import ConfigError, DataError, RolloutsError, locate_error, make_safe, redact

T = TypeVar("T")
EXIT_USAGE, EXIT_FAILURE, EXIT_STOPPED = 2, 1, 130
_MOST_SHOWN = 40  # characters of a name that is too long


class SafeText:
    """A text stream without terminal control characters and credentials, for text that contains others' input."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text made safe."""
        self._stream.write(make_safe(redact(text)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_stderr_safe() -> None:
    """Make stderr a SafeText: errors, warnings, logs, and a final traceback."""
    if not isinstance(sys.stderr, SafeText):
        sys.stderr = cast("TextIO", SafeText(sys.stderr))
    sys.excepthook = lambda kind, error, trace: print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


def stay_offline(command: object) -> bool:
    """Return False: the command names nothing on the hub."""
    return False


def run_command(
    parse: Callable[[], T],
    run: Callable[[T], int],
    goes_online: Callable[[T], bool] = stay_offline,
    name_settings: Callable[[str], str] = str,
) -> int:
    """Run a command and return its exit status: that of `run`, or that of a user's error, which is printed on stderr.

    Args:
        parse: parses the command line; called before heavy imports.
        run: receives the result of `parse`.
        goes_online: whether the parsed command names something on the hub. Other commands never ask a network, as with HF_HUB_OFFLINE=1.
        name_settings: replaces names of settings in the message of an error by those that the user wrote.
    """
    make_stderr_safe()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning about forks, which do not happen here
    with stacks_on_request():
        return _run_told(parse, run, goes_online, name_settings)


def _run_told(
    parse: Callable[[], T], run: Callable[[T], int], goes_online: Callable[[T], bool], name_settings: Callable[[str], str]
) -> int:
    try:
        command = parse()
        if not goes_online(command):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        _quiet_transformers()
        return _run_contained(run, command)
    except (ConfigError, DataError) as error:
        return report_error(error, EXIT_USAGE, name=name_settings)
    except RolloutsError as error:
        return report_error(error, EXIT_FAILURE)
    except BaseExceptionGroup as group:  # several tasks failed at the same time, for example the rewards of several samples
        errors, others = group.split(RolloutsError)
        if errors is None or others is not None:
            raise
        first, count = first_error(errors)
        return report_error(first, EXIT_FAILURE, f"\n  ({count - 1} more failed at the same time)")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = os.fsdecode(error.filename or "")
        told = (
            f"{name[:_MOST_SHOWN]}... ({len(name)} characters) is longer than the name of a file can be: correct the option that names it"
        )
        return report_error(ConfigError(told), EXIT_USAGE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_STOPPED


def _quiet_transformers() -> None:
    """Show no warnings and progress bars of transformers, imported already or not: its import takes longer than a dry run's other ones."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()


def _run_contained(run: Callable[[T], int], command: T) -> int:
    """Call `run`. A BaseException such as SystemExit from a user's function becomes an error with a message."""
    try:
        return run(command)
    except KeyboardInterrupt:
        raise
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from group
        _, others = group.split(Exception)
        if others is None:
            raise
        error, _ = first_error(others)
        raise _create_exit_error(error) from group
    except Exception:
        raise
    except BaseException as error:
        raise _create_exit_error(error) from error


def _create_exit_error(error: BaseException) -> RolloutsError:
    what = f"{type(error).__name__}{f' ({error})' if str(error) else ''} was raised at {locate_error(error)}"
    return RolloutsError(f"{what}. It would end the program: raise an Exception there, or return")


def first_error(group: BaseExceptionGroup[Any]) -> tuple[BaseException, int]:
    """Return the first error of a tree of groups, and the number of errors."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            first, count = first_error(error)
            leaves += [first] * count
        else:
            leaves.append(error)
    return leaves[0], len(leaves)


def report_error(error: BaseException, status: int, more: str = "", name: Callable[[str], str] = str) -> int:
    """Print an error with its notes on stderr, and return `status`. name: changes the message."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"error: {name(str(error))}{notes}{more}", file=sys.stderr, flush=True)
    return status
