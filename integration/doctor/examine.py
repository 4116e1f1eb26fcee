"""The examination of a run before it starts: its model, tokenizer, template, data, reward and engine, as the run itself would make them."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from integration.doctor.companions import check_other_tokens, check_scores, check_teacher
from integration.doctor.findings import Finding, judge, skip
from integration.doctor.heads import check_critic
from integration.doctor.numbers import (
    check_engine,
    check_loss,
    check_repeats,
    check_splits,
    check_sync,
    check_trainer,
    choose_prompts,
    choose_rows,
    create_reference,
    find_window,
)
from integration.doctor.rewards import check_reward, read_text
from integration.doctor.texts import (
    check_end,
    check_masks,
    check_pairs,
    check_refused,
    check_template,
    check_tokenizer,
    encode_text,
    refuse_model,
)
from integration.dry_run.checks import check_data_given
from integration.dry_run.describe import derive_numbers
from integration.parts.engines import open_engines
from integration.parts.hub_models import find_models
from integration.parts.model_settings import find_directory, read_model_config
from integration.parts.models import create_backend, create_companions, create_model, open_companions
from integration.parts.rewards import open_task, open_training_reward
from integration.parts.teachers import check_teacher_fields, open_teacher
from integration.run.evaluation import template_kwargs
from integration.run.stages import create_task, create_task_generate_fn
from integration.settings.command_line import CommandLine
from integration.settings.config import Config
from integration.settings.made.library import count_critic_updates, reward_config
from integration.tasks.task import Task
from rollouts.backends.fsdp.config import FSDPConfig
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.chat.tokenize import tokenize_prompt
from rollouts.data.collate import collate_samples
from rollouts.data.model_limits import read_config_limits
from rollouts.data.preference_pairs import PreferencePair
from rollouts.engines.inprocess.engine import find_eos_ids
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, DataError, RolloutsError, flatten_errors
from rollouts.generation.contract import score_generated_group
from rollouts.models.loading import check_model_directory, parse_device
from rollouts.training.distillation.teachers import TEACHER_COLUMNS
from rollouts.training.rollout_batch import select_log_probs
from rollouts.training.steps import submit_forward
from rollouts.types import Group, Message, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollouts.backends.pytorch.backend import PyTorchTrainingBackend

Say = Callable[[str], None]

_NUM_ANSWERED = 4  # prompts whose answers a teacher judges


@dataclass(frozen=True, kw_only=True, eq=False)
class Patient:
    """The parts of a run that is examined."""

    config: Config
    mode: str
    tokenizer: PreTrainedTokenizerBase
    model: Any  # as loaded
    task: Task
    rows: tuple[tuple[int, ...], ...]  # tokens of some of the user's rows: conversations, else recorded rollouts, else prompts
    fits: bool = True  # whether the models beside the policy have its tokens

    @property
    def needs(self) -> frozenset[str]:
        """Columns that models beside the policy fill and that can be examined."""
        return self.config.algorithm.requires if "rl" in self.mode and self.fits else frozenset()

    @property
    def precision(self) -> str:
        """The least precise dtype of trainer and engine, which bounds their agreement."""
        used = {str(self.config.backend.precision(self.config.model.device)), str(self.config.engine.precision(self.config.model.device))}
        return next((name for name in ("bfloat16", "float16") if name in used), "float32")


async def examine(command: CommandLine, *, num_rows: int, directory: Path, say: Say) -> list[Finding]:
    """Run all checks but that of resuming. Returns their findings, in the order of the table.

    Args:
        num_rows: rows of data and prompts to try.
        directory: a temporary one, for files of servers.
        say: is told what is being checked.
    """
    findings: list[Finding] = []
    check_data_given(command.config, command.mode)
    command = replace(command, config=find_models(command.config, quiet=True)[1])
    config, is_sharded = command.config, command.config.backend.kind == "fsdp"
    if is_sharded:
        config = replace(config, backend=replace(config.backend, kind="pytorch", num_processes=None, fsdp=FSDPConfig()))
    say("loading the model and the data")
    if config.model.path is not None:
        check_model_directory(config.model.path)  # a path that is none is a mistake in the options, as is a device
    parse_device(config.model.device)
    try:
        model, tokenizer = create_model(config)
    except ConfigError as error:
        return [refuse_model(error)]
    try:
        task = create_task(config, tokenizer, command.mode)
        if task.demonstrate is not None and "sft" in command.mode:
            task = replace(task, sft_samples=(*task.sft_samples, *await task.demonstrate(say)))
        samples = [*(task.sft_samples[:num_rows] if "sft" in command.mode else ()), *take_answers(task.preferences, num_rows)]
        prompts = (task.train_prompts or task.heldout_prompts)[:num_rows]
        recorded = [sample.tokens for group in (() if task.recorded is None else task.recorded.groups) for sample in group][:num_rows]
        rows = tuple(sample.tokens for sample in samples) or tuple(recorded)
        rows = rows or tuple(tokenize_prompt(tokenizer, prompt.content) for prompt in prompts)
    except DataError as error:
        return check_refused(error, tokenizer, dict(template_kwargs(config)))
    patient = Patient(config=config, mode=command.mode, tokenizer=tokenizer, model=model, task=task, rows=rows)
    say("texts: tokenizer, chat template, loss masks")
    findings += check_texts(patient, samples, num_rows)
    if "dpo" in command.mode:
        findings.append(check_pairs(task.preferences))
    if "rl" in command.mode:
        say("rewards")
        async with open_task(task) as opened:
            encode = partial(encode_text, tokenizer)
            findings += await attempt("reward", lambda: check_reward(opened.reward_fn, prompts, encode, config=reward_config(config)))
        tokens = check_other_tokens(config)
        findings += [] if tokens is None else [tokens]
        patient = replace(patient, fits=tokens is None or tokens.status == "pass")
    num_embeddings = read_config_limits(model.config).num_embeddings
    if max((token for row in rows for token in row), default=0) < num_embeddings:
        findings += await check_numbers(patient, samples, directory, say)
    else:  # the check of the tokenizer has failed
        findings.append(skip("log-probs", f"the model has {num_embeddings} embeddings and cannot read the tokens of the data"))
    if is_sharded:
        findings.append(skip("several processes", "the numbers above are those of one process; docs/distributed.md compares them"))
    return [*findings, check_memory(command)]


def take_answers(preferences: Sequence[PreferencePair | Sample], num_rows: int) -> list[Sample]:
    """Return the answers of the first num_rows preferences: both of a pair, or the labelled one."""
    some = preferences[:num_rows]
    return [answer for row in some for answer in ((row.chosen, row.rejected) if isinstance(row, PreferencePair) else (row,))]


def check_texts(patient: Patient, samples: Sequence[Sample], num_rows: int) -> list[Finding]:
    """Check tokenizer, template, masks and ends of the rows."""
    task, tokenizer = patient.task, patient.tokenizer
    limits = read_config_limits(patient.model.config)
    texts = [text for prompt in task.train_prompts[:num_rows] if (text := read_text(prompt)).strip()]
    texts += [sample.response for sample in samples if sample.response.strip()]
    several = task.episodes is not None or any(count_answers(sample) > 1 for sample in samples)
    return [
        check_tokenizer(tokenizer, limits.num_embeddings, texts),
        check_template(tokenizer, several_turns=several, template_kwargs=dict(template_kwargs(patient.config))),
        check_masks(tokenizer, samples),
        check_end(tokenizer, samples, frozenset(find_eos_ids(patient.model, tokenizer))),
    ]


def load_reference(config: Config, model: Any) -> Any:
    """Load the policy once more, see load_plainly; the built-in model, which has no directory, is copied."""
    path = find_directory(config, None)
    return copy.deepcopy(model).eval() if path is None else load_plainly(config, path)


def load_plainly(config: Config, path: Path) -> Any:
    """Load a model by transformers alone, in float32 with its eager attention."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(path, dtype="float32", attn_implementation="eager", **options).eval()


