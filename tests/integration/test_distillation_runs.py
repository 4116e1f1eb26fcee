"""Runs that distil a teacher: both loops, an interruption, rows of two teachers, the policy with a context, settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.dry_run.describe import describe_companions
from integration.dry_run.layout import plan_roles
from integration.dry_run.sizes import read_sizes
from integration.dry_run.text import read_workload
from integration.parts import hub_models
from integration.parts.model_settings import check_companions, create_tokenizer, read_model_config
from integration.run.job import MAY_CHANGE_ON_RESUME
from integration.run.stages import RunControl, create_task, run_rl
from integration.run.summary import _describe_rl
from integration.settings.config import Config
from integration.settings.paths import with_absolute_paths
from integration.settings.sections.backend import BackendSection
from integration.settings.sections.data import DataSection, EvaluationSection
from integration.settings.sections.generation import GenerationSection
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection
from integration.settings.sections.teacher import TeacherSection
from integration.tasks.task import create_sort_task
from rollouts.asynchronous.config import AsyncConfig
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import OptimizerConfig
from rollouts.errors import ConfigError, DataError
from rollouts.models.hub import HubModel
from rollouts.testing import FakeVLLMServer, create_tiny_model
from rollouts.training.metrics import JSONLLogger, read_metrics, truncate_log
from rollouts.training.saving.checkpoints import latest_checkpoint
from rollouts.training.saving.run_state import read_run_state


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return save_model(tmp_path / "teacher", seed=3)


def save_model(path: Path, vocab_size: int = 64, **options: Any) -> Path:
    model: Any = create_tiny_model(vocab_size=vocab_size, hidden_size=32, num_layers=1, **options)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6)  # it prefers some tokens, as a trained model does
    model.save_pretrained(path)
    create_char_tokenizer(vocab_size).save_pretrained(path)
    return path


def start(algorithm: str, teacher: TeacherSection | Path, **changes: Any) -> Config:
    """Settings of a run of a second."""
    section = teacher if isinstance(teacher, TeacherSection) else TeacherSection(path=str(teacher), top_k=6)
    rl = {"num_steps": 3, "prompts_per_step": 3, "samples_per_prompt": 2, "num_minibatches": 2, **changes.pop("rl", {})}
    return Config(
        rl=RLSection(**{"optimizer": OptimizerConfig(lr=3e-3), "algorithm": algorithm, **rl}),
        model=changes.pop("model", ModelSection(hidden_size=32, intermediate_size=32, num_layers=1)),
        evaluation=EvaluationSection(num_prompts=4, sampled=False),
        teacher=section,
        **changes,
    )


async def run(config: Config, directory: Path, stop_after: int | None = None, **task_changes: Any) -> list[dict[str, Any]]:
    """The lines of a run without timings; stopped after so many steps, if given."""
    torch.set_num_threads(1)
    directory.mkdir(exist_ok=True)
    done: list[int] = []

    def should_stop() -> bool:
        done.append(1)
        return stop_after is not None and len(done) >= stop_after

    checkpoint = latest_checkpoint(directory / "rl" / "checkpoints")
    if checkpoint is not None:
        truncate_log(directory / "metrics.jsonl", read_run_state(checkpoint).metrics_bytes)
    logger = JSONLLogger(directory / "metrics.jsonl")
    task = replace(create_sort_task(num_train=64, num_heldout=4), **task_changes)
    await run_rl(config, directory / "rl", None, RunControl(logger=logger, should_stop=should_stop), task=task)
    logger.finish()
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line["step"] > 0]
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


ASYNC = {"asynchronous": AsyncConfig(enabled=True, max_staleness=0)}


@pytest.mark.parametrize(("algorithm", "rl"), [("opd(reward_coef=0.5)", {}), ("gkd(beta=0.3)", {}), ("opd", ASYNC)])
async def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(algorithm: str, rl: dict[str, Any], teacher: Path, tmp_path: Path):
    config = start(algorithm, teacher, rl=rl)
    whole = await run(config, tmp_path / "whole")
    await run(config, tmp_path / "parts", stop_after=2)
    assert await run(config, tmp_path / "parts") == whole
    assert [line["step"] for line in whole] == [1, 2, 3]
    told = {"teacher_kl", "teacher_doubt_fraction"} | ({"teacher_divergence"} if "gkd" in algorithm else set())
    assert told <= set(whole[-1])


@pytest.mark.parametrize("algorithm", ["opd", "gkd(beta=1.0)"])
async def test_the_policy_comes_nearer_to_its_teacher_without_any_reward(algorithm: str, teacher: Path, tmp_path: Path):
    rl = {"num_steps": 10, "eval_every": 0, "prompts_per_step": 16, "samples_per_prompt": 4, "optimizer": OptimizerConfig(lr=2e-2)}
    lines = await run(start(algorithm, teacher, rl=rl), tmp_path / "run", reward_fn=None, heldout_prompts=())
    assert lines[-1]["teacher_kl"] < 0.7 * lines[0]["teacher_kl"], [line["teacher_kl"] for line in lines]
    assert "reward_mean" not in lines[0], "an unknown reward is not a number"


async def test_the_signal_of_each_token_is_recorded_as_any_advantage(teacher: Path, tmp_path: Path):
    await run(start("opd", teacher), tmp_path / "run")
    files = sorted((tmp_path / "run" / "rl" / "trajectories").glob("*.jsonl"))
    record = json.loads(files[0].read_text().splitlines()[0])
    estimate = (
        record["estimate"]
        if "estimate" in record
        else next(v["estimate"] for v in record.values() if isinstance(v, dict) and "estimate" in v)
    )
    assert len(set(map(str, estimate["advantages"]))) > 2
    assert "teacher_log_probs" in estimate


async def test_rows_of_two_teachers_and_a_server_among_them(teacher: Path, tmp_path: Path):
    tokenizer: Any = create_char_tokenizer()
    async with FakeVLLMServer(save_model(tmp_path / "other", seed=5), tokenizer=tokenizer) as server:
        section = TeacherSection(by="kind", each=(f"even={teacher}", f"odd={server.url}"))
        prompts = create_sort_task(num_train=64).train_prompts
        kinds = tuple(replace(p, metadata={**p.metadata, "kind": ("even", "odd")[i % 2]}) for i, p in enumerate(prompts))
        mixed = await run(start("opd", section), tmp_path / "mixed", train_prompts=kinds)
        alone = await run(start("opd", teacher), tmp_path / "alone", train_prompts=kinds)
        assert mixed[0]["teacher_kl"] != alone[0]["teacher_kl"]
        assert mixed[0]["reward_mean"] == alone[0]["reward_mean"]
        closed = replace(section, api_key_variable="TEACHER_KEY")
        with pytest.raises(ConfigError, match=r"teacher\.api_key_variable is 'TEACHER_KEY', but there is no such"):
            await run(start("opd", closed), tmp_path / "closed", train_prompts=kinds)
        with pytest.raises(DataError, match=r"kind = None, for which teacher\.each names no teacher: it names even, odd"):
            await run(start("opd", section), tmp_path / "lost")
        whole = await run(start("opd", TeacherSection(url=(server.url,))), tmp_path / "server")
        model = await run(start("opd", tmp_path / "other"), tmp_path / "model")
        assert whole[0]["teacher_kl"] == pytest.approx(model[0]["teacher_kl"], abs=1e-4)


async def test_the_policy_teaches_itself_from_the_answer(tmp_path: Path):
    section = TeacherSection(context="{ground_truth} {prompt}")
    lines = await run(start("opd", section), tmp_path / "own")
    assert lines[0]["teacher_kl"] != 0
    with pytest.raises(DataError, match=r"has no field 'hint', or it is null, which teacher\.context names; it has ground_truth"):
        await run(start("opd", TeacherSection(context="{hint} {prompt}")), tmp_path / "hint")
    with pytest.raises(DataError, match=r"^prompt 0 has 30\d tokens with teacher\.context, and \d+ more with the longest response, but"):
        await run(start("opd", TeacherSection(context="{prompt}" + "1" * 300)), tmp_path / "long")
    null = tuple(replace(p, metadata={"ground_truth": None}) for p in create_sort_task(num_train=64).train_prompts)
    with pytest.raises(DataError, match=r"has no field 'ground_truth', or it is null"):
        await run(start("opd", section), tmp_path / "null", train_prompts=null)
    with pytest.raises(ConfigError, match=r"get no reward, whose reason \{feedback\} is"):
        await run(start("opd", TeacherSection(context="{feedback} {prompt}")), tmp_path / "feedback", reward_fn=None)


def test_a_run_directory_holds_the_places_of_its_teachers_absolute(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    section = TeacherSection(by="x", each=("a=teacher", "b=http://h:1", "c=Org/name"), tokenizer="teacher")
    found = with_absolute_paths(start("opd", section)).teacher
    assert found.each == (f"a={teacher}", "b=http://h:1", "c=Org/name") and found.tokenizer == str(teacher)
    assert with_absolute_paths(start("opd", TeacherSection(path="teacher"))).teacher.path == str(teacher)
    assert "teacher.url" in MAY_CHANGE_ON_RESUME


def test_a_teacher_with_other_tokens_is_refused(teacher: Path, tmp_path: Path):
    other = save_model(tmp_path / "other", vocab_size=80)
    check_companions(start("opd", teacher))
    for section, name in (
        (TeacherSection(path=str(other)), r"teacher\.path"),
        (TeacherSection(by="x", each=(f"a={teacher}", f"b={other}")), r"teacher\.each"),
        (TeacherSection(url=("http://127.0.0.1:1",), tokenizer=str(other)), r"teacher\.tokenizer"),
    ):
        with pytest.raises(ConfigError, match=rf"{name} is .*other, whose tokens are not the policy's: .* differ \('"):
            check_companions(start("opd", section))


@pytest.mark.parametrize(
    ("algorithm", "section", "changes", "message"),
    [
        ("grpo", {"path": "x"}, {}, "--teacher.path is given, but rl.algorithm 'grpo' has no teacher"),
        ("opd", {}, {}, "needs a teacher: give --teacher.path DIR"),
        ("gkd", {"url": ("http://h:1",)}, {}, "which a server does not give here"),
        ("gkd", {"context": "{prompt} {answer}"}, {}, "which the policy itself does not give here"),
        ("gkd", {"path": "x"}, {"backend": BackendSection(kind="torch_func")}, "computed with pytorch and fsdp"),
        ("gkd", {"path": "x"}, {"generation": GenerationSection(top_p=0.9)}, "compares whole distributions"),
        ("opd", {"url": ("http://h:1",)}, {"generation": GenerationSection(temperature=0.7)}, "scores at temperature 1"),
        ("opd", {"context": "{prompt} {answer}"}, {"task": "calculator"}, "answers to single prompts only"),
        ("opd", {"context": "{answer}"}, {}, "expected a text with {prompt}"),
    ],
)
def test_settings_without_sense_are_refused(algorithm: str, section: dict[str, Any], changes: dict[str, Any], message: str):
    config: Callable[[], Config] = lambda: Config(rl=RLSection(algorithm=algorithm), teacher=TeacherSection(**section), **changes)
    with pytest.raises(ConfigError, match=message):
        _ = config().algorithm


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"path": "x", "url": ("http://h:1",)}, "--teacher.path is given beside --teacher.url"),
        ({"by": "x"}, "teacher.by is given alone: add --teacher.each"),
        ({"each": ("a=x",)}, "teacher.each is given alone: add --teacher.by"),
        ({"by": "k", "each": ("a",)}, "teacher.each has 'a', expected NAME=DIR"),
        ({"by": "k", "each": ("a=x", "a=y")}, "names a teacher twice"),
        ({"url": ("h:1",)}, "has no scheme"),
        ({"url": ("http://u:p@h:1",)}, "teacher.url has .* with a user, a password or a query"),
        ({"url": ("http://[::1",)}, r"teacher\.url has .*, which is no address"),
        ({"url": ("http://u:s3'cret/x@h:1",)}, r"^teacher\.url has 'http://h:1', which is no address: give http://host:port$"),
        ({"by": "k", "each": ("a=http://u:p@h:1",)}, r"teacher\.each has .* with a user"),
        ({"by": "k", "each": ("a=grpc://h:1",)}, r"teacher\.each has 'grpc://h:1', which has no scheme http"),
        ({"path": "http://u:secret@h"}, r"teacher\.path is 'http://h', .* by --teacher\.url$"),
        ({"url": ("http://h:1",), "context": "{prompt}{x}"}, "a context is for models of this run"),
    ],
)
def test_teachers_that_contradict_each_other_are_refused(section: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        TeacherSection(**section)


async def test_rows_need_no_right_answers(teacher: Path, tmp_path: Path):
    rows = [{"prompt": f"s{i}="} for i in range(100, 140)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    student = ModelSection(path=str(save_model(tmp_path / "student", seed=8)))
    config = start("opd", teacher, task="jsonl", data=DataSection(path=str(path)), model=student)
    task = create_task(config, create_tokenizer(config), "rl")
    assert task.reward_fn is None and task.heldout_prompts == ()
    done = vars(task)
    lines = await run(config, tmp_path / "run", **{name: done[name] for name in ("train_prompts", "reward_fn", "heldout_prompts")})
    assert lines[-1]["teacher_kl"] > 0 and "reward_mean" not in lines[-1]
    path.write_text("".join(json.dumps({**row, "answer": "1"} if i != 3 else row) + "\n" for i, row in enumerate(rows)))
    some = create_task(config, create_tokenizer(config), "rl")
    assert some.reward_fn is not None and some.heldout_prompts
    assert all(prompt.metadata["ground_truth"] for prompt in some.heldout_prompts)
    assert any("no right answer" in note for note in some.notes)
    with pytest.raises(DataError, match="expected 'ground_truth' or 'answer'"):
        create_task(replace(config, rl=replace(config.rl, algorithm="grpo"), teacher=TeacherSection()), create_tokenizer(config), "rl")


def test_a_run_without_rewards_says_who_told_it():
    told = _describe_rl(0.4, 0.9, (None, None), 1536, "accuracy", start("opd", TeacherSection(context="{prompt}{ground_truth}")))
    assert told == "a teacher judged the tokens of 1,536 answers; with opd, accuracy went from 0.40 to 0.90."


def test_teachers_named_on_the_hub_are_found_each(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, str | None, bool, str]] = []

    def find(name: str, revision: str | None = None, *, weights: bool, trust_remote_code: bool, option: str) -> HubModel:
        asked.append((name, revision, weights, option))
        return HubModel(name=name, commit="c0", directory=Path("/cache") / name)

    monkeypatch.setattr(hub_models, "find_hub_model", find)
    section = TeacherSection(by="x", each=("a=Org/one@v1", "b=http://h:1"), tokenizer="Org/two")
    recorded, local = hub_models.find_models(start("opd", section), quiet=True)
    assert recorded.teacher.each == ("a=Org/one@c0", "b=http://h:1") and recorded.teacher.tokenizer == "Org/two@c0"
    assert local.teacher.each == ("a=/cache/Org/one", "b=http://h:1") and local.teacher.tokenizer == "/cache/Org/two"
    assert set(asked) == {("Org/one", "v1", True, "teacher.each"), ("Org/two", None, False, "teacher.tokenizer")}


def test_a_dry_run_counts_teachers_and_their_columns(teacher: Path):
    config = start("gkd", teacher, rl={"prompts_per_step": 10, "samples_per_prompt": 4})
    sizes = read_sizes(read_model_config(config))
    parts = {part.name: part.size for part in plan_roles(read_workload(config, "rl", sizes))[0].parts}
    own = sum(p.numel() for p in create_tiny_model(hidden_size=32, num_layers=1).parameters())
    assert parts["teacher: parameters"] == pytest.approx(4 * own, rel=0.01)
    row = read_workload(config, "rl", sizes).row_tokens
    assert parts["most probable tokens of the teacher"] == 40 * row * 6 * 16
    assert describe_companions(config)["RL teacher"] == f"{teacher}; the 6 most probable tokens"
    plain = start("opd", TeacherSection(context="{prompt}{ground_truth}"))
    assert describe_companions(plain)["RL teacher"] == "the policy itself, which reads '{prompt}{ground_truth}'"
    assert not any("teacher" in part.name for part in plan_roles(read_workload(plain, "rl", sizes))[0].parts)
