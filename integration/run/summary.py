"""The results of a run: summary.json, curves.png and the printed report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.run.display import name_measure
from integration.settings.config import Config
from integration.settings.sections.episodes import EPISODE_TASKS
from rollouts.config import CheckpointConfig, parse_metric
from rollouts.data.trajectories import read_samples
from rollouts.errors import ConfigError
from rollouts.training.logs.figures import draw_run
from rollouts.training.saving.checkpoints import checkpoint_name
from rollouts.training.summaries import find_warnings
from rollouts.types import Sample

NUM_SHOWN = 6
STAGE_NAMES = (("after SFT", "sft"), ("after RL", "rl"), ("after DPO", "dpo"))


def summarize_run(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the contents of summary.json from the lines of metrics.jsonl and the facts of run.json; None for stages that did not run.

    The held-out measure is an accuracy if all rewards are 0 or 1, in the fields that begin with accuracy; otherwise it is a mean reward, in
    fields that begin with reward, and the accuracy fields are None. "measure" names it.
    """
    first = next((line for line in lines if line["step"] == 0), {})
    sft = [line for line in lines if line["stage"] == "sft" and line["step"] > 0]
    rl = [line for line in lines if line["stage"] == "rl" and line["step"] > 0]
    dpo = [line for line in lines if line["stage"] == "dpo"]
    per_step = config.rl.prompts_per_step * config.rl.samples_per_prompt
    measure = name_measure(*lines)
    found = {
        "before": first.get("eval_accuracy"),
        "after_sft": _last(sft, "eval_accuracy"),
        "after_rl": _last(rl, "eval_accuracy"),
        **({"after_dpo": _last(dpo, "eval_accuracy")} if dpo else {}),
        "sampled_after_sft": _last(sft, "eval_accuracy_sampled"),
        "sampled_after_rl": _last(rl, "eval_accuracy_sampled"),
    }
    return {
        **{f"accuracy_{name}": value if measure == "accuracy" else None for name, value in found.items()},
        **({} if measure == "accuracy" else {f"{measure}_{name}": value for name, value in found.items()}),
        "measure": measure,
        "num_held_out": _last(lines, "eval_num_prompts"),
        "held_out_loss_before": first.get("eval_loss") if sft else None,
        "held_out_loss_after_sft": _last(sft, "eval_loss"),
        "seconds_sft": facts.get("seconds_sft"),
        "seconds_rl": facts.get("seconds_rl"),
        **({"seconds_dpo": facts.get("seconds_dpo"), "pairs": _summarize_pairs(dpo, config)} if dpo else {}),
        "samples": rl[-1]["step"] * per_step if rl else 0,
        "seed": config.seed,
        "task": config.task,
        "mode": facts.get("mode"),
        "algorithm": config.algorithm_call.text if rl else None,
        **_summarize_best({"sft": sft, "rl": rl, "dpo": [line for line in dpo if line["step"] > 0]}, config),
        "warnings": [
            *find_warnings(sft, stage="sft"),
            *find_warnings([line for line in dpo if line["step"] > 0], stage="dpo"),
            *find_warnings(rl, stage="rl"),
        ],
    }


def _summarize_pairs(lines: Sequence[Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """Return what the stage of preferences measured on held-out pairs, before and after it, and its number of pairs."""
    first = lines[0] if lines[0]["step"] == 0 else {}
    starts_there = config.preference.needs_reference and config.reference.path is None  # policy and reference agree: no pair has a margin
    return {
        "loss": config.preference.loss,
        "accuracy_before": None if starts_there else first.get("eval_pair_accuracy"),
        "accuracy_after": _last(lines, "eval_pair_accuracy"),
        "margin_after": _last(lines, "eval_pair_margin"),
        "num_held_out": _last(lines, "eval_num_pairs"),
        "trained_on": lines[-1]["step"] * config.preference.batch_size,
    }


def _summarize_best(lines: Mapping[str, Sequence[Mapping[str, Any]]], config: Config) -> dict[str, Any]:
    """Return "best", the best evaluation and its checkpoint by stage, without the stages that kept none; {} without checkpoint.best."""
    if config.checkpoint.best is None:
        return {}
    steps = {"sft": config.sft.num_steps, "rl": config.rl.num_steps, "dpo": config.preference.num_steps}
    found = {name: find_best(some, config.checkpoint, f"{name}/checkpoints", steps[name]) for name, some in lines.items()}
    return {"best": {name: best for name, best in found.items() if best is not None}}


def find_best(lines: Sequence[Mapping[str, Any]], checkpoint: CheckpointConfig, directory: str, num_steps: int) -> dict[str, Any] | None:
    """Return the best evaluation of a stage, and whether the stage ended early; None if it kept no best checkpoint.

    Args:
        lines: the lines of metrics of the stage.
        checkpoint: its best and patience.
        directory: directory of the checkpoints, relative to that of the run.
        num_steps: steps after which the stage ends with patience.
    """
    last = next((line for line in reversed(lines) if "best_step" in line), None)
    if checkpoint.best is None or last is None:
        return None
    num_since, steps = int(last["evaluations_since_best"]), max(line["step"] for line in lines)
    return {
        "metric": parse_metric(checkpoint.best)[0],
        "value": last["best_value"],
        "step": int(last["best_step"]),
        "checkpoint": f"{directory}/{checkpoint_name(int(last['best_step']))}",
        "evaluations_since": num_since,
        "steps": steps,
        "stopped_early": steps < num_steps,
    }


def describe_best(stage: str, best: Mapping[str, Any]) -> str:
    """Describe the result of find_best in a sentence."""
    text = f"{stage}: the best {best['metric']} was {best['value']:.4g}, after step {best['step']} ({best['checkpoint']})"
    if not best["stopped_early"]:
        return text
    return f"{text}; it ended early, after step {best['steps']}: {best['evaluations_since']} evaluations were no better"


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if key in line), None)


