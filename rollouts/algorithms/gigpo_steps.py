"""GiGPO on StepData: from scored episodes to steps that carry their advantage, and from there to the tokens of a batch.

episodes = (*steps of each episode,)                                     StepData with base_reward, or without
steps = system_apply_gigpo_to_batch_steps(episodes, final_scores)        the same with advantage and return_to_go
batch = with_step_advantages(collate_samples(samples), steps)            advantages [B, T], for any PPO-style loss
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rollouts.algorithms.anchors import (
    GiGPOSettings,
    compute_turn_levels,
    fill_turn_rewards,
    find_similar,
    hash_observation,
    spread_turns,
)
from rollouts.checks import describe_function
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.steps import StepData
from rollouts.types import Group, TrainBatch, TurnLevels

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepLevels(TurnLevels):
    """TurnLevels of steps whose observations are known: row b is episode b, column k its step k. float64."""

    keys: tuple[tuple[Hashable, ...], ...]  # key of each step's observation: its hash, or the number of its text among unlike ones


def system_apply_gigpo_to_batch_steps(
    batch: Sequence[Sequence[StepData]],
    final_scores: Sequence[float],
    settings: GiGPOSettings | None = None,
    *,
    omega: float | None = None,
    gamma: float | None = None,
    state_hashing_function: Callable[[Any], Hashable] = hash_observation,
    default_step_reward: float | None = None,
    group_ids: Sequence[int] | None = None,
) -> list[list[StepData]]:
    """Return copies of the steps of a batch with their advantage and return_to_go: A_k = combine(A_E, A_S, omega).

    A_E compares the final score of the episode with those of its group, A_S the discounted step rewards G_k from this step on with those of
    all steps of the group with the same observation. The keyword call of with_step_levels(batch, compute_step_levels(batch, ...)).

    Args:
        batch: the steps of each episode, in order. Episodes of one group have equal StepData.group_index, by default all.
        final_scores: final score of each episode, for A_E.
        settings: default: GiGPOSettings().
        omega, gamma, default_step_reward: in place of those of settings; None = those of settings.
        state_hashing_function: observation_data -> key; equal keys are one anchor state. str or repr for observations that are not JSON.
        group_ids: group of each episode; None = the group_index of its steps.

    Returns: new lists of new steps; step_info["gigpo"] has the terms of the advantage, see describe_turns. The logger of this module
        logs the same terms at DEBUG, as train_on_rollouts does for a batch.
    Raises: as compute_step_levels.
    Source: Feng et al. 2025 (GiGPO), section 3.
    """
    given = {"omega": omega, "gamma": gamma, "default_step_reward": default_step_reward}
    settings = replace(settings or GiGPOSettings(), **{name: value for name, value in given.items() if value is not None})
    levels = compute_step_levels(batch, final_scores, settings, state_hashing_function=state_hashing_function, group_ids=group_ids)
    filled = with_step_levels(batch, levels)
    _tell_steps(filled, group_ids)
    return filled


def with_step_levels(batch: Sequence[Sequence[StepData]], levels: StepLevels) -> list[list[StepData]]:
    """Return copies of the steps of a batch with advantage, return_to_go and step_info["gigpo"] of their levels."""
    return [
        [
            replace(step, advantage=told["advantage"], return_to_go=told["return_to_go"], step_info={**step.step_info, "gigpo": told})
            for step, told in zip(steps, describe_turns(levels, row), strict=True)
        ]
        for row, steps in enumerate(batch)
    ]


def _tell_steps(batch: Sequence[Sequence[StepData]], group_ids: Sequence[int] | None) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for row, steps in enumerate(batch):
        for step in steps:
            group = step.group_index if group_ids is None else group_ids[row]
            _logger.debug("episode %d (group %d) step %d: %s", row, group, step.system_step_index, word_turn(step.step_info["gigpo"]))


def compute_step_levels(
    batch: Sequence[Sequence[StepData]],
    final_scores: Sequence[float],
    settings: GiGPOSettings | None = None,
    *,
    state_hashing_function: Callable[[Any], Hashable] = hash_observation,
    similarity_threshold: float | None = None,
    group_ids: Sequence[int] | None = None,
) -> StepLevels:
    """Compute the two levels of the advantages of system_apply_gigpo_to_batch_steps.

    Args:
        batch, final_scores, settings, state_hashing_function, group_ids: see there.
        similarity_threshold: in (0, 1]: observations, which are then texts, join the first one of their group with at least this
            similarity (anchors.similarity); state_hashing_function is not called. None = equal keys.

    Raises: DataError for an episode whose steps are not of one group or not in order, one without a step if group_ids is None, or an
        observation that has no key; RewardError for a score or reward that is not finite. The message names the episode. ConfigError for
        a similarity_threshold out of range.
    """
    s = settings or GiGPOSettings()
    if similarity_threshold is not None and not 0 < similarity_threshold <= 1:
        raise ConfigError(f"similarity_threshold is {similarity_threshold!r}, expected in (0, 1], or None")
    if len(final_scores) != len(batch):
        raise DataError(f"there are {len(final_scores)} final scores for {len(batch)} episodes: give one for each")
    groups = _find_groups(batch) if group_ids is None else list(group_ids)
    assert len(groups) == len(batch), f"{len(groups)} group_ids for {len(batch)} episodes"
    for b, (steps, score) in enumerate(zip(batch, final_scores, strict=True)):
        _check_episode(b, steps, score)
    keys = _find_keys(batch, groups, state_hashing_function, similarity_threshold)
    rewards = torch.tensor(list(final_scores), dtype=torch.float64)
    numbers: dict[Hashable, int] = {}
    states = _pad([[numbers.setdefault(key, len(numbers)) for key in row] for row in keys], -1, torch.int64)
    own = _pad([[0.0 if s.base_reward is None else s.base_reward for s in steps] for steps in batch], 0.0, torch.float64)
    known = _pad([[s.base_reward is not None for s in steps] for steps in batch], 0, torch.bool)
    group_column = torch.tensor(groups, dtype=torch.int64)
    step_rewards = fill_turn_rewards(
        own, known, rewards, group_column, states >= 0, default_step_reward=s.default_step_reward, add_final_reward=s.add_final_reward
    )
    levels = compute_turn_levels(rewards, group_column, states, step_rewards, s)
    return StepLevels(**{f.name: getattr(levels, f.name) for f in fields(TurnLevels)}, keys=keys)


def _find_groups(batch: Sequence[Sequence[StepData]]) -> list[int]:
    groups: list[int] = []
    for b, steps in enumerate(batch):
        found = {step.group_index for step in steps}
        if len(found) != 1:
            what = "has no steps, so nothing says its group" if not found else f"has steps of groups {sorted(found)}"
            raise DataError(f"episode {b} {what}: leave it out, or pass group_ids=")
        groups.append(found.pop())
    return groups


def _check_episode(b: int, steps: Sequence[StepData], score: float) -> None:
    if not math.isfinite(score):
        raise RewardError(f"the final score of episode {b} is {score}: drop the episode, or repair what scores it")
    places = [step.system_step_index for step in steps]
    if any(left >= right for left, right in pairwise(places)):
        raise DataError(f"the steps of episode {b} have system_step_index {places}, expected rising ones: sort them")
    for step in steps:
        if step.base_reward is not None and not math.isfinite(step.base_reward):
            raise RewardError(f"step {step.system_step_index} of episode {b} has base_reward {step.base_reward}: rewards must be finite")


def _find_keys(
    batch: Sequence[Sequence[StepData]], groups: Sequence[int], hashing: Callable[[Any], Hashable], threshold: float | None
) -> tuple[tuple[Hashable, ...], ...]:
    """Find the key of each step's observation; equal keys in a group are one anchor."""
    if threshold is None:
        return tuple(tuple(_find_key(hashing, step, b) for step in steps) for b, steps in enumerate(batch))
    firsts: dict[int, list[str]] = {}
    keys: list[tuple[Hashable, ...]] = []
    for b, steps in enumerate(batch):
        for k, step in enumerate(steps):
            if not isinstance(step.observation_data, str):
                found = type(step.observation_data).__name__
                raise DataError(f"similarity needs observations that are text, found {found} at step {k} of episode {b}")
        known = firsts.setdefault(groups[b], [])
        keys.append(tuple(_place_similar(step.observation_data, known, threshold) for step in steps))
    return tuple(keys)


