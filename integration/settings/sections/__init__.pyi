"""The sections that a file of settings in Python imports, see integration/configs/sort_dapo.py."""

from .backend import BackendSection as BackendSection
from .backend import HardwareSection as HardwareSection
from .data import DataSection as DataSection
from .data import EvaluationSection as EvaluationSection
from .engine import DeadlinesSection as DeadlinesSection
from .engine import EngineSection as EngineSection
from .episodes import AgentSection as AgentSection
from .episodes import EnvironmentSection as EnvironmentSection
from .episodes import EpisodeSection as EpisodeSection
from .generation import GenerationSection as GenerationSection
from .generation import RewardSection as RewardSection
from .model import (
    CriticSection as CriticSection,
)
from .model import (
    LoRASection as LoRASection,
)
from .model import (
    ModelSection as ModelSection,
)
from .model import (
    ReferenceSection as ReferenceSection,
)
from .preference import PreferenceSection as PreferenceSection
from .records import ProfileSection as ProfileSection
from .records import TrajectorySection as TrajectorySection
from .stages import KLControlSection as KLControlSection
from .stages import RLSection as RLSection
from .stages import SFTSection as SFTSection
from .teacher import TeacherSection as TeacherSection
