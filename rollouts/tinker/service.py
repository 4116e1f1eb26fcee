"""Sessions of a Tinker-compatible server: the clients, their models in training, each with its jobs in order, and their samplers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import trio

from rollouts.data.model_limits import read_limits
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import DataError, raise_single_errors
from rollouts.gateway.refusals import Refusal
from rollouts.seeds import derive_seed
from rollouts.tinker.config import TinkerConfig
from rollouts.tinker.job_queue import Training
from rollouts.tinker.losses import bind_loss
from rollouts.tinker.samplers import BASE, Engines, Sampler
from rollouts.tinker.saved import describe_saved, find_saved, read_adapters_of, write_saved
from rollouts.tinker.trained import TrainedModel, choose_adapters, create_trained_model
from rollouts.tinker.wire.messages import PassRequest, write_samples
from rollouts.tinker.wire.paths import make_path, parse_path
from rollouts.tinker.wire.requests import AdamParams, ModelRequest, SampleRequest
from rollouts.tinker.wire.results import Outcome, PendingResult, Results, write_failure, write_json, write_protobuf
from rollouts.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollouts.backends.lora.config import LoRAConfig

_ENDED_KEPT = 4096  # ids of sessions that have ended, which are told so

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    """A client: what it has, and when it was last heard of."""

    session_id: str
    heard_at: float
    models: dict[str, Training] = field(default_factory=dict[str, Training])
    samplers: dict[str, Sampler] = field(default_factory=dict[str, Sampler])


class Service:
    """State of a server. Every method returns at once; work is done by tasks of a nursery, which `run` opens."""

    def __init__(self, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: TinkerConfig) -> None:
        self.config = config
        self.results = Results()
        self._base, self._tokenizer = base, tokenizer
        self._root = Path(config.directory)
        self._engines = Engines(base, tokenizer, most=config.max_samplers, seed=config.seed)
        self._sessions: dict[str, _Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()  # session id -> why it has ended
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the work of all clients until it is cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                await trio.sleep(self.config.idle_s / 4)
                for session in list(self._sessions.values()):
                    if trio.current_time() - session.heard_at > self.config.idle_s:
                        self.end_session(session.session_id, f"it gave no sign of life for {self.config.idle_s:g} s")

    # -- sessions

    def begin_session(self) -> str:
        """Begin a session; return its id."""
        session_id = uuid4().hex
        self._sessions[session_id] = _Session(session_id, trio.current_time())
        return session_id

    def find_session(self, session_id: str) -> _Session:
        """Return a session, which is heard of now. Raises Refusal: 410 if it has ended, 404 if there was none."""
        found = self._sessions.get(session_id)
        if found is None:
            why = self._ended.get(session_id)
            if why is not None:
                raise Refusal(410, f"the session {session_id} has ended: {why}", code="session_ended")
            raise Refusal(404, f"there is no session {session_id!r:.100}: was the server started anew?", code="session_not_found")
        found.heard_at = trio.current_time()
        return found

    def end_session(self, session_id: str, why: str) -> None:
        """Drop a session with its models, samplers and results; saved weights stay. Does nothing without such a session."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._ended[session_id] = why
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        for training in session.models.values():
            training.scope.cancel()
        self.results.forget_session(session_id)
        for sampler in session.samplers.values():
            if sampler.model_path is None and sampler.source != BASE:
                self._start(self._engines.forget, sampler.source)
        _logger.info("the session %s has ended: %s", session_id, why)

    def find_context_length(self) -> int | None:
        """Return the most tokens of a sequence; None = there is no limit."""
        return read_limits(self._base).context_length

    # -- models in training

    def begin_model(self, request: ModelRequest) -> PendingResult:
        """Begin a model to train."""
        session = self.find_session(request.session_id)
        self._check_base_model(request.base_model)
        lora = None
        if request.wish is not None:
            try:
                lora = choose_adapters(request.wish, self._base, self.config)
            except DataError as error:
                raise Refusal(400, str(error), code="invalid_value") from None
        model_id = _name_model(request)
        answer = {"model_id": model_id, "type": "create_model"}
        return self._begin(session, request, partial(self._create, lora), answer)

    def begin_from_saved(self, request: ModelRequest, path: str, *, optimizer: bool) -> PendingResult:
        """Begin a model to train from saved weights, with the adapters that it was saved with."""
        session = self.find_session(request.session_id)
        if request.base_model is not None:
            self._check_base_model(request.base_model)
        directory = find_saved(path, self._root)
        answer = {"path": path, "model_id": _name_model(request), "type": "load_weights"}
        return self._begin(session, request, partial(self._restore, directory, optimizer), answer)

    def unload(self, model_id: str) -> PendingResult:
        """Drop a model in training; what it has saved stays."""
        training = self._find_training(model_id)
        training.scope.cancel()
        del self._sessions[training.session_id].models[model_id]
        self.results.end_running(f"{model_id}:", write_json({"error": f"the model {model_id} was unloaded", "category": "user"}))
        pending = self.results.open(f"{model_id}:unload:{uuid4().hex}", training.session_id)
        pending.finish(write_json({"model_id": model_id, "type": "unload_model"}))
        return pending

    def describe_model(self, model_id: str) -> dict[str, Any]:
        """Return what clients want to know of a model in training."""
        training = self._find_training(model_id)
        lora = None if training.model is None else training.model.lora
        name = self.config.model_name
        data = {
            "arch": str(getattr(self._base.config, "model_type", "")),
            "model_name": name,
            "tokenizer_id": self.config.tokenizer_id or name,
        }
        rank = None if lora is None else lora.rank
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model_id,
            "is_lora": lora is not None,
            "lora_rank": rank,
            "model_name": name,
        }

    @contextmanager
    def keep_turn(self, model_id: str, seq_id: int, *, spoils: bool) -> Generator[None]:
        """Let later requests of a model go on if the block, which submits this one, refuses it.

        Args:
            spoils: whether the gradient is then not whole, so that the next update is refused, too.
        """
        training = self._find_training(model_id)
        try:
            yield
        except Exception as error:
            training.queue.put(seq_id, partial(_leave_out, training, str(error) if spoils else None))
            raise

    def run_pass(self, request: PassRequest) -> PendingResult:
        """Submit a pass. Raises DataError for a loss or a setting that is not computed here, and for data that cannot be read."""
        training = self._find_training(request.model_id)
        if request.problem is not None:  # first: the name of the loss stands behind the data
            raise DataError(request.problem)
        loss, loss_fn = bind_loss(request.loss_fn, request.loss_fn_config)

        async def run(model: TrainedModel) -> Outcome:
            return write_protobuf(await trio.to_thread.run_sync(model.run_pass, request, loss, loss_fn))

        return self._submit(training, request.seq_id, run)

    def update(self, model_id: str, seq_id: int, params: AdamParams) -> PendingResult:
        """Submit an update of the weights."""

        async def run(model: TrainedModel) -> Outcome:
            return write_json({"metrics": await trio.to_thread.run_sync(model.update, params)})

        return self._submit(self._find_training(model_id), seq_id, run)

    def save_state(self, model_id: str, seq_id: int, name: str, *, overwrite: bool, user_metadata: Mapping[str, Any]) -> PendingResult:
        """Submit the saving of all state of training under a name."""
        training = self._find_training(model_id)
        path = make_path(model_id, "weights", name)

        async def run(model: TrainedModel) -> Outcome:
            await write_saved(path, self._root, model.save, model.describe(user_metadata), overwrite=overwrite)
            return write_json({"path": str(path), "type": "save_weights"})

        return self._submit(training, seq_id, run)

    def load_state(self, model_id: str, seq_id: int, path: str, *, optimizer: bool) -> PendingResult:
        """Submit the loading of a saved state into a model of the same adapters."""
        training = self._find_training(model_id)
        directory = find_saved(path, self._root)

        async def run(model: TrainedModel) -> Outcome:
            await trio.to_thread.run_sync(read_adapters_of, directory)
            await trio.to_thread.run_sync(partial(model.load, directory, optimizer=optimizer))
            return write_json({"path": path, "model_id": model_id, "type": "load_weights"})

        return self._submit(training, seq_id, run)

    def save_for_sampler(self, model_id: str, seq_id: int, name: str | None, sampler_seq: int | None) -> PendingResult:
        """Submit the saving of weights to sample from: under a name, or for one sampling client, kept in memory."""
        training = self._find_training(model_id)
        if name is not None:
            path = make_path(model_id, "sampler_weights", name)

            async def write(model: TrainedModel) -> Outcome:
                await write_saved(path, self._root, model.export, model.describe({}), overwrite=False)
                return write_json({"path": str(path), "type": "save_weights_for_sampler"})

            return self._submit(training, seq_id, write)
        if sampler_seq is None:
            raise Refusal(400, "the request has neither a path nor a sampling_session_seq_id", code="invalid_value")
        session = self.find_session(training.session_id)
        session_id = session.session_id
        sampler = Sampler(f"{session_id}:sample:{sampler_seq}", session_id, None, f"memory:{session_id}:{sampler_seq}")

        async def keep(model: TrainedModel) -> Outcome:
            weights = await trio.to_thread.run_sync(model.take_weights)
            await self._engines.add(sampler.source, weights)
            if session_id not in self._sessions:  # it has ended meanwhile
                await self._engines.forget(sampler.source)
            session.samplers[sampler.sampler_id] = sampler
            return write_json({"sampling_session_id": sampler.sampler_id, "type": "save_weights_for_sampler"})

        return self._submit(training, seq_id, keep)

    # -- samplers

    def begin_sampler(self, session_id: str, seq_id: int, *, base_model: str | None, model_path: str | None) -> str:
        """Begin a place to sample from: the base model's weights, or saved ones. Returns its id."""
        session = self.find_session(session_id)
        source = BASE
        if model_path is not None:
            path = str(parse_path(model_path, ("sampler_weights", "weights")))
            source = self._engines.name_path(path, find_saved(path, self._root))
        else:
            self._check_base_model(base_model)
        sampler = Sampler(f"{session_id}:sample:{seq_id}", session_id, model_path, source)
        session.samplers[sampler.sampler_id] = sampler
        return sampler.sampler_id

    def describe_saved(self, path: str) -> dict[str, Any]:
        """Return what clients want to know of saved weights. Raises Refusal (400, 404), CheckpointError."""
        return describe_saved(find_saved(path, self._root))

    def describe_sampler(self, sampler_id: str) -> dict[str, Any]:
        """Return what clients want to know of a sampler."""
        sampler = self._find_sampler(sampler_id)
        return {"sampler_id": sampler_id, "base_model": self.config.model_name, "model_path": sampler.model_path}

    def sample(self, request: SampleRequest) -> PendingResult:
        """Submit a request for samples. Raises Refusal: 429 if too many wait."""
        sampler = self._find_sampler(request.sampler_id)
        request_id = f"{request.sampler_id}:{request.seq_id}"
        found = self.results.find(request_id)
        if found is not None:
            return found
        if self.results.count_running() >= self.config.max_waiting:
            raise Refusal(429, f"{self.config.max_waiting} requests wait already (the setting max_waiting)", code="too_many_requests")
        ids = tuple(f"{request_id}:{k}" for k in range(request.num_samples))
        pending = self.results.open(request_id, sampler.session_id, ids)
        self._start(self._finish, pending, partial(self._sample, sampler, request))
        return pending

    def cancel_sampling(self, request_id: str) -> None:
        """Cancel a request for samples that nobody waits for any more; other requests, and those that have ended, are left alone."""
        pending = self.results.find(request_id)
        if pending is not None and pending.sequence_ids and pending.outcome is None:
            pending.scope.cancel()
            pending.finish(write_json({"error": "the client has cancelled this request", "category": "user"}))

    async def _sample(self, sampler: Sampler, request: SampleRequest) -> Outcome:
        found: dict[int, Completion] = {}
        # a request without a seed has one of its own, the same in each run of the same client against the same server
        keys = tuple(int.from_bytes(text.encode(), "big") for text in (sampler.sampler_id.partition(":")[2], str(request.seq_id)))
        seed = derive_seed(self.config.seed, *keys) if request.params.seed is None else request.params.seed

        async def generate(engine: InProcessEngine, number: int) -> None:
            params = request.params.new(seed=derive_seed(seed, number))
            name = f"{request.sampler_id}:{request.seq_id:012d}:{number:06d}"
            found[number] = await engine.generate(request.prompt, params, request_id=name)

        async with self._engines.use(sampler.source) as engine:
            with raise_single_errors():
                async with trio.open_nursery() as nursery:
                    for number in range(request.num_samples):
                        nursery.start_soon(generate, engine, number)
            scores = None
            if request.num_scored is not None:
                scores = np.full(len(request.prompt), np.nan, dtype=np.float32)
                if request.num_scored:
                    first = len(request.prompt) - request.num_scored
                    scores[first:] = await engine.recompute_output_log_probs(request.prompt, first)
        return write_protobuf(write_samples([found[k] for k in range(request.num_samples)], scores))

    # -- parts

    def _check_base_model(self, name: str | None) -> None:
        if name != self.config.model_name:
            raise Refusal(
                400,
                f"base_model is {name!r:.200}, but this server has one model, {self.config.model_name!r}: ask for that one, or start the "
                "server with --name, or for another model",
                param="base_model",
                code="model_not_found",
            )

    def _find_training(self, model_id: str) -> Training:
        session = self.find_session(model_id.partition(":")[0])
        found = session.models.get(model_id)
        if found is None:
            raise Refusal(404, f"there is no model {model_id!r:.200} in training", param="model_id", code="model_not_found")
        return found

    def _find_sampler(self, sampler_id: str) -> Sampler:
        found = self.find_session(sampler_id.partition(":")[0]).samplers.get(sampler_id)
        if found is None:
            raise Refusal(404, f"there is no sampling session {sampler_id!r:.200}", code="sampler_not_found")
        return found

    def _begin(
        self, session: _Session, request: ModelRequest, create: Callable[[], TrainedModel], answer: Mapping[str, Any]
    ) -> PendingResult:
        """Begin a model whose first job makes it. Raises Refusal (400) if there are too many."""
        model_id = _name_model(request)
        found = self.results.find(f"{model_id}:0")
        if found is not None:
            return found
        alive = [training.model_id for one in self._sessions.values() for training in one.models.values()]
        if len(alive) >= self.config.max_models:
            raise Refusal(
                400,
                f"this server trains {self.config.max_models} models at a time (its setting max_models), and has {', '.join(alive)}: close "
                f"the clients of those that are done (ServiceClient.close; a killed one is dropped after {self.config.idle_s:g} s), or "
                "start the server with a larger --max-models",
                code="too_many_models",
            )
        training = session.models[model_id] = Training(model_id, session.session_id, request)
        pending = self.results.open(f"{model_id}:0", session.session_id)
        self._start(self._train, training, pending, create, answer)
        return pending

    def _create(self, lora: LoRAConfig | None) -> TrainedModel:
        return create_trained_model(self._base, self._tokenizer, lora, self.config)

    def _restore(self, directory: Path, optimizer: bool) -> TrainedModel:
        model = self._create(read_adapters_of(directory))
        model.load(directory, optimizer=optimizer)
        return model

    async def _train(
        self, training: Training, pending: PendingResult, create: Callable[[], TrainedModel], answer: Mapping[str, Any]
    ) -> None:
        """Make a model, then run its jobs in the order of their numbers, until it is dropped."""
        with training.scope:
            try:
                training.model = await trio.to_thread.run_sync(create)
            except Exception as error:
                error.add_note(f"raised when {training.model_id} was made")
                session = self._sessions.get(training.session_id)  # None = it ended meanwhile
                if session is not None:
                    session.models.pop(training.model_id, None)
                pending.finish(failure := write_failure(error))
                self.results.end_running(f"{training.model_id}:", failure)  # requests that did not wait for it
                return
            pending.finish(write_json(answer))
            await training.run(self.config.idle_s)

    def _submit(self, training: Training, seq_id: int, run: Callable[[TrainedModel], Awaitable[Outcome]]) -> PendingResult:
        """Submit a job of a model under its number; a number that was submitted before gets the same result."""
        if seq_id < 1:
            raise Refusal(400, f"seq_id is {seq_id}, expected a number from 1 on", param="seq_id", code="invalid_value")
        request_id = f"{training.model_id}:{seq_id}"
        found = self.results.find(request_id)
        if found is not None:
            return found
        if training.queue.is_taken(seq_id):
            message = f"request {seq_id} of {training.model_id} was answered before: it was refused, or its result is kept no longer"
            raise Refusal(400, message, param="seq_id", code="invalid_value")
        pending = self.results.open(request_id, training.session_id)

        async def work() -> Outcome:
            assert training.model is not None, f"{training.model_id} has jobs before it is made"
            return await run(training.model)

        training.queue.put(seq_id, partial(self._finish, pending, work))
        return pending

    async def _finish(self, pending: PendingResult, work: Callable[[], Awaitable[Outcome]]) -> None:
        """Do the work of a request, whatever its end."""
        with pending.scope:
            try:
                pending.finish(await work())
            except Exception as error:
                error.add_note(f"raised in the request {pending.request_id}")
                pending.finish(write_failure(error))

    def _start(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        assert self._nursery is not None, "the service does not run"
        self._nursery.start_soon(function, *args)


def _name_model(request: ModelRequest) -> str:
    """Return the id that a client expects of a model."""
    return f"{request.session_id}:train:{request.model_seq_id}"


async def _leave_out(training: Training, reason: str | None) -> None:
    """Take the turn of a request that was refused; a reason means that the gradient is not whole without it."""
    if reason is not None:
        training.note_failure(f"a forward_backward of this step failed: {reason[:500]}")
