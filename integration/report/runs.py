"""Runs as the report sees them: settings, lines of metrics, warnings, and a judgement of whether they still learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from integration.run.directory import compare_settings, read_facts
from integration.run.display import name_measure
from integration.settings.command_line import CONFIG_FILE, RUN_FILE, read_saved
from integration.settings.config import Config
from integration.settings.log_levels import WARNINGS_FILE, read_warnings
from integration.settings.task_defaults import find_default
from rollouts.checks import parse_json
from rollouts.config_files import read_json, to_dict
from rollouts.errors import ConfigError, DataError
from rollouts.training.summaries import Stage, find_warnings

METRICS_FILE = "metrics.jsonl"
STAGES = ("sft", "dpo", "rl", "reward_model")
_FEWEST = 8  # steps below which no trend is judged
_CLEAR = 2.0  # standard errors from which a slope, or a fall of the held-out measure, is called one
_HELD_OUT = "evaluation.num_prompts"  # setting that bounds the number of held-out prompts or pairs

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a run, by its name on the command line."""

    name: str
    value: Any
    default: Any = None  # default of the task and model of the run
    changed: bool = False  # False also where the default is not known


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory, read once."""

    path: Path
    name: str
    facts: Mapping[str, Any]  # contents of run.json
    settings: tuple[Setting, ...]
    lines: tuple[Line, ...]  # lines of metrics.jsonl, in order
    warnings: tuple[str, ...]
    verdicts: tuple[str, ...]  # one sentence for each stage: does it still learn?

    @property
    def masks_truncated(self) -> bool:
        """Whether truncated samples are left out of training."""
        return any(setting.name == "rl.mask_truncated" and setting.value is True for setting in self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return what the page shows of the run, as JSON values."""
        stages = {stage: tabulate([line for line in self.lines if line.get("stage") == stage]) for stage in STAGES}
        return {
            "name": self.name,
            "path": str(self.path),
            "facts": dict(self.facts),
            "settings": [asdict(setting) for setting in self.settings],
            "stages": {stage: table for stage, table in stages.items() if table["step"]},
            "warnings": list(self.warnings),
            "verdicts": list(self.verdicts),
        }


def read_run(path: Path) -> Run:
    """Read a run directory. A run that goes on may lack a summary, and its last line may be cut.

    Raises: ConfigError if the directory is none of a run; DataError for a damaged line of metrics.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}: give the directory of a run, such as runs/2026-01-01-sort")
    if not (path / CONFIG_FILE).is_file() and not (path / METRICS_FILE).is_file():
        inside = sorted(p.name for p in path.iterdir() if (p / CONFIG_FILE).is_file())
        more = f"; it holds the runs {', '.join(inside[:5])}" if inside else ""
        raise ConfigError(f"{path} is not the directory of a run: it has neither {CONFIG_FILE} nor {METRICS_FILE}{more}")
    if not (path / METRICS_FILE).is_file() and "architectures" in read_json(path / CONFIG_FILE):
        raise ConfigError(
            f"{path} is a model, not the directory of a run: its {CONFIG_FILE} names architectures, and it has no {METRICS_FILE}"
        )
    lines, settings = read_lines(path / METRICS_FILE), read_settings_of(path)
    known = next(
        (setting.value for setting in settings if setting.name == _HELD_OUT and is_number(setting.value) and setting.value > 0), None
    )
    return Run(
        path=path,
        name=path.resolve().name,
        facts=read_facts(path) if (path / RUN_FILE).is_file() else {},
        settings=settings,
        lines=lines,
        warnings=find_run_warnings(path, lines),
        verdicts=judge_progress(lines) if known is None else judge_progress(lines, known),
    )


def read_lines(path: Path) -> tuple[Line, ...]:
    """Read a file of metrics; a cut last line, which a run is writing, is left out.

    Returns: () if there is no such file.
    Raises: DataError naming the file and the line.
    """
    if not path.is_file():
        return ()
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found: list[Line] = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = parse_json(text)
        except ValueError as error:
            if number == len(texts):
                break
            raise DataError(f"{path}:{number} is not a line of metrics: {error}. Repair or delete the line") from error
        if not isinstance(line, dict) or not isinstance(cast("Line", line).get("step"), int):
            raise DataError(f"{path}:{number} is not a line of metrics: found {text[:60]!r}, expected a JSON object with a step")
        found.append(cast("Line", line))
    return tuple(found)


def find_run_warnings(path: Path, lines: Sequence[Line]) -> tuple[str, ...]:
    """Find the warnings of a run: those of warnings.jsonl and summary.json, and those that its lines of metrics give."""
    logged = read_warnings(path / WARNINGS_FILE)
    try:
        summary = parse_json((path / "summary.json").read_text(encoding="utf-8"))
        told = [str(text) for text in cast("Mapping[str, Any]", summary).get("warnings", ())]
    except (OSError, ValueError, AttributeError, TypeError):
        told = []  # a run that goes on, or was killed
    for stage in get_args(Stage):
        told += find_warnings([line for line in lines if line.get("stage") == stage and line["step"] > 0], stage=stage)
    return tuple(dict.fromkeys([*logged, *told]))


def read_settings_of(path: Path) -> tuple[Setting, ...]:
    """Read the settings of a run, with the defaults of its task and model where this version knows its file."""
    try:
        saved = cast("dict[str, Any]", parse_json((path / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ()
    try:
        config = read_saved(Config, path / CONFIG_FILE)
        default = to_dict(find_default(config))
        changed = compare_settings(default, to_dict(config))
    except (ConfigError, TypeError, ValueError):  # settings of another program (reward models) or version
        return tuple(Setting(name=name, value=value) for name, value in flatten(saved))
    known = dict(flatten(default))
    return tuple(
        Setting(name=name, value=value, default=known.get(name), changed=any(name == c or name.startswith(f"{c}.") for c in changed))
        for name, value in flatten(to_dict(config))
        if name != "output_dir"
    )


def flatten(settings: Mapping[str, Any], where: str = "") -> list[tuple[str, Any]]:
    """Return nested settings as names with dots and values, in their order."""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        name = f"{where}{key}"
        if isinstance(value, dict) and value:
            found += flatten(cast("Mapping[str, Any]", value), f"{name}.")
        else:
            found.append((name, value))
    return found


def tabulate(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return the numbers of the lines of a stage as columns, None where a line lacks one or where it is not finite."""
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if is_number(value) and key != "step")
    table: dict[str, list[float | None]] = {"step": [line["step"] for line in lines]}
    for key in keys:
        table[key] = [line[key] if is_number(line.get(key)) and math.isfinite(line[key]) else None for line in lines]
    return table


