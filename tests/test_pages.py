"""What README.md and docs/ show is what runs: files are written, commands and scripts executed, to the letter, page by page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.commands import ROOT, THREADS_LEFT, Ended, finish, free_port, start
from tests.pages import SPAN, Page, pages

FOLLOWED = [page for page in pages() if any(block.language == "sh" for block in page.blocks)]


def run(commands: list[list[str]], folder: Path) -> list[Ended]:
    """Commands that start together: one, or the agents of one torchrun job."""
    port, mark = str(free_port()), str(folder)
    started = []
    for number, words in enumerate(commands):
        words = [{"HOST": "127.0.0.1", "29500": port}.get(word, word) for word in words]
        program = {
            "hetpipe": ["-m", "hetpipe"],
            "torchrun": ["-m", "torch.distributed.run"],
            "python": [],
        }[words[0]]
        if words[0] == "torchrun" and "--nnodes" not in words:
            words[1:1] = ["--master-port", port]
        started.append(start([*program, *words[1:]], folder, mark, f"command{number}"))
    return [finish(p, folder, mark, f"command{number}") for number, p in enumerate(started)]


def follow(page: Page, folder: Path) -> None:
    """Do what a page says, in a folder."""
    together: list[list[str]] = []
    for block in page.blocks:
        if block.language in ("yaml", "python", "bash"):
            (folder / block.name).write_text(block.text)
        for words in block.commands if block.language == "sh" else ():
            if words[0] in ("make", "source"):  # what CI runs, and what the demo's own test covers
                continue
            together.append(words)
            if "--nnodes" in words and len(together) < int(words[words.index("--nnodes") + 1]):
                continue
            for ended in run(together, folder):
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


def followed(page: Page, folders: dict[str, Path]) -> Path:
    """The folder in which a page was followed, behind those that it comes after."""
    if page.name not in folders:
        folder = folders[""] / page.name.replace("/", "-")
        shutil.copytree(ROOT / "configs", folder / "configs")
        for before in page.after:
            shutil.copytree(followed(before, folders), folder, dirs_exist_ok=True)
        follow(page, folder)
        folders[page.name] = folder
    return folders[page.name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page: Page, folders: dict[str, Path]) -> None:
    folder = followed(page, folders)
    pictures = {word for block in page.blocks if block.language == "sh" for words in block.commands
                for word in words if word.endswith(".svg")}  # fmt: skip
    for picture in pictures:
        assert (folder / picture).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_a_run_writes_is_told(folders: dict[str, Path]) -> None:
    log = followed(Page("docs/tutorial.md"), folders) / "runs" / "first"
    told = set(SPAN.findall(Page("docs/reference/formats.md").prose))
    for text in ((log / "metrics.jsonl").read_text().splitlines()[-1], (log / "summary.json").read_text()):
        assert set(json.loads(text)) - told == set()
    assert {file.name for file in log.iterdir() if not file.name.startswith(".")} - told == set()
