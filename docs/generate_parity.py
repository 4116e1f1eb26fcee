"""Write docs/parity.md: how our compositions compare with recorded inputs and outputs of other frameworks' own functions.

    python docs/generate_parity.py            writes the page
    python docs/generate_parity.py --check    exits 1 if it is not up to date

The vectors lie in tests/data/golden, the mappings in tests/parity; every status is the result of running the comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "tests"))  # the mappings are part of the tests

from parity.mapping import Parity, load, mismatches  # noqa: E402
from test_parity import MAPPINGS, NOT_OFFERED, SHIPPED  # noqa: E402

PAGE = DOCS / "parity.md"
AGREES, EXCEPT, DIFFERS, NOT = "agrees", "agrees, except", "differs", "not offered"


@dataclass(frozen=True)
class Row:
    """One function of another framework."""

    group: str
    name: str
    peer: str
    function: str
    num_cases: int
    num_differing: int
    status: str
    ours: str
    reason: str
    left_out: str  # recorded outputs and gradients that are not compared


def find_left_out(document: Mapping[str, Any], parity: Parity) -> str:
    """Recorded outputs and gradients that the mapping has no counterpart for."""
    recorded, compared, gradients = set[str](), set[str](), set[str]()
    for case in document["cases"]:
        recorded |= set(case["outputs"])
        compared |= set(parity.run(**case["kwargs"])) if not recorded <= compared else set()
        gradients |= {f"d/d{name}" for name in case["grads"] if name not in parity.wrt}
    return ", ".join([*sorted(recorded - compared), *sorted(gradients)])


def compare(path: Path) -> Row:
    """Run the comparison of one file. Raises ValueError where it fails or has no mapping: the page then has nothing true to say."""
    name = f"{path.parent.name}/{path.stem}"
    document = load(path)
    source = document["source"]
    facts = {
        "group": path.parent.name,
        "name": path.stem,
        "peer": f"{source['package']} {source['version']}",
        "function": source["function"],
        "num_cases": len(document["cases"]),
    }
    if name in NOT_OFFERED:
        return Row(**facts, num_differing=len(document["cases"]), status=NOT, ours="", reason=NOT_OFFERED[name], left_out="")
    if name not in MAPPINGS:
        raise ValueError(f"{name} has no mapping in tests/parity: add one, or the reason why it is not offered")
    found, on_purpose = mismatches(document, MAPPINGS[name])
    if found:
        raise ValueError(f"{name} does not agree: {found[0]}")
    status = AGREES if not on_purpose else DIFFERS if len(on_purpose) == len(document["cases"]) else EXCEPT
    note = MAPPINGS[name].note
    reasons = [*dict.fromkeys(on_purpose.values()), *([note] if note else [])]
    return Row(
        **facts,
        num_differing=len(on_purpose),
        status=status,
        ours=MAPPINGS[name].ours,
        reason="; ".join(reasons),
        left_out=find_left_out(document, MAPPINGS[name]),
    )


def compare_all() -> list[Row]:
    """Every shipped vector, by group and name."""
    return [compare(path) for path in sorted(SHIPPED.glob("*/*.json")) if path.parent.name != "disagreements"]


def escape(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def format_rows(rows: list[Row]) -> Iterator[str]:
    """A Markdown table of one group."""
    yield "| function | ours | | what differs | not compared |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        share = f" {row.num_differing} of {row.num_cases} cases" if row.status == EXCEPT else ""
        cells = (
            f"`{row.name}`: {escape(row.function)}, {escape(row.peer)}",
            f"`{row.ours}`".replace("|", "\\|") if row.ours else "",
            f"{row.status}{share}",
            escape(row.reason),
            escape(row.left_out),
        )
        yield f"| {' | '.join(cells)} |"


def write_page() -> str:
    """docs/parity.md."""
    rows = compare_all()
    counts = Counter(row.status for row in rows)
    cases, differing = sum(row.num_cases for row in rows), sum(row.num_differing for row in rows)
    agreeing = counts[AGREES] + counts[EXCEPT]
    lines = [
        "<!-- Written by docs/generate_parity.py from tests/parity: do not edit. -->",
        "",
        "# Parity with other frameworks",
        "",
        f"{len(rows)} functions of other frameworks were run on their own, and their inputs, outputs and gradients recorded"
        " ([format](../tests/data/golden/README.md)). `tests/test_parity.py` holds our compositions against them, in float64, at each"
        " file's tolerance. A mapping only renames and reshapes; every number comes from the library. `ROLLOUTS_GOLDEN_DIR` points the"
        " same tests at another folder of vectors.",
        "",
        f"{agreeing} of {len(rows)} ({agreeing / len(rows):.0%}) agree in value and, where recorded, gradient: {counts[AGREES]} in every"
        f" case, {counts[EXCEPT]} except for cases that differ on purpose. {counts[DIFFERS]} differ, {counts[NOT]} are not offered. By"
        f" cases: {cases - differing} of {cases}.",
        "",
        "`what differs` also names what we do otherwise by default, where an option gives the other framework's numbers. `not compared` are"
        " recorded outputs, mostly metrics under the other framework's own names, and gradients that the mapping has no counterpart for.",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group}", "", *format_rows([row for row in rows if row.group == group])]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    page = write_page()
    if parser.parse_args().check:
        fresh = PAGE.is_file() and PAGE.read_text() == page
        if not fresh:
            print("docs/parity.md is not up to date: run python docs/generate_parity.py")
        return 0 if fresh else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
