"""What lies on different meshes is refused, before a step counts its slots and blocks otherwise."""

import re

import pytest

from tools.meshes import on_cpus

ELSEWHERE = "must lie on the mesh of the other arguments"
MESSAGES = {
    "params on a mesh": rf"cache {ELSEWHERE}, .*'data': 2, 'model': 4.*, got no mesh; make a cache",
    "cache on a mesh": rf"params {ELSEWHERE}, .*'data': 2, 'model': 4.*, got no mesh; .*device_put",
    "two meshes": rf"cache {ELSEWHERE}, .*got another one, .*'data': 4, 'model': 2",
    "cache on one device": f"cache {ELSEWHERE}",
    "store on one device": f"store {ELSEWHERE}",
    "explicit axes": "mesh must be a mesh whose axes are all Auto, got .*; make it with make_mesh",
    "a device twice": "mesh must be a mesh of devices that are all different",
    "make_mesh, more devices": "devices must be 4 devices, data=2 times .*; these are 8",
    "make_mesh, fewer devices": "devices must be 16 devices, data=2 times .*; these are 8",
    "make_mesh, a device twice": "devices must be devices that are all different, got",
    "make_mesh, of other axes": r"devices in a row, or an array \[data, model\] = \[4, 2\] of",
    "make_mesh, of three axes": r"an array \[data, model\] = \[2, 4\] of them, got an array object",
    "make_mesh, no devices": r"devices must be a Device, got np\.int64\(0\)",
    "make_mesh, too many": "data=4 times model=4 must be at most the 8 devices that JAX has",
    "acquire, cache on a mesh": "numbers slots and blocks of one device, and cache lies on a mesh",
    "init_snapshot_store, odd": "num_snapshots=3 must divide over the mesh's data, got data=2",
}


@pytest.fixture(scope="module")
def errors():
    return on_cpus.run("mixed")


@pytest.mark.slow
def test_arguments_on_different_meshes_are_refused(errors):
    """Parameters on a mesh beside a cache on one device gave logits that were off by 0.5."""
    assert len(errors) == 32
    for name, error in errors.items():
        message = MESSAGES.get(name) or MESSAGES[name.split(", ", 1)[1]]
        assert error is not None, name
        assert re.search(message, error, re.DOTALL), (name, error)
