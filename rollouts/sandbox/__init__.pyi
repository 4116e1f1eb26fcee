"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .limits import SandboxFailure as SandboxFailure, SandboxLimits as SandboxLimits
from .pool import SandboxView as SandboxView, SandboxPool as SandboxPool
from .reward_code import (
    execute_code as execute_code,
    execute_user_reward_code as execute_user_reward_code,
    open_code_pool as open_code_pool,
)
from .run import find_confinement as find_confinement, run_confined as run_confined
