"""A run that a bad number ends leaves its step in a crash bundle, and the step is the same number again on one process."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import run
from safetensors.torch import load_file, save_file

from integration.crash import bundle as bundles
from integration.crash import parts, watch
from integration.crash import replay as replays
from integration.crash.bundle import describe_function, find_places, read_bundle
from integration.crash.recorder import UpdateRecorder, count_bytes
from integration.crash.replay import Compared, compare_columns
from integration.run import job
from integration.train import main
from integration.train_reward_model import main as train_reward_model
from integration.verify.check_run import check_run
from rollouts.algorithms.losses import policy_loss, sft_loss
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.errors import BadNumberError, ConfigError
from rollouts.training import rollout_batch
from rollouts.training.saving.checkpoints import list_checkpoints
from rollouts.types import KeptSets, RewardComponents, TrainBatch, TurnLevels, Turns

RUN = """
import sys
from integration.command import main
sys.exit(main(sys.argv[1:]))
"""
KILLED = """
import os, signal, sys
from integration.crash import bundle
from integration.command import main

write = bundle.save_file

def write_and_die(tensors, path):
    write(tensors, path)
    os.kill(os.getpid(), signal.SIGKILL)

bundle.save_file = write_and_die
main(sys.argv[1:])
"""
MODEL = "--model.hidden-size 16 --model.num-layers 1 --model.intermediate-size 24 --num-threads 1 --quiet".split()
SMALL = [*MODEL, "--model.num-heads", "2", "--model.num-kv-heads", "1", "--evaluation.num-prompts", "2"]
STEPS = "--mode rl --rl.num-steps 3 --rl.prompts-per-step 3 --rl.samples-per-prompt 2 --rl.num-minibatches 1".split()
RL = [*SMALL, *STEPS, "--generation.max-tokens", "6"]
SFT = [*SMALL, *"--mode sft --sft.num-steps 6 --sft.batch-size 6 --checkpoint.sft-every 2 --sft.max-tokens-per-microbatch 90".split()]
HUGE = "1e39"  # a learning rate whose first update is infinite
OWN = """
from dataclasses import replace
from functools import partial
from rollouts.algorithms.presets import grpo, recomputed
from rollouts.types import LossOutput

def count(sample):
    return float(sum(sample.tokens) % 5)

def spoil(outputs, batch, *, inner):
    value, metrics = inner(outputs, batch)
    return LossOutput(value * float("inf"), metrics)

def spoiled():
    return replace(recomputed(grpo()), loss=partial(spoil, inner=grpo().loss))
"""


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    """Options of a reward that differs between answers, and of an algorithm whose loss is infinite."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return ["--reward.function", f"{file}:count", "--rl.algorithm", f"{file}:spoiled", "--on-bad.loss", "stop"]


def crash(capsys: pytest.CaptureFixture[str], place: Path, *argv: str, train=main) -> tuple[Path, str]:
    """Run a command that a bad number ends; return its bundle and its message."""
    assert train([*argv, "--output-dir", str(place)]) == 1
    error = capsys.readouterr().err
    found = re.search(r"crash bundle (\S+) \(\d+\.\d MB\); to execute it again on one process:\n    python -m \S+ --replay (\S+)", error)
    assert found is not None, error
    assert found[1] == found[2]
    return Path(found[1]), error


def replay(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str]:
    """Replay a bundle: exit status, and what it printed."""
    capsys.readouterr()
    status = main(["--replay", str(path)])
    return status, "".join(capsys.readouterr())


