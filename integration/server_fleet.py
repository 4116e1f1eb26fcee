"""Several inference servers that a run starts, as one fleet: where each runs, and what happens when one ends.

async with open_server_fleet(configs, create_engine, log_paths=..., on_death=restart(3), ...) as fleet: ...
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from rollouts.engines.fleet import EngineFleet
from rollouts.engines.fleet_members import FleetConfig, MemberState
from rollouts.engines.server_commands import ServerConfig
from rollouts.engines.servers import ServerProcess, launch_server
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import ConfigError, EngineError, raise_single_errors

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
SECONDS_BETWEEN_NEWS = 10.0
LOOK_S = 5.0  # between two looks whether a server hangs


@dataclass(eq=False)
class _Post:
    """A server of a fleet, and its deaths."""

    config: ServerConfig
    log_path: Path
    name: str
    server: ServerProcess | None = None
    death: EngineError | None = None  # that nobody has looked at yet
    died: trio.Event = field(default_factory=trio.Event)

    def note_death(self, error: EngineError) -> None:
        """The server has ended by itself."""
        self.death = error
        self.died.set()


def assign_gpus(num_servers: int, gpus_per_server: int, gpus: Sequence[str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES is for each server: GPUs of its own, in order. Pure.

    Args:
        gpus: names of those that may be used.

    Raises: ConfigError if they are too few.
    """
    needed = num_servers * gpus_per_server
    if len(gpus) < needed:
        raise ConfigError(
            f"{num_servers} servers of {gpus_per_server} GPUs each need {needed}, but there are {len(gpus)} ({', '.join(gpus) or 'none'}): "
            "start fewer servers, or name the GPUs with --engine.gpus, one as often as servers are to share it"
        )
    return tuple(",".join(gpus[i * gpus_per_server : (i + 1) * gpus_per_server]) for i in range(num_servers))


def spread_config(config: ServerConfig, gpus: Sequence[str] | None, num_servers: int) -> list[ServerConfig]:
    """The settings of each server: ports one after another where one was asked for, and GPUs of its own."""
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
    environment: Mapping[str, str],
    max_restarts: int | None,
    fleet_config: FleetConfig,
    initial_weights: Path | None,
    say: Callable[[str], None],
    startup_s: float = 900.0,
    hang_s: float = 180.0,
) -> AsyncGenerator[EngineFleet]:
    """Start all servers at the same time, and make a fleet of them; stop them at the end of the block.

    Args:
        create_engine: the client of a url.
        log_paths: of each server.
        max_restarts: how often each server that ends by itself is started again; after that, and with 0 at once, the run goes on without
            it. None = its end is the end of the block.
        initial_weights: that the servers are started with.
        say: told what becomes of servers and engines.
        hang_s: after which a server that lives, but does not come back into the fleet, is treated as one that has ended.

    Raises: EngineError if a server does not start, naming it.
    """
    posts = [
        _Post(config, log_path, f"{config.kind} server {i}") for i, (config, log_path) in enumerate(zip(configs, log_paths, strict=True))
    ]
    with raise_single_errors():
        async with trio.open_nursery() as servers, AsyncExitStack() as stack:
            started = time.monotonic()
            async with trio.open_nursery() as starting:
                for post in posts:
                    starting.start_soon(servers.start, _hold_server, post, environment, startup_s, say)
            say(f"{len(posts)} {configs[0].kind} servers are ready after {time.monotonic() - started:.0f} s")
            engines = [await stack.enter_async_context(create_engine(_get_server(post).url)) for post in posts]
            fleet = EngineFleet(engines, config=fleet_config, initial_weights=initial_weights, say=say)
            await stack.enter_async_context(fleet)
            async with trio.open_nursery() as keepers:
                for post, engine in zip(posts, engines, strict=True):
                    keepers.start_soon(_keep_server, post, engine, fleet, max_restarts, hang_s, say)
                yield fleet
                keepers.cancel_scope.cancel()
            await stack.aclose()
            servers.cancel_scope.cancel()


async def _hold_server(
    post: _Post,
    environment: Mapping[str, str],
    startup_s: float,
    say: Callable[[str], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Keep the server's block open until it is cancelled."""
    say(f"starting {post.name} (log: {post.log_path})")
    async with launch_server(
        post.config,
        post.log_path,
        environment=environment,
        startup_s=startup_s,
        on_progress=create_news(post.name, say),
        on_exit=post.note_death,
    ) as post.server:
        task_status.started()
        await trio.sleep_forever()


async def _keep_server(
    post: _Post, engine: VLLMEngine | SGLangEngine, fleet: EngineFleet, max_restarts: int | None, hang_s: float, say: Callable[[str], None]
) -> None:
    """Start the server again when it ends or hangs, until that was often enough."""
    server = _get_server(post)
    num_restarts = 0
    while True:
        death = await _wait_for_death(post, engine, fleet, hang_s)
        if death is None:
            say(f"{post.name} is stopped: its engine has left {fleet.name}")
            await server.stop()
            return
        if max_restarts is None:
            raise death
        if num_restarts >= max_restarts:
            what = "it is not started again" if max_restarts == 0 else f"it was started again {max_restarts} times"
            fleet.remove(engine, f"{death} ({what})")
            await server.stop()
            return
        num_restarts += 1
        fleet.report_down(engine, str(death))
        say(f"{post.name} is started again (time {num_restarts} of {max_restarts})")
        try:
            await server.restart()
        except EngineError as error:
            post.note_death(error)
        else:
            if engine in fleet.engines:
                fleet.try_now(engine)


async def _wait_for_death(post: _Post, engine: VLLMEngine | SGLangEngine, fleet: EngineFleet, hang_s: float) -> EngineError | None:
    """How the server ended, or that it hangs; None = its engine is no member any more."""
    begin = trio.current_time()  # a server that was just started needs time to get back into the fleet
    while post.death is None:
        with trio.move_on_after(LOOK_S):
            await post.died.wait()
        if engine not in fleet.engines:
            return None
        member = fleet.status_of(engine)
        down_s = trio.current_time() - max(begin, member.since)
        is_silent = member.state is MemberState.DOWN and not member.is_returning  # to load large weights takes its time
        if post.death is None and is_silent and down_s > hang_s:
            return EngineError(f"{post.name} lives, but could not be used for {down_s:.0f} s: {member.reason}")
    death, post.death, post.died = post.death, None, trio.Event()
    return death


def _get_server(post: _Post) -> ServerProcess:
    assert post.server is not None, f"{post.name} was not started"
    return post.server


def create_news(kind: str, say: Callable[[str], None]) -> Callable[[float, str], None]:
    """Progress of a start for people: now and then the seconds and the last line of the log."""
    told = 0.0

    def tell(seconds: float, line: str) -> None:
        nonlocal told
        if seconds - told >= SECONDS_BETWEEN_NEWS:
            told = seconds
            say(f"{kind} is starting, {seconds:.0f} s: {line[:120]}")

    return tell
