"""Threads that lower kernels at once take the package `triton` in turns."""

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


@pytest.mark.parametrize("before", [None, False, True])
def test_lines_are_left_out_until_the_last_thread_has_compiled(before, monkeypatch):
    """And then they are what they were; the environment is never asked to say so."""
    written = []

    class Options:
        """As of Triton: an option that is not set is the environment's, and setting it tells it."""

        @property
        def disable_line_info(self):
            return vars(self).get("disable_line_info", False)

        @disable_line_info.setter
        def disable_line_info(self, value):
            vars(self)["disable_line_info"] = value
            written.append(knobs.propagate_env)

        @disable_line_info.deleter
        def disable_line_info(self):
            vars(self).pop("disable_line_info")

    knobs = types.SimpleNamespace(compilation=Options(), propagate_env=True)
    if before is not None:
        vars(knobs.compilation)["disable_line_info"] = before
    monkeypatch.setattr(package, "load", lambda _: knobs)
    first, second = package.without_line_info(), package.without_line_info()
    seen = []
    for change in (
        first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None),
        lambda: second.__exit__(None, None, None),
    ):  # fmt: skip
        change()
        seen.append(knobs.compilation.disable_line_info)
    assert seen == [True, True, True, bool(before)]
    assert vars(knobs.compilation).get("disable_line_info") is before
    with pytest.raises(KeyError), package.without_line_info():
        raise KeyError
    assert vars(knobs.compilation).get("disable_line_info") is before
    assert knobs.propagate_env
    assert not any(written)
