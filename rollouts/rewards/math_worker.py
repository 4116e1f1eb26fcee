"""Comparison of two mathematical answers by math-verify. Runs in the workers of a sandbox only: some texts make it compute for ever."""

from __future__ import annotations

import importlib
import re
from typing import Any

_LIBRARY: Any = importlib.import_module("math_verify")  # with the worker, not with each call: it takes a second
_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_LATEX = re.compile(r"[\\^_{}()\[\]=]")


def compare(payload: dict[str, str]) -> dict[str, Any]:
    """Whether payload["response"] ends with an answer that is equal to payload["truth"].

    Returns: "right"; "truth" and "found", what was read in the two texts, as text, or None where nothing was.
    """
    truth = _read_truth(payload["truth"])
    found = _LIBRARY.parse(payload["response"], parsing_timeout=None)
    right = bool(truth) and bool(found) and bool(_LIBRARY.verify(truth, found, timeout_seconds=None))
    return {"right": right, "truth": _show(truth), "found": _show(found)}


def _read_truth(text: str) -> list[Any]:
    """A ground truth comes without the delimiters by which LaTeX is found in a response."""
    text = text.strip()
    forms = [text] if _DELIMITED.search(text) else [f"${text}$", text] if _LATEX.search(text) else [text, f"${text}$"]
    return next((parsed for parsed in (_LIBRARY.parse(form, parsing_timeout=None) for form in forms) if parsed), [])


def _show(parsed: list[Any]) -> str | None:
    """The text that was read. The value that was made of it is not printed, which can take for ever, too."""
    return next((value[:200] for value in parsed if isinstance(value, str)), None)


compare({"truth": "\\frac{1}{2}", "response": "$\\sqrt{0.25}$"})  # what is loaded on first use is loaded with the worker, too
