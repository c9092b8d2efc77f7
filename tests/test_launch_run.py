"""`hetpipe launch --run`: the nodes train and end together, whichever of them dies."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ended, finish, free_port, processes, start
from tests.support.jobs import Folder


class TestRun:
    """Two nodes on this machine. In place of ssh a script runs the command in the node's own folder."""

    @staticmethod
    def launch(folder: Folder, **sections: Any) -> tuple[subprocess.Popen[bytes], str]:
        folder.ready((1, 1), ({"cuts": [6], "sizes": [4, 4]}, {"cuts": [6], "sizes": [2, 2]}), **sections)
        ssh = folder.path / "ssh.sh"
        ssh.write_text(f'#!/bin/sh\ncd {shlex.quote(str(folder.path))}/"$1" && shift && exec sh -c "$*"\n')
        ssh.chmod(0o755)
        for node in ("n0", "n1"):
            (folder.path / node).mkdir()
            for name in ("job.yaml", "cluster.yaml", "plan.json", "profile.json"):
                (folder.path / node / name).write_bytes((folder.path / name).read_bytes())
        mark = str(folder.path)
        options = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--folder", ".", "--ssh", str(ssh), "--run"]
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        words = ["-m", "hetpipe", "launch", "job.yaml", "--to", "hosts", "--torchrun", torchrun, *options]
        return start(words, folder.path, mark), mark

    @pytest.mark.slow
    def test_two_hosts_train(self, folder: Folder) -> None:
        process, mark = self.launch(folder)
        ended = finish(process, folder.path, mark)
        assert (ended.code, ended.leftover) == (0, []), ended.err + ended.out
        assert len(folder.read("log/summary.json")["losses"]) == 7
        assert "starting n0 (n0), n1 (n1)" in ended.err
        assert all(line.startswith(("n0: ", "n1: ")) for line in ended.out.splitlines())
        assert re.search(r"^n0: .*\bloss\b", ended.out, re.MULTILINE), ended.out

    def stopped(self, folder: Folder, number: int, victim: bytes) -> Ended:
        """What the command says, if a signal is sent in the midst of the run to the process of node n1 whose command line has
        this, or without it to the command itself."""
        process, mark = self.launch(folder, train={"global_batch": 12, "steps": 100_000, "dtype": "float64"})
        try:
            deadline = time.monotonic() + 120
            while not (folder.path / "log/metrics.jsonl").exists():
                assert process.poll() is None, (folder.path / "command.err").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            pid = self.of_second_node(mark, folder.path, victim) if victim else process.pid
            os.kill(pid, number)
        except BaseException:
            process.kill()
            raise
        return finish(process, folder.path, mark)

    @staticmethod
    def of_second_node(mark: str, folder: Path, words: bytes) -> int:
        """The first process that was started in the folder of n1 with these words."""
        there = [Path(f"/proc/{pid}") for pid in processes(mark)]
        found = [
            each for each in there if (each / "cwd").readlink() == folder / "n1" and words in (each / "cmdline").read_bytes()
        ]
        return min(int(each.name) for each in found if b"sh\0-c" not in (each / "cmdline").read_bytes())

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("victim", "code", "node"),
        [pytest.param(b"-u\0-m\0hetpipe", 1, "n[01]", marks=pytest.mark.thorough), (b"--node-rank", 137, "n1")],
    )
    def test_a_killed_host_ends_the_others(self, folder: Folder, victim: bytes, code: int, node: str) -> None:
        """A rank, which both nodes notice; and the torchrun of a node."""
        ended = self.stopped(folder, signal.SIGKILL, victim)
        assert (ended.code, ended.leftover) == (code, []), ended.err + ended.out
        told = rf"error: node '{node}' ended with exit code {code}; the other node was told to end"
        assert re.search(told, ended.err), ended.err

    @pytest.mark.thorough
    def test_ctrl_c_ends_all(self, folder: Folder) -> None:
        ended = self.stopped(folder, signal.SIGINT, b"")
        assert (ended.code, ended.leftover) == (130, []), ended.err
        assert ended.last == "stopped by Ctrl-C"
        for node in ("n0", "n1"):
            assert re.search(rf"^{node}: .*stopped by SIGTERM after step \d+", ended.out, re.MULTILINE), ended.out