def is_number(value: object) -> bool:
    """Whether a value is an int or float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- does it still learn?


def judge_progress(lines: Sequence[Line], num_held_out: float = 256) -> tuple[str, ...]:
    """Judge each stage, the newest first: does its measure still improve, by the slope over its last third?

    The measure is the mean reward of rollouts in RL, and the loss otherwise. A slope counts if the interval of two standard errors around
    it does not hold 0, with the steps taken as independent. A stage that has improved of late, but whose held-out measure is clearly worse
    than before it began (see measure_noise), is not called learning. Rewards that are all equal are told for themselves.

    Args:
        num_held_out: held-out prompts or pairs, for lines without eval_num_prompts and eval_num_pairs, as runs wrote before these were
            recorded; evaluation.num_prompts is the most there can be.
    """
    verdicts: list[str] = []
    for stage, key, name, sign in (
        ("sft", "loss", "loss", -1),
        ("dpo", "loss", "loss", -1),
        ("reward_model", "loss", "loss", -1),
        ("rl", "reward_mean", "mean reward", 1),
    ):
        own = [line for line in lines if line.get("stage") == stage and is_number(line.get(key)) and math.isfinite(line[key])]
        if own:
            label, values = stage.replace("_", " ").upper(), [float(line[key]) for line in own]
            fallen, held_out = describe_held_out(lines, stage, label, num_held_out)
            told = judge_equal_rewards(own) if stage == "rl" else ""
            verdicts.append(f"{label}: {fallen}{told or judge_trend(values, name, sign, fallen=bool(fallen))}{held_out}")
    return tuple(reversed(verdicts))


def judge_equal_rewards(lines: Sequence[Line]) -> str:
    """Judge the rewards of the last third of the steps of RL if they are all equal; "" if they are not, or the steps are too few.

    As in rollouts.training.summaries.look, the best reward is the highest of steps whose rewards differ, else 1.
    """
    late = take_last_third(lines)
    value = late[0]["reward_mean"]
    if len(lines) < _FEWEST or any(line["reward_mean"] != value or differ(line) for line in late):
        return ""
    always = (
        "every step"
        if len(late) == len(lines) or all(line["reward_mean"] == value for line in lines)
        else f"each of its last {len(late)} steps"
    )
    seen = [line["reward_max"] for line in lines if differ(line)]
    if value == 1.0 if not seen else value >= max(seen):
        return f"nothing left to learn: the mean reward was {value:.4g} in {always}, the best reward"
    look = "Rollouts, filter gradient, shows the groups without a gradient"
    return f"nothing to learn from: the mean reward was {value:.4g} in {always}; {look}"


def differ(line: Line) -> bool:
    """Whether the rewards of a step are known to differ."""
    low, high = line.get("reward_min"), line.get("reward_max")
    return is_number(low) and is_number(high) and cast("float", low) < cast("float", high)


def take_last_third(values: Sequence[Any]) -> Sequence[Any]:
    """Return the last third, at least six."""
    return values[-max(6, len(values) // 3) :]


def judge_trend(values: Sequence[float], name: str, sign: int, *, fallen: bool = False) -> str:
    """Judge the trend of the values of steps. sign: +1 = higher is better, -1 = lower is better. fallen: leave the word "learning" out."""
    if len(values) < _FEWEST:
        return (
            f"{len(values)} steps are too few to tell whether the {name} still improves (it went from {values[0]:.4g} to {values[-1]:.4g})"
        )
    n, slope, error = fit_slope(values)
    if slope == error == 0:
        verdict = "the" if fallen else "no longer clearly learning: the"
        return f"{verdict} {name} was {values[-1]:.4g} in each of its last {n} steps"
    if abs(slope) <= error or slope == 0:
        verdict = "the" if fallen else "no longer clearly learning: the"
        return f"{verdict} {name} has no clear trend over its last {n} steps ({slope - error:+.2g} to {slope + error:+.2g} a step)"
    verdict = "" if fallen else "still learning: " if slope * sign > 0 else "getting worse: "
    low, high = sorted((abs(slope) - error, abs(slope) + error))
    moves = "rises" if slope > 0 else "falls"
    return f"{verdict}the {name} {moves} by {abs(slope):.2g} a step over its last {n} steps (between {low:.2g} and {high:.2g})"


def fit_slope(values: Sequence[float]) -> tuple[int, float, float]:
    """Fit a line to the last third of the values, at least six, by least squares: their number, its slope, and two standard errors."""
    late = take_last_third(values)
    if min(late) == max(late):
        return len(late), 0.0, 0.0  # exactly
    n, middle, mean = len(late), (len(late) - 1) / 2, math.fsum(late) / len(late)
    spread = math.fsum((k - middle) ** 2 for k in range(n))
    slope = math.fsum((k - middle) * (value - mean) for k, value in enumerate(late)) / spread
    rest = math.fsum((value - mean - slope * (k - middle)) ** 2 for k, value in enumerate(late))
    return n, slope, _CLEAR * math.sqrt(rest / (n - 2) / spread)


def measure_noise(first: float, last: float, n: float) -> float:
    """Bound two standard errors of the difference of two means over n held-out prompts.

    Values are taken as of 0 or 1, whose mean has the variance p (1 - p) / n; graded rewards within 0 and 1 have less. For a mean outside,
    rewards are taken as within the larger size of both, at most half of it from their mean. The same prompts of both, which make the
    true error smaller, are not used.
    """
    size = max(1.0, abs(first), abs(last))
    is_share = 0.0 <= first <= 1.0 and 0.0 <= last <= 1.0
    variance = first * (1 - first) + last * (1 - last) if is_share else 2 * size**2 / 4
    return _CLEAR * math.sqrt(variance / n)


def count_held_out(line: Line, key: str) -> float | None:
    """Return the number of prompts, or pairs, that a line's held-out measure is the mean over; None if it does not say so."""
    names = ("eval_num_prompts", "eval_num_pairs") if key == "eval_accuracy" else ("eval_num_pairs",)
    return next((float(line[name]) for name in names if is_number(line.get(name)) and line[name] > 0), None)


