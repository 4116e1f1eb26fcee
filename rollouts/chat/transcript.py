"""Transcript: the tokens of an episode as it grows, none tokenized twice.

    conversation = create_chat_format(tokenizer)
    transcript = begin_transcript(conversation, [Message(role="user", content="2 + 3 = ?")])
    completion = await engine.generate(transcript.context, params)
    transcript = add_action(transcript, conversation, completion.output_tokens, completion.output_log_probs, completion.output_versions)
    transcript = add_messages(transcript, conversation, [Message(role="tool", content="5")])      # and so on

The model's tokens stay as they were sampled, its end-of-turn token included, with loss_mask 1. All other tokens (prompt, observations,
text that the template writes between messages and behind an answer that was cut) are tokenized once, when they come, with loss_mask 0. The
template gets the text of an answer unchanged; tool calls stay inside it.

Without a format a transcript consists of messages alone, for policies that return text. It has no tokens and cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollouts.chat.formats import ConversationFormat, Rewriting
from rollouts.errors import DataError
from rollouts.types import KeptTokens, Message, RoutedExperts, Turn


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """An episode so far. Per-token fields are aligned with tokens, over all contexts."""

    messages: tuple[Message, ...] = ()  # the whole conversation; an assistant message's content is its text as written
    actions: tuple[int, ...] = ()  # positions of the model's messages among them; prompts and environments may speak as the assistant, too
    tokens: tuple[int, ...] = ()
    loss_mask: tuple[float, ...] = ()  # 1 on sampled tokens, 0 elsewhere
    log_probs: tuple[float, ...] | None = ()  # nats; 0 on tokens that were not sampled; None = unknown for some action
    versions: tuple[int, ...] | None = ()  # weight version that sampled each token; -1 on other tokens; None = unknown for some action
    routed_experts: RoutedExperts | None = None  # see Sample; None = not recorded for some action
    kept_tokens: KeptTokens | None = field(default_factory=KeptTokens)  # see Sample; None = not recorded for some action
    turns: tuple[Turn, ...] = ()
    context_starts: tuple[int, ...] = ()  # first token of each context but the first; see Sample
    rendered: str = ""  # the template's text of the present context, up to the model's last or next answer
    num_reformatted: int = 0  # answers that the template shows differently from the sampled text; the sampled tokens stay

    def __post_init__(self) -> None:
        n = len(self.tokens)
        assert len(self.loss_mask) == n, f"loss_mask has {len(self.loss_mask)} entries for {n} tokens"
        assert self.log_probs is None or len(self.log_probs) == n, f"log_probs has {len(self.log_probs or ())} entries for {n} tokens"
        assert self.versions is None or len(self.versions) == n, f"versions has {len(self.versions or ())} entries for {n} tokens"
        experts = self.routed_experts
        assert experts is None or len(experts) == n, f"routed_experts has {len(experts or ())} entries for {n} tokens"
        kept = self.kept_tokens
        assert kept is None or len(kept) == n, f"kept_tokens has {len(kept or ())} entries for {n} tokens"

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens that the model sees now."""
        return self.tokens[self.context_starts[-1] if self.context_starts else 0 :]

    @property
    def cut_tokens(self) -> KeptTokens | None:
        """Value of Sample.kept_tokens: the record, or None where it is not known or nothing was cut."""
        return self.kept_tokens if self.kept_tokens is not None and self.kept_tokens.cuts else None

    @property
    def num_sampled(self) -> int:
        """Number of tokens of all actions together."""
        return sum(turn.end - turn.start for turn in self.turns)


def begin_transcript(conversation: ConversationFormat | None, messages: Sequence[Message]) -> Transcript:
    """Return the transcript before the first action.

    Args:
        conversation: None = messages alone.
        messages: the prompt's messages, at least one.

    Raises: DataError if the template refuses the messages, or they have no tokens.
    """
    if conversation is None:
        return Transcript(messages=tuple(messages))
    rendered = conversation.open(messages)
    tokens = conversation.tokenize_opening(rendered)
    if not tokens:
        raise DataError(f"the {len(messages)} messages of the prompt have no tokens: a model needs at least one to go on from")
    return append_given(Transcript(messages=tuple(messages), rendered=rendered), tokens)


def add_action(
    transcript: Transcript,
    conversation: ConversationFormat | None,
    tokens: Sequence[int] = (),
    log_probs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    routed_experts: RoutedExperts | None = None,
    kept_tokens: KeptTokens | None = None,
    *,
    text: str | None = None,
) -> Transcript:
    """Append the model's answer: one turn and one assistant message.

    Args:
        conversation: None = the action is `text`.
        tokens: sampled tokens, the end-of-turn token included if there is one; at least one.
        log_probs: # [len(tokens)] nats; None = unknown.
        versions: # [len(tokens)] weight version of each token; None = unknown.
        routed_experts: experts of the context and of these tokens; None = not recorded.
        kept_tokens: sets that these tokens were drawn from, KeptTokens.whole for the whole vocabulary; None = not recorded.
        text: text of the assistant message; None = the decoded tokens without their ending.
    """
    if conversation is None:
        actions = (*transcript.actions, len(transcript.messages))
        return replace(transcript, messages=(*transcript.messages, Message(role="assistant", content=text or "")), actions=actions)
    assert tokens, "an action has at least one token"
    answer = conversation.decode_answer(tokens) if text is None else text
    return append_sampled(transcript, tokens, log_probs, versions, routed_experts, kept_tokens, text=answer)


