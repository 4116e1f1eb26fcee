"""Tasks with several turns: a grid world, a calculator with tool calls, and the user's environments.

Episodes of the built-in model are plain text with one character per token, so that it has little to learn; a model with a chat template
gets rules and a conversation. Demonstrations are episodes played by a script: they have the tokens that the model itself would read and
write, with the loss on the actions only.
"""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from integration.expressions.mixture import parse_mixture
from integration.parts.model_settings import read_model_config
from integration.settings.config import Config
from integration.settings.made.budgets import episode_config, response_tokens
from integration.settings.sections.episodes import parse_parameters
from integration.tasks.task import Task, is_character_tokenizer
from rollouts.agents.policies import ActionRequest, AgentAction
from rollouts.agents.samples import agent_rollouts_to_samples
from rollouts.agents.setting import EpisodeSetting, observation_key
from rollouts.data.datasets import load_jsonl, load_rl_prompts, load_sft_conversations, prepare_sft_samples
from rollouts.data.model_limits import read_config_limits
from rollouts.data.rows.loaded import LoadedRows, pick_rows
from rollouts.environments.games.calculator import create_calculator_problems, create_calculator_tool, demonstrate_calculator, grade_answer
from rollouts.environments.games.grid_world import (
    RULES,
    WORDS,
    Cell,
    GridWorld,
    GridWorldConfig,
    create_grid_world_prompts,
    find_way,
    show_cells,
)
from rollouts.environments.protocol import EnvironmentConfig, EnvironmentFactory
from rollouts.environments.tools.calls import create_compact_parser
from rollouts.environments.tools.environment import ToolEnvironment, ToolRules, describe_tools
from rollouts.errors import ConfigError, DataError, locate_error
from rollouts.rewards.answers import load_function
from rollouts.seeds import derive_seed
from rollouts.types import Message, Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Script = Callable[[ActionRequest], str]
"""f(request) -> the text of a demonstration's action."""

GRID_SIZE, CALCULATOR_DIGITS, CALCULATOR_OPERATIONS = 5, 2, 2
NUM_DEMONSTRATIONS = 4096
RANDOM_SHARE = 0.6  # fraction of random steps in grid_world's demonstrations
GIVE_UP_SHARE = 0.55  # fraction of calculator's demonstrations that give up
_DEMONSTRATION_SEED = 20_000


class DemonstrationPolicy:
    """A policy that tokenizes the actions of a script, with the end of a turn appended."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Script) -> None:
        """
        Args:
            tokenizer: tokenizer of the model that learns from it.
            script: returns the text of an action.
        """
        self.tokenizer = tokenizer
        self._script = script

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the action of a turn. Raises ConfigError if neither chat template nor tokenizer has a token that ends it."""
        await trio.lowlevel.checkpoint()
        end = self.tokenizer.eos_token_id if request.end_of_turn is None else request.end_of_turn
        if not isinstance(end, int):
            raise ConfigError(
                f"the tokenizer's eos_token_id is {end!r}, and its chat template ends a turn with no single token: demonstrations have "
                "nothing to end an action with. Set eos_token in tokenizer_config.json to the token that does"
            )
        tokens: Any = self.tokenizer(self._script(request), add_special_tokens=False)["input_ids"]
        return AgentAction(tokens=(*tokens, end))


