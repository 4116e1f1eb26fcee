"""Mistakes that the tests must see: each is made in a copy of the package, and the tests named beside it must then fail.

    python tests/mutations.py              all of them, with a table
    python tests/mutations.py kl "clip"    those whose file or description contains one of these texts
    python tests/mutations.py --fast       the few that the default run of the tests makes

Each runs in a process of its own, forked from one that has imported PyTorch and pytest but nothing of the package.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASSED, FAILED = 0, 1  # pytest's exit codes; others are errors of collection, usage and the like


@dataclass(frozen=True)
class Mutation:
    """One mistake."""

    file: str  # of rollouts/
    what: str  # the mistake, in words
    old: str  # text that stands in the file exactly once
    new: str
    tests: tuple[str, ...]  # of tests/, at least one of which must fail: as few and as fast as possible
    fast: bool = False  # made in the default run of the tests, too

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def parity(name: str) -> str:
    """The test against the recorded vectors of one function."""
    return f"test_parity.py::test_our_composition_gives_their_numbers[{name}]"


def mutated(source: str, mutation: Mutation) -> str:
    """The text of the file with the mistake in it."""
    count = source.count(mutation.old)
    assert count == 1, f"{mutation}: its old text occurs {count} times, expected once: adapt tests/mutations.py to the file"
    assert mutation.new != mutation.old, f"{mutation}: nothing changes"
    return source.replace(mutation.old, mutation.new)


def run_tests(tests: Sequence[str], mutation: Mutation | None = None) -> tuple[int, str]:
    """pytest's exit code and output for tests on a copy of the package, with a mistake in it or without."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "rollouts", Path(folder, "rollouts"), ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            path = Path(folder, "rollouts", mutation.file)
            path.write_text(mutated(path.read_text(), mutation))
        log = Path(folder, "log")
        child = os.fork()
        if child == 0:
            _run_in_this_process(folder, tests, log)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


def _run_in_this_process(folder: str, tests: Sequence[str], log: Path) -> None:
    """Runs the tests on the package in `folder` and ends the process with pytest's exit code."""
    code = -1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        os.environ.pop("ROLLOUTS_GOLDEN_DIR", None)  # the tests below are named after the vectors that are shipped
        import pytest

        import rollouts

        assert Path(rollouts.__file__).is_relative_to(folder), f"{rollouts.__file__} is not the copy in {folder}"
        names = [str(ROOT / "tests" / test) for test in tests]
        code = int(pytest.main(["-x", "--timeout=60", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *names]))
        sys.stdout.flush()
    finally:
        os._exit(code & 255)  # without the exit handlers of the process that it was forked from


