"""Samples of a session: each answer is trained on exactly once, behind the tokens that the model saw before it.

The answers that extend one another make a context: a row of tokens in which each of them has loss_mask 1. A further answer to the same
history, and an answer whose history is another, begin a further context, whose history is given (loss_mask 0) up to that answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from rollouts.chat.transcript import Transcript, append_given, append_sampled, find_kept
from rollouts.gateway.sessions import Answer
from rollouts.outcomes import EpisodeOutcome, EpisodeStep, StopReason
from rollouts.types import Message, Sample, Status, change

Rows: TypeAlias = Literal["session", "contexts"]
"""Samples that a session becomes: "session" = one of all its contexts (Sample.context_starts); "contexts" = one of each."""


def order_contexts(answers: Sequence[Answer]) -> tuple[tuple[Answer, ...], ...]:
    """Return the contexts of a session's answers: chains of answers that each extend the one before. Every answer is in exactly one."""
    children: dict[int, list[Answer]] = {}
    answers = sorted(answers, key=lambda answer: answer.number)
    for answer in answers:
        if answer.parent is not None and not answer.begins_context:
            children.setdefault(answer.parent.number, []).append(answer)
    placed: set[int] = set()
    contexts: list[tuple[Answer, ...]] = []
    for first in answers:
        if first.number in placed:
            continue
        chain, following = [first], children.get(first.number)
        while following:
            chain.append(following[0])
            following = children.get(following[0].number)
        placed.update(answer.number for answer in chain)
        contexts.append(tuple(chain))
    return tuple(contexts)


def answers_to_samples(
    answers: Sequence[Answer], pending: Sample | None = None, *, rows: Rows = "session", stop_reason: StopReason = StopReason.AGENT
) -> tuple[Sample, ...]:
    """Return the samples of a session's answers.

    Args:
        answers: of one session, none left out that another one extends.
        pending: sample to fill, with the prompt, the indices and the metadata; None = an empty one.
        rows: see Rows. Contexts that are samples of their own count as such in the means over samples of an algorithm.
        stop_reason: end of the session, for Sample.episode.

    Returns: () without answers. messages of a further context begin behind the history that it shares with an earlier one. Status: as the
        last answer of the first context: COMPLETED, or TRUNCATED if it reached its token budget or the session a limit.
    """
    contexts = order_contexts(answers)
    if not contexts:
        return ()
    whole = (StopReason.DONE, StopReason.AGENT, StopReason.REGEX)
    status = Status.TRUNCATED if contexts[0][-1].was_cut or stop_reason not in whole else Status.COMPLETED
    groups = (contexts,) if rows == "session" else tuple((context,) for context in contexts)
    return tuple(_to_sample(group, pending or Sample(), status, stop_reason) for group in groups)


def _to_sample(contexts: Sequence[tuple[Answer, ...]], pending: Sample, status: Status, stop_reason: StopReason) -> Sample:
    transcript = Transcript()
    for context in contexts:
        transcript = _add_context(transcript, context)
    answers = [answer for context in contexts for answer in context]
    steps = tuple(EpisodeStep(observation=_show(answer.added), action=answer.text, done=answer is answers[-1]) for answer in answers)
    completions = [answer.completion for answer in answers]
    kinds = [completion.log_prob_kind for completion in completions if completion.log_prob_kind != "sampled"]
    return replace(
        pending,
        tokens=transcript.tokens,
        loss_mask=transcript.loss_mask,
        rollout_log_probs=transcript.log_probs,
        weight_versions=transcript.versions,
        routed_experts=transcript.routed_experts,
        kept_tokens=transcript.cut_tokens,
        response="\n".join(answer.text for answer in answers),
        status=status,
        temperature=completions[0].temperature,
        truncated_sampling=any(completion.truncated_sampling for completion in completions),
        log_prob_kind=kinds[-1] if kinds else "sampled",
        turns=transcript.turns,
        context_starts=transcript.context_starts,
        messages=transcript.messages,
        action_messages=transcript.actions,
        episode=EpisodeOutcome(stop_reason=stop_reason, steps=steps, num_cut_actions=sum(answer.was_cut for answer in answers)),
    )


def _add_context(transcript: Transcript, context: Sequence[Answer]) -> Transcript:
    """Append a context: its history, and its answers with what was given between them."""
    for k, answer in enumerate(context):
        given = answer.given
        if k == 0:
            if transcript.tokens:
                transcript = change(transcript, context_starts=(*transcript.context_starts, len(transcript.tokens)))
            if answer.parent is not None and not answer.begins_context:
                given = (*answer.parent.collect_context(), *given)
        messages = answer.added or ((Message(role="user", content=answer.prompt_text),) if not answer.messages else ())
        transcript = change(append_given(transcript, given), messages=(*transcript.messages, *messages))
        found = answer.completion
        transcript = append_sampled(
            transcript,
            found.output_tokens,
            found.output_log_probs,
            found.output_versions,
            answer.routed_experts,
            find_kept(found.kept_tokens, found.output_len, is_cut=found.truncated_sampling),
            text=answer.text,
        )
    return transcript


def _show(messages: Sequence[Message]) -> str:
    return "\n".join(message.content or "" for message in messages)
