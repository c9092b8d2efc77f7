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

from tests.commands import ROOT, THREADS_LEFT, Command, Ended, finish, free_port, start
from tests.pages import SPAN, Page, pages

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
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Page, folders: dict[str, Path], run: Command) -> None:
    folder = followed(page, folders, run)
    pictures = {word for block in page.blocks if block.language == "sh" for words in block.commands
                for word in words if word.endswith(".svg")}  # fmt: skip
    for picture in pictures:
        assert (folder / picture).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_run_writes_is_told(folders: dict[str, Path], run: Command) -> None:
    log = followed(Page("docs/tutorial.md"), folders, run) / "runs" / "first"
    told = set(SPAN.findall(Page("docs/reference/formats.md").prose))
    for text in ((log / "metrics.jsonl").read_text().splitlines()[-1], (log / "summary.json").read_text()):
        assert set(json.loads(text)) - told == set()
    assert {file.name for file in log.iterdir() if not file.name.startswith(".")} - told == set()
