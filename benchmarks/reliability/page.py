"""The table of docs/reliability.md: one row an experiment, with the figures of its last full run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- experiments -->", "<!-- /experiments -->"
_HEAD = ["| | promise | tried | bar | measured | naive variant | met |", "|---|---|---|---|---|---|---|"]


def _tell(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}" for name, value in figures.items())


def format_row(result: Mapping[str, Any]) -> str:
    """Format the row of a result."""
    if result["met"] is None:
        reason = result.get("skipped") or f"ended in an error: {result.get('error')}"
        cells = [result["experiment"], result["promise"], "not run", result["bar"], reason, "", ""]
    else:
        control = result["control"]
        naive = f"{control['variant']}: {_tell(control['measured'])}" if control["measured"] else "none: it is a measurement"
        cells = [result["experiment"], result["promise"], result["size"], result["bar"], _tell(result["measured"]), naive]
        cells.append("yes" if result["met"] else "**no**")
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"


def update_table(text: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the rows of these results; other rows stay."""
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}
    rows |= {result["experiment"]: format_row(result) for result in results}
    ordered = sorted(rows, key=lambda name: (name[0], int(name[1:])))
    return "\n".join([before + BEGIN, *_HEAD, *(rows[name] for name in ordered), END + after])


def write_rows(page: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of results into a page."""
    page.write_text(update_table(page.read_text(encoding="utf-8"), results), encoding="utf-8")
