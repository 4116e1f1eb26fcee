"""Runs that are killed, stopped by a signal, or continued in pieces: what is left must be what a run leaves that nothing happened to."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reliability.commands import RL, SFT, Left, Naive, differences, read_run, run_train
from benchmarks.reliability.experiment import Amount, Outcome
from benchmarks.reliability.fakes import STALENESS, find_prompts
from rollouts.training.metrics import read_metrics
from rollouts.training.saving.checkpoints import latest_checkpoint, list_checkpoints, load_run_state

GRACE_S = 10.0


def _do_nothing(*arguments: object) -> None:
    """Take the place of a function that restores something."""


FORGETS_ITS_PLACE: Naive = {"rollouts.data.prompts:DataBuffer.load_state": _do_nothing}
FORGETS_ITS_OPTIMIZER: Naive = {"torch.optim:Optimizer.load_state_dict": _do_nothing}
FORGETS_ITS_RANDOMNESS: Naive = {"torch:set_rng_state": _do_nothing}


def run_straight(options: Sequence[object], folder: Path) -> tuple[Left, int]:
    """Run without interruption. Returns what is left, and the number of scheduling points."""
    ended = run_train([*options, "--output-dir", folder / "run"], folder / "streams")
    assert ended.status == 0 and ended.points is not None, ended.error
    return read_run(folder / "run"), ended.points


def run_chain(options: Sequence[object], folder: Path, kills: Iterable[int], naive: Naive | None = None) -> tuple[Left, int]:
    """Kill a run at these scheduling points, one in each process, and resume it; then let it end. Returns what is left, and the kills."""
    argv, num_kills = [*options, "--output-dir", folder / "run"], 0
    for at in (*kills, None):
        again = ["--resume"] if (folder / "run" / "config.json").exists() else []
        ended = run_train([*argv, *again], folder / "streams", at=at, naive=naive)
        if ended.status == 0:
            break
        assert ended.status == -signal.SIGKILL, ended.error
        num_kills += 1
    return read_run(folder / "run"), num_kills


def kill_chains(options: Sequence[object], folder: Path, expected: Left, points: int, kills: int, draw: Random) -> Counter[str]:
    """Count the kills of chains of at most 8, and by how much their ends differ from what is expected."""
    found: Counter[str] = Counter()
    while found["kills"] < kills:
        chain, number = folder / f"chain-{found['chains']}", min(8, kills - found["kills"])
        left, num_kills = run_chain(options, chain, [draw.randint(points // 10, points * 9 // 10) for _ in range(number)])
        found.update({"kills": num_kills, "chains": 1, **differences(expected, left)})
        shutil.rmtree(chain)
    return found


def kill_runs(amount: Amount) -> Outcome:
    """Kill GRPO runs at random points."""
    steps, kills = amount.count(4, 12), amount.count(5, 50)
    options = [*RL, "--rl.num-steps", steps]
    expected, points = run_straight(options, amount.folder / "straight")
    found = kill_chains(options, amount.folder, expected, points, kills, amount.draw)
    naive, _ = run_chain(options, amount.folder / "naive", [points * 2 // 3], FORGETS_ITS_PLACE)  # late: there is something to forget
    control = differences(expected, naive)
    counts = dict(found)
    return Outcome(
        size=f"{counts.pop('kills')} kills in {counts.pop('chains')} chains of {steps} steps",
        measured=counts, holds=not any(counts.values()), control=control, control_fails=any(control.values()),
    )  # fmt: skip


ASYNCHRONOUS: list[object] = ["--rl.asynchronous.enabled", "--rl.asynchronous.max-staleness", STALENESS]


def count_prompts(run: Path, left: Left, steps: int) -> Counter[str]:
    """Count the prompts that a run has trained on twice or lost: those below its last one, neither trained on nor in the checkpoint."""
    used = [prompt for _, samples in left.prompts for prompt in {sample[0] for sample in samples}]
    newest = latest_checkpoint(run / "rl" / "checkpoints")
    assert newest is not None, f"{run} has no checkpoint"
    known = {*used, *find_prompts(load_run_state(newest))}
    return Counter({
        "prompts trained on": len(set(used)), "prompts trained on twice": len(used) - len(set(used)),
        "prompts lost": len(set(range(max(known) + 1)) - known), "steps without a batch": steps - len(left.prompts),
    })  # fmt: skip


def kill_asynchronous_runs(amount: Amount) -> Outcome:
    """Kill asynchronous runs at staleness 2 on the real clock, and count their prompts."""
    steps, kills, draw = 12 if amount.is_full else 6, amount.count(2, 100), amount.draw
    options = [*RL, "--rl.num-steps", steps, *ASYNCHRONOUS]
    _, points = run_straight(options, amount.folder / "straight")
    found, control = Counter[str](), Counter[str]()
    while found["kills"] < kills:
        chain, number = amount.folder / f"chain-{found['chains']}", min(4, kills - found["kills"])
        left, num_kills = run_chain(options, chain, [draw.randint(points // 10, points // 2) for _ in range(number)])
        found.update({"kills": num_kills, "chains": 1})
        found.update(count_prompts(chain / "run", left, steps))
        shutil.rmtree(chain)
    for number in range(2 if amount.is_full else 1):
        chain = amount.folder / f"naive-{number}"
        left, _ = run_chain(options, chain, [points // 2], FORGETS_ITS_PLACE)
        control.update(count_prompts(chain / "run", left, steps))
    counts = dict(found)
    size = f"{counts.pop('kills')} kills in {counts.pop('chains')} chains of {steps} steps at staleness {STALENESS}"
    wrong = [name for name in counts if name != "prompts trained on"]
    return Outcome(
        size=size, measured=counts, holds=not any(counts[name] for name in wrong),
        control=dict(control), control_fails=any(control[name] for name in wrong),
    )  # fmt: skip


LORA = ["--lora.rank", 2, "--lora.dropout", 0.3]


def _with_warmup(stage: str) -> list[object]:
    return [f"--{stage}.optimizer.warmup-steps", 20]


MODES: Mapping[str, list[object]] = {
    "SFT, LoRA with dropout": [*SFT, *_with_warmup("sft"), *LORA, "--sft.dropout"],
    "GRPO": [*RL, *_with_warmup("rl")],
    "PPO with critic": [*RL, *_with_warmup("rl"), "--rl.algorithm", "ppo()", "--rl.num-minibatches", 2],
    "decoupled GRPO, asynchronous, staleness 0": [*RL, "--rl.algorithm", "decoupled(grpo())", "--rl.asynchronous.enabled",
                                                  "--rl.asynchronous.max-staleness", 0],
}  # fmt: skip
WITH_SFT, WITH_CRITIC = "SFT, LoRA with dropout", "PPO with critic"
RANKS = ["--backend.kind", "fsdp", "--backend.num-processes", 2]


def _stage(options: Sequence[object]) -> str:
    return str(options[list(options).index("--mode") + 1])


def run_in_pieces(options: Sequence[object], folder: Path, ends: Sequence[int], naive: Naive | None = None) -> Left:
    """Run to each number of steps in a process of its own."""
    for end in ends:
        argv = [*options, f"--{_stage(options)}.num-steps", end, "--output-dir", folder / "run"]
        ended = run_train([*argv, "--resume"] if end != ends[0] else argv, folder / "streams", naive=naive)
        assert ended.status == 0, ended.error
    return read_run(folder / "run")


def resume_exactly(amount: Amount) -> Outcome:
    """Compare runs in three pieces with straight ones, in all modes; forget a part of the state as the control."""
    length = amount.count(1, 10)
    modes: dict[str, list[object]] = {name: MODES[name] for name in (WITH_SFT, WITH_CRITIC)}
    if amount.is_full:
        modes = dict(MODES)
        for more, added in (("bfloat16", ["--backend.compute-dtype", "bfloat16"]), ("2 FSDP ranks", RANKS)):
            modes |= {f"{name}, {more}": [*MODES[name], *added] for name in (WITH_SFT, WITH_CRITIC)}
    ends, straight, different = [length, 2 * length, 3 * length], dict[str, Left](), 0
    for number, (name, options) in enumerate(modes.items()):
        straight[name] = run_in_pieces(options, amount.folder / f"{number}-straight", ends[-1:])
        different += bool(count_different(straight[name], run_in_pieces(options, amount.folder / f"{number}-pieces", ends)))
    control: dict[str, int] = {}
    for what, mode, naive in (
        ("the optimizer forgotten", WITH_SFT, FORGETS_ITS_OPTIMIZER),
        ("the random state forgotten", WITH_SFT, FORGETS_ITS_RANDOMNESS),
        ("the place in the data forgotten", WITH_CRITIC, FORGETS_ITS_PLACE),
    ):
        pieces = run_in_pieces(MODES[mode], amount.folder / what.replace(" ", "-"), ends, naive)
        control[f"differences, {what}"] = count_different(straight[mode], pieces)
    return Outcome(
        size=f"3 x {length} steps against {3 * length} in {len(modes)} modes ({'; '.join(modes)})",
        measured={"modes with a number, sample or weight that differs": different},
        holds=different == 0, control=control, control_fails=all(control.values()),
    )  # fmt: skip


def count_different(straight: Left, pieces: Left) -> int:
    """Count what differs: lines, weights, samples. A run that ends evaluates, so a line with one in one of them is compared without."""
    lines = [[json.loads(text) for text in left.metrics] for left in (straight, pieces)]
    count = abs(len(lines[0]) - len(lines[1])) + (straight.weights != pieces.weights) + (straight.prompts != pieces.prompts)
    for ours, theirs in zip(*lines, strict=False):
        shared: set[str] = set(ours) & set(theirs)
        others = {key for key in set(ours) ^ set(theirs) if not key.startswith("eval_")}
        count += bool(others) or any(ours[key] != theirs[key] for key in shared)
    return count


def stop_runs(amount: Amount) -> Outcome:
    """Send SIGTERM or SIGINT at random points."""
    steps, signals = 6, amount.count(4, 20)
    options, draw = [*RL, "--rl.num-steps", steps, "--checkpoint.rl-every", 100, "--grace-s", GRACE_S], amount.draw
    _, points = run_straight(options, amount.folder / "straight")
    found, control, slowest = Counter[str](), Counter[str](), 0.0
    for number in range(signals):
        at, which = draw.randint(points // 8, points * 3 // 4), (signal.SIGTERM, signal.SIGINT)[number % 2]
        for kind, sent, counts in (("stopped", which, found), ("killed", signal.SIGKILL, control)):
            folder = amount.folder / kind
            ended = run_train([*options, "--output-dir", folder / "run"], folder / "streams", number=sent, at=at)
            counts["runs"] += 1
            counts["with a checkpoint of the last finished step"] += _has_last_step(folder / "run")
            if sent is which:
                assert ended.status in (0, 130), ended.error
                assert ended.signalled_at is not None, "the signal was not sent"
                slowest = max(slowest, ended.ended_at - ended.signalled_at)
            shutil.rmtree(folder)
    name = "with a checkpoint of the last finished step"
    measured: dict[str, Any] = {**found, "seconds to the end, at most": round(slowest, 1)}
    return Outcome(
        size=f"{signals} signals, SIGTERM and SIGINT in turn", measured=measured,
        holds=found[name] == signals and slowest < GRACE_S, control=dict(control), control_fails=control[name] < signals,
    )  # fmt: skip


def _has_last_step(run: Path) -> bool:
    """Whether the newest checkpoint is that of the last line of metrics; a run that was stopped before its first step has neither."""
    lines = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["step"] > 0] if (run / "metrics.jsonl").exists() else []
    directory = run / "rl" / "checkpoints"
    newest = latest_checkpoint(directory) if list_checkpoints(directory) else None
    return (0 if newest is None else int(newest.name.removeprefix("step_"))) == max(lines, default=0)
