"""Evaluation: answers to held-out prompts, scored and summarized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from rollouts.chat.tokenize import Messages
from rollouts.config import RewardConfig
from rollouts.data.prompts import parse_prompt
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, GenerationError, raise_single_errors
from rollouts.generation.contract import note_prompt
from rollouts.generation.single_turn import GroupSettings, generate_group
from rollouts.rewards.evaluate import score_group
from rollouts.types import Group, Prompt, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EVALUATION_PREFIX = "eval-"
"""Prefix of the request ids of evaluate_prompts: an engine may have them beside those of rollouts of prompts with the same numbers."""


async def evaluate_prompts(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt | str | Messages],
    reward_fn: Callable[[Sample], Any],
    params: SamplingParams,
    n: int = 1,
    *,
    reward: RewardConfig | None = None,
    settings: GroupSettings | None = None,
) -> tuple[dict[str, float], tuple[Sample, ...]]:
    """Generate and score n samples for each prompt.

    Args:
        prompts: numbered by their place here, not by their index: the same prompts and seed give the same samples.
        reward_fn: Sample -> reward, sync or async.
        params: params.new(greedy=True) for greedy accuracy.
        reward: timeout and treatment of errors; samples of dropped groups count nowhere but in num_dropped.
        settings: default: GroupSettings(); request ids get the prefix "eval-".

    Returns: metrics (accuracy = mean reward, num_samples, num_dropped, response_length_mean, response_length_max, truncated_fraction)
        and the scored samples in the order of the prompts.
    """
    if not prompts:
        raise ConfigError("there are no prompts to evaluate on (found 0): check the evaluation data")
    groups: dict[int, Group | None] = {}
    own = replace(settings or GroupSettings(), id_prefix=EVALUATION_PREFIX)

    async def evaluate_one(prompt: Prompt) -> None:
        with note_prompt(prompt):
            group = await generate_group(engine, tokenizer, prompt, n, params, own)
            groups[prompt.index] = await score_group(group, reward_fn, reward or RewardConfig())

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for i, prompt in enumerate(prompts):
                nursery.start_soon(evaluate_one, replace(parse_prompt(prompt), index=i))
    return summarize_evaluation([groups[i] for i in range(len(prompts))], n)


def summarize_evaluation(groups: Sequence[Group | None], n: int) -> tuple[dict[str, float], tuple[Sample, ...]]:
    """Summarize n scored samples for each prompt, as evaluate_prompts returns them; None stands for a group that was dropped.

    "accuracy" is an accuracy if every reward is 0 or 1. Otherwise there is a metric "graded_fraction": the share of samples with another
    reward.

    Raises: GenerationError if all groups were dropped.
    """
    scored = [group for group in groups if group is not None]
    samples = tuple(sample for group in scored for sample in group)
    if not samples:
        raise GenerationError(f"all {len(groups)} evaluation groups were dropped because they or their rewards failed: see the warnings")
    lengths = [sum(mask > 0 for mask in sample.loss_mask) for sample in samples]
    metrics = {
        "accuracy": sum(sample.reward or 0.0 for sample in samples) / len(samples),
        "num_samples": float(len(samples)),
        "num_dropped": float(n * (len(groups) - len(scored))),
        "response_length_mean": sum(lengths) / len(samples),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }
    num_graded = sum(sample.reward not in (0.0, 1.0, None) for sample in samples)
    return metrics | ({"graded_fraction": num_graded / len(samples)} if num_graded else {}), samples
