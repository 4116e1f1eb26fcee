"""ProximalRecomputer: the tokens it recomputes, the model it asks, how often, and that no value of another version is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import trio
from hypothesis import given
from hypothesis import strategies as st
from samples import make_versioned_sample

from rollouts.algorithms.corrections import find_missed
from rollouts.algorithms.presets import decoupled, grpo, recomputed
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.recompute import ProximalRecomputer, create_proximal_recomputer, score_with_engines, score_with_trainer
from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample
from rollouts.data.segments import find_missed_tokens, start_segments
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError, DataError, EngineError
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.types import Completion, Sample, Status


def draw_sample(versions: Sequence[int], *, index: int = 0, seed: int = 0, **changes: object) -> Sample:
    """Draw a sample of random tokens, in a group of two."""
    tokens = torch.randint(3, 64, (len(versions),), generator=torch.Generator().manual_seed(seed + index)).tolist()
    place = {"index": index, "group_index": index // 2, "reward": float(index % 2)}
    return make_versioned_sample(versions, **({"tokens": tuple(tokens)} | place | changes))


class Holder:
    """Samples that wait, as an executor has them."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = tuple(samples)

    async def edit_residents(self, edit) -> None:
        self.samples = await edit(self.samples)


def record_score(asked: list[tuple[int, int, int]]):
    """A Score that notes (index, number of tokens, version) and answers -10 * version - place."""

    async def score(samples: Sequence[Sample], version: int) -> list[list[float]]:
        asked.extend((sample.index, len(sample.tokens), version) for sample in samples)
        return [[-10.0 * version - t for t in range(len(sample.tokens))] for sample in samples]

    return score


async def test_only_tokens_of_the_version_before_are_asked_about_and_no_token_behind_them():
    asked = []
    samples = [draw_sample((-1, 3, 4, 5), index=0), draw_sample((-1, 4, 4, 4), index=1), draw_sample((-1, 5, 5), index=2)]
    edited = await ProximalRecomputer(record_score(asked)).add_proximal_log_probs(samples, 5)
    assert asked == [(0, 3, 5), (1, 4, 5)]
    assert edited[0].segment_log_probs == (0.0, -1.0, -52.0, -3.0)
    assert edited[0].segment_versions == (-1, -1, 5, -1)
    assert edited[1].segment_log_probs == (0.0, -51.0, -52.0, -53.0)
    assert edited[2].segment_log_probs == edited[2].rollout_log_probs
    assert [sample.recompute_version for sample in edited] == [5, 5, -1]
    assert [find_missed_tokens(sample, 5) for sample in edited] == [(1,), (), ()]


async def test_the_second_time_changes_nothing_and_asks_nobody():
    asked = []
    recomputer = ProximalRecomputer(record_score(asked))
    once = await recomputer.add_proximal_log_probs([draw_sample((-1, 3, 4))], 4)
    assert len(asked) == 1
    assert await recomputer.add_proximal_log_probs(once, 4) == once
    assert len(asked) == 1


async def test_samples_that_are_not_trained_on_cost_nothing():
    asked = []
    baseline = draw_sample((-1, 3), trainable=False)
    pending = Sample(prompt="x", index=1)
    edited = await ProximalRecomputer(record_score(asked)).add_proximal_log_probs([baseline, pending], 4)
    assert asked == []
    assert edited[0].segment_log_probs == baseline.rollout_log_probs
    assert edited[1] == pending


async def test_everything_that_waits_is_done_once_for_each_version():
    asked = []
    recomputer = ProximalRecomputer(record_score(asked))
    holder = Holder([draw_sample((-1, 3, 4), index=0), draw_sample((-1, 2, 3), index=1, status=Status.ABORTED, reward=None)])
    assert await recomputer.recompute_all(holder, 4) == 2
    assert [sample.segment_versions for sample in holder.samples] == [(-1, 4, -1), (-1, -1, 4)]
    late = draw_sample((-1, 3), index=2)
    holder.samples = (*holder.samples, late)
    assert await recomputer.recompute_all(holder, 4) == 0  # between two syncs: nobody holds version 4 any more
    assert holder.samples[-1] == late
    assert await recomputer.recompute_all(holder, 5) == 1
    assert holder.samples[0].segment_versions == (-1, 4, 5)


