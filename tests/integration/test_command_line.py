"""From arguments to a mode and a configuration."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytest
from forked import run

from integration.settings.command_line import (
    CONFIG_FILE,
    RUN_FILE,
    _Arguments,
    _parse,
    list_flags,
    narrow,
    parse_command_line,
    parse_flags,
    print_all_options,
    widen,
)
from integration.settings.config import Config
from integration.settings.help_text import list_sections as show_sections
from integration.settings.help_text import show_help
from integration.settings.made.library import create_model_config
from integration.settings.option_effects import COMMAND_OPTIONS, find_changes, list_options, spell_option
from integration.settings.reward_model import RewardModelConfig
from integration.settings.sections.model import ModelSection
from integration.settings.sections.stages import RLSection, SFTSection
from integration.settings.task_defaults import create_default_config, find_default
from integration.simulate.settings import Simulation
from integration.train import main
from rollouts.config import OptimizerConfig
from rollouts.config_files import save_config
from rollouts.errors import ConfigError

ROOT = Path(__file__).parents[2]


def exit_message(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a command line that ends with status 2, without the frame around it."""
    with pytest.raises(SystemExit) as ended:
        parse_command_line(argv)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    return " ".join((printed.out + printed.err).replace("│", " ").split())


def test_no_arguments_mean_the_default_job():
    command = parse_command_line([])
    assert command.mode == "sft+rl"
    assert command.config == Config()
    assert (command.resume, command.dry_run, command.quiet) == (False, False, False)


def test_each_setting_has_a_flag():
    argv = ["--mode", "rl", "--seed", "3", "--rl.num-steps", "4", "--sft.optimizer.lr", "0.5", "--generation.stop", "a", "b", "--quiet"]
    command = parse_command_line([*argv, "--dry-run", "--output-dir=out", "--rl.algorithm", "rloo", "--evaluation.no-sampled"])
    config = command.config
    assert (command.mode, command.quiet, command.dry_run) == ("rl", True, True)
    assert (config.seed, config.output_dir, config.rl.num_steps, config.rl.algorithm) == (3, "out", 4, "rloo")
    assert (config.sft.optimizer.lr, config.generation.stop, config.evaluation.sampled) == (0.5, ("a", "b"), False)
    assert config.sft.optimizer.schedule == Config().sft.optimizer.schedule, "other settings of the section keep their defaults"


