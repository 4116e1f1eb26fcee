"""Contract of a user's generate function: sync or async, with or without continuation, its result checked and scored.

    generate_fn(prompt: Prompt, n: int) -> Group                    every call begins the group anew
    generate_fn(prompt: Prompt, n: int, partial: Group) -> Group    partial = () or a group that was stopped before its end: its ABORTED
                                                                    samples are to be continued, its PENDING ones to be begun

With RolloutConfig.n_baseline_samples = m the group has n + m samples: n trainable ones, then m baselines that only count in the group's
statistics, such as the greedy answer that ReMax compares with (create_generate_fn(..., num_greedy=1)). The caller sets trainable = False
in these.

It may be an `async def`, a plain function (which runs in a thread) or any object with __call__. It returns the n samples of the prompt's
rollout; group_index and index are set by the caller. A group with an ABORTED or PENDING sample is unfinished.

An object may also have a method that needs no task of its own for each group, which the executor then calls instead:

    begin_group(prompt: Prompt, n: int, partial: Group, on_end: OnEnd) -> None

It is a plain function and returns at once. on_end(result) is to be called once, in trio's thread, with the group, finished or not, or with
an exception instead of it: during begin_group or later, and soon after the engine of an unfinished group was told to abort it. A group that
does not end within grace_s of that is begun again, and the late result is ignored. The object still needs __call__, for synchronous loops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias, TypeGuard

import trio

from rollouts.checks import describe_function, is_async_function, show_value
from rollouts.config import RewardConfig, RolloutConfig
from rollouts.errors import CheckpointError, ConfigError, GenerationError, locate_error
from rollouts.outcomes import FIELD_OF_KEY
from rollouts.rewards.evaluate import score_group
from rollouts.types import Group, Prompt, Sample, Status
from rollouts.user_code import is_passed_on

GenerateFn: TypeAlias = Callable[..., Any]
"""See the module's docstring; its optional third parameter cannot be written as one type."""

OnEnd: TypeAlias = Callable[["Group | Exception"], None]
"""f(result of a generate function, or its error)."""

UNFINISHED = frozenset({Status.PENDING, Status.ABORTED})


@dataclass(frozen=True)
class PendingGroup:
    """Rollout that is still to be generated, or to be continued."""

    prompt: Prompt
    samples: Group = ()  # unfinished samples of an earlier attempt; () = none

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain JSON values."""
        return {"prompt": self.prompt.to_dict(), "samples": [sample.to_dict() for sample in self.samples]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PendingGroup:
        """Return the group of to_dict's values."""
        return cls(Prompt.from_dict(data["prompt"]), tuple(Sample.from_dict(sample) for sample in data["samples"]))


def check_saved_groups(state: Mapping[str, Any], config: RolloutConfig) -> None:
    """Raise CheckpointError if the groups of a saved state have another size than the config's: waiting groups would not fit."""
    for name in ("n_samples_per_prompt", "n_baseline_samples"):
        saved, own = state.get(name, 0), getattr(config, name)
        if saved != own:
            raise CheckpointError(
                f"the saved rollouts have {name} {saved}, but the config has {own}: groups that wait would not fit. Resume with the saved "
                "value."
            )


def is_finished(group: Group) -> bool:
    """Return True if every sample of the group has ended."""
    return all(sample.status not in UNFINISHED for sample in group)


def accepts_partial(generate_fn: GenerateFn) -> bool:
    """Return True if the function continues unfinished groups, that is, has a parameter named `partial`."""
    return "partial" in inspect.signature(generate_fn).parameters


def take_counts(generate_fn: GenerateFn | None) -> dict[str, int]:
    """Return the counts of a generate function since the last call, for the metrics of a batch; {} if it has no take_counts()."""
    take: Callable[[], dict[str, int]] | None = getattr(generate_fn, "take_counts", None)
    return {} if take is None else dict(take())


def gives_turns(generate_fn: GenerateFn | None) -> bool | None:
    """Return True if the samples of a generate function have turns (Sample.turns), by its attribute `gives_turns`; None without one."""
    while isinstance(generate_fn, functools.partial):
        generate_fn = generate_fn.func
    return getattr(generate_fn, "gives_turns", None)


