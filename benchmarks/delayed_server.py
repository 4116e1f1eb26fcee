"""A server that only delays its answers, in a process of its own, to benchmark clients.

    python -m benchmarks.delayed_server SECONDS

prints its port. It answers after SECONDS; on /spread after a random time between 0 and twice that.
"""

from __future__ import annotations

import random
import re
import resource
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import trio

ANSWER = b'{"text":"ok","tokens":[1,2,3,4,5,6,7,8]}'
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
CONTENT_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@contextmanager
def run_server(delay_s: float) -> Generator[str]:
    """Run a server for the block, and yield its address."""
    command = [sys.executable, "-m", "benchmarks.delayed_server", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def raise_open_files() -> None:
    """Raise the limit of open files to the system's maximum: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve_connection(delay_s: float, stream: trio.SocketStream) -> None:
    """Answer one request after another until the client closes the connection."""
    received = b""
    try:
        async with stream:
            while True:
                while b"\r\n\r\n" not in received:
                    data = await stream.receive_some()
                    if not data:
                        return
                    received += data
                head, _, received = received.partition(b"\r\n\r\n")
                length = CONTENT_LENGTH.search(head)
                missing = int(length[1]) if length else 0
                while len(received) < missing:
                    received += await stream.receive_some()
                received = received[missing:]
                await trio.sleep(2 * delay_s * random.random() if b" /spread " in head else delay_s)
                await stream.send_all(RESPONSE)
    except trio.BrokenResourceError:
        return


async def serve(delay_s: float) -> None:
    """Listen on a free port and print it."""
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, partial(serve_connection, delay_s), 0, host="127.0.0.1", backlog=4096))
        print(listeners[0].socket.getsockname()[1], flush=True)


if __name__ == "__main__":
    raise_open_files()
    try:
        trio.run(serve, float(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(0)
