"""The generated parts of docs/architecture.md: the picture and the table of the packages, the reading order, the files of a GRPO step.

    python tools/docs/generate_architecture.py            write them into the page
    python tools/docs/generate_architecture.py --check    exit 1 where they are not up to date

Line counts of the reading order may be somewhat out of date; so a line more in a function is no reason to write the page again.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "rollouts"
PAGE = ROOT / "docs" / "architecture.md"


@dataclass(frozen=True)
class Stop:
    """A stop of the reading order."""

    path: str  # from the root of the project
    sentence: str
    names: tuple[str, ...] = ()  # functions and classes to read; () = the whole file


READING_ORDER = (
    Stop("README.md", "Two commands, and what they print."),
    Stop(
        "rollouts/types.py",
        "The values that flow: a prompt, its samples, the batch of them, and an algorithm as three functions.",
        (
            "SamplingParams",
            "Completion",
            "Prompt",
            "Status",
            "Sample",
            "RolloutBatch",
            "TrainBatch",
            "TokenOutputs",
            "LossOutput",
            "Algorithm",
        ),
    ),
    Stop("examples/grpo_step_by_hand.ipynb", "A whole step by hand, every line a value to look at."),
    Stop("rollouts/algorithms/presets.py", "GRPO as a value: which estimate, which weights, which loss.", ("grpo",)),
    Stop("rollouts/algorithms/estimators.py", "Rewards become advantages, relative to their group.", ("estimate_group_relative",)),
    Stop(
        "rollouts/algorithms/losses.py",
        "The loss that every preset shares: a weighted sum of surrogate, KL term and entropy.",
        ("policy_loss", "clipped_policy_loss"),
    ),
    Stop("rollouts/algorithms/surrogates.py", "The clipped ratio of PPO and GRPO.", ("clipped",)),
    Stop("rollouts/data/collate.py", "Ragged samples become tensors of [rows, tokens].", ("collate_samples",)),
    Stop(
        "rollouts/engines/protocol.py",
        "The four methods that an inference engine has, and the names of what else it may offer.",
        ("InferenceEngine", "WeightChannel", "EngineFeature"),
    ),
    Stop("rollouts/generation/single_turn.py", "A prompt becomes a group of samples."),
    Stop("rollouts/generation/contract.py", "The group of a generate function is checked.", ("bind_generate_fn", "check_generated_group")),
    Stop("rollouts/rewards/evaluate.py", "Each sample of a group gets its reward.", ("score_group",)),
    Stop(
        "rollouts/generation/manager.py",
        "Groups race, and are filtered, until they make a rollout batch.",
        ("AsyncRolloutManager",),
    ),
    Stop("rollouts/backends/protocol.py", "The five methods that a training backend has.", ("Future", "TrainingBackend", "BackendFeature")),
    Stop("rollouts/backends/pytorch/backend.py", "One of them: forward, backward and optimizer step of a PyTorch module."),
    Stop("rollouts/rl_loop.py", "The loop: generate, train, write a checkpoint, hand over the weights."),
    Stop(
        "rollouts/training/rl_run.py",
        "One step of the loop: rewards shaped, rows collated, training, measurements, saving, syncing.",
        ("RLRun",),
    ),
    Stop("rollouts/training/rollout_batch.py", "One rollout batch becomes optimizer steps: columns, estimate, minibatches."),
    Stop("rollouts/training/steps.py", "A minibatch becomes micro-batches, their gradient and one update.", ("submit_optimizer_step",)),
    Stop("rollouts/training/weight_sync.py", "The new weights reach every engine.", ("publish_weights", "sync_weights_in_memory")),
)  # fmt: skip


@cache
def load_packages() -> dict[str, Any]:
    """Load the order of the packages, which the tests hold."""
    return runpy.run_path(str(ROOT / "tests" / "house" / "packages.py"))


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def list_arrows() -> dict[str, set[str]]:
    """Return for each room of the picture the rooms that its files import; the words are one room and the loops another one."""
    house = load_packages()
    order = ("words", *house["PACKAGES"][:-1], "loops", *house["FACADES"], "testing")
    arrows: dict[str, set[str]] = {name: set() for name in order}

    def room(name: str) -> str:
        return "words" if name in house["WORDS"] else "loops" if name in house["LOOPS"] else name

    for path in sorted(LIBRARY.rglob("*.py")):
        own = room(house["find_room"](path))
        if own in arrows:
            modules = (module for _, module in house["list_imports"](path) if module.startswith("rollouts."))
            arrows[own] |= {room(module.split(".")[1]) for module in modules} & set(order[: order.index(own)])
    return arrows


def reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Return all rooms that can be reached from one."""
    found, rest = set[str](), list(arrows[start])
    while rest:
        if (room := rest.pop()) not in found:
            found.add(room)
            rest += arrows[room]
    return found


