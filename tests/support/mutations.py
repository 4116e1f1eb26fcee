"""Mistakes that the tests must see: each is made in a copy of the packages, and the tests named beside it must then fail.

    python tests/support/mutations.py              all of them, with a table
    python tests/support/mutations.py kl "clip"    those whose file or description contains one of these texts
    python tests/support/mutations.py --fast       the three that the slow tests make

These are mistakes of meaning, which often cross files; operators.py makes the mistakes of single operators by rule. Each mistake runs in
a process of its own, forked from one that has imported PyTorch and pytest but nothing of the packages.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1  # pytest's exit codes; others are errors of collection, usage and the like
THOROUGH = ("-m", "", "--hypothesis-profile=thorough")
DEFAULT = ("-m", "not slow and not mutations and not vllm and not sglang and not gpu")  # the tests of the default run


@dataclass(frozen=True)
class Mutation:
    """One mistake."""

    file: str  # path below rollouts/; ../integration/... for the other package
    mistake: str  # description of the mistake
    old: str  # text that stands in the file exactly once
    new: str  # text that takes its place
    tests: tuple[str, ...]  # tests below tests/, at least one of which must fail: as few and as fast as possible
    fast: bool = False  # whether the slow tests make it, too

    def __str__(self) -> str:
        return f"{self.file}: {self.mistake}"


def parity(name: str) -> str:
    """Name the test against the recorded vectors of one function."""
    return f"test_parity.py::test_our_composition_gives_their_numbers[{name}]"


def mutated(source: str, mutation: Mutation) -> str:
    """Return the text of the file with the mistake in it."""
    count = source.count(mutation.old)
    assert count == 1, f"{mutation}: its old text occurs {count} times, expected once: adapt tests/support/mutations.py to the file"
    assert mutation.new != mutation.old, f"{mutation}: nothing changes"
    return source.replace(mutation.old, mutation.new)


def run_tests(
    batches: Sequence[Sequence[str]], changed: Mapping[str, str] | None = None, options: Sequence[str] = THOROUGH
) -> tuple[int, str]:
    """Run tests on a copy of the packages.

    Args:
        batches: names of tests below tests/; one call of pytest a batch, until one of them does not pass.
        changed: new texts of files, by their paths below rollouts/.
        options: further options of pytest.

    Returns: pytest's exit code of the last batch that ran, and the output of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        for package in ("rollouts", "integration"):
            shutil.copytree(ROOT / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in (changed or {}).items():
            Path(folder, "rollouts", file).write_text(text)
        log = Path(folder, "log")
        child = os.fork()
        if child == 0:
            _run_in_this_process(folder, batches, log, options)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")


def _run_in_this_process(folder: str, batches: Sequence[Sequence[str]], log: Path, options: Sequence[str]) -> None:
    """Run the tests on the packages in `folder` and end the process with pytest's exit code."""
    code = -1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.dont_write_bytecode = True
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((folder, str(ROOT)))
        os.environ["PYTHONSAFEPATH"] = "1"  # processes that tests start look there first, not into their working directory
        for name in ("ROLLOUTS_GOLDEN_DIR", "ROLLOUTS_ENGINES_DIR"):
            os.environ.pop(name, None)  # the tests are named after the vectors that are shipped
        import pytest

        import integration
        import rollouts

        for package in (rollouts, integration):
            assert Path(str(package.__file__)).is_relative_to(folder), f"{package.__file__} is not the copy in {folder}"
        for tests in batches:
            names = [str(ROOT / "tests" / test) for test in tests]
            code = int(pytest.main(["-x", "--timeout=60", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *options, *names]))
            sys.stdout.flush()
            if code != PASSED:
                break
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 255)  # without the exit handlers of the process that it was forked from


