"""Checks of a run's models that need no weights: their configurations and tokenizers, and the settings of backends.

A dry run makes them too, so nothing here imports transformers or a backend before it is needed.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.settings.config import Config
from integration.settings.made.budgets import context_tokens
from integration.settings.made.library import list_model_numbers
from integration.settings.option_effects import spell_option
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.preference import PreferenceSection
from integration.settings.sections.stages import RLSection, SFTSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.chat.tokenize import ensure_pad_token
from rollouts.checks import parse_json
from rollouts.config import OptimizerConfig
from rollouts.config_files import suggest
from rollouts.data.model_limits import check_tokenizer, read_config_limits
from rollouts.errors import ConfigError
from rollouts.models.loading import check_model_directory, explain_remote_code, is_of_kind, load_tokenizer
from rollouts.models.tokens import TokenSpec, describe_tokenizer, explain_token_differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class BuiltInModel:
    """Numbers of the built-in model under the names of its Hugging Face configuration, which takes transformers to create."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    model_type: str = "qwen3"

    def get_text_config(self) -> BuiltInModel:
        """Return the numbers themselves, as the configuration of a text model does."""
        return self


def read_model_config(config: Config, path: Path | None = None) -> Any:
    """Read the Hugging Face configuration of a model directory, or the BuiltInModel, without weights."""
    path = find_directory(config, path)
    if path is None:
        return BuiltInModel(**list_model_numbers(config.model, context_tokens(config)))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    directory = check_model_directory(path, weights=False)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise ConfigError(
            f"{directory} has no readable model configuration: {explain_remote_code(error)}{_advise_config(directory, error)}"
        ) from error


def _advise_config(directory: Path, error: Exception) -> str:
    """Return advice for a config.json that transformers does not read."""
    if "trust_remote_code" in str(error):  # explained already
        return ""
    path, again = directory / "config.json", "copy or download config.json of the model again"
    try:
        start = path.read_text(encoding="utf-8")
        found = parse_json(start)
    except (OSError, ValueError):
        pointer = path.read_bytes().startswith(b"version https://git-lfs") if path.is_file() else False
        return ". It is a pointer of Git LFS: run `git lfs pull` where it was cloned" if pointer else f": {again}"
    kind = found.get("model_type") if isinstance(found, dict) else None
    if not isinstance(kind, str):
        return f": {again}"
    from transformers import CONFIG_MAPPING, __version__

    if kind in CONFIG_MAPPING:
        return f". Correct the value in config.json, or {again}"
    return (
        f" (here version {__version__}). Correct model_type in config.json ({suggest(kind, CONFIG_MAPPING)[:200]}), or, for a newer model, "
        "update the package: pip install -U transformers"
    )


def find_directory(config: Config, path: Path | None) -> Path | None:
    """Return the given directory, or that of config.model; None for the built-in model."""
    return Path(config.model.path) if path is None and config.model.path is not None else path


def create_tokenizer(config: Config, source: Path | None = None) -> PreTrainedTokenizerBase:
    """Create the tokenizer of a directory, or of the built-in model."""
    path = find_directory(config, source)
    if path is None:
        return create_char_tokenizer(config.model.vocab_size)
    return load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)


def check_optimizers(section: BackendSection, optimizers: Mapping[str, OptimizerConfig], *, precision: str, adapters: bool = False) -> None:
    """Raise ConfigError if the backend has not the moments or the trained weights that are asked for.

    Args:
        optimizers: those of the run, by their section.
        precision: dtype of matrix products.
        adapters: whether adapters are trained.
    """
    quantized = [name for name, optimizer in optimizers.items() if optimizer.moments != "float32"]
    if quantized and section.kind != "pytorch":
        raise ConfigError(
            f"{quantized[0]}.optimizer.moments is '8bit' with backend.kind {section.kind!r}, which keeps Adam's moments in float32: leave "
            f"--{quantized[0]}.optimizer.moments out, or train with --backend.kind pytorch"
        )
    if quantized and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{quantized[0]}.optimizer.moments is '8bit', which needs the package torchao: pip install 'rollouts-rl[low-memory]'"
        )
    if section.master_dtype == "float32":
        return
    if adapters:
        raise ConfigError("backend.master_dtype is 'bfloat16' with lora.rank, but adapters are small: take --lora.base-dtype bfloat16")
    if precision == "float32":
        raise ConfigError(
            "backend.master_dtype is 'bfloat16', but matrix products are in float32: add --backend.compute-dtype bfloat16, or leave "
            "--backend.master-dtype out"
        )
    exact = [name for name in optimizers if name not in quantized]
    if exact:
        raise ConfigError(
            f"backend.master_dtype is 'bfloat16', but {exact[0]}.optimizer.moments is 'float32', whose updates would be lost in rounding: "
            f"add --{exact[0]}.optimizer.moments 8bit, which rounds stochastically"
        )


