"""What numba keeps on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from hetpipe.documents.cluster import RuntimeOverhead
from hetpipe.documents.plan import Plan
from hetpipe.partitioners import auto
from hetpipe.predict import compiled
from tests.support.commands import ROOT
from tests.support.strategies import make_cluster, make_problem, make_profile


def loaded(path: Path) -> Any:
    """The module, once more."""
    spec = spec_from_file_location("doubling", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_in_any_file_compiles_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is compiled into its callers, which may be in other files."""
    path = tmp_path / "doubling.py"
    path.write_text("from hetpipe.predict.compiled import compiled\n\n\n@compiled\ndef twice(x):\n    return 2 * x\n")
    hits = []
    for digest in ("before", "before", "after", "after"):
        monkeypatch.setattr(compiled, "sources", lambda digest=digest: digest)
        function = loaded(path).twice
        assert function.by_numba(2.0) == 4.0
        hits.append(sum(function.by_numba.stats.cache_hits.values()))
    assert hits == [0, 1, 0, 1]


def test_the_digest_is_of_files_with_compiled_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for text in ("from hetpipe.predict.compiled import compiled\n", "from hetpipe.predict.compiled import inlined\n", ""):
        (tmp_path / "one.py").write_text(text)
        (tmp_path / "other.py").write_text(f"# {text!r}" if not text else "")
        monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
        digests.append(compiled.sources.__wrapped__())
    assert len(set(digests)) == 3
    (tmp_path / "other.py").write_text("# changed")
    assert compiled.sources.__wrapped__() == digests[-1]


def test_one_device_is_planned_without_numba() -> None:
    """Python is as fast there as reading what is compiled, and what is not there is compiled for half a minute."""
    code = "from tests.test_compiled import small_plans; small_plans(1); import sys; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def small_plans(b: int) -> list[Plan]:
    """Plans of `auto` for one device of a kind and less than two of another, with and without a limit of memory."""
    cluster = make_cluster([{"a": 1}, {"b": b - 1}] if b > 1 else [{"a": 1}])
    profile = make_profile({"a": [0.1] * 4, "b": [0.2] * 4}, (1, 2), {"parameter_bytes": 400, "output_bytes_per_sample": 50})
    return [auto.Auto()(make_problem(cluster, profile, batch)).plan for batch in (1, 3, 8)]


def test_python_finds_what_numba_finds() -> None:
    with compiled.left_to_python():
        python = [*small_plans(1), *small_plans(2), *small_plans(3)]
    assert python == [*small_plans(1), *small_plans(2), *small_plans(3)]


@pytest.mark.parametrize("seed", [7701, 7702, 7703])
def test_a_search_that_python_and_numba_run_by_turns_finds_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When each is chosen, the clock says: here dice say it, for each call."""
    dice = Random(seed)
    kinds = {kind: [dice.uniform(0.01, 0.2) for _ in range(5)] for kind in "abc"}
    cluster = make_cluster([{"a": 1}, {"b": 1}, {"c": dice.randint(1, 2)}])
    given = {"parameter_bytes": dice.randint(100, 10**6), "output_bytes_per_sample": dice.randint(10, 10**6)}
    problem = make_problem(cluster, make_profile(kinds, (1, 2), given), dice.randint(3, 9))
    expected = auto.Auto()(problem)

    def call(function: compiled.Compiled, *arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return (function.by_python if dice.random() < 0.5 else function.by_numba)(*arguments)

    monkeypatch.setattr(compiled.Compiled, "__call__", call)
    assert auto.Auto()(problem) == expected


def halving(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of a compiled function, kept in no other test, and what makes it ready."""
    text = (
        "from hetpipe.predict.compiled import compiled, once, get_ready\n\n\n@compiled\ndef half(x):\n    return x / 2\n"
        "\n\n@once\ndef ready():\n    get_ready(lambda: half(2.0))\n"
    )
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(compiled, "cores", lambda: 2)
    return import_module(name).half


