"""Runs that a bad number ends: the step in their crash bundle must be the same number again, where nothing else of the run is left."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.reliability.commands import REWARD, RL, SFT, Naive, run_train
from benchmarks.reliability.experiment import Amount, Outcome
from integration.crash.replay import EXIT_DIFFERS
from rollouts.training.saving.checkpoints import list_checkpoints


def _do_nothing(*arguments: object) -> None:
    """Take the place of the function that restores the generators."""


FORGETS_ITS_RANDOMNESS: Naive = {"integration.crash.replay:restore_random_state": _do_nothing}
FORGETS_ITS_OPTIMIZER: Naive = {"torch.optim:Optimizer.load_state_dict": _do_nothing}

SPIKE = ["--on-bad.gradient-spike", "stop", "--on-bad.spike-factor", 1.0001]
GRPO = [*RL, "--rl.num-steps", 12, "--rl.num-minibatches", 2]
FORGETFUL = "those without the state of the optimizer, of bundles with a checkpoint"
BEHIND_A_CHECKPOINT = "GRPO, a gradient that is infinite two updates behind the checkpoint of its bundle"
CASES: Mapping[str, list[object]] = {
    "SFT, LoRA with dropout, a spike of the gradient": [*SFT, "--sft.num-steps", 40, "--lora.rank", 2, "--lora.dropout", 0.3, *SPIKE],
    "GRPO, an importance ratio": [*GRPO, "--on-bad.ratio", "stop", "--on-bad.ratio-limit", 1.0001],
    BEHIND_A_CHECKPOINT: [
        *GRPO,
        *["--algorithm", "dr_grpo", "--checkpoint.rl-every", 2, "--crash-bundles", "linked", "--on-bad.gradient", "stop"],
        *["--reward.function", REWARD.replace("random_reward", "exploding_reward")],
    ],
    "SFT, a parameter that is infinite": [*SFT, "--sft.num-steps", 4, "--sft.optimizer.lr", 1e39],
}


def _crash(options: list[object], seed: int, folder: Path) -> Path | None:
    """Run until a bad number ends the run; return its bundle, moved away from what else it has left; None without one."""
    ended = run_train([*options, "--seed", seed, "--output-dir", folder / "run"], folder / "streams")
    found = [bundle for stage in ("sft", "rl") for bundle in list_checkpoints(folder / "run" / stage / "crash")]
    if ended.status != 1 or len(found) != 1 or "--replay" not in ended.error:
        return None
    alone = folder / "sent" / found[0].name
    alone.parent.mkdir()
    found[0].rename(alone)
    shutil.rmtree(folder / "run")
    return alone


def replay_crashes(amount: Amount) -> Outcome:
    """Crash runs of several kinds, and replay each bundle; also without its random state, and without the state of its optimizer."""
    found, control = Counter[str](), Counter[str]()
    rounds = amount.count(1, 10)
    for number in range(rounds):
        for name, options in CASES.items():
            folder = amount.folder / f"{number}-{list(CASES).index(name)}"
            bundle = _crash(options, amount.seed + number, folder)
            found["runs"] += 1
            if bundle is None:
                continue
            found["bundles"] += 1
            ended = run_train(["--replay", bundle], folder / "replay")
            found["replays equal to the bit"] += ended.status == 0 and "reproduced, equal to the bit" in ended.out
            naive = run_train(["--replay", bundle], folder / "naive", naive=FORGETS_ITS_RANDOMNESS)
            control["replays equal to the bit"] += naive.status == 0
            if name == BEHIND_A_CHECKPOINT:
                naive = run_train(["--replay", bundle], folder / "naive", naive=FORGETS_ITS_OPTIMIZER)
                control[FORGETFUL] += naive.status != EXIT_DIFFERS
            shutil.rmtree(folder)
    return Outcome(
        size=f"{found['runs']} runs, {rounds} of each kind: {'; '.join(CASES)}", measured=dict(found),
        holds=found["replays equal to the bit"] == found["bundles"] == found["runs"],
        control=dict(control), control_fails=control["replays equal to the bit"] < found["runs"] and control[FORGETFUL] == 0,
    )  # fmt: skip
