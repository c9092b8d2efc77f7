"""Names in files may hold anything: a terminal, a browser and an image viewer show them and obey none."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.documents.profile import Profile
from hetpipe.exchange.export import TARGETS
from hetpipe.files.messages import clipped, visible
from hetpipe.files.screen import Screen
from hetpipe.processes.progress import say
from hetpipe.show.tables import beside_table, profile_table
from tests.support.commands import Command
from tests.support.jobs import Folder

EVIL = "\x1b]0;mine\x07\x1b[31m\r\x7f\x9b2J\u202e"
SEEN = r"\x1b]0;mine\x07\x1b[31m\r\x7f\x9b2J\u202e"
MARKUP = "[red]:smile:[/x]"
OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def renamed(value: Any, names: dict[str, str]) -> Any:
    """The document with these texts, wherever they stand as a key, a value or a node of a device."""
    if isinstance(value, dict):
        return {renamed(key, names): renamed(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [renamed(inner, names) for inner in value]
    name, slash, index = value.partition("/") if isinstance(value, str) else (value, "", "")
    return f"{names.get(name, name)}{slash}{index}" if slash else names.get(name, value)


@pytest.fixture
def evil(folder: Folder) -> Folder:
    """Every name in profile, cluster and plan tells the terminal something."""
    kept = re.compile(r"\s")
    words = ["mlp", "cpu", "n0", "n1", *(layer["name"] for layer in folder.read("profile.json")["layers"])]
    names = {word: word + (kept.sub("", EVIL) if word in ("n0", "n1") else EVIL + MARKUP) for word in words}
    for name in ("profile.json", "plan.json"):
        folder.write(name, renamed(folder.read(name), names))
    plan = folder.read("plan.json")
    first = plan["replicas"][0]
    folder.write("one.json", {**plan, "replicas": [first], "global_batch": sum(first["microbatch_sizes"]), "predicted": None})
    cluster = renamed(yaml.safe_load((folder.path / "cluster.yaml").read_text()), names)
    for node in cluster["nodes"]:
        node["host"] = f"host-of-{node['name']}"
    folder.write("cluster.yaml", cluster)
    return folder


GIVEN = ("--profile", "profile.json", "--cluster", "cluster.yaml")
COMMANDS = [
    ("plan", *GIVEN, "--global-batch", 12),
    ("plan", *GIVEN, "--global-batch", 12, "--pareto"),
    ("plan", *GIVEN, "--global-batch", 12, "--partitioner", "even-data-parallel"),
    ("plan", *GIVEN, "--global-batch", 12, "--precision", "cpuu=fp32"),
    ("simulate", "--plan", "plan.json", *GIVEN),
    ("simulate", "--plan", "plan.json", *GIVEN, "--json"),
    ("show", "plan.json"),
    ("show", "plan.json", *GIVEN, "-o", "plan.svg"),
    ("show", "plan.json", *GIVEN, "-o", "plan.html"),
    ("show", "plan.json", "--cluster", "other.yaml"),
    ("simulate", "--plan", "plan.json", "--profile", "small.json", "--cluster", "cluster.yaml"),
    *[("export", "one.json", "--to", target, "--cluster", "cluster.yaml", "--json") for target in TARGETS],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(map(str, arguments))[-40:])
def test_no_command_tells_the_terminal_what_a_name_says(run: Command, evil: Folder, arguments: tuple[str, ...]) -> None:
    cluster = yaml.safe_load((evil.path / "cluster.yaml").read_text())
    evil.write("other.yaml", {**cluster, "nodes": cluster["nodes"][1:]})
    profile = evil.read("profile.json")
    evil.write("small.json", {**profile, "measurements": [{**profile["measurements"][0], "device_type": EVIL}]})
    before = {path.name for path in evil.path.iterdir()}
    found = run(*arguments)
    assert found.code == (2 if {"other.yaml", "small.json", "cpuu=fp32"} & {*arguments} else 0), found.err
    made = [path.read_text() for path in evil.path.iterdir() if path.name not in before and path.suffix in (".svg", ".html")]
    assert len(made) == ("-o" in arguments)
    for text in (found.out, found.err, *made):
        assert OBEYED.search(text) is None, text[max(0, OBEYED.search(text).start() - 80) :][:160]  # type: ignore[union-attr]
    whole = found.out + found.err + "".join(made)
    assert r"\x1b" in whole or r"\u001b" in whole


def test_a_profile_is_printed_as_it_is_written(evil: Folder) -> None:
    """Brackets are no markup: rich took a name like [/x] for a fault of its own."""
    profile = Profile.load(evil.path / "profile.json")
    out = io.StringIO()
    screen = Screen(file=out, width=400)
    screen.print(profile_table(profile))
    screen.print(beside_table(profile))
    screen.print(f"{EVIL}{MARKUP}", highlight=False)
    assert OBEYED.search(out.getvalue()) is None
    assert MARKUP in out.getvalue()


def test_colours_stay() -> None:
    out = io.StringIO()
    Screen(file=out, force_terminal=True, color_system="standard").print(f"a{EVIL}", style="red", highlight=False)
    assert out.getvalue().startswith("\x1b[31ma\\x1b]0;mine")


def test_what_is_visible_stays() -> None:
    for text in ("", "a b\n\tc", "é 🙂 层 ½ µs", "\u200c\u200d", '{"a": 1}'):
        assert visible(text) == text
    assert visible(EVIL) == SEEN
    assert visible("\ud800\u2028\ufeff\0") == r"\ud800\u2028\ufeff\x00"


def test_messages_are_visible(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    say(f"device {EVIL}")
    assert capsys.readouterr().err == f"device {SEEN}\n"
    assert clipped(f"a{EVIL}\nb").splitlines()[-1] == "b"
    assert OBEYED.search(clipped(EVIL)) is None
    assert json.dumps(visible("\n")) == '"\\n"'
