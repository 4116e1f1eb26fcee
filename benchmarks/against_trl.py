"""Benchmark the processor seconds of RL to a held-out accuracy, against TRL's GRPOTrainer from the same weights.

    TRL_PYTHON=~/envs/trl/bin/python python -m benchmarks.time_to_accuracy --against trl [--task sort] [--seeds 0 1 2] [--threshold 0.96]

TRL_PYTHON names the Python of an environment with TRL and what this project needs: `pip install -e . trl` there. Each seed has one SFT run,
and then both contenders in turn, each in a process of its own with one thread. Both have the model after SFT, prompts in one order, reward,
group size, batch, response length, loss, minibatches, optimizer and learning rates of the task's own job (`python -m integration.train
--task TASK`), and stop at the first step whose greedy accuracy is at the threshold. Both are evaluated after each step by `Evaluation` of
the job; processor seconds of evaluations, SFT and start-up count for neither.

What differs: the random numbers of sampling and of the division of rows among minibatches, each side's own; TRL computes the log-probs of
its samples again before the first update, where the job takes those that its engine sampled with; the job writes its checkpoints,
trajectories and ledger, and TRL writes nothing.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks.measure import print_table
from integration.parts.engines import create_embedded_engine
from integration.parts.model_settings import create_tokenizer
from integration.run.job import favor_computation
from integration.run.stages import Evaluation, RunControl, create_task, run_rl
from integration.settings.config import Config
from integration.settings.made.library import count_rl_updates
from integration.settings.sections.stages import RLSection
from integration.tasks.task import Task
from rollouts.backends.optim.optimizers import create_rule
from rollouts.config_files import load_config, save_config
from rollouts.data.prompts import DataBuffer
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.types import Prompt, Sample, Status

STAGES = ("generate_s", "train_s", "checkpoint_s", "sync_s")


@dataclass
class Race:
    """Steps, processor seconds and accuracy of a contender, which stops at the threshold. A logger of metrics for this project's loop."""

    threshold: float
    seconds: float = 0.0
    steps: int = 0
    accuracy: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Count one step, in processor seconds, and the accuracy after it; ignore the step that the loop makes past the end."""
        if self.is_over():
            return
        self.steps, self.accuracy = step, metrics["eval_accuracy"]
        self.seconds += metrics.get("step_s", 0.0)
        for name in STAGES:
            self.stages[name] += metrics.get(name, 0.0)

    def finish(self) -> None:
        """Do nothing; a logger has this method."""

    def is_over(self) -> bool:
        """Say whether the threshold is reached."""
        return self.steps > 0 and self.accuracy >= self.threshold

    def result(self) -> dict[str, float]:
        """Return the row of a table; cpu_s is NaN if the threshold was not reached."""
        seconds = self.seconds if self.is_over() else float("nan")
        return {"steps": self.steps, "accuracy": self.accuracy, "cpu_s": seconds, "cpu_s_per_step": self.seconds / max(1, self.steps)}


def compare_with_trl(options: Sequence[str], seeds: Sequence[int], threshold: float) -> dict[str, Any]:
    """Run both contenders for each seed and print their steps and processor seconds. Returns the rows and their summary.

    Args:
        options: of integration.train, for both stages.
    """
    python = os.environ.get("TRL_PYTHON")
    if python is None:
        sys.exit("TRL_PYTHON is not set: name the Python of an environment with TRL (pip install -e . trl)")
    rows: dict[str, dict[str, float]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            sft = Path(directory) / "sft"
            where = ["--seed", str(seed), "--output-dir", str(sft), "--num-threads", "1", "--quiet"]
            _run(sys.executable, "integration.train", "--mode", "sft", *options, *where)
            save_config(create_race_config(sft), sft / "race.json")
            for name, interpreter in (("rollouts", sys.executable), ("TRL", python)):
                line = _run(interpreter, "benchmarks.against_trl", name, str(sft / "race.json"), str(threshold)).splitlines()[-1]
                rows[f"seed {seed}, {name}"] = json.loads(line)
        print_table(f"processor seconds of RL to {threshold}", rows)
    summary = summarize(rows, seeds)
    print_table("both reached it", {"of all seeds": summary})
    return {"table": rows, "summary": summary}


def summarize(rows: Mapping[str, Mapping[str, float]], seeds: Sequence[int]) -> dict[str, float]:
    """Return medians of processor seconds and of their ratio over the seeds for which both contenders reached the threshold."""
    pairs = [(rows[f"seed {seed}, rollouts"]["cpu_s"], rows[f"seed {seed}, TRL"]["cpu_s"]) for seed in seeds]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    if not pairs:
        return {"seeds": 0}
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "seeds": len(pairs),
        "rollouts_cpu_s": statistics.median(ours for ours, _ in pairs),
        "TRL_cpu_s": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def _run(python: str, module: str, *arguments: str) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    return subprocess.run([python, "-m", module, *arguments], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


async def race_rollouts(config: Config, race: Race, directory: Path) -> None:
    """Run the RL stage of the job: generation, training, checkpoints, trajectories and weight syncs as configured."""
    task = create_task(config, create_tokenizer(config), "rl")
    with favor_computation():
        await run_rl(config, directory, control=RunControl(logger=race, should_stop=race.is_over, clock=time.process_time), task=task)


def race_trl(config: Config, race: Race, directory: Path) -> None:
    """Run GRPOTrainer with the settings of the configuration."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    assert config.model.path is not None
    tokenizer, model = create_tokenizer(config), AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    task, rl = create_task(config, tokenizer, "rl"), config.rl
    reward_fn = task.reward_fn
    assert reward_fn is not None
    prompts = DataBuffer(task.train_prompts, seed=config.seed).get_prompts(rl.prompts_per_step * rl.num_steps)
    evaluation = Evaluation(create_embedded_engine(config, model, tokenizer), tokenizer, task, config, directory / "examples.jsonl")
    rows = {"prompt": [prompt.content for prompt in prompts], "number": list(range(len(prompts)))}

    def judge(completion_ids: Sequence[Sequence[int]], number: Sequence[int], **_: Any) -> list[float]:
        return [float(reward_fn(read_response(prompts[n], ids, tokenizer))) for ids, n in zip(completion_ids, number, strict=True)]

    class Measure(TrainerCallback):
        """Evaluates after each step, and takes the processor seconds of evaluations out."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % rl.num_minibatches == 0:
                seconds = time.process_time() - self.started
                metrics = trio.run(evaluate_weights, evaluation, model)
                race.log(metrics | {"step_s": seconds}, state.global_step // rl.num_minibatches)
                control.should_training_stop = race.is_over()
                self.started = time.process_time()

    rule = create_rule(**vars(rl.optimizer), total_steps=count_rl_updates(config))
    adam = rule.create_optimizer(model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=judge,
        args=GRPOConfig(output_dir=str(directory), **translate_settings(config, task)),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[Measure()],
        optimizers=(adam, rule.create_scheduler(adam)),
    )
    trainer.train()


async def evaluate_weights(evaluation: Evaluation, model: torch.nn.Module) -> dict[str, float]:
    """Measure the accuracy of a model by the evaluation of the job."""
    await evaluation.engine.update_weights({name: value.detach() for name, value in model.state_dict().items()}, 0)
    return await evaluation.measure()


def read_response(prompt: Prompt, token_ids: Sequence[int], tokenizer: Any) -> Sample:
    """Return the sample of a response whose end-of-text token, if any, is its last token."""
    has_end = len(token_ids) > 0 and token_ids[-1] == tokenizer.eos_token_id
    return Sample(
        prompt=prompt.content,
        tokens=tuple(token_ids),
        loss_mask=(1.0,) * len(token_ids),
        response=tokenizer.decode(token_ids[:-1] if has_end else token_ids),
        metadata=prompt.metadata,
        status=Status.COMPLETED if has_end else Status.TRUNCATED,
    )


def translate_settings(config: Config, task: Task) -> dict[str, Any]:
    """Return the arguments of GRPOConfig that mean what the settings of the RL stage mean. Its algorithm is GRPO as the default."""
    rl = config.rl
    assert rl.algorithm == RLSection.algorithm, f"rl.algorithm is {rl.algorithm!r}, and only {RLSection.algorithm!r} is translated"
    return {
        "use_cpu": True, "bf16": False, "seed": config.seed, "gradient_checkpointing": False,
        "per_device_train_batch_size": rl.prompts_per_step * rl.samples_per_prompt // rl.num_minibatches,
        "gradient_accumulation_steps": 1, "steps_per_generation": rl.num_minibatches, "num_iterations": rl.num_epochs,
        "num_generations": rl.samples_per_prompt, "max_completion_length": task.max_tokens, "max_steps": count_rl_updates(config),
        "temperature": config.generation.temperature, "top_k": 0, "top_p": 1.0,
        "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2, "loss_type": "grpo", "scale_rewards": "group",
        "max_grad_norm": rl.optimizer.max_grad_norm, "shuffle_dataset": False,
        "logging_steps": rl.num_minibatches, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def create_race_config(sft: Path) -> Config:
    """Return the settings of an SFT run for RL from its last checkpoint, with a greedy evaluation after each step."""
    config, checkpoint = load_config(Config, sft / "config.json"), latest_checkpoint(sft / "sft" / "checkpoints")
    return replace(
        config,
        model=replace(config.model, path=str(checkpoint)),
        rl=replace(config.rl, eval_every=1, log_every=1),
        evaluation=replace(config.evaluation, sampled=False),
    )


def main() -> None:
    """Run one contender in this process: NAME CONFIG.json THRESHOLD. Prints the result as JSON."""
    name, path, threshold = sys.argv[1:]
    torch.set_num_threads(1)
    config, race = load_config(Config, Path(path)), Race(float(threshold))
    with tempfile.TemporaryDirectory() as directory:
        if name == "TRL":
            race_trl(config, race, Path(directory))
        else:
            trio.run(race_rollouts, config, race, Path(directory))
    print(json.dumps(race.result()))


if __name__ == "__main__":
    main()
