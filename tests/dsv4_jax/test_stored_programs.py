"""Compiled programs on disk: loaded without a trace, and only where nothing has changed."""

import contextlib
import errno
import functools
import importlib
import itertools
import os
import pathlib
import py_compile
import shutil
import subprocess
import sys
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax import cli, sources, stored_programs
from dsv4_jax.serving.device.launcher import Launcher
from dsv4_jax.sources import sources_at_start
from dsv4_jax.stored_programs import StoredPrograms, StoredProgramWarning
from helpers.serving import make_engine, prompt, run_to_end
from pallas_kernels.common import backend

_traces = []
_salts = itertools.count(time.time_ns() % 10**6 + 0.5)
_salt = [0.0]
"""A number that makes a test's program one that jax's compilation cache has not."""


@functools.partial(jax.jit, static_argnames=("config", "times"), donate_argnums=1)
def scale(params, pool, x, *, config, times):
    """Gives two trees, and takes the place of its pool."""
    _traces.append(times)
    if config == "warns":
        backend._SAID.add("an op runs as its reference on a GPU")
    scaled = jnp.where(x == _salt[0], 0.0, x * times)
    return {"pool": pool + params["w"] * x}, (scaled,)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a process of its own: nothing is traced, has fallen back, or is kept by jax."""
    monkeypatch.setattr(backend, "_SAID", set())
    _salt[0] = next(_salts)
    _traces.clear()
    jax.clear_caches()
    with kept_by_jax_after(1e9):
        yield


@contextlib.contextmanager
def kept_by_jax_after(seconds):
    """Within it jax's compilation cache keeps programs that took so long to compile."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, seconds)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Of this process, in a folder of its own."""
    made = StoredPrograms(tmp_path / "programs")
    monkeypatch.setattr(stored_programs, "_used", [made])
    return made


def launch(config="c", size=4, **static):
    """By a launcher of its own, as another process has one."""
    jax.clear_caches()
    launcher = Launcher({"w": jnp.arange(size, dtype=jnp.float32)}, config=config)
    pool, x = jnp.ones(size), jnp.full(size, 2.0)
    pools, (scaled,) = launcher(scale, pool, x, **{"times": 3} | static)
    assert pool.is_deleted()
    np.testing.assert_array_equal(pools["pool"], 1 + 2.0 * np.arange(size))
    np.testing.assert_array_equal(scaled, np.full(size, 2.0 * (static.get("times") or 3)))


def files_of(store):
    return sorted(store._folder.glob("*.program"))


def test_the_next_process_traces_nothing(store):
    launch()
    assert len(_traces) == 1
    assert len(files_of(store)) == 1
    launch()
    assert len(_traces) == 1


def test_what_changes_a_program_has_another_key(store, monkeypatch):
    launch()
    for change in ({"times": 2}, {"size": 5}, {"config": "d"}):
        before = len(_traces)
        launch(**change)
        assert len(_traces) == before + 1, change
    with jax.default_matmul_precision("highest"):
        launch()
    assert len(_traces) == 5
    for name in ("XLA_FLAGS", "DSV4_JAX_PEER_BUFFERS", "NPROC"):
        before = len(_traces)
        monkeypatch.setenv(name, os.environ.get(name, "") + " ")
        launch()
        assert len(_traces) == before + 1, name
    monkeypatch.setattr(store, "_sources", store._sources._replace(digest="of another version"))
    launch()
    assert len(_traces) == 9


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
        "DSV4_JAX_API_KEY",
    ],
)
def test_devices_memory_and_keys_change_no_program(store, monkeypatch, name):
    launch()
    monkeypatch.setenv(name, "7")
    launch()
    assert len(_traces) == 1


def test_so_many_processors_have_their_own_programs(store, monkeypatch):
    launch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 9})
    stored_programs._machine.cache_clear()
    launch()
    stored_programs._machine.cache_clear()
    assert len(_traces) == 2


@jax.tree_util.register_static
class Table:
    """As of a model: no array of a program, and far larger."""

    def __init__(self, rows):
        self.rows = rows

    def __repr__(self):
        return "Table()"


def test_a_file_holds_no_table_that_parameters_have(store):
    params = {"w": jnp.arange(4.0), "table": Table(np.ones(2**22))}
    launcher = Launcher(params, config="c")
    launcher(scale, jnp.ones(4), jnp.ones(4), times=3)
    (file,) = files_of(store)
    assert file.stat().st_size < 2**20


