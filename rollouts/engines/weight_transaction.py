"""Replace the weights of an inference server so that it cannot lie: pause, load, label, read back, resume.

Whatever goes wrong between pause and resume, requests go on only when it is known again which weights the server has: the directory that
it had before is loaded once more, and if that fails as well the engine fails its requests until an update succeeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from rollouts.engines.checkpoint_check import Fingerprint, read_fingerprint
from rollouts.engines.http_engine import RequestsInFlight, label_of
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout

_CLOSE_S = 10.0  # most time for resuming a server at the end of its engine's block


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
        self,
        requests: RequestsInFlight,
        controls: ServerControls,
        *,
        version: int = 0,
        served: ServedDirectory | None,
        cleanup_s: float = 60.0,
    ) -> None:
        """
        Args:
            requests: of the engine; held while an update runs.
            version: of the weights that the server has now.
            served: what the server has now; None = unknown, or in no directory.
            cleanup_s: most time for going back, and for resuming, where an update failed or was cancelled.
        """
        self.version = version  # that was confirmed last
        self._name = requests.name
        self._requests = requests
        self._controls = controls
        self._served = served
        self._cleanup_s = cleanup_s
        self._lock = trio.Lock()
        self._is_paused = False  # by the user
        self._is_unknown = False  # which weights the server has, because an update failed half-way

    async def load_directory(self, path: Path, version: int | None, fingerprint: Fingerprint | None = None) -> Mapping[str, Any]:
        """Let the server load a directory that was checked.

        Args:
            version: None = one more than the version before, whichever update brings that.
            fingerprint: of the files that were checked; None = they are not looked at again after the load.

        Raises: EngineError, which says what the server has now.
        """

        async def load(label: str) -> None:
            await self._controls.load(path, label)
            if fingerprint is not None and await trio.to_thread.run_sync(read_fingerprint, path) != fingerprint:
                raise EngineError("its files were replaced after they had been checked: export each version to a directory of its own")

        return await self._replace(load, version, f"the weights in {path}", lambda label: ServedDirectory(path, label, fingerprint))

    async def load_with(self, load: Callable[[str], Awaitable[None]], version: int) -> Mapping[str, Any]:
        """Let `load`, given the label, bring weights to the server in another way. A later failure cannot be undone: no directory has
        them."""
        return await self._replace(load, version, f"weight version {version}", lambda label: None)

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
                if not self._is_paused:  # failed or cancelled, but the server may have paused all the same
                    with suppress(EngineError):  # which made the engine unusable
                        await self._resume()
                    self._requests.open_gate()

    async def resume(self) -> None:
        """Undo pause(). Without one before, for a server that another client left paused: its weights are then taken as they are.

        Raises: EngineError if an update failed half-way: resuming does not make its weights known.
        """
        async with self._lock:
            if not self._is_unknown:
                await self._controls.resume()
                self._requests.mark_usable()
            if self._is_paused:
                self._is_paused = False
                self._requests.open_gate()
            if self._is_unknown:
                raise EngineError(f"{self._name} is left paused: which weights it has is not known. Sync the weights")

    async def close(self) -> None:
        """Resume a server that the user left paused, which would answer nobody. Not cancellable but bounded; warns where it fails."""
        if not self._is_paused or self._is_unknown:
            return
        self._is_paused = False
        with trio.CancelScope(shield=True):
            try:
                with _raise_timeout(_CLOSE_S):
                    await self._controls.resume()
            except EngineError as error:
                warnings.warn(f"{self._name} was left paused: it could not be resumed at the end ({error})", stacklevel=2)

    def describe(self) -> str:
        """Which weights the server has, as the end of a sentence about it."""
        if self._is_unknown:
            return "has weights that are not known, and refuses to generate until a sync succeeds"
        return f"has weight version {self.version}"

    def distrust(self, reason: str) -> None:
        """Whatever it says, the server does not have the weights that it was given: fail requests until an update succeeds."""
        self._is_unknown, self._served = True, None
        self._requests.mark_unusable(reason)

    async def _replace(
        self,
        load: Callable[[str], Awaitable[None]],
        version: int | None,
        what: str,
        create_served: Callable[[str], ServedDirectory | None],
    ) -> Mapping[str, Any]:
        seconds: dict[str, float] = {}
        is_loading = is_confirmed = False
        failure, state = None, ""
        async with self._lock:
            version = self.version + 1 if version is None else version
            label = label_of(version)
            with self._requests.hold():
                try:
                    await _timed(seconds, "pause_s", self._controls.pause)
                    is_loading = True
                    await _timed(seconds, "load_s", lambda: load(label))
                    await _timed(seconds, "confirm_s", lambda: self._confirm(label))
                    is_confirmed = True
                except EngineError as error:
                    failure = error
                finally:
                    if not is_confirmed:  # failed or cancelled
                        state = await self._go_back(is_loading)
                if failure is not None:
                    raise EngineError(f"{self._name} did not take {what}: {failure}. {state}") from failure
                self._served, self.version, self._is_unknown = create_served(label), version, False
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
        """Resume, unless the user paused or nobody knows the weights. Not cancellable but bounded: a server that stays paused answers
        nobody."""
        if self._is_paused or self._is_unknown:
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
            if is_loading:
                self._is_unknown, reason = True, "it was interrupted"
                try:
                    with _raise_timeout(self._cleanup_s):
                        await self._restore()
                    self._is_unknown = False
                    self._requests.mark_usable()
                except (EngineError, OSError) as error:  # OSError: of a disk that fails while files are looked at
                    reason = str(error)
                finally:
                    if self._is_unknown:
                        self._requests.mark_unusable(
                            f"an update of its weights failed half-way, and it could not be given those it had before ({reason}). "
                            "It is left paused"
                        )
                if self._is_unknown:
                    return f"It could not be given the weights that it had before either ({reason}): restart it, then sync the weights"
            if self._is_unknown:
                return "Which weights it has is not known since an earlier update failed: restart it, then sync the weights"
            try:
                await self._resume()
            except EngineError as error:
                return f"It has the weights that it had before, but could not be resumed ({error})"
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