def append_sampled(
    transcript: Transcript,
    tokens: Sequence[int],
    log_probs: Sequence[float] | None,
    versions: Sequence[int] | None,
    routed_experts: RoutedExperts | None,
    kept_tokens: KeptTokens | None,
    *,
    text: str,
) -> Transcript:
    """Append tokens that the model sampled, as one turn and one assistant message of this text. Arguments: see add_action."""
    assert tokens, "an action has at least one token"
    assert log_probs is None or len(log_probs) == len(tokens), f"{len(log_probs or ())} log_probs for {len(tokens)} tokens"
    assert versions is None or len(versions) == len(tokens), f"{len(versions or ())} versions for {len(tokens)} tokens"
    start, count = len(transcript.tokens), len(tokens)
    return replace(
        transcript,
        messages=(*transcript.messages, Message(role="assistant", content=text)),
        actions=(*transcript.actions, len(transcript.messages)),
        tokens=(*transcript.tokens, *tokens),
        loss_mask=transcript.loss_mask + (1.0,) * count,
        log_probs=None if transcript.log_probs is None or log_probs is None else (*transcript.log_probs, *log_probs),
        versions=None if transcript.versions is None or versions is None else (*transcript.versions, *versions),
        routed_experts=_add_experts(transcript, routed_experts, count),
        kept_tokens=None if transcript.kept_tokens is None or kept_tokens is None else transcript.kept_tokens + kept_tokens,
        turns=(*transcript.turns, Turn(start=start, end=start + count)),
    )


def add_messages(
    transcript: Transcript, conversation: ConversationFormat | None, messages: Sequence[Message], *, may_branch: bool = False
) -> Transcript:
    """Append the messages that follow an action, ready for the next one.

    Args:
        messages: messages of the environment or a user.
        may_branch: if the template rewrites history, go on in a further context (Sample.context_starts) with the rewritten history;
            otherwise that is an error.

    Raises: DataError if the template refuses or drops the messages, or rewrites history without may_branch (naming message and place).
    """
    if conversation is None:
        return note_messages(transcript, messages)
    assert transcript.turns, "messages follow an action: begin_transcript takes those before the first one"
    found = conversation.extend(transcript.rendered, transcript.messages, messages)
    if isinstance(found, Rewriting):
        if not may_branch:
            raise DataError(
                f"the chat template rewrites text that the model has seen or written, {found.where}. Its tokens would not be those that "
                "were sampled: set on_rewrite='branch' to go on in a further context, or use a template that keeps history as it was"
            )
        tokens = conversation.tokenize_opening(found.rendered)
        branched = replace(transcript, context_starts=(*transcript.context_starts, len(transcript.tokens)), rendered=found.rendered)
        return note_messages(append_given(branched, tokens), messages)
    last = transcript.turns[-1]
    missing = conversation.find_missing_ending(transcript.tokens[last.start : last.end])
    extended = append_given(transcript, conversation.tokenize(missing + found.text))
    num_reformatted = transcript.num_reformatted + (not found.as_sampled)
    return note_messages(replace(extended, rendered=found.rendered, num_reformatted=num_reformatted), messages)


def note_messages(transcript: Transcript, messages: Sequence[Message]) -> Transcript:
    """Append messages that no model is shown any more, such as the last observation."""
    return replace(transcript, messages=(*transcript.messages, *messages))


def describe_turn(transcript: Transcript, *, state: str | None, reward: float) -> Transcript:
    """Record the state that the last turn acted on and its reward; a transcript without turns is returned as it is."""
    if not transcript.turns:
        return transcript
    return replace(transcript, turns=(*transcript.turns[:-1], replace(transcript.turns[-1], state=state, reward=reward)))


def _add_experts(transcript: Transcript, found: RoutedExperts | None, count: int) -> RoutedExperts | None:
    """Return the experts of all tokens after an action of count tokens.

    A token that was read before keeps its experts. One that no pass had read, as of an observation, gets those of the pass before the
    action.
    """
    before = transcript.routed_experts
    if found is None or (before is None and transcript.turns):
        return None
    given = len(transcript.context)
    assert len(found) == given + count, f"routed_experts has {len(found)} entries for a context of {given} tokens and an action of {count}"
    whole = found.shift(len(transcript.tokens) - given)
    return whole if before is None else before.fill(whole)


def find_kept(recorded: KeptTokens | None, num_tokens: int, *, is_cut: bool) -> KeptTokens | None:
    """Return the sets that an action was drawn from: the recorded ones, or the whole vocabulary for each token if it was not cut."""
    return KeptTokens.whole(num_tokens) if recorded is None and not is_cut else recorded


def append_given(transcript: Transcript, tokens: Sequence[int]) -> Transcript:
    """Append tokens that the model did not sample."""
    count = len(tokens)
    return replace(
        transcript,
        tokens=(*transcript.tokens, *tokens),
        loss_mask=transcript.loss_mask + (0.0,) * count,
        log_probs=None if transcript.log_probs is None else transcript.log_probs + (0.0,) * count,
        versions=None if transcript.versions is None else transcript.versions + (-1,) * count,
        routed_experts=None if transcript.routed_experts is None else transcript.routed_experts.take(len(transcript.tokens) + count),
        kept_tokens=None if transcript.kept_tokens is None else transcript.kept_tokens + KeptTokens.undrawn(count),
    )
