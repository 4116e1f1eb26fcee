"""Comparison of two mathematical answers by math-verify. Runs in sandbox workers only: some texts make it compute for ever."""

from __future__ import annotations

import importlib
import re
from typing import Any

_LIBRARY: Any = importlib.import_module("math_verify")  # imported with the worker, not with each call: it takes a second
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_LATEX = re.compile(r"[\\^_{}()\[\]=]")


def compare(payload: dict[str, str]) -> dict[str, Any]:
    """Compare the last answer in payload["response"] with payload["truth"].

    Returns: "right", whether they are equal; "truth" and "found", the answers read in the two texts, as text, or None.
    """
    truth = _read_truth(payload["truth"])
    found = _LIBRARY.parse(payload["response"], parsing_timeout=None)
    right = bool(truth) and bool(found) and bool(_LIBRARY.verify(truth, found, timeout_seconds=None))
    return {"right": right, "truth": _show(truth), "found": _show(found)}


def _read_truth(text: str) -> list[Any]:
    """Parse a ground truth, which comes without the delimiters that mark LaTeX in a response."""
    text = text.strip()
    forms = [text] if _DELIMITED.search(text) else [f"${text}$", text] if _LATEX.search(text) else [text, f"${text}$"]
    return next((parsed for parsed in (_LIBRARY.parse(form, parsing_timeout=None) for form in forms) if parsed), [])


def _show(parsed: list[Any]) -> str | None:
    """Return the text of a parsed answer. Its value is not printed, because that can take for ever, too."""
    return next((value[:200] for value in parsed if isinstance(value, str)), None)


compare({"truth": "\\frac{1}{2}", "response": "$\\sqrt{0.25}$"})  # load everything that is loaded on first use
