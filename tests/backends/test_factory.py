from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_cross_entropy_loss, create_pytorch_backend, create_reference_backend
from rollouts.backends.optim.schedules import (
    create_scheduler,
    create_warmup_cosine_scheduler,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.errors import ConfigError, DataError
from rollouts.models.loading import (
    check_model_directory,
    find_compute_dtype,
    find_device_name,
    load_hf_model,
    load_tokenizer,
    parse_device,
    parse_dtype,
)
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import select_log_probs
from rollouts.types import Sample


def test_dtypes_and_devices_have_names():
    assert [parse_dtype(n) for n in ("float32", "bf16", "torch.float16", torch.float64)] == [
        torch.float32, torch.bfloat16, torch.float16, torch.float64,
    ]  # fmt: skip
    assert parse_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="float33"):
        parse_dtype("float33")
    with pytest.raises(ConfigError, match="gpu"):
        parse_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA"):
            parse_device("cuda")


@pytest.mark.parametrize(
    ("capabilities", "device", "name", "dtype"),
    [
        ([], "auto", "cpu", "float32"),
        ([(9, 0)], "auto", "cuda", "bfloat16"),
        ([(7, 0)], "auto", "cuda", "float32"),  # V100: no bfloat16
        ([(9, 0), (7, 5)], "cuda:1", "cuda:1", "float32"),
        ([(9, 0)], "cpu", "cpu", "float32"),
        ([], "cuda", "cuda", "bfloat16"),  # a dry run for another machine
        ([], "mps", "mps", "float32"),
    ],
)
def test_auto_is_what_the_machine_has(monkeypatch, capabilities, device, name, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capabilities[index])
    assert (find_device_name(device), find_compute_dtype(device)) == (name, dtype)


def test_warmup_cosine_matches_its_closed_form():
    factor = [warmup_cosine(s, warmup_steps=4, total_steps=12, min_lr_ratio=0.1) for s in range(14)]
    assert factor[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factor[8] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factor[12:] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("schedule", [warmup_cosine, warmup_linear, warmup_constant, warmup_stable_decay])
def test_a_warm_up_may_start_at_a_given_factor(schedule):
    kwargs = {"warmup_steps": 4, "warmup_from": 0.2} | ({} if schedule is warmup_constant else {"total_steps": 12})
    assert [schedule(s, **kwargs) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_cosine_stays_at_its_end_unless_it_is_periodic():
    ends = [warmup_cosine(s, warmup_steps=0, total_steps=4) for s in (4, 5, 8)]
    assert ends == pytest.approx([0, 0, 0])
    rising = [warmup_cosine(s, warmup_steps=0, total_steps=4, periodic=True) for s in (4, 5, 8)]
    assert rising == pytest.approx([0, 0.5 * (1 + math.cos(math.pi * 5 / 4)), 1])
    assert [warmup_cosine(s, warmup_steps=0, total_steps=4, num_cycles=1.0) for s in (0, 2, 4)] == pytest.approx([1, 0, 1])


def test_warmup_stable_decay_has_three_phases():
    found = [warmup_stable_decay(s, warmup_steps=2, total_steps=12, stable_ratio=0.6, min_lr_ratio=0.1) for s in range(14)]
    assert found[:9] == pytest.approx([0.5, *[1.0] * 8])
    assert found[10] == pytest.approx(0.55)
    assert found[12:] == pytest.approx([0.1, 0.1])
    with pytest.raises(AssertionError, match=r"stable_ratio is 1.5, expected in \[0, 1\]"):
        warmup_stable_decay(0, warmup_steps=0, total_steps=1, stable_ratio=1.5)


@pytest.mark.parametrize(("schedule", "end"), [("constant", 1.0), ("linear", 0.2), ("cosine", 0.2)])
def test_schedules_end_where_they_should(schedule, end):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = create_scheduler(optimizer, schedule, warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    rates = []
    for _ in range(7):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:2] == pytest.approx([1.0, 2.0])
    assert rates[6] == pytest.approx(2.0 * end)
    assert create_warmup_cosine_scheduler(optimizer, 2, 6).base_lrs == [2.0]


def test_the_cross_entropy_loss_is_the_sft_loss():
    assert create_cross_entropy_loss() is sft_loss


def test_a_backend_comes_from_a_directory_in_one_line(tmp_path: Path):
    create_tiny_model().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    create_char_tokenizer().save_pretrained(tmp_path)
    backend = create_pytorch_backend(tmp_path, lr=1e-3)
    assert backend.tokenizer is not None
    assert load_hf_model(tmp_path).config.vocab_size == 64


def test_a_directory_that_is_not_a_model_is_refused_with_what_is_missing(tmp_path: Path):
    with pytest.raises(ConfigError, match="not a directory"):
        load_hf_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"find_hub_model\('Qwen/Qwen3-0\.6B'\)\.directory"):
        load_hf_model("Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_model_directory(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        check_model_directory(tmp_path)
    for stage in ("sft", "dpo", "rl"):
        (tmp_path / stage / "checkpoints" / "step_0009").mkdir(parents=True)
        with pytest.raises(ConfigError, match=rf"its newest model is .*/{stage}/checkpoints/step_0009"):
            check_model_directory(tmp_path)
    with pytest.raises(DataError, match=r"no tokenizer .*\. It is the directory of a run: its newest model is .*/rl/checkpoints/step_0009"):
        load_tokenizer(tmp_path)  # of a teacher it is read first
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_hf_model(tmp_path)


def test_a_reference_backend_computes_log_probs_and_keeps_no_gradient(tmp_path: Path):
    model = create_tiny_model()
    batch = collate_samples([Sample(prompt="a", tokens=(3, 4, 5, 6), loss_mask=(0.0, 1.0, 1.0, 1.0), reward=1.0)])
    expected = create_pytorch_backend(create_tiny_model(), lr=0.1).forward(batch, select_log_probs)
    reference = create_reference_backend(model)
    assert torch.equal(reference.forward(batch, select_log_probs).value, expected.value)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert reference.optimizer.state_dict()["state"] == {}