def results(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, int, str, float]]:
    """(mutation, exit code, output, seconds), one after the other."""
    for mutation in mutations:
        start = time.monotonic()
        code, output = run_tests(mutation.tests, mutation)
        yield mutation, code, output, time.monotonic() - start


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "surrogates.py",
        "the log-ratio has the wrong sign",
        "log_ratio = torch.where(mask > 0, log_probs - old_log_probs, 0.0)\n    return log_ratio if bound",
        "log_ratio = torch.where(mask > 0, old_log_probs - log_probs, 0.0)\n    return log_ratio if bound",
        ("test_losses.py::test_the_sequence_ratio_is_the_geometric_mean_with_the_gradient_of_each_token",),
    ),
    Mutation(
        "surrogates.py",
        "masked after the subtraction instead of before",
        "log_ratio = torch.where(mask > 0, log_probs - old_log_probs, 0.0)\n    return log_ratio if bound",
        "log_ratio = (mask > 0) * (log_probs - old_log_probs)\n    return log_ratio if bound",
        ("test_surrogates.py::test_ratios_do_not_read_masked_places",),
    ),
    Mutation(
        "surrogates.py",
        "row means divide by the padded width",
        "return x.sum(1, keepdim=True) / (on.sum(1, keepdim=True) + epsilon).clamp(min=1)",
        "return x.sum(1, keepdim=True) / (on.shape[1] + epsilon)",
        ("test_surrogates.py::test_row_means",),
    ),
    Mutation(
        "surrogates.py",
        "GSPO has a gradient through the row's mean as well",
        "mean.detach() + own",
        "mean + own",
        ("test_surrogates.py::test_both_forms_of_the_sequence_ratio_have_one_gradient_under_the_mean_over_rows",),
    ),
    Mutation(
        "surrogates.py",
        "the sequence ratio is a sum, not a mean",
        "return torch.where(mask > 0, _row_mean(token_ratio(log_probs, old_log_probs, mask), mask), 0.0)",
        "return torch.where(mask > 0, token_ratio(log_probs, old_log_probs, mask).sum(1, keepdim=True), 0.0)",
        ("test_surrogates.py::test_both_forms_of_the_sequence_ratio_have_one_gradient_under_the_mean_over_rows",),
    ),
    Mutation(
        "surrogates.py",
        "a cap is taken for its logarithm",
        "clamp(max=math.log(cap))",
        "clamp(max=cap)",
        ("test_loss_parts.py::test_a_capped_ratio_is_never_larger_than_its_cap_and_has_no_gradient_above",),
    ),
    Mutation(
        "surrogates.py",
        "GMPO clips on the optimistic side",
        "pessimistic = sign * torch.minimum(",
        "pessimistic = sign * torch.maximum(",
        ("test_losses.py::test_gmpo_is_its_paper_on_whole_rows_and_averages_importance_weights_geometrically",),
    ),
    Mutation(
        "surrogates.py",
        "the clip is optimistic",
        "loss = torch.maximum(-advantages * ratio, ",
        "loss = torch.minimum(-advantages * ratio, ",
        ("test_surrogates.py::test_a_capped_ratio_is_the_dual_clip_from_one_plus_high_on",),
        fast=True,
    ),
    Mutation(
        "surrogates.py",
        "low and high of the clip are swapped",
        "-advantages * ratio.clamp(1 - low, 1 + high)",
        "-advantages * ratio.clamp(1 - high, 1 + low)",
        ("test_losses.py::test_each_algorithm_is_its_paper",),
    ),
    Mutation(
        "surrogates.py",
        "the clip's lower bound is low itself",
        "-advantages * ratio.clamp(1 - low, 1 + high)",
        "-advantages * ratio.clamp(low, 1 + high)",
        ("test_losses.py::test_the_ppo_gradient_is_zero_outside_the_clip_on_the_pessimistic_side_only",),
    ),
    Mutation(
        "surrogates.py",
        "the dual clip acts on good tokens",
        "torch.where(advantages < 0, torch.minimum(loss, ",
        "torch.where(advantages > 0, torch.minimum(loss, ",
        ("test_losses.py::test_dual_clip_bounds_the_loss_of_a_bad_token_and_takes_its_gradient",),
    ),
    Mutation(
        "surrogates.py",
        "CISPO's weight has a gradient",
        "1 + high if cap is None else cap).detach() *",
        "1 + high if cap is None else cap) *",
        (parity("losses/trl_cispo"),),
    ),
    Mutation(
        "surrogates.py",
        "CISPO takes the width for the cap",
        "clamp(1 - low, 1 + high if cap is None else cap).detach()",
        "clamp(1 - low, high if cap is None else cap).detach()",
        (parity("losses/verl_cispo"),),
    ),
    Mutation(
        "surrogates.py",
        "SAPO's temperatures are swapped",
        "torch.where(advantages > 0, torch.full_like(advantages, tau_pos)",
        "torch.where(advantages < 0, torch.full_like(advantages, tau_pos)",
        (parity("losses/areal_sapo"),),
    ),
    Mutation(
        "surrogates.py",
        "SAPO is not normalized to slope 1",
        "* 4 / tau",
        "* 4",
        ("test_surrogates.py::test_sapo_starts_as_policy_gradient_and_fades_on_both_sides",),
    ),
    Mutation(
        "surrogates.py",
        "DRO rewards drift",
        "-(advantages * log_probs - 0.5 * beta",
        "-(advantages * log_probs + 0.5 * beta",
        (parity("losses/verl_dro"),),
    ),
    Mutation(
        "surrogates.py",
        "KL-Cov penalizes the signed log-ratio",
        "torch.where(selected, log_ratio.abs(), 0.0)",
        "torch.where(selected, log_ratio, 0.0)",
        (parity("losses/verl_kl_cov"),),
    ),
    Mutation(
        "surrogates.py",
        "VESPO's weight has a gradient",
        "clamp(math.log(floor), bound).detach()",
        "clamp(math.log(floor), bound)",
        (parity("losses/trl_vespo"),),
    ),
    Mutation(
        "surrogates.py",
        "the trust region's sides are swapped",
        "torch.where(advantages > 0, moved <= high, moved >= -low)",
        "torch.where(advantages > 0, moved >= -low, moved <= high)",
        ("test_surrogates.py::test_trust_regions_close_in_the_direction_of_the_advantage_only",),
    ),
    Mutation(
        "surrogates.py",
        "DPPO keeps what left the region",
        "return torch.where(keep, -weight",
        "return torch.where(~keep, -weight",
        ("test_surrogates.py::test_the_gradient_of_a_weight_that_is_data_is_the_weight",),
    ),
    Mutation(
        "surrogates.py",
        "the pull to the anchor stops outside the region",
        "return policy + penalty * log_ratio.square()",
        "return policy + penalty * torch.where(keep, log_ratio, 0.0).square()",
        (parity("losses/prime_default_dppo"),),
    ),
    Mutation(
        "surrogates.py",
        "tokens inside the region count as outside",
        "outside = ~inside(",
        "outside = inside(",
        ("test_surrogates.py::test_fractions_count_the_tokens_whose_gradient_the_clip_takes",),
    ),
    Mutation(
        "surrogates.py",
        "the gate is that of the value, not of the gradient",
        'return {"gate": 4 * gate * (1 - gate)}',
        'return {"gate": gate}',
        ("test_surrogates.py::test_the_gate_of_sapo_is_what_it_leaves_of_the_gradient",),
    ),
    Mutation(
        "surrogates.py",
        "clip fractions count the wrong signs",
        "below = ((ratio < 1 - low) & (advantages < 0))",
        "below = ((ratio < 1 - low) & (advantages > 0))",
        ("test_losses.py::test_gmpo_is_its_paper_on_whole_rows_and_averages_importance_weights_geometrically",),
    ),
    Mutation(
        "logprobs.py",
        "a ratio overflows",
        "return log_ratio.clamp(max=math.log(numbers.max) * (1 - numbers.eps)).exp()",
        "return log_ratio.exp()",
        ("test_surrogates.py::test_a_clip_that_is_active_takes_the_gradient_however_large_the_ratio",),
    ),
    Mutation(
        "logprobs.py",
        "ratios are bounded long before they overflow",
        "math.log(numbers.max) * (1 - numbers.eps)",
        "math.log(numbers.max) * 0.9",
        ("test_logprobs.py::test_an_exponential_that_would_overflow_is_a_number_without_gradient",),
    ),
    Mutation(
        "surrogates.py",
        "the sum over a row is not bounded",
        "total if bound is None else total.clamp(-bound, bound)",
        "total",
        ("test_surrogates.py::test_the_ratio_of_a_long_sequence_overflows_nothing",),
    ),
    Mutation(
        "algorithms.py",
        "nothing bounds the ratio of a bad token",
        "BOUNDED_RATIO = partial(token_ratio, bound=LOG_RATIO_BOUND)",
        "BOUNDED_RATIO = token_ratio",
        ("test_algorithms.py::test_a_token_far_off_leaves_loss_gradient_and_metrics_finite",),
    ),
    Mutation(
        "algorithms.py",
        "nothing bounds k3",
        "BOUNDED_K3 = bounded(k3, log_ratio=LOG_RATIO_BOUND)",
        "BOUNDED_K3 = k3",
        ("test_algorithms.py::test_a_token_far_off_leaves_loss_gradient_and_metrics_finite",),
    ),
    Mutation(
        "algorithms.py",
        "nothing bounds GMPO's ratios",
        "high=clip_high, bound=LOG_RATIO_BOUND)",
        "high=clip_high)",
        ("test_algorithms.py::test_presets_are_their_papers_with_tokens_far_off_the_anchor[gmpo-100.0]",),
    ),
    Mutation(
        "losses.py",
        "one token makes a mean of ratios infinite",
        "log_ratio.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)",
        "log_ratio.detach()",
        ("test_algorithms.py::test_a_token_far_off_leaves_loss_gradient_and_metrics_finite",),
    ),
    Mutation(
        "losses.py",
        "log-probs are not masked before exp",
        "log_probs, anchor, advantages = _where(mask, outputs.log_probs), ",
        "log_probs, anchor, advantages = outputs.log_probs, ",
        ("test_losses.py::test_what_stands_at_masked_places_changes_nothing_bit_for_bit",),
    ),
    Mutation(
        "losses.py",
        "the anchor is the rollout even with old log-probs",
        "_where(mask, anchor), ",
        "_where(mask, anchor if batch.rollout_log_probs is None else batch.rollout_log_probs), ",
        (parity("losses/areal_realhf_actor_loss_v0_3_0"),),
    ),
    Mutation(
        "losses.py",
        "importance weights are ignored",
        'scale = extra["importance_weight"] = _where(mask, batch.importance_weights)',
        'scale = extra["importance_weight"] = torch.ones_like(log_probs)',
        ("test_loss_parts.py::test_weights_of_both_kinds_multiply_the_policy_term_alone",),
    ),
    Mutation(
        "losses.py",
        "importance weights scale the KL term, too",
        "if unbiased_kl:\n",
        "if scale is not None:\n            divergence = divergence * scale\n        if unbiased_kl:\n",
        ("test_loss_parts.py::test_weights_of_both_kinds_multiply_the_policy_term_alone",),
    ),
    Mutation(
        "losses.py",
        "weights of the current policy replace the importance weights",
        'scale = extra["policy_weight"] if scale is None else scale * extra["policy_weight"]',
        'scale = extra["policy_weight"]',
        ("test_loss_parts.py::test_weights_of_both_kinds_multiply_the_policy_term_alone",),
    ),
    Mutation(
        "losses.py",
        "dropped tokens are multiplied by 0 after exp",
        "scale * surrogate(_where(scale != 0, log_ratio), _where(scale != 0, log_probs), advantages)",
        "scale * surrogate(log_ratio, log_probs, advantages)",
        ("test_losses.py::test_a_dropped_token_may_have_any_ratio",),
    ),
    Mutation(
        "losses.py",
        "the KL term has the wrong sign",
        "per_token = per_token + (kl_coef if",
        "per_token = per_token - (kl_coef if",
        ("test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "losses.py",
        "the KL controller is ignored",
        "(kl_coef if batch.kl_coef is None else batch.kl_coef[:, None])",
        "kl_coef",
        ("test_losses.py::test_a_coefficient_in_the_batch_replaces_that_of_the_loss",),
    ),
    Mutation(
        "losses.py",
        "the unbiased KL has no gradient through its ratio",
        "divergence = divergence * finite_exp(log_ratio)",
        "divergence = divergence * finite_exp(log_ratio).detach()",
        (parity("losses/trl_bnpo"),),
    ),
    Mutation(
        "losses.py",
        "entropy is a cost",
        'per_token = per_token - entropy_coef * extra["entropy"]',
        'per_token = per_token + entropy_coef * extra["entropy"]',
        (parity("losses/slime_policy_loss_full"),),
    ),
    Mutation(
        "losses.py",
        "the loss is a mean over tokens, not a weighted sum",
        "return LossOutput((weights * _where(mask, per_token)).sum(), metrics)",
        "return LossOutput((weights * _where(mask, per_token)).mean(), metrics)",
        ("test_losses.py::test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens",),
    ),
    Mutation(
        "losses.py",
        "SFT learns to avoid its targets",
        "return LossOutput(-(weights * log_probs).sum(), metrics)",
        "return LossOutput((weights * log_probs).sum(), metrics)",
        ("test_losses.py::test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens",),
    ),
    Mutation(
        "losses.py",
        "DFT's factor has a gradient",
        "probability = log_probs.detach().exp()",
        "probability = log_probs.exp()",
        ("test_losses.py::test_dft_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "losses.py",
        "distillation differentiates its advantage",
        "(batch.ref_log_probs - outputs.log_probs).detach()",
        "(batch.ref_log_probs - outputs.log_probs)",
        ("test_loss_parts.py::test_distillation_has_the_gradient_of_the_divergence_from_the_teacher",),
    ),
    Mutation(
        "losses.py",
        "distillation moves away from the teacher",
        "(batch.ref_log_probs - outputs.log_probs).detach()",
        "(outputs.log_probs - batch.ref_log_probs).detach()",
        ("test_loss_parts.py::test_distillation_has_the_gradient_of_the_divergence_from_the_teacher",),
    ),
    Mutation(
        "losses.py",
        "an entropy bonus of its own is a cost",
        "return LossOutput(-coef * (weights",
        "return LossOutput(coef * (weights",
        ("test_loss_parts.py::test_parts_add_up_each_with_its_own_weights",),
    ),
    Mutation(
        "losses.py",
        "the value loss takes the smaller error",
        "per_token = torch.maximum(per_token, bounded)",
        "per_token = torch.minimum(per_token, bounded)",
        (parity("losses/areal_critic_loss"),),
    ),
    Mutation(
        "losses.py",
        "values are clipped about the returns",
        "values.clamp(old - clip, old + clip)",
        "values.clamp(returns - clip, returns + clip)",
        (parity("losses/areal_critic_loss"),),
    ),
    Mutation(
        "losses.py",
        "Huber's line is not continuous",
        "huber * (2 * error.abs() - huber)",
        "huber * (2 * error.abs() + huber)",
        (parity("losses/areal_critic_loss"),),
    ),
    Mutation(
        "losses.py",
        "metrics of micro-batches are averaged without their sizes",
        "sum(value * count for value, count in values) / sum(count for _, count in values)",
        "sum(value for value, count in values) / len(values)",
        ("test_losses.py::test_max_and_min_metrics_merge_as_such_and_parts_without_tokens_say_nothing",),
    ),
    Mutation(
        "loss_weights.py",
        "rows that are not trainable are trained",
        "return batch.loss_mask * batch.trainable[:, None].to(batch.loss_mask.dtype)",
        "return batch.loss_mask",
        ("test_losses.py::test_weights_leave_out_rows_that_are_not_trainable_and_scale_with_fractions",),
        fast=True,
    ),
    Mutation(
        "loss_weights.py",
        "rows are divided by the padded width",
        "lengths = mask.sum(1) if row_lengths is None",
        "lengths = torch.full_like(mask[:, 0], mask.shape[1]) if row_lengths is None",
        ("test_loss_weights.py::test_weights_by_hand",),
    ),
    Mutation(
        "loss_weights.py",
        "empty rows count",
        "if count_empty_rows else (mask.sum(1) > 0)",
        "if not count_empty_rows else (mask.sum(1) > 0)",
        ("test_loss_weights.py::test_weights_by_hand",),
    ),
    Mutation(
        "loss_weights.py",
        "the constant length is ignored",
        "num_rows=num_rows, count_empty_rows=count_empty_rows) / length",
        "num_rows=num_rows, count_empty_rows=count_empty_rows) / batch.loss_mask.shape[1]",
        ("test_loss_weights.py::test_weights_by_hand",),
    ),
    Mutation(
        "loss_weights.py",
        "groups without a trained token count",
        "batch.group_ids[mask.sum(1) > 0].unique().numel()",
        "batch.group_ids.unique().numel()",
        ("test_loss_weights.py::test_means_sum_to_one_or_to_nothing",),
    ),
    Mutation(
        "loss_weights.py",
        "the tokens of the whole step are ignored",
        "(mask.sum() if num_tokens is None else mask.new_tensor(num_tokens))",
        "mask.sum()",
        (parity("losses/prime_default_dppo"),),
    ),
    Mutation(
        "loss_weights.py",
        "the rows of the whole step are ignored",
        "    if num_rows is not None:\n        return mask.new_tensor(num_rows)",
        "    if num_rows is not None:\n        return (mask.sum(1) > 0).sum().to(mask.dtype)",
        ("test_algorithms.py::test_ranks_that_see_their_own_groups_only_have_the_gradient_of_one",),
    ),
    Mutation(
        "statistics.py",
        "a mean is of one rank only",
        "total, count = sums if all_reduce is None else all_reduce(sums)",
        "total, count = sums",
        ("test_algorithms.py::test_ranks_that_see_their_own_groups_only_have_the_gradient_of_one",),
    ),
    Mutation(
        "loss_weights.py",
        "an empty batch divides by 0",
        "return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, torch.ones_like(denominator)), 0.0)",
        "return numerator / denominator",
        ("test_loss_weights.py::test_weights_by_hand",),
    ),
    Mutation(
        "loss_weights.py",
        "fractional masks count as whole tokens",
        "mask = trained_mask(batch)\n    return _divide(mask, (mask.sum() if",
        "mask = (trained_mask(batch) > 0).to(batch.loss_mask.dtype)\n    return _divide(mask, (mask.sum() if",
        ("test_loss_weights.py::test_fractions_scale_a_token",),
    ),
    Mutation(
        "kl.py",
        "k1 has the wrong sign",
        "return log_probs - ref_log_probs",
        "return ref_log_probs - log_probs",
        ("test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "kl.py",
        "k3 is of KL(reference || policy)",
        "log_ratio = ref_log_probs - log_probs",
        "log_ratio = log_probs - ref_log_probs",
        ("test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "kl.py",
        "k3 adds the log-ratio",
        "finite_exp(log_ratio) - 1 - log_ratio",
        "finite_exp(log_ratio) - 1 + log_ratio",
        ("test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "kl.py",
        "k2 lacks its half",
        "return 0.5 * (log_probs",
        "return (log_probs",
        ("test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "kl.py",
        "the straight-through KL keeps its own gradient",
        "kl(log_probs, ref_log_probs).detach()",
        "kl(log_probs, ref_log_probs)",
        (parity("kl/verl_kl_penalty"),),
    ),
    Mutation(
        "kl.py",
        "the straight-through KL adds k2's value",
        "return carrier - carrier.detach() + kl",
        "return carrier + kl",
        (parity("kl/verl_kl_penalty"),),
    ),
    Mutation(
        "kl.py",
        "the bound is on one side only",
        "(log_probs - ref_log_probs).clamp(-log_ratio, log_ratio)",
        "(log_probs - ref_log_probs).clamp(max=log_ratio)",
        ("test_kl.py::test_bounds_act_on_the_log_ratio_and_on_the_result",),
    ),
    Mutation(
        "statistics.py",
        "the std of a group is biased",
        "squares = group_sum(group_centered(x, group_ids).square(), group_ids)\n    return (squares / (count - 1 if unbiased else count)",
        "squares = group_sum(group_centered(x, group_ids).square(), group_ids)\n    return (squares / count",
        ("test_statistics.py::test_a_group_by_hand",),
    ),
    Mutation(
        "statistics.py",
        "equal rewards leave rounding behind",
        "return torch.where(equal, torch.zeros_like(x), x - group_mean(x, group_ids))",
        "return x - group_mean(x, group_ids)",
        ("test_advantages.py::test_equal_rewards_give_exactly_zero",),
    ),
    Mutation(
        "statistics.py",
        "leave-one-out divides by the size of the group",
        "count / (count - 1).clamp(min=1))",
        "count / count)",
        (parity("advantages/verl_rloo_vectorized"),),
    ),
    Mutation(
        "statistics.py",
        "a batch statistic is of the group",
        "return group_mean(x, torch.zeros_like(group_ids))",
        "return group_mean(x, group_ids)",
        ("test_statistics.py::test_batch_statistics_are_those_of_one_group",),
    ),
    Mutation(
        "statistics.py",
        "a mean counts masked entries",
        "sums = torch.stack((masked_sum(x, mask), mask.sum().to(x.dtype)))",
        "sums = torch.stack((masked_sum(x, mask), x.new_tensor(mask.numel())))",
        (parity("advantages/verl_gae"),),
    ),
    Mutation(
        "statistics.py",
        "a sum multiplies by the mask and does not select",
        "return (torch.where(mask > 0, x, torch.zeros_like(x)) * mask).sum()",
        "return (x * mask).sum()",
        ("test_statistics.py::test_what_stands_at_masked_places_does_not_matter",),
    ),
    Mutation(
        "statistics.py",
        "the variance over tokens is biased",
        "variance * count / torch.where(count > 1, count - 1, 1)",
        "variance * count / torch.where(count > 1, count, 1)",
        (parity("advantages/verl_gdpo_single"),),
    ),
    Mutation(
        "statistics.py",
        "whitening divides by the variance",
        "(x - mean) * (variance + epsilon).rsqrt()",
        "(x - mean) / (variance + epsilon)",
        (parity("advantages/verl_reinforce_plus_plus_baseline"),),
    ),
    Mutation(
        "statistics.py",
        "the lowest share instead of the top",
        "return (x >= ordered[rank]) & (mask > 0)",
        "return (x <= ordered[rank]) & (mask > 0)",
        ("test_loss_parts.py::test_the_top_share_is_what_lies_at_or_above_the_quantile",),
    ),
    Mutation(
        "statistics.py",
        "the top share is one token short",
        "- 1e-9)  # rounding",
        "+ 1 - 1e-9)  # rounding",
        ("test_loss_parts.py::test_the_top_share_is_what_lies_at_or_above_the_quantile",),
    ),
    Mutation(
        "advantages.py",
        "the overlong penalty begins at the end of the buffer",
        "(lengths.to(rewards.dtype) - (max_tokens - buffer)) / buffer",
        "(lengths.to(rewards.dtype) - max_tokens) / buffer",
        (parity("filters/areal_overlong_penalty"),),
    ),
    Mutation(
        "advantages.py",
        "the overlong penalty is a bonus",
        "return rewards - factor * (excess",
        "return rewards + factor * (excess",
        (parity("filters/areal_overlong_penalty"),),
    ),
    Mutation(
        "advantages.py",
        "rewards are clipped before they are scaled",
        "((rewards + bias) * scale).clamp(low, high)",
        "(rewards + bias).clamp(low, high) * scale",
        (parity("advantages/areal_ppo_compute_advantages"),),
    ),
    Mutation(
        "advantages.py",
        "epsilon is subtracted from the std",
        "return x / (torch.where(std == 0, torch.ones_like(std), std) + epsilon)",
        "return x / (torch.where(std == 0, torch.ones_like(std), std) - epsilon)",
        (parity("advantages/trl_rloo_advantages"),),
    ),
    Mutation(
        "advantages.py",
        "the std multiplies instead of dividing",
        "return x / (torch.where(std == 0",
        "return x * (torch.where(std == 0",
        (parity("advantages/slime_group_reward_norm"),),
    ),
    Mutation(
        "advantages.py",
        "a std of 0 divides",
        "torch.where(std == 0, torch.ones_like(std), std) + epsilon",
        "std + epsilon",
        ("test_advantages.py::test_equal_rewards_give_exactly_zero", "test_advantages.py::test_a_group_without_spread_is_not_scaled"),
    ),
    Mutation(
        "advantages.py",
        "singletons keep their reward",
        "if keep_single:\n        centered =",
        "if not keep_single:\n        centered =",
        (parity("advantages/prime_grpo"),),
    ),
    Mutation(
        "advantages.py",
        "the greedy sample counts among the sampled ones",
        "group_sum(torch.where(trainable, torch.zeros_like(rewards), rewards), group_ids) / group_sum(apart, group_ids)",
        "group_mean(rewards, group_ids)",
        ("test_advantages.py::test_the_greedy_baseline_is_the_mean_of_the_rows_that_are_not_trained",),
    ),
    Mutation(
        "advantages.py",
        "OPO's weights are missing",
        "shifted = group_sum(lengths * (rewards - offset), group_ids) / total.clamp(min=1)",
        "shifted = group_mean(rewards - offset, group_ids)",
        (parity("advantages/verl_opo"),),
    ),
    Mutation(
        "advantages.py",
        "GPG's share of useful rows is upside down",
        "(rewards.numel() / num_valid.clamp(min=1))",
        "(num_valid / rewards.numel())",
        (parity("advantages/verl_gpg"),),
    ),
    Mutation(
        "advantages.py",
        "the best of k is compared with itself",
        "torch.where(best, torch.full_like(rewards, -torch.inf), rewards)",
        "torch.where(~best, torch.full_like(rewards, -torch.inf), rewards)",
        (parity("advantages/verl_grpo_passk"),),
    ),
    Mutation(
        "advantages.py",
        "the reward stands one token early",
        "torch.where(positions == last[:, None], rewards",
        "torch.where(positions == last[:, None] - 1, rewards",
        (parity("advantages/areal_realhf_packed_rewards_gae_v0_3_0"),),
    ),
    Mutation(
        "advantages.py",
        "the KL penalty is a bonus",
        "return rewards - (penalty if rewards.dim() == 2",
        "return rewards + (penalty if rewards.dim() == 2",
        (parity("advantages/areal_realhf_packed_rewards_gae_v0_3_0"),),
    ),
    Mutation(
        "advantages.py",
        "returns are discounted at tokens that are stepped over",
        "token_rewards[:, t] + _at(gamma, t) * running, running)",
        "token_rewards[:, t] + _at(gamma, t) * running, _at(gamma, t) * running)",
        (parity("advantages/verl_reinforce_plus_plus"),),
    ),
    Mutation(
        "advantages.py",
        "returns are not bootstrapped",
        "token_rewards.new_zeros(token_rewards.shape[0]) if bootstrap is None else bootstrap",
        "token_rewards.new_zeros(token_rewards.shape[0])",
        (parity("advantages/rlax_gae_lambda_returns"),),
    ),
    Mutation(
        "advantages.py",
        "advantages are discounted at tokens that are stepped over",
        "advantage = torch.where(on, here, advantage)",
        "advantage = torch.where(on, here, _at(gamma, t) * _at(lam, t) * advantage)",
        (parity("advantages/verl_gae"),),
        fast=True,
    ),
    Mutation(
        "advantages.py",
        "GAE is not bootstrapped",
        "next_value = advantage if bootstrap is None else bootstrap",
        "next_value = advantage",
        (parity("advantages/areal_ppo_compute_advantages"),),
    ),
    Mutation(
        "advantages.py",
        "GAE forgets lambda",
        "(next_value + _at(lam, t) * advantage) - values[:, t]",
        "(next_value + advantage) - values[:, t]",
        (parity("advantages/rlax_gae_lambda_returns"),),
    ),
    Mutation(
        "advantages.py",
        "GAE takes the value of a token that is stepped over",
        "next_value = torch.where(on, values[:, t], next_value)\n        columns.append(torch.where(on, advantage, torch",
        "next_value = values[:, t]\n        columns.append(torch.where(on, advantage, torch",
        (parity("advantages/areal_realhf_packed_rewards_gae_v0_3_0"),),
    ),
    Mutation(
        "advantages.py",
        "V-trace does not clip its trace",
        "_at(lam, t) * rho.clamp(max=1) * error",
        "_at(lam, t) * rho * error",
        (parity("advantages/rlax_vtrace"),),
    ),
    Mutation(
        "advantages.py",
        "V-trace's advantage uses the clip of the trace",
        "advantage = rho.clamp(max=clip_pg_rho) *",
        "advantage = rho.clamp(max=clip_rho) *",
        (parity("advantages/rlax_vtrace"),),
    ),
    Mutation(
        "estimators.py",
        "advantages stay at masked places",
        "advantages = torch.where(on, advantages[:, None] if advantages.dim() == 1 else advantages, nothing)",
        "advantages = (advantages[:, None] if advantages.dim() == 1 else advantages) + nothing",
        ("test_estimators.py::test_what_stands_where_nothing_is_trained_does_not_matter",),
    ),
    Mutation(
        "estimators.py",
        "untrained rows count in the whitening",
        "trained = (trained_mask(batch) > 0)",
        "trained = (batch.loss_mask > 0)",
        ("test_estimators.py::test_rows_that_are_not_trained_count_in_their_group_but_not_among_the_tokens",),
    ),
    Mutation(
        "estimators.py",
        "returns are whitened, too",
        "replace(filled, advantages=whiten_tokens(advantages, trained))",
        "replace(filled, advantages=(w := whiten_tokens(advantages, trained)), returns=w)",
        ("test_estimators.py::test_each_estimator_is_its_paper[reinforce++]",),
    ),
    Mutation(
        "estimators.py",
        "the KL penalty compares the rollout's log-probs",
        "found = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs",
        "found = batch.old_log_probs if batch.rollout_log_probs is None else batch.rollout_log_probs",
        ("test_estimators.py::test_the_policy_is_the_anchor_or_else_the_behaviour",),
    ),
    Mutation(
        "estimators.py",
        "V-trace's ratio is upside down",
        "torch.where(batch.loss_mask > 0, target - batch.rollout_log_probs",
        "torch.where(batch.loss_mask > 0, batch.rollout_log_probs - target",
        ("test_estimators.py::test_each_estimator_is_its_paper[vtrace]",),
    ),
    Mutation(
        "estimators.py",
        "the KL controller is ignored",
        "coefficient = kl_coef if batch.kl_coef is None else batch.kl_coef",
        "coefficient = kl_coef",
        ("test_estimators.py::test_a_controller_sets_the_coefficient_of_the_kl",),
    ),
    Mutation(
        "corrections.py",
        "weights are upside down",
        "(log_probs - behavior_log_probs).detach()",
        "(behavior_log_probs - log_probs).detach()",
        (parity("rollout_correction/verl_is_weights"),),
    ),
    Mutation(
        "corrections.py",
        "weights have a gradient",
        "(log_probs - behavior_log_probs).detach()",
        "(log_probs - behavior_log_probs)",
        ("test_corrections.py::test_weights_carry_no_gradient",),
    ),
    Mutation(
        "corrections.py",
        "a sequence is its mean",
        "return x.sum(1, keepdim=True).expand_as(x)",
        "return x.mean(1, keepdim=True).expand_as(x)",
        (parity("rollout_correction/trl_vllm_importance_sampling"),),
    ),
    Mutation(
        "corrections.py",
        "tokens outside the bounds keep their weight",
        "return torch.where(_inside(weights, floor, cap), weights, torch.zeros_like(weights))",
        "return weights",
        (parity("rollout_correction/slime_tis_icepop"),),
    ),
    Mutation(
        "corrections.py",
        "a bound is exclusive",
        "return keep if high is None else keep & (x <= high)",
        "return keep if high is None else keep & (x < high)",
        ("test_corrections.py::test_bounds",),
    ),
    Mutation(
        "corrections.py",
        "dropped inside the bounds",
        "return torch.where(_inside(weights, floor, cap), weights, torch.zeros_like(weights))",
        "return torch.where(~_inside(weights, floor, cap), weights, torch.zeros_like(weights))",
        (parity("rollout_correction/verl_is_weights"),),
    ),
    Mutation(
        "corrections.py",
        "decoupled: the ratio stays against the rollout",
        "old_log_probs=prox.detach())",
        "old_log_probs=rollout.detach())",
        (parity("losses/areal_decoupled_ppo_cap_v0_3_4"),),
    ),
    Mutation(
        "corrections.py",
        "decoupled: weights beyond the cap are kept as the cap",
        "bound = drop_outside if drop else clamp_weights",
        "bound = clamp_weights",
        ("test_corrections.py::test_tokens_beyond_the_cap_are_excluded_and_still_counted",),
    ),
    Mutation(
        "corrections.py",
        "the second correction replaces the first",
        "importance_weights=weights if own is None else own * weights",
        "importance_weights=weights",
        (parity("rollout_correction/slime_tis_icepop"),),
    ),
    Mutation(
        "corrections.py",
        "good rows are masked, too",
        "((batch.advantages >= 0) | (drift <= threshold))",
        "(drift <= threshold)",
        (parity("rollout_correction/slime_opsm_mask"),),
    ),
    Mutation(
        "corrections.py",
        "drift has the wrong sign",
        "torch.where(on, anchor - log_probs, ",
        "torch.where(on, log_probs - anchor, ",
        (parity("rollout_correction/slime_opsm_mask"),),
    ),
    Mutation(
        "covariance.py",
        "products of what is not centered",
        "return kept - kept.sum() / count",
        "return kept",
        ("test_covariance.py::test_covariances_are_those_of_the_loop_and_sum_to_the_covariance",),
    ),
    Mutation(
        "covariance.py",
        "the smallest covariances are chosen",
        "covariances = torch.where(on, token_covariances(log_probs, advantages, mask), -torch.inf)",
        "covariances = torch.where(on, -token_covariances(log_probs, advantages, mask), -torch.inf)",
        ("test_covariance.py::test_kl_cov_takes_the_largest",),
    ),
    Mutation(
        "covariance.py",
        "tokens that the clip has taken out are candidates",
        "candidates = (on & ~clipped & (covariances",
        "candidates = (on & (covariances",
        ("test_covariance.py::test_clip_cov_takes_the_first_candidates_that_the_clip_leaves",),
    ),
    Mutation(
        "proximal.py",
        "the tokens of the current version are due",
        "version == current_version - 1)",
        "version == current_version)",
        ("test_proximal.py::test_tokens_of_the_version_before_are_due",),
    ),
    Mutation(
        "proximal.py",
        "the proximal policy is the current one",
        "behind = current.floor() - 1 - weight_versions",
        "behind = current.floor() - weight_versions",
        ("test_proximal.py::test_fractions",),
    ),
    Mutation(
        "proximal.py",
        "between two syncs the trainer counts as at the last one",
        "age = current - weight_versions",
        "age = current.floor() - weight_versions",
        ("test_algorithms.py::test_value_and_gradient_of_each_preset_are_the_papers[decoupled, log-probs by version]",),
    ),
    Mutation(
        "proximal.py",
        "segment log-probs are asked for again",
        "tuple(place for place in places if known[place] != current_version)",
        "places",
        ("test_proximal_recompute.py::test_the_second_time_changes_nothing_and_asks_nobody",),
        fast=True,
    ),
    Mutation(
        "proximal.py",
        "tokens of the version that trains count as missed",
        "0 <= version < current_version and own < 0",
        "0 <= version <= current_version and own < 0",
        ("test_proximal_recompute.py::test_only_tokens_of_the_version_before_are_asked_about_and_no_token_behind_them",),
    ),
    Mutation(
        "proximal.py",
        "a token without a version passes",
        "min(compress(versions, sample.loss_mask), default=0) < 0",
        "sample.weight_versions is None and sample.tokens",
        ("test_proximal_recompute.py::test_an_engine_without_versions_is_refused",),
    ),
    Mutation(
        "rl_loop.py",
        "the weights are synced while the evaluation of the step before goes on",
        "error = await self._finish_line()\n        evaluated",
        "error = None\n        evaluated",
        ("test_async_rl_loop.py::test_an_evaluation_runs_beside_the_next_step_and_its_numbers_stand_in_its_own_line",),
    ),
    Mutation(
        "rl_loop.py",
        "what waits gets no segment log-probs behind a sync",
        "await run.sync(self._finished, rollouts, checkpoint)\n            await self._recompute(metrics, is_last=is_last)",
        "await run.sync(self._finished, rollouts, checkpoint)\n            metrics['num_segment_tokens'] = 1.0",
        ("test_async_rl_loop.py::test_no_token_misses_its_window_in_a_segment_wise_run_that_is_resumed",),
    ),
    Mutation(
        "rl_loop.py",
        "a resumed segment-wise run does not compute the log-probs that are due",
        "if self._resume is not None and self._recomputer is not None:",
        "if self._resume is None and self._recomputer is not None:",
        ("test_async_rl_loop.py::test_no_token_misses_its_window_in_a_segment_wise_run_that_is_resumed",),
    ),
    Mutation(
        "rl_loop.py",
        "every checkpoint interrupts",
        '(saves and in_flight.checkpoint_in_flight == "interrupt")',
        "saves",
        ("test_async_rl_loop.py::test_a_checkpoint_interrupts_only_where_it_is_told_to",),
    ),
    Mutation(
        "rl_loop.py",
        "an evaluation is waited for without a limit",
        "math.inf if patience_s is None else patience_s",
        "1e9",
        ("test_async_rl_loop.py::test_an_evaluation_that_never_ends_ends_the_run_after_its_patience",),
    ),
    Mutation(
        "rl_loop.py",
        "what waits is scored after the last step, too",
        "0 if is_last else await",
        "await",
        ("test_async_rl_loop.py::test_after_the_last_step_nothing_is_scored_for_nobody",),
    ),
    Mutation(
        "rl_loop.py",
        "an error of the evaluation is lost beside another",
        "if line.error is not None and line.error is not error:",
        "if False:",
        ("test_async_rl_loop.py::test_the_error_of_an_evaluation_is_not_lost_where_the_training_beside_it_fails_too",),
    ),
    Mutation(
        "rl_run.py",
        "the epoch is that of prompts that are not trained on yet",
        "max(sample.group_index for sample in rollouts.samples) // len(self._data_buffer)",
        "self._data_buffer.state.epoch_id",
        ("test_async_rl_loop.py::test_the_epoch_of_a_line_is_that_of_its_prompts_and_not_of_those_that_were_taken_ahead",),
    ),
    Mutation(
        "rl_run.py",
        "nothing to compare is said in each step",
        "self._warned_of_parity = True",
        "self._warned_of_parity = False",
        ("test_async_rl_loop.py::test_steps_without_a_row_to_compare_with_the_trainer_are_counted_and_named_once",),
    ),
    Mutation(
        "rl_loop.py",
        "weights of a step that failed half-way are saved",
        "if self._updating or not self._run.saves",
        "if not self._run.saves",
        ("test_async_rl_loop.py::test_weights_of_a_step_that_failed_half_way_are_not_saved",),
    ),
    Mutation(
        "rl_loop.py",
        "an error of the rollouts leaves nothing",
        "await self._save_after(error)\n            raise",
        "raise",
        ("test_async_rl_loop.py::test_an_error_of_the_rollouts_leaves_a_checkpoint_with_everything_and_says_so",),
    ),
    Mutation(
        "rl_loop.py",
        "a failed evaluation is waited for as long as a batch",
        "        self.waiting.cancel()\n",
        "        pass\n",
        ("test_async_rl_loop.py::test_a_failed_evaluation_ends_the_run_with_its_error_and_the_step_is_saved",),
    ),
    Mutation(
        "rl_loop.py",
        "a checkpoint after an error is resumed with its line of metrics twice",
        "await self._run.save(self._finished, self._metrics, self._metrics_bytes)",
        "await self._run.save(self._finished, self._metrics, self._run.log_offset)",
        ("test_async_rl_loop.py::test_an_error_of_the_rollouts_leaves_a_checkpoint_with_everything_and_says_so",),
    ),
    Mutation(
        "proximal_recompute.py",
        "a version is done again between two syncs",
        "if current_version <= self._last_version:",
        "if current_version < self._last_version:",
        ("test_proximal_recompute.py::test_between_two_syncs_the_trainer_says_nothing_about_a_version",),
    ),
    Mutation(
        "proximal_recompute.py",
        "rows are cut before the last token that is due",
        "places[-1] + 1) for",
        "places[-1]) for",
        ("test_proximal_recompute.py::test_only_tokens_of_the_version_before_are_asked_about_and_no_token_behind_them",),
    ),
    Mutation(
        "proximal_recompute.py",
        "engines of any version score",
        "    if found != version:",
        "    if False:",
        ("test_proximal_recompute.py::test_engines_of_another_version_are_refused",),
    ),
    Mutation(
        "proximal_recompute.py",
        "rows of the trainer come back in the order of their length",
        "return [rows[i] for i in range(len(samples))]\n\n\ndef score_with_engines",
        "return list(rows.values())\n\n\ndef score_with_engines",
        ("test_proximal_recompute.py::test_the_trainer_gives_its_own_log_probs",),
    ),
    Mutation(
        "proximal_recompute.py",
        "samples that are not trained on are scored",
        'sample.weight_versions is not None and sample.metadata.get("trainable", True)',
        "sample.weight_versions is not None",
        ("test_proximal_recompute.py::test_samples_that_are_not_trained_on_cost_nothing",),
    ),
    Mutation(
        "corrections.py",
        "missed tokens have the weight of the rollout although they are to have the proximal one",
        "target = torch.where(find_missed(batch), prox, target)",
        "pass",
        ("test_proximal_recompute.py::test_missed_tokens_weigh_1_or_as_the_proximal_policy_says",),
    ),
    Mutation(
        "samples.py",
        "tokens of a continued sample count as scored",
        "start.segment_versions + (-1,) * completion.output_len",
        "start.segment_versions + completion.output_versions",
        ("test_weights_change_under_generation.py::test_interrupted_requests_get_them_at_each_sync",),
    ),
    Mutation(
        "engines/inprocess.py",
        "keys and values are kept although they are to be computed again",
        'if self._kv_cache_on_update == "recompute" and self._running:',
        "if False:",
        ("test_weights_change_under_generation.py::test_each_token_has_the_version_that_sampled_it_and_its_log_prob_under_it",),
    ),
    Mutation(
        "workflows.py",
        "half an answer counts as a whole one",
        'if completion.finish_reason == "abort":',
        "if False:",
        ("test_workflows.py::test_half_an_answer_is_not_taken_for_a_whole_one",),
    ),
    Mutation(
        "workflows.py",
        "an interrupted episode fails",
        "if not engine.was_interrupted:",
        "if engine is not None:",
        ("test_workflows.py::test_an_interrupted_episode_is_begun_anew",),
    ),
    Mutation(
        "workflows.py",
        "what an episode makes of half an answer is believed",
        "if engine.was_interrupted and (not group or is_finished(group)):",
        "if engine.was_interrupted and not group:",
        ("test_workflows.py::test_whatever_an_episode_makes_of_an_interruption_it_is_begun_anew",),
    ),
    Mutation(
        "config.py",
        "rewards of a workflow stay within its generate function",
        "if isinstance(self.generate_fn, ScoringGenerateFn):",
        "if False:",
        ("test_workflows.py::test_an_interruption_during_rewards_loses_no_answer",),
    ),
    Mutation(
        "kl_control.py",
        "the error is clipped above only",
        "error = min(max(current_kl / control.target - 1, -0.2), 0.2)",
        "error = min(current_kl / control.target - 1, 0.2)",
        ("test_kl_control.py::test_the_coefficient_follows_the_paper",),
    ),
    Mutation(
        "kl_control.py",
        "the coefficient falls where the KL is too large",
        "1 + error * num_samples",
        "1 - error * num_samples",
        ("test_kl_control.py::test_the_coefficient_rises_above_the_target_and_falls_below_it",),
    ),
    Mutation(
        "kl_control.py",
        "the coefficient falls to 0 and stays there",
        "max(1 + error * num_samples / control.horizon, 0.1)",
        "max(1 + error * num_samples / control.horizon, 0.0)",
        ("test_kl_control.py::test_the_coefficient_can_always_rise_again",),
    ),
    Mutation(
        "advantages.py",
        "GPG scales by all rows where none is valid",
        "torch.where(num_valid > 0, centered *",
        "torch.where(num_valid >= 0, centered *",
        ("test_advantages.py::test_gpg_is_zero_where_no_row_is_valid",),
    ),
    Mutation(
        "algorithms.py",
        "an infinite hyper-parameter passes",
        "isinstance(value, Real) and math.isfinite(value)",
        "isinstance(value, Real)",
        ("test_algorithms.py::test_hyper_parameters_out_of_range_are_refused_by_name",),
    ),
    Mutation(
        "gigpo.py",
        "the step level is left out",
        "return episode + omega * step_advantages(",
        "return episode + 0 * step_advantages(",
        (parity("gigpo/gigpo_outcome_advantage"),),
    ),
    Mutation(
        "gigpo.py",
        "steps come in any order",
        "order = trajectory_ids.argsort(stable=True)",
        "order = trajectory_ids.argsort(stable=True, descending=True).flip(0)",
        (parity("gigpo/gigpo_step_discounted_returns"),),
    ),
    Mutation(
        "staleness.py",
        "one batch fewer may be ahead",
        "ahead = (limits.max_staleness + version + 1) *",
        "ahead = (limits.max_staleness + version) *",
        ("test_staleness.py::test_capacity_is_the_smaller_of_two_limits",),
    ),
    Mutation(
        "staleness.py",
        "the larger of the two limits holds",
        "return min(concurrent, ahead) + counts.filtered",
        "return max(concurrent, ahead) + counts.filtered",
        ("test_staleness.py::test_capacity_is_the_smaller_of_two_limits",),
    ),
    Mutation(
        "staleness.py",
        "a sample at the limit is too old",
        "return compute_staleness(sample, current_version) > compute_allowed",
        "return compute_staleness(sample, current_version) >= compute_allowed",
        ("test_staleness.py::test_staleness",),
    ),
    Mutation(
        "preferences.py",
        "the rejected answer is preferred",
        "return -logsigmoid(beta * h)",
        "return -logsigmoid(-beta * h)",
        ("test_preferences.py::test_losses_of_pairs_are_those_of_the_papers",),
    ),
    Mutation(
        "preferences.py",
        "IPO's margin is twice too large",
        "return (h - 1 / (2 * beta)).square()",
        "return (h - 1 / beta).square()",
        ("test_preferences.py::test_ipo_is_smallest_at_its_margin",),
    ),
    Mutation(
        "preferences.py",
        "the margin of a reward model helps it",
        "difference if margin is None else difference - margin",
        "difference if margin is None else difference + margin",
        ("test_preferences.py::test_bradley_terry_is_that_of_the_paper",),
    ),
    Mutation(
        "engines/transport.py",
        "a request that fails keeps its place",
        "        except BaseException:\n            self._limiter.release_on_behalf_of(holder)\n            raise",
        "        except httpx.TransportError:\n            self._limiter.release_on_behalf_of(holder)\n            raise",
        ("test_transport_cancellation.py::test_a_cancelled_request_leaves_nothing_behind",),
    ),
    Mutation(
        "engines/transport.py",
        "a response that was not read to its end gives its connection to the next request",
        "if connection.is_reusable and not self._is_closed:",
        "if not self._is_closed:",
        ("test_transport_cancellation.py::test_a_response_that_nobody_reads_to_its_end_is_not_read_by_the_next",),
    ),
    Mutation(
        "engines/transport.py",
        "a request that may have been read is sent again",
        '                if not (error.is_unread or request.extensions.get("repeatable", request.method in REPEATABLE_METHODS)):\n'
        "                    raise",
        "                pass",
        ("test_transport.py::test_a_request_that_was_read_is_sent_again_only_where_twice_is_the_same_as_once",),
    ),
    Mutation(
        "engines/transport.py",
        "a connection that the server has closed is used",
        "if not connection.has_input():",
        "if connection:",
        ("test_transport.py::test_what_a_server_says_unasked_is_not_taken_for_the_next_answer",),
    ),
    Mutation(
        "engines/connection.py",
        "what follows the end of an answer is taken for the next one",
        " and http.their_state is h11.DONE and not http.trailing_data[0]",
        " and http.their_state is h11.DONE",
        ("test_transport.py::test_what_follows_the_end_of_an_answer_is_not_taken_for_the_next_one",),
    ),
    Mutation(
        "engines/connection.py",
        "every lost answer counts as unread",
        "is_unread=is_reset or not is_sent",
        "is_unread=True",
        ("test_transport.py::test_a_request_that_was_read_is_sent_again_only_where_twice_is_the_same_as_once",),
    ),
    Mutation(
        "engines/connection.py",
        "a process that was held up takes an unread request for a read one",
        "RESET_S = 5.0",
        "RESET_S = 0.5",
        ("test_transport.py::test_a_request_that_the_server_did_not_read_is_sent_again",),
    ),
    Mutation(
        "engines/http.py",
        "a generation whose answer was lost is sent again",
        "return idempotent and isinstance(error, httpx.ReadError | ServerHungUp)",
        "return isinstance(error, httpx.ReadError | ServerHungUp)",
        ("test_http_retries.py::test_a_lost_answer_is_asked_for_again_only_where_twice_is_the_same_as_once",),
    ),
    Mutation(
        "engines/http.py",
        "control calls queue behind generations",
        'limiter = self._generations if kind == "generate" else self._control_calls',
        "limiter = self._generations",
        ("test_http_endpoint.py::test_a_control_call_does_not_wait_behind_generations",),
    ),
    Mutation(
        "engines/http.py",
        "control calls share the connections of generations",
        'extensions["fresh_connection"] = True',
        'extensions["fresh_connection"] = False',
        ("test_http_endpoint.py::test_generations_share_connections_and_control_calls_have_their_own",),
    ),
    Mutation(
        "engines/http.py",
        "the time that attempts take does not count in the budget",
        "first_failure_at = min(first_failure_at, now)",
        "first_failure_at = now",
        ("test_http_retries.py::test_the_budget_counts_what_attempts_take",),
    ),
    Mutation(
        "engines/server_events.py",
        "a line feed after a carriage return at the end of a chunk is a line of its own",
        'chunk = chunk.removeprefix(b"\\n")',
        "pass",
        ("test_server_events.py::test_streams_of_events",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "the last id of the vocabulary is expected as it was sent",
        "expected = [0 if vocab_size is not None and token == vocab_size - 1 else token for token in tokens[start_index - 1 :]]",
        "expected = list(tokens[start_index - 1 :])",
        ("test_sglang_engine.py::test_the_last_id_of_the_vocabulary_is_repeated_as_0_by_the_server",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "samples of a request have ids of several lengths",
        'return [f"{wire_id}-{i:06d}" for i in range(n)]',
        'return [f"{wire_id}-{i}" for i in range(n)]',
        ("test_sglang_engine.py::test_ids_of_samples_are_no_beginnings_of_one_another",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "a seed is sent to a server that ignores it",
        "if seeded and params.seed is not None:",
        "if params.seed is not None:",
        ("test_sglang_engine.py::test_a_seed_is_sent_only_where_it_has_an_effect",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "every bucket of tensors sets the label",
        "    if is_last:\n        body",
        "    if True:\n        body",
        ("test_sglang_engine.py::test_a_bucket_of_tensors_is_a_plain_pickle_without_the_storage_around_a_view",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "a view is sent with the storage around it",
        ".contiguous().clone())",
        ".contiguous())",
        ("test_sglang_engine.py::test_a_bucket_of_tensors_is_a_plain_pickle_without_the_storage_around_a_view",),
    ),
    Mutation(
        "engines/sglang_protocol.py",
        "a request may be as long as the context",
        "max_total=longest + _KEPT_BACK - 1,",
        "max_total=longest + _KEPT_BACK + 1,",
        ("test_sglang_engine.py::test_a_request_beyond_the_context_is_cut_by_us_because_the_server_refuses_it",),
    ),
    Mutation(
        "engines/sglang_weights.py",
        "an update that was made but not flushed counts as failed",
        "if not is_updated_but_not_flushed(error.status, error.body):",
        "if True:",
        ("test_sglang_engine.py::test_an_update_that_answers_400_although_it_took_place_is_flushed_and_done_again",),
    ),
    Mutation(
        "engines/sglang_weights.py",
        "a session that fails stays open",
        "if not is_over:  # an open session",
        "if False:  # an open session",
        ("test_sglang_engine.py::test_an_update_in_memory_that_fails_half_way_goes_back_to_the_directory",),
    ),
    Mutation(
        "engines/sglang.py",
        "an abort of all ends the requests of other clients",
        '{"rid": one}, idempotent=True',
        '{"rid": one, "abort_all": True}, idempotent=True',
        ("test_sglang_engine.py::test_an_abort_of_all_spares_other_clients",),
    ),
    Mutation(
        "engines/sglang.py",
        "an answer that can be sent again has reached its length",
        "completion.output_len > max_prompt",
        "completion.output_len >= max_prompt",
        ("test_sglang_engine.py::test_an_aborted_answer_that_is_too_long_to_be_sent_again_has_reached_its_length",),
    ),
    Mutation(
        "engines/sglang.py",
        "all samples of a group get one seed",
        "if params.seed is None or request.n == 1 else",
        "if True else",
        ("test_sglang_engine.py::test_seeds_decide_where_the_server_runs_deterministically",),
    ),
    Mutation(
        "engines/distributed_weights.py",
        "the cache of the old weights is kept after a broadcast",
        "        await routes.flush()\n        await routes.write_label",
        "        await routes.write_label",
        ("test_distributed_weights.py::test_all_servers_of_a_group_get_the_weights_while_requests_run",),
    ),
    Mutation(
        "engines/sglang_facts.py",
        "the kind of log-probs is believed, not measured",
        "log_prob_kind=measured or log_prob_kind or",
        "log_prob_kind=log_prob_kind or",
        ("test_sglang_engine.py::test_the_kind_of_log_probs_is_measured",),
    ),
    Mutation(
        "engines/sglang_weights.py",
        "the load keeps the prefix cache",
        '"weight_version": label, "flush_cache": True',
        '"weight_version": label, "flush_cache": False',
        ("test_weight_sync.py::test_two_syncs_at_once_never_share_a_version",),
    ),
    Mutation(
        "engines/sglang.py",
        "a sync leaves requests in place",
        '"retract" if in_flight == "continue"',
        '"in_place" if in_flight == "continue"',
        ("test_weight_sync.py::test_two_syncs_at_once_never_share_a_version",),
    ),
    Mutation(
        "engines/weight_transaction.py",
        "nothing is paused for a load",
        'await _timed(seconds, "pause_s", self._controls.pause)',
        'seconds["pause_s"]  = 0.0',
        ("test_vllm_engine.py::test_weights_can_be_brought_in_another_way_while_requests_run",),
    ),
    Mutation(
        "engines/sglang_weights.py",
        "a new label aborts everything",
        '{"new_version": label, "abort_all_requests": False}',
        '{"new_version": label}',
        ("test_distributed_weights.py::test_all_servers_of_a_group_get_the_weights_while_requests_run[continue]",),
    ),
    Mutation(
        "engines/vllm.py",
        "a seed is sent to a server that it would end",
        "            params = params.new(seed=None)\n",
        "            pass\n",
        ("test_vllm_engine.py::test_seeds_that_would_end_a_server_on_a_cpu_are_not_sent",),
    ),
    Mutation(
        "engines/vllm.py",
        "weights in memory may lack the head on a CPU",
        'if self._get_info().device == "cpu" and HEAD not in weights',
        "if False",
        ("test_vllm_engine.py::test_on_a_cpu_weights_in_memory_need_the_output_head",),
    ),
    Mutation(
        "engines/request_checks.py",
        "ids outside the vocabulary are sent",
        "high >= vocab_size",
        "high > vocab_size",
        ("test_engine_contract.py::test_what_cannot_be_served_is_refused_before_anything_is_sent[fake_sglang]",),
    ),
    Mutation(
        "engines/http_engine.py",
        "a score may be of two weights",
        "if self._num_holds == num_holds:  # else",
        "if True:  # else",
        ("test_vllm_engine.py::test_scores_wait_for_a_sync_and_are_of_the_new_weights",),
    ),
    Mutation(
        "engines/weight_transaction.py",
        "updates at once get one number",
        "            version = self.version + 1 if version is None else version\n            label",
        "            version = 1 if version is None else version\n            label",
        ("test_weight_sync.py::test_two_syncs_at_once_never_share_a_version",),
    ),
    Mutation(
        "engines/weight_transaction.py",
        "a resume makes unknown weights known",
        "            if not self._is_unknown:\n                await self._controls.resume()\n                self._requests.mark_usable()",
        "            if True:\n                await self._controls.resume()\n                self._requests.mark_usable()",
        ("test_weight_transaction.py::test_a_resume_does_not_make_unknown_weights_known",),
    ),
    Mutation(
        "weight_sync.py",
        "a failed probe changes nothing",
        "        if isinstance(engine, _DistrustsWeights):",
        "        if False:",
        ("test_weight_sync.py::test_a_server_whose_outputs_are_not_those_of_the_new_weights_is_used_no_more",),
    ),
    Mutation(
        "rl_run.py",
        "a correction reads log-probs of a cut distribution",
        "                check_sampled_whole(samples, algorithm)",
        "                check_sampled_whole(samples, self.algorithm)",
        ("test_engine_parity.py::test_a_correction_never_reads_log_probs_of_a_cut_distribution",),
    ),
    Mutation(
        "engine_parity.py",
        "cut distributions are compared",
        'if sample.weight_versions is None or sample.metadata.get("truncated_sampling"):',
        "if sample.weight_versions is None:",
        ("test_engine_parity.py::test_rows_without_versions_or_of_a_cut_distribution_are_not_compared",),
    ),
    Mutation(
        "engines/server_supervisor.py",
        "orphans of a server are not adopted",
        "libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)",
        "pass",
        ("test_servers.py::test_what_a_dead_server_leaves_behind_is_ended[session]",),
    ),
    Mutation(
        "engines/server_supervisor.py",
        "all processes are asked to end at the same time",
        "            _send(signal.SIGTERM, [self._leader])",
        "            _send(signal.SIGTERM, self._find_living())",
        ("test_servers.py::test_the_first_process_is_asked_to_end_before_the_others",),
    ),
    Mutation(
        "engines/server_supervisor.py",
        "what ignores SIGTERM is never killed",
        "_send(signal.SIGKILL, self._find_living())",
        "pass",
        ("test_servers.py::test_a_server_that_ignores_sigterm_is_killed_after_the_grace",),
    ),
    Mutation(
        "engines/server_supervisor.py",
        "shared memory that another process uses is removed",
        "            left -= _find_mapped(",
        "            left = left or _find_mapped(",
        ("test_servers.py::test_shared_memory_is_removed_and_that_of_others_is_not",),
    ),
    Mutation(
        "engines/servers.py",
        "the port is not kept while the server loads",
        'if sys.platform != "linux":',
        "if True:",
        ("test_servers.py::test_the_port_is_kept_from_others_while_the_server_loads",),
    ),
    Mutation(
        "engines/servers.py",
        "a port taken in the meantime is final",
        "except _PortTaken:",
        "except ZeroDivisionError:",
        ("test_servers.py::test_a_port_taken_in_the_meantime_is_replaced",),
    ),
    Mutation(
        "engines/servers.py",
        "the death of a server goes unnoticed",
        "        self._nursery.start_soon(self._fail_on_exit, run)",
        "        pass",
        ("test_servers.py::test_the_death_of_a_server_fails_the_block_whatever_it_waits_for",),
    ),
    Mutation(
        "engines/servers.py",
        "a request that fails by the server's death hides the death",
        "await launch.await_end()",
        "pass",
        ("test_servers.py::test_a_request_that_fails_by_the_servers_death_shows_the_death",),
    ),
    Mutation(
        "engines/servers.py",
        "a restart that failed is waited for as if the server were dying",
        " or not run.is_watched:",
        ":",
        ("test_servers.py::test_a_restart_that_fails_says_why_at_once_and_may_be_tried_again",),
    ),
    Mutation(
        "engines/server_supervisor.py",
        "a name in shared memory that is no text ends the supervisor",
        'os.fsdecode(line.rpartition(b"/")[2].strip())',
        'line.rpartition(b"/")[2].strip().decode()',
        ("test_servers.py::test_a_name_in_shared_memory_that_is_no_text_is_no_trouble",),
    ),
    Mutation(
        "engines/server_log.py",
        "who has no room for the cache is told to give it less",
        '"no room for the cache beside the weights: raise memory_fraction',
        '"not enough memory: lower memory_fraction',
        ("test_server_commands.py::test_known_causes_are_named",),
    ),
    Mutation(
        "engines/server_log.py",
        "the root of a chain of exceptions is not told",
        "find_errors(lines[:-TAIL_LINES])[:MAX_ERRORS]",
        "find_errors([])",
        ("test_server_commands.py::test_the_root_of_a_chain_of_exceptions_is_told_where_the_last_lines_miss_it",),
    ),
    Mutation(
        "engines/server_commands.py",
        "vLLM's log-probs are those before temperature",
        '"processed_logprobs"',
        '"raw_logprobs"',
        ("test_server_commands.py::test_vllm_gets_every_setting",),
    ),
    Mutation(
        "finished_rollouts.py",
        "groups one version too old are handed out",
        "take_out(self._cache, lambda rollout: is_beyond(rollout, version, self._max_staleness))",
        "take_out(self._cache, lambda rollout: is_beyond(rollout, version - 1, self._max_staleness))",
        ("test_async_rollouts.py::test_the_bound_is_exact",),
        fast=True,
    ),
    Mutation(
        "finished_rollouts.py",
        "strict order does not wait for stragglers",
        "return bool(self._held) and (not self._in_order or self._held[0][1].data.prompt.index < first_open)",
        "return bool(self._held)",
        ("test_async_rollouts.py::test_in_strict_order_the_trainer_waits_for_stragglers",),
    ),
    Mutation(
        "finished_rollouts.py",
        "groups of an earlier process are used in another order",
        "self._cache.add(TimedResult(float(place - len(ready)), rollout))",
        "self._cache.add(TimedResult(float(-place), rollout))",
        ("test_async_rollouts.py::test_a_state_taken_at_any_moment_counts_what_runs_as_waiting",),
    ),
    Mutation(
        "rollout_book.py",
        "a stopped rollout is lost",
        "self.manager.on_rollout_returned()\n        self.schedule.add(run.pending, begun_version=self._find_begun_version(run))",
        "self.manager.on_rollout_returned()",
        ("test_async_rollouts.py::test_cancelling_the_block_loses_nothing",),
    ),
    Mutation(
        "rollout_book.py",
        "dropped groups keep their room",
        "self.manager.on_rollout_dropped(len(dropped), self.version)",
        "pass",
        ("test_async_rollouts.py::test_a_run_that_drops_groups_stops_unless_they_give_their_room_back",),
    ),
    Mutation(
        "rollout_book.py",
        "dead engines use up the attempts of prompts",
        "elif self._is_outage(run):",
        "elif not attempts:",
        ("test_async_rollouts.py::test_while_every_engine_is_dead_prompts_are_neither_dropped_nor_given_up",),
    ),
    Mutation(
        "rollout_book.py",
        "tokens that are too old are continued",
        "if pending.samples and self._is_too_old(pending, begun):",
        "if not pending and self._is_too_old(pending, begun):",
        ("test_async_rollouts.py::test_unfinished_tokens_that_are_too_old_are_not_continued",),
    ),
    Mutation(
        "rollout_book.py",
        "a failed group takes no other's place in strict order",
        "self._refuse(run.index)\n            self._pass_on()",
        "self._refuse(run.index)",
        (
            "test_async_rollouts.py::test_a_crash_can_drop_the_group",
            "test_async_properties.py::test_whatever_happens_nothing_is_lost_or_comes_twice_or_is_too_old",
        ),
    ),
    Mutation(
        "prompt_schedule.py",
        "a prompt that is tried again later is overtaken",
        "num_new = room - len(taken) - len(self._delayed) - len(self._held_back)",
        "num_new = room - len(taken)",
        ("test_async_properties.py::test_in_strict_order_batches_do_not_depend_on_timing_and_are_never_too_old",),
    ),
    Mutation(
        "prompt_schedule.py",
        "tokens without versions are as young as their continuation",
        "self._begun[index] = begun_version",
        "pass",
        ("test_async_rollouts.py::test_samples_without_versions_keep_their_age_when_they_go_on",),
    ),
    Mutation(
        "rollout_runs.py",
        "engines are told to abort once",
        "with trio.move_on_after(_ABORT_AGAIN_S):\n                        while self._num_generating:",
        "with trio.move_on_after(1e9):\n                        while self._num_generating:",
        ("test_async_rollouts.py::test_a_rollout_of_several_requests_is_told_again",),
    ),
    Mutation(
        "rollout_runs.py",
        "what a timed-out rollout has is lost",
        "await self._abort_engines([*sample_ids, *sorted(run.request_ids.difference(sample_ids))])",
        "run.scope.cancel()",
        ("test_async_rollouts.py::test_a_rollout_that_takes_too_long_is_aborted_and_goes_on_from_its_tokens",),
    ),
    Mutation(
        "rollout_producer.py",
        "a failure that nobody waited for is lost",
        "                self._book.give_back(run)\n        self._book.raise_failure()",
        "                self._book.give_back(run)",
        ("test_async_rollouts.py::test_a_failure_that_nobody_waited_for_is_raised_at_the_end_of_the_block",),
    ),
    Mutation(
        "rollout_producer.py",
        "after an interruption nothing starts before somebody waits",
        "self._interrupted = False\n        self.wake()",
        "self._interrupted = False",
        ("test_rollout_producer.py::test_rollouts_go_on_after_an_interruption_although_nobody_waits",),
    ),
    Mutation(
        "rollout_producer.py",
        "who waits is not told that a prompt was given up",
        "            self._on_start()",
        "            pass",
        ("test_rollout_producer.py::test_who_waits_is_told_at_once_when_a_prompt_is_given_up_that_was_to_start",),
    ),
    Mutation(
        "refused_groups.py",
        "groups that came to nothing count although others were handed out",
        "self._num_refused = self._num_dropped = self._num_stale = 0\n",
        "pass\n",
        ("test_async_rollouts.py::test_a_run_that_drops_groups_stops_unless_they_give_their_room_back",),
    ),
    Mutation(
        "async_rollouts.py",
        "a batch is handed out while its samples are edited",
        "if self._finished.num_ready >= count and not self._residents.is_being_edited:",
        "if self._finished.num_ready >= count:",
        ("test_async_rollouts.py::test_rollouts_go_on_during_an_edit_and_nothing_is_handed_out",),
    ),
    Mutation(
        "async_rollouts.py",
        "which of those that end at one moment come first is chance",
        "await self._let_arrivals_settle()\n",
        "pass\n",
        ("test_async_rollouts.py::test_those_with_more_to_do_at_the_same_moment_are_waited_for",),
    ),
    Mutation(
        "staleness_control.py",
        "what was given back is forgotten on resume",
        "for modifier, own in zip(self._modifiers, saved, strict=True):\n            modifier.load_state_dict(own)",
        "assert self._modifiers or not saved",
        ("test_staleness_control.py::test_a_run_that_is_resumed_has_the_capacity_that_it_had",),
    ),
    Mutation(
        "rollout_runs.py",
        "errors of one class stay a group",
        "self.error = reduce_alike(error)",
        "self.error = error",
        ("test_async_rollouts.py::test_errors_of_one_class_at_one_moment_are_one_error",),
    ),
    Mutation(
        "rollout_book.py",
        "a prompt that engines cannot answer is tried for ever",
        "if not run.may_be_outage or run.engines_answer:",
        "if not run.may_be_outage:",
        ("test_async_rollouts.py::test_a_prompt_that_engines_cannot_answer_ends_the_run_with_its_error",),
    ),
    Mutation(
        "rollout_book.py",
        "dead engines cost prompts as soon as anything else ends",
        "bool(run.silent_engines) or self",
        "self",
        ("test_async_rollouts.py::test_engines_that_die_while_rewards_are_asked_for_cost_no_prompt",),
    ),
    Mutation(
        "rollout_runs.py",
        "the limit of a rollout goes on while its answers are judged",
        "return self._runs.get(run.index) is run and not run.scoring",
        "return self._runs.get(run.index) is run",
        ("test_async_rollouts.py::test_a_judge_that_thinks_for_longer_than_a_rollout_may_take_is_asked_once",),
    ),
    Mutation(
        "rollout_runs.py",
        "refused requests are taken for an outage",
        "EngineProtocolError | EngineRequestError)",
        "EngineProtocolError)",
        ("test_async_rollouts.py::test_a_request_that_engines_refuse_is_no_outage",),
    ),
    Mutation(
        "rollout_runs.py",
        "an interruption cancels rewards",
        "if not run.scoring:\n                    self._cut(run)",
        "run.scope.cancel()",
        ("test_async_rollouts.py::test_an_interruption_leaves_alone_what_is_being_scored",),
    ),
    Mutation(
        "rollout_runs.py",
        "what is scored during an edit loses the edit",
        "run.group = None if scored is None else _add_edits(scored, group, run.pending.samples)",
        "run.group = scored",
        ("test_async_rollouts.py::test_an_interruption_leaves_alone_what_is_being_scored",),
    ),
    Mutation(
        "rollout_book.py",
        "a full queue and a waiting trainer block each other",
        "drains=self.num_wanted > 0",
        "drains=False",
        ("test_async_rollouts.py::test_a_full_queue_is_emptied_while_somebody_waits",),
    ),
    Mutation(
        "async_rollouts.py",
        "patience bounds the whole wait",
        "max(begun, self._book.last_end) + patience_s",
        "begun + patience_s",
        ("test_async_rollouts.py::test_patience_counts_from_the_last_rollout_that_ended",),
    ),
    Mutation(
        "async_rollouts.py",
        "rollouts that are too old run to their end",
        "self._producer.stop_outdated(self._asynchronous.max_staleness)",
        "pass",
        ("test_async_rollouts.py::test_rollouts_that_are_too_old_already_do_not_run_to_their_end",),
    ),
    Mutation(
        "rollout_book.py",
        "stale attempts use up those that may fail",
        "self.schedule.count_stale_attempt(index)",
        "self.schedule.count_attempt(index)",
        (
            "test_async_rollouts.py::test_a_group_that_is_too_old_in_every_attempt_is_given_up",
            "test_async_rollouts.py::test_a_crash_and_two_stale_attempts_are_counted_apart",
        ),
    ),
    Mutation(
        "finished_rollouts.py",
        "an edit reaches what was generated anew",
        "if result.data is rollout else result",
        "if rollout is not None else result",
        ("test_async_rollouts.py::test_an_edit_does_not_reach_what_was_generated_anew_meanwhile",),
    ),
    Mutation(
        "rollout_book.py",
        "strict order is broken by what is begun anew",
        "self.finished.recall(self.schedule.first_open)",
        "pass",
        ("test_async_rollouts.py::test_in_strict_order_a_group_that_is_begun_anew_comes_before_those_behind_it",),
    ),
    Mutation(
        "prompt_schedule.py",
        "an edit ends the delay of a retry",
        "self._held_back.items():\n            if start_at > -math.inf:",
        "self._held_back.items():\n            if start_at > math.inf:",
        ("test_async_rollouts.py::test_an_edit_does_not_shorten_the_delay_of_a_retry",),
    ),
    Mutation(
        "rollout_queue.py",
        "samples whose versions nobody told count as new",
        "default=begun)",
        "default=newest)",
        ("test_rollout_queue.py::test_a_group_is_as_old_as_its_oldest_trained_token",),
    ),
    Mutation(
        "rollout_book.py",
        "without staleness the next batch is begun before it is waited for",
        "if self._starts_what_is_wanted:",
        "if not self._config:",
        ("test_async_rollouts.py::test_without_staleness_never_more_than_a_batch_is_under_way",),
    ),
    Mutation(
        "workflows.py",
        "later turns of an episode are not told to stop",
        "note_request(name)\n",
        "pass\n",
        ("test_async_rollouts.py::test_a_late_turn_of_an_episode_is_told_to_stop",),
    ),
    Mutation(
        "rewards/results.py",
        "two step outputs about one step both count",
        "if counts[place] > 1:",
        "if counts[place] > 2:",
        ("test_alignment.py::test_a_step_that_two_outputs_are_about_gets_neither",),
    ),
    Mutation(
        "rewards/results.py",
        "answers in the prompt are taken for turns",
        "start = len(names) - num_turns",
        "start = 0",
        ("test_reward_functions.py::test_examples_in_the_prompt_are_counted_but_are_no_turns",),
    ),
    Mutation(
        "rewards/calls.py",
        "a batch reward may return more results than there are samples",
        "if len(found) != num_samples:",
        "if len(found) < num_samples:",
        ("test_reward_functions.py::test_a_batch_of_another_length_fails_the_group",),
    ),
    Mutation(
        "rewards/evaluate.py",
        "a reward that is set to 0 is not marked",
        'reward=0.0, metadata={**group[k].metadata, "reward_error": str(judgement.error)})',
        "reward=0.0)",
        ("test_reward_functions.py::test_a_bad_result_fails_its_sample_by_policy_and_no_other",),
    ),
    Mutation(
        "rewards/composite.py",
        "weights may add up to anything",
        "abs(found - total) > 1e-6",
        "abs(found - total) > 1e6",
        ("test_composite.py::test_weights_are_checked",),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Prints a line a mutation as it goes. Returns 0 if every one was caught, else 1."""
    import hypothesis  # noqa: F401 - before the forks, which then need not import it
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    fast = "--fast" in arguments
    texts = [text for text in arguments if text != "--fast"]
    chosen = [m for m in MUTATIONS if (m.fast or not fast) and (not texts or any(text in str(m) for text in texts))]
    assert chosen, f"no mutation matches {texts}"
    if not fast:  # the default run of the tests has shown that they pass
        names = sorted({test for mutation in chosen for test in mutation.tests})
        code, output = run_tests(names)
        if code != PASSED:
            print(output)
            print("the tests fail without any mutation")
            return 1
    missed: list[Mutation] = []
    for number, (mutation, code, output, seconds) in enumerate(results(chosen), 1):
        verdict = {FAILED: "caught", PASSED: "MISSED"}.get(code, f"BROKEN (exit code {code})")
        print(f"[{number:3}/{len(chosen)}] {verdict:8} {seconds:5.1f} s  {mutation}", flush=True)
        if code != FAILED:
            missed.append(mutation)
            if code != PASSED:
                print(output)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
