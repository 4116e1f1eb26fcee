"""rollouts verify: a run directory is checked, each kind of damage is named, and nothing in the directory changes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from integration.command import main
from integration.train import main as train
from integration.verify.lines import check_metrics, read_lines
from rollouts.sft_loop import run_sft_training
from rollouts.training.metrics import read_metrics

SMALL = (
    "--mode sft+rl --quiet --sft.num-steps 3 --sft.batch-size 4 --rl.num-steps 3 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 "
    "--checkpoint.sft-every 1 --checkpoint.rl-every 1 --trajectories.every 1 --evaluation.num-prompts 2 --model.hidden-size 32 "
    "--model.num-layers 1 --model.intermediate-size 32 --num-threads 1 --output-dir"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    threads = torch.get_num_threads()
    assert train([*SMALL.split(), str(path)]) == 0
    torch.set_num_threads(threads)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}
    capsys.readouterr()
    status = main(["verify", str(path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()} == before
    return status, told


def wrong(told: dict[str, Any], status: str = "fail") -> dict[str, str]:
    return {finding["check"]: finding["found"] for finding in told["findings"] if finding["status"] == status}


def test_a_run_as_it_ended_passes(run: Path, capsys: pytest.CaptureFixture[str]):
    status, told = verify(run, capsys)
    assert (status, wrong(told), wrong(told, "warn")) == (0, {}, {})
    assert told["resumes"] == {"stage": "rl", "step": 3}
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert "PASS  rl/step_0003" in out and "--resume goes on after step 3 of RL" in out


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_lines(path: Path, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a bit of the weights": (lambda run: flip(run / "rl/checkpoints/step_0003/model.safetensors"), "rl/step_0003", "not match its check"),
    "a bit of the optimizer": (
        lambda run: flip(run / "sft/checkpoints/step_0002/trainer_state.pt"),
        "sft/step_0002",
        "not match its check",
    ),
    "a truncated file": (
        lambda run: (run / "rl/checkpoints/step_0002/model.safetensors").write_bytes(b"half"),
        "rl/step_0002",
        "has 4 bytes, expected",
    ),
    "a missing file": (lambda run: (run / "rl/checkpoints/step_0003/tokenizer.json").unlink(), "rl/step_0003", "lacks the file tokenizer"),
    "no manifest": (lambda run: (run / "rl/checkpoints/step_0003/manifest.json").unlink(), "rl/step_0003", "not a complete checkpoint"),
    "an extra file": (lambda run: (run / "rl/checkpoints/step_0003/served.safetensors").write_text(""), "rl/step_0003", "does not list"),
    "another step": (lambda run: (run / "rl/checkpoints/step_0003").rename(run / "rl/checkpoints/step_0007"), "rl/step_0007", "of step 3"),
    "lost metrics": (lambda run: edit_lines(run / "metrics.jsonl", lambda lines: lines[:-2]), "rl/step_0003", "lines are lost"),
    "a line that is missing": (
        lambda run: edit_lines(run / "metrics.jsonl", lambda lines: [*lines[:2], *lines[3:]]),
        "metrics of sft",
        "step 2 is missing",
    ),
    "a line twice": (
        lambda run: edit_lines(run / "metrics.jsonl", lambda lines: [*lines, lines[-1]]),
        "metrics of rl",
        "step 3 stands there twice",
    ),
    "a line that is no JSON": (
        lambda run: edit_lines(run / "metrics.jsonl", lambda lines: [b"{" + lines[0], *lines[1:]]),
        "metrics",
        "jsonl:1 is not JSON",
    ),
    "a ledger without a step": (
        lambda run: edit_lines(run / "rl/ledger.jsonl", lambda lines: lines[:-1]),
        "ledger",
        "step 3 has metrics and no line in the ledger",
    ),
    "a prompt twice": (
        lambda run: edit_lines(run / "rl/ledger.jsonl", lambda lines: [*lines, b'{"step": 4, "prompts": [0]}\n']),
        "ledger",
        "prompt 0 was trained",
    ),
    "a ledger that is lost": (
        lambda run: (run / "rl/ledger.jsonl").unlink(),
        "ledger",
        "ledger.jsonl is missing",
    ),
    "a ledger that is none": (
        lambda run: (run / "rl/ledger.jsonl").write_text("[]\n"),
        "ledger",
        "ledger.jsonl:1 is not a line of a ledger",
    ),
    "a cut trajectory": (
        lambda run: (run / "rl/trajectories/step_0002.jsonl").write_text('{"prompt"'),
        "trajectories",
        "step_0002.jsonl:1 is not a sample",
    ),
    "settings that are none": (lambda run: (run / "config.json").write_text("{"), "settings", "config.json"),
    "no settings": (lambda run: (run / "config.json").unlink(), "settings", "is missing"),
    "facts that are none": (lambda run: (run / "run.json").write_text("mode"), "facts", "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, run: Path, capsys: pytest.CaptureFixture[str]):
    make, check, words = DAMAGE[kind]
    make(run)
    status, told = verify(run, capsys)
    assert status == 1
    assert words in wrong(told)[check]


def test_a_damaged_checkpoint_is_passed_over_and_without_an_intact_one_nothing_goes_on(run: Path, capsys: pytest.CaptureFixture[str]):
    flip(run / "rl/checkpoints/step_0003/model.safetensors")
    assert verify(run, capsys)[1]["resumes"] == {"stage": "rl", "step": 2}
    flip(run / "rl/checkpoints/step_0002/model.safetensors")
    refuses(run, capsys, "RL")


def test_a_stage_before_the_last_needs_an_intact_checkpoint_too(run: Path, capsys: pytest.CaptureFixture[str]):
    for path in (run / "sft/checkpoints").glob("step_*"):
        (path / "run_state.json").write_text("{}")
    refuses(run, capsys, "SFT")


def test_a_lost_ledger_is_told_by_a_resumed_run_and_hinders_none(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "rl/ledger.jsonl").unlink()
    threads = torch.get_num_threads()
    assert train(["--resume", "--quiet", "--rl.num-steps", "4", "--output-dir", str(run)]) == 0
    torch.set_num_threads(threads)
    told = capsys.readouterr().err
    assert f"{run / 'rl/ledger.jsonl'} has no line for 3 of the 3 finished steps: which prompts they had is lost" in told
    assert wrong(verify(run, capsys)[1]).keys() == {"ledger"}


DIES = """
import os, signal, sys
from integration.train import main
from rollouts.training.metrics import StageLogger

