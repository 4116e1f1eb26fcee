"""The page of a report: one HTML file with its data, script, styles and plotting library (uPlot) inside, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from integration.report.rollouts import COLUMNS, Chosen, choose_rollouts, dump_json, pack_text
from integration.report.runs import Run, is_number, read_run
from integration.view.tokens import REASONS

_PARTS = files("integration.report") / "page"
_SCRIPTS = ("uplot.min.js", "format.js", "tokens.js", "curves.js", "rollouts.js", "page.js")
_STYLES = ("uplot.min.css", "page.css")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a page: runs, and the chosen rollouts of each."""

    runs: tuple[Run, ...]
    chosen: tuple[Chosen, ...]


def read_report(paths: Sequence[Path], *, max_tokens: int) -> Report:
    """Read runs and their rollouts. max_tokens: most tokens of rollouts in the whole report; 0 = no bound.

    Raises: ConfigError for a path that is no run; DataError for a damaged file.
    """
    runs = tuple(read_run(path) for path in paths)
    share = max(1, max_tokens // len(paths)) if max_tokens else 0
    chosen = (choose_rollouts(run.path, k, max_tokens=share, mask_truncated=run.masks_truncated) for k, run in enumerate(runs))
    return Report(runs=runs, chosen=tuple(_note_unrecorded(run, one) for run, one in zip(runs, chosen, strict=True)))


def _note_unrecorded(run: Run, chosen: Chosen) -> Chosen:
    """Add a note where the run recorded fewer rollouts than it trained on, as it does by default."""
    counts = [line["num_samples"] for line in run.lines if line.get("stage") == "rl" and is_number(line.get("num_samples"))]
    steps = max((line["step"] for line in run.lines if line.get("stage") == "rl"), default=0)
    trained = round(steps * sum(counts) / len(counts)) if counts else 0
    if not chosen.num_total or trained <= chosen.num_total:
        return chosen
    note = f"{run.name} recorded {chosen.num_total:,} of its about {trained:,} rollouts; --trajectories.every 1 records all"
    return replace(chosen, notes=(*chosen.notes, note))


def render(report: Report, *, live: bool = False) -> str:
    """Return the page. live: look for news of the runs at the server that the page comes from."""
    chunks = [chunk for chosen in report.chosen for chunk in chosen.chunks]
    known = {key for chunk in chunks for key in chunk.columns} | {"advantage"}
    index: dict[str, Any] = {
        "live": live,
        "runs": [run.to_dict() for run in report.runs],
        "notes": [note for chosen in report.chosen for note in chosen.notes],
        "reasons": dict(REASONS),
        "columns": [{"key": key, "label": label, "help": text} for key, (label, text) in COLUMNS.items() if key in known],
        "chunks": [{"run": c.run, "step": c.step, "rows": c.rows, "groups": c.groups} for c in chunks],
    }
    blocks = [_embed("index", pack_text(dump_json(index))), *(_embed(f"chunk-{k}", chunk.packed) for k, chunk in enumerate(chunks))]
    script = "\n".join(_read(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    source = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src {source}; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {
        "{{policy}}": policy,
        "{{style}}": "\n".join(_read(name) for name in _STYLES),
        "{{script}}": script,
        "{{data}}": "\n".join(blocks),
    }
    page = _read("page.html")
    for mark, text in parts.items():
        assert page.count(mark) == 1, f"page.html has {page.count(mark)} {mark}, expected 1"
        before, after = page.split(mark)
        page = before + text + after
    return page


def _embed(name: str, packed: str) -> str:
    """Return a block of data that the page unpacks."""
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
