"""--rl.filter: the filter of groups to train on, as an expression in the language of integration.expressions.algorithm.

nonzero_std                     a filter with its defaults
min_reward(0.5)                 with arguments: those of rollouts.data.filters behind the group
my_module:my_filter             a function of the user's of a group; also path/to/file.py:my_filter(threshold=0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from integration.expressions.algorithm import Language, PresetCall, describe_call, parse_expression
from rollouts.data.filters import (
    check_any_success,
    check_min_reward,
    check_quality_and_diversity,
    check_reasonable_length,
    check_response_diversity,
    check_reward_nonzero_std,
)
from rollouts.errors import ConfigError
from rollouts.rewards.answers import load_function

NO_FILTER = "none"
FILTERS: Mapping[str, Callable[..., bool]] = MappingProxyType(
    {
        "nonzero_std": check_reward_nonzero_std,
        "min_reward": check_min_reward,
        "any_success": check_any_success,
        "diversity": check_response_diversity,
        "length": check_reasonable_length,
        "quality_and_diversity": check_quality_and_diversity,
    }
)
_LANGUAGE = Language("filter", FILTERS, load_function, example="min_reward(0.5)", num_filled=1)


def parse_filter(expression: str) -> PresetCall | None:
    """Parse an expression to a filter with checked arguments; None for "none".

    Raises: ConfigError for a syntax error, an unknown name or argument, or an argument out of range.
    """
    if expression.strip() == NO_FILTER:
        return None
    call = parse_expression(expression, _LANGUAGE)
    if call.name in FILTERS:
        try:
            call.function((), **call.arguments)  # filters check their arguments before the group
        except AssertionError as error:
            raise ConfigError(f"rl.filter {call.text}: {error}") from error
    return call


def resolve_filter(expression: str) -> Callable[..., Any] | None:
    """Return the predicate of a group for an expression; None for "none". Raises as parse_filter."""
    call = parse_filter(expression)
    if call is None or not call.arguments:
        return None if call is None else call.function
    return partial(call.function, **call.arguments)


def describe_filter(expression: str) -> str:
    """Return the expression with all arguments: min_reward -> min_reward(threshold=0.0)."""
    call = parse_filter(expression)
    return NO_FILTER if call is None else describe_call(call)
