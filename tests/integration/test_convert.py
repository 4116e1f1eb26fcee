"""`rollouts convert` and --push-to-hub: what transformers reads back, the card, and the hub as a loopback stand-in."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub, serve_hub
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from integration.convert.__main__ import main
from integration.convert.weights import convert, find_source
from integration.eval.subjects import find_subject
from integration.parts.adapters import merge_adapters
from integration.settings.config import Config
from integration.train import main as train
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.errors import ConfigError
from rollouts.models.heads import create_reward_model
from rollouts.testing import create_tiny_model

SMALL = ["--model.hidden-size", "32", "--model.intermediate-size", "32", "--model.num-layers", "1", "--model.num-heads", "2"]
SHORT = ["--mode", "sft", "--sft.num-steps", "2", "--sft.batch-size", "2", "--evaluation.num-prompts", "2", "--checkpoint.sft-every", "1"]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    create_tiny_model().save_pretrained(path, max_shard_size="20KB")
    create_char_tokenizer(64).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with adapters, whose settings hold a path of one's own."""
    path = tmp_path_factory.mktemp("runs") / "own"
    assert train([*SHORT, *SMALL, "--lora.rank", "2", "--output-dir", str(path), "--quiet"]) == 0
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub, as HF_ENDPOINT and HF_TOKEN would choose it at the start of a process."""
    from huggingface_hub import constants

    with serve_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).state_dict())


def test_several_files_become_one_and_one_becomes_several(model_directory: Path, tmp_path: Path):
    assert len(list(model_directory.glob("*.safetensors"))) > 1
    assert main([str(model_directory), str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    assert main([str(tmp_path / "one"), str(tmp_path / "many"), "--max-file-gib", "0.00002"]) == 0
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    expected = weights(model_directory)
    for name in ("one", "many"):
        found = weights(tmp_path / name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == create_char_tokenizer(64).get_vocab()
        assert (tmp_path / name / "README.md").read_text().startswith("---\nlibrary_name: ")


def test_weights_are_cast_as_torch_casts_them(model_directory: Path, tmp_path: Path):
    assert main([str(model_directory), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    found, expected = weights(tmp_path / "half"), weights(model_directory)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[key], expected[key].to(torch.bfloat16)) for key in expected)


def test_weights_of_the_older_format_become_safetensors(model_directory: Path, tmp_path: Path):
    old = tmp_path / "old"
    old.mkdir()
    torch.save(create_tiny_model().state_dict(), old / "pytorch_model.bin")
    (old / "config.json").write_text((model_directory / "config.json").read_text())
    assert main([str(old), str(tmp_path / "new"), "--tokenizer", str(model_directory)]) == 0
    found, expected = weights(tmp_path / "new"), weights(model_directory)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (tmp_path / "new" / "tokenizer.json").exists()


def test_no_weight_of_many_files_of_the_older_format_is_lost(model_directory: Path, tmp_path: Path):
    """Files of equal layers are mapped to the same memory one after the other, so that addresses tell nothing between files."""
    old, num_layers = tmp_path / "old", 8
    old.mkdir()
    for layer in range(num_layers):
        part = {f"layer.{layer}.{name}": torch.full((64, 64), float(layer)) for name in ("a", "b")}
        torch.save(part, old / f"pytorch_model-{layer + 1:05d}-of-{num_layers:05d}.bin")
    torch.save({"not": print}, old / "training_args.bin")  # a file beside them that is no weights
    (old / "config.json").write_text((model_directory / "config.json").read_text())
    assert main([str(old), str(tmp_path / "new"), "--dtype", "bfloat16"]) == 0
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert {name: float(value[0, 0]) for name, value in found.items()} == {
        f"layer.{layer}.{name}": float(layer) for layer in range(num_layers) for name in ("a", "b")
    }


def test_a_reward_model_keeps_its_head(tmp_path: Path):
    model = create_reward_model(create_tiny_model(), seed=3)
    model.save_pretrained(tmp_path / "rm")
    assert main([str(tmp_path / "rm"), str(tmp_path / "plain"), "--dtype", "float16"]) == 0
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", dtype="auto")
    assert torch.equal(found.score.weight, model.score.weight.half())


def test_a_run_gives_its_newest_checkpoint_merged_with_a_card_of_its_settings(run_directory: Path, tmp_path: Path):
    assert main([str(run_directory), str(tmp_path / "plain")]) == 0
    last = run_directory / "sft" / "checkpoints" / "step_0002"
    found, expected = weights(tmp_path / "plain"), weights(last)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert not (tmp_path / "plain" / "manifest.json").exists() and not (tmp_path / "plain" / "adapter").exists()
    card = (tmp_path / "plain" / "README.md").read_text()
    for part in (
        "SFT of the built-in model",
        "`sft/step_0002`",
        "| adapters | rank 2, merged",
        "lora.rank = 2",
        "| accuracy before |",
        "library_name",
    ):
        assert part in card, card
    assert str(run_directory.parent) not in card


def test_adapters_alone_are_merged_into_their_base(run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = run_directory / "sft" / "checkpoints" / "step_0002"
    assert main([str(checkpoint / "adapter"), str(tmp_path / "plain")]) == 2
    assert f"give --base DIR, or convert {checkpoint}, which is the merged model" in capsys.readouterr().err
    assert train([*SHORT, *SMALL, "--lora.rank", "2", "--lora.save-base", "--output-dir", str(tmp_path / "run"), "--quiet"]) == 0
    checkpoint = tmp_path / "run" / "sft" / "checkpoints" / "step_0002"
    assert main([str(checkpoint / "adapter"), str(tmp_path / "plain"), "--base", str(checkpoint / "base")]) == 0
    found, expected = weights(tmp_path / "plain"), weights(checkpoint)
    assert all(torch.allclose(found[key], expected[key], atol=1e-6) for key in expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, t: [str(s / "nowhere"), str(t / "new")], "nowhere is not a directory: give a run, a checkpoint (step_NNNN) or a model"),
        (lambda s, t: [str(t), str(t / "new")], "is not a model directory: it has no config.json"),
        (lambda s, t: [str(s), str(s)], "source and target are both"),
        (lambda s, t: [str(s), str(s.parent)], "holds something already: give another target, or remove it"),
        (
            lambda s, t: [str(s), str(t / "new"), "--push-to-hub", "mine"],
            "--push-to-hub is 'mine', expected the name of a model on the hub",
        ),
        (lambda s, t: [str(s), str(t / "new"), "--max-file-gib", "0"], "--max-file-gib is 0.0, expected a number above 0, or None"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    make, message: str, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(make(model_directory, tmp_path)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_a_damaged_file_and_a_weight_that_is_not_finite_are_refused(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bad = create_tiny_model()
    with torch.no_grad():
        bad.lm_head.weight[3, 4] = 70000.0
    bad.save_pretrained(tmp_path / "large")
    assert main([str(tmp_path / "large"), str(tmp_path / "half"), "--dtype", "float16"]) == 1
    assert "in float16 has a NaN weight (or an infinite one)" in capsys.readouterr().err
    file = tmp_path / "large" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert main([str(tmp_path / "large"), str(tmp_path / "plain")]) == 2
    assert "is not a complete safetensors file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large"]


def test_a_run_is_published_with_its_card_and_without_the_token(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    assert train([*SHORT, *SMALL, "--output-dir", str(out), "--push-to-hub", "me/letters"]) == 0
    files = hub.files("me/letters")
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
    assert b"SFT of the built-in model" in files["README.md"] and b"| accuracy after sft |" in files["README.md"]
    assert files["model.safetensors"] == (out / "export" / "model.safetensors").read_bytes()
    found, expected = weights(out / "export"), weights(out / "sft" / "checkpoints" / "step_0002")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}
    told = capsys.readouterr()
    assert f"published: {hub.url}/me/letters" in told.out and TOKEN not in told.out + told.err
    assert not [path for path in out.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


def test_without_a_token_or_a_network_nothing_starts(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    argv = [*SHORT, "--output-dir", str(tmp_path / "run"), "--push-to-hub", "me/letters"]
    assert train(argv) == 2
    assert "there is no token: run `hf auth login`" in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert train(argv) == 2
    assert "HF_HUB_OFFLINE=1 forbids it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and hub.requests == []


@pytest.mark.slow
def test_the_command_publishes_with_the_variables_of_a_process(
    hub: Hub, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # a command of another test may have set it
    own = dict(os.environ, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), PYTHONPATH=str(Path(__file__).parents[2]))
    argv = [sys.executable, "-m", "integration.convert", str(model_directory), "plain", "--push-to-hub", "me/plain"]
    done = subprocess.run(argv, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert json.loads(hub.files("me/plain")["config.json"])["model_type"] == "qwen3"


def test_the_result_of_a_run_is_its_best_checkpoint_for_every_command(run_directory: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(run_directory, run)
    last = run / "sft" / "checkpoints" / "step_0002"
    best = last.with_name("step_0001")
    for summary, expected in (({}, last), ({"best": {"sft": {"checkpoint": "sft/checkpoints/step_0001"}}}, best)):
        (run / "summary.json").write_text(json.dumps(summary))
        assert find_source(run).directory == find_subject(str(run), Config()).directory == expected


def test_adapters_are_refused_by_every_command_in_the_same_words(tmp_path: Path):
    """Their base is not here, and then it is one that they are not of."""
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    told = f"{adapters} holds adapters, and their base {tmp_path / 'base'} is no directory here"
    with pytest.raises(ConfigError, match=re.escape(told) + ": put it there, or convert the adapters with --base DIR"):
        find_subject(str(adapters), Config())
    with pytest.raises(ConfigError, match=re.escape(told) + ": give --base DIR$"):
        convert(find_source(adapters), tmp_path / "plain", dtype=None, max_file_bytes=1 << 30)
    with pytest.raises(ConfigError, match="do not fit their base"):
        merge_adapters(create_tiny_model(), adapters)
