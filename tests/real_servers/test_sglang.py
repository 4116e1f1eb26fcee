"""SGLangEngine against a real SGLang server with a tiny model on a CPU.

SGLANG_PYTHON=path/to/venv/bin/python pytest tests/real_servers/test_sglang.py -m sglang
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample
from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.inprocess.sampling import truncate_logits
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.protocol import with_kept_tokens
from rollouts.engines.sglang.channels import open_http_channel, open_shared_memory, open_weight_group
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.errors import EngineError, EngineStatusError, EngineTimeout
from rollouts.types import Completion, Sample, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from endless_models import create_endless_model
from text_checks import check_texts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [tuple(range(3 + i, 9 + 2 * i)) for i in range(6)]
TOLERANCE = 1e-4  # nats, float32
LONG = SamplingParams(max_tokens=300)
SOON = (20, 5, 1, 40)  # tokens after which something is done; a server that has ended by then, while the test stood still, is asked again


def load_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def save_weights(path: Path, seed: int) -> Path:
    create_endless_model(seed, hidden_size=64, head_dim=32).save_pretrained(path)
    create_char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    return [save_weights(folder / str(i), seed=100 + i) for i in range(11)]


async def difference_to_trainer(completions: Sequence[Completion], models: dict[int, Path]) -> float:
    """The largest difference between an engine's log-probs and those of the training backend with the weights of each token's version."""
    samples = [completion_to_sample(Sample(index=i), c.input_tokens, c, "") for i, c in enumerate(completions)]
    batch = collate_samples([replace(s, temperature=c.temperature) for s, c in zip(samples, completions, strict=True)])
    assert batch.rollout_log_probs is not None
    assert batch.weight_versions is not None
    generated = batch.loss_mask > 0
    assert set(batch.weight_versions[generated].tolist()) <= set(models)
    largest = 0.0
    for version, path in models.items():
        backend = create_pytorch_backend(load_model(path), lr=1e-3)
        log_probs = await backend.forward(batch, lambda outputs: outputs.log_probs).result()
        of_version = generated & (batch.weight_versions == version)
        largest = max([largest, *(log_probs - batch.rollout_log_probs)[of_version].abs().tolist()])
    return largest


def generate_greedily(path: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    output = load_model(path).generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=1, pad_token_id=0)
    return tuple(output[0, len(prompt) :].tolist())


async def generate_all(engine: SGLangEngine, params: SamplingParams, num: int = 12) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(i: int) -> None:
        found[i] = await engine.generate(PROMPTS[i % len(PROMPTS)], params, request_id=f"{i}")

    async with trio.open_nursery() as nursery:
        for i in range(num):
            nursery.start_soon(one, i)
    return [found[i] for i in range(num)]


class Clock:
    """A streamed request, whose tokens show how far the server is."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._more = trio.Event()

    async def generate(self, engine: SGLangEngine, request_id: str | None = None) -> Completion:
        return await engine.generate_streaming(PROMPTS[0], LONG, self._hear, request_id=request_id)

    async def wait_for(self, num_tokens: int) -> None:
        while self._num_tokens < num_tokens:
            await self._more.wait()

    def _hear(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self._num_tokens += len(tokens)
        self._more.set()
        self._more = trio.Event()


async def check_alive(engine: SGLangEngine, path: Path) -> None:
    """The server serves these weights, and says so."""
    found = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=12, temperature=0.0))
    assert found.output_tokens == generate_greedily(path, PROMPTS[0], 12)
    assert set(found.output_versions) == {await engine.get_weight_version()}


async def start(engine: SGLangEngine, path: Path) -> int:
    await engine.update_weights_from_checkpoint(path)
    return await engine.get_weight_version()


async def test_what_the_server_says_of_itself(sglang_server):
    async with SGLangEngine(sglang_server.url, expected_model=sglang_server.model_path, vocab_size=64) as engine:
        info = await engine.describe_server()
    assert (info.kind, info.context_length, info.vocab_size, info.log_prob_kind) == ("sglang", 512, 64, "tempered")
    assert (info.dtype, info.has_tokenizer, info.honors_seeds) == ("float32", True, False)