async def test_a_failed_pass_edits_nothing_and_may_be_repeated():
    async def fail(samples: Sequence[Sample], version: int) -> list[list[float]]:
        raise EngineError("no")

    asked = []
    holder = Holder([draw_sample((-1, 3))])
    before = holder.samples
    recomputer = ProximalRecomputer(fail)
    with pytest.raises(EngineError, match="no"):
        await recomputer.recompute_all(holder, 4)
    assert holder.samples == before
    recomputer._score = record_score(asked)
    assert await recomputer.recompute_all(holder, 4) == 1


@pytest.mark.parametrize("versions", [None, (-1, 3, -1)])
async def test_an_engine_without_versions_is_refused(versions: tuple[int, ...] | None):
    sample = replace(draw_sample((-1, 3, 3)), weight_versions=versions)
    with pytest.raises(DataError, match=r"sample 0 .* use an engine that reports versions .* or set segment_wise"):
        await ProximalRecomputer(record_score([])).add_proximal_log_probs([sample], 4)
    other = draw_sample((-1, 3, 3), index=1)
    batch = collate_samples([sample, replace(other, weight_versions=versions)])
    with pytest.raises(DataError, match=r"weight.version"):
        await train_on_rollouts(FakeBackend(), batch, decoupled(grpo(), segment_wise=True), plan=UpdatePlan(current_version=3.0))


# the model to ask


def brute_force(model: torch.nn.Module, sample: Sample) -> list[float]:
    found = []
    for start, end in pairwise((0, *sample.context_starts, len(sample.tokens))):
        tokens = sample.tokens[start:end]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float() / sample.temperature
        own = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(tokens[1:], dtype=torch.int64)[:, None])[:, 0]
        found += [0.0, *own.tolist()]
    return found


def make_resident() -> list[Sample]:
    shapes = [(-1, -1, 3, 4), (-1, 4, 4, 4, 5), (-1, 4), (-1, 5, 5), (-1, -1, -1, 4, 4, 5, 5)]
    starts = {
        5: (2, 5),
        6: (3,),
        7: (2,),
    }  # contexts: the first token of one is predicted by nothing; the last sample ends before its second
    shapes += [(-1, 4, -1, 4, 4, -1, -1, 4, 5), (-1, -1, 3, -1, -1, 4), (-1, 4, -1, 5)]
    temperatures = {1: 0.5, 5: 0.5}
    return [
        draw_sample(shape, index=i, temperature=temperatures.get(i, 1.0), context_starts=starts.get(i, ()))
        for i, shape in enumerate(shapes)
    ]


async def test_the_first_token_of_a_context_has_no_log_prob_to_recompute():
    sample = draw_sample((-1, 4, 4, 4), context_starts=(2,))
    (edited,) = await ProximalRecomputer(record_score([])).add_proximal_log_probs([sample], 5)
    assert edited.segment_versions == (-1, 5, -1, 5)
    assert find_missed_tokens(sample, 6) == (1, 3)
    assert edited.context_starts == (2,)


async def check_against_brute_force(recomputer: ProximalRecomputer, model: torch.nn.Module) -> None:
    samples = make_resident()
    for before, after in zip(samples, await recomputer.add_proximal_log_probs(samples, 5), strict=True):
        expected = brute_force(model, before)
        for t, version in enumerate(before.weight_versions or ()):
            wanted = expected[t] if version == 4 else (before.rollout_log_probs or ())[t]
            assert after.segment_log_probs is not None
            assert after.segment_log_probs[t] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [10_000, 5])
async def test_the_trainer_gives_its_own_log_probs(max_tokens: int):
    model = create_tiny_model(seed=3)
    backend = create_pytorch_backend(create_tiny_model(seed=3), lr=1e-2)
    await check_against_brute_force(ProximalRecomputer(score_with_trainer(backend, max_tokens_per_microbatch=max_tokens)), model)


async def test_engines_give_the_same():
    engines = [InProcessEngine(create_tiny_model(seed=3), weight_version=5, name=f"engine {i}") for i in range(2)]
    await check_against_brute_force(ProximalRecomputer(score_with_engines(engines, max_requests=1)), create_tiny_model(seed=3))


