"""Demonstrations of tasks in several turns: their form is that of the prompts, and mistakes of an expert are reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from chat_templates import CHATML, create_bpe_tokenizer

from integration.settings.config import Config
from integration.settings.sections.data import EvaluationSection
from integration.settings.sections.episodes import EpisodeSection
from integration.settings.sections.stages import SFTSection
from integration.tasks.episodes import DemonstrationPolicy, create_calculator_task, create_grid_world_task, demonstrate, load_expert
from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import ActionRequest
from rollouts.agents.samples import agent_rollouts_to_samples
from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.samples import sample_messages
from rollouts.environments.protocol import EnvironmentConfig
from rollouts.errors import ConfigError, DataError
from rollouts.types import Message, Prompt, Sample

SIZES: dict[str, Any] = {"sft": SFTSection(num_steps=4, batch_size=6), "evaluation": EvaluationSection(num_prompts=10)}


def create_merging_tokenizer(eos_token: str = "<|im_end|>"):
    """Create a tokenizer like that of a trained model: pairs of digits are single tokens."""
    return create_bpe_tokenizer(CHATML, " ".join(str(number) for number in range(100, 1000)), eos_token)


def play(create: Any, config: Config, tokenizer: Any) -> tuple[Sample, ...]:
    task = create(config, tokenizer)
    assert task.demonstrate is not None
    return trio.run(task.demonstrate)


def list_answers(sample: Sample) -> list[str]:
    return [message.content or "" for message in sample_messages(sample) if message.role == "assistant"]


def test_a_model_that_can_read_is_shown_words_and_calls_in_the_form_that_its_rules_name():
    tokenizer = create_merging_tokenizer()
    walks = play(create_grid_world_task, Config(task="grid_world", **SIZES), tokenizer)
    assert {answer for sample in walks for answer in list_answers(sample)} == {"up", "down", "left", "right"}
    assert {sample.reward for sample in walks} == {0.0, 1.0}
    computed = play(create_calculator_task, Config(task="calculator", **SIZES), tokenizer)
    assert {sample.reward for sample in computed} == {0.0, 1.0}
    for sample in computed:
        *calls, answer = list_answers(sample)
        assert (sample.reward == 1.0) == (answer != "?") and all(call.startswith("<tool_call>") for call in calls)
        assert bool(calls) == (sample.reward == 1.0)


def test_a_system_prompt_before_the_problem_changes_nothing():
    config = Config(task="calculator", episode=EpisodeSection(system_prompt="a"), **SIZES)
    assert {sample.reward for sample in play(create_calculator_task, config, create_char_tokenizer())} == {0.0, 1.0}


def test_demonstrations_end_as_the_chat_template_ends_a_turn():
    tokenizer = create_merging_tokenizer("<|endoftext|>")
    (end,) = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    for sample in play(create_grid_world_task, Config(task="grid_world", **SIZES), tokenizer):
        assert sample.turns is not None and {sample.tokens[turn.end - 1] for turn in sample.turns} == {end}


def test_a_tokenizer_that_can_end_nothing_is_refused():
    tokenizer = create_char_tokenizer()
    tokenizer.eos_token = None
    request = ActionRequest(messages=(Message(role="user", content="1"),))
    with pytest.raises(ConfigError, match="eos_token_id is None"):
        trio.run(DemonstrationPolicy(tokenizer, lambda request: "1").get_action, request)


class Broken:
    """Fails in episodes whose parameters say so."""

    def reset(self, config: EnvironmentConfig) -> str:
        self.fails = config.parameters["fails"]
        return "1"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self.fails:
            raise OSError("gone")
        return "2", 1.0, True, {}

    def get_state_description(self) -> str:
        return ""

    def get_prompt_prefix(self) -> str:
        return ""


def test_failed_demonstrations_are_left_out_and_counted():
    prompts = [Prompt(content="", index=k, metadata={"fails": k == 1}) for k in range(3)]
    setting = EpisodeSetting(environment_factory=Broken, config=EpisodeConfig(max_turns=2, on_error="drop"))
    said: list[str] = []
    run = partial(demonstrate, create_char_tokenizer(), setting, lambda request: "1")
    assert len(trio.run(run, prompts, 6, said.append)) == 4
    assert said == ["2 of 6 demonstrations failed and were left out"]
    with pytest.raises(DataError, match=r"all 4 episodes of the demonstrations failed.*gone"):
        trio.run(run, prompts[1:2], 4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return request.missing", r"own.py:expert, asked for action 0 after '1', raised AttributeError \(.*own.py:2\)"),
        ("return 7", r"own.py:expert, asked for action 0 after '1', returned 7 \(int\), expected the text of the action"),
    ],
)
def test_an_expert_that_fails_is_named(body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(f"def expert(request):\n    {body}\n")
    setting = EpisodeSetting(environment_factory=Broken, config=EpisodeConfig(on_error="drop"))
    policy = DemonstrationPolicy(create_char_tokenizer(), load_expert("own.py:expert"))
    with pytest.raises(ConfigError, match=message):
        trio.run(agent_rollouts_to_samples, policy, setting, [Prompt(content="", metadata={"fails": False})])
