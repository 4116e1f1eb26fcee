"""The best checkpoint of a run by a metric of its evaluations, and the end of a run that no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rollouts.config import HELDOUT_PREFIX, parse_metric
from rollouts.config_files import is_whole
from rollouts.errors import ConfigError
from rollouts.training.saving.checkpoints import checkpoint_name


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The evaluations of a run so far."""

    value: float | None = None  # best value of the metric; None = no evaluation has had a number yet
    step: int | None = None  # finished steps at the first evaluation with that value
    num_since: int = 0  # evaluations since then


def add_evaluation(found: BestSoFar, value: float, step: int, *, smaller_is_better: bool) -> BestSoFar:
    """Return what is the best after one more evaluation. Equal values, and NaN, are no improvement."""
    better = not math.isnan(value) and (found.value is None or (value < found.value if smaller_is_better else value > found.value))
    return BestSoFar(value=value, step=step) if better else replace(found, num_since=found.num_since + 1)


class BestCheckpoint:
    """Keeper of a run's best checkpoint: the loops save and protect the checkpoint of the best evaluation, and end without patience."""

    def __init__(self, metric: str, *, patience: int = 0) -> None:
        """
        Args:
            metric: see parse_metric.
            patience: evaluations without a better one after which the run ends; 0 = it never ends early.

        Raises: ConfigError for a metric without a known sense, or a negative patience.
        """
        if not is_whole(patience) or patience < 0:
            raise ConfigError(f"patience is {patience!r}, expected a whole number of evaluations, at least 0")
        self.metric, self.smaller_is_better = parse_metric(metric)
        self.patience = patience
        self.found = BestSoFar()
        self._has_ended = False

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Add the evaluation after `step` finished steps. Adds best_value, best_step and evaluations_since_best to its metrics.

        Raises: ConfigError if the evaluation has no such metric.
        """
        value = metrics.get(self.metric)
        if value is None:
            measured = ", ".join(sorted(name for name in metrics if name.startswith(HELDOUT_PREFIX))) or "none"
            raise ConfigError(
                f"checkpoint.best is {self.metric!r}, but the evaluation of step {step} measured no such metric: it measured {measured}. "
                "Choose one of these, or give held-out data (--data.eval-path)"
            )
        self.found = add_evaluation(self.found, float(value), step, smaller_is_better=self.smaller_is_better)
        self._note_end()
        if self.found.value is not None and self.found.step is not None:
            metrics |= {"best_value": self.found.value, "best_step": float(self.found.step)}
        metrics["evaluations_since_best"] = float(self.found.num_since)

    @property
    def has_ended(self) -> bool:
        """Whether the run has used up its patience; once True, it stays True."""
        return self._has_ended

    def is_best(self, step: int) -> bool:
        """Whether the evaluation after `step` finished steps is the best one."""
        return self.found.step == step

    def find_checkpoint(self, directory: Path) -> Path | None:
        """Return the checkpoint of the best evaluation, complete or not; None before the first evaluation."""
        return None if self.found.step is None else directory / checkpoint_name(self.found.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run goes on counting from, as JSON values."""
        return {"metric": self.metric, **asdict(self.found)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the result of state_dict(); None, or the state of another metric, leaves everything to the evaluations to come."""
        if state is None or state["metric"] != self.metric:
            return
        self.found = BestSoFar(value=state["value"], step=state["step"], num_since=int(state["num_since"]))
        self._note_end()

    def _note_end(self) -> None:
        self._has_ended = self._has_ended or (self.patience > 0 and self.found.num_since >= self.patience)


def add_to(best: BestCheckpoint | None, metrics: dict[str, float], step: int) -> bool:
    """Add the evaluation after `step` finished steps, if a best checkpoint is kept. Returns whether the run ends here without patience."""
    if best is None:
        return False
    best.add(metrics, step)
    return best.has_ended


def state_of(best: BestCheckpoint | None) -> dict[str, Any] | None:
    """Return the state for a checkpoint; None if no best checkpoint is kept."""
    return None if best is None else best.state_dict()


def protect(best: BestCheckpoint | None, directory: Path | str | None) -> tuple[Path, ...]:
    """Return the checkpoints that a run keeps beyond its newest ones."""
    path = None if best is None or directory is None else best.find_checkpoint(Path(directory))
    return () if path is None else (path,)
