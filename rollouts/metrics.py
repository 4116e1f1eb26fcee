"""Metrics: where lines of them go, and pure summaries of rollouts.

Every key that is a duration ends in `_s` (seconds); everything else is a function of config and seed.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from rollouts.errors import CheckpointError, ConfigError, DataError
from rollouts.types import Sample, Status

Value: TypeAlias = "float | str"


class MetricsLogger(Protocol):
    """Takes one line of metrics a step."""

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Record the metrics of a step."""
        ...

    def finish(self) -> None:
        """Write out what is buffered; nothing is logged afterwards."""
        ...


class JSONLLogger:
    """One JSON object a line: {"step": ..., **metrics}. Each line is in the file when log() returns and survives a kill of the process.

    NaN and infinities, which JSON does not have, are written as the strings "NaN", "Infinity", "-Infinity".
    """

    def __init__(self, path: Path | str) -> None:
        """
        Args:
            path: appended to; made, with its directory, if it is not there. A directory, or a name without a suffix, gets a
                metrics.jsonl. A last line that a kill cut off is removed, so that the next line stands alone.
        """
        path = Path(path)
        self.path = path / "metrics.jsonl" if path.is_dir() or path.suffix == "" else path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        _cut_torn_line(self.path)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Append one line."""
        assert "step" not in metrics, f"the key 'step' is taken by the step itself ({step}); found the metric step = {metrics['step']!r}"
        line = json.dumps({"step": step, **{key: _json_value(value) for key, value in metrics.items()}}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def offset(self) -> int:
        """Length of the file in bytes."""
        return self.path.stat().st_size

    def finish(self) -> None:
        """Nothing is buffered."""


class StageLogger:
    """Passes lines on with {"stage": name} in front."""

    def __init__(self, logger: MetricsLogger, stage: str) -> None:
        self._logger, self._stage = logger, stage

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Pass the line on."""
        self._logger.log({"stage": self._stage, **metrics}, step)

    def offset(self) -> int | None:
        """Of the logger behind this one."""
        return log_offset(self._logger)

    def finish(self) -> None:
        """The logger behind this one may serve another stage, so it is left open."""


class CompositeLogger:
    """Passes every line to several loggers, in order."""

    def __init__(self, loggers: Sequence[MetricsLogger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log with each."""
        for logger in self._loggers:
            logger.log(metrics, step)

    def offset(self) -> int | None:
        """Of the first logger that has a file."""
        return next((offset for offset in map(log_offset, self._loggers) if offset is not None), None)

    def finish(self) -> None:
        """Finish each, also if one of them raises."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.finish)


class WandbLogger:
    """Logs to Weights & Biases; needs `pip install rollouts[wandb]`."""

    def __init__(self, project: str, name: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            config: shown with the run; pass plain settings, never secrets.

        Raises: ConfigError if the package is not installed.
        """
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            raise ConfigError("WandbLogger needs the package wandb: pip install 'rollouts[wandb]'") from error
        self._run: Any = wandb.init(project=project, name=name, config=dict(config or {}))

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log one step. Stages share no step counter, so the step is a metric of its own."""
        self._run.log({**metrics, "step": step})

    def finish(self) -> None:
        """Upload what is buffered."""
        self._run.finish()


class _HasOffset(Protocol):
    def offset(self) -> int | None: ...


def log_offset(logger: MetricsLogger | None) -> int | None:
    """Length in bytes of the file behind a logger; None if there is none. A checkpoint keeps it, and resume cuts the file back to it."""
    return cast("_HasOffset", logger).offset() if hasattr(logger, "offset") else None


def truncate_log(path: Path, offset: int) -> None:
    """Cut a metrics file back to the length it had when a checkpoint was written.

    Raises: CheckpointError if it is shorter than that, or has no end of a line there: it is not the file of that run.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise CheckpointError(
            f"{path} has {size} bytes, but the checkpoint was written when it had {offset}: it is not the metrics file of this run, "
            "or lines were deleted. Restore it, or start a new run directory."
        )
    if size == 0:
        return
    with path.open("r+b") as file:
        file.seek(max(0, offset - 1))
        if offset > 0 and file.read(1) != b"\n":
            raise CheckpointError(
                f"{path} has no end of a line at byte {offset}, where it ended when the checkpoint was written: it is not the metrics file "
                "of this run, or was edited. Restore it, or start a new run directory."
            )
        file.truncate(offset)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off by a kill is left out.

    Raises: DataError naming the file, or file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read metrics from {path}: {error}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is a JSON {type(row).__name__}, expected an object of metrics")
        rows.append(cast("dict[str, Any]", row))
    return rows


def add_prefix(metrics: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The same metrics under prefix/name, for parts of a run that measure the same things."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


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


def summarize_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics of one batch of rollouts.

    Args:
        samples: at least one; of any number of groups, in any order.

    Returns: reward_mean, _std (population), _min, _max (all NaN if a sample has no reward); zero_std_fraction, of groups whose rewards are
        all equal and so teach a group-relative algorithm nothing; response_length_mean, _min, _max in trained tokens;
        truncated_fraction; num_samples.
    """
    assert samples, "expected at least one sample"
    n = len(samples)
    rewards = [math.nan if sample.reward is None else sample.reward for sample in samples]
    mean = math.fsum(rewards) / n
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        by_group[sample.group_index].append(reward)
    lengths = [sum(mask > 0 for mask in sample.loss_mask) for sample in samples]
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / n),
        "reward_min": math.nan if math.isnan(mean) else min(rewards),
        "reward_max": math.nan if math.isnan(mean) else max(rewards),
        "zero_std_fraction": sum(all(reward == group[0] for reward in group) for group in by_group.values()) / len(by_group),
        "response_length_mean": sum(lengths) / n,
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(sample.status is Status.TRUNCATED for sample in samples) / n,
        "num_samples": float(n),
    }


def summarize_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """How far the policy that sampled is from the one that trains, of the metrics of a step (losses.policy_loss).

    Returns: mismatch_kl, of KL(rollout || trainer): rollout_kl or, where the ratio's anchor is the rollout itself, approx_kl (with several
        updates on a batch, their mean); nothing where there is neither.
    """
    found = metrics.get("rollout_kl", metrics.get("approx_kl"))
    return {} if found is None else {"mismatch_kl": found}


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
