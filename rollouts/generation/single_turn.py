"""Single-turn rollouts: one group of a prompt, batches without an event loop, and evaluation.

Everything random is keyed by (seed, prompt.index, number of the sample in its group, tokens already there), and every result is in the
order of the prompts: neither depends on what else runs nor on which answer arrives first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import TYPE_CHECKING, Any

import trio

from rollouts.chat.tokenize import Messages, tokenize_prompt
from rollouts.checks import describe_function, is_async_function
from rollouts.config import RewardConfig, RolloutConfig, take_apart
from rollouts.data.prompts import DataBuffer, parse_prompt
from rollouts.data.samples import completion_to_sample, convert_to_batch, create_pending_group, passes_filter
from rollouts.engines.protocol import EngineFeature, GroupGeneration, InferenceEngine, require_engine_feature
from rollouts.errors import ConfigError, GenerationError, raise_single_errors
from rollouts.generation.contract import UNFINISHED, check_generated_group, is_finished, note_prompt
from rollouts.rewards.evaluate import score_group, score_now
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, RolloutBatch, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EVALUATION_PREFIX = "eval-"
"""Prefix of the request ids of evaluate_prompts: an engine may have them beside those of rollouts of prompts with the same numbers."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings that all groups of a run share, besides engine, tokenizer and sampling parameters."""

    seed: int = 0  # params.seed of sample k is derive_seed(seed, prompt.index, k, tokens already there)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of the chat template
    num_greedy: int = 0  # greedy samples beside the n of each call: 1 for ReMax, whose baseline is the reward of the greedy answer. The n
    # samples are the same with it and without
    one_request: bool = False  # ask for the n samples of a new group in one request, with the id of the first sample and the seed
    # derive_seed(seed, prompt.index, 0, 0): other samples than without it. Greedy samples, and samples of a group that has begun, still
    # take a request each
    id_prefix: str = ""  # prefix of request ids, which must differ from those of all other requests of the engine at the same time


def make_request_id(group_index: int, sample_number: int) -> str:
    """Return the id of one sample's request; ids sort as (group_index, sample_number) do."""
    return f"{group_index:012d}-{sample_number:04d}"


async def generate_group(
    engine: InferenceEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt | str | Messages,
    n: int,
    params: SamplingParams,
    settings: GroupSettings | None = None,
    *,
    partial: Group = (),
) -> Group:
    """Generate the n samples of one prompt at once, and beside them settings.num_greedy greedy ones that are not trained on.

    Args:
        tokenizer: the engine's tokenizer; it tokenizes the prompt (once for all samples) and decodes responses.
        prompt: a text or messages get index 0.
        n: group size G.
        params: sampling of each sample; its seed is replaced, see GroupSettings.
        settings: default: GroupSettings().
        partial: the group as an earlier call returned it, some samples ABORTED or PENDING. ABORTED ones go on from the tokens they
            have with the rest of params.max_tokens; finished ones are returned as they are.

    Returns: n + num_greedy samples in the order of their index (prompt.index * (n + num_greedy) + k), group_index = prompt.index,
        metadata copied from the prompt; the greedy ones are the last and have trainable = False.
        Status is COMPLETED, TRUNCATED (max_tokens reached) or ABORTED (the engine was told to abort).
    Raises: the engine's error (an ExceptionGroup only if several requests failed); ConfigError for one_request if the engine lacks
        EngineFeature.GROUPS.
    """
    settings = settings or GroupSettings()
    seed, num_greedy, id_prefix = settings.seed, settings.num_greedy, settings.id_prefix
    if settings.one_request:
        _require_groups(engine)
    prompt = parse_prompt(prompt)
    samples = list(partial or create_pending_group(prompt, n, num_baseline=num_greedy))
    assert len(samples) == n + num_greedy, f"partial has {len(samples)} samples, expected n + num_greedy = {n} + {num_greedy}"
    assert all(sample.group_index == prompt.index for sample in samples), f"partial is not of prompt {prompt.index}"
    prompt_tokens = tokenize_prompt(tokenizer, prompt.content, **settings.template_kwargs)

    async def generate_sample(k: int) -> None:
        pending = samples[k]
        tokens = pending.tokens or prompt_tokens
        num_done = len(tokens) - len(prompt_tokens)
        if num_done >= params.max_tokens:
            samples[k] = replace(pending, status=Status.TRUNCATED)
            return
        request = params.new(max_tokens=params.max_tokens - num_done, seed=derive_seed(seed, prompt.index, k, num_done))
        if k >= n:
            request = request.new(greedy=True, top_p=1.0, top_k=0, min_p=0.0)
        add_completion(k, await engine.generate(tokens, request, request_id=id_prefix + make_request_id(prompt.index, k)))

    async def generate_together() -> None:
        request = params.new(seed=derive_seed(seed, prompt.index, 0, 0))
        grouping = _require_groups(engine)
        completions = await grouping.generate_group(prompt_tokens, request, n, request_id=id_prefix + make_request_id(prompt.index, 0))
        assert len(completions) == n, f"the engine returned {len(completions)} completions for n = {n}"
        for k, completion in enumerate(completions):
            add_completion(k, completion)

    def add_completion(k: int, completion: Completion) -> None:
        response_tokens = [*(samples[k].tokens or prompt_tokens)[len(prompt_tokens) :], *completion.output_tokens]
        text = str(tokenizer.decode(response_tokens, skip_special_tokens=True))
        samples[k] = completion_to_sample(samples[k], prompt_tokens, completion, text)

    # a group that has begun must not get the same seed again: its new samples could repeat finished ones
    together = settings.one_request and all(sample.status in UNFINISHED and sample.tokens in ((), prompt_tokens) for sample in samples[:n])
    requests: list[Callable[[], Awaitable[None]]] = [generate_together] if together else []
    requests += [bind(generate_sample, k) for k, s in enumerate(samples) if s.status in UNFINISHED and not (together and k < n)]
    if len(requests) == 1:  # as in evaluations; a task of its own costs as much as the rest of it
        await requests[0]()
        return tuple(samples)
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(request)
    return tuple(samples)


