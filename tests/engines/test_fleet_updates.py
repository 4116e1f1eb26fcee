"""Updates of a fleet that are cancelled, or cross a member that leaves: what each member then has, and whether it is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import save_file
from test_fleet import LONG, PARAMS, count_requests, fakes, fleet_of, generate_all, sync

from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import MemberState
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.errors import EngineError
from rollouts.testing import FakeEngine
from rollouts.types import Completion


def states(fleet: EngineFleet) -> list[MemberState]:
    return [member.state for member in fleet.members]


class Careless(FakeEngine):
    """Goes on with an update whose caller has gone: half of it is then in place, under the old version."""

    content = "old"

    async def update_weights(self, weights: Mapping[str, Any], weight_version: int) -> Mapping[str, Any]:
        is_done = False
        try:
            answer = await super().update_weights(weights, weight_version)
            is_done = True
        finally:
            self.content = f"version {weight_version}" if is_done else "half"
        return answer


def create_careless(n: int = 2) -> list[Careless]:
    return [Careless(LONG, seconds_per_update=10.0, name="abc"[i]) for i in range(n)]


async def test_a_member_whose_update_was_cancelled_is_given_weights_whatever_it_names(autojump_clock):
    engines = create_careless()
    async with fleet_of(engines) as fleet:
        await sync(fleet, 1)
        with trio.move_on_after(5.0):
            await fleet.update_weights({"w": torch.ones(1)}, 2)
        assert [(engine.content, engine.weight_version) for engine in engines] == [("half", 1)] * 2
        found = await generate_all(fleet, 4)
        assert {c.output_versions for c in found.values()} == {(1,) * 10}
        assert [engine.content for engine in engines] == ["version 1"] * 2, "they are given what they had"


async def test_where_the_old_weights_cannot_be_given_again_a_cancelled_update_is_ended_by_those_that_come_back(autojump_clock):
    engines = create_careless()
    async with fleet_of(engines) as fleet:
        with trio.move_on_after(5.0):
            await sync(fleet, 1)
        found = await generate_all(fleet, 4)
        assert {c.output_versions for c in found.values()} == {(1,) * 10}
        assert await fleet.get_weight_version() == 1


async def test_a_member_that_was_told_nothing_yet_goes_on_after_a_cancelled_update(autojump_clock):
    engines, said = fakes(2), list[str]()
    found: dict[int, Completion] = {}
    async with fleet_of(engines, said, drain_s=30.0) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: generate_all(fleet, 2, found=found))
        await trio.sleep(1.0)
        with trio.move_on_after(5.0):
            await sync(fleet, 1)
        assert states(fleet) == [MemberState.SERVING] * 2
    assert (len(found), said) == (2, [])


async def test_members_that_failed_an_update_are_not_left_in_it_where_it_is_cancelled(autojump_clock):
    class Slow(FakeEngine):
        seconds_per_look = 0.0

        async def get_weight_version(self) -> int:
            await trio.sleep(self.seconds_per_look)
            return await super().get_weight_version()

    engines = [Slow(LONG, update_error=EngineError("no disk"), name=name) for name in "ab"]
    async with fleet_of(engines) as fleet:
        for engine in engines:
            engine.seconds_per_look = 20.0
        with trio.move_on_after(5.0) as waited:  # while they are asked what they have
            await sync(fleet, 1)
        assert waited.cancelled_caught
        for engine in engines:
            engine.seconds_per_look = 0.0
        with trio.fail_after(60.0):
            assert (await fleet.generate((3,), PARAMS)).output_versions == (0,) * 10
    engines = fakes(2, seconds_per_update=1.0, update_error=EngineError("no disk"))
    engines[1]._seconds_per_update = 100.0
    async with fleet_of(engines) as fleet:
        with trio.move_on_after(5.0):  # one has failed, the other has not answered
            await sync(fleet, 1)
        for engine in engines:
            engine._update_error, engine._seconds_per_update = None, 0.0
        with trio.fail_after(60.0):
            await fleet.generate((3,), PARAMS)


async def test_a_member_that_is_told_to_leave_in_its_update_gets_nothing_more(autojump_clock):
    engines = fakes(2, seconds_per_update=10.0)
    async with fleet_of(engines, updates_at_once=1) as fleet, trio.open_nursery() as nursery:
        engines[0]._seconds_per_token = 50.0
        nursery.start_soon(fleet.generate, (3,), PARAMS)
        await trio.sleep(1.0)
        nursery.start_soon(sync, fleet, 1)
        await trio.sleep(5.0)
        nursery.start_soon(fleet.drain, engines[0], 60.0)
        await trio.sleep(6.0)
        assert states(fleet) == [MemberState.DRAINING, MemberState.UPDATING]
        await generate_all(fleet, 4)
        assert [count_requests(engine) for engine in engines] == [1, 4]
        nursery.cancel_scope.cancel()


async def test_a_member_that_is_told_to_leave_while_it_comes_back_does_not_serve_again(autojump_clock):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said, first_wait_s=1.0) as fleet, trio.open_nursery() as nursery:
        engines[0]._seconds_per_token = 50.0
        nursery.start_soon(fleet.generate, (3,), PARAMS)
        await trio.sleep(1.0)
        engines[0]._seconds_per_token = 5.0
        fleet.report_down(engines[0], "it hangs")
        await trio.sleep(1.5)  # it is generating the token by which it is known to be back
        nursery.start_soon(fleet.drain, engines[0], 100.0)
        await trio.sleep(60.0)
        assert states(fleet)[0] is MemberState.DRAINING
        assert not any("is back" in text for text in said)
        nursery.cancel_scope.cancel()


async def test_tokens_older_than_the_weights_that_were_confirmed_are_not_accepted(autojump_clock):
    engines, said = fakes(2), list[str]()
    async with fleet_of(engines, said) as fleet:
        await sync(fleet, 5)
        engines[0].weight_version = 0  # started again by somebody, between two looks
        found = await generate_all(fleet, 4)
        assert {c.output_versions for c in found.values()} == {(5,) * 10}
        assert fleet.metrics()["num_requests_retried"] == 2
        await trio.sleep(30.0)
        assert (states(fleet), engines[0].weight_version) == ([MemberState.SERVING] * 2, 5)
    assert "-0000 with weight version 0, but 5 was confirmed before" in said[0]


async def test_an_update_to_an_older_version_is_no_failure_of_those_that_were_generating(autojump_clock):
    engines, said = fakes(2), list[str]()
    found: dict[int, Completion] = {}
    async with fleet_of(engines, said) as fleet:
        await sync(fleet, 5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: generate_all(fleet, 2, found=found))
            await trio.sleep(2.5)
            await sync(fleet, 3)
            await trio.sleep(2.0)
            await sync(fleet, 7)
    assert ({c.output_versions for c in found.values()}, said) == ({(5,) * 2 + (3,) * 2 + (7,) * 6}, [])


async def test_what_a_member_has_in_flight_is_not_answered_by_weights_that_failed_their_check(autojump_clock):
    engines = fakes(2)
    found: dict[int, Completion] = {}

    async def check(engine: Any) -> None:
        await trio.sleep(0.5)
        if engine is engines[0]:
            raise EngineError("it is off by 3 nats")

    async with fleet_of(engines, exclude_failed=True) as fleet, trio.open_nursery() as nursery:
        await sync(fleet, 1)
        nursery.start_soon(lambda: generate_all(fleet, 4, found=found))
        await trio.sleep(2.0)
        await fleet.check_each(check)
        await trio.sleep(30.0)
        assert fleet.metrics()["num_requests_retried"] == 2
        assert [count_requests(engine) for engine in engines] == [2, 4]
    assert len(found) == 4


async def test_an_update_whose_members_go_down_before_they_are_told_waits_for_them(autojump_clock):
    engines, said = fakes(1), list[str]()
    async with fleet_of(engines, said) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(sync, fleet, 1)
        while not fleet._health.updating.locked():
            await trio.lowlevel.checkpoint()
        fleet.report_down(engines[0], "one request failed")
        await trio.sleep(10.0)
        assert (states(fleet), await fleet.get_weight_version()) == ([MemberState.SERVING], 1)
    assert len(said) == 2


async def test_a_member_that_comes_back_during_a_sync_gets_the_weights_of_that_sync(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, first_wait_s=1.0) as fleet:
        engines[0].kill()
        fleet.report_down(engines[0], "it ended")
        engines[0].revive(0)
        await trio.sleep(1.5)  # it generates the token by which it is known to be back
        await sync(fleet, 5)
        await trio.sleep(0.8)
        assert [member.version for member in fleet.members if member.state is MemberState.SERVING] == [5]
        await trio.sleep(30.0)
        assert [member.version for member in fleet.members] == [engine.weight_version for engine in engines] == [5, 5]


async def test_a_member_that_generates_with_other_weights_than_it_names_does_not_come_back(autojump_clock):
    class Liar(FakeEngine):
        async def get_weight_version(self) -> int:
            await super().get_weight_version()
            return 0

    engines = [Liar(LONG, name="liar"), *fakes(1)]
    async with fleet_of(engines) as fleet:
        fleet.report_down(engines[0], "it ended")
        engines[0].weight_version = 7
        await trio.sleep(60.0)
        assert states(fleet) == [MemberState.DOWN, MemberState.SERVING]


class Labeled(FakeEngine):
    """Names the new version before it has the weights."""

    async def update_weights(self, weights: Mapping[str, Any], weight_version: int) -> Mapping[str, Any]:
        self.weight_version = weight_version
        return await super().update_weights(weights, weight_version)


async def test_a_member_that_failed_an_update_is_not_believed_what_it_names(autojump_clock):
    engines = [Labeled(LONG, update_error=EngineError("half-way"), name="a"), *fakes(1)]
    async with fleet_of(engines, exclude_failed=True) as fleet:
        await sync(fleet, 1)
        await trio.sleep(20.0)
        assert states(fleet) == [MemberState.DOWN, MemberState.SERVING]
        engines[0]._update_error = None
        await trio.sleep(100.0)
        assert states(fleet) == [MemberState.SERVING] * 2


async def test_while_a_member_is_given_weights_the_version_is_the_one_that_it_had(autojump_clock):
    async with fleet_of([Labeled(LONG, seconds_per_update=10.0)]) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(sync, fleet, 1)
        await trio.sleep(5.0)
        assert await fleet.get_weight_version() == 0
        await trio.sleep(10.0)
        assert await fleet.get_weight_version() == 1


async def test_a_member_that_is_said_to_be_back_is_tried_often_again_although_it_failed_for_long(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, first_wait_s=1.0, longest_wait_s=1000.0) as fleet:
        engines[0].kill()
        fleet.report_down(engines[0], "its process has ended")
        await trio.sleep(1000.0)
        fleet.try_now(engines[0])  # its process has begun, but does not answer yet
        await trio.sleep(0.5)
        engines[0].revive(0)
        await trio.sleep(15.0)
        assert states(fleet)[0] is MemberState.SERVING


async def test_those_behind_a_large_request_that_gives_up_are_served_at_once(autojump_clock):
    (engine,) = fakes(1)
    found: dict[int, Completion] = {}
    async with fleet_of([engine], max_tokens=40) as fleet, trio.open_nursery() as nursery:
        nursery.start_soon(fleet.generate, (3,), PARAMS)
        await trio.sleep(1.0)
        scope = trio.CancelScope()

        async def ask_for_much() -> None:
            with scope:
                await fleet.generate((3,) * 20, PARAMS.new(max_tokens=20))

        nursery.start_soon(ask_for_much)
        await trio.sleep(1.0)
        nursery.start_soon(lambda: generate_all(fleet, 1, found=found))
        await trio.sleep(1.0)
        assert count_requests(engine) == 1
        scope.cancel()
        await trio.sleep(0.5)
        assert count_requests(engine) == 2


async def lose_all_weights(fleet: EngineFleet) -> None:
    """Cancel updates of which no member knows how much it has, and which nobody can give again, nor what was there before."""
    while MemberState.SERVING in states(fleet):
        with trio.move_on_after(5.0) as waited:
            await fleet.update_weights_with(lambda engine: engine.update_weights({}, 1), 1)
        assert waited.cancelled_caught


async def test_where_nobody_has_weights_requests_fail_by_name_and_the_next_sync_brings_all_back(autojump_clock):
    engines, said = create_careless(3), list[str]()
    async with fleet_of(engines, said) as fleet:
        await lose_all_weights(fleet)
        with trio.fail_after(61.0), pytest.raises(EngineError) as raised:
            await fleet.generate((3,), PARAMS)
        for engine in engines:
            assert f"({engine.name}) is down" in str(raised.value)
        assert "the fleet was not told where these weights are" in str(raised.value)
        assert all(engine.content == "half" for engine in engines)
        with trio.fail_after(15.0):
            answer = await sync(fleet, 2)
        assert (answer["num_engines"], answer["failed"], states(fleet)) == (3, {}, [MemberState.SERVING] * 3)
        assert set(said[-3:]) == {f"{member.name} is back with weight version 2" for member in fleet.members}
        assert [engine.content for engine in engines] == ["version 2"] * 3
        assert {c.output_versions for c in (await generate_all(fleet, 6)).values()} == {(2,) * 10}


async def test_members_that_served_nobody_serve_nobody_after_a_sync_that_they_do_not_take(autojump_clock):
    engines = create_careless(3)
    async with fleet_of(engines) as fleet:
        await lose_all_weights(fleet)
        for engine in engines:
            engine._update_error = EngineError("no disk")
        with (
            trio.fail_after(15.0),
            pytest.raises(EngineError, match=r"3 of 3 engines .* did not take weight version 2.*none does now") as raised,
        ):
            await sync(fleet, 2)
        assert str(raised.value).count("no disk") == 3
        assert states(fleet) == [MemberState.DOWN] * 3
        engines[0]._update_error = None
        engines[1]._error_for = lambda prompt, seed: EngineError("out of memory")  # takes weights, but generates nothing
        engines[1]._update_error = None
        with pytest.raises(EngineError, match=r"2 of 3 engines .*did not take weight version 3") as raised:
            await sync(fleet, 3)
        assert "out of memory" in str(raised.value) and "no disk" in str(raised.value)
        assert states(fleet) == [MemberState.SERVING, MemberState.DOWN, MemberState.DOWN]


async def test_a_member_that_cannot_generate_does_not_serve_because_a_sync_of_it_failed(autojump_clock):
    engines = fakes(2, update_error=EngineError("no disk"), error_for=lambda prompt, seed: EngineError("out of memory"))
    async with fleet_of(engines, first_wait_s=100.0, longest_wait_s=100.0) as fleet:
        with pytest.raises(EngineError, match="no engine of the fleet serves"):
            await fleet.generate((3,), PARAMS)
        with pytest.raises(EngineError, match=r"2 of 2 engines .*no disk"):
            await sync(fleet, 1)
        assert states(fleet) == [MemberState.DOWN] * 2


async def test_a_sync_where_nobody_answers_ends_after_the_patience_and_names_each_member(autojump_clock):
    engines = fakes(2)
    async with fleet_of(engines, patience_s=20.0) as fleet:
        for engine in engines:
            engine.kill(f"{engine.name} was preempted")
            fleet.report_down(engine, "it ended")
        with trio.fail_after(21.0), pytest.raises(EngineError, match=r"was given to nobody.*a was preempted.*b was preempted"):
            await sync(fleet, 1)
        begin = trio.current_time()
        with pytest.raises(EngineError, match="given to nobody"):  # it has been patient before
            await sync(fleet, 2)
        assert trio.current_time() - begin < 2.0
        engines[1].revive(0)
        assert (await sync(fleet, 3))["num_engines"] == 1
        assert states(fleet) == [MemberState.DOWN, MemberState.SERVING]


async def test_a_sync_of_members_that_served_nobody_can_be_cancelled_at_any_moment(autojump_clock):
    for seconds in (0.0, 0.5, 1.0, 5.0, 10.0, 10.5, 11.0):
        engines = create_careless(2)
        for engine in engines:
            engine._seconds_per_token = 1.0
        async with fleet_of(engines, updates_at_once=1) as fleet:
            await lose_all_weights(fleet)
            with trio.move_on_after(seconds):
                await fleet.update_weights_with(lambda engine: engine.update_weights({}, 2), 2)
            for engine, state in zip(engines, states(fleet), strict=True):
                assert state in (MemberState.DOWN, MemberState.SERVING), f"after {seconds} s"
                assert state is MemberState.DOWN or engine.content == "version 2", f"after {seconds} s"
            assert (await sync(fleet, 3))["num_engines"] >= 1
            await trio.sleep(60.0)
            assert [engine.content for engine in engines] == ["version 3"] * 2


async def test_files_that_were_replaced_are_not_given_as_the_weights_that_they_were(tmp_path: Path):
    def write(value: float, version: int) -> None:
        save_file({"w": torch.full((int(value),), value)}, tmp_path / "model.safetensors")
        (tmp_path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": version}))

    engines = fakes(2, seconds_per_token=0.0)
    async with fleet_of(engines, first_wait_s=0.01, longest_wait_s=0.01) as fleet:
        write(1.0, 1)
        await fleet.update_weights_from_checkpoint(tmp_path)
        write(2.0, 1)  # other weights under the same name and version
        engines[0].kill()
        fleet.report_down(engines[0], "it ended")
        engines[0].revive(0)
        with trio.fail_after(60.0):
            while "no longer holds the files" not in fleet.members[0].reason and states(fleet)[0] is MemberState.DOWN:
                await trio.sleep(0.01)
        assert (engines[0].weight_version, states(fleet)[0]) == (0, MemberState.DOWN), "it was given none"
        write(3.0, 2)
        await fleet.update_weights_from_checkpoint(tmp_path)
        with trio.fail_after(60.0):
            while states(fleet) != [MemberState.SERVING] * 2:
                await trio.sleep(0.01)
        assert engines[0].weight_version == 2


async def test_an_engine_that_is_added_while_nobody_serves_is_taken_over_by_a_sync_or_told_to_be_added_again(autojump_clock):
    engines = create_careless(2)
    added = Careless(LONG, seconds_per_update=10.0, weight_version=7, name="c")
    async with fleet_of(engines, first_wait_s=200.0, longest_wait_s=200.0) as fleet, trio.open_nursery() as nursery:
        await sync(fleet, 1)
        told: list[str] = []

        async def add() -> None:
            with pytest.raises(EngineError, match=r"c.* could not join the fleet: a sync began while it was down\. Add it again") as raised:
                await fleet.add(added)
            told.append(str(raised.value))

        nursery.start_soon(add)
        await trio.sleep(5.0)  # it is being given version 1
        for engine in (*engines, added):
            fleet.report_down(engine, "it was said to be down")
        with trio.fail_after(40.0):
            assert (await sync(fleet, 2))["failed"] == {}
        assert len(told) == 1
        assert len(fleet.members) == 2 and [engine.content for engine in engines] == ["version 2"] * 2
        await fleet.add(added)
        assert (added.content, states(fleet)) == ("version 2", [MemberState.SERVING] * 3)


async def test_a_member_comes_back_while_a_sync_asks_which_of_the_others_answer(autojump_clock):
    class Slow(FakeEngine):
        seconds_per_look = 0.0

        async def get_weight_version(self) -> int:
            await trio.sleep(self.seconds_per_look)
            return await super().get_weight_version()

    engines = [Slow(LONG, name=name) for name in "ab"]
    async with fleet_of(engines, check_s=30.0, first_wait_s=1.0, longest_wait_s=1.0) as fleet, trio.open_nursery() as nursery:
        engines[1].seconds_per_look = 25.0
        for engine in engines:
            fleet.report_down(engine, "it was said to be down")
        nursery.start_soon(sync, fleet, 1)
        await trio.sleep(10.0)
        assert states(fleet) == [MemberState.SERVING, MemberState.DOWN]
        assert (await fleet.generate((3,), PARAMS)).output_versions == (0,) * 10


async def test_a_member_comes_back_although_the_files_of_its_weights_are_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engines, said = fakes(2, seconds_per_token=0.0), list[str]()
    async with fleet_of(engines, said, first_wait_s=0.01, longest_wait_s=0.01) as fleet:
        save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
        (tmp_path / WEIGHT_VERSION_FILE).write_text(json.dumps({"weight_version": 1}))
        await fleet.update_weights_from_checkpoint(tmp_path)
        engines[0].kill()
        fleet.report_down(engines[0], "it ended")
        find, is_listed = Path.glob, False

        def list_and_remove(self: Path, pattern: str):
            nonlocal is_listed
            found = list(find(self, pattern))
            is_listed |= self == tmp_path
            for file in found if self == tmp_path else ():
                file.unlink()  # after it was listed, before its size is read
            return found

        monkeypatch.setattr(Path, "glob", list_and_remove)
        engines[0].revive(0)
        with trio.fail_after(60.0):
            while "no longer holds the files" not in fleet.members[0].reason:
                await trio.sleep(0.01)
        assert is_listed
        monkeypatch.undo()
        await sync(fleet, 2)
        with trio.fail_after(60.0):
            while states(fleet) != [MemberState.SERVING] * 2:
                await trio.sleep(0.01)
        assert engines[0].weight_version == 2