async def test_another_model_or_vocabulary_is_refused(sglang_server, tmp_path: Path):
    with pytest.raises(EngineError, match=r"expected '.*other'"):
        async with SGLangEngine(sglang_server.url, expected_model=tmp_path / "other"):
            pass
    with pytest.raises(EngineError, match="vocabulary of 64 tokens, expected 65"):
        async with SGLangEngine(sglang_server.url, vocab_size=65):
            pass


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.5])
async def test_log_probs_are_the_trainers_at_any_temperature(sglang_server, weights, temperature, record_property):
    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        found = await generate_all(engine, SamplingParams(max_tokens=100, temperature=temperature))
    assert sum(c.output_len for c in found) > 400
    assert {c.log_prob_kind for c in found} == {"sampled"}
    assert {c.temperature for c in found} == {temperature or 1.0}
    largest = await difference_to_trainer(found, {version: weights[0]})
    record_property("largest_difference", largest)
    assert largest < TOLERANCE


@pytest.mark.parametrize("changes", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}])
async def test_log_probs_of_cut_distributions_are_those_before_the_cut_and_say_so(sglang_server, weights, changes):
    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        found = await generate_all(engine, SamplingParams(max_tokens=40, temperature=0.7, **changes))
    assert {(c.log_prob_kind, c.truncated_sampling) for c in found} == {("tempered", True)}
    assert await difference_to_trainer(found, {version: weights[0]}) < TOLERANCE


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"top_k": 40, "top_p": 0.9, "min_p": 0.1}])
async def test_the_sets_that_tokens_are_drawn_from_are_recorded_and_log_probs_over_them_are_the_trainers(sglang_server, weights, changes):
    params = SamplingParams(max_tokens=40, temperature=0.7, **changes)
    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        found = await generate_all(engine, with_kept_tokens(params, engine))
        whole = await engine.generate(PROMPTS[0], with_kept_tokens(params.new(top_k=0, top_p=0.8), engine))
    assert (whole.kept_tokens, whole.log_prob_kind) == (None, "tempered"), "without a top_k there are no sets"
    assert {(c.log_prob_kind, c.truncated_sampling, c.temperature) for c in found} == {("sampled", True, 0.7)}
    assert await difference_to_trainer(found, {version: weights[0]}) < TOLERANCE
    model = load_model(weights[0])
    limits = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    alone = [{"top_k": 0, "top_p": 1.0, "min_p": 0.0, name: limit} for name, limit in limits.items()]  # each cuts the whole distribution
    sizes: list[int] = []
    for completion in found:
        tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
        with torch.no_grad():
            logits = model(tokens).logits[0, completion.input_len - 1 : -1] / 0.7
        assert completion.kept_tokens is not None
        for place in range(completion.output_len):
            kept = completion.kept_tokens.cut(place, place + 1)
            sizes += kept.counts
            row = logits[place : place + 1]
            left = [truncate_logits(row, **{name: torch.tensor([x]) for name, x in cut.items()}).isfinite()[0] for cut in alone]
            expected = torch.stack(left).all(0).nonzero()[:, 0].tolist()
            assert torch.frombuffer(bytearray(kept.data), dtype=torch.int32).tolist() == expected
    assert max(sizes) > 2 and max(sizes) <= params.top_k


