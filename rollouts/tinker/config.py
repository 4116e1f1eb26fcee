"""Settings of a Tinker-compatible server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.config import check_choice, check_positive, check_setting
from rollouts.config_files import is_number
from rollouts.gateway.http.listening import check_address


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Settings of a Tinker-compatible server."""

    host: str = "127.0.0.1"  # address to listen on; another one than loopback needs a token
    port: int = 0  # 0 = any free one
    token: str | None = None  # API key that every request must show; the client takes keys that begin with tml-. None = any key (loopback)
    model_name: str = "policy"  # name by which clients ask for the model; another one is refused
    tokenizer_id: str | None = None  # directory or name that clients load the tokenizer from; None = model_name
    directory: Path | str = "tinker"  # directory of what clients save; a path tinker://RUN/weights/NAME is RUN/weights/NAME in it
    max_models: int = 4  # models in training at a time; LoRA adapters share the frozen weights
    max_samplers: int = 4  # sets of weights kept for sampling, each with a copy of the model; the one used longest ago makes room
    lora_alpha: float = 32.0  # adapters are scaled by alpha / rank; Tinker's is 32, whatever the rank
    compute_dtype: str = "float32"  # dtype of matrix products in training: float32 or bfloat16
    max_tokens_per_pass: int = 16_384  # most tokens of one forward pass in training; larger requests are split, which changes no sum
    max_waiting: int = 4096  # sampling requests that may wait or run; more get status 429, and the client sends them again
    # seconds without a sign of life (clients send one each 10 s) after which a client's models are dropped, and after which requests no
    # longer wait for one before them that was lost
    idle_s: float = 300.0
    poll_s: float = 20.0  # seconds that a question for a result waits for it; the client asks again
    max_body_bytes: int = 64 * 2**20  # largest body of a request; larger ones get status 413
    seed: int = 0  # seed of adapters and of sampling where a request has none

    def __post_init__(self) -> None:
        for name in ("max_models", "max_samplers", "max_tokens_per_pass", "max_waiting", "max_body_bytes"):
            check_positive(self, name)
        check_choice(self, "compute_dtype", ("float32", "bfloat16"))
        for name in ("idle_s", "poll_s", "lora_alpha"):
            value: Any = getattr(self, name)
            check_setting(is_number(value) and value > 0, f"TinkerConfig.{name}", value, "a number above 0")
        seed: Any = self.seed
        check_setting(type(seed) is int, "TinkerConfig.seed", seed, "an integer")
        check_setting(bool(self.model_name), "TinkerConfig.model_name", self.model_name, "a name that is not empty")
        check_address(self)
