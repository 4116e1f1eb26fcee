"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

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
