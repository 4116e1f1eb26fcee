"""Comparison of one of our compositions with recorded inputs and outputs of another framework's function.

A folder of vectors has one JSON file a function: {name, group, notes, tolerance, inputs, outputs, grad_of?, cases: [{id, kwargs, outputs,
grads?}]}. A mapping renames, reshapes, pads, shifts and masks, exchanges arguments, and turns options into arguments; every other number
comes from the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.algorithms.logprobs import finite_exp
from rollouts.algorithms.surrogates import Ratio, token_ratio
from rollouts.types import LossFn, TokenOutputs, TrainBatch

SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Rule:
    """Cases in which we differ from the other function on purpose. They are run as well."""

    reason: str  # the other framework's behaviour and ours, for the table in docs/parity.md
    applies: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]  # (kwargs, recorded outputs) -> whether this is such a case
    gives: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None  # recorded outputs -> some of ours; the others must be finite
    raises: type[Exception] | None = None  # what we raise
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])  # an example: arguments put into the file's first case, or f(argument)
    theirs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # and outputs put into it


@dataclass(frozen=True)
class Parity:
    """Our spelling of one function of another framework. An output that is a dictionary has the names `output.key`."""

    run: Callable[..., Mapping[str, Any]]  # the case's kwargs -> outputs under the peer's names
    ours: str  # the composition, for the table in docs/parity.md: `losses.policy_loss(surrogate=clipped)`, ...
    wrt: tuple[str, ...] = ()  # inputs whose recorded gradients are compared
    grad_of: str = "loss"  # the output (of `run`) that is differentiated; a tensor with a gradient
    mask: str | Callable[[Mapping[str, Any]], Any] | None = None  # input, or f(kwargs): outputs of its shape are compared where it is > 0
    grad_mask: str | None = None  # input: gradients of its shape are compared only where it is > 0; for peers that mask before the function
    optional: tuple[str, ...] = ()  # outputs of `run` that a case need not record
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])  # recorded output or gradient (d/dx) without counterpart -> why
    rules: tuple[Rule, ...] = ()  # where we differ; the first that applies
    note: str = ""  # what differs on purpose, for the table


def revive(value: Any) -> Any:
    """Strings NaN, Infinity and -Infinity to floats, at any depth."""
    if isinstance(value, str):
        return SPECIAL.get(value, value)
    if isinstance(value, list):
        return [revive(v) for v in value]
    if isinstance(value, dict):
        return {k: revive(v) for k, v in value.items()}
    return value


def to_argument(value: Any, kind: str) -> Any:
    """A JSON value as the tensor, list or number that its declared type names."""
    value = revive(value)
    if value is None:
        return None
    if kind.startswith("list["):
        inner = kind[5:]
        if inner.startswith("float tensor"):
            return [torch.tensor(v, dtype=torch.float64) for v in value]
        if inner.startswith("int mask"):
            return [torch.tensor(v, dtype=torch.int64) for v in value]
        return value
    if kind.startswith("float tensor"):
        return torch.tensor(value, dtype=torch.float64)
    if kind.startswith(("int tensor", "int mask")):
        return torch.tensor(value, dtype=torch.int64)
    return bool(value) if kind == "bool" else value


def load(path: Path) -> dict[str, Any]:
    """One file, with each case's arguments as tensors. Where `returns` equal `advantages` the files leave them out: they are put back."""
    document: dict[str, Any] = json.loads(path.read_text())
    for case in document["cases"]:
        case["kwargs"] = {name: to_argument(value, document["inputs"][name]["type"]) for name, value in case["kwargs"].items()}
        case["outputs"], case["grads"] = revive(case["outputs"]), revive(case.get("grads", {}))
        if {"returns", "advantages"} <= document["outputs"].keys():
            case["outputs"].setdefault("returns", case["outputs"]["advantages"])
    return document


def flatten(value: Any) -> list[Any]:
    """All numbers (and strings) of a nested value, dictionaries as keys and values in the order of their keys."""
    if isinstance(value, Tensor):
        value = value.detach().to(torch.float64).tolist()
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in (key, *flatten(value[key]))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [leaf for element in value for leaf in flatten(element)]
    return [value]


