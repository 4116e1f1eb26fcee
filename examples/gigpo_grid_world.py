"""GiGPO from the episode to the gradient, one line per stage, with a tiny model on a CPU.

    python examples/gigpo_grid_world.py                      # one run: the result of each stage, then a line per iteration
    python examples/gigpo_grid_world.py --omega 0            # the same without step-level advantages: GRPO
    python examples/gigpo_grid_world.py --compare 5 --figure docs/gigpo-grid-world.png --table gigpo.json

A model with random weights walks on a 5 x 5 grid. It reads "12>33" and answers with one letter of udlr; only arriving at the goal is
rewarded. Episodes of a group start in the same cell; in every cell that several of them visit, GiGPO compares their actions. Stages of an
iteration:

    rollouts      groups of episodes from equal first states                    agents.run.run_episode_group
    reward        a function in a sandbox judges each conversation             rewards.code.sandboxed.SandboxedReward
    align         its rewards of steps become their base_reward                rewards.results.align_rewards_with_step_data
    advantages    A_E + omega * A_S for each step                               gigpo_steps.system_apply_gigpo_to_batch_steps
    update        PPO's clipped loss on the tokens of the steps                gigpo_steps.with_step_advantages, train_on_rollouts

Before the first iteration the model imitates demonstrations with mostly random moves: it learns the letters, and little else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import trio

from rollouts import (
    InProcessEngine,
    Sample,
    SamplingParams,
    StepData,
    collate_samples,
    create_char_tokenizer,
    create_pytorch_backend,
    derive_seed,
    grpo,
    sft_loss,
    token_mean,
    with_reward,
)
from rollouts.agents.config import EpisodeConfig
from rollouts.agents.episode import Episode
from rollouts.agents.policies import ActionRequest, AgentAction, EngineAgentPolicy
from rollouts.agents.run import run_episode_group
from rollouts.algorithms.anchors import hash_observation
from rollouts.algorithms.gigpo_steps import system_apply_gigpo_to_batch_steps, with_step_advantages
from rollouts.environments.games.grid_world import GridWorld, GridWorldConfig, choose_noisy_move, list_cells
from rollouts.rewards.code.sandboxed import SandboxedReward
from rollouts.rewards.evaluate import RewardFn
from rollouts.rewards.results import align_rewards_with_step_data
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import UpdatePlan, train_on_rollouts
from rollouts.types import Prompt

REWARD = f"{Path(__file__).with_name('grid_world_reward.py')}:reward"

TOKENIZER = create_char_tokenizer()


ANCHORS: dict[str, Callable[[str], str]] = {"observation": hash_observation, "text": str, "column": lambda seen: seen[0]}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings, each an option of the same name."""

    omega: float = 1.0  # weight of the step level; 0 = GRPO
    gamma: float = 0.95  # discount of step rewards
    default_step_reward: float = 0.0  # reward of steps without a reward of their own
    anchors: str = "observation"  # key of a state: observation (its hash), text (unhashed), column (only the column)
    episodes_per_batch_group: int = 8
    groups_per_iteration: int = 12
    max_episode_steps: int = 12
    num_training_iterations: int = 45
    num_epochs: int = 1
    lr: float = 7e-4
    entropy_coef: float = 0.0  # keeps the policy from becoming deterministic too early
    grid_size: int = 5
    num_demonstrations: int = 1024  # demonstrations imitated before the first iteration
    num_imitation_steps: int = 150
    random_share: float = 0.8  # fraction of random moves in demonstrations; the others are an expert's
    seed: int = 0

    @property
    def grid(self) -> GridWorldConfig:
        """The map."""
        return GridWorldConfig(size=self.grid_size, max_steps=self.max_episode_steps)

    @property
    def goal(self) -> tuple[int, int]:
        """The goal, in the middle, so that the right direction depends on the position."""
        return self.grid_size // 2, self.grid_size // 2


def create_prompts(settings: Settings, iteration: int) -> list[Prompt]:
    """Create the start cells of an iteration's groups: every cell once, in a new order, before any repeats."""
    cells = [cell for cell in list_cells(settings.grid_size) if cell != settings.goal]
    prompts: list[Prompt] = []
    for index in range(iteration * settings.groups_per_iteration, (iteration + 1) * settings.groups_per_iteration):
        turn, place = divmod(index, len(cells))
        cell = random.Random(derive_seed(settings.seed, turn)).sample(cells, len(cells))[place]
        prompts.append(Prompt(content="", index=index, metadata={"start": list(cell), "goal": list(settings.goal)}))
    return prompts


