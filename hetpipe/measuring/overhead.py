"""What the framework takes beside layers: seconds of an action, bytes of a card; how fast a device and its host's memory exchange
bytes; and whether such copies, and transfers, hide behind compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.layers.device import Stopwatch, one_thread
from hetpipe.layers.host.copies import Copies
from hetpipe.layers.model import Model, Tensors, Wanted, as_tuple, move, named_layers
from hetpipe.layers.recipe import layer_on, make_stage
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.untouched.kept import kept
from hetpipe.measuring.layer_run import LayerRun, turn_seconds
from hetpipe.measuring.traffic import Flow, message_device
from hetpipe.processes.world import World
from hetpipe.runtime.recorder import Recorder
from hetpipe.runtime.replicas import Lanes
from hetpipe.runtime.stages.executor import StageRun
from hetpipe.runtime.stages.transfers import Room, Side

REPEATS, MICROBATCHES = 7, 32
CPU_WIDTH, CUDA_WIDTH = 8, 2048  # of the layer by which actions are timed: on a card one to hide behind
STAGE_DEPTH, STAGE_PART = 3, 0.5  # of the stage by which the allocator is measured: in flight, and of the free memory
OVERLAP_SECONDS, OVERLAP_REPEATS, OVERLAP_WIDTH = 0.1, 7, 256
PIECES, PIECE_BYTES = 8, 4 * 2**20  # that are copied at once: about what layers save
ALONE = Lanes(None, None)  # type: ignore[arg-type]  # a pipeline of one stage sends nothing


class Figure(NamedTuple):
    """A figure, and its spread over it."""

    value: float
    relative_spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figure:
        """The median."""
        middle = statistics.median(seconds)
        return cls(middle, (max(seconds) - min(seconds)) / middle)


def device_overhead(model: Model, device_type: str, device: torch.device, size: int, stretch: float = 1.0) -> DeviceOverhead:
    """What can be measured of one device alone. On a card after its layers were measured, so that their kernels are there. On a
    processor its seconds last `stretch` times as long."""
    action = action_seconds(device)
    found = {"action_seconds": action._replace(value=stretch * action.value), **host_copies(device)}
    rate = found["host_bytes_per_second"]
    found["host_bytes_per_second"] = rate._replace(value=rate.value / stretch)
    if device.type == "cuda":
        found["device_bytes"] = context_bytes(device)
        factor = allocator_factor(model, device, size)
        found |= {"allocator_factor": factor} if factor is not None else {}
    return with_found(DeviceOverhead(device_type=device_type), found)


def with_found(overhead: DeviceOverhead, found: Mapping[str, Figure]) -> DeviceOverhead:
    """This, and what was found by the names of its fields."""
    values = {name: round(x.value) if name.endswith("_bytes") else x.value for name, x in found.items()}
    spread = {name: round(x.relative_spread, 4) for name, x in found.items()}
    return overhead.model_copy(update={**values, "relative_spread": {**overhead.relative_spread, **spread}})


def action_seconds(device: torch.device) -> Figure:
    """What the engine adds to a forward or a backward: a stage of one layer for many micro-batches, less the layer alone as the
    profiler times it. On a CPU the thread's own processor time, which other work does not lengthen; on a card the
    layer is long enough for the host to run ahead, as it does in training. The spread is that of the stage's seconds."""
    width = CPU_WIDTH if device.type == "cpu" else CUDA_WIDTH
    layers, inputs = nn.Sequential(nn.Linear(width, width)).to(device), torch.ones(width, width, device=device)
    on_cpu, wholes, parts = device.type == "cpu", list[float](), list[float]()
    timed = _processor_seconds if on_cpu else Stopwatch(device).measure
    with one_thread(device):
        run = _stage_run(layers, inputs, device, MICROBATCHES, depth=1)
        alone = LayerRun(layers[0], (inputs,), lambda output: as_tuple(output)[0].sum())
        for repeat in range(1 + REPEATS):
            whole = timed(lambda: run([inputs] * MICROBATCHES)) / MICROBATCHES
            part = _median_alone(alone) if on_cpu else sum(turn_seconds(alone, device))
            if repeat > 0:  # the first warms up
                wholes.append(whole)
                parts.append(part)
    found = Figure.of(wholes)
    return Figure(max(0.0, found.value - statistics.median(parts)) / 2, found.relative_spread)


