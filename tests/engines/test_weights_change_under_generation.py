"""Three weight versions in one response, in the three ways that an engine can get new weights under running requests.

    recompute   swapped between two decode steps; keys and values of running sequences computed again under the new weights
    keep        swapped between two decode steps; keys and values kept
    interrupt   requests aborted, and continued under the new weights from prompt + tokens

What is promised of each token: the version that sampled it is right, and rollout_log_probs is the log-prob of the distribution that it was
drawn from. Under recompute and interrupt that distribution is the policy of exactly that version, which any pass over the tokens with the
saved weights gives again. Under keep it is not: the new weights read keys and values that the old ones wrote, so it is the policy of no
version, and only decoding again with the same history of caches gives its number. The proximal log-prob of a token is a pass over its
tokens with the weights of the version after its own, in all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache

import pytest
import torch
import trio
import trio.testing

from rollouts.algorithms.corrections import anchor_to_proximal
from rollouts.algorithms.presets import decoupled, grpo
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.asynchronous.recompute import ProximalRecomputer, score_with_engines, score_with_trainer
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.data.segments import find_missed_tokens, start_segments
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.generation.single_turn import GroupSettings, generate_group
from rollouts.generation.workflows import RLVRWorkflow, create_workflow_generate_fn
from rollouts.models.forward.output_layers import find_cache_name
from rollouts.testing import create_tiny_model
from rollouts.types import Group, Prompt, RolloutBatch, Sample, SamplingParams, Status

PAUSES = (5, 12)  # decode steps after which the weights change: versions 0, 1 and 2 sample 5, 7 and the other tokens
PARAMS = SamplingParams(max_tokens=20, temperature=0.8)
PROMPT = Prompt(content="3 1 2 >", index=4, metadata={"answer": "1 2 3"})
N = 3
WAYS = ("recompute", "keep", "interrupt")


class PausingEngine(InProcessEngine):
    """Stands still after certain decode steps until whoever waits for that has asked for the model."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_steps = 0
        self.reached = {steps: trio.Event() for steps in PAUSES}

    async def _run_step(self) -> bool:
        finished = await super()._run_step()
        self.num_steps += 1
        if self.num_steps in self.reached:
            self.reached[self.num_steps].set()
            await trio.testing.wait_all_tasks_blocked()  # the lock of the model is fair: an update is next
        return finished


@cache
def weights_of(version: int) -> dict[str, torch.Tensor]:
    return dict(create_tiny_model(seed=version).state_dict())


def create_engine(kv_cache_on_update: str = "recompute") -> PausingEngine:
    return PausingEngine(create_tiny_model(seed=0), create_char_tokenizer(), eos_token_ids=(), kv_cache_on_update=kv_cache_on_update)


async def generate_over_updates(kv_cache_on_update: str) -> Group:
    """The weights are swapped under the running requests."""
    groups: list[Group] = []
    async with create_engine(kv_cache_on_update) as engine, trio.open_nursery() as nursery:

        async def generate() -> None:
            groups.append(await generate_group(engine, create_char_tokenizer(), PROMPT, N, PARAMS, settings=GroupSettings(seed=7)))

        nursery.start_soon(generate)
        for version, steps in enumerate(PAUSES, start=1):
            with trio.fail_after(30):
                await engine.reached[steps].wait()
            await engine.update_weights(weights_of(version), version)
    return groups[0]


async def generate_with_interruptions(recomputer: ProximalRecomputer | None = None) -> Group:
    """The requests are aborted, their tokens get segment log-probs under the new weights (with a recomputer), and they go on."""
    group: Group = ()
    async with create_engine() as engine:

        async def generate() -> None:
            nonlocal group
            group = await generate_group(engine, create_char_tokenizer(), PROMPT, N, PARAMS, settings=GroupSettings(seed=7), partial=group)

        for version, steps in enumerate(PAUSES, start=1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate)
                with trio.fail_after(30):
                    await engine.reached[steps].wait()
                await engine.abort()
            assert {sample.status for sample in group} == {Status.ABORTED}
            await engine.update_weights(weights_of(version), version)
            if recomputer is not None:
                group = await recomputer.add_proximal_log_probs(group, version)
        await generate()
    return group


async def generate_in(way: str) -> Group:
    return await (generate_with_interruptions() if way == "interrupt" else generate_over_updates(way))


@cache
def model_of(version: int) -> torch.nn.Module:
    return create_tiny_model(seed=version)


def brute_force(sample: Sample, version: int) -> list[float]:
    """Log-probs of all tokens in one pass over them with the weights of a version."""
    with torch.no_grad():
        logits = model_of(version)(torch.tensor([sample.tokens])).logits[0] / sample.temperature
    own = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
    return [0.0, *own.tolist()]


