"""Compiles kernels for GPUs that are not there, and says what came out.

A test module registers cases by exporting

    AOT_CASES = [(name, function, specs), (name, function, specs, donate_argnums)]

whose sizes are those of `benchmarks/cases`. `specs` are the function's arguments, arrays given as
`jax.ShapeDtypeStruct`. A name that ends in "@sm_90a" is compiled for that target alone. Mosaic GPU
fixes its architecture at the first compilation, so that a process compiles for one target.

    python -m tools.aot sm_90a [--only gather_entries]    prints figures
    python -m tools.aot --record [--only gather_entries]  writes them to tests/data/compiled.json
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
from jax.experimental import topologies

from pallas_kernels.gpu import devices
from tools import aot_figures, no_triton_backend

no_triton_backend.take_away_if_asked()

TESTS = pathlib.Path(__file__).parents[1] / "tests"
RECORDED = TESTS / "data" / "compiled.json"
SERIES = ".".join(jax.__version__.split(".")[:2])
BROKEN = "compiled/"
"""Cases of this prefix show that the checks can fail, and are not recorded."""

WITHOUT_A_GPU = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # no driver and no cuDNN to check
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_ENVIRONMENT = WITHOUT_A_GPU | {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{
    major: {device.capability_major} minor: 0 feature_extension: ACCELERATED_FEATURES
  }}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {device.shared_memory_bytes}
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {device.num_sms} fpus_per_core: 128 clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth} l2_cache_size: {device.l2_bytes} device_memory_size: {memory_bytes}
  device_address_bits: 64 device_vendor: "NVIDIA Corporation" name: "{device.kind}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device.kind}"
"""


@dataclasses.dataclass(frozen=True)
class GPU:
    """What a compiler asks of a card."""

    device: devices.Device
    clock_ghz: float
    bandwidth: int
    memory_bytes: int


TARGETS = {
    "sm_90a": GPU(devices.H200, 1.98, 4_800_000_000_000, 150_000_000_000),
    "sm_100a": GPU(devices.B200, 1.965, 7_672_000_000_000, 190_000_000_000),
}


def unavailable():
    """Why this environment can't compile for a GPU, or None."""
    if importlib.util.find_spec("jax_plugins") is None or not importlib.util.find_spec(
        "jax_plugins.xla_cuda13"
    ):
        return "needs the CUDA compiler: pip install -e '.[aot]'"
    return None if aot_figures.find_ptxas() else "needs ptxas: pip install nvidia-cuda-nvcc"


def environment():
    """Of a process that compiles for a GPU."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}


def read_recorded():
    """{target: {case: figures}} recorded with this series of jax, empty where there are none."""
    return json.loads(RECORDED.read_text()).get(f"jax {SERIES}", {}) if RECORDED.exists() else {}


def figures_of(target, names=()):
    """{case: figures} of the cases whose names begin so, or all, from a process of its own."""
    command = [sys.executable, "-m", "tools.aot", target, "--only", *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def record(names):
    """Compiles for every target and replaces what is recorded; other series of jax stay."""
    figures = {target: figures_of(target, names) for target in TARGETS}
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    series = recorded.setdefault(f"jax {SERIES}", {})
    for target, cases in figures.items():
        kept = {
            c: f for c, f in series.get(target, {}).items() if names and not c.startswith(names)
        }
        new = {c: f for c, f in cases.items() if not c.startswith(BROKEN)}
        series[target] = dict(sorted((kept | new).items()))
        for case, found in new.items():
            if "error" in found:
                raise RuntimeError(f"{case} does not compile for {target}: {found['error']}")
            print(target, case, json.dumps(found))
    RECORDED.write_text(_one_line_a_case(recorded))


def lower_case(target, function, specs, donate_argnums=()):
    """Lowers a function for a target."""
    device = _device(target)
    sharding = jax.sharding.SingleDeviceSharding(device)
    specs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tuple(specs)
    )
    with jax.default_device(device):  # kernels are lowered for the default device
        return jax.jit(function, donate_argnums=donate_argnums).trace(*specs).lower()


def compile_case(target, function, specs, donate_argnums=()):
    """Compiles a function for a target; see `aot_figures.Figures`."""
    with tempfile.TemporaryDirectory() as folder, aot_figures.captured_output() as output:
        options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        lowered = lower_case(target, function, specs, donate_argnums)
        compiled = lowered.compile(compiler_options=options)
        return aot_figures.gather(target, lowered, compiled, pathlib.Path(folder), output)


def collect(target, names=()):
    """{case: (function, specs, ...)} for a target, of the cases whose names begin so, or of all."""
    cases = {}
    for path in sorted((TESTS / "pallas_kernels").rglob("test_*.py")):
        module = path.stem.removeprefix("test_")
        wanted = not names or any(
            n.startswith(f"{module}/") or f"{module}/".startswith(n) for n in names
        )
        if not wanted or "AOT_CASES" not in path.read_text():
            continue
        spec = importlib.util.spec_from_file_location(f"aot_cases_{module}", path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        cases |= {f"{module}/{name}": case for name, *case in loaded.AOT_CASES}
    return {
        case: cases[case]
        for case in sorted(cases)
        if (not names or case.startswith(names)) and case.partition("@")[2] in ("", target)
    }


@functools.cache
def _device(target):
    description = _DESCRIPTION.format(**vars(TARGETS[target]))
    topology = topologies.get_topology_desc(
        "1x1x1", "cuda", target_config=description, topology="1x1x1"
    )
    return topology.devices[0]


def _compile_all(target, names):
    """{case: figures}; of a case that does not compile, its error."""
    figures = {}
    for name, case in collect(target, names).items():
        try:
            figures[name] = compile_case(target, *case)
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    return figures


def _one_line_a_case(recorded):
    """JSON in which a change of one case is a change of one line."""
    lines = []
    for series, targets in recorded.items():
        lines.append(f"{json.dumps(series)}: {{")
        for target, cases in targets.items():
            rows = [f"{json.dumps(case)}: {json.dumps(found)}" for case, found in cases.items()]
            lines.append(f" {json.dumps(target)}: {{\n  " + ",\n  ".join(rows) + "\n },")
        lines[-1] = lines[-1].rstrip(",") + "\n},"
    return "{" + "\n".join(lines).rstrip(",") + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    if (arguments.target is None) != arguments.record:
        parser.error("name a target, or pass --record for all")
    if reason := unavailable():
        parser.error(reason)
    names = tuple(arguments.only)
    if arguments.record:
        record(names)
        return
    os.environ.update(_ENVIRONMENT)
    print(json.dumps(_compile_all(arguments.target, names)))


if __name__ == "__main__":
    main()
