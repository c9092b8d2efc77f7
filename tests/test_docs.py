"""What the documentation shows can be typed: files are of their formats, commands have these options, links lead somewhere.
`test_pages.py` runs it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import hetpipe
from docs import generate
from hetpipe.cli.commands import FORMATS, app
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.documents.profile import Profile
from hetpipe.planning.planner import make_plan
from hetpipe.planning.registry import partitioner_names
from hetpipe.predict.simulator import simulate
from tests.support.commands import ROOT, Command
from tests.support.pages import SPAN, Page, check_hetpipe, commands, linked, pages

OF_OTHERS = {
    "--cpus-per-task",
    "--device",
    "--ipc",
    "--master-port",
    "--shm-size",
    "--signal",
    "--ulimit",
    "--nnodes",
    "--chat-template",
    "--logdir",
    "--modelfile",
    "--lora-modules",
    "--max-lora-rank",
    "--max-restarts",
    "--master-addr",
    "--standalone",
    "--rdzv-backend",
    "--node-rank",
    "--nproc-per-node",
    "--rdzv-endpoint",
    "--rdzv-conf",
    "--requeue",
}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_block_is_what_it_says(page: Page, tmp_path: Path) -> None:
    for block in page.blocks:
        if block.language == "yaml":
            data = yaml.safe_load(block.text)
            FORMATS[data["format"].removeprefix("hetpipe.").split("/")[0]].parse(data, f"{page.name}, {block.name}")
        elif block.language == "python":
            ast.parse(block.text)
        elif block.language == "bash":
            (tmp_path / block.name).write_text(block.text)
            subprocess.run(["bash", "-n", tmp_path / block.name], check=True)
        elif block.language == "sh":
            assert block.commands
        else:
            assert block.language == "text"
            assert "hetpipe" not in block.text, "a command belongs into a block that is checked"
        if block.language in ("yaml", "python", "bash"):
            assert Path(block.name).suffix in (".yaml", ".py", ".slurm", ".sh"), f"its first comment names no file:\n{block.text}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_has_these_options(page: Page) -> None:
    makefile = (ROOT / "Makefile").read_text()
    files = {
        block.name
        for other in [page, *page.after, *(p for q in page.after for p in q.after)]
        for block in other.blocks
        if block.language in ("yaml", "python")
    }
    for words in commands(page):
        words = [word for word in words if word != "&"]
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile, words
        elif words[0] == "source":
            assert words[1] == ".venv/bin/activate"
        elif words[0] == "python":
            assert words[1] in files, words
        elif words[0] in ("torchrun", "srun"):
            if "hetpipe" in words:
                check_hetpipe(words[words.index("hetpipe") + 1 :])
            else:
                assert words[-1] in files, words
        else:
            assert words[0] == "hetpipe", words
            check_hetpipe(words[1:])
        assert [word for word in words if word.startswith("configs/") and not (ROOT / word).exists()] == []


def test_options_in_the_prose_exist() -> None:
    root: Any = typer.main.get_command(app)
    known = {
        name
        for _, command in generate.tree(root)
        for p in [*command.params, *root.params]
        for name in (*p.opts, *p.secondary_opts)
    }
    known |= {*OF_OTHERS, "--help"}
    for page in pages():
        for span in SPAN.findall(page.prose):
            if span.startswith(("--", "hetpipe ")):
                strange = [word for word in span.split() if word.startswith("--") and word.partition("=")[0] not in known]
                assert strange == [], (page.name, span)


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (7, 3)])
def test_a_failed_run_is_no_success_under_slurm(tmp_path: Path, codes: tuple[int, int]) -> None:
    """The scripts, with programs of that name: SLURM takes a script's exit code for the job's, and a plain `wait` gives 0."""
    scripts = {block.name: block.text for block in Page("docs/how-to/slurm.md").blocks if block.language == "bash"}
    (tmp_path / "hetpipe" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "hetpipe" / ".venv" / "bin" / "activate").touch()
    programs = {
        "srun": f'[[ "$*" == *--het-group=1* ]] && exit {codes[1]}; [[ "$*" == *"-m hetpipe train"* ]] && exit {codes[0]}',
        "scontrol": "echo node1; echo node2",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    kept = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    for name, text in scripts.items():
        done = subprocess.run(["bash", "-c", text], env=kept, check=False)
        assert (done.returncode == 0) == (codes[0] == 0 and (codes[1] == 0 or name == "job.slurm")), name
    assert set(scripts) == {"job.slurm", "unlike.slurm"}


def test_links_lead_somewhere() -> None:
    for page in linked():
        for link in page.links:
            if link.startswith(("https://", "http://")):
                continue
            path, _, anchor = link.partition("#")
            target = ((ROOT / page.name).parent / path).resolve() if path else ROOT / page.name
            assert target.exists(), (page.name, link)
            if anchor:
                assert anchor in Page(target.relative_to(ROOT).as_posix()).anchors, (page.name, link)


def numbers(text: str) -> tuple[float, ...]:
    """Such as "1, 2, 4" or "1 − 1e-9" or "20,000"."""
    found = list[float]()
    for part in re.sub(r"(?<=\d),(?=\d{3})", "", text).split(", "):
        whole, sign, rest = part.rpartition(" + " if " + " in part else " − ")
        found.append(float(whole or 0) + float(rest) * (-1 if "−" in sign else 1))
    return tuple(found)


def test_every_constant_of_the_planner_is_in_its_table() -> None:
    """With its value, unless that is long."""
    told, there = dict[tuple[str, str], str](), set[tuple[str, str]]()
    for line in (ROOT / "docs/planner.md").read_text("utf-8").partition("## Constants")[2].splitlines():
        stem = ""
        for of, name, value in re.findall(r"`(?:(\w+)\.)?([A-Z][A-Z_]*)`([^`]*)", line.split(" | ")[0]):
            stem = of or stem
            told[stem, name] = value.strip(",; ")
    for file in (ROOT / "partitioners").rglob("[!_]*.py"):
        module = import_module(".".join(("hetpipe", *file.relative_to(ROOT).with_suffix("").parts)))
        names = [x for x in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(x, ast.Name)]
        for name in {x.id for x in names if isinstance(x.ctx, ast.Store) and x.id.isupper()}:
            value = getattr(module, name, None)
            value = value if isinstance(value, tuple) else (value,)
            if all(type(x) in (int, float) for x in value):
                there.add((file.stem, name))
                said = told.get((file.stem, name), "nan")
                assert not said or numbers(said) == value, (file.stem, name)
    assert told.keys() == there


def test_every_page_is_in_the_site_and_every_partitioner_told() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    for page in pages()[1:]:
        assert page.name.removeprefix("docs/") in navigation, page.name
    for bench in sorted(ROOT.glob("bench/*/README.md")):
        assert bench.relative_to(ROOT).as_posix() in navigation
        assert f"({bench.relative_to(ROOT)})" in Page("docs/measurements.md").text.replace("../bench", "bench")
    listed = Page("docs/how-to/plan.md").text
    assert [name for name in partitioner_names() if f"`{name}`" not in listed] == []


class TestReference:
    """What mkdocs fills in."""

    @pytest.mark.parametrize("name", list(FORMATS))
    def test_an_example_of_every_key(self, name: str) -> None:
        documents = generate.examples(name)
        for document in documents:
            FORMATS[name].parse(document, f"the example of {name}")
        seen = set()
        for place, part in generate.parts(FORMATS[name]):
            if part in seen:
                continue
            seen.add(part)
            found = [value for document in documents for value in generate.values(document, place)]
            given = {key for value in found for key in value}
            keys = {generate.key_of(key, field) for key, field in part.model_fields.items()}
            assert keys - given == set(), f"{name}: no example at {place or 'the top'}"

    def test_every_format_and_command_has_its_section(self) -> None:
        formats = generate.filled(Page("docs/reference/formats.md").text)
        assert [name for name in FORMATS if f"\n## {name}\n" not in formats] == []
        assert "| `slowdown` | a number or names, each with a number | required | `4.0` |" in formats
        told = generate.filled(Page("docs/reference/commands.md").text)
        for path, command in generate.tree(typer.main.get_command(app)):
            section = told.split(f"\n## {path}\n")[1].split("\n## ")[0]
            assert [
                p.name
                for p in command.params
                if p.name != "help" and f"`{p.opts[0]}`" not in section and p.param_type_name == "option"
            ] == []
        assert "generated:" not in told + formats


def test_every_public_name_is_in_the_reference() -> None:
    told = Page("docs/reference/python.md").text
    public = [getattr(hetpipe, name) for name in hetpipe.__all__ if name != "__version__"]
    assert [f"{x.__module__}.{x.__name__}" for x in public if f"::: {x.__module__}.{x.__name__}\n" not in told] == []


def test_the_tutorials_job_is_the_first_of_readme() -> None:
    blocks = {block.name: yaml.safe_load(block.text) for block in Page("docs/tutorial.md").blocks if block.language == "yaml"}
    job = yaml.safe_load((ROOT / "configs/jobs/first.yaml").read_text())
    assert blocks["job.yaml"] == {**job, "cluster": "cluster.yaml"}
    assert blocks["cluster.yaml"] == yaml.safe_load((ROOT / job["cluster"]).read_text())


@pytest.mark.parametrize("name", ["plan", "plan-even"])
def test_a_picture_is_what_show_draws(run: Command, tmp_path: Path, name: str) -> None:
    folder, picture = ROOT / "configs" / "bert-large", tmp_path / f"{name}.svg"
    options = ["--profile", folder / "profile.json", "--cluster", folder / "cluster.yaml", "-o", picture]
    assert run("show", folder / f"{name}.json", *options).code == 0
    kept = ROOT / "docs" / "pictures" / picture.name
    assert picture.read_text("utf-8") == kept.read_text("utf-8"), "the drawing has changed: run 'make pictures'"


def test_what_is_said_of_the_picture_is_so() -> None:
    folder = ROOT / "configs" / "bert-large"
    profile, cluster = Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.yaml")
    plan, even = (Plan.load(folder / f"{name}.json") for name in ("plan", "plan-even"))
    equal = make_plan(profile, cluster, 64, partitioner="even-data-parallel")
    step, *others = (simulate(p, profile, cluster).step_seconds for p in (plan, even, equal))
    readme, concepts = Page("README.md").text, Page("docs/concepts.md").text
    assert [(replica.samples, len(replica.stages)) for replica in plan.replicas] == [(48, 1), (8, 1), (8, 1)]
    assert "takes 48 of the 64 samples of a step, and\neach 1080 Ti takes 8" in readme
    assert f"{others[0] / step:.1f} times as long" in concepts
    assert f"{others[1] / step:.1f} times as long" in readme


@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="the packages of the extra docs are not installed")
def test_the_site_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "how-to" / "own-loop.html").exists()
