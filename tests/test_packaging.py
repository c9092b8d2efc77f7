"""The three folders are one package, whichever way Python finds them."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml

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
        "import hetpipe.models, hetpipe.partitioners\nprint(hetpipe.models.__file__, hetpipe.partitioners.__file__, sep='\\n')",
        tmp_path,
    )
    assert found.split("\n") == [str(ROOT / "models/__init__.py"), str(ROOT / "partitioners/__init__.py")]


def test_a_users_own_models_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = True\n")
    assert run("import models, hetpipe.models; print(models.mine, models is hetpipe.models)", tmp_path) == "True False"


def test_importing_hetpipe_imports_no_torch(tmp_path: Path) -> None:
    assert run("import hetpipe; print('torch' in sys.modules, hetpipe.__version__)", tmp_path).startswith("False ")


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
    names = {re.split(r"[\[<>=;]", requirement)[0] for requirement in requirements}
    assert {name.strip().lower().replace("_", "-") for name in names} <= pinned


@pytest.mark.skipif(not (ROOT / "typings").exists(), reason="a source distribution has no links")
def test_type_checker_links_lead_to_the_folders() -> None:
    for name in ("partitioners", "models"):
        assert (ROOT / "typings" / "hetpipe" / name).resolve() == ROOT / name
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(configuration["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == {"models", "partitioners"}
    assert (ROOT / "hetpipe" / "py.typed").exists()


def tracked() -> list[str]:
    """The files of a checkout, without links."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout: nobody knows which files are part of it")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of the files that are tracked, or would be."""
    folder, names = tmp_path_factory.mktemp("checkout"), tracked()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    code = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def test_the_source_distribution_holds_what_a_checkout_does(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert set(tracked()) - held == set()
    assert [name for name in held if name.endswith(".pyc") or name.startswith("typings/")] == []


def test_the_wheel_holds_every_module_and_runs_by_itself(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        held = set(archive.namelist())
        archive.extractall(tmp_path)
    modules = [name for name in tracked() if name.endswith(".py")]
    own = {name for name in modules if name.startswith("hetpipe/")}
    own |= {f"hetpipe/{name}" for name in modules if name.startswith(("models/", "partitioners/"))}
    page = {
        "hetpipe/diffusion/kinds.yaml",
        "hetpipe/diffusion/popular.yaml",
        "hetpipe/documents/guesses.yaml",
        "hetpipe/exchange/configs/axolotl.yaml",
        "hetpipe/exchange/configs/llamafactory.yaml",
        "hetpipe/show/glossary.md",
        "hetpipe/show/page/style.css",
        "hetpipe/show/page/script.js",
    }
    page |= {f"hetpipe/whatif/{name}" for name in ("cards.yaml", "popular.yaml", "zorse.json", "zorse-LICENSE.txt")}
    assert own | page | {"hetpipe/py.typed", "hetpipe/models/README.md"} == {name for name in held if ".dist-info/" not in name}
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import hetpipe.partitioners.even as e; print(e.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env={})
    assert done.stdout.strip() == str(tmp_path / "hetpipe" / "partitioners" / "even.py"), done.stderr


def test_the_citation_and_the_changelog_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (citation["version"], citation["cff-version"]) == (hetpipe.__version__, "1.2.0")
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    assert changes[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(hetpipe.__version__)}\] - \d{{4}}-\d{{2}}-\d{{2}}", changes[1])


def test_the_metadata_say_what_hetpipe_is_and_where_it_runs(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        found = Parser().parsestr(archive.read(place).decode("utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (found["Name"], found["Version"], found["Requires-Python"]) == ("hetpipe", hetpipe.__version__, ">=3.11")
    assert found["Author"] == citation["authors"][0]["name"]
    assert (found["License-Expression"] or found["License"]) == citation["license"]
    assert any(name.endswith("/LICENSE") for name in names)
    assert set(citation["keywords"]) <= set(found["Keywords"].split(","))
    releases = [kind.rpartition(" ")[2] for kind in found.get_all("Classifier") or [] if ":: Python :: 3." in kind]
    matrix = re.search(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert matrix is not None
    assert matrix[1].split() == [f"python{release}" for release in releases]
    assert all(address.partition(", ")[2].startswith("https://") for address in found.get_all("Project-URL") or [])
    assert {"viz", "hf", "lora", "text", "test"} <= set(found.get_all("Provides-Extra") or [])


def test_workflows_run_what_ci_runs_and_forms_are_yaml() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run", "make docs"]
    for form in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")):
        content = yaml.safe_load(form.read_text("utf-8"))
        assert form.name == "config.yml" or {"name", "description", "body"} <= set(content), form.name


def test_what_the_report_is_made_of_is_installed() -> None:
    there = {path.name for path in (ROOT / "hetpipe/show/page").iterdir() if path.suffix in (".css", ".js")}
    declared = (ROOT / "setup.py").read_text().partition("package_data=")[2].partition("}")[0]
    assert there == {"style.css", "script.js"}
    assert all(f'"{name}"' in declared for name in there)
