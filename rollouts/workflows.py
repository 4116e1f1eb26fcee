"""Workflows: objects with `arun_episode(engine, data)`, and how one becomes the generate function of a RolloutConfig.

    class Mine:
        async def arun_episode(self, engine, data):
            completion = await engine.agenerate(LLMRequest(input_ids=..., gconfig=SamplingParams(max_tokens=64)))
            return sample                 # or a sequence of n samples, or None to drop the group

    config = RolloutConfig(n_samples_per_prompt=1, generate_fn=create_workflow_generate_fn(Mine(), engines))

An episode returns the whole group of its prompt. When a weight sync interrupts it, RLVRWorkflow and ReMaxWorkflow go on later from the
tokens that they have; an episode of your own is begun anew, unless it reads data.partial as they do. Where rewards take time, make it a
ScoredWorkflow as those two are: then answers are in hand before their rewards, and no interruption loses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import trio

from rollouts.chat import Messages
from rollouts.config import GenerationConfig, RewardConfig
from rollouts.data_buffer import parse_prompt
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, EpisodeInterrupted
from rollouts.generate_fns import is_async_function, is_finished, note_request
from rollouts.generation import generate_group, make_request_id
from rollouts.rewards.evaluate import score_group
from rollouts.rewards.reward_functions import RewardFunction
from rollouts.samples import create_pending_group, derive_seed
from rollouts.types import Completion, Group, Prompt, Sample, SamplingParams, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EpisodeResult: TypeAlias = "Sample | Sequence[Sample] | None"
"""The samples of the group (one alone where it has one), or None: the group is dropped and counted."""


class RolloutWorkflow(Protocol):
    """One episode of a prompt."""

    async def arun_episode(self, engine: Any, data: Any) -> EpisodeResult:
        """Generate, act and score until the episode is over.

        Args:
            engine: an EpisodeEngine.
            data: an EpisodeData.
        """
        ...


@runtime_checkable
class ScoredWorkflow(RolloutWorkflow, Protocol):
    """A workflow whose rewards need no engine: RolloutConfig then has them called when the group is generated, by its own policy."""

    reward_fn: Callable[[Sample], Any] | None  # Sample -> reward, sync or async; None = arun_episode does not score either
    reward: RewardConfig | None  # None = that of RolloutConfig

    async def agenerate_group(self, engine: Any, data: Any) -> EpisodeResult:
        """arun_episode without the rewards."""
        ...


class EpisodeData(dict[str, Any]):
    """The prompt's metadata ("ground_truth", "answer", ...) with "messages" (or "prompt", where it is a text) beside them."""

    def __init__(self, prompt: Prompt, n_samples: int = 1, partial: Group = ()) -> None:
        """
        Args:
            prompt: of this group.
            n_samples: that the group is to have.
            partial: the group as an interrupted episode returned it, some samples ABORTED or PENDING; () = begin.
        """
        text = isinstance(prompt.content, str)
        content = prompt.content if isinstance(prompt.content, str) else [message.to_dict() for message in prompt.content]
        super().__init__({("prompt" if text else "messages"): content, **prompt.metadata})
        self.prompt, self.n_samples, self.partial = prompt, n_samples, partial


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """One request of an episode: tokens in."""

    input_ids: Sequence[int]
    gconfig: SamplingParams | GenerationConfig = field(default_factory=SamplingParams)
    rid: str | None = None  # None = one that no other request of the run has


class EpisodeEngine:
    """An InferenceEngine as one episode sees it: request ids and seeds are its own, so the same episode gives the same tokens."""

    def __init__(self, engine: InferenceEngine, prompt_index: int = 0, *, seed: int = 0) -> None:
        self._engine, self._prompt_index, self._seed = engine, prompt_index, seed
        self._num_requests = 0
        self._interruption: str | None = None

    @property
    def was_interrupted(self) -> bool:
        """Whether agenerate has raised EpisodeInterrupted."""
        return self._interruption is not None

    async def agenerate(self, request: LLMRequest) -> Completion:
        """The completion of a request, tokens out: input_tokens, output_tokens, output_log_probs, output_versions, ...

        Raises: EpisodeInterrupted if it was aborted, so that nobody takes the half of an answer for a whole one; from then on at once,
            for an episode that has caught the first.
        """
        if self._interruption is not None:
            await trio.lowlevel.checkpoint()  # an episode that tries again without end can be cancelled here
            raise EpisodeInterrupted(self._interruption)
        gconfig = request.gconfig
        params = gconfig if isinstance(gconfig, SamplingParams) else gconfig.sampling_params()
        completion = await self.generate(request.input_ids, params, request_id=request.rid)
        if completion.finish_reason == "abort":
            self._interruption = f"request {completion.request_id} was aborted after {completion.output_len} tokens"
            raise EpisodeInterrupted(self._interruption)
        return completion

    async def generate(self, prompt_tokens: Sequence[int], params: SamplingParams, *, request_id: str | None = None) -> Completion:
        """The engine's generate. An aborted request returns with what it has; see agenerate."""
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if params.seed is None:
            params = params.new(seed=derive_seed(self._seed, self._prompt_index, number))
        name = make_request_id(self._prompt_index, number) if request_id is None else request_id
        note_request(name)
        return await self._engine.generate(prompt_tokens, params, request_id=name)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """The engine's abort."""
        await self._engine.abort(request_ids)

    async def update_weights_from_checkpoint(self, checkpoint_path: Path) -> Mapping[str, Any]:
        """Not for an episode. Raises ConfigError."""
        raise ConfigError(f"an episode was about to load weights from {checkpoint_path}: weights are changed by the training loop")

    async def get_weight_version(self) -> int:
        """The engine's weight version."""
        return await self._engine.get_weight_version()


