"""Models of a run that its settings name by their names on the hub: found in the local cache or downloaded, and recorded with their commit.

A run reads the files of the cache. Its config.json keeps the names and the commits, so that a resumed run reads the very same files.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from integration.settings.config import Config
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections.data import DataSection
from rollouts.errors import ConfigError
from rollouts.models.hub import HubModel, find_hub_model, is_hub_name

AnyConfig = TypeVar("AnyConfig", Config, RewardModelConfig)

_PLACES = (("model", "path"), ("reference", "path"), ("teacher", "path"), ("teacher", "tokenizer"), ("critic", "path"), ("reward", "model"))
"""Settings that name a model: section and field."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def names_hub_model(config: Config | RewardModelConfig) -> bool:
    """Whether any model of a run is named by its name on the hub."""
    return any(is_hub_name(_split(path)[0]) for _, _, path in _list_paths(config))


def names_hub_data(*paths: str | None) -> bool:
    """Whether any of the paths of data, or of the expressions of a mixture, names a data set of the hub: hf://ORG/NAME."""
    return any(path is not None and path.strip().startswith("hf://") for path in paths)


def names_hub(config: Config | RewardModelConfig) -> bool:
    """Whether any model or data of a run is named by its name on the hub."""
    data = config.data
    more = (*data.mixture, data.rollouts) if isinstance(data, DataSection) else ()
    if isinstance(config, Config):
        more = (*more, config.preference.path, config.preference.eval_path)
    return names_hub_model(config) or names_hub_data(data.path, data.eval_path, *more)


def find_models(config: AnyConfig, *, weights: bool = True, quiet: bool = False) -> tuple[AnyConfig, AnyConfig]:
    """Find the models that settings name by their names on the hub, ORG/NAME, or ORG/NAME@REVISION.

    Args:
        weights: False = only their configurations and tokenizers, for a dry run.
        quiet: say nothing of downloads.

    Returns: (the settings to record, with the commit of each model; the settings to run with, with the directory of each).
    Raises: ConfigError as find_hub_model; for a revision of a directory.
    """
    recorded: Any = config
    local: Any = config
    revision = config.model.revision
    for section, field, path in _list_paths(config):
        name, at = _split(path)
        own = section == "model"
        if not is_hub_name(name):
            if own and revision is not None:
                raise ConfigError(
                    f"model.revision is {revision!r}, but model.path is the directory {path}: leave --model.revision out, or name a model "
                    "of the hub, ORG/NAME"
                )
            continue
        # the commit that a run has recorded for a branch, in a resumed run and in ranks that the command starts
        settled = own and _COMMIT.fullmatch(revision or "") is not None and _COMMIT.fullmatch(at or "") is None
        if own and at is not None and revision not in (None, at) and not settled:
            raise ConfigError(f"model.path is {path!r}, and model.revision is {revision!r}: leave one of them out")
        found = find_hub_model(
            name,
            revision if settled else at or (revision if own else None),
            weights=weights and field != "tokenizer",
            trust_remote_code=config.model.trust_remote_code,
            option=f"{section}.{field.partition('=')[0]}",
        )
        if not quiet:
            print(f"{section}.{field}: {name} at commit {found.commit}", file=sys.stderr, flush=True)
        recorded = _put(recorded, section, field, found.name if own else f"{found.name}@{found.commit}", found if own else None)
        local = _put(local, section, field, str(found.directory), found if own else None)
    return recorded, local


def _put(config: Any, section: str, field: str, value: str, found: HubModel | None) -> Any:
    if field.startswith("each="):
        name = field.removeprefix("each=") + "="
        each = tuple(name + value if entry.startswith(name) else entry for entry in config.teacher.each)
        return replace(config, teacher=replace(config.teacher, each=each))
    more = {} if found is None else {"revision": found.commit}
    return replace(config, **{section: replace(getattr(config, section), **{field: value}, **more)})


def _list_paths(config: Any) -> list[tuple[str, str, str]]:
    """Return (section, field, value) of each setting that names a model; the field is each=NAME for one of several teachers."""
    places = [(section, field) for section, field in _PLACES if hasattr(config, section)]
    found = [(section, field, path) for section, field in places if (path := getattr(getattr(config, section), field, None)) is not None]
    teacher = getattr(config, "teacher", None)
    several = {} if teacher is None else {name: path for name, path in teacher.models.items() if name}
    return found + [("teacher", f"each={name}", path) for name, path in several.items()]


def _split(path: str) -> tuple[str, str | None]:
    """Return the name and the revision of ORG/NAME@REVISION; a directory keeps its @."""
    name, separator, revision = path.partition("@")
    return (name, revision) if separator and is_hub_name(name) and not Path(path).exists() else (path, None)
