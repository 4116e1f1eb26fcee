"""Limits of a model's input: the length of a row, and the range of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from rollouts.errors import ConfigError, DataError
from rollouts.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the rows of a model."""

    num_embeddings: int  # token ids are below this number
    context_length: int | None = None  # most tokens of one row, or of one context of a row; None = there is no limit
    bound: str = "the model's context"  # whose tokens these are, for messages

    def explain(self, length: int, lowest: int, highest: int) -> str | None:
        """Say why a row cannot be computed, and what to do; None if it can.

        Args:
            length: tokens of the row.
            lowest, highest: lowest and highest of its token ids.
        """
        if self.context_length is not None and length > self.context_length:
            return (
                f"has {length} tokens, more than the {self.context_length} of {self.bound}: shorten or drop it (--data.max-length "
                "with --data.truncate cuts rows of SFT), or use a model with a longer context"
            )
        if lowest < 0 or highest >= self.num_embeddings:
            wrong = lowest if lowest < 0 else highest
            return (
                f"has the token id {wrong}, outside of the model's {self.num_embeddings} embeddings: it was made with another "
                "tokenizer, or with tokens added to it; use the model's own, or resize_token_embeddings before training"
            )
        return None


def read_limits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> ModelLimits:
    """Return the limits of a model. Raises ConfigError as check_tokenizer, if there is a tokenizer."""
    num_embeddings = _leave_out_padding(model.config, int(cast("Any", model).get_input_embeddings().weight.shape[0]))
    if tokenizer is not None:
        check_tokenizer(tokenizer, num_embeddings, type(model).__name__)
    return _limit(num_embeddings, model.config)


def read_config_limits(config: Any) -> ModelLimits:
    """Return the limits of the model that a configuration describes."""
    return _limit(_leave_out_padding(config, int(config.get_text_config().vocab_size)), config)


def _limit(num_embeddings: int, config: Any) -> ModelLimits:
    """Return limits, and say in them whether a rotary embedding of the kind "longrope" is why rows are shorter than the context."""
    text, length = config.get_text_config(), find_context_length(config)
    kinds = {rope.get("rope_type") for rope in _list_rotary(getattr(text, "rope_parameters", None))}
    if "longrope" not in kinds or length == getattr(text, "max_position_embeddings", None):
        return ModelLimits(num_embeddings, length)
    bound = "the model's original_max_position_embeddings, beyond which longrope rotates every row of a pass in another way"
    return ModelLimits(num_embeddings, length, bound)


def _leave_out_padding(config: Any, num_embeddings: int) -> int:
    """Return the number of embeddings that have a logit: Inkling drops those of rows that only pad its matrices."""
    size = getattr(config.get_text_config(), "unpadded_vocab_size", None)
    return num_embeddings if size is None else min(num_embeddings, int(size))


def find_context_length(config: Any) -> int | None:
    """Return the most tokens of one row for which the model is defined; None if its configuration has no limit.

    The limit is max_position_embeddings, under the name that the architecture has for it. A rotary embedding of the kind "longrope" has
    other frequencies for rows longer than original_max_position_embeddings, and transformers uses them for all rows of a pass as soon as
    one is that long: there the limit is that shorter length.

    Args:
        config: of transformers, of a text model or with one inside.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    for rope in _list_rotary(getattr(config, "rope_parameters", None)):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit is not None and limit > 0]
    return min(known, default=None)


def explain_sample(sample: Sample, limits: ModelLimits) -> str | None:
    """Return ModelLimits.explain for a sample, by the longest of its contexts."""
    bounds = [0, *(sample.context_starts or ()), len(sample.tokens)]
    longest = max(end - start for start, end in pairwise(bounds))
    return limits.explain(longest, min(sample.tokens, default=0), max(sample.tokens, default=0))


def check_samples(samples: Iterable[Sample], limits: ModelLimits | None, what: str = "sample") -> None:
    """Raise DataError, with the position, for the first sample beyond the limits of the model.

    Args:
        limits: None = unknown.
        what: name of the samples in the message.
    """
    for i, sample in enumerate(samples if limits is not None else ()):
        why = explain_sample(sample, cast("ModelLimits", limits))
        if why is not None:
            raise DataError(f"{what} {i} {why}")


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, num_embeddings: int, where: str) -> None:
    """Raise ConfigError for a tokenizer whose ordinary text, or whose end and padding, has ids that the model has no embedding for.

    Added tokens that no ordinary text has may be beyond the limit, as in some published models; rows with one of them are refused.

    Args:
        where: place of model and tokenizer, for the message.
    """
    added = set(cast("Any", tokenizer).added_tokens_decoder)
    named = {cast("int | None", getattr(tokenizer, name)) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    beyond = sorted(i for i in tokenizer.get_vocab().values() if i >= num_embeddings and (i not in added or i in named))
    if beyond:
        example = tokenizer.convert_ids_to_tokens(beyond[-1])
        raise ConfigError(
            f"{where}: the tokenizer has the id {beyond[-1]} ({example!r}; {len(beyond)} such ids), but the model has {num_embeddings} "
            "embeddings: use the tokenizer that belongs to the model, or resize_token_embeddings and save it anew"
        )


def _list_rotary(settings: Any) -> Iterable[Mapping[str, Any]]:
    """Return the settings of the rotary embeddings of a config: one, one for each kind of layer, or none."""
    if not isinstance(settings, Mapping):
        return ()
    one = cast("Mapping[str, Any]", settings)
    return (one,) if "rope_type" in one else tuple(value for value in one.values() if isinstance(value, Mapping))
