"""Checks across sections of the settings: each raises ConfigError for settings that do not fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.settings.made.budgets import context_tokens, episode_config, episode_tokens, response_tokens, turn_tokens
from integration.settings.sections.episodes import EPISODE_TASKS
from integration.settings.sections.model import OWN_MODEL_CRITIC, CriticSection
from integration.settings.segment_wise import OPTION, SWITCH
from rollouts.errors import ConfigError
from rollouts.types import Algorithm

if TYPE_CHECKING:
    from integration.settings.config import Config

MAX_KEPT = 4096  # largest top_k with which SGLang, as it is started, returns the sets that tokens are drawn from
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Numbers in a head of attention that vLLM 0.32.0 computes on a CPU; others end the server at its first request."""


def check_algorithm_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if a run cannot provide the fields that the algorithm requires, or if a setting is of an unused model."""
    from integration.expressions.algorithm import learns_from_single_samples
    from rollouts.training.requirements import FILLABLE

    name, critic = config.rl.algorithm, config.critic
    if "segment_log_probs" in algorithm.requires and not config.asynchronous.segment_wise:
        raise ConfigError(
            f"rl.algorithm {name!r} requires segment_log_probs, which rollouts have only with segment-wise PPO: add "
            f"--rl.asynchronous.enabled {OPTION}"
        )
    unknown = sorted(algorithm.requires - FILLABLE)
    if unknown:
        raise ConfigError(
            f"rl.algorithm {name!r} requires {', '.join(unknown)}, which the rollouts of this command do not have; they have "
            f"{', '.join(sorted(FILLABLE))}. Choose another algorithm, or call run_rl_training with samples that have them"
        )
    if config.rl.samples_per_prompt == 1 and not learns_from_single_samples(algorithm):
        raise ConfigError(
            f"rl.samples_per_prompt is 1, but rl.algorithm {name!r} compares each response with the others of its group, and would learn "
            "nothing: give at least 2, or choose an algorithm without groups (reinforce, remax, reinforce_plus_plus, ppo)"
        )
    if "turns" in algorithm.requires and config.task not in EPISODE_TASKS:
        raise ConfigError(
            f"rl.algorithm {name!r} compares the steps of episodes, but the task {config.task!r} has a single turn: choose a "
            f"task with several turns (--task {', '.join(EPISODE_TASKS)}), or another algorithm, such as --algorithm grpo"
        )
    for option in ("state_key", "similarity"):
        value = getattr(config.environment, option)
        if value is not None and "turns" not in algorithm.requires:
            raise ConfigError(
                f"environment.{option} is {value!r}, but rl.algorithm {name!r} compares no steps of equal states: add --algorithm gigpo, "
                f"or leave --environment.{option.replace('_', '-')} out"
            )
    if config.reference.path is not None and "ref_log_probs" not in algorithm.requires:
        raise ConfigError(
            f"reference.path is {config.reference.path!r}, but rl.algorithm {name!r} has no KL term: "
            "give it a kl_coef, such as grpo(kl_coef=0.04), or leave --reference.path out"
        )
    check_teacher_settings(config, algorithm)
    if critic not in (CriticSection(), OWN_MODEL_CRITIC) and "values" not in algorithm.requires:
        known = [vars(CriticSection()), vars(OWN_MODEL_CRITIC)]
        changed = next(f"critic.{key} is {value!r}" for key, value in vars(critic).items() if all(value != own[key] for own in known))
        raise ConfigError(f"{changed}, but rl.algorithm {name!r} has no critic: choose one with a critic, such as ppo(), or leave it out")
    if critic.warmup_steps >= config.rl.num_steps:
        raise ConfigError(
            f"critic.warmup_steps is {critic.warmup_steps} of rl.num_steps = {config.rl.num_steps}: the policy would never be trained"
        )


def check_teacher_settings(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if an algorithm of distillation has no teacher that fits, or a teacher has no such algorithm."""
    name, teacher = config.rl.algorithm, config.teacher
    tops = "teacher_tops" in algorithm.requires
    if not tops and "teacher_log_probs" not in algorithm.requires:
        if teacher.is_given:
            option = next(name for name in ("path", "url", "each", "context") if getattr(teacher, name))
            raise ConfigError(
                f"--teacher.{option} is given, but rl.algorithm {name!r} has no teacher: add --algorithm opd or gkd, or leave it out"
            )
        return
    if not teacher.is_given:
        raise ConfigError(
            f"rl.algorithm {name!r} needs a teacher: give --teacher.path DIR, --teacher.url http://host:port, --teacher.by FIELD with "
            "--teacher.each, or --teacher.context '{prompt} Answer: {answer}', with which the policy is its own teacher"
        )
    if tops and (teacher.is_policy or teacher.url or teacher.servers):
        who = "the policy itself" if teacher.is_policy else "a server"
        raise ConfigError(
            f"rl.algorithm {name!r} needs a teacher's most probable tokens, which {who} does not give here: name model directories "
            "(--teacher.path, --teacher.each) in place of --teacher.url or --teacher.context, or take --algorithm opd, which reads the "
            "sampled tokens alone"
        )
    if tops and config.backend.kind not in ("pytorch", "fsdp"):
        raise ConfigError(
            f"backend.kind is {config.backend.kind!r}, but the divergence of rl.algorithm {name!r} is computed with pytorch and fsdp: "
            "choose one of them, or --algorithm opd"
        )
    if teacher.context is not None:
        from rollouts.training.distillation.context import check_context

        check_context(teacher.context)
        if config.task in EPISODE_TASKS or config.agent.is_used:
            raise ConfigError("teacher.context is given, but a context has a place in answers to single prompts only: leave it out")
    sampling = config.generation
    truncates = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if (teacher.url or teacher.servers) and (sampling.temperature != 1 or truncates):
        raise ConfigError(
            f"a server of a teacher scores at temperature 1 and over the whole vocabulary, but generation.temperature is "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, min_p {sampling.min_p:g}: leave them out, or "
            "give the teacher as a directory (--teacher.path)"
        )
    if tops and truncates:
        raise ConfigError(
            f"rl.algorithm {name!r} compares whole distributions, but generation.top_p, top_k or min_p cut them: leave these out, or take "
            "--algorithm opd"
        )