def decode_with_kept_cache(sample: Sample) -> list[float]:
    """Token by token, each with the weights of its own version, over keys and values as they were written."""
    versions, tokens = sample.weight_versions or (), sample.tokens
    start = sum(version < 0 for version in versions)
    out, cache_ = [0.0] * start, None
    name = find_cache_name(model_of(versions[-1]))
    begin = 0
    for place in range(start, len(tokens)):
        with torch.no_grad():
            answer = model_of(versions[place])(torch.tensor([tokens[begin:place]]), use_cache=True, **{name: cache_})
        cache_, begin = getattr(answer, name), place
        out.append(float((answer.logits[0, -1] / sample.temperature).log_softmax(-1)[tokens[place]]))
    return out


def pick_by_version(sample: Sample, ahead: int = 0) -> list[float]:
    """Return each token's log-prob in a pass with the weights of its version (or `ahead` later); 0 for the prompt."""
    versions = sample.weight_versions or ()
    passes = {version: brute_force(sample, version + ahead) for version in set(versions) if version >= 0}
    return [passes[version][place] if version >= 0 else 0.0 for place, version in enumerate(versions)]


def create_trainer(version: int):
    return score_with_trainer(create_pytorch_backend(create_tiny_model(seed=version), lr=1e-3))


async def recompute_all_versions(group: Group) -> Group:
    """Recompute as if the sample, with all of its tokens, had existed at each sync up to version 3."""
    for version in (1, 2, 3):
        group = await ProximalRecomputer(create_trainer(version)).add_proximal_log_probs(group, version)
    return group


@pytest.mark.parametrize("way", WAYS)
async def test_each_token_has_the_version_that_sampled_it_and_its_log_prob_under_it(way: str):
    group = await generate_in(way)
    assert len(group) == N
    for sample in group:
        start = sum(version < 0 for version in sample.weight_versions or ())
        # a step is one token of each request; a request that goes on has its first token from the pass over its prompt
        assert sample.weight_versions == (-1,) * start + (0,) * 5 + (1,) * 7 + (2,) * 8
        assert sample.loss_mask == (0.0,) * start + (1.0,) * 20
        expected = decode_with_kept_cache(sample) if way == "keep" else pick_by_version(sample)
        assert sample.rollout_log_probs == pytest.approx(expected, abs=1e-5)


async def test_kept_keys_and_values_are_the_policy_of_no_version():
    group = await generate_in("keep")
    for sample in group:
        start = sum(version < 0 for version in sample.weight_versions or ())
        found, expected = sample.rollout_log_probs or (), pick_by_version(sample)
        assert found[: start + 5] == pytest.approx(expected[: start + 5], abs=1e-5)
        assert max(abs(a - b) for a, b in zip(found[start + 5 :], expected[start + 5 :], strict=True)) > 1e-2


@pytest.mark.parametrize("way", WAYS)
async def test_the_proximal_log_prob_of_each_token_is_that_of_the_version_after_its_own(way: str):
    for sample in await recompute_all_versions(await generate_in(way)):
        versions = sample.weight_versions or ()
        assert sample.segment_log_probs == pytest.approx(pick_by_version(sample, ahead=1), abs=1e-5)
        assert sample.segment_versions == tuple(version + 1 if version >= 0 else -1 for version in versions)
        assert sample.recompute_version == 3
        assert find_missed_tokens(sample, 3) == ()


@pytest.mark.parametrize("scorer", ["trainer", "engine"])
async def test_interrupted_requests_get_them_at_each_sync(scorer: str):
    """Recompute as the loop does: version by version, on the tokens so far; those of the last version keep their own log-probs."""

    async def score(samples: Sequence[Sample], version: int) -> Sequence[Sequence[float]]:
        if scorer == "trainer":
            return await create_trainer(version)(samples, version)
        async with InProcessEngine(create_tiny_model(seed=version), weight_version=version) as engine:
            return await score_with_engines([engine])(samples, version)

    for sample in await generate_with_interruptions(ProximalRecomputer(score)):
        versions, own = sample.weight_versions or (), sample.rollout_log_probs or ()
        later = pick_by_version(replace(sample, weight_versions=tuple(min(v, 1) for v in versions)), ahead=1)
        expected = [own[place] if version == 2 else later[place] for place, version in enumerate(versions)]
        assert sample.segment_log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.segment_versions == tuple(version + 1 if version in (0, 1) else -1 for version in versions)
        assert find_missed_tokens(sample, 2) == ()
        batch = anchor_to_proximal(
            replace(collate_samples([sample]), prox_log_probs=torch.zeros(1, len(versions))), segment_wise=True, cap=None
        )
        assert batch.importance_weights is not None
        weights = batch.importance_weights[0].tolist()
        for place, version in enumerate(versions):
            if version >= 0:
                assert weights[place] == pytest.approx(
                    1.0 if version == 2 else pow(2.718281828459045, expected[place] - own[place]), rel=1e-4
                )


