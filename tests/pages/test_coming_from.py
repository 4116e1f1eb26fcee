"""docs/coming-from.md: every name of ours in its tables exists and takes the arguments shown, and its code runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.command import PROGRAMS
from integration.expressions.algorithm import resolve_algorithm
from integration.settings.config import Config
from rollouts.algorithms.advantages import normalize_by_group
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.batches import split_microbatches
from rollouts.config_files import to_dict
from rollouts.data.collate import collate_samples
from rollouts.testing import create_tiny_model
from rollouts.types import Sample, TokenOutputs, TrainBatch

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
FRAMEWORKS = ("TRL", "verl", "AReaL", "slime", "prime-rl", "Tinker and tinker-cookbook", "verl-agent")
STANDARD = ("functools.partial",)


def read_rows() -> list[tuple[str, str]]:
    """(their cell, our cell) of every table."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return [(theirs, ours) for theirs, ours in rows if ours not in ("here", "---")]


def read_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


OUR_CODE = sorted({code for _, ours in read_rows() for code in read_code(ours)})


def find(name: str) -> Any:
    """The object of a dotted name below `rollouts`. A field of a dataclass is its name."""
    found: Any = importlib.import_module("rollouts")
    path = "rollouts"
    for part in name.split("."):
        path += "." + part
        if inspect.ismodule(found):
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                found = getattr(found, part)
        elif is_dataclass(found) and part in {field.name for field in fields(found)}:
            found = part
        else:
            found = getattr(found, part)
    return found


def check_expression(node: ast.expr) -> None:
    """Every name exists, and every call has arguments of these names."""
    if isinstance(node, ast.Name | ast.Attribute):
        assert ast.unparse(node) in STANDARD or find(ast.unparse(node)) is not None
    elif isinstance(node, ast.Call):
        parameters = inspect.signature(find(ast.unparse(node.func))).parameters
        assert {keyword.arg for keyword in node.keywords} <= set(parameters), f"{ast.unparse(node)} takes {list(parameters)}"
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            check_expression(value)
    else:
        assert isinstance(node, ast.Constant), f"{ast.unparse(node)} is neither a name nor a call nor a literal"


@pytest.mark.parametrize("code", OUR_CODE)
def test_every_name_of_ours_can_be_imported(code: str):
    if code.startswith("--"):
        settings: Any = to_dict(Config())
        for part in code.removeprefix("--").split()[0].replace("-", "_").split("."):
            settings = settings[part]
        flag, _, value = code.partition(" ")
        if flag == "--rl.algorithm" and ":" not in value:
            resolve_algorithm(value, 8)
        return
    if code.startswith("rollouts "):
        assert code.split()[1] in PROGRAMS
        return
    if code in ("weigh", "loss_weight_fn", "batch_size"):
        return  # words of the row itself
    check_expression(ast.parse(code, mode="eval").body)


def test_each_framework_has_a_table_and_each_asked_for_name_a_row():
    page = PAGE.read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE)[: len(FRAMEWORKS)] == list(FRAMEWORKS)
    theirs = " ".join(cell for cell, _ in read_rows())
    for name in (
        "adv_estimator", "use_kl_in_reward", "kl_coef", "group_adv_norm", "use_decoupled_loss", "forward", "train_batch", "eval_batch",
        "loss_weight_fn", "ModelInterface.inference", "forward_logprobs", "ModelInterface.generate", "ModelInterface.train_step",
        "ModelInterfaceAbstraction", "gamma", "lam", "clip_ratio", "register_adv_est", "adv_estimator=gigpo",
    ):  # fmt: skip
        assert name in theirs, f"{name} has no row"
    assert len(read_rows()) > 90 and all(read_code(ours) for _, ours in read_rows())


def test_links_lead_somewhere():
    page = PAGE.read_text()
    headings = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page):
        path, _, anchor = target.partition("#")
        assert (PAGE.parent / path).exists() if path else anchor in headings, target


def load_blocks() -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, namespace)
    return namespace


def draw_rollouts() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(6):
        n = int(torch.randint(3, 9, (1,), generator=generator))
        tokens = tuple(torch.randint(3, 64, (n,), generator=generator).tolist())
        log_probs = (0.0, *(-torch.rand(n - 1, generator=generator)).tolist())
        samples.append(
            Sample(tokens=tokens, loss_mask=(0.0, *(1.0,) * (n - 1)), rollout_log_probs=log_probs, index=i, group_index=i // 3,
                   reward=float(i % 2))
        )  # fmt: skip
    return collate_samples(samples)


def test_rewards_less_their_kl_are_compared_within_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    batch = draw_rollouts()
    batch = replace(batch, ref_log_probs=batch.rollout_log_probs * 0.5)
    algorithm = load_blocks()["grpo_with_kl_in_reward"]()
    kl = (batch.rollout_log_probs * 0.5 * batch.loss_mask).sum(1)
    expected = normalize_by_group(batch.rewards - 0.05 * kl, batch.group_ids)
    torch.testing.assert_close(algorithm.estimate(batch).advantages, expected[:, None] * batch.loss_mask)
    assert algorithm.requires == {"rollout_log_probs", "ref_log_probs"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_file.py").write_text(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0])
    assert resolve_algorithm("my_file.py:grpo_with_kl_in_reward", 8).requires == algorithm.requires


async def test_a_loss_without_a_gradient_is_the_one_that_is_trained_on_whatever_the_split():
    backend, batch = create_pytorch_backend(create_tiny_model(), lr=1e-3), draw_rollouts()
    loss, metrics = await load_blocks()["evaluate_batch"](backend, batch)
    weighted = replace(batch, loss_weights=token_mean(batch))
    trained = await backend.forward_backward(weighted, sft_loss).result()
    assert (float(loss), float(metrics["log_prob_mean"])) == pytest.approx((trained["loss"], trained["log_prob_mean"]), rel=1e-6)
    parts = split_microbatches(weighted, max_tokens=16)
    total = 0.0
    for part in parts:
        log_probs = await backend.forward(part, lambda outputs: outputs.log_probs).result()
        total += float(sft_loss(TokenOutputs(log_probs=log_probs), part).loss)
    assert len(parts) > 1 and total == pytest.approx(float(loss), rel=1e-6)
