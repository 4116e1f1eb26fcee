"""Agents and training: from what an agent did to Samples, each with its loss mask verified.

    sample = await agent_rollout_to_sample(policy, GridWorld, prompt)                  # act, and train on it
    samples = await agent_rollouts_to_samples(policy, GridWorld, prompts)              # many at once, in the order of the prompts
    sample = trajectory_to_sample(messages, tokenizer)                                 # what another agent wrote, for supervised training

An episode is one sample: its turns one behind the other, what is between them masked (the interleaved form). split_turns makes one sample
of each turn, with all that it was given before it (the branching form). Both have the same log-probs where each turn was given what the
turns before it were and wrote; where history was rewritten, the first has contexts that keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from rollouts.agent_policies import AgentPolicy
from rollouts.chat import Messages, parse_messages, tokenize_conversation
from rollouts.chat_formats import ConversationFormat, create_chat_format, create_text_format
from rollouts.environments.protocol import EnvironmentFactory
from rollouts.episode_config import EpisodeConfig
from rollouts.episodes import Episode, EpisodeSetting, run_episode
from rollouts.errors import DataError, raise_single_errors
from rollouts.samples import describe_sample, sample_messages
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
    """One episode as a sample. Arguments and errors as of run_episode, and DataError for a mask that is wrong."""
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
    """An episode of each prompt, several at a time.

    Args:
        prompts: with different indices, which key environments and sampling.
        max_concurrent: episodes at a time.

    Returns: in the order of the prompts, whichever ended first.
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
    """A trajectory as a sample, with loss_mask 1 on what the assistant wrote and 0 on all else.

    Args:
        trajectory: an episode, whose sample it has already, or messages, which are rendered by the chat template and tokenized whole: they
            have no log-probs, and are for supervised training.
        tokenizer: of the policy; None = the episode is text alone.
        index, reward: of a sample that is made of messages; index is its group_index as well.
        calls_in_text: whether the contents of messages hold their tool calls already, as those of episodes do. Then the chat template is
            given the text alone, or it would write each call a second time. None = looked for in each content: a call's name in quotes, or
            with a parenthesis behind it.
        template_kwargs: for the chat template and tokenize_conversation.

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
        status=Status.COMPLETED,
        index=index,
        group_index=index,
        metadata={"messages": [message.to_dict() for message in messages]},
    )


def _leave_calls_in_text(message: Message, calls_in_text: bool | None) -> Message:
    """The message without its tool calls where its content holds them."""
    if not message.tool_calls or not message.content:
        return message
    names = [str((call.get("function") or {}).get("name")) for call in message.tool_calls]
    found = all(f'"{name}"' in message.content or f"{name}(" in message.content for name in names)
    return replace(message, tool_calls=None) if (found if calls_in_text is None else calls_in_text) else message


def _check_contents(messages: Sequence[Message], trained: str, *, last_only: bool) -> None:
    """Raise unless the text that is trained on has what the assistant wrote, in order. White space is the template's."""
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


def trajectories_to_samples(
    trajectories: Sequence[Episode | Messages], tokenizer: PreTrainedTokenizerBase | None, **template_kwargs: Any
) -> tuple[Sample, ...]:
    """trajectory_to_sample of each, in order; those of messages are numbered by their place."""
    return tuple(trajectory_to_sample(each, tokenizer, index=k, **template_kwargs) for k, each in enumerate(trajectories))


def check_loss_mask(sample: Sample, tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> None:
    """Raise unless what an episode is trained on is, turn by turn, what its assistant messages say.

    Args:
        template_kwargs: for the chat template, as the episode had them.

    Raises: DataError naming the turn if its tokens say something else than its message, or if a token with loss_mask > 0 is in no turn.
    """
    where = describe_sample(sample)
    if sample.turns is None:
        raise DataError(f"{where} has no turns: it is not of an episode")
    messages = sample_messages(sample)
    answers = [messages[place].content or "" for place in _find_actions(sample, messages)]
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
    """How an episode's answers may have become text: plainly, or by the chat template, which may end them with text of its own."""
    formats: list[ConversationFormat] = [create_text_format(tokenizer)]
    if getattr(tokenizer, "chat_template", None) or "chat_template" in template_kwargs:
        with suppress(DataError):  # a template that no episode can have had
            formats.append(create_chat_format(tokenizer, template_kwargs))
    return formats


def split_turns(sample: Sample) -> tuple[Sample, ...]:
    """The branching form of an episode: a sample of each turn, with the tokens before it in its context, of which none is trained on.

    Rewards, groups and metadata are the episode's. Raises: DataError if the sample has no turns.
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
    """The steps of an episode, from what its sample keeps of them: those that were carried out, where it failed in one.

    Raises: DataError if it is not of an episode.
    """
    if sample.turns is None or "steps" not in sample.metadata:
        raise DataError(f"{describe_sample(sample)} has no turns, or no 'steps' in its metadata: it is not of an episode")
    steps: list[StepData] = []
    kept: Sequence[Mapping[str, Any]] = sample.metadata["steps"]
    messages = sample_messages(sample)
    places = _find_actions(sample, messages)
    if len(places) - len(kept) not in (0, 1):  # an action that the environment failed at is no step
        raise DataError(f"{describe_sample(sample)} has {len(kept)} steps in its metadata, but {len(places)} messages of the policy")
    for number, (step, place) in enumerate(zip(kept, places, strict=False)):
        turn = sample.turns[number] if sample.turns else None
        end = places[number + 1] if number + 1 < len(places) else len(messages)
        log_probs = None if turn is None or sample.rollout_log_probs is None else sample.rollout_log_probs[turn.start : turn.end]
        steps.append(
            StepData(
                system_step_index=number,
                observation_data=step["observation"],
                action_taken=step["action"],
                raw_policy_output=messages[place].content or "",
                resulting_messages_history=messages[:end],
                policy_tokens=None if turn is None else sample.tokens[turn.start : turn.end],
                policy_logprobs=log_probs,
                policy_value_estimate=step["value"],
                is_done=step["done"],
                step_info=step["info"],
                base_reward=step["reward"] if turn is None else turn.reward,
                sample_index=sample.index,
                group_index=sample.group_index,
            )
        )
    return tuple(steps)


def _find_actions(sample: Sample, messages: Sequence[Message]) -> list[int]:
    """Places of the messages that are the policy's actions; of a sample that does not say, all of the assistant's."""
    known: list[int] | None = sample.metadata.get("action_messages")
    places = [k for k, message in enumerate(messages) if message.role == "assistant"] if known is None else known
    if any(not 0 <= place < len(messages) for place in places):
        raise DataError(f"{describe_sample(sample)}: metadata['action_messages'] is {places}, but there are {len(messages)} messages")
    return list(places)
