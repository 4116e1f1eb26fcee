"""Write docs/parity.md: comparison of our compositions with recorded inputs and outputs of other frameworks' functions.

    python tools/docs/generate_parity.py            writes the page
    python tools/docs/generate_parity.py --check    exits 1 if it is not up to date

The vectors lie in tests/data/golden, the mappings in tests/parity; every status is the result of running the comparison.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]  # the mappings are part of the tests

from parity.mapping import load, mismatches, name_outputs, run_case  # noqa: E402
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
    left_out: str  # recorded outputs and gradients without comparison, and the reason
    num_results: int  # recorded outputs and gradients of all cases
    num_left_out: int  # results without comparison, see left_out


def compare(path: Path) -> Row:
    """Run the comparison of one file. Raises ValueError if it fails or has no mapping, as the page would be wrong."""
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
        nothing = {"ours": "", "left_out": "", "num_results": 0, "num_left_out": 0}
        return Row(**facts, **nothing, num_differing=len(document["cases"]), status=NOT, reason=NOT_OFFERED[name])
    if name not in MAPPINGS:
        raise ValueError(f"{name} has no mapping in tests/parity: add one, or the reason why it is not offered")
    found, on_purpose = mismatches(document, MAPPINGS[name])
    if found:
        raise ValueError(f"{name} does not agree: {found[0]}")
    status = AGREES if not on_purpose else DIFFERS if len(on_purpose) == len(document["cases"]) else EXCEPT
    parity = MAPPINGS[name]
    reasons = [*dict.fromkeys(on_purpose.values()), *([parity.note] if parity.note else [])]
    alike = [case for case in document["cases"] if case["id"] not in on_purpose]
    results = [[*name_outputs(case["outputs"]), *(f"d/d{x}" for x in case["grads"])] for case in alike]
    ours = [{*run_case(parity, case["kwargs"])[0], *(f"d/d{x}" for x in parity.wrt)} for case in alike]
    left_out = [x for found, own in zip(results, ours, strict=True) for x in found if x not in own]
    why = {reason: ", ".join(x for x in dict.fromkeys(left_out) if parity.left_out[x] == reason) for reason in parity.left_out.values()}
    return Row(
        **facts,
        num_differing=len(on_purpose),
        status=status,
        ours=parity.ours,
        reason="; ".join(reasons),
        left_out="; ".join(f"{names}: {reason}" for reason, names in why.items() if names),
        num_results=sum(len(found) for found in results),
        num_left_out=len(left_out),
    )


def compare_all() -> list[Row]:
    """Compare every shipped vector; results by group and name."""
    return [compare(path) for path in sorted(SHIPPED.glob("*/*.json")) if path.parent.name != "disagreements"]


def escape(text: str) -> str:
    """Escape text for a cell of a table."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def format_rows(rows: list[Row]) -> Iterator[str]:
    """Return a Markdown table of one group."""
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


def format_rules() -> Iterator[str]:
    """Return a Markdown table of all rules by which cases differ, with their functions."""
    yield "| where | theirs and ours | checked |"
    yield "| --- | --- | --- |"
    holders: dict[tuple[str, str], list[str]] = {}
    for name, parity in MAPPINGS.items():
        for rule in parity.rules:
            ours = f"{rule.raises.__name__} is raised" if rule.raises else "our values" if rule.gives else "our values are finite"
            holders.setdefault((rule.reason, ours), []).append(f"`{name.split('/')[1]}`")
    for (reason, ours), names in holders.items():
        yield f"| {', '.join(names)} | {escape(reason)} | {ours} |"


def write_page() -> str:
    """Return the text of docs/parity.md."""
    rows = compare_all()
    counts = Counter(row.status for row in rows)
    cases, differing = sum(row.num_cases for row in rows), sum(row.num_differing for row in rows)
    results, left_out = sum(row.num_results for row in rows), sum(row.num_left_out for row in rows)
    agreeing = counts[AGREES] + counts[EXCEPT]
    lines = [
        "<!-- Written by tools/docs/generate_parity.py from tests/parity: do not edit. -->",
        "",
        "# Parity with other frameworks",
        "",
        f"This page compares the library's numbers with those of other frameworks. {len(rows)} of their functions were run alone, and"
        " their inputs, outputs and gradients recorded ([format](../tests/data/golden/README.md)). `tests/test_parity.py` compares our"
        " compositions with them, in float64, at each file's tolerance. A mapping renames, reshapes, pads, shifts and masks, exchanges"
        " arguments, and turns options into arguments. Every other number comes from the library, or from the five parts in"
        " `tests/parity/peers.py` that only this comparison needs. `ROLLOUTS_GOLDEN_DIR` points the same tests at another folder of"
        " recordings.",
        "",
        f"{agreeing} of {len(rows)} ({agreeing / len(rows):.0%}) agree in value and, if recorded, in gradient: {counts[AGREES]} in every"
        f" case, {counts[EXCEPT]} except for cases that differ on purpose. {counts[DIFFERS]} differ, and {counts[NOT]} are not offered by"
        f" the library. Counted by cases, {cases - differing} of {cases} agree. These have {results} recorded outputs and gradients, of"
        f" which {results - left_out} are compared. The column `not compared` lists the other {left_out} with the reason; most are metrics"
        " that only the other framework has.",
        "",
        "The column `what differs` also lists differences of the defaults, if an option gives the other framework's numbers. A case that"
        " differs on purpose is run, too: its results must be those of its rule, or finite. The last table has every such rule,"
        " including those that no recorded case needs; a test has an example of each.",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"## {group}", "", *format_rows([row for row in rows if row.group == group])]
    lines += ["", "## Where we differ on purpose", "", *format_rules()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    page = write_page()
    if parser.parse_args().check:
        fresh = PAGE.is_file() and PAGE.read_text() == page
        if not fresh:
            print("docs/parity.md is not up to date: run python tools/docs/generate_parity.py")
        return 0 if fresh else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