def _find_key(hashing: Callable[[Any], Hashable], step: StepData, b: int) -> Hashable:
    key: Any = hashing(step.observation_data)
    if inspect.iscoroutine(key):
        key.close()  # a coroutine that is not awaited here
    try:
        hash(key)
    except TypeError:
        good = False
    else:
        good = not inspect.isawaitable(key)
    if not good:
        raise DataError(
            f"the state_hashing_function {describe_function(hashing)} gave {key!r:.100} ({type(key).__name__}) for step "
            f"{step.system_step_index} of episode {b}, which is no key: give a plain function that returns a text, a number or a tuple"
        )
    return key


def _pad(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Pad ragged rows to # [B, K]."""
    width = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype).reshape(len(rows), width)


def _place_similar(text: str, firsts: list[str], threshold: float) -> int:
    """Find the place of a similar text, as find_similar does, or append the text."""
    place = find_similar(text, firsts, threshold)
    if place == len(firsts):
        firsts.append(text)
    return place


def describe_turns(levels: TurnLevels, row: int) -> list[dict[str, Any]]:
    """Describe the terms of the advantage of each turn of a row as plain JSON values: for step_info, logs and trajectory files.

    Returns: episode_advantage (A_E), step_reward, return_to_go (G_k), anchor (its number), anchor_size (turns that share it, this one
        among them), step_advantage (A_S), advantage; and of StepLevels state, the key as text.
    """
    columns = (levels.rewards, levels.returns, levels.anchors, levels.step, levels.combined)
    turns = [values for values in zip(*(column[row].tolist() for column in columns), strict=True) if values[2] >= 0]
    sizes = torch.bincount(levels.anchors[levels.anchors >= 0]).tolist()
    described: list[dict[str, Any]] = [
        {
            "episode_advantage": levels.episode[row].item(),
            "step_reward": reward,
            "return_to_go": step_return,
            "anchor": anchor,
            "anchor_size": sizes[anchor],
            "step_advantage": step,
            "advantage": combined,
        }
        for reward, step_return, anchor, step, combined in turns
    ]
    if isinstance(levels, StepLevels):
        return [turn | {"state": str(key)} for turn, key in zip(described, levels.keys[row], strict=True)]
    return described


