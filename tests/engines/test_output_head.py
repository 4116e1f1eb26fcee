from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollouts.engines.vllm.output_head import stage_output_head
from rollouts.engines.weights.checkpoint_check import check_checkpoint, read_checkpoint_layout, read_fingerprint
from rollouts.errors import CheckpointError
from rollouts.testing import create_tiny_model

EMBEDDING = "model.embed_tokens.weight"


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_tied_head_is_given_as_a_tensor_besides_the_others(tmp_path: Path, shard_size: str):
    create_tiny_model().save_pretrained(tmp_path, max_shard_size=shard_size)
    before, fingerprint = read_all(tmp_path), read_fingerprint(tmp_path)
    stage = stage_output_head(tmp_path)
    assert stage is not None
    assert stage.parent == tmp_path
    staged = read_all(stage)
    assert set(staged) == {*before, "lm_head.weight"}
    assert torch.equal(staged["lm_head.weight"], before[EMBEDDING])
    assert all(torch.equal(staged[name], tensor) for name, tensor in before.items())
    assert not list(stage.glob("*.json"))  # an index would leave the head out
    assert all(file.is_symlink() for file in stage.iterdir() if file.name != "output_head.safetensors")
    assert read_fingerprint(tmp_path) == fingerprint
    assert check_checkpoint(tmp_path, read_checkpoint_layout(tmp_path))  # what is loaded next is not disturbed


def test_two_servers_may_load_at_the_same_time(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path)
    assert stage_output_head(tmp_path) != stage_output_head(tmp_path)


def test_weights_with_a_head_are_used_as_they_are(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    assert stage_output_head(tmp_path) is None


def test_an_embedding_that_is_not_found_is_said(tmp_path: Path):
    save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no lm_head.weight, and 0 tensors that may be the embedding"):
        stage_output_head(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
