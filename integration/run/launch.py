"""The processes of a run with backend.kind fsdp, started by torchrun, by hand or by this command: rank 0 runs, the others serve it."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import site
import sys
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from integration.run.exit_status import EXIT_FAILURE, EXIT_STOPPED, EXIT_USAGE
from integration.settings.command_line import CommandLine, parse_command_line
from integration.settings.config import Config
from rollouts.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rollouts.backends.ranks.group import RankGroup

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"


def is_follower(environment: Mapping[str, str]) -> bool:
    """Whether this process serves rank 0."""
    return environment.get(RANK, "0") != "0"


@contextmanager
def silence_stdout() -> Generator[None]:
    """Discard stdout in the block, for processes that serve rank 0."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def parse_quietly(argv: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Parse the command line of a process that serves rank 0, which reports errors. Raises SystemExit for an error.

    The first process of each machine reports errors, too: a file may be missing on one machine only.
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
    """Return the number of training processes, on this machine unless they are started: as configured, or one per free GPU, or 1.

    Raises: ConfigError if the configuration contradicts torchrun.
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
    import torch

    from integration.parts.placement import count_training_gpus

    on_gpus = config.model.device in ("cuda", "auto") and torch.cuda.is_available()
    return section.num_processes or (count_training_gpus(config, torch.cuda.device_count()) if on_gpus else 1)


def count_local_processes(num_processes: int, environment: Mapping[str, str]) -> int:
    """Return how many of a run's training processes are on this machine."""
    return int(environment.get("LOCAL_WORLD_SIZE", num_processes)) if RANK in environment else num_processes


def needs_launch(config: Config, environment: Mapping[str, str]) -> bool:
    """Whether this process must start all training processes under torchrun."""
    return RANK not in environment and count_processes(config, environment) > 1


def launch(module: str, argv: Sequence[str], num_processes: int, *, stop_s: int) -> int:
    """Start `num_processes` processes of `python -m module argv` on this machine under torchrun, and wait for their end.

    The rendezvous of torchrun's agent is a file that only this user can read; it opens no port.

    Args:
        stop_s: seconds between a signal and the kill of the processes: enough for a step and a checkpoint.

    Returns: 0 if all processes succeeded; the exit status of rank 0 if it ended by itself with another; else 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    # the ranks have their own store (rollouts.backends.ranks): torchrun's would listen at every address of this machine
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    meeting_place = tempfile.mkdtemp(prefix="rollouts-")  # mode 700
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=os.path.join(meeting_place, "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=stop_s,
    )
    # -P: a folder called integration in the working directory is not imported instead of this one, which is found without it if installed
    root = str(Path(__file__).resolve().parents[2])
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    logging.disable(logging.ERROR)  # rank 0 reports errors
    try:
        elastic_launch(settings, sys.executable)("-P", "-m", module, *argv)
    except ChildFailedError as error:
        own = error.failures.get(0)
        if told := describe_kill({rank: failure.exitcode for rank, failure in error.failures.items()}):
            sys.stderr.write(told + "\n")
        return own.exitcode if own is not None and own.exitcode > 0 else EXIT_FAILURE
    except SignalException as error:
        return EXIT_STOPPED if error.sigval in (signal.SIGINT, signal.SIGTERM) else 128 + int(error.sigval)
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(meeting_place, ignore_errors=True)
    return 0


def find_users_modules() -> None:
    """Let modules of the working directory be imported by name, behind all others."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """Let this process, if torchrun started it, get SIGTERM when torchrun's process is gone, even killed with -9. Linux only."""
    if "TORCHELASTIC_RUN_ID" not in environment or sys.platform != "linux":
        return
    from rollouts.sandbox.inside.kernel import PR_SET_PDEATHSIG, prctl

    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def watch_launcher(environment: Mapping[str, str]) -> Callable[[], bool] | None:
    """Undo end_with_launcher. Returns a function that tells whether torchrun's process is gone, or None if there is none to watch.

    Linux sends that signal once for each thread of a killed process: as a rule two to five times. A run takes the second for a user's
    order to stop without a checkpoint.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or sys.platform != "linux":
        return None
    from rollouts.sandbox.inside.kernel import PR_SET_PDEATHSIG, prctl

    launcher = os.getppid()  # before the next line: of a launcher that ends between the two, a signal comes
    prctl(PR_SET_PDEATHSIG, 0)
    return lambda: os.getppid() != launcher


def describe_kill(statuses: Mapping[int, int]) -> str | None:
    """Describe the death of a rank that rank 0 may not have reported, because the processes had not met yet.

    A rank ended by SIGTERM is no cause if another has failed: torchrun ends the remaining ranks with SIGTERM.

    Args:
        statuses: exit statuses of the ranks that failed or were told to end; -n = ended by signal n.

    Returns: None if rank 0 ended by itself, or no rank was killed.
    """
    killed = {rank: signal.Signals(-status) for rank, status in sorted(statuses.items()) if status < 0}
    causes = [rank for rank, number in killed.items() if number != signal.SIGTERM]
    if not causes and len(killed) == len(statuses):
        causes = list(killed)
    if not causes or statuses.get(0, -1) > 0:
        return None
    from rollouts.backends.ranks.watch import EXPLAIN_LOSS

    return f"error: rank {causes[0]} was ended by {killed[causes[0]].name}: {EXPLAIN_LOSS}"


def open_group(config: Config, environment: MutableMapping[str, str]) -> RankGroup:
    """Join the other processes. From then on followers end on rank 0's request, and pass it the signals that they get."""
    from rollouts.backends.ranks.group import join_ranks
    from rollouts.models.loading import parse_device

    group = join_ranks(environment, device=parse_device(config.model.device), timeout_s=config.backend.timeout_s)
    if group.rank > 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: group.ask_to_stop())
    return group
