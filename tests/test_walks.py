"""The walks of docs/design/architecture.md: functions are where it says, and call as it says."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil
import re
import sys
import urllib.request

import jax
import jax.numpy as jnp
import pytest

import dsv4_jax as ds
import pallas_kernels
from dsv4_jax.model.params import param_shapes
from dsv4_jax.serving import Grammar
from helpers.checkpoints import released_tensors, write_released
from helpers.serve import MODEL, running, small_engine
from helpers.serving import run_to_end

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "architecture.md"
ROW = re.compile(r"( *(?:↳ )?)([A-Za-z_][\w.]*) {2,}((?:\w+/)*\w+\.py)(?: {2}.*)?")
TOOL = 4
"""Of `sys.monitoring`: neither a debugger's, nor a profiler's, nor coverage's."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a walk; `caller` is the one above it that it is indented under."""

    function: str
    path: str
    caller: "Row | None"

    @property
    def place(self):
        return self.path, self.function

    @property
    def pair(self):
        return self.caller.place, self.place


def read_walks(text):
    """Rows of each block of code whose lines all have a function and a file."""
    walks = []
    for block in re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found = [ROW.fullmatch(line) for line in block.splitlines()]
        if not all(found):
            continue
        rows, above = [], []
        for line in found:
            depth = len(line[1])
            above = [(its_depth, row) for its_depth, row in above if its_depth < depth]
            own = pathlib.Path(line[3])
            path = own if own.parts[0] == "pallas_kernels" else pathlib.Path("dsv4_jax", own)
            is_handed_over = not above or "↳" in line[1]
            rows.append(Row(line[2], path.as_posix(), None if is_handed_over else above[-1][1]))
            above.append((depth, rows[-1]))
        walks.append(rows)
    return walks


WALKS = read_walks(PAGE.read_text())
ROWS = [row for walk in WALKS for row in walk]


@functools.cache
def names_of(path):
    """Functions, classes and methods of a file."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{getattr(one, 'name', '')}" for one in ast.iter_child_nodes(node)
            }
    return names


def test_the_page_has_the_six_walks():
    ends = [(walk[0].function, walk[-1].function) for walk in WALKS]
    assert ends == [
        ("EngineCore.submit", "StepTokens"),
        ("Connection.data_received", "_send_part"),
        ("csa_attention", "prepare_store"),
        ("read_sampling", "draw"),
        ("ServingLoop.serve", "draw"),
        ("load_checkpoint", "begin"),
    ]


def files_of(walk, last=None):
    """Files of a walk, up to a function."""
    end = len(walk) if last is None else [row.function for row in walk].index(last) + 1
    return {row.path for row in walk[:end]}


def test_the_page_counts_the_files_of_its_walks():
    token, http, row, setting, _, weights = WALKS
    logits, ring = files_of(token, "linear"), files_of(row, "copy_row")
    around = files_of(http) - {"dsv4_jax/serving/engine_core.py"}
    assert (len(logits), len(files_of(token) - logits), len(around)) == (20, 4, 16)
    assert (len(ring), len(files_of(row) - ring)) == (9, 2)
    assert (len(files_of(setting)), len(files_of(weights))) == (8, 12)
    for told in (
        "20 files to the logits, and four more on the way back.",
        "there are 16 files around the engine:",
        "Nine files to the ring, and two more to a block.",
        "goes through eight files.",
        "**Weight bytes to the multiply**, in twelve files;",
    ):
        assert told in PAGE.read_text()


def test_functions_of_a_walk_are_in_their_files():
    assert not [row.place for row in ROWS if row.function not in names_of(row.path)]
    assert "serve_step" not in names_of("dsv4_jax/step/draws.py")


class Calls:
    """Which functions of the walks were called, and under which others of them.

    Attributes:
      places: (path, function).
      pairs: of a function under which another ran, and that one.
    """

    def __init__(self):
        self.places, self.pairs = set(), set()
        self._named = {row.place for row in ROWS}

    def place_of(self, code):
        """The line of a walk that a function, a closure in it or a constructor is; None if none."""
        path = code.co_filename.removeprefix(f"{ROOT}/")
        function = code.co_qualname.split(".<locals>")[0]
        exact, of_class = (path, function), (path, function.split(".")[0])
        return next((place for place in (exact, of_class) if place in self._named), None)

    def note(self, code, offset):
        place = self.place_of(code)
        if place is None:
            return sys.monitoring.DISABLE
        self.places.add(place)
        frame = sys._getframe(2)
        while frame is not None:
            caller = self.place_of(frame.f_code)
            if caller is not None:
                self.pairs.add((caller, place))
            frame = frame.f_back
        return None


@contextlib.contextmanager
def noted_calls():
    """Notes calls in all threads."""
    calls, events = Calls(), sys.monitoring.events
    sys.monitoring.use_tool_id(TOOL, "walks")
    try:
        sys.monitoring.register_callback(TOOL, events.PY_START, calls.note)
        sys.monitoring.set_events(TOOL, events.PY_START)
        yield calls
    finally:
        sys.monitoring.set_events(TOOL, events.NO_EVENTS)
        sys.monitoring.register_callback(TOOL, events.PY_START, None)
        sys.monitoring.free_tool_id(TOOL)


def ask_a_server():
    """A stream, of an engine whose step nothing else has traced, after a request of Python's."""
    engine = small_engine(max_requests=3, prefill_tokens=(40,), decode_tokens=40)
    engine.cancel(engine.submit("by hand"))
    with running(engine) as server:
        body = {"model": MODEL, "prompt": "a walk", "max_tokens": 3, "stream": True, "top_p": 0.9}
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")


