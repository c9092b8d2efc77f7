"""What is imported, and when: commands show their help, and refuse what is wrong, without what only their work needs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from hetpipe.cli.commands import app
from tests.support.commands import ROOT

HEAVY = ("torch", "numba", "llvmlite", "transformers", "scipy", "highspy", "matplotlib", "resvg_py", "hetpipe.partitioners")
RANK = ("numba", "llvmlite", "scipy", "matplotlib", "resvg_py", "hetpipe.partitioners", "typer")
LOOK = "; import json, sys; print(json.dumps([name for name in {names} if name in sys.modules]))"


def imported(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of these modules a new process has after the code."""
    done = subprocess.run(
        [sys.executable, "-c", code + LOOK.format(names=names)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def commands() -> list[list[str]]:
    root: Any = typer.main.get_command(app)
    return [[], *([name] for name in root.commands)]


def test_help_needs_neither_torch_nor_the_planner() -> None:
    """All commands run in one process: what one of them imports stays."""
    run = "import contextlib\nfrom typer.testing import CliRunner\nfrom hetpipe.cli.commands import app\n"
    run += f"assert not any(CliRunner().invoke(app, [*line, '--help']).exit_code for line in {commands()})\npass"
    assert imported(run, HEAVY) == []


@pytest.mark.parametrize("line", [["plan"], ["train", "--no-such-option"], ["what-if", "llama-7b"], ["no-such-command"]])
def test_a_wrong_usage_is_refused_without_them(line: list[str]) -> None:
    run = "from typer.testing import CliRunner\nfrom hetpipe.cli.commands import app\n"
    run += f"assert CliRunner().invoke(app, {line}).exit_code == 2\npass"
    assert imported(run, HEAVY) == []


def test_the_package_imports_none_of_its_parts() -> None:
    assert imported("import hetpipe", (*HEAVY, "numpy", "pydantic", "typer", "hetpipe.documents")) == []


def test_what_ranks_run_needs_no_planner() -> None:
    assert imported("from hetpipe.training.start import train_rank", RANK) == []
