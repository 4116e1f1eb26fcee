"""Our compositions against recorded inputs and outputs of other frameworks' own functions: values and gradients.

The vectors are those in tests/data/golden, or those in the directory that the environment variable ROLLOUTS_GOLDEN_DIR names. Every file
of it must be mapped in tests/parity, or stand there with the reason why it is not offered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from needs import GOLDEN_VARIABLE, named_directory
from parity import advantages, filters, gigpo, kl, logits, losses, lr, preferences, rollout_correction, sft, staleness
from parity.mapping import (
    Parity,
    Rule,
    case_mismatches,
    find_rule,
    load,
    make_example,
    mismatches,
    name_outputs,
    rule_mismatches,
    run_case,
)

SHIPPED = Path(__file__).parent / "data" / "golden"
FOLDER = named_directory(GOLDEN_VARIABLE) or SHIPPED
MODULES = (advantages, filters, gigpo, kl, logits, losses, lr, preferences, rollout_correction, sft, staleness)
MAPPINGS: dict[str, Parity] = {f"{module.__name__.split('.')[-1]}/{name}": p for module in MODULES for name, p in module.MAPPINGS.items()}
NOT_OFFERED: dict[str, str] = {
    f"{module.__name__.split('.')[-1]}/{name}": why for module in MODULES for name, why in module.NOT_OFFERED.items()
}
FILES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.json") if path.parent.name != "disagreements")


def test_the_folder_of_vectors_is_there():
    assert FILES, f"{FOLDER} holds no vectors: unset ROLLOUTS_GOLDEN_DIR, or point it at a folder of <group>/<function>.json files"


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in FILES if name not in NOT_OFFERED])
def test_our_composition_gives_their_numbers(name: str):
    assert name in MAPPINGS, f"{name} has no mapping: add it to tests/parity/{name.split('/')[0]}.py, or to NOT_OFFERED with the reason"
    found, _ = mismatches(load(FOLDER / f"{name}.json"), MAPPINGS[name])
    assert not found, "\n".join(found[:10])


RULES = {id(rule): (name, rule) for name, parity in reversed(MAPPINGS.items()) for rule in parity.rules}  # each rule once


@pytest.mark.parametrize(("name", "rule"), RULES.values(), ids=[f"{name}: {rule.reason}" for name, rule in RULES.values()])
def test_every_rule_about_what_differs_has_an_example(name: str, rule: Rule):
    """The example of a rule, put into some case of a file that has it, falls under the rule, and we give what the rule says."""
    parity, document = MAPPINGS[name], load(SHIPPED / f"{name}.json")
    examples = [make_example(rule, case) for case in document["cases"]]
    own = [example for example in examples if find_rule(parity, example) is rule]
    assert own, f"the example of '{rule.reason}' is not such a case"
    found = rule_mismatches(document, parity, rule, own[0])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", sorted(name for name, parity in MAPPINGS.items() if parity.left_out or parity.optional))
def test_reasons_and_exceptions_are_needed(name: str):
    parity, cases = MAPPINGS[name], load(SHIPPED / f"{name}.json")["cases"]
    pairs = [(set(run_case(parity, case["kwargs"])[0]), set(name_outputs(case["outputs"])), case["grads"]) for case in cases]
    missing = {x for ours, recorded, grads in pairs for x in [*(recorded - ours), *(f"d/d{g}" for g in grads if g not in parity.wrt)]}
    extra = {x for ours, recorded, _ in pairs for x in ours - recorded}
    assert set(parity.left_out) <= missing
    assert set(parity.optional) <= extra


def made_up(outputs: dict[str, object], **parity: Any) -> list[str]:
    """Return the findings for a file of one case with one argument x = 2 and gradient 1, and a mapping that returns x and its square."""
    document = {"tolerance": {"rtol": 0.0, "atol": 1e-12}}
    case = {"kwargs": {"x": torch.tensor(2.0, dtype=torch.float64)}, "outputs": outputs, "grads": {"x": 1.0}}
    run = lambda x: {"loss": x, "more": {"square": x.detach().square()}}
    mapping = Parity(**{"run": run, "ours": "", "wrt": ("x",), **parity})
    rule = find_rule(mapping, case)
    return case_mismatches(document, mapping, case) if rule is None else rule_mismatches(document, mapping, rule, case)


def test_outputs_are_compared_in_both_directions():
    both = {"loss": 2.0, "more": {"square": 4.0}}
    assert made_up(both) == []
    assert "more.square" in made_up({**both, "more": {"square": 5.0}})[0]
    assert made_up({"loss": 2.0}) == ["more.square: not recorded, and not optional"]
    assert made_up({"loss": 2.0}, optional=("more.square",)) == []
    assert "left_out does not say why" in made_up({**both, "third": 1.0})[0]
    assert made_up({**both, "third": 1.0}, left_out={"third": "why"}) == []
    assert "d/dx" in made_up(both, wrt=())[0]
    assert made_up({"loss": 3.0, "more": {"square": 4.0}}, wrt=(), left_out={"d/dx": "why"}) == ["loss: value 0 is 2.0, expected 3.0"]


def test_cases_that_differ_are_run():
    always = lambda kwargs, outputs: True
    assert made_up({"loss": 9.0}, rules=(Rule(reason="", applies=always),)) == []
    assert made_up({"loss": 9.0}, rules=(Rule(reason="", applies=always, gives=lambda outputs: {"loss": 2.0}),)) == []
    assert "loss" in made_up({"loss": 9.0}, rules=(Rule(reason="", applies=always, gives=lambda outputs: outputs),))[0]
    assert made_up({}, rules=(Rule(reason="", applies=always, raises=ValueError),)) == ["no ValueError"]
    infinite = {"run": lambda x: {"loss": x / 0}, "rules": (Rule(reason="", applies=always),)}
    assert "not finite" in " ".join(made_up({"loss": 9.0}, **infinite))
