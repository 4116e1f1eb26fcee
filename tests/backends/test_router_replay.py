"""Recorded experts reach the trainer, whose routers choose them; engine and trainer then agree better."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import trio
from chat_templates import QWEN3, create_tokenizer
from expert_models import FAMILIES, create_expert_model, draw_batch, no_loss, read_gradients

from integration.settings.config import Config
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from rollouts.agents.config import EpisodeConfig
from rollouts.agents.conversation import MultiTurnInferenceEngine
from rollouts.agents.policies import AgentAction, EngineAgentPolicy
from rollouts.agents.run import create_episode_generate_fn, run_episode
from rollouts.agents.samples import split_turns
from rollouts.agents.setting import EpisodeSetting
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.algorithms.presets import decoupled, grpo, ppo
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reference_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.batches import select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.collate import collate_samples
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample
from rollouts.engines.fleet.requests import join_parts, keep_tokens
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError, DataError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.models.routers import record_choices
from rollouts.rl_loop import run_rl_training
from rollouts.testing import create_tiny_model
from rollouts.training.requirements import check_recorded_experts
from rollouts.training.steps import require_replay
from rollouts.types import Completion, Prompt, RoutedExperts, Sample, SamplingParams

PACKED_AND_NATIVE = ("qwen3_moe", "gpt_oss")


def choices_of(model, tokens: torch.Tensor, routers) -> torch.Tensor:
    """Experts that transformers' own forward pass chooses for a row: # [n, routers, k]"""
    chosen: list[torch.Tensor] = []
    with torch.no_grad(), record_choices(routers, lambda place, _, experts: chosen.append(experts)):
        model(input_ids=tokens[None], use_cache=False)
    return torch.stack(chosen, 1)


