"""The tokens that a model knows, as a value: a critic must read the very tokens that its policy writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rollouts.checks import parse_json
from rollouts.data.model_limits import ModelLimits, read_limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_RULES = ("normalizer", "pre_tokenizer", "model")  # parts of a tokenizer file that decide how a text is cut into tokens


@dataclass(frozen=True)
class TokenSpec:
    """The vocabulary of a model and of its tokenizer."""

    num_embeddings: int  # token ids that the model accepts; may exceed the tokenizer's vocabulary
    vocabulary: Mapping[str, int] | None = None  # token -> id, added tokens included; None = the backend has no tokenizer
    special_ids: Mapping[str, int | None] = field(default_factory=dict[str, "int | None"])  # pad, begin and end of text
    rules: str | None = None  # checksum of the rules that cut text into tokens; None = unknown
    context_length: int | None = None  # most tokens of a row; None = no limit, or not known

    @property
    def limits(self) -> ModelLimits:
        """The model's limits on its input."""
        return ModelLimits(self.num_embeddings, self.context_length)


def describe_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> TokenSpec:
    """Return the TokenSpec of a model and its tokenizer."""
    limits = read_limits(model)
    spec = TokenSpec(limits.num_embeddings) if tokenizer is None else describe_tokenizer(tokenizer, limits.num_embeddings)
    return replace(spec, context_length=limits.context_length)


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> TokenSpec:
    """Return the TokenSpec of a tokenizer and a model known by its number of embeddings only."""
    special_ids = {name: cast("int | None", getattr(tokenizer, name)) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizer of the tokenizers library
    rules = None
    if backend is not None:
        content = parse_json(backend.to_str())
        text = json.dumps({name: content.get(name) for name in _RULES}, sort_keys=True)
        rules = hashlib.sha256(text.encode()).hexdigest()
    return TokenSpec(num_embeddings, tokenizer.get_vocab(), special_ids, rules)


def explain_token_differences(policy: TokenSpec, other: TokenSpec) -> list[str]:
    """Explain why `other` cannot read the policy's tokens, one sentence per difference; an empty list if it can.

    With tokenizers on both sides the vocabularies, special ids and rules must be equal, and the other model may have more embeddings (some
    models pad them). Otherwise the numbers of embeddings must be equal.
    """
    found: list[str] = []
    if policy.vocabulary is not None and other.vocabulary is not None:
        found += _explain_vocabularies(policy.vocabulary, other.vocabulary)
        for name in sorted(policy.special_ids.keys() | other.special_ids.keys()):
            left, right = policy.special_ids.get(name), other.special_ids.get(name)
            if left != right:
                found.append(f"{name} is {right}, the policy's is {left}")
        if not found and None not in (policy.rules, other.rules) and policy.rules != other.rules:
            found.append("the tokenizer has the same tokens, but cuts text into them by other rules")
        if other.num_embeddings < policy.num_embeddings:
            found.append(f"the model has {other.num_embeddings} embeddings, fewer than the policy's {policy.num_embeddings}")
    elif other.num_embeddings != policy.num_embeddings:
        found.append(f"the vocabulary has {other.num_embeddings} tokens, the policy's has {policy.num_embeddings}")
    return found


def _explain_vocabularies(policy: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    if dict(policy) == dict(other):
        return []
    differing = sorted(token for token in policy.keys() | other.keys() if policy.get(token) != other.get(token))
    examples = "; ".join(f"{token!r} is {other.get(token)}, the policy's is {policy.get(token)}" for token in differing[:3])
    return [f"the tokenizer has {len(other)} tokens, the policy's has {len(policy)}; {len(differing)} differ ({examples})"]