def test_an_update_that_was_refused_is_the_same_number_again(capsys, tmp_path: Path, own: list[str]):
    path, error = crash(capsys, tmp_path / "run", *RL, *own)
    assert path == tmp_path / "run" / "rl" / "crash" / "step_0001"
    assert "the loss is not finite, and the policy for loss is to stop" in error
    bundle = read_bundle(path)
    assert (bundle.stage, bundle.step, bundle.role, bundle.kind, bundle.weights) == ("rl", 1, "policy", "loss", "saved")
    assert len(bundle.updates) == 1 and bundle.updates[0].own_columns == ("old_log_probs",)
    assert "a bad number ended rl/crash/step_0001 (step 1, policy, loss)" in check_run(tmp_path / "run").describe()
    alone = tmp_path / "sent" / "step_0001"
    shutil.move(path, alone)
    shutil.rmtree(tmp_path / "run")  # nothing else of the run is needed
    status, told = replay(capsys, alone)
    assert (status, "reproduced, equal to the bit" in told) == (0, True), told
    assert "not finite: micro-batch 1: loss" in told and "it begins in the loss, from the batch's columns" in told
    assert "not finite: gradient of" in told
    assert {line.split()[-1] for line in told.splitlines() if line.startswith(("micro-batch", "grad_norm"))} == {"equal"}


def test_an_asynchronous_run_leaves_one_too(capsys, tmp_path: Path, own: list[str]):
    path, _ = crash(capsys, tmp_path / "run", *RL, *own, "--rl.asynchronous.enabled", "--rl.num-minibatches", "2")
    assert read_bundle(path).stage == "rl"
    status, told = replay(capsys, path)
    assert status == 0, told


def test_an_update_that_made_a_weight_infinite_begins_from_the_start_of_the_stage(capsys, tmp_path: Path):
    path, error = crash(capsys, tmp_path / "run", *SFT, "--sft.optimizer.lr", HUGE)
    assert "made the parameter" in error
    assert (read_bundle(path).weights, read_bundle(path).kind) == ("start", "parameter")
    status, told = replay(capsys, path)
    assert (status, "reproduced, equal to the bit" in told) == (0, True), told
    assert "not finite: after the update, parameter model.embed_tokens.weight" in told


