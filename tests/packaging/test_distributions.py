"""Wheel and source distribution, built from a clean copy: what is in them, what the index shows, and a run from an empty directory."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[2]
GATHERED = {"build", "dist", "runs", "site"}  # at the top of a checkout
CACHES = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


def leave_out(folder: str, names: list[str]) -> set[str]:
    return CACHES(folder, names) | (GATHERED & set(names) if Path(folder) == ROOT else set())


BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; print(b.build_sdist(to), b.build_wheel(to))"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, made of a copy without anything that a checkout gathers."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "copy", ignore=leave_out)
    (folder / "dist").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder / "dist")], cwd=folder / "copy", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "dist"


def list_files(folder: str) -> set[str]:
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_both_packages_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.name.startswith("rollouts_rl-") and wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == list_files("rollouts") | list_files("integration")
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_distribution_holds_docs_examples_and_tests(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    for folder in ("docs", "examples", "tests", "tools", "benchmarks", "rollouts", "integration", ".ci"):
        missing = list_files(folder) - names
        assert not missing, sorted(missing)[:10]
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml", "setup.py", "mkdocs.yml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.fixture(scope="module")
def metadata(built: Path) -> email.message.Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


@pytest.mark.slow
@needs.README_RENDERER
def test_the_description_renders_and_has_no_link_that_an_index_cannot_follow(metadata: email.message.Message):
    from readme_renderer import markdown

    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert isinstance(text, str)
    html = markdown.render(text)
    assert html is not None and "<h1" in html
    targets = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert targets and all(re.match(r"https?://|#|mailto:", target) for target in targets), targets


@pytest.mark.slow
def test_the_metadata_says_what_it_is(metadata: email.message.Message):
    assert (metadata["Name"], metadata["License-Expression"], metadata["Requires-Python"]) == ("rollouts-rl", "Apache-2.0", ">=3.11")
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier", [])
    assert metadata["Keywords"]


def test_the_changelog_begins_with_what_is_not_released_and_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](.*)$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert SETTINGS["version"] in text


def test_the_page_of_the_installation_lists_each_extra():
    table = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\S+)`", " ".join(table))) == sorted(SETTINGS["optional-dependencies"])


# -- installed


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new environment with the wheel, over the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=200)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    below = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "below.pth").write_text("\n".join(below) + "\n")  # their own .pth files, that of this checkout among them, are not read
    (wheel,) = built.glob("*.whl")
    pip = [
        str(folder / "venv" / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=200)
    yield folder / "venv" / "bin"


def run_in(folder: Path, *command: str) -> str:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo_from_an_empty_directory(installed: Path, tmp_path: Path):
    where = run_in(
        tmp_path, str(installed / "python"), "-c", "import rollouts, integration; print(rollouts.__file__, integration.__file__)"
    )
    assert all(Path(path).is_relative_to(installed.parent) for path in where.split()), where
    short = ("--mode", "sft+rl", "--sft.num-steps", "4", "--rl.num-steps", "1")
    run_in(tmp_path, str(installed / "rollouts"), "train", *short, "--output-dir", "demo")
    assert (tmp_path / "demo" / "summary.json").exists()
    (tmp_path / "integration").mkdir()  # a folder of this name beside the user's work does no harm
    assert "mode sft+rl" in run_in(tmp_path, str(installed / "python"), "-m", "integration.train", *short, "--dry-run")


@pytest.mark.slow
def test_an_installed_wheel_trains_by_the_facade(installed: Path, tmp_path: Path):
    script = tmp_path / "quick_start.py"
    shutil.copy(ROOT / "examples" / "trainer_quick_start.py", script)
    code = f"import runpy; runpy.run_path({str(script)!r})['main'](num_epochs=1, num_iters_per_epoch=1)"
    assert "step_0001 holds" in run_in(tmp_path, str(installed / "python"), "-c", code)
