"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .capacity import (
    CapacityModifier as CapacityModifier,
    StalenessManager as StalenessManager,
)
from .config import AsyncConfig as AsyncConfig
from .executor import WorkflowExecutor as WorkflowExecutor, create_workflow_executor as create_workflow_executor
from .finished import (
    StalenessControlStrategy as StalenessControlStrategy,
)
from .queue import (
    RolloutCache as RolloutCache,
    RolloutQueue as RolloutQueue,
)
from .recompute import (
    ProximalRecomputer as ProximalRecomputer,
    score_with_engines as score_with_engines,
    score_with_trainer as score_with_trainer,
)
