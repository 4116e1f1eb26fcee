"""Causes of an inference server's end, found in its log and exit status by pure functions, and a reader of the log's end."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 30
TAIL_BYTES = 65536
MAX_ERRORS = 5

_EXCEPTION = re.compile(r"(?:(?<=\s)|^)[\w.]*(?:Error|Exception): .*")
_WARNING = re.compile(r"\bWARN(ING)?\b")

PORT_TAKEN = "the port is in use by another process: leave the port open (None) to have a free one chosen, or name another"

CAUSES = (
    (r"address already in use|EADDRINUSE|errno 98\b|port \S+ is (already )?(in use|not available|unavailable|occupied)", PORT_TAKEN),
    (
        r"unrecognized arguments?|invalid choice:|expected (one|at least one) argument|arguments are required|ambiguous option"
        r"|argument -\S+: invalid",
        "an argument that this version of the server does not know or take: see extra_args",
    ),
    (r"No module named '?(vllm|sglang)\b", "the server is not installed in this Python: name the Python of its own environment"),
    (
        r"No available memory for the cache|larger than the available KV cache memory|(increase|raise) --mem-fraction-static",
        "no room for the cache beside the weights: raise memory_fraction, or lower context_length",
    ),
    (
        r"out of memory|OutOfMemoryError|Cannot allocate memory|MemoryError"
        r"|less than desired \w+ memory utilization|less than requested memory|insufficient memory|exit code: -9\b",
        "not enough memory: lower memory_fraction, context_length or max_num_seqs, or see what else runs on the device",
    ),
    (
        r"Found no NVIDIA driver|No CUDA GPUs are available|CUDA driver version is insufficient"
        r"|not compiled with CUDA|_cuda_setDevice|libcuda\.so|libcudart|Failed to infer device type|CUDA is not available"
        r"|no CUDA-capable device|Invalid device id",
        "no usable CUDA device: set device to cpu where the server is a build for CPUs, else look at the driver and CUDA_VISIBLE_DEVICES",
    ),
    (r"greater than the derived (max_model_len|context_length)", "context_length is longer than the model allows: lower it"),
    (
        r"does not appear to have a file named|Repo id must be|Invalid repository ID|Can't load (the )?config|not a valid model identifier"
        r"|is not a local folder|Incorrect path_or_model_id|couldn't connect to 'https://huggingface|outgoing traffic has been disabled"
        r"|No such file or directory: '[^']*config\.json|Should have a `model_type` key|Cannot find any model weights"
        r"|LocalEntryNotFoundError|HFValidationError",
        "the model path is wrong: it must be a Hugging Face directory with config.json and weights, as the server's process sees it",
    ),
)
"""(pattern in the last lines of a log, explanation), the surest first."""


def find_cause(log: str) -> str | None:
    """Return the explanation of a known cause in a log, with the remedy; None if there is none."""
    return next((hint for pattern, hint in CAUSES if re.search(pattern, log, re.IGNORECASE)), None)


def describe_status(status: int | None) -> str:
    """Describe the end of a process in words.

    Args:
        status: exit status, negative for the signal that killed it, None if unknown.
    """
    if status is None:
        return "ended with an unknown exit status"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {int(s) for s in signal.Signals} else "unknown"
    return f"was killed by signal {-status} ({name})"


def find_errors(lines: Sequence[str]) -> list[str]:
    """Return the exceptions in a log, each once and without the log's prefixes; the first is the root of the others."""
    found = [match[0].strip() for line in lines if not _WARNING.search(line) and (match := _EXCEPTION.search(line))]
    return list(dict.fromkeys(found))


def describe_log(log: str, path: Path, status: int | None = None) -> str:
    """Describe a server's end by its log, as the end of a message: a known cause, the first exceptions, the last lines.

    Args:
        status: exit status of the server's process, as for describe_status.
    """
    cause = find_cause(log)
    if cause is None and status == -signal.SIGKILL and "kill_process_tree" not in log:  # SGLang kills itself with it
        cause = "something else killed it, as the kernel does when the machine's memory runs out: see its messages (dmesg)"
    hint = f"Probably {cause}.\n" if cause else ""
    lines = log.splitlines()
    if not any(line.strip() for line in lines):
        return f"{hint}Its log {path} is empty."
    before = find_errors(lines[:-TAIL_LINES])[:MAX_ERRORS]
    errors = "".join(["Exceptions:\n", *(f"    {line}\n" for line in before)]) if before else ""
    return f"{hint}{errors}The last lines of {path}:\n" + "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def clean_log(content: bytes) -> str:
    """Return text without colors, and with the last state of each progress bar only."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", content.decode(errors="replace"))
    return "\n".join(line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))


def read_log(path: Path, start: int) -> str:
    """Return the end of a log, at most TAIL_BYTES.

    Args:
        start: first byte of interest.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            return clean_log(file.read())
    except OSError:
        return ""  # removed or unreadable: only the exit status is known
