"""Table of the conditions under which options have an effect, and the report of options that a user set without effect.

An option is the user's if its value differs from the default of the command and from that of the task: a flag that repeats the default
changes nothing, and a value in a file counts like a flag. Options of a part that the command leaves out (SFT with --mode rl, the estimates
of a dry run) are reported only if a flag set them, since a file may serve several commands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from integration.settings.sections.data import SELF_MADE_TASKS
from integration.settings.sections.episodes import EPISODE_TASKS
from integration.settings.sections.preference import LIKELY, MARGINS, REFERENCE_FREE, SMOOTHED
from rollouts.errors import ConfigError

if TYPE_CHECKING:
    from integration.settings.config import Config


Part = Literal["sft", "rl", "dpo", "dry_run"]


def _always(config: Config, mode: str) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The condition under which an option has an effect, and the advice if it has none."""

    holds: Callable[[Config, str], bool] = _always  # predicate of a configuration and a mode (sft, rl, sft+rl, dpo, sft+dpo) with `part`
    needs: str = ""  # the missing setting, as flags of the command line
    part: Part | None = None  # the part of the command that reads the option; None = all parts
    is_mistake: bool = False  # refuse the option without effect instead of reporting it


@dataclass(frozen=True, kw_only=True)
class IdleOption:
    """An option that a user set and that has no effect."""

    name: str  # section.field
    value: Any
    needs: str  # the setting that would give it an effect

    def __str__(self) -> str:
        return f"{spell_option(self.name)} {self.value!r} needs {self.needs}"


def has_heldout(config: Config, mode: str) -> bool:
    """Whether there are held-out problems to evaluate on."""
    if reads_pairs_alone(config, mode):
        return False
    return config.task not in ("jsonl", "gsm8k") or config.data.eval_path is not None or config.data.eval_fraction > 0


def reads_pairs_alone(config: Config, mode: str) -> bool:
    """Whether pairs of the user's are all data of a run: nothing is generated, and there are no problems to evaluate on."""
    return mode == "dpo" and config.task == "jsonl"


def reads_preferences(config: Config, mode: str) -> bool:
    """Whether rows of the user's data are pairs of answers to train on."""
    return "dpo" in mode and config.task == "jsonl"


def has_reference(config: Config, mode: str) -> bool:
    """Whether there is a reference policy: of a KL term in RL, or of a loss of preferences."""
    if "dpo" in mode:
        return config.preference.loss not in REFERENCE_FREE
    return "rl" in mode and "ref_log_probs" in config.algorithm.requires


def _reads_number(*losses: str) -> Effect:
    """Return the effect of a number of some losses of preferences."""
    return Effect(holds=lambda c, m: c.preference.loss in losses, needs=f"--preference.loss {' or '.join(losses)}", part="dpo")


def names_hub_model(config: Config, mode: str) -> bool:
    """Whether the policy is named by its name on the hub."""
    from rollouts.models.hub import is_hub_name

    return config.model.path is not None and is_hub_name(config.model.path.partition("@")[0])


def has_several_servers(config: Config, mode: str) -> bool:
    """Whether several servers share the requests."""
    return config.engine.num_servers > 1 or len(config.engine.urls) > 1


def launches_on_gpus(config: Config, mode: str) -> bool:
    """Whether servers are launched on GPUs."""
    if not config.engine.launch:
        return False
    from rollouts.models.loading import find_device_name

    return find_device_name(config.model.device) != "cpu"


def calls_reward(config: Config, mode: str) -> bool:
    """Whether a reward function is called; otherwise the environment of the episodes, or the user's program, gives all rewards."""
    own = config.reward.function is not None or config.reward.model is not None
    return own or (config.task not in EPISODE_TASKS and not config.agent.is_used)


def drops_groups(config: Config, mode: str) -> bool:
    """Whether a group with a failed reward or environment is dropped from its batch and replaced."""
    agents = config.agent.is_used and config.agent.on_error == "drop"
    return agents or (calls_reward(config, mode) and config.reward.on_error == "drop") or config.episode.on_environment_error == "drop"


