"""Look for inputs that a parser does not survive, guided by the lines that they reach: needs `pip install atheris`.

    python -m benchmarks.reliability.fuzz --seconds 300 [--only rows vllm ...] [--seed N] [--corpus DIR]

Prints one JSON object for each place that raises an error which is none of the library's, with the input in base64, and at the end one with
the counts. Exit status: 1 if there was such an error.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.errors import ConfigError

PACKAGES = ("rollouts", "integration")
FOUND = "found: "


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="time to look (default: 60)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="parsers whose names have one of these texts (default: all)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the inputs (default: 1)")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="directory of inputs, which grows (default: a new one)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, number: int) -> int:
        return self._random.randrange(number)


def _describe(name: str, error: BaseException, data: bytes) -> dict[str, str]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if any(f"/{name}/" in frame.filename for name in PACKAGES)]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    told = {"parser": name, "error": type(error).__name__, "place": place, "message": str(error)[:200]}
    return told | {"input": base64.b64encode(data[:4000]).decode()}


def fuzz_here(arguments: argparse.Namespace, corpus: Path) -> None:
    """Look for errors until the time is over, and end the process, as libFuzzer does. An input begins with the number of its parser."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=list(PACKAGES)):
        parsers = importlib.import_module("benchmarks.reliability.parsers")
    damage = importlib.import_module("benchmarks.reliability.damage").damage
    logging.disable(logging.CRITICAL)
    chosen = [parser for parser in parsers.list_parsers() if any(text in parser.name for text in arguments.only)]
    assert chosen, f"no parser has one of {arguments.only} in its name"
    for number, parser in enumerate(chosen):
        for at, example in enumerate(parser.examples):
            (corpus / f"{number}-{at}").write_bytes(bytes([number]) + example)
    seen = set[tuple[str, str, str]]()

    def try_one(data: bytes) -> None:
        if not data:
            return
        parser = chosen[data[0] % len(chosen)]
        try:
            parser.try_on(data[1:])
        except Exception as error:
            told = _describe(parser.name, error, data[1:])
            key = (told["parser"], told["error"], told["place"])
            if key not in seen:
                seen.add(key)
                print(FOUND + json.dumps(told), flush=True)

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        if not data or seed % 3 == 0:
            return atheris.Mutate(data, limit)[:limit]
        try:
            return (data[:1] + damage(data[1:], _Draw(seed)))[:limit]
        except RecursionError:  # it is nested as deeply as the parsers can read
            return atheris.Mutate(data, limit)[:limit]

    options = [f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}", "-max_len=8192", "-print_final_stats=1", "-timeout=60"]
    atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=8192", str(corpus)], try_one, custom_mutator=mutate)
    atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> int:
    """Look for errors in a process of its own. Returns the exit status. Raises ConfigError without atheris."""
    arguments = parse_arguments(argv)
    if importlib.util.find_spec("atheris") is None:
        raise ConfigError("the coverage-guided fuzzer needs the package atheris: pip install atheris")
    if arguments.child:
        fuzz_here(arguments, arguments.corpus)
    with tempfile.TemporaryDirectory() as folder:
        corpus = folder if arguments.corpus is None else str(arguments.corpus)
        Path(corpus).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.reliability.fuzz", *(sys.argv[1:] if argv is None else argv), "--child"]
        ended = subprocess.run(
            [*command, "--corpus", corpus], text=True, capture_output=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    found = [line.removeprefix(FOUND) for line in ended.stdout.splitlines() if line.startswith(FOUND)]
    stats = dict(line[6:].split(": ") for line in ended.stderr.splitlines() if line.startswith("stat::"))
    print("\n".join(found), end="\n" if found else "")
    if "number_of_executed_units" not in stats or ended.returncode:
        print(ended.stderr[-3000:], file=sys.stderr)
        return 1
    print(json.dumps({"inputs": int(stats["number_of_executed_units"]), "new_units": int(stats["new_units_added"]), "errors": len(found)}))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
