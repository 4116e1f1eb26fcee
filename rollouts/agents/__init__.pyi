"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .config import EpisodeConfig as EpisodeConfig
from .episode import Episode as Episode
from .matches import (
    MatchSetting as MatchSetting,
    create_match_generate_fn as create_match_generate_fn,
    run_match as run_match,
)
from .policies import (
    ActionRequest as ActionRequest,
    AgentAction as AgentAction,
    AgentPolicy as AgentPolicy,
    EngineAgentPolicy as EngineAgentPolicy,
    OpenAIAgentPolicy as OpenAIAgentPolicy,
    ScriptedAgentPolicy as ScriptedAgentPolicy,
)
from .run import (
    create_episode_generate_fn as create_episode_generate_fn,
    run_episode as run_episode,
    run_episode_group as run_episode_group,
)
from .samples import trajectory_to_sample as trajectory_to_sample
from .setting import EpisodeSetting as EpisodeSetting