def check_episode_settings(config: Config) -> None:
    """Raise ConfigError for settings that a task with several turns, or a program of the user, does not support, or that conflict."""
    what = "a program of yours (agent.command, agent.function)" if config.agent.is_used else f"the task {config.task!r}"
    if config.engine.one_request_per_group:
        raise ConfigError(
            f"engine.one_request_per_group is True, but the samples of a prompt diverge in {what} and need separate requests: leave it out"
        )
    if config.enable_segment_wise_ppo:
        raise ConfigError(
            f"{SWITCH} is True, but an episode of {what} restarts after a weight sync and has no segments: leave it out, "
            "or use decoupled(...) without it"
        )
    if config.task not in EPISODE_TASKS:
        return
    actions, needed = response_tokens(config), episode_tokens(config)
    if config.model.path is None and (actions >= context_tokens(config) or needed > context_tokens(config)):
        is_known = EPISODE_TASKS[config.task].observation > 0
        shown = f"and its observations up to {needed - actions}" if is_known else "and its observations come on top"
        raise ConfigError(
            f"the actions of an episode may have {actions} tokens ({episode_config(config).max_turns} turns of {turn_tokens(config)}), "
            f"{shown}, but the built-in model's context has {context_tokens(config)}: give --model.max-length "
            f"{needed if is_known else 4 * actions}, or lower --episode.max-turns, --episode.max-tokens or --generation.max-tokens"
        )


