"""How XLA runs for this package: its flags, its memory, and the cache of compiled programs."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import pkgutil
import re
import resource
import warnings

import jax

from dsv4_jax import checks, compat
from dsv4_jax.cache_keys import leave_out_locations

XLA_GPU_FLAGS = {
    "xla_gpu_dot_merger_threshold_mb": "0",
    "xla_gpu_experimental_use_collective_kernels": "",
    "xla_gpu_enable_libnvjitlink": "false",
}
"""Flags of a step on GPUs, and why.

`xla_gpu_dot_merger_threshold_mb=0`: XLA joins products of one input, such as the projections of a
hidden state, by writing their weights next to each other, in every step; for a step whose time is
that of reading weights once, this trebles it.

`xla_gpu_experimental_use_collective_kernels=`: which collectives become kernels of XLA's own that
read the memory of peers. XLA would take small sums over the devices of a host; with an empty list
every collective is one of NCCL, whose latency `bench/floor.py` counts.

`xla_gpu_enable_libnvjitlink=false`: ptxas assembles XLA's kernels and Triton's, as it does in jax
0.11. nvJitLink, which jax 0.12 takes where it is installed, gives them more registers, so that
fewer programs share a processor: `joined_linears` takes 696 us of a step in place of 369.

Command buffers (CUDA graphs) are XLA's default: five launches in a row or more become a graph,
kernels of Pallas among them. `xla_gpu_enable_command_buffer="+COLLECTIVES"`, which takes
collectives into graphs, is left to the user; `docs/limits.md` has what it saves and costs.
"""


class SlowJaxWarning(UserWarning):
    """This version of jax makes GPU kernels slower than another that the package runs on."""


_HOST_POOL_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment of XLA: the most that it pins of a host with GPUs. Without it that is 64."""


NCCL_SETTINGS = {"NCCL_NVLS_ENABLE": "0"}
"""Environment of NCCL: no multicast over NVLink, which a virtual machine may lack."""


