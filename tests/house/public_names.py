"""Names as a user imports them: from the library, and from each package. pyright reads this file strictly; nothing runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_type

from rollouts import (
    Algorithm,
    AsyncRolloutManager,
    DataBuffer,
    FakeEngine,
    InProcessEngine,
    Prompt,
    RLTrainingConfig,
    RolloutConfig,
    Sample,
    SGLangEngine,
    build_batch_metadata,
    compute_response_lengths,
    create_pytorch_backend,
    decoupled,
    extract_sample_fields,
    grpo,
    run_rl_training,
)
from rollouts.agents import EpisodeConfig
from rollouts.algorithms import clipped, dapo, policy_loss
from rollouts.asynchronous import AsyncConfig
from rollouts.backends import PyTorchTrainingBackend
from rollouts.chat import create_char_tokenizer
from rollouts.data import collate_samples
from rollouts.engines import VLLMEngine
from rollouts.environments import GridWorld
from rollouts.generation import create_generate_fn
from rollouts.models import load_hf_model
from rollouts.rewards import EvaluateResult
from rollouts.sandbox import SandboxLimits
from rollouts.testing import FakeBackend
from rollouts.training import save_checkpoint
from rollouts.types import SamplingParams

ALGORITHMS: tuple[Algorithm, ...] = (grpo(kl_coef=0.02), decoupled(dapo(clip_high=0.28)))
LOSS = partial(policy_loss, surrogate=partial(clipped, low=0.2, high=0.28))
ENGINES: tuple[type[SGLangEngine] | type[VLLMEngine] | type[InProcessEngine] | type[FakeEngine], ...] = (SGLangEngine, VLLMEngine)
BACKENDS: tuple[type[PyTorchTrainingBackend] | type[FakeBackend], ...] = (PyTorchTrainingBackend, FakeBackend)
OTHERS = (AsyncConfig, AsyncRolloutManager, DataBuffer, EpisodeConfig, GridWorld, RolloutConfig, SandboxLimits)
FUNCTIONS = (collate_samples, create_char_tokenizer, create_generate_fn, create_pytorch_backend, load_hf_model, save_checkpoint)


def prefer_short_answers(sample: Sample) -> EvaluateResult:
    """Rate a sample; the checker knows what its fields are."""
    assert_type(sample.reward, float | None)
    return EvaluateResult(score=1.0 - len(sample.tokens) / SamplingParams().max_tokens)


def describe_samples(samples: Sequence[Sample]) -> tuple[list[int], list[str]]:
    """Call what is known from other toolkits."""
    lengths = compute_response_lengths(sample.loss_mask for sample in samples)
    return lengths, [*extract_sample_fields(samples), *build_batch_metadata(samples)]


assert_type(Prompt(content="1+1=").index, int)
assert_type(RLTrainingConfig(algorithm=grpo()).algorithm, Algorithm | None)
RUN: Callable[..., object] = run_rl_training
