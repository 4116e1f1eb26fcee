from __future__ import annotations

import inspect
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from rollouts import async_rl_loop, rl_loop
from rollouts.algorithms.presets import grpo, recomputed, remax
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.filters import check_reward_nonzero_std
from rollouts.data.prompts import DataBuffer
from rollouts.errors import CheckpointError, ConfigError, DataError, GenerationError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training, train_rl
from rollouts.seeds import derive_seed
from rollouts.testing import FakeBackend, FakeEngine, script_answer
from rollouts.testing.engines import Call
from rollouts.training.abandonment import Abandonment
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.training.rl_parts import RLParts
from rollouts.training.rollout_batch import train_on_rollouts
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.rl_checkpoints import restore_rl_run
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import KLControl, Prompt, RolloutBatch, Sample, SamplingParams, Status, TrainBatch


def random_reward(sample: Sample) -> float:
    """A reward that depends on the sampled tokens alone."""
    return float(derive_seed(*sample.tokens) % 2)


def make_run(calls: list[Call] | None = None, *, batch_size: int = 4, seed: int = 0, sync_seconds: float = 0.0):
    """Backend, buffer, manager and engine over fakes that write into one list."""
    calls = [] if calls is None else calls
    backend, engine = FakeBackend(calls=calls), FakeEngine(calls=calls, seconds_per_update=sync_seconds)
    buffer = DataBuffer([f"s{i}=" for i in range(10)], seed=seed)
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6), seed=seed)
    config = RolloutConfig(batch_size=batch_size, n_samples_per_prompt=4, generate_fn=generate, reward_fn=random_reward)
    return backend, buffer, AsyncRolloutManager(buffer, config, engines=[engine]), engine


async def run(parts, config: RLTrainingConfig, logger=None, **options):
    backend, buffer, manager, engine = parts
    async with manager:
        return await run_rl_training(backend, buffer, manager, [engine], config, logger, clock=lambda: 0.0, **options)


def read_without_timings(path: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(path)]


IN_MEMORY = RLTrainingConfig(num_steps=3, weight_sync="memory")


async def test_a_step_generates_then_trains_then_syncs():
    calls: list[Call] = []
    await run(make_run(calls), replace(IN_MEMORY, num_steps=2, num_minibatches=2))
    names = [call.method for call in calls]
    one_step = ["generate"] * 16 + ["forward_backward", "optim_step"] * 2 + ["get_weights", "update_weights"]
    assert names == one_step * 2


