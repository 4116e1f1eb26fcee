"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .inprocess.engine import InProcessEngine as InProcessEngine
from .launch.commands import ServerConfig as ServerConfig
from .launch.servers import launch_server as launch_server
from .protocol import EngineFeature as EngineFeature, InferenceEngine as InferenceEngine
from .sglang.engine import SGLangEngine as SGLangEngine
from .text.batch import BatchInferenceManager as BatchInferenceManager
from .text.openai import OpenAITextEngine as OpenAITextEngine
from .vllm.engine import VLLMEngine as VLLMEngine
