"""Runs whose policy trains adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_stages import run, start, values  # noqa: F401 - start is a fixture

from integration.parts import models
from integration.run.stages import RunControl, run_rl, run_sft
from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.model import LoRASection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.tasks.task import create_sort_task
from rollouts.backends.lora.files import ADAPTER_DIRECTORY, fingerprint_base, read_fingerprint
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError
from rollouts.models.loading import load_hf_model
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint


async def test_an_interrupted_run_goes_on_and_its_own_base_is_the_reference(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setattr(models, "create_reference_backend", lambda *_, **__: pytest.fail("a second model was made"))
    config = start("grpo(kl_coef=0.5)", lora=LoRASection(rank=4))
    whole = await run(config, tmp_path / "whole")
    await run(config, tmp_path / "parts", stop_after=2)
    assert values(await run(config, tmp_path / "parts")) == values(whole)
    assert [line["step"] for line in whole] == [1, 2, 3, 4]
    assert whole[0]["reference_kl"] == pytest.approx(0, abs=1e-6)  # the policy begins as the reference is, and moves away
    assert abs(whole[-1]["reference_kl"]) > 1e-5
    checkpoint = latest_checkpoint(tmp_path / "whole" / "rl" / "checkpoints")
    assert checkpoint is not None and (checkpoint / ADAPTER_DIRECTORY / "adapter_model.safetensors").exists()


async def test_after_sft_with_adapters_the_base_and_reference_of_rl_is_the_merged_model(start, tmp_path: Path):  # noqa: F811
    config = start("grpo(kl_coef=0.5)", lora=LoRASection(rank=4), rl={"num_steps": 2}, sft=SFTSection(num_steps=3, batch_size=4))
    task = create_sort_task(num_train=64, num_heldout=4)
    merged = await run_sft(config, tmp_path / "sft", task=task)
    assert merged is not None
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    last = await run_rl(config, tmp_path / "rl", merged, RunControl(logger=logger), task=task)
    assert last is not None
    found = read_fingerprint(last / ADAPTER_DIRECTORY)
    assert found == fingerprint_base(load_hf_model(merged)) != read_fingerprint(merged / ADAPTER_DIRECTORY)
    first = next(line for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"] == 1)
    assert first["reference_kl"] == pytest.approx(0, abs=1e-6)


def test_a_setting_of_adapters_that_are_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"lora\.dropout is 0\.1, but lora\.rank is 0"):
        LoRASection(dropout=0.1)
    lora = LoRASection(rank=8, target_modules=("q_proj",)).create(3)
    assert lora is not None and (lora.rank, lora.target_modules, lora.seed) == (8, ("q_proj",), 3)
    assert LoRASection().create(3) is None


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_adapters_on_a_model_that_knows_both_directions_learn_which_one_is_wanted(tmp_path: Path):
    config = Config(
        evaluation=EvaluationSection(num_prompts=128, sampled=False),
        sft=SFTSection(num_steps=120, eval_every=0),
        rl=RLSection(num_steps=5, eval_every=5, optimizer=OptimizerConfig(lr=2e-3)),
    )
    source = await run_sft(config, tmp_path / "sft")
    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    evaluation = replace(config, rl=replace(config.rl, num_steps=1, optimizer=OptimizerConfig(lr=0.0)))
    await run_rl(evaluation, tmp_path / "before", source, RunControl(logger=logger))
    await run_rl(replace(config, lora=LoRASection(rank=8)), tmp_path / "rl", source, RunControl(logger=logger))
    before, *_, after = [line["eval_accuracy"] for line in read_metrics(tmp_path / "metrics.jsonl") if "eval_accuracy" in line]
    assert after > before + 0.2
