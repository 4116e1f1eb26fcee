"""Benchmark the overlap of generation and training: the default task on simulated accelerators, relative to the slower stage alone.

    python -m benchmarks.async_overlap [--steps 24] [--prompts 64] [--ratios 0.5 1.05 2] [--staleness 1 2] [--output FILE.json]

The embedded engine generates real tokens and the trainer makes real updates, but each token and each training step takes a set time on
trio's MockClock. Nothing else takes time, so any loss against 1 / max(t_generate, t_train) is the loop's. Ratios are t_generate / t_train;
the synchronous loop reaches 1 / (t_generate + t_train).
"""

from __future__ import annotations

import argparse
import copy
import math
from functools import partial
from typing import Any

import torch
import trio
import trio.testing

from benchmarks.measure import print_table, write_json
from integration.parts.models import create_model
from integration.settings.config import Config
from integration.tasks.task import Task, create_sort_task
from rollouts.algorithms.presets import decoupled, grpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.protocol import TrainingBackend
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.types import RolloutBatch, Sample, SamplingParams

SAMPLES_PER_PROMPT = 8
TRAIN_S = 1.0  # virtual seconds of a training step
WARM_UP = 2  # batches excluded from the measurement


class WorkClock:
    """A virtual clock that jumps to the next deadline when no task can run, except while a thread works."""

    def __init__(self) -> None:
        self.mock = trio.testing.MockClock(autojump_threshold=0)
        self._num_working = 0

    def hold(self) -> None:
        """Stop the clock until as many calls of let_go."""
        self._num_working += 1
        self.mock.autojump_threshold = math.inf

    def let_go(self) -> None:
        """End a hold()."""
        self._num_working -= 1
        if not self._num_working:
            self.mock.autojump_threshold = 0


class WorkLock:
    """A lock whose holder works in a thread: the clock stops while it is held."""

    def __init__(self, clock: WorkClock) -> None:
        self._lock, self._clock = trio.Lock(), clock

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._clock.hold()

    async def __aexit__(self, *error: object) -> None:
        self._clock.let_go()
        self._lock.release()


class TimedEngine(InProcessEngine):
    """The embedded engine with a set time per token."""

    def __init__(self, *args: Any, clock: WorkClock, seconds_per_token: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_tokens = 0
        self._clock, self._seconds_per_token = clock, seconds_per_token
        self._model_lock = WorkLock(clock)

    def _sample(self, requests, logits) -> None:
        self.num_tokens += len(requests)
        super()._sample(requests, logits)

    async def _run_step(self) -> bool:
        before = self.num_tokens
        finished = await super()._run_step()
        self._clock.let_go()
        try:
            await trio.sleep((self.num_tokens - before) * self._seconds_per_token)
        finally:
            self._clock.hold()
        return finished


class TimedFuture:
    """A result available from a moment of virtual time."""

    def __init__(self, value: Any, ready_at: float) -> None:
        self._value, self._ready_at = value, ready_at

    def done(self) -> bool:
        return trio.current_time() >= self._ready_at

    async def result(self) -> Any:
        await trio.sleep_until(self._ready_at)
        return self._value


class TimedBackend:
    """A backend with instant jobs, except updates, which take a set time."""

    def __init__(self, backend: TrainingBackend, seconds_per_update: float) -> None:
        self._free_at = 0.0
        self.forward = partial(self._run, backend.forward, 0.0)
        self.forward_backward = partial(self._run, backend.forward_backward, 0.0)
        self.optim_step = partial(self._run, backend.optim_step, seconds_per_update)
        self.get_weights = partial(self._run, backend.get_weights, 0.0)
        self.load_weights = partial(self._run, backend.load_weights, 0.0)

    def _run(self, job: Any, seconds: float, *args: Any, **settings: Any) -> TimedFuture:
        value = job(*args, **settings).value
        self._free_at = max(self._free_at, trio.current_time()) + seconds
        return TimedFuture(value, self._free_at)


async def run_loop(clock: WorkClock, arguments: argparse.Namespace, ratio: float, staleness: int | None) -> dict[str, float]:
    """Run a loop. staleness: None = the synchronous loop. Returns batches per virtual second, and the bound."""
    config = Config()
    model, tokenizer = create_model(config)
    task: Task = create_sort_task(tokenizer)
    num_tokens = arguments.prompts * SAMPLES_PER_PROMPT * task.max_tokens
    engine = TimedEngine(
        copy.deepcopy(model), tokenizer, max_slots=config.engine.max_slots, clock=clock, seconds_per_token=ratio * TRAIN_S / num_tokens
    )
    backend = TimedBackend(create_pytorch_backend(model, lr=1e-4), TRAIN_S)
    times: list[float] = []
    tokens: list[int] = []

    def note(step: int, rollouts: RolloutBatch) -> None:
        times.append(trio.current_time())
        tokens.append(sum(rollouts.response_lengths))

    async def reward(sample: Sample) -> float:  # async: a thread would take time
        return float(task.reward_fn(sample))

    buffer = DataBuffer(task.train_prompts)
    rollout = RolloutConfig(
        batch_size=arguments.prompts,
        n_samples_per_prompt=SAMPLES_PER_PROMPT,
        generate_fn=create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=task.max_tokens)),
        reward_fn=reward,
    )
    algorithm = grpo() if staleness is None else decoupled(grpo())
    training = RLTrainingConfig(num_steps=arguments.steps, algorithm=algorithm, weight_sync="memory")
    observe: dict[str, Any] = {"on_rollouts": note, "clock": trio.current_time}
    async with engine:
        if staleness is None:
            async with AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:
                await run_rl_training(backend, buffer, manager, [engine], training, **observe)
        else:
            asynchronous = AsyncConfig(enabled=True, max_staleness=staleness)
            async with create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor:
                await run_async_rl_training(backend, buffer, executor, [engine], training, **observe)
    mean_tokens = sum(tokens[WARM_UP:]) / len(tokens[WARM_UP:])
    generate_s = mean_tokens * ratio * TRAIN_S / num_tokens
    rate = (len(times) - 1 - WARM_UP) / (times[-1] - times[WARM_UP])
    bound = 1 / max(generate_s, TRAIN_S)
    return {"t_generate": generate_s, "t_train": TRAIN_S, "batches_per_s": rate, "bound": bound, "of_the_bound": rate / bound}


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.05, 2.0])
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    for ratio in arguments.ratios:
        for staleness in (None, *arguments.staleness):
            name = f"{ratio:g}: " + ("synchronous" if staleness is None else f"max_staleness {staleness}")
            clock = WorkClock()
            table[name] = trio.run(run_loop, clock, arguments, ratio, staleness, clock=clock.mock)
            print(f"{name}: {table[name]['of_the_bound']:.3f} of the bound", flush=True)
    print_table("virtual time, t_generate / t_train", table)
    write_json(arguments.output, {"steps": arguments.steps, "prompts": arguments.prompts, "table": table})


if __name__ == "__main__":
    main()
