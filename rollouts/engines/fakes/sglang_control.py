"""The engine of the fake SGLang as its HTTP side sees it, and the routes by which a trainer controls it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import trio

from rollouts.engines.fakes.models import FakeModel, LoadError, fuse_name
from rollouts.engines.fakes.scheduler import Scheduler, Sequence_
from rollouts.engines.fakes.server import Answer, Request, Response, ServerDied, json_response
from rollouts.engines.fakes.sglang_payloads import read_json, refuse, refuse_body
from rollouts.engines.fakes.tensor_payloads import read_named_tensors

Route: TypeAlias = Callable[[Request], Awaitable[Answer]]

FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be "
    "performed.)\n"
)
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or finish them, then call "
    "/flush_cache."
)


class SGLangCore:
    """What there is one of in the server: scheduler, weights, pause, the lock between generations and updates, the update session."""

    def __init__(
        self,
        model: FakeModel,
        scheduler: Scheduler,
        *,
        seconds_per_update: float,
        poll_s: float,
        update_race: bool,
        model_path: str | None,
    ) -> None:
        """See FakeSGLangServer."""
        self.model = model
        self.scheduler = scheduler
        self.model_path = model.path if model_path is None else model_path
        self.tokenizer_path = self.model_path
        self.label = "default"  # of the HTTP side; the scheduler has its own, which tokens are stamped with
        self.is_paused = False
        self.scheduler_is_paused = False
        self.session_is_open = False
        self.update_race = update_race
        self.groups: set[str] = set()
        self._seconds_per_update, self._poll_s = seconds_per_update, poll_s
        self._pause_lock = trio.Lock()
        self._continued = trio.Event()
        self._continued.set()
        self._num_in_flight = 0
        self._num_writers = 0
        self._changed = trio.Event()
        self._states: dict[str, bool] = {}  # request id -> whether its abort was passed on

    @contextmanager
    def register(self, sequences: Sequence[Sequence_]) -> Generator[None]:
        """Make requests known to aborts. Raises Refused if an id is in use."""
        for sequence in sequences:
            if sequence.rid in self._states:
                raise refuse(f"Duplicate request ID detected: {sequence.rid}")
        rids = [sequence.rid for sequence in sequences]
        self._states.update(dict.fromkeys(rids, False))
        try:
            yield
        finally:
            for rid in rids:
                del self._states[rid]

    async def wait_until_continued(self) -> None:
        """Until the server is not paused."""
        while self.is_paused:
            await self._continued.wait()

    @asynccontextmanager
    async def in_flight(self) -> AsyncGenerator[None]:
        """A generation: waits for updates that are running or waiting themselves."""
        while self._num_writers:
            await self._changed.wait()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self._tell()

    @asynccontextmanager
    async def update(self) -> AsyncGenerator[bool]:
        """A weight update: at once where paused, else behind all generations. Gives whether it had to wait for some."""
        async with self._pause_lock:
            is_paused = self.is_paused
        had_to_wait = False
        self._num_writers += not is_paused
        try:
            while not is_paused and self._num_in_flight:
                had_to_wait = True
                await self._changed.wait()
            await trio.sleep(self._seconds_per_update)
            yield had_to_wait
        finally:
            self._num_writers -= not is_paused
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def abort(self, rid: str) -> None:
        """All requests whose id begins with that of a known one. A second abort of the same id does nothing."""
        if self._states.get(rid) is not False:
            return
        self._states[rid] = True
        self.scheduler.abort([s for s in self.scheduler.sequences if s.rid.startswith(rid)])

    def abort_all(self) -> None:
        """Everything that has reached the scheduler."""
        self.scheduler.abort(tuple(self.scheduler.sequences))

    async def pause(self, mode: str) -> None:
        """abort: until all have answered. retract: back to the queue. in_place: as they stand."""
        async with self._pause_lock:
            self.is_paused = True
            self._continued = trio.Event()
            if mode == "abort":
                while True:
                    self.abort_all()
                    if not self._num_in_flight and not self._num_writers:
                        return
                    await trio.sleep(self._poll_s)
            self.scheduler_is_paused = True
            self.scheduler.freeze()
            if mode == "retract":
                self.scheduler.retract()

    async def resume(self) -> None:
        """Go on. Waits as long as a pause is being carried out."""
        async with self._pause_lock:
            self.is_paused = self.scheduler_is_paused = False
            self._continued.set()
            self.scheduler.thaw()

    def flush(self) -> bool:
        """Forget the prefix cache, unless requests need it. Paused, those that wait do not."""
        scheduler = self.scheduler
        if scheduler.running or (scheduler.waiting and not self.scheduler_is_paused):
            return False
        scheduler.cache.reset()
        return True

    async def load(self, apply: Callable[[], None], body: Mapping[str, Any], success: str) -> tuple[bool, str]:
        """Carry out one update. Returns success and message; the weights may be new although it is no success."""
        version = body.get("weight_version")
        async with self.update() as had_to_wait:
            apply()
            if version is not None:
                self.scheduler.label = version
            if body.get("flush_cache", True) and ((had_to_wait and self.update_race) or not self.flush()):
                return False, NOT_FLUSHED
            if version is not None:
                self.label = version
                success += f" Weight version updated to {version}."
            return True, success


class SGLangControl:
    """Every route but those of generation and health."""

    def __init__(self, core: SGLangCore, server_info: Callable[[], Mapping[str, Any]], *, has_tokenizer: bool) -> None:
        """
        Args:
            server_info: the body of /server_info.
            has_tokenizer: whether the server has one.
        """
        self._core = core
        self._server_info = server_info
        self._has_tokenizer = has_tokenizer

    def routes(self) -> dict[str, dict[str, Route]]:
        """Path -> method -> handler."""
        return {
            "/abort_request": {"POST": self._abort},
            "/pause_generation": {"POST": self._pause},
            "/continue_generation": {"POST": self._continue},
            "/flush_cache": {"POST": self._flush, "GET": self._flush},
            "/update_weights_from_disk": {"POST": self._update_from_disk},
            "/begin_weight_update": {"POST": self._begin},
            "/end_weight_update": {"POST": self._end},
            "/update_weights_from_tensor": {"POST": self._update_from_tensor},
            "/update_weight_version": {"POST": self._update_version},
            "/weights_checker": {"POST": self._check_weights},
            "/get_weights_by_name": {"POST": self._get_weights, "GET": self._get_weights},
            "/release_memory_occupation": {"POST": self._release_memory},
            "/resume_memory_occupation": {"POST": self._release_memory},
            "/model_info": {"GET": self._get_model_info},
            "/get_model_info": {"GET": self._get_model_info},
            "/server_info": {"GET": self._get_server_info},
            "/get_server_info": {"GET": self._get_server_info},
        }

    async def _abort(self, request: Request) -> Answer:
        body = read_json(request)
        if body.get("abort_all"):
            self._core.abort_all()
        elif body.get("rid"):
            self._core.abort(body["rid"])
        return Response(200, content_type=None)

    async def _pause(self, request: Request) -> Answer:
        mode = read_json(request).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            message = "Input should be 'abort', 'retract' or 'in_place'"
            raise refuse_body("literal_error", "('body', 'PauseGenerationReqInput', 'mode')", message, mode, request)
        await self._core.pause(mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Answer:
        read_json(request)
        await self._core.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Answer:
        timeout_s = float(request.query.get("timeout", "0"))
        if timeout_s > 0:
            with trio.move_on_after(timeout_s) as scope:
                await self._core.scheduler.wait_until_idle()
            if scope.cancelled_caught:
                return Response(400, b"Timed out waiting for idle state.", None)
        return Response(200, FLUSHED.encode(), None) if self._core.flush() else Response(400, b"Flush cache failed.\n", None)

    async def _update_from_disk(self, request: Request) -> Answer:
        body = read_json(request, ["model_path"])
        core, path = self._core, body["model_path"]
        if body.get("abort_all_requests"):
            core.abort_all()
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise ServerDied(f"unknown load format {body['load_format']}")

        def apply() -> None:
            try:
                core.model.load(Path(path))
            except LoadError as error:
                if error.kind in ("damaged", "shape"):
                    raise ServerDied(str(error)) from error
                raise

        try:
            is_success, message = await core.load(apply, body, "Succeeded to update model weights.")
        except LoadError as error:
            reason = str(error)
            if error.kind == "missing":
                reason = f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. Use `repo_type` argument if needed."
            is_success, message = False, f"Failed to get weights iterator: {reason}."
        if is_success:
            core.model_path = path
        return _report(is_success, message, num_paused_requests=0)

    async def _begin(self, request: Request) -> Answer:
        read_json(request)
        async with self._core.update():
            if self._core.session_is_open:
                return _report(False, "a weight-update session is already open; call end_weight_update() first")
            self._core.session_is_open = True
        return _report(True, "Success")

    async def _end(self, request: Request) -> Answer:
        read_json(request)
        async with self._core.update():
            if not self._core.session_is_open:
                return _report(False, "no weight-update session is open; call begin_weight_update() first")
            self._core.session_is_open = False
        return _report(True, "Success")

    async def _update_from_tensor(self, request: Request) -> Answer:
        body = read_json(request, ["serialized_named_tensors"])
        core = self._core
        if body.get("abort_all_requests"):
            core.abort_all()
        if not core.session_is_open:
            return _report(False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")

        def apply() -> None:
            try:
                core.model.load_tensors(read_named_tensors(body["serialized_named_tensors"][0]))
            except LoadError as error:
                raise ServerDied(str(error)) from error

        return _report(*await core.load(apply, body, "Success"))

    async def _update_version(self, request: Request) -> Answer:
        body = read_json(request, ["new_version"])
        if body.get("abort_all_requests", True):
            self._core.abort_all()
        version = body["new_version"]
        self._core.label = self._core.scheduler.label = version
        return json_response({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def _check_weights(self, request: Request) -> Answer:
        read_json(request)
        digests: dict[str, Any] = {}
        for name, data in self._core.model.checksum().items():
            fused = fuse_name(name)
            digests.setdefault(fused, hashlib.sha256()).update(data)
        checksums = {name: digest.hexdigest()[:16] for name, digest in digests.items()}
        overall = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
        ranks = [{"checksums": checksums, "per_gpu_checksum": overall, "parallelism_info": [place]}]
        return json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": overall})

    async def _get_weights(self, request: Request) -> Answer:
        raise refuse("Get parameter by name failed")

    async def _release_memory(self, request: Request) -> Answer:
        if self._core.scheduler.running:
            raise ServerDied("release_memory_occupation should be called only when server is idle.")
        return json_response(None)

    async def _get_model_info(self, request: Request) -> Answer:
        return json_response(describe_model(self._core))

    async def _get_server_info(self, request: Request) -> Answer:
        return json_response(self._server_info())


def _report(is_success: bool, message: str, **fields: Any) -> Response:
    return json_response({"success": is_success, "message": message, **fields}, 200 if is_success else 400)


def describe_model(core: SGLangCore) -> dict[str, Any]:
    """The body of /model_info."""
    return {
        "model_path": core.model_path,
        "served_model_name": core.model_path,
        "tokenizer_path": core.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": core.label,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "embedding": {"family": "none", "task": "none", "execution": "none", "attention": "none", "pooling": "model_defined"},
    }
