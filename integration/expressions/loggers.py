"""--loggers: loggers of metrics besides metrics.jsonl and the display, as expressions in the language of integration.expressions.algorithm.

wandb(project='mine', name='first')     Weights & Biases; needs `pip install rollouts-rl[wandb]`
tensorboard                             event files in loggers/tensorboard of the run
trackio(project='mine')                 Trackio's local store
mlflow(tracking_uri='sqlite:///m.db')   MLflow
jsonl('copy.jsonl')                     a further file; a resumed run appends to it
my_module:my_logger(rate=2)             a function of the user's that returns a MetricsLogger
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from integration.expressions.algorithm import Language, PresetCall, describe_call, parse_expression
from rollouts.checks import parse_json
from rollouts.errors import ConfigError, locate_error, redact
from rollouts.output_files import replace_file
from rollouts.rewards.answers import load_function
from rollouts.training.logs.continued import TIMEOUT_S, ContinuedLogger
from rollouts.training.logs.loggers import MLflowLogger, TensorBoardLogger, TrackioLogger
from rollouts.training.logs.wandb_files import read_offline_steps
from rollouts.training.metrics import JSONLLogger, MetricsLogger, Value, WandbLogger
from rollouts.types import Sample

PROJECT = "rollouts"
"""Default project, or experiment, of loggers."""

_SETTLED_S = 30.0  # seconds after which Weights & Biases has written a line to its file: it does every 15


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The run that loggers are told of."""

    directory: Path
    settings: Mapping[str, Any]  # plain values, without secrets
    earlier: Sequence[Mapping[str, Any]] | None = None  # lines of metrics that a resumed run goes on behind; None = the run is new

    @property
    def name(self) -> str:
        """Name of the run: that of its directory."""
        return self.directory.resolve().name


def _jsonl(path: str, *, run: RunIdentity) -> MetricsLogger:
    return JSONLLogger(path)


def _wandb(project: str = PROJECT, name: str | None = None, *, run: RunIdentity) -> MetricsLogger:
    files = run.directory / LOGGERS
    files.mkdir(parents=True, exist_ok=True)
    run_id = _keep(files / "wandb_id", secrets.token_hex(4))
    stored = read_offline_steps(files / "wandb")  # before this process adds a part
    logger = WandbLogger(project, name or run.name, run.settings, run_id=run_id, directory=files)
    return MarkedLogger(logger, files / "wandb_steps.json", stored=stored)


def _tensorboard(directory: str | None = None, *, run: RunIdentity) -> MetricsLogger:
    return TensorBoardLogger(directory or run.directory / LOGGERS / "tensorboard", run.settings)


def _trackio(project: str = PROJECT, name: str | None = None, *, run: RunIdentity) -> MetricsLogger:
    return TrackioLogger(project, name or run.name, run.settings)


def _mlflow(experiment: str = PROJECT, name: str | None = None, tracking_uri: str | None = None, *, run: RunIdentity) -> MetricsLogger:
    kept = run.directory / LOGGERS / "mlflow_run_id"
    run_id = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
    logger = MLflowLogger(experiment, name or run.name, run.settings, tracking_uri=tracking_uri, run_id=run_id)
    kept.parent.mkdir(parents=True, exist_ok=True)
    _keep(kept, logger.run_id)
    return logger


def _keep(path: Path, value: str) -> str:
    """Return what a file of the run holds; write the value there if it does not exist."""
    if not path.exists():
        replace_file(path, value + "\n")
    return path.read_text(encoding="utf-8").strip()


