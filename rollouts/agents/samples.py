"""Training samples of agents' trajectories, each with its loss mask verified.

    sample = await agent_rollout_to_sample(policy, GridWorld, prompt)                  # act, and train on it
    samples = await agent_rollouts_to_samples(policy, GridWorld, prompts)              # many at once, in the order of the prompts
    sample = trajectory_to_sample(messages, tokenizer)                                 # messages of another agent, for supervised training

An episode is one sample: its turns one after another, the tokens between them masked (the interleaved form). split_turns makes one
sample of each turn, with the history that it was given (the branching form). Both have the same log-probs if that history is the turns
before, unchanged; if history was rewritten, the interleaved form has a further context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Episode
from rollouts.agents.policies import AgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.formats import ConversationFormat, create_chat_format, create_text_format
from rollouts.chat.tokenize import Messages, parse_messages, tokenize_conversation
from rollouts.data.samples import describe_sample, find_actions, sample_messages
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.errors import DataError, raise_single_errors
from rollouts.steps import StepData, Steps
from rollouts.types import Message, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def agent_rollout_to_sample(
    policy: AgentPolicy,
    environment_factory: EnvironmentFactory | EpisodeSetting,
    prompt: Prompt,
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
) -> Sample:
    """Play one episode and return its sample. Arguments and errors as run_episode, and DataError for a wrong mask."""
    episode = await run_episode(policy, environment_factory, prompt, config, seed=seed)
    template_kwargs = environment_factory.template_kwargs if isinstance(environment_factory, EpisodeSetting) else {}
    return trajectory_to_sample(episode, getattr(policy, "tokenizer", None), **template_kwargs)


async def agent_rollouts_to_samples(
    policy: AgentPolicy,
    environment_factory: EnvironmentFactory | EpisodeSetting,
    prompts: Sequence[Prompt],
    config: EpisodeConfig | None = None,
    *,
    seed: int = 0,
    max_concurrent: int = 64,
) -> tuple[Sample, ...]:
    """Play an episode of each prompt, several at a time, and return their samples.

    Args:
        prompts: with different indices, the keys of environments and sampling.
        max_concurrent: maximum number of episodes at a time.

    Returns: samples in the order of the prompts.
    Raises: the first failure; see run_episode.
    """
    samples: dict[int, Sample] = {}
    limiter = trio.CapacityLimiter(max_concurrent)

    async def run(k: int) -> None:
        async with limiter:
            samples[k] = await agent_rollout_to_sample(policy, environment_factory, prompts[k], config, seed=seed)

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for k in range(len(prompts)):
                nursery.start_soon(run, k)
    return tuple(samples[k] for k in range(len(prompts)))


def trajectory_to_sample(
    trajectory: Episode | Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    index: int = 0,
    reward: float | None = None,
    calls_in_text: bool | None = None,
    **template_kwargs: Any,
) -> Sample:
    """Return a trajectory as a sample, with loss_mask 1 on the assistant's tokens and 0 elsewhere.

    Args:
        trajectory: an episode, which has its sample already; or messages, which the chat template renders and which are tokenized whole:
            they have no log-probs, and are for supervised training.
        tokenizer: tokenizer of the policy; None = the episode is text alone.
        index, reward: values of a sample made of messages; index is its group_index as well.
        calls_in_text: True = the contents of messages already hold their tool calls, as in episodes. Then the chat template is given the
            text alone, so that it does not write each call twice. None = search each content for the call's name in quotes, or with a
            parenthesis after it.
        template_kwargs: arguments of the chat template and tokenize_conversation.

    Raises: DataError if the mask does not fit the assistant's messages, or see tokenize_conversation.
    """
    if isinstance(trajectory, Episode):
        if tokenizer is not None:
            check_loss_mask(trajectory.sample, tokenizer, **template_kwargs)
        return trajectory.sample
    if tokenizer is None:
        raise DataError("messages were given without a tokenizer: nothing but their text is known")
    messages = parse_messages(trajectory, "trajectory")
    shown = [_leave_calls_in_text(message, calls_in_text) for message in messages]
    tokenized = tokenize_conversation(tokenizer, shown, **template_kwargs)
    if not tokenized.truncated:
        trained = [token for token, mask in zip(tokenized.tokens, tokenized.loss_mask, strict=True) if mask > 0]
        _check_contents(shown, str(tokenizer.decode(trained)), last_only=bool(template_kwargs.get("last_assistant_only")))
    first = next(k for k, message in enumerate(messages) if message.role == "assistant")
    return Sample(
        prompt=messages[:first],
        tokens=tokenized.tokens,
        loss_mask=tokenized.loss_mask,
        response="\n".join(message.content or "" for message in messages if message.role == "assistant"),
        reward=reward,
        status=Status.TRUNCATED if tokenized.truncated else Status.COMPLETED,
        index=index,
        group_index=index,
        messages=messages,
    )


def _leave_calls_in_text(message: Message, calls_in_text: bool | None) -> Message:
    """Return the message without its tool calls if its content holds them."""
    if not message.tool_calls or not message.content:
        return message
    names = [str((call.get("function") or {}).get("name")) for call in message.tool_calls]
    found = all(f'"{name}"' in message.content or f"{name}(" in message.content for name in names)
    return replace(message, tool_calls=None) if (found if calls_in_text is None else calls_in_text) else message


def _check_contents(messages: Sequence[Message], trained: str, *, last_only: bool) -> None:
    """Raise unless the trained text holds the assistant's messages, in order. White space is the template's."""
    numbers = [k for k, message in enumerate(messages) if message.role == "assistant"]
    text, place = "".join(trained.split()), 0
    for k in numbers[-1:] if last_only else numbers:
        if messages[k].tool_calls:
            continue  # some templates write nothing but the calls
        content = "".join((messages[k].content or "").split())
        found = text.find(content, place)
        if found < 0:
            raise DataError(
                f"message {k} (assistant) says {messages[k].content!r:.200}, but that is not in what is trained on, {trained!r:.400}: the "
                "chat template or the tokenizer changes it"
            )
        place = found + len(content)


def check_loss_mask(sample: Sample, tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> None:
    """Raise unless the trained tokens of an episode are, turn by turn, its assistant messages.

    Args:
        template_kwargs: arguments of the chat template, as in the episode.

    Raises: DataError naming the turn whose tokens differ from its message, or the token with loss_mask > 0 that is in no turn.
    """
    where = describe_sample(sample)
    if sample.turns is None:
        raise DataError(f"{where} has no turns: it is not of an episode")
    messages = sample_messages(sample)
    answers = [messages[place].content or "" for place in find_actions(sample)]
    if len(answers) != len(sample.turns):
        raise DataError(f"{where} has {len(sample.turns)} turns, but {len(answers)} messages of the assistant")
    formats = _find_formats(tokenizer, template_kwargs)
    inside = [0.0] * len(sample.tokens)
    for number, (turn, answer) in enumerate(zip(sample.turns, answers, strict=True)):
        inside[turn.start : turn.end] = sample.loss_mask[turn.start : turn.end]
        texts = [each.decode_answer(sample.tokens[turn.start : turn.end]) for each in formats]
        if not any(text.startswith(answer) and not text[len(answer) :].strip() for text in texts):
            raise DataError(f"{where}: turn {number} is trained on {texts[0]!r:.200}, but its message says {answer!r:.200}")
    if any(mask > 0 and not kept for mask, kept in zip(sample.loss_mask, inside, strict=True)):
        at = next(t for t, mask in enumerate(sample.loss_mask) if mask > 0 and not inside[t])
        raise DataError(f"{where}: token {at} ({tokenizer.decode([sample.tokens[at]])!r}) is trained on, but is in no turn")


def _find_formats(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> list[ConversationFormat]:
    """Return the possible formats of an episode's answers: plain text, and the chat template, which may end them with its own text."""
    formats: list[ConversationFormat] = [create_text_format(tokenizer)]
    if getattr(tokenizer, "chat_template", None) or "chat_template" in template_kwargs:
        with suppress(DataError):  # a template that no episode can have used
            formats.append(create_chat_format(tokenizer, template_kwargs))
    return formats