def set_xla_flags(**flags: str) -> str:
    """Adds `XLA_GPU_FLAGS` to the environment variable `XLA_FLAGS`; call it before JAX is used.

    Flags that the variable has already are left alone: what the user sets wins. If it is the name
    of a file, as which XLA takes what does not begin with "--", the flags of that file take its
    place. A CPU ignores them.
    `NCCL_SETTINGS` go to the environment in the same way, and that XLA may pin all of the host's
    memory, which prefixes on the host do. On a machine with a GPU, a version of jax
    that is slow there is warned of, once.

    Args:
      **flags: more flags, or other values of these; names as XLA has them, without dashes.

    Returns:
      The variable's new value.

    Raises:
      ValueError: a flag's value is no text, or has spaces; or the variable is neither flags nor a
        file that can be read.
      RuntimeError: JAX has started its backends, and flags are read no more.
    """
    for name, value in flags.items():
        if any(char.isspace() for char in checks.text(name, value)):
            checks.refuse(name, "a text without spaces, which divide flags", value)
    if compat.has_started():
        raise RuntimeError(
            "XLA has read its flags already; call set_xla_flags before the first array is made"
        )
    _warn_of_slow_jax()
    words = _given_flags()
    present = {word.lstrip("-").split("=")[0] for word in words}
    wanted = XLA_GPU_FLAGS | flags
    words += [f"--{name}={value}" for name, value in wanted.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join(words)
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    if (memory := host_memory()) is not None:
        os.environ.setdefault(_HOST_POOL_GB, str(memory.total_bytes // 2**30))
    return os.environ["XLA_FLAGS"]


def _given_flags() -> list[str]:
    """The flags of the environment variable, or of the file that it names."""
    given = os.environ.get("XLA_FLAGS", "").strip()
    if given and not given.startswith("--"):
        try:
            given = pathlib.Path(given).read_text()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"XLA_FLAGS must be flags that begin with --, or a file of them, got {given!r} "
                f"({error})"
            ) from None
    return given.split()


@functools.cache
def _warn_of_slow_jax() -> None:
    # Mosaic's compiler reads no flags. In jax 0.12 it assembles PTX with nvJitLink, which ignores
    # `setmaxnreg` and serialises `wgmma`.
    if jax.__version_info__ >= (0, 12) and _cuda_plugins() and _finds_driver():
        warnings.warn(
            f"jax {jax.__version__} assembles Mosaic's kernels with nvJitLink, which ignores "
            "setmaxnreg and makes attention of many requests 1.7 times slower; the extras cuda12 "
            "and cuda13 bring a version that does not: pip install 'jax[cuda13]<0.12'",
            SlowJaxWarning,
            stacklevel=3,
        )


def decode_options() -> dict[str, str]:
    """Options with which XLA compiles a decode step, for `compile` and `jax.jit`; a CPU takes them.

    `xla_gpu_command_buffer_scheduling_mode=CONCURRENT`: launches of a CUDA graph that do not need
    each other overlap. A prefill call would take more memory and as long. What `XLA_FLAGS` says of
    it wins, which is read when this is called.
    """
    options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def find_start_problem(error: Exception) -> str | None:
    """Why JAX has no device to start with, in one line, if that is what an error says."""
    told = str(error).splitlines()[:1]
    if isinstance(error, AssertionError) and not compat.has_started():
        try:
            jax.devices()
        except AssertionError:
            told = ["it finds no device"]
    if not told or not told[0].startswith(_START_PROBLEMS):
        return None
    names = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES")
    given = " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
    asked = f"; the environment has {given}, which may be left out" if given else ""
    return f"JAX cannot start: {told[0]}{asked}"


_START_PROBLEMS = ("Unable to initialize backend", "Unknown backend", "it finds no device")
"""How these errors begin; all but the last are jax's own."""


_THREADS_BYTES = 2**28
"""Address space that XLA's threads reserve and never fill."""
_START_BYTES = 2**30
"""What JAX takes to start on a CPU; with less it ends the process."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What arrays can be put into.

    Attributes:
      name: what has it, for a message.
      free_bytes: bytes that are not in use.
      total_bytes: all of them.
      is_host: whether XLA, its threads and programs share it.
    """

    name: str
    free_bytes: int
    total_bytes: int
    is_host: bool = True


def shown_bytes(count: float) -> str:
    """A number of bytes for people, in the largest of B, KiB, MiB and GiB that it has one of."""
    if count >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**10:,.1f} KiB" if count >= 2**10 else f"{count:,.0f} B"


def find_memory() -> Memory | None:
    """The memory of the default device: its own, or on a CPU the host's; None if nobody says.

    Where `ulimit -v` leaves too little for JAX to start, it is not started.
    """
    space = _address_space()
    if space and space.free_bytes < _START_BYTES and not compat.has_started():
        return space
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        limit = int(stats["bytes_limit"])
        free = limit - int(stats.get("bytes_in_use", 0))
        return Memory(device.device_kind, free, limit, is_host=False)
    return host_memory() if device.platform == "cpu" else None


def host_memory() -> Memory | None:
    """The host's memory, or what a control group or `ulimit -v` leaves, whichever is least."""
    limits = []
    counts = _read_fields("/proc/meminfo")
    if {"MemAvailable", "MemTotal"} <= counts.keys():
        counts = {name: 1024 * count for name, count in counts.items()}
        limits.append(Memory("this machine", counts["MemAvailable"], counts["MemTotal"]))
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        total, in_use = (_read_number(f"{folder}/{name}") for name in (limit, used))
        if total is not None and in_use is not None:
            in_use -= _read_fields(f"{folder}/memory.stat").get("inactive_file", 0)
            limits.append(Memory("this control group", max(total - in_use, 0), total))
    if (space := _address_space()) is not None:
        limits.append(space)
    return min(limits, key=lambda memory: memory.free_bytes, default=None)


def _address_space() -> Memory | None:
    """What `ulimit -v` leaves this process; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    taken = _read_fields("/proc/self/status").get("VmSize")
    if limit == resource.RLIM_INFINITY or taken is None:
        return None
    free = max(limit - 1024 * taken - _THREADS_BYTES, 0)
    return Memory("this process (ulimit -v)", free, limit)


def _read_fields(path: str) -> dict[str, int]:
    """{name: number} of lines such as `VmSize:  10 kB`; {} if there is no such file."""
    try:
        text = pathlib.Path(path).read_text()
    except OSError:
        return {}
    return {name: int(count) for name, count in re.findall(r"^(\w+):?\s+(\d+)", text, re.M)}


def _read_number(path: str) -> int | None:
    """The number in a file of the kernel's; None if there is no such file, or it says "max"."""
    try:
        return int(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return None


def look_for_no_gpu() -> None:
    """Keeps JAX from CUDA's plugin on a machine without NVIDIA's driver; call it before JAX.

    The plugin is also what compiles for GPUs without one; where there is no driver JAX prints a
    traceback about cuDNN before it takes the CPU. Any other plugin wins, and so does what
    `JAX_PLATFORMS` says, but for a GPU that there cannot be.

    Raises:
      ValueError: `JAX_PLATFORMS` names nothing else.
    """
    if compat.has_started():
        return
    if given := jax.config.jax_platforms:  # pyright: ignore
        others = [name for name in given.split(",") if name not in ("cuda", "gpu")]
        if given.split(",") != others and not _finds_driver():
            if not others:
                raise ValueError(
                    f"JAX_PLATFORMS={given} asks for a GPU, and NVIDIA's driver (libcuda.so.1) is "
                    "not found; leave it out, or take cpu"
                )
            jax.config.update("jax_platforms", ",".join(others))
        return
    is_cuda_alone = _cuda_plugins() and importlib.util.find_spec("libtpu") is None
    if is_cuda_alone and not _finds_driver():
        jax.config.update("jax_platforms", "cpu")


def has_gpu() -> bool:
    """Whether JAX may find an NVIDIA GPU; JAX is not started."""
    return _finds_driver()


def _cuda_plugins() -> list[str]:
    """Plugins of JAX, if all are CUDA's; they are not loaded."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations if plugins else None
    names = [module.name for module in pkgutil.iter_modules(folders or [])]
    return names if all(name.startswith("xla_cuda") for name in names) else []


def _finds_driver() -> bool:
    """Whether NVIDIA's driver is there, and JAX may use it."""
    platforms = jax.config.jax_platforms  # pyright: ignore
    if platforms and "cuda" not in platforms and "gpu" not in platforms:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def claim_memory(fraction: float = 0.95, *, at_once: bool = True) -> None:
    """Lets JAX take this share of a GPU's memory, three quarters by default; call it before JAX.

    What the user has set wins, and so does a JAX that runs already.

    Args:
      fraction: share of the GPU's memory.
      at_once: whether it is taken when JAX starts, or as it is needed, which leaves room for
        other processes.
    """
    if compat.has_started():
        return
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = str(fraction)
    if not at_once:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def use_compilation_cache(folder: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Keeps compiled programs on disk, so that the next process reads them instead of compiling.

    A program is found again whatever folder its code lies in and whatever lines its kernels are
    on; `dsv4_jax/cache_keys.py` says how. Kernels that the package `triton` compiles are kept there
    too, in the folder `triton`.

    Args:
      folder: where to keep them; None is the folder that JAX was told
        (`JAX_COMPILATION_CACHE_DIR`), else `dsv4-jax/xla` in `$XDG_CACHE_HOME` or `~/.cache`.

    Returns:
      The folder.

    Raises:
      ValueError: it is no path, or there is no home for it.
    """
    if folder is not None:
        checks.path("folder", folder)
    chosen = folder or jax.config.jax_compilation_cache_dir  # pyright: ignore
    if chosen is None:
        chosen = _cache_home() / "dsv4-jax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    leave_out_locations()
    return pathlib.Path(chosen)


def _cache_home() -> pathlib.Path:
    """Where programs of this user keep what they can make again."""
    try:
        return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    except RuntimeError:  # a user without an entry, as a container may run one
        raise ValueError(
            "folder must be given, or JAX_COMPILATION_CACHE_DIR, XDG_CACHE_HOME or HOME: this user "
            "has no home"
        ) from None