class MarkedLogger:
    """A logger whose store may be elsewhere and cannot be read back, with a file of the last step of each stage beside it.

    A process of the logger keeps new lines in memory for some seconds, and a kill of the run ends it, too. A line is therefore marked when
    _SETTLED_S have passed, or the logger has finished: after a kill the lines that may be lost are written again.
    """

    def __init__(
        self, logger: WandbLogger, path: Path, clock: Callable[[], float] = time.monotonic, stored: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            path: file of the marks.
            stored: last step of each stage in the store, where it can be read back: the marks then count for other stages alone, whose
                files may have been removed after they were sent.
        """
        self._logger, self._path, self._clock, self._stored = logger, path, clock, stored
        self._steps: dict[str, int] = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._waiting = deque[tuple[float, str, int]]()  # time, stage and step of lines that are not marked

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log a line, and mark those that have settled."""
        self._logger.log(metrics, step)
        self._waiting.append((self._clock(), str(metrics.get("stage", "")), step))
        self._mark(self._clock() - _SETTLED_S)

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Pass samples on."""
        self._logger.log_samples(samples, step, stage)

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each stage that is in the store; of a stage without one there, the marked one."""
        return {**self._steps, **(self._stored or {})}

    def finish(self) -> None:
        """Finish the logger, and mark all of its lines."""
        self._logger.finish()
        self._mark(math.inf)

    def _mark(self, until: float) -> None:
        settled = dict[str, int]()
        while self._waiting and self._waiting[0][0] <= until:
            _, stage, step = self._waiting.popleft()
            settled[stage] = step
        if settled:
            self._steps |= settled
            replace_file(self._path, json.dumps(self._steps) + "\n")


LOGGERS = "loggers"
"""Directory of a run for the files and names of its loggers."""

_PACKAGES: Mapping[str, str] = MappingProxyType({"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio", "mlflow": "mlflow"})
_KNOWN: Mapping[str, Callable[..., MetricsLogger]] = MappingProxyType(
    {"jsonl": _jsonl, "wandb": _wandb, "tensorboard": _tensorboard, "trackio": _trackio, "mlflow": _mlflow}
)
_LANGUAGE = Language("logger", _KNOWN, load_function, example="wandb(project='mine')", hidden="run")
_SECRET = re.compile(r"(?i)(api_?key|token|password|secret)")


def parse_loggers(expressions: Sequence[str]) -> tuple[PresetCall, ...]:
    """Parse expressions to loggers with checked arguments.

    Raises: ConfigError, also for a secret among the arguments, which config.json would show.
    """
    calls = tuple(parse_expression(expression, _LANGUAGE) for expression in expressions)
    for call in calls:
        for name, value in call.arguments.items():
            if _SECRET.search(name) or (isinstance(value, str) and redact(value) != value):
                raise ConfigError(
                    f"loggers {call.name} has a secret in the argument {name!r}, which the files of the run would show: leave it out, and "
                    "export it as the variable that the logger reads (WANDB_API_KEY, MLFLOW_TRACKING_USERNAME and "
                    "MLFLOW_TRACKING_PASSWORD, HF_TOKEN)"
                )
    return calls


def check_loggers(expressions: Sequence[str]) -> None:
    """Raise ConfigError for a logger whose package is not installed, before anything is written."""
    for call in parse_loggers(expressions):
        package = _PACKAGES.get(call.name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"loggers {call.text} needs the package {package}: pip install 'rollouts-rl[{package}]', or leave it out")


def create_loggers(expressions: Sequence[str], run: RunIdentity, *, timeout_s: float = TIMEOUT_S) -> list[MetricsLogger]:
    """Create the loggers of a run. One that fails or hangs, now or later, is named in a warning, and the run goes on without it.

    Args:
        timeout_s: seconds for the start, a line, and the end of each.

    Raises: ConfigError if a user's function fails or does not return a logger; those that were created before it are finished.
    """
    created: list[MetricsLogger] = []
    try:
        for call in parse_loggers(expressions):
            created.append(ContinuedLogger(partial(_create_logger, call, run), call.text, run.earlier, timeout_s=timeout_s))
    except BaseException:
        for logger in created:
            logger.finish()
        raise
    return created


def _create_logger(call: PresetCall, run: RunIdentity) -> MetricsLogger:
    if call.name in _KNOWN:
        return call.function(**call.arguments, run=run)
    try:
        logger = cast("object", call.function(**call.arguments))
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"loggers {call.text} raised {type(error).__name__}: {error} ({locate_error(error)})") from error
    missing = [name for name in ("log", "finish") if not callable(getattr(logger, name, None))]
    if missing:
        lacks = " and no ".join(f"{name}()" for name in missing)
        raise ConfigError(f"loggers {call.text} returned a {type(logger).__name__}, which has no {lacks}: see rollouts.MetricsLogger")
    return cast("MetricsLogger", logger)


def describe_loggers(expressions: Sequence[str]) -> str:
    """Describe all destinations of metrics, for a dry run."""
    return ", ".join(["metrics.jsonl", "the display", *map(describe_call, parse_loggers(expressions))])
