"""The default task with DAPO: groups whose rewards are all equal teach nothing, so they are replaced by others.

python -m integration.train --config integration/configs/sort_dapo.py

Source: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale": clip-higher, token-level loss, dynamic sampling.
"""

from integration.settings.config import Config
from integration.settings.sections import RLSection

config = Config(
    rl=RLSection(
        algorithm="dapo",
        filter="nonzero_std",
        over_sampling_factor=1.5,  # more groups in flight than wanted, since some are filtered out
    )
)
