"""Memory and traffic of the processes of a run: the formulae of memory.py and traffic.py with a run's settings. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from integration.dry_run.memory import (
    FLOAT,
    MOMENTS_WIDTH,
    PROCESS_BYTES,
    Part,
    Training,
    cache_bytes,
    checkpoint_bytes,
    heap_bytes,
    inference_parts,
    training_parts,
)
from integration.dry_run.sizes import ModelSizes
from integration.dry_run.traffic import Links, Transfer, count_microbatches, pass_traffic, rows_traffic, sync_traffic

PROMPT_TOKENS = 64  # assumed tokens of a prompt
ROWS = "rows of a batch"  # name of rank 0's traffic
GROWTH = 1.5  # slot caches grow by half while the old ones exist until copied: at most 1 + 1.5, see SlotModel
SAMPLE_BYTES = 160  # bytes of a token of a Sample in Python: id, mask, log-prob, weight version


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model that scores rollouts."""

    sizes: ModelSizes  # sizes of the language model that provides its backbone
    width: int  # bytes per weight
    tokens: int  # tokens of one forward pass
    gpu: int | None = None  # index of its GPU on this machine; None = host memory


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The settings of a run that determine its memory and traffic."""

    sizes: ModelSizes  # sizes of the policy
    training: Training  # training of the policy
    device: str  # type of the training device, such as cpu or cuda
    heap_has_gaps: bool = True  # on a CPU; False = the allocator returns every larger block, see text.RETURNS_BLOCKS
    gpu: int = 0  # index of rank 0's GPU on this machine; rank k uses GPU gpu + k
    ranks_per_node: int = 8  # training processes per node
    has_reference: bool = False  # there is a reference model
    reference_is_policy: bool = False  # the reference is the policy with its adapters disabled, without parameters of its own
    teachers: tuple[tuple[str, ModelSizes], ...] = ()  # models of this run that teach, by their names
    teacher_width: int = FLOAT  # bytes per weight of a teacher
    teacher_tops: int = 0  # most probable tokens of a teacher in place of each token; 0 = none
    has_critic: bool = False  # there is a critic
    critic_moments_width: float = MOMENTS_WIDTH["float32"]  # bytes of the moments of a parameter of the critic
    reward: RewardModel | None = None  # reward model in the process of rank 0, on whatever device
    embedded_slots: int = 0  # concurrent sequences of the embedded engine; 0 = no embedded engine
    embedded_row_tokens: int | None = None  # maximum tokens of such a sequence, prompt included; None = row_tokens
    kept_tokens: int = 0  # tokens with keys and values that the embedded engine keeps for prompts that begin alike
    num_servers: int = 0  # inference servers
    reference_width: int = FLOAT  # bytes per weight of the reference
    engine_packs_from: int | None = None  # the embedded engine packs linear weights of at least this many numbers; None = none
    engine_width: int = FLOAT  # bytes per number of the engine's weights, keys and values, embedded or server
    server_ranks: int = 1  # GPUs per server
    bucket_bytes: int = 0  # bytes of weights sent to servers at a time; 0 = servers read weights from disk
    row_tokens: int = 0  # maximum tokens of a training row, prompt included
    step_rows: int = 0  # rows of one optimizer step
    batch_rows: int = 0  # rows of one batch of rollouts; 0 = no rollouts
    forward_passes: int = 0  # passes over each batch without gradient: old log-probs, values
    updates_per_batch: int = 1  # optimizer steps per batch of rollouts

    @property
    def num_frozen(self) -> int:
        """The number of models that compute log-probs of each batch and are not trained."""
        return self.has_reference + len(self.teachers)

    @property
    def num_ranks(self) -> int:
        """The number of training processes."""
        return 1 if self.training.sharding is None else self.training.sharding.num_ranks

    @property
    def reward_rank(self) -> int | None:
        """The training process that holds the reward model; None = a GPU of its own, or no reward model."""
        if self.reward is None:
            return None
        if self.reward.gpu is None:
            return 0
        rank = self.reward.gpu - self.gpu
        return rank if self.device != "cpu" and 0 <= rank < min(self.num_ranks, self.ranks_per_node) else None


@dataclass(frozen=True)
class Role:
    """A group of processes with equal memory."""

    name: str
    count: int  # processes
    parts: tuple[Part, ...]  # memory of one process
    trains: bool = True  # the process trains a part of the model

    def total(self, *, on_host: bool | None = None) -> int:
        """Return the bytes of one process; on_host: True or False = only parts on the host or on the device."""
        return sum(part.size for part in self.parts if on_host is None or part.on_host == on_host)


def plan_roles(work: Workload) -> list[Role]:
    """Return the processes of a run and their peak memory, as if the passes of policy, critic and reference coincided."""
    policy = training_parts(work.sizes, work.training)
    parts = [Part("Python, torch and libraries", PROCESS_BYTES, on_host=True), *policy]
    if work.has_reference and not work.reference_is_policy:
        parts += [_of("reference", part) for part in inference_parts(work.sizes, replace(work.training, frozen_width=work.reference_width))]
    for name, sizes in work.teachers:
        frozen = replace(work.training, adapters=None, frozen_width=work.teacher_width)
        parts += [_of(name, part) for part in inference_parts(sizes, frozen)]
    gaps = heap_bytes(work.sizes, work.training, policy)
    written = checkpoint_bytes(work.sizes, work.training)
    if work.has_critic:
        sizes, training = critic_sizes(work.sizes), critic_training(work)
        critic = training_parts(sizes, training)
        parts += [_of("critic", part) for part in critic]
        gaps += heap_bytes(sizes, training, critic)
        written += checkpoint_bytes(sizes, training)
    parts.append(Part("checkpoint that is written during training", written, on_host=True))
    if work.device == "cpu" and work.heap_has_gaps:
        parts.append(Part("gaps that the heap keeps", gaps, on_host=True))
    reward = [] if work.reward is None else reward_parts(work.reward)
    columns = [Part(TEACHER_COLUMNS, teacher_bytes(work), on_host=True)] if work.teacher_tops else []
    first = [*parts, *columns, *_parts_of_rank_0(work), *(reward if work.reward_rank == 0 else [])]
    roles = [Role("the process" if work.num_ranks == 1 else "rank 0", 1, tuple(first))]
    others = work.num_ranks - 1
    if work.reward_rank:
        others -= 1
        roles.append(Role(f"rank {work.reward_rank}", 1, (*parts, *reward)))
    if others:
        roles.append(Role("each other rank", others, tuple(parts)))
    if work.reward is not None and work.reward_rank is None:
        roles.append(Role("the reward model's GPU", 1, tuple(reward), trains=False))
    if work.num_servers:
        roles.append(Role("each server's GPU", work.num_servers * work.server_ranks, tuple(server_parts(work)), trains=False))
    return roles


TEACHER_COLUMNS = "most probable tokens of the teacher"
"""Name of the part of teacher_bytes."""


def teacher_bytes(work: Workload) -> int:
    """Return the memory of a teacher's most probable tokens of a rollout batch: log-probs and ids of 4 bytes each, and as they arrive."""
    return work.batch_rows * work.row_tokens * work.teacher_tops * 2 * (2 * FLOAT)


