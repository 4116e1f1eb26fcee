"""Input of the viewer: the trajectory files of a run, their records, and the tokenizer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from integration.settings.command_line import CONFIG_FILE, find_run
from integration.settings.sections.model import ModelSection
from integration.view.tokens import Decode
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.checks import parse_json
from rollouts.data.records import TrajectoryRecord, derive_steps
from rollouts.data.samples import describe_sample
from rollouts.data.trajectories import iterate_records, measure_groups
from rollouts.errors import ConfigError, DataError
from rollouts.training.saving.checkpoints import list_checkpoints
from rollouts.types import Message

TRAJECTORIES = Path("rl", "trajectories")
TOKENIZER_FILE = "tokenizer.json"
_STEP = re.compile(r"step_(\d+)\.jsonl")


def find_step_files(path: Path) -> dict[int, Path]:
    """Return the trajectory files of a run by step. path: the run directory, or its directory of trajectories."""
    for directory in (path / TRAJECTORIES, path / TRAJECTORIES.name, path):
        files = directory.glob("step_*.jsonl") if directory.is_dir() else ()
        found = {int(match.group(1)): file for file in files if (match := _STEP.fullmatch(file.name))}
        if found:
            return dict(sorted(found.items()))
    return {}


def choose_file(path: Path, step: int | None) -> Path:
    """Return the file to show: for a run, that of a step, by default the newest.

    Raises: ConfigError, with the available files, if it does not exist.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}: give the directory of a run, a trajectory file or an examples.jsonl")
    if not path.is_dir():
        if step is not None:
            raise ConfigError(f"--step {step} chooses a file of a run, but {path} is one file: leave it out, or give the run's directory")
        return path
    files = find_step_files(path)
    if not files:
        others = sorted(path.glob("*/examples.jsonl"))
        more = f"; look at {others[-1]}" if others else ""
        raise ConfigError(f"{path} holds no trajectory files ({TRAJECTORIES}/step_NNNN.jsonl; --trajectories.groups writes them){more}")
    if step is not None and step not in files:
        raise ConfigError(f"{path} has no trajectories of step {step}: it has those of {describe_steps(list(files))}")
    return files[max(files) if step is None else step]


def describe_steps(steps: Sequence[int]) -> str:
    """Format steps as ranges: 1-3, 5 for 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A selection of records; None = any."""

    group: int | None = None
    sample: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    search: str | None = None  # text in prompt, response, messages or steps, in any case

    def takes(self, record: TrajectoryRecord) -> bool:
        """Whether a record is selected. A record without a reward never matches a bound on rewards."""
        sample = record.sample
        if self.group not in (None, sample.group_index) or self.sample not in (None, sample.index):
            return False
        if self.search is not None and self.search.casefold() not in find_text(record).casefold():
            return False
        if self.min_reward is None and self.max_reward is None:
            return True
        reward = find_reward(record)
        if reward is None:
            return False
        low = self.min_reward is None or reward >= self.min_reward
        return low and (self.max_reward is None or reward <= self.max_reward)

    def __str__(self) -> str:
        """Return the selection as flags."""
        return " ".join(
            f"--{name.replace('_', '-')} {shlex.quote(value) if isinstance(value, str) else f'{value:g}'}"
            for name, value in vars(self).items()
            if value is not None
        )


def find_text(record: TrajectoryRecord) -> str:
    """Return all text of a record: its prompt, response, messages, and the observations, outputs and actions of its steps."""
    sample = record.sample
    prompt = [sample.prompt] if isinstance(sample.prompt, str) else sample.prompt or ()
    parts: list[Any] = [*prompt, sample.response, *(sample.messages or ())]
    parts += [part for step in derive_steps(record) for part in (step.observation_data, step.raw_policy_output, step.action_taken)]
    parts = [part.to_dict() if isinstance(part, Message) else part for part in parts]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part is not None)


