"""Checks of the user's model and tokenizer at the start of a command, before anything is written: what was found, and what to do.

Weights are checked by the headers of their files; none are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from integration.dry_run.sizes import read_adapter_sizes, read_sizes
from integration.parts.model_settings import check_kind, read_model_config
from integration.settings.config import Config
from rollouts.chat.template_checks import describe_template, find_fault, find_turn_end
from rollouts.data.model_limits import read_config_limits
from rollouts.engines.weights.checkpoint_check import read_eos_token_ids
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.loading import check_model_directory, load_tokenizer
from rollouts.models.weights import base_weights, converts_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_model(config: Config, *, weights: bool = True) -> None:
    """Raise ConfigError if the user's model cannot be trained: another kind of model, quantized, weights or adapters that do not fit.

    Args:
        weights: whether its weights are on this disk already; a dry run does not download them.
    """
    path = config.model.path
    if path is None:
        _check_adapters(config)
        return
    directory = check_model_directory(path, weights=weights)
    description = read_model_config(config)
    check_kind(description, directory)
    quantization = getattr(description, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else getattr(quantization, "quant_method", None)
        raise ConfigError(
            f"the weights in {directory} are quantized ({method or 'quantization_config in config.json'}), and cannot be trained: give the "
            "model that they were made from; --lora.rank with --lora.base-dtype nf4 then keeps it in 4 bits"
        )
    if weights:
        from rollouts.backends.fsdp.load import load_hf_model_on_meta  # takes half a second, as FSDP does

        check_weight_files(load_hf_model_on_meta(directory, trust_remote_code=config.model.trust_remote_code), directory)
    _check_adapters(config)


def check_weight_files(model: PreTrainedModel, directory: Path) -> None:
    """Raise ConfigError if the safetensors files lack weights of a model, or have other shapes. Reads their headers alone.

    Files of other formats, and models whose weights have other names in files than in memory, are checked when they are loaded.
    """
    if not list(directory.glob("*.safetensors")) or converts_weights(model):
        return
    from rollouts.backends.weights.fill import FileWeights  # imports FSDP's tensors

    try:
        with FileWeights(directory) as files:
            shapes = dict(files.shapes)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    own = base_weights(model, keep_vars=True)
    if not shapes.keys() & own.keys():  # saved from the part below the head
        shapes = {f"{model.base_model_prefix}.{name}": shape for name, shape in shapes.items()}
    kind = type(model).__name__
    wrong = [
        f"{name} is {shapes[name]}, expected {tuple(value.shape)}"
        for name, value in own.items()
        if shapes.get(name, value.shape) != value.shape
    ]
    if wrong:
        raise ConfigError(
            f"{directory} has weights of other shapes than the {kind} of its config.json: {'; '.join(wrong[:3])}. The files belong to "
            "different models: copy config.json and weights of one model there"
        )
    given = {id(value) for name, value in own.items() if name in shapes}
    missing = sorted(name for name, value in own.items() if id(value) not in given)
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of the {len(own)} weights of the {kind} of its config.json ({', '.join(missing[:3])}): "
            "it is not a complete language model, or its config.json is of another one"
        )


def describe_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Describe the user's tokenizer and chat template: facts by name, and what needs attention as warnings."""
    if config.model.path is None:
        return {}
    limits, directory = read_config_limits(read_model_config(config)), Path(config.model.path)
    eos_ids, name = read_eos_token_ids(directory), tokenizer.convert_ids_to_tokens
    spare = limits.num_embeddings - len(tokenizer.get_vocab())
    parts = [
        f"{len(tokenizer.get_vocab()):,} tokens for {limits.num_embeddings:,} embeddings" + (f", {spare:,} unused" if spare > 0 else "")
    ]
    pad = "none, so the end of text pads" if tokenizer.pad_token is None else str(tokenizer.pad_token)
    parts.append(f"pad {pad}")
    parts.append(f"end of text {tokenizer.eos_token}")
    facts = {"tokenizer": "; ".join(parts), "chat template": describe_template(tokenizer)}
    fault = find_fault(tokenizer)
    if fault is not None:
        facts["warning of the chat template"] = (
            f"{fault}. Rows of messages or questions cannot be used, those of plain text can: mend chat_template.jinja or chat_template in "
            f"tokenizer_config.json in {directory}, or copy it from the model again"
        )
    end = find_turn_end(tokenizer)
    stops = {*eos_ids, *([tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else [])}
    if eos_ids and isinstance(tokenizer.eos_token_id, int) and tokenizer.eos_token_id not in eos_ids:
        shown = ", ".join(f"{name(i)} ({i})" for i in sorted(eos_ids) if i < limits.num_embeddings)
        facts["warning of the end of text"] = (
            f"the tokenizer's is {tokenizer.eos_token} ({tokenizer.eos_token_id}), that of generation_config.json and config.json {shown}: "
            "generation stops at all of them, SFT of prompt and completion trains the tokenizer's"
        )
    if end is not None and end not in stops:
        facts["warning of the end of a turn"] = (
            f"the chat template ends a turn with {name(end)} ({end}), but generation stops at "
            f"{', '.join(str(name(i)) for i in sorted(stops)) or 'no token'}: answers would run to the token budget. Add {end} to "
            f"eos_token_id in {directory / 'generation_config.json'}, or give --generation.stop"
        )
    return facts


def check_tokenizer_ends(config: Config) -> None:
    """Raise ConfigError if the user's tokenizer has no end of text, at which answers would end."""
    if config.model.path is None:
        return
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {config.model.path} has no end-of-text token, so no answer would end: set eos_token in its "
            "tokenizer_config.json to a token that it has"
        )


def _check_adapters(config: Config) -> None:
    """Raise ConfigError for target modules of adapters that the model does not have."""
    lora = config.lora.create(config.seed)
    if lora is not None:
        read_adapter_sizes(read_sizes(read_model_config(config), trust_remote_code=config.model.trust_remote_code), lora)
