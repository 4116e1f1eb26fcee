"""What can be read off an Algorithm, which is a value: the coefficients of its KL terms."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rollouts.algorithms import Chain
from rollouts.types import Algorithm


def find_kl_coefs(algorithm: Algorithm) -> dict[str, list[float]]:
    """The coefficients other than 0 of its KL terms, by where they are: "in the reward" (estimate) and "in the loss".

    Of a function that is no functools.partial, such as a closure, it is not known what it holds: nothing is found there.
    """
    places = {"in the reward": algorithm.estimate, "in the loss": algorithm.loss}
    found = {place: [float(k["kl_coef"]) for k in _find_keywords(part) if k.get("kl_coef")] for place, part in places.items()}
    return {place: coefficients for place, coefficients in found.items() if coefficients}


def _find_keywords(part: Any) -> Iterator[dict[str, Any]]:
    """The keywords of every partial in a composition."""
    inside: tuple[Any, ...] = part.steps if isinstance(part, Chain) else ()
    if isinstance(part, partial):
        yield part.keywords
        inside = (part.func, *part.args, *part.keywords.values())
    for value in inside:
        yield from _find_keywords(value)
