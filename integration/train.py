"""The main job: `python -m integration.train --mode sft+rl`. Parses arguments and calls integration.run.job.

Torch and the other imports of job take seconds, so job is imported after the arguments are parsed: --help and a misspelt option load
neither torch nor transformers. Ctrl-C in imports shows no traceback.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from integration.settings.command_line import CommandLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    argv = sys.argv[1:] if argv is None else argv
    with interrupts_end_the_process(), garbage_collection_off():
        from integration.run.exit_status import run_command
        from integration.run.launch import end_with_launcher, find_users_modules, is_follower, parse_quietly, silence_stdout
        from integration.settings.command_line import parse_command_line

    end_with_launcher(os.environ)
    find_users_modules()
    if is_follower(os.environ):
        with silence_stdout():
            return run_command(partial(parse_quietly, argv, os.environ), _follow, _goes_online)

    def parse() -> CommandLine:
        with garbage_collection_off():
            return parse_command_line(argv)

    return run_command(parse, partial(_run, argv), _goes_online, partial(_name_settings, argv))


def _name_settings(argv: Sequence[str], message: str) -> str:
    """Return an error's message with its settings named as the user wrote them."""
    from integration.settings.command_line import name_as_typed
    from integration.settings.config import Config

    return name_as_typed(argv, Config(), message)


def _goes_online(command: CommandLine) -> bool:
    from integration.parts.hub_models import names_hub

    return names_hub(command.config) or command.push_to_hub is not None


def _run(argv: Sequence[str], command: CommandLine) -> int:
    describes = command.dry_run or bool(command.explain)
    if not (command.quiet or describes or "RANK" in os.environ or "torch" in sys.modules):
        print("loading torch and transformers", file=sys.stderr, flush=True)
    if describes:
        return _describe(command)
    with interrupts_end_the_process(), garbage_collection_off():
        from integration.run import job
    if command.replay is not None:
        from integration.crash.replay import replay

        return replay(command.replay)
    return job.run(command, argv)


def _describe(command: CommandLine) -> int:
    """Execute a dry run, which is little else than imports: of torch and of what the settings need, and of no backend or engine."""
    with garbage_collection_off():
        with interrupts_end_the_process():
            from integration.dry_run.checks import check_run
            from integration.dry_run.describe import tell_explanation, tell_run
        if command.explain:
            return tell_explanation(command, check_run(command)[1])
        return tell_run(command, check_run(command)[1])


def _follow(command: CommandLine) -> int:
    with interrupts_end_the_process(), garbage_collection_off():
        from integration.run import job
    return job.follow(command)


@contextmanager
def interrupts_end_the_process() -> Generator[None]:
    """Make Ctrl-C end the process within the block, with one word and the exit status of an interrupted run.

    For imports: a KeyboardInterrupt would end in a long traceback, or be swallowed by an imported module. A SIGINT that is ignored or has
    another handler is left alone.
    """
    own = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not own:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)


@contextmanager
def garbage_collection_off() -> Generator[None]:
    """Collect no garbage in the block, for imports and parsing: they make objects that stay, and each collection visits all of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)  # EXIT_STOPPED of integration.run.exit_status, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
