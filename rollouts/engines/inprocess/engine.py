"""InProcessEngine: generation for a Hugging Face model in the same process, on CPU or GPU, with continuous batching.

The engine has no task of its own. A caller that waits in generate() may become the driver: it runs one step after another in a worker
thread until its own request is done and then hands over to another waiting caller. So every task has a parent, nothing runs without a
waiting caller, and the event loop is never blocked by computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import trio
import trio.testing
from torch import Tensor

from rollouts.algorithms.logprobs import gather_log_probs
from rollouts.data.model_limits import find_context_length, read_limits
from rollouts.engines.inprocess.experts import ExpertRecorder, read_rows
from rollouts.engines.inprocess.native import NativeModel, open_slots
from rollouts.engines.inprocess.sampling import SamplingRows, UniformStream, read_kept, sample_tokens
from rollouts.engines.protocol import EngineFeature
from rollouts.engines.request_checks import check_params, check_tokens
from rollouts.engines.weights.checkpoint_check import read_weight_version
from rollouts.errors import CheckpointError, ConfigError, EngineContextError, EngineError, EngineRequestError
from rollouts.models.linear import Kernels, forget_packed, use_kernels
from rollouts.models.prepare import inspect_routers
from rollouts.models.weights import check_weights_fit, copy_weights, read_weights
from rollouts.seeds import derive_seed
from rollouts.types import Completion, FinishReason, KeptTokens, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_PREFILL_TOKENS = 8192  # maximum number of prompt tokens in one prefill
_SETTLE_ROUNDS = 100  # maximum number of rounds of the event loop in which other tasks may submit their requests


@dataclass(eq=False)
class _Request:
    """One generate() call: its input, its tokens so far, and its slot."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: tuple[float, float, int, float, bool]  # see SamplingRows.stack
    stop_ids: frozenset[int]
    uniforms: UniformStream
    tokens: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    untempered: list[float] = field(default_factory=list[float])
    kept: list[bytes] = field(default_factory=list[bytes])  # ids of the set of each token, int32
    versions: list[int] = field(default_factory=list[int])
    experts: list[bytes] = field(default_factory=list[bytes])  # experts of each token that a pass has read, see read_rows
    finish_reason: FinishReason | None = None
    abort_wanted: bool = False  # takes effect between two steps
    turn: trio.Event = field(default_factory=trio.Event)  # set when the request is finished, or to make its caller the driver

    @property
    def position(self) -> int:
        """Position of the newest token in the sequence."""
        return len(self.prompt) + len(self.tokens) - 1


_FEATURES = frozenset({EngineFeature.MEMORY_UPDATES, EngineFeature.WEIGHT_VIEWS, EngineFeature.SCORES, EngineFeature.KEPT_TOKENS})


