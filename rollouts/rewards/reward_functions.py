"""@reward_function: makes a reward of samples from a function of a conversation, with its arguments and result checked.

    @reward_function
    def cites_a_source(messages, ground_truth, **kwargs):          # one conversation; sync or async
        return EvaluateResult(float("[1]" in messages[-1].content), reason="a source is cited")

    @reward_function(mode="batch")
    def shortest_wins(conversations, **kwargs):                    # all samples of a group; kwargs are lists, one entry for each
        lengths = [len(messages[-1].content) for messages in conversations]
        return [EvaluateResult(float(n == min(lengths))) for n in lengths]

Both can be called as written, in a test or a notebook, and both go to RolloutConfig.reward_fn. A function with the parameter ground_truth
(or any other name) gets metadata["ground_truth"] of the sample; one with **kwargs gets all metadata.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from rollouts.checks import is_async_function
from rollouts.config_files import suggest
from rollouts.data.samples import collect_reward_data, describe_sample, sample_messages
from rollouts.errors import ConfigError, RewardError
from rollouts.rewards.answers import load_function
from rollouts.rewards.results import EvaluateResult, as_result, check_values, describe_reward, name_reward, then
from rollouts.types import Message, Sample

RewardMode = Literal["pointwise", "batch"]

Conversation: TypeAlias = "Sequence[Message | Mapping[str, Any]]"
"""Messages, or dicts with the field names of the OpenAI chat format."""


class RewardFunction:
    """A function of one conversation. A call with messages judges them, a call with a Sample judges it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """
        Args:
            function: function(messages, ...) -> EvaluateResult or a number; async or not. messages is a list of Message.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._name = name_reward(function)
        self._parameters = _read_parameters(function)
        self._taken = {"messages", next(iter(inspect.signature(function).parameters))}  # names of the first argument

    @property
    def needed_columns(self) -> frozenset[str]:
        """Names of the parameters without default, which the metadata of each sample must have."""
        return self._parameters[1]

    def __call__(self, messages: Conversation | Sample, **kwargs: Any) -> Any:
        """Return the EvaluateResult of a conversation; for an async function an awaitable of it.

        Raises: RewardError for arguments that are no messages, or a result that is neither an EvaluateResult nor a finite number.
        """
        if isinstance(messages, Sample):
            where, kwargs = describe_sample(messages), {**self._select(messages), **kwargs}
            conversation = list(sample_messages(messages))
        else:
            where, conversation = "the messages given", parse_messages(messages)
        return then(self._function(conversation, **kwargs), lambda value: as_result(value, self._name, where))

    def _select(self, sample: Sample) -> dict[str, Any]:
        """Return the values that the function asks for, see collect_reward_data. Raises RewardError if it needs one that is not there."""
        names, required, takes_all = self._parameters
        data = collect_reward_data(sample)
        missing = sorted(required - set(data))
        if missing:
            raise RewardError(
                f"reward function {self._name} needs {missing}, but the metadata of {describe_sample(sample)} has "
                f"{sorted(data)}: give the prompts these, or the parameters defaults"
            )
        return {key: value for key, value in data.items() if key in names or (takes_all and key not in self._taken)}


class AsyncRewardFunction(RewardFunction):
    """A RewardFunction of an async function."""

    async def __call__(self, messages: Conversation | Sample, **kwargs: Any) -> EvaluateResult:
        """Return the EvaluateResult of a conversation."""
        return await super().__call__(messages, **kwargs)


class BatchRewardFunction(RewardFunction):
    """A function of several conversations at once: a calls.GroupReward, called once for each group."""

    def __call__(self, messages: Any, **kwargs: Any) -> Any:
        """Return a list with an EvaluateResult per conversation; for a Sample, as a group of one, its EvaluateResult.

        Raises: RewardError for arguments that are no conversations, another number of results, or invalid results.
        """
        if isinstance(messages, Sample):
            return then(self.score_samples((messages,)), lambda results: results[0])
        conversations = [parse_messages(conversation) for conversation in messages]
        return self._call(conversations, kwargs)

    def score_samples(self, samples: Sequence[Sample]) -> Any:
        """Return a list with an EvaluateResult per sample; for an async function an awaitable of it."""
        selected = [self._select(sample) for sample in samples]
        names = {name: None for values in selected for name in values}
        columns = {name: [values.get(name) for values in selected] for name in names}
        return self._call([list(sample_messages(sample)) for sample in samples], columns)

    def _call(self, conversations: list[list[Message]], columns: Mapping[str, Any]) -> Any:
        def check(values: Any) -> list[EvaluateResult]:
            found = check_values(values, len(conversations), self._name)
            return [self._check_one(value, k) for k, value in enumerate(found)]

        return then(self._function(conversations, **columns), check)

    def _check_one(self, value: Any, place: int) -> EvaluateResult:
        """Check one result of several: a bad one is an error of its own sample, and does not affect the others."""
        try:
            return as_result(value, self._name, f"conversation {place} of the batch")
        except RewardError as error:
            return EvaluateResult.from_error(str(error))


class AsyncBatchRewardFunction(BatchRewardFunction):
    """A BatchRewardFunction of an async function."""

    async def __call__(self, messages: Any, **kwargs: Any) -> Any:
        """Call the function as in BatchRewardFunction, and await its result."""
        return await super().__call__(messages, **kwargs)

    async def score_samples(self, samples: Sequence[Sample]) -> list[EvaluateResult]:
        """Return a list with an EvaluateResult per sample."""
        return await super().score_samples(samples)


_CLASSES = (
    (("pointwise", False), RewardFunction),
    (("pointwise", True), AsyncRewardFunction),
    (("batch", False), BatchRewardFunction),
    (("batch", True), AsyncBatchRewardFunction),
)


def reward_function(function: Callable[..., Any] | None = None, /, *, mode: RewardMode = "pointwise") -> Any:
    """Decorate a function of messages to make it a reward. See the module's docstring.

    Args:
        function: function of messages, and of metadata by name; in mode "batch" of several lists of messages, and of lists of metadata.
        mode: "pointwise" = one conversation per call; "batch" = all conversations of a group.

    Raises: ConfigError for an unknown mode, or for a function that takes no positional argument.
    """
    if mode not in get_args(RewardMode):
        raise ConfigError(f"the mode of a reward function is {mode!r}: {suggest(str(mode), get_args(RewardMode))}")
    if function is None:
        return functools.partial(reward_function, mode=mode)
    if not callable(function):
        raise ConfigError(f"@reward_function is on {function!r}, expected a function(messages, ...)")
    return dict(_CLASSES)[mode, is_async_function(function)](function)


def load_reward(reference: str) -> Any:
    """Return the reward named by "package.module:name" or "path/to/file.py:name": a function of a Sample, or a RewardSource.

    The module is imported, so its code runs here with all rights of this process: name only code that you trust. Untrusted code belongs
    into a sandbox, see rewards/code/sandboxed.py.

    Raises: ConfigError saying which part was not found.
    """
    return load_function(reference)


def parse_messages(messages: Any) -> list[Message]:
    """Return messages, or dicts of them, as Messages. Raises RewardError if one is neither."""
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
    """Return names, required names, and presence of **kwargs of the parameters behind the first."""
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