def outer(k):
    def scaled(params, x):
        return k * x

    return jax.jit(scaled)


def test_functions_that_no_name_tells_apart_are_not_kept(store):
    given = [{"w": jnp.ones(3)}, jnp.ones(3)]
    programs = [outer(1), jax.jit(lambda params, x: x)]
    programs.append(jax.jit(functools.partial(scale, config="c", times=1)))
    assert [store.key_of(program, given, {}) for program in programs] == [None] * 3


def test_programs_of_sources_that_changed_while_they_ran_are_not_kept(store, monkeypatch):
    edited = sources_at_start()._replace(digest="edited")
    monkeypatch.setattr(stored_programs, "read_sources", lambda: edited)
    launch()
    assert not files_of(store)


def test_a_function_among_the_values_is_known_by_its_place_alone(store):
    launch(config=lambda: None)
    assert not files_of(store)


def test_a_process_whose_ops_fell_back_keeps_nothing(store):
    """The next one has to say so too, whatever filters this one has for warnings."""
    launch(config="warns")
    launch(times=5)
    assert not files_of(store)


def test_a_program_that_jax_kept_is_kept_as_it_lies_there(store):
    """XLA would write no machine code of it: it would load, and fail where it is launched."""
    with kept_by_jax_after(0):
        launch()
        (file,) = files_of(store)
        file.unlink()
        launch()
        assert len(_traces) == 2
        assert files_of(store) == [file]
        launch()
        assert len(_traces) == 2


def test_a_program_without_machine_code_is_not_kept(store, monkeypatch):
    """As one that jax's cache gave where nobody saw the bytes."""
    keep = StoredPrograms.keep
    monkeypatch.setattr(StoredPrograms, "keep", lambda self, *given: keep(self, *given[:3]))
    with kept_by_jax_after(0):
        launch()
        (file,) = files_of(store)
        file.unlink()
        launch()
        assert not files_of(store)


@pytest.mark.parametrize("damage", ["empty", "torn", "of another program"])
def test_a_damaged_file_is_compiled_anew(store, damage):
    launch(times=4)
    (other,) = files_of(store)
    launch()
    (file,) = set(files_of(store)) - {other}
    whole = file.read_bytes()
    file.write_bytes(
        {"empty": b"", "torn": whole[:-9]}.get(damage, whole[:32] + other.read_bytes()[32:])
    )
    with pytest.warns(StoredProgramWarning, match="compiled anew, since .* cannot be loaded"):
        launch()
    assert len(_traces) == 3
    assert len(files_of(store)) == 2
    launch()
    assert len(_traces) == 3


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_others_may_have_written_is_not_loaded(store, is_folder):
    launch()
    (file,) = files_of(store)
    (file.parent if is_folder else file).chmod(0o777)
    with pytest.warns(StoredProgramWarning, match="others may have written it.*remove the folder"):
        launch()
    assert len(_traces) == 2
    assert files_of(store) == [file]


def test_what_is_no_file_is_not_waited_for(store):
    launch()
    (file,) = files_of(store)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.warns(StoredProgramWarning, match="it is no file"):
        launch()
    assert len(_traces) == 2
    assert file.is_file()


def test_a_folder_that_cannot_be_searched_has_nothing(store, monkeypatch):
    def refuse(file):
        raise PermissionError(file)

    monkeypatch.setattr(pathlib.Path, "exists", refuse)
    assert not store.has("key")


