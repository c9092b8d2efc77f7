"""The profiler: every layer's seconds and bytes, on the devices themselves. Layers that compute the same are of one kind
(`layers/untouched/kinds.py`), of which three are measured.

Times are medians over repeats after a warm-up: on a CPU of single actions, each after a short idle gap (a pipeline's ranks wait
between actions, and a hot loop would flatter small ones); on a card, which the host runs ahead of, of several without a pause.
Where a quota, or other work, stops a thread that works without gaps, they are its processor seconds, by as much longer as it is
stopped. Else a device that is more than 15 % slower without gaps (heat), by its heaviest layer, since of a small one cold caches
hide it, gets times that are so much longer.

In a lower precision, autocast is entered once for all that is timed of a layer, as it is for all micro-batches of a step: it
casts the layer's weights in the first forward, which is not timed. What that takes is timed with the optimizer's step, since both
are done once a step.
"""

from __future__ import annotations

import datetime
import platform
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hetpipe.documents.cluster import AdapterOf, LinkBetween
from hetpipe.documents.number_types import NumberTypes, Precision
from hetpipe.documents.profile import OptimizerProfile, Profile
from hetpipe.documents.profiles.lengths import LengthFactor
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.documents.profiles.overhead import DeviceOverhead
from hetpipe.files.messages import InputError, counted, cut
from hetpipe.layers.device import Emulation, module_bytes, one_thread, trained_bytes
from hetpipe.layers.model import Model, ShapedBatch, as_tuple, as_value, move, named_layers, numbers_of, sample_bytes
from hetpipe.layers.recipe import layer_on
from hetpipe.layers.shards.split import split_of
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.split import CARRY, skipping_layers
from hetpipe.layers.untouched.kept import kept
from hetpipe.layers.untouched.kinds import Kinds
from hetpipe.measuring.clock import Clock, stretch_of
from hetpipe.measuring.layer_run import LayerRun, busy_factor, loss_of, turn_seconds, without_history
from hetpipe.measuring.precision.casts import Copy, cast_again, kept_copies
from hetpipe.measuring.precision.layer_bytes import boundary_bytes, kinds_of, layer_profiles, saved_bytes, saved_bytes_somewhere
from hetpipe.processes.cards import begin_backward
from hetpipe.processes.progress import warn

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
Advance = Callable[[str], None]
HEAVIER = 1.5  # times as long as the heaviest layer before it


class _ShapeRun:
    """A micro-batch of samples of one shape on its way through the layers: what enters the next one, and seconds of each that
    was measured."""

    def __init__(self, model: Model, device: torch.device, batch: ShapedBatch) -> None:
        self.share, self.numbers = batch.share, numbers_of(batch.inputs)
        self.tensors, self.loss = as_tuple(move(batch.inputs, device)), loss_of(model, move(batch.targets, device))
        self.seconds = dict[int, float]()
        self.run: LayerRun

    def measure(
        self, layer: nn.Module, clock: Clock, index: int, size: int, repeats: int, *, last: bool
    ) -> list[tuple[float, float]]:
        """(forward, backward) seconds of each repeat of the next layer."""
        received = without_history(self.tensors)
        self.tensors = without_history(as_tuple(layer(as_value([t.clone() for t in received]))))
        if clock.device.type == "cuda":
            torch.cuda.synchronize(clock.device)  # a card says so later
        self.run = LayerRun(layer, received, self.loss if last else None)
        times = time_layer(self.run, clock, index, size, repeats)
        self.seconds[index] = statistics.median(f + b for f, b in times)
        return times


