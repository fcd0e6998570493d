import jax
import jax.numpy as jnp

from dsv4_jax.bench.program import Launches, compile_program, count_launches

HLO = """HloModule step

%fused_computation (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%p, %p)
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %loop_fusion = f32[8]{0} fusion(%gemm_fusion_dot), kind=kLoop, calls=%fused_computation
  %ours = f32[8]{0} custom-call(%loop_fusion), custom_call_target="mosaic_gpu_v2"
  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %ours)
}

%condition (arg: (s32[], f32[8])) -> pred[] {
  %arg = (s32[], f32[8]{0}) parameter(0)
  ROOT %wrapped_compare = pred[] fusion(%arg), kind=kLoop, calls=%fused_computation
}

ENTRY %main (p0: f32[8]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %gemm_fusion_dot.1 = f32[8]{0} fusion(%p0), kind=kCustom, calls=%fused_computation
  %library = f32[8]{0} custom-call(%p0), custom_call_target="__cublas$lt$matmul"
  %triton = f32[8]{0} custom-call(%p0), custom_call_target="__gpu$xla.gpu.triton"
  %ptx = f32[8]{0} custom-call(%p0), custom_call_target="__gpu$xla.gpu.ptx"
  %while = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %copy = f32[8]{0} copy(%p0)
}
"""  # noqa: E501


def test_loops_count_as_often_as_they_go_round():
    assert count_launches(HLO) == Launches(ours=2 + 5, products=2, others=5 + 5 + 1)
    assert count_launches(HLO).total == 20


def test_a_compiled_program_runs_and_reports():
    function = jax.jit(lambda x: x + 1, donate_argnums=0)
    program = compile_program(function, jnp.zeros(1024))
    assert program.launches.total >= 1
    assert program.launches.ours == 0
    assert program.alias_bytes == 4096
    assert not program.from_cache
    assert float(program.run(jnp.zeros(1024))[0]) == 1
