"""What numba keeps on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hetpipe.partitioners import auto
from hetpipe.predict import compiled
from hetpipe.spec.cluster import RuntimeOverhead
from hetpipe.spec.plan import Plan
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
        assert function(2.0) == 4.0
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


def test_a_process_beside_compiles_what_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started once: not where the functions are kept, and not where numba finds no folder."""
    path = tmp_path / "halving.py"
    path.write_text("from hetpipe.predict.compiled import compiled, once, get_ready\n\n\n@compiled\ndef half(x):\n"
                    "    return x / 2\n"
                    "\n\n@once\ndef ready():\n    get_ready(lambda: half(2.0))\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    function, started = import_module("halving").half, list[object]()
    own = subprocess.Popen

    def start(*given: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(given)
        return own(*given, **named)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    compiled.compiled_beside("halving", function)()
    assert len(started) == 1
    assert function(3.0) == 1.5
    assert sum(function.by_numba.stats.cache_hits.values()) == 1
    compiled.compiled_beside("halving", function)()
    assert len(started) == 1


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
