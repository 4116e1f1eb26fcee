"""Checks of a run directory. Nothing in the directory is written, renamed or created."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.crash.bundle import read_bundle
from integration.crash.watch import CRASHES
from integration.doctor.findings import Finding, judge, skip, tabulate
from integration.run.step_files import read_ledger
from integration.settings.command_line import CONFIG_FILE, RUN_FILE, read_saved
from integration.settings.config import Config
from integration.settings.help_text import name_as_started
from integration.settings.reward_model import RewardModelConfig
from integration.tasks.data_marks import ROWS_FILE, compare_data, find_changed_settings, mark_data, mark_settings
from integration.tasks.data_marks import read_lines as read_marked_lines
from integration.verify.checkpoints import Stage, check_stage
from integration.verify.lines import Lines, check_metrics, compare_ledger, read_lines
from rollouts.checks import parse_json
from rollouts.config_files import read_json
from rollouts.data.trajectories import iterate_records
from rollouts.errors import ConfigError, RolloutsError
from rollouts.training.saving.checkpoints import checkpoint_name, find_leftovers, list_checkpoints
from rollouts.training.saving.run_lock import LOCK_FILE
from rollouts.training.saving.run_state import read_run_state

STAGES = ("sft", "dpo", "rl")


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The findings about a run, and where it could go on."""

    path: Path
    findings: tuple[Finding, ...]
    resumes: Stage | None  # stage whose newest intact checkpoint --resume loads; None = there is none
    resume_step: int | None

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.status == "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON values."""
        point = None if self.resumes is None else {"stage": self.resumes.name, "step": self.resume_step}
        return {"run": str(self.path), "resumes": point, "findings": [finding.to_dict() for finding in self.findings]}

    def describe(self) -> str:
        """Return the findings as a table."""
        return tabulate(self.findings)