def bind_generate_fn(
    generate_fn: GenerateFn, num_samples: int, *, num_baseline: int = 0, thread_limiter: trio.CapacityLimiter | None = None
) -> Callable[[PendingGroup], Awaitable[Group]]:
    """Turn a user's generate function into an async one from PendingGroup to a checked Group.

    Args:
        generate_fn: see the module's docstring. Without a `partial` parameter an unfinished group is generated anew from its prompt.
        num_samples: n of each call.
        num_baseline: samples that each call returns after these n.
        thread_limiter: limiter of the threads of sync functions; None = trio's default one. A function that waits for another of trio's
            threads needs its own limiter.

    A thread cannot be stopped: after the cancellation of a sync function its thread goes on, and its result is thrown away.

    Returns: a function that raises the errors of generate_fn, and GenerationError for a result of another number of Samples, or instead
        of a BaseException such as SystemExit.
    """
    assert num_samples >= 1, f"num_samples is {num_samples}, expected at least 1"
    assert num_baseline >= 0, f"num_baseline is {num_baseline}, expected at least 0"
    continues, is_async = accepts_partial(generate_fn), is_async_function(generate_fn)
    function_name = describe_function(generate_fn)

    async def generate(pending: PendingGroup) -> Group:
        more = {"partial": pending.samples} if continues else {}
        try:
            if is_async:
                result = generate_fn(pending.prompt, num_samples, **more)
            else:  # boxed, because trio refuses a plain function that returns a coroutine, as a lambda around an async one does
                call = functools.partial(generate_fn, pending.prompt, num_samples, **more)
                (result,) = await trio.to_thread.run_sync(lambda: (call(),), abandon_on_cancel=True, limiter=thread_limiter)
            if inspect.isawaitable(result):
                result = await result
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit, which must not end the program
            if is_passed_on(error):
                raise
            raise _describe_exit(error, function_name, pending.prompt) from error
        return check_generated_group(result, pending.prompt, num_samples, function_name, num_baseline=num_baseline)

    return generate


def bind_begin(generate_fn: GenerateFn | None, num_samples: int, *, num_baseline: int = 0) -> Callable[[PendingGroup, OnEnd], None] | None:
    """Turn a user's `begin_group` into f(pending, on_end), whose on_end gets a checked Group or an error; None if there is none.

    Args: as bind_generate_fn.

    Raises: ConfigError if it is an `async def`, or does not take four arguments.
    """
    begin: Callable[[Prompt, int, Group, OnEnd], None] | None = getattr(generate_fn, "begin_group", None)
    if generate_fn is None or begin is None:
        return None
    function_name = describe_function(generate_fn)
    _check_begin(begin, function_name)

    def begin_checked(pending: PendingGroup, on_end: OnEnd) -> None:
        def end(result: Group | Exception) -> None:
            if not isinstance(result, Exception):
                try:
                    result = check_generated_group(result, pending.prompt, num_samples, function_name, num_baseline=num_baseline)
                except GenerationError as error:
                    result = error
            on_end(result)

        try:
            begin(pending.prompt, num_samples, pending.samples, end)
        except Exception as error:  # from a user's function; the caller decides about it
            error.add_note(f"raised by begin_group() of {function_name}")
            on_end(error)
        except BaseException as error:  # such as SystemExit, which must not end the program
            if is_passed_on(error):
                raise
            on_end(_describe_exit(error, f"begin_group() of {function_name}", pending.prompt))

    return begin_checked


def _check_begin(begin: Callable[..., Any], function_name: str) -> None:
    expected = "expected a plain method begin_group(prompt, n, partial, on_end), or none"
    if not callable(begin):
        raise ConfigError(f"begin_group of {function_name} is {show_value(begin)}, {expected}")
    if is_async_function(begin):
        raise ConfigError(f"begin_group of {function_name} is an async function, which nobody would await: {expected}")
    try:
        inspect.signature(begin).bind(None, None, None, None)
    except TypeError as error:
        raise ConfigError(f"begin_group of {function_name} cannot be called with four arguments ({error}): {expected}") from error


def _describe_exit(error: BaseException, function_name: str, prompt: Prompt) -> GenerationError:
    what = f"{function_name} raised {type(error).__name__} ({locate_error(error)})"
    return GenerationError(f"{what} for prompt {prompt.index}: {error}")