def difference(found: Any, expected: Any, rtol: float, atol: float, mask: Any = None) -> str | None:
    """The first place where two nested values differ by more than atol + rtol * |expected|; None if they agree."""
    ours, theirs = flatten(found), flatten(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} values, expected {len(theirs)}"
    kept = flatten(mask) if mask is not None else []
    for place, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        if len(kept) == len(ours) and kept[place] == 0:
            continue
        if isinstance(q, str) or q is None:
            same = p == q
        else:
            p, q = float(p), float(q)
            same = (math.isnan(p) and math.isnan(q)) or p == q or abs(p - q) <= atol + rtol * abs(q)
        if not same:
            return f"value {place} is {p!r}, expected {q!r}"
    return None


def name_outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs by name; each entry of one that is a dictionary has a name of its own: metrics.ppo_kl."""
    named: dict[str, Any] = {}
    for name, value in outputs.items():
        named |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, Mapping) else {name: value}
    return named


def zero_nans(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Recorded outputs with 0 in place of NaN, at any depth: what `Rule.gives` where a NaN of theirs is a 0 of ours."""

    def zeroed(value: Any) -> Any:
        if isinstance(value, list):
            return [zeroed(v) for v in value]
        return 0.0 if isinstance(value, float) and math.isnan(value) else value

    return {name: zeroed(value) for name, value in outputs.items()}


def has_nan(kwargs: Mapping[str, Any], outputs: Mapping[str, Any]) -> bool:
    """Some recorded output holds a NaN."""
    return any(isinstance(x, float) and math.isnan(x) for x in flatten(outputs))


