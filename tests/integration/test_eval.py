"""`rollouts eval`: numbers against hand computation, models of every kind, comparisons, and an evaluation that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from test_train import SMALL

from integration import train
from integration.eval.__main__ import main, parse, stopped_by_sigterm
from integration.eval.problems import parse_problems
from integration.eval.summary import choose_ks, compare, summarize, write_table
from integration.run.stages import CHECKPOINTS
from integration.settings.command_line import parse_command_line
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config_files import save_config
from rollouts.testing import FakeSGLangServer, FakeVLLMServer, VLLMSettings, create_tiny_model
from rollouts.training.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def save_model(directory: Path, seed: int = 0) -> Path:
    """A small model of characters whose answers vary."""
    model = create_tiny_model(vocab_size=64, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    return directory


def write_rows(path: Path, num: int = 12) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(num)), encoding="utf-8")
    return path


REWARD = """
from rollouts.seeds import derive_seed

def half_right(sample):
    return float(derive_seed(*sample.tokens) % 2)

def graded(sample):
    return (derive_seed(*sample.tokens) % 5) / 4 - 0.5

def vote(sample):
    return str(derive_seed(*sample.tokens) % 3)

def broken(sample):
    return sample.metadata["missing"]

async def late(sample):
    return "1"
"""


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "reward.py").write_text(REWARD)
    return {
        "model": str(save_model(tmp_path / "model")),
        "other": str(save_model(tmp_path / "other", seed=1)),
        "rows": str(write_rows(tmp_path / "rows.jsonl")),
        "reward": f"{tmp_path}/reward.py",
        "out": str(tmp_path / "out"),
    }


def evaluate(*arguments: str, capsys: Any) -> dict[str, Any]:
    status = main([*arguments, "--json", "--quiet", "--num-threads", "1"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out)


def read_lines(directory: str | Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted(Path(directory).glob("[0-9]*.jsonl"))
    return {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


# -- pure parts


def record(prompt: int, sample: int, reward: float, answer: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "sample": sample,
        "reward": reward,
        "right": reward >= 1,
        "answer": answer,
        "length": 3,
        "status": "completed",
        **more,
    }


def test_a_line_is_what_one_computes_by_hand():
    groups = {
        0: [record(0, 0, 1.0, "4"), record(0, 1, 1.0, "4"), record(0, 2, 0.0, "5", status="truncated", length=9)],
        1: [record(1, 0, 0.0, "7"), record(1, 1, 0.0, "7"), record(1, 2, 1.0, "8")],
        2: [{"prompt": 2, "dropped": 3}],
    }
    line = summarize("m", "t", groups, choose_ks(3))
    assert (line["num_prompts"], line["num_samples"], line["num_dropped"]) == (2, 6, 3)
    assert line["accuracy"]["value"] == line["reward"]["value"] == 0.5
    assert {k: v["value"] for k, v in line["pass_at_k"].items()} == {"1": 0.5, "2": pytest.approx((1 + 2 / 3) / 2), "3": 1.0}
    assert {k: v["value"] for k, v in line["majority_at_k"].items()} == {"2": pytest.approx((2 / 3 + 1 / 3) / 2), "3": 0.5}
    assert (line["response_length_mean"], line["response_length_max"], line["truncated_fraction"]) == (4.0, 9, 1 / 6)
    text = write_table([line], [])
    assert "3 samples of m on t were dropped" in text
    assert choose_ks(8) == (1, 2, 4, 8) and choose_ks(10) == (1, 2, 4, 8, 10) and choose_ks(10, (5,)) == (5,)


def test_a_line_without_a_scored_prompt_has_no_numbers_and_is_shown():
    line = summarize("m", "t", {0: [{"prompt": 0, "dropped": 2}]}, (1, 2))
    assert line["accuracy"] is None and line["num_dropped"] == 2
    assert "-" in write_table([line], [])
    assert compare("t", ("a", {0: [{"prompt": 0, "dropped": 2}]}), ("b", {0: [record(0, 0, 1.0)]})) is None


# -- the command


def test_samples_of_a_data_file_are_summarized_compared_and_kept(parts: dict[str, str], capsys):
    options = [
        "--tasks",
        parts["rows"],
        "--n",
        "4",
        "--reward.function",
        f"{parts['reward']}:half_right",
        "--answer",
        f"{parts['reward']}:vote",
    ]
    found = evaluate(parts["model"], parts["other"], *options, "--generation.max-tokens", "5", "--output-dir", parts["out"], capsys=capsys)
    files = read_lines(parts["out"])
    assert [len(lines) for lines in files.values()] == [48, 48]
    for line, lines in zip(found["results"], files.values(), strict=True):
        assert line["accuracy"]["value"] == sum(r["reward"] for r in lines) / 48
        assert line["accuracy"]["low"] < line["accuracy"]["value"] < line["accuracy"]["high"]
        assert [(r["prompt"], r["sample"]) for r in lines] == [(p, k) for p in range(12) for k in range(4)]
        assert set(line["majority_at_k"]) == {"2", "4"}
    (comparison,) = found["comparisons"]
    assert (comparison["first"], comparison["second"]) == (parts["model"], parts["other"])
    difference = found["results"][1]["accuracy"]["value"] - found["results"][0]["accuracy"]["value"]
    assert comparison["difference"]["value"] == pytest.approx(difference)
    assert 0 < comparison["p_value"] <= 1
    results = [json.loads(line) for line in (Path(parts["out"]) / "results.jsonl").read_text().splitlines()]
    assert results == [*found["results"], *found["comparisons"]]


def test_graded_rewards_are_compared_too_and_the_threshold_says_what_is_right(parts: dict[str, str], capsys):
    options = ["--tasks", parts["rows"], "--reward.function", f"{parts['reward']}:graded", "--threshold", "0.25", "--n", "2"]
    found = evaluate(parts["model"], parts["other"], *options, "--generation.max-tokens", "4", "--output-dir", parts["out"], capsys=capsys)
    assert [comparison["of"] for comparison in found["comparisons"]] == ["accuracy", "reward"]
    lines = next(iter(read_lines(parts["out"]).values()))
    assert all(r["right"] == (r["reward"] >= 0.25) for r in lines)
    assert found["results"][0]["reward"]["value"] == pytest.approx(sum(r["reward"] for r in lines) / len(lines))


def test_several_tasks_stand_in_one_table_and_one_greedy_answer_is_the_default(parts: dict[str, str], capsys):
    arguments = [
        parts["model"],
        "--tasks",
        "sort",
        "sort-long",
        parts["rows"],
        "--num-prompts",
        "5",
        "--output-dir",
        parts["out"],
        "--quiet",
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()[2:5]] == ["sort", "sort-long", parts["rows"]]
    assert "pass@" not in out
    assert main(arguments) == 0  # all is done: the same table
    assert capsys.readouterr().out == out


def test_tasks_whose_names_look_alike_have_files_of_their_own(parts: dict[str, str], tmp_path: Path, capsys):
    """Else each would be counted done by the samples of the other."""
    rows = [write_rows(tmp_path / name, num) for name, num in (("a b.jsonl", 3), ("a_b.jsonl", 5))]
    arguments = [parts["model"], "--tasks", *map(str, rows), "--output-dir", parts["out"]]
    for _ in range(2):  # the second time nothing is left to do
        assert [line["num_prompts"] for line in evaluate(*arguments, capsys=capsys)["results"]] == [3, 5]
        assert [len(lines) for lines in read_lines(parts["out"]).values()] in ([3, 5], [5, 3])


def test_a_run_is_evaluated_as_it_evaluated_itself(tmp_path: Path, capsys):
    assert train.main([*SMALL, "--output-dir", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    last = {line["stage"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["step"]}
    models = [str(tmp_path / "run"), str(tmp_path / "run" / "sft" / CHECKPOINTS / "step_0006")]
    found = evaluate(*models, "--output-dir", str(tmp_path / "out"), capsys=capsys)
    for line, stage in zip(found["results"], ("rl", "sft"), strict=True):
        assert line["num_prompts"] == 16
        assert line["accuracy"]["value"] == last[stage]["eval_accuracy"]
        assert line["response_length_mean"] == last[stage]["eval_response_length_mean"]
    assert main([str(tmp_path / "run"), "--num-prompts", "17", "--output-dir", str(tmp_path / "more")]) == 2
    assert "--num-prompts is 17, but the run holds out 16 problems at most" in capsys.readouterr().err
    sampled = evaluate(str(tmp_path / "run"), "--sampled", "--output-dir", str(tmp_path / "sampled"), capsys=capsys)
    assert sampled["results"][0]["accuracy"]["value"] == last["rl"]["eval_accuracy_sampled"]


def test_a_checkpoint_with_adapters_is_its_merged_model_and_an_adapter_of_peft_is_merged(tmp_path: Path, parts: dict[str, str], capsys):
    assert train.main([*SMALL, "--mode", "sft", "--lora.rank", "2", "--output-dir", str(tmp_path / "run"), "--quiet",
                       "--model.path", parts["model"]]) == 0  # fmt: skip
    capsys.readouterr()
    checkpoint = tmp_path / "run" / "sft" / CHECKPOINTS / "step_0006"
    apart = tmp_path / "apart"
    (checkpoint / "adapter").rename(apart)
    config = json.loads((apart / "adapter_config.json").read_text())
    (apart / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": parts["model"]}))
    options = ["--tasks", parts["rows"], "--n", "2", "--generation.max-tokens", "6", "--output-dir", parts["out"]]
    evaluate(str(checkpoint), str(apart), parts["model"], *options, capsys=capsys)
    merged, by_peft, base = ([r["response"] for r in lines] for lines in read_lines(parts["out"]).values())
    assert merged == by_peft != base


def test_episodes_of_an_environment_are_evaluated(tmp_path: Path, capsys):
    model = save_model(tmp_path / "model")
    found = evaluate(
        str(model), "--tasks", "grid_world", "--num-prompts", "4", "--n", "2", "--output-dir", str(tmp_path / "out"), capsys=capsys
    )
    (line,) = found["results"]
    assert (line["num_prompts"], line["num_samples"]) == (4, 8)
    assert "majority_at_k" not in line


@pytest.mark.parametrize("kind", [FakeVLLMServer, FakeSGLangServer])
async def test_servers_give_what_the_model_they_serve_gives(parts: dict[str, str], capsys, kind: Any):
    options = ["--tasks", parts["rows"], "--generation.max-tokens", "4", "--num-prompts", "4"]
    async with kind(Path(parts["model"])) as one, kind(Path(parts["model"])) as two:
        arguments = [f"{one.url},{two.url}", parts["model"], *options, "--output-dir", parts["out"], "--json", "--quiet"]
        assert await trio.to_thread.run_sync(main, arguments) == 0
    served, loaded = read_lines(parts["out"]).values()
    assert [r["response"] for r in served] == [r["response"] for r in loaded]
    assert len({r["response"] for r in served}) > 1


async def test_a_server_with_a_key_is_evaluated(parts: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys):
    arguments = ["--tasks", parts["rows"], "--generation.max-tokens", "2", "--output-dir", parts["out"], "--quiet"]
    async with FakeVLLMServer(Path(parts["model"]), VLLMSettings(api_key="a-key-of-the-servers")) as server:
        assert await trio.to_thread.run_sync(main, [server.url, *arguments]) == 2
        assert "wants an API key, and none is given" in capsys.readouterr().err
        monkeypatch.setenv("ENGINE_KEY", "a-key-of-the-servers")
        key = ["--engine.kind", "vllm", "--engine.urls", server.url, "--engine.api-key-variable", "ENGINE_KEY"]
        assert await trio.to_thread.run_sync(main, [server.url, *arguments, *key]) == 0


@pytest.mark.parametrize(("name", "said"), [("broken", "--answer failed on .*KeyError"), ("late", "names an async function")])
def test_a_vote_that_fails_is_told(parts: dict[str, str], capsys, name: str, said: str):
    answer = ["--answer", f"{parts['reward']}:{name}", "--generation.max-tokens", "2"]
    assert main([parts["model"], "--tasks", parts["rows"], *answer, "--output-dir", parts["out"], "--quiet"]) == 1
    assert re.search(said, capsys.readouterr().err)


# -- errors, before anything is written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model is named"),
        (["no/such/model"], "MODEL no/such/model is neither a directory"),
        (["nobody/nothing"], "MODEL is 'nobody/nothing', but there is no such directory here"),
        (["http://127.0.0.1:9"], "the server http://127.0.0.1:9 cannot be reached"),
        (["MODEL"], "is not of a run, and no task is named: give --tasks .*rows.jsonl.*built-in sort"),
        (["MODEL", "--tasks", "srot"], "--tasks has 'srot', which is neither a data file here.*sort"),
        (["MODEL", "--tasks", "gsm8k"], "write gsm8k=FILE.jsonl"),
        (["MODEL", "MODEL"], "a model is named twice"),
        (["MODEL", "--n", "2", "--k", "3"], "--k has 3, but there are 2 samples"),
        (["MODEL", "--rl.num-steps", "3"], "--rl.num-steps is about training"),
        (["MODEL", "--tasks", "ROWS", "ROWS"], "twice"),
        (["MODEL", "--tasks", "sort", "--answer", "nowhere.py:f"], "nowhere.py"),
        (["EMPTY"], "EMPTY.*config.json"),
        (["MODEL", "--tasks", "ROWS", "--agent.command", "python a.py"], "agent.command is 'python a.py', but .* starts no program"),
        (["MODEL", "--tasks", "sort", "--engine.kind", "vllm", "--engine.launch"], "name its address as MODEL"),
        (["MODEL", "--tasks", "BARE"], r"bare\.jsonl, line 1: .*expected 'ground_truth' or 'answer'"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_is_written(
    parts: dict[str, str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    names = {"MODEL": parts["model"], "ROWS": parts["rows"], "EMPTY": str(tmp_path / "EMPTY"), "BARE": str(tmp_path / "bare.jsonl")}
    assert main([*(names.get(argument, argument) for argument in arguments), "--output-dir", parts["out"]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path(parts["out"]).exists()


def test_another_evaluation_is_not_mixed_into_a_directory(parts: dict[str, str], capsys):
    options = ["--tasks", parts["rows"], "--num-prompts", "2", "--generation.max-tokens", "2", "--output-dir", parts["out"]]
    evaluate(parts["model"], *options, capsys=capsys)
    assert main([parts["model"], *options, "--seed", "1"]) == 2
    assert "has an evaluation with other settings (tasks differ)" in capsys.readouterr().err


SLOW = """
import sys, time
from pathlib import Path

