"""Engines by name: the embedded engine, or a launched or running server, together with its tokenizer.

async with open_text_engine("path/to/model", "local") as engine:
    texts = await engine.generate(["1+1=", "2+3="], max_tokens=8)
    texts.sequences, texts.tokens, texts.lengths
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rollouts.chat.tokenize import Messages, ensure_pad_token
from rollouts.config_files import suggest
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.launch.commands import ServerConfig
from rollouts.engines.launch.servers import launch_server
from rollouts.engines.protocol import InferenceEngine
from rollouts.engines.sglang.engine import SGLangEngine
from rollouts.engines.text.batch import BatchInferenceManager, GeneratedTexts, generate_texts
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ConfigError
from rollouts.models.hub import find_hub_model, is_hub_name
from rollouts.models.loading import load_hf_model, load_tokenizer, parse_device
from rollouts.trainer.config import ConfigStore, EngineName, InferenceConfig, ModelConfig
from rollouts.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class TextEngine:
    """Engine with its tokenizer and the sampling parameters of an InferenceConfig."""

    engine: InferenceEngine
    tokenizer: PreTrainedTokenizerBase
    config: InferenceConfig

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of config."""
        return SamplingParams(max_tokens=self.config.max_tokens, temperature=self.config.temperature, top_p=self.config.top_p)

    async def generate(
        self,
        prompts: Sequence[str | Messages],
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> GeneratedTexts:
        """Generate one answer to each prompt, in their order.

        Args:
            prompts: a str is tokenized as it stands, messages go through the chat template.
            max_tokens, temperature, top_p: None = those of config.
            seed: seed of the first prompt, the others count on from it; None = another in each call.

        Raises: EngineError or DataError of the first prompt that fails. A BatchInferenceManager keeps failures apart.
        """
        if isinstance(prompts, str):
            raise ConfigError(f"prompts is the text {prompts!r:.80}, expected a list of prompts: give [{prompts!r:.80}]")
        given: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        params = self.params.new(**{name: value for name, value in given.items() if value is not None})
        return await generate_texts(self.engine, self.tokenizer, prompts, params)

    def batch_manager(self, batch_size: int) -> BatchInferenceManager:
        """Return a manager of at most batch_size requests in flight, which keeps failures apart. Raises ConfigError."""
        return BatchInferenceManager(self.engine, self.tokenizer, batch_size, params=self.params)


def find_model_directory(section: ModelConfig) -> Path:
    """Return the directory of a model: local_path, else model_name, or that of the hub's model of this name; see find_hub_model.

    Raises: ConfigError without either, and for a name that the hub does not give.
    """
    name = section.model_name if section.local_path is None else section.local_path
    if not name:
        raise ConfigError("there is no model: set ModelConfig.local_path to a model directory, or ModelConfig.model_name")
    if section.local_path is None and is_hub_name(name):
        return find_hub_model(name, trust_remote_code=section.trust_remote_code, option="ModelConfig.model_name").directory
    return Path(name)


def resolve_settings(
    model_path: str | Path | None, backend: str | None, config: ConfigStore | InferenceConfig | None
) -> tuple[ModelConfig, InferenceConfig]:
    """Return the settings of an engine: those of config, with model_path and backend in place of its own. Raises ConfigError."""
    model, inference = ModelConfig(), InferenceConfig()
    if isinstance(config, ConfigStore):
        model, inference = config.model, config.inference
    elif config is not None:
        inference = config
    if model_path is not None:
        model = replace(model, model_name=str(model_path), local_path=None)
    if backend is not None:
        known = get_args(EngineName)
        if backend not in known:
            raise ConfigError(f"unknown engine {backend!r}: {suggest(backend, known)}")
        inference = replace(inference, backend=backend)
    return model, inference


@asynccontextmanager
async def open_text_engine(
    model_path: str | Path | None = None,
    backend: str | None = None,
    config: ConfigStore | InferenceConfig | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    **engine_options: Any,
) -> AsyncGenerator[TextEngine]:
    """Open an engine by name, and close it, or stop the server that was launched for it, at the end of the block.

    Args:
        model_path: model directory or name on the hub; None = config.model.
        backend: "local" (the embedded engine), "vllm" or "sglang"; None = config.inference.backend.
        config: settings of model and engine; None = ConfigStore().
        environment: variables of a launched server; None = those of this process.
        engine_options: further arguments of InProcessEngine, VLLMEngine or SGLangEngine.

    Raises: ConfigError for an unknown name or settings that do not fit together; errors of the engine.
    """
    model, inference = resolve_settings(model_path, backend, config)
    directory = find_model_directory(model)
    tokenizer = load_tokenizer(directory, trust_remote_code=model.trust_remote_code)
    ensure_pad_token(tokenizer)
    if inference.backend == "local":
        if model.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size is {model.tensor_parallel_size}, but the embedded engine runs on one device: use backend 'vllm' or "
                "'sglang'"
            )
        device = parse_device(model.device)
        loaded = load_hf_model(directory, dtype=model.dtype, device=device, trust_remote_code=model.trust_remote_code)
        limited: dict[str, Any] = {"max_length": inference.max_model_len, **engine_options}
        async with InProcessEngine(loaded, tokenizer, **limited) as engine:
            yield TextEngine(engine, tokenizer, inference)
        return
    create_client = VLLMEngine if inference.backend == "vllm" else SGLangEngine
    options: dict[str, Any] = {"allow_cast": True, **engine_options}  # a trainer's weights are float32, a server's often bfloat16
    if inference.url is not None:
        async with create_client(inference.url, **options) as client:
            yield TextEngine(client, tokenizer, inference)
        return
    server = create_server_config(directory, model, inference)
    log_path = Path(inference.log_path or f"{inference.backend}.log")
    environment = os.environ if environment is None else environment
    async with launch_server(server, log_path, environment=environment) as launched, create_client(launched.url, **options) as client:
        yield TextEngine(client, tokenizer, inference)


def create_server_config(directory: Path, model: ModelConfig, inference: InferenceConfig) -> ServerConfig:
    """Return the configuration of the server to launch. Raises ConfigError for tensor parallelism on a CPU, and for a missing GPU."""
    device = parse_device(model.device)
    if device.type == "cpu" and model.tensor_parallel_size != 1:
        raise ConfigError(
            f"ModelConfig.tensor_parallel_size is {model.tensor_parallel_size}, but the server would run on the CPU: use "
            "1, or device 'cuda'"
        )
    assert inference.backend != "local", "the embedded engine is no server"
    return ServerConfig(
        kind=inference.backend,
        model_path=str(directory),
        python=inference.python or sys.executable,
        device="cpu" if device.type == "cpu" else "cuda",
        dtype=model.dtype,
        tensor_parallel_size=model.tensor_parallel_size,
        context_length=inference.max_model_len,
    )
