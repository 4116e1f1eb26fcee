"""The README: its links exist, it is short, and on a package index none leads into the repository; and docs/extending.md."""

from __future__ import annotations

import ast
import re
import runpy
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

import rollouts
from rollouts.algorithms.advantages import compute_advantages
from rollouts.algorithms.losses import policy_loss
from rollouts.algorithms.presets import grpo
from rollouts.algorithms.statistics import group_mean
from rollouts.algorithms.surrogates import clipped
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.testing import create_tiny_model

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RELATIVE = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_every_link_leads_somewhere_and_the_page_is_short():
    targets = RELATIVE.findall(README)
    assert len(targets) > 15 and len(README.splitlines()) < 100
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_the_description_for_a_package_index_has_no_link_into_the_repository(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    text = given["long_description"]
    assert not RELATIVE.findall(text) and "![" not in text
    assert "(https://trio.readthedocs.io)" in text and "python3 -m venv" in text and "Your model and data: your Hugging Face model" in text


def read_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.DOTALL | re.MULTILINE)


async def test_the_step_by_hand_and_the_loss_of_the_page_about_extending_run():
    by_hand, loss = read_blocks("extending.md")
    tokenizer, model = create_char_tokenizer(), create_tiny_model(vocab_size=64)
    names: dict[str, Any] = vars(rollouts) | {
        "generate_group": rollouts.generate_group, "with_reward": rollouts.with_reward, "collate_samples": rollouts.collate_samples,
        "check_reward_nonzero_std": rollouts.check_reward_nonzero_std, "SamplingParams": rollouts.SamplingParams,
        "token_mean": rollouts.token_mean, "compute_advantages": compute_advantages, "group_mean": group_mean, "policy_loss": policy_loss,
        "clipped": clipped, "partial": partial, "replace": replace, "torch": torch, "grpo": grpo, "RLTrainingConfig": RLTrainingConfig,
        "engine": InProcessEngine(model, tokenizer), "tokenizer": tokenizer, "prompts": ["12=", "34="],
        "my_reward": lambda sample: float(len(sample.tokens) + sample.index % 2), "backend": create_pytorch_backend(model, lr=1e-3),
    }  # fmt: skip
    code = compile(by_hand, "extending.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await types.FunctionType(code, names)()
    assert names["metrics"]["grad_norm"] > 0 and names["adv"].shape == (16,)
    exec(loss, names)
    assert names["config"].algorithm.loss.keywords["surrogate"] is names["my_surrogate"]
