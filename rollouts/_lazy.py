"""Public names that are loaded on first use: those in the stub beside a package's `__init__.py`.

The stub is the only list. An editor and a type checker read it; at run time it is read when the first name is asked for. So
`import rollouts` takes milliseconds, loads neither torch nor transformers, and works in the first process of a sandbox, which has
nothing but the standard library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) for a package with an `__init__.pyi`.

    `from .module import name as name` in the stub is one public name, `from .package import *` are all public names of that package.
    `__all__` is the sorted list of them. No name may be that of a module of the package: whoever imports the module would hide it.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.
    """

    @cache
    def find_places() -> dict[str, str]:
        """Read the stub: public name -> module that it comes from."""
        import ast  # 5 ms, which `import rollouts` does not pay

        places: dict[str, str] = {}
        with open(f"{file}i", encoding="utf-8") as stub:  # __init__.py -> __init__.pyi
            statements = ast.parse(stub.read()).body
        for node in statements:
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                module = f"{package}.{node.module}"
                names = [alias.name for alias in node.names]
                places |= dict.fromkeys(importlib.import_module(module).__all__ if names == ["*"] else names, module)
        return places

    def get_attribute(name: str) -> Any:
        if name == "__all__":
            return sorted(find_places())
        if not name.startswith("__") and name in (places := find_places()):
            return getattr(importlib.import_module(places[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *find_places()})

    return get_attribute, list_attributes
