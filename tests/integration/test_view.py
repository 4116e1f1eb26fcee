"""The viewer: what it says of a run's files, of episodes and of single steps; colours; and that nothing in a file brings it down."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.text import Text
from test_trajectories import json_values

from integration.settings.command_line import find_run
from integration.train import main as train
from integration.view.__main__ import main, write_lines
from integration.view.source import find_decoder
from integration.view.tokens import REASONS, Palette, Token, explain_reason, split_text
from rollouts.algorithms.anchors import GiGPOSettings, hash_observation
from rollouts.algorithms.estimators import estimate_gigpo
from rollouts.algorithms.gigpo_steps import system_apply_gigpo_to_batch_steps
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.records import Estimate, TrajectoryRecord, UpdateRecord, attach_estimates, derive_steps
from rollouts.data.trajectories import read_records, write_records, write_samples, write_steps
from rollouts.errors import make_safe
from rollouts.outcomes import EpisodeOutcome, MetricResult, RewardDetails, StopReason
from rollouts.steps import StepData
from rollouts.types import Message, Sample, Status, Turn


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    create_char_tokenizer(99).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that keeps every sample."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    options = (
        "--mode rl --quiet --rl.num-steps 3 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --trajectories.every 1 "
        "--evaluation.num-prompts 2 --model.hidden-size 32 --model.num-layers 1 --model.intermediate-size 32 --num-threads 1 --output-dir"
    )
    threads = torch.get_num_threads()
    assert train([*options.split(), str(directory)]) == 0
    torch.set_num_threads(threads)
    return directory


def see(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Return the viewer's stdout, or its stderr if it ends with status 2."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error
    assert (out if status else error) == ""
    return error if status else out


# -- runs


def test_a_run_shows_its_newest_step_with_the_texts_of_its_tokens(capsys, finished: Path):
    out = see(capsys, finished)
    records = read_records(finished / "rl" / "trajectories" / "step_0003.jsonl")
    tokenizer: Any = create_char_tokenizer()
    assert f"{finished}/rl/trajectories/step_0003.jsonl: 4 samples of 2 groups, reward " in out
    assert "this run has steps 1-3; --step chooses one" in out
    assert out.count("\ngroup ") == 2 and out.count("  sample ") == 4
    for record in records:
        sample = record.sample
        written = tokenizer.decode([token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask])
        assert f"    prompt      {sample.prompt}\n    response    {written.split(chr(10))[0]}\n" in out
        assert f"    wanted      {sample.metadata['ground_truth']}\n" in out
        assert f"{len(sample.tokens)} tokens, {sum(m > 0 for m in sample.loss_mask)} trained, weights 2" in out


def test_steps_of_a_run_are_chosen_and_listed(capsys, finished: Path):
    assert "step_0001.jsonl: 4 samples" in see(capsys, finished, "--step", 1)
    assert "weights 0" in see(capsys, finished / "rl" / "trajectories", "--step", 1)
    assert [line.split(",")[0] for line in see(capsys, finished, "--list").splitlines()] == [
        f"step {step}: 4 samples of 2 groups" for step in (1, 2, 3)
    ]
    assert "has no trajectories of step 7: it has those of steps 1-3" in see(capsys, finished, "--step", 7, status=2)
    assert "one file" in see(capsys, finished / "rl" / "examples.jsonl", "--step", 1, status=2)
    assert "one file" in see(capsys, finished / "rl" / "examples.jsonl", "--list", status=2)


def test_a_table_of_tokens_has_the_numbers_of_the_file(capsys, finished: Path):
    path = finished / "rl" / "trajectories" / "step_0002.jsonl"
    record = read_records(path)[0]
    out = see(capsys, path, "--tokens", "--sample", record.sample.index)
    rows = [line.split() for line in out.splitlines() if line[:6] == "    " + line[4:6] and line.strip()[:1].isdigit()]
    assert "position  id  piece" in out and "mask  version  log-prob  advantage" in out
    assert [int(row[1]) for row in rows] == list(record.sample.tokens)
    assert record.sample.rollout_log_probs is not None and record.estimate is not None and record.estimate.advantages is not None
    assert record.update is not None and record.update.reasons is not None, "the run has recorded its updates"
    assert [float(row[5]) for row in rows] == pytest.approx(record.sample.rollout_log_probs, rel=1e-3)
    assert [float(row[6]) for row in rows] == pytest.approx(record.estimate.advantages, rel=1e-3)


def test_examples_of_a_run_are_shown_as_well(capsys, finished: Path):
    out = see(capsys, finished / "rl" / "examples.jsonl", "--color", "advantage")
    assert "2 samples of 2 groups" in out and "the file has no advantages" in out


def test_the_tokenizer_is_that_of_the_run_or_the_one_that_is_named(capsys, finished: Path, tokenizer_dir: Path, tmp_path: Path):
    path = finished / "rl" / "trajectories" / "step_0001.jsonl"
    assert find_run(path) == finished
    for missing in ((), ("rl/checkpoints",)):  # of the newest checkpoint; else the built-in one of the model that the run began with
        copied = tmp_path / f"without {len(missing)}"
        shutil.copytree(finished, copied)
        for name in missing:
            shutil.rmtree(copied / name)
        decode = find_decoder(copied / "rl" / "trajectories" / "step_0001.jsonl", None)
        assert decode is not None and decode([31, 1]) == "s<|eos|>"
    shutil.copy(path, tmp_path / "alone.jsonl")
    alone = see(capsys, tmp_path / "alone.jsonl", "--limit", 1)
    assert "tokens are shown by their ids" in alone and f"    tokens      {read_records(path)[0].sample.tokens[-1]}" not in see(
        capsys, path
    )
    assert " ".join(map(str, read_records(path)[0].sample.tokens[-2:])) in alone
    assert "'='" in see(capsys, tmp_path / "alone.jsonl", "--tokenizer", tokenizer_dir, "--tokens")
    assert "has no readable tokenizer.json" in see(capsys, path, "--tokenizer", tmp_path, status=2)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer" in see(capsys, path, "--tokenizer", tmp_path, status=2)


# -- what is chosen

TOKENS = (31, 6, 43, 6, 1)  # s3=3<|eos|>


def make_shown(index: int, group: int, reward: float | None, **changes: Any) -> Sample:
    known = {"tokens": TOKENS, "loss_mask": (0.0, 0.0, 0.0, 1.0, 1.0), "prompt": "s3=", "response": "3", "status": Status.COMPLETED}
    return Sample(**(known | {"index": index, "group_index": group, "reward": reward} | changes))


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    write_samples(path, [make_shown(k, k // 2, reward) for k, reward in enumerate((0.0, 1.0, 0.5, None, 0.25, 0.25))])
    return path


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("--group 1", [2, 3]),
        ("--sample 4", [4]),
        ("--min-reward 0.5", [1, 2]),
        ("--max-reward 0.25", [0, 4, 5]),
        ("--min-reward 0.25 --max-reward 0.5", [2, 4, 5]),
        ("--limit 2", [0, 1]),
        ("--limit 0", [0, 1, 2, 3, 4, 5]),
        ("--min-reward 0.1 --limit 1", [1]),
    ],
)
def test_samples_are_chosen(capsys, samples: Path, flags: str, shown: list[int]):
    out = see(capsys, samples, *flags.split())
    assert [int(line.split()[1][:-1]) for line in out.splitlines() if line.startswith("  sample ")] == shown
    assert ("more; --limit 0 shows all" in out) == ("--limit 2" in flags or "--limit 1" in flags)


def test_a_choice_that_takes_nothing_says_so(capsys, samples: Path, tmp_path: Path):
    assert see(capsys, samples, "--group", 9, "--min-reward", 0.5).splitlines()[1] == "none of them is chosen by --group 9 --min-reward 0.5"
    write_samples(tmp_path / "empty.jsonl", [])
    assert see(capsys, tmp_path / "empty.jsonl").splitlines()[1] == "nothing was written to it"


def test_a_group_has_the_statistics_of_all_its_samples_where_the_file_knows_them(capsys, tmp_path: Path):
    known = Estimate(reward=0.75, advantages=(0.0, 0.0, 0.0, 0.5, 0.25), group_rewards=(1.0, 0.0, 0.0, 0.75))
    write_records(tmp_path / "f.jsonl", [TrajectoryRecord(sample=make_shown(3, 7, 1.0), estimate=known)])
    out = see(capsys, tmp_path / "f.jsonl")
    assert "group 7: 4 samples, reward mean 0.4375, std 0.4463, from 0 to 1; 1 shown\n" in out
    assert "  sample 3: completed, reward 1, shaped to 0.75, advantage +0.25 to +0.5, 5 tokens, 2 trained\n" in out


def test_a_conversation_is_shown_message_by_message(capsys, tmp_path: Path, tokenizer_dir: Path):
    prompt = (Message(role="system", content="sort\nwell"), Message(role="user", content="3"))
    baseline = make_shown(1, 0, 0.0, prompt=prompt, trainable=False, metadata={"ground_truth": "3"})
    write_samples(tmp_path / "f.jsonl", [make_shown(0, 0, 1.0, prompt=prompt), baseline])
    out = see(capsys, tmp_path / "f.jsonl", "--tokenizer", tokenizer_dir)
    assert out.split("\n\n")[2:] == [
        "  sample 0: completed, reward 1, 5 tokens, 2 trained\n"
        "    system      sort\n                well\n    user        3\n    response    3<|eos|>",
        "  sample 1: completed, reward 0, a baseline, not trained on, 5 tokens, 2 trained\n"
        "    wanted      3\n    system      sort\n                well\n    user        3\n    response    3<|eos|>\n",
    ]


# -- answers side by side, search, reasons and parts of the reward


def make_answers(
    texts: tuple[str, ...], rewards: tuple[float, ...], advantages: tuple[float, ...], **changes: Any
) -> list[TrajectoryRecord]:
    tokenizer: Any = create_char_tokenizer(99)
    records: list[TrajectoryRecord] = []
    for k, (text, reward, advantage) in enumerate(zip(texts, rewards, advantages, strict=True)):
        tokens = tuple(tokenizer.encode("s3=" + text))
        mask = (0.0,) * 3 + (1.0,) * (len(tokens) - 3)
        sample = make_shown(k, 5, reward, tokens=tokens, loss_mask=mask, response=text, metadata={"ground_truth": "3"}, **changes)
        known = Estimate(reward=reward, advantages=tuple(advantage * m for m in mask), group_rewards=rewards)
        records.append(TrajectoryRecord(sample=sample, estimate=known))
    return records


def test_answers_of_a_group_stand_side_by_side(capsys, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    answers = make_answers(("3", "x" * 30, "a\nb"), (1.0, 0.0, 0.0), (1.25, -0.75, -0.5))
    write_records(tmp_path / "f.jsonl", answers)
    monkeypatch.setenv("COLUMNS", "78")
    arguments = (tmp_path / "f.jsonl", "--side-by-side", "--tokenizer", tokenizer_dir)
    assert see(capsys, *arguments, "--limit", 1).split("\n", 1)[1] == (
        "\ngroup 5: 3 samples, reward mean 0.3333, std 0.4714, from 0 to 1\n"
        "  The group has a gradient: advantages go from -0.75 to 1.25, rewards from 0 to 1.\n"
        "    wanted      3\n    prompt      s3=\n\n"
        "sample 0                  sample 1                  sample 2\n"
        "reward 1                  reward 0                  reward 0\n"
        "advantage +1.25           advantage -0.75           advantage -0.5\n"
        "completed, 1 tokens       completed, 30 tokens      completed, 3 tokens\n"
        "trained                   trained                   trained\n\n"
        f"3                         {'x' * 24}  a\n"
        "                          xxxxxx                    b\n"
    ), "whole groups, whatever the limit"
    monkeypatch.setenv("COLUMNS", "30")
    narrow = see(capsys, *arguments)
    assert [line for line in narrow.splitlines() if line.startswith("sample")] == ["sample 0", "sample 1", "sample 2"]
    assert max(map(len, narrow.split("\n\n", 2)[2].splitlines())) <= 30
    assert "do not fit side by side" in see(capsys, *arguments, "--tokens", status=2)
    by_ids = see(capsys, tmp_path / "f.jsonl", "--side-by-side")
    assert "x" * 20 in by_ids


def test_subgroups_of_a_group_stand_by_themselves(capsys, tmp_path: Path, tokenizer_dir: Path):
    first = make_answers(("3", "4"), (1.0, 0.0), (1.0, -1.0), subgroup="first")
    second = [
        replace(r, sample=replace(r.sample, index=r.sample.index + 2))
        for r in make_answers("ab", (1.0, 1.0), (0.0, 0.0), subgroup="\x1b[1m")
    ]
    write_records(tmp_path / "f.jsonl", [first[0], second[0], first[1], second[1]])
    for arguments in ((), ("--side-by-side",)):
        out = see(capsys, tmp_path / "f.jsonl", "--tokenizer", tokenizer_dir, *arguments)
        assert "\ngroup 5, subgroup first: 2 samples, reward mean 0.5" in out and "  Group 5, subgroup first has a gradient" in out
        assert "\ngroup 5, subgroup \\x1b[1m: 2 samples, reward 1 in all\n  No gradient: all 2 rewards of group 5, subgroup " in out
        assert "were recorded" not in out


def test_episodes_stand_side_by_side_step_by_step(capsys, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "140")
    write_records(tmp_path / "f.jsonl", episode_records())
    lines = see(capsys, tmp_path / "f.jsonl", "--side-by-side", "--tokenizer", tokenizer_dir).splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("step 1"))
    assert lines[at].count("step 1, reward") == 2 and lines[at + 1].split() == ["l", "r"]


def test_text_is_searched_in_any_case_and_place(capsys, tmp_path: Path, tokenizer_dir: Path):
    answers = make_answers(("Hello", "world", "x"), (0.0,) * 3, (0.0,) * 3)
    write_records(tmp_path / "f.jsonl", [*answers, *episode_records()])
    found = lambda text: [line for line in see(capsys, tmp_path / "f.jsonl", "--search", text).splitlines() if "  sample " in line]
    assert [line.split()[1] for line in found("hELLO")] == ["0:"] and len(found("s3=")) == 3
    assert len(found("over")) == 2, "messages of episodes"
    assert "none of them is chosen by --search 'a b'" in see(capsys, tmp_path / "f.jsonl", "--search", "a b")


def test_the_reason_of_a_group_without_gradient_and_parts_of_rewards_are_shown(capsys, tmp_path: Path, tokenizer_dir: Path):
    details = RewardDetails(metrics={"format": MetricResult(1.0, "has a box"), "right": MetricResult(0.0)}, reason="wrong", num_retries=1)
    write_records(tmp_path / "f.jsonl", make_answers(("3", "4"), (0.5, 0.5), (0.0, 0.0), reward_details=details))
    parts = ("format 1: has a box", "right 0", "reason: wrong", "after 1 failed call")
    for flags in ((), ("--side-by-side",)):
        out = see(capsys, tmp_path / "f.jsonl", *flags)
        assert "  No gradient: all 2 rewards of the group are 0.5" in out
        assert all(out.count(part) == 2 for part in parts), out


def test_numbers_of_the_update_are_columns_and_colours(capsys, tmp_path: Path):
    known = Estimate(reward=1.0, old_log_probs=(0, 0, 0, -0.25, -1), ref_log_probs=(0, 0, 0, -2, -1), loss_weights=(0, 0, 0, 0.5, 0))
    sample = make_shown(0, 0, 1.0, rollout_log_probs=(0.0, 0.0, 0.0, -0.5, -1.0))
    write_records(tmp_path / "f.jsonl", [TrajectoryRecord(sample=sample, estimate=known)])
    rows = [line.split() for line in see(capsys, tmp_path / "f.jsonl", "--tokens").splitlines()]
    at = next(k for k, row in enumerate(rows) if row[:1] == ["position"])
    assert rows[at][4:] == ["log-prob", "trainer", "reference", "ratio", "weight"]
    assert rows[at + 4][-5:] == ["-0.5", "-0.25", "-2", "1.284", "0.5"] and rows[at + 5][-5:] == ["-1", "-1", "-1", "1", "0"]
    assert len(rows[at + 3]) == len(rows[at + 4]) - 1, "a token that is not trained on has no ratio"
    for name in ("trainer", "reference", "ratio", "weight"):
        assert "has no" not in see(capsys, tmp_path / "f.jsonl", "--color", name)
    write_samples(tmp_path / "g.jsonl", [sample])
    assert "has no numbers for --color ratio" in see(capsys, tmp_path / "g.jsonl", "--color", "ratio")
    ratio, weight = Palette("ratio"), Palette("weight", most=0.5)
    assert color_of(ratio, ratio=1.0) == "#ebebeb" and color_of(ratio, ratio=1.3) == "#3c82eb" and color_of(ratio, ratio=0.5) == "#e1554b"
    assert color_of(weight, weight=0.5) == "#6ebe78" and color_of(weight, weight=0.0) == "#e1554b" and color_of(ratio, ratio=0.0)


def test_what_the_update_made_of_each_token_is_shown(capsys, tmp_path: Path):
    update = UpdateRecord(
        log_probs=(0, 0, 0, -0.25, -1.5),
        ratios=(1.0, 1.0, 1.0, 1.284, 0.607),
        loss_weights=(0.0, 0.0, 0.0, 0.5, 0.5),
        reasons=("", "", "", "clip_high", "clip_low, dropped"),
    )
    sample = make_shown(0, 0, 1.0, rollout_log_probs=(0.0, 0.0, 0.0, -0.5, -1.0))
    known = Estimate(reward=1.0, advantages=(0, 0, 0, 1, 1), group_rewards=(0.0, 1.0))
    write_records(tmp_path / "f.jsonl", [TrajectoryRecord(sample=sample, estimate=known, update=update)])
    out = see(capsys, tmp_path / "f.jsonl", "--tokens")
    told = "clip_high 1 (too frequent already), clip_low 1 (too rare already), dropped 1 (too far from the policy that sampled it)."
    assert f"The update clipped or left out 2 of its 2 tokens: {told}" in out
    rows = [line.split() for line in out.splitlines()]
    at = next(k for k, row in enumerate(rows) if row[:1] == ["position"])
    assert rows[at][-4:] == ["weight", "updated", "update-ratio", "reason"]
    assert rows[at + 4][-4:] == ["0.5", "-0.25", "1.284", "clip_high"] and rows[at + 5][-2:] == ["clip_low,", "dropped"]
    for name in ("update-ratio", "reason", "weight"):
        assert "has no" not in see(capsys, tmp_path / "f.jsonl", "--color", name)
    reason = Palette("reason")
    colors = [color_of(reason, reason=name) for name in ("kept", "no_advantage", "clip_low", "clip_high", "dropped")]
    assert len(set(colors)) == 5, "each kind has a colour"
    assert (
        explain_reason("clip_low, dropped") == f"{REASONS['clip_low']}; {REASONS['dropped']}"
        and explain_reason("own") == "a mark of the loss"
    )


# -- episodes


def make_episode(index: int, actions: str, states: str, rewards: tuple[float, ...]) -> Sample:
    """Each observation and each action is one character."""
    tokenizer: Any = create_char_tokenizer(99)
    texts = [(state, 0.0) if k == 0 else (action, 1.0) for state, action in zip(states, actions, strict=True) for k in (0, 1)]
    conversation = [{"role": "user" if mask == 0 else "assistant", "content": text} for text, mask in texts]
    turns = tuple(Turn(start=2 * k + 1, end=2 * k + 2, state=states[k], reward=reward) for k, reward in enumerate(rewards))
    return Sample(
        prompt="go",
        tokens=tuple(tokenizer.encode("".join(text for text, _ in texts))),
        loss_mask=tuple(mask for _, mask in texts),
        rollout_log_probs=tuple(-mask for _, mask in texts),
        reward=sum(rewards),
        status=Status.COMPLETED,
        index=index,
        turns=turns,
        messages=(*conversation, {"role": "user", "content": "over"}),
        episode=EpisodeOutcome(stop_reason=StopReason.DONE),
    )


def episode_records() -> tuple[TrajectoryRecord, ...]:
    episodes = (make_episode(0, "rl", "ab", (0.0, 1.0)), make_episode(1, "dr", "aa", (0.25, 0.0)))
    return attach_estimates(episodes, episodes, estimate_gigpo(collate_samples(episodes), settings=GiGPOSettings(gamma=0.5)))


EPISODE_0 = """\
  sample 0: completed, reward 1, advantage +0.707 to +1.71, 2 steps, ended by done, 4 tokens, 2 trained
    step 0: reward 0, return 0.5, advantage +1.71, of the episode +0.707, of the step +1, state a, visited 3 times
    observation a
    action      r
    step 1: reward 1, return 1, advantage +0.707, of the episode +0.707, of the step 0, state b, visited 1 time, the last
    observation b
    action      l
    user        over
