"""The course of an evaluation: checks before the first write, then model by model and task by task, prompt by prompt."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration.eval.problems import (
    Answer,
    Problem,
    check_judges_alone,
    choose_answer,
    create_problem_task,
    find_prompts,
    parse_problems,
)
from integration.eval.records import Records, describe_group
from integration.eval.subjects import (
    Subject,
    check_subject,
    check_tokenizer_option,
    find_subject,
    fit_config,
    load_subject_tokenizer,
    open_subject,
)
from integration.eval.summary import choose_ks, compare, summarize
from integration.parts.rewards import open_task
from integration.run.evaluation import evaluate_episode_group, sampling_params, template_kwargs
from integration.settings.made.library import reward_config
from integration.tasks.task import Task
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.checks import parse_json
from rollouts.config_files import to_dict
from rollouts.data.samples import describe_sample
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, DataError, locate_error, raise_single_errors
from rollouts.generation.contract import note_prompt
from rollouts.generation.evaluation import EVALUATION_PREFIX
from rollouts.generation.single_turn import GroupSettings, generate_group
from rollouts.output_files import explain_writes, replace_file
from rollouts.rewards.evaluate import score_group
from rollouts.training.saving.run_lock import lock_run_directory
from rollouts.types import Group, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from integration.eval.__main__ import Arguments

SETTINGS_FILE, RESULTS_FILE = "settings.json", "results.jsonl"
MOST_PROMPTS = 1024  # prompts under way at the same time
_READ = ("task", "seed", "data", "generation", "episode", "environment", "reward", "evaluation")  # settings that decide the samples


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One model on one task."""

    subject: Subject
    problem: Problem
    task: Task
    answer: Answer
    file: str  # name of the file of its samples


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An evaluation whose parts have been found and checked."""

    arguments: Arguments
    units: Mapping[str, tuple[Unit, ...]]  # by name of the model, in the order of the command line
    tokenizers: Mapping[str, PreTrainedTokenizerBase]

    @property
    def is_greedy(self) -> bool:
        """Whether each problem gets one greedy answer."""
        return self.arguments.n == 1 and not self.arguments.sampled

    def describe(self) -> dict[str, Any]:
        """Return what must not change while the evaluation is resumed, as JSON values."""
        units = [unit for group in self.units.values() for unit in group]
        settings = [{"task": u.problem.label, **{k: v for k, v in to_dict(u.problem.config).items() if k in _READ}} for u in units]
        given = {name: getattr(self.arguments, name) for name in ("n", "sampled", "threshold", "answer")}
        subjects = {name: group[0].subject.describe() for name, group in self.units.items()}
        return json.loads(json.dumps({**given, "models": subjects, "tasks": settings}))


def create_plan(models: Sequence[str], arguments: Arguments, *, has_task: bool = True) -> Plan:
    """Find models and tasks, and check them. Writes nothing.

    Args:
        has_task: whether the options or the run of a model say on what to evaluate.

    Raises: ConfigError, DataError naming models and tasks as typed.
    """
    agent = arguments.config.agent
    if agent.is_used:
        name = "command" if agent.command is not None else "function"
        raise ConfigError(
            f"agent.{name} is {getattr(agent, name)!r}, but an evaluation lets the model answer by itself and starts no program: read "
            f"eval_accuracy in metrics.jsonl of the run, or give --agent.{name} None to judge plain answers"
        )
    environment = dict(os.environ)
    units: dict[str, tuple[Unit, ...]] = {}
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    check_tokenizer_option(models, arguments.tokenizer)
    for model in models:
        subject = find_subject(model, arguments.config, arguments.tokenizer)
        config = fit_config(arguments.config, subject)
        tokenizer = tokenizers[model] = load_subject_tokenizer(config, subject)
        if not has_task:
            raise ConfigError(
                f"{model} is not of a run, and no task is named: give --tasks with a data file (--tasks rows.jsonl --reward.function "
                f"FILE.py:f), gsm8k=FILE.jsonl, hf://ORG/NAME, FILE.py:NAME of an environment, or the built-in {arguments.config.task}"
            )
        found: list[Unit] = []
        for problem in parse_problems(arguments.tasks, config, arguments.num_prompts):
            task = create_problem_task(problem, tokenizer)
            file = _name_file(f"{len(units) + 1}-{_slug(model)}", problem.label, [unit.file for unit in found])
            answer = choose_answer(task, arguments.answer)
            found.append(Unit(subject=subject, problem=problem, task=task, answer=answer, file=file))
        trio.run(check_subject, config, subject, environment)
        units[model] = tuple(found)
    return Plan(arguments=arguments, units=units, tokenizers=tokenizers)


def _name_file(model: str, label: str, taken: Sequence[str]) -> str:
    """Return a name for the samples of a task that no other task of the model has: labels may differ in what a name cannot show."""
    name = f"{model}.{_slug(label)}.jsonl"
    return name if name not in taken else f"{model}.{len(taken) + 1}-{_slug(label)}.jsonl"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text.removeprefix("http://").removeprefix("https://")).strip("._")[-60:] or "model"


async def evaluate_all(plan: Plan, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Do what the directory does not have yet, and return the results, which are written there as well.

    Raises: ConfigError if the directory has another evaluation; the errors of engines, environments and rewards.
    """
    with lock_run_directory(directory):
        _open_directory(directory, plan.describe())
        groups: dict[tuple[str, str], Mapping[int, Any]] = {}
        for model, units in plan.units.items():
            stores = {unit.problem.label: Records(directory / unit.file, plan.arguments.n) for unit in units}
            await _evaluate_model(plan, units, stores, say)
            groups |= {(model, label): records.groups for label, records in stores.items()}
        results = _summarize(plan, groups)
        replace_file(directory / RESULTS_FILE, "".join(json.dumps(line) + "\n" for line in (*results["results"], *results["comparisons"])))
        return results


