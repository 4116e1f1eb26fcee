"""The command `rollouts reward`: try a reward function on rows of data, before a run.

    python -m integration.reward FILE.py:NAME --data FILE [--rows N] [--completions FILE] [--columns NEW=COLUMN,...]

Each row is a group, as in training: its answers are those of --completions, or the right answer of the row and that of the next row, which
a reward should tell apart. Prints the score and the reason of each answer, and the time that the function takes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any

import trio
import tyro

from integration.closed_stdout import ignore_closed_stdout
from integration.run.exit_status import EXIT_FAILURE, run_command
from integration.settings.command_line import parse_flags
from rollouts.errors import ConfigError, DataError, make_safe, redact

PROGRAM = "python -m integration.reward"
_WIDTH = 44  # characters of an answer in a line
_HEAVY_MS = 1000.0  # time of a group from which on the end says what it costs a run


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Try a reward function on rows of data: scores, reasons, and the time that it takes."""

    function: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:NAME")]
    """reward function, as for --reward.function of a run; several with weights: 'FILE.py:NAME*0.8,FILE.py:OTHER*0.2'"""
    data: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """rows in any format of prompts: a JSONL, JSON, CSV or Parquet file, a folder, or hf://ORG/NAME"""
    rows: int = 8
    """number of rows to try, from the first on"""
    completions: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """JSONL file, a line per row: {"completion": TEXT} or {"completions": [TEXT, ...]}; None = ground truths of the row and the next"""
    columns: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NEW=COLUMN,...", help_behavior_hint="(default: none)")] = ()
    """columns to read under another name, as in prompt=question,answer=label"""
    timeout_s: float = 30.0
    """seconds that a call of the function may take; longer, and its answers have no reward"""
    json: bool = False
    """print one JSON object for each answer instead of the table"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An answer and its judgement."""

    row: int  # number of its row, from 0
    source: str  # file and line of the row
    completion: str
    score: float | None  # None = no reward
    reason: str  # the function's, or the error
    metrics: Mapping[str, float]
    group_ms: float  # time for all answers to the row

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as plain JSON values."""
        return dict(vars(self)) | {"metrics": dict(self.metrics)}


async def try_reward(arguments: Arguments) -> list[Trial]:
    """Judge the answers to each row. Raises ConfigError and DataError for what is wrong with function, rows or answers."""
    from integration.expressions.mixture import parse_columns
    from integration.parts.rewards import check_columns, list_parts, load_task_reward
    from integration.settings.sections.generation import RewardSection
    from rollouts.config import RewardConfig
    from rollouts.data.datasets import DatasetSpec, load_rl_prompts
    from rollouts.rewards.evaluate import RewardSource, judge_samples
    from rollouts.types import Sample, Status

    reward = load_task_reward(RewardSection(function=arguments.function))
    spec = DatasetSpec(path=arguments.data, columns=parse_columns(arguments.columns))
    loaded = load_rl_prompts(spec, require_ground_truth=False)
    prompts, sources = loaded.rows[: arguments.rows], loaded.sources[: arguments.rows]
    for part in list_parts(reward):
        check_columns(part, prompts, sources)
    truths = [prompt.metadata.get("ground_truth") for prompt in prompts]
    answers = pair_truths(truths, sources) if arguments.completions is None else read_completions(arguments.completions, len(prompts))
    trials: list[Trial] = []

    async def judge(reward_fn: Any) -> None:
        for i, (prompt, texts) in enumerate(zip(prompts, answers, strict=True)):
            group = [
                Sample(prompt=prompt.content, response=text, status=Status.COMPLETED, index=k, group_index=i, metadata=prompt.metadata)
                for k, text in enumerate(texts)
            ]
            started = time.perf_counter()
            judgements = await judge_samples(reward_fn, group, RewardConfig(timeout_s=arguments.timeout_s))
            took_ms = 1e3 * (time.perf_counter() - started)
            for text, judgement in zip(texts, judgements, strict=True):
                result = judgement.result
                score = None if result is None or judgement.error is not None else float(result.score)
                reason = str(judgement.error) if judgement.error is not None else "" if result is None else result.reason
                metrics = {} if result is None else {name: metric.score for name, metric in result.metrics.items()}
                judged = partial(Trial, row=i, source=sources[i], completion=text, group_ms=took_ms)
                trials.append(judged(score=score, reason=reason, metrics=metrics))

    if isinstance(reward, RewardSource):
        async with reward.open_reward() as opened:
            await judge(opened)
    else:
        await judge(reward)
    return trials


def pair_truths(truths: Sequence[Any], sources: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the right answer of each row and, where it differs, that of the next row. Raises DataError if a row has none."""
    lacking = [source for source, truth in zip(sources, truths, strict=True) if truth is None]
    if lacking:
        raise DataError(
            f"{lacking[0]}: the row has no ground truth to try as an answer (as {len(lacking)} of {len(truths)} rows): give --completions "
            'FILE, with a line {"completion": TEXT} for each row, or name its column (--columns answer=NAME)'
        )
    texts = [truth if isinstance(truth, str) else json.dumps(truth) for truth in truths]
    return [tuple(dict.fromkeys((text, texts[(i + 1) % len(texts)]))) for i, text in enumerate(texts)]


