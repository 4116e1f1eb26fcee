"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .collate import collate_samples as collate_samples, prepare_grpo_batch as prepare_grpo_batch
from .datasets import load_rl_prompts as load_rl_prompts, load_sft_conversations as load_sft_conversations
from .filters import (
    check_any_success as check_any_success,
    check_min_reward as check_min_reward,
    check_quality_and_diversity as check_quality_and_diversity,
    check_reasonable_length as check_reasonable_length,
    check_response_diversity as check_response_diversity,
    check_reward_nonzero_std as check_reward_nonzero_std,
    make_length_filter as make_length_filter,
    make_threshold_filter as make_threshold_filter,
)
from .preference_pairs import (
    load_labelled_answers as load_labelled_answers,
    load_preference_pairs as load_preference_pairs,
    prepare_preference_pair as prepare_preference_pair,
    rank_rollouts as rank_rollouts,
)
from .prompts import DataBuffer as DataBuffer
from .records import (
    TrajectoryRecord as TrajectoryRecord,
    UpdateRecord as UpdateRecord,
    attach_estimates as attach_estimates,
    derive_steps as derive_steps,
    describe_update as describe_update,
)
from .samples import (
    build_batch_metadata as build_batch_metadata,
    compute_response_lengths as compute_response_lengths,
    extract_sample_fields as extract_sample_fields,
    with_reward as with_reward,
)
from .trajectories import (
    read_records as read_records,
    read_samples as read_samples,
    read_steps as read_steps,
    select_steps as select_steps,
    write_records as write_records,
    write_steps as write_steps,
)
