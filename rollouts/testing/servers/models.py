"""Models of a fake server: a script, or a real (tiny) causal language model whose weights can be replaced.

Both compute into a KV, the keys and values of a request so far. A KV belongs to the weights it was computed with: a request that continues
with an old one, or takes a prefix from a cache that was not reset, is wrong in the same way as on the real servers.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts.engines.inprocess.sampling import truncate_logits
from rollouts.errors import RolloutsError
from rollouts.models.forward.output_layers import find_cache_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LogProbKind: TypeAlias = Literal["sampled", "tempered", "untempered"]

Script: TypeAlias = Callable[[tuple[int, ...], int, int, "int | None"], tuple[int, float]]
"""(prompt tokens, number of the token, number of weight loads, seed of the request) -> (token, log-prob).

The number of weight loads is 0 at the start and counts every load; a request that reads stale keys and values gets the number at which
they were computed.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one sequence: the fields that both servers know."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    allowed: tuple[int, ...] = ()  # tokens that may be sampled; empty = all
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_top: int = 0  # most probable tokens to report; -1 = the whole vocabulary
    token_ids: tuple[int, ...] = ()  # tokens whose log-probs are to be reported at every position


@dataclass(frozen=True)
class Ranked:
    """The log-prob of one token and its place in the distribution, 1 = most probable."""

    token: int
    log_prob: float
    rank: int


@dataclass(frozen=True)
class Draw:
    """One sampled token."""

    chosen: Ranked
    top: tuple[Ranked, ...] = ()  # most probable first
    selected: tuple[Ranked, ...] = ()  # tokens of Sampling.token_ids
    kept: tuple[int, ...] = ()  # set that it was drawn from, most probable first; () = itself alone
    kept_log_prob: float = 0.0  # its log-prob over this set


@dataclass
class KV:
    """Keys and values of the first `length` tokens of a sequence."""

    weights: int  # number of weight loads when the first of them was computed
    length: int = 0
    cache: Any = None  # cache of transformers; None for a script

    def fork(self, length: int) -> KV:
        """Return a copy of the first `length` tokens."""
        assert length <= self.length, f"the prefix has {length} tokens, the KV {self.length}"
        cache = copy.deepcopy(self.cache)
        if cache is not None and length < self.length:
            cache.crop(length - self.length)  # negative: number of tokens to remove
        return KV(self.weights, length, cache)


