"""Write docs/algorithms/: one page per preset, from its docstring, signature and code, its oracle, and the metrics of its loss.

    python tools/docs/generate_algorithms.py            writes the pages
    python tools/docs/generate_algorithms.py --check    exits 1 and names the pages that are not up to date

docs/algorithms/write-your-own.md is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from integration.expressions.algorithm import find_presets
from rollouts.algorithms import presets as algorithms
from rollouts.types import Algorithm, RewardComponents, TokenOutputs, TrainBatch, Turns

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
PAGES = DOCS / "algorithms"
BY_HAND = ("write-your-own.md",)
ORACLES = "tests/oracles/algorithms.py"  # the losses as naive loops: one function per preset, of the same name
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_tokens": 512},
    "gdpo": {"components": "right=1 form=0.5"},
}  # arguments of hyper-parameters without a default
TASKS = {  # options of presets that need several turns, or a teacher
    "gigpo": "--task grid_world",
    "opd": "--mode sft+rl --teacher.path DIR",
    "gkd": "--mode sft+rl --teacher.path DIR",
}
COLUMNS = {
    "rollout_log_probs": "log-probs that the engine reported; the samples carry them",
    "old_log_probs": "log-probs of the policy before the update, by the trainer: a forward pass, or the first one of the update itself",
    "prox_log_probs": "log-probs of the proximal policy: the policy before the update, or what the samples carry",
    "segment_log_probs": "log-probs of each token under the version after the one that sampled it; the samples carry them",
    "weight_versions": "weight version that sampled each token; the samples carry them",
    "policy_versions": "weight version that trains; the loop fills it",
    "ref_log_probs": "log-probs of a reference model: pass `reference`",
    "teacher_log_probs": "log-probs of a teacher, of the sampled tokens: pass `teacher` ([distillation](../distillation.md))",
    "teacher_tops": "the most probable tokens of a teacher and their log-probs: pass `teacher`, made with num_tops",
    "values": "of a critic, which is trained beside the policy: pass `critic`",
    "greedy_rows": "a row with the greedy answer in each group, which is not trained on: make rollouts with"
    " RolloutConfig(n_baseline_samples=1) and create_generate_fn(num_greedy=1)",
    "turns": "where each action of an episode is, the state that it began in and its reward; the samples carry them (`Sample.turns`)",
    "reward_components": "score of each named part of the reward; the samples carry them (`create_composite_reward`, or the metrics of"
    " `EvaluateResult`)",
    "entropy": "of the distribution of each token, computed with the log-probs",
}
METRICS = {
    "approx_kl": "r - 1 - log r, an estimate of KL(anchor || policy): how far the update has gone; 0 on the first one of a step",
    "ratio_mean": "mean ratio of policy to anchor; far from 1 on the first update, engine and trainer disagree",
    "max_ratio": "the largest ratio of the step",
    "min_ratio": "the smallest ratio of the step",
    "log_prob_mean": "mean log-prob of the trained tokens",
    "clip_fraction": "share of tokens whose gradient the clip has removed",
    "clip_fraction_low": "of these, the ones with A < 0 that have already become rarer",
    "clip_fraction_high": "of these, the ones with A > 0 that have already become more frequent",
    "dual_clip_fraction": "share of tokens with A < 0 whose gradient the dual clip has removed",
    "ref_kl": "the KL term's mean: the divergence from the reference model",
    "entropy": "mean entropy of the policy, nats: near 0 it no longer explores",
    "importance_weight": "mean weight for the distance between trainer and engine; 1 if they agree",
    "max_importance_weight": "the largest weight of the step, after its bound",
    "dropped_fraction": "share of tokens with weight 0",
    "rollout_kl": "log p_rollout - log p_anchor, an estimate of KL(engine || trainer): near 0 unless rollouts are old",
    "teacher_divergence": "mean of the divergence from the teacher, as beta names it",
    "reward_chosen": "beta log(p / p_ref) of the chosen answers, or what the loss takes for it: the reward that the policy stands for",
    "reward_rejected": "the same of the rejected ones; if both fall, the policy forgets both",
    "reward_margin": "their difference",
    "reward_accuracy": "share of pairs whose chosen answer has the larger one: 0 before the first update, where both are 0",
    "log_prob_chosen": "log-prob of a chosen answer",
    "log_prob_rejected": "log-prob of a rejected one",
    "policy_weight": "mean of the weights that depend on the current policy",
    "selected": "share of tokens that the loss treats apart",
    "outside_fraction": "share of tokens that have left the trust region and lost their gradient",
    "outside_fraction_low": "of these, the ones with A < 0 that have already become rarer",
    "outside_fraction_high": "of these, the ones with A > 0 that have already become more frequent",
    "gate": "mean share of its gradient that the gate leaves a token: 1 at the anchor, near 0 far from it",
}
OWN_METRICS = {  # presets' own meanings of metrics
    "cispo": {
        "clip_fraction": "share of tokens whose weight is bounded; they keep their gradient",
        "clip_fraction_low": "of these, the ones that have become rarer; none where clip_low = 1",
        "clip_fraction_high": "of these, the ones that have become more frequent",
    }
}


CRITIC_METRICS = {
    "critic_loss": "the critic's own loss",
    "critic_grad_norm": "its gradient norm",
    "value_mean": "mean value at the trained tokens",
    "value_error": "mean distance between values and returns",
    "value_clip_fraction": "share of tokens whose value has moved further than the clip allows",
    "explained_variance": "1 - var(returns - values) / var(returns) before the update: 1 is perfect, 0 no better than a constant",
}
TEACHER_METRICS = {
    "teacher_kl": "log p - log p_teacher before the update, an estimate of KL(policy || teacher) per token: what should fall",
    "teacher_doubt_fraction": "share of tokens that the teacher gives less than half of the policy's probability",
}
PAIR_METRICS = {
    "num_pairs": "pairs of the step: groups whose best answer is better than their worst",
    "num_ties": "groups without a pair, since all rewards are equal or too near",
    "reward_gap": "difference of the rewards of a pair, mean",
}
TURN_METRICS = {
    "num_anchors": "states of a group in which an action began",
    "anchor_size_mean": "actions that share such a state, mean; with it anchor_size_max",
    "anchor_single_fraction": "share of actions that nobody else began in the same state as: they learn from their episode alone",
    "anchors_of_1": "number of states with one action; with it the further columns of a histogram, anchors_of_2 to anchors_of_17_or_more",
}
BOUND = (
    "`bound=20.0`, as in verl: log r counts as 20 nats at most. A token beyond (r > e^20: a rollout log-prob of -100, say) has no gradient"
    " through its ratio, and the loss stays finite."
)
SWITCHES = ("kl_coef", "entropy_coef")  # hyper-parameters that add a term to the loss if more than 0
ROLLOUT_METRICS = {
    "reward_mean": "what should rise; with it reward_std, reward_min, reward_max",
    "shaped_reward_mean": "mean of the rewards that are trained on, where they are shaped after the filter (overlong penalty)",
    "zero_std_fraction": "share of groups whose rewards are all equal: they teach a group-relative algorithm nothing",
    "zero_gradient_fraction": "share of trained tokens whose gradient was exactly 0, so that no backward pass was run "
    "([what is not computed](../backends.md#what-is-not-computed))",
    "response_length_mean": "trained tokens of a row; with it response_length_min, response_length_max",
    "truncated_fraction": "share of rows that ran into the token limit",
    "staleness_max": "how many weight versions behind the oldest token of the step is",
}


# -- descriptions of presets


@dataclass(frozen=True)
class Description:
    """The parts of a preset's docstring."""

    summary: str
    paragraphs: tuple[str, ...]  # paragraphs between the summary and the sections, lines kept
    when: str
    arguments: dict[str, str]
    source: str