@pytest.mark.parametrize("kind", ["torch_func", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_functional_backends_leave_one_too(capsys, tmp_path: Path, kind: str):
    stop = ["--sft.num-steps", "14"] if kind == "jax" else ["--on-bad.loss", "stop", "--on-bad.gradient", "stop"]
    path, _ = crash(capsys, tmp_path / "run", *SFT, "--sft.optimizer.lr", "1e35", "--backend.kind", kind, *stop)
    status, told = replay(capsys, path)
    assert (status, "reproduced, equal to the bit" in told) == (0, True), told


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, *, is_refused: bool = False) -> None:
    """Let the update of this number end as one that made a weight infinite, or as one that was refused, which changes nothing."""
    update = PyTorchTrainingBackend.optim_step

    def failing(self):
        if is_refused and self.counts.num_updates == number - 1:
            raise BadNumberError(f"update {number}: a number is bad", "gradient", {"grad_norm": 1.0})
        done = update(self)
        if self.counts.num_updates == number:
            raise BadNumberError(f"update {number} made a parameter infinite", "parameter", {"grad_norm": done.value["grad_norm"]})
        return done

    monkeypatch.setattr(PyTorchTrainingBackend, "optim_step", failing)


LORA = ["--lora.rank", "2", "--lora.dropout", "0.3"]


@pytest.mark.parametrize("extra", [[], LORA], ids=["whole", "lora with dropout"])
def test_updates_since_the_last_checkpoint_are_executed_again_before_one_that_lost_the_weights(
    capsys, tmp_path: Path, monkeypatch, extra: list[str]
):
    fail_at(monkeypatch, 4)
    path, _ = crash(capsys, tmp_path / "run", *SFT, *extra)
    bundle = read_bundle(path)
    assert (path.name, bundle.weights, len(bundle.updates)) == ("step_0004", "saved", 2)
    assert (path / "weights" / "model.safetensors").stat().st_nlink > 1  # a link takes no room
    shutil.rmtree(tmp_path / "run" / "sft" / "checkpoints")
    status, told = replay(capsys, path)
    assert (status, "reproduced, equal to the bit" in told) == (0, True), told
    assert "update 1 of 2, micro-batch 1: loss" in told and "update 2 of 2, grad_norm" in told


def test_a_replay_that_forgets_the_random_state_is_another_number(capsys, tmp_path: Path, monkeypatch):
    fail_at(monkeypatch, 2, is_refused=True)
    path, _ = crash(capsys, tmp_path / "run", *SFT, *LORA)
    assert replay(capsys, path)[0] == 0
    monkeypatch.setattr(replays, "restore_random_state", lambda state, device: None)
    status, told = replay(capsys, path)
    assert (status, "NOT reproduced: numbers differ by up to" in told) == (replays.EXIT_DIFFERS, True), told


def test_a_batch_that_was_refused_before_its_update_is_refused_again(capsys, tmp_path: Path, own: list[str], monkeypatch):
    stop = ["--on-bad.all-masked", "stop", "--rl.mask-truncated"]
    path, error = crash(capsys, tmp_path / "run", *RL, *own[:2], "--generation.max-tokens", "1", *stop)
    assert "no token with loss_mask > 0" in error
    bundle = read_bundle(path)
    assert bundle.rows is not None and bundle.rows.num_rows == 6 and bundle.updates == ()
    status, told = replay(capsys, path)
    assert status == 0, told
    assert "recorded: the rollout batch has no token" in told and "replayed: the rollout batch has no token" in told
    assert told.splitlines()[-1] == "reproduced: the batch is refused for the same reason; no number was recorded to compare"
    trained = read_bundle(path).rows
    monkeypatch.setattr(
        replays, "read_bundle", lambda path: replace(bundle, rows=replace(trained, loss_mask=torch.ones_like(trained.loss_mask)))
    )
    status, told = replay(capsys, path)
    assert (status, "replayed: the batch is accepted" in told) == (replays.EXIT_DIFFERS, True), told


def test_steps_left_out_for_their_log_probs_are_kept_with_these(capsys, tmp_path: Path, own: list[str], monkeypatch):
    fill = rollout_batch.fill_columns

    async def spoil(batch, *args, **kwargs):
        batch = await fill(batch, *args, **kwargs)
        return replace(batch, ref_log_probs=torch.where(torch.arange(batch.num_rows)[:, None] == 4, -torch.inf, 0.0 * batch.loss_mask))

    monkeypatch.setattr(rollout_batch, "fill_columns", spoil)
    skip = "--on-bad.log-prob skip --on-bad.max-skipped 2 --rl.num-minibatches 2 --rl.algorithm recomputed(grpo())".split()
    path, error = crash(capsys, tmp_path / "run", *RL, *own[:2], *skip)
    assert "the updates of 2 steps in a row were left out for bad rows (num_bad_log_prob" in error
    status, told = replay(capsys, path)
    assert (status, told.splitlines()[-1]) == (0, "reproduced, equal to the bit"), told
    assert "replayed: the update of the batch is left out: 1 of 6 rows have a bad log_prob" in told and "rows 4 of 6" in told


def test_numbers_that_are_missing_or_not_finite_are_told_as_different():
    nan, inf = float("nan"), float("inf")
    found = [Compared("x", *pair).difference for pair in ((nan, nan), (nan, None), (1.0, nan), (inf, inf), (inf, 1.0), (2.0, 1.0))]
    assert found == [0.0, inf, inf, 0.0, inf, 0.5]


def test_columns_are_compared_by_the_token_that_differs_most():
    one, on = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, float("nan"), 0.0]]), torch.tensor([[True, True, True], [True, True, False]])
    other = one + torch.tensor([[0.0, 0.25, 0.25], [0.5, 0.0, 9.0]])
    (found,) = compare_columns(one, other, on)
    assert found.name.startswith("log-prob of the policy at row 0, token 1: of 5 ")
    assert (found.recorded, found.replayed, found.difference) == (-2.0, -1.75, 0.125)
    assert compare_columns(one, one, on)[0].is_equal
    assert compare_columns(one, other, on & False) == []


