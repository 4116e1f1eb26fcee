"""Answer of `--explain KEY`: purpose of a setting in this run, its value with the origin, its default, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from integration.settings.config import Config
from integration.settings.help_text import find_help, list_sections
from integration.settings.option_effects import EFFECTS, list_options, spell_option
from integration.settings.other_names import OTHER_NAMES
from integration.settings.sources import Place
from integration.settings.task_defaults import find_default
from rollouts.config_files import suggest
from rollouts.errors import ConfigError

Derive = Callable[[Config], Mapping[str, str]]
"""Function that returns the numbers which follow from settings, by name."""

_PARTS = {"sft": "SFT", "rl": "RL", "dpo": "training on preferences", "dry_run": "the dry run alone"}


def explain_settings(keys: Sequence[str], config: Config, mode: str, places: Mapping[str, Place], help_all: str, derive: Derive) -> str:
    """Return the explanation of settings, or of all settings of a section.

    Args:
        keys: names such as rl.num_steps, --rl.num-steps, or rl.
        places: places of the values that the user gave.
        help_all: help of all options.
        derive: called for settings with numbers, to find what depends on them.

    Raises: ConfigError for an unknown name, with a suggestion.
    """
    values = dict(list_options(config))
    names: list[str] = []
    for key in keys:
        name = key.removeprefix("--").replace("-", "_")
        found = [name] if name in values else [one for one in values if one.startswith(name + ".")]
        if not found:
            near = [one for one in values if one.startswith(name.rpartition(".")[0] + ".")] or list(list_sections())
            raise ConfigError(f"--explain knows no setting {key!r}: {suggest(name, near)}; --help-all lists every setting")
        names += found
    few = len(names) <= 4  # a whole section is explained without what follows, which takes a moment for each setting
    return "\n\n".join(_explain(name, config, mode, places, help_all, derive if few else None) for name in dict.fromkeys(names))


def _explain(name: str, config: Config, mode: str, places: Mapping[str, Place], help_all: str, derive: Derive | None) -> str:
    value, default = (dict(list_options(one))[name] for one in (config, find_default(config)))
    built_in = dict(list_options(Config()))[name]
    effect, place = EFFECTS[name], places.get(name)
    origin = f"from {place}" if place is not None else "the default of this task and model" if value == default else "follows from others"
    lines = {"value": f"{_show(value)}, {origin}", "default": _show(default)}
    if built_in != default:
        lines["default"] += f" with this task and model; {_show(built_in)} with the built-in ones"
    part = {stage: stage in mode for stage in ("sft", "rl", "dpo")}.get(effect.part or "", True)
    if not part:
        lines["effect"] = f"none in mode {mode}: {_PARTS[effect.part or '']} reads it"
    elif not effect.holds(config, mode):
        lines["effect"] = f"none here: it needs {effect.needs}"
    else:
        lines["effect"] = f"read by {_PARTS[effect.part]}" if effect.part else "read by all stages"
    if derive is not None and (changed := _find_consequences(name, value, config, derive)):
        lines["affects"] = changed
    section = name.rpartition(".")[0]
    near = [spell_option(one) for one, _ in list_options(config) if one != name and one.rpartition(".")[0] == section]
    lines["related"] = ", ".join(near[:8]) + (f", ... (--help {section})" if len(near) > 8 else "")
    elsewhere = [other for other, here in OTHER_NAMES.items() if spell_option(name) in here.replace(",", " ").split()]
    if elsewhere:
        lines["elsewhere"] = ", ".join(elsewhere)
    return "\n".join(
        [spell_option(name), f"  {find_help(help_all, spell_option(name))}", *(f"  {key:<9} {text}" for key, text in lines.items())]
    )


def _find_consequences(name: str, value: Any, config: Config, derive: Derive) -> str | None:
    """Return the numbers that change with twice the value of a setting; None if it is no number, or none changes."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return None
    try:
        before, after = derive(config), derive(_set(config, name.split("."), 2 * value))
    except ConfigError:
        return None
    changed = [f"{key} ({text} -> {after[key]})" for key, text in before.items() if after.get(key, text) != text and ":" not in key]
    if before.get("memory: sum") != after.get("memory: sum"):
        changed.append(f"memory ({before.get('memory: sum')} -> {after.get('memory: sum')})")
    return f"with {_show(2 * value)}: " + "; ".join(changed[:6]) if changed else None


def _set(config: Any, path: Sequence[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _set(getattr(config, path[0]), path[1:], value)
    return replace(config, **{path[0]: inner})


def _show(value: Any) -> str:
    return " ".join(map(str, value)) or "()" if isinstance(value, tuple) else str(value)
