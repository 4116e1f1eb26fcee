"""Stand-ins for tests of your own rewards, environments, engines and loops: no model, no GPU, and time that can be virtual.

FakeEngine is an InferenceEngine (and InMemoryWeightUpdates) that answers from a script; FakeBackend is a TrainingBackend (and
CheckpointingBackend) that trains nothing; FakeWeightChannel a WeightChannel between the two; create_tiny_model is a real Hugging Face
model, randomly initialised and very small.

Delays are trio sleeps, so under the autojump clock of pytest-trio a test of seconds takes microseconds and is exact:

    async def test_two_requests_overlap(autojump_clock):
        engine = FakeEngine(script_answer([5, 6, 1]), seconds_per_token=1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, (3,), SamplingParams())
            nursery.start_soon(engine.generate, (4,), SamplingParams())
        assert trio.current_time() == 3.0

FakeSGLangServer and FakeVLLMServer are whole servers on a loopback socket (docs/testing.md); their module is rollouts.engines.fakes.

Both FakeEngine and FakeBackend write what was asked of them into `calls`. Pass them the same list to see the order of calls between them.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import torch
import trio
from torch import Tensor

from rollouts.backends.protocol import Future, OutputFn
from rollouts.engines.protocol import WEIGHT_VERSION_FILE, ReadBucket
from rollouts.episode_columns import find_context_starts
from rollouts.errors import CheckpointError, EngineError, RolloutsError
from rollouts.samples import derive_seed
from rollouts.types import Completion, FinishReason, LossFn, SamplingParams, TokenOutputs, TrainBatch
from rollouts.weight_plan import WeightSpec, cast_bucket, plan_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

_SERVERS = "FakeSGLangServer FakeVLLMServer Fault ScriptedModel CausalModel"


def __getattr__(name: str) -> Any:
    """Load the fake servers when they are first used (PEP 562)."""
    if name in _SERVERS.split():
        return getattr(importlib.import_module("rollouts.engines.fakes"), name)
    raise AttributeError(f"module 'rollouts.testing' has no attribute {name!r}")


Answer: TypeAlias = Callable[[tuple[int, ...], "int | None"], Sequence[int]]
"""(prompt tokens, seed of the request) -> the whole answer. max_tokens cuts it; where it ends by itself the finish reason is "stop"."""

Delay: TypeAlias = Callable[[tuple[int, ...], "int | None"], float]
"""(prompt tokens, seed of the request) -> seconds for each token of the answer."""


@dataclass(frozen=True)
class Call:
    """One call that a fake received."""

    who: str  # the fake's name
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


def script_answer(tokens: Sequence[int]) -> Answer:
    """The same answer to every request."""
    answer = tuple(tokens)
    return lambda prompt_tokens, seed: answer


def random_answer(vocab_size: int = 64, eos_token_id: int = 1, mean_length: int = 8) -> Answer:
    """Answers of random length and content that are a pure function of the prompt's tokens and the request's seed.

    Args:
        vocab_size: tokens are drawn from [3, vocab_size); the ids below are the special ones of the character tokenizer.
        eos_token_id: last token of every answer.
        mean_length: lengths are uniform in [1, 2 * mean_length - 1], the end of text included.
    """
    assert vocab_size > 3, f"vocab_size is {vocab_size}, expected more than the 3 special tokens"
    assert mean_length >= 1, f"mean_length is {mean_length}, expected at least 1"

    def answer(prompt_tokens: tuple[int, ...], seed: int | None) -> tuple[int, ...]:
        key = (0 if seed is None else seed, *prompt_tokens)
        length = derive_seed(*key, 0) % (2 * mean_length - 1)
        return (*(3 + derive_seed(*key, position) % (vocab_size - 3) for position in range(1, length + 1)), eos_token_id)

    return answer


@dataclass
class _Request:
    """A generate() call that has not returned."""

    aborted: trio.Event = field(default_factory=trio.Event)  # or the engine died


class FakeEngine:
    """An InferenceEngine whose answers come from a function and whose time is trio's.

    Tokens of one request appear `seconds_per_token` apart; requests do not slow each other down. Each token is stamped with the weight
    version at its moment, so a weight update during a request gives a completion with two versions. Log-probs are -0.5 for each token.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        seconds_per_token: float | Delay = 0.0,
        weight_version: int = 0,
        seconds_per_update: float = 0.0,
        error_for: Callable[[tuple[int, ...], int | None], Exception | None] | None = None,
        update_error: Exception | None = None,
        name: str = "engine",
        calls: list[Call] | None = None,
    ) -> None:
        """
        Args:
            answer: what to say; default random_answer().
            seconds_per_token: between two tokens of a request, the first included; or a function of prompt tokens and seed.
            weight_version: the version before the first update.
            seconds_per_update: that a weight update takes; the old weights serve until its end.
            error_for: (prompt tokens, seed) -> the exception that this request ends with, after its first token's delay; None = none.
            update_error: that every weight update raises at its end, the old weights staying in place.
            name: in `calls` and in messages.
            calls: list to append to; default a new one.
        """
        self.name = name
        self.calls: list[Call] = [] if calls is None else calls
        self.weight_version = weight_version
        self.weights: Mapping[str, Tensor] | None = None  # of the last update_weights
        self.checkpoint_path: Path | None = None  # of the last update_weights_from_checkpoint
        self._answer = random_answer() if answer is None else answer
        self._seconds_per_token = seconds_per_token
        self._seconds_per_update = seconds_per_update
        self._error_for = error_for
        self._update_error = update_error
        self._requests: dict[str, _Request] = {}
        self._num_requests = 0
        self._death: str | None = None

    def kill(self, reason: str = "its process has ended") -> None:
        """From now on every call is an EngineError, those that are being answered too."""
        self._death = reason
        for request in self._requests.values():
            request.aborted.set()

    def revive(self, weight_version: int) -> None:
        """Answer again, as a server does that was started again after kill(): with the weights that it is started with."""
        assert self._death is not None, f"{self.name} is alive: kill() it before it is started again"
        self._death, self.weight_version = None, weight_version

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(f"{self.name} cannot be reached: {self._death}")

    @property
    def pending_requests(self) -> tuple[str, ...]:
        """Ids of the requests that are being answered."""
        return tuple(sorted(self._requests))

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Answer from the script, one token per delay, until it ends, max_tokens is reached or abort() is called."""
        prompt = tuple(prompt_tokens)
        self._num_requests += 1
        request_id = f"{self.name}-{self._num_requests}" if request_id is None else request_id
        self.calls.append(Call(self.name, "generate", {"prompt_tokens": prompt, "params": params, "request_id": request_id}))
        self._check_alive()
        assert request_id not in self._requests, f"request id {request_id!r} is already being answered"
        request = _Request()
        self._requests[request_id] = request
        try:
            tokens, versions, reason = await self._decode(prompt, params, request)
        finally:
            del self._requests[request_id]
        log_probs = (-0.5,) * len(tokens)
        return Completion(
            request_id=request_id,
            input_tokens=prompt,
            output_tokens=tokens,
            output_log_probs=log_probs,
            output_versions=versions,
            finish_reason=reason,
            temperature=params.temperature or 1.0,
            truncated_sampling=params.truncates,
            untempered_log_probs=log_probs if params.untempered_log_probs else None,
        )

    async def _decode(
        self, prompt: tuple[int, ...], params: SamplingParams, request: _Request
    ) -> tuple[tuple[int, ...], tuple[int, ...], FinishReason]:
        answer = tuple(self._answer(prompt, params.seed))
        error = None if self._error_for is None else self._error_for(prompt, params.seed)
        delay = self._seconds_per_token(prompt, params.seed) if callable(self._seconds_per_token) else self._seconds_per_token
        tokens: list[int] = []
        versions: list[int] = []
        for token in answer[: params.max_tokens]:
            with trio.move_on_after(delay):
                await request.aborted.wait()
            await trio.lowlevel.checkpoint()
            if error is not None:
                raise error
            self._check_alive()
            if request.aborted.is_set():
                return tuple(tokens), tuple(versions), "abort"
            tokens.append(token)
            versions.append(self.weight_version)
        return tuple(tokens), tuple(versions), "stop" if len(answer) <= params.max_tokens else "length"

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make the named requests, or all, return with what they have."""
        wanted = None if request_ids is None else set(request_ids)
        self.calls.append(Call(self.name, "abort", {"request_ids": None if wanted is None else tuple(sorted(wanted))}))
        self._check_alive()
        for request_id, request in self._requests.items():
            if wanted is None or request_id in wanted:
                request.aborted.set()
        await trio.lowlevel.checkpoint()

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Take the version of WEIGHT_VERSION_FILE in the directory, else the old one plus 1. The directory must exist."""
        path = Path(checkpoint_path)
        self.calls.append(Call(self.name, "update_weights_from_checkpoint", {"checkpoint_path": path}))
        await self._spend_update()
        if not path.is_dir():
            raise EngineError(f"{self.name} cannot load weights: {path} is not a directory. Pass a directory that the backend exported.")
        version_file = path / WEIGHT_VERSION_FILE
        self.weight_version = json.loads(version_file.read_text())["weight_version"] if version_file.exists() else self.weight_version + 1
        self.checkpoint_path = path
        return {"success": True, "weight_version": self.weight_version}

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Keep the weights for a test to look at, and take the version."""
        self.calls.append(Call(self.name, "update_weights", {"names": tuple(weights), "weight_version": weight_version}))
        await self._spend_update()
        self.weights, self.weight_version = dict(weights), weight_version
        return {"success": True, "weight_version": weight_version}

    async def get_weight_version(self) -> int:
        """The version that the next token will be stamped with."""
        await trio.lowlevel.checkpoint()
        self._check_alive()
        return self.weight_version

    async def _spend_update(self) -> None:
        self._check_alive()
        await trio.sleep(self._seconds_per_update)
        self._check_alive()
        if self._update_error is not None:
            raise self._update_error


