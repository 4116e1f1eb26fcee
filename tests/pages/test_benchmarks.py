"""Reports of the benchmarks, on made-up runs."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from benchmarks import against_trl, algorithms, async_executor, fsdp, memory
from benchmarks.measure import memory_mb
from integration.dry_run.memory import PROCESS_BYTES, Training, heap_bytes, training_parts
from integration.dry_run.sizes import read_sizes
from integration.run.stages import create_task
from integration.settings.command_line import parse_command_line
from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import save_config
from rollouts.rewards.answers import exact_match
from rollouts.testing import create_tiny_model
from rollouts.types import Prompt, Sample
from tests.support import needs


def test_times_are_relative_to_the_default_jobs_algorithm_on_the_same_seeds_and_seeds_are_counted():
    def run(seed: int, seconds: float) -> dict[str, Any]:
        return {"seed": seed, "seconds": seconds, "accuracy": [0.5, 0.9], "reward": [0.4, 0.8]}

    table = algorithms.summarize({"grpo()": [run(0, 10.0), run(1, 20.0)], "ppo()": [run(1, 30.0)], "rloo()": [run(2, 5.0)]})
    assert {name: (row["seeds"], row["time_ratio"]) for name, row in table.items() if name != "rloo()"} == {
        "grpo()": (2, 1.0),
        "ppo()": (1, 1.5),
    }
    assert math.isnan(table["rloo()"]["time_ratio"])


@pytest.mark.parametrize(("failing", "status"), [((), 0), (("rloo()",), 1), (("grpo()", "rloo()"), 1)])
def test_a_run_that_fails_shows_in_the_exit_status(
    failing: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def train_sft(arguments: Any, directory: Path) -> float:
        (directory / "sft" / "checkpoints" / "step_0001").mkdir(parents=True)
        return 1.0

    def train(algorithm: str, seed: int, *others: Any) -> dict[str, Any]:
        if algorithm in failing and seed == 1:
            raise RuntimeError("out of memory")
        return {"seed": seed, "seconds": 2.0, "accuracy": [0.5, 0.9], "reward": [0.4, 0.8]}

    monkeypatch.setattr(algorithms, "run_training", train_sft)
    monkeypatch.setattr(algorithms, "train_algorithm", train)
    monkeypatch.setattr("sys.argv", ["algorithms", "--seeds", "0", "1", "--algorithms", "rloo()"])
    assert algorithms.main() == status
    printed = capsys.readouterr().out
    assert f"{len(failing)} of 4 runs failed" in printed and "grpo()" in printed


def test_every_contender_of_the_executor_benchmark_gives_the_groups_that_were_asked_for():
    num_groups = 2 * async_executor.BATCH_SIZE
    assert async_executor.run_manager(num_groups, scored=True) == num_groups
    for order in ("finished", "submitted"):
        asynchronous = async_executor.AsyncConfig(max_staleness=1, order=order)
        assert async_executor.run_executor(num_groups, scored=True, asynchronous=asynchronous) == num_groups


def test_a_race_ends_at_the_threshold_and_adds_up_the_seconds_of_steps():
    race = against_trl.Race(0.8)
    race.log({"eval_accuracy": 0.9}, 0)  # the model before RL
    race.log({"eval_accuracy": 0.7, "step_s": 1.5, "generate_s": 0.5, "evaluate_s": 9.0}, 1)
    assert not race.is_over() and math.isnan(race.result()["cpu_s"])
    race.log({"eval_accuracy": 0.8, "step_s": 2.5, "generate_s": 1.0, "evaluate_s": 9.0}, 2)
    race.log({"eval_accuracy": 0.7, "step_s": 2.5, "generate_s": 1.0}, 3)  # the loop learns of the end one step later
    assert race.is_over() and race.stages["generate_s"] == 1.5
    assert race.result() == {"steps": 2, "accuracy": 0.8, "cpu_s": 4.0, "cpu_s_per_step": 2.0}


def test_seeds_for_which_a_contender_misses_the_threshold_count_in_no_median():
    seconds = {0: (1.0, 2.0), 1: (3.0, 4.0), 2: (math.nan, 5.0), 3: (6.0, 8.0)}
    rows = {
        f"seed {seed}, {name}": {"cpu_s": s} for seed, pair in seconds.items() for name, s in zip(("rollouts", "TRL"), pair, strict=True)
    }
    assert against_trl.summarize(rows, [0, 1, 2, 3]) == {
        "seeds": 3, "rollouts_cpu_s": 3.0, "TRL_cpu_s": 4.0, "ratio": 0.75, "ratio_lowest": 0.5, "ratio_highest": 0.75,
    }  # fmt: skip
    assert against_trl.summarize(rows, [2]) == {"seeds": 0}


@pytest.mark.parametrize(("digits", "ended", "reward"), [("0347", True, 1.0), ("0347", False, 0.0), ("0374", True, 0.0), ("", True, 0.0)])
def test_a_response_of_trl_is_judged_by_the_reward_of_the_task(digits: str, ended: bool, reward: float):
    tokenizer = create_char_tokenizer()
    ids = [*tokenizer(digits, add_special_tokens=False)["input_ids"], *([tokenizer.eos_token_id] if ended else [])]
    prompt = Prompt(content="s7304=", metadata={"ground_truth": "0347"})
    assert exact_match(against_trl.read_response(prompt, ids, tokenizer)) == reward


def test_trl_is_told_the_settings_of_the_run_and_other_algorithms_are_refused():
    config = parse_command_line(["--task", "sort-long", "--rl.num-steps", "5", "--rl.num-minibatches", "4", "--seed", "3"]).config
    task = create_task(config, create_char_tokenizer(), "rl")
    told = against_trl.translate_settings(config, task)
    assert (told["per_device_train_batch_size"], told["steps_per_generation"], told["max_steps"]) == (128, 4, 20)
    assert (told["num_generations"], told["max_completion_length"], told["seed"]) == (8, 10, 3)
    with pytest.raises(AssertionError, match="'dapo', and only 'grpo' is translated"):
        against_trl.translate_settings(replace(config, rl=replace(config.rl, algorithm="dapo")), task)


def create_race_config(directory: Path) -> Config:
    """Three RL steps of a tiny model."""
    create_tiny_model().save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    rl = RLSection(num_steps=3, prompts_per_step=2, samples_per_prompt=2)
    return Config(model=ModelSection(path=str(directory)), rl=rl, evaluation=EvaluationSection(num_prompts=4, sampled=False))


def test_the_run_in_a_race_stops_at_the_threshold(tmp_path: Path):
    config = create_race_config(tmp_path / "model")
    for threshold, steps in ((0.0, 1), (2.0, 3)):
        race = against_trl.Race(threshold)
        trio.run(against_trl.race_rollouts, config, race, tmp_path / str(steps))
        assert race.steps == steps and race.seconds >= sum(race.stages.values()) * 0.99 > 0


@pytest.mark.slow
@needs.TRL
def test_trl_runs_the_race_with_the_settings_of_a_run(tmp_path: Path):
    save_config(create_race_config(tmp_path / "model"), tmp_path / "race.json")
    command = [os.environ["TRL_PYTHON"], "-m", "benchmarks.against_trl", "TRL", str(tmp_path / "race.json"), "2.0"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]).stdout
    result = json.loads(printed.splitlines()[-1])
    assert result["steps"] == 3 and math.isnan(result["cpu_s"]) and result["cpu_s_per_step"] > 0


@pytest.mark.slow
def test_the_memory_of_a_full_queue_is_measured_while_all_its_samples_wait(monkeypatch: pytest.MonkeyPatch):
    """In place of memory, whose changes are not of the samples alone, the samples that are alive are counted."""
    gc.collect()
    num_samples = 2 * async_executor.BATCH_SIZE
    monkeypatch.setattr(async_executor, "memory_mb", lambda name: float(sum(type(value) is Sample for value in gc.get_objects())))
    found = async_executor.measure_queue(num_samples)
    assert num_samples <= found["MB"] <= 1.1 * num_samples
    assert found["bytes_per_sample"] == pytest.approx(found["MB"] * 2**20 / num_samples)
    assert found["units_per_cpu_s"] > 0


def test_the_memory_of_this_process_grows_with_what_it_holds():
    before = memory_mb("VmRSS")
    held = b"x" * 2**26
    assert len(held) / 2**20 == 64
    assert 48 < memory_mb("VmRSS") - before < 80
    assert memory_mb("VmHWM") >= memory_mb("VmRSS") > 0


def test_the_time_of_ranks_is_split_into_communication_and_computation():
    times = {"alone": [8.0, 8.0], "together": [5.0, 6.0], "collectives": [0.5, 1.0], "CPU alone": [8.0, 8.0], "CPU of all": [10.0, 9.0]}
    found = {"times": times, "received": 3 * 2**20, "states": (50, 100)}
    table = fsdp.summarize(found, "small", 4, 2)
    assert {name: row["median"] for name, row in table.items() if "formula" not in name} == {
        "one process, s": 8.0,
        "2 ranks, s": 5.5,
        "of it in collectives, s": 0.75,
        "speed-up": pytest.approx((8 / 5 + 8 / 6) / 2),
        "time beyond 1 / ranks": pytest.approx(0.375),
        "of it communication": pytest.approx(0.1875),
        "of it computation": pytest.approx(0.1875),
        "CPU seconds of all / one process": pytest.approx(1.1875),
        "MiB received by a rank": 3.0,
        "states of a rank / one process": 0.5,
    }
    assert (table["2 ranks, s"]["lowest"], table["2 ranks, s"]["highest"]) == (5.0, 6.0)


def test_the_estimate_beside_measured_memory_is_that_of_a_dry_run():
    sizes = read_sizes(memory.create_config("small"))
    parts = training_parts(sizes, Training(tokens=256))
    tensors = sum(part.size for part in parts)
    assert memory.estimate("small", 256, 1, "cuda") == tensors
    assert memory.estimate("small", 256, 1, "cpu") == tensors + PROCESS_BYTES + heap_bytes(sizes, Training(tokens=256), parts)
    assert memory.estimate("small", 256, 2, "cuda") < tensors
    assert memory.read_results('noise\n{"peak": 1.0}{"peak": 2.0}\n') == [{"peak": 1.0}, {"peak": 2.0}]
