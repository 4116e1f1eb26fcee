"""@reward_function: a function of a conversation becomes a reward of samples, with what it takes and returns checked.

    @reward_function
    def cites_a_source(messages, ground_truth, **kwargs):          # one conversation; sync or async
        return EvaluateResult(float("[1]" in messages[-1].content), reason="a source is cited")

    @reward_function(mode="batch")
    def shortest_wins(conversations, **kwargs):                    # all samples of a group; kwargs are lists, one entry for each
        lengths = [len(messages[-1].content) for messages in conversations]
        return [EvaluateResult(float(n == min(lengths))) for n in lengths]

Both can be called as they are written, in a test or a notebook, and both go to RolloutConfig.reward_fn. A function with the parameter
ground_truth (or any other name) is given metadata["ground_truth"] of the sample; one with **kwargs, all of its metadata.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from rollouts.checks import is_async_function
from rollouts.config import suggest
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.answers import load_function
from rollouts.rewards.calls import check_values, describe_reward
from rollouts.rewards.results import EvaluateResult, as_result
from rollouts.samples import describe_sample, sample_messages
from rollouts.types import Message, Sample

RewardMode = Literal["pointwise", "batch"]

Conversation: TypeAlias = "Sequence[Message | Mapping[str, Any]]"
"""Messages, or dicts in the field names of the OpenAI chat format."""


class RewardFunction:
    """A function of one conversation. Called with messages it judges them, called with a Sample it judges that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """
        Args:
            function: function(messages, ...) -> EvaluateResult or a number; async or not. messages is a list of Message.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._name = describe_reward(function)
        self._parameters = _read_parameters(function)

    def __call__(self, messages: Conversation | Sample, **kwargs: Any) -> Any:
        """The EvaluateResult of a conversation, or, of an async function, an awaitable of it.

        Raises: RewardError for arguments that are no messages, or a result that is neither an EvaluateResult nor a finite number.
        """
        if isinstance(messages, Sample):
            where, kwargs = describe_sample(messages), {**self._select(messages), **kwargs}
            conversation = list(sample_messages(messages))
        else:
            where, conversation = "the messages given", parse_messages(messages)
        return _then(self._function(conversation, **kwargs), lambda value: as_result(value, self._name, where))

    def _select(self, sample: Sample) -> dict[str, Any]:
        """The metadata that the function asks for. Raises RewardError if it needs one that is not there."""
        names, required, takes_all = self._parameters
        missing = sorted(required - set(sample.metadata))
        if missing:
            raise RewardError(
                f"reward function {self._name} needs {missing}, but the metadata of {describe_sample(sample)} has "
                f"{sorted(sample.metadata)}: give the prompts these, or the parameters defaults"
            )
        return {key: value for key, value in sample.metadata.items() if key in names or (takes_all and key not in _TAKEN)}


class AsyncRewardFunction(RewardFunction):
    """A RewardFunction of an async function."""

    async def __call__(self, messages: Conversation | Sample, **kwargs: Any) -> EvaluateResult:
        """The EvaluateResult of a conversation."""
        return await super().__call__(messages, **kwargs)


class BatchRewardFunction(RewardFunction):
    """A function of several conversations at once: a calls.GroupReward, called once for each group."""

    def __call__(self, messages: Any, **kwargs: Any) -> Any:
        """The list of an EvaluateResult for each conversation; of a Sample, which is a group of one then, its EvaluateResult.

        Raises: RewardError for arguments that are no conversations, another number of results, or results that are none.
        """
        if isinstance(messages, Sample):
            return _then(self.score_samples((messages,)), lambda results: results[0])
        conversations = [parse_messages(conversation) for conversation in messages]
        return self._call(conversations, kwargs)

    def score_samples(self, samples: Sequence[Sample]) -> Any:
        """The list of an EvaluateResult for each sample, or, of an async function, an awaitable of it."""
        selected = [self._select(sample) for sample in samples]
        names = {name: None for values in selected for name in values}
        columns = {name: [values.get(name) for values in selected] for name in names}
        return self._call([list(sample_messages(sample)) for sample in samples], columns)

    def _call(self, conversations: list[list[Message]], columns: Mapping[str, Any]) -> Any:
        def check(values: Any) -> list[EvaluateResult]:
            found = check_values(values, len(conversations), self._name)
            return [self._check_one(value, k) for k, value in enumerate(found)]

        return _then(self._function(conversations, **columns), check)

    def _check_one(self, value: Any, place: int) -> EvaluateResult:
        """One result of several: a bad one is an error of its own sample, and leaves the others as they are."""
        try:
            return as_result(value, self._name, f"conversation {place} of the batch")
        except RewardError as error:
            return EvaluateResult.from_error(str(error))


class AsyncBatchRewardFunction(BatchRewardFunction):
    """A BatchRewardFunction of an async function."""

    async def __call__(self, messages: Any, **kwargs: Any) -> Any:
        """See BatchRewardFunction."""
        return await super().__call__(messages, **kwargs)

    async def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """The list of an EvaluateResult for each sample."""
        return await super().score_samples(samples)


_TAKEN = frozenset({"messages"})  # metadata that comes as the first argument

_CLASSES = (
    (("pointwise", False), RewardFunction),
    (("pointwise", True), AsyncRewardFunction),
    (("batch", False), BatchRewardFunction),
    (("batch", True), AsyncBatchRewardFunction),
)


def reward_function(function: Callable[..., Any] | None = None, /, *, mode: RewardMode = "pointwise") -> Any:
    """Decorator that makes a reward of a function of messages. See the module's docstring.

    Args:
        function: of messages, and of metadata by name; where mode is "batch", of several lists of messages, and of lists of metadata.
        mode: one conversation in a call, or all that belong to a group.

    Raises: ConfigError for another mode, or for a function that takes no positional argument.
    """
    if mode not in get_args(RewardMode):
        raise ConfigError(f"the mode of a reward function is {mode!r}: {suggest(str(mode), get_args(RewardMode))}")
    if function is None:
        return functools.partial(reward_function, mode=mode)
    if not callable(function):
        raise ConfigError(f"@reward_function is on {function!r}, expected a function(messages, ...)")
    return dict(_CLASSES)[mode, is_async_function(function)](function)


def load_reward(reference: str) -> Any:
    """The reward named by "package.module:name" or "path/to/file.py:name": a function of a Sample, decorated or not, or a RewardSource.

    The module is imported, so its code runs here and with all rights of this process: name only code that you trust. Code that you do
    not trust belongs into a sandbox, see rewards.sandboxed.

    Raises: ConfigError saying which part was not found.
    """
    return load_function(reference)


def parse_messages(messages: Any) -> list[Message]:
    """Messages, or dicts of them, as messages. Raises RewardError if one is neither."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RewardError(f"the messages are {messages!r:.200} ({type(messages).__name__}), expected a list of messages")
    out: list[Message] = []
    for k, message in enumerate(cast("Iterable[Any]", messages)):
        try:
            out.append(message if isinstance(message, Message) else Message.from_dict(message))
        except (AssertionError, KeyError, TypeError, AttributeError) as error:
            raise RewardError(f"message {k} is {message!r:.200}, expected a Message or a dict with role and content: {error!r}") from error
    return out


def _read_parameters(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str], bool]:
    """Of the parameters behind the first: their names, those without default, and whether there are **kwargs."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the parameters of reward function {describe_reward(function)} cannot be read: {error}") from error
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError(f"reward function {describe_reward(function)} takes no positional argument, expected (messages, ...)")
    named = [p for p in parameters[1:] if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)]
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    required = frozenset(p.name for p in named if p.default is inspect.Parameter.empty)
    return frozenset(p.name for p in named), required, takes_all


def _then(value: Any, finish: Callable[[Any], Any]) -> Any:
    """finish(value), or, of an awaitable, an awaitable of that."""
    if not inspect.isawaitable(value):
        return finish(value)

    async def wait() -> Any:
        return finish(await value)

    return wait()
