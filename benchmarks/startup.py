"""Processor seconds from the start of a command to its answer, beside those of `import torch` and of TRL's command.

    python -m benchmarks.startup [--repeats 5] [--output FILE.json]

Each command is a process of its own; commands take turns. User and system time of the process and its children count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time

from benchmarks.measure import print_table, write_json

BASE = "import torch"
COMMANDS: dict[str, tuple[str, ...]] = {
    BASE: (sys.executable, "-c", "import torch"),
    "import rollouts": (sys.executable, "-c", "import rollouts"),
    "train --help": (sys.executable, "-m", "integration.train", "--help"),
    "train, a misspelt option": (sys.executable, "-m", "integration.train", "--seeed", "3"),
    "train --dry-run": (sys.executable, "-m", "integration.train", "--dry-run"),
}


def measure(command: tuple[str, ...]) -> tuple[float, float]:
    """Run a command. Returns the processor and wall seconds of its process."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wall, after = time.perf_counter() - start, os.times()
    assert "Traceback" not in done.stderr, f"{' '.join(command)} failed:\n{done.stderr}"
    return after.children_user + after.children_system - before.children_user - before.children_system, wall


def compare_commands(repeats: int) -> dict[str, dict[str, float]]:
    """Medians for each command, and the ratio of its processor seconds to those of `import torch`."""
    trl = shutil.which("trl", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}")
    commands = COMMANDS | ({} if trl is None else {"trl --help": (trl, "--help")})
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for repeat in range(-1, repeats):  # the first round compiles bytecode and fills the page cache
        for name, command in commands.items():
            found = measure(command)
            if repeat >= 0:
                seconds[name].append(found)
    table = {
        name: {"CPU-s": statistics.median(cpu for cpu, _ in found), "s": statistics.median(wall for _, wall in found)}
        for name, found in seconds.items()
    }
    base = table[BASE]["CPU-s"]
    return {name: {**row, "ratio_cpu": row["CPU-s"] / base} for name, row in table.items()}


def main() -> None:
    """Parse arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    table = compare_commands(arguments.repeats)
    print_table("start-up", table)
    write_json(arguments.output, {"repeats": arguments.repeats, "table": table})


if __name__ == "__main__":
    main()
