"""Features: methods of an engine or a backend in addition to those of its protocol, declared as a value.

    class MyEngine:
        features = frozenset({EngineFeature.SCORES})    # so it has recompute_output_log_probs()

An object has exactly the features that it declares: without the attribute `features` it has none, whatever methods it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import TypeVar, cast

from rollouts.errors import ConfigError

F = TypeVar("F", bound=StrEnum)


def read_features(owner: object, attributes: Mapping[F, tuple[str, ...]]) -> frozenset[F]:
    """Return the features that an object declares; none without an attribute `features`.

    Args:
        attributes: each known feature with the names of the methods and properties that it promises.

    Asserts: the object declares known features only, and has their methods and properties.
    """
    declared = cast("Collection[F]", getattr(owner, "features", ()))
    kind = type(owner).__name__
    for feature in declared:
        assert feature in attributes, f"{kind} declares the feature {feature!s}, expected one of {', '.join(attributes)}"
        missing = [name for name in attributes[feature] if not _has_attribute(owner, name)]
        assert not missing, f"{kind} declares the feature {feature!s}, but has no {' and no '.join(missing)}"
    return frozenset(feature for feature in attributes if feature in declared)


def refuse_without_feature(
    owner: object, feature: F, attributes: Mapping[F, tuple[str, ...]], *, needed_by: str, name: str | None, instead: str
) -> ConfigError:
    """Return the error that names a missing feature, its user, the declared features, and an alternative.

    Args:
        name: name of the object; None = its attribute `name`, else its class.
        instead: sentence that names the alternative.
    """
    declared, methods = read_features(owner, attributes), ", ".join(attributes[feature])
    found = f"it has {', '.join(sorted(declared))}"
    if not declared:
        found = f"it declares none (a class with {methods} does so by `features = frozenset({{{type(feature).__name__}.{feature.name}}})`)"
    name = str(getattr(owner, "name", type(owner).__name__)) if name is None else name
    return ConfigError(f"{name} lacks the feature {feature!s} ({methods}), which {needed_by} needs; {found}. {instead}".rstrip())


def _has_attribute(owner: object, name: str) -> bool:
    return hasattr(type(owner), name) or hasattr(owner, name)  # a property of the class is not evaluated
