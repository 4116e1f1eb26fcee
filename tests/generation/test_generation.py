"""One group, evaluation, and batches without an event loop."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pytest
import trio
from executors import make_buffer

from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardConfig, RolloutConfig
from rollouts.data.filters import check_reward_nonzero_std, make_threshold_filter
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import completion_to_sample, create_pending_group
from rollouts.engines.protocol import EngineFeature
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, DataError, EngineError, GenerationError, RewardError
from rollouts.generation.evaluation import evaluate_prompts, summarize_evaluation
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import GroupSettings, create_generate_fn, generate_group, make_request_id
from rollouts.generation.sync_batches import generate_rollout_batch, generate_rollout_batches
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, FakeSGLangServer, FakeVLLMServer, SGLangSettings, random_answer, script_answer
from rollouts.testing.engines import Call
from rollouts.types import Completion, Group, Message, Prompt, RolloutBatch, Sample, SamplingParams, Status


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return create_char_tokenizer()


def prompt_delay(prompt_tokens: tuple[int, ...], seed: int | None) -> float:
    return (0 if seed is None else seed) % 7 + 1.0


async def test_a_group_is_in_the_order_of_its_indices_whoever_ends_first(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=prompt_delay)
    prompt = Prompt(content="12=", index=5, metadata={"ground_truth": "12"})
    group = await generate_group(engine, tokenizer, prompt, 4, SamplingParams(max_tokens=20))
    assert [sample.index for sample in group] == [20, 21, 22, 23]
    assert {sample.group_index for sample in group} == {5}
    prompt_tokens = tuple(tokenizer("12=")["input_ids"])
    for k, sample in enumerate(group):
        answer = tuple(random_answer()(prompt_tokens, derive_seed(0, 5, k, 0)))
        assert sample.tokens == prompt_tokens + answer
        assert sample.loss_mask == (0.0,) * len(prompt_tokens) + (1.0,) * len(answer)
        assert sample.response == tokenizer.decode(answer[:-1])
        assert sample.status is Status.COMPLETED
        assert sample.metadata == {"ground_truth": "12"}
        assert sample.prompt == "12="
    assert len({sample.tokens for sample in group}) == 4


async def test_a_sample_is_checked_once_when_its_completion_arrives(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Status] = []
    check = Sample.__post_init__

    def note(sample: Sample) -> None:
        checked.append(sample.status)
        check(sample)

    async def reward(sample: Sample) -> float:
        return float(sample.index)

    monkeypatch.setattr(Sample, "__post_init__", note)
    config = RolloutConfig(
        batch_size=3,
        n_samples_per_prompt=4,
        generate_fn=create_generate_fn([FakeEngine()], tokenizer, SamplingParams(max_tokens=20)),
        reward_fn=reward,
    )
    batch = await AsyncRolloutManager(make_buffer(3), config).generate_batch()
    assert [sample.reward for sample in batch.samples] == [float(index) for index in range(12)]
    assert sorted(checked) == [Status.COMPLETED] * 12 + [Status.PENDING] * 3, "each sample once, and what a group has in common once"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_log_probs": (-0.5, float("nan"))}, "Sample.rollout_log_probs holds nan, expected finite log-probs"),
        ({"output_tokens": (5, 6.5)}, "Sample.tokens is 6.5"),
        ({"output_versions": (0, 0.5)}, "Sample.weight_versions is 0.5"),
        ({"temperature": float("inf")}, "Sample.temperature is inf"),
    ],
)
def test_values_of_a_completion_are_checked_as_they_become_a_sample(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"output_tokens": (5, 6), "output_log_probs": (-0.5, -0.5), "output_versions": (0, 0)}
    completion = Completion(request_id="r", input_tokens=(1, 2), finish_reason="stop", **(values | changes))
    (pending,) = create_pending_group(Prompt(content="12="), 1)
    with pytest.raises(DataError, match=re.escape(message)):
        completion_to_sample(pending, (1, 2), completion, "text")


async def test_requests_of_a_group_are_in_flight_together_with_ids_that_sort(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(script_answer([5, 1]), seconds_per_token=1.0)
    await generate_group(engine, tokenizer, Prompt(content="1", index=3), 12, SamplingParams())
    assert trio.current_time() == 2.0
    ids = sorted(call.arguments["request_id"] for call in engine.calls)
    assert ids == [make_request_id(3, k) for k in range(12)]
    assert len({call.arguments["params"].seed for call in engine.calls}) == 12
    assert make_request_id(9, 11) < make_request_id(10, 2)


async def test_status_follows_the_finish_reason(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
    completed = await generate_group(engine, tokenizer, "1", 1, SamplingParams(max_tokens=3))
    truncated = await generate_group(engine, tokenizer, "1", 1, SamplingParams(max_tokens=2))
    async with trio.open_nursery() as nursery:
        aborted: list[Group] = []

        async def generate() -> None:
            aborted.append(await generate_group(engine, tokenizer, "1", 1, SamplingParams(max_tokens=3)))

        nursery.start_soon(generate)
        await trio.sleep(1.5)
        await engine.abort()
    assert [group[0].status for group in (completed, truncated, aborted[0])] == [Status.COMPLETED, Status.TRUNCATED, Status.ABORTED]


async def test_an_aborted_group_goes_on_from_its_tokens_with_the_rest_of_its_budget(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    prompt, params = Prompt(content="12=", index=2), SamplingParams(max_tokens=6)
    prompt_tokens = tuple(tokenizer("12=")["input_ids"])
    first = FakeEngine(
        lambda tokens, seed: [7, 1] if seed == derive_seed(0, 2, 0, 0) else [5] * 10, seconds_per_token=1.0, weight_version=1
    )
    groups: list[Group] = []

    async def generate() -> None:
        groups.append(await generate_group(first, tokenizer, prompt, 2, params))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(4.5)
        await first.abort()
    done, stopped = groups[0]
    assert (done.status, stopped.status) == (Status.COMPLETED, Status.ABORTED)
    assert stopped.tokens == (*prompt_tokens, 5, 5, 5, 5)

    second = FakeEngine(script_answer([6] * 10), weight_version=2)
    again, continued = await generate_group(second, tokenizer, prompt, 2, params, partial=groups[0])
    assert again == done, "a finished sample is not generated again"
    assert continued.tokens == (*prompt_tokens, 5, 5, 5, 5, 6, 6)
    assert continued.weight_versions == (-1,) * len(prompt_tokens) + (1, 1, 1, 1, 2, 2)
    assert continued.status is Status.TRUNCATED
    assert continued.response == tokenizer.decode([5, 5, 5, 5, 6, 6])
    (call,) = second.calls
    assert call.arguments["prompt_tokens"] == stopped.tokens
    assert call.arguments["params"].max_tokens == 2
    assert call.arguments["params"].seed == derive_seed(0, 2, 1, 4)


async def test_a_group_that_was_aborted_before_its_first_token_begins_anew(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    slow, groups = FakeEngine(seconds_per_token=9.0), list[Group]()

    async def generate() -> None:
        groups.append(await generate_group(slow, tokenizer, "1", 2, SamplingParams()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(1.0)
        await slow.abort()
    assert {sample.status for sample in groups[0]} == {Status.ABORTED}
    fresh = await generate_group(FakeEngine(), tokenizer, "1", 2, SamplingParams())
    assert await generate_group(FakeEngine(), tokenizer, "1", 2, SamplingParams(), partial=groups[0]) == fresh


async def test_messages_go_through_the_template(tokenizer: Any) -> None:
    engine = FakeEngine()
    messages = (Message(role="user", content="12="),)
    await generate_group(engine, tokenizer, Prompt(content=messages), 1, SamplingParams())
    await generate_group(engine, tokenizer, [{"role": "user", "content": "12="}], 1, SamplingParams())
    expected = tuple(tokenizer.apply_chat_template([{"role": "user", "content": "12="}], add_generation_prompt=True)["input_ids"])
    assert [call.arguments["prompt_tokens"] for call in engine.calls] == [expected, expected]


async def test_an_engine_failure_is_raised_as_itself(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    failing = derive_seed(0, 0, 1, 0)
    engine = FakeEngine(
        script_answer([5] * 9), seconds_per_token=1.0, error_for=lambda tokens, seed: EngineError("gone") if seed == failing else None
    )
    with pytest.raises(EngineError, match="gone"):
        await generate_group(engine, tokenizer, "1", 3, SamplingParams())
    assert engine.pending_requests == ()


async def test_generate_fn_spreads_groups_over_engines_by_prompt(tokenizer: Any) -> None:
    engines = [FakeEngine(name="a"), FakeEngine(name="b")]
    generate_fn = create_generate_fn(engines, tokenizer, SamplingParams())
    for index in (0, 1, 2, 3, 4):
        await generate_fn(Prompt(content="1", index=index), 2)
    assert [len(engine.calls) for engine in engines] == [6, 4]
    with pytest.raises(ConfigError, match="no engines"):
        create_generate_fn([], tokenizer, SamplingParams())


# all samples of a group in one request


class GroupEngine(FakeEngine):
    """A FakeEngine that takes groups, sample i of them with the seed of the group plus i."""

    features = FakeEngine.features | {EngineFeature.GROUPS}

    async def generate_group(
        self, prompt_tokens: Sequence[int], params: SamplingParams, n: int, *, request_id: str | None = None
    ) -> tuple[Completion, ...]:
        self.calls.append(Call(self.name, "generate_group", {"seed": params.seed, "n": n, "request_id": request_id}))
        found: dict[int, Completion] = {}

        async def one(i: int) -> None:
            assert params.seed is not None
            found[i] = await self.generate(prompt_tokens, params.new(seed=params.seed + i), request_id=f"{request_id}/{i}")

        async with trio.open_nursery() as nursery:
            for i in range(n):
                nursery.start_soon(one, i)
        return tuple(found[i] for i in range(n))

    def methods(self) -> list[str]:
        return [call.method for call in self.calls if not str(call.arguments.get("request_id")).count("/")]


async def test_a_new_group_is_one_request_and_its_greedy_sample_another(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = GroupEngine(seconds_per_token=prompt_delay)
    generate_fn = create_generate_fn([engine], tokenizer, SamplingParams(max_tokens=20), seed=3, num_greedy=1, one_request_per_group=True)
    group = await generate_fn(Prompt(content="12=", index=5), 4)
    assert sorted(engine.methods()) == ["generate", "generate_group"]
    (asked,) = [call.arguments for call in engine.calls if call.method == "generate_group"]
    assert asked == {"seed": derive_seed(3, 5, 0, 0), "n": 4, "request_id": make_request_id(5, 0)}
    prompt_tokens = tuple(tokenizer("12=")["input_ids"])
    for k, sample in enumerate(group[:4]):
        assert sample.tokens == prompt_tokens + tuple(random_answer()(prompt_tokens, derive_seed(3, 5, 0, 0) + k))
        assert sample.status is Status.COMPLETED
    assert [sample.index for sample in group] == [25, 26, 27, 28, 29]
    assert group[4].trainable is False
    (greedy,) = [call.arguments["params"] for call in engine.calls if call.arguments.get("request_id") == make_request_id(5, 4)]
    assert greedy.greedy
    one_by_one = await generate_group(
        engine, tokenizer, Prompt(content="12=", index=5), 4, SamplingParams(max_tokens=20), settings=GroupSettings(seed=3)
    )
    assert one_by_one[1:] != group[1:4], "the seeds of the two ways differ"


async def test_a_group_that_has_begun_goes_on_sample_by_sample(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    prompt, params = Prompt(content="12=", index=2), SamplingParams(max_tokens=6)
    first_seed = derive_seed(0, 2, 0, 0)
    first = GroupEngine(lambda tokens, seed: [7, 1] if seed == first_seed else [5] * 10, seconds_per_token=1.0)
    groups: list[Group] = []

    async def generate() -> None:
        groups.append(await generate_group(first, tokenizer, prompt, 3, params, settings=GroupSettings(one_request=True)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(4.5)
        await first.abort()
    assert [sample.status for sample in groups[0]] == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]

    second = GroupEngine(script_answer([6] * 10), weight_version=1)
    group = await generate_group(second, tokenizer, prompt, 3, params, partial=groups[0], settings=GroupSettings(one_request=True))
    assert second.methods() == ["generate", "generate"]
    assert group[0] == groups[0][0]
    assert [sample.tokens[-6:] for sample in group[1:]] == [(5, 5, 5, 5, 6, 6)] * 2


async def test_samples_that_restart_beside_finished_ones_get_seeds_of_their_own(tokenizer: Any) -> None:
    prompt, engine = Prompt(content="1", index=4), GroupEngine()
    whole = await generate_group(engine, tokenizer, prompt, 4, SamplingParams(), settings=GroupSettings(one_request=True))
    pending = [Sample(prompt="1", index=sample.index, group_index=4) for sample in whole]
    group = await generate_group(
        engine, tokenizer, prompt, 4, SamplingParams(), partial=(*whole[:2], *pending[2:]), settings=GroupSettings(one_request=True)
    )
    assert len({sample.tokens for sample in group}) == 4
    assert engine.methods() == ["generate_group", "generate", "generate"]


async def test_a_group_that_was_aborted_before_its_first_token_is_one_request_again(
    tokenizer: Any, autojump_clock: trio.testing.MockClock
) -> None:
    slow, groups = GroupEngine(seconds_per_token=9.0), list[Group]()

    async def generate() -> None:
        groups.append(await generate_group(slow, tokenizer, "1", 2, SamplingParams(), settings=GroupSettings(one_request=True)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trio.sleep(1.0)
        await slow.abort()
    assert {sample.status for sample in groups[0]} == {Status.ABORTED}
    engine = GroupEngine()
    again = await generate_group(engine, tokenizer, "1", 2, SamplingParams(), partial=groups[0], settings=GroupSettings(one_request=True))
    assert engine.methods() == ["generate_group"]
    assert again == await generate_group(engine, tokenizer, "1", 2, SamplingParams(), settings=GroupSettings(one_request=True))


async def test_an_engine_that_cannot_generate_groups_is_named_before_anything_runs(tokenizer: Any) -> None:
    engines = [GroupEngine(), FakeEngine(name="embedded")]
    with pytest.raises(ConfigError, match=r"embedded lacks the feature groups .* one_request_per_group"):
        create_generate_fn(engines, tokenizer, SamplingParams(), one_request_per_group=True)
    with pytest.raises(ConfigError, match="embedded lacks"):
        await generate_group(engines[1], tokenizer, "1", 2, SamplingParams(), settings=GroupSettings(one_request=True))
    assert engines[1].calls == []


def count_up(prompt_tokens: tuple[int, ...], index: int, num_loads: int, seed: int | None) -> tuple[int, float]:
    """Answers without an end that differ from seed to seed."""
    return 3 + derive_seed(seed or 0, index) % 100, -0.5


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_server_gets_one_request_for_a_group(kind: str, tokenizer: Any) -> None:
    server: Any
    if kind == "sglang":
        server, path = FakeSGLangServer(count_up, SGLangSettings(deterministic=True), seconds_per_token=0.02), "/generate"
    else:
        server, path = FakeVLLMServer(count_up, seconds_per_token=0.02), "/inference/v1/generate"
    async with server, (SGLangEngine if kind == "sglang" else VLLMEngine)(server.url, vocab_size=128) as engine:
        params, prompt = SamplingParams(max_tokens=4), Prompt(content="12=", index=7)
        num_before = server.count(path)
        group = await create_generate_fn([engine], tokenizer, params, one_request_per_group=True)(prompt, 4)
        assert server.count(path) == num_before + 1
        assert len({sample.tokens for sample in group}) == 4
        assert [sample.index for sample in group] == [28, 29, 30, 31]
        for sample in group:
            assert (len(sample.tokens), sample.status) == (3 + 4, Status.TRUNCATED)
            assert sample.weight_versions == (-1, -1, -1, 0, 0, 0, 0)
            assert sample.rollout_log_probs == (0, 0, 0, -0.5, -0.5, -0.5, -0.5)

        stopped: list[Group] = []
        endless = create_generate_fn([engine], tokenizer, params.new(max_tokens=480), one_request_per_group=True)

        async def generate() -> None:
            stopped.append(await endless(prompt, 4))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate)
                while sum(len(sequence.draws) >= 2 for sequence in server.scheduler.running) < 4:
                    await trio.sleep(0.002)
                await engine.abort([make_request_id(7, 0)])
        assert [sample.status for sample in stopped[0]] == [Status.ABORTED] * 4
        num_before = server.count(path)
        longest = max(len(sample.tokens) for sample in stopped[0])
        rest = create_generate_fn([engine], tokenizer, params.new(max_tokens=longest), one_request_per_group=True)
        whole = await rest(prompt, 4, stopped[0])
        assert server.count(path) == num_before + 4
        for before, after in zip(stopped[0], whole, strict=True):
            assert after.tokens[: len(before.tokens)] == before.tokens
            assert (len(after.tokens), after.status) == (3 + longest, Status.TRUNCATED)


async def reward_length(sample: Sample) -> float:
    return float(len(sample.response))


async def test_evaluation_is_in_the_order_of_the_prompts_and_counts(tokenizer: Any, autojump_clock: trio.testing.MockClock) -> None:
    engine = FakeEngine(seconds_per_token=prompt_delay)
    prompts = ["1", Prompt(content="2", index=77, metadata={"ground_truth": "2"}), "3"]
    metrics, samples = await evaluate_prompts(engine, tokenizer, prompts, reward_length, SamplingParams(max_tokens=6), n=2)
    assert [sample.index for sample in samples] == [0, 1, 2, 3, 4, 5]
    assert [sample.prompt for sample in samples] == ["1", "1", "2", "2", "3", "3"]
    assert samples[2].metadata == {"ground_truth": "2"}
    lengths = [sum(sample.loss_mask) for sample in samples]
    assert metrics == {
        "accuracy": pytest.approx(sum(len(sample.response) for sample in samples) / 6),
        "num_samples": 6.0,
        "num_dropped": 0.0,
        "response_length_mean": pytest.approx(sum(lengths) / 6),
        "response_length_max": max(lengths),
        "truncated_fraction": sum(sample.status is Status.TRUNCATED for sample in samples) / 6,
        "graded_fraction": sum(len(sample.response) not in (0, 1) for sample in samples) / 6,
    }
    again = await evaluate_prompts(FakeEngine(), tokenizer, prompts, reward_length, SamplingParams(max_tokens=6), n=2)
    assert again == (metrics, samples)


@pytest.mark.parametrize(("rewards", "graded"), [((0.0, 1.0, 1.0), None), ((-1.0, 1.0, 0.0), 1 / 3), ((-1.0, 0.5, 2.0), 1.0)])
def test_an_accuracy_is_told_from_a_mean_reward(rewards: tuple[float, ...], graded: float | None) -> None:
    groups = [(Sample(tokens=(1,), loss_mask=(1.0,), reward=reward, status=Status.COMPLETED),) for reward in rewards]
    metrics, _ = summarize_evaluation(groups, 1)
    assert metrics["accuracy"] == pytest.approx(sum(rewards) / 3)
    assert metrics.get("graded_fraction") == graded


async def test_evaluation_raises_or_drops_what_cannot_be_scored(tokenizer: Any) -> None:
    async def refuse_two(sample: Sample) -> float:
        if sample.prompt == "2":
            raise ValueError("cannot parse")
        return 1.0

    engine = FakeEngine()
    with pytest.raises(RewardError) as caught:
        await evaluate_prompts(engine, tokenizer, ["1", "2"], refuse_two, SamplingParams())
    assert any("prompt 1" in note for note in caught.value.__notes__)
    drop = RewardConfig(on_error="drop")
    metrics, samples = await evaluate_prompts(engine, tokenizer, ["1", "2"], refuse_two, SamplingParams(), reward=drop)
    assert (metrics["accuracy"], metrics["num_samples"], metrics["num_dropped"], len(samples)) == (1.0, 1.0, 1.0, 1)
    with pytest.raises(GenerationError, match="all 1 evaluation groups were dropped"):
        await evaluate_prompts(engine, tokenizer, ["2"], refuse_two, SamplingParams(), reward=drop)
    with pytest.raises(ConfigError, match="no prompts"):
        await evaluate_prompts(engine, tokenizer, [], refuse_two, SamplingParams())


# batches without an event loop


def generate_plain(prompt: Prompt, n: int, answer: Callable[[int, int], int] = lambda index, k: 3 + index % 5) -> list[Sample]:
    tokens = [(10, answer(prompt.index, k)) for k in range(n)]
    return [
        Sample(prompt=prompt.content, tokens=pair, loss_mask=(0.0, 1.0), status=Status.COMPLETED, metadata=prompt.metadata)
        for pair in tokens
    ]


def reward_token(sample: Sample) -> float:
    return float(sample.tokens[-1])


def make_config(**changes: Any) -> RolloutConfig:
    defaults: dict[str, Any] = {"batch_size": 3, "n_samples_per_prompt": 2, "generate_fn": generate_plain, "reward_fn": reward_token}
    return RolloutConfig(**(defaults | changes))


def test_batches_without_end_are_deterministic_and_go_over_epochs() -> None:
    first = list(islice(generate_rollout_batches(make_buffer(5), make_config()), 4))
    assert first == list(islice(generate_rollout_batches(make_buffer(5), make_config()), 4))
    samples = [sample for batch in first for sample in batch.samples]
    assert [sample.index for sample in samples] == list(range(24))
    assert [sample.group_index for sample in samples] == [i // 2 for i in range(24)]
    assert first[0].rewards == [3.0, 3.0, 4.0, 4.0, 5.0, 5.0]
    assert {sample.metadata["ground_truth"] for sample in samples[:10]} == {"0", "1", "2", "3", "4"}
    assert first[0].metadata["num_groups_generated"] == 3


def test_batches_go_on_from_a_saved_position() -> None:
    buffer, resumed = make_buffer(5), make_buffer(5)
    batches = generate_rollout_batches(buffer, make_config())
    next(batches)
    resumed.load_state(buffer.save_state())
    assert generate_rollout_batch(resumed, make_config()) == next(batches)


def test_keyword_arguments_reach_the_generate_function() -> None:
    batch: RolloutBatch = generate_rollout_batch(make_buffer(5), make_config(), answer=lambda index, k: 50 + k)
    assert batch.rewards == [50.0, 51.0] * 3


def test_rewards_come_before_the_filter_and_refused_groups_are_replaced() -> None:
    generate_fn = partial(generate_plain, answer=lambda index, k: 3 + (k if index % 2 else 0))
    config = make_config(generate_fn=generate_fn, filter_fn=check_reward_nonzero_std)
    batch = generate_rollout_batch(make_buffer(5), config)
    assert [sample.group_index for sample in batch.samples] == [1, 1, 3, 3, 5, 5]
    assert (batch.metadata["num_groups_generated"], batch.metadata["num_groups_filtered"]) == (6, 3)


def test_a_filter_that_passes_nothing_ends_with_its_name_and_pass_rate() -> None:
    config = make_config(filter_fn=check_reward_nonzero_std, max_filter_attempts=4)
    with pytest.raises(GenerationError) as caught:
        generate_rollout_batch(make_buffer(5), config)
    message = str(caught.value)
    assert "check_reward_nonzero_std passed 0 of 12 groups (pass rate 0)" in message
    assert "min 3, mean" in message
    assert "max_filter_attempts (4)" in message


def test_where_nothing_can_be_awaited_an_async_filter_is_refused_and_a_factory_is_found() -> None:
    async def keep(group: Group) -> bool:
        return False

    with pytest.raises(ConfigError, match="filter_fn keep is async: use AsyncRolloutManager"):
        generate_rollout_batch(make_buffer(5), make_config(filter_fn=keep))
    for mistake in (make_threshold_filter, lambda group: keep(group), lambda group: "no"):
        with pytest.raises(GenerationError, match=r"filter_fn .* returned .* for group 0, expected True or False"):
            generate_rollout_batch(make_buffer(5), make_config(filter_fn=mistake))


def test_groups_with_failed_samples_are_dropped_and_counted() -> None:
    def generate_some(prompt: Prompt, n: int) -> list[Sample]:
        return [Sample(status=Status.FAILED)] * n if prompt.index == 1 else generate_plain(prompt, n)

    batch = generate_rollout_batch(make_buffer(5), make_config(generate_fn=generate_some))
    assert [sample.group_index for sample in batch.samples] == [0, 0, 2, 2, 3, 3]
    assert batch.metadata["num_groups_dropped"] == 1


async def generate_async(prompt: Prompt, n: int) -> list[Sample]:
    return generate_plain(prompt, n)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generate_fn": generate_async}, "generate_fn generate_async is async: use AsyncRolloutManager"),
        ({"generate_fn": partial(generate_async)}, "generate_async is async"),
        ({"reward_fn": reward_length}, "reward_fn reward_length is async"),
        ({"generate_fn": None}, "generate_fn is None"),
    ],
)
def test_async_and_missing_functions_are_refused_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_rollout_batches(make_buffer(5), make_config(**changes))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda prompt, n: generate_plain(prompt, n + 1), r"returned 3 samples for prompt 0, expected n = 2"),
        (lambda prompt, n: ["text"] * n, "returned str for prompt 0, expected a sequence of 2 Samples"),
        (lambda prompt, n: None, "returned NoneType for prompt 0"),
        (lambda prompt, n: [Sample(tokens=(1,), loss_mask=(1.0,))] * n, "1 tokens and status pending: set status"),
        (lambda prompt, n: [Sample(status=Status.ABORTED)] * n, "returned an unfinished group"),
    ],
)
def test_results_that_are_no_group_are_refused_by_name(result: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        generate_rollout_batch(make_buffer(5), make_config(generate_fn=result))


def test_an_error_of_the_users_function_is_raised_as_itself_and_names_the_prompt() -> None:
    def generate_failing(prompt: Prompt, n: int) -> list[Sample]:
        raise LookupError("no such tool")

    buffer = make_buffer(5)
    content = make_buffer(5).get_prompts(1)[0].content
    with pytest.raises(LookupError, match="no such tool") as caught:
        generate_rollout_batch(buffer, make_config(generate_fn=generate_failing))
    assert caught.value.__notes__ == [f"while working on prompt 0: {content!r}"]
    chat = DataBuffer([(Message(role="system", content="Be brief."), Message(role="user", content="why?"))] * 5)
    with pytest.raises(LookupError) as caught:
        generate_rollout_batch(chat, make_config(generate_fn=generate_failing))
    assert caught.value.__notes__ == [r"while working on prompt 0: 'system: Be brief.\nuser: why?'"]


def test_completion_exposes_what_a_response_consists_of() -> None:
    completion = Completion(
        request_id="r", input_tokens=(1, 2), output_tokens=(3,), output_log_probs=(-0.5,), output_versions=(4,), finish_reason="stop"
    )
    assert (completion.input_len, completion.output_len) == (2, 1)