def describe_held_out(lines: Sequence[Line], stage: str, label: str, n: float) -> tuple[str, str]:
    """Describe the held-out measure of a stage. n: prompts or pairs that it is measured on, for lines that do not say so.

    Returns: the beginning of a verdict if the last value is clearly below the one from before the stage, otherwise ""; and a sentence with
        both and the best. Two times "" if the stage did not measure it.
    """
    has_answers = any(line.get("stage") == stage and is_number(line.get("eval_accuracy")) for line in lines)
    key = "eval_accuracy" if has_answers else "eval_pair_accuracy"  # training on preferences may generate no answers
    measured = [line for line in lines if is_number(line.get(key)) and math.isfinite(line[key])]
    own = [line for line in measured if line.get("stage") == stage]
    if not own:
        return "", ""
    earlier = [] if own[0]["step"] == 0 else measured[: measured.index(own[0])][-1:]  # the last one of the stage before
    points = [
        (f"before {label}" if line in earlier or line["step"] == 0 else f"after step {line['step']}", float(line[key]))
        for line in [*earlier, *own]
    ]
    (first_where, first), (where, last), best = points[0], points[-1], max(points, key=lambda point: point[1])
    measure = f"held-out {name_measure(*own)}" if has_answers else "share of held-out pairs in order"
    from_before = first_where.startswith("before") and len(points) > 1
    now = f"went from {first:.3g} {first_where} to {last:.3g} {where}" if from_before else f"is {last:.3g} {where}"
    at_best = ", its best" if best[1] == last else "" if from_before and best[1] == first else f"; its best was {best[1]:.3g} {best[0]}"
    counts = [count for line in (*earlier, *own) if (count := count_held_out(line, key)) is not None]
    noise = measure_noise(first, last, min(counts, default=n))
    number = f" ({counts[-1]:,.0f} {'prompts' if 'eval_num_prompts' in own[-1] and has_answers else 'pairs'})" if counts else ""
    fallen = f"worse than before it by {measure}; " if from_before and first - last > noise else ""
    about = f", about as before (two standard errors are {noise:.2g})" if from_before and not fallen and last < first else ""
    return fallen, f". {measure[0].upper()}{measure[1:]}{number} {now}{about}{at_best}"
