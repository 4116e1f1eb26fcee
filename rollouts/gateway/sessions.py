"""Sessions of a gateway: each answer recorded with its tokens as sampled, and found again where a request's history extends it.

A session is a tree of answers. A request whose messages begin with the history of an answer, that answer included as the client got it,
goes on behind the answer's own tokens: only the messages behind it are tokenized. Among such answers the one with the longest history
counts. A request whose history is another (edited, shortened, of another sub-agent), or is rewritten by the chat template, begins a
context of its own; several requests that extend the same answer (retries, n, sub-agents) are branches behind it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import trio

from rollouts.chat.formats import ConversationFormat, Rewriting
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import EngineError
from rollouts.gateway.known_texts import KnownTexts
from rollouts.gateway.requests import MessageKey, Reply, drop_prompt, make_key, reply_message
from rollouts.types import Completion, Message, RoutedExperts, SamplingParams, change

if TYPE_CHECKING:
    from rollouts.gateway.cassettes.tapes import Tape


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """One answer of the engine, and how its prompt came about."""

    number: int  # place in the order of the session's answers
    parent: Answer | None  # answer whose history the request extended; None = none
    begins_context: bool  # whether its prompt does not begin with the parent's context: no parent, or a rewritten history
    given: tuple[int, ...]  # tokens of the prompt, behind the parent's context if it goes on from that
    added: tuple[Message, ...]  # messages of the request behind the parent's history; all of them without a parent
    asked: tuple[Message, ...]  # messages of the request in the client's form, behind those of the parent's request; all without a parent
    messages: tuple[Message, ...]  # whole history as the template gets it, this answer last, with its text as sampled
    text: str  # text as sampled, without its ending
    prompt_text: str  # text of a plain prompt; "" for messages
    prompt_hash: blake2b  # state behind the tokens of its prompt
    completion: Completion  # as sampled, without its prompt, which a long session would hold once for each answer
    routed_experts: RoutedExperts | None  # experts of the prompt's and the answer's tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its own tokens, as sampled."""
        return self.completion.output_tokens

    @property
    def was_cut(self) -> bool:
        """Whether it reached its token budget."""
        return self.completion.finish_reason == "length"

    def collect_context(self) -> tuple[int, ...]:
        """Return all tokens of its context: its prompt and its own."""
        parts: list[tuple[int, ...]] = []
        answer: Answer | None = self
        while answer is not None:
            parts += (answer.tokens, answer.given)
            answer = None if answer.begins_context else answer.parent
        return tuple(chain.from_iterable(reversed(parts)))

    def collect_asked(self) -> tuple[Message, ...]:
        """Return all messages of its request in the client's form."""
        parts: list[tuple[Message, ...]] = []
        answer: Answer | None = self
        while answer is not None:
            parts.append(answer.asked)
            answer = answer.parent
        return tuple(chain.from_iterable(reversed(parts)))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An answer that later requests may name instead of sending its history."""

    answer: Answer
    reply: Message  # as the client got it
    has_instructions: bool  # whether its request begins with instructions, which are no part of the history
    body: Mapping[str, Any]  # answer as JSON

    def collect_history(self) -> tuple[Message, ...]:
        """Return the messages of its request without the instructions, and the reply."""
        return (*self.answer.collect_asked()[self.has_instructions :], self.reply)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Prompt of a request, before it is sent to the engine."""

    parent: Answer | None
    begins_context: bool
    given: tuple[int, ...]
    added: tuple[Message, ...]
    asked: tuple[Message, ...] = ()  # see Answer
    messages: tuple[Message, ...]  # whole history as the template gets it
    tokens: tuple[int, ...]  # the whole prompt
    prompt_hash: blake2b = field(default_factory=blake2b)  # state behind these tokens
    path: tuple[MessageKey, ...] = ()  # the request's messages as keys
    root: str = ""  # conversations with other tools are not compared
    prompt_text: str = ""  # text of a plain prompt
    rendered: str = ""  # text of the history, as the format renders it
    num_known: int = 0  # messages, or characters or tokens of a plain prompt, that the parent's history has, its answer included


class _Place:
    """A place in the tree of histories: what was said next, and the answers that end here, the newest last."""

    __slots__ = ("answers", "children")

    def __init__(self) -> None:
        self.children: dict[MessageKey, _Place] = {}
        self.answers: list[Answer] = []


