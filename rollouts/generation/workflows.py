"""Workflows: objects with `arun_episode(engine, data)`, and generate functions of them for a RolloutConfig.

    class Mine:
        async def arun_episode(self, engine, data):
            completion = await engine.agenerate(LLMRequest(input_ids=..., gconfig=SamplingParams(max_tokens=64)))
            return sample                 # or a sequence of n samples, or None to drop the group

    config = RolloutConfig(n_samples_per_prompt=1, generate_fn=create_workflow_generate_fn(Mine(), engines))

arun_episode is one rollout: it returns the whole group of its prompt. After an interruption by a weight sync RLVRWorkflow and
ReMaxWorkflow go on from the tokens so far; a workflow of your own begins anew, unless it reads data.partial as they do. Where rewards
take time, make it a ScoredWorkflow as those two are: then answers are complete before their rewards, and no interruption loses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import trio

from rollouts.chat.tokenize import Messages
from rollouts.checks import is_async_function
from rollouts.config import GenerationConfig, RewardConfig
from rollouts.data.prompts import parse_prompt
from rollouts.data.samples import collect_reward_data, create_pending_group, find_response_start
from rollouts.engines.protocol import InferenceEngine, with_kept_tokens
from rollouts.errors import ConfigError, EpisodeInterrupted
from rollouts.generation.contract import is_finished, note_request
from rollouts.generation.single_turn import GroupSettings, generate_group, make_request_id
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.reward_functions import RewardFunction
from rollouts.seeds import derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WorkflowResult: TypeAlias = "Sample | Sequence[Sample] | None"
"""Samples of the group (a single Sample where it has one), or None: the group is dropped and counted."""


class RolloutWorkflow(Protocol):
    """Code that carries out one rollout."""

    async def arun_episode(self, engine: Any, data: Any) -> WorkflowResult:
        """Generate, act and score until the group is complete.

        Args:
            engine: a WorkflowEngine.
            data: a WorkflowData.
        """
        ...


@runtime_checkable
class ScoredWorkflow(RolloutWorkflow, Protocol):
    """Workflow with rewards that need no engine: they are called after the generation of the group, by RolloutConfig.reward."""

    reward_fn: Callable[[Sample], Any] | None  # Sample -> reward, sync or async; None = arun_episode does not score either
    reward: RewardConfig | None  # None = RolloutConfig.reward

    async def agenerate_group(self, engine: Any, data: Any) -> WorkflowResult:
        """Return the group of arun_episode, without rewards."""
        ...


class WorkflowData(dict[str, Any]):
    """Metadata of the prompt ("ground_truth", "answer", ...) with "messages" (or "prompt" for a text) beside them."""

    def __init__(self, prompt: Prompt, n_samples: int = 1, partial: Group = ()) -> None:
        """
        Args:
            prompt: prompt of this group.
            n_samples: number of samples of the group.
            partial: group of an interrupted rollout, some samples ABORTED or PENDING; () = begin.
        """
        text = isinstance(prompt.content, str)
        content = prompt.content if isinstance(prompt.content, str) else [message.to_dict() for message in prompt.content]
        super().__init__({("prompt" if text else "messages"): content, **prompt.metadata})
        self.prompt, self.n_samples, self.partial = prompt, n_samples, partial


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """Request of a workflow: tokens in."""

    input_ids: Sequence[int]
    gconfig: SamplingParams | GenerationConfig = field(default_factory=SamplingParams)
    rid: str | None = None  # request id; None = a new one, unique in the run


class WorkflowEngine:
    """InferenceEngine for one rollout, with request ids and seeds of its own, so that the same rollout gives the same tokens."""

    def __init__(self, engine: InferenceEngine, prompt_index: int = 0, *, seed: int = 0) -> None:
        self._engine, self._prompt_index, self._seed = engine, prompt_index, seed
        self._num_requests = 0
        self._interruption: str | None = None

    @property
    def was_interrupted(self) -> bool:
        """True if agenerate has raised EpisodeInterrupted."""
        return self._interruption is not None

    async def agenerate(self, request: LLMRequest) -> Completion:
        """Return the completion of a request, tokens out: input_tokens, output_tokens, output_log_probs, output_versions, ...

        Raises: EpisodeInterrupted if it was aborted, so that half an answer is not taken for a whole one; then also on each later call,
            for a workflow that has caught the first.
        """
        if self._interruption is not None:
            await trio.lowlevel.checkpoint()  # a workflow that tries again without end can be cancelled here
            raise EpisodeInterrupted(self._interruption)
        gconfig = request.gconfig
        params = gconfig if isinstance(gconfig, SamplingParams) else gconfig.sampling_params()
        completion = await self.generate(request.input_ids, params, request_id=request.rid)
        if completion.finish_reason == "abort":
            self._interruption = f"request {completion.request_id} was aborted after {completion.output_len} tokens"
            raise EpisodeInterrupted(self._interruption)
        return completion

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """Call the engine's generate. An aborted request returns its tokens so far; see agenerate."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if params.seed is None:
            params = params.new(seed=derive_seed(self._seed, self._prompt_index, number))
        name = make_request_id(self._prompt_index, number) if request_id is None else request_id
        note_request(name)
        return await self._engine.generate(prompt_tokens, with_kept_tokens(params, self._engine), request_id=name)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Call the engine's abort."""
        await self._engine.abort(request_ids)

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Raise ConfigError: a workflow does not change weights."""
        raise ConfigError(f"an episode was about to load weights from {checkpoint_path}: weights are changed by the training loop")

    async def get_weight_version(self) -> int:
        """Return the engine's weight version."""
        return await self._engine.get_weight_version()


