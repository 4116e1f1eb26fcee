"""Loggers to TensorBoard, Trackio and MLflow, beside WandbLogger of metrics.py: one curve for each metric of a stage, over its steps.

A metric of a line with a stage is named stage/metric, so that SFT and RL have axes of their own. Each logger can say up to which step of
each stage its store has lines (`last_steps`), from which a resumed run goes on without gap or duplicate: see continued.py.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rollouts.errors import ConfigError
from rollouts.training.metrics import MetricsLogger, Value, name_by_stage

if TYPE_CHECKING:
    from rollouts.types import Sample

SAMPLE_COLUMNS = ("step", "prompt", "response", "reward", "status", "tokens")


class StoringLogger(MetricsLogger, Protocol):
    """Logger whose store outlives the process."""

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each stage that the store has; "" for lines without a stage."""
        ...


def import_package(name: str, extra: str) -> Any:
    """Import the package of a logger. Raises ConfigError naming the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the logger needs the package {name.partition('.')[0]}: pip install 'rollouts-rl[{extra}]'") from error


def tabulate_samples(samples: Sequence[Sample], step: int) -> list[list[Any]]:
    """Return rows of step, prompt, response, reward, status and number of trained tokens, one for each sample."""
    return [
        [step, _show(sample), sample.response, sample.reward, sample.status.value, sum(mask > 0 for mask in sample.loss_mask)]
        for sample in samples
    ]


def _show(sample: Sample) -> str:
    return sample.prompt if isinstance(sample.prompt, str) else "\n".join(f"{m.role}: {m.content}" for m in sample.prompt)


def _numbers(metrics: Mapping[str, Value]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float) and math.isfinite(value)}


class TensorBoardLogger:
    """Logger of event files for TensorBoard; needs `pip install rollouts-rl[tensorboard]`."""

    def __init__(self, directory: Path | str, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            directory: directory of the event files; a resumed run adds a file there.
            config: settings shown as a text; pass plain settings, never secrets.

        Raises: ConfigError if the package is not installed.
        """
        import_package("tensorboard", "tensorboard")
        self._directory = Path(directory)
        has_begun = self._directory.is_dir() and any(self._directory.iterdir())
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(self._directory))
        if config is not None and not has_begun:
            self._writer.add_text("settings", f"```json\n{json.dumps(dict(config), indent=1)}\n```")

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Write a line, and flush it, so that a kill loses none."""
        for name, value in _numbers(name_by_stage(metrics)[1]).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Write samples as a table in Markdown."""
        rows = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in tabulate_samples(samples, step)]
        lines = ["| " + " | ".join(row) + " |" for row in ([*SAMPLE_COLUMNS], ["---"] * len(SAMPLE_COLUMNS), *rows)]
        self._writer.add_text(f"{stage}/samples" if stage else "samples", "\n".join(lines), step)
        self._writer.flush()

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each stage in the event files."""
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        found: dict[str, int] = {}
        for file in sorted(self._directory.glob("events.out.tfevents.*")):
            events = accumulator.EventAccumulator(str(file), size_guidance={"scalars": 0})
            events.Reload()
            for tag in events.Tags()["scalars"]:
                stage = tag.partition("/")[0] if "/" in tag else ""
                found[stage] = max(found.get(stage, -1), *(event.step for event in events.Scalars(tag)))
        return found

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class TrackioLogger:
    """Logger to Trackio's local store, or the server or Space that its variables name; needs `pip install rollouts-rl[trackio]`."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            name: name of the run; a resumed run must have that of the interrupted one.
            config: settings shown with the run; pass plain settings, never secrets.

        Raises: ConfigError if the package is not installed.
        """
        self._trackio = import_package("trackio", "trackio")
        self._project, self._name = project, name
        options: dict[str, Any] = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run: Any = self._trackio.init(project=project, name=name, config=dict(config or {}), **options)
        self._line = len(self._read())  # Trackio numbers the lines of all stages together

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log a line; Trackio writes it within about a second."""
        stage, named = name_by_stage(metrics)
        self._run.log({**_numbers(named), f"{stage}/step" if stage else "step_of_run": step}, step=self._line)
        self._line += 1

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Log samples as a table."""
        pandas: Any = importlib.import_module("pandas")  # one of Trackio's own requirements
        frame = pandas.DataFrame(tabulate_samples(samples, step), columns=pandas.Index(SAMPLE_COLUMNS))
        self._run.log({f"{stage}/samples" if stage else "samples": self._trackio.Table(dataframe=frame)}, step=max(0, self._line - 1))

    def _read(self) -> list[Mapping[str, Any]]:
        store = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        return cast("list[Mapping[str, Any]]", store.get_logs(self._project, self._name) or [])

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each stage in the local store."""
        found: dict[str, int] = {}
        for line in self._read():
            for key, value in line.items():
                if key == "step_of_run" or key.endswith("/step"):
                    stage = key.rpartition("/")[0]
                    found[stage] = max(found.get(stage, -1), int(value))
        return found

    def finish(self) -> None:
        """Write what waits."""
        self._run.finish()


class MLflowLogger:
    """Logger to an MLflow store; needs `pip install rollouts-rl[mlflow]`."""

    def __init__(
        self,
        experiment: str,
        name: str,
        config: Mapping[str, Any] | None = None,
        *,
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        """
        Args:
            name: name of the run.
            config: settings as parameters of the run; pass plain settings, never secrets.
            tracking_uri: store, without a password; None = MLFLOW_TRACKING_URI, else MLflow's own default.
            run_id: run to go on with; None = a new one.

        Raises: ConfigError if the package is not installed.
        """
        mlflow = import_package("mlflow", "mlflow")
        self._client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            place = self._client.create_experiment(experiment) if found is None else found.experiment_id
            run_id = str(self._client.create_run(place, run_name=name).info.run_id)
            for key, value in _flatten(config or {}):
                self._client.log_param(run_id, key, value[:500])
        self.run_id: str = run_id

    def log(self, metrics: Mapping[str, Value], step: int) -> None:
        """Log a line."""
        now = int(time.time() * 1000)
        numbers = _numbers(name_by_stage(metrics)[1])
        self._client.log_batch(self.run_id, metrics=[self._metric(name, value, now, step) for name, value in numbers.items()])

    def log_samples(self, samples: Sequence[Sample], step: int, stage: str = "") -> None:
        """Append samples to a table, the file <stage>_samples.json of the run's artifacts."""
        rows = tabulate_samples(samples, step)
        columns = {name: [row[i] for row in rows] for i, name in enumerate(SAMPLE_COLUMNS)}
        self._client.log_table(self.run_id, data=columns, artifact_file=f"{stage}_samples.json" if stage else "samples.json")

    def last_steps(self) -> Mapping[str, int]:
        """Return the last step of each stage in the store."""
        found: dict[str, int] = {}
        for name in self._client.get_run(self.run_id).data.metrics:
            stage = name.partition("/")[0] if "/" in name else ""
            found[stage] = max(found.get(stage, -1), *(metric.step for metric in self._client.get_metric_history(self.run_id, name)))
        return found

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        found += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", str(value))]
    return found