def test_a_critic_has_a_bundle_of_its_own(capsys, tmp_path: Path, own: list[str]):
    path, _ = crash(capsys, tmp_path / "run", *RL, *own[:2], "--rl.algorithm", "ppo", "--critic.optimizer.lr", HUGE)
    assert read_bundle(path).role == "critic"
    status, told = replay(capsys, path)
    assert (status, "value_loss" in read_bundle(path).updates[-1].loss) == (0, True), told


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_training_on_preferences_leaves_one(capsys, tmp_path: Path, loss: str):
    dpo = f"--mode dpo --preference.num-steps 2 --preference.batch-size 4 --preference.num-pairs 8 --preference.loss {loss}".split()
    path, _ = crash(capsys, tmp_path / "run", *SMALL, *dpo, "--preference.optimizer.lr", HUGE)
    assert (read_bundle(path).stage, path.parent) == ("dpo", tmp_path / "run" / "dpo" / "crash")
    status, told = replay(capsys, path)
    assert status == 0, told


def test_a_reward_model_leaves_one(capsys, tmp_path: Path):
    argv = [*MODEL, *"--training.num-steps 2 --training.batch-size 4 --data.num-pairs 8 --data.num-heldout 4".split()]
    path, _ = crash(capsys, tmp_path / "run", *argv, "--training.optimizer.lr", HUGE, train=train_reward_model)
    assert (read_bundle(path).stage, path.parent) == ("reward_model", tmp_path / "run" / "crash")
    status, told = replay(capsys, path)
    assert status == 0, told


def test_the_tenth_update_that_is_left_out_in_a_row_is_replayed_as_it_was(capsys, tmp_path: Path, own: list[str]):
    path, error = crash(capsys, tmp_path / "run", *RL, *own[:4], "--on-bad.max-skipped", "2")
    assert "in 2 updates in a row" in error
    status, told = replay(capsys, path)
    assert status == 0, told


def test_a_real_process_leaves_a_bundle_without_secrets_that_another_replays(tmp_path: Path, own: list[str], monkeypatch):
    secrets = {"HF_TOKEN": "hf_canaryOfTheHub0123456789abcdefg", "NCCL_DEBUG": "https://me:canary-in-userinfo@host/?key=canary-in-query"}
    code = RUN.replace("import sys", f"import os, sys\nos.environ.update({secrets})", 1)
    status, _, error = run(code, "train", *RL, *own, "--output-dir", tmp_path / "run", folder=tmp_path / "1")
    assert status == 1, error
    (path,) = list_checkpoints(tmp_path / "run" / "rl" / "crash")
    content = b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert b"canary" not in content and b"https://***@host/?***" in content
    status, out, error = run(RUN, "train", "--replay", path, folder=tmp_path / "2")
    assert (status, "reproduced, equal to the bit" in out) == (0, True), out + error


@pytest.mark.slow
def test_a_step_of_two_processes_is_replayed_on_one(capsys, tmp_path: Path):
    spike = "--sft.num-steps 30 --on-bad.gradient-spike stop --on-bad.spike-factor 1.0001".split()
    ranks = ["--backend.kind", "fsdp", "--backend.num-processes", "2"]
    status, _, error = run(RUN, "train", *SFT, *spike, *ranks, "--output-dir", tmp_path / "run", folder=tmp_path / "1")
    assert (status, "the norm of the gradient is" in error) == (1, True), error
    (path,) = list_checkpoints(tmp_path / "run" / "sft" / "crash")
    bundle = read_bundle(path)
    assert (bundle.num_processes, bundle.weights, bundle.updates[0].calls[0].batch.num_rows) == (2, "saved", 6)
    status, told = replay(capsys, path)
    assert (status, "reproduced" in told, "the step was computed by 2 processes" in told) == (0, True, True), told


