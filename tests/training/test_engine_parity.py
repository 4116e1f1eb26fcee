"""Engines against the trainer: the same weights give the same log-probs, and a sync is believed if the outputs changed with it."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch

from rollouts.algorithms.presets import decoupled, grpo, recomputed, truncated
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError, DataError, EngineError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, create_tiny_model
from rollouts.training.parity import (
    LogProbDifference,
    ParityWarning,
    act_on_difference,
    check_parity,
    compare_log_probs,
    create_weight_probe,
    measure_difference,
    select_rows_of_version,
)
from rollouts.training.weight_sync import WeightProbe, sync_weights_in_memory
from rollouts.types import Sample, SamplingParams

PROMPTS = [(3, 4, 5), (6, 7), (8, 9, 10, 11)]


def test_differences_are_those_of_a_loop_over_the_tokens_that_count():
    generator = torch.Generator().manual_seed(0)
    engine, trainer = (-torch.rand(3, 5, generator=generator) for _ in range(2))
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    found = compare_log_probs(engine, trainer, mask)
    differences = [float(trainer[b, t]) - float(engine[b, t]) for b in range(3) for t in range(5) if mask[b, t]]
    assert found.num_tokens == len(differences) == 5
    assert found.max_abs == pytest.approx(max(abs(d) for d in differences), rel=1e-6)
    assert found.mean_abs == pytest.approx(sum(abs(d) for d in differences) / 5, rel=1e-6)
    assert found.kl == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 5, rel=1e-5)


def test_no_tokens_differ_by_nothing():
    empty = torch.zeros(2, 3)
    assert compare_log_probs(empty, empty - 1, empty) == LogProbDifference(num_tokens=0, max_abs=0.0, mean_abs=0.0, kl=0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
async def test_an_engine_with_the_backends_weights_agrees_at_any_temperature(temperature: float):
    model = create_tiny_model()
    backend, engine = create_pytorch_backend(copy.deepcopy(model), lr=1e-3), InProcessEngine(model)
    difference = await check_parity(engine, backend, PROMPTS, SamplingParams(max_tokens=12, temperature=temperature))
    assert difference.num_tokens > 12
    assert difference.max_abs < 1e-5


async def test_an_engine_with_other_weights_does_not():
    backend = create_pytorch_backend(create_tiny_model(seed=1), lr=1e-3)
    difference = await check_parity(InProcessEngine(create_tiny_model(seed=0)), backend, PROMPTS)
    assert difference.mean_abs > 0.01
    assert difference.kl > 0


async def test_an_episode_of_several_contexts_agrees_context_by_context():
    model = create_tiny_model()
    backend, engine = create_pytorch_backend(copy.deepcopy(model), lr=1e-3), InProcessEngine(model)
    parts = [await engine.generate(prompt, SamplingParams(max_tokens=6, seed=i)) for i, prompt in enumerate(PROMPTS)]
    columns = [
        ((*p.input_tokens, *p.output_tokens), (0.0,) * p.input_len + (1.0,) * p.output_len, (0.0,) * p.input_len + p.output_log_probs)
        for p in parts
    ]
    tokens, mask, log_probs = (tuple(x for column in columns for x in column[i]) for i in range(3))
    ends = [sum(len(column[0]) for column in columns[: i + 1]) for i in range(len(columns))]
    sample = Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=log_probs, context_starts=tuple(ends[:-1]))
    difference = await measure_difference(backend, collate_samples([sample]))
    assert difference.num_tokens == sum(p.output_len for p in parts)
    assert difference.max_abs < 1e-5
    as_one = await measure_difference(backend, collate_samples([replace(sample, context_starts=())]))
    assert as_one.max_abs > 1e-3, "seen as one text they would not agree"


async def test_samples_of_a_cut_distribution_are_refused():
    model = create_tiny_model()
    with pytest.raises(ConfigError, match="top_p=1"):
        await check_parity(InProcessEngine(model), create_pytorch_backend(model, lr=1e-3), PROMPTS, SamplingParams(top_k=3, max_tokens=4))


# acting on it

CLOSE = LogProbDifference(num_tokens=9, max_abs=0.3, mean_abs=0.01, kl=0.0)
FAR = replace(CLOSE, mean_abs=0.2)


def test_within_the_threshold_nothing_happens():
    algorithm = grpo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert act_on_difference(CLOSE, ParityConfig(action="stop", threshold=0.01), algorithm) is algorithm


def test_beyond_it_a_run_warns_corrects_or_stops():
    algorithm = grpo()
    with pytest.warns(ParityWarning, match=r"differ by 0.2 nats on average .*threshold 0.1"):
        assert act_on_difference(FAR, ParityConfig(), algorithm) is algorithm
    with pytest.warns(ParityWarning):
        corrected = act_on_difference(FAR, ParityConfig(action="correct", cap=3.0), algorithm)
    assert repr(corrected.loss) == repr(truncated(algorithm, cap=3.0).loss)
    already = decoupled(algorithm)
    with pytest.warns(ParityWarning):
        assert act_on_difference(FAR, ParityConfig(action="correct"), already) is already
    with pytest.raises(EngineError, match="Nothing was trained on them"):
        act_on_difference(FAR, ParityConfig(action="stop"), algorithm)


@pytest.mark.parametrize("wrong", [{"num_rows": 0}, {"threshold": 0.0}, {"action": "ignore"}, {"cap": -1.0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        ParityConfig(**wrong)


def test_only_rows_of_the_version_that_is_served_are_compared():
    def make(versions, mask=(0.0, 1.0, 1.0)):
        return Sample(tokens=(3, 4, 5), loss_mask=mask, rollout_log_probs=(0.0,) * 3, weight_versions=versions, reward=0.0)

    samples = [make((-1, 0, 1)), make((-1, 1, 1)), make((-1, 1, 1), mask=(0.0, 0.0, 0.0)), make((-1, 1, 1)), make((-1, 0, 0))]
    batch = collate_samples(samples, pad_id=0)
    selected = select_rows_of_version(batch, samples, 1, num_rows=8)
    assert selected is not None
    assert selected.num_rows == 2
    selected = select_rows_of_version(batch, samples, 1, num_rows=1)
    assert selected is not None
    assert selected.num_rows == 1
    assert select_rows_of_version(batch, samples, 2, num_rows=8) is None


def test_rows_without_versions_or_of_a_cut_distribution_are_not_compared():
    whole = Sample(tokens=(3, 4), loss_mask=(0.0, 1.0), rollout_log_probs=(0.0,) * 2, weight_versions=(-1, 1), reward=0.0)
    samples = [replace(whole, truncated_sampling=True), whole]
    selected = select_rows_of_version(collate_samples(samples, pad_id=0), samples, 1, num_rows=8)
    assert selected is not None
    assert selected.num_rows == 1
    for others in (samples[:1], [replace(whole, weight_versions=None)]):
        assert select_rows_of_version(collate_samples(others, pad_id=0), others, 1, num_rows=8) is None


# probes of a sync


class LyingEngine(InProcessEngine):
    """Says that it has the new weights, and goes on with the old ones."""

    def __init__(self, model):
        self.old = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        super().__init__(model)

    async def update_weights(self, weights, weight_version):
        return await super().update_weights(self.old, weight_version)


async def test_a_probe_believes_an_engine_that_took_the_weights_and_not_one_that_lies():
    model, new = create_tiny_model(seed=0), create_tiny_model(seed=1)
    backend = create_pytorch_backend(new, lr=1e-3)
    probe = await create_weight_probe(backend, (3, 9, 4, 7, 5), tolerance=1e-4)
    weights = await backend.get_weights().result()
    honest, liar = InProcessEngine(copy.deepcopy(model)), LyingEngine(copy.deepcopy(model))
    assert (await sync_weights_in_memory([honest], weights, 1, probe=probe))[0]["success"]
    with pytest.raises(EngineError, match=r"engine 1 \(LyingEngine\).*off by up to .* nats"):
        await sync_weights_in_memory([honest, liar], weights, 2, probe=probe)
    await sync_weights_in_memory([liar], weights, 3)  # without a probe the lie is not found out


async def test_an_engine_that_cannot_answer_a_probe_is_refused_before_anything_is_sent():
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=r"lacks the feature scores .* which a probe of its weights needs"):
        await sync_weights_in_memory([engine], {}, 1, probe=WeightProbe(tokens=(3, 4), log_probs=(-1.0,), tolerance=1e-3))
    assert engine.calls == []


# in the loop


def make_run(engine: InProcessEngine):
    buffer = DataBuffer([f"s{i}=" for i in range(10)], seed=0)
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6), seed=0)
    config = RolloutConfig(
        batch_size=2, n_samples_per_prompt=4, generate_fn=generate, reward_fn=lambda sample: float(derive_seed(*sample.tokens) % 2)
    )
    return buffer, AsyncRolloutManager(buffer, config, engines=[engine])


async def train(engine: InProcessEngine, config: RLTrainingConfig):
    backend = create_pytorch_backend(create_tiny_model(seed=0), lr=1e-2)
    buffer, manager = make_run(engine)
    async with manager:
        return await run_rl_training(backend, buffer, manager, [engine], config, clock=lambda: 0.0)


CHECKED = RLTrainingConfig(num_steps=3, weight_sync="memory", parity=ParityConfig(action="stop", threshold=1e-4), probe_tolerance=1e-4)


async def test_a_run_in_which_engine_and_trainer_agree_logs_how_well_and_is_not_changed_by_the_look():
    history = await train(InProcessEngine(create_tiny_model(seed=0)), CHECKED)
    assert [0 < metrics["engine_diff_max"] + 1e-12 < 1e-4 for metrics in history] == [True] * 3
    assert all(metrics["engine_kl"] < 1e-6 for metrics in history)
    plain = await train(InProcessEngine(create_tiny_model(seed=0)), replace(CHECKED, parity=None, probe_tolerance=None))
    assert [metrics["loss"] for metrics in plain] == [metrics["loss"] for metrics in history]
    assert "engine_kl" not in plain[0]


async def test_between_two_syncs_the_trainer_is_ahead_and_nothing_is_compared():
    history = await train(InProcessEngine(create_tiny_model(seed=0)), replace(CHECKED, num_steps=4, sync_every=2))
    assert ["engine_kl" in metrics for metrics in history] == [True, False, True, False]


async def test_a_run_on_an_engine_that_keeps_old_weights_stops_at_the_sync_or_at_the_next_batch():
    with pytest.raises(EngineError, match="log-probs of a probe are off"):
        await train(LyingEngine(create_tiny_model(seed=0)), CHECKED)
    with pytest.raises(EngineError, match="rollouts and of the trainer differ"):
        await train(LyingEngine(create_tiny_model(seed=0)), replace(CHECKED, probe_tolerance=None))
    correcting = replace(CHECKED, probe_tolerance=None, parity=ParityConfig(action="correct", threshold=1e-4))
    with pytest.warns(ParityWarning):
        assert len(await train(LyingEngine(create_tiny_model(seed=0)), correcting)) == 3


async def test_a_correction_never_reads_log_probs_of_a_cut_distribution():
    """The algorithm does not read them, so that they are admitted; a correction for a difference that others show would."""

    class EveryOther(InProcessEngine):
        """Cuts the distribution of every other request."""

        num_requests = 0

        async def generate(self, prompt_tokens, params, *, request_id=None):
            self.num_requests += 1
            cut = params if self.num_requests % 2 else params.new(top_k=3)
            return await super().generate(prompt_tokens, cut, request_id=request_id)

    config = replace(CHECKED, num_steps=1, algorithm=recomputed(grpo()), probe_tolerance=None)
    assert len(await train(EveryOther(create_tiny_model(seed=0)), config)) == 1
    correcting = replace(config, parity=ParityConfig(action="correct", threshold=1e-4))
    with pytest.warns(ParityWarning), pytest.raises(DataError, match="drawn with top_p, top_k or min_p"):
        await train(EveryOther(create_tiny_model(seed=5)), correcting)
