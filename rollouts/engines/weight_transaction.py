"""Replace the weights of an inference server so that it cannot lie: pause, load, label, read back, resume.

Whatever goes wrong between pause and resume, requests go on only when it is known again which weights the server has: the directory that
it had before is loaded once more, and if that fails as well the engine fails its requests until an update succeeds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from rollouts.engines.checkpoint_check import Fingerprint, read_fingerprint
from rollouts.engines.http_engine import RequestsInFlight, label_of
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout


@dataclass(frozen=True)
class ServerControls:
    """What an update needs of a server. Each raises EngineError, and may be done twice."""

    pause: Callable[[], Awaitable[None]]  # afterwards nothing runs, and no cache of the old weights is left
    load: Callable[[Path, str], Awaitable[None]]  # (directory, label of its weights)
    set_label: Callable[[str], Awaitable[None]]
    read_label: Callable[[], Awaitable[str]]
    resume: Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class ServedDirectory:
    """Weights that a server can be given again."""

    path: Path
    label: str
    fingerprint: Fingerprint | None = None  # None = not looked at


class WeightTransaction:
    """The weights of one server: updates one at a time, pauses, and the directory to go back to."""

    def __init__(
        self, requests: RequestsInFlight, controls: ServerControls, *, served: ServedDirectory | None, cleanup_s: float = 60.0
    ) -> None:
        """
        Args:
            requests: of the engine; held while an update runs.
            served: what the server has now; None = unknown, or in no directory.
            cleanup_s: most time for going back and resuming where an update failed or was cancelled.
        """
        self._name = requests.name
        self._requests = requests
        self._controls = controls
        self._served = served
        self._cleanup_s = cleanup_s
        self._lock = trio.Lock()
        self._is_paused = False  # by the user

    async def load_directory(self, path: Path, version: int, fingerprint: Fingerprint) -> Mapping[str, Any]:
        """Let the server load a directory that was checked. Raises EngineError, which says what the server has now."""
        label = label_of(version)
        served = ServedDirectory(path, label, fingerprint)
        return await self._replace(lambda: self._controls.load(path, label), version, f"the weights in {path}", served)

    async def load_with(self, load: Callable[[], Awaitable[None]], version: int) -> Mapping[str, Any]:
        """Let `load` bring weights to the server in another way. No directory holds them, so a later failure cannot be undone."""
        return await self._replace(load, version, f"weight version {version}", None)

    async def pause(self) -> None:
        """Stop generating until resume(); requests that come wait."""
        async with self._lock:
            if self._is_paused:
                return
            self._requests.close_gate()
            try:
                await self._controls.pause()
                self._is_paused = True
            finally:
                if not self._is_paused:
                    self._requests.open_gate()

    async def resume(self) -> None:
        """Undo pause(). Without one before, for a server that another client left paused: its weights are then taken as they are."""
        async with self._lock:
            await self._controls.resume()
            self._requests.mark_usable()
            if self._is_paused:
                self._is_paused = False
                self._requests.open_gate()

    async def _replace(
        self, load: Callable[[], Awaitable[None]], version: int, what: str, served: ServedDirectory | None
    ) -> Mapping[str, Any]:
        seconds: dict[str, float] = {}
        is_loading = is_confirmed = False
        failure, state = None, ""
        async with self._lock:
            with self._requests.hold():
                try:
                    await _timed(seconds, "pause_s", self._controls.pause)
                    is_loading = True
                    await _timed(seconds, "load_s", load)
                    await _timed(seconds, "confirm_s", lambda: self._confirm(label_of(version)))
                    is_confirmed = True
                except EngineError as error:
                    failure = error
                finally:
                    if not is_confirmed:  # failed or cancelled
                        state = await self._go_back(is_loading)
                if failure is not None:
                    raise EngineError(f"{self._name} did not take {what}: {failure}. {state}") from failure
                self._served = served
                self._requests.initial_version = None
                self._requests.mark_usable()
                await _timed(seconds, "resume_s", self._resume)
        return {"success": True, "weight_version": version, **seconds}

    async def _confirm(self, label: str) -> None:
        await self._controls.set_label(label)
        found = await self._controls.read_label()
        if found != label:
            raise EngineProtocolError(f"its weights were labelled {label!r}, but it reports {found!r}: another program updates this server")

    async def _resume(self) -> None:
        """Resume, unless the user paused. Not cancellable but bounded: a server that stays paused answers nobody."""
        if self._is_paused:
            return
        with trio.CancelScope(shield=True):
            try:
                with _raise_timeout(self._cleanup_s):
                    await self._controls.resume()
            except EngineError as error:
                self._requests.mark_unusable(f"after a weight update the server could not be resumed and may still be paused ({error})")
                raise

    async def _go_back(self, is_loading: bool) -> str:
        """Give the server the weights that it had. Returns what became of it, as a sentence. Not cancellable but bounded."""
        with trio.CancelScope(shield=True):
            try:
                with _raise_timeout(self._cleanup_s):
                    if is_loading:
                        await self._restore()
                    await self._resume()
            except EngineError as error:
                self._requests.mark_unusable(
                    f"an update of its weights failed half-way, and it could not be given those it had before ({error}). It is left paused"
                )
                return f"It could not be given the weights that it had before either ({error}): restart it, then sync the weights"
        return "It goes on with the weights that it had before"

    async def _restore(self) -> None:
        served = self._served
        if served is None:
            raise EngineError("they are in no directory that this engine knows")
        if served.fingerprint is not None:
            found = await trio.to_thread.run_sync(read_fingerprint, served.path)
            if found != served.fingerprint:
                raise EngineError(f"{served.path} holds other files now")
        await self._controls.load(served.path, served.label)
        await self._confirm(served.label)


async def _timed(seconds: dict[str, float], name: str, step: Callable[[], Awaitable[None]]) -> None:
    start = trio.current_time()
    await step()
    seconds[name] = trio.current_time() - start


@contextmanager
def _raise_timeout(seconds: float) -> Generator[None]:
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError as error:
        raise EngineTimeout(f"it took longer than {seconds:g} s") from error
