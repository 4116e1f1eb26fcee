"""Deadlines of what servers are asked are settings of a run: against sockets that never answer, each ends in an error with its option."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from test_weight_streams import make_backend

from benchmarks.reliability.faulty_proxy import open_proxy
from benchmarks.reliability.loopback import Exchange, serve
from integration.eval.subjects import find_subject, fit_config
from integration.parts.engines import create_fleet_config, create_server_engine, open_weight_channel
from integration.settings.config import Config
from integration.settings.sections.engine import DeadlinesSection, EngineSection
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.engines.fleet.channel import FleetChannel
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import MemberState
from rollouts.engines.protocol import WEIGHT_VERSION_FILE
from rollouts.errors import ConfigError, EngineError, EngineTimeout
from rollouts.testing import FakeSGLangServer, FakeVLLMServer
from rollouts.testing.models import create_tiny_model
from rollouts.testing.servers.sglang.settings import SGLangSettings
from rollouts.testing.servers.vllm.settings import VLLMSettings
from rollouts.training.weight_sync import publish_weights
from rollouts.types import SamplingParams

SHORT = DeadlinesSection(connect_s=0.3, control_s=0.3, health_s=0.3, join_s=1.0, queue_s=0.3, outage_s=0.3, ready_s=0.3)
SLOW_SERVERS = replace(SHORT, connect_s=30.0, control_s=30.0, health_s=30.0)
PATIENCE_S = 60.0
TOKENS = (5, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    create_tiny_model().save_pretrained(directory)
    create_char_tokenizer().save_pretrained(directory)
    (directory / WEIGHT_VERSION_FILE).write_text('{"weight_version": 1}')
    return directory


class Silence:
    """Paths of a server that are not answered from now on."""

    def __init__(self) -> None:
        self.paths: tuple[str, ...] = ()
        self.fault = "hang"

    def choose(self, exchange: Exchange) -> str:
        return self.fault if any(exchange.target.startswith(path) for path in self.paths) else ""


@asynccontextmanager
async def open_server(kind: str, model: Path) -> AsyncGenerator[tuple[str, Silence]]:
    """A server behind a proxy that is silent where it is told to be."""
    silence = Silence()
    can_sleep: Any = VLLMSettings(can_sleep=True) if kind == "vllm" else SGLangSettings(can_sleep=True)
    async with (FakeVLLMServer if kind == "vllm" else FakeSGLangServer)(model, can_sleep) as server:
        async with open_proxy(server.url, silence.choose, bytes) as proxy:
            yield proxy.url, silence


async def generate(engine: Any, model: Path) -> None:
    await engine.generate(TOKENS, SamplingParams(max_tokens=3))


async def take(engine: Any, model: Path) -> None:
    await engine.update_weights_from_checkpoint(model)


CALLS: dict[str, tuple[str, str, Callable[[Any, Path], Awaitable[None]], str]] = {  # kind, silent path, call, option
    "an answer": ("vllm", "/inference", generate, "--engine.generate-timeout-s"),
    "an answer of sglang": ("sglang", "/generate", generate, "--engine.generate-timeout-s"),
    "new weights": ("vllm", "/collective_rpc", take, "--engine.sync-timeout-s"),
    "new weights of sglang": ("sglang", "/update_weights", take, "--engine.sync-timeout-s"),
    "a pause": ("vllm", "/pause", take, "--engine.deadlines.control-s"),
    "a pause of sglang": ("sglang", "/pause_generation", take, "--engine.deadlines.control-s"),
    "a flush": ("sglang", "/flush_cache", lambda engine, _: engine.sleep(), "--engine.deadlines.control-s"),
    "a resume": ("vllm", "/resume", take, "--engine.deadlines.control-s"),
    "the version": ("vllm", "/weight_info", lambda engine, _: engine.get_weight_version(), "--engine.deadlines.control-s"),
    "sleep": ("vllm", "/sleep", lambda engine, _: engine.sleep(), "--engine.sync-timeout-s"),
    "wake up": ("sglang", "/resume_memory_occupation", lambda engine, _: engine.wake_up(), "--engine.sync-timeout-s"),
}


@pytest.mark.parametrize("what", CALLS)
async def test_a_server_that_does_not_answer_in_time_is_an_error_with_the_option(what: str, model: Path):
    kind, path, call, option = CALLS[what]
    word = path.strip("/").partition("_")[0]
    async with open_server(kind, model) as (url, silence):
        section = EngineSection(kind=kind, urls=(url,), generate_timeout_s=0.3, sync_timeout_s=0.3, deadlines=replace(SHORT, health_s=30.0))
        slow = replace(section, generate_timeout_s=30.0, sync_timeout_s=30.0, deadlines=DeadlinesSection())
        async with create_server_engine(slow, url, {}) as starting:  # which may take longer
            deadlines = create_server_engine(section, url, {})._server.deadlines  # type: ignore[attr-defined]
            starting._server._deadlines = deadlines  # type: ignore[attr-defined]
            if what == "wake up":
                await starting.sleep()
            silence.paths = (path,)
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match=rf"{word}.* within 0.3 s: .*{option}") as caught:
                await call(starting, model)
            assert isinstance(caught.value, EngineTimeout) or isinstance(caught.value.__cause__, EngineTimeout)
            silence.paths = ()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_waking_up_and_putting_back_that_may_not_be_cancelled_have_the_deadlines_of_a_run(kind: str):
    section = EngineSection(kind=kind, urls=("http://127.0.0.1:1",), sync_timeout_s=77.0)
    found = create_server_engine(section, "http://127.0.0.1:1", {}).weights._deadlines
    assert (found.sync_s, found.name("sync_s")) == (77.0, "--engine.sync-timeout-s")


async def test_a_server_that_does_not_generate_at_its_start_ends_the_wait_with_the_option(model: Path):
    async with open_server("sglang", model) as (url, silence):
        silence.paths = ("/generate",)
        section = EngineSection(kind="sglang", urls=(url,), deadlines=replace(SHORT, control_s=30.0))
        with (
            trio.fail_after(PATIENCE_S),
            pytest.raises(EngineTimeout, match=r"does not answer within 0.3 s \(--engine.deadlines.health-s\)"),
        ):
            async with create_server_engine(section, url, {}):
                pass


@contextmanager
def never_connects() -> Generator[str]:
    """The address of a socket whose queue is full: the system drops further connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for sock in waiting:
                sock.setblocking(False)
                sock.connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for sock in waiting:
                sock.close()


