"""A study holds all that is shown of a plan: nothing that draws it plans anything, and nothing is planned twice."""

from collections import Counter
from pathlib import Path

import pytest

from hetpipe.planning import registry
from hetpipe.planning.partition import Partitioner
from hetpipe.show.page.report import report_page
from hetpipe.show.picture.partition import partition_canvas
from hetpipe.show.text_picture import TextPicture
from hetpipe.study import changes, make
from hetpipe.study.rules import equal_names, rule_names
from tests.support.commands import Command
from tests.support.plans_shown import demo, save_parts, three, whole
from tests.support.rooms import ROOT, imported

SHOW = ROOT / "hetpipe" / "show"
MAKES = {"hetpipe.study.make", "hetpipe.study.rules"}  # what plans; the command alone needs it


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each partitioner was asked for."""
    found, real = Counter[str](), registry.partitioner

    def counting(name: str) -> Partitioner:
        found[name] += 1
        return real(name)

    monkeypatch.setattr(registry, "partitioner", counting)
    return found


@pytest.mark.parametrize(("picture", "names"), [("plan.svg", equal_names()), ("plan.html", rule_names())])
def test_a_command_that_draws_runs_no_partitioner_twice(
    run: Command, tmp_path: Path, planned: Counter[str], picture: str, names: list[str]
) -> None:
    """It draws into a file and prints: the equal split is in both."""
    save_parts(three(), tmp_path)
    files = [str(tmp_path / name) for name in ("plan.json", "profile.json", "cluster.json", picture)]
    planned.clear()
    said = run("show", files[0], "--profile", files[1], "--cluster", files[2], "-o", files[3], "--no-what-if")
    assert "as fast as the equal split" in said.out
    assert planned == Counter(names)
    planned.clear()
    run("show", files[0], "--profile", files[1], "--cluster", files[2], "--json")
    assert not planned


def test_the_cluster_as_it_is_is_not_planned_again_by_the_rules_that_are_known(
    monkeypatch: pytest.MonkeyPatch, planned: Counter[str]
) -> None:
    monkeypatch.setattr(changes, "FEW_DEVICES", 0)
    shown = three()
    planned.clear()
    found = whole(shown, changes=True).changes
    assert found is not None
    others = len(found.plans) - 1
    assert planned == Counter(rule_names()) + Counter(dict.fromkeys(changes.QUICK, others))
    assert shown.problem is not None
    assert found.plans[0] == changes.make_changes(shown.plan, *shown.problem).plans[0], "as if it were planned again"


def test_what_draws_a_study_neither_plans_nor_simulates(monkeypatch: pytest.MonkeyPatch, planned: Counter[str]) -> None:
    study = whole(demo())
    planned.clear()
    monkeypatch.setattr("hetpipe.predict.simulator.simulate", None)
    monkeypatch.setattr(make, "simulate", None)
    assert '<section id="rules"' in report_page(study)
    assert partition_canvas(study.scene).to_svg()
    assert TextPicture(study.scene)
    assert not planned


def test_show_imports_no_planner_and_no_simulator() -> None:
    """But for the command, which makes the study. Of planning there is the format of fronts alone."""
    for file in SHOW.rglob("*.py"):
        for name in imported(file):
            if name.startswith("hetpipe.planning"):
                assert name == "hetpipe.planning.front", file
            assert name != "hetpipe.predict.simulator", file
            assert name not in MAKES or file == SHOW / "command.py", file


def test_no_file_of_show_has_to_import_inside_of_a_function() -> None:
    """All imports of the room, those inside of functions too, lead from file to file without a circle."""
    names = {f"hetpipe.{'.'.join(file.relative_to(ROOT / 'hetpipe').with_suffix('').parts)}": file for file in SHOW.rglob("*.py")}
    left = {name: {below for below in imported(file) if below in names} for name, file in names.items()}
    while done := {name for name, below in left.items() if not below & left.keys()}:
        left = {name: below for name, below in left.items() if name not in done}
    assert left == {}
