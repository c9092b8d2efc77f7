"""What README.md shows is what runs: its files are written, its commands and scripts executed, to the letter."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import ROOT, THREADS_LEFT, Ended, finish, free_port, start

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language and text."""

    language: str
    text: str

    @property
    def name(self) -> str:
        """The file that the first comment names."""
        return self.text.splitlines()[0].removeprefix("# ")

    @property
    def commands(self) -> list[list[str]]:
        """A shell block's lines as arguments, comments left out."""
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]


def blocks() -> list[Block]:
    return [Block(*found) for found in FENCE.findall((ROOT / "README.md").read_text("utf-8"))]


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


def test_every_block_is_one_that_is_checked() -> None:
    found = blocks()
    assert {block.language for block in found} == {"sh", "yaml", "python"}
    makefile = (ROOT / "Makefile").read_text()
    for block in found:
        if block.language == "sh":
            for words in block.commands:
                assert words[0] in ("make", "hetpipe", "torchrun", "python"), words
                if words[0] == "make":  # what CI runs, and what the demo's own test covers
                    assert f"\n{words[1]}:" in makefile
        else:
            assert re.fullmatch(r"[\w./-]+\.(yaml|py|json)", block.name), block.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for block in blocks():
        if block.language != "sh":
            (tmp_path / block.name).write_text(block.text)
            continue
        together: list[list[str]] = []
        for words in block.commands:
            if words[0] == "make":
                continue
            together.append(words)
            if "--nnodes" in words and len(together) < int(words[words.index("--nnodes") + 1]):
                continue
            for ended in run(together, tmp_path):
                assert ended.code == 0, f"{shlex.join(words)}\n{ended.out}\n{ended.err}"
                assert ended.leftover == []
                assert THREADS_LEFT not in ended.err, ended.err
            together = []
        assert together == []
    for picture in ("plan.svg", "front.svg"):
        assert (tmp_path / picture).stat().st_size > 1000