def reads_conversations(config: Config, mode: str) -> bool:
    """Whether SFT trains on rows of the user's data."""
    if config.task == "environment":
        given = config.data.path is not None or bool(config.data.mixture)
        return "sft" in mode and given and config.environment.expert is None
    return config.task == "gsm8k" or (config.task == "jsonl" and "sft" in mode)  # a file of settings of gsm8k serves both stages


def mixes_data(config: Config, mode: str) -> bool:
    """Whether a mixture is read: by SFT, or by RL without data.path."""
    return reads_conversations(config, mode) or (config.task == "jsonl" and config.data.path is None)


def _optimizer(section: str, part: Part, condition: Effect | None = None) -> dict[str, Effect]:
    """Return the effects of the options of an optimizer. condition: the condition common to all of them."""
    base = condition or Effect(part=part)

    def settings(config: Config) -> Any:
        return getattr(config, section).optimizer

    def decays(config: Config, mode: str) -> bool:
        return base.holds(config, mode) and settings(config).schedule != "constant"

    def clips(config: Config, mode: str) -> bool:
        return base.holds(config, mode) and config.backend.fsdp.clip_grad is None

    schedule = f"--{section}.optimizer.schedule linear or cosine"
    return {
        f"{section}.optimizer.lr {section}.optimizer.betas {section}.optimizer.eps {section}.optimizer.weight_decay "
        f"{section}.optimizer.warmup_steps {section}.optimizer.schedule {section}.optimizer.moments": base,
        f"{section}.optimizer.min_lr_ratio": Effect(holds=decays, needs=schedule, part=part),
        f"{section}.optimizer.max_grad_norm": Effect(holds=clips, needs="no --backend.fsdp.clip-grad, which replaces it", part=part),
    }


ALWAYS = Effect()
SFT, RL, DPO, DRY_RUN = Effect(part="sft"), Effect(part="rl"), Effect(part="dpo"), Effect(part="dry_run")
BUILT_IN = Effect(holds=lambda c, m: c.model.path is None, needs="the built-in model: leave --model.path out")
OWN_DATA = Effect(holds=lambda c, m: c.task not in SELF_MADE_TASKS, needs="--task jsonl, gsm8k or environment")
OWN_ROWS = Effect(holds=lambda c, m: c.task in ("jsonl", "gsm8k"), needs="--task jsonl or gsm8k")
ROWS = Effect(
    holds=lambda c, m: reads_conversations(c, m) or reads_preferences(c, m),
    needs="data of your own that SFT reads: --mode sft, --task jsonl or gsm8k and --data.path",
)
HELDOUT = Effect(holds=has_heldout, needs="held-out problems: --data.eval-path")
REFERENCE = Effect(
    holds=lambda c, m: "ref_log_probs" in c.algorithm.requires, needs="a KL term, such as --rl.algorithm 'grpo(kl_coef=0.04)'", part="rl"
)
TEACHER = Effect(holds=lambda c, m: c.teacher.is_given, needs="a teacher, such as --rl.algorithm opd --teacher.path DIR", part="rl")
CRITIC = Effect(holds=lambda c, m: "values" in c.algorithm.requires, needs="a critic, such as --rl.algorithm 'ppo()'", part="rl")
ASYNC = Effect(holds=lambda c, m: c.rl.asynchronous.enabled, needs="--rl.asynchronous.enabled", part="rl")
EPISODES = Effect(holds=lambda c, m: c.task in EPISODE_TASKS, needs=f"a task with several turns: --task {', '.join(EPISODE_TASKS)}")
AGENT = Effect(holds=lambda c, m: c.agent.is_used, needs="a program of yours: --agent.command or --agent.function")
REWARD = Effect(holds=calls_reward, needs="a reward function: --reward.function, or a task with a single turn")
FSDP = Effect(holds=lambda c, m: c.backend.kind == "fsdp", needs="--backend.kind fsdp")
ADAPTERS = Effect(holds=lambda c, m: c.lora.rank > 0, needs="--lora.rank")
SERVER = Effect(holds=lambda c, m: c.engine.is_server, needs="a server: --engine.kind vllm or sglang", part="rl")
SERVER_ONLY = Effect(holds=SERVER.holds, needs=SERVER.needs, part="rl", is_mistake=True)
LAUNCHED = Effect(holds=lambda c, m: c.engine.launch, needs="a launched server: --engine.launch", part="rl")
REWARD_MODEL = Effect(holds=lambda c, m: c.reward.model is not None, needs="--reward.model", part="rl")


