"""Completion of the command in a shell, with the shell itself."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from integration.command import PROGRAMS
from integration.completion import main, read_options
from integration.settings.config import Config
from integration.settings.option_effects import list_options, spell_option


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "rollouts.bash"
    with path.open("w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        assert main(["bash"]) == 0
    return path


def press_tab(script: Path, typed: str) -> str:
    """Return the words after `rollouts` that an interactive bash runs when a line is typed, with Tab for each tabulator in it."""
    reader, writer = pty.openpty()
    quiet = dict(os.environ, PS1="", PS2="", TERM="dumb", HOME=str(script.parent), INPUTRC="/dev/null")
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=writer, stdout=writer, stderr=writer, env=quiet, cwd=script.parent
    )
    os.close(writer)
    try:
        answer = script.with_suffix(".answer")
        answer.unlink(missing_ok=True)
        os.write(reader, f"source {script}; rollouts() {{ printf '%s ' \"$@\" > {answer}; }}; echo ready$((1 + 1))\n".encode())
        seen, deadline = b"", time.monotonic() + 30
        while b"ready2" not in seen and time.monotonic() < deadline:
            if select.select([reader], [], [], 1)[0]:
                seen += os.read(reader, 4096)
        os.write(reader, f"rollouts {typed}\nexit\n".encode())
        while time.monotonic() < deadline and shell.poll() is None:  # read on, or bash would wait for room in the terminal
            try:
                if select.select([reader], [], [], 0.1)[0]:
                    os.read(reader, 4096)
            except OSError:  # the shell has closed the terminal
                break
        shell.wait(timeout=10)
        return answer.read_text().strip()
    finally:
        shell.kill()
        shell.wait()
        os.close(reader)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("vi\t", "view"),
        ("train --rl.optimizer.sch\t", "train --rl.optimizer.schedule"),
        ("train --rl.optimizer.schedule lin\t", "train --rl.optimizer.schedule linear"),
        ("train --task grid\t --mode sft+r\t", "train --task grid_world --mode sft+rl"),
        ("train --dry-run --lora.ra\t 8", "train --dry-run --lora.rank 8"),
        ("view --min\t 0.5", "view --min-reward 0.5"),
        ("completion zs\t", "completion zsh"),
        ("train --config ./rollouts.ba\t", "train --config ./rollouts.bash"),  # files where no list is known
    ],
)
def test_bash_completes_programs_options_values_and_files(typed: str, completed: str, bash_script: Path):
    assert press_tab(bash_script, typed) == completed


def test_each_setting_is_completed(bash_script: Path):
    words = set(bash_script.read_text().split('words="')[2].split('"')[0].split())
    assert {spell_option(name) for name, _ in list_options(Config())} - words == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_of_other_shells_name_each_program(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main([shell]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PROGRAMS)
    assert "rl.optimizer.schedule" in out


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bsh"]) == 2
    assert "unknown shell 'bsh': did you mean 'bash'?" in capsys.readouterr().err
    assert main([]) == 2


def test_options_are_read_from_a_help():
    text = "  --mode sft|rl|sft+rl   stages\n│ --order {fifo,lifo}  order │\n│ --a.flag, --a.no-flag  text │\n  --config FILE   a file\n"
    assert read_options(text) == {
        "--help": (), "--mode": ("sft", "rl", "sft+rl"), "--order": ("fifo", "lifo"), "--a.flag": (), "--a.no-flag": (), "--config": (),
    }  # fmt: skip