def _require_groups(engine: InferenceEngine) -> GroupGeneration:
    advice = "Set one_request_per_group to false for it."
    return require_engine_feature(engine, EngineFeature.GROUPS, "one request for a group", instead=advice)


def create_generate_fn(
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    *,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    num_greedy: int = 0,
    one_request_per_group: bool = False,
) -> SingleTurnGenerateFn:
    """Create a generate function of single-turn rollouts, for RolloutConfig.generate_fn.

    Args:
        engines: at least one. The prompt with index i goes to engine i % len(engines), so the same run asks the same engine again.
        params, seed, template_kwargs: see generate_group.
        num_greedy: greedy samples beside the n of each call; the same as RolloutConfig.n_baseline_samples.
        one_request_per_group: one request for the n samples of a new group; see generate_group.

    Returns: async generate_fn(prompt, n, partial=()) -> Group, which continues unfinished groups.
    Raises: ConfigError if there is no engine, or an engine without EngineFeature.GROUPS for one_request_per_group.
    """
    if not engines:
        raise ConfigError("there are no engines to generate with (found 0): pass at least one")
    serving = tuple(engines)
    if one_request_per_group:
        for engine in serving:
            _require_groups(engine)

    settings = GroupSettings(seed=seed, template_kwargs=template_kwargs or {}, num_greedy=num_greedy, one_request=one_request_per_group)
    return SingleTurnGenerateFn(serving, tokenizer, params, settings)


@dataclass(frozen=True)
class SingleTurnGenerateFn:
    """The generate function of create_generate_fn."""

    engines: tuple[InferenceEngine, ...]
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    settings: GroupSettings

    @property
    def gives_turns(self) -> bool:
        """False: its samples are single answers, not episodes."""
        return False

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        """Return the group of a prompt; see generation/contract.py."""
        engine = self.engines[prompt.index % len(self.engines)]
        return await generate_group(engine, self.tokenizer, prompt, n, self.params, self.settings, partial=partial)


async def score_generated_group(group: Group, reward_fn: Callable[[Sample], Any] | None, reward: RewardConfig) -> Group | None:
    """Score a group that generate_fn returned, if it is finished; an unfinished one stays as it is.

    Returns: None if a sample has FAILED, or its reward has and reward.on_error is "drop".
    Raises: RewardError as score_group does.
    """
    if any(sample.status is Status.FAILED for sample in group):
        return None
    return group if reward_fn is None or not is_finished(group) else await score_group(group, reward_fn, reward)


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


