"""Loggers of metrics, and their files.

Keys of durations end in `_s` (seconds), and so does the rate tokens_per_s; all other values are functions of config and seed.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from rollouts.checks import parse_json
from rollouts.errors import ConfigError, DataError
from rollouts.output_files import append_text, explain_writes, flush_file

if TYPE_CHECKING:
    from rollouts.types import Sample

Value: TypeAlias = "float | str"


class MetricsLogger(Protocol):
    """Logger of one line of metrics per step."""

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Record the metrics of a step."""
        ...

    def finish(self) -> None:
        """Flush buffered lines; nothing is logged afterwards."""
        ...


class JSONLLogger:
    """Logger of one JSON object per line: {"step": ..., **metrics}. When log() returns, the line is in the file and survives a kill.

    If the disk refuses a line, log() raises OutputError, and nothing of the line is in the file.

    NaN and infinities, which JSON does not have, are written as the strings "NaN", "Infinity", "-Infinity".
    """

    def __init__(self, path: Path | str) -> None:
        """
        Args:
            path: file to append to; created, with its directory, if missing. A directory, or a name without a suffix, gets a
                metrics.jsonl. A last line that a kill cut off is removed.
        """
        path = Path(path)
        self.path = path / "metrics.jsonl" if path.is_dir() or path.suffix == "" else path
        with explain_writes(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            _cut_torn_line(self.path)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Append one line."""
        assert "step" not in metrics, f"the key 'step' is taken by the step itself ({step}); found the metric step = {metrics['step']!r}"
        line = json.dumps({"step": step, **{key: _json_value(value) for key, value in metrics.items()}}, allow_nan=False)
        append_text(self.path, line + "\n")

    def offset(self) -> int:
        """Flush the file to the disk, which a checkpoint relies on, and return its length in bytes."""
        flush_file(self.path)
        return self.path.stat().st_size

    def finish(self) -> None:
        """Do nothing: no line is buffered."""


class StageLogger:
    """Logger that passes lines on with {"stage": name} in front."""

    def __init__(self, logger: MetricsLogger, stage: str, *, logged: int = -1) -> None:
        """
        Args:
            logged: last step of the stage whose line there is already, as the stage was finished before a kill; -1 = none. Lines up to it
                are left out: their steps are trained again, with the same numbers, where the stage's last checkpoint was damaged.
        """
        self._logger, self._stage, self._logged = logger, stage, logged

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Pass the line on, if there is none of its step from before a kill."""
        if step > self._logged:
            self._logger.log({"stage": self._stage, **metrics}, step)

    def offset(self) -> int | None:
        """Return the offset of the wrapped logger."""
        return log_offset(self._logger)

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Pass samples on, with the name of the stage."""
        log_samples(self._logger, samples, step, stage or self._stage)

    def finish(self) -> None:
        """Leave the wrapped logger open, since it may serve another stage."""


class CompositeLogger:
    """Logger that passes every line to several loggers, in order."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log with each."""
        for logger in self._loggers:
            logger.log(metrics, step)

    def offset(self) -> int | None:
        """Return the offset of the first logger with a file."""
        return next((offset for offset in map(log_offset, self._loggers) if offset is not None), None)

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Pass samples to each logger that has tables."""
        for logger in self._loggers:
            log_samples(logger, samples, step, stage)

    def finish(self) -> None:
        """Finish each logger, also if one of them raises."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.finish)


class WandbLogger:
    """Logger to Weights & Biases; needs `pip install rollouts-rl[wandb]`."""

    def __init__(
        self,
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        run_id: str | None = None,
        directory: Path | str | None = None,
    ) -> None:
        """
        Args:
            config: settings shown with the run; pass plain settings, never secrets.
            run_id: id of the run, with which a resumed run goes on; None = a new run.
            directory: directory for the files of wandb; None = its own default.

        Raises: ConfigError if the package is not installed.
        """
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError("WandbLogger needs the package wandb: pip install 'rollouts-rl[wandb]'") from error
        more: dict[str, Any] = {} if run_id is None else {"id": run_id, "resume": "allow"}
        more |= {} if directory is None else {"dir": str(directory)}
        self._wandb = wandb
        self._run: Any = wandb.init(project=project, name=name, config=dict(config or {}), **more)
        self._stages = set[str]()

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log one step. Stages share no step counter, so the step is logged as a metric, over which those of its stage are drawn."""
        stage, named = name_by_stage(metrics)
        if not stage:
            self._run.log({**named, "step": step})
            return
        self._draw_over_steps(stage)
        self._run.log({**named, f"{stage}/step": step})

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Log samples as a table."""
        from rollouts.training.logs.loggers import SAMPLE_COLUMNS, tabulate_samples

        self._draw_over_steps(stage)
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=tabulate_samples(samples, step))
        self._run.log({f"{stage}/samples" if stage else "samples": table, f"{stage}/step" if stage else "step": step})

    def _draw_over_steps(self, stage: str) -> None:
        if stage and stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def finish(self) -> None:
        """Upload buffered lines."""
        self._run.finish()


