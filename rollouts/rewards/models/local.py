"""A reward model as a reward function: sequence classification with one label, with the score at the last token as reward.

    async with open_reward_model("path/to/reward-model", policy_tokenizer=tokenizer) as reward:
        config = RolloutConfig(batch_size=8, reward_fn=reward, ...)

Samples that wait at the same time are packed, without pads, into a few forward passes, in a thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import trio
from torch.nn.utils.rnn import pad_sequence

from rollouts.batches import plan_microbatches
from rollouts.chat.tokenize import prepare_sft_sample, render_messages, special_ids, tokenize_conversation
from rollouts.data.model_limits import find_context_length
from rollouts.data.samples import describe_sample, find_actions, sample_messages
from rollouts.errors import ConfigError, DataError, RewardError
from rollouts.models.forward.output_layers import get_value_head, read_value_head
from rollouts.models.forward.packing import pack_padded
from rollouts.models.forward.passes import run_native, run_packed
from rollouts.models.heads import load_reward_model, reads_turn_end
from rollouts.models.loading import load_tokenizer, parse_device
from rollouts.models.prepare import prepare_attention
from rollouts.models.tokens import describe_tokenizer, explain_token_differences
from rollouts.rewards.gathering import GatheredReward, gather_calls
from rollouts.types import Message, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TokenizeSample: TypeAlias = Callable[[Sample], Sequence[int]]
"""f(sample) -> the tokens that a reward model reads. Raises DataError for a sample that it cannot read."""


class RewardModel:
    """Scores of a frozen model. Every method runs at once, in the calling thread, one call at a time.

    Scores are float32, whatever the dtype of the weights. On one CPU thread a sample's score is, as a rule to the bit, independent of the
    samples scored together with it; elsewhere its last bits depend on them.
    """

    def __init__(self, model: PreTrainedModel, *, tokenize: TokenizeSample | None = None, max_tokens_per_batch: int = 16384) -> None:
        """
        Args:
            model: sequence classification with one label; its attention is replaced by one that stays inside packed rows.
            tokenize: None = read_tokens, for samples in the model's own tokens; see choose_tokenization.
            max_tokens_per_batch: most tokens in one forward pass; a longer sample gets one of its own.

        Raises: ConfigError for a model without such a head, or one that cannot run packed rows.
        """
        if max_tokens_per_batch < 1:
            raise ConfigError(f"max_tokens_per_batch is {max_tokens_per_batch}, expected at least 1")
        self.model = model
        self._head = get_value_head(model)
        self._tokenize = read_tokens if tokenize is None else tokenize
        self._max_tokens = max_tokens_per_batch
        cast("torch.nn.Module", model).requires_grad_(False).eval()
        self._run = run_native if prepare_attention(model) else run_packed
        self._num_embeddings = int(cast("Any", model).get_input_embeddings().weight.shape[0])
        self._context = find_context_length(model.config)

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of tokens, read at its last one; NaN and infinity are possible if the model overflows."""
        scores = torch.zeros(len(rows))
        for part in plan_microbatches([len(row) for row in rows], max_tokens=self._max_tokens) if rows else []:
            scores[part] = self._score_batch([rows[i] for i in part])
        return cast("list[float]", scores.tolist())

    def score_samples(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        """Return each sample's score, or its RewardError: unknown tokens, too many tokens, a score that is not finite."""
        results: list[float | RewardError] = []
        rows: dict[int, Sequence[int]] = {}
        for i, sample in enumerate(samples):
            try:
                rows[i] = self._read(sample)
                results.append(0.0)
            except (DataError, RewardError) as error:
                results.append(RewardError(f"the reward model cannot read {describe_sample(sample)}: {error}"))
        for i, score in zip(rows, self.score_rows(list(rows.values())), strict=True):
            finite = score - score == 0
            what = f"the reward model gives {describe_sample(samples[i])} the score {score}, expected a finite number: its weights overflow"
            results[i] = score if finite else RewardError(f"{what}. Load it with dtype float32, or train it with a lower learning rate")
        return results

    def _read(self, sample: Sample) -> Sequence[int]:
        row = self._tokenize(sample)
        if not row:
            raise RewardError("it has no tokens")
        if self._context is not None and len(row) > self._context:
            raise RewardError(f"it has {len(row)} tokens, more than the {self._context} of the model's context: make answers shorter")
        if min(row) < 0 or max(row) >= self._num_embeddings:
            raise RewardError(
                f"it has the token {max(row)}, and the model has {self._num_embeddings}: the sample is in the tokens of another "
                "tokenizer. Give open_reward_model the policy's tokenizer, so that the conversation is rendered anew"
            )
        return row

    def _score_batch(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        device = self._head.weight.device
        tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        packed = pack_padded(tokens, torch.tensor([len(row) for row in rows], device=device))
        with torch.no_grad():
            return read_value_head(self.model, self._run(self.model, packed)[packed.cu_seqlens[1:] - 1]).cpu()


@asynccontextmanager
async def open_reward_model(
    model: str | Path | PreTrainedModel | RewardModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    policy_tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    max_tokens_per_batch: int = 16384,
    max_samples: int = 512,
    trust_remote_code: bool = False,
) -> AsyncGenerator[GatheredReward]:
    """Open a reward function that asks a reward model, for the length of the block.

    Simultaneous calls are scored together; while the model runs, in a thread, further ones wait for the next batch, which counts against
    RewardConfig.timeout_s. A cancelled caller harms no other; leaving the block waits for the running batch.

    Args:
        model: a directory, a sequence-classification model, or a RewardModel, for which no other argument but max_samples counts.
        tokenizer: the reward model's; None with a directory = the one in it.
        policy_tokenizer: tokenizer of the samples' tokens. If it agrees with the reward model's, samples are read as they are; otherwise
            conversations are rendered and tokenized anew. None = they agree.
        dtype, device: dtype and device of weights loaded here.
        max_tokens_per_batch, max_samples: most tokens in one forward pass, and most samples in one batch, which may take several passes.

    Raises: ConfigError for a directory that is not a reward model; DataError for one without a tokenizer.
    """
    if not isinstance(model, RewardModel):
        if isinstance(model, str | Path):
            tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code) if tokenizer is None else tokenizer
            model = load_reward_model(model, dtype=dtype, device=parse_device(device), trust_remote_code=trust_remote_code)
        tokenize = read_tokens
        if policy_tokenizer is not None:
            if tokenizer is None:
                raise ConfigError("a policy_tokenizer is given, but not the tokenizer of the reward model to compare it with: give both")
            tokenize = choose_tokenization(model, tokenizer, policy_tokenizer)
        model = RewardModel(model, tokenize=tokenize, max_tokens_per_batch=max_tokens_per_batch)
    scorer = model

    async def score(samples: Sequence[Sample]) -> list[float | RewardError]:
        return await trio.to_thread.run_sync(scorer.score_samples, samples)

    async with gather_calls(score, name="reward model", max_samples=max_samples) as reward:
        yield reward


# -- choice of tokens


def read_tokens(sample: Sample, *, turn_end: int | None = None, ending: Sequence[int] = ()) -> Sequence[int]:
    """Return a sample's tokens; with several contexts those of the last, which is the conversation at its end.

    Args:
        turn_end, ending: a sample that ends with turn_end gets `ending` behind it: the template's text after an assistant message.
    """
    start = sample.context_starts[-1] if sample.context_starts else 0
    tokens = sample.tokens[start:]
    return (*tokens, *ending) if tokens and tokens[-1] == turn_end else tokens


def render_tokens(sample: Sample, *, tokenizer: PreTrainedTokenizerBase, to_turn_end: bool = False) -> Sequence[int]:
    """Return a sample's conversation in the tokens of another model's tokenizer.

    A chat template renders it, with a prompt that is a text as a message of the user. Without a template such a prompt and the response are
    joined, with the end-of-text token behind them if the response is complete.

    Args:
        to_turn_end: leave out the template's text behind the last assistant message (see reads_turn_end). The end-of-turn token of an
            answer that was cut off is left out in any case: the model did not write one.

    Raises: DataError if messages are to be rendered without a template, or the template refuses them.
    """
    if not getattr(tokenizer, "chat_template", None) and isinstance(sample.prompt, str) and sample.messages is None:
        tokens = prepare_sft_sample(tokenizer, {"prompt": sample.prompt, "completion": sample.response}).tokens
        return tokens if sample.status is not Status.TRUNCATED else tokens[:-1]
    messages = sample_messages(sample)
    is_cut = sample.status is Status.TRUNCATED and find_actions(sample)[-1:] == (len(messages) - 1,)
    if to_turn_end or is_cut:
        tokenized = tokenize_conversation(tokenizer, messages, last_assistant_only=True)
        end = tokenized.spans[-1][1]
        return tokenized.tokens[: end - 1 if is_cut and tokenized.tokens[end - 1] in special_ids(tokenizer) else end]
    text = render_messages(tokenizer, messages, template_kwargs={})
    return cast("list[int]", tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def choose_tokenization(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase
) -> TokenizeSample:
    """Return read_tokens if the two tokenizers make the same tokens of the same conversations, otherwise render_tokens."""
    to_turn_end = reads_turn_end(model)
    if explain_tokenizer_differences(policy_tokenizer, tokenizer):
        return partial(render_tokens, tokenizer=tokenizer, to_turn_end=to_turn_end)
    if to_turn_end or not getattr(tokenizer, "chat_template", None):
        return read_tokens
    turn_end, ending = find_template_ending(tokenizer)
    return partial(read_tokens, turn_end=turn_end, ending=ending)


def explain_tokenizer_differences(policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Explain why a reward model with `tokenizer` cannot read the policy's tokens as they are; an empty list if it can.

    Pad tokens may differ, because nobody reads them; chat templates may not, because they are in the tokens.
    """
    policy, other = (replace(describe_tokenizer(t, len(t)), special_ids={}) for t in (policy_tokenizer, tokenizer))
    found = explain_token_differences(policy, other)
    if getattr(policy_tokenizer, "chat_template", None) != getattr(tokenizer, "chat_template", None):
        found.append("the chat templates differ")
    return found


def find_template_ending(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, tuple[int, ...]]:
    """Return the last token of an assistant message, and the tokens that the chat template puts behind it at a conversation's end."""
    messages = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    tokenized = tokenize_conversation(tokenizer, messages, last_assistant_only=True)
    end = tokenized.spans[-1][1]
    return tokenized.tokens[end - 1], tokenized.tokens[end:]
