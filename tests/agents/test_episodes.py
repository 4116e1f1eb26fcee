"""Episodes: what ends them, what goes wrong in them, and groups of them. No model: engines answer from scripts."""

from __future__ import annotations

import logging
import math
import random
from typing import ClassVar

import numpy as np
import pytest
import trio
from chat_templates import CHATML, QWEN3, create_tokenizer, encode

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import ActionRequest, AgentAction, EngineAgentPolicy, ScriptedAgentPolicy
from rollouts.agents.run import create_episode_generate_fn, create_policy_generate_fn, run_episode, run_episode_group
from rollouts.agents.setting import EpisodeSetting, observation_key
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RolloutConfig
from rollouts.data.prompts import DataBuffer
from rollouts.data.samples import mask_truncated, sample_messages
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import (
    ConfigError,
    DataError,
    EngineContextError,
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EnvironmentFault,
    EpisodeInterrupted,
    ToolFault,
    raise_single_errors,
)
from rollouts.generation.contract import is_finished
from rollouts.generation.manager import AsyncRolloutManager
from rollouts.outcomes import Failure, StopReason
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine, random_answer, script_answer
from rollouts.training.summaries import summarize_episodes
from rollouts.types import Message, Prompt, SamplingParams, Status

TOKENIZER = create_char_tokenizer()
EMPTY = Prompt(content="", index=5, metadata={"ground_truth": 7})
PARAMS = SamplingParams(max_tokens=8)


class Countdown:
    """Ends after so many steps; shows its seed. Remembers what was done to it."""

    made: ClassVar[list] = []

    def __init__(self, steps=3, reward=0.5, **faults):
        self.left, self.reward, self.faults, self.actions, self.closed = steps, reward, faults, [], False
        self.made.append(self)

    def reset(self, config: EnvironmentConfig):
        self.config = config
        if "reset" in self.faults:
            raise ValueError(self.faults["reset"])
        return f"seed {config.seed % 100}."

    def step(self, action):
        self.actions.append(action)
        self.left -= 1
        if "step" in self.faults and len(self.actions) == 2:
            fault = self.faults["step"]
            if isinstance(fault, Exception):
                raise fault
            return fault
        return f"{self.left} left.", self.reward, self.left <= 0, {"name": f"step{len(self.actions)}"}

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return "count."

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def forget_environments():
    Countdown.made = []


def say(text, end=True):
    """An engine that always says this."""
    return FakeEngine(lambda prompt, seed: (*TOKENIZER(text)["input_ids"], *([1] if end else [])))


def policy_of(engine, params=PARAMS, **kwargs):
    return EngineAgentPolicy(engine, TOKENIZER, params, **kwargs)


async def test_an_episode_becomes_one_sample():
    engine = say("go")
    episode = await run_episode(policy_of(engine), Countdown, EMPTY, EpisodeConfig(), seed=3, sample_number=1)
    sample = episode.sample
    seed = derive_seed(3, 5)
    shown = (
        f"user: count.\nseed {seed % 100}.\nassistant: go<|eos|>\nuser: 2 left.\nassistant: go<|eos|>\nuser: 1 left.\nassistant: go<|eos|>"
    )
    assert TOKENIZER.decode(sample.tokens) == shown
    assert [TOKENIZER.decode(sample.tokens[turn.start : turn.end]) for turn in sample.turns] == ["go<|eos|>"] * 3
    assert sum(sample.loss_mask) == 9
    assert sample.rollout_log_probs == tuple(-0.5 * mask for mask in sample.loss_mask)
    assert sample.weight_versions == tuple(0 if mask else -1 for mask in sample.loss_mask)
    assert (sample.status, sample.reward, sample.index, sample.group_index) == (Status.COMPLETED, 1.5, 11, 5)
    assert [turn.reward for turn in sample.turns] == [0.5] * 3
    assert [turn.state for turn in sample.turns] == [observation_key(text) for text in (f"seed {seed % 100}.", "2 left.", "1 left.")]
    assert sample.response == "go\ngo\ngo"
    assert sample.metadata == EMPTY.metadata, "the library writes nothing into the user's metadata"
    assert sample.episode == episode.outcome
    assert (episode.stop_reason, sample.episode.num_turns, episode.total_reward, episode.failure) == (StopReason.DONE, 3, 1.5, None)
    assert sample_messages(sample) == episode.messages
    assert episode.messages[-1] == Message(role="user", content="0 left."), "the last word of the environment is for rewards and people"
    (environment,) = Countdown.made
    assert environment.config == EnvironmentConfig(seed=seed, parameters=EMPTY.metadata)
    assert environment.actions == ["go"] * 3
    assert environment.closed
    assert [call.arguments["request_id"] for call in engine.calls] == [f"000000000005-0001-{k:04d}" for k in range(3)]
    assert [call.arguments["params"].seed for call in engine.calls] == [derive_seed(3, 5, 1, k) for k in range(3)]