def tell_story(summary: Mapping[str, Any], output_dir: Path, config: Config) -> str:
    """Return the printed report: accuracies or rewards, example answers, and the effects of SFT and RL."""
    measure = summary.get("measure", "accuracy")
    before, after_sft, after_rl = (summary[f"{measure}_{name}"] for name in ("before", "after_sft", "after_rl"))
    after_dpo, pairs = summary.get(f"{measure}_after_dpo"), summary.get("pairs")
    what = "greedy accuracy" if measure == "accuracy" else "mean reward of greedy answers"
    lines = ["", f"task {summary['task']}, seed {summary['seed']}: {what} on held-out problems"]
    for name, value, seconds in (
        ("before training", before, None),
        ("after SFT", after_sft, summary["seconds_sft"]),
        ("after RL", after_rl, summary["seconds_rl"]),
        ("after DPO", after_dpo, summary.get("seconds_dpo")),
    ):
        if value is not None:
            took = "" if seconds is None else f"   ({seconds:.0f} s)"
            bar = f"{'#' * round(40 * value):<40}" if measure == "accuracy" else ""  # rewards have no known maximum
            lines.append(f"  {name:<16} {value:6.3f}  {bar}{took}".rstrip())
    if before is None and after_sft is None and after_rl is None and summary.get("held_out_loss_after_sft") is not None:
        lines[-1:] = [
            f"task {summary['task']}, seed {summary['seed']}: loss on held-out rows, in nats per trained token",
            *_list_losses(summary),
        ]
    elif before is None and after_sft is None and after_rl is None and after_dpo is None and pairs is not None:
        lines[-1:] = [f"task {summary['task']}, seed {summary['seed']}"]
    elif before is None and after_sft is None and after_rl is None and after_dpo is None:
        lines.append("  not measured: there were no held-out problems to judge one by one (--data.eval-path FILE.jsonl gives some)")
    lines += ["", *_show_examples(output_dir, measure)]
    if after_sft is not None:
        lines.append(f"SFT: {_describe_sft(before, after_sft, measure, config)}")
    if after_rl is not None:
        sampled = (summary.get(f"{measure}_sampled_after_sft"), summary.get(f"{measure}_sampled_after_rl"))
        start = before if after_sft is None else after_sft
        lines.append(f"RL:  {_describe_rl(start, after_rl, sampled, summary['samples'], measure, config)}")
    if pairs is not None:
        lines.append(f"DPO: {_describe_pairs(pairs)}")
    lines += [describe_best(stage.upper(), best) for stage, best in summary.get("best", {}).items()]
    lines += [f"warning: {text}" for text in summary.get("warnings", ())]
    return "\n".join(lines)


def _describe_pairs(pairs: Mapping[str, Any]) -> str:
    before, after, unit = pairs["accuracy_before"], pairs["accuracy_after"], "answers" if pairs["loss"] == "kto" else "pairs"
    told = f"{pairs['trained_on']:,} {unit} with {pairs['loss']}"
    if after is None:
        return f"{told}; nothing was held out."
    gain = f"{after:.2f}" if before is None else f"from {before:.2f} to {after:.2f}"
    judged = "good and bad answers told apart" if unit == "answers" else "held-out pairs whose chosen answer has the larger implicit reward"
    margin = pairs["margin_after"]  # unknown if all held-out answers of kto are good, or all bad; text if it is not finite
    return f"{told}; {judged}: {gain}{'' if margin is None else f', by {float(margin):.2f} on average'}."


