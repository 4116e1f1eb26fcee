"""Two roles learn to understand each other, from random weights, in a minute or two on a CPU.

    python examples/two_roles.py

The speaker is shown a digit and says one of three words. The listener hears the word and names the digit. Both are paid 1 if it is right.
First the listener learns the words of a speaker that is a script. Then a speaker, a second model, learns words that this listener, which is
frozen now, understands. Each role is compared with itself alone (Sample.subgroup), in several matches about the same digit.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio

from rollouts import (
    AsyncRolloutManager,
    DataBuffer,
    InProcessEngine,
    Prompt,
    RLTrainingConfig,
    RolloutConfig,
    SamplingParams,
    create_char_tokenizer,
    create_pytorch_backend,
    grpo,
)
from rollouts.agents.matches import MatchSetting, create_match_generate_fn, run_match
from rollouts.agents.policies import ActionRequest, AgentPolicy, EngineAgentPolicy, ScriptedAgentPolicy
from rollouts.environments import EnvironmentConfig
from rollouts.rl_loop import run_rl_training
from rollouts.testing import create_tiny_model

NUM_DIGITS, NUM_MATCHES = 3, 8
ROLES = ("listener", "speaker")  # in the order in which they learn


class Signals:
    """The match. A word and an answer are one character each, of which the remainder of its code counts, so that each is valid."""

    def reset(self, config: EnvironmentConfig) -> tuple[str, str]:
        self.digit: int = config.parameters["digit"]
        return "speaker", str(self.digit)

    def step(self, role: str, action: str) -> tuple[str | None, str, Mapping[str, float], Mapping[str, Any]]:
        said = ord(action[0]) % NUM_DIGITS if action else 0
        if role == "speaker":
            return "listener", "abc"[said], {}, {"word": "abc"[said]}
        right = float(said == self.digit)
        return None, "", {"speaker": right, "listener": right}, {}

    def get_prompt_prefix(self, role: str) -> str:
        return "say " if role == "speaker" else "hear "


def say_word(request: ActionRequest) -> str:
    """A speaker with a language of its own: the words of the digits are b, c and a."""
    return "bca"[int(str(request.messages[-1].content)[-1])]


async def measure(policies: Mapping[str, AgentPolicy], setting: MatchSetting, num: int = 120) -> float:
    """Return the share of matches whose answer is right, all digits alike."""
    prompts = create_prompts(num)
    right: list[float] = []

    async def play(prompt: Prompt) -> None:
        episodes = await run_match(policies, setting, prompt)
        right.append(episodes["listener"].total_reward)

    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(play, prompt)
    return sum(right) / len(right)


def create_prompts(num: int) -> list[Prompt]:
    """Create prompts with the digits in turn, in an order of their own."""
    digits = [i % NUM_DIGITS for i in range(num)]
    random.Random(0).shuffle(digits)
    return [Prompt(content="", index=i, metadata={"digit": digit}) for i, digit in enumerate(digits)]


async def run(num_steps: int, seed: int) -> None:
    """Train one role after the other, and print the share of right answers before and after."""
    tokenizer, models = create_char_tokenizer(), {role: create_tiny_model(seed=seed + k) for k, role in enumerate(ROLES)}
    setting = MatchSetting(environment_factory=Signals, seed=seed)
    policies: dict[str, AgentPolicy] = {"speaker": ScriptedAgentPolicy(say_word)}
    async with AsyncExitStack() as engines:
        for role in ROLES:
            engine = await engines.enter_async_context(InProcessEngine(copy.deepcopy(models[role]), tokenizer))
            policies[role] = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=1))
            buffer = DataBuffer(create_prompts(60), seed=seed)
            generate = create_match_generate_fn(dict(policies), setting, trained=[role])
            rollouts = RolloutConfig(batch_size=12, n_samples_per_prompt=NUM_MATCHES, generate_fn=generate)
            manager = AsyncRolloutManager(buffer, rollouts, engines=[engine])
            config = RLTrainingConfig(num_steps=num_steps, algorithm=grpo(), weight_sync="memory")
            before = await measure(policies, setting)
            await run_rl_training(create_pytorch_backend(models[role], lr=3e-3), buffer, manager, [engine], config)
            print(f"{role} trained for {num_steps} steps, right answers: {before:.2f} -> {await measure(policies, setting):.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each stage (100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and sampling (0)")
    arguments = parser.parse_args(argv)
    trio.run(run, arguments.steps, arguments.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
