from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import hetpipe.partitioners
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.partitioners.search import floor
from hetpipe.planning import registry
from hetpipe.study.changes import QUICK
from hetpipe.study.rules import equal_names, rule_names
from tests.support.strategies import make_cluster, make_problem, make_profile


def test_partitioners_are_found_by_name() -> None:
    names = registry.partitioner_names()
    assert {"auto", "chain", "even", "even-data-parallel", "exhaustive"} <= set(names)
    assert not any(name.startswith("-") for name in names)
    for name in names:
        assert registry.partitioner(name).name == name


def test_rules_are_listed_once_and_tried_by_auto_and_shown_beside_plans() -> None:
    from bench.partitioners.run import BASELINES

    names = [rule.name for rule in registry.rules()]
    assert names == sorted(names)
    others = set(registry.partitioner_names()) - set(names)
    assert others == {"auto", "chain", "exhaustive"}, "these search, all others are rules"
    assert sorted(rule.name for rule in floor.rules()) == names
    assert rule_names() == [*names, "chain"]
    assert list(BASELINES) == names
    assert {floor.FIRST, *QUICK, *equal_names()} <= set(names)


def test_a_rule_is_added_by_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In every list, and tried by `auto`."""
    (tmp_path / "mine.py").write_text(
        "from hetpipe.partitioners.even import Even\n\nclass Mine(Even):\n    name = 'mine'\n\npartitioner = Mine()\n"
    )
    (tmp_path / "searcher.py").write_text("from hetpipe.partitioners.chain import Chain\n\npartitioner = Chain()\n")
    before, said = floor.rules(), list[str]()
    monkeypatch.setattr(hetpipe.partitioners, "__path__", [*hetpipe.partitioners.__path__, str(tmp_path)])
    registry.rules.cache_clear()
    try:
        assert {rule.name for rule in floor.rules()} - {rule.name for rule in before} == {"mine"}
        assert "mine" in rule_names()
        assert "mine" in equal_names()
        problem = make_problem(make_cluster([{"a": 2}]), make_profile({"a": [1.0, 1.0]}), 2, progress=said.append)
        assert list(floor.simple_plans(problem))
        assert "trying the simple rules: mine" in said
    finally:
        registry.rules.cache_clear()
        for name in ("mine", "searcher"):
            sys.modules.pop(f"hetpipe.partitioners.{name}", None)


def test_models_and_data_are_found_by_name() -> None:
    assert "gpt" in registry.model_names()
    assert callable(registry.model("mlp"))
    assert {"text", "cifar10", "random_classification"} <= set(registry.dataset_names())
    assert callable(registry.dataset("random_classification"))


@pytest.mark.parametrize(
    ("call", "name", "message"),
    [
        (registry.partitioner, "autos", "unknown partitioner 'autos'; did you mean 'auto'. known: "),
        (registry.partitioner, "_space", "unknown partitioner '_space'"),
        (registry.model, "alexnett", "unknown model 'alexnett'; did you mean 'alexnet'"),
        (registry.dataset, "cifar", "unknown data 'cifar'; did you mean 'cifar10'"),
    ],
)
def test_unknown_names(call: object, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(name)  # type: ignore[operator]


def test_entry_points_add_names(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "hetpipe.partitioners.auto:Auto", "hetpipe.partitioners")
    broken = EntryPoint("broken", "no_such_package:Planner", "hetpipe.partitioners")
    monkeypatch.setattr(registry, "_all_points", lambda _: {"hetpipe.partitioners": (point, broken)})
    assert {"mine", "auto"} <= set(registry.partitioner_names())
    assert registry.partitioner("mine").name == "auto"
    with pytest.raises(InputError, match=r"cannot load 'broken' \(no_such_package:Planner\).*No module named"):
        registry.partitioner("broken")
    registry.check_partitioner("mine")
    registry.check_partitioner("auto")
    with pytest.raises(InputError, match="cannot load 'broken'"):
        registry.check_partitioner("broken")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": {"name": "gtp"}}, "unknown model 'gtp'; did you mean 'gpt'? known: alexnet, "),
        ({"data": {"name": "txt"}}, "unknown data 'txt'; did you mean 'text'? known: chat, cifar10, "),
        ({"plan": {"partitioner": "autos"}}, "unknown partitioner 'autos'; did you mean 'auto'? known: "),
    ],
)
def test_names_of_a_job_are_checked_without_importing_what_they_name(keys: dict[str, object], message: str) -> None:
    document = {
        "format": "hetpipe.job/1",
        "model": {"name": "gpt"},
        "data": {"name": "text"},
        "train": {"global_batch": 8, "steps": 1},
    }
    registry.check_names(Job.parse(document, "the job"))
    registry.check_names(Job.parse({**document, "model": {"target": "no_such_package:build"}}, "the job"))  # its own fault, later
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        registry.check_names(Job.parse({**document, **keys}, "the job"))


class TestTargets:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "hetpipe_test_net.py").write_text("SIZE = 3\ndef build(width=1):\n    return width\n")
        (tmp_path / "hetpipe_test_bad.py").write_text("raise RuntimeError('no GPU here')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in ("hetpipe_test_net", "hetpipe_test_bad"):
            monkeypatch.delitem(sys.modules, name, raising=False)

    def test_found(self) -> None:
        assert registry.load_target("hetpipe_test_net:build")(width=7) == 7

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("hetpipe_test_net", "cannot read the target 'hetpipe_test_net': write it as 'package.module:function'"),
            ("hetpipe_test_net:build()", "cannot read the target"),
            ("no_such_module:build", "cannot import 'no_such_module'.*ModuleNotFoundError"),
            ("hetpipe_test_bad:build", "cannot import 'hetpipe_test_bad'.*RuntimeError: no GPU here"),
            ("hetpipe_test_net:biuld", "has no 'biuld'.*did you mean 'build'"),
            ("hetpipe_test_net:SIZE", "is a int, expected a function"),
        ],
    )
    def test_wrong(self, target: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            registry.load_target(target)


@pytest.mark.parametrize("name", ["gpt2", "causal_lm"])
def test_a_model_without_the_package_that_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the modules are those that there were, also as attributes of the package that holds them."""
    for package in ("models", "hf"):
        monkeypatch.setattr(hetpipe, package, import_module(f"hetpipe.{package}"))
    for module in [module for module in sys.modules if module.startswith(("hetpipe.models", "hetpipe.hf"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        InputError,
        match=rf"^cannot import the model '{name}': the models causal_lm, .* need transformers: pip install 'hetpipe\[hf\]'$",
    ):
        registry.model(name)