@pytest.mark.parametrize(("num_steps", "sync_every"), [(5, 1), (5, 2), (7, 3), (2, 3)])
async def test_syncs_are_counted_exactly_and_number_the_weights(num_steps: int, sync_every: int):
    parts = make_run()
    history = await run(parts, replace(IN_MEMORY, num_steps=num_steps, sync_every=sync_every))
    versions = [call.arguments["weight_version"] for call in parts[3].calls if call.method == "update_weights"]
    assert versions == list(range(1, num_steps // sync_every + 1))
    assert [m["weight_version"] for m in history] == [step // sync_every for step in range(num_steps)]


async def test_sync_from_the_disk_reuses_the_checkpoint_of_the_same_step(tmp_path: Path):
    parts = make_run()
    config = RLTrainingConfig(num_steps=4, sync_every=1, checkpoint_every=2, weight_sync="checkpoint")
    await run(parts, config, checkpoint_dir=tmp_path, keep_last_n=4)
    names = [call.method for call in parts[0].calls if call.method in ("save_checkpoint", "export_weights")]
    assert names == ["export_weights", "save_checkpoint"] * 2
    loaded = [call.arguments["checkpoint_path"].name for call in parts[3].calls if call.method == "update_weights_from_checkpoint"]
    assert loaded == ["weights_v000001", "step_0002", "weights_v000003", "step_0004"]
    assert await parts[3].get_weight_version() == 4


async def test_metrics_carry_rewards_loss_gradient_norm_rate_and_timings():
    history = await run(make_run(), IN_MEMORY)
    assert {"reward_mean", "reward_max", "reward_min", "loss", "grad_norm", "lr", "num_tokens", "num_updates"} <= set(history[0])
    assert {"generate_s", "train_s", "sync_s", "step_s"} <= set(history[0])
    assert [m["staleness_max"] for m in history] == [0.0, 0.0, 0.0]


async def test_epochs_and_minibatches_give_that_many_optimizer_steps():
    parts = make_run()
    history = await run(parts, replace(IN_MEMORY, num_steps=2, num_epochs=2, num_minibatches=4))
    assert sum(call.method == "optim_step" for call in parts[0].calls) == 2 * 2 * 4
    assert history[0]["num_updates"] == 8


async def test_requirements_are_checked_before_the_first_rollout():
    parts = make_run()
    needs_reference = replace(grpo(), requires=frozenset({"ref_log_probs"}))
    with pytest.raises(ConfigError, match="reference"):
        await run(parts, replace(IN_MEMORY, algorithm=needs_reference))
    with pytest.raises(ConfigError, match="values"):
        await run(parts, replace(IN_MEMORY, algorithm=replace(grpo(), requires=frozenset({"values"}))))
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        await run(parts, RLTrainingConfig(num_steps=1, weight_sync="checkpoint"))
    assert parts[3].calls == []


async def test_a_batch_that_does_not_divide_into_minibatches_is_refused_before_the_first_rollout():
    parts = make_run()
    with pytest.raises(ConfigError, match="4 prompts x 4 samples = 16 rows does not divide into num_minibatches = 3"):
        await run(parts, replace(IN_MEMORY, num_minibatches=3))
    assert parts[3].calls == []


async def test_required_columns_are_filled_by_one_forward_pass_each():
    backend, reference = FakeBackend(), FakeBackend(name="reference")
    seen: dict[str, bool] = {}

    def estimate(batch):
        seen.update({name: getattr(batch, name) is not None for name in ("old_log_probs", "prox_log_probs", "ref_log_probs")})
        return grpo().estimate(batch)

    algorithm = replace(grpo(), estimate=estimate, requires=frozenset({"old_log_probs", "prox_log_probs", "ref_log_probs"}))
    parts = make_run()
    async with parts[2] as manager:
        rollouts = await manager.generate_batch()
    from rollouts.data.collate import collate_samples

    await train_on_rollouts(backend, collate_samples(rollouts.samples), algorithm, reference=reference)
    assert seen == dict.fromkeys(seen, True)
    assert [call.method for call in backend.calls] == ["forward", "forward_backward", "optim_step"]
    assert [call.method for call in reference.calls] == ["forward"]


async def test_a_scalar_baseline_replaces_the_groups():
    advantages: list[torch.Tensor] = []
    algorithm = grpo()

    def loss(outputs, batch):
        advantages.append(batch.advantages[batch.loss_mask > 0])
        return algorithm.loss(outputs, batch)

    await run(make_run(), replace(IN_MEMORY, num_steps=1, baseline=0.25, algorithm=replace(algorithm, loss=loss)))
    assert set(torch.cat(advantages).tolist()) <= {-0.25, 0.75}


@pytest.mark.parametrize(
    ("mode", "sync_every", "stop_after"), [("memory", 1, 2), ("memory", 3, 2), ("checkpoint", 1, 3), ("checkpoint", 3, 4)]
)
async def test_a_resumed_run_writes_the_metrics_file_of_the_uninterrupted_one(tmp_path: Path, mode, sync_every: int, stop_after: int):
    config = RLTrainingConfig(num_steps=6, sync_every=sync_every, weight_sync=mode, eval_every=2)

    async def evaluate(engine) -> dict[str, float]:
        return {"eval_version": float(await engine.get_weight_version())}

    def options(parts, name: str):
        return {"checkpoint_dir": tmp_path / name, "evaluate": partial(evaluate, parts[3])}

    straight_log = tmp_path / "straight.jsonl"
    parts = make_run()
    await run(parts, config, JSONLLogger(straight_log), **options(parts, "straight"))

    log, asked = tmp_path / "resumed.jsonl", iter([False] * (stop_after - 1) + [True])
    parts = make_run()
    await run(parts, config, JSONLLogger(log), should_stop=lambda: next(asked), **options(parts, "resumed"))
    checkpoint = tmp_path / "resumed" / f"step_{stop_after:04d}"
    with log.open("r+b") as file:
        file.truncate(read_run_state(checkpoint).metrics_bytes)
    parts = make_run()
    backend, _, manager, engine = parts
    point = await restore_rl_run(checkpoint, backend, manager, [engine], config)
    assert point.step == stop_after
    assert await engine.get_weight_version() == stop_after // sync_every
    if mode == "memory":  # the engine samples with the weights of the last sync, not with the newest
        assert float(engine.weights["num_updates"]) == stop_after // sync_every * sync_every
    await run(parts, config, JSONLLogger(log), resume=point, **options(parts, "resumed"))
    assert read_without_timings(log) == read_without_timings(straight_log)


async def test_the_checkpoint_that_engines_were_served_from_outlives_its_turn(tmp_path: Path):
    config = RLTrainingConfig(num_steps=6, sync_every=3, checkpoint_every=1, weight_sync="checkpoint")
    await run(make_run(), config, checkpoint_dir=tmp_path, keep_last_n=1)
    assert "step_0006" in {path.name for path in tmp_path.iterdir()}


async def test_a_checkpoint_of_the_other_stage_is_refused(tmp_path: Path):
    parts = make_run()
    await run(parts, replace(IN_MEMORY, num_steps=1), checkpoint_dir=tmp_path)
    state = tmp_path / "step_0001" / "run_state.json"
    state.write_text(state.read_text().replace('"rl"', '"sft"'))
    with pytest.raises(CheckpointError):
        await restore_rl_run(tmp_path / "step_0001", parts[0], parts[2], [parts[3]], IN_MEMORY)


async def test_two_loops_in_one_program_do_not_disturb_each_other():
    alone = [await run(make_run(seed=seed), IN_MEMORY) for seed in (1, 2)]
    together: dict[int, object] = {}

    async def one(seed: int) -> None:
        together[seed] = await run(make_run(seed=seed), IN_MEMORY)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, 1)
        nursery.start_soon(one, 2)
    assert [together[1], together[2]] == alone


async def test_remax_compares_with_a_greedy_sample_that_is_not_trained_on():
    parts = make_run()
    backend, buffer, _, engine = parts
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6), num_greedy=1)
    rollout = RolloutConfig(batch_size=4, n_samples_per_prompt=3, n_baseline_samples=1, generate_fn=generate, reward_fn=random_reward)
    rollouts: list[RolloutBatch] = []
    parts = (backend, buffer, AsyncRolloutManager(buffer, rollout, engines=[engine]), engine)
    config = replace(IN_MEMORY, num_steps=2, num_minibatches=2, algorithm=remax())
    history = await run(parts, config, on_rollouts=lambda step, batch: rollouts.append(batch))
    greedy = [s.reward for s in rollouts[0].samples if not s.trainable]
    sampled = [s.reward for s in rollouts[0].samples if s.trainable]
    assert (len(greedy), len(sampled)) == (4, 12)
    assert history[0]["baseline_reward_mean"] == sum(greedy) / 4
    assert history[0]["reward_mean"] == pytest.approx(sum(sampled) / 12)
    assert history[0]["num_samples"] == 12
    assert [call.arguments["rows"] for call in backend.calls if call.method == "forward_backward"] == [6, 6] * 2


