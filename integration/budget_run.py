"""What the processes of a run hold and send: the formulae of budget.py and budget_traffic.py with the settings of a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from integration.budget import (
    FLOAT,
    PROCESS_BYTES,
    Part,
    Training,
    cache_bytes,
    heap_bytes,
    inference_parts,
    training_parts,
)
from integration.budget_sizes import ModelSizes
from integration.budget_traffic import Links, Transfer, count_microbatches, pass_traffic, rows_traffic, sync_traffic

PROMPT_TOKENS = 64  # assumed
PREFIX_TOKENS = 16384  # of prompts whose keys and values the embedded engine keeps at most (InProcessEngine, prefix_cache_tokens)
ROWS = "rows of a batch"  # traffic of rank 0
GROWTH = 1.5  # rooms of slots grow by half, and the old ones stay until they are copied: 1 + 1.5 at the most, see SlotModel
SAMPLE_BYTES = 160  # of a token of a Sample in Python: id, mask, log-prob, weight version


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A reward model that scores rollouts."""

    sizes: ModelSizes  # of the language model whose backbone it has
    width: int  # bytes of one of its weights
    tokens: int  # of one of its forward passes
    gpu: int | None = None  # which of this machine's GPUs it is on; None = it is in host memory


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run, as far as its memory and traffic are concerned."""

    sizes: ModelSizes
    training: Training  # of the policy
    device: str  # "cpu", or that of a GPU
    heap_has_gaps: bool = True  # on a CPU; False = its allocator gives every larger block back, see budget_text.RETURNS_BLOCKS
    gpu: int = 0  # of rank 0 among this machine's GPUs; rank k has the k-th after it
    ranks_per_node: int = 8
    has_reference: bool = False
    reference_is_policy: bool = False  # the policy with its adapters switched off: no parameters of its own
    has_critic: bool = False
    reward: RewardModel | None = None  # in the process of rank 0, wherever its memory is
    embedded_slots: int = 0  # sequences of the embedded engine, 0 = there is none
    embedded_row_tokens: int | None = None  # of one of these at its longest, prompt included; None = row_tokens
    kept_prompts: int = 0  # of one weight version, whose keys and values the embedded engine keeps
    num_servers: int = 0
    server_width: int = 2  # bytes of a server's weights
    server_ranks: int = 1  # GPUs that share the model of one server
    bucket_bytes: int = 0  # of weights that are sent to servers from memory, 0 = servers read them from the disk
    row_tokens: int = 0  # of a row at its longest, prompt included
    step_rows: int = 0  # of one optimizer step
    batch_rows: int = 0  # of one batch of rollouts, 0 = there are none
    forward_passes: int = 0  # over each batch without gradient: old log-probs, values
    updates_per_batch: int = 1  # optimizer steps

    @property
    def num_ranks(self) -> int:
        """Training processes."""
        return 1 if self.training.sharding is None else self.training.sharding.num_ranks

    @property
    def reward_rank(self) -> int | None:
        """The training process in whose memory the reward model is; None = it has a GPU of its own, or there is none."""
        if self.reward is None:
            return None
        if self.reward.gpu is None:
            return 0
        rank = self.reward.gpu - self.gpu
        return rank if self.device != "cpu" and 0 <= rank < min(self.num_ranks, self.ranks_per_node) else None


@dataclass(frozen=True)
class Role:
    """Processes that are alike."""

    name: str
    count: int
    parts: tuple[Part, ...]
    trains: bool = True  # has a part of the model that is trained

    def total(self, *, on_host: bool | None = None) -> int:
        """Bytes of one process; on_host: True or False = of the parts that are there alone."""
        return sum(part.size for part in self.parts if on_host is None or part.on_host == on_host)


def plan_roles(work: Workload) -> list[Role]:
    """The processes of a run and what each holds when it needs most, as if the passes of policy, critic and reference met."""
    policy = training_parts(work.sizes, work.training)
    parts = [Part("Python, torch and libraries", PROCESS_BYTES, on_host=True), *policy]
    if work.has_reference and not work.reference_is_policy:
        parts += [_of("reference", part) for part in inference_parts(work.sizes, work.training)]
    gaps = heap_bytes(work.sizes, work.training, policy)
    if work.has_critic:
        sizes, training = critic_sizes(work.sizes), critic_training(work.training)
        critic = training_parts(sizes, training)
        parts += [_of("critic", part) for part in critic]
        gaps += heap_bytes(sizes, training, critic)
    if work.device == "cpu" and work.heap_has_gaps:
        parts.append(Part("gaps that the heap keeps", gaps, on_host=True))
    reward = [] if work.reward is None else reward_parts(work.reward)
    first = [*parts, *_parts_of_rank_0(work), *(reward if work.reward_rank == 0 else [])]
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


def critic_sizes(sizes: ModelSizes) -> ModelSizes:
    """The policy's sizes without its output layer; the head of a critic, one column, does not count."""
    removed = 0 if sizes.is_tied else sizes.head_parameters
    return replace(sizes, num_parameters=sizes.num_parameters - removed, root_parameters=sizes.root_parameters - removed, is_tied=False)


