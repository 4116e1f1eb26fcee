"""Checks of the reward on the user's own rows: the same twice, fast enough, within a range, and higher for a right answer than for none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from integration.doctor.findings import Finding, judge, skip
from rollouts.config import RewardConfig
from rollouts.errors import RewardError
from rollouts.rewards.evaluate import score_group
from rollouts.types import Prompt, Sample, Status

_SLOW_S = 1.0  # seconds of a reward from which it is worth a warning
_LEAK = 0.5  # share of prompts with their answer in them that is no accident


async def check_reward(
    reward_fn: Callable[..., Any] | None,
    prompts: Sequence[Prompt],
    encode: Callable[[str], Sequence[int]],
    *,
    config: RewardConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Finding]:
    """Check a reward function on prompts, each with its right answer, an empty answer and a copy of the prompt.

    Args:
        reward_fn: None = the environment's rewards, which are not checked here.
        encode: text to tokens.
    """
    name = "reward"
    if reward_fn is None or not prompts:
        return [skip(name, "the environment gives the rewards" if reward_fn is None else "no prompts for RL")]
    answers = [read_answer(prompt) for prompt in prompts]
    tried = {"right": answers, "empty": ["" for _ in prompts], "copied": [read_text(prompt) for prompt in prompts]}
    scores: dict[str, list[float | None]] = {}
    started, count = clock(), 0
    try:
        for kind, texts in tried.items():
            scores[kind] = await _score(reward_fn, prompts, texts, encode, config)
            count += sum(score is not None for score in scores[kind])
        seconds = (clock() - started) / max(1, count)
        again = {kind: await _score(reward_fn, prompts, texts, encode, config) for kind, texts in tried.items()}
    except RewardError as error:
        advice = "`rollouts reward` tries a reward function on rows of data and shows its errors"
        return [judge(name, f"the reward fails on an answer that a model can give: {error}", fails=True, advice=advice)]
    known = [score for found in scores.values() for score in found if score is not None]
    low, high = min(known), max(known)
    same = sum(a == b for kind in scores for a, b in zip(scores[kind], again[kind], strict=True))
    total = sum(map(len, scores.values()))
    return [
        judge(
            "reward repeats",
            f"{same} of {total} answers get the same reward twice",
            warns=same < total,
            advice="a random reward makes runs that cannot be repeated or resumed exactly: give it a seed from the sample's index",
        ),
        judge(
            "reward speed",
            f"{1000 * seconds:.3g} ms per answer",
            warns=seconds > _SLOW_S,
            advice="rewards are computed beside generation, but a step waits for the last: make it async, or allow fewer samples",
        ),
        judge("reward range", f"from {low:g} to {high:g}", warns=low == high, advice="equal rewards give no gradient: see the next lines"),
        _judge_answers(scores),
        check_leak(prompts, answers, scores),
    ]


def _judge_answers(scores: dict[str, list[float | None]]) -> Finding:
    name = "reward of right answers"
    tried = zip(scores["right"], scores["empty"], strict=True)
    pairs = [(right, empty) for right, empty in tried if right is not None and empty is not None]
    if not pairs:
        return skip(name, "the rows have no ground truth in words, so that no right answer is known")
    better = sum(right > empty for right, empty in pairs)
    found = f"the ground truth as an answer gets more than an empty answer in {better} of {len(pairs)} rows"
    advice = "the reward reads something else than the ground truth of these rows, or wants a format around it: try answers by hand"
    return judge(name, found, warns=better < len(pairs), fails=False, advice=advice)


def check_leak(prompts: Sequence[Prompt], answers: Sequence[str | None], scores: dict[str, list[float | None]]) -> Finding:
    """Check that prompts do not contain their answers, and that a copy of the prompt is not rewarded as a right answer is."""
    name = "reward leaks"
    known = [
        (read_text(prompt), answer.strip()) for prompt, answer in zip(prompts, answers, strict=True) if answer and len(answer.strip()) > 1
    ]
    inside = sum(answer in text for text, answer in known)
    copied = [(c, e, r) for c, e, r in zip(scores["copied"], scores["empty"], scores["right"], strict=True) if None not in (c, e, r)]
    paid = sum(c > e and c >= r for c, e, r in copied)  # type: ignore[operator]
    free = sum(e >= r and e > 0 for _, e, r in copied)  # type: ignore[operator]
    if known and inside > _LEAK * len(known):
        found = f"{inside} of {len(known)} prompts contain their own ground truth word by word"
        truths = {answer for _, answer in known}
        choices = sum(any(other in text for other in truths if other not in answer and answer not in other) for text, answer in known)
        if 2 * choices >= inside:  # a choice of answers, which the question needs
            advice = "right if the answer is to be chosen from the prompt; otherwise the model learns to copy: remove the answer from it"
            return judge(name, f"{found}, {choices} that of another row as well", warns=True, fails=False, advice=advice)
        return judge(name, found, fails=True, advice="the model learns to copy: remove the answer from the prompt")
    if copied and paid > _LEAK * len(copied):
        found = f"a copy of the prompt gets the reward of a right answer in {paid} of {len(copied)} rows"
        return judge(name, found, fails=True, advice="the reward pays for text that the prompt gives: read only the model's own answer")
    if copied and free > _LEAK * len(copied):
        found = f"an empty answer gets the reward of a right answer, or more, in {free} of {len(copied)} rows"
        return judge(
            name, found, fails=True, advice="the reward pays whatever is answered, or reads the prompt: read the model's own answer"
        )
    if not known and not copied:
        return skip(name, "the rows have no ground truth in words")
    return judge(
        name, f"{inside} of {len(known)} prompts contain their ground truth; a copied prompt is paid in {paid} of {len(copied)} rows"
    )


async def _score(
    reward_fn: Callable[..., Any],
    prompts: Sequence[Prompt],
    texts: Sequence[str | None],
    encode: Callable[[str], Sequence[int]],
    config: RewardConfig,
) -> list[float | None]:
    """Return the reward of one answer to each prompt; None where there is no answer to try."""
    scores: list[float | None] = []
    for prompt, text in zip(prompts, texts, strict=True):
        if text is None:
            scores.append(None)
            continue
        group = await score_group((create_answer(prompt, text, encode),), reward_fn, replace(config, on_error="raise"))
        assert group is not None, "on_error is raise, so no group is dropped"
        scores.append(group[0].reward)
    return scores


def create_answer(prompt: Prompt, text: str, encode: Callable[[str], Sequence[int]]) -> Sample:
    """Return the sample of a text as an answer to a prompt."""
    before, after = tuple(encode(read_text(prompt))) or (0,), tuple(encode(text))
    return Sample(
        prompt=prompt.content,
        tokens=before + after,
        loss_mask=(0.0,) * len(before) + (1.0,) * len(after),
        response=text,
        status=Status.COMPLETED,
        index=prompt.index,
        group_index=prompt.index,
        metadata=prompt.metadata,
    )


def read_text(prompt: Prompt) -> str:
    """Return the text of a prompt: itself, or its last message."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].content or "")


def read_answer(prompt: Prompt) -> str | None:
    """Return the ground truth of a prompt, if it is a text or a number."""
    truth = prompt.metadata.get("ground_truth")
    return str(truth) if isinstance(truth, str | int | float) and not isinstance(truth, bool) and str(truth) else None