def draw_packages() -> str:
    """Return the picture of the packages: an arrow from each to those that it imports and does not reach by way of another one."""
    arrows = list_arrows()
    lines = ["```mermaid", "flowchart BT"]
    lines += ['  words["words: types, errors, config, ..."]', '  loops["loops: sft, rl, async_rl, reward_model"]']
    for room, others in arrows.items():
        direct = sorted(other for other in others if not any(other in reach(arrows, third) for third in others))
        lines += [f"  {room} --> {other}" for other in direct]
    return "\n".join([*lines, "```"])


def list_packages() -> str:
    """Return the table of the packages in their order."""
    house, arrows = load_packages(), list_arrows()
    rows = ["| | holds | imports |", "|---|---|---|"]
    words = ", ".join(f"[{name}](../rollouts/{name}.py)" for name in house["WORDS"])
    rows.append(f"| words | Values and checks that everything else speaks in: {words}. | |")
    order = list(arrows)
    for name in house["PACKAGES"][:-1]:
        imports = ", ".join(sorted(arrows[name] - {"words"}, key=order.index))
        rows.append(f"| [{name}/](../rollouts/{name}) | {first_line(LIBRARY / name / '__init__.py')} | {imports} |")
    loops = ", ".join(f"[{name}](../rollouts/{name}.py)" for name in house["LOOPS"])
    rows.append(f"| loops | The programs: {loops}. | {', '.join(sorted(arrows['loops'] - {'words'}, key=order.index))} |")
    for name in (*house["FACADES"], "testing"):
        imports = ", ".join(sorted(arrows[name] - {"words"}, key=order.index))
        rows.append(f"| [{name}/](../rollouts/{name}) | {first_line(LIBRARY / name / '__init__.py')} | {imports} |")
    return "\n".join(rows)


def count_lines(stop: Stop) -> int:
    """Return the lines of a stop: of its functions and classes, of the sources of a notebook, or of the whole file."""
    text = (ROOT / stop.path).read_text(encoding="utf-8")
    if stop.path.endswith(".ipynb"):
        return sum(len(cell["source"]) for cell in json.loads(text)["cells"])
    if not stop.names:
        return len(text.splitlines())
    nodes = {getattr(node, "name", ""): node for node in ast.parse(text).body}
    missing = [name for name in stop.names if name not in nodes]
    assert not missing, f"{stop.path} has no {missing}"
    return sum((nodes[name].end_lineno or 0) - nodes[name].lineno + 1 for name in stop.names)


def list_stops() -> str:
    """Return the table of the reading order."""
    rows = ["| | read | lines |", "|---|---|---|"]
    for stop in READING_ORDER:
        names = f": {', '.join(f'`{name}`' for name in stop.names)}" if stop.names else ""
        rows.append(f"| [{stop.path.removeprefix('rollouts/')}](../{stop.path}){names} | {stop.sentence} | {count_lines(stop)} |")
    return "\n".join([*rows, f"| | | **{sum(map(count_lines, READING_ORDER))}** |"])


def list_step(files: Iterable[str]) -> str:
    """Return the table of the files that a GRPO step runs besides those of the reading order, by package."""
    rooms: dict[str, list[str]] = {}
    files = sorted(files)
    for file in files:
        if file not in {stop.path for stop in READING_ORDER}:
            room, _, rest = file.removeprefix("rollouts/").partition("/")
            rooms.setdefault(room if rest else "", []).append(f"[{rest or room}](../{file})")
    rows = [f"One step runs functions of {len(files)} files. Those that are no stop above:", "", "| | |", "|---|---|"]
    rows += [f"| {room + '/' if room else 'words'} | {', '.join(names)} |" for room, names in sorted(rooms.items())]
    return "\n".join(rows)


def read_step(page: str) -> set[str]:
    """Return the files that the page says a GRPO step runs, besides those of the reading order."""
    return set(re.findall(r"\(\.\./(rollouts/[\w/]+\.py)\)", read_part(page, "step")))


def read_part(page: str, name: str) -> str:
    """Return a generated part of the page."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", page, re.DOTALL)
    assert found, f"the page has no part {name}"
    return found[1]


def write_page(page: str, step: str | None = None) -> str:
    """Return the page with its generated parts written anew; `step` is left as it is where it is None."""
    parts = {"packages": f"{draw_packages()}\n\n{list_packages()}", "stops": list_stops()} | ({"step": step} if step else {})
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->\n{read_part(page, name)}\n<!-- /{name} -->", f"<!-- {name} -->\n{text}\n<!-- /{name} -->")
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is not up to date")
    found = runpy.run_path(str(Path(__file__).with_name("count_step.py")))["trace_step"]()
    before = PAGE.read_text(encoding="utf-8")
    page = write_page(before, list_step(found))
    if parser.parse_args().check:
        return int(before != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
