"""Reward models: sequence-classification models with one label, made, loaded, and as backends to be trained on pairs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch

from rollouts.backends.factory import (
    assemble_backend,
    check_model_directory,
    create_model_with_head,
    explain_loading,
    load_hf_model,
    open_model,
    parse_dtype,
)
from rollouts.backends.optimizers import ScheduledAdamWArguments, create_rule, takes
from rollouts.backends.outputs import compute_scores, get_value_head
from rollouts.backends.pytorch import PyTorchTrainingBackend
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

READS_TURN_END = "rollouts_reads_turn_end"
"""Key of a model's configuration: true if its score is read at an answer's end-of-turn token, not behind what the template adds."""


def create_reward_model(model: PreTrainedModel, *, seed: int = 0, head_std: float | None = None) -> PreTrainedModel:
    """A reward model whose backbone is a copy of a causal language model's, with a fresh head; shares no weight with `model`.

    Args:
        seed, head_std: of the head, see init_value_head.

    Raises: ConfigError if transformers has no sequence-classification model for this architecture.
    """
    from transformers import AutoModelForSequenceClassification

    return create_model_with_head(AutoModelForSequenceClassification, model, {READS_TURN_END: True}, seed=seed, head_std=head_std)


def load_reward_model(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a sequence-classification model with one label from a directory. Nothing is downloaded.

    Args:
        dtype: of the parameters; float32 if it is to be trained.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Returns: the model, in eval mode.
    Raises: ConfigError if the directory is not a complete model of this kind: a language model, several labels, a head that is more than
        one linear layer.
    """
    from transformers import AutoModelForSequenceClassification

    directory = check_reward_model(path, trust_remote_code=trust_remote_code)
    with explain_loading(directory, "reward model (a sequence-classification model with one label)"):
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=parse_dtype(dtype), local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    missing = sorted(cast("dict[str, Any]", info)["missing_keys"])
    if missing:
        raise ConfigError(f"{directory} lacks the weights {missing[:5]}: it is not a complete reward model")
    model = cast("PreTrainedModel", loaded)
    _check_score_head(model, directory)
    return cast("PreTrainedModel", cast("torch.nn.Module", model).to(device).eval())


def check_reward_model(path: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The path, if its configuration is that of a reward model; loads no weights. Raises ConfigError as load_reward_model."""
    from transformers import AutoConfig

    directory = check_model_directory(path)
    with explain_loading(directory, "reward model (a sequence-classification model with one label)"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if not is_reward_model(config):
        kinds = cast("list[str]", getattr(config, "architectures", None) or [])
        raise ConfigError(
            f"{directory} is a {' or '.join(kinds) or 'model of no stated kind'}, expected one ending with ForSequenceClassification: "
            "it has no head that scores. Train one from it (train_reward_model), or serve a model of another kind and ask it over HTTP "
            "(open_remote_reward)"
        )
    num_labels = int(cast("Any", config).num_labels)
    if num_labels != 1:
        raise ConfigError(
            f"{directory} has {num_labels} labels, expected 1: a reward model gives one score, a classifier of several classes none. "
            "Give a reward model, or a reward function of your own that makes one number of the classes"
        )
    return directory


def is_reward_model(config: Any) -> bool:
    """Whether a model configuration says that its weights are those of a sequence-classification model."""
    return any(kind.endswith("ForSequenceClassification") for kind in getattr(config, "architectures", None) or [])


def reads_turn_end(model: PreTrainedModel) -> bool:
    """Whether the score is that of an answer's last own token, as of all models that create_reward_model made.

    Other models are as a rule trained on conversations as the chat template renders them, with what it puts behind the last message.
    """
    return bool(getattr(model.config, READS_TURN_END, False))


def load_reward_start(
    path: str | Path, *, seed: int = 0, head_std: float | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """What a reward model is trained from: a saved one as it is, or the backbone of a language model with a fresh head.

    Args:
        seed, head_std: of a fresh head, see init_value_head.

    Raises: ConfigError as load_reward_model and load_hf_model.
    """
    from transformers import AutoConfig

    directory = check_model_directory(path)
    with explain_loading(directory, "reward model"):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if is_reward_model(config):
        return load_reward_model(directory, trust_remote_code=trust_remote_code)
    return create_reward_model(load_hf_model(directory, trust_remote_code=trust_remote_code), seed=seed, head_std=head_std)


@takes(ScheduledAdamWArguments)
def create_reward_model_backend(
    model: str | Path | PreTrainedModel,
    *,
    seed: int = 0,
    head_std: float | None = None,
    device: str | torch.device = "cpu",
    compute_dtype: str | torch.dtype = "float32",
    tokenizer: PreTrainedTokenizerBase | None = None,
    **adamw: Unpack[ScheduledAdamWArguments],
) -> PyTorchTrainingBackend:
    """A backend whose outputs.values are scores: position t has seen tokens[:, :t + 1]. For train_reward_model.

    What it exports and checkpoints is a complete directory of a sequence-classification model.

    Args:
        model: a directory of a causal language model (its backbone with a fresh head) or of a reward model (as it is), or such a model. A
            language model is copied.
        seed, head_std: of a fresh head, see init_value_head.
        tokenizer: None with a directory = the one in it.
        lr and the others of AdamW and its schedule: see optimizers.ScheduledAdamWArguments.
    """
    rule = create_rule(**adamw)
    model, tokenizer = open_model(model, tokenizer, partial(load_reward_start, seed=seed, head_std=head_std))
    if model.get_output_embeddings() is not None:
        model = create_reward_model(model, seed=seed, head_std=head_std)
    return assemble_backend(model, rule, device, compute_dtype, tokenizer, compute_outputs=compute_scores)


def _check_score_head(model: PreTrainedModel, directory: Path) -> None:
    try:
        get_value_head(model)
    except ConfigError as error:
        raise ConfigError(
            f"{directory} is a {type(model).__name__}, whose head is not one linear layer over the last token's hidden state: "
            "serve it, and ask it over HTTP (open_remote_reward)"
        ) from error
