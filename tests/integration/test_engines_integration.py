"""The RL stage on inference servers, and engines by name. The servers are fakes that sample from real, tiny models."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio

from integration.parts.engines import (
    check_engine,
    choose_gpus,
    create_embedded_engine,
    create_server_config,
    create_server_engine,
    open_engines,
    prepare_initial_model,
    raise_open_file_limit,
)
from integration.parts.models import create_model
from integration.parts.placement import assign_gpus
from integration.parts.server_fleet import spread_config
from integration.run.stages import RunControl, run_rl
from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from integration.tasks.task import create_sort_task
from integration.train import main
from rollouts.async_rl_loop import run_async_rl_training
from rollouts.asynchronous.config import AsyncConfig
from rollouts.asynchronous.executor import create_workflow_executor
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig, ParityConfig, RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.protocol import (
    WEIGHT_VERSION_FILE,
    EngineFeature,
    get_engine_features,
)
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, EngineError, EngineProtocolError
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.testing import FakeBackend, FakeSGLangServer, FakeVLLMServer, create_tiny_model
from rollouts.testing.servers.http import LoopbackServer
from rollouts.training.metrics import JSONLLogger, read_metrics
from rollouts.types import RolloutBatch, Sample, SamplingParams

SERVERS = {"vllm": FakeVLLMServer, "sglang": FakeSGLangServer}
ENGINES = {"vllm": VLLMEngine, "sglang": SGLangEngine}


def test_requests_in_flight_are_not_limited_by_the_open_files_that_a_shell_gives():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        create_server_engine(EngineSection(kind="vllm", urls=("http://127.0.0.1:1",)), "http://127.0.0.1:1", {})
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536), hard)
        raise_open_file_limit(most=100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100  # never less than before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_even(sample: Sample) -> float:
    """A reward that differs from sample to sample, whatever the model has learned."""
    return sum(token % 2 == 0 for token in sample.tokens[-4:]) / 4


def create_config(kind: str, url: str, **engine) -> Config:
    return Config(
        rl=RLSection(num_steps=3, prompts_per_step=4, samples_per_prompt=4, optimizer=OptimizerConfig(lr=3e-3), sync_every=1),
        model=ModelSection(hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1),
        evaluation=EvaluationSection(num_prompts=4, sampled=False),
        engine=EngineSection(kind=kind, urls=(url,), **engine),
    )


def save_other_model(config: Config, path: Path) -> Path:
    """A model of the same architecture and other weights, which the server has before the run begins."""
    model, tokenizer = create_model(replace(config, seed=7))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def train(config: Config, directory: Path, stop_after: int | None = None) -> list[dict[str, object]]:
    metrics = directory / "metrics.jsonl"
    logger = JSONLLogger(metrics)
    steps = iter(range(1, 100))
    should_stop = (lambda: next(steps) == stop_after) if stop_after else (lambda: False)
    task = replace(create_sort_task(create_char_tokenizer(), num_heldout=4), reward_fn=count_even)
    await run_rl(config, directory / "rl", None, RunControl(logger=logger, should_stop=should_stop, clock=lambda: 0.0), task=task)
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in read_metrics(metrics)]


@pytest.mark.parametrize(
    ("kind", "in_flight"),
    [
        ("vllm", "continue"),
        ("sglang", "abort"),
        pytest.param("vllm", "abort", marks=pytest.mark.slow),
        pytest.param("sglang", "continue", marks=pytest.mark.slow),
    ],
)
async def test_the_rl_stage_trains_on_a_server_whose_numbers_are_the_trainers(kind: str, in_flight: str, tmp_path: Path):
    how = "group" if (kind, in_flight) == ("sglang", "abort") else "auto"
    config = create_config(kind, "http://127.0.0.1:1", in_flight=in_flight, weight_sync=how, parity_action="stop", parity_threshold=1e-4)
    async with SERVERS[kind](save_other_model(config, tmp_path / "other")) as server:
        config = replace(config, engine=replace(config.engine, urls=(server.url,)))
        lines = [line for line in await train(config, tmp_path) if "loss" in line]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    if kind == "sglang":
        assert server.count("/update_weights_from_distributed") == (3 if how == "group" else 0)
    assert all(line["engine_diff_max"] < 1e-4 for line in lines)
    assert all(line["staleness_max"] == 0 for line in lines)


async def test_a_run_on_a_server_that_was_interrupted_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    config = create_config("vllm", "http://127.0.0.1:1")
    config = replace(config, rl=replace(config.rl, num_steps=2))
    other = save_other_model(config, tmp_path / "other")
    lines = []
    for name, stop_after in (("straight", None), ("stopped", 1), ("stopped", None)):
        async with FakeVLLMServer(other) as server:  # one that has just been started
            lines.append(await train(replace(config, engine=replace(config.engine, urls=(server.url,))), tmp_path / name, stop_after))
    assert len(lines[1]) < len(lines[0])
    assert {line["step"]: line for line in lines[2]} == {line["step"]: line for line in lines[0]}
    assert lines[0][-1]["loss"] != 0


@pytest.mark.parametrize(("kind", "segment_wise"), [("vllm", False), pytest.param("sglang", True, marks=pytest.mark.slow)])
async def test_rollouts_from_a_server_run_beside_training(kind: str, segment_wise: bool, tmp_path: Path):
    config = create_config(kind, "http://127.0.0.1:1", weight_sync="memory" if kind == "sglang" else "auto")
    rl = replace(config.rl, num_steps=4, algorithm="decoupled(grpo)", asynchronous=AsyncConfig(enabled=True, max_staleness=2))
    config = replace(config, rl=rl, enable_segment_wise_ppo=segment_wise)
    async with SERVERS[kind](save_other_model(config, tmp_path / "other")) as server:
        lines = await train(replace(config, engine=replace(config.engine, urls=(server.url,))), tmp_path)
    trained = [line for line in lines if "loss" in line]
    assert [line["weight_version"] for line in trained] == [0, 1, 2, 3]
    assert max(line["staleness_max"] for line in trained) in (1, 2)
    assert trained[0]["mismatch_kl"] == pytest.approx(0.0, abs=1e-4)
    assert all(line["num_groups_failed"] == line["num_groups_retried"] == 0 for line in trained)
    assert [line["eval_accuracy"] is not None for line in lines] == [True] * 5
    if segment_wise:
        assert sum(line["num_segment_tokens"] for line in trained) > 0
        assert all(line["num_missed_tokens"] == 0 for line in trained)


async def test_one_request_for_a_group_gives_groups_of_the_same_size(tmp_path: Path):
    config = create_config("vllm", "http://127.0.0.1:1", one_request_per_group=True)
    async with FakeVLLMServer(save_other_model(config, tmp_path / "other")) as server:
        lines = await train(replace(config, engine=replace(config.engine, urls=(server.url,))), tmp_path)
    assert [line["num_samples"] for line in lines if "loss" in line] == [16, 16, 16]


async def test_a_server_with_another_vocabulary_is_refused(tmp_path: Path):
    config = create_config("vllm", "http://127.0.0.1:1")
    create_tiny_model(vocab_size=80).save_pretrained(tmp_path / "other")
    async with FakeVLLMServer(tmp_path / "other") as server:
        with pytest.raises(EngineError, match="vocabulary of 80 tokens, expected 64"):
            await train(replace(config, engine=replace(config.engine, urls=(server.url,))), tmp_path)


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "vlm"}, "engine.kind is 'vlm', expected inprocess or vllm or sglang"),
        ({"kind": "vllm"}, "neither given"),
        ({"kind": "sglang", "launch": True, "urls": ("http://127.0.0.1:1",)}, "both given"),
        ({"launch": True}, "engine.launch is True"),
        ({"urls": ("http://127.0.0.1:1",)}, "the embedded engine is not a server"),
        ({"one_request_per_group": True}, "one_request_per_group"),
        ({"kind": "vllm", "launch": True, "startup_timeout_s": 0}, "startup_timeout_s"),
        ({"parity_threshold": 0.0}, "parity_threshold"),
        ({"parity_rows": -1}, "parity_rows"),
        ({"probe_tolerance": -0.1}, "probe_tolerance"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"kind": "vllm", "launch": True, "num_servers": 0}, "num_servers is 0"),
        ({"kind": "vllm", "launch": True, "updates_at_once": 0}, "updates_at_once is 0, expected at least 1"),
        ({"kind": "vllm", "urls": ("http://h:1",), "num_servers": 2}, "engine.num_servers is 2, but no server is launched"),
        ({"kind": "vllm", "urls": ("http://h:1",), "gpus": ("0",)}, "engine.gpus is .* but no server is launched"),
        ({"kind": "vllm", "launch": True, "memory_fraction": 1.5}, "engine.memory_fraction is 1.5, expected between 0 and 1"),
        ({"memory_fraction": 0.5}, "engine.memory_fraction is 0.5, expected no value"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineSection(**settings)


def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused_where_a_run_launches_it_there():
    launched = EngineSection(kind="vllm", launch=True)
    with pytest.raises(ConfigError, match=r"model.num_heads 4, so a head has 24 numbers.*set --model.hidden-size 128, or"):
        Config(model=ModelSection(hidden_size=96), engine=launched)
    Config(model=ModelSection(hidden_size=128), engine=launched)
    for engine in (EngineSection(), EngineSection(kind="vllm", urls=("http://h:1",)), EngineSection(kind="sglang", launch=True)):
        Config(model=ModelSection(hidden_size=96), engine=engine)


def test_servers_are_compared_with_the_trainer_and_the_embedded_engine_is_on_request():
    server, embedded = EngineSection(kind="vllm", launch=True), EngineSection()
    assert server.parity() == ParityConfig(num_rows=8)
    assert (server.tolerance("cpu"), replace(server, dtype="bfloat16").tolerance("cpu")) == (1e-3, 0.3)
    assert replace(server, probe_tolerance=0).tolerance("cpu") is None
    assert replace(server, parity_rows=0).parity() is None
    assert embedded.parity() is None
    assert embedded.tolerance("cpu") is None
    assert replace(embedded, parity_rows=4, parity_action="stop").parity() == ParityConfig(num_rows=4, action="stop")


def test_the_python_of_a_server_comes_from_the_setting_the_environment_or_is_this_one():
    section = EngineSection(
        kind="vllm", launch=True, context_length=256, max_num_seqs=32, memory_fraction=0.4, extra_args=("--seed", "1"), port=8123
    )
    found = [
        create_server_config(chosen, "/model", environment, device="cpu").python
        for chosen, environment in (
            (replace(section, python="/a/python"), {"VLLM_PYTHON": "/b/python"}),
            (section, {"VLLM_PYTHON": "/b/python", "SGLANG_PYTHON": "/c/python"}),
            (section, {"SGLANG_PYTHON": "/c/python"}),
        )
    ]
    assert found == ["/a/python", "/b/python", sys.executable]
    server = create_server_config(section, "/model", {}, device="cpu")
    assert (server.kind, server.model_path, server.device, server.dtype) == ("vllm", "/model", "cpu", "float32")
    assert (server.context_length, server.max_num_seqs, server.extra_args, server.port) == (256, 32, ("--seed", "1"), 8123)
    assert server.memory_fraction == 0.4
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        create_server_config(replace(section, tensor_parallel_size=2), "/model", {}, device="cpu")


def test_a_key_is_read_from_its_variable():
    section = EngineSection(kind="sglang", urls=("http://127.0.0.1:1",), api_key_variable="ENGINE_KEY")
    create_server_engine(section, section.urls[0], {"ENGINE_KEY": "secret"})
    with pytest.raises(ConfigError, match="no such environment variable"):
        create_server_engine(section, section.urls[0], {})


def test_what_would_keep_the_engines_from_starting_is_found_out_before_anything_is_trained(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$HAS_VLLM" = 1 ] && [ "$VLLM_SERVER_DEV_MODE" = 1 ]\n')
    python.chmod(0o755)
    launched = EngineSection(kind="vllm", launch=True, python=str(python))
    check_engine(launched, {"HAS_VLLM": "1"}, device="cpu")
    check_engine(EngineSection(), {}, device="cpu")
    for section, message in (
        (launched, f"{python} has no vllm: name the Python .* --engine.python or VLLM_PYTHON"),
        (replace(launched, python="/nowhere/python"), "vllm cannot be started with /nowhere/python: .*No such file.* VLLM_PYTHON"),
        (replace(launched, port=80_000), "port is 80000"),
        (EngineSection(kind="sglang", urls=("http://h:1",), api_key_variable="ENGINE_KEY"), "no such environment variable"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_engine(section, {}, device="cpu")


def test_servers_get_gpus_and_ports_of_their_own():
    assert assign_gpus(2, 2, ("0", "1", "2", "3")) == ("0,1", "2,3")
    assert assign_gpus(2, 1, ("GPU-a", "GPU-a")) == ("GPU-a", "GPU-a")
    with pytest.raises(ConfigError, match=r"3 servers of 2 GPUs each need 6, but there are 4 \(0, 1, 2, 3\)"):
        assign_gpus(3, 2, ("0", "1", "2", "3"))
    server = ServerConfig("vllm", "m", "python", port=8000, env={"A": "1"})
    assert [(c.port, c.env) for c in spread_config(server, ("0", "1"), 2)] == [
        (8000, {"A": "1", "CUDA_VISIBLE_DEVICES": "0"}), (8001, {"A": "1", "CUDA_VISIBLE_DEVICES": "1"}),
    ]  # fmt: skip
    assert [(c.port, c.env) for c in spread_config(replace(server, port=None), None, 2)] == [(None, {"A": "1"})] * 2
    section = EngineSection(kind="vllm", launch=True, num_servers=2)
    assert choose_gpus(section, server, {"CUDA_VISIBLE_DEVICES": "4,7"}) == ("4", "7")
    assert choose_gpus(replace(section, gpus=("2", "3")), server, {"CUDA_VISIBLE_DEVICES": "4,7"}) == ("2", "3")
    assert choose_gpus(section, replace(server, device="cpu"), {}) is None
    with pytest.raises(ConfigError, match="2 servers of 1 GPUs each need 2, but there are 1 "):
        choose_gpus(section, server, {"CUDA_VISIBLE_DEVICES": "4"})


def test_one_server_gets_the_gpus_that_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    section = EngineSection(kind="vllm", launch=True, gpus=("3", "5"), tensor_parallel_size=2)
    assert create_server_config(section, "m", {}, device="cuda").env == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert create_server_config(replace(section, gpus=()), "m", {}, device="cuda").env == {}
    with pytest.raises(ConfigError, match=r"1 servers of 2 GPUs each need 2, but there are 1 \(3\)"):
        create_server_config(replace(section, gpus=("3",)), "m", {}, device="cuda")


@pytest.mark.parametrize("is_trained", [False, True])
async def test_a_model_that_is_not_trained_is_the_embedded_engines_own(is_trained: bool, tmp_path: Path):
    model = create_tiny_model()
    before = model.lm_head.weight.clone()
    options = {"source": None, "environment": {}, "say": lambda message: None, "is_trained": is_trained}
    async with open_engines(Config(), model, create_char_tokenizer(), tmp_path, **options) as (engine,):
        await engine.update_weights(create_tiny_model(seed=1).state_dict(), 1)
    assert torch.equal(model.lm_head.weight, before) == is_trained


async def test_several_servers_that_run_already_become_one_engine(tmp_path: Path):
    model, tokenizer = create_tiny_model(), create_char_tokenizer()
    model.save_pretrained(tmp_path / "other")
    async with FakeVLLMServer(tmp_path / "other", tokenizer=tokenizer) as a, FakeVLLMServer(tmp_path / "other", tokenizer=tokenizer) as b:
        config = Config(engine=EngineSection(kind="vllm", urls=(a.url, b.url), updates_at_once=1))
        async with open_engines(config, model, tokenizer, tmp_path, source=None, environment={}, say=lambda message: None) as (fleet,):
            assert isinstance(fleet, EngineFleet)
            assert {EngineFeature.GROUPS, EngineFeature.SCORES} <= get_engine_features(fleet)
            assert EngineFeature.MEMORY_UPDATES not in get_engine_features(fleet)
            assert [member.version for member in fleet.members] == [0, 0]
            groups = await fleet.generate_group((3, 4, 5), SamplingParams(max_tokens=4), 3)
            assert {completion.output_versions[0] for completion in groups} == {0}


def test_a_server_that_cannot_be_started_ends_the_run_before_its_first_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    engine = ["--engine.kind", "vllm", "--engine.launch", "--engine.python", "/nowhere/python", "--model.device", "cpu"]
    assert main(["--mode", "sft+rl", "--output-dir", str(tmp_path / "run"), *engine]) == 2
    assert "vllm cannot be started with /nowhere/python" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# the model that servers begin with


def test_a_model_directory_is_linked_and_says_that_it_is_version_0(tmp_path: Path):
    source = tmp_path / "source"
    create_tiny_model().save_pretrained(source)
    create_char_tokenizer().save_pretrained(source)
    (source / WEIGHT_VERSION_FILE).write_text('{"weight_version": 9}')
    for _ in range(2):  # a run that goes on finds it there
        initial = prepare_initial_model(create_tiny_model(), create_char_tokenizer(), source, tmp_path / "initial")
    assert {file.name for file in initial.iterdir()} == {file.name for file in source.iterdir()}
    assert (initial / "model.safetensors").resolve() == source / "model.safetensors"
    assert json.loads((initial / WEIGHT_VERSION_FILE).read_text()) == {"weight_version": 0}
    assert json.loads((source / WEIGHT_VERSION_FILE).read_text()) == {"weight_version": 9}


# -- weights that this run never made


def count_up(prompt: tuple[int, ...], number: int, num_loads: int, seed: int | None) -> tuple[int, float]:
    """A script: 10, 11, 12, ... with log-prob -1."""
    return 10 + number % 50, -1.0


async def relabel(server: LoopbackServer, version: int) -> None:
    """Act as another program that updates the same server."""
    async with httpx.AsyncClient(timeout=10.0) as client:
        answer = await client.post(f"{server.url}/update_weight_version", json={"new_version": str(version)})
    assert answer.status_code == 200, answer.text


async def train_while_another_program_updates(server: LoopbackServer, engine: Any, *, asynchronous: bool) -> list[dict[str, float]]:
    """Three steps under version 0; beside the first of them `server` gets a version of another program."""

    async def note(step: int, batch: RolloutBatch) -> None:
        if step == 1:
            await relabel(server, 7)

    buffer = DataBuffer([f"s{i}=" for i in range(1000)])
    generate_fn = create_generate_fn([engine], create_char_tokenizer(), SamplingParams(max_tokens=4))
    rollout = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate_fn, reward_fn=lambda sample: 1.0)
    config = RLTrainingConfig(num_steps=3, sync_every=100, weight_sync="memory")
    if not asynchronous:
        manager = AsyncRolloutManager(buffer, rollout, engines=[engine])
        return await run_rl_training(FakeBackend(), buffer, manager, [engine], config, on_rollouts=note)
    settings = AsyncConfig(enabled=True, max_staleness=0, on_failure="raise", max_concurrent_rollouts=2)
    async with create_workflow_executor(buffer, rollout, settings, engines=[engine], batches_per_version=100) as executor:
        return await run_async_rl_training(FakeBackend(), buffer, executor, [engine], config, on_rollouts=note)


@pytest.mark.parametrize(("kind", "asynchronous"), [("vllm", False), ("vllm", True), ("sglang", False), ("sglang", True)])
async def test_versions_that_the_run_never_made_are_not_trained_on(kind: str, asynchronous: bool):
    async with SERVERS[kind](count_up) as server, ENGINES[kind](server.url, vocab_size=64) as engine:
        with pytest.raises(EngineProtocolError, match=r"of weight version 7, but the engines were given none after 0.*Another program"):
            await train_while_another_program_updates(server, engine, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_member_of_a_fleet_that_serves_versions_of_others_is_taken_out_and_its_requests_begin_anew(asynchronous: bool):
    said = list[str]()
    async with (
        FakeVLLMServer(count_up) as one,
        FakeVLLMServer(count_up) as two,
        VLLMEngine(one.url) as first,
        VLLMEngine(two.url) as second,
    ):
        async with EngineFleet([first, second], config=FleetConfig(), say=said.append) as fleet:
            history = await train_while_another_program_updates(one, fleet, asynchronous=asynchronous)
    assert [line["staleness_max"] for line in history] == [0.0] * 3
    assert history[-1]["num_engines_up"] == 1 and sum(line["num_requests_retried"] for line in history) >= 1
    assert "with weight version 7, which it did not confirm (confirmed: 0)" in said[0]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_has_gone_back_to_older_weights_is_not_heard(kind: str):
    async with SERVERS[kind](count_up) as server:
        await relabel(server, 3)
        async with ENGINES[kind](server.url, vocab_size=64) as engine:
            assert (await engine.generate((5, 6), SamplingParams(max_tokens=2))).output_versions == (3, 3)
            await relabel(server, 1)
            with pytest.raises(EngineProtocolError, match="sampled tokens with weight version 1, but 3 was confirmed before"):
                await engine.generate((5, 6), SamplingParams(max_tokens=2))


async def test_a_server_whose_weights_become_older_within_an_answer_is_not_heard():
    async with FakeVLLMServer(count_up, seconds_per_token=0.02) as server:
        async with VLLMEngine(server.url) as engine, trio.open_nursery() as nursery:
            await relabel(server, 3)  # newer ones than were confirmed here are for the loop to judge

            @nursery.start_soon
            async def update() -> None:
                await trio.sleep(0.1)
                await relabel(server, 2)

            with pytest.raises(EngineProtocolError, match="with versions that fall, from 3 to 2"):
                await engine.generate((5, 6), SamplingParams(max_tokens=20))


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
async def test_the_embedded_engine_computes_in_its_dtype_beside_a_float32_trainer(dtype: Any, architecture: str):
    model, other = (create_tiny_model(architecture=architecture, seed=seed) for seed in (0, 1))
    config = Config(engine=EngineSection(dtype=dtype))
    engine = create_embedded_engine(config, model, create_char_tokenizer())
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)  # auto on a CPU
    async with engine:
        await engine.update_weights(dict(other.state_dict()), 1)
        completion = await engine.generate((5, 6, 7, 8), SamplingParams(max_tokens=12, seed=3))
        slots: Any = engine._slots
        assert {p.dtype for p in slots.model.parameters()} == {slots._keys.dtype, slots._values.dtype} == {wanted}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    row = torch.tensor([[5, 6, 7, 8, *completion.output_tokens]])
    with torch.no_grad():
        exact = other(input_ids=row).logits[0, 3:-1].log_softmax(-1).gather(1, row[0, 4:, None])[:, 0]
    error = float((torch.tensor(completion.output_log_probs) - exact).abs().max())
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[wanted]
    assert wanted == torch.float32 or error > 1e-6
