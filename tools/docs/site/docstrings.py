"""Extension of griffe: docstrings written for a terminal become Markdown that shows the same text."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Returns|Raises|Yields|Source|Sources|Example|Note): (?=\S)", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Prepare each docstring for Markdown: shapes are no headings, products are no emphasis, `Returns: ...` is a paragraph of its own."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object in place."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r"# (?=\[)", "", text)  # "# [B, T]" is a shape
    text = SECTION.sub(lambda found: f"\n**{found[1]}:** ", text)
    parts = re.split(r"(`[^`\n]*`|\*\*\w+:\*\*|^ +\*{0,2}\w+:)", text, flags=re.MULTILINE)
    return "".join(part if k % 2 else re.sub(r"(?<!\\)([*<#]|\b__)", r"\\\1", part) for k, part in enumerate(parts))