async def check_numbers(patient: Patient, samples: Sequence[Sample], directory: Path, say: Say) -> list[Finding]:
    """Check trainer, engine and their agreement, with the weights that the run starts from."""
    config, window = patient.config, find_window(patient.model.config)
    limits = read_config_limits(patient.model.config)
    say("the forward pass of transformers")
    reference = create_reference(load_reference(config, patient.model))
    rows = choose_rows(patient.rows, window=window, context=limits.context_length, vocab_size=limits.num_embeddings)
    loss = partial(check_loss, reference, patient.rows, vocab_size=limits.num_embeddings, is_pretrained=config.model.path is not None)
    compare: dict[str, Any] = {"precision": patient.precision, "window": window}
    findings = await attempt("loss on the data", loss)
    stage = config.rl if "rl" in patient.mode else config.preference if "dpo" in patient.mode else config.sft
    try:
        backend = create_backend(config, patient.model, patient.tokenizer, stage.optimizer, 100)
    except ConfigError as error:
        return [*findings, refuse_model(error)]
    room = min((length for length in (limits.context_length, config.engine.context_length) if length is not None), default=None)
    prompts = choose_prompts(patient.rows, rows[-1].tokens, context=room)
    async with open_pipeline(backend) as trainer:
        say("trainer against transformers")
        findings += await attempt("trainer log-probs", partial(check_trainer, trainer, reference, rows, **compare))
        findings += await attempt("log-probs repeat", partial(check_repeats, trainer, rows))
        if "rl" in patient.mode and prompts and patient.task.recorded is None:
            say("engine against trainer")
            findings += await attempt("engine log-probs", partial(_check_engines, patient, trainer, prompts, directory, say))
        if "values" in patient.needs:
            findings += await attempt("critic", partial(examine_critic, patient, trainer, rows, say))
        if patient.needs & frozenset(TEACHER_COLUMNS) and patient.task.recorded is not None:
            findings += await attempt("teacher", partial(examine_teacher, patient, trainer, (), say))
        findings += await attempt("splits change nothing", partial(check_splits, trainer, rows, precision=patient.precision))
        findings += await attempt("speed of the trainer", partial(measure_speed, trainer, rows, config, patient.mode))
    return findings


