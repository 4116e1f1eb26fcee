"""Names that other frameworks give to settings: an unknown option that is one of them is answered with the option here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

_CLIP = "--rl.algorithm 'grpo(clip_low=0.2, clip_high=0.28)'"
_KL = "--rl.algorithm 'grpo(kl_coef=0.02)'"

_BY_NAMES = {
    "learning_rate lr": "--sft.optimizer.lr, --rl.optimizer.lr",
    "lr_scheduler_type lr_scheduler lr_decay_style": "--sft.optimizer.schedule, --rl.optimizer.schedule",
    "warmup_steps warmup_ratio lr_warmup_steps": "--sft.optimizer.warmup-steps, --rl.optimizer.warmup-steps",
    "weight_decay": "--sft.optimizer.weight-decay, --rl.optimizer.weight-decay",
    "max_grad_norm grad_clip clip_grad": "--sft.optimizer.max-grad-norm, --rl.optimizer.max-grad-norm",
    "adam_beta1 adam_beta2 betas": "--sft.optimizer.betas, --rl.optimizer.betas",
    "max_steps num_train_epochs total_epochs total_training_steps num_rollout": "--sft.num-steps, --rl.num-steps, both in steps",
    "per_device_train_batch_size train_batch_size batch_size global_batch_size rollout_batch_size": (
        "--sft.batch-size (rows), and --rl.prompts-per-step, --rl.samples-per-prompt (rollouts), of all processes together"
    ),
    "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu": (
        "--sft.max-tokens-per-microbatch, --rl.max-tokens-per-microbatch, which bound memory and change no number"
    ),
    "num_generations rollout_n group_size n_samples_per_prompt n_samples": "--rl.samples-per-prompt",
    "max_completion_length max_new_tokens max_response_length response_length rollout_max_response_len": "--generation.max-tokens",
    "max_seq_length max_seq_len": "--data.max-length",
    "temperature rollout_temperature": "--generation.temperature",
    "top_p rollout_top_p": "--generation.top-p",
    "top_k rollout_top_k": "--generation.top-k",
    "min_p": "--generation.min-p",
    "beta kl_coef kl_loss_coef use_kl_loss": _KL,
    "epsilon epsilon_high clip_ratio clip_ratio_high eps_clip eps_clip_high cliprange": _CLIP,
    "loss_type adv_estimator advantage_estimator scale_rewards": "--rl.algorithm",
    "num_iterations ppo_epochs": "--rl.num-epochs",
    "ppo_mini_batch_size num_mini_batches ppo_n_minibatches": "--rl.num-minibatches",
    "model_name_or_path model_name model_path hf_checkpoint base_model": "--model.path",
    "dataset_name train_file train_files train_dataset prompt_data dataset": "--data.path",
    "eval_dataset val_files test_files eval_prompt_data": "--data.eval-path",
    "logging_steps": "--sft.log-every, --rl.log-every",
    "save_steps save_freq save_interval": "--checkpoint.sft-every, --checkpoint.rl-every",
    "save_total_limit": "--checkpoint.keep-last-n",
    "eval_steps test_freq eval_interval": "--sft.eval-every, --rl.eval-every",
    "report_to": "--loggers",
    "bf16 fp16 torch_dtype": "--backend.compute-dtype",
    "gradient_checkpointing recompute_granularity": "--backend.gradient-checkpointing",
    "use_vllm vllm_mode": "--engine.kind vllm --engine.launch",
    "vllm_tensor_parallel_size tensor_model_parallel_size": "--engine.tensor-parallel-size",
    "vllm_gpu_memory_utilization gpu_memory_utilization mem_fraction_static": "--engine.memory-fraction",
    "lora_r lora_rank use_peft": "--lora.rank",
    "lora_alpha": "--lora.alpha",
    "reward_funcs reward_function custom_reward_function custom_rm_path": "--reward.function",
    "resume_from_checkpoint resume": "--resume with --output-dir",
    "num_gpus nproc_per_node n_gpus_per_node": "--backend.kind fsdp --backend.num-processes",
    "max_head_offpolicyness max_staleness": "--rl.asynchronous.enabled --rl.asynchronous.max-staleness",
    "dynamic_sampling filter_groups": "--rl.filter nonzero_std",
}  # fmt: skip

OTHER_NAMES: Mapping[str, str] = MappingProxyType({name: here for names, here in _BY_NAMES.items() for name in names.split()})
"""Option here, or several, by the last part of a name in TRL, verl, AReaL or slime, with underscores."""


_MOST_SIMILAR = 5


def explain_other_names(unknown: Sequence[str]) -> list[str]:
    """Return a line for each option that is known by its name elsewhere.

    Args:
        unknown: arguments of a command as typed, with any prefix: actor_rollout_ref.actor.optim.lr=1e-6.
    """
    found: list[str] = []
    for argument in unknown:
        name = argument.partition("=")[0]
        last = re.split(r"[.]", name.lstrip("-+"))[-1].replace("-", "_")
        if last in OTHER_NAMES:
            found.append(f"{name} is {OTHER_NAMES[last]} here")
    return found


def describe_unknown(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return the message about flags that name no option, with the options of a similar name, or those of their section.

    Args:
        unknown: flags as typed.
        known: flags of all options.
    """
    lines = [f"error: Unrecognized options: {', '.join(unknown)}"]
    by_last: dict[str, list[str]] = {}
    for flag in sorted(known):
        by_last.setdefault(_last_part(flag), []).append(flag)
    for flag in unknown:
        if settings := _tell_settings(flag, known):
            lines.append(f"  {flag} is a section: its settings are {settings}")
            continue
        whole = difflib.get_close_matches(flag, known, n=3, cutoff=0.8)
        alike = difflib.get_close_matches(_last_part(flag), by_last, n=3, cutoff=0.8)
        similar = list(dict.fromkeys([*whole, *(option for last in alike for option in by_last[last])]))[:_MOST_SIMILAR]
        if similar:
            lines.append(f"  {flag}: Perhaps you meant: {', '.join(similar)}")
        elif settings := next(filter(None, (_tell_settings(section, known) for section in _list_sections(flag))), ""):
            lines.append(f"  {flag}: settings of this section are {settings}")
    return "\n".join(lines)


def _list_sections(flag: str) -> list[str]:
    """Return the flags of the sections around an option, the innermost first."""
    parts = flag.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _tell_settings(section: str, known: Collection[str]) -> str:
    """Return a phrase with the first options of a section and how to list all; "" if there is no section of that name."""
    inside = sorted(option for option in known if option.startswith(f"{section.replace('_', '-')}."))
    named = ", ".join([*inside[:_MOST_SIMILAR], *(["..."] if len(inside) > _MOST_SIMILAR else [])])
    return f"{named}; --help {section.removeprefix('--').replace('-', '_')} lists them" if inside else ""


def _last_part(flag: str) -> str:
    return flag.lstrip("-").rpartition(".")[2]