@pytest.mark.parametrize("way", ["recompute", "keep"])
async def test_tokens_that_were_in_no_hands_at_a_sync_are_counted_as_missed(way: str):
    """Without an interruption the first sync finds nothing: by the second, nobody holds version 1."""
    group = await generate_in(way)
    late = await ProximalRecomputer(create_trainer(2)).add_proximal_log_probs(group, 2)
    for sample in late:
        assert [(sample.weight_versions or ())[place] for place in find_missed_tokens(sample, 2)] == [0] * 5


async def test_the_three_ways_give_samples_of_one_format():
    groups = {way: await generate_in(way) for way in WAYS}
    recomputed, kept, interrupted = (groups[way] for way in WAYS)
    for samples in zip(recomputed, kept, interrupted, strict=True):
        for name in (f.name for f in fields(Sample)):
            values = [getattr(sample, name) for sample in samples]
            assert len({type(value) for value in values}) == 1, name
            if name not in ("tokens", "rollout_log_probs", "response"):  # which differ by what was sampled
                assert values[0] == values[1] == values[2], name
        assert all(Sample.from_dict(sample.to_dict()) == sample for sample in samples)
    batch = collate_samples([sample for group in groups.values() for sample in group])
    assert batch.tokens.shape == (3 * N, len(recomputed[0].tokens))
    assert all(start_segments(sample).segment_versions == (-1,) * len(sample.tokens) for sample in interrupted)


class RememberingEngine(InProcessEngine):
    """Keeps the weights of every version that it was given."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.known = {0: weights_of(0)}

    async def update_weights(self, weights, weight_version):
        self.known[weight_version] = {name: value.clone() for name, value in weights.items()}  # the trainer's own change
        return await super().update_weights(weights, weight_version)


@pytest.mark.parametrize("sync_every", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_run_trains_on_what_it_says(sync_every: int):
    """The whole loop, with trainer and engine at the same time: whatever overlapped, each number is that of the version it names."""
    tokenizer = create_char_tokenizer()
    model = create_tiny_model(seed=0)
    engine = RememberingEngine(create_tiny_model(seed=0), tokenizer, eos_token_ids=(), max_slots=6)
    buffer = DataBuffer([f"{i} {i + 1} >" for i in range(20)])
    rollout = RolloutConfig(
        batch_size=2,
        n_samples_per_prompt=2,
        generate_fn=create_workflow_generate_fn(
            RLVRWorkflow(lambda prompt, text, prompt_ids, ids, **data: float(sum(ids) % 3), SamplingParams(max_tokens=24), tokenizer),
            [engine],
        ),
        segment_log_probs=True,
    )
    asynchronous = AsyncConfig(enabled=True, max_staleness=2, enable_segment_wise_ppo=True, patience_s=60.0)
    config = RLTrainingConfig(
        num_steps=6, sync_every=sync_every, weight_sync="memory", algorithm=decoupled(grpo(), segment_wise=True, missed_as_proximal=True)
    )
    batches: list[tuple[int, RolloutBatch]] = []
    async with (
        engine,
        create_workflow_executor(buffer, rollout, asynchronous, engines=[engine], batches_per_version=sync_every) as executor,
    ):
        history = await run_async_rl_training(
            create_pytorch_backend(model, lr=3e-2),
            buffer,
            executor,
            [engine],
            config,
            on_rollouts=lambda step, batch: batches.append(((step - 1) // sync_every, batch)),
        )

    @cache
    def known_model(version: int) -> torch.nn.Module:
        fresh = create_tiny_model(seed=0)
        fresh.load_state_dict(engine.known[version], strict=False)
        return fresh

    def check(sample: Sample, place: int, version: int, found: float) -> None:
        with torch.no_grad():
            logits = known_model(version)(torch.tensor([sample.tokens[:place]])).logits[0, -1]
        assert found == pytest.approx(float(logits.log_softmax(-1)[sample.tokens[place]]), abs=1e-5)

    ages, num_computed, prompts = [], 0, []
    for current, batch in batches:
        prompts += sorted({sample.group_index for sample in batch.samples})
        for sample in batch.samples:
            assert find_missed_tokens(sample, current) == ()
            segments = start_segments(sample)
            assert segments.segment_versions is not None
            assert segments.segment_log_probs is not None
            for place, version in enumerate(sample.weight_versions or ()):
                if version < 0:
                    continue
                ages.append(current - version)
                check(sample, place, version, (sample.rollout_log_probs or ())[place])
                assert segments.segment_versions[place] == (version + 1 if version < current else -1)
                if version < current:
                    num_computed += 1
                    check(sample, place, version + 1, segments.segment_log_probs[place])
    assert min(ages) >= 0
    assert max(ages) <= 2
    assert num_computed > 0
    assert len(prompts) == len(set(prompts)) == 2 * config.num_steps
    assert all(line["num_missed_tokens"] == 0 for line in history)
    assert sum(line.get("num_segment_tokens", 0.0) for line in history) >= num_computed
