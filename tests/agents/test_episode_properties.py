"""Episodes of random policies in random environments: what holds for all of them."""

from __future__ import annotations

import json
from functools import partial

import trio
from chat_templates import CHATML, LLAMA3, QWEN3, create_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from rollouts.agents.config import EpisodeConfig
from rollouts.agents.policies import EngineAgentPolicy
from rollouts.agents.run import run_episode
from rollouts.agents.samples import check_loss_mask, sample_to_steps, split_turns
from rollouts.agents.setting import EpisodeSetting
from rollouts.chat.templates import LLAMA2, ZEPHYR
from rollouts.outcomes import StopReason
from rollouts.seeds import derive_seed
from rollouts.testing import FakeEngine
from rollouts.types import Message, Prompt, Sample, SamplingParams, Status

TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"), "qwen3": (QWEN3, "<|im_end|>"),
             "llama2": (LLAMA2, "<|endoftext|>"), "zephyr": (ZEPHYR, "<|endoftext|>"), "text": (None, "<|endoftext|>")}  # fmt: skip
TOKENIZERS = {name: create_tokenizer(*template) for name, template in TEMPLATES.items()}
PIECES = ("a", " ", "\n", "{", "<think>", "</think>", "<tool_call>", "<|im_start|>", "<|begin_of_text|>", "<|endoftext|>", ".", "\n\n")


def random_engine(tokenizer, calls):
    """Says anything at all, special tokens included, and ends by the end of text, or by being cut."""
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in PIECES]

    def answer(prompt, seed):
        length = derive_seed(seed, 0) % 6
        tokens = [token for k in range(length) for token in ids[derive_seed(seed, 1, k) % len(ids)] if token != tokenizer.eos_token_id]
        return (*tokens, tokenizer.eos_token_id)

    return FakeEngine(answer, calls=calls)


class Scripted:
    """Answers from a list, pays by the length of actions, and fails at given steps."""

    def __init__(self, replies, log):
        self.replies, self.log, self.number, self.closed = replies, log, 0, False
        log.append(self)

    def reset(self, config):
        return f"start {config.seed % 10}"

    def step(self, action):
        reply = self.replies[self.number % len(self.replies)]
        self.number += 1
        if reply is None:
            raise ValueError("broken")
        return reply, len(action) / 4, self.number == len(self.replies) + 2, {"seen": action}

    def get_state_description(self):
        return "described"

    def get_prompt_prefix(self):
        return "rules"

    def close(self):
        self.closed = True


REPLIES = st.one_of(
    st.text(alphabet="ab \n<|im_end|>", max_size=6),
    st.builds(lambda text: Message(role="user", content=text), st.text(alphabet="x \n", max_size=3)),
    st.integers(0, 3),
    st.none(),
)


@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    replies=st.lists(REPLIES, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    max_turns=st.integers(1, 5),
    max_tokens=st.none() | st.integers(1, 12),
    max_context=st.none() | st.integers(30, 200),
    max_turn_tokens=st.integers(1, 5),
)
def test_whatever_happens_an_episode_is_a_sample_that_says_so(name, replies, seed, max_turns, max_tokens, max_context, max_turn_tokens):
    tokenizer = TOKENIZERS[name]
    config = EpisodeConfig(max_turns=max_turns, max_tokens=max_tokens, max_context=max_context, max_turn_tokens=max_turn_tokens,
                           on_rewrite="branch", on_error="drop", stop_regex="aa")  # fmt: skip
    environments, calls = [], []
    setting = EpisodeSetting(environment_factory=lambda: Scripted(replies, environments), config=config, seed=seed)
    policy = EngineAgentPolicy(random_engine(tokenizer, calls), tokenizer, SamplingParams(max_tokens=8))
    play = partial(run_episode, policy, setting, Prompt(content="", index=seed % 7))
    episode = trio.run(play)
    sample, turns = episode.sample, episode.sample.turns
    assert all(environment.closed for environment in environments)
    asked = [call.arguments for call in calls]
    given_tokens = [(0, *sample.context_starts)[sum(start <= turn.start for start in sample.context_starts)] for turn in turns]
    assert [call["prompt_tokens"] for call in asked[: len(turns)]] == [
        sample.tokens[start : turn.start] for start, turn in zip(given_tokens, turns, strict=True)
    ], "the policy saw what the sample says"
    assert sum(sample.loss_mask) == sum(turn.end - turn.start for turn in turns)
    assert [t for t, mask in enumerate(sample.loss_mask) if mask] == [t for turn in turns for t in range(turn.start, turn.end)]
    assert sample.rollout_log_probs == tuple(-0.5 * mask for mask in sample.loss_mask)
    assert sample.weight_versions == tuple(0 if mask else -1 for mask in sample.loss_mask)
    assert len(turns) - len(episode.steps) in ((0, 1) if episode.stop_reason is StopReason.ERROR else (0,))
    assert (sample.status is Status.FAILED) == (episode.stop_reason is StopReason.ERROR) == (sample.reward is None)
    if sample.status is not Status.FAILED:
        assert sample.reward == episode.total_reward == sum(turn.reward for turn in turns)
        assert sample_to_steps(sample) == episode.steps
        assert (sample.status is Status.COMPLETED) == (episode.stop_reason in (StopReason.DONE, StopReason.AGENT, StopReason.REGEX))
        assert max_tokens is None or sum(sample.loss_mask) <= max_tokens
        assert len(turns) <= max_turns
        assert turns[-1].end == len(sample.tokens), "nothing stands behind the last action"
    if turns:
        check_loss_mask(sample, tokenizer)
        assert all(max_context is None or len(part.tokens) <= max_context for part in split_turns(sample))
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert trio.run(play).sample == sample
