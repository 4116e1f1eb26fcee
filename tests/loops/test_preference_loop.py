"""A policy learns from preferences: every objective, in any micro-batches, from any reference, resumed bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_rows import OBJECTIVES, make_pairs, make_rows
from rank_processes import script, start_ranks

from rollouts.backends.factory import create_pytorch_backend, create_reference_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.lora.config import LoRAConfig
from rollouts.backends.lora.reference import create_lora_reference
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import PreferenceTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.preference_pairs import PreferencePair, prepare_preference_pair
from rollouts.errors import BackendError, ConfigError, DataError
from rollouts.preference_loop import (
    PreferenceParts,
    evaluate_preferences,
    prepare_preferences,
    score_reference,
    train_preferences,
)
from rollouts.testing import create_tiny_model
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.saving.best import BestCheckpoint
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import Sample


def make_parts(backend: Any = None, **options: Any) -> PreferenceParts:
    backend = create_pytorch_backend(create_tiny_model(), lr=5e-3) if backend is None else backend
    return PreferenceParts(backend=backend, reference=create_reference_backend(create_tiny_model()), **options)


def config(**options: Any) -> PreferenceTrainingConfig:
    return PreferenceTrainingConfig(**{"num_steps": 4, "batch_size": 8, **options})


def without_times(history: Any) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in history]


@pytest.mark.parametrize("name", OBJECTIVES)
async def test_a_policy_learns_which_answers_are_preferred_also_of_pairs_that_it_has_not_seen(name: str):
    rows, parts = make_rows(name, 60), make_parts()
    train, heldout = rows[:-20], rows[-20:]
    before = await evaluate_preferences(parts, heldout, OBJECTIVES[name])
    history = await train_preferences(parts, train, OBJECTIVES[name], config(num_steps=25, batch_size=16), heldout=heldout)
    assert history[-1]["eval_pair_accuracy"] >= 0.95, (before, history[-1])
    assert history[-1]["eval_loss"] < before["eval_loss"]
    assert history[-1]["eval_pair_margin"] > before["eval_pair_margin"]
    assert {"loss", "reward_accuracy", "grad_norm", "lr", "step_s"} <= set(history[0])
    assert ("num_answers" if name == "kto" else "num_pairs") in history[0]
    if name in ("dpo", "cdpo", "robust"):
        assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5), "policy and reference agree before the first step"


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
async def test_micro_batches_change_nothing(name: str):
    losses, weights = [], []
    for limit in (16384, 30, 1):
        parts = make_parts()
        history = await train_preferences(parts, make_rows(name), OBJECTIVES[name], config(num_steps=3, max_tokens_per_microbatch=limit))
        losses.append([line["loss"] for line in history])
        weights.append(await parts.backend.get_weights().result())
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[2][key], value, rtol=1e-3, atol=2e-5)


async def test_log_probs_of_the_reference_are_computed_before_or_on_the_way_and_a_row_may_know_them():
    pairs, objective = make_pairs(), OBJECTIVES["dpo"]
    expected = await train_preferences(make_parts(), pairs, objective, config())
    policy = create_pytorch_backend(create_tiny_model(), lr=5e-3)
    scored = await score_reference(policy, pairs)
    assert await score_reference(policy, scored) == scored
    alone = PreferenceParts(backend=policy)
    found = await train_preferences(alone, scored, objective, config())
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    first = scored[0].ref_log_probs
    assert first is not None
    row = {"prompt": "0=", "chosen": "x0", "rejected": "x5", "ref_chosen_logps": first[0], "ref_rejected_logps": first[1]}
    assert prepare_preference_pair(create_char_tokenizer(), row, whole_answers=True) == replace(scored[0], **_same_metadata(scored[0]))


def _same_metadata(pair: PreferencePair) -> dict[str, Sample]:
    return {"chosen": pair.chosen, "rejected": pair.rejected}


async def test_adapters_have_their_base_as_reference():
    backend = create_pytorch_backend(create_tiny_model(), lr=2e-2, lora=LoRAConfig(rank=4))
    parts = PreferenceParts(backend=backend, reference=create_lora_reference(backend))
    history = await train_preferences(parts, make_pairs(), OBJECTIVES["dpo"], config(num_steps=10))
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert history[-1]["loss"] < 0.6
    batch = await prepare_preferences(parts, make_pairs(2), OBJECTIVES["dpo"], 1000)
    own = await create_reference_backend(create_tiny_model()).forward(batch, lambda outputs: outputs.log_probs).result()
    on = batch.loss_mask > 0
    torch.testing.assert_close(batch.ref_log_probs[on], own[on], rtol=1e-5, atol=1e-5)


async def test_the_functional_backend_trains_alike():
    rows = make_pairs()
    expected = await train_preferences(make_parts(), rows, OBJECTIVES["dpo"], config(num_steps=3))
    other = make_parts(create_torch_func_backend(create_tiny_model(), lr=5e-3))
    found = await train_preferences(other, rows, OBJECTIVES["dpo"], config(num_steps=3))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-3)


async def test_the_reference_point_is_that_of_other_prompts_answers():
    rows, objective = make_rows("kto"), OBJECTIVES["kto"]
    parts = make_parts(create_pytorch_backend(create_tiny_model(seed=1), lr=1e-3))
    batch = await prepare_preferences(parts, rows[:6], objective, 10_000)
    total = 0.0
    for i, row in enumerate(rows[:6]):
        other = rows[(i - 1) % 6]
        prompt, answer = (
            [t for t, m in zip(s.tokens, s.loss_mask, strict=True) if (m > 0) is on] for s, on in ((row, False), (other, True))
        )
        one = collate_samples([Sample(tokens=(*prompt, *answer), loss_mask=(*(0.0,) * len(prompt), *(1.0,) * len(answer)))])
        own, reference = [
            float((await backend.forward(one, lambda outputs: outputs.log_probs).result() * one.loss_mask).sum())
            for backend in (parts.backend, parts.reference)
        ]
        total += own - reference
    assert batch.values is not None
    assert float(batch.values[0, 0]) == pytest.approx(max(total / 6, 0.0), abs=1e-5)


TWO_RANKS = """
from preference_rows import OBJECTIVES, make_rows
from rollouts.backends.ranks.leading import drop_backend
from rollouts.config import PreferenceTrainingConfig
from rollouts.preference_loop import PreferenceParts, train_preferences
import trio
found = {}
for name in ("dpo", "kto"):
    policy, reference = (lead_backend(group, f"{name} {part}", jobs.create_pair_backend) for part in ("policy", "reference"))
    config = PreferenceTrainingConfig(num_steps=3, batch_size=7, max_tokens_per_microbatch=20)
    rows = make_rows(name)
    parts = PreferenceParts(backend=policy, reference=reference)
    found[name] = trio.run(partial(train_preferences, parts, rows, OBJECTIVES[name], config, heldout=rows[:6]))
