"""Completion of the command in a shell: `rollouts completion bash` prints a script for bash, zsh or fish.

The script knows the names of the programs, their options, and the values of options that have a fixed list; elsewhere the shell completes
names of files. It asks nothing of this package when Tab is pressed, so it answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from integration.closed_stdout import ignore_closed_stdout
from rollouts.config_files import suggest

SHELLS = ("bash", "zsh", "fish")
HELP = """\
usage: rollouts completion bash|zsh|fish

Print a script that completes the command's programs, options and values. To use it in every new shell:

  bash   echo 'source <(rollouts completion bash)' >> ~/.bashrc
  zsh    echo 'source <(rollouts completion zsh)' >> ~/.zshrc     (behind compinit)
  fish   rollouts completion fish > ~/.config/fish/completions/rollouts.fish"""

Options = Mapping[str, tuple[str, ...]]
"""Values of each option of a program; () = any text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell. Returns 0, or 2 for an unknown shell."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["--help"], ["-h"], ["--help-all"]):
        with ignore_closed_stdout():
            print(HELP)
        raise SystemExit(0)
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        found = f"unknown shell {arguments[0]!r}: {suggest(arguments[0], SHELLS)}" if len(arguments) == 1 else "give one shell"
        print(f"error: {found}. usage: rollouts completion bash|zsh|fish", file=sys.stderr)
        return 2
    programs = read_programs()
    with ignore_closed_stdout():
        print({"bash": write_bash, "zsh": write_zsh, "fish": write_fish}[arguments[0]](programs))
    return 0


def read_programs() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the options of each program, by name, as its help lists them."""
    from integration.command import PROGRAMS
    from integration.settings.config import TASKS
    from integration.settings.sections.backend import BACKEND_KINDS
    from integration.settings.sections.engine import ENGINE_KINDS

    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, program in PROGRAMS.items():
        if program.module == __name__:
            found[name] = {}
        else:
            run = importlib.import_module(program.module).main
            printed = io.StringIO()
            for flag in ("--help", "--help-all"):
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
                    run([flag])
            found[name] = read_options(printed.getvalue())
    found["train"] |= {"--task": TASKS, "--engine.kind": ENGINE_KINDS, "--backend.kind": BACKEND_KINDS}  # texts to the help
    return found


def read_options(text: str) -> dict[str, tuple[str, ...]]:
    """Return the options that a help lists, with the values of those that have a fixed list.

    Args:
        text: lines such as "--mode sft|rl|sft+rl   stages to run" or "--order {fifo,lifo}".
    """
    found: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        line = line.strip(" │|╭╰─")
        if not line.startswith("-"):
            continue
        names = line.partition("  ")[0]
        for name, values in re.findall(r"(--[a-z][\w.-]*)(?:[ =](\{[^}]*\}|[\w+.-]+(?:\|[\w+.-]+)+))?", names):
            listed = tuple(value for value in re.split(r"[{},|]", values) if re.fullmatch(r"[a-z0-9][\w+.-]*", value))
            found[name] = found.get(name) or listed
    return {"--help": (), **found}


def write_bash(programs: Mapping[str, Options]) -> str:
    """Return the script for bash."""
    cases: list[str] = []
    for name, options in programs.items():
        valued = [
            f'      {option}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$cur")); return;;'
            for option, values in options.items()
            if values
        ]
        words = "bash zsh fish" if name == "completion" else " ".join(options)
        cases.append(
            "\n".join([f"    {name})", *(['      case "$prev" in', *valued, "      esac"] if valued else []), f'      words="{words}";;'])
        )
    return "\n".join(
        [
            "_rollouts() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(programs)} --help --version" -- "$cur")); return',
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  if [[ "$cur" == -* || "${COMP_WORDS[1]}" == completion ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi',
            "}",
            "complete -o default -F _rollouts rollouts",
        ]
    )


def write_zsh(programs: Mapping[str, Options]) -> str:
    """Return the script for zsh: that of bash, which zsh reads in its mode for scripts of bash."""
    return "\n".join(["autoload -U +X bashcompinit && bashcompinit", write_bash(programs)])


def write_fish(programs: Mapping[str, Options]) -> str:
    """Return the script for fish."""
    lines = ["complete -c rollouts -n __fish_use_subcommand -f -a " + shlex.quote(" ".join(programs))]
    for name, options in programs.items():
        here = shlex.quote(f"__fish_seen_subcommand_from {name}")
        if name == "completion":
            lines.append(f"complete -c rollouts -n {here} -f -a 'bash zsh fish'")
        for option, values in options.items():
            choice = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(f"complete -c rollouts -n {here} -l {option.removeprefix('--')}{choice}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