def generate_rollout_batches(data_buffer: DataBuffer, config: RolloutConfig, **generate_kwargs: Any) -> Iterator[RolloutBatch]:
    """Generate batches without end and without an event loop, for a sync generate_fn. Same buffer position and config: same batches.

    Prompts are taken and generated one after another until config.batch_size groups have passed the filter, so there is nothing to
    over-sample. Rewards are called directly: the first failure is raised, and there is no timeout.

    Args:
        config: generate_fn and reward_fn must be sync.
        generate_kwargs: further arguments of generate_fn.

    Returns: an infinite iterator; each batch has exactly config.batch_size groups.
    Raises: ConfigError at once if a function is missing or async; GenerationError if the filter passes too little.
    """
    config = take_apart(config)
    if config.generate_fn is None:
        raise ConfigError("RolloutConfig.generate_fn is None: set the function that generates a group, generate_fn(prompt, n)")
    for name, function in (("generate_fn", config.generate_fn), ("reward_fn", config.reward_fn), ("filter_fn", config.filter_fn)):
        if function is not None and is_async_function(function):
            raise ConfigError(f"{name} {describe_function(function)} is async: use AsyncRolloutManager, or pass a plain function")
    return _iterate_batches(data_buffer, config, bind(config.generate_fn, **generate_kwargs))


def _iterate_batches(data_buffer: DataBuffer, config: RolloutConfig, generate: Callable[..., Any]) -> Iterator[RolloutBatch]:
    n, name = config.n_samples_per_prompt, describe_function(generate)
    while True:
        kept: list[Group] = []
        rejected: list[Group] = []
        num_dropped = num_rounds = 0
        while len(kept) < config.batch_size:
            if num_rounds == config.max_filter_attempts:
                raise create_starvation_error(config, len(kept), rejected, num_dropped=num_dropped, num_rounds=num_rounds)
            num_rounds += 1
            for prompt in data_buffer.get_prompts(config.batch_size - len(kept)):
                with note_prompt(prompt):
                    group = check_generated_group(generate(prompt, n), prompt, n, name, num_baseline=config.n_baseline_samples)
                    if not is_finished(group):
                        raise GenerationError(
                            f"{name} returned an unfinished group, although nothing stopped it: see the status of its samples"
                        )
                    if any(sample.status is Status.FAILED for sample in group):
                        num_dropped += 1
                        continue
                    scored = group if config.reward_fn is None else score_now(group, config.reward_fn)
                    passes = passes_filter(scored, config.filter_fn)
                (kept if passes else rejected).append(scored)
        counts = {"num_groups_generated": len(kept) + len(rejected) + num_dropped, "num_groups_filtered": len(rejected)}
        yield convert_to_batch((sample for group in kept for sample in group), {**counts, "num_groups_dropped": num_dropped})


def create_starvation_error(
    config: RolloutConfig, num_passed: int, rejected: Sequence[Group], *, num_dropped: int, num_rounds: int
) -> GenerationError:
    """Create the error for a batch that does not fill up, with the counts that explain it."""
    num_finished = num_passed + len(rejected)
    parts = [f"only {num_passed} of the {config.batch_size} groups of a batch were found in {num_rounds} rounds of generation"]
    if config.filter_fn is not None and num_finished:
        rate = num_passed / num_finished
        parts.append(f"filter_fn {describe_function(config.filter_fn)} passed {num_passed} of {num_finished} groups (pass rate {rate:.3g})")
    if num_dropped:
        parts.append(f"{num_dropped} groups were dropped because their generation or reward failed")
    rewards = [sample.reward for group in rejected for sample in group if sample.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        parts.append(f"rewards of the refused groups: min {min(rewards):.4g}, mean {mean:.4g}, max {max(rewards):.4g}")
    elif rejected:
        parts.append("the refused groups have no rewards: was reward_fn set?")
    return GenerationError(
        ". ".join(parts) + ". Look at the rewards of a few samples, ease the filter, raise n_samples_per_prompt or over_sampling_factor, "
        f"or raise max_filter_attempts ({config.max_filter_attempts})."
    )


def generate_rollout_batch(data_buffer: DataBuffer, config: RolloutConfig, **generate_kwargs: Any) -> RolloutBatch:
    """Return the next batch of generate_rollout_batches."""
    return next(generate_rollout_batches(data_buffer, config, **generate_kwargs))
