"""Load a model so that no process ever holds more than its shards.

    model = load_hf_model_on_meta(path)            # shapes only; buffers are real
    shard_model(model)                             # parameters become DTensors
    materialize_from_hf(model, path, device)       # each rank reads its slices of the files
    optimizer = ...                                # made with the new parameters

An unsharded model in one process works, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from rollouts.backends.weights.fill import ChosenWeights, WeightSource, fill_weights, open_weights
from rollouts.errors import CheckpointError, ConfigError
from rollouts.models.forward.output_layers import get_value_head
from rollouts.models.heads import CRITIC, CRITIC_KIND, explain_deep_score, find_head_class, init_value_head, is_reward_model
from rollouts.models.loading import check_model_directory, explain_loading, is_of_kind, read_model_config
from rollouts.models.weights import base_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def create_on_meta(create: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Run a function that makes a model, giving its parameters shapes but no values; buffers keep their usual values.

    Args:
        create: for example `lambda: Qwen3ForCausalLM(config)`. Global random state is left unchanged.

    Returns: the model, in evaluation mode, as from_pretrained returns it.
    """
    thread = threading.get_ident()

    def keep_shape(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None  # unchanged
        return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast("Any", keep_shape))
    try:
        with torch.random.fork_rng(devices=[]):
            return create().eval()
    finally:
        handle.remove()


def load_hf_model_on_meta(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the causal language model of a directory without its weights, float32. See materialize_from_hf.

    Raises: ConfigError if the directory describes no such model.
    """
    from transformers import AutoModelForCausalLM

    directory = check_model_directory(path, weights=False)
    with explain_loading(directory, "causal language model"):
        config = read_model_config(directory, trust_remote_code=trust_remote_code)
        model = create_on_meta(partial(_create_from_config, AutoModelForCausalLM, config, trust_remote_code))
        _read_generation_config(model, directory)
    return model


def materialize_from_hf(model: PreTrainedModel, directory: str | Path, device: str | torch.device) -> int:
    """Load the weights of a directory into a model's parameters; each rank reads only the slices of its shards.

    Parameters on meta become new ones on the device; others are overwritten in place.

    Args:
        model: as load_hf_model_on_meta returns it, sharded or not. Make its optimizer afterwards.
        directory: directory of safetensors files; other formats can only be read as whole tensors.

    Returns: bytes of weights that this process has read.
    Raises: ConfigError if a file is missing or damaged, or names or shapes do not fit; nothing is changed then.
    """
    path = check_model_directory(directory)
    with explain_loading(path, type(model).__name__), open_weights(model, path) as files:
        names = {name: name for name in files.shapes}
        if not names.keys() & base_weights(model).keys():  # saved from the part below the head
            names = {f"{model.base_model_prefix}.{name}": name for name in names}
        fill_weights(model, ChosenWeights(files, names, {}), device, str(path))
        return files.bytes_read


def load_critic_on_meta(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a critic as load_critic_model does, without its weights. See materialize_critic.

    Raises: ConfigError if the directory is not a complete model, or transformers has no token-classification model for it.
    """
    from transformers import AutoModelForTokenClassification

    directory = check_model_directory(path)
    with explain_loading(directory, CRITIC):
        config = read_model_config(directory, trust_remote_code=trust_remote_code)
        if not is_of_kind(config, CRITIC_KIND):
            config.num_labels = 1
            config.classifier_dropout = 0.0
        try:
            kind = find_head_class(AutoModelForTokenClassification, config)
            model = create_on_meta(partial(_create_from_config, kind, config, trust_remote_code))
        except ValueError as error:
            raise ConfigError(f"transformers has no token-classification model for {type(config).__name__}: {error}") from error
        get_value_head(model)
        return model


def materialize_critic(
    model: PreTrainedModel,
    directory: str | Path,
    device: str | torch.device,
    *,
    seed: int = 0,
    head_std: float | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Load weights into a critic from a directory: a saved critic, a reward model, or a causal language model plus a fresh head.

    The weights equal load_critic_model's, on any number of ranks.

    Args:
        model: as load_critic_on_meta returns it, sharded or not.
        seed, head_std: initialization of a fresh head, see init_value_head.

    Returns: bytes of weights that this process has read from files.
    Raises: ConfigError as materialize_from_hf.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    path = check_model_directory(directory)
    config = read_model_config(path, trust_remote_code=trust_remote_code)
    kind = None if is_of_kind(config, CRITIC_KIND) else AutoModelForCausalLM
    if is_reward_model(config):
        kind = find_head_class(AutoModelForSequenceClassification, config)
    with explain_loading(path, CRITIC), open_weights(model, path, kind) as files:
        fill_weights(model, _choose_for_critic(model, files, config, path, seed, head_std), device, str(path))
        return files.bytes_read


def _choose_for_critic(
    model: PreTrainedModel, source: WeightSource, config: Any, path: Path, seed: int, head_std: float | None
) -> WeightSource:
    """Return the weights of a critic by its own names."""
    if is_of_kind(config, CRITIC_KIND):
        return ChosenWeights(source, {name: name for name in source.shapes}, {})
    prefix = f"{model.base_model_prefix}."
    names = {name: name for name in source.shapes if name.startswith(prefix)}
    if not names:  # saved from the part below the head, or of a language model that calls this part otherwise
        own = base_weights(model).keys()
        names = {prefix + name: name for name in source.shapes}
        if not names.keys() & own:
            renamed = {prefix + name.partition(".")[2]: name for name in source.shapes}
            names = {name: other for name, other in renamed.items() if name in own}
    head = get_value_head(model)
    (head_name,) = [name for name, module in model.named_modules() if module is head]
    fresh = torch.nn.Module()  # the same layer outside the model, whole
    fresh.score = torch.nn.Linear(head.in_features, 1, bias=getattr(head, "bias", None) is not None)
    init_value_head(cast("Any", fresh), seed=seed, std=head_std)
    given = {f"{head_name}.{name}": value.detach() for name, value in fresh.score.named_parameters()}
    if is_reward_model(config):
        scorer = next((name for name in ("score.weight", "classifier.weight") if name in source.shapes), None)
        if scorer is None:
            raise CheckpointError("the reward model has no weights of its head (score.weight): it is not a complete model")
        more = [name for name in source.shapes if name not in names.values() and name.partition(".")[0] not in ("score", "classifier")]
        if more:
            raise ConfigError(explain_deep_score(path, " or ".join(getattr(config, "architectures", None) or [])))
        names[f"{head_name}.weight"] = scorer
        del given[f"{head_name}.weight"]
    return ChosenWeights(source, names, given)


def _create_from_config(kind: Any, config: Any, trust_remote_code: bool) -> PreTrainedModel:
    return kind.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _read_generation_config(model: PreTrainedModel, directory: Path) -> None:
    """Read the generation config, which from_config does not read and exports need: it names the tokens that end an answer."""
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
