"""Settings of a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rollouts.config import check_choice, check_positive, check_setting
from rollouts.config_files import is_number
from rollouts.environments.tools.calls import ToolParser, parse_hermes_calls
from rollouts.gateway.http.listening import check_address
from rollouts.types import SamplingParams

SamplingRule = Literal["request", "fixed"]


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of a gateway."""

    host: str = "127.0.0.1"  # address to listen on; another one than loopback needs a token
    port: int = 0  # 0 = any free one
    token: str | None = None  # API key that every request must show; None = none (loopback only)
    params: SamplingParams = field(default_factory=SamplingParams)  # sampling where a request says nothing
    # "request": requests choose temperature, top_p, top_k, min_p and seed. "fixed": those of params count, whatever requests ask for, and
    # max_tokens of params is the most: for training, where programs ask for temperature 0
    sampling: SamplingRule = "request"
    chat: bool | None = None  # whether messages go through the chat template; False = their plain contents; None = if there is a template
    separator: str = "\n"  # text around messages without a chat template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])  # arguments of the chat template
    parse_calls: ToolParser = parse_hermes_calls  # parser of tool calls, where a request has tools
    model_name: str = "policy"  # name in /v1/models; requests may ask for any
    seed: int = 0  # seed of sampling where a request has none, keyed by session and prompt
    begins_sessions: bool = True  # whether a request to an unknown session begins it; False = it gets 404, only open_session begins them
    # whether requests that no path (/sessions/KEY) and no TOKEN:KEY gives a session are recorded, in that of their API key; False = each is
    # answered by itself and nothing of it is kept
    records_unnamed: bool = True
    # file of recorded sessions: a request that is in the recording of its session is answered from there; others by the engine, or, if
    # there is none, with an error that shows the first difference. None = no such file
    cassette: Path | str | None = None
    record: Path | str | None = None  # new file to record sessions into, those of `cassette` included; None = none
    idle_s: float | None = None  # seconds without a request after which a session is forgotten with its answers; None = never
    max_in_flight: int = 1024  # completions that the engines work on at once; further requests wait
    # completions that may wait; a request whose answers (n) would be more gets status 429, except where the gateway has nothing else to do
    max_waiting: int = 4096
    timeout_s: float | None = 600.0  # seconds for a request, waiting included, then it gets status 504; None = no limit
    ping_s: float = 10.0  # seconds after which a stream that has no answer yet sends a comment, again and again
    max_body_bytes: int = 64 * 2**20  # largest body of a request; larger ones get status 413

    def __post_init__(self) -> None:
        check_choice(self, "sampling", get_args(SamplingRule))
        for name in ("max_in_flight", "max_body_bytes"):
            check_positive(self, name)
        waiting: Any = self.max_waiting
        check_setting(type(waiting) is int and waiting >= 0, "GatewayConfig.max_waiting", waiting, "an integer, at least 0")
        timeout = self.timeout_s
        good = timeout is None or (is_number(timeout) and timeout > 0)
        check_setting(good, "GatewayConfig.timeout_s", timeout, "seconds above 0, or None for no limit")
        idle = self.idle_s
        good = idle is None or (is_number(idle) and idle > 0)
        check_setting(good, "GatewayConfig.idle_s", idle, "seconds above 0, or None for never")
        check_setting(is_number(self.ping_s) and self.ping_s > 0, "GatewayConfig.ping_s", self.ping_s, "seconds above 0")
        check_address(self)