async def test_steps_say_what_was_seen_done_and_paid():
    episode = await run_episode(policy_of(say("go")), Countdown, EMPTY, seed=3)
    steps = episode.steps
    assert [step.observation_data for step in steps[1:]] == ["2 left.", "1 left."]
    assert [(step.action_taken, step.raw_policy_output, step.base_reward) for step in steps] == [("go", "go", 0.5)] * 3
    assert [step.is_done for step in steps] == [False, False, True]
    assert [step.step_info["name"] for step in steps] == ["step1", "step2", "step3"]
    assert [len(step.resulting_messages_history) for step in steps] == [3, 5, 7]
    assert steps[0].policy_tokens == (*TOKENIZER("go")["input_ids"], 1)
    assert steps[0].policy_logprobs == (-0.5,) * 3
    assert episode.trajectory.rewards == (0.5, 0.5, 0.5)
    assert [step.info["name"] for step in episode.sample.episode.steps] == ["step1", "step2", "step3"]


STOPS = [
    (EpisodeConfig(), {}, "go", True, StopReason.DONE, 3, Status.COMPLETED),
    (EpisodeConfig(), {"wants_stop": lambda text: text == "bye"}, "bye", True, StopReason.AGENT, 1, Status.COMPLETED),
    (EpisodeConfig(stop_regex=r"fin\w+"), {}, "a finish", True, StopReason.REGEX, 1, Status.COMPLETED),
    (EpisodeConfig(max_turns=2), {}, "go", True, StopReason.MAX_TURNS, 2, Status.TRUNCATED),
    (EpisodeConfig(max_tokens=5), {}, "go", True, StopReason.MAX_TOKENS, 2, Status.TRUNCATED),
    (EpisodeConfig(max_context=60), {}, "go", True, StopReason.CONTEXT, 1, Status.TRUNCATED),
    (EpisodeConfig(max_turns=3), {}, "go", True, StopReason.DONE, 3, Status.COMPLETED),
]


async def test_wants_stop_answers_with_true_or_false():
    async def later(text: str) -> bool:
        return False

    for wants_stop, found in ((later, "later returned <coroutine .*it is async"), (lambda text: "no", "<lambda> returned 'no'")):
        with pytest.raises(DataError, match=f"wants_stop {found}"):
            await run_episode(policy_of(say("go", True), wants_stop=wants_stop), Countdown, EMPTY)


@pytest.mark.parametrize(("config", "options", "text", "end", "reason", "num_turns", "status"), STOPS)
async def test_every_end_is_recorded(config, options, text, end, reason, num_turns, status):
    episode = await run_episode(policy_of(say(text, end), **options), Countdown, EMPTY, config)
    assert (episode.stop_reason, len(episode.steps), episode.sample.status) == (reason, num_turns, status)
    assert episode.sample.episode.stop_reason == reason.value
    assert episode.sample.reward == 0.5 * num_turns, "the last action was carried out and paid"
    assert sum(episode.sample.loss_mask[-1:]) == 1, "nothing stands behind the last action"
    assert len(episode.messages) == 1 + 2 * num_turns
    assert Countdown.made[0].closed


async def test_budgets_of_turns_episode_and_context_cut_the_next_action():
    asked = []

    async def play(config, params=PARAMS):
        engine = say("0123456789", end=False)
        episode = await run_episode(policy_of(engine, params), lambda: Countdown(steps=9), EMPTY, config)
        asked.append([call.arguments["params"].max_tokens for call in engine.calls])
        return episode

    episode = await play(EpisodeConfig(max_turn_tokens=3, max_tokens=8))
    assert (asked.pop(), episode.stop_reason) == ([3, 3, 2], StopReason.MAX_TOKENS)
    assert [turn.end - turn.start for turn in episode.sample.turns] == [3, 3, 2]
    assert TOKENIZER.decode(episode.sample.tokens).count("012<|eos|>\nuser: ") == 2, "the ending of a cut answer is written, masked"
    assert sum(episode.sample.loss_mask) == 8
    opening = episode.sample.turns[0].start
    episode = await play(EpisodeConfig(max_context=opening + 5))
    assert (asked.pop(), episode.stop_reason, episode.sample.status) == ([5], StopReason.CONTEXT, Status.TRUNCATED)
    assert len(episode.sample.tokens) == opening + 5
    assert episode.messages[-1].content == "8 left.", "what did not fit is known to rewards"