def _open_directory(directory: Path, settings: dict[str, Any]) -> None:
    path = directory / SETTINGS_FILE
    if not path.exists():
        replace_file(path, json.dumps(settings, indent=1) + "\n")
        return
    with explain_writes(path):
        try:
            before = parse_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is damaged ({error}): choose another --output-dir") from error
    if before != settings:
        names = [name for name in settings if before.get(name) != settings[name]]
        raise ConfigError(
            f"{directory} has an evaluation with other settings ({', '.join(names)} differ): choose another --output-dir, or give the same "
            "command to go on with it"
        )


async def _evaluate_model(plan: Plan, units: Sequence[Unit], stores: Mapping[str, Records], say: Callable[[str], None]) -> None:
    left = [unit for unit in units if len(stores[unit.problem.label].groups) < len(unit.task.heldout_prompts)]
    if left:
        tokenizer = plan.tokenizers[units[0].subject.name]
        async with open_subject(left[0].problem.config, left[0].subject, tokenizer, dict(os.environ)) as engine:
            for unit in left:
                async with open_task(unit.task) as task:
                    check_judges_alone(unit.problem.label, task.reward_fn)
                    await _evaluate_unit(plan, replace(unit, task=task), engine, stores[unit.problem.label], say)
    for records in stores.values():
        records.finish()


async def _evaluate_unit(plan: Plan, unit: Unit, engine: InferenceEngine, records: Records, say: Callable[[str], None]) -> None:
    prompts = [prompt for prompt in find_prompts(unit.task) if prompt.index not in records.groups]
    done, total = len(records.groups), len(unit.task.heldout_prompts)
    say(f"{unit.subject.name} on {unit.problem.label}: {total} problems" + (f", {done} of them done before" if done else ""))
    limit, tokenizer = trio.CapacityLimiter(MOST_PROMPTS), plan.tokenizers[unit.subject.name]
    n, threshold, told = plan.arguments.n, plan.arguments.threshold, 10 * done // total
    params = sampling_params(unit.problem.config, unit.task)
    params = params.new(greedy=True) if plan.is_greedy else params

    async def evaluate(prompt: Prompt) -> None:
        async with limit:
            group = await _generate(unit, engine, tokenizer, prompt, n, params)
        answers = [] if group is None else [_ask(unit.answer, sample) for sample in group]
        found = describe_group(prompt.index, group, n, threshold=threshold, answers=answers)
        records.add(prompt.index, found)
        nonlocal told
        if 10 * len(records.groups) // total > told:
            told = 10 * len(records.groups) // total
            say(f"  {len(records.groups)}/{total}")

    with raise_single_errors():
        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(evaluate, prompt)


def _ask(answer: Answer, sample: Sample) -> str | None:
    try:
        found: object = answer(sample)
    except (Exception, SystemExit) as error:  # the function is the user's
        raise DataError(
            f"--answer failed on {describe_sample(sample)}: {type(error).__name__}: {error} ({locate_error(error)}): repair it; the same "
            "command goes on behind what is finished"
        ) from error
    if inspect.iscoroutine(found):
        found.close()
        raise DataError("--answer names an async function: give a plain one, which returns a text or None")
    return None if found is None else str(found)


async def _generate(
    unit: Unit, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, n: int, params: SamplingParams
) -> Group | None:
    """Return the scored samples of a prompt, the same ones as in evaluations of a run; None if it was dropped."""
    config, task = unit.problem.config, unit.task
    reward = reward_config(config)
    if task.episodes is not None:
        policy = EngineAgentPolicy(engine, tokenizer, params)
        return await evaluate_episode_group(policy, task.episodes, prompt, n, task.reward_fn, reward=reward)
    assert task.reward_fn is not None, "create_problem_task checks that there is a reward"
    settings = GroupSettings(seed=config.seed, template_kwargs=template_kwargs(config), id_prefix=EVALUATION_PREFIX)
    with note_prompt(prompt):
        return await score_group(await generate_group(engine, tokenizer, prompt, n, params, settings), task.reward_fn, reward)


def _summarize(plan: Plan, groups: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    models, ks = list(plan.units), choose_ks(plan.arguments.n, plan.arguments.k)
    labels = [unit.problem.label for unit in plan.units[models[0]]]
    found = [summarize(model, label, groups[model, label], ks) for label in labels for model in models]
    comparisons: list[dict[str, Any]] = []
    for label in labels:
        graded = any(r["reward"] not in (0.0, 1.0) for model in models for g in groups[model, label].values() for r in g if "reward" in r)
        for model in models[1:]:
            for key in ("right", "reward") if graded else ("right",):
                one = compare(label, (models[0], groups[models[0], label]), (model, groups[model, label]), key=key)
                comparisons += [] if one is None else [one]
    return {"results": found, "comparisons": comparisons}
