"""torchax, which runs PyTorch operators on JAX arrays: tried, and refused with the reason. See docs/backends.md.

The functional step (rollouts.backends.functional) is what it would carry: a module called with its parameters as values. As released
today it cannot be imported beside the PyTorch of this package, so there is nothing to build on.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Never

from rollouts.errors import ConfigError

TRIED = "torchax 0.0.13 with torch 2.13.0 and jax 0.10.2"
FOUND = "import torchax raises AttributeError: The underlying op of 'aten.prod' has no overload name 'dim_Dimname'"
"""Its tables of operators name the overloads for named tensors (aten.prod.dim_Dimname, aten.index_copy.dimname, aten.all.dimname, ...),
which PyTorch removed."""


def create_torchax_backend(model: Any, **settings: Any) -> Never:
    """Raise ConfigError: what was tried, what failed, what is found in this Python, and what to use instead."""
    raise ConfigError(
        f"torchax is not supported. Tried: {TRIED}; {FOUND}. Here: {_describe_here()}. "
        "For JAX use --backend.kind jax (create_jax_backend), for a functional state in PyTorch --backend.kind torch_func"
    )


def _describe_here() -> str:
    """What happens in this Python when torchax is imported."""
    try:
        importlib.import_module("torchax")
    except ModuleNotFoundError as error:
        if error.name == "torchax":
            return "torchax is not installed"
        return f"import torchax raises {error}"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{_name_versions()}, where import torchax raises {type(error).__name__}: {error}"
    return f"{_name_versions()}, which can be imported, but this package has no backend on it"


def _name_versions() -> str:
    return " with ".join(f"{name} {_version_of(name)}" for name in ("torchax", "torch", "jax"))


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