def split_turns(sample: Sample) -> tuple[Sample, ...]:
    """Return the branching form of an episode: a sample of each turn, with the tokens before it in its context masked.

    Rewards, groups and metadata are those of the episode. Raises: DataError if the sample has no turns.
    """
    if sample.turns is None:
        raise DataError(f"{describe_sample(sample)} has no turns: it is not of an episode")
    starts = (0, *sample.context_starts)
    samples: list[Sample] = []
    for turn in sample.turns:
        begin = max(start for start in starts if start <= turn.start)
        own = slice(begin, turn.end)
        given = turn.start - begin
        samples.append(
            replace(
                sample,
                tokens=sample.tokens[own],
                loss_mask=(0.0,) * given + sample.loss_mask[turn.start : turn.end],
                rollout_log_probs=None if sample.rollout_log_probs is None else _after(sample.rollout_log_probs[own], given, 0.0),
                weight_versions=None if sample.weight_versions is None else _after(sample.weight_versions[own], given, -1),
                routed_experts=None if sample.routed_experts is None else sample.routed_experts.take(turn.end).shift(-begin),
                kept_tokens=None if sample.kept_tokens is None else sample.kept_tokens.cut(begin, turn.end),
                segment_log_probs=None,
                segment_versions=None,
                recompute_version=-1,
                turns=(replace(turn, start=given, end=turn.end - begin),),
                context_starts=(),
            )
        )
    return tuple(samples)


def _after(values: tuple[Any, ...], given: int, fill: float) -> tuple[Any, ...]:
    return (fill,) * given + values[given:]


def sample_to_steps(sample: Sample) -> Steps:
    """Return the steps of an episode from its sample; for a failed episode, the steps that were carried out.

    Raises: DataError if the sample is not an episode.
    """
    if sample.turns is None or sample.episode is None:
        raise DataError(f"{describe_sample(sample)} is not of an episode: its turns or its episode are None")
    steps: list[StepData] = []
    kept = sample.episode.steps
    messages = sample_messages(sample)
    places = find_actions(sample)
    if len(places) - len(kept) not in (0, 1):  # an action that the environment failed at is no step
        raise DataError(f"{describe_sample(sample)} has {len(kept)} steps in its episode, but {len(places)} messages of the policy")
    for number, (step, place) in enumerate(zip(kept, places, strict=False)):
        turn = sample.turns[number] if sample.turns else None
        end = places[number + 1] if number + 1 < len(places) else len(messages)
        log_probs = None if turn is None or sample.rollout_log_probs is None else sample.rollout_log_probs[turn.start : turn.end]
        steps.append(
            StepData(
                system_step_index=number,
                observation_data=step.observation,
                action_taken=step.action,
                raw_policy_output=messages[place].content or "",
                resulting_messages_history=messages[:end],
                action_message=place,
                policy_tokens=None if turn is None else sample.tokens[turn.start : turn.end],
                policy_logprobs=log_probs,
                policy_value_estimate=step.value,
                is_done=step.done,
                step_info=step.info,
                base_reward=step.reward if turn is None else turn.reward,
                sample_index=sample.index,
                group_index=sample.group_index,
            )
        )
    return tuple(steps)