class InProcessEngine:
    """An InferenceEngine in this process.

    - A finished sequence frees its slot at once, and a waiting request takes it. Requests with the same prompt share one prefill, and a
      prompt that begins like an earlier one, as the turns of a conversation do, is computed from there on, see blocks.py.
    - The result of a request depends on its prompt, parameters, seed and the weights, not on the rest of the batch (to float
      tolerance). The same requests give the same bits: waiting requests are admitted in the order of their ids, after every task that
      can run has run, so trio's random scheduling has no influence.
    - Log-probs are those of the sampling distribution: after temperature and truncation. Greedy requests report temperature 1.
    - Weights are replaced between two steps. Running sequences continue, each token is stamped with the version that sampled it, and their
      keys and values are computed again under the new weights, or kept, as configured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        eos_token_ids: Iterable[int] | None = None,
        max_slots: int = 256,
        max_length: int | None = None,
        seed: int = 0,
        weight_version: int = 0,
        kv_cache_on_update: Literal["recompute", "keep"] = "recompute",
        prefix_cache_tokens: int = 65_536,
        record_experts: bool = False,
        cuda_graphs: bool = False,
        kernels: Kernels = "torch",
        name: str = "in-process engine",
    ) -> None:
        """
        Args:
            model: used by the engine alone from now on (pass copy.deepcopy(model) for a model in training); stays on its device.
            tokenizer: needed for stop strings, and for its end-of-text id.
            eos_token_ids: end-of-text ids; default: those of the model's generation config, and the tokenizer's.
            max_slots: maximum number of sequences at the same time.
            max_length: maximum number of tokens of prompt and response; default: the model's context.
            seed: seed of requests without one, which are numbered in order of arrival.
            kv_cache_on_update: treatment of keys and values of running sequences when weights change.
            prefix_cache_tokens: maximum number of tokens with keys and values kept, until the next update of the weights, for prompts that
                begin alike; 0 = none. Kept ones change no numbers on a CPU. A model without slots keeps nothing.
            record_experts: completions have the experts that the routers of a mixture of experts chose, for their replay in training.
            cuda_graphs: decode by CUDA graphs, one for each bucket of slots and lengths, see graphs.py.
            kernels: kernels of linear layers on a CPU, such as choose_kernels chooses; "packed" packs large weights alone.
            name: name in messages.

        Raises: ConfigError for a model that cannot decode over slots, a max_length beyond its context, experts that cannot be recorded, or
            cuda_graphs on another device than a CUDA GPU or with record_experts.
        """
        assert max_slots >= 1, f"max_slots is {max_slots}, expected at least 1"
        self.name = name
        device = next(model.parameters()).device
        if cuda_graphs and (device.type != "cuda" or record_experts):
            why = "record_experts is set" if record_experts else f"the model is on the device {str(device)!r}"
            raise ConfigError(f"{name}: cuda_graphs is True, but {why}, where no step is recorded as a graph: leave cuda_graphs out")
        use_kernels(model, kernels, packs_weights=True)
        self._slots = open_slots(model, max_slots=max_slots, name=name, kept_tokens=prefix_cache_tokens, cuda_graphs=cuda_graphs)
        if record_experts:
            routers = inspect_routers(model, native=isinstance(self._slots, NativeModel))
            if routers.problem is not None:
                raise ConfigError(f"{name}: record_experts, which router_replay needs, is set, but {routers.problem}: set both to False")
            self._slots.recorder = ExpertRecorder(routers)
        self._model = model
        self._tokenizer = tokenizer
        self._eos = frozenset(find_eos_ids(model, tokenizer) if eos_token_ids is None else eos_token_ids)
        self._vocab_size = read_limits(model).num_embeddings
        self._max_slots = max_slots
        context = find_context_length(model.config)
        if max_length is not None and context is not None and max_length > context:
            raise ConfigError(f"{name}: max_length is {max_length}, more than the model's context of {context}: give at most that")
        self._max_length = max_length or context or 1 << 30
        self._seed = seed
        self._num_requests = 0
        self._weight_version = weight_version
        self._kv_cache_on_update = kv_cache_on_update
        self._prefixes: dict[tuple[int, ...], Any] = {}  # whole prompts for which requests still wait
        self._pending: dict[str, _Request] = {}  # generate() calls in flight, by request id
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []  # the request at index i occupies slot i
        self._model_lock = trio.Lock()  # held for a step or a weight update; fair, so an update gets in between two steps
        self._driver: _Request | None = None
        self._stepping = False  # a step is running in a worker thread: requests belong to it, only _waiting may change
        self._closed = False

    @property
    def features(self) -> frozenset[EngineFeature]:
        """Features of all engines of this class, and ROUTED_EXPERTS if this one records experts."""
        return _FEATURES | {EngineFeature.ROUTED_EXPERTS} if self._slots.recorder.routers.modules else _FEATURES

    async def __aenter__(self) -> InProcessEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._closed = True
        self._abort_now(None)
        self._prefixes.clear()
        self._slots.forget()

    # -- InferenceEngine

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Sample one completion; max_tokens is cut to the rest of the context.

        Args:
            request_id: unique among pending requests; waiting requests are admitted in the order of their ids.

        Raises: EngineRequestError for an empty prompt or a token outside the vocabulary; EngineContextError for a prompt that fills the
            context.
        """
        request = self._create_request(tuple(prompt_tokens), params, request_id)
        self._pending[request.request_id] = request
        self._waiting.append(request)
        try:
            while request.finish_reason is None:
                if self._driver is None:
                    self._driver = request
                    try:
                        await self._drive(request)
                    finally:
                        self._driver = None
                        self._hand_over()
                else:
                    await request.turn.wait()
                    request.turn = trio.Event()
        finally:
            del self._pending[request.request_id]
            if request.finish_reason is None:  # cancelled, or the step raised: its slot is freed before the next step
                request.abort_wanted = True
                if not self._stepping:
                    self._finish_aborted()
                if self._driver is None:
                    self._hand_over()
        await trio.lowlevel.checkpoint()
        return self._to_completion(request)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Make pending generate() calls return with the tokens they have; None = all."""
        self._abort_now(None if request_ids is None else frozenset(request_ids))
        await trio.lowlevel.checkpoint()

    async def update_weights_from_checkpoint(self, checkpoint_path: Path | str) -> Mapping[str, Any]:
        """Load a Hugging Face directory. Raises EngineError, the old weights untouched, if it does not fit."""
        path = Path(checkpoint_path)
        try:
            weights = await trio.to_thread.run_sync(read_weights, path, self._model)
            stated = await trio.to_thread.run_sync(read_weight_version, path)
            version = self._weight_version + 1 if stated is None else stated
        except (CheckpointError, OSError, ValueError, KeyError) as error:
            raise EngineError(f"{self.name} cannot load weights from {path}: {error}") from error
        return await self._replace_weights(weights, version, str(path))

    async def update_weights(self, weights: Mapping[str, Tensor], weight_version: int) -> Mapping[str, Any]:
        """Replace the weights between two steps by copies of given ones, which may be those that are trained.

        Raises: EngineError, the old weights untouched, if they do not fit.
        """
        return await self._replace_weights(weights, weight_version, "the given weights")

    async def get_weight_version(self) -> int:
        """Return the version of the weights that will sample the next token."""
        self._check_open()
        await trio.lowlevel.checkpoint()
        return self._weight_version

    async def recompute_output_log_probs(
        self, input_tokens: Sequence[int], start_index: int, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Return log-probs of input_tokens[start_index:] under the current weights, full distribution.

        Args:
            input_tokens: prompt and response.
            start_index: at least 1; the first token of a sequence has no prediction.
            temperature: > 0.
        """
        self._check_open()
        self._check_tokens(tuple(input_tokens), self._max_length, "recompute_output_log_probs")
        if not 1 <= start_index <= len(input_tokens):
            raise EngineRequestError(f"{self.name}: start_index is {start_index}, expected between 1 and the {len(input_tokens)} tokens")
        assert temperature > 0, f"temperature is {temperature}, expected > 0"

        def compute() -> list[float]:
            hidden = self._slots.hidden_states(input_tokens)[start_index - 1 : -1]
            targets = torch.tensor(list(input_tokens[start_index:]), device=hidden.device, dtype=torch.int64)
            return gather_log_probs(self._slots.compute_logits(hidden) / temperature, targets).tolist()

        async with self._model_lock:
            return tuple(await trio.to_thread.run_sync(compute))

    # -- driving

    async def _drive(self, request: _Request) -> None:
        """Run steps until the request is finished. Only one caller is here at a time."""
        settle = True
        while request.finish_reason is None:
            if settle or self._waiting:
                # tasks about to submit a request must have done so before requests are admitted, or the composition of a batch (and with
                # it the last bits of its numbers) would depend on trio's random order of tasks
                await _wait_until_others_rest()
            async with self._model_lock:
                settle = await self._run_step()

    async def _run_step(self) -> bool:
        """Run one step in a worker thread. Return whether a request finished.

        Waiting requests are taken here, in the event loop, because other tasks add to them while a step runs. If the step raises, requests
        about to be admitted wait again, from their beginning, and finished requests still get their answers.
        """
        admitted = self._take_waiting()
        self._stepping = True
        try:
            await trio.to_thread.run_sync(self._step, admitted)
        except BaseException:
            again = [r for r in admitted if r not in self._running and r.finish_reason is None]
            for request in again:
                for made in (request.tokens, request.log_probs, request.untempered, request.kept, request.versions):
                    made.clear()
            self._waiting = [*again, *self._waiting]
            raise
        finally:
            self._stepping = False
            self._finish_aborted()
            wanted = {r.prompt for r in self._waiting}
            self._prefixes = {prompt: prefix for prompt, prefix in self._prefixes.items() if prompt in wanted}
            finished = [r for r in self._pending.values() if r.finish_reason is not None]
            for request in finished:
                request.turn.set()
        return bool(finished)

    def _finish_aborted(self) -> None:
        """Finish aborted and cancelled requests. Only between two steps."""
        for request in [*self._waiting, *self._running]:
            if request.abort_wanted and request.finish_reason is None:
                request.finish_reason = "abort"
                request.turn.set()
        self._waiting = [r for r in self._waiting if r.finish_reason is None]

    def _hand_over(self) -> None:
        """Wake one waiting caller to become the driver."""
        successor = next((r for r in [*self._running, *self._waiting] if r.finish_reason is None), None)
        if successor is not None:
            successor.turn.set()

    def _step(self, admitted: Sequence[_Request]) -> None:
        """Sample one token for every running sequence, and the first token for admitted ones."""
        self._free_slots()
        prefixes: dict[tuple[int, ...], Any] = {}
        if self._running:
            tokens = torch.tensor([r.tokens[-1] for r in self._running], device=self._slots.device)
            logits = self._slots.decode(tokens, [r.position for r in self._running])
            for request, row in zip(self._running, read_rows(self._slots.experts), strict=False):  # no rows if nothing is recorded
                request.experts[request.position :] = [row]
            self._sample(self._running, logits)
        if admitted:
            prefixes = self._find_prefixes([r.prompt for r in admitted])
            rows = {prompt: read_rows(prefix.experts) for prompt, prefix in prefixes.items()}
            for request in admitted:
                request.experts = list(rows[request.prompt])
            self._sample(admitted, torch.stack([prefixes[r.prompt].logits for r in admitted]))
        self._free_slots()
        self._occupy_slots([r for r in admitted if r.finish_reason is None], prefixes)

    def _take_waiting(self) -> list[_Request]:
        """Return the next requests that fit, in the order of their ids."""
        self._waiting.sort(key=lambda r: r.request_id)
        free = self._max_slots - sum(r.finish_reason is None for r in self._running)
        admitted, self._waiting = self._waiting[:free], self._waiting[free:]
        return admitted

    def _find_prefixes(self, prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Return the prefixes of the prompts, each computed once for all requests that wait for it at the same time.

        The content of a pass, and so the last bits of its numbers, follows from the requests in flight, not from those before them.
        """
        wanted = dict.fromkeys(prompts)
        for batch in _split_by_tokens([prompt for prompt in wanted if prompt not in self._prefixes], _PREFILL_TOKENS):
            self._prefixes.update(zip(batch, self._slots.prefill(batch), strict=True))
        return {prompt: self._prefixes[prompt] for prompt in wanted}

    def _occupy_slots(self, requests: Sequence[_Request], prefixes: Mapping[tuple[int, ...], Any]) -> None:
        """Give each request the next free slot, filled with its prefix; requests of one prompt are filled together."""
        first = len(self._running)
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, request in enumerate(requests, start=first):
            slots.setdefault(request.prompt, []).append(slot)
        for prompt, group in slots.items():
            self._slots.fill(group, prefixes[prompt])
        self._running.extend(requests)  # only now: a slot that could not be filled must not be decoded

    def _free_slots(self) -> None:
        """Move running sequences into the slots of finished ones, so that slots 0 .. A - 1 are all in use."""
        alive = [i for i, r in enumerate(self._running) if r.finish_reason is None]
        num_alive = len(alive)
        if num_alive == len(self._running):
            return
        holes = sorted(set(range(num_alive)) - set(alive))
        movers = [i for i in alive if i >= num_alive]
        longest = max((self._running[i].position + 1 for i in movers), default=0)
        self._slots.move(movers, holes, longest)
        for source, target in zip(movers, holes, strict=True):
            self._running[target] = self._running[source]
        del self._running[num_alive:]
        self._slots.free(num_alive)

    def _sample(self, requests: Sequence[_Request], logits: Tensor) -> None:
        """Append one token to each request. logits: # [len(requests), V]."""
        rows = SamplingRows.stack([r.sampling for r in requests], logits.device)
        uniforms = torch.tensor([r.uniforms[len(r.tokens)] for r in requests], dtype=torch.float64)
        with torch.inference_mode():
            tokens, log_probs, is_kept = sample_tokens(logits, rows, uniforms)
            untempered = gather_log_probs(logits, tokens).tolist() if any(r.params.untempered_log_probs for r in requests) else None
        kept = read_kept(is_kept) if is_kept is not None and any(r.params.kept_tokens for r in requests) else None
        for i, (request, token, log_prob) in enumerate(zip(requests, tokens.tolist(), log_probs.tolist(), strict=True)):
            request.tokens.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self._weight_version)
            if untempered is not None and request.params.untempered_log_probs:
                request.untempered.append(untempered[i])
            if kept is not None and request.params.kept_tokens:
                request.kept.append(kept[i])
            request.finish_reason = self._find_end(request, token)

    def _find_end(self, request: _Request, token: int) -> FinishReason | None:
        if token in request.stop_ids:
            return "stop"
        if request.params.stop and self._tokenizer is not None:
            # a stop string of n characters cannot reach further back than n tokens, with some room for bytes of split characters
            tail = request.tokens[-max(map(len, request.params.stop)) - 8 :]
            text = str(self._tokenizer.decode(tail))
            if any(stop in text for stop in request.params.stop):
                return "stop"
        return "length" if len(request.tokens) >= request.params.max_tokens else None

    # -- requests and weights

    def _create_request(self, prompt: tuple[int, ...], params: SamplingParams, request_id: str | None) -> _Request:
        self._check_open()
        number, self._num_requests = self._num_requests, self._num_requests + 1
        name = f"request-{number:012d}" if request_id is None else request_id
        assert name not in self._pending, f"request id {name!r} is already pending"
        check_params(self.name, name, params, vocab_size=self._vocab_size, has_tokenizer=self._tokenizer is not None)
        self._check_tokens(prompt, self._max_length - 1, name)
        most = self._max_length - len(prompt)
        params = params if params.max_tokens <= most else params.new(max_tokens=most)
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        stop_ids = self._eos | frozenset(params.stop_token_ids)
        return _Request(
            request_id=name,
            prompt=prompt,
            params=params,
            sampling=(params.temperature, params.top_p, params.top_k, params.min_p, params.truncates),
            stop_ids=stop_ids,
            uniforms=UniformStream(seed),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.name} is closed: generate inside its `async with` block")

    def _check_tokens(self, tokens: tuple[int, ...], most: int, name: str) -> None:
        check_tokens(self.name, name, tokens, self._vocab_size)
        if len(tokens) > most:
            raise EngineContextError(
                f"{self.name}: {name} has {len(tokens)} tokens, more than the {most} that fit into the context of {self._max_length}: "
                "shorten the prompt"
            )

    def _abort_now(self, request_ids: frozenset[str] | None) -> None:
        for request in self._pending.values():
            if request_ids is None or request.request_id in request_ids:
                request.abort_wanted = True
        if not self._stepping:
            self._finish_aborted()

    async def _replace_weights(self, weights: Mapping[str, Tensor], version: int, source: str) -> Mapping[str, Any]:
        self._check_open()
        try:
            check_weights_fit(self._model, weights, source)
        except CheckpointError as error:
            raise EngineError(f"{self.name} cannot take new weights: {error}") from error

        def replace() -> None:
            copy_weights(self._model, weights)
            forget_packed(self._model)
            self._prefixes.clear()
            self._slots.forget()
            self._weight_version = version
            self._free_slots()
            if self._kv_cache_on_update == "recompute" and self._running:
                sequences = [(*r.prompt, *r.tokens[:-1]) for r in self._running]
                slot = 0
                for batch in _split_by_tokens(sequences, _PREFILL_TOKENS):
                    for prefix in self._slots.prefill(batch):
                        self._slots.fill([slot], prefix)
                        slot += 1

        async with self._model_lock:
            await trio.to_thread.run_sync(replace)
        return {"success": True, "weight_version": version}

    def _to_completion(self, request: _Request) -> Completion:
        assert request.finish_reason is not None, f"{request.request_id} is not finished"
        params = request.params
        return Completion(
            request_id=request.request_id,
            input_tokens=request.prompt,
            output_tokens=tuple(request.tokens),
            output_log_probs=tuple(request.log_probs),
            output_versions=tuple(request.versions),
            finish_reason=request.finish_reason,
            temperature=1.0 if params.greedy else params.temperature,
            truncated_sampling=params.truncates,
            untempered_log_probs=tuple(request.untempered) if params.untempered_log_probs else None,
            routed_experts=self._slots.recorder.to_value(request.experts, len(request.prompt) + len(request.tokens)),
            kept_tokens=_collect_kept(request) if params.kept_tokens and params.truncates else None,
        )


