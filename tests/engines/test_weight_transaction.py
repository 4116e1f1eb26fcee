from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from benchmarks.reliability.cancellation import cancel_at_step
from rollouts.engines.http.checks import ServerInfo
from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.http.requests import RequestsInFlight, WireRequest
from rollouts.engines.http.samples import Generated
from rollouts.engines.weights import server_weights
from rollouts.engines.weights.checkpoint_check import CheckpointLayout, read_fingerprint
from rollouts.engines.weights.path_map import PathMap
from rollouts.engines.weights.transaction import ServedDirectory, WeightTransaction
from rollouts.errors import EngineError
from rollouts.types import SamplingParams

DEADLINES = Deadlines(options={"sync_s": "--engine.sync-timeout-s", "control_s": "--engine.deadlines.control-s"})


@dataclass
class Server:
    """A server that records its commands; `fail` makes steps raise, `slow` makes them take seconds."""

    steps: list[str] = field(default_factory=list)
    label: str = "default"
    weights: str = "start"
    is_paused: bool = False
    is_asleep: bool = False
    fail: Callable[[str], bool] = lambda step: False
    slow: Callable[[str], float] = lambda step: 0.0

    async def note(self, step: str) -> None:
        self.steps.append(step)
        await trio.sleep(self.slow(step))
        if self.fail(step):
            raise EngineError(f"no {step} today")

    async def pause(self) -> None:
        await self.note("pause")
        self.is_paused = True

    async def resume(self) -> None:
        await self.note("resume")
        self.is_paused = False

    async def load_directory(self, path: Path, label: str) -> None:
        assert self.is_paused
        self.weights = "half"
        await self.note(f"load {path.name}")
        self.weights = path.name

    async def set_label(self, label: str) -> None:
        await self.note(f"label {label}")
        self.label = label

    async def read_label(self) -> str:
        await self.note("read")
        return self.label

    async def sleep(self) -> None:
        await self.note("sleep")
        self.is_asleep = True

    async def wake_up(self) -> None:
        await self.note("wake up")
        self.is_asleep = False

    async def abort(self, wire_ids) -> None:
        raise AssertionError("nothing is aborted here")


class Setup:
    def __init__(self, tmp_path: Path, *, looks_at_files: bool = False) -> None:
        self.start, self.new = tmp_path / "start", tmp_path / "new"
        for directory in (self.start, self.new):
            directory.mkdir()
            (directory / "model.safetensors").write_bytes(b"weights")
        self.server = Server()
        self.requests = RequestsInFlight("the engine", self.server.abort)
        # files are looked at in a thread, which the autojump clock does not wait for
        served = ServedDirectory(self.start, "default", read_fingerprint(self.start) if looks_at_files else None)
        self.transaction = WeightTransaction(self.requests, self.server, deadlines=DEADLINES, served=served)

    async def update(self, version: int | None = 1):
        return await self.transaction.load_directory(self.new, version)

    async def generate(self) -> None:
        """One request; it must not meet a paused server."""

        async def send(request: WireRequest):
            assert not self.server.is_paused
            return [Generated((), (), (), "stop")]

        await self.requests.run("r", (3,), SamplingParams(), 1, send, "sampled")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


