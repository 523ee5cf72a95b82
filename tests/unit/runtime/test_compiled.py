"""Kernels: plain Python until they are compiled, the same answers after."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from headrace.metrics import default_meter
from headrace.runtime.compiled import Intrinsic, Kernel, KernelModule, kernel, wait_for_kernels, warm_kernels  # noqa: F401

STEP = np.uint64(0x9E3779B97F4A7C15)
SCALE = 3


@kernel("int64(int64)", nogil=False)
def scaled(value):
    return SCALE * value


@kernel("uint64(Array(int64, 1, 'C', readonly=True))")
def wrapped_sum(values):
    """Wraps around."""
    total = np.uint64(0)
    for i in range(len(values)):
        total += np.uint64(scaled(values[i])) * STEP
    return total


@kernel("int64(int64[::1], int64)")
def element(values, at):
    return values[at]


def uncompiled(made: Kernel) -> Kernel:
    """The same kernel, as in a process that has just begun."""
    fresh = Kernel(made._function, made._signatures, nogil=made._nogil, python=None, interpretable=made._interpretable)
    fresh._requested = True  # so that no thread compiles it
    return fresh


def test_a_kernel_answers_before_it_is_compiled_and_the_same_after():
    values = np.arange(1, 2000)
    fresh = uncompiled(wrapped_sum)
    before = fresh(values)
    assert not fresh.is_compiled
    wait_for_kernels(fresh)
    assert fresh.is_compiled
    assert int(fresh(values)) == int(before) == sum(3 * n * int(STEP) for n in range(1, 2000)) % 2**64


def test_the_first_call_has_it_compiled_in_the_background(until):
    fresh = uncompiled(scaled)
    fresh._requested = False
    assert fresh(2) == 6
    until(lambda: fresh.is_compiled)
    assert fresh(2) == 6


def test_a_kernel_without_a_plain_form_waits_for_the_compiler_by_name():
    fresh = uncompiled(scaled)
    fresh._interpretable = False
    before = default_meter().drain().get("wait/kernels.compile/count", 0)
    assert fresh(5) == 15
    assert fresh.is_compiled
    assert default_meter().drain()["wait/kernels.compile/count"] == 1, before


def test_what_the_compiler_refused_is_raised_by_the_next_call(until):
    @kernel("int64(int64)")
    def broken(value):
        return value.there_is_no_such_thing + undefined_name  # noqa: F821

    with pytest.raises(AttributeError):
        broken(1)
    until(lambda: broken._error is not None)
    with pytest.raises(type(broken._error)):
        broken(1)


def test_a_module_of_kernels_is_imported_when_it_is_first_asked_for():
    module = KernelModule("colorsys")
    assert module._module is None
    assert module().hls_to_rgb


def test_the_name_in_the_cache_changes_with_code_constants_and_called_kernels(monkeypatch):
    first = wrapped_sum.digest()
    assert first == uncompiled(wrapped_sum).digest()
    monkeypatch.setitem(globals(), "STEP", np.uint64(5))
    second = wrapped_sum.digest()
    monkeypatch.setitem(globals(), "SCALE", 4)  # a constant of a kernel that it calls
    assert len({first, second, wrapped_sum.digest()}) == 3


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True, timeout=100, check=False
    )


def test_with_bounds_checks_an_index_outside_is_an_error(tmp_path):
    program = """
        import numpy as np
        from test_compiled import element, wait_for_kernels
        wait_for_kernels(element)
        assert element(np.arange(3), 2) == 2
        try:
            element(np.arange(3), 3)
        except IndexError:
            print("refused")
    """
    unchecked = """
        import headrace.runtime.compiled
        from test_compiled import uncompiled
        headrace.runtime.compiled.BOUNDS_CHECKS = False
        wait_for_kernels(uncompiled(element))
    """
    for more in ("", unchecked):  # compiled, and from the cache; unchecked code has another name in the same cache
        done = run(program + more, HEADRACE_BOUNDS_CHECKS="1", NUMBA_CACHE_DIR=str(tmp_path))
        assert done.stdout == "refused\n", done.stderr
    names = {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert len(names) == 2
    assert sum(name.endswith(".checked") for name in names) == 1


def test_a_process_may_fork_while_another_thread_compiles(tmp_path):
    done = run(
        """
        import os, sys
        import numpy as np
        from test_compiled import scaled, wait_for_kernels, warm_kernels, wrapped_sum
        warm_kernels(wrapped_sum)
        child = os.fork()
        assert int(wrapped_sum(np.arange(3))) == int(wrapped_sum.python(np.arange(3)))
        wait_for_kernels(scaled, wrapped_sum)
        if child == 0:
            os._exit(7 if wrapped_sum.is_compiled else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
        PYTHONWARNINGS="ignore",
    )
    assert done.returncode == 0, done.stderr


def test_importing_kernels_imports_no_numba():
    done = run("import sys, headrace.text.block_layout\nassert 'numba' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_process_that_ends_leaves_the_rest_of_the_queue_uncompiled(tmp_path):
    done = run(
        """
        import threading
        from test_compiled import warm_kernels

        class Endless:
            def compile(self):
                if threading.main_thread().is_alive():
                    threading.main_thread().join()  # as long as the process lives
                    warm_kernels(self, self)

        warm_kernels(Endless())
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("passes", "ending"), [(1, ""), (30, ""), (9, "raise KeyboardInterrupt")])
def test_a_process_ends_in_the_middle_of_a_compile(tmp_path, passes, ending):
    done = run(
        f"""
        import threading
        from headrace.runtime.compiled import warm_kernels
        from headrace.text.block_layout import best_fit
        import numba.core.event

        begun = threading.Semaphore(0)

        class Count(numba.core.event.Listener):
            def on_start(self, event): begun.release()
            def on_end(self, event): pass

        numba.core.event.register("numba:run_pass", Count())
        warm_kernels(best_fit)
        for _ in range({passes}):
            assert begun.acquire(timeout=60)
        print("compiled:", best_fit.is_compiled)
        {ending}
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode in ((0,) if not ending else (-2, 130)), done.stderr
    assert "compiled: False" in done.stdout
    assert not list(tmp_path.rglob("*.nbc")), "the compile went on to its end"
    assert "headrace-kernels" not in done.stderr


def test_the_digest_of_an_intrinsic_with_a_nested_function_is_the_same_in_every_process():
    def digest() -> str:
        found: dict = {}
        exec("def outer(context):\n    def inner(builder):\n        return builder\n    return inner\n", found)
        return Intrinsic(found["outer"], 4, 8).digest()

    assert digest() == digest(), "the repr of a nested code object holds its address"
