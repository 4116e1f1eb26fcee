"""Pictures of docs/report.md, of a run that wrote rollouts: python -m tools.docs.picture_report RUN [FOLDER].

Needs the program chromium. Writes the pictures of that page into docs, and those in the other colours into FOLDER, to be looked at.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from integration.report.page import read_report, render
from tools.docs.chromium import open_chromium

DOCS = Path(__file__).parents[2] / "docs"
DRAWN = "document.getElementById('main').dataset.drawn"
CURVES = f"{DRAWN} && document.querySelector('canvas')"


def main(run: Path, others: Path) -> None:
    """Take the pictures, in both colours each."""
    with tempfile.TemporaryDirectory() as folder, open_chromium() as page:
        path = Path(folder) / "report.html"
        path.write_text(render(read_report([run], max_tokens=0)), encoding="utf-8")
        for dark in (False, True):
            page.resize(1180, 760, dark=dark)
            page.open(f"file://{path}#tab=rollouts&order=clipped&color=advantage", until=DRAWN)
            page.take_picture((others if dark else DOCS) / ("report-dark.png" if dark else "report.png"))
            page.open(f"file://{path}#tab=curves", until=CURVES)
            page.take_picture((DOCS if dark else others) / ("report-curves.png" if dark else "curves-light.png"))
            page.resize(390, 844, phone=True, scale=2.0, dark=dark)
            page.open(f"file://{path}#tab=curves", until=CURVES)
            page.take_picture((others if dark else DOCS) / ("curves-phone-dark.png" if dark else "report-curves-phone.png"))
            page.open(f"file://{path}#tab=rollouts&order=clipped&color=reason", until=DRAWN)
            page.ask("document.querySelector('.sheet').scrollIntoView({ behavior: 'instant' })")
            page.take_picture((DOCS if dark else others) / ("report-phone.png" if dark else "report-phone-light.png"))
        assert page.console == [], page.console


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.gettempdir()))
