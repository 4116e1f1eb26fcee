"""Linear layers with products by oneDNN: the numbers of torch's, gradients, and no packed copy of weights that are gone.

On a machine whose torch has no such operators, layers stay as they are, and the tests of numbers hold for torch's own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
import trio
from torch import Tensor

from rollouts.algorithms.logprobs import LogitTransform, chunked_log_probs
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.lora.config import LoRAConfig
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.models import linear
from rollouts.models.linear import (
    ONEDNN,
    OneDNNLinear,
    choose_kernels,
    forget_packed,
    has_onednn,
    is_worth_onednn,
    multiply,
    multiply_transposed,
    pack,
    use_kernels,
)
from rollouts.models.prepare import recompute_activations
from rollouts.testing import create_tiny_model
from rollouts.types import Sample


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute products of any size."""
    monkeypatch.setattr(linear, "_LEAST_MULTIPLICATIONS", 1)


def close(found: Tensor, wanted: Tensor) -> None:
    found, wanted = found.detach(), wanted.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@needs.onednn()
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (7, 33, 5), (64, 16, 130), (200, 130, 16)])
def test_products_are_those_of_torch(rows: int, inputs: int, outputs: int):
    x, w, g, b = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs), torch.randn(outputs)
    for weight in (w, pack(w), w.t().contiguous().t()):
        close(multiply(x, weight, b), x @ w.t() + b)
    close(multiply(g, w.t()), g @ w)
    close(multiply_transposed(g, x), g.t() @ x)
    close(multiply(x.view(1, rows, inputs), w), (x @ w.t())[None])


def test_only_large_plain_float32_products_on_a_cpu_are_worth_it():
    rows, weight = torch.zeros(2**11, 32), torch.zeros(32, 32)
    assert is_worth_onednn(rows, weight)
    assert not is_worth_onednn(rows[:-1], weight), "one multiplication too few"
    assert not is_worth_onednn(rows.double(), weight.double())
    assert not is_worth_onednn(rows, weight.bfloat16())
    assert not is_worth_onednn(rows.bfloat16(), weight.bfloat16())
    assert not is_worth_onednn(rows.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_worth_onednn(rows, weight), "autocast computes in bfloat16"

    class Sharded(Tensor):
        pass

    assert not is_worth_onednn(rows, weight.as_subclass(Sharded))


@pytest.mark.parametrize(
    ("vendor", "level", "there", "device", "expected"),
    [
        ("AuthenticAMD", True, True, "cpu", "onednn"),
        ("GenuineIntel", True, True, "cpu", "packed"),
        ("GenuineIntel", False, True, "cpu", "torch"),
        ("GenuineIntel", True, True, "cuda:1", "torch"),
        ("", True, True, "cpu", "torch"),
        ("AuthenticAMD", False, True, "cpu", "torch"),
        ("AuthenticAMD", True, False, "cpu", "torch"),
        ("AuthenticAMD", True, True, "cuda:1", "torch"),
    ],
)
def test_auto_is_a_function_of_the_processor(monkeypatch, vendor: str, level: bool, there: bool, device: str, expected: str):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(linear, "read_vendor", lambda: vendor)
    monkeypatch.setattr(linear, "_has_avx512", lambda: level)
    monkeypatch.setattr(linear, "has_onednn", lambda: there)
    assert choose_kernels(device) == expected


def test_without_the_operators_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    def fail(*call: Any) -> Tensor:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(linear, "multiply", fail)
    assert not has_onednn.__wrapped__()  # pyright: ignore[reportFunctionMemberAccess]
    monkeypatch.setattr(linear, "has_onednn", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    use_kernels(model, "onednn")
    assert type(model[0]) is torch.nn.Linear


@needs.onednn()
def test_operators_that_compute_something_else_do_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "multiply", lambda rows, weight: torch.zeros(len(rows), 16))
    assert not has_onednn.__wrapped__()  # pyright: ignore[reportFunctionMemberAccess]


@needs.onednn()
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "inputs"])
def test_layer_has_the_values_and_gradients_of_torch(bias: bool, frozen: str):
    own = torch.nn.Linear(24, 40, bias=bias)
    own.weight.requires_grad_(frozen != "weight")
    ours = copy.deepcopy(own)
    use_kernels(ours, "onednn")
    assert type(ours) is OneDNNLinear
    assert list(ours.state_dict()) == list(own.state_dict())
    inputs = [torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(0)).requires_grad_(frozen != "inputs") for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((own, ours), inputs, strict=True)]
    close(outputs[1], outputs[0])
    for output in outputs:
        output.sin().sum().backward()
    pairs = [(inputs[0], inputs[1]), *zip(own.parameters(), ours.parameters(), strict=True)]
    for theirs, mine in pairs:
        assert (theirs.grad is None) == (mine.grad is None)
        if theirs.grad is not None and mine.grad is not None:
            close(mine.grad, theirs.grad)