def follow_a_grammar():
    """In an engine that has a program of steps that only decode."""
    engine = small_engine(max_requests=2, prefill_tokens=(40,), decode_tokens=None)
    run_to_end(engine, engine.submit("a walk", grammar=Grammar("regex", "[a-z]{9}")))


def trace_for_a_gpu(monkeypatch):
    """A decode step of a layer of Flash, as it is traced where there is an H200."""
    for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
        importlib.import_module(module.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels.") and hasattr(module, "compute_capability"):
            monkeypatch.setattr(module, "compute_capability", lambda: (9, 0))
    attention, router = ds.AttentionType, ds.RouterType
    config = dataclasses.replace(
        ds.DSV4Config.flash(),
        layer_types=(attention.CSA,),
        router_types=(router.LEARNED,),
        num_mtp_layers=0,
    )
    rows = jax.ShapeDtypeStruct((24,), jnp.int32)
    jax.eval_shape(
        functools.partial(ds.decode_step, config=config),
        param_shapes(config, jnp.bfloat16, weights="stored"),
        ds.cache.cache_shapes(config, max_requests=24, max_context_tokens=4096),
        ds.StepInput(token_ids=rows, request_ids=rows, request_slots=rows),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_functions_of_a_walk_call_each_other(tmp_path, monkeypatch):
    config = ds.DSV4Config.tiny()
    released = write_released(tmp_path / "released", config, released_tensors(config))
    with noted_calls() as calls:
        ask_a_server()
        follow_a_grammar()
        ds.load_checkpoint(released, progress=False)
        try:
            trace_for_a_gpu(monkeypatch)
        finally:
            jax.clear_caches()  # what was traced for a GPU
    assert not [row.place for row in ROWS if row.place not in calls.places]
    assert not [row for row in ROWS if row.caller is not None and row.pair not in calls.pairs]
    # A line that stood under another than its caller would be seen.
    head, draw = (("dsv4_jax/model/trunk.py", "head"), ("dsv4_jax/step/draws.py", "draw"))
    assert {head, draw} <= calls.places
    assert (draw, head) not in calls.pairs
