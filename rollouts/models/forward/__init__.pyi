"""Names for a training backend of one's own (docs/backends.md), for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .outputs import ComputeOutputs as ComputeOutputs
from .outputs import OutputOptions as OutputOptions
from .outputs import compute_log_probs as compute_log_probs
from .outputs import compute_scores as compute_scores
from .outputs import compute_values as compute_values
from .packing import PackedRows as PackedRows
from .packing import pack_batch as pack_batch
from .packing import pack_padded as pack_padded
from .passes import check_batch as check_batch
from .passes import move_batch as move_batch
from .passes import run_packed as run_packed
from .passes import run_rows as run_rows
from .passes import training_mode as training_mode