async def _check_engines(
    patient: Patient, trainer: TrainingBackend, prompts: Sequence[Sequence[int]], directory: Path, say: Say
) -> list[Finding]:
    config = patient.config
    source, environment = find_directory(config, None), dict(os.environ)  # servers get it, and it has their key
    async with open_engines(
        config, patient.model, patient.tokenizer, directory, source=source, environment=environment, say=say
    ) as engines:
        engine: InferenceEngine = engines[0]
        temperature = config.generation.temperature
        findings = await check_engine(engine, trainer, prompts, precision=patient.precision, temperature=temperature)
        findings.append(await check_sync(engine, trainer, prompts, precision=patient.precision))
        if patient.needs & frozenset(TEACHER_COLUMNS):
            findings += await attempt("teacher", partial(examine_teacher, patient, trainer, engines, say))
        return findings


async def examine_critic(patient: Patient, trainer: TrainingBackend, rows: Sequence[Sample], say: Say) -> Finding:
    """Make the critic as the run does, and check it."""
    say("the critic")
    config = patient.config
    made = create_companions(config, {"values"}, patient.model, patient.tokenizer, count_critic_updates(config))
    model = cast("PyTorchTrainingBackend", made.critic).model
    async with open_companions(made, trainer) as beside:
        assert beside.critic is not None, "a critic that was made is opened"
        return await check_critic(beside.critic, model, rows)


async def examine_teacher(patient: Patient, trainer: TrainingBackend, engines: Sequence[InferenceEngine], say: Say) -> list[Finding]:
    """Let the policy answer some prompts, and its teacher judge the answers; a server's scores are compared with a forward pass."""
    config, wanted = patient.config, patient.config.algorithm.requires & frozenset(TEACHER_COLUMNS)
    say("the teacher")
    check_teacher_fields(config, patient.task, patient.tokenizer, os.environ)
    vocab_size = int(patient.model.config.get_text_config().vocab_size)
    samples = await sample_answers(patient, engines)
    if not samples:
        return [skip("teacher", "the policy has given no answer that it could judge")]
    made = create_companions(config, wanted, patient.model, patient.tokenizer, 1)
    async with (
        open_companions(made, trainer) as beside,
        open_teacher(config, beside.teachers, trainer, patient.tokenizer, vocab_size, os.environ) as teacher,
    ):
        if teacher is None:
            return [skip("teacher", "no option names one")]
        finding, judged = await check_teacher(teacher, samples, wanted, vocab_size=vocab_size, precision=patient.precision)
    path = config.teacher.tokenizer
    if not config.teacher.url or path is None or finding.status == "fail":
        return [finding]
    try:
        directory = check_model_directory(path)
    except ConfigError:  # a tokenizer alone: there is no forward pass to compare with
        return [finding]
    dtype = str(getattr(read_model_config(config, directory), "dtype", None)).removeprefix("torch.")
    precision = dtype if dtype in ("bfloat16", "float16") else "float32"
    return [finding, check_scores(judged, samples, create_reference(load_plainly(config, directory)), precision=precision)]