async def test_engines_of_another_version_are_refused():
    engine = InProcessEngine(create_tiny_model(), weight_version=4, name="engine 7")
    with pytest.raises(EngineError, match=r"engine 7 holds weight version 4, but log-probs under version 5"):
        await ProximalRecomputer(score_with_engines([engine])).add_proximal_log_probs(make_resident(), 5)


async def test_an_update_while_engines_score_is_noticed():
    class Updated(InProcessEngine):
        async def recompute_output_log_probs(self, input_tokens, start_index, temperature=1.0):
            self._weight_version += 1
            return await super().recompute_output_log_probs(input_tokens, start_index, temperature)

    recomputer = ProximalRecomputer(score_with_engines([Updated(create_tiny_model(), weight_version=5)]))
    with pytest.raises(EngineError, match="holds weight version"):
        await recomputer.add_proximal_log_probs(make_resident(), 5)


def test_engines_that_cannot_score_are_refused_beforehand():
    with pytest.raises(ConfigError, match=r"engine lacks the feature scores .* score_with_trainer"):
        score_with_engines([FakeEngine()])
    with pytest.raises(ConfigError, match="no engines"):
        score_with_engines([])


# a trainer between two syncs


async def test_between_two_syncs_the_trainer_says_nothing_about_a_version():
    """sync_every = 2: after its second update the trainer is at no version, and a token that comes late then is a missed one."""
    backend = create_pytorch_backend(create_tiny_model(seed=3), lr=1e-2)
    recomputer = ProximalRecomputer(score_with_trainer(backend))
    holder = Holder([draw_sample((-1, 4, 5), index=0), draw_sample((-1, 5, 5), index=1)])
    assert await recomputer.recompute_all(holder, 5) == 1
    await train_on_rollouts(
        backend, collate_samples(holder.samples), decoupled(grpo(), segment_wise=True), plan=UpdatePlan(current_version=5.0)
    )
    late = draw_sample((-1, 4, 4), index=2)
    holder.samples = (late, draw_sample((-1, 5), index=3))
    assert await recomputer.recompute_all(holder, 5) == 0
    assert holder.samples[0] == late
    assert find_missed_tokens(late, 5) == (1, 2)
    batch = replace(collate_samples(holder.samples), policy_versions=torch.full((2,), 5.5))
    assert find_missed(batch).tolist() == [[False, True, True], [False, False, False]]
    # a run that goes on here begins with the engines' version, and does not take the trainer for it either
    assert await ProximalRecomputer(score_with_trainer(backend), last_version=5).recompute_all(holder, 5) == 0


# what a loss makes of it


async def train(algorithm, samples: Sequence[Sample], current_version: float | None) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    backend = create_pytorch_backend(create_tiny_model(seed=3), lr=1e-2)
    metrics = await train_on_rollouts(backend, collate_samples(samples), algorithm, plan=UpdatePlan(current_version=current_version))
    return metrics, dict(await backend.get_weights().result())