@needs.onednn()
@pytest.mark.usefixtures("small_products")
def test_a_pass_keeps_no_more_than_that_of_torch():
    """A frozen layer below adapters keeps no inputs."""
    kept: list[Tensor] = []
    layer = torch.nn.Linear(24, 40, bias=False).requires_grad_(False)
    use_kernels(layer, "onednn")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(torch.randn(9, 24, requires_grad=True))
    assert [tuple(x.shape) for x in kept] == [(40, 24)]


@needs.onednn()
def test_products_in_bfloat16_under_autocast_stay_torchs():
    own = torch.nn.Linear(256, 256)
    ours, x = copy.deepcopy(own), torch.randn(64, 256)
    use_kernels(ours, "onednn")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), own(x))


def double(layer: torch.nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def double_in_inference_mode(layer: torch.nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(2)


def replace_parameter(layer: torch.nn.Linear) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def assign_data(layer: torch.nn.Linear) -> None:
    layer.weight.data = layer.weight.detach() * 2


def load(layer: torch.nn.Linear) -> None:
    layer.load_state_dict({"weight": layer.weight.detach() * 2})


def write_through_a_view(layer: torch.nn.Linear) -> None:
    layer.state_dict()["weight"].copy_(layer.weight.detach() * 2)


def update(layer: torch.nn.Linear) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-1)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()


@needs.onednn()
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("write", [double, double_in_inference_mode, replace_parameter, assign_data, load, write_through_a_view, update])
def test_a_packed_weight_is_never_stale(write: Callable[[torch.nn.Linear], None]):
    layer, x = torch.nn.Linear(24, 40, bias=False), torch.randn(9, 24)
    use_kernels(layer, "onednn", packs_weights=True)
    with torch.inference_mode():
        before = layer(x)
        close(before, x @ layer.weight.t())
    assert layer.read_packed() is layer.read_packed(), "packed once"
    write(layer)
    with torch.inference_mode():
        after = layer(x)
        close(after, x @ layer.weight.t())
        assert not torch.equal(before, after)


@needs.onednn()
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("make", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_pack_nothing(make: Callable[[Any], Any]):
    layer, x = torch.nn.Linear(24, 40, bias=False), torch.randn(9, 24)
    use_kernels(layer, "onednn", packs_weights=True)
    with torch.inference_mode():
        layer(x)
        other = make(layer)
        assert not other.packs_weight, "a copy may be trained by a fused optimizer, whose writes are not counted"
        double_in_inference_mode(other)
        close(other(x), 2 * layer(x))


@needs.onednn()
@pytest.mark.usefixtures("small_products")
def test_what_was_packed_can_be_forgotten():
    layer, x = torch.nn.Linear(24, 40, bias=False), torch.randn(9, 24)
    use_kernels(layer, "onednn", packs_weights=True)
    with torch.inference_mode():
        layer(x)
        layer.weight.data.mul_(2)  # not counted
        forget_packed(layer)
        close(layer(x), x @ layer.weight.t())


@needs.onednn()
@pytest.mark.parametrize("rows", [1, 4, 33, 512])
def test_packed_is_for_large_weights_of_an_engine(rows: int):
    def create() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 511))  # 2^19 numbers, and 1,024 fewer

    own, trained, served, x = create(), create(), create(), torch.randn(rows, 512)
    use_kernels(trained, "packed")
    use_kernels(served, "packed", packs_weights=True)
    assert [type(layer) for layer in trained] == [torch.nn.Linear] * 2
    assert [type(layer) for layer in served] == [OneDNNLinear, torch.nn.Linear]
    with torch.inference_mode():
        assert torch.equal(trained(x), own(x))
        torch.testing.assert_close(served(x), own(x), rtol=1e-5, atol=1e-5)
        assert (getattr(served[0], "_packed", None) is not None) == (rows >= 4), "products of fewer than 2^21 multiplications are torch's"
    use_kernels(served, "torch")
    assert type(served[0]) is torch.nn.Linear


@needs.onednn()
def test_kernels_of_torch_undo_those_of_onednn():
    layer = torch.nn.Linear(4, 4)
    names = set(vars(layer))
    use_kernels(layer, "onednn", packs_weights=True)
    layer.read_packed()
    use_kernels(layer, "torch")
    assert (type(layer), set(vars(layer))) == (torch.nn.Linear, names)


