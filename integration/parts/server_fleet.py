"""Fleet of inference servers launched by a run: their GPUs, and restarts.

async with open_server_fleet(configs, create_engine, log_paths=..., upkeep=ServerUpkeep(max_restarts=3), ...) as fleet: ...
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from integration.parts.placement import GPU_VARIABLE
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.fleet.members import FleetConfig, MemberState
from rollouts.engines.http.endpoint import Deadlines
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import ServerProcess, launch_server
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import EngineError, raise_single_errors

SECONDS_BETWEEN_NEWS = 10.0
LOOK_S = 5.0  # seconds between two checks for a hanging server


@dataclass(frozen=True, kw_only=True)
class ServerUpkeep:
    """Settings of the servers that a run starts and keeps alive."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])  # environment variables of the servers
    # maximum restarts of each server that ends by itself; afterwards, and with 0 at once, the run goes on without it. None = its end ends
    # the run
    max_restarts: int | None = None
    startup_s: float = 900.0  # seconds to wait for a server to start
    deadlines: Deadlines = field(default_factory=Deadlines)  # see launch_server
    hang_s: float = 180.0  # seconds after which a live server that has not rejoined the fleet counts as ended


@dataclass(eq=False)
class _Post:
    """A server of a fleet and its last death."""

    config: ServerConfig
    log_path: Path
    name: str
    server: ServerProcess | None = None
    death: EngineError | None = None  # not yet handled
    died: trio.Event = field(default_factory=trio.Event)

    def note_death(self, error: EngineError) -> None:
        """Record that the server ended by itself."""
        self.death = error
        self.died.set()


def spread_config(config: ServerConfig, gpus: Sequence[str] | None, num_servers: int) -> list[ServerConfig]:
    """Return the configuration of each server: its own GPUs, and consecutive ports if a port was configured."""
    configs: list[ServerConfig] = []
    for i in range(num_servers):
        env = dict(config.env) if gpus is None else {**config.env, GPU_VARIABLE: gpus[i]}
        configs.append(replace(config, port=None if config.port is None else config.port + i, env=env))
    return configs


@asynccontextmanager
async def open_server_fleet(
    configs: Sequence[ServerConfig],
    create_engine: Callable[[str], VLLMEngine | SGLangEngine],
    *,
    log_paths: Sequence[Path],
    upkeep: ServerUpkeep,
    fleet_config: FleetConfig,
    initial_weights: Path | None,
    say: Callable[[str], None],
) -> AsyncGenerator[EngineFleet]:
    """Start all servers at the same time as one fleet, and stop them at the end of the block.

    Args:
        create_engine: creates the client of a url.
        log_paths: log file of each server.
        initial_weights: the weights that the servers start with.
        say: prints events of servers and engines.

    Raises: EngineError, with its name, if a server does not start.
    """
    posts = [
        _Post(config, log_path, f"{config.kind} server {i}") for i, (config, log_path) in enumerate(zip(configs, log_paths, strict=True))
    ]
    with raise_single_errors():
        async with trio.open_nursery() as servers, AsyncExitStack() as stack:
            started = time.monotonic()
            async with trio.open_nursery() as starting:
                for post in posts:
                    starting.start_soon(servers.start, _hold_server, post, upkeep, say)
            say(f"{len(posts)} {configs[0].kind} servers are ready after {time.monotonic() - started:.0f} s")
            engines = [await stack.enter_async_context(create_engine(_get_server(post).url)) for post in posts]
            fleet = EngineFleet(engines, config=fleet_config, initial_weights=initial_weights, say=say)
            await stack.enter_async_context(fleet)
            async with trio.open_nursery() as keepers:
                for post, engine in zip(posts, engines, strict=True):
                    keepers.start_soon(_keep_server, post, engine, fleet, upkeep, say)
                yield fleet
                keepers.cancel_scope.cancel()
            await stack.aclose()
            servers.cancel_scope.cancel()


async def _hold_server(
    post: _Post,
    upkeep: ServerUpkeep,
    say: Callable[[str], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the server's block open until it is cancelled."""
    say(f"starting {post.name} (log: {post.log_path})")
    async with launch_server(
        post.config,
        post.log_path,
        environment=upkeep.environment,
        startup_s=upkeep.startup_s,
        on_progress=create_news(post.name, say),
        on_exit=post.note_death,
        deadlines=upkeep.deadlines,
    ) as post.server:
        task_status.started()
        await trio.sleep_forever()


async def _keep_server(
    post: _Post, engine: VLLMEngine | SGLangEngine, fleet: EngineFleet, upkeep: ServerUpkeep, say: Callable[[str], None]
) -> None:
    """Restart the server when it ends or hangs, up to max_restarts times."""
    server, max_restarts = _get_server(post), upkeep.max_restarts
    num_restarts = 0
    while True:
        death = await _wait_for_death(post, engine, fleet, upkeep.hang_s)
        if death is None:
            say(f"{post.name} is stopped: its engine has left {fleet.name}")
            await server.stop()
            return
        if max_restarts is None:
            raise death
        if num_restarts >= max_restarts:
            what = "it is not restarted" if max_restarts == 0 else f"it was restarted {max_restarts} times"
            fleet.remove(engine, f"{death} ({what})")
            await server.stop()
            return
        num_restarts += 1
        fleet.report_down(engine, str(death))
        say(f"{post.name} is restarted ({num_restarts} of {max_restarts})")
        try:
            await server.restart()
        except EngineError as error:
            post.note_death(error)
        else:
            if engine in fleet.engines:
                fleet.try_now(engine)


async def _wait_for_death(post: _Post, engine: VLLMEngine | SGLangEngine, fleet: EngineFleet, hang_s: float) -> EngineError | None:
    """Wait until the server ends or hangs, and return the error; None = its engine has left the fleet."""
    begin = trio.current_time()  # a restarted server needs time to rejoin the fleet
    while post.death is None:
        with trio.move_on_after(LOOK_S):
            await post.died.wait()
        if engine not in fleet.engines:
            return None
        member = fleet.status_of(engine)
        down_s = trio.current_time() - max(begin, member.since)
        is_silent = member.state is MemberState.DOWN and not member.is_returning  # loading large weights takes time
        if post.death is None and is_silent and down_s > hang_s:
            return EngineError(f"{post.name} is alive, but was unusable for {down_s:.0f} s: {member.reason}")
    death, post.death, post.died = post.death, None, trio.Event()
    return death


def _get_server(post: _Post) -> ServerProcess:
    assert post.server is not None, f"{post.name} was not started"
    return post.server


def create_news(kind: str, say: Callable[[str], None]) -> Callable[[float, str], None]:
    """Print the progress of a start: now and then the seconds and the last line of the log."""
    told = 0.0

    def tell(seconds: float, line: str) -> None:
        nonlocal told
        if seconds - told >= SECONDS_BETWEEN_NEWS:
            told = seconds
            say(f"{kind} is starting, {seconds:.0f} s: {line[:120]}")

    return tell
