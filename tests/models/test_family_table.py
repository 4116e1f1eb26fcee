"""The table of docs/models.md, line by line, as tools/docs/generate_models.py compares families with transformers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts.models.forward import get_output_layer
from rollouts.models.prepare import check_output_layer

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"\| (\w[\w-]*) \| (\S.*?) \| (\S.*?) \| (\S+) \| (\S+) \| (\S+) \|")
ROUNDED = {"gemma4_text": 3e-5, "youtu": 3e-5, "minicpm3": 3e-5, "mamba": 5e-5}  # largest difference of an engine whose own float32 differs as much


def load_generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_models", ROOT / "tools" / "docs" / "generate_models.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
TABLE = GENERATOR.PAGE.read_text().split(GENERATOR.BEGIN)[1].split(GENERATOR.END)[0]
WAYS = {match[1]: (match[2], match[3]) for match in LINE.finditer(TABLE)}
OTHER_WINDOWS = {
    "gemma3_text": 19,
    "mistral": 3,
    "llama4_text": 16,
    "olmo3": 30,
    "gemma2": 5,
    "cohere2": 12,
    "qwen3_5_text": 70,
    "gpt_oss": 17,
}


def check(family: str, window: int) -> None:
    row = GENERATOR.compare_family(family, window)
    assert not row.problem
    assert (row.training, row.decoding) == WAYS[family]
    assert row.log_probs <= GENERATOR.LOG_PROB_BAR
    assert row.gradients <= GENERATOR.GRADIENT_BAR
    assert row.engine <= ROUNDED.get(family, GENERATOR.LOG_PROB_BAR)


def test_the_table_has_every_family_of_the_generator():
    assert re.findall(r"^\| (\S+) \|", TABLE, re.MULTILINE) == GENERATOR.FAMILIES
    assert list(WAYS) == GENERATOR.FAMILIES  # none is refused, or left out
    assert set(re.findall(r"^\| (\S+) .*\*\*", TABLE, re.MULTILINE)) <= set(ROUNDED)


def test_logits_of_rows_that_pad_the_output_matrix_are_dropped_as_inkling_does():
    model = GENERATOR.create_model("inkling_text")
    model.config.unpadded_vocab_size = 90
    check_output_layer(model)  # compares with the model's own logits
    assert get_output_layer(model).weight.shape[0] == 90


@pytest.mark.slow
@pytest.mark.parametrize("family", WAYS)
def test_a_line_of_the_table_holds(family: str):
    check(family, GENERATOR.WINDOW)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHER_WINDOWS)
def test_a_family_is_right_at_another_window(family: str):
    check(family, OTHER_WINDOWS[family])
