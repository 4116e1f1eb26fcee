"""Reward functions written for TRL or verl, as rewards of samples; --reward.function takes them as they are.

    def is_right(completions, answer, **kwargs):                        # TRL: lists, one entry for each completion
        return [float(truth in completion) for completion, truth in zip(completions, answer)]

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):          # verl: one answer
        return float(ground_truth in solution_str)

A parameter with another name gets the metadata of the samples, that is, the other columns of the rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rollouts.data.samples import collect_reward_data, describe_sample, find_response_start
from rollouts.errors import ConfigError, RewardError
from rollouts.outcomes import MetricResult
from rollouts.rewards.results import EvaluateResult, as_result, check_values, describe_reward, name_reward, then
from rollouts.rewards.reward_functions import RewardFunction
from rollouts.types import Sample

_TRL = "completions"  # parameter that every reward function of TRL has
_VERL = "solution_str"  # parameter that every reward function of verl has
_GIVEN_TRL = frozenset({"prompts", "completions", "completion_ids"})
_GIVEN_VERL = frozenset({"data_source", "solution_str", "extra_info"})
_TEXTS = ("response", "completion", "text", "output", "solution", "answer", "prompt")  # names of one argument that is not a Sample
_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")  # objects of TRL's trainer
_DECORATE = "put the decorator @reward_function (from rollouts import reward_function) on it"


@dataclass(frozen=True, eq=False)
class CompletionsReward:
    """A reward function of TRL: called once for a group, with keyword lists that have one entry for each sample."""

    function: Callable[..., Any]
    reward_name: str  # for messages

    def __call__(self, sample: Sample) -> Any:
        """Return the result of one sample, as a group of one."""
        return then(self.score_samples((sample,)), lambda results: results[0])

    def score_samples(self, samples: Sequence[Sample]) -> Any:
        """Return a list with an EvaluateResult per sample; for an async function an awaitable of it.

        The function gets prompts and completions (texts; lists of messages as dicts where the prompt is a conversation), completion_ids
        (tokens of the responses), and a list of each key of the metadata. None in its list means that it does not judge that sample.

        Raises: RewardError if the function needs a column that no sample has, or returns another number of results.
        """
        rows = [collect_reward_data(sample) for sample in samples]
        columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
        columns["prompts"] = [_show_prompt(sample) for sample in samples]
        columns["completions"] = [_show_completion(sample) for sample in samples]
        columns["completion_ids"] = [list(sample.tokens[find_response_start(sample) :]) for sample in samples]
        arguments = _select(self.function, columns, self.reward_name, describe_sample(samples[0]))

        def check(values: Any) -> list[EvaluateResult]:
            values = values.tolist() if hasattr(values, "tolist") else values  # a tensor or an array
            name = name_reward(self)
            found = check_values(values, len(samples), name)
            return [_check_one(value, name, samples[k]) for k, value in enumerate(found)]

        return then(self.function(**arguments), check)


def _check_one(value: Any, name: str, sample: Sample) -> EvaluateResult:
    if value is None:
        return replace(EvaluateResult.from_error("it returned None, which says that it does not judge this sample"), abstains=True)
    try:
        return as_result(value, name, describe_sample(sample))
    except RewardError as error:
        return EvaluateResult.from_error(str(error))


@dataclass(frozen=True, eq=False)
class SolutionReward:
    """A reward function of verl: called for one sample with data_source, solution_str, ground_truth and extra_info."""

    function: Callable[..., Any]
    reward_name: str  # for messages

    def __call__(self, sample: Sample) -> Any:
        """Return the EvaluateResult of a sample; for an async function an awaitable of it.

        solution_str is the response, ground_truth the metadata of that name, data_source and extra_info the metadata of these names or
        "" and all metadata. In a dict, "score" is the reward and other numbers are metrics.

        Raises: RewardError if the function needs metadata that the sample lacks, or returns neither a number nor a dict with "score".
        """
        row = collect_reward_data(sample)
        given = {"data_source": "", "extra_info": dict(sample.metadata), **row, _VERL: sample.response}
        where = describe_sample(sample)
        arguments = _select(self.function, given, self.reward_name, where)
        return then(self.function(**arguments), functools.partial(self._read, where=where))

    def _read(self, value: Any, *, where: str) -> EvaluateResult:
        if not isinstance(value, Mapping):
            return as_result(value, name_reward(self), where)
        found = cast("Mapping[str, Any]", value)
        if "score" not in found:
            raise RewardError(
                f"reward function {name_reward(self)} returned a dict without 'score' for {where}: it has {sorted(map(str, found))}; add "
                "'score', a number"
            )
        score = as_result(found["score"], name_reward(self), where).score
        numbers = {name: float(v) for name, v in found.items() if name != "score" and isinstance(v, (int, float))}
        return EvaluateResult(score, metrics={name: MetricResult(number) for name, number in numbers.items()})


def adapt_reward(function: Any) -> Any:
    """Return a function as a reward of samples: one of TRL or verl in its adapter, any other reward as it is.

    Raises: ConfigError for a function of AReaL, of several required arguments, or of messages without @reward_function, saying what to do.
    """
    if inspect.isclass(function) and not hasattr(function, "score_samples"):
        raise ConfigError(f"reward function {function.__name__} is a class: name a function, or an object of the class")
    parameters = _read_parameters(function)
    if parameters is None:
        return function
    name = describe_reward(function)
    if _TRL in parameters and {"prompt", "prompt_ids"} & set(parameters):
        raise ConfigError(
            f"reward function {name} has the parameters of AReaL, whose {_TRL} is one text: in code, adapt_reward_fn(function, "
            "tokenizer) of rollouts.generation.workflows makes a reward of it; for --reward.function, write it as a function of a Sample"
        )
    if _TRL in parameters:
        return CompletionsReward(_refuse_trainer(function, name), name)
    if _VERL in parameters:
        return SolutionReward(function, name)
    if not inspect.isfunction(function):
        return function
    if not parameters:
        raise ConfigError(f"reward function {name} takes no arguments, expected one, a Sample: write def {function.__name__}(sample)")
    required = [parameter for parameter in parameters if parameter in _list_required(function)]
    if len(required) == 1 and required[0] in _TEXTS:
        raise ConfigError(
            f"reward function {name} takes {required[0]}, but a function of one argument is given a Sample: write it as a function of a "
            f"sample, whose text is sample.response and whose row is sample.metadata, or with TRL's parameter {_TRL}, a list of texts"
        )
    if required and (required[0] in ("messages", "conversations") or len(required) > 1):
        raise ConfigError(
            f"reward function {name} takes {', '.join(required)}, expected one argument, a Sample. If it judges a conversation, "
            f"{_DECORATE}; functions of TRL have the parameter {_TRL}, those of verl {_VERL}"
        )
    return function


def _read_parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function, or of a callable object or partial that takes those of TRL or verl; None for other rewards."""
    if inspect.isfunction(function):
        return inspect.signature(function).parameters
    if not callable(function) or hasattr(function, "score_samples"):
        return None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return parameters if {_TRL, _VERL} & set(parameters) else None


