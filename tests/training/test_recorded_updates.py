"""Records of updates: what the loss made of each token, told from the pass that is differentiated."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from samples import make_row

from integration.run.step_files import TrajectoryWriter
from integration.settings.sections.records import TrajectorySection
from rollouts.algorithms.losses import clipped_policy_loss, mark_tokens, policy_loss, total_loss
from rollouts.algorithms.presets import cispo, decoupled, dppo, gmpo, grpo, gspo
from rollouts.algorithms.surrogates import reinforce
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.jax.backend import create_jax_backend
from rollouts.backends.protocol import TrainingBackend
from rollouts.data.collate import collate_samples
from rollouts.data.records import describe_update
from rollouts.data.trajectories import read_records
from rollouts.seeds import derive_seed
from rollouts.testing import FakeBackend, create_tiny_model
from rollouts.training.rollout_batch import RecordRequest, UpdatePlan, train_on_rollouts
from rollouts.types import TOKEN_PREFIX, Algorithm, LossOutput, RolloutBatch, Sample, TokenOutputs, TrainBatch


def draw_samples(rows: int = 12) -> tuple[Sample, ...]:
    generator = torch.Generator().manual_seed(0)
    samples: list[Sample] = []
    for i in range(rows):
        n = int(torch.randint(4, 12, (1,), generator=generator))
        tokens = torch.randint(3, 64, (n,), generator=generator).tolist()
        reward = float(i // 4 != 1 and derive_seed(*tokens) % 2)  # the second group has no advantage
        log_probs = (0.0, *(-4.0 + torch.randn(n - 1, generator=generator) / 3).tolist())
        samples.append(make_row(tokens, rollout_log_probs=log_probs, index=i, group_index=i // 4, reward=reward, trainable=i != 9))
    return tuple(samples)


SAMPLES = draw_samples()
PLAN = UpdatePlan(num_minibatches=3, max_tokens_per_microbatch=40)


async def train(algorithm: Algorithm, backend: TrainingBackend, plan: UpdatePlan = PLAN, rows: tuple[int, ...] | None = ()):
    """Return the metrics of a training step, and the columns of the recorded rows; rows=None = record nothing."""
    found: list[dict[int, dict[str, torch.Tensor]]] = []
    request = None if rows is None else RecordRequest(rows=rows or tuple(range(len(SAMPLES))), on_update=found.append)
    metrics = await train_on_rollouts(backend, collate_samples(SAMPLES), algorithm, replace(plan, record=request))
    return metrics, found[0] if found else {}


def make_backend(kind: str = "pytorch") -> TrainingBackend:
    create = {
        "pytorch": create_pytorch_backend, "functional": create_torch_func_backend, "fsdp": create_fsdp_backend, "jax": create_jax_backend
    }[kind]  # fmt: skip
    return create(create_tiny_model(seed=0), lr=3e-2, eps=1e-3)


ALGORITHMS = {
    "grpo": grpo(clip_low=0.1, clip_high=0.1, dual=1.3),
    "gspo": gspo(clip_low=0.02, clip_high=0.02),
    "gmpo": gmpo(clip_low=0.1, clip_high=0.1),
    "cispo": cispo(clip_low=0.1, clip_high=0.1),
    "dppo": dppo(low=0.001, high=0.001),
    "decoupled": decoupled(grpo(clip_low=0.02, clip_high=0.02), cap=1.2),
}


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in ALGORITHMS for kind in ("pytorch", "functional")), ("grpo", "fsdp"), ("grpo", "jax")]
)
async def test_recorded_reasons_of_all_rows_are_the_metrics_of_the_step(name: str, kind: str):
    metrics, columns = await train(ALGORITHMS[name], make_backend(kind))
    assert sorted(columns) == [row for row in range(len(SAMPLES)) if SAMPLES[row].trainable], "rows of mini-batches have their own places"
    trained = {row: torch.tensor(SAMPLES[row].loss_mask) > 0 for row in columns}
    of_tokens = {key: torch.cat([columns[row][key][: len(on)][on] for row, on in trained.items()]) for key in columns[0]}
    shares = {key: value for key, value in metrics.items() if "_fraction" in key and f"{key}_low" not in metrics}
    shares.pop("zero_gradient_fraction", None)  # of whole passes
    assert any(0 < value < 1 for value in shares.values()), f"nothing is clipped: {shares}"
    for key, value in shares.items():
        marks = of_tokens[key.replace("_fraction", "")]
        assert int(marks.sum()) == pytest.approx(value * metrics["num_tokens"], abs=1e-3), key
    for total in {key.removesuffix("_low") for key in metrics if key.endswith("_low")}:
        reasons = [describe_update(SAMPLES[row], columns[row]).reasons or () for row in columns]
        word = total.replace("_fraction", "")
        count = sum(f"{word}_low" in r or f"{word}_high" in r for row in reasons for r in row)
        assert count == pytest.approx(metrics[total] * metrics["num_tokens"], abs=1e-3)
    assert float(of_tokens["ratio"].mean()) == pytest.approx(metrics["ratio_mean"], rel=1e-5)
    assert float(of_tokens["log_prob"].mean()) == pytest.approx(metrics["log_prob_mean"], rel=1e-5)
    assert float(of_tokens["no_advantage"].sum()) >= sum(len(s.tokens) - 1 for s in SAMPLES[4:8]), "a group of equal rewards"


async def test_a_record_changes_no_number_and_a_backend_without_the_feature_is_asked_for_none():
    results = []
    for rows in (None, (0, 5, 11)):
        backend = make_backend()
        metrics, columns = await train(ALGORITHMS["grpo"], backend, rows=rows)
        results.append((metrics, await backend.get_weights().result()))
    assert sorted(columns) == [0, 5, 11]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    backend = FakeBackend()
    _, nothing = await train(grpo(), backend)
    assert nothing == {}
    asked: list[bool] = []

    def loss(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
        asked.append(batch.recorded is not None)
        return grpo().loss(outputs, batch)

    await train(replace(grpo(), loss=loss), backend)
    assert asked and not any(asked)


async def test_of_several_epochs_the_last_is_recorded_also_through_a_pipeline():
    records = []
    for num_epochs in (1, 2):
        async with open_pipeline(make_backend()) as pipeline:
            _, columns = await train(grpo(), pipeline, UpdatePlan(num_epochs=num_epochs))
            assert (await pipeline.take_recorded().result()) == (), "nothing is kept"
        records.append(columns)
    on = torch.tensor(SAMPLES[0].loss_mask) > 0
    first, second = (columns[0]["log_prob"][: len(on)][on] for columns in records)
    reference = make_backend()
    await train(grpo(), reference, UpdatePlan(), rows=None)
    again = (await reference.forward(collate_samples(SAMPLES), lambda outputs: outputs.log_probs).result())[0, : len(on)][on]
    torch.testing.assert_close(second, again, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first, second, atol=1e-3)


async def test_a_loss_of_ones_own_is_recorded_with_log_probs_and_weights_alone():
    def loss(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
        assert batch.loss_weights is not None
        return LossOutput(-(batch.loss_weights * outputs.log_probs).sum(), {})

    _, columns = await train(replace(grpo(), loss=loss), make_backend())
    assert columns[0].keys() == {"log_prob", "loss_weight"}
    record = describe_update(SAMPLES[0], columns[0])
    assert record.reasons is None and record.ratios is None
    assert record.loss_weights is not None and record.loss_weights[0] == 0 < record.loss_weights[1]


# -- marks


def make_marked(**columns: torch.Tensor) -> TrainBatch:
    batch = collate_samples([make_row((3, 4, 5, 6), rollout_log_probs=(0.0, -1.0, -1.0, -1.0), reward=1.0)])
    ones = torch.ones(1, 4)
    return replace(batch, **{"advantages": ones, "loss_weights": ones, "recorded": torch.tensor([0]), **columns})


def find_marks(batch: TrainBatch, log_probs: tuple[float, ...], loss=partial(clipped_policy_loss, low=0.2, high=0.2, dual=3.0)):
    _, metrics = loss(TokenOutputs(log_probs=torch.tensor([log_probs])), batch)
    columns = {key.removeprefix(TOKEN_PREFIX): value[0] for key, value in metrics.items() if key.startswith(TOKEN_PREFIX)}
    return describe_update(make_row((3, 4, 5, 6)), columns)


def test_each_reason_has_its_word():
    advantages = torch.tensor([[0.0, 1.0, -1.0, -1.0]])
    record = find_marks(make_marked(advantages=advantages), (0.0, -0.5, -1.5, 0.5))
    assert record.reasons == ("", "clip_high", "clip_low", "dual_clip")
    assert record.ratios == (1.0, 1.6487, 0.60653, 4.4817)
    weights = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    record = find_marks(make_marked(importance_weights=weights, loss_weights=weights), (0.0, -1.1, -0.5, -1.0))
    assert record.reasons == ("", "kept", "dropped, clip_high, no_weight", "kept")
    record = find_marks(make_marked(advantages=torch.zeros(1, 4)), (0.0, -1.0, -1.0, -1.0))
    assert record.reasons == ("", *("no_advantage",) * 3)
    masking = partial(policy_loss, surrogate=reinforce, reweigh=lambda log_probs, batch: torch.tensor([[1.0, 1.0, 1.0, 0.0]]))
    assert find_marks(make_marked(), (0.0, -1.0, -1.0, -1.0), masking).reasons == ("", "kept", "kept", "masked")
    masked = make_marked(loss_mask=torch.tensor([[0.0, 1.0, 0.0, 1.0]]))  # by a correction of the algorithm, not by the sample
    assert find_marks(masked, (0.0, -1.0, -1.0, -1.0)).reasons == ("", "kept", "masked", "kept")


def test_numbers_that_json_cannot_hold_are_left_out_and_a_sum_of_losses_tells_of_no_token():
    record = find_marks(make_marked(), (0.0, float("nan"), -1.0, -1.0))
    assert record.ratios is None and record.reasons is not None
    batch = make_marked()
    part = clipped_policy_loss(TokenOutputs(log_probs=torch.zeros(1, 4)), batch)
    assert not any(name.startswith(TOKEN_PREFIX) for name in total_loss({"a": part, "b": part}).metrics)
    assert mark_tokens(replace(batch, advantages=None, loss_weights=None), {}, None).keys() == {f"{TOKEN_PREFIX}masked"}


# -- the file of a step


async def test_the_file_of_a_step_has_what_the_update_saw_and_one_of_a_failed_update_has_the_estimates(tmp_path: Path):
    rollouts, batch = RolloutBatch(samples=SAMPLES), grpo().estimate(collate_samples(SAMPLES))
    _, columns = await train(grpo(clip_low=0.1, clip_high=0.1), make_backend())
    with TrajectoryWriter(tmp_path, TrajectorySection(groups=2)) as writer:
        writer.hold(1, rollouts)
        writer.choose(1, rollouts)
        chosen = writer.list_chosen(1, rollouts)
        writer.prepare(1, rollouts, batch)
        assert not list(tmp_path.iterdir()), "one write a step"
        writer.finish(1, {row: columns[row] for row in chosen if row in columns}, rollouts)
        writer.hold(2, rollouts)
        writer.prepare(2, rollouts, batch)
    records = read_records(tmp_path / "step_0001.jsonl")
    assert [SAMPLES[row].index for row in chosen] == [record.sample.index for record in records] == [*range(8)]
    for record in records:
        assert record.update == describe_update(record.sample, columns[record.sample.index])
        assert record.estimate is not None and record.update is not None and record.update.log_probs is not None
    failed = read_records(tmp_path / "step_0002.jsonl")
    assert [record.estimate for record in failed] == [record.estimate for record in records]
    assert all(record.update is None for record in failed)
    line = json.loads((tmp_path / "step_0001.jsonl").read_text().splitlines()[0])
    assert line["update"]["reasons"]["runs"][0] == [1, ""]


async def test_columns_that_a_loss_of_ones_own_has_renamed_or_that_are_of_some_rows_are_left_out():
    ours = grpo()

    def renamed(outputs: TokenOutputs, batch: TrainBatch) -> LossOutput:
        loss, metrics = ours.loss(outputs, batch)
        first = {f"{TOKEN_PREFIX}some": torch.zeros(batch.num_rows, batch.tokens.shape[1] + 1), f"{TOKEN_PREFIX}scalar": torch.tensor(2.0)}
        return LossOutput(loss, {f"mine/{name}": value for name, value in metrics.items()} | first)

    metrics, seen = await train(replace(ours, loss=renamed), make_backend())
    assert metrics["mine/ratio_mean"] > 0 and metrics["token/scalar"] == 2.0
    assert seen and all(set(columns) == {"log_prob", "loss_weight"} for columns in seen.values())
