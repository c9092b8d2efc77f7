"""What SECURITY.md says of files: data are read as data, and code runs only where somebody has named it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.support.commands import ROOT

# Between processes of one run, or one command, over a pipe or socket that only they hold
PICKLES = {"hetpipe/language/reading/workers.py", "hetpipe/processes/ranks/forkserver.py", "hetpipe/processes/ranks/launch.py"}
FORBIDDEN = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load", "np.load", "numpy.load"}
SAFE = {"torch.load": "weights_only=True", "np.lib.format.read_array": "allow_pickle=False"}  # call: what makes it safe


def found() -> Iterator[tuple[str, str, set[str]]]:
    """(file, what is called, its keywords as they are written) of each call in hetpipe."""
    for folder in ("hetpipe", "models", "partitioners"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    words = {f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords}
                    yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), words


@cache
def calls() -> list[tuple[str, str, set[str]]]:
    return list(found())


def test_nothing_runs_what_stands_in_a_file() -> None:
    assert {(file, name) for file, name, words in calls() if name in FORBIDDEN or "shell=True" in words} == set()
    assert {(file, name) for file, name, words in calls() if name in SAFE and SAFE[name] not in words} == set()
    assert {file for file, name, _ in calls() if name in ("pickle.load", "pickle.loads")} == PICKLES
    assert {file for file, name, _ in calls() if name == "yaml.load"} == {"hetpipe/files/parsing.py"}
    assert {name for _, name, _ in calls()} >= SAFE.keys(), "the test looks for calls that there are"


def test_code_of_others_runs_only_where_it_is_named() -> None:
    """transformers runs the code of a folder only where the model's args say so, and that of a tokenizer never."""
    trusting = {word for _, name, words in calls() if "from_pretrained" in name for word in words if "trust" in word}
    assert trusting == {"trust_remote_code=False"}
    text = " ".join((ROOT / "SECURITY.md").read_text("utf-8").split())
    for said in ("`target: package.module:function`", "`trust_remote_code: true`", "Packages that you installed"):
        assert said in text