@pytest.mark.parametrize(("config", "status"), [({}, Status.COMPLETED), ({"cut_is_truncated": True}, Status.TRUNCATED)])
async def test_an_episode_whose_last_answer_was_cut_is_truncated_where_that_is_said(config, status):
    engine = say("0123456789", end=False)
    episode = await run_episode(policy_of(engine, SamplingParams(max_tokens=4)), lambda: Countdown(steps=2), EMPTY, EpisodeConfig(**config))
    sample = episode.sample
    assert (episode.stop_reason, sample.status, sample.episode.num_cut_actions) == (StopReason.DONE, status, 2)
    assert sum(mask_truncated(sample).loss_mask) == (8 if status is Status.COMPLETED else 0)
    assert summarize_episodes([sample])["num_cut_actions"] == 2.0


async def test_an_answer_that_was_cut_before_the_last_one_does_not_truncate_its_episode():
    engine = FakeEngine(
        lambda prompt, seed: TOKENIZER("on and on" if TOKENIZER.decode(prompt).count("assistant") == 1 else "go")["input_ids"]
    )
    policy, config = policy_of(engine, SamplingParams(max_tokens=4)), EpisodeConfig(cut_is_truncated=True)
    sample = (await run_episode(policy, lambda: Countdown(steps=2), EMPTY, config)).sample
    assert (sample.status, sample.episode.num_cut_actions) == (Status.COMPLETED, 1)
    assert summarize_episodes([(await run_episode(policy_of(say("go")), Countdown, EMPTY)).sample]).get("num_cut_actions") is None


class SmallEngine(FakeEngine):
    """Has a context of so many tokens, as engines do."""

    def __init__(self, size, answer):
        super().__init__(lambda prompt, seed: (*TOKENIZER(answer)["input_ids"], 1))
        self.size = size

    async def generate(self, prompt_tokens, params, *, request_id=None):
        if len(prompt_tokens) >= self.size:
            raise EngineContextError(f"{len(prompt_tokens)} tokens do not fit into {self.size}")
        params = params.new(max_tokens=min(params.max_tokens, self.size - len(prompt_tokens)))
        return await super().generate(prompt_tokens, params, request_id=request_id)


@pytest.mark.parametrize(("size", "num_turns", "error"), [(60, 1, True), (36, 1, True), (35, 1, False), (64, 2, False), (65, 2, True)])
async def test_the_end_of_the_engines_context_is_an_end_like_others(size, num_turns, error):
    episode = await run_episode(policy_of(SmallEngine(size, "go")), Countdown, EMPTY, EpisodeConfig())
    assert (episode.stop_reason, len(episode.steps), episode.sample.status) == (StopReason.CONTEXT, num_turns, Status.TRUNCATED)
    assert ("do not fit" in (episode.error or "")) == error
    assert episode.failure is None
    assert [step.is_done for step in episode.steps] == [False] * (num_turns - 1) + [True]
    with pytest.raises(EngineContextError, match="do not fit into 10"):
        await run_episode(policy_of(SmallEngine(10, "go")), Countdown, EMPTY, EpisodeConfig())


async def test_a_request_that_an_engine_refuses_for_another_reason_is_no_end_of_the_context():
    class Refusing(FakeEngine):
        async def generate(self, prompt_tokens, params, *, request_id=None):
            if self.requests:
                raise EngineRequestError("token 99 is outside the vocabulary of 64")
            self.requests.append(prompt_tokens)
            return await super().generate(prompt_tokens, params, request_id=request_id)

        def __init__(self):
            super().__init__(lambda prompt, seed: (*TOKENIZER("go")["input_ids"], 1))
            self.requests = []

    for on_error in ("raise", "retry"):
        with pytest.raises(EngineRequestError, match="outside the vocabulary"):
            await run_episode(policy_of(Refusing()), Countdown, EMPTY, EpisodeConfig(on_error=on_error))
    episode = await run_episode(policy_of(Refusing()), Countdown, EMPTY, EpisodeConfig(on_error="drop"))
    assert (episode.stop_reason, episode.failure, episode.sample.status) == (StopReason.ERROR, Failure.DATA, Status.FAILED)
    assert len(episode.steps) == 1


FAULTS = [
    ({"reset": "no map"}, "Countdown.reset raised ValueError.*no map"),
    ({"step": ValueError("lava")}, "Countdown.step raised ValueError.*lava"),
    ({"step": ("seen", 1.0, True)}, "3 values"),
    ({"step": ("seen", math.nan, True, {})}, "the reward is nan"),
    ({"step": ("seen", 1.0, "yes", {})}, "done is 'yes'"),
    ({"step": ("seen", 1.0, True, {"x": {1}})}, "info"),
    ({"step": ToolFault("the calculator is down")}, "the calculator is down"),
]