def list_settings(section: type[Any], where: str = "") -> dict[str, Any]:
    """Each setting below a section, by the name that it has on the command line, with its type."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        inner = [one for one in (kind, *get_args(kind)) if is_dataclass(one) and isinstance(one, type)]
        name = where + name.replace("_", "-")
        found |= {key: value for one in inner for key, value in list_settings(one, f"{name}.").items()} if inner else {name: kind}
    return found


def test_options_are_spelled_as_the_command_takes_them():
    settings, wrong = list_settings(Config) | list_settings(RewardModelConfig), list[str]()
    option = re.compile(r"--((?:[a-z][a-z-]*\.)+[a-z][a-z0-9-]*)(?:[ =]+([A-Za-z0-9_+-]+))?(\.)?")
    files = [path for folder in ("rollouts", "integration", "examples", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files):
        for found in option.finditer(path.read_text()) if path.suffix in {".py", ".md", ".toml", ".ipynb"} else ():
            name, value, more = found.groups()
            switch = settings.get(re.sub(r"\.no-([a-z-]+)$", r".\1", name)) is bool
            is_section = bool(more) and any(key.startswith(f"{name}.") for key in settings)
            choices = get_args(settings.get(name)) if get_origin(settings.get(name)) is Literal else ()
            if not (name in settings or switch or is_section or name == "section.field"):
                wrong.append(f"{path.relative_to(ROOT)}: {found.group()} is no option")
            elif value and (value.lower() in {"true", "false", "1", "0"} if switch else choices and value not in (*choices, "out")):
                wrong.append(f"{path.relative_to(ROOT)}: {found.group()} has a value that it does not take")
    assert len(settings) > 100 and wrong == []


def spell_value(name: str, value: Any) -> list[str]:
    """Arguments that change a setting, or may; none for those whose values are no single word."""
    if isinstance(value, bool):
        section, dot, last = name.rpartition(".")
        return [spell_option(f"{section}{dot}no_{last}" if value else name)]
    if value is None or not isinstance(value, int | float | str):
        return []
    return [spell_option(name), str(value + 1 if isinstance(value, int) else "a" if value == "" else value)]


@pytest.mark.parametrize("part", range(16))
def test_the_parser_of_the_options_that_are_named_reads_what_that_of_all_options_reads(part: int):
    default = Config()
    default = replace(default, rl=replace(default.rl, num_steps=3))  # of a file of settings, say
    options = [spell_value(name, value) for name, value in list_options(default)]
    argv = ["--mode", "rl", *(word for words in options[part::16] for word in words)]
    outcomes: list[object] = []
    for parse in (
        lambda: _parse(argv, _Arguments(config=default), "x"),
        lambda: widen(_Arguments(config=default), _narrowly(argv, default)),
    ):
        try:
            outcomes.append(parse())
        except ConfigError as error:
            outcomes.append(str(error))
    assert len(argv) > 10 and outcomes[0] == outcomes[1]


def _narrowly(argv: list[str], default: Config) -> Any:
    narrowed = narrow(_Arguments(config=default), argv)
    assert len(dict(list_options(narrowed))) < len(dict(list_options(default))) / 3
    return _parse(argv, narrowed, "x")


@pytest.mark.parametrize(
    "argv",
    [
        ["--rl.num_steps=3", "--seed", "1", "--seed=2"],
        ["--rl.asynchronous.no-enabled", "--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness=7"],
        ["--generation.stop", "a", "b", "--generation.temperature", "0.5"],
        ["--engine.urls", "http://a:1", "http://b:2", "--engine.kind", "vllm", "--data.path=x.jsonl", "--model.path", "y"],
    ],
)
def test_spellings_of_options_are_read_alike_by_a_parser_of_some_and_of_all(argv: list[str]):
    whole = _Arguments(config=Config())
    assert widen(whole, _parse(argv, narrow(whole, argv), "x")) == _parse(argv, whole, "x") != whole


@dataclass(frozen=True, kw_only=True)
class Picky:
    """Settings whose check writes, and ends with an error that is none of the library's."""

    inner: OptimizerConfig = field(default_factory=OptimizerConfig)
    number: int = 1

    def __post_init__(self) -> None:
        sys.stderr.write(f"the number is {self.number}\n")
        if self.number > 2:
            raise ValueError("it is too large")


def test_checks_that_write_or_end_with_another_error_are_told_as_by_a_parser_of_all_options(capsys: pytest.CaptureFixture[str]):
    default = Picky()
    capsys.readouterr()
    assert parse_flags(["--number", "2"], default, "x").number == 2
    assert "the number is 2\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse_flags(["--number", "3"], default, "x")
    assert "it is too large" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--skip-bad-rows"], ["--data.skip-bad-rows"]])
def test_skip_bad_rows_has_a_short_form(flags: list[str]):
    assert parse_command_line(flags).config.data.skip_bad_rows


def test_bringing_data_chooses_the_task_for_them():
    assert parse_command_line(["--data.path", "my.jsonl", "--model.path", "dir"]).config.task == "jsonl"
    assert parse_command_line(["--data.path", "my.jsonl", "--model.path", "dir", "--task", "gsm8k"]).config.task == "gsm8k"
    assert parse_command_line(["--data.path", "my.jsonl", "--task", "sort"]).config.task == "sort"
    with pytest.raises(ConfigError, match=r"give --model\.path DIR"):
        parse_command_line(["--data.path", "my.jsonl"])


def test_a_misspelt_flag_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    assert "Perhaps you meant: --rl.num-steps" in exit_message(["--rl.num-step", "3"], capsys)


