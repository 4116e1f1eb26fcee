"""Critics and reward models: Hugging Face models with a head of one score per token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rollouts.errors import ConfigError
from rollouts.models.forward.output_layers import find_layers_before, get_decoder, get_value_head
from rollouts.models.loading import (
    check_model_directory,
    explain_loading,
    is_of_kind,
    load_hf_model,
    open_model,
    parse_dtype,
    read_model_config,
)
from rollouts.models.weights import merge_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CRITIC = "critic (a token-classification model with one label)"
"""Name of a critic in errors."""

CRITIC_KIND = "ForTokenClassification"


def load_critic_model(
    path: str | Path, *, seed: int = 0, head_std: float | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a saved critic, a reward model as critic, or a causal language model's backbone with a fresh head. Nothing is downloaded.

    Args:
        path: a directory of one of these kinds. The values of a reward model are its scores of the text so far (the initialization of
            Ouyang et al. 2022).
        seed, head_std: for a fresh head, see init_value_head.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Returns: a token-classification model with one label, float32, on the CPU, without dropout in its head.
    Raises: ConfigError if the directory is not a complete model, or transformers has no token-classification model for it.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    directory = check_model_directory(path)
    with explain_loading(directory, CRITIC):
        config = read_model_config(directory, trust_remote_code=trust_remote_code)
        if is_reward_model(config):
            scorer = find_head_class(AutoModelForSequenceClassification, config).from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
            )
            if find_layers_before(cast("PreTrainedModel", scorer), get_value_head(cast("PreTrainedModel", scorer))) is not None:
                raise ConfigError(explain_deep_score(directory, type(scorer).__name__))
            critic = create_critic_model(cast("PreTrainedModel", scorer), seed=seed)
            with torch.no_grad():
                get_value_head(critic).weight.copy_(get_value_head(cast("PreTrainedModel", scorer)).weight)
            return critic
        if not is_of_kind(config, CRITIC_KIND):
            model = load_hf_model(directory, trust_remote_code=trust_remote_code)
            return create_critic_model(model, seed=seed, head_std=head_std)
        loaded, info = find_head_class(AutoModelForTokenClassification, config).from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    missing = sorted(cast("dict[str, Any]", info)["missing_keys"])
    if missing:
        raise ConfigError(f"{directory} lacks the weights {missing[:5]}: it is not a complete critic")
    model = cast("PreTrainedModel", loaded)
    get_value_head(model)
    return model


def create_critic_model(model: PreTrainedModel, *, seed: int = 0, head_std: float | None = None) -> PreTrainedModel:
    """Create a critic from a copy of a causal language model's backbone and a fresh value head; shares no weight with `model`.

    Args:
        seed, head_std: for the head, see init_value_head.

    Raises: ConfigError if transformers has no token-classification model for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    return create_model_with_head(AutoModelForTokenClassification, model, {"classifier_dropout": 0.0}, seed=seed, head_std=head_std)


def create_model_with_head(
    kind: Any, model: PreTrainedModel, settings: Mapping[str, Any], *, seed: int, head_std: float | None
) -> PreTrainedModel:
    """Create a model with one label from a copy of a causal language model's backbone, adapters merged, and a fresh head.

    Args:
        kind: transformers class, AutoModelForTokenClassification or AutoModelForSequenceClassification.
        settings: configuration values, besides those of `model`.
        seed, head_std: for the head, see init_value_head.

    Raises: ConfigError if transformers has no model of this kind for this architecture, or one with layers of its own besides the head.
    """
    config = copy.deepcopy(model.config)
    for name, value in {"num_labels": 1, **settings}.items():
        setattr(config, name, value)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # for layers between backbone and head, which some models have
            made = cast("PreTrainedModel", find_head_class(kind, config).from_config(config))
    except ValueError as error:
        raise ConfigError(_explain_missing_head(kind, config)) from error
    merged = merge_adapters(model)
    names = get_decoder(made).state_dict().keys()
    prefix = f"{model.base_model_prefix}."
    weights = get_decoder(model).state_dict() if merged is None else {name: merged[prefix + name] for name in names}
    missing = sorted(names - weights.keys())
    if missing:
        raise ConfigError(_explain_further_layers(made, f"a backbone with {missing[0]}"))
    get_decoder(made).load_state_dict(weights)
    try:
        init_value_head(made, seed=seed, std=head_std)
    except ConfigError as error:
        raise ConfigError(_explain_further_layers(made, "several layers in its head")) from error
    return made


