"""The models that are evaluated: directories, checkpoints, runs, names on the hub, adapters, and servers, as they were typed."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from integration.parts.adapters import ADAPTER_CONFIG, find_base, merge_adapters
from integration.parts.engines import create_embedded_engine, create_fleet_config, create_server_engine, read_api_key
from integration.parts.model_settings import check_kind, read_model_config
from integration.parts.models import create_model
from integration.run.directory import find_result
from integration.settings.command_line import RUN_FILE
from integration.settings.config import Config
from integration.settings.sections.addresses import is_url
from integration.settings.sections.engine import ENGINE_OPTIONS, DeadlinesSection, EngineSection
from rollouts.engines.fleet.fleet import EngineFleet
from rollouts.engines.protocol import InferenceEngine
from rollouts.errors import ConfigError, RolloutsError, redact
from rollouts.models.hub import find_hub_model, is_hub_name
from rollouts.models.loading import check_model_directory, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate."""

    name: str  # as typed
    directory: Path | None  # its model directory, or that of its tokenizer if it is served
    urls: tuple[str, ...] = ()  # addresses of the servers; () = it is loaded into this process
    kind: str = "inprocess"  # vllm or sglang, if it is served
    adapter: Path | None = None  # adapter of peft on the model in `directory`

    def describe(self) -> dict[str, Any]:
        """Return what must not change while an evaluation is resumed, as JSON values."""
        paths = {"directory": self.directory, "adapter": self.adapter}
        return {"name": self.name, "urls": list(self.urls), **{key: path and str(path.resolve()) for key, path in paths.items()}}


def find_subject(model: str, config: Config, tokenizer: str | None = None) -> Subject:
    """Find a model by what was typed.

    Args:
        model: a directory (of a model, a checkpoint, a run or an adapter), a name on the Hugging Face hub, or addresses of servers, joined
            by commas.
        config: engine.kind of servers (inprocess = asked), and whether to trust the code of a model of the hub.
        tokenizer: model directory with the tokenizer of a server; None = the directory that the server says it serves.

    Raises: ConfigError naming the model as typed.
    """
    subject = _find_subject(model, config, tokenizer)
    if subject.directory is not None and not subject.urls:
        check_kind(read_model_config(config, subject.directory), subject.directory, "MODEL")
    return subject


def _find_subject(model: str, config: Config, tokenizer: str | None) -> Subject:
    try:
        if is_url(model):
            return _find_servers(model, config.engine, tokenizer)
        path = Path(model)
        if not path.exists():
            return _find_on_hub(model, config)
        if path.is_dir() and (path / RUN_FILE).is_file():
            return Subject(name=model, directory=check_model_directory(_find_result(path)))
        if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
            if (path.parent / "config.json").is_file():  # beside the merged weights of a checkpoint
                return Subject(name=model, directory=check_model_directory(path.parent))
            base = find_base(path, "put it there, or convert the adapters with --base DIR and name the result")
            return Subject(name=model, directory=check_model_directory(base), adapter=path)
        return Subject(name=model, directory=check_model_directory(path))
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if model in text else f"MODEL {model}: {text}") from error


def check_tokenizer_option(models: Sequence[str], tokenizer: str | None) -> None:
    """Raise ConfigError if --tokenizer is given but no model is on a server: a directory has its own tokenizer."""
    if tokenizer is not None and not any(map(is_url, models)):
        raise ConfigError(
            f"--tokenizer is {tokenizer!r}, but it is for models on servers, and {', '.join(models) or 'the built-in model'} has a "
            "tokenizer of its own: leave it out"
        )


def _find_result(run: Path) -> Path:
    """Return the checkpoint that is the result of a run. Raises ConfigError if it has none yet."""
    found = find_result(run)
    if found is None:
        raise ConfigError(f"the run {run} has no checkpoint of a language model yet: wait for one, or name a model directory")
    return found


def _find_on_hub(model: str, config: Config) -> Subject:
    name, _, revision = model.partition("@")
    if not is_hub_name(name):
        kinds = "neither a directory, nor a name on the hub (ORG/NAME), nor the address of a server (http://...)"
        raise ConfigError(f"MODEL {model} is {kinds}")
    found = find_hub_model(name, revision or None, trust_remote_code=config.model.trust_remote_code, option="MODEL")
    return Subject(name=model, directory=check_model_directory(found.directory))