async def test_a_connection_that_is_never_made_names_its_option():
    with never_connects() as url:
        section = EngineSection(kind="vllm", urls=(url,), deadlines=replace(SHORT, control_s=30.0))
        words = r"no connection to 127.0.0.1:\d+ within 0.3 s.*--engine.deadlines.connect-s"
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineTimeout, match=words):
            async with create_server_engine(section, url, {}):
                pass


async def hang(exchange: Exchange) -> None:
    await exchange.wait_hung_up()


async def test_an_evaluation_does_not_wait_for_ever_for_the_name_of_a_model():
    config = Config(engine=EngineSection(deadlines=SHORT, generate_timeout_s=7.0))
    async with serve(hang) as server:
        with pytest.raises(ConfigError, match=r"did not say within 0.3 s which model it serves.*--engine.deadlines.health-s"):
            await trio.to_thread.run_sync(find_subject, server.url, config)
    with never_connects() as url, pytest.raises(ConfigError, match=r"within 0.3 s .*--engine.deadlines.connect-s"):
        await trio.to_thread.run_sync(find_subject, url, config)


async def test_an_evaluation_of_a_server_has_the_deadlines_of_its_settings(model: Path):
    config = Config(engine=EngineSection(deadlines=SHORT, generate_timeout_s=7.0, sync_timeout_s=8.0))
    async with open_server("vllm", model) as (url, _):
        patient = Config(engine=replace(config.engine, deadlines=DeadlinesSection()))
        subject = await trio.to_thread.run_sync(find_subject, url, patient, str(model))
    section = fit_config(config, subject).engine
    assert (section.deadlines, section.generate_timeout_s, section.sync_timeout_s) == (SHORT, 7.0, 8.0)


