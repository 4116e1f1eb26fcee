"""One episode with two tool calls on three chat templates: tokens and masks as written here by hand, log-probs as the trainer's.

G = given to the model, S = sampled by it.
"""

from __future__ import annotations

import copy

import pytest
import torch
import trio
from chat_templates import CHATML, LLAMA3, QWEN3, create_tokenizer, encode

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import AgentAction, EngineAgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.samples import check_loss_mask, trajectory_to_sample
from rollouts.backends.factory import create_pytorch_backend
from rollouts.data.collate import collate_samples
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.environments.games.calculator import calculate
from rollouts.environments.tools.environment import ToolEnvironment
from rollouts.environments.tools.tool import create_tool
from rollouts.errors import DataError
from rollouts.outcomes import StopReason
from rollouts.testing import create_tiny_model
from rollouts.types import Completion, Message, Prompt, SamplingParams, Status

G, S = 0.0, 1.0
QUESTION = "what is 2+3*4?"
FIRST = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "3*4"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2+12"}}\n</tool_call>'
ANSWER = "it is 14."

CHATML_EPISODE = (
    (G, "<|im_start|>system\nuse tools.<|im_end|>\n<|im_start|>user\nwhat is 2+3*4?<|im_end|>\n<|im_start|>assistant\n"),
    (S, FIRST + "<|im_end|>"),
    (G, "\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"),
    (S, SECOND + "<|im_end|>"),
    (G, "\n<|im_start|>tool\n14<|im_end|>\n<|im_start|>assistant\n"),
    (S, ANSWER + "<|im_end|>"),
)
LLAMA3_EPISODE = (
    (
        G,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nuse tools.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nwhat is 2+3*4?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    (S, FIRST + "<|eot_id|>"),
    (G, '<|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
    (S, SECOND + "<|eot_id|>"),
    (G, '<|start_header_id|>ipython<|end_header_id|>\n\n"14"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'),
    (S, ANSWER + "<|eot_id|>"),
)
THINK_1, THINK_2, THINK_3 = "<think>\nfirst 3*4.\n</think>\n\n", "<think>\nthen 2+12.\n</think>\n\n", "<think>\n14 it is.\n</think>\n\n"
QWEN3_EPISODE = (
    (G, "<|im_start|>system\nuse tools.<|im_end|>\n<|im_start|>user\nwhat is 2+3*4?<|im_end|>\n<|im_start|>assistant\n"),
    (S, THINK_1 + FIRST + "<|im_end|>"),
    (G, "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    (S, THINK_2 + SECOND + "<|im_end|>"),
    (G, "\n<|im_start|>user\n<tool_response>\n14\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    (S, THINK_3 + ANSWER + "<|im_end|>"),
)
FOLLOW_UP = "<think>\ntwice 14.\n</think>\n\nit is 28."
QWEN3_SECOND_CONTEXT = (  # the user asks again, and Qwen3 shows the history without its thinking
    (
        G,
        "<|im_start|>system\nuse tools.<|im_end|>\n<|im_start|>user\nwhat is 2+3*4?<|im_end|>\n"
        f"<|im_start|>assistant\n{FIRST}<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{SECOND}<|im_end|>\n<|im_start|>user\n<tool_response>\n14\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nnow double it.<|im_end|>\n<|im_start|>assistant\n",
    ),
    (S, FOLLOW_UP + "<|im_end|>"),
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", CHATML_EPISODE),
    "llama3": (LLAMA3, "<|eot_id|>", LLAMA3_EPISODE),
    "qwen3": (QWEN3, "<|im_end|>", QWEN3_EPISODE),
}


class DictatedEngine:
    """An InProcessEngine that is made to write given texts. The log-probs are its own, of each request as it came."""

    def __init__(self, engine: InProcessEngine, answers):
        self.engine, self.answers, self.requests = engine, list(answers), []

    async def generate(self, prompt_tokens, params, *, request_id=None):
        prompt, answer = tuple(prompt_tokens), self.answers[len(self.requests)]
        self.requests.append(prompt)
        log_probs = await self.engine.recompute_output_log_probs((*prompt, *answer), len(prompt))
        versions = (len(self.requests),) * len(answer)
        return Completion(request_id=str(request_id), input_tokens=prompt, output_tokens=answer, output_log_probs=log_probs,
                          output_versions=versions, finish_reason="stop")  # fmt: skip


class AskedAgain:
    """Tools, and a user that asks one more question after the first answer."""

    def __init__(self):
        self.tools = ToolEnvironment([create_tool(calculate, in_thread=False)], grade=lambda answer, parameters: float("28" in answer))
        self.asked = False

    def reset(self, config):
        return self.tools.reset(config)

    async def step(self, action):
        step = await self.tools.step(action)
        if step.done and not self.asked:
            self.asked = True
            return "now double it.", 0.25, False, {}
        return step

    def get_state_description(self):
        return ""

    def get_prompt_prefix(self):
        return ""


def create_environment():
    return ToolEnvironment([create_tool(calculate, in_thread=False)], grade=lambda answer, parameters: float("14" in answer))


def expect(tokenizer, *pieces):
    tokens = tuple(token for _, text in pieces for token in encode(tokenizer, text))
    mask = tuple(kind for kind, text in pieces for _ in encode(tokenizer, text))
    return tokens, mask


def create_parts(template, eos, pieces):
    tokenizer = create_tokenizer(template, eos)
    model = create_tiny_model(vocab_size=len(tokenizer))
    model.config.max_position_embeddings = 2048
    eos_ids = [tokenizer.convert_tokens_to_ids(eos)]
    engine = InProcessEngine(copy.deepcopy(model), tokenizer, eos_token_ids=eos_ids)
    dictated = DictatedEngine(engine, [encode(tokenizer, text) for kind, text in pieces if kind == S])
    return tokenizer, model, dictated


PROMPT = Prompt(content=(Message(role="system", content="use tools."), Message(role="user", content=QUESTION)), index=3)


async def compute_trainer_log_probs(model, sample):
    backend = create_pytorch_backend(model, lr=1e-3)
    return await backend.forward(collate_samples([sample]), lambda outputs: outputs.log_probs).result()


@pytest.mark.parametrize("name", TEMPLATES)
async def test_an_episode_with_two_tool_calls_is_as_written_by_hand(name):
    template, eos, pieces = TEMPLATES[name]
    tokenizer, model, engine = create_parts(template, eos, pieces)
    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=200))
    episode = await run_episode(policy, create_environment, PROMPT, EpisodeConfig())
    sample = episode.sample
    tokens, mask = expect(tokenizer, *pieces)
    assert tokenizer.decode(sample.tokens) == "".join(text for _, text in pieces)
    assert sample.tokens == tokens
    assert sample.loss_mask == mask
    assert (sample.status, episode.stop_reason, sample.reward, episode.failure) == (Status.COMPLETED, StopReason.DONE, 1.0, None)
    assert [message.role for message in episode.messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [message.tool_calls[0]["function"]["name"] for message in sample.messages if message.tool_calls]
    assert calls == ["calculate", "calculate"]
    assert sample.context_starts == ()
    check_loss_mask(sample, tokenizer)
    written = [text.removesuffix(eos) for kind, text in pieces if kind == S]
    assert [tokenizer.decode(sample.tokens[turn.start : turn.end - 1]) for turn in sample.turns] == written
    assert engine.requests == [sample.tokens[: turn.start] for turn in sample.turns]
    assert [sample.weight_versions[turn.start] for turn in sample.turns] == [1, 2, 3]
    found = await compute_trainer_log_probs(model, sample)
    torch.testing.assert_close(found[0] * torch.tensor(mask), torch.tensor(sample.rollout_log_probs), atol=1e-5, rtol=0)
    assert trajectory_to_sample(episode, tokenizer) == sample


async def test_a_template_that_drops_earlier_thinking_gives_a_further_context():
    pieces = (*QWEN3_EPISODE, *QWEN3_SECOND_CONTEXT)
    tokenizer, model, engine = create_parts(QWEN3, "<|im_end|>", pieces)
    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=200))
    episode = await run_episode(policy, AskedAgain, PROMPT, EpisodeConfig())
    sample = episode.sample
    tokens, mask = expect(tokenizer, *pieces)
    start = len(expect(tokenizer, *QWEN3_EPISODE)[0])
    assert tokenizer.decode(sample.tokens) == "".join(text for _, text in pieces)
    assert (sample.tokens, sample.loss_mask, sample.context_starts) == (tokens, mask, (start,))
    assert (sample.reward, sample.turns[2].reward, len(sample.turns)) == (1.25, 0.25, 4)
    assert engine.requests == [*(tokens[: turn.start] for turn in sample.turns[:3]), tokens[start : sample.turns[3].start]]
    check_loss_mask(sample, tokenizer)
    found = await compute_trainer_log_probs(model, sample)
    torch.testing.assert_close(found[0] * torch.tensor(mask), torch.tensor(sample.rollout_log_probs), atol=1e-5, rtol=0)
    assert found[0][start] == 0


async def test_a_template_that_drops_earlier_thinking_is_refused_where_no_contexts_are_wanted():
    pieces = (*QWEN3_EPISODE, *QWEN3_SECOND_CONTEXT)
    tokenizer, _, engine = create_parts(QWEN3, "<|im_end|>", pieces)
    policy = EngineAgentPolicy(engine, tokenizer, SamplingParams(max_tokens=200))
    with pytest.raises(DataError, match=r"rewrites .* message 2 \(assistant\).*first 3\*4.*on_rewrite='branch'"):
        await run_episode(policy, AskedAgain, PROMPT, EpisodeConfig(on_rewrite="raise"))


async def test_one_answer_with_empty_thinking_does_not_end_a_run():
    class Empty:
        tokenizer = create_tokenizer(QWEN3)

        async def get_action(self, request):
            await trio.lowlevel.checkpoint()
            return AgentAction(tokens=encode(self.tokenizer, "<think>\n\n</think>\n\nhi<|im_end|>"))

    class Again(AskedAgain):
        def step(self, action):
            return Message(role="tool", content="r"), 0.5, False, {}

    sample = (await run_episode(Empty(), Again, PROMPT, EpisodeConfig(max_turns=3))).sample
    assert (sample.status, len(sample.turns), len(sample.context_starts)) == (Status.TRUNCATED, 3, 2)
    with pytest.raises(DataError, match="rewrites"):
        await run_episode(Empty(), Again, PROMPT, EpisodeConfig(max_turns=3, on_rewrite="raise"))


@pytest.mark.parametrize("name", TEMPLATES)
async def test_sampled_episodes_have_the_trainers_log_probs(name):
    template, eos, pieces = TEMPLATES[name]
    tokenizer, model, dictated = create_parts(template, eos, pieces)
    policy = EngineAgentPolicy(dictated.engine, tokenizer, SamplingParams(max_tokens=12))

    class Again(AskedAgain):
        async def step(self, action):
            return Message(role="tool", content=action[:3]), 0.5, False, {}

    sample = (await run_episode(policy, Again, PROMPT, EpisodeConfig(max_turns=3, on_rewrite="branch"), seed=5)).sample
    assert (sample.status, sample.reward, len(sample.turns)) == (Status.TRUNCATED, 1.5, 3)
    assert sum(sample.loss_mask) == sum(turn.end - turn.start for turn in sample.turns)
    found = await compute_trainer_log_probs(model, sample)
    torch.testing.assert_close(found[0] * torch.tensor(sample.loss_mask), torch.tensor(sample.rollout_log_probs), atol=1e-5, rtol=0)
