"""Rank 0 leads: what the other processes of a run do, and what becomes of all when one of them fails, is killed, stops or hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import rank_processes as jobs
import torch
from forked import PATIENCE_S, Child
from rank_processes import create_tiny_backend, script, start_ranks

from rollouts.algorithms.losses import sft_loss
from rollouts.backends.fsdp.checkpoint import AsyncWriter, WriteFuture
from rollouts.backends.optim.optimizers import create_adamw_optimizer
from rollouts.backends.pytorch.backend import PyTorchTrainingBackend
from rollouts.backends.ranks.channel import Channel, ChannelClosed
from rollouts.backends.ranks.distributed import leave_distributed
from rollouts.backends.ranks.group import join_ranks
from rollouts.backends.ranks.leading import lead_backend
from rollouts.backends.ranks.meeting import read_placement
from rollouts.backends.ranks.values import dump_value, load_value
from rollouts.backends.ranks.watch import (
    AwakeClock,
    Failure,
    LeaderWatch,
    Trouble,
    WatchLimits,
    WorkerWatch,
    are_alike,
    describe_failure,
    find_cause,
    make_error,
    read_failure,
)
from rollouts.backends.weights.export import alone
from rollouts.errors import BackendError, CheckpointError, ConfigError
from rollouts.testing import create_tiny_model

ALL_MET = "group.run('meeting', jobs.tell_rank)"  # rank 0 may leave join_ranks before the others


def end_all(children: list[Child]) -> list[tuple[int, str]]:
    """(exit status, stderr) of each rank, once all have ended by themselves."""
    try:
        return [(child.wait(), child.error) for child in children]
    finally:
        for child in children:
            child.kill()


# -- one launch for everything that goes well

WORK = script("""
out = {"told": group.run("telling", jobs.tell_rank, 5, own=[(0,), (1,), (2,)])}
def refused(function, *arguments, **options):
    try:
        group.run("trying", function, *arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
out["alike"] = refused(jobs.raise_everywhere)
out["alone"] = refused(jobs.fail_alone, 2, own=[(0,), (1,), (2,)])
out["unsendable"] = refused(lambda backends: 1)
out["unsendable answer"] = refused(jobs.return_function)
backend = lead_backend(group, "policy", jobs.create_tiny_backend)
batches = jobs.make_batches()
for number, batch in enumerate(batches):
    losses = backend.forward_backward(batch, jobs.sft_loss, with_entropy=True)
    if number % 2:  # asked for before the update; else the ranks send them with it
        losses.value
    update = backend.optim_step().value
    out.setdefault("read", []).append(losses.outcome.is_read)
    out[f"step {number}"] = losses.value | update
log_probs = [backend.forward(batch, jobs.select_log_probs).value.tolist() for batch in batches]
weights = backend.get_weights().value
names = sorted(weights)[:2]
some = backend.gather_weights(names).value
out["some"] = [list(some) == names, all(some[name].equal(weights[name]) for name in names)]
seen = []
try:
    backend.consume_weights(partial(jobs.fail_after_two, seen))
except ZeroDivisionError:
    out["consumed"] = len(seen)
backend.load_weights(weights)
again = [backend.forward(batch, jobs.select_log_probs).value.tolist() for batch in batches]
out["same after loading"] = again == log_probs
results = []
threads = [threading.Thread(target=lambda i=i: results.append(group.run("telling", jobs.tell_rank, i))) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
out["threads"] = sorted(result[0][0] for result in results if len(set(result)) == 1)
out["records"] = jobs.record_updates(backend, jobs.make_scored_batch())
group.drop_backend("policy")
out |= {"log_probs": log_probs, "shards": backend.num_shards, "computes": sorted(backend.computes), "version": backend.weight_version}
print(json.dumps(out), flush=True)
""")


@pytest.fixture(scope="module")
def worked(tmp_path_factory) -> dict:
    """Return the results of three ranks that all succeeded."""
    children = start_ranks(WORK, 3, folder=tmp_path_factory.mktemp("worked"))
    ends = end_all(children)
    assert [status for status, _ in ends] == [0, 0, 0], ends
    assert children[1].out == children[2].out == ""
    return json.loads(children[0].out)


def test_each_rank_gets_its_own_and_answers_come_by_rank(worked):
    assert worked["told"] == [[5, 0], [5, 1], [5, 2]]


def test_commands_of_several_threads_have_one_order(worked):
    assert worked["threads"] == list(range(8))


def test_an_error_that_all_ranks_meet_is_raised_as_it_is_and_one_of_another_rank_names_it(worked):
    assert worked["alike"] == ["CheckpointError", "the directory does not fit"]
    assert worked["alone"] == ["CheckpointError", "rank 2 failed in trying: the disk is full"]  # and both left the group usable


def test_what_cannot_be_sent_is_refused_with_what_to_do(worked):
    kind, message = worked["unsendable"]
    assert kind == "ConfigError"
    assert "define each at the top of a module" in message


def test_an_answer_that_cannot_be_sent_is_an_error_of_its_rank_and_leaves_the_group_usable(worked):
    kind, message = worked["unsendable answer"]
    assert kind == "BackendError"
    # both of the others fail so; the first is reported
    assert re.match(r"rank [12] failed in trying: what it returned cannot be sent to rank 0 \(a builtins.function is no", message)


def test_three_ranks_train_as_one_process_does(worked):
    """Eight rows, then two, so that a rank has none, with gradients and log-probs of every row."""
    model = create_tiny_model()
    alone = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-2))
    batches = jobs.make_batches()
    assert worked["read"] == [True] * len(batches)
    for number, batch in enumerate(batches):
        expected = alone.forward_backward(batch, sft_loss, with_entropy=True).value | alone.optim_step().value
        assert worked[f"step {number}"] == pytest.approx(expected, abs=1e-5)
    for batch, found in zip(batches, worked["log_probs"], strict=True):
        torch.testing.assert_close(torch.tensor(found), alone.forward(batch, jobs.select_log_probs).value, atol=1e-5, rtol=0)
    assert (worked["shards"], worked["version"]) == (3, 0)
    assert "log_probs" in worked["computes"]


def test_what_updates_saw_of_the_tokens_of_three_ranks_is_gathered_on_rank_0(worked):
    model = create_tiny_model()
    alone = PyTorchTrainingBackend(model, create_adamw_optimizer(model, lr=1e-2))
    for batch in jobs.make_batches():
        alone.forward_backward(batch, sft_loss)
        alone.optim_step()
    jobs.check_records(worked["records"], jobs.record_updates(alone, jobs.make_scored_batch()))


def test_weights_are_gathered_on_rank_0_alone_and_a_consumer_that_fails_hangs_nobody(worked):
    assert worked["some"] == [True, True]
    assert worked["consumed"] == 2
    assert worked["same after loading"]


# -- failures


def fail(body: str, folder: Path, num_ranks: int = 2) -> tuple[list[int], list[str]]:
    """The statuses and the errors of ranks of which rank 0 does this."""
    ends = end_all(start_ranks(script(body), num_ranks, folder=folder))
    return [status for status, _ in ends], [error for _, error in ends]


def test_a_loss_that_raises_on_one_rank_ends_all_with_one_traceback(tmp_path: Path):
    body = """
backend = lead_backend(group, "policy", jobs.create_tiny_backend)
backend.forward_backward(jobs.make_batches()[0], partial(jobs.loss_of_named_rank, rank=1))
"""
    statuses, errors = fail(body, tmp_path, 3)
    assert statuses == [1, 1, 1]
    assert "error: rank 1 failed in forward_backward: ZeroDivisionError: a bad loss" in errors[0]
    assert "".join(errors).count("Traceback") == 1
    for rank in (1, 2):
        (line,) = errors[rank].splitlines()
        assert line.startswith(f"error: rank {rank} ends: rank 1 failed in forward_backward")


def test_a_rank_that_is_killed_in_an_operation_is_named(tmp_path: Path):
    body = f"""
try:
    group.run("adding up", jobs.send_signal, 1, {int(signal.SIGKILL)}, own=[(0,), (1,), (2,)])
except BackendError:
    try:
        group.run("going on", jobs.tell_rank)
    except BackendError as error:
        print(error, flush=True)
    raise
"""
    children = start_ranks(script(body), 3, folder=tmp_path)
    statuses, errors = zip(*end_all(children), strict=True)
    assert statuses == (1, -signal.SIGKILL, 1)
    assert children[0].out.startswith("going on cannot run: rank 1 failed in adding up: its process is gone")
    assert "error: rank 1 failed in adding up: its process is gone" in errors[0]
    assert "rank 1 failed in adding up" in errors[2]
    assert "Traceback" not in "".join(errors)


def test_ranks_that_wait_end_when_rank_0_is_killed(tmp_path: Path):
    children = start_ranks(script(f"{ALL_MET}\nprint('ready', flush=True)\ntime.sleep(100)"), 2, folder=tmp_path)
    children[0].wait_for_lines(1)
    os.kill(children[0].pid, signal.SIGKILL)
    ends = end_all(children)
    assert [status for status, _ in ends] == [-signal.SIGKILL, 1]
    assert ends[1][1].endswith("error: rank 1 ends: rank 0 is gone\n")  # torch may warn of the connection before


def test_a_rank_that_is_killed_while_nothing_is_computed_ends_the_run(tmp_path: Path):
    children = start_ranks(script(f"import trio\n{ALL_MET}\nprint('ready', flush=True)\ntrio.run(group.wait_for_loss)"), 2, folder=tmp_path)
    children[0].wait_for_lines(1)
    os.kill(children[1].pid, signal.SIGKILL)
    ends = end_all(children)
    assert [status for status, _ in ends] == [1, -signal.SIGKILL]
    assert "error: rank 1 is gone: it was killed, or ran out of memory" in ends[0][1]


def test_a_rank_that_is_killed_while_a_checkpoint_is_written_beside_training_is_named(tmp_path: Path):
    (tmp_path / "staged").mkdir()
    body = f"""
from pathlib import Path
directory, sign = Path({str(tmp_path / "staged")!r}), Path({str(tmp_path / "sign")!r})
backend = lead_backend(group, "policy", jobs.create_tiny_backend)
group.run("preparing", jobs.die_when_writing, 1, sign, own=[(0,), (1,)])
wait = backend.stage_checkpoint(directory).value
sign.touch()
wait()
"""
    ends = end_all(start_ranks(script(body), 2, folder=tmp_path))
    assert [status for status, _ in ends] == [1, -signal.SIGKILL]
    assert f"error: rank 1 is gone in writing the checkpoint {tmp_path / 'staged'}: it was killed, or ran out of memory" in ends[0][1]


def test_only_a_failed_exchange_is_taken_for_a_lost_rank():
    with join_ranks({}) as group, pytest.raises(CheckpointError, match="no space"), group.name_lost_rank("writing"):
        assert group._watch is not None
        group._watch._gone.append(1)
        raise CheckpointError("no space left")


def test_an_error_of_rank_0_between_commands_ends_the_others_as_failed(tmp_path: Path):
    statuses, errors = fail("raise ZeroDivisionError('of the user')", tmp_path)
    assert statuses == [1, 1]
    assert "ZeroDivisionError: of the user" in errors[0]
    assert errors[1].endswith("error: rank 1 ends: rank 0 failed: ZeroDivisionError\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (f"group.run('adding up', jobs.send_signal, 1, {int(signal.SIGSTOP)}, own=[(0,), (1,)])", "gives no sign of life"),
        ("group.run('adding up', jobs.sleep_on_rank, 1, own=[(0,), (1,)])", "has not come to the end of adding up within 4 s"),
    ],
)
def test_a_rank_that_stops_or_hangs_is_named_after_the_timeout(tmp_path: Path, monkeypatch, call: str, message: str):
    body = f"print('ready', flush=True)\n{call}"
    children = start_ranks('import os\nos.environ["TEST_TIMEOUT_S"] = "4"\n' + script(body), 2, folder=tmp_path)
    started = time.monotonic()
    try:
        assert children[0].wait() == 1
        assert time.monotonic() - started < 30
        assert "rank 1 failed in adding up" in children[0].error
        assert message in children[0].error
        if "sleep" in call:
            assert children[1].wait() == 1  # its own watch has ended it
            assert "rank 1 ends, stuck in adding up" in children[1].error
    finally:
        for child in children:
            child.kill()


@pytest.mark.slow
def test_where_one_rank_has_failed_nobody_waits_long_for_one_that_hangs(tmp_path: Path):
    """Ten minutes is the time of a command; the grace of a rank that hangs is one second."""
    children = start_ranks(
        'import os\nos.environ["TEST_TIMEOUT_S"] = "600"\n' + script("group.run('adding up', jobs.fail_or_sleep, own=[(0,), (1,), (2,)])"),
        3,
        folder=tmp_path,
    )
    try:
        assert children[0].wait() == 1
        assert "rank 1 failed in adding up" in children[0].error
        assert "no good" in children[0].error
    finally:
        for child in children:
            child.kill()


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path):
    children = start_ranks(
        'import os\nos.environ["TEST_TIMEOUT_S"] = "3"\nos.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"\n' + script("pass"),
        2,
        folder=tmp_path,
    )
    (first, error), (second, _) = end_all(children)
    assert (first, second) == (1, 1)
    assert "rank 2 of 3 did not join within 3 s" in error


# -- parts, in this process


def create_pair() -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    keys = {"near": b"of the one", "far": b"of the other"}
    return (
        Channel(near, send_key=keys["near"], receive_key=keys["far"]),
        Channel(far, send_key=keys["far"], receive_key=keys["near"]),
    )


def test_values_arrive_as_they_were_and_a_view_without_the_rest_of_its_tensor():
    big = torch.arange(1_000_000)
    value = {"row": big[7:9], "flag": torch.tensor(True), "half": torch.ones(2, dtype=torch.bfloat16), "none": None, "loss": sft_loss}
    data = dump_value(value, names=True)
    assert len(data) < 4000
    found = load_value(data, names=True)
    assert torch.equal(found["row"], torch.tensor([7, 8]))
    assert found["flag"].item() is True
    assert torch.equal(found["half"], value["half"])
    assert found["loss"] is sft_loss
    found["row"][0] = 1  # the receiver owns the value that arrives


def test_messages_are_whole_and_the_end_of_a_process_is_seen_at_once():
    near, far = create_pair()
    for message in (b"", b"x"):
        near.send(message, 5.0)
    assert far.receive(5.0) == b""
    assert far.receive(5.0) == b"x"
    with pytest.raises(ChannelClosed):
        far.receive(0.05)
    near.close()
    with pytest.raises(ChannelClosed, match="gone"):
        far.receive(None)


def test_a_message_of_many_packets_arrives_and_leaves_the_next_one_alone():
    near, far = create_pair()
    large = bytes(range(256)) * 12_345  # 3 MiB: of several parts, the last of them short
    sender = threading.Thread(target=lambda: [near.send(message, PATIENCE_S) for message in (large, b"next")])
    sender.start()
    assert far.receive(PATIENCE_S) == large
    assert far.receive(PATIENCE_S) == b"next"
    sender.join()


def test_an_operation_that_was_interrupted_is_the_last_one():
    """The other ranks may be anywhere in it."""

    def interrupt(backends):
        raise KeyboardInterrupt

    try:
        with join_ranks({}) as group:
            with pytest.raises(KeyboardInterrupt):
                group.run("adding up", interrupt)
            with pytest.raises(BackendError, match="going on cannot run: rank 0 was interrupted in adding up by KeyboardInterrupt"):
                group.run("going on", jobs.tell_rank)
    finally:
        leave_distributed()  # a broken group leaves it to the end of the process


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
     {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}],
)  # fmt: skip
def test_an_environment_that_makes_no_sense_is_refused(environment):
    with pytest.raises(ConfigError, match="torchrun"):
        read_placement(environment)


def describe(rank: int, error: Exception) -> Failure:
    return describe_failure(rank, error)


def lost() -> Exception:
    error = BackendError("forward on rank 2 of 3: the connection to another rank is lost")
    error.__cause__ = RuntimeError("gloo: Connection closed by peer [127.0.0.1]")
    return error


@pytest.mark.parametrize(
    ("failures", "missing", "trouble", "expected"),
    [
        ({0: lost(), 1: ValueError("bad"), 2: lost()}, [], Trouble("forward", {2: "x", 1: "y"}), 1),
        ({0: lost(), 2: lost()}, [1], Trouble("forward", gone=(1,)), 1),
        ({0: lost(), 1: ValueError("bad")}, [2], Trouble("forward", {1: "bad"}, gone=(2,)), 1),
        ({0: lost()}, [1, 2], Trouble("forward", gone=(2,)), 2),
        ({0: lost()}, [1, 2], Trouble("forward", silent=(2,)), 2),
        ({0: lost(), 1: lost()}, [2], Trouble("forward"), 2),
        ({0: ValueError("mine"), 1: KeyError("other")}, [], Trouble("forward", {1: "other"}), 0),
        ({1: KeyError("later"), 2: ValueError("first")}, [], Trouble("forward", {2: "first", 1: "later"}), 2),
        ({0: lost(), 1: lost(), 2: lost()}, [], Trouble("forward"), 0),
    ],
)
def test_the_rank_that_the_others_failed_because_of_is_found(failures, missing, trouble, expected):
    told = {rank: describe(rank, error) for rank, error in failures.items()}
    assert find_cause("forward", told, missing, trouble, 10.0).rank == expected


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: ValueError("bad"), 1: ValueError("bad there, too")}, True),
        ({0: lost(), 1: lost()}, True),
        ({0: RuntimeError("gloo: Connection closed by peer"), 1: RuntimeError("a bug of the user")}, False),
        ({0: lost(), 1: BackendError("of its own")}, False),
        ({0: ValueError("bad")}, False),
    ],
)
def test_a_broken_exchange_is_not_like_an_error_of_the_same_class(failures, expected: bool):
    assert are_alike({rank: describe(rank, error) for rank, error in failures.items()}, 2) == expected


@pytest.mark.parametrize(
    "message",
    [
        "Read error [127.0.0.1]:4711. This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!",
        "Socket unexpectedly closed [127.0.0.1]:4711",
        "Connection closed by peer [127.0.0.1]:4711",
    ],
)
def test_what_gloo_says_of_a_dead_rank_is_no_failure_of_the_rank_that_says_it(message: str):
    assert describe(0, RuntimeError(f"[/pytorch/third_party/gloo/pair.cc:538] {message}")).is_consequence
    assert not describe(0, RuntimeError("a shape is wrong")).is_consequence


def test_what_is_said_of_a_rank_without_an_answer_is_what_was_seen():
    told = {0: describe(0, lost())}
    assert "within 10 s. Raise the timeout" in find_cause("forward", told, [1], Trouble("forward"), 10.0, waited_s=10.2).message
    given_up = find_cause("forward", told, [1], Trouble("forward"), 10.0, waited_s=1.2).message
    assert "within 1.2 s, in which other ranks have failed" in given_up
    assert "timeout" not in given_up
    closed = find_cause("forward", told, [1, 2], Trouble("forward"), 10.0, closed=[2], waited_s=1.2)
    assert (closed.rank, closed.message.split(",")[0]) == (2, "it has closed the connection to rank 0 without an answer")
    gone = find_cause("forward", told, [1, 2], Trouble("forward", gone=(2, 1)), 10.0, closed=[1], waited_s=1.2)
    assert (gone.rank, gone.message.split(":")[0]) == (2, "its process is gone")


class DiskFull:
    """A backend that has failed to write beside training before anybody asks."""

    def __init__(self) -> None:
        self.writer = AsyncWriter(alone())

    def save_checkpoint(self, directory: Path) -> WriteFuture:
        future = self.writer.start(self.write, "save_checkpoint")
        wait_until(future.done)
        return future

    def write(self, ranks) -> None:
        raise CheckpointError("the disk is full")

    def close(self) -> None:
        self.writer.close()


def test_a_write_beside_training_that_has_failed_already_is_an_error_of_the_checkpoint(tmp_path: Path):
    with join_ranks({}) as group:
        backend = lead_backend(group, "policy", DiskFull)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="the disk is full"):
                backend.save_checkpoint(tmp_path)


def test_checkpoints_beside_training_share_one_process_group(monkeypatch):
    made: list[dict] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: made.append(options))
    writer = AsyncWriter(replace(alone(), world_size=2, timeout_s=10.0))
    for _ in range(3):
        writer.start(lambda ranks: None, "save_checkpoint")
        writer.close()
    assert len(made) == 1


def test_a_surprise_of_another_rank_comes_with_its_traceback_and_an_error_of_the_library_as_what_it_is():
    try:
        raise ValueError("bad")
    except ValueError as error:
        made = make_error(read_failure(load_value(dump_value(vars(describe(3, error))))), "forward")
    assert isinstance(made, BackendError)
    assert str(made) == "rank 3 failed in forward: ValueError: bad"
    assert 'raise ValueError("bad")' in made.__notes__[0]
    made = make_error(describe(3, CheckpointError("full")), "save_checkpoint")
    assert isinstance(made, CheckpointError)
    assert not hasattr(made, "__notes__")


def test_a_process_that_was_stopped_does_not_think_that_others_were_silent():
    times = iter((0.0, 1.0, 2.0, 1000.0, 1001.0))
    clock = AwakeClock(2.0, lambda: next(times))
    assert [clock.advance() for _ in range(4)] == [1, 2, 4, 5]


LIMITS = WatchLimits(timeout_s=0.4, grace_s=0.2, beat_s=0.02)


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)


def test_rank_0_stuck_beside_a_failed_rank_is_ended_with_the_report():
    near, far = create_pair()
    told: list[str] = []
    watch = LeaderWatch({1: near}, LIMITS, told.append)
    watch.start()
    watch.begin("forward")
    far.send(b"FValueError: bad", 5.0)
    wait_until(lambda: told)
    watch.close()
    assert told[0].startswith("rank 0 ends, stuck in forward: rank 1 failed in forward: ValueError: bad")
    messages = []
    while not messages or not messages[-1].startswith(b"A"):
        messages.append(far.receive(5.0))
    assert messages[-1] == b"Arank 1 failed in forward: ValueError: bad"


def test_an_operation_that_is_done_in_time_ends_nobody():
    near, far = create_pair()
    told: list[str] = []
    watch, other = (
        LeaderWatch({1: near}, LIMITS, told.append),
        WorkerWatch(1, far, LIMITS, wake=lambda: told.append("woken"), end=told.append),
    )
    watch.start()
    other.start()
    for _ in range(10):
        watch.begin("forward")
        other.begin("forward")
        time.sleep(0.08)  # in all longer than every limit
        other.finish()
        assert watch.finish() == Trouble("forward")
    other.close()
    watch.close()
    assert told == []


def test_rank_0_is_told_by_a_heartbeat_that_another_rank_is_to_end():
    near, far = create_pair()
    watch, other = LeaderWatch({1: near}, LIMITS), WorkerWatch(1, far, LIMITS, wake=lambda: None)
    watch.start()
    other.start()
    time.sleep(3 * LIMITS.beat_s)
    assert watch.stop_asked_by is None
    other.asks_to_stop = True
    wait_until(lambda: watch.stop_asked_by == 1)
    other.close()
    watch.close()
    assert watch.look().reports == {}


def test_a_stuck_rank_is_ended_and_a_waiting_one_woken_when_rank_0_is_gone_or_silent():
    for leader in ("gone", "silent", "says so"):
        for operation in ("forward", None):
            near, far = create_pair()
            told: list[str] = []
            watch = WorkerWatch(1, far, LIMITS, wake=partial(told.append, "woken"), end=told.append)
            if operation is not None:
                watch.begin(operation)
            watch.start()
            if leader == "gone":
                near.close()
            elif leader == "says so":
                near.send(b"Arank 2 failed", 5.0)
            wait_until(lambda told=told: told)
            watch.close()
            reason = {"gone": "rank 0 is gone", "silent": "rank 0 has given no sign of life for 0.4 s", "says so": "rank 2 failed"}[leader]
            assert told[0] == ("woken" if operation is None else f"rank 1 ends, stuck in forward: {reason}")
            assert watch.reason == reason


def test_a_group_of_one_needs_no_launcher_and_takes_any_function():
    with join_ranks({}) as group:
        backend = lead_backend(group, "policy", lambda: create_tiny_backend())
        found = backend.forward(jobs.make_batches()[0], lambda outputs: outputs.log_probs).value
        assert found.shape == jobs.make_batches()[0].tokens.shape
        with pytest.raises(ZeroDivisionError):
            group.run("failing", lambda backends: 1 / 0)
        assert group.run("telling", jobs.tell_rank, 3) == [(3,)]
