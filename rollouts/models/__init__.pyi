"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .loading import load_hf_model as load_hf_model
