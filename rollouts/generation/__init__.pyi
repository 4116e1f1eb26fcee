"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .manager import AsyncRolloutManager as AsyncRolloutManager, RolloutManager as RolloutManager
from .single_turn import (
    GroupSettings as GroupSettings,
    create_generate_fn as create_generate_fn,
    evaluate_prompts as evaluate_prompts,
    generate_group as generate_group,
    generate_rollout_batches as generate_rollout_batches,
)
from .workflows import (
    LLMRequest as LLMRequest,
    RLVRWorkflow as RLVRWorkflow,
    ReMaxWorkflow as ReMaxWorkflow,
    RolloutWorkflow as RolloutWorkflow,
    create_workflow_generate_fn as create_workflow_generate_fn,
)
