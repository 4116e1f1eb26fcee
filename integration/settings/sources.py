"""Places where a command's settings come from: a flag as it was typed, or a line of a file of settings; and errors that name these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from integration.settings.option_effects import list_options, spell_option

_HEADER = re.compile(r"\s*\[\s*([\w.]+)\s*\]")
_KEY = re.compile(r"\s*([\w.]+)\s*=")


@dataclass(frozen=True)
class Place:
    """The place of a setting's value."""

    typed: str  # name of the setting as the user wrote it
    file: str | None = None  # file and line; None = the command line

    def __str__(self) -> str:
        return f"{self.typed} on the command line" if self.file is None else f"{self.typed} in {self.file}"


def find_places(argv: Sequence[str], path: str | None, config: Any) -> dict[str, Place]:
    """Return the place of each setting that flags or a file of settings give, by section.field; flags count before the file.

    Args:
        argv: arguments of the command.
        path: file of settings; None = no file.
        config: configuration with all settings.
    """
    known = {name for name, _ in list_options(config)}
    found = {} if path is None else {name: place for name, place in _scan_file(Path(path)) if name in known}
    for argument in argv:
        if argument.startswith("--"):
            typed = argument.partition("=")[0]
            name = typed.removeprefix("--").replace("-", "_")
            plain = re.sub(r"(^|\.)no_(\w+)$", r"\1\2", name)  # --model.no-trust-remote-code
            place = Place(typed)
            found |= {one: place for one in (name, plain) if one in known}
    return found


def _scan_file(path: Path) -> Iterator[tuple[str, Place]]:
    """Yield the settings of a .toml or .json file with their lines; none of a .py file, whose values follow from a program."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    if path.suffix == ".toml":
        section = ""
        for number, line in enumerate(lines, 1):
            if header := _HEADER.match(line):
                section = header[1] + "."
            elif key := _KEY.match(line):
                yield section + key[1], Place(section + key[1], f"{path}, line {number}")
    elif path.suffix == ".json":
        stack: list[str] = []
        for number, line in enumerate(lines, 1):
            for key, opens, closes in re.findall(r'"(\w+)"\s*:\s*(\{)?|(\})', line):
                if closes:
                    del stack[-1:]
                elif opens:
                    stack.append(key)
                else:
                    yield ".".join([*stack, key]), Place(".".join([*stack, key]), f"{path}, line {number}")


def name_settings(message: str, config: Any, places: Mapping[str, Place], *, flat: bool = False) -> str:
    """Return an error's message with its settings named as the user wrote them, instead of by classes and fields.

    Args:
        config: configuration with the sections that may be named.
        places: see find_places; a setting that the user did not give becomes its flag.
        flat: options have no section in front, as in --slots.
    """
    owners = dict(_list_owners(config))

    def spell(name: str) -> str:
        place = places.get(name)
        if place is None:
            return spell_option(name.rpartition(".")[2] if flat else name)
        return place.typed if place.file is None else f"{place.typed} ({place.file})"

    settings = {name for name, _ in list_options(config) if "." in name}
    seen: set[str] = set()

    def replace_name(found: re.Match[str]) -> str:
        names = owners.get(found[0], [found[0]] if found[0] in settings else [])
        names = [name for name in names if name in places] or names
        if not names or found[0] in seen:  # once is enough
            return found[0]
        seen.add(found[0])
        return spell(names[0])

    return re.sub(r"(?<![\w./'-])(?:[A-Z]\w+\.[a-z]\w*|[a-z]\w*(?:\.[a-z]\w*)+)(?![\w/(]|\.\w)", replace_name, message)


def _list_owners(config: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield Class.field with the settings that it stands for; the library's own classes of a section's settings, too."""
    owners: dict[str, list[str]] = {}

    def visit(section: Any, where: str) -> None:
        for field in fields(section):
            value = getattr(section, field.name)
            if is_dataclass(value):
                visit(value, f"{where}{field.name}.")
            else:
                owners.setdefault(f"{type(section).__name__}.{field.name}", []).append(where + field.name)

    visit(config, prefix)
    for kind, places in _LIBRARY.items():
        for name, _ in list_options(config):
            section, _, field = name.rpartition(".")
            if section in places:
                owners.setdefault(f"{kind}.{field}", []).append(name)
        for field, names in _RENAMED.items():
            if kind in names:
                owners.setdefault(f"{kind}.{field}", []).append(names[kind])
    yield from owners.items()


_LIBRARY: Mapping[str, tuple[str, ...]] = {
    "SFTTrainingConfig": ("sft",),
    "PreferenceTrainingConfig": ("preference",),
    "RLTrainingConfig": ("rl", "engine", "critic"),
    "RolloutConfig": ("rl",),
    "GenerationConfig": ("generation",),
    "SamplingParams": ("generation",),
    "RewardConfig": ("reward",),
    "ParityConfig": ("engine",),
    "EpisodeConfig": ("episode",),
    "LoRAConfig": ("lora",),
    "KLControl": ("rl.kl_control",),
    "RewardModelTrainingConfig": ("training",),
}
"""Sections whose settings the library's own configurations take."""
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "checkpoint_every": {"SFTTrainingConfig": "checkpoint.sft_every", "RLTrainingConfig": "checkpoint.rl_every"},
    "batch_size": {"RolloutConfig": "rl.prompts_per_step"},
    "n_samples": {"GenerationConfig": "rl.samples_per_prompt"},
    "n_samples_per_prompt": {"RolloutConfig": "rl.samples_per_prompt"},
    "num_rows": {"ParityConfig": "engine.parity_rows"},
    "threshold": {"ParityConfig": "engine.parity_threshold"},
}