def check_router_replay(config: Config) -> None:
    """Raise ConfigError if rl.router_replay is set for rollouts that carry no record of their experts."""
    if not config.rl.router_replay:
        return
    from rollouts.models.loading import find_device_name

    if config.engine.kind == "vllm" and config.engine.launch and find_device_name(config.model.device) == "cpu":
        raise ConfigError(
            "rl.router_replay is True, but vLLM returns the experts that it chooses on GPUs only: use the embedded engine "
            "(--engine.kind inprocess), or leave it out"
        )
    if config.backend.kind == "jax":
        raise ConfigError("rl.router_replay is True, but backend.kind 'jax' computes no mixture of experts: leave it out")


def check_head_size(config: Config) -> None:
    """Raise ConfigError for a built-in model whose attention a vLLM server that this run launches on a CPU would end at."""
    section = config.model
    if section.path is not None or config.engine.kind != "vllm" or not config.engine.launch:
        return
    from rollouts.models.loading import find_device_name

    size = section.hidden_size // section.num_heads
    if size not in VLLM_CPU_HEAD_SIZES and find_device_name(section.device) == "cpu":
        raise ConfigError(
            f"model.hidden_size is {section.hidden_size} and model.num_heads {section.num_heads}, so a head has {size} numbers, but vLLM "
            f"on a CPU computes heads of {', '.join(map(str, VLLM_CPU_HEAD_SIZES))}: set --model.hidden-size "
            f"{VLLM_CPU_HEAD_SIZES[0] * section.num_heads}, or use the embedded engine (--engine.kind inprocess)"
        )


def check_cuda_graphs(config: Config) -> None:
    """Raise ConfigError if engine.cuda_graphs is set where no step is recorded as a graph."""
    if not config.engine.cuda_graphs:
        return
    from rollouts.models.loading import find_device_name

    device = find_device_name(config.model.device)
    if not device.startswith("cuda"):
        raise ConfigError(
            f"engine.cuda_graphs is True, but the device of the model is {device!r} (model.device {config.model.device!r}), "
            "which has no CUDA graphs: leave --engine.cuda-graphs out, or give --model.device cuda"
        )
    if config.rl.router_replay:
        raise ConfigError(
            "engine.cuda_graphs and rl.router_replay are both True, but steps whose experts are recorded are not run by CUDA graphs: leave "
            "one of them out"
        )


def check_truncated_sampling(config: Config) -> None:
    """Raise ConfigError if RL would train on answers of a truncated distribution without a record of the tokens that were left."""
    section = config.generation
    if not section.truncates or config.algorithm.compares_pairs:  # likelihoods of whole answers, whatever they were drawn from
        return
    shown = f"generation.top_p is {section.top_p:g}, generation.top_k {section.top_k} and generation.min_p {section.min_p:g}"
    advice = "set them to 1, 0 and 0, and lower --generation.temperature for less random answers"
    if config.engine.kind == "sglang" and not 2 <= section.top_k <= MAX_KEPT:
        raise ConfigError(
            f"{shown}, but SGLang returns the sets of tokens that it draws from, over which log-probs of training are computed, only with "
            f"a top_k from 2 to {MAX_KEPT}: set --generation.top-k, for example to 512, or {advice}"
        )
    if config.engine.is_server and config.engine.kind != "sglang":
        raise ConfigError(
            f"{shown}, but the sets of tokens that vLLM draws from, over which log-probs of training are computed, are not read from its "
            "answers: vLLM 0.32 returns them on a GPU alone (--return-sampling-mask), and then refuses every request without a top_k or "
            "with temperature 0, such as an evaluation's. Use SGLang with a top_k, or the embedded engine (--engine.kind inprocess), or "
            f"{advice}"
        )
    if config.backend.kind == "jax":
        raise ConfigError(f"{shown}, but backend.kind 'jax' computes log-probs over the whole vocabulary alone: {advice}")
    if config.enable_segment_wise_ppo:
        raise ConfigError(f"{shown}, but the log-probs of segments are computed over the whole vocabulary: leave {SWITCH} out, or {advice}")
