"""Numbers that go bad: each kind with each policy, in the update itself and in the rows before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from samples import draw_batch

from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import grpo
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reward_model_backend
from rollouts.backends.fsdp.checkpoint import _read_single
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.optim.updates import UpdateCounts, Worst, count_update, judge_update, read_counts
from rollouts.backends.pytorch.files import TRAINER_FILE
from rollouts.config import BadNumbers, RLTrainingConfig
from rollouts.data.filters import find_bad_log_probs, find_empty_answers, sift_rows
from rollouts.data.prompts import DataBuffer
from rollouts.errors import BadNumberError, ConfigError
from rollouts.rl_loop import train_rl
from rollouts.testing import create_tiny_model
from rollouts.training.rl_parts import RLParts
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.training.steps import mean_step_metrics
from rollouts.types import LossOutput, Prompt, RolloutBatch, Sample, Status

LENGTHS = (5, 7, 4)
NAN, INF = float("nan"), float("inf")
BACKENDS: dict[str, Callable[..., object]] = {
    "pytorch": lambda **options: create_pytorch_backend(create_tiny_model(), lr=1e-2, **options),
    "lora": lambda **options: create_pytorch_backend(create_tiny_model(), lr=1e-2, lora=LoRAConfig(rank=2), **options),
    "torch_func": lambda **options: create_torch_func_backend(create_tiny_model(), lr=1e-2, **options),
}


def spoil_loss(outputs, batch, *, value: float = NAN, only_value: bool = False) -> LossOutput:
    """The SFT loss with a bad value; only_value: its gradient is a good one."""
    loss, metrics = sft_loss(outputs, batch)
    bad = torch.tensor(value) if not only_value else torch.tensor(value).detach()
    return LossOutput(loss + bad if only_value else loss * bad, metrics)


def spoil_gradient(outputs, batch) -> LossOutput:
    """The SFT loss with a good value and a gradient that is not finite: the root of 0."""
    loss, metrics = sft_loss(outputs, batch)
    return LossOutput(loss + (outputs.log_probs[0, 1] * 0.0).abs().sqrt(), metrics)


def tell_ratio(outputs, batch, *, ratio: float) -> LossOutput:
    loss, metrics = sft_loss(outputs, batch)
    return LossOutput(loss, {**metrics, "max_ratio": torch.tensor(ratio)})


def scale_loss(outputs, batch, *, factor: float) -> LossOutput:
    loss, metrics = sft_loss(outputs, batch)
    return LossOutput(loss * factor, metrics)


async def step(backend, loss=sft_loss) -> dict[str, float]:
    part = backend.forward_backward(draw_batch(0, LENGTHS), loss)
    update = await backend.optim_step().result()
    return await part.result() | update


async def weights(backend) -> dict[str, torch.Tensor]:
    return dict(await backend.get_weights().result())


CASES = {
    "loss": (partial(spoil_loss, value=INF, only_value=True), {}),
    "gradient": (spoil_gradient, {}),
    "ratio": (partial(tell_ratio, ratio=1e4), {}),
    "gradient_spike": (partial(scale_loss, factor=1e3), {}),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", BACKENDS)
async def test_an_update_with_a_bad_number_is_left_out_counted_and_leaves_no_trace(name: str, kind: str):
    loss, _ = CASES[kind]
    backend = BACKENDS[name](bad_numbers=BadNumbers(**{kind: "skip"}))
    for _ in range(10 if kind == "gradient_spike" else 1):
        good = await step(backend)
    assert not [key for key in good if key.startswith("num_bad")]
    before = await weights(backend)
    bad = await step(backend, loss)
    assert (bad["update_skipped"], bad[f"num_bad_{kind}"]) == (1.0, 1.0)
    assert [key for key in bad if key.startswith("num_bad")] == [f"num_bad_{kind}"]
    after = await weights(backend)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (await step(backend))["update_skipped"] == 0.0


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("name", ["pytorch", "torch_func"])
async def test_an_update_with_a_bad_number_ends_the_run_before_anything_is_changed(name: str, kind: str):
    loss, _ = CASES[kind]
    backend = BACKENDS[name](bad_numbers=BadNumbers(**{kind: "stop"}))
    for _ in range(10 if kind == "gradient_spike" else 1):
        await step(backend)
    before = await weights(backend)
    with pytest.raises(BadNumberError, match=rf"update \d+: .* the policy for {kind} is to stop\. It was not applied") as caught:
        await step(backend, loss)
    assert caught.value.kind == kind
    after = await weights(backend)
    assert all(torch.equal(before[key], after[key]) for key in before)
    with pytest.raises(AssertionError, match="optim_step was called without a forward_backward"):
        backend.optim_step()
    assert (await step(backend))["grad_norm"] < 100.0, "the gradient with the bad number is gone"


@pytest.mark.parametrize("create", [create_critic_backend, create_reward_model_backend])
async def test_critics_and_reward_models_take_the_policy(create: Callable[..., object]):
    backend = create(create_tiny_model(), lr=1e-2, bad_numbers=BadNumbers(loss="stop"))

    def loss(outputs, batch) -> LossOutput:
        return LossOutput(outputs.values.sum() * NAN, {})

    backend.forward_backward(draw_batch(0, LENGTHS), loss)
    with pytest.raises(BadNumberError, match="the loss is not finite"):
        backend.optim_step()


async def test_ratios_and_spikes_are_ignored_unless_asked_for():
    backend = BACKENDS["pytorch"]()
    for _ in range(10):
        await step(backend)
    for loss in (CASES["ratio"][0], CASES["gradient_spike"][0]):
        metrics = await step(backend, loss)
        assert metrics["update_skipped"] == 0.0
        assert not [key for key in metrics if key.startswith("num_bad")]


def test_the_judgement_goes_by_limits_and_looks_for_spikes_after_ten_updates():
    policy = BadNumbers(gradient_spike="skip", spike_factor=5.0, ratio="skip", ratio_limit=10.0)
    counts = UpdateCounts()
    for _ in range(10):
        assert judge_update(100.0, counts, worst=Worst(), policy=policy) is None
        counts = count_update(counts, 1.0, applied=True)
    assert counts.usual_norm == pytest.approx(1.0)
    assert judge_update(5.0, counts, worst=Worst(), policy=policy) is None
    assert judge_update(5.1, counts, worst=Worst(), policy=policy) == "gradient_spike"
    assert judge_update(1.0, counts, worst=Worst(max_ratio=10.0), policy=policy) is None
    assert judge_update(1.0, counts, worst=Worst(max_ratio=10.1), policy=policy) == "ratio"
    assert judge_update(1.0, counts, worst=Worst(max_ratio=NAN), policy=policy) == "ratio"
    assert judge_update(INF, counts, worst=Worst(is_loss_finite=False), policy=policy) == "loss"
    assert count_update(counts, 9.0, applied=False) == replace(counts, num_updates=11, num_skipped_in_a_row=1)
    assert count_update(counts, 2.0, applied=True).usual_norm == pytest.approx(1.1)


def test_a_ratio_that_is_no_number_is_the_worst_in_any_place():
    for ratios in ((NAN, 1.0), (1.0, NAN), (NAN, NAN)):
        worst = Worst()
        for ratio in ratios:
            worst = worst.add({"loss": 1.0, "max_ratio": ratio})
        assert judge_update(1.0, UpdateCounts(), worst=worst, policy=BadNumbers(ratio="skip")) == "ratio"


async def test_the_usual_norm_of_one_process_goes_on_in_several(tmp_path: Path):
    backend = BACKENDS["pytorch"]()
    await step(backend)
    await backend.save_checkpoint(tmp_path).result()
    assert backend.counts.usual_norm > 0
    assert read_counts(_read_single(tmp_path / TRAINER_FILE)) == backend.counts


def test_counts_of_earlier_checkpoints_have_no_usual_norm():
    assert read_counts({"num_updates": 3, "num_skipped_in_a_row": 1}) == UpdateCounts(3, 1, 0.0)
    assert read_counts({"num_updates": 3, "num_skipped_in_a_row": 1, "usual_norm": 0.5}) == UpdateCounts(3, 1, 0.5)


def test_counts_of_bad_numbers_add_over_the_updates_of_a_step():
    good, bad = {"num_tokens": 4.0, "lr": 1.0}, {"num_tokens": 4.0, "lr": 1.0, "num_bad_gradient": 1.0}
    assert mean_step_metrics([good, bad, bad])["num_bad_gradient"] == 2.0
    assert "num_bad_gradient" not in mean_step_metrics([good, good])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient": "drop"}, "BadNumbers.gradient is 'drop'"),
        ({"loss": "ignore"}, "BadNumbers.loss is 'ignore'"),
        ({"all_masked": "drop"}, "BadNumbers.all_masked is 'drop'"),
        ({"ratio": "drop"}, "BadNumbers.ratio is 'drop'"),
        ({"spike_factor": 1.0}, "BadNumbers.spike_factor is 1.0"),
        ({"max_skipped": 0}, "max_skipped"),
    ],
)
def test_policies_without_a_sense_are_refused(settings: dict, words: str):
    with pytest.raises(ConfigError) as caught:
        BadNumbers(**settings)
    assert words in str(caught.value)


# -- rows


def rows_with(column: str, value: float):
    batch = draw_batch(0, LENGTHS)
    spoiled = torch.zeros_like(batch.loss_mask)
    spoiled[1, 3] = value
    return replace(batch, **{column: spoiled})


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs", "prox_log_probs", "ref_log_probs", "segment_log_probs"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rows_with_a_log_prob_that_is_not_finite_are_found_at_trained_tokens_only(column: str, value: float):
    batch = rows_with(column, value)
    assert find_bad_log_probs(batch).tolist() == [False, True, False]
    masked = batch.loss_mask.clone()
    masked[1, 3] = 0
    assert find_bad_log_probs(replace(batch, loss_mask=masked)).tolist() == [False] * 3
    trainable = torch.tensor([True, False, True])
    assert find_bad_log_probs(replace(batch, trainable=trainable)).tolist() == [False] * 3


def test_empty_answers_are_found():
    batch = draw_batch(0, LENGTHS)
    mask = batch.loss_mask.clone()
    mask[2] = 0
    mask[2, 3] = 1
    assert find_empty_answers(replace(batch, loss_mask=mask)).tolist() == [False, False, True]


@pytest.mark.parametrize("kind", ["log_prob", "empty_answer"])
def test_rows_are_treated_by_the_policy(kind: str):
    batch, bad = draw_batch(0, LENGTHS), torch.tensor([False, True, False])
    assert sift_rows(batch, bad, kind, BadNumbers()) == (batch, {})
    assert sift_rows(batch, ~bad & bad, kind, BadNumbers(**{kind: "stop"})) == (batch, {})
    assert sift_rows(batch, bad, kind, BadNumbers(**{kind: "skip"})) == (None, {f"num_bad_{kind}": 1.0})
    sifted, metrics = sift_rows(batch, bad, kind, BadNumbers(**{kind: "drop"}))
    assert metrics == {f"num_bad_{kind}": 1.0}
    assert sifted is not None
    assert not sifted.loss_mask[1].any()
    assert torch.equal(sifted.loss_mask[[0, 2]], batch.loss_mask[[0, 2]])
    with pytest.raises(BadNumberError, match=rf"1 of 3 rows have .*: row 1; and the policy for {kind} is to stop"):
        sift_rows(batch, bad, kind, BadNumbers(**{kind: "stop"}))


def rollout_rows(value: float):
    batch = rows_with("rollout_log_probs", value)
    groups = torch.tensor([0, 0, 0])
    return replace(batch, rewards=torch.tensor([0.0, 1.0, 3.0]), group_ids=groups, advantages=None, loss_weights=None)


@pytest.mark.parametrize("action", ["ignore", "drop", "skip", "stop"])
async def test_a_log_prob_that_is_not_finite_in_a_rollout_batch(action: str):
    backend = BACKENDS["pytorch"](bad_numbers=BadNumbers())
    algorithm = replace(grpo(), requires=frozenset({"rollout_log_probs"}), loss=sft_loss)
    before = await weights(backend)
    plan = UpdatePlan(bad_numbers=BadNumbers(log_prob=action))
    if action == "stop":
        with pytest.raises(BadNumberError, match="a log-prob that is not finite: row 1"):
            await train_on_rollouts(backend, rollout_rows(NAN), algorithm, plan)
    else:
        metrics = await train_on_rollouts(backend, rollout_rows(NAN), algorithm, plan)
        assert metrics.get("num_bad_log_prob") == (None if action == "ignore" else 1.0)
        assert metrics["num_tokens"] == {"ignore": 13.0, "drop": 7.0, "skip": 0.0}[action]
    after = await weights(backend)
    changed = not all(torch.equal(before[key], after[key]) for key in before)
    assert changed == (action in ("ignore", "drop"))


@pytest.mark.parametrize("action", ["skip", "stop"])
async def test_a_batch_without_a_trained_token(action: str):
    backend, policy = BACKENDS["pytorch"](), BadNumbers(all_masked=action)
    batch = rollout_rows(0.0)
    batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    before = await weights(backend)
    if action == "stop":
        with pytest.raises(BadNumberError, match="the rollout batch has no token with loss_mask > 0"):
            await train_on_rollouts(backend, batch, grpo(), UpdatePlan(bad_numbers=policy))
    else:
        assert (await train_on_rollouts(backend, batch, grpo(), UpdatePlan(bad_numbers=policy)))["num_bad_all_masked"] == 1.0
    after = await weights(backend)
    assert all(torch.equal(before[key], after[key]) for key in before)


class Source:
    """Rollouts of a prompt, whose third answer is empty."""

    async def generate_batch(self) -> RolloutBatch:
        lengths = (6, 6, 3)
        samples = [
            Sample(
                prompt="p",
                tokens=[5, 6, *range(7, 5 + length)],
                loss_mask=[0, 0] + [1] * (length - 2),
                rollout_log_probs=[0.0, 0.0] + [-1.0] * (length - 2),
                weight_versions=[0] * length,
                status=Status.COMPLETED,
                reward=float(k),
                index=k,
                group_index=7,
            )
            for k, length in enumerate(lengths)
        ]
        return RolloutBatch(samples=tuple(samples))

    def state_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("action", ["ignore", "drop", "skip", "stop"])
async def test_an_empty_answer_in_the_loop(action: str):
    backend = BACKENDS["pytorch"]()
    config = RLTrainingConfig(num_steps=1, weight_sync="memory", bad_numbers=BadNumbers(empty_answer=action))
    parts = RLParts(backend=backend, data_buffer=DataBuffer([Prompt(content="p")] * 8), engines=[])
    if action == "stop":
        with pytest.raises(BadNumberError, match="1 of 3 rows have an answer of at most one token: sample 2") as caught:
            await train_rl(parts, Source(), config)
        assert [note.partition(";")[0] for note in caught.value.__notes__] == ["its rollouts are those of the prompts 7", "in step 1"]
        return
    [metrics] = await train_rl(parts, Source(), config)
    assert metrics["num_tokens"] == {"ignore": 9.0, "drop": 8.0, "skip": 0.0}[action]
    assert metrics.get("num_bad_empty_answer") == (None if action == "ignore" else 1.0)
    assert metrics["update_skipped"] == (1.0 if action == "skip" else 0.0)
    assert metrics["reward_mean"] == 1.0


async def test_steps_that_are_left_out_for_their_rows_end_the_run_after_so_many_in_a_row():
    config = RLTrainingConfig(num_steps=5, weight_sync="memory", bad_numbers=BadNumbers(empty_answer="skip", max_skipped=3))
    parts = RLParts(backend=BACKENDS["pytorch"](), data_buffer=DataBuffer([Prompt(content="p")] * 8), engines=[])
    with pytest.raises(BadNumberError, match=r"the updates of 3 steps in a row were left out .*on_bad\.empty_answer to drop") as caught:
        await train_rl(parts, Source(), config)
    assert "in step 3" in " ".join(caught.value.__notes__)
