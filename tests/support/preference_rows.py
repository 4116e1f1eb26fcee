"""Preferences for tests, and an objective of each kind."""

from __future__ import annotations

from dataclasses import replace

from rollouts.algorithms import preference_objectives as objectives
from rollouts.algorithms.preference_objectives import PreferenceObjective
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import PreferencePair, prepare_preference_pair
from rollouts.preference_loop import PreferenceRow

OBJECTIVES: dict[str, PreferenceObjective] = {
    "dpo": objectives.dpo(beta=0.5),
    "cdpo": objectives.cdpo(beta=0.5),
    "robust": objectives.robust_dpo(beta=0.5),
    "ipo": objectives.ipo(beta=0.5),
    "slic": objectives.slic(beta=0.5),
    "kto": objectives.kto(beta=0.5),
    "orpo": objectives.orpo(beta=1.0),
    "simpo": objectives.simpo(),
}


def make_pairs(n: int = 40) -> tuple[PreferencePair, ...]:
    """Small digits are preferred to large ones, in answers of various lengths."""
    tokenizer = create_char_tokenizer()
    rows = [{"prompt": f"{i % 10}=", "chosen": "x" * (1 + i % 3) + str(i % 5), "rejected": "x" + str(5 + i % 4)} for i in range(n)]
    return tuple(prepare_preference_pair(tokenizer, row, whole_answers=True) for row in rows)


def make_rows(name: str, n: int = 40) -> tuple[PreferenceRow, ...]:
    pairs = make_pairs(n)
    if OBJECTIVES[name].compares_pairs:
        return pairs
    return tuple(replace(answer, reward=label) for pair in pairs for answer, label in ((pair.chosen, 1.0), (pair.rejected, 0.0)))