WorkflowLike: TypeAlias = "RolloutWorkflow | Callable[[Any, Any], Awaitable[WorkflowResult]]"
"""An object with arun_episode(engine, data), or a function of that kind."""


def create_workflow_generate_fn(
    workflow: WorkflowLike, engines: Sequence[InferenceEngine], *, seed: int = 0, num_baseline: int = 0
) -> Callable[..., Awaitable[Group]]:
    """Create a generate function for RolloutConfig from an object with arun_episode or a function(engine, data).

    Args:
        workflow: sync or async; it returns the n samples of the group (a single Sample where n is 1), or None.
        engines: at least one. The prompt with index i goes to engine i % len(engines).
        seed: seed of requests without one, keyed by prompt and by the number of the request in its rollout.
        num_baseline: the same as RolloutConfig.n_baseline_samples: samples beside the n, 1 for a ReMaxWorkflow.

    Returns: async generate_fn(prompt, n, partial=()) -> Group: FAILED samples for None, PENDING ones for an interrupted rollout, also if
        the workflow caught the interruption and returned finished samples. For a ScoredWorkflow it is a config.ScoringGenerateFn. The
        counts of the workflow (its take_counts(), if it has one) are in the metrics.
    Raises: ConfigError if there is no engine or no episode to run.
    """
    if not engines:
        raise ConfigError("there are no engines to generate with (found 0): pass at least one")
    episode: Any = getattr(workflow, "arun_episode", workflow)
    if not callable(episode):
        raise ConfigError(
            f"the workflow is a {type(workflow).__name__} without arun_episode: write `async def arun_episode(self, engine, data)`"
        )
    generate_fn = _bind_episode(episode, tuple(engines), seed, num_baseline)
    take = getattr(workflow, "take_counts", None)
    if not isinstance(workflow, ScoredWorkflow) or workflow.reward_fn is None:
        return generate_fn if take is None else _CountingGenerateFn(generate_fn, take)
    unscored = _bind_episode(workflow.agenerate_group, tuple(engines), seed, num_baseline)
    return _ScoringGenerateFn(generate_fn, unscored, workflow.reward_fn, workflow.reward, take)


class _CountingGenerateFn:
    """Generate function of a workflow that counts: see contract.take_counts."""

    def __init__(self, generate_fn: Callable[..., Awaitable[Group]], take_counts: Callable[[], Mapping[str, int]] | None) -> None:
        self._generate_fn, self._take_counts = generate_fn, take_counts

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        return await self._generate_fn(prompt, n, partial)

    def take_counts(self) -> dict[str, int]:
        """Return the counts of the workflow since the last call."""
        return {} if self._take_counts is None else dict(self._take_counts())


class _ScoringGenerateFn(_CountingGenerateFn):
    """Generate function of a ScoredWorkflow: a config.ScoringGenerateFn."""

    def __init__(
        self,
        generate_fn: Callable[..., Awaitable[Group]],
        unscored: Callable[..., Awaitable[Group]],
        reward_fn: Callable[[Sample], Any],
        reward: RewardConfig | None,
        take_counts: Callable[[], Mapping[str, int]] | None,
    ) -> None:
        super().__init__(generate_fn, take_counts)
        self.unscored, self.reward_fn, self.reward = unscored, reward_fn, reward


