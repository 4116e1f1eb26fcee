"""The doctor on the training of a reward model: its checks pass on parts that are right, and each catches one that is broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import CHATML, create_tokenizer

from integration.doctor.__main__ import main
from integration.doctor.findings import Finding
from integration.doctor.heads import check_gradient
from integration.doctor.numbers import check_repeats, choose_rows, compare_splits
from integration.doctor.resume import REWARD_MODEL, shorten
from integration.doctor.reward_model import (
    check_heldout,
    check_ranking,
    check_scored_tokens,
    check_scores,
    create_score_reference,
    examine_reward_model,
)
from integration.train_reward_model import parse
from rollouts.algorithms.preferences import pair_mean, score_loss
from rollouts.backends.factory import create_reward_model_backend
from rollouts.chat.char_tokenizer import create_char_tokenizer
from rollouts.data.preference_pairs import PreferencePair, collate_pairs, prepare_preference_pair
from rollouts.models.heads import create_reward_model
from rollouts.reward_model_loop import score_pairs
from rollouts.testing import create_tiny_model
from rollouts.training.rollout_batch import select_values

ROWS = [[3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
SMALL = "--model.hidden-size 32 --model.intermediate-size 32 --model.num-layers 1 --data.num-pairs 64 --data.num-heldout 32".split()


def pair_of(prompt: str, chosen: str, rejected: str) -> PreferencePair:
    return prepare_preference_pair(create_char_tokenizer(64), {"prompt": prompt, "chosen": chosen, "rejected": rejected})


PAIRS = [pair_of(f"s{k}27=", f"27{k}", f"{k}2") for k in range(3, 7)]


def create_scorer(**options: Any) -> Any:
    return create_reward_model(create_tiny_model(**options))


def create_backend(model: Any) -> Any:
    return create_reward_model_backend(model, lr=1e-3, total_steps=10)


# -- texts


def test_answers_that_are_scored_behind_their_text_pass():
    tokenizer, answers = create_char_tokenizer(64), [answer for pair in PAIRS for answer in (pair.chosen, pair.rejected)]
    finding = check_scored_tokens(tokenizer, answers, frozenset())
    assert finding.status == "pass" and "8 of 8 at a token that ends it ('<|eos|>')" in finding.found
    chat = prepare_preference_pair(create_tokenizer(CHATML), {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"})
    assert check_scored_tokens(create_tokenizer(CHATML), [chat.chosen, chat.rejected], frozenset()).status == "pass"


def test_answers_that_are_scored_elsewhere_are_caught():
    tokenizer, answer = create_char_tokenizer(64), PAIRS[0].chosen
    early = replace(answer, loss_mask=(*answer.loss_mask[2:], 0.0, 0.0))
    finding = check_scored_tokens(tokenizer, [early], frozenset())
    assert finding.status == "fail" and "which is not all of it" in finding.found
    twice = replace(answer, loss_mask=(*answer.loss_mask[:-2], 1.0, 1.0))
    assert "is scored at 2 tokens" in check_scored_tokens(tokenizer, [twice], frozenset()).found
    cut = replace(answer, tokens=answer.tokens[:-1], loss_mask=(*answer.loss_mask[:-2], 1.0))
    finding = check_scored_tokens(tokenizer, [answer, cut], frozenset())
    assert finding.status == "warn" and "1 of 2 at a token that ends it" in finding.found


def test_held_out_pairs_that_are_trained_on_are_caught():
    others = [pair_of(f"s{k}99=", "1", "2") for k in range(4)]
    assert check_heldout(PAIRS, others).status == "pass"
    again = pair_of("s327=", "1", "2")  # another answer to a prompt of the training
    assert check_heldout(PAIRS, [*others, again]).status == "warn"
    assert check_heldout(PAIRS, [again]).status == "fail"


# -- numbers


async def test_a_right_reward_model_passes():
    model = create_scorer()
    rows = choose_rows(ROWS, window=None, context=512, vocab_size=64)
    backend = create_backend(model)
    reference = create_score_reference(create_scorer())
    assert (await check_scores(backend, reference, rows, precision="float32", window=None)).status == "pass"
    assert (await check_repeats(backend, rows, select_values, name="scores repeat")).status == "pass"


async def test_scores_of_other_weights_and_scores_that_are_not_finite_are_caught():
    rows = choose_rows(ROWS, window=None, context=512, vocab_size=64)
    other = create_score_reference(create_scorer(seed=5))
    assert (await check_scores(create_backend(create_scorer()), other, rows, precision="float32", window=None)).status == "fail"
    broken = create_backend(create_scorer())
    with torch.no_grad():
        broken.model.score.weight.fill_(float("nan"))
    right = create_score_reference(create_scorer())
    assert (await check_scores(broken, right, rows, precision="float32", window=None)).status == "fail"


async def test_an_ignored_window_is_caught_and_rows_that_cannot_show_it_are_told():
    from transformers import MistralConfig, MistralForCausalLM

    def create(window: int | None) -> Any:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(3)
        return create_reward_model(
            MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256, sliding_window=window)).eval()
        )

    reference = create_score_reference(create(16))
    check: dict[str, Any] = {"precision": "float32", "window": 16}
    rows = choose_rows(ROWS, window=16, context=256, vocab_size=64)
    assert (await check_scores(create_backend(create(16)), reference, rows, **check)).status == "pass"
    assert (await check_scores(create_backend(create(None)), reference, rows, **check)).status == "fail"
    short = choose_rows(ROWS, window=16, context=12, vocab_size=64)
    blind = await check_scores(create_backend(create(None)), create_score_reference(create(None)), short, **check)
    assert blind.status == "warn" and "none is longer than a window" in blind.found


async def test_dropout_is_caught():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    backend = create_backend(create_reward_model(LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.5)), head_std=1.0))
    backend.model.eval = lambda: backend.model.train(True)  # a backend that forgets to turn dropout off
    rows = choose_rows(ROWS, window=None, context=512, vocab_size=64)
    assert (await check_repeats(backend, rows, select_values, name="scores repeat")).status == "fail"


async def test_a_trained_model_that_prefers_the_rejected_answers_is_told():
    pairs = [pair_of(f"s{k}=", f"{k * 7 % 50}", f"{k * 3 % 40}0") for k in range(40)]
    backend = create_backend(create_scorer())
    chosen, rejected = await score_pairs(backend, pairs)
    right = [
        pair if good else replace(pair, chosen=pair.rejected, rejected=pair.chosen)
        for pair, good in zip(pairs, chosen > rejected, strict=True)
    ]
    assert (await check_ranking(backend, right, is_trained=True)).status == "pass"
    turned = [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in right]
    finding = await check_ranking(backend, turned, is_trained=True)
    assert finding.status == "warn" and "are chosen and rejected exchanged" in finding.advice
    assert (await check_ranking(backend, turned, is_trained=False)).status == "pass", "a new head ranks at random"


async def check_now(backend: Any, pairs: Sequence[PreferencePair] = PAIRS) -> Finding:
    batch = collate_pairs(pairs)
    batch = replace(batch, loss_weights=pair_mean(batch))
    loss = partial(score_loss, margin_from_rewards=True)
    return await check_gradient("reward model", backend, backend.model, batch, loss, told="scores of 4 pairs", broken="train it")


async def test_weights_that_the_gradient_does_not_reach_are_told():
    backend = create_backend(create_scorer())
    assert (await check_now(backend)).status == "pass"
    for name, weight in backend.model.named_parameters():
        weight.requires_grad_(name.startswith("score."))
    finding = await check_now(backend)
    assert finding.status == "warn" and "embed_tokens" in finding.found and "reward model says" in finding.advice


async def test_a_loss_that_depends_on_its_split_is_caught():
    def mean_of_means(outputs: Any, batch: Any) -> Any:
        return score_loss(outputs, replace(batch, loss_weights=pair_mean(batch)))

    batch = collate_pairs(PAIRS)
    batch = replace(batch, loss_weights=pair_mean(batch))
    parts = [[0, 1, 2, 3, 4, 5], [6, 7]]
    for loss, status in ((score_loss, "pass"), (mean_of_means, "fail")):
        assert (await compare_splits(create_backend(create_scorer()), batch, parts, loss, precision="float32")).status == status


# -- the command


async def diagnose(*argv: str) -> dict[str, Finding]:
    threads = torch.get_num_threads()
    found = await examine_reward_model(parse([*SMALL, *argv]).config, num_rows=4, say=lambda text: None)
    torch.set_num_threads(threads)
    return {finding.check: finding for finding in found}


async def test_pairs_of_the_built_in_task_pass_all_checks():
    found = await diagnose()
    assert {finding.status for finding in found.values()} == {"pass"}, found
    assert len(found) == 11


async def test_a_users_pairs_are_examined_with_a_saved_reward_model(tmp_path: Path):
    create_scorer(vocab_size=99).save_pretrained(tmp_path / "scorer")
    create_char_tokenizer(99).save_pretrained(str(tmp_path / "scorer"))
    rows = [{"prompt": f"say {k}27", "chosen": f"{k}27 and more", "rejected": f"{k}"} for k in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--model.path", str(tmp_path / "scorer"), "--data.path", str(tmp_path / "pairs.jsonl")]
    found = await diagnose(*own, "--data.eval-path", str(tmp_path / "pairs.jsonl"))
    assert found["held-out pairs"].status == "fail" and found["preferences"].status == "warn"
    assert found["scores"].status == found["reward model"].status == found["scored tokens"].status == "pass"


def test_the_command_takes_the_options_of_the_reward_model(capsys: pytest.CaptureFixture[str]):
    assert main(["train-reward-model", "--resume", "--output-dir", "nowhere"]) == 2
    assert "nowhere has no config.json" in capsys.readouterr().err
    assert main(["train-reward-model", "--data.eval-path", "a.jsonl"]) == 2
    assert "--data.eval-path is 'a.jsonl', but there is no --data.path" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train-reward-model", "--rl.num-steps", "3"])
    assert "--rl.num-steps" in capsys.readouterr().err
    short = parse(["--training.num-steps", "500", "--log", "wandb", *shorten(REWARD_MODEL), "--output-dir", "x"])
    assert (short.config.training.num_steps, short.config.loggers, short.config.output_dir) == (3, (), "x")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_training_goes_on_with_the_same_numbers(capsys: pytest.CaptureFixture[str]):
    assert main(["train-reward-model", *SMALL, "--rows", "3", "--json"]) == 0
    statuses = {finding["check"]: finding["status"] for finding in json.loads(capsys.readouterr().out)}
    assert statuses["resume"] == "pass" and set(statuses.values()) == {"pass"}


def test_the_page_names_each_check():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for check in ("scored tokens", "held-out pairs", "scores", "scores repeat", "ranking before training", "reward model"):
        assert f"| {check} |" in page, check
    assert "rollouts doctor train-reward-model --data.path" in page
