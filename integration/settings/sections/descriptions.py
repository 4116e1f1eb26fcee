"""Metadata with which the field of a section in a larger one has its help."""

from __future__ import annotations

import inspect


def describe_section(section: type | str) -> dict[str, str]:
    """Return the metadata of a field with a section: its help, which tyro would else look for in the source at every start.

    Args:
        section: the class whose docstring is the help, or the help.
    """
    return {"help": section if isinstance(section, str) else inspect.cleandoc(section.__doc__ or "")}
