"""The experiments: each promise with its bar, and the naive variant that must miss it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.reliability.experiment import Amount, Experiment, Outcome


def _of(module: str, function: str) -> Callable[[Amount], Outcome]:
    """Return a function of a module that is imported when it is called: the table itself loads nothing heavy."""
    return lambda amount: getattr(importlib.import_module(f"benchmarks.reliability.{module}"), function)(amount)


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="E1", promise="a run that is killed goes on as if nothing had happened",
        bar="no sample lost, repeated or different, no metric line and no weight different from the run without kills",
        naive="a resume that forgets its place in the data", attempt=_of("kills", "kill_runs"),
    ),
    Experiment(
        name="E2", promise="a kill while a checkpoint is saved loses no saved step",
        bar="every directory resumable, no acknowledged step lost, no checkpoint too many", naive="one file that is overwritten",
        attempt=_of("checkpoint_files", "kill_saves"),
    ),
    Experiment(
        name="E3", promise="a damaged checkpoint is detected and named, and the one before it is used",
        bar="every damage detected, no silent start from the beginning", naive="safetensors without a manifest",
        attempt=_of("checkpoint_files", "damage_checkpoints"),
    ),
    Experiment(
        name="E4", promise="a run in pieces has the numbers and weights of the whole run",
        bar="all modes equal, bit for bit", naive="a part of the state forgotten", attempt=_of("kills", "resume_exactly"),
    ),
    Experiment(
        name="E5", promise="a signal stops a run in time, with a checkpoint of its last finished step",
        bar="every run has that checkpoint, within 10 s of the signal", naive="SIGKILL at the same points",
        attempt=_of("kills", "stop_runs"),
    ),
    Experiment(
        name="E6", promise="a full disk is told with path and bytes, and leaves nothing half-written",
        bar="the error names path, bytes needed and free; the earlier checkpoint loads; no partial file", naive="torch.save",
        attempt=_of("checkpoint_files", "fill_disk"),
    ),
    Experiment(
        name="E7", promise="a reward that fails is reported, and never a silent 0",
        bar="every planted fault reported, no other, no wrong reward, no process left", naive="an except clause that returns 0",
        attempt=_of("untrusted", "plant_reward_faults"),
    ),
    Experiment(
        name="E8", promise="programs of a model do not get out of the sandbox",
        bar="every attack contained, nothing left running", naive="a subprocess with a deadline",
        attempt=_of("untrusted", "attack_sandbox"),
    ),
    Experiment(
        name="E9", promise="a number that is none changes no loss where it is masked, and no weight where it is not",
        bar="losses and gradients bit-equal; updates skipped, counted, and ended after some in a row",
        naive="a mask behind the exponential", attempt=_of("bad_numbers", "spoil_numbers"),
    ),
    Experiment(
        name="E10", promise="calls of servers that fail complete right or fail by an error of the library",
        bar="no wrong sample, no other outcome, no task left", naive="a client that repeats all and checks nothing",
        attempt=_of("engines", "damage_calls"),
    ),
    Experiment(
        name="E11", promise="no sample is accepted of weights that its server did not confirm",
        bar="no unconfirmed or wrong sample; all servers serve again after each sync", naive="one server, samples named by the last sync",
        attempt=_of("engines", "sync_half_way"),
    ),
    Experiment(
        name="E12", promise="cancelled requests leak no places, files or memory",
        bar="all rounds complete, at most 2 files more; in a full run also less than 5 MB more and rounds at most 1.1 times as long as "
        "those of a fresh client, in processor time",
        naive="httpx without a limit of one's own", attempt=_of("engines", "cancel_most"),
    ),
    Experiment(
        name="E13", promise="bad rows are named by file and line, or counted where they are to be skipped",
        bar="no row lost, made up or taken in, no untyped error", naive="json.loads of each line", attempt=_of("inputs", "damage_rows"),
    ),
    Experiment(
        name="E14", promise="a directory belongs to one run at a time and to one set of settings",
        bar="second runs refused within 1 s with process and start; no lock left by a kill; changed settings refused by name",
        naive="a lock file", attempt=_of("directories", "share_directory"),
    ),
    Experiment(
        name="E15", promise="no secret gets out, no socket opens to others, no data is executed",
        bar="none found", naive="the same search over planted ones", attempt=_of("openings", "look_for_openings"),
    ),
    Experiment(
        name="E16", promise="a fleet goes on while one of its servers does",
        bar="all samples complete and right; an error within 5 s where all servers are dead", naive="a client of one server",
        attempt=_of("engines", "lose_engines"),
    ),
    Experiment(
        name="E17", promise="the sandbox costs at most 100 ms a run",
        bar="at most 100 ms more than a plain process, and of processor time", naive="",
        attempt=_of("untrusted", "time_sandbox"), measures_time=True,
    ),
    Experiment(
        name="E18", promise="a run that is cancelled at any scheduling point leaves a directory to go on in, and nothing that works",
        bar="every checkpoint loads, every run goes on with each line of metrics once; no thread at work, no process left",
        naive="a resume that does not cut back the metrics", attempt=_of("interruptions", "cancel_everywhere"),
    ),
    Experiment(
        name="E19", promise='with checkpoint_in_flight="interrupt" an asynchronous run goes on bit-identically on a virtual clock',
        bar="no line and no prompt of a batch different; no prompt lost or trained on twice; every run ends",
        naive='checkpoint_in_flight="restart", which starts rollouts anew',
        attempt=_of("interruptions", "resume_asynchronously"),
    ),
    Experiment(
        name="E20", promise="a long run takes no more memory, files or threads than a short one",
        bar="in the last half less than 1 % of memory more, 1 file and 1 thread; 0.1 blocks of Python's memory a step, 10 in a short run",
        naive="all metrics and calls kept", attempt=_of("soak", "soak_loops"),
    ),
    Experiment(
        name="E21", promise="asynchronous training goes on for days while engines die, rewards are slow, and its machine is taken away",
        bar="no deadlock, no token too old, no prompt lost or trained on twice, and the same numbers again from the same seed",
        naive="a resume that has its place in the data, and forgets the prompts under way", attempt=_of("virtual_day", "live_a_day"),
    ),
    Experiment(
        name="E24", promise="an asynchronous run that is killed on the real clock trains on each prompt once",
        bar="no prompt lost or trained on twice, and every run ends", naive="a resume that forgets its place in the data",
        attempt=_of("kills", "kill_asynchronous_runs"),
    ),
    Experiment(
        name="E25", promise="a step that a bad number ended is the same number again, from its crash bundle alone",
        bar="every run leaves a bundle, and every replay is equal to the bit", naive="a replay without the states of the random generators",
        attempt=_of("crashes", "replay_crashes"),
    ),
)  # fmt: skip
