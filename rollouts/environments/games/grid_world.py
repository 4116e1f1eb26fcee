"""A grid world whose states repeat: walk to the goal. The observation is "12>33": at column 1, row 2; the goal at column 3, row 3.

A state tells nothing about the steps before it, so episodes with different ways meet in equal states: anchors for step-level advantages.
Texts are short, for models with one token per character: an action is one letter of udlr, or its word.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from rollouts.environments.protocol import EnvironmentConfig, EnvironmentStep
from rollouts.errors import DataError
from rollouts.types import Prompt

Cell: TypeAlias = tuple[int, int]
"""Column and row, from 0 at the upper left."""

MOVES = MappingProxyType({"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)})
WORDS = MappingProxyType({"up": "u", "down": "d", "left": "l", "right": "r"})

RULES = (
    "You walk on a grid. You are told your column and row and those of the goal, counted from 0 at the upper left, as in 12>33. "
    "Answer with one word: up, down, left or right."
)
"""Rules for a model that can read; pass them as GridWorld(rules=RULES)."""


@dataclass(frozen=True, kw_only=True)
class GridWorldConfig(EnvironmentConfig):
    """A map and its rules. `parameters` may have "start" and "goal", each [column, row]; otherwise they are drawn from the seed."""

    size: int = 4  # cells in a row and in a column, 2 to 10
    max_steps: int = 12  # actions after which the episode ends without reward
    num_holes: int = 0  # cells that end the episode without reward; the map is drawn from layout_seed, and every cell can be reached
    layout_seed: int = 0  # equal for the whole data set, so that a policy that does not see the holes can learn their places
    step_reward: float = 0.0  # reward of every action that does not reach the goal; below 0 to encourage short ways
    goal_reward: float = 1.0  # reward of the action that reaches the goal

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 10:
            raise DataError(f"size is {self.size}, expected 2 to 10: cells are written as two digits")
        if self.max_steps < 1:
            raise DataError(f"max_steps is {self.max_steps}, expected at least 1")
        if not 0 <= self.num_holes <= self.size:
            raise DataError(f"num_holes is {self.num_holes}, expected 0 to size = {self.size}")


class GridWorld:
    """The grid world as an environment. A text without a move changes nothing, and costs a step."""

    def __init__(self, config: GridWorldConfig | None = None, *, rules: str = "") -> None:
        """
        Args:
            config: map of episodes reset with a plain EnvironmentConfig, whose seed and parameters count; default GridWorldConfig().
            rules: text of get_prompt_prefix; "" for a model that learns them from rewards.
        """
        self._default = GridWorldConfig() if config is None else config
        self._rules = rules
        self._config = self._default
        self._holes: frozenset[Cell] = frozenset()
        self._cell: Cell = (0, 0)
        self._goal: Cell = (0, 0)
        self._num_steps = 0

    def reset(self, config: EnvironmentConfig) -> str:
        """Begin an episode and return the first observation. Raises DataError for a start or goal that is no free cell."""
        self._config = config if isinstance(config, GridWorldConfig) else self._default
        self._holes = draw_holes(self._config)
        start, goal = draw_ends(self._config, config.seed)
        self._cell = _parse_cell(config.parameters.get("start", start), "start", self._config, self._holes)
        self._goal = _parse_cell(config.parameters.get("goal", goal), "goal", self._config, self._holes)
        self._num_steps = 0
        return show_cells(self._cell, self._goal)

    def step(self, action: str) -> EnvironmentStep:
        """Carry out a move. info: "policy_error" if the text had no move; "outcome" at the end: goal, hole or max_steps."""
        letter = parse_move(action)
        info: dict[str, Any] = {} if letter else {"policy_error": f"{action!r:.100} names no move"}
        self._num_steps += 1
        if letter is not None:
            self._cell = move(self._cell, letter, self._config.size)
        outcome = self._find_outcome()
        if outcome is not None:
            info["outcome"] = outcome
        reward = self._config.goal_reward if outcome == "goal" else self._config.step_reward
        return EnvironmentStep(show_cells(self._cell, self._goal), reward, outcome is not None, info)

    def get_state_description(self) -> str:
        """Return a map: @ is here, G the goal, O a hole."""
        marks = {**dict.fromkeys(self._holes, "O"), self._goal: "G", self._cell: "@"}
        size = self._config.size
        return "\n".join("".join(marks.get((column, row), ".") for column in range(size)) for row in range(size))

    def get_prompt_prefix(self) -> str:
        """Return the rules, "" if there are none."""
        return self._rules

    def _find_outcome(self) -> str | None:
        if self._cell == self._goal:
            return "goal"
        if self._cell in self._holes:
            return "hole"
        return "max_steps" if self._num_steps >= self._config.max_steps else None


def show_cells(cell: Cell, goal: Cell) -> str:
    """Return the observation of a cell and a goal."""
    return f"{cell[0]}{cell[1]}>{goal[0]}{goal[1]}"


def parse_move(text: str) -> str | None:
    """Return the last move in a text, as a letter of udlr; None if there is none."""
    found = re.findall(r"\b(up|down|left|right|[udlr])\b", text.lower())
    return WORDS.get(found[-1], found[-1]) if found else None


def move(cell: Cell, letter: str, size: int) -> Cell:
    """Return the next cell; the edge of the grid stops a move."""
    dx, dy = MOVES[letter]
    return min(max(cell[0] + dx, 0), size - 1), min(max(cell[1] + dy, 0), size - 1)


def list_cells(size: int, holes: frozenset[Cell] = frozenset()) -> list[Cell]:
    """Return the cells that are no holes, column by column."""
    return [(column, row) for column in range(size) for row in range(size) if (column, row) not in holes]


def draw_holes(config: GridWorldConfig) -> frozenset[Cell]:
    """Draw the holes of a map, such that every other cell can be reached from every other."""
    cells = list_cells(config.size)
    generator = random.Random(config.layout_seed)
    while True:
        holes = frozenset(generator.sample(cells, config.num_holes))
        free = list_cells(config.size, holes)
        if len(_measure_distances(free[0], config.size, holes)) == len(free):
            return holes


def draw_ends(config: GridWorldConfig, seed: int) -> tuple[Cell, Cell]:
    """Draw start and goal of an episode: two different free cells."""
    start, goal = random.Random(seed).sample(list_cells(config.size, draw_holes(config)), 2)
    return start, goal


def find_way(start: Cell, goal: Cell, config: GridWorldConfig | None = None) -> str:
    """Return the letters of a shortest way, "" at the goal; the first in the order udlr among equally short ones."""
    config = GridWorldConfig() if config is None else config
    holes = draw_holes(config)
    distances = _measure_distances(goal, config.size, holes)
    cell, letters = start, ""
    while cell != goal:
        letter = min(MOVES, key=lambda m: distances.get(move(cell, m, config.size), config.size**2))
        cell, letters = move(cell, letter, config.size), letters + letter
    return letters


def choose_expert_move(observation: str, config: GridWorldConfig | None = None) -> str:
    """Return an expert's move for an observation: the first of find_way."""
    here, there = observation.split(">")
    return find_way((int(here[0]), int(here[1])), (int(there[0]), int(there[1])), config)[:1]


