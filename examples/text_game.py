"""Reinforcement learning in a text game, from random weights, in about a minute on a CPU: python examples/text_game.py

The game: guess a number from 0 to 6 in three guesses; after a wrong guess the model reads whether the number is greater (>) or smaller
(<). Random guesses find it in 37 of 100 games, bisection in all of them. The model has no demonstrations: its weights are random, and it is
rewarded for finding the number.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import trio

from rollouts import (
    AsyncRolloutManager,
    DataBuffer,
    EngineAgentPolicy,
    EpisodeConfig,
    InProcessEngine,
    Prompt,
    RLTrainingConfig,
    RolloutConfig,
    SamplingParams,
    ScriptedAgentPolicy,
    create_char_tokenizer,
    create_episode_generate_fn,
    create_pytorch_backend,
    grpo,
    open_pipeline,
    run_episode_group,
    run_rl_training,
)
from rollouts.environments.games.text_game import TextGameEnv, guess_by_halves
from rollouts.testing import create_tiny_model

NUM_NUMBERS, MAX_GUESSES = 7, 3
create_game = partial(TextGameEnv, num_numbers=NUM_NUMBERS, max_guesses=MAX_GUESSES)

# One empty prompt per secret: the model sees only the game, as plain text with one character per guess.
PROMPTS = tuple(Prompt(content="", index=i, metadata={"secret": i}) for i in range(NUM_NUMBERS))
EPISODES = EpisodeConfig(max_turns=MAX_GUESSES, chat=False, separator="")


async def play(policy, num_games=1, seed=0):
    """Play num_games games of a policy for each secret."""
    groups = [await run_episode_group(policy, create_game, prompt, num_games, EPISODES, seed=seed) for prompt in PROMPTS]
    return [game for group in groups for game in group]


def mean_reward(games):
    return sum(game.total_reward for game in games) / len(games)


def transcribe(game):
    """Write a game on one line: "? 3 > 5 =" is the guess 3, the hint that the number is greater, and the right guess 5."""
    return " ".join(message.content for message in game.messages)


# -- two players without a model: a baseline and the optimum


def guess_at_random(request):
    return str(random.Random(request.seed).randrange(NUM_NUMBERS))


def guess_well(request):
    seen = [message.content for message in request.messages if message.role != "assistant"]
    guesses = [int(message.content) for message in request.messages if message.role == "assistant"]
    return str(guess_by_halves(seen, guesses, NUM_NUMBERS))


# -- training


async def train(num_steps=150, seed=0, logger=None):
    """Train a policy from random weights. Returns it and the mean reward of each step."""
    tokenizer = create_char_tokenizer()
    model = create_tiny_model(hidden_size=32, num_layers=2, seed=seed)
    engine = InProcessEngine(copy.deepcopy(model), tokenizer, max_slots=128)
    backend = create_pytorch_backend(model, lr=5e-3, tokenizer=tokenizer)
    one_token = SamplingParams(max_tokens=1)  # a guess
    buffer = DataBuffer(PROMPTS, seed=seed)
    generate = create_episode_generate_fn([engine], tokenizer, one_token, create_game, EPISODES, seed=seed)
    rollouts = RolloutConfig(batch_size=NUM_NUMBERS, n_samples_per_prompt=16, generate_fn=generate)
    training = RLTrainingConfig(num_steps=num_steps, num_minibatches=4, algorithm=grpo(entropy_coef=0.01), weight_sync="memory")
    async with open_pipeline(backend) as pipeline, AsyncRolloutManager(buffer, rollouts, engines=[engine]) as manager:
        history = await run_rl_training(pipeline, buffer, manager, [engine], training, logger)
    return EngineAgentPolicy(engine, tokenizer, one_token.new(greedy=True)), [metrics["reward_mean"] for metrics in history]


class Progress:
    """Logger of a line for every tenth step."""

    def log(self, metrics, step):
        if step % 10 == 0:
            print(f"step {step:3d}   mean reward {metrics['reward_mean']:.2f}   " + "#" * round(40 * metrics["reward_mean"]))


async def main(num_steps=150, seed=0):
    baseline = mean_reward(await play(ScriptedAgentPolicy(guess_at_random), num_games=100))
    best = mean_reward(await play(ScriptedAgentPolicy(guess_well)))
    print(f"guessing at random {baseline:.2f}, by halves {best:.2f}")
    policy, rewards = await train(num_steps, seed, Progress())
    games = await play(policy)
    print(f"the model, greedy: {mean_reward(games):.2f}")
    for game in games:
        print(f"  {transcribe(game)}")
    return baseline, best, rewards, mean_reward(games)


if __name__ == "__main__":
    trio.run(main)
