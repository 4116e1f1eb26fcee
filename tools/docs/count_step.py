"""Count the files and lines of `rollouts` that one GRPO step in a single process runs: the way from a prompt to the gradient.

    python tools/docs/count_step.py                   run_rl_training
    python tools/docs/count_step.py --asynchronous    run_async_rl_training

A function that is called counts with all its lines, signature and docstring included; code at module level does not count. The run has
one step: a small model, the embedded engine, the PyTorch backend, weights handed over in memory, no filter, no checkpoint.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parents[2]))

import trio

from rollouts.algorithms import grpo
from rollouts.asynchronous import AsyncConfig, create_workflow_executor
from rollouts.backends import create_pytorch_backend
from rollouts.chat import create_char_tokenizer
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data import DataBuffer
from rollouts.engines import InProcessEngine
from rollouts.generation import AsyncRolloutManager, create_generate_fn
from rollouts.rl_loop import run_rl_training
from rollouts.testing import create_tiny_model
from rollouts.types import Prompt, Sample, SamplingParams

PROMPTS = tuple(Prompt(content=text, index=i) for i, text in enumerate(["s31=", "s504=", "s77=", "s1942="]))
PARAMS = SamplingParams(max_tokens=8)


def prefer_short_answers(sample: Sample) -> float:
    """Reward that differs inside of a group, so that there is a gradient."""
    return 1.0 - sum(sample.loss_mask) / PARAMS.max_tokens


async def run_one_step(asynchronous: bool, observe: Callable[[bool], None]) -> None:
    """Train one step; `observe(True)` before it and `observe(False)` after it."""
    tokenizer = create_char_tokenizer()
    engine = InProcessEngine(create_tiny_model(), tokenizer)
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-3, tokenizer=tokenizer)
    buffer = DataBuffer(PROMPTS)
    generate = create_generate_fn([engine], tokenizer, PARAMS)
    rollout = RolloutConfig(batch_size=len(PROMPTS), n_samples_per_prompt=4, generate_fn=generate, reward_fn=prefer_short_answers)
    training = RLTrainingConfig(num_steps=1, algorithm=grpo(), weight_sync="memory")
    if asynchronous:
        from rollouts.async_rl_loop import run_async_rl_training

        async with create_workflow_executor(buffer, rollout, AsyncConfig(), engines=[engine]) as executor:
            observe(True)
            await run_async_rl_training(backend, buffer, executor, [engine], training)
            observe(False)
    else:
        manager = AsyncRolloutManager(buffer, rollout)
        observe(True)
        await run_rl_training(backend, buffer, manager, [engine], training)
        observe(False)


def trace_step(asynchronous: bool = False) -> dict[str, list[str]]:
    """Run one step and return the functions of `rollouts` that it called: file, relative to the project -> qualified names."""
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    def observe(on: bool) -> None:
        threading.setprofile(note if on else None)
        sys.setprofile(note if on else None)

    try:
        trio.run(partial(run_one_step, asynchronous, observe))
    finally:
        observe(False)
    files: dict[str, list[str]] = {}
    for code in called:
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT / "rollouts") and code.co_name != "<module>":
            files.setdefault(path.relative_to(ROOT).as_posix(), []).append(code.co_qualname)
    return {file: sorted(names) for file, names in sorted(files.items())}


def count_lines(files: Mapping[str, list[str]]) -> dict[str, int]:
    """Lines of the functions of `trace_step`, by file; lines of a function inside of another one count once."""
    counts: dict[str, int] = {}
    for file, names in files.items():
        lines: set[int] = set()
        wanted = {name.replace(".<locals>", "") for name in names}
        nodes: list[tuple[str, ast.AST]] = [("", ast.parse((ROOT / file).read_text()))]
        for place, node in nodes:
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                name = f"{place}.{child.name}".lstrip(".") if named else place
                nodes.append((name, child))
                if named and not isinstance(child, ast.ClassDef) and name in wanted:
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    lines.update(range(first, (child.end_lineno or first) + 1))
        counts[file] = len(lines)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asynchronous", action="store_true", help="generation beside training, staleness 0")
    counts = count_lines(trace_step(parser.parse_args().asynchronous))
    for file, number in sorted(counts.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{number:6} {file}\n")
    sys.stdout.write(f"{sum(counts.values()):6} lines in {len(counts)} files\n")


if __name__ == "__main__":
    main()
