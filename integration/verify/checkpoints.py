"""Checks of the checkpoints of a run: checksums, tensors, state of the run, and their place in the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from integration.doctor.findings import Finding, judge
from integration.verify.lines import Lines
from rollouts.errors import CheckpointError
from rollouts.training.saving.checkpoints import checkpoint_name, find_undeleted, list_checkpoints
from rollouts.training.saving.run_state import RunState, read_run_state


@dataclass(frozen=True)
class Stage:
    """A stage of a run."""

    name: str  # "sft", "rl", or "" for a run of a single stage
    directory: Path

    @property
    def checkpoints(self) -> Path:
        """Directory of its checkpoints."""
        return self.directory / "checkpoints"

    @property
    def title(self) -> str:
        """Name in messages."""
        return self.name.upper() or "training"


def check_stage(stage: Stage, lines: Lines, *, kept: int | None) -> tuple[list[Finding], int | None]:
    """Check each checkpoint of a stage, and their number.

    Args:
        kept: checkpoints that a run keeps, that of its best evaluation included; None = not known.

    Returns: the findings, and the step of the newest checkpoint that a resumed run would take; None = there is none.
    """
    paths = list_checkpoints(stage.checkpoints)
    findings: list[Finding] = []
    newest: int | None = None
    for path in paths:
        name = f"{stage.name}/{path.name}".removeprefix("/")
        try:
            state = read_run_state(path)
            num_tensors, num_bytes = _read_tensors(path)
        except (CheckpointError, OSError, ValueError, SafetensorError) as error:
            findings.append(judge(name, str(error), fails=True, advice="restore it from a copy, or delete it: --resume passes it over"))
            continue
        newest = int(path.name.removeprefix("step_"))
        told = f"{num_tensors} tensors, {num_bytes / 2**20:.3g} MiB, checksums match, state of the run after step {newest}"
        problem = _check_state(stage, path, state, lines)
        findings.append(
            judge(name, problem or told, fails=bool(problem), advice="restore the file that was edited or shortened from a copy")
        )
    left = [] if newest is None else find_undeleted(stage.checkpoints / checkpoint_name(newest))
    if left:
        told = f"a kill left {', '.join(path.name for path in left)} beside step {newest} of {stage.title}, whose save was to delete it"
        findings.append(judge("checkpoints", told, warns=True, advice="--resume deletes it before its first step; it may be deleted"))
    if kept is not None and len(paths) - len(left) > kept:
        told = f"{len(paths)} checkpoints of {stage.title}, although the run keeps {kept}"
        advice = "steps whose updates were all skipped keep them; else the next save deletes the oldest"
        findings.append(judge("checkpoints", told, warns=True, advice=advice))
    return findings, newest


def _check_state(stage: Stage, path: Path, state: RunState, lines: Lines) -> str:
    """Return what is wrong with the state of a run; empty if nothing is."""
    step, offset = state.step, state.metrics_bytes
    if checkpoint_name(step) != path.name:
        return f"{path} says that it is of step {step!r}"
    if stage.name and state.stage != stage.name:
        return f"{path} says that it is of stage {state.stage!r}, expected {stage.name!r}"
    if offset:
        content = lines.content or b""
        if len(content) < offset:
            return f"{path} was written when {lines.path.name} had {offset} bytes, but it has {len(content)}: lines are lost"
        if content[offset - 1 : offset] != b"\n":
            return f"{lines.path.name} has no end of a line at byte {offset}, where it ended when {path.name} was written: it was edited"
    return ""


def _read_tensors(path: Path) -> tuple[int, int]:
    """Open every file of tensors in a checkpoint and return the numbers of tensors and bytes. Raises SafetensorError, CheckpointError."""
    files = sorted(path.rglob("*.safetensors"))
    count = 0
    for file in files:
        with safe_open(str(file), framework="np") as opened:  # the header, and whether all tensors lie in the file
            count += len(opened.keys())
    return count, sum(file.stat().st_size for file in files)