def critic_sizes(sizes: ModelSizes) -> ModelSizes:
    """Return the policy's sizes without the output layer; the critic's head, one column, is ignored."""
    removed = 0 if sizes.is_tied else sizes.head_parameters
    return replace(sizes, num_parameters=sizes.num_parameters - removed, root_parameters=sizes.root_parameters - removed, is_tied=False)


def critic_training(work: Workload) -> Training:
    """Return the training of a critic from the policy's: all weights, even if the policy has adapters."""
    width = work.critic_moments_width
    return replace(work.training, has_vocabulary=False, adapters=None, frozen_width=FLOAT, moments_width=width)


def server_parts(work: Workload) -> list[Part]:
    """Return the memory of one GPU of a server: weights, and its share of keys and values of a batch at full length."""
    per_server = ceil(work.batch_rows / work.num_servers)
    cache = cache_bytes(work.sizes, tokens=per_server * work.row_tokens, width=work.engine_width)
    return [
        Part("weights", ceil(work.engine_width * work.sizes.num_parameters / work.server_ranks)),
        Part("keys and values of its share of a batch", ceil(cache / work.server_ranks)),
        *([Part("two buckets of weights", 2 * work.bucket_bytes)] if work.bucket_bytes else []),
    ]


def _parts_of_rank_0(work: Workload) -> list[Part]:
    """Return the memory of rank 0 besides its shard: the engine, whole weights in transit, samples."""
    parts: list[Part] = []
    whole = FLOAT * work.sizes.num_parameters
    if work.embedded_slots:
        parts.append(Part("engine: weights", work.engine_width * work.sizes.num_parameters))
        if work.engine_packs_from is not None and (packed := work.sizes.count_linear_parameters(work.engine_packs_from)):
            parts.append(Part("engine: packed weights", work.engine_width * packed))
        row_tokens = work.row_tokens if work.embedded_row_tokens is None else work.embedded_row_tokens
        cache = cache_bytes(work.sizes, tokens=work.embedded_slots * row_tokens, width=work.engine_width)
        parts.append(Part("engine: keys and values", cache))
        parts.append(Part("engine: room in which they grow", ceil(GROWTH * cache)))
        if work.kept_tokens:
            parts.append(
                Part("engine: keys and values of prompts", cache_bytes(work.sizes, tokens=work.kept_tokens, width=work.engine_width))
            )
        tied = FLOAT * work.sizes.head_parameters if work.sizes.is_tied else 0  # tied weights are copied under each name
        parts.append(Part("weights on their way to the engine", whole + tied, on_host=True))
    if work.num_servers and work.bucket_bytes:
        parts.append(Part("two buckets of weights", 2 * min(work.bucket_bytes, whole)))
    if work.batch_rows:
        parts.append(Part("samples of a batch", SAMPLE_BYTES * work.batch_rows * work.row_tokens, on_host=True))
    return parts


