"""An option that a message, a help text or a docstring names is one that a command has, spelled as `--help` spells it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import integration.simulate.__main__ as simulate
import integration.train_reward_model as train_reward_model
from integration.completion import read_programs
from integration.parts.placement import MEMORY_ARGS
from integration.settings import command_line
from integration.settings.config import Config
from integration.settings.option_effects import spell_option
from integration.settings.reward_model import RewardModelConfig

ROOT = Path(__file__).parents[2]
OF_OTHER_PROGRAMS = [ROOT / path for path in ("rollouts/engines", "rollouts/testing/servers", "rollouts/sandbox")]
FOREIGN_OPTIONS = {"--admin-api-key", "--api-key", "--hf-token", "--is-embedding", "--repo-type", "--return-sampling-mask", *MEMORY_ARGS}
FOREIGN_OPTIONS |= {"--weight-transfer-config"}
PLACEHOLDERS = {"--section.field", "--name", "--api"}  # the last one begins options of servers
SPELLED_BY_CODE = (
    "integration/settings/option_effects.py",
    "integration/view/source.py",
    "integration/serving.py",
)  # "--{}", where underscores become hyphens
OPTION = re.compile(r"(?<![\w-])--[a-zA-Z{][\w.{}-]*")


def list_names(section: Any, where: str = "", *, flat: bool = False) -> Iterator[str]:
    """Yield the options of a tree of dataclasses; flat = the sections' names are no part of them."""
    hints = get_type_hints(section)
    for field in fields(section):
        inner = [one for one in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(one)]
        for one in inner:
            yield from list_names(one, "" if flat else f"{where}{field.name}.", flat=flat)
        if not inner:
            yield spell_option(where + field.name)


OPTIONS = {
    *list_names(Config),
    *list_names(RewardModelConfig),
    *(option for options in read_programs().values() for option in options),  # as the helps of all programs have them
    *list_names(simulate._Arguments, flat=True),
    *(spell_option(field.name) for kind in (command_line._Arguments, train_reward_model.Arguments) for field in fields(kind)),
    *("--environment", "--help", "--help-all", "--picture", "--version"),
}


def read_text(node: ast.AST) -> str | None:
    """Return the text of a literal, with {} for what an f-string fills in, if it is not the name of an option."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def find_options(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (place, option) for each option in the string literals of a file."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        for option in OPTION.findall(read_text(node) or "") if id(node) not in parts else ():
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", option.rstrip(".")


def is_option(name: str) -> bool:
    """Return True if a command has this option; {} stands for any part of it."""
    pattern = re.compile(re.escape(name).replace(r"\{\}", "[^.]+"))
    return name in PLACEHOLDERS or any(pattern.fullmatch(option) for option in OPTIONS)


def find_mistake(place: str, option: str) -> str | None:
    """Return what is wrong with an option in a text, None if nothing is."""
    if "_" in option:
        return f"{place}: write {option.replace('_', '-')}"
    if option == "--{}" and not place.startswith(SPELLED_BY_CODE):
        return f"{place} fills a whole name in: underscores may be left in it"
    foreign = option in FOREIGN_OPTIONS or any((ROOT / place.split(":")[0]).is_relative_to(folder) for folder in OF_OTHER_PROGRAMS)
    return None if foreign or is_option(option) else f"{place} names {option}, which no command has"


def test_an_option_in_a_text_is_one_of_a_command() -> None:
    paths = [path for folder in ("integration", "rollouts") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [pair for path in paths for pair in find_options(path)]
    assert len(found) > 300
    assert [mistake for mistake in (find_mistake(*pair) for pair in found) if mistake] == []


@pytest.mark.parametrize("option", ["--rl.num_steps", "--rl.no-such-setting", "--{}.no-such-setting"])
def test_an_option_that_no_command_has_is_found(option: str) -> None:
    assert not is_option(option)


def test_options_are_found_in_every_kind_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "a.py").write_text('"""see --one"""\nname = "a"\nprint(f"add --two.{name}-x, or --three_four.")\n')
    assert [option for _, option in find_options(tmp_path / "a.py")] == ["--one", "--two.{}-x", "--three_four"]