def _list_losses(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each held-out loss of SFT that is known; before training it is unknown in a resumed run."""
    found = (
        ("before training", summary["held_out_loss_before"], None),
        ("after SFT", summary["held_out_loss_after_sft"], summary["seconds_sft"]),
    )
    return [
        f"  {name:<16} {float(value):7.4f}{'' if seconds is None else f'   ({seconds:.0f} s)'}"
        for name, value, seconds in found
        if value is not None
    ]


def _describe_sft(before: float | None, after: float, measure: str, config: Config) -> str:
    name = measure if measure == "accuracy" else "the mean reward"
    if before is None:  # resumed: measured before the interruption
        return f"{config.sft.num_steps} steps; {name} is {after:.2f} now, what it was before is not known here."
    gain = f"from {before:.2f} to {after:.2f}"
    if after <= before:
        return f"{config.sft.num_steps} steps did not raise {name} ({gain}); look at loss in metrics.jsonl, and at sft.optimizer.lr."
    if config.task == "sort" and measure == "accuracy" and after < 0.75:
        return (
            f"the model learned to imitate its teachers, and accuracy went {gain}. Half of the demonstrations sort the wrong way round, "
            "on purpose, so it has learned both directions and does not know which one is wanted."
        )
    return f"the model learned to imitate the demonstrations; {name} went {gain}."


def _describe_rl(
    before: float | None, after: float, sampled: tuple[float | None, float | None], samples: int, measure: str, config: Config
) -> str:
    algorithm = config.algorithm_call.text
    answers, them = ("episodes", "ways") if config.task in EPISODE_TASKS else ("answers", "answers")
    told = f"{samples:,} rewarded {answers} told it which of its {them} are wanted; with {algorithm}"
    rewarded = "rewarded "
    if not config.algorithm.reads_rewards:
        told, rewarded = f"a teacher judged the tokens of {samples:,} {answers}; with {algorithm}", ""
    name = measure if measure == "accuracy" else "mean reward"
    first, last = sampled
    if before == after and first is not None and last is not None and last > first:
        return f"{told}, sampled {name} went from {first:.2f} to {last:.2f}, and greedy {name} stayed at {after:.2f}."
    name = measure if measure == "accuracy" else "the mean reward"
    if before is None:  # resumed: measured before the interruption
        return f"{samples:,} {rewarded}{answers} with {algorithm}; {name} is {after:.2f} now, what it was before is not known here."
    if after <= before:
        hint = f"look at {'reward_mean' if rewarded else 'teacher_kl'} and approx_kl in metrics.jsonl"
        return f"{samples:,} {rewarded}{answers} did not raise {name} with {algorithm} (from {before:.2f} to {after:.2f}); {hint}."
    return f"{told}, {name} went from {before:.2f} to {after:.2f}."


def _show_examples(output_dir: Path, measure: str) -> list[str]:
    """Return a small table: problem, answer after each stage, right answer."""
    stages = {name: _read_examples(output_dir / stage / "examples.jsonl") for name, stage in STAGE_NAMES}
    stages = {name: samples for name, samples in stages.items() if samples}
    if not stages:
        return []
    first = next(iter(stages.values()))
    rows = [["problem", *stages, "right"]]
    for i, sample in enumerate(first[:NUM_SHOWN]):
        answers = [_mark(samples[i], measure) if i < len(samples) else "" for samples in stages.values()]
        rows.append([_shorten(_last_text(sample)), *answers, _shorten(str(sample.metadata.get("ground_truth", "")))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows] + [""]


def _read_examples(path: Path) -> list[Sample]:
    return read_samples(path) if path.exists() else []


def _last_text(sample: Sample) -> str:
    """Return the text of the problem: the prompt, or the first observation of an environment."""
    if not sample.prompt:
        return str(next((message.content for message in sample.messages or ()), ""))
    return sample.prompt if isinstance(sample.prompt, str) else (sample.prompt[-1].content or "")


def _mark(sample: Sample, measure: str) -> str:
    """Return an answer with + or - for right or wrong, or with its reward."""
    mark = ("+" if sample.reward else "-") if measure == "accuracy" else "?" if sample.reward is None else f"{sample.reward:.3g}"
    return f"{_shorten(sample.response)} {mark}"


def _shorten(text: str, width: int = 28) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw the curves of a run into a file, see rollouts.training.logs.figures.

    Returns: False if matplotlib is not installed.
    """
    try:
        figure = draw_run(lines)
    except ConfigError:
        return False
    figure.savefig(path, dpi=110)
    return True
