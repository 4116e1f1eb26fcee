"""Checks that backends, rollout source and samples provide the columns that an algorithm requires: most before the first rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rollouts.backends.protocol import TrainingBackend, find_outputs, find_token_spec
from rollouts.config import RLTrainingConfig, RolloutConfig
from rollouts.data.samples import describe_sample, select_trainable
from rollouts.engines.protocol import EngineFeature, InferenceEngine, WeightChannel, get_engine_features
from rollouts.errors import ConfigError, DataError
from rollouts.generation.contract import gives_turns
from rollouts.models.tokens import explain_token_differences
from rollouts.training.distillation.teachers import TEACHER_COLUMNS, Teacher, list_teacher_backends
from rollouts.types import Algorithm, Sample, TrainBatch

POLICY_COLUMNS = ("old_log_probs", "prox_log_probs")
"""Log-probs of the policy before its first update on the batch."""

SAMPLE_COLUMNS = ("rollout_log_probs", "segment_log_probs", "weight_versions", "turns", "reward_components")
"""Columns that come with the samples."""

FILLABLE = frozenset({
    *POLICY_COLUMNS, *SAMPLE_COLUMNS, *TEACHER_COLUMNS, "ref_log_probs", "values", "entropy", "greedy_rows", "policy_versions",
})  # fmt: skip
"""All names that Algorithm.requires may have. greedy_rows is no column: rows with trainable = False, which come with the samples."""


@runtime_checkable
class ConfiguredSource(Protocol):
    """Rollout source that declares its batches beforehand."""

    @property
    def config(self) -> RolloutConfig:
        """Sizes of batches and groups, and the columns that the samples carry."""
        ...


def check_requirements(
    algorithm: Algorithm,
    reference: TrainingBackend | None,
    critic: TrainingBackend | None = None,
    *,
    backend: TrainingBackend | None = None,
    source: object | None = None,
    controls_kl: bool = False,
    teacher: Teacher | None = None,
) -> None:
    """Raise ConfigError if the loop cannot provide the columns that the algorithm requires. Called before the first rollout.

    A critic that the algorithm does not need is refused, because it would cost as much as the policy and change nothing. An unneeded
    reference is ignored. A backend that does not describe itself (BackendFeature.OUTPUTS, TOKENS) is assumed to fit.

    Args:
        backend: the policy; critic and reference must know its tokens.
        source: source of the rollouts; None = not checked. It must declare (ConfiguredSource) a greedy row in each group and segment
            log-probs, if required.
        controls_kl: whether a KL controller sets the coefficient of the algorithm's KL term.
        teacher: teacher of distillation, ignored by an algorithm without one.
    """
    unknown = sorted(algorithm.requires - FILLABLE)
    if unknown:
        raise ConfigError(f"the algorithm requires {unknown}, which this loop cannot fill; it can fill {sorted(FILLABLE)}")
    if "ref_log_probs" in algorithm.requires and reference is None:
        raise ConfigError(
            "the algorithm requires ref_log_probs (it compares with a reference): pass reference=backend of the frozen model"
            + (", or choose a loss without one: simpo or orpo" if algorithm.compares_pairs else ", or set kl_coef=0")
        )
    if controls_kl and algorithm.compares_pairs:
        raise ConfigError(
            "kl_control is set, but the algorithm has no KL term: beta of its loss is the pull to the reference. Set kl_control=None"
        )
    if controls_kl and "ref_log_probs" not in algorithm.requires:
        raise ConfigError(
            "kl_control is set, but the algorithm has no KL term (it does not require ref_log_probs): "
            "choose one with kl_coef > 0, or set kl_control=None"
        )
    if "values" in algorithm.requires and critic is None:
        raise ConfigError("the algorithm requires values: pass critic=a backend with a value head, for example create_critic_backend(...)")
    if critic is not None and "values" not in algorithm.requires:
        raise ConfigError("critic= was given, but the algorithm does not require values: leave it out, or choose one that does (ppo)")
    if backend is not None:
        _check_outputs("the policy's backend", backend, "log_probs", "make it with create_pytorch_backend(...)")
    if critic is not None:
        _check_outputs("critic=", critic, "values", "it needs a value head, make it with create_critic_backend(...)")
        _check_tokens("critic", backend, critic)
    if reference is not None and "ref_log_probs" in algorithm.requires:
        _check_outputs("reference=", reference, "log_probs", "it is a language model, make it with create_reference_backend(...)")
        _check_tokens("reference", backend, reference)
    _check_teacher(algorithm, backend, teacher)
    if source is not None:
        _check_source(algorithm, source)


def _check_teacher(algorithm: Algorithm, backend: TrainingBackend | None, teacher: Teacher | None) -> None:
    wanted = algorithm.requires & frozenset(TEACHER_COLUMNS)
    if not wanted:
        return
    if teacher is None:
        raise ConfigError(f"the algorithm requires {sorted(wanted)[0]} (it distils a teacher): pass teacher=ModelTeacher(backend=...)")
    if missing := sorted(wanted - teacher.fills):
        raise ConfigError(
            f"the algorithm requires {missing[0]}, which the teacher does not compute: make its backend with "
            "create_reference_backend(..., num_tops=64), or distil the sampled tokens alone: opd"
        )
    for name, one in list_teacher_backends(teacher).items():
        _check_tokens(name, backend, one)


def _check_outputs(name: str, backend: TrainingBackend, wanted: str, advice: str) -> None:
    computed = find_outputs(backend)
    if computed is not None and wanted not in computed:
        raise ConfigError(f"{name} computes {', '.join(sorted(computed))} and no {wanted}: {advice}")


def _check_tokens(name: str, backend: TrainingBackend | None, other: TrainingBackend) -> None:
    policy, known = find_token_spec(backend), find_token_spec(other)
    differences = [] if policy is None or known is None else explain_token_differences(policy, known)
    if differences:
        raise ConfigError(
            f"the {name}'s tokenizer differs from the policy's: {'; '.join(differences)}. "
            f"Make the {name} from the policy's model directory, or from one of the same family"
        )


def _check_source(algorithm: Algorithm, source: object) -> None:
    config = source.config if isinstance(source, ConfiguredSource) else None
    if "turns" in algorithm.requires and config is not None and gives_turns(config.generate_fn) is False:
        raise ConfigError(
            "the algorithm requires turns: it compares the actions of episodes, but generate_fn samples single answers, which have none. "
            "Make it with create_episode_generate_fn(...), or choose an algorithm for single answers, as grpo()"
        )
    declared = "" if config is not None else f"; {type(source).__name__} has no property `config` that says so"
    if "greedy_rows" in algorithm.requires and (config is None or config.n_baseline_samples == 0):
        raise ConfigError(
            "the algorithm requires greedy_rows, an answer in each group that is not trained on: pass a rollout_manager with "
            f"RolloutConfig(n_baseline_samples=1, generate_fn=create_generate_fn(..., num_greedy=1)){declared}"
        )
    if "segment_log_probs" in algorithm.requires and (config is None or not config.segment_log_probs):
        raise ConfigError(
            "the algorithm requires segment_log_probs: set segment_wise=False, or pass a rollout_manager whose samples carry them "
            f"(rollouts.asynchronous.recompute) and whose RolloutConfig(segment_log_probs=True) says so{declared}"
        )


def check_records_experts(engines: Sequence[InferenceEngine]) -> None:
    """Raise ConfigError unless every engine records the experts that router_replay needs. Called before the first rollout."""
    for engine in engines:
        if EngineFeature.ROUTED_EXPERTS not in get_engine_features(engine):
            raise ConfigError(
                f"RLTrainingConfig.router_replay is set, but {getattr(engine, 'name', type(engine).__name__)} does not record the experts "
                "of its tokens: use InProcessEngine(..., record_experts=True), the embedded engine, or set router_replay to False"
            )


def check_recorded_experts(batch: TrainBatch, samples: Sequence[Sample]) -> None:
    """Raise DataError for a trained sample without recorded experts, which router_replay needs."""
    for sample, is_trained in zip(samples, batch.trainable.tolist(), strict=True):
        if is_trained and sample.routed_experts is None:
            raise DataError(
                f"RLTrainingConfig.router_replay is set, but {describe_sample(sample)} has no routed_experts: a generate_fn must keep "
                "those of its completions, as create_generate_fn does, and a policy of episodes AgentAction.routed_experts. "
                "Set router_replay to False"
            )


def check_sampled_whole(samples: tuple[Sample, ...], algorithm: Algorithm) -> None:
    """Raise DataError if trained samples were drawn from a cut distribution and the algorithm compares theirs with log-probs of another.

    The trainer computes log-probs over the sets that the engine recorded (Sample.kept_tokens). Without a record its log-probs are those of
    the whole distribution, as segment log-probs always are, and a ratio of the two would be meaningless.
    """
    cut = [sample for sample in select_trainable(samples) if sample.truncated_sampling]
    unknown = [sample for sample in cut if not _has_all_sets(sample)]
    if unknown and "rollout_log_probs" in algorithm.requires:
        raise DataError(
            f"{len(unknown)} of {len(samples)} samples (the first is sample {unknown[0].index}) were drawn with top_p, top_k or min_p, and "
            "the trainer cannot compute the log-probs that the algorithm compares with, since the engine did not record the sets that were "
            "left: use the engine in this process, or SGLang with a top_k from 2 to 4096, sample with top_p=1, top_k=0 and min_p=0, or use "
            "an algorithm that does not read rollout_log_probs, for example recomputed(...)"
        )
    if cut and "segment_log_probs" in algorithm.requires:
        raise DataError(
            f"{len(cut)} of {len(samples)} samples (the first is sample {cut[0].index}) were drawn with top_p, top_k or min_p, but the "
            "algorithm requires segment_log_probs, which engines compute over the whole distribution: set segment_wise to False, or sample "
            "with top_p=1, top_k=0 and min_p=0"
        )


def _has_all_sets(sample: Sample) -> bool:
    """Whether it is recorded what each trained token was drawn from."""
    kept = sample.kept_tokens
    return kept is not None and all(count >= 0 for count, mask in zip(kept.counts, sample.loss_mask, strict=True) if mask > 0)


def check_weight_channel(config: RLTrainingConfig, channel: WeightChannel | None) -> WeightChannel | None:
    """Return the channel of a run. Raises ConfigError for a channel without the setting, or the reverse."""
    if (config.weight_sync == "channel") != (channel is not None):
        given = "no weight_channel was given: pass an open one" if channel is None else "a weight_channel was given: leave it out"
        raise ConfigError(f'weight_sync is {config.weight_sync!r}, but {given}, or set weight_sync="memory" or "channel" to match')
    return channel


def check_rl_batch_sizes(rollout: RolloutConfig, training: RLTrainingConfig) -> None:
    """Raise ConfigError unless a rollout batch divides into minibatches of one size; unequal ones would weigh rows unequally."""
    rows = rollout.batch_size * rollout.n_samples_per_prompt
    if rows % training.num_minibatches:
        raise ConfigError(
            f"a rollout batch of {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} samples = {rows} rows does not divide into "
            f"num_minibatches = {training.num_minibatches}: choose a divisor of {rows}"
        )
