"""Directories that servers know under other paths than the trainer: a shared disk mounted at different places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Self

from rollouts.errors import ConfigError


@dataclass(frozen=True)
class PathMap:
    """Pairs of prefixes, here and at the servers. The first match applies; a path without a match is the same on both sides."""

    prefixes: tuple[tuple[Path, PurePath], ...] = ()  # (here, at the servers), absolute

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Parse texts such as "/data/runs=/mnt/runs". Raises ConfigError."""
        pairs: list[tuple[Path, PurePath]] = []
        for text in texts:
            here, equals, there = text.partition("=")
            if not equals or not PurePath(here).is_absolute() or not PurePath(there).is_absolute():
                raise ConfigError(
                    f"{text!r} maps no paths: write the prefix here and the one at the servers, both absolute, as /data/runs=/mnt/runs"
                )
            pairs.append((Path(here), PurePath(there)))
        return cls(tuple(pairs))

    def to_server(self, path: Path) -> PurePath:
        """Return the servers' path of a local directory."""
        for here, there in self.prefixes:
            if path.is_relative_to(here):
                return there / path.relative_to(here)
        return path

    def to_local(self, path: str) -> Path:
        """Return the local path of a server's directory."""
        for here, there in self.prefixes:
            if PurePath(path).is_relative_to(there):
                return here / PurePath(path).relative_to(there)
        return Path(path)
