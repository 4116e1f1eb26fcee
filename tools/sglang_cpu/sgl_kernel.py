"""Stand-in for sgl_kernel, which has builds for GPUs only: every name can be imported, and raises when called."""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def raise_missing(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.{name} was called, which a CPU does not have")

    return raise_missing