def with_honest_log_probs(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """rollout_log_probs of another model, so that ratios are not absurd."""
    model = create_tiny_model(seed=seed)
    return [
        replace(s, rollout_log_probs=tuple(x * (m > 0) for x, m in zip(brute_force(model, s), s.loss_mask, strict=True))) for s in samples
    ]


async def test_where_all_tokens_are_of_the_version_that_trains_every_weight_is_1():
    samples = with_honest_log_probs([draw_sample((-1, 5, 5, 5), index=i) for i in range(4)], seed=4)
    metrics, weights = await train(decoupled(grpo(), cap=1.01, floor=0.99, segment_wise=True), samples, 5.0)
    assert metrics["importance_weight"] == metrics["max_importance_weight"] == 1.0
    _, expected = await train(recomputed(grpo()), samples, 5.0)
    for name, value in expected.items():
        assert torch.equal(weights[name], value)


async def test_missed_tokens_weigh_1_or_as_the_proximal_policy_says():
    samples = with_honest_log_probs([draw_sample((-1, 2, 2, 2), index=i) for i in range(4)], seed=4)
    one, _ = await train(decoupled(grpo(), cap=None, segment_wise=True), samples, 5.0)
    assert one["importance_weight"] == 1.0
    proximal, found = await train(decoupled(grpo(), cap=None, segment_wise=True, missed_as_proximal=True), samples, 5.0)
    plain, expected = await train(decoupled(grpo(), cap=None), samples, 5.0)
    assert proximal["importance_weight"] == plain["importance_weight"] != 1.0
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("algorithm", [grpo(), decoupled(grpo()), recomputed(grpo())], ids=["grpo", "decoupled", "recomputed"])
async def test_with_the_switch_off_versions_and_segments_change_no_bit(algorithm):
    samples = with_honest_log_probs([draw_sample((-1, 4, 5, 5), index=i) for i in range(4)], seed=4)
    metrics, weights = await train(algorithm, samples, None)
    with_version, expected = await train(algorithm, samples, 5.0)
    assert metrics == with_version
    segments = await ProximalRecomputer(record_score([])).add_proximal_log_probs(samples, 5)
    with_segments, other = await train(algorithm, segments, 5.0)
    assert metrics == with_segments
    for name, value in weights.items():
        assert torch.equal(expected[name], value)
        assert torch.equal(other[name], value)


async def test_an_algorithm_that_looks_at_ages_needs_the_version():
    samples = [draw_sample((-1, 4, 5), index=i) for i in range(2)]
    with pytest.raises(ConfigError, match="pass current_version="):
        await train(decoupled(grpo(), segment_wise=True, missed_as_proximal=True), samples, None)
    with pytest.raises(ConfigError, match="segment_wise is False"):
        decoupled(grpo(), missed_as_proximal=True)


async def test_a_run_gets_a_recomputer_where_the_switch_is_on():
    backend, on = FakeBackend(), AsyncConfig(enable_segment_wise_ppo=True)
    assert create_proximal_recomputer(AsyncConfig(), backend) is None
    for num_steps, tokens in ((0, 1), (10, 1), (11, 0)):  # after 11 steps the trainer is ahead of version 5
        recomputer = create_proximal_recomputer(on, backend, num_steps=num_steps, sync_every=2)
        assert recomputer is not None
        assert await recomputer.recompute_all(Holder([draw_sample((-1, 4, 5))]), 5) == tokens


EVENTS = st.one_of(
    st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("bump"), st.booleans(), st.just(0)),
    st.tuples(st.just("again"), st.just(False), st.just(0)),
)


@given(events=st.lists(EVENTS, max_size=20))
def test_any_history_gives_what_a_naive_record_of_it_says(events: list[tuple[str, int, int]]):
    """Samples grow under changing versions; some syncs recompute and some do not. The record keeps a dict for each token."""
    records: list[list[dict[str, int | None]]] = [[], [], []]
    holder = Holder([draw_sample((-1,), index=i, status=Status.ABORTED, reward=None) for i in range(3)])
    recomputer = ProximalRecomputer(record_score([]))
    version = 0

    def grow(which: int, count: int) -> None:
        old = holder.samples[which]
        completion = Completion(
            request_id="x",
            input_tokens=old.tokens,
            output_tokens=(5,) * count,
            output_log_probs=tuple(-float(t) for t in range(len(old.tokens), len(old.tokens) + count)),
            output_versions=(version,) * count,
            finish_reason="abort",
        )
        new = completion_to_sample(old, old.tokens[:1], completion, "")
        holder.samples = (*holder.samples[:which], new, *holder.samples[which + 1 :])
        records[which].extend({"version": version, "under": None} for _ in range(count))

    def recompute() -> int:
        return trio.run(recomputer.recompute_all, holder, version)

    done = -1
    for kind, choice, count in events:
        if kind == "grow":
            grow(choice, count)
            continue
        if kind == "bump":
            version += 1
        if kind == "bump" and not choice:
            continue
        due = [token for record in records for token in record if token["version"] == version - 1 and version > done]
        assert recompute() == len(due)
        for token in due:
            token["under"] = version
        done = max(done, version)

    for sample, record in zip(holder.samples, records, strict=True):
        segments = start_segments(sample)
        assert segments.segment_log_probs is not None
        under = [-1 if token["under"] is None else token["under"] for token in record]
        assert segments.segment_versions == (-1, *under)
        expected = [-float(t) if v == -1 else -10.0 * v - t for t, v in enumerate(under, start=1)]
        assert list(segments.segment_log_probs[1:]) == expected
        missed = [t for t, token in enumerate(record, start=1) if token["version"] < version and token["under"] is None]
        assert find_missed_tokens(sample, version) == tuple(missed)
