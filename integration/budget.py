"""How much memory a run needs: from sizes and settings to bytes, for each process. Pure, and an estimate: what is counted stands here.

One training process holds four numbers for each trained parameter, all float32: the parameter (a master copy where products run in
bfloat16), its gradient and the two moments of Adam, 16 bytes together. Sharded over n ranks (Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", section 5, stage 3: K = 12 plus the parameter itself) each rank holds 16 P / n,
and the layers that are being computed whole.

Activations, for each token and layer (after Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
equation 2, whose 34 s b h + 5 a s^2 b is of a GPT layer with dropout in 16 bit). Rows are packed, so s b is the number N of real tokens;
attention by scaled_dot_product_attention keeps no [N, N] matrix; a layer is RMSNorm, grouped queries, gated MLP. With h hidden, f
intermediate, q and k the widths of all query and key heads, and w bytes for a number in matrix products:

    n_h h + (3 q + 2 k) w + 4 f w + [n_q (q + k) where queries and keys are normalized] + statistics of norms and softmax

    n_h, n_q = 24, 8 in float32; 26, 6 with products in bfloat16, beside whose inputs the residual stream and norms keep theirs in float32

A test counts what autograd saves, and finds this. With gradient checkpointing one input, 4 h, is kept for each layer, and the whole of
one layer while it is computed again. Each adapter of LoRA with dropout keeps an input of its own, w bytes a number, and a mask of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from integration.budget_sizes import AdapterSizes, ModelSizes
from rollouts.backends.fsdp_config import FSDPConfig

Precision = Literal["float32", "bfloat16"]
"""Of matrix products. Parameters that are updated, sums, norms, log-probs and the loss are float32 in both."""

FLOAT = 4  # bytes of a float32
MOMENTS = 2  # that Adam keeps of each trained parameter
CHUNK_TOKENS = 1024  # tokens whose logits exist at the same time (OutputOptions.chunk_size)
PROCESS_BYTES = 400 * 2**20  # of a CPU process with torch, transformers and this package; measured by benchmarks.memory
HEAP_SHARE = 0.35  # of what a step of one process makes anew, see heap_bytes; measured likewise, as the next two
SHARDED_HEAP_SHARE = 0.15  # the same with FSDP
SMALL_UNIT_COPIES = 5  # of all layers, for which the heap keeps room where the buffers of FSDP are smaller than HEAP_BLOCK; else 1
HEAP_BLOCK = 32 * 2**20  # from this size on glibc takes a block from the system, and gives it back
STATES = ("parameters", "gradients", "Adam's moments")  # names of parts that stay from step to step


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How FSDP divides a model among ranks."""

    num_ranks: int
    config: FSDPConfig = field(default_factory=FSDPConfig)

    @property
    def shards(self) -> int:
        """Ranks that a parameter is divided among."""
        return self.config.find_mesh_shape(self.num_ranks)[-1]

    @property
    def replicas(self) -> int:
        """Whole copies of the sharded states."""
        return self.num_ranks // self.shards

    @property
    def keeps_layers(self) -> bool:
        """Whether layers stay whole between forward and backward pass."""
        return self.config.sharding_strategy == "shard_grad_op"


@dataclass(frozen=True, kw_only=True)
class Training:
    """How one model is trained, as far as memory is concerned."""

    tokens: int  # of a micro-batch of one process
    precision: Precision = "float32"
    sharding: Sharding | None = None  # None = one process without FSDP
    adapters: AdapterSizes | None = None  # of LoRA, which alone are trained, on top of the model's parameters; None = all of those are
    has_vocabulary: bool = True  # log-probs are computed; False = a critic, whose head is one column

    @property
    def trains_all(self) -> bool:
        """Whether the model's own parameters are trained."""
        return self.adapters is None

    @property
    def width(self) -> int:
        """Bytes of a number in matrix products."""
        return FLOAT if self.precision == "float32" else 2

    @property
    def checkpoints_layers(self) -> bool:
        """Whether activations inside of a layer are computed again in the backward pass."""
        return self.sharding is not None and self.sharding.config.gradient_checkpointing


