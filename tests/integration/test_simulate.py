"""The simulator: engines and trainer cost what they say, lengths are what was asked for, and runs come out as worked out by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from integration.simulate.__main__ import main, parse_arguments
from integration.simulate.engine import SimulatedFleet
from integration.simulate.lengths import ResponseLengths, read_lengths
from integration.simulate.run import simulate
from integration.simulate.settings import EngineSection, LengthSection, Simulation, TrainerSection
from integration.simulate.trainer import SimulatedBackend, create_idle_algorithm
from rollouts.asynchronous.config import AsyncConfig
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError, DataError, EngineError
from rollouts.training.rollout_batch import train_on_rollouts
from rollouts.types import Group, Prompt, Sample, Status

SMALL = {"engines": 2, "slots": 8, "prefill_rate": 1e9, "sync_s": 1.0}


def create_simulation(*, engine: Any = None, length: Any = None, trainer: Any = None, asynchronous: Any = None, **rest: Any) -> Simulation:
    """16 slots for groups of 4, 100 tokens each at 10 tokens a second, steps of 4 groups: 10 s to generate a batch, 5 s to train on it."""
    return Simulation(
        engine=EngineSection(**{**SMALL, "token_rate": 10.0, **(engine or {})}),
        length=LengthSection(**{"distribution": "constant", "mean_tokens": 100.0, **(length or {})}),
        trainer=TrainerSection(**{"samples_per_prompt": 4, "train_s": 5.0, **(trainer or {})}),
        asynchronous=AsyncConfig(enabled=True, **(asynchronous or {})),
        **{"hours": 0.25, **rest},
    )


# -- lengths


@pytest.mark.parametrize(
    ("section", "mean", "tolerance"),
    [
        (LengthSection(distribution="constant", mean_tokens=300), 300.0, 0.0),
        (LengthSection(distribution="lognormal", mean_tokens=500, sigma=0.5, max_tokens=10**6), 500.0, 0.03),
        (LengthSection(distribution="pareto", mean_tokens=500, tail=3.0, max_tokens=10**6), 500.0, 0.03),
    ],
)
def test_lengths_have_the_mean_that_was_asked_for(section: LengthSection, mean: float, tolerance: float):
    lengths = ResponseLengths(section, 8, seed=0)
    drawn = [length for index in range(4000) for length in lengths.of_group(index)]
    assert np.mean(drawn) == pytest.approx(mean, rel=tolerance)
    assert min(drawn) >= 1


def test_lengths_depend_on_seed_prompt_and_attempt_alone_and_are_cut():
    section = LengthSection(mean_tokens=500, max_tokens=600)
    one, other = ResponseLengths(section, 4, seed=3), ResponseLengths(section, 4, seed=3)
    later = other.of_group(5000)
    assert one.of_group(7) == other.of_group(7) and one.of_group(5000) == later
    assert one.of_group(7, attempt=1) == other.of_group(7, attempt=1) != one.of_group(7)
    assert one.of_group(7) != ResponseLengths(section, 4, seed=4).of_group(7)
    assert max(length for index in range(200) for length in one.of_group(index)) == 600


def test_measured_lengths_are_numbers_or_samples_and_a_bad_line_is_named(tmp_path: Path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('12\n\n30.0\n{"tokens": [1, 2, 3], "loss_mask": [0, 1, 1.0]}\n')
    assert read_lengths(path).tolist() == [12.0, 30.0, 2.0]
    drawn = ResponseLengths(LengthSection(file=str(path)), 64, seed=0).of_group(0)
    assert set(drawn) == {12, 30, 2}
    path.write_text("12\n-3\n")
    with pytest.raises(DataError, match=r"lengths.jsonl:2 is '-3'"):
        read_lengths(path)
    with pytest.raises(ConfigError, match="cannot read the lengths"):
        read_lengths(tmp_path / "none")


# -- engines


def create_fleet(num_tokens: float = 10, num_samples: int = 2, **section: Any) -> SimulatedFleet:
    lengths = ResponseLengths(LengthSection(distribution="constant", mean_tokens=num_tokens), num_samples, seed=0)
    return SimulatedFleet(
        EngineSection(**{"engines": 1, "slots": 2, "token_rate": 1.0, "prefill_rate": 1e9, "sync_s": 5.0, **section}), lengths
    )


async def generate(fleet: SimulatedFleet, index: int, ends: dict[int, tuple[float, Group]], partial: Group = ()) -> None:
    group = await fleet.generate_group(Prompt(content="p", index=index), partial)
    ends[index] = (round(trio.current_time(), 3), group)


async def test_groups_wait_for_slots_in_the_order_of_their_prompts(autojump_clock: trio.testing.MockClock):
    fleet, ends = create_fleet(), dict[int, tuple[float, Group]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        async with trio.open_nursery() as groups:
            for index in (2, 0, 1):
                groups.start_soon(generate, fleet, index, ends)
        assert fleet.count_busy_slots() == 0
        nursery.cancel_scope.cancel()
    assert {index: end for index, (end, _) in ends.items()} == {0: 10.0, 1: 20.0, 2: 30.0}
    assert fleet.active_seconds() == pytest.approx(60.0)
    assert ends[0][1][0].loss_mask == (0.0, 20.0)


@pytest.mark.parametrize(("kv_cache", "end"), [("keep", 15.0), ("recompute", 15.0 + (2 * 4 + 2 * 512) / 1000)])
async def test_engines_stand_still_for_new_weights_and_tokens_are_stamped(
    kv_cache: Any, end: float, autojump_clock: trio.testing.MockClock
):
    fleet, ends = create_fleet(kv_cache=kv_cache, prefill_rate=1000.0), dict[int, tuple[float, Group]]()
    read_s = 512 / 1000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        nursery.start_soon(generate, fleet, 0, ends)
        await trio.sleep(4 + read_s)
        await fleet.update_weights({}, 1)
        assert await fleet.get_weight_version() == 1
        while not ends:
            await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert ends[0][0] == pytest.approx(end + read_s, abs=1e-3)
    (sample,) = ends[0][1]
    assert sample.weight_versions == (-1, 0, 1)
    assert sample.loss_mask == (0.0, 8.0, 12.0)


async def test_an_interrupted_group_goes_on_from_its_tokens(autojump_clock: trio.testing.MockClock):
    fleet, ends = create_fleet(), dict[int, tuple[float, Group]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        async with trio.open_nursery() as groups:
            groups.start_soon(generate, fleet, 0, ends)
            await trio.sleep(7)
            await fleet.abort()
        (stopped,) = ends[0][1]
        assert (stopped.status, sum(stopped.loss_mask)) == (Status.ABORTED, 14.0)
        await fleet.update_weights({}, 1)
        await generate(fleet, 0, ends, (stopped,))
        nursery.cancel_scope.cancel()
    end, (sample,) = ends[0]
    assert end == pytest.approx(7 + 5 + 3)
    assert (sample.status, sample.weight_versions, sample.loss_mask) == (Status.COMPLETED, (-1, 0, 1), (0.0, 14.0, 6.0))
    assert fleet.active_seconds() == pytest.approx(20.0)


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_slots_of_a_group_that_is_taken_out_go_to_those_that_wait(how: str, autojump_clock: trio.testing.MockClock):
    fleet, ends = create_fleet(), dict[int, tuple[float, Group]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        async with trio.open_nursery() as groups:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as first:
                    first.start_soon(generate, fleet, 0, ends)
                    groups.start_soon(generate, fleet, 1, ends)
                    await trio.sleep(4)
                    if how == "abort":
                        await fleet.abort(["000000000000-0001"])
                    else:
                        scope.cancel()
        nursery.cancel_scope.cancel()
    assert ends[1][0] == pytest.approx(14.0)
    assert ends[1][1][0].status is Status.COMPLETED
    assert fleet.active_seconds() == pytest.approx(2 * 4 + 20.0)


async def test_so_many_groups_fail_and_a_further_attempt_may_succeed(autojump_clock: trio.testing.MockClock):
    fleet, failed = create_fleet(failure_rate=0.3, slots=2000), list[int]()

    async def attempt(index: int) -> None:
        try:
            await fleet.generate_group(Prompt(content="p", index=index))
        except EngineError:
            failed.append(index)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.run)
        async with trio.open_nursery() as groups:
            for index in range(500):
                groups.start_soon(attempt, index)
        num_failed = len(failed)
        async with trio.open_nursery() as groups:
            for index in list(failed):
                groups.start_soon(attempt, index)
        nursery.cancel_scope.cancel()
    assert num_failed / 500 == pytest.approx(0.3, abs=0.06)
    assert (len(failed) - num_failed) / num_failed == pytest.approx(0.3, abs=0.12)
    assert fleet.num_failures == len(failed)


# -- trainer


async def test_a_training_step_takes_its_time_and_tokens_count_as_often_as_they_stand_for(autojump_clock: trio.testing.MockClock):
    backend = SimulatedBackend(TrainerSection(train_s=7.0, train_rate=100.0))
    sample = Sample(tokens=(0, 0), loss_mask=(0.0, 500.0), rollout_log_probs=(0.0, -0.5), weight_versions=(-1, 0), reward=1.0)
    batch = collate_samples([sample], pad_id=0, require_rewards=True)
    await train_on_rollouts(backend, batch, create_idle_algorithm())
    assert trio.current_time() == pytest.approx(7.0 + 5.0)
    assert backend.busy_s == pytest.approx(12.0)


# -- runs


def test_the_synchronous_loop_takes_generation_and_training_one_after_the_other():
    report = simulate(create_simulation(synchronous=True))
    period = 10.0 + 5.0 + 1.0
    assert report.num_steps == pytest.approx(report.virtual_s / period, abs=1)
    assert report.staleness_max == 0 and report.wasted_fraction == pytest.approx(0.0, abs=0.02)
    assert report.engine_utilization == pytest.approx(10 / period, abs=0.03)
    assert report.trainer_utilization == pytest.approx(5 / period, abs=0.03)


def test_the_asynchronous_loop_gets_close_to_the_slower_stage_and_stays_within_its_staleness():
    report = simulate(create_simulation(asynchronous={"max_staleness": 2}, engine={"kv_cache": "keep"}))
    assert report.bound_samples_per_s == pytest.approx(16 / (10.0 + 1.0))
    assert report.bound_fraction > 0.93
    assert report.limited_by == "engines"
    assert report.staleness_max <= 2
    assert sum(report.staleness.values()) == pytest.approx(1.0)


def test_a_slow_trainer_is_what_limits_a_run():
    report = simulate(create_simulation(trainer={"train_s": 60.0}, asynchronous={"max_staleness": 1}))
    assert report.limited_by == "trainer"
    assert report.trainer_utilization > 0.9
    assert report.bound_fraction > 0.93


def test_partial_rollouts_save_what_beginning_anew_loses():
    lengths = {"distribution": "lognormal", "mean_tokens": 200.0}
    kept, lost = (
        simulate(
            create_simulation(length=lengths, engine={"keep_partial": keep}, asynchronous={"max_staleness": 4, "in_flight": "interrupt"})
        )
        for keep in (True, False)
    )
    assert lost.wasted_fraction > kept.wasted_fraction + 0.1
    assert lost.samples_per_s < kept.samples_per_s
    assert lost.length_bias < kept.length_bias


def test_failures_and_refused_groups_are_waste_and_the_run_goes_on():
    report = simulate(
        create_simulation(
            engine={"failure_rate": 0.05},
            refused_fraction=0.25,
            asynchronous={"max_staleness": 2, "on_failure": "drop", "on_stale": "drop"},
        )
    )
    assert report.num_failures > 0
    assert report.wasted_fraction > 0.2
    assert report.bound_samples_per_s == pytest.approx(16 / (10.0 / 0.75 + 1.0))
    assert report.bound_fraction > 0.7


@pytest.mark.parametrize("more", [{}, {"in_flight": "interrupt"}, {"order": "submitted"}])
def test_the_same_settings_give_the_same_figures(more: dict[str, Any]):
    simulation = create_simulation(length={"distribution": "lognormal"}, asynchronous={"max_staleness": 2, **more}, hours=0.1)
    first, second = simulate(simulation).to_dict(), simulate(simulation).to_dict()
    assert first == second


LOGNORMAL = {"distribution": "lognormal", "mean_tokens": 500.0, "sigma": 1.2}


@pytest.mark.parametrize(
    "settings",
    [
        {"length": {}},
        {"asynchronous": {"max_staleness": 0}},
        {"asynchronous": {"max_staleness": 3, "order": "submitted"}, "trainer": {"sync_every": 2, "score_rate": 1000.0}},
        {"asynchronous": {"max_staleness": 2, "in_flight": "interrupt"}, "length": {}},
        {"asynchronous": {"max_staleness": 2, "enable_segment_wise_ppo": True}, "trainer": {"train_s": 0.0, "score_rate": 1000.0}},
        {"asynchronous": {"max_staleness": 2, "max_concurrent_rollouts": 3, "queue_size": 8, "when_queue_full": "wait"}},
        {"engine": {"failure_rate": 0.1, "engines": 4, "keep_partial": False}, "asynchronous": {"on_failure": "drop", "on_stale": "drop"}},
        {"engine": {"failure_rate": 0.05}, "asynchronous": {"retry_delay_s": 1.5, "max_attempts": 9, "rollout_timeout_s": 90.0}},
        {"refused_fraction": 0.2, "engine": {"kv_cache": "keep"}, "length": {"distribution": "pareto", "mean_tokens": 300.0}},
    ],
)
def test_groups_without_tasks_have_the_figures_of_groups_with_tasks(settings: dict[str, Any]):
    simulation = create_simulation(**{"length": LOGNORMAL, "hours": 0.12, **settings})
    one, other = simulate(simulation), simulate(simulation, by_tasks=True)
    assert one.num_steps > 1
    assert (repr(one), one.moments, one.steps) == (repr(other), other.moments, other.steps)


def print_figures() -> None:
    """Print all that is known of runs in which many things happen at one moment: aborts, failures, weight syncs, moments recorded."""
    modes: list[dict[str, Any]] = [
        {"asynchronous": {"in_flight": in_flight, "max_staleness": staleness}, "engine": {"keep_partial": keep, "engines": 4}}
        for keep in (False, True)
        for in_flight, staleness in (("interrupt", 0), ("continue", 1))
    ]
    failing = {"asynchronous": {"on_failure": "drop"}, "engine": {"failure_rate": 0.1, "keep_partial": False}, "refused_fraction": 0.2}
    for mode in (*modes, failing, {"synchronous": True, "over_sampling_factor": 1.5, "engine": {"keep_partial": False}}):
        for length in (LOGNORMAL, {}):
            report = simulate(create_simulation(**{"hours": 0.1, "length": length, **mode}))
            print((report, report.moments, report.steps))
    many_aborts = Simulation(  # several at one moment, whose order once decided the last digits
        engine=EngineSection(engines=4, slots=16, keep_partial=False),
        length=LengthSection(mean_tokens=4000.0, sigma=1.2),
        trainer=TrainerSection(train_s=20.0),
        asynchronous=AsyncConfig(enabled=True, max_staleness=2),
        hours=0.3,
    )
    for _ in range(4):
        print(simulate(many_aborts))


def test_another_process_gives_the_same_figures_in_every_mode(capsys: pytest.CaptureFixture[str]):
    print_figures()  # trio orders the tasks of one moment by chance, and otherwise in each process
    here = capsys.readouterr().out.splitlines()
    program = "from tests.integration.test_simulate import print_figures; print_figures()"
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(here) == 16 and len(set(here[-4:])) == 1
    assert there == here


def test_figures_that_a_run_without_a_step_does_not_have_are_null_in_json():
    report = replace(simulate(create_simulation(hours=0.01)), staleness_mean=math.nan, length_mean=math.nan, length_bias=math.nan)
    figures = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert [figures[name] for name in ("staleness_mean", "length_mean", "length_bias")] == [None] * 3
    assert figures["num_steps"] == report.num_steps


def test_settings_that_cannot_be_simulated_are_refused():
    for section, settings in (
        (EngineSection, {"engines": 0}),
        (EngineSection, {"token_rate": 0.0}),
        (EngineSection, {"failure_rate": 1.0}),
        (LengthSection, {"tail": 1.0}),
        (LengthSection, {"mean_tokens": math.inf}),
        (TrainerSection, {"train_rate": -1.0}),
        (Simulation, {"hours": 0.0}),
        (Simulation, {"refused_fraction": 1.0}),
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            section(**settings)


# -- command line


def test_commands_of_the_guide_are_understood():
    guide = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    commands = [line.split("integration.simulate ")[1] for line in guide.splitlines() if line.startswith("python -m integration.simulate ")]
    assert len(commands) >= 6
    for command in commands:
        assert parse_arguments(command.split()).simulation.hours >= 1.0


@pytest.mark.usefixtures("matplotlib")
def test_the_command_line_prints_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "run.png"
    arguments = "--engines 2 --slots 8 --hours 0.2 --mean-tokens 100 --token-rate 10 --train-s 5 --max-staleness 2 --json --picture"
    assert main([*arguments.split(), str(picture)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_steps"] > 0 and 0 < figures["engine_utilization"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_tells_what_limits_a_run(capsys: pytest.CaptureFixture[str]):
    assert main("--engines 2 --slots 8 --hours 0.1 --mean-tokens 100 --token-rate 10 --train-s 60 --synchronous".split()) == 0
    assert "limited by" in capsys.readouterr().out


def test_mistakes_on_the_command_line_end_in_one_message(capsys: pytest.CaptureFixture[str]):
    assert main(["--file", "no-such-file"]) == 2
    assert "cannot read the lengths in no-such-file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--engine-count", "3"])


def test_a_seeded_run_keeps_its_figures():
    simulation = Simulation(
        engine=EngineSection(engines=3, slots=8, failure_rate=0.05),
        length=LengthSection(mean_tokens=500.0),
        trainer=TrainerSection(samples_per_prompt=4, train_s=5.0),
        asynchronous=AsyncConfig(enabled=True, max_staleness=2, in_flight="interrupt"),
        hours=0.05,
        refused_fraction=0.1,
        seed=3,
    )
    figures = simulate(simulation).to_dict()
    recorded = {
        "virtual_s": 183.0009249829191,
        "num_steps": 10,
        "samples_per_s": 1.3114687809496104,
        "tokens_per_s": 609.423149147522,
        "generated_tokens_per_s": 924.8574288509705,
        "engine_utilization": 0.7707145240424753,
        "trainer_utilization": 0.2732226626978355,
        "sync_fraction": 0.1092890650791342,
        "staleness_mean": 0.8685944855413584,
        "wasted_fraction": 0.29612309931283987,
        "length_mean": 464.6875,
        "num_groups_begun_anew": 10,
        "num_failures": 4,
    }
    assert {name: figures[name] for name in recorded} == pytest.approx(recorded, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere/run.png", "there is no folder nowhere"), ("run.abc", "expected a file that ends with")]
)
def test_a_picture_that_cannot_be_written_is_told_before_the_simulation(name: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--hours", "0.01", "--picture", name]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out