def test_an_option_that_is_like_none_of_its_section_is_answered_with_those(capsys: pytest.CaptureFixture[str]):
    told = exit_message(["--evaluation.interval", "5"], capsys)
    assert "--evaluation.interval: settings of this section are --evaluation.num-prompts, --evaluation.sampled; --help evaluation" in told
    assert "--rl.foo.bar: settings of this section are --rl.algorithm, " in exit_message(["--rl.foo.bar", "5"], capsys)
    assert "Perhaps" not in exit_message(["--no-sed"], capsys)
    assert "settings of this section" not in exit_message(["--evaluating.interval", "5"], capsys)


def test_similar_options_are_those_of_a_similar_whole_or_last_part_and_the_values_of_flags_are_no_options(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit, match="2"):
        parse_command_line(["--seeed", "3", "--num_steps=3", "--nothing-like-it", "--seed", "1", "--engine.extra-args=--seed=1"])
    assert capsys.readouterr().err.splitlines() == [
        "error: Unrecognized options: --seeed, --num_steps, --nothing-like-it",
        "  --seeed: Perhaps you meant: --seed",
        "  --num_steps: Perhaps you meant: --rl.num-steps, --preference.num-steps, --sft.num-steps",
        "  python -m integration.train --help lists the options",
    ]


@pytest.mark.parametrize("value", ["--- end", "---", "-- y", "--9", "a=b"])
def test_a_value_that_begins_with_hyphens_is_one(value: str):
    assert parse_command_line(["--generation.stop", value]).config.generation.stop == (value,)


def test_a_value_that_looks_like_a_flag_is_written_behind_an_equals_sign(capsys: pytest.CaptureFixture[str]):
    told = exit_message(["--generation.stop", "--end of"], capsys)
    assert "--end of: As a value of --generation.stop write '--generation.stop=--end of'" in told
    assert parse_command_line(["--generation.stop=--end of"]).config.generation.stop == ("--end of",)
    assert "As a value" not in exit_message(["--quiet", "--seeed", "4"], capsys)


def test_all_options_of_the_help_are_known():
    lines = [line.strip() for line in print_all_options().splitlines()]
    flags = {
        flag
        for line in lines
        if line.startswith(("--", "-h"))
        for flag in re.findall(r"(?:^|, )(--[a-z][^ ,=]+)(?![^ ,])", line.partition("  ")[0])
    }
    assert {"--rl.num-steps", "--rl.no-dropout", "--no-resume", "--help"} <= flags
    assert flags <= list_flags(Config()), "options that the command would refuse"