def check_generated_group(
    result: Iterable[Sample], prompt: Prompt, num_samples: int, function_name: str, *, num_baseline: int = 0
) -> Group:
    """Return the result of a generate function as a Group with the indices that belong to the prompt.

    Returns: sample k has group_index = prompt.index and index = prompt.index * (num_samples + num_baseline) + k; the last num_baseline
        have trainable = False.
    Raises: GenerationError if it is not num_samples + num_baseline Samples, or metadata has what a field of Sample is for.
    """
    size = num_samples + num_baseline
    samples = tuple(result) if isinstance(result, Sequence) else (result,)
    if not _are_samples(samples):
        wrong = sorted({type(sample).__name__ for sample in samples if not isinstance(sample, Sample)})
        raise GenerationError(
            f"{function_name} returned {', '.join(wrong)} for prompt {prompt.index}, expected a sequence of {size} Samples"
        )
    if len(samples) != size:
        beside = (
            f" and {num_baseline} baseline samples (such as num_greedy={num_baseline} of create_generate_fn gives)" if num_baseline else ""
        )
        raise GenerationError(
            f"{function_name} returned {len(samples)} samples for prompt {prompt.index}, expected n = {num_samples}{beside}: "
            "a group is the n samples of one prompt; return FAILED samples for those that could not be generated"
        )
    for sample in samples:
        if sample.status is Status.PENDING and sample.tokens:
            raise GenerationError(
                f"{function_name} returned a sample of prompt {prompt.index} with {len(sample.tokens)} tokens and status pending: "
                "set status to COMPLETED, TRUNCATED, or ABORTED if it is to be continued"
            )
        if sample.metadata and not FIELD_OF_KEY.keys().isdisjoint(sample.metadata):
            _check_metadata(sample, prompt, function_name)
    return tuple([_put_in_place(sample, prompt.index, size, k, k < num_samples) for k, sample in enumerate(samples)])


def _are_samples(values: Sequence[Any]) -> TypeGuard[Sequence[Sample]]:
    return all(isinstance(value, Sample) for value in values)


def _check_metadata(sample: Sample, prompt: Prompt, function_name: str) -> None:
    """Raise GenerationError if metadata has an entry that is a field of Sample, unless the prompt has it: a column of the user's data."""
    for key in sorted((FIELD_OF_KEY.keys() & sample.metadata.keys()) - prompt.metadata.keys()):
        value = show_value(dict(sample.metadata)[key])
        raise GenerationError(
            f"{function_name} returned a sample of prompt {prompt.index} with metadata[{key!r}] = {value}, which nothing reads there: "
            f"set {FIELD_OF_KEY[key]}, or give a value of your own another key"
        )


def _put_in_place(sample: Sample, group_index: int, size: int, k: int, trainable: bool) -> Sample:
    """Return sample k of a group of this size, with the index and trainable of its place: see create_pending_group."""
    index = group_index * size + k
    fits = sample.index == index and sample.group_index == group_index
    if fits and (trainable or not sample.trainable):
        return sample
    return replace(sample, index=index, group_index=group_index, trainable=trainable and sample.trainable)


_REQUEST_IDS: ContextVar[set[str] | None] = ContextVar("request ids of a rollout", default=None)


class collect_requests:  # a context manager reads as a verb
    """Context manager of the ids that note_request is given in its block and in tasks started there, so that they can be aborted alone."""

    def __enter__(self) -> set[str]:
        request_ids: set[str] = set()
        self._token = _REQUEST_IDS.set(request_ids)
        return request_ids

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        _REQUEST_IDS.reset(self._token)


def note_request(request_id: str) -> None:
    """Note that a rollout is about to send a request of this id, which make_request_id gives to no sample of its group."""
    request_ids = _REQUEST_IDS.get()
    if request_ids is not None:
        request_ids.add(request_id)


class note_prompt:  # a context manager reads as a verb
    """Context manager that adds a note about the prompt to any exception of its block."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            content = self._prompt.content
            text = repr(content if isinstance(content, str) else "\n".join(f"{message.role}: {message.content}" for message in content))
            error.add_note(f"while working on prompt {self._prompt.index}: {text if len(text) <= 200 else text[:200] + '...'}")


async def score_generated_group(group: Group, reward_fn: Callable[[Sample], Any] | None, reward: RewardConfig) -> Group | None:
    """Score a group that generate_fn returned, if it is finished; an unfinished one stays as it is.

    Returns: None if a sample has FAILED, or its reward has and reward.on_error is "drop".
    Raises: RewardError as score_group does.
    """
    if any(sample.status is Status.FAILED for sample in group):
        return None
    return group if reward_fn is None or not is_finished(group) else await score_group(group, reward_fn, reward)