def _list_stages(config: Config, mode: str) -> dict[str, SFTSection | RLSection | PreferenceSection]:
    """Return the section of each stage of a mode, by its name."""
    sections = {"sft": config.sft, "rl": config.rl, "dpo": config.preference}
    names = {"dpo": "preference"}
    return {names.get(stage, stage): section for stage, section in sections.items() if stage in mode}


def check_backend(config: Config, mode: str = "sft+rl") -> None:
    """Raise ConfigError if the backend cannot train the configured model in a mode. Loads no weights."""
    kind, path = config.backend.kind, config.model.path
    if config.lora.rank and kind in ("torch_func", "jax"):
        raise ConfigError(f"lora.rank is {config.lora.rank} with backend.kind {kind!r}: adapters are trained with 'pytorch' and 'fsdp'")
    if config.lora.base_dtype == "nf4":
        if kind == "fsdp":
            raise ConfigError(
                "lora.base_dtype is 'nf4' with backend.kind 'fsdp', which does not shard weights in 4 bits: take --lora.base-dtype "
                "bfloat16, or train on one GPU with --backend.kind pytorch"
            )
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError("lora.base_dtype is 'nf4', which needs the package bitsandbytes: pip install 'rollouts-rl[low-memory]'")
    if config.backend.precision(config.model.device) == "float32":
        why = "but matrix products are in float32: add --backend.compute-dtype bfloat16, or leave"
        if config.lora.base_dtype != "float32":
            raise ConfigError(f"lora.base_dtype is {config.lora.base_dtype!r}, {why} --lora.base-dtype out")
        if config.reference.dtype != "float32":
            raise ConfigError(f"reference.dtype is {config.reference.dtype!r}, {why} --reference.dtype out")
        if config.teacher.dtype != "float32":
            raise ConfigError(f"teacher.dtype is {config.teacher.dtype!r}, {why} --teacher.dtype out")
    used = {name: section.optimizer for name, section in _list_stages(config, mode).items()}
    asks = config.backend.master_dtype != "float32" or config.critic.optimizer.moments != "float32"
    if "rl" in mode and asks and "values" in config.algorithm.requires:
        used["critic"] = config.critic.optimizer
    check_optimizers(config.backend, used, precision=config.backend.precision(config.model.device), adapters=config.lora.rank > 0)
    if kind == "jax":
        from rollouts.backends.fsdp.load import load_hf_model_on_meta
        from rollouts.backends.jax.backend import check_policy, require_jax
        from rollouts.backends.jax.model import read_decoder_config

        check_policy(config.on_bad, "on_bad")
        require_jax()
        if path is not None:
            read_decoder_config(load_hf_model_on_meta(path, trust_remote_code=config.model.trust_remote_code))


def settle_weight_sync(config: Config) -> Config:
    """Choose the disk for new weights of a model whose files have other names than its memory, since servers know those. Loads no weights.

    Raises: ConfigError for another transport that the user chose.
    """
    how, path = config.engine.weight_sync, config.model.path
    if not config.engine.is_server or how == "disk" or path is None:
        return config
    from rollouts.backends.fsdp.load import load_hf_model_on_meta  # takes half a second, as FSDP does
    from rollouts.models.weights import converts_weights

    model = load_hf_model_on_meta(path, trust_remote_code=config.model.trust_remote_code)
    if not converts_weights(model):
        return config
    if how != "auto":
        raise ConfigError(
            f"engine.weight_sync is {how!r}, but weights of a model of type {model.config.model_type!r} have other names and shapes in "
            "memory than in files, which are those that servers know: use disk"
        )
    return replace(config, engine=replace(config.engine, weight_sync="disk"))