def _bind_episode(
    episode: Callable[[Any, Any], Any], engines: tuple[InferenceEngine, ...], seed: int, num_baseline: int
) -> Callable[..., Awaitable[Group]]:
    async def generate_fn(prompt: Prompt, n: int, partial: Group = ()) -> Group:
        engine = WorkflowEngine(engines[prompt.index % len(engines)], prompt.index, seed=seed)
        frame = create_pending_group(prompt, n, num_baseline=num_baseline)
        result: Any = None
        try:
            returned = episode(engine, WorkflowData(prompt, n, partial))
            result = await returned if inspect.isawaitable(returned) else returned
        except Exception:  # a workflow may raise any error about an interruption, alone or in a group of its nursery
            if not engine.was_interrupted:
                raise
        group = (result,) if isinstance(result, Sample) else result
        if engine.was_interrupted and (not group or is_finished(group)):
            return frame  # half an answer is no group
        if group is None:
            return tuple(replace(sample, status=Status.FAILED) for sample in frame)
        return group

    return generate_fn


class RLVRWorkflow:
    """Single-turn rollouts with a verifiable reward: n samples of the prompt, each scored."""

    num_greedy = 0

    def __init__(
        self,
        reward_fn: Callable[..., Any] | None,
        gconfig: SamplingParams | GenerationConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int = 0,
        reward: RewardConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            reward_fn: reward_fn(prompt, completions, prompt_ids, completion_ids, **data), see adapt_reward_fn; None = scored elsewhere
                (RolloutConfig.reward_fn).
            gconfig: a GenerationConfig's enable_thinking goes to the chat template; its n_samples is not read, the group has n.
            seed: sampling is keyed by (seed, prompt index, sample number): the same samples as create_generate_fn's.
            reward: timeout of rewards and handling of errors; None = RolloutConfig.reward, or its default.
            template_kwargs: arguments of the chat template.
        """
        self.reward_fn = None if reward_fn is None else adapt_reward_fn(reward_fn, tokenizer)
        self.reward = reward
        self._tokenizer, self._seed = tokenizer, seed
        thinking = gconfig.enable_thinking if isinstance(gconfig, GenerationConfig) else None
        self._template_kwargs = {**({} if thinking is None else {"enable_thinking": thinking}), **(template_kwargs or {})}
        self._params = gconfig if isinstance(gconfig, SamplingParams) else gconfig.sampling_params()

    async def arun_episode(self, engine: InferenceEngine, data: WorkflowData | Mapping[str, Any] | str | Messages) -> WorkflowResult:
        """Return the group of a prompt; None if a reward failed and RewardConfig.on_error is "drop"."""
        group = await self.agenerate_group(engine, data)
        if self.reward_fn is None or not is_finished(group):
            return group
        return await score_group(group, self.reward_fn, self.reward)

    async def agenerate_group(self, engine: InferenceEngine, data: WorkflowData | Mapping[str, Any] | str | Messages) -> Group:
        """Return the group without rewards."""
        episode = data if isinstance(data, WorkflowData) else WorkflowData(parse_prompt(data))
        return await generate_group(
            engine,
            self._tokenizer,
            episode.prompt,
            episode.n_samples,
            self._params,
            settings=GroupSettings(seed=self._seed, template_kwargs=self._template_kwargs, num_greedy=self.num_greedy),
            partial=episode.partial,
        )


class ReMaxWorkflow(RLVRWorkflow):
    """RLVRWorkflow with the greedy answer beside the n sampled ones, generated at the same time, as the last of the group.

    It is scored and not trained on; algorithms.remax() makes the difference of the two rewards the advantage of all tokens of a sampled
    answer. Set RolloutConfig(n_baseline_samples=1).
    """

    num_greedy = 1


def adapt_reward_fn(reward_fn: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Callable[[Sample], Any]:
    """Adapt a reward function reward_fn(prompt, completions, prompt_ids, completion_ids, **data) to the form Sample -> reward.

    Args:
        reward_fn: sync or async. prompt and completions are texts, prompt_ids and completion_ids lists of tokens: a sample's tokens before
            and from the first one that the policy sampled. data are collect_reward_data(sample); a function without **data gets the
            values that it names. A function with @reward_function is returned as it is.
        tokenizer: tokenizer that decodes the prompt.
    """
    if isinstance(reward_fn, RewardFunction):
        return reward_fn
    parameters = inspect.signature(reward_fn).parameters
    first = tuple(parameters)[:4]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(sample: Sample) -> Any:
        start = find_response_start(sample)
        prompt_ids, completion_ids = list(sample.tokens[:start]), list(sample.tokens[start:])
        data = {key: value for key, value in collect_reward_data(sample).items() if key not in first and (takes_all or key in parameters)}
        return reward_fn(str(tokenizer.decode(prompt_ids)), sample.response, prompt_ids, completion_ids, **data)

    async def call_async(sample: Sample) -> Any:
        return await call(sample)

    return call_async if is_async_function(reward_fn) else call
