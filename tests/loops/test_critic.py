"""A critic is a backend like any other: its values, its checkpoints, its training beside the policy."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import draw_batch

from rollouts.algorithms.losses import value_loss
from rollouts.algorithms.presets import grpo, ppo
from rollouts.backends.factory import create_backend_with_scheduler, create_critic_backend, create_pytorch_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.batches import select_rows
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import CheckpointError, ConfigError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.models.forward.output_layers import get_value_head
from rollouts.models.forward.outputs import compute_values
from rollouts.models.heads import create_critic_model, init_value_head, load_critic_model
from rollouts.models.tokens import TokenSpec, explain_token_differences
from rollouts.rl_loop import run_rl_training
from rollouts.seeds import derive_seed
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.rollout_batch import select_values
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.types import KLControl, Sample, SamplingParams, TrainBatch


def draw_valued_batch(seed: int = 0, rows: int = 6) -> TrainBatch:
    batch = draw_batch(seed, rows)
    returns = torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(seed))
    return replace(batch, returns=returns, values=torch.zeros_like(returns))


def make_critic(seed: int = 0, **options: Any) -> PyTorchTrainingBackend:
    return create_critic_backend(create_tiny_model(seed=seed), **{"lr": 1e-2, "tokenizer": create_char_tokenizer(), **options})


async def values_of(critic: Any, batch: TrainBatch) -> torch.Tensor:
    return await critic.forward(batch, select_values).result()


# values


async def test_the_value_at_a_token_is_read_before_it_and_depends_on_nothing_later():
    critic, batch = make_critic(), draw_valued_batch()
    values = await values_of(critic, batch)
    assert values.dtype == torch.float32
    pads = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
    assert float(values[pads].abs().sum()) == 0
    assert float(values[:, 0].abs().sum()) == 0
    plain = create_critic_model(create_tiny_model()).eval()  # transformers' own attention, one row at a time
    for row, length in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            scores = plain(input_ids=batch.tokens[row : row + 1, :length]).logits[0, :, 0]
        torch.testing.assert_close(values[row, 1:length], scores[:-1], atol=1e-5, rtol=1e-4)
    changed = batch.tokens.clone()
    changed[:, 2] = (changed[:, 2] + 7) % 64
    after = await values_of(critic, replace(batch, tokens=changed))
    torch.testing.assert_close(after[:, :3], values[:, :3])


async def test_a_critic_has_no_log_probs():
    found = await make_critic().forward(draw_valued_batch(), lambda outputs: outputs.log_probs).result()
    assert float(found.abs().sum()) == 0
    assert found.shape == draw_valued_batch().tokens.shape


async def test_micro_batches_do_not_change_the_gradient_of_the_value_loss():
    batch, gradients = draw_valued_batch(), []
    for parts in ([batch], [select_rows(batch, rows) for rows in ([4, 0], [2], [5, 3], [1])]):
        critic = make_critic()
        for part in parts:
            await critic.forward_backward(part, value_loss).result()
        gradients.append([p.grad.clone() for p in critic.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(critic.model.parameters()))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


async def test_a_critic_learns_the_returns_of_a_batch():
    batch, critic, losses = draw_valued_batch(), make_critic(), []
    for _ in range(40):
        losses.append((await critic.forward_backward(batch, partial(value_loss, clip=None)).result())["loss"])
        await critic.optim_step().result()
    assert losses[-1] < 0.2 * losses[0]


async def test_bfloat16_values_are_float32_and_close():
    batch = draw_valued_batch()
    exact, rounded = await values_of(make_critic(), batch), await values_of(make_critic(compute_dtype="bfloat16"), batch)
    assert rounded.dtype == torch.float32
    assert 0 < float((exact - rounded).abs().max()) < 0.1


# where critics come from


async def test_the_head_comes_from_the_seed_alone_and_is_small(tmp_path: Path):
    batch = draw_valued_batch()
    first = await values_of(make_critic(), batch)
    state = torch.get_rng_state()
    assert torch.equal(await values_of(make_critic(), batch), first)
    assert torch.equal(torch.get_rng_state(), state)
    other = create_critic_backend(create_tiny_model(), lr=1e-2, seed=1)
    assert not torch.equal(await values_of(other, batch), first)
    create_tiny_model().save_pretrained(tmp_path)
    create_char_tokenizer().save_pretrained(tmp_path)
    from_directory = create_critic_backend(tmp_path, lr=1e-2)
    torch.testing.assert_close(await values_of(from_directory, batch), first, atol=1e-6, rtol=1e-5)
    head = get_value_head(from_directory.model)
    assert float(head.weight.detach().std()) == pytest.approx(1 / 33, rel=0.4)
    assert float(head.bias.detach().abs().sum()) == 0
    init_value_head(from_directory.model, seed=0, std=0.0)
    assert float((await values_of(from_directory, batch)).abs().sum()) == 0


async def test_a_critic_shares_no_weight_with_the_policy_it_was_made_from():
    model, batch = create_tiny_model(), draw_valued_batch()
    before = copy.deepcopy(model.state_dict())
    critic = create_critic_backend(model, lr=1e-1)
    await critic.forward_backward(batch, value_loss).result()
    await critic.optim_step().result()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


async def test_a_saved_critic_opens_as_a_hugging_face_model_and_as_a_critic(tmp_path: Path):
    from transformers import AutoModelForTokenClassification

    critic, batch = make_critic(), draw_valued_batch()
    await critic.forward_backward(batch, value_loss).result()
    await critic.optim_step().result()
    await critic.save_checkpoint(tmp_path).result()
    expected = await values_of(critic, batch)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert (loaded.num_labels, loaded.dropout.p) == (1, 0.0)
    torch.testing.assert_close(await values_of(create_critic_backend(tmp_path, lr=1e-2, seed=7), batch), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(await values_of(create_critic_backend(loaded, lr=1e-2), batch), expected, atol=1e-5, rtol=1e-4)


async def test_a_critics_steps_a_checkpoint_and_steps_are_all_steps_bit_for_bit(tmp_path: Path):
    async def train(critic: PyTorchTrainingBackend, steps: range) -> list[dict[str, float]]:
        out = []
        for step in steps:
            loss = await critic.forward_backward(draw_valued_batch(step), value_loss).result()
            out.append(loss | await critic.optim_step().result())
        return out

    options = {"schedule": "cosine", "warmup_steps": 2, "total_steps": 8}
    straight = make_critic(**options)
    history = await train(straight, range(6))
    stopped = make_critic(**options)
    first = await train(stopped, range(3))
    await stopped.save_checkpoint(tmp_path).result()
    resumed = make_critic(seed=9, **options)
    await resumed.load_checkpoint(tmp_path).result()
    assert first + await train(resumed, range(3, 6)) == history
    left, right = [(await critic.get_weights().result()) for critic in (straight, resumed)]
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_cannot_be_a_critic_is_refused_with_a_reason(tmp_path: Path):
    model = create_tiny_model()
    with pytest.raises(ConfigError, match="no value head"):
        PyTorchTrainingBackend(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_outputs=compute_values)
    critic = create_critic_model(model)
    with pytest.raises(ConfigError, match="no linear output layer"):
        create_pytorch_backend(critic, lr=1e-3)
    with pytest.raises(ConfigError, match="not a directory"):
        load_critic_model(tmp_path / "nowhere")
    critic.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"cannot be loaded|damaged"):
        load_critic_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["OPTForCausalLM"], "model_type": "no_such_model"}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_critic_model(tmp_path)


async def test_a_policys_checkpoint_is_no_critics(tmp_path: Path):
    await create_pytorch_backend(create_tiny_model(), lr=1e-3).save_checkpoint(tmp_path).result()
    with pytest.raises(CheckpointError, match="does not fit"):
        make_critic().load_checkpoint(tmp_path)


# tokens


def test_differences_between_tokenizers_are_said_one_by_one():
    policy = TokenSpec(8, {"a": 0, "b": 1}, {"eos_token_id": 1, "pad_token_id": 0}, "rules")
    assert explain_token_differences(policy, policy) == []
    assert explain_token_differences(policy, replace(policy, num_embeddings=16)) == []  # padded further, same tokenizer
    assert "fewer than" in explain_token_differences(policy, replace(policy, num_embeddings=4))[0]
    swapped = replace(policy, vocabulary={"a": 1, "b": 0})
    assert "2 differ ('a' is 1, the policy's is 0" in explain_token_differences(policy, swapped)[0]
    assert "has 3 tokens, the policy's has 2" in explain_token_differences(policy, replace(policy, vocabulary={"a": 0, "b": 1, "c": 2}))[0]
    assert explain_token_differences(policy, replace(policy, special_ids={"eos_token_id": 0, "pad_token_id": 0})) == [
        "eos_token_id is 0, the policy's is 1"
    ]
    assert "other rules" in explain_token_differences(policy, replace(policy, rules="others"))[0]
    assert explain_token_differences(TokenSpec(8), TokenSpec(8)) == []
    assert explain_token_differences(TokenSpec(8), TokenSpec(16)) == ["the vocabulary has 16 tokens, the policy's has 8"]


# the loop


def random_reward(sample: Sample) -> float:
    return float(derive_seed(*sample.tokens) % 2)


def make_run(*, critic_seed: int = 1, num_steps: int = 4, **critic_options: Any) -> dict[str, Any]:
    """A real policy and critic; answers come from a script, so that a run takes no time."""
    engine = FakeEngine()
    buffer = DataBuffer([f"s{i}=" for i in range(10)])
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6))
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=4, generate_fn=generate, reward_fn=random_reward)
    backend = create_backend_with_scheduler(create_tiny_model(), lr=1e-3, total_steps=20, tokenizer=create_char_tokenizer())
    return {
        "backend": backend,
        "critic": make_critic(seed=critic_seed, schedule="linear", total_steps=20, **critic_options),
        "buffer": buffer,
        "manager": AsyncRolloutManager(buffer, config, engines=[engine]),
        "engine": engine,
    }


async def run(parts: dict[str, Any], config: RLTrainingConfig, logger: Any = None, **options: Any) -> list[dict[str, float]]:
    async with parts["manager"] as manager:
        return await run_rl_training(
            parts["backend"], parts["buffer"], manager, [parts["engine"]], config, logger,
            critic=parts["critic"], clock=lambda: 0.0, **options,
        )  # fmt: skip


def read_without_timings(path: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(path)]


CONFIG = RLTrainingConfig(num_steps=4, weight_sync="memory", num_minibatches=2, algorithm=ppo())


async def test_metrics_of_the_critic_stand_beside_those_of_the_policy():
    history = await run(make_run(), CONFIG)
    critic = {"critic_loss", "critic_grad_norm", "critic_lr", "value_mean", "value_clip_fraction", "explained_variance"}
    policy = {"loss", "grad_norm", "lr", "num_tokens", "approx_kl"}
    assert all(critic | policy <= set(metrics) for metrics in history)
    assert all(metrics["num_updates"] == 2 for metrics in history)
    assert history[0]["lr"] < history[0]["critic_lr"] <= 1e-2
    assert history[-1]["critic_lr"] < history[0]["critic_lr"]


async def test_the_first_steps_can_train_the_critic_alone():
    parts = make_run()
    before = await parts["backend"].get_weights().result()
    history = await run(parts, replace(CONFIG, num_steps=2, critic_warmup_steps=2))
    after = await parts["backend"].get_weights().result()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert parts["critic"].counts.num_updates == 4
    assert [metrics["num_updates"] for metrics in history] == [0.0, 0.0]
    assert all("critic_loss" in metrics and "loss" not in metrics and metrics["num_tokens"] > 0 for metrics in history)
    parts = make_run()
    history = await run(parts, replace(CONFIG, num_steps=3, critic_warmup_steps=2))
    assert [metrics["num_updates"] for metrics in history] == [0.0, 0.0, 2.0]


async def test_old_values_are_those_of_before_the_update():
    batches: list[TrainBatch] = []
    algorithm = ppo()

    def loss(outputs: Any, batch: TrainBatch) -> Any:
        batches.append(batch)
        return algorithm.loss(outputs, batch)

    parts = make_run()
    before = copy.deepcopy(parts["critic"])
    await run(parts, replace(CONFIG, num_steps=1, num_epochs=2, algorithm=replace(algorithm, loss=loss)))
    assert len(batches) == 4
    for batch in batches:
        expected = await values_of(before, batch)
        torch.testing.assert_close(batch.values * (batch.loss_mask > 0), expected * (batch.loss_mask > 0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [CONFIG, replace(CONFIG, sync_every=2, num_epochs=2, critic_warmup_steps=3, num_steps=5)],
    ids=["plain", "warmup"],
)
async def test_a_resumed_run_with_a_critic_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, config: RLTrainingConfig):
    straight_log, log = JSONLLogger(tmp_path / "straight.jsonl"), JSONLLogger(tmp_path / "resumed.jsonl")
    straight = make_run()
    await run(straight, config, straight_log, checkpoint_dir=tmp_path / "straight")
    asked = iter([False, True])
    await run(make_run(), config, log, checkpoint_dir=tmp_path / "resumed", should_stop=lambda: next(asked))
    checkpoint = tmp_path / "resumed" / "step_0002"
    assert (checkpoint / "critic" / "model.safetensors").is_file()
    (tmp_path / "resumed.jsonl").write_text("".join((tmp_path / "resumed.jsonl").read_text().splitlines(keepends=True)[:1]))
    parts = make_run(critic_seed=3)
    point = await restore_rl_run(checkpoint, parts["backend"], parts["manager"], [parts["engine"]], config, critic=parts["critic"])
    await run(parts, config, JSONLLogger(tmp_path / "resumed.jsonl"), checkpoint_dir=tmp_path / "resumed", resume=point)
    assert read_without_timings(tmp_path / "resumed.jsonl") == read_without_timings(tmp_path / "straight.jsonl")
    for name in ("backend", "critic"):
        left, right = [(await run_parts[name].get_weights().result()) for run_parts in (straight, parts)]
        assert all(torch.equal(left[key], right[key]) for key in left)


async def test_a_checkpoint_and_a_run_must_agree_about_the_critic(tmp_path: Path):
    parts = make_run()
    await run(parts, replace(CONFIG, num_steps=1), checkpoint_dir=tmp_path)
    arguments = (parts["backend"], parts["manager"], [parts["engine"]], CONFIG)
    with pytest.raises(CheckpointError, match="pass critic="):
        await restore_rl_run(tmp_path / "step_0001", *arguments)
    without = make_run() | {"critic": None}
    await run(without, replace(CONFIG, num_steps=1, algorithm=grpo()), checkpoint_dir=tmp_path / "other")
    with pytest.raises(CheckpointError, match="no critic"):
        await restore_rl_run(tmp_path / "other" / "step_0001", *arguments, critic=parts["critic"])


async def test_a_critic_that_does_not_fit_is_refused_before_the_first_rollout():
    other_tokens = create_char_tokenizer()
    other_tokens.add_tokens(["<extra>"])
    small = create_critic_backend(create_tiny_model(vocab_size=32), lr=1e-3)
    for critic, message in (
        (make_run()["critic"], None),
        (small, "vocabulary has 32 tokens, the policy's has 64"),
        (create_critic_backend(create_tiny_model(vocab_size=80), lr=1e-3, tokenizer=other_tokens), "1 differ .'<extra>' is 64"),
    ):
        parts = make_run() | {"critic": critic}
        if message is None:
            await run(parts, replace(CONFIG, num_steps=1))
            continue
        with pytest.raises(ConfigError, match=message):
            await run(parts, CONFIG)
        assert parts["engine"].calls == []
        with pytest.raises(ConfigError, match=message):
            async with open_pipeline(parts["backend"]) as policy, open_pipeline(critic) as pipeline:
                await run(parts | {"backend": policy, "critic": pipeline}, CONFIG)
    with pytest.raises(ConfigError, match="critic_warmup_steps is 2, but there is no critic"):
        await run(make_run() | {"critic": None}, replace(CONFIG, algorithm=grpo(), critic_warmup_steps=2))


async def test_a_critic_in_a_pipeline_gives_the_same_run():
    direct = await run(make_run(), replace(CONFIG, num_steps=2))
    parts = make_run()
    async with open_pipeline(parts["backend"]) as policy, open_pipeline(parts["critic"]) as critic:
        piped = await run(parts | {"backend": policy, "critic": critic}, replace(CONFIG, num_steps=2))
    assert piped == direct


async def test_a_kl_coefficient_is_steered_logged_and_resumed(tmp_path: Path):
    control = KLControl(kl_coef=0.1, target=0.01, horizon=100)
    config = replace(CONFIG, kl_control=control, algorithm=ppo(kl_coef=1.0))
    reference = create_pytorch_backend(create_tiny_model(seed=4), lr=1e-3)
    history = await run(make_run(), config, reference=reference, checkpoint_dir=tmp_path / "straight")
    expected = [0.1]
    for metrics in history[:-1]:
        error = min(max(metrics["reference_kl"] / 0.01 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * 8 / 100))
    assert [metrics["kl_coef"] for metrics in history] == pytest.approx(expected, rel=1e-12)
    assert len(set(expected)) == 4
    asked = iter([False, True])
    await run(make_run(), config, reference=reference, checkpoint_dir=tmp_path / "resumed", should_stop=lambda: next(asked))
    parts = make_run()
    checkpoint = tmp_path / "resumed" / "step_0002"
    point = await restore_rl_run(checkpoint, parts["backend"], parts["manager"], [parts["engine"]], config, critic=parts["critic"])
    assert point.kl_control == replace(control, kl_coef=history[2]["kl_coef"])
    assert await run(parts, config, reference=reference, resume=point) == history[2:]


async def test_a_kl_coefficient_waits_until_the_policy_is_trained():
    control = KLControl(kl_coef=0.1, target=0.01, horizon=100)
    config = replace(CONFIG, kl_control=control, algorithm=ppo(kl_coef=1.0), critic_warmup_steps=2)
    reference = create_pytorch_backend(create_tiny_model(seed=4), lr=1e-3)
    coefficients = [metrics["kl_coef"] for metrics in await run(make_run(), config, reference=reference)]
    assert coefficients[:3] == [0.1, 0.1, 0.1]
    assert coefficients[3] != 0.1


async def test_ppo_with_a_critic_learns_on_a_tiny_model():
    tokenizer = create_char_tokenizer()
    policy, critic = create_tiny_model(), make_critic(lr=3e-3)
    engine = InProcessEngine(copy.deepcopy(policy), tokenizer, max_slots=32)
    buffer = DataBuffer([f"{i}=" for i in range(10)])
    generate = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=6))
    wanted = {int(i) for i in tokenizer("0123456789")["input_ids"]}

    def reward(sample: Sample) -> float:
        answer = [t for t, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask > 0]
        return sum(token in wanted for token in answer) / 6

    rollout = RolloutConfig(batch_size=8, n_samples_per_prompt=4, generate_fn=generate, reward_fn=reward)
    backend = create_pytorch_backend(policy, lr=1e-2, tokenizer=tokenizer)
    config = RLTrainingConfig(num_steps=12, weight_sync="memory", num_minibatches=2, num_epochs=2, algorithm=ppo())
    async with AsyncRolloutManager(buffer, rollout, engines=[engine]) as manager:
        history = await run_rl_training(backend, buffer, manager, [engine], config, critic=critic)
    rewards = [metrics["reward_mean"] for metrics in history]
    assert sum(rewards[-3:]) / 3 > 3 * sum(rewards[:3]) / 3
    assert history[-1]["explained_variance"] > 0
    assert all(abs(metrics["ratio_mean"] - 1) < 0.2 for metrics in history)


async def test_a_backend_that_cannot_be_saved_is_refused_as_a_critic_of_a_run_with_checkpoints(tmp_path: Path):
    class Unsaved:
        forward, forward_backward, optim_step = FakeBackend.forward, FakeBackend.forward_backward, FakeBackend.optim_step
        get_weights, load_weights = FakeBackend.get_weights, FakeBackend.load_weights

    with pytest.raises(ConfigError, match="Unsaved lacks the feature checkpoints"):
        await run(make_run() | {"critic": Unsaved()}, CONFIG, checkpoint_dir=tmp_path)