def check_limits(config: Config, mode: str) -> None:
    """Raise ConfigError if the tokenizer does not match the model, or the token budget exceeds its context. Loads no weights."""
    model = read_model_config(config)
    limits = read_config_limits(model)
    if config.model.path is not None:
        check_tokenizer(create_tokenizer(config), limits.num_embeddings, config.model.path)
    budget, context = config.generation.max_tokens, limits.context_length
    if "rl" in mode and budget is not None and context is not None and budget >= context:
        raise ConfigError(
            f"generation.max_tokens is {budget}, but the model's context has {context} tokens, with the prompt: give a smaller "
            "--generation.max-tokens, or a model with a longer context (--model.max-length of the built-in one)"
        )


def check_dropout(config: Config, mode: str) -> None:
    """Raise ConfigError if adapters have dropout but no stage of the mode trains with it."""
    stages = {name: section.dropout for name, section in _list_stages(config, mode).items()}
    if config.lora.dropout and not any(stages.values()):
        why = ": RL has none by default, because it makes policy ratios noisy" if "rl" in stages else ""
        raise ConfigError(
            f"lora.dropout is {config.lora.dropout}, but no stage of mode {mode!r} trains with dropout{why}. Leave --lora.dropout out, or "
            f"add {' or '.join(f'--{name}.dropout' for name in stages)}"
        )


def check_kind(description: Any, directory: Path, option: str = "--model.path") -> None:
    """Raise ConfigError if a model's configuration is not that of a causal language model. option: the option that named the directory."""
    kinds = list(getattr(description, "architectures", None) or ())
    for kind, advice in (
        ("ForSequenceClassification", "it is a reward model or a classifier: --reward.model takes a reward model"),
        ("ForTokenClassification", "it is a critic or a tagger: --critic.path takes a critic"),
        ("ForMaskedLM", "it fills gaps and writes no text"),
    ):
        if is_of_kind(description, kind):
            raise ConfigError(
                f"{directory} is a {' or '.join(kinds)}, expected a causal language model (its architecture ends with ForCausalLM): "
                f"{advice}. Give {option} the directory or name of a language model"
            )


def check_companions(config: Config, source: Path | None = None) -> None:
    """Raise ConfigError if the reference is no language model, or if its tokens, the critic's or the teachers' differ from the policy's.

    Loads no weights.

    Args:
        source: the policy's directory if it is not that of config.model.
    """
    others = [("reference.path", config.reference.path), ("critic.path", config.critic.path)]
    others += [("teacher.each" if name else "teacher.path", path) for name, path in config.teacher.models.items()]
    others.append(("teacher.tokenizer", config.teacher.tokenizer))
    for name, path in others:
        if path is None:
            continue
        try:
            found = _read_tokens(config, Path(path))
            description = read_model_config(config, Path(path))
        except ConfigError as error:
            raise ConfigError(f"{name} is {path!r}: {error}") from error
        if name == "reference.path":
            check_kind(description, Path(path), "--reference.path")
        differences = explain_token_differences(_read_tokens(config, source), found)
        if differences:
            raise ConfigError(
                f"{name} is {path}, whose tokens are not the policy's: {'; '.join(differences)}. "
                f"Give the policy's own model or one of its family, or leave {spell_option(name)} out"
            )


def _read_tokens(config: Config, path: Path | None) -> TokenSpec:
    """Return the tokens of a model directory or of the built-in model, from configuration and tokenizer."""
    directory = find_directory(config, path)
    if directory is None:
        tokenizer = create_char_tokenizer(config.model.vocab_size)
    else:
        tokenizer = load_tokenizer(directory, trust_remote_code=config.model.trust_remote_code)
    with warnings.catch_warnings(action="ignore"):  # the stages warn about the policy
        ensure_pad_token(tokenizer)  # SFT checkpoints have a pad token, their original model may not
    return describe_tokenizer(tokenizer, int(read_model_config(config, path).get_text_config().vocab_size))
