"""Single-turn rollouts: the group of a prompt.

Everything random is keyed by (seed, prompt.index, number of the sample in its group, tokens already there), and every result is in the
order of the prompts: neither depends on what else runs nor on which answer arrives first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import TYPE_CHECKING, Any

import trio

from rollouts.chat.tokenize import Messages, tokenize_prompt
from rollouts.data.prompts import parse_prompt
from rollouts.data.samples import completion_to_sample, create_pending_group
from rollouts.engines.protocol import EngineFeature, GroupGeneration, InferenceEngine, require_engine_feature, with_kept_tokens
from rollouts.errors import ConfigError, raise_single_errors
from rollouts.generation.contract import UNFINISHED
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, SamplingParams, Status, change

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    params = with_kept_tokens(params, engine)
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
        request = change(params, max_tokens=params.max_tokens - num_done, seed=derive_seed(seed, prompt.index, k, num_done))
        if k >= n:
            request = request.new(greedy=True)
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
    if len(requests) == 1:  # as in evaluations, without the cost of a nursery
        await requests[0]()
        return tuple(samples)
    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for request in requests[1:]:
                nursery.start_soon(request)
            await requests[0]()  # in this task, which would only wait
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
        params: see generate_group.
        seed, template_kwargs: see GroupSettings.
        num_greedy: greedy samples beside the n of each call; the same as RolloutConfig.n_baseline_samples.
        one_request_per_group: one request for the n samples of a new group; see GroupSettings.one_request.

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