def count_shortest(sample: Sample) -> int:
    """Count the steps of a shortest path from the start of an episode to the goal."""
    start, goal = sample.metadata["start"], sample.metadata["goal"]
    return sum(abs(a - b) for a, b in zip(start, goal, strict=True))


class Demonstrator:
    """A policy that knows the map, but mostly moves at random."""

    tokenizer = TOKENIZER

    def __init__(self, settings: Settings) -> None:
        self.settings, self.generator = settings, random.Random(settings.seed)

    async def get_action(self, request: ActionRequest) -> AgentAction:
        """Return the expert's letter, or a random one."""
        seen = request.messages[-1].content or ""
        letter = choose_noisy_move(seen, self.generator, wrong_share=self.settings.random_share, config=self.settings.grid)
        return AgentAction(text=letter, tokens=tuple(TOKENIZER(letter)["input_ids"]))


class Trainer:
    """A trained model, an engine that acts with it, and the stages between them."""

    def __init__(self, settings: Settings, reward_fn: RewardFn, say: Callable[[str], None]) -> None:
        sizes = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "seed": settings.seed}
        self.settings, self.reward_fn, self.say = settings, reward_fn, say
        self.model = create_tiny_model(**sizes)
        self.backend = create_pytorch_backend(self.model, lr=settings.lr, tokenizer=TOKENIZER)
        self.engine = InProcessEngine(create_tiny_model(**sizes), TOKENIZER)
        self.policy = EngineAgentPolicy(self.engine, TOKENIZER, SamplingParams(max_tokens=1))
        self.version = 0

    async def collect(self, iteration: int) -> list[tuple[Episode, ...]]:
        """Collect groups of episodes concurrently, each group with its own start, in the order of prompts."""
        settings, prompts = self.settings, create_prompts(self.settings, iteration)
        config = EpisodeConfig(max_turns=settings.max_episode_steps, chat=False)
        groups: dict[int, tuple[Episode, ...]] = {}

        async def play(prompt: Prompt) -> None:
            num, seed = settings.episodes_per_batch_group, settings.seed
            groups[prompt.index] = await run_episode_group(self.policy, partial(GridWorld, settings.grid), prompt, num, config, seed=seed)

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(play, prompt)
        return [groups[prompt.index] for prompt in prompts]

    async def judge(self, episodes: Sequence[Episode]) -> list:
        """Return an EvaluateResult for each episode, from the sandbox."""
        results = [None] * len(episodes)

        async def ask(k: int) -> None:
            results[k] = await self.reward_fn(episodes[k].sample)

        async with trio.open_nursery() as nursery:
            for k in range(len(episodes)):
                nursery.start_soon(ask, k)
        return results

    async def iterate(self, iteration: int) -> dict[str, float]:
        """Run one iteration. Returns its facts."""
        settings, say = self.settings, self.say
        groups = await self.collect(iteration)
        episodes = [episode for group in groups for episode in group]
        say(f"rollouts    {len(groups)} groups x {len(groups[0])} episodes, {sum(len(e.steps) for e in episodes)} steps")
        results = await self.judge(episodes)
        scores = [result.score for result in results]
        say(f"reward      {len(results)} results, scores {scores[: len(groups[0])]} in the first group")
        aligned = align_rewards_with_step_data(results, [episode.steps for episode in episodes], "batch").raise_unmatched()
        say(f"align       {sum(step.base_reward is not None for steps in aligned.steps for step in steps)} steps have a base_reward")
        steps = system_apply_gigpo_to_batch_steps(
            aligned.steps,
            scores,
            omega=settings.omega,
            gamma=settings.gamma,
            state_hashing_function=ANCHORS[settings.anchors],
            default_step_reward=settings.default_step_reward,
        )
        say(f"advantages  {_describe_first(steps[0])}")
        samples = [with_reward(episode.sample, score) for episode, score in zip(episodes, scores, strict=True)]
        batch = collate_samples(samples, pad_id=TOKENIZER.pad_token_id)
        algorithm = replace(grpo(entropy_coef=settings.entropy_coef), estimate=partial(with_step_advantages, steps=steps))
        metrics = await train_on_rollouts(
            self.backend, batch, algorithm, plan=UpdatePlan(num_epochs=settings.num_epochs, seed=derive_seed(settings.seed, iteration))
        )
        say(f"update      tokens {tuple(batch.tokens.shape)}, {int(batch.loss_mask.sum())} trained, loss {metrics['loss']:.4f}")
        await self.hand_over()
        shared = [step.step_info["gigpo"]["anchor_size"] > 1 for row in steps for step in row]
        return {
            "success": statistics.fmean(scores),
            "extra_steps": statistics.fmean(len(episode.steps) - count_shortest(episode.sample) for episode in episodes),
            "shared_anchors": statistics.fmean(shared),
            "moves": statistics.fmean(result.metrics["moves"].score for result in results),
        }

    async def imitate(self) -> None:
        """Train on demonstrations, most of whose moves are random."""
        settings = self.settings
        config = EpisodeConfig(max_turns=settings.max_episode_steps, chat=False)
        demonstrator = Demonstrator(settings)
        rows: list[Sample] = []
        for start in range(-(-settings.num_demonstrations // settings.groups_per_iteration)):
            for prompt in create_prompts(settings, -1 - start):
                (episode,) = await run_episode_group(demonstrator, partial(GridWorld, settings.grid), prompt, 1, config)
                rows.append(replace(episode.sample, reward=None))
        backend = create_pytorch_backend(self.model, lr=3e-3, tokenizer=TOKENIZER)
        for step in range(settings.num_imitation_steps):
            batch = collate_samples(random.Random(derive_seed(settings.seed, step)).choices(rows, k=64), pad_id=TOKENIZER.pad_token_id)
            await backend.forward_backward(replace(batch, loss_weights=token_mean(batch)), sft_loss).result()
            await backend.optim_step().result()
        await self.hand_over()

    async def hand_over(self) -> None:
        """Send the trained weights to the engine as the next version."""
        self.version += 1
        await self.engine.update_weights(await self.backend.get_weights().result(), self.version)


def _describe_first(steps: Sequence[StepData]) -> str:
    facts = steps[0].step_info["gigpo"]
    names = ("episode_advantage", "return_to_go", "anchor_size", "step_advantage", "advantage")
    return f"of step 0 of episode 0: {', '.join(f'{name} {facts[name]:.3g}' for name in names)}"


async def train(settings: Settings, say: Callable[[str], None] = print) -> list[dict[str, float]]:
    """Run all iterations. Returns one line of facts per iteration."""
    lines: list[dict[str, float]] = []
    async with SandboxedReward(REWARD).open_reward() as reward_fn:
        trainer = Trainer(settings, reward_fn, say)
        await trainer.imitate()
        for iteration in range(settings.num_training_iterations):
            trainer.say = say if iteration == 0 else lambda text: None
            started = time.monotonic()
            lines.append(await trainer.iterate(iteration))
            facts = "  ".join(f"{name} {value:.2f}" for name, value in lines[-1].items())
            say(f"iteration {iteration + 1:3d}  {facts}  {time.monotonic() - started:.1f} s")
    return lines


# -- a comparison: the same runs with and without the step level


Line = dict[str, float]
Curves = dict[str, list[list[Line]]]
"""The facts of each iteration, for each seed of each method."""

SMOOTHING = 2  # iterations to average: as many as start in every cell once
NO_WORSE = {"success": 0.9, "extra_steps": 1.0}  # bounds that count as learned


def run_quietly(settings: Settings) -> list[Line]:
    """Train in a process of its own."""
    import torch

    torch.set_num_threads(1)
    return trio.run(partial(train, settings, lambda text: None))


def compare(settings: Settings, num_seeds: int, num_processes: int) -> Curves:
    """Run GiGPO and GRPO (omega = 0). Equal seeds have equal initial weights, demonstrations and first states."""
    names = {"GiGPO": settings, "GRPO": replace(settings, omega=0.0)}
    curves: Curves = {name: [] for name in names}
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {(name, seed): pool.submit(run_quietly, replace(names[name], seed=seed)) for seed in range(num_seeds) for name in names}
        for (name, seed), future in running.items():
            curves[name].append(future.result())
            ends = ", ".join(f"{fact} {smooth(curves[name][-1], fact)[-1]:.2f}" for fact in NO_WORSE)
            print(f"{name:5s} seed {seed}: {ends} at the end", flush=True)
    return curves


def smooth(lines: Sequence[Line], fact: str) -> list[float]:
    """Return means of a fact over the last SMOOTHING iterations, from the first complete window on."""
    return [statistics.fmean(line[fact] for line in lines[i - SMOOTHING : i]) for i in range(SMOOTHING, len(lines) + 1)]


def count_episodes(settings: Settings, iterations: int) -> int:
    """Return the number of episodes in a number of iterations."""
    return iterations * settings.groups_per_iteration * settings.episodes_per_batch_group


def find_learned(lines: Sequence[Line], settings: Settings) -> int | None:
    """Return the number of episodes until both facts satisfy NO_WORSE; None = never."""
    pairs = zip(smooth(lines, "success"), smooth(lines, "extra_steps"), strict=True)
    found = (i for i, (success, extra) in enumerate(pairs) if success >= NO_WORSE["success"] and extra <= NO_WORSE["extra_steps"])
    first = next(found, None)
    return None if first is None else count_episodes(settings, first + SMOOTHING)


def tell(curves: Curves, settings: Settings) -> str:
    """Describe, for every seed, the episodes until the task is learned, and both final facts."""
    rows: list[str] = []
    for name, runs in curves.items():
        counts = ["never" if (count := find_learned(lines, settings)) is None else str(count) for lines in runs]
        ends = [f"{fact} {statistics.fmean(smooth(lines, fact)[-1] for lines in runs):.2f}" for fact in NO_WORSE]
        rows.append(f"{name:5s} episodes until success >= 0.9 with at most 1 extra step: {', '.join(counts)}; end: {', '.join(ends)}")
    return "\n".join(rows)


def draw(curves: Curves, settings: Settings, path: Path) -> None:
    """Draw each seed as a thin line and their mean as a thick one, over the number of episodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    titles = {"success": "share of episodes that come to the goal", "extra_steps": "steps beyond the shortest way"}
    for axes, (fact, title) in zip(panels, titles.items(), strict=True):
        for (name, runs), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
            smoothed = [smooth(lines, fact) for lines in runs]
            episodes = [count_episodes(settings, i + SMOOTHING) for i in range(len(smoothed[0]))]
            for curve in smoothed:
                axes.plot(episodes, curve, color=color, alpha=0.25, linewidth=1)
            axes.plot(episodes, [statistics.fmean(values) for values in zip(*smoothed, strict=True)], color=color, label=name, linewidth=2)
        axes.set(xlabel="episodes", title=title, ylim=(0, 1.02) if fact == "success" else (0, None))
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"a {settings.grid_size} x {settings.grid_size} grid, {len(curves['GRPO'])} seeds (thin) and their mean (thick)")
    figure.savefig(path, dpi=110)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse one option per field of Settings, and those of a comparison."""
    parser = argparse.ArgumentParser(description="GiGPO on a grid world, from the episode to the gradient.")
    for field in fields(Settings):
        choices = tuple(ANCHORS) if field.name == "anchors" else None
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, choices=choices)
    parser.add_argument("--compare", type=int, default=0, metavar="SEEDS", help="run GiGPO and GRPO with so many seeds each")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time, of a comparison")
    parser.add_argument("--figure", type=Path, help="where the picture of a comparison goes")
    parser.add_argument("--table", type=Path, help="where the numbers of a comparison go, as JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    arguments = parse_arguments(argv)
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    if not arguments.compare:
        lines = trio.run(train, settings)
        print(f"success {lines[0]['success']:.2f} -> {lines[-1]['success']:.2f}, extra steps {lines[0]['extra_steps']:.1f} -> "
              f"{lines[-1]['extra_steps']:.1f}")  # fmt: skip
        return 0
    curves = compare(settings, arguments.compare, arguments.processes)
    print(tell(curves, settings))
    if arguments.table is not None:
        arguments.table.write_text(json.dumps({"settings": asdict(settings), "curves": curves}) + "\n")
    if arguments.figure is not None:
        draw(curves, settings, arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
