import gc
import os
import shutil
import tempfile

# The wheels that compile for GPUs without one would look for a driver first.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The warpgroups of an interpreted kernel wait for each other on XLA's threads, one a core.
os.environ.setdefault("NPROC", "16")

import jax
import pytest

import pallas_kernels as pk
from helpers import gpu_results

LONG_FILES = {
    "test_compiled",
    "test_notebooks",
    "test_verify",
    "test_generate",
    "test_greedy_against_transformers",
    "test_bench_commands",
}
"""Few tests that take long; the first to be given to a worker, so that none is left with one."""


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):  # of pytest-xdist: files of few tests last
        config.option.loadscopereorder = False
    # Files of one run share what took over a second to compile; unless told where to keep it, no
    # run depends on an earlier one. Every process has its own: entries are not written at once.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="dsv4-jax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        jax.config.update("jax_compilation_cache_dir", folder)
    if gpu_results.VARIABLE in os.environ:
        config.pluginmanager.register(gpu_results.Counts())


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)
    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """A process may hold 65,530 mappings of memory, and every compiled program takes some."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _strict_promotion():
    """No silent dtype or rank promotion anywhere in the packages."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(params=["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def lane(request):
    """Runs a kernel test in the CPU interpreter and, where there is one, on a GPU."""
    if request.param == "gpu":
        yield request.param
    else:
        with pk.gpu_interpreter():
            yield request.param