def is_wrapper(preset: Callable[..., Algorithm]) -> bool:
    """Whether a preset takes an algorithm and returns another."""
    return next(iter(inspect.signature(preset).parameters), "") == "algorithm"


def join_lines(text: str) -> str:
    """Join the lines of one paragraph."""
    return " ".join(line.strip() for line in text.splitlines())


def describe(preset: Callable[..., Algorithm]) -> Description:
    """Parse a docstring: summary, paragraphs, `When:`, `Args:`, `Source:`."""
    summary, *blocks = re.split(r"\n\s*\n", inspect.getdoc(preset) or "")
    sections = {"When": "", "Args": "", "Source": ""}
    paragraphs: list[str] = []
    for block in blocks:
        for part in re.split(r"\n(?=(?:When|Args|Source):)", block):
            name, _, text = part.partition(":")
            if name in sections:
                sections[name] = text
            else:
                paragraphs.append(part)
    arguments: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(sections["Args"].strip("\n"))):
        names, _, meaning = entry.partition(":")
        arguments |= {name.strip(): join_lines(meaning).strip() for name in names.split(",") if name.strip()}
    return Description(join_lines(summary), tuple(paragraphs), join_lines(sections["When"]), arguments, join_lines(sections["Source"]))


def meaning_of(name: str, description: Description) -> str:
    """Return the meaning of a hyper-parameter; "as in grpo" is looked up there."""
    meaning = description.arguments.get(name, "")
    reference = re.match(r"as in (\w+)\.?", meaning)
    if reference and reference.group(1) in find_presets():
        return meaning_of(name, describe(find_presets()[reference.group(1)])) + meaning[reference.end() :]
    return meaning


