from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts.engines.weights.checkpoint_check import check_checkpoint, expect_dtype, read_checkpoint_layout, read_fingerprint
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference")
    create_tiny_model().save_pretrained(path)
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(path: Path, change) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_names_shapes_and_dtypes_are_read_without_the_values(saved: Path):
    layout = read_checkpoint_layout(saved)
    tensors = load_file(saved / "model.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in layout.tensors.items()} == {
        name: (tuple(tensor.shape), "F32") for name, tensor in tensors.items()
    }
    assert layout.is_tied
    assert layout.files == ("model.safetensors",)


def test_another_export_of_the_same_model_is_accepted(saved: Path, tmp_path: Path):
    create_tiny_model(seed=5).save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path, read_checkpoint_layout(saved)).path == tmp_path


def test_a_sharded_export_equals_a_whole_one(saved: Path, tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert check_checkpoint(tmp_path, read_checkpoint_layout(saved)).tensors == read_checkpoint_layout(saved).tensors


def lose(tensors):
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight"):
        del tensors[name]


def widen(tensors):
    tensors["model.norm.weight"] = torch.zeros(33)


def transpose(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()


def add(tensors):
    tensors["model.extra.weight"] = torch.zeros(2)


def halve(tensors):
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose, "missing: .*q_proj.weight, .*norm.weight|missing: .*norm.weight, .*q_proj.weight"),
        (widen, r"wrong shapes: model.norm.weight is F32 \[33\], expected F32 \[32\]"),
        (transpose, r"wrong shapes: .*up_proj.weight is F32 \[32, 64\], expected F32 \[64, 32\]"),
        (add, "unknown: model.extra.weight"),
        (halve, r"wrong dtypes: .* is BF16 .*, expected F32 .* and \d+ more"),
    ],
)
def test_weights_of_another_layout_are_named(saved: Path, copied: Path, change, message: str):
    rewrite(copied, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_checkpoint(copied, read_checkpoint_layout(saved))
    assert str(copied) in str(caught.value)
    assert str(saved) in str(caught.value)


def test_another_precision_is_accepted_only_when_asked_for(saved: Path, copied: Path):
    rewrite(copied, halve)
    reference = read_checkpoint_layout(saved)
    assert check_checkpoint(copied, reference, allow_cast=True)
    rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight is I32"):
        check_checkpoint(copied, reference, allow_cast=True)


def test_a_server_may_hold_another_precision_than_its_directory(saved: Path, copied: Path):
    rewrite(copied, halve)
    rewrite(copied, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.float32)}))
    served = expect_dtype(read_checkpoint_layout(copied), "float32")
    assert check_checkpoint(saved, served)
    assert expect_dtype(read_checkpoint_layout(copied), "float8") == read_checkpoint_layout(copied)
    with pytest.raises(CheckpointError, match="wrong dtypes"):
        check_checkpoint(copied, served)


@pytest.mark.parametrize("cut", [1, 64, 4096, -1])
def test_a_file_that_was_cut_off_is_refused(copied: Path, cut: int):
    file = copied / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-cut] if cut > 0 else content[:5])
    with pytest.raises(CheckpointError, match=r"model.safetensors .*(cut off|not a complete)"):
        read_checkpoint_layout(copied)


def test_a_file_longer_than_its_header_says_is_refused(copied: Path):
    with (copied / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="its header promises"):
        read_checkpoint_layout(copied)


@pytest.mark.parametrize(
    "header", [b"[]", b"{}]", b'{"a": {"dtype": "F32"}}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}']
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: bytes):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(CheckpointError, match="damaged header"):
        read_checkpoint_layout(tmp_path)


def test_no_weights_no_directory_and_pickled_weights_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not a directory"):
        read_checkpoint_layout(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        read_checkpoint_layout(tmp_path)


def test_the_index_must_agree_with_the_files(saved: Path, tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    names = list(index["weight_map"])
    moved = {**index["weight_map"], names[0]: index["weight_map"][names[-1]]}
    for wrong in ({**index, "weight_map": moved}, {**index, "weight_map": {**index["weight_map"], "more": index["weight_map"][names[0]]}}):
        index_file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="elsewhere than the files do"):
            read_checkpoint_layout(tmp_path)
    index_file.write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        read_checkpoint_layout(tmp_path)
    index_file.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_checkpoint_layout(tmp_path)
    index_file.write_text(json.dumps(index))
    shutil.copy(saved / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match="two exports are mixed"):
        read_checkpoint_layout(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / index["weight_map"][names[0]]).unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-0.*of its index"):
        read_checkpoint_layout(tmp_path)


def test_a_second_file_with_the_same_tensors_is_refused(copied: Path):
    shutil.copy(copied / "model.safetensors", copied / "older.safetensors")
    with pytest.raises(CheckpointError, match=r"twice, in model.safetensors and older.safetensors"):
        read_checkpoint_layout(copied)


def test_a_tied_head_may_be_left_out_or_given_and_another_may_not(saved: Path, copied: Path):
    tied = read_checkpoint_layout(saved)
    rewrite(copied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    both = check_checkpoint(copied, tied)
    assert both.is_tied  # by its config.json
    assert check_checkpoint(saved, both)
    rewrite(copied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(65, 32)}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is F32 \[65, 32\], expected F32 \[64, 32\]"):
        check_checkpoint(copied, tied)
    rewrite(copied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(64, 32)}))
    (copied / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight"):
        check_checkpoint(saved, read_checkpoint_layout(copied))


def test_the_fingerprint_changes_with_the_files(copied: Path):
    before = read_fingerprint(copied)
    assert before == read_fingerprint(copied)
    rewrite(copied, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert read_fingerprint(copied) != before
    assert read_fingerprint(copied / "nowhere") == ()
