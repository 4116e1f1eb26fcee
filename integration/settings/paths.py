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
_FILE_WORD = re.compile(r"[\w.~/\\-]+\.py(?=:)")
"""The same in an expression with parentheses and arguments, 'own.py:loss(clip=0.2)'."""
_DATA_SET = re.compile(r"(.*?)(\([^()]*\))?", re.DOTALL)


def make_absolute(path: str) -> str:
    """Return the absolute path of what is there; other texts, such as names on the hub, as they are."""
    if not Path(path).exists():
        return path
    return os.path.realpath(path) if ".." in Path(path).parts else os.path.abspath(path)  # a link keeps its name


def _absolute_function(text: str) -> str:
    """Return an expression of functions with absolute paths, but for those that the expression would split: with a comma or an asterisk."""
    return _replace_files(_FILE, text, keep=re.compile("[,*]"))


def _absolute_expression(text: str) -> str:
    """Return an algorithm, filter or logger with absolute paths, but for those that are no word of its language, such as with a space."""
    return _replace_files(_FILE_WORD, text, keep=re.compile(r"[^\w.~/\\-]"))


def _replace_files(files: re.Pattern[str], text: str, *, keep: re.Pattern[str]) -> str:
    return files.sub(lambda found: found[0] if keep.search(made := make_absolute(found[0])) else made, text)


def split_data_set(text: str) -> tuple[str, str]:
    """Split an expression of --data.mixture, FILE or FILE(weight=2), into the path and the arguments with parentheses, or ""."""
    found = _DATA_SET.fullmatch(text.strip())
    assert found is not None, f"{text!r} is no data set: the pattern matches any text"
    return found[1].strip(), found[2] or ""


def _absolute_data_set(text: str) -> str:
    path, arguments = split_data_set(text)
    return make_absolute(path) + arguments if Path(path).exists() else text


def _absolute_teacher(text: str) -> str:
    name, separator, place = text.partition("=")
    return name + separator + make_absolute(place) if place else text


_MODELS = ("model.path", "reference.path", "teacher.path", "teacher.tokenizer", "critic.path", "reward.model")
_DATA = ("data.path", "data.eval_path", "data.rollouts", "preference.path", "preference.eval_path")
_EXPRESSIONS = ("rl.algorithm", "rl.filter")  # besides the loggers, which are in no section
_FUNCTIONS = (
    *("reward.function", "trajectories.condition", "agent.function"),
    *(f"environment.{name}" for name in ("factory", "expert", "state_key", "similarity")),
)
PATHS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    dict.fromkeys((*_MODELS, *_DATA), make_absolute)
    | dict.fromkeys(_FUNCTIONS, _absolute_function)
    | {"data.mixture": _absolute_data_set, "teacher.each": _absolute_teacher}
)
"""Settings with paths by name (section.field), each with the function that makes one of its texts absolute."""


def with_absolute_paths(config: C) -> C:
    """Return the settings with absolute paths, as far as they exist."""
    changed: dict[str, dict[str, Any]] = {}
    for name, absolute in {**PATHS, **dict.fromkeys(_EXPRESSIONS, _absolute_expression)}.items():
        section, _, field = name.partition(".")
        value: Any = getattr(getattr(config, section, None), field, None)
        if not isinstance(value, str | tuple):  # None, or environment.similarity as a number
            continue
        made = absolute(value) if isinstance(value, str) else tuple(map(absolute, value))
        if made != value:
            changed.setdefault(section, {})[field] = made
    sections = {section: replace(getattr(config, section), **values) for section, values in changed.items()}
    loggers: tuple[str, ...] = getattr(config, "loggers", ())
    if (made := tuple(map(_absolute_expression, loggers))) != loggers:
        sections["loggers"] = made
    return replace(config, **sections) if sections else config  # pyright: ignore[reportArgumentType, reportCallIssue]


def has_moved(name: str, before: Any, after: Any) -> bool:
    """Whether a setting names the same files as before at another place, while at least one of them is no longer where it was."""
    if name not in PATHS or not all(isinstance(value, str | list | tuple) for value in (before, after)):
        return False
    old, new = ([value] if isinstance(value, str) else list(value) for value in (before, after))
    if [strip_directories(name, text) for text in old] != [strip_directories(name, text) for text in new]:
        return False
    files = [file for text in old for file in _list_files(name, text)]
    return any(os.path.isabs(file) and not Path(file).exists() for file in files)


def _list_files(name: str, text: str) -> list[str]:
    if name in _FUNCTIONS:
        return _FILE.findall(text)
    if name == "teacher.each":
        return [text.partition("=")[2]]
    return [split_data_set(text)[0] if name == "data.mixture" else text]


def strip_directories(name: str, text: str) -> str:
    """Return a text of a setting of PATHS with the last parts of its paths alone."""
    text = text.replace("\\", "/")
    if name in _FUNCTIONS:
        return re.sub(r"[^,*]*/", "", text)
    if name == "teacher.each":
        key, separator, place = text.partition("=")
        return key + separator + (place if "://" in place else strip_directories("teacher.path", place))
    path, arguments = split_data_set(text) if name == "data.mixture" else (text, "")
    return path.rstrip("/").rpartition("/")[2] + arguments