async def test_remax_without_a_greedy_sample_is_refused_with_what_to_do_before_the_first_rollout():
    parts = make_run()
    with pytest.raises(ConfigError, match=r"greedy_rows.*n_baseline_samples=1.*num_greedy=1"):
        await run(parts, replace(IN_MEMORY, algorithm=remax()))
    assert parts[3].calls == []

    class Source:  # says nothing about its groups beforehand
        def __init__(self, manager: AsyncRolloutManager) -> None:
            self.generate_batch, self.state_dict = manager.generate_batch, manager.state_dict

    backend, buffer, manager, engine = parts
    with pytest.raises(ConfigError, match=r"greedy_rows.* Source has no property `config`"):
        await run_rl_training(backend, buffer, Source(manager), [engine], replace(IN_MEMORY, algorithm=remax()))
    assert engine.calls == []


async def test_truncated_samples_can_be_left_out_of_the_loss_and_still_count_in_their_groups():
    seen: list[TrainBatch] = []
    algorithm = grpo()

    def estimate(batch: TrainBatch) -> TrainBatch:
        seen.append(batch)
        return algorithm.estimate(batch)

    rollouts: list[RolloutBatch] = []
    config = replace(IN_MEMORY, mask_truncated=True, algorithm=replace(algorithm, estimate=estimate))
    history = await run(make_run(), config, on_rollouts=lambda step, batch: rollouts.append(batch))
    for batch, rollout, metrics in zip(seen, rollouts, history, strict=True):
        truncated = torch.tensor([sample.status is Status.TRUNCATED for sample in rollout.samples])
        assert 0 < int(truncated.sum()) < len(truncated)
        assert float(batch.loss_mask[truncated].sum()) == 0
        assert bool((batch.loss_mask[~truncated].sum(1) > 0).all())
        assert bool(batch.trainable.all())
        assert batch.rewards.tolist() == rollout.rewards
        lengths = [length for length, cut in zip(rollout.response_lengths, truncated.tolist(), strict=True) if not cut]
        assert metrics["num_tokens"] == sum(lengths)
        assert metrics["response_length_mean"] == sum(rollout.response_lengths) / 16


