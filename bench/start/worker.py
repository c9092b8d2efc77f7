"""Two starts of `hetpipe finetune` until their first step, the second in another folder of output: processor seconds of all their
processes by part, as the lines of the log name them, and the most resident memory that one of them had.

    python bench/start/worker.py FOLDER RANKS
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.05
PARTS = {
    "starting: importing": "imports",
    "starting: reading": "data",
    "starting: building the data": "data",
    "tokenizing": "data",
    "waiting for the data": "data",
    "starting: building the model": "model",
    "trying": "looks",
    "measuring": "measuring",
    "waiting for the measurements": "measuring",
    "planning": "planning",
    "starting: loading": "loading",
    "training": "first step",
}


class Watched:
    """The processes below one: what each has used, also of those that have ended."""

    def __init__(self, root: int) -> None:
        self.root, self.seconds, self.most = root, dict[int, float](), 0.0

    def look(self) -> float:
        """Processor seconds of all so far."""
        parents = dict[int, int]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    status = (entry / "status").read_text()
                except OSError:
                    continue
                pid = int(entry.name)
                parents[pid] = int(fields[1])
                if pid in self.seconds or pid == self.root or parents[pid] in self.seconds:
                    self.seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
                    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                    self.most = max(self.most, float(peak[1]) * 1024 if peak else 0.0)
        return sum(self.seconds.values())


def start(folder: Path, ranks: int, output: str) -> dict[str, float]:
    """One start, which is stopped after its first step."""
    devices = ",".join(f"d{rank}:2GiB:1" for rank in range(ranks))
    command = [
        sys.executable,
        "-m",
        "hetpipe",
        "finetune",
        "model",
        "chats.jsonl",
        "-o",
        output,
        "--emulate",
        devices,
        "--global-batch",
        "8",
        "--length",
        "425",
        "--lr",
        "1e-3",
    ]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
    )
    watched, lines = Watched(process.pid), list[str]()
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    found, part, seen, before = dict[str, float](), "imports", 0, 0.0
    while process.poll() is None and not any(re.match(r"training: [1-9]", line) for line in lines):
        now = watched.look()
        found[part] = found.get(part, 0.0) + now - before
        before = now
        for line in lines[seen:]:
            seen += 1
            part = next((name for words, name in PARTS.items() if line.startswith(words)), part)
        time.sleep(LOOK_SECONDS)
    found[part] = found.get(part, 0.0) + watched.look() - before
    wall = time.monotonic() - began
    if not any(re.match(r"training: [1-9]", line) for line in lines):
        raise RuntimeError("".join(lines[-30:]))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    total = sum(found.values())
    return found | {"all": total, "without measuring": total - found.get("measuring", 0.0), "wall": wall, "peak": watched.most}


def main(given: Path, ranks: int) -> dict[str, float]:
    """Both starts, in a copy of the folder."""
    found = dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "work")
        shutil.copytree(given, folder)
        for output in ("first", "second"):
            found |= {f"{output}: {name}": value for name, value in start(folder, ranks, output).items()}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
