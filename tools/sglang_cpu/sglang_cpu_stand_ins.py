"""Stand-ins for packages that SGLang imports but does not call when it serves a text model on a CPU.

They are last in the import search, so installed packages take precedence. A .pth file installs them when Python starts.
"""

import importlib.machinery
import importlib.util
import sys
import types

PACKAGES = {"torchvision", "soundfile", "triton", "compressed_tensors", "gguf", "IPython", "sentencepiece", "zstandard", "interegular"}


class StandInType(type):
    """A metaclass of classes whose attributes are such classes, too."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return create_class(name)


def create_class(name):
    """Create a class that accepts subclasses and any arguments."""
    body = {"__init__": lambda self, *args, **kwargs: None, "__init_subclass__": classmethod(lambda cls, **kwargs: None)}
    return StandInType(name, (), body)


class StandInModule(types.ModuleType):
    """A package with every name: capitalized names are classes, others are modules that also work as decorators."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__
        self.__version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if full_name not in sys.modules:
            setattr(self, name, create_class(name) if name[0].isupper() else StandInModule(full_name))
            return self.__dict__[name]
        return sys.modules[full_name]

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class StandInFinder:
    """Finder of the packages above and everything below them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandInModule(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Install the finder, once."""
    if any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(StandInFinder())
    spec = importlib.util.find_spec("triton")
    if isinstance(spec.loader, StandInFinder):  # two functions of triton are called on any device
        import triton

        triton.cdiv = lambda a, b: -(a // -b)
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
