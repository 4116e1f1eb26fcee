"""Memory of a run: an estimate of the bytes of each process from sizes and settings. Pure functions.

One training process holds four numbers for each trained parameter, float32 unless asked otherwise: the parameter (a master copy where
products run in bfloat16), its gradient and the two moments of Adam, 16 bytes together; 10 with moments of 8 bits, 6 with weights in
bfloat16 as well. Sharded over n ranks (Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", section 5, stage 3: K = 12 plus the parameter itself) each rank holds 16 P / n,
and the current layers whole.

Activations, for each token and layer (after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
equation 2, whose 34 s b h + 5 a s^2 b is of a GPT layer with dropout in 16 bit). Rows are packed, so s b is the number N of real tokens;
attention by scaled_dot_product_attention keeps no [N, N] matrix; a layer is RMSNorm, grouped queries, gated MLP. With h hidden, f
intermediate, q and k the widths of all query and key heads, and w bytes for a number in matrix products:

    n_h h + (3 q + 2 k) w + 4 f w + [n_q (q + k) where queries and keys are normalized] + statistics of norms and softmax

    n_h, n_q = 24, 8 in float32; 26, 6 with products in bfloat16, beside whose inputs the residual stream and norms keep theirs in float32

A test compares this with the tensors that autograd saves. With gradient checkpointing each layer keeps one input, 4 h, and one layer at a
time keeps all while it is recomputed. Each LoRA adapter with dropout keeps its own input, w bytes per number, and a mask of 1 byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from integration.dry_run.sizes import AdapterSizes, ModelSizes
from rollouts.algorithms.logprobs import choose_chunk_size, count_kept_positions
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.models.four_bit import BYTES_PER_WEIGHT

Precision = Literal["float32", "bfloat16"]
"""Precision of matrix products. Trained parameters, sums, norms, log-probs and the loss are float32 in both."""

FLOAT = 4  # bytes of a float32
MOMENTS_WIDTH = {"float32": 2 * FLOAT, "8bit": 2 * (1 + FLOAT / 256)}  # bytes of Adam's moments of a trained parameter; one scale per block
PROCESS_BYTES = 400 * 2**20  # bytes of a CPU process with torch, transformers and this package; measured by benchmarks.memory
HEAP_SHARE = 0.35  # heap gaps as a fraction of a step's allocations, see heap_bytes; measured likewise, as the next two
SHARDED_HEAP_SHARE = 0.15  # the same with FSDP
SMALL_UNIT_COPIES = 5  # copies of all layers that the heap retains if FSDP buffers are smaller than HEAP_BLOCK; otherwise 1
HEAP_BLOCK = 32 * 2**20  # block size in bytes from which glibc takes memory from the system and returns it
STATES = ("parameters", "gradients", "Adam's moments")  # names of parts that persist between steps


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding of a model by FSDP."""

    num_ranks: int
    config: FSDPConfig = field(default_factory=FSDPConfig)

    @property
    def shards(self) -> int:
        """The number of ranks that share a parameter."""
        return self.config.find_mesh_shape(self.num_ranks)[-1]

    @property
    def replicas(self) -> int:
        """The number of replicas of the sharded state."""
        return self.num_ranks // self.shards

    @property
    def keeps_layers(self) -> bool:
        """Whether layers stay whole between forward and backward pass."""
        return self.config.sharding_strategy == "shard_grad_op"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of training one model that determine its memory."""

    tokens: int  # tokens of a micro-batch of one process
    precision: Precision = "float32"
    sharding: Sharding | None = None  # None = one process without FSDP
    adapters: AdapterSizes | None = None  # LoRA adapters, the only trained parameters; None = all parameters are trained
    master_width: int = FLOAT  # bytes of a trained parameter, and of its gradient
    moments_width: float = MOMENTS_WIDTH["float32"]  # bytes of the moments of a trained parameter
    frozen_width: float = FLOAT  # bytes of a weight that is not trained, in the mean: below adapters, or of a reference
    keeps_inputs_alone: bool = False  # activations are recomputed in the backward pass (one process; with FSDP its own setting says so)
    device: str = "cpu"  # type of the training device
    has_vocabulary: bool = True  # computes log-probs; False = a critic, with a head of one column

    @property
    def trains_all(self) -> bool:
        """Whether the model's own parameters are trained."""
        return self.adapters is None

    @property
    def width(self) -> int:
        """Bytes per number in matrix products."""
        return FLOAT if self.precision == "float32" else 2

    @property
    def checkpoints_layers(self) -> bool:
        """Whether activations of a layer are recomputed in the backward pass."""
        return self.keeps_inputs_alone if self.sharding is None else self.sharding.config.gradient_checkpointing


