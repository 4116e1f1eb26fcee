"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .capacity import (
    CapacityModifier as CapacityModifier,
    FilteredSamplesCapacityModifier as FilteredSamplesCapacityModifier,
    StalenessManager as StalenessManager,
)
from .config import AsyncConfig as AsyncConfig
from .create import (
    create_cache as create_cache,
    create_filtered_capacity_modifier as create_filtered_capacity_modifier,
    create_queue as create_queue,
    create_staleness_strategy as create_staleness_strategy,
    register_capacity_modifiers as register_capacity_modifiers,
)
from .executor import WorkflowExecutor as WorkflowExecutor, create_workflow_executor as create_workflow_executor
from .finished import (
    SegmentWisePPOStrategy as SegmentWisePPOStrategy,
    StalenessControlStrategy as StalenessControlStrategy,
    StandardPPOStrategy as StandardPPOStrategy,
)
from .queue import (
    LocalRolloutCache as LocalRolloutCache,
    LocalRolloutQueue as LocalRolloutQueue,
    RolloutCache as RolloutCache,
    RolloutQueue as RolloutQueue,
)
from .recompute import (
    ProximalRecomputer as ProximalRecomputer,
    create_proximal_recomputer as create_proximal_recomputer,
    score_with_engines as score_with_engines,
    score_with_trainer as score_with_trainer,
)
