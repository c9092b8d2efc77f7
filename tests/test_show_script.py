"""`python -m hetpipe.show` does what `hetpipe show` does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.plans_shown import save_parts, three

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *command: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_script_prints_and_draws_what_the_command_does(tmp_path: Path) -> None:
    save_parts(three(), tmp_path)
    options = ("plan.json", "--profile", "profile.json", "--cluster", "cluster.json", "-o")
    script, command = run(tmp_path, "hetpipe.show", *options, "a.svg"), run(tmp_path, "hetpipe", "show", *options, "b.svg")
    assert (script.returncode, command.returncode) == (0, 0), script.stderr + command.stderr
    assert script.stdout == command.stdout
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert max(map(len, script.stdout.splitlines())) <= 80


def test_a_narrow_terminal_gets_the_table(tmp_path: Path) -> None:
    save_parts(three(), tmp_path)
    options = ("plan.json", "--profile", "profile.json", "--cluster", "cluster.json")
    wide, narrow = (run(tmp_path, "hetpipe", "show", *options, columns=columns).stdout for columns in (80, 40))
    assert max(map(len, narrow.splitlines())) <= 40
    assert ("optimizer  · idle" in wide, "optimizer  · idle" in narrow) == (True, False), "the timeline needs room, too"
    assert "no picture: it needs 60 columns" in " ".join(narrow.split())


def test_wrong_input_is_said_in_a_line_with_exit_code_2(tmp_path: Path) -> None:
    found = run(tmp_path, "hetpipe.show", "missing.json")
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1
