"""Policies over HTTP, conversations, rollout workers, and the way from trajectories to samples."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import trio
from chat_templates import CHATML, LLAMA3, QWEN3, create_tokenizer, encode

from benchmarks.reliability.loopback import serve
from rollouts.agents.config import EpisodeConfig
from rollouts.agents.conversation import MultiTurnInferenceEngine
from rollouts.agents.policies import AgentAction, EngineAgentPolicy, OpenAIAgentPolicy, ScriptedAgentPolicy, to_openai_messages
from rollouts.agents.run import run_episode, run_episode_group
from rollouts.agents.samples import (
    agent_rollout_to_sample,
    agent_rollouts_to_samples,
    check_loss_mask,
    sample_to_steps,
    split_turns,
    trajectory_to_sample,
)
from rollouts.agents.worker import RLRolloutWorker, TaskDefinitionModel
from rollouts.backends.factory import create_pytorch_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.collate import collate_samples
from rollouts.data.records import TrajectoryRecord, derive_steps
from rollouts.data.samples import find_actions, sample_messages
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.engines.text.openai import OpenAITextEngine
from rollouts.environments.games.calculator import calculate
from rollouts.environments.tools.environment import ToolEnvironment, ToolRules
from rollouts.environments.tools.tool import create_tool
from rollouts.errors import ConfigError, DataError, EngineStatusError, GenerationError, RewardError
from rollouts.outcomes import EpisodeOutcome, EpisodeStep, Failure, StepOutput, StopReason
from rollouts.rewards.results import EvaluateResult, align_rewards_with_step_data, name_turns, number_step
from rollouts.rewards.trajectory_rewards import sample_trajectory
from rollouts.steps import StepData
from rollouts.testing import FakeEngine, create_tiny_model, random_answer
from rollouts.training.summaries import summarize_episodes
from rollouts.types import Message, Prompt, Sample, SamplingParams, Status

TOKENIZER = create_char_tokenizer()
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+3"}}\n</tool_call>'
QUESTION = Prompt(content=(Message(role="user", content="2+3?"),), index=2, metadata={"ground_truth": "5"})


def create_calculator():
    return ToolEnvironment(
        [create_tool(calculate, in_thread=False)],
        grade=lambda answer, parameters: float(answer == parameters["ground_truth"]),
        rules=ToolRules(error_reward=-0.5),
    )


class Echo:
    def reset(self, config):
        self.delay = config.parameters.get("delay", 0)
        return "hi."

    async def step(self, action):
        await trio.sleep(self.delay)
        return f"{len(action)}.", 1.0, False, {"tool": "none"}

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return ""


# -- tools


async def test_a_call_that_is_no_json_is_told_to_the_model_and_counts_as_its_failure():
    bad = '<tool_call>\n{"name": "calculate", "arguments": {"expression": \n</tool_call>'
    episode = await run_episode(ScriptedAgentPolicy([bad, CALL, "5"]), create_calculator, QUESTION)
    assert (episode.stop_reason, episode.failure, episode.total_reward) == (StopReason.DONE, Failure.POLICY, 0.5)
    assert episode.messages[2].role == "tool"
    assert "error" in str(episode.messages[2].content)
    assert episode.messages[4].content == "5"
    assert episode.messages[1].tool_calls is None
    assert episode.messages[3].tool_calls is not None
    assert summarize_episodes([episode.sample])["policy_failure_fraction"] == 1.0


async def test_parsed_calls_are_kept_for_rewards_and_never_rendered_twice():
    tokenizer = create_tokenizer(CHATML)
    answers = [encode(tokenizer, text + "<|im_end|>") for text in (CALL, "5")]
    engine = FakeEngine(lambda prompt, seed: answers[len(engine.calls) - 1])
    episode = await run_episode(EngineAgentPolicy(engine, tokenizer), create_calculator, QUESTION)
    text = tokenizer.decode(episode.sample.tokens)
    assert text.count("<tool_call>") == 1
    assert episode.sample.messages[1].tool_calls[0]["function"]["name"] == "calculate"
    assert sample_messages(episode.sample)[1].tool_calls == episode.messages[1].tool_calls
    check_loss_mask(episode.sample, tokenizer)


# -- an OpenAI-like server


def chat_server(answers, seen):
    async def handle(exchange):
        seen.append(json.loads(exchange.body))
        await exchange.answer(*answers(len(seen) - 1))

    return serve(handle)


def completion(**message):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
    return (json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}).encode(),)


async def test_a_chat_server_plays_with_tools_of_its_own_form():
    function = {"name": "calculate", "arguments": '{"expression": "2+3"}'}
    answers = [
        completion(content="let me see", tool_calls=[{"id": "call_a", "type": "function", "function": function}]),
        completion(content="5"),
    ]
    seen: list = []
    tools = [create_tool(calculate).to_dict()]
    async with chat_server(lambda k: answers[k], seen) as server:
        async with OpenAITextEngine(server.url, "m", check_model=False, extra={}) as engine:
            policy = OpenAIAgentPolicy(engine, max_tokens=20, temperature=0.5, tools=tools)
            episode = await run_episode(policy, create_calculator, QUESTION, EpisodeConfig(max_turn_tokens=9), seed=1)
    assert (episode.total_reward, episode.stop_reason) == (1.0, StopReason.DONE)
    assert seen[0]["messages"] == [{"role": "user", "content": "2+3?"}]
    assert (seen[0]["tools"], seen[0]["max_tokens"], seen[0]["temperature"]) == (tools, 9, 0.5)
    assert seen[0]["seed"] != seen[1]["seed"]
    _, called, result = seen[1]["messages"]
    assert called["content"] == "let me see"
    (call,) = called["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"expression": "2+3"}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["id"])
    assert episode.sample.tokens == ()
    assert "<tool_call>" in episode.steps[0].raw_policy_output


async def test_a_chat_server_that_fails_ends_the_episode_with_its_error():
    async with chat_server(lambda k: (b'{"error": {"message": "too long"}}', 400), []) as server:
        async with OpenAITextEngine(server.url, "m", check_model=False, extra={}) as engine:
            with pytest.raises(EngineStatusError, match="too long"):
                await run_episode(OpenAIAgentPolicy(engine), Echo, QUESTION)


def test_messages_for_servers_without_tools_are_text_alone():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = (
        Message(role="user", content="q"),
        Message(role="assistant", content=f"so\n{CALL}", tool_calls=(call,)),
        Message(role="tool", content="1", tool_call_id="a"),
        Message(role="assistant", content="<tool_call>{</tool_call>"),
        Message(role="tool", content="error", tool_call_id="b"),
    )
    with_calls, plain = to_openai_messages(messages, with_calls=True), to_openai_messages(messages, with_calls=False)
    assert [message.role for message in with_calls] == ["user", "assistant", "tool", "assistant", "user"]
    assert with_calls[1] == Message(role="assistant", content="so", tool_calls=(call,))
    assert [message.role for message in plain] == ["user", "assistant", "user", "assistant", "user"]
    assert plain[1] == Message(role="assistant", content=f"so\n{CALL}")


def test_what_no_call_asked_for_stands_behind_the_results_of_its_turn():
    good = tuple({"id": x, "type": "function", "function": {"name": "f", "arguments": "{}"}} for x in "bd")
    results = [Message(role="tool", content=x, tool_call_id=x) for x in "abcd"]
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content=CALL, tool_calls=good),
        *results,
        Message(role="assistant", content="so"),
    ]
    sent = to_openai_messages(messages, with_calls=True)
    assert [(m.role, m.content) for m in sent[2:]] == [
        ("tool", "b"), ("tool", "d"), ("user", "a"), ("user", "c"), ("assistant", "so")
    ]  # fmt: skip
    assert to_openai_messages(messages[:-1], with_calls=True) == sent[:-1]
    assert [m.content for m in to_openai_messages(messages, with_calls=False)[2:]] == ["a", "b", "c", "d", "so"]


# -- trajectories and samples


async def test_rollouts_of_many_prompts_come_in_their_order(autojump_clock):
    prompts = [Prompt(content="", index=k, metadata={"delay": 10 - k}) for k in range(5)]
    policy = EngineAgentPolicy(FakeEngine(random_answer(mean_length=2)), TOKENIZER)
    samples = await agent_rollouts_to_samples(policy, Echo, prompts, EpisodeConfig(max_turns=2), max_concurrent=3)
    assert [sample.group_index for sample in samples] == list(range(5))
    one = await agent_rollout_to_sample(policy, Echo, prompts[3], EpisodeConfig(max_turns=2))
    assert one == samples[3]


async def play(num_turns=3, engine=None, n=1):
    policy = EngineAgentPolicy(engine or FakeEngine(random_answer(mean_length=4)), TOKENIZER, SamplingParams(max_tokens=6))
    episodes = await run_episode_group(policy, Echo, Prompt(content="", index=1), n, EpisodeConfig(max_turns=num_turns))
    return [episode for episode in episodes if episode is not None]


async def test_a_mask_that_does_not_fit_the_messages_is_found():
    (episode,) = await play()
    sample = trajectory_to_sample(episode, TOKENIZER)
    turn = sample.turns[1]
    outside = replace(sample, loss_mask=(1.0, *sample.loss_mask[1:]))
    other = replace(sample, tokens=(*sample.tokens[: turn.start], 7, *sample.tokens[turn.start + 1 :]))
    moved = replace(sample, turns=(sample.turns[0], replace(turn, start=turn.start - 1), sample.turns[2]))
    for wrong, message in (
        (outside, r"token 0 \('u'\) is trained on, but is in no turn"),
        (other, "turn 1 is trained on"),
        (moved, "turn 1 is trained on"),
        (replace(sample, turns=sample.turns[:2]), "2 turns, but 3 messages"),
        (replace(sample, action_messages=(1, 3, 50)), "there are 7 messages"),
        (Sample(tokens=(3,), loss_mask=(1.0,)), "no turns"),
    ):
        with pytest.raises(DataError, match=message):
            check_loss_mask(wrong, TOKENIZER)


async def test_answers_that_end_with_text_of_the_template_are_what_their_messages_say():
    ending = (
        "{%- for m in messages %}{{- m.role + ': ' + m.content + ' END\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
    )

    class Talker:
        tokenizer = create_tokenizer(ending)

        async def get_action(self, request):
            await trio.lowlevel.checkpoint()
            return AgentAction(tokens=encode(self.tokenizer, ("hi END\n", "yo END", "cut")[request.turn]))

    sample = await agent_rollout_to_sample(Talker(), Echo, Prompt(content=""), EpisodeConfig(max_turns=3, chat=True))
    assert [sample_messages(sample)[k].content for k in sample.action_messages] == ["hi", "yo", "cut"]
    plain = create_tokenizer(ending)
    plain.chat_template = None
    with pytest.raises(DataError, match="turn 0 is trained on 'hi END"):
        check_loss_mask(sample, plain)
    check_loss_mask(sample, plain, chat_template=ending)


async def test_what_others_say_as_assistants_is_nobodys_turn():
    prompt = Prompt(content=(Message(role="user", content="a"), Message(role="assistant", content="b"), Message(role="user", content="c")))
    policy = EngineAgentPolicy(FakeEngine(random_answer(mean_length=4)), TOKENIZER, SamplingParams(max_tokens=6))

    class Partner(Echo):
        async def step(self, action):
            await trio.lowlevel.checkpoint()
            return (Message(role="assistant", content="d"), Message(role="user", content="e")), 1.0, False, {}

    episode = await run_episode(policy, Partner, prompt, EpisodeConfig(max_turns=2))
    assert episode.sample.action_messages == (3, 6)
    assert "assistant: b<|eos|>" in TOKENIZER.decode(episode.sample.tokens[: episode.sample.turns[0].start])
    check_loss_mask(episode.sample, TOKENIZER)
    assert [step.raw_policy_output for step in sample_to_steps(episode.sample)] == [s.raw_policy_output for s in episode.steps]


async def test_all_readers_find_the_actions_of_an_environment_that_speaks_as_the_assistant():
    """The environment also has the last message, and one of two messages after an action is its own, so counting from either end fails."""
    prompt = Prompt(content=(Message(role="user", content="a"), Message(role="assistant", content="b"), Message(role="user", content="c")))
    policy = EngineAgentPolicy(FakeEngine(random_answer(mean_length=4)), TOKENIZER, SamplingParams(max_tokens=6))

    class Partner(Echo):
        async def step(self, action):
            await trio.lowlevel.checkpoint()
            self.turn = getattr(self, "turn", 0) + 1
            return (Message(role="user", content="e"), Message(role="assistant", content="d")), float(self.turn), self.turn == 3, {}

    episode = await run_episode(policy, Partner, prompt, EpisodeConfig(max_turns=3))
    sample = replace(episode.sample, reward=None)
    written = [step.raw_policy_output for step in episode.steps]
    places = [3, 6, 9]
    assert [message.role for message in episode.messages] == ["user", "assistant", "user", *["assistant", "user", "assistant"] * 3]
    assert find_actions(sample) == (*places,) and [step.action_message for step in episode.steps] == places
    assert name_turns(sample) == [(1, None), (3, None), (5, None)], "what a function finds that enumerates the assistant's messages"
    assert [number_step(step) for step in episode.steps] == [1, 3, 5]
    assert sample_trajectory(sample).actions == (*written,)
    assert sample_trajectory(sample).states[1:] == ("e\nd", "e\nd")
    check_loss_mask(sample, TOKENIZER)
    for steps in (sample_to_steps(sample), derive_steps(TrajectoryRecord(sample=sample))):
        assert [step.raw_policy_output for step in steps] == written
        assert [number_step(StepData.from_dict(json.loads(json.dumps(step.to_dict())))) for step in steps] == [1, 3, 5]
        assert [step.resulting_messages_history for step in steps] == [step.resulting_messages_history for step in episode.steps]
    result = EvaluateResult(1.0, step_outputs=(StepOutput(1, 0.1), StepOutput(5, 0.3)))
    assert [turn.reward for turn in result.apply_to(sample).turns] == [0.1, 2.0, 0.3]
    assert [step.base_reward for step in align_rewards_with_step_data(result, episode.steps).raise_unmatched().steps] == [0.1, 2.0, 0.3]
    with pytest.raises(RewardError, match=r"step_index 2 is unknown; there are \[1, 3, 5\]"):
        EvaluateResult(1.0, step_outputs=(StepOutput(2, 0.1),)).apply_to(sample)


async def test_steps_can_be_read_off_a_sample():
    (episode,) = await play()
    assert sample_to_steps(episode.sample) == episode.steps
    assert sample_to_steps(Sample.from_dict(json.loads(json.dumps(episode.sample.to_dict())))) == episode.steps
    text = await run_episode(ScriptedAgentPolicy(["a"]), Echo, QUESTION, EpisodeConfig(max_turns=2))
    assert [step.raw_policy_output for step in sample_to_steps(text.sample)] == ["a", "a"]
    with pytest.raises(DataError, match="not of an episode"):
        sample_to_steps(Sample())


async def test_steps_of_an_episode_that_failed_are_those_before():
    class Failing(Echo):
        async def step(self, action):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 3:
                raise KeyError("boom")
            return await super().step(action)

    policy = EngineAgentPolicy(FakeEngine(random_answer(mean_length=4)), TOKENIZER, SamplingParams(max_tokens=6))
    episode = await run_episode(policy, Failing, Prompt(content=""), EpisodeConfig(on_error="drop"))
    assert (episode.sample.status, len(episode.sample.turns), len(episode.steps)) == (Status.FAILED, 3, 2)
    assert sample_to_steps(episode.sample) == episode.steps
    wrong = replace(episode.sample, episode=replace(episode.outcome, steps=()))
    with pytest.raises(DataError, match="0 steps in its episode, but 3 messages of the policy"):
        sample_to_steps(wrong)


async def test_turns_apart_and_in_one_row_have_the_same_log_probs():
    model = create_tiny_model()
    episodes = await play(engine=InProcessEngine(model), n=2)
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-3)
    for episode in episodes:
        sample = episode.sample
        parts = split_turns(sample)
        assert len(parts) == 3
        whole = await backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).result()
        apart = await backend.forward(collate_samples(list(parts)), lambda outputs: outputs.log_probs).result()
        for row, (part, turn) in enumerate(zip(parts, sample.turns, strict=True)):
            own = part.turns[0]
            assert part.tokens == sample.tokens[: turn.end]
            assert sum(part.loss_mask) == turn.end - turn.start == own.end - own.start
            assert part.rollout_log_probs[own.start :] == sample.rollout_log_probs[turn.start : turn.end]
            assert apart[row, own.start : own.end].tolist() == pytest.approx(whole[0, turn.start : turn.end].tolist(), abs=1e-5)
    with pytest.raises(DataError, match="no turns"):
        split_turns(Sample())


def test_what_others_wrote_becomes_supervised_samples():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"},
                {"role": "assistant", "content": "bc"}]  # fmt: skip
    first, second = (trajectory_to_sample(each, TOKENIZER, index=k) for k, each in enumerate((messages, messages[:2])))
    trained = [t for t, mask in zip(first.tokens, first.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(trained) == "a<|eos|>bc<|eos|>"
    assert (second.index, second.status, second.rollout_log_probs) == (1, Status.COMPLETED, None)
    assert sample_messages(first) == tuple(Message(**message) for message in messages)
    with pytest.raises(DataError, match="without a tokenizer"):
        trajectory_to_sample(messages, None)


CALLS_BESIDE_TEXT = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def decode_trained(sample, tokenizer):
    return tokenizer.decode([token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask])


async def test_an_expert_teaches_each_call_once():
    episode = await run_episode(ScriptedAgentPolicy([f"so\n{CALL}", "5"]), create_calculator, QUESTION)
    assert episode.messages[1].tool_calls
    for template in (CALLS_BESIDE_TEXT, CHATML):
        tokenizer = create_tokenizer(template)
        sample = trajectory_to_sample(episode.messages, tokenizer)
        assert decode_trained(sample, tokenizer) == f"so\n{CALL}<|im_end|>5<|im_end|>"
        assert sample_messages(sample) == episode.messages, "rewards find the calls"
    qwen = create_tokenizer(QWEN3)
    assert decode_trained(trajectory_to_sample(episode.messages[:2], qwen), qwen).count("<tool_call>") == 1
    beside = [Message(role="user", content="2+3?"), replace(episode.messages[1], content="I calculate it.")]
    tokenizer = create_tokenizer(CALLS_BESIDE_TEXT)
    taught = decode_trained(trajectory_to_sample(beside, tokenizer), tokenizer)
    assert taught.startswith("I calculate it.\n<tool_call>"), "calls that are in no text are the template's to write"
    assert decode_trained(trajectory_to_sample(beside, tokenizer, calls_in_text=True), tokenizer) == "I calculate it.<|im_end|>"


def test_what_a_template_makes_of_an_answer_is_no_sample_of_it():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abc"}]
    shouting = create_tokenizer(CHATML.replace("message['content']", "message['content'] | upper"))
    with pytest.raises(DataError, match=r"message 1 \(assistant\) says 'abc', but that is not in what is trained on, 'ABC"):
        trajectory_to_sample(messages, shouting)
    thinking = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\n\nwhy\n</think>\n\nabc "}]
    for template in (QWEN3, LLAMA3):
        assert "abc" in decode_trained(trajectory_to_sample(thinking, create_tokenizer(template)), create_tokenizer(template))


# -- conversations


async def test_a_conversation_goes_on_token_by_token():
    engine = FakeEngine(random_answer(mean_length=4))
    chat = MultiTurnInferenceEngine(engine, TOKENIZER, max_turns=2, system_prompt="be brief.")
    begun = chat.start_conversation("hi", seed=3)
    assert (begun.awaits_reply, begun.reply) == (True, "")
    example = (Message(role="user", content="a"), Message(role="assistant", content="b"), Message(role="user", content="c"))
    assert chat.start_conversation(example).reply == "", "what stands in the prompt is no answer"
    first = await chat.step(begun)
    second = await chat.step(first, "and?")
    tokens = second.transcript.tokens
    assert engine.calls[1].arguments["prompt_tokens"] == tokens[: second.transcript.turns[1].start]
    assert tokens[: len(first.transcript.tokens)] == first.transcript.tokens, "nothing that was there is tokenized again"
    assert (
        chat.format_conversation(second) == f"system: be brief.\nuser: hi\nassistant: {first.reply}\nuser: and?\nassistant: {second.reply}"
    )
    assert second == await chat.step(first, "and?"), "a conversation is a value"
    for conversation, message, expected in (
        (second, "more?", "max_turns is 2"),
        (begun, "hello?", "yet to answer"),
        (first, None, "the model spoke last"),
    ):
        with pytest.raises(GenerationError, match=expected):
            await chat.step(conversation, message)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"max_tokens": 5}, "the answers have 5 tokens together, and max_tokens is 5"),
        ({"max_context": 20}, "which leaves no room in max_context, 20"),
        ({"stop_regex": "."}, "stop_regex, '.', is found in the last answer"),
    ],
)
async def test_a_conversation_ends_at_the_limits_of_its_configuration(limit, expected):
    engine, config = FakeEngine(random_answer(mean_length=50)), EpisodeConfig(chat=False, **limit)
    chat = MultiTurnInferenceEngine(engine, TOKENIZER, max_turns=9, params=SamplingParams(max_tokens=4), config=config)
    conversation = chat.start_conversation("hello")
    with pytest.raises(GenerationError, match=expected):
        for _ in range(9):
            conversation = await chat.step(conversation, "more" if conversation.num_turns else None)
            assert len(conversation.transcript.context) <= limit.get("max_context", 100)
            assert conversation.transcript.num_sampled <= limit.get("max_tokens", 100)
    assert 0 < conversation.num_turns < 9


async def test_a_conversation_may_be_with_an_environment():
    chat = MultiTurnInferenceEngine(FakeEngine(random_answer()), TOKENIZER, max_turns=3, system_prompt="be brief.")
    episode = await chat.run_episode(Echo, seed=1)
    assert (episode.stop_reason, len(episode.steps)) == (StopReason.MAX_TURNS, 3)
    assert episode.messages[0].content == "be brief."
    check_loss_mask(episode.sample, TOKENIZER)


# -- a worker for one task


def pay_for_truth(messages, ground_truth=None):
    return float(messages[-1].content == ground_truth)


async def test_one_object_drives_a_worker(tmp_path):
    path = tmp_path / "task.json"
    reward = f"{__file__}:pay_for_truth"
    fields = {"task": "2+3?", "ground_truth": "5", "max_turns": 4, "termination_regex": r"^\d$", "reward": reward}
    path.write_text(json.dumps(fields))
    task = TaskDefinitionModel.from_json(path)
    assert task == TaskDefinitionModel.from_dict(fields)
    worker = RLRolloutWorker(ScriptedAgentPolicy([CALL, "5"]), Echo, task)
    steps, messages, ground_truth = await worker.run_episode()
    assert [step.raw_policy_output for step in steps] == [CALL, "5"]
    assert (messages[0].role, ground_truth) == ("user", "5")
    assert isinstance(messages, list)
    assert isinstance(steps, list)
    assert worker.last_episode is not None
    assert worker.last_episode.stop_reason is StopReason.REGEX
    assert worker.last_episode.sample.metadata["ground_truth"] == "5"
    assert callable(task.load_reward())
    assert TaskDefinitionModel(task="x").load_reward() is None


def test_limits_that_a_definition_says_nothing_of_are_those_of_the_worker():
    config = EpisodeConfig(max_turns=20, stop_regex="STOP", system_prompt="s")
    assert TaskDefinitionModel(task="q").episode_config(config) == config
    assert TaskDefinitionModel(task="q").episode_config() == EpisodeConfig()
    own = TaskDefinitionModel(task="q", max_turns=3, termination_regex="^x", system_prompt="t").episode_config(config)
    assert (own.max_turns, own.stop_regex, own.system_prompt) == (3, "^x", "t")


async def test_each_episode_of_a_worker_is_another_one_from_the_same_state():
    policy = EngineAgentPolicy(FakeEngine(random_answer()), TOKENIZER)
    worker = RLRolloutWorker(policy, Echo, TaskDefinitionModel(max_turns=2), seed=3)
    first, second = (await worker.run_episode())[0], (await worker.run_episode())[0]
    assert first[0].policy_tokens != second[0].policy_tokens
    again = (await worker.run_episode(sample_number=0))[0]
    assert again[0].policy_tokens == first[0].policy_tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "x", "max_turn": 3}, "max_turn"),
        ({"task": "x", "max_turns": 0}, "max_turns is 0"),
        ({"task": "x", "termination_regex": "("}, "no regular expression"),
    ],
)
def test_definitions_that_say_nothing_sensible_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TaskDefinitionModel.from_dict(fields)


def test_definitions_are_read_from_files_with_their_name_in_errors(tmp_path):
    for content, message in (("[]", "holds a JSON list"), ("{", "cannot read a task definition")):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            TaskDefinitionModel.from_json(tmp_path / "t.json")


# -- metrics


def test_summaries_count_ends_turns_and_failures():
    def sample(reason, num_turns, failure=None, contexts=()):
        steps = (EpisodeStep(reward=1.0),) * num_turns
        outcome = EpisodeOutcome(stop_reason=reason, environment_reward=float(num_turns), steps=steps, failure=failure)
        return Sample(tokens=(3, 4, 5), loss_mask=(0.0, 1.0, 1.0), episode=outcome, context_starts=contexts)

    samples = [sample("done", 1), sample("done", 3, "policy", (1,)), sample("max_turns", 5), Sample()]
    assert summarize_episodes(samples) == {
        "num_episodes": 3.0, "num_episodes_done": 2.0, "num_episodes_max_turns": 1.0, "turns_mean": 3.0, "turns_max": 5.0,
        "environment_reward_mean": 3.0, "policy_failure_fraction": pytest.approx(1 / 3), "num_branched_episodes": 1.0,
    }  # fmt: skip
    assert summarize_episodes([Sample()]) == {}


def test_a_cut_trajectory_says_so():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a long answer"}]
    whole = trajectory_to_sample(messages, TOKENIZER)
    cut = trajectory_to_sample(messages, TOKENIZER, max_length=len(whole.tokens) - 3, on_overflow="truncate")
    assert (whole.status, cut.status) == (Status.COMPLETED, Status.TRUNCATED)
