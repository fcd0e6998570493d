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
from programs import peers_check, peers_of_processes


def test_layers_of_a_step_use_the_buffers_of_their_axis():
    """The head's collectives are of `jax.lax`; all others are counted.

    With drafts the embedding of the draft block, in two places, may come at any time beside the
    trunk, so that it must not go through the trunk's buffers.
    """
    found = peers_check.run()
    assert found["data"] == found["model"] == [True] * 8
    assert found["differ"] == 0
    counts = {"all_reduce model": 5, "all_gather data": 2, "reduce_scatter data": 2}
    assert found["without"] == {name: [0, count] for name, count in counts.items()}
    assert found["with"] == {name: [count, 0] for name, count in counts.items()}
    assert found["with drafts"]["all_reduce model"] == [9, 2]


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
    monkeypatch.setattr(peers.peer_memory, "find_unreachable", lambda ordinals: None)
    monkeypatch.setattr(
        peers, "_tell_all", lambda mesh, what: {d: what(d) for d in mesh.devices.flat}
    )
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


def test_only_lines_within_a_host_have_buffers(monkeypatch):
    """Two hosts of a process each; `model` lies within them."""
    monkeypatch.setattr(peers.peer_memory, "find_unreachable", lambda ordinals: None)
    mesh, hosts = FakeMesh(2, 2, of_process=2), {0: b"one", 1: b"other"}
    find = peers._find_obstacle
    assert find(mesh, MODEL, hosts, across=False) is None
    assert "several hosts" in find(mesh, DATA, hosts, across=True)
    hosts[1] = hosts[0]
    assert "several processes" in find(mesh, DATA, hosts, across=False)
    assert find(mesh, DATA, hosts, across=True) is None


def test_an_obstacle_of_one_process_is_that_of_all(monkeypatch):
    texts = {0: b"\0" * 256, 1: b"too far".ljust(256, b"\0")}
    monkeypatch.setattr(peers, "_tell_all", lambda mesh, what: texts)
    assert peers._of_any_process(FakeMesh(2, 2, of_process=2), None) == "too far"


def test_buffers_of_other_processes_are_opened_on_each_gpu(monkeypatch):
    mesh = FakeMesh(2, 2, of_process=2)
    addresses = dict(zip(mesh.local_devices, (1000, 2000), strict=True))
    monkeypatch.setattr(peers.peer_memory, "share", lambda at, gpu: f"{at} of {gpu}".encode())
    monkeypatch.setattr(peers.peer_memory, "open_shared", lambda shared, gpu: (shared, gpu))
    first, second, third, fourth = mesh.devices.flat
    others = {third: b"first of 1", fourth: b"second of 1"}
    monkeypatch.setattr(
        peers, "_tell_all", lambda mesh, what: {d: what(d) for d in mesh.local_devices} | others
    )
    reach = peers._reaching(mesh, DATA, addresses)
    assert (reach(first, first), reach(first, second)) == (1000, 2000)
    assert reach(second, third) == (b"first of 1", 1)
    assert reach(first, fourth) == (b"second of 1", 0)
    monkeypatch.setattr(peers.peer_memory, "share", lambda at, gpu: pytest.fail("nobody opens it"))
    assert peers._reaching(mesh, MODEL, addresses)(first, second) == 2000


def test_two_processes_exchange_what_their_headers_need():
    """A process opens what the other one has, and takes its own as it is."""
    processes = peers_of_processes.run()
    headers = {}
    for process in processes:
        assert process["hosts"] == 1
        assert process["told"] == ["0 of 0", "1 of 0", "2 of 1", "3 of 1"]
        assert (process["obstacle"], process["none"]) == ("too far", None)
        headers |= {name: numbers for name, numbers in process.items() if name[-1].isdigit()}
    assert len(headers) == 8
    for axis, lines in ((DATA, [(0, 2), (1, 3)]), (MODEL, [(0, 1), (2, 3)])):
        for line in lines:
            at = {number: headers[f"{axis} {number}"][0] for number in line}
            for place, number in enumerate(line):
                seen = [at[peer] | (axis == DATA and peer != number) for peer in line]
                assert headers[f"{axis} {number}"] == [at[number], at[number], place, *seen]


class FakeDriver:
    """A CUDA driver with an allocation of 4 KiB at 0x7000."""

    def __init__(self, *, reaches=1, status=0):
        self.reaches, self.status, self.contexts = reaches, status, []

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceCanAccessPeer(self, reaches, one, other):
        assert one.value != other.value
        reaches._obj.value = self.reaches
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 90 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value, size._obj.value = 0x7000, 4096
        return 0 if 0x7000 <= address.value < 0x8000 else 1

    def cuIpcGetMemHandle(self, handle, base):
        assert self.contexts == [91]
        handle._obj.bytes[0], handle._obj.bytes[63] = 7, 9
        return self.status

    def cuIpcOpenMemHandle_v2(self, base, handle, flags):
        assert (handle.bytes[0], handle.bytes[63], flags) == (7, 9, 1)
        base._obj.value = 0x5000 + self.contexts[-1]
        return self.status


def test_memory_is_shared_as_an_allocation_and_a_distance(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(peers.peer_memory, "_driver", lambda: driver)
    shared = peers.peer_memory.share(0x7123, 1)
    assert len(shared) == peers.peer_memory.SHARED_BYTES
    assert peers.peer_memory.open_shared(shared, 0) == 0x5000 + 90 + 0x123
    assert driver.contexts == []
    driver.status = 201
    with pytest.raises(RuntimeError, match="error 201"):
        peers.peer_memory.open_shared(shared, 0)
    assert driver.contexts == []


def test_gpus_that_cannot_reach_each_other_are_named(monkeypatch):
    monkeypatch.setattr(peers.peer_memory, "_driver", FakeDriver)
    assert peers.peer_memory.find_unreachable([0, 1]) is None
    monkeypatch.setattr(peers.peer_memory, "_driver", lambda: FakeDriver(reaches=0))
    assert peers.peer_memory.find_unreachable([2]) is None
    said = "GPU 0 can't reach the memory of GPU 1"
    assert peers.peer_memory.find_unreachable([0, 1]) == said


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
    params = dataclasses.replace(param_shapes(config, weights="released"), peers=shapes)
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
