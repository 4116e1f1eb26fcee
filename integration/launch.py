"""The processes of a run with backend.kind fsdp: started by torchrun, by hand or by this command itself; rank 0 runs, the others serve."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch

from integration.command_line import CommandLine, parse_command_line
from integration.config import Config
from integration.run_directory import EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE
from rollouts.backends.factory import parse_device
from rollouts.backends.rank_failures import EXPLAIN_LOSS
from rollouts.backends.rank_group import RankGroup, join_ranks
from rollouts.errors import ConfigError, DataError

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"


def is_follower(environment: Mapping[str, str]) -> bool:
    """Whether torchrun started this process to serve another one."""
    return environment.get(RANK, "0") != "0"


@contextmanager
def silence_stdout() -> Generator[None]:
    """In a process that serves another one: stdout is rank 0's."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def parse_quietly(argv: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """The command line of a process that serves another one, which says what is wrong with it. Raises SystemExit then.

    The first process of a machine without rank 0 says it, too: a file may be missing there alone.
    """
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return parse_command_line(argv)
    except (ConfigError, DataError) as error:
        status, problem = EXIT_USAGE, str(error)
    except SystemExit as end:
        status, problem = end.code, told.getvalue().strip()
    if status and environment.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"rank {environment[RANK]}: {problem}\n")
    raise SystemExit(status)


def count_processes(config: Config, environment: Mapping[str, str]) -> int:
    """How many processes train, on this machine if they are not started yet: as configured, or one for each GPU, or 1.

    Raises: ConfigError where the configuration and torchrun say different things.
    """
    section = config.backend
    if RANK in environment:
        found = int(environment.get(WORLD_SIZE, "1"))
        if section.kind != "fsdp" and found > 1:
            raise ConfigError(
                f"WORLD_SIZE is {found}, but backend.kind is {section.kind!r}, which trains in one process: add --backend.kind fsdp, or "
                "start one process, without torchrun"
            )
        if section.kind == "fsdp" and section.num_processes not in (None, found):
            raise ConfigError(
                f"backend.num_processes is {section.num_processes}, but torchrun started {found}: leave --backend.num-processes out"
            )
        return found
    if section.kind != "fsdp":
        return 1
    on_gpus = config.model.device in ("cuda", "auto") and torch.cuda.is_available()
    return section.num_processes or (torch.cuda.device_count() if on_gpus else 1)


def needs_launch(config: Config, environment: Mapping[str, str]) -> bool:
    """Whether this process is to start the others under torchrun, and itself anew as one of them."""
    return RANK not in environment and count_processes(config, environment) > 1


def launch(module: str, argv: Sequence[str], num_processes: int, *, stop_s: int) -> int:
    """Start `python -m module argv` so many times on this machine, under torchrun, and wait for the end.

    Args:
        stop_s: that the processes have to end after a signal, before they are killed: a step and a checkpoint.

    Returns: 0 if all processes did what they should; the exit status of rank 0 if it ended by itself with another; else 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=stop_s,
    )
    logging.disable(logging.ERROR)  # what happened is told by rank 0
    try:
        elastic_launch(settings, sys.executable)("-m", module, *argv)
    except ChildFailedError as error:
        own = error.failures.get(0)
        if told := describe_kill({rank: failure.exitcode for rank, failure in error.failures.items()}):
            sys.stderr.write(told + "\n")
        return own.exitcode if own is not None and own.exitcode > 0 else EXIT_FAILURE
    except SignalException as error:
        return EXIT_STOPPED if error.sigval in (signal.SIGINT, signal.SIGTERM) else 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def describe_kill(statuses: Mapping[int, int]) -> str | None:
    """What rank 0 may not have told: before the processes have met, it cannot know.

    A rank that was ended by SIGTERM says nothing where another has failed: torchrun ends the others so.

    Args:
        statuses: exit statuses of the ranks that failed or were told to end; -n = ended by signal n.

    Returns: None where rank 0 has ended by itself, or nobody was killed.
    """
    killed = {rank: signal.Signals(-status) for rank, status in sorted(statuses.items()) if status < 0}
    causes = [rank for rank, number in killed.items() if number != signal.SIGTERM]
    if not causes and len(killed) == len(statuses):
        causes = list(killed)
    if not causes or statuses.get(0, -1) > 0:
        return None
    return f"error: rank {causes[0]} was ended by {killed[causes[0]].name}: {EXPLAIN_LOSS}"


def open_group(config: Config, environment: Mapping[str, str]) -> RankGroup:
    """Meet the other processes. From here on, followers end when rank 0 says so, not by the signals that torchrun sends to all."""
    group = join_ranks(environment, device=parse_device(config.model.device), timeout_s=config.backend.timeout_s)
    if group.rank > 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    return group
