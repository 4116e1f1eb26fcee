"""What must hold on a GPU: kernels, parity with transformers in both dtypes, threads, checkpoints, transfers, memory, a run that learns.

python -m pytest -m gpu                             on a machine with a CUDA GPU
ROLLOUTS_TEST_DEVICE=cpu python -m pytest -m gpu    the tests that need no GPU, as a check of the tests themselves
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import needs
import pytest
import torch
import trio
from samples import draw_batch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen3Config
from warm_commands import find_python

from integration.dry_run.memory import Training, training_parts
from integration.dry_run.sizes import read_sizes
from integration.train import main
from rollouts.algorithms.logprobs import Sampling, chunked_log_probs
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.ranks.distributed import init_distributed, leave_distributed
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.inprocess.slots import SlotModel
from rollouts.engines.weights.cuda_ipc import SharedBucket, vllm_handles
from rollouts.engines.weights.nccl import create_communicator
from rollouts.models.forward import attention
from rollouts.models.forward.attention import attend_packed
from rollouts.models.forward.outputs import OutputOptions, compute_log_probs
from rollouts.models.forward.packing import pack_batch
from rollouts.models.forward.passes import move_batch, run_rows
from rollouts.models.loading import load_hf_model
from rollouts.types import SamplingParams

pytestmark = [pytest.mark.gpu, needs.gpu()]

DEVICE = needs.TEST_DEVICE
ON_CUDA = DEVICE.startswith("cuda")
ROOT = Path(__file__).parents[2]
LENGTHS = [37, 5, 64, 64, 20, 51]
LIMITS = {"float32": 2e-4, "bfloat16": 0.3}  # of a log-prob, in nats, against the model's own forward pass in float32

WIDTH, VOCAB = (512, 32_000) if ON_CUDA else (128, 2_000)  # a CPU checks these tests, on sizes of its own
SIZES = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
SIZES |= {"vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True}
FAMILIES = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
    "gemma3, window of 16": Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=16, sliding_window_pattern=2),
}


def make_model(family: str = "qwen2", dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=dtype)
    return model.to(DEVICE).eval()


def run_natively(model, row: torch.Tensor) -> torch.Tensor:
    """Return transformers' log-probs of the tokens of a row after the first. # [N - 1] float32"""
    tokens = row[None].to(DEVICE)
    return model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def get_log_probs(outputs):
    return outputs.log_probs


@needs.cuda()
@pytest.mark.parametrize(("dtype", "num_kv_heads"), [(torch.bfloat16, 2), (torch.float32, 2), (torch.float32, 14)])
def test_attention_takes_a_kernel_without_a_matrix_of_scores(dtype: torch.dtype, num_kv_heads: int):
    query = torch.randn(1, 14, 4096, 64, device=DEVICE, dtype=dtype)
    key = torch.randn(1, num_kv_heads, 4096, 64, device=DEVICE, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=num_kv_heads != 14)
    assert torch.cuda.max_memory_allocated() - before < 200 * 2**20, "the scores alone are 14 x 4096 x 4096 numbers"


@needs.cuda()
@pytest.mark.parametrize(("window", "num_kv_heads"), [(None, 2), (None, 8), (16, 2), (50, 8)])
def test_one_call_for_all_rows_is_a_call_for_each_length(window: int | None, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch):
    packed = pack_batch(draw_batch(0, LENGTHS), torch.device(DEVICE))
    shapes = [(1, sum(LENGTHS), heads, 64) for heads in (8, num_kv_heads, num_kv_heads)]
    leaves = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    direction = torch.randn(shapes[0], device=DEVICE)
    found = []
    for one_call in (True, False):
        monkeypatch.setattr(attention, "has_varlen", lambda *_, one_call=one_call: one_call)
        query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
        out = attend_packed(None, query, key, value, 0.2, 0.0, window, packed=packed)
        found.append((out.detach(), *torch.autograd.grad((out.float() * direction).sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max()) < 2e-2 * float(b.abs().max())  # an attended position too many or too few changes more


@needs.cuda()
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_micro_batch_is_submitted_without_waiting_for_the_device(dtype: str):
    backend = create_pytorch_backend(make_model(), lr=1e-4, device=DEVICE, compute_dtype=dtype)
    batch = draw_batch(0, LENGTHS, vocab_size=VOCAB)
    options = OutputOptions(compute_dtype=getattr(torch, dtype), with_entropy=True)
    backend.forward_backward(batch, sft_loss, with_entropy=True)  # allocates
    torch.cuda.set_sync_debug_mode("error")  # any wait raises
    try:
        moved, packed = move_batch(batch, torch.device(DEVICE)), pack_batch(batch, torch.device(DEVICE))
        loss, _ = sft_loss(run_rows(backend.model, moved, compute_log_probs, options, packed), moved)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_log_probs_are_those_of_transformers(family: str, dtype: str):
    model, batch = make_model(family), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-4, device=DEVICE, compute_dtype=dtype)
    found = backend.forward(batch, get_log_probs).value
    assert found.dtype == torch.float32
    for i, length in enumerate(LENGTHS):
        with torch.no_grad():
            expected = run_natively(model, batch.tokens[i, :length]).cpu()
        assert float((found[i, 1:length].cpu() - expected).abs().max()) < LIMITS[dtype]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_gradients_are_those_of_transformers(dtype: str, limit: float):
    model, batch = make_model(), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    own, reference = copy.deepcopy(model), model
    total = sum(run_natively(reference, batch.tokens[i, :length]).sum() for i, length in enumerate(LENGTHS))
    (-total / batch.loss_mask.sum()).backward()
    backend = create_pytorch_backend(own, lr=1e-4, device=DEVICE, compute_dtype=dtype)
    backend.forward_backward(batch, sft_loss)
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    error = sum(float((p.grad - wanted[name]).double().square().sum()) for name, p in own.named_parameters()) ** 0.5
    size = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    assert error / size < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [512, 4096])
