"""The user's program or function that plays the rollouts of a run, as a generate function of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from integration.settings.config import Config
from integration.tasks.task import is_character_tokenizer
from rollouts.backends.ranks.channel import TOKEN_VARIABLE
from rollouts.engines.protocol import InferenceEngine
from rollouts.environments.games.calculator import create_calculator_tool
from rollouts.environments.tools.calls import create_compact_parser, parse_hermes_calls
from rollouts.gateway.agent_runs import AgentConfig, create_agent_generate_fn
from rollouts.gateway.config import GatewayConfig
from rollouts.rewards.answers import load_function
from rollouts.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_agents(
    config: Config,
    engines: Sequence[InferenceEngine],
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    template_kwargs: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    num_greedy: int = 0,
) -> Callable[..., Any]:
    """Return the generate function of config.agent.

    Args:
        environment: variables of the program, which does not get the secret of the ranks among them.

    Raises: ConfigError for a function that cannot be loaded.
    """
    section = config.agent
    program: Any = section.command if section.function is None else load_function(section.function)
    parser = parse_hermes_calls
    if config.task == "calculator" and is_character_tokenizer(tokenizer):
        parser = create_compact_parser([create_calculator_tool()])  # the calls of its demonstrations
    chat = section.chat
    if chat is None and config.model.path is None:
        chat = False  # demonstrations of the built-in model are plain texts
    return create_agent_generate_fn(
        program,
        engines,
        tokenizer,
        params,
        config=AgentConfig(
            max_answers=section.max_answers,
            max_tokens=section.max_tokens,
            timeout_s=section.timeout_s,
            max_programs=section.max_programs,
            on_error=section.on_error,
            max_retries=section.max_retries,
            failed_reward=section.failed_reward,
            must_report=not has_reward(config),
            environment={name: value for name, value in environment.items() if not name.startswith(TOKEN_VARIABLE)},
        ),
        gateway=GatewayConfig(chat=chat, template_kwargs=template_kwargs, parse_calls=parser, seed=config.seed),
        num_greedy=num_greedy,
    )


def has_reward(config: Config) -> bool:
    """Whether a reward function or model of the user judges the runs of an agent; otherwise they report their rewards."""
    return config.reward.function is not None or config.reward.model is not None