def choose_noisy_move(observation: str, generator: random.Random, *, wrong_share: float, config: GridWorldConfig | None = None) -> str:
    """Return the expert's move, or with probability wrong_share a random one: for demonstrations that leave something to learn."""
    if generator.random() < wrong_share:
        return generator.choice("udlr")
    return choose_expert_move(observation, config)


def create_grid_world_prompts(seed: int, num: int, config: GridWorldConfig | None = None, *, content: str = "") -> tuple[Prompt, ...]:
    """Create prompts with different pairs of start and goal, in an order that is a function of the seed.

    Args:
        num: number of prompts, at most that of the pairs: 240 for a map of 4 x 4 without holes.
        content: text of each prompt, before the first observation.

    Returns: prompts with metadata start, goal, and ground_truth: the number of moves of a shortest way, as text.
    Raises: DataError if there are fewer pairs.
    """
    config = GridWorldConfig() if config is None else config
    free = list_cells(config.size, draw_holes(config))
    pairs = [(start, goal) for start in free for goal in free if start != goal]
    if not 0 <= num <= len(pairs):
        raise DataError(f"{num} prompts asked for, but this grid has {len(pairs)} pairs of start and goal: ask for fewer, or raise size")
    chosen = random.Random(seed).sample(pairs, num)
    return tuple(
        Prompt(
            content=content,
            index=i,
            metadata={"start": list(start), "goal": list(goal), "ground_truth": str(len(find_way(start, goal, config)))},
        )
        for i, (start, goal) in enumerate(chosen)
    )


def _measure_distances(origin: Cell, size: int, holes: frozenset[Cell]) -> Mapping[Cell, int]:
    """Return the number of moves from the origin to each cell that can be reached without falling into a hole."""
    distances = {origin: 0}
    queue = deque([origin])
    while queue:
        cell = queue.popleft()
        for letter in MOVES:
            neighbor = move(cell, letter, size)
            if neighbor not in distances and neighbor not in holes:
                distances[neighbor] = distances[cell] + 1
                queue.append(neighbor)
    return distances


def _parse_cell(value: Any, name: str, config: GridWorldConfig, holes: frozenset[Cell]) -> Cell:
    numbers = tuple(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else ()
    if len(numbers) != 2 or not all(isinstance(x, int) and 0 <= x < config.size for x in numbers) or numbers in holes:
        raise DataError(f"{name} is {value!r:.100}, expected [column, row] of a cell that is no hole, each from 0 to {config.size - 1}")
    return numbers[0], numbers[1]