async def test_a_step_of_truncated_samples_only_trains_nothing_and_the_run_goes_on():
    parts, engine = make_run(), FakeEngine(script_answer([5, 6, 7, 1]))
    generate = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=2))
    rollout = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate, reward_fn=random_reward)
    parts = (parts[0], parts[1], AsyncRolloutManager(parts[1], rollout, engines=[engine]), engine)
    history = await run(parts, replace(IN_MEMORY, num_steps=2, mask_truncated=True))
    assert [(m["num_updates"], m["num_tokens"], m["truncated_fraction"]) for m in history] == [(0.0, 0.0, 1.0)] * 2


async def test_a_filter_that_refuses_every_group_ends_with_what_to_do():
    parts = make_run()
    generate = create_generate_fn([parts[3]], create_char_tokenizer(), SamplingParams(max_tokens=6))
    rollout = RolloutConfig(
        batch_size=2, n_samples_per_prompt=4, generate_fn=generate, reward_fn=lambda sample: 1.0,
        filter_fn=check_reward_nonzero_std, max_filter_attempts=3,
    )  # fmt: skip
    parts = (parts[0], parts[1], AsyncRolloutManager(parts[1], rollout, engines=[parts[3]]), parts[3])
    message = r"0 of the 2 groups .* in 3 rounds .* check_reward_nonzero_std passed 0 of 6 .* raise n_samples_per_prompt"
    with pytest.raises(GenerationError, match=message):
        await run(parts, IN_MEMORY)


async def test_a_stop_request_is_true_or_false():
    async def later() -> bool:
        return False

    with pytest.raises(ConfigError, match=r"should_stop returned <coroutine .*it is async"):
        await run(make_run(), IN_MEMORY, should_stop=later)


async def test_rows_are_dealt_anew_in_every_epoch_and_every_step():
    orders: list[list[int]] = []

    def estimate(batch: TrainBatch) -> TrainBatch:
        orders.append([])
        return replace(batch, advantages=torch.arange(batch.num_rows, dtype=torch.float32)[:, None].expand(batch.tokens.shape))

    def loss(outputs, batch: TrainBatch):
        orders[-1].extend(int(row) for row in batch.advantages[:, 0])
        return grpo().loss(outputs, batch)

    config = replace(IN_MEMORY, num_steps=2, num_epochs=2, num_minibatches=2, algorithm=replace(grpo(), estimate=estimate, loss=loss))
    await run(make_run(), config)
    dealt = [tuple(order[i : i + 16]) for order in orders for i in (0, 16)]
    assert all(sorted(order) == list(range(16)) for order in dealt)
    assert len(set(dealt)) == 4