def import_heavy_modules() -> None:
    """Import what the forked processes then need not import."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)


def iterate_results(mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, int, str, float]]:
    """(mutation, exit code, output, seconds), one after the other."""
    for mutation in mutations:
        start = time.monotonic()
        source = mutated((ROOT / "rollouts" / mutation.file).read_text(), mutation)
        code, output = run_tests([mutation.tests], {mutation.file: source})
        yield mutation, code, output, time.monotonic() - start


MUTATIONS: tuple[Mutation, ...] = (
    # Crash bundles
    Mutation(
        "../integration/crash/replay.py",
        "a replay forgets the states of the random generators",
        '        restore_random_state(call.random, torch.device(getattr(backend, "device", "cpu")))\n',
        "",
        ("integration/test_crash_bundles.py::test_a_replay_that_forgets_the_random_state_is_another_number",),
    ),
    Mutation(
        "../integration/crash/recorder.py",
        "updates since the last checkpoint are forgotten",
        "            self.updates = (*self.updates, update)",
        "            self.updates = ()",
        ("integration/test_crash_bundles.py::test_the_memory_of_a_recorder_has_a_bound",),
    ),
    Mutation(
        "backends/optim/updates.py",
        "one update more than max_skipped is left out in a row",
        "num_skipped_in_a_row=counts.num_skipped_in_a_row + 1), kind, numbers",
        "num_skipped_in_a_row=counts.num_skipped_in_a_row), kind, numbers",
        ("integration/test_crash_bundles.py::test_the_tenth_update_that_is_left_out_in_a_row_is_replayed_as_it_was",),
    ),
    # Preferences
    Mutation(
        "preference_loop.py",
        "the pairs of a step do not stay whole where it is split",
        "    if objective.compares_pairs:  # the loss",
        "    if False:  # the loss",
        ("loops/test_preference_loop.py::test_micro_batches_change_nothing[dpo]",),
    ),
    Mutation(
        "preference_loop.py",
        "KTO's reference point is that of the answers themselves",
        "    other = mismatch_answers(batch, max_length=None if limits is None else limits.context_length)",
        "    other = batch",
        ("loops/test_preference_loop.py::test_the_reference_point_is_that_of_other_prompts_answers",),
    ),
    Mutation(
        "data/preference_pairs.py",
        "an answer's log-prob under the reference counts for each of its tokens",
        "torch.where(positions == last, sums[:, None], 0.0)",
        "sums[:, None].expand_as(batch.loss_mask)",
        ("data/test_preference_data.py::test_log_probs_of_a_reference_are_a_column_and_stand_at_the_end_of_each_answer",),
    ),
    Mutation(
        "algorithms/kto.py",
        "bad answers are pushed up to the reference point instead of down",
        "torch.where(desirable, -gain, gain)",
        "torch.where(desirable, -gain, -gain)",
        (parity("preferences/trl_kto"),),
    ),
    Mutation(
        "algorithms/kto.py",
        "the reference point may be negative",
        ".clamp(min=0).detach()",
        ".detach()",
        (parity("preferences/trl_kto"),),
    ),
    Mutation(
        "algorithms/preferences.py",
        "robust DPO is not divided by 1 - 2 epsilon",
        "label_smoothing * logsigmoid(-beta * h)) / (1 - 2 * label_smoothing)",
        "label_smoothing * logsigmoid(-beta * h)) / (1 - label_smoothing)",
        (parity("preferences/trl_dpo"),),
    ),
    Mutation(
        "algorithms/preferences.py",
        "SimPO's margin is multiplied by beta",
        "logsigmoid(beta * h - gamma)",
        "logsigmoid(beta * (h - gamma))",
        (parity("preferences/trl_cpo"),),
    ),
    Mutation(
        "algorithms/estimators.py",
        "groups of equal rewards make pairs",
        "if difference > 0 and difference >= min_difference:",
        "if difference >= min_difference:",
        ("training/test_online_pairs.py::test_ties_train_nothing_and_are_counted",),
    ),
    Mutation(
        "training/rollout_batch.py",
        "the rows of a pair are dealt to different mini-batches",
        "seed=seed, whole_groups=True)",
        "seed=seed)",
        ("training/test_online_pairs.py::test_minibatches_hold_whole_pairs_and_are_no_more_than_these",),
    ),
    # The trainer facade
    Mutation(
        "trainer/session.py",
        "max_steps counts iterations instead of optimizer steps",
        "self.config.training.max_steps // self.config.training.updates_per_iteration",
        "self.config.training.max_steps",
        ("trainer/test_trainer.py::test_max_steps_bounds_the_optimizer_steps_of_all_calls",),
    ),
    Mutation(
        "trainer/advantages.py",
        "the penalty on rewards is added",
        "return replace(batch, rewards=rewards)",
        "return replace(batch, rewards=2 * batch.rewards - rewards)",
        ("trainer/test_trainer_advantages.py::test_a_kl_penalty_lowers_the_rewards_of_every_estimator",),
    ),
    Mutation(
        "trainer/environments.py",
        "all episodes share the environment that was given",
        "return copy.deepcopy(environment)",
        "return environment",
        ("trainer/test_trainer_engines.py::test_an_episode_is_played_in_a_class_or_in_a_copy_of_an_object",),
    ),
    Mutation(
        "trainer/loop_thread.py",
        "a blocking call inside a trio loop is not refused",
        "    if is_in_trio():\n        raise BlockingCallError(",
        "    if False:\n        raise BlockingCallError(",
        ("trainer/test_trainer_engines.py::test_inside_a_trio_loop_it_is_refused_and_the_remedy_is_named",),
    ),
    # Keys and values kept for later prompts
    Mutation(
        "engines/inprocess/sampling.py",
        "all rows of a batch are sampled by the parameters of the first",
        "if len(distinct) == 1:",
        "if distinct:",
        ("engines/test_sampling.py::test_parameters_of_rows_are_stacked_in_their_order",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "layers of several windows share the mask of the first",
        "if (window, chunk) not in self.near:",
        "if not self.near:",
        ("engines/test_inprocess_engine.py::test_layers_of_several_windows_and_chunks_have_masks_of_their_own",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "a block is found by its own tokens alone",
        "key = (number, tuple(tokens[place * self.size",
        "key = (1, tuple(tokens[place * self.size",
        ("engines/test_kept_blocks.py::test_the_longest_kept_beginning_is_found_and_the_least_recently_used_dropped",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "the beginning of a prompt is dropped before what follows it",
        "for key in reversed(keys):  # a block",
        "for key in keys:  # a block",
        ("engines/test_kept_blocks.py::test_the_longest_kept_beginning_is_found_and_the_least_recently_used_dropped",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "a window reaches one token too far where a prompt goes on",
        "& (places > own - window)",
        "& (places >= own - window)",
        ("engines/test_kept_blocks.py::test_a_prompt_after_kept_blocks_has_the_logits_of_the_models_own_pass[20-False]",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "a kept block holds the memory of its whole prompt",
        "Block(keys[:, :, part].clone(), values",
        "Block(keys[:, :, part], values",
        ("engines/test_kept_blocks.py::test_what_is_kept_takes_no_more_memory_than_its_tokens",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "what is not kept of a prompt is one pass on a CPU, whose bits depend on what was kept",
        'self._in_blocks = self.device.type == "cpu"',
        "self._in_blocks = False",
        ("engines/test_kept_blocks.py::test_what_is_kept_changes_no_bit",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "a block that was not computed is kept",
        "        if self._in_blocks:\n            self._keep",
        "        if blocks:\n            self._keep",
        ("engines/test_kept_blocks.py::test_a_prompt_after_kept_blocks_has_the_logits_of_the_models_own_pass[None-True]",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "the positions of a prompt that goes on begin at 0",
        "position_ids=packed.position_ids + starts",
        "position_ids=packed.position_ids + 0 * starts",
        ("engines/test_kept_blocks.py::test_a_prompt_after_kept_blocks_has_the_logits_of_the_models_own_pass[None-False]",),
    ),
    Mutation(
        "engines/inprocess/engine.py",
        "keys of old weights serve prompts under new ones",
        "            self._prefixes.clear()\n            self._slots.forget()",
        "            self._prefixes.clear()",
        ("engines/test_kept_blocks.py::test_keys_of_old_weights_serve_no_prompt_under_new_ones[recompute]",),
    ),
    Mutation(
        "engines/inprocess/engine.py",
        "a whole prompt is kept from earlier requests, so that later passes have other rows",
        "if prompt in wanted}",
        "if prompt}",
        ("engines/test_kept_blocks.py::test_a_prompt_is_computed_anew_unless_requests_wait_for_it_together",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "the experts of kept blocks are lost",
        "        self.note_experts(block.experts)\n        self.length = end",
        "        self.length = end",
        ("engines/test_kept_blocks.py::test_the_experts_of_kept_blocks_are_recorded",),
    ),
    # Log-probs and masks
    Mutation(
        "engines/inprocess/graphs.py",
        "a recorded step goes on with keys and values that lie elsewhere",
        "if places != self._places:",
        "if places[1:] != self._places[1:]:",
        ("engines/test_decode_graphs.py::test_recordings_share_memory_and_are_dropped_when_what_they_read_lies_elsewhere",),
    ),
    Mutation(
        "engines/inprocess/graphs.py",
        "free slots of a bucket keep the positions of earlier sequences",
        "self.positions.copy_(torch.tensor([*positions, *[0] * num_free]))",
        "self.positions[: len(positions)].copy_(torch.tensor(positions))",
        ("engines/test_decode_graphs.py::test_free_slots_of_a_bucket_write_at_their_first_token_alone",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "a run of slots attends by the mask of the first slots",
        "attn_mask=mask[start:stop, ..., :live]",
        "attn_mask=mask[: stop - start, ..., :live]",
        ("engines/test_inprocess_engine.py::test_sequences_of_other_lengths_beside_it_change_no_logits_of_a_sequence",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "a run of slots reads as many tokens as its first slot has",
        "runs.append(Run(start, stop, int(part.max())))",
        "runs.append(Run(start, stop, int(part[0])))",
        ("engines/test_inprocess_engine.py::test_a_long_sequence_is_read_alone_and_short_ones_are_one_call",),
    ),
    Mutation(
        "models/linear.py",
        "a packed weight is read after the weight was written to",
        " or found[1] != weight._version:",
        ":",
        ("models/test_linear.py::test_a_packed_weight_is_never_stale",),
    ),
    Mutation(
        "models/linear.py",
        "layers in training pack their weights, which a fused optimizer writes uncounted",
        "layer.packs_weight = OneDNNLinear, packs_weights",
        "layer.packs_weight = OneDNNLinear, True",
        ("models/test_linear.py::test_training_has_the_numbers_of_torch_and_the_same_bits_twice",),
    ),
    Mutation(
        "models/linear.py",
        "a frozen layer keeps its inputs for a gradient that nobody asks for",
        "ctx.save_for_backward(inputs if for_weight else None, ",
        "ctx.save_for_backward(inputs, ",
        ("models/test_linear.py::test_a_pass_keeps_no_more_than_that_of_torch",),
    ),
    Mutation(
        "models/linear.py",
        "products in bfloat16 under autocast are computed in float32",
        '        and not torch.is_autocast_enabled("cpu")\n',
        "",
        (
            "models/test_linear.py::test_only_large_plain_float32_products_on_a_cpu_are_worth_it",
            "models/test_linear.py::test_products_in_bfloat16_under_autocast_stay_torchs",
        ),
    ),
    Mutation(
        "models/linear.py",
        "every processor gets oneDNN's kernels",
        '"onednn" if vendor == "AuthenticAMD" else ',
        '"onednn" if vendor else ',
        ("models/test_linear.py::test_auto_is_a_function_of_the_processor",),
    ),
    Mutation(
        "engines/inprocess/engine.py",
        "the engine computes with kernels of torch whatever it is told",
        "use_kernels(model, kernels, packs_weights=True)",
        'use_kernels(model, "torch", packs_weights=True)',
        ("models/test_linear.py::test_engine_computes_with_the_weights_that_it_was_given_last",),
    ),
    Mutation(
        "../integration/convert/weights.py",
        "weights of one file are left out for an address that another file had",
        "        seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()",
        '        seen: set[tuple[int, torch.Size, tuple[int, ...]]] = locals().get("seen", set())',
        ("integration/test_convert.py::test_no_weight_of_many_files_of_the_older_format_is_lost",),
    ),
    Mutation(
        "supervised_loop.py",
        "an evaluation between two lines has no line",
        'is_line = stopping or "evaluate_s" in metrics or is_due(',
        "is_line = stopping or is_due(",
        ("training/test_best.py::test_every_evaluation_has_a_line_however_seldom_lines_are[sft]",),
    ),
    Mutation(
        "supervised_loop.py",
        "the line of a step whose evaluation was given up is written, and again by the resumed run",
        "is_line and not gives_up",
        "is_line",
        ("loops/test_sft_loop.py::test_an_evaluation_that_is_given_up_is_made_by_the_resumed_run",),
    ),
    Mutation(
        "training/logs/continued.py",
        "a new run leaves out the lines that another run of its name has in the store",
        "if earlier is not None:",
        "if True:",
        ("integration/test_loggers.py::test_only_a_resumed_run_leaves_out_the_lines_that_the_store_has",),
    ),
    Mutation(
        "../integration/doctor/resume.py",
        "the doctor's short runs publish their model",
        '"--push-to-hub", "None", ',
        "",
        ("integration/test_doctor.py::test_the_short_runs_of_the_resume_check_publish_nothing_and_tell_no_logger",),
    ),
    Mutation(
        "../integration/settings/config.py",
        "--deterministic is not obeyed",
        "    if deterministic:\n        return",
        "    if False:\n        return",
        ("integration/test_kernels.py::test_deterministic_keeps_torchs_kernels",),
    ),
    Mutation(
        "../integration/parts/models.py",
        "the choice of kernels is not recorded",
        "replace(config.model, kernels=kernels), config.backend",
        "config.model, config.backend",
        ("integration/test_kernels.py::test_the_choice_is_recorded_and_kept",),
    ),
    Mutation(
        "algorithms/logprobs.py",
        "a chunk of logits grows with the vocabulary on a CPU",
        "min(most, max(64, memory // (4 * vocab_size) // 64 * 64))",
        "most",
        ("algorithms/test_logprobs.py::test_a_chunk_of_logits_takes_a_bounded_memory_and_a_small_vocabulary_a_chunk_of_1024",),
    ),
    Mutation(
        "algorithms/logprobs.py",
        "a gradient that was foreseen wrong is used",
        "if grads[1] is None and _have_same_bits(upstream, foreseen):",
        "if grads[1] is None:",
        ("algorithms/test_logprobs.py::test_a_foreseen_gradient_saves_a_product_and_another_one_is_computed_as_without",),
    ),
    Mutation(
        "algorithms/logprobs.py",
        "log-probs stand one position late",
        "return _align(gather_log_probs(temper(logits, temperature)[:, :-1], tokens[:, 1:]))",
        "return _align(gather_log_probs(temper(logits, temperature)[:, 1:], tokens[:, 1:]))",
        ("algorithms/test_logprobs.py::test_token_log_probs_and_entropy_against_the_loop",),
    ),
    Mutation(
        "algorithms/logprobs.py",
        "packed tokens predict themselves",
        "PackedShift(predictors=positions - 1,",
        "PackedShift(predictors=positions,",
        ("algorithms/test_logprobs.py::test_packed_log_probs_equal_those_of_each_row",),
    ),
    Mutation(
        "chat/tokenize.py",
        "prompts are trained",
        "loss_mask=compute_loss_mask(len(tokens), spans)",
        "loss_mask=compute_loss_mask(len(tokens), [(0, len(tokens))])",
        ("chat/test_chat.py::test_mask_covers_exactly_what_assistant_messages_generate",),
    ),
    Mutation(
        "data/collate.py",
        "labels are shifted twice",
        '"labels": batch.tokens,',
        '"labels": batch.tokens.roll(-1, 1),',
        ("words/test_batching.py::test_grpo_loss_of_a_prepared_batch_predicts_the_next_token",),
    ),
    Mutation(
        "algorithms/losses.py",
        "approx_kl of a small update is rounded away",
        "log_ratio.expm1() - log_ratio",
        "ratio - 1 - log_ratio",
        ("algorithms/test_losses.py::test_approx_kl_of_a_small_update_is_measured_and_not_rounded_to_zero",),
    ),
    Mutation(
        "algorithms/losses.py",
        "log-probs are not masked before exp",
        "log_probs, anchor, advantages = _where(mask, outputs.log_probs), ",
        "log_probs, anchor, advantages = outputs.log_probs, ",
        ("algorithms/test_losses.py::test_what_stands_at_masked_places_changes_nothing_bit_for_bit",),
    ),
    Mutation(
        "algorithms/surrogates.py",
        "log-ratios are masked after the subtraction, not before",
        "log_ratio = torch.where(mask > 0, log_probs - old_log_probs, 0.0)\n    return log_ratio if bound",
        "log_ratio = (mask > 0) * (log_probs - old_log_probs)\n    return log_ratio if bound",
        ("algorithms/test_surrogates.py::test_ratios_do_not_read_masked_places",),
    ),
    Mutation(
        "algorithms/logprobs.py",
        "a ratio overflows",
        "return log_ratio.clamp(max=math.log(numbers.max) * (1 - numbers.eps)).exp()",
        "return log_ratio.exp()",
        ("algorithms/test_surrogates.py::test_a_clip_that_is_active_takes_the_gradient_however_large_the_ratio",),
    ),
    Mutation(
        "algorithms/losses.py",
        "SFT learns to avoid its targets",
        "return LossOutput(-(weights * log_probs).sum(), metrics)",
        "return LossOutput((weights * log_probs).sum(), metrics)",
        ("algorithms/test_losses.py::test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens",),
    ),
    # Losses
    Mutation(
        "algorithms/surrogates.py",
        "the clip is optimistic",
        "loss = torch.maximum(-advantages * ratio, ",
        "loss = torch.minimum(-advantages * ratio, ",
        ("algorithms/test_surrogates.py::test_a_capped_ratio_is_the_dual_clip_from_one_plus_high_on",),
        fast=True,
    ),
    Mutation(
        "algorithms/surrogates.py",
        "CISPO's weight has a gradient",
        "1 + high if cap is None else cap).detach() *",
        "1 + high if cap is None else cap) *",
        (parity("losses/trl_cispo"),),
    ),
    Mutation(
        "algorithms/losses.py",
        "the anchor is the rollout policy even where there are old log-probs",
        "_where(mask, anchor), ",
        "_where(mask, anchor if batch.rollout_log_probs is None else batch.rollout_log_probs), ",
        (parity("losses/areal_realhf_actor_loss_v0_3_0"),),
    ),
    Mutation(
        "algorithms/losses.py",
        "importance weights scale the KL term, too",
        "if kl.unbiased:\n",
        "if scale is not None:\n            divergence = divergence * scale\n        if kl.unbiased:\n",
        ("algorithms/test_loss_parts.py::test_weights_of_both_kinds_multiply_the_policy_term_alone",),
    ),
    Mutation(
        "algorithms/losses.py",
        "the KL term has the wrong sign",
        "per_token = per_token + (kl.coef if",
        "per_token = per_token - (kl.coef if",
        ("algorithms/test_losses.py::test_the_clipped_loss_matches_the_loop_in_value_and_gradient",),
    ),
    Mutation(
        "algorithms/losses.py",
        "the coefficient of the KL controller is ignored by the loss",
        "(kl.coef if batch.kl_coef is None else batch.kl_coef[:, None])",
        "kl.coef",
        ("algorithms/test_losses.py::test_a_coefficient_in_the_batch_replaces_that_of_the_loss",),
    ),
    Mutation(
        "algorithms/losses.py",
        "the loss is a mean over tokens, not a weighted sum",
        "return LossOutput((weights * _where(mask, per_token)).sum(), metrics)",
        "return LossOutput((weights * _where(mask, per_token)).mean(), metrics)",
        ("algorithms/test_losses.py::test_sft_is_reinforce_with_advantage_one_and_the_cross_entropy_of_trained_tokens",),
    ),
    Mutation(
        "algorithms/losses.py",
        "distillation differentiates its advantage",
        "(batch.ref_log_probs - outputs.log_probs).detach()",
        "(batch.ref_log_probs - outputs.log_probs)",
        ("algorithms/test_loss_parts.py::test_distillation_has_the_gradient_of_the_divergence_from_the_teacher",),
    ),
    Mutation(
        "algorithms/losses.py",
        "metrics of micro-batches are averaged without their sizes",
        "sum(value * count for value, count in values) / sum(count for _, count in values)",
        "sum(value for value, count in values) / len(values)",
        ("algorithms/test_losses.py::test_max_and_min_metrics_merge_as_such_and_parts_without_tokens_say_nothing",),
    ),
    Mutation(
        "algorithms/presets.py",
        "a preset does not pass its KL estimator on",
        "**fill_penalty(kl_coef, kl)),\n        weigh=token_mean,\n        loss=partial(clipped_policy_loss, "
        "low=clip_low, high=clip_high, dual=dual",
        "**fill_penalty(kl_coef, k1)),\n        weigh=token_mean,\n        loss=partial(clipped_policy_loss, "
        "low=clip_low, high=clip_high, dual=dual",
        (
            "integration/test_algorithm_expression.py::test_an_expression_means_what_the_same_python_means",
            "algorithms/test_algorithms.py::test_each_preset_takes_its_kl_estimator",
        ),
    ),
    # Loss weights and statistics
    Mutation(
        "algorithms/loss_weights.py",
        "rows that are not trainable are trained",
        "return batch.loss_mask * batch.trainable[:, None].to(batch.loss_mask.dtype)",
        "return batch.loss_mask",
        ("algorithms/test_losses.py::test_weights_leave_out_rows_that_are_not_trainable_and_scale_with_fractions",),
        fast=True,
    ),
    Mutation(
        "algorithms/loss_weights.py",
        "rows are divided by the padded width",
        "lengths = mask.sum(1) if row_lengths is None",
        "lengths = torch.full_like(mask[:, 0], mask.shape[1]) if row_lengths is None",
        ("algorithms/test_loss_weights.py::test_weights_by_hand",),
    ),
    Mutation(
        "algorithms/statistics.py",
        "a mean is of one rank only",
        "total, count = sums if all_reduce is None else all_reduce(sums)",
        "total, count = sums",
        ("algorithms/test_algorithms.py::test_ranks_that_see_their_own_groups_only_have_the_gradient_of_one",),
    ),
    Mutation(
        "algorithms/statistics.py",
        "equal rewards leave rounding behind",
        "return torch.where(equal, torch.zeros_like(x), x - group_mean(x, group_ids))",
        "return x - group_mean(x, group_ids)",
        ("algorithms/test_advantages.py::test_equal_rewards_give_exactly_zero",),
    ),
    # Advantages
    Mutation(
        "algorithms/advantages.py",
        "the greedy sample counts among the sampled ones",
        "group_sum(torch.where(trainable, torch.zeros_like(rewards), rewards), group_ids) / group_sum(apart, group_ids)",
        "group_mean(rewards, group_ids)",
        ("algorithms/test_advantages.py::test_the_greedy_baseline_is_the_mean_of_the_rows_that_are_not_trained",),
    ),
    Mutation(
        "algorithms/advantages.py",
        "the reward stands one token early",
        "torch.where(positions == last[:, None], rewards",
        "torch.where(positions == last[:, None] - 1, rewards",
        (parity("advantages/areal_realhf_packed_rewards_gae_v0_3_0"),),
    ),
    Mutation(
        "algorithms/advantages.py",
        "the KL penalty of a reward is a bonus",
        "return rewards - (penalty if rewards.dim() == 2",
        "return rewards + (penalty if rewards.dim() == 2",
        (parity("advantages/areal_realhf_packed_rewards_gae_v0_3_0"),),
    ),
    Mutation(
        "algorithms/estimators.py",
        "untrained rows count in the whitening",
        "trained = (trained_mask(batch) > 0)",
        "trained = (batch.loss_mask > 0)",
        ("algorithms/test_estimators.py::test_rows_that_are_not_trained_count_in_their_group_but_not_among_the_tokens",),
    ),
    Mutation(
        "algorithms/estimators.py",
        "the KL penalty compares the rollout's log-probs although there are old ones",
        "found = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs",
        "found = batch.old_log_probs if batch.rollout_log_probs is None else batch.rollout_log_probs",
        ("algorithms/test_estimators.py::test_the_policy_is_the_anchor_or_else_the_behaviour",),
    ),
    Mutation(
        "algorithms/anchors.py",
        "GiGPO's step level is left out",
        "return s.combine(episode, step_advantages(returns, step_groups, std_level=s.std_level, epsilon=s.epsilon), s.omega)",
        "return episode",
        (parity("gigpo/gigpo_outcome_advantage"),),
    ),
    Mutation(
        "algorithms/anchors.py",
        "GiGPO compares states of different groups",
        "torch.unique(torch.stack((groups[real], states[real])), dim=1, return_inverse=True)",
        "torch.unique(states[real][None], dim=1, return_inverse=True)",
        ("algorithms/test_gigpo.py::test_advantages_of_turns_against_loops",),
    ),
    Mutation(
        "algorithms/gigpo_steps.py",
        "a step without a reward counts as rewarded with 0",
        "s.base_reward is not None for s in steps",
        "True for s in steps",
        ("algorithms/test_gigpo_steps.py::test_a_score_is_for_the_episode_and_step_rewards_are_for_the_steps",),
    ),
    # Corrections, versions and proximal log-probs
    Mutation(
        "algorithms/corrections.py",
        "importance weights have a gradient",
        "(log_probs - behavior_log_probs).detach()",
        "(log_probs - behavior_log_probs)",
        ("algorithms/test_corrections.py::test_weights_carry_no_gradient",),
    ),
    Mutation(
        "algorithms/corrections.py",
        "the ratio of decoupled PPO stays against the rollout",
        "old_log_probs=prox.detach())",
        "old_log_probs=rollout.detach())",
        (parity("losses/areal_decoupled_ppo_cap_v0_3_4"),),
    ),
    Mutation(
        "data/segments.py",
        "tokens of the current version are due",
        "version == current_version - 1 and place not in firsts)",
        "version == current_version and place not in firsts)",
        ("algorithms/test_proximal.py::test_tokens_of_the_version_before_are_due",),
    ),
    Mutation(
        "algorithms/proximal.py",
        "the proximal policy is the current one",
        "behind = current.floor() - 1 - weight_versions",
        "behind = current.floor() - weight_versions",
        ("algorithms/test_proximal.py::test_fractions",),
    ),
    Mutation(
        "data/segments.py",
        "segment log-probs are computed twice",
        "tuple(place for place in places if known[place] != current_version)",
        "places",
        ("asynchronous/test_proximal_recompute.py::test_the_second_time_changes_nothing_and_asks_nobody",),
    ),
    Mutation(
        "asynchronous/recompute.py",
        "engines of another version score segments",
        "    if found != version:",
        "    if False:",
        ("asynchronous/test_proximal_recompute.py::test_engines_of_another_version_are_refused",),
    ),
    Mutation(
        "data/samples.py",
        "new tokens of a continued sample count as scored",
        "start.segment_versions + (-1,) * completion.output_len",
        "start.segment_versions + completion.output_versions",
        ("engines/test_weights_change_under_generation.py::test_interrupted_requests_get_them_at_each_sync",),
    ),
    Mutation(
        "data/staleness.py",
        "a sample at the staleness limit counts as too old",
        "return compute_staleness(sample, current_version) > compute_allowed",
        "return compute_staleness(sample, current_version) >= compute_allowed",
        ("data/test_staleness.py::test_staleness",),
    ),
    Mutation(
        "training/rl_run.py",
        "samples with versions that never existed are trained",
        "check_versions(rollouts.samples, self.served.version)",
        "check_versions((), self.served.version)",
        ("integration/test_engines_integration.py::test_versions_that_the_run_never_made_are_not_trained_on[vllm-True]",),
    ),
    Mutation(
        "training/rl_run.py",
        "a correction reads log-probs of a truncated distribution",
        "        check_sampled_whole(samples, algorithm)",
        "        check_sampled_whole(samples, self.algorithm)",
        ("training/test_engine_parity.py::test_a_correction_never_reads_log_probs_of_a_cut_distribution",),
    ),
    # Data
    Mutation(
        "data/samples.py",
        "any value of a filter that is not empty counts as yes",
        "return require_flag(verdict, ",
        "return bool(verdict) or require_flag(False, ",
        (
            "data/test_samples.py::test_a_filter_answers_with_true_or_false",
            "generation/test_generation.py::test_where_nothing_can_be_awaited_an_async_filter_is_refused_and_a_factory_is_found",
        ),
    ),
    Mutation(
        "data/records.py",
        "the estimate of a sample is that of the row before",
        "rows = {id(sample): row for row, sample in enumerate(samples)}",
        "rows = {id(sample): max(row - 1, 0) for row, sample in enumerate(samples)}",
        ("data/test_trajectory_records.py::test_the_estimate_of_a_sample_is_its_row_without_padding",),
    ),
    Mutation(
        "data/prompts.py",
        "every epoch has the same order",
        "np.random.Philox(key=derive_seed(seed, epoch_id))",
        "np.random.Philox(key=derive_seed(seed, 0))",
        ("data/test_data_buffer.py::test_other_seeds_give_other_orders",),
    ),
    Mutation(
        "generation/manager.py",
        "groups stand in the order in which they end",
        "return tuple(groups[position] for position in sorted(groups))",
        "return tuple(groups[position] for position in groups)",
        ("generation/test_group_race.py::test_the_first_to_arrive_are_kept_in_the_order_of_their_prompts",),
    ),
    Mutation(
        "generation/sync_batches.py",
        "a filter runs before the rewards are set",
        "passes = passes_filter(scored, config.filter_fn)",
        "passes = passes_filter(group, config.filter_fn)",
        ("generation/test_generation.py::test_rewards_come_before_the_filter_and_refused_groups_are_replaced",),
    ),
    # Models and backends
    Mutation(
        "models/forward/packing.py",
        "the contexts of a packed row attend to each other",
        "if context_ids is None else find_context_starts(context_ids)",
        "if True else find_context_starts(context_ids)",
        ("data/test_episode_columns.py::test_each_context_is_packed_as_a_row_of_its_own",),
    ),
    Mutation(
        "models/forward/attention.py",
        "a token behind a shared prompt does not see itself",
        "dtype=torch.bool, device=device).tril(whole - length)",
        "dtype=torch.bool, device=device).tril(whole - length - 1)",
        ("models/test_shared_prompts.py::test_shared_prompts_give_the_log_probs_and_gradients_of_each_row_by_itself[llama]",),
    ),
    Mutation(
        "models/forward/attention.py",
        "a window behind a shared prompt is one token wider",
        "seen.triu(whole - length + 1 - window)",
        "seen.triu(whole - length - window)",
        ("models/test_shared_prompts.py::test_shared_prompts_give_the_log_probs_and_gradients_of_each_row_by_itself[windows]",),
    ),
    Mutation(
        "models/forward/packing.py",
        "the first token behind a shared prompt is predicted by the position packed before it",
        "shift=shift_packed(packed_tokens, cu_seqlens, before)",
        "shift=shift_packed(packed_tokens, cu_seqlens, torch.where(before < 0, before, cu_seqlens[:-1] - 1))",
        ("models/test_shared_prompts.py::test_packed_tokens_are_the_distinct_ones_and_come_back_in_every_row",),
    ),
    Mutation(
        "batches.py",
        "a prompt is shared by rows of several temperatures",
        "    if batch.temperatures is not None:\n        fits &=",
        "    if False:\n        fits &=",
        ("models/test_shared_prompts.py::test_where_sharing_would_change_more_than_rounding_rows_are_packed_by_themselves[temperatures]",),
    ),
    Mutation(
        "batches.py",
        "a plan counts a shared prompt not at all",
        "            sizes.append(length)\n",
        "            sizes.append(own)\n",
        ("models/test_shared_prompts.py::test_a_plan_counts_a_shared_prompt_once_and_never_needs_more_microbatches",),
    ),
    Mutation(
        "backends/pytorch/backend.py",
        "a step without any gradient leaves parameters undecayed, and the optimizer fails",
        "self._skips(batch) and self._has_gradient and is_gradient_zero",
        "self._skips(batch) and is_gradient_zero",
        ("models/test_shared_prompts.py::test_backward_passes_of_rows_without_a_gradient_are_left_out_and_counted",),
    ),
    Mutation(
        "algorithms/distillation/signals.py",
        "a token that the teacher prefers becomes rarer",
        "batch.teacher_log_probs - policy_log_probs(batch), zero)",
        "policy_log_probs(batch) - batch.teacher_log_probs, zero)",
        ("algorithms/test_distillation.py::test_advantages_are_the_log_ratio_of_teacher_and_policy",),
    ),
    Mutation(
        "algorithms/distillation/divergences.py",
        "tokens that the teacher does not name are forgotten in the gradient",
        "log_p.exp_().mul_(slope[:, k:]) if slope.shape[1] > k else log_p.zero_()",
        "log_p.zero_()",
        ("algorithms/test_distillation.py::test_tokens_that_the_teacher_does_not_name_count_as_one",),
    ),
    Mutation(
        "training/distillation/context.py",
        "numbers of a row with a context are read at the wrong tokens",
        "found[row, begin + shift : length + shift]",
        "found[row, begin:length]",
        ("training/test_teachers.py::test_a_context_is_read_before_the_very_tokens_of_the_response",),
    ),
    Mutation(
        "models/forward/passes.py",
        "a gradient of the entropy alone is taken for none",
        "(outputs.log_probs, outputs.entropy, outputs.values, outputs.divergence) if x",
        "(outputs.log_probs, outputs.values, outputs.divergence) if x",
        ("models/test_shared_prompts.py::test_backward_passes_of_rows_without_a_gradient_are_left_out_and_counted",),
    ),
    Mutation(
        "models/forward/passes.py",
        "updates that compare log-probs use dropout",
        "    module.train(dropout)\n",
        "    module.train()\n",
        ("models/test_model_families.py::test_dropout_is_off_in_updates_that_compare_log_probs_unless_it_is_asked_for",),
    ),
    Mutation(
        "rewards/models/local.py",
        "the score of a reward model is read one token too early",
        "[packed.cu_seqlens[1:] - 1]).cpu()",
        "[packed.cu_seqlens[1:] - 2]).cpu()",
        ("rewards/test_reward_model.py::test_scores_are_those_of_transformers_at_the_last_token",),
    ),
    Mutation(
        "backends/weights/fill.py",
        "every rank reads the first rows of a weight",
        "slice(start, start + size) for start, size in zip(offset, shape",
        "slice(0, size) for start, size in zip(offset, shape",
        ("backends/test_sharded_checkpoint.py::test_no_rank_reads_or_holds_more_than_its_part_of_a_model",),
    ),
    Mutation(
        "backends/optim/state.py",
        "the optimizer's state is lost by loading",
        '{"state": {index[name]: values for name, values in state.values.items()}, "param_groups": groups}',
        '{"state": {}, "param_groups": groups}',
        ("backends/test_sharded_checkpoint.py::test_the_same_number_of_ranks_goes_on_bit_for_bit",),
    ),
    Mutation(
        "backends/fsdp/model.py",
        "gradients are averaged over ranks",
        "module.set_gradient_divide_factor(1.0)",
        "module.set_gradient_divide_factor(2.0)",
        ("backends/test_fsdp.py::test_two_ranks_train_as_one_process_does[sft]",),
    ),
    Mutation(
        "checks.py",
        "infinite weights count as finite",
        "    return low * 0 + high * 0\n",
        "    return low.nan_to_num() * 0 + high.nan_to_num() * 0\n",
        ("backends/test_pytorch_backend.py::test_a_checkpoint_never_holds_what_is_not_finite",),
    ),
    Mutation(
        "backends/optim/updates.py",
        "the norm of a gradient is that of one rank's part",
        "norm = read_scalar(total) if read is None else read(total)",
        'local = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters if p.grad is not None]\n    '
        "norm = float(torch.nn.utils.get_total_norm(local))",
        ("backends/test_fsdp.py::test_two_ranks_train_as_one_process_does[sft]",),
    ),
    Mutation(
        "models/weights.py",
        "merged weights lack the scale of the adapters",
        "(b.float() @ a.float()) * scale)",
        "(b.float() @ a.float()))",
        ("backends/test_lora.py::test_merged_weights_are_those_that_peft_merges",),
    ),
    Mutation(
        "backends/lora/adapters.py",
        "the reference model keeps the adapters",
        "layer._disable_adapters = True",
        "layer._disable_adapters = False",
        ("backends/test_lora.py::test_the_model_without_adapters_is_the_reference_while_training_goes_on",),
    ),
    Mutation(
        "backends/jax/model.py",
        "JAX gives the first token of a context a log-prob",
        "return PackedArrays(tokens, positions, (positions > 0), tempered, gather, place)",
        "return PackedArrays(tokens, positions, (np.arange(num_tokens) < count), tempered, gather, place)",
        ("backends/test_backend_contract.py::test_contexts_of_a_row_are_what_they_are_as_rows[jax_backend-counts1]",),
    ),
    # Ranks
    Mutation(
        "backends/ranks/channel.py",
        "any process may join as a rank",
        'if not hmac.compare_digest(data, _code(token, b"a rank knows it", self.hello, self.answer)):',
        "if False:",
        ("backends/test_rank_meeting.py::test_who_does_not_prove_the_token_is_sent_away_and_nothing_of_it_is_unpickled",),
    ),
    Mutation(
        "backends/ranks/channel.py",
        "messages between ranks may be changed on the way",
        "if not hmac.compare_digest(code, self._received.code(length, data)):",
        "if False:",
        ("backends/test_rank_meeting.py::test_who_sits_between_two_ranks_can_tell_neither_what_to_do",),
    ),
    Mutation(
        "backends/ranks/values.py",
        "an answer of a rank may name code to run",
        "        if not self._names:\n            raise DamagedError",
        "        if False:\n            raise DamagedError",
        ("backends/test_rank_meeting.py::test_functions_and_frozen_dataclasses_travel_by_name_where_names_are_allowed",),
    ),
    # Engines, servers and weights
    Mutation(
        "engines/http/transport.py",
        "a half-read response leaves its connection to the next request",
        "if connection.is_reusable and not self._is_closed:",
        "if not self._is_closed:",
        ("engines/test_transport_cancellation.py::test_a_response_that_nobody_reads_to_its_end_is_not_read_by_the_next",),
    ),
    Mutation(
        "engines/http/messages.py",
        "an answer with a length and chunks ends at its length",
        '        if key == b"transfer-encoding":\n            return None\n',
        "",
        ("engines/test_http_messages.py::test_an_answer_is_read_as_h11_reads_it",),
    ),
    Mutation(
        "engines/http/messages.py",
        "of two lengths of an answer the last one counts",
        "if length is not None or not _LENGTH.fullmatch(value):",
        "if not _LENGTH.fullmatch(value):",
        ("engines/test_http_messages.py::test_an_answer_is_read_as_h11_reads_it",),
    ),
    Mutation(
        "engines/http/messages.py",
        "a value with a line end in it adds a field to a request",
        ' or head.count(b"\\n") != len(lines)',
        "",
        ("engines/test_http_messages.py::test_a_usual_request_is_what_h11_writes",),
    ),
    Mutation(
        "engines/http/connection.py",
        "a connection is used again after bytes that followed an answer",
        "return not (self._closes or self._num_missing or self._rest)",
        "return not (self._closes or self._num_missing)",
        ("engines/test_http_messages.py::test_an_answer_is_read_as_h11_reads_it",),
    ),
    Mutation(
        "engines/http/connection.py",
        "a connection is used again that the server closes",
        "self._closes = self._closes or usual.closes",
        "pass",
        ("engines/test_http_messages.py::test_an_answer_is_read_as_h11_reads_it",),
    ),
    Mutation(
        "engines/http/transport.py",
        "a request that may have been read is sent again",
        '                if not (error.is_unread or request.extensions.get("repeatable", request.method in '
        "REPEATABLE_METHODS)):\n                    raise",
        "                pass",
        ("engines/test_transport.py::test_a_request_that_was_read_is_sent_again_only_where_twice_is_the_same_as_once",),
    ),
    Mutation(
        "engines/http/endpoint.py",
        "a generation whose answer was lost is sent again",
        "return idempotent and isinstance(error, httpx.ReadError | ServerHungUp)",
        "return isinstance(error, httpx.ReadError | ServerHungUp)",
        ("engines/test_http_retries.py::test_a_lost_answer_is_asked_for_again_only_where_twice_is_the_same_as_once",),
    ),
    Mutation(
        "engines/sglang/generation.py",
        "an abort of all requests ends those of other clients",
        '{"rid": one}, idempotent=True',
        '{"rid": one, "abort_all": True}, idempotent=True',
        ("engines/test_sglang_engine.py::test_an_abort_of_all_spares_other_clients",),
    ),
    Mutation(
        "engines/weights/channel.py",
        "a server labels its weights before the others have theirs",
        "        await self._arrive(self._rounds[-1])\n",
        "        await trio.lowlevel.checkpoint()\n",
        ("engines/test_vllm_transfer.py::test_no_server_confirms_before_all_have_everything",),
    ),
    Mutation(
        "engines/http/samples.py",
        "tokens of older weights than the confirmed ones are accepted",
        "if oldest <= lowest and",
        "if",
        (
            "engines/test_fleet_updates.py::test_tokens_older_than_the_weights_that_were_confirmed_are_not_accepted",
            "integration/test_engines_integration.py::test_a_server_that_has_gone_back_to_older_weights_is_not_heard[vllm]",
        ),
    ),
    Mutation(
        "engines/fleet/requests.py",
        "answers with weights that their engine did not confirm are accepted",
        "if unconfirmed := sorted(found - call.versions):",
        "if unconfirmed := list[int]():",
        ("engines/test_fleet_sync_faults.py::test_no_sample_is_accepted_of_a_version_that_its_engine_did_not_confirm[lost-None]",),
    ),
    Mutation(
        "engines/weights/transaction.py",
        "a resume makes unknown weights known",
        "            if not self._is_unknown:\n                await self._controls.resume()\n                self._requests.mark_usable()",
        "            if True:\n                await self._controls.resume()\n                self._requests.mark_usable()",
        ("engines/test_weight_transaction.py::test_a_resume_does_not_make_unknown_weights_known",),
    ),
    Mutation(
        "engines/launch/servers.py",
        "the death of a server goes unnoticed",
        "        self._nursery.start_soon(self._fail_on_exit, run)",
        "        pass",
        ("engines/test_servers.py::test_the_death_of_a_server_fails_the_block_whatever_it_waits_for",),
    ),
    Mutation(
        "engines/vllm/protocol.py",
        "the answer to another request is taken, of vLLM",
        'if response["request_id"] != ID_PREFIX + request.wire_id:',
        "if False:",
        ("engines/test_calls_through_faults.py::test_a_call_through_a_damaged_network_completes_right_or_fails_typed[vllm-60]",),
    ),
    Mutation(
        "engines/sglang/protocol.py",
        "the answer to another request is taken, of SGLang",
        'if meta["id"] != request_id:',
        "if False:",
        ("engines/test_calls_through_faults.py::test_a_call_through_a_damaged_network_completes_right_or_fails_typed[sglang-60]",),
    ),
    Mutation(
        "training/weight_sync.py",
        "engines stay in use although their probe failed",
        "        if EngineFeature.DISTRUST in features:",
        "        if False:",
        ("training/test_weight_sync.py::test_a_server_whose_outputs_are_not_those_of_the_new_weights_is_used_no_more",),
    ),
    Mutation(
        "training/weight_sync.py",
        "a resumed run samples from the newest weights, not from those of its last sync",
        "is_older = kept_directory.exists()",
        "is_older = False",
        ("training/test_weight_streams.py::test_weights_are_read_in_buckets_and_kept_on_the_disk_where_a_checkpoint_needs_them_later",),
    ),
    # Fleets
    Mutation(
        "engines/fleet/requests.py",
        "a moved sample gets the whole token budget again",
        "params_of_rest(params, sample, part.output_len)",
        "params",
        ("engines/test_fleet.py::test_what_a_leaving_member_does_not_finish_goes_on_elsewhere_with_what_it_has",),
    ),
    Mutation(
        "engines/fleet/requests.py",
        "a moved sample continues under older weights than its tokens",
        "if part is not None and call.member.version < part.output_versions[-1]:",
        "if False:",
        ("engines/test_fleet.py::test_a_moved_sample_never_goes_on_under_older_weights",),
    ),
    Mutation(
        "engines/fleet/updates.py",
        "a returning member gets the weights before the update",
        "            self._health.weights = weights",
        "            pass",
        ("engines/test_fleet.py::test_a_member_that_comes_back_gets_the_weights_before_it_is_used",),
    ),
    Mutation(
        "engines/fleet/updates.py",
        "a sync waits for a member that serves, although all lack nothing but weights",
        "alive = [] if self._roster.serving() else await self._health.find_alive()",
        "alive = []",
        ("engines/test_fleet_updates.py::test_where_nobody_has_weights_requests_fail_by_name_and_the_next_sync_brings_all_back",),
    ),
    Mutation(
        "engines/fleet/updates.py",
        "a member that was down serves again although it did not take the weights",
        "            if not progress.updated and not progress.was_out:",
        "            if not progress.updated:",
        ("engines/test_fleet_updates.py::test_a_member_that_cannot_generate_does_not_serve_because_a_sync_of_it_failed",),
    ),
    Mutation(
        "engines/fleet/health.py",
        "a member is given what stands now where the weights of the fleet stood",
        "if weights.fingerprint is not None and",
        "if False and",
        ("engines/test_fleet_updates.py::test_files_that_were_replaced_are_not_given_as_the_weights_that_they_were",),
    ),
    Mutation(
        "engines/fleet/health.py",
        "files that are removed while they are looked at end the whole fleet",
        "except OSError:  # the export",
        "except ZeroDivisionError:  # the export",
        ("engines/test_fleet_updates.py::test_a_member_comes_back_although_the_files_of_its_weights_are_being_removed",),
    ),
    Mutation(
        "engines/fleet/fleet.py",
        "a sync waits for ever for an engine that is being added",
        "with trio.CancelScope() as member.attempt:",
        "with trio.CancelScope():",
        (
            "engines/test_fleet_updates.py::"
            "test_an_engine_that_is_added_while_nobody_serves_is_taken_over_by_a_sync_or_told_to_be_added_again",
        ),
    ),
    # Generation, agents and chat
    Mutation(
        "generation/workflows.py",
        "an interrupted answer counts as a whole one",
        'if completion.finish_reason == "abort":',
        "if False:",
        ("generation/test_workflows.py::test_half_an_answer_is_not_taken_for_a_whole_one",),
    ),
    Mutation(
        "agents/episode.py",
        "a finished episode is complete although its last answer was cut",
        "return Status.COMPLETED if reason in whole and not is_cut else",
        "return Status.COMPLETED if reason in whole else",
        ("agents/test_episodes.py::test_an_episode_whose_last_answer_was_cut_is_truncated_where_that_is_said",),
    ),
    Mutation(
        "rewards/results.py",
        "answers in the prompt count as turns",
        "(count_spoken(messages, place), messages[place].name) for place in places[:num_turns]",
        "(number, messages[place].name) for number, place in enumerate(places[:num_turns])",
        ("rewards/test_reward_functions.py::test_examples_in_the_prompt_are_counted_but_are_no_turns",),
    ),
    Mutation(
        "agents/setting.py",
        "the episodes of a prompt share its metadata",
        "metadata = {key: copy.deepcopy(value) for key, value in prompt.metadata.items()}",
        "metadata = dict(prompt.metadata)",
        ("agents/test_episodes.py::test_an_environment_that_changes_its_parameters_changes_no_other_episode",),
    ),
    Mutation(
        "environments/calls.py",
        "a canceled episode leaves its environment open",
        "with trio.CancelScope(shield=True):",
        "with trio.CancelScope():",
        ("environments/test_environment_calls.py::test_an_environment_is_closed_also_when_its_episode_fails_or_is_canceled",),
    ),
    Mutation(
        "chat/formats.py",
        "the end of a turn that the model wrote is appended again",
        "return self.ending[self.ending_edges[self.ending_tokens.index(tokens[-1])] :]",
        "return self.ending",
        ("agents/test_reference_episode.py::test_an_episode_with_two_tool_calls_is_as_written_by_hand[chatml]",),
    ),
    Mutation(
        "agents/episode.py",
        "all turns of an episode are sampled with one seed",
        "derive_seed(self._setting.seed, index, self._sample_number, turn)",
        "derive_seed(self._setting.seed, index, self._sample_number, 0)",
        ("agents/test_episodes.py::test_an_episode_becomes_one_sample",),
    ),
    Mutation(
        "agents/run.py",
        "an interrupted episode fails its group",
        "except EpisodeInterrupted as error:",
        "except ZeroDivisionError as error:",
        ("agents/test_episodes.py::test_an_interrupted_episode_is_begun_anew_and_becomes_what_it_would_have_been",),
    ),
    Mutation(
        "agents/samples.py",
        "tokens outside of turns are trained",
        "if any(mask > 0 and not kept for mask, kept in zip(sample.loss_mask, inside, strict=True)):",
        "if sample.turns == ():",
        ("agents/test_agents.py::test_a_mask_that_does_not_fit_the_messages_is_found",),
    ),
    # Rewards
    Mutation(
        "rewards/results.py",
        "the action of a step is the last assistant message, whoever wrote it",
        "if step.action_message is not None:",
        "if False:",
        ("agents/test_agents.py::test_all_readers_find_the_actions_of_an_environment_that_speaks_as_the_assistant",),
    ),
    Mutation(
        "rewards/models/judge.py",
        "the points of exchanged answers go to the wrong one",
        "(1 - points if exchanged else points)",
        "points",
        ("rewards/test_judge.py::test_the_score_of_a_group_is_the_win_rate",),
    ),
    Mutation(
        "rewards/code/judge.py",
        "an object of a tested program decides whether its test passes",
        '        raise _Undecided("whether an object of the program is true, it alone would say")',
        '        return bool(self.remote_ask("abs") or True)',
        ("rewards/test_sandboxed_rewards.py::test_what_objects_of_the_program_would_have_to_decide_is_counted",),
    ),
    # Sandbox
    Mutation(
        "sandbox/pool.py",
        "a worker is used again after a canceled call",
        "        kept = False\n",
        "        kept = True\n",
        ("sandbox/test_sandbox_pool.py::test_a_call_can_be_canceled_and_the_pool_goes_on",),
    ),
    Mutation(
        "sandbox/inside/worker.py",
        "processes of a call outlive it",
        "        if isolated:\n            kill_others()\n",
        "        if isolated:\n            pass\n",
        ("sandbox/test_sandbox_pool.py::test_a_call_leaves_nothing_for_the_next_one",),
    ),
    Mutation(
        "sandbox/inside/seccomp.py",
        "a rule of the system call filter is skipped",
        "program += [(JUMP_IF_EQUAL, 0, len(code), number), *code]",
        "program += [(JUMP_IF_EQUAL, 1, len(code), number), *code]",
        ("sandbox/test_sandbox.py::test_dangerous_system_calls_are_refused",),
    ),
    # Asynchronous rollouts
    Mutation(
        "asynchronous/store.py",
        "groups one version too old are handed out",
        "take_out(parts.cache, lambda rollout: is_beyond(rollout, version, rules.asynchronous.max_staleness))",
        "take_out(parts.cache, lambda rollout: is_beyond(rollout, version - 1, rules.asynchronous.max_staleness))",
        ("asynchronous/test_async_rollouts.py::test_the_bound_is_exact",),
        fast=True,
    ),
    Mutation(
        "asynchronous/transitions.py",
        "strict order does not wait for stragglers",
        "result.data.prompt.index < first_open, state.held)",
        "True, state.held)",
        ("asynchronous/test_async_rollouts.py::test_in_strict_order_the_trainer_waits_for_stragglers",),
    ),
    Mutation(
        "asynchronous/transitions.py",
        "a stopped rollout is lost",
        "return change(state, **_leaving(state, index, now), waiting=waiting, delayed=delayed)",
        "return change(state, **_leaving(state, index, now))",
        ("asynchronous/test_async_rollouts.py::test_cancelling_the_block_loses_nothing",),
    ),
    Mutation(
        "asynchronous/transitions.py",
        "tokens that are too old are continued",
        "young = [index for index in ready if not _is_outdated(rules, state, state.waiting[index])]",
        "young = ready",
        ("asynchronous/test_async_rollouts.py::test_unfinished_tokens_that_are_too_old_are_not_continued",),
    ),
    Mutation(
        "asynchronous/capacity.py",
        "the returned capacity is forgotten on resume",
        "for modifier, own in zip(self._modifiers, saved, strict=True):\n            modifier.load_state_dict(own)",
        "assert self._modifiers or not saved",
        ("asynchronous/test_staleness_control.py::test_a_run_that_is_resumed_has_the_capacity_that_it_had",),
    ),
    Mutation(
        "asynchronous/store.py",
        "a full queue and a waiting trainer block each other",
        "if self.state.num_wanted and queue.full():",
        "if queue.maxsize < 1:",
        ("asynchronous/test_async_rollouts.py::test_a_full_queue_is_emptied_while_somebody_waits",),
    ),
    Mutation(
        "asynchronous/executor.py",
        "a batch is handed out while its samples are edited",
        "if store.num_ready >= count and not store.state.is_edited:",
        "if store.num_ready >= count:",
        ("asynchronous/test_async_rollouts.py::test_rollouts_go_on_during_an_edit_and_nothing_is_handed_out",),
    ),
    # Training and resuming
    Mutation(
        "async_rl_loop.py",
        "weights are synced during the evaluation of the step before",
        "error = await self._finish_line()\n        evaluated",
        "error = None\n        evaluated",
        ("loops/test_async_rl_loop.py::test_an_evaluation_runs_beside_the_next_step_and_its_numbers_stand_in_its_own_line",),
    ),
    Mutation(
        "async_rl_loop.py",
        "a resumed segment-wise run does not compute the log-probs that are due",
        "if self._resume is not None and self._recomputer is not None:",
        "if self._resume is None and self._recomputer is not None:",
        ("loops/test_async_rl_loop.py::test_no_token_misses_its_window_in_a_segment_wise_run_that_is_resumed",),
    ),
    Mutation(
        "async_rl_loop.py",
        "weights of a step that failed half-way are saved",
        "if self._updating or not self._run.saves",
        "if not self._run.saves",
        ("loops/test_async_rl_loop.py::test_weights_of_a_step_that_failed_half_way_are_not_saved",),
    ),
    Mutation(
        "training/requirements.py",
        "single answers reach an algorithm that compares turns",
        "gives_turns(config.generate_fn) is False",
        "gives_turns(config.generate_fn) is True",
        ("training/test_requirements.py::test_single_answers_have_no_turns_to_compare",),
    ),
    Mutation(
        "training/saving/checkpoints.py",
        "checkpoints are ordered by name, not by number",
        "return [path for _, path in sorted(found)]",
        "return sorted(path for _, path in found)",
        ("training/test_checkpoints.py::test_order_is_numeric_not_lexicographic",),
    ),
    # Settings of a run
    Mutation(
        "../integration/settings/made/library.py",
        "the command's baseline does not reach the loop",
        "        baseline=config.rl.baseline,\n",
        "",
        ("integration/test_integration_config.py::test_a_baseline_is_a_number_of_the_users",),
    ),
    Mutation(
        "../integration/tasks/own_data.py",
        "a held-out row is trained through a mixture of data sets",
        "rows.keep(lambda column: ~np.isin(column, held)), heldout",
        "replace(rows.keep(lambda column: ~np.isin(column, held)), samples=rows.samples), heldout",
        ("integration/test_tasks.py::test_what_is_held_out_of_the_data_is_not_trained_on_by_way_of_the_mixture",),
    ),
    Mutation(
        "data/recorded.py",
        "a resumed run begins anew with its recorded rollouts",
        'self._position = int(state["position"])',
        "self._position = 0",
        ("integration/test_recorded_runs.py::test_batches_are_groups_of_the_stream_whichever_form_the_file_has",),
    ),
    Mutation(
        "data/recorded.py",
        "log-probs of a response stand one token too early",
        '"rollout_log_probs": [0] * before + [value if m else 0 for value, m in zip(log_probs, mask, strict=True)],',
        '"rollout_log_probs": [0] * (before - 1) + [value if m else 0 for value, m in zip(log_probs, mask, strict=True)] + [0],',
        ("integration/test_recorded_runs.py::test_tokens_of_tools_are_masked_and_need_no_log_prob",),
    ),
    Mutation(
        "rewards/composite.py",
        "a function that does not judge a sample takes the others with it",
        "results = {name: result for name, result in results.items() if not result.abstains}",
        "results = dict(results)",
        ("integration/test_reward_command.py::test_several_functions_are_a_weighted_sum_without_those_that_do_not_judge",),
    ),
    Mutation(
        "data/rows/files.py",
        "a line is found behind its place",
        "at += len(raw)",
        "at += len(raw) + 1",
        ("data/test_rows.py::test_rows_that_are_read_when_taken_are_those_in_memory",),
    ),
    Mutation(
        "data/rows/loaded.py",
        "rows are held out by their place",
        "return hashes <= questions[min(fitting, len(questions) - 1) - 1]",
        "return np.arange(len(hashes)) < min(count, len(hashes) - 1)",
        ("data/test_rows.py::test_held_out_questions_are_on_one_side_whatever_the_order",),
    ),
    Mutation(
        "data/rows/loaded.py",
        "rows that are read when taken are not those that were kept",
        "kept = loaded if len(positions) == len(loaded) else pick_rows(loaded, positions)",
        "kept = pick_rows(loaded, range(len(positions)))",
        ("data/test_rows.py::test_rows_that_are_read_when_taken_are_those_in_memory",),
    ),
    Mutation(
        "errors.py",
        "a token alone in an address is shown",
        "(?:[^\\s/?#]*|",
        "(?:[^\\s/?#]{999}|",
        ("words/test_errors.py::test_credentials_are_taken_out_of_messages_and_nothing_else_is",),
    ),
    Mutation(
        "errors.py",
        "a password with a slash in an address is shown",
        "{0,100})@",
        "{0})@",
        ("words/test_errors.py::test_credentials_are_taken_out_of_messages_and_nothing_else_is",),
    ),
    Mutation(
        "../integration/settings/sections/addresses.py",
        "credentials of servers are written to config.json",
        "    if redact(url) != url:",
        "    if False:",
        ("words/test_errors.py::test_credentials_among_the_settings_are_refused_before_anything_is_written",),
    ),
    Mutation(
        "models/forward/attention.py",
        "sliding windows are ignored",
        "is_plain = length == whole and (window is None or length <= window)",
        "is_plain = length == whole",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[mistral]",),
    ),
    Mutation(
        "models/forward/passes.py",
        "the first token id behind the embeddings is let in",
        "int(batch.tokens.max()) < limits.num_embeddings",
        "int(batch.tokens.max()) <= limits.num_embeddings",
        ("data/test_model_limits.py::test_every_backend_refuses_what_its_model_cannot_be_given",),
    ),
    Mutation(
        "algorithms/estimators.py",
        "whitening by group divides by the unbiased standard deviation",
        "partial(group_std, unbiased=False)",
        "partial(group_std, unbiased=True)",
        ("algorithms/test_estimators.py::test_whitening_by_group_is_what_areal_does_to_each_group",),
    ),
    Mutation(
        "user_code.py",
        "the time of earlier rewards counts against the alarm of a later one",
        "            signal.setitimer(signal.ITIMER_REAL, max(self.timeout_s, 1e-6), _AGAIN_S)\n        self._is_running = True",
        "            pass\n        self._is_running = True",
        ("words/test_user_code.py::test_each_of_several_async_rewards_may_block_for_its_timeout_and_no_longer",),
    ),
    Mutation(
        "user_code.py",
        "the alarm of a reward that waits rings in other tasks",
        "        alarm.stop()\n        if alarm.on_wait",
        "        if alarm.on_wait",
        ("words/test_user_code.py::test_each_of_several_async_rewards_may_block_for_its_timeout_and_no_longer",),
    ),
    Mutation(
        "rewards/evaluate.py",
        "async rewards wait one after another",
        "            self.waits = True\n            self.scope.deadline",
        "            self.scope.deadline",
        ("rewards/test_reward_functions.py::test_async_rewards_wait_side_by_side_and_take_no_task_without_a_wait",),
    ),
    Mutation(
        "rewards/evaluate.py",
        "a reward that comes after its deadline is paid",
        "is_late = is_awaited and trio.current_time() > deadline.deadline",
        "is_late = False",
        ("words/test_user_code.py::test_a_reward_that_cannot_be_ended_is_not_paid_after_its_deadline",),
    ),
    Mutation(
        "rewards/evaluate.py",
        "a reward of a group that comes after its deadline is paid",
        "if trio.current_time() > turn.begun + turn.alarm.timeout_s:",
        "if False:",
        ("words/test_user_code.py::test_a_reward_that_cannot_be_ended_is_not_paid_after_its_deadline",),
    ),
    Mutation(
        "data/trajectories.py",
        "recorded groups depend on the order of the batch",
        "groups, count = sorted(held), min(count, len(held))",
        "groups, count = [s.group_index for s in samples if s.group_index in held], min(count, len(held))",
        ("data/test_trajectory_records.py::test_by_default_a_run_keeps_whole_groups_whatever_the_order_of_its_batch",),
    ),
    Mutation(
        "data/records.py",
        "the log-probs of the reference are recorded as the trainer's",
        "**{name: _to_row(getattr(batch, name), row, length) for name in TOKEN_COLUMNS}",
        '**{name: _to_row(getattr(batch, name.replace("old_", "ref_")), row, length) for name in TOKEN_COLUMNS}',
        ("data/test_trajectory_records.py::test_every_column_of_a_step_is_recorded_and_equal_numbers_in_a_row_cost_little",),
    ),
    Mutation(
        "training/rl_run.py",
        "a checkpoint does not wait for the record of its step",
        "if self.parts.before_save is not None:",
        "if False:",
        (
            "integration/test_record_writes.py::test_the_run_goes_on_beside_a_slow_write_and_a_checkpoint_waits_for_it",
            "integration/test_record_writes.py::test_no_checkpoint_counts_a_step_whose_record_is_lost",
        ),
    ),
    Mutation(
        "training/rollout_batch.py",
        "updates wait until trajectories are written",
        "    nursery.start_soon(finish)\n",
        "    await finish()\n",
        ("data/test_trajectory_records.py::test_updates_go_on_while_what_is_observed_is_being_written_and_wait_for_its_end",),
    ),
    Mutation(
        "training/saving/run_checkpoints.py",
        "the next checkpoint does not wait for the one that is being written",
        "        await self._ended.wait()\n        self.check()\n        return self._path",
        "        self.check()\n        return self._path",
        (
            "training/test_checkpoints_beside.py::test_a_cancelled_run_completes_the_checkpoint_that_it_has_begun",
            "training/test_checkpoints_beside.py::test_run_state_and_metrics_are_those_of_the_moment_in_which_a_checkpoint_is_taken",
        ),
    ),
    Mutation(
        "training/saving/run_checkpoints.py",
        "the error of a checkpoint that is written beside training is forgotten",
        "        self._error = error\n",
        "        del error\n",
        ("training/test_checkpoints_beside.py::test_the_error_of_the_last_checkpoint_is_raised_by_the_run",),
    ),
    Mutation(
        "supervised_loop.py",
        "a failed write is only noticed by the next checkpoint",
        "                checkpoints.check()  # a run that cannot be saved ends soon\n",
        "                pass\n",
        ("training/test_checkpoints_beside.py::test_a_failed_write_is_noticed_long_before_the_next_checkpoint",),
    ),
    Mutation(
        "training/saving/checkpoints.py",
        "a cancelled run leaves its checkpoint unwritten",
        "    with trio.CancelScope(shield=True):\n        results.append(await trio.to_thread.run_sync(function))\n",
        "    results.append(await trio.to_thread.run_sync(function))\n",
        ("training/test_checkpoints_beside.py::test_a_cancelled_run_completes_the_checkpoint_that_it_has_begun",),
    ),
    Mutation(
        "backends/pytorch/files.py",
        "optimizer state goes into a staged checkpoint without a copy",
        "        return value.detach().clone() if value",
        "        return value.detach() if value",
        (
            "backends/test_backend_contract.py::test_a_staged_checkpoint_has_the_state_of_its_moment_however_much_later_it_is_written[direct_backend]",
        ),
    ),
    Mutation(
        "backends/pytorch/backend.py",
        "weights go into a staged checkpoint without a copy",
        "collect_pieces(self.model, alone(), copied=copied)",
        "collect_pieces(self.model, alone())",
        (
            "backends/test_backend_contract.py::test_a_staged_checkpoint_has_the_state_of_its_moment_however_much_later_it_is_written[direct_backend]",
        ),
    ),
    Mutation(
        "training/rl_run.py",
        "engines read a checkpoint that is still being written",
        "            written = await self._checkpoints.wait()\n            checkpoint = written if saved else None\n",
        "            checkpoint = self._checkpoints._path if saved else None\n",
        ("loops/test_rl_loop.py::test_sync_from_the_disk_reuses_the_checkpoint_of_the_same_step",),
    ),
    Mutation(
        "checks.py",
        "a sum that overflows is taken for a weight that is not finite",
        "            return total * 0\n    low, high = tensor.aminmax()  # both pass a NaN on\n    return low * 0 + high * 0\n",
        "            return total * 0\n        return total * math.nan\n    low, high = tensor.aminmax()\n    return low * 0 + high * 0\n",
        ("words/test_checks.py::test_a_tensor_is_finite_if_all_of_its_numbers_are_whatever_their_sum",),
    ),
    Mutation(
        "training/metrics.py",
        "lines that a checkpoint counts are not flushed",
        "        flush_file(self.path)\n",
        "",
        ("training/test_metrics.py::test_the_lines_that_a_checkpoint_counts_are_on_the_disk_before_it",),
    ),
    Mutation(
        "training/summaries.py",
        "a run that cannot learn is told so in each step",
        "if name is None or name in signs.told:",
        "if name is None:",
        ("training/test_learning_signs.py::test_a_sign_is_told_once_when_it_has_been_there_for_some_steps",),
    ),
    Mutation(
        "types.py",
        "a temperature may be a text",
        "if type(self.temperature) is not float or self.temperature == math.inf:",
        "if self.temperature == math.inf:",
        ("words/test_types.py::test_what_a_field_does_not_mean_is_refused_with_the_value",),
    ),
    Mutation(
        "../integration/settings/task_defaults.py",
        "the learning rate of the harder sorting task does not fall",
        'OptimizerConfig(lr=1e-4, schedule="linear")',
        "OptimizerConfig(lr=1e-4)",
        ("integration/test_shipped_configs.py::test_the_file_of_the_harder_sorting_task_has_the_defaults_of_that_task",),
    ),
    Mutation(
        "../integration/settings/sections/addresses.py",
        "addresses without a scheme, credentials and all, are let in",
        "if not is_url(url):",
        "if False:",
        ("words/test_errors.py::test_an_address_without_a_scheme_is_refused_before_anything_is_written",),
    ),
    Mutation(
        "../integration/run/summary.py",
        "the summary names the option and not the algorithm that ran",
        '"algorithm": config.algorithm_call.text if rl else None',
        '"algorithm": str(config.rl.algorithm) if rl else None',
        ("integration/test_summary.py::test_the_algorithm_is_the_one_that_ran",),
    ),
    Mutation(
        "models/expert_load.py",
        "experts are balanced within each micro-batch instead of over the step",
        "detach_load(part) if counted is None else counted",
        "detach_load(part)",
        ("backends/test_expert_balance.py::test_a_step_is_the_same_whatever_its_micro_batches",),
    ),
    Mutation(
        "models/replay.py",
        "replayed experts have the weights of the experts that the router would have chosen",
        "scores.gather(-1, chosen)",
        "result.values",
        ("backends/test_router_replay.py::test_the_weights_of_replayed_experts_are_the_routers_own_with_their_gradient",),
    ),
    Mutation(
        "models/forward/passes.py",
        "rows of one length are replayed with the experts of other tokens",
        "(part.flatten(0, 1) for part in packed.split_lengths(experts))",
        "(part.transpose(0, 1).flatten(0, 1) for part in packed.split_lengths(experts))",
        ("backends/test_router_replay.py::test_a_replay_of_the_models_own_choice_changes_nothing_and_of_others_much[gpt_oss]",),
    ),
    Mutation(
        "models/forward/attention.py",
        "one attention call for all rows has windows that are a token too wide",
        "else window - 1  #",
        "else window  #",
        ("backends/test_pytorch_backend.py::test_one_call_for_all_rows_attends_as_a_call_for_each_length",),
    ),
    Mutation(
        "models/forward/attention.py",
        "linear attention takes packed rows for one row",
        ".repeat_interleave(ends.diff(), output_size=num_tokens)",
        ".repeat_interleave(ends.diff(), output_size=num_tokens) * 0",
        ("models/test_model_families.py::test_linear_attention_runs_packed_where_its_kernels_keep_rows_apart",),
    ),
    Mutation(
        "models/prepare.py",
        "a change of hidden states before the output layer is not seen",
        "output.last_hidden_state = enlarge(output.last_hidden_state)",
        "enlarge(output.last_hidden_state)",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[gemma2]",),
    ),
    Mutation(
        "backends/lora/adapters.py",
        "adapters are held in the dtype of the frozen weights",
        "if not (only_frozen and parameter.requires_grad):",
        "if True:",
        ("backends/test_lora.py::test_a_base_in_bfloat16_trains_float32_adapters",),
    ),
    Mutation(
        "data/samples.py",
        "a continued answer has the experts of its later part alone",
        "return before.fill(found)",
        "return found",
        ("backends/test_router_replay.py::test_the_parts_of_a_continued_answer_keep_their_own_experts",),
    ),
    Mutation(
        "chat/transcript.py",
        "an episode has the experts of its last action's request alone",
        "whole if before is None else before.fill(whole)",
        "whole",
        ("backends/test_router_replay.py::test_an_episode_has_the_experts_of_a_pass_over_each_context[contexts]",),
    ),
    Mutation(
        "chat/transcript.py",
        "an action without a record leaves its tokens without experts in silence",
        "if found is None or (before is None and transcript.turns):",
        "if found is None:",
        ("backends/test_router_replay.py::test_an_episode_with_an_action_of_unknown_experts_has_no_record",),
    ),
    Mutation(
        "chat/transcript.py",
        "the experts of a further context stand at the beginning of the episode",
        "found.shift(len(transcript.tokens) - given)",
        "found",
        ("backends/test_router_replay.py::test_an_episode_has_the_experts_of_a_pass_over_each_context[contexts]",),
    ),
    Mutation(
        "models/forward/attention.py",
        "layers with chunks attend to whole rows",
        "packed = packed if chunk is None else packed.cut(chunk)",
        "packed = packed",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[llama4]",),
    ),
    Mutation(
        "models/forward/packing.py",
        "chunks are counted over the packed rows instead of inside each",
        "numbers = (self.position_ids % size == 0).cumsum(0)",
        "numbers = torch.arange(len(self.position_ids), device=self.position_ids.device) // size",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[llama4]",),
    ),
    Mutation(
        "models/forward/attention.py",
        "queries have the temperature of their places among the packed rows",
        "factor = compute_scale(positions) /",
        "factor = compute_scale(torch.arange(query.shape[2])) /",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[llama4, early tuning]",),
    ),
    Mutation(
        "engines/inprocess/slots.py",
        "a chunk is a window of its size",
        "first.maximum(self.positions - self.positions % chunk)",
        "first.maximum(self.positions - chunk + 1)",
        ("models/test_model_families.py::test_the_embedded_engine_has_the_numbers_of_transformers_beyond_windows[llama4]",),
    ),
    Mutation(
        "engines/inprocess/blocks.py",
        "a prompt that goes on attends beyond its chunk",
        "self.masks[key] = seen if chunk is None else seen & (places >= own - own % chunk)",
        "self.masks[key] = seen",
        ("models/test_model_families.py::test_the_embedded_engine_has_the_numbers_of_transformers_beyond_windows[llama4]",),
    ),
    Mutation(
        "training/steps.py",
        "the metrics of the first micro-batch of a pipeline are read before the update",
        "updated = await self.update.result()  # first, since it reads the metrics of all parts at once",
        "updated = (await self.parts[0].result(), await self.update.result())[1]",
        ("backends/test_unread_metrics.py::test_a_pipeline_reads_a_step_once_although_its_first_calls_are_done_before_the_last",),
    ),
    Mutation(
        "backends/fsdp/backend.py",
        "FSDP reads the norm alone",
        "return self._reads.read(norm if full is None else full())",
        "return float(norm if full is None else full())",
        ("backends/test_unread_metrics.py::test_a_step_of_several_micro_batches_is_read_once",),
    ),
    Mutation(
        "backends/ranks/leading.py",
        "metrics of the ranks' passes are not sent with the answer to an update",
        "self._fill([metrics for _, metrics in answers])",
        "_ = answers",
        ("backends/test_rank_group.py::test_three_ranks_train_as_one_process_does",),
    ),
    Mutation(
        "backends/ranks/group.py",
        "a rank that is lost beside the commands is told in the words of the exchange",
        "if not describe_failure(0, error).is_consequence:",
        "if True:",
        ("backends/test_rank_group.py::test_a_rank_that_is_killed_while_a_checkpoint_is_written_beside_training_is_named",),
    ),
    Mutation(
        "backends/lora/adapters.py",
        "a router that is a subclass of a linear layer gets an adapter",
        "for name, module in linear if _is_linear(module)}",
        "for name, module in linear}",
        ("backends/test_lora.py::test_routers_that_return_chosen_experts_get_no_adapter_and_the_model_trains",),
    ),
    Mutation(
        "data/model_limits.py",
        "token ids of rows that pad an output matrix are taken",
        "num_embeddings if size is None else min(num_embeddings, int(size))",
        "num_embeddings",
        ("models/test_family_table.py::test_logits_of_rows_that_pad_the_output_matrix_are_dropped_as_inkling_does",),
    ),
    Mutation(
        "backends/unread_metrics.py",
        "an update leaves the metrics of its micro-batches to be read one call after another",
        "together = more is not None and bool(parts) and more.device == parts[0].device",
        "together = False",
        ("backends/test_unread_metrics.py::test_a_step_of_several_micro_batches_is_read_once",),
    ),
    Mutation(
        "models/loading.py",
        "the recurrence of xLSTM mixes float32 with half precision",
        "if dtype == torch.float32 or torch.is_autocast_enabled(query.device.type):",
        "if True:",
        ("models/test_family_table.py::test_the_recurrence_of_xlstm_is_that_of_transformers_where_transformers_computes_it",),
    ),
    Mutation(
        "models/loading.py",
        "block-sparse attention is not seen, because short rows switch it off",
        'if getattr(decoder, "attention_type", None) == "block_sparse":',
        "if False:",
        ("models/test_family_table.py::test_block_sparse_attention_of_big_bird_is_refused_although_short_rows_hide_it",),
    ),
    Mutation(
        "engines/inprocess/native.py",
        "a mixture of experts that was compared in float32 is never run in its own dtype",
        "    if dtype == torch.float32:\n        return\n    length",
        "    return\n    length",
        ("models/test_family_table.py::test_a_model_that_mixes_float32_with_bfloat16_is_refused_with_what_to_do",),
    ),
    Mutation(
        "models/loading.py",
        "an AttributeError of transformers ends a run without naming the directory",
        "RuntimeError, ImportError, AttributeError, TypeError) as error:",
        "RuntimeError, ImportError) as error:",
        ("models/test_family_table.py::test_a_model_that_transformers_cannot_open_is_refused_by_its_directory[musicgen]",),
    ),
    Mutation(
        "models/forward/output_layers.py",
        "layers between a decoder and its head are left out",
        "return before(hidden)",
        "return hidden",
        ("models/test_deep_heads.py::test_a_reward_model_with_a_deep_head_scores_and_learns_as_transformers_does",),
    ),
    Mutation(
        "models/prepare.py",
        "a score is not compared with the model's own",
        "if not is_same(found, expected, find_dtype(model, expected)):",
        "if False:",
        ("models/test_deep_heads.py::test_a_score_that_is_read_elsewhere_is_refused",),
    ),
    Mutation(
        "models/forward/outputs.py",
        "learned factors of logits have no gradient",
        "layer.weight if layer.token_scale is None else layer.weight * layer.token_scale()[:, None],",
        "layer.weight if layer.token_scale is None else layer.weight * layer.token_scale().detach()[:, None],",
        ("models/test_deep_heads.py::test_training_through_a_head_has_the_numbers_of_transformers[dory]",),
    ),
    Mutation(
        "models/prepare.py",
        "masks of chunks are read as those of whole rows",
        "expected = expected & (columns >= row - row % (chunk or self._end))",
        "pass",
        ("models/test_model_families.py::test_a_family_has_the_numbers_of_transformers_beyond_its_windows[llama4]",),
    ),
    Mutation(
        "models/prepare.py",
        "rounding may change the experts of the pass that is compared",
        "yield Choices(routers)",
        "yield Choices(Routers())",
        ("models/test_family_table.py::test_a_mixture_of_experts_in_bfloat16_is_not_refused_for_its_rounding[hunyuan_v1_moe-seeds1]",),
    ),
    Mutation(
        "models/prepare.py",
        "a model whose experts cannot be replayed is compared in bfloat16",
        "x.data = x.data.float()",
        "pass",
        ("models/test_family_table.py::test_a_mixture_of_experts_in_bfloat16_is_not_refused_for_its_rounding[phimoe-seeds0]",),
    ),
    Mutation(
        "engines/inprocess/engine.py",
        "the experts of a token stand at the token before it",
        "request.experts[request.position :] = [row]",
        "request.experts[request.position - 1 :] = [row]",
        ("backends/test_router_replay.py::test_the_engine_records_the_experts_of_a_pass_over_the_whole_row[qwen3_moe]",),
    ),
    Mutation(
        "training/rollout_batch.py",
        "a reference replays the experts of the policy",
        "forward(reference, others, output_fn",
        "forward(reference, batch, output_fn",
        ("backends/test_router_replay.py::test_reference_and_critic_choose_their_own_experts",),
    ),
    Mutation(
        "models/weights.py",
        "a directory is read by the names in its files, whatever the model calls its weights",
        "not weights.keys() <= base_weights(model).keys() and converts_weights(model)",
        "False",
        ("models/test_weight_conversions.py::test_a_checkpoint_is_restored[pytorch-qwen3_moe]",),
    ),
    Mutation(
        "backends/weights/export.py",
        "FSDP writes the names in memory",
        "    if converts_weights(model):\n",
        "    if False:\n",
        ("models/test_weight_conversions.py::test_every_backend_writes_the_files_that_transformers_writes[qwen3_moe]",),
    ),
    Mutation(
        "models/replay.py",
        "the record of a decoder layer without a router is read as a router's",
        "return experts[..., list(routers.layers), :]",
        "return experts[..., : len(routers.layers), :]",
        ("backends/test_router_replay.py::test_a_record_of_every_decoder_layer_is_read_where_the_routers_are",),
    ),
    Mutation(
        "engines/http/requests.py",
        "the experts of the part before a weight sync are lost",
        "else self.experts.fill(other.experts)",
        "else other.experts.take(len(other.experts) - 1)",
        ("engines/test_recorded_experts.py::test_parts_before_and_after_a_weight_sync_are_one_record[vllm]",),
    ),
    Mutation(
        "training/weight_sync.py",
        "an engine that keeps weights is lent those that are trained",
        "copied = keep_snapshot or not all(",
        "copied = keep_snapshot or not any(",
        ("training/test_weight_streams.py::test_an_engine_of_this_process_copies_lent_weights_and_one_that_keeps_them_gets_copies",),
    ),
    Mutation(
        "training/weight_sync.py",
        "weights that are kept for a checkpoint are those that are trained on",
        "copied = keep_snapshot or not all(",
        "copied = not all(",
        ("training/test_weight_streams.py::test_an_engine_of_this_process_copies_lent_weights_and_one_that_keeps_them_gets_copies",),
    ),
    Mutation(
        "training/rl_run.py",
        "engines are left asleep when training fails",
        "        finally:\n            await _call_each(engine.wake_up for engine in engines)",
        "        except ZeroDivisionError:\n            pass\n        else:\n            await _call_each(e.wake_up for e in engines)",
        ("engines/test_sleep.py::test_engines_wake_up_if_training_fails",),
    ),
    Mutation(
        "engines/weights/transaction.py",
        "a server sleeps while it answers",
        "                await self._requests.wait_idle()\n",
        "",
        ("engines/test_weight_transaction.py::test_a_server_is_told_to_sleep_after_its_last_answer",),
    ),
    Mutation(
        "engines/weights/transaction.py",
        "a paused server generates after it was asleep",
        "if self._is_paused:  # waking up has resumed it",
        "if False:",
        ("engines/test_sleep.py::test_a_paused_server_is_paused_again_when_it_wakes_up",),
    ),
    Mutation(
        "backends/optim/optimizers.py",
        "weights in bfloat16 are trained by an optimizer that loses small updates",
        "if found is not None and not stochastic:",
        "if False:",
        ("backends/test_pytorch_backend.py::test_weights_in_bfloat16_are_refused_where_updates_would_be_lost_in_rounding",),
    ),
    Mutation(
        "backends/pytorch/files.py",
        "an export in another dtype is not rounded",
        "else value.detach().to(wanted))",
        "else value.detach())",
        ("backends/test_export_dtype.py::test_an_export_has_the_rounded_weights_under_the_same_names[pytorch]",),
    ),
    Mutation(
        "backends/weights/export.py",
        "an export of FSDP in another dtype is not rounded",
        "        pieces = [_cast_piece(piece, dtype) for piece in pieces]\n",
        "        pass\n",
        ("backends/test_export_dtype.py::test_an_export_has_the_rounded_weights_under_the_same_names[fsdp]",),
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Print a line a mutation as it goes. Return 0 if every one was caught, else 1."""
    import_heavy_modules()
    fast = "--fast" in arguments
    texts = [text for text in arguments if text != "--fast"]
    chosen = [m for m in MUTATIONS if (m.fast or not fast) and (not texts or any(text in str(m) for text in texts))]
    assert chosen, f"no mutation matches {texts}"
    if not fast:  # the default run of the tests has shown that they pass
        code, output = run_tests([sorted({test for mutation in chosen for test in mutation.tests})])
        if code != PASSED:
            print(output)
            print("the tests fail without any mutation")
            return 1
    missed: list[Mutation] = []
    for number, (mutation, code, output, seconds) in enumerate(iterate_results(chosen), 1):
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