def with_experts(batch, num_routers: int = 3, num_experts: int = 6, seed: int = 1):
    """The batch with experts that no router would choose by itself, two different ones for each token; some tokens have none."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(*batch.tokens.shape, num_routers, num_experts, generator=generator)
    experts = noise.argsort(-1)[..., :2].to(torch.int16)
    experts[:, 3] = -1
    return replace(batch, routed_experts=experts, dropout=False)


def log_probs_of(backend, batch) -> torch.Tensor:
    return backend.forward(batch, lambda outputs: outputs.log_probs).value


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v3"])
def test_a_replay_of_the_models_own_choice_changes_nothing_and_of_others_much(family: str):
    model = create_expert_model(family)
    backend, batch = create_pytorch_backend(model, lr=1e-3), draw_batch()
    routers = backend._options.routers
    own = torch.full((*batch.tokens.shape, len(routers.modules), routers.top_k), -1, dtype=torch.int16)
    fresh = create_expert_model(family)
    places = [name for name, module in model.named_modules() if module in routers.modules]
    fresh_routers = replace(routers, modules=tuple(fresh.get_submodule(name) for name in places))
    for i, n in enumerate(batch.lengths.tolist()):
        own[i, :n] = choices_of(fresh, batch.tokens[i, :n], fresh_routers).to(torch.int16)
    expected = log_probs_of(backend, batch)
    torch.testing.assert_close(log_probs_of(backend, replace(batch, routed_experts=own)), expected, rtol=1e-5, atol=1e-5)
    other = with_experts(batch, len(routers.modules), routers.num_experts)
    assert float((log_probs_of(backend, other) - expected).abs().max()) > 1e-2
    torch.testing.assert_close(log_probs_of(backend, batch), expected, rtol=0, atol=0)


def test_a_record_of_every_decoder_layer_is_read_where_the_routers_are():
    model = create_expert_model("qwen3_moe", mlp_only_layers=[1])
    backend, batch = create_pytorch_backend(model, lr=1e-3), draw_batch()
    routers = backend._options.routers
    assert (routers.layers, routers.num_layers) == ((0, 2), 3)
    own = with_experts(batch, num_routers=2)
    everywhere = torch.zeros(*batch.tokens.shape, 3, 2, dtype=torch.int16)
    everywhere[:, :, [0, 2]] = own.routed_experts
    torch.testing.assert_close(log_probs_of(backend, replace(own, routed_experts=everywhere)), log_probs_of(backend, own), rtol=0, atol=0)
    with pytest.raises(DataError, match=r"recorded experts of 4 routers .* but the model has 2"):
        log_probs_of(backend, replace(own, routed_experts=torch.zeros(*batch.tokens.shape, 4, 2, dtype=torch.int16)))


@pytest.mark.parametrize("family", PACKED_AND_NATIVE)
def test_the_weights_of_replayed_experts_are_the_routers_own_with_their_gradient(family: str):
    settings = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    model = create_expert_model(family, num_hidden_layers=1, **settings)
    batch = with_experts(draw_batch(), num_routers=1)
    chosen = replace(batch, routed_experts=torch.tensor([1, 4], dtype=torch.int16).expand(*batch.tokens.shape, 1, 2).clone())
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    scores: list[tuple[torch.Tensor, torch.Tensor]] = []
    router = backend._options.routers.modules[0]
    hook = router.register_forward_hook(lambda module, inputs, outputs: scores.append((outputs[0], outputs[1])))
    backend.forward_backward(chosen, sft_like)
    hook.remove()
    for logits, weights in scores:
        torch.testing.assert_close(weights, logits[:, [1, 4]].softmax(-1))
    gradient = next(p.grad for name, p in backend.model.named_parameters() if name.endswith(("gate.weight", "router.weight")))
    assert gradient is not None
    largest = float(gradient[[1, 4]].abs().max())
    assert largest > 1e-2
    assert float(gradient[[0, 2, 3, 5]].abs().max()) < 1e-5 * largest, "the weights of the two do not depend on the other logits"


def sft_like(outputs, batch):
    loss, metrics = no_loss(outputs, batch)
    return loss - outputs.log_probs.sum(), metrics


@pytest.mark.parametrize("family", PACKED_AND_NATIVE)
def test_recomputed_activations_and_micro_batches_replay_the_same_experts(family: str):
    batch, gradients = with_experts(draw_batch(lengths=(6, 4, 6, 4, 4, 12, 3, 2))), []
    for checkpointing, parts in ((False, [list(range(8))]), (True, [list(range(8))]), (True, [[5, 0, 1], [2, 3, 4, 6, 7]])):
        model = create_expert_model(family)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        backend = create_pytorch_backend(model, lr=1e-3)
        for rows in parts:
            backend.forward_backward(select_rows(batch, rows), sft_like)
        gradients.append(read_gradients(backend.model))
    for found in gradients[1:]:
        assert found.keys() == gradients[0].keys()
        for name, value in gradients[0].items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * float(value.abs().max()))
    plain = create_pytorch_backend(create_expert_model(family), lr=1e-3)
    plain.forward_backward(replace(batch, routed_experts=None), sft_like)
    differences = [float((read_gradients(plain.model)[name] - value).abs().max()) for name, value in gradients[0].items()]
    assert max(differences) > 0.1, "the experts are others"


def test_the_functional_backend_replays_as_the_pytorch_backend():
    batch = with_experts(draw_batch())
    batch = replace(batch, loss_weights=token_mean(batch), router_balance=torch.full_like(batch.rewards, 0.3))
    steps = []
    for create in (create_pytorch_backend, create_torch_func_backend):
        backend = create(create_expert_model(), lr=1e-2)
        backend.count_experts(batch)
        steps.append((backend.forward_backward(batch, sft_loss).value, backend.optim_step().value))
    for first, second in zip(*steps, strict=True):
        assert first == pytest.approx(second, rel=1e-4)
    assert steps[0][1]["router_balance_loss"] > 0


async def sample_from(model, *, record: bool = True, num: int = 6, **options) -> list[Sample]:
    samples = []
    async with InProcessEngine(model, eos_token_ids=[], record_experts=record, max_slots=4, **options) as engine:
        for i in range(num):
            prompt = (5, 6 + i % 3, 7)[: 2 + i % 2]
            completion = await engine.generate(prompt, SamplingParams(max_tokens=4 + 3 * i, seed=i))
            samples.append(completion_to_sample(Sample(index=i), prompt, completion, ""))
    return samples


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
async def test_the_engine_records_the_experts_of_a_pass_over_the_whole_row(family: str):
    model = create_expert_model(family)
    samples = await sample_from(copy.deepcopy(model))
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    routers = backend._options.routers
    names = [name for name, module in backend.model.named_modules() if module in routers.modules]
    own = replace(routers, modules=tuple(model.get_submodule(name) for name in names))
    batch = collate_samples(samples, with_experts=True)
    assert batch.routed_experts is not None
    for i, sample in enumerate(samples):
        expected = choices_of(model, torch.tensor(sample.tokens), own).sort(-1).values
        n = len(sample.tokens)
        found = batch.routed_experts[i, : n - 1].long().sort(-1).values
        assert torch.equal(found, expected[:-1])
        assert bool((batch.routed_experts[i, n - 1 :] == -1).all()), "nothing has read the last token"
    plain = await sample_from(copy.deepcopy(model), record=False)
    assert [s.tokens for s in plain] == [s.tokens for s in samples]
    assert all(s.routed_experts is None for s in plain)


MANY = {  # of which some have nearly the same score
    "qwen3_moe": {"num_experts": 32, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32},
    "deepseek_v3": {"n_routed_experts": 32},
}


@pytest.mark.parametrize("family", MANY)
async def test_engine_and_trainer_agree_better_with_replay(family: str):
    """A float32 trainer beside an engine in bfloat16, whose routers choose other experts for some tokens."""
    model = create_expert_model(family, seed=3, num_hidden_layers=4, num_experts_per_tok=4, **MANY[family])
    samples = await sample_from(copy.deepcopy(model).bfloat16(), num=12)
    batch = collate_samples(samples, with_experts=True)
    backend = create_pytorch_backend(model, lr=1e-3)
    on = batch.loss_mask > 0
    assert batch.rollout_log_probs is not None
    with_replay = (log_probs_of(backend, batch) - batch.rollout_log_probs)[on].abs()
    without = (log_probs_of(backend, replace(batch, routed_experts=None)) - batch.rollout_log_probs)[on].abs()
    assert float(with_replay.mean()) < 0.7 * float(without.mean()), (float(with_replay.mean()), float(without.mean()))
    assert float(with_replay.max()) < 0.7 * float(without.max()), (float(with_replay.max()), float(without.max()))


async def test_new_weights_in_the_middle_of_an_answer_leave_the_record_of_earlier_tokens():
    model, other = create_expert_model(seed=0), create_expert_model(seed=5)
    params = SamplingParams(max_tokens=60, seed=1)
    async with InProcessEngine(model, eos_token_ids=[], record_experts=True) as engine:
        before = await engine.generate((5, 6, 7), params)
        found = []
        async with trio.open_nursery() as nursery:

            async def generate() -> None:
                found.append(await engine.generate((5, 6, 7), params))

            nursery.start_soon(generate)
            while not engine._running or len(engine._running[0].tokens) < 5:
                await trio.sleep(0)
            await engine.update_weights(dict(other.state_dict()), 1)
    (after,) = found
    count = after.output_versions.count(0)
    assert 0 < count < 60, "the update came in the middle"
    kept = 3 + count - 1
    assert after.routed_experts.take(kept) == before.routed_experts.take(kept)
    assert len(after.routed_experts) == 63


def record_of(*rows: int) -> RoutedExperts:
    data = b"".join(int(value).to_bytes(2, "little", signed=True) for row in rows for value in (row, row))
    return RoutedExperts(data=data, num_routers=1, top_k=2)


def test_records_are_filled_cut_and_written():
    first, later = record_of(1, 2, -1), record_of(4, 5, 6, 7, -1)
    assert first.fill(later) == record_of(1, 2, 6, 7, -1)
    assert first.take(2) == record_of(1, 2)
    assert first.take(4) == record_of(1, 2, -1, -1)
    sample = Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), routed_experts=first)
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert Sample.from_dict({k: v for k, v in sample.to_dict().items() if k != "routed_experts"}).routed_experts is None
    with pytest.raises(AssertionError, match="routed_experts has 2 entries for 3 tokens"):
        replace(sample, routed_experts=first.take(2))
    with pytest.raises(AssertionError, match="data has 3 bytes, expected a multiple of 4"):
        RoutedExperts(data=b"abc", num_routers=1, top_k=2)


def test_a_batch_has_the_records_of_its_samples():
    samples = [Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), index=i) for i in range(2)]
    recorded = [replace(samples[0], routed_experts=record_of(1, 2, -1)), samples[1]]
    assert collate_samples(samples, with_experts=True).routed_experts is None
    assert collate_samples(recorded).routed_experts is None, "nobody has asked for a replay"
    batch = collate_samples(recorded, with_experts=True)
    assert batch.routed_experts is not None
    assert batch.routed_experts[:, :, 0, 0].tolist() == [[1, 2, -1], [-1, -1, -1]]
    other = RoutedExperts(data=b"\0" * 6, num_routers=1, top_k=1)
    with pytest.raises(DataError, match=r"sample 1 .* recorded experts of 1 routers with 1 experts .* another sample of 1 with 2"):
        collate_samples([recorded[0], replace(samples[1], routed_experts=other)], with_experts=True)


def test_records_of_another_model_are_refused():
    backend, batch = create_pytorch_backend(create_expert_model(), lr=1e-3), draw_batch()
    with pytest.raises(DataError, match="recorded experts of 2 routers with 2 experts of a token, but the model has 3 with 2"):
        log_probs_of(backend, with_experts(batch, num_routers=2))
    with pytest.raises(DataError, match="the recorded expert 7, but each router has 6 experts"):
        log_probs_of(backend, with_experts(batch, num_experts=8))


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (create_tiny_model, "Qwen3ForCausalLM is no mixture of experts"),
        (
            partial(create_expert_model, "deepseek_v2", topk_method="group_limited_greedy"),
            "DeepseekV2ForCausalLM has routers that give experts a weight of 0 unless they would have chosen them",
        ),
    ],
)
def test_a_model_that_cannot_replay_is_refused_with_the_reason(create, reason: str):
    with pytest.raises(ConfigError, match=f"router_replay is set, but {reason}.*: set it to False"):
        require_replay(create_pytorch_backend(create(), lr=1e-3))


async def test_an_engine_of_a_dense_model_records_nothing():
    with pytest.raises(ConfigError, match="record_experts, which router_replay needs, is set, but Qwen3ForCausalLM is no mixture"):
        InProcessEngine(create_tiny_model(), record_experts=True)


def count_reward(sample: Sample) -> float:
    return float(sum(sample.tokens) % 3)


class Echo:
    """Answers each action with its beginning."""

    def reset(self, config):
        return "abc"

    def step(self, action: str):
        return f"{action[:3]}?", float(len(action) % 3), False, {}

    def get_state_description(self) -> str:
        return ""

    def get_prompt_prefix(self) -> str:
        return ""


def create_echo(branches: bool) -> EpisodeSetting:
    """Episodes of three turns; with branches, the template takes the empty thinking out of earlier answers."""
    config = EpisodeConfig(max_turns=3, on_rewrite="branch")
    return EpisodeSetting(environment_factory=Echo, config=config, seed=1, template_kwargs={"enable_thinking": False} if branches else {})


@pytest.mark.parametrize("branches", [False, True], ids=["one context", "contexts"])
async def test_an_episode_has_the_experts_of_a_pass_over_each_context(branches: bool):
    tokenizer = create_tokenizer(QWEN3) if branches else create_char_tokenizer()
    model = create_expert_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    routers = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)._options.routers
    names = [f"model.layers.{layer}.mlp.gate" for layer in routers.layers]
    own = replace(routers, modules=tuple(model.get_submodule(name) for name in names))
    async with InProcessEngine(copy.deepcopy(model), tokenizer, record_experts=True) as engine:
        policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=8))
        sample = (await run_episode(policy, create_echo(branches), Prompt(content=""))).sample
    bounds = (0, *sample.context_starts, len(sample.tokens))
    assert len(bounds) == (4 if branches else 2)
    assert len(sample.turns) == 3
    (batch,) = (collate_samples([sample], with_experts=True),)
    assert batch.routed_experts is not None
    for start, end in itertools.pairwise(bounds):
        expected = choices_of(model, torch.tensor(sample.tokens[start:end]), own).sort(-1).values
        found = batch.routed_experts[0, start:end].long().sort(-1).values
        assert torch.equal(found[:-1], expected[:-1])
        assert bool((found[-1] == -1).all()), "nothing has read the last token of a context"
    for turn, part in zip(sample.turns, split_turns(sample), strict=True):
        given = part.turns[0].start
        assert part.routed_experts.take(given + 1).shift(-given) == sample.routed_experts.take(turn.start + 1).shift(-turn.start)
        assert len(part.routed_experts) == len(part.tokens)


async def test_an_episode_with_an_action_of_unknown_experts_has_no_record():
    tokenizer = create_char_tokenizer()
    model = create_expert_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    async with InProcessEngine(model, tokenizer, record_experts=True) as engine:
        policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=8))

        class Forgets:
            def __init__(self, turn: int) -> None:
                self.tokenizer, self.turn = tokenizer, turn

            async def get_action(self, request) -> AgentAction:
                action = await policy.get_action(request)
                return replace(action, routed_experts=None) if request.turn == self.turn else action

        for turn in range(3):
            assert (await run_episode(Forgets(turn), create_echo(branches=False), Prompt(content=""))).sample.routed_experts is None
        chat = MultiTurnInferenceEngine(engine, tokenizer, params=SamplingParams(max_tokens=8))
        conversation = await chat.step(await chat.step(chat.start_conversation("ab")), "cd")
        record = conversation.transcript.routed_experts
        assert record is not None
        assert len(record) == len(conversation.transcript.tokens)


@pytest.mark.parametrize("branches", [False, True], ids=["one context", "contexts"])
async def test_a_run_of_episodes_with_replay_agrees_better_with_its_engine(branches: bool):
    without, replayed = await run_rl(replays=False, branches=branches), await run_rl(replays=True, branches=branches)
    for first, second in zip(without, replayed, strict=True):
        assert second["engine_diff_mean"] < 0.8 * first["engine_diff_mean"], (first["engine_diff_mean"], second["engine_diff_mean"])
    assert bool(replayed[0].get("num_branched_episodes")) is branches


async def run_rl(
    *, replays: bool, records: bool = True, with_others: bool = False, algorithm=None, branches: bool | None = None
) -> list[dict[str, float]]:
    """Two steps of a float32 trainer with an engine in bfloat16; metrics. branches: of episodes, whose history changes or stands."""
    tokenizer = create_tokenizer(QWEN3) if branches else create_char_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 4, "num_experts_per_tok": 4, "max_position_embeddings": 256}
    model = create_expert_model("deepseek_v3", seed=3, n_routed_experts=32, **sizes)
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-4)
    others = {}
    if with_others:  # models that have no such experts
        critic = create_critic_backend(create_tiny_model(vocab_size=len(tokenizer)), lr=1e-4)
        reference = create_reference_backend(create_expert_model("qwen3_moe", num_experts=4, vocab_size=len(tokenizer)))
        others = {"critic": critic, "reference": reference}
    algorithm = algorithm or (ppo(kl_coef=0.1) if with_others else grpo())
    config = RLTrainingConfig(
        num_steps=2, weight_sync="memory", parity=ParityConfig(threshold=9.0), algorithm=algorithm, router_replay=replays, num_minibatches=2
    )
    async with InProcessEngine(model.bfloat16(), tokenizer, record_experts=records) as engine:
        buffer = DataBuffer(None if branches else [f"s{i}=" for i in range(10)], seed=0)
        generate = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=20), seed=0)
        if branches is not None:
            setting = create_echo(branches)
            generate = create_episode_generate_fn([engine], tokenizer, SamplingParams(max_tokens=8), setting)
        segments = "segment_log_probs" in algorithm.requires
        rollouts = RolloutConfig(
            batch_size=2, n_samples_per_prompt=4, generate_fn=generate, reward_fn=count_reward, segment_log_probs=segments
        )
        async with AsyncRolloutManager(buffer, rollouts, engines=[engine]) as manager:
            return await run_rl_training(backend, buffer, manager, [engine], config, **others)


async def test_a_run_with_replay_agrees_better_with_its_engine():
    without, replayed = await run_rl(replays=False), await run_rl(replays=True)
    assert len(without) == len(replayed) == 2
    for first, second in zip(without, replayed, strict=True):
        assert second["engine_diff_mean"] < 0.6 * first["engine_diff_mean"]
    unrecorded = await run_rl(replays=False, records=False)
    assert {k: v for k, v in unrecorded[0].items() if not k.endswith("_s")} == {
        k: v for k, v in without[0].items() if not k.endswith("_s")
    }, "a record that is not replayed changes no number"


async def test_reference_and_critic_choose_their_own_experts():
    assert len(await run_rl(replays=True, with_others=True)) == 2


async def test_segment_log_probs_are_refused_beside_a_replay():
    with pytest.raises(ConfigError, match="router_replay is set, but the algorithm requires segment_log_probs"):
        await run_rl(replays=True, algorithm=decoupled(grpo(), segment_wise=True))


async def test_an_engine_that_records_nothing_is_refused_before_the_first_rollout():
    with pytest.raises(ConfigError, match=r"router_replay is set, but in-process engine does not record .* record_experts=True"):
        await run_rl(replays=True, records=False)


def test_a_sample_without_a_record_is_refused_by_name():
    samples = [Sample(tokens=(3, 4), loss_mask=(0.0, 1.0), index=i, routed_experts=record_of(1, -1) if i == 0 else None) for i in range(2)]
    batch = collate_samples(samples)
    check_recorded_experts(collate_samples(samples[:1]), samples[:1])
    with pytest.raises(DataError, match=r"router_replay is set, but sample 1 .* has no routed_experts: a generate_fn must keep"):
        check_recorded_experts(batch, samples)


async def test_the_parts_of_a_continued_answer_keep_their_own_experts():
    prompt, experts = (3, 4), record_of(1, 2, 3, -1)
    first = Completion(
        request_id="a", input_tokens=prompt, output_tokens=(5, 6), output_log_probs=(-1.0, -1.0), output_versions=(0, 0),
        finish_reason="abort", routed_experts=experts,
    )  # fmt: skip
    later = replace(
        first, input_tokens=(3, 4, 5, 6), output_tokens=(7,), output_log_probs=(-1.0,), output_versions=(1,), finish_reason="stop",
        routed_experts=record_of(9, 9, 9, 4, -1),
    )  # fmt: skip
    begun = completion_to_sample(Sample(), prompt, first, "")
    whole = completion_to_sample(begun, prompt, later, "")
    assert whole.routed_experts == record_of(1, 2, 3, 4, -1)
    assert join_parts(first, later).routed_experts == whole.routed_experts
    assert completion_to_sample(begun, prompt, replace(later, routed_experts=None), "").routed_experts is None
    assert keep_tokens(first, 1).routed_experts == record_of(1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"engine": EngineSection(kind="vllm", launch=True), "model": ModelSection(device="cpu")},
            "vLLM returns the experts .* on GPUs only",
        ),
        ({"backend": BackendSection(kind="jax")}, "backend.kind 'jax' computes no mixture of experts"),
    ],
)
def test_settings_that_cannot_replay_are_refused(changes, reason: str):
    with pytest.raises(ConfigError, match=f"rl.router_replay is True, but .*{reason}"):
        Config(rl=RLSection(router_replay=True), **changes)
