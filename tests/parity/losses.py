"""losses: our compositions for the vectors of this group, by framework."""

from __future__ import annotations

from parity import losses_areal, losses_prime, losses_slime, losses_trl, losses_verl
from parity.mapping import Parity

MODULES = (losses_areal, losses_prime, losses_slime, losses_trl, losses_verl)
MAPPINGS: dict[str, Parity] = {name: parity for module in MODULES for name, parity in module.MAPPINGS.items()}
NOT_OFFERED: dict[str, str] = {name: why for module in MODULES for name, why in module.NOT_OFFERED.items()}