Episode: TypeAlias = "RolloutWorkflow | Callable[[Any, Any], Awaitable[EpisodeResult]]"


def create_workflow_generate_fn(
    workflow: Episode, engines: Sequence[InferenceEngine], *, seed: int = 0, num_baseline: int = 0
) -> Callable[..., Awaitable[Group]]:
    """A generate function for RolloutConfig, of an object with arun_episode or of a function(engine, data).

    Args:
        workflow: its episode may be async or not; it returns the n samples of the group (the one sample, where n is 1), or None.
        engines: at least one. The prompt with index i goes to engine i % len(engines).
        seed: of requests that bring none: keyed by prompt and by the number of the request in its episode.
        num_baseline: the same as RolloutConfig.n_baseline_samples: samples beside the n, 1 for a ReMaxWorkflow.

    Returns: async generate_fn(prompt, n, partial=()) -> Group: FAILED samples for None, PENDING ones for an episode that was interrupted,
        also where the episode caught that and came back with an error or finished samples. Of a ScoredWorkflow it is a
        config.ScoringGenerateFn. What the workflow counts (its take_counts(), where it has one) is in the metrics.
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
    """The generate function of a workflow that counts: see generate_fns.take_counts."""

    def __init__(self, generate_fn: Callable[..., Awaitable[Group]], take_counts: Callable[[], Mapping[str, int]] | None) -> None:
        self._generate_fn, self._take_counts = generate_fn, take_counts

    async def __call__(self, prompt: Prompt, n: int, partial: Group = ()) -> Group:
        return await self._generate_fn(prompt, n, partial)

    def take_counts(self) -> dict[str, int]:
        """What the workflow has counted since the last call."""
        return {} if self._take_counts is None else dict(self._take_counts())


class _ScoringGenerateFn(_CountingGenerateFn):
    """The generate function of a ScoredWorkflow: a config.ScoringGenerateFn."""

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
        engine = EpisodeEngine(engines[prompt.index % len(engines)], prompt.index, seed=seed)
        frame = create_pending_group(prompt, n, num_baseline=num_baseline)
        result: Any = None
        try:
            returned = episode(engine, EpisodeData(prompt, n, partial))
            result = await returned if inspect.isawaitable(returned) else returned
        except Exception:  # an episode may raise what it likes about an interruption, alone or in a group of its nursery
            if not engine.was_interrupted:
                raise
        group = (result,) if isinstance(result, Sample) else result
        if engine.was_interrupted and (not group or is_finished(group)):
            return frame  # whatever it made of half an answer
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
            reward: timeout of rewards and what to do about errors; None = RolloutConfig.reward, or its default.
            template_kwargs: for the chat template.
        """
        self.reward_fn = None if reward_fn is None else adapt_reward_fn(reward_fn, tokenizer)
        self.reward = reward
        self._tokenizer, self._seed = tokenizer, seed
        thinking = gconfig.enable_thinking if isinstance(gconfig, GenerationConfig) else None
        self._template_kwargs = {**({} if thinking is None else {"enable_thinking": thinking}), **(template_kwargs or {})}
        self._params = gconfig if isinstance(gconfig, SamplingParams) else gconfig.sampling_params()

    async def arun_episode(self, engine: InferenceEngine, data: EpisodeData | Mapping[str, Any] | str | Messages) -> EpisodeResult:
        """The group of a prompt; None if a reward failed and groups are to be dropped then (RewardConfig.on_error)."""
        group = await self.agenerate_group(engine, data)
        if self.reward_fn is None or not is_finished(group):
            return group
        return await score_group(group, self.reward_fn, self.reward)

    async def agenerate_group(self, engine: InferenceEngine, data: EpisodeData | Mapping[str, Any] | str | Messages) -> Group:
        """The group without rewards."""
        episode = data if isinstance(data, EpisodeData) else EpisodeData(parse_prompt(data))
        return await generate_group(
            engine,
            self._tokenizer,
            episode.prompt,
            episode.n_samples,
            self._params,
            seed=self._seed,
            partial=episode.partial,
            template_kwargs=self._template_kwargs,
            num_greedy=self.num_greedy,
        )


class ReMaxWorkflow(RLVRWorkflow):
    """RLVRWorkflow with the greedy answer beside the n sampled ones, generated at the same time, as the last of the group.

    It is scored and not trained on; algorithms.remax() makes the difference of the two rewards the advantage of all tokens of a sampled
    answer. Set RolloutConfig(n_baseline_samples=1).
    """

    num_greedy = 1


def adapt_reward_fn(reward_fn: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> Callable[[Sample], Any]:
    """A reward function Sample -> reward, of one with the signature reward_fn(prompt, completions, prompt_ids, completion_ids, **data).

    Args:
        reward_fn: sync or async. prompt and completions are texts, prompt_ids and completion_ids lists of tokens: a sample's tokens up to
            the first one that the policy sampled, and from there on. data are the sample's metadata; without **data in its signature, it
            is given those that it names. One that is decorated with @reward_function is returned as it is.
        tokenizer: decodes the prompt.
    """
    if isinstance(reward_fn, RewardFunction):
        return reward_fn
    parameters = inspect.signature(reward_fn).parameters
    first = tuple(parameters)[:4]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(sample: Sample) -> Any:
        start = next((t for t, mask in enumerate(sample.loss_mask) if mask > 0), len(sample.tokens))
        prompt_ids, completion_ids = list(sample.tokens[:start]), list(sample.tokens[start:])
        data = {key: value for key, value in sample.metadata.items() if key not in first and (takes_all or key in parameters)}
        return reward_fn(str(tokenizer.decode(prompt_ids)), sample.response, prompt_ids, completion_ids, **data)

    async def call_async(sample: Sample) -> Any:
        return await call(sample)

    return call_async if is_async_function(reward_fn) else call