def test_layers_of_other_classes_are_left_alone():
    class Own(torch.nn.Linear):
        pass

    layer = Own(4, 4)
    use_kernels(layer, "onednn")
    assert type(layer) is Own


@needs.onednn()
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(3.0, 1.5)])
def test_head_has_the_values_and_gradients_of_torch(transform: LogitTransform):
    generator = torch.Generator().manual_seed(0)
    targets, found = torch.randint(0, 50, (37,), generator=generator), []
    start = (torch.randn(37, 24, generator=generator), torch.randn(50, 24, generator=generator))
    for products in (None, ONEDNN):
        hidden, weight = (x.clone().requires_grad_() for x in start)
        change = LogitTransform(transform.scale, transform.soft_cap, products)
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, chunk_size=16, with_entropy=True, transform=change)
        assert entropy is not None
        (log_probs.sin().sum() + entropy.sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        found.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs)


def rows() -> Any:
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 17, 30)
    samples = [
        Sample(tokens=tuple(torch.randint(3, 50, (n,), generator=generator).tolist()), loss_mask=(0.0,) + (1.0,) * (n - 1), index=i)
        for i, n in enumerate(lengths)
    ]
    batch = collate_samples(samples)
    return replace(batch, loss_weights=batch.loss_mask)


def train(kernels: Any, *, steps: int = 3, recomputes: bool = False, rank: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    model = create_tiny_model()
    if recomputes:
        recompute_activations(model)
    backend = create_pytorch_backend(model, lr=1e-3, kernels=kernels, lora=LoRAConfig(rank=rank) if rank else None)
    assert any(type(m) is OneDNNLinear for m in backend.model.modules()) == (kernels == "onednn")
    batch = rows()
    seen: list[float] = []
    for _ in range(steps):
        seen.append(backend.forward_backward(batch, sft_loss).value["loss"])
        seen.append(backend.optim_step().value["grad_norm"])
        seen.append(float(backend.forward(batch, lambda outputs: outputs.log_probs).value.sum()))  # reads what a fused optimizer wrote
    return seen, dict(backend.get_weights().value)


@needs.onednn()
@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("options", [{}, {"recomputes": True}, {"rank": 4}])
def test_training_has_the_numbers_of_torch_and_the_same_bits_twice(options: dict[str, Any]):
    theirs, _ = train("torch", **options)
    ours, weights = train("onednn", **options)
    assert ours == pytest.approx(theirs, rel=1e-4)
    again, same = train("onednn", **options)
    assert ours == again
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@needs.onednn()
@pytest.mark.usefixtures("small_products")
def test_engine_computes_with_the_weights_that_it_was_given_last(tmp_path: Path):
    """Train, sync in memory and from the disk, and compare with transformers each time."""
    trained = create_pytorch_backend(create_tiny_model(), lr=1e-2, kernels="onednn")
    engine = InProcessEngine(create_tiny_model(), eos_token_ids=(), kernels="onednn")
    layers = [m for m in engine._model.modules() if isinstance(m, OneDNNLinear)]  # pyright: ignore[reportPrivateUsage]
    assert layers and all(layer.packs_weight for layer in layers)
    batch = rows()
    tokens = batch.tokens[2, :30].tolist()

    def check() -> None:
        model = create_tiny_model()
        model.load_state_dict(dict(trained.get_weights().value))
        with torch.no_grad():
            wanted = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        wanted = wanted[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found = trio.run(engine.recompute_output_log_probs, tokens, 1)
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-4, atol=1e-4)

    check()
    for version in (1, 2, 3):
        trained.forward_backward(batch, sft_loss)
        trained.optim_step()
        if version == 2:
            trained.export_weights(tmp_path)
            trio.run(engine.update_weights_from_checkpoint, tmp_path)
        else:
            trio.run(engine.update_weights, trained.view_weights().value, version)
        check()
    assert any(layer._packed is not None for layer in layers), "products came from packed weights"  # pyright: ignore[reportPrivateUsage]


@needs.onednn(bfloat16=True)
def test_packed_weights_in_bfloat16_give_torchs_numbers():
    """Torch calls oneDNN for them, too, and packs at each call."""
    own = torch.nn.Linear(256, 384, bias=False, dtype=torch.bfloat16)
    ours = copy.deepcopy(own)
    use_kernels(ours, "onednn", packs_weights=True)
    with torch.inference_mode():
        for count in (1, 5, 200):
            x = torch.randn(count, 256, dtype=torch.bfloat16)
            torch.testing.assert_close(ours(x), own(x))
    assert ours._packed is not None  # pyright: ignore[reportPrivateUsage]
