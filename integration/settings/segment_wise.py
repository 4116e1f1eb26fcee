"""Settings that follow from the switch enable_segment_wise_ppo: those of asynchronous rollouts, and the algorithm."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rollouts.asynchronous.config import AsyncConfig
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from integration.expressions.algorithm import PresetCall

SWITCH = "enable_segment_wise_ppo"
OPTION = "--enable-segment-wise-ppo"  # as the command reads it


def resolve_async_config(asynchronous: AsyncConfig, *, segment_wise: bool) -> AsyncConfig:
    """Return the settings of asynchronous rollouts under the switch.

    Raises: ConfigError if they contradict the switch, or if any is set although rollouts are synchronous.
    """
    if asynchronous.enable_segment_wise_ppo is not None and asynchronous.enable_segment_wise_ppo != segment_wise:
        raise ConfigError(
            f"rl.asynchronous.{SWITCH} is {asynchronous.enable_segment_wise_ppo}, but it follows from the switch {OPTION}, which is "
            f"{segment_wise}: set the switch and leave rl.asynchronous.{SWITCH} out"
        )
    if segment_wise and not asynchronous.enabled:
        raise ConfigError(
            f"{SWITCH} is True, but rollouts are synchronous, so all tokens have one weight version: add --rl.asynchronous.enabled, "
            f"or leave {OPTION} out"
        )
    if not asynchronous.enabled and (changed := _find_changes(asynchronous)):
        raise ConfigError(
            f"rl.asynchronous has {', '.join(changed)}, but rl.asynchronous.enabled is False, so nothing reads them: add "
            "--rl.asynchronous.enabled, or leave them out"
        )
    if segment_wise and asynchronous.in_flight == "continue":
        raise ConfigError(
            f"rl.asynchronous.in_flight is 'continue', but {SWITCH} must see the tokens of unfinished rollouts at each weight sync: "
            "leave rl.asynchronous.in_flight out"
        )
    return replace(asynchronous, enable_segment_wise_ppo=segment_wise)


def _find_changes(asynchronous: AsyncConfig) -> list[str]:
    """Return the settings that differ from their defaults, as name = value."""
    values, defaults = asdict(asynchronous), asdict(AsyncConfig())
    return [f"{name} = {value!r}" for name, value in values.items() if value != defaults[name] and name not in ("enabled", SWITCH)]


def derive_algorithm_call(call: PresetCall, asynchronous: AsyncConfig) -> PresetCall:
    """Return the algorithm's expression under the switch: decoupled(..., segment_wise=True), wrapped around other algorithms.

    Args:
        asynchronous: the result of resolve_async_config.

    Returns: the same call if the switch is off; else a call whose text is that of the algorithm that runs.
    Raises: ConfigError if the expression contradicts the switch.
    """
    given = call.arguments.get("segment_wise") if call.name == "decoupled" else None
    if not asynchronous.segment_wise:
        if given:
            raise ConfigError(f"rl.algorithm {call.text!r} is segment-wise, but {SWITCH} is off: add {OPTION}, which sets it")
        return call
    if given is False:
        raise ConfigError(f"rl.algorithm {call.text!r} says segment_wise=False, but {SWITCH} is True: leave one of them out")
    from integration.expressions.algorithm import PRESETS, PresetCall, write_call

    missed = asynchronous.missed_segment == "proximal"
    said = call.arguments.get("missed_as_proximal") if call.name == "decoupled" else None
    if said is not None and said != missed:
        raise ConfigError(
            f"rl.algorithm {call.text!r} says missed_as_proximal={said}, but it follows from rl.asynchronous.missed_segment, which is "
            f"{asynchronous.missed_segment!r}: leave it out"
        )
    derived: dict[str, Any] = {"segment_wise": True, "missed_as_proximal": missed}
    arguments = call.arguments if call.name == "decoupled" else {"algorithm": call}
    found = PresetCall(name="decoupled", function=PRESETS["decoupled"], arguments={**arguments, **derived}, text=call.text)
    return replace(found, text=write_call(found))
