"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .factory import (
    create_backend_with_scheduler as create_backend_with_scheduler,
    create_critic_backend as create_critic_backend,
    create_cross_entropy_loss as create_cross_entropy_loss,
    create_pytorch_backend as create_pytorch_backend,
    create_reference_backend as create_reference_backend,
    create_reward_model_backend as create_reward_model_backend,
)
from .fsdp.backend import FSDPTrainingBackend as FSDPTrainingBackend
from .fsdp.config import FSDPConfig as FSDPConfig
from .fsdp.factory import create_fsdp_backend as create_fsdp_backend, create_fsdp_reward_model_backend as create_fsdp_reward_model_backend
from .functional.backend import create_torch_func_backend as create_torch_func_backend
from .futures import ImmediateTrainFuture as ImmediateTrainFuture, TrainFuture as TrainFuture, open_pipeline as open_pipeline
from .jax.backend import (
    JAXTrainingBackend as JAXTrainingBackend,
    create_jax_backend as create_jax_backend,
)
from .lora.config import LoRAConfig as LoRAConfig
from .lora.reference import create_lora_reference as create_lora_reference
from .optim.optimizers import create_adamw_optimizer as create_adamw_optimizer
from .optim.schedules import create_warmup_cosine_scheduler as create_warmup_cosine_scheduler
from .protocol import BackendFeature as BackendFeature, TrainingBackend as TrainingBackend
from .pytorch.backend import PyTorchTrainingBackend as PyTorchTrainingBackend
from .ranks.distributed import (
    init_distributed as init_distributed,
    leave_distributed as leave_distributed,
)
from .ranks.group import join_ranks as join_ranks
from .unread_metrics import RecordedTokens as RecordedTokens
