"""Paths among the settings. A run directory holds them absolute, so that it can be resumed and evaluated from any working directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

C = TypeVar("C")

_FILE = re.compile(r"[^\s,*][^,*]*?\.py(?=:)")
"""The file of a function, FILE.py:NAME, also among several: 'a.py:right*0.8,b.py:brief*0.2'."""


def make_absolute(path: str) -> str:
    """Return the absolute path of what is there; other texts, such as names on the hub, as they are."""
    if not Path(path).exists():
        return path
    return os.path.realpath(path) if ".." in Path(path).parts else os.path.abspath(path)  # a link keeps its name


def _absolute_function(text: str) -> str:
    return _FILE.sub(lambda found: make_absolute(found[0]), text)


def _absolute_data_set(text: str) -> str:
    """Return an expression of a mixture, FILE or FILE(weight=2), with its absolute path."""
    path, bracket, arguments = text.partition("(")
    return make_absolute(text) if Path(text).exists() else make_absolute(path.strip()) + bracket + arguments


_MODELS = ("model.path", "reference.path", "critic.path", "reward.model")
_DATA = ("data.path", "data.eval_path", "data.rollouts")
_FUNCTIONS = (
    *("reward.function", "trajectories.condition"),
    *(f"environment.{name}" for name in ("factory", "expert", "state_key", "similarity")),
)
PATHS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    dict.fromkeys((*_MODELS, *_DATA), make_absolute) | dict.fromkeys(_FUNCTIONS, _absolute_function) | {"data.mixture": _absolute_data_set}
)
"""Settings with paths by name (section.field), each with the function that makes one of its texts absolute."""


def with_absolute_paths(config: C) -> C:
    """Return the settings with absolute paths, as far as they exist."""
    changed: dict[str, dict[str, Any]] = {}
    for name, absolute in PATHS.items():
        section, _, field = name.partition(".")
        value: Any = getattr(getattr(config, section, None), field, None)
        if not isinstance(value, str | tuple):  # None, or environment.similarity as a number
            continue
        made = absolute(value) if isinstance(value, str) else tuple(map(absolute, value))
        if made != value:
            changed.setdefault(section, {})[field] = made
    sections = {section: replace(getattr(config, section), **values) for section, values in changed.items()}
    return replace(config, **sections) if sections else config  # pyright: ignore[reportArgumentType, reportCallIssue]


def has_moved(name: str, before: Any, after: Any) -> bool:
    """Whether a setting names the same files as before at another place, while at least one of them is no longer where it was."""
    if name not in PATHS or not all(isinstance(value, str | list | tuple) for value in (before, after)):
        return False
    old, new = ([value] if isinstance(value, str) else list(value) for value in (before, after))
    if [strip_directories(name, text) for text in old] != [strip_directories(name, text) for text in new]:
        return False
    files = [file for text in old for file in (_FILE.findall(text) if name in _FUNCTIONS else [text.partition("(")[0]])]
    return any(os.path.isabs(file) and not Path(file).exists() for file in files)


def strip_directories(name: str, text: str) -> str:
    """Return a text of a setting of PATHS with the last parts of its paths alone."""
    text = text.replace("\\", "/")
    if name in _FUNCTIONS:
        return re.sub(r"[^,*]*/", "", text)
    path, bracket, arguments = text.partition("(") if name == "data.mixture" else (text, "", "")
    return path.rstrip("/").rpartition("/")[2] + bracket + arguments