def _environment_of(*tasks: str) -> Effect:
    return Effect(holds=lambda c, m: c.task in tasks, needs=f"--task {' or '.join(tasks)}")


_BY_OPTIONS: Mapping[str, Effect] = {
    "task seed deterministic output_dir loggers num_threads crash_bundles checkpoint.keep_last_n": ALWAYS,
    "model.path model.device model.kernels backend.kind backend.compute_dtype backend.master_dtype backend.gradient_checkpointing": ALWAYS,
    "lora.rank engine.dtype": ALWAYS,
    "logger_timeout_s": Effect(holds=lambda c, m: bool(c.loggers), needs="--loggers"),
    "enable_segment_wise_ppo": ASYNC,
    "model.revision": Effect(holds=names_hub_model, needs="a model of the hub: --model.path ORG/NAME"),
    "model.trust_remote_code": Effect(
        holds=lambda c, m: any((c.model.path, c.reference.path, c.critic.path, c.reward.model, c.teacher.models)),
        needs="a model directory: --model.path",
    ),
    "model.vocab_size model.hidden_size model.intermediate_size model.num_layers model.num_heads model.num_kv_heads": BUILT_IN,
    "model.max_length": BUILT_IN,
    "data.path": OWN_DATA,
    "data.eval_path": Effect(
        holds=lambda c, m: OWN_DATA.holds(c, m) and (m != "dpo" or c.preference.eval_path is None),
        needs=f"{OWN_DATA.needs}, and with --mode dpo no --preference.eval-path",
    ),
    "data.skip_bad_rows": OWN_DATA,
    "data.columns": OWN_ROWS,
    "data.streaming": Effect(
        holds=lambda c, m: OWN_ROWS.holds(c, m) and m != "dpo", needs="--task jsonl or gsm8k; pairs are kept in memory"
    ),
    "data.rollouts": Effect(holds=lambda c, m: c.task == "jsonl", needs="--task jsonl", part="rl"),
    "data.eval_fraction": Effect(
        holds=lambda c, m: c.task in ("jsonl", "gsm8k") and c.data.eval_path is None and m != "dpo",
        needs="rows of your own without --data.eval-path; --preference.num-heldout of pairs",
    ),
    "data.mixture": Effect(holds=mixes_data, needs=ROWS.needs),
    "data.max_length": ROWS,
    "data.truncate": Effect(
        holds=lambda c, m: reads_conversations(c, m) and c.data.max_length is not None, needs=f"--data.max-length, and {ROWS.needs}"
    ),
    "sft.num_steps sft.batch_size sft.log_every sft.max_tokens_per_microbatch sft.dropout checkpoint.sft_every": SFT,
    "sft.router_balance_coef": SFT,
    "checkpoint.best": Effect(holds=lambda c, m: "dpo" in m or has_heldout(c, m), needs=HELDOUT.needs),
    "checkpoint.patience": Effect(holds=lambda c, m: c.checkpoint.best is not None, needs="--checkpoint.best"),
    "sft.eval_every": Effect(holds=has_heldout, needs=HELDOUT.needs, part="sft"),
    **_optimizer("sft", "sft"),
    " ".join(
        f"preference.{name}"
        for name in (
            *("loss", "beta", "num_heldout", "num_steps", "batch_size", "log_every", "eval_every", "checkpoint_every"),
            *("max_tokens_per_microbatch", "dropout", "path", "eval_path"),
        )
    ): DPO,
    "preference.label_smoothing": _reads_number(*SMOOTHED),
    "preference.gamma": _reads_number(*MARGINS),
    "preference.nll_coef": _reads_number(*LIKELY),
    "preference.desirable_weight preference.undesirable_weight": _reads_number("kto"),
    "preference.reference": Effect(
        holds=lambda c, m: c.preference.loss not in REFERENCE_FREE, needs="a loss with a reference: --preference.loss dpo", part="dpo"
    ),
    "preference.num_pairs": Effect(
        holds=lambda c, m: c.task in SELF_MADE_TASKS and c.preference.path is None, needs="a built-in task: --task sort", part="dpo"
    ),
    **_optimizer("preference", "dpo"),
    "rl.num_steps rl.prompts_per_step rl.samples_per_prompt rl.num_epochs rl.num_minibatches rl.algorithm rl.baseline": RL,
    "rl.mask_truncated rl.overlong_buffer rl.filter rl.sync_every rl.log_every rl.eval_every": RL,
    "rl.max_tokens_per_microbatch rl.dropout rl.skip_redundant rl.router_balance_coef rl.router_replay checkpoint.rl_every": RL,
    "rl.overlong_penalty": Effect(
        holds=lambda c, m: c.rl.overlong_buffer > 0, needs="--rl.overlong-buffer, in tokens", part="rl", is_mistake=True
    ),
    "rl.max_filter_attempts": Effect(
        holds=lambda c, m: c.rl.filter != "none" or drops_groups(c, m),
        needs="a filter or dropped groups: --rl.filter, --reward.on-error drop",
        part="rl",
    ),
    "rl.over_sampling_factor": Effect(
        holds=lambda c, m: not c.rl.asynchronous.enabled, needs="synchronous rollouts: leave --rl.asynchronous.enabled out", part="rl"
    ),
    "rl.kl_control.kl_coef rl.kl_control.target": REFERENCE,
    "reference.path reference.dtype": Effect(
        holds=has_reference, needs=f"{REFERENCE.needs}, or --mode dpo with a loss that compares with a reference"
    ),
    "teacher.path teacher.url teacher.by teacher.each teacher.context": TEACHER,
    "teacher.kind teacher.tokenizer teacher.api_key_variable": Effect(
        holds=lambda c, m: bool(c.teacher.url or c.teacher.servers), needs="a teacher that is a server: --teacher.url", part="rl"
    ),
    "teacher.dtype": Effect(holds=lambda c, m: bool(c.teacher.models), needs="a teacher in memory: --teacher.path", part="rl"),
    "teacher.top_k": Effect(
        holds=lambda c, m: "teacher_tops" in c.algorithm.requires, needs="a divergence over several tokens: --rl.algorithm gkd", part="rl"
    ),
    "rl.kl_control.horizon": Effect(
        holds=lambda c, m: REFERENCE.holds(c, m) and c.rl.kl_control.target is not None, needs="--rl.kl-control.target", part="rl"
    ),
    "rl.asynchronous.enabled": RL,
    " ".join(
        f"rl.asynchronous.{name}"
        for name in (
            *("max_staleness", "max_concurrent_rollouts", "queue_size", "when_queue_full", "order", "on_stale", "on_failure"),
            *("rollout_timeout_s", "patience_s", "in_flight", "checkpoint_in_flight"),
        )
    ): ASYNC,
    "rl.asynchronous.max_attempts rl.asynchronous.retry_delay_s": Effect(
        holds=lambda c, m: ASYNC.holds(c, m) and c.rl.asynchronous.on_failure == "retry",
        needs="--rl.asynchronous.enabled with --rl.asynchronous.on-failure retry",
        part="rl",
    ),
    "rl.asynchronous.max_stale_attempts": Effect(
        holds=lambda c, m: ASYNC.holds(c, m) and c.rl.asynchronous.on_stale == "retry",
        needs="--rl.asynchronous.enabled with --rl.asynchronous.on-stale retry",
        part="rl",
    ),
    "rl.asynchronous.enable_segment_wise_ppo": Effect(
        holds=lambda c, m: False, needs="no value: it follows from --enable-segment-wise-ppo", part="rl"
    ),
    "rl.segment_scores rl.asynchronous.missed_segment": Effect(
        holds=lambda c, m: c.enable_segment_wise_ppo, needs="--enable-segment-wise-ppo", part="rl"
    ),
    **_optimizer("rl", "rl"),
    "critic.path critic.warmup_steps critic.value_clip": CRITIC,
    **_optimizer("critic", "rl", CRITIC),
    "generation.max_tokens generation.stop": Effect(holds=lambda c, m: "rl" in m or has_heldout(c, m), needs=HELDOUT.needs),
    "generation.temperature generation.top_p generation.top_k generation.min_p": Effect(
        holds=lambda c, m: "rl" in m or (has_heldout(c, m) and c.evaluation.sampled), needs="RL, or --evaluation.sampled"
    ),
    "generation.enable_thinking": Effect(
        holds=lambda c, m: c.model.path is not None, needs="a model with a chat template: --model.path"
    ),
    " ".join(
        f"episode.{name}"
        for name in (
            *("max_turns", "max_tokens", "max_context", "stop_regex", "cut_is_truncated", "system_prompt", "chat", "on_rewrite"),
            *("on_environment_error", "timeout_s", "in_thread"),
        )
    ): EPISODES,
    "episode.max_retries": Effect(
        holds=lambda c, m: EPISODES.holds(c, m) and c.episode.on_environment_error == "retry", needs="--episode.on-environment-error retry"
    ),
    "episode.on_tool_error": Effect(
        holds=lambda c, m: c.task in EPISODE_TASKS and EPISODE_TASKS[c.task].has_tools, needs="a task with tools: --task calculator"
    ),
    "agent.command agent.function": ALWAYS,
    " ".join(
        f"agent.{name}" for name in ("max_answers", "max_tokens", "timeout_s", "max_programs", "on_error", "failed_reward", "chat")
    ): AGENT,
    "agent.max_retries": Effect(holds=lambda c, m: c.agent.is_used and c.agent.on_error == "retry", needs="--agent.on-error retry"),
    "environment.factory environment.parameters": _environment_of("environment"),
    "environment.state_key environment.similarity": Effect(
        holds=lambda c, m: c.task == "environment" and "turns" in c.algorithm.requires,
        needs="--task environment, and an algorithm that compares steps: --algorithm gigpo",
        part="rl",
    ),
    "environment.expert": Effect(holds=_environment_of("environment").holds, needs="--task environment", part="sft"),
    "environment.size environment.num_holes environment.step_reward": _environment_of("grid_world"),
    "environment.max_digits environment.max_operations": _environment_of("calculator"),
    "reward.function": Effect(holds=lambda c, m: "rl" in m or has_heldout(c, m), needs=HELDOUT.needs),
    "reward.sandboxed": Effect(holds=lambda c, m: c.reward.function is not None, needs="--reward.function"),
    "reward.timeout_s reward.on_error": REWARD,
    "reward.max_retries": Effect(
        holds=lambda c, m: calls_reward(c, m) and c.reward.on_error == "retry", needs="--reward.on-error retry"
    ),
    "reward.model": RL,
    "reward.model_dtype reward.model_tokens_per_batch": REWARD_MODEL,
    "reward.model_device": Effect(holds=REWARD_MODEL.holds, needs=REWARD_MODEL.needs, part="rl", is_mistake=True),
    "backend.num_processes backend.timeout_s backend.fsdp.sharding_strategy backend.fsdp.cpu_offload": FSDP,
    "backend.fsdp.auto_wrap_min_params backend.fsdp.gradient_checkpointing backend.fsdp.clip_grad backend.fsdp.ranks_per_replica": FSDP,
    "backend.fsdp.mixed_precision": Effect(
        holds=lambda c, m: FSDP.holds(c, m) and c.backend.precision(c.model.device) == "float32",
        needs="--backend.kind fsdp with --backend.compute-dtype float32: bfloat16 means both",
    ),
    "lora.alpha lora.base_dtype lora.dropout lora.target_modules lora.use_rslora lora.save_base": ADAPTERS,
    "engine.kind engine.weight_sync engine.parity_rows engine.probe_tolerance": RL,
    "engine.max_slots engine.prefix_cache_tokens engine.cuda_graphs": Effect(
        holds=lambda c, m: (m != "rl" and has_heldout(c, m)) or (not reads_pairs_alone(c, m) and not c.engine.is_server),
        needs="the embedded engine: --engine.kind inprocess, and problems to answer",
    ),
    "engine.urls engine.launch engine.api_key_variable engine.in_flight engine.sleep engine.one_request_per_group": SERVER,
    "engine.generate_timeout_s engine.sync_timeout_s": SERVER,
    "engine.deadlines.connect_s engine.deadlines.control_s": SERVER,
    "engine.deadlines.health_s": SERVER,
    "engine.deadlines.join_s": Effect(
        holds=lambda c, m: (
            c.engine.is_server and (c.engine.weight_sync == "group" or (c.engine.weight_sync == "auto" and launches_on_gpus(c, m)))
        ),
        needs="weights over a process group: --engine.weight-sync group",
        part="rl",
    ),
    "engine.deadlines.queue_s engine.deadlines.outage_s": Effect(
        holds=has_several_servers, needs="several servers: --engine.num-servers, or several --engine.urls", part="rl"
    ),
    "engine.deadlines.ready_s": Effect(
        holds=lambda c, m: has_several_servers(c, m) and c.engine.weight_sync_mode == "channel",
        needs="several servers that take weights together: --engine.weight-sync group or ipc",
        part="rl",
    ),
    "engine.tensor_parallel_size": SERVER_ONLY,
    "engine.path_map": Effect(
        holds=lambda c, m: c.engine.is_server and c.engine.weight_sync_mode == "checkpoint",
        needs=f"{SERVER.needs}, which reads weights from the disk",
        part="rl",
        is_mistake=True,
    ),
    "engine.num_servers engine.python engine.port engine.context_length engine.max_num_seqs": LAUNCHED,
    "engine.memory_fraction engine.startup_timeout_s engine.extra_args": LAUNCHED,
    "engine.gpus": Effect(
        holds=launches_on_gpus,
        needs="a server launched on GPUs: --engine.launch --model.device cuda",
        part="rl",
    ),
    "engine.on_server_death engine.updates_at_once": Effect(
        holds=has_several_servers, needs="several servers: --engine.num-servers, or several --engine.urls", part="rl"
    ),
    "engine.max_restarts": Effect(
        holds=lambda c, m: c.engine.launch and c.engine.num_servers > 1 and c.engine.on_server_death == "restart",
        needs="several launched servers (--engine.launch --engine.num-servers 2) and --engine.on-server-death restart",
        part="rl",
    ),
    "engine.weight_sync_address": Effect(
        holds=lambda c, m: c.engine.kind == "sglang" and c.engine.weight_sync == "group",
        needs="--engine.kind sglang with --engine.weight-sync group",
        part="rl",
    ),
    "engine.weight_sync_mib": Effect(
        holds=lambda c, m: c.engine.weight_sync_mode == "channel",
        needs="a server that takes weights from memory: --engine.weight-sync group, ipc or memory",
        part="rl",
    ),
    "engine.parity_threshold": Effect(holds=lambda c, m: c.engine.parity() is not None, needs="--engine.parity-rows", part="rl"),
    "engine.parity_action": Effect(
        holds=lambda c, m: c.engine.parity() is not None, needs="--engine.parity-rows", part="rl", is_mistake=True
    ),
    "evaluation.num_prompts evaluation.sampled": HELDOUT,
    "trajectories.groups trajectories.every": RL,
    "trajectories.condition trajectories.steps": Effect(
        holds=lambda c, m: c.trajectories.writes, needs="--trajectories.groups 4 or --trajectories.every 1", part="rl"
    ),
    "on_bad.loss on_bad.gradient on_bad.max_skipped on_bad.gradient_spike": ALWAYS,
    "on_bad.ratio on_bad.log_prob on_bad.empty_answer on_bad.all_masked": RL,
    "on_bad.spike_factor": Effect(holds=lambda c, m: c.on_bad.gradient_spike != "ignore", needs="--on-bad.gradient-spike skip or stop"),
    "on_bad.ratio_limit": Effect(holds=lambda c, m: c.on_bad.ratio != "ignore", needs="--on-bad.ratio skip or stop", part="rl"),
    "profile.steps": ALWAYS,
    "profile.skip": Effect(holds=lambda c, m: c.profile.steps > 0, needs="--profile.steps"),
    "hardware.memory_gib": DRY_RUN,
    "hardware.ranks_per_node": Effect(holds=FSDP.holds, needs=FSDP.needs, part="dry_run"),
    "hardware.node_gb_per_s": Effect(
        holds=lambda c, m: FSDP.holds(c, m) and (c.backend.num_processes or 1) <= c.hardware.ranks_per_node,
        needs="--backend.kind fsdp with processes of one node: several nodes are limited by --hardware.network-gb-per-s",
        part="dry_run",
    ),
    "hardware.network_gb_per_s": Effect(
        holds=lambda c, m: c.engine.is_server or (FSDP.holds(c, m) and (c.backend.num_processes or 1) > c.hardware.ranks_per_node),
        needs="processes on several nodes (--backend.kind fsdp, more than --hardware.ranks-per-node) or a server",
        part="dry_run",
    ),
}  # fmt: skip


