"""Pallas' GPU interpreter for tests: NumPy arrays for callbacks, and a client for threads.

The interpreter calls Python for whatever a thread of a kernel does, tens of thousands of times in a
test. JAX first puts each argument of such a call on a device, which takes longer than the call. The
callbacks look at contents alone, so an array of NumPy's is as good.

Warpgroups wait for each other on threads of an XLA client, which has one a core unless NPROC says
how many. Sixteen are enough for every kernel here. A program of many small operations, such as a
step of a small model, takes more processor time the more threads it is handed to: a step of
`helpers/serving.py` takes 9.5 ms with sixteen and 5.5 ms with two, on two cores. So threads of
kernels run on a client of sixteen, and all else on that of the process.

The first kernel imports a module that gives JAX one more setting. Keys of traces hold all settings,
so that whatever was traced until then would be traced and compiled once more. It is imported here.
"""

import functools
import importlib
import threading

import jax
import numpy as np
import pytest
from jax._src import callback as jax_callback
from jax._src import tree_util, xla_bridge
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

NUM_THREADS = 16
_to_int = shared_memory._to_int
_run_jaxpr = thread_map._run_jaxpr
_MAKING = threading.Lock()


def use():
    """From here on, in this process."""
    importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    jax_callback.io_callback_impl = _call
    shared_memory._to_int = _to_int_of_numpy
    thread_map._run_jaxpr = _run_apart


def _call(*args, callback, **_):
    copies = map(np.array, args)  # XLA writes over its own as soon as this returns
    return tree_util.tree_map(np.asarray, callback(*copies))


def _to_int_of_numpy(x):
    return x.item() if isinstance(x, np.ndarray) else _to_int(x)


def _run_apart(jaxpr, consts, *args):
    with _MAKING:  # threads of a kernel come together, and one of them makes it
        device = _device_of_threads()
    with jax.default_device(device):
        _run_jaxpr(jaxpr, consts, *map(np.asarray, args))


@functools.cache
def _device_of_threads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", str(NUM_THREADS))
        return xla_bridge.make_cpu_client().local_devices()[0]
