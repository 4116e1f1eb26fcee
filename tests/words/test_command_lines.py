"""Whatever stands on a command line, or in the file of settings that it names, is parsed, refused by an error of the library, or ends with
the status of wrong usage; and nothing has been written by then."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reliability.damage import NASTY, damage
from integration.command import main
from integration.convert.__main__ import Arguments as ConvertArguments
from integration.doctor.__main__ import split_options
from integration.eval.__main__ import parse as parse_eval
from integration.gateway import HELP as GATEWAY_HELP
from integration.gateway import parse as parse_gateway
from integration.report.__main__ import Arguments as ReportArguments
from integration.settings.command_line import list_flags, name_as_typed, parse_command_line, parse_flags
from integration.settings.config import Config
from integration.settings.option_effects import list_options, spell_option
from integration.settings.reward_model import RewardModelConfig
from integration.simulate.__main__ import parse_arguments as parse_simulate
from integration.simulate.settings import Simulation
from integration.tinker import HELP as TINKER_HELP
from integration.tinker import parse as parse_tinker
from integration.train_reward_model import parse as parse_reward_model
from integration.view.__main__ import Arguments as ViewArguments
from rollouts.config_files import to_dict
from rollouts.errors import ConfigError, RolloutsError, make_safe, redact
from rollouts.gateway import GatewayConfig
from rollouts.tinker import TinkerConfig


@dataclass(frozen=True)
class Program:
    """A program of the command, with what its arguments are drawn from."""

    parse: Callable[[Sequence[str]], object]
    flags: tuple[str, ...]
    defaults: Any
    models: tuple[str, ...] = ()  # arguments in front of the options
    flat: bool = False

    def try_on(self, argv: Sequence[str]) -> str:
        """Parse arguments. Returns how it ended: accepted, refused, usage or help; raises all that must not be raised."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                self.parse(argv)
            except RolloutsError as error:
                told = make_safe(redact(name_as_typed(argv, self.defaults, str(error), flat=self.flat)))
                assert told.strip()
                return "refused"
            except SystemExit as stop:
                assert stop.code in (0, 2), stop.code
                return "usage" if stop.code else "help"
        return "accepted"


TRAIN = tuple(sorted(list_flags(Config())))
EVAL = tuple(
    map(spell_option, ("tasks", "n", "sampled", "k", "num_prompts", "threshold", "answer", "tokenizer", "json", "quiet", "config"))
)
SIMULATE = tuple(spell_option(name) for name in (*dict(list_options(Simulation())), "json", "picture"))
REWARD_MODEL = tuple(spell_option(name) for name in (*dict(list_options(RewardModelConfig())), "config", "resume", "quiet", "grace_s"))
DOCTOR = ("--rows", "--resume-timeout-s", "--json")


def find_flags(text: str) -> tuple[str, ...]:
    """Return the options that a help screen describes."""
    return tuple(re.findall(r"^  (--[\w.-]+)", text, flags=re.MULTILINE))


def list_fields(arguments: type[Any]) -> tuple[str, ...]:
    """Return the flags of a class of arguments."""
    return tuple(spell_option(field.name) for field in fields(arguments))


PROGRAMS = {
    "train": Program(parse_command_line, TRAIN, Config()),
    "eval": Program(parse_eval, (*TRAIN, *EVAL * 9), Config(), ("model",)),
    "train-reward-model": Program(parse_reward_model, REWARD_MODEL, RewardModelConfig()),
    "simulate": Program(parse_simulate, SIMULATE, Simulation(), flat=True),
    "gateway": Program(lambda argv: GatewayConfig(**parse_gateway(argv).settings), find_flags(GATEWAY_HELP), Config()),
    "tinker": Program(lambda argv: TinkerConfig(**parse_tinker(argv).settings), find_flags(TINKER_HELP), Config()),
    "doctor": Program(split_options, DOCTOR, Config()),
    "convert": Program(lambda argv: parse_flags(argv, ConvertArguments, "convert"), list_fields(ConvertArguments), Config(), ("a", "b")),
    "report": Program(lambda argv: parse_flags(argv, ReportArguments, "report"), list_fields(ReportArguments), Config(), ("run",)),
    "view": Program(lambda argv: parse_flags(argv, ViewArguments, "view"), list_fields(ViewArguments), Config(), ("run",)),
}
READ_FILES = ("train", "eval", "train-reward-model")  # those with --config

LONG = "a" * 5000
NUMBERS = st.one_of(st.integers(-3, 10), st.integers(-(10**400), 10**400), st.floats()).map(str)
WORDS = st.sampled_from(
    (
        "", " ", "-", "--", "---", "-1", "None", "True", "false", "nan", "-inf", "1e999", "9" * 5000, "0x1", "1_0", "\udc80", "\x1b[2J",
        "é\u2028\r\n", "{}", "[1]", "{" * 5000, "[" * 5000, "(" * 5000, "grpo(", "grpo(gamma=nan)", "grpo(" * 300, "x.py:f", "x.py:",
        ":", "/", ".", "..", "/dev/null", LONG, "a=b", "=", "a=", "rl", "rl.num_steps", "sort", "gsm8k=x", "http://[", "http://h:99999",
        "x=debug", "--help", "--help-all", "--no-quiet", "--rl.", "--rl.optimizer", "--rl.optimizer.lr.x", "--config", "--resume",
    )
)  # fmt: skip
VALUES = st.one_of(NUMBERS, WORDS, st.text("aé=.-[{0\n\udc80 ", max_size=6))
SETTINGS = to_dict(Config())
TOML = b'seed = 3\ntask = "sort"\n[rl]\nnum_steps = 5\nalgorithm = "grpo()"\n[rl.optimizer]\nlr = 1e-3\n[generation]\nstop = ["a"]\n'
FILES = {
    "settings.json": (json.dumps(SETTINGS).encode(), b'{\n "seed": 3,\n "rl": {"num_steps": 5, "optimizer": {"lr": 0.001}}\n}'),
    "settings.toml": (TOML, b"rl.optimizer.lr = nan\n", b"seed = [[1]]\n", b"model = 1979-05-27\n"),
    "settings.yaml": (b"seed: 3\n",), "settings": (b"",), "settings.JSON": (b"{}",),
}  # fmt: skip


