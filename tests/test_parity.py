"""Our compositions against recorded inputs and outputs of other frameworks' own functions: values and gradients.

The vectors are those in tests/data/golden, or those in the directory that the environment variable ROLLOUTS_GOLDEN_DIR names. Every file
of it must be mapped in tests/parity, or stand there with the reason why it is not offered.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from parity import advantages, filters, gigpo, kl, logits, losses, lr, rollout_correction, sft, staleness
from parity.mapping import Parity, load, mismatches

SHIPPED = Path(__file__).parent / "data" / "golden"
FOLDER = Path(os.environ.get("ROLLOUTS_GOLDEN_DIR", SHIPPED))
MODULES = (advantages, filters, gigpo, kl, logits, losses, lr, rollout_correction, sft, staleness)
MAPPINGS: dict[str, Parity] = {f"{module.__name__.split('.')[-1]}/{name}": p for module in MODULES for name, p in module.MAPPINGS.items()}
NOT_OFFERED: dict[str, str] = {
    f"{module.__name__.split('.')[-1]}/{name}": why for module in MODULES for name, why in module.NOT_OFFERED.items()
}
FILES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.json") if path.parent.name != "disagreements")


def test_the_folder_of_vectors_is_there():
    assert FILES, f"{FOLDER} holds no vectors: unset ROLLOUTS_GOLDEN_DIR, or point it at a folder of <group>/<function>.json files"


@pytest.mark.parametrize("name", FILES)
def test_our_composition_gives_their_numbers(name: str):
    if name in NOT_OFFERED:
        pytest.skip(f"not offered: {NOT_OFFERED[name]}")
    assert name in MAPPINGS, f"{name} has no mapping: add it to tests/parity/{name.split('/')[0]}.py, or to NOT_OFFERED with the reason"
    found, _ = mismatches(load(FOLDER / f"{name}.json"), MAPPINGS[name])
    assert not found, "\n".join(found[:10])
