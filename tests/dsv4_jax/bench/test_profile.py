"""Which launch is what, and what a profile adds up to."""

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.bench import profile, report

HLO = """ENTRY %main {
  %fusion.3 = f32[8]{0} fusion(%params_layers__csa_hash___0__attn_wq_b.1, %x.1), kind=kInput
  %reduce_fusion.7 = (f32[8]{0}, f32[8]{0}) fusion(%params_layers__hca_learned___1__ffn_w3.1, \
%params_layers__hca_learned___1__ffn_w1.1), kind=kInput, metadata={op_name="jit(f)/dot_general"}
  %add_fusion = f32[8]{0} fusion(%y), kind=kLoop, metadata={op_name="jit(f)/csa_hash/jit(g)/add"}
  %head_fusion.1 = f32[8]{0} fusion(%params_head.1, %y), kind=kInput
}
"""
SPACE = """planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #7(Compute)"
    events { metadata_id: 1 duration_ps: 2000000 }
    events { metadata_id: 1 duration_ps: 4000000 }
    events { metadata_id: 2 duration_ps: 8000000 }
    events { metadata_id: 3 duration_ps: 1000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "fusion_3" } }
  event_metadata { key: 2 value { id: 2 name: "append_and_flush__1" } }
  event_metadata { key: 3 value { id: 3 name: "append_and_flush" } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 5 } } }
"""


def test_kernels_are_named_after_the_weights_they_read():
    assert profile.kernel_labels(HLO) == {
        "fusion_3": "fusion attn_wq_b",
        "reduce_fusion_7": "reduce_fusion ffn_w1 ffn_w3",
        "add_fusion": "add_fusion add",
        "head_fusion_1": "head_fusion head",
    }


def test_launches_of_a_kind_are_added_up_per_call():
    space = jax.profiler.ProfileData.text_proto_to_serialized_xspace(SPACE)
    found = profile.summarise(profile.read_events(space), profile.kernel_labels(HLO), calls=2)
    assert found == [
        {"what": "append_and_flush", "launches": 1, "us": pytest.approx(4.5), "least_us": 1},
        {"what": "fusion attn_wq_b", "launches": 1, "us": pytest.approx(3.0), "least_us": 2},
    ]
    text = report.profile_table({"profile": found})
    assert text.splitlines()[0] == "step: 2 launches, 8 us one after the other"
    assert report.profile_table({}) == ""


def test_without_a_gpu_there_is_nothing_to_see():
    program = jax.jit(lambda x: x + 1).lower(jnp.zeros(4)).compile()

    def run():
        program(jnp.zeros(4)).block_until_ready()

    assert profile.profile_launches(program, run, calls=1) == []