async def test_an_update_pauses_loads_labels_reads_back_and_resumes(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: {"pause": 1.0, "load new": 2.0, "read": 0.5, "resume": 0.25}.get(step, 0.0)
    answer = await setup.update(7)
    assert setup.server.steps == ["pause", "load new", "label 7", "read", "resume"]
    assert (setup.server.weights, setup.server.label, setup.server.is_paused) == ("new", "7", False)
    assert answer == {
        "success": True, "weight_version": 7, "pause_s": pytest.approx(1.0), "load_s": pytest.approx(2.0),
        "confirm_s": pytest.approx(0.5), "resume_s": pytest.approx(0.25),
    }  # fmt: skip
    assert setup.requests.initial_version is None  # the initial label would now mean that the server was started again
    await setup.generate()


async def test_requests_wait_while_an_update_runs(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 1.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.update)
        await trio.sleep(0.5)
        await setup.generate()
        assert trio.current_time() >= 5.0


async def test_updates_run_one_after_the_other(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 1.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.update, 1)
        await trio.sleep(0.5)
        nursery.start_soon(setup.update, 2)
    assert setup.server.steps == [
        *["pause", "load new", "label 1", "read", "resume"],
        *["pause", "load new", "label 2", "read", "resume"],
    ]


@pytest.mark.parametrize("step", ["load new", "label 1", "read"])
async def test_a_step_that_fails_brings_back_what_was_there(setup: Setup, step: str):
    failed = []

    def fail_once(found: str) -> bool:
        if found == step and not failed:
            failed.append(found)
            return True
        return False

    setup.server.fail = fail_once
    with pytest.raises(EngineError, match=rf"did not take the weights in .*new: no {step} today\. It goes on with the weights"):
        await setup.update()
    assert setup.server.steps[-4:] == ["load start", "label default", "read", "resume"]
    assert (setup.server.weights, setup.server.label, setup.server.is_paused) == ("start", "default", False)
    assert setup.requests.initial_version == 0
    await setup.generate()
    await setup.update(2)
    assert setup.server.weights == "new"


async def test_a_failure_after_a_good_update_brings_that_one_back(setup: Setup, tmp_path: Path):
    await setup.update(1)
    setup.server.fail = lambda step: step == "load bad"
    (tmp_path / "bad").mkdir()
    with pytest.raises(EngineError, match="goes on with the weights that it had"):
        await setup.transaction.load_directory(tmp_path / "bad", 2)
    assert (setup.server.weights, setup.server.label) == ("new", "1")


async def test_a_pause_that_fails_leaves_the_weights_alone(setup: Setup):
    setup.server.fail = lambda step: step == "pause"
    with pytest.raises(EngineError, match="no pause today"):
        await setup.update()
    assert setup.server.steps == ["pause", "resume"]  # it may have been paused before the answer was lost
    await setup.generate()


async def test_where_the_old_weights_cannot_come_back_nothing_is_served(setup: Setup):
    setup.server.fail = lambda step: step.startswith("load")
    with pytest.raises(EngineError, match=r"could not be given the weights that it had before either \(no load start today\)"):
        await setup.update()
    assert setup.server.is_paused
    with pytest.raises(EngineError, match="cannot be used: an update of its weights failed half-way"):
        await setup.generate()
    setup.server.fail = lambda step: False
    await setup.update(2)
    await setup.generate()


async def test_files_that_were_replaced_are_not_brought_back(tmp_path: Path):
    setup = Setup(tmp_path, looks_at_files=True)
    (setup.start / "model.safetensors").write_bytes(b"other")
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="holds other files now"):
        await setup.update()
    assert "load start" not in setup.server.steps
    assert setup.server.is_paused


async def test_files_that_are_replaced_while_they_are_loaded_do_not_count(tmp_path: Path):
    setup = Setup(tmp_path)
    checked = read_fingerprint(setup.new)
    (setup.new / "model.safetensors").write_bytes(b"the next version's")
    with pytest.raises(EngineError, match="files were replaced after they had been checked"):
        await setup.transaction.load_directory(setup.new, 1, checked)
    assert (setup.server.weights, setup.server.label, setup.transaction.version) == ("start", "default", 0)
    await setup.transaction.load_directory(setup.new, 1, read_fingerprint(setup.new))
    assert (setup.server.weights, setup.server.label, setup.transaction.version) == ("new", "1", 1)


async def test_weights_of_no_directory_cannot_be_brought_back(setup: Setup):
    async def load(label: str) -> None:
        assert label == "3"
        await setup.server.note("tensors")
        setup.server.weights = "tensors"

    answer = await setup.transaction.load_with(load, 3)
    assert (answer["weight_version"], setup.server.label, setup.server.weights) == (3, "3", "tensors")
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="in no directory that this engine knows"):
        await setup.update()
    with pytest.raises(EngineError, match="cannot be used"):
        await setup.generate()


async def test_another_label_than_was_set_is_a_failure(setup: Setup):
    class Mislabelled(Server):
        async def read_label(self) -> str:
            label = await super().read_label()
            return "99" if label == "1" else label

    server = Mislabelled()
    transaction = WeightTransaction(setup.requests, server, served=ServedDirectory(setup.start, "default"))
    with pytest.raises(EngineError, match="labelled '1', but it reports '99'"):
        await transaction.load_directory(setup.new, 1)
    assert server.weights == "start"


async def test_a_resume_that_fails_is_said_and_nothing_hangs(setup: Setup):
    setup.server.fail = lambda step: step == "resume"
    with pytest.raises(EngineError, match="no resume today"):
        await setup.update()
    with pytest.raises(EngineError, match="may still be paused"):
        await setup.generate()
    setup.server.fail = lambda step: False
    await setup.transaction.resume()
    await setup.generate()


@pytest.mark.parametrize("step", ["pause", "load new", "label 1", "read"])
async def test_a_cancelled_update_leaves_the_old_weights_serving(setup: Setup, autojump_clock, step: str):
    slowed = []

    def hang_once(found: str) -> float:
        if found == step and not slowed:
            slowed.append(found)
            return 1000.0
        return 1.0

    setup.server.slow = hang_once
    with trio.move_on_after(10) as scope:
        await setup.update()
    assert scope.cancelled_caught
    assert trio.current_time() < 30
    assert (setup.server.weights, setup.server.label, setup.server.is_paused) == ("start", "default", False)
    await setup.generate()


