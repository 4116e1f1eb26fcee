"""The measurements behind the rows of benchmarks.run. Each is a function (size, work) -> figures, run in a process of its own."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import trio

from benchmarks import gateway_requests, generate_throughput, http_clients, logprobs, orchestration, startup
from benchmarks.delayed_server import raise_open_files, run_server
from benchmarks.measure import MODEL_SIZES, compare, create_model, processor_seconds
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend
from rollouts.backends.protocol import TrainingBackend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.training.steps import submit_optimizer_step
from rollouts.training.weight_sync import publish_weights
from rollouts.types import Sample

Figures = Mapping[str, float]
Batches = Sequence[Sequence[Sample]]
OURS, OTHER = "rollouts", "alternative"
WARM_UP = 2
"""Prompts of a generation's warm-up, and rows of a training step's."""
WHOLE_BATCH = 1 << 30
"""Tokens of a micro-batch: more than any batch has here, for which memory suffices."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much work the measurements do."""

    repeats: int = 3  # turns of each contender after one warm-up
    long_repeats: int = 3  # the same where a turn takes from 10 seconds to a minute: models of size M and L, log-probs
    prompts: Mapping[str, int]  # prompts of a generation, by size of model
    samples: int = 8  # samples of a prompt
    batches: Mapping[str, tuple[int, int]]  # SFT: optimizer steps and rows of each, by size of model
    tokens: int = 4096  # log-probs: tokens
    vocabulary: int = 150_000  # log-probs: entries of the vocabulary
    groups: int = 1000  # orchestration: groups of 8
    in_flight: int = 1000  # HTTP: requests at a time
    engines: Mapping[str, int]  # simulator: engines, by the name of the row's size
    hours: float = 1.0  # simulator: virtual time
    learning_seeds: int = 3  # seeds of the runs against TRL's


_BATCHES = {"S": (6, 16), "M": (2, 16), "L": (1, 8)}
_ENGINES = {"1,000 engines": 1000, "10,000 engines": 10_000}
FULL = Work(prompts={"S": 64, "M": 64, "L": 8}, batches=_BATCHES, engines=_ENGINES)
QUICK = Work(repeats=2, long_repeats=1, prompts=FULL.prompts, batches=_BATCHES, engines=_ENGINES)
"""The work of FULL with fewer turns, so that its ratios can be compared with those of FULL."""
TINY = Work(
    repeats=1, long_repeats=1, prompts=dict.fromkeys("SML", 2), samples=2, batches=dict.fromkeys("SML", (2, 4)), tokens=64, vocabulary=2000,
    groups=4, in_flight=4, engines=dict.fromkeys(_ENGINES, 2), hours=0.05, learning_seeds=1,
)  # fmt: skip
"""For a test: every measurement end to end in a second, its figures without meaning. Models of size S stand for all sizes."""


def command_kernels() -> dict[str, Any]:
    """Return the kernels of linear layers that the command chooses, as an argument of backends and engines; {} if it has no choice."""
    if importlib.util.find_spec("rollouts.models.linear") is None:
        return {}
    return {"kernels": importlib.import_module("rollouts.models.linear").choose_kernels("cpu")}


def pick_model(size: str, work: Work) -> str:
    """Return the size of the model that is measured."""
    return "S" if work is TINY else size


def count_turns(size: str, work: Work) -> int:
    """Return the turns of each contender with a model of this size."""
    return work.repeats if size == "S" else work.long_repeats


# -- generation


def generate_against_hf(size: str, work: Work) -> Figures:
    """Measure generated tokens per processor second over those of transformers' generate, of prompts with ragged ends."""
    model_size = pick_model(size, work)
    prompts, lengths = generate_throughput.create_requests(model_size, work.prompts[size], work.samples)
    plain = create_model(model_size).eval()
    plain.generation_config.eos_token_id = plain.config.eos_token_id = None

    def generate(number: int) -> int:
        return generate_throughput.run_generate(plain, prompts[:number], lengths[: number * work.samples], work.samples)

    ours = create_generation(model_size, prompts, lengths, work)
    contenders = {OTHER: partial(generate, len(prompts)), OURS: partial(ours, len(prompts))}
    warm_ups = {OTHER: partial(generate, WARM_UP), OURS: partial(ours, WARM_UP)}
    return {"ratio": compare(contenders, count_turns(size, work), warm_ups=warm_ups)[OURS]["ratio_cpu"]}


def create_generation(size: str, prompts: list[list[int]], lengths: list[int], work: Work) -> Callable[[int], int]:
    """Create a function that generates the samples of the first prompts with the embedded engine, prefill included: its weights are new
    at each call."""
    model = create_model(size)
    engine = InProcessEngine(model, eos_token_ids=(), max_slots=len(lengths), **command_kernels())

    async def run(number: int) -> int:
        await engine.update_weights(dict(model.named_parameters()), await engine.get_weight_version() + 1)
        return await generate_throughput.run_engine(engine, prompts[:number], lengths[: number * work.samples], work.samples)

    return partial(trio.run, run)