def test_what_was_not_finished_is_removed(store, monkeypatch):
    """At once where writing fails, and what a killed process has left after an hour."""
    left = store._folder / "a.1.partial"
    store._folder.mkdir(mode=0o700)
    left.write_bytes(b"")
    launch()
    assert left.exists()
    os.utime(left, (1, 1))

    def refuse(*files):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(StoredProgramWarning, match="cannot be kept in .* the disk is full"):
        launch(times=5)
    assert len(list(store._folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    made = StoredPrograms(tmp_path / "file" / "programs")
    monkeypatch.setattr(stored_programs, "_used", [made])
    monkeypatch.setattr(made, "has", lambda key: False)
    with pytest.warns(StoredProgramWarning, match="cannot be kept"):
        launch()


def test_programs_that_were_used_longest_ago_go_first(store, monkeypatch):
    launch()
    launch(times=4)
    sizes = {file: file.stat().st_size for file in files_of(store)}
    os.utime(next(iter(sizes)), (1, 1))
    monkeypatch.setattr(stored_programs, "_MOST_BYTES", sum(sizes.values()) + 1)
    launch(times=5)
    left = files_of(store)
    assert len(left) == 2
    assert next(iter(sizes)) not in left


ON_A_MESH = """
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from dsv4_jax import cli, stored_programs
from dsv4_jax.serving.device.launcher import Launcher
traces = []

def double(params, x, *, config):
    traces.append(1)
    return params * x

program = jax.jit(double, static_argnames="config")
stored_programs.use_stored_programs(pathlib.Path(sys.argv[1]))
mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[1:3])
split = NamedSharding(mesh, PartitionSpec("model"))
params, x = jax.device_put((jnp.arange(4.0), jnp.full(4, 2.0)), split)
found = Launcher(params, config="c")(program, x)
assert found.sharding.device_set == set(mesh.devices.flat)
np.testing.assert_array_equal(found, 2.0 * np.arange(4))
print(len(traces))
"""


def test_a_mesh_loads_them_too(tmp_path):
    """On the devices of the arguments, which are some of those that there are."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ON_A_MESH, str(tmp_path / "programs")]
    run = functools.partial(subprocess.check_output, text=True, env=os.environ | flags)
    assert [int(run(command)) for _ in range(2)] == [1, 0]


@pytest.mark.slow
def test_an_engine_answers_the_same_by_programs_that_it_loads(store, monkeypatch):
    rng = np.random.default_rng(0)
    text = prompt(rng, 30)

    def answer():
        jax.clear_caches()
        engine = make_engine(max_requests=3, num_snapshots=23)  # as no other test has it
        engine.warmup()
        lowered = []
        monkeypatch.setattr(Launcher, "lower", lambda *a, **b: lowered.append(a))
        (done,) = run_to_end(engine, engine.submit(text, max_new_tokens=9, logprobs=2))
        monkeypatch.undo()
        assert not lowered
        assert not engine.verify().problems
        return done

    first = answer()
    assert files_of(store)
    monkeypatch.setattr(stored_programs, "_used", [store])
    monkeypatch.setattr(StoredPrograms, "keep", None)  # none is compiled
    second = answer()
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)


@pytest.mark.parametrize(
    ("folder", "is_used"), [("/tmp/a folder", True), ("gs://bucket/x", False), (None, False)]
)
def test_a_command_uses_a_folder_of_this_machine(monkeypatch, folder, is_used):
    """Of a bucket a path would be one in the working directory."""
    monkeypatch.setattr(stored_programs, "_used", [])
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        cli.use_stored_programs()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert (stored_programs.stored_programs() is not None) == is_used


def test_no_store_is_used_unless_a_command_asks_for_it():
    """In Python somebody may replace a function, and no key would tell."""
    assert stored_programs.stored_programs() is None
    ds.use_compilation_cache(jax.config.jax_compilation_cache_dir)
    assert stored_programs.stored_programs() is None


@pytest.mark.slow
def test_the_second_command_traces_no_step(tmp_path):
    settings = {"XDG_CACHE_HOME": str(tmp_path), "JAX_LOG_COMPILES": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dsv4_jax", "generate", "shipped", "The if statement"]
    runs = [
        subprocess.run(
            [*command, "--temperature", "0", "--max-new-tokens", "9"],
            env={name: value for name, value in os.environ.items() if "CACHE" not in name}
            | settings,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    first, second = ("tracing serve_step" in run.stderr for run in runs)
    assert (first, second) == (True, False)
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize(
    ("platform", "count", "is_kept"),
    [("cpu", 1, True), ("cpu", 4, True), ("gpu", 1, True), ("gpu", 2, False), ("tpu", 1, False)],
)
def test_programs_are_kept_where_loaded_ones_were_seen_to_run(
    store, monkeypatch, platform, count, is_kept
):
    devices = tuple(
        types.SimpleNamespace(platform=platform, device_kind="any", id=number)
        for number in range(count)
    )
    monkeypatch.setattr(stored_programs, "_devices_of", lambda leaves: devices)
    monkeypatch.setattr(stored_programs, "_machine", lambda kind: kind)
    assert (store.key_of(scale, [jnp.ones(3)], {}) is not None) == is_kept


def test_a_damaged_file_goes_even_where_warnings_are_errors(store):
    launch()
    (file,) = files_of(store)
    file.write_bytes(b"damaged")
    with warnings.catch_warnings(action="error"), pytest.raises(StoredProgramWarning):
        launch()
    assert not file.exists()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (MemoryError(), True),
        (OSError(24, "Too many open files"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), True),
        (RuntimeError("INTERNAL: of another build"), False),
    ],
)
def test_a_sound_file_outlives_a_lack_of_memory(store, monkeypatch, error, stays):
    launch()
    (file,) = files_of(store)
    kept = file.stat().st_ino

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stored_programs.serialize_executable, "deserialize_and_load", fail)
        patch.setattr(StoredPrograms, "keep", lambda *_: None)
        with pytest.warns(StoredProgramWarning, match="compiled anew"):
            launch()
    assert [one.stat().st_ino for one in files_of(store)] == [kept] * stays


def test_old_programs_make_room_on_a_full_disk(store, monkeypatch):
    launch(times=2)
    (old,) = files_of(store)
    os.utime(old, (1.0, 1.0))
    write, calls = stored_programs._write, []

    def full(file, data):
        calls.append(old.exists())
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    monkeypatch.setattr(stored_programs, "_write", full)
    launch()
    assert calls == [True, False]
    assert len(files_of(store)) == 1


@pytest.fixture
def package(tmp_path, monkeypatch):
    """One of two files, which is imported from its folder; the second lies in a linked one."""
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    (place / "pkg_of_test").mkdir(parents=True)
    elsewhere.mkdir()
    (place / "pkg_of_test" / "__init__.py").write_text("")
    (elsewhere / "__init__.py").write_text("x = 1")
    (place / "pkg_of_test" / "room").symlink_to(elsewhere)
    monkeypatch.setattr(sources, "_ROOTS", ("pkg_of_test",))
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [name for name in sys.modules if name.startswith("pkg_of_test")]:
        del sys.modules[name]


def test_sources_are_those_that_python_imports(package, tmp_path, monkeypatch):
    found = sources.read_sources()
    assert found.digest is not None
    assert found == sources.read_sources()
    importlib.import_module("pkg_of_test.room")
    assert not sources.imports_others(found.files)
    assert sources.imports_others(found.files - {max(found.files)})
    assert sources.imports_before(frozenset({"pkg_of_test"}))
    assert not sources.imports_before(frozenset({"pkg_of_test", "pkg_of_test.room"}))
    (tmp_path / "elsewhere" / "__init__.py").write_text("x = 2")
    assert sources.read_sources().digest != found.digest
    for name in ("pkg_of_test", "pkg_of_test.room"):
        del sys.modules[name]
    fork = tmp_path / "fork" / "pkg_of_test"
    fork.mkdir(parents=True)
    (fork / "__init__.py").write_text("fork = True")
    monkeypatch.syspath_prepend(str(fork.parent))
    assert sources.read_sources().digest not in (None, found.digest)


@pytest.mark.parametrize("how", ["compiled", "zipped", "a namespace", "missing"])
def test_a_package_whose_files_are_not_seen_has_no_programs(package, monkeypatch, how):
    folder = package / "pkg_of_test"
    if how == "zipped":
        archive = shutil.make_archive(str(package / "whole"), "zip", package, "pkg_of_test")
        monkeypatch.syspath_prepend(archive)
    elif how == "compiled":
        py_compile.compile(str(folder / "__init__.py"), cfile=str(folder / "__init__.pyc"))
    if how != "zipped":
        (folder / "__init__.py").unlink()
    if how == "missing":
        monkeypatch.setattr(sources, "_ROOTS", ("pkg_that_is_none",))
    importlib.invalidate_caches()
    assert sources.read_sources().digest is None


def test_who_imported_the_package_before_a_command_has_no_programs(monkeypatch):
    """They may have replaced functions, which no file says."""
    monkeypatch.setattr(cli, "_is_alone", [])
    cli.import_command(["generate", "shipped", "x"])
    assert not any(cli._is_alone)
    monkeypatch.setattr(cli, "imports_before", lambda expected: False)
    cli.import_command(["generate", "shipped", "x"])
    assert any(cli._is_alone)
