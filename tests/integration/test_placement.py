"""GPUs of training processes and launched servers: planned before anything starts, never two where one takes all."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integration.parts.placement import (
    Placement,
    choose_weight_sync,
    count_training_gpus,
    find_nccl_version,
    place_servers,
    plan_placement,
)
from integration.settings.config import Config
from integration.settings.made.library import rl_training_config
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.engine import EngineSection
from integration.settings.sections.generation import RewardSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from integration.train import main
from rollouts.asynchronous.config import AsyncConfig
from rollouts.errors import ConfigError


def make(device: str = "cuda", **engine: object) -> Config:
    return Config(model=ModelSection(device=device), engine=EngineSection(**{"kind": "vllm", "launch": True, **engine}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "config", "training", "servers"),
    [
        ("01", 1, make(), "0", "1"),
        ("0123", 2, make(num_servers=2), "01", "23"),
        ("0123", 1, make(tensor_parallel_size=2), "0", "12"),
        ("0123", 1, make("cuda:2"), "2", "0"),
        ("47", 1, make(), "4", "7"),  # names, not torch's numbers
        ("0123", 2, make(gpus=("3",)), "01", "3"),
        ("0", 1, make(memory_fraction=0.4), "0", "0"),
        ("0", 1, make(extra_args=("--gpu-memory-utilization=0.4",)), "0", "0"),
        ("01", 1, make(num_servers=2, memory_fraction=0.4), "0", "10"),  # the free one first
    ],
)
def test_servers_are_behind_training(gpus: str, num_ranks: int, config: Config, training: str, servers: str):
    assert plan_placement(config, tuple(gpus), num_ranks) == Placement(tuple(training), tuple(servers))


def test_the_gpu_of_a_reward_model_is_not_free():
    config = replace(make(), reward=RewardSection(model="scorer", model_device="cuda:1"))
    assert plan_placement(config, ("0", "1", "2"), 1) == Placement(("0", "1"), ("2",))


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "config", "message"),
    [
        ("0", 1, make(), r"GPU 0 would hold training and a launched server.*--engine.memory-fraction"),
        ("01", 2, make(), r"visible are 0, 1, training is on 0, 1, and the servers need 1.*--backend.num-processes"),
        ("01", 1, make(gpus=("0",)), r"GPU 0 would hold"),
        ("0", 1, make(tensor_parallel_size=2, memory_fraction=0.4), r"need 2, but there are 1"),
        ("0", 1, make(weight_sync="group", memory_fraction=0.4), r"engine.weight_sync is 'group', but GPU 0 .*use ipc or disk"),
    ],
)
def test_what_would_die_is_refused(gpus: str, num_ranks: int, config: Config, message: str):
    with pytest.raises(ConfigError, match=message):
        plan_placement(config, tuple(gpus), num_ranks)


@given(
    num_gpus=st.integers(1, 8), num_ranks=st.integers(1, 8), num_servers=st.integers(1, 4), width=st.integers(1, 3), fraction=st.booleans()
)
def test_no_gpu_holds_both_unless_a_fraction_says_so(num_gpus: int, num_ranks: int, num_servers: int, width: int, fraction: bool):
    config = make(num_servers=num_servers, tensor_parallel_size=width, memory_fraction=0.3 if fraction else None)
    gpus = tuple(map(str, range(num_gpus)))
    ranks = min(num_ranks, num_gpus)
    try:
        placement = plan_placement(config, gpus, ranks)
    except ConfigError:
        assert num_gpus < num_servers * width or (not fraction and num_gpus - ranks < num_servers * width)
        return
    assert len(placement.servers) == len(set(placement.servers)) == num_servers * width
    assert placement.training == gpus[:ranks]
    assert fraction or not placement.shared
    if num_gpus - ranks >= num_servers * width:
        assert not placement.shared


def test_by_default_training_leaves_servers_their_gpus():
    fsdp = replace(make(num_servers=2, tensor_parallel_size=2), backend=BackendSection(kind="fsdp"))
    assert count_training_gpus(fsdp, 8) == 4
    assert count_training_gpus(replace(fsdp, engine=EngineSection()), 8) == 8
    assert count_training_gpus(fsdp, 2) == 1


APART, TOGETHER = Placement(("0",), ("1",)), Placement(("0",), ("0",))


@pytest.mark.parametrize(
    ("engine", "placement", "same", "chosen"),
    [
        ({}, APART, True, "group"),
        ({}, APART, False, "disk"),
        ({}, TOGETHER, True, "disk"),  # vLLM would accept pickles of any local process
        ({"kind": "sglang"}, TOGETHER, True, "ipc"),
        ({"kind": "sglang"}, APART, True, "group"),
        ({"num_servers": 2}, Placement(("0",), ("1", "2")), True, "disk"),  # a restarted server is not in the group
        ({"num_servers": 2, "on_server_death": "stop"}, Placement(("0",), ("1", "2")), True, "group"),
        ({"kind": "sglang", "tensor_parallel_size": 2}, Placement(("0",), ("0", "1")), True, "disk"),
        ({"path_map": ("/a=/b",)}, APART, True, "disk"),
    ],
)
def test_weights_take_the_shortest_way_that_is_possible(engine: dict[str, object], placement: Placement, same: bool, chosen: str):
    assert choose_weight_sync(make(**engine).engine, placement, same_nccl=lambda: same) == chosen


def test_a_run_takes_the_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = {"CUDA_VISIBLE_DEVICES": "5,6"}
    placed = place_servers(make("auto", python="/venv/python"), seen, 1, {sys.executable: "2.28.9", "/venv/python": "2.28.9"}.get)
    assert (placed.engine.gpus, placed.engine.weight_sync) == (("6",), "group")
    placed = place_servers(make("auto", python="/venv/python"), seen, 1, {sys.executable: "2.28.9", "/venv/python": "2.27.5"}.get)
    assert placed.engine.weight_sync == "disk"
    unknown = place_servers(make("auto"), seen, 1, lambda python: None)
    assert unknown.engine.weight_sync == "disk"
    for unchanged in (make("cpu"), Config(model=ModelSection(device="cuda"))):
        assert place_servers(unchanged, seen, 1, lambda python: None) is unchanged
    assert place_servers(make(), {"CUDA_VISIBLE_DEVICES": ""}, 1, lambda python: None).engine.gpus == ()


def test_a_server_on_the_gpu_of_training_sleeps_unless_it_generates_meanwhile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def place(config: Config, gpus: str) -> Config:
        return place_servers(config, {"CUDA_VISIBLE_DEVICES": gpus}, 1, lambda python: None)

    shared, apart = make(memory_fraction=0.4), make()
    assert [place(config, gpus).engine.sleep for config, gpus in ((shared, "0"), (apart, "0,1"))] == [True, False]
    asynchronous = replace(shared, rl=RLSection(asynchronous=AsyncConfig(enabled=True)))
    assert place(asynchronous, "0").engine.sleep is False
    assert [place(make(memory_fraction=0.4, sleep=given), "0").engine.sleep for given in (True, False)] == [True, False]
    placed = place(shared, "0")
    assert rl_training_config(placed, None).sleep_engines and not rl_training_config(shared, None).sleep_engines
    with pytest.raises(ConfigError, match=r"engine.sleep is True, but servers generate while the policy is trained"):
        replace(asynchronous, engine=placed.engine)


def test_the_command_refuses_a_shared_gpu_before_it_writes_anything(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    arguments = [
        "--mode",
        "rl",
        "--model.device",
        "cuda",
        "--engine.kind",
        "vllm",
        "--engine.launch",
        "--output-dir",
        str(tmp_path / "run"),
    ]
    assert main(arguments) == 2
    assert "GPU 3 would hold training and a launched server" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_version_of_nccl_is_that_of_the_packages(tmp_path: Path):
    info = tmp_path / "site" / "nvidia_nccl_cu13-2.28.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.28.9\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    assert find_nccl_version(str(python)) == "2.28.9"
    assert find_nccl_version(str(tmp_path / "nobody")) is None
    assert subprocess.run([str(python), "-c", "pass"], env=dict(os.environ)).returncode == 0