def test_a_kill_while_it_is_written_leaves_no_bundle(capsys, tmp_path: Path, own: list[str]):
    status, _, error = run(KILLED, "train", *RL, *own, "--output-dir", tmp_path / "run", folder=tmp_path / "1")
    assert status == -signal.SIGKILL, error
    crashes = tmp_path / "run" / "rl" / "crash"
    assert list_checkpoints(crashes) == []
    (half,) = crashes.iterdir()
    assert main(["--replay", str(half)]) == 1
    assert "is not a complete checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_full_disk_does_not_hide_the_error(capsys, tmp_path: Path, own: list[str], monkeypatch, only_weights: bool):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if only_weights:
        monkeypatch.setattr(PyTorchTrainingBackend, "save_checkpoint", refuse)
        path, _ = crash(capsys, tmp_path / "run", *RL, *own)
        assert read_bundle(path).weights == "start"
        assert replay(capsys, path)[0] == 0
        return
    monkeypatch.setattr(bundles, "save_file", refuse)
    assert main([*RL, *own, "--output-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.index("the loss is not finite") < error.index("a crash bundle could not be written: CheckpointError: the disk is full")
    assert list((tmp_path / "run" / "rl" / "crash").iterdir()) == []


def edit(path: Path, **changes: object) -> None:
    """Change values of run_state.json, and the checksum with it."""
    file, manifest = path / "run_state.json", path / "manifest.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(raw))
    listed = json.loads(manifest.read_text())
    listed["files"]["run_state.json"] = {"size": file.stat().st_size, "crc32": bundles_checksum(file)}
    manifest.write_text(json.dumps(listed))


def bundles_checksum(file: Path) -> int:
    import zlib

    return zlib.crc32(file.read_bytes())


def test_bundles_that_cannot_be_replayed_are_refused_with_the_reason(capsys, tmp_path: Path, monkeypatch):
    fail_at(monkeypatch, 3)
    path, _ = crash(capsys, tmp_path / "run", *SFT)

    def refused(**changes: object) -> str:
        copy = tmp_path / "copy" / path.name
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(path, copy)
        if changes:
            edit(copy, **changes)
        status, told = replay(capsys, copy)
        assert status in (1, 2), told
        return told

    assert "is a crash bundle of schema 2, but this version of rollouts reads schema 1" in refused(schema=2)
    assert "the update overwrote the weights" in refused(weights="lost")
    assert "no directory. Restore it from a copy" in refused(weights="named", weights_from="/nowhere/step_0002")
    mine = [one | {"loss": "mine"} for one in json.loads((path / "run_state.json").read_text())["updates"]]
    assert "the loss of the step was mine, but the settings" in refused(updates=mine)
    for changes in ({"updates": [{"calls": 3, "metrics": None}]}, {"places": 7, "updates": None}, {"rows": {"dropout": True}}):
        assert "is no crash bundle that can be read" in refused(**changes), changes
    checkpoint = list_checkpoints(tmp_path / "run" / "sft" / "checkpoints")[-1]
    assert "is a checkpoint, not a crash bundle" in replay(capsys, checkpoint)[1]
    assert "is not a directory" in replay(capsys, tmp_path / "none")[1]
    with (path / "batches.safetensors").open("r+b") as file:
        file.truncate(100)
    assert "has 100 bytes, expected" in replay(capsys, path)[1]
    for argv, rest in (
        (["--replay", str(path), "--seed", "1"], "--seed 1"),
        (["--quiet", f"--replay={path}"], "--quiet"),
        ([f"--replay={path}", "--dry-run"], "--dry-run"),
        (["--replay", str(path), "--replay", str(path)], f"--replay {path}"),
    ):
        assert main(argv) == 2
        assert f"leave the other options out: {rest}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "free", "weights"),
    [
        ([], 100, "saved"),
        (["--crash-bundles", "full"], 100, "saved"),
        (["--crash-bundles", "linked"], 1 << 40, "saved"),
        ([], 100, "named"),
    ],
    ids=["no room", "full", "linked", "no links"],
)
def test_weights_are_written_if_they_are_wanted_and_have_room(capsys, tmp_path: Path, monkeypatch, argv, free: int, weights: str):
    fail_at(monkeypatch, 4, is_refused=True)
    monkeypatch.setattr(watch, "count_free_bytes", lambda directory: free)
    if weights == "named":
        monkeypatch.setattr(watch.os, "link", refuse_link)
    path, _ = crash(capsys, tmp_path / "run", *SFT, *argv)
    is_full, bundle = "full" in argv, read_bundle(path)
    assert (bundle.weights, len(bundle.updates)) == (weights, 1 if is_full else 2)
    assert weights == "named" or ((path / "weights" / "model.safetensors").stat().st_nlink > 1) is not is_full
    assert replay(capsys, path)[0] == 0


def refuse_link(source: object, target: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_no_bundle_is_written_if_none_is_wanted(capsys, tmp_path: Path, own: list[str]):
    assert main([*RL, *own, "--crash-bundles", "none", "--output-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "the loss is not finite" in error and "crash bundle" not in error
    assert not (tmp_path / "run" / "rl" / "crash").exists()


def test_the_last_checkpoint_is_not_read_for_a_bundle_with_weights_of_its_own(capsys, tmp_path: Path, monkeypatch):
    fail_at(monkeypatch, 4, is_refused=True)
    monkeypatch.setattr(watch, "verify_checkpoint", lambda path: pytest.fail("the checkpoint was read"))
    path, _ = crash(capsys, tmp_path / "run", *SFT)
    assert (read_bundle(path).weights, len(read_bundle(path).updates)) == ("saved", 1)


def test_a_refused_batch_is_replayed_after_the_updates_before_it(capsys, tmp_path: Path, own: list[str], monkeypatch):
    own_fill, filled = rollout_batch.fill_columns, []

    async def fill(batch, *args, **kwargs):
        filled.append(batch)
        batch = await own_fill(batch, *args, **kwargs)
        return replace(batch, ref_log_probs=torch.full_like(batch.loss_mask, -torch.inf)) if len(filled) == 3 else batch

    monkeypatch.setattr(rollout_batch, "fill_columns", fill)
    stop = "--rl.num-minibatches 2 --rl.algorithm recomputed(grpo()) --crash-bundles linked --on-bad.log-prob stop".split()
    path, _ = crash(capsys, tmp_path / "run", *RL, *own[:2], *stop, "--checkpoint.rl-every", "9")
    bundle = read_bundle(path)
    assert (bundle.step, bundle.weights, len(bundle.updates), bundle.rows is None) == (3, "start", 4, False)
    status, told = replay(capsys, path)
    assert ("update 4 of 4, grad_norm" in told, "log-prob of the policy at row" in told) == (True, True), told
    assert (status, told.splitlines()[-1]) == (0, "reproduced, equal to the bit"), told


def test_a_loss_that_was_corrected_for_its_batch_is_made_again(capsys, tmp_path: Path, own: list[str]):
    correct = "--engine.parity-rows 2 --engine.parity-threshold 1e-12 --engine.parity-action correct --rl.num-minibatches 2".split()
    path, _ = crash(capsys, tmp_path / "run", *RL, *own, *correct)
    assert "cap=2.0" in read_bundle(path).updates[-1].loss, read_bundle(path).updates[-1].loss
    status, told = replay(capsys, path)
    assert status == 0, told


def test_a_signal_while_a_bundle_is_written_waits_for_it(capsys, tmp_path: Path, own: list[str], monkeypatch):
    watched: list[object] = []
    real = job.watch_saves
    monkeypatch.setattr(job, "watch_saves", lambda directories: watched.append(real(directories)) or watched[0])
    write, saving, logged = bundles.save_file, [], []
    monkeypatch.setattr(
        bundles, "save_file", lambda *args: (saving.append(watched[0]()), logged.append(capsys.readouterr().err), write(*args))
    )
    crash(capsys, tmp_path / "run", *RL, *own)
    assert saving == [True]
    assert f"writing a crash bundle to {tmp_path / 'run' / 'rl' / 'crash' / 'step_0001'}" in logged[0]
    assert "the loss is not finite" in logged[0]


def test_the_command_quotes_the_path_and_a_missing_device_is_told(capsys, tmp_path: Path, own: list[str], monkeypatch):
    assert main([*RL, *own, "--output-dir", str(tmp_path / "my run")]) == 1
    path = tmp_path / "my run" / "rl" / "crash" / "step_0001"
    assert f"--replay '{path}'" in capsys.readouterr().err
    assert any(f"--replay '{path}'" in (found.advice or "") for found in check_run(tmp_path / "my run").findings)

    def refuse(device: str) -> None:
        raise ConfigError("there is no such device")

    monkeypatch.setattr(parts, "parse_device", refuse)
    assert "is replayed on the CPU" in replay(capsys, path)[1]


def test_only_the_last_bundles_are_kept(tmp_path: Path):
    for number in (9, 4, 7, 5):
        (tmp_path / f"step_{number:04d}").mkdir()
        os.utime(tmp_path / f"step_{number:04d}", ns=(0, 10 * (10 - number if number != 9 else 0)))
    watch.remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0004", "step_0005", "step_0007"]


def make_batch(**columns: object) -> TrainBatch:
    rows, width = 2, 3
    return TrainBatch(
        tokens=torch.arange(6).reshape(rows, width),
        lengths=torch.tensor([3, 2]),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),
        rewards=torch.tensor([1.0, float("nan")]),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        trainable=torch.ones(rows, dtype=torch.bool),
        **columns,
    )


def test_every_part_of_a_batch_comes_back_from_its_files(tmp_path: Path):
    k = torch.zeros(2, 1)
    levels = TurnLevels(**{f.name: torch.zeros(2) if f.name == "episode" else k for f in __import__("dataclasses").fields(TurnLevels)})
    turns = Turns(ids=torch.zeros(2, 3, dtype=torch.int64), states=k.long(), rewards=k, levels=levels)
    batch = make_batch(turns=turns, reward_components=RewardComponents(names=("a",), scores=k), advantages=torch.full((2, 3), -1e-40))
    tensors: dict[str, torch.Tensor] = {}
    plain = bundles._flatten(batch, tensors, "0.")
    save_file({name: x.clone() for name, x in tensors.items()}, tmp_path / "t")
    found = bundles._build(TrainBatch, json.loads(json.dumps(plain)), load_file(tmp_path / "t"), "0.")
    assert found.turns.levels is not None and found.reward_components.names == ("a",)
    again: dict[str, torch.Tensor] = {}
    assert bundles._flatten(found, again, "0.") == plain and again.keys() == tensors.keys()
    assert all(torch.equal(again[name].nan_to_num(7), x.nan_to_num(7)) and again[name].dtype == x.dtype for name, x in tensors.items())
    assert find_places(batch) == [{"column": "rewards", "row": 1}]
    spoiled = replace(batch, advantages=torch.full((2, 3), float("inf")))
    assert [(p["row"], p["token"]) for p in find_places(spoiled) if p["column"] == "advantages"] == [(0, 1), (0, 2), (1, 1)]


def test_functions_are_described_alike_in_every_process():
    assert describe_function(sft_loss) == "rollouts.algorithms.losses.sft_loss"
    found = describe_function(partial(policy_loss, surrogate=partial(sft_loss, low=0.2)))
    assert found == "rollouts.algorithms.losses.policy_loss(surrogate=rollouts.algorithms.losses.sft_loss(low=0.2))"
    assert " at 0x" not in describe_function(partial(sft_loss, x=object()))


def test_the_bytes_of_a_batch_are_those_of_its_nested_columns_too():
    sets = KeptSets(ids=torch.zeros(1000, dtype=torch.int32), starts=torch.zeros(2, 3, dtype=torch.int64), counts=torch.ones(2, 3).long())
    assert count_bytes(make_batch(kept=sets)) - count_bytes(make_batch()) == 4000 + 2 * 48


class Counting:
    """A backend of which only the calls matter."""

    def forward_backward(self, batch, loss_fn, *, with_entropy=False):
        return object()

    def optim_step(self):
        return object()

    def load_checkpoint(self, directory):
        return object()


def test_the_memory_of_a_recorder_has_a_bound(monkeypatch):
    backend = Counting()
    recorder = UpdateRecorder(backend)

    def update(count: int) -> None:
        for _ in range(count):
            backend.forward_backward(make_batch(), sft_loss)
            backend.optim_step()

    update(256)
    assert (len(recorder.updates), recorder.is_complete) == (256, True)
    update(1)
    assert (len(recorder.updates), recorder.is_complete) == (0, False)
    backend.load_checkpoint(Path("step_0004"))
    update(3)
    assert (len(recorder.updates), recorder.is_complete, recorder.base) == (3, True, Path("step_0004"))
    monkeypatch.setattr("integration.crash.recorder.HISTORY_BYTES", 1000)
    update(9)
    assert (len(recorder.updates), recorder.is_complete) == (0, False)