def find_masking(path: Path) -> bool:
    """Return whether the run of a file leaves truncated samples out of training; False where its configuration is not known."""
    run = find_run(path)
    try:
        return run is not None and parse_json((run / CONFIG_FILE).read_text(encoding="utf-8"))["rl"]["mask_truncated"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_reward(record: TrajectoryRecord) -> float | None:
    """Return the reward of a record: its sample's, or the sum over single steps."""
    if record.sample.reward is not None or record.sample.tokens:
        return record.sample.reward
    rewards = [step.base_reward for step in record.steps if step.base_reward is not None]
    return sum(rewards) if rewards else None


def iterate_file(path: Path, groups: Collection[int] | None = None) -> Iterator[TrajectoryRecord]:
    """Yield the records of a file, one at a time. groups: only those of these; None = all.

    Raises: DataError with the file's name and the accepted kinds of files.
    """
    with _naming_kinds():
        for record in iterate_records(path, groups):
            wrong = find_wrong_type(record)
            if wrong:
                raise DataError(f"{path}: {describe_sample(record.sample)} has {wrong}")
            yield record


def measure_file(path: Path) -> dict[int, tuple[int, int]]:
    """Return what measure_groups tells of a file. Raises DataError as iterate_file."""
    with _naming_kinds():
        return measure_groups(path)


@contextmanager
def _naming_kinds() -> Generator[None]:
    """Add the accepted kinds of files to an error of a line."""
    try:
        yield
    except DataError as error:
        found = str(error)
        if isinstance(error.__cause__, TypeError) and "unexpected keyword argument" in found:
            name = found.rpartition("argument ")[2]
            found = f"{found.partition(' is not a ')[0]} is not a rollout: it has a field {name}, which rollouts do not have"
        raise DataError(f"{found}. Give a file of rollouts (step_NNNN.jsonl, examples.jsonl) or of steps") from error


def find_wrong_type(record: TrajectoryRecord) -> str:
    """Return a description of the first field with a value of the wrong type, since files may have any origin; "" = none."""
    sample, known = record.sample, record.estimate
    parts: list[Any] = [sample, *(sample.turns or ()), *record.steps]
    parts += [] if known is None else [known, *(known.turns or ())]
    parts += [] if record.update is None else [record.update]
    for part in parts:
        for f in fields(part):
            value = getattr(part, f.name)
            if not has_type(value, str(f.type)):
                return f"{f.name} {value!r:.100}, which has the wrong type for a file of rollouts"
    return ""


def has_type(value: object, annotation: str) -> bool:
    """Whether a value is of an annotated type made of int, float, str, bool, tuple and None; true for other types."""
    if value is None:
        return annotation.endswith(" | None") or annotation == "Any"
    annotation = annotation.removesuffix(" | None")
    if annotation.startswith("tuple["):
        kind = annotation[6:].removesuffix(", ...]")
        if not isinstance(value, tuple):
            return False
        items, kinds = cast("tuple[Any, ...]", value), set(map(type, cast("tuple[Any, ...]", value)))
        if kinds == {int} and kind in ("int", "float"):  # most of a file, judged as a whole
            return min(items) >= -(2**63) and max(items) < 2**63
        if (kinds == {float} and kind == "float") or (kinds == {str} and kind == "str"):
            return True
        return all(has_type(item, kind) for item in items)
    if annotation in ("int", "float"):
        number = not isinstance(value, bool) and (isinstance(value, int) or (annotation == "float" and isinstance(value, float)))
        return number and (isinstance(value, float) or -(2**63) <= cast("int", value) < 2**63)
    return isinstance(value, {"str": str, "bool": bool, "Mapping[str, Any]": Mapping}.get(annotation, object))


# -- the tokenizer


def find_decoder(path: Path, directory: Path | None) -> Decode | None:
    """Return the decoder of a file's tokens: the tokenizer of its run's newest checkpoint, else of the run's initial model.

    Args:
        path: the file.
        directory: directory of a tokenizer; None = look for it in the run.

    Returns: None if there is no tokenizer.
    Raises: ConfigError if the named directory has none.
    """
    if directory is not None:
        decoder = read_tokenizer(directory)
        if decoder is None:
            raise ConfigError(f"{directory} has no readable {TOKENIZER_FILE}: give --tokenizer the directory of a model")
        return decoder
    run = find_run(path)
    if run is None:
        return None
    checkpoints = [c for stage in ("rl", "dpo", "sft") for c in reversed(list_checkpoints(run / stage / "checkpoints"))]
    for checkpoint in checkpoints:
        with suppress(ConfigError):  # a damaged checkpoint: an older one has the same tokenizer
            decoder = read_tokenizer(checkpoint)
            if decoder is not None:
                return decoder
    return _create_own(run)


def read_tokenizer(directory: Path) -> Decode | None:
    """Return the decoder of a model directory's tokenizer.json, without running model code; None if it is missing or unreadable."""
    from tokenizers import Tokenizer

    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a plain Exception for a damaged file
        raise ConfigError(f"{path} is not a tokenizer: {error}") from error
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def _create_own(run: Path) -> Decode | None:
    """Return the decoder of the model that the run's configuration names."""
    try:
        model = cast("dict[str, Any]", parse_json((run / CONFIG_FILE).read_text(encoding="utf-8"))["model"])
        if model.get("path") is not None:
            return read_tokenizer(Path(model["path"]))
        tokenizer = create_char_tokenizer(int(model.get("vocab_size", ModelSection().vocab_size)))
    except (OSError, ValueError, KeyError, TypeError, AssertionError):  # a file of another version: show ids
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
