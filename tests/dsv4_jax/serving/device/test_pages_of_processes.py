"""Pages of two processes over loopback, each of which keeps the part of its own devices."""

import functools

import pytest

from tools.meshes import pages_of_processes

ROW = 39
"""Bytes: three layers of five, and two of three numbers."""


@pytest.mark.slow
def test_each_process_keeps_its_part_and_all_go_on_with_what_all_have():
    """Rows come back where they belong, on the data shard that they left and on the other.

    With one process that is late the other waits; with rows that are damaged or were not copied in
    one of them it is a miss in both.
    """
    first, second = pages_of_processes.run(2, "1x2", "2x1", "1x2/split")
    assert (first["status"], second["status"]) == (0, 0), (first["err"], second["err"])
    for mesh, found in first["found"].items():
        shards = 2 if mesh == "2x1" else 1
        for of, moves in found.items():
            is_split = mesh.endswith("split") and of == "blocks"
            kept = [[3 * ROW, ROW] if is_split else [4 * ROW] * 2] * shards**2
            if shards == 2:
                kept = [[4 * ROW, 0]] * 2 + [[0, 4 * ROW]] * 2
            assert [one["at"] for one in moves["moved"]] == kept
            for one in moves["moved"]:
                assert (one["wrong"], one["kept"], one["left"]) == (["", ""], True, 0)
            assert moves["late"] == [[True, ["", ""]], 0]
            last = {"1x2": [1, 2], "1x2/split": [13] if is_split else [1, 2]}.get(
                mesh, [13, 14] if of == "blocks" else [9, 10]
            )
            damaged, left = moves["damage"]
            assert (damaged, left) == (["DamagedError", sorted(map(str, last)), ["process 1"]], 0)
            failed, left = moves["fail"]
            assert (failed, left) == (
                "RuntimeError('process 1: MemoryError: no pinned memory')",
                0,
            )


@functools.cache
def alone(mesh):
    """What requests get of one process without a tier, by prompt and seed."""
    (found,) = pages_of_processes.run(1, mesh, options=["--engine", "--plain"])
    assert found["status"] == 0, found["err"]
    return found["found"][mesh]["got"]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
@pytest.mark.parametrize("num_bytes", [10**6, 5_000])
def test_a_life_in_which_all_prefixes_go_to_the_hosts_gives_the_tokens_of_one_process(
    mesh, num_bytes
):
    """With a tier of all pages, and of a few; each process keeps no more than was asked for."""
    options = ["--engine", "--bytes", str(num_bytes)]
    first, second = pages_of_processes.run(2, mesh, options=options)
    assert (first["status"], second["status"]) == (0, 0), (first["err"], second["err"])
    found = first["found"][mesh]
    wanted = alone(mesh)
    assert len(wanted) == 16
    assert {name: wanted[name] for name in found["got"]} == found["got"]
    assert len(found["got"]) > 8
    assert (found["problems"], found["damaged"]) == ([], 0)
    assert (found["hits"] > 0, found["evicted"] > 0) == (True, num_bytes < 10**5)
    assert all(0 < one <= num_bytes for one in found["most"])


@pytest.mark.slow
def test_a_process_that_dies_in_a_move_ends_the_other():
    first, second = pages_of_processes.run(2, "1x2", options=["--lost"])
    assert second["status"] == -9
    assert first["status"] == 1
    assert "process 1 is silent for 10 s" in first["err"]