line, log = sys.argv[1], StageLogger.log

def log_and_die(self, metrics, step):
    log(self, metrics, step)
    if line == f"{self._stage} {step}":
        os.kill(os.getpid(), signal.SIGKILL)

StageLogger.log = log_and_die
sys.exit(main(sys.argv[2:]))
"""


def lines_of(run: Path, stage: str) -> list[dict[str, Any]]:
    """The lines of a stage, without what the clock has a part in."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["stage"] == stage]
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


def go_on(run: Path, line: str, folder: Path) -> None:
    """Resume a run for two more steps of RL, in a process that is killed behind a line of metrics; "" = it comes to its end."""
    status, _, error = forked.run(DIES, line, "--resume", "--quiet", "--rl.num-steps", 5, "--output-dir", run, folder=folder / "streams")
    assert status == (-signal.SIGKILL if line else 0), error


@pytest.fixture(scope="module")
def longer(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with two more steps of RL, to which nothing happened."""
    folder = tmp_path_factory.mktemp("longer")
    run = shutil.copytree(finished, folder / "run")
    go_on(run, "", folder)
    return run


@pytest.mark.parametrize(("before", "behind"), [([], []), (["rl 4"], ["sft 3", "rl 4"])], ids=["once", "with kills before and behind it"])
def test_what_is_trained_again_of_a_stage_before_the_last_has_its_metrics_once(
    before: list[str], behind: list[str], run: Path, longer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for line in before:
        go_on(run, line, tmp_path)
    flip(run / "sft/checkpoints/step_0003/model.safetensors")
    for line in (*behind, ""):
        go_on(run, line, tmp_path)
    assert "step_0003/model.safetensors does not match its checksum" in (run / "warnings.jsonl").read_text()
    for stage, steps in (("sft", 3), ("rl", 5)):
        found = lines_of(run, stage)
        assert [line["step"] for line in found][-steps:] == list(range(1, steps + 1))
        assert found == lines_of(longer, stage)
    name = "sft/checkpoints/step_0003/model.safetensors"
    assert (run / name).read_bytes() == (longer / name).read_bytes()
    status, told = verify(run, capsys)
    assert (status, wrong(told)) == (0, {})


@pytest.mark.parametrize("damage", ["no settings", "settings that are none"])
def test_a_run_without_its_settings_is_not_said_to_go_on(damage: str, run: Path, capsys: pytest.CaptureFixture[str]):
    DAMAGE[damage][0](run)
    told = wrong(verify(run, capsys)[1])["resume"]
    assert "--resume refuses to go on with this config.json; with that of the run it goes on after step 3 of RL" in told
    assert train(["--resume", "--quiet", "--output-dir", str(run)]) == 2


def refuses(run: Path, capsys: pytest.CaptureFixture[str], stage: str) -> None:
    """Check that verify says what --resume does: it refuses."""
    status, told = verify(run, capsys)
    assert (status, told["resumes"]) == (1, None)
    assert f"no checkpoint of {stage} is intact: --resume refuses to go on" in wrong(told)["resume"]
    assert train(["--resume", "--quiet", "--output-dir", str(run)]) == 1
    assert f"no checkpoint in {run / stage.lower() / 'checkpoints'} is intact" in capsys.readouterr().err


def test_what_a_kill_leaves_is_a_warning(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "rl/checkpoints/.tmp_step_0004_77").mkdir()
    (run / "rl/checkpoints/superseded_step_0009").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "sta')
    status, told = verify(run, capsys)
    assert (status, wrong(told)) == (0, {})
    assert "of which it has 16 bytes" in wrong(told, "warn")["metrics"]
    assert ".tmp_step_0004_77; of an abandoned future: rl/checkpoints/superseded_step_0009" in wrong(told, "warn")["leftovers"]


KILLED = """
import os, sys
from integration.train import main

def kill(event, arguments):
    if event == "os.rename" and ".tmp_deleted_step_0002" in str(arguments[1]):
        os._exit(9)

sys.addaudithook(kill)
main(sys.argv[1:])
"""


def test_a_run_that_is_killed_before_it_deletes_an_old_checkpoint_deletes_it_before_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run, threads = tmp_path / "run", torch.get_num_threads()
    argv = [*SMALL.replace("sft+rl", "sft").replace("--sft.num-steps 3", "--sft.num-steps 5").split(), str(run)]
    ended = subprocess.run([sys.executable, "-c", KILLED, *argv, "--checkpoint.keep-last-n", "2"], check=False, capture_output=True)
    assert ended.returncode == 9, ended.stderr

    def names() -> list[str]:
        return sorted(path.name for path in (run / "sft/checkpoints").iterdir())

    assert names() == ["step_0002", "step_0003", "step_0004"]
    status, told = verify(run, capsys)
    assert (status, told["resumes"]) == (0, {"stage": "sft", "step": 4})
    assert "a kill left step_0002 beside step 4 of SFT, whose save was to delete it" in wrong(told, "warn")["checkpoints"]

    seen: list[list[str]] = []

    async def look(*arguments: Any, **options: Any) -> Any:
        seen.append(names())
        return await run_sft_training(*arguments, **options)

    monkeypatch.setattr("integration.run.stages.run_sft_training", look)
    assert train(["--resume", "--quiet", "--output-dir", str(run)]) == 0
    torch.set_num_threads(threads)
    assert seen == [["step_0003", "step_0004"]]
    assert names() == ["step_0004", "step_0005"]
    assert "checkpoints" not in wrong(verify(run, capsys)[1], "warn")


def test_more_checkpoints_than_a_run_keeps_are_a_warning(run: Path, capsys: pytest.CaptureFixture[str]):
    edited = json.loads((run / "config.json").read_text())
    edited["checkpoint"]["keep_last_n"] = 1
    (run / "config.json").write_text(json.dumps(edited))
    assert "2 checkpoints of RL, although the run keeps 1" in wrong(verify(run, capsys)[1], "warn")["checkpoints"]
    edited["checkpoint"]["best"] = "eval_loss"
    (run / "config.json").write_text(json.dumps(edited))
    assert "checkpoints" not in wrong(verify(run, capsys)[1], "warn")


def test_what_is_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for argv, words in (
        ([str(tmp_path / "none")], "is not a directory"), ([str(tmp_path)], "is not the directory of a run"), ([], "found 0 directories"),
        ([str(tmp_path), "--fast"], "unknown option --fast"),
    ):  # fmt: skip
        assert main(["verify", *argv]) == 2
        assert words in capsys.readouterr().err


def test_help_takes_less_than_a_second():
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", "integration.verify", "--help"], check=True, capture_output=True)
    modules = "import sys; from integration.verify.__main__ import main\ntry: main(['--help'])\n"
    modules += "except SystemExit: assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", modules], check=True, capture_output=True)
    assert time.monotonic() - started < 20, "two starts of Python on a busy machine"


@pytest.mark.parametrize(("stage", "section"), [("dpo", "preference"), ("reward_model", "training"), ("sft", "sft")])
def test_lines_are_expected_as_often_as_a_stage_logs(stage: str, section: str, tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"stage": stage, "step": step}) + "\n" for step in (0, 10, 20, 25)))
    assert [finding.status for finding in check_metrics(read_lines(path), {section: {"log_every": 10}})] == ["pass"]