def _spread(table: Mapping[str, Effect]) -> Mapping[str, Effect]:
    """Return the table with one entry per option."""
    return MappingProxyType({option: effect for options, effect in table.items() for option in options.split()})


EFFECTS: Mapping[str, Effect] = _spread(_BY_OPTIONS)
"""The effect of each setting of a Config, by section.field."""

COMMAND_OPTIONS = (
    "mode",
    "resume",
    "accept_changed_data",
    "dry_run",
    "json",
    "explain",
    "quiet",
    "log_level",
    "grace_s",
    "stall_s",
    "replay",
    "push_to_hub",
    "algorithm",
    "skip_bad_rows",
    "config",
)
"""Options of the command itself, not settings of a section."""


def list_options(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (section.field, value) of every setting in a tree of dataclasses."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from list_options(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def spell_option(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def find_changes(config: Any, *others: Any) -> frozenset[str]:
    """Return the names of settings that differ from each of the other configurations."""
    known = [dict(list_options(other)) for other in others]
    return frozenset(name for name, value in list_options(config) if all(value != values[name] for values in known))


def find_idle_options(
    config: Config, mode: str, *, defaults: Collection[Config], typed: Collection[str] = (), dry_run: bool = False
) -> list[IdleOption]:
    """Return the user's settings without effect, in the order of the sections.

    Args:
        mode: sft, rl, sft+rl, dpo or sft+dpo.
        defaults: default configurations of the command and of the task; their values are not the user's.
        typed: names of settings changed by flags.
        dry_run: whether the command is a dry run.
    """
    parts = {"sft": "sft" in mode, "rl": "rl" in mode, "dpo": "dpo" in mode, "dry_run": dry_run}
    absent = {"sft": "SFT: --mode sft or sft+rl", "rl": "RL: --mode rl or sft+rl", "dry_run": "--dry-run"}
    absent["dpo"] = "preferences: --mode dpo or sft+dpo"
    given, values = find_changes(config, *defaults), dict(list_options(config))
    idle: list[IdleOption] = []
    for name, value in values.items():
        effect = EFFECTS[name]
        if name not in given:
            continue
        if effect.part is not None and not parts[effect.part]:
            if name in typed:
                idle.append(IdleOption(name=name, value=value, needs=absent[effect.part]))
        elif not effect.holds(config, mode):
            idle.append(IdleOption(name=name, value=value, needs=effect.needs))
    return idle


def describe_idle_options(idle: Collection[IdleOption]) -> str:
    """Describe options without effect in one sentence."""
    return f"options without effect under the other settings: {'; '.join(map(str, idle))}. Leave them out, or set what they need"


def describe_doubts(config: Config, mode: str) -> dict[str, str]:
    """Return warnings about settings that work and are seldom meant, by a name that begins with "warning"."""
    doubts: dict[str, str] = {}
    for stage, section in (("sft", "sft"), ("rl", "rl"), ("dpo", "preference")):
        if stage in mode and getattr(config, section).optimizer.lr == 0:
            doubts[f"warning of {stage.upper()}"] = f"--{section}.optimizer.lr is 0, so that no step changes the weights"
    own, held_out = config.data.path, config.data.eval_path
    if own is not None and held_out is not None and (own == held_out or Path(own).resolve() == Path(held_out).resolve()):
        doubts["warning of rows"] = (
            f"--data.eval-path is --data.path ({own}): the model is evaluated on its own training rows, and results are too good. Leave "
            "--data.eval-path out to hold rows of the file out, or give another file"
        )
    return doubts


def check_mistakes(config: Config) -> None:
    """Raise ConfigError for an option that has no effect and was surely set by mistake."""
    for name, effect in EFFECTS.items():
        if not effect.is_mistake or effect.holds(config, "sft+rl"):
            continue
        section, _, field = name.partition(".")
        own = getattr(config, section)
        value = getattr(own, field)
        if value != getattr(type(own)(), field):
            raise ConfigError(
                f"{name} is {value!r}, which has no effect here: it needs {effect.needs}. Set that, or leave {spell_option(name)} out"
            )