@asynccontextmanager
async def open_fleet(
    model: Path, kind: str = "vllm", deadlines: DeadlinesSection = SHORT, sync_timeout_s: float = 30.0, **more: Any
) -> AsyncGenerator[tuple[EngineFleet, list[Silence], list[str]]]:
    """Two servers as the fleet of a run."""
    async with open_server(kind, model) as (a, one), open_server(kind, model) as (b, other):
        section = EngineSection(kind=kind, urls=(a, b), sync_timeout_s=sync_timeout_s, deadlines=deadlines)
        async with create_server_engine(section, a, {}) as first, create_server_engine(section, b, {}) as second:
            config = replace(create_fleet_config(Config(engine=section)), check_every_s=0.05, first_wait_s=0.05, **more)
            said: list[str] = []
            async with EngineFleet([first, second], config=config, say=said.append) as fleet:
                yield fleet, [one, other], said
                for silence in (one, other):
                    silence.paths = ()


async def wait_until_all_are(fleet: EngineFleet, state: MemberState) -> None:
    with trio.fail_after(PATIENCE_S):
        while any(member.state is not state for member in fleet.members):
            await trio.sleep(0.01)


async def test_a_fleet_whose_members_fall_silent_fails_requests_and_syncs_with_the_names_and_options(model: Path):
    deadlines = replace(SHORT, health_s=2.0, control_s=30.0, connect_s=30.0)
    async with open_fleet(model, deadlines=deadlines) as (fleet, silences, said):
        for silence in silences:
            silence.paths = ("/",)
        await wait_until_all_are(fleet, MemberState.DOWN)
        words = r"no engine of the fleet serves, for 0.3 s \(--engine.deadlines.outage-s\): .*engine 0 .*engine 1"
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineTimeout, match=words):
            await fleet.generate(TOKENS, SamplingParams(max_tokens=3))
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineTimeout, match=rf"weight version 1 was given to nobody: {words}"):
            await fleet.update_weights_from_checkpoint(model)
    assert any("did not say its weight version within 2 s (--engine.deadlines.health-s)" in text for text in said), said


async def test_a_request_that_gets_no_place_in_a_fleet_names_its_option(model: Path):
    async with open_fleet(model, deadlines=SLOW_SERVERS, max_requests=1) as (fleet, silences, _):
        for silence in silences:
            silence.paths = ("/inference",)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(fleet.generate, TOKENS, SamplingParams(max_tokens=3))
            with trio.fail_after(PATIENCE_S):
                while sum(member.num_requests for member in fleet.members) < 2:
                    await trio.sleep(0.01)
            words = r"had no place for .* within 0.3 s \(--engine.deadlines.queue-s\)"
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineTimeout, match=words):
                await fleet.generate(TOKENS, SamplingParams(max_tokens=3))
            nursery.cancel_scope.cancel()


class Channel:
    """A transfer to the engines of a fleet, each by its own route."""

    wants_device = False

    def __init__(self, engines: Any) -> None:
        self.engines = engines
        self.num_transfers = 0

    async def send_weights(self, specs: Any, read: Any, weight_version: int) -> list[Any]:
        self.num_transfers += 1
        raise AssertionError("no transfer may begin")


async def read(bucket: Any) -> Any:
    raise AssertionError("nothing may be read")


async def test_members_that_are_not_ready_for_a_transfer_together_are_named_with_the_option(model: Path):
    async with open_fleet(model, deadlines=SLOW_SERVERS, drain_s=2.0) as (fleet, silences, _):
        channel = FleetChannel(fleet, fleet.engines, Channel(fleet.engines))
        silences[0].paths = silences[1].paths = ("/inference",)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.generate, TOKENS, SamplingParams(max_tokens=3))
            with trio.fail_after(PATIENCE_S):
                while not any(member.num_requests for member in fleet.members):
                    await trio.sleep(0.01)
            words = r"not all of 2 engines were ready for a transfer to all of them within 0.3 s \(--engine.deadlines.ready-s\): engine 0"
            with trio.fail_after(PATIENCE_S), pytest.raises(EngineError, match=words):
                await channel.send_weights([], read, 1)
            nursery.cancel_scope.cancel()


