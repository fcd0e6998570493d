import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import peers
from dsv4_jax.mesh import BY_DEVICE, DATA, MODEL
from dsv4_jax.model.check_params import check_params
from dsv4_jax.model.params import param_shapes
from pallas_kernels.common.backend import FallbackWarning
from pallas_kernels.peer_collectives import PeerLayout
from programs import peers_check


def test_layers_of_a_step_use_the_buffers_of_their_axis():
    """The head's collectives are of `jax.lax`; all others are counted.

    With drafts the embedding of the draft block, in two places, may come at any time beside the
    trunk, so that it must not go through the trunk's buffers.
    """
    found = peers_check.run()
    assert found["data"] == found["model"] == [True] * 8
    assert found["differ"] == 0
    counts = {"all_reduce model": 10, "all_gather data": 4, "reduce_scatter data": 4}
    assert found["without"] == {name: [0, count] for name, count in counts.items()}
    assert found["with"] == {name: [count, 0] for name, count in counts.items()}
    assert found["with drafts"] == found["with"] | {"all_reduce model": [9, 2]}


def test_cpus_have_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.make_peer_buffers(ds.make_mesh()) is None


class FakeDevice:
    """A GPU of this process."""

    platform, local_hardware_id = "gpu", 0


class FakeMesh:
    """A mesh of GPUs that are not there."""

    def __init__(self, data, model, local=None):
        self.shape, self.axis_names = {"data": data, "model": model}, ("data", "model")
        self.size = data * model
        self.devices = np.array([[FakeDevice()] * self.size])
        self.local_devices = [FakeDevice()] * (self.size if local is None else local)


@pytest.mark.parametrize(
    ("sizes", "variable", "value", "said"),
    [
        ((1, 4, 2), None, None, "several processes"),
        ((1, 16), None, None, "may have 8 devices"),
        ((2, 2), "XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async", "ALLOCATOR=cuda_async"),
        ((2, 2), "XLA_FLAGS", "--xla_gpu_command_buffer_update_mode=SKIP_TEMP", "XLA_FLAGS"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, sizes, variable, value, said):
    monkeypatch.setattr(peers, "mesh_sizes", lambda mesh: tuple(mesh.shape.values()))
    monkeypatch.setattr(peers, "_find_unreachable", lambda ordinals: None)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    mesh = FakeMesh(*sizes)

    with pytest.warns(FallbackWarning, match=said):
        assert peers.make_peer_buffers(mesh) is None
    monkeypatch.setenv(peers.VARIABLE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.make_peer_buffers(mesh) is None


def test_a_collective_finds_the_buffer_of_its_axis():
    words = jnp.arange(3)[None]
    assert peers.own_buffer(MODEL) is None
    with peers.using(peers.PeerBuffers(model=words)):
        assert peers.own_buffer(MODEL).shape == (3,)
        assert peers.own_buffer(DATA) is None
        with peers.using(None):
            assert peers.own_buffer(MODEL) is None
    assert peers.own_buffer(MODEL) is None


def test_parameters_carry_them():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    shapes = peers.peer_buffer_shapes(mesh)
    assert shapes.data.shape == (8, PeerLayout(2).num_words)
    assert shapes.model.shape == (8, PeerLayout(4).num_words)
    config = ds.DSV4Config.flash()
    params = dataclasses.replace(param_shapes(config, weights="released"), peers=shapes)
    check_params(config, params)
    where = ds.param_shardings(config, mesh, params)
    assert where.peers.data.spec == where.peers.model.spec == BY_DEVICE
    assert ds.unstack_layers(params).peers is not None