def critic_training(training: Training) -> Training:
    """How a critic beside a policy that is trained so is trained: whole, also where the policy has adapters."""
    return replace(training, has_vocabulary=False, adapters=None)


def server_parts(work: Workload) -> list[Part]:
    """Of one GPU of a server: weights, and keys and values of a batch at full length, dealt to all servers."""
    per_server = ceil(work.batch_rows / work.num_servers)
    cache = cache_bytes(work.sizes, tokens=per_server * work.row_tokens, width=work.server_width)
    return [
        Part("weights", ceil(work.server_width * work.sizes.num_parameters / work.server_ranks)),
        Part("keys and values of its share of a batch", ceil(cache / work.server_ranks)),
        *([Part("two buckets of weights", 2 * work.bucket_bytes)] if work.bucket_bytes else []),
    ]


def _parts_of_rank_0(work: Workload) -> list[Part]:
    """What the process that orchestrates has beside a shard: the engine, whole weights on their way to it, samples."""
    parts: list[Part] = []
    whole = FLOAT * work.sizes.num_parameters
    if work.embedded_slots:
        parts.append(Part("engine: weights", whole))
        row_tokens = work.row_tokens if work.embedded_row_tokens is None else work.embedded_row_tokens
        cache = cache_bytes(work.sizes, tokens=work.embedded_slots * row_tokens)
        kept = min(PREFIX_TOKENS, work.kept_prompts * PROMPT_TOKENS)
        parts.append(Part("engine: keys and values", cache))
        parts.append(Part("engine: room in which they grow", ceil(GROWTH * cache)))
        parts += [Part("engine: keys and values of prompts", cache_bytes(work.sizes, tokens=kept))] if kept else []
        tied = FLOAT * work.sizes.head_parameters if work.sizes.is_tied else 0  # a copy under each name
        parts.append(Part("weights on their way to the engine", whole + tied, on_host=True))
    if work.num_servers and work.bucket_bytes:
        parts.append(Part("two buckets of weights", 2 * min(work.bucket_bytes, whole)))
    if work.batch_rows:
        parts.append(Part("samples of a batch", SAMPLE_BYTES * work.batch_rows * work.row_tokens, on_host=True))
    return parts


def reward_parts(reward: RewardModel) -> list[Part]:
    """Weights of a reward model, and one of its forward passes."""
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
    """Most tokens of a micro-batch with which every training process fits; 0 = none does.

    Args:
        available: bytes, of one GPU, or of the machine where training is on its CPU, whose processes then share it.
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
    """What has to fit: on a GPU the fullest training process, on a CPU all of them together."""
    training = [role for role in plan_roles(work) if role.trains]
    if work.device == "cpu":
        return sum(role.count * role.total() for role in training)
    return max(role.total(on_host=False) for role in training)


@dataclass(frozen=True)
class Traffic:
    """Transfers of one kind and how often they happen: what one rank receives, except for ROWS."""

    name: str
    times: int
    transfers: tuple[Transfer, ...]

    @property
    def size(self) -> int:
        """Bytes in all that one process receives; of ROWS that rank 0 sends."""
        return self.times * sum(transfer.size for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        """Time on the links, if nothing else happened meanwhile."""
        return self.times * sum(transfer.seconds for transfer in self.transfers)


def plan_traffic(work: Workload, links: Links) -> list[Traffic]:
    """What one rank receives in an optimizer step, in the passes before it, and in a weight sync; and the rows that rank 0 sends."""
    traffic: list[Traffic] = []
    step_tokens = work.step_rows * work.row_tokens
    passes = count_microbatches(step_tokens, max_tokens=work.training.tokens, num_ranks=work.num_ranks)
    models = 1 + work.has_critic
    if work.num_ranks > 1:
        traffic.append(Traffic("an optimizer step", passes, tuple(pass_traffic(work.sizes, work.training, links))))
        if work.has_critic:
            critic = pass_traffic(critic_sizes(work.sizes), critic_training(work.training), links)
            traffic.append(Traffic("an optimizer step of the critic", passes, tuple(critic)))
    if work.batch_rows:
        tokens = work.batch_rows * work.row_tokens
        passes = count_microbatches(tokens, max_tokens=work.training.tokens, num_ranks=work.num_ranks)
        if work.num_ranks > 1:
            alone = tuple(pass_traffic(work.sizes, work.training, links, with_gradient=False))
            number = passes * (work.forward_passes + work.has_reference)
            traffic += [Traffic("log-probs and values of a batch", number, alone)] if number else []
            sent = work.updates_per_batch * models + work.forward_passes + work.has_reference
            traffic.append(Traffic(ROWS, sent, (rows_traffic(tokens, num_ranks=work.num_ranks),)))
        sync = sync_traffic(
            work.sizes,
            sharding=work.training.sharding,
            links=links,
            num_engines=work.num_servers,
            width=work.server_width if work.bucket_bytes else FLOAT,
        )
        traffic += [Traffic("a weight sync", 1, tuple(sync))] if sync else []
    elif work.embedded_slots:
        gathered = sync_traffic(work.sizes, sharding=work.training.sharding, links=links, num_engines=0)
        traffic += [Traffic("weights for an evaluation", 1, tuple(gathered))] if gathered else []
    return [entry for entry in traffic if entry.size]
