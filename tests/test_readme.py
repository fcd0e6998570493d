"""The README orients in one screen, and every block of it runs, in order, in a fresh clone."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from helpers.gpu_processes import free_port

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
GENERATED, FITS = (code for kind, code in BLOCKS if not kind)
"""What the first commands print."""


def test_it_is_short_and_its_links_can_be_clicked():
    assert len(TEXT.splitlines()) <= 120
    assert [kind for kind, _ in BLOCKS] == ["sh", "", "", "bash", "sh", "bash", "python"]
    assert not re.search(r"`docs/[^`]*`", TEXT)


def test_its_command_for_the_tests_is_what_ci_runs():
    (command,) = (code for _, code in BLOCKS if "pytest" in code)
    assert "\n".join(command.strip().split(" && ")[:2]) in (ROOT / ".ci" / "run").read_text()
    assert f"\n{command.strip().split(' && ')[2]}\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_every_block_runs_in_order_in_a_fresh_clone(tmp_path):
    """All but the one for four GPUs; nothing is compiled yet, and one installation is enough."""
    tree, home = tmp_path / "tree", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    left_out = (
        "PYTHONPATH",
        "JAX_COMPILATION_CACHE_DIR",
        "XLA_FLAGS",
        "XDG_CACHE_HOME",
        "VIRTUAL_ENV",
    )
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = own | {"HOME": str(home)}
    if shutil.which("python3.12") is None:
        (home / "python3.12").symlink_to(sys.executable)
        environment["PATH"] = f"{home}:{own['PATH']}"

    def run(*command):
        return subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1500
        )

    port, printed = free_port(), []
    for kind, code in BLOCKS:
        if kind == "sh":
            code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            code = code.replace("dsv4-jax serve", f"dsv4-jax serve --port {port}")
            done = run("bash", "-ec", code)
        elif kind == "python":
            (tree / "block.py").write_text(code)
            done = run(".venv/bin/python", "block.py")
        else:
            continue
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        printed.append(done.stdout)
    first, served, python = printed
    assert first.startswith(GENERATED + FITS)
    assert served.count(GENERATED.rstrip("\n").splitlines()[-1]) == 2  # once in JSON
    assert python.count(" length\n") == 2
    assert python.endswith("[3 2] (2, 258) [0]\n")
    where = run(".venv/bin/python", "-c", "import dsv4_jax; print(dsv4_jax.__file__)").stdout
    assert where == f"{tree}/dsv4_jax/__init__.py\n", "it is still the clone that is installed"