def find_head_class(kind: Any, config: Any) -> Any:
    """Return the class of models with a head for a configuration: transformers' own, or where it has none its generic head on the backbone.

    The weights and names of a model of the second kind are those that transformers would give it; only its directory is opened by this
    function's class alone, since AutoModelForTokenClassification does not know it.

    Args:
        kind: transformers class, AutoModelForTokenClassification or AutoModelForSequenceClassification.

    Returns: a class with from_config and from_pretrained; `kind` also for an architecture that transformers does not know.
    """
    from transformers import AutoModel, AutoModelForTokenClassification, PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

    backbones = cast("Any", AutoModel)._model_mapping  # no public function tells whether a class is there
    if type(config) in kind._model_mapping or type(config) not in backbones:
        return kind
    found = backbones[type(config)]
    backbone = found[0] if isinstance(found, tuple) else found
    base = next(b for b in backbone.__mro__ if b is not PreTrainedModel and b.__name__.endswith("PreTrainedModel"))
    generic = GenericForTokenClassification if kind is AutoModelForTokenClassification else GenericForSequenceClassification

    def from_config(cls: Any, config: Any, *, trust_remote_code: bool = False, **settings: Any) -> Any:
        return cls._from_config(config, **settings)

    name = backbone.__name__.removesuffix("Model") + kind.__name__.removeprefix("AutoModel")
    # transformers reads the source of the class's module for what its layers can do
    content = {"__module__": backbone.__module__, "config_class": type(config), "from_config": classmethod(from_config)}
    return type(name, (generic, base), content)


def explain_deep_score(directory: Path, kind: str) -> str:
    """Explain why a reward model with layers before its head is no critic."""
    return (
        f"{directory} is a {kind}, which has layers of its own between the hidden states and its head, and a critic has none: start the "
        "critic from a language model"
    )


def _explain_further_layers(made: PreTrainedModel, found: str) -> str:
    return (
        f"transformers' {type(made).__name__} has {found}, which this language model has not, so that no model of one score can be "
        "made of it: use another model, or for a critic an algorithm without one (grpo, rloo, ...)"
    )


def _explain_missing_head(kind: Any, config: Any) -> str:
    return (
        f"transformers has no {kind.__name__} for a model of type {config.model_type!r}, so that a head of one score cannot be put on it: "
        "use another model, or for a critic an algorithm without one (grpo, rloo, ...)"
    )


def init_value_head(model: PreTrainedModel, *, seed: int, std: float | None = None) -> None:
    """Draw the weights of the value head from N(0, std^2), by the seed alone; the bias is 0.

    Args:
        std: None = 1 / (H + 1) for H hidden units, so that first values are near 0 (Stiennon et al. 2020 use 1 / sqrt(H + 1) for a
            reward model, OpenRLHF 1 / (H + 1) for a critic).
    """
    head = get_value_head(model)
    std = 1 / (head.in_features + 1) if std is None else std
    with torch.no_grad():
        drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
        head.weight.copy_(drawn * std)
        if getattr(head, "bias", None) is not None:
            head.bias.zero_()


READS_TURN_END = "rollouts_reads_turn_end"
"""Configuration key: true if the score is read at an answer's end-of-turn token, not behind the template's text after it."""


def create_reward_model(model: PreTrainedModel, *, seed: int = 0, head_std: float | None = None) -> PreTrainedModel:
    """Create a reward model from a copy of a causal language model's backbone and a fresh head; shares no weight with `model`.

    Args:
        seed, head_std: for the head, see init_value_head.

    Raises: ConfigError if transformers has no sequence-classification model for this architecture.
    """
    from transformers import AutoModelForSequenceClassification

    return create_model_with_head(AutoModelForSequenceClassification, model, {READS_TURN_END: True}, seed=seed, head_std=head_std)


