"""Pages whose blocks are what a user would write: files, commands, and the text that the commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forked import run
from warm_commands import find_programs

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Command:
    """A block of commands, and the lines that a page says they print."""

    script: str
    printed: str | None  # None = the page shows nothing


def read_blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return BLOCK.findall(page.read_text())


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the blocks that begin with `# NAME` as files. Returns the names."""
    names: list[str] = []
    for _, text in read_blocks(page):
        found = re.match(r"# ([\w-]+\.\w+)\n", text)
        if found:
            (folder / found[1]).write_text(text)
            names.append(found[1])
    return names


def list_commands(page: Path) -> Iterator[Command]:
    """The blocks of commands, each with the block of text that follows it."""
    blocks = read_blocks(page)
    for k, (language, text) in enumerate(blocks):
        if language == "bash":
            follows = k + 1 < len(blocks) and blocks[k + 1][0] == "text"
            yield Command(text, blocks[k + 1][1] if follows else None)


def run_command(script: str, folder: Path, variables: Mapping[str, str] | None = None, *, cold: bool = False) -> str:
    """Run commands as a user does with an activated environment. Returns what they print; fails where one of them does.

    Args:
        cold: start each in a process of its own, which imports everything itself; see warm_commands.py.
    """
    programs, warm = Path(sys.executable).parent, None if cold else find_programs()
    environment = {
        **os.environ,
        "PATH": f"{f'{warm}:' if warm else ''}{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    if not warm and not (programs / "rollouts").exists():  # an environment without the scripts of the project
        script = f'rollouts() {{ python -m integration.command "$@"; }}\n{script}'
    if not (programs / "torchrun").exists():
        script = f'torchrun() {{ python -m torch.distributed.run "$@"; }}\n{script}'
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env={**environment, **(variables or {})}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def find_missing(expected: str, printed: str) -> list[str]:
    """The lines of a page that a run did not print, in this order; any number stands for any other one, and `...` for any lines."""
    lines, missing = [normalize(line) for line in printed.splitlines()], list[str]()
    for line in expected.splitlines():
        wanted = normalize(line)
        if not wanted or wanted == "...":
            continue
        if wanted in lines:
            lines = lines[lines.index(wanted) + 1 :]
        else:
            missing.append(line)
    return missing


def normalize(line: str) -> str:
    """A line without its numbers, bars and spaces."""
    return " ".join(re.sub(r"#+|[+-](?= |$)", "", NUMBER.sub("N", line)).split())


MARK = "=== snippet"


def list_snippets(page: Path, section: str = "") -> list[tuple[str, str]]:
    """The Python blocks of a page, or of one of its sections, that are not files, each with the text shown below it ("" = none)."""
    text = page.read_text()
    if section:
        text = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    blocks = BLOCK.findall(text)
    following = [*blocks[1:], ("", "")]
    return [
        (block, below if kind == "text" else "")
        for (language, block), (kind, below) in zip(blocks, following, strict=True)
        if language == "python" and not re.match(r"# [\w-]+\.\w+\n", block)
    ]


def is_shown(shown: str, printed: str, measured: tuple[str, ...] = ()) -> bool:
    """Whether a page shows what was printed. `...` stands for any lines, or for a part of its line; a line with one of the words of
    `measured` may have other numbers."""
    pattern = ""
    for line in shown.splitlines():
        numbers = any(word in line for word in measured)
        parts = [part.split("...") for part in (NUMBER.split(line) if numbers else [line])]
        written = NUMBER.pattern.join(".*".join(map(re.escape, part)) for part in parts)
        pattern += r"(?:.*\n)*?" if line == "..." else written + r"\n"
    return re.fullmatch(pattern, printed) is not None


def check_snippets(page: Path, folder: Path, measured: tuple[str, ...] = (), section: str = "", left_out: str | None = None) -> str:
    """Run the snippets of a page one after the other, as one program in a directory of its own, and compare what each prints with the page.

    Snippets that contain `left_out` are not run. Returns everything that was printed.
    """
    snippets = [snippet for snippet in list_snippets(page, section) if left_out is None or left_out not in snippet[0]]
    assert any(shown for _, shown in snippets), f"{page.name} shows nothing of what is printed"
    work = folder / "work"
    work.mkdir()
    write_files(page, work)
    code = f"import os, sys\nos.chdir({str(work)!r})\nsys.path.insert(0, '')\n"
    status, out, error = run(code + "".join(f"print({MARK!r})\n{snippet}\n" for snippet, _ in snippets), folder=folder / "process")
    printed = out.split(f"{MARK}\n")[1:]
    assert status == 0, f"{page.name}, snippet {len(printed)}: {out[-2000:]}\n{error[-3000:]}"
    for (snippet, shown), text in zip(snippets, printed, strict=True):
        assert is_shown(shown, text, measured), f"{page.name} shows\n{shown}below\n{snippet}\nwhich printed\n{text}"
    return "".join(printed)
