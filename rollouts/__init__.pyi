"""The public names of the library: those of its words, its packages and its loops, in the order in which they may import each other."""

from .errors import (
    BackendError as BackendError,
    BlockingCallError as BlockingCallError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    DataError as DataError,
    EngineContextError as EngineContextError,
    EngineError as EngineError,
    EngineProtocolError as EngineProtocolError,
    EngineRequestError as EngineRequestError,
    EngineStatusError as EngineStatusError,
    EngineTimeout as EngineTimeout,
    EnvironmentFault as EnvironmentFault,
    EpisodeError as EpisodeError,
    EpisodeInterrupted as EpisodeInterrupted,
    GenerationError as GenerationError,
    GenerationTimeout as GenerationTimeout,
    OutputError as OutputError,
    ReplayError as ReplayError,
    RewardError as RewardError,
    RolloutsError as RolloutsError,
    SandboxError as SandboxError,
    ToolArgumentError as ToolArgumentError,
    ToolFault as ToolFault,
)
from .seeds import derive_seed as derive_seed
from .outcomes import MetricResult as MetricResult, StepOutput as StepOutput
from .types import (
    Algorithm as Algorithm,
    Completion as Completion,
    Group as Group,
    KLControl as KLControl,
    LossOutput as LossOutput,
    Message as Message,
    Prompt as Prompt,
    RolloutBatch as RolloutBatch,
    Sample as Sample,
    SamplingParams as SamplingParams,
    Status as Status,
    TokenOutputs as TokenOutputs,
    TrainBatch as TrainBatch,
    Turn as Turn,
)
from .steps import StepData as StepData, Trajectory as Trajectory
from .batches import split_microbatches as split_microbatches
from .config import (
    CheckpointConfig as CheckpointConfig,
    GenerationConfig as GenerationConfig,
    OptimizerConfig as OptimizerConfig,
    PreferenceTrainingConfig as PreferenceTrainingConfig,
    RLTrainingConfig as RLTrainingConfig,
    RewardConfig as RewardConfig,
    RewardModelTrainingConfig as RewardModelTrainingConfig,
    RolloutConfig as RolloutConfig,
    SFTTrainingConfig as SFTTrainingConfig,
)
from .config_files import from_dict as from_dict, to_dict as to_dict
from .algorithms import *
from .chat import *
from .sandbox import *
from .environments import *
from .data import *
from .models import *
from .backends import *
from .engines import *
from .rewards import *
from .generation import *
from .agents import *
from .gateway import *
from .training import *
from .asynchronous import *
from .tinker import *
from .sft_loop import run_sft_training as run_sft_training
from .reward_model_loop import train_reward_model as train_reward_model
from .preference_loop import PreferenceParts as PreferenceParts, score_reference as score_reference, train_preferences as train_preferences
from .rl_loop import train_rl as train_rl, run_rl_training as run_rl_training
from .async_rl_loop import train_async_rl as train_async_rl, run_async_rl_training as run_async_rl_training
from .testing import *

__version__: str
