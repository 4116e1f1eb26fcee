"""Options that the fake SGLang is started with."""

from __future__ import annotations

from dataclasses import dataclass

from rollouts.testing.servers.options import ChooseExperts, check_options


@dataclass(frozen=True)
class SGLangSettings:
    """The options of one SGLang server. Each field begins with the option or environment variable of the real server that it stands for.

    Args:
        model_path: --model-path, as /model_info reports it before the first update; None = the path of the model itself.
        version: installed version, as /server_info reports it.
        original_logprob: SGLANG_RETURN_ORIGINAL_LOGPROB=1: log-probs at temperature 1.
        deterministic: --enable-deterministic-inference: whether sampling_seed has an effect.
        max_running_requests: --max-running-requests: maximum number of samples that run at the same time, at least 1; more wait.
        max_queued_requests: --max-queued-requests: queue length beyond which requests get 503, at least 0; None = no limit.
        health_generates: SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION: whether /health runs a token through the engine.
        health_timeout_s: SGLANG_HEALTH_CHECK_TIMEOUT: seconds after which /health answers 503, more than 0.
        poll_s: seconds between two checks whether a pause, or /health, is done, more than 0; fixed to 1 in the real server.
        choose_experts: --enable-return-routed-experts: f(tokens) -> experts # [tokens, layers, k] of each token in each layer, of which an
            answer has all but the last; None = answers have no experts.
        can_sleep: --enable-memory-saver and --enable-weights-cpu-backup: whether memory is released, and weights survive that.
        api_key: --api-key: key required on every route but /health, /health_generate and /ready; None = no key.
        keep_alive_s: SGLANG_TIMEOUT_KEEP_ALIVE: seconds after which an idle connection is closed, more than 0.
    """

    model_path: str | None = None
    version: str = "0.5.23"
    original_logprob: bool = False
    deterministic: bool = False
    max_running_requests: int = 256
    max_queued_requests: int | None = None
    health_generates: bool = True
    health_timeout_s: float = 20.0
    poll_s: float = 0.02
    choose_experts: ChooseExperts | None = None
    can_sleep: bool = False
    api_key: str | None = None
    keep_alive_s: float = 5.0

    def __post_init__(self) -> None:
        check_options(self, {"max_running_requests": 1, "max_queued_requests": 0}, ["health_timeout_s", "poll_s", "keep_alive_s"])
