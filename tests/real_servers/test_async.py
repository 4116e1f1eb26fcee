"""Asynchronous RL on a real server: its weights change under running requests, and every number is that of the version it names.

VLLM_PYTHON=path/to/venv/bin/python pytest -m vllm tests/real_servers/test_async.py, and the same with SGLANG_PYTHON and -m sglang.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.algorithms.presets import decoupled, grpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.futures import open_pipeline
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.segments import find_missed_tokens
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, InferenceEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.generation.single_turn import create_generate_fn
from rollouts.types import Group, Prompt, RolloutBatch, Sample, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from endless_models import create_endless_model
from resident_prompts import find_prompts

KINDS = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
pytestmark = [pytest.mark.timeout(700), pytest.mark.filterwarnings("ignore:.*ignores seeds")]

CLIENTS: dict[str, type[VLLMEngine] | type[SGLangEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
TOLERANCE = 1e-4  # nats, float32
NUM_STEPS = 5
NUM_PROMPTS = 7
BATCH_SIZE, N = 4, 4
MAX_STALENESS = 2
BUDGETS = (16, 60, 300, 480)  # tokens of an answer, by prompt: while the trainer works on the short ones, the long ones go on
SIZES = {"hidden_size": 64, "head_dim": 32}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Kind and url."""
    return request.param, request.getfixturevalue(f"{request.param}_server").url


class Announcing:
    """A backend that tells when it updates: answers that begin then are still under way when the weights change a moment later."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.updates = trio.Event()  # the next update
        self._trio = trio.lowlevel.current_trio_token()  # the pipeline updates in a thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def optim_step(self) -> Any:
        future = self._backend.optim_step()
        self._trio.run_sync_soon(self._announce)
        return future

    def _announce(self) -> None:
        self.updates.set()
        self.updates = trio.Event()


def create_rollout_config(engine: InferenceEngine, backend: Announcing, *, segment_wise: bool) -> RolloutConfig:
    tokenizer = create_char_tokenizer()
    by_budget = [create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=budget, temperature=0.9)) for budget in BUDGETS]

    async def generate(prompt: Prompt, n: int, partial: Group = ()) -> Group:
        if not partial and BUDGETS[prompt.index % len(BUDGETS)] == max(BUDGETS):
            with trio.move_on_after(100.0):  # the first step may be slow
                await backend.updates.wait()
        return await by_budget[prompt.index % len(BUDGETS)](prompt, n, partial=partial)

    async def reward(sample: Sample) -> float:
        return float(sum(sample.tokens) % 3)

    return RolloutConfig(
        batch_size=BATCH_SIZE, n_samples_per_prompt=N, generate_fn=generate, reward_fn=reward, segment_log_probs=segment_wise
    )


class Run:
    """A run of the loop, and what it saw: each batch with the version that it was trained at, and the trainer's weights of each."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, RolloutBatch]] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.history: list[dict[str, float]] = []
        self.state: dict[str, Any] = {}
        self.residents: tuple[Sample, ...] = ()

    async def train(self, engine: InferenceEngine, folder: Path, *, segment_wise: bool) -> None:
        model = create_endless_model(51, **SIZES)
        model.save_pretrained(folder / "initial")
        (folder / "initial" / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 0}))
        await engine.update_weights_from_checkpoint(folder / "initial")
        buffer = DataBuffer([f"{i} {i + 1} >" for i in range(NUM_PROMPTS)])
        asynchronous = AsyncConfig(
            enabled=True, max_staleness=MAX_STALENESS, enable_segment_wise_ppo=segment_wise, on_failure="raise", patience_s=300.0
        )
        training = RLTrainingConfig(
            num_steps=NUM_STEPS,
            algorithm=decoupled(grpo(), segment_wise=segment_wise),
            checkpoint_every=2,
            parity=ParityConfig(threshold=TOLERANCE, action="stop"),
            probe_tolerance=1e-3,
        )
        backend = Announcing(create_pytorch_backend(model, lr=2e-3))
        rollout = create_rollout_config(engine, backend, segment_wise=segment_wise)
        async with (
            open_pipeline(backend) as pipeline,
            create_workflow_executor(buffer, rollout, asynchronous, engines=[engine]) as executor,
        ):

            async def note(step: int, batch: RolloutBatch) -> None:  # before the update of this step
                self.batches.append((step - 1, batch))
                self.weights[step - 1] = dict(await pipeline.get_weights().result())

            self.history = await run_async_rl_training(
                pipeline, buffer, executor, [engine], training, checkpoint_dir=folder / "checkpoints", on_rollouts=note
            )
            self.state, self.residents = executor.state_dict(), executor.resident_samples

    @cache  # noqa: B019  it lives as long as its test
    def compute_log_probs(self, sampled: tuple[int, ...], temperature: float, version: int) -> list[float]:
        """Compute the log-probs of all tokens in one pass, with the trainer's weights of a version."""
        model = create_endless_model(51, **SIZES)
        model.load_state_dict(self.weights[version], strict=False)
        tokens = torch.tensor([sampled])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1] / temperature
        return [0.0, *gather_log_probs(logits, tokens[0, 1:]).tolist()]

    def log_probs_of(self, sample: Sample, version: int) -> list[float]:
        return self.compute_log_probs(sample.tokens, sample.temperature, version)

    def compare(self, sample: Sample) -> tuple[float, float]:
        """The largest difference of its log-probs from those under each token's own version, and of all from those under the next one."""
        own = later = 0.0
        for place, (version, found) in enumerate(zip(sample.weight_versions or (), sample.rollout_log_probs or (), strict=True)):
            if version >= 0:
                own = max(own, abs(found - self.log_probs_of(sample, version)[place]))
                if version + 1 in self.weights:
                    later = max(later, abs(found - self.log_probs_of(sample, version + 1)[place]))
        return own, later


