"""Small runs of the stages, on the processes of a group or on one: what the tests of several processes compare."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio
from transformers.utils import logging

from integration.run.stages import RunControl, run_rl, run_sft
from integration.settings.config import Config
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.generation import RewardSection
from integration.settings.sections.model import CriticSection, LoRASection, ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.settings.sections.teacher import TeacherSection
from rollouts.asynchronous.config import AsyncConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import CheckpointConfig, OptimizerConfig
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics

ALGORITHMS = {
    "grpo": "grpo(kl_coef=0.05)",
    "ppo": "ppo(kl_coef=0.05)",
    "decoupled": "decoupled(ppo)",
    "lora": "grpo(kl_coef=0.05)",
    "gkd": "gkd(beta=0.3, reward_coef=0.5)",
    "online_dpo": "online_dpo(beta=0.5)",
}
CASES = ("sft", *ALGORITHMS)


def make_config(case: str, directory: Path, *, kind: str, num_steps: int) -> Config:
    """Settings of a case. Nine ragged rows in two mini-batches: no number of processes gets equal parts."""
    model = ModelSection(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1)
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, max_grad_norm=0.5)
    rl = RLSection(
        num_steps=num_steps,
        prompts_per_step=3,
        samples_per_prompt=3,
        num_minibatches=1,
        num_epochs=2,
        algorithm=ALGORITHMS.get(case, "grpo"),
        asynchronous=AsyncConfig(enabled=True, max_staleness=0) if case == "decoupled" else AsyncConfig(),
        eval_every=0,
        max_tokens_per_microbatch=60,
        skip_redundant=False,  # micro-batches that depend on the number of processes round shared prompts differently
        optimizer=optimizer,
    )
    reward = directory / "reward.py"
    reward.write_text("def count(sample):\n    return float(sum(sample.tokens) % 5)\n")
    config = Config(
        reward=RewardSection(function=f"{reward}:count"),
        model=model,
        sft=SFTSection(num_steps=num_steps, batch_size=7, eval_every=0, max_tokens_per_microbatch=60, optimizer=optimizer),
        rl=rl,
        backend=BackendSection(kind=kind),
        checkpoint=CheckpointConfig(sft_every=0, rl_every=0),
        evaluation=EvaluationSection(num_prompts=4, sampled=False),
        lora=LoRASection(rank=2) if case == "lora" else LoRASection(),
    )
    if case == "gkd":
        teacher = directory / "teacher"
        create_tiny_model(hidden_size=16, num_layers=1, seed=3).save_pretrained(teacher)
        create_char_tokenizer(config.model.vocab_size).save_pretrained(teacher)
        return replace(config, teacher=TeacherSection(path=str(teacher), top_k=5))
    return replace(config, critic=CriticSection(optimizer=optimizer)) if "ppo" in rl.algorithm else config


class StopAfter:
    """Asks a run to stop after so many steps of this process."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def __call__(self) -> bool:
        """Return whether that was the last."""
        self.left -= 1
        return self.left == 0


def run_case(case: str, directory: Path, group=None, *, num_steps: int, stop_after: int = 0) -> list[dict]:
    """Run a stage, or go on with it, in a directory. Returns the lines of metrics that this call wrote, without timings.

    Args:
        group: None = one process without one.
        stop_after: steps; 0 = go on to the end.
    """
    directory.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    metrics = directory / f"metrics_{len(list(directory.glob('metrics_*')))}.jsonl"
    config = make_config(case, directory, kind="pytorch" if group is None else "fsdp", num_steps=num_steps)
    control = RunControl(logger=JSONLLogger(metrics), should_stop=StopAfter(stop_after), group=group)
    if case == "sft":
        trio.run(partial(run_sft, config, directory, control))
    else:
        trio.run(partial(run_rl, config, directory, None, control))
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(metrics)]


def write_result(path: str, value: object) -> None:
    """Write a result for the test to read."""
    Path(path).write_text(json.dumps(value))