class Drawn:
    """Choices that hypothesis makes, and can make smaller."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def below(self, number: int) -> int:
        return self._data.draw(st.integers(0, number - 1))


def draw_arguments(data: st.DataObject, program: Program) -> list[str]:
    """Draw the arguments of a program: options with and without values, misspelt ones, and words that belong to none."""
    argv = [*program.models]
    for _ in range(data.draw(st.integers(0, 4))):
        flag = data.draw(st.one_of(*[st.sampled_from(program.flags)] * 4, WORDS))
        flag = data.draw(st.sampled_from((*[flag] * 8, flag.replace("-", "_"), flag[:-1], flag + ".x")))
        values = data.draw(st.lists(VALUES, min_size=1, max_size=1) | st.lists(VALUES, max_size=2))
        argv += [f"{flag}={' '.join(values)}"] if data.draw(st.booleans()) else [flag, *values]
    return argv


def draw_file(data: st.DataObject, folder: Path) -> list[str]:
    """Write a file of settings, changed at some places, and return the option that names it."""
    name = data.draw(st.sampled_from(("settings.json", "settings.toml", *FILES)))
    if name == "settings.json" and data.draw(st.booleans()):  # another value of one setting
        settings = dict(list_options(Config()))
        *sections, last = data.draw(st.sampled_from(sorted(settings))).split(".")
        value: Any = {last: data.draw(st.sampled_from([one for one in NASTY if not (isinstance(one, str) and "\x00raw" in one)]))}
        for section in reversed(sections):
            value = {section: value}
        text = json.dumps(value).encode()
    else:
        text = damage(data.draw(st.sampled_from(FILES[name])), Drawn(data))
    (folder / name).write_bytes(text)
    return ["--config", str(folder / name)]


@pytest.fixture
def nowhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty current directory."""
    folder = tmp_path_factory.mktemp("nowhere")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_arguments_are_accepted_or_refused_and_nothing_is_written(name: str, nowhere: Path):
    program, ends = PROGRAMS[name], set[str]()

    @settings(max_examples=settings.default.max_examples // (4 if name in READ_FILES else 1))  # whose many settings take time
    @given(data=st.data())
    def try_some(data: st.DataObject) -> None:
        ends.add(program.try_on(draw_arguments(data, program)))

    try_some()
    assert ends & {"refused", "usage"}
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize("name", READ_FILES)
def test_any_file_of_settings_is_accepted_or_refused_and_nothing_is_written(name: str, nowhere: Path, tmp_path: Path):
    program, ends = PROGRAMS[name], set[str]()

    @settings(max_examples=settings.default.max_examples // 2)
    @given(data=st.data())
    def try_some(data: st.DataObject) -> None:
        ends.add(program.try_on([*program.models, *draw_file(data, tmp_path)]))

    try_some()
    assert "refused" in ends
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_usual_arguments_are_accepted(name: str, nowhere: Path):
    program = PROGRAMS[name]
    usual = {"eval": ["--task", "sort"], "doctor": ["--rows", "3"], "convert": [], "report": [], "view": []}.get(name, ["--seed", "3"])
    assert program.try_on([*program.models, *usual]) == "accepted"
    if name != "doctor":  # which leaves other options to train
        assert program.try_on([*program.models, "--seed", "x"]) in ("usage", "refused")
        assert program.try_on([*program.models, "--help"]) == "help"


# -- defects that were found so


@pytest.mark.parametrize(
    "argv", [["--config", LONG], ["--config", LONG + ".toml"], ["--config", LONG + ".py"], ["--resume", "--output-dir", LONG]]
)
def test_a_name_longer_than_any_file_can_have_is_refused(argv: list[str]):
    with pytest.raises(ConfigError, match=r"does not exist: give|nothing to resume"):
        parse_command_line(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["tinker", LONG],
        ["train", "--model.path", LONG],
        ["train", "--reward.function", LONG + ".py:f", "--dry-run"],
    ],
)
def test_a_path_longer_than_any_file_can_have_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str], nowhere: Path):
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert re.search(r"error: a{40}\.\.\. \(50\d\d characters\) is longer than the name of a file can be", told), told[:200]
    assert list(nowhere.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["doctor", "--rows", "inf"], "--rows is inf, expected a whole number of at least 1"),
        (["doctor", "--rows", "nan"], "--rows is nan, expected a whole number of at least 1"),
        (["doctor", "--resume-timeout-s", "nan"], "--resume-timeout-s is nan, expected at least 0 seconds"),
        (["convert", "here", "there", "--max-file-gib", "inf"], "--max-file-gib is inf, expected a number above 0, or None"),
        (["report", "here", "--serve", "--port", "99999"], "--port is 99999, expected 0 to 65535"),  # was taken for 34463
    ],
)
def test_numbers_without_a_meaning_are_refused(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_a_file_of_settings_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "settings.toml"
    path.write_bytes(TOML)
    monkeypatch.setattr(Path, "read_text", lambda self, **options: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigError, match=r"settings\.toml cannot be read: Permission denied: mend that"):
        parse_command_line(["--config", str(path)])
