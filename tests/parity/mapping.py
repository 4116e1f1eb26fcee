"""How one of our compositions is held against recorded inputs and outputs of another framework's function.

A folder of vectors has one JSON file a function: {name, group, notes, tolerance, inputs, outputs, grad_of?, cases: [{id, kwargs, outputs,
grads?}]}. A mapping renames and reshapes; every number comes from the library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.types import TrainBatch

SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Parity:
    """Our spelling of one function of another framework."""

    run: Callable[..., Mapping[str, Any]]  # the case's kwargs -> outputs under the peer's names; a subset will do
    ours: str  # the composition, for the table in docs/parity.md: `losses.policy_loss(surrogate=clipped)`, ...
    wrt: tuple[str, ...] = ()  # inputs whose recorded gradients are compared
    grad_of: str = "loss"  # the output (of `run`) that is differentiated; a tensor with a gradient
    mask: str | Callable[[Mapping[str, Any]], Any] | None = None  # input, or f(kwargs): outputs of its shape are compared where it is > 0
    grad_mask: str | None = None  # input: gradients of its shape are compared only where it is > 0; for peers that mask before the function
    differs: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] | None = None  # (kwargs, recorded outputs) -> why a case differs
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
    """One file, with each case's arguments as tensors."""
    document: dict[str, Any] = json.loads(path.read_text())
    for case in document["cases"]:
        case["kwargs"] = {name: to_argument(value, document["inputs"][name]["type"]) for name, value in case["kwargs"].items()}
        case["outputs"], case["grads"] = revive(case["outputs"]), revive(case.get("grads", {}))
    return document


def flatten(value: Any) -> list[Any]:
    """All numbers (and strings) of a nested value, dictionaries in the order of their keys."""
    if isinstance(value, Tensor):
        value = value.detach().to(torch.float64).tolist()
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in flatten(value[key])]
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


def mismatches(document: Mapping[str, Any], parity: Parity) -> tuple[list[str], dict[str, str]]:
    """(what does not agree, case id -> reason of the cases that differ on purpose)."""
    found: list[str] = []
    on_purpose: dict[str, str] = {}
    tolerance = document["tolerance"]
    default = {"rtol": tolerance["rtol"], "atol": tolerance["atol"]}
    for case in document["cases"]:
        reason = None if parity.differs is None else parity.differs(case["kwargs"], case["outputs"])
        if reason is not None:
            on_purpose[case["id"]] = reason
            continue
        kwargs = dict(case["kwargs"])
        for name in parity.wrt:
            kwargs[name] = [x.requires_grad_() for x in kwargs[name]] if isinstance(kwargs[name], list) else kwargs[name].requires_grad_()
        outputs = parity.run(**kwargs)
        mask = parity.mask(case["kwargs"]) if callable(parity.mask) else None if parity.mask is None else case["kwargs"][parity.mask]
        compared = [key for key in outputs if key in case["outputs"]]
        if not compared:
            found.append(f"{case['id']}: none of the outputs {sorted(outputs)} is recorded")
        for key in compared:
            error = difference(outputs[key], case["outputs"][key], **tolerance.get("outputs", {}).get(key, default), mask=mask)
            if error:
                found.append(f"{case['id']} {key}: {error}")
        for name in parity.wrt:
            leaves = kwargs[name] if isinstance(kwargs[name], list) else [kwargs[name]]
            gradients = torch.autograd.grad(outputs[parity.grad_of], leaves, retain_graph=True, allow_unused=True)
            dense = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
            kept = None if parity.grad_mask is None else case["kwargs"][parity.grad_mask]
            error = difference(dense, case["grads"][name], **default, mask=kept)
            if error:
                found.append(f"{case['id']} d/d{name}: {error}")
    return found, on_purpose


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Ragged rows as [B, T] with zeros on the right; gradients flow back."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def group_numbers(index: Sequence[str]) -> Tensor:
    """Group names to numbers in order of appearance."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(name, len(seen)) for name in index])


def make_batch(mask: Tensor, **columns: Any) -> TrainBatch:
    """A TrainBatch of [B, T] columns around a mask: every position may be trained on, rewards 0, one group a row unless given."""
    rows, width = mask.shape
    base: dict[str, Any] = {
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "lengths": torch.full((rows,), width),
        "loss_mask": mask.to(torch.float64),
        "rewards": torch.zeros(rows, dtype=torch.float64),
        "group_ids": torch.arange(rows),
        "trainable": torch.ones(rows, dtype=torch.bool),
    }
    return TrainBatch(**base | columns)
