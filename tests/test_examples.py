"""The notebooks, executed from top to bottom in a real kernel."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_the_notebooks_run():
    """One after the other in one kernel, which takes seconds to start, and forgets all names in between."""
    notebooks = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    for notebook in notebooks:
        notebook.cells[[cell.cell_type for cell in notebook.cells].index("code")].source += "\n%reset -f"
    whole = notebooks[0]
    whole.cells = [cell for notebook in notebooks for cell in notebook.cells]
    nbclient.NotebookClient(whole, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert all(cell.get("execution_count") for cell in whole.cells if cell.cell_type == "code")


def test_there_are_notebooks_of_both_tiers():
    assert {path.stem for path in NOTEBOOKS} >= {"grpo_step_by_hand", "sft_then_rl"}
