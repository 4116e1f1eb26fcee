"""Runs on several processes: the numbers are those of one, a run goes on with another number of them, and ends as one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest
import torch
import trio
from forked import PATIENCE_S, Child
from fsdp_runs import CASES
from rank_processes import find_free_port, start_ranks

from integration.parts.models import create_model
from integration.run.directory import StopRequest, watch_ranks
from integration.run.launch import count_processes, describe_kill, is_follower, needs_launch, watch_launcher
from integration.settings.config import Config
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.model import ModelSection
from integration.train import main
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.errors import ConfigError
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import list_checkpoints

ROOT = Path(__file__).parents[2]

COMPARE = """
import os, sys
from pathlib import Path
from fsdp_runs import run_case, write_result
from rollouts.backends.ranks.group import join_ranks

folder, cases, steps, stop = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
out = {}
with join_ranks(os.environ, timeout_s=120) as group:
    if group.rank > 0:
        group.serve()
    else:
        for case in cases:
            out[case] = {"two": run_case(case, folder / f"two_{case}", group, num_steps=steps)}
            out[case]["first part"] = run_case(case, folder / f"parts_{case}", group, num_steps=steps, stop_after=stop)
if out:
    with join_ranks({}) as group:
        for case in cases:
            out[case]["second part"] = run_case(case, folder / f"parts_{case}", group, num_steps=steps, stop_after=stop)
    for case in cases:
        out[case]["one"] = run_case(case, folder / f"one_{case}", num_steps=steps)
    write_result(folder / "result.json", out)
"""  # two processes, the first part on two and the second on one, and one process with the other backend


def compare(folder: Path, cases: str, *, num_steps: int, stop_after: int, num_ranks: int = 2) -> dict:
    """Return the findings of COMPARE."""
    children = start_ranks(COMPARE, num_ranks, folder, cases, num_steps, stop_after, folder=folder)
    try:
        assert [child.wait(6 * PATIENCE_S) for child in children] == [0] * num_ranks, [child.error for child in children]
    finally:
        for child in children:
            child.kill()
    return json.loads((folder / "result.json").read_text())


def check_equal(found: list[dict], expected: list[dict]) -> None:
    """Check that all numbers agree to 1e-5, behind step 10 to 1e-4; several ranks run every backward pass, and report none as skipped."""
    skipped = "zero_gradient_fraction"
    found, expected = ([{key: line[key] for key in line if key != skipped} for line in lines] for lines in (found, expected))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            close = 1e-5 if theirs["step"] <= 10 else 1e-4  # what rounding makes of it grows from step to step
            same = pytest.approx(theirs[key], abs=close, rel=close) if isinstance(theirs[key], float) else theirs[key]
            assert ours[key] == same, (theirs["step"], key)


def steps_of(lines: list[dict]) -> list[dict]:
    """Return the lines without that of the evaluation before the first step."""
    return [line for line in lines if line["step"] > 0]


@pytest.mark.slow
def test_ppo_on_two_processes_equals_one_and_goes_on_with_one(tmp_path: Path):
    """Policy, critic and reference sharded, nine ragged rows in micro-batches, the engine on rank 0."""
    out = compare(tmp_path, "ppo", num_steps=2, stop_after=1)["ppo"]
    assert {"grad_norm", "critic_grad_norm", "reference_kl", "explained_variance", "reward_mean"} <= out["one"][-1].keys()
    assert len({line["reward_mean"] for line in steps_of(out["one"])}) > 1  # something was learned from
    check_equal(out["two"], out["one"])
    parts = [*steps_of(out["first part"])[:1], *steps_of(out["second part"])[-1:]]
    check_equal(parts, steps_of(out["one"]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_steps", "stop_after"), [pytest.param(5, 3, marks=pytest.mark.slow), pytest.param(20, 11, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("case", "num_ranks"), [(case, 2) for case in CASES] + [("ppo", 3)])
def test_every_kind_of_run_equals_that_of_one_process(tmp_path: Path, case: str, num_ranks: int, num_steps: int, stop_after: int):
    out = compare(tmp_path, case, num_steps=num_steps, stop_after=stop_after, num_ranks=num_ranks)[case]
    check_equal(out["two"], out["one"])
    parts = [*steps_of(out["first part"])[:stop_after], *steps_of(out["second part"])[stop_after - num_steps :]]
    check_equal(parts, steps_of(out["one"]))


# -- the main job

SMALL = (
    "--mode sft --sft.batch-size 7 --sft.eval-every 0 --sft.num-steps 6 --evaluation.num-prompts 4 --checkpoint.sft-every 1 "
    "--model.hidden-size 16 --model.num-layers 1 --model.intermediate-size 16 --model.num-heads 2 --model.num-kv-heads 1 --num-threads 1"
).split()  # fmt: skip

RUN = """
import sys
from integration.train import main

