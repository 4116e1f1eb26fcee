"""Quiet end of commands whose stdout is closed by its reader, as in `--help | head`."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def ignore_closed_stdout() -> Generator[None]:
    """Leave the block without an error if the reader of stdout has closed it; further output is discarded.

    Flushes stdout at the end of the block, as the flush at exit of the interpreter would print the error.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
