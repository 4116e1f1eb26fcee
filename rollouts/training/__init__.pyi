"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .logs.figures import draw_comparison as draw_comparison, draw_run as draw_run
from .metrics import (
    JSONLLogger as JSONLLogger,
    MetricsLogger as MetricsLogger,
    WandbLogger as WandbLogger,
    read_metrics as read_metrics,
)
from .rl_parts import RecordUpdates as RecordUpdates, RLParts as RLParts
from .rollout_batch import RecordRequest as RecordRequest, UpdatePlan as UpdatePlan, train_on_rollouts as train_on_rollouts
from .saving.checkpoints import latest_checkpoint as latest_checkpoint, save_checkpoint as save_checkpoint
from .saving.rl_checkpoints import restore_rl_run as restore_rl_run
from .weight_sync import sync_weights_to_engines as sync_weights_to_engines