async def test_an_update_cancelled_at_its_end_is_complete(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 5.0 if step == "resume" else 0.0
    with trio.move_on_after(1):
        await setup.update()
    assert (setup.server.weights, setup.server.label, setup.server.is_paused) == ("new", "1", False)
    await setup.generate()


async def test_putting_old_weights_back_has_the_deadline_of_a_sync(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 590.0 if step == "load start" else 0.0
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="goes on with the weights that it had before"):
        await setup.update()
    assert trio.current_time() == pytest.approx(590.0)
    await setup.generate()
    setup.server.slow = lambda step: 1e9 if step == "load start" else 0.0
    with pytest.raises(EngineError, match=r"it took longer than 610 s: the server hangs, or --engine.sync-timeout-s is too short"):
        await setup.update()
    assert trio.current_time() == pytest.approx(590.0 + 610.0)
    with pytest.raises(EngineError, match="cannot be used"):
        await setup.generate()


async def test_waking_up_has_the_deadline_of_a_sync_and_resuming_a_shorter_one(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 590.0 if step == "wake up" else 0.0
    await setup.transaction.sleep()
    await setup.transaction.wake_up()
    await setup.generate()
    setup.server.slow = lambda step: 1e9 if step == "resume" else 0.0
    with pytest.raises(EngineError, match=r"it took longer than 70 s: the server hangs, or --engine.deadlines.control-s is too short"):
        await setup.update()
    assert trio.current_time() == pytest.approx(590.0 + 70.0)


async def test_a_users_pause_outlasts_an_update(setup: Setup):
    await setup.transaction.pause()
    await setup.transaction.pause()
    await setup.update()
    assert setup.server.is_paused
    assert "resume" not in setup.server.steps
    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.generate)
        await trio.testing.wait_all_tasks_blocked()
        assert setup.requests.num_pending == 1
        await setup.transaction.resume()
    assert not setup.server.is_paused


async def test_a_pause_that_fails_holds_nobody(setup: Setup):
    setup.server.fail = lambda step: step == "pause"
    with pytest.raises(EngineError, match="no pause today"):
        await setup.transaction.pause()
    await setup.generate()


async def test_updates_at_once_without_numbers_of_their_own_get_different_ones(setup: Setup):
    answers = []

    async def update() -> None:
        answers.append(await setup.update(None))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(update)
    assert sorted(answer["weight_version"] for answer in answers) == [1, 2, 3]
    assert setup.server.label == "3"


async def test_a_version_that_was_confirmed_counts_although_the_resume_failed(setup: Setup):
    setup.server.fail = lambda step: step == "resume"
    with pytest.raises(EngineError, match="no resume today"):
        await setup.update(None)
    setup.server.fail = lambda step: False
    assert (await setup.update(None))["weight_version"] == 2  # 1 are other weights, which may have been sampled from


async def test_a_resume_does_not_make_unknown_weights_known(setup: Setup):
    await setup.transaction.pause()
    setup.server.fail = lambda step: step.startswith("load")
    with pytest.raises(EngineError, match="did not take"):
        await setup.update()
    with pytest.raises(EngineError, match=r"which weights it has is not known\. Sync the weights"):
        await setup.transaction.resume()
    assert setup.server.is_paused
    with pytest.raises(EngineError, match="cannot be used"):
        await setup.generate()
    setup.server.fail = lambda step: step == "pause"
    with pytest.raises(EngineError, match=r"no pause today\. Which weights it has is not known since an earlier update failed"):
        await setup.update()
    assert setup.server.is_paused
    setup.server.fail = lambda step: False
    await setup.update()
    await setup.generate()  # the pause of before is over too


async def test_weights_that_come_back_at_a_later_try_are_known_again(setup: Setup):
    setup.server.fail = lambda step: step.startswith("load")
    with pytest.raises(EngineError, match="restart it, then sync the weights"):
        await setup.update()
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="It goes on with the weights that it had before"):
        await setup.update()
    assert (setup.server.weights, setup.server.label, setup.server.is_paused) == ("start", "default", False)
    await setup.generate()


async def test_weights_that_are_back_but_not_resumed_can_be_resumed(setup: Setup):
    setup.server.fail = lambda step: step in ("load new", "resume")
    with pytest.raises(EngineError, match=r"It has the weights that it had before, but could not be resumed \(no resume today\)"):
        await setup.update()
    with pytest.raises(EngineError, match="may still be paused"):
        await setup.generate()
    setup.server.fail = lambda step: False
    await setup.transaction.resume()
    assert (setup.server.weights, setup.server.is_paused) == ("start", False)
    await setup.generate()