def test_a_misspelt_flag_is_refused_without_the_descriptions_of_options(monkeypatch: pytest.MonkeyPatch):
    def parse(*given: Any) -> None:
        raise AssertionError("takes half a second")

    monkeypatch.setattr("integration.settings.command_line.parse_flags", parse)
    with pytest.raises(SystemExit):
        parse_command_line(["--seeed", "3"])


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "Unrecognized options: --rk.num-steps" in exit_message(["--rk.num-steps", "3"], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sft.num-steps", "many"], "many"),
        (["--sft.optimizer.schedule", "lin"], "'linear'"),
    ],
)
def test_a_value_of_the_wrong_type_ends_with_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert message in exit_message(argv, capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mode", "sfft"], "unknown mode 'sfft': did you mean 'sft'"),
        (["--rl.num-minibatches", "7"], "512 rows do not divide into rl.num_minibatches = 7"),
        (["--backend.kind", "fdsp"], "unknown backend.kind 'fdsp': did you mean 'fsdp'"),
        (["--rl.algorithm", "grp"], r"^unknown algorithm 'grp': did you mean 'grpo'\?"),
        (["--rl.algorithm", "decoupled(dapo(clip_hi=1))"], "^dapo was given an unknown argument 'clip_hi'"),
        (["--task", "srt"], "unknown task 'srt': did you mean 'sort'"),
        (["--resume"], "--resume needs --output-dir"),
        (["--resume", "--output-dir", "nowhere"], "nowhere has no config.json"),
        (["--config", "nothing.toml"], "configuration file nothing.toml does not exist"),
    ],
)
def test_other_mistakes_raise_one_message(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=message):
        parse_command_line(argv)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "decoupled(dapo(clip_hi=0.3))",
            (
                "decoupled(dapo(clip_hi=0.3))",
                "error: dapo was given an unknown argument 'clip_hi' (did you mean 'clip_high'?), at column 16",
            ),
        ),
        ("dapo(clip_low=3)", "error: dapo(clip_low=3): clip_low is 3.0, expected in [0, 1)"),
        ("own.py:own", "error: own.py:own raised KeyError: 'x' ("),
    ],
)
def test_what_is_wrong_with_an_algorithm_is_said_in_one_line_as_everything_else(
    expression: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def own():\n    return {}['x']\n")
    assert main(["--rl.algorithm", expression, "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(message) and printed.err.count("\n") == 1
    assert expression != "own.py:own" or printed.err.endswith("own.py:2)\n")


PYTHON = """
from integration.settings.config import Config
from integration.settings.sections.stages import RLSection

config = Config(seed=5, rl=RLSection(num_steps=2, prompts_per_step=4))
"""
TOML = "seed = 5\n[rl]\nnum_steps = 2\nprompts_per_step = 4\n"
JSON = json.dumps({"seed": 5, "rl": {"num_steps": 2, "prompts_per_step": 4}})


@pytest.mark.parametrize(("name", "text"), [("c.py", PYTHON), ("c.toml", TOML), ("c.json", JSON)])
def test_settings_come_from_a_file_and_flags_override_them(name: str, text: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    config = parse_command_line(["--config", str(path), "--rl.num-steps", "9"]).config
    assert (config.seed, config.rl.num_steps, config.rl.prompts_per_step) == (5, 9, 4)
    assert parse_command_line([f"--config={path}"]).config.rl.num_steps == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "[rl]\nnum_step = 2\n", r"rl\.num_step.*did you mean 'num_steps'"),
        ("c.json", '{"rll": {}}', r"rll.*did you mean 'rl'"),
        ("c.json", '{"seed": "five"}', "seed"),
        ("c.json", "{", "cannot read the configuration"),
        ("c.toml", "seed = ", "is not valid TOML"),
        ("c.py", "settings = 1\n", "must define `config = Config"),
        ("c.py", "config = (\n", "cannot be imported"),
        ("c.yaml", "seed: 1\n", "use .py, .toml or .json"),
    ],
)
def test_a_file_with_a_mistake_is_named_with_it(name: str, text: str, message: str, tmp_path: Path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_command_line(["--config", str(path)])


@pytest.mark.parametrize("flag", ["--output-dir", "--output_dir"])
def test_a_resumed_run_keeps_its_settings_and_its_mode(flag: str, tmp_path: Path):
    kernels = ModelSection(kernels="torch")  # as a run records them
    started = Config(
        seed=9, output_dir=str(tmp_path), model=kernels, rl=RLSection(num_steps=3), sft=SFTSection(optimizer=OptimizerConfig(lr=1e-3))
    )
    save_config(started, tmp_path / CONFIG_FILE)
    (tmp_path / RUN_FILE).write_text(json.dumps({"mode": "rl"}))
    command = parse_command_line(["--resume", flag, str(tmp_path)])
    assert command.resume and command.mode == "rl"
    assert command.config == started
    assert parse_command_line(["--resume", flag, str(tmp_path), "--rl.num-steps", "5"]).config.rl.num_steps == 5


def test_a_run_killed_while_it_was_made_asks_for_its_mode(tmp_path: Path):
    save_config(Config(output_dir=str(tmp_path)), tmp_path / CONFIG_FILE)
    with pytest.raises(ConfigError, match=r"run\.json does not state the mode of the run .* add --mode"):
        parse_command_line(["--resume", "--output-dir", str(tmp_path)])
    assert parse_command_line(["--resume", "--output-dir", str(tmp_path), "--mode", "sft"]).mode == "sft"


def read_help(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_command_line(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_one_screen_that_names_the_sections_and_the_options_of_the_command(capsys: pytest.CaptureFixture[str]):
    printed = read_help(capsys, "--help")
    assert printed == read_help(capsys, "--seed", "3", "-h") and len(printed.splitlines()) <= 55
    sections = {name.partition(".")[0] for name, _ in list_options(Config()) if "." in name}
    assert all(f"\n  {name} " in printed for name in sections)
    alone = {*COMMAND_OPTIONS, *(name for name, _ in list_options(Config()) if "." not in name)}
    assert {name for name in alone if spell_option(name) not in printed} == set()


@pytest.mark.parametrize("section", ["sft", "rl.optimizer", "engine", "on_bad"])
def test_help_of_a_section_has_its_settings_and_those_inside_alone(section: str, capsys: pytest.CaptureFixture[str]):
    printed = read_help(capsys, "--help", section)
    shown = set(re.findall(r"^  (--[\w.-]+)", printed, re.MULTILINE))
    assert shown == {spell_option(name) for name, _ in list_options(Config()) if name.startswith(section + ".")}
    assert "default: " in printed and "-----" not in printed


def test_help_of_an_unknown_section_suggests_one():
    with pytest.raises(ConfigError, match=r"--help knows no section 'sff': did you mean 'sft'"):
        parse_command_line(["--help", "sff"])


def test_each_section_of_the_screen_has_a_help(capsys: pytest.CaptureFixture[str]):
    everything = print_all_options()
    for section in ("on_bad", "on-bad", "rl.kl_control", "rl.kl-control", *show_sections()):
        assert f"  --{section.replace('_', '-')}." in str(show_help(["--help", section], lambda: print(everything))), section


def test_a_section_given_as_an_option_is_told_with_its_settings(capsys: pytest.CaptureFixture[str]):
    for flag in ("--on-bad", "--on_bad"):
        with pytest.raises(SystemExit, match="2"):
            parse_command_line([flag, "skip"])
        told = capsys.readouterr().err
        assert f"{flag} is a section: its settings are --on-bad.all-masked, " in told and "; --help on_bad lists them" in told


def test_help_all_explains_each_setting(capsys: pytest.CaptureFixture[str]):
    printed = read_help(capsys, "--help-all")
    assert "--rl.num-steps" in printed and "resume the interrupted run" in printed and "rollout batches" in printed


def list_sections(kind: type) -> set[type]:
    """Return a dataclass of settings and those inside it."""
    inner = {one for hint in get_type_hints(kind).values() for one in (hint, *get_args(hint)) if is_dataclass(one)}
    return {kind}.union(*(list_sections(cast("type", one)) for one in inner))


@pytest.mark.parametrize("kind", [Config, RewardModelConfig, Simulation], ids=lambda kind: kind.__name__)
def test_no_text_of_a_setting_is_cut(kind: type):
    """The text of a setting stands behind it or above it: of a text behind it the lines below would be lost."""
    setting = re.compile(r"    \w+: .* # ")
    for section in list_sections(kind):
        lines = inspect.getsource(section).partition("    def ")[0].splitlines()
        for first, below, next_one in zip(lines, lines[1:], lines[2:], strict=False):
            assert not (setting.match(first) and below.startswith("    # ") and setting.match(next_one)), f"{section.__name__}: {first}"


UNREAD = """
import importlib, os, sys

module, *argv = sys.argv[1:]
reads, writes = os.pipe()
os.dup2(writes, 1)
os.close(reads)
sys.stdout = os.fdopen(1, "w", closefd=False)
sys.exit(importlib.import_module(module).main(argv))
"""


def test_no_section_of_the_help_borrows_the_words_of_a_setting(capsys: pytest.CaptureFixture[str]):
    """A comment above a setting would also describe a section that stands directly below it without one of its own."""
    _, *parts = re.split(r"^ (\S+) options *$", read_help(capsys, "--help-all"), flags=re.MULTILINE)
    bodies = [" ".join(body.split()) for body in parts[1::2]]
    settings = [text for body in bodies for text in re.split(r" --\S+", body)[1:]]
    for name, body in zip(parts[::2], bodies, strict=True):
        heading = body.split(" --")[0].strip(" -")
        assert not [text for text in settings if heading and heading in text], name


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("train", "--help"),
        ("train", "--help-all"),
        ("train", "--dry-run"),
        ("train_reward_model", "--help"),
        ("simulate.__main__", "--help"),
        ("view.__main__", "--help"),
    ],
)
def test_a_reader_of_stdout_may_close_it(command: str, flag: str, tmp_path: Path):
    assert run(UNREAD, f"integration.{command}", flag, folder=tmp_path) == (0, "", "")


STARTED = """
import importlib.abc, os, signal, sys

answer, interrupted, *argv = sys.argv[1:]
signal.signal(signal.SIGINT, {"ignored": signal.SIG_IGN, "own": signal.default_int_handler}[answer])
for name in ("run.job", "dry_run.checks", "settings.command_line", "train"):
    sys.modules.pop(f"integration.{name}", None)
    package, _, module = f"integration.{name}".rpartition(".")
    vars(sys.modules.get(package, sys)).pop(module, None)

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from integration.train import main
try:
    sys.exit(main(argv))
finally:
    print("job is imported" if "integration.run.job" in sys.modules else "job is not imported")
"""  # gets Ctrl-C when it begins to import a module


@pytest.mark.parametrize(
    ("module", "flag"),
    [("integration.settings.command_line", "--dry-run"), ("integration.dry_run.checks", "--dry-run"), ("integration.run.job", "--quiet")],
)
def test_ctrl_c_while_a_command_is_imported_ends_it_with_a_word(module: str, flag: str, tmp_path: Path):
    assert run(STARTED, "own", module, flag, folder=tmp_path) == (130, "", "interrupted\n")


def test_where_ctrl_c_is_ignored_it_stays_so_while_a_command_is_imported(tmp_path: Path):
    status, out, error = run(STARTED, "ignored", "integration.dry_run.checks", "--dry-run", folder=tmp_path)
    assert (status, error) == (0, "") and "nothing was run" in out


@pytest.mark.parametrize(("flags", "status"), [(["--help"], 0), (["--mode", "nonsense"], 2)])
def test_what_ends_with_the_arguments_imports_nothing_of_the_job(flags: list[str], status: int, tmp_path: Path):
    found, out, _ = run(STARTED, "own", "", *flags, folder=tmp_path)
    assert (found, out.splitlines()[-1]) == (status, "job is not imported")


LOADED = """
import sys
from integration.train import main
main(["--dry-run"])
heavy = ("transformers", "tokenizers", "torch.distributed.tensor", "httpx", "integration.run.job")
print([name for name in heavy if name in sys.modules])
"""


def test_a_dry_run_of_the_default_job_imports_torch_and_no_part_of_a_run(tmp_path: Path):
    command = [sys.executable, "-c", LOADED]  # a new process, in which nothing is imported
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "nothing was run" in done.stdout and done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A directory as far as settings read it: a model whose vocabulary is no alphabet."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text('{"vocab_size": 151936}')
    return tmp_path / "own"


def test_a_resumed_run_with_its_file_of_settings_has_the_same_defaults(own_model: Path):
    file, run = own_model.parent / "a.toml", own_model.parent / "run"
    file.write_text(f'[model]\npath = "{own_model}"\n')
    first = parse_command_line(["--config", str(file)]).config
    run.mkdir()
    save_config(first, run / "config.json")
    (run / "run.json").write_text('{"mode": "sft"}')
    again = parse_command_line(["--config", str(file), "--resume", "--output-dir", str(run)]).config
    assert replace(again, output_dir=None) == first


def find_rates(config: Config) -> tuple[float, float, float]:
    return config.sft.optimizer.lr, config.rl.optimizer.lr, config.critic.optimizer.lr


@pytest.mark.parametrize("task", ["sort", "grid_world", "calculator"])
def test_a_model_of_the_users_own_has_learning_rates_of_a_pretrained_model(task: str, own_model: Path):
    builtin = parse_command_line(["--task", task]).config
    assert min(find_rates(builtin)) >= 1e-4
    config = parse_command_line(["--task", task, "--model.path", str(own_model)]).config
    assert find_rates(config) == (1e-5, 1e-6, 1e-5)
    assert config.rl.prompts_per_step == min(builtin.rl.prompts_per_step, 32)
    assert find_rates(parse_command_line(["--task", task, f"--model.path={own_model}", "--lora.rank", "8"]).config)[:2] == (1e-4, 1e-5)
    given = parse_command_line(["--task", task, "--model.path", str(own_model), "--rl.optimizer.lr", "3e-6"]).config
    assert find_rates(given) == (1e-5, 3e-6, 1e-5)


@pytest.mark.parametrize(("task", "rate"), [("sort", 3e-5), ("grid_world", 3e-4), ("calculator", 1.5e-4)])
def test_online_dpo_has_a_learning_rate_of_its_own(task: str, rate: float, own_model: Path):
    flags = ["--task", task, "--algorithm", "online_dpo(loss=ipo)"]
    command = parse_command_line(flags)
    usual = parse_command_line(["--task", task]).config
    assert find_rates(command.config) == (usual.sft.optimizer.lr, rate, usual.critic.optimizer.lr)
    assert command.find_idle_options() == [] and find_changes(command.config, find_default(command.config)) == {"rl.algorithm"}
    assert parse_command_line([*flags, "--lora.rank", "8"]).config.rl.optimizer.lr == usual.rl.optimizer.lr  # adapters take more
    assert parse_command_line([*flags, "--rl.optimizer.lr", "1e-4"]).config.rl.optimizer.lr == 1e-4
    assert find_rates(parse_command_line([*flags, "--model.path", str(own_model)]).config) == (1e-5, 5e-7, 1e-5)
    assert parse_command_line([*flags, f"--model.path={own_model}", "--lora.rank=8"]).config.rl.optimizer.lr == 5e-6
    path = own_model.parent / "a.toml"
    path.write_text(f'task = "{task}"\n[rl]\nalgorithm = "online_dpo"\n')
    assert parse_command_line(["--config", str(path)]).config.rl.optimizer.lr == rate
    assert parse_command_line(["--config", str(path), "--algorithm", "grpo"]).config.rl.optimizer.lr == usual.rl.optimizer.lr


def test_a_checkpoint_of_the_built_in_model_keeps_its_defaults(tmp_path: Path):
    create_model_config(ModelSection()).save_pretrained(tmp_path)
    assert find_rates(parse_command_line(["--model.path", str(tmp_path)]).config) == find_rates(Config())


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", '[model]\npath = "{}"\n[rl]\nnum_steps = 7\n'), ("a.json", '{{"model": {{"path": "{}"}}, "rl": {{"num_steps": 7}}}}')],
)
def test_a_file_of_settings_that_names_a_model_has_its_defaults(name: str, text: str, own_model: Path):
    path = own_model.parent / name
    path.write_text(text.format(own_model))
    config = parse_command_line(["--config", str(path)]).config
    assert (find_rates(config), config.rl.num_steps, config.rl.eval_every) == ((1e-5, 1e-6, 1e-5), 7, 10)


def test_a_file_of_settings_that_names_a_task_has_its_defaults(tmp_path: Path):
    (tmp_path / "a.toml").write_text('task = "grid_world"\n[rl]\nnum_steps = 7\n')
    expected = create_default_config("grid_world")
    assert parse_command_line(["--config", str(tmp_path / "a.toml")]).config == replace(expected, rl=replace(expected.rl, num_steps=7))


def test_defaults_of_an_own_model_are_no_options_without_effect(own_model: Path):
    command = parse_command_line(["--mode", "rl", "--model.path", str(own_model)])
    assert command.find_idle_options() == []


def test_json_is_about_a_dry_run():
    with pytest.raises(ConfigError, match="--json is about the output of a dry run: add --dry-run"):
        parse_command_line(["--json"])
