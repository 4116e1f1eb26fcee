"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .agent_runs import (
    AgentConfig as AgentConfig,
    AgentTask as AgentTask,
    create_agent_generate_fn as create_agent_generate_fn,
)
from .config import GatewayConfig as GatewayConfig
from .frameworks.verifiers import (
    create_verifiers_agent as create_verifiers_agent,
    load_verifiers_prompts as load_verifiers_prompts,
)
from .server import Gateway as Gateway, open_gateway as open_gateway
