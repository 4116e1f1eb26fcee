"""The built-in tasks and those on the user's data."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import needs
import pytest

from integration.dry_run.checks import check_data_given
from integration.run.stages import create_task
from integration.settings.command_line import parse_command_line
from integration.tasks.own_data import OwnData, create_gsm8k_task, create_jsonl_task
from integration.tasks.task import create_sort_long_task, create_sort_task
from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.datasets import DatasetSpec
from rollouts.errors import ConfigError, DataError
from rollouts.testing import create_tiny_model
from rollouts.training.metrics import read_metrics
from rollouts.types import Prompt, Sample, Status


def digits_of(prompt: Prompt | Sample) -> str:
    text = prompt.content if isinstance(prompt, Prompt) else prompt.prompt
    assert isinstance(text, str)
    return text[1:-1]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_train_and_heldout_problems_are_disjoint_and_each_prompt_knows_its_answer():
    task = create_sort_task(num_train=3000, num_heldout=100)
    heldout = [digits_of(prompt) for prompt in task.heldout_prompts]
    assert len(set(heldout)) == len(heldout) == 100
    assert not set(heldout) & {digits_of(prompt) for prompt in task.train_prompts}
    assert not set(heldout) & {digits_of(sample) for sample in task.sft_samples}
    for prompt in (*task.train_prompts, *task.heldout_prompts):
        assert prompt.metadata["ground_truth"] == "".join(sorted(digits_of(prompt)))
    assert {len(digits_of(prompt)) for prompt in task.train_prompts} == {3, 4, 5, 6}


@pytest.mark.parametrize("wrong_fraction", [0.0, 0.25, 0.5, 1.0])
def test_exactly_the_wanted_fraction_of_demonstrations_is_sorted_the_wrong_way_round(wrong_fraction: float):
    task = create_sort_task(num_train=1000, num_heldout=10, wrong_fraction=wrong_fraction)
    kinds: Counter[str] = Counter()
    for sample in task.sft_samples:
        right = "".join(sorted(digits_of(sample)))
        assert sample.response in (right, right[::-1])
        kinds["same" if right == right[::-1] else "right" if sample.response == right else "wrong"] += 1
    assert kinds["wrong"] <= 1000 * wrong_fraction <= kinds["wrong"] + kinds["same"]  # of problems such as 777 nobody can tell


def test_a_demonstration_is_the_prompt_of_rl_followed_by_the_answer_and_end_of_text():
    tokenizer = create_char_tokenizer()
    task = create_sort_task(tokenizer, num_train=50, num_heldout=10)
    for sample in task.sft_samples:
        assert isinstance(sample.prompt, str)
        prompt = tokenize_prompt(tokenizer, sample.prompt)
        answer = tuple(tokenizer(sample.response, add_special_tokens=False)["input_ids"])
        assert sample.tokens == (*prompt, *answer, tokenizer.eos_token_id)
        assert sample.loss_mask == (0.0,) * len(prompt) + (1.0,) * (len(answer) + 1)
        assert len(answer) + 1 <= task.max_tokens


def test_a_tokenizer_that_merges_digits_gets_the_same_prompt_in_sft_and_rl():
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from transformers import PreTrainedTokenizerFast

    characters = "s0123456789="
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {c: 3 + i for i, c in enumerate(characters)}
    vocabulary |= {"##" + c: 20 + i for i, c in enumerate(characters)} | {f"##{n:02}": 40 + n for n in range(100) if n % 10 != n // 10 + 1}
    model = Tokenizer(WordPiece(vocabulary, unk_token="<unk>"))  # type: ignore[call-arg]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    assert len(tokenize_prompt(tokenizer, "s7304=")) == 4, "the tokenizer of this test merges pairs of digits"
    assert len(tokenize_prompt(tokenizer, "s0123456789=")) == 12, "but none of these, so that one look does not show it"
    for sample in create_sort_task(tokenizer, num_train=20, num_heldout=5).sft_samples:
        assert isinstance(sample.prompt, str)
        prompt = tokenize_prompt(tokenizer, sample.prompt)
        assert sample.tokens[: len(prompt)] == prompt
        assert sample.loss_mask[: len(prompt)] == (0.0,) * len(prompt)
        assert sample.loss_mask[len(prompt) :] == (1.0,) * (len(sample.tokens) - len(prompt))


def test_a_task_is_a_function_of_its_seed():
    first, again, other = (create_sort_task(num_train=200, num_heldout=20, seed=seed) for seed in (3, 3, 4))
    for rows in ("train_prompts", "heldout_prompts", "sft_samples", "heldout_samples"):
        assert tuple(getattr(first, rows)) == tuple(getattr(again, rows)) != tuple(getattr(other, rows))
    assert first.heldout_prompts != other.heldout_prompts


def test_the_reward_wants_the_digits_and_an_end():
    task = create_sort_task(num_train=10, num_heldout=10)
    prompt = task.heldout_prompts[0]
    right = prompt.metadata["ground_truth"]
    sample = replace(task.sft_samples[0], response=right, status=Status.COMPLETED, metadata=prompt.metadata)
    assert task.reward_fn(sample) == 1.0
    assert task.reward_fn(replace(sample, status=Status.TRUNCATED)) == 0.0
    assert task.reward_fn(replace(sample, response=right + "0")) == 0.0
    assert task.reward_fn(replace(sample, response=right[:-1])) == 0.0


def test_the_long_task_is_longer_and_all_its_demonstrations_are_right():
    task = create_sort_long_task(num_train=500, num_heldout=20)
    assert task.name == "sort-long"
    assert {len(digits_of(prompt)) for prompt in task.train_prompts} == {4, 5, 6, 7, 8}
    assert all(sample.response == "".join(sorted(digits_of(sample))) for sample in task.sft_samples)


def test_more_held_out_problems_than_there_are_is_an_error_and_not_an_endless_search():
    with pytest.raises(ConfigError, match=r"2000000 held-out problems .* at most 111100"):
        create_sort_task(num_heldout=2_000_000)


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    rows: list[Any] = [{"question": f"{i}+1", "answer": f"#### {i + 1}"} for i in range(40)]
    rows[3] = "not json"
    rows[38] = {"prompt": "8", "completion": "9", "answer": 9}
    rows[39] = {"prompt": "9", "answer": 10}  # nothing for SFT to learn
    return write_rows(tmp_path / "own.jsonl", rows)


def test_bad_rows_are_named_or_skipped_and_counted_once(own_data: Path):
    with pytest.raises(DataError, match=r"own\.jsonl, line 4"):
        create_jsonl_task(create_char_tokenizer(), OwnData(path=own_data))
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=own_data, skip_bad_rows=True))
    assert task.num_skipped_rows == 2  # line 4 is bad for both views, line 40 for SFT


def test_no_row_that_is_held_out_is_trained_on_even_where_the_two_views_skip_different_rows(own_data: Path):
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=own_data, skip_bad_rows=True))
    assert [prompt.index for prompt in task.heldout_prompts] == [0, 1, 2]
    trained = {sample.response for sample in task.sft_samples}
    assert len(task.train_prompts) == 36 and len(task.sft_samples) in (35, 36)  # line 40 is a problem alone
    assert not any(str(prompt.metadata["answer"]) in trained for prompt in task.heldout_prompts)


def test_a_file_of_held_out_rows_leaves_all_rows_for_training(tmp_path: Path):
    path = write_rows(tmp_path / "train.jsonl", [{"question": str(i), "answer": f"#### {i}"} for i in range(5)])
    heldout = write_rows(tmp_path / "eval.jsonl", [{"question": f"{i}0", "answer": f"#### {i}0"} for i in range(4)])
    task = create_gsm8k_task(create_char_tokenizer(), OwnData(path=path, eval_path=heldout, num_heldout=3))
    assert (len(task.train_prompts), len(task.sft_samples), len(task.heldout_prompts)) == (5, 5, 3)
    with pytest.raises(DataError, match="too few to hold some out"):
        create_gsm8k_task(create_char_tokenizer(), OwnData(path=path))


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data sets of 4, 6 and 20 rows, and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for name, rows in (("a.jsonl", 4), ("more/test.jsonl", 6), ("own.jsonl", 20)):
        write_rows(tmp_path / name, [{"prompt": f"{name[0]}{i}=", "completion": str(i), "answer": str(i)} for i in range(rows)])
    create_tiny_model(vocab_size=64, hidden_size=16, num_layers=1).save_pretrained(tmp_path / "model")
    create_char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_mixture_has_each_row_as_often_as_it_says_in_order(mixed: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--mode", "sft", "--model.path", "model", "--data.eval-fraction", "0"]
    flags += ["--data.mixture", "a.jsonl(repeat=2)", "more(max_samples=3, split='test')"]
    command = parse_command_line(flags)
    assert command.config.task == "jsonl"
    task = create_task(command.config, create_char_tokenizer(), command.mode)
    expected = [f"a{i}=" for i in (0, 1, 2, 3)] * 2 + [f"m{i}=" for i in (0, 1, 2)]
    assert [sample.prompt for sample in task.sft_samples] == expected
    section = f"eval_fraction = 0.0\nmixture = {json.dumps(flags[-2:])}"
    (mixed / "settings.toml").write_text(f"task = 'jsonl'\n[model]\npath = 'model'\n[data]\n{section}\n")
    assert parse_command_line(["--config", "settings.toml", "--mode", "sft"]).config == command.config
    assert main([*flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "a.jsonl: 8 rows, 2 x 4" in shown and "more: 3 rows, 1 x 3" in shown
    assert re.search(r"SFT rows of an epoch +11\n", shown)


def test_renamed_columns_are_those_of_the_problems_where_a_mixture_has_rows_of_its_own(tmp_path: Path):
    mixture = (DatasetSpec(path=str(tmp_path / "chats.jsonl")), DatasetSpec(path=str(tmp_path / "own.jsonl")))
    columns = (("prompt", "query"),)
    both = OwnData(path=tmp_path / "own.jsonl", mixture=mixture, columns=columns)
    assert [spec.columns for spec in both.list_sources("sft")] == [(), columns] and both.list_sources("rl")[0].columns == columns
    assert [spec.columns for spec in OwnData(mixture=mixture, columns=columns).list_sources("sft")] == [columns, columns]


def test_what_is_held_out_of_the_data_is_not_trained_on_by_way_of_the_mixture(mixed: Path):
    flags = ["--model.path", "model", "--data.path", "own.jsonl", "--data.mixture", f"{mixed}/own.jsonl(repeat=3)", "a.jsonl"]
    command = parse_command_line(flags)
    task = create_task(command.config, create_char_tokenizer(), command.mode)
    assert (len(task.train_prompts), len(task.heldout_prompts), len(task.sft_samples)) == (18, 2, 3 * 18 + 4)
    assert not {prompt.content for prompt in task.heldout_prompts} & {sample.prompt for sample in task.sft_samples}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.mixture", "a.jsonl(repeat=0)"], r"data.mixture 'a.jsonl\(repeat=0\)': DatasetSpec.repeat is 0"),
        (["--data.mixture", "a.jsonl(repeat=x)"], "found the name 'x' .* expected a whole number"),
        (["--data.mixture", "a.jsonl(2, 3, 'x', 'y', 4, '', 5)"], "one argument too many"),
        (["--data.mixture", "a.jsonl(repeats=2)"], "unknown argument 'repeats' .*did you mean 'repeat'"),
        (["--data.mixture", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--data.mixture", "a.jsonl", "--task", "sort"], "generates its own data, but --data.mixture is a.jsonl"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_found_before_anything_is_written(flags: list[str], message: str, mixed: Path):
    with pytest.raises(ConfigError, match=message):
        command = parse_command_line(["--mode", "sft", "--model.path", "model", *flags])
        check_data_given(command.config, command.mode)


def test_a_resumed_run_goes_through_a_mixture_in_the_same_order_or_says_that_it_cannot(mixed: Path, capsys: pytest.CaptureFixture[str]):
    flags = ["--mode", "sft", "--model.path", "model", "--data.mixture", "a.jsonl(repeat=2)", "more(split='test')", "--num-threads", "1"]
    flags += ["--data.eval-fraction", "0"]
    flags += [
        "--sft.batch-size",
        "3",
        "--sft.log-every",
        "1",
        "--checkpoint.sft-every",
        "1",
        "--quiet",
        "--sft.optimizer.schedule",
        "constant",
    ]
    assert main([*flags, "--output-dir", "whole", "--sft.num-steps", "4"]) == 0
    half = [*flags, "--output-dir", "half", "--sft.num-steps"]
    assert main([*half, "2"]) == 0
    assert main([*half, "4", "--resume"]) == 0
    rows = {name: [row["loss"] for row in read_metrics(mixed / name / "metrics.jsonl")] for name in ("whole", "half")}
    assert rows["whole"] == rows["half"] and len(rows["half"]) == 4
    with (mixed / "a.jsonl").open("a") as file:
        file.write('{"prompt": "a9=", "completion": "9"}\n')
    assert main([*half, "6", "--resume"]) != 0
    assert "its lines are the same up to there, 1 more of them. Restore them" in capsys.readouterr().err
    assert main([*half, "6", "--resume", "--accept-changed-data"]) != 0
    assert "was trained on 14 rows, but the data now has 16" in capsys.readouterr().err


def test_only_the_view_that_is_asked_for_is_read(tmp_path: Path):
    messages = {i: [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "2"}] for i in range(12)}
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages[i]} for i in range(12)])
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=path, with_rl=False))
    assert (len(task.sft_samples), len(task.heldout_samples)) == (11, 1) and not task.train_prompts
    heldout = write_rows(tmp_path / "eval.jsonl", [{"prompt": "3", "answer": "4"}] * 2)
    assert len(create_jsonl_task(create_char_tokenizer(), OwnData(path=path, eval_path=heldout, with_rl=False)).heldout_prompts) == 2
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": str(i), "answer": "2"} for i in range(12)])
    task = create_jsonl_task(create_char_tokenizer(), OwnData(path=prompts, with_sft=False))
    assert len(task.train_prompts) == 11 and not task.sft_samples


@pytest.mark.more
@needs.GSM8K
def test_gsm8k_files_load_with_their_own_reward():
    path = needs.get_gsm8k() / "test.jsonl"
    task = create_gsm8k_task(create_char_tokenizer(), OwnData(path=path, eval_path=path, num_heldout=5))
    assert task.heldout_prompts[0].metadata["ground_truth"] == "18"
    solution = task.sft_samples[0]
    sample = Sample(prompt="", tokens=(1,), loss_mask=(1.0,), response="so 18\n#### 18", metadata=task.heldout_prompts[0].metadata)
    assert "#### 18" in solution.response
    assert task.reward_fn(sample) == 1.0 and task.reward_fn(replace(sample, response="#### 19")) == 0.0


def test_problems_of_gsm8k_need_no_chat_template_in_rl(tmp_path: Path):
    tokenizer = create_char_tokenizer()
    tokenizer.chat_template = None
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(20)))
    create_tiny_model(vocab_size=64).save_pretrained(tmp_path / "model")
    config = parse_command_line(["--task", "gsm8k", "--data.path", str(path), "--model.path", str(tmp_path / "model")]).config
    task = create_task(config, tokenizer, "rl")
    assert task.train_prompts and not task.sft_samples
