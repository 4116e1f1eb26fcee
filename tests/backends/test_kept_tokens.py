"""Sets that top-p, top-k and min-p left reach the trainer, whose log-probs run over them; engine and trainer then agree."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.samples import split_turns
from rollouts.agents.setting import EpisodeSetting
from rollouts.algorithms.presets import grpo
from rollouts.backends.factory import create_pytorch_backend, create_reference_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.backends.ranks.values import dump_value, load_value
from rollouts.batches import plan_microbatches, select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.transcript import Transcript, append_given, append_sampled, find_kept
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.preference_pairs import collate_pairs, rank_rollouts
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.requests import join_parts, keep_tokens
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.sampling import truncate_logits
from rollouts.engines.protocol import with_kept_tokens
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import DataError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn, generate_group
from rollouts.rl_loop import run_rl_training
from rollouts.sft_loop import evaluate_sft
from rollouts.testing import FakeEngine, create_tiny_model, script_answer
from rollouts.training.requirements import check_sampled_whole
from rollouts.types import Completion, KeptTokens, Prompt, Sample, SamplingParams, TrainBatch

TOKENIZER = create_char_tokenizer()
CUTS = ({"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.4}, {"top_p": 0.9, "top_k": 20, "min_p": 0.05})
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, seed=3)


def create_model():
    """A random model with uneven distributions, of which a cut leaves few tokens."""
    model = create_tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)
    return model


class Count:
    """Ends after three actions."""

    def reset(self, config: EnvironmentConfig):
        self.left = 3
        return "3 left."

    def step(self, action):
        self.left -= 1
        return f"{self.left} left.", 0.5, self.left <= 0, {}

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return "count."

    def close(self):
        pass


def create_engine(model) -> InProcessEngine:
    return InProcessEngine(copy.deepcopy(model), TOKENIZER, eos_token_ids=[])


async def sample_some(model, params: SamplingParams = PARAMS, num: int = 6) -> list[Sample]:
    async with create_engine(model) as engine:
        params = with_kept_tokens(params, engine)
        samples: list[Sample] = []
        for i in range(num):
            found = await engine.generate((3 + i, 4, 5)[: 1 + i % 3], params.new(seed=i, max_tokens=3 + 2 * i))
            samples.append(completion_to_sample(Sample(index=i, group_index=i // 2), found.input_tokens, found, ""))
    return [replace(sample, reward=float(i % 2)) for i, sample in enumerate(samples)]


def log_probs_of(backend, batch: TrainBatch) -> torch.Tensor:
    return backend.forward(batch, lambda outputs: outputs.log_probs).value


def sets_of(kept: KeptTokens) -> list[list[int]]:
    return [_read(kept.cut(i, i + 1)) for i in range(len(kept))]


def _read(kept: KeptTokens) -> list[int]:
    return torch.frombuffer(bytearray(kept.data), dtype=torch.int32).tolist() if kept.data else []


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_the_engine_records_the_sets_that_the_models_own_logits_leave(cut: dict[str, float]):
    model = create_model()
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=2, **cut)
    async with create_engine(model) as engine:
        found = await engine.generate((3, 4), with_kept_tokens(params, engine))
        unasked = await engine.generate((3, 4), params)
        greedy = await engine.generate((3, 4), params.new(kept_tokens=True, greedy=True))
    assert unasked.output_tokens == found.output_tokens
    assert (unasked.kept_tokens, greedy.kept_tokens) == (None, None)
    tokens = torch.tensor([found.input_tokens + found.output_tokens])
    with torch.no_grad():
        whole = model(tokens).logits[0, 1:-1] / 0.7
    limits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    left = truncate_logits(whole, **{name: torch.tensor([limit] * len(whole)) for name, limit in limits.items()})
    assert found.kept_tokens is not None
    assert sets_of(found.kept_tokens) == [row.isfinite().nonzero()[:, 0].tolist() for row in left]
    assert 1 < max(found.kept_tokens.counts) < 60


@pytest.mark.parametrize("kind", ["pytorch", "functional", "fsdp"])
async def test_log_probs_and_gradients_of_a_trainer_run_over_the_recorded_sets(kind: str):
    model = create_model()
    samples = await sample_some(model)
    batch = replace(collate_samples(samples), dropout=False)
    create = {
        "pytorch": lambda: create_pytorch_backend(copy.deepcopy(model), lr=1e-3),
        "functional": lambda: create_torch_func_backend(copy.deepcopy(model), lr=1e-3),
        "fsdp": lambda: create_fsdp_backend(copy.deepcopy(model), lr=1e-3),
    }[kind]
    backend = create()
    found = log_probs_of(backend, batch)
    assert batch.rollout_log_probs is not None and batch.temperatures is not None and batch.kept is not None
    torch.testing.assert_close(found * batch.loss_mask, batch.rollout_log_probs, atol=2e-5, rtol=0)
    whole = log_probs_of(backend, replace(batch, kept=None))
    assert float(((whole - found) * batch.loss_mask).abs().max()) > 0.1, "the sets leave out something"
    seen: list[torch.Tensor] = []

    def loss(outputs, part: TrainBatch):
        seen.append(outputs.log_probs.detach())
        return -(outputs.log_probs * part.loss_mask).sum(), {}

    total = backend.forward_backward(batch, loss).value
    own = copy.deepcopy(model)
    expected = torch.zeros(())
    for sample in samples:
        assert sample.kept_tokens is not None
        tokens = torch.tensor(sample.tokens)
        logits = own(tokens[None]).logits[0] / sample.temperature
        for t, ids in enumerate(sets_of(sample.kept_tokens)):
            if ids:
                expected = expected - logits[t - 1, ids].log_softmax(0)[ids.index(sample.tokens[t])]
    assert total["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None]).norm()
    assert backend.optim_step().value["grad_norm"] == pytest.approx(float(wanted), rel=1e-4)


async def test_a_part_of_a_batch_has_the_sets_of_its_rows_alone():
    model = create_model()
    samples = await sample_some(model)
    batch = collate_samples(samples)
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    whole = log_probs_of(backend, batch)
    assert batch.kept is not None
    for rows in [*plan_microbatches(batch.lengths.tolist(), max_tokens=20), [4, 0]]:
        part = select_rows(batch, rows)
        assert part.kept is not None
        assert len(part.kept.ids) == sum(sum(max(0, count) for count in samples[row].kept_tokens.counts) for row in rows)
        torch.testing.assert_close(log_probs_of(backend, part), whole[rows, : part.tokens.shape[1]], atol=1e-6, rtol=0)
        sent = load_value(dump_value(part, names=True), names=True)
        assert torch.equal(sent.kept.ids, part.kept.ids) and torch.equal(sent.kept.counts, part.kept.counts)
    mixed = collate_samples([samples[0], replace(samples[1], kept_tokens=None, truncated_sampling=False)])
    assert mixed.kept is not None and not mixed.kept.counts[1].any()


async def test_a_set_without_its_token_is_refused_by_name():
    sample = (await sample_some(create_model(), num=2))[1]
    tokens = (*sample.tokens[:-1], next(i for i in range(60) if i not in _read(sample.kept_tokens.cut(len(sample.tokens) - 1, 99))))
    with pytest.raises(DataError, match=rf"sample 1 .*token {len(tokens) - 1} is {tokens[-1]}, which is not in the set"):
        collate_samples([replace(sample, tokens=tokens)])
    with pytest.raises(AssertionError, match="kept_tokens has 1 entries"):
        replace(sample, kept_tokens=KeptTokens.whole(1))
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


async def test_parts_of_an_answer_keep_the_sets_of_each():
    model = create_model()
    async with create_engine(model) as engine:
        params = with_kept_tokens(PARAMS.new(max_tokens=5), engine)
        first = await engine.generate((3, 4), params)
        rest = await engine.generate(first.input_tokens + first.output_tokens, params.new(seed=9))
    assert first.kept_tokens is not None and rest.kept_tokens is not None
    joined = join_parts(first, rest)
    assert joined.kept_tokens == first.kept_tokens + rest.kept_tokens
    assert sets_of(joined.kept_tokens) == sets_of(first.kept_tokens) + sets_of(rest.kept_tokens)
    assert keep_tokens(joined, 5).kept_tokens == first.kept_tokens
    half = completion_to_sample(Sample(), (3, 4), replace(first, finish_reason="abort"), "x")
    whole = completion_to_sample(half, (3, 4), rest, "xy")
    assert whole.kept_tokens == KeptTokens.undrawn(2) + joined.kept_tokens
    lost = completion_to_sample(half, (3, 4), replace(rest, kept_tokens=None), "xy")
    assert lost.kept_tokens is None, "a record of some of the drawn tokens is none"
    plain = replace(first, kept_tokens=None, truncated_sampling=False, finish_reason="abort")
    mixed = completion_to_sample(completion_to_sample(Sample(), (3, 4), plain, "x"), (3, 4), rest, "xy")
    assert mixed.kept_tokens == KeptTokens.undrawn(2) + KeptTokens.whole(5) + rest.kept_tokens
    check_sampled_whole((mixed,), grpo())
    by_hand = completion_to_sample(Sample(), rest.input_tokens, rest, "xy")  # whose first part is made trainable without its sets
    by_hand = replace(by_hand, loss_mask=(0.0, 0.0, *(1.0,) * (len(by_hand.tokens) - 2)))
    with pytest.raises(DataError, match="did not record the sets"):
        check_sampled_whole((by_hand,), grpo())


async def test_sets_are_asked_for_where_an_engine_records_them_and_groups_of_a_fleet_have_them():
    model = create_model()
    async with create_engine(model) as a, create_engine(model) as b, EngineFleet([a, b]) as fleet:
        group = await generate_group(fleet, TOKENIZER, Prompt(content="1+1="), 3, PARAMS)
        assert all(sample.kept_tokens is not None and max(sample.kept_tokens.counts) > 1 for sample in group)
    whole = await _generate_whole(model)
    assert all(sample.kept_tokens is None for sample in whole)
    engine = FakeEngine(script_answer(range(3, 9)))
    async with EngineFleet([engine]) as fleet:
        assert with_kept_tokens(PARAMS, fleet) == PARAMS
        (sample,) = await generate_group(fleet, TOKENIZER, Prompt(content="1+1="), 1, PARAMS)
    assert (sample.kept_tokens, sample.truncated_sampling) == (None, True)


async def _generate_whole(model):
    async with create_engine(model) as engine:
        return await generate_group(engine, TOKENIZER, Prompt(content="1+1="), 2, PARAMS.new(top_p=1.0))


async def test_episodes_keep_the_sets_of_their_actions():
    model = create_model()
    async with create_engine(model) as engine:
        policy = EngineAgentPolicy(engine, TOKENIZER, PARAMS.new(max_tokens=4))
        setting = EpisodeSetting(environment_factory=Count, config=EpisodeConfig(max_turns=3), seed=1)
        sample = (await run_episode(policy, setting, Prompt(content=""))).sample
    assert sample.kept_tokens is not None and sample.turns is not None and len(sample.turns) > 1
    drawn = [count >= 0 for count in sample.kept_tokens.counts]
    assert drawn == [mask > 0 for mask in sample.loss_mask]
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    for row in (replace(sample, reward=1.0), *split_turns(replace(sample, reward=1.0))):
        batch = collate_samples([row])
        assert batch.rollout_log_probs is not None
        found = log_probs_of(backend, batch) * batch.loss_mask
        torch.testing.assert_close(found, batch.rollout_log_probs * batch.loss_mask, atol=2e-5, rtol=0)


async def test_likelihoods_of_supervised_training_and_preferences_are_those_of_all_tokens():
    model = create_model()
    samples = await sample_some(model)
    plain = [replace(sample, kept_tokens=None) for sample in samples]
    losses = [(await evaluate_sft(create_pytorch_backend(copy.deepcopy(model), lr=1e-3), some))["eval_loss"] for some in (samples, plain)]
    assert losses[0] == losses[1]
    batch = collate_pairs(rank_rollouts([replace(sample, reward=float(i)) for i, sample in enumerate(samples)]))
    assert batch.kept is None


async def test_an_episode_whose_policy_cuts_in_one_action_alone_keeps_its_sets():
    model = create_model()
    transcript = append_given(Transcript(), (3, 4))
    async with create_engine(model) as engine:
        for params in (PARAMS.new(top_p=1.0), PARAMS):
            found = await engine.generate(transcript.tokens, with_kept_tokens(params, engine))
            kept = find_kept(found.kept_tokens, found.output_len, is_cut=found.truncated_sampling)
            drawn = (found.output_tokens, found.output_log_probs, found.output_versions)
            transcript = append_sampled(transcript, *drawn, None, kept, text="x")
            transcript = append_given(transcript, (5,))
    assert transcript.kept_tokens is not None and transcript.kept_tokens.cuts
    signs = [min(max(count, -1), 1) for count in transcript.kept_tokens.counts]
    assert signs == [-1] * 2 + [0] * 12 + [-1] + [1] * 12 + [-1]


async def test_grpo_on_cut_samples_begins_at_a_ratio_of_one_and_without_the_sets_is_refused():
    model = create_model()
    engine = create_engine(model)
    ratios: list[float] = []

    def loss(outputs, batch: TrainBatch):
        ratios.append(float(((outputs.log_probs.detach() - batch.rollout_log_probs) * batch.loss_mask).abs().max()))
        return grpo(kl_coef=0.1).loss(outputs, batch)

    async def run(serving, algorithm):
        generate = create_generate_fn([serving], TOKENIZER, PARAMS, seed=0)
        rollouts = RolloutConfig(batch_size=2, n_samples_per_prompt=4, generate_fn=generate, reward_fn=lambda s: float(len(set(s.tokens))))
        buffer = DataBuffer([Prompt(content=f"{i}+1=", index=i) for i in range(8)], seed=0)
        config = RLTrainingConfig(num_steps=2, algorithm=algorithm, log_every=1, weight_sync="memory")
        return await run_rl_training(
            backend=create_pytorch_backend(copy.deepcopy(model), lr=1e-2),
            data_buffer=buffer,
            rollout_manager=AsyncRolloutManager(buffer, rollouts, engines=[serving]),
            inference_engines=[serving],
            config=config,
            reference=create_reference_backend(copy.deepcopy(model)),
        )

    async with engine:
        history = await run(engine, replace(grpo(kl_coef=0.1), loss=loss))
        assert len(history) == 2 and max(ratios) < 2e-5
    samples = tuple(await sample_some(model, num=2))
    segment_wise = replace(grpo(), requires=frozenset({"segment_log_probs"}))
    with pytest.raises(DataError, match=r"2 of 2 samples .*requires segment_log_probs, which engines compute over the whole"):
        check_sampled_whole(samples, segment_wise)
    check_sampled_whole(samples, grpo())
    with pytest.raises(DataError, match=r"1 of 2 samples \(the first is sample 1\).* the engine did not record the sets"):
        check_sampled_whole((samples[0], replace(samples[1], kept_tokens=None)), grpo())


def test_a_completion_has_a_set_for_each_token():
    with pytest.raises(AssertionError, match="kept_tokens has 1 entries for 2 output tokens"):
        Completion(
            request_id="r", input_tokens=(3,), output_tokens=(4, 5), output_log_probs=(0.0, 0.0), output_versions=(0, 0),
            finish_reason="stop", kept_tokens=KeptTokens.whole(1),
        )  # fmt: skip
    with pytest.raises(AssertionError, match="data has 4 bytes, expected 8"):
        KeptTokens(data=b"\0" * 4, counts=(2,))
