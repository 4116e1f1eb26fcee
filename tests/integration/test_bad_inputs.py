"""Mistakes of a first day, one by one, and the answers of the command: what was found and what to do, no traceback, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration.train import main
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.models.heads import create_reward_model
from rollouts.testing import create_tiny_model


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    create_tiny_model(vocab_size=300).save_pretrained(path)
    create_char_tokenizer(64).save_pretrained(path)
    return path


@pytest.fixture
def place(good_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model of one's own in `model`, and rows in rows.jsonl."""
    (tmp_path / "model").mkdir()
    for path in good_model.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    rows = [json.dumps({"question": f"{number}+1=", "answer": str(number + 1)}) for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edit(name: str, **changes: Any) -> Callable[[], None]:
    """Return a function that changes a JSON file of the model; None removes a key."""

    def change() -> None:
        path = Path("model") / name
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def edit_weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[], None]:
    def write() -> None:
        path = Path("model/model.safetensors")
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return write


def without(*names: str) -> Callable[[], None]:
    def remove() -> None:
        for name in names:
            (Path("model") / name).unlink()

    return remove


def make_directory_of_run() -> None:
    without("model.safetensors")()
    for name in ("sft/checkpoints/step_0099", "rl/checkpoints/step_0010", "rl/checkpoints/step_0020"):
        (Path("model") / name).mkdir(parents=True)


def make_remote_code() -> None:
    edit("config.json", model_type="mine", auto_map={"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"})()
    Path("model/mine.py").write_text("raise SystemExit('this file must not run')\n")


def make_reward_model() -> None:
    create_reward_model(create_tiny_model(), seed=0).save_pretrained("model")


def make_file_of_settings(text: str) -> Callable[[], None]:
    return lambda: Path("own.toml").write_text(text) and None


def truncate_weights() -> None:
    path = Path("model/model.safetensors")
    path.write_bytes(path.read_bytes()[:-64])


def make_template(text: str) -> Callable[[], None]:
    def write() -> None:
        edit("tokenizer_config.json", chat_template=text)()
        if Path("model/chat_template.jinja").exists():
            Path("model/chat_template.jinja").write_text(text)
        rows = [json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) for number in range(20)]
        Path("rows.jsonl").write_text("\n".join(rows))

    return write


def make_file(name: str, content: str | bytes) -> Callable[[], None]:
    return lambda: Path(name).write_bytes(content.encode() if isinstance(content, str) else content) and None


def make_adapters() -> None:
    without("model.safetensors", "config.json")()
    make_file("model/adapter_config.json", "{}")()


def make_index_without_files() -> None:
    without("model.safetensors")()
    make_file("model/model.safetensors.index.json", '{"weight_map": {}}')()


def without_template() -> None:
    edit("tokenizer_config.json", chat_template=None)()
    Path("model/chat_template.jinja").unlink(missing_ok=True)


def nothing() -> None:
    pass


OWN = ("--mode", "rl", "--model.path", "model", "--data.path", "rows.jsonl")
PROJECTION = "model.layers.0.mlp.down_proj.weight"

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"

