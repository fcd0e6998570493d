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
from dsv4_jax.serving import engine
from pallas_kernels.common.backend import FallbackWarning
from pallas_kernels.peer_collectives import PeerLayout
from tools.meshes import on_cpus, peers_of_processes


@pytest.mark.slow
def test_layers_of_a_step_use_the_buffers_of_their_axis():
    """The head's collectives are of `jax.lax`; all others are counted as they are traced.

    Sublayers that are alike are traced once.

    With drafts the embedding of the draft block, in two places, may come at any time beside the
    trunk, so that it must not go through the trunk's buffers.
    """
    found = on_cpus.run("peers")
    assert found["data"] == found["model"] == [True] * 8
    assert found["differ"] == 0
    counts = {"all_reduce model": 5, "all_gather data": 2, "reduce_scatter data": 2}
    assert found["without"] == {name: [0, count] for name, count in counts.items()}
    assert found["with"] == {name: [count, 0] for name, count in counts.items()}
    assert found["with drafts"]["all_reduce model"] == [7, 2]


def test_cpus_have_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.make_peer_buffers(ds.make_mesh()) is None


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A GPU that is not there."""

    id: int
    process_index: int = 0
    platform: str = "gpu"

    @property
    def local_hardware_id(self):
        return self.id % 2


class FakeMesh:
    """A mesh of such GPUs, some of each process; this one is process 0."""

    def __init__(self, data, model, of_process=None):
        self.shape, self.axis_names = {"data": data, "model": model}, ("data", "model")
        self.size = data * model
        of_process = of_process or self.size
        devices = [FakeDevice(n, n // of_process) for n in range(self.size)]
        self.devices = np.array(devices, dtype=object).reshape(data, model)
        self.local_devices = [device for device in devices if device.process_index == 0]


@pytest.mark.parametrize(
    ("sizes", "unreachable", "said"),
    [
        ((1, 16), None, "may have 8 devices"),
        ((2, 2), "GPU 0 is far from GPU 1", "NCCL's, slower for few rows: GPU 0 is far"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, sizes, unreachable, said):
    monkeypatch.setattr(peers, "mesh_sizes", lambda mesh: tuple(mesh.shape.values()))
    monkeypatch.setattr(peers.peer_memory, "find_unreachable", lambda ordinals: unreachable)
    monkeypatch.setattr(
        peers, "_tell_all", lambda mesh, what: {d: what(d) for d in mesh.devices.flat}
    )
    mesh = FakeMesh(*sizes)

    with pytest.warns(FallbackWarning, match=said):
        assert peers.make_peer_buffers(mesh) is None
    monkeypatch.setenv(peers.VARIABLE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peers.make_peer_buffers(mesh) is None


def test_only_lines_within_a_host_have_buffers(monkeypatch):
    """Two processes, on two hosts or one; `model` lies within them."""
    monkeypatch.setattr(peers.peer_memory, "find_unreachable", lambda ordinals: None)
    mesh, hosts = FakeMesh(2, 2, of_process=2), {0: b"one", 1: b"other"}
    assert peers._find_obstacle(mesh, MODEL, hosts) is None
    assert "several hosts" in peers._find_obstacle(mesh, DATA, hosts)
    hosts[1] = hosts[0]
    assert peers._find_obstacle(mesh, DATA, hosts) is None


@pytest.mark.slow
def test_two_processes_exchange_what_their_headers_need():
    """A process opens what the other one has; where one fails, no process has buffers."""
    processes = peers_of_processes.run()
    headers = {}
    for process in processes:
        assert process["hosts"] == 1
        assert process["told"] == ["0 of 0", "1 of 0", "2 of 1", "3 of 1"]
        assert (process["obstacle"], process["none"], process["new"]) == ("too far", None, True)
        assert (process["refused"], process["within"]) == ("error 999", None)
        headers |= {name: numbers for name, numbers in process.items() if name[-1].isdigit()}
    assert len(headers) == 8
    for axis, lines in ((DATA, [(0, 2), (1, 3)]), (MODEL, [(0, 1), (2, 3)])):
        for line in lines:
            at = {number: headers[f"{axis} {number}"][0] for number in line}
            for place, number in enumerate(line):
                seen = [at[peer] | (axis == DATA and peer != number) for peer in line]
                assert headers[f"{axis} {number}"] == [at[number], place, *seen]


def test_a_variable_that_says_something_else_is_refused(monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"PEER_BUFFERS must be one of .*got 'yes'"):
        peers.make_peer_buffers(ds.make_mesh())


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
    params = dataclasses.replace(param_shapes(config, jnp.float32, weights="stored"), peers=shapes)
    check_params(config, params)
    where = ds.param_shardings(config, mesh, params)
    assert where.peers.data.spec == where.peers.model.spec == BY_DEVICE
    assert ds.unstack_layers(params).peers is not None


def test_an_engine_makes_buffers_for_its_own_mesh(monkeypatch):
    """Those that parameters bring may be of another one."""
    config, mesh = ds.DSV4Config.tiny(), ds.make_mesh()
    params = ds.init_params(config, jax.random.key(0))
    stale, fresh = (peers.PeerBuffers(model=jnp.zeros((1, 8), jnp.int32)) for _ in range(2))
    monkeypatch.setattr(engine, "make_peer_buffers", lambda of: fresh if of is mesh else None)
    params = dataclasses.replace(params, peers=stale)
    assert ds.Engine(config, params, mesh=mesh, max_context_tokens=256).params.peers is fresh
