"""The teacher of a run's distillation: made of frozen models, of servers that score tokens, or of the policy itself with a context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from integration.parts.engines import create_server_engine, read_api_key
from integration.parts.model_settings import read_model_config
from integration.run.evaluation import template_kwargs
from integration.settings.config import Config
from integration.settings.made.budgets import response_tokens
from integration.settings.sections.engine import EngineSection
from integration.tasks.task import Task
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.model_limits import read_config_limits
from rollouts.engines.http.checks import AtLeast
from rollouts.errors import ConfigError, DataError
from rollouts.training.distillation.context import TeacherContext, find_context_fields
from rollouts.training.distillation.teachers import EngineTeacher, ModelTeacher, Teacher, TeacherByColumn
from rollouts.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECKED_PROMPTS = 20_000  # most prompts whose fields are looked at before a run


@asynccontextmanager
async def open_teacher(
    config: Config,
    models: Mapping[str, TrainingBackend],
    policy: TrainingBackend,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    environment: Mapping[str, str],
) -> AsyncGenerator[Teacher | None]:
    """Open the teacher that the settings name, for the length of the block; None if they name none.

    Args:
        models: backends of the teachers that are models of this run, by name; "" = the only one.
        policy: the policy's pipeline, which is the teacher itself where a context alone is given.
        tokenizer: the policy's.
        vocab_size: tokens of the policy; a server of a smaller vocabulary is refused.
        environment: environment variables, with the API key of servers.

    Raises: EngineError for a server that does not answer, or has a smaller vocabulary; ConfigError without the API key.
    """
    section = config.teacher
    context = _create_context(config, tokenizer)
    async with AsyncExitStack() as stack:

        async def open_servers(*urls: str) -> EngineTeacher:
            settings, key = create_server_section(config, urls), read_api_key("teacher", section.api_key_variable, environment)
            options = {"vocab_size": AtLeast(vocab_size), "api_key": key}
            engines = [await stack.enter_async_context(create_server_engine(settings, url, environment, **options)) for url in urls]
            return EngineTeacher(engines=tuple(engines))

        if section.url:
            yield await open_servers(*section.url)
        elif section.by is not None:
            teachers: dict[str, Teacher] = {name: ModelTeacher(backend=backend, context=context) for name, backend in models.items()}
            teachers |= {name: await open_servers(url) for name, url in section.servers.items()}
            yield TeacherByColumn(column=section.by, teachers=teachers)
        elif models:
            yield ModelTeacher(backend=models[""], context=context)
        else:
            yield None if context is None else ModelTeacher(backend=policy, context=context)


def _create_context(config: Config, tokenizer: PreTrainedTokenizerBase) -> TeacherContext | None:
    template = config.teacher.context
    return None if template is None else TeacherContext(template=template, tokenizer=tokenizer, template_kwargs=template_kwargs(config))


def _find_limit(config: Config) -> int | None:
    """Return the most tokens that all models which read the context take; None = no limit."""
    paths = [Path(path) for path in config.teacher.models.values()] or [None]
    limits = [read_config_limits(read_model_config(config, path)).context_length for path in paths]
    return min((limit for limit in limits if limit is not None), default=None)


def create_server_section(config: Config, urls: Sequence[str]) -> EngineSection:
    """Return the settings of the servers of a teacher: deadlines and mount points are those of the run's engine."""
    waits = {name: getattr(config.engine, name) for name in ("generate_timeout_s", "deadlines")}
    paths = config.engine.path_map if config.engine.weight_sync == "disk" else ()
    return EngineSection(kind=config.teacher.kind, urls=tuple(urls), weight_sync="disk", path_map=paths, **waits)


def check_teacher_fields(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase, environment: Mapping[str, str]) -> None:
    """Raise DataError for the first prompt that lacks a field which the teacher reads, or names a teacher that is not there.

    A prompt is refused, too, if the teacher's model cannot read it with its context and the longest response.

    Raises: ConfigError for a context with the feedback of a reward that the task does not have, and for a missing API key.
    """
    read_api_key("teacher", config.teacher.api_key_variable, environment)
    section, prompts, sources = config.teacher, task.train_prompts, task.train_sources
    is_scored = config.reward.model is not None or (task.reward_fn is not None and task.scores_training)
    if section.context is not None and "{feedback}" in section.context and not is_scored:
        raise ConfigError(
            f"teacher.context is {section.context!r}, but answers in training get no reward, whose reason {{feedback}} is: give rows right "
            "answers or --reward.function, or leave {feedback} out"
        )
    needed = set(find_context_fields(section.context)) if section.context is not None else set[str]()
    known = {*section.models, *section.servers}
    if section.context is None and section.by is None:
        return
    context, limit = _create_context(config, tokenizer), _find_limit(config)
    for i, prompt in enumerate(islice(prompts, _CHECKED_PROMPTS)):
        place = sources[i] if i < len(sources) else f"prompt {prompt.index}"
        known_fields = [name for name, value in dict(prompt.metadata).items() if value is not None]
        if missing := sorted(needed.difference(known_fields)):
            raise DataError(
                f"{place} has no field {missing[0]!r}, or it is null, which teacher.context names; it has "
                f"{', '.join(map(str, known_fields)) or 'none'}"
            )
        if context is not None and limit is not None:
            sample = Sample(prompt=prompt.content, metadata=prompt.metadata)
            length, longest = len(tokenize_prompt(tokenizer, context.describe(sample), **context.template_kwargs)), response_tokens(config)
            if length + longest > limit:
                raise DataError(
                    f"{place} has {length} tokens with teacher.context, and {longest} more with the longest response, but the teacher's "
                    f"model reads {limit}: shorten teacher.context or --generation.max-tokens"
                )
        own = dict(prompt.metadata).get(section.by or "")
        if section.by is not None and str(own) not in known:
            raise DataError(
                f"{place} has {section.by} = {own!r}, for which teacher.each names no teacher: it names {', '.join(sorted(known))}"
            )