def test_log_probs_of_chunks_are_those_of_float64(dtype: torch.dtype, chunk_size: int):
    hidden_size, vocab_size, count = (896, 151_936, 3000) if ON_CUDA else (64, 1000, 700)
    torch.manual_seed(0)
    hidden, weight = torch.randn(count, hidden_size, device=DEVICE), torch.randn(vocab_size, hidden_size, device=DEVICE) * 0.05
    targets = torch.randint(0, vocab_size, (count,), device=DEVICE)
    temperatures = torch.full((count,), 0.7, device=DEVICE)
    run = partial(chunked_log_probs, chunk_size=chunk_size, with_entropy=True)
    expected, expected_entropy = run(hidden.double(), weight.double(), targets, sampling=Sampling(temperatures.double()))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    found, entropy = run(hidden.to(dtype), weight, targets, sampling=Sampling(temperatures))
    assert entropy is not None and expected_entropy is not None and found.dtype == torch.float32
    limit = 1e-3 if dtype == torch.float32 else 0.1
    assert float((found - expected).detach().abs().max()) < limit
    assert float((entropy - expected_entropy).detach().abs().max()) < limit
    (found.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert bool(torch.isfinite(hidden.grad).all()) and bool(torch.isfinite(weight.grad).all())


async def test_worker_threads_beside_a_generating_engine_give_what_direct_calls_give():
    model, batch = make_model(), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    direct, threaded = (create_pytorch_backend(copy.deepcopy(model), lr=1e-4, device=DEVICE, compute_dtype="bfloat16") for _ in range(2))
    expected, found = [], []
    for _ in range(3):
        expected += [direct.forward_backward(batch, sft_loss).value["loss"], direct.optim_step().value["grad_norm"]]
    async with InProcessEngine(copy.deepcopy(model), eos_token_ids=()) as engine, open_pipeline(threaded) as pipeline:
        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(engine.generate, [5, 6, 7 + i], SamplingParams(max_tokens=20))
            for _ in range(3):
                found.append((await pipeline.forward_backward(batch, sft_loss).result())["loss"])
                found.append((await pipeline.optim_step().result())["grad_norm"])
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_restored_checkpoint_has_the_same_weights_and_the_same_next_step(tmp_path: Path):
    model, batch = make_model(), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    first, second = (create_pytorch_backend(copy.deepcopy(model), lr=1e-3, device=DEVICE, compute_dtype="bfloat16") for _ in range(2))
    first.forward_backward(batch, sft_loss)
    first.optim_step()
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    left, right = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)
    norms = []
    for backend in (first, second):
        backend.forward_backward(batch, sft_loss)
        norms.append(backend.optim_step().value["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_embedded_engine_reports_the_log_probs_of_transformers_and_repeats_itself(family: str):
    model = make_model(family)
    prompts = [[3 + i, 4, 5, 6 + i] * (2 + i) for i in range(8)]
    runs = []
    for _ in range(2):
        found: dict[int, object] = {}
        async with InProcessEngine(copy.deepcopy(model), eos_token_ids=()) as engine:

            async def generate(i: int, engine: InProcessEngine = engine, found: dict[int, object] = found) -> None:
                found[i] = await engine.generate(prompts[i], SamplingParams(max_tokens=40, seed=i), request_id=f"{i:03d}")

            async with trio.open_nursery() as nursery:
                for i in range(len(prompts)):
                    nursery.start_soon(generate, i)
        runs.append([found[i] for i in range(len(prompts))])
    assert [c.output_tokens for c in runs[0]] == [c.output_tokens for c in runs[1]]
    for completion in runs[0]:
        with torch.no_grad():
            expected = run_natively(model, torch.tensor([*completion.input_tokens, *completion.output_tokens])).cpu()
        found_log_probs = torch.tensor(completion.output_log_probs)
        assert float((found_log_probs - expected[len(completion.input_tokens) - 1 :]).abs().max()) < 1e-3


@needs.cuda()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_steps_of_cuda_graphs_have_the_logits_of_ordinary_steps(family: str, dtype: torch.dtype, limit: float):
    models = [make_model(family, dtype) for _ in range(2)]
    ordinary, recorded = (SlotModel(m, max_slots=8, name="engine", cuda_graphs=i == 1) for i, m in enumerate(models))
    rows = torch.randint(3, VOCAB, (8, 600), generator=torch.Generator().manual_seed(0)).tolist()
    lengths = [250, 5, 60, 17, 400, 33, 508, 9]  # some grow into other buckets
    for update in range(3):
        for count in (1, 3, 5, 8, 2):
            for slots in (ordinary, recorded):
                for slot in range(count):
                    slots.fill([slot], slots.prefill([rows[slot][: lengths[slot]]])[0])
            for step in range(12):
                tokens = torch.tensor([row[length + step] for row, length in zip(rows[:count], lengths, strict=False)], device=DEVICE)
                positions = [length + step for length in lengths[:count]]
                expected, found = (slots.decode(tokens, positions) for slots in (ordinary, recorded))
                assert float((found - expected).abs().max()) < limit * float(expected.abs().max()), (update, count, step)
        for slots in (ordinary, recorded):
            slots.forget()
            with torch.no_grad():
                for parameter in slots.model.parameters():  # written into, as by an update
                    parameter.mul_(1.25)
    assert recorded.graphs is not None and not recorded.graphs.is_refused and recorded.graphs._recorded


@needs.cuda()
async def test_an_engine_with_cuda_graphs_reports_the_log_probs_of_transformers_beside_training():
    model, batch = make_model(), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    backend = create_pytorch_backend(copy.deepcopy(model), lr=1e-4, device=DEVICE)
    found = {}
    async with InProcessEngine(copy.deepcopy(model), eos_token_ids=(), cuda_graphs=True) as engine, open_pipeline(backend) as pipeline:

        async def generate(i: int) -> None:
            found[i] = await engine.generate([5, 6, 7 + i], SamplingParams(max_tokens=40 + 8 * i, seed=i), request_id=f"{i:03d}")

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(generate, i)
            for _ in range(4):
                await pipeline.forward_backward(batch, sft_loss).result()
                await pipeline.optim_step().result()
        assert not engine._slots.graphs.is_refused and engine._slots.graphs._recorded
    for completion in found.values():
        with torch.no_grad():
            expected = run_natively(model, torch.tensor([*completion.input_tokens, *completion.output_tokens])).cpu()
        assert float((torch.tensor(completion.output_log_probs) - expected[len(completion.input_tokens) - 1 :]).abs().max()) < 1e-3


def test_fsdp_on_one_rank_in_bfloat16_is_the_single_process():
    model, batch = make_model(), draw_batch(0, LENGTHS, vocab_size=VOCAB)
    single = create_pytorch_backend(copy.deepcopy(model), lr=1e-4, device=DEVICE, compute_dtype="bfloat16")
    ranks = init_distributed(DEVICE)
    try:
        sharded = create_fsdp_backend(copy.deepcopy(model), ranks=ranks, lr=1e-4, config=FSDPConfig(mixed_precision="bfloat16"))
        for _ in range(2):
            steps = [(b.forward_backward(batch, sft_loss).value["loss"], b.optim_step().value["grad_norm"]) for b in (single, sharded)]
            assert steps[1] == pytest.approx(steps[0], rel=2e-2)
    finally:
        leave_distributed()


@needs.cuda()
def test_a_group_of_one_over_nccl_keeps_the_bytes():
    communicator = create_communicator(1, torch.device("cuda", 0))
    communicator.join()
    sent = torch.randint(0, 255, (1 << 20,), device=DEVICE, dtype=torch.uint8)
    kept = sent.clone()
    communicator.broadcast(sent)
    communicator.abort()
    assert torch.equal(sent, kept)


READER = """
import base64, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
print("ready", flush=True)
for line in sys.stdin:
    handles = pickle.loads(base64.b64decode(line))
    arguments = list(handles[str(torch.cuda.get_device_properties(0).uuid)])
    arguments[6] = 0
    tensor = rebuild_cuda_tensor(*arguments)
    print(int(tensor.long().sum()), flush=True)
    del tensor
    torch.cuda.ipc_collect()
"""


@needs.cuda()
def test_another_process_reads_buckets_through_cuda_ipc_and_their_memory_is_given_back():
    child = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        used = []
        for _ in range(6):
            bucket = torch.randint(0, 255, (1 << 28,), device=DEVICE, dtype=torch.uint8)
            expected = int(bucket.long().sum())
            torch.cuda.synchronize()
            child.stdin.write(vllm_handles(SharedBucket((bucket,))) + "\n")
            child.stdin.flush()
            assert int(child.stdout.readline()) == expected
            del bucket
            torch.cuda.ipc_collect()
            used.append(torch.cuda.memory_allocated())
    finally:
        child.stdin.close()
        child.wait()
    assert used[-1] <= used[1] + 300 * 2**20


@needs.cuda()
@pytest.mark.parametrize("tokens", [4096, 16_384])
def test_the_memory_of_a_step_is_the_one_that_the_dry_run_computes(tokens: int):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    model, batch = make_model(), draw_batch(0, [512] * (tokens // 512), vocab_size=VOCAB)
    computed = sum(part.size for part in training_parts(read_sizes(model.config), Training(tokens=tokens, precision="bfloat16")))
    backend = create_pytorch_backend(model, lr=1e-4, device=DEVICE, compute_dtype="bfloat16")
    for _ in range(3):
        backend.forward_backward(batch, sft_loss)
        backend.optim_step()
    torch.cuda.synchronize()
    assert 0.9 < computed / (torch.cuda.max_memory_allocated() - held) < 1.15


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_turns_of_a_conversation_report_the_log_probs_of_transformers(family: str):
    model, context = make_model(family), [3 + i for i in range(150)]
    async with InProcessEngine(copy.deepcopy(model), eos_token_ids=()) as engine:
        for turn in range(4):
            completion = await engine.generate(context, SamplingParams(max_tokens=20, seed=turn))
            tokens = [*completion.input_tokens, *completion.output_tokens]
            with torch.no_grad():
                expected = run_natively(model, torch.tensor(tokens)).cpu()[len(context) - 1 :]
            assert float((torch.tensor(completion.output_log_probs) - expected).abs().max()) < 1e-3
            context = [*tokens, *range(5 + turn, 40)]


async def test_weights_of_the_trainer_reach_the_engine_unchanged():
    model = make_model()
    backend = create_pytorch_backend(make_model("qwen2"), lr=1e-2, device=DEVICE)
    backend.forward_backward(draw_batch(0, LENGTHS, vocab_size=VOCAB), sft_loss)
    backend.optim_step()
    served = copy.deepcopy(model)
    async with InProcessEngine(served, eos_token_ids=()) as engine:
        await engine.update_weights(backend.get_weights().value, 1)
        assert await engine.get_weight_version() == 1
    trained = backend.model.state_dict()
    assert all(torch.equal(served.state_dict()[name], trained[name]) for name in trained)


def run_job(directory: Path, *arguments: str) -> dict[str, float]:
    """Run the command on the device and return its summary's numbers."""
    assert main(["--output-dir", str(directory), "--quiet", "--model.device", DEVICE, *arguments]) == 0
    return json.loads((directory / "summary.json").read_text())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arguments", [(), ("--rl.asynchronous.enabled",)], ids=["in turn", "asynchronous"])
def test_the_default_job_learns(tmp_path: Path, arguments: tuple[str, ...]):
    run_job(tmp_path / "run", *arguments)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert accuracies[-1] >= 0.9
    assert accuracies[-1] > accuracies[0] + 0.5


@pytest.mark.timeout(1200)
@(needs.cuda(2) if ON_CUDA else needs.gpu())
def test_two_ranks_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not ON_CUDA:
        monkeypatch.setattr(sys, "executable", find_python())  # which has imported torch, and whose forks may not use CUDA
    small = ["--mode", "sft", "--sft.num-steps", "4", "--backend.compute-dtype", "float32", "--evaluation.num-prompts", "8", "--quiet"]
    losses = []
    for count in (1, 2):
        directory = tmp_path / str(count)
        arguments = [
            "--backend.kind",
            "fsdp",
            "--backend.num-processes",
            str(count),
            "--model.device",
            DEVICE,
            "--output-dir",
            str(directory),
        ]
        subprocess.run([sys.executable, "-m", "integration.train", *small, *arguments], cwd=ROOT, check=True, capture_output=True)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_saved_model_is_loaded_onto_the_device(tmp_path: Path):
    make_model().save_pretrained(tmp_path)
    model = load_hf_model(tmp_path, device=torch.device(DEVICE))
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE.partition(":")[0]}