# fmt: off
MISTAKES: dict[str, tuple[Callable[[], object], tuple[str, ...], tuple[str, ...]]] = {
    "no such directory": (nothing, ("--model.path", "./mdoel"), ("mdoel is not a directory", "ORG/NAME")),
    "a file": (nothing, ("--model.path", "rows.jsonl"), ("rows.jsonl is not a directory",)),
    "a name, offline": (nothing, ("--model.path", "nobody/nothing"), ("--model.path is 'nobody/nothing'", "no such directory here")),
    "a revision of a directory": (nothing, (*OWN, "--model.revision", "main"), ("--model.revision is 'main'", "model.revision out")),
    "no config.json": (without("config.json"), OWN, ("it has no config.json", "it holds [")),
    "config.json is no JSON": (lambda: Path("model/config.json").write_text("{"), OWN, ("no readable model configuration",)),
    "an unknown architecture": (edit("config.json", model_type="nothing-known"), OWN, ("nothing-known",)),
    "the code of an unknown architecture": (
        edit("config.json", model_type="qwen99"), OWN, ("model type `qwen99`", "did you mean 'qwen", "pip install -U transformers"),
    ),
    "no architecture": (edit("config.json", model_type=None), OWN, ("no readable model configuration", "download config.json")),
    "an impossible number": (edit("config.json", hidden_size="64"), OWN, ("'hidden_size' expected int", "Correct the value in")),
    "a pointer in place of config.json": (make_file("model/config.json", LFS), OWN, ("a pointer of Git LFS", "git lfs pull")),
    "a pointer in place of weights": (make_file("model/model.safetensors", LFS), OWN, ("a pointer of Git LFS", "git lfs pull")),
    "adapters alone": (make_adapters, OWN, ("holds LoRA adapters alone", "the model that they were trained on")),
    "an index without its files": (make_index_without_files, OWN, ("The files of its index are not there", "download the whole directory")),
    "a tokenizer that is no JSON": (make_file("model/tokenizer.json", "{"), OWN, ("can be loaded", "tokenizer.json again")),
    "a seed beyond 64 bits": (nothing, ("--seed", "9" * 20), ("--seed is 99999999999999999999", "2**63 - 1")),
    "no mode": (nothing, ("--mode", ""), ("unknown mode ''", "sft")),
    "a path of another kind": (make_file("own.json", '{"seed": "0"}'), ("--config", "own.json"), ("seed is '0', expected a whole number",)),
    "a key twice in JSON": (make_file("own.json", '{"seed": 0, "seed": 1}'), ("--config", "own.json"), ("'seed' stands twice",)),
    "settings that are no JSON": (make_file("own.json", "{"), ("--config", "own.json"), ("own.json", "mend the file there")),
    "a list of settings": (make_file("own.json", "[]"), ("--config", "own.json"), ("holds a list", '{"rl": {"num_steps": 10}}')),
    "settings in UTF-16": (make_file("own.toml", "[rl]".encode("utf-16")), ("--config", "own.toml"), ("not UTF-8", "save the file")),
    "a section that is a number": (make_file("own.toml", "rl = 3"), ("--config", "own.toml"), ("rl is 3", "a section", "num_steps")),
    "a dotted name in JSON": (make_file("own.json", '{"rl.num_steps": 1}'), ("--config", "own.json"), ("[rl]", "num_steps = ")),
    "a mode in a file": (make_file("own.json", '{"mode": "rl"}'), ("--config", "own.json"), ("'mode'", "give --mode on the command line")),
    "another framework's name": (make_file("own.toml", "[rl]\nlr = 1"), ("--config", "own.toml"), ("rl.lr is ", "--rl.optimizer.lr here")),
    "a directory that is a file": (nothing, ("--output-dir", "rows.jsonl"), ("rows.jsonl is a file", "choose another --output-dir")),
    "a directory in a file": (nothing, ("--output-dir", "rows.jsonl/run"), ("rows.jsonl is a file", "choose another --output-dir")),
    "a directory in /proc": (nothing, ("--output-dir", "/proc/x"), ("cannot be written in /proc", "on a disk where you may write")),
    "a directory with a null byte": (nothing, ("--output-dir", "a\0b"), ("its name is not one of a file", "choose another --output-dir")),
    "a name of 300 letters": (nothing, ("--output-dir", "a" * 300), ("File name too long", "choose an --output-dir")),
    "a logger without its path": (nothing, ("--loggers", "jsonl"), ("jsonl needs the argument 'path'", "It takes path\n")),
    "a logger with an argument too many": (nothing, ("--loggers", "jsonl('a', 'b')"), ("one argument too many", "It takes path\n")),
    "code of its own": (make_remote_code, OWN, ("Python files of its own", "--model.trust-remote-code")),
    "the directory of a run": (make_directory_of_run, OWN, ("has no weights", "its newest model is model/rl/checkpoints/step_0020")),
    "an encoder": (edit("config.json", architectures=["BertForMaskedLM"]), OWN, ("is a BertForMaskedLM", "ForCausalLM")),
    "a reward model": (make_reward_model, OWN, ("Qwen3ForSequenceClassification", "--reward.model takes a reward model")),
    "quantized weights": (
        edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), OWN, ("are quantized (gptq)", "base-dtype nf4"),
    ),
    "no weights": (without("model.safetensors"), OWN, ("has no weights: expected model.safetensors",)),
    "a truncated file": (truncate_weights, OWN, ("model.safetensors is not a complete safetensors file",)),
    "a missing weight": (edit_weights(lambda w: {k: v for k, v in w.items() if k != PROJECTION}), OWN, ("lacks 1 of the", PROJECTION)),
    "a wrong shape": (
        edit_weights(lambda w: w | {PROJECTION: torch.zeros(3, 5)}), OWN, (f"{PROJECTION} is (3, 5), expected (32, 64)", "different"),
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), OWN, ("has no tokenizer (none of tokenizer.json",)),
    "a tokenizer of another model": (edit("config.json", vocab_size=20), OWN, ("weights of other shapes",)),
    "SFT of messages without a template": (
        without_template, ("--mode", "sft", *OWN[2:]), ("rows.jsonl, line 1", "no chat template", "prompt=question,completion=answer,"),
    ),
    "no end of text": (edit("tokenizer_config.json", eos_token=None), OWN, ("has no end-of-text token", "set eos_token")),
    "adapters of another family": (nothing, (*OWN, "--lora.rank", "4", "--lora.target-modules", "c_attn"), ("c_attn",)),
    "an unknown GPU": (nothing, (*OWN, "--model.device", "cuda:99"), ("device is 'cuda:99'", "torch sees no CUDA GPU")),
    "an unknown device": (nothing, (*OWN, "--model.device", "gpu"), ("--model.device is 'gpu', expected cpu, cuda",)),
    "rows that are not there": (nothing, ("--model.path", "model", "--data.path", "row.jsonl"), ("row.jsonl",)),
    "data without a model": (nothing, ("--data.path", "rows.jsonl"), ("needs a model with a tokenizer of its own: give --model.path",)),
    "an unknown task": (nothing, ("--task", "sortt"), ("unknown task 'sortt': did you mean 'sort'?",)),
    "an unknown mode": (nothing, ("--mode", "ppo"), ("unknown mode 'ppo'", "sft")),
    "an unknown algorithm": (nothing, ("--mode", "rl", "--rl.algorithm", "grop"), ("grop", "did you mean 'grpo'?")),
    "a budget beyond the context": (nothing, (*OWN, "--generation.max-tokens", "512"), ("--generation.max-tokens is 512", "512 tokens")),
    "rows that do not divide": (nothing, ("--rl.num-minibatches", "7"), ("--rl.num-minibatches = 7: choose a divisor of 512",)),
    "a key of another section": (make_file_of_settings("[rl]\nlr = 1e-5\n"), ("--config", "own.toml"), ("unknown setting", "lr")),
    "a value of another type": (make_file_of_settings('[rl]\nnum_steps = "many"\n'), ("--config", "own.toml"), ("own.toml, line 2",)),
    "settings that are no TOML": (make_file_of_settings("[rl\n"), ("--config", "own.toml"), ("own.toml is not valid TOML",)),
    "nothing to resume": (nothing, ("--resume", "--output-dir", "model"), ("is not the directory of a run", "leave --resume out")),
    "a badly formed name to push to": (nothing, ("--push-to-hub", "mine"), ("--push-to-hub is 'mine'", "ORG/NAME")),
}
# fmt: on


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_and_nothing_is_written(name: str, place: Path, capsys: pytest.CaptureFixture[str]):
    break_it, argv, parts = MISTAKES[name]
    break_it()
    before = sorted(place.iterdir())
    try:
        status = main([*argv, "--quiet"])
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == 2, told.err
    assert all(part in told.err for part in parts), told.err
    assert "Traceback" not in told.err and "error: " in told.err
    assert sorted(place.iterdir()) == before  # no run directory


def test_a_broken_template_is_told_where_the_rows_are_texts_and_refused_where_they_are_messages(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    make_template("{% for message in %}")()
    assert main([*OWN, "--dry-run"]) == 0
    told = capsys.readouterr()
    assert "the chat template is not a template of Jinja" in told.out + told.err and "those of plain text can" in told.out + told.err


def test_questions_are_plain_text_of_both_stages_where_the_columns_say_so(place: Path, capsys: pytest.CaptureFixture[str]):
    without_template()
    columns = ("--data.columns", "prompt=question,completion=answer,ground_truth=answer", "--data.eval-fraction", "0.5")
    sizes = ("--sft.num-steps", "1", "--rl.num-steps", "1", "--rl.prompts-per-step", "2", "--rl.samples-per-prompt", "2")
    budget = ("--generation.max-tokens", "2", "--output-dir", "run", "--quiet")
    assert main(["--mode", "sft+rl", *OWN[2:], *columns, *sizes, *budget]) == 0, capsys.readouterr().err