def _median_alone(run: LayerRun) -> float:
    seconds = []
    for _ in range(MICROBATCHES):
        run.receive()
        seconds.append(_processor_seconds(run.forward) + _processor_seconds(run.backward))
    return statistics.median(seconds)


def _processor_seconds(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


def _stage_run(
    layers: nn.Sequential, inputs: Tensors, device: torch.device, count: int, *, depth: int
) -> Callable[[Sequence[Tensors]], object]:
    """A function that trains all layers, as the only stage of a pipeline, on `count` micro-batches."""

    def loss(output: Tensors, _: Wanted) -> Tensor:
        return torch.stack([t.float().sum() for t in as_tuple(output)]).sum()

    ends, recorder = trace_boundaries(layers, inputs, device), Recorder(device)
    run = StageRun(
        make_stage(layers, 0, len(layers), device),
        index=0,
        stages=1,
        sides=(Side(()), Side(())),
        lanes=ALONE,
        rooms=(Room(device, None), Room(device, None)),
        sizes=[1] * count,
        depths=[depth],
        recorder=recorder,
        loss=loss,
        last_backward=lambda: None,
    )
    nothing: Sequence[Wanted] = [None] * count  # type: ignore[list-item]

    def train(microbatches: Sequence[Tensors]) -> None:
        recorder.begin_step()
        run.run([(ends[0], ends[-1])] * count, microbatches, nothing)
        recorder.end_step()

    return train


def context_bytes(device: torch.device) -> Figure:
    """What the driver shows of a card beyond what torch's allocator has. Other processes on the card are in it."""
    free, total = torch.cuda.mem_get_info(device)
    return Figure(max(0, total - free - torch.cuda.memory_reserved(device)), 0.0)


def allocator_factor(model: Model, device: torch.device, size: int) -> Figure | None:
    """Bytes that the allocator holds at most over those in use at most, while a stage of as many of the first layers as fit half
    of the free memory is trained for a few micro-batches. None where not even one layer fits."""
    layers = named_layers(model.layers)
    inputs = move(model.sample(size)[0], device)
    with kept(model.layers):
        for count in (len(layers), len(layers) // 2, len(layers) // 4, 1):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            try:
                with ExitStack() as stack:
                    first = [layer for _, layer in layers[: max(1, count)]]
                    some = nn.Sequential(*(stack.enter_context(layer_on(model.layers, layer, device)) for layer in first))
                    if torch.cuda.memory_allocated(device) > STAGE_PART * torch.cuda.mem_get_info(device)[0]:
                        continue
                    _stage_run(some, inputs, device, 2 * STAGE_DEPTH, depth=STAGE_DEPTH)([inputs] * 2 * STAGE_DEPTH)
                    most, used = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
                    return Figure(max(1.0, most / max(used, 1)), 0.0)
            except torch.OutOfMemoryError:
                continue
            finally:
                for parameter in model.layers.parameters():
                    parameter.grad = None
                torch.cuda.empty_cache()
    return None


def host_copies(device: torch.device) -> dict[str, Figure]:
    """Bytes/s of copies to the host's memory and back, the mean of both ways, and on a card which part of them is hidden behind
    compute (see `hidden_part`). An emulated device's are those of this host, which nothing slows down."""
    copies, pieces = Copies(device), [torch.ones(PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(PIECES)]

    def copy(meanwhile: Callable[[], object] = lambda: None) -> None:
        hosts, event = copies.out(pieces)
        meanwhile()
        copies.wait(event)
        _, event = copies.back(hosts)
        meanwhile()
        copies.wait(event)

    with one_thread(device):
        copy()  # the first allocates
        found = Figure.of([Stopwatch(device).measure(copy) for _ in range(REPEATS)])
        rates = {"host_bytes_per_second": found._replace(value=2 * PIECES * PIECE_BYTES / found.value)}
        return rates | ({"host_copy_overlap": _hidden_copies(device, copy, found.value)} if device.type == "cuda" else {})


def _hidden_copies(device: torch.device, copy: Callable[..., None], seconds: float) -> Figure:
    """Which part of copies that take so many seconds is hidden behind products of matrices that take about as long."""
    watch, square, rounds = Stopwatch(device), torch.ones(CUDA_WIDTH, CUDA_WIDTH, device=device), 1

    def compute() -> None:
        for _ in range(rounds):
            square.mm(square)

    def twice() -> None:
        compute()
        compute()

    compute()  # the first loads a library
    rounds = max(1, round(seconds / 2 / max(watch.measure(compute), 1e-9)))
    return hidden_part(
        [(watch.measure(twice), watch.measure(copy), watch.measure(lambda: copy(compute))) for _ in range(REPEATS)]
    )


def hidden_part(times: Sequence[tuple[float, float, float]]) -> Figure:
    """Of trials (seconds of computing, of moving bytes, of both at once) which part of the shorter was hidden behind the longer.
    Of each the least, which other work on the machine disturbed least; the spread is that of the seconds."""
    computing, moving, at_once = (min(column) for column in zip(*times, strict=True))
    hidden = (computing + moving - at_once) / min(computing, moving)
    spread = max((max(column) - min(column)) / statistics.median(column) for column in zip(*times, strict=True))
    return Figure(min(1.0, max(0.0, hidden)), spread)


def communicator_bytes(world: World) -> int | None:
    """Bytes that one NCCL communicator of all ranks takes of this rank's card. None without NCCL. Collective."""
    device = message_device()
    if world.size < 2 or not all(world.gather(device.type == "cuda")):
        return None
    group = dist.new_group(list(world.ranks), backend="nccl")
    torch.cuda.synchronize(device)
    before = torch.cuda.mem_get_info(device)[0]
    dist.all_reduce(torch.zeros(2**20, device=device), group=group)
    torch.cuda.synchronize(device)
    after = torch.cuda.mem_get_info(device)[0]
    dist.destroy_process_group(group)
    return max(0, before - after)


def transfer_overlap(world: World, flow: Flow, bytes_per_second: float) -> Figure | None:
    """Which part of a transfer is hidden behind compute, or of compute behind it, whichever is shorter, when a rank sends and
    another receives while both compute: 1 if both at once take as long as the longer, 0 if as long as one after
    the other. Collective; None but on these two."""
    world.barrier()
    if world.rank not in flow:
        return None
    device = message_device()
    message = torch.zeros(int(OVERLAP_SECONDS * bytes_per_second) + 1, dtype=torch.uint8, device=device)
    square = torch.ones(OVERLAP_WIDTH, OVERLAP_WIDTH, device=device)

    def move_message() -> dist.Work | None:
        return dist.isend(message, flow.target) if world.rank == flow.source else dist.irecv(message, flow.source)

    def send() -> None:
        work = move_message()
        assert work is not None
        work.wait()

    def compute() -> None:
        for _ in range(rounds):
            square.mm(square)

    def both() -> None:
        work = move_message()
        assert work is not None
        compute()
        work.wait()

    def seconds(action: Callable[[], object]) -> float:
        together = torch.zeros(1, device=device)
        (dist.send if world.rank == flow.source else dist.recv)(together, flow[world.rank == flow.source])
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    with one_thread(device):
        rounds = 64
        compute()
        rounds = max(1, round(64 * OVERLAP_SECONDS / max(seconds(compute), 1e-9)))
        times = [(seconds(compute), seconds(send), seconds(both)) for _ in range(OVERLAP_REPEATS)]
    return hidden_part(times)
