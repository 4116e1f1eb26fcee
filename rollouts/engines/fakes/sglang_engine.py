"""The engine of the fake SGLang as its HTTP side sees it: scheduler, pause, the lock between generations and updates, versions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from rollouts.engines.fakes.models import FakeModel
from rollouts.engines.fakes.scheduler import Scheduler, Sequence_
from rollouts.engines.fakes.sglang_payloads import refuse
from rollouts.engines.fakes.weight_groups import WeightGroup

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
        self.num_races = 0  # so many of the next updates find requests that have just ended
        self.groups: dict[str, WeightGroup] = {}
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
        """A weight update: at once where paused, and then nothing else is updated, paused or continued; else behind all generations. Gives
        whether it was paused."""
        async with self._pause_lock:
            if self.is_paused:
                await trio.sleep(self._seconds_per_update)
                yield True
                return
        self._num_writers += 1
        try:
            while self._num_in_flight:
                await self._changed.wait()
            await trio.sleep(self._seconds_per_update)
            yield False
        finally:
            self._num_writers -= 1
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

    async def load(self, apply: Callable[[], Awaitable[None]], body: Mapping[str, Any], success: str) -> tuple[bool, str]:
        """Carry out one update. Returns success and message; the weights may be new although it is no success."""
        version = body.get("weight_version")
        async with self.update() as is_paused:
            await apply()
            if version is not None:
                self.scheduler.label = version
            if body.get("flush_cache", True) and (self._takes_race(is_paused) or not self.flush()):
                return False, NOT_FLUSHED
            if version is not None:
                self.label = version
                success += f" Weight version updated to {version}."
            return True, success

    def _takes_race(self, is_paused: bool) -> bool:
        if is_paused or not self.num_races:
            return False
        self.num_races -= 1
        return True


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
        "embedding": _describe_embedding(),
    }


def _describe_embedding() -> dict[str, Any]:
    """What /model_info says of a model that embeds nothing."""
    flags = "supports_dimensions supports_token_embeddings supports_multimodal requires_embedding_flag auto_enable_embedding"
    safe = "safe_disable_kv_cache safe_disable_radix_cache safe_disable_chunked_prefill enabled"
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256)]
    return {
        **dict.fromkeys(("family", "task", "execution", "attention", "postprocessor"), "none"),
        **dict.fromkeys((*flags.split(), "normalize", *safe.split()), False),
        "pooling": "model_defined",
        "tokenizer_special_tokens": "model_default",
        "bcg_eligibility": "disabled",
        "matryoshka_dimensions": [],
        "bcg": {"prefill_backend": "disabled", "enabled": False, "capture_token_budget": 4096, "capture_batch_sizes": sizes},
        "cache": {"kv_cache_disabled": False, "radix_cache_disabled": False, "chunked_prefill_disabled": False},
    }
