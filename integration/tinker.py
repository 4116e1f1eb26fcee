"""Serve a model to the tinker client, to be trained and sampled on this machine: `rollouts tinker --model.path DIR --port 8000`.

python -m integration.tinker is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from integration.run.exit_status import run_command
from integration.serving import create_parser, goes_online, name_options, read_arguments, read_model, read_token, run_until_stopped
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROGRAM = "python -m integration.tinker"
HELP = f"""usage: {PROGRAM} [MODEL] [OPTIONS]

Serve a model behind the training API of the tinker client (pip install tinker) and print the address, until Ctrl-C. Programs and recipes
that use its verbs forward, forward_backward, optim_step, save_state, load_state and sample run against it; what it does not have is refused
by name. Models are trained as LoRA adapters; what clients save is below --directory, which tinker:// paths name.

  MODEL                    a model directory, run, checkpoint or adapter, or a name on the hub (ORG/NAME) (default: the small built-in
                           model with random weights)
  --model.path MODEL       the same as MODEL
  --model.device DEVICE    cpu, cuda, cuda:N, mps or auto (default: auto)
  --name NAME              name by which clients ask for the model, their base_model (default: MODEL as given)
  --directory DIR          directory of what clients save (default: tinker)
  --host ADDRESS           address to listen on; others than loopback need --token-variable (default: 127.0.0.1)
  --port N                 port to listen on; 0 = any free one (default: 0)
  --token-variable NAME    environment variable with the API key that requests must have; the client takes keys that begin with tml-
                           (default: none, any key will do)
  --max-models N           models in training at a time; they share the frozen weights (default: 4)
  --max-samplers N         sets of weights kept for sampling, each with a copy of the model (default: 4)
  --max-tokens-per-pass N  most tokens of a forward pass in training; larger requests are split (default: 16384)
  --idle-s SECONDS         time without a sign of life of a client after which its models are dropped, and after which requests no longer
                           wait for one before them that was lost (default: 300)
  --seed N                 seed of adapters and of sampling where a request has none, and of the built-in model (default: 0)
  --help                   print this help

example, in two terminals:
  {PROGRAM} DIR --port 8000
  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python my_recipe.py"""


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """The command line."""

    model: str | None  # None = the built-in one
    device: str
    settings: dict[str, Any]  # fields of a TinkerConfig
    seed: int


def parse(argv: Sequence[str]) -> _Arguments:
    """Return the arguments. Raises ConfigError; SystemExit for the help and for unknown options."""
    parser = create_parser()
    parser.add_argument("--name")
    parser.add_argument("--directory", default="tinker")
    for name, value in (("--max-models", 4), ("--max-samplers", 4), ("--max-tokens-per-pass", 16_384)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--idle-s", type=float, default=300.0)
    given = read_arguments(parser, argv, program=PROGRAM, help_text=HELP)
    model = read_model(given)
    if given.name == "":
        raise ConfigError("--name is '', expected a name that is not empty")
    settings = {
        "host": given.host,
        "port": given.port,
        "token": read_token(given),
        "model_name": given.name or model or "policy",
        "directory": given.directory,
        "max_models": given.max_models,
        "max_samplers": given.max_samplers,
        "max_tokens_per_pass": given.max_tokens_per_pass,
        "idle_s": given.idle_s,
        "seed": given.seed,
    }
    return _Arguments(model=model, device=given.device, settings=settings, seed=given.seed)


def load_model(command: _Arguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str | None]:
    """Load the model and its tokenizer, with the directory of the tokenizer if it has one. Raises ConfigError."""
    from integration.eval.subjects import find_subject, fit_config, load_subject_tokenizer
    from integration.parts.adapters import merge_adapters
    from integration.parts.models import create_model
    from integration.settings.config import Config
    from integration.settings.sections.model import ModelSection

    config = Config(seed=command.seed, model=ModelSection(device=command.device))
    if command.model is None:
        return *create_model(config), None
    subject = find_subject(command.model, config)
    if subject.urls:
        raise ConfigError(f"{command.model} is the address of a server, whose weights cannot be trained here: give a model directory")
    fitted = fit_config(config, subject)
    tokenizer = load_subject_tokenizer(fitted, subject)
    model, _ = create_model(fitted)
    if subject.adapter is not None:
        model = merge_adapters(model, subject.adapter)
    return model, tokenizer, None if subject.directory is None else str(subject.directory.resolve())


async def serve(command: _Arguments) -> None:
    """Serve until the command is stopped."""
    import trio

    from rollouts.tinker import TinkerConfig, open_tinker_server

    TinkerConfig(**command.settings)  # before the model is loaded, which takes a while
    model, tokenizer, tokenizer_id = await trio.to_thread.run_sync(load_model, command)
    config = TinkerConfig(tokenizer_id=tokenizer_id, **command.settings)
    async with open_tinker_server(model, tokenizer, config) as server:
        print(server.url, flush=True)
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
    fields = ("host", "port", "directory", "max_models", "max_samplers", "max_tokens_per_pass", "idle_s", "seed")
    return name_options(message, "TinkerConfig", fields).replace("TinkerConfig.model_name ", "--name ")


if __name__ == "__main__":
    sys.exit(main())
