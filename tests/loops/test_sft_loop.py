from __future__ import annotations

import math
import random
from itertools import count
from pathlib import Path

import pytest
import torch
import trio
from samples import make_row

from rollouts.backends.futures import ImmediateTrainFuture
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.config import SFTTrainingConfig
from rollouts.errors import ConfigError, DataError
from rollouts.sft_loop import evaluate_sft, perplexity, run_sft_training, select_sft_rows
from rollouts.testing import FakeBackend
from rollouts.testing.models import create_tiny_model
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import Sample


def make_ragged(num: int) -> list[Sample]:
    """Ragged rows whose first token is their index."""
    return [make_row((i, *range(2, 3 + i % 4)), index=i) for i in range(num)]


def method_names(backend: FakeBackend) -> list[str]:
    return [call.method for call in backend.calls]


class RecordingLogger:
    def __init__(self, calls: list[str]) -> None:
        self.lines: list[tuple[int, dict[str, object]]] = []
        self._calls = calls

    def log(self, metrics, step):
        self._calls.append("log")
        self.lines.append((step, dict(metrics)))

    def finish(self):
        pass


def test_rows_of_a_step_are_a_pure_function_of_the_step_and_cover_each_epoch_once():
    samples = make_ragged(10)
    one_epoch = [s.index for step in range(5) for s in select_sft_rows(samples, step, 2, seed=3)]
    assert sorted(one_epoch) == list(range(10))
    assert select_sft_rows(samples, 4, 2, seed=3) == select_sft_rows(samples, 4, 2, seed=3)
    assert select_sft_rows(samples, 0, 10, seed=3) != select_sft_rows(samples, 0, 10, seed=4)
    assert [s.index for s in samples] == list(range(10))


