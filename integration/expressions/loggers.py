"""--loggers: loggers of metrics besides metrics.jsonl and the display, as expressions in the language of integration.expressions.algorithm.

wandb(project='mine', name='first')     Weights & Biases; needs `pip install rollouts-rl[wandb]`
jsonl('copy.jsonl')                     a further file; a resumed run appends to it
my_module:my_logger(rate=2)             a function of the user's that returns a MetricsLogger
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from integration.expressions.algorithm import Language, PresetCall, describe_call, parse_expression
from rollouts.errors import ConfigError, locate_error
from rollouts.rewards.answers import load_function
from rollouts.training.metrics import JSONLLogger, MetricsLogger, WandbLogger


def _jsonl(path: str) -> MetricsLogger:
    return JSONLLogger(path)


def _wandb(project: str, name: str | None = None, *, settings: Mapping[str, Any]) -> MetricsLogger:
    return WandbLogger(project, name, settings)


LOGGERS: Mapping[str, Callable[..., MetricsLogger]] = MappingProxyType({"jsonl": _jsonl, "wandb": _wandb})
_LANGUAGE = Language("logger", LOGGERS, load_function, example="wandb(project='mine')", budget="settings")


def parse_loggers(expressions: Sequence[str]) -> tuple[PresetCall, ...]:
    """Parse expressions to loggers with checked arguments. Raises ConfigError."""
    calls = tuple(parse_expression(expression, _LANGUAGE) for expression in expressions)
    for call in calls:
        if "settings" in call.arguments and call.name in LOGGERS:
            raise ConfigError(f"loggers {call.text}: settings are those of the run: leave the argument out")
    return calls


def check_loggers(expressions: Sequence[str]) -> None:
    """Raise ConfigError for a logger whose package is not installed, before anything is written."""
    for call in parse_loggers(expressions):
        if call.name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"loggers {call.text} needs the package wandb: pip install 'rollouts-rl[wandb]', or leave it out")


def create_loggers(expressions: Sequence[str], settings: Mapping[str, Any]) -> list[MetricsLogger]:
    """Create the loggers of a run.

    Args:
        settings: the run's settings as plain values without secrets, for loggers that show them.

    Raises: ConfigError if a user's function fails or does not return a logger.
    """
    return [_create_logger(call, settings) for call in parse_loggers(expressions)]


def _create_logger(call: PresetCall, settings: Mapping[str, Any]) -> MetricsLogger:
    if call.name in LOGGERS:
        return call.function(**call.arguments, **({"settings": settings} if call.name == "wandb" else {}))
    try:
        logger = cast("object", call.function(**call.arguments))
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"loggers {call.text} raised {type(error).__name__}: {error} ({locate_error(error)})") from error
    missing = [name for name in ("log", "finish") if not callable(getattr(logger, name, None))]
    if missing:
        lacks = " and no ".join(f"{name}()" for name in missing)
        raise ConfigError(f"loggers {call.text} returned a {type(logger).__name__}, which has no {lacks}: see rollouts.MetricsLogger")
    return cast("MetricsLogger", logger)


def describe_loggers(expressions: Sequence[str]) -> str:
    """Describe all destinations of metrics, for a dry run."""
    return ", ".join(["metrics.jsonl", "the display", *map(describe_call, parse_loggers(expressions))])
