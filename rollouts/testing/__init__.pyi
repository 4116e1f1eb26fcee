"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .backends import FakeBackend as FakeBackend
from .engines import FakeEngine as FakeEngine, random_answer as random_answer, script_answer as script_answer
from .models import create_tiny_model as create_tiny_model
from .servers.http import Fault as Fault
from .servers.models import ScriptedModel as ScriptedModel
from .servers.sglang.server import FakeSGLangServer as FakeSGLangServer
from .servers.sglang.settings import SGLangSettings as SGLangSettings
from .servers.vllm.server import FakeVLLMServer as FakeVLLMServer
from .servers.vllm.settings import VLLMSettings as VLLMSettings
