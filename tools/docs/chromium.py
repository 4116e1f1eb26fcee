"""Chromium without a window, driven over a pair of pipes by its DevTools protocol: pages are opened, waited for, asked and pictured.

It needs the program chromium and no package. Pages are waited for by a condition in them, however long the machine takes.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--hide-scrollbars")


class Page:
    """A page of a Chromium that open_chromium started."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._count, self._session = send, receive, b"", 0, ""
        self.console: list[str] = []  # messages and errors since the page was opened
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = str(self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1.0, dark: bool = False) -> None:
        """Set the size of the window in CSS pixels, whether it is a phone's, pixels per CSS pixel, and the preferred colours."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self._call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str, *, until: str, timeout_s: float = 60.0) -> None:
        """Load an address anew and wait until a JavaScript expression is true. Raises TimeoutError with the expression."""
        self._call("Page.navigate", url="about:blank")  # an address that differs in its part behind # alone would not be loaded anew
        self.wait("location.href === 'about:blank'", timeout_s=timeout_s)
        self.console.clear()
        self._call("Page.navigate", url=address)
        self.wait(f"location.href !== 'about:blank' && document.readyState === 'complete' && ({until})", timeout_s=timeout_s)

    def wait(self, condition: str, *, timeout_s: float = 60.0) -> None:
        """Wait until a JavaScript expression is true. Raises TimeoutError with the expression."""
        end = time.monotonic() + timeout_s
        while not self.ask(f"Boolean({condition})", missing=False):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} is not true after {timeout_s:g} s; console: {self.console}")
            time.sleep(0.02)

    def ask(self, expression: str, *, missing: Any = None) -> Any:
        """Return the value of a JavaScript expression, waiting for a promise; `missing` if it raises."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return missing if "exceptionDetails" in answer else answer["result"].get("value")

    def take_picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def press(self, key: str) -> None:
        """Press and release a key, for example j or ArrowRight."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        os.write(self._send, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return cast("dict[str, Any]", found["result"])
            self._note(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._receive, 1 << 20)
            if not data:
                raise RuntimeError("chromium has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return cast("dict[str, Any]", json.loads(message))

    def _note(self, event: Mapping[str, Any]) -> None:
        """Keep messages of the console, and errors that nobody caught."""
        method, told = event.get("method"), cast("Mapping[str, Any]", event.get("params", {}))
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(argument.get("value", argument.get("description"))) for argument in told["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(told["exceptionDetails"].get("exception", {}).get("description", told["exceptionDetails"]["text"])))
        elif method == "Log.entryAdded":
            self.console.append(str(told["entry"]["text"]))


@contextmanager
def open_chromium() -> Generator[Page]:
    """Start Chromium with a profile of its own, and end it with the block."""
    to_child, from_child = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_child[0], from_child[1])]  # above the numbers 3 and 4
    os.close(to_child[0])
    os.close(from_child[1])

    def take_pipes() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["chromium", *_FLAGS, f"--user-data-dir={profile}"]
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=take_pipes, start_new_session=True, **quiet)
        for end in theirs:
            os.close(end)
        try:
            yield Page(to_child[1], from_child[0])
        finally:
            child.kill()
            child.wait()
            os.close(to_child[1])
            os.close(from_child[0])
