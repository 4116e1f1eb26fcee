"""Rows of data and names of files that were damaged or made to do harm."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from random import Random

from benchmarks.reliability.experiment import Amount, Outcome
from rollouts.data.datasets import load_rl_prompts, load_sft_conversations
from rollouts.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def _cut(draw: Random) -> bytes:
    text = json.dumps(GOOD).encode()
    return text[: draw.randrange(1, len(text))]


def _bytes(draw: Random) -> bytes:
    return bytes(byte for byte in draw.randbytes(draw.randrange(1, 60)) if byte not in b"\r\n") or b"\xff"


FUZZ: dict[str, Callable[[Random], bytes]] = {
    "truncated": _cut,
    "bytes": _bytes,
    "invalid UTF-8": lambda draw: b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "NaN": lambda draw: b'{"messages": NaN}',
    "twice the same key": lambda draw: b'{"messages": 1, "messages": []}',
    "no object": lambda draw: draw.choice([b"[]", b"1", b"null", b'"a"', b"true"]),
    "role": lambda draw: json.dumps({"messages": [{"role": draw.choice(["", "User", "robot", 7, None]), "content": "a"}]}).encode(),
    "empty": lambda draw: b'{"messages": []}',
    "no content": lambda draw: json.dumps({"messages": [{"role": "user"}, {"role": "assistant", "content": None}]}).encode(),
    "surrogate": lambda draw: b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "b"}]}',
    "other types": lambda draw: json.dumps({"messages": draw.choice([{}, 3, "a", [3], [[]], [None], [{"role": []}]])}).encode(),
    "deep": lambda draw: b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "long number": lambda draw: b'{"messages": ' + b"9" * 6000 + b"}",
}
KEPT: dict[str, Callable[[Random], bytes]] = {
    "good": lambda draw: json.dumps(GOOD).encode(),
    "good, CR": lambda draw: json.dumps(GOOD).encode() + b"\r",
}


def _read_naively(lines: list[bytes]) -> int:
    """Count the rows that a naive reader takes in without a word, though they are no conversation, or at which it ends untyped."""
    count = 0
    for line in lines:
        try:
            row = json.loads(line.decode())
            count += len(row["messages"]) >= 0
        except Exception:
            count += 1
    return count


def damage_rows(amount: Amount) -> Outcome:
    """Load files of damaged rows: each stops with its file and line, and all together are counted where they are to be skipped."""
    total, draw, found = amount.count(2000, 10_000), amount.draw, Counter[str]()
    kinds = [draw.choice(list(FUZZ)) if i % 2 else draw.choice(list(KEPT)) for i in range(total)]
    lines = [(FUZZ | KEPT)[kind](draw) for kind in kinds]
    path = amount.folder / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    loaded = load_sft_conversations(path, skip_bad_rows=True)
    found["rows lost or made up"] = abs(len(loaded) + len(loaded.bad_rows) - total)
    found["good rows left out"] = abs(len(loaded) - sum(kind in KEPT for kind in kinds))
    one = amount.folder / "one.jsonl"
    for _ in range(total // 10):
        kind = draw.choice(list(FUZZ))
        one.write_bytes(json.dumps(GOOD).encode() + b"\n" + FUZZ[kind](draw) + b"\n")
        for load in (load_sft_conversations, load_rl_prompts):
            try:
                load(one)
                found["bad rows taken in"] += load is load_sft_conversations
            except DataError as error:
                found["errors without file and line"] += not (str(one) in str(error) or one.name in str(error))
            except Exception as error:
                found[f"untyped errors ({type(error).__name__}, {kind})"] += 1
    big = amount.folder / "big.jsonl"
    big.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}, {"role": "assistant", "content": "b"}]}) + "\n")
    found["long rows lost"] = 1 - len(load_sft_conversations(big))
    bad = [line for kind, line in zip(kinds, lines, strict=True) if kind in FUZZ]
    naive = _read_naively(bad)
    return Outcome(
        size=f"{total} rows, half of them bad in {len(FUZZ)} ways, {total // 10} files of one bad row, a row of 10 MB",
        measured=dict(found),
        holds=not any(found.values()), control={"bad rows taken in, or untyped errors": naive}, control_fails=naive > 0,
    )  # fmt: skip
