"""What every inference engine promises. An engine joins by one line in ENGINES: (model, tokenizer) -> an async context manager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from rollouts.char_tokenizer import create_char_tokenizer
from rollouts.engines.inprocess import InProcessEngine
from rollouts.errors import EngineError
from rollouts.logprobs import gather_log_probs
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, SamplingParams


def wide(model, tokenizer):
    return InProcessEngine(model, tokenizer, max_slots=64)


def narrow(model, tokenizer):
    """Fewer slots than requests: everything has to wait its turn."""
    return InProcessEngine(model, tokenizer, max_slots=3, prefix_cache_tokens=16)


ENGINES = [wide, narrow]


@pytest.fixture(params=ENGINES, ids=lambda e: e.__name__)
def create_engine(request):
    return lambda model=None: request.param(create_tiny_model() if model is None else model, create_char_tokenizer())


def lively_model(seed: int = 0):
    """Larger weights than random initialisation gives, so that greedy answers are not one token for ever."""
    model = create_tiny_model(seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


PROMPTS = [tuple(range(3 + i // 4, 8 + i // 3)) for i in range(14)]


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


async def test_the_same_requests_give_the_same_bits(create_engine):
    async with create_engine() as engine:
        runs = [await generate_all(engine) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


async def test_a_request_gets_the_same_tokens_alone_and_in_a_crowd(create_engine):
    async with create_engine() as engine:
        crowd = await generate_all(engine)
        for i in (1, 6, 11):
            alone = (await generate_all(engine, [i]))[i]
            assert alone.output_tokens == crowd[i].output_tokens
            assert alone.output_log_probs == pytest.approx(crowd[i].output_log_probs, abs=1e-5)


async def test_greedy_tokens_are_those_of_hugging_face_generate(create_engine):
    model = lively_model()
    async with create_engine(lively_model()) as engine:
        found = await generate_all(engine, params=lambda i: SamplingParams(max_tokens=9, temperature=0.0))
    assert max(len(set(c.output_tokens)) for c in found.values()) > 3
    for i, prompt in enumerate(PROMPTS):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
        assert list(found[i].output_tokens) == expected[0, len(prompt) :].tolist()


async def test_log_probs_are_those_of_a_training_forward_pass_at_any_temperature(create_engine):
    model = create_tiny_model()
    async with create_engine() as engine:
        found = await generate_all(engine)
    for completion in found.values():
        full = torch.tensor([completion.input_tokens + completion.output_tokens])
        with torch.no_grad():
            logits = model(full).logits[:, :-1] / completion.temperature
        expected = gather_log_probs(logits, full[:, 1:])[0, completion.input_len - 1 :]
        torch.testing.assert_close(torch.tensor(completion.output_log_probs), expected, atol=1e-4, rtol=0)


async def test_the_seed_decides_and_its_absence_does_not_repeat(create_engine):
    async with create_engine() as engine:
        params = SamplingParams(max_tokens=12, seed=3)
        a, b = [await engine.generate(PROMPTS[0], params) for _ in range(2)]
        c = await engine.generate(PROMPTS[0], params.new(seed=4))
        free = [await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12)) for _ in range(2)]
    assert a.output_tokens == b.output_tokens != c.output_tokens
    assert free[0].output_tokens != free[1].output_tokens


async def test_stop_ids_and_budget_end_a_response(create_engine):
    async with create_engine() as engine:
        plain = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=3))
        stop_at = plain.output_tokens[4]
        place = plain.output_tokens.index(stop_at)
        stopped = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=3, stop_token_ids=(stop_at,)))
        one = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=1, seed=3))
    assert stopped.output_tokens == plain.output_tokens[: place + 1]
    assert stopped.finish_reason == "stop"
    assert (one.output_len, one.finish_reason) == (1, "length")


async def test_a_stop_string_ends_a_response_and_stays_in_it(create_engine):
    tokenizer = create_char_tokenizer()
    async with create_engine() as engine:
        plain = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=3))
        text = tokenizer.decode(list(plain.output_tokens))
        stop = text[3:5]
        stopped = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=3, stop=("~never~", stop)))
    decoded = tokenizer.decode(list(stopped.output_tokens))
    assert decoded == text[: text.index(stop) + 2]
    assert stopped.finish_reason == "stop"


async def test_abort_returns_what_there_is(create_engine):
    long = SamplingParams(max_tokens=400, stop_token_ids=())
    async with create_engine() as engine:
        found: dict[str, Completion] = {}

        async def one(name: str) -> None:
            found[name] = await engine.generate(PROMPTS[0], long.new(seed=hash(name) % 99), request_id=name)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for name in ("a", "b", "c", "d", "e", "f"):
                    nursery.start_soon(one, name)
                await trio.sleep(0.05)
                await engine.abort(["b", "f"])
                await trio.sleep(0.02)
                await engine.abort()
        again = await engine.generate(PROMPTS[1], params_of(1))
    assert set(found) == set("abcdef")
    for name in ("b", "f"):
        assert found[name].finish_reason == "abort" or found[name].output_tokens[-1] == 1
    assert all(c.output_len < 400 for c in found.values())
    assert again.output_len >= 1


async def test_an_aborted_prefix_is_a_beginning_of_the_whole_answer(create_engine):
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=8)
    async with create_engine() as engine:
        whole = await engine.generate(PROMPTS[0], params)
        async with trio.open_nursery() as nursery:
            partial: list[Completion] = []

            async def one() -> None:
                partial.append(await engine.generate(PROMPTS[0], params))

            nursery.start_soon(one)
            await trio.sleep(0.01)
            await engine.abort()
    assert whole.output_tokens[: partial[0].output_len] == partial[0].output_tokens


async def test_cancelling_a_request_leaves_the_engine_usable(create_engine):
    async with create_engine() as engine:
        expected = await generate_all(engine, range(8))
        with trio.move_on_after(0.02):
            await generate_all(engine, range(8), params=lambda i: SamplingParams(max_tokens=400, seed=i))
        assert await generate_all(engine, range(8)) == expected


async def test_cancelling_the_driver_hands_over_to_the_others(create_engine):
    found: dict[str, Completion] = {}
    async with create_engine() as engine:

        async def one(name: str, scope: trio.CancelScope, max_tokens: int) -> None:
            with scope:
                found[name] = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=max_tokens, seed=1), request_id=name)

        first = trio.CancelScope()
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, "driver", first, 450)
                await trio.sleep(0.01)
                nursery.start_soon(one, "other", trio.CancelScope(), 20)
                await trio.sleep(0.01)
                first.cancel()
    assert "other" in found


async def test_new_weights_are_used_and_stamped(create_engine, tmp_path: Path):
    other = lively_model(seed=7)
    expected = other.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=9, do_sample=False, eos_token_id=1, pad_token_id=0)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    other.save_pretrained(tmp_path)
    async with create_engine(lively_model()) as engine:
        before = await engine.generate(PROMPTS[0], greedy)
        answer = await engine.update_weights_from_checkpoint(tmp_path)
        assert answer["success"]
        assert await engine.get_weight_version() == answer["weight_version"] == 1
        after = await engine.generate(PROMPTS[0], greedy)
    assert before.output_tokens != after.output_tokens
    assert list(after.output_tokens) == expected[0, len(PROMPTS[0]) :].tolist()
    assert set(after.output_versions) == {1}


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(create_engine, tmp_path: Path):
    create_tiny_model(hidden_size=64).save_pretrained(tmp_path / "wide")
    (tmp_path / "empty").mkdir()
    create_tiny_model().save_pretrained(tmp_path / "cut")
    cut = tmp_path / "cut" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-64])
    async with create_engine() as engine:
        before = await engine.generate(PROMPTS[0], params_of(1))
        for name in ("wide", "empty", "cut", "nowhere"):
            with pytest.raises(EngineError, match=name):
                await engine.update_weights_from_checkpoint(tmp_path / name)
        assert await engine.get_weight_version() == 0
        assert (await engine.generate(PROMPTS[0], params_of(1))).output_tokens == before.output_tokens


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), SamplingParams(), "empty prompt"),
        ((3, 64), SamplingParams(), "outside the vocabulary"),
        ((-1,), SamplingParams(), "outside the vocabulary"),
        ((3,) * 10, SamplingParams(max_tokens=510), "context"),
        ((3,), SamplingParams(max_tokens=0), "max_tokens"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused_before_anything_runs(create_engine, prompt, params, message):
    async with create_engine() as engine:
        with pytest.raises(EngineError, match=message):
            await engine.generate(prompt, params)


async def test_a_closed_engine_says_so(create_engine):
    async with create_engine() as engine:
        pass
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(PROMPTS[0], params_of(0))