sys.exit(main(sys.argv[1:]))
"""


def wait_for_step(directory: Path, count: int, children: list[Child]) -> None:
    """Wait until so many steps are logged and saved."""
    deadline = time.monotonic() + 3 * PATIENCE_S  # processes of the command import everything themselves
    while not (path := directory / "metrics.jsonl").exists() or len(steps_of(read_metrics(path))) < count:
        assert time.monotonic() < deadline, "the run does not get on"
        assert all(child.is_alive for child in children), [child.error for child in children]
        time.sleep(0.002)


@pytest.mark.slow
def test_a_run_on_two_processes_is_stopped_killed_and_resumed_with_another_number(tmp_path: Path):
    directory = tmp_path / "run"
    common = ["--output-dir", directory]
    fsdp = ["--backend.kind", "fsdp", "--backend.timeout-s", 60]
    first = start_ranks(RUN, 2, *common, *SMALL, *fsdp, "--sft.num-steps", 5000, folder=tmp_path / "first")
    wait_for_step(directory, 2, first)
    for child in first:  # as torchrun does with a signal that it gets
        os.kill(child.pid, signal.SIGTERM)
    assert [child.wait() for child in first] == [130, 0], [child.error for child in first]
    assert "To go on" in first[0].out
    assert (first[0].error, first[1].out, first[1].error) == ("", "", "")
    stopped = len(steps_of(read_metrics(directory / "metrics.jsonl")))

    second = start_ranks(RUN, 2, *common, "--resume", folder=tmp_path / "second")
    wait_for_step(directory, stopped + 2, second)
    os.kill(second[1].pid, signal.SIGKILL)
    assert [child.wait() for child in second] == [1, -signal.SIGKILL]
    assert "rank 1" in second[0].error
    assert "is gone" in second[0].error
    assert "Traceback" not in second[0].error
    (newest,) = list_checkpoints(directory / "sft" / "checkpoints")[-1:]
    num_steps = int(newest.name.removeprefix("step_")) + 2

    # one process, without torchrun
    assert main([str(x) for x in (*common, "--resume", "--quiet", "--sft.num-steps", num_steps)]) == 0
    lines = steps_of(read_metrics(directory / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))


def config_with(**backend) -> Config:
    return Config(backend=BackendSection(**backend))


def test_processes_are_counted_from_the_settings_and_from_torchrun():
    plain, two = config_with(), config_with(kind="fsdp", num_processes=2)
    under_torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert (count_processes(plain, {}), count_processes(config_with(kind="fsdp"), {}), count_processes(two, {})) == (1, 1, 2)
    assert needs_launch(two, {})
    assert not needs_launch(plain, {})
    assert not needs_launch(config_with(kind="fsdp"), {})  # one process needs no launcher
    assert not needs_launch(two, under_torchrun)
    assert not is_follower(under_torchrun)
    assert is_follower({"RANK": "1"})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but backend\.kind is 'pytorch'.*add --backend\.kind fsdp"):
        count_processes(plain, under_torchrun)
    with pytest.raises(ConfigError, match="num_processes is 2, but torchrun started 4"):
        count_processes(two, {"RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "fdsp"}, "did you mean 'fsdp'"),
        ({"num_processes": 2}, "add --backend.kind fsdp"),
        ({"fsdp": FSDPConfig(cpu_offload=True)}, "backend.fsdp.cpu_offload is True, expected nothing with .*: add --backend.kind fsdp"),
        ({"kind": "fsdp", "num_processes": 0}, "at least 1"),
        ({"kind": "fsdp", "timeout_s": 0.0}, "more than 0"),
    ],
)
def test_settings_of_processes_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_with(**settings)


def test_a_reward_model_is_not_silently_trained_in_one_process():
    with pytest.raises(ConfigError, match="trains a reward model in one process"):
        RewardModelConfig(backend=BackendSection(kind="fsdp"))


def test_several_processes_with_the_backend_of_one_are_refused_by_rank_0_alone(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main([]) == 2
    assert "add --backend.kind fsdp" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main([]) == 2
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_starts_nobody(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert main(["--dry-run", "--backend.kind", "fsdp", "--backend.num-processes", "8"]) == 0
    assert "nothing was run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(pid: int) -> list[int]:
    """Process ids, as the kernel tells them."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.slow
