"""Metrics: where lines of them go, and pure summaries of rollouts.

Every key that is a duration ends in `_s` (seconds); everything else is a function of config and seed.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from rollouts.advantages import group_std
from rollouts.errors import CheckpointError, ConfigError
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
        """Appends to the file, which is made with its directory if it is not there; a directory gets a metrics.jsonl."""
        self.path = Path(path) / "metrics.jsonl" if Path(path).suffix == "" else Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Append one line."""
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
        """Finish each."""
        for logger in self._loggers:
            logger.finish()


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

    Raises: CheckpointError if it is shorter than that: it is not the file of that run.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise CheckpointError(
            f"{path} has {size} bytes, but the checkpoint was written when it had {offset}: it is not the metrics file of this run, "
            "or lines were deleted. Restore it, or start a new run directory."
        )
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(offset)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off by a kill is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def summarize_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Statistics of one batch of rollouts: rewards, response lengths, how they ended, groups whose rewards are all equal."""
    import torch

    assert samples, "expected at least one sample"
    rewards = torch.tensor([math.nan if s.reward is None else s.reward for s in samples], dtype=torch.float64)
    lengths = [sum(m > 0 for m in s.loss_mask) for s in samples]
    groups = torch.tensor([s.group_index for s in samples])
    per_group = {int(g): float(std) for g, std in zip(groups, group_std(rewards, groups), strict=True)}
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "zero_std_fraction": sum(std == 0 for std in per_group.values()) / len(per_group),
        "response_length_mean": sum(lengths) / len(lengths),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "num_samples": float(len(samples)),
    }


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return _json_value(float(value))  # numpy and 0-d tensors
