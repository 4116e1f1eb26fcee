"""Log-probs of preference pairs under the reference, computed once and kept in a file of the run.

Its first line marks the reference, {"reference": MARK}; each further one names a pair by a hash of its tokens, [HASH, chosen, rejected]. So
a run that ends while it scores goes on where it was, and of data that have changed only the new pairs are scored.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from integration.settings.config import Config
from integration.settings.made.budgets import context_tokens
from integration.settings.made.library import list_model_numbers
from integration.tasks.data_marks import mark_file
from rollouts.checks import is_finite_number, parse_json
from rollouts.config_files import to_dict
from rollouts.data.preference_pairs import PreferencePair
from rollouts.errors import CheckpointError
from rollouts.output_files import append_text, replace_file

_MODEL_FILES = ("config.json", "*.safetensors", "*.bin", "*.py")


def mark_reference(config: Config, source: Path | None) -> str:
    """Return a hash of all that the reference's log-probs depend on, wherever its files are.

    It covers the settings and seed of the built-in model, or names, sizes and content of the model files (pieces of the large ones, as in
    marks of data), the dtypes, and the adapters' settings, which may quantize the weights below them.

    Args:
        source: the model directory that the stage starts from; None = config.model.
    """
    other = config.reference.path
    place = other or source or config.model.path
    facts: dict[str, Any] = {"computed in": config.backend.precision(config.model.device)}
    facts["kept in"] = config.backend.master_dtype if other is None else config.reference.dtype
    if other is None and config.lora.rank > 0:
        facts["adapters"] = to_dict(config.lora)
    if place is None:
        facts |= {"seed": config.seed, "model": list_model_numbers(config.model, context_tokens(config))}
    else:
        files = sorted({path for pattern in _MODEL_FILES for path in Path(place).glob(pattern)})
        facts["files"] = {path.name: asdict(mark_file(path)[0]) for path in files}
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def hash_pair(pair: PreferencePair) -> str:
    """Return a hash of the tokens of both answers, and of those among them that count."""
    digest = blake2b(digest_size=16)
    for answer in (pair.chosen, pair.rejected):
        digest.update(len(answer.tokens).to_bytes(8, "little"))
        digest.update(array("q", answer.tokens).tobytes())
        digest.update(array("d", answer.loss_mask).tobytes())
    return digest.hexdigest()


def open_scores(path: Path, mark: str, *, is_used: bool) -> dict[str, tuple[float, float]]:
    """Return the scores in a file by hash_pair; without a file of this reference, begin one.

    Args:
        mark: result of mark_reference.
        is_used: whether a checkpoint was trained with the scores; a file of another reference is then an error, and otherwise replaced.

    Raises: CheckpointError for a file that is damaged or of another reference, if it is used; OutputError.
    """
    if path.exists():
        try:
            return _read_scores(path, mark)
        except CheckpointError:
            if is_used:
                raise
    replace_file(path, json.dumps({"reference": mark}) + "\n")
    return {}


def append_scores(path: Path, scores: Mapping[str, tuple[float, float]]) -> None:
    """Append scores to the file. Raises OutputError."""
    append_text(path, "".join(json.dumps([name, *numbers]) + "\n" for name, numbers in scores.items()), flush=True)


def _read_scores(path: Path, mark: str) -> dict[str, tuple[float, float]]:
    again = "delete it, and the log-probs are computed again"
    try:
        whole, _, rest = path.read_text(encoding="utf-8").rpartition("\n")
        first, *lines = whole.splitlines()
        found = parse_json(first)["reference"]
        known = {str(name): (chosen, rejected) for name, chosen, rejected in map(parse_json, lines)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {again}") from error
    if bad := [numbers for numbers in known.values() if not all(map(is_finite_number, numbers))]:
        raise CheckpointError(f"{path} is damaged (it holds {bad[0]}, expected log-probs): {again}")
    if found != mark:
        raise CheckpointError(
            f"{path} holds log-probs of another reference than this run's: restore the model (--reference.path or --model.path), or start "
            "a new run"
        )
    if rest:  # the machine failed while the line was written
        replace_file(path, whole + "\n")
    return known
