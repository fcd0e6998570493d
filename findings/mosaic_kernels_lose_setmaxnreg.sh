#!/usr/bin/env bash
# jax 0.12.0.1: installing nvidia-nvjitlink changes the code of Pallas kernels on Mosaic GPU, and
# the flag that tells XLA to leave the library alone does not change it back.
#
# A kernel of two warpgroups gives registers from one to the other with `set_max_registers`.
# Without the package ptxas assembles it, and it has 232 registers. With it, as `jax[cuda13]`
# brings it, jaxlib hands the PTX to nvJitLink as one of several units. That ignores `setmaxnreg`
# with the remark C7504, and the kernel has 136 registers; one that needs more spills.
# --xla_gpu_enable_libnvjitlink=false makes XLA's own kernels ptxas's again, and not Mosaic's,
# whose compilation reads no flags of XLA. It is compiled for an H200 here, which needs no GPU.
#
# Seen: "232 registers, setmaxnreg kept", then twice "136 registers, setmaxnreg ignored".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax[cuda13-local]==0.12.0.1" nvidia-cuda-nvcc==13.5.37
export JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=3
cat > "$folder/kernel.py" <<'PYTHON'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
  device_address_bits: 64 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def double(x_ref, out_ref, buffer, arrived):
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        plgpu.copy_gmem_to_smem(x_ref, buffer, arrived)

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(arrived)
        out_ref[...] = buffer[...] * 2


def run(x):
    kernel = plgpu.kernel(
        double,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
    )
    return kernel(x)


topology = topologies.get_topology_desc("1x1x1", "cuda", target_config=H200, topology="1x1x1")
(device,) = topology.devices
sharding = jax.sharding.SingleDeviceSharding(device)
with jax.default_device(device):
    jax.jit(run).lower(jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding)).compile()
PYTHON

assemble() {
  rm -rf "$folder/dump"; mkdir "$folder/dump"
  MOSAIC_GPU_DUMP_PTXAS=1 MOSAIC_GPU_DUMP_TO="$folder/dump" \
    "$folder/venv/bin/python" "$folder/kernel.py" > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  local registers kept=kept
  registers=$(grep -aoE "Used [0-9]+ registers" "$folder"/dump/*.ptxas | grep -oE "[0-9]+" | head -1)
  grep -aq C7504 "$folder"/dump/*.ptxas && kept=ignored
  echo "$registers registers, setmaxnreg $kept"
}

seen=$(
  assemble
  "$folder/venv/bin/pip" install --quiet nvidia-nvjitlink==13.5.37
  assemble
  XLA_FLAGS=--xla_gpu_enable_libnvjitlink=false assemble
)
echo "$seen"
test "$seen" = "232 registers, setmaxnreg kept
136 registers, setmaxnreg ignored
136 registers, setmaxnreg ignored"