class LoadError(RolloutsError):
    """Weights could not be loaded.

    "missing": no such directory. "empty": no weights in it. "damaged": an incomplete file. "shape": a tensor of another shape.
    """

    def __init__(self, kind: Literal["missing", "empty", "damaged", "shape"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class FakeModel(Protocol):
    """Interface of a fake server's model."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    num_loads: int
    path: str

    def create_kv(self) -> KV:
        """Return the KV of a new sequence."""
        ...

    def extend(self, tokens: Sequence[int], kv: KV) -> None:
        """Compute keys and values of the tokens that the KV lacks."""
        ...

    def draw(self, prompt: tuple[int, ...], output: Sequence[int], kv: KV, sampling: Sampling, uniform: float, kind: LogProbKind) -> Draw:
        """Sample the next token. Extends the KV to all tokens given."""
        ...

    def score(self, tokens: Sequence[int], num_top: int = 0, token_ids: Sequence[int] = ()) -> list[Draw]:
        """Return log-probs at temperature 1 of the tokens after the first."""
        ...

    def load(self, path: Path) -> None:
        """Load the weights of a directory; missing tensors keep their values, unknown ones are ignored."""
        ...

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors, as in load()."""
        ...

    def find_misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return names that are missing, unknown or of another shape."""
        ...

    def checksum(self) -> dict[str, bytes]:
        """Return the bytes of each weight by its name."""
        ...


def read_safetensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of all safetensors files of a directory. Raises LoadError."""
    if not directory.is_dir():
        raise LoadError("missing", f"{directory} is not a directory")
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise LoadError("empty", f"Cannot find any model weights with `{directory}`")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensors[name] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError("damaged", str(error)) from error
    return tensors


def describe_missing(path: str) -> str:
    """Return the servers' message for a missing directory, which they take for a name on the hub."""
    if path.count("/") > 1:
        return f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. Use `repo_type` argument if needed."
    return (
        "Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-' or '.' and the maximum length is 96: "
        f"'{path}'."
    )


def fuse_name(name: str) -> str:
    """Return a checkpoint weight's name in a server, where projections of the same input are fused."""
    return re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", re.sub(r"\b[qkv]_proj\b", "qkv_proj", name))


def hash_weights(model: FakeModel, is_hidden: Callable[[str], bool] = lambda name: False) -> dict[str, str]:
    """Return the SHA-256 of each weight under its name in a server; that of nothing for hidden ones."""
    digests: dict[str, Any] = {}
    for name, data in model.checksum().items():
        digests.setdefault(fuse_name(name), hashlib.sha256()).update(b"" if is_hidden(name) else data)
    return {name: digest.hexdigest() for name, digest in digests.items()}


class ScriptedModel:
    """A model that answers from a function. It only counts its weight loads."""

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = 128,
        context_length: int = 512,
        eos_token_ids: tuple[int, ...] = (1,),
        score: Callable[[tuple[int, ...], int], Sequence[float]] | None = None,
        path: str = "fake-model",
    ) -> None:
        """
        Args:
            script: see Script. A token of eos_token_ids ends the answer.
            vocab_size: ids are 0 .. vocab_size - 1.
            context_length: maximum number of tokens of prompt and answer together.
            score: (tokens, number of weight loads) -> log-probs of the tokens after the first, for requests that ask for prompt log-probs;
                default -1 each.
            path: model directory that the server reports.
        """
        self.vocab_size, self.context_length, self.eos_token_ids, self.path = vocab_size, context_length, eos_token_ids, path
        self.num_loads = 0
        self._script = script
        self._score = score

    def create_kv(self) -> KV:
        """Return the KV of a new sequence."""
        return KV(self.num_loads)

    def extend(self, tokens: Sequence[int], kv: KV) -> None:
        """Note the number of tokens."""
        kv.length = max(kv.length, len(tokens))

    def draw(self, prompt: tuple[int, ...], output: Sequence[int], kv: KV, sampling: Sampling, uniform: float, kind: LogProbKind) -> Draw:
        """Sample as the script says. All other tokens share the remaining probability."""
        kv.length = len(prompt) + len(output)
        token, log_prob = self._script(prompt, len(output), kv.weights, sampling.seed)
        assert 0 <= token < self.vocab_size, f"the script gave token {token}, expected one in [0, {self.vocab_size})"
        rest = math.log(max(1 - math.exp(log_prob), 1e-6) / (self.vocab_size - 1))
        if kind == "tempered" and sampling.temperature > 0:  # the script's log-prob is at temperature 1, except for the sampled token
            rest = log_prob - (log_prob - rest) / sampling.temperature
        chosen, others = Ranked(token, log_prob, 1 if log_prob >= rest else self.vocab_size), Ranked(0, rest, 1 if rest > log_prob else 2)
        count = self.vocab_size if sampling.num_top < 0 else min(sampling.num_top, self.vocab_size)
        names = (i for i in range(self.vocab_size) if i != token)
        top = [chosen] * (count > 0) + [replace(others, token=name) for name, _ in zip(names, range(count - 1), strict=False)]
        selected = (chosen if i == token else replace(others, token=i) for i in sampling.token_ids)
        return Draw(chosen, tuple(sorted(top, key=lambda ranked: -ranked.log_prob)), tuple(selected))

    def score(self, tokens: Sequence[int], num_top: int = 0, token_ids: Sequence[int] = ()) -> list[Draw]:
        """Return the results of the function `score`, or -1 each."""
        log_probs = [-1.0] * (len(tokens) - 1) if self._score is None else self._score(tuple(tokens), self.num_loads)
        found = [Ranked(token, log_prob, 1) for token, log_prob in zip(tokens[1:], log_probs, strict=True)]
        return [Draw(r, (r,) if num_top else (), tuple(Ranked(i, r.log_prob, 1) for i in token_ids)) for r in found]

    def load(self, path: Path) -> None:
        """Count a load. The directory must exist, and its safetensors files, if any, must be complete."""
        try:
            read_safetensors(path)
        except LoadError as error:
            if error.kind != "empty":
                raise
        self.num_loads += 1

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Count a load."""
        self.num_loads += 1

    def find_misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return no names: a script takes all tensors."""
        return []

    def checksum(self) -> dict[str, bytes]:
        """Return one weight: the number of loads."""
        return {"model.weight": str(self.num_loads).encode()}


@dataclass
class CausalModel:
    """A causal language model of transformers, for very small models: each token of each sequence is a forward pass of its own."""

    model: PreTrainedModel
    path: str = "fake-model"
    num_loads: int = 0
    keeps_tied_head: bool = False  # a tied output head keeps its old values unless a checkpoint has it under its own name
    vocab_size: int = field(init=False)
    context_length: int = field(init=False)
    eos_token_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        # a copy: the caller may continue to train the given model
        self.model = copy.deepcopy(self.model).eval()
        config: Any = self.model.config
        self.vocab_size, self.context_length = int(config.vocab_size), int(config.max_position_embeddings)
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self._head_is_tied = head is not None and cast("Any", head).weight is cast("Any", embedding).weight
        if self._head_is_tied and self.keeps_tied_head:
            cast("Any", head).weight = torch.nn.Parameter(cast("Any", head).weight.detach().clone())
        eos = config.eos_token_id
        self.eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @staticmethod
    def from_directory(directory: Path, *, keeps_tied_head: bool = False) -> CausalModel:
        """Load a Hugging Face directory in float32."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return CausalModel(model, path=str(directory), keeps_tied_head=keeps_tied_head)

    def create_kv(self) -> KV:
        """Return the KV of a new sequence."""
        from transformers import DynamicCache

        return KV(self.num_loads, cache=DynamicCache())

    def extend(self, tokens: Sequence[int], kv: KV) -> None:
        """Run the tokens that the KV lacks."""
        if len(tokens) > kv.length:
            self._extend(tokens, kv)

    def draw(self, prompt: tuple[int, ...], output: Sequence[int], kv: KV, sampling: Sampling, uniform: float, kind: LogProbKind) -> Draw:
        """Run the tokens that the KV lacks, then sample: temperature, then min_p, top_k and top_p."""
        logits = self._extend([*prompt, *output], kv)[-1]  # [V]
        if len(output) < sampling.min_tokens:
            logits = logits.index_fill(0, torch.tensor([*self.eos_token_ids, *sampling.stop_token_ids], dtype=torch.long), -torch.inf)
        if sampling.allowed:
            index = torch.tensor(sampling.allowed)
            logits = torch.full_like(logits, -torch.inf).index_copy(0, index, logits[index])
        greedy = sampling.temperature < 1e-5
        tempered = logits if greedy else logits / sampling.temperature
        kept = tempered if greedy else _truncate(tempered, sampling)
        token = int(logits.argmax()) if greedy else _draw_token(kept, uniform)
        reported = {"sampled": kept, "tempered": tempered, "untempered": logits}[kind].log_softmax(-1)
        found = _describe(reported, token, sampling.num_top, sampling.token_ids)
        if greedy:
            return found
        ids = kept.argsort(descending=True)[: int(kept.isfinite().sum())].tolist()
        return replace(found, kept=tuple(ids), kept_log_prob=float(kept.log_softmax(-1)[token]))

    def score(self, tokens: Sequence[int], num_top: int = 0, token_ids: Sequence[int] = ()) -> list[Draw]:
        """Return log-probs at temperature 1 of the tokens after the first."""
        log_probs = self._extend(tokens, self.create_kv()).log_softmax(-1)  # [n, V]
        return [_describe(log_probs[i], token, num_top, token_ids) for i, token in enumerate(tokens[1:])]

    def load(self, path: Path) -> None:
        """Load the weights of a directory."""
        self.load_tensors(read_safetensors(path))

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights. Raises LoadError, with part of them replaced, if a shape does not fit."""
        own: Any = self.model.state_dict()
        self.num_loads += 1
        with torch.no_grad():
            for name, value in tensors.items():
                if name not in own:
                    continue
                if own[name].shape != value.shape:
                    raise LoadError("shape", f"start (0) + length ({own[name].shape[0]}) exceeds dimension size ({value.shape[0]}).")
                own[name].copy_(value)

    def find_misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return names that are missing, unknown or of another shape."""
        own: Any = self.model.state_dict()
        given = {own[name].data_ptr() for name in tensors if name in own}  # a tied weight may be given under one of its names only
        missing = {name for name in own if name not in tensors and own[name].data_ptr() not in given and not self._is_head(name)}
        return sorted(missing | {name for name in tensors if name not in own or own[name].shape != tensors[name].shape})

    def checksum(self) -> dict[str, bytes]:
        """Return the bytes of each weight by its name."""
        own: Any = self.model.state_dict()
        first = {value.data_ptr(): name for name, value in reversed(own.items())}  # a tied weight counts once
        names = [name for name in sorted(first.values(), key=list(own).index) if not self._is_head(name)]
        return {name: own[name].contiguous().view(torch.uint8).numpy().tobytes() for name in names}

    def _is_head(self, name: str) -> bool:
        """Whether a weight is an output head that checkpoints may omit."""
        return self._head_is_tied and name == "lm_head.weight"

    def _extend(self, tokens: Sequence[int], kv: KV) -> Tensor:
        """Run the tokens that the KV lacks. Return their logits # [n, V] float32."""
        new = torch.tensor([list(tokens[kv.length :])], dtype=torch.long)
        with torch.inference_mode():
            model: Any = self.model
            logits: Tensor = model(input_ids=new, use_cache=True, **{find_cache_name(model): kv.cache}).logits
        kv.length = len(tokens)
        return logits[0].float()


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0:
        return logits
    top_k, top_p, min_p = torch.tensor([sampling.top_k]), torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
    return truncate_logits(logits[None], top_k, top_p, min_p)[0]


def _draw_token(logits: Tensor, uniform: float) -> int:
    cumulative = logits.double().softmax(-1).cumsum(-1)
    drawn = int(torch.searchsorted(cumulative, torch.tensor(uniform * float(cumulative[-1]), dtype=torch.float64), right=True))
    return drawn if drawn < len(logits) else int(logits.argmax())


def _describe(log_probs: Tensor, token: int, num_top: int, token_ids: Sequence[int]) -> Draw:
    def rank(i: int) -> Ranked:
        return Ranked(i, float(log_probs[i]), int((log_probs > log_probs[i]).sum()) + 1)

    count = len(log_probs) if num_top < 0 else min(num_top, len(log_probs))
    best: list[int] = log_probs.topk(count).indices.tolist() if count else []
    return Draw(rank(token), tuple(rank(i) for i in best), tuple(rank(i) for i in token_ids))


def create_model(model: FakeModel | Script | PreTrainedModel | Path | str, *, keeps_tied_head: bool = False) -> FakeModel:
    """Create a model from what the fake servers accept: a script, a model of transformers (copied), a model directory, or a FakeModel."""
    if isinstance(model, Path | str):
        return CausalModel.from_directory(Path(model), keeps_tied_head=keeps_tied_head)
    if isinstance(model, torch.nn.Module):
        return CausalModel(cast("Any", model), keeps_tied_head=keeps_tied_head)
    if isinstance(model, ScriptedModel | CausalModel) or hasattr(model, "create_kv"):
        return model  # pyright: ignore[reportReturnType]
    assert callable(model), f"the model is {model!r}, expected a script, a model of transformers or its directory"
    return ScriptedModel(model)
