"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .calls import reset_environment as reset_environment, step_environment as step_environment
from .games.calculator import (
    create_calculator_environment as create_calculator_environment,
    create_calculator_problems as create_calculator_problems,
)
from .games.grid_world import (
    GridWorld as GridWorld,
    GridWorldConfig as GridWorldConfig,
    create_grid_world_prompts as create_grid_world_prompts,
)
from .games.text_game import SimpleGameEnvironment as SimpleGameEnvironment, TextGameEnv as TextGameEnv
from .gym import GymEnvironment as GymEnvironment
from .protocol import (
    Environment as Environment,
    EnvironmentConfig as EnvironmentConfig,
    EnvironmentStep as EnvironmentStep,
    MultiAgentEnvironment as MultiAgentEnvironment,
    MultiAgentStep as MultiAgentStep,
)
from .tools.calls import (
    ToolCall as ToolCall,
    ToolCallError as ToolCallError,
    create_compact_parser as create_compact_parser,
    parse_hermes_calls as parse_hermes_calls,
    parse_json_calls as parse_json_calls,
)
from .tools.environment import ToolRules as ToolRules, ToolEnvironment as ToolEnvironment, describe_tools as describe_tools
from .tools.mcp import open_mcp_tools as open_mcp_tools
from .tools.tool import create_tool as create_tool
