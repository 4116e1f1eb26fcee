"""Post-training for language models, as pure functions over frozen values, with trio.

Every public name can be imported from here and from its package; its module is loaded when the name is first used, so `import rollouts`
is quick and loads neither torch nor transformers. `__init__.pyi` lists the names. docs/reference.md says what each is.
"""

from __future__ import annotations

from rollouts._lazy import attach_stub

__version__ = "0.1.0"
__getattr__, __dir__ = attach_stub(__name__, __file__)
