"""SIGINT and SIGTERM wherever they come, in processes of their own: some places swallow errors."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from dsv4_jax.signals import end_at_once, end_soon, keep_interrupts

pytestmark = pytest.mark.usefixtures("interrupts_arrive")

ROOT = pathlib.Path(__file__).parents[2]
PLACES = {
    "a callback of the collector": """
        import gc
        def callback(phase, info):
            if phase == "stop":
                gc.callbacks.remove(callback)  # another collection comes at the end
                interrupt()
                for _ in range(1000): pass
        gc.callbacks.append(callback)
        gc.collect()""",
    "a callback of a weak reference": """
        import weakref
        class Thing: pass
        def callback(_):
            interrupt()
            for _ in range(1000): pass
        thing = Thing()
        reference = weakref.ref(thing, callback)
        del thing""",
    "__del__": """
        class Thing:
            def __del__(self):
                interrupt()
                for _ in range(1000): pass
        Thing()""",
    "a library that catches all": """
        try:
            interrupt()
            for _ in range(1000): pass
        except BaseException:
            pass""",
    "a long call of C": """
        import hashlib, threading
        threading.Timer(0.3, interrupt).start()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 100_000_000)""",
    "a wait": """
        import threading
        threading.Timer(0.3, interrupt).start()
        threading.Event().wait()""",
    "plain code": "interrupt()",
    "what an interrupt goes through": """
        try:
            interrupt()
        finally:
            time.sleep(10)""",
}
LOST_BY_PYTHON = [place for place in PLACES if place.startswith(("a callback", "__del__"))]


def run_in(place, number, within):
    """Status and stderr of a process that gets a signal there, and would go on for ten seconds.

    Tests that run in the background of a shell ignore SIGINT, and their processes would too.
    """
    code = f"""if True:
        import os, signal, sys, threading, time
        from dsv4_jax.signals import end_at_once, end_soon, keep_interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)
        def interrupt():
            os.kill(os.getpid(), {int(number)})
        try:
            with {within}:
                {PLACES[place].replace(chr(10), chr(10) + "        ").strip()}
                time.sleep(10)
        except KeyboardInterrupt:
            print("raised", file=sys.stderr)
            sys.exit(3)
        print("went on", file=sys.stderr)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("number", "end"),
    [(signal.SIGINT, (130, "it: interrupted\n")), (signal.SIGTERM, (143, "it: terminated\n"))],
)
def test_a_signal_ends_the_process_wherever_it_is(place, number, end):
    assert run_in(place, number, "end_at_once('it')") == end


@pytest.mark.parametrize("place", [*LOST_BY_PYTHON, "a wait", "plain code"])
def test_an_interrupt_that_python_would_forget_is_raised_after_all(place):
    assert run_in(place, signal.SIGINT, "keep_interrupts()") == (3, "raised\n")


@pytest.mark.parametrize("place", ["a long call of C", "what an interrupt goes through"])
def test_a_process_that_does_not_end_in_time_is_ended(place):
    """Standard output has what was printed before."""
    assert run_in(place, signal.SIGINT, "end_soon('it', 0.5)") == (130, "it: interrupted\n")


@pytest.mark.parametrize("place", ["a wait", "plain code", "__del__"])
def test_a_process_that_ends_in_time_ends_in_its_own_way(place):
    within = "end_soon('it', 30), keep_interrupts()"
    assert run_in(place, signal.SIGINT, within) == (3, "raised\n")


@pytest.mark.parametrize(
    "stays",
    ["pool.submit(time.sleep, 50); time.sleep(50)", "hashlib.pbkdf2_hmac('md5', b'', b'', 2**28)"],
    ids=["threads", "a long call of C"],
)
def test_an_interrupted_command_waits_for_nothing(stays):
    """As for XLA, which compiles in threads, for which Python's end waits, or in the main one."""
    code = f"""if True:
        import concurrent.futures, hashlib, os, signal, sys, threading, time, types
        import dsv4_jax
        from dsv4_jax import __main__
        from dsv4_jax.cli import ending
        signal.signal(signal.SIGINT, signal.default_int_handler)
        pool = concurrent.futures.ThreadPoolExecutor()
        def run():
            print("an answer")
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            {stays}
        run_it = lambda: ending.run_to_status("it", run)
        own = types.SimpleNamespace(main=run_it, import_command=len)
        sys.modules["dsv4_jax.cli"] = dsv4_jax.cli = own
        sys.exit(__main__.main())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=40
    )
    assert (done.returncode, done.stdout) == (130, "an answer\n")
    assert done.stderr == "it: interrupted\n"


def test_what_was_set_before_is_set_again():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hook = sys.unraisablehook
    with end_soon("it"), end_at_once("it"), keep_interrupts():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert sys.unraisablehook is hook
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_is_ignored_stays_ignored():
    code = """if True:
        import os, signal
        from dsv4_jax.signals import end_at_once
        with end_at_once("it"):
            os.kill(os.getpid(), signal.SIGINT)
        print("went on")
    """
    done = subprocess.run(
        ["/bin/sh", "-c", f"trap '' INT; exec '{sys.executable}' -c \"$0\"", code],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_with_stderr_closed_nothing_is_written_elsewhere(tmp_path):
    """Its number may be that of the file that was opened next."""
    code = f"""if True:
        import os, signal
        from dsv4_jax.signals import end_at_once
        os.open({str(tmp_path / "data")!r}, os.O_CREAT | os.O_WRONLY)
        with end_at_once("it"):
            os.kill(os.getpid(), signal.SIGINT)
    """
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$0" 2>&-', code], cwd=ROOT, timeout=60
    )
    assert done.returncode == 130
    assert (tmp_path / "data").read_bytes() == b""
