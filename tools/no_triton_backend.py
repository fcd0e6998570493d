"""Takes Pallas's Triton backend away from a process, as if jax had dropped it.

    DSV4_WITHOUT_TRITON_BACKEND=1 pytest -m compiled

The variable does so in every process that imports `tools.aot` or runs tests, and in those that
they start. Any import of a part of the backend raises there, so that a kernel which still needs it
cannot be lowered, and kernels take the lowering that is the default without it. Nothing of jax is
imported here: what a process sets before jax is imported still counts.
"""

import importlib
import os
import sys
import types

VARIABLE = "DSV4_WITHOUT_TRITON_BACKEND"
"""Set to anything but nothing, it takes the backend away."""
BACKEND = "jax._src.pallas.triton"
_OTHER_NAMES = ("jax.experimental.pallas.triton", "jaxlib.triton")


class _NoBackend(types.ModuleType):
    """What is left of the backend's package."""

    def __getattr__(self, name):
        if name != "gpu_info":
            raise AttributeError(f"{self.__name__} is taken away, and so is its {name}")
        return _load_gpu_info()


def take_away():
    """The backend is not there from here on: any import of a part of it raises.

    jax itself imports the module that registers it before it looks for another's rule, also for
    kernels of Mosaic. So that one name stays, and is an empty module. jax-triton asks a module of
    the backend for the kind of a GPU that is not there, which stays too.
    """
    for name in [name for name in sys.modules if name.startswith(f"{BACKEND}.")]:
        del sys.modules[name]
    for name in _OTHER_NAMES:
        sys.modules[name] = None
    sys.modules[BACKEND] = package = _NoBackend(BACKEND)
    package.pallas_call_registration = types.ModuleType(f"{BACKEND}.pallas_call_registration")


def take_away_if_asked():
    """Does so where the environment says it."""
    if os.environ.get(VARIABLE):
        take_away()


def _load_gpu_info():
    package = sys.modules.pop(BACKEND)
    try:
        package.gpu_info = importlib.import_module(f"{BACKEND}.gpu_info")
    finally:
        sys.modules[BACKEND] = package
        sys.modules.pop(f"{BACKEND}.gpu_info", None)
    return package.gpu_info