def example_of(name: str) -> Algorithm:
    """Create the preset with its defaults; a wrapper wraps dapo()."""
    preset = find_presets()[name]
    return preset(algorithms.dapo()) if is_wrapper(preset) else preset(**ARGUMENTS.get(name, {}))


def expression_of(name: str) -> str:
    """Return example_of as text, in Python and for --rl.algorithm."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in ARGUMENTS.get(name, {}).items())
    return f"{name}(dapo())" if is_wrapper(find_presets()[name]) else f"{name}({arguments})"


def format_part(part: Any) -> str:
    """Format a part of an algorithm as code: functions by name, partials as calls with their arguments."""
    if isinstance(part, partial):
        filled = [f"{key}={format_part(value)}" for key, value in part.keywords.items()]
        return f"{part.func.__name__}({', '.join([*map(format_part, part.args), *filled])})"
    if isinstance(part, algorithms.Chain):
        return f"chain({', '.join(format_part(step) for step in part.steps)})"
    if is_dataclass(part) and not isinstance(part, type):  # settings: those that differ from the defaults
        values = [(field.name, getattr(part, field.name)) for field in fields(part) if getattr(part, field.name) != field.default]
        return f"{type(part).__name__}({', '.join(f'{name}={format_part(value)}' for name, value in values)})"
    return part.__name__ if callable(part) else repr(part)


def capitalize(text: str) -> str:
    """Capitalize the first letter of a text."""
    return text[:1].upper() + text[1:]


def describe_metrics(name: str) -> list[tuple[str, str]]:
    """Return (name, meaning) of the metrics of a preset with its defaults, then of those added by further terms, a critic or turns."""
    preset, algorithm = find_presets()[name], example_of(name)
    meanings = METRICS | OWN_METRICS.get(name, {})
    rows = {metric: meanings[metric] for metric in find_metrics(algorithm)}
    for switch in SWITCHES:
        if switch in inspect.signature(preset).parameters:
            arguments = ARGUMENTS.get(name, {}) | {switch: 0.1}
            more = [metric for metric in find_metrics(preset(**arguments)) if metric not in rows]
            rows |= {metric: f"with {switch} > 0: {METRICS[metric]}" for metric in more}
    rows |= CRITIC_METRICS if "values" in algorithm.requires else {}
    rows |= TEACHER_METRICS if {"teacher_log_probs", "teacher_tops"} & algorithm.requires else {}
    rows |= PAIR_METRICS if algorithm.compares_pairs else {}
    return list((rows | (TURN_METRICS if "turns" in algorithm.requires else {})).items())


def find_metrics(algorithm: Algorithm) -> list[str]:
    """Find the names of the metrics of an algorithm's loss by calling it on a small batch with the required columns."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return -torch.rand(4, 5, generator=generator)

    per_token = {field.name for field in fields(TrainBatch)} - {"turns", "reward_components", "teacher_tops"}
    columns: dict[str, Any] = {name: draw() for name in ("rollout_log_probs", *algorithm.requires) if name in per_token}
    if "turns" in algorithm.requires:
        ids = torch.tensor([[-1, 0, 0, 1, 1]] * 4)
        columns["turns"] = Turns(ids=ids, states=torch.tensor([[0, 1]] * 4), rewards=torch.rand(4, 2, generator=generator))
    if "reward_components" in algorithm.requires:
        columns["reward_components"] = RewardComponents(names=("right", "form"), scores=torch.rand(4, 2, generator=generator))
    if "teacher_tops" in algorithm.requires:
        columns |= {"teacher_ids": torch.zeros(4, 5, 1, dtype=torch.int32), "teacher_tops": torch.stack([draw(), draw()], -1)}
    batch = TrainBatch(
        tokens=torch.zeros(4, 5, dtype=torch.int64),
        lengths=torch.full((4,), 5),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]] * 4),
        rewards=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        trainable=torch.tensor([True, "greedy_rows" not in algorithm.requires] * 2),
        **columns,
    )
    batch = algorithm.estimate(batch)
    batch = replace(batch, loss_weights=algorithm.weigh(batch))
    entropy = -draw() if "entropy" in algorithm.requires else None
    divergence = None if batch.teacher_beta is None else -draw()
    return list(algorithm.loss(TokenOutputs(log_probs=draw(), entropy=entropy, divergence=divergence), batch).metrics)


