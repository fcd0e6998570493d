import atexit
import gc
import os
import pathlib
import shutil
import signal
import tempfile

# The wheels that compile for GPUs without one would look for a driver first. LLVM's first level
# compiles a step in three quarters of the time, and the step runs as fast.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")

import jax
import pytest
from jax._src import api, lru_cache
from jax._src import config as jax_config

import pallas_kernels as pk
from helpers import compiles_nothing, gpu_results, quick_interpreter
from tools import aot

PROGRAMS = "DSV4_TEST_PROGRAMS"
"""Tells the workers of a run where it keeps compiled programs."""
MAX_MAPPINGS = 40_000
"""At the end of a file, of memory; beyond them compiled programs are dropped."""


def pytest_configure(config):
    # Traces are millions of objects that stay, and each collection of the oldest walks through all.
    gc.set_threshold(50_000, 50, 100)
    quick_interpreter.use()
    config.pluginmanager.register(compiles_nothing.Watch())
    # No silent dtype or rank promotion anywhere in the packages, in threads of engines too. A block
    # would hold for its own thread, and programs of other threads would be traced once more.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist: files of few tests last
        config.option.loadscopereorder = False
    # The workers of one run share what took long to compile; unless told where to keep it, no run
    # depends on an earlier one. With a size jax locks the folder, since it writes entries in parts;
    # looking through all entries at each write, to evict some, would take longer than compiling.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if PROGRAMS not in os.environ:
            os.environ[PROGRAMS] = folder = tempfile.mkdtemp(prefix="dsv4-jax-tests-")
            config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        jax.config.update("jax_compilation_cache_dir", os.environ[PROGRAMS])
        jax.config.update("jax_compilation_cache_max_size", 8 << 30)
        lru_cache.LRUCache._evict_if_needed = lambda self, **_: None
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if gpu_results.VARIABLE in os.environ:
        config.pluginmanager.register(gpu_results.Counts())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getvalue("dist") != "loadfile":
        return None
    from helpers.whole_rooms import WholeRooms  # which needs pytest-xdist

    return WholeRooms(config, log)


def pytest_unconfigure():
    # At its end a process would take ten seconds to let go of what it traced and compiled.
    atexit.unregister(api.clean_up)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules stay to the end


def pytest_collection_modifyitems(items):
    items.sort(key=order)
    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    compiled = [item for item in items if item.get_closest_marker("compiled")]
    if compiled and (reason := aot.unavailable()):
        for item in compiled:
            item.add_marker(pytest.mark.skip(reason=reason))


def order(item):
    """Files of few tests that take long come first, so that no worker is left alone with one."""
    marks = [not item.get_closest_marker(name) for name in ("early", "compiles_for_others")]
    return marks[0], not is_unoptimised(item), marks[1]


def is_unoptimised(item):
    return jax.default_backend() == "cpu" and item.get_closest_marker("unoptimised") is not None


@pytest.fixture(autouse=True, scope="module")
def _optimised_as_far_as_it_matters(request):
    """In this process and in those that its tests start; the two kinds share no program."""
    is_quick = is_unoptimised(request.node)
    if jax.config.read("jax_disable_most_optimizations") != is_quick:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", is_quick)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(is_quick)))
        yield


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """A process may hold 65,530 mappings of memory, and every compiled program takes some.

    Until then files share what was compiled, and what is frozen is walked through by no collection.
    """
    settings = len(jax_config.trace_context())
    yield
    if count_mappings() > MAX_MAPPINGS:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
    gc.freeze()
    # Where a module that is imported late brings one, nothing that was traced is found again.
    assert len(jax_config.trace_context()) == settings or jax.default_backend() != "cpu", (
        "JAX got one more setting of traces; import what brings it in helpers/quick_interpreter.py"
    )


def count_mappings():
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else MAX_MAPPINGS + 1


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def lane(request):
    """Runs a kernel test in the CPU interpreter and, where there is one, on a GPU."""
    if request.param == "gpu":
        yield request.param
    else:
        with pk.gpu_interpreter():
            yield request.param


@pytest.fixture
def interrupts_arrive():
    """SIGINT is as a terminal has it, here and in what a test starts.

    A script starts what runs in its background with the signal ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
