"""Serve a model behind the APIs of chat programs and print the address: `rollouts gateway [MODEL] --port 8000`.

python -m integration.gateway is the same. MODEL is a model directory, a run, a checkpoint, an adapter, a name on the hub, or addresses of
vLLM or SGLang servers joined by commas; without one, the small built-in model with random weights.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from integration.run.exit_status import run_command
from integration.serving import create_parser, goes_online, name_options, read_arguments, read_model, read_token, run_until_stopped
from rollouts.config import check_setting

if TYPE_CHECKING:
    from rollouts.engines.protocol import InferenceEngine

PROGRAM = "python -m integration.gateway"
HELP = f"""usage: {PROGRAM} [MODEL] [OPTIONS]

Serve a model behind OpenAI's and Anthropic's APIs and print the address, until Ctrl-C. Requests under the path /sessions/KEY/v1, or with
the API key TOKEN:KEY, form a session: its conversations go on from the tokens that were sampled, and all its requests have the same
temperature. Other requests are answered and nothing is kept of them. To train on sessions, use rollouts.open_gateway in a program, or
`python -m integration.train --agent.command`.

  MODEL                  a model directory, run, checkpoint or adapter, a name on the hub (ORG/NAME), or addresses of vLLM or
                         SGLang servers joined by commas (default: the small built-in model with random weights)
  --model.path MODEL     the same as MODEL
  --model.device DEVICE  cpu, cuda, cuda:N, mps or auto (default: auto)
  --tokenizer DIR        tokenizer of a model on a server (default: that of the directory that the server names)
  --host ADDRESS         address to listen on; others than loopback need --token-variable (default: 127.0.0.1)
  --port N               port to listen on; 0 = any free one (default: 0)
  --token-variable NAME  environment variable with the API key that requests must have (default: none, all requests are answered)
  --chat yes|no          whether messages go through the chat template (default: yes if the tokenizer has one)
  --max-tokens N         maximum tokens of an answer, for requests that set none (default: 256)
  --max-in-flight N      completions in progress at a time; further requests wait (default: 1024)
  --timeout-s SECONDS    maximum time of a request, with its wait; 0 = no limit (default: 600)
  --idle-s SECONDS       time without a request after which a session is forgotten; 0 = never (default: 3600)
  --cassette FILE        recorded sessions: a request that is in the recording of its session is answered from there, others by MODEL;
                         without MODEL there is no engine, and the first difference is an error that shows it (default: none)
  --record FILE          new file to record sessions into, those of --cassette included (default: none)
  --seed N               seed of sampling for requests without one, and of the built-in model (default: 0)
  --help                 print this help

example, in two terminals:
  {PROGRAM} DIR --port 8000
  OPENAI_BASE_URL=http://127.0.0.1:8000/sessions/mine/v1 OPENAI_API_KEY=any python my_agent.py"""


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """The command line."""

    model: str | None  # None = the built-in one, or, with a cassette, none
    device: str
    tokenizer: str | None
    settings: dict[str, Any]  # fields of a GatewayConfig
    max_tokens: int
    seed: int


def parse(argv: Sequence[str]) -> _Arguments:
    """Return the arguments. Raises ConfigError; SystemExit for the help and for unknown options."""
    parser = create_parser()
    parser.add_argument("--chat", choices=("yes", "no"))
    for name in ("--tokenizer", "--cassette", "--record"):
        parser.add_argument(name)
    for name, default in (("--max-tokens", 256), ("--max-in-flight", 1024)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--idle-s", type=float, default=3600.0)
    given = read_arguments(parser, argv, program=PROGRAM, help_text=HELP, models="one model, servers joined by commas")
    model = read_model(given)
    check_setting(given.max_tokens >= 1, "--max-tokens", given.max_tokens, "a whole number, at least 1")
    settings = {
        "host": given.host,
        "port": given.port,
        "token": read_token(given),
        "chat": None if given.chat is None else given.chat == "yes",
        "max_in_flight": given.max_in_flight,
        "timeout_s": given.timeout_s or None,
        "idle_s": given.idle_s or None,
        "cassette": given.cassette,
        "record": given.record,
        "records_unnamed": False,
        "seed": given.seed,
    }
    return _Arguments(
        model=model,
        device=given.device,
        tokenizer=given.tokenizer,
        settings=settings,
        max_tokens=given.max_tokens,
        seed=given.seed,
    )


@asynccontextmanager
async def open_model(command: _Arguments) -> AsyncGenerator[tuple[Sequence[InferenceEngine], Any]]:
    """Open the engine of the model, or none, with its tokenizer. Raises ConfigError, EngineError."""
    from integration.eval.subjects import check_tokenizer_option, find_subject, fit_config, load_subject_tokenizer, open_subject
    from integration.parts.engines import create_embedded_engine
    from integration.parts.models import create_model
    from integration.settings.config import Config
    from integration.settings.sections.model import ModelSection
    from rollouts.chat.char_tokenizer import create_char_tokenizer
    from rollouts.models.loading import load_tokenizer

    config = Config(seed=command.seed, model=ModelSection(device=command.device))
    if command.model is None and command.settings["cassette"] is not None:
        named = command.tokenizer
        yield (), create_char_tokenizer(config.model.vocab_size) if named is None else load_tokenizer(Path(named))
        return
    check_tokenizer_option(() if command.model is None else (command.model,), command.tokenizer)
    if command.model is None:
        model, tokenizer = create_model(config)
        async with create_embedded_engine(config, model, tokenizer, is_trained=False) as engine:
            yield (engine,), tokenizer
        return
    subject = find_subject(command.model, config, command.tokenizer)
    fitted = fit_config(config, subject)
    tokenizer = load_subject_tokenizer(fitted, subject)
    async with open_subject(fitted, subject, tokenizer, os.environ) as engine:
        yield (engine,), tokenizer


async def serve(command: _Arguments) -> None:
    """Serve until the command is stopped."""
    import trio

    from rollouts.gateway import GatewayConfig, open_gateway
    from rollouts.types import SamplingParams

    config = GatewayConfig(params=SamplingParams(max_tokens=command.max_tokens), **command.settings)
    async with open_model(command) as (engines, tokenizer), open_gateway(engines, tokenizer, config) as gateway:
        print(gateway.url(), flush=True)
        await trio.sleep_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Every error that a user can cause ends in one message on stderr and a non-zero exit status."""
    return run_command(
        partial(parse, sys.argv[1:] if argv is None else argv),
        partial(run_until_stopped, serve),
        lambda command: goes_online(command.model),
        _name_as_typed,
    )


def _name_as_typed(message: str) -> str:
    """Return the message of an error with the options of this command for the settings of the library."""
    message = message.replace("GatewayConfig.cassette", "--cassette").replace(" (GatewayConfig.record)", "")
    message = name_options(message, "GatewayConfig", ("host", "port", "timeout_s", "idle_s", "max_in_flight", "record"))
    message = re.sub(r"or None for (?=no limit|never)", "or 0 for ", message)
    return message.replace("SamplingParams.max_tokens", "--max-tokens")


if __name__ == "__main__":
    sys.exit(main())
