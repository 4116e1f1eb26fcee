"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .config import TinkerConfig as TinkerConfig
from .server import open_tinker_server as open_tinker_server