def sharded_training(tokens: int, num_ranks: int, config: FSDPConfig, **others: Any) -> Training:
    """Training over ranks with the settings of FSDP, whose mixed_precision is that of products."""
    return Training(
        tokens=tokens, precision=config.mixed_precision or "float32", sharding=Sharding(num_ranks=num_ranks, config=config), **others
    )


@dataclass(frozen=True)
class Part:
    """Some bytes of a process, and where they lie."""

    name: str
    size: int  # bytes
    on_host: bool = False  # in the memory of the host, wherever the model computes


def training_parts(sizes: ModelSizes, training: Training) -> list[Part]:
    """Memory of one process that trains a model: what stays between steps, and what a step needs at its fullest.

    A step is fullest either as the backward pass begins (all activations, logits of a chunk, the gradient of the output layer) or as it
    ends (the gradient of embedding and output layer, before it is added or sent): the larger one counts.
    """
    sharding = training.sharding
    trained = sizes.num_parameters if training.adapters is None else training.adapters.num_parameters
    held = sizes.num_parameters + (0 if training.trains_all else trained)
    shards = 1 if sharding is None else sharding.shards
    offloaded = sharding is not None and sharding.config.cpu_offload
    begin = activation_bytes(sizes, training) + working_bytes(sizes, training)
    end = 0
    if training.trains_all:
        begin += sizes.head_parameters * FLOAT if training.has_vocabulary else 0
        end = gradient_buffer_bytes(sizes, training)
    parts = [
        Part("parameters", ceil(FLOAT * held / shards), offloaded),
        Part("gradients", ceil(FLOAT * trained / shards), offloaded),
        Part("Adam's moments", ceil(MOMENTS * FLOAT * trained / shards), offloaded),
        Part("parameters as they are computed with", unsharded_bytes(sizes, training)),
        Part("activations", activation_bytes(sizes, training)),
        Part("logits, gradients on their way", max(begin, end) - activation_bytes(sizes, training)),
    ]
    return [part for part in parts if part.size]


def heap_bytes(sizes: ModelSizes, training: Training, parts: Sequence[Part]) -> int:
    """What the heap of a process on a CPU keeps beyond what is in use: gaps between blocks that are smaller than 32 MiB.

    In one process about a third of what a step makes anew. With FSDP parameters and gradients of layers come and go between activations
    that stay, whatever the number of tokens, and the room of all layers is kept: once for the parameters one by one, and where a layer's
    buffers are such blocks, too, for them as they are gathered and sent, forward and backward. It takes some steps to come to that.

    Args:
        parts: training_parts of the same.
    """
    passing = sum(part.size for part in parts if part.name not in STATES)
    if training.sharding is None or training.sharding.shards == 1:
        return ceil(HEAP_SHARE * passing)
    small = training.width * unit_parameters(sizes, training.sharding.config) < HEAP_BLOCK
    layers = training.width * (sizes.num_parameters - sizes.root_parameters)
    return ceil(SHARDED_HEAP_SHARE * passing + layers * (SMALL_UNIT_COPIES if small else 1))


def inference_parts(sizes: ModelSizes, training: Training) -> list[Part]:
    """Memory of one process that computes log-probs with a frozen model, beside which nothing is trained: its parameters, and a pass.

    Nothing is saved for a backward pass: a layer's own values are gone when the next begins.
    """
    sharding = training.sharding
    shards, offloaded = (1, False) if sharding is None else (sharding.shards, sharding.config.cpu_offload)
    layer = layer_bytes_per_token(sizes, training.precision) * training.tokens
    parts = [
        Part("parameters", ceil(FLOAT * sizes.num_parameters / shards), offloaded),
        Part("parameters as they are computed with", unsharded_bytes(sizes, training)),
        Part("a forward pass", layer + working_bytes(sizes, training)),
    ]
    return [part for part in parts if part.size]