@pytest.mark.parametrize(("faults", "message"), FAULTS)
async def test_a_fault_of_the_environment_is_raised_retried_or_drops_the_sample(faults, message, caplog):
    def broken():
        return Countdown(**faults)

    with pytest.raises((EnvironmentFault, ToolFault), match=message):
        await run_episode(policy_of(say("go")), broken, EMPTY, EpisodeConfig())
    with pytest.raises((EnvironmentFault, ToolFault), match=message):
        await run_episode(policy_of(say("go")), broken, EMPTY, EpisodeConfig(on_error="retry", max_retries=3))
    assert len(Countdown.made) == 1 + 4
    episode = await run_episode(policy_of(say("go")), broken, EMPTY, EpisodeConfig(on_error="drop"))
    assert (episode.stop_reason, episode.failure, episode.sample.status) == (StopReason.ERROR, Failure.INFRASTRUCTURE, Status.FAILED)
    assert episode.sample.reward is None
    assert episode.sample.episode.failure == "infrastructure"
    assert episode.error is not None
    assert episode.sample.episode.error == episode.error
    assert len(episode.steps) == (0 if "reset" in faults else 1)
    assert all(environment.closed for environment in Countdown.made)
    assert "sample 5 (group 5) failed (infrastructure)" in caplog.text


async def test_a_fault_that_passes_is_no_more_than_another_attempt():
    def flaky():
        return Countdown(**({"step": ValueError("once")} if len(Countdown.made) == 0 else {}))

    whole = await run_episode(policy_of(say("go")), Countdown, EMPTY)
    Countdown.made.clear()
    episode = await run_episode(policy_of(say("go")), flaky, EMPTY, EpisodeConfig(on_error="retry"))
    assert episode.sample == whole.sample
    assert len(Countdown.made) == 2
    assert (whole.num_retries, episode.num_retries) == (0, 1)


async def test_attempts_that_failed_are_in_the_metrics():
    def flaky():
        return Countdown(**({"step": ValueError("once")} if len(Countdown.made) in (0, 2) else {}))

    generate_fn = create_episode_generate_fn([say("go")], TOKENIZER, PARAMS, flaky, EpisodeConfig(on_error="retry"))
    config = RolloutConfig(batch_size=2, n_samples_per_prompt=2, generate_fn=generate_fn)
    batch = await AsyncRolloutManager(DataBuffer(None), config, engines=[]).generate_batch()
    assert batch.metadata["num_episodes_retried"] == 2
    assert generate_fn.take_counts() == dict.fromkeys(
        ("num_episodes_failed_infrastructure", "num_episodes_failed_data", "num_episodes_retried"), 0
    )


class Deck(Countdown):
    """Plays with the cards of its prompt."""

    def reset(self, config: EnvironmentConfig):
        self.cards = config.parameters["decks"]["mine"]
        return f"{self.cards.pop()} of {config.parameters['ground_truth']}."


async def test_an_environment_that_changes_its_parameters_changes_no_other_episode():
    prompt = Prompt(content="", metadata={"ground_truth": 7, "decks": {"mine": [1, 2, 3, 4]}})
    setting = EpisodeSetting(
        environment_factory=Deck,
        create_environment_config=lambda prompt, seed: EnvironmentConfig(seed=seed, parameters=prompt.metadata),
    )
    groups = [
        await run_episode_group(policy_of(say("go")), Deck, prompt, 2),
        await run_episode_group(policy_of(say("go")), setting, prompt, 2),
    ]
    assert [episode.steps[0].observation_data for group in groups for episode in group] == ["4 of 7."] * 4
    assert prompt.metadata["decks"] == {"mine": [1, 2, 3, 4]}
    assert all(episode.sample.metadata["decks"] == {"mine": [1, 2, 3, 4]} for group in groups for episode in group)


async def test_metadata_that_cannot_be_copied_are_a_failure_of_the_data():
    prompt = Prompt(content="", index=3, metadata={"answers": (k for k in range(3))})
    with pytest.raises(DataError, match=r"prompt with index 3 cannot be copied .*generator"):
        await run_episode(policy_of(say("go")), Countdown, prompt)


class Board(Countdown):
    """Shows its own list, which it changes in place."""

    def reset(self, config: EnvironmentConfig):
        self.board, self.info = [0, 0], {"moves": []}
        return self.board

    def step(self, action):
        self.board[self.board.index(0)] = 1
        self.info["moves"].append(action)
        return self.board, 0.5, all(self.board), self.info


async def test_states_of_an_environment_that_shows_its_own_list_are_those_that_were_seen():
    episode = await run_episode(policy_of(say("go")), Board, EMPTY)
    assert [step.observation_data for step in episode.steps] == [[0, 0], [1, 0]]
    assert [turn.state for turn in episode.sample.turns] == [observation_key(board) for board in ([0, 0], [1, 0])]
    assert [step.info for step in episode.sample.episode.steps] == [{"moves": ["go"]}, {"moves": ["go", "go"]}]


