"""The engine of the fake SGLang behind its HTTP side: scheduler, pause, the lock between generations and updates, versions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from rollouts.testing.servers.http import ServerDied
from rollouts.testing.servers.models import FakeModel
from rollouts.testing.servers.scheduler import Scheduler, Sequence_
from rollouts.testing.servers.sglang.payloads import refuse
from rollouts.testing.servers.sglang.settings import SGLangSettings
from rollouts.testing.servers.weight_groups import WeightGroup

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or finish them, then call "
    "/flush_cache."
)


class SGLangCore:
    """Single instances of the server: scheduler, weights, pause, the lock between generations and updates, the update session."""

    def __init__(self, model: FakeModel, scheduler: Scheduler, settings: SGLangSettings, *, seconds_per_update: float) -> None:
        """seconds_per_update: seconds that loading weights takes."""
        self.model = model
        self.scheduler = scheduler
        self.model_path = model.path if settings.model_path is None else settings.model_path
        self.tokenizer_path = self.model_path
        self.label = "default"  # label of the HTTP side; the scheduler stamps tokens with its own
        self.can_sleep, self.has_memory = settings.can_sleep, True
        self.is_paused = False
        self.scheduler_is_paused = False
        self.session_is_open = False
        self.num_races = 0  # number of next updates that find requests that have just ended
        self.groups: dict[str, WeightGroup] = {}
        self._seconds_per_update, self._poll_s = seconds_per_update, settings.poll_s
        self._pause_lock = trio.Lock()
        self._continued = trio.Event()
        self._continued.set()
        self._num_in_flight = 0
        self._num_writers = 0
        self._changed = trio.Event()
        self._states: dict[str, bool] = {}  # request id -> whether its abort was passed on

    @contextmanager
    def register(self, sequences: Sequence[Sequence_]) -> Generator[None]:
        """Register requests, so that aborts find them. Raises Refused if an id is in use."""
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
        """Wait until the server is not paused."""
        while self.is_paused:
            await self._continued.wait()

    @asynccontextmanager
    async def in_flight(self) -> AsyncGenerator[None]:
        """Hold the lock of a generation: wait for updates that run or wait themselves."""
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
        """Hold the lock of a weight update: at once if paused, and then no other update, pause or resume runs; else after all generations.
        Yields whether the server was paused."""
        if not self.has_memory:
            raise ServerDied("CUDA error: an illegal memory access was encountered")
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
        """Abort all requests whose id begins with that of a known one. A second abort of the same id does nothing."""
        if self._states.get(rid) is not False:
            return
        self._states[rid] = True
        self.scheduler.abort([s for s in self.scheduler.sequences if s.rid.startswith(rid)])

    def abort_all(self) -> None:
        """Abort all requests that have reached the scheduler."""
        self.scheduler.abort(tuple(self.scheduler.sequences))

    async def pause(self, mode: str) -> None:
        """Pause. abort: wait until all have answered. retract: move requests back to the queue. in_place: freeze them as they are."""
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
        """Resume. Waits while a pause is being carried out."""
        async with self._pause_lock:
            self.is_paused = self.scheduler_is_paused = False
            self._continued.set()
            self.scheduler.thaw()

    def flush(self) -> bool:
        """Clear the prefix cache, unless requests need it. While paused, waiting requests do not."""
        scheduler = self.scheduler
        if scheduler.running or (scheduler.waiting and not self.scheduler_is_paused):
            return False
        scheduler.cache.reset()
        return True

    async def load(self, apply: Callable[[], Awaitable[None]], body: Mapping[str, Any], success: str) -> tuple[bool, str]:
        """Carry out one update. Return success and message; the weights may be new even without success."""
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
    """Return the body of /model_info."""
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
    """Fields of /model_info for a model without embeddings."""
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