async def sample_answers(patient: Patient, engines: Sequence[InferenceEngine]) -> list[Sample]:
    """Return answers of the policy to some prompts, as a run would train on them, or recorded ones."""
    config, task = patient.config, patient.task
    if task.recorded is not None:
        return [sample for group in task.recorded.groups[:_NUM_ANSWERED] for sample in group]
    generate = create_task_generate_fn(config, task, engines, patient.tokenizer, 0)
    prompts = [*(task.train_prompts or task.heldout_prompts)[:_NUM_ANSWERED]] or [Prompt(content="")] * _NUM_ANSWERED
    groups: list[Group | None] = [await generate(replace(prompt, index=i), 1) for i, prompt in enumerate(prompts)]
    if "{feedback}" in (config.teacher.context or ""):
        async with open_task(task) as opened, open_training_reward(config, opened, patient.tokenizer) as reward_fn:
            groups = [None if group is None else await score_generated_group(group, reward_fn, reward_config(config)) for group in groups]
    return [sample for group in groups for sample in group or () if sample.status is not Status.FAILED and any(sample.loss_mask)]


async def measure_speed(trainer: TrainingBackend, samples: Sequence[Sample], config: Config, mode: str) -> Finding:
    """Measure the tokens per second of a forward pass, and estimate what the passes of a step take with it."""
    batch = collate_samples(samples, pad_id=0)
    tokens = int(batch.lengths.sum())
    started = time.perf_counter()
    await submit_forward(trainer, batch, select_log_probs, max_tokens_per_microbatch=tokens).result()
    rate = tokens / (time.perf_counter() - started)
    mean = tokens / batch.num_rows
    preference, passes = config.preference, 3  # a backward pass costs two forward passes
    rows = config.rl.prompts_per_step * config.rl.samples_per_prompt * config.rl.num_epochs if "rl" in mode else config.sft.batch_size
    if "dpo" in mode:
        rows = preference.batch_size * (1 if preference.loss == "kto" else 2)
        passes += preference.needs_reference and preference.reference == "model"
    seconds = passes * rows * mean / rate
    found = f"{rate:,.0f} tokens per second forward; {rows} rows of {mean:.0f} tokens would be trained on in about {seconds:.2g} s"
    return judge("speed of the trainer", found)


def check_memory(command: CommandLine) -> Finding:
    """Check the memory that the dry run derives."""
    derived = derive_numbers(command.config, command.mode)  # type: ignore[arg-type]
    told = derived.get("memory: fits")
    if told is None:
        return skip("memory", "the memory of this machine is not known: --hardware.memory-gib says it")
    return judge(
        "memory",
        told,
        fails=told.startswith("no"),
        warns=not told.startswith(("yes", "no")),
        advice="`rollouts train --dry-run` shows the parts",
    )


async def attempt(check: str, run: Callable[[], Awaitable[Finding | list[Finding]]]) -> list[Finding]:
    """Return the findings of a check; an error of it is a finding, so that the other checks still run."""
    try:
        found = await run()
    except (RolloutsError, RuntimeError, ExceptionGroup, AssertionError, ValueError) as error:
        first = flatten_errors(error)[0]
        return [
            judge(check, f"the check could not be done: {type(first).__name__}: {first}", fails=True, advice="the message names the cause")
        ]
    return found if isinstance(found, list) else [found]


def count_answers(sample: Sample) -> int:
    """Count the messages of the assistant in a row, its answer included."""
    messages: Sequence[Message] = () if isinstance(sample.prompt, str) else sample.prompt
    return 1 + sum(message.role == "assistant" for message in messages)