@needs.LINUX
@pytest.mark.timeout(600)
def test_the_command_starts_its_processes_and_all_end_when_one_is_killed(tmp_path: Path):
    directory = tmp_path / "run"
    fsdp = ["--backend.kind", "fsdp", "--backend.num-processes", 2]
    launcher = start("-m", "integration.train", "--output-dir", directory, *SMALL, *fsdp, "--sft.num-steps", 5000)
    wait_for_step(directory, 2, [])
    ranks = children_of(launcher.pid)
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    out, error = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 1, error
    assert "is gone" in error or "was ended by SIGKILL" in error, error  # told by the other rank, or by the launcher, whoever sees it first
    assert "rank 0" not in error  # which torchrun ends, too
    assert "Traceback" not in error
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)

    for number, whom in ((signal.SIGTERM, "all"), (signal.SIGTERM, "rank 1")):  # torchrun's handler of SIGINT is the same
        launcher = start("-m", "integration.train", "--output-dir", directory, "--resume")
        wait_for_step(directory, len(steps_of(read_metrics(directory / "metrics.jsonl"))) + 1, [])
        os.kill(launcher.pid if whom == "all" else max(children_of(launcher.pid)), number)
        out, error = launcher.communicate(timeout=PATIENCE_S)
        assert launcher.returncode == 130, error
        assert "To go on" in out
        assert ("rank 1 was told to end" in out) or whom == "all"
        first, *more = error.splitlines()
        assert first == "loading torch and transformers"
        assert not [line for line in more if "Traceback" in line or "is gone" in line], error  # torch and what it loads may warn


@pytest.mark.parametrize("is_told_itself", [False, True])
def test_a_signal_of_another_rank_stops_the_run_once_and_counts_as_no_signal_of_rank_0(is_told_itself: bool):
    stop, told, asked = StopRequest(), [], iter((None, "rank 1 was told to end"))
    stop.requested = is_told_itself

    async def watch() -> None:
        with trio.fail_after(PATIENCE_S):
            await watch_ranks(stop, lambda: next(asked), told.append, 0.01)

    trio.run(watch)
    assert stop.is_requested()
    assert (stop.requested, stop.abandonment.is_requested) == (is_told_itself, not is_told_itself)
    assert told == ([] if is_told_itself else ["rank 1 was told to end: stopping after this step, with a checkpoint"])


