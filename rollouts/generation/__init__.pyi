"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .estimates import (
    Estimate as Estimate,
    compare_paired as compare_paired,
    estimate_mean as estimate_mean,
    estimate_majority_at_k as estimate_majority_at_k,
    estimate_pass_at_k as estimate_pass_at_k,
)
from .evaluation import evaluate_prompts as evaluate_prompts
from .manager import AsyncRolloutManager as AsyncRolloutManager
from .single_turn import (
    GroupSettings as GroupSettings,
    create_generate_fn as create_generate_fn,
    generate_group as generate_group,
)
from .sync_batches import (
    RolloutManager as RolloutManager,
    generate_rollout_batches as generate_rollout_batches,
)
from .workflows import (
    LLMRequest as LLMRequest,
    RLVRWorkflow as RLVRWorkflow,
    ReMaxWorkflow as ReMaxWorkflow,
    RolloutWorkflow as RolloutWorkflow,
    create_workflow_generate_fn as create_workflow_generate_fn,
)