class _SizeRun:
    """One micro-batch size on its way through the layers: samples of each shape, and what was measured so far, the mean over
    their shares."""

    def __init__(self, model: Model, device: torch.device, size: int, *, paced: bool) -> None:
        batches = model.mix(size)
        if paced:  # an action lasts as long as the mean would: what is run meanwhile must not take longer
            batches = [min(batches, key=lambda batch: numbers_of(batch.inputs))._replace(share=1.0)]
        self.size, self.shapes = size, [_ShapeRun(model, device, batch) for batch in batches]
        self.forward = dict[int, float]()
        self.backward = dict[int, float]()
        self.spreads: list[float] = []
        self.latest_seconds = 0.0  # forward and backward of the layer that was measured last, with samples of the largest shape

    @property
    def run(self) -> LayerRun:
        """The last layer that was measured, on samples of the largest shape."""
        return self.shapes[0].run

    @property
    def text(self) -> str:
        """`1 sample`, `2 samples`."""
        return counted(self.size, "sample")

    def measure(self, name: str, layer: nn.Module, clock: Clock, index: int, repeats: int, *, last: bool) -> None:
        """Median forward and backward seconds of the next layer, and their relative spread."""
        try:
            found = [shape.measure(layer, clock, index, self.size, repeats, last=last) for shape in self.shapes]
        except torch.OutOfMemoryError:
            raise
        except (ValueError, IndexError, TypeError, RuntimeError) as error:  # BatchNorm's of a single value; a word out of range
            split = split_of(layer)
            who = type(layer).__name__ + (f", split over {split.group.degree} devices by its rule" if split is not None else "")
            raise InputError(
                f"layer {name!r} ({who}) does not run on a micro-batch of {self.text}, and plans may have such: "
                f"{type(error).__name__}: {cut(str(error))}"
            ) from error
        for seconds, way in ((self.forward, 0), (self.backward, 1)):
            medians = [statistics.median(pair[way] for pair in times) for times in found]
            seconds[index] = sum(shape.share * m for shape, m in zip(self.shapes, medians, strict=True))
        totals = sorted(f + b for f, b in found[0])
        self.latest_seconds = totals[len(totals) // 2]
        self.spreads.append((totals[-1] - totals[0]) / max(totals[len(totals) // 2], 1e-12))


def time_layer(run: LayerRun, clock: Clock, index: int, size: int, repeats: int) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each repeat; one before them warms up allocations and the parameters' first gradients."""
    times = []
    for _ in range(repeats + 1):
        if clock.device.type == "cuda":
            times.append(turn_seconds(run, clock.device))
            continue
        run.receive()
        times.append((clock.measure(run.forward, "F", index, size), clock.measure(run.backward, "B", index, size)))
    for parameter in run.layer.parameters():
        parameter.grad = None
    return times[1:]


@dataclass
class _OptimizerRun:
    """Median seconds of what each layer that was measured takes once a step, the optimizer's step and the casts of its
    parameters, and the bytes of the optimizer's state and of its parameters."""

    factory: OptimizerFactory
    seconds: dict[int, float] = field(default_factory=dict)
    state_bytes: dict[int, float] = field(default_factory=dict)
    parameter_bytes: dict[int, float] = field(default_factory=dict)
    held_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)  # of all parameters, trained or not; of buffers

    def measure(self, layer: nn.Module, copies: list[Copy], clock: Clock, index: int, repeats: int) -> None:
        """The next layer, of whose parameters autocast keeps these copies."""
        parameters = [p for p in layer.parameters() if p.requires_grad]
        took, state = _time_optimizer(parameters, copies, clock, index, self.factory, repeats) if parameters else (0.0, 0)
        self.seconds[index], self.state_bytes[index], self.parameter_bytes[index] = took, state, trained_bytes(parameters)
        self.held_bytes[index] = module_bytes(layer)

    def state_by_parameter(self, kinds: Kinds) -> float:
        """Bytes of the state of all layers, by those of their parameters."""
        return sum(kinds.spread(self.state_bytes)) / max(1.0, sum(kinds.spread(self.parameter_bytes)))


def _time_optimizer(
    parameters: list[nn.Parameter], copies: list[Copy], clock: Clock, index: int, factory: OptimizerFactory, repeats: int
) -> tuple[float, int]:
    """Median seconds of a step on one layer and of the casts that come with it, and the bytes of the optimizer's state; the
    parameters keep their values."""

    def once_a_step() -> None:
        optimizer.step()
        cast_again(copies)

    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = factory(parameters)
    optimizer.step()
    seconds = [clock.measure(once_a_step, "optimizer", index, 0) for _ in range(repeats)]
    tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.numel() > 1]
    with torch.no_grad():
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
            p.grad = None
    return statistics.median(seconds), sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A Measurement, with what came out beside it."""

    measurement: Measurement
    state_bytes_per_parameter_byte: float
    spread: float
    stretch: float  # of processor seconds, see `Clock`
    lengths: tuple[LengthFactor, ...] = ()


def measure_device(
    model: Model,
    device_type: str,
    device: torch.device,
    sizes: Sequence[int],
    optimizer: OptimizerFactory,
    *,
    repeats: int = 5,
    emulation: Emulation | None = None,
    processor_time: bool = False,
    advance: Advance = lambda _: None,
    precision: Precision | None = None,
    group: Group | None = None,
) -> Measured:
    """Measure the layers on one device, an emulated one, or in plain processor seconds (see `Clock`), one after the other, since
    each gets its values when its turn comes, and only then; of those of one kind a few, whose medians count for all. `advance`
    is called for every size of a layer and for its optimizer step. Sizes from the first that does not fit the memory are left
    out. `precision`: of matrix products; without one, as the model was built. `group`: of devices over which each layer is split,
    all of which call this; sums between them are part of the seconds."""
    types, kinds = NumberTypes.at(precision), kinds_of(model)
    for name in skipping_layers(model.layers):
        raise InputError(
            f"layer {name!r} is @skippable, so it cannot be measured without the other end of its connection. "
            f"Wrap the model with a plan of your own (hetpipe.wrap), or {CARRY}"
        )
    real = emulation is None and not processor_time and group is None  # members of a group do the same, or wait for ever
    clock = Clock(device, emulation, stretch_of(device) if real else 1.0 if processor_time else None)
    if group is not None and emulation is not None:
        group.paced = clock.pacer.meeting
    heaviest, factor, steps = 0.0, 1.0, _OptimizerRun(optimizer)
    runs = [_SizeRun(model, device, size, paced=emulation is not None) for size in sizes]
    begin_backward(device)
    with one_thread(device), kept(model.layers):
        for index in kinds.measured:
            name, layer = named_layers(model.layers)[index]
            last = index == len(model.layers) - 1
            with layer_on(model.layers, layer, device, types, group) as running:
                for number, run in enumerate(runs):
                    try:
                        run.measure(name, running, clock, index, repeats, last=last)
                    except torch.OutOfMemoryError:
                        if number == 0:
                            raise
                        del runs[number:]
                        break
                    advance(f"layer {index + 1} of {len(model.layers)} ({name}), {run.text}")
                middle = runs[len(runs) // 2]
                if real and clock.stretch is None and middle.latest_seconds > HEAVIER * heaviest:
                    heaviest = middle.latest_seconds
                    factor = busy_factor(middle.run, heaviest, device)
                copies = kept_copies(running, runs[0].run.look) if types.casts else []
                steps.measure(running, copies, clock, index, repeats)
            advance(f"layer {index + 1} of {len(model.layers)} ({name}), optimizer")
    stretch = clock.stretch or 1.0
    if factor * stretch > 1:
        warn(
            f"note: {device_type!r} takes {factor * stretch:.1f} times as long when it works without a pause (a CPU quota, heat "
            "or other work). The plan counts with that"
        )
    measurement = Measurement(
        device_type=device_type,
        tensor_parallel=group.degree if group is not None else 1,
        precision=precision,
        microbatch_sizes=tuple(run.size for run in runs),
        forward_seconds=tuple(tuple(kinds.spread(run.forward)) for run in runs),
        backward_seconds=tuple(tuple(kinds.spread(run.backward)) for run in runs),
        optimizer_seconds=tuple(kinds.spread(steps.seconds)),
    )
    if types.casts or group is not None:
        measurement = _with_bytes(measurement, model, device, types, group)
    if group is not None:
        held = [tuple(map(round, kinds.spread({i: own[at] for i, own in steps.held_bytes.items()}))) for at in (0, 1)]
        trained = tuple(map(round, kinds.spread(steps.parameter_bytes)))
        own = {"parameter_bytes": held[0], "trained_bytes": trained, "buffer_bytes": held[1]}
        measurement = measurement.model_copy(update=own)
    return Measured(
        measurement=measurement.slower(factor) if factor > 1 else measurement,
        state_bytes_per_parameter_byte=steps.state_by_parameter(kinds),
        spread=max(statistics.median(run.spreads) for run in runs),
        stretch=stretch,
        lengths=_length_factors(runs[len(runs) // 2], kinds),
    )


def _length_factors(run: _SizeRun, kinds: Kinds) -> tuple[LengthFactor, ...]:
    """By how much a micro-batch takes longer, or shorter, than the mean one: by the numbers of a sample's inputs."""
    found = [(shape.numbers, shape.share, sum(kinds.spread(shape.seconds))) for shape in run.shapes]
    mean = sum(share * seconds for _, share, seconds in found)
    if len(found) == 1 or mean <= 0:
        return ()
    return tuple(LengthFactor(numbers=numbers, factor=seconds / mean) for numbers, _, seconds in sorted(found))


def _with_bytes(
    measurement: Measurement, model: Model, device: torch.device, types: NumberTypes, group: Group | None
) -> Measurement:
    """With the own bytes of a lower precision, or of shards."""
    saved = saved_bytes_somewhere(model, device, types) if group is None else saved_bytes(model, device, types, group)
    leaving = boundary_bytes(model, device, types)[1:]
    return measurement.model_copy(
        update={
            "saved_bytes_per_sample": tuple(saved.per_sample),
            "first_saved_bytes_per_sample": tuple(saved.first),
            "output_bytes_per_sample": tuple(leaving),
            "cast_bytes": tuple(saved.cast) if types.casts else None,
        }
    )


def provenance(repeats: int, spread: float, **more: object) -> dict[str, object]:
    """Versions, host, date, repeats and spread of a measurement."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "repeats": repeats,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "relative_spread": round(spread, 4),
        **more,
    }


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sorted micro-batch sizes to measure; 1 is always one of them."""
    if any(size < 1 for size in sizes):
        raise InputError(f"micro-batch sizes must be at least 1, got {sorted(sizes)}")
    return tuple(sorted({1, *sizes}))


def assemble(
    model: Model,
    measurements: Sequence[Measurement],
    state: float,
    *,
    hosts: Sequence[Measurement] = (),
    lengths: Sequence[LengthFactor] = (),
    links: Sequence[LinkBetween] = (),
    adapters: Sequence[AdapterOf] = (),
    overheads: Sequence[DeviceOverhead] = (),
    notes: dict[str, object] | None = None,
    device: torch.device | None = None,
) -> Profile:
    """A Profile of measurements, with the model's bytes, counted on `device` (the CPU if none is given). `hosts`: this machine's
    plain speed, by which it emulates devices, at each precision and degree."""
    host = next((m for m in hosts if m.precision in (None, "fp32") and m.tensor_parallel == 1), None)
    layers, input_bytes = layer_profiles(model, device or torch.device("cpu"))
    return Profile(
        format="hetpipe.profile/1",
        model=model.name,
        layers=layers,
        measurements=tuple(measurements),
        links=tuple(links),
        adapters=tuple(adapters),
        overheads=tuple(overheads),
        optimizer=OptimizerProfile(state_bytes_per_parameter_byte=state),
        input_bytes_per_sample=input_bytes,
        target_bytes_per_sample=sample_bytes(model.targets),
        host=host,
        hosts=tuple(m for m in hosts if m is not host) or None,
        lengths=tuple(lengths) or None,
        provenance=notes or {},
    )


def profile_model(
    model: Model,
    *,
    device_type: str | None = None,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    repeats: int = 5,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    device: torch.device | None = None,
    advance: Advance = lambda _: None,
) -> Profile:
    """Measure `model` on one device of this machine (a GPU if there is one). `device_type` is its name in the profile."""
    if device is None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    name = device_type or default_type_name(device)
    measured = measure_device(model, name, device, check_sizes(microbatch_sizes), optimizer, repeats=repeats, advance=advance)
    return assemble(
        model,
        [measured.measurement],
        measured.state_bytes_per_parameter_byte,
        lengths=measured.lengths,
        notes=provenance(repeats, measured.spread, measured_layers=list(kinds_of(model).measured)),
        device=device,
    )


def default_type_name(device: torch.device) -> str:
    """A device type's name on a machine without a cluster file: the GPU's own, or cpu."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return "cpu"