async def test_an_action_that_an_environment_changes_is_noted_as_it_was_taken():
    class Pops(Countdown):
        def step(self, action):
            return action.pop(), 0.5, True, {}

    policy = ScriptedAgentPolicy(lambda request: AgentAction(text="1 2", parsed=[1, 2]))
    episode = await run_episode(policy, Pops, EMPTY)
    assert episode.steps[0].action_taken == [1, 2]


def raise_key_error(observation):
    raise KeyError("map")


@pytest.mark.parametrize(
    ("state_key", "message"), [(raise_key_error, "state_key .* raised KeyError .*map"), (len, r"state_key .* gave \d+ \(int\)")]
)
async def test_a_state_key_that_fails_is_a_failure_of_the_data(state_key, message):
    for on_error in ("raise", "drop"):
        setting = EpisodeSetting(environment_factory=Countdown, config=EpisodeConfig(on_error=on_error), state_key=state_key)
        if on_error == "raise":
            with pytest.raises(DataError, match=message):
                await run_episode(policy_of(say("go")), setting, EMPTY)
        else:
            episode = await run_episode(policy_of(say("go")), setting, EMPTY)
            assert (episode.failure, episode.sample.status) == (Failure.DATA, Status.FAILED)


@pytest.mark.parametrize("field", ["parsed", "metadata"])
async def test_an_action_that_no_file_can_hold_is_refused_by_the_name_of_its_field(field):
    value = {"move": np.int64(3)}
    policy = ScriptedAgentPolicy(lambda request: AgentAction(text="3", **{field: value}))
    with pytest.raises(DataError, match=rf"ScriptedAgentPolicy .* {field}\['move'\] is .*int64.*JSON values"):
        await run_episode(policy, Countdown, EMPTY)


class Over(Countdown):
    done = True


BAD_DATA = [
    (Countdown, EMPTY, EpisodeConfig(max_context=8), "leaves no room in max_context, 8"),
    (Over, EMPTY, EpisodeConfig(), "done before the first action"),
]


@pytest.mark.parametrize(("factory", "prompt", "config", "message"), BAD_DATA)
async def test_what_nothing_can_be_generated_from_is_a_failure_of_the_data(factory, prompt, config, message):
    with pytest.raises(DataError, match=message):
        await run_episode(policy_of(say("go")), factory, prompt, config)
    dropping = EpisodeConfig(on_error="drop", max_context=config.max_context)
    episode = await run_episode(policy_of(say("go")), factory, prompt, dropping)
    assert (episode.stop_reason, episode.failure, episode.sample.status) == (StopReason.ERROR, Failure.DATA, Status.FAILED)
    assert len(Countdown.made) == 2
    with pytest.raises(DataError, match=message):
        await run_episode(policy_of(say("go")), factory, prompt, EpisodeConfig(on_error="retry", max_context=config.max_context))
    assert len(Countdown.made) == 3, "another attempt would come to the same"


async def test_what_the_engine_raises_is_not_the_episodes_to_judge():
    engine = FakeEngine(error_for=lambda prompt, seed: EngineError("down"))
    for policy in ("raise", "retry", "drop"):
        with pytest.raises(EngineError, match="down"):
            await run_episode(policy_of(engine), Countdown, EMPTY, EpisodeConfig(on_error=policy))
    assert len(Countdown.made) == 3
    assert all(environment.closed for environment in Countdown.made)


async def test_a_policy_failure_is_a_whole_episode():
    class Strict(Countdown):
        def step(self, action):
            seen, reward, done, _ = super().step(action)
            return seen, reward, done, {"policy_error": f"{action} is no move"}

    episode = await run_episode(policy_of(say("jump")), Strict, EMPTY, EpisodeConfig(on_error="raise"))
    assert (episode.failure, episode.stop_reason, episode.sample.status) == (Failure.POLICY, StopReason.DONE, Status.COMPLETED)
    assert episode.sample.episode.failure == "policy"
    assert episode.sample.reward == 1.5


# -- groups


class Slow(Countdown):
    """The first to be made takes longest."""

    def __init__(self):
        super().__init__()
        self.delay = 10.0 - len(self.made)

    async def step(self, action):
        await trio.sleep(self.delay)
        return super().step(action)


