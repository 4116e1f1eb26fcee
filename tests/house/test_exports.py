"""Public names: one list a package, beside its `__init__.py`, the same for editors and at run time."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from collections import Counter
from types import ModuleType

import pytest
from house.packages import FACADES, LIBRARY, PACKAGES, ROOT

import rollouts

PUBLIC = sorted(rollouts.__all__)
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "reference.md")]
FILES = [file for folder in ("examples", "integration", "benchmarks") for file in (ROOT / folder).rglob("*.*")]
PLACES = [*PAGES, *(file for file in FILES if file.suffix in {".py", ".ipynb"})]


def import_packages() -> list[ModuleType]:
    return [importlib.import_module(f"rollouts.{name}") for name in PACKAGES]


@pytest.mark.parametrize("name", ["rollouts", *(f"rollouts.{package}" for package in (*PACKAGES, *FACADES))])
def test_each_name_of_a_stub_is_there_and_says_where_it_comes_from(name: str):
    package = importlib.import_module(name)
    stub = (LIBRARY.joinpath(*name.split(".")[1:]) / "__init__.pyi").read_text()
    written = re.findall(r"\b(\w+) as (\w+)\b", stub)
    assert all(first == second for first, second in written)
    assert (
        {first for first, _ in written} == set(package.__all__) if name != "rollouts" else set(package.__all__) >= {a for a, _ in written}
    )
    assert not set(package.__all__) - set(dir(package))
    for public in package.__all__:
        value = getattr(package, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == public and value.__module__.startswith(name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018


def test_the_library_offers_the_names_of_its_packages_once():
    names = Counter(name for package in import_packages() for name in package.__all__)
    assert not [name for name, number in names.items() if number > 1]
    assert set(names) < set(PUBLIC)
    for package in import_packages():
        assert all(getattr(rollouts, name) is getattr(package, name) for name in package.__all__)


PATHS_OF_PROTOCOLS = ("InferenceEngine.", "RLParts.")  # the loops give them a Path


def test_every_public_function_takes_a_path_as_text_too():
    """A str where only a Path was expected ends in an AttributeError of the library's."""
    narrow: list[str] = []
    for package in import_packages():
        for public in package.__all__:
            value = getattr(package, public)
            members = vars(value).items() if inspect.isclass(value) else [(public, value)]
            for name, member in members:
                function = getattr(member, "__func__", member)
                if not inspect.isfunction(function) or (name.startswith("_") and name != "__init__"):
                    continue
                for parameter in inspect.signature(function).parameters.values():
                    words = re.findall(r"\w+", str(parameter.annotation))
                    if words[:1] == ["Path"] and "str" not in words:
                        narrow.append(f"{public}.{name}({parameter.name})")
    assert [name for name in narrow if not name.startswith((*PATHS_OF_PROTOCOLS, "ScriptedModel."))] == []


def test_no_public_name_is_hidden_by_a_module_of_the_same_name():
    """`from rollouts import x` gives the module x as soon as anything has imported it."""
    for package in [rollouts, *import_packages(), *(importlib.import_module(f"rollouts.{name}") for name in FACADES)]:
        folder = LIBRARY.joinpath(*package.__name__.split(".")[1:])
        modules = {path.stem for path in folder.iterdir()}
        assert not set(package.__all__) & modules, f"{package.__name__}: rename the module, or let the name be imported from its module"


def test_importing_the_library_is_light():
    code = (
        "import sys, time; start = time.process_time(); import rollouts; from rollouts import algorithms, engines\n"
        "spent = time.process_time() - start; rollouts.__all__, dir(engines)\n"
        "print(spent, *(name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'trio', 'httpx', 'numpy')))"
    )
    spent, *heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy
    assert float(spent) < 0.05


def test_the_first_process_of_a_sandbox_without_other_packages_can_import_the_library():
    code = f"import sys; sys.path.append({str(ROOT)!r}); import rollouts.sandbox; assert 'grpo' in rollouts.__all__"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_a_public_name_is_used_by_an_example_a_page_or_the_product():
    words = {word for path in PLACES for word in re.findall(r"\w+", path.read_text())}
    errors = set(importlib.import_module("rollouts.errors").__dict__)
    own = {name for facade in FACADES for name in importlib.import_module(f"rollouts.{facade}").__all__}
    unused = sorted((set(PUBLIC) | own) - words - errors)
    assert not unused, "import them from their modules: they need not be public"


def test_the_reference_has_every_public_name_and_is_up_to_date():
    generator = runpy.run_path(str(ROOT / "tools" / "docs" / "generate_reference.py"))
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == generator["write_page"](), f"run {generator['COMMAND']}"
    assert sorted(re.findall(r"^\| `(\w+)` \| .+ \| \[", page, re.MULTILINE)) == PUBLIC, "each has a first line"