def name_by_stage(metrics: Mapping[str, Value]) -> tuple[str, dict[str, Value]]:
    """Return the stage of a line, "" without one, and its metrics under the names stage/metric."""
    stage = str(metrics.get("stage", ""))
    return stage, {f"{stage}/{name}" if stage else name: value for name, value in metrics.items() if name != "stage"}


def log_samples(logger: MetricsLogger | None, samples: Sequence[Sample], step: int, stage: str = "") -> None:
    """Log sampled rollouts of a step as a table, if the logger has tables."""
    method = getattr(logger, "log_samples", None)
    if method is not None and samples:
        method(samples, step, stage)


class _HasOffset(Protocol):
    def offset(self) -> int | None: ...


def log_offset(logger: MetricsLogger | None) -> int | None:
    """Return the length in bytes of a logger's file; None if it has none. A checkpoint keeps it, and resume truncates the file to it."""
    return cast("_HasOffset", logger).offset() if hasattr(logger, "offset") else None


def truncate_log(path: Path, offset: int) -> str | None:
    """Truncate a metrics file to its length at the time of a checkpoint.

    A file that is shorter, or has no line end there, has lost lines or was edited. The checkpoint is still valid, so the run continues
    after the last whole line.

    Returns: a message on the missing lines; None if none are missing.
    Raises: OutputError if the file cannot be truncated.
    """
    size = path.stat().st_size if path.exists() else 0
    problem = None
    if size < offset:
        problem = f"has {size} bytes, but the checkpoint was written when it had {offset}: lines are lost"
    if size == 0:
        return None if problem is None else f"{path} {problem}; the run goes on, and its lines begin here"
    with explain_writes(path), path.open("r+b") as file:
        found = file.read(offset)
        if problem is None and offset > 0 and not found.endswith(b"\n"):
            problem = f"has no end of a line at byte {offset}, where it ended when the checkpoint was written: it was edited, or is another"
        end, num_lines = found.rfind(b"\n") + 1, found.count(b"\n")
        if problem is not None:
            kept = path.with_name(f"{path.name}.before_resume")
            kept.write_bytes(found + file.read())
            problem = f"{path} {problem}; the run goes on behind the {num_lines} lines that are left of it, and {kept} is a copy"
        file.truncate(end)
    return problem


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; a last line cut off by a kill is left out.

    Raises: DataError naming the file, or file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read metrics from {path}: {error}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is a JSON {type(row).__name__}, expected an object of metrics")
        rows.append(cast("dict[str, Any]", row))
    return rows


@contextmanager
def measure(durations: dict[str, float], name: str, clock: Callable[[], float] = time.monotonic) -> Generator[None]:
    """Add the seconds that the block takes, also if it raises, to durations[f"{name}_s"].

    Example: `with measure(metrics, "generate"): batch = await manager.generate_batch()`
    """
    started = clock()
    try:
        yield
    finally:
        durations[f"{name}_s"] = durations.get(f"{name}_s", 0.0) + clock() - started


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _json_value(float(value))  # numpy and 0-d tensors