async def test_a_group_begins_in_one_state_runs_in_parallel_and_keeps_its_order(autojump_clock):
    policy = policy_of(FakeEngine(random_answer(mean_length=3)))
    episodes = await run_episode_group(policy, Slow, EMPTY, 4, EpisodeConfig(), seed=1)
    assert trio.current_time() == 3 * 9.0, "as long as the slowest of them"
    samples = [episode.sample for episode in episodes]
    assert [(sample.index, sample.group_index) for sample in samples] == [(20 + k, 5) for k in range(4)]
    first = {sample.turns[0].state for sample in samples}
    assert len(first) == 1
    assert len({sample.tokens for sample in samples}) == 4
    assert len(Countdown.made) == 4
    for k, sample in enumerate(samples):
        alone = await run_episode(policy, Slow, EMPTY, EpisodeConfig(), seed=1, sample_number=k)
        assert alone.sample.tokens == sample.tokens, "what else runs does not matter"


async def test_other_prompts_and_seeds_begin_elsewhere():
    states = set()
    for index, seed in ((0, 0), (1, 0), (0, 1)):
        episodes = await run_episode_group(policy_of(say("x")), Countdown, Prompt(content="", index=index), 2, EpisodeConfig(), seed=seed)
        (state,) = {episode.sample.turns[0].state for episode in episodes}
        states.add(state)
    assert len(states) == 3


async def test_the_rest_of_a_group_and_a_batch_is_unharmed_by_a_failed_episode():
    def sometimes():
        return Countdown(**({"step": ValueError("lava")} if len(Countdown.made) == 2 else {}))

    generate_fn = create_episode_generate_fn([say("go")], TOKENIZER, PARAMS, sometimes, EpisodeConfig(on_error="drop"))
    group = await generate_fn(Prompt(content="", index=0), 4)
    assert [sample.status for sample in group].count(Status.FAILED) == 1
    assert all(sample.reward == 1.5 for sample in group if sample.status is Status.COMPLETED)
    Countdown.made.clear()
    config = RolloutConfig(batch_size=3, n_samples_per_prompt=2, generate_fn=generate_fn)
    batch = await AsyncRolloutManager(DataBuffer(None), config, engines=[]).generate_batch()
    assert batch.metadata["num_groups_dropped"] == 1
    assert len(batch.samples) == 6
    assert {sample.status for sample in batch.samples} == {Status.COMPLETED}


async def test_greedy_baselines_act_greedily():
    engine = say("go")
    generate_fn = create_episode_generate_fn([engine], TOKENIZER, PARAMS, Countdown, num_greedy=1)
    group = await generate_fn(Prompt(content="", index=0), 2)
    assert [sample.trainable for sample in group] == [True, True, False]
    greedy = [call.arguments["params"].greedy for call in engine.calls]
    assert sum(greedy) == 3
    assert len(greedy) == 9


async def test_an_interrupted_episode_is_begun_anew_and_becomes_what_it_would_have_been(autojump_clock):
    def create(delay):
        engine = FakeEngine(random_answer(mean_length=3), seconds_per_token=lambda prompt, seed: delay * (1 + seed % 3))
        return engine, create_episode_generate_fn([engine], TOKENIZER, PARAMS, Countdown, seed=2)

    prompt = Prompt(content="", index=4)
    _, undisturbed = create(0.0)
    expected = await undisturbed(prompt, 3)
    engine, generate_fn = create(1.0)
    results = []
    async with trio.open_nursery() as nursery:

        async def run():
            results.append(await generate_fn(prompt, 3))

        nursery.start_soon(run)
        await trio.sleep(17.5)
        while not results:
            await engine.abort()
            await trio.sleep(0.1)
    (group,) = results
    assert not is_finished(group)
    assert {sample.status for sample in group} <= {Status.PENDING, Status.COMPLETED}
    num_done = sum(sample.status is Status.COMPLETED for sample in group)
    assert 0 < num_done < 3, "some had ended, and stay as they are"
    engine.calls.clear()
    again = await generate_fn(prompt, 3, group)
    assert again == expected
    asked = {call.arguments["request_id"][:17] for call in engine.calls if call.method == "generate"}
    assert len(asked) == 3 - num_done


async def test_an_interruption_of_a_single_episode_is_raised(autojump_clock):
    engine = FakeEngine(random_answer(), seconds_per_token=1.0)
    with pytest.raises(EpisodeInterrupted, match="aborted after"), raise_single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_episode, policy_of(engine), Countdown, EMPTY)
            await trio.sleep(1.5)
            await engine.abort()
    assert Countdown.made[0].closed


def test_generate_functions_need_engines():
    with pytest.raises(ConfigError, match="found 0"):
        create_episode_generate_fn([], TOKENIZER, PARAMS, Countdown)


# -- how conversations begin


async def opening_of(prompt, config=None, observation="see.", prefix="rules."):
    class Told(Countdown):
        def reset(self, config):
            return observation

        def get_prompt_prefix(self):
            return prefix

        def get_state_description(self):
            return "described."

    episode = await run_episode(policy_of(say("x")), Told, prompt, config or EpisodeConfig(max_turns=1))
    return [(message.role, message.content) for message in episode.messages[:-2]], TOKENIZER.decode(
        episode.sample.tokens[: episode.sample.turns[0].start]
    )