async def test_weights_that_are_not_believed_are_served_no_more_and_not_gone_back_to(setup: Setup):
    await setup.update()
    setup.transaction.distrust("its answers are those of other weights")
    with pytest.raises(EngineError, match="cannot be used: its answers are those of other weights"):
        await setup.generate()
    with pytest.raises(EngineError, match="not known"):
        await setup.transaction.resume()
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="in no directory that this engine knows"):
        await setup.update(2)
    setup.server.fail = lambda step: False
    await setup.update(3)
    await setup.generate()


async def test_a_pause_that_is_cancelled_after_it_reached_the_server_is_undone(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 0.0 if step == "resume" else 1000.0
    setup.server.is_paused = True  # by the request whose answer is not waited for
    with trio.move_on_after(10):
        await setup.transaction.pause()
    assert setup.server.steps == ["pause", "resume"]
    assert not setup.server.is_paused
    await setup.generate()


@pytest.mark.parametrize("fails", ["nothing", "load new", "read", "resume"])
async def test_cancelled_at_any_moment_an_update_is_complete_or_undone(tmp_path: Path, fails: str):
    outcomes = []
    for number in range(1, 100):
        (tmp_path / str(number)).mkdir()
        setup = Setup(tmp_path / str(number))
        failed = []

        def fail_once(step: str, failed: list[str] = failed) -> bool:
            if step == fails and not failed:
                failed.append(step)
                return True
            return False

        setup.server.fail = fail_once
        with cancel_at_step(number) as scope, suppress(EngineError):
            await setup.update()
        state = (setup.server.weights, setup.server.label, setup.transaction.version)
        assert state in (("start", "default", 0), ("new", "1", 1))
        try:
            await setup.generate()
        except EngineError:  # what would have brought the server back failed
            with suppress(EngineError):
                await setup.transaction.resume()
            if setup.server.is_paused:
                await setup.update(2)
            await setup.generate()
        outcomes.append(state)
        if not scope.cancel_called:
            break
    assert not scope.cancel_called  # every step was tried
    assert len(outcomes) > 5


async def test_a_server_is_told_to_sleep_after_its_last_answer(setup: Setup, autojump_clock):
    async def send(request: WireRequest):
        await trio.sleep(30)
        setup.server.steps.append("answer")
        return [Generated((), (), (), "stop")]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(setup.requests.run, "r", (3,), SamplingParams(), 1, send, "sampled")
        await trio.sleep(1)
        await setup.transaction.sleep()
    assert setup.server.steps == ["answer", "sleep"]


@pytest.mark.parametrize("step", ["sleep", "wake_up"])
async def test_cancelled_at_any_moment_a_server_can_be_woken_up_and_used(tmp_path: Path, step: str):
    for number in range(1, 100):
        (tmp_path / str(number)).mkdir()
        setup = Setup(tmp_path / str(number))
        if step == "wake_up":
            await setup.transaction.sleep()
        with cancel_at_step(number) as scope:
            await getattr(setup.transaction, step)()
        await setup.transaction.wake_up()
        assert not setup.server.is_asleep
        await setup.generate()
        if not scope.cancel_called:
            break
    assert number > 2 and not scope.cancel_called  # every step was tried


async def test_a_server_that_fails_to_sleep_is_awake_again_and_one_that_sleeps_is_woken_at_the_end(tmp_path: Path):
    setup = Setup(tmp_path)
    setup.server.fail = lambda step: step == "sleep"
    with pytest.raises(EngineError, match="no sleep today"):
        await setup.transaction.sleep()
    assert setup.server.steps == ["sleep", "wake up"]
    await setup.generate()
    setup.server.fail = lambda step: False
    await setup.transaction.sleep()
    await setup.transaction.close()
    assert not setup.server.is_asleep
    setup.server.steps.clear()
    await setup.transaction.close()
    assert setup.server.steps == []


async def test_an_engine_that_is_closed_while_files_are_checked_says_so_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Server()
    requests = RequestsInFlight("the engine", server.abort)
    weights = server_weights.ServerWeights(requests, server, PathMap(), None, allow_cast=False)
    facts = ServerInfo(
        kind="sglang", version="1", model_path=str(tmp_path), served_name="model", context_length=8, log_prob_kind="sampled",
        weight_version="default",
    )  # fmt: skip
    await weights.open(facts)

    def check(path: Path, *args: object, **options: object) -> CheckpointLayout:
        requests.close()
        return CheckpointLayout(path, {}, (), False, ())

    monkeypatch.setattr(server_weights, "check_checkpoint", check)
    with pytest.raises(EngineError, match="the engine is closed: generate inside its `async with` block"):
        await weights.load_checkpoint(tmp_path)
    assert server.steps == []
