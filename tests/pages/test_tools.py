"""The script that installs a server and runs the tests against it, as far as it goes without installing one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "run_server_tests.sh"


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_directory_that_the_script_has_not_made_is_not_replaced(kind, tmp_path):
    (tmp_path / "precious").touch()
    result = run_script(kind, **{f"{kind.upper()}_VENV": str(tmp_path)})
    assert result.returncode == 2
    assert f"{tmp_path} was not made by this script and is not replaced" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_kind_that_is_not_known_and_a_python_without_pytest_are_named():
    result = run_script("tgi")
    assert (result.returncode, "the server is tgi, expected vllm or sglang" in result.stderr) == (2, True)
    result = run_script("vllm", PYTHON="/nowhere/python")
    assert (result.returncode, "/nowhere/python cannot import pytest and rollouts" in result.stderr) == (2, True)
