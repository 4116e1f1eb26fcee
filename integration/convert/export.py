"""Export of a trained model: a plain directory with its card, published if asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from integration.convert.card import CARD_FILE, describe_model
from integration.convert.push import check_push, push_model
from integration.convert.weights import convert, find_source
from rollouts.output_files import replace_file


def export(source: Path, target: Path, *, push_to_hub: str | None = None, **options: object) -> str:
    """Convert a model, write its card, and publish it. Returns a line that says what was made.

    Args:
        options: further arguments of integration.convert.weights.convert.

    Raises: as convert and push_model.
    """
    if push_to_hub is not None:
        check_push(push_to_hub)
    found = find_source(source)
    settings: dict[str, object] = {"dtype": None, "max_file_bytes": sys.maxsize} | options
    count = convert(found, target, **settings)  # type: ignore[arg-type]
    replace_file(target / CARD_FILE, describe_model(found.run, found.directory, push_to_hub))
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    told = f"{target}: {count:,} weights of {found.directory}, {size / 2**20:,.4g} MiB"
    return told if push_to_hub is None else f"{told}; published: {push_model(target, push_to_hub)}"