drop_backend(group, "dpo reference")
found["kept"] = group.run("listing the backends", jobs.list_backends)
print(json.dumps(found), flush=True)
"""


async def test_two_ranks_train_as_one_process_does(tmp_path: Path):
    children = start_ranks(script(TWO_RANKS), 2, folder=tmp_path)
    try:
        assert [child.wait() for child in children] == [0, 0], children[0].error
    finally:
        for child in children:
            child.kill()
    found = json.loads(children[0].out)
    assert found["kept"] == 2 * [["dpo policy", "kto policy", "kto reference"]], "one was dropped, on both ranks"
    for name in ("dpo", "kto"):
        rows = make_rows(name)
        alone = await train_preferences(make_parts(), rows, OBJECTIVES[name], config(num_steps=3, batch_size=7), heldout=rows[:6])
        for ours, theirs in zip(without_times(alone), without_times(found[name]), strict=True):
            assert theirs == pytest.approx(ours, rel=2e-3, abs=2e-5)


async def test_a_reward_of_answers_that_are_not_there_is_not_known():
    rows = make_rows("kto")
    good = [row for row in rows if isinstance(row, Sample) and row.reward == 1]
    found = await evaluate_preferences(make_parts(), good, OBJECTIVES["kto"])
    assert found.keys() == {"eval_loss", "eval_pair_accuracy", "eval_reward_chosen", "eval_num_pairs"}
    assert {"eval_reward_rejected", "eval_pair_margin"} <= (await evaluate_preferences(make_parts(), rows, OBJECTIVES["kto"])).keys()


async def test_a_reference_with_bad_numbers_is_named():
    backend = create_reference_backend(create_tiny_model())
    torch.nn.init.constant_(backend.model.get_output_embeddings().weight, math.nan)
    with pytest.raises(BackendError, match="log-probs of pair 0 under the reference are nan and nan, expected finite numbers"):
        await score_reference(backend, make_pairs(2))


@pytest.mark.parametrize("name", ["dpo", "kto"])
async def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path):
    rows, objective = make_rows(name), OBJECTIVES[name]
    whole = make_parts()
    expected = await train_preferences(whole, rows, objective, config(), heldout=rows[:8])
    logger, calls = JSONLLogger(tmp_path / "metrics.jsonl"), list[int]()

    def stop_at_2() -> bool:
        calls.append(1)
        return len(calls) == 2

    stopped = make_parts(metrics_logger=logger, checkpoint_dir=tmp_path / "c", should_stop=stop_at_2)
    first = await train_preferences(stopped, rows, objective, config())
    checkpoint = latest_checkpoint(tmp_path / "c")
    assert checkpoint is not None
    state = read_run_state(checkpoint)
    assert (state.step, state.stage, state.num_rows) == (2, "dpo", len(rows))
    resumed = make_parts(create_pytorch_backend(create_tiny_model(seed=1), lr=5e-3), metrics_logger=logger)
    await resumed.backend.load_checkpoint(checkpoint).result()
    second = await train_preferences(resumed, rows, objective, config(), heldout=rows[:8], start_step=2)
    assert without_times(first + second) == without_times(expected)
    ours, theirs = [await parts.backend.get_weights().result() for parts in (resumed, whole)]
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


async def test_an_evaluation_that_is_given_up_is_made_by_the_resumed_run(tmp_path: Path):
    rows, told, abandonment = make_pairs(), [], Abandonment()
    abandonment.request(told.append)
    async with open_pipeline(create_pytorch_backend(create_tiny_model(), lr=5e-3)) as pipeline:
        parts = make_parts(pipeline, checkpoint_dir=tmp_path, abandonment=abandonment)
        given = (rows, OBJECTIVES["dpo"], config(eval_every=2))
        history = await train_preferences(parts, *given, heldout=rows[:8])
        assert told == ["the evaluation of step 2"] and "eval_loss" not in history[-1]
        state = read_run_state(tmp_path / "step_0002")
        rest = await train_preferences(make_parts(pipeline), *given, heldout=rows[:8], start_step=2, unfinished=state.metrics)
    expected = await train_preferences(make_parts(), *given, heldout=rows[:8])
    assert without_times([*history[:-1], *rest]) == without_times(expected)


async def test_the_best_checkpoint_is_kept_and_training_ends_without_improvement(tmp_path: Path):
    rows = make_pairs()
    best = BestCheckpoint("eval_pair_accuracy", patience=2)
    backend = create_pytorch_backend(create_tiny_model(), lr=0.0)
    async with open_pipeline(backend) as pipeline:
        parts = make_parts(pipeline, checkpoint_dir=tmp_path, best=best)
        history = await train_preferences(parts, rows, OBJECTIVES["dpo"], config(num_steps=9, eval_every=1), heldout=rows[:4])
    assert len(history) == 3, "equal weights have equal accuracy"
    assert best.find_checkpoint(tmp_path) == tmp_path / "step_0001"


async def test_what_cannot_be_trained_is_refused():
    pairs, objective = make_pairs(4), OBJECTIVES["dpo"]
    alone = PreferenceParts(backend=create_pytorch_backend(create_tiny_model(), lr=1e-3))
    with pytest.raises(DataError, match="there are no preferences to train on"):
        await train_preferences(alone, (), objective, config())
    with pytest.raises(ConfigError, match=r"there is none, and a row does not know its log-probs: pass reference=create_reference_backend"):
        await train_preferences(alone, pairs, objective, config())
    with pytest.raises(ConfigError, match=r"batch_size is 1, but KTO compares each prompt"):
        await train_preferences(make_parts(), make_rows("kto"), OBJECTIVES["kto"], config(batch_size=1))
    with pytest.raises(AssertionError, match="a row is a PreferencePair, but the objective is trained on Samples"):
        await train_preferences(make_parts(), pairs, OBJECTIVES["kto"], config())
    long = replace(pairs[0].chosen, tokens=(3,) * 600, loss_mask=(1.0,) * 600)
    with pytest.raises(DataError, match="600 tokens, more than the"):
        await train_preferences(make_parts(), (replace(pairs[0], chosen=long),), objective, config())
    await train_preferences(alone, pairs, OBJECTIVES["simpo"], config(num_steps=1))  # needs no reference