def run_case(parity: Parity, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """(our outputs by name, input -> gradients of its tensors)."""
    leaves: dict[str, list[Tensor]] = {}
    given = dict(kwargs)
    for name in parity.wrt:
        rows = kwargs[name] if isinstance(kwargs[name], list) else [kwargs[name]]
        leaves[name] = [row.detach().clone().requires_grad_() for row in rows]
        given[name] = leaves[name] if isinstance(kwargs[name], list) else leaves[name][0]
    outputs = parity.run(**given)
    gradients: dict[str, list[Tensor]] = {}
    for name, rows in leaves.items():
        found = torch.autograd.grad(outputs[parity.grad_of], rows, retain_graph=True, allow_unused=True)
        gradients[name] = [torch.zeros_like(row) if g is None else g for g, row in zip(found, rows, strict=True)]
    return name_outputs(outputs), gradients


def mask_of(parity: Parity, kwargs: Mapping[str, Any]) -> Any:
    if parity.mask is None:
        return None
    return parity.mask(kwargs) if callable(parity.mask) else kwargs[parity.mask]


def tolerance_of(document: Mapping[str, Any], name: str) -> dict[str, float]:
    """rtol and atol of an output; entries of a dictionary have that of the dictionary."""
    tolerance = document["tolerance"]
    return tolerance.get("outputs", {}).get(name.split(".")[0], {"rtol": tolerance["rtol"], "atol": tolerance["atol"]})


def case_mismatches(document: Mapping[str, Any], parity: Parity, case: Mapping[str, Any]) -> list[str]:
    """Return the places where a case does not agree: outputs in both directions, and gradients."""
    outputs, gradients = run_case(parity, case["kwargs"])
    recorded, mask = name_outputs(case["outputs"]), mask_of(parity, case["kwargs"])
    unasked = {*parity.optional, *([parity.grad_of] if parity.wrt else [])}  # what is differentiated is often recorded by its gradient only
    found = [f"{name}: not recorded, and not optional" for name in outputs if name not in recorded and name not in unasked]
    missing = [name for name in recorded if name not in outputs] + [f"d/d{name}" for name in case["grads"] if name not in gradients]
    found += [f"{name}: recorded, not compared, and left_out does not say why" for name in missing if name not in parity.left_out]
    for name in outputs.keys() & recorded.keys():
        error = difference(outputs[name], recorded[name], **tolerance_of(document, name), mask=mask)
        found += [f"{name}: {error}"] if error else []
    for name, gradient in gradients.items():
        kept = None if parity.grad_mask is None else case["kwargs"][parity.grad_mask]
        error = difference(gradient, case["grads"][name], **tolerance_of(document, ""), mask=kept)
        found += [f"d/d{name}: {error}"] if error else []
    return found


def find_rule(parity: Parity, case: Mapping[str, Any]) -> Rule | None:
    """The first rule that makes a case differ."""
    return next((rule for rule in parity.rules if rule.applies(case["kwargs"], case["outputs"])), None)


def rule_mismatches(document: Mapping[str, Any], parity: Parity, rule: Rule, case: Mapping[str, Any]) -> list[str]:
    """Return the results of a case that differs on purpose which do not follow its rule, or are not finite."""
    try:
        outputs, gradients = run_case(parity, case["kwargs"])
    except Exception as error:
        if rule.raises is None or not isinstance(error, rule.raises):
            raise
        return []
    if rule.raises is not None:
        return [f"no {rule.raises.__name__}"]
    expected = {} if rule.gives is None else name_outputs(rule.gives(case["outputs"]))
    found = [f"{name}: stated by the rule, but not computed" for name in expected if name not in outputs and name not in parity.left_out]
    mask = mask_of(parity, case["kwargs"])
    for name, ours in outputs.items():
        stated = expected.get(name)
        error = difference(ours, stated, **tolerance_of(document, name), mask=mask) if name in expected else unfinished(ours, mask)
        found += [f"{name}: {error}"] if error else []
    return found + [f"d/d{name}: {error}" for name, gradient in gradients.items() if (error := unfinished(gradient))]


def unfinished(value: Any, mask: Any = None) -> str | None:
    """The first number of a nested value that is not finite; None if all are."""
    leaves, kept = flatten(value), flatten(mask) if mask is not None else []
    for place, x in enumerate(leaves):
        if (len(kept) != len(leaves) or kept[place] != 0) and isinstance(x, float) and not math.isfinite(x):
            return f"value {place} is {x!r}, not finite"
    return None


def mismatches(document: Mapping[str, Any], parity: Parity) -> tuple[list[str], dict[str, str]]:
    """(what does not agree, case id -> reason of the cases that differ on purpose)."""
    found: list[str] = []
    on_purpose: dict[str, str] = {}
    for case in document["cases"]:
        rule = find_rule(parity, case)
        if rule is not None:
            on_purpose[case["id"]] = rule.reason
        errors = case_mismatches(document, parity, case) if rule is None else rule_mismatches(document, parity, rule, case)
        found += [f"{case['id']} {error}" for error in errors]
    return found, on_purpose


def make_example(rule: Rule, case: Mapping[str, Any]) -> dict[str, Any]:
    """A case with the arguments and outputs of the rule's example in place of its own."""

    def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        return {**values, **{name: new(values.get(name)) if callable(new) else new for name, new in changes.items()}}

    return {**case, "kwargs": changed(case["kwargs"], rule.given), "outputs": changed(case["outputs"], rule.theirs)}


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Ragged rows as [B, T] with zeros on the right; gradients flow back."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def group_numbers(index: Sequence[str]) -> Tensor:
    """Group names to numbers in order of appearance."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(name, len(seen)) for name in index])


def token_losses(loss: LossFn, outputs: TokenOutputs, batch: TrainBatch) -> Tensor:
    """# [B, T] what each token adds to a loss per unit of its weight: the derivative of the loss with respect to loss_weights."""
    weights = torch.ones_like(outputs.log_probs).requires_grad_()
    return torch.autograd.grad(loss(outputs, replace(batch, loss_weights=weights)).loss, weights)[0]


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, *, ratio: Ratio = token_ratio) -> Tensor:
    """Return r = exp(ratio(...)), with its gradient. All # [B, T]; 1 where mask = 0."""
    return finite_exp(ratio(log_probs, old_log_probs, mask))
