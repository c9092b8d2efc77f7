"""Ranks that read chats, each in a process of its own, and what they took: `worker.py FOLDER CHATS RANKS first|next`. Run by its
path, on whichever checkout of hetpipe is on the path."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
LENGTH = 512


def prepare(folder: Path, count: int) -> None:
    """Make the chats and their tokenizer, unless they are there."""
    from tests.support.chats import WORDS, chat_of, lines, tokenizer

    if not (folder / "words").exists():
        tokenizer(folder / "words")
    file, drawn, words = folder / f"{count}.jsonl", random.Random(0), WORDS.split()
    if not file.exists():
        turns = [2 * drawn.randint(1, 4) for _ in range(count)]
        lines(file, [chat_of(*(" ".join(drawn.choices(words, k=drawn.randint(10, 60))) for _ in range(n))) for n in turns])


def processor_seconds() -> float:
    """Return the processor seconds of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def own_bytes() -> int:
    """The memory that this process shares with none."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def read(count: int) -> None:
    """Read the data as a rank does."""
    from transformers import AutoTokenizer  # noqa: F401  # whose import takes longer than the tokens of a small file

    from hetpipe.language.conversations import chat

    held, began, used = own_bytes(), time.perf_counter(), processor_seconds()
    data = chat(f"{count}.jsonl", "words", LENGTH)
    digests = data.train.digests()  # type: ignore[attr-defined]  # which a run compares
    print(
        json.dumps(
            {
                "wall": time.perf_counter() - began,
                "processor": processor_seconds() - used,
                "bytes": own_bytes() - held,
                "digest": digests[0],
            }
        )
    )


def main(folder: str, count: str, ranks: str, start: str) -> None:
    """Start the ranks, and print what they took as a line of JSON."""
    os.chdir(folder)
    prepare(Path(folder), int(count))
    if start == "first":
        shutil.rmtree(".hetpipe", ignore_errors=True)
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}
        for rank in range(int(ranks))
    ]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "read", count], env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for place in places
    ]
    found = [json.loads(process.communicate()[0]) for process in started]
    assert len({each["digest"] for each in found}) == 1
    most = {key: max(each[key] for each in found) for key in ("wall", "bytes")}
    print(
        json.dumps(
            {
                "data wall seconds": most["wall"],
                "data bytes": most["bytes"],
                "data processor seconds": sum(each["processor"] for each in found),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read(int(sys.argv[2]))
    else:
        main(*sys.argv[1:])