async def test_a_step_collates_trains_updates_logs_and_checkpoints_in_this_order(tmp_path: Path):
    calls: list[str] = []
    backend = FakeBackend()
    logger = RecordingLogger(calls)
    config = SFTTrainingConfig(num_steps=2, batch_size=4, checkpoint_every=1)
    history = await run_sft_training(backend, make_ragged(8), config, logger, checkpoint_dir=tmp_path)
    assert method_names(backend) == ["forward_backward", "optim_step", "save_checkpoint"] * 2
    assert [step for step, _ in logger.lines] == [1, 2]
    assert [line for _, line in logger.lines] == history
    assert {"loss", "num_tokens", "grad_norm", "lr", "step_s"} <= set(history[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0001", "step_0002"]


class SkippingBackend(FakeBackend):
    """Skips every update from the third on but the fifth."""

    def optim_step(self):
        skips = self.num_updates >= 2 and self.num_updates != 4
        super().optim_step()
        return ImmediateTrainFuture({"grad_norm": 1.0, "lr": 0.1, "update_skipped": float(skips)}, "optim_step")


async def test_while_updates_are_skipped_no_checkpoint_is_written_and_none_is_deleted(tmp_path: Path):
    config = SFTTrainingConfig(num_steps=8, batch_size=4, checkpoint_every=1)
    await run_sft_training(SkippingBackend(), make_ragged(8), config, checkpoint_dir=tmp_path, keep_last_n=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_0002", "step_0005", "step_0008"]  # 8 is the last, though skipped


async def test_metrics_are_optional_and_runs_with_the_same_arguments_agree():
    config = SFTTrainingConfig(num_steps=3, batch_size=4)
    runs = [await run_sft_training(FakeBackend(), make_ragged(8), config, clock=lambda c=count(): float(next(c))) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("log_every", [1, 2, 3])
async def test_log_every_counts_finished_steps_and_always_logs_the_last(log_every: int):
    logger = RecordingLogger([])
    await run_sft_training(FakeBackend(), make_ragged(8), SFTTrainingConfig(num_steps=5, batch_size=2, log_every=log_every), logger)
    assert [step for step, _ in logger.lines] == sorted({s for s in range(1, 6) if s % log_every == 0} | {5})


async def test_a_batch_over_the_token_limit_is_split_and_trains_every_row_once():
    backend = FakeBackend()
    config = SFTTrainingConfig(num_steps=1, batch_size=8, max_tokens_per_microbatch=10)
    history = await run_sft_training(backend, make_ragged(8), config)
    rows = [call.arguments["rows"] for call in backend.calls if call.method == "forward_backward"]
    assert len(rows) > 1
    assert sum(rows) == 8
    assert history[0]["num_tokens"] == sum(sum(m > 0 for m in s.loss_mask) for s in make_ragged(8))


async def test_a_resumed_run_continues_with_the_rows_of_its_step():
    config = SFTTrainingConfig(num_steps=6, batch_size=3)
    straight = await run_sft_training(FakeBackend(), make_ragged(7), config, clock=lambda: 0.0)
    backend = FakeBackend()
    first = await run_sft_training(backend, make_ragged(7), SFTTrainingConfig(num_steps=4, batch_size=3), clock=lambda: 0.0)
    rest = await run_sft_training(backend, make_ragged(7), config, start_step=4, clock=lambda: 0.0)
    assert first + rest == straight


async def test_evaluation_joins_the_line_of_its_step():
    calls = 0

    async def evaluate() -> dict[str, float]:
        nonlocal calls
        calls += 1
        return {"eval_accuracy": calls / 10}

    config = SFTTrainingConfig(num_steps=5, batch_size=2, eval_every=2)
    history = await run_sft_training(FakeBackend(), make_ragged(8), config, evaluate=evaluate)
    assert [m.get("eval_accuracy") for m in history] == [None, 0.1, None, 0.2, 0.3]


async def test_a_stop_request_ends_the_run_with_a_checkpoint_of_the_finished_step(tmp_path: Path):
    asked = iter([False, True])
    config = SFTTrainingConfig(num_steps=100, batch_size=2)
    history = await run_sft_training(FakeBackend(), make_ragged(8), config, checkpoint_dir=tmp_path, should_stop=lambda: next(asked))
    assert len(history) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step_0002"]


@pytest.mark.parametrize("eval_every", [2, 0])
async def test_an_evaluation_that_is_given_up_is_made_by_the_resumed_run(tmp_path: Path, eval_every: int):
    config, told, abandonment = SFTTrainingConfig(num_steps=4, batch_size=3, eval_every=eval_every), [], Abandonment()

    async def evaluate() -> dict[str, float]:
        await trio.lowlevel.checkpoint()
        return {"eval_accuracy": 0.5}

    async def train(backend: FakeBackend, name: str, **options) -> None:
        best = BestCheckpoint("eval_accuracy")
        logger, directory = JSONLLogger(tmp_path / name), tmp_path / "checkpoints"
        fixed = {"evaluate": evaluate, "checkpoint_dir": directory, "clock": lambda: 0.0, "best": best}
        await run_sft_training(backend, make_ragged(7), config, logger, **fixed, **options)

    await train(FakeBackend(), "straight.jsonl")
    abandonment.request(told.append)
    backend, last = FakeBackend(), eval_every or 4
    await train(backend, "resumed.jsonl", abandonment=abandonment)
    assert told == [f"the evaluation of step {last}"]
    state = read_run_state(tmp_path / f"checkpoints/step_{last:04d}")
    assert len(read_metrics(tmp_path / "resumed.jsonl")) == last - 1
    await train(backend, "resumed.jsonl", start_step=state.step, unfinished=state.metrics)
    assert read_metrics(tmp_path / "resumed.jsonl") == read_metrics(tmp_path / "straight.jsonl")


async def test_a_stop_request_is_true_or_false():
    async def later() -> bool:
        return False

    for asked, found in ((later, "<coroutine .*it is async"), (lambda: 0, r"0 \(int\)")):
        with pytest.raises(ConfigError, match=f"should_stop returned {found}"):
            await run_sft_training(FakeBackend(), make_ragged(8), SFTTrainingConfig(num_steps=2, batch_size=2), should_stop=asked)


async def test_no_samples_is_an_error_that_says_so():
    with pytest.raises(DataError, match="no samples"):
        await run_sft_training(FakeBackend(), [], SFTTrainingConfig(num_steps=1, batch_size=1))


async def test_a_backend_that_cannot_checkpoint_is_refused_before_training(tmp_path: Path):
    class Bare:
        forward = forward_backward = optim_step = get_weights = load_weights = None

    with pytest.raises(ConfigError, match="Bare lacks the feature checkpoints"):
        await run_sft_training(Bare(), make_ragged(4), SFTTrainingConfig(num_steps=1, batch_size=1), checkpoint_dir=tmp_path)


async def test_the_checkpoint_knows_how_long_the_metrics_file_was(tmp_path: Path):
    from rollouts.training.saving.run_state import read_run_state

    logger = JSONLLogger(tmp_path / "metrics.jsonl")
    config = SFTTrainingConfig(num_steps=2, batch_size=2, checkpoint_every=1)
    await run_sft_training(FakeBackend(), make_ragged(8), config, logger, checkpoint_dir=tmp_path / "checkpoints")
    sizes = [read_run_state(tmp_path / "checkpoints" / f"step_{s:04d}").metrics_bytes for s in (1, 2)]
    assert sizes[1] == (tmp_path / "metrics.jsonl").stat().st_size
    assert 0 < sizes[0] < sizes[1]


@pytest.mark.parametrize("at_once", [1, 3, 256])
@pytest.mark.parametrize("max_tokens", [1, 40, 16384])
async def test_the_held_out_loss_is_that_of_a_plain_loop_over_transformers_however_it_is_split(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, at_once: int
):
    model = create_tiny_model(vocab_size=50, seed=1)
    generator = random.Random(0)
    rows = [tuple(generator.randrange(50) for _ in range(length)) for length in (9, 2, 30, 17, 5)]
    masks = [[0.0, *(float(generator.random() < 0.6) for _ in row[1:])] for row in rows]
    samples = [make_row(row, loss_mask=mask) for row, mask in zip(rows, masks, strict=True)]
    total = count = 0.0
    with torch.no_grad():
        for sample in samples:
            tokens = torch.tensor([sample.tokens])
            logits = model(tokens).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            mask = torch.tensor(sample.loss_mask)[1:]
            total, count = total + float((losses * mask).sum()), count + float(mask.sum())
    monkeypatch.setattr("rollouts.sft_loop._EVALUATED_AT_ONCE", at_once)
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-3))
    found = await evaluate_sft(backend, samples, max_tokens_per_microbatch=max_tokens)
    assert found["eval_num_tokens"] == count and found["eval_num_demonstrations"] == len(samples)
    assert found["eval_loss"] == pytest.approx(total / count, rel=1e-6)
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


async def test_the_held_out_loss_needs_a_token_and_a_huge_one_has_an_infinite_perplexity():
    with pytest.raises(DataError, match="2 held-out samples have no token"):
        await evaluate_sft(FakeBackend(), [make_row((1, 2), loss_mask=[0.0, 0.0])] * 2)
    assert perplexity(1e4) == math.inf


async def test_a_line_has_the_entropy_and_the_throughput_of_its_step():
    model, naive = (create_tiny_model(vocab_size=50, seed=1) for _ in range(2))
    backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=0.0))
    rows = [make_row((3, 4, 5, 6)), make_row((7, 8))]
    config = SFTTrainingConfig(num_steps=1, batch_size=2)
    (line,) = await run_sft_training(backend, rows, config, clock=lambda c=count(): 2.0 * next(c))
    with torch.no_grad():
        entropies = [
            torch.distributions.Categorical(logits=naive(torch.tensor([row.tokens])).logits[0, t - 1]).entropy()
            for row in rows
            for t, mask in enumerate(row.loss_mask)
            if mask > 0 and t > 0
        ]
    assert line["entropy"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)
    assert (line["step_s"], line["tokens_per_s"]) == (2.0, 3.0)