def generate_against_vllm(size: str, work: Work) -> Figures:
    """Measure generated tokens per processor second over those of vLLM on a CPU, eager, in a process of the environment VLLM_PYTHON."""
    model_size = pick_model(size, work)
    prompts, lengths = generate_throughput.create_requests(model_size, work.prompts[size], work.samples)
    with tempfile.TemporaryDirectory() as folder:
        create_model(model_size).save_pretrained(folder)
        (Path(folder) / "requests.json").write_text(json.dumps({"prompts": prompts, "lengths": lengths, "samples": work.samples}))
        with open_vllm(os.environ["VLLM_PYTHON"], folder) as process:
            ours = create_generation(model_size, prompts, lengths, work)
            table = compare(
                {OTHER: partial(ask_vllm, process, len(prompts)), OURS: partial(ours, len(prompts))},
                count_turns(size, work),
                {OTHER: partial(processor_seconds, process.pid)},
                {OTHER: partial(ask_vllm, process, WARM_UP), OURS: partial(ours, WARM_UP)},
            )
    return {"ratio": table[OURS]["ratio_cpu"]}


@contextmanager
def open_vllm(python: str, folder: str) -> Generator[subprocess.Popen[str]]:
    """Run benchmarks/vllm_worker.py on the model and requests in a folder for the block."""
    command = [python, str(Path(__file__).with_name("vllm_worker.py")), folder]
    with (
        open(Path(folder) / "vllm.log", "w+") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        if read_line(process.stdout) != "ready\n":
            process.kill()
            log.seek(0)
            raise RuntimeError(f"{python} did not start vLLM; the end of its log:\n{log.read()[-2000:]}")
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask_vllm(process: subprocess.Popen[str], number: int) -> int:
    """Let vLLM generate the samples of the first prompts. Returns the number of tokens."""
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return int(read_line(process.stdout))


def read_line(stream: IO[str] | None) -> str:
    """Read a line of a process."""
    assert stream is not None
    return stream.readline()


# -- training


def create_batches(size: str, work: Work) -> Batches:
    """Create the rows of the SFT steps: log-normal lengths between 20 and 512, with a mean of about 130."""
    generator = np.random.default_rng(1)
    steps, rows = work.batches[size]
    lengths = np.clip(generator.lognormal(4.6, 0.75, steps * rows).astype(int), 20, 512)
    vocabulary = MODEL_SIZES[pick_model(size, work)]["vocab_size"]
    samples = [
        Sample(tokens=tuple(generator.integers(3, vocabulary, n).tolist()), loss_mask=(0.0, *(1.0,) * (int(n) - 1)), index=i)
        for i, n in enumerate(lengths)
    ]
    return [samples[i : i + rows] for i in range(0, len(samples), rows)]


def create_training(size: str) -> Callable[[Batches], int]:
    """Create a function that trains on batches as the SFT loop does: collation, forward and backward pass, AdamW step."""
    backend = create_pytorch_backend(create_model(size), lr=1e-4, **command_kernels())
    return create_training_of(backend)


def create_training_of(backend: TrainingBackend) -> Callable[[Batches], int]:
    """Create a function that takes an optimizer step of this backend on each batch, and returns the number of tokens."""

    async def run(batches: Batches) -> int:
        for batch in batches:
            step = submit_optimizer_step(backend, collate_samples(batch), sft_loss, weigh=token_mean, max_tokens_per_microbatch=WHOLE_BATCH)
            await step.result()
        return count_tokens(batches)

    return partial(trio.run, run)


def shorten(batches: Batches) -> Batches:
    """Return what a warm-up trains on."""
    return [batches[0][:WARM_UP]]


def count_tokens(batches: Batches) -> int:
    """Count the tokens of batches."""
    return sum(len(sample.tokens) for batch in batches for sample in batch)


def create_padded_training(size: str) -> Callable[[Batches], int]:
    """Create a function that trains as a plain loop does: padded batch, attention mask, transformers' own loss, AdamW step."""
    model = create_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(batches: Batches) -> int:
        for batch in batches:
            rows = [torch.tensor(sample.tokens) for sample in batch]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            real = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            labels = tokens.masked_fill(~real, -100)
            model(input_ids=tokens, attention_mask=real.long(), labels=labels, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return count_tokens(batches)

    return run


def train_against_padded(size: str, work: Work) -> Figures:
    """Measure trained tokens per processor second over those of a padded loop with transformers' model and loss."""
    model_size, batches = pick_model(size, work), create_batches(size, work)
    trainings = {OTHER: create_padded_training(model_size), OURS: create_training(model_size)}
    contenders = {name: partial(train, batches) for name, train in trainings.items()}
    warm_ups = {name: partial(train, shorten(batches)) for name, train in trainings.items()}
    return {"ratio": compare(contenders, count_turns(size, work), warm_ups=warm_ups)[OURS]["ratio_cpu"]}


def train_against_trl(size: str, work: Work, *, packing: bool) -> Figures:
    """Measure trained tokens per processor second over those of TRL's SFTTrainer.train(); making the trainer does not count."""
    from benchmarks.trl_training import TRLTraining

    model_size, batches = pick_model(size, work), create_batches(size, work)
    other, train = TRLTraining(model_size, batches, packing=packing), create_training(model_size)
    contenders = {OTHER: other.run, OURS: partial(train, batches)}
    warm_ups = {OTHER: TRLTraining(model_size, shorten(batches), packing=packing).run, OURS: partial(train, shorten(batches))}
    return {"ratio": compare(contenders, count_turns(size, work), {OTHER: lambda: other.cpu_s}, warm_ups)[OURS]["ratio_cpu"]}


def train_against_bound(size: str, work: Work) -> Figures:
    """Measure the share of a step in the processor seconds that its products and attention take at the fastest rate of this machine."""
    model_size, batches = pick_model(size, work), create_batches(size, work)
    train = create_training(model_size)
    train(shorten(batches))
    shares: list[float] = []
    for _ in range(count_turns(size, work)):
        bound = bound_seconds(model_size, batches)
        started = time.process_time()
        train(batches)
        shares.append(bound / (time.process_time() - started))
    return {"share": float(np.median(shares))}


def bound_seconds(size: str, batches: Batches) -> float:
    """Return the processor seconds of 6 x parameters x tokens and of attention at the rate of the fastest matrix products.

    The rate is measured now, for the shapes of the model's layers and the tokens of the first batch; the faster one of MKL and oneDNN
    counts for each product. Attention computes 6 x layers x width x length^2 for a row: causal, forward and backward.
    """
    shape = MODEL_SIZES[size]
    hidden, inner, layers, head = (shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"))
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    products = {
        (hidden, queries): layers, (hidden, keys): 2 * layers, (queries, hidden): layers, (hidden, inner): 2 * layers,
        (inner, hidden): layers, (hidden, shape["vocab_size"]): 1,
    }  # fmt: skip
    tokens = count_tokens(batches[:1])
    seconds = sum(times * product_seconds(tokens, *ends) for ends, times in products.items())
    operations = sum(6.0 * tokens * inputs * outputs * times for (inputs, outputs), times in products.items())
    attention = 6.0 * layers * queries * sum(len(sample.tokens) ** 2 for batch in batches for sample in batch)
    return seconds * count_tokens(batches) / tokens + attention * seconds / operations


def product_seconds(tokens: int, inputs: int, outputs: int) -> float:
    """Return the least processor seconds of a linear layer's three products: forward, gradient of the input, gradient of the weight."""
    kernels: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [lambda a, b: a @ b.t()]
    if torch.backends.mkldnn.is_available():
        kernels.append(lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    x, weight, gradient = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
    across, turned = weight.t().contiguous(), (gradient.t().contiguous(), x.t().contiguous())
    repeats = max(1, int(1e9 / (2 * tokens * inputs * outputs)))
    seconds = 0.0
    for a, b in ((x, weight), (gradient, across), turned):
        seconds += min(least_seconds(partial(kernel, a, b), repeats) for kernel in kernels)
    return seconds


def least_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the least processor seconds of a call in three series of `repeats`."""
    found: list[float] = []
    with torch.no_grad():
        work()
        for _ in range(3):
            started = time.thread_time()
            for _ in range(repeats):
                work()
            found.append((time.thread_time() - started) / repeats)
    return min(found)


def log_probs_against_formula(size: str, work: Work) -> Figures:
    """Measure extra memory and processor seconds of chunked log-probs, forward and backward, over those of log_softmax."""
    names = list(logprobs.CONTENDERS)
    settings = Namespace(hidden=256, repeats=work.long_repeats, threads=1, chunk_size=None)
    row = logprobs.compare(settings, work.tokens, work.vocabulary, [names[0], names[-1]])[names[-1]]
    return {"memory": row["ratio_mb"], "cpu": row["ratio_cpu"]}


def update_weights_against_copy(size: str, work: Work) -> Figures:
    """Measure processor seconds of a loop's weight update, from backend to embedded engine, over those of a bare copy of every tensor.

    As in a loop, the weights are those of an optimizer step, which does not count.
    """
    model = create_model(pick_model(size, work))
    backend = create_pytorch_backend(model, lr=1e-4, **command_kernels())
    create_training_of(backend)(shorten(create_batches(size, work)))
    engine = InProcessEngine(create_model(pick_model(size, work)), eos_token_ids=(), max_slots=8, **command_kernels())
    source = list(model.parameters())
    target = [torch.empty_like(value) for value in source]

    @torch.no_grad()
    def copy() -> int:
        for to, value in zip(target, source, strict=True):
            to.copy_(value)
        return 1

    async def update() -> int:
        await publish_weights(backend, [engine], version=await engine.get_weight_version() + 1, exports=None)
        return 1

    table = compare({OTHER: copy, OURS: partial(trio.run, update)}, 3 * work.repeats)
    return {"ratio": 1 / table[OURS]["ratio_cpu"]}


# -- learning


def learn_against_trl(size: str, work: Work) -> Figures:
    """Measure processor seconds of RL to an accuracy over those of TRL's GRPOTrainer, from the same weights.

    Args:
        size: TASK to ACCURACY.
    """
    task, _, threshold = size.partition(" to ")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        options = ["--against", "trl", "--task", task, "--threshold", "0" if work is TINY else threshold, "--output", str(path)]
        seeds = map(str, range(work.learning_seeds))
        subprocess.run([sys.executable, "-m", "benchmarks.time_to_accuracy", *options, "--seeds", *seeds], check=True, stdout=sys.stderr)
        summary = json.loads(path.read_text())["summary"]
    if "ratio" not in summary:
        raise RuntimeError(f"{task}: not both contenders reached {threshold} with any of {work.learning_seeds} seeds")
    return {"ratio": summary["ratio"]}


# -- work beside models


def orchestrate_against_gather(size: str, work: Work) -> Figures:
    """Measure rollouts per processor second of the manager and the executor over those of asyncio.gather of the same functions.

    All three run in the settings of the interpreter that the command's job has: its collector does not visit what was imported before.
    """
    from integration.run.job import favor_computation  # takes a second to import

    runs = {"asyncio.gather": orchestration.run_gather, "manager": orchestration.run_manager, "executor": orchestration.run_executor}
    with favor_computation():
        table = compare({name: partial(run, work.groups) for name, run in runs.items()}, max(3, work.repeats))
    return {name: table[name]["ratio_cpu"] for name in ("manager", "executor")}


def ask_against_aiohttp(size: str, work: Work) -> Figures:
    """Measure requests per processor second of HTTPEndpoint over those of aiohttp's client."""
    raise_open_files()
    requests = 4 * work.in_flight
    rates: dict[str, list[float]] = {OTHER: [], OURS: []}
    with run_server(http_clients.DELAY_S) as url:
        for _ in range(max(3, work.repeats)):
            for name, client in ((OTHER, http_clients.AIOHTTP), (OURS, "HTTPEndpoint")):
                rates[name].append(http_clients.run_client(client, url, work.in_flight, requests)[0])
    return {"ratio": float(np.median(rates[OURS]) / np.median(rates[OTHER]))}


def serve_sessions(size: str, work: Work) -> Figures:
    """Measure requests of a gateway per processor second, and their number at the most sessions in flight over that at the fewest."""
    raise_open_files()
    numbers = (max(1, work.in_flight // 10), work.in_flight, 2 * work.in_flight)
    found = gateway_requests.compare_servers(numbers, 4 * work.in_flight, work.repeats, kinds=(gateway_requests.GATEWAY,))
    rates = list(found[gateway_requests.GATEWAY].values())
    return {"rate": min(rates), "flat": rates[-1] / rates[0]}


def serve_against_aiohttp(size: str, work: Work) -> Figures:
    """Measure requests of a gateway per processor second over those of a handler of aiohttp.web that neither tokenizes nor records."""
    raise_open_files()
    found = gateway_requests.compare_servers((work.in_flight,), 4 * work.in_flight, work.repeats)
    ours, other = (next(iter(found[name].values())) for name in (gateway_requests.GATEWAY, gateway_requests.AIOHTTP))
    return {"ratio": ours / other}


def record_turns(size: str, work: Work) -> Figures:
    """Measure the processor milliseconds that recording adds to a turn behind a history."""
    return {"ms": gateway_requests.measure_recording(8 * work.tokens)}


def start_commands(size: str, work: Work) -> Figures:
    """Measure processor seconds of the commands that train nothing."""
    names = {"--help": "train --help", "misspelt option": "train, a misspelt option", "--dry-run": "train --dry-run"}
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, work.repeats):
        for name, command in names.items():
            seconds, _ = startup.measure(startup.COMMANDS[command])
            if repeat >= 0:
                found[name].append(seconds)
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def simulate(size: str, work: Work) -> Figures:
    """Measure processor seconds of a simulated run of engines of 64 slots, imports included."""
    options = ("--engines", str(work.engines[size]), "--slots", "64", "--hours", f"{work.hours:g}", "--json")
    seconds, _ = startup.measure((sys.executable, "-m", "integration.simulate", *options))
    return {"seconds": seconds}
