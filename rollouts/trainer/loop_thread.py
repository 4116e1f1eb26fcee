"""LoopThread: one trio loop in a thread of its own, which holds an async context manager open between blocking calls.

It is for the outermost program alone, and refuses to work inside a trio loop, which it would stop.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar, cast

import trio

from rollouts.errors import BlockingCallError, raise_single_errors

T = TypeVar("T")
R = TypeVar("R")


def is_in_trio() -> bool:
    """Whether this thread runs a trio loop."""
    try:
        trio.lowlevel.current_trio_token()
    except RuntimeError:
        return False
    return True


def refuse_in_trio(call: str, instead: str) -> None:
    """Raise BlockingCallError inside a trio loop.

    Args:
        call: the call that blocks, for example "PPOTrainer.fit()".
        instead: code that awaits instead.
    """
    if is_in_trio():
        raise BlockingCallError(f"{call} waits for its result, which would stop the trio loop that it is called in: write `{instead}`")


def wait_for(event: threading.Event) -> None:
    """Wait for an event so that Ctrl-C is raised within a second, also where a wait without a timeout cannot be interrupted (Windows)."""
    while not event.wait(timeout=1.0):
        pass


class _Call:
    """One call: its result or its error, once it has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.has_result = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.scope = trio.CancelScope()

    async def run(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        """Run to the end; errors are the caller's."""
        try:
            with self.scope:
                self.result = await function(*arguments)
                self.has_result = True
        except Exception as error:
            self.set_error(error)
        finally:
            self.ended.set()

    def set_error(self, error: BaseException) -> None:
        """Keep the error for the caller."""
        self.error = error


class LoopThread(Generic[T]):
    """Holder of an open async context manager. Calls of several threads run beside each other."""

    def __init__(self, opened: AbstractAsyncContextManager[T], what: str, instead: str) -> None:
        """Open the context manager. Raises its errors, and BlockingCallError inside a trio loop.

        Args:
            opened: entered and left in the thread.
            what: name of the object for messages, for example "PPOTrainer".
            instead: code that opens the same inside a trio loop.
        """
        self._what, self._instead = what, instead
        refuse_in_trio(f"{what}(...)", instead)
        self._opened = opened
        self._begun, self._value = threading.Event(), cast("T | None", None)
        self._failure: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stop: trio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)  # at the end of a program that does not close it,
        # supervisors of launched servers see that the process ends, and stop them
        self._thread.start()
        try:
            wait_for(self._begun)
        except BaseException:  # Ctrl-C
            self._interrupt_start()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def value(self) -> T:
        """Value of the context manager. Raises BlockingCallError once it is closed."""
        if self._value is None:
            raise self._closed_error()
        return self._value

    def call(self, name: str, function: Callable[..., Awaitable[R]], *arguments: Any) -> R:
        """Run an async function in the loop and wait for its result. Ctrl-C cancels it.

        Args:
            name: name of the call for messages.

        Raises: the function's errors; BlockingCallError inside a trio loop, and once it is closed; the error that ended the context manager
            during the call, such as that of a server that died.
        """
        refuse_in_trio(f"{self._what}.{name}", self._instead)
        call = _Call()
        token = self._token
        if token is None or self._stop is None:
            raise self._closed_error()
        try:
            token.run_sync_soon(self._begin, call, function, arguments)
        except trio.RunFinishedError:
            raise self._closed_error() from self._failure
        try:
            wait_for(call.ended)
        except BaseException:  # Ctrl-C: the call ends in a consistent state before it is raised
            token.run_sync_soon(call.scope.cancel)
            wait_for(call.ended)
            raise
        if call.error is not None:
            raise call.error
        if not call.has_result:
            self._thread.join()
            raise self._failure or self._closed_error()
        return cast("R", call.result)

    def close(self) -> None:
        """Close the context manager and end the thread; does nothing a second time. Calls under way are cancelled."""
        if not self._thread.is_alive() and self._value is None:
            return
        refuse_in_trio(f"{self._what}.close()", self._instead)
        if self._thread.is_alive() and self._token is not None and self._stop is not None:
            with suppress(trio.RunFinishedError):  # it ends by itself
                self._token.run_sync_soon(self._stop.set)
        self._thread.join()
        failure, self._failure, self._value = self._failure, None, None
        if failure is not None:
            raise failure

    # -- in the thread

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # the next call, or close(), raises it
            self.set_error(error)
        finally:
            self._nursery = None
            self._begun.set()

    def set_error(self, error: BaseException) -> None:
        """Keep the error that ended the loop for the next call, or for close()."""
        self._failure = error

    async def _serve(self) -> None:
        self._token, self._stop = trio.lowlevel.current_trio_token(), trio.Event()
        with raise_single_errors():
            async with self._opened as value, trio.open_nursery() as nursery:
                self._value, self._nursery = value, nursery
                self._begun.set()
                await self._stop.wait()
                self._nursery = None  # calls from now on are refused
                nursery.cancel_scope.cancel()

    def _begin(self, call: _Call, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            call.ended.set()
            return
        self._nursery.start_soon(call.run, function, arguments)

    def _interrupt_start(self) -> None:
        """Stop a context manager that is being opened as soon as it is open."""
        if self._token is not None and self._stop is not None:
            self._token.run_sync_soon(self._stop.set)

    def _closed_error(self) -> BlockingCallError:
        return BlockingCallError(f"this {self._what} was closed: create another one")
