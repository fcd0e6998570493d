"""Threads that lower kernels at once take the package `triton` in turns."""

import contextlib
import sys
import threading
import types

import pytest

from pallas_kernels.gpu.triton_language import package

NAMES = ["whole", "whole.part", "whole.other"]


def load_at_once(names):
    """By name, what each of so many threads got."""
    got = {}

    def load(name):
        got[name] = package.load(name)

    threads = [threading.Thread(target=load, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize("names", [NAMES[:2], NAMES[1::-1]])
def test_threads_find_whole_modules(names, tmp_path, monkeypatch):
    """Of a package whose modules import one another, which one thread alone can import."""
    (tmp_path / "whole").mkdir()
    wait = "import time\ntime.sleep({})\n"
    sources = {
        "__init__": "from whole.other import number\n",
        "other": wait.format(0.3) + "from whole.part import number\n",
        "part": wait.format(0.05) + "import whole.other\nnumber = 1\n",
    }
    for name, text in sources.items():
        (tmp_path / "whole" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        got = load_at_once(names)
        assert {name: module.number for name, module in got.items()} == dict.fromkeys(names, 1)
    finally:
        for name in NAMES:
            sys.modules.pop(name, None)


def test_lines_are_left_out_until_the_last_thread_has_compiled(monkeypatch):
    """And then they are what they were."""

    class Knobs(types.SimpleNamespace):
        @contextlib.contextmanager
        def scope(self):
            before = self.disable_line_info
            yield
            self.disable_line_info = before

    knobs = Knobs(disable_line_info=False)
    monkeypatch.setattr(package, "load", lambda _: types.SimpleNamespace(compilation=knobs))
    first, second = package.without_line_info(), package.without_line_info()
    seen = [knobs.disable_line_info]
    for change in (
        first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None),
        lambda: second.__exit__(None, None, None),
    ):  # fmt: skip
        change()
        seen.append(knobs.disable_line_info)
    assert seen == [False, True, True, True, False]
    with pytest.raises(KeyError), package.without_line_info():
        raise KeyError
    assert not knobs.disable_line_info
