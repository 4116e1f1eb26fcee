"""Replace the weights of an inference server so that its version is always true: pause, load, label, read back, resume.

After a failure between pause and resume, requests continue only once the server's weights are known again: its previous directory is
loaded once more, and if that fails as well the engine fails its requests until an update succeeds.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import trio

from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.http.requests import RequestsInFlight
from rollouts.engines.http.samples import label_of
from rollouts.engines.weights.checkpoint_check import Fingerprint, read_fingerprint
from rollouts.errors import EngineError, EngineProtocolError, EngineTimeout

_CLOSE_S = 10.0  # seconds for resuming a server at the end of its engine's block
_REPEATS_S = 10.0  # seconds beside a call's own deadline, for its repeats: the call's own error, with the address, comes first


class ServerControls(Protocol):
    """Operations of a server that an update needs. Each raises EngineError, and may be repeated."""

    async def pause(self) -> None:
        """Pause: afterwards no request runs, and no cache of the old weights is left."""
        ...

    async def load_directory(self, path: Path, label: str, /) -> None:
        """Load the weights in a directory, which have a label."""
        ...

    async def set_label(self, label: str) -> None:
        """Label the server's weights."""
        ...

    async def read_label(self) -> str:
        """Read the label of the server's weights."""
        ...

    async def resume(self) -> None:
        """Go on with requests."""
        ...

    async def sleep(self) -> None:
        """Release the memory of the device. Called while no request of this client runs."""
        ...

    async def wake_up(self) -> None:
        """Take the memory again."""
        ...


@dataclass(frozen=True)
class ServedDirectory:
    """Weights in a directory that a server can load again."""

    path: Path
    label: str
    fingerprint: Fingerprint | None = None  # None = not read