async def test_servers_that_do_not_join_a_group_name_its_option(model: Path):
    async with open_server("sglang", model) as (url, silence):
        section = EngineSection(kind="sglang", urls=(url,), weight_sync="group", deadlines=replace(SHORT, control_s=30.0, health_s=30.0))
        config = Config(engine=section, model=replace(Config().model, device="cpu"))
        async with create_server_engine(section, url, {}) as engine:
            silence.paths = ("/init_weights_update_group",)
            with (
                trio.fail_after(PATIENCE_S),
                pytest.raises(EngineError, match=r"did not come about within 1 s \(--engine.deadlines.join-s\)"),
            ):
                async with open_weight_channel(config, [engine], {}):
                    pass


@pytest.mark.parametrize("name", ["connect_s", "control_s", "health_s", "join_s", "queue_s", "outage_s", "ready_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_is_none_is_refused_by_name(name: str, value: float):
    with pytest.raises(ConfigError, match=rf"engine.deadlines.{name} is .*expected a finite number of seconds above 0"):
        DeadlinesSection(**{name: value})


def test_an_outage_is_waited_out_for_as_long_as_servers_need_to_start_where_the_run_restarts_them():
    launched = EngineSection(kind="vllm", launch=True, num_servers=2, startup_timeout_s=77.0)
    sections = launched, replace(launched, on_server_death="go_on"), replace(launched, deadlines=DeadlinesSection(outage_s=5.0))
    assert [create_fleet_config(Config(engine=section)).patience_s for section in sections] == [77.0, 60.0, 5.0]


STAGES = {
    "known": (),
    "unnoticed": ("/",),
    "in the transfer": ("/update_weights_from_distributed",),
    "at the label": ("/update_weight_version",),
}


@pytest.mark.parametrize(
    ("stage", "fault"),
    [("known", "reset"), ("unnoticed", "hang"), ("unnoticed", "reset"), ("in the transfer", "hang"), ("at the label", "reset")],
)
async def test_a_transfer_to_a_fleet_of_which_all_members_die_ends_typed_and_lets_no_unconfirmed_sample_in(
    model: Path, stage: str, fault: str
):
    deadlines = replace(SLOW_SERVERS, control_s=2.0, health_s=2.0, join_s=2.0)
    section = EngineSection(kind="sglang", urls=("http://127.0.0.1:1",), weight_sync="group", deadlines=deadlines)
    config = Config(engine=section, model=replace(Config().model, device="cpu"))
    async with (
        open_fleet(model, "sglang", deadlines, sync_timeout_s=2.0) as (fleet, silences, _),
        open_weight_channel(config, [fleet], {}) as channel,
    ):
        await publish_weights(make_backend(), [fleet], version=1, exports=None, channel=channel)
        assert await fleet.get_weight_version() == 1
        for silence, engine in zip(silences, fleet.engines, strict=True):
            silence.fault, silence.paths = fault, STAGES[stage]
            if stage == "known":
                silence.paths = ("/",)
                fleet.report_down(engine, "its process ended")
        with trio.fail_after(PATIENCE_S), pytest.raises(EngineError) as caught:
            await publish_weights(make_backend(2), [fleet], version=2, exports=None, channel=channel)
        assert all(engine.name in str(caught.value) for engine in fleet.engines), caught.value
        for silence in silences:
            silence.paths = ()
        with trio.fail_after(PATIENCE_S):
            try:
                found = await fleet.generate(TOKENS, SamplingParams(max_tokens=3))
            except EngineError as error:
                assert "engine 0" in str(error) and "engine 1" in str(error), error
            else:
                assert set(found.output_versions) == {1}, "version 2 was confirmed by nobody"