def find_needed_columns(reward: Any) -> frozenset[str]:
    """Return the columns of the rows without which a reward cannot be called: its parameters without default that nothing else gives."""
    if isinstance(reward, CompletionsReward | SolutionReward):
        given = _GIVEN_TRL if isinstance(reward, CompletionsReward) else _GIVEN_VERL
        return _list_required(reward.function) - given
    return reward.needed_columns if isinstance(reward, RewardFunction) else frozenset()


def _refuse_trainer(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function of TRL. Raises ConfigError if it cannot be called without objects of TRL's trainer."""
    parameters = inspect.signature(function).parameters
    needed = [key for key in _TRAINER if key in parameters and parameters[key].default is inspect.Parameter.empty]
    if needed:
        raise ConfigError(
            f"reward function {name} needs {', '.join(needed)} of TRL's trainer, which does not run here: give the parameter a default"
        )
    return function


def _select(function: Callable[..., Any], given: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the arguments that a function takes. Raises RewardError if one that it needs is not given."""
    parameters = inspect.signature(function).parameters
    missing = sorted(_list_required(function) - set(given))
    if missing:
        raise RewardError(
            f"reward function {name} needs {missing}, but the row of {where} has {sorted(given)}: add the columns, or give the parameters "
            "defaults"
        )
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {key: value for key, value in given.items() if takes_all or key in parameters}


def _list_required(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters without default."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind not in several and p.default is inspect.Parameter.empty)


def _show_prompt(sample: Sample) -> Any:
    """Return the prompt as TRL has it: a text, or messages as dicts."""
    return sample.prompt if isinstance(sample.prompt, str) else [message.to_dict() for message in sample.prompt]


def _show_completion(sample: Sample) -> Any:
    """Return the answer as TRL has it: a text, or the messages after the prompt as dicts."""
    if isinstance(sample.prompt, str) and sample.messages is None:
        return sample.response
    if sample.messages is None:
        return [{"role": "assistant", "content": sample.response}]
    begun = 1 if isinstance(sample.prompt, str) else len(sample.prompt)
    return [message.to_dict() for message in sample.messages[begun:]]