CHILD = """
import os, signal, time
from integration.run.launch import end_with_launcher, watch_launcher
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
environment = {"TORCHELASTIC_RUN_ID": "test"}
end_with_launcher(environment)
is_gone = watch_launcher(environment)
print("ready", is_gone(), flush=True)
while not is_gone():
    time.sleep(0.001)
time.sleep(0.2)  # the kernel's signals come one by one, as the threads end
print("gone", len(got), flush=True)
"""
PARENT = f"""
import subprocess, sys, threading, time
for _ in range(50):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


@needs.LINUX
def test_a_killed_launcher_with_many_threads_sends_no_signals_that_would_count_as_a_users():
    launcher = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready False\n"
    launcher.kill()
    assert launcher.communicate(timeout=PATIENCE_S)[0] == "gone 0\n"
    assert watch_launcher({}) is None


@pytest.mark.slow
@needs.LINUX
@pytest.mark.timeout(600)
def test_the_ranks_of_a_launcher_that_is_killed_end_with_a_checkpoint_of_their_last_step(tmp_path: Path):
    directory = tmp_path / "run"
    fsdp = ["--backend.kind", "fsdp", "--backend.num-processes", 2, "--checkpoint.sft-every", 1000]
    launcher = start("-m", "integration.train", "--output-dir", directory, *SMALL, *fsdp, "--sft.num-steps", 5000)
    wait_for_step(directory, 2, [])
    ranks = children_of(launcher.pid)
    launcher.kill()
    try:
        out, _ = launcher.communicate(timeout=PATIENCE_S)  # to the end of the ranks, which write there, too
    finally:
        for rank in ranks:
            if Path(f"/proc/{rank}").exists():
                os.kill(rank, signal.SIGKILL)
    assert len(ranks) == 2
    assert "To go on" in out
    (newest,) = list_checkpoints(directory / "sft" / "checkpoints")
    assert newest.name == f"step_{len(steps_of(read_metrics(directory / 'metrics.jsonl'))):04d}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_starts_the_same_command_on_two_machines(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ROLLOUTS_RANK_TOKEN", "a secret of the user for these two machines")
    directory, port = tmp_path / "run", find_free_port()
    rendezvous = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    job = ["--rdzv-endpoint", f"localhost:{port}", "-m", "integration.train", "--output-dir", directory, *SMALL, "--backend.kind", "fsdp"]
    machines = [start(*rendezvous, *job) for _ in range(2)]
    ends = [machine.communicate(timeout=3 * PATIENCE_S) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert sorted("after SFT" in out for out, _ in ends) == [False, True]
    assert len(steps_of(read_metrics(directory / "metrics.jsonl"))) == 6


def test_dropout_is_a_function_of_the_seed_and_no_two_ranks_draw_the_same():
    from integration.parts.sharded_models import create_policy, seed_dropout

    sizes = ModelSection(hidden_size=16, num_layers=1, intermediate_size=16, num_heads=2, num_kv_heads=1)
    config = Config(model=sizes, seed=7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        create_policy(config, None, *create_model(config), None, config.sft.optimizer, 1)
        assert torch.initial_seed() == 7
        drawn: list[float] = []
        for rank in (0, 1, 0):
            seed_dropout(config, rank)
            drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_loss_that_cannot_be_sent_is_refused_before_anything_runs(monkeypatch, tmp_path: Path, capsys):
    (tmp_path / "closed_loss.py").write_text(
        "from dataclasses import replace\nfrom rollouts.algorithms.presets import grpo\nfrom rollouts.types import Algorithm\n"
        "def closed() -> Algorithm:\n    return replace(grpo(), loss=lambda outputs, batch: grpo().loss(outputs, batch))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "0")
    for num_processes, status in (("2", 2), ("1", 0)):
        monkeypatch.setenv("WORLD_SIZE", num_processes)
        assert main(["--dry-run", "--backend.kind", "fsdp", "--rl.algorithm", "closed_loss:closed"]) == status
    assert "the loss of --rl.algorithm 'closed_loss:closed' cannot be sent to the other ranks" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--config", "/nowhere/config.json"], ["--backend.kind"]])
def test_what_is_wrong_on_another_machine_alone_is_told_once_there(monkeypatch, capsys, arguments):
    monkeypatch.setenv("RANK", "3")
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("rank 3: ") == (local_rank == "0")
        assert (arguments[-1] in told.err) == (local_rank == "0")


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ({1: -9}, "error: rank 1 was ended by SIGKILL: it was killed, or ran out of memory"),
        ({0: -9, 1: 1}, "error: rank 0 was ended by SIGKILL"),
        ({0: -15, 1: -9}, "error: rank 1 was ended by SIGKILL"),
        ({0: -15, 1: -15}, "error: rank 0 was ended by SIGTERM"),
        ({0: -15, 1: 1}, None),  # rank 1 says what went wrong
        ({0: 1, 1: -9}, None),
        ({1: 1}, None),
    ],
)
def test_a_rank_that_is_killed_before_rank_0_knows_of_it_is_named_by_the_launcher(statuses, told):
    found = describe_kill(statuses)
    assert found is None if told is None else found.startswith(told)


def test_settings_of_devices_that_several_processes_cannot_have_are_refused(monkeypatch):
    from integration.parts.sharded_models import check_rank_settings

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="each process takes its own GPU"):
        check_rank_settings(Config(backend=BackendSection(kind="fsdp"), model=ModelSection(device="cuda:1")))