class FakeWeightChannel:
    """A WeightChannel that reads every bucket and hands all of them to fake engines at its end."""

    def __init__(self, engines: Sequence[FakeEngine], *, bucket_bytes: int = 2**20, fails_at: int | None = None) -> None:
        """
        Args:
            engines: that get the weights.
            bucket_bytes: see plan_weights.
            fails_at: index of the bucket that is refused with an EngineError; None = none.
        """
        self.buckets: list[tuple[str, ...]] = []  # names of those that were read, over all transfers
        self.wants_device = False
        self._engines, self._bucket_bytes, self._fails_at = engines, bucket_bytes, fails_at

    async def send_weights(self, specs: Sequence[WeightSpec], read: ReadBucket, weight_version: int) -> list[Mapping[str, Any]]:
        """Read, then update each engine."""
        weights: dict[str, Tensor] = {}
        for bucket in plan_weights(specs, self._bucket_bytes).buckets:
            if bucket.index == self._fails_at:
                raise EngineError(f"bucket {bucket.index} was refused")
            weights.update(cast_bucket(bucket, await read(bucket)))
            self.buckets.append(bucket.names)
        return [await engine.update_weights(weights, weight_version) for engine in self._engines]


class _TimedFuture(Generic[T]):
    """A result, or an error, that is there at once (ready_at None) or from a moment of trio's time on."""

    def __init__(self, ready_at: float | None, value: T, error: Exception | None) -> None:
        self._ready_at, self._value, self._error = ready_at, value, error

    async def result(self) -> T:
        if self._ready_at is not None:
            await trio.sleep_until(self._ready_at)
        else:
            await trio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return self._ready_at is None or trio.current_time() >= self._ready_at


