"""gigpo: our compositions for the vectors of this group."""

from __future__ import annotations

from parity.mapping import Parity

MAPPINGS: dict[str, Parity] = {}
NOT_OFFERED: dict[str, str] = {}
