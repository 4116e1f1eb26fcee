"""The contract of every inference engine. An engine joins by one line in ENGINES of contract_engines.py.

tests/real_servers/test_contract.py runs the same tests on real servers. No test knows which engine it has, only what is said of it there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from contract_engines import ENGINES, ContractEngine
from endless_models import create_endless_model

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample
from rollouts.engines.inprocess.sampling import truncate_logits
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.errors import EngineContextError, EngineError
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, Sample, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:.*ignores seeds")

TOLERANCE = 1e-4  # nats, float32
PROMPTS = [tuple(range(3 + i // 4, 8 + i // 3)) for i in range(14)]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
MOMENTS_S = (0.03, 0.1, 0.3, 0.05, 1.0, 0.2, 3.0, 0.02, 0.6, 0.07, 0.15, 2.0, 0.4, 0.01, 1.4, 5.0)  # fast machines and slow ones


def plain_model(seed: int = 0) -> Any:
    """Create a model of a shape that real servers can serve."""
    return create_tiny_model(hidden_size=64, head_dim=32, seed=seed)


def lively_model(seed: int = 0) -> Any:
    """Larger weights than random initialisation gives, so that greedy answers are not one token for ever."""
    model = plain_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def endless_model(seed: int = 0) -> Any:
    """Its answers go on until max_tokens."""
    return create_endless_model(seed, hidden_size=64, head_dim=32)


@pytest.fixture(params=ENGINES, ids=lambda e: e.name)
def facts(request: pytest.FixtureRequest) -> ContractEngine:
    return request.param


@pytest.fixture
def create_engine(facts: ContractEngine, tmp_path: Path):
    """Opens the engine with a model of its own."""
    folder = tmp_path / "served"
    return lambda model=None: facts.open(plain_model() if model is None else copy.deepcopy(model), create_char_tokenizer(), folder)


def params_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=5 + i % 7, temperature=(0.0, 0.8, 1.0, 1.7)[i % 4], seed=i)


async def generate_all(engine, indices=range(len(PROMPTS)), prompts=PROMPTS, params=params_of) -> dict[int, Completion]:
    found: dict[int, Completion] = {}

    async def one(i: int) -> None:
        found[i] = await engine.generate(prompts[i], params(i), request_id=f"{i:04d}")

    async with trio.open_nursery() as nursery:
        for i in indices:
            nursery.start_soon(one, i)
    return found


async def generate_while(
    engine, requests: Mapping[str, SamplingParams], act: Callable[[], Awaitable[Any]], came_in_time: Callable[[dict[str, Completion]], bool]
) -> dict[str, Completion]:
    """Completions of requests during which something was done: after another while each time, until that came neither early nor late."""
    for moment_s in MOMENTS_S:
        found: dict[str, Completion] = {}

        async def one(name: str, found: dict[str, Completion] = found) -> None:
            found[name] = await engine.generate(PROMPTS[0], requests[name], request_id=name)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for name in requests:
                    nursery.start_soon(one, name)
                await trio.sleep(moment_s)
                await act()
        if came_in_time(found):
            return found
    pytest.fail(f"nothing was in flight after {MOMENTS_S} s: {found}")


def compute_log_probs(model, completion: Completion, temperature: float | None = None) -> list[float]:
    """Compute the log-probs of the output tokens in one forward pass over the whole sequence."""
    tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, completion.input_len - 1 : -1] / (completion.temperature if temperature is None else temperature)
    return gather_log_probs(logits, tokens[0, completion.input_len :]).tolist()


def generate_greedily(model, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=1, pad_token_id=0)
    return tuple(found[0, len(prompt) :].tolist())


def assert_repeated(facts: ContractEngine, one: dict[int, Completion], other: dict[int, Completion]) -> None:
    assert {i: c.output_tokens for i, c in one.items()} == {i: c.output_tokens for i, c in other.items()}
    for i, completion in one.items():
        assert completion.output_log_probs == pytest.approx(other[i].output_log_probs, abs=TOLERANCE)
    assert one == other or not facts.repeats_bits


# -- generation


async def test_many_requests_at_once_each_get_a_consistent_answer(create_engine):
    async with create_engine() as engine:
        found = await generate_all(engine)
    for i, completion in found.items():
        assert completion.input_tokens == PROMPTS[i]
        assert completion.request_id == f"{i:04d}"
        assert 1 <= completion.output_len <= params_of(i).max_tokens
        assert all(torch.tensor(completion.output_log_probs).isfinite())
        assert max(completion.output_log_probs) <= 0
        assert completion.output_versions == (0,) * completion.output_len
        ended = completion.output_tokens[-1] == 1
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or completion.output_len == params_of(i).max_tokens
        assert 1 not in completion.output_tokens[:-1]


async def test_the_same_requests_are_answered_the_same(create_engine, facts):
    async with create_engine(lively_model()) as engine:
        runs = [await generate_all(engine, params=lambda i: facts.make_repeatable(params_of(i))) for _ in range(2)]
    assert_repeated(facts, *runs)


async def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(create_engine, facts):
    async with create_engine(lively_model()) as engine:
        crowd = await generate_all(engine, params=lambda i: facts.make_repeatable(params_of(i)))
        for i in (1, 6, 11):
            alone = (await generate_all(engine, [i], params=lambda i: facts.make_repeatable(params_of(i))))[i]
            assert alone.output_tokens == crowd[i].output_tokens
            assert alone.output_log_probs == pytest.approx(crowd[i].output_log_probs, abs=TOLERANCE)


async def test_greedy_tokens_are_those_of_hugging_face_generate(create_engine):
    model = lively_model()
    async with create_engine(model) as engine:
        found = await generate_all(engine, params=lambda i: GREEDY)
    assert max(len(set(c.output_tokens)) for c in found.values()) > 3
    for i, prompt in enumerate(PROMPTS):
        assert found[i].output_tokens == generate_greedily(model, prompt, 9)


async def test_the_seed_decides_or_the_engine_says_that_it_does_not(create_engine, facts):
    params = SamplingParams(max_tokens=12, seed=3)
    async with create_engine(endless_model()) as engine:
        with nullcontext() if facts.honors_seeds else pytest.warns(UserWarning, match="ignores seeds"):
            a, b = [await engine.generate(PROMPTS[0], params) for _ in range(2)]
        c = await engine.generate(PROMPTS[0], params.new(seed=4))
        free = [await engine.generate(PROMPTS[0], params.new(seed=None)) for _ in range(2)]
    assert (a.output_tokens == b.output_tokens) == facts.honors_seeds
    assert a.output_tokens != c.output_tokens
    assert free[0].output_tokens != free[1].output_tokens


async def test_stop_ids_and_budget_end_a_response(create_engine):
    params = GREEDY.new(max_tokens=12)
    async with create_engine(lively_model()) as engine:
        plain = await engine.generate(PROMPTS[0], params)
        stop_at = plain.output_tokens[4]
        place = plain.output_tokens.index(stop_at)
        stopped = await engine.generate(PROMPTS[0], params.new(stop_token_ids=(stop_at,)))
        one = await engine.generate(PROMPTS[0], params.new(max_tokens=1))
    assert stopped.output_tokens == plain.output_tokens[: place + 1]
    assert stopped.finish_reason == "stop"
    assert (one.output_len, one.finish_reason) == (1, "length")


async def test_a_stop_string_ends_a_response_and_stays_in_it(create_engine):
    tokenizer = create_char_tokenizer()
    params = GREEDY.new(max_tokens=12)
    async with create_engine(lively_model()) as engine:
        plain = await engine.generate(PROMPTS[0], params)
        text = tokenizer.decode(list(plain.output_tokens))
        stop = text[3:5]
        stopped = await engine.generate(PROMPTS[0], params.new(stop=("~never~", stop)))
    assert tokenizer.decode(list(stopped.output_tokens)) == text[: text.index(stop) + 2]
    assert stopped.finish_reason == "stop"


async def test_a_budget_beyond_the_context_is_cut(create_engine, facts):
    prompt, params = tuple(3 + i % 60 for i in range(500)), GREEDY.new(max_tokens=50)
    async with create_engine(endless_model()) as engine:
        completion = await engine.generate(prompt, params)
    assert (completion.output_len, completion.finish_reason) == (facts.longest - 500, "length")


async def test_what_cannot_be_served_is_refused_before_anything_is_sent(create_engine):
    bad_prompts = [
        ((), "empty prompt"),
        ((3, 64), "outside the vocabulary"),
        ((-1,), "outside the vocabulary"),
        ((3,) * 512, "context"),
        ((3,) * 5000, "context"),
    ]
    bad_params = {
        "max_tokens": 0, "temperature": -1.0, "top_p": 0.0, "top_k": -1, "min_p": 2.0, "seed": -1, "stop_token_ids": (64,),
    }  # fmt: skip
    async with create_engine() as engine:
        with trio.CancelScope() as scope:
            scope.cancel()  # what waits for anything, as sending does, ends with that instead
            for prompt, message in bad_prompts:
                with pytest.raises(EngineError, match=message) as refused:
                    await engine.generate(prompt, SamplingParams(max_tokens=1))
                assert isinstance(refused.value, EngineContextError) == (message == "context")
            for field, value in bad_params.items():
                with pytest.raises(EngineError, match=f"has {field} = "):
                    await engine.generate((3,), SamplingParams(**{field: value}))
        assert not scope.cancelled_caught


async def test_an_engine_used_after_its_block_says_so(create_engine, tmp_path: Path):
    plain_model().save_pretrained(tmp_path / "good")
    async with create_engine() as engine:
        pass
    with pytest.raises(EngineError, match="closed: generate inside its `async with` block"):
        await engine.generate(PROMPTS[0], params_of(0))
    with pytest.raises(EngineError, match="closed"):
        await engine.recompute_output_log_probs(PROMPTS[0], 1)
    with pytest.raises(EngineError, match="closed"):
        await engine.update_weights_from_checkpoint(tmp_path / "good")
    with pytest.raises(EngineError, match="closed"):
        await engine.get_weight_version()


# -- log-probs


async def test_log_probs_are_those_of_the_trainer_at_any_temperature(create_engine):
    model = plain_model()
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-3)
    async with create_engine(model) as engine:
        for temperature in (0.0, 0.5, 1.0, 1.5):
            params = SamplingParams(max_tokens=16, temperature=temperature)
            found = await generate_all(engine, range(0, 14, 2), params=lambda i, params=params: params.new(seed=i))
            kinds = {(c.log_prob_kind, c.truncated_sampling, c.temperature) for c in found.values()}
            assert kinds == {("sampled", False, temperature or 1.0)}
            batch = collate_samples([completion_to_sample(Sample(index=i), c.input_tokens, c, "") for i, c in found.items()])
            log_probs = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
            assert batch.rollout_log_probs is not None
            assert int(batch.loss_mask.sum()) == sum(c.output_len for c in found.values()) > 14
            assert ((log_probs - batch.rollout_log_probs) * batch.loss_mask).abs().max().item() < TOLERANCE


async def test_a_cut_distribution_is_recorded_with_the_kind_of_its_log_probs(create_engine, facts):
    model = plain_model()
    async with create_engine(model) as engine:
        for cut in ({"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.9}):
            completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0.7, seed=2, **cut))
            assert (completion.log_prob_kind, completion.truncated_sampling) == (facts.cut_kind, True)
            tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
            with torch.no_grad():
                whole = model(tokens).logits[0, completion.input_len - 1 : -1] / completion.temperature
            limits = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
            kept = truncate_logits(whole, **{name: torch.tensor([limit] * len(whole)) for name, limit in limits.items()})
            sampled = gather_log_probs(kept, tokens[0, completion.input_len :])
            assert sampled.isfinite().all()  # nothing was drawn that had been cut off
            tempered = gather_log_probs(whole, tokens[0, completion.input_len :])
            assert (sampled - tempered).max() > 0.1
            expected = {"sampled": sampled, "tempered": tempered}[facts.cut_kind]
            torch.testing.assert_close(torch.tensor(completion.output_log_probs), expected, atol=TOLERANCE, rtol=0)


async def test_given_tokens_are_scored_as_the_trainer_does(create_engine, facts):
    model = lively_model()
    async with create_engine(model) as engine:
        found = await engine.generate(PROMPTS[5], SamplingParams(max_tokens=30, temperature=1.3, seed=1))
        tokens, start = found.input_tokens + found.output_tokens, found.input_len
        scores = await engine.recompute_output_log_probs(tokens, start)
        assert scores == pytest.approx(compute_log_probs(model, found, 1.0), abs=TOLERANCE)
        assert await engine.recompute_output_log_probs(tokens, len(tokens)) == ()
        if facts.scores_at_any_temperature:
            scores = await engine.recompute_output_log_probs(tokens, start, 1.3)
            assert scores == pytest.approx(found.output_log_probs, abs=TOLERANCE)
        else:
            with pytest.raises(EngineError, match=r"temperature 1 only, not 1\.3"):
                await engine.recompute_output_log_probs(tokens, start, 1.3)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            await engine.recompute_output_log_probs((3, 64), 1)


# -- aborts and cancellation


async def test_aborting_one_by_its_id_leaves_its_neighbors(create_engine):
    """Their ids begin with its id, or its with theirs."""
    model = endless_model()
    requests = {name: GREEDY.new(max_tokens=400 if name == "11" else 30) for name in ("1", "11", "111", "110", "2")}

    def came_in_time(found: dict[str, Completion]) -> bool:
        return 0 < found["11"].output_len < 400

    async with create_engine(model) as engine:
        found = await generate_while(engine, requests, lambda: engine.abort(["11", "unknown"]), came_in_time)
        again = await engine.generate(PROMPTS[1], GREEDY, request_id="11")
    aborted = found.pop("11")
    assert aborted.finish_reason == "abort"
    assert aborted.output_tokens == generate_greedily(model, PROMPTS[0], aborted.output_len)
    assert aborted.output_log_probs == pytest.approx(compute_log_probs(model, aborted), abs=TOLERANCE)
    for completion in found.values():
        assert completion.output_tokens == generate_greedily(model, PROMPTS[0], 30)
        assert completion.finish_reason == "length"
    assert again.output_tokens == generate_greedily(model, PROMPTS[1], 9)


async def test_aborting_all_returns_what_there_is(create_engine):
    requests = {name: SamplingParams(max_tokens=400, seed=i) for i, name in enumerate("abcdef")}

    def came_in_time(found: dict[str, Completion]) -> bool:
        return any(c.output_len > 0 for c in found.values()) and all(c.output_len < 400 for c in found.values())

    async with create_engine(endless_model()) as engine:
        found = await generate_while(engine, requests, engine.abort, came_in_time)
        again = await engine.generate(PROMPTS[1], params_of(1))
    assert set(found) == set("abcdef")
    assert all(c.finish_reason == "abort" or c.output_tokens[-1] == 1 for c in found.values())
    assert again.output_len >= 1


async def test_cancelling_requests_leaves_the_engine_usable(create_engine, facts):
    async with create_engine(endless_model()) as engine:
        expected = await generate_all(engine, range(8), params=lambda i: facts.make_repeatable(params_of(i)))
        with trio.move_on_after(0.05) as scope:
            await generate_all(engine, range(8), params=lambda i: SamplingParams(max_tokens=400, seed=i))
        assert scope.cancelled_caught
        again = await generate_all(engine, range(8), params=lambda i: facts.make_repeatable(params_of(i)))
    assert_repeated(facts, expected, again)


async def test_cancelling_the_first_request_leaves_the_others(create_engine):
    model = endless_model()
    expected = generate_greedily(model, PROMPTS[0], 20)
    async with create_engine(model) as engine:
        for moment_s in MOMENTS_S:  # the first one must not be finished when it is cancelled, which depends on the machine
            found: dict[str, Completion] = {}

            async def one(name: str, scope: trio.CancelScope, max_tokens: int, found: dict[str, Completion] = found) -> None:
                with scope:
                    found[name] = await engine.generate(PROMPTS[0], GREEDY.new(max_tokens=max_tokens), request_id=name)

            first = trio.CancelScope()
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(one, "first", first, 450)
                    await trio.sleep(moment_s)
                    nursery.start_soon(one, "other", trio.CancelScope(), 20)
                    await trio.sleep(moment_s)
                    first.cancel()
            assert found["other"].output_tokens == expected
            if "first" not in found:
                return
    pytest.fail(f"the first request was finished after each of {MOMENTS_S} s")


# -- weights


async def test_new_weights_are_used_and_stamped(create_engine, tmp_path: Path):
    other = lively_model(seed=7)
    other.save_pretrained(tmp_path / "other")
    async with create_engine(lively_model()) as engine:
        before = await engine.generate(PROMPTS[0], GREEDY)
        answer = await engine.update_weights_from_checkpoint(tmp_path / "other")
        assert answer["success"]
        assert await engine.get_weight_version() == answer["weight_version"] == 1
        after = await engine.generate(PROMPTS[0], GREEDY)
    assert before.output_tokens != after.output_tokens
    assert after.output_tokens == generate_greedily(other, PROMPTS[0], 9)
    assert set(after.output_versions) == {1}


async def test_versions_grow_by_one_or_are_those_of_the_checkpoint(create_engine, tmp_path: Path):
    for name in ("a", "b", "named"):
        lively_model(seed=ord(name[0])).save_pretrained(tmp_path / name)
    (tmp_path / "named" / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 7}))
    seen = []
    async with create_engine(lively_model()) as engine:
        for name in ("a", "b", "named", "a"):
            answer = await engine.update_weights_from_checkpoint(tmp_path / name)
            completion = await engine.generate(PROMPTS[0], GREEDY)
            assert set(completion.output_versions) == {answer["weight_version"]} == {await engine.get_weight_version()}
            assert completion.output_tokens == generate_greedily(lively_model(seed=ord(name[0])), PROMPTS[0], 9)
            seen.append(answer["weight_version"])
    assert seen == [1, 2, 7, 8]


async def test_each_token_in_flight_across_a_sync_has_the_version_and_log_prob_of_its_weights(create_engine, tmp_path: Path):
    models = [endless_model(seed) for seed in (21, 22)]  # of even and odd versions
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / str(i))
    requests = {f"{i}": SamplingParams(max_tokens=120, temperature=0.8, seed=i) for i in range(3)}
    async with create_engine(models[0]) as engine:

        async def sync() -> None:
            version = await engine.get_weight_version()
            await engine.update_weights_from_checkpoint(tmp_path / str((version + 1) % 2))

        def came_in_time(found: dict[str, Completion]) -> bool:
            return sum(len(set(c.output_versions)) > 1 for c in found.values()) > 1

        found = await generate_while(engine, requests, sync, came_in_time)
        version = await engine.get_weight_version()
    for completion in found.values():
        assert completion.finish_reason == ("stop" if completion.output_tokens[-1] == 1 else "length")
        assert completion.output_len == 120 or completion.finish_reason == "stop"
        versions = completion.output_versions
        assert list(versions) == sorted(versions)
        assert set(versions) <= {version - 1, version}
        expected = [compute_log_probs(model, completion) for model in models]
        for t, log_prob in enumerate(completion.output_log_probs):
            assert log_prob == pytest.approx(expected[versions[t] % 2][t], abs=TOLERANCE)


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(create_engine, tmp_path: Path):
    create_tiny_model(hidden_size=128, head_dim=32).save_pretrained(tmp_path / "wide")
    (tmp_path / "empty").mkdir()
    lively_model(seed=5).save_pretrained(tmp_path / "cut")
    cut = tmp_path / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-64])
    async with create_engine(lively_model()) as engine:
        before = await engine.generate(PROMPTS[0], GREEDY)
        for name in ("wide", "empty", "cut", "nowhere"):
            with pytest.raises(EngineError, match=name):
                await engine.update_weights_from_checkpoint(tmp_path / name)
        assert await engine.get_weight_version() == 0
        after = await engine.generate(PROMPTS[0], GREEDY)
    assert after.output_tokens == before.output_tokens == generate_greedily(lively_model(), PROMPTS[0], 9)
    assert set(after.output_versions) == {0}
