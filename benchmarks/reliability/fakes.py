"""Runs of the loops with a fake engine and a fake backend, in which a second is one of trio's clock and a day takes moments."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import trio

from rollouts.algorithms.preference_objectives import dpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import WorkflowExecutor, create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import (
    PreferenceTrainingConfig,
    RewardConfig,
    RewardModelTrainingConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts.data.preference_pairs import PreferencePair
from rollouts.data.prompts import DataBuffer
from rollouts.engines.protocol import InferenceEngine
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.preference_loop import PreferenceParts, train_preferences
from rollouts.reward_model_loop import train_reward_model
from rollouts.rl_loop import run_rl_training
from rollouts.seeds import derive_seed
from rollouts.sft_loop import run_sft_training
from rollouts.testing import FakeBackend, FakeEngine, random_answer
from rollouts.training.metrics import CompositeLogger, JSONLLogger, MetricsLogger, read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint, list_checkpoints, load_run_state
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.types import RolloutBatch, Sample, SamplingParams

Loop: TypeAlias = Literal["sft", "dpo", "reward_model", "rl", "async"]
STALENESS = 2


async def random_reward(sample: Sample) -> float:
    """Return 0 or 1, a pure function of the tokens; async, as virtual time would go on beside a thread."""
    return float(derive_seed(*sample.tokens) % 2)


@dataclass(kw_only=True)
class FakeRun:
    """A run of a loop in a directory: begun, or continued from its newest checkpoint. Seconds are those of trio's clock."""

    loop: Loop
    folder: Path
    config: RLTrainingConfig
    asynchronous: AsyncConfig = field(default_factory=lambda: AsyncConfig(enabled=True, max_staleness=STALENESS, patience_s=1000.0))
    batch_size: int = 4
    seconds_per_token: float = 1.0
    seconds_per_job: float = 3.0
    engines: Sequence[InferenceEngine] = ()  # opened by the caller; none = one fake engine
    create_backend: Callable[..., FakeBackend] = FakeBackend
    reward: Callable[[Sample], Any] = random_reward
    reward_timeout_s: float = 30.0
    keep: int = 2
    cuts_log: bool = True  # False = a naive resume, which appends to the metrics of steps that it trains again
    keeps_pending: bool = True  # False = a naive resume, which has the place in the data and forgets the prompts under way
    logger: MetricsLogger | None = None  # beside the file
    calls: MutableSequence[Any] = field(default_factory=lambda: deque[Any](maxlen=10))
    num_prompts: int = 500  # data set; the run begins again at its end
    batches: deque[tuple[int, RolloutBatch]] = field(default_factory=lambda: deque(maxlen=100_000))
    executor: WorkflowExecutor | None = None

    @property
    def log(self) -> Path:
        """metrics.jsonl."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.folder / "checkpoints"

    async def go_on(self, **options: Any) -> None:
        """Run to the end, from the newest checkpoint if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        newest = latest_checkpoint(self.checkpoints) if list_checkpoints(self.checkpoints) else None
        size = 0 if newest is None else load_run_state(newest)["metrics_bytes"]
        if self.log.exists() and self.cuts_log:
            with self.log.open("r+b") as file:
                file.truncate(size)
        shared = {"checkpoint_dir": self.checkpoints, "keep_last_n": self.keep, "clock": trio.current_time, **options}
        backend = self.create_backend(seconds_per_job=self.seconds_per_job, calls=self.calls)
        logger = CompositeLogger([JSONLLogger(self.log), *([] if self.logger is None else [self.logger])])
        if self.loop in ("sft", "dpo", "reward_model"):
            return await self._run_rows(backend, logger, newest, shared)
        return await self._run_rl(backend, logger, newest, shared)

    async def _run_rows(self, backend: FakeBackend, logger: MetricsLogger, newest: Path | None, options: dict[str, Any]) -> None:
        sample = Sample(prompt="a", tokens=(5, 6, 7), loss_mask=(0.0, 1.0, 1.0), response="b")
        start = 0
        if newest is not None:
            await backend.load_checkpoint(newest).result()
            start = int(newest.name.removeprefix("step_"))
        schedule: dict[str, Any] = {name: getattr(self.config, name) for name in ("num_steps", "history_steps", "checkpoint_every")}
        if self.loop == "sft":
            config = SFTTrainingConfig(batch_size=2, **schedule)
            await run_sft_training(backend, [sample] * 4, config, logger, start_step=start, **options)
            return
        pair = PreferencePair(sample, replace(sample, tokens=(5, 8, 9)), ref_log_probs=(-1.0, -1.0))
        if self.loop == "reward_model":
            scored = RewardModelTrainingConfig(batch_size=2, **schedule)
            await train_reward_model(backend, [pair] * 4, scored, logger, start_step=start, **options)
            return
        parts = PreferenceParts(backend=backend, metrics_logger=logger, **options)
        await train_preferences(parts, [pair] * 4, dpo(), PreferenceTrainingConfig(batch_size=2, **schedule), start_step=start)

    async def _run_rl(self, backend: FakeBackend, logger: MetricsLogger, newest: Path | None, options: dict[str, Any]) -> None:
        engines = self.engines or (FakeEngine(random_answer(mean_length=8), seconds_per_token=self.seconds_per_token, calls=self.calls),)
        buffer = DataBuffer([f"s{i}=" for i in range(self.num_prompts)])
        generate = create_generate_fn(engines, create_char_tokenizer(), SamplingParams(max_tokens=12))
        rollout = RolloutConfig(
            batch_size=self.batch_size, n_samples_per_prompt=2, generate_fn=generate, reward_fn=self.reward,
            reward=RewardConfig(timeout_s=self.reward_timeout_s),
        )  # fmt: skip

        def watch(step: int, batch: RolloutBatch) -> None:
            self.batches.append((step, batch))

        if self.loop == "rl":
            source: Any = AsyncRolloutManager(buffer, rollout, engines=engines)
        else:
            source = self.executor = create_workflow_executor(
                buffer, rollout, self.asynchronous, engines=engines, batches_per_version=self.config.sync_every
            )
        point = None if newest is None else await restore_rl_run(newest, backend, source, engines, self.config)
        if point is not None and not self.keeps_pending:
            state = source.state_dict()
            source.load_state_dict(state | {"pending": [], "begun": [], "finished": {"ready": [], "held": []}})
        train: Any = run_rl_training if self.loop == "rl" else run_async_rl_training
        async with source:
            await train(backend, buffer, source, engines, self.config, logger, resume=point, on_rollouts=watch, **options)

    def lines(self) -> list[str]:
        """Return the lines of metrics without what ends in _s."""
        told = [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(self.log)]
        return [json.dumps(line, sort_keys=True) for line in told]


def trained(runs: Sequence[FakeRun]) -> dict[int, list[int]]:
    """Return the prompts of each step, where a step that was trained again replaces the earlier one."""
    steps: dict[int, list[int]] = {}
    for run in runs:
        for step, batch in run.batches:
            steps[step] = sorted({sample.group_index for sample in batch.samples})
    return steps


def find_prompts(state: Any) -> list[int]:
    """Return the indices of all prompts in a JSON value, sorted; one that stands there twice is there twice."""
    if isinstance(state, dict):
        if {"content", "index", "metadata"} <= set(state):
            return [state["index"]]
        return sorted(index for value in state.values() for index in find_prompts(value))
    return sorted(index for value in state for index in find_prompts(value)) if isinstance(state, list) else []


IN_MEMORY = RLTrainingConfig(num_steps=5, weight_sync="memory", checkpoint_every=1)


def in_memory(num_steps: int, **changes: Any) -> RLTrainingConfig:
    """Return the configuration of a run that syncs in memory and saves each step."""
    return replace(IN_MEMORY, num_steps=num_steps, **changes)
