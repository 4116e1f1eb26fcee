"""Facade of one-call training: a configuration in sections, engines by name, and a trainer object, as custom PPO set-ups have them.

These names are not among those of `rollouts`: some are also those of parts that the facade is made of.
"""

from .advantages import (
    compute_gae_advantage_return as compute_gae_advantage_return,
    compute_grpo_advantage as compute_grpo_advantage,
    create_algorithm as create_algorithm,
)
from .blocking import (
    BatchInferenceManager as BatchInferenceManager,
    BlockingEngine as BlockingEngine,
    MultiTurnInferenceEngine as MultiTurnInferenceEngine,
    PPOTrainer as PPOTrainer,
    create_inference_engine as create_inference_engine,
)
from .config import (
    CheckpointConfig as CheckpointConfig,
    ConfigStore as ConfigStore,
    InferenceConfig as InferenceConfig,
    ModelConfig as ModelConfig,
    TrainingConfig as TrainingConfig,
)
from .engines import TextEngine as TextEngine, open_text_engine as open_text_engine
from .environments import BaseEnvironment as BaseEnvironment
from .session import TrainerSession as TrainerSession, open_trainer as open_trainer
