"""The examination of a reward model's training before it starts: model, tokenizer, pairs and scores, as the run would make them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from integration.doctor.examine import Say, attempt, count_answers, take_answers
from integration.doctor.findings import Finding, judge, skip
from integration.doctor.heads import MOST_TOKENS, check_gradient
from integration.doctor.numbers import check_repeats, choose_rows, compare_splits, find_window
from integration.doctor.texts import check_pairs, check_refused, check_template, check_tokenizer
from integration.expressions.loggers import check_loggers
from integration.parts.hub_models import find_models
from integration.parts.model_settings import check_optimizers
from integration.run.reward_model import create_pairs, create_reward_backend, create_start
from integration.settings.reward_model import RewardModelConfig
from rollouts.algorithms.preferences import pair_mean, score_loss
from rollouts.backends.futures import open_pipeline
from rollouts.backends.protocol import TrainingBackend
from rollouts.data.collate import collate_samples
from rollouts.data.model_limits import read_config_limits
from rollouts.data.preference_pairs import PreferencePair, collate_pairs
from rollouts.data.rows.loaded import hash_question
from rollouts.engines.inprocess.engine import find_eos_ids
from rollouts.errors import DataError
from rollouts.reward_model_loop import evaluate_reward_model
from rollouts.training.rollout_batch import select_values
from rollouts.training.steps import submit_forward
from rollouts.types import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ScoreFn = Callable[[Sequence[int]], float]
"""Tokens to the score of all of them: the forward pass that others are compared with."""

_SEEN = 120  # characters of a text in a message
_RELATIVE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.03}  # difference of scores that rounding explains, as a share of the largest
_MOST_RANKED = 256  # held-out pairs
_FEWEST_RANKED = 16  # held-out pairs below which their ranking is not judged
_REVERSED = 0.35  # share of pairs ranked right, below which a reward model that was trained before prefers the rejected answers


async def examine_reward_model(config: RewardModelConfig, *, num_rows: int, say: Say) -> list[Finding]:
    """Run all checks but that of resuming. Returns their findings, in the order of the table.

    Args:
        num_rows: pairs to try.
        say: is told what is being checked.
    """
    precision = str(config.backend.precision(config.model.device))
    check_optimizers(config.backend, {"training": config.training.optimizer}, precision=precision)
    check_loggers(config.loggers)
    _, config = find_models(config, quiet=True)
    say("loading the model and the pairs")
    model, tokenizer = create_start(config)
    try:
        train, heldout = create_pairs(config, model, tokenizer, say)
    except DataError as error:
        return check_refused(error, tokenizer)
    say("texts: tokenizer, chat template, scored tokens, pairs")
    answers = take_answers(train, num_rows)
    findings = [
        check_tokenizer(tokenizer, read_config_limits(model.config).num_embeddings, [a.response for a in answers if a.response.strip()]),
        check_template(tokenizer, several_turns=any(count_answers(answer) > 1 for answer in answers)),
        check_scored_tokens(tokenizer, answers, frozenset(find_eos_ids(model, tokenizer))),
        check_pairs(train),
        check_heldout(train, heldout),
    ]
    window, limits = find_window(model.config), read_config_limits(model.config)
    tokens = [answer.tokens for answer in answers]
    rows = choose_rows(tokens, window=window, context=limits.context_length, vocab_size=limits.num_embeddings)
    reference = create_score_reference(copy.deepcopy(model))
    backend = create_reward_backend(config, model, tokenizer)
    compare: dict[str, Any] = {"precision": precision, "window": window}
    batch = collate_pairs(train[:num_rows])
    batch = replace(batch, loss_weights=pair_mean(batch))
    parts = [[2 * pair, 2 * pair + 1] for pair in range(batch.num_rows // 2)]
    loss = partial(score_loss, margin_from_rewards=True)
    broken = "nothing of the model can be trained: give --model.path a language model or a reward model with weights of its own"
    async with open_pipeline(backend) as trainer:
        say("scores against transformers")
        findings += await attempt("scores", partial(check_scores, trainer, reference, rows, **compare))
        findings += await attempt("scores repeat", partial(check_repeats, trainer, rows, select_values, name="scores repeat"))
        is_trained = config.model.path is not None and is_start_trained(config.model.path)
        ranked = heldout[:_MOST_RANKED]
        findings += await attempt("ranking before training", partial(check_ranking, trainer, ranked, is_trained=is_trained))
        told = f"scores of {len(train[:num_rows])} pairs"
        check = partial(check_gradient, "reward model", trainer, backend.model, batch, loss, told=told, broken=broken)
        findings += await attempt("reward model", check)
        if len(parts) < 2:
            findings.append(skip("splits change nothing", "one pair alone cannot be split"))
        else:
            split = partial(compare_splits, trainer, batch, parts, loss, precision=precision, option="--training.max-tokens-per-microbatch")
            findings += await attempt("splits change nothing", split)
        findings += await attempt("speed of the trainer", partial(measure_speed, trainer, rows, 2 * config.training.batch_size))
    return findings


def check_scored_tokens(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Sample], stop_ids: frozenset[int]) -> Finding:
    """Check that each answer is scored at one token, behind all of its text, and that this token ends it.

    Args:
        stop_ids: ids at which generation ends.
    """
    name = "scored tokens"
    at: list[int] = []
    for answer in answers:
        marked = [position for position, mask in enumerate(answer.loss_mask) if mask > 0]
        read = tokenizer.decode(list(answer.tokens[: marked[-1] + 1]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        missing = "".join(answer.response.split()) not in "".join(str(read).split())
        if len(marked) != 1 or missing:
            where = f"at {len(marked)} tokens" if len(marked) != 1 else f"behind {str(read)[-_SEEN:]!r}, which is not all of it"
            found = f"the answer {answer.response[:_SEEN]!r} is scored {where}"
            advice = "the score would be that of another text: look at the chat template, and at --data.max-length"
            return judge(name, found, fails=True, advice=advice)
        at += [answer.tokens[marked[0]]] if answer.status is Status.COMPLETED else []
    ends = stop_ids | set(tokenizer.all_special_ids)
    ended = sum(token in ends for token in at)
    names = ", ".join(repr(tokenizer.convert_ids_to_tokens(token)) for token in sorted(set(at) & ends))
    found = (
        f"each of {len(answers)} answers is scored once, behind its text; {ended} of {len(at)} at a token that ends it ({names or 'none'})"
    )
    advice = "the others are scored at a word, so that the same answer gets another score where it goes on: end answers with an end token"
    return judge(name, found, warns=ended < len(at), advice=advice)


def check_heldout(train: Sequence[PreferencePair], heldout: Sequence[PreferencePair]) -> Finding:
    """Check that held-out pairs ask what no pair of the training does."""
    name, asked = "held-out pairs", {hash_question(pair.chosen) for pair in train}
    known = sum(hash_question(pair.chosen) in asked for pair in heldout)
    found = f"{known} of {len(heldout)} held-out pairs have a prompt that is trained on"
    advice = "accuracy on them says nothing of new prompts: give other pairs, or leave --data.eval-path out"
    return judge(name, found, fails=known > len(heldout) / 2, warns=known > 0, advice=advice)


def create_score_reference(model: Any) -> ScoreFn:
    """Return the scores of transformers' own forward pass, in float32, of one row without pads at a time.

    Args:
        model: a sequence-classification model, which is changed: it reads the last token of a row, also where that is its pad token.
    """
    model = model.float().eval()
    model.config.pad_token_id = None

    def compute(tokens: Sequence[int]) -> float:
        ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
        with torch.no_grad():
            return float(model(input_ids=ids).logits[0, 0])

    return compute


async def check_scores(
    backend: TrainingBackend, reference: ScoreFn, samples: Sequence[Sample], *, precision: str, window: int | None
) -> Finding:
    """Check that the trainer's scores of rows that are packed together are finite, and the reference's."""
    values = await submit_forward(
        backend, collate_samples(samples, pad_id=0), select_values, max_tokens_per_microbatch=MOST_TOKENS
    ).result()
    lengths = [len(sample.tokens) for sample in samples]
    own = torch.stack([values[row, length - 1] for row, length in enumerate(lengths)])
    theirs = torch.tensor([reference(sample.tokens) for sample in samples])
    largest, worst = float(theirs.abs().max()), float((own - theirs).abs().max())
    span = "" if window is None else f", {max(lengths) / window:.1f} windows at most"
    found = (
        f"from {float(own.min()):.3g} to {float(own.max()):.3g}, at most {worst:.2g} from transformers' own forward, over {len(samples)} "
        f"rows of up to {max(lengths)} tokens{span}"
    )
    advice = "compare config.json and weights with those that transformers loads, and report a family that differs (docs/models.md)"
    beyond = not worst <= _RELATIVE[precision] * max(largest, 1e-6)
    if window is not None and max(lengths) <= window:
        found = f"{found}; none is longer than a window of {window} tokens, so a wrong one could not be seen"
        return judge("scores", found, fails=beyond, warns=True, advice=advice)
    return judge("scores", found, fails=beyond, advice=advice)


async def check_ranking(backend: TrainingBackend, heldout: Sequence[PreferencePair], *, is_trained: bool) -> Finding:
    """Check how the model ranks held-out pairs before training.

    Args:
        is_trained: whether it was trained as a reward model before; a new head ranks at random.
    """
    told = await evaluate_reward_model(backend, heldout)
    accuracy, margin = told["eval_accuracy"], told["eval_margin"]
    found = f"{accuracy:.0%} of {len(heldout)} held-out pairs are ranked right, by {margin:.2g} on average"
    advice = "a model that was trained on scores prefers the rejected answers: are chosen and rejected exchanged (--data.columns)?"
    warns = is_trained and len(heldout) >= _FEWEST_RANKED and accuracy < _REVERSED
    return judge("ranking before training", found, warns=warns, advice=advice)


def is_start_trained(path: str) -> bool:
    """Whether a model directory holds a reward model, and not a language model, which gets a new head."""
    from rollouts.models.heads import is_reward_model
    from rollouts.models.loading import check_model_directory, read_model_config

    return is_reward_model(read_model_config(check_model_directory(path), trust_remote_code=False))


async def measure_speed(trainer: TrainingBackend, samples: Sequence[Sample], num_rows: int) -> Finding:
    """Measure the tokens per second of a forward pass, and estimate what a step of num_rows answers takes with it."""
    batch = collate_samples(samples, pad_id=0)
    tokens = int(batch.lengths.sum())
    started = time.perf_counter()
    await submit_forward(trainer, batch, select_values, max_tokens_per_microbatch=tokens).result()
    rate, mean = tokens / (time.perf_counter() - started), tokens / batch.num_rows
    seconds = 3 * num_rows * mean / rate  # a backward pass costs two forward passes
    found = f"{rate:,.0f} tokens per second forward; {num_rows} answers of {mean:.0f} tokens would be trained on in about {seconds:.2g} s"
    return judge("speed of the trainer", found)
