"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .answers import (
    compute_reward as compute_reward,
    create_overlong_penalty as create_overlong_penalty,
    create_format_reward as create_format_reward,
    create_length_penalty as create_length_penalty,
    create_numeric_reward as create_numeric_reward,
    exact_match as exact_match,
    gsm8k_reward as gsm8k_reward,
)
from .code.math_answers import MathReward as MathReward
from .code.sandboxed import SandboxedReward as SandboxedReward
from .code.unit_tests import CodeReward as CodeReward
from .composite import create_composite_reward as create_composite_reward, weigh_metrics as weigh_metrics
from .evaluate import score_group as score_group
from .models.judge import JudgeConfig as JudgeConfig, PairwiseJudge as PairwiseJudge, RubricJudge as RubricJudge
from .models.local import open_reward_model as open_reward_model
from .models.remote import PlainScores as PlainScores, SGLangScores as SGLangScores, VLLMScores as VLLMScores
from .other_frameworks import adapt_reward as adapt_reward
from .results import EvaluateResult as EvaluateResult, align_rewards_with_step_data as align_rewards_with_step_data
from .reward_functions import reward_function as reward_function
from .trajectory_rewards import adapt_trajectory_reward as adapt_trajectory_reward, environment_reward as environment_reward
