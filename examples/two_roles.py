"""Two roles learn to understand each other, from random weights, in a minute or two on a CPU.

    python examples/two_roles.py

The speaker is shown a digit and says one of three words. The listener hears the word and names the digit. Both are paid 1 if it is right.
First the listener learns the words of a speaker that is a script, a frozen role. Then the same policy plays both roles: the speaker learns
words that the listener understands. Each role is compared with itself alone (Sample.subgroup), in several matches about the same digit.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
from collections.abc import Mapping, Sequence
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

LR = float(os.environ.get("LR", "3e-3"))
NUM_DIGITS, NUM_MATCHES = 3, 8


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
    """Train in both stages, and print the accuracy of the policy in both roles before, between and after them."""
    tokenizer, model = create_char_tokenizer(), create_tiny_model(seed=seed)
    setting = MatchSetting(environment_factory=Signals, seed=seed)
    backend = create_pytorch_backend(model, lr=3e-3)
    for trained in (("listener",), ("speaker", "listener")):
        async with InProcessEngine(copy.deepcopy(model), tokenizer) as engine:
            learner = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=1))
            policies = {role: learner if role in trained else ScriptedAgentPolicy(say_word) for role in ("speaker", "listener")}
            buffer = DataBuffer(create_prompts(60), seed=seed)
            rollouts = RolloutConfig(
                batch_size=12,
                n_samples_per_prompt=NUM_MATCHES * len(trained),
                generate_fn=create_match_generate_fn(policies, setting, trained=trained),
            )
            config = RLTrainingConfig(num_steps=num_steps, algorithm=grpo(), weight_sync="memory")
            before = await measure(policies, setting)
            await run_rl_training(backend, buffer, AsyncRolloutManager(buffer, rollouts, engines=[engine]), [engine], config)
            after = await measure(policies, setting)
        print(f"{' and '.join(trained)} trained for {num_steps} steps, right answers: {before:.2f} -> {after:.2f}")


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