def reward_parts(reward: RewardModel) -> list[Part]:
    """Return the memory of a reward model: weights and one forward pass."""
    sizes = critic_sizes(reward.sizes)
    training = Training(tokens=reward.tokens, precision="float32" if reward.width == FLOAT else "bfloat16", has_vocabulary=False)
    forward = next(part for part in inference_parts(sizes, training) if part.name == "a forward pass")
    return [
        Part("reward model: weights", reward.width * sizes.num_parameters, reward.gpu is None),
        Part("reward model: a forward pass", forward.size, reward.gpu is None),
    ]


def _of(owner: str, part: Part) -> Part:
    return replace(part, name=f"{owner}: {part.name}")


def largest_microbatch(work: Workload, available: int) -> int:
    """Return the maximum tokens of a micro-batch for which every training process fits; 0 = none fits.

    Args:
        available: bytes of one GPU, or of the machine for training on the CPU, whose processes share it.
    """

    def fits(tokens: int) -> bool:
        return needed_bytes(replace(work, training=replace(work.training, tokens=tokens))) <= available

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def needed_bytes(work: Workload) -> int:
    """Return the bytes that must fit: on a GPU those of the fullest training process, on a CPU those of all together."""
    training = [role for role in plan_roles(work) if role.trains]
    if work.device == "cpu":
        return sum(role.count * role.total() for role in training)
    return max(role.total(on_host=False) for role in training)


@dataclass(frozen=True)
class Traffic:
    """Transfers of one kind: those that one rank receives, except ROWS, which rank 0 sends."""

    name: str
    times: int  # number of repetitions
    transfers: tuple[Transfer, ...]

    @property
    def size(self) -> int:
        """Total bytes that one process receives; for ROWS, that rank 0 sends."""
        return self.times * sum(transfer.size for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        """Total seconds on otherwise idle links."""
        return self.times * sum(transfer.seconds for transfer in self.transfers)


def plan_traffic(work: Workload, links: Links) -> list[Traffic]:
    """Return the traffic of one rank in an optimizer step, in the passes before it and in a weight sync, and the rows from rank 0."""
    traffic: list[Traffic] = []
    step_tokens = work.step_rows * work.row_tokens
    passes = count_microbatches(step_tokens, max_tokens=work.training.tokens, num_ranks=work.num_ranks)
    models = 1 + work.has_critic
    if work.num_ranks > 1:
        traffic.append(Traffic("an optimizer step", passes, tuple(pass_traffic(work.sizes, work.training, links))))
        if work.has_critic:
            critic = pass_traffic(critic_sizes(work.sizes), critic_training(work), links)
            traffic.append(Traffic("an optimizer step of the critic", passes, tuple(critic)))
    if work.batch_rows:
        tokens = work.batch_rows * work.row_tokens
        passes = count_microbatches(tokens, max_tokens=work.training.tokens, num_ranks=work.num_ranks)
        if work.num_ranks > 1:
            alone = tuple(pass_traffic(work.sizes, work.training, links, with_gradient=False))
            number = passes * (work.forward_passes + work.num_frozen)
            traffic += [Traffic("log-probs and values of a batch", number, alone)] if number else []
            sent = work.updates_per_batch * models + work.forward_passes + work.num_frozen
            traffic.append(Traffic(ROWS, sent, (rows_traffic(tokens, num_ranks=work.num_ranks),)))
        sync = sync_traffic(
            work.sizes,
            sharding=work.training.sharding,
            links=links,
            num_engines=work.num_servers,
            width=work.engine_width if work.bucket_bytes else FLOAT,
        )
        traffic += [Traffic("a weight sync", 1, tuple(sync))] if sync else []
    elif work.embedded_slots:
        gathered = sync_traffic(work.sizes, sharding=work.training.sharding, links=links, num_engines=0)
        traffic += [Traffic("weights for an evaluation", 1, tuple(gathered))] if gathered else []
    return [entry for entry in traffic if entry.size]
