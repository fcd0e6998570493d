import gc
import os
import pathlib
import shutil
import tempfile

# The wheels that compile for GPUs without one would look for a driver first. LLVM's first level
# compiles a step in three quarters of the time, and the step runs as fast.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
# The warpgroups of an interpreted kernel wait for each other on XLA's threads, one a core.
os.environ.setdefault("NPROC", "16")

import jax
import pytest
from jax._src import lru_cache

import pallas_kernels as pk
from helpers import gpu_results, numpy_callbacks

TESTS = pathlib.Path(__file__).parent
LONG_FILES = {
    "test_compiled",
    "test_notebooks",
    "test_generate",
    "test_bench_commands",
}
"""The first to be given to a worker: few tests that take long, so that none is left with one."""
COMPILED_FOR_OTHERS = {
    "dsv4_jax/bench/test_load.py",
    "dsv4_jax/serving/test_drafting.py",
    "dsv4_jax/serving/device/test_programs.py",
}
"""The first of their kind: what they compile many others take, whom the workers get later."""
QUICKLY_COMPILED = (
    "dsv4_jax/allocator/test_verify.py",
    "dsv4_jax/attention/test_csa.py",
    "dsv4_jax/attention/test_hca.py",
    "dsv4_jax/attention/test_index_reuse.py",
    "dsv4_jax/attention/test_swa.py",
    "dsv4_jax/bench/test_bench_commands.py",
    "dsv4_jax/bench/test_fill.py",
    "dsv4_jax/bench/test_random_weights.py",
    "dsv4_jax/cache/test_append.py",
    "dsv4_jax/cache/test_block_split.py",
    "dsv4_jax/cache/test_flush.py",
    "dsv4_jax/cache/test_handle.py",
    "dsv4_jax/cache/test_model_cache.py",
    "dsv4_jax/cache/test_paged_cache.py",
    "dsv4_jax/cache/test_state_cache.py",
    "dsv4_jax/cache/test_step_input.py",
    "dsv4_jax/checkpoint/test_damaged_files.py",
    "dsv4_jax/checkpoint/test_draft_block.py",
    "dsv4_jax/checkpoint/test_load_on_mesh.py",
    "dsv4_jax/checkpoint/test_namings.py",
    "dsv4_jax/checkpoint/test_number_formats.py",
    "dsv4_jax/checkpoint/test_save.py",
    "dsv4_jax/checkpoint/test_shipped_checkpoint.py",
    "dsv4_jax/checkpoint/test_stored_weights.py",
    "dsv4_jax/cli/test_convert.py",
    "dsv4_jax/cli/test_generate.py",
    "dsv4_jax/cli/test_verify.py",
    "dsv4_jax/model/test_against_transformers.py",
    "dsv4_jax/model/test_draft.py",
    "dsv4_jax/model/test_released.py",
    "dsv4_jax/research/",
    "dsv4_jax/serve/test_shipped.py",
    "dsv4_jax/serving/test_boundary.py",
    "dsv4_jax/serving/test_engine.py",
    "dsv4_jax/serving/test_engine_on_mesh.py",
    "dsv4_jax/serving/test_grammars.py",
    "dsv4_jax/serving/test_quantised_weights.py",
    "dsv4_jax/step/test_activations.py",
    "dsv4_jax/step/test_compiled_step.py",
    "dsv4_jax/step/test_decode_loop.py",
    "dsv4_jax/step/test_draws.py",
    "dsv4_jax/step/test_greedy_against_transformers.py",
    "dsv4_jax/step/test_invariance.py",
    "dsv4_jax/step/test_schedules.py",
    "dsv4_jax/step/test_speculation.py",
    "dsv4_jax/step/test_unstacked_layers.py",
    "dsv4_jax/test_inspection.py",
    "dsv4_jax/training/test_training.py",
    "pallas_kernels/append_and_flush/",
    "pallas_kernels/block_linear/test_block_linear_kernel.py",
    "pallas_kernels/common/test_backend.py",
    "pallas_kernels/common/test_chunks.py",
    "pallas_kernels/compressor/test_flush_kernels.py",
    "pallas_kernels/compressor/test_tiling.py",
    "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
    "pallas_kernels/expert_mlp/test_worklist_kernel.py",
    "pallas_kernels/gather_entries/",
    "pallas_kernels/hyper_connections/",
    "pallas_kernels/index_scores/",
    "pallas_kernels/index_topk/",
    "pallas_kernels/round_index_queries/",
    "pallas_kernels/select_top_k/",
    "pallas_kernels/sparse_attention/",
    "pallas_kernels/test_kernels_alone.py",
    "pallas_kernels/test_plain_jax.py",
    "test_documented_commands.py",
    "test_notebooks.py",
)
"""Files and folders: what these compile on a CPU is not optimised by LLVM, which halves its time.

They compare with a tolerance, or runs of one program, or kernels in the interpreter, of which a
CPU's roundings say nothing. Where bits of different programs of XLA's are compared, the compiler
has to have its freedom to round them differently. Not among them are the files whose engines share
two programs: these take thousands of steps, which LLVM makes twice as fast.
"""


PROGRAMS = "DSV4_TEST_PROGRAMS"
"""Tells the workers of a run where it keeps compiled programs."""
MAX_MAPPINGS = 40_000
"""At the end of a file, of memory; beyond them compiled programs are dropped."""


def pytest_configure(config):
    # Traces are millions of objects that stay, and each collection of the oldest walks through all.
    gc.set_threshold(50_000, 50, 100)
    numpy_callbacks.use_numpy_arrays()
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


def order(item):
    is_first = path_of(item) in COMPILED_FOR_OTHERS
    return item.path.stem not in LONG_FILES, not is_quickly_compiled(item), not is_first


def path_of(item):
    return item.path.relative_to(TESTS).as_posix()


def is_quickly_compiled(item):
    return jax.default_backend() == "cpu" and path_of(item).startswith(QUICKLY_COMPILED)


@pytest.fixture(autouse=True, scope="module")
def _optimised_as_far_as_it_matters(request):
    """In this process and in those that its tests start; the two kinds share no program."""
    is_quick = is_quickly_compiled(request.node)
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
    yield
    if count_mappings() > MAX_MAPPINGS:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
    gc.freeze()


def count_mappings():
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else MAX_MAPPINGS + 1


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
