"""docs/data.md: each block of rows is read, by the stage that its section is about, and each command has options that exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from chat_templates import create_tokenizer

from integration.expressions.mixture import parse_columns
from integration.settings.command_line import parse_command_line
from integration.tasks.own_data import OwnData, create_jsonl_task
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import prepare_sft_sample
from rollouts.data.datasets import DatasetSpec, load_rl_prompts, load_sft_conversations
from rollouts.data.preference_pairs import load_preference_pairs
from rollouts.data.recorded import load_recorded_groups
from rollouts.data.rows.formats import CONVERSATION_FORMATS, PROMPT_FORMATS
from rollouts.testing import create_tiny_model

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def read_sections() -> dict[str, list[str]]:
    """The blocks of rows of each section."""
    _, *parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    blocks = {
        name: re.findall(r"^```jsonl\n(.*?)^```", body, re.DOTALL | re.MULTILINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }
    return {name: found for name, found in blocks.items() if found}


SECTIONS = read_sections()
SFT, RL = SECTIONS["Rows to train on (SFT)"], SECTIONS["Prompts for RL"]


def write(tmp_path: Path, block: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(block)
    return path


@pytest.mark.parametrize("block", SFT, ids=lambda block: ",".join(json.loads(block.splitlines()[0])))
def test_rows_to_train_on_become_tokens_with_a_loss(block: str, tmp_path: Path):
    tokenizer = create_tokenizer(TEMPLATE)
    loaded = load_sft_conversations(write(tmp_path, block))
    assert len(loaded) == len(block.splitlines())
    for row in loaded:
        sample = prepare_sft_sample(tokenizer, row)
        trained = tokenizer.decode([token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask])
        answers = ["wo and two are four."] if "text" in row else ["5"] if "history" in block and "more" in str(row) else ["4"]
        assert all(answer in trained for answer in answers) and "user" not in trained, trained
        if "tools" in row:
            assert '"name": "add"' in tokenizer.decode(sample.tokens) and "arguments" in trained


@pytest.mark.parametrize("block", RL, ids=range(len(RL)))
def test_prompts_are_read_with_their_ground_truth(block: str, tmp_path: Path):
    has_truth = "haiku" not in block
    for prompt in load_rl_prompts(write(tmp_path, block), require_ground_truth=has_truth):
        assert prompt.metadata.get("ground_truth") == ("4" if has_truth else None)


@pytest.mark.parametrize("block", SECTIONS["Pairs for a reward model"], ids=("preference", "unpaired"))
def test_pairs_are_read(block: str, tmp_path: Path):
    pairs = load_preference_pairs(create_tokenizer(TEMPLATE), write(tmp_path, block))
    assert len(pairs) == (1 if "label" in block else 4)
    assert all(pair.chosen.response.strip().endswith("4") and pair.rejected.response.strip().endswith("5") for pair in pairs)


def test_renamed_columns_are_read(tmp_path: Path):
    (block,) = SECTIONS["Columns with other names"]
    words = re.findall(r"--data\.columns (\S+)", PAGE.read_text())[:1]
    spec = DatasetSpec(path=str(write(tmp_path, block)), columns=parse_columns(words))
    (prompt,) = load_rl_prompts(spec)
    assert (prompt.content, prompt.metadata) == ("2+2=", {"meta": {"label": "4"}, "answer": "4", "ground_truth": "4"})


def test_recorded_rollouts_are_read(tmp_path: Path):
    (block,) = SECTIONS["Rollouts from elsewhere"]
    ((first, second),) = load_recorded_groups(str(write(tmp_path, block)), smallest_group=2).groups
    assert (first.reward, second.reward) == (1.0, 0.0) and second.weight_versions == (-1, -1, -1, -1, 4, 4)
    keys = set(re.findall(r"`(\w+)`", PAGE.read_text().partition("| key | |")[2].partition("\n\n")[0]))
    assert {*json.loads(block.splitlines()[0]), "response_mask", "temperature", "response", "metadata"} <= keys


def test_own_rows_and_reward_lead_to_a_run_in_fewer_than_fifteen_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    section = PAGE.read_text().partition("## From your own rows and reward to a run")[2].partition("\n## ")[0]
    kinds = ("jsonl", "python", "bash")
    row, code, commands = (re.search(rf"^```{kind}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1] for kind in kinds)
    assert len([*row.splitlines(), *code.splitlines(), *commands.splitlines()]) < 15
    monkeypatch.chdir(tmp_path)
    fields = json.loads(row)
    rows = [{**fields, "prompt": f"{i}+7=", "answer": str(i + 7)} for i in range(20)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "mine.py").write_text(code)
    create_tiny_model(vocab_size=64, hidden_size=16, num_layers=1).save_pretrained("model")
    create_char_tokenizer().save_pretrained("model")
    small = "--rl.num-steps 1 --rl.prompts-per-step 2 --rl.samples-per-prompt 2 --generation.max-tokens 4 --output-dir run --quiet".split()
    for command in commands.splitlines():
        _, _, module, *words = shlex.split(command.replace("DIR", "model"))
        main = importlib.import_module(module).main
        assert main([*words, *(small if module == "integration.train" else ())]) == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_commands_of_the_page_have_options_that_exist():
    commands = re.findall(r"^python -m integration\.train (.*?[^\\])$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        assert parse_command_line(shlex.split(command.replace("\\\n", " "))).config.task == "jsonl"


def test_the_page_knows_all_formats_and_the_output_that_it_shows_is_real(tmp_path: Path):
    text = PAGE.read_text()
    for words in (*CONVERSATION_FORMATS, *PROMPT_FORMATS):
        assert all(f'"{name}"' in text for name in words.partition(" (")[0].split(" and ")), words
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]
    rows[6] = rows[2]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    notes = create_jsonl_task(create_tokenizer(TEMPLATE), OwnData(path=path, with_sft=False)).notes
    assert "\n".join(notes).replace(f"{tmp_path}/", "") in text


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
