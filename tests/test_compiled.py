"""What numba keeps on disk."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hetpipe.predict import compiled


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
        hits.append(sum(function.stats.cache_hits.values()))
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
