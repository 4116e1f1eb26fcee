"""Adapters of peft on disk: the model that they were trained on, and both as one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rollouts.backends.lora.files import CONFIG_FILE as ADAPTER_CONFIG
from rollouts.config_files import read_json
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_base(adapters: Path, advice: str, given: str | None = None) -> str:
    """Return the directory of the model that adapters were trained on.

    Args:
        adapters: directory with adapter_config.json and weights.
        advice: what to do if it is not here, for the error.
        given: the directory; None = the one that adapter_config.json names.

    Raises: ConfigError.
    """
    base = given or read_json(adapters / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ConfigError(f"{adapters} holds adapters, and their base {base or '(none named)'} is no directory here: {advice}")
    return base


def merge_adapters(model: PreTrainedModel, adapters: Path) -> PreTrainedModel:
    """Return the model with adapters merged into its weights, in their dtype. Raises ConfigError if they are not of this model."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"the adapters in {adapters} are merged by the package peft: pip install 'rollouts-rl[lora]'") from error
    try:
        return cast("Any", PeftModel).from_pretrained(model, str(adapters)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the adapters in {adapters} do not fit their base: {reason}") from error