def layer_bytes_per_token(sizes: ModelSizes, precision: Precision) -> int:
    """What the backward pass of one layer needs of each token: the formula at the top of this file."""
    width = FLOAT if precision == "float32" else 2
    hidden = {"float32": 24, "bfloat16": 26}[precision] * sizes.hidden_size
    attention = (3 * sizes.query_size + 2 * sizes.kv_size) * width
    mlp = 4 * sizes.intermediate_size * width
    normalized = ((2 * FLOAT if width == FLOAT else 6) * (sizes.query_size + sizes.kv_size)) if sizes.has_qk_norm else 0
    statistics = FLOAT * (2 + sizes.num_heads + (sizes.num_heads + sizes.num_kv_heads if sizes.has_qk_norm else 0))
    return hidden + attention + mlp + normalized + statistics


def other_bytes_per_token(sizes: ModelSizes, precision: Precision) -> int:
    """What the backward pass needs of each token once, whatever the number of layers: last norm, output layer, positions, indices."""
    hidden = {"float32": 12, "bfloat16": 10}[precision] * sizes.hidden_size
    rotations = 2 * sizes.head_dim * FLOAT
    indices = 72  # token ids, places of rows in the pack and back (int64), log-probs
    return hidden + rotations + indices


def activation_bytes(sizes: ModelSizes, training: Training) -> int:
    """All that autograd keeps of a micro-batch for its backward pass."""
    layer = layer_bytes_per_token(sizes, training.precision)
    if training.adapters is not None:
        layer += ceil(training.adapters.dropped_inputs / sizes.num_layers) * (training.width + 1)  # an adapter's own input, and its mask
    layers = sizes.num_layers * layer
    if training.checkpoints_layers:
        layers = sizes.num_layers * sizes.hidden_size * FLOAT + layer
    return training.tokens * (layers + other_bytes_per_token(sizes, training.precision))


def working_bytes(sizes: ModelSizes, training: Training) -> int:
    """Numbers that live for a moment beside the activations: logits of a chunk twice in float32, or gradients inside of one MLP."""
    tokens, width = training.tokens, training.width
    logits = 2 * FLOAT * min(tokens, CHUNK_TOKENS) * sizes.vocab_size if training.has_vocabulary else 0
    inside = tokens * (sizes.hidden_size + 2 * sizes.intermediate_size) * width
    return tokens * sizes.hidden_size * FLOAT + max(logits, inside)


def unit_parameters(sizes: ModelSizes, config: FSDPConfig) -> int:
    """Parameters of the layers that are gathered together: one layer, or as many in a row as have auto_wrap_min_params."""
    layers = max(1, ceil(config.auto_wrap_min_params / sizes.layer_parameters))
    return min(layers, sizes.num_layers) * sizes.layer_parameters


def unsharded_bytes(sizes: ModelSizes, training: Training) -> int:
    """Parameters in the form that products read, beside the shards: gathered ones of FSDP, casts of autocast.

    FSDP keeps the root (embedding, last norm, output layer; float32) whole during a pass, and of the layers two units: the one that is
    computed, and the next, which is gathered meanwhile, into a buffer from which it is copied. With shard_grad_op all layers stay whole
    until their backward pass. Nothing is gathered where one rank holds everything.
    """
    sharding = training.sharding
    in_layers = sizes.num_parameters - sizes.root_parameters
    if sharding is None or sharding.shards == 1:
        return 0 if training.precision == "float32" else training.width * in_layers
    unit = unit_parameters(sizes, sharding.config)
    whole = in_layers if sharding.keeps_layers else min(2 * unit, in_layers)
    return training.width * (whole + unit) + FLOAT * sizes.root_parameters


def gradient_buffer_bytes(sizes: ModelSizes, training: Training) -> int:
    """The gradients that exist whole as a backward pass ends: of embedding and output layer, and FSDP's copy that is summed over ranks."""
    sharding = training.sharding
    if sharding is None:
        return sizes.head_parameters * FLOAT * (2 if sizes.is_tied and training.has_vocabulary else 1)
    unit = unit_parameters(sizes, sharding.config) * (training.width + FLOAT)
    return max(unit, sizes.root_parameters * 2 * FLOAT)


def cache_bytes(sizes: ModelSizes, *, tokens: int, width: int = FLOAT) -> int:
    """Keys and values of so many tokens. width: bytes of a number."""
    return 2 * sizes.num_layers * sizes.kv_size * tokens * width
