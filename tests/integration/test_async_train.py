"""The main job with asynchronous rollouts, from the outside: killed and resumed, stopped by its rewards, and its settings."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Child, run
from resident_prompts import find_prompts

from integration.run.step_files import Ledger, read_ledger
from integration.settings.config import Config
from integration.settings.sections.stages import RLSection
from integration.train import main
from rollouts.asynchronous import recompute
from rollouts.asynchronous.config import AsyncConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError, DataError
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import read_run_state
from rollouts.types import RolloutBatch, Sample

NUM_PROMPTS = 24  # an epoch
ASYNCHRONOUS = ["--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness", "2"]


def small_run(directory: Path, *, num_steps: int) -> list[str]:
    """Arguments of a run on NUM_PROMPTS problems of the user's, with a tiny model; four prompts a step."""
    create_tiny_model(seed=1).save_pretrained(directory / "model")
    create_char_tokenizer().save_pretrained(directory / "model")
    rows = [{"question": f"what is {i} + 1?", "answer": f"it is\n#### {i + 1}"} for i in range(NUM_PROMPTS + 2)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text("def length(sample):\n    return float(len(sample.tokens) % 3)\n")
    settings = (
        f"--mode rl --task gsm8k --rl.num-steps {num_steps} --rl.prompts-per-step 4 --rl.samples-per-prompt 2 --rl.num-minibatches 1 "
        "--generation.max-tokens 24 --evaluation.num-prompts 2 --rl.eval-every 3 --checkpoint.rl-every 1 --num-threads 1 "
        "--trajectories.every 0 --quiet"
    ).split()  # fmt: skip
    paths = ["--model.path", directory / "model", "--data.path", directory / "data.jsonl"]
    return [*settings, *map(str, paths), "--reward.function", f"{directory / 'reward.py'}:length", *ASYNCHRONOUS]


RUN = """
import sys
from integration.train import main

sys.exit(main(sys.argv[1:]))
"""


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_with_kills(directory: Path, *, num_steps: int, num_kills: int, seed: int, more: Sequence[str] = ()) -> Path:
    """Start a run, kill -9 it that often at random moments, and resume it until it ends. Returns its directory."""
    output, chance = directory / "run", random.Random(seed)
    ledger = output / "rl" / "ledger.jsonl"
    arguments = [*small_run(directory, num_steps=num_steps), "--output-dir", output, *more]
    for number in range(num_kills):
        with Child(RUN, *arguments, folder=directory / f"process-{number}") as process:
            lines = count_lines(ledger) + 1 + chance.randrange(2)  # that the run writes before it is killed
            deadline, moment = time.monotonic() + 300, chance.uniform(0, 0.08)
            while process.is_alive and (not ledger.exists() or count_lines(ledger) < min(lines, num_steps)):
                assert time.monotonic() < deadline, "the run does not get on"
                time.sleep(0.001)
            time.sleep(moment)
            assert process.is_alive, f"the run ended by itself: {process.error}"
        arguments = ["--output-dir", output, "--resume", "--quiet"]
    status, _, error = run(RUN, *arguments, folder=directory / "last process")
    assert status == 0, error
    return output


def check_every_prompt_once(output: Path, num_steps: int) -> None:
    """The ledger names four prompts a step, each once; with those that wait in the last checkpoint they are all that were taken."""
    entries = read_ledger(output / "rl" / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(1, num_steps + 1))
    trained = [prompt for entry in entries for prompt in entry["prompts"]]
    assert len(trained) == 4 * num_steps
    checkpoint = latest_checkpoint(output / "rl" / "checkpoints")
    assert checkpoint is not None
    state = read_run_state(checkpoint).rollouts
    taken = state["buffer"]["epoch_id"] * NUM_PROMPTS + state["buffer"]["sample_offset"]
    assert sorted(trained + find_prompts(state)) == list(range(taken)), "a prompt was lost, or trained on twice in its epoch"
    lines = read_metrics(output / "metrics.jsonl")
    assert [line["step"] for line in lines if line["step"] > 0] == list(range(1, num_steps + 1))
    assert all("eval_accuracy" in line for line in lines if line["step"] % 3 == 0)
    assert max(line["staleness_max"] for line in lines if line["step"] > 0) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("switch", [[], ["--enable-segment-wise-ppo"]])
def test_a_run_that_is_killed_and_resumed_trains_on_every_prompt_once(tmp_path: Path, switch: list[str]):
    output = run_with_kills(tmp_path, num_steps=6, num_kills=1, seed=1, more=switch)
    check_every_prompt_once(output, 6)
    if switch:
        assert all(line["num_missed_tokens"] == 0 for line in read_metrics(output / "metrics.jsonl") if line["step"] > 0)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("switch", [[], ["--enable-segment-wise-ppo"]])
@pytest.mark.parametrize(
    ("num_kills", "num_steps"), [pytest.param(5, 15, marks=pytest.mark.slow), pytest.param(20, 60, marks=pytest.mark.long)]
)
def test_a_run_killed_at_random_moments_trains_on_every_prompt_once(tmp_path: Path, num_kills: int, num_steps: int, switch: list[str]):
    check_every_prompt_once(run_with_kills(tmp_path, num_steps=num_steps, num_kills=num_kills, seed=2, more=switch), num_steps)


def in_process(capsys, *arguments: object) -> tuple[int, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.err + captured.out


def test_failed_rewards_end_in_one_message_that_names_the_checkpoint_and_the_run_goes_on_from_there(capsys, tmp_path: Path):
    reward = tmp_path / "fragile.py"
    reward.write_text("def length(sample):\n    assert sample.group_index != 13, 'no answer'\n    return float(len(sample.tokens) % 3)\n")
    output = tmp_path / "run"
    arguments = [*small_run(tmp_path, num_steps=5), "--output-dir", output, "--checkpoint.rl-every", 0]
    status, said = in_process(capsys, *arguments, "--reward.function", f"{reward}:length")
    checkpoint = latest_checkpoint(output / "rl" / "checkpoints")
    assert status == 1
    assert checkpoint is not None
    assert "no answer" in said
    assert f"are saved in {checkpoint}: resume from there" in " ".join(said.split())
    reward.write_text((tmp_path / "reward.py").read_text())
    sys.modules.pop("fragile", None)
    again = ["--output-dir", output, "--resume", "--quiet", "--rl.asynchronous.queue-size", 30, "--rl.asynchronous.on-failure", "drop"]
    status, said = in_process(capsys, *again)  # limits may change, as messages advise it
    assert status == 0, said
    check_every_prompt_once(output, 5)
    status, said = in_process(capsys, "--output-dir", output, "--resume", "--rl.asynchronous.max-staleness", 1)
    assert status == 2
    assert "--rl.asynchronous.max-staleness: 2 -> 1" in said


def test_segment_wise_is_one_switch_of_the_main_job(capsys, tmp_path: Path):
    output = tmp_path / "run"
    status, said = in_process(capsys, *small_run(tmp_path, num_steps=5), "--output-dir", output, "--enable-segment-wise-ppo")
    assert status == 0, said
    lines = [line for line in read_metrics(output / "metrics.jsonl") if line["step"] > 0]
    assert sum(line["num_segment_tokens"] for line in lines) > 0
    assert sum(line["num_missed_tokens"] for line in lines) == 0
    assert all({"importance_weight", "max_importance_weight", "dropped_fraction"} <= set(line) for line in lines)
    check_every_prompt_once(output, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_segment_wise_ppo": True}, "rollouts are synchronous"),
        ({"rl": RLSection(asynchronous=AsyncConfig(enabled=True, enable_segment_wise_ppo=True))}, "follows from the switch"),
        (
            {"enable_segment_wise_ppo": True, "rl": RLSection(asynchronous=AsyncConfig(enabled=True, enable_segment_wise_ppo=False))},
            "follows from the switch",
        ),
        (
            {"enable_segment_wise_ppo": True, "rl": RLSection(asynchronous=AsyncConfig(enabled=True, in_flight="continue"))},
            "leave rl.asynchronous.in_flight out",
        ),
        (
            {
                "enable_segment_wise_ppo": True,
                "rl": RLSection(algorithm="decoupled(grpo, segment_wise=False)", asynchronous=AsyncConfig(enabled=True)),
            },
            "says segment_wise=False, but",
        ),
        ({"rl": RLSection(algorithm="decoupled(grpo, segment_wise=True)")}, "is segment-wise, but enable_segment_wise_ppo is off"),
        (
            {
                "enable_segment_wise_ppo": True,
                "rl": RLSection(algorithm="decoupled(grpo, missed_as_proximal=True)", asynchronous=AsyncConfig(enabled=True)),
            },
            "says missed_as_proximal=True, but",
        ),
        ({"rl": RLSection(asynchronous=AsyncConfig(enabled=True, queue_size=63))}, "increase queue_size"),
        ({"rl": RLSection(asynchronous=AsyncConfig(max_staleness=2))}, "has max_staleness = 2, but rl.asynchronous.enabled is False"),
        ({"rl": RLSection(asynchronous=AsyncConfig(enabled=True), over_sampling_factor=1.5)}, "over_sampling_factor is 1.5"),
    ],
)
def test_contradicting_settings_are_refused_when_the_configuration_is_made(settings, message: str):
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


def test_the_switch_derives_the_settings_of_rollouts_and_the_algorithm():
    on = Config(
        enable_segment_wise_ppo=True, rl=RLSection(algorithm="dapo", asynchronous=AsyncConfig(enabled=True, missed_segment="proximal"))
    )
    assert on.asynchronous.segment_wise
    assert on.asynchronous.interrupts
    assert {"segment_log_probs", "policy_versions"} <= on.algorithm.requires
    inner = Config(enable_segment_wise_ppo=True, rl=RLSection(algorithm="decoupled(dapo, cap=2.0)", asynchronous=AsyncConfig(enabled=True)))
    assert "segment_log_probs" in inner.algorithm.requires
    assert inner.algorithm_call.arguments["cap"] == 2.0
    off = Config(rl=RLSection(algorithm="dapo"))
    assert off.algorithm_call is off.rl.parsed_algorithm
    assert not off.asynchronous.segment_wise


def test_dry_run_says_how_rollouts_are_generated(capsys):
    status, said = in_process(capsys, "--dry-run", *ASYNCHRONOUS, "--enable-segment-wise-ppo")
    assert status == 0
    assert "at most 2 weight versions behind; up to 192 groups are generated at once and 192 wait" in said
    assert "decoupled(algorithm=grpo(" in said
    assert "segment_wise=True" in said


def make_rollouts(*groups: int) -> RolloutBatch:
    return RolloutBatch(samples=tuple(Sample(group_index=group, index=2 * group + k) for group in groups for k in range(2)))


def test_a_ledger_is_cut_back_to_the_finished_steps(tmp_path: Path):
    path = tmp_path / "rl" / "ledger.jsonl"
    ledger = Ledger(path, finished_steps=0)
    for step in (1, 2, 3):
        ledger.add(step, make_rollouts(step, 10 + step))
    path.write_text(path.read_text() + '{"step": 4, "pro')  # a kill in the middle of a line
    again = Ledger(path, finished_steps=2)
    again.add(3, make_rollouts(5))
    assert read_ledger(path) == [
        {"step": 1, "prompts": [1, 11]},
        {"step": 2, "prompts": [2, 12]},
        {"step": 3, "prompts": [5]},
    ]


def test_bytes_that_a_power_loss_left_behind_the_finished_steps_are_cut_off(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    lines = b'{"step": 1, "prompts": [1]}\n{"step": 2, "prompts": [2]}\n'
    for rest in (b"\0" * 40 + b"\n", b"\xff\xfe\n" + b'{"step": 4, "prompts": [4]}\n'):
        path.write_bytes(lines + rest)
        Ledger(path, finished_steps=2)
        assert path.read_bytes() == lines
    path.write_bytes(lines + b"\0" * 40 + b"\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl:3 is not a line of a ledger"):  # the third step's line is among what is lost
        Ledger(path, finished_steps=3)


def test_a_damaged_ledger_names_file_and_line(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1, "prompts": [1]}\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"ledger\.jsonl:2 is not a line of a ledger"):
        read_ledger(path)


def test_segment_log_probs_are_asked_of_whom_the_user_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    own = {name: getattr(recompute, name) for name in ("_score_with_engines", "_score_with_trainer")}
    for who, expected in (("trainer", "_score_with_trainer"), ("engines", "_score_with_engines")):
        asked: set[str] = set()

        def note(name: str, asked: set[str] = asked):
            async def score(*arguments: Any) -> Any:
                asked.add(name)
                return await own[name](*arguments)

            return score

        directory = tmp_path / who
        directory.mkdir()
        argv = [*small_run(directory, num_steps=3), "--output-dir", str(directory / "run"), "--enable-segment-wise-ppo"]
        argv += ["--rl.segment-scores", who]
        with pytest.MonkeyPatch.context() as patch:
            for name in own:
                patch.setattr(recompute, name, note(name))
            assert main(argv) == 0, capsys.readouterr().err
        assert asked == {expected}
        assert sum(line.get("num_segment_tokens", 0) for line in read_metrics(directory / "run" / "metrics.jsonl")) > 0
        assert main([*argv, "--dry-run"]) == 0
        assert f"segment log-probs by the {who}" in capsys.readouterr().out
