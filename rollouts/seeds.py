"""Seeds of requests and samples, derived from their keys."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*keys: int) -> int:
    """Return a seed that depends on all keys and their order: the first 63 bits of blake2b over them.

    The randomness of a sample is keyed by (run seed, prompt index, sample's number in its group, tokens already there), so it does not
    depend on what else runs or on how often the run was interrupted.

    Args:
        keys: integers of any size and sign.

    Returns: an integer in [0, 2**63).
    """
    text = ",".join(str(int(key)) for key in keys)
    return int.from_bytes(blake2b(text.encode("ascii"), digest_size=8).digest(), "big") >> 1
