"""What README.md and docs/ show is what runs: files are written, commands and scripts executed, to the letter, page by page."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, THREADS_LEFT, Command, Ended, finish, free_port, start
from tests.support.jobs import Folder
from tests.support.pages import SPAN, Page, commands, pages

ALWAYS = {"README.md"}  # followed by `make test`; `make test-all` follows all
FOLLOWED = [page for page in pages() if any(block.language == "sh" for block in page.blocks)]


def start_together(commands: list[list[str]], folder: Path) -> list[Ended]:
    """Commands that start together: one, or the agents of one torchrun job."""
    port, mark = str(free_port()), str(folder)
    started = []
    for number, words in enumerate(commands):
        words = [{"HOST": "127.0.0.1", "29500": port}.get(word, word) for word in words]
        program = {"hetpipe": ["-m", "hetpipe"], "torchrun": ["-m", "torch.distributed.run"], "python": []}[words[0]]
        if words[0] == "torchrun" and "--nnodes" not in words:
            words[1:1] = ["--master-port", port]
        started.append(start([*program, *words[1:]], folder, mark, f"command{number}"))
    return [finish(p, folder, mark, f"command{number}") for number, p in enumerate(started)]


def here(run: Command, words: list[str], folder: Path) -> None:
    """`hetpipe …` in this process, whose server of ranks has imported what they need; it forgets the modules of the folder."""
    with contextlib.chdir(folder):
        ended = run(*words[1:])
    assert ended.code == 0, f"{shlex.join(words)}\n{ended.out}\n{ended.err}"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]


def follow(page: Page, folder: Path, run: Command) -> None:
    """Do what a page says, in a folder."""
    together: list[list[str]] = []
    for block in page.blocks:
        if block.language in ("yaml", "python", "bash"):
            (folder / block.name).write_text(block.text)
        for words in block.commands if block.language == "sh" else ():
            if words[0] in ("make", "source"):  # what CI runs, and what the demo's own test covers
                continue
            if words[0] == "hetpipe" and "--watch" not in words:  # which looks at the terminal
                here(run, words, folder)
                continue
            together.append(words)
            if "--nnodes" in words and len(together) < int(words[words.index("--nnodes") + 1]):
                continue
            for ended in start_together(together, folder):
                assert ended.code == 0, f"{shlex.join(words)}\n{ended.out}\n{ended.err}"
                assert ended.leftover == []
                assert THREADS_LEFT not in ended.err, ended.err
                assert "--watch" not in words or re.search(r"% busy, [\d.]+ \w?i?B of [\d.]+ MiB", ended.err), ended.err
            together = []
    assert together == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where pages were followed."""
    return {"": tmp_path_factory.mktemp("pages")}


def followed(page: Page, folders: dict[str, Path], run: Command) -> Path:
    """The folder in which a page was followed, behind those that it comes after."""
    if page.name not in folders:
        folder = folders[""] / page.name.replace("/", "-")
        shutil.copytree(ROOT / "configs", folder / "configs")
        for before in page.after:
            shutil.copytree(followed(before, folders, run), folder, dirs_exist_ok=True)
        follow(page, folder, run)
        folders[page.name] = folder
    return folders[page.name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.name in ALWAYS else pytest.mark.thorough) for page in FOLLOWED],
    ids=lambda page: page.name,
)
def test_a_page_runs_from_top_to_bottom(page: Page, folders: dict[str, Path], run: Command) -> None:
    folder = followed(page, folders, run)
    pictures = {
        word
        for block in page.blocks
        if block.language == "sh"
        for words in block.commands
        for word in words
        if word.endswith(".svg")
    }
    for picture in pictures:
        assert (folder / picture).stat().st_size > 1000


IN_PROSE = [
    words
    for words in commands(Page("README.md"))
    if words[0] == "hetpipe"
    and len(words) > 2
    and words not in [own for block in Page("README.md").blocks for own in block.commands]
]


def test_every_command_of_readme_is_run() -> None:
    """Those in its blocks are, with their page, and `make` by itself; what is named only, such as `hetpipe schema`, is none."""
    assert any(words[1] == "what-if" for words in IN_PROSE)
    assert Page("README.md") in FOLLOWED
    assert {page.name for page in FOLLOWED} > ALWAYS


@pytest.mark.parametrize("words", IN_PROSE, ids=" ".join)
def test_a_command_in_readmes_prose_ends_with_what_it_promises(run: Command, tmp_path: Path, words: list[str]) -> None:
    """It fitted nothing, and ended with 3."""
    here(run, words, tmp_path)
    if words[1] == "what-if":
        with contextlib.chdir(tmp_path):
            rows = json.loads(run(*words[1:], "--json").out)["rows"]
        assert len(rows) == 1 + words.count("--add")
        assert all(row["plan"] is not None for row in rows)
        assert rows[1]["tokens_per_second"] > rows[0]["tokens_per_second"]


@pytest.mark.slow
def test_what_a_run_writes_is_told(folder: Folder, run: Command) -> None:
    assert run("train", "job.yaml", "--set", "log.folder=log").code == 0
    log = folder.path / "log"
    told = set(SPAN.findall(Page("docs/reference/formats.md").prose))
    for text in ((log / "metrics.jsonl").read_text().splitlines()[-1], (log / "summary.json").read_text()):
        assert set(json.loads(text)) - told == set()
    assert {file.name for file in log.iterdir() if not file.name.startswith(".")} - told == set()
