"""The three folders are one package, whichever way Python finds them."""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import hetpipe
import hetpipe.models
import hetpipe.partitioners

ROOT = Path(__file__).resolve().parent.parent


def run(code: str, folder: Path) -> str:
    """What the code prints in a fresh interpreter, in that folder, with nothing of hetpipe installed (-S)."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_folders_are_subpackages_without_installing(tmp_path: Path) -> None:
    found = run(
        "import hetpipe.models, hetpipe.partitioners\n"
        "print(hetpipe.models.__file__, hetpipe.partitioners.__file__, sep='\\n')",
        tmp_path,
    )
    assert found.split("\n") == [str(ROOT / "models/__init__.py"), str(ROOT / "partitioners/__init__.py")]


def test_a_users_own_models_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
    assert (
        run("import models, hetpipe.models; print(models.mine, models is hetpipe.models)", tmp_path)
        == "True False"
    )


def test_importing_hetpipe_imports_no_torch(tmp_path: Path) -> None:
    assert run("import hetpipe; print('torch' in sys.modules, hetpipe.__version__)", tmp_path).startswith(
        "False "
    )


def test_public_names_are_listed_and_unknown_ones_say_so() -> None:
    assert {"profile_model", "make_plan", "simulate", "Trainer", "wrap"} <= set(dir(hetpipe))
    with pytest.raises(AttributeError, match="no attribute 'plans'; public: Cluster, DataSplits"):
        hetpipe.plans  # noqa: B018


def test_constraints_pin_every_requirement_and_torch_first() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0].startswith("torch==")
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert all("==" in line and "+" not in line for line in lines)
    try:
        requirements = distribution("hetpipe").requires or []
    except PackageNotFoundError:
        pytest.skip("hetpipe is not installed: no list of requirements")
    names = {
        requirement.split(">")[0].split("=")[0].split("<")[0].split(";")[0] for requirement in requirements
    }
    assert {name.strip().lower().replace("_", "-") for name in names} <= pinned


def test_type_checker_links_lead_to_the_folders() -> None:
    for name in ("partitioners", "models"):
        assert (ROOT / "typings" / "hetpipe" / name).resolve() == ROOT / name
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(configuration["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == {
        "models",
        "partitioners",
    }
    assert (ROOT / "hetpipe" / "py.typed").exists()


def test_what_the_report_is_made_of_is_installed() -> None:
    there = {path.name for path in (ROOT / "hetpipe/show/page").iterdir() if path.suffix in (".css", ".js")}
    (declared,) = [line for line in (ROOT / "setup.py").read_text().splitlines() if "package_data=" in line]
    assert there == {"style.css", "script.js"}
    assert all(f'"{name}"' in declared for name in there)