async def test_a_kl_controller_waits_for_the_policy_and_counts_the_rows_that_were_trained_on():
    reference = FakeBackend(name="reference")
    reference.num_updates = 1
    seen: list[int] = []

    def loss(outputs, batch: TrainBatch):
        seen.append(batch.num_rows)
        return grpo(kl_coef=0.1).loss(outputs, batch)

    control = KLControl(kl_coef=0.1, target=10.0, horizon=100.0)  # the KL stays below, so the coefficient falls: 0.2 x rows / horizon
    config = replace(IN_MEMORY, num_steps=3, kl_control=control, mask_truncated=True, algorithm=replace(grpo(kl_coef=0.1), loss=loss))
    history = await run(make_run(), config, reference=reference)
    rows = [seen[0], seen[1]]
    assert 0 < rows[0] < 16, "some of the rows are truncated, else the test shows nothing"
    expected = [0.1, 0.1 * (1 - 0.2 * rows[0] / 100), 0.1 * (1 - 0.2 * rows[0] / 100) * (1 - 0.2 * rows[1] / 100)]
    assert [m["kl_coef"] for m in history] == pytest.approx(expected)


async def test_samples_of_an_unknown_cut_distribution_are_refused_where_their_log_probs_are_read():
    def make_cut_run():
        backend, buffer, _, engine = make_run()
        sample = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=6, top_p=0.9), seed=0)

        async def generate(prompt: Prompt, n: int) -> tuple[Sample, ...]:
            return tuple(replace(one, kept_tokens=None) for one in await sample(prompt, n))  # as a server answers

        config = RolloutConfig(batch_size=4, n_samples_per_prompt=4, generate_fn=generate, reward_fn=random_reward)
        return backend, buffer, AsyncRolloutManager(buffer, config, engines=[engine]), engine

    with pytest.raises(DataError, match=r"16 of 16 samples .* top_p"):
        await run(make_cut_run(), IN_MEMORY)
    assert len(await run(make_cut_run(), replace(IN_MEMORY, algorithm=recomputed(grpo())))) == 3


@pytest.mark.parametrize(
    ("module", "front", "loop"),
    [(rl_loop, "run_rl_training", "train_rl"), (async_rl_loop, "run_async_rl_training", "train_async_rl")],
)
async def test_the_keyword_call_hands_on_every_part(module: Any, front: str, loop: str, monkeypatch: pytest.MonkeyPatch):
    received: list[Any] = []

    async def record(*arguments: Any) -> list[Any]:
        received.extend(arguments)
        return []

    monkeypatch.setattr(module, loop, record)
    given: dict[str, Any] = {name: object() for name in inspect.signature(getattr(module, front)).parameters}
    given["checkpoint_dir"] = Path("checkpoints")
    await getattr(module, front)(**given)
    parts, source, config, *rest = received
    assert {field.name: getattr(parts, field.name) for field in fields(RLParts)} == {
        field.name: given["inference_engines" if field.name == "engines" else field.name] for field in fields(RLParts)
    }
    assert source is given.get("rollout_manager", given.get("executor")) and config is given["config"]
    assert rest == [given[name] for name in ("resume", "segment_score") if name in given]


async def test_a_value_of_parts_trains_as_the_keyword_call():
    found = []
    for by_value in (True, False):
        backend, buffer, manager, engine = make_run()
        async with manager:
            if by_value:
                parts = RLParts(backend=backend, data_buffer=buffer, engines=[engine], clock=lambda: 0.0)
                found.append(await train_rl(parts, manager, IN_MEMORY))
            else:
                found.append(await run_rl_training(backend, buffer, manager, [engine], IN_MEMORY, clock=lambda: 0.0))
    assert found[0] == found[1] and len(found[0]) == IN_MEMORY.num_steps