def sharded_training(tokens: int, num_ranks: int, config: FSDPConfig, **others: Any) -> Training:
    """Return the training over ranks with FSDP settings; their mixed_precision is the precision of matrix products."""
    return Training(
        tokens=tokens, precision=config.mixed_precision or "float32", sharding=Sharding(num_ranks=num_ranks, config=config), **others
    )


@dataclass(frozen=True)
class Part:
    """A part of the memory of a process."""

    name: str
    size: int  # bytes
    on_host: bool = False  # in host memory, whatever the model's device


def measure_frozen_width(sizes: ModelSizes, adapters: AdapterSizes, dtype: str) -> float:
    """Return the mean bytes of a frozen weight below adapters: nf4 holds those that have an adapter in 4 bits, the others in bfloat16.

    Args:
        dtype: LoRAConfig.base_dtype.
    """
    if dtype != "nf4":
        return FLOAT if dtype == "float32" else 2
    packed = sum(inputs * outputs for inputs, outputs in adapters.layers.values())
    return (BYTES_PER_WEIGHT * packed + 2 * (sizes.num_parameters - packed)) / sizes.num_parameters


def training_parts(sizes: ModelSizes, training: Training) -> list[Part]:
    """Return the memory of one process that trains a model: its persistent state, and the peak of a step.

    A step is fullest either as the backward pass begins (all activations, logits of a chunk, the gradient of the output layer) or as it
    ends (the gradient of embedding and output layer, before it is added or sent): the larger one counts.
    """
    sharding = training.sharding
    trained = sizes.num_parameters if training.adapters is None else training.adapters.num_parameters
    held = training.master_width * trained + (0 if training.trains_all else ceil(training.frozen_width * sizes.num_parameters))
    shards = 1 if sharding is None else sharding.shards
    offloaded = sharding is not None and sharding.config.cpu_offload
    begin = activation_bytes(sizes, training) + working_bytes(sizes, training)
    end = 0
    if training.trains_all:
        begin += sizes.head_parameters * training.master_width if training.has_vocabulary else 0
        end = gradient_buffer_bytes(sizes, training)
    parts = [
        Part("parameters", ceil(held / shards), offloaded),
        Part("gradients", ceil(training.master_width * trained / shards), offloaded),
        Part("Adam's moments", ceil(training.moments_width * trained / shards), offloaded),
        Part("parameters as they are computed with", unsharded_bytes(sizes, training)),
        Part("activations", activation_bytes(sizes, training)),
        Part("logits, gradients on their way", max(begin, end) - activation_bytes(sizes, training)),
    ]
    return [part for part in parts if part.size]


def checkpoint_bytes(sizes: ModelSizes, training: Training) -> int:
    """Return the bytes of a checkpoint that is written during training: a copy of this process's parameters and Adam's moments.

    For a model with adapters it has the whole weights with the adapters merged, of at least 2 bytes.
    """
    shards = 1 if training.sharding is None else training.sharding.shards
    if training.adapters is None:
        return ceil((training.master_width + training.moments_width) * sizes.num_parameters / shards)
    merged = max(2.0, training.frozen_width) * sizes.num_parameters
    return ceil((merged + training.moments_width * training.adapters.num_parameters) / shards)


def heap_bytes(sizes: ModelSizes, training: Training, parts: Sequence[Part]) -> int:
    """Return the bytes that the heap of a CPU process retains beyond those in use: gaps between blocks smaller than 32 MiB.

    In one process this is about a third of a step's allocations. With FSDP, parameters and gradients of layers are allocated and freed
    between activations that persist, whatever the number of tokens, and the heap retains the space of all layers: once for the single
    parameters and, if a layer's buffers are smaller than such a block, also for buffers gathered and sent, forward and backward. It takes
    some steps to reach this state.

    Args:
        parts: training_parts of the same sizes and training.
    """
    passing = sum(part.size for part in parts if part.name not in STATES)
    if training.sharding is None or training.sharding.shards == 1:
        return ceil(HEAP_SHARE * passing)
    small = training.width * unit_parameters(sizes, training.sharding.config) < HEAP_BLOCK
    layers = training.width * (sizes.num_parameters - sizes.root_parameters)
    return ceil(SHARDED_HEAP_SHARE * passing + layers * (SMALL_UNIT_COPIES if small else 1))


def inference_parts(sizes: ModelSizes, training: Training) -> list[Part]:
    """Return the memory of one process for log-probs of a frozen model: its parameters, and a forward pass.

    Nothing is saved for a backward pass: a layer's activations are freed before the next layer.
    """
    sharding = training.sharding
    shards, offloaded = (1, False) if sharding is None else (sharding.shards, sharding.config.cpu_offload)
    layer = layer_bytes_per_token(sizes, training.precision) * training.tokens
    parts = [
        Part("parameters", ceil(training.frozen_width * sizes.num_parameters / shards), offloaded),
        Part("parameters as they are computed with", unsharded_bytes(sizes, training)),
        Part("a forward pass", layer + working_bytes(sizes, training)),
    ]
    return [part for part in parts if part.size]