"""


def test_an_episode_shows_what_the_advantage_of_each_step_is_made_of(capsys, tmp_path: Path, tokenizer_dir: Path):
    write_records(tmp_path / "f.jsonl", episode_records())
    out = see(capsys, tmp_path / "f.jsonl", "--tokenizer", tokenizer_dir)
    assert EPISODE_0 in out
    assert out.count("    step ") == 4
    assert "state a, visited 3 times, the last\n" in out


def test_a_file_of_single_steps_shows_the_same_steps(capsys, tmp_path: Path, tokenizer_dir: Path):
    write_steps(tmp_path / "f.jsonl", [step for record in episode_records() for step in derive_steps(record)])
    out = see(capsys, tmp_path / "f.jsonl", "--tokenizer", tokenizer_dir)
    assert "\n".join(EPISODE_0.splitlines()[1:]) in out
    assert "  sample 0: reward 1, 2 steps\n" in out
    assert out.count("  sample ") == 2
    assert see(capsys, tmp_path / "f.jsonl", "--min-reward", 0.5).count("  sample ") == 1


def test_steps_with_the_advantages_of_gigpo_show_what_these_are_made_of(capsys, tmp_path: Path):
    episodes = [
        [StepData(system_step_index=0, observation_data="a", action_taken="x", raw_policy_output="x", base_reward=reward, sample_index=i)]
        for i, reward in enumerate((1.0, 0.0))
    ]
    steps = [
        step for row in system_apply_gigpo_to_batch_steps(episodes, [1.0, 0.0], settings=GiGPOSettings(std_level=None)) for step in row
    ]
    write_steps(tmp_path / "f.jsonl", steps)
    out = see(capsys, tmp_path / "f.jsonl")
    state = f"{hash_observation('a')[:8]}..."
    assert f"advantage +1, of the episode +0.5, of the step +0.5, state {state}, visited 2 times\n" in out and "info" not in out


def test_steps_of_a_sample_and_steps_of_an_episode_have_one_vocabulary():
    (first, _) = episode_records()
    derived = derive_steps(first)[0].step_info["gigpo"]
    (told, _), _ = system_apply_gigpo_to_batch_steps([derive_steps(record) for record in episode_records()], [1.0, 0.25], gamma=0.5)
    assert set(derived) == set(told.step_info["gigpo"]) - {"state"}


def test_a_step_shows_what_became_of_its_action(capsys, tmp_path: Path):
    step = StepData(
        system_step_index=0,
        observation_data={"x": [1, 2]},
        action_taken={"tool": "add", "arguments": {"a": 1}},
        raw_policy_output="<tool_call>...</tool_call>",
        step_info={"seconds": 0.5},
        policy_value_estimate=0.125,
        resulting_messages_history=(
            Message(role="assistant", content=None, tool_calls=({"name": "add"},)),
            Message(role="tool", content="3"),
        ),
    )
    write_steps(tmp_path / "f.jsonl", [step])
    assert see(capsys, tmp_path / "f.jsonl").endswith(
        "  sample 0: no reward, 1 step\n"
        "    step 0: value 0.125\n"
        '    observation {"x": [1, 2]}\n'
        "    action      <tool_call>...</tool_call>\n"
        '    taken as    {"tool": "add", "arguments": {"a": 1}}\n'
        '    info        {"seconds": 0.5}\n'
        "    tool        3\n"
    )


# -- tokens and colours


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="�"), max_size=6))
def test_pieces_together_are_the_whole_text_also_where_characters_span_tokens(text: str):
    tokens = list(text.encode())
    pieces = split_text(lambda ids: bytes(ids).decode("utf-8", errors="replace"), tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_pieces_of_characters_that_span_tokens_and_of_ids_without_a_text():
    decode = lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
    assert split_text(decode, "aé€b".encode()) == ["a", "", "é", "", "", "€", "b"]
    assert split_text(decode, [97, 300, 98]) == ["a", "<300>", "b"]
    assert "".join(split_text(decode, [0xE2, 0x82, 97])) == "�a"  # never completed


def test_spaces_between_words_stay_with_decoders_that_drop_the_first_one():
    words = ["▁a", "▁b", "c"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")
    assert split_text(decode, [0, 1, 2, 1]) == ["a", " b", "c", " b"]


def color_of(palette: Palette, **known: Any) -> str | None:
    style = palette.style(Token(**({"position": 0, "id": 0, "piece": "", "mask": 1.0} | known)))
    return None if style.bgcolor is None else style.bgcolor.name


def test_colours_say_sign_and_size_and_what_is_not_trained_on_has_none():
    palette = Palette("advantage", most=2.0)
    assert color_of(palette, advantage=2.0) == color_of(palette, advantage=5.0) == "#3c82eb"
    assert color_of(palette, advantage=-2.0) == "#e1554b"
    assert len({color_of(palette, advantage=a) for a in (-2.0, -1.0, 0.0, 1.0, 2.0)}) == 5
    assert color_of(palette, advantage=2.0, mask=0.0) is None and palette.style(Token(position=0, id=0, piece="", mask=0.0)).dim
    log_prob = Palette("log-prob")
    assert color_of(log_prob, log_prob=0.0) == "#ebebeb" and color_of(log_prob, log_prob=-9.0) == "#f09628"
    assert color_of(Palette("mask")) == "#6ebe78" and color_of(Palette("none")) is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("by", ["auto", "advantage", "log-prob", "mask", "none"])
def test_a_terminal_gets_colours_unless_the_user_wants_none(monkeypatch, tmp_path: Path, tokenizer_dir: Path, by: str):
    write_records(tmp_path / "f.jsonl", episode_records())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = [str(tmp_path / "f.jsonl"), "--tokenizer", str(tokenizer_dir), "--color", by]
    outputs: dict[str, str] = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        terminal = Terminal()
        monkeypatch.setattr("sys.stdout", terminal)
        assert main(arguments) == 0
        outputs[no_color] = terminal.getvalue()
    assert "\x1b" not in outputs["1"] and EPISODE_0 in outputs["1"]
    assert "\x1b[1m" in outputs[""]
    full = {"auto": "48;2;60;130;235", "advantage": "48;2;60;130;235", "log-prob": "48;2;236;214;186", "mask": "48;2;110;190;120"}
    assert full.get(by, "\x1b") in outputs[""]
    assert ("not trained on" in outputs[""]) == (by != "none") and "not trained on" not in outputs["1"]


def test_a_terminal_that_cannot_show_a_character_gets_its_number():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_lines([Text("a€\ud800")], stream, colors=False)
    assert raw.getvalue() == b"a\\u20ac\\ud800\n"


def test_a_picture_shows_the_same(capsys, tmp_path: Path, tokenizer_dir: Path):
    write_records(tmp_path / "f.jsonl", episode_records())
    assert see(capsys, tmp_path / "f.jsonl", "--tokenizer", tokenizer_dir, "--svg", tmp_path / "p.svg") == ""
    drawn = (tmp_path / "p.svg").read_text()
    assert drawn.startswith("<svg") and "#3c82eb" in drawn and "visited" in drawn
    assert "No such file" in see(capsys, tmp_path / "f.jsonl", "--svg", tmp_path / "none" / "p.svg", status=2)


# -- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"f.jsonl:1 is not a sample: JSONDecodeError"),
        (b"\xff\xfe", "cannot read samples from"),
        (
            b'{"step": 1, "stage": "rl", "loss": 0.5}',
            "f.jsonl:1 is not a rollout: it has a field 'step', which rollouts do not have. Give a file of rollouts (step_NNNN",
        ),  # a line of metrics.jsonl
        (b'{"system_step_index": -1}', "f.jsonl:1 is not a step"),
        (b'{"tokens": ["a"], "loss_mask": [1]}', "Sample.tokens is 'a' (str), expected a whole number"),
        (b'{"reward": "high"}', "Sample.reward is 'high' (str), expected a number"),
        (b'{"response": 3}', "Sample.response is 3 (int), expected a text"),
        (b'{"\\u001b[31m": 3}', "a field '\\x1b[31m', which"),
    ],
)
def test_a_bad_file_is_one_message(capsys, tmp_path: Path, content: bytes, message: str):
    (tmp_path / "f.jsonl").write_bytes(content)
    error = see(capsys, tmp_path / "f.jsonl", status=2)
    assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


def test_a_missing_path_and_a_directory_without_files_are_one_message(capsys, samples: Path, tmp_path: Path):
    assert f"there is no {tmp_path}/nowhere: give the directory of a run" in see(capsys, tmp_path / "nowhere", status=2)
    (tmp_path / "sft").mkdir()
    assert "holds no trajectory files (rl/trajectories/step_NNNN.jsonl" in see(capsys, tmp_path / "sft", status=2)
    shutil.copy(samples, tmp_path / "sft" / "examples.jsonl")
    assert f"look at {tmp_path}/sft/examples.jsonl" in see(capsys, tmp_path, status=2)
    assert "--limit is -1" in see(capsys, samples, "--limit", -1, status=2)


@pytest.mark.parametrize("flags", [["--colour", "mask"], ["--color", "red"], ["--step", "x"], []])
def test_flags_that_are_wrong_end_with_status_2(capsys, samples: Path, flags: list[str]):
    with pytest.raises(SystemExit) as stopped:
        main([str(samples), *flags] if flags else [])
    assert stopped.value.code == 2


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    names = ("step", "group", "sample", "min-reward", "max-reward", "search", "limit", "side-by-side", "color", "tokens", "list")
    for flag in (*names, "tokenizer", "svg"):
        assert f"--{flag}" in out
    assert "RUN|FILE" in out and len(out.splitlines()) <= 32, "one screen"


def test_a_reader_that_has_seen_enough_ends_it_silently(samples: Path, tmp_path: Path):
    code = """