@pytest.mark.parametrize("where", ["rollouts", "evaluation"])
async def test_an_abandoned_step_loses_only_itself(tmp_path: Path, where: str):
    """The run hangs in its fourth step, and goes on behind the third as if nothing had been."""
    config = RLTrainingConfig(num_steps=6, weight_sync="memory", eval_every=2)
    hangs, asked = trio.Event(), 0

    async def evaluate(engine) -> dict[str, float]:
        nonlocal asked
        asked += 1
        if where == "evaluation" and asked == 2 and log.name == "resumed.jsonl" and not hangs.is_set():
            hangs.set()
            await trio.sleep_forever()
        return {"eval_version": float(await engine.get_weight_version())}

    def options(parts, name: str):
        return {"checkpoint_dir": tmp_path / name, "evaluate": partial(evaluate, parts[3])}

    log = tmp_path / "straight.jsonl"
    parts = make_run()
    await run(parts, config, JSONLLogger(log), **options(parts, "straight"))

    log, asked = tmp_path / "resumed.jsonl", 0
    backend, buffer, manager, engine = make_run()

    async def score_or_hang(sample: Sample) -> float:
        if where == "rollouts" and sample.group_index >= 12:  # of the fourth batch, which has taken its prompts
            hangs.set()
            await trio.sleep_forever()
        return random_reward(sample)

    manager = AsyncRolloutManager(buffer, replace(manager.config, reward_fn=score_or_hang), engines=[engine])
    abandonment = Abandonment()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                run,
                (backend, buffer, manager, engine),
                config,
                JSONLLogger(log),
                abandonment=abandonment,
                **options((0, 0, 0, engine), "resumed"),
            )
        )
        await hangs.wait()
        abandonment.request()
    last = 3 if where == "rollouts" else 4
    checkpoint = latest_checkpoint(tmp_path / "resumed")
    assert checkpoint is not None
    assert checkpoint.name == f"step_{last:04d}"
    with log.open("r+b") as file:
        file.truncate(read_run_state(checkpoint).metrics_bytes)
    parts = make_run()
    point = await restore_rl_run(checkpoint, parts[0], parts[2], [parts[3]], config)
    await run(parts, config, JSONLLogger(log), resume=point, **options(parts, "resumed"))
    assert read_without_timings(log) == read_without_timings(tmp_path / "straight.jsonl")


async def test_the_evaluation_that_a_resumed_run_makes_first_can_be_given_up(tmp_path: Path):
    """Each run hangs in the evaluation of its second step, until a third one makes it."""
    config = RLTrainingConfig(num_steps=3, weight_sync="memory", eval_every=2)
    log, hangs, makes_it = tmp_path / "metrics.jsonl", trio.Event(), False

    async def evaluate(engine) -> dict[str, float]:
        version = await engine.get_weight_version()
        if version == 2 and not makes_it:
            hangs.set()
            await trio.sleep_forever()
        return {"eval_version": float(version)}

    async def give_up(**options) -> None:
        nonlocal hangs
        hangs, abandonment = trio.Event(), Abandonment()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(run, parts, config, JSONLLogger(log), abandonment=abandonment, **options))
            await hangs.wait()
            abandonment.request()

    def prepare() -> dict[str, object]:
        return {"checkpoint_dir": tmp_path, "evaluate": partial(evaluate, parts[3])}

    async def restore():
        checkpoint = latest_checkpoint(tmp_path)
        assert checkpoint is not None and checkpoint.name == "step_0002"
        return await restore_rl_run(checkpoint, parts[0], parts[2], [parts[3]], config)

    parts = make_run()
    with trio.fail_after(30):
        await give_up(**prepare())
        parts = make_run()
        await give_up(resume=await restore(), **prepare())
    parts, makes_it = make_run(), True
    await run(parts, config, JSONLLogger(log), resume=await restore(), **prepare())
    assert [line["step"] for line in read_metrics(log) if line.get("eval_version") == 2] == [2]
    assert [line["step"] for line in read_metrics(log)][-2:] == [2, 3]


async def test_a_step_that_is_abandoned_before_any_has_ended_writes_nothing(tmp_path: Path):
    abandonment = Abandonment()
    abandonment.request()
    assert await run(make_run(), IN_MEMORY, checkpoint_dir=tmp_path, abandonment=abandonment) == []
    assert latest_checkpoint(tmp_path) is None


async def test_the_weights_between_whose_syncs_a_run_was_resumed_stay_until_the_next_sync(tmp_path: Path):
    config = RLTrainingConfig(num_steps=8, sync_every=4, checkpoint_every=1, weight_sync="checkpoint")
    asked = iter([False] * 4 + [True])
    await run(make_run(), config, checkpoint_dir=tmp_path, keep_last_n=1, should_stop=lambda: next(asked))
    parts = make_run()
    point = await restore_rl_run(tmp_path / "step_0005", parts[0], parts[2], [parts[3]], config)
    await run(parts, config, checkpoint_dir=tmp_path, keep_last_n=1, resume=point)
    last = latest_checkpoint(tmp_path)
    assert last is not None and last.name == "step_0008"
