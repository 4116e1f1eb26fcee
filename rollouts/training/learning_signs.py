"""Detection of runs that cannot learn: signs over several steps in a row, and the setting to change.

Pure: look() folds the metrics of one step after another. Both RL loops and the SFT loop call it during the run and log its warnings; a
summary calls it again on the lines of metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

PATIENCE = 5
"""Steps in a row before a warning: one or two such steps are chance in small batches."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """Number of consecutive steps, up to the newest, with each sign."""

    broken: int = 0  # the loss was not finite, or an update was skipped because its gradient was not finite
    truncated: int = 0  # every answer reached its token budget
    equal: int = 0  # all rewards were equal, and not the best reward
    flat: int = 0  # rewards differed, but never within a group
    still: int = 0  # no token was trained, or loss and gradient were 0
    frozen: int = 0  # the learning rate was 0
    best: float | None = None  # highest reward of the steps in which rewards differed
    told: frozenset[str] = frozenset()  # names of signs with a warning already given


def look(signs: Signs, metrics: Mapping[str, object], *, in_rl: bool) -> tuple[Signs, tuple[str, ...]]:
    """Add a step.

    If all rewards of a step are 1, or equal the highest reward seen while rewards differed, the run has nothing left to learn: the step has
    no sign but a broken loss.

    Args:
        metrics: metrics of the step: loss, grad_norm, num_tokens, update_skipped and lr; in RL also those of metrics.summarize_samples. A
            sign with missing metrics is absent.
        in_rl: whether the step is reinforcement learning, not fine-tuning; decides the names of settings.

    Returns: the signs with this step, and a warning for a sign that has lasted PATIENCE steps without a warning: at most one, the first of
        broken, truncated, equal, still (with flat for its cause), frozen.
    """
    number = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
    low, high = number.get("reward_min", math.nan), number.get("reward_max", math.nan)
    is_equal = low == high
    solved = is_equal and (high == 1.0 or (signs.best is not None and high >= signs.best))
    found = {
        "broken": not math.isfinite(number.get("loss", math.nan if "loss" in metrics else 0.0)) or number.get("update_skipped") == 1.0,
        "truncated": number.get("truncated_fraction") == 1.0 and not solved,
        "equal": is_equal and not solved,
        "flat": number.get("zero_std_fraction") == 1.0 and not is_equal,
        "still": (number.get("num_tokens") == 0.0 or number.get("grad_norm") == 0.0) and not solved,
        "frozen": number.get("lr") == 0.0 and not solved,
    }
    best = signs.best if is_equal or math.isnan(high) else max(high, high if signs.best is None else signs.best)
    counts = {name: getattr(signs, name) + 1 if there else 0 for name, there in found.items()}
    signs = replace(signs, best=best, **counts)
    name = next((name for name, count in counts.items() if count >= PATIENCE and name != "flat"), None)
    if name is None or name in signs.told:
        return signs, ()
    return replace(signs, told=signs.told | {name}), (_describe(name, signs, number, in_rl=in_rl),)


def find_warnings(lines: Iterable[Mapping[str, object]], *, in_rl: bool) -> tuple[str, ...]:
    """Find the warnings of a stage, in the order of the steps that caused them.

    Args:
        lines: metrics of its steps, in order.
        in_rl: see look.
    """
    signs, found = Signs(), list[str]()
    for line in lines:
        signs, texts = look(signs, line, in_rl=in_rl)
        found.extend(texts)
    return tuple(found)


def _describe(name: str, signs: Signs, number: Mapping[str, float], *, in_rl: bool) -> str:
    """Write the warning of a sign, with the setting to change."""
    stage = "rl" if in_rl else "sft"
    steps = f"the last {PATIENCE} steps of {stage.upper()}"
    if name == "broken":
        return (
            f"{steps} had a loss or a gradient that is not finite, and no update: lower --{stage}.optimizer.lr, or compute "
            "in float32 (--backend.compute-dtype float32)"
        )
    if name == "truncated":
        masked = ", and --rl.mask-truncated leaves nothing to train on" if number.get("num_tokens") == 0.0 else ""
        return (
            f"every answer of {steps} was cut by the token budget (truncated_fraction is 1){masked}: raise --generation.max-tokens, or "
            "look whether the model ever ends its answers (--generation.stop, an SFT stage before)"
        )
    if name == "equal":
        return (
            f"all rewards of {steps} were {number['reward_max']:g}, so that nothing says which answers are better: look at the answers, "
            "give a reward that tells them apart (--reward.function), easier problems (--data.path) or a model that solves some (--mode "
            "sft+rl)"
        )
    if name == "frozen":
        return f"the learning rate of {steps} was 0, so that nothing was learned: raise --{stage}.optimizer.lr"
    if number.get("num_tokens") == 0.0:
        cause = "--rl.mask-truncated, or a generate_fn whose loss_mask is 0" if in_rl else "answers in --data.path, --data.max-length"
        return f"{steps} had no token to train on: look at {cause}"
    if signs.flat:
        return (
            f"in {steps} all answers to a prompt had the same reward, so that the gradient was 0: raise --rl.samples-per-prompt or "
            "--generation.temperature, choose problems that are neither too easy nor too hard, or a finer --reward.function"
        )
    cause = "--rl.algorithm and its coefficients" if in_rl else "the weights of the loss masks in --data.path"
    return f"{steps} had a gradient of 0, so that nothing was learned: look at {cause}"
