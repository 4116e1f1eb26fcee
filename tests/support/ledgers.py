"""An engine that keeps what it has sampled, and comparisons of samples with that: nothing is lost, mixed up or trained on twice."""

from __future__ import annotations

import random
from collections import Counter

import trio

from rollouts.testing import FakeEngine
from rollouts.types import Completion


class LedgerEngine(FakeEngine):
    """A fake engine whose answers depend on prompt and seed, each token with a log-prob of its own; `ledger` has them by request id."""

    def __init__(self, answer=None, *, mean_s=0.0, seed=0, **options):
        super().__init__(answer, **options)
        self.ledger: dict[str, Completion] = {}
        self._mean_s, self._random = mean_s, random.Random(seed)
        self._number = 0

    async def generate(self, prompt_tokens, params, *, request_id=None):
        if self._mean_s:
            await trio.sleep(self._random.expovariate(1 / self._mean_s))
        found = await super().generate(prompt_tokens, params, request_id=request_id)
        self._number += 1
        log_probs = tuple(-(self._number + k / 1000) / 1e6 for k in range(found.output_len))
        found = Completion(**{**vars(found), "output_log_probs": log_probs, "untempered_log_probs": None})
        assert request_id not in self.ledger or self.ledger[request_id].finish_reason == "abort"
        self.ledger[request_id] = found
        return found


def list_trained(sample):
    """(input tokens, output tokens, log-probs, versions) of each turn of a sample, and check that the mask is 1 on these alone."""
    starts = (0, *sample.context_starts)
    found = []
    mask = [0.0] * len(sample.tokens)
    for turn in sample.turns:
        start = max(s for s in starts if s <= turn.start)
        at = slice(turn.start, turn.end)
        found.append((sample.tokens[start : turn.start], sample.tokens[at], sample.rollout_log_probs[at], sample.weight_versions[at]))
        mask[at] = [1.0] * (turn.end - turn.start)
    assert tuple(mask) == sample.loss_mask
    return found


def list_sampled(ledger, prefix=""):
    """The same of the completions of an engine whose request ids begin with the prefix."""
    return [
        (found.input_tokens, found.output_tokens, found.output_log_probs, found.output_versions)
        for request_id, found in ledger.items()
        if request_id.startswith(prefix)
    ]


def check_same(sample, ledger, prefix=""):
    """Every answer of the engine is trained on once, exactly as it was sampled, behind the tokens that it was sampled behind."""
    assert Counter(list_trained(sample)) == Counter(list_sampled(ledger, prefix))