@pytest.mark.parametrize("segment_wise", [False, True], ids=["continue", "segment_wise"])
async def test_a_run_trains_on_what_the_server_says(server: tuple[str, str], tmp_path: Path, segment_wise: bool):
    kind, url = server
    run, begin = Run(), trio.current_time()
    async with CLIENTS[kind](url) as engine:
        await run.train(engine, tmp_path, segment_wise=segment_wise)
        assert await engine.get_weight_version() == NUM_STEPS
    seconds = trio.current_time() - begin

    assert [line["weight_version"] for line in run.history] == list(range(NUM_STEPS))
    ages: Counter[int] = Counter()
    own = later = segments = 0.0
    num_mixed, trained = 0, []
    for current, batch in run.batches:
        trained += sorted({sample.group_index for sample in batch.samples})
        batch_ages: list[int] = []
        for sample in batch.samples:
            versions = sample.weight_versions or ()
            assert [version >= 0 for version in versions] == [mask > 0 for mask in sample.loss_mask], "a trained token has no version"
            sampled = [version for version in versions if version >= 0]
            assert sampled == sorted(sampled)
            num_mixed += len(set(sampled)) > 1
            batch_ages += [current - version for version in sampled]
            differences = run.compare(sample)
            own, later = max(own, differences[0]), max(later, differences[1])
            if segment_wise:
                assert find_missed_tokens(sample, current) == ()
                for place, version in enumerate(versions):
                    if 0 <= version < current:
                        assert (sample.segment_versions or ())[place] == version + 1
                        found = (sample.segment_log_probs or ())[place]
                        segments = max(segments, abs(found - run.log_probs_of(sample, version + 1)[place]))
        assert run.history[current]["staleness_max"] == max(batch_ages)
        ages.update(batch_ages)
    for sample in run.residents:  # and what waits, finished or not
        own = max(own, run.compare(sample)[0])
    num_retried = sum(line["num_groups_retried"] for line in run.history)
    print(
        f"{kind}: {seconds:.1f} s, {num_mixed} of {len(trained) * N} answers of several versions, ages {dict(sorted(ages.items()))}, "
        f"{len(run.residents)} samples wait, {num_retried:.0f} groups begun anew; largest difference {own:.2e}, from the next version's "
        f"{later:.2e}, of segments {segments:.2e}"
    )
    assert min(ages) >= 0
    assert 0 < max(ages) <= MAX_STALENESS
    assert num_mixed > 0, "no weights changed under a running request"
    assert own < TOLERANCE
    assert segments < TOLERANCE
    assert later > 100 * TOLERANCE, "the versions are too alike for this to show anything"

    assert len(trained) == len(set(trained)) == NUM_STEPS * BATCH_SIZE
    buffer = run.state["buffer"]
    taken = NUM_PROMPTS * buffer["epoch_id"] + buffer["sample_offset"]
    assert sorted(trained + find_prompts(run.state)) == list(range(taken)), "a prompt was lost, or is there twice"
    for name in ("num_groups_failed", "num_groups_given_up", "num_groups_cut"):
        assert sum(line[name] for line in run.history) == 0, name
