from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from rollouts.engines.checkpoint_check import read_fingerprint
from rollouts.engines.http_engine import Generated, RequestsInFlight, WireRequest
from rollouts.engines.weight_transaction import ServedDirectory, ServerControls, WeightTransaction
from rollouts.errors import EngineError
from rollouts.types import SamplingParams


@dataclass
class Server:
    """A server that notes what it is told; `fail` makes steps raise, `slow` makes them take seconds."""

    steps: list[str] = field(default_factory=list)
    label: str = "default"
    weights: str = "start"
    is_paused: bool = False
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

    async def load(self, path: Path, label: str) -> None:
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
        controls = ServerControls(self.server.pause, self.server.load, self.server.set_label, self.server.read_label, self.server.resume)
        # files are looked at in a thread, which the autojump clock does not wait for
        served = ServedDirectory(self.start, "default", read_fingerprint(self.start) if looks_at_files else None)
        self.transaction = WeightTransaction(self.requests, controls, served=served, cleanup_s=60.0)

    async def update(self, version: int = 1):
        return await self.transaction.load_directory(self.new, version, read_fingerprint(self.new))

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
        await setup.transaction.load_directory(tmp_path / "bad", 2, ())
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


async def test_weights_of_no_directory_cannot_be_brought_back(setup: Setup):
    async def load() -> None:
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
    async def other_label() -> str:
        await setup.server.note("read")
        return "99" if setup.server.label == "1" else setup.server.label

    controls = ServerControls(setup.server.pause, setup.server.load, setup.server.set_label, other_label, setup.server.resume)
    transaction = WeightTransaction(setup.requests, controls, served=ServedDirectory(setup.start, "default"))
    with pytest.raises(EngineError, match="labelled '1', but it reports '99'"):
        await transaction.load_directory(setup.new, 1, ())
    assert setup.server.weights == "start"


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


async def test_cleaning_up_does_not_last_for_ever(setup: Setup, autojump_clock):
    setup.server.slow = lambda step: 1e9 if step == "load start" else 0.0
    setup.server.fail = lambda step: step == "load new"
    with pytest.raises(EngineError, match="it took longer than 60 s"):
        await setup.update()
    assert trio.current_time() == pytest.approx(60.0)
    with pytest.raises(EngineError, match="cannot be used"):
        await setup.generate()


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