import os, sys
from integration.view.__main__ import main

reads, writes = os.pipe()
os.dup2(writes, 1)
os.close(reads)
sys.stdout = os.fdopen(1, "w", closefd=False)
sys.exit(main([sys.argv[1]]))
"""
    assert run(code, samples, folder=tmp_path / "child") == (0, "", "")


def test_text_that_would_steer_the_terminal_is_shown_instead(capsys, tmp_path: Path):
    steering = "\x1b]0;title\x07\x1b[2J\r\u202eabc\n\tend"
    sample = make_shown(0, 0, 1.0, prompt=steering, response=steering, metadata={"ground_truth": steering})
    write_records(
        tmp_path / "f.jsonl", [TrajectoryRecord(sample=sample, steps=(StepData(system_step_index=0, step_info={"state": steering}),))]
    )
    out = see(capsys, tmp_path / "f.jsonl")
    assert not set("\x07\r\u202e") & set(out) and "\\x1b[2J\\r\\u202eabc" in out
    assert make_safe("é \t\n€🙂") == "é \t\n€🙂"


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_stands_in_a_file_is_shown_or_refused(capsys, tmp_path: Path, data: st.DataObject):
    row = json.loads(data.draw(st.sampled_from(ROWS)))
    path: list[Any] = []
    here: Any = row
    while isinstance(here, (dict, list)) and here and (not path or data.draw(st.booleans())):
        path.append(data.draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here)))))
        here = here[path[-1]]
    owner = row
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = data.draw(json_values | st.sampled_from([float("nan"), float("inf"), 10**400, -(10**30), "\x1b[2J"]))
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    assert main([str(tmp_path / "f.jsonl"), data.draw(st.sampled_from(["--tokens", "--side-by-side"])), "--color", "ratio"]) in (0, 2)
    out, error = capsys.readouterr()
    assert "\x1b" not in out + error


ROWS = [
    json.dumps(record.to_dict())
    for record in (
        *episode_records(),
        *(replace(record, steps=derive_steps(record)) for record in episode_records()),
        TrajectoryRecord(sample=make_shown(0, 0, 1.0, prompt=(Message(role="user", content="3"),))),
        TrajectoryRecord(
            sample=make_shown(0, 0, 1.0, rollout_log_probs=(0.0, 0.0, 0.0, -0.5, -1.0)),
            estimate=Estimate(reward=1.0, old_log_probs=(0.0, 0.0, 0.0, -0.5, -1.0), loss_weights=(0.5,) * 5),
        ),
    )
]
