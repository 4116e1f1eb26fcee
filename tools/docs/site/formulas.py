"""Formulas of a page as MathML, which browsers draw themselves: no script has to be loaded for them."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

BLOCK = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"\$(?=\S)([^$\n]+?)(?<=\S)\$")
CODE = re.compile(r"(^(`{3,}).*?^\2 *$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def write_formulas(markdown: str) -> str:
    """Replace $$ ... $$ on lines of their own and $ ... $ by MathML, on pages that have a formula on lines of its own; code stays."""
    if not BLOCK.search(markdown):
        return markdown
    markdown = BLOCK.sub(lambda found: _convert(found[1], "block"), markdown)
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [INLINE.sub(lambda found: _convert(found[1], "inline"), markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, INLINE.sub(lambda found: _convert(found[1], "inline"), markdown[end:])])


def _convert(formula: str, display: str) -> str:
    return convert(" ".join(formula.split()).replace(r"\_", "_"), display=display).replace("_", "&#95;").replace("|", "&#124;")
