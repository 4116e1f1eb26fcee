"""Prompts in a saved state of asynchronous rollouts, wherever in it they are."""

from __future__ import annotations

from typing import Any


def find_prompts(state: Any) -> list[int]:
    """Indices of all prompts in a JSON value, sorted; one that stands there twice is there twice."""
    if isinstance(state, dict):
        if {"content", "index", "metadata"} <= set(state):
            return [state["index"]]
        return sorted(index for value in state.values() for index in find_prompts(value))
    return sorted(index for value in state for index in find_prompts(value)) if isinstance(state, list) else []
