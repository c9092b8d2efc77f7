"""For every test: hypothesis without a deadline, since other processes share the cores, and with the same instances in every run
(`--hypothesis-profile=fuzz` draws new ones); no GPU, so that a job runs on the CPU's devices where there is one, too (what a card
alone can show is in test_gpu.py); ranks that find this checkout from any folder (Python's fork server imports ahead only what it
finds by itself); Ctrl-C is heeded, which a shell ignores of what it runs in the background; commands run in this process; one
thread computes in each process, since idle ones of OpenMP's keep a core busy while they wait; and processes side by side find
compiled what numba compiles."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from hypothesis import settings

from tests.support.commands import ROOT, Command, Said, signals_kept
from tests.support.jobs import Folder

settings.register_profile("hetpipe", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("hetpipe")
signal.signal(signal.SIGINT, signal.default_int_handler)

if "HETPIPE_TEST_GPUS" not in os.environ:  # else a process of xdist's, to whose starter they were shown
    os.environ["HETPIPE_TEST_GPUS"] = json.dumps(os.environ.get("CUDA_VISIBLE_DEVICES"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
SHOWN: str | None = json.loads(os.environ["HETPIPE_TEST_GPUS"])  # the GPUs that were, by CUDA_VISIBLE_DEVICES

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")])
)


class Compiling:
    """What numba compiles, about a minute of work, is compiled while processes side by side collect their tests, and not in
    each of them and in what they start. None of them begins before."""

    CODE = """
from hetpipe.partitioners import auto
from hetpipe.predict import flows

auto.ready()
flows.ready()
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", self.CODE], cwd=ROOT)

    def pytest_xdist_node_collection_finished(self) -> None:
        assert self.process.wait() == 0, "numba could not compile"


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Compiling())


LONGEST = (  # 40 s of processor time and more
    "test_transparency.py",
    "test_failures.py",
    "test_pages.py",
    "test_one_process.py",
    "test_preferences.py",
    "test_zoo.py",
    "test_split_layers.py",
    "test_trainer.py",
    "test_checkpoint.py",
    "test_finetune_runs.py",
    "test_adapter_folders.py",
    "test_launch.py",
    "test_torchrun.py",
    "test_floor.py",
    "test_stopping.py",
)
assert all(Path(__file__).with_name(name).exists() for name in LONGEST)


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_of_another_file() -> None:
    """Which files share a process depends on how long each takes."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is thorough is slow, too, and left out with it."""
    if item.get_closest_marker("thorough"):
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then those with slow tests, then those with many, so that processes side by side end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = Counter(item.path for item in items)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path not in slow, -count[item.path], item.path))


@cache
def command_line() -> Callable[[], object]:
    """What typer makes of the app at each start, made once."""
    from hetpipe.cli import commands as cli

    return typer.main.get_command(cli.app)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Each test leaves them as they were."""
    with signals_kept():
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`hetpipe arguments…` in this process, as the shell would start it, but for the server of ranks, which tests share, and the
    lines of what takes a while, which depend on how busy the machine is."""
    from hetpipe.cli import commands as cli
    from hetpipe.cli import exits
    from hetpipe.files.screen import Screen
    from hetpipe.processes import progress
    from hetpipe.processes.whereabouts import resumes_from

    monkeypatch.setattr(cli, "start_server", lambda _: None)
    monkeypatch.setattr(exits, "end_server", lambda: None)
    monkeypatch.setattr(progress, "_said", None)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 600.0)

    def command(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["hetpipe", *map(str, arguments)])
        monkeypatch.setattr(cli, "out", Screen(width=200))
        monkeypatch.setattr(cli, "err", Screen(stderr=True, width=200))
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setenv("COLUMNS", "200")
        resumes_from("")  # as a process begins
        with pytest.raises(SystemExit) as ended:
            cli.main(command_line())
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Said(ended.value.code, captured.out, captured.err)

    return command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A current folder with job.yaml, cluster.yaml, plan.json and profile.json of a job that works."""
    monkeypatch.chdir(tmp_path)
    made = Folder(tmp_path)
    made.ready()
    return made