def _find_servers(model: str, section: EngineSection, tokenizer: str | None) -> Subject:
    urls = tuple(url.rstrip("/") for url in model.split(",") if url)
    key = read_api_key("engine", section.api_key_variable, os.environ)
    kinds, directories = zip(*(_ask_server(url, section.deadlines, key) for url in urls), strict=True)
    kind = kinds[0] if section.kind == "inprocess" else section.kind
    if len(set(kinds)) > 1:
        raise ConfigError(f"MODEL {model} names servers of several kinds ({', '.join(kinds)}): name servers of one kind")
    EngineSection(kind=kind, urls=urls)  # refuses addresses with credentials
    path = Path(tokenizer or directories[0])
    if not path.is_dir():
        raise ConfigError(f"MODEL {model} serves {directories[0]!r}, whose tokenizer is not here: give --tokenizer DIR")
    return Subject(name=model, directory=path, urls=urls, kind=kind)


def _ask_server(url: str, deadlines: DeadlinesSection, api_key: str | None) -> tuple[str, str]:
    """Return the kind of a server, and the model that it says it serves. Raises ConfigError if it does not answer as either kind."""
    try:
        timeout = httpx.Timeout(deadlines.health_s, connect=deadlines.connect_s)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(base_url=url, timeout=timeout, trust_env=False, headers=headers) as client:
            info = client.get("/model_info")
            if info.status_code == 200 and "model_path" in info.json():
                return "sglang", str(info.json()["model_path"])
            if client.get("/version").status_code != 200:
                raise ConfigError(
                    f"{url} answers, but neither as vLLM (/version) nor as SGLang (/model_info): name a server of one of them"
                )
            listed = client.get("/v1/models")
            if listed.status_code in (401, 403):
                raise ConfigError(
                    f"{url} wants an API key, and {'none is given' if api_key is None else 'refuses that of --engine.api-key-variable'}: "
                    f"name the environment variable with its key: --engine.kind vllm --engine.urls {url} --engine.api-key-variable NAME"
                )
            models = listed.json()["data"]
            return "vllm", str(models[0].get("root") or models[0]["id"])
    except httpx.TimeoutException as error:
        name = "connect_s" if isinstance(error, httpx.ConnectTimeout) else "health_s"
        raise ConfigError(
            f"the server {redact(url)} did not say within {getattr(deadlines, name):g} s which model it serves: see its log, or raise "
            f"{ENGINE_OPTIONS[name]}"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"the server {url} cannot be reached ({error}): start it, or correct the address") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{url} says in no known form which model it serves ({error!r}): give --engine.kind and --tokenizer") from error


def fit_config(config: Config, subject: Subject) -> Config:
    """Return the settings of an evaluation of a subject."""
    section = config.engine
    own = {name: getattr(section, name) for name in ("max_slots", "prefix_cache_tokens", "dtype", "cuda_graphs")}
    engine = EngineSection(**own)
    if subject.urls:
        waits = {name: getattr(section, name) for name in ("generate_timeout_s", "sync_timeout_s", "deadlines")}
        engine = EngineSection(kind=subject.kind, urls=subject.urls, api_key_variable=section.api_key_variable, **waits)
    path = None if subject.directory is None else str(subject.directory)
    return replace(config, engine=engine, model=replace(config.model, path=path))


def load_subject_tokenizer(config: Config, subject: Subject) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a subject. Raises DataError if there is none."""
    assert subject.directory is not None, "each subject has a directory with a tokenizer"
    return load_tokenizer(subject.directory, trust_remote_code=config.model.trust_remote_code)


@asynccontextmanager
async def open_subject(
    config: Config, subject: Subject, tokenizer: PreTrainedTokenizerBase, environment: Mapping[str, str]
) -> AsyncGenerator[InferenceEngine]:
    """Open the engine of a subject. config: result of fit_config. Raises ConfigError, EngineError."""
    if not subject.urls:
        model, _ = create_model(config)
        if subject.adapter is not None:
            model = merge_adapters(model, subject.adapter)
        async with create_embedded_engine(config, model, tokenizer, is_trained=False) as engine:
            yield engine
        return
    async with AsyncExitStack() as stack:
        engines: Sequence[Any] = [
            await stack.enter_async_context(create_server_engine(config.engine, url, environment, vocab_size=None)) for url in subject.urls
        ]
        if len(engines) == 1:
            yield engines[0]
        else:
            yield await stack.enter_async_context(EngineFleet(engines, config=create_fleet_config(config)))


async def check_subject(config: Config, subject: Subject, environment: Mapping[str, str]) -> None:
    """Connect to the servers of a subject once, so that a server that cannot be used is told before anything is written."""
    if not subject.urls:
        return
    try:
        for url in subject.urls:
            async with create_server_engine(config.engine, url, environment):
                pass
    except RolloutsError as error:
        raise ConfigError(f"MODEL {subject.name} cannot be used: {error}") from error
