"""The report: what it reads of runs, how it judges them, and the server that follows a live one. test_report_page.py looks at the page."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import math
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from integration.report.__main__ import main
from integration.report.page import read_report, render
from integration.report.rollouts import choose_rollouts, describe_record, find_columns, take_groups, to_json
from integration.report.runs import judge_progress, judge_trend, read_lines, read_run
from integration.report.serve import FollowedReport, describe_state, serve
from integration.settings.log_levels import WarningsFile, keep_warnings, read_warnings
from integration.view.__main__ import view
from integration.view.arguments import Arguments
from integration.view.gradient import explain_gradient
from rollouts.data.records import Estimate, TrajectoryRecord, UpdateRecord
from rollouts.data.trajectories import iterate_records, measure_groups, read_records, write_records
from rollouts.errors import ConfigError, DataError
from rollouts.types import KeptTokens, Sample, Status


def create_record(
    index: int, group: int, reward: float, advantage: float | None, rewards: tuple[float, ...], **changes: Any
) -> TrajectoryRecord:
    known = {"tokens": (5, 6, 7), "loss_mask": (0.0, 1.0, 1.0), "rollout_log_probs": (0.0, -0.5, -1.25), "weight_versions": (-1, 2, 2)}
    known |= {
        "prompt": "2+2=",
        "response": f"answer {index}",
        "reward": reward,
        "index": index,
        "group_index": group,
        "status": Status.COMPLETED,
    }
    sample = Sample(**(known | changes))
    estimate = None if advantage is None else Estimate(reward=reward, advantages=(0.0, advantage, advantage), group_rewards=rewards)
    seen = UpdateRecord(log_probs=(0.0, -0.5, -1.0), ratios=(1.0, 1.0, 1.3), reasons=("", "kept", "clip_high"))
    return TrajectoryRecord(sample=sample, estimate=estimate, update=seen if index % 2 and len(sample.tokens) == 3 else None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of another version: two RL steps, two groups of two samples each, settings that this version does not know."""
    path = tmp_path / "mine"
    for step in (1, 2):
        records = [create_record(4 * step + k, 2 * step + k // 2, float(k % 2), (-1.0, 1.0)[k % 2], (0.0, 1.0)) for k in range(4)]
        write_records(path / "rl" / "trajectories" / f"step_{step:04d}.jsonl", records)
    (path / "config.json").write_text(json.dumps({"old": {"setting": 3}, "seed": 1}))
    (path / "summary.json").write_text(json.dumps({"warnings": ["the disk was slow"]}))
    lines = [{"step": step, "stage": "rl", "reward_mean": 0.1 * step, "loss": float("nan") if step == 2 else -0.1} for step in (1, 2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def unpack(page: str, name: str) -> Any:
    (block,) = re.findall(rf'<script type="application/octet-stream" id="{name}">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(block)))


def test_a_page_holds_curves_rollouts_settings_and_warnings(run: Path):
    page = render(read_report([run], max_tokens=0))
    index = unpack(page, "index")
    (shown,) = index["runs"]
    assert shown["stages"]["rl"] == {"step": [1, 2], "reward_mean": [0.1, 0.2], "loss": [-0.1, None]}, "a NaN is a gap, not a number"
    assert shown["warnings"] == ["the disk was slow"]
    assert {s["name"]: s["value"] for s in shown["settings"]} == {"old.setting": 3, "seed": 1}
    assert [(c["step"], len(c["rows"])) for c in index["chunks"]] == [(1, 4), (2, 4)]
    records = unpack(page, "chunk-1")
    assert index["reasons"]["clip_low"].startswith("clipped") and [row[6] for row in index["chunks"][1]["rows"]] == [None, 1, None, 1]
    assert records[1]["tokens"]["reason"] == [None, "kept", "clip_high"] and records[1]["tokens"]["update_ratio"] == [None, 1, 1.3]
    assert {"reason", "update_ratio", "updated"} <= {column["key"] for column in index["columns"]}
    assert records[1]["tokens"]["advantage"] == [0, 1, 1] and records[1]["tokens"]["log_prob"] == [0, -0.5, -1.25]
    assert records[1]["group_rewards"] == [0, 1] and index["chunks"][1]["rows"][1][:5] == [4, 9, 1, 2, "completed"]


def test_a_page_is_the_same_for_the_same_run_and_names_no_address(run: Path):
    page = render(read_report([run], max_tokens=0))
    assert page == render(read_report([run], max_tokens=0))
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"']*", re.sub(r'octet-stream" id="[^<]*', "", page)))
    assert not {a for a in addresses if "leeoniya" not in a}, "only the licence line of the plotting library may name one"
    assert "connect-src 'none'" in page and "default-src 'none'" in page


def test_text_of_a_model_cannot_leave_its_block(run: Path):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    record = create_record(0, 0, 1.0, 1.0, (1.0,), response=attack, prompt=attack, metadata={attack: attack})
    write_records(run / "rl" / "trajectories" / "step_0003.jsonl", [record])
    page = render(read_report([run], max_tokens=0))
    assert attack not in page and page.count("<script") == 1 + 4, "one script and four blocks of data: the index and three steps"
    assert unpack(page, "chunk-2")[0]["response"] == attack


@pytest.mark.parametrize(
    ("advantages", "rewards", "changes", "told"),
    [
        ((0.0, 0.0), (1.0, 1.0), {}, "No gradient: all 2 rewards of the group are 1"),
        ((0.0, 0.0), (0.0, 1.0), {}, "No gradient: each advantage is 0, although rewards go from 0 to 1"),
        ((-1.0, 1.0), (0.0, 1.0), {}, "The group has a gradient: advantages go from -1 to 1, rewards from 0 to 1."),
        ((0.0, 1.0), (0.0, 1.0), {}, "1 of 2 recorded samples have an advantage of 0"),
        ((-1.0, 1.0), (0.0, 1.0), {"trainable": False}, "No gradient: none of these samples is trainable"),
        ((-1.0, 1.0), (0.0, 1.0), {"loss_mask": (0.0, 0.0, 0.0)}, "No gradient: no token of these samples has a loss mask above 0"),
        ((-1.0, 1.0), (0.0, 1.0), {"status": Status.TRUNCATED}, "No gradient: each of these samples was cut by the token budget"),
        ((None, None), (0.0, 1.0), {}, "No advantages were recorded"),
    ],
)
def test_the_reason_of_a_group_without_gradient_is_told(advantages: Any, rewards: Any, changes: Any, told: str):
    group = [create_record(k, 0, rewards[k], advantages[k], rewards, **changes) for k in range(2)]
    assert told in " ".join(explain_gradient(group, mask_truncated=True))


def test_truncated_samples_have_a_gradient_where_they_are_not_masked():
    group = [create_record(k, 0, float(k), (-1.0, 1.0)[k], (0.0, 1.0, 1.0), status=Status.TRUNCATED) for k in range(2)]
    told = " ".join(explain_gradient(group))
    assert "The group has a gradient" in told and "2 of 2 samples were cut" in told and "3 samples, of which 2 were recorded" in told


def test_each_subgroup_is_explained_by_itself(run: Path):
    """In a match the rewards of a role are compared with those of that role, so that one may have a gradient and the other none."""
    first = [create_record(k, 5, float(k == 0), (1.0, 0.0, -1.0)[k // 2], (1.0, 0.0, 0.0), subgroup="first") for k in (0, 2, 4)]
    second = [create_record(k, 5, 1.0, 0.0, (1.0, 1.0, 1.0), subgroup="<b>") for k in (1, 3, 5)]
    write_records(run / "rl" / "trajectories" / "step_0003.jsonl", [record for pair in zip(first, second, strict=True) for record in pair])
    page = render(read_report([run], max_tokens=0))
    chunk, records = unpack(page, "index")["chunks"][2], unpack(page, "chunk-2")
    assert chunk["groups"]["group 5, subgroup first"][0].startswith("Group 5, subgroup first has a gradient: advantages go from -1 to 1")
    assert chunk["groups"]["group 5, subgroup <b>"][0].startswith("No gradient: all 3 rewards of group 5, subgroup <b> are 1")
    assert not any("were recorded" in sentence for told in chunk["groups"].values() for sentence in told), "none is missing"
    assert [(row[0], row[1], row[7]) for row in chunk["rows"]] == [
        (5, k, f"group 5, subgroup {name}") for name, ks in (("<b>", (1, 3, 5)), ("first", (0, 2, 4))) for k in ks
    ]
    assert [(record["sample"], record["group"]) for record in records] == [(row[1], row[7]) for row in chunk["rows"]]


@pytest.mark.parametrize(
    ("values", "sign", "verdict"),
    [
        ([0.1 * k for k in range(20)], 1, "still learning"),
        ([0.1 * k for k in range(20)], -1, "getting worse"),
        ([1.0, 0.0] * 12, 1, "no longer clearly learning"),
        ([0.5] * 20, 1, "no longer clearly learning"),
        ([0.0, 1.0], 1, "2 steps are too few"),
    ],
)
def test_a_trend_is_judged_against_its_noise(values: list[float], sign: int, verdict: str):
    assert judge_trend(values, "mean reward", sign).startswith(verdict)


def test_noise_is_seldom_called_a_trend():
    """Of 400 runs of pure noise, the share called learning or worsening is about that of two standard errors."""
    import numpy as np

    random = np.random.default_rng(0)
    called = sum(not judge_trend(list(random.normal(size=60)), "loss", -1).startswith("no longer") for _ in range(400))
    assert called / 400 < 0.1


def test_each_stage_is_judged_by_its_own_measure():
    lines = [{"step": k, "stage": "sft", "loss": 4.0 - 0.1 * k} for k in range(12)]
    lines += [{"step": k, "stage": "rl", "reward_mean": 0.1 * k, "loss": 0.0, "eval_accuracy": (0.2, 0.9, 0.5)[k % 3]} for k in range(12)]
    rl, sft = judge_progress(lines)
    assert sft.startswith("SFT: still learning: the loss") and rl.startswith("RL: still learning: the mean reward")
    assert "Held-out accuracy went from 0.2 before RL to 0.5 after step 11; its best was 0.9 after step 1" in rl


def test_a_stage_that_ends_below_where_it_began_is_not_called_learning():
    """Its rewards rise again, and its best held-out value is that from before it."""
    lines = [{"step": k, "stage": "sft", "loss": 4.0 - 0.1 * k, **({"eval_accuracy": 0.5} if k == 12 else {})} for k in range(1, 13)]
    rl = [{"step": k, "stage": "rl", "reward_mean": 0.1 + 0.01 * k, "eval_accuracy": 0.01 * k} for k in range(1, 13)]
    assert judge_progress([*lines, *rl])[0] == (
        "RL: worse than before it by held-out accuracy; the mean reward rises by 0.01 a step over its last 6 steps "
        "(between 0.01 and 0.01). "
        "Held-out accuracy went from 0.5 before RL to 0.12 after step 12"
    )
    alone = judge_progress([{"step": 0, "stage": "rl", "eval_accuracy": 0.05}, *rl])[0]
    assert alone.startswith("RL: still learning: ") and alone.endswith("went from 0.05 before RL to 0.12 after step 12, its best")
    few = judge_progress([*lines, *rl[:3]])[0]
    assert few.startswith("RL: worse than before it by held-out accuracy; 3 steps are too few to tell")


def test_a_small_fall_of_the_held_out_measure_is_noise():
    def judge(first: float, last: float, *n: int) -> str:
        before: dict[str, Any] = {"step": 0, "stage": "rl", "eval_accuracy": first}
        rl: list[dict[str, Any]] = [{"step": k, "stage": "rl", "reward_mean": 0.1 + 0.01 * k} for k in range(1, 13)]
        return judge_progress([before, *rl, {"step": 13, "stage": "rl", "reward_mean": 0.23, "eval_accuracy": last}], *n)[0]

    told = judge(0.5, 0.498)
    assert told.startswith("RL: still learning: ")
    assert told.endswith("went from 0.5 before RL to 0.498 after step 13, about as before (two standard errors are 0.088)")
    assert "worse than before it" not in judge(0.5, 0.42) and "worse than before it" in judge(0.5, 0.40)
    assert "worse than before it" in judge(0.5, 0.498, 10**6) and "worse than before it" not in judge(0.5, 0.40, 16)
    assert "worse than before it" not in judge(-3.0, -3.1) and "worse than before it" in judge(-3.0, -4.0), "rewards outside 0 and 1"


def test_the_fall_is_judged_by_the_number_of_prompts_of_the_run(run: Path):
    (run / "config.json").write_text(json.dumps({"evaluation": {"num_prompts": 4}}))
    lines = [{"step": k, "stage": "rl", "reward_mean": 0.1, "eval_accuracy": 0.5 - 0.1 * k} for k in range(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "two standard errors are 0.68" in read_run(run).verdicts[0]


def test_the_number_of_held_out_rows_that_an_evaluation_used_is_told_and_decides_what_is_noise(run: Path):
    (run / "config.json").write_text(json.dumps({"evaluation": {"num_prompts": 4}}))
    lines = [{"step": k, "stage": "rl", "reward_mean": 0.1, "eval_accuracy": 0.5 - 0.1 * k, "eval_num_prompts": 1000.0} for k in range(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (told,) = read_run(run).verdicts
    assert told.startswith("RL: worse than before it") and "Held-out accuracy (1,000 prompts) went from 0.5 before RL to 0.3" in told
    pairs = [{"step": k, "stage": "dpo", "loss": 0.7, "eval_pair_accuracy": 0.5 - 0.1 * k, "eval_num_pairs": 7.0} for k in range(3)]
    (told,) = judge_progress(pairs)
    assert "hare of held-out pairs in order (7 pairs) went from 0.5" in told and "two standard errors are 0.51" in told


@pytest.mark.parametrize(
    ("rewards", "more", "verdict"),
    [
        ([0.0] * 12, {}, "nothing to learn from: the mean reward was 0 in every step; Rollouts, filter gradient, shows the groups without"),
        ([1.0] * 12, {}, "nothing left to learn: the mean reward was 1 in every step, the best reward"),
        ([*(0.1 * k for k in range(9)), *[1.0] * 8], {}, "nothing left to learn: the mean reward was 1 in each of its last 6 steps"),
        ([1.0] * 12, {"reward_min": 0.0, "reward_max": 3.0}, "no longer clearly learning: the mean reward was 1 in each of its last 6"),
        ([0.0] * 5, {}, "5 steps are too few"),
    ],
)
def test_equal_rewards_are_told_for_themselves(rewards: list[float], more: dict[str, float], verdict: str):
    (told,) = judge_progress([{"step": k, "stage": "rl", "reward_mean": value, **more} for k, value in enumerate(rewards, start=1)])
    assert told.startswith(f"RL: {verdict}")


def test_the_best_reward_is_the_highest_that_was_seen():
    lines = [
        {"step": k, "stage": "rl", "reward_mean": 1.0 if k else 1.5, "reward_min": 1.0, "reward_max": 1.0 if k else 2.0} for k in range(12)
    ]
    assert judge_progress(lines)[0].startswith("RL: nothing to learn from: the mean reward was 1 in each of its last 6 steps")
    lines[0] |= {"reward_mean": 0.5, "reward_min": 0.0, "reward_max": 1.0}
    assert judge_progress(lines)[0].startswith("RL: nothing left to learn: the mean reward was 1 in each of its last 6 steps")


def test_preferences_are_judged_by_held_out_pairs_where_no_answers_are_generated():
    lines = [{"step": k, "stage": "dpo", "loss": 0.7 - 0.01 * k, "eval_pair_accuracy": 0.05 * k} for k in range(13)]
    (told,) = judge_progress(lines)
    assert told.startswith("DPO: still learning: the loss falls by 0.01 a step")
    assert told.endswith("Share of held-out pairs in order went from 0 before DPO to 0.6 after step 12, its best")


def test_a_run_that_recorded_some_rollouts_says_of_how_many(run: Path):
    lines = [{"step": step, "stage": "rl", "reward_mean": 0.1, "num_samples": 64.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        "mine recorded 8 of its about 128 rollouts; --trajectories.every 1 records all" in read_report([run], max_tokens=0).chosen[0].notes
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps({**line, "num_samples": 4.0}) + "\n" for line in lines))
    assert not any("recorded" in note for note in read_report([run], max_tokens=0).chosen[0].notes), "all of them"


def test_the_numbers_of_the_update_are_columns_of_the_tokens_and_colours_of_the_page(run: Path):
    old, ref, weights = (0.0, -0.5, -1.0), (0.0, -0.25, -2.0), (0.0, 0.125, 0.0)
    known = Estimate(reward=1.0, advantages=(0.0, 1.0, 1.0), old_log_probs=old, ref_log_probs=ref, loss_weights=weights)
    record = replace(create_record(0, 0, 1.0, None, ()), estimate=known)
    told = describe_record(record, None)
    tokens = told["tokens"]
    assert (tokens["trainer"], tokens["reference"], tokens["weight"]) == ([0, -0.5, -1], [0, -0.25, -2], [0, 0.125, 0])
    assert tokens["ratio"] == [None, 1, pytest.approx(math.exp(0.25), rel=1e-3)]
    assert find_columns(told) == {"advantage", "log_prob", "mask", "version", "trainer", "reference", "ratio", "weight"}
    page = unpack(render(read_report([run], max_tokens=0)), "index")
    assert [column["key"] for column in page["columns"]] == [
        *("advantage", "log_prob", "reason", "update_ratio", "updated", "mask", "version")
    ], "those that the run has"
    write_records(run / "rl" / "trajectories" / "step_0003.jsonl", [record])
    labels = {column["label"] for column in unpack(render(read_report([run], max_tokens=0)), "index")["columns"]}
    assert {"trainer log-prob", "reference log-prob", "ratio of trainer to rollout", "loss weight"} < labels


def test_the_sets_that_tokens_were_drawn_from_are_told_by_their_sizes():
    kept = KeptTokens(data=np.array([3, 6, 9], dtype="<i4").tobytes(), counts=(-1, 3, 0))
    tokens = describe_record(create_record(0, 0, 1.0, 1.0, (1.0,), kept_tokens=kept), None)["tokens"]
    assert tokens["choices"] == [None, 3, 0]
    assert "choices" not in describe_record(create_record(0, 0, 1.0, 1.0, (1.0,)), None)["tokens"]


def test_whole_groups_are_taken_spread_over_the_step():
    sizes = dict.fromkeys(range(10), 12)  # 10 groups of 4 samples of 3 tokens
    assert sorted(take_groups(sizes, 36)) == [0, 3, 6]
    assert take_groups(sizes, 1) == {0}, "one group at least"
    assert take_groups(sizes, 0) == take_groups(sizes, 120) == set(range(10)) and take_groups({}, 5) == set()


def test_what_was_left_out_is_said(run: Path):
    chosen = choose_rollouts(run, 0, max_tokens=12)
    assert (chosen.num_shown, chosen.num_total) == (4, 8) and "4 of the 8 recorded rollouts of mine are in this file" in chosen.notes[0]


def test_values_that_json_lacks_become_text():
    assert to_json({1: (float("inf"), {"a": Path("x")})}) == {"1": ["inf", {"a": "x"}]}


def test_a_line_that_is_being_written_is_left_out_and_a_damaged_one_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "stage": "rl"}\n{"step": 2, "st')
    assert [line["step"] for line in read_lines(path)] == [1]
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        read_lines(path)
    path.write_text('[1]\n{"step": 3}\n')
    with pytest.raises(DataError, match="expected a JSON object with a step"):
        read_lines(path)


def test_what_is_no_run_is_told(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"neither config\.json nor metrics\.jsonl; it holds the runs mine"):
        read_run(tmp_path)
    for arguments, told in (
        ([str(tmp_path / "no")], "there is no directory"),
        ([], "no run is named"),
        ([str(run), "--max-tokens", "-1"], "--max-tokens is -1"),
        ([str(run), "--serve", "--output", "x.html"], "--serve writes no file"),
        ([str(run), "--port", "80"], "--port 80 is read only with --serve"),
        ([str(run), "--output", "/dev/null/x.html"], "cannot be written"),
    ):
        assert main(arguments) == 2
        assert told in capsys.readouterr().err


def test_the_command_writes_one_file(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run)]) == 0
    assert "8 rollouts" in capsys.readouterr().out
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_a_served_run_that_is_damaged_is_told_and_tried_again(run: Path):
    followed = FollowedReport([run], lambda: render(read_report([run], max_tokens=0), live=True))
    good = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("<damaged>\n" + good)
    status, kind, body = followed.respond("/")
    assert (status, kind) == (500, "text/html")
    assert b"metrics.jsonl:1 is not a line of metrics" in body and b"http-equiv=refresh" in body and b"<damaged>" not in body
    (run / "metrics.jsonl").write_text(good)
    assert followed.respond("/")[0] == 200


def test_a_served_report_ends_with_ctrl_c(run: Path):
    command = [sys.executable, "-m", "integration.report", str(run), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "shows the report" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "Traceback" not in said, said


async def test_a_served_report_follows_its_run(run: Path, nursery: trio.Nursery):
    said: list[str] = []
    followed = FollowedReport([run], lambda: render(read_report([run], max_tokens=0), live=True))
    nursery.start_soon(serve, followed.respond, 0, said.append)
    with trio.fail_after(30):
        while not said:
            await trio.sleep(0.01)
        (address,) = re.findall(r"http://[\d.:]+/", said[0])
        assert address.startswith("http://127.0.0.1:")
        async with httpx.AsyncClient(trust_env=False) as client:
            page, state = await client.get(address), await client.get(address + "state")
            assert page.status_code == 200 and len(unpack(page.text, "index")["chunks"]) == 2 and "connect-src 'self'" in page.text
            write_records(run / "rl" / "trajectories" / "step_0003.jsonl", [create_record(0, 0, 1.0, 1.0, (1.0,))])
            assert (await client.get(address + "state")).text != state.text
            assert len(unpack((await client.get(address)).text, "index")["chunks"]) == 3
            assert (await client.get(address + "etc/passwd")).status_code == 404
            assert (await client.post(address)).status_code == 405
            assert (await client.get(address, headers={"host": "evil.example"})).status_code == 403, "no other name may read it"
        stream = await trio.open_tcp_stream("127.0.0.1", int(address.split(":")[-1].strip("/")))
        await stream.send_all(b"\x16\x03\x01 no http\r\n\r\n")
        await stream.aclose()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(address + "state")).status_code == 200, "a request that is no HTTP ends nothing"
    nursery.cancel_scope.cancel()


def test_the_state_of_a_run_changes_with_its_files(run: Path):
    before = describe_state([run])
    assert before == describe_state([run])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "stage": "rl"}\n')
    after = describe_state([run])
    assert after != before
    (run / "warnings.jsonl").write_text('{"logger": "mine", "text": "told before the line of its step"}\n')
    assert describe_state([run]) != after


def test_a_model_is_not_taken_for_a_run(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="is a model, not the directory of a run"):
        read_run(tmp_path)


# -- files of any size


def write_large(path: Path, *, rollouts: int = 160, tokens: int = 500) -> Path:
    """Write a run of one step of many rollouts, eight of a group."""
    columns: dict[str, Any] = {"tokens": tuple(range(300, 300 + tokens)), "loss_mask": (0.0,) + (1.0,) * (tokens - 1)}
    columns |= {"rollout_log_probs": tuple(-k / 7 for k in range(tokens)), "weight_versions": (1,) * tokens}
    records = (create_record(k, k // 8, float(k % 2), None, (), **columns) for k in range(rollouts))
    write_records(path / "rl" / "trajectories" / "step_0001.jsonl", records)
    (path / "metrics.jsonl").write_text('{"step": 1, "stage": "rl", "reward_mean": 0.5}\n')
    return path


def measure_peak(work: Callable[[], object]) -> float:
    """Return the most memory in MB that Python objects take during the work."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def test_report_and_viewer_keep_of_a_file_only_what_they_show(tmp_path: Path):
    run = write_large(tmp_path / "large")
    everything = measure_peak(lambda: read_records(run / "rl" / "trajectories" / "step_0001.jsonl"))
    for work in (
        lambda: choose_rollouts(run, 0, max_tokens=4_000),
        lambda: view(Arguments(path=run, limit=2), colors=False),
        lambda: view(Arguments(path=run, list=True), colors=False),
    ):
        work()  # caches and imports
        assert measure_peak(work) < everything / 4, everything
    assert everything > 4, "the file is too small to tell"


def test_groups_are_read_whole_wherever_their_lines_stand(tmp_path: Path):
    path = tmp_path / "rl" / "trajectories" / "step_0003.jsonl"
    write_records(path, [create_record(k, k % 3, 0.0, None, ()) for k in (5, 0, 1, 2, 3, 4)])
    assert measure_groups(path) == {2: (2, 6), 0: (2, 6), 1: (2, 6)}
    assert [r.sample.index for r in iterate_records(path, {0, 2})] == [5, 0, 2, 3]
    (chunk,) = choose_rollouts(tmp_path, 0, max_tokens=12).chunks
    assert [row[:2] for row in chunk.rows] == [(0, 0), (0, 3), (1, 1), (1, 4)]


def test_warnings_are_kept_once_each_also_of_an_interrupted_and_resumed_run(run: Path, capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("rollouts.somewhere")
    for _ in range(2):  # the second is the resumed run
        with keep_warnings(run) as tell:
            logger.warning("the KL is %s\x1b[31m", 3)
            logger.error("a server ended: http://me:secret@host/")
            logger.info("no warning")
            logging.getLogger("torchao").warning("a kernel was not found")
            tell("warning: a checkpoint is passed over")
            tell("rl.seed is new")
    logger.warning("after the run")
    with (run / "warnings.jsonl").open("a") as file:
        file.write('{"logger": "x", "te')  # cut by a kill
    first, second, third, last = read_run(run).warnings
    assert first.startswith("the KL is 3") and "\x1b" not in first
    assert "a server ended" in second and "secret" not in second
    assert (third, last) == ("a checkpoint is passed over", "the disk was slow")
    assert capsys.readouterr().err.count("rl.seed is new") == 2


def test_a_file_of_warnings_has_an_end(tmp_path: Path):
    with keep_warnings(tmp_path) as tell:
        for k in range(300):
            logging.getLogger("rollouts.somewhere").warning("step %d is slow", k)
            tell(f"warning: took {k / 7} s")
        logging.getLogger("rollouts.somewhere").warning("the disk is full")
    told = read_warnings(tmp_path / "warnings.jsonl")
    assert len(told) == 23 and told[0] == "step 0 is slow" and told[20] == "the disk is full", "what comes later has a place, too"
    assert told[21:] == (
        "290 further warnings of this kind were left out: step %d is slow",
        "290 further warnings of this kind were left out: took N s",
    )
    with keep_warnings(tmp_path):  # the resumed run
        for k in range(300, 315):
            logging.getLogger("rollouts.somewhere").warning("step %d is slow", k)
    told = read_warnings(tmp_path / "warnings.jsonl")
    assert told[21:31] == tuple(f"step {k} is slow" for k in range(300, 310))
    assert [text for text in told if text.endswith("left out: step %d is slow")] == [
        "295 further warnings of this kind were left out: step %d is slow"
    ]


def test_texts_without_a_common_message_end_as_well(tmp_path: Path):
    with keep_warnings(tmp_path) as tell:
        for k in range(300):
            tell("warning: " + "".join("abcdefghij"[int(digit)] for digit in f"{k:03d}"))
    told = read_warnings(tmp_path / "warnings.jsonl")
    assert len(told) == 211 and told[-1] == "90 further warnings of this kind were left out: (other warnings)"


def test_a_killed_run_has_told_that_warnings_are_left_out_and_a_cut_line_costs_no_other(tmp_path: Path):
    path = tmp_path / "warnings.jsonl"
    handler = WarningsFile(path)  # never finished
    for k in range(25):
        handler.keep(f"step {k}", "rollouts", "step %d")
    assert read_warnings(path)[10:] == ("10 or more further warnings of this kind were left out: step %d",)
    with path.open("a") as file:
        file.write('{"logger": "x", "te')
    with keep_warnings(tmp_path) as tell:
        tell("warning: a checkpoint is passed over")
    assert "a checkpoint is passed over" in read_warnings(path)


def test_the_slope_of_the_last_third_has_an_interval():
    noise = (0.01, -0.01, 0.02, -0.02)
    values = [0.0] * 16 + [0.1 * k + noise[k % 4] for k in range(8)]
    expected = np.polyfit(range(8), values[-8:], 1, cov=True)
    slope, error = expected[0][0], 2 * math.sqrt(expected[1][0][0])
    interval = f"{slope:.2g} a step over its last 8 steps (between {slope - error:.2g} and {slope + error:.2g})"
    assert judge_trend(values, "reward", 1) == f"still learning: the reward rises by {interval}"
    assert judge_trend([-value for value in values], "loss", -1) == f"still learning: the loss falls by {interval}"


def test_a_rise_before_the_last_third_is_no_sign_that_a_run_still_learns():
    """The last quarter is above the one before, and the interval of the slope over the last third holds 0."""
    plateau = [0.5, 0.52, 0.48] * 4
    values = [0.02 * k for k in range(18)] + plateau[:6] + [value + 0.02 for value in plateau[6:]]
    told = judge_trend(values, "mean reward", 1)
    assert told.startswith("no longer clearly learning: the mean reward has no clear trend over its last 10 steps (-")
