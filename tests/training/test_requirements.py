"""A run that lacks something its algorithm requires is refused before the first rollout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rollouts.algorithms.presets import decoupled, gigpo, grpo, ppo, remax
from rollouts.backends.factory import create_critic_backend, create_pytorch_backend, create_reference_backend
from rollouts.backends.futures import open_pipeline
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.errors import ConfigError
from rollouts.generation.contract import gives_turns
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.generation.single_turn import create_generate_fn
from rollouts.models.forward.outputs import compute_scores
from rollouts.testing import FakeBackend, FakeEngine, create_tiny_model
from rollouts.training.requirements import FILLABLE, check_requirements, check_rl_batch_sizes
from rollouts.types import Algorithm, SamplingParams


def test_what_is_missing_is_named_before_anything_runs():
    critic = FakeBackend(name="critic")
    check_requirements(ppo(), None, critic)
    check_requirements(grpo(), FakeBackend())  # a reference that is not needed is not used
    for algorithm, reference, given_critic, controls_kl, message in (
        (ppo(), None, None, False, "pass critic="),
        (grpo(kl_coef=0.1), None, None, False, "pass reference="),
        (grpo(), None, critic, False, "critic= was given"),
        (grpo(), FakeBackend(), None, True, "kl_control is set"),
        (replace(grpo(), requires=frozenset({"advantages"})), None, None, False, "cannot fill"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_requirements(algorithm, reference, given_critic, controls_kl=controls_kl)


def make_backends() -> dict[str, PyTorchTrainingBackend]:
    """One of each kind, and two of another tokenizer."""
    own, other = {"tokenizer": create_char_tokenizer()}, {"tokenizer": create_char_tokenizer(80)}
    critic = create_critic_backend(create_tiny_model(), lr=1e-3, **own)
    scorer = torch.optim.SGD(critic.model.parameters(), lr=0.1)
    return {
        "policy": create_pytorch_backend(create_tiny_model(), lr=1e-3, **own),
        "reference": create_reference_backend(create_tiny_model(), **own),
        "critic": critic,
        "scorer": PyTorchTrainingBackend(critic.model, scorer, compute_outputs=compute_scores, **own),
        "other reference": create_reference_backend(create_tiny_model(vocab_size=80), **other),
        "other critic": create_critic_backend(create_tiny_model(vocab_size=80), lr=1e-3, **other),
    }


@pytest.mark.parametrize("in_pipelines", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "reference", "critic", "message"),
    [
        (ppo(kl_coef=0.1), "reference", "critic", None),
        (ppo(), "other reference", "critic", None),  # not needed, not touched
        (ppo(), None, "policy", "critic= computes entropy, log_probs and no values: it needs a value head, .*create_critic_backend"),
        (ppo(), None, "scorer", "critic= computes scores and no values"),
        (ppo(), None, "other critic", "the critic's tokenizer differs from the policy's: the tokenizer has 80 tokens"),
        (grpo(kl_coef=0.1), "critic", None, "reference= computes values and no log_probs: .*create_reference_backend"),
        (grpo(kl_coef=0.1), "other reference", None, "the reference's tokenizer differs from the policy's: the tokenizer has 80 tokens"),
    ],
)
async def test_backends_are_asked_what_they_compute_and_which_tokens_they_know(
    algorithm: Algorithm, reference: str | None, critic: str | None, message: str | None, in_pipelines: bool
):
    backends: dict[str | None, Any] = {None: None, **make_backends()}
    asked = [backends[name] for name in ("policy", reference, critic)]

    def check(policy: Any, reference: Any, critic: Any) -> None:
        if message is None:
            check_requirements(algorithm, reference, critic, backend=policy)
        else:
            with pytest.raises(ConfigError, match=message):
                check_requirements(algorithm, reference, critic, backend=policy)

    if in_pipelines:
        policy, one, two = (open_pipeline(backend or FakeBackend()) for backend in asked)
        async with policy as policy, one as one, two as two:
            check(policy, asked[1] and one, asked[2] and two)
    else:
        check(*asked)


def test_a_policy_must_have_log_probs():
    with pytest.raises(ConfigError, match="the policy's backend computes values and no log_probs"):
        check_requirements(grpo(), None, backend=make_backends()["critic"])


class Source:
    """A rollout source of the user's, which says nothing beforehand."""

    async def generate_batch(self) -> Any:
        raise AssertionError("a rollout was asked for")

    def state_dict(self) -> dict[str, Any]:
        return {}


class Described(Source):
    """Source with the configuration from which its columns can be told."""

    def __init__(self, **settings: Any) -> None:
        self.config = RolloutConfig(batch_size=2, **settings)


def make_manager(**settings: Any) -> AsyncRolloutManager:
    return AsyncRolloutManager(DataBuffer(["a"]), RolloutConfig(**{"batch_size": 2, "generate_fn": lambda prompt, n: [], **settings}))


@pytest.mark.parametrize(
    ("algorithm", "declared", "message"),
    [
        (remax(), {"n_baseline_samples": 1}, r"requires greedy_rows, .*n_baseline_samples=1.*num_greedy=1"),
        (
            decoupled(grpo(), segment_wise=True),
            {"segment_log_probs": True},
            r"requires segment_log_probs: set segment_wise=False, .*RolloutConfig\(segment_log_probs=True\)",
        ),
    ],
)
def test_the_source_is_asked_for_what_samples_must_bring_along(algorithm: Algorithm, declared: dict[str, Any], message: str):
    for source in (Described(**declared), make_manager(**declared)):
        check_requirements(algorithm, None, source=source)
    for source in (Described(), make_manager()):
        with pytest.raises(ConfigError, match=message):
            check_requirements(algorithm, None, source=source)
    with pytest.raises(ConfigError, match=message + ".*; Source has no property `config` that says so"):
        check_requirements(algorithm, None, source=Source())
    check_requirements(grpo(), None, source=Source())


def test_single_answers_have_no_turns_to_compare():
    single = create_generate_fn([FakeEngine()], create_char_tokenizer(), SamplingParams())
    assert gives_turns(single) is False and gives_turns(partial(single)) is False
    for source in (Described(generate_fn=single), make_manager(generate_fn=single)):
        with pytest.raises(ConfigError, match=r"requires turns: .*create_episode_generate_fn"):
            check_requirements(gigpo(), None, source=source)
        check_requirements(grpo(), None, source=source)
    for unknown in (Source(), Described(), make_manager()):  # what it samples is known when there is a batch
        check_requirements(gigpo(), None, source=unknown)


def test_every_column_that_may_be_required_is_one_that_somebody_fills():
    for column in FILLABLE - {"ref_log_probs", "values", "teacher_log_probs", "teacher_tops"}:
        check_requirements(replace(grpo(), requires=frozenset({column})), None)


def test_batch_sizes_must_divide():
    rollout = RolloutConfig(batch_size=6, n_samples_per_prompt=4)
    check_rl_batch_sizes(rollout, RLTrainingConfig(num_minibatches=8))
    with pytest.raises(
        ConfigError, match=r"6 prompts x 4 samples = 24 rows does not divide into num_minibatches = 7: choose a divisor of 24"
    ):
        check_rl_batch_sizes(rollout, RLTrainingConfig(num_minibatches=7))