def read_completions(path: str, num_rows: int) -> list[tuple[str, ...]]:
    """Read the answers to each row. Raises DataError with file and line."""
    from rollouts.data.datasets import load_rows

    def parse(row: dict[str, Any], where: str) -> tuple[str, ...]:
        value = row.get("completions", [row["completion"]] if "completion" in row else None)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise DataError(f'{where}: the row has {sorted(row)}, expected {{"completion": TEXT}} or {{"completions": [TEXT, ...]}}')
        return tuple(value)

    loaded = load_rows(path, parse)
    if len(loaded) < num_rows:
        raise DataError(f"{path} has answers to {len(loaded)} rows, but {num_rows} are tried: add lines, or give --rows {len(loaded)}")
    return list(loaded.rows[:num_rows])


def describe_trials(trials: Sequence[Trial]) -> str:
    """Return the table of the answers, and what a run should know about the function."""
    lines: list[str] = []
    for k, trial in enumerate(trials):
        if k == 0 or trials[k - 1].row != trial.row:
            lines.append(f"{trial.source}   {trial.group_ms:.1f} ms")
        score = "  failed" if trial.score is None else f"{trial.score:8.3f}"
        shown = trial.completion if len(trial.completion) <= _WIDTH else f"{trial.completion[: _WIDTH - 3]}..."
        more = [trial.reason] if trial.reason else []
        more += [f"{name} {value:.3g}" for name, value in trial.metrics.items()]
        lines.append(f"{score}  {shown!r:<{_WIDTH + 2}}  {'; '.join(more)}".rstrip())
    scores = [trial.score for trial in trials if trial.score is not None]
    times = list({trial.row: trial.group_ms for trial in trials}.values())
    failed = len(trials) - len(scores)
    lines.append("")
    if scores:
        mean = sum(scores) / len(scores)
        lines.append(f"{len(scores)} scores: mean {mean:.3f}, lowest {min(scores):.3f}, highest {max(scores):.3f}")
    lines.append(f"time of a row's answers: median {median(times):.1f} ms, longest {max(times):.1f} ms")
    if max(times) > _HEAVY_MS:
        lines.append("groups of a batch are scored at the same time, but a step waits for the slowest: see --reward.timeout-s")
    if failed:
        lines.append(f"{failed} of {len(trials)} answers have no reward: a run ends there, by its default --reward.on-error raise")
    elif len(set(scores)) == 1 and len(scores) > 1:
        lines.append("all scores are equal: groups with equal rewards teach nothing, so look whether the function reads what it should")
    return "\n".join(lines)


def run(arguments: Arguments) -> int:
    """Try the function and print the result. Returns the exit status: 1 if an answer has no reward."""
    if arguments.rows < 1:
        raise ConfigError(f"--rows is {arguments.rows}, expected at least 1")
    if not arguments.timeout_s > 0:
        raise ConfigError(f"--timeout-s is {arguments.timeout_s}, expected more than 0")
    trials = trio.run(try_reward, arguments)
    text = "\n".join(json.dumps(trial.to_dict()) for trial in trials) if arguments.json else describe_trials(trials)
    with ignore_closed_stdout():
        print(make_safe(redact(text)), flush=True)
    return EXIT_FAILURE if any(trial.score is None for trial in trials) else 0


_OTHERS = MappingProxyType(
    {
        "--data.path": "--data FILE",
        "--data.columns": "--columns NEW=COLUMN",
        "--reward.timeout-s": "--timeout-s S",
        "--model.path": "left out, as a function is tried without a model",
        "--reward.function": "the first argument, FILE.py:NAME",
    }
)
"""Options of `rollouts train`, with what stands for them here."""


def check_others(argv: Sequence[str]) -> None:
    """Raise ConfigError for an option of `rollouts train`, with what stands for it here."""
    for argument in argv:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OTHERS:
            raise ConfigError(f"{name} is an option of `rollouts train`: here it is {_OTHERS[name]}")


def name_own(message: str) -> str:
    """Return an error's message with the options of this command in place of those of a run."""
    message = message.replace("--data.columns", "--columns").replace("reward.function is ", "the function is ")
    return message.replace("--reward.timeout-s", "--timeout-s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    given = list(sys.argv[1:] if argv is None else argv)

    def parse() -> Arguments:
        check_others(given)
        return parse_flags(given, Arguments, PROGRAM)

    return run_command(parse, run, _goes_online, name_own)


def _goes_online(arguments: Arguments) -> bool:
    from integration.parts.hub_models import names_hub_data

    return names_hub_data(arguments.data)


if __name__ == "__main__":
    sys.exit(main())