def create_grid_world_task(config: Config, tokenizer: PreTrainedTokenizerBase, *, seed: int = 12345) -> Task:
    """Create the task of walking to a given corner in a limited number of steps, for reward 1.

    Args:
        seed: seed of the problems, which are all pairs of a start and a corner. Held-out problems have other starts: no training episode
            begins there with that corner, but training episodes may pass through them.

    Raises: DataError for an impossible map.
    """
    limits, world = episode_config(config), create_world(config)
    num_free = world.size**2 - world.num_holes
    pairs = create_grid_world_prompts(seed, num_free * (num_free - 1), world)
    prompts = [_name_way(prompt, world) for prompt in pairs if set(prompt.metadata["goal"]) <= {0, world.size - 1}]
    num_heldout = min(config.evaluation.num_prompts, max(1, len(prompts) // 5))
    is_small = is_character_tokenizer(tokenizer)
    holes = f", {world.num_holes} holes" if world.num_holes else ""
    return _create_task(
        config,
        tokenizer,
        partial(GridWorld, world, rules="" if is_small else RULES),
        description=(
            f"walk to a corner of a map of {world.size} x {world.size}{holes} within {limits.max_turns} steps; evaluated from starts that "
            f"no episode of training begins with ({RANDOM_SHARE:.0%} of the steps of the demonstrations go anywhere, on purpose)"
        ),
        prompts=prompts,
        num_heldout=num_heldout,
        script=partial(
            _walk,
            steps={show_cells(*_read_ends(prompt)): prompt.metadata["ground_truth"][0] for prompt in prompts},
            names={letter: letter if is_small else word for word, letter in WORDS.items()},
        ),
    )


def create_calculator_task(config: Config, tokenizer: PreTrainedTokenizerBase, *, seed: int = 12345, num_train: int = 8000) -> Task:
    """Create the task of computing, as in 37*12+5, with a tool for single operations; reward 1 for the right answer.

    Args:
        seed: seed of the problems.
        num_train: maximum training problems; held-out problems, at most a fifth of all, are excluded.
    """
    digits = config.environment.choose("max_digits", CALCULATOR_DIGITS)
    operations = config.environment.choose("max_operations", CALCULATOR_OPERATIONS)
    num_existing = sum(10 ** (digits * (n + 1)) * 3**n for n in range(1, operations + 1))
    num_problems = min(config.evaluation.num_prompts + num_train, num_existing)
    num_heldout = min(config.evaluation.num_prompts, num_problems // 5)
    problems = create_calculator_problems(seed, num_problems, max_digits=digits, max_operations=operations)
    is_small = is_character_tokenizer(tokenizer)
    tool = create_calculator_tool(max_operations=1)
    factory: EnvironmentFactory = partial(
        ToolEnvironment, [tool], grade=grade_answer, rules=ToolRules(on_tool_error=config.episode.on_tool_error)
    )
    if is_small:
        factory = partial(factory, parser=create_compact_parser([tool]))
    else:
        problems = tuple(replace(problem, content=(Message(role="user", content=str(problem.content)),)) for problem in problems)
        factory = partial(factory, prefix=describe_tools([tool]))
    return _create_task(
        config,
        tokenizer,
        factory,
        description=(
            f"compute with numbers of up to {digits} digits and up to {operations} operations, by calls of a tool that does one of them "
            f"({GIVE_UP_SHARE:.0%} of the demonstrations give up at once, on purpose)"
        ),
        prompts=problems,
        num_heldout=num_heldout,
        script=partial(_calculate, as_hermes=not is_small),
    )


def create_world(config: Config) -> GridWorldConfig:
    """Create the map of task grid_world. Raises DataError for an impossible map."""
    environment = config.environment
    return GridWorldConfig(
        size=environment.choose("size", GRID_SIZE),
        num_holes=environment.choose("num_holes", 0),
        step_reward=environment.choose("step_reward", 0.0),
        max_steps=episode_config(config).max_turns + 1,  # the episode's limit is met first
    )


def check_task(config: Config) -> None:
    """Raise ConfigError or DataError for errors of a task's environment that are known before a run has a directory."""
    if config.task == "grid_world":
        create_world(config)
    for reference in (config.environment.factory, config.environment.expert, config.environment.state_key):
        if reference is not None:
            load_function(reference)


def count_demonstrations(config: Config) -> int:
    """Return the number of demonstrations for SFT: at most the rows of its steps."""
    if config.task == "environment" and config.environment.expert is None:
        return 0
    return min(NUM_DEMONSTRATIONS, config.sft.num_steps * config.sft.batch_size)


def check_demonstrations(before: Config, after: Config) -> None:
    """Raise ConfigError if a resumed run would have other demonstrations than the interrupted one."""
    old, new = count_demonstrations(before), count_demonstrations(after)
    if before.task == after.task and old != new:
        raise ConfigError(
            f"--resume with sft.num_steps: {before.sft.num_steps} -> {after.sft.num_steps}, for which {new} demonstrations would be played "
            f"instead of {old}, in another order: leave --sft.num-steps out, or start a new run"
        )


def create_environment_task(config: Config, tokenizer: PreTrainedTokenizerBase, mode: str = "sft+rl") -> Task:
    """Create the task of episodes in the user's environment, named by config.environment.factory.

    Prompts are the rows of data.path, whose other keys are parameters for the environment's reset. Without data an episode has only a seed,
    and the environment states the problem. Demonstrations are played by environment.expert, or are the conversations of data.path.

    Args:
        mode: sft, rl or sft+rl: whether demonstrations, prompts or both are needed.

    Raises: ConfigError, DataError.
    """
    section, data = config.environment, config.data
    assert section.factory is not None, "Config checks that there is one"
    factory, num_heldout = load_function(section.factory), config.evaluation.num_prompts
    script = None if section.expert is None else load_expert(section.expert)
    conversations = parse_mixture(data.mixture) or (None if data.path is None else Path(data.path))
    if "sft" in mode and script is None and conversations is None:
        raise ConfigError(
            "SFT needs demonstrations, and there are none: give --environment.expert FILE.py:NAME, a function of an ActionRequest that "
            "plays them, or conversations (--data.path FILE.jsonl, --data.mixture); or leave SFT out with --mode rl"
        )
    prompts: Sequence[Prompt] | None = None
    num_skipped, held = 0, set[str]()
    as_messages = bool(getattr(tokenizer, "chat_template", None)) and not is_character_tokenizer(tokenizer)
    load = partial(load_episode_prompts, as_messages=as_messages, skip_bad_rows=data.skip_bad_rows)
    if data.path is not None:
        loaded = load(Path(data.path))
        prompts, num_skipped = loaded.rows, len(loaded.bad_rows)
        num_heldout = min(num_heldout, len(prompts) // 10)
        if data.eval_path is None and not data.mixture:
            held = set(loaded.sources[:num_heldout])
    task = _create_task(
        config,
        tokenizer,
        factory,
        description=f"episodes of {section.factory}",
        prompts=prompts,
        num_heldout=num_heldout,
        script=script,
    )
    if data.eval_path is not None:
        heldout = load(Path(data.eval_path)).rows[: config.evaluation.num_prompts]
        task = replace(task, train_prompts=tuple(prompts or ()), heldout_prompts=heldout)
    if "sft" in mode and script is None and conversations is not None:
        rows = load_sft_conversations(conversations, skip_bad_rows=data.skip_bad_rows)
        overflow = "truncate" if data.truncate else "error"
        limits = read_config_limits(read_model_config(config))
        prepared = prepare_sft_samples(
            tokenizer, rows, max_length=data.max_length, on_overflow=overflow, skip_bad_rows=data.skip_bad_rows, limits=limits
        )
        if held:  # held-out rows are not trained on
            prepared = pick_rows(prepared, [i for i, source in enumerate(prepared.sources) if source not in held])
        task = replace(task, sft_samples=prepared.rows)
    return replace(task, num_skipped_rows=num_skipped)


def load_expert(reference: str) -> Script:
    """Load the user's function of an ActionRequest, with messages for its errors. Raises ConfigError if it does not exist."""
    return partial(_ask_expert, expert=load_function(reference), reference=reference)


def _ask_expert(request: ActionRequest, *, expert: Callable[[ActionRequest], Any], reference: str) -> str:
    where = f"environment.expert {reference}, asked for action {request.turn} after {request.messages[-1].content!r:.100},"
    try:
        text = expert(request)
    except (Exception, SystemExit) as error:  # the function is the user's
        raise ConfigError(f"{where} raised {type(error).__name__} ({locate_error(error)}): {error}") from error
    if not isinstance(text, str):
        raise ConfigError(f"{where} returned {text!r:.200} ({type(text).__name__}), expected the text of the action")
    return text


def load_state_key(reference: str) -> Callable[[Any], str | None]:
    """Load the user's function of an observation, with messages for its errors. Raises ConfigError if it does not exist."""
    return partial(_ask_state_key, function=load_function(reference), reference=reference)


def _ask_state_key(observation: Any, *, function: Callable[[Any], Any], reference: str) -> str | None:
    where = f"environment.state_key {reference}, asked for the observation {observation!r:.200},"
    try:
        key = function(observation)
    except (Exception, SystemExit) as error:  # the function is the user's
        raise DataError(f"{where} raised {type(error).__name__} ({locate_error(error)}): {error}") from error
    if key is None or isinstance(key, str):
        return key
    if inspect.iscoroutine(key):
        key.close()  # avoid a warning about an unawaited coroutine
    raise DataError(
        f"{where} returned {key!r:.200} ({type(key).__name__}), expected a text that is equal for equal states, or None for one that is "
        "compared with no other; a plain function"
    )


def _configure_environment(prompt: Prompt, seed: int, *, parameters: Mapping[str, Any]) -> EnvironmentConfig:
    """Return the settings of a reset: the parameters of the run, overridden by those of the row."""
    return EnvironmentConfig(seed=seed, parameters={**copy.deepcopy(dict(parameters)), **prompt.metadata})


def load_episode_prompts(path: Path, *, as_messages: bool, skip_bad_rows: bool) -> LoadedRows[Prompt]:
    """Read rows of JSONL as prompts of episodes, with the environment's parameters as metadata.

    Rows with a prompt are read as by load_rl_prompts, but need no answer. If no row has a prompt, rows contain parameters only.

    Raises: DataError with file and line.
    """
    rows = load_jsonl(path, skip_bad_rows=skip_bad_rows)
    if any(row.get(name) for row in rows for name in ("prompt", "messages", "question")):
        return load_rl_prompts(path, require_ground_truth=False, as_messages=as_messages, skip_bad_rows=skip_bad_rows)
    prompts = tuple(Prompt(content="", index=i, metadata=row) for i, row in enumerate(rows))
    return LoadedRows(rows=prompts, sources=rows.sources, bad_rows=rows.bad_rows)


def _create_task(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    factory: EnvironmentFactory,
    *,
    description: str,
    prompts: Sequence[Prompt] | None,
    num_heldout: int,
    script: Script | None,
) -> Task:
    """Create a task of episodes. prompts: the first num_heldout are held out; None = seeds only."""
    thinking, section = config.generation.enable_thinking, config.environment
    parameters = parse_parameters(section.parameters)
    setting = EpisodeSetting(
        environment_factory=factory,
        config=episode_config(config, chat=False if is_character_tokenizer(tokenizer) else None),
        seed=config.seed,
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        state_key=observation_key if section.state_key is None else load_state_key(section.state_key),
        similarity=section.similarity,
        create_environment_config=partial(_configure_environment, parameters=parameters) if parameters else None,
    )
    if prompts is None:
        heldout, train = tuple(Prompt(content="", index=i) for i in range(num_heldout)), ()
    else:
        heldout, train = tuple(prompts[:num_heldout]), tuple(prompts[num_heldout:])
    return Task(
        name=config.task,
        description=description,
        train_prompts=train,
        heldout_prompts=heldout,
        sft_samples=(),
        reward_fn=None,
        max_tokens=response_tokens(config),
        episodes=setting,
        demonstrate=None if script is None else partial(demonstrate, tokenizer, setting, script, train, count_demonstrations(config)),
    )


async def demonstrate(
    tokenizer: PreTrainedTokenizerBase,
    setting: EpisodeSetting,
    script: Script,
    prompts: Sequence[Prompt],
    num: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Sample, ...]:
    """Play episodes of a script for SFT, without failed episodes that are dropped.

    Args:
        prompts: used in turn; () = seeds only.
        num: number of episodes.
        say: prints the number of dropped episodes.

    Raises: errors of run_episode; ConfigError if the user's script fails; DataError if every episode failed.
    """
    numbered = [replace(prompts[i % len(prompts)], index=i) if prompts else Prompt(content="", index=i) for i in range(num)]
    own = replace(setting, seed=derive_seed(setting.seed, _DEMONSTRATION_SEED))
    played = await agent_rollouts_to_samples(DemonstrationPolicy(tokenizer, script), own, numbered)
    kept = tuple(sample for sample in played if sample.status is not Status.FAILED)
    if played and not kept:
        first = played[0].episode
        raise DataError(
            f"all {num} episodes of the demonstrations failed, and nothing is left for SFT. The first one: "
            f"{None if first is None else first.error}. Repair the environment, or leave SFT out with --mode rl"
        )
    if len(kept) < num:
        say(f"{num - len(kept)} of {num} demonstrations failed and were left out")
    return kept


def _name_way(prompt: Prompt, world: GridWorldConfig) -> Prompt:
    """Return the prompt with a shortest path as its ground truth, for tables of examples."""
    return replace(prompt, metadata={**prompt.metadata, "ground_truth": " ".join(find_way(*_read_ends(prompt), world))})


def _walk(request: ActionRequest, steps: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return a step to the goal or, often, a random one. steps: the right step, by observation; names: the text of each step."""
    generator = random.Random(request.seed)
    if generator.random() < RANDOM_SHARE:
        return names[generator.choice("udlr")]
    return names[steps[(request.messages[-1].content or "").splitlines()[-1]]]


def _read_ends(prompt: Prompt) -> tuple[Cell, Cell]:
    """Return start and goal."""
    return tuple(prompt.metadata["start"]), tuple(prompt.metadata["goal"])


def _create_generator(request: ActionRequest) -> random.Random:
    """Return a generator with equal random numbers in all turns of an episode."""
    return random.Random((request.request_id or "").rpartition("-")[0])


def _calculate(request: ActionRequest, *, as_hermes: bool) -> str:
    """Return the action of an expert or, in more than half of the episodes, of giving up.

    Args:
        as_hermes: write calls in the Hermes format instead of calc(12*7).
    """
    generator = _create_generator(request)
    if generator.random() < GIVE_UP_SHARE:
        return "?"
    question = next(message for message in request.messages if message.role == "user")  # a system prompt may precede it
    expression = (question.content or "").splitlines()[-1].rstrip("=")
    prompt = Prompt(content="", metadata={"expression": expression})
    actions = demonstrate_calculator(prompt, generator)
    action = actions[min(request.turn, len(actions) - 1)]
    name, is_call, argument = action.partition("(")
    if not (as_hermes and is_call):
        return action
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'e': argument.removesuffix(')')}})}\n</tool_call>"
