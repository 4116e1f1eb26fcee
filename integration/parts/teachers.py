"""The teacher of a run's distillation: made of frozen models, of servers that score tokens, or of the policy itself with a context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING

from integration.parts.engines import raise_open_file_limit
from integration.run.evaluation import template_kwargs
from integration.settings.config import Config
from integration.tasks.task import Task
from rollouts.backends.protocol import TrainingBackend
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError, DataError
from rollouts.training.distillation.context import TeacherContext, find_context_fields
from rollouts.training.distillation.teachers import EngineTeacher, ModelTeacher, Teacher, TeacherByColumn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECKED_PROMPTS = 20_000  # most prompts whose fields are looked at before a run


@asynccontextmanager
async def open_teacher(
    config: Config, models: Mapping[str, TrainingBackend], policy: TrainingBackend, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> AsyncGenerator[Teacher | None]:
    """Open the teacher that the settings name, for the length of the block; None if they name none.

    Args:
        models: backends of the teachers that are models of this run, by name; "" = the only one.
        policy: the policy's pipeline, which is the teacher itself where a context alone is given.
        tokenizer: the policy's.
        vocab_size: tokens of the policy; a server of another vocabulary is refused.

    Raises: EngineError for a server that does not answer, or has another vocabulary.
    """
    section = config.teacher
    context: TeacherContext | None = None
    if section.context is not None:
        context = TeacherContext(template=section.context, tokenizer=tokenizer, template_kwargs=template_kwargs(config))
    async with AsyncExitStack() as stack:
        create = {"vllm": VLLMEngine, "sglang": SGLangEngine}[section.kind]

        async def open_servers(*urls: str) -> EngineTeacher:
            raise_open_file_limit()
            engines = [await stack.enter_async_context(create(url, vocab_size=vocab_size, allow_cast=True)) for url in urls]
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


def check_teacher_fields(config: Config, task: Task) -> None:
    """Raise DataError for the first prompt that lacks a field which the teacher reads, or names a teacher that is not there.

    Raises: ConfigError for a context with the feedback of a reward that the task does not have.
    """
    section, prompts, sources = config.teacher, task.train_prompts, task.train_sources
    is_scored = config.reward.model is not None or (task.reward_fn is not None and task.scores_training)
    if section.context is not None and "{feedback}" in section.context and not is_scored:
        raise ConfigError(
            f"teacher.context is {section.context!r}, but answers in training get no reward, whose reason {{feedback}} is: give rows right "
            "answers or --reward.function, or leave {feedback} out"
        )
    needed = set(find_context_fields(section.context)) if section.context is not None else set[str]()
    known = {*section.models, *section.servers}
    if not needed and section.by is None:
        return
    for i, prompt in enumerate(islice(prompts, _CHECKED_PROMPTS)):
        place = sources[i] if i < len(sources) else f"prompt {prompt.index}"
        known_fields = [name for name, value in dict(prompt.metadata).items() if value is not None]
        if missing := sorted(needed.difference(known_fields)):
            raise DataError(
                f"{place} has no field {missing[0]!r}, or it is null, which teacher.context names; it has "
                f"{', '.join(map(str, known_fields)) or 'none'}"
            )
        own = dict(prompt.metadata).get(section.by or "")
        if section.by is not None and str(own) not in known:
            raise DataError(
                f"{place} has {section.by} = {own!r}, for which teacher.each names no teacher: it names {', '.join(sorted(known))}"
            )
