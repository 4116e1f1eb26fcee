"""losses: our compositions for the loss functions of trl."""

from __future__ import annotations

from parity.mapping import Parity

MAPPINGS: dict[str, Parity] = {}
NOT_OFFERED: dict[str, str] = {}