class WeightTransaction:
    """Weights of one server: updates one at a time, pauses, and the directory to restore."""

    def __init__(
        self,
        requests: RequestsInFlight,
        controls: ServerControls,
        *,
        deadlines: Deadlines | None = None,
        version: int = 0,
        served: ServedDirectory | None,
    ) -> None:
        """
        Args:
            requests: requests of the engine; held while an update runs.
            deadlines: sync_s bounds wake_up and restoring, control_s resume, however often repeated; None = the default ones.
            version: version of the server's current weights.
            served: directory of the server's current weights; None = unknown, or in no directory.
        """
        self.version = version  # last confirmed version
        self._name = requests.name
        self._requests = requests
        requests.note_confirmed(version)
        self._controls = controls
        self._deadlines = deadlines or Deadlines()
        self._served = served
        self._lock = trio.Lock()
        self._is_paused = False  # paused by the user
        self._is_asleep = False
        self._is_unknown = False  # the server's weights are unknown, because an update failed half-way

    async def load_directory(self, path: Path, version: int | None, fingerprint: Fingerprint | None = None) -> Mapping[str, Any]:
        """Load a checked directory on the server.

        Args:
            version: version of the weights; None = one more than the version before, whichever update brings that.
            fingerprint: fingerprint of the checked files; None = do not compare it after the load.

        Raises: EngineError, which names the server's weights.
        """

        async def load(label: str) -> None:
            await self._controls.load_directory(path, label)
            if fingerprint is not None and await trio.to_thread.run_sync(read_fingerprint, path) != fingerprint:
                raise EngineError("its files were replaced after they had been checked: export each version to a directory of its own")

        return await self._replace(load, version, f"the weights in {path}", lambda label: ServedDirectory(path, label, fingerprint))

    async def load_with(self, load: Callable[[str], Awaitable[None]], version: int) -> Mapping[str, Any]:
        """Update the server with `load`, which is given the label. A later failure cannot be undone: no directory has these weights."""
        return await self._replace(load, version, f"weight version {version}", lambda label: None)

    async def pause(self) -> None:
        """Stop generating until resume(); new requests wait."""
        async with self._lock:
            if self._is_paused:
                return
            self._requests.close_gate()
            try:
                await self._controls.pause()
                self._is_paused = True
            finally:
                if not self._is_paused:  # failed or cancelled, but the server may have paused all the same
                    with suppress(EngineError):  # a failed resume has made the engine unusable
                        await self._resume()
                    self._requests.open_gate()

    async def resume(self) -> None:
        """Undo pause(). Without a pause before, for a server that another client left paused: its weights are then taken as they are.

        Raises: EngineError if the server is asleep, or if an update failed half-way: resuming does not make its weights known.
        """
        async with self._lock:
            self._check_awake()
            if not self._is_unknown:
                await self._controls.resume()
                self._requests.mark_usable()
            if self._is_paused:
                self._is_paused = False
                self._requests.open_gate()
            if self._is_unknown:
                raise EngineError(f"{self._name} is left paused: which weights it has is not known. Sync the weights")

    async def sleep(self) -> None:
        """Let the server release the memory of its GPU until wake_up(), once it has answered all requests; new ones wait."""
        async with self._lock:
            if self._is_asleep:
                return
            self._requests.close_gate()
            try:
                await self._requests.wait_idle()
                self._is_asleep = True  # perhaps, until the answer
                await self._controls.sleep()
            except EngineError:
                await self._wake_up()
                raise
            finally:
                if not self._is_asleep:
                    self._requests.open_gate()

    async def wake_up(self) -> None:
        """Undo sleep(). Not cancellable but bounded: a server that stays asleep answers no client."""
        with trio.CancelScope(shield=True):  # the wait for the lock, too: a cancelled run wakes its servers
            async with self._lock:
                if self._is_asleep:
                    await self._wake_up()
                    self._requests.open_gate()

    async def close(self) -> None:
        """Resume and wake up a server that the user left paused or asleep, which would answer no client. Not cancellable but bounded; warns
        if it fails.
        """
        undo = [("asleep", self._controls.wake_up)] if self._is_asleep else []
        undo += [("paused", self._controls.resume)] if self._is_paused and not self._is_unknown else []
        self._is_paused = self._is_asleep = False
        for state, step in undo:
            with trio.CancelScope(shield=True):
                try:
                    with _raise_timeout(_CLOSE_S):
                        await step()
                except EngineError as error:
                    warnings.warn(f"{self._name} was left {state}: that could not be undone at the end ({error})", stacklevel=2)

    async def _wake_up(self) -> None:
        with trio.CancelScope(shield=True):
            try:
                with self._limit("sync_s"):
                    await self._controls.wake_up()
                    if self._is_paused:  # waking up has resumed it
                        await self._controls.pause()
            except EngineError as error:
                self._requests.mark_unusable(f"it was asleep, and could not be woken up ({error})")
                raise
        self._is_asleep = False
        if not self._is_unknown:
            self._requests.mark_usable()

    def _check_awake(self) -> None:
        """Raise EngineError if the server is asleep: it has no memory for weights or keys and values."""
        if self._is_asleep:
            raise EngineError(f"{self._name} is asleep: call wake_up() first")

    def describe(self) -> str:
        """Describe the server's weights, as the end of a sentence."""
        if self._is_unknown:
            return "has weights that are not known, and refuses to generate until a sync succeeds"
        return f"has weight version {self.version}"

    def distrust(self, reason: str) -> None:
        """Mark the server's weights as other than it was given, whatever it reports: fail requests until an update succeeds."""
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
            self._check_awake()
            version = self.version + 1 if version is None else version
            label = label_of(version)
            with self._requests.hold():
                try:
                    await _timed(seconds, "pause_s", self._controls.pause)
                    is_loading = True
                    self._requests.note_update(version)
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
                self._requests.note_confirmed(version)
                self._requests.mark_usable()
                await _timed(seconds, "resume_s", self._resume)
        return {"success": True, "weight_version": version, **seconds}

    async def _confirm(self, label: str) -> None:
        await self._controls.set_label(label)
        found = await self._controls.read_label()
        if found != label:
            raise EngineProtocolError(f"its weights were labelled {label!r}, but it reports {found!r}: another program updates this server")

    async def _resume(self) -> None:
        """Resume, unless the user paused or the weights are unknown. Not cancellable but bounded: a server that stays paused answers no
        client."""
        if self._is_paused or self._is_unknown:
            return
        with trio.CancelScope(shield=True):
            try:
                with self._limit("control_s"):
                    await self._controls.resume()
            except EngineError as error:
                self._requests.mark_unusable(f"after a weight update the server could not be resumed and may still be paused ({error})")
                raise

    async def _go_back(self, is_loading: bool) -> str:
        """Restore the server's previous weights. Return the outcome, as a sentence. Not cancellable but bounded."""
        with trio.CancelScope(shield=True):
            if is_loading:
                self._is_unknown, reason = True, "it was interrupted"
                try:
                    with self._limit("sync_s"):
                        await self._restore()
                    self._is_unknown = False
                    self._requests.mark_usable()
                except (EngineError, OSError) as error:  # OSError: from a disk that fails while files are read
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

    def _limit(self, deadline: Literal["sync_s", "control_s"]) -> AbstractContextManager[None]:
        """Bound a block that may not be cancelled by a deadline and a few repeats. Raises EngineTimeout, with the deadline's name."""
        deadlines = self._deadlines
        return _raise_timeout(getattr(deadlines, deadline) + _REPEATS_S, f": the server hangs, or {deadlines.name(deadline)} is too short")

    async def _restore(self) -> None:
        served = self._served
        if served is None:
            raise EngineError("they are in no directory that this engine knows")
        if served.fingerprint is not None:
            found = await trio.to_thread.run_sync(read_fingerprint, served.path)
            if found != served.fingerprint:
                raise EngineError(f"{served.path} holds other files now")
        await self._controls.load_directory(served.path, served.label)
        await self._confirm(served.label)


async def _timed(seconds: dict[str, float], name: str, step: Callable[[], Awaitable[None]]) -> None:
    start = trio.current_time()
    await step()
    seconds[name] = trio.current_time() - start


@contextmanager
def _raise_timeout(seconds: float, reason: str = "") -> Generator[None]:
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError as error:
        raise EngineTimeout(f"it took longer than {seconds:g} s{reason}") from error