def load_reward_model(
    path: str | Path, *, dtype: str | torch.dtype = "float32", device: str | torch.device = "cpu", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a sequence-classification model with one label from a directory. Nothing is downloaded.

    Args:
        dtype: dtype of the parameters; float32 if it is to be trained.
        trust_remote_code: run the Python files in the directory; only for a directory you trust.

    Returns: the model, in eval mode.
    Raises: ConfigError if the directory is not a complete model of this kind: a language model, several labels, a head that is more than
        one linear layer.
    """
    from transformers import AutoModelForSequenceClassification

    directory = check_reward_model(path, trust_remote_code=trust_remote_code)
    with explain_loading(directory, "reward model (a sequence-classification model with one label)"):
        kind = find_head_class(AutoModelForSequenceClassification, read_model_config(directory, trust_remote_code=trust_remote_code))
        loaded, info = kind.from_pretrained(
            directory, dtype=parse_dtype(dtype), local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    missing = sorted(cast("dict[str, Any]", info)["missing_keys"])
    if missing:
        raise ConfigError(f"{directory} lacks the weights {missing[:5]}: it is not a complete reward model")
    model = cast("PreTrainedModel", loaded)
    _check_score_head(model, directory)
    return cast("PreTrainedModel", cast("torch.nn.Module", model).to(device).eval())


def check_reward_model(path: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Return the path if its configuration is a reward model's, without loading weights. Raises ConfigError as load_reward_model."""
    directory = check_model_directory(path, weights=False)
    with explain_loading(directory, "reward model (a sequence-classification model with one label)"):
        config = read_model_config(directory, trust_remote_code=trust_remote_code)
    if not is_reward_model(config):
        kinds = cast("list[str]", getattr(config, "architectures", None) or [])
        raise ConfigError(
            f"{directory} is a {' or '.join(kinds) or 'model of no stated kind'}, expected one ending with ForSequenceClassification: "
            "it has no head that scores. Train one from it (train_reward_model), or serve a model of another kind and ask it over HTTP "
            "(open_remote_reward)"
        )
    num_labels = int(config.num_labels)
    if num_labels != 1:
        raise ConfigError(
            f"{directory} has {num_labels} labels, expected 1: a reward model gives one score, a classifier of several classes none. "
            "Give a reward model, or a reward function of your own that makes one number of the classes"
        )
    return directory


def is_reward_model(config: Any) -> bool:
    """Whether a model configuration is that of a sequence-classification model."""
    return is_of_kind(config, "ForSequenceClassification")


def reads_turn_end(model: PreTrainedModel) -> bool:
    """Whether the score is read at an answer's own last token, as in all models that create_reward_model made.

    Other models are as a rule trained on conversations as the chat template renders them, with its text behind the last message.
    """
    return bool(getattr(model.config, READS_TURN_END, False))


def load_reward_start(
    path: str | Path, *, seed: int = 0, head_std: float | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the starting point of reward-model training: a saved reward model, or a language model's backbone with a fresh head.

    Args:
        seed, head_std: for a fresh head, see init_value_head.

    Raises: ConfigError as load_reward_model and load_hf_model.
    """
    directory = check_model_directory(path)
    with explain_loading(directory, "reward model"):
        config = read_model_config(directory, trust_remote_code=trust_remote_code)
    if is_reward_model(config):
        return load_reward_model(directory, trust_remote_code=trust_remote_code)
    return create_reward_model(load_hf_model(directory, trust_remote_code=trust_remote_code), seed=seed, head_std=head_std)


def open_critic(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, seed: int, head_std: float | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Open the starting point of a critic, and its tokenizer as open_model does: load_critic_model, or create_critic_model of a given
    language model; a given critic as it is.
    """
    return _open_with_head(model, tokenizer, load_critic_model, create_critic_model, seed, head_std)


def open_reward_model(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, seed: int, head_std: float | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Open the starting point of a reward model as open_critic does: load_reward_start, or create_reward_model."""
    return _open_with_head(model, tokenizer, load_reward_start, create_reward_model, seed, head_std)


def _open_with_head(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    load: Callable[..., PreTrainedModel],
    create: Callable[..., PreTrainedModel],
    seed: int,
    head_std: float | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    model, tokenizer = open_model(model, tokenizer, partial(load, seed=seed, head_std=head_std))
    if model.get_output_embeddings() is not None:
        model = create(model, seed=seed, head_std=head_std)
    return model, tokenizer


def _check_score_head(model: PreTrainedModel, directory: Path) -> None:
    try:
        get_value_head(model)
    except ConfigError as error:
        raise ConfigError(
            f"{directory} is a {type(model).__name__}, whose head is not one linear layer over the last token's hidden state: "
            "serve it, and ask it over HTTP (open_remote_reward)"
        ) from error