def test_what_a_process_beside_has_compiled_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = halving(tmp_path, monkeypatch, "halving_beside")
    assert not function.is_kept()
    compiled.compile_beside("halving_beside")
    compiled.stop_compiling(wait=True)
    assert function.is_kept()
    assert not compiled.is_compiling()
    monkeypatch.setattr(function, "_looked", -compiled.LOOK_SECONDS)
    assert function(3.0) == 1.5
    assert sum(function.by_numba.stats.cache_hits.values()) == 1


def test_the_process_beside_ends_with_what_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not halving(tmp_path, monkeypatch, "halving_ended").is_kept()  # so that numba keeps something
    (tmp_path / "endless.py").write_text("import time\n\n\ndef ready():\n    time.sleep(3600)\n")
    compiled.compile_beside("endless")
    (process,) = compiled._beside
    assert process.stdin is not None
    process.stdin.close()  # as the system does it when a process ends
    assert process.wait(60) == 1
    compiled.stop_compiling()


def test_the_process_beside_goes_on_where_a_processor_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While this one trains; one that plans again begins another."""
    assert not halving(tmp_path, monkeypatch, "halving_idle").is_kept()  # so that numba keeps something
    (tmp_path / "endless.py").write_text("import time\n\n\ndef ready():\n    time.sleep(3600)\n")
    compiled.compile_when_idle()  # there is none
    compiled.compile_beside("endless")
    (process,) = compiled._beside
    compiled.compile_when_idle()
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    compiled.compile_beside("halving_idle")
    assert process.poll() is not None
    (other,) = compiled._beside
    assert os.sched_getscheduler(other.pid) == os.SCHED_OTHER
    compiled.stop_compiling()


def test_python_runs_a_function_until_that_took_as_long_as_compiling_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process is compiling, Python goes on to run, unless a call alone would take longer than to wait."""
    function, begun = halving(tmp_path, monkeypatch, "halving_python"), list[str]()
    monkeypatch.setattr(compiled, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(compiled, "_begun", lambda: begun)
    assert function(3.0) == 1.5
    assert not function._there
    function.spent, begun[:] = 2 * function.compile_seconds, [function._name]
    assert function(3.0) == 1.5
    assert not function._there
    begun.clear()
    assert function(3.0) == 1.5
    assert function._there
    again = compiled.Compiled(function.function)
    assert again(3.0) == 1.5
    assert again._there


def test_numbers_that_stand_in_the_code_compile_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "counting.py"
    path.write_text(
        "from hetpipe.predict.compiled import compiled\n\n\n@compiled\ndef more(x):\n    return x + 1\n"
        "\n\n@compiled\ndef count(n):\n    found = 0\n    for _ in range(n):\n        found = more(found)\n"
        "    return found + more(-1)\n"
    )
    module = loaded(path)
    assert module.count.by_numba(3) == 3
    assert len(module.more.by_numba.signatures) == 1


def test_planning_compiles_nothing_that_was_not_made_ready() -> None:
    """A number of another type, such as a bucket's bytes that are none, compiled a function once more, for seconds."""
    auto.ready()
    known = {function.py_func: len(function.signatures) for function in compiled.on_disk}
    cluster = make_cluster([{"a": 2}, {"b": 2}])
    profile = make_profile({"a": [0.1] * 4, "b": [0.2] * 4}, (1, 2), {"parameter_bytes": 400, "output_bytes_per_sample": 50})
    for overhead in (RuntimeOverhead(), RuntimeOverhead(bucket_bytes=0, overlap_transfers=False, action_seconds=1e-3)):
        own = cluster.model_copy(update={"runtime_overhead": overhead})
        for backend in ("torch", "torchgpipe"):
            auto.Auto()(make_problem(own, profile, 8, backend=backend))
    grown = [f.py_func for f in compiled.on_disk if known.get(f.py_func, 0) and len(f.signatures) > known[f.py_func]]
    assert not grown
