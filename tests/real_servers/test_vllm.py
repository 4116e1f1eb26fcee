"""VLLMEngine against a real vLLM on a CPU, in float32: what it returns is what the trainer's models compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import trio
import trio.testing
from safetensors.torch import load_file, save_file
from text_checks import check_texts

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.samples import completion_to_sample, create_pending_group
from rollouts.engines.http.endpoint import HTTPEndpoint
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError, EngineStatusError
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, Prompt, SamplingParams, TokenOutputs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(700)]

PROMPTS = [tuple(range(3 + i, 9 + 2 * i)) for i in range(8)]
TOLERANCE = 1e-4  # nats


def create_model(version: int):
    """A model that the server can be given; larger weights than random initialisation gives, so that greedy answers differ."""
    model = create_tiny_model(hidden_size=64, head_dim=32, seed=version)
    if version > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6)
    return model


def create_endless_model(version: int):
    """A model that does not end its answers: the logit of the end of text is 0, far below the largest."""
    model = create_model(version)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.mul_(5)
        embedding[1] = 0
    return model


def export(model, directory: Path, version: int) -> Path:
    model.save_pretrained(directory)
    (directory / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))
    return directory


def compute_log_probs(model, completion: Completion, temperature: float | None = None) -> list[float]:
    """Compute the log-probs of the output tokens in one forward pass over the whole sequence."""
    tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
    with torch.no_grad():
        logits = model(tokens).logits[0, completion.input_len - 1 : -1] / (temperature or completion.temperature)
    return gather_log_probs(logits, tokens[0, completion.input_len :]).tolist()


def generate_greedily(model, prompt: Sequence[int], max_tokens: int) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=1, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


async def generate_all(engine: VLLMEngine, params: SamplingParams, prompts=PROMPTS) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(i: int) -> None:
        found[i] = await engine.generate(prompts[i], params.new(seed=i), request_id=f"{i:04d}")

    async with trio.open_nursery() as nursery:
        for i in range(len(prompts)):
            nursery.start_soon(one, i)
    return [found[i] for i in range(len(prompts))]


async def restore(engine: VLLMEngine, tmp_path: Path) -> None:
    """The weights that the server was started with."""
    await engine.update_weights_from_checkpoint(export(create_model(0), tmp_path / "restored", 0))


async def count_generated(server: HTTPEndpoint) -> int:
    """Tokens that the server has generated since its start."""
    (line,) = [line for line in (await server.get_text("/metrics")).splitlines() if line.startswith("vllm:generation_tokens_total")]
    return int(float(line.split()[-1]))


async def wait_for_tokens(server: HTTPEndpoint, count: int) -> None:
    """Wait until the server has generated `count` tokens."""
    with trio.fail_after(60):
        while await count_generated(server) < count:
            await trio.sleep(0.005)


async def let_answers_come() -> None:
    """Those that are on their way; in many steps, so that a process that stood still for a while takes them too."""
    for _ in range(30):
        await trio.sleep(0.01)


async def test_the_server_says_what_it_is(vllm_server):
    async with VLLMEngine(vllm_server.url, expected_model=vllm_server.model_path, vocab_size=64) as engine:
        info = await engine.describe_server()
    assert (info.kind, info.version, info.log_prob_kind, info.dtype) == ("vllm", "0.32.0", "sampled", "float32")
    assert (info.context_length, info.vocab_size, info.max_running, info.has_tokenizer) == (512, 64, 64, True)
    with pytest.raises(EngineError, match="expected 'other-model'"):
        async with VLLMEngine(vllm_server.url, expected_model="other-model"):
            pass
    with pytest.raises(EngineError, match="vocabulary of 64 tokens, expected 65"):
        async with VLLMEngine(vllm_server.url, vocab_size=65):
            pass


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
async def test_on_policy_log_probs_are_the_trainers(vllm_server, tmp_path: Path, temperature: float):
    backend = create_pytorch_backend(vllm_server.model_path, lr=1e-3)
    async with VLLMEngine(vllm_server.url) as engine:
        await restore(engine, tmp_path)
        found = await generate_all(engine, SamplingParams(max_tokens=100, temperature=temperature))
    samples = []
    for i, completion in enumerate(found):
        assert completion.log_prob_kind == "sampled"
        (pending,) = create_pending_group(Prompt(content="", index=i), 1)
        samples.append(completion_to_sample(pending, completion.input_tokens, completion, ""))
    batch = collate_samples(samples)

    def select(outputs: TokenOutputs):
        return outputs.log_probs

    log_probs = await backend.forward(batch, select).result()
    assert batch.rollout_log_probs is not None
    difference = ((log_probs - batch.rollout_log_probs) * batch.loss_mask).abs().max().item()
    print(f"temperature {temperature}: largest difference {difference:.2e} over {int(batch.loss_mask.sum())} tokens")
    assert difference < TOLERANCE


async def test_a_cut_distribution_is_renormalised_and_recorded(vllm_server, tmp_path: Path):
    model = create_model(0)
    async with VLLMEngine(vllm_server.url) as engine:
        await restore(engine, tmp_path)
        for change in ({"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.9}):
            completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=40, temperature=0.7, seed=2, **change))
            assert completion.truncated_sampling
            tokens = torch.tensor([completion.input_tokens + completion.output_tokens])
            with torch.no_grad():
                p = (model(tokens).logits[0, completion.input_len - 1 : -1] / 0.7).softmax(-1)
            if "top_k" in change:
                kept = p >= p.topk(5).values[:, -1:]
            elif "min_p" in change:
                kept = p >= 0.9 * p.amax(-1, keepdim=True)
            else:
                ordered, order = p.sort(descending=True)
                kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < 0.3)
            assert kept.sum(-1).max() < 64
            expected = (p * kept / (p * kept).sum(-1, keepdim=True)).gather(-1, tokens[0, completion.input_len :, None])[:, 0].log()
            torch.testing.assert_close(torch.tensor(completion.output_log_probs), expected, atol=TOLERANCE, rtol=0)


async def test_after_each_of_ten_syncs_greedy_outputs_are_those_of_the_new_weights(vllm_server, tmp_path: Path):
    params = SamplingParams(max_tokens=24, temperature=0.0)
    seen, seconds = set(), []
    async with VLLMEngine(vllm_server.url) as engine:
        for version in range(1, 11):
            model = create_model(version)
            answer = await engine.update_weights_from_checkpoint(export(model, tmp_path / f"v{version}", version))
            assert answer["success"]
            assert answer["weight_version"] == version == await engine.get_weight_version()
            seconds.append(answer)
            found = await generate_all(engine, params)
            for prompt, completion in zip(PROMPTS, found, strict=True):
                assert list(completion.output_tokens) == generate_greedily(model, prompt, 24)
                assert set(completion.output_versions) == {version}
                assert completion.output_log_probs == pytest.approx(compute_log_probs(model, completion, 1.0), abs=TOLERANCE)
                scores = await engine.recompute_output_log_probs(completion.input_tokens + completion.output_tokens, completion.input_len)
                assert scores == pytest.approx(completion.output_log_probs, abs=TOLERANCE)
            seen.add(tuple(c.output_tokens for c in found))
    assert len(seen) == 10
    for part in ("pause_s", "load_s", "confirm_s", "resume_s"):
        print(f"{part}: median {sorted(s[part] for s in seconds)[5]:.3f}, longest {max(s[part] for s in seconds):.3f}")


@pytest.mark.parametrize("in_flight", ["continue", "abort"])
async def test_requests_in_flight_across_syncs_have_a_version_for_each_token(vllm_server, tmp_path: Path, in_flight):
    counts = ((1000, 6000), (1000, 2000), (200, 400))  # tokens before each sync, of 64 * 400: how soon it comes depends on the machine
    models = {version: create_endless_model(version) for version in range(21, 21 + 3 * len(counts))}
    params = SamplingParams(max_tokens=400, temperature=1.3)
    async with VLLMEngine(vllm_server.url, in_flight=in_flight) as engine, HTTPEndpoint(vllm_server.url) as server:
        for attempt, (for_second, for_third) in enumerate(counts):
            first, second, third = (21 + 3 * attempt + i for i in range(3))
            found: list[Completion] = []
            for version in (first, second, third):
                export(models[version], tmp_path / str(version), version)
            await engine.update_weights_from_checkpoint(tmp_path / str(first))
            before = await count_generated(server)

            async def generate(i: int, found: list[Completion] = found) -> None:
                found.extend(await engine.generate_group(PROMPTS[i], params.new(seed=i), 8))

            async with trio.open_nursery() as nursery:
                for i in range(len(PROMPTS)):
                    nursery.start_soon(generate, i)
                for version, count in ((second, for_second), (third, for_third)):
                    await wait_for_tokens(server, before + count)
                    await engine.update_weights_from_checkpoint(tmp_path / str(version))
            seen = {version for completion in found for version in completion.output_versions}
            if third in seen:
                break
    assert len(found) == 8 * len(PROMPTS)
    num_mixed, difference = 0, 0.0
    for completion in found:
        versions = completion.output_versions
        assert list(versions) == sorted(versions)
        num_mixed += len(set(versions)) > 1
        assert completion.finish_reason == ("stop" if completion.output_tokens[-1] == 1 else "length")
        assert completion.output_len == 400 or completion.finish_reason == "stop"
        expected = {version: compute_log_probs(models[version], completion) for version in (first, second, third)}
        for t, (version, log_prob) in enumerate(zip(versions, completion.output_log_probs, strict=True)):
            difference = max(difference, abs(log_prob - expected[version][t]))
    print(f"{in_flight}: {num_mixed} of {len(found)} of several versions, largest difference {difference:.2e}")
    assert num_mixed > len(found) // 2
    assert seen == {first, second, third}
    assert difference < TOLERANCE


async def test_a_sync_without_these_precautions_would_show(vllm_server, tmp_path: Path):
    """Stale keys and values are what the pause prevents: without it, log-probs are of no model."""
    prompt = tuple(3 + i % 60 for i in range(300))  # longer than a block of the prefix cache
    old, new = create_model(31), create_model(32)
    export(old, tmp_path / "31", 31)
    export(new, tmp_path / "32", 32)
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1)
    async with VLLMEngine(vllm_server.url) as engine, HTTPEndpoint(vllm_server.url) as server:
        await engine.update_weights_from_checkpoint(tmp_path / "31")
        await engine.generate(prompt, params)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "32")}}
        await server.post_json("/collective_rpc", body, kind="sync")
        stale = await engine.generate(prompt, params)
        assert set(stale.output_versions) == {31}  # and the label is not the new one either
        assert max(abs(a - b) for a, b in zip(stale.output_log_probs, compute_log_probs(new, stale), strict=True)) > 0.01
        await engine.update_weights_from_checkpoint(tmp_path / "31")
        await engine.generate(prompt, params)
        await engine.update_weights_from_checkpoint(tmp_path / "32")
        fresh = await engine.generate(prompt, params)
    assert fresh.output_log_probs == pytest.approx(compute_log_probs(new, fresh), abs=TOLERANCE)


async def test_a_load_without_the_tied_output_head_would_keep_the_old_one(vllm_server, tmp_path: Path):
    """On a CPU, vLLM keeps the old head and reports success; so the engine sends it the head, too."""
    old, new = create_model(33), create_model(34)
    export(old, tmp_path / "33", 33)
    export(new, tmp_path / "34", 34)
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    async with VLLMEngine(vllm_server.url) as engine, HTTPEndpoint(vllm_server.url) as server:
        await engine.update_weights_from_checkpoint(tmp_path / "33")
        await engine.pause()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "34")}}
        assert await server.post_json("/collective_rpc", body, kind="sync") == {"results": [None]}
        await engine.resume()
        naive = await engine.generate(PROMPTS[0], greedy)
        await engine.update_weights_from_checkpoint(tmp_path / "34")
        found = await engine.generate(PROMPTS[0], greedy)
    mixture = create_model(34)
    mixture.lm_head.weight = torch.nn.Parameter(old.get_input_embeddings().weight.detach().clone())
    assert list(naive.output_tokens) == generate_greedily(mixture, PROMPTS[0], 20) != generate_greedily(new, PROMPTS[0], 20)
    assert list(found.output_tokens) == generate_greedily(new, PROMPTS[0], 20)
    assert not [path for path in (tmp_path / "34").iterdir() if path.is_dir()]  # what was made for the load is gone


async def test_aborts_by_id_by_group_and_of_all_return_what_there_is(vllm_server, tmp_path: Path):
    params = SamplingParams(max_tokens=450, temperature=0.7)
    model = create_endless_model(41)
    url = vllm_server.url
    found: dict[str, tuple[Completion, ...]] = {}
    seen: list[set[str]] = []
    async with VLLMEngine(url) as engine, VLLMEngine(url) as neighbor, HTTPEndpoint(url) as server:
        await engine.update_weights_from_checkpoint(export(model, tmp_path, 41))

        async def one(name: str, n: int, who: VLLMEngine) -> None:
            found[name] = await who.generate_group(PROMPTS[0], params.new(seed=len(name)), n, request_id=name)

        for _ in range(10):
            found.clear()
            before = await count_generated(server)
            async with trio.open_nursery() as nursery:
                for name, n, who in (("a", 1, engine), ("aa", 1, engine), ("group", 20, engine), ("late", 30, engine), ("b", 4, neighbor)):
                    nursery.start_soon(one, name, n, who)
                await wait_for_tokens(server, before + 400)
                await engine.pause()  # so that none ends by itself meanwhile
                await let_answers_come()
                if not found:  # else this process was so slow that some had ended already
                    with trio.fail_after(60):
                        for names in (["a", "nobody"], ["group"], None):
                            await engine.abort(names)
                            seen.append(set(found))
                        await neighbor.abort()
                await engine.resume()
            if seen:
                break
    assert seen == [{"a"}, {"a", "group"}, {"a", "group", "aa", "late"}]  # not "aa", whose id begins with "a"; not "b", another client's
    assert {name: len(completions) for name, completions in found.items()} == {"a": 1, "aa": 1, "group": 20, "late": 30, "b": 4}
    for name, completions in found.items():
        for completion in completions:
            assert completion.finish_reason == "abort", name
            assert completion.output_log_probs == pytest.approx(compute_log_probs(model, completion), abs=TOLERANCE)
    assert min(completion.output_len for completion in found["group"]) > 0


async def test_an_abort_by_the_bare_id_does_nothing_which_is_why_the_engine_sends_another(vllm_server):
    async with HTTPEndpoint(vllm_server.url) as server:
        payload = {"token_ids": [5, 6], "request_id": "mine", "sampling_params": {"max_tokens": 500, "ignore_eos": True, "logprobs": 0}}
        answers = []
        before = await count_generated(server)

        async def generate() -> None:
            answers.append(await server.post_json("/inference/v1/generate", payload))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_for_tokens(server, before + 1)
            await server.post_json("/abort_requests", {"request_ids": ["mine"]}, kind="control")
    assert answers[0]["choices"][0]["finish_reason"] == "length"


async def test_an_abort_that_comes_at_once_is_not_lost(vllm_server, tmp_path: Path):
    params = SamplingParams(max_tokens=480, temperature=1.0)
    found: list[Completion] = []
    async with VLLMEngine(vllm_server.url) as engine:
        await engine.update_weights_from_checkpoint(export(create_endless_model(42), tmp_path, 42))

        async def one(i: int) -> None:
            found.append(await engine.generate(PROMPTS[1], params.new(seed=i)))

        start = trio.current_time()
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for i in range(150):
                    nursery.start_soon(one, i)
                await trio.testing.wait_all_tasks_blocked()
                await engine.abort()
        assert trio.current_time() - start < 25  # before the 30 s after which a request is dropped
        assert len(found) == 150
        assert sum(c.finish_reason == "abort" for c in found) > 75  # more than those that the server takes at once and finishes
        assert (await engine.generate(PROMPTS[0], SamplingParams(max_tokens=3))).output_len >= 1


async def test_samples_of_a_group_differ_and_seeds_repeat_them(vllm_server, tmp_path: Path):
    async with VLLMEngine(vllm_server.url) as engine:
        await restore(engine, tmp_path)
        params = SamplingParams(max_tokens=12, temperature=1.5, seed=5)
        first, second = [await engine.generate_group(PROMPTS[0], params, 4) for _ in range(2)]
        other = await engine.generate_group(PROMPTS[0], params.new(seed=6), 4)
        free = [await engine.generate(PROMPTS[0], params.new(seed=None)) for _ in range(2)]
        crowd = await generate_all(engine, params)
        alone = [await engine.generate(prompt, params.new(seed=i)) for i, prompt in enumerate(PROMPTS)]
    assert [c.output_tokens for c in first] == [c.output_tokens for c in second]
    assert len({c.output_tokens for c in (*first, *other)}) == 8
    assert free[0].output_tokens != free[1].output_tokens
    assert [(c.output_tokens, c.output_log_probs) for c in crowd] == [(c.output_tokens, c.output_log_probs) for c in alone]


async def test_the_servers_own_seeds_of_neighboring_groups_overlap(vllm_server, tmp_path: Path):
    """Sample i gets seed + i, which is why the engine does not send the seed of a group as it is."""
    sampling = {"n": 3, "max_tokens": 12, "temperature": 1.5, "logprobs": 0}
    async with VLLMEngine(vllm_server.url) as engine, HTTPEndpoint(vllm_server.url) as server:
        await restore(engine, tmp_path)
        groups = []
        for seed in (5, 6):
            body = {"token_ids": list(PROMPTS[0]), "sampling_params": {**sampling, "seed": seed}}
            answer = await server.post_json("/inference/v1/generate", body)
            groups.append([choice["token_ids"] for choice in answer["choices"]])
    assert groups[0][1:] == groups[1][:2]


async def test_budgets_stop_ids_and_stop_strings_end_a_completion(vllm_server, tmp_path: Path):
    tokenizer = create_char_tokenizer()
    async with VLLMEngine(vllm_server.url) as engine:
        await restore(engine, tmp_path)
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
        plain = await engine.generate(PROMPTS[0], params)
        stop_at = plain.output_tokens[4]
        stopped = await engine.generate(PROMPTS[0], params.new(stop_token_ids=(stop_at,)))
        assert stopped.output_tokens == plain.output_tokens[: plain.output_tokens.index(stop_at) + 1]
        assert stopped.finish_reason == "stop"
        one = await engine.generate(PROMPTS[0], params.new(max_tokens=1))
        assert (one.output_len, one.finish_reason) == (1, "length")
        text = tokenizer.decode(list(plain.output_tokens))  # special tokens are text like any other
        stop = text[-3:-1]
        by_text = await engine.generate(PROMPTS[0], params.new(stop=("~never~", stop)))
        assert tokenizer.decode(list(by_text.output_tokens)) == text[: text.index(stop) + 2]
        assert by_text.finish_reason == "stop"
        long_prompt = tuple(3 + i % 60 for i in range(505))
        cut = await engine.generate(long_prompt, params.new(max_tokens=100))
        assert cut.output_len <= 7
        assert cut.finish_reason == ("stop" if cut.output_tokens[-1] == 1 else "length")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), SamplingParams(), "empty prompt"),
        ((3, 64), SamplingParams(), "outside the vocabulary of 64"),
        ((-1,), SamplingParams(), "outside the vocabulary"),
        ((3,) * 512, SamplingParams(), "512 prompt tokens, more than the 511"),
        ((3,), SamplingParams(max_tokens=0), "max_tokens"),
        ((3,), SamplingParams(temperature=0.001), "vLLM would use 0.01"),
        ((3,), SamplingParams(stop_token_ids=(64,)), "stop_token_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_it_is_sent(vllm_server, prompt, params, message):
    async with VLLMEngine(vllm_server.url) as engine:
        with pytest.raises(EngineError, match=message):
            await engine.generate(prompt, params)
        with pytest.raises(EngineError, match="65 samples, more than the 64"):
            await engine.generate_group((3,), SamplingParams(), 65)


async def test_the_servers_own_words_are_in_the_error(vllm_server):
    async with HTTPEndpoint(vllm_server.url) as server:
        with pytest.raises(EngineStatusError, match="out of vocabulary") as caught:
            await server.post_json("/inference/v1/generate", {"token_ids": [64], "sampling_params": {}})
    assert caught.value.status == 400


def break_checkpoint(directory: Path, how: str) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif how == "empty":
        file.unlink()
    else:
        if how == "missing":
            del tensors["model.layers.0.self_attn.q_proj.weight"]
        elif how == "shape":
            tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 7)
        elif how == "dtype":
            tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("how", ["truncated", "empty", "missing", "shape", "dtype", "nowhere"])
async def test_a_bad_checkpoint_leaves_the_server_serving_the_old_weights(vllm_server, tmp_path: Path, how: str):
    model = create_model(51)
    bad = tmp_path / "bad"
    if how != "nowhere":
        break_checkpoint(export(create_model(52), bad, 52), how)
    async with VLLMEngine(vllm_server.url) as engine:
        await engine.update_weights_from_checkpoint(export(model, tmp_path / "good", 51))
        with pytest.raises(EngineError, match=r"was not given new weights: .*bad"):
            await engine.update_weights_from_checkpoint(bad)
        assert await engine.get_weight_version() == 51
        completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=10, temperature=0.0))
    assert list(completion.output_tokens) == generate_greedily(model, PROMPTS[0], 10)


@pytest.mark.parametrize("how", ["truncated", "nowhere"])
async def test_a_load_that_fails_on_the_server_brings_back_the_old_weights(vllm_server, tmp_path: Path, how: str, monkeypatch):
    """The check is switched off here, as if the files went bad between it and the load."""
    model = create_model(61)
    good = export(model, tmp_path / "good", 61)
    bad = export(create_model(62), tmp_path / "bad", 62)
    async with VLLMEngine(vllm_server.url) as engine, HTTPEndpoint(vllm_server.url) as server:
        await engine.update_weights_from_checkpoint(good)
        before = await count_generated(server)

        def check_then_break(path, reference, *, allow_cast=False):
            layout = real_check(path, reference, allow_cast=allow_cast)
            shutil.rmtree(bad) if how == "nowhere" else break_checkpoint(bad, how)
            return layout

        from rollouts.engines.weights import server_weights

        real_check = server_weights.check_checkpoint
        monkeypatch.setattr(server_weights, "check_checkpoint", check_then_break)
        in_flight: list[Completion] = []

        async def generate() -> None:
            in_flight.append(await engine.generate(PROMPTS[1], SamplingParams(max_tokens=300, temperature=0.5, seed=1)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await wait_for_tokens(server, before + 1)
            with pytest.raises(EngineError, match=r"did not take the weights in .*bad.*It goes on with the weights that it had before"):
                await engine.update_weights_from_checkpoint(bad)
        assert await engine.get_weight_version() == 61
        completion = await engine.generate(PROMPTS[0], SamplingParams(max_tokens=10, temperature=0.0))
    assert list(completion.output_tokens) == generate_greedily(model, PROMPTS[0], 10)
    assert in_flight[0].output_log_probs == pytest.approx(compute_log_probs(model, in_flight[0]), abs=TOLERANCE)


async def test_a_pause_holds_requests_until_the_resume(vllm_server, tmp_path: Path):
    model = create_model(71)
    async with VLLMEngine(vllm_server.url) as engine:
        await engine.pause()
        async with trio.open_nursery() as nursery:
            found: list[Completion] = []

            async def generate() -> None:
                found.append(await engine.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0.0)))

            nursery.start_soon(generate)
            await trio.sleep(0.5)
            assert not found
            async with VLLMEngine(vllm_server.url) as late:
                with pytest.raises(EngineError, match="found paused"):
                    await late.generate(PROMPTS[0], SamplingParams())
            await engine.update_weights_from_checkpoint(export(model, tmp_path, 71))
            await trio.sleep(0.5)
            assert not found
            await engine.resume()
    assert list(found[0].output_tokens) == generate_greedily(model, PROMPTS[0], 5)
    assert set(found[0].output_versions) == {71}


async def test_a_server_sleeps_and_goes_on_with_its_weights(vllm_server, tmp_path: Path):
    """On a CPU, vLLM releases no memory; its routes, their order and the wait of requests are those of a GPU."""
    async with VLLMEngine(vllm_server.url) as engine:
        await engine.update_weights_from_checkpoint(export(create_endless_model(4), tmp_path / "4", 4))
        params = SamplingParams(max_tokens=32, temperature=0.0)
        before = await generate_all(engine, params)
        for _ in range(3):
            found: list[Completion] = []

            async def ask(found: list[Completion] = found) -> None:
                found.extend(await generate_all(engine, params))

            await engine.sleep()
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    await trio.sleep(0.5)
                    assert not found
                    await engine.wake_up()
            assert [one.output_tokens for one in found] == [one.output_tokens for one in before]
            assert {version for one in found for version in one.output_versions} == {4}
        await engine.sleep()
        with pytest.raises(EngineError, match="is asleep"):
            await engine.update_weights_from_checkpoint(tmp_path / "4")
        await engine.wake_up()
        await restore(engine, tmp_path)


async def test_cancelled_requests_leave_nothing_behind(vllm_server):
    async with VLLMEngine(vllm_server.url) as engine:
        for _ in range(3):
            with trio.move_on_after(0.1):
                await generate_all(engine, SamplingParams(max_tokens=480, temperature=1.0))
        with trio.fail_after(60):
            await generate_all(engine, SamplingParams(max_tokens=3))


async def test_texts_come_as_batches_as_groups_and_from_the_openai_like_routes(vllm_server):
    async with VLLMEngine(vllm_server.url, vocab_size=64) as engine:
        await check_texts(engine, vllm_server.url)