# -- code


@cache
def parse_file(path: Path) -> tuple[str, dict[str, ast.AST]]:
    """Return a file's text, and its top-level functions by name."""
    text = path.read_text()
    return text, {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def collect_functions(path: Path, name: str) -> str:
    """Return the code of a function and of the functions of its file that it uses, directly or not, in the order of the file."""
    text, functions = parse_file(path)
    wanted, queue = set[str](), [name]
    while queue:
        current = queue.pop()
        if current not in wanted:
            wanted.add(current)
            queue += [node.id for node in ast.walk(functions[current]) if isinstance(node, ast.Name) and node.id in functions]
    pieces = [ast.get_source_segment(text, node) or "" for key, node in functions.items() if key in wanted and key != name]
    return "\n\n\n".join([ast.get_source_segment(text, functions[name]) or "", *pieces])


def code_without_docstring(function: Callable[..., Any]) -> str:
    """Return the source of a function without its docstring."""
    lines = inspect.getsource(function).splitlines()
    node = ast.parse("\n".join(lines)).body[0]
    assert isinstance(node, ast.FunctionDef), f"{function} is not a function"
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines = lines[: first.lineno - 1] + lines[first.end_lineno :]
    return "\n".join(lines).rstrip()


# -- pages


def format_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def escape(text: str) -> str:
    """Escape text for a cell of a table, outside code: column separators and accidental emphasis."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def format_paragraph(text: str) -> str:
    """Format a paragraph of a docstring: a formula as code, else as text."""
    return f"```text\n{text}\n```" if re.match(r"[\w(). ]+ = ", text) else escape(join_lines(text))


def format_default(parameter: inspect.Parameter) -> str:
    """Format the default of a parameter, with functions by name."""
    if parameter.default is inspect.Parameter.empty:
        return "required"
    return f"`{parameter.default.__name__ if callable(parameter.default) else repr(parameter.default)}`"


def write_page(name: str) -> str:
    """Return the page of one preset."""
    preset, algorithm = find_presets()[name], example_of(name)
    description = describe(preset)
    parameters = [
        (f"`{key}`", format_default(parameter), escape(meaning_of(key, description)))
        for key, parameter in inspect.signature(preset).parameters.items()
    ]
    composition = [
        ("`estimate`", f"`{format_part(algorithm.estimate)}`", "once per rollout batch: rewards to advantages"),
        ("`weigh`", f"`{format_part(algorithm.weigh)}`", "once per optimizer step: what each token counts"),
        ("`loss`", f"`{format_part(algorithm.loss)}`", "once per micro-batch: a weighted sum"),
    ]
    columns = [(f"`{column}`", escape(COLUMNS[column])) for column in sorted(algorithm.requires)]
    metrics = [(f"`{metric}`", escape(meaning)) for metric, meaning in describe_metrics(name)]
    parts = [
        f"<!-- Written by tools/docs/generate_algorithms.py from rollouts/algorithms/presets.py and {ORACLES}: do not edit. -->",
        f"# {name}",
        escape(description.summary),
        *[format_paragraph(text) for text in description.paragraphs],
        f"**When.** {capitalize(escape(description.when))}",
        *([f"**Source.** {escape(description.source)}"] if description.source else []),
        "## Use",
        f"```text\npython -m integration.train {TASKS.get(name, '--mode sft+rl')} --rl.algorithm '{expression_of(name)}'\n```",
        f"In Python: `algorithm={expression_of(name)}` in `RLTrainingConfig`, or each of its three functions called by hand.",
        "## Hyper-parameters",
        format_table(("name", "default", "meaning"), parameters) if parameters else "None.",
        "## Composition",
        f"`{expression_of(name)}` is the value",
        format_table(("part", "function", "called"), composition),
        *([BOUND] if "bound=20.0" in format_part(algorithm.loss) else []),
        "It requires these columns of the batch:",
        format_table(("column", "what it is"), columns) if columns else "None.",
        f"The code, in `rollouts/algorithms/presets.py`:\n\n```python\n{code_without_docstring(preset)}\n```",
        "## Oracle",
        f"The loss of a whole optimizer step as naive loops, from the paper (`{ORACLES}`). Tests hold the composition against it in"
        " float64, value and gradient to 1e-10, and check that padding, the order of rows and the split into micro-batches change nothing."
        " A `Step` is the batch as lists; `step.tokens()` are the places that are trained on.",
        f"```python\n{collect_functions(ROOT / ORACLES, name)}\n```",
        "## Metrics",
        "Means over the trained tokens of a step (`max_` and `min_`: extremes), besides `loss`, `grad_norm`, `lr` and `num_tokens`:",
        format_table(("metric", "what it says"), metrics),
    ]
    return "\n\n".join(parts) + "\n"


def write_index() -> str:
    """Return docs/algorithms/README.md."""
    presets = find_presets()

    def row(name: str) -> tuple[str, ...]:
        algorithm = example_of(name)
        needs = ", ".join(f"`{column}`" for column in sorted(algorithm.requires))
        return f"[{name}]({name}.md)", escape(describe(presets[name]).summary), f"`{format_part(algorithm.weigh)}`", needs

    header = ("preset", "what it is", "weights", "requires")
    wrappers = [name for name in presets if is_wrapper(presets[name])]
    parts = [
        "<!-- Written by tools/docs/generate_algorithms.py: do not edit. -->",
        "# Algorithms",
        "An algorithm is three pure functions: `estimate` (rewards to advantages, once per rollout batch), `weigh` (what each token counts,"
        " once per optimizer step) and `loss` (once per micro-batch). A preset is a function of hyper-parameters that composes them from"
        " named parts; it returns a value that prints, compares and pickles. [Write your own](write-your-own.md) takes a page.",
        format_table(header, [row(name) for name in presets if name not in wrappers]),
        "Wrappers take an algorithm and return one, here round `dapo()`:",
        format_table(header, [row(name) for name in wrappers]),
        "On the command line a preset is an expression of names and literals, parsed and never evaluated:",
        "```text\n--rl.algorithm 'decoupled(dapo(clip_high=0.3), cap=5.0)'\n--rl.algorithm my_module:my_algorithm\n```",
        "Most of them on the default task, three seeds (figures in [benchmarks.md](../benchmarks.md)):",
        "![Held-out accuracy and mean reward over the RL steps, one panel an algorithm](../algorithms.png)",
        "## Reading the metrics",
        "Each page explains what its loss reports. For every algorithm the loop logs about the rollouts of a step:",
        format_table(("metric", "what it says"), [(f"`{name}`", escape(meaning)) for name, meaning in ROLLOUT_METRICS.items()]),
        "[parity.md](../parity.md) lists the functions of other frameworks that give the same numbers.",
    ]
    return "\n\n".join(parts) + "\n"


def write_all() -> dict[Path, str]:
    """Return the text of every generated page, by path."""
    return {PAGES / "README.md": write_index()} | {PAGES / f"{name}.md": write_page(name) for name in find_presets()}


def find_stale(pages: dict[Path, str]) -> list[Path]:
    """Find pages that are missing, out of date, or of no preset."""
    differing = [path for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    return differing + [path for path in PAGES.glob("*.md") if path not in pages and path.name not in BY_HAND]


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    pages = write_all()
    stale = find_stale(pages)
    if parser.parse_args().check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not up to date: run python tools/docs/generate_algorithms.py")
        return 1 if stale else 0
    PAGES.mkdir(exist_ok=True)
    for path in stale:
        if path in pages:
            path.write_text(pages[path])
        else:
            path.unlink()
    print(f"{len(stale)} of {len(pages)} pages changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
