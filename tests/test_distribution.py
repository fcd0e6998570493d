"""What a wheel and a source distribution hold; they are built in the slow test alone."""

import ast
import email
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest

import dsv4_jax as ds

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_is_said_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", ds.__version__)
    assert PROJECT["dynamic"] == ["version"]
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {ds.__version__}\n" in cited
    assert f"## [{ds.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_imported_is_a_stated_dependency():
    """Of both packages, whatever a dependency may happen to bring along."""
    stated = {
        re.split(r"[<>=\[;]", text)[0].replace("-", "_").lower()
        for text in [*PROJECT["dependencies"], *(
            line
            for extra in ("bench", "cuda13", "serve", "train")
            for line in PROJECT["optional-dependencies"][extra]
        )]
    }  # fmt: skip
    ours = {"dsv4_jax", "pallas_kernels", "jaxlib"}  # jaxlib comes with every jax
    known = stated | ours | sys.stdlib_module_names
    for path in [*ROOT.glob("dsv4_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= known, path


def test_classifiers_and_types_are_there():
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert PROJECT["urls"]
    assert (
        f"Programming Language :: Python :: {PROJECT['requires-python'][2:]}"
        in (PROJECT["classifiers"])
    )
    for package in ("dsv4_jax", "pallas_kernels"):
        assert (ROOT / package / "py.typed").is_file()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of the source distribution, by name, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "build"], check=True)
    subprocess.run([*pip[:2], "build", "--outdir", str(folder), str(tree)], check=True)
    (source,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_modules_of_an_earlier_build_are_not_installed_again(tmp_path):
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    left = tree / "build" / "lib" / "dsv4_jax" / "gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    venv.create(tmp_path / "venv", with_pip=True)
    pip = [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "dsv4_jax/__init__.py" in names
    assert "dsv4_jax/gone.py" not in names


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_need(built, tmp_path):
    """All that git holds; and a test runs in it."""
    source, _ = built
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    kept = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(kept) - {".gitignore"} <= names
    (tree,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/test_layout.py",
               "tests/dsv4_jax/config"]  # fmt: skip
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_wheel_holds_both_packages_and_their_data(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
    assert {name.split("/")[0] for name in names} == {
        "dsv4_jax", "pallas_kernels", f"dsv4_jax-{ds.__version__}.dist-info",
    }  # fmt: skip
    for name in ("dsv4_jax/py.typed", "pallas_kernels/py.typed"):
        assert name in names
    assert {f"dsv4_jax/data/checkpoint/{name}" for name in
            ("config.json", "model.safetensors", "tokenizer.json")} <= names  # fmt: skip
    assert {f"dsv4_jax/serve/page/{name}" for name in
            ("index.html", "page.css", "page.js", "page.svg")} <= names  # fmt: skip
    assert (fields["Name"], fields["Version"]) == ("dsv4-jax", ds.__version__)
    assert "Typing :: Typed" in fields.get_all("Classifier")