async def test_prefix_prompt_and_observation_become_the_last_message_of_the_user():
    chat = (Message(role="system", content="sys."), Message(role="user", content="q."))
    messages, _ = await opening_of(Prompt(content=chat))
    assert messages == [("system", "sys."), ("user", "rules.\nq.\nsee.")]
    messages, text = await opening_of(Prompt(content=""), EpisodeConfig(max_turns=1, system_prompt="be kind."))
    assert messages == [("system", "be kind."), ("user", "rules.\nsee.")]
    assert text == "system: be kind.\nuser: rules.\nsee.\nassistant: "
    messages, text = await opening_of(Prompt(content="q."))
    assert (messages, text) == ([("user", "rules.\nq.\nsee.")], "rules.\nq.\nsee."), "a text stays text"
    _, text = await opening_of(Prompt(content="q."), EpisodeConfig(max_turns=1, chat=True))
    assert text == "user: rules.\nq.\nsee.\nassistant: "
    _, text = await opening_of(Prompt(content=chat), EpisodeConfig(max_turns=1, chat=False, separator=" / "))
    assert text == "sys. / rules. / q. / see."


async def test_observations_that_are_no_text_are_described_and_messages_come_as_they_are():
    messages, _ = await opening_of(Prompt(content=()), observation={"x": 1})
    assert messages == [("user", "rules.\ndescribed.")]
    told = (Message(role="system", content="sys."), Message(role="user", content="q."))
    messages, _ = await opening_of(Prompt(content=()), observation=told)
    assert messages == [("system", "sys."), ("user", "rules.\nq.")]
    with pytest.raises(DataError, match="nothing that the model could be shown"):
        await opening_of(Prompt(content=""), observation="", prefix="")


@pytest.mark.parametrize("method", ["get_prompt_prefix", "get_state_description"])
async def test_descriptions_that_fail_are_faults_of_the_environment(method):
    class Mute(Countdown):
        def reset(self, config):
            return [1, 2]

    def fail(self):
        raise KeyError("gone")

    for replacement, message in ((fail, "raised KeyError"), (lambda self: None, "returned None")):
        setattr(Mute, method, replacement)
        with pytest.raises(EnvironmentFault, match=f"Mute.{method} {message}"):
            await run_episode(policy_of(say("x")), Mute, EMPTY)


def test_equal_observations_have_equal_keys():
    assert observation_key({"a": 1, "b": [2, 3]}) == observation_key({"b": (2, 3), "a": 1})
    keys = [observation_key(x) for x in ("1", 1, [1], {"1": 1}, None, Message(role="user", content="1"), "2")]
    assert len(set(keys)) == len(keys)


# -- policies


async def test_a_scripted_policy_needs_no_tokens():
    policy = ScriptedAgentPolicy(["a", "b"])
    episode = await run_episode(policy, Countdown, EMPTY, EpisodeConfig())
    assert Countdown.made[0].actions == ["a", "b", "b"]
    assert (episode.sample.tokens, episode.sample.reward, episode.sample.status) == ((), 1.5, Status.COMPLETED)
    assert episode.sample.response == "a\nb\nb"
    assert episode.steps[0].policy_tokens is None


async def test_a_policy_sees_the_conversation_and_may_give_parsed_actions_and_values():
    seen = []

    def script(request: ActionRequest):
        seen.append([message.content for message in request.messages])
        return AgentAction(text="up", parsed={"move": 0}, value=0.25, wants_stop=request.turn == 1)

    episode = await run_episode(ScriptedAgentPolicy(script), Countdown, EMPTY, EpisodeConfig())
    assert Countdown.made[0].actions == [{"move": 0}, {"move": 0}]
    assert [step.policy_value_estimate for step in episode.steps] == [0.25, 0.25]
    assert [step.action_taken for step in episode.steps] == [{"move": 0}] * 2
    assert episode.steps[0].raw_policy_output == "up"
    assert seen[1] == [*seen[0], "up", "2 left."]
    assert episode.stop_reason is StopReason.AGENT


async def test_a_policy_with_a_tokenizer_must_give_tokens():
    policy = ScriptedAgentPolicy(["a"])
    policy.tokenizer = TOKENIZER
    with pytest.raises(DataError, match=r"has a tokenizer, but its action has no tokens \(text 'a'\)"):
        await run_episode(policy, Countdown, EMPTY)


