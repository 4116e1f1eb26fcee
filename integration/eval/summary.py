"""The results of an evaluation: one line for each model and task, comparisons of models, and both as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollouts.generation.estimates import Estimate, compare_paired, estimate_majority_at_k, estimate_mean, estimate_pass_at_k

Groups = Mapping[int, Sequence[Mapping[str, Any]]]
"""Records by prompt, see records.py."""


def choose_ks(n: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the k of pass@k: the wanted ones, else the powers of 2 up to n, and n."""
    return tuple(sorted({*wanted} or {n, *(2**i for i in range(n.bit_length()) if 2**i <= n)}))


def summarize(model: str, task: str, groups: Groups, ks: Sequence[int]) -> dict[str, Any]:
    """Return the line of a model on a task.

    Returns: model, task, num_prompts, num_samples, num_dropped; accuracy (share of samples that are right), reward (mean), pass_at_k,
        majority_at_k (without k = 1, and only if the samples have answers), each as {value, low, high}; response_length_mean,
        response_length_max, truncated_fraction. Estimates are None, and counts remain, if every prompt was dropped.
    """
    scored = [records for _, records in sorted(groups.items()) if "dropped" not in records[0]]
    line: dict[str, Any] = {
        "model": model,
        "task": task,
        "num_prompts": len(scored),
        "num_samples": sum(map(len, scored)),
        "num_dropped": sum(records[0]["dropped"] for records in groups.values() if "dropped" in records[0]),
        "accuracy": None,
        "reward": None,
    }
    if not scored:
        return line
    right = [[float(record["right"]) for record in records] for records in scored]
    lengths = [record["length"] for records in scored for record in records]
    line["accuracy"] = _interval(estimate_mean(right, bounded=True))
    line["reward"] = _interval(estimate_mean([[record["reward"] for record in records] for records in scored]))
    chances = {k: [[estimate_pass_at_k(len(values), int(sum(values)), k)] for values in right] for k in ks}
    line["pass_at_k"] = {str(k): _interval(estimate_mean(values, bounded=True)) for k, values in chances.items()}
    if any(record["answer"] is not None for records in scored for record in records):
        answers = [[record["answer"] for record in records] for records in scored]
        votes = {k: [[estimate_majority_at_k(a, r, k)] for a, r in zip(answers, right, strict=True)] for k in ks if k > 1}
        line["majority_at_k"] = {str(k): _interval(estimate_mean(values, bounded=True)) for k, values in votes.items()}
    line["response_length_mean"] = sum(lengths) / len(lengths)
    line["response_length_max"] = max(lengths)
    line["truncated_fraction"] = sum(record["status"] == "truncated" for records in scored for record in records) / len(lengths)
    return line


def _interval(found: Estimate) -> dict[str, float | None]:
    values = {name: value for name, value in asdict(found).items() if name != "num_prompts"}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def compare(task: str, first: tuple[str, Groups], second: tuple[str, Groups], *, key: str = "right") -> dict[str, Any] | None:
    """Compare two models on the prompts that neither dropped; None if there are none.

    Args:
        key: right, for accuracies, or reward.
    """
    means = [{p: _mean(r, key) for p, r in groups.items() if "dropped" not in r[0]} for _, groups in (first, second)]
    prompts = sorted(means[0].keys() & means[1].keys())
    if not prompts:
        return None
    found = compare_paired([means[0][p] for p in prompts], [means[1][p] for p in prompts])
    return {
        "task": task,
        "first": first[0],
        "second": second[0],
        "of": "accuracy" if key == "right" else "reward",
        "num_prompts": len(prompts),
        "difference": _interval(found.difference),
        "p_value": found.p_value,
        "num_better": found.num_better,
        "num_worse": found.num_worse,
    }


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return math.fsum(float(record[key]) for record in records) / len(records)


def write_table(lines: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as text: a row for each model and task, then a sentence for each comparison."""
    ks = sorted({int(k) for line in lines for k in line.get("pass_at_k", {}) if int(k) > 1})
    votes = sorted({int(k) for line in lines for k in line.get("majority_at_k", {})})
    names = ["model", "task", "prompts", "n", "accuracy", *(f"pass@{k}" for k in ks), *(f"maj@{k}" for k in votes)]
    rows = [[*names, "reward", "tokens", "truncated"]]
    for line in lines:
        n = line["num_samples"] // line["num_prompts"] if line["num_prompts"] else 0
        row = [line["model"], line["task"], str(line["num_prompts"]), str(n), _show(line["accuracy"])]
        row += [_show(line.get("pass_at_k", {}).get(str(k))) for k in ks] + [
            _show(line.get("majority_at_k", {}).get(str(k))) for k in votes
        ]
        row += [_show(line["reward"])]
        has_any = line["num_prompts"] > 0
        row += [f"{line['response_length_mean']:.1f}" if has_any else "-", f"{line['truncated_fraction']:.1%}" if has_any else "-"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    text.insert(1, "  ".join("-" * width for width in widths))
    text += ["", "intervals hold the true value with 95 %; samples of a prompt count as one draw"]
    text += [f"{line['num_dropped']} samples of {line['model']} on {line['task']} were dropped" for line in lines if line["num_dropped"]]
    return "\n".join([*text, *map(_tell, comparisons)])


def _show(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    value, low, high = found["value"], found["low"], found["high"]
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _tell(found: Mapping[str, Any]) -> str:
    return (
        f"{found['task']}: {found['second']} against {found['first']}: {found['of']} {found['difference']['value']:+.3f} "
        f"{_range(found['difference'])}, p = {found['p_value']:.3g} (better on {found['num_better']}, worse on {found['num_worse']} of "
        f"{found['num_prompts']} prompts)"
    )


def _range(found: Mapping[str, float | None]) -> str:
    low, high = found["low"], found["high"]
    return "" if low is None or high is None else f"[{low:+.3f}, {high:+.3f}]"
