"""Findings of the doctor: the result of a check, as a line of a table and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

Status: TypeAlias = Literal["pass", "warn", "fail", "skip"]
_WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    check: str  # name of the check
    status: Status
    found: str  # one sentence with the numbers
    advice: str = ""  # remedy, for warn and fail; reason, for skip

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)


def judge(check: str, found: str, *, fails: bool = False, warns: bool = False, advice: str = "") -> Finding:
    """Return a finding: fail if `fails`, else warn if `warns`, else pass, which needs no advice."""
    status: Status = "fail" if fails else "warn" if warns else "pass"
    return Finding(check=check, status=status, found=found, advice=advice if status != "pass" else "")


def skip(check: str, reason: str) -> Finding:
    """Return the finding of a check that does not apply."""
    return Finding(check=check, status="skip", found=reason)


def tabulate(findings: Sequence[Finding]) -> str:
    """Return the findings as a table with one row each, the advice below, and a last line that counts them."""
    width = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (8 + width)
    lines: list[str] = []
    for finding in findings:
        first, *more = textwrap.wrap(finding.found, _WIDTH - len(indent)) or [""]
        lines += [f"{finding.status.upper():<5} {finding.check:<{width}}  {first}", *(indent + line for line in more)]
        lines += [f"{indent}{line}" for line in textwrap.wrap(f"-> {finding.advice}", _WIDTH - len(indent))] if finding.advice else []
    counts = {status: sum(finding.status == status for finding in findings) for status in ("pass", "warn", "fail", "skip")}
    return "\n".join([*lines, "", ", ".join(f"{count} {status}" for status, count in counts.items() if count)])
