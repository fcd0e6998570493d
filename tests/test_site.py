"""The site is built from the documents without a warning: no link of it leads nowhere."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
HAS_SPHINX = all(importlib.util.find_spec(name) for name in ("sphinx", "myst_nb", "furo"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not HAS_SPHINX:
        pytest.skip("needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "."]
    done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_pages_api_notebooks_and_search_are_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").exists(), page
    api = (site / "docs" / "api" / "dsv4_jax.html").read_text()
    assert 'id="dsv4_jax.Engine.submit"' in api
    assert "bf16" in (site / "docs" / "api" / "pallas_kernels.html").read_text()
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        html = (site / "notebooks" / notebook.name).with_suffix(".html").read_text()
        assert re.search(r'<img [^>]*src="\.\./_images/', html), notebook
    assert (site / "searchindex.js").stat().st_size > 100_000


@pytest.mark.slow
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path):
    if not HAS_SPHINX:
        pytest.skip("needs the extra docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n[two](two.md) [three](#three)\n")
    (tmp_path / "docs" / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text())
    (tmp_path / "dsv4_jax").mkdir()
    (tmp_path / "dsv4_jax" / "__init__.py").write_text('__version__ = "1.0.0"\n')
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "two.md" in done.stderr
    assert "three" in done.stderr