async def test_given_tokens_are_scored_as_the_trainer_does(sglang_server, weights):
    async with SGLangEngine(sglang_server.url) as engine:
        await start(engine, weights[0])
        found = await engine.generate((*PROMPTS[1], 63, 0, 63), SamplingParams(max_tokens=60))  # 63: the last id has its peculiarities
        tokens = found.input_tokens + found.output_tokens
        with torch.no_grad():
            logits = load_model(weights[0])(torch.tensor([tokens])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        for index in (1, found.input_len, len(tokens) - 1, len(tokens)):
            scored = await engine.recompute_output_log_probs(tokens, index)
            assert scored == pytest.approx(expected[index - 1 :], abs=TOLERANCE)
        assert await engine.recompute_output_log_probs(tokens, found.input_len) == pytest.approx(found.output_log_probs, abs=TOLERANCE)
        with pytest.raises(EngineError, match=r"at temperature 1 only, not 0.5"):
            await engine.recompute_output_log_probs(tokens, found.input_len, 0.5)


async def test_after_each_of_ten_syncs_greedy_answers_are_those_of_the_new_weights(sglang_server, weights):
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    checksums: set[str] = set()
    most_distinct = 0
    async with SGLangEngine(sglang_server.url) as engine:
        before = await start(engine, weights[0])
        for i, path in enumerate(weights[1:], start=1):
            answer = await engine.update_weights_from_checkpoint(path)
            assert answer["success"]
            assert answer["weight_version"] == await engine.get_weight_version() == before + i
            for completion in await generate_all(engine, greedy, 6):  # the prompts' prefixes are in the server's cache from before
                assert completion.output_tokens == generate_greedily(path, completion.input_tokens, 24)
                assert set(completion.output_versions) == {before + i}
                most_distinct = max(most_distinct, len(set(completion.output_tokens)))
            checksums.add(await engine.compute_checksum())
    assert len(checksums) == 10
    assert most_distinct > 5


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_requests_in_flight_across_syncs_have_the_log_probs_of_each_tokens_weights(
    sglang_server, weights, in_flight, record_property
):
    found: list[Completion] = []
    params = SamplingParams(max_tokens=300, temperature=0.8)
    clock = Clock()
    async with SGLangEngine(sglang_server.url, in_flight=in_flight) as engine:
        first = await start(engine, weights[0])

        async def one(i: int) -> None:
            if i == 0:
                found.extend(await engine.generate_group(PROMPTS[0], params, 4, request_id="group"))
            else:
                found.append(await engine.generate(PROMPTS[i % 6], params, request_id=f"{i}"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clock.generate, engine)
            for i in range(80):  # more than run at once: some wait in the server's queue
                nursery.start_soon(one, i)
            for path, num_tokens in zip(weights[1:3], (60, 150), strict=True):
                await clock.wait_for(num_tokens)
                answer = await engine.update_weights_from_checkpoint(path)
                record_property("sync", {k: v for k, v in answer.items() if k.endswith("_s")})
                assert answer["pause_s"] < 5
    assert len(found) == 83
    spans = [[version for version, _ in groupby(c.output_versions)] for c in found]
    assert all(versions == sorted(set(versions)) for versions in spans)
    assert sum(versions == [first, first + 1, first + 2] for versions in spans) >= 10
    assert all(c.finish_reason == "stop" or c.output_len == 300 for c in found)
    largest = await difference_to_trainer(found, {first + i: weights[i] for i in range(3)})
    record_property("largest_difference", largest)
    assert largest < TOLERANCE


async def test_aborted_requests_return_what_they_have_and_their_neighbours_go_on(sglang_server, weights):
    async with SGLangEngine(sglang_server.url) as engine:
        await start(engine, weights[0])

        async def one(name: str, n: int, found: dict[str, Sequence[Completion]]) -> None:
            found[name] = await engine.generate_group(PROMPTS[0], LONG, n, request_id=name)

        for count in SOON:
            found: dict[str, Sequence[Completion]] = {}
            clock = Clock()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for name in ("g-1", "g-10", "g-100"):  # the server would take one for the beginning of the others
                        nursery.start_soon(one, name, 1, found)
                    nursery.start_soon(one, "group", 8, found)
                    nursery.start_soon(clock.generate, engine)
                    await clock.wait_for(count)
                    await engine.abort(["g-1", "group", "unknown"])
                    while not {"g-1", "group"} <= set(found):
                        await trio.sleep(0.01)
            assert [found[name][0].output_len for name in ("g-10", "g-100")] == [300, 300]
            if all(c.finish_reason == "abort" for c in (*found["g-1"], *found["group"])):
                break
        assert all(0 < c.output_len < 300 and c.finish_reason == "abort" for c in (*found["g-1"], *found["group"]))
        assert len({c.output_tokens for c in found["group"]}) == 8

        for count in SOON:
            found = {}
            clock = Clock()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(clock.generate, engine)
                    for i in range(90):
                        nursery.start_soon(one, f"{i}", 1, found)
                    await clock.wait_for(count)
                    await engine.abort()
            lengths = [found[f"{i}"][0].output_len for i in range(90)]
            if {found[f"{i}"][0].finish_reason for i in range(90)} == {"abort"}:
                break
        assert {found[f"{i}"][0].finish_reason for i in range(90)} == {"abort"}
        assert min(lengths) == 0  # it was still in the queue
        assert 0 < max(lengths) < 300
        await check_alive(engine, weights[0])


async def test_a_stream_brings_the_tokens_of_the_completion_in_pieces(sglang_server, weights):
    heard: list[int] = []
    pieces: list[int] = []

    def hear(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        assert len(tokens) == len(log_probs)
        heard.extend(tokens)
        pieces.append(len(tokens))

    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        completion = await engine.generate_streaming(PROMPTS[0], SamplingParams(max_tokens=80), hear)
        assert completion.output_tokens == tuple(heard)
        assert len(pieces) > 10
        assert await difference_to_trainer([completion], {version: weights[0]}) < TOLERANCE


async def test_cancelled_requests_leave_the_server_usable(sglang_server, weights):
    async with SGLangEngine(sglang_server.url) as engine:
        await start(engine, weights[0])
        with trio.move_on_after(0.3):
            await generate_all(engine, LONG, 64)
        await check_alive(engine, weights[0])


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_while_paused_nothing_runs_and_aborts_still_work(sglang_server, weights, in_flight):
    found: dict[str, Completion] = {}
    clocks = {"before": Clock(), "aborted": Clock()}
    async with SGLangEngine(sglang_server.url, in_flight=in_flight) as engine:
        version = await start(engine, weights[0])

        async def one(name: str) -> None:
            found[name] = await clocks.get(name, Clock()).generate(engine, name)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for name in clocks:
                    nursery.start_soon(one, name)
                for clock in clocks.values():
                    await clock.wait_for(20)
                await engine.pause()
                nursery.start_soon(one, "waits")
                nursery.start_soon(one, "never")
                await trio.sleep(0.3)
                assert not found
                await engine.abort(["aborted", "never"])
                while set(found) != {"aborted", "never"}:
                    await trio.sleep(0.01)
                assert (await engine.update_weights_from_checkpoint(weights[1]))["weight_version"] == version + 1
                await trio.sleep(0.3)
                assert set(found) == {"aborted", "never"}  # a sync does not end the user's pause
                await engine.resume()
    assert (found["aborted"].finish_reason, found["never"].finish_reason) == ("abort", "abort")
    assert found["aborted"].output_len > 0
    assert found["never"].output_len == 0
    assert found["before"].output_len == found["waits"].output_len == 300
    assert set(found["before"].output_versions) == {version, version + 1}
    assert set(found["waits"].output_versions) == {version + 1}
    models = {version: weights[0], version + 1: weights[1]}
    assert await difference_to_trainer([found[name] for name in ("before", "aborted", "waits")], models) < TOLERANCE


async def test_a_server_that_was_left_paused_is_noticed_on_entering(sglang_server):
    async with SGLangEngine(sglang_server.url) as engine:
        await engine.pause()
        with pytest.raises(EngineTimeout, match="continue_generation"):
            async with SGLangEngine(sglang_server.url, deadlines=Deadlines(health_s=1.0)):
                pass
        await engine.resume()
        await engine.generate(PROMPTS[0], SamplingParams(max_tokens=3))


async def test_weights_in_memory_are_those_from_the_disk(sglang_server, weights):
    async with SGLangEngine(sglang_server.url, bucket_bytes=50_000) as engine:
        version = await start(engine, weights[0])
        checksums = [await engine.compute_checksum()]
        tensors = dict(load_model(weights[1]).state_dict())
        tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        for i, given in enumerate((tensors, tied), start=1):
            await engine.update_weights(given, version + i)
            await check_alive(engine, weights[1])
            checksums.append(await engine.compute_checksum())
        await engine.update_weights_from_checkpoint(weights[1])
        checksums.append(await engine.compute_checksum())
        assert checksums[0] != checksums[1]
        assert checksums[1:] == [checksums[1]] * 3
        wrong = {**tensors, "model.norm.weight": torch.ones(3)}
        with pytest.raises(EngineError, match=r"model.norm.weight is F32 \[3\]"):
            await engine.update_weights(wrong, 99)
        with pytest.raises(EngineError, match=r"missing: model.norm.weight"):
            await engine.update_weights({k: v for k, v in tensors.items() if k != "model.norm.weight"}, 99)
        await check_alive(engine, weights[1])


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_weights_over_a_gloo_group_are_those_from_the_disk(sglang_server, weights, in_flight):
    found: list[Completion] = []

    async def one(clock: Clock) -> None:
        found.append(await clock.generate(engine))

    async with SGLangEngine(sglang_server.url, in_flight=in_flight) as engine:
        version = await start(engine, weights[1])
        checksum = await engine.compute_checksum()
        await start(engine, weights[0])
        for i in (2, 3):  # a group can be opened again
            async with open_weight_group([engine], backend="gloo", bucket_bytes=50_000) as group:
                async with trio.open_nursery() as nursery:
                    clock = Clock()
                    nursery.start_soon(one, clock)
                    await clock.wait_for(20)
                    (answer,) = await group.update_weights(dict(load_model(weights[1]).state_dict()), version + i)
                    assert answer["weight_version"] == await engine.get_weight_version() == version + i
                await check_alive(engine, weights[1])
                assert await engine.compute_checksum() == checksum
    models = {version + 1: weights[0], version + 2: weights[1], version + 3: weights[1]}
    assert [sorted(set(c.output_versions)) for c in found] == [[version + 1, version + 2], [version + 2, version + 3]]
    assert await difference_to_trainer(found, models) < TOLERANCE


@pytest.mark.parametrize("open_channel", [open_shared_memory, open_http_channel])
async def test_weights_through_shared_memory_or_requests_are_those_from_the_disk(sglang_server, weights, open_channel):
    async with SGLangEngine(sglang_server.url) as engine:
        await engine.update_weights_from_checkpoint(weights[1])
        expected = await engine.compute_checksum()
        await engine.update_weights_from_checkpoint(weights[0])
        assert await engine.compute_checksum() != expected
        version = await engine.get_weight_version()
        async with open_channel([engine], bucket_bytes=50_000) as channel:
            (answer,) = await channel.update_weights(dict(load_model(weights[1]).state_dict()), version + 1)
        assert answer["weight_version"] == version + 1
        assert await engine.compute_checksum() == expected


async def test_bad_checkpoints_are_not_sent_and_the_server_goes_on(sglang_server, weights, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    def damage(name: str, change) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in weights[2].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder / "model.safetensors")
        return folder

    def edit(file: Path, change) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    bad = [
        damage("truncated", lambda file: file.write_bytes(file.read_bytes()[:-64])),
        damage("gone", lambda file: file.unlink()),
        damage("reshaped", partial(edit, change=lambda t: t.update({"model.norm.weight": torch.ones(3)}))),
        damage("partial", partial(edit, change=lambda t: t.pop("model.norm.weight"))),
        damage("extra", partial(edit, change=lambda t: t.update({"model.extra.weight": torch.ones(3)}))),
        tmp_path / "nowhere",
    ]
    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        for path in bad:
            with pytest.raises(EngineError, match=path.name):
                await engine.update_weights_from_checkpoint(path)
        assert await engine.get_weight_version() == version
        await check_alive(engine, weights[0])


async def test_a_load_that_fails_on_the_server_is_undone(sglang_server, weights, tmp_path: Path):
    """The directory is fine here, and gone where the server looks for it."""
    async with SGLangEngine(sglang_server.url) as engine:
        version = await start(engine, weights[0])
        found: list[Completion] = []
        clock = Clock()

        async def one() -> None:
            found.append(await clock.generate(engine))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await clock.wait_for(20)
            with pytest.raises(EngineError, match=r"Failed to get weights iterator.*goes on with the weights that it had before"):
                await engine.weights._get_transaction().load_directory(tmp_path / "elsewhere", version + 1)
        assert set(found[0].output_versions) == {version}
        assert await difference_to_trainer(found, {version: weights[0]}) < TOLERANCE
        await check_alive(engine, weights[0])


async def test_requests_that_would_kill_or_be_refused_are_not_sent(sglang_server, weights):
    async with SGLangEngine(sglang_server.url) as engine:
        await start(engine, weights[0])
        for prompt in ((3, 64), (-1,), (), (5,) * 506):
            with pytest.raises(EngineError):
                await engine.generate(prompt, LONG)
        longest = await engine.generate((5,) * 505, SamplingParams(max_tokens=400))
        assert (longest.output_len, longest.finish_reason) == (5, "length")
        cut = await engine.generate((5,) * 100, SamplingParams(max_tokens=10_000))
        assert cut.output_len == 410 or cut.finish_reason == "stop"
        with pytest.raises(EngineStatusError, match="unknown field `foo`"):
            await engine._server.post_json("/generate", {"input_ids": [5], "sampling_params": {"foo": 1}})
        await check_alive(engine, weights[0])


async def test_stop_ids_and_strings_end_a_response_and_stay_in_it(sglang_server, weights):
    tokenizer = create_char_tokenizer()
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    async with SGLangEngine(sglang_server.url) as engine:
        await start(engine, weights[0])
        plain = await engine.generate(PROMPTS[0], greedy)
        stop_at = plain.output_tokens[9]
        place = plain.output_tokens.index(stop_at)
        stopped = await engine.generate(PROMPTS[0], greedy.new(stop_token_ids=(stop_at,)))
        text = tokenizer.decode(list(plain.output_tokens))
        by_text = await engine.generate(PROMPTS[0], greedy.new(stop=("~never~", text[3:5])))
    assert (stopped.output_tokens, stopped.finish_reason) == (plain.output_tokens[: place + 1], "stop")
    assert by_text.finish_reason == "stop"
    assert tokenizer.decode(list(by_text.output_tokens)) == text[: text.index(text[3:5]) + 2]


async def test_seeds_have_no_effect_and_the_engine_says_so_once(sglang_server):
    async with SGLangEngine(sglang_server.url) as engine:
        with pytest.warns(UserWarning, match="ignores seeds") as warned:
            found = {(await engine.generate(PROMPTS[0], SamplingParams(max_tokens=20, seed=3))).output_tokens for _ in range(3)}
    assert len(found) == 3
    assert len(warned) == 1


async def test_texts_come_as_batches_as_groups_and_from_the_openai_like_routes(sglang_server):
    async with SGLangEngine(sglang_server.url, vocab_size=64) as engine:
        await check_texts(engine, sglang_server.url)


async def test_untempered_log_probs_are_recognised_and_a_death_fails_what_is_pending(tmp_path: Path, weights):
    """The test has its own server, started with the environment variable that changes the kind of its log-probs, and kills it."""
    path = save_weights(tmp_path / "model", seed=7)
    env = {"OMP_NUM_THREADS": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    python = os.environ["SGLANG_PYTHON"]
    config = ServerConfig("sglang", str(path), python, device="cpu", dtype="float32", max_num_seqs=64, skip_tokenizer_init=True, env=env)
    with pytest.raises(EngineError, match="the sglang server"):
        async with launch_server(config, tmp_path / "log", environment=os.environ, startup_s=570) as server:
            async with SGLangEngine(server.url, initial_version=3) as engine:
                assert (await engine.describe_server()).log_prob_kind == "untempered"
                found = await generate_all(engine, SamplingParams(max_tokens=50, temperature=0.5))
                assert {(c.temperature, c.log_prob_kind) for c in found} == {(1.0, "untempered")}
                assert await difference_to_trainer(found, {3: path}) < TOLERANCE
                with pytest.raises(EngineError, match="runs without a tokenizer"):
                    await engine.generate(PROMPTS[0], SamplingParams(stop=("x",)))
                failures: list[EngineError] = []
                clock = Clock()

                async def one() -> None:
                    try:
                        await clock.generate(engine)
                    except EngineError as error:
                        failures.append(error)

                with trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        for _ in range(8):
                            nursery.start_soon(one)
                        await clock.wait_for(100)
                        os.killpg(server.pid, signal.SIGKILL)
                assert len(failures) == 8
                with trio.fail_after(60), pytest.raises(EngineError, match=r"could not be given the weights|cannot be"):
                    await engine.update_weights_from_checkpoint(weights[0])
                with pytest.raises(EngineError):
                    await engine.generate(PROMPTS[0], LONG)
                await trio.sleep(120)  # until the launcher has noticed