import integration.eval.records as records
from integration.eval.__main__ import main

add = records.Records.add

def add_slowly(self, prompt, lines):
    add(self, prompt, lines)
    with open(self.path, "a") as file:
        file.write('{"prompt": ')  # what a kill leaves of a line
        file.flush()
        try:
            time.sleep(0.2)
        finally:
            size = self.path.stat().st_size
            file.truncate(size - len('{"prompt": '))

records.Records.add = add_slowly
sys.exit(main(sys.argv[1:]))
"""


def count_lines(directory: str) -> int:
    return sum(file.read_bytes().count(b"\n") for file in Path(directory).glob("1-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_evaluation_that_is_ended_by_a_signal_goes_on_and_ends_with_the_same_results(
    number: int, parts: dict[str, str], tmp_path: Path, capsys
):
    options = ["--tasks", parts["rows"], "--n", "3", "--generation.max-tokens", "6", "--reward.function", f"{parts['reward']}:half_right"]
    whole = evaluate(parts["model"], *options, "--output-dir", str(tmp_path / "whole"), capsys=capsys)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SLOW, parts["model"], *options, "--output-dir", parts["out"]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while (
            time.monotonic() < deadline and sum(text.count(b"\n") for text in (f.read_bytes() for f in Path(parts["out"]).glob("1-*"))) < 6
        ):
            time.sleep(0.02)
        process.send_signal(number)
        told = process.communicate(timeout=100)[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 130), told
    assert (f"stopped: the same command with --output-dir {parts['out']} goes on" in told) == (number == signal.SIGTERM)
    (file,) = Path(parts["out"]).glob("1-*")
    num_done = file.read_bytes().count(b"\n")
    if number == signal.SIGTERM:  # prompts that are answered are still written
        assert 6 <= num_done <= 36
    else:
        assert 6 <= num_done < 36 and not file.read_bytes().endswith(b"\n")
    assert evaluate(parts["model"], *options, "--output-dir", parts["out"], capsys=capsys) == whole
    assert read_lines(parts["out"]) == read_lines(tmp_path / "whole")


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_ends_what_runs_in_the_background_of_a_script_too_where_sigint_is_ignored(of_sigint: Any):
    ends: list[str] = []

    async def wait():
        try:
            with trio.fail_after(30):
                signal.raise_signal(signal.SIGTERM)
                await trio.sleep_forever()
        finally:
            ends.append("tidied up")

    found = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, of_sigint)
    try:
        with pytest.raises(KeyboardInterrupt), stopped_by_sigterm():
            trio.run(wait)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), ends) == (found[0], of_sigint, ["tidied up"])
    finally:
        signal.signal(signal.SIGINT, found[1])


def test_a_run_that_records_steps_of_episodes_is_evaluated_on_rows(parts: dict[str, str], tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    save_config(parse_command_line(["--task", "calculator", "--trajectories.steps"]).config, run / "config.json")
    (run / "run.json").write_text('{"mode": "rl"}')
    command = parse([str(run), "--tasks", parts["rows"]])
    assert [problem.config.task for problem in parse_problems(command.arguments.tasks, command.arguments.config, None)] == ["jsonl"]