def word_turn(told: Mapping[str, Any]) -> str:
    """Write the terms of describe_turns for one turn on one line: numbers with four digits."""
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in told.items())


def with_step_advantages(batch: TrainBatch, steps: Sequence[Sequence[StepData]]) -> TrainBatch:
    """Fill advantages # [B, T] from the steps of a batch's rows: each at the trained tokens of its turn, 0 elsewhere.

    Use it if advantages come from steps and not from an estimator: replace(dapo(), estimate=partial(with_step_advantages, steps=steps))
    trains on them with DAPO's loss.

    Args:
        batch: with turns; row b is the sample whose steps are steps[b].
        steps: steps of each row, one for each of its turns, advantage filled.

    Returns: returns are filled, too, if every step has a return_to_go.
    Raises: DataError, naming row and step, if the steps are not those of the turns, or have no finite advantage.
    """
    turns = batch.turns
    assert turns is not None, "with_step_advantages needs batch.turns: the samples must carry the turns of their episodes"
    if len(steps) != batch.num_rows:
        raise DataError(f"there are the steps of {len(steps)} episodes for {batch.num_rows} rows: give them in the order of the rows")
    counts = (turns.states >= 0).sum(dim=1).tolist()
    advantages, returns = (torch.zeros(turns.states.shape, dtype=batch.loss_mask.dtype) for _ in range(2))
    has_returns = True
    for b, (row, count) in enumerate(zip(steps, counts, strict=True)):
        if len(row) != count:
            raise DataError(
                f"row {b} has {count} turns, but {len(row)} steps: each step is one turn, in the order of the rows of the batch"
            )
        for k, step in enumerate(row):
            if step.advantage is None or not math.isfinite(step.advantage):
                raise DataError(f"step {k} of row {b} has advantage {step.advantage}: call system_apply_gigpo_to_batch_steps first")
            advantages[b, k] = step.advantage
            returns[b, k] = math.nan if step.return_to_go is None else step.return_to_go
            has_returns = has_returns and step.return_to_go is not None
    on, nothing = batch.loss_mask > 0, torch.zeros_like(batch.rewards)

    def spread(values: Tensor) -> Tensor:
        return spread_turns(values.to(turns.ids.device), turns.ids, nothing) * on

    return replace(batch, advantages=spread(advantages), returns=spread(returns) if has_returns else batch.returns)


def merge_similar_states(group: Group, *, threshold: float) -> Group:
    """Make similar states of a group equal: each text becomes the first one of the group that is similar enough.

    Use it if an environment words one state in several ways: Sample.turns have texts as states, and the samples are not yet a batch.

    Args:
        group: samples of one group; states that are None stay so.
        threshold: in (0, 1], of anchors.similarity; the order of samples and turns matters.
    """
    firsts: list[str] = []
    merged: list[Any] = []
    for sample in group:
        turns = sample.turns
        if turns is not None:
            turns = tuple(t if t.state is None else replace(t, state=firsts[_place_similar(t.state, firsts, threshold)]) for t in turns)
        merged.append(replace(sample, turns=turns))
    return tuple(merged)