def layer_bytes_per_token(sizes: ModelSizes, precision: Precision) -> int:
    """Return the bytes per token that the backward pass of one layer needs, by the formula in the module docstring."""
    width = FLOAT if precision == "float32" else 2
    hidden = {"float32": 24, "bfloat16": 26}[precision] * sizes.hidden_size
    attention = (3 * sizes.query_size + 2 * sizes.kv_size) * width
    mlp = 4 * sizes.intermediate_size * width
    normalized = ((2 * FLOAT if width == FLOAT else 6) * (sizes.query_size + sizes.kv_size)) if sizes.has_qk_norm else 0
    statistics = FLOAT * (2 + sizes.num_heads + (sizes.num_heads + sizes.num_kv_heads if sizes.has_qk_norm else 0))
    return hidden + attention + mlp + normalized + statistics


def other_bytes_per_token(sizes: ModelSizes, precision: Precision) -> int:
    """Return the bytes per token that the backward pass needs besides the layers: last norm, output layer, positions, indices."""
    hidden = {"float32": 12, "bfloat16": 10}[precision] * sizes.hidden_size
    rotations = 2 * sizes.head_dim * FLOAT
    indices = 72  # token ids, positions of rows in the pack and back (int64), log-probs
    return hidden + rotations + indices


def activation_bytes(sizes: ModelSizes, training: Training) -> int:
    """Return the bytes that autograd saves for the backward pass of a micro-batch."""
    layer = layer_bytes_per_token(sizes, training.precision)
    if training.adapters is not None:
        layer += ceil(training.adapters.dropped_inputs / sizes.num_layers) * (training.width + 1)  # an adapter's input and mask
    layers = sizes.num_layers * layer
    if training.checkpoints_layers:
        layers = sizes.num_layers * sizes.hidden_size * FLOAT + layer
    return training.tokens * (layers + other_bytes_per_token(sizes, training.precision))


def working_bytes(sizes: ModelSizes, training: Training) -> int:
    """Return the bytes of temporaries besides the activations: logits in float32, or gradients in one MLP.

    Logits are those of a chunk twice, or all that are kept and those of a chunk.
    """
    tokens, width = training.tokens, training.width
    chunk = min(tokens, choose_chunk_size(sizes.vocab_size, training.device))
    kept = tokens if tokens <= count_kept_positions(sizes.vocab_size, training.device) else chunk
    logits = FLOAT * (kept + chunk) * sizes.vocab_size if training.has_vocabulary else 0
    inside = tokens * (sizes.hidden_size + 2 * sizes.intermediate_size) * width
    return tokens * sizes.hidden_size * FLOAT + max(logits, inside)


def unit_parameters(sizes: ModelSizes, config: FSDPConfig) -> int:
    """Return the parameters of layers gathered together: one layer, or consecutive layers with auto_wrap_min_params."""
    layers = max(1, ceil(config.auto_wrap_min_params / sizes.layer_parameters))
    return min(layers, sizes.num_layers) * sizes.layer_parameters


def unsharded_bytes(sizes: ModelSizes, training: Training) -> int:
    """Return the bytes of parameters for matrix products besides the shards: gathered by FSDP, or cast by autocast.

    FSDP keeps the root (embedding, last norm, output layer; float32) whole during a pass, and two units of layers: the current one and the
    next, which is gathered meanwhile into a buffer and copied. With shard_grad_op all layers stay whole until their backward pass. With one
    rank nothing is gathered.
    """
    sharding = training.sharding
    in_layers = sizes.num_parameters - sizes.root_parameters
    if sharding is None or sharding.shards == 1:
        is_cast = training.precision != "float32" and min(training.frozen_width, training.master_width) == FLOAT
        return training.width * in_layers if is_cast else 0
    unit = unit_parameters(sizes, sharding.config)
    whole = in_layers if sharding.keeps_layers else min(2 * unit, in_layers)
    return training.width * (whole + unit) + ceil(training.frozen_width * sizes.root_parameters)


def gradient_buffer_bytes(sizes: ModelSizes, training: Training) -> int:
    """Return the bytes of whole gradients at the end of a backward pass: of embedding and output layer, and FSDP's copy to sum."""
    sharding = training.sharding
    if sharding is None:
        return sizes.head_parameters * training.master_width * (2 if sizes.is_tied and training.has_vocabulary else 1)
    unit = unit_parameters(sizes, sharding.config) * (training.width + FLOAT)
    return max(unit, sizes.root_parameters * 2 * FLOAT)


def cache_bytes(sizes: ModelSizes, *, tokens: int, width: int = FLOAT) -> int:
    """Return the bytes of keys and values of `tokens` tokens. width: bytes per number."""
    return 2 * sizes.num_layers * sizes.kv_size * tokens * width
