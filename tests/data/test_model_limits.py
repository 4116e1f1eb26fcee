"""Rows that a model cannot be given are refused by name, before anything is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import make_row

from integration.parts.model_settings import check_limits
from integration.settings.config import Config
from integration.settings.sections.generation import GenerationSection
from integration.settings.sections.model import ModelSection
from integration.tasks.own_data import OwnData, create_jsonl_task
from rollouts.algorithms.loss_weights import token_mean
from rollouts.algorithms.losses import sft_loss
from rollouts.backends.factory import create_pytorch_backend, create_reward_model_backend
from rollouts.backends.fsdp.factory import create_fsdp_backend
from rollouts.backends.functional.backend import create_torch_func_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.config import RewardModelTrainingConfig, SFTTrainingConfig
from rollouts.data.collate import collate_samples
from rollouts.data.datasets import load_sft_conversations, prepare_sft_samples
from rollouts.data.model_limits import ModelLimits, check_tokenizer, explain_sample, find_context_length, read_config_limits, read_limits
from rollouts.data.preference_pairs import PreferencePair, load_preference_pairs
from rollouts.engines.inprocess.engine import InProcessEngine
from rollouts.errors import ConfigError, DataError
from rollouts.reward_model_loop import train_reward_model
from rollouts.sft_loop import run_sft_training
from rollouts.testing import create_tiny_model

CONTEXT, VOCABULARY = 512, 64  # of the tiny model
TOO_LONG, AT_THE_LIMIT, FOREIGN = (3,) * (CONTEXT + 1), (3,) * CONTEXT, (3, 4, VOCABULARY)


def make_config(kind: str, **settings: Any) -> Any:
    from transformers import CONFIG_MAPPING

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    return CONFIG_MAPPING[kind](**{**sizes, **settings})


def test_the_context_is_what_the_architecture_calls_so():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    phi = make_config("phi3", max_position_embeddings=64, original_max_position_embeddings=32, rope_parameters=rope)
    assert find_context_length(phi) == 32  # beyond it a pass has other frequencies, for its shorter rows too
    told = read_config_limits(phi).explain(33, 3, 3)
    assert told is not None and told.startswith("has 33 tokens, more than the 32 of the model's original_max_position_embeddings, beyond")
    assert find_context_length(make_config("llama", max_position_embeddings=64)) == 64
    assert find_context_length(make_config("gpt2", n_positions=48, n_embd=16, n_head=2, n_layer=1)) == 48
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    assert find_context_length(make_config("llama", max_position_embeddings=64, rope_parameters=yarn)) == 64
    assert find_context_length(make_config("bloom", n_layer=1, n_head=2)) is None
    assert read_limits(create_tiny_model()) == ModelLimits(VOCABULARY, CONTEXT)


def test_learned_positions_serve_all_of_the_context_and_no_more():
    from transformers import OPTForCausalLM

    config = make_config("opt", max_position_embeddings=20, ffn_dim=16, word_embed_proj_dim=16)
    backend = create_pytorch_backend(OPTForCausalLM(config).eval(), lr=1e-3)
    backend.forward(collate_samples([make_row((3,) * 20)]), lambda outputs: outputs.log_probs)
    with pytest.raises(DataError, match="21 tokens, more than the 20"):
        backend.forward(collate_samples([make_row((3,) * 21)]), lambda outputs: outputs.log_probs)


def create_jax(model: Any, **options: Any) -> Any:
    from rollouts.backends.jax.backend import create_jax_backend

    return create_jax_backend(model, **options)


@pytest.mark.parametrize(
    "create", [create_pytorch_backend, partial(create_torch_func_backend, total_steps=1), create_fsdp_backend, create_jax]
)
def test_every_backend_refuses_what_its_model_cannot_be_given(create: Any):
    backend = create(create_tiny_model(), lr=1e-3)
    before = backend.get_weights().value
    for bad, message in (
        (TOO_LONG, "has 513 tokens, more than the 512"),
        (FOREIGN, "has the token id 64, outside of the model's 64 embeddings"),
    ):
        batch = collate_samples([make_row((3, 4, 5)), make_row(bad)])
        batch = replace(batch, loss_weights=token_mean(batch))
        for call in (
            lambda batch=batch: backend.forward(batch, lambda outputs: outputs.log_probs),
            lambda batch=batch: backend.forward_backward(batch, sft_loss),
        ):
            with pytest.raises(DataError, match=f"row 1 of 2 of a batch {message}"):
                call()
    good = collate_samples([make_row((3, 4)), make_row((3, 4, 5))], pad_id=VOCABULARY + 5)  # a pad is no token of a row
    assert read_limits(create_tiny_model()).context_length == CONTEXT
    if create is create_pytorch_backend:
        backend.forward(good, lambda outputs: outputs.log_probs)
        contexts = replace(collate_samples([make_row(TOO_LONG, context_starts=(300,))]))
        backend.forward(contexts, lambda outputs: outputs.log_probs)  # each context is a sequence of its own
    assert all(torch.equal(value, before[name]) for name, value in backend.get_weights().value.items())


async def test_sft_names_the_sample_before_its_first_step():
    backend = create_pytorch_backend(create_tiny_model(), lr=1e-3)
    before = backend.get_weights().value
    fine = [make_row((3, 4, 5))] * 40
    for bad, message in ((TOO_LONG, "sample 40 has 513 tokens"), (FOREIGN, "sample 40 has the token id 64")):
        with pytest.raises(DataError, match=message):
            await run_sft_training(backend, [*fine, make_row(bad)], SFTTrainingConfig(num_steps=1, batch_size=1))
    assert all(torch.equal(value, before[name]) for name, value in backend.get_weights().value.items())
    await run_sft_training(backend, [make_row(AT_THE_LIMIT)], SFTTrainingConfig(num_steps=1, batch_size=1))


async def test_pairs_are_checked_before_the_first_step_too():
    backend = create_reward_model_backend(create_tiny_model(), lr=1e-3)
    good = PreferencePair(make_row((3, 4)), make_row((3, 5)))
    bad = PreferencePair(make_row((3, 4)), make_row(TOO_LONG))
    config = RewardModelTrainingConfig(num_steps=1, batch_size=1)
    with pytest.raises(DataError, match="the rejected answer of pair 1 has 513 tokens"):
        await train_reward_model(backend, [good, bad], config)
    with pytest.raises(DataError, match="the rejected answer of held-out pair 0 has 513 tokens"):
        await train_reward_model(backend, [good], config, heldout=[bad])


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_files_are_refused_with_file_and_line_or_cut(tmp_path: Path):
    tokenizer, limits = create_char_tokenizer(), ModelLimits(128, 12)
    path = write_rows(tmp_path / "sft.jsonl", [{"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "c" * 40}])
    rows = load_sft_conversations(path)
    with pytest.raises(DataError, match=r"sft.jsonl, line 2: the conversation has 4\d tokens, more than the 12 of the model's context"):
        prepare_sft_samples(tokenizer, rows, limits=limits)
    kept = prepare_sft_samples(tokenizer, rows, limits=limits, skip_bad_rows=True)
    assert (len(kept), len(kept.bad_rows)) == (1, 1)
    for max_length, expected in ((None, 12), (8, 8), (30, 12)):
        cut = prepare_sft_samples(tokenizer, rows, limits=limits, max_length=max_length, on_overflow="truncate")
        assert len(cut[1].tokens) == expected
    with pytest.raises(DataError, match=r"sft.jsonl, line 1: the conversation has the token id \d+, outside of the model's 5 embeddings"):
        prepare_sft_samples(tokenizer, rows, limits=ModelLimits(5, None))
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "ab", "chosen": "c" * 40, "rejected": "d"}])
    with pytest.raises(DataError, match=r"pairs.jsonl, line 1: chosen: the answer with its prompt has 4\d tokens, more than the 12"):
        load_preference_pairs(tokenizer, pairs, limits=limits)


def test_prompts_that_leave_no_room_for_an_answer_are_refused_with_file_and_line(tmp_path: Path):
    rows = [{"prompt": "a" * (5 + 4 * (i == 7)), "ground_truth": "b"} for i in range(10)]
    path = write_rows(tmp_path / "rl.jsonl", rows)
    tokenizer = create_char_tokenizer()
    create_jsonl_task(tokenizer, OwnData(path=path, limits=ModelLimits(128, 32), with_sft=False))
    with pytest.raises(DataError, match=r"rl.jsonl, line 8: the prompt has \d+ tokens, which leave no room for a response .* of 9:"):
        create_jsonl_task(tokenizer, OwnData(path=path, limits=ModelLimits(128, 9), with_sft=False))


def test_a_tokenizer_of_more_ids_than_embeddings_is_refused_when_it_is_loaded(tmp_path: Path):
    tokenizer, model = create_char_tokenizer(VOCABULARY), create_tiny_model(vocab_size=VOCABULARY - 4)
    with pytest.raises(ConfigError, match=rf"Qwen3ForCausalLM: the tokenizer has the id {VOCABULARY - 1}.*; 4 such ids.* 60 embeddings"):
        create_pytorch_backend(model, lr=1e-3, tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="4 such ids"):
        create_fsdp_backend(tmp_path, lr=1e-3)
    with pytest.raises(ConfigError, match="4 such ids"):  # the dry run, from the configuration alone
        check_limits(Config(model=ModelSection(path=str(tmp_path))), "sft")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    check_tokenizer(tokenizer, VOCABULARY, "as published models have it")
    tokenizer.pad_token = "<image>"
    with pytest.raises(ConfigError, match=r"<image>.*; 1 such ids"):
        check_tokenizer(tokenizer, VOCABULARY, "here")


def test_a_budget_that_no_answer_can_use_is_refused_before_a_run():
    config = Config(generation=GenerationSection(max_tokens=128))
    with pytest.raises(ConfigError, match=r"generation.max_tokens is 128, but the model's context has 128 tokens"):
        check_limits(config, "rl")
    check_limits(config, "sft")
    check_limits(Config(), "sft+rl")
    with pytest.raises(ConfigError, match="max_length is 513, more than the model's context of 512"):
        InProcessEngine(create_tiny_model(), max_length=513)


def test_contexts_of_an_episode_count_one_by_one():
    limits = ModelLimits(8, 4)
    assert explain_sample(make_row((3,) * 7, context_starts=(4,)), limits) is None
    assert "has 5 tokens" in str(explain_sample(make_row((3,) * 7, context_starts=(5,)), limits))