@dataclass(eq=False)
class Session:
    """Answers of one session, and the requests that it waits for. Made by Gateway.open_session, or by a session's first request."""

    key: str
    engine: InferenceEngine
    request_prefix: str  # begin of the ids of its requests to the engine, unique in all gateways; without the key, which may be a secret
    seed: int = 0
    max_answers: int | None = None  # most answers; further requests are refused (403); None = no limit
    max_tokens: int | None = None  # most sampled tokens, checked before each request; None = no limit
    note_request: Callable[[str], Any] | None = None  # called with the id of each request to the engine
    params: SamplingParams | None = None  # sampling where a request says nothing; None = the gateway's
    tape: Tape | None = None  # its part of the cassettes; None = there are none
    is_interruptible: bool = False  # whether an aborted request ends the session; False = the gateway sends it again with its tokens
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    stored: dict[str, Stored] = field(default_factory=dict[str, Stored])  # answers that later requests may name, by id
    call_ids: set[str] = field(default_factory=set[str])  # calls of its replies
    counts: Counter[str] = field(default_factory=Counter[str])  # num_requests, num_cancelled, num_undelivered, num_refused
    temperature: float | None = None  # temperature of its log-probs, chosen by the first request
    is_closed: bool = False
    is_interrupted: bool = False  # whether the engine was told to abort one of its requests
    used_at: float = field(default_factory=trio.current_time)  # time of the event loop when it last began or ended a request
    has_stopped: trio.Event = field(default_factory=trio.Event)  # set when it is interrupted or its engine fails: no answer will come
    is_spent: bool = False  # whether a request was refused because a limit was reached
    failure: EngineError | None = None  # first error of the engine
    fault: Exception | None = None  # first error at a request (500) that is neither the client's nor the engine's
    _roots: dict[str, _Place] = field(default_factory=dict[str, _Place])
    _scopes: dict[trio.CancelScope, int] = field(default_factory=dict[trio.CancelScope, int])  # answers that each request waits for
    _plans: dict[int, Plan] = field(default_factory=dict[int, Plan])  # prompts of answers that nothing extends yet, by number
    _asked: Counter[bytes] = field(default_factory=Counter[bytes])  # requests for each prompt
    _texts: KnownTexts[Answer] = field(default_factory=KnownTexts[Any])  # plain prompts that are texts, with their answers
    _contexts: KnownTexts[Answer] = field(default_factory=KnownTexts[Any])  # tokens of all plain prompts, with those of their answers
    _num_answers: int = 0  # number of the next answer that the engine samples

    def __post_init__(self) -> None:
        if self.tape is not None:
            self._num_answers = self.tape.first_free

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens that are recorded."""
        return sum(len(answer.tokens) for answer in self.answers.values())

    @property
    def num_in_flight(self) -> int:
        """Number of answers that requests wait for."""
        return sum(self._scopes.values())

    def enter(self, scope: trio.CancelScope, n: int) -> None:
        """Note a request for n answers in flight, which close() cancels."""
        self.used_at = trio.current_time()
        self._scopes[scope] = n

    def leave(self, scope: trio.CancelScope) -> None:
        """Note the end of a request in flight."""
        self.used_at = trio.current_time()
        self._scopes.pop(scope, None)

    def close(self) -> None:
        """Refuse further requests, and cancel those in flight."""
        self.is_closed = True
        for scope in self._scopes:
            scope.cancel()

    def interrupt(self) -> None:
        """Note that the engine was told to abort one of its requests."""
        self.is_interrupted = True
        self.has_stopped.set()

    def note_failure(self, error: EngineError) -> None:
        """Note an error of the engine; the first one counts."""
        self.failure = error if self.failure is None else self.failure
        self.has_stopped.set()

    def note_fault(self, error: Exception) -> None:
        """Note an error of the gateway at a request; the first one counts."""
        self.fault = error if self.fault is None else self.fault

    def take_seed_keys(self, plan: Plan) -> tuple[int, ...]:
        """Return the keys of a request's seed: session, prompt, and how many requests had this prompt before.

        They depend on the order of equal requests alone, so sub-agents that run at the same time get the same seeds in every run.
        """
        digest = plan.prompt_hash.digest()
        number = self._asked[digest]
        self._asked[digest] += 1
        return (self.seed, int.from_bytes(digest, "big"), number)

    def find(self, root: str, path: Sequence[MessageKey]) -> tuple[Answer | None, int]:
        """Return the answer with the longest history that the path begins with, and the number of messages of that history."""
        place = self._roots.get(root)
        found, depth = None, 0
        for k, key in enumerate(path):
            place = None if place is None else place.children.get(key)
            if place is None:
                break
            delivered = (answer for answer in reversed(place.answers) if answer.number in self.answers)
            answer = next(delivered, None)
            if answer is not None:
                found, depth = answer, k + 1
        return found, depth

    def find_text(self, prompt: str | tuple[int, ...]) -> Answer | None:
        """Return the answer to a plain prompt that this longer prompt begins with, that answer included; the longest one."""
        known = self._texts if isinstance(prompt, str) else self._contexts
        return known.find(prompt, lambda answer: answer.number in self.answers)

    def record(self, plan: Plan, completion: Completion, text: str, number: int | None = None) -> Answer:
        """Record a completion, exactly as it was sampled. number: its place among the answers; None = the next one."""
        message = (Message(role="assistant", content=text),) if plan.messages else ()
        answer = Answer(
            number=self._num_answers if number is None else number,
            parent=plan.parent,
            begins_context=plan.begins_context,
            given=plan.given,
            added=plan.added,
            asked=plan.asked,
            messages=(*plan.messages, *message),
            text=text,
            prompt_text=plan.prompt_text,
            prompt_hash=plan.prompt_hash,
            completion=drop_prompt(completion),
            routed_experts=completion.routed_experts,
        )
        self._num_answers = max(self._num_answers, answer.number + 1)
        self._plans[answer.number] = plan
        self.answers[answer.number] = answer
        if not plan.messages:
            self._contexts.add(plan.tokens + completion.output_tokens, answer)
            if plan.prompt_text:
                self._texts.add(plan.prompt_text + text, answer)
        return answer

    def take_context(self, answer: Answer) -> tuple[tuple[int, ...], str | None]:
        """Return all tokens of an answer's context, and the text that the model answered.

        Both are kept for the first request behind the answer. For a further one the tokens are collected, and the text is None.
        """
        plan = self._plans.pop(answer.number, None)
        return (answer.collect_context(), None) if plan is None else (plan.tokens + answer.tokens, plan.rendered)

    def note_reply(self, plan: Plan, answer: Answer, reply: Reply) -> None:
        """Remember a reply as the client gets it, so that its history and its calls are recognised."""
        self.call_ids.update(str(call.id) for call in reply.calls)
        if not plan.messages:
            return
        place = self._roots.setdefault(plan.root, _Place())
        for key in (*plan.path, make_key(reply_message(reply))):
            place = place.children.setdefault(key, _Place())
        place.answers.append(answer)

    def forget(self, numbers: Iterable[int]) -> None:
        """Leave out answers that could not be sent: no program has seen them."""
        lost = tuple(numbers)
        for name in [name for name, stored in self.stored.items() if stored.answer.number in lost]:
            del self.stored[name]
        for number in lost:
            self._plans.pop(number, None)
            if self.answers.pop(number, None) is not None:
                self.counts["num_undelivered"] += 1
        if self.tape is not None:
            self.tape.forget(lost)


def plan_messages(
    session: Session, conversation: ConversationFormat, root: str, messages: Sequence[Message], *, show: Callable[[Message], Message]
) -> Plan:
    """Return the prompt of a conversation: behind the tokens of the answer that it extends, or anew.

    Args:
        root: name of the format; conversations of different ones are not compared.
        messages: history in the client's form, the last one not an assistant's.
        show: turns a message that was not sampled here into what the format is to render.

    Raises: DataError if the template refuses the messages.
    """
    path = tuple(map(make_key, messages))
    parent, depth = session.find(root, path)
    if parent is None:
        shown = tuple(map(show, messages))
        rendered = conversation.open(shown)
        tokens = conversation.tokenize_opening(rendered)
        return Plan(
            parent=None,
            begins_context=True,
            given=tokens,
            added=shown,
            asked=tuple(messages),
            messages=shown,
            tokens=tokens,
            prompt_hash=_hash_tokens(None, tokens),
            path=path,
            root=root,
            rendered=rendered,
        )
    added = tuple(map(show, messages[depth:]))
    plan = Plan(
        parent=parent,
        begins_context=False,
        given=(),
        added=added,
        asked=tuple(messages[depth - 1 :]),  # the parent's reply is the first
        messages=(*parent.messages, *added),
        tokens=(),
        path=path,
        root=root,
        num_known=depth,
    )
    context, rendered = session.take_context(parent)
    rendered = conversation.open(parent.messages[:-1]) if rendered is None else rendered
    found = conversation.extend(rendered, parent.messages, added)
    if isinstance(found, Rewriting):
        tokens = conversation.tokenize_opening(found.rendered)
        prompt_hash = _hash_tokens(None, tokens)
        return change(plan, begins_context=True, given=tokens, tokens=tokens, prompt_hash=prompt_hash, rendered=found.rendered)
    given = conversation.tokenize(conversation.find_missing_ending(parent.tokens) + found.text)
    return change(plan, given=given, tokens=context + given, prompt_hash=_hash_tokens(parent, given), rendered=found.rendered)


def plan_text(session: Session, conversation: ConversationFormat, prompt: str | tuple[int, ...]) -> Plan:
    """Return the prompt of a plain text, or of tokens: behind the tokens of the answer that it extends, or anew.

    Raises: DataError for a text without tokens.
    """
    parent, text = session.find_text(prompt), prompt if isinstance(prompt, str) else ""
    context = () if parent is None else session.take_context(parent)[0]
    if parent is None:
        given = conversation.tokenize_opening(prompt) if isinstance(prompt, str) else prompt
        known = 0
    else:
        known = len(parent.prompt_text) + len(parent.text) if isinstance(prompt, str) else len(context)
        given = conversation.tokenize(prompt[known:]) if isinstance(prompt, str) else prompt[known:]
    return Plan(
        parent=parent,
        begins_context=parent is None,
        given=given,
        added=(),
        messages=(),
        tokens=context + given,
        prompt_hash=_hash_tokens(parent, given),
        prompt_text=text,
        num_known=known,
    )


def _hash_tokens(parent: Answer | None, given: tuple[int, ...]) -> blake2b:
    """Return the hash of a prompt: of given tokens, behind the context of an answer. The time is that of what is new."""
    if parent is None:
        return blake2b(array("q", given).tobytes(), digest_size=8)
    found = parent.prompt_hash.copy()
    found.update(array("q", parent.tokens + given).tobytes())
    return found
