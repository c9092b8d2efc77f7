"""What does hetpipe's engine cost a step, beside a loop written by hand?

    python -m bench.overhead.run [--old CHECKOUT] [--models gpt,…] [--layouts pipeline,…] [--rounds N] [--json] [--readme]

Real clocks, nothing emulated. Each contender (see contenders.py) has processes of its own; those of all contenders of a case
live at the same time, and take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast, get_args

import typer
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.apart import ROOT
from bench.overhead.contenders import SHAPES, Case, Layout
from bench.tables import chosen, environment, markdown, replace_table
from hetpipe.cli.commands import main
from hetpipe.files.messages import InputError
from hetpipe.processes.progress import Activity

HERE = Path(__file__).resolve()
OURS = "hetpipe"
TOLERANCE = 1e-5  # of the losses, relative
LEAST_STEPS = 3  # of a block
END_SECONDS = 10.0  # for a rank that was told to end


# glibc gives freed memory back to the kernel, and takes it again page by page, by what happens to lie at the end of the heap: up
# to a sixth of a step, for one contender or the other.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}


class Block(NamedTuple):
    """Seconds of a step, until the last rank is done; processor seconds of a step, of all ranks."""

    seconds: float
    processor_seconds: float


class Group:
    """The ranks of a contender, `kind` of contenders.py, with the hetpipe of the checkout `root`."""

    def __init__(self, kind: str, case: Case, root: Path) -> None:
        self.size, self.root, self._said = len(case.devices), root, tempfile.TemporaryFile("w+")  # noqa: SIM115 - it ends with the group
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, str(HERE.with_name("contenders.py")), kind, case.model, case.layout]
        self._ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **self._environment(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                bufsize=1,
            )
            for rank in range(self.size)
        ]

    def _environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set, and where hetpipe is."""
        size = str(self.size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(self.root),
            **KEEP_MEMORY,
        }

    def _answers(self) -> list[Any]:
        lines = []
        for rank in self._ranks:
            assert rank.stdout is not None
            lines.append(rank.stdout.readline())
        if not all(lines):
            self.close()
            self._said.seek(0)
            raise RuntimeError(f"a rank ended with a hetpipe of {self.root}:\n{self._said.read()[-3000:]}")
        return [json.loads(line) for line in lines]

    def losses(self) -> list[float]:
        """The whole loss of each step of the check."""
        answers = self._answers()
        homes = {answer["home"] for answer in answers}
        if homes != {str(self.root)}:
            raise RuntimeError(f"ranks that were to import hetpipe from {self.root} did so from {sorted(homes)}")
        return [sum(parts) for parts in zip(*(answer["losses"] for answer in answers), strict=True)]

    def block(self, steps: int) -> Block:
        """Take so many steps."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        walls, processors = zip(*self._answers(), strict=True)
        return Block(max(walls) / steps, sum(processors) / steps)

    def close(self) -> None:
        """Every process is gone when this returns."""
        for rank in self._ranks:
            assert rank.stdin is not None
            with suppress(BrokenPipeError):
                rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


class Spread(NamedTuple):
    """Of a number that was taken in each block."""

    median: float
    lower_quartile: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, lower, upper)

    def shown(self, digits: int) -> str:
        """`1.05 (1.02 to 1.09)`."""
        return f"{self.median:,.{digits}f} ({self.lower_quartile:,.{digits}f} to {self.upper_quartile:,.{digits}f})"


class Comparison(NamedTuple):
    """hetpipe beside another contender in one case: what a step takes, hetpipe's over the other's of the same round, of time and
    of processor time; the processor time of a rank; and what hetpipe's step takes more for each action (forward or backward of a
    micro-batch) of a rank, of time and of processor time."""

    model: str
    layout: str
    other: str
    actions: int
    step_microseconds: Spread
    other_step_microseconds: Spread
    ratio: Spread
    processor_ratio: Spread
    processor_microseconds: Spread
    other_processor_microseconds: Spread
    action_microseconds: Spread
    other_action_microseconds: Spread
    extra_action_microseconds: Spread
    extra_action_processor_microseconds: Spread


def compared(case: Case, other: str, ours: Sequence[Block], theirs: Sequence[Block]) -> Comparison:
    """One block a round of each."""
    pairs = list(zip(ours, theirs, strict=True))
    steps = [[1e6 * block.seconds for block in blocks] for blocks in (ours, theirs)]
    actions = [[step / case.actions for step in row] for row in steps]
    return Comparison(
        case.model,
        case.layout,
        other,
        case.actions,
        Spread.of(steps[0]),
        Spread.of(steps[1]),
        Spread.of([a.seconds / b.seconds for a, b in pairs]),
        Spread.of([a.processor_seconds / b.processor_seconds for a, b in pairs]),
        Spread.of([1e6 * block.processor_seconds / len(case.devices) for block in ours]),
        Spread.of([1e6 * block.processor_seconds / len(case.devices) for block in theirs]),
        Spread.of(actions[0]),
        Spread.of(actions[1]),
        Spread.of([a - b for a, b in zip(*actions, strict=True)]),
        Spread.of([1e6 * (a.processor_seconds - b.processor_seconds) / len(case.devices) / case.actions for a, b in pairs]),
    )


def check_losses(case: Case, losses: Mapping[str, Sequence[float]]) -> None:
    """RuntimeError unless all contenders have the losses of hetpipe in each step."""
    for name, row in losses.items():
        for step, (own, wanted) in enumerate(zip(row, losses[OURS], strict=True)):
            if not abs(own - wanted) <= TOLERANCE * abs(wanted):
                where = f"{case.model}, {case.layout}, step {step}"
                raise RuntimeError(f"{where}: the loss of {name!r} is {own!r}, that of {OURS!r} {wanted!r}")


def measure(case: Case, old: Path | None, rounds: int, block_seconds: float, activity: Activity) -> dict[str, list[Block]]:
    """One block a round of each contender, `block_seconds` long for the slowest of them."""
    title = f"{case.model}, {case.layout}"
    with ExitStack() as stack:
        groups = {OURS: Group("hetpipe", case, ROOT)} | {name: Group(name, case, ROOT) for name in case.others}
        if old is not None:
            groups["old hetpipe"] = Group("hetpipe", case, old)
        for group in groups.values():
            stack.callback(group.close)
        activity.say(f"{title}: starting {len(groups)} contenders")
        check_losses(case, {name: group.losses() for name, group in groups.items()})
        slowest = max(group.block(LEAST_STEPS).seconds for group in groups.values())
        steps = max(LEAST_STEPS, round(block_seconds / slowest))
        found: dict[str, list[Block]] = {name: [] for name in groups}
        for _ in range(rounds):
            for name, group in groups.items():
                found[name].append(group.block(steps))
                activity.advance(f"{title}: {name}, {1e3 * found[name][-1].seconds:.3g} ms a step")
    return found


def page(rows: Sequence[Comparison], where: str) -> str:
    """The table of the page: medians, in brackets the quartiles over rounds."""
    names = ["model", "layout", "beside", "ms a step", "ratio", "processor ratio", "extra µs an action", "of a processor"]
    cells = [
        [
            row.model,
            row.layout,
            row.other,
            f"{row.step_microseconds.median / 1e3:,.2f}",
            row.ratio.shown(2),
            row.processor_ratio.shown(2),
            f"{row.extra_action_microseconds.median:,.0f}",
            row.extra_action_processor_microseconds.shown(0),
        ]
        for row in rows
    ]
    return f"{where}.\n\n{markdown(names, cells, words=3)}"


def run(
    old: Annotated[Path | None, typer.Option(help="A checkout of an earlier hetpipe, to compare with as well.")] = None,
    models: str = ",".join(SHAPES),
    layouts: str = ",".join(get_args(Layout)),
    rounds: Annotated[int, typer.Option(min=2, help="Blocks of each contender.")] = 15,
    block_seconds: Annotated[float, typer.Option(help="About how long a block lasts.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    readme: Annotated[bool, typer.Option("--readme", help="Put the table into README.md beside this file.")] = False,
) -> None:
    """Compare and print."""
    if old is not None and not (old / "hetpipe" / "__init__.py").is_file():
        raise InputError(f"--old: there is no hetpipe in {old}")
    checkout = old.resolve() if old is not None else None
    kinds, names = chosen("--layouts", layouts, get_args(Layout)), chosen("--models", models, list(SHAPES))
    cases = [Case(model, cast(Layout, layout)) for layout in kinds for model in names]
    where, rows = environment(), list[Comparison]()
    blocks = rounds * sum(1 + len(case.others) + (checkout is not None) for case in cases)
    with Activity("bench/overhead", total=blocks) as activity:
        for case in cases:
            found = measure(case, checkout, rounds, block_seconds, activity)
            rows += [compared(case, name, found[OURS], theirs) for name, theirs in found.items() if name != OURS]
    if readme:
        replace_table(HERE.with_name("README.md"), "table", page(rows, where))
    if as_json:
        nested = [{key: v._asdict() if isinstance(v, Spread) else v for key, v in row._asdict().items()} for row in rows]
        ratios = {f"hetpipe over {row.other}, {row.model}, {row.layout}": row.ratio.median for row in rows}
        sys.stdout.write(json.dumps({"environment": where, "ratios": ratios, "comparisons": nested}, indent=1) + "\n")
    else:
        print(page(rows, where))


if __name__ == "__main__":
    main(lambda: typer.run(run))