async def test_the_templates_end_of_turn_ends_actions_that_the_tokenizers_end_of_text_would_not():
    tokenizer = create_tokenizer(CHATML, eos_token="<|endoftext|>")
    engine = FakeEngine(lambda prompt, seed: encode(tokenizer, "x<|im_end|>"))
    for params in (PARAMS, PARAMS.new(stop_token_ids=(7,))):
        await run_episode(EngineAgentPolicy(engine, tokenizer, params), Countdown, EMPTY, EpisodeConfig(max_turns=1))
    (end,) = encode(tokenizer, "<|im_end|>")
    assert [call.arguments["params"].stop_token_ids for call in engine.calls] == [(end,), (7, end)]
    engine = say("x")
    await run_episode(policy_of(engine), Countdown, EMPTY, EpisodeConfig(max_turns=1))
    assert engine.calls[0].arguments["params"].stop_token_ids == (), "engines know the tokenizer's own"


async def test_answers_that_are_not_to_what_was_asked_are_refused():
    class Deaf(FakeEngine):
        async def generate(self, prompt_tokens, params, *, request_id=None):
            return await super().generate(prompt_tokens[1:], params, request_id=request_id)

    for engine, message in (
        (Deaf(), "that are not the 33 it was sent"),
        (FakeEngine(script_answer(())), "no token and finish reason 'stop'"),
    ):
        with pytest.raises(EngineProtocolError, match=message):
            await run_episode(policy_of(engine), Countdown, EMPTY)


async def test_what_was_sampled_from_a_cut_distribution_says_so():
    episode = await run_episode(policy_of(say("x"), PARAMS.new(top_p=0.5, temperature=0.7)), Countdown, EMPTY)
    assert episode.sample.truncated_sampling is True
    assert episode.sample.temperature == 0.7


async def test_a_rewritten_history_is_a_failure_of_the_data_that_can_be_dropped():
    tokenizer = create_tokenizer(QWEN3)
    engine = FakeEngine(lambda prompt, seed: encode(tokenizer, "x<|im_end|>"))
    config = EpisodeConfig(on_error="drop", on_rewrite="raise")
    setting = EpisodeSetting(environment_factory=Countdown, config=config, template_kwargs={"enable_thinking": False})
    episode = await run_episode(EngineAgentPolicy(engine, tokenizer, PARAMS), setting, EMPTY)
    assert (episode.failure, episode.sample.status) == (Failure.DATA, Status.FAILED)
    assert "rewrites" in str(episode.error)
    assert len(episode.sample.turns) == 1, "what there was of it can be looked at"


async def test_policies_of_ones_own_can_generate_groups():
    setting = EpisodeSetting(
        environment_factory=Countdown,
        create_environment_config=lambda prompt, seed: EnvironmentConfig(seed=prompt.index, parameters={"hard": True}),
        state_key=lambda observation: None,
    )
    group = await create_policy_generate_fn([policy_of(say("x"))], setting)(EMPTY, 2)
    assert all(environment.config == EnvironmentConfig(seed=5, parameters={"hard": True}) for environment in Countdown.made)
    assert {turn.state for sample in group for turn in sample.turns} == {None}


# -- what is logged


async def test_steps_are_logged_at_debug_and_summaries_at_info(caplog):
    with caplog.at_level(logging.DEBUG, logger="rollouts"):
        await run_episode(policy_of(say("go")), Countdown, EMPTY, seed=3)
    steps = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert len(steps) == 3
    for part in ("sample 5 (group 5), step 1", "observation '2 left.'", "action 'go', written as 'go'", "log-probs [-0.5, -0.5, -0.5]",
                 "value None", "reward 0.5", "info {'name': 'step2'}", "'role': 'assistant'"):  # fmt: skip
        assert part in steps[1]
    (summary,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert summary == "episode of sample 5 (group 5): 3 steps, ended by done, paid 1.5 by its environment"


async def test_nothing_is_logged_by_default(caplog):
    await run_episode(policy_of(say("go")), Countdown, EMPTY)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"on_rewrite": "brnch"}, "on_rewrite is 'brnch'.*branch"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"stop_regex": "("}, "no regular expression"),
        ({"observation_role": ""}, "observation_role"),
    ],
)
def test_settings_out_of_range_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        EpisodeConfig(**fields)


async def test_environments_are_seeded_by_prompts_that_need_no_data():
    numbers = set()

    class Guess(Countdown):
        def reset(self, config):
            numbers.add(random.Random(config.seed).randint(0, 10**6))
            return "guess."

    config = RolloutConfig(
        batch_size=5, n_samples_per_prompt=2, generate_fn=create_episode_generate_fn([say("x")], TOKENIZER, PARAMS, Guess)
    )
    batch = await AsyncRolloutManager(DataBuffer(None), config, engines=[]).generate_batch()
    assert [sample.group_index for sample in batch.samples] == [k // 2 for k in range(10)]
    assert len(numbers) == 5