_STATE_FILE = "fake_backend.json"


class FakeBackend:
    """A TrainingBackend (and CheckpointingBackend) without a model.

    Its policy gives every token the log-prob -1 / (1 + number of optimizer steps), so that losses move; loss functions are really called
    on it, without gradient, and a batch that a loss cannot digest fails here as it would in training. Jobs take effect when they are
    submitted; their results are there after seconds_per_job, one job after another.
    """

    def __init__(
        self,
        *,
        seconds_per_job: float = 0.0,
        error_for: Callable[[str, int], Exception | None] | None = None,
        lr: float = 1e-3,
        name: str = "backend",
        calls: list[Call] | None = None,
    ) -> None:
        """
        Args:
            seconds_per_job: in trio's time; 0 = results are there at once, and done() needs no event loop.
            error_for: (method, how many calls of it came before) -> the exception that this job's future raises; None = none.
            lr: that optim_step reports.
            name: in `calls`.
            calls: list to append to; default a new one.
        """
        self.name = name
        self.calls: list[Call] = [] if calls is None else calls
        self.num_updates = 0
        self._seconds_per_job = seconds_per_job
        self._error_for = error_for
        self._lr = lr
        self._free_at = 0.0  # when the last submitted job ends
        self._counts: Counter[str] = Counter()

    def forward(self, batch: TrainBatch, output_fn: OutputFn, *, with_entropy: bool = False) -> Future[Tensor]:
        """output_fn of the fake policy's outputs."""
        return self._submit(
            "forward", {"rows": batch.num_rows, "with_entropy": with_entropy}, lambda: output_fn(self._outputs(batch, with_entropy))
        )

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, *, with_entropy: bool = False) -> Future[dict[str, float]]:
        """Loss and metrics of loss_fn on the fake policy's outputs."""

        def evaluate() -> dict[str, float]:
            with torch.no_grad():
                output = loss_fn(self._outputs(batch, with_entropy), batch)
            metrics = {key: float(value) for key, value in output.metrics.items()}
            return {"loss": float(output.loss), "num_tokens": float((batch.loss_mask > 0).sum()), **metrics}

        return self._submit("forward_backward", {"rows": batch.num_rows, "with_entropy": with_entropy}, evaluate)

    def optim_step(self) -> Future[dict[str, float]]:
        """Count an update."""

        def update() -> dict[str, float]:
            self.num_updates += 1
            return {"grad_norm": 1.0 / self.num_updates, "lr": self._lr}

        return self._submit("optim_step", {}, update)

    def get_weights(self) -> Future[Mapping[str, Tensor]]:
        """The one weight: {"num_updates": [1]}."""
        return self._submit("get_weights", {}, lambda: {"num_updates": torch.tensor([float(self.num_updates)])})

    def load_weights(self, weights: Mapping[str, Tensor]) -> Future[None]:
        """Take what get_weights gave."""
        assert set(weights) == {"num_updates"}, f"weights have names {sorted(weights)}, expected those of get_weights: ['num_updates']"
        return self._submit("load_weights", {}, lambda: self._set_updates(int(weights["num_updates"].item())))

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write the number of updates."""
        return self._submit("save_checkpoint", {"directory": directory}, lambda: self._write(directory))

    def load_checkpoint(self, directory: Path) -> Future[None]:
        """Read the number of updates. Raises CheckpointError, through the future, if the directory holds none."""

        def load() -> None:
            path = directory / _STATE_FILE
            if not path.exists():
                raise CheckpointError(f"{directory} has no {_STATE_FILE}: it is not a checkpoint of a FakeBackend")
            self._set_updates(json.loads(path.read_text())["num_updates"])

        return self._submit("load_checkpoint", {"directory": directory}, load)

    def export_weights(self, directory: Path) -> Future[None]:
        """Write the number of updates."""
        return self._submit("export_weights", {"directory": directory}, lambda: self._write(directory))

    def _submit(self, method: str, arguments: Mapping[str, Any], job: Callable[[], T]) -> Future[T]:
        self.calls.append(Call(self.name, method, arguments))
        error = None if self._error_for is None else self._error_for(method, self._counts[method])
        self._counts[method] += 1
        value: Any = None
        if error is None:
            try:
                value = job()
            except (RolloutsError, AssertionError) as raised:
                error = raised
        ready_at = None
        if self._seconds_per_job > 0:
            ready_at = self._free_at = max(self._free_at, trio.current_time()) + self._seconds_per_job
        return _TimedFuture(ready_at, value, error)

    def _outputs(self, batch: TrainBatch, with_entropy: bool) -> TokenOutputs:
        columns = torch.arange(batch.tokens.shape[1])
        first = (columns == 0).expand_as(batch.tokens) if batch.context_ids is None else find_context_starts(batch.context_ids)
        real = (~first & (columns < batch.lengths[:, None])).float()  # [B, T]; no prediction for the first token of a context
        return TokenOutputs(log_probs=-real / (1 + self.num_updates), entropy=real / (1 + self.num_updates) if with_entropy else None)

    def _set_updates(self, num_updates: int) -> None:
        self.num_updates = num_updates

    def _write(self, directory: Path) -> None:
        (directory / _STATE_FILE).write_text(json.dumps({"num_updates": self.num_updates}))


def create_tiny_model(
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    seed: int = 0,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    head_dim: int = 8,
) -> PreTrainedModel:
    """A causal language model of Hugging Face transformers, float32, on the CPU, in eval mode, with random weights.

    Args:
        vocab_size: the ids 0 and 1 are pad and end of text, as in the character tokenizer.
        hidden_size: a multiple of head_dim; two heads share a key and value head where their number is even.
        num_layers: decoder layers.
        seed: same seed, same weights; torch's global generator is left as it was.
        architecture: "qwen3" (normalised queries and keys) or "llama".
        head_dim: width of a head; vLLM on a CPU wants at least 32.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    assert hidden_size % head_dim == 0, f"hidden_size is {hidden_size}, expected a multiple of head_dim, {head_dim}"
    num_heads = hidden_size // head_dim
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2 if num_heads % 2 == 0 else num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if architecture == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
    return model.eval()