def check_run(path: Path) -> CheckedRun:
    """Check everything in a run directory.

    Raises: ConfigError for a path that is no run.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: give that of a run, for example runs/mine")
    stages = [Stage("sft", path / "sft"), Stage("dpo", path / "dpo"), Stage("rl", path / "rl"), Stage("", path)]
    stages = [stage for stage in stages if stage.checkpoints.is_dir()]
    if not ((path / CONFIG_FILE).is_file() or (path / RUN_FILE).is_file() or stages):
        raise ConfigError(f"{path} has no {CONFIG_FILE}, no {RUN_FILE} and no checkpoints: it is not the directory of a run")
    findings, config = check_settings(path)
    findings.append(check_facts(path))
    lines = read_lines(path / "metrics.jsonl")
    findings += check_metrics(lines, config)
    ledger = path / "rl" / "ledger.jsonl"
    if ledger.exists() or list_checkpoints(path / "rl" / "checkpoints"):
        findings.append(check_ledger(ledger, lines))
    findings += check_trajectories(path / "rl" / "trajectories")
    newest: tuple[Stage, int] | None = None  # last stage with an intact checkpoint, and its step
    lost: list[Stage] = []  # stages that have checkpoints, of which none is intact
    for stage in stages:
        found, step = check_stage(stage, lines, kept=_count_kept(config))
        findings += found
        newest = newest if step is None else (stage, step)
        lost += [stage] if step is None and list_checkpoints(stage.checkpoints) else []
    newest = None if lost else newest
    if newest is not None:
        findings += check_inputs(path, newest[0], newest[1])
    findings += check_crashes(path)
    findings.append(check_leftovers(path, stages))
    findings.append(describe_resume(lost, newest, [finding for finding in findings if finding.status == "fail"]))
    if is_live(path):
        text = "a process holds the lock of this run: what it is just writing may look damaged"
        findings.append(judge("lock", text, warns=True, advice="check again when it has ended"))
    resumes, step = (None, None) if newest is None else newest
    return CheckedRun(path=path, findings=tuple(findings), resumes=resumes, resume_step=step)


def check_settings(path: Path) -> tuple[list[Finding], Mapping[str, Any]]:
    """Check config.json; return its content as well, empty if it cannot be read."""
    file = path / CONFIG_FILE
    advice = "restore it from a copy: --resume compares the settings with it"
    if not file.is_file():
        return [judge("settings", f"{file} is missing", fails=True, advice=advice)], {}
    try:
        raw = read_json(file)
        read_saved(RewardModelConfig if "training" in raw else Config, file)
    except RolloutsError as error:
        return [judge("settings", str(error), fails=True, advice=advice)], {}
    return [judge("settings", f"{CONFIG_FILE} holds {len(raw)} settings and sections that this version reads")], raw


def check_inputs(path: Path, stage: Stage, step: int) -> list[Finding]:
    """Compare settings and data with what the checkpoint that --resume takes was written with."""
    checkpoint = stage.checkpoints / checkpoint_name(step)
    inputs = read_run_state(checkpoint).inputs
    if inputs is None:
        return [skip("inputs", f"{checkpoint} has no marks of settings and data: its writer made none")]
    try:
        raw = read_json(path / CONFIG_FILE)
        config = read_saved(RewardModelConfig if "training" in raw else Config, path / CONFIG_FILE)
        edited = find_changed_settings(inputs, mark_settings(config, ()))
        changed = list(compare_data(inputs.data, read_marked_lines(path / ROWS_FILE), mark_data(config)).values())
    except (RolloutsError, OSError) as error:
        return [skip("inputs", f"not compared with {checkpoint}: {error}")]
    told = f"{CONFIG_FILE} has other settings than {checkpoint.name}: {', '.join(edited)}"
    advice = "restore it from a copy: --resume refuses it as it is"
    settings = [judge("inputs", told, fails=True, advice=advice)] if edited else []
    found = "; ".join(changed) or f"settings and {len(inputs.data)} data files are those that {checkpoint.name} was written with"
    return [*settings, judge("inputs", found, warns=bool(changed), advice="restore the data: --resume refuses others")]


def check_facts(path: Path) -> Finding:
    """Check run.json: mode of the run and seconds of its stages."""
    file = path / RUN_FILE
    try:
        facts = parse_json(file.read_text(encoding="utf-8"))
        told = ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str))
    except (OSError, ValueError, AttributeError) as error:
        return judge("facts", f"{file} cannot be read: {error}", fails=True, advice='restore it, for example as {"mode": "sft+rl"}')
    gaps = facts.get("metrics_gaps", [])
    return judge(
        "facts", f"{RUN_FILE}: {told}" + "".join(f"; {gap}" for gap in gaps), warns=bool(gaps), advice="metrics are lost, no training"
    )


def check_ledger(path: Path, lines: Lines) -> Finding:
    """Check that each step has its line, each prompt was trained on once, and the metrics tell of the same steps."""
    try:
        entries = read_ledger(path)
    except (RolloutsError, OSError) as error:
        told = f"{path} is missing" if isinstance(error, FileNotFoundError) else str(error)
        return judge("ledger", told, fails=True, advice="restore it from a copy; which prompts these steps had is lost")
    return compare_ledger(path, entries, lines)


def check_trajectories(directory: Path) -> list[Finding]:
    """Read every file of rollouts."""
    files = sorted(directory.glob("step_*.jsonl")) if directory.is_dir() else []
    if not files:
        return [skip("trajectories", f"{directory} has none")]
    problems: list[str] = []
    count = 0
    for file in files:
        try:
            count += sum(1 for _ in iterate_records(file))
        except RolloutsError as error:
            problems.append(str(error))
    found = "; ".join(problems) if problems else f"{count} rollouts in {len(files)} files"
    return [judge("trajectories", found, fails=bool(problems), advice="remove these files: a resumed run does not read them")]


def check_crashes(path: Path) -> list[Finding]:
    """Name the crash bundles of a run, and how to replay them; none without any."""
    bundles = [bundle for place in sorted({path, *(path / stage for stage in STAGES)}) for bundle in list_checkpoints(place / CRASHES)]
    told: list[str] = []
    problems: list[str] = []
    for bundle in bundles:
        try:
            found = read_bundle(bundle)
            told.append(f"{bundle.relative_to(path)} (step {found.step}, {found.role}, {found.kind or 'a bad number'})")
        except RolloutsError as error:
            problems.append(str(error))
    if not bundles:
        return []
    last = max(bundles, key=lambda bundle: bundle.stat().st_mtime_ns)
    advice = f"execute the step again: {name_as_started('python -m integration.train')} --replay {shlex.quote(str(last))}"
    damaged = [judge("crashes", "; ".join(problems), warns=True, advice="no other bundle needs it: delete it")] if problems else []
    return [*([judge("crashes", "a bad number ended " + ", ".join(told), warns=True, advice=advice)] if told else []), *damaged]


def check_leftovers(path: Path, stages: list[Stage]) -> Finding:
    """Name what kills have left."""
    found = [leftover for stage in stages for leftover in find_leftovers(stage.checkpoints)]
    found += sorted({*path.glob(".tmp_*"), *path.glob("*/.tmp_*"), *path.glob("*/crash/.tmp_*"), *path.glob("rl/trajectories/.tmp_*")})
    aside = [old for stage in stages for old in stage.checkpoints.glob("superseded_*")]
    told = [f"left by a kill: {', '.join(str(item.relative_to(path)) for item in found)}"] if found else []
    told += [f"of an abandoned future: {', '.join(str(item.relative_to(path)) for item in aside)}"] if aside else []
    text = "; ".join(told) or "no leftovers of kills"
    return judge(
        "leftovers",
        text,
        warns=bool(told),
        advice="nothing reads them: --resume and the next save remove those of kills; others may be deleted",
    )


def describe_resume(lost: Sequence[Stage], newest: tuple[Stage, int] | None, failed: Sequence[Finding]) -> Finding:
    """Say where --resume goes on.

    Args:
        lost: stages that have checkpoints, of which none is intact.
        failed: findings of which some may be in its way.
    """
    missing = {finding.check for finding in failed}
    if lost:
        told = f"no checkpoint of {' and '.join(stage.title for stage in lost)} is intact: --resume refuses to go on"
        advice = "restore one from a copy, or start a new run directory: a stage with checkpoints never starts over"
        return judge("resume", told, fails=True, advice=advice)
    if newest is not None:
        stage, step = newest
        where = f"after step {step} of {stage.title}, from {stage.checkpoints}"
        if missing & {"settings", "inputs"}:
            told = f"--resume refuses to go on with this {CONFIG_FILE}; with that of the run it goes on {where}"
            return judge("resume", told, fails=True, advice=f"restore {CONFIG_FILE} from a copy")
        mode = " and --mode, which cannot be read," if "facts" in missing else ""
        return judge("resume", f"--resume{mode} goes on {where}")
    return judge("resume", "there is no checkpoint yet: --resume starts from the beginning", warns=True, advice="nothing, if it is young")


def is_live(path: Path) -> bool:
    """Whether a process holds the lock of the run. False where it cannot be known."""
    try:
        import fcntl

        with (path / LOCK_FILE).open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    return False


def _count_kept(config: Mapping[str, Any]) -> int | None:
    """Return the number of checkpoints that a run keeps: the newest ones, and that of the best evaluation."""
    section = "training" if "training" in config else "checkpoint"
    newest = _find(config, section, "keep_last_n")
    return newest + (_find(config, section, "best") is not None) if isinstance(newest, int) else None


def _find(config: Mapping[str, Any], section: str, name: str) -> Any:
    """Return a value of the settings, None if they have none."""
    values = config.get(section)
    return values.get(name) if isinstance(values, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
