"""Where threads wait for each other, or memory or a layout changes hands, a comment says why."""

import ast
import io
import pathlib
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[2]
WAITS = {"barrier_wait", "wait_parity", "wait_for_all_threads", "synchronize", "all_have_read"}
WAITS |= {"wait_smem_to_gmem", "wait_load_tmem", "wgmma_wait_group_sync_aligned"}
ARRIVALS = {"barrier_arrive", "tcgen05_commit_arrive", "arrive_expect_tx", "mbarrier_init"}
OWNERS = {"commit_smem", "commit_tmem", "commit_shared", "async_store_tmem", "async_load_tmem"}
OWNERS |= {"copy_gmem_to_smem", "copy_smem_to_gmem", "optimization_barrier"}
CHANGES = WAITS | ARRIVALS | OWNERS | {"layout_cast"}
BARRIER = "BARRIER"
"""The instruction of a CTA's barrier, part of the text of others."""
ABOVE = 2
"""Lines above a call within which its comment may stand."""


def name_of(node):
    """The last name of a call's function, or of what is read; empty for other nodes."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def is_change(node):
    if isinstance(node, ast.Call):
        return name_of(node) in CHANGES
    return name_of(node) == BARRIER and isinstance(node.ctx, ast.Load)


def bare_changes(source):
    """Lines and names of `CHANGES` with no comment on them or at most two lines above."""
    if not any(f"{name}(" in source for name in CHANGES) and BARRIER not in source:
        return []  # to parse a file takes some milliseconds
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    told = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    return sorted(
        (node.lineno, name_of(node))
        for node in ast.walk(ast.parse(source))
        if is_change(node) and not told & set(range(node.lineno - ABOVE, node.end_lineno + 1))
    )


@pytest.mark.parametrize("room", sorted(p.name for p in ROOT.glob("pallas_kernels/*/")))
def test_a_wait_and_a_change_of_owner_or_layout_has_a_comment(room):
    for path in ROOT.glob(f"pallas_kernels/{room}/**/*.py"):
        assert bare_changes(path.read_text()) == [], path


def test_a_bare_one_is_seen():
    kernel = "# {}\nx = 1\ny = 2\nplgpu.barrier_wait(full)  {}\nplgpu.layout_cast(x, y)\n"
    assert bare_changes(kernel.format("far", "")) == [(4, "barrier_wait"), (5, "layout_cast")]
    assert bare_changes(kernel.format("far", "# near")) == []
    assert bare_changes("# all copies\nwait(\n    barrier_wait(\n        full))\n") == []
    assert bare_changes("def barrier_wait(full):\n    pass\n") == []
    assert bare_changes("BARRIER = 'bar.sync 0;'\nptx(BARRIER)\n") == [(2, "BARRIER")]
