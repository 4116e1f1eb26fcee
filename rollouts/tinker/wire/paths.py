"""Paths of what clients save: tinker://RUN/weights/NAME and tinker://RUN/sampler_weights/NAME, each a directory below the server's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from rollouts.errors import DataError

Kind: TypeAlias = Literal["weights", "sampler_weights"]
"""weights = all of the state of training, to go on from; sampler_weights = a model directory, to sample from."""

SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_~:-][A-Za-z0-9_.~:-]{0,199}")  # no slash, and no dot at the beginning: nothing leads out of a directory


@dataclass(frozen=True)
class SavedPath:
    """A place below the directory of a server."""

    run: str  # id of the model that it was saved from
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    def locate(self, root: Path) -> Path:
        """Return the directory. Raises DataError if a link in it leads out of the root."""
        found = root / self.run / self.kind / self.name
        if not found.resolve().is_relative_to(root.resolve()):
            raise DataError(f"{self} leads out of the directory of this server, by a link: {found}")
        return found


def make_path(run: str, kind: Kind, name: str) -> SavedPath:
    """Return the place of a name that a client has chosen. Raises DataError for what can be none."""
    if _NAME.fullmatch(name) is None:
        raise DataError(f"{name!r:.100} cannot be a name of saved weights: letters, digits and _ . ~ : -, at most 200, not first a dot")
    return SavedPath(run, kind, name)


def parse_path(text: str, kinds: tuple[Kind, ...]) -> SavedPath:
    """Read a path of one of these kinds. Raises DataError."""
    parts = text.removeprefix(SCHEME).split("/")
    good = text.startswith(SCHEME) and len(parts) == 3 and parts[1] in kinds
    if not good or _NAME.fullmatch(parts[0]) is None or _NAME.fullmatch(parts[2]) is None:
        forms = " or ".join(f"{SCHEME}RUN/{kind}/NAME" for kind in kinds)
        raise DataError(f"the path is {text!r:.200}, expected {forms}, as saving returns it")
    return SavedPath(parts[0], cast("Kind", parts[1]), parts[2])