def _collect_kept(request: _Request) -> KeptTokens:
    return KeptTokens(data=b"".join(request.kept), counts=tuple(len(ids) // 4 for ids in request.kept))


class _RoundLimit(trio.abc.Instrument):
    """Cancel a scope after a number of rounds of the event loop, whatever time they take: a slow machine must not change numbers."""

    def __init__(self, scope: trio.CancelScope, num_rounds: int) -> None:
        self._scope, self._left = scope, num_rounds

    def after_io_wait(self, timeout: float) -> None:
        self._left -= 1
        if self._left == 0:
            self._scope.cancel()


async def _wait_until_others_rest() -> None:
    """Wait until every other task waits, or for _SETTLE_ROUNDS: a task that never waits must not stop the engine."""
    with trio.CancelScope() as scope:
        limit = _RoundLimit(scope, _SETTLE_ROUNDS)
        trio.lowlevel.add_instrument(limit)
        try:
            await trio.testing.wait_all_tasks_blocked()
        finally:
            trio.lowlevel.remove_instrument(limit)


def find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Return the end-of-text ids of the generation config, the model config, that of its text model and the tokenizer."""
    found: set[int] = set()
    sources: list[Any] = [getattr(model, "generation_config", None), model.config, model.config.get_text_config(), tokenizer]
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return found


def _split_by_tokens(rows: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Return consecutive rows in batches of at most max_tokens (a longer row alone)."""
    batches: list[list[tuple[int, ...]]] = []
    total = 0
    for row in rows:
        if not batches or total + len(row) > max_tokens:
            batches.append([])
            total = 0
        batches[-1].append(row)
        total += len(row)
    return batches
