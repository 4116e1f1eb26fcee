"""The benchmarks of asynchronous RL, on runs that are small or made up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks import async_learning, async_overlap, async_threads
from integration.settings.command_line import parse_command_line


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "least", "most"), [(None, 0.0, 0.6), (1, 0.95, 1.0)])
def test_stages_of_equal_length_overlap_almost_entirely(staleness: int | None, least: float, most: float):
    """Time is virtual: what is lost against the slower stage is lost to the loop."""
    arguments, clock = argparse.Namespace(prompts=4, steps=7), async_overlap.WorkClock()
    figures = trio.run(async_overlap.run_loop, clock, arguments, 1.0, staleness, clock=clock.mock)
    assert least <= figures["of_the_bound"] <= most + 1e-6


def test_a_run_without_free_cores_is_done_again_and_the_one_that_had_most_is_kept():
    runs = [async_threads.Timed(1.0, 1.0, cores, 1.0) for cores in (0.9, 1.3, 1.9, 2.0)]

    def take(many: list[async_threads.Timed]) -> Any:
        left = iter(many)
        return lambda: next(left)

    assert async_threads.run_quietly(take(runs), min_cores=1.8, tries=5).cores == 1.9
    assert async_threads.run_quietly(take(runs), min_cores=1.8, tries=2).cores == 1.3


@pytest.mark.parametrize("correction", async_learning.CORRECTIONS)
def test_every_correction_is_a_setting_of_the_main_job(correction: str):
    config = parse_command_line(async_learning.create_arguments(correction, "grpo()", 4)).config
    assert config.asynchronous.enabled and config.asynchronous.max_staleness == 4
    assert config.asynchronous.segment_wise is (correction == "segment-wise")
    assert ("prox_log_probs" in config.algorithm.requires) is (correction != "none")


@pytest.mark.usefixtures("matplotlib")
def test_learning_curves_are_summed_up_and_drawn(tmp_path: Path):
    run = {"seed": 0, "seconds": 2.0, "accuracy": [0.2, 0.4, 0.6], "reward": [0.3, 0.5], "staleness": [0.0, 1.0], "ratio_kl": [0.0, 0.1]}
    runs = {async_learning.name_contender("none", 1): [run, {**run, "seed": 1, "accuracy": [0.2, 0.5], "reward": [0.5]}]}
    (row,) = async_learning.summarize(runs).values()
    assert row == pytest.approx(
        {"seeds": 2, "accuracy_before": 0.2, "accuracy_after": 0.55, "worst_seed": 0.5, "reward_all": 0.45, "staleness": 0.5}
    )
    async_learning.draw(runs, [1], ["none"], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
