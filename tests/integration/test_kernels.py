"""The kernels of linear layers: chosen once by the processor, recorded, and kept by a run that goes on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import trio

from integration.parts.models import fix_hardware
from integration.run.directory import prepare_directory
from integration.settings.command_line import CONFIG_FILE, parse_command_line
from integration.settings.config import Config, find_kernels
from integration.settings.sections.model import ModelSection
from rollouts.errors import ConfigError
from rollouts.models import linear
from rollouts.training.saving.checkpoints import save_checkpoint
from rollouts.training.saving.run_state import RunState


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the processor asks for; tests change it, as another machine would."""
    chosen = ["onednn"]
    monkeypatch.setattr(linear, "choose_kernels", lambda device: chosen[0])
    return chosen


def test_deterministic_keeps_torchs_kernels(choice: list[str]):
    assert Config().kernels == "onednn"
    assert Config(deterministic=True).kernels == "torch"
    assert fix_hardware(Config(deterministic=True)).model.kernels == "torch"
    assert Config(model=ModelSection(kernels="torch")).kernels == "torch"
    for kernels in ("onednn", "packed"):
        with pytest.raises(ConfigError, match=rf"model\.kernels is '{kernels}', expected auto or torch with --deterministic"):
            Config(deterministic=True, model=ModelSection(kernels=kernels))


async def write_nothing(directory: Path) -> None:
    """Write a checkpoint without weights."""


def prepare(directory: Path, config: Config, *, resume: bool) -> None:
    checkpoints = directory / "sft"
    prepare_directory(
        directory, fix_hardware(config), {"mode": "sft"}, resume=resume, may_change=(), checkpoint_dirs=[checkpoints], tell=print
    )


def test_the_choice_is_recorded_and_kept(choice: list[str], tmp_path: Path):
    directory = tmp_path / "run"
    prepare(directory, Config(output_dir=str(directory)), resume=False)
    assert json.loads((directory / CONFIG_FILE).read_text())["model"]["kernels"] == "onednn"
    choice[0] = "torch"  # the run goes on on another machine
    resumed = parse_command_line(["--output-dir", str(directory), "--resume", "--mode", "sft"]).config
    assert resumed.kernels == "onednn"


def test_a_run_of_a_version_without_the_setting_goes_on_with_torchs(choice: list[str], tmp_path: Path):
    directory = tmp_path / "run"
    prepare(directory, Config(output_dir=str(directory)), resume=False)
    saved = json.loads((directory / CONFIG_FILE).read_text())
    del saved["model"]["kernels"], saved["deterministic"]
    (directory / CONFIG_FILE).write_text(json.dumps(saved))
    resumed = parse_command_line(["--output-dir", str(directory), "--resume", "--mode", "sft"]).config
    assert resumed.kernels == "torch"
    state = RunState(stage="sft", step=1, metrics_bytes=0).to_dict()
    write_checkpoint = partial(save_checkpoint, directory / "sft", 1, write=write_nothing, run_state=state)
    trio.run(write_checkpoint)
    with pytest.raises(ConfigError, match=r"model\.kernels: 'torch' -> 'onednn'"):  # from a file of settings, which leaves it open
        prepare(directory, Config(output_dir=str(directory)), resume=True)
    prepare(directory, resumed, resume=True)
    assert json.loads((directory / CONFIG_FILE).read_text())["model"]["kernels"] == "torch"


def test_a_choice_of_the_user_stays(choice: list[str]):
    assert find_kernels(ModelSection(kernels="torch")) == "torch"
    assert find_kernels(ModelSection(kernels="onednn")) == "onednn"
